"""Grouped classes and independent episodes."""

import numpy as np
import pytest

from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses,
    IndependentEpisodes,
)
from jaxdp_episodic.accountant.describe.schemes import (
    MultistageSampling,
    Poisson,
    WithoutReplacement,
)

EPISODES = Poisson("episode", sampling_probability=0.16)
EXAMPLES = WithoutReplacement("example", size=4, population=20)


def grouped(**changes):
    fields = {
        "num_classes": 1_800,
        "ways": 5,
        "episodes": EPISODES,
        "examples": EXAMPLES,
    }
    return GroupedClasses(**{**fields, **changes})


def test_grouped_levels_and_shape():
    design = grouped(ways=[[1], [5]], num_classes=[100, 200, 300])
    assert design.level_names == ("episode", "class", "example")
    assert design.shape == (2, 3)
    np.testing.assert_array_equal(
        design.num_possible_episodes, [[100, 200, 300], [20, 40, 60]]
    )


@pytest.mark.parametrize(
    "scheme",
    [
        Poisson("class", sampling_probability=0.1),
        Poisson("class", sampling_probability=0.1, population=1_800),
        WithoutReplacement("class", size=320),
        WithoutReplacement("class", size=320, population=1_800),
    ],
)
def test_classes_may_be_drawn_in_place_of_episodes(scheme):
    assert grouped(episodes=None, classes=scheme).shape == ()


def test_exactly_one_of_episodes_and_classes():
    with pytest.raises(ValueError, match="exactly one .* got neither"):
        grouped(episodes=None)
    with pytest.raises(ValueError, match="exactly one .* got both"):
        grouped(classes=Poisson("class", sampling_probability=0.1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"episodes": Poisson("task", sampling_probability=0.1)},
            "episodes must be named 'episode', got 'task'",
        ),
        (
            {"episodes": None, "classes": EPISODES},
            "classes must be named 'class', got 'episode'",
        ),
        (
            {"examples": WithoutReplacement("pupil", size=4, population=20)},
            "examples must be named 'example', got 'pupil'",
        ),
        (
            {"episodes": WithoutReplacement("episode", size=3, population=360)},
            "population=None",
        ),
        (
            {"episodes": Poisson("episode", sampling_probability=0.1, population=360)},
            "population=None",
        ),
        (
            {
                "episodes": None,
                "classes": WithoutReplacement("class", size=320, population=1_000),
            },
            "population=None or num_classes",
        ),
        (
            {"episodes": None, "classes": WithoutReplacement("class", size=4)},
            "at least `ways` classes",
        ),
        ({"ways": 1_801}, "ways must be at most num_classes"),
        ({"ways": 0}, "ways must be a whole number"),
        ({"num_classes": 12.5}, "num_classes must be a whole number"),
        ({"ways": [1, 2], "num_classes": [10, 20, 30]}, "do not broadcast"),
    ],
)
def test_grouped_refuses_wrong_values(changes, message):
    with pytest.raises(ValueError, match=message):
        grouped(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"ways": True},
        {"num_classes": "many"},
        {"episodes": 0.1},
        {"examples": None},
        {"examples": 4},
    ],
)
def test_grouped_refuses_wrong_types(changes):
    with pytest.raises(TypeError):
        grouped(**changes)


def test_poisson_drawn_examples_are_refused_with_alternatives():
    with pytest.raises(NotImplementedError, match="covered: episodes=Poisson"):
        grouped(examples=Poisson("example", sampling_probability=0.2))


def test_independent_episodes_wrap_a_bare_scheme():
    scheme = WithoutReplacement("class", size=5, population=100)
    design = IndependentEpisodes(scheme, num_episodes=[4, 8])
    assert design.sampling == MultistageSampling(scheme)
    assert design == IndependentEpisodes(
        MultistageSampling(scheme), num_episodes=[4, 8]
    )
    assert design.level_names == ("episode", "class")
    assert design.shape == (2,)


@pytest.mark.parametrize(
    ("count", "error"),
    [(0, ValueError), (1.5, ValueError), (True, TypeError), (np.nan, ValueError)],
)
def test_num_episodes_is_a_whole_number(count, error):
    with pytest.raises(error, match="num_episodes"):
        IndependentEpisodes(EXAMPLES, num_episodes=count)


def test_independent_episodes_refuse_other_samplings():
    with pytest.raises(ValueError, match="level named 'episode'"):
        IndependentEpisodes(EPISODES, num_episodes=2)  # pyright: ignore[reportArgumentType] # a bare scheme is wrapped at run time
    with pytest.raises(NotImplementedError, match="GroupedClasses"):
        IndependentEpisodes(grouped(), num_episodes=2)  # pyright: ignore[reportArgumentType] # the wrong type is the test
    with pytest.raises(TypeError, match="sampling must be"):
        IndependentEpisodes(0.5, num_episodes=2)  # pyright: ignore[reportArgumentType] # the wrong type is the test
    sampling = Poisson("class", sampling_probability=[0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match=r"num_episodes: \(2,\)"):
        IndependentEpisodes(sampling, num_episodes=[1, 2])  # pyright: ignore[reportArgumentType] # a bare scheme is wrapped at run time
