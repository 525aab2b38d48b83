"""Certified ends of random allocation that may turn around: replace_one, episodes."""

import functools

import numpy as np
import pytest
from scipy.stats import norm

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses import antipodal_bounds
from jaxdp_episodic.accountant.losses.allocated_antipodal import AllocatedAntipodalLoss
from jaxdp_episodic.accountant.losses.allocated_bounds import tails_between
from jaxdp_episodic.accountant.losses.antipodal_cells import (
    Epoch,
    aligned_bounds,
    polynomial_bounds,
)
from jaxdp_episodic.accountant.methods.certified.method import pld_bounds
from jaxdp_episodic.accountant.methods.question import DeltaAt, EpsilonAt
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.numerics.signed_sums import sinh_sum
from jaxdp_episodic.accountant.questions.dominating_pair import run_of
from oracles import allocation
from oracles.antipodal_sums import log_antipodal

# Certified ends of replaced units are up to 1e-3 of epsilon apart; relative widths of
# delta are some times those of epsilon.
WIDTH = 1e-3
NARROW = 3e-3


def step(steps, noise, relation="replace_one"):
    drawn = jde.RandomAllocation("unit", steps_per_epoch=steps)
    return jde.GaussianStep(
        drawn, noise_multiplier=noise, neighboring_relation=relation
    )


def loss(rate, shift, bins, taken):
    return AllocatedAntipodalLoss(*map(np.asarray, (1.0, rate, shift, bins, taken)))


def bounds_at(u, bins, count, shift):
    """Of D at one u, by the sum of few cells."""
    hinge = 2 * np.sinh(u / 2) * np.exp(shift**2 / 2) * (bins - count)
    setting = count, shift, u / (2 * shift), float(hinge)
    scale = np.exp((u - shift**2) / 2) / bins
    return [
        scale
        * sinh_sum(*setting, above=up, cells=256, at_threshold=True)
        .gain(np.array([hinge]), above=up)
        .item()
        for up in (False, True)
    ]


def gaussian(shift, epsilon):
    """The Gaussian mechanism's delta."""
    first, second = (norm.cdf(x * shift / 2 - epsilon / shift) for x in (1, -1))
    return first - np.exp(epsilon) * second


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 4.0])
def test_an_epoch_of_two_steps_is_a_gaussian(epsilon):
    """``w = e^{s (x + x')}``: a move by s sqrt(2)."""
    true = gaussian(1.3 * np.sqrt(2), epsilon)
    low, high = bounds_at(epsilon, 2, 2, 1.3)
    assert low <= true <= high <= low * 1.002


@pytest.mark.parametrize(
    ("steps", "taken", "shift", "epsilon"),
    [(5, 2, 1.0, 0.2), (5, 2, 3.4, 2.0), (3, 3, 0.7, 0.9), (9, 3, 1.6, 0.4)],
)
def test_a_few_steps_by_definition(steps, taken, shift, epsilon):
    true = allocation.antipodal(steps, taken, shift, epsilon)
    low, high = bounds_at(epsilon, steps, taken, shift)
    assert low <= true <= high <= low * 1.002


@pytest.mark.parametrize(
    ("steps", "taken", "shift", "epsilon"), [(40, 40, 2.5, 2.0), (60, 15, 2.0, 0.5)]
)
def test_many_steps_with_little_noise(steps, taken, shift, epsilon):
    true = allocation.antipodal_of_many(steps, taken, shift, epsilon)
    low, high = bounds_at(epsilon, steps, taken, shift)
    assert low <= true <= high <= low * 1.0005


def test_few_steps_are_no_rough_sums_far_out():
    """All move a little where one jumps: upper ends were 5,000 times as large."""
    low, high = bounds_at(21.56, 8, 8, 2.523)
    assert low <= high <= low * 1.06


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "noise", "epsilon"),
    [
        (40, 0.4, 0.5),
        (40, 0.4, 5.0),
        (100, 0.5, 1.0),
        (12, 0.3, 3.0),
        (2_000, 0.45, 0.2),
    ],
)
def test_delta_of_many_steps_with_little_noise(steps, noise, epsilon):
    true = allocation.antipodal_of_many(steps, steps, 1 / noise, epsilon, fineness=1.2)
    found, info = jde.delta(
        step(steps, noise), epsilon=epsilon, num_steps=steps, return_info=True
    )
    assert info.is_certified_bound
    assert true * (1 - 3e-9) <= found <= true * (1 + NARROW)


def test_lower_corners_lie_below_and_hulls_are_convex():
    g = np.exp(np.linspace(0, 4, 60))
    true = gaussian(1.1, np.log(g))
    rng = np.random.default_rng(2)
    low = true * (1 - 1e-3 * rng.uniform(size=60))
    high = true * (1 + 1e-3 * rng.uniform(size=60))
    fine = np.exp(np.linspace(0, 3, 1001))
    for above in (False, True):
        points = (g, high) if above else antipodal_bounds._below_chords(g, low, high)
        x, y = antipodal_bounds._convex(*points)
        slope = np.diff(y) / np.diff(x)
        assert np.all(np.diff(slope) > 0)
        off = np.interp(fine, x, y) / gaussian(1.1, np.log(fine)) - 1
        assert np.all(off >= 0 if above else off <= 0)
        assert np.all(np.abs(off) < 0.05)
        # With its mirror image it belongs to a pair.
        assert y[0] - 2 * slope[0] <= 1 + 1e-12


@pytest.mark.parametrize("known", ["flat at the end", "too small to fall", "nothing"])
def test_corners_are_numbers_where_little_is_known(known):
    g = np.exp(np.linspace(0, 4, 200))
    high = np.maximum(gaussian(1.1, np.log(g)), 0.05 * (known == "flat at the end"))
    low = high.copy()
    if known == "too small to fall":
        low[-90:] = high[-90:] = np.geomspace(1e-307, 9e-308, 90)
    if known == "nothing":
        low, high = np.zeros(200), np.ones(200)
    g, value = antipodal_bounds._convex(*antipodal_bounds._below_chords(g, low, high))
    pair = antipodal_bounds._pair_of(g, value, 0.0)
    assert all(np.all(np.isfinite(part)) for part in pair)
    places = np.exp(np.linspace(0, 4, 777))
    found = np.interp(places, np.exp(pair.loss), pair.profile)
    true = np.interp(places, np.exp(np.linspace(0, 4, 200)), high)
    assert np.all(found <= true * (1 + 1e-9))


@pytest.mark.few(1)
@pytest.mark.parametrize("bounds", [aligned_bounds, polynomial_bounds])
@pytest.mark.parametrize(
    ("bins", "count", "shift", "apart", "number"),
    [
        (2, 2, 0.3, 0.05, 40),
        (9, 2, 0.5, 0.03, 12),
        (3, 2, 1.3, 0.3, 12),
        pytest.param(9, 2, 2.5, 0.2, 12, marks=pytest.mark.slow),
    ],
)
def test_bounds_between_nodes_by_definition(bins, count, shift, apart, number, bounds):
    epoch = Epoch(bins, count, shift)
    nodes = [
        antipodal_bounds._node_at(apart * i, epoch, 256, is_whole=True)
        for i in range(number)
    ]
    for cell in (0, 1, number // 2, number - 3, number - 2):
        u = apart * (cell + np.array([0.0, 0.1, 0.5, 0.8, 1.0]))
        low, high = bounds(nodes, cell, u, epoch)
        if bins == 2:
            true = gaussian(shift * np.sqrt(2), u)
        else:
            true = np.array([allocation.antipodal(bins, count, shift, v) for v in u])
        assert np.all(low <= true * (1 + 1e-10))
        assert np.all(true * (1 - 1e-10) <= high)
        seen = (true > 1e-8) & (cell < number - 2)
        assert np.all(high[seen] <= 1.02 * low[seen])


@pytest.mark.slow
def test_hinges_that_move_along_see_far():
    """One of 20,000 large terms makes up the loss: polynomials know nothing there."""
    epoch = Epoch(20_000, 20_000, 1.8)
    places = (0.4, 0.5, 0.6, 0.7)
    nodes = [antipodal_bounds._node_at(u, epoch, 320, is_whole=True) for u in places]
    middle = np.array([0.55])
    known = antipodal_bounds._node_at(0.55, epoch, 320, is_whole=False)
    least, most = (
        epoch.scale(0.55) * sums.gain(np.zeros(1), above=up)
        for sums, up in ((known.below, False), (known.above, True))
    )
    low, high = aligned_bounds(nodes, 1, middle, epoch)
    assert low <= most and least <= high
    assert high / low - 1 < 3 * (most / least - 1)
    rough_low, rough_high = polynomial_bounds(nodes, 1, middle, epoch)
    assert rough_low <= most and least <= rough_high
    assert not rough_high < 1.1 * rough_low


@pytest.mark.parametrize(
    ("steps", "noise", "num_steps", "delta", "rate"),
    [
        # From most terms' loss to one large term's, polynomials were too far apart.
        (103, 1.3912, 12, 2.07e-8, 1.0),
        pytest.param(103, 1.3912, 103, 1.6e-9, 1.0, marks=pytest.mark.slow),
        # D fell by 20 nats, and to nothing, from one node to the next.
        (5, 6.4717, 2, 1.24e-10, 0.5),
        # There were no more nodes where one large term makes up the loss.
        pytest.param(5891, 0.7209, 12 * 5891, 3.8e-12, 0.05, marks=pytest.mark.slow),
    ],
)
def test_ends_that_were_too_wide(steps, noise, num_steps, delta, rate):
    epoch = step(steps, noise)
    if rate < 1:
        drawn = jde.WithoutReplacement("pupil", size=round(100 * rate), population=100)
        epoch = jde.GaussianStep(
            jde.MultistageSampling(
                jde.RandomAllocation("unit", steps_per_epoch=steps), drawn
            ),
            noise_multiplier=noise,
            neighboring_relation="replace_one",
            clip_unit="unit",
            privacy_unit="pupil",
        )
    asked = {"delta": delta, "num_steps": num_steps}
    value = jde.epsilon(epoch, **asked)
    low, high = jde.epsilon_interval(epoch, **asked)
    assert low <= value <= high < low + WIDTH * max(1, value)


@functools.cache
def density_of(steps, taken, shift):
    return [
        antipodal_bounds.antipodal_bounding_pair(steps, taken, shift, above=up)
        for up in (False, True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "taken", "shift"), [(2, 2, 1.0), (6, 2, 1.4), (4, 2, 0.2), (2, 2, 3.0)]
)
def test_laws_hold_everywhere_between_their_nodes(steps, taken, shift):
    rng = np.random.default_rng(steps)
    below, above = density_of(steps, taken, shift)
    for u in [0.0, *rng.uniform(0, 0.9 * below.loss[-1], 60)]:
        true = allocation.antipodal(steps, taken, shift, u)
        low, high = (
            np.interp(np.exp(u), np.exp(one.loss), one.profile, right=0.0)
            + one.infinite
            for one in (below, above)
        )
        assert low <= true * (1 + 1e-10)
        assert true * (1 - 1e-10) <= high
        assert true < 1e-12 or high <= low * 1.006


@pytest.mark.slow
def test_three_steps_hold_between_nodes():
    rng = np.random.default_rng(1)
    below, above = density_of(3, 3, 1.0)
    for u in rng.uniform(0, 6, 8):
        true = allocation.antipodal(3, 3, 1.0, u)
        low, high = (
            np.interp(np.exp(u), np.exp(one.loss), one.profile)
            for one in (below, above)
        )
        assert low <= true <= high <= low * 1.004


def composed(*parts):
    return Run(
        tuple(one for one, _ in parts),
        tuple(np.asarray(float(count)) for _, count in parts),
    )


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 7, 300])
def test_epochs_of_two_steps_are_gaussians(epochs):
    shift, delta = 0.4, 1e-6
    whole = shift * np.sqrt(2 * epochs)
    run = composed((loss(1.0, shift, 2.0, 2.0), epochs))
    low, high = map(float, pld_bounds(EpsilonAt(np.log(delta)), run))
    assert gaussian(whole, low) >= delta >= gaussian(whole, high)
    assert high <= low + 2e-4 * max(low, 1)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 0.3, 0.01])
def test_drawn_within_and_composed_with_another_release(rate):
    """An epoch and one Gaussian release: given the release's loss, by definition."""
    steps, taken, shift, other, epsilon = 4, 2, 1.0, 0.8, 0.5
    nodes, weights = np.polynomial.legendre.leggauss(80)
    # The profile has a corner at 0, where the release alone has lost epsilon.
    edges = np.array([-10.0, epsilon / other - other / 2, 10.0])
    half = 0.5 * np.diff(edges)[:, None]
    x, weights = (edges[:-1, None] + half * (nodes + 1)).ravel(), half * weights

    def drawn(u):
        """``r D(1 + (g-1)/r)`` and its mirror image."""
        if u < 0:
            return -np.expm1(u) + np.exp(u) * drawn(-u)
        inner = np.log1p(np.expm1(u) / rate)
        return rate * allocation.antipodal(steps, taken, shift, inner)

    true = 0.0
    for place, weight in zip(x + other, weights.ravel() * norm.pdf(x), strict=True):
        true += weight * drawn(epsilon - (other * place - other**2 / 2))
    release = jde.GaussianStep(
        jde.Poisson("unit", sampling_probability=1.0), noise_multiplier=1 / other
    )
    (gaussian_loss,) = run_of(release, np.asarray(1)).losses
    run = composed(
        (loss(rate, shift, float(steps), float(taken)), 1),
        (gaussian_loss.map(lambda field: np.reshape(field, ())), 1),
    )
    low, high = map(float, np.exp(pld_bounds(DeltaAt(np.asarray(epsilon)), run)))
    assert low <= true <= high <= low * 1.003


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "noise", "num_steps", "delta"),
    [(10, 1.0, 10, 1e-5), (10, 1.0, 5, 1e-6), (20, 2.0, 200, 1e-6), (3, 0.5, 9, 1e-5)],
)
def test_intervals_hold_the_exact_answer_and_are_narrow(steps, noise, num_steps, delta):
    asked = {"delta": delta, "num_steps": num_steps}
    low, high = jde.epsilon_interval(step(steps, noise), **asked)
    value, info = jde.epsilon(step(steps, noise), return_info=True, **asked)
    assert low <= value <= high < low + WIDTH * max(1, low)
    assert info.is_certified_bound and value == high
    assert jde.epsilon(step(steps, noise), method="rdp", **asked) >= low


@pytest.mark.slow
def test_intervals_hold_the_tables_of_the_theory():
    """Estimates on a lattice, at most 0.3 % high, of an independent program."""
    low, high = jde.epsilon_interval(step(10, 1.0), delta=1e-5, num_steps=10)
    assert low <= 2.846 and 2.846 * 0.997 <= high
    low, high = jde.epsilon_interval(step(10, 1.0), delta=1e-5, num_steps=100)
    assert low <= 10.581 * 1.001 and 10.581 * 0.997 <= high


@pytest.mark.parametrize(
    ("bins", "taken", "noise"), [(30, 2, 6.68), (1000, 3, 5.0), (10**6, 2, 30.0)]
)
def test_few_of_many_steps_under_much_noise_have_narrow_ends(bins, taken, noise):
    """Nodes further apart than all their losses left no lower bound: an exception."""
    low, high = jde.epsilon_interval(step(bins, noise), delta=1e-10, num_steps=taken)
    assert low < high < low * (1 + WIDTH)
    at_ends = [allocation.antipodal(bins, taken, 1 / noise, e) for e in (low, high)]
    assert at_ends[0] >= 1e-10 >= at_ends[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bins", "taken", "noise", "epsilon"),
    [
        (1000, 6, 1 / 0.3, 0.004),
        pytest.param(10**5, 7, 10.0, 1e-5, marks=pytest.mark.slow),
        pytest.param(63, 12, 1 / 0.28807022743688293, 0.254, marks=pytest.mark.slow),
    ],
)
def test_few_of_many_steps_are_held(bins, taken, noise, epsilon):
    delta = jde.delta(step(bins, noise), epsilon=epsilon, num_steps=taken)
    true = np.exp(log_antipodal(bins, taken, 1 / noise, epsilon))
    assert true <= delta <= true * (1 + NARROW)


def test_edges():
    asked = {"delta": 1e-6, "num_steps": 8}
    assert np.isposinf(jde.epsilon_interval(step(4, 0.0), **asked)[1])
    assert jde.epsilon_interval(step(4, np.inf), **asked) == (0, 0)
    nothing = jde.epsilon_interval(step(4, 1.0), delta=1e-6, num_steps=0)
    assert nothing == (0, 0)


def test_bounds_that_rise_again_are_those_before(monkeypatch):
    """Under little noise what is cut off outweighs D far out, by more than 1."""
    u = np.linspace(0.0, 12.0, 49)
    true = np.array([gaussian(2.0, x) for x in u])
    high = 1.01 * true
    high[-5:] = 1e-5, 1e-3, 0.1, 40.0, 1e9
    found = u, 0.99 * true, high, np.arange(49)
    monkeypatch.setattr(antipodal_bounds, "profile_bounds", lambda *_: found)
    pair = antipodal_bounds.antipodal_bounding_pair.__wrapped__(2, 2, 1.0, above=True)
    assert pair.infinite < 1e-5
    profile, _ = tails_between(u[:-8], pair.loss, pair.profile, pair.scaled)
    known = pair.infinite + (1 - pair.infinite) * np.exp(profile)
    assert np.all(known >= true[:-8])
    np.testing.assert_allclose(known, 1.01 * true[:-8], rtol=0.02)
