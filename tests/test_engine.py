"""The boundary: float64 inside, NumPy outside, and no tracers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp_episodic._engine import float64_boundary


@jax.jit
def log1p(x):
    return jnp.log1p(x)


def test_small_offsets_keep_their_digits():
    value = float64_boundary(log1p)(1e-12)
    assert isinstance(value, np.ndarray) and value.dtype == np.float64
    assert abs(float(value) / 1e-12 - 1) < 1e-11


@pytest.mark.parametrize("value", [3, True, np.float32(3), np.arange(3, dtype="i1")])
def test_every_kind_of_number_becomes_float64(value):
    seen = []
    float64_boundary(lambda x: seen.append(x.dtype) or x)(value)
    assert seen == [np.float64]


def test_trees_go_in_and_out():
    out = float64_boundary(lambda tree: {"sum": tree["a"] + tree["b"][0]})(
        {"a": 1, "b": (2,)}
    )
    assert type(out["sum"]) is np.ndarray and out["sum"] == 3.0


def test_a_tracer_raises_rather_than_being_rounded():
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(float64_boundary(log1p))(0.5)
