"""Sweeps that are small, and quick to evaluate."""

import pytest

from jaxdp_episodic.sweep.description import read_sweep

SWEEP = """
version = 1
delta = 1e-5
num_steps = 300
method = "rdp"
memory_mib = 1
[step]
type = "GaussianStep"
[step.sampling]
type = "Poisson"
name = "example"
[[axes]]
field = "noise_multiplier"
geomspace = [0.8, 6.0, 40]
[[axes]]
field = "example.sampling_probability"
values = [0.001, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1.0]
"""


@pytest.fixture
def sweep_text():
    """A sweep of 520 settings in 2 chunks."""
    return SWEEP


@pytest.fixture
def read(tmp_path):
    """Reads a sweep of this content."""

    def from_text(content):
        path = tmp_path / "sweep.toml"
        path.write_text(content, encoding="utf-8")
        return read_sweep(path)

    return from_text
