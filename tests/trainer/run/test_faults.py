"""Failures: full disks, SIGTERM, NaN, bfloat16."""

import concurrent.futures
import contextlib
import dataclasses
import errno
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crash_rigs import ROOT, train_until
from jaxdp_episodic.tools import cli
from jaxdp_episodic.tools.cli.command import Terminated, ended_by_sigterm
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.sampler import Draw
from jaxdp_episodic.trainer.learners.episode import make_blocks
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.ledger_file import read_ledger
from jaxdp_episodic.trainer.run.store import RunStore
from jaxdp_episodic.training import ProtoNet, load_parameters
from training_runs import TINY, assert_same, classes, plain_trainer, protonet


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = plain_trainer()
    run.train(tmp_path_factory.mktemp("whole"))
    return run


def gone_on_with(folder, whole):
    """Resumes, finishes, and compares with an uninterrupted run."""
    run = plain_trainer()
    taken = run.resume(folder)
    run.train(folder)
    assert_same(run, whole)
    assert read_ledger(folder / run_files.STORE).charged == 6
    return taken


# --- A full disk ---


@pytest.mark.parametrize(("name", "at"), [("save", 4), ("charge", 3)])
def test_a_disk_full_while_a_state_or_a_charge_is_written(
    tmp_path, monkeypatch, whole, name, at
):
    """The write fails, and the run goes on with what was on the disk before."""
    run, write = plain_trainer(), getattr(RunStore, name)

    def limited(store, *what):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if run.num_steps_taken == at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
        try:
            write(store, *what)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, name, limited)
        with pytest.raises(OSError, match="run.sqlite cannot be read or written"):
            run.train(tmp_path, checkpoint_every=2)
    assert run.num_steps_taken == at
    assert at <= read_ledger(tmp_path).charged <= at + (name == "charge")
    assert gone_on_with(tmp_path, whole) == at


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2000k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_disk_full_at_any_byte(small_disk, whole):
    """Another file leaves only some bytes; after its removal the run continues."""
    folder, ballast = small_disk / "run", small_disk / "ballast"
    ends = []
    for free in (0, 10_000, 50_000, 100_000, 200_000, 300_000, 1_500_000):
        shutil.rmtree(folder, ignore_errors=True)
        ballast.write_bytes(bytes(2_000_000 - free))
        run = plain_trainer()
        try:
            run.train(folder, checkpoint_every=2)
            ends.append("finished")
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            ends.append("full")
        ballast.unlink()  # readers need space as well
        path = folder / run_files.STORE
        charged = read_ledger(path).charged if path.exists() else 0
        assert run.num_steps_taken <= charged <= run.num_steps_taken + 1
        if ends[-1] == "full" and run_files.files_of_a_run(folder):
            gone_on_with(folder, whole)
    assert ends[0] == "full" and ends[-1] == "finished"


# --- SIGTERM ---


def test_sigterm_commits_the_finished_steps(tmp_path, whole):
    before = signal.getsignal(signal.SIGTERM)

    def terminate(progress):
        if progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    run = plain_trainer()
    with pytest.raises(Terminated), ended_by_sigterm():
        run.train(tmp_path, on_step=terminate, checkpoint_every=100)
    assert signal.getsignal(signal.SIGTERM) is before
    assert read_ledger(tmp_path / run_files.STORE).is_closed
    assert gone_on_with(tmp_path, whole) == 3


def test_a_second_sigterm_does_not_interrupt_the_cleanup():
    wound_up = False
    with pytest.raises(Terminated), ended_by_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Terminated:
            os.kill(os.getpid(), signal.SIGTERM)
            wound_up = True
            raise
    assert wound_up


SIGNALS = pytest.mark.parametrize(
    "sent, raised", [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)]
)


@SIGNALS
@pytest.mark.parametrize("by_callback", [False, True])
def test_a_swallowed_signal_ends_the_run_later(monkeypatch, sent, raised, by_callback):
    """Modules swallow it while they are imported, Python in callbacks of objects."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    told, one = [], ProtoNet(len, ways=2)
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    try:
        with pytest.raises(raised) as end, ended_by_sigterm():
            if by_callback:
                weakref.finalize(one, os.kill, os.getpid(), sent)
                with contextlib.suppress(raised):
                    del one
                time.sleep(5)
                pytest.fail("the signal was lost")
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), sent)
        assert end.type is raised
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not told and sys.unraisablehook == told.append


def test_other_threads_leave_signals_alone():
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert pool.submit(ended_by_sigterm()(lambda: True)).result()


def test_the_command_reports_its_termination(tmp_path, monkeypatch, capsys):
    config = tmp_path / "tiny.toml"
    config.write_text(TINY, encoding="utf-8")

    def terminated(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("jaxdp_episodic.tools.train.run.run_training", terminated)
    monkeypatch.setattr("jaxdp_episodic.tools.cli.command.use_all_cores", lambda: None)
    assert cli.run(["train", str(config), "--out", str(tmp_path / "out")]) == 143
    error = capsys.readouterr().err
    assert "terminated; nothing was trained yet" in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_process_exits_cleanly_at_sigterm(tmp_path):
    """The command line as a process; then it is resumed to the end."""
    config, out = tmp_path / "tiny.toml", tmp_path / "out"
    config.write_text(TINY.replace("num_steps = 3", "num_steps = 200"))
    command = [sys.executable, "-m", "jaxdp_episodic", "train", str(config)]
    command += ["--out", str(out)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    how = {"env": environment, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **how)
    while process.poll() is None:
        if (out / run_files.STORE).exists() and read_ledger(out).charged > 5:
            process.send_signal(signal.SIGTERM)
            break
    _, error = process.communicate(timeout=300)
    assert process.returncode == 143, error
    assert "terminated; continue with --resume" in error
    with contextlib.closing(RunStore(out / run_files.STORE)) as file:
        saved = file.saved().taken
    content = read_ledger(out)
    assert content.is_closed and 5 <= saved <= content.charged <= saved + 1
    done = subprocess.run([*command, "--resume"], **how, timeout=900)
    assert done.returncode == 0, done.stderr
    # A charged and interrupted step is dropped and stays charged.
    assert f"resumed after step {content.charged}" in done.stderr
    assert read_ledger(out).charged == 200


# --- NaN and infinity ---


def test_a_nonfinite_first_example_is_not_in_masked_slots():
    """Masked slots hold example 0, and are zeroed by selection, not by a product."""
    features = np.array(classes().features)
    features[0, 0] = np.nan  # bypasses the loaders' checks
    data = ExampleTable(features, None, classes().population)
    slots = (2, 3, 3)
    empty = Draw(np.zeros(slots, np.int64), np.zeros(slots, bool), np.array([-1, -1]))
    (block,) = make_blocks(empty, data, block_size=4)
    assert not np.any(block.inputs)


def test_loaders_refuse_what_is_not_finite():
    for value in (np.nan, 1e300):
        with pytest.raises(ValueError, match="features must be finite, row 1"):
            ExampleTable.from_records([[0.0], [value]], units={"class": [0, 1]})


@dataclasses.dataclass(frozen=True)
class Odd:
    """A learner whose gradient is ``factor`` in every entry."""

    factor: float
    ways: int = 3
    is_regression: bool = False

    def loss(self, params, episode):
        total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))
        return self.factor * total

    def predict(self, params, episode):
        return jnp.zeros(episode.query_labels.shape, jnp.int32)


def test_nonfinite_gradients_release_pure_noise(tmp_path):
    def trained(factor):
        run = plain_trainer(learner=(Odd(factor), protonet()[1]), num_steps=3)
        return run, run.train(tmp_path / str(factor))

    noise_alone, _ = trained(0.0)
    for factor in (math.nan, math.inf):
        odd, records = trained(factor)
        assert_same(odd, noise_alone)  # the same noise, and nothing else
        private = [record["private"] for record in records[1:]]
        drawn = sum(one["num_units"] for one in private)
        assert sum(one["num_not_finite"] for one in private) == drawn > 0


def test_parameters_that_are_not_finite_are_refused():
    learner, params = protonet()
    params["head"]["bias"] = params["head"]["bias"].at[1].set(jnp.nan)
    with pytest.raises(ValueError, match="params must be finite, got head/bias"):
        plain_trainer(learner=(learner, params))


def test_a_diverged_run_stops_and_keeps_its_last_finite_state(tmp_path):
    """Further steps would only cost budget."""
    rate = optax.join_schedules([lambda _: 0.05, lambda _: jnp.inf], [3])
    run = plain_trainer(optimizer=optax.sgd(rate))
    with pytest.raises(ValueError, match=r"params must be finite, .* after step \d"):
        run.train(tmp_path, checkpoint_every=2)
    with contextlib.closing(RunStore(tmp_path / run_files.STORE)) as store:
        kept = store.saved()
    assert all(np.isfinite(leaf).all() for leaf in kept.arrays)
    charged = read_ledger(tmp_path / run_files.STORE).charged
    assert kept.taken < charged == run.num_steps_taken


# --- bfloat16 ---


@pytest.mark.slow
def test_bfloat16_parameters_train_resume_and_are_released(tmp_path):
    """Moments are kept in float32; parameters stay bfloat16."""
    learner, params = protonet()
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    def apply(params, inputs):
        return learner.apply(params, inputs.astype(jnp.bfloat16))

    def run_of():
        return plain_trainer(learner=(ProtoNet(apply, ways=3), low))

    run = run_of()
    run.train(tmp_path / "whole")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(run.params)} == {"bfloat16"}
    moments = run.state.optimizer_state[0].mu
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(moments)} == {"float32"}

    train_until(3, run_of(), tmp_path / "parts", end=KeyboardInterrupt)
    again = run_of()
    assert again.resume(tmp_path / "parts") == 3
    again.train(tmp_path / "parts")
    assert_same(again, run)
    again.release(tmp_path / "release")
    back = load_parameters(tmp_path / "release" / "parameters.npz", run.params)
    jax.tree.map(np.testing.assert_array_equal, back, run.params)


def test_bfloat16_inputs_are_refused():
    """NumPy has no such type."""
    data = classes()
    kept = ExampleTable(data.features.astype(jnp.bfloat16), None, data.population)
    with pytest.raises(TypeError, match="integers or floats, got bfloat16"):
        plain_trainer(data=kept)
