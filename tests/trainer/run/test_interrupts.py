"""Interrupted runs can be resumed, and a folder holds one run only."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxdp_episodic.trainer.learners.learners import ProtoNet
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.evaluation import Evaluation
from jaxdp_episodic.trainer.run.run_files import HELD_OUT, read_log
from jaxdp_episodic.trainer.run.store import create_store
from training_runs import Interrupted, assert_same, classes, trainer

TESTS = Path(__file__).resolve().parents[2]


def steps_in(folder):
    return [record["step"] for record in read_log(folder / run_files.STORE)]


def held_out():
    data = classes(seed=9)
    return {"validation": Evaluation(data, ways=3, shots=1, queries=2, num_episodes=20)}


def broken_off(which):
    """An evaluation that is interrupted at one call."""
    evaluation = held_out()["validation"]
    evaluation.episodes = Interrupted(evaluation.episodes, which)
    return evaluation


def started(run, folder):
    """The folder of a run that has taken no step."""
    with pytest.raises(KeyboardInterrupt):
        run.train(folder, evaluations={"test": broken_off(1)})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, and its folder."""
    run, folder = trainer(), tmp_path_factory.mktemp("whole")
    run.train(folder, evaluations=held_out())
    return run, folder


def test_failures_leave_no_thread_running(tmp_path):
    """The garbage collector could join a thread that waits for a lock."""

    def broken(*_):
        raise RuntimeError("device lost")

    evaluation, learner = held_out()["validation"], ProtoNet(broken, ways=3)
    for act in (
        lambda: trainer().train(tmp_path, on_step=broken),
        lambda: evaluation(learner, {}),
    ):
        with pytest.raises(RuntimeError, match="device lost") as caught:
            act()
        assert caught.tb is not None  # keeps the frames and their objects alive
        assert not [t for t in threading.enumerate() if t.name.startswith("draw")]


@pytest.mark.few(1)
@pytest.mark.parametrize("attribute", ["gradient", "update"])
@pytest.mark.parametrize(
    "again", ["a new trainer", pytest.param("the same", marks=pytest.mark.slow)]
)
def test_an_interrupted_step_is_taken_again(tmp_path, whole, attribute, again):
    """The committed state counts the steps it contains."""
    folder, run = tmp_path / "parts", trainer()
    function = getattr(run._main, attribute)
    # The dry run updates once, on zeros, without a gradient.
    call = 4 if attribute == "update" else 3
    setattr(run._main, attribute, Interrupted(function, call))
    with pytest.raises(KeyboardInterrupt):
        run.train(folder, evaluations=held_out(), checkpoint_every=100)
    assert run.num_steps_charged == 3 and run.num_steps_taken == 2
    if again == "a new trainer":
        run = trainer()
        # The file has a release that the optimizer has not applied.
        assert run.resume(folder) == (2 if attribute == "gradient" else 3)
    run.train(folder, evaluations=held_out())
    assert_same(run, whole[0])
    assert run.num_steps_charged == run.num_steps_taken == 6
    assert steps_in(folder) == list(range(7))


@pytest.mark.parametrize(
    ("same", "which"),
    [
        (False, 1),
        (True, 2),
        pytest.param(True, 1, marks=pytest.mark.slow),
        pytest.param(False, 2, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_evaluation_is_repeated(tmp_path, whole, which, same):
    """The first one leaves a folder to resume; the last one's score is there later."""
    folder, run = tmp_path / "parts", trainer()
    with pytest.raises(KeyboardInterrupt):
        run.train(folder, evaluations={"validation": broken_off(which)})
    again = run
    if not same:
        again = trainer()
        assert again.resume(folder) == (0 if which == 1 else 6)
    again.train(folder, evaluations=held_out())
    assert again.num_steps_taken == 6
    assert_same(again, whole[0])
    logs = [read_log(path / run_files.STORE) for path in (whole[1], folder)]
    scores = [[(r["step"], r[HELD_OUT]) for r in log if HELD_OUT in r] for log in logs]
    assert scores[0] == scores[1] and [step for step, _ in scores[1]] == [0, 6]


def test_an_interrupted_start_can_be_repeated(tmp_path):
    """A file without charges and states is not a run."""
    create_store(tmp_path / run_files.STORE, trainer().budget, is_seeded=False)
    trainer().train(tmp_path)
    assert steps_in(tmp_path) == list(range(7))


@pytest.mark.few(1)
@pytest.mark.parametrize("left", [run_files.STORE, "log.jsonl", "checkpoints"])
def test_a_folder_of_another_run_is_refused(tmp_path, left):
    """Also one with files of version 0.2."""
    if left == run_files.STORE:
        trainer(seed=None).train(tmp_path)
    elif left == "checkpoints":
        (tmp_path / left / "3").mkdir(parents=True)
    else:
        (tmp_path / left).write_text("{}")
    other = trainer(seed=None)
    with pytest.raises(FileExistsError, match=f"holds a run.*{left}"):
        other.train(tmp_path)
    assert other.num_steps_taken == 0


def test_a_folder_continued_by_another_process_is_refused(tmp_path):
    """Another process continued the run after this one resumed it."""
    started(trainer(), tmp_path)
    late, quick = trainer(), trainer()
    late.resume(tmp_path)
    quick.resume(tmp_path)
    quick.train(tmp_path)
    with pytest.raises(FileExistsError, match="6 steps are charged .* at step 0"):
        late.train(tmp_path)


def test_resume_does_not_forget_steps(tmp_path):
    started(trainer(), tmp_path)
    other = trainer()
    for _ in range(3):
        other.step()
    with pytest.raises(ValueError, match="resume must come before .* charged 3"):
        other.resume(tmp_path)
    assert other.num_steps_charged == 3


HOLD = """
import sys
import threading
from pathlib import Path
from jaxdp_episodic.files import atomic

# What a run takes; without all that training imports.
with atomic.locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_locked_by_one_process(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(TESTS.parent), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdin is not None and other.stdout is not None
    run = trainer()
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError, match=f"another process .{other.pid}"):
            run.train(tmp_path)
        assert run.num_steps_taken == 0
    finally:
        other.stdin.close()
        other.wait(60)
        other.stdout.close()
    run.train(tmp_path)
    with run_files.locked(tmp_path), run_files.locked(tmp_path):
        pass  # its holder may lock it again


DEVICES = """
import json, sys
from pathlib import Path
import jax
import numpy as np
from training_runs import plain_trainer

folder = Path(sys.argv[1])
whole, first, second = plain_trainer(), plain_trainer(), plain_trainer()
whole.train(folder / "whole")

def stop(progress):
    if progress.step == 3:
        raise KeyboardInterrupt

try:
    first.train(folder / "parts", on_step=stop)
except KeyboardInterrupt:
    pass
resumed = second.resume(folder / "parts")
second.train(folder / "parts")
pairs = zip(jax.tree.leaves(whole.state), jax.tree.leaves(second.state), strict=True)
print(json.dumps({
    "devices": len(jax.local_devices()),
    "resumed": resumed,
    "same": all(np.array_equal(a, b) for a, b in pairs),
}))
"""


@pytest.mark.parametrize(
    "environment",
    [
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "JAX_DEFAULT_PRNG_IMPL": "rbg",
        },
    ],
    ids=["two devices", "another default generator"],
)
@pytest.mark.slow
def test_resuming_keeps_the_device(tmp_path, environment):
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        [sys.executable, "-c", DEVICES, str(tmp_path)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["same"] and report["resumed"] == 3
    assert report["devices"] == (2 if "2" in environment["XLA_FLAGS"] else 1)
