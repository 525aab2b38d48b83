"""Grouped classes and independent episodes."""

import functools

import numpy as np
import pytest

import jaxdp_episodic as jde
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
        IndependentEpisodes(EPISODES, num_episodes=2)
    with pytest.raises(NotImplementedError, match="GroupedClasses"):
        IndependentEpisodes(grouped(), num_episodes=2)
    with pytest.raises(TypeError, match="sampling must be"):
        IndependentEpisodes(0.5, num_episodes=2)
    sampling = Poisson("class", sampling_probability=[0.1, 0.2, 0.3])
    with pytest.raises(ValueError, match=r"num_episodes: \(2,\)"):
        IndependentEpisodes(sampling, num_episodes=[1, 2])


# --- Composed runs protect one kind of unit ---


# These tests are about the Rényi bounds.
rdp_epsilon = functools.partial(jde.epsilon, method="rdp")

TREE = jde.Population.from_sizes([3, 3, 3])  # without names


def step(*levels, tree=TREE, **fields):
    sampling = jde.MultistageSampling(*levels)
    arguments = {"noise_multiplier": 1.0, "population": tree, **fields}
    return jde.GaussianStep(sampling, **arguments)


def poisson(name):
    return jde.Poisson(name, sampling_probability=0.1)


def few(name):
    return jde.WithoutReplacement(name, size=1)


def test_units_of_different_levels_are_not_composed():
    """Both levels are called "x": one is of examples, one of groups of three."""
    below = step(poisson("a"), few("x"), clip_unit="a")
    above = step(poisson("x"))
    with pytest.raises(ValueError, match="same levels of the population"):
        jde.compose((below, 1), (above, 1))


@pytest.mark.slow
def test_units_of_the_same_levels_are_composed():
    below = step(poisson("a"), few("x"), clip_unit="a")
    both = jde.compose((below, 1), (step(poisson("a"), few("x"), clip_unit="x"), 2))
    assert rdp_epsilon(both, delta=1e-3) > rdp_epsilon(below, num_steps=1, delta=1e-3)


def test_grouped_classes_reach_examples_by_two_levels_of_the_tree():
    grouped = jde.GaussianStep(
        jde.GroupedClasses(
            num_classes=3,
            ways=1,
            episodes=poisson("episode"),
            examples=few("example"),
        ),
        noise_multiplier=1.0,
        population=TREE,
    )
    tree = step(poisson("class"), few("example"), clip_unit="class")
    run = jde.compose((grouped, 5), (tree, 5))
    assert np.isfinite(rdp_epsilon(run, delta=1e-3))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (step(poisson("a"), few("x"), clip_unit="a", privacy_unit="a"), "privacy_unit"),
        (
            step(
                poisson("a"),
                few("x"),
                clip_unit="a",
                neighboring_relation="replace_one",
            ),
            "neighboring_relation",
        ),
        (
            step(
                poisson("a"),
                few("x"),
                clip_unit="a",
                tree=jde.Population.from_sizes([3, 3, 4]),
            ),
            "one and the same population",
        ),
    ],
)
def test_other_units_are_not_composed(other, message):
    first = step(poisson("a"), few("x"), clip_unit="a")
    with pytest.raises(ValueError, match=message):
        jde.compose((first, 1), (other, 1))


def test_too_many_independent_episodes_are_refused():
    sampling = jde.IndependentEpisodes(
        jde.WithoutReplacement("x", size=1, population=10), num_episodes=10**9
    )
    with pytest.raises(NotImplementedError, match="num_episodes must be at most"):
        rdp_epsilon(
            jde.GaussianStep(sampling, noise_multiplier=1.0), num_steps=1, delta=1e-5
        )
