"""Base mechanisms against their definitions, integrated at 50 digits."""

import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from jaxdp_episodic.bounds import (
    Gaussian,
    Laplace,
    RandomizedResponse,
    RdpCurve,
    RdpTable,
)
from oracles.precise import mp_gaussian, mp_laplace, mp_response

ORDERS = [1 + 1e-9, 1.001, 1.5, 2.0, 3.0, 17.25, 256.0, 4096.0]
PARAMETERS = [1e-6, 1e-3, 0.05, 0.3, 0.5, 1.0, 2.0, 30.0, 700.0, 1e4]
# One ulp on either side of where the form of a Laplace moment changes.
PARAMETERS += [np.nextafter(x, to) for x in (0.5, 1.0, 2.0) for to in (0, 9)]

CASES = [
    (Gaussian, mp_gaussian),
    (Laplace, mp_laplace),
    (RandomizedResponse, mp_response),
]


# --- RDP curves ---


@pytest.mark.parametrize(("spec", "oracle"), CASES)
def test_rdp_matches_the_definition(spec, oracle):
    values = spec(np.array(PARAMETERS)).rdp(ORDERS)
    with mp.workdps(60):
        expected = [[float(oracle(a, x)) for a in ORDERS] for x in PARAMETERS]
    np.testing.assert_allclose(values, expected, rtol=2e-14)


@pytest.mark.parametrize(("spec", "oracle"), CASES)
def test_rdp_at_extreme_parameters(spec, oracle):
    """1e-150 … 1e150: inf only where the value is beyond a float, never 0."""
    parameters = np.array([1e-150, 1e-40, 1e-12, 1e12, 1e40, 1e150])
    values = spec(parameters).rdp([1.5, 2.0, 4096.0])
    with mp.workdps(400):
        expected = [[oracle(a, x) for a in (1.5, 2.0, 4096.0)] for x in parameters]
        expected = np.array([[float(v) for v in row] for row in expected])
    np.testing.assert_allclose(values, expected, rtol=2e-14)


@pytest.mark.parametrize("spec", [Laplace, RandomizedResponse])
def test_rdp_of_large_orders_is_the_pure_epsilon(spec):
    mechanism = spec(np.array([0.1, 1.0, 5.0]))
    np.testing.assert_allclose(mechanism.rdp(1e9), mechanism.pure_epsilon, rtol=1e-7)
    assert Gaussian(1.0).pure_epsilon == np.inf


@pytest.mark.parametrize("spec", [Gaussian, Laplace])
def test_no_noise_and_infinite_noise(spec):
    assert spec(0.0).rdp(2.0) == spec(-0.0).rdp(2.0) == np.inf
    assert spec(0.0).pure_epsilon == np.inf
    assert spec(0.0).delta([0.0, 3.0, np.inf]).tolist() == [1.0, 1.0, 1.0]
    assert spec(np.inf).rdp(2.0) == 0
    assert spec(np.inf).pure_epsilon == 0
    assert spec(np.inf).delta([0.0, 3.0, np.inf]).tolist() == [0.0, 0.0, 0.0]


def test_randomized_response_limits():
    assert RandomizedResponse(0.0).rdp(2.0) == 0
    assert RandomizedResponse(np.inf).rdp(2.0) == np.inf
    assert RandomizedResponse(np.inf).delta(np.inf) == 1
    assert RandomizedResponse(0.0).delta(0.0) == 0


# --- Privacy profiles ---


def test_gaussian_profile():
    sigmas = [1e-3, 0.05, 0.3, 1.0, 4.0, 1e2, 1e5]
    epsilons = [0.0, 1e-8, 1e-3, 0.1, 1.0, 5.0, 30.0]
    values = Gaussian(np.array(sigmas)[:, None]).delta(epsilons)
    with mp.workdps(60):
        for row, sigma in zip(values, sigmas, strict=True):
            s = 1 / mp.mpf(sigma)
            for value, eps in zip(row, epsilons, strict=True):
                e = mp.mpf(eps)
                exact = mp.ncdf(s / 2 - e / s) - mp.exp(e) * mp.ncdf(-s / 2 - e / s)
                if exact < 1e-307:
                    assert exact <= value < 3e-308
                else:
                    # in the far tail the rounding of eps is amplified by t²
                    tail = max(0.0, float(e / s)) ** 2
                    assert abs(value / exact - 1) < 1e-12 + 1e-15 * tail, (sigma, eps)


def test_laplace_profile():
    """Against the integral of (P - g Q)_+ over the three pieces of the line."""
    scales, epsilons = [0.01, 0.3, 1.0, 5.0, 1e6], [0.0, 1e-9, 0.1, 1.0, 3.0, 99.9]
    values = Laplace(np.array(scales)[:, None]).delta(epsilons)
    with mp.workdps(50):
        for row, scale in zip(values, scales, strict=True):
            s = 1 / mp.mpf(scale)
            for value, eps in zip(row, epsilons, strict=True):
                e = mp.mpf(eps)
                # P > gQ where x > x0: e^{x-s} = e^{e-x} inside (0, s)
                x0 = (e + s) / 2
                exact = mp.mpf(0)
                if x0 < s:
                    p_mass = 1 - mp.exp(x0 - s) / 2
                    exact = p_mass - mp.exp(e) * mp.exp(-x0) / 2
                # 1/scale and its difference from eps are rounded
                rounding = 1e-15 * float(s) if exact else 0
                assert abs(value - exact) <= 1e-14 * exact + rounding


def test_randomized_response_profile():
    values = RandomizedResponse(np.array([[0.01], [1.0], [40.0]])).delta(
        [0.0, 0.5, 39.0]
    )
    with mp.workdps(50):
        for row, eps0 in zip(values, [0.01, 1.0, 40.0], strict=True):
            for value, eps in zip(row, [0.0, 0.5, 39.0], strict=True):
                e0, g = mp.exp(mp.mpf(eps0)), mp.exp(mp.mpf(eps))
                exact = max(mp.mpf(0), (e0 - g) / (1 + e0))
                assert abs(value - exact) <= 1e-14 * exact


# --- A user's own curve ---


def test_table_is_exact_at_whole_orders_and_above_between():
    exact = Laplace(np.array([0.3, 2.0]))
    table = RdpTable(exact.rdp(np.arange(2, 33)))
    np.testing.assert_allclose(
        table.rdp(np.arange(2, 33)), exact.rdp(np.arange(2, 33)), rtol=1e-15
    )
    orders = np.linspace(1.01, 32, 200)
    values, truth = table.rdp(orders), exact.rdp(orders)
    assert np.all(values >= truth * (1 - 1e-14))
    assert np.all(values[:, orders > 2] <= 1.05 * truth[:, orders > 2])


def test_infinite_values_affect_only_orders_beyond_them():
    table = RdpTable(np.array([1.0, 2.0, np.inf]))
    assert table.rdp([2.0, 3.0]).tolist() == [1.0, 2.0]
    assert table.rdp([3.5, 4.0]).tolist() == [np.inf, np.inf]


def test_curve_in_jax_and_in_numpy():
    orders = np.array([1.5, 2.0, 40.0])
    expected = Gaussian(3.0).rdp(orders)
    for curve in (lambda a: a / 18.0, lambda a: jnp.asarray(a) / 18.0):
        np.testing.assert_allclose(RdpCurve(curve).rdp(orders), expected, rtol=1e-15)
        np.testing.assert_allclose(
            RdpCurve(curve).up_to(5).rdp([2, 3, 4, 5]), np.arange(2, 6) / 18, rtol=1e-15
        )
    batched = RdpCurve(lambda a: a * np.array([[0.5], [0.25]]))
    assert batched.shape == (2,)
    assert batched.rdp(2.0).tolist() == [1.0, 0.5]


def test_bad_curves():
    with pytest.raises(TypeError, match="curve must return float64"):
        RdpCurve(lambda a: a.astype(np.float32)).rdp(2.0)
    with pytest.raises(ValueError, match="shape"):
        RdpCurve(lambda a: np.float64(1.0)).rdp([2.0, 3.0])
    with pytest.raises(ValueError, match=">= 0"):
        RdpCurve(lambda a: -a).rdp(2.0)
    with pytest.raises(ValueError, match="last order of the RDP table, 3"):
        RdpTable(np.array([1.0, 2.0])).rdp(3.5)
    with pytest.raises(ValueError, match="values must hold"):
        RdpTable(np.array([]))
    with pytest.raises(ValueError, match="limit must broadcast"):
        RdpTable(np.array([1.0, 2.0]), limit=np.array([1.0, 2.0]))
    with pytest.raises(NotImplementedError, match="RdpTable"):
        RdpTable(np.array([1.0, 2.0])).delta(1.0)


# --- Invalid arguments ---


@pytest.mark.parametrize("spec", [Gaussian, Laplace, RandomizedResponse])
def test_bad_parameters(spec):
    for value in (True, "1", -1.0, [1.0, np.nan]):
        with pytest.raises((TypeError, ValueError), match="multiplier|scale|epsilon"):
            spec(value)


def test_bad_orders_epsilons_and_shapes():
    for orders in (1.0, np.inf, np.nan, "2"):
        with pytest.raises((TypeError, ValueError), match="orders"):
            Gaussian(1.0).rdp(orders)
    with pytest.raises(ValueError, match="epsilon must be >= 0"):
        Gaussian(1.0).delta(-0.1)
    with pytest.raises(ValueError, match="do not broadcast"):
        Gaussian(np.ones(3)).delta(np.ones(4))
