"""Deltas of people, against every draw of small designs.

The bound is the delta of one step, the larger of both directions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import jaxdp_episodic as jde
from oracles import people_designs, people_draws, people_epochs
from oracles.people_designs import Case
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


def _within(inner: people_designs.Inner) -> tuple[Any, Any]:
    examples = _scheme("example", ("draw", inner.shots), inner.size)
    return _scheme("class", inner.ways, inner.num_classes), examples


def _design(family: str, facts: dict[str, Any]) -> tuple[Any, str, dict[str, int]]:
    """The library's design, the clip unit and the person's bounds."""
    bounds = dict(facts.get("bounds", {}))
    match family:
        case "coin_tasks":
            tasks = jde.Poisson("task", sampling_probability=facts["p"])
            design = jde.MultistageSampling(tasks, *_within(facts["inner"]))
            return design, "task", bounds
        case "fixed_size_tasks":
            tasks = _scheme("task", ("draw", facts["size"]), facts["num_tasks"])
            design = jde.MultistageSampling(tasks, *_within(facts["inner"]))
            return design, "task", bounds
        case "classes_below_tasks":
            inner = facts["inner"]._replace(ways=facts["within"])
            tasks = _scheme("task", facts["above"], facts["num_tasks"])
            design = jde.MultistageSampling(tasks, *_within(inner))
            return design, "class", bounds
        case "independent_episodes":
            sampling = jde.MultistageSampling(*_within(facts["inner"]))
            number = facts["episodes"]
            design = jde.IndependentEpisodes(sampling=sampling, num_episodes=number)
            return design, "episode", bounds
        case "grouped_classes":
            groups = facts["num_classes"] // facts["ways"]
            episodes = _scheme("episode", facts["scheme"], groups)
            design = jde.GroupedClasses(
                num_classes=facts["num_classes"],
                ways=facts["ways"],
                episodes=_without_population(episodes),
                examples=_scheme("example", ("draw", 1), facts["size"]),
            )
            return design, "episode", bounds
        case "blocks":
            inside = _scheme("example", ("draw", facts["size"]), facts["slots"])
            return (
                _blocks(facts["scheme"], inside, 1),
                "episode",
                {"examples": facts["hers"]},
            )
        case "episodes_of_a_block":
            inside = _scheme("example", ("draw", 1), facts["slots"])
            coins = ("coins", facts["p"])
            if facts["disjoint"]:
                return _blocks(coins, None, 2), "episode", {}
            return _blocks(coins, inside, 2), "episode", {"examples": facts["hers"]}
        case "examples_alone":
            examples = _scheme("example", facts["scheme"], facts["population"])
            design = jde.MultistageSampling(examples)
            return design, "example", {"examples": facts["hers"]}
        case "examples_in_classes":
            classes = _scheme("class", facts["above"], facts["num_classes"])
            examples = _scheme("example", facts["below"], facts["size"])
            return jde.MultistageSampling(classes, examples), "example", bounds
    raise ValueError(f"no design of the library for {family}")


def _without_population(scheme: Any) -> Any:
    if isinstance(scheme, jde.WithoutReplacement):
        return jde.WithoutReplacement(scheme.name, size=scheme.size)
    return scheme


def _blocks(drawn: tuple[str, float], inside: Any, episodes: int) -> jde.PeopleBlocks:
    """Two blocks; the number of people in a block does not matter."""
    return jde.PeopleBlocks(
        num_people=6,
        people_per_block=3,
        episodes=_without_population(_scheme("episode", drawn, 2)),
        sampling=inside,
        episodes_per_block=episodes,
    )


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


@pytest.mark.parametrize("family", people_designs.FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_no_draw_exceeds_what_is_charged(family, seed):
    rng = np.random.default_rng([seed, *family.encode(), 1])
    assert _worst_ratio(people_designs.random_case(rng, family), rng, 3) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("family", people_designs.FAMILIES)
def test_no_draw_of_many_exceeds_what_is_charged_and_some_reach_it(family):
    rng = np.random.default_rng([*family.encode(), 2])
    ratios = [
        _worst_ratio(people_designs.random_case(rng, family), rng, 4) for _ in range(60)
    ]
    assert max(ratios) <= ROUNDING
    assert max(ratios) > 0.99


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
            (2, 1, (1, 2), 2.5),
            (2, 1, (1, 4), 1.2),
            (3, 1, (2, 3), 0.7),
            (2, 2, (1, 1), 0.5),
            (2, 2, (1, 1), 2.5),
            (2, 2, (1, 2), 0.7),
            (2, 2, (2, 3), 1.2),
            (2, 3, (1, 2), 0.7),
            (3, 2, (1, 2), 1.2),
            (3, 2, (1, 3), 0.7),
        ],
        lambda steps, units, drawn, s: (units, s) == (1, 0.5),
    ),
)
def test_no_reaction_within_an_epoch_exceeds_what_is_charged(
    steps: int, units: int, drawn: tuple[int, int], s: float, relation: str
) -> None:
    """The noise divided among the person's episodes, and whole episodes."""
    rng = np.random.default_rng([steps, units, *drawn])
    fields = {"noise_multiplier": 1 / s, "neighboring_relation": relation}
    step = _epoch(steps, units, drawn, **fields)
    charged = np.asarray(jde.delta(step, num_steps=steps, epsilon=EPSILONS))
    contents = people_epochs.independent_contents((drawn[0] / drawn[1],) * units)
    design = people_epochs.epoch(steps, contents)
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


def _two_tasks(
    *, p: float = 0.5, size: int = 2, people: bool = True, **bounds: int
) -> np.ndarray:
    """Two Poisson-sampled tasks with a class of two each, one of them the person's."""
    step = jde.GaussianStep(
        jde.MultistageSampling(
            jde.Poisson("task", sampling_probability=p),
            jde.WithoutReplacement("example", size=1, population=size),
        ),
        noise_multiplier=1.0,
        clip_unit="task",
        privacy_unit="person" if people else "example",
        neighboring_relation="zero_out",
        people=jde.PersonBounds(**{"examples": 1, "classes": 2, **bounds})
        if people
        else None,
    )
    return np.asarray(jde.delta(step, epsilon=EPSILONS, num_steps=1))


@pytest.mark.parametrize(
    "wrong",
    [{"classes": 1}, {"size": 3}, {"p": 0.4}, {"people": False}],
    ids=["bound too small", "class too large", "coin too small", "an example alone"],
)
def test_a_wrong_description_is_exceeded(wrong):
    """The tests fail for wrong bounds: the same draws with smaller charges."""
    classes = [(f"x{i}", f"o{i}") for i in range(2)]
    units = [
        people_draws.unit_law(str(i), [each], people_draws.ALL, ("draw", 1))
        for i, each in enumerate(classes)
    ]
    law = people_draws.drawn_units(units, ("coins", 0.5))
    step, rng = people_draws.release(law, "zero_out"), np.random.default_rng(0)
    aims = np.exp([0.25, 1.0])
    found = people_draws.attained(rng, step, 1.0, np.exp(EPSILONS), aims=aims)
    assert np.all(np.maximum(*found) <= ROUNDING * _two_tasks())
    assert np.max(np.maximum(*found) / _two_tasks(**wrong)) > 1.1
