"""The folder of a run: one run's, one process's; interrupted work is repeated."""

import concurrent.futures
import contextlib
import gc
import itertools
import json
import os
import stat
import subprocess
import sys
import threading

import pytest

from crash_rigs import ROOT, Witness, ending, train_until
from jaxdp_episodic.trainer.learners.learners import ProtoNet
from jaxdp_episodic.trainer.run import run_files, trainer
from jaxdp_episodic.trainer.run.ledger_file import read_ledger
from jaxdp_episodic.trainer.run.mechanisms import GradientStep
from jaxdp_episodic.trainer.run.run_files import HELD_OUT, STORE, read_log
from jaxdp_episodic.trainer.run.store import RunStore, create_store
from training_runs import BINS, Interrupted, assert_same, held_out, plain_trainer

# --- Interrupted evaluations, starts and threads ---


def broken_off(which):
    """An evaluation that is interrupted at one call."""
    evaluation = held_out()
    evaluation.episodes = Interrupted(evaluation.episodes, which)
    return evaluation


def test_failures_leave_no_thread_running(tmp_path):
    """The garbage collector could join a thread that waits for a lock."""

    def broken(*_):
        raise RuntimeError("device lost")

    evaluation, learner = held_out(), ProtoNet(broken, ways=3)
    run = plain_trainer()
    run.sampler.draw = broken
    for act in (
        lambda: plain_trainer().train(tmp_path / "step", on_step=broken),
        lambda: run.train(tmp_path / "draw"),
        lambda: evaluation(learner, {}),
    ):
        with pytest.raises(RuntimeError, match="device lost") as caught:
            act()
        assert caught.tb is not None  # keeps the frames and their objects alive
        assert not [t for t in threading.enumerate() if t.name.startswith("draw")]


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("which", [1, 2])
def test_an_interrupted_evaluation_is_repeated(tmp_path, which, same):
    """The first one leaves a folder to resume; the last one's score is there later."""
    whole, folder, run = plain_trainer(), tmp_path / "parts", plain_trainer()
    whole.train(tmp_path / "whole", evaluations={"validation": held_out()})
    with pytest.raises(KeyboardInterrupt):
        run.train(folder, evaluations={"validation": broken_off(which)})
    if not same:
        run = plain_trainer()
        assert run.resume(folder) == (0 if which == 1 else 6)
    run.train(folder, evaluations={"validation": held_out()})
    assert run.num_steps_taken == 6
    assert_same(run, whole)
    logs = [read_log(path) for path in (tmp_path / "whole", folder)]
    scores = [[(r["step"], r[HELD_OUT]) for r in log if HELD_OUT in r] for log in logs]
    assert scores[0] == scores[1] and [step for step, _ in scores[1]] == [0, 6]


def test_an_interrupted_start_can_be_repeated(tmp_path):
    """A file without charges and states is not a run."""
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        plain_trainer().resume(tmp_path)
    create_store(tmp_path / STORE, plain_trainer().budget, is_seeded=False)
    plain_trainer().train(tmp_path)
    assert [record["step"] for record in read_log(tmp_path)] == list(range(7))


# --- One run, one folder, one process ---


@pytest.mark.parametrize("left", [STORE, "log.jsonl", "checkpoints"])
def test_a_folder_of_another_run_is_refused(tmp_path, left):
    """Also one with files of version 0.2."""
    if left == STORE:
        plain_trainer(seed=None, num_steps=1).train(tmp_path)
    elif left == "checkpoints":
        (tmp_path / left / "3").mkdir(parents=True)
    else:
        (tmp_path / left).write_text("{}")
    other = plain_trainer(seed=None)
    with pytest.raises(FileExistsError, match=f"holds a run.*{left}"):
        other.train(tmp_path)
    assert other.num_steps_taken == 0


def test_a_run_has_one_folder_and_resuming_forgets_no_steps(tmp_path):
    run = train_until(2, plain_trainer(num_steps=3), tmp_path / "own")
    with pytest.raises(ValueError, match="folder must be the run's own, .*own, got"):
        run.train(tmp_path / "other")
    with pytest.raises(ValueError, match="resume must come before .* charged 2"):
        run.resume(tmp_path / "own")
    run.train(tmp_path / "own")
    assert run.num_steps_taken == run.num_steps_charged == 3
    other = plain_trainer(num_steps=3, folder=tmp_path / "other")
    with ending(RunStore, "charge", 1):
        other.step()  # its folder stays open
    with pytest.raises(BlockingIOError, match="in use by this process"):
        plain_trainer(num_steps=3, folder=tmp_path / "other").step()
    with pytest.raises(ValueError, match="resume must come before .* charged 0"):
        other.resume(tmp_path / "own")


def test_files_of_a_run_are_private_to_their_owner(tmp_path):
    def look(progress):
        seen.update({path.name: path.stat().st_mode for path in tmp_path.iterdir()})

    seen = {}
    plain_trainer(step=BINS).train(tmp_path, on_step=look)
    assert {n for n in seen if n[0] == "r"} == {STORE, f"{STORE}-wal", f"{STORE}-shm"}
    assert all(stat.S_IMODE(mode) == 0o600 for mode in seen.values())
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "run.sqlite"}


HOLD = """
import sys
from pathlib import Path
from jaxdp_episodic.files import atomic

# What a run takes; without all that training imports.
with atomic.locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_locked_by_one_process(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    where = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipe, run = subprocess.PIPE, plain_trainer()
    with subprocess.Popen(
        command, env=where, text=True, stdin=pipe, stdout=pipe
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError, match=f"another process .{other.pid}"):
            run.train(tmp_path)
        assert run.num_steps_taken == 0
        other.communicate("")
    run.train(tmp_path)
    with run_files.locked(tmp_path, lends=True), run_files.locked(tmp_path):
        with pytest.raises(BlockingIOError, match="in use by this process"):
            run.train(tmp_path)  # only one trainer may use the lock


def test_steps_by_hand_are_stored_in_the_given_folder(tmp_path):
    folder = tmp_path / "run"
    run = plain_trainer(num_steps=3, folder=folder)
    for number in (1, 2):
        run.step()
        content = read_ledger(folder)
        assert (content.charged, content.is_closed) == (number, False)
    files = run.release(tmp_path / "release")
    assert json.loads(files[3].read_text())["steps"] == 2
    lines = files[2].read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    assert read_ledger(folder).is_closed
    run.step()  # reopens it
    run.close()
    with contextlib.closing(RunStore(folder / STORE)) as file:
        assert file.saved().taken == 3 and not list(file.releases(after=0))
    with pytest.raises(trainer.BudgetExhaustedError):
        run.step()  # does not
    again = plain_trainer(num_steps=3, folder=folder)
    assert again.resume(folder) == 3
    assert_same(run, again)
    killed = plain_trainer(num_steps=3, folder=tmp_path / "killed")
    with ending(GradientStep, "apply", 2):  # the first one is in the dry run
        killed.step()
    killed.step()  # applies the release, and takes the next step
    del killed
    gc.collect()
    again = plain_trainer(num_steps=3)
    assert again.resume(tmp_path / "killed") == 2
    again.step()  # a folder that was resumed is the trainer's own
    assert read_ledger(tmp_path / "killed").charged == 3
    with pytest.raises(ValueError, match="a Trainer with a folder: the log is"):
        plain_trainer().release(tmp_path)
    with pytest.raises(ValueError, match="must not be a run's, which is private"):
        run.release(folder)


def test_what_a_step_calls_takes_no_step(tmp_path, monkeypatch):
    """A step within one was charged once and released, and could be applied twice."""

    def within(*args):
        for act in (run.step, run.close, lambda: run.resume(tmp_path)):
            with pytest.raises(RuntimeError, match="what a step calls .* must not"):
                act()
        return release(*args)

    run, release = plain_trainer(folder=tmp_path), GradientStep.release
    monkeypatch.setattr(GradientStep, "release", within)
    run.step()
    assert run.num_steps_taken == read_ledger(tmp_path).charged == 1
    run, started = plain_trainer(num_steps=3), concurrent.futures.ThreadPoolExecutor
    witness = Witness(monkeypatch)

    def elsewhere(*args):
        with started(1) as pool, pytest.raises(RuntimeError, match="other thread"):
            pool.submit(run.step).result()
        return release(*args)

    monkeypatch.setattr(GradientStep, "release", elsewhere)
    run.step()  # by hand
    run.train(tmp_path / "train")
    started(1).submit(run.close).result()  # after its end
    assert len(witness.noise) == run.num_steps_taken == run.num_steps_charged == 3


@pytest.mark.slow
def test_a_resume_interrupted_at_any_line_draws_no_new_epoch(tmp_path):
    """A unit could take part in the running one twice."""
    train_until(2, plain_trainer(step=BINS, seed=None), tmp_path)
    for place in itertools.count(1):
        run, lines = plain_trainer(step=BINS, seed=None), itertools.count(1)

        def interrupt(frame, event, _, lines=lines, place=place):
            if event == "line" and next(lines) == place:
                raise KeyboardInterrupt
            return interrupt if frame.f_code.co_filename == trainer.__file__ else None

        sys.settrace(interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            run.resume(tmp_path)
            break
        sys.settrace(None)
        with contextlib.suppress(ValueError):  # resume did not end
            run.draw_blocks(3)
            assert run.num_steps_charged == 0 or run._main.draws._written_epoch == 0
    sys.settrace(None)
    assert place > 40
