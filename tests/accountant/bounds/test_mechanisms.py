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
PARAMETERS += [np.nextafter(x, to) for x in (0.5, 1.0, 2.0, 10.0) for to in (0, 9)]

CASES = [(Gaussian, mp_gaussian), (Laplace, mp_laplace)]
CASES += [(RandomizedResponse, mp_response)]


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


@pytest.mark.parametrize(
    ("spec", "value", "pure", "delta"),
    [
        *((spec, no, np.inf, 1) for spec in (Gaussian, Laplace) for no in (0, -0.0)),
        *((spec, np.inf, 0, 0) for spec in (Gaussian, Laplace)),
        (RandomizedResponse, 0.0, 0, 0),
        (RandomizedResponse, np.inf, np.inf, 1),
    ],
)
def test_no_noise_and_infinite_noise(spec, value, pure, delta):
    mechanism = spec(value)
    assert mechanism.rdp(2.0) == mechanism.pure_epsilon == pure
    assert mechanism.delta([0.0, 3.0, np.inf]).tolist() == [delta] * 3
    assert Gaussian(1.0).pure_epsilon == np.inf


# --- Privacy profiles ---


def gaussian_delta(eps, sigma):
    s = 1 / mp.mpf(sigma)
    return mp.ncdf(s / 2 - eps / s) - mp.exp(eps) * mp.ncdf(-s / 2 - eps / s)


def laplace_delta(eps, scale):
    """P > gQ where x > x0: e^(x - s) = e^(eps - x) inside (0, s)."""
    s = 1 / mp.mpf(scale)
    x0 = (eps + s) / 2
    if x0 >= s:
        return mp.mpf(0)
    return 1 - mp.exp(x0 - s) / 2 - mp.exp(eps - x0) / 2


def response_delta(eps, own):
    most, g = mp.exp(mp.mpf(own)), mp.exp(eps)
    return max(mp.mpf(0), (most - g) / (1 + most))


@pytest.mark.parametrize(
    ("spec", "delta", "parameters"),
    [
        (Gaussian, gaussian_delta, [1e-3, 0.05, 0.3, 1.0, 4.0, 1e2, 1e5]),
        (Laplace, laplace_delta, [0.01, 0.3, 1.0, 5.0, 1e6]),
        (RandomizedResponse, response_delta, [0.01, 1.0, 40.0]),
    ],
)
def test_profiles(spec, delta, parameters):
    epsilons = [0.0, 1e-9, 1e-3, 0.1, 0.5, 1.0, 5.0, 30.0, 39.0, 99.9]
    values = spec(np.array(parameters)[:, None]).delta(epsilons)
    with mp.workdps(60):
        for row, parameter in zip(values, parameters, strict=True):
            for value, eps in zip(row, epsilons, strict=True):
                exact = delta(mp.mpf(eps), parameter)
                if spec is Gaussian:
                    # In the far tail the rounding of eps is amplified by t²; what
                    # underflows is rounded up.
                    near = 1e-12 + 1e-15 * (eps * parameter) ** 2
                    assert exact <= value * (1 + near)
                    assert value <= max(exact * (1 + near), 3e-308)
                else:  # 1 / scale, and its difference from eps, are rounded
                    rounded = 1e-15 / parameter if spec is Laplace and exact else 0
                    assert abs(value - exact) <= 1e-14 * exact + rounded


# --- A user's own curve ---


def test_table_is_exact_at_whole_orders_and_above_between():
    exact, whole = Laplace(np.array([0.3, 2.0])), np.arange(2, 33)
    table = RdpTable(exact.rdp(whole))
    np.testing.assert_allclose(table.rdp(whole), exact.rdp(whole), rtol=1e-15)
    orders = np.linspace(1.01, 32, 200)
    values, truth = table.rdp(orders), exact.rdp(orders)
    assert table.shape == (2,)
    assert np.all(values >= truth * (1 - 1e-14))
    assert np.all(values[:, orders > 2] <= 1.05 * truth[:, orders > 2])
    # An infinite value affects only the orders beyond the one before it.
    table = RdpTable(np.array([1.0, 2.0, np.inf]))
    assert table.rdp([2.0, 3.0, 3.5, 4.0]).tolist() == [1.0, 2.0, np.inf, np.inf]


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
