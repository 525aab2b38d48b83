"""Checks that audit releases of the sampler's draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.audit import audit_release
from jaxdp_episodic.trainer.draw import EpisodeSampler
from mutation.verdicts import Effort, Verdict, of_bounds

_EPOCH, _CLASS = 10, 20


def epoch(effort: Effort) -> Verdict:
    """One of ten examples, drawn with probability .1 in ten steps.

    With Poisson sampling it is in no step with probability 0.35.
    """
    sampling = jde.Poisson("example", sampling_probability=1 / _EPOCH)
    step = jde.GaussianStep(sampling, noise_multiplier=0.2)
    alone = np.zeros(_EPOCH)
    alone[-1] = 1.0
    return _audit(
        step,
        {True: _EPOCH, False: _EPOCH - 1},
        alone,
        effort,
        num_steps=_EPOCH,
        deltas=(0.5, 0.6),
        score=np.max,
    )


def last_of_its_class(effort: Effort) -> Verdict:
    """One of two classes is drawn; the second has one example or, without it, none."""
    sampling = jde.MultistageSampling(
        jde.WithoutReplacement("class", size=1, population=2),
        jde.WithoutReplacement("example", size=_CLASS, population=1),
    )
    step = jde.GaussianStep(
        sampling, noise_multiplier=2.0, clip_unit="example", privacy_unit="example"
    )
    return _audit(
        step,
        {True: [_CLASS, 1], False: [_CLASS, 0]},
        np.array([-1.0] * _CLASS + [1.0]),
        effort,
        num_steps=1,
        deltas=(1e-2, 1e-1),
        score=np.sum,
    )


def _audit(
    step: jde.GaussianStep,
    sizes: dict[bool, Any],
    contributions: np.ndarray,
    effort: Effort,
    *,
    num_steps: int,
    deltas: Sequence[float],
    score: Callable[[Any], Any],
) -> Verdict:
    """Audits the noised sums of some steps of a new sampler.

    ``contributions`` are the examples', in clip norms.
    """
    trees = {is_in: Population.from_sizes(size) for is_in, size in sizes.items()}

    def release(key: jax.Array, with_unit: bool) -> np.ndarray:
        generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        sampler = EpisodeSampler(
            step.design,
            trees[with_unit],
            clip_unit=str(step.clip_unit),
            # Otherwise it would refuse a list without the unit before the draw.
            population_is_accounted=True,
        )
        draws = [sampler.draw(generator) for _ in range(num_steps)]
        sums = [contributions[draw.examples[draw.mask]].sum() for draw in draws]
        return sums + float(step.noise_multiplier) * generator.normal(size=num_steps)

    claims = jde.epsilon(
        step, num_steps=num_steps, delta=list(deltas), method=effort.method
    )
    audit = audit_release(
        release,
        claimed=np.asarray(claims),
        deltas=deltas,
        num_draws=effort.draws,
        score=score,
    )
    return of_bounds(audit.bounds, audit.claimed)


def swapped_in_an_epoch(effort: Effort) -> Verdict:
    """Ten examples and ten steps: nine contribute +1, and one is flipped."""
    step = jde.GaussianStep(
        jde.RandomAllocation("example", steps_per_epoch=_EPOCH),
        noise_multiplier=1.0,
        neighboring_relation="replace_one",
    )
    tree = Population.from_sizes(_EPOCH)
    sampler = EpisodeSampler(step.design, tree, clip_unit="example")

    def release(key: jax.Array, with_unit: bool) -> np.ndarray:
        generator = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        contributions = -np.ones(_EPOCH)
        contributions[-1] = 1.0 if with_unit else -1.0
        sums = [
            contributions[sampler.draw(generator, members).units].sum()
            for members in sampler.begin_epoch(generator)
        ]
        return sums + generator.normal(size=_EPOCH)

    deltas = (0.05, 0.1)
    # By Rényi-DP the claim about so few steps is ten times as large.
    claims = jde.epsilon(step, num_steps=_EPOCH, delta=list(deltas))
    audit = audit_release(
        release,
        claimed=np.asarray(claims),
        deltas=deltas,
        num_draws=effort.draws,
        # A batch of one changes by two, while the others' sums are equal.
        score=lambda sums: np.logaddexp.reduce(2 * np.asarray(sums)),
    )
    return of_bounds(audit.bounds, audit.claimed)
