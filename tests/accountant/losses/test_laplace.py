"""The Laplace mechanism's loss and its runs, against integration and other programs."""

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

import jaxdp_episodic as jde
from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.losses.laplace import LaplaceLoss
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule, Quadrature
from jaxdp_episodic.bounds import Laplace

ONE = np.ones(1)
DIRECTIONS = ("forward", "backward")


def loss_of(rate, shift):
    return LaplaceLoss(ONE, rate * ONE, shift * ONE)


log_tails = float64_boundary(lambda u, loss: loss.log_tails(u))


def log_excess(t, loss, direction):
    rule = MomentRule(direction, Quadrature(32, 16))
    return float64_boundary(lambda t, loss: loss.log_excess(t, rule))(t, loss)


def integrated(rate, shift, function, breaks):
    """``E_Q[function(P/Q)]`` from the densities on the line."""
    p, s = mpmath.mpf(rate), mpmath.mpf(shift)

    def term(x):
        ratio = 1 - p + p * mpmath.exp(abs(x) - abs(x - s))
        return mpmath.exp(-abs(x)) / 2 * function(ratio)

    middle = [x for x in breaks if 0 < x < s]
    return mpmath.quad(term, [0, *sorted(middle), s]) + (
        # The ratio is constant beyond both ends.
        function(1 - p + p * mpmath.exp(-s)) / 2
        + function(1 - p + p * mpmath.exp(s)) * mpmath.exp(-s) / 2
    )


def settings(seed, count):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        rates = [10 ** rng.uniform(-9, 0), 1 - 10 ** rng.uniform(-9, -0.3), 1]
        yield float(rng.choice(rates)), 10 ** rng.uniform(-4, 2), rng


@pytest.mark.few(1)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_moments_against_integration(direction):
    chosen = [(p, s, 10 ** rng.uniform(-5, 2.5)) for p, s, rng in settings(1, 8)]
    # Backward, the largest losses of the last one weigh little, but fall slowly.
    for rate, shift, t in [*chosen, (0.01, 56.0, 99.0)]:
        power = 1 + mpmath.mpf(t) if direction == "forward" else -mpmath.mpf(t)
        with mpmath.workdps(50):
            turn = mpmath.log((1 - mpmath.mpf(rate)) / rate) if rate < 1 else -shift
            places = [(shift + turn + 3 * k) / 2 for k in range(-7, 8)]
            places += [shift - k / t for k in (1, 5, 20)] + [k / t for k in (1, 5, 20)]
            # Minus the tangent, which leaves the excess, never negative.
            expected = mpmath.log(
                integrated(
                    rate,
                    shift,
                    lambda r, a=power: r**a - 1 - a * (r - 1),
                    [*places, shift / 2],
                )
            )
        (found,) = log_excess(t * ONE, loss_of(rate, shift), direction)
        assert abs(found[0] - float(expected)) < 1e-11, (rate, shift, t)


def exact_tails(rate, shift, u, backward):
    """Profile and tail from the intervals on which the ratio is above g."""
    p, s, g = mpmath.mpf(rate), mpmath.mpf(shift), mpmath.exp(mpmath.mpf(u))
    k = 1 - g * (1 - p) if backward else mpmath.mpf(1)
    if k <= 0:
        return mpmath.mpf(0), mpmath.mpf(0)
    base = mpmath.log(g * p / k) if backward else mpmath.log((g - 1 + p) / p)
    if base >= s:
        return mpmath.mpf(0), mpmath.mpf(0)
    there = 1 - mpmath.exp((base - s) / 2) / 2
    here = mpmath.exp(-(s + base) / 2) / 2
    if backward:
        mixed = (1 - p) * there + p * here
        return there - g * mixed, g * mixed
    return (1 - p) * here + p * there - g * here, g * here


@pytest.mark.parametrize("backward", [0, 1])
def test_tails_against_fifty_digits(backward):
    for rate, shift, rng in settings(2, 100):
        loss = loss_of(rate, shift)
        top = float(loss.largest_loss(backward=bool(backward))[0])
        share = rng.choice([0, 10 ** rng.uniform(-10, 0), 1 - 10 ** rng.uniform(-6, 0)])
        u = top * float(share)
        profile, tail = (a[0] for a in log_tails(u * ONE, loss)[backward])
        with mpmath.workdps(60):
            expected = exact_tails(rate, shift, u, bool(backward))
            off = float(abs(mpmath.exp(profile) - expected[0]))
        move = float(loss.tail_displacement(u * ONE)[0])
        allowed = 4e-15 * (1 + abs(profile) + abs(tail)) * np.exp(profile)
        assert off <= allowed + 2 * move * np.exp(tail), (rate, shift, u)


def test_edges_of_the_tails():
    u = np.array([0.0, 5e-324, 1e-12, 0.5, 709.0, 1e3, 1e300])
    for rate in (0.0, 1e-12, 0.5, 1.0):
        for shift in (0.0, 1e-20, 1e-6, 1.0, 1e3, 1e8):
            for tails in log_tails(u, loss_of(rate, shift)):
                values = np.stack(tails)
                assert np.all(values <= 1e-15)  # none is NaN
                assert np.all(values[0][1:] <= values[0][:-1] + 1e-12)
    forward, _ = log_tails(np.array([999.0]), loss_of(1.0, 1e3))
    np.testing.assert_allclose(forward[0], np.log1p(-np.exp(-0.5)), rtol=1e-13)


def test_rdp_against_the_closed_form():
    noise, orders = np.geomspace(0.05, 50, 9), np.array([1 + 1e-6, 1.5, 2, 17.5, 4096])
    found = jde.rdp(jde.LaplaceRelease(noise), orders)
    np.testing.assert_allclose(found, Laplace(noise).rdp(orders), rtol=1e-12)
    assert jde.rdp(jde.LaplaceRelease(0.5), np.inf) == pytest.approx(2.0, rel=2e-12)
    most = jde.rdp(jde.LaplaceRelease(0.5, sampling_probability=0.1), np.inf)
    assert most == pytest.approx(np.log1p(0.1 * np.expm1(2.0)), rel=2e-12)


def test_epsilon_against_dp_accounting():
    noise, rate, steps, delta = 2.0, 0.5, 4, 1e-4
    step = jde.LaplaceRelease(noise, sampling_probability=rate)
    run = {"num_steps": steps, "delta": delta}
    ends = [
        privacy_loss_distribution.from_laplace_mechanism(
            noise,
            value_discretization_interval=1e-3,
            pessimistic_estimate=pessimistic,
            sampling_prob=rate,
        )
        .self_compose(steps)
        .get_epsilon_for_delta(delta)
        for pessimistic in (False, True)
    ]
    lower, upper = jde.epsilon_interval(step, **run)
    assert lower <= ends[1] * (1 + 1e-6) and ends[0] * (1 - 1e-6) <= upper
    value, info = jde.epsilon(step, return_info=True, **run)
    if not info.is_certified_bound:
        assert ends[0] * (1 - 1e-6) <= value <= ends[1] * (1 + 1e-6)


def test_a_single_release_has_a_closed_form():
    noise, delta = np.array([0.1, 1.0, 10.0]), 1e-3
    expected = np.maximum(1 / noise + 2 * np.log1p(-delta), 0.0)
    release = jde.LaplaceRelease(noise)
    for method in ("exact", "pld"):
        found = jde.epsilon(release, num_steps=1, delta=delta, method=method)
        np.testing.assert_allclose(found, expected, rtol=1e-11)
        # The old and the new content are up to two clip norms apart.
        other = jde.LaplaceRelease(2 * noise, neighboring_relation="replace_one")
        again = jde.epsilon(other, num_steps=1, delta=delta, method=method)
        np.testing.assert_allclose(again, expected, rtol=1e-11)
    profile = jde.privacy_profile(jde.LaplaceRelease(0.5), [0.0, 1.0, 2.0, np.inf])
    np.testing.assert_allclose(profile, [*-np.expm1([-1.0, -0.5]), 0, 0], atol=1e-15)
    assert jde.delta(jde.LaplaceRelease(1.0), num_steps=10, epsilon=10.1) == 0
    assert jde.delta(jde.LaplaceRelease(1e80), num_steps=1, epsilon=0) >= 5e-81
    rare = jde.LaplaceRelease(0.01, sampling_probability=1e-120)  # loses e^100 times it
    assert jde.epsilon(rare, num_steps=1, delta=3e-121, method="pld") < 1e-12
    low, high = jde.epsilon_interval(jde.ApproximateDP(93), num_steps=54, delta=1e-200)
    assert high * (1 - 1e-4) < low <= high  # the lower end was that of one step
    rarer = jde.DiscreteLaplaceRelease(12.0, sampling_probability=1e-256)
    assert jde.delta_interval(rarer, num_steps=8, epsilon=0.005) == (0, 0)  # not NaN
