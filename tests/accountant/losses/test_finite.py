"""Losses with finitely many values, against sums over the outcomes of all steps."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom, norm

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses.finite import FiniteLoss
from jaxdp_episodic.accountant.methods.certified import lattice
from jaxdp_episodic.accountant.methods.certified.composition import Curve
from jaxdp_episodic.accountant.numerics.lattice_sums import LatticeSum
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair
from oracles.finite_distributions import worst_stick

LONG = np.longdouble
ZEROED = {"neighboring_relation": "zero_out"}


# --- The oracle ---


def integer_noise(a, moved, rate):
    """The outcomes <= 0, 1, ..., >= moved of a Poisson-sampled release."""
    decay, rate, place = np.exp(-LONG(a)), LONG(rate), np.arange(moved + 1)

    def dist(mean):
        away = decay ** np.abs(place - mean) / (1 + decay)
        return np.where((place > 0) & (place < moved), away * (1 - decay), away)

    return (1 - rate) * dist(0) + rate * dist(moved), dist(0)


def outcomes(release):
    """The masses of a release's outcomes with the unit and without it."""
    match release:
        case jde.ApproximateDP(epsilon=e):
            both = np.array([1 / (1 + np.exp(-LONG(e))), 1 / (1 + np.exp(LONG(e)))])
            return both, both[::-1]
        case jde.RandomizedResponse(noise_parameter=p, num_buckets=k):
            p, k = LONG(p), LONG(k)
            if release.neighboring_relation == "zero_out":
                one = np.array([1 - p + p / k, p * (k - 1) / k])
                return one, np.array([1 / k, (k - 1) / k])
            one = np.array([1 - p + p / k, p / k, p * (k - 2) / k])
            return one, one[[1, 0, 2]]
    rate = float(release.sampling_probability)
    return integer_noise(release.noise_parameter, int(release.sensitivity), rate)


def composed(parts):
    """The outcomes of all steps, by how often each kind occurred."""
    total = np.ones(1, LONG), np.ones(1, LONG)
    for release, count in parts:
        pair = outcomes(release)
        both = [[], []]
        every = range(len(pair[0]))
        for kinds in itertools.combinations_with_replacement(every, count):
            often = np.bincount(kinds, minlength=len(pair[0])).astype(LONG)
            ways = LONG(math.factorial(count))
            ways /= math.prod(math.factorial(int(n)) for n in often)
            for dist, found in zip(pair, both, strict=True):
                found.append(ways * np.prod(dist**often))
        total = tuple(
            np.multiply.outer(dist, np.array(found)).ravel()
            for dist, found in zip(total, both, strict=True)
        )
    return total


def stick(one, two, epsilon):
    """The larger of both directions."""
    return worst_stick([(one, two)], np.asarray(LONG(epsilon)))


def epsilon_of(one, two, delta):
    low, high = LONG(0), LONG(1000)
    if stick(one, two, low) <= delta:
        return 0.0
    for _ in range(90):
        middle = (low + high) / 2
        low, high = (middle, high) if stick(one, two, middle) > delta else (low, middle)
    return float(high)


# --- One release ---


@pytest.mark.parametrize(
    "release",
    [
        jde.RandomizedResponse(0.3, 10),
        jde.RandomizedResponse(0.01, 3, **ZEROED),
        jde.DiscreteLaplaceRelease(1e-3),
        jde.DiscreteLaplaceRelease(0.5, sensitivity=3),
        jde.DiscreteLaplaceRelease(0.7, sensitivity=4, sampling_probability=0.2),
    ],
)
def test_one_release(release):
    one, two = outcomes(release)
    largest = float(np.log((one / two).max()))
    for epsilon in [0.0, *(largest * np.array([1e-3, 0.3, 0.9, 0.9999]))]:
        found = jde.delta(release, num_steps=1, epsilon=epsilon)
        truth = float(stick(one, two, epsilon))
        assert found == pytest.approx(truth, rel=1e-11, abs=1e-300)
    most = max(largest, float(np.log((two / one).max())))
    assert jde.delta(release, num_steps=1, epsilon=1.0001 * most) == 0
    assert jde.rdp(release, np.inf) == pytest.approx(most, rel=1e-11)
    for order in map(LONG, (1.01, 2.0, 17.5, 300.0)):
        for direction, (p, q) in (("forward", (one, two)), ("backward", (two, one))):
            truth = np.log((p**order * q ** (1 - order)).sum()) / (order - 1)
            found = jde.rdp(release, float(order), direction=direction)
            assert found == pytest.approx(float(truth), rel=1e-10)


@pytest.mark.parametrize(
    ("release", "epsilon", "truth"),
    [
        (
            jde.DiscreteLaplaceRelease(
                0.017344859873585684, sampling_probability=0.08208089952838254, **ZEROED
            ),
            0.001435069969316183,
            2.2335883e-13,
        ),
        (
            jde.RandomizedResponse(
                0.012534793155478388, 3, neighboring_relation="replace_one"
            ),
            5.469467696603839,
            6.2426630661e-10,
        ),
    ],
)
def test_near_the_largest_loss_rounding_of_losses_is_charged(release, epsilon, truth):
    value, info = jde.delta(release, epsilon=epsilon, num_steps=1, return_info=True)
    # The error of delta is relative; poorly known values are raised by it.
    assert -1e-8 <= value / truth - 1 <= 2 * info.error <= 0.01


def test_several_coordinates_are_dominated_by_one():
    """``H_g`` of two integer coordinates is at most that of one with their l1 shift."""
    for a, first, second in ((0.5, 1, 2), (1.0, 2, 3), (0.3, 1, 4)):
        place = np.arange(-int(40 / a), int(40 / a) + 1)
        base, *moved = (
            np.exp(-a * np.abs(place - at)) * np.tanh(a / 2)
            for at in (0, first, second)
        )
        one = jde.DiscreteLaplaceRelease(a, sensitivity=first + second)
        for epsilon in np.linspace(0, a * (first + second), 7):
            dist = np.outer(*moved) - np.exp(epsilon) * np.outer(base, base)
            truth = np.maximum(dist, 0).sum()
            assert truth <= jde.delta(one, num_steps=1, epsilon=epsilon) + 1e-12


def test_extreme_settings():
    run = {"num_steps": 3, "delta": 1e-6}
    for nothing in (
        jde.RandomizedResponse(1.0, 5),
        jde.RandomizedResponse(0.0, 1),
        jde.DiscreteLaplaceRelease(0.5, sampling_probability=0.0),
    ):
        for how in ("exact", "pld", "rdp"):
            assert jde.epsilon(nothing, method=how, **run) == 0
    bare = map(jde.DiscreteLaplaceRelease, (0.0, np.inf))
    for everything in (jde.RandomizedResponse(0.0, 2), *bare):
        assert np.isinf(jde.epsilon(everything, **run))
    assert jde.rdp(jde.DiscreteLaplaceRelease(1e-170), 2.0) > 0  # not by underflow
    rare = jde.DiscreteLaplaceRelease(700, sensitivity=2, sampling_probability=1e-310)
    assert jde.epsilon(rare, num_steps=1, delta=0.0) > 1400 - 310 * np.log(10) - 1e-6
    doubled = jde.DiscreteLaplaceRelease(0.5, neighboring_relation="replace_one")
    twice = jde.DiscreteLaplaceRelease(0.5, sensitivity=2)
    assert jde.rdp(doubled, 3.0) == jde.rdp(twice, 3.0)
    # Different lengths in one run: the shorter one is padded.
    response = jde.RandomizedResponse(0.5, 4)
    mixed = jde.compose((doubled, 1), (response, 1))
    parts = jde.rdp(doubled, 4.0) + jde.rdp(response, 4.0)
    assert jde.rdp(mixed, 4.0) == pytest.approx(parts, rel=1e-13)
    largest = (dominating_pair(s).largest_loss(backward=False)[0] for s in mixed.steps)
    assert jde.epsilon(mixed, delta=0) == pytest.approx(float(sum(largest)), rel=1e-11)
    with pytest.raises(NotImplementedError, match="sensitivity must be at most 1,000"):
        jde.DiscreteLaplaceRelease(1.0, sensitivity=1001)
    with pytest.raises(NotImplementedError, match="add_remove.*no theorem"):
        jde.RandomizedResponse(0.5, 3, neighboring_relation="add_remove")


# --- Several, on a lattice ---


RUNS = {
    "one claim": [(jde.ApproximateDP(8.0), 1)],
    "small claims": [(jde.ApproximateDP(1e-3), 500)],
    "large claims": [(jde.ApproximateDP(8.0), 5)],
    "claims": [(jde.ApproximateDP(1.0), 2), (jde.ApproximateDP(0.3), 3)],
    "answers": [(jde.RandomizedResponse(0.4, 5), 2), (jde.ApproximateDP(2.0), 1)],
    "zeroed": [(jde.RandomizedResponse(0.4, 4, **ZEROED), 3)],
    "counts": [
        (jde.DiscreteLaplaceRelease(1.0, sensitivity=2, sampling_probability=0.2), 2),
        (jde.ApproximateDP(0.5), 2),
    ],
}


@pytest.mark.parametrize("name", RUNS)
def test_few_losses_are_composed(name):
    """Delta is at most 1e-4 above the truth, epsilon at most 1e-4 of the largest."""
    run, (one, two) = jde.compose(*RUNS[name]), composed(RUNS[name])
    largest = float(np.log((one / two).max()))
    for epsilon in largest * np.array([0.0, 0.05, 0.3, 0.9]):
        truth = float(stick(one, two, epsilon))
        value, info = jde.delta(run, epsilon=epsilon, return_info=True)
        assert truth * (1 - 3e-16) <= value <= truth * (1 + 1e-4)
        assert value / truth - 1 <= info.error + 3e-16
        low, high = jde.delta_interval(run, epsilon=epsilon)
        assert low <= truth * (1 + 3e-16) and truth <= high * (1 + 3e-16)
        assert high <= low * (1 + 1e-3)
        if truth < 0.9:  # beyond, epsilon is badly conditioned
            off = (jde.epsilon(run, delta=truth) - epsilon) / max(largest, 0.1)
            assert -1e-9 <= off <= 1e-4
        assert jde.delta(run, epsilon=epsilon, method="rdp") >= truth


def test_the_direction_that_costs_more_counts_in_a_mixed_run():
    """It is backward: answers of one who is not asked are hardly ever true ones."""
    noise, buckets, asked, shift = 0.05, 4, 6, 2.4
    always = jde.Poisson("unit", sampling_probability=1.0)
    run = jde.compose(
        (jde.RandomizedResponse(noise, buckets, **ZEROED), asked),
        (jde.GaussianStep(always, noise_multiplier=3 / shift, **ZEROED), 9),
    )
    wrong = np.arange(asked + 1)
    chance = binom.pmf(wrong, asked, 1 - 1 / buckets)
    true_one = np.log1p((buckets - 1) * (1 - noise))
    loss = -wrong * np.log(noise) - (asked - wrong) * true_one
    for epsilon in (18.0, 25.0):
        at = (loss - epsilon) / shift
        above = norm.cdf(at + shift / 2)
        rest = np.exp(epsilon - loss + norm.logcdf(at - shift / 2))
        truth = float(chance @ (above - rest))
        value, info = jde.delta(run, epsilon=epsilon, return_info=True)
        assert truth <= value <= truth * (1 + 1e-3) and info.is_certified_bound
        low, high = jde.epsilon_interval(run, delta=truth)
        assert jde.epsilon(run, delta=truth) == high
        assert low <= epsilon <= high < low * (1 + 1e-4)
        assert jde.epsilon(run, delta=truth, method="rdp") > epsilon


def test_pure_epsilons_add_up():
    # Dwork, Rothblum, Vadhan (2010): no loss exceeds the sum.
    run = jde.compose((jde.ApproximateDP(1.0), 1), (jde.ApproximateDP(2.0), 1))
    assert jde.delta(run, epsilon=3) == 0 < jde.delta(run, epsilon=np.nextafter(3, 0))
    assert 3.0 <= jde.epsilon(run, delta=0.0) <= 3 * (1 + 2e-12)
    failing = [(jde.ApproximateDP(1.0, 0.1), 1), (jde.ApproximateDP(2, 0.2), 1)]
    assert 0.28 <= jde.delta(jde.compose(*failing), epsilon=3) <= 0.28 * (1 + 1e-14)
    # The Rényi bound is the truth here, rounded down.
    exact = jde.epsilon(jde.RandomizedResponse(0.02, 2), num_steps=5, delta=1e-7)
    assert exact > (5 * np.log1p(98) + np.log1p(-1e-7 / 0.99**5)) * (1 + 1e-14)


def test_an_epsilon_of_zero_within_rounding_is_not_certain():
    claims = [(jde.ApproximateDP(1.0), 1), (jde.ApproximateDP(0.5), 1)]
    run, at_zero = jde.compose(*claims), float(stick(*composed(claims), 0.0))
    answer, info = jde.epsilon(run, delta=at_zero, return_info=True)
    assert answer + info.error > 0
    assert jde.epsilon_interval(run, delta=at_zero)[1] > 0
    # Well above it there is no doubt.
    assert jde.epsilon_interval(run, delta=at_zero * (1 + 1e-3)) == (0, 0)


def answers_and_counts(rng):
    """Up to six answers and six noisy counts."""
    p, buckets = np.exp(rng.uniform(np.log(1e-3), 0)), int(rng.integers(2, 400))
    a, moved = np.exp(rng.uniform(np.log(0.02), np.log(5))), int(rng.integers(1, 4))
    rate = 1.0 if rng.random() < 0.3 else np.exp(rng.uniform(np.log(1e-4), 0))
    fields = {"sensitivity": moved, "sampling_probability": float(rate)}
    steps = (
        jde.RandomizedResponse(float(p), buckets, **ZEROED),
        jde.DiscreteLaplaceRelease(float(a), **fields, **ZEROED),
    )
    return [(step, int(rng.integers(1, 7))) for step in steps]


# Weights of a cell 400 nats below overflowed; the upper end was 0.
ONCE_CROSSED = [
    (jde.RandomizedResponse(0.00424, 28, **ZEROED), 1),
    (
        jde.DiscreteLaplaceRelease(
            2.24, sensitivity=2, sampling_probability=0.15, **ZEROED
        ),
        1,
    ),
]


@pytest.mark.parametrize("number", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_random_runs(number):
    rng = np.random.default_rng(4)
    for i in range(number):
        parts = answers_and_counts(rng) if i else ONCE_CROSSED
        delta = float(np.exp(rng.uniform(np.log(1e-12), np.log(0.2)))) if i else 0.01
        run, (one, two) = jde.compose(*parts), composed(parts)
        truth = epsilon_of(one, two, delta)
        low, high = jde.epsilon_interval(run, delta=delta)
        assert low <= truth * (1 + 1e-15) and truth * (1 - 1e-15) <= high
        assert high - low <= max(2e-3 * truth, 1e-4)
        largest = float(np.log(max((one / two).max(), (two / one).max())))
        epsilon = float(rng.uniform(0, largest))
        truth = float(stick(one, two, epsilon))
        low, high = jde.delta_interval(run, epsilon=epsilon)
        assert low <= truth * (1 + 1e-13) and truth * (1 - 1e-13) <= high
        # float64 ends
        assert truth < 1e-200 or high - low <= 0.02 * truth


@pytest.mark.parametrize(
    "noise, rate, steps, delta",
    [
        # The largest loss is a lattice point up to rounding.
        (6.632110241316791, 0.15088006552502645, 37_235, 3.7e-7),
        # All losses are far closer to each other than lattice points are.
        (0.01, 1.0, 100_000, 1e-6),
    ],
)
def test_ends_of_atoms_are_near(noise, rate, steps, delta):
    release = jde.DiscreteLaplaceRelease(noise, sampling_probability=rate)
    low, high = jde.epsilon_interval(release, num_steps=steps, delta=delta)
    assert 0 <= high - low <= 1e-4 * low


@pytest.mark.parametrize("spacing", [1e-3, 1.0, 404.4, 3000.0])
@pytest.mark.parametrize("tilt", [0.3, 400.0])
def test_an_atom_is_resolved_for_any_cell_width(spacing, tilt):
    """All mass at the loss 3: delta is ``1 - e^(epsilon - 3)``."""
    cells = np.zeros(256)
    cells[127] = 1.0
    start, log_delta = 3.0 - 127 * spacing, math.log(0.01)
    truth = 3 + math.log1p(-0.01)
    whole = LatticeSum(
        cells, (0.0, 0.0), (0.0, 0.0), start, spacing, tilt, 3 * tilt, 0.0, 0.0
    )
    with np.errstate(all="ignore"):
        curve = Curve.of(whole, 0.0, up=True)
        near = curve.estimated_epsilon(log_delta, 2.5)
        high = curve.epsilon(log_delta, near)
        low = Curve.of(whole, 0.0, up=False).epsilon(log_delta, near)
        assert low <= truth <= high <= 3 * (1 + 1e-12)
        # Overflow loses information, on the safe side.
        broken = Curve.of(whole._replace(rounding=(math.inf, math.inf)), 0.0, up=True)
        assert broken.epsilon(-4.6, 2.5) >= truth


@pytest.mark.parametrize("zero", [0, 1, 2, 3, 6, -2, 9])
def test_an_upper_distribution_keeps_all_mass(zero):
    """For 0 at a grid point, at a point that splits a bin, or outside."""
    losses = np.array([-0.9, 0.0, 0.4, 1.2])
    mass = np.array([0.3, 1e-7, 0.35, 0.0])
    weights = mass * np.exp(-losses)
    # the last atom completes both distributions to 1
    rest, rest_without = 1 - mass.sum(), 1 - weights.sum()
    losses[-1], mass[-1] = math.log(rest / rest_without), rest
    atoms = tuple(map(np.float64, losses)), tuple(np.log(mass))
    loss = FiniteLoss(np.float64(1.0), *atoms, np.float64(0.0))
    points = 0.3 * (np.arange(7) - zero)
    own, other = lattice.evaluate_tails(loss, points)
    by_tails = lattice.bin_masses(points, own, other)
    by_atoms = lattice.bins_of_values(points, loss, backward=False)
    for dist in (by_tails, by_atoms):
        masses, infinite = lattice.upper_masses(points, dist)
        assert masses.sum() + infinite == pytest.approx(1.0, abs=1e-11)
        assert masses.sum() + infinite >= 1 - 1e-15
        grid = points[::2]
        for epsilon in np.linspace(-1, 2, 31):
            truth = mass @ np.maximum(-np.expm1(epsilon - losses), 0)
            found = masses @ np.maximum(-np.expm1(epsilon - grid), 0) + infinite
            if epsilon >= grid[0]:
                assert found >= truth - 1e-15
    # an atom at a point counts as above it
    for name in ("bottom", "top", "above"):
        both = (getattr(each, name) for each in (by_tails, by_atoms))
        np.testing.assert_allclose(*both, 0, 1e-14 if name == "above" else 1e-11)
