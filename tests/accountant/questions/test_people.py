"""Epsilons of people: reference values, the smallest over theorems, refusals."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from scipy import stats

import jaxdp_episodic as jde
from designs import sampled
from jaxdp_episodic.accountant.methods.certified.method import pld_bounds
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt, Question, Run
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pairs
from jaxdp_episodic.accountant.questions.worst_path import answer
from oracles.mixtures import hockey_stick

W, P = jde.WithoutReplacement, jde.Poisson
Bounds = jde.PersonBounds
TWO_OF_TWENTY = W("example", size=2, population=20)
RUN = {"num_steps": 50, "delta": 1e-5}


def units(rate: Any, chance: Any, **fields: Any) -> dict[str, Any]:
    """Five Poisson-sampled units, each of which holds the person with probability r."""
    design = jde.MultistageSampling(
        P("class", sampling_probability=rate), P("example", sampling_probability=chance)
    )
    people = Bounds(examples=1, classes=5)
    return {"sampling": design, "people": people, "clip_unit": "class"} | fields


def grouped(**bounds: Any) -> dict[str, Any]:
    design = jde.GroupedClasses(
        num_classes=23,
        ways=5,
        episodes=P("episode", sampling_probability=0.25),
        examples=TWO_OF_TWENTY,
    )
    bounds = {"examples": 1, "classes": 12, **bounds}
    return {"sampling": design, "people": Bounds(**bounds)}


def independent(classes: int) -> dict[str, Any]:
    each = jde.MultistageSampling(W("class", size=5, population=20), TWO_OF_TWENTY)
    design = jde.IndependentEpisodes(each, num_episodes=4)
    return {"sampling": design, "people": Bounds(examples=1, classes=classes)}


def blocks(sampling: Any = None, **fields: Any) -> dict[str, Any]:
    design = jde.PeopleBlocks(
        num_people=20,
        people_per_block=4,
        episodes=fields.pop("episodes", P("episode", sampling_probability=0.25)),
        sampling=sampling,
        **fields,
    )
    people = None if sampling is None else Bounds(examples=1, classes=5)
    return {"sampling": design, "people": people}


AMONG_SLOTS = jde.MultistageSampling(
    P("class", sampling_probability=1.0), W("example", size=2, population=4)
)
TEN = {
    "sampling": P("example", sampling_probability=0.05),
    "people": Bounds(examples=10),
}
THREE_OF_TEN = {
    "sampling": jde.MultistageSampling(
        W("class", size=3, population=10), W("example", size=1, population=2)
    ),
    "people": Bounds(examples=1, classes=4),
    "clip_unit": "class",
}


def person(fields: dict[str, Any], relation: str, noise: Any) -> jde.GaussianStep:
    return jde.GaussianStep(
        **fields,
        noise_multiplier=noise,
        privacy_unit="person",
        neighboring_relation=relation,
    )


# Design, noise; relation -> one step at epsilon 1 forward and backward, or steps and
# their epsilon at delta 1e-5. Values by another implementation of the same theorems
# (with its own quadrature and contours, checked against dp-accounting), 10 digits.
ZERO, REPLACE = "zero_out", "replace_one"
SINGLE = [
    (TEN, 2.0, ZERO, 0.0018893884273744864, 0.0),  # M
    (TEN, 2.0, REPLACE, 0.00824252411090727, 0.00824252411090727),
    (units(0.1, 0.3), 1.5, ZERO, 5.3185778439621655e-05, 0.0),  # A
    (units(0.1, 0.3), 1.5, REPLACE, 0.0001155468292963423, 0.0001155468292963423),
    (units(0.8, 0.2), 3.0, ZERO, 0.0037234405290448524, 0.00041801754682926516),
    (independent(12), 4.0, ZERO, 0.0043502005466598825, 0.0024959394067635655),  # 1
    (independent(20), 4.0, REPLACE, 0.10392944802341421, 0.10392944802341421),
    (THREE_OF_TEN, 3.0, ZERO, 0.0025117946145128854, 0.0007761392748451838),
    (THREE_OF_TEN, 3.0, "add_remove", 0.018451903162905663, 0.018451903162905663),
    (blocks(), 2.0, ZERO, 1.3774702715730637e-06, 0.0),  # 6
    (blocks(AMONG_SLOTS), 2.0, ZERO, 1.1081617568468259e-06, 0.0),
    (blocks(AMONG_SLOTS), 2.0, "add_remove", 1.8672069261694592e-05, None),
]
COMPOSED = [
    (TEN, 2.0, REPLACE, 100, 31.501215594103197),
    (units(0.8, 0.2), 3.0, ZERO, 100, 19.542402318919),
    (independent(20), 4.0, ZERO, 50, 20.678105362626166),
    (THREE_OF_TEN, 3.0, REPLACE, 50, 24.739359618702824),
    (blocks(), 2.0, "add_remove", 50, 8.446689932374145),
    (blocks(AMONG_SLOTS), 2.0, ZERO, 50, 4.303415599521158),
]


@pytest.mark.parametrize(("fields", "noise", "relation", "forward", "backward"), SINGLE)
def test_single_steps(fields, noise, relation, forward, backward) -> None:
    step = person(fields, relation, noise)
    found = jde.privacy_profile(step, 1.0, direction="forward")
    assert found == pytest.approx(forward, rel=1e-9)
    if backward is not None:
        found = jde.privacy_profile(step, 1.0, direction="backward")
        assert found == pytest.approx(backward, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("fields", "noise", "relation", "steps", "value"), COMPOSED)
def test_composed_steps(fields, noise, relation, steps, value) -> None:
    step = person(fields, relation, noise)
    run = {"num_steps": steps, "delta": 1e-5}
    assert jde.epsilon(step, **run) == pytest.approx(value, rel=1e-8)
    assert jde.epsilon(step, **run, method="rdp") >= value


def test_the_partition_is_averaged_where_it_is_fresh() -> None:
    """Theorem 2 with the distribution of |R| averaged over partitions; two values."""
    for relation, value in ((ZERO, 5.978556417489636), (REPLACE, 10.49507042846714)):
        step = person(grouped(), relation, 2.0)
        _, hiding_units = dominating_pairs(step)
        run = jde.compose((step, 50))
        assert jde.epsilon(run, delta=1e-5) <= value * (1 + 1e-9)
        alone = of_pair(hiding_units, 50, EpsilonAt(np.log(np.asarray(1e-5))))
        assert alone == pytest.approx(value, rel=1e-8)


def of_pair(pair: Any, count: float, question: Question) -> np.ndarray:
    """The result of one pair alone."""
    run = Run((pair,), (np.array([float(count)]),))
    return answer(question, (run,), "exact").value


def test_the_smallest_theorem_counts_for_each_setting() -> None:
    """At p = 0.8 Theorem A is smaller, at p = 1 and r = 0.1 Theorem 2."""
    step = person(units([0.8, 1.0], [0.2, 0.1]), ZERO, 3.0)
    question, run = EpsilonAt(np.log(np.full(2, 1e-5))), {"delta": 1e-5}
    each = [of_pair(pair, 10, question) for pair in dominating_pairs(step)]
    assert np.argmin(each, axis=0).tolist() == [0, 1]
    found = jde.epsilon(step, num_steps=10, **run)
    np.testing.assert_allclose(found, np.min(each, axis=0), rtol=1e-12)
    profiles = [
        jde.privacy_profile(step, 1.0, direction=d) for d in ("forward", "backward")
    ]
    np.testing.assert_array_equal(jde.privacy_profile(step, 1.0), np.max(profiles, 0))


@pytest.mark.slow
def test_intervals_and_composed_runs_use_the_smallest_theorem() -> None:
    step, run = person(units([0.8, 1.0], [0.2, 0.1]), ZERO, 3.0), {"delta": 1e-5}
    found = jde.epsilon(step, num_steps=10, **run)
    # A composed run uses the same theorem for all steps.
    composed = jde.compose((step, 4), (step, 6))
    np.testing.assert_allclose(jde.epsilon(composed, **run), found, rtol=1e-9)
    low, high = jde.epsilon_interval(step, num_steps=10, **run)
    assert np.all((low <= found) & (found <= high) & (high < found * 1.001))


@pytest.mark.parametrize("relation", [ZERO, REPLACE, "add_remove"])
def test_a_person_of_one_example_costs_an_example(relation: str) -> None:
    step = person(grouped(classes=1), relation, 1.5)
    example = dataclasses.replace(step, privacy_unit="example", people=None)
    assert jde.epsilon(step, **RUN) == jde.epsilon(example, **RUN)


def test_larger_bounds_never_cost_less() -> None:
    """Across the switch from averaged partitions to the worst partition."""
    found = jde.epsilon(person(grouped(classes=np.arange(1, 24, 4)), ZERO, 2.0), **RUN)
    assert np.all(np.diff(found) >= 0) and found[0] < found[2] < found[-1]
    fields = grouped(examples=[1, 2, 19, 30], classes=2)
    found = jde.epsilon(person(fields, ZERO, 2.0), **RUN)
    assert np.all(np.diff(found[:3]) > 0) and found[2] == found[3]


def test_small_classes_of_a_population_count() -> None:
    step = person(grouped(), ZERO, 2.0)
    population = jde.Population.from_sizes([20] * 22 + [4])
    tree = dataclasses.replace(step, population=population)
    small = step.design.with_scheme(W("example", size=2, population=4))
    four = dataclasses.replace(step, sampling=small)
    assert jde.epsilon(tree, **RUN) == jde.epsilon(four, **RUN)
    assert tree.num_protected_units is None


def test_a_lower_bound_of_sizes_never_costs_less() -> None:
    """Also below the draw size: there may be more units, all of them the person's."""

    def charged(stated: Any, above: Any, clip_unit: str) -> float:
        examples = W("example", size=5, population=stated)
        design = jde.MultistageSampling(*above, examples)
        people = Bounds(examples=4, classes=2 if above else None)
        fields = {"sampling": design, "people": people, "clip_unit": clip_unit}
        step = person(fields, "add_remove", 4.0)
        return float(jde.epsilon(step, num_steps=1, delta=1e-5))

    tasks = (P("class", sampling_probability=0.3),)
    for above in ((), tasks):
        costs = [charged(stated, above, "example") for stated in (2, 4, 5, 10)]
        assert all(np.diff(costs) <= 0) and costs[0] > costs[-1]


def test_a_small_class_does_not_hide_how_many_are_drawn_of_a_large_one() -> None:
    levels = P("class", sampling_probability=0.3), W("example", size=5)
    fields: Any = {"people": Bounds(examples=4, classes=2)}
    fields |= {"sampling": jde.MultistageSampling(*levels)}
    fields |= {"clip_unit": "example", "small_units": "keep"}

    def cost(*sizes: int) -> np.ndarray:
        tree = jde.Population.from_sizes(sizes, level_names=("class", "example"))
        step = person(fields | {"population": tree}, "add_remove", 4.0)
        return jde.epsilon(step, num_steps=1, delta=1e-5)

    assert cost(2, 10) > cost(10, 10)


def users(rate: Any, chance: Any = 0.2, size: Any = 8, **fields: Any):
    """Poisson-sampled users, whose examples are clipped one by one."""
    coins = P("example", sampling_probability=chance, population=size)
    sampling = jde.MultistageSampling(P("user", sampling_probability=rate), coins)
    fields = {"noise_multiplier": 2.0, "clip_unit": "example", **fields}
    return jde.GaussianStep(sampling, privacy_unit="user", **fields)


@pytest.mark.parametrize("relation", [ZERO, "add_remove"])
def test_users_whose_examples_are_clipped_one_by_one(relation: str) -> None:
    """The mixture over the number drawn, including the draw of the user."""
    step = users(0.05, neighboring_relation=relation)
    run = {"num_steps": 500, "delta": 1e-5}
    assert jde.epsilon(step, **run) == pytest.approx(9.7166189, rel=1e-7)
    weights = 0.05 * stats.binom.pmf(np.arange(9), 8, 0.2)
    weights[0] += 0.95
    (expected,) = hockey_stick(dict(enumerate(weights)), {0: 1.0}, 0.5, [math.e])
    assert jde.privacy_profile(step, 1.0) == pytest.approx(expected, rel=1e-8)
    # One example per user: the product of the two rates.
    one = users(0.05, size=1, neighboring_relation=relation)
    alone = jde.epsilon(sampled(0.01, 2.0), **run)
    assert jde.epsilon(one, **run) == pytest.approx(alone)


@pytest.mark.parametrize("relation", [ZERO, "add_remove", "replace_one"])
def test_users_with_thousands_of_examples(relation: str) -> None:
    """As expensive as 2,500 at a time, their mean."""
    fields = {"noise_multiplier": [4.0, 1e4], "neighboring_relation": relation}
    step = users(0.05, [1.0, 0.5], [1, 5_000], **fields)
    mean, found = jde.epsilon(step, num_steps=3, delta=1e-6, method="rdp")
    assert mean <= found <= 1.01 * mean


def test_a_sample_of_fixed_size_without_many_examples_of_a_person() -> None:
    """The mixture of 2j clip norms, however many numbers there are."""
    sampling, bounds = W("example", size=500, population=2_000), Bounds(examples=150)
    step = person({"sampling": sampling, "people": bounds}, "add_remove", 100.0)
    shares = stats.hypergeom.pmf(np.arange(151), 2_000, 150, 500)
    with_person = {2 * j: share for j, share in enumerate(shares)}
    (expected,) = hockey_stick(with_person, {0: 1.0}, 0.01, [math.e])
    assert jde.privacy_profile(step, 1.0) == pytest.approx(expected, rel=1e-8)


def test_ends_of_users_whose_examples_are_clipped() -> None:
    """No noise, infinite noise; rates 0 and 1, above and below."""
    rates, run = [[0.0], [0.05], [1.0]], {"num_steps": 3, "delta": 1e-5}
    every = jde.epsilon(sampled(rates, 2.0 / 8), **run)
    found = jde.epsilon(users(rates, [0.0, 1.0]), **run)
    np.testing.assert_allclose(found, every * [0, 1], rtol=1e-9)
    for noise, value in ((np.inf, 0.0), (0.0, np.inf)):
        assert jde.epsilon(users(0.5, noise_multiplier=noise), **run) == value


def test_epochs_share_the_noise_out_among_a_persons_units() -> None:
    """Two units in an epoch of two steps: bounds above the exact pair."""
    bins = jde.RandomAllocation("example", steps_per_epoch=2)
    step = person({"sampling": bins, "people": Bounds(examples=2)}, ZERO, 2.0)
    found = jde.delta(step, num_steps=2, epsilon=[0.5, 1.0])
    bound = [0.1382328123356562, 0.049913346635927745]
    # Certified ends of delta are up to 1e-3 apart.
    assert np.all((bound <= found) & (found <= np.multiply(bound, 1 + 1e-3)))
    assert np.all(found > [0.1309859938526774, 0.044816685366895724])
    # A single step of it is Poisson sampling.
    coins = dataclasses.replace(step, sampling=P("example", sampling_probability=0.5))
    run = {"num_steps": 1, "delta": 1e-5}
    assert jde.epsilon(step, **run) == pytest.approx(jde.epsilon(coins, **run))
    shuffled = jde.ShuffledEpochs("example", steps_per_epoch=2)
    both = dataclasses.replace(step, sampling=shuffled)
    gaussian = stats.norm.cdf(0.5 - 1) - math.e * stats.norm.cdf(-0.5 - 1)
    assert jde.delta(both, num_steps=1, epsilon=1.0) == pytest.approx(gaussian)


def test_more_units_than_can_be_summed_are_refused() -> None:
    step = person(TEN | {"people": Bounds(examples=10**6)}, ZERO, 2.0)
    with pytest.raises(NotImplementedError, match="more than 20,000 clip units"):
        jde.epsilon(step, num_steps=1, delta=1e-5)


def profile_a(
    number: int, rate: float, chance: float, shift: float, epsilon: float, sign: int
) -> mp.mpf:
    """Theorem A under zero_out, backward if ``sign`` is -1; 40 digits."""
    p, r, s = map(mp.mpf, (rate, chance, shift))
    theta, other, g = p * r / (1 - p + p * r), p * (1 - r), mp.exp(epsilon)
    total = mp.mpf(0)
    for n in range(1, number + 1):
        weight = mp.binomial(number, n) * (1 - other) ** n * other ** (number - n)
        terms = (mp.binomial(n, j) * theta**j for j in range(n + 1))
        law = [term * (1 - theta) ** (n - j) for j, term in enumerate(terms)]

        def excess(x: mp.mpf, law: Any = law) -> mp.mpf:
            terms = (b * mp.exp(j * s * (x - j * s / 2)) for j, b in enumerate(law))
            return mp.log(mp.fsum(terms)) - sign * epsilon

        if excess(-999 / s) >= 0:  # no loss is as large
            continue
        x = mp.findroot(excess, (-999 / s, 999 / s), solver="anderson", maxsteps=99)
        own = mp.ncdf(-sign * x)
        mixed = mp.fsum(b * mp.ncdf(sign * (j * s - x)) for j, b in enumerate(law))
        total += weight * (mixed - g * own if sign > 0 else own - g * mixed)
    return total


@pytest.mark.few(2)
@pytest.mark.parametrize("chance", [0.3, 0.73, 1.0])
@pytest.mark.parametrize("left", [1e-9, 1e-6, 1e-12, 0.0])
def test_certified_ends_next_to_rate_1(left: float, chance: float) -> None:
    """1 - theta, the weight of no contribution, is not the rest of a rounded theta."""
    step = person(units(1 - left, chance), ZERO, 1.7)
    pair = dominating_pairs(step)[0]
    for epsilon in (0.5, 4.0, 15.0):
        found = pld_bounds(DeltaAt(np.array([epsilon])), Run((pair,), (np.ones(1),)))
        with mp.workdps(40):
            given = 5, 1 - left, chance, 1 / 1.7, epsilon
            truth = max(profile_a(*given, sign) for sign in (1, -1))
            low, high = (mp.exp(float(end[0])) for end in found)
            assert low <= truth <= high < low * (1 + 1e-11)
