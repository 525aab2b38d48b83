"""Certified ends of delta and epsilon: they hold the truth, and are close together."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

import jaxdp_episodic as jde
from jaxdp_episodic.accounting import evaluation
from jaxdp_episodic.accounting.pld import interval, lattice, refine
from jaxdp_episodic.accounting.pld import lower as loss_lower
from jaxdp_episodic.accounting.profile import privacy_profile
from jaxdp_episodic.accounting.run import (
    ANTIPODAL,
    EPISODES,
    SAMPLED,
    SWAPPED,
    DominatingPair,
    dominating_pair,
)

KINDS = (SAMPLED, SWAPPED, ANTIPODAL, EPISODES)


def pair(kind, outer=1.0, rate=1.0, inner=1.0, sensitivity=1.0, noise=1.0, episodes=1):
    fields = (outer, rate, inner, sensitivity, noise, episodes)
    return DominatingPair(kind, *(np.atleast_1d(np.asarray(f, float)) for f in fields))


def gaussian_log_delta(epsilon, steps, noise):
    """Closed form (Balle and Wang 2018), 40 digits."""
    with mpmath.workdps(40):
        mu = mpmath.sqrt(steps) / mpmath.mpf(noise)
        t = mpmath.mpf(epsilon) / mu - mu / 2

        def tail(x):
            return mpmath.erfc(x / mpmath.sqrt(2)) / 2

        return float(mpmath.log(tail(t) - mpmath.exp(epsilon) * tail(t + mu)))


def random_settings(kind, size, seed):
    rng = np.random.default_rng(seed)

    def spread(low, high):
        return np.exp(rng.uniform(np.log(low), np.log(high), size))

    one = np.ones(size)
    steps, log_delta = np.rint(spread(1, 1e7)), np.log(spread(1e-12, 1e-3))
    rate = np.where(rng.random(size) < 0.1, 1.0, spread(1e-6, 1))
    outer = np.where(rng.random(size) < 0.5, 1.0, spread(1e-3, 1))
    inner = np.where(rng.random(size) < 0.5, 1.0, spread(1e-3, 1))
    episodes = rng.integers(1, 8, size).astype(float) if kind == EPISODES else one
    settings = DominatingPair(
        kind,
        one if kind == EPISODES else outer,
        rate,
        inner if kind == ANTIPODAL else one,
        one if kind in (SAMPLED, ANTIPODAL) else 2 * one,
        spread(0.3, 100),
        episodes,
    )
    return settings, steps, log_delta


@pytest.mark.parametrize(
    "steps, noise, epsilon",
    [
        (1, 1.0, 2.0),
        (10, 3.0, 4.0),
        (1e3, 30.0, 5.0),
        (1e7, 3000.0, 5.0),
        (1e7, 1000.0, 20.0),
        (1e5, 3.0, 6000.0),
        (100, 10.0, 12.0),
    ],
)
def test_gaussian_mechanism_is_inside(steps, noise, epsilon):
    truth = gaussian_log_delta(epsilon, steps, noise)
    arguments = (pair(SAMPLED, noise=noise),), (np.array([steps]),)
    lower, upper = interval.log_delta_bounds(np.array([epsilon]), *arguments)
    assert lower <= truth <= upper
    assert upper - lower <= interval.DEFAULT_DELTA_SHARE
    lower, upper = interval.epsilon_bounds(np.array([truth]), *arguments)
    assert lower <= epsilon <= upper
    assert upper - lower <= interval.DEFAULT_EPSILON_SHARE * lower


@pytest.mark.slow
def test_two_steps_against_quadrature():
    """delta of two different sampled steps, by the integral over both outputs."""
    (p1, s1), (p2, s2), epsilon = (0.1, 1.0), (0.3, 2.0), 0.7
    x = np.linspace(-12, 14, 4001)
    h = x[1] - x[0]

    def densities(p, s):
        q = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return q * (1 - p + p * np.exp(x / s - 0.5 / s**2)), q

    (a1, b1), (a2, b2) = densities(p1, s1), densities(p2, s2)
    a, b = np.outer(a1, a2), np.outer(b1, b2)
    forward = np.maximum(a - np.exp(epsilon) * b, 0).sum() * h * h
    backward = np.maximum(b - np.exp(epsilon) * a, 0).sum() * h * h
    truth = math.log(max(forward, backward))
    lower, upper = interval.log_delta_bounds(
        np.array([epsilon]),
        (pair(SAMPLED, rate=p1, noise=s1), pair(SAMPLED, rate=p2, noise=s2)),
        (np.ones(1), np.ones(1)),
        relative_width=1e-3,
    )
    # the quadrature of a kink is good to about h²
    assert lower - 1e-4 <= truth <= upper + 1e-4
    assert upper - lower <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "rate, noise, steps, delta",
    [(0.01, 1.0, 1000, 1e-6), (0.1, 2.0, 100, 1e-5), (4e-4, 0.5, 10000, 5e-5)],
)
def test_agrees_with_dp_accounting(rate, noise, steps, delta):
    peer = privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=1e-4
    ).self_compose(steps)
    epsilon = peer.get_epsilon_for_delta(delta)
    lower, upper = interval.epsilon_bounds(
        np.log([delta]), (pair(SAMPLED, rate=rate, noise=noise),), (np.array([steps]),)
    )
    # The peer's answer is an upper bound, close to the truth at a fine grid.
    assert lower <= epsilon
    assert epsilon <= upper * 1.005


def test_where_a_peer_answers_less_than_the_truth():
    """A peer's pessimistic PLD says 1.943931e-10; a contour integral 1.961409e-10."""
    arguments = (pair(SAMPLED, rate=1e-4, noise=0.8),), (np.array([1e5]),)
    lower, upper = interval.log_delta_bounds(np.array([0.5]), *arguments)
    assert 1.943931e-10 < math.exp(lower[0]) <= 1.961409e-10 <= math.exp(upper[0])
    arguments = (pair(SAMPLED, rate=0.01, noise=1.0),), (np.array([1e3]),)
    lower, upper = interval.log_delta_bounds(np.array([2.0]), *arguments)
    assert math.exp(lower[0]) <= 2.665574e-6 <= math.exp(upper[0])


@pytest.mark.slow
def test_a_value_once_quoted_is_too_small():
    """Narrow certified ends tell 1.961409e-10 from 1.960674e-10 (4e-4 below)."""
    lower, upper = interval.log_delta_bounds(
        np.array([0.5]),
        (pair(SAMPLED, rate=1e-4, noise=0.8),),
        (np.array([1e5]),),
        relative_width=1e-4,
    )
    assert 1.960674e-10 < math.exp(lower[0]) <= 1.961409e-10 <= math.exp(upper[0])


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_one_step_is_the_profile(relation):
    rate, noise = np.array([1e-3, 0.05, 0.4, 1.0]), np.array([0.8, 1.0, 2.0, 1.5])
    step = jde.GaussianStep(
        jde.MultistageSampling(jde.Poisson("user", sampling_probability=rate)),
        noise_multiplier=noise,
        neighboring_relation=relation,
    )
    epsilon = np.array([0.1, 1.0, 0.5, 2.0])
    exact = np.log(privacy_profile(step, epsilon))
    one = dominating_pair(step)
    flat = one._replace(
        **{
            n: np.broadcast_to(a, (4, 1))[:, 0]
            for n, a in one._asdict().items()
            if n != "kind"
        }
    )
    lower, upper = interval.log_delta_bounds(epsilon, (flat,), (np.ones(4),))
    assert np.all((lower <= exact) & (exact <= upper))
    assert np.all(upper - lower <= interval.DEFAULT_DELTA_SHARE)


def check_random(kind, size, seed):
    """Ends in order, below the RDP answer; returns the share that is close enough."""
    settings, steps, log_delta = random_settings(kind, size, seed)
    lower, upper = interval.epsilon_bounds(log_delta, (settings,), (steps,))
    rdp, _ = evaluation.evaluate("best_epsilon", log_delta, (settings,), (steps,))
    assert np.all((lower >= 0) & (lower <= upper) & (upper <= rdp))
    enough = np.maximum(
        interval.DEFAULT_EPSILON_SHARE * lower, interval.DEFAULT_EPSILON_WIDTH
    )
    return np.mean(upper - lower <= enough * (1 + 1e-9))


# Each kind compiles its kernels: the others are among the slow tests.
@pytest.mark.slow
def test_random_settings():
    assert check_random(SAMPLED, 8, 5) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_settings(kind):
    assert check_random(kind, 100, 6) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_delta_of_epsilon_gives_epsilon_back(kind):
    one = (pair(kind, rate=0.02, noise=1.2, episodes=2 if kind == EPISODES else 1),)
    counts = (np.array([300.0]),)
    lower, upper = interval.epsilon_bounds(np.array([math.log(1e-6)]), one, counts)
    of_lower, _ = interval.log_delta_bounds(upper, one, counts)
    _, of_upper = interval.log_delta_bounds(lower, one, counts)
    assert of_lower <= math.log(1e-6) <= of_upper


@pytest.mark.slow
def test_tiny_rate_and_tiny_delta():
    arguments = (
        (pair(SWAPPED, rate=1e-6, sensitivity=2.0, noise=1.0),),
        (np.array([1e4]),),
    )
    lower, upper = interval.epsilon_bounds(np.array([math.log(1e-12)]), *arguments)
    assert 0 < upper - lower <= max(0.01 * lower[0], 1e-4)


@pytest.mark.slow
def test_order_and_splitting_of_steps_do_not_matter():
    a, b = pair(SAMPLED, rate=0.05, noise=1.0), pair(ANTIPODAL, rate=0.1, noise=2.0)
    goal = np.array([math.log(1e-6)])
    counts = np.array([40.0]), np.array([90.0])
    ends = [
        interval.epsilon_bounds(goal, (a, b), counts),
        interval.epsilon_bounds(goal, (b, a), counts[::-1]),
        interval.epsilon_bounds(
            goal, (a, b, b), (counts[0], np.array([30.0]), np.array([60.0]))
        ),
    ]
    for lower, upper in ends:
        assert upper - lower <= 0.01 * lower
        assert all(low <= upper and lower <= high for low, high in ends)


@pytest.mark.slow
def test_narrower_ends_lie_within_reach_and_can_be_refused():
    arguments = (pair(SAMPLED, rate=0.01, noise=1.0),), (np.array([1e3]),)
    goal = np.array([math.log(1e-6)])
    lower, upper = interval.epsilon_bounds(goal, *arguments)
    fine_lower, fine_upper = interval.epsilon_bounds(goal, *arguments, max_width=1e-3)
    assert fine_upper - fine_lower <= 1e-3
    assert fine_lower <= upper and lower <= fine_upper
    with pytest.raises(ValueError, match="max_width 1e-12 cannot be reached"):
        interval.epsilon_bounds(goal, *arguments, max_width=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, outer, rate, inner, noise, episodes, steps, log_delta",
    [
        # A rare large loss makes up the sum: delta is 1e-7 of Chernoff's bound.
        (SAMPLED, 0.048, 1.26e-4, 1.0, 0.878, 1, 535056.0, -26.9),
        (EPISODES, 1.0, 2.91e-6, 1.0, 2.085, 4, 6489895.0, -23.9),
        # An atom at 0 beside a spike; all of the backward losses end at once.
        (SAMPLED, 0.0086, 3.12e-6, 1.0, 0.447, 1, 311629.0, -26.4),
        (SAMPLED, 1.0, 1.8e-4, 1.0, 4.81, 1, 328.0, -25.7),
        # Epsilon of 1e8.
        (EPISODES, 1.0, 1.0, 1.0, 0.668, 7, 761772.0, -16.7),
        (ANTIPODAL, 1.0, 4.9e-6, 0.173, 0.309, 1, 1188193.0, -9.01),
        # Spikes narrower than any spacing: the lower law has to be balanced on them.
        (SAMPLED, 0.3286, 1.104e-6, 1.0, 0.415, 1, 1401458.0, -11.304),
        # Two or three episodes at once, far more likely than delta.
        (EPISODES, 1.0, 1.32e-6, 1.0, 1.29, 3, 5.9e6, -13.9),
        (EPISODES, 1.0, 0.36968, 1.0, 0.54455, 7, 5040900.0, -7.812),
        # Windows that are far too long as long as epsilon is a guess.
        (ANTIPODAL, 1.0, 1.6e-6, 0.129555, 0.65, 1, 9200556.0, -26.778),
        (SAMPLED, 0.07947, 1.17738e-5, 1.0, 0.36795, 1, 143.0, -10.386),
        (SWAPPED, 1.0, 2.2331e-5, 1.0, 0.56897, 1, 31.0, -9.2392),
    ],
)
def test_settings_that_were_too_wide(
    kind, outer, rate, inner, noise, episodes, steps, log_delta
):
    moved = 1.0 if kind in (SAMPLED, ANTIPODAL) else 2.0
    one = pair(kind, outer, rate, inner, moved, noise, episodes)
    ends = interval.epsilon_bounds(np.array([log_delta]), (one,), (np.array([steps]),))
    lower, upper = (float(e[0]) for e in ends)
    assert 0 < upper - lower <= max(0.01 * lower, 1e-4) * (1 + 1e-9)


@pytest.mark.slow
def test_two_steps_that_were_too_wide():
    run = (
        pair(ANTIPODAL, rate=1.335e-4, inner=0.00424, noise=0.377),
        pair(SWAPPED, rate=2.126e-4, sensitivity=2.0, noise=12.22),
    )
    counts = np.array([7251539.0]), np.array([26455.0])
    lower, upper = interval.epsilon_bounds(np.array([-20.506]), run, counts)
    assert 0 < upper - lower <= 0.01 * lower


def sampled_tails(u, p, s):
    """P(L > u) and Q(L > u), forward and backward, with 50 digits."""
    with mpmath.workdps(50):
        u, p, s = mpmath.mpf(u), mpmath.mpf(p), mpmath.mpf(s)

        def tail(x):
            return mpmath.erfc(x / mpmath.sqrt(2)) / 2

        def at(loss):  # z where log(1 - p + p e^(sz - s²/2)) is the loss
            return (mpmath.log((mpmath.expm1(loss) + p) / p) + s * s / 2) / s

        z = at(u)
        forward = (1 - p) * tail(z) + p * tail(z - s), tail(z)
        if mpmath.expm1(-u) + p <= 0:
            return forward, (mpmath.mpf(0), mpmath.mpf(0))
        z = at(-u)
        return forward, (tail(-z), (1 - p) * tail(-z) + p * tail(s - z))


@pytest.mark.slow
@pytest.mark.parametrize("p, s", [(1e-3, 1.25), (0.02, 9.0), (0.5, 1.0)])
def test_profile_errors_are_within_their_bounds(p, s):
    """Also where ``1 - g (1 - p)`` cancels: the backward losses end at -log(1 - p)."""
    last = -math.log1p(-p)
    points = np.concatenate(
        [p * np.geomspace(1e-6, 30, 12), last * (1 - np.geomspace(1e-8, 0.3, 12))]
    )
    fields = (1.0, p, 1.0, s, 1.0)
    ((forward, backward),) = lattice.evaluate_tails(SAMPLED, [fields], [points])
    move = lattice.displacement(SAMPLED, fields)
    for i, u in enumerate(points):
        for place, tails in enumerate((forward, backward)):
            # the law is the true one with its losses moved by at most ``move``
            near, far = (sampled_tails(v, p, s)[place] for v in (u - move, u + move))
            with mpmath.workdps(50):
                low, high = (
                    mpmath.exp(u) * q - d
                    for (_, q), d in (
                        (far, tails.scaled_error[i]),
                        (near, -tails.scaled_error[i]),
                    )
                )
                assert low <= float(tails.scaled[i]) <= high
                low, high = (
                    above - mpmath.exp(u) * q - d
                    for (above, q), d in (
                        (far, tails.profile_error[i]),
                        (near, -tails.profile_error[i]),
                    )
                )
                slack = 2 * move * mpmath.exp(u) * near[1]
                assert low - slack <= float(tails.profile[i]) <= high + slack


def test_settings_that_lose_nothing_or_everything():
    rate = np.array([0.0, 0.1, 0.1, 0.1])
    noise = np.array([1.0, np.inf, 1.0, 0.0])
    steps = np.array([10.0, 10.0, 0.0, 10.0])
    settings = (pair(SAMPLED, rate=rate, noise=noise),)
    lower, upper = interval.epsilon_bounds(
        np.full(4, math.log(1e-6)), settings, (steps,)
    )
    assert np.array_equal(upper, [0, 0, 0, np.inf])
    assert np.array_equal(lower, [0, 0, 0, 0])
    lower, upper = interval.log_delta_bounds(np.ones(4), settings, (steps,))
    assert np.array_equal(upper, [-np.inf, -np.inf, -np.inf, 0])
    assert np.array_equal(lower, np.full(4, -np.inf))


@pytest.mark.slow
def test_batch_equals_single():
    settings, steps, log_delta = random_settings(SAMPLED, 6, 11)
    lower, upper = interval.epsilon_bounds(log_delta, (settings,), (steps,))
    for i in range(6):
        one = DominatingPair(SAMPLED, *(np.asarray(a)[i : i + 1] for a in settings[1:]))
        low, high = interval.epsilon_bounds(
            log_delta[i : i + 1], (one,), (steps[i : i + 1],)
        )
        assert low <= upper[i] and lower[i] <= high


def test_a_count_that_is_not_whole_is_refused():
    with pytest.raises(ValueError, match="whole"):
        interval.epsilon_bounds(np.array([-10.0]), (pair(SAMPLED),), (np.array([1.5]),))


@pytest.mark.parametrize("fault", ["tail", "bottom", "optimist"])
def test_a_planted_fault_is_found(fault, monkeypatch):
    """Without a tail's mass, or with a lower law too high, the ends miss the truth."""
    right_upper, right_lower = lattice.upper_masses, loss_lower.lower_law

    def upper_without(points, law):
        masses, infinite = right_upper(points, law)
        if fault == "tail":  # the upper tenth of the losses is forgotten
            keep = np.cumsum(masses[::-1])[::-1] > 1e-4
            return masses * keep, 0.0
        return masses * (1 - 1e-2 * (fault == "bottom")), infinite

    def lower_with(points, law, tilt):
        if fault == "optimist":
            return loss_lower.LowerLaw(right_upper(points, law)[0], 0.0)
        return right_lower(points, law, tilt)

    monkeypatch.setattr(lattice, "upper_masses", upper_without)
    monkeypatch.setattr(loss_lower, "lower_law", lower_with)
    monkeypatch.setattr(refine, "_MASS_CHECK", 1.0)
    truth = gaussian_log_delta(4.0, 10, 3.0)
    monkeypatch.setattr(interval, "_MOST_ROUNDS", 1)
    monkeypatch.setattr(
        interval.evaluation, "evaluate", lambda *_, **__: (np.zeros(1), 0)
    )
    lower, upper = interval.log_delta_bounds(
        np.array([4.0]), (pair(SAMPLED, noise=3.0),), (np.array([10.0]),)
    )
    assert not lower <= truth <= upper
