"""Bounds of a person, blocks of people, and contradictory designs."""

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.describe.spec import Spec

W, P = jde.WithoutReplacement, jde.Poisson
EXAMPLES = W("example", size=2, population=20)
CLASSES = jde.MultistageSampling(W("class", size=5, population=20), EXAMPLES)
GROUPED = jde.GroupedClasses(
    num_classes=23,
    ways=5,
    episodes=P("episode", sampling_probability=0.25),
    examples=EXAMPLES,
)
BLOCKS = jde.PeopleBlocks(
    num_people=21,
    people_per_block=4,
    episodes=P("episode", sampling_probability=0.25),
    sampling=jde.MultistageSampling(
        W("class", size=5, population=23), W("example", size=2, population=4)
    ),
)
PEOPLE = jde.PersonBounds(examples=1, classes=12)


def person(
    design: object, people: object = PEOPLE, **fields: object
) -> jde.GaussianStep:
    fields = {"noise_multiplier": 2.0, "privacy_unit": "person"} | fields
    return jde.GaussianStep(design, people=people, **fields)


@pytest.mark.parametrize(
    "step",
    [
        person(GROUPED),
        person(BLOCKS, neighboring_relation="zero_out"),
        person(CLASSES, jde.PersonBounds(examples=[1, 2], classes=3), clip_unit="step"),
    ],
)
def test_steps_with_people_round_trip_through_dictionaries(step: Spec) -> None:
    again = jde.GaussianStep.from_dict(step.to_dict())
    assert again == step and hash(again) == hash(step)
    assert again.to_dict()["people"]["type"] == "PersonBounds"


def test_bounds_broadcast_with_the_step() -> None:
    bounds = jde.PersonBounds(examples=[[1], [2]], classes=np.arange(1, 4))
    assert person(GROUPED, bounds, noise_multiplier=1.0).shape == (2, 3)
    with pytest.raises(ValueError, match="people"):
        person(
            GROUPED,
            jde.PersonBounds(examples=[1, 2], classes=3),
            noise_multiplier=[1.0, 2.0, 3.0],
        )


def test_blocks_are_whole_and_default_to_a_person() -> None:
    assert BLOCKS.num_possible_episodes == 5  # the 21st person is left out
    assert BLOCKS.level_names == ("episode", "class", "example")
    assert BLOCKS.with_scheme(P("episode", sampling_probability=0.5)) != BLOCKS
    assert BLOCKS.with_scheme(W("class", size=1, population=23)).schemes[1].size == 1
    step = jde.GaussianStep(BLOCKS, noise_multiplier=1.0, people=PEOPLE)
    assert (step.privacy_unit, step.clip_unit) == ("person", "episode")


@pytest.mark.parametrize("field", ["examples", "classes", "tasks"])
@pytest.mark.parametrize("bad", [0, -1, 1.5, np.nan, "many"])
def test_bounds_are_whole_numbers_from_one(field: str, bad: object) -> None:
    with pytest.raises((ValueError, TypeError), match=field):
        jde.PersonBounds(**{field: bad})


EXACT = W("example", size=2, population=4, population_is_exact=True)
TREE = jde.Population.from_sizes([[3, 4], [5, 2]])
STAGES = jde.MultistageSampling(
    P("class", sampling_probability=0.1), P("example", sampling_probability=0.1)
)
DEEP = jde.MultistageSampling(*(P(n, sampling_probability=0.1) for n in "abcd"))
REFUSED = [
    (lambda: jde.PersonBounds(), ValueError, "at least one of"),
    (lambda: person(GROUPED, None), ValueError, "bound on examples and classes"),
    (
        lambda: person(GROUPED, jde.PersonBounds(examples=1)),
        ValueError,
        "bound on classes, got",
    ),
    (
        lambda: person(GROUPED, jde.PersonBounds(examples=1, classes=2, tasks=3)),
        ValueError,
        "must not bound tasks",
    ),
    (lambda: person(EXAMPLES, PEOPLE), ValueError, "must not bound classes"),
    (
        lambda: person(GROUPED, privacy_unit="class"),
        ValueError,
        "people must be None unless",
    ),
    (lambda: person(GROUPED, 3), TypeError, "PersonBounds or None"),
    (
        lambda: person(GROUPED, jde.PersonBounds(examples=1, classes=24)),
        ValueError,
        "people.classes must be at most .*num_classes",
    ),
    (
        lambda: person(EXACT, jde.PersonBounds(examples=5)),
        ValueError,
        "people.examples must be at most .*the exact population",
    ),
    (
        lambda: person(
            STAGES,
            jde.PersonBounds(examples=1, classes=3),
            population=jde.Population.from_sizes([3, 4]),
            clip_unit="class",
        ),
        ValueError,
        "people.classes must be at most .*the Population",
    ),
    (lambda: person(DEEP, PEOPLE, clip_unit="a"), NotImplementedError, "4 levels"),
    (
        lambda: person(
            jde.GroupedClasses(
                num_classes=23,
                ways=5,
                classes=P("class", sampling_probability=0.5),
                examples=EXAMPLES,
            )
        ),
        NotImplementedError,
        "grouped",
    ),
    (
        lambda: person(BLOCKS, population=TREE),
        NotImplementedError,
        "PeopleBlocks with a Population",
    ),
    (
        lambda: person(BLOCKS, None, privacy_unit="class"),
        NotImplementedError,
        "covered: 'person'",
    ),
    (lambda: P("person", sampling_probability=0.1), ValueError, "'person'"),
    (
        lambda: jde.PeopleBlocks(
            num_people=3,
            people_per_block=4,
            episodes=P("episode", sampling_probability=0.25),
        ),
        ValueError,
        "at most num_people",
    ),
]


@pytest.mark.parametrize(("make", "error", "match"), REFUSED)
def test_contradictions_are_refused(make, error, match) -> None:
    with pytest.raises(error, match=match):
        make()


def test_a_person_may_join_a_class_that_is_smaller_than_the_bound() -> None:
    bounds = jde.PersonBounds(examples=9, classes=2)
    tree = jde.Population.from_sizes([3, 4])
    fields = {"clip_unit": "class", "population": tree}
    assert person(STAGES, bounds, **fields).people == bounds
    with pytest.raises(ValueError, match="people.examples"):
        person(STAGES, bounds, neighboring_relation="zero_out", **fields)
