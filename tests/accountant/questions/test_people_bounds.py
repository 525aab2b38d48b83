"""Deltas of people, against every draw of small designs.

The bound is the delta of one step, the larger of both directions.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import jaxdp_episodic as jde
from designs import sampled
from jaxdp_episodic.accountant.questions import contribution_pairs
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pairs
from oracles import people, people_draws, people_epochs
from oracles.episodes import Copies, attained_by_copies
from oracles.people_draws import Case
from rows import fast_and_slow

EPSILONS = np.array([0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0])
ROUNDING = 1 + 1e-6
FLOOR = 1e-7


def _scheme(name: str, drawn: tuple[str, float], population: int) -> Any:
    """The library's scheme of one level; Poisson needs no population."""
    kind, value = drawn
    if kind == "coins":
        return jde.Poisson(name, sampling_probability=value)
    size = population if kind == "all" else int(value)
    return jde.WithoutReplacement(name, size=size, population=population)


def _episodes(drawn: tuple[str, float], number: int) -> Any:
    """Episodes, whose number follows from the rest of the design."""
    scheme = _scheme("episode", drawn, number)
    if isinstance(scheme, jde.WithoutReplacement):
        return jde.WithoutReplacement(scheme.name, size=scheme.size)
    return scheme


def _within(inner: people_draws.Inner) -> tuple[Any, Any]:
    examples = _scheme("example", ("draw", inner.shots), inner.size)
    return _scheme("class", inner.ways, inner.num_classes), examples


def _blocks(drawn: tuple[str, float], inside: Any, episodes: int) -> jde.PeopleBlocks:
    """Two blocks; the number of people in a block does not matter."""
    return jde.PeopleBlocks(
        num_people=6,
        people_per_block=3,
        episodes=_episodes(drawn, 2),
        sampling=inside,
        episodes_per_block=episodes,
    )


def _design(family: str, facts: dict[str, Any]) -> tuple[Any, str, dict[str, int]]:
    """The library's design, the clip unit and the person's bounds."""
    bounds, draw = dict(facts.get("bounds", {})), jde.MultistageSampling
    if "hers" in facts:
        bounds = {"examples": facts["hers"]}
    match family:
        case "coin_tasks":
            tasks = _scheme("task", ("coins", facts["p"]), 0)
            return draw(tasks, *_within(facts["inner"])), "task", bounds
        case "fixed_size_tasks":
            tasks = _scheme("task", ("draw", facts["size"]), facts["num_tasks"])
            return draw(tasks, *_within(facts["inner"])), "task", bounds
        case "classes_below_tasks":
            tasks = _scheme("task", facts["above"], facts["num_tasks"])
            inner = facts["inner"]._replace(ways=facts["within"])
            return draw(tasks, *_within(inner)), "class", bounds
        case "independent_episodes":
            each, number = draw(*_within(facts["inner"])), facts["episodes"]
            return jde.IndependentEpisodes(each, num_episodes=number), "episode", bounds
        case "grouped_classes":
            groups = facts["num_classes"] // facts["ways"]
            design = jde.GroupedClasses(
                num_classes=facts["num_classes"],
                ways=facts["ways"],
                episodes=_episodes(facts["scheme"], groups),
                examples=_scheme("example", ("draw", 1), facts["size"]),
            )
            return design, "episode", bounds
        case "blocks":
            inside = _scheme("example", ("draw", facts["size"]), facts["slots"])
            return _blocks(facts["scheme"], inside, 1), "episode", bounds
        case "episodes_of_a_block":
            inside = _scheme("example", ("draw", 1), facts["slots"])
            if facts["disjoint"]:
                inside, bounds = None, {}
            return _blocks(("coins", facts["p"]), inside, 2), "episode", bounds
        case "examples_alone":
            examples = _scheme("example", facts["scheme"], facts["population"])
            return draw(examples), "example", bounds
        case "examples_in_classes":
            classes = _scheme("class", facts["above"], facts["num_classes"])
            examples = _scheme("example", facts["below"], facts["size"])
            return draw(classes, examples), "example", bounds
    raise ValueError(f"no design of the library for {family}")


def _charged(case: Case) -> np.ndarray:
    """The library's delta of one step, at all epsilons."""
    design, clip_unit, bounds = _design(case.family, case.facts)
    step = jde.GaussianStep(
        design,
        noise_multiplier=1 / case.s,
        clip_unit=clip_unit,
        privacy_unit="person",
        neighboring_relation=case.relation,
        people=jde.PersonBounds(**bounds) if bounds else None,
    )
    return np.asarray(jde.delta(step, epsilon=EPSILONS, num_steps=1))


def _worst_ratio(case: Case, rng: np.random.Generator, starts: int) -> float:
    """The largest true divergence found, divided by the bound."""
    aims = np.exp(rng.choice([0.1, 0.25, 0.5, 1.0, 2.0], 2))
    found = people_draws.attained(
        rng, case.release, case.s, np.exp(EPSILONS), aims=aims, starts=starts
    )
    worst, charged = np.maximum(*found), _charged(case)
    judged = charged > FLOOR
    if np.any(worst[~judged] > 2 * FLOOR):
        return np.inf
    return float(np.max(worst[judged] / charged[judged], initial=0.0))


@pytest.mark.parametrize("family", people_draws.FAMILIES)
@pytest.mark.parametrize("number", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_no_draw_exceeds_what_is_charged_and_some_reach_it(family, number):
    rng = np.random.default_rng([*family.encode(), number])
    cases = (people_draws.random_case(rng, family) for _ in range(number))
    ratios = [_worst_ratio(case, rng, 3) for case in cases]
    assert max(ratios) <= ROUNDING
    assert number < 30 or max(ratios) > 0.98


# --- Epochs ---

# The error of the grid of an epoch's releases.
GRID = 1 + 2e-3


def _epoch(steps: int, units: int, drawn: tuple[int, int], **fields: Any) -> Any:
    """An epoch of tasks, ``units`` of which can hold the person with one example."""
    size, population = drawn
    return jde.GaussianStep(
        jde.MultistageSampling(
            jde.RandomAllocation("task", steps_per_epoch=steps),
            jde.WithoutReplacement("example", size=size, population=population),
        ),
        clip_unit="task",
        privacy_unit="person" if units > 1 else "example",
        people=jde.PersonBounds(examples=1, classes=units) if units > 1 else None,
        **fields,
    )


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
@pytest.mark.parametrize(
    ("steps", "units", "drawn", "s"),
    fast_and_slow(
        [
            (2, 1, (1, 2), 0.5),
            (2, 1, (1, 4), 1.2),
            (2, 2, (1, 1), 2.5),
            (2, 3, (1, 2), 0.7),
            (3, 2, (1, 3), 0.7),
        ],
        lambda steps, units, drawn, s: (units, s) == (1, 0.5),
    ),
)
def test_no_reaction_within_an_epoch_exceeds_what_is_charged(
    steps, units, drawn, s, relation
):
    """The noise divided among the person's episodes, and whole episodes."""
    rng = np.random.default_rng([steps, units, *drawn])
    fields = {"noise_multiplier": 1 / s, "neighboring_relation": relation}
    step = _epoch(steps, units, drawn, **fields)
    charged = np.asarray(jde.delta(step, num_steps=steps, epsilon=EPSILONS))
    design = people_epochs.epoch(steps, (drawn[0] / drawn[1],) * units)
    axis = people_epochs.grid(design, s, 0.05 if steps < 3 else 0.2)
    worst = np.zeros(len(EPSILONS))
    for sign in (1, -1):
        tables = people_epochs.attack(rng, design, relation, s, np.exp(0.5), sign=sign)
        found = people_epochs.masses(design, tables, s, np.exp(EPSILONS), axis)
        worst = np.maximum(worst, np.maximum(*found))
    judged = charged > 1e-5
    ratio = worst[judged] / charged[judged]
    assert np.all(ratio <= GRID)
    # Dividing the noise costs at most a third of delta here.
    assert np.max(ratio) > 0.65


# --- People in few of many classes: Theorem A, averaged over fresh partitions ---


RATIOS = np.exp([0.05, 0.25, 1.0, 2.0])


def few(
    classes: int, ways: int, hers: Any, drawn: tuple[int, int], rate: Any, **fields: Any
) -> jde.GaussianStep:
    """A step of Poisson-sampled grouped classes; ``drawn`` is (size, population)."""
    design = jde.GroupedClasses(
        num_classes=classes,
        ways=ways,
        episodes=jde.Poisson("episode", sampling_probability=rate),
        examples=jde.WithoutReplacement("example", size=drawn[0], population=drawn[1]),
    )
    people = jde.PersonBounds(examples=1, classes=hers)
    known = {"noise_multiplier": 1.0, "neighboring_relation": "zero_out"}
    known |= {"privacy_unit": "person", "people": people}
    return jde.GaussianStep(design, **{**known, **fields})


def averaged_theorem_a(
    classes: int, ways: int, hers: int, rho: float, rate: float, relation: str
) -> np.ndarray:
    """Theorem A for every partition with unequal probabilities, and their mean."""
    every = people_draws.partitions(classes, ways)
    kinds = Counter(
        tuple(sorted(sum(i < hers for i in group) for group in each)) for each in every
    )
    total = np.zeros((2, len(RATIOS)))
    for held, number in kinds.items():
        rates = [(rate, 1 - (1 - rho) ** a) for a in held]
        claim = people.theorem_a(rates, relation, 1.0, RATIOS)
        total += number / len(every) * claim
    return total


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
@pytest.mark.parametrize(
    ("classes", "ways", "hers", "drawn", "rate", "most"),
    [
        # The person's classes are in two groups, or both in one.
        (8, 2, 2, (1, 4), 0.3, 1.001),
        (6, 3, 3, (2, 2), 0.5, 1.001),
        (6, 3, 4, (1, 2), 1.0, 1.001),
        (7, 3, 4, (1, 4), 0.3, 1.25),
        (7, 3, 5, (1, 2), 0.9, 1.2),
    ],
)
def test_the_mean_over_partitions_bounds_that_of_every_draw(
    classes, ways, hers, drawn, rate, most, relation
):
    """An upper bound because groups are made alike; exact if they are alike."""
    step = few(classes, ways, hers, drawn, rate, neighboring_relation=relation)
    exact = averaged_theorem_a(classes, ways, hers, drawn[0] / drawn[1], rate, relation)
    theorem_a: Any = dominating_pairs(step)[0]
    with np.errstate(all="ignore"):
        found = theorem_a.log_tails(np.log(RATIOS))
    for (profile, _), expected in zip(found, exact, strict=True):
        judged = expected > 1e-6
        ratio = np.exp(profile)[judged] / expected[judged]
        assert np.all(ratio > 1 - 1e-9) and np.all(ratio < most)


# Noise 20, 300 steps at delta 1e-5, by the person's number of 964 classes.
BY_BOUND = {1: 0.0086980416, 10: 0.112226280, 100: 1.366647, 963: 15.6436163}
UNLISTED = {1: 0.0086980416, 10: 0.126895411, 100: 1.427807, 963: 15.6460870}


@pytest.mark.parametrize("hers", fast_and_slow(BY_BOUND, lambda hers: hers == 10))
def test_averages_cost_less_than_full_groups(
    hers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with too many partitions to list, and with merged distributions."""
    step = few(964, 5, hers, (2, 20), 1 / 24, noise_multiplier=20.0)
    for values in (BY_BOUND, UNLISTED):
        found = float(jde.epsilon(step, num_steps=300, delta=1e-5))
        assert found == pytest.approx(values[hers], rel=1e-6)
        monkeypatch.setattr(contribution_pairs, "_MOST_CELLS", 0)


@pytest.mark.parametrize("relation", ["zero_out", "add_remove"])
def test_ends_of_coins_and_classes(relation: str) -> None:
    """Rates 0 and 1; all or no examples of a class drawn; no noise."""
    fields = {"neighboring_relation": relation}
    run = {"num_steps": 3, "delta": 1e-5}
    step = few(9, 3, 4, (2, 2), [0.0, 0.5, 1.0], **fields)
    found = jde.epsilon(step, **run)
    assert found[0] == 0 and found[1] < found[2] < np.inf
    assert jde.epsilon(few(9, 3, 4, (2, 2), 0.5, noise_multiplier=0.0), **run) == np.inf
    # Two of the person's classes, in different groups.
    step = few(2, 1, 2, (2, 2), 1.0, **fields)
    shift = np.sqrt(3) * (2 if relation == "zero_out" else 4)
    expected = jde.epsilon(sampled(1.0, 1 / shift), num_steps=1, delta=1e-5)
    assert jde.epsilon(step, **run) == pytest.approx(expected, rel=1e-9)


# --- Examples with copies in several classes, against enumeration ---


def step_of(
    design: Copies, noise: float, copies: int | None = None
) -> jde.GaussianStep:
    number = design.copies if copies is None else copies
    return few(
        design.classes,
        design.ways,
        number,
        (design.drawn, design.size),
        float(design.rate),
        noise_multiplier=noise,
        neighboring_relation=design.relation,
        privacy_unit="original",
    )


def charged_by_each(step: jde.GaussianStep, epsilons: np.ndarray) -> np.ndarray:
    """(theorems, 2, E) deltas of one step, forward and backward."""
    found = [pair.log_tails(epsilons) for pair in dominating_pairs(step)]
    return np.exp([[profile for profile, _ in both] for both in found])


def random_design(rng: np.random.Generator) -> tuple[Copies, float]:
    copies = int(rng.choice([2, 3, 4]))
    classes = copies * int(rng.integers(1, 4))
    size = int(rng.integers(2, 9))
    return Copies(
        classes,
        int(rng.integers(1, classes + 1)),
        Fraction(int(rng.integers(1, 11)), 10),
        int(rng.integers(1, size + 1)),
        size,
        copies,
        str(rng.choice(["zero_out", "add_remove", "replace_one"])),
    ), float(rng.uniform(0.4, 3.0))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.few(1)
def test_no_theorem_is_below_the_truth(seed):
    """Each theorem by itself, in both directions, for 40 designs.

    The smallest ratio is close to 1, and the planted claim, the cost of one copy, is
    exceeded.
    """
    rng = np.random.default_rng(seed)
    ratios, one_copy = [], []
    epsilons = np.array([0.0, 0.2, 1.0, 2.5])
    for _ in range(10):
        design, noise = random_design(rng)
        true = np.stack(
            [attained_by_copies(design, noise, math.exp(e)) for e in epsilons], 1
        )
        charged = charged_by_each(step_of(design, noise), epsilons)
        assert np.all(charged >= true * (1 - 1e-9) - 1e-12), (design, noise)
        ratios.append(np.max(true / np.maximum(charged.min(axis=0), 1e-300)))
        alone = charged_by_each(step_of(design, noise, 1), epsilons).min(axis=0)
        one_copy.append(np.max(true / np.maximum(alone, 1e-300)))
    assert max(ratios) > 0.98
    assert max(one_copy) > 1.5


def test_the_charge_of_published_episodes():
    """Four rotations of 1,200 characters of Omniglot: one copy alone costs .567."""
    design = Copies(4_800, 5, Fraction(1, 30), 2, 20, 4, "zero_out")
    asked = {"num_steps": 1_000, "delta": 1e-5}
    assert jde.epsilon(step_of(design, 1.0), **asked) == pytest.approx(
        2.58235, rel=1e-5
    )
    one_copy = jde.epsilon(step_of(design, 1.0, 1), **asked)
    assert one_copy == pytest.approx(0.566671, rel=1e-5)


def test_the_report_has_no_epsilon_of_one_copy():
    step = step_of(Copies(40, 5, Fraction(1, 4), 2, 20, 4, "zero_out"), 2.0)
    report = jde.privacy_report(step, num_steps=10, delta=1e-5)
    assert list(report.epsilon_by_level) == ["original"]
    assert "one original example with all copies, in at most 4 classes" in str(report)
    assert any(text.startswith("Copies:") for text in report.preconditions)
