"""Checks that audit releases of the sampler's draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import jaxdp_episodic as jde
from jaxdp_episodic.audit import audit_release
from jaxdp_episodic.trainer.draw import EpisodeSampler
from mutation.verdicts import Effort, Verdict, of_bounds

_EPOCH, _CLASS = 10, 20
_ONE = {"clip_unit": "example", "privacy_unit": "example"}


def epoch(effort: Effort) -> Verdict:
    """One of ten examples, drawn with probability .1 in ten steps.

    With Poisson sampling it is in no step with probability 0.35.
    """
    step = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=1 / _EPOCH), noise_multiplier=0.2
    )
    sizes = {True: _EPOCH, False: _EPOCH - 1}
    rows = np.eye(1, _EPOCH, _EPOCH - 1)[0]
    return _audit(step, sizes, rows, effort, _EPOCH, (0.5, 0.6), np.max)


def last_of_its_class(effort: Effort) -> Verdict:
    """One of two classes is drawn; the second has one example or, without it, none."""
    sampling = jde.MultistageSampling(
        jde.WithoutReplacement("class", size=1, population=2),
        jde.WithoutReplacement("example", size=_CLASS, population=1),
    )
    step = jde.GaussianStep(sampling, noise_multiplier=2.0, **_ONE)
    sizes = {True: [_CLASS, 1], False: [_CLASS, 0]}
    rows = np.array([-1.0] * _CLASS + [1.0])
    return _audit(step, sizes, rows, effort, 1, (1e-2, 1e-1), np.sum)


def _audit(
    step: jde.GaussianStep,
    sizes: dict[bool, Any],
    contributions: np.ndarray,
    effort: Effort,
    num_steps: int,
    deltas: Sequence[float],
    score: Callable[[Any], Any],
) -> Verdict:
    """Audits the noised sums of some steps; examples contribute in clip norms."""
    trees = {is_in: jde.Population.from_sizes(size) for is_in, size in sizes.items()}

    def sums(generator: np.random.Generator, with_unit: bool) -> list[float]:
        sampler = EpisodeSampler(
            step.design,
            trees[with_unit],
            clip_unit=str(step.clip_unit),
            # Otherwise it would refuse a list without the unit before the draw.
            population_is_accounted=True,
        )
        draws = [sampler.draw(generator) for _ in range(num_steps)]
        return [contributions[draw.examples[draw.mask]].sum() for draw in draws]

    claims = jde.epsilon(
        step, num_steps=num_steps, delta=list(deltas), method=effort.method
    )
    return _released(sums, step, claims, deltas, effort, score)


def _released(
    sums: Callable[[np.random.Generator, bool], list[float]],
    step: jde.GaussianStep,
    claims: Any,
    deltas: Sequence[float],
    effort: Effort,
    score: Callable[[Any], Any],
) -> Verdict:
    """Audits sums with the step's noise, with the unit and without."""

    def release(key: jax.Array, with_unit: bool) -> np.ndarray:
        generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        found = np.array(sums(generator, with_unit))
        return found + float(step.noise_multiplier) * generator.normal(size=found.size)

    audit = audit_release(
        release,
        claimed=np.asarray(claims),
        deltas=deltas,
        num_draws=effort.draws,
        score=score,
    )
    return of_bounds(audit.bounds, audit.claimed)


def swapped_in_an_epoch(effort: Effort) -> Verdict:
    """Ten examples and ten steps: nine contribute -1, and the last one +1 or -1."""
    step = jde.GaussianStep(
        jde.RandomAllocation("example", steps_per_epoch=_EPOCH),
        noise_multiplier=1.0,
        neighboring_relation="replace_one",
    )
    tree = jde.Population.from_sizes(_EPOCH)
    sampler = EpisodeSampler(step.design, tree, clip_unit="example")

    def sums(generator: np.random.Generator, with_unit: bool) -> list[float]:
        contributions = -np.ones(_EPOCH)
        contributions[-1] = 1.0 if with_unit else -1.0
        return [
            contributions[sampler.draw(generator, members).units].sum()
            for members in sampler.begin_epoch(generator)
        ]

    deltas = (0.05, 0.1)
    # By Rényi-DP the claim about so few steps is ten times as large.
    claims = jde.epsilon(step, num_steps=_EPOCH, delta=list(deltas))
    # A batch of one changes by two, while the others' sums are equal.
    return _released(
        sums, step, claims, deltas, effort, lambda x: np.logaddexp.reduce(2 * x)
    )
