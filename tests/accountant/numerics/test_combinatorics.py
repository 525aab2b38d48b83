"""Binomial coefficients in log space, against exact integers."""

import functools
import math

import mpmath as mp
import numpy as np
import pytest

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.numerics import binomial

log_binomial = float64_boundary(binomial.log_binomial)


@functools.cache
def exact(n: int, k: int) -> float:
    with mp.workdps(40):
        return float(mp.log(math.comb(n, k)))


def test_small_table(engine):
    n, k = np.meshgrid(np.arange(0, 41), np.arange(0, 41), indexing="ij")
    inside = k <= n
    expected = [
        exact(int(a), int(b)) for a, b in zip(n[inside], k[inside], strict=True)
    ]
    values = log_binomial(n, k)
    np.testing.assert_allclose(values[inside], expected, rtol=1e-14, atol=2e-15)
    assert np.all(values[~inside] == -np.inf)


@pytest.mark.parametrize("n", [15, 16, 17, 31, 32, 33, 255, 1000, 4096])
def test_large(n):
    k = np.unique(np.geomspace(1, n, 60).astype(int))
    k = np.unique(np.concatenate([k, n - k]))
    expected = np.array([exact(n, int(j)) for j in k])
    assert np.max(np.abs(log_binomial(n, k) - expected)) < 1e-12


def test_edges():
    assert log_binomial(7, 0) == 0
    assert log_binomial(7, 7) == 0
    assert log_binomial(7, -1) == -np.inf
    assert log_binomial(0, 0) == 0
