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
    """A design with noise for a claim of 2 nats, and contributions to other units."""

    name: str
    step: Any
    data: (
        ExampleTable | None
    )  # a person owns as much as the bounds allow; None: made up
    others: float | None  # see `audit_mechanism`; of people the best of -1, -0.3 and 0
    is_attained: bool  # are contributions known that come near the claim?
    num_steps: int  # of a run: one epoch, or one step


def _case(
    name: str,
    design: Any,
    relation: str,
    *,
    data: ExampleTable | None = None,
    others: float | None = None,
    is_attained: bool = True,
    **units: Any,
) -> Case:
    """A design with noise for a claim of 2 nats."""
    step = jde.GaussianStep(
        design, noise_multiplier=1.0, neighboring_relation=relation, **units
    )
    scheme = step.design.schemes[0]
    is_epoch = isinstance(scheme, Bins | jde.ShuffledEpochs)
    steps = int(np.asarray(scheme.steps_per_epoch)) if is_epoch else 1
    target: Any = {"epsilon": 2.0, "delta": DELTA, "num_steps": steps}
    noise = float(jde.calibrate_noise_multiplier(step, **target))
    step = dataclasses.replace(step, noise_multiplier=round(noise, 3))
    name = f"{name}, {relation}"
    return Case(name, step, data, others, is_attained, steps)


def cases() -> Iterator[Case]:
    """Every kind of design, then every design that has a theorem about people."""
    examples = Fixed("example", size=10, population=20)
    coins = jde.MultistageSampling(Coins("task", sampling_probability=0.4), examples)
    fixed = jde.MultistageSampling(Fixed("task", size=4, population=10), examples)
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
    one: Any = {"clip_unit": "example", "privacy_unit": "example"}
    for relation in (BOTH, ZERO, ONE):
        yield _case("tasks by Poisson sampling", coins, relation, **task)
        yield _case("tasks without replacement", fixed, relation, **task)
    whole = task | {"privacy_unit": "task"}
    yield _case("tasks without replacement, a task", fixed, ONE, **whole)
    yield _case("examples by Poisson sampling", alone, BOTH)
    yield _case("examples by Poisson sampling", alone, ONE)
    yield _case("examples without replacement", examples, BOTH)
    yield _case("examples clipped, of drawn tasks", drawn, BOTH, **one)
    yield _case("grouped, episodes by Poisson sampling", half, BOTH)
    yield _case("grouped, classes without replacement", six, BOTH)
    yield _case("grouped, episodes by random allocation", dealt, BOTH)
    yield _case("independent episodes", several, BOTH, is_attained=False)
    yield _case("examples by random allocation", bins, BOTH)
    yield _case("examples by random allocation", bins, ONE)
    yield _case("shuffled epochs", shuffled, BOTH, is_attained=False)
    yield from person_cases()


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
    five = {"data": in_classes(5), "people": jde.PersonBounds(classes=5, examples=1)}
    six = {"data": everybody()}
    all_of = jde.PersonBounds(classes=CLASSES, examples=1)
    coins = Coins("class", sampling_probability=0.3)
    episodes = Coins("episode", sampling_probability=0.4)

    def case(name: str, design: Any, relation: str, clip: str, **how: Any) -> Case:
        return _case(
            name, design, relation, clip_unit=clip, privacy_unit="person", **how
        )

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
    for relation, of, others in ((ZERO, 5, 0), (ONE, 5, -0.3), (BOTH, 4, -1)):
        own = five | {"others": others, "is_attained": relation != BOTH}
        design = classes(coins, 2, of)
        yield case("classes by Poisson sampling", design, relation, "class", **own)
    design = classes(Coins("class", sampling_probability=1.0), 5, 10)
    bounds = jde.PersonBounds(classes=2, examples=1)
    own = {"data": in_classes(2, 5), "others": -1, "people": bounds}
    yield case("classes, all drawn", design, ONE, "class", **own)
    design = classes(Fixed("class", size=8, population=12), 3, 5)
    name = "classes without replacement"
    yield case(name, design, ZERO, "class", others=-0.3, **five)
    # Examples are clipped one by one: others do not react, or take the place.
    design = jde.MultistageSampling(
        Coins("class", sampling_probability=0.8),
        Coins("example", sampling_probability=0.3, population=10),
    )
    bounds = jde.PersonBounds(classes=5, examples=2)
    own = {"data": in_classes(5, each=2), "people": bounds}
    yield case("examples clipped, of drawn classes", design, BOTH, "example", **own)
    four = {"data": several_examples(4, 39), "people": jde.PersonBounds(examples=4)}
    design = Coins("example", sampling_probability=0.2, population=50)
    yield case("examples clipped, by Poisson sampling", design, ZERO, "example", **four)
    design = Fixed("example", size=10, population=43)
    name = "examples clipped, without replacement"
    yield case(name, design, ONE, "example", others=-1, **four)
    design = Bins("example", steps_per_epoch=4)
    own = {"data": several_examples(3, 20), "people": jde.PersonBounds(examples=3)}
    name = "three examples clipped, by random allocation"
    yield case(name, design, ZERO, "example", is_attained=False, **own)
    # Episodes of classes.
    for relation, of, others in ((ZERO, 6, 0), (BOTH, 5, -1)):
        own = six | {"others": others, "is_attained": relation == ZERO}
        name = "grouped, in all 12 classes"
        yield case(name, grouped(of), relation, "episode", people=all_of, **own)
    yield case("grouped, in 5 of 12 classes", grouped(5), ZERO, "episode", **five)
    one = classes(Fixed("class", size=3, population=CLASSES), 1, 6)
    design = jde.IndependentEpisodes(one, num_episodes=3)
    own = six | {"people": all_of, "others": -0.3}
    yield case("independent episodes of a person", design, ZERO, "episode", **own)
    # Episodes within blocks of six people.
    for relation in (ZERO, ONE):
        design = blocks(episodes, 2, 2)
        yield case("blocks of two people", design, relation, "episode", **six)
    design, own = blocks(episodes, 6, 1), six | {"people": all_of}
    name = "a block whose episode may miss the person"
    yield case(name, design, ZERO, "episode", others=-1, **own)
    design = blocks(episodes, 6, 1, 3)
    yield case("three episodes of a block", design, ZERO, "episode", **own)
    design = blocks(Bins("episode", steps_per_epoch=4), 2, 2)
    yield case("blocks, episodes by random allocation", design, ZERO, "episode", **six)


def game_audits(draws: int) -> Audits:
    """The audits by name."""

    def audit(name: str, case: Case) -> list[AuditRow]:
        found = audit_mechanism(
            case.step,
            data=case.data,
            others=case.others,
            num_steps=case.num_steps,
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
        noise = case.step.noise_multiplier
        name = f"{case.name} ({noise:g}), T={case.num_steps}"
        audits[name] = partial(audit, name, case)
    return audits
