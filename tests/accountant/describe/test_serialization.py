"""Specs to dictionaries and back; hostile dictionaries."""

import json

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses,
    IndependentEpisodes,
    MultistageSampling,
    Poisson,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.spec import spec_from_dict

POISSON = Poisson("school", sampling_probability=[[0.1], [1 / 3]])
FIXED = WithoutReplacement("pupil", size=8, population=[40, 50, 60])
EXAMPLES = WithoutReplacement("example", size=2, population=20)
CLASSES = MultistageSampling(
    WithoutReplacement("class", size=5, population=23), EXAMPLES
)
EPISODES = Poisson("episode", sampling_probability=0.25)
BLOCKS = jde.PeopleBlocks(
    num_people=21, people_per_block=4, episodes=EPISODES, sampling=CLASSES
)
EPOCHS = GroupedClasses(
    num_classes=100,
    ways=5,
    episodes=jde.RandomAllocation("episode", steps_per_epoch=[10, 20], times=2),
    examples=EXAMPLES,
)
PEOPLE = jde.PersonBounds(examples=1, classes=3)
BY_NUMBER = jde.PersonBounds(examples=[1, 2], classes=3)
PERSON = {"noise_multiplier": 2.0, "privacy_unit": "person"}
RELEASES = [
    jde.LaplaceRelease(2.0, sampling_probability=0.5),
    jde.LaplaceRelease(np.array([1.0, 2.0]), neighboring_relation="replace_one"),
    jde.ApproximateDP(0.1, 1e-9),
    jde.ApproximateDP(np.array([0.1, np.inf])),
    jde.ZeroConcentratedDP(0.2),
    jde.ZeroConcentratedDP.of_gaussian([1.0, 2.0]),
]


SPECS = [
    POISSON,
    Poisson("school", sampling_probability=1e-300, population=7),
    FIXED,
    WithoutReplacement("pupil", size=2**53),
    WithoutReplacement("pupil", size=3, population=3, population_is_exact=True),
    MultistageSampling(POISSON, FIXED),
    GroupedClasses(
        num_classes=[100, 200],
        ways=5,
        episodes=Poisson("episode", sampling_probability=0.16),
        examples=WithoutReplacement("example", size=4, population=20),
    ),
    GroupedClasses(
        num_classes=100,
        ways=5,
        classes=WithoutReplacement("class", size=20),
        examples=WithoutReplacement("example", size=4),
    ),
    IndependentEpisodes(MultistageSampling(POISSON, FIXED), num_episodes=[1, 2, 3]),
    Population.from_sizes([[4, 0, 3], []], level_names=("task", "class")),
    Population.from_ids(school=["a", "a", "b"]),
    jde.GaussianStep(CLASSES, people=BY_NUMBER, clip_unit="step", **PERSON),
    jde.GaussianStep(BLOCKS, people=PEOPLE, neighboring_relation="zero_out", **PERSON),
    jde.GaussianStep(EPOCHS, noise_multiplier=1.0),
    jde.Bands(3, level="user", horizon=np.inf),
    *RELEASES,
    jde.compose((RELEASES[0], 3), (RELEASES[2], 1)),
    jde.disjoint({"spring": RELEASES[0], "autumn": RELEASES[0]}),
]


@pytest.mark.parametrize(
    "spec", SPECS, ids=[f"{i}-{type(s).__name__}" for i, s in enumerate(SPECS)]
)
def test_round_trip_through_json(spec):
    written = spec.to_dict()
    assert written["version"] == 1
    assert written["type"] == type(spec).__name__
    assert "null" not in json.dumps(written)  # TOML has none
    read = json.loads(json.dumps(written))
    again = type(spec).from_dict(read)
    assert again == spec and hash(again) == hash(spec)
    assert spec_from_dict((Poisson, type(spec)), read) == spec


def test_nested_specs_may_carry_their_version():
    written = MultistageSampling(POISSON).to_dict()
    written["levels"] = [POISSON.to_dict()]
    assert MultistageSampling.from_dict(written) == MultistageSampling(POISSON)
    written["levels"][0]["version"] = 2
    with pytest.raises(ValueError, match=r"levels\[0\]: version must be 1, got 2"):
        MultistageSampling.from_dict(written)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"sise": 3},
            ValueError,
            r"step\.sampling\.levels\[1\]: unknown key 'sise'; did you mean 'size'\?",
        ),
        ({"size": None}, ValueError, r"levels\[1\]: missing key 'size'"),
        ({"type": "Poison"}, ValueError, r"levels\[1\].type .*did you mean 'Poisson'"),
        ({"type": ["Poisson"]}, TypeError, r"levels\[1\].type must be one of"),
        ({"size": 0}, ValueError, r"levels\[1\]: size must be a whole number"),
        ({"size": 10**5000}, ValueError, "size holds an integer of more than 64 bits"),
        ({3: 3}, TypeError, "keys must be strings"),
    ],
)
def test_errors_name_their_place(changes, error, message):
    written = MultistageSampling(POISSON, FIXED).to_dict()
    level = {**written["levels"][1], **changes}
    written["levels"][1] = {k: v for k, v in level.items() if v is not None}
    with pytest.raises(error, match=message):
        spec_from_dict(MultistageSampling, written, where="step.sampling")


@pytest.mark.parametrize("version", [2, "1", True, None])
def test_other_versions_are_refused(version):
    with pytest.raises(ValueError, match="Poisson: version must be 1"):
        Poisson.from_dict({**POISSON.to_dict(), "version": version})
    without = {k: v for k, v in POISSON.to_dict().items() if k != "version"}
    with pytest.raises(ValueError, match="missing key 'version'"):
        Poisson.from_dict(without)


def test_other_types_are_refused():
    table = POISSON.to_dict()
    for hostile in (None, 3, "Poisson", [table]):
        with pytest.raises(TypeError, match="Poisson must be a table of keys"):
            Poisson.from_dict(hostile)
    for levels in (None, 3, "x", [3], [[table]], table, []):
        written = {"version": 1, "type": "MultistageSampling", "levels": levels}
        with pytest.raises((TypeError, ValueError), match="MultistageSampling"):
            MultistageSampling.from_dict(written)


def test_deep_nesting_is_refused_without_recursion():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested deeper than 32"):
        Poisson.from_dict({**POISSON.to_dict(), "sampling_probability": deep})
    table: dict = {}
    for _ in range(100_000):
        table = {"sampling": table}
    with pytest.raises(ValueError, match="nested deeper than 32"):
        IndependentEpisodes.from_dict(table)


def test_the_error_of_an_unsupported_combination_has_its_place():
    written = SPECS[6].to_dict()
    written["examples"] = {
        "type": "Poisson",
        "name": "example",
        "sampling_probability": 0.1,
    }
    with pytest.raises(NotImplementedError, match="^step.sampling: .*covered:"):
        spec_from_dict((Poisson, GroupedClasses), written, where="step.sampling")
