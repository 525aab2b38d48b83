"""Panels: exact for polynomials, dense where requested, none across a gap."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.numerics import quadrature

lay_panels = float64_boundary(quadrature.lay_panels, ("num_panels",))


def lay(low, high, density, floor=-100.0, num_panels=12):
    """The nonempty panels of one batch element."""
    windows = (np.array(a, float)[:, None] for a in (low, high, density))
    lefts, rights = lay_panels(*windows, np.array([floor]), num_panels=num_panels)
    assert lefts.shape == (num_panels, 1)
    assert np.all(np.isfinite(lefts)) and np.all(rights >= lefts)
    used = rights > lefts
    return lefts[used], rights[used]


@pytest.mark.parametrize("nodes", [1, 9])
def test_rule_is_exact_to_degree_2n_minus_1(nodes):
    x, weights = quadrature.gauss_legendre(nodes)
    for power in range(2 * nodes):
        assert math.isclose(weights @ x**power, 1 / (power + 1), rel_tol=1e-13)
    next_one = weights @ x ** (2 * nodes)
    assert not math.isclose(next_one, 1 / (2 * nodes + 1), rel_tol=1e-13)


def test_integrals_are_summed_over_the_panels_of_each_element(engine):
    def integrate(lefts, rights):
        return quadrature.integrate_panels(
            lambda x: (x**3, 0 * x + 2), lefts, rights, nodes_per_panel=2
        )

    lefts, rights = np.array([[0.0, -1.0], [1.0, 4.0]]), np.array([[1.0, 1], [3, 4]])
    cubes, lengths = float64_boundary(integrate)(lefts, rights)
    np.testing.assert_allclose(cubes, [81 / 4, 0.0], rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(lengths, [6.0, 4.0], rtol=1e-14)


def test_one_window_is_cut_into_equal_panels():
    lefts, rights = lay([1.0], [3.0], [5.0], num_panels=8)
    np.testing.assert_allclose(rights[:-1], lefts[1:], rtol=1e-12)
    assert lefts[0] == 1.0 and rights[-1] == 3.0
    np.testing.assert_allclose(rights - lefts, np.ptp([1, 3]) / len(lefts), rtol=1e-9)


def test_dense_windows_get_the_panels(engine):
    lefts, rights = lay([0.0, 4.0], [10.0, 5.0], [1.0, 50.0], num_panels=60)
    np.testing.assert_allclose(rights[:-1], lefts[1:], rtol=1e-12)
    assert lefts[0] == 0.0 and rights[-1] == 10.0
    middle = (lefts + rights) / 2
    dense = np.sum((middle > 4) & (middle < 5))
    # Shares 50 to 9 for any number of panels.
    assert abs(dense - len(lefts) * 50 / 59) <= 1


def test_no_panel_straddles_a_gap(engine):
    lefts, rights = lay([0.0, 7.0, 7.5], [1.0, 8.0, 9.0], [1.0, 1.0, 3.0])
    assert np.all((rights <= 1 + 1e-12) | (lefts >= 7 - 1e-12))
    assert math.isclose(np.sum(rights - lefts), 3.0, rel_tol=1e-12)


def test_windows_are_cut_at_the_floor_and_left_out_without_length():
    lefts, rights = lay([-5.0, -9.0], [2.0, -7.0], [1.0, 9.0], floor=-1.0)
    assert lefts[0] == -1.0 and rights[-1] == 2.0
    lefts, rights = lay([1.0, 4.0, 2.0], [3.0, 4.0, 2.0], [1.0, 1e9, 1e9])
    assert lefts[0] == 1.0 and rights[-1] == 3.0


@pytest.mark.parametrize("number", [1, 2, 3, 13, 33])
def test_windows_may_come_in_any_order(number, engine):
    low, density = np.random.default_rng(number).normal(size=(2, number)).round(1)
    order = np.argsort(low)
    windows = np.stack([low, low + 0.5, 1 + abs(density)])
    found = lay(*windows, num_panels=99)
    np.testing.assert_allclose(found, lay(*windows[:, order], num_panels=99))
