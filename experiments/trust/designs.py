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

# Draws of the sampler show most where delta is large.
DELTA = 0.1
CLASSES, ZERO, ONE, BOTH = 12, "zero_out", "replace_one", "add_remove"

Coins, Fixed, Bins = jde.Poisson, jde.WithoutReplacement, jde.RandomAllocation
Audits = dict[str, Callable[[], list[AuditRow]]]
"""Audits by name."""


class Case(NamedTuple):
    """A design, and what drawn units that do not hold the protected one contribute.

    The noise is about that of a claim of 2 nats.

    Attributes:
      name: of the design.
      step: what is claimed.
      data: in which a person has as much as is bounded; None: made up.
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
    """A design with noise at which 2 nats are claimed."""
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


def _step(design: Any, noise: float, relation: str, clip: str, **bounds: int) -> Any:
    return jde.GaussianStep(
        design,
        noise_multiplier=noise,
        clip_unit=clip,
        privacy_unit="person",
        neighboring_relation=relation,
        people=jde.PersonBounds(**bounds) if bounds else None,
    )


def _classes(
    scheme: Any, drawn: int, of: int, noise: float, relation: str, *, bound: int
) -> Any:
    """Classes by a scheme, so many examples of each without replacement."""
    below = Fixed("example", size=drawn, population=of)
    design = jde.MultistageSampling(scheme, below)
    return _step(design, noise, relation, "class", classes=bound, examples=1)


def _grouped(episodes: Any, of: int, noise: float, relation: str, *, bound: int) -> Any:
    below = Fixed("example", size=2, population=of)
    design = jde.GroupedClasses(
        num_classes=CLASSES, ways=3, episodes=episodes, examples=below
    )
    return _step(design, noise, relation, "episode", classes=bound, examples=1)


def _blocks(
    episodes: Any,
    people: int,
    size: int,
    noise: float,
    relation: str,
    *,
    number: int = 1,
    **bounds: int,
) -> Any:
    """Blocks of so many of six people, and of their examples so many of a class."""
    inside = jde.MultistageSampling(
        Fixed("class", size=3, population=CLASSES),
        Fixed("example", size=size, population=people),
    )
    design = jde.PeopleBlocks(
        num_people=6,
        people_per_block=people,
        episodes=episodes,
        sampling=inside,
        episodes_per_block=number,
    )
    return _step(design, noise, relation, "episode", **bounds)


def person_cases() -> Iterator[Case]:
    """Every design that has a theorem about people."""
    yield from _trees()
    yield from _examples()
    yield from _episodes()
    yield from _in_blocks()


def _trees() -> Iterator[Case]:
    """Clip units are classes."""
    five = in_classes(5)
    coins = Coins("class", sampling_probability=0.3)
    for relation, noise, others in (
        (ZERO, 0.66, 0),
        (ONE, 0.77, -0.3),
        (BOTH, 0.96, -1),
    ):
        of = 4 if relation == BOTH else 5
        step = _classes(coins, 2, of, noise, relation, bound=5)
        yield Case(
            f"classes by Poisson sampling, {relation}",
            step,
            five,
            others,
            relation != BOTH,
        )
    everything = Coins("class", sampling_probability=1.0)
    step = _classes(everything, 5, 10, 1.84, ONE, bound=2)
    yield Case("classes, all drawn, replace_one", step, in_classes(2, 5), -1)
    step = _classes(Fixed("class", size=8, population=12), 3, 5, 1.76, ZERO, bound=5)
    yield Case("classes without replacement", step, five, -0.3)


def _examples() -> Iterator[Case]:
    """Examples are clipped one by one: nobody reacts, or others take a place."""
    drawn = jde.MultistageSampling(
        Coins("class", sampling_probability=0.8),
        Coins("example", sampling_probability=0.3, population=10),
    )
    step = _step(drawn, 2.04, BOTH, "example", classes=5, examples=2)
    yield Case("examples clipped, of drawn classes", step, in_classes(5, each=2))
    step = _step(
        Coins("example", sampling_probability=0.2, population=50),
        *(0.81, ZERO, "example"),
        examples=4,
    )
    yield Case("examples clipped, by Poisson sampling", step, several_examples(4, 39))
    step = _step(
        Fixed("example", size=10, population=43), 1.83, ONE, "example", examples=4
    )
    yield Case(
        "examples clipped, without replacement", step, several_examples(4, 39), -1
    )
    step = _step(Bins("example", steps_per_epoch=4), 1.39, ZERO, "example", examples=3)
    name = "three examples clipped, by random allocation"
    yield Case(name, step, several_examples(3, 20), is_attained=False)


def _episodes() -> Iterator[Case]:
    """Episodes of classes."""
    five, all_six = in_classes(5), everybody()
    coins = Coins("episode", sampling_probability=0.4)
    for relation, noise, others in ((ZERO, 1.05, 0), (BOTH, 1.67, -1)):
        of = 5 if relation == BOTH else 6
        step = _grouped(coins, of, noise, relation, bound=CLASSES)
        name = f"grouped, in all 12 classes, {relation}"
        yield Case(name, step, all_six, others, relation != BOTH)
    step = _grouped(coins, 5, 0.73, ZERO, bound=5)
    yield Case("grouped, in 5 of 12 classes", step, five)
    step = _step(
        jde.IndependentEpisodes(
            jde.MultistageSampling(
                Fixed("class", size=3, population=CLASSES),
                Fixed("example", size=1, population=6),
            ),
            num_episodes=3,
        ),
        *(1.22, ZERO, "episode"),
        classes=CLASSES,
        examples=1,
    )
    yield Case("independent episodes", step, all_six, -0.3)


def _in_blocks() -> Iterator[Case]:
    """Episodes within blocks of six people."""
    coins, all_six = Coins("episode", sampling_probability=0.4), everybody()
    for relation, noise in ((ZERO, 0.47), (ONE, 0.53)):
        step = _blocks(coins, 2, 2, noise, relation)
        yield Case(f"blocks of two people, {relation}", step, all_six)
    inside = {"classes": CLASSES, "examples": 1}
    step = _blocks(coins, 6, 1, 0.31, ZERO, **inside)
    yield Case("a block whose episode may miss the person", step, all_six, -1)
    step = _blocks(coins, 6, 1, 0.58, ZERO, number=3, **inside)
    yield Case("three episodes of a block", step, all_six)
    step = _blocks(Bins("episode", steps_per_epoch=4), 2, 2, 0.55, ZERO)
    yield Case("blocks, episodes by random allocation", step, all_six)


def game_audits(draws: int) -> Audits:
    """The audits by name; of a design by epochs of one epoch."""

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
