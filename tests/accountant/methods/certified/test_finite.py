"""Certified ends of finitely many losses, against enumeration of all outcomes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses.finite import FiniteLoss
from jaxdp_episodic.accountant.methods.certified import lattice, method
from jaxdp_episodic.accountant.methods.certified.composition import Curve
from jaxdp_episodic.accountant.numerics.lattice_sums import LatticeSum

LONG = np.longdouble


def responses(p, k):
    """The outcomes "own" and "other", with the unit and without it."""
    p, k = LONG(p), LONG(k)
    return np.array([1 - p + p / k, p * (k - 1) / k]), np.array([1 / k, (k - 1) / k])


def integer_noise(a, moved, rate):
    """The outcomes <= 0, 1, ..., >= moved of a Poisson-sampled release."""
    decay, rate = np.exp(-LONG(a)), LONG(rate)
    place = np.arange(moved + 1)

    def dist(mean):
        away = decay ** np.abs(place - mean) / (1 + decay)
        return np.where((place > 0) & (place < moved), away * (1 - decay), away)

    return (1 - rate) * dist(0) + rate * dist(moved), dist(0)


def composed(pairs_and_counts):
    """All outcomes of all steps, by how often each kind occurred."""
    dists = []
    for pair, count in pairs_and_counts:
        both = [[], []]
        for kinds in itertools.combinations_with_replacement(
            range(len(pair[0])), count
        ):
            often = np.bincount(kinds, minlength=len(pair[0])).astype(LONG)
            ways = LONG(math.factorial(count))
            ways /= math.prod(math.factorial(int(n)) for n in often)
            for dist, found in zip(pair, both, strict=True):
                found.append(ways * np.prod(dist**often))
        dists.append([np.array(b) for b in both])
    first, second = ([dist[side] for dist in dists] for side in (0, 1))
    return tuple(
        np.multiply.outer(*side).ravel() if len(side) == 2 else side[0]
        for side in (first, second)
    )


def stick(one, two, epsilon):
    grown = np.exp(LONG(epsilon))
    return max(
        np.maximum(one - grown * two, 0).sum(), np.maximum(two - grown * one, 0).sum()
    )


def epsilon_of(one, two, delta):
    low, high = LONG(0), LONG(1000)
    if stick(one, two, low) <= delta:
        return 0.0
    for _ in range(90):
        middle = (low + high) / 2
        low, high = (middle, high) if stick(one, two, middle) > delta else (low, middle)
    return float(high)


def random_pair(rng):
    """Two mechanisms, each taken up to six times: the run and its dominating pair."""
    p, buckets = np.exp(rng.uniform(np.log(1e-3), 0)), int(rng.integers(2, 400))
    a, moved = np.exp(rng.uniform(np.log(0.02), np.log(5))), int(rng.integers(1, 4))
    rate = 1.0 if rng.random() < 0.3 else np.exp(rng.uniform(np.log(1e-4), 0))
    counts = [int(rng.integers(1, 7)), int(rng.integers(1, 7))]
    zeroed = {"neighboring_relation": "zero_out"}
    steps = (
        jde.RandomizedResponse(float(p), buckets, **zeroed),
        jde.DiscreteLaplaceRelease(
            float(a), sensitivity=moved, sampling_probability=float(rate), **zeroed
        ),
    )
    dists = responses(p, buckets), integer_noise(a, moved, rate)
    run = jde.compose(*zip(steps, counts, strict=True))
    return run, composed(list(zip(dists, counts, strict=True)))


@pytest.fixture
def by_lattice(monkeypatch):
    """Makes finite losses be composed on a lattice, not summed."""
    monkeypatch.setattr(
        method, "have_closed_form", lambda run: np.zeros(run.shape, bool)
    )


def check_pair(rng):
    run, (one, two) = random_pair(rng)
    delta = float(np.exp(rng.uniform(np.log(1e-12), np.log(0.2))))
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


@pytest.mark.slow
@pytest.mark.usefixtures("by_lattice")
def test_many_random_pairs_by_enumeration():
    rng = np.random.default_rng(4)
    for _ in range(400):
        check_pair(rng)


@pytest.mark.usefixtures("by_lattice")
def test_a_pair_whose_ends_once_crossed():
    """Regression: weights of a cell 400 nats below overflowed; the upper end was 0."""
    first = jde.RandomizedResponse(0.00424, 28, neighboring_relation="zero_out")
    second = jde.DiscreteLaplaceRelease(
        2.24, sensitivity=2, sampling_probability=0.15, neighboring_relation="zero_out"
    )
    low, high = jde.epsilon_interval(jde.compose((first, 1), (second, 1)), delta=0.01)
    assert low <= 5.90109474691098 <= high <= low + 1e-3  # by enumeration


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


@pytest.mark.parametrize("spacing", [1e-3, 1.0, 50.0, 404.4, 3000.0])
@pytest.mark.parametrize("tilt", [0.3, 12.7, 400.0])
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


@pytest.mark.parametrize("zero", [0, 1, 2, 3, 4, 5, 6, -2, 9])
def test_an_upper_distribution_keeps_all_mass(zero):
    """For 0 at a grid point, at a point that splits a bin, or outside."""
    losses = np.array([-0.9, 0.0, 0.4, 1.2])
    mass = np.array([0.3, 1e-7, 0.35, 0.0])
    weights = mass * np.exp(-losses)
    # the last atom completes both distributions to 1
    rest, rest_without = 1 - mass.sum(), 1 - weights.sum()
    losses[-1], mass[-1] = math.log(rest / rest_without), rest
    loss = FiniteLoss(
        np.float64(1.0), tuple(map(np.float64, losses)), tuple(np.log(mass))
    )
    points = 0.3 * (np.arange(7) - zero)
    ((own, other),) = lattice.evaluate_tails([loss], [points])
    by_tails = lattice.bin_masses(points, own, other)
    by_atoms = lattice.bins_of_values(points, loss, backward=False)
    for dist in (by_tails, by_atoms):
        masses, infinite = lattice.upper_masses(points, dist)
        masses = lattice.joined_bins(points, masses)
        assert masses.sum() + infinite == pytest.approx(1.0, abs=1e-11)
        assert masses.sum() + infinite >= 1 - 1e-15
        grid = points[::2]
        for epsilon in np.linspace(-1, 2, 31):
            truth = mass @ np.maximum(-np.expm1(epsilon - losses), 0)
            found = masses @ np.maximum(-np.expm1(epsilon - grid), 0) + infinite
            if epsilon >= grid[0]:
                assert found >= truth - 1e-15
    assert np.allclose(by_tails.top, by_atoms.top, atol=1e-11)
    # an atom at the last point counts as above it
    above = by_tails.above + (points[-1] == 0) * by_tails.atom
    assert above == pytest.approx(by_atoms.above, abs=1e-14)
