"""People in few of many classes: Theorem A, averaged over fresh partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions import contribution_pairs
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pairs
from oracles import people, people_draws
from rows import fast_and_slow

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
    defaults = {"noise_multiplier": 1.0, "neighboring_relation": "zero_out"}
    return jde.GaussianStep(
        design, privacy_unit="person", people=people, **{**defaults, **fields}
    )


def averaged(
    classes: int, ways: int, hers: int, rho: float, rate: float, relation: str
) -> people.Claim:
    """Theorem A for every partition with unequal probabilities, and their mean."""
    every = people_draws.partitions(classes, ways)
    kinds = Counter(
        tuple(sorted(sum(i < hers for i in group) for group in each)) for each in every
    )
    return people.scaled(
        *(
            (
                number / len(every),
                people.theorem_a([(rate, 1 - (1 - rho) ** a) for a in held], relation),
            )
            for held, number in kinds.items()
        )
    )


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
@pytest.mark.parametrize(
    ("classes", "ways", "hers", "drawn", "rate", "most"),
    [
        (
            8,
            2,
            2,
            (1, 4),
            0.3,
            1.001,
        ),  # the person's classes in two groups, or both in one
        (6, 3, 3, (2, 2), 0.5, 1.001),
        (6, 3, 4, (1, 2), 1.0, 1.001),
        (7, 3, 4, (1, 4), 0.3, 1.25),
        (7, 3, 5, (1, 2), 0.9, 1.2),
    ],
)
def test_the_mean_over_partitions_bounds_that_of_every_draw(
    classes: int,
    ways: int,
    hers: int,
    drawn: tuple[int, int],
    rate: float,
    most: float,
    relation: str,
) -> None:
    """An upper bound because groups are made alike; exact if they are alike."""
    step = few(classes, ways, hers, drawn, rate, neighboring_relation=relation)
    claim = averaged(classes, ways, hers, drawn[0] / drawn[1], rate, relation)
    exact = people.profiles(claim, 1.0, RATIOS)
    theorem_a: Any = dominating_pairs(step)[0]
    with np.errstate(all="ignore"):
        found = theorem_a.log_tails(np.log(RATIOS))
    for (profile, _), expected in zip(found, exact, strict=True):
        judged = expected > 1e-6
        ratio = np.exp(profile)[judged] / expected[judged]
        assert np.all(ratio > 1 - 1e-9) and np.all(ratio < most)


def test_two_of_twenty_classes_cost_twice_one() -> None:
    """A composed run, by another program; it was 5.674 before."""
    step = few(20, 5, 2, (2, 20), 0.25)
    found = float(jde.epsilon(step, num_steps=100, delta=1e-5))
    # The same components, enumerated: both in one group with probability 4/19.
    alone, both = 0.225, 0.2025  # drawn without the person: 1/4 times 0.9, 0.81
    theta = [0.25 * r / (1 - 0.25 * (1 - r)) for r in (0.1, 0.19)]
    laws: list[tuple[float, Sequence[float]]] = [
        ((1 - alone) ** 2 * 15 / 19, people.poisson_binomial([theta[0]] * 2)),
        (2 * alone * (1 - alone) * 15 / 19, [1 - theta[0], theta[0]]),
        ((1 - both) * 4 / 19, [1 - theta[1], theta[1]]),
        (alone**2 * 15 / 19 + both * 4 / 19, [1.0]),
    ]
    claim = people.visible_laws(laws, "zero_out")
    delta = people.composed(claim, 1.0, 100, np.array([found]), forward=True)
    assert delta == pytest.approx(1e-5, rel=1e-3)
    one = jde.epsilon(few(20, 5, 1, (2, 20), 0.25), num_steps=100, delta=1e-5)
    assert found < 2.01 * one


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
    gaussian = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=1.0), noise_multiplier=1 / shift
    )
    expected = jde.epsilon(gaussian, num_steps=1, delta=1e-5)
    assert jde.epsilon(step, **run) == pytest.approx(expected, rel=1e-9)
