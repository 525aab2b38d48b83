"""Steps that several test files describe, by rates and noise."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import jaxdp_episodic as jde

LEVELS = ("school", "class", "pupil")


class Setting(NamedTuple):
    """Rates and noise of one setting, or arrays of them; not every step uses all."""

    outer: np.ndarray
    rate: np.ndarray
    inner: np.ndarray
    noise: np.ndarray
    num_episodes: np.ndarray


def poisson(name: str, rate: Any) -> jde.Poisson:
    return jde.Poisson(name, sampling_probability=rate)


def fixed(name: str, rate: Any, population: int = 10**6) -> jde.WithoutReplacement:
    """A fixed-size sample, of at least one unit, whose rate is about the given one."""
    size = np.maximum(np.rint(np.asarray(rate) * population), 1).astype(int)
    many = np.full(size.shape, population)
    return jde.WithoutReplacement(name, size=size, population=many)


def step(
    noise: Any, *schemes: Any, clip: str | None = None, relation: str = "add_remove"
) -> jde.GaussianStep:
    """A multistage step of these levels, from the top."""
    return jde.GaussianStep(
        jde.MultistageSampling(*schemes),
        noise_multiplier=noise,
        clip_unit=clip,
        neighboring_relation=relation,
    )


def sampled(rate: Any, noise: Any, **fields: Any) -> jde.GaussianStep:
    """A step of one level: each "user" is drawn with this rate."""
    return jde.GaussianStep(poisson("user", rate), noise_multiplier=noise, **fields)


def poisson_step(noise: Any, *rates: Any, **fields: Any) -> jde.GaussianStep:
    """A multistage step of one to three Poisson levels: `LEVELS`, from the top."""
    return step(noise, *map(poisson, LEVELS, rates), **fields)


def levels(relation: str, clip: str | None, *schemes: Any) -> Callable[..., Any]:
    """A function of noise and rates: the last `LEVELS`, drawn by these schemes."""
    names = LEVELS[-len(schemes) :]

    def make(noise: Any, *rates: Any) -> jde.GaussianStep:
        drawn = [
            draw(*level) for draw, *level in zip(schemes, names, rates, strict=False)
        ]
        return step(noise, *drawn, clip=clip, relation=relation)

    return make


def episodic(
    noise: Any, rate: Any, number: Any, relation: str = "add_remove"
) -> jde.GaussianStep:
    """A number of independent episodes of Poisson-sampled units."""
    design = jde.IndependentEpisodes(poisson("unit", rate), num_episodes=number)
    return jde.GaussianStep(
        design, noise_multiplier=noise, neighboring_relation=relation
    )


def grouped(
    noise: Any, rate: Any, examples: Any, clip: str | None = None, **fields: Any
) -> jde.GaussianStep:
    """Episodes of 5 of 100 classes, Poisson sampled with this rate."""
    design = jde.GroupedClasses(
        num_classes=100, ways=5, episodes=poisson("episode", rate), examples=examples
    )
    return jde.GaussianStep(design, noise_multiplier=noise, clip_unit=clip, **fields)


def difference(function: Callable[[Any], Any], x: Any, step: float = 1e-3) -> Any:
    """A derivative: a central difference of fourth order, with a relative step."""
    h = step * x
    near, far = function(x + h) - function(x - h), function(x + 2 * h)
    return (8 * near - (far - function(x - 2 * h))) / (12 * h)
