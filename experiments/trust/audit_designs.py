"""The designs in which `audit.py` plays the audit game, people included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from page import PERSON, UNATTAINED

import jaxdp_episodic as jde
from jaxdp_episodic.audit import AuditRow, audit_mechanism, release_rows
from jaxdp_episodic.data import ExampleTable
from jaxdp_episodic.trainer.data.owners import Owners

# Audits by draws show most at a large delta.
DELTA = 0.1
CLASSES, ZERO, ONE, BOTH = 12, "zero_out", "replace_one", "add_remove"

Coins, Fixed, Bins = jde.Poisson, jde.WithoutReplacement, jde.RandomAllocation
Audits = dict[str, Callable[[], list[AuditRow]]]
"""Audits by name."""


class Case(NamedTuple):
    """A design, and the contributions of drawn units without the protected one.

    The noise is about that of a claim of 2 nats.

    Attributes:
      name: of the design.
      step: what is claimed.
      data: a person owns as much as the bounds allow; None: made up.
      others: see `audit_mechanism`; of people the best of -1, -0.3 and 0.
      is_attained: whether contributions are known that come near the claim.
      num_steps: of a run.
    """

    name: str
    step: Any
    data: ExampleTable | None = None
    others: float | None = None
    is_attained: bool = True
    num_steps: int = 1


def cases() -> Iterator[Case]:
    """Every kind of design, then every design that has a theorem about people."""
    examples = Fixed("example", size=10, population=20)
    coins = jde.MultistageSampling(Coins("task", sampling_probability=0.4), examples)
    fixed = jde.MultistageSampling(Fixed("task", size=4, population=10), examples)
    single = Fixed("example", size=10, population=20)
    drawn = jde.MultistageSampling(Fixed("task", size=1, population=2), examples)
    alone = Coins("example", sampling_probability=0.4)
    bins = Bins("example", steps_per_epoch=4)
    below = Fixed("example", size=4, population=8)
    grouped = partial(jde.GroupedClasses, num_classes=CLASSES, ways=3, examples=below)
    half = grouped(episodes=Coins("episode", sampling_probability=0.5))
    six = grouped(classes=Fixed("class", size=6))
    dealt = grouped(episodes=Bins("episode", steps_per_epoch=4))
    several = jde.IndependentEpisodes(
        jde.MultistageSampling(Fixed("class", size=3, population=6), below),
        num_episodes=3,
    )
    shuffled = jde.ShuffledEpochs("example", steps_per_epoch=4)
    task: Any = {"clip_unit": "task", "privacy_unit": "example"}
    whole: Any = {"clip_unit": "task", "privacy_unit": "task"}
    one: Any = {"clip_unit": "example", "privacy_unit": "example"}
    for relation in (BOTH, ZERO, ONE):
        yield _case("tasks by Poisson sampling", coins, relation, **task)
        yield _case("tasks without replacement", fixed, relation, **task)
    yield _case("tasks without replacement, a task", fixed, ONE, **whole)
    yield _case("examples by Poisson sampling", alone, BOTH)
    yield _case("examples by Poisson sampling", alone, ONE)
    yield _case("examples without replacement", single, BOTH)
    yield _case("examples clipped, of drawn tasks", drawn, BOTH, **one)
    yield _case("grouped, episodes by Poisson sampling", half, BOTH)
    yield _case("grouped, classes without replacement", six, BOTH)
    yield _case("grouped, episodes by random allocation", dealt, BOTH, num_steps=4)
    yield _case("independent episodes", several, BOTH, is_attained=False)
    yield _case("examples by random allocation", bins, BOTH, num_steps=4)
    yield _case("examples by random allocation", bins, ONE, num_steps=4)
    yield _case("shuffled epochs", shuffled, BOTH, num_steps=4, is_attained=False)
    yield from person_cases()


def _case(
    name: str,
    design: Any,
    relation: str,
    *,
    num_steps: int = 1,
    is_attained: bool = True,
    **units: Any,
) -> Case:
    """A design with noise for a claim of 2 nats."""
    step = jde.GaussianStep(
        design, noise_multiplier=1.0, neighboring_relation=relation, **units
    )
    noise = jde.calibrate_noise_multiplier(
        step, epsilon=2.0, delta=DELTA, num_steps=num_steps
    )
    step = dataclasses.replace(step, noise_multiplier=round(float(noise), 3))
    name = f"{name}, {relation}"
    return Case(name, step, is_attained=is_attained, num_steps=num_steps)


def in_classes(bound: int, copies: int = 1, each: int = 1) -> ExampleTable:
    """People in neighbouring classes of a circle, equally many of every class."""
    people = np.arange(CLASSES * copies)
    classes = (people[:, None] + np.arange(bound)) % CLASSES
    order = np.argsort(classes.ravel(), kind="stable")
    codes = np.repeat(np.repeat(people, bound)[order], each)
    sizes = [bound * copies * each] * CLASSES
    return _table(codes, sizes, "class", "example")


def everybody() -> ExampleTable:
    """Six people, each with an example of every class."""
    codes = np.tile(np.arange(6), CLASSES)
    return _table(codes, [6] * CLASSES, "class", "example")


def several_examples(of_one: int, others: int) -> ExampleTable:
    """One person with several examples, and others with one each."""
    codes = np.concatenate([np.zeros(of_one, int), np.arange(1, others + 1)])
    return _table(codes, len(codes), "example")


def _table(codes: np.ndarray, sizes: Any, *names: str) -> ExampleTable:
    tree = jde.Population.from_sizes(sizes, level_names=names)
    owners = Owners(codes, np.arange(codes.max() + 1))
    return ExampleTable(np.zeros((len(codes), 1), np.float32), None, tree, owners)


def person_cases() -> Iterator[Case]:
    """Every design that has a theorem about people."""
    five, six = in_classes(5), everybody()
    of_five: Any = {"classes": 5, "examples": 1}
    of_all: Any = {"classes": CLASSES, "examples": 1}
    coins = Coins("class", sampling_probability=0.3)
    episodes = Coins("episode", sampling_probability=0.4)

    def case(
        name: str,
        design: Any,
        noise: float,
        relation: str,
        clip: str,
        *how: Any,
        **of: int,
    ) -> Case:
        step = jde.GaussianStep(
            design,
            noise_multiplier=noise,
            clip_unit=clip,
            privacy_unit="person",
            neighboring_relation=relation,
            people=jde.PersonBounds(**of) if of else None,
        )
        return Case(name, step, *how)

    def classes(scheme: Any, drawn: int, of: int) -> Any:
        below = Fixed("example", size=drawn, population=of)
        return jde.MultistageSampling(scheme, below)

    def grouped(of: int) -> Any:
        below: Any = Fixed("example", size=2, population=of)
        pool: Any = {"num_classes": CLASSES, "ways": 3, "examples": below}
        return jde.GroupedClasses(episodes=episodes, **pool)

    def blocks(scheme: Any, people: int, size: int, number: int = 1) -> Any:
        return jde.PeopleBlocks(
            num_people=6,
            people_per_block=people,
            episodes=scheme,
            sampling=classes(Fixed("class", size=3, population=CLASSES), size, people),
            episodes_per_block=number,
        )

    # Clip units are classes.
    for relation, noise, of, *how in (
        (ZERO, 0.66, 5, five, 0, True),
        (ONE, 0.77, 5, five, -0.3, True),
        (BOTH, 0.96, 4, five, -1, False),
    ):
        name = f"classes by Poisson sampling, {relation}"
        drawn = classes(coins, 2, of)
        yield case(name, drawn, noise, relation, "class", *how, **of_five)
    design = classes(Coins("class", sampling_probability=1.0), 5, 10)
    how = 1.84, ONE, "class", in_classes(2, 5), -1
    yield case("classes, all drawn, replace_one", design, *how, classes=2, examples=1)
    design = classes(Fixed("class", size=8, population=12), 3, 5)
    how = 1.76, ZERO, "class", five, -0.3
    yield case("classes without replacement", design, *how, **of_five)
    # Examples are clipped one by one: others do not react, or take the place.
    design = jde.MultistageSampling(
        Coins("class", sampling_probability=0.8),
        Coins("example", sampling_probability=0.3, population=10),
    )
    how = 2.04, BOTH, "example", in_classes(5, each=2)
    name = "examples clipped, of drawn classes"
    yield case(name, design, *how, classes=5, examples=2)
    four = several_examples(4, 39)
    design = Coins("example", sampling_probability=0.2, population=50)
    name = "examples clipped, by Poisson sampling"
    yield case(name, design, 0.81, ZERO, "example", four, examples=4)
    design = Fixed("example", size=10, population=43)
    name = "examples clipped, without replacement"
    yield case(name, design, 1.83, ONE, "example", four, -1, examples=4)
    design = Bins("example", steps_per_epoch=4)
    how = 1.39, ZERO, "example", several_examples(3, 20), None, False
    name = "three examples clipped, by random allocation"
    yield case(name, design, *how, examples=3)
    # Episodes of classes.
    for relation, noise, of, *how in (
        (ZERO, 1.05, 6, six, 0, True),
        (BOTH, 1.67, 5, six, -1, False),
    ):
        name = f"grouped, in all 12 classes, {relation}"
        yield case(name, grouped(of), noise, relation, "episode", *how, **of_all)
    name = "grouped, in 5 of 12 classes"
    yield case(name, grouped(5), 0.73, ZERO, "episode", five, **of_five)
    one = classes(Fixed("class", size=3, population=CLASSES), 1, 6)
    design = jde.IndependentEpisodes(one, num_episodes=3)
    how = 1.22, ZERO, "episode", six, -0.3
    yield case("independent episodes", design, *how, **of_all)
    # Episodes within blocks of six people.
    for relation, noise in ((ZERO, 0.47), (ONE, 0.53)):
        name = f"blocks of two people, {relation}"
        yield case(name, blocks(episodes, 2, 2), noise, relation, "episode", six)
    how = 0.31, ZERO, "episode", six, -1
    name = "a block whose episode may miss the person"
    yield case(name, blocks(episodes, 6, 1), *how, **of_all)
    how = 0.58, ZERO, "episode", six
    yield case("three episodes of a block", blocks(episodes, 6, 1, 3), *how, **of_all)
    design = blocks(Bins("episode", steps_per_epoch=4), 2, 2)
    name = "blocks, episodes by random allocation"
    yield case(name, design, 0.55, ZERO, "episode", six)


def game_audits(draws: int) -> Audits:
    """The audits by name; a design with epochs runs for one epoch."""

    def audit(name: str, case: Case, steps: int) -> list[AuditRow]:
        found = audit_mechanism(
            case.step,
            data=case.data,
            others=case.others,
            num_steps=steps,
            deltas=(DELTA,),
            num_draws=draws,
        )
        is_person = case.step.privacy_unit == "person"
        attacker = PERSON if is_person else str(case.step.privacy_unit)
        if not case.is_attained:
            attacker += f", {UNATTAINED}"
        return release_rows(name, found, attacker)

    audits: Audits = {}
    for case in cases():
        steps, scheme = case.num_steps, case.step.design.schemes[0]
        if isinstance(scheme, Bins):
            steps = int(np.asarray(scheme.steps_per_epoch))
        name = f"{case.name} ({case.step.noise_multiplier:g}), T={steps}"
        audits[name] = partial(audit, name, case, steps)
    return audits
