"""Checks that audit one person with all of the person's examples."""

from __future__ import annotations

from typing import Any

import numpy as np

import jaxdp_episodic as jde
from jaxdp_episodic.audit import audit_mechanism
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.run.checks import sampler_of
from mutation.verdicts import Effort, Verdict, of_bounds

_DELTAS = (0.1,)
_CLASSES, _OF_ONE, _OTHERS = 3, 20, 4
_PEOPLE, _A_BLOCK = 6, 2


def owned(codes: np.ndarray, sizes: object, *names: str) -> ExampleTable:
    """A table without features, of people who are numbered."""
    tree = jde.Population.from_sizes(sizes, level_names=names)
    owners = Owners(codes, np.arange(int(codes.max()) + 1))
    return ExampleTable(np.zeros((len(codes), 1), np.float32), None, tree, owners)


def person_in_episodes(effort: Effort) -> Verdict:
    """Three classes in every step with three of ten examples each, one the person's.

    What is drawn in the person's place contributes the opposite.
    """
    sampling = jde.MultistageSampling(
        jde.Poisson("class", sampling_probability=1.0),
        jde.WithoutReplacement("example", size=3, population=10),
    )
    step = jde.GaussianStep(
        sampling,
        noise_multiplier=1.0,
        clip_unit="class",
        privacy_unit="person",
        neighboring_relation="replace_one",
        people=jde.PersonBounds(classes=_CLASSES, examples=1),
    )
    people = np.tile(np.arange(10), _CLASSES)
    data = owned(people, [10] * _CLASSES, "class", "example")
    return _audit(step, data, 5 * effort.draws, others=-1.0)


def _audit(step: jde.GaussianStep, data: Any, draws: int, **how: Any) -> Verdict:
    """The audit game of one step of a design."""
    audit = audit_mechanism(
        step, num_steps=1, data=data, deltas=_DELTAS, num_draws=draws, **how
    )
    return of_bounds(audit.bounds, audit.claimed)


def examples_of_person(effort: Effort) -> Verdict:
    """Twenty examples of a person, each clipped and Poisson sampled."""
    step = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=0.3),
        noise_multiplier=5.0,
        clip_unit="example",
        privacy_unit="person",
        people=jde.PersonBounds(examples=_OF_ONE),
    )
    people = np.concatenate([np.arange(_OTHERS), np.full(_OF_ONE, _OTHERS)])
    data = owned(people, len(people), "example")
    return _audit(step, data, effort.draws, unit=_OTHERS, others=0.0)


def together(units: np.ndarray) -> np.ndarray:
    """A fault: the person's examples, the last ones, are drawn all or none."""
    hers = np.arange(_OTHERS, _OTHERS + _OF_ONE)
    return np.concatenate(
        [units[units < _OTHERS], hers[: _OF_ONE * (hers[0] in units)]]
    )


def people_in_blocks(effort: Effort) -> Verdict:
    """Two of six listed people share a block with chance 1/5, whoever has data.

    The first one on the list has none.
    """
    inside = jde.MultistageSampling(
        jde.WithoutReplacement("class", size=1, population=1),
        jde.WithoutReplacement("example", size=2, population=_A_BLOCK),
    )
    design = jde.PeopleBlocks(
        num_people=_PEOPLE,
        people_per_block=_A_BLOCK,
        episodes=jde.Poisson("episode", sampling_probability=1.0),
        sampling=inside,
    )
    step = jde.GaussianStep(
        design,
        noise_multiplier=2.0,
        privacy_unit="person",
        neighboring_relation="add_remove",
    )
    there = np.arange(_PEOPLE - 1)
    sampler = sampler_of(step, owned(there, [len(there)], "class", "example"))
    generator = np.random.default_rng(0)

    def is_shared() -> bool:
        draw = sampler.draw(generator)
        people = np.where(draw.mask, draw.examples, -1).reshape(-1, _A_BLOCK)
        return [0, 1] in np.sort(people, axis=1).tolist()

    found = np.mean([is_shared() for _ in range(effort.draws)])
    chance = (_A_BLOCK - 1) / (_PEOPLE - 1)
    # A false alarm in 1e6.
    slack = 5 * np.sqrt(chance * (1 - chance) / effort.draws)
    words = f"a block shared with chance {found:.3f}, {chance:.3f} is right"
    return Verdict(bool(abs(found - chance) > slack), words)
