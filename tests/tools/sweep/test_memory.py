"""Memory grows only with the axes' values, not with the number of settings."""

import sys

import pytest

from sweep_runs import start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory from /proc"),
]

# A formula replaces the accountant.
PROGRAM = """
import re, sys
from pathlib import Path
import numpy as np
from jaxdp_episodic.tools.plots.pictures import draw
from jaxdp_episodic.tools.sweep import run as engines
from jaxdp_episodic.tools.sweep.description import read_sweep
from jaxdp_episodic.tools.sweep.run import chunk_range
from jaxdp_episodic.tools.sweep.run import run_sweep

def quick(sweep, number):
    start, stop = chunk_range(number, sweep.grid.size, sweep.chunk_size)
    values = sweep.grid.values(np.arange(start, stop))
    rate = values["example.sampling_probability"]
    return (rate / values["noise_multiplier"])[:, None], []

engines.evaluate_chunk = quick
outcome = run_sweep(read_sweep(sys.argv[1]), sys.argv[2])
for kind in sys.argv[3:]:
    draw(Path(sys.argv[2]), kind=kind)
status = Path("/proc/self/status").read_text()
print(outcome.num_evaluated, int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024)
"""
HEAD = """
version = 1
num_steps = 300
delta = 1e-5
method = "rdp"
[step]
type = "GaussianStep"
[step.sampling]
type = "Poisson"
name = "example"
"""
AXIS = """
[[axes]]
field = "{}"
geomspace = [{}, {}]
"""


def peak(folder, noises, rates, *kinds, zipped=""):
    """Peak memory of a sweep's process with pictures, MiB."""
    text = HEAD + AXIS.format("noise_multiplier", "0.7, 6.0", noises) + zipped
    text += AXIS.format("example.sampling_probability", "0.01, 1.0", rates) + zipped
    folder.mkdir()
    (folder / "sweep.toml").write_text(text)
    process = start(PROGRAM, folder / "sweep.toml", folder / "out", *kinds)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    evaluated, mib = output.split()
    assert int(evaluated) == (noises if zipped else noises * rates)
    return float(mib)


def test_ten_million_settings_need_no_more_memory_than_two(tmp_path):
    some = peak(tmp_path / "some", 1000, 2000)
    many = peak(tmp_path / "many", 2500, 4000)
    assert many < some + 50


def test_pictures_of_ten_million_settings(tmp_path):
    """Without the memory of the accountant's kernels."""
    assert peak(tmp_path / "many", 2500, 4000, "contours", "lines", "pareto") < 700


def test_axes_of_ten_million_values(tmp_path):
    """Only the values of an axis are held in memory."""
    most = 10_000_000
    mib = peak(tmp_path / "long", most, most, "lines", "pareto", zipped='zip = "a"\n')
    assert mib < 1000
