"""A sweep from its description to its table: resumed, in parts, killed, on devices."""

import errno
import json
import os
import random
import signal
import sys
import time
from importlib import metadata

import jax
import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.files import atomic, optional
from jaxdp_episodic.tools.requests.request import CalibrationRequest, EpsilonRequest
from jaxdp_episodic.tools.sweep import run as engines
from jaxdp_episodic.tools.sweep.run import (
    MANIFEST,
    SHARDS,
    RayEngine,
    SweepError,
    SweepFolder,
    evaluate_chunk,
    run_sweep,
    saved_chunks,
)
from sweep_runs import (
    NOISE,
    RATE,
    REQUEST,
    SMALL,
    SWEEP,
    axis,
    columns,
    contents,
    no_work,
    start,
)

pytestmark = pytest.mark.usefixtures("shared_cache")


def test_the_table_has_every_setting(read, tmp_path):
    sweep = read(SMALL)
    outcome = run_sweep(sweep, tmp_path / "out")
    assert (outcome.size, outcome.num_chunks, outcome.num_evaluated) == (520, 2, 520)
    names = ("noise_multiplier", "example.sampling_probability", "epsilon")
    noise, rate, epsilon = columns(outcome.table, *names)
    step = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=rate), noise_multiplier=noise
    )
    expected = jde.epsilon(step, num_steps=300, delta=1e-5, method="rdp")
    np.testing.assert_allclose(epsilon, expected, rtol=1e-12)
    assert sorted(contents(tmp_path / "out")) == [MANIFEST, outcome.table.name]
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["num_settings"] == 520
    assert set(manifest["versions"]) == {"jaxdp-episodic", "jax", "jaxlib", "numpy"}
    again = run_sweep(sweep, tmp_path / "out", engine=no_work)
    assert (again.num_evaluated, again.table) == (0, outcome.table)


FEW = REQUEST.replace("0.01", "0.1")
EXACT = (
    FEW.replace("num_steps = 300\n", "")
    + axis("method", values=["exact", "rdp"])
    + axis("num_steps", values=[0, 100])
    + axis("noise_multiplier", values=[1.0, 2.0])
)


@pytest.mark.parametrize("kind", ["parquet", "npz"])
def test_exact_answers_have_error_and_flag(read, tmp_path, monkeypatch, kind):
    """The table has an exact answer's error, and whether it is a certified bound."""
    if kind == "npz":  # where pyarrow is missing
        monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    pretended, answer = [], EpsilonRequest.answer_with_info

    def partly_certified(asked):
        value, info = answer(asked)
        certified = (np.asarray(asked.num_steps) > 0) & (asked.method == "exact")
        pretended.append(info.error)
        return value, info._replace(is_certified_bound=certified)

    monkeypatch.setattr(EpsilonRequest, "answer_with_info", partly_certified)
    outcome = run_sweep(read(EXACT), tmp_path / "out")
    assert outcome.table.name == f"table.{kind}"
    again = run_sweep(read(EXACT), tmp_path / "again").table
    assert again.read_bytes() == outcome.table.read_bytes()
    del pretended[len(pretended) // 2 :]
    names = ("method", "epsilon", "error", "is_certified_bound")
    method, epsilon, error, certified = columns(outcome.table, *names)
    assert certified.dtype == bool
    assert certified.tolist() == [False, False, True, True] + [False] * 4
    np.testing.assert_array_equal(error, np.concatenate(pretended))
    assert np.all(error[2:4] < 1e-6 * epsilon[2:4])
    assert np.all(np.isinf(error[method == "rdp"]))
    (said,) = outcome.warnings
    assert "is_certified_bound" in said


def test_text_and_integers_in_the_table(read, tmp_path, monkeypatch):
    monkeypatch.setattr(
        CalibrationRequest, "answer", lambda request: 2**53 - request.delta.size
    )
    text = FEW.replace("num_steps = 300", 'quantity = "num_steps"\nepsilon = 2.0')
    text = text.replace("delta = 1e-5\n", "")
    text += axis("method", values=["rdp"]) + axis("delta", values=[1e-6, 1e-5])
    outcome = run_sweep(read(text), tmp_path / "out")
    method, steps = columns(outcome.table, "method", "num_steps")
    assert method.tolist() == ["rdp", "rdp"]
    assert steps.dtype == np.int64
    assert steps.tolist() == [2**53 - 2] * 2


# --- Resuming ---


def saved_partly(sweep, folder, numbers):
    """A folder in which some chunks are saved."""
    opened = SweepFolder.opened(folder, sweep)
    for number in numbers:
        opened.save(number, evaluate_chunk(sweep, number)[0])
    return opened


def test_finished_shards_are_kept_and_damaged_ones_made_again(undisturbed, tmp_path):
    sweep, expected = undisturbed
    folder = saved_partly(sweep, tmp_path / "out", [0, 1, 3, 4])
    assert saved_chunks(folder.path) == (4, folder.num_chunks)
    damaged = bytearray(folder.shard(1).read_bytes())
    damaged[-3] ^= 1
    folder.shard(1).write_bytes(damaged)
    folder.shard(3).write_bytes(folder.shard(3).read_bytes()[:-8])
    # A valid shard of another chunk.
    folder.shard(4).write_bytes(folder.shard(0).read_bytes())
    left_over = folder.path / SHARDS / f"00000002{atomic.TEMPORARY}0123"
    left_over.write_bytes(b"half a sha")
    asked = []

    def engine(some, numbers):
        asked.extend(numbers)
        return engines.on_devices(some, numbers)

    run_sweep(sweep, folder.path, engine=engine)
    assert asked == [1, 2, 3, 4, 5]
    assert contents(folder.path) == expected


def test_shards_of_a_job_array(undisturbed, tmp_path):
    sweep, expected = undisturbed
    out = tmp_path / "out"
    assert run_sweep(sweep, out, part=(2, 3)).table is None
    with pytest.raises(ValueError, match=r"4 of 6 chunks .*: 0, 2 to 3, 5; run"):
        run_sweep(sweep, out, engine=None)
    run_sweep(sweep, out, part=(1, 3))
    run_sweep(sweep, out, part=(1, 3), engine=no_work)
    run_sweep(sweep, out, part=(3, 3))
    assert run_sweep(sweep, out, engine=None).table
    assert contents(out) == expected
    assert run_sweep(sweep, out, engine=None).table
    for part in [(0, 3), (4, 3)]:
        with pytest.raises(ValueError, match="1 <= i <= n"):
            run_sweep(sweep, out, part=part)


def test_another_process_may_finish_first(undisturbed, tmp_path):
    sweep, expected = undisturbed

    def engine(some, numbers):
        run_sweep(sweep, tmp_path / "out")  # writes the table and removes the shards
        return engines.on_devices(some, numbers)

    assert run_sweep(sweep, tmp_path / "out", engine=engine).table
    assert contents(tmp_path / "out") == expected


def test_a_failed_chunk_leaves_the_others(undisturbed, tmp_path):
    sweep, expected = undisturbed

    def engine(some, numbers):
        for result in engines.on_devices(some, numbers):
            failed = result._replace(answers=None, error="ValueError: too bad")
            yield failed if result.number in (1, 2) else result

    with pytest.raises(SweepError, match=r"2 of 6 chunks .*1 to 2.*512 to 1,023.*bad"):
        run_sweep(sweep, tmp_path / "out", engine=engine)
    assert saved_chunks(tmp_path / "out") == (4, 6)
    assert run_sweep(sweep, tmp_path / "out").num_evaluated == 1024
    assert contents(tmp_path / "out") == expected


# --- Folders ---


def test_the_folder_of_another_sweep_is_refused(undisturbed, read, tmp_path):
    sweep, _ = undisturbed
    SweepFolder.opened(tmp_path / "out", sweep).save(0, evaluate_chunk(sweep, 0)[0])
    before = contents(tmp_path / "out")
    other = read(SWEEP.replace("60]", "61]").replace("delta = 1e-5", "delta = 1e-6"))
    with pytest.raises(ValueError) as caught:
        run_sweep(other, tmp_path / "out", engine=no_work)
    message = str(caught.value)
    assert "holds another sweep" in message
    assert "axes[1].geomspace[2]: 60 there, 61 now" in message
    assert "delta: 1e-05 there, 1e-06 now" in message
    assert contents(tmp_path / "out") == before


def test_the_folder_of_another_version_is_refused(undisturbed, tmp_path, monkeypatch):
    sweep, _ = undisturbed
    SweepFolder.opened(tmp_path / "out", sweep)
    real = metadata.version
    newer = {"numpy": "99.0"}
    monkeypatch.setattr(metadata, "version", lambda name: newer.get(name) or real(name))
    with pytest.raises(ValueError, match=r"versions.numpy: .* there, 99.0 now"):
        SweepFolder.opened(tmp_path / "out", sweep)


def test_other_folders_are_refused(undisturbed, tmp_path):
    sweep, _ = undisturbed
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="thesis.tex"):
        run_sweep(sweep, tmp_path, engine=no_work)
    with pytest.raises(NotADirectoryError, match="not a folder"):
        run_sweep(sweep, tmp_path / "thesis.tex", engine=no_work)


def test_a_disk_that_fills_up(undisturbed, tmp_path, monkeypatch):
    """The disk is full at the third shard, then at the table; finished shards stay."""
    sweep, expected = undisturbed
    out, real, calls = tmp_path / "out", os.fsync, []
    SweepFolder.opened(out, sweep)

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 2 * 2:  # a file and its folder for each
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            run_sweep(sweep, out)
    assert saved_chunks(out) == (2, 6)
    assert not list(out.rglob(f"*{atomic.TEMPORARY}*"))
    replace = atomic.Path.replace

    def no_tables(path, target):
        if target.name.startswith("table"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(atomic.Path, "replace", no_tables)
        with pytest.raises(OSError, match="No space left"):
            run_sweep(sweep, out)
    assert saved_chunks(out) == (6, 6)
    run_sweep(sweep, out, engine=no_work)
    assert contents(out) == expected


# --- The devices of this machine ---


def test_exceptions_become_results(undisturbed, monkeypatch):
    sweep, _ = undisturbed
    monkeypatch.setattr(
        engines, "evaluate_chunk", lambda *_: (_ for _ in ()).throw(MemoryError("x"))
    )
    (result,) = engines.on_devices(sweep, [3])
    assert result == (3, None, [], "MemoryError: x")


def test_no_chunk_is_begun_before_others_are_saved(undisturbed, monkeypatch):
    """With a slow consumer at most two chunks a device are computed ahead."""
    sweep, _ = undisturbed
    begun = []
    monkeypatch.setattr(engines, "attempt", lambda _, number: begun.append(number))
    results = engines.on_devices(sweep, range(6))
    for taken in range(6):
        next(results)
        time.sleep(0.02)
        assert len(begun) <= taken + 2 * len(jax.local_devices())
    assert list(results) == [] and begun == [*range(6)]
    begun.clear()
    interrupted = engines.on_devices(sweep, range(6))
    next(interrupted)
    interrupted.close()
    assert len(begun) <= 2 * len(jax.local_devices())


# Programs of other processes: each evaluates the sweep of its first argument into
# the folder of its second.
HEAD = """
import re, sys
from pathlib import Path
import jax.numpy as jnp, numpy as np
from jaxdp_episodic.tools.sweep import run as engines
from jaxdp_episodic.tools.sweep.description import read_sweep
"""
# Replaces the accountant, whose kernels each device would compile again.
QUICK = """
def quick(sweep, number):
    start, stop = engines.chunk_range(number, sweep.grid.size, sweep.chunk_size)
    values = sweep.grid.values(np.arange(start, stop))
    rate = jnp.asarray(values["example.sampling_probability"], "float32")
    answers = rate / jnp.asarray(values["noise_multiplier"], "float32")
    return np.asarray(answers, np.float64)[:, None], []
engines.evaluate_chunk = quick
"""
TOLD = """
attempt = engines.attempt
def noted(sweep, number):
    print(f"chunk {number} {jnp.zeros(1).devices()}\\n", end="", flush=True)
    return attempt(sweep, number)
engines.attempt = noted
"""
RUN = """
outcome = engines.run_sweep(read_sweep(sys.argv[1]), sys.argv[2])
"""
MEASURED = """
from jaxdp_episodic.tools.plots.pictures import draw
for kind in sys.argv[3:]:
    draw(Path(sys.argv[2]), kind=kind)
status = Path("/proc/self/status").read_text()
print(outcome.num_evaluated, int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024)
"""


@pytest.mark.slow
def test_chunks_are_spread_over_four_devices(undisturbed, tmp_path, monkeypatch):
    """All devices are used; the files equal those of one device."""
    (tmp_path / "sweep.toml").write_text(SWEEP)
    flags = "--xla_force_host_platform_device_count=4"
    program = HEAD + QUICK + TOLD + RUN
    process = start(program, tmp_path / "sweep.toml", tmp_path / "out", XLA_FLAGS=flags)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert len({line.split()[2] for line in output.splitlines()}) == 4
    monkeypatch.setattr(engines, "evaluate_chunk", None)
    exec(HEAD + QUICK, {})
    run_sweep(undisturbed[0], tmp_path / "expected")
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


# --- A sweep that is killed again and again ends with the same bytes ---


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_killed_at_ten_moments(tmp_path, read):
    """A sweep of 60 chunks, which takes some seconds."""
    text, out = SWEEP.replace("60]", "640]"), tmp_path / "out"
    sweep = read(text)
    started = time.monotonic()
    run_sweep(sweep, tmp_path / "expected")
    took = time.monotonic() - started
    rng, landed, begun = random.Random(5), 0, 0
    for _ in range(10):
        process = start(HEAD + TOLD + RUN, tmp_path / "sweep.toml", out)
        process.stdout.readline()  # the process has begun its first chunk
        time.sleep(rng.uniform(0, took / 8))
        process.send_signal(signal.SIGKILL)
        begun += 1 + process.communicate()[0].count("chunk")
        landed += process.returncode == -signal.SIGKILL
        if (out / MANIFEST).exists():
            assert json.loads((out / MANIFEST).read_text())
    process = start(HEAD + TOLD + RUN, tmp_path / "sweep.toml", out)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    # A kill loses at most the chunks in progress: two a device.
    num_chunks = -(-sweep.grid.size // sweep.chunk_size)
    assert begun + output.count("chunk") <= num_chunks + 2 * landed
    assert contents(out) == contents(tmp_path / "expected")
    assert landed >= 7


# --- Memory grows only with the values of the axes ---


def peak(folder, noises, rates, *kinds, **zipped):
    """Peak memory of a sweep's process with pictures, MiB."""
    text = REQUEST.replace("delta", 'method = "rdp"\ndelta')
    text += axis(NOISE, geomspace=[0.7, 6.0, noises], **zipped)
    text += axis(RATE, geomspace=[0.01, 1.0, rates], **zipped)
    folder.mkdir()
    (folder / "sweep.toml").write_text(text)
    program = HEAD + QUICK + RUN + MEASURED
    process = start(program, folder / "sweep.toml", folder / "out", *kinds)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    evaluated, mib = output.split()
    assert int(evaluated) == (noises if zipped else noises * rates)
    return float(mib)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("settings", "kinds", "zipped"),
    [
        ((2_500, 4_000), ("contours", "lines", "pareto"), {}),
        ((4_000_000, 4_000_000), ("lines", "pareto"), {"zip": "a"}),
    ],
)
def test_memory_of_millions_of_settings(tmp_path, settings, kinds, zipped):
    """Only values of axes are held: 550 and 600 MiB, of which 300 are imports."""
    assert peak(tmp_path / "many", *settings, *kinds, **zipped) < 650


# --- Ray, on a local cluster ---


def test_options_are_checked():
    for name in ("num_cpus", "num_gpus", "max_retries"):
        with pytest.raises(ValueError, match=f"--ray-{name[4:]} must be"):
            RayEngine(**{name: -1})


def test_without_ray_the_error_says_how_to_get_it(monkeypatch, read):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(optional.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install .\.\[ray\]"):
        next(RayEngine()(read(SMALL), [0]))


@pytest.mark.slow
def test_a_sweep_on_ray_has_the_same_bytes(undisturbed, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed (the extra [ray])")
    sweep, expected = undisturbed
    run_sweep(sweep, tmp_path / "out", engine=RayEngine())
    assert contents(tmp_path / "out") == expected
