"""One run on several processes: shares, agreement, real processes, and kills."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from crash_rigs import ROOT, run_rig
from jaxdp_episodic.tools import cli
from jaxdp_episodic.tools.cli.command import one_of_several
from jaxdp_episodic.tools.train import search
from jaxdp_episodic.trainer.config.training_parts import NOISES
from jaxdp_episodic.trainer.draw.sampler import Draw, EpisodeSampler
from jaxdp_episodic.trainer.gradient import private_gradient
from jaxdp_episodic.trainer.gradient.processes import Processes, RunEndedError
from jaxdp_episodic.trainer.learners.episode import make_blocks
from jaxdp_episodic.trainer.run import checks, run_files, trainer
from jaxdp_episodic.trainer.run.ledger import (
    RunMismatchError,
    check_run,
    described_versions,
)
from jaxdp_episodic.trainer.run.ledger_file import read_ledger
from jaxdp_episodic.training import PrivateGradient
from training_runs import (
    CHECK_SAMPLING,
    GROUPED,
    KEY,
    TINY,
    Rows,
    classes,
    linear_loss,
    plain_trainer,
)

RIG = ROOT / "experiments" / "trust" / "kill_distributed.py"


# --- Shares of a draw ---


@pytest.mark.parametrize(
    ("number", "processes"), [(0, 2), (1, 2), (3, 4), (11, 4), (11, 13)]
)
def test_every_unit_is_in_exactly_one_share(number, processes):
    """Also with fewer units than processes, or none."""
    examples = np.broadcast_to(np.arange(number)[:, None, None], (number, 1, 2))
    draw = Draw(examples.copy(), np.ones(examples.shape, bool), None)
    found = []
    for index in range(processes):
        share = {"num_shards": 2, "share": (index, processes)}
        blocks = list(make_blocks(draw, classes(), block_size=4, **share))
        assert blocks and all(len(block.unit_mask) == 4 for block in blocks)
        features = classes().features
        for block in blocks:
            for row in np.flatnonzero(block.unit_mask):
                same = np.all(features == block.inputs[row, 0, 0], axis=-1)
                found.append(int(np.flatnonzero(same)[0]))
    assert sorted(found) == list(range(number))


def test_programs_with_discrete_noise_do_not_depend_on_devices():
    sampler = EpisodeSampler(GROUPED.design, classes().population, clip_unit="episode")
    rows = {
        noise: [checks.rows_a_device(None, sampler, n, noise) for n in (1, 2, 4)]
        for noise in ("discrete", "gaussian")
    }
    assert len(set(rows["discrete"])) == 1
    assert rows["gaussian"] == sorted(set(rows["gaussian"]), reverse=True)
    assert checks.rows_a_device(3, sampler, 4, "discrete") == 3


class Twins(Processes):
    """Two processes with equal shares of the sum."""

    def __init__(self, index):
        self.count, self.index = 2, index

    def sum(self, tree):
        return jax.tree.map(lambda leaf: leaf + leaf, tree)


@pytest.mark.parametrize("kind", NOISES)
def test_the_first_process_alone_adds_noise_once_to_the_whole_sum(monkeypatch, kind):
    params, data = np.zeros(7, np.float32), np.full((3, 7), 0.01, np.float32)
    blocks, settings = [Rows(data, np.ones(3, np.float32))], {"noise_multiplier": 0.7}
    settings |= {"l2_clip_norm": 0.5, "normalizer": 5.0}
    alone = PrivateGradient(linear_loss, noise=kind)
    wanted, _ = alone(params, blocks * 2, alone.noise(params, KEY, 0.7), **settings)
    for index in range(2):
        monkeypatch.setattr(private_gradient, "all_processes", lambda i=index: Twins(i))
        gradient = PrivateGradient(linear_loss, noise=kind)
        noise = None if index else gradient.noise(params, KEY, 0.7)
        found, private = gradient(params, blocks, noise, **settings)
        if index:
            assert found is None and private == {}
        else:
            np.testing.assert_allclose(found, wanted, rtol=1e-6)


# --- Several devices of one process ---

# They are compiled in a process of their own.
PROGRAM = """
import jax
import numpy as np

from jaxdp_episodic.training import PrivateGradient
from training_runs import KEY, Rows, linear_loss

devices, params = jax.local_devices(), np.zeros(7, np.float32)
assert len(devices) == 4
data = np.random.default_rng(0).normal(size=(12, 7)).astype(np.float32)
data[4, 0] = np.nan
settings = {"l2_clip_norm": 0.5, "noise_multiplier": 0.7, "normalizer": 5.0}
for mask in (np.ones(12), np.arange(12) % 3 != 1, np.zeros(12)):
    blocks = [Rows(data, mask.astype(np.float32))] * 2
    # Noise and integer sums are equal; float sums in another order nearly so.
    for kind, tolerance in (("discrete", 0.0), ("gaussian", 1e-5)):
        found = []
        for number, at_once in ((1, 1), (2, 1), (4, 2)):
            gradient = PrivateGradient(
                linear_loss, devices=devices[:number], units_at_once=at_once, noise=kind
            )
            noise = gradient.noise(params, KEY, 0.7)
            found.append(gradient(params, blocks, noise, **settings))
        for sums, private in found:
            np.testing.assert_allclose(sums, found[0][0], rtol=0, atol=tolerance)
            assert private["num_units"] == 2 * mask.sum()
"""


@pytest.mark.slow
def test_any_number_of_devices_gives_the_same():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


# --- Agreement ---


class Several:
    """One process of several, with a given message of the first."""

    count, index = 2, 1

    def __init__(self, first):
        self._first = first

    def shared_value(self, value):
        return self._first

    def meet(self):
        pass


def test_another_run_is_refused_by_name():
    run = {"data": "abc", "step": {"noise_multiplier": 1.0}, **described_versions()}
    check_run(Several(run), run)
    for change, named in [
        ({"data": "abd"}, "data: abd in the first process, abc here"),
        ({"numpy": "1.0"}, "numpy: 1.0 in the first process"),
        ({"x64": "maybe"}, "x64: maybe in the first process"),
        ({"step": {"noise_multiplier": 2.0}}, "step.noise_multiplier: 2.0 in the"),
    ]:
        with pytest.raises(RunMismatchError, match=f"process 1 of 2 .*{named}"):
            check_run(Several({**run, **change}), run)


class Deserted(Processes):
    """The second of two processes; the first fails after some barriers and values.

    It reports that at the next barrier. Asking it for a value before would hang.
    """

    def __init__(self, meetings, values):
        self.count, self.index = 2, 1
        self._meetings, self._values = meetings, values

    def shared(self, value):
        self._values -= 1
        if self._values < 0:
            pytest.fail("waits for what the first will never send")
        return value

    shared_value = shared_bytes = shared

    def sum(self, tree):
        return tree

    def meet(self):
        self._meetings -= 1
        if self._meetings < 0:
            raise RunEndedError("process 0 has ended: LedgerError")

    def end(self, error):
        pass


@pytest.mark.parametrize(
    ("meetings", "values", "call"),
    [
        (1, 1, lambda run, folder: run.resume(folder)),  # it cannot resume the run
        (1, 4, lambda run, folder: run.train(folder)),  # or not create it
        (2, 4, lambda run, folder: run.train(folder)),  # or not compute a step
        (3, 4, lambda run, folder: run.train(folder)),  # or not open it for training
    ],
    ids=["resume", "make", "compute", "train"],
)
def test_nobody_waits_for_a_first_process_that_failed(
    tmp_path, monkeypatch, meetings, values, call
):
    second = Deserted(meetings, values)
    for module in (trainer, private_gradient):
        monkeypatch.setattr(module, "all_processes", lambda: second)
    with pytest.raises(RunEndedError, match="process 0 has ended: LedgerError"):
        call(plain_trainer(), tmp_path)
    assert not list(tmp_path.iterdir())


# --- Refusals ---


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("host", 2, 0), "--coordinator must be HOST:PORT, got 'host'"),
        (("host:1", 0, 0), "--num-processes must be at least 1, got 0"),
        (("host:1", 2, 2), "--process-index must be in 0 .. --num-processes - 1"),
        ((None, None, None), "give --coordinator HOST:PORT, --num-"),
    ],
)
def test_invalid_processes_are_refused(monkeypatch, given, message):
    def initialize(*given, **options):
        raise ValueError("coordinator_address should be defined.")  # without a cluster

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(ValueError, match=message), one_of_several(*given):
        pass


def test_commands_that_need_or_refuse_several_processes(monkeypatch, tmp_path, capsys):
    command = ["train", str(tmp_path / "x.toml"), "--out", str(tmp_path / "out")]
    assert cli.run([*command, "--num-processes", "2"]) == 2
    assert "--num-processes is for --distributed, got one" in capsys.readouterr().err
    monkeypatch.setattr(search, "all_processes", lambda: Several(None))
    with pytest.raises(NotImplementedError, match="in one process, got 2"):
        search.run_search(None, tmp_path)


def test_jax_leaves_sigterm_to_a_run_with_a_book(monkeypatch):
    """JAX reads what to do at SIGTERM when the book's prices import it."""
    name, home, seen = "JAX_ENABLE_PREEMPTION_SERVICE", f"{cli.__name__}.", []
    monkeypatch.setenv(name, "")
    monkeypatch.setattr(home + "command.end_process", seen.append)
    where = home + "train._booking"
    monkeypatch.setattr(where, lambda _: seen.append(os.environ[name]))
    words = "train x.toml --out o --book b --distributed --coordinator wrong"
    assert cli.run(words.split()) == 2 and seen == ["false", 2]


# --- The command line itself ---

# The steps are released, so that they can be compared; stages are scored as usual.
DISCRETE = TINY.replace("[data]", 'noise = "discrete"\nseed = 3\n[data]', 1).replace(
    "[evaluation]", "[evaluation]\nselect = false"
)
BANDED = (
    DISCRETE.replace('noise = "discrete"\n', "")
    .replace("[learner]", '[noise]\nbands = 2\ngroups = "example"\n[learner]')
    .replace("[step.s", '[step]\nneighboring_relation = "zero_out"\n[step.s')
)
STATISTICS = (
    DISCRETE.replace('noise = "discrete"\n', "")
    .replace("[evaluation]", '[start]\nkind = "plda"\ndimensions = 8\n[evaluation]')
    .replace('"conv_embedding"\nchannels = [4]', '"linear"')
)

ADAPTIVE = (
    DISCRETE
    + """
[adaptive]
rule = { type = "StopWhenStalled", every = 1, patience = 3 }
[adaptive.check]
number = 2
"""
    + CHECK_SAMPLING
)


def trained(tmp_path, config, number, *options, configs=None):
    """Trains in several processes; returns the folder and each one's (code, text)."""
    out = tmp_path / f"out-{number}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    processes = []
    for index in range(number):
        home = tmp_path / f"home-{number}-{index}"
        home.mkdir(exist_ok=True)
        file = tmp_path / f"config-{index}.toml"
        file.write_text(config if configs is None else configs[index])
        command = [sys.executable, "-m", "jaxdp_episodic", "train", str(file)]
        command += ["--out", str(out), *options]
        if number > 1:
            command += ["--distributed", "--coordinator", where]
            command += ["--num-processes", str(number), "--process-index", str(index)]
        processes.append(
            subprocess.Popen(
                command,
                cwd=home,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    texts = [process.communicate(timeout=900)[0] for process in processes]
    for index in range(number):  # nobody writes into the working directory
        assert not list((tmp_path / f"home-{number}-{index}").iterdir())
    return out, [(p.returncode, t) for p, t in zip(processes, texts, strict=True)]


def parameters(out):
    with np.load(out / "release" / "parameters.npz") as file:
        return dict(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "number", "tolerance"),
    [
        (DISCRETE, 3, 0.0),
        (DISCRETE.replace('"discrete"', '"gaussian"'), 2, 1e-5),
        (DISCRETE.replace("[data]", "[clipping]\ncount_noise = 1.0\n[data]", 1), 2, 0),
        (BANDED, 2, 0.0),
        (STATISTICS, 2, 1e-5),
        (ADAPTIVE, 2, 0.0),
    ],
    ids=["discrete", "gaussian", "quantile", "banded", "statistics", "adaptive"],
)
def test_any_number_of_processes_gives_the_same_run(
    tmp_path, config, number, tolerance
):
    """The first one releases statistics, and chooses the steps of an adaptive run."""
    found = []
    for count in (1, number):
        out, ends = trained(tmp_path, config, count)
        assert [code for code, _ in ends] == [0] * count, ends
        assert "accuracy" in ends[0][1]
        assert not any("accuracy" in text for _, text in ends[1:])
        ledger = read_ledger(out / run_files.STORE)
        assert ledger.charged >= 3
        found.append((parameters(out), ledger.charged, ledger.options))
    (whole, *charges), (parts, *others) = found
    assert charges == others and parts.keys() == whole.keys()
    for name, array in parts.items():
        np.testing.assert_allclose(array, whole[name], rtol=0, atol=tolerance)


@pytest.mark.slow
def test_processes_with_other_runs_end_before_a_charge(tmp_path):
    other = DISCRETE.replace("l2_clip_norm = 0.1", "l2_clip_norm = 0.2")
    out, ends = trained(tmp_path, None, 2, configs=[DISCRETE, other])
    assert [code for code, _ in ends] == [2, 2], ends
    for _, text in ends:
        assert "l2_clip_norm: 0.1 in the first process, 0.2 here" in text
    assert not run_files.files_of_a_run(out)
    broken = DISCRETE.replace("version = 1", "version = 17")
    _, ends = trained(tmp_path, None, 2, configs=[DISCRETE, broken])
    assert [code for code, _ in ends] == [2, 2], ends
    assert "process 1 has ended: ValueError" in ends[0][1]


# --- Killed ---


@pytest.mark.slow
def test_a_killed_process_ends_all_and_the_run_resumes(tmp_path):
    code, summary = run_rig(RIG, tmp_path, "--kills", "2")
    assert (code, summary["violations"]) == (0, [])
    for kill in summary["kills"]:
        assert kill["released"] <= kill["charged"] <= kill["released"] + 1
        assert kill["seconds"] < 60


@pytest.mark.slow
def test_the_rig_detects_a_planted_fault(tmp_path):
    code, summary = run_rig(RIG, tmp_path, "--kills", "8", "--fault", "charge-late")
    assert code == 1 and summary["violations"]
