"""A process that compiles much does not run out of mappings."""

import itertools
from pathlib import Path

import jax
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic import _mappings

STEP = jde.GaussianStep(
    jde.MultistageSampling(jde.Poisson("example", sampling_probability=0.3)),
    noise_multiplier=1.0,
)


@pytest.fixture
def cleared(monkeypatch):
    """How often caches were cleared, each call being a look."""
    calls = []
    clear = jax.clear_caches
    monkeypatch.setattr(jax, "clear_caches", lambda: (calls.append(1), clear()))
    monkeypatch.setattr(_mappings, "_next_look", 0.0)
    monkeypatch.setattr(_mappings, "_SECONDS_BETWEEN_LOOKS", 0.0)
    return calls


def mappings():
    return _mappings._MAPPINGS.read_bytes().count(b"\n")


@pytest.mark.skipif(not _mappings._LIMIT.exists(), reason="no such limit here")
def test_kernels_are_forgotten_and_compiled_again(cleared, monkeypatch, tmp_path):
    limit = tmp_path / "limit"
    limit.write_text(str(10 * mappings()))
    monkeypatch.setattr(_mappings, "_LIMIT", limit)
    first = jde.epsilon(STEP, num_steps=50, delta=1e-5, method="rdp")
    assert not cleared
    crowded = mappings()
    limit.write_text("1")
    assert jde.epsilon(STEP, num_steps=50, delta=1e-5, method="rdp") == first
    assert cleared and mappings() < crowded
    assert jde.epsilon(STEP, num_steps=50, delta=1e-5, method="rdp") == first


def test_a_look_is_not_taken_at_every_call(cleared, monkeypatch, tmp_path):
    limit = tmp_path / "limit"
    limit.write_text("1")
    monkeypatch.setattr(_mappings, "_LIMIT", limit)
    monkeypatch.setattr(_mappings, "_MAPPINGS", Path(__file__))
    monkeypatch.setattr(_mappings, "_SECONDS_BETWEEN_LOOKS", 2.0)
    clock = itertools.count(100.0, 0.5)
    monkeypatch.setattr(_mappings.time, "monotonic", lambda: next(clock))
    for _ in range(9):
        _mappings.forget_kernels_if_crowded()
    assert len(cleared) == 3


def test_systems_without_the_limit_are_left_alone(cleared, monkeypatch, tmp_path):
    monkeypatch.setattr(_mappings, "_LIMIT", tmp_path / "missing")
    _mappings.forget_kernels_if_crowded()
    assert not cleared
