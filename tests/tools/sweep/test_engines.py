"""Where chunks are evaluated: devices, other processes, Ray; and what a kill costs."""

import json
import os
import random
import signal
import sys
import time

import jax
import pytest

from jaxdp_episodic.files import optional
from jaxdp_episodic.tools.sweep import run as engines
from jaxdp_episodic.tools.sweep.run import MANIFEST, RayEngine, run_sweep
from sweep_runs import NOISE, RATE, REQUEST, SMALL, SWEEP, axis, contents, start

pytestmark = pytest.mark.usefixtures("shared_cache")


def on_linux(test):
    """Marks a slow test that reads /proc."""
    only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    return pytest.mark.slow(only(test))


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
    assert len(begun) <= 2


# Programs of other processes: each evaluates the sweep of its first argument into
# the folder of its second.
HEAD = """
import re, sys
from pathlib import Path
import jax.numpy as jnp, numpy as np
from jaxdp_episodic.tools.plots.pictures import draw
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
    print("chunk", number, *jnp.zeros(1).devices(), flush=True)
    return attempt(sweep, number)
engines.attempt = noted
"""
RUN = """
outcome = engines.run_sweep(read_sweep(sys.argv[1]), sys.argv[2])
"""
MEASURED = """
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
    run_sweep(sweep, tmp_path / "expected")
    rng, landed, begun = random.Random(5), 0, 0
    for _ in range(10):
        process = start(HEAD + TOLD + RUN, tmp_path / "sweep.toml", out)
        process.stdout.readline()  # the process has begun its first chunk
        time.sleep(rng.uniform(0, 0.6))
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


@on_linux
def test_pictures_of_ten_million_settings(tmp_path):
    """Without the memory of the accountant's kernels."""
    assert peak(tmp_path / "many", 2500, 4000, "contours", "lines", "pareto") < 700


@on_linux
def test_axes_of_ten_million_values(tmp_path):
    """Only the values of an axis are held in memory."""
    most = 10_000_000
    mib = peak(tmp_path / "long", most, most, "lines", "pareto", zip="a")
    assert mib < 1000


# --- Ray, on a local cluster ---


def test_options_are_checked():
    for name in ("num_cpus", "num_gpus", "max_retries"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            RayEngine(**{name: -1})


def test_without_ray_the_error_says_how_to_get_it(monkeypatch, read):
    def missing(name):
        raise ImportError(name)

    engines._ray.cache_clear()
    monkeypatch.setattr(optional.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install .\.\[ray\]"):
        next(RayEngine()(read(SMALL), [0]))


@pytest.mark.slow
def test_a_sweep_on_ray_has_the_same_bytes(undisturbed, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed (the extra [ray])")
    sweep, expected = undisturbed
    run_sweep(sweep, tmp_path / "out", engine=RayEngine())
    assert contents(tmp_path / "out") == expected
