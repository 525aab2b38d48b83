"""Checkpoints: complete or not there, and of this run or refused."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp_episodic.files import atomic
from jaxdp_episodic.trainer.run.checkpoint import (
    Checkpoints,
    Snapshot,
)
from jaxdp_episodic.trainer.run.description import RunMismatchError, refuse_other_run

RUN = {"target": {"delta": 1e-5}, "step": {"sizes": [1, 2]}}


def state(value=1.0):
    return {"w": jnp.full((3, 2), value, jnp.float32), "n": jnp.asarray(4, jnp.int32)}


def snapshot(step, value=1.0, run=RUN):
    return Snapshot(state(value), step, run)


def test_saved_and_restored(tmp_path):
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.latest is None
        for step in (0, 5, 10):
            checkpoints.save(snapshot(step, value=step + 0.5))
        assert checkpoints.latest == 10
    with Checkpoints(tmp_path / "c") as checkpoints:
        restored = checkpoints.restore(state(), RUN)
    assert restored.charged_steps == 10
    np.testing.assert_array_equal(restored.state["w"], np.full((3, 2), 10.5))
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["10", "5"]
    assert (tmp_path / "c").stat().st_mode & 0o077 == 0


def test_another_run_is_refused_with_what_differs(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(snapshot(1))
        other = {"target": {"delta": 1e-6}, "step": {"sizes": [1, 3]}}
        with pytest.raises(RunMismatchError) as caught:
            checkpoints.restore(state(), other)
    assert "target.delta: 1e-05 in the checkpoint, 1e-06 now" in str(caught.value)
    assert "step.sizes[1]: 2 in the checkpoint, 3 now" in str(caught.value)


def test_missing_and_new_settings_are_named():
    with pytest.raises(
        RunMismatchError, match="data: 1 in the checkpoint, \\(nothing\\) now"
    ):
        refuse_other_run({"a": 1, "data": 1}, {"a": 1})
    refuse_other_run({"units": [1, 2]}, {"units": (1, 2)})
    with pytest.raises(RunMismatchError, match=r"before\[0\].x: 1 in"):
        refuse_other_run({"before": [{"x": 1}]}, {"before": [{"x": 2}]})
    with pytest.warns(UserWarning, match="goes on with other settings.*learner.a: 1"):
        refuse_other_run({"learner": {"a": 1}}, {"learner": {"a": 2}})


@pytest.mark.parametrize("where", ["state", "meta"])
def test_a_damaged_checkpoint_is_said_so(tmp_path, where):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(snapshot(1))
    shutil.rmtree(tmp_path / "1" / where)
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match="damaged"),
    ):
        checkpoints.restore(state(), RUN)


@pytest.mark.parametrize(
    ("name", "value"),
    [("charged_steps", 1.0), ("run", []), ("state", {}), ("ledger", ["a"])],
)
def test_an_edited_description_is_refused(tmp_path, name, value):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(snapshot(1))
    (path,) = (tmp_path / "1" / "meta").glob("*meta*")
    meta = json.loads(path.read_text("utf-8"))
    for edited in ({k: v for k, v in meta.items() if k != name}, {**meta, name: value}):
        path.write_text(json.dumps(edited), "utf-8")
        with (
            Checkpoints(tmp_path) as checkpoints,
            pytest.raises(ValueError, match="damaged"),
        ):
            checkpoints.restore(state(), RUN)


def test_a_renamed_checkpoint_is_refused(tmp_path):
    """Fewer steps than were charged would be steps for nothing."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(snapshot(50))
    (tmp_path / "50").rename(tmp_path / "3")
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match="renamed"),
    ):
        checkpoints.restore(state(), RUN)


@pytest.mark.parametrize(
    "module, call, code",
    [(shutil, "rmtree", errno.ENOTEMPTY), (os, "makedirs", errno.EEXIST)],
)
@pytest.mark.parametrize("tries", [1, 10_000])
def test_writes_of_a_save_before_that_go_on_are_waited_for(
    tmp_path, monkeypatch, module, call, code, tries
):
    """Orbax meets them where it removes the temporary folder, or makes it again."""
    late = tmp_path / "3.orbax-checkpoint-tmp" / "state"
    late.mkdir(parents=True)
    original, met = getattr(module, call), []

    def in_the_way(path, *args, **options):
        ours = options.get("ignore_errors", False)
        if Path(path) == late.parent and not ours and len(met) < tries:
            met.append(code)
            raise OSError(code, os.strerror(code))
        original(path, *args, **options)
        if ours and tries > 1:
            late.mkdir(parents=True)

    monkeypatch.setattr(module, call, in_the_way)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with Checkpoints(tmp_path) as checkpoints:
        if tries > 1:
            with pytest.raises(OSError, match="step 3 could not be written") as caught:
                checkpoints.save(snapshot(3))
            assert caught.value.errno == code
            return
        checkpoints.save(snapshot(3))
        assert checkpoints.restore(state(), RUN).charged_steps == 3
    assert met == [code]
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_an_older_checkpoint_that_stays_is_said_so(tmp_path, monkeypatch):
    """The new one is complete: no second save, which would say that it is there."""
    original = shutil.rmtree

    def stays(path, *args, **options):
        if Path(path) == tmp_path / "1":
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        original(path, *args, **options)

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(snapshot(1))
        checkpoints.save(snapshot(2))
        monkeypatch.setattr(shutil, "rmtree", stays)
        with pytest.raises(OSError, match="not empty") as caught:
            checkpoints.save(snapshot(3))
        assert caught.value.errno == errno.ENOTEMPTY
        assert checkpoints.restore(state(), RUN).charged_steps == 3


def test_nothing_there(tmp_path):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(FileNotFoundError):
        checkpoints.restore(state(), RUN)


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_checkpoint import snapshot, Checkpoints
with Checkpoints(Path(sys.argv[1])) as checkpoints:
    for step in range(1, 100_000):
        checkpoints.save(snapshot(step, value=float(step)))
        print(step, flush=True)
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_a_complete_checkpoint(tmp_path):
    rng = np.random.default_rng(0)
    tests = Path(__file__).parent
    for trial in range(6):
        folder = tmp_path / str(trial)
        command = [sys.executable, "-c", WRITER, str(folder), str(tests)]
        process = subprocess.Popen(
            command, cwd=tests.parents[2], stdout=subprocess.PIPE, env=dict(os.environ)
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.uniform(0.0, 1.0))
        process.send_signal(signal.SIGKILL)
        written = [1, *map(int, process.stdout.read().split())]
        process.wait()
        process.stdout.close()
        with Checkpoints(folder) as checkpoints:
            restored = checkpoints.restore(state(), RUN)
        assert restored.charged_steps >= written[-1]
        np.testing.assert_array_equal(restored.state["w"], restored.charged_steps)


def test_all_of_a_checkpoint_is_on_the_disk_when_it_is_saved(tmp_path, monkeypatch):
    """The journal, which could make up for it, is emptied then."""
    synced, sync = set(), atomic._sync

    def noted(path, flags):
        synced.add(path)
        sync(path, flags)

    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(atomic, "_sync", noted)
        checkpoints.save(snapshot(3))
    assert set((tmp_path / "3").rglob("*")) | {tmp_path / "3", tmp_path} <= synced
