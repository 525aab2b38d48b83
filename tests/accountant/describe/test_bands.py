"""Bands: the draws of a group, their cost, and refusals."""

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.describe.population import PersonBounds, Population


def rare(name, rate=0.2, **fields):
    return jde.Poisson(name, sampling_probability=rate, **fields)


def some(name, size, population=None, **fields):
    return jde.WithoutReplacement(name, size=size, population=population, **fields)


def grouped(num_classes=30, examples=20, episodes=None, **fields):
    episodes = rare("episode") if episodes is None and not fields else episodes
    return jde.GroupedClasses(
        num_classes=num_classes,
        ways=3,
        episodes=episodes,
        examples=some("example", 2, examples),
        **fields,
    )


def blocks(**fields):
    given = {"num_people": 60, "people_per_block": 5, "episodes": rare("episode")}
    return jde.PeopleBlocks(**{**given, **fields})


def tree(first, last, **fields):
    return jde.MultistageSampling(first, last, **fields)


def step(sampling, relation="replace_one", **fields):
    fields = {"noise_multiplier": 1.5, "neighboring_relation": relation} | fields
    return jde.GaussianStep(sampling, **fields)


def on(level, sampling, count=4, *, relation="replace_one", **fields):
    bands = jde.Bands(count, level=level)
    return step(sampling, relation, bands=bands, **fields)


# A banded step and the draw within its smallest group.
WITHIN = {
    "a coin": (lambda: on("user", rare("user"), relation="add_remove"), rare("user")),
    "slots": (lambda: on("user", some("user", 3, 23)), some("user", 3, 5)),
    "an exact number of equal groups": (
        lambda: on("user", some("user", 3, 24, population_is_exact=True)),
        some("user", 3, 6, population_is_exact=True),
    ),
    "an exact number of unequal groups": (
        lambda: on("user", some("user", 3, 23, population_is_exact=True)),
        some("user", 3, 5),
    ),
    "bins": (
        lambda: on("user", jde.RandomAllocation("user", steps_per_epoch=5)),
        jde.RandomAllocation("user", steps_per_epoch=5),
    ),
    "below the clipped level": (
        lambda: on("shot", tree(rare("task"), some("shot", 2, 9)), clip_unit="task"),
        tree(rare("task"), some("shot", 2, 2)),
    ),
    "drawings": (
        lambda: on("example", grouped(), relation="zero_out"),
        grouped(examples=5),
    ),
    "classes that are drawn": (
        lambda: on("class", grouped(classes=some("class", 6, 30))),
        grouped(num_classes=7, classes=some("class", 6, 7)),
    ),
    "a class that is protected": (
        lambda: on("class", grouped(), privacy_unit="class"),
        grouped(num_classes=7),
    ),
    "independent episodes": (
        lambda: on(
            "shot",
            jde.IndependentEpisodes(
                tree(rare("task"), some("shot", 2, 9)), num_episodes=3
            ),
        ),
        jde.IndependentEpisodes(tree(rare("task"), some("shot", 2, 2)), num_episodes=3),
    ),
    "blocks of people": (lambda: on("person", blocks()), blocks(num_people=15)),
    "one band": (
        lambda: on("user", some("user", 3, 23), 1, relation="add_remove"),
        some("user", 3, 23),
    ),
}


@pytest.mark.parametrize("case", WITHIN)
def test_a_step_draws_from_the_smallest_group(case):
    make, within = WITHIN[case]
    made = make()
    ordinary = {
        name: getattr(made, name)
        for name in ("noise_multiplier", "clip_unit", "privacy_unit", "small_units")
    }
    expected = step(within, made.neighboring_relation, **ordinary)
    assert made.in_group == expected
    assert made.design.level_names == expected.design.level_names
    for ours, theirs in zip(
        made.path_rates.rates, expected.path_rates.rates, strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert jde.GaussianStep.from_dict(made.to_dict()) == made != made.in_group


def test_bands_are_set_and_taken_away():
    assert jde.Bands(3, level="user", horizon=9) != jde.Bands(3, level="user")
    made = on("user", rare("user"))
    assert jde.banded(made, None) == step(rare("user"))
    assert jde.banded(step(rare("user")), made.bands) == made


REFUSED = {
    "a person's examples in several groups": (
        lambda: on(
            "example",
            grouped(),
            privacy_unit="person",
            people=PersonBounds(examples=2, classes=3),
        ),
        "examples of one person may lie in several groups",
    ),
    "groups below the protected level": (
        lambda: on("example", grouped(), privacy_unit="class"),
        "groups must be of level 'class' with .* got 'example'",
    ),
    "people of blocks by episode": (lambda: on("episode", blocks()), "'person'"),
    "hashed groups of slots": (
        lambda: on("user", some("user", 3, 23), relation="add_remove"),
        "no public lower bound",
    ),
    "a group smaller than its draw": (
        lambda: on("user", some("user", 6, 23)),
        "as a step samples, 6, got 4 groups of 23: the smallest has 5",
    ),
    "a group smaller than an episode": (
        lambda: on("class", grouped(num_classes=11)),
        "level 'class' as a step samples, 3, got 4 groups of 11: the smallest has 2",
    ),
    "a group of fewer episodes": (
        lambda: on("class", grouped(episodes=some("episode", 3))),
        "units of level 'episode' as a step samples, 3",
    ),
    "a group smaller than a block": (
        lambda: on("person", blocks(num_people=19)),
        "level 'person' as a step samples, 5",
    ),
    "a size that nobody states": (
        lambda: on("user", some("user", 3)),
        "need its population",
    ),
    "a tree of real sizes": (
        lambda: on("user", rare("user"), population=Population.from_sizes(40)),
        "bands with a Population",
    ),
    "no bands": (
        lambda: jde.Bands(0, level="user"),
        "count must be a whole number >= 1",
    ),
    "a horizon within a step": (
        lambda: jde.Bands(2, level="user", horizon=0.5),
        "horizon must be >= 1, got 0.5",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_designs_without_a_theorem_are_refused_by_name(case):
    make, message = REFUSED[case]
    with pytest.raises((NotImplementedError, ValueError, TypeError), match=message):
        make()
