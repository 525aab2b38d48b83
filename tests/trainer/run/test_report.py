"""Releases and reports of runs: nothing private, true statements, one trainer."""

import concurrent.futures
import gc
import json

import jax
import numpy as np
import pytest

from jaxdp_episodic.accountant.report.ledger_file import read_ledger
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.loading import load_parameters
from jaxdp_episodic.trainer.run.report import run_statement
from jaxdp_episodic.trainer.run.run_files import read_log
from training_runs import assert_same, plain_trainer, protonet


@pytest.fixture
def release(tmp_path):
    run = plain_trainer()
    run.train(tmp_path)
    return run, run.release(tmp_path / "release")


def test_parameters_round_trip(release):
    run, (parameters, *_) = release
    _, like = protonet(seed=5)
    loaded = load_parameters(parameters, like)
    for a, b in zip(jax.tree.leaves(run.params), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_release_contains_nothing_private(release):
    run, files = release
    everything = b"".join(path.read_bytes() for path in files if path != files[1])
    assert b'"private"' not in everything and b"loss" not in everything
    records = [json.loads(line) for line in files[2].read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(7))
    facts = json.loads(files[3].read_text())
    assert facts["steps"] == 6 and facts["epsilon spent"] > 0


def test_counted_sizes_are_reported_as_not_covered(release):
    _, files = release
    assert (
        "If they were counted in the data, the guarantee does not cover them"
        in " ".join(files[1].read_text().split())
    )


def test_a_run_that_ended_early_guarantees_its_plan(release):
    whole, _ = release
    early = plain_trainer()
    early.step()
    target = f"({early.budget.epsilon:g}, 1e-05)-differentially private"
    said, planned = run_statement(early), run_statement(whole)
    for facts, text in ((said.facts, said.statement), said.released):
        assert target in text and "It ended after 1 of 6 steps, which alone" in text
        assert facts["ended early"] in text and "costs its whole plan" in text
    for facts, text in ((planned.facts, planned.statement), planned.released):
        assert "ended early" not in facts and "It ended" not in text


def test_steps_by_hand_are_stored_in_the_given_folder(tmp_path):
    folder = tmp_path / "run"
    run = plain_trainer(num_steps=3, folder=folder)
    for number in (1, 2):
        run.step()
        content = read_ledger(folder)
        assert (content.charged, content.is_closed) == (number, False)
    files = run.release(tmp_path / "release")
    assert json.loads(files[3].read_text())["steps"] == 2
    assert [r["step"] for r in read_log(files[2])] == [0, 1, 2]
    assert read_ledger(folder).is_closed
    run.step()  # reopens it
    run.close()
    again = plain_trainer(num_steps=3, folder=folder)
    assert again.resume(folder) == 3
    assert_same(run, again)
    killed = plain_trainer(num_steps=3, folder=tmp_path / "killed")
    killed.step()
    del killed
    gc.collect()
    assert plain_trainer(num_steps=3).resume(tmp_path / "killed") == 1
    with pytest.raises(ValueError, match="a Trainer with a folder: the log is"):
        plain_trainer().release(tmp_path)


def test_folders_of_steps_by_hand_are_locked_until_closed(tmp_path):
    """In any thread and any order."""
    folders = tmp_path / "a", tmp_path / "b"
    runs = [plain_trainer(num_steps=3, folder=folder) for folder in folders]
    for run, folder in zip(runs, folders, strict=True):
        run.step()
        with pytest.raises(BlockingIOError, match="in use by another process"):
            plain_trainer(num_steps=3).resume(folder)
    for run, folder in zip(runs, folders, strict=True):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            pool.submit(run.close).result()
        with run_files.locked(folder), pytest.raises(BlockingIOError):
            with run_files.held(folder):
                pass


def test_only_one_trainer_of_a_process_opens_a_run(tmp_path):
    """A second one, within ``on_step``, could end the run and its booking."""
    run = plain_trainer(seed=None, num_steps=3)

    def on_step(progress):
        with pytest.raises(BlockingIOError, match="open in another trainer of this"):
            plain_trainer(seed=None, num_steps=3).resume(tmp_path)

    run.train(tmp_path, on_step=on_step)
    assert read_ledger(tmp_path).charged == run.num_steps_taken == 3


def test_other_parameters_are_refused(release, tmp_path):
    _, (parameters, *_) = release
    _, like = protonet()
    with pytest.raises(ValueError, match="parameter .* must be of shape"):
        load_parameters(parameters, {"head": like["head"]})
    wrong = jax.tree.map(lambda leaf: np.zeros((*leaf.shape, 1), np.float32), like)
    with pytest.raises(ValueError, match="must be of shape"):
        load_parameters(parameters, wrong)
    hostile = tmp_path / "hostile.npz"
    np.savez(hostile, **{"head/bias": np.array([object()])}, allow_pickle=True)
    with pytest.raises(ValueError):
        load_parameters(hostile, {"head": {"bias": like["head"]["bias"]}})
