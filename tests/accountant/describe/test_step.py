"""Composed runs protect one kind of unit, even if levels have equal names."""

import functools

import numpy as np
import pytest

import jaxdp_episodic as jde

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
