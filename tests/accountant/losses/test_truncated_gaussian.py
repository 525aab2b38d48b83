"""Truncated Poisson samples, against enumerated small data sets."""

import dataclasses
import itertools
import math

import mpmath as mp
import numpy as np
import pytest

import jaxdp_episodic as jde
from designs import poisson_step
from jaxdp_episodic.accountant.describe.rates import cut_weights
from oracles import mixtures, precise

NOISE = 0.8


def distribution_of_sums(values, rate, size):
    """Distribution of the sum of a Poisson sample, randomly truncated to ``size``."""
    dist: dict[float, float] = {}
    for mask in itertools.product((0, 1), repeat=len(values)):
        drawn = [v for v, taken in zip(values, mask, strict=True) if taken]
        chance = rate ** len(drawn) * (1 - rate) ** (len(values) - len(drawn))
        kept = list(itertools.combinations(drawn, min(size, len(drawn))))
        for subset in kept:
            total = float(sum(subset))
            dist[total] = dist.get(total, 0.0) + chance / len(kept)
    return dist


def neighbours(relation, size):
    """Pairs of data sets of values in [-1, 1], None being null."""
    for first in (-1.0, 0.0, 1.0):
        for others in itertools.combinations_with_replacement(
            (-1.0, 0.0, 1.0), size - 1
        ):
            changed = {"add_remove": (), "zero_out": (0.0,), "replace_one": (-first,)}
            yield (first, *others), (*changed[relation], *others)


@pytest.mark.few(2)
@pytest.mark.parametrize(("rate", "batch"), [(0.5, 1), (0.3, 2), (1.0, 2)])
@pytest.mark.parametrize("relation", ["add_remove", "replace_one", "zero_out"])
def test_no_small_data_set_exceeds_the_bound(relation, rate, batch):
    size, g = 4, np.exp([0.0, 0.3, 1.0, 2.5])
    release = jde.TruncatedPoissonRelease(
        NOISE,
        sampling_probability=rate,
        batch_size=batch,
        # The smaller of the two neighbours; the bound covers the larger, too.
        population=size - 1 if relation == "add_remove" else size,
        neighboring_relation=relation,
    )
    bound = jde.delta(release, num_steps=1, epsilon=np.log(g))
    largest = np.zeros(g.shape)
    for one, two in neighbours(relation, size):
        dists = (
            distribution_of_sums(one, rate, batch),
            distribution_of_sums(two, rate, batch),
        )
        for top, bottom in (dists, dists[::-1]):
            told = mixtures.hockey_stick(top, bottom, 1 / NOISE, g)
            largest = np.maximum(largest, told)
    assert np.all(largest <= bound * (1 + 1e-8))
    # The bound takes the worse of two sizes, and here the data have the other.
    assert np.max(largest / bound) > 0.74
    # Without truncation it would be a Poisson step, which is exceeded.
    step = poisson_step(NOISE, rate, relation=relation)
    mistaken = jde.delta(step, num_steps=1, epsilon=np.log(g))
    if relation == "add_remove" and batch == 1:
        assert np.any(largest > mistaken * 1.05)


@pytest.mark.slow
def test_weights_against_fifty_digits():
    for n, b, q in ((5, 2, 0.3), (1000, 10, 0.05), (10**6, 1100, 1e-3)):
        *logs, drawn, sure = cut_weights(np.array(n), np.array(b), np.array(q))
        found = *np.exp(logs), drawn
        with mp.workdps(50):
            p = mp.mpf(q)

            def mass(k, n=n, p=p):
                return mp.binomial(n - 1, k) * p**k * (1 - p) ** (n - 1 - k)

            few = range(b) if b <= n * q else range(b, min(n, b + 400))
            part = sum(mass(k) for k in few)
            truth = (part, 1 - part) if b <= n * q else (1 - part, part)
            above = range(b, min(n, b + 400)) if n > 1000 else range(b, n)
            rate = sum(mass(k) * p * b / (k + 1) for k in above) / truth[1]
        for most, exact in zip(found, (*truth, rate), strict=True):
            assert most * sure <= float(exact) <= most <= float(exact) * (1 + 2e-9)
        assert sure > 1 - 2e-9


@pytest.mark.parametrize("n, b, q", [(150, 10, 0.05), (40, 3, 0.1)])
def test_ends_hold_the_truth_of_one_step(n, b, q):
    """Regression: the lower end used raised weights, 6e-10 above the truth."""
    release = jde.TruncatedPoissonRelease(
        2.0, sampling_probability=q, batch_size=b, population=n
    )
    for epsilon in (0.01, 0.3, 1.0):
        low, high = jde.delta_interval(release, num_steps=1, epsilon=epsilon)
        with mp.workdps(40):
            truth = max(
                one_step(epsilon, size, b, q, 0.5, backward)
                for size in (n, n + 1)
                for backward in (False, True)
            )
        assert low <= truth <= high <= low * (1 + 5e-9)


def one_step(epsilon, n, b, q, shift, backward):
    """delta of both pairs."""
    q = mp.mpf(q)
    masses = [mp.binomial(n - 1, k) * q**k * (1 - q) ** (n - 1 - k) for k in range(n)]
    cut = mp.fsum(masses[b:])
    rate = mp.fsum(m * q * b / (k + 1) for k, m in enumerate(masses) if k >= b)
    # Nobody is cut, or the unit replaces somebody: it moves the sum twice as far.
    return mp.fsum(
        weight * precise.mp_sampled_profiles(epsilon, p, s)[backward]
        for weight, p, s in ((1 - cut, q, shift), (cut, rate / cut, 2 * shift))
    )


@pytest.mark.parametrize("relation", ["add_remove", "replace_one", "zero_out"])
def test_a_batch_of_the_population_size_is_never_truncated(relation):
    rate = np.array([0.0, 0.1, 1.0])
    release = jde.TruncatedPoissonRelease(
        2.0,
        sampling_probability=rate,
        batch_size=101,
        population=100,
        neighboring_relation=relation,
    )
    step = poisson_step(2.0, rate, relation=relation)
    orders = np.array([1.5, 8.0, 100.0])
    np.testing.assert_allclose(jde.rdp(release, orders), jde.rdp(step, orders), 1e-9)
    run = {"num_steps": 30, "delta": 1e-6, "return_info": True}
    found, info = jde.epsilon(release, **run)
    np.testing.assert_allclose(found, jde.epsilon(step, **run)[0], rtol=1e-15)
    assert not info.is_certified_bound.any()


@pytest.mark.slow
def test_a_batch_of_exactly_all_gets_a_certified_end():
    """Regression: one of its two paths has no nodes, which raised an error."""
    release = jde.TruncatedPoissonRelease(
        2.0, sampling_probability=0.3, batch_size=5, population=5
    )
    values = []
    for step in (release, jde.compose((release, 1), (poisson_step(3.0, 0.1), 4))):
        run = {"step": step, "num_steps": 2, "delta": 1e-4}
        low, high = jde.epsilon_interval(**run)
        found, info = jde.epsilon(**run, return_info=True)
        assert info.is_certified_bound and low < found <= high < low * (1 + 1e-3)
        assert 0 < info.error <= high - low
        values.append(found)
    truth, off = 0.9977177, 1e-7  # by max_width=1e-6
    assert truth - off <= values[0] <= truth + 1e-4 and values[0] < values[1]


def test_no_draw_and_no_noise():
    options: dict = {"sampling_probability": 0.5, "population": 10}
    run = {"num_steps": 2, "delta": 1e-6}
    empty = jde.TruncatedPoissonRelease(1.0, batch_size=0, **options)
    bare = jde.TruncatedPoissonRelease(0.0, batch_size=3, **options)
    for method in ("exact", "pld", "rdp"):
        assert jde.epsilon(empty, method=method, **run) == 0
        assert math.isinf(jde.epsilon(bare, method=method, **run))


@pytest.mark.parametrize("sizes", [[5, 20], [20, 5], [5, 20, 9]])
def test_each_path_of_a_tree_meets_each_size_of_the_data_set(sizes):
    """Regression: the first path met one size alone, and the second the other."""
    cut = jde.TruncatedPoissonRelease(
        1.0, sampling_probability=0.3, batch_size=2, population=3
    )
    steps = [
        jde.GaussianStep(
            jde.MultistageSampling(
                jde.Poisson("class", sampling_probability=0.5),
                jde.WithoutReplacement("example", size=2),
            ),
            noise_multiplier=1.0,
            clip_unit="class",
            population=jde.Population.from_sizes(some),
        )
        for some in (sizes, [5])
    ]
    runs = [jde.compose((step, 3), (cut, 3)) for step in steps]
    found, worst = (jde.epsilon(run, delta=1e-5, method="rdp") for run in runs)
    assert found == pytest.approx(worst, rel=1e-12)
    prices = {"prices": {"tree": 2, "cut": 1}, "budget": 4}
    runs = [jde.AdaptiveRun({"tree": step, "cut": cut}, **prices) for step in steps]
    found, worst = (run.epsilon(delta=1e-3) for run in runs)
    assert found == pytest.approx(worst, rel=1e-6)
    many = [(dataclasses.replace(cut, population=3 + k), 1) for k in range(9)]
    with pytest.raises(NotImplementedError, match="at most 8 different populations"):
        jde.epsilon(jde.compose(*many), delta=1e-5)
