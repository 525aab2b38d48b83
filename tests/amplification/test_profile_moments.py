import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp_episodic._precision import float64_boundary
from jaxdp_episodic.amplification import moments, profiles
from jaxdp_episodic.amplification.profile_moments import (
    log_excess_from_profile,
    rdp_from_profile,
)

T = np.array([1e-3, 0.5, 1.0, 3.3, 31.0, 200.0, 4095.0])
SETTINGS = [
    # (rate, inner rate, shift)
    (0.01, 0.2, 1.0),
    (1e-4, 0.5, 0.3),
    (1e-12, 1e-6, 1.25),
    (0.5, 1.0, 3.0),
    (0.9, 0.1, 10.0),
    (1.0, 0.3, 0.5),
    (1e-3, 1e-3, 0.01),
    (0.2, 0.5, 1e-3),
]


def slow(settings):
    """Each is compiled, as profiles are functions of theirs."""
    return [pytest.param(*setting, marks=pytest.mark.slow) for setting in settings]


def direct(kernel, **static):
    """The moments by direct quadrature, scalar settings spread over the orders."""

    def spread(t, *settings):
        settings = [jnp.full_like(t, setting) for setting in settings]
        return kernel(t, *settings, num_panels=160, nodes_per_panel=16, **static)[0]

    return float64_boundary(jax.jit(spread))


FORWARD = direct(moments.log_excess_sampled, direction="forward")
BACKWARD = direct(moments.log_excess_sampled, direction="backward")
SYMMETRIC = direct(moments.log_excess_sampled, direction="symmetric")
ANTIPODAL = direct(moments.log_excess_antipodal)


def both(log_h):
    return log_h, log_h


def assert_same(found, expected):
    """1e-9 of the excess, or of its logarithm where that is huge."""
    scale = np.maximum(1, 1e-3 * np.abs(expected))
    assert np.max(np.abs(found - expected) / scale) < 1e-9


@pytest.mark.parametrize("p, r, s", [*SETTINGS[::2], *slow(SETTINGS[1::2])])
def test_equation_one_gives_the_directly_integrated_moments(p, r, s):
    def sampled(u):
        return profiles.log_sampled_profile(u, 1.0, p, s)

    assert_same(log_excess_from_profile(sampled, T), FORWARD(T, p, s))
    backward = log_excess_from_profile(sampled, T, direction="backward")
    assert_same(backward, BACKWARD(T, p, s))

    found = log_excess_from_profile(
        lambda u: profiles.log_swapped_profile(u, 0.3, p, s), T
    )
    assert_same(found, np.log(0.3) + SYMMETRIC(T, p, s))

    found = log_excess_from_profile(
        lambda u: profiles.log_antipodal_profile(u, 1.0, p, r, s), T
    )
    assert_same(found, ANTIPODAL(T, p, r, s))


@pytest.mark.parametrize("p, r, s", [*SETTINGS[:4:2], *slow(SETTINGS[4::2])])
def test_equation_one_for_independent_episodes(p, r, s):
    found = log_excess_from_profile(
        lambda u: profiles.log_episodes_profile(u, p, s, jnp.float64(3)), T
    )
    # the excess is linear in the profile
    any_rate = -np.expm1(3 * np.log1p(-p)) if p < 1 else 1.0
    weights = [3 * p * (1 - p) ** 2, 3 * p**2 * (1 - p), p**3]
    terms = [
        np.log(w / any_rate) + SYMMETRIC(T, any_rate, k * s)
        for k, w in enumerate(weights, 1)
        if w > 0
    ]
    assert_same(found, np.logaddexp.reduce(terms, axis=0))


def test_the_gaussian_mechanism():
    orders = np.array([[1.001, 1.5], [2.0, 4096.0]])
    rdp = rdp_from_profile(
        lambda u: both(profiles.log_gaussian_profile(jnp.float64(0.7), u)), orders
    )
    assert rdp.shape == (2, 2)
    np.testing.assert_allclose(rdp, orders * 0.245, rtol=1e-10)
    assert np.all(rdp >= orders * 0.245 * (1 - 1e-13))


def randomized_response(log_odds):
    """Profile max(0, p - g (1 - p)): a kink, and 0 beyond it."""

    def log_profile(u):
        top = -jnp.log1p(jnp.exp(-log_odds))
        gap = jnp.where(u < log_odds, u - log_odds, -1.0)
        inside = top + jnp.log(-jnp.expm1(gap))
        return both(jnp.where(u < log_odds, inside, -jnp.inf))

    return log_profile


def test_a_profile_with_a_kink():
    orders, p = np.array([1.2, 2.0, 30.0, 3000.0]), 1 / (1 + np.exp(-0.8))
    rdp = rdp_from_profile(randomized_response(0.8), orders)
    log_odds, t = 0.8, orders - 1
    terms = np.log(p) + t * log_odds, np.log1p(-p) - t * log_odds
    np.testing.assert_allclose(rdp, np.logaddexp(*terms) / t, rtol=1e-10)


def test_directions_and_shapes():
    def sampled(u):
        return profiles.log_sampled_profile(u, 1.0, 0.1, 1.0)

    forward = rdp_from_profile(sampled, 8, direction="forward")
    backward = rdp_from_profile(sampled, 8, direction="backward")
    assert type(forward) is np.float64
    assert backward < forward == rdp_from_profile(sampled, 8)
    assert rdp_from_profile(sampled, []).shape == (0,)


def test_a_moment_that_is_not_finite_is_infinite():
    def floor(u):  # a chance of 1e-30 of an unbounded loss
        gaussian = profiles.log_gaussian_profile(jnp.float64(0.7), u)
        return both(jnp.logaddexp(gaussian, jnp.log(1e-30)))

    def heavy_tail(u):  # h = 1 / g²: moments of order up to 3
        return -2 * u, -2 * u

    assert rdp_from_profile(floor, 1.5) == np.inf
    assert rdp_from_profile(heavy_tail, 3.5) == np.inf
    # one divergent order does not spoil the others
    rdp = rdp_from_profile(heavy_tail, [2.5, 3.5, 1.5])
    finite = [
        np.log1p(t * (1 + t) * (1 / (2 - t) + 1 / (3 + t))) / t for t in (1.5, 0.5)
    ]
    np.testing.assert_allclose(rdp, [finite[0], np.inf, finite[1]], rtol=1e-10)
    assert rdp_from_profile(lambda u: (jnp.nan * u, u), 2.0) == np.inf


def test_no_leak_at_all():
    assert rdp_from_profile(lambda u: both(0 * u - jnp.inf), 2.0) == 0


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        ({"orders": 1.0}, ValueError, "orders must be > 1"),
        ({"orders": "2"}, TypeError, "orders must be a number"),
        ({"orders": 2, "direction": "up"}, ValueError, "direction must be one of"),
        ({"orders": 2, "relative_tolerance": 0}, ValueError, "relative_tolerance"),
    ],
)
def test_refusals(kwargs, error, message):
    with pytest.raises(error, match=message):
        rdp_from_profile(randomized_response(1.0), **kwargs)
