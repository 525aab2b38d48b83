"""Checkpoints: complete or not there, and of this run or refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp_episodic.training.checkpoint import (
    Checkpoints,
    Secrets,
    Snapshot,
)
from jaxdp_episodic.training.description import RunMismatchError, refuse_other_run

RUN = {"delta": 1e-5, "step": {"sizes": [1, 2]}}
SECRETS = Secrets(2**200 + 7, np.array([3, 4_000_000_000], np.uint32))


def state(value=1.0):
    return {"w": jnp.full((3, 2), value, jnp.float32), "n": jnp.asarray(4, jnp.int32)}


def snapshot(step, value=1.0, run=RUN):
    return Snapshot(state(value), step, SECRETS, run)


def test_saved_and_restored(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.latest is None
    for step in (0, 5, 10):
        checkpoints.save(snapshot(step, value=step + 0.5))
    assert checkpoints.latest == 10
    restored = Checkpoints(tmp_path / "c").restore(state(), RUN)
    assert restored.charged_steps == 10
    np.testing.assert_array_equal(restored.state["w"], np.full((3, 2), 10.5))
    assert restored.secrets.sampler_entropy == SECRETS.sampler_entropy
    np.testing.assert_array_equal(restored.secrets.noise_key, SECRETS.noise_key)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["10", "5"]
    for private in (tmp_path / "c", tmp_path / "c" / "10"):
        assert private.stat().st_mode & 0o077 == 0


def test_every_type_of_number_comes_back_to_the_bit(tmp_path):
    """Also half precision, keys, nothing at all, and NaN with a payload."""
    odd = np.array([0x7FC00001, 0x80000000], np.uint32).view(np.float32)
    kept = {
        "half": jnp.asarray([0.1, -3.0], jnp.bfloat16),
        "odd": odd,
        "none": jnp.zeros((0, 3)),
        "scalar": jnp.asarray(True),
        "key": jax.random.key(7),
    }
    Checkpoints(tmp_path).save(Snapshot(kept, 3, SECRETS, RUN))
    like = {**kept, "key": jax.random.key(0)}
    found = Checkpoints(tmp_path).restore(like, RUN).state
    assert jax.tree.structure(found) == jax.tree.structure(kept)
    assert found["key"].dtype == kept["key"].dtype
    for tree in (found, kept):
        tree["key"] = jax.random.key_data(tree["key"])
    for name, value in kept.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes()


def test_another_run_is_refused_with_what_differs(tmp_path):
    Checkpoints(tmp_path).save(snapshot(1))
    other = {"delta": 1e-6, "step": {"sizes": [1, 3]}}
    with pytest.raises(RunMismatchError) as caught:
        Checkpoints(tmp_path).restore(state(), other)
    assert "delta: 1e-05 in the checkpoint, 1e-06 now" in str(caught.value)
    assert "step.sizes[1]: 2 in the checkpoint, 3 now" in str(caught.value)


def test_missing_and_new_settings_are_named():
    with pytest.raises(
        RunMismatchError, match="b: 1 in the checkpoint, \\(nothing\\) now"
    ):
        refuse_other_run({"a": 1, "b": 1}, {"a": 1})
    refuse_other_run({"a": [1, 2]}, {"a": (1, 2)})


def is_damaged(folder):
    with pytest.raises(ValueError, match="1 is damaged"):
        Checkpoints(folder).restore(state(), RUN)
    return True


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_checkpoint_that_is_cut_off_is_said_so(tmp_path, cut):
    Checkpoints(tmp_path).save(snapshot(1))
    content = (tmp_path / "1").read_bytes()
    (tmp_path / "1").write_bytes(content[:cut])
    assert is_damaged(tmp_path)


def test_a_changed_bit_is_noticed(tmp_path):
    Checkpoints(tmp_path).save(snapshot(1, value=0.7))
    content = (tmp_path / "1").read_bytes()
    place = content.index(np.full(6, 0.7, np.float32).tobytes())
    (tmp_path / "1").write_bytes(
        content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    )
    assert is_damaged(tmp_path)


def test_a_state_of_another_kind_is_refused(tmp_path):
    Checkpoints(tmp_path).save(snapshot(1))
    for like in ({**state(), "w": jnp.zeros((2, 3))}, {"w": jnp.zeros((3, 2))}):
        with pytest.raises(ValueError, match="damaged: a state of another kind"):
            Checkpoints(tmp_path).restore(like, RUN)


def test_a_checkpoint_of_earlier_versions_is_refused(tmp_path):
    (tmp_path / "1" / "state").mkdir(parents=True)
    assert is_damaged(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_key", None),
        ("run", []),
        ("sampler_entropy", "0xyz"),
        ("ledger", ["a"]),
        ("format", 3),
        ("state", []),
    ],
)
def test_an_edited_description_is_refused(tmp_path, name, value):
    Checkpoints(tmp_path).save(snapshot(1))
    arrays = dict(np.load(tmp_path / "1"))
    meta = json.loads(arrays["meta"].tobytes())
    for edited in ({k: v for k, v in meta.items() if k != name}, {**meta, name: value}):
        arrays["meta"] = np.frombuffer(json.dumps(edited).encode(), np.uint8)
        with (tmp_path / "1").open("wb") as file:
            np.savez(file, **arrays)
        assert is_damaged(tmp_path)


def test_a_renamed_checkpoint_is_refused(tmp_path):
    """Fewer steps than were charged would be steps for nothing."""
    Checkpoints(tmp_path).save(snapshot(50))
    (tmp_path / "50").rename(tmp_path / "3")
    with pytest.raises(ValueError, match="renamed"):
        Checkpoints(tmp_path).restore(state(), RUN)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        Checkpoints(tmp_path).restore(state(), RUN)


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_checkpoint import snapshot, Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]))
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
            command, cwd=tests.parents[1], stdout=subprocess.PIPE, env=dict(os.environ)
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.uniform(0.0, 1.0))
        process.send_signal(signal.SIGKILL)
        written = [1, *map(int, process.stdout.read().split())]
        process.wait()
        process.stdout.close()
        restored = Checkpoints(folder).restore(state(), RUN)
        assert restored.charged_steps >= written[-1]
        np.testing.assert_array_equal(restored.state["w"], restored.charged_steps)
