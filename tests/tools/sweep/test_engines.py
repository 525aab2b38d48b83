"""Chunks are evaluated by the devices of this machine; failures are results."""

import time

import jax
import pytest

from jaxdp_episodic.tools.sweep import run as engines
from jaxdp_episodic.tools.sweep.run import run_sweep
from sweep_runs import SWEEP, contents, start

pytestmark = pytest.mark.usefixtures("shared_cache")


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


PROGRAM = """
import sys
import jax
from jaxdp_episodic.tools.sweep import run as engines
from jaxdp_episodic.tools.sweep.description import read_sweep
from jaxdp_episodic.tools.sweep.run import run_sweep

used = set()
attempt = engines.attempt
def noted(sweep, number):
    used.add(str(jax.numpy.zeros(1).devices()))
    return attempt(sweep, number)
engines.attempt = noted
run_sweep(read_sweep(sys.argv[1]), sys.argv[2])
print(jax.local_device_count(), len(used))
"""


# Replaces the accountant, whose kernels each device would compile again.
QUICK = """
import jax.numpy as jnp, numpy as np
from jaxdp_episodic.tools.sweep.run import chunk_range

def quick(sweep, number):
    start, stop = chunk_range(number, sweep.grid.size, sweep.chunk_size)
    values = sweep.grid.values(np.arange(start, stop))
    noise = jnp.asarray(values["noise_multiplier"], "float32")
    return np.asarray(jnp.exp(-noise), np.float64)[:, None], []
"""


@pytest.mark.slow
def test_chunks_are_spread_over_four_devices(undisturbed, tmp_path, monkeypatch):
    """All devices are used; the files equal those of one device."""
    program = QUICK + PROGRAM.replace(
        "used = ", "engines.evaluate_chunk = quick\nused = "
    )
    (tmp_path / "sweep.toml").write_text(SWEEP)
    flags = "--xla_force_host_platform_device_count=4"
    process = start(program, tmp_path / "sweep.toml", tmp_path / "out", XLA_FLAGS=flags)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert output.splitlines()[-1] == "4 4"
    found = contents(tmp_path / "out")
    space = {}
    exec(QUICK, space)
    monkeypatch.setattr(engines, "evaluate_chunk", space["quick"])
    run_sweep(undisturbed[0], tmp_path / "expected")
    assert found == contents(tmp_path / "expected")
