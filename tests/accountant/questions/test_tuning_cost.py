"""The cost of choosing the best run, against enumerated selections."""

import math

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as peer
from scipy import stats

from jaxdp_episodic.accountant.questions.tuning import (
    DEFAULT_ORDERS,
    NegativeBinomialTrials,
    PoissonTrials,
    curve_to_epsilon,
    tuned_rdp,
)

ORDERS = 1 + np.geomspace(0.05, 200, 60)
TRIALS = [
    *(PoissonTrials(expected_runs=m) for m in (0.1, 4.0, 30.0)),
    *(
        NegativeBinomialTrials(expected_runs=m, eta=eta)
        for m in (1.0, 1.5, 20.0)
        for eta in (-0.5, 0.0, 0.7, 3.0)
    ),
]


TWO = PoissonTrials(expected_runs=2)


def probabilities(trials, most=600_000):
    """P(K = k), k = 0, 1, ..., by definition; slow and independent."""
    if isinstance(trials, PoissonTrials):
        return stats.poisson.pmf(np.arange(400), float(trials.expected_runs))
    eta, gamma = float(trials.eta), math.exp(-float(trials.log_inverse_gamma))
    if gamma > 1 - 1e-12:
        return np.array([0.0, 1.0])
    counts = np.arange(1, most)
    if eta == 0:
        weights = (1 - gamma) ** counts / (counts * math.log(1 / gamma))
    else:
        # The product's sign is that of eta, and so is the denominator's.
        factors = np.cumsum(np.log((1 - gamma) * np.abs(counts - 1 + eta) / counts))
        weights = np.exp(factors) / abs(gamma**-eta - 1)
    return np.concatenate([[0.0], weights[weights > 1e-19]])


def selected(dist, trials_probabilities):
    """Probabilities of the best of K outputs; the last entry is that of no run."""
    ends = np.concatenate([[0.0], np.cumsum(dist)])
    ends[-1] = 1.0
    counts = np.arange(1, len(trials_probabilities))
    below = [0.0]
    for end in ends[1:]:
        powers = np.exp(np.maximum(counts * np.log(end), -700.0))
        below.append(np.sum(trials_probabilities[1:] * powers))
    return np.append(np.diff(below), trials_probabilities[0])


def divergence(p, q, orders):
    used = p > 0
    moments = orders[:, None] * np.log(p[used]) + (1 - orders[:, None]) * np.log(
        q[used]
    )
    return np.logaddexp.reduce(moments, axis=1) / (orders - 1)


def worse(p, q, orders):
    return np.maximum(divergence(p, q, orders), divergence(q, p, orders))


def pairs():
    """Base mechanisms on a few outputs, mild and strong, some nearly pure."""
    rng = np.random.default_rng(0)
    for size in (2, 3, 6):
        for strength in (0.05, 0.3, 1.0, 3.0):
            p = rng.dirichlet(np.ones(size))
            q = p * np.exp(strength * rng.uniform(-1, 1, size))
            yield p, q / q.sum()
    # A rare revealing output, ranked best and worst.
    rare = [[0.989, 0.01, 0.001], [0.9895, 0.01, 0.0005]]
    nearly = [[0.5, 0.499, 0.001], [0.499, 0.5, 0.001]]
    for pair in map(np.array, (rare, nearly)):
        yield from (tuple(pair), tuple(pair[:, ::-1]))


@pytest.mark.parametrize("trials", TRIALS, ids=repr)
def test_bounds_every_enumerated_selection(trials):
    runs = probabilities(trials)
    assert runs.sum() == pytest.approx(1, abs=1e-9)
    for p, q in pairs():
        bound = tuned_rdp(trials, ORDERS, np.maximum(worse(p, q, ORDERS), 0))
        truth = worse(selected(p, runs), selected(q, runs), ORDERS)
        assert np.all(bound >= truth - 1e-9)


def test_the_enumeration_catches_a_forgotten_term():
    """Without log(E[K]) / (order - 1) the bound is violated, and the test sees it."""
    trials = NegativeBinomialTrials(expected_runs=60.0, eta=0.0)
    runs = probabilities(trials)
    broken = 0
    for p, q in pairs():
        bound = tuned_rdp(trials, ORDERS, np.maximum(worse(p, q, ORDERS), 0))
        bound = bound - math.log(60) / (ORDERS - 1)
        broken += np.any(bound < worse(selected(p, runs), selected(q, runs), ORDERS))
    assert broken


@pytest.mark.parametrize(
    ("mean", "eta"), [(2.0, 0.0), (10.0, 0.5), (300.0, 4.0), (30.0, np.inf)]
)
def test_agrees_with_dp_accounting(eta, mean):
    """But for the chance of no run, if the number is Poisson distributed."""
    trials = PoissonTrials(expected_runs=mean)
    if eta < np.inf:
        trials = NegativeBinomialTrials(expected_runs=mean, eta=eta)
    curve = ORDERS / (2 * 3.0**2)
    theirs = peer._compute_rdp_repeat_and_select(ORDERS, curve, mean, eta)
    # Only ours uses the smallest bound of all larger orders.
    theirs = np.minimum.accumulate(theirs[::-1])[::-1]
    # Their gamma is rounded down by up to 1e-9.
    np.testing.assert_allclose(tuned_rdp(trials, ORDERS, curve), theirs, rtol=1e-8)


def test_extreme_curves():
    unbounded = tuned_rdp(TWO, [2.0, 3.0], [math.inf, math.inf])
    assert curve_to_epsilon([2.0, 3.0], unbounded, delta=1e-5) == math.inf
    free = tuned_rdp(TWO, [2.0, 3.0], [0.0, 0.0])
    assert math.isfinite(curve_to_epsilon([2.0, 3.0], free, delta=1e-5))
    assert curve_to_epsilon([2.0], [0.0], delta=1e-5) == 0
    # A search of one run costs the run; distributions and curves broadcast.
    curve = ORDERS / 8
    one = NegativeBinomialTrials(expected_runs=1.0)
    np.testing.assert_allclose(tuned_rdp(one, ORDERS, curve), curve, rtol=1e-12)
    several = PoissonTrials(expected_runs=np.array([2.0, 20.0]))
    found = tuned_rdp(several, ORDERS, np.stack([curve / 2, curve]))
    alone = tuned_rdp(PoissonTrials(expected_runs=20.0), ORDERS, curve)
    np.testing.assert_allclose(found[1], alone, rtol=1e-12)


@pytest.mark.parametrize("runs", [1 + 1e-9, 10.0, 1e6])
def test_the_largest_shape_is_a_poisson_distribution_above_zero(runs):
    # P(K = k | K > 0) has the mean x / (1 - e^-x) at x = eta log(1/gamma).
    trials = NegativeBinomialTrials(expected_runs=runs, eta=1e30)
    assert trials.mean == pytest.approx(runs, rel=1e-13)
    x = float(trials.log_inverse_gamma) * 1e30
    assert x / -np.expm1(-x) == pytest.approx(runs, rel=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PoissonTrials(expected_runs=0.0), "expected_runs must be > 0"),
        (lambda: NegativeBinomialTrials(expected_runs=0.5), ">= 1"),
        (lambda: NegativeBinomialTrials(expected_runs="2"), "expected_runs"),
        (lambda: NegativeBinomialTrials(expected_runs=2, eta=-1), "eta must"),
        (lambda: NegativeBinomialTrials(expected_runs=2, eta=1e31), "eta must .* most"),
        (lambda: NegativeBinomialTrials(expected_runs=1e6, eta=-0.999), "at most"),
        (lambda: tuned_rdp(3, [2.0], [1.0]), "trials must be"),
        (lambda: tuned_rdp(TWO, [1.0], [1.0]), "orders must be > 1"),
        (lambda: tuned_rdp(TWO, [2.0], [-1.0]), "rdp must be >= 0"),
        (lambda: tuned_rdp(TWO, [2.0, 3.0], [1.0]), "last axis"),
        (lambda: curve_to_epsilon([2.0], [1.0], delta=0.0), "delta"),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize(
    "trials",
    [
        PoissonTrials(expected_runs=4.0),
        NegativeBinomialTrials(expected_runs=8.0, eta=0.0),
        NegativeBinomialTrials(expected_runs=8.0, eta=1.0),
        NegativeBinomialTrials(expected_runs=3.0, eta=-0.5),
    ],
    ids=repr,
)
def test_draws_follow_the_distribution(trials):
    """Chi-square over the first counts and the rest; false alarm 1e-6, fixed seed."""
    generator, size = np.random.default_rng(1), 6_000
    counts = np.array([trials.draw(generator) for _ in range(size)])
    dist = probabilities(trials)[:12]
    observed = np.bincount(np.minimum(counts, 12), minlength=13)[: len(dist) + 1]
    expected = np.append(dist, 1 - dist.sum()) * size
    used = expected > 5
    statistic = np.sum((observed - expected)[used] ** 2 / expected[used])
    assert statistic < 60
    assert observed[~used].sum() < 40


def test_mean_and_dictionary():
    trials = NegativeBinomialTrials(expected_runs=12.0, eta=0.3)
    assert float(trials.mean) == pytest.approx(12.0, rel=1e-12)
    assert NegativeBinomialTrials.from_dict(trials.to_dict()) == trials
    assert NegativeBinomialTrials(expected_runs=1.0).draw(np.random.default_rng(0)) == 1
    with pytest.raises(ValueError, match="each field must be one number"):
        PoissonTrials(expected_runs=np.array([1.0, 2.0])).draw(np.random.default_rng(0))
    assert DEFAULT_ORDERS.min() > 1
