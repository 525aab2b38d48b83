"""The designs in which `audit.py` audits a person with all of her examples."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from page import PERSON, UNATTAINED
from simulated import Audits

import jaxdp_episodic as jde
from jaxdp_episodic.audit import AuditRow, audit_person, release_rows
from jaxdp_episodic.data import ExampleTable, Owners

# Draws of the sampler show most where delta is large.
DELTA = 0.1
CLASSES, ZERO, ONE, BOTH = 12, "zero_out", "replace_one", "add_remove"

Coins, Fixed, Bins = jde.Poisson, jde.WithoutReplacement, jde.RandomAllocation


class PersonCase(NamedTuple):
    """A design with data, and what drawn units that do not hold the person contribute.

    The noise is about that of a claim of 2 nats.

    Attributes:
      name: of the design.
      step: what is claimed.
      data: in which everybody has as much as is bounded.
      others: see `audit_person`; the best of -1, -0.3 and 0.
      is_attained: whether contributions are known that come near the claim.
    """

    name: str
    step: Any
    data: ExampleTable
    others: float = 0.0
    is_attained: bool = True


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


def person_cases() -> Iterator[PersonCase]:
    """Every design that has a theorem about people."""
    yield from _trees()
    yield from _examples()
    yield from _episodes()
    yield from _in_blocks()


def _trees() -> Iterator[PersonCase]:
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
        yield PersonCase(
            f"classes by coins, {relation}", step, five, others, relation != BOTH
        )
    everything = Coins("class", sampling_probability=1.0)
    step = _classes(everything, 5, 10, 1.84, ONE, bound=2)
    yield PersonCase("classes, all drawn, replace_one", step, in_classes(2, 5), -1)
    step = _classes(Fixed("class", size=8, population=12), 3, 5, 1.76, ZERO, bound=5)
    yield PersonCase("classes without replacement", step, five, -0.3)


def _examples() -> Iterator[PersonCase]:
    """Examples are clipped one by one: nobody reacts, or others take a place."""
    drawn = jde.MultistageSampling(
        Coins("class", sampling_probability=0.8),
        Coins("example", sampling_probability=0.3, population=10),
    )
    step = _step(drawn, 2.04, BOTH, "example", classes=5, examples=2)
    yield PersonCase("examples clipped, of drawn classes", step, in_classes(5, each=2))
    step = _step(
        Coins("example", sampling_probability=0.2, population=50),
        *(0.81, ZERO, "example"),
        examples=4,
    )
    yield PersonCase("examples clipped, by coins", step, several_examples(4, 39))
    step = _step(
        Fixed("example", size=10, population=43), 1.83, ONE, "example", examples=4
    )
    yield PersonCase(
        "examples clipped, without replacement", step, several_examples(4, 39), -1
    )
    step = _step(Bins("example", steps_per_epoch=4), 1.39, ZERO, "example", examples=3)
    name = "three examples clipped, in bins"
    yield PersonCase(name, step, several_examples(3, 20), is_attained=False)


def _episodes() -> Iterator[PersonCase]:
    """Episodes of classes."""
    five, all_six = in_classes(5), everybody()
    coins = Coins("episode", sampling_probability=0.4)
    for relation, noise, others in ((ZERO, 1.05, 0), (BOTH, 1.67, -1)):
        of = 5 if relation == BOTH else 6
        step = _grouped(coins, of, noise, relation, bound=CLASSES)
        name = f"grouped, in all 12 classes, {relation}"
        yield PersonCase(name, step, all_six, others, relation != BOTH)
    step = _grouped(coins, 5, 0.73, ZERO, bound=5)
    yield PersonCase("grouped, in 5 of 12 classes", step, five)
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
    yield PersonCase("independent episodes", step, all_six, -0.3)


def _in_blocks() -> Iterator[PersonCase]:
    """Episodes within blocks of six people."""
    coins, all_six = Coins("episode", sampling_probability=0.4), everybody()
    for relation, noise in ((ZERO, 0.47), (ONE, 0.53)):
        step = _blocks(coins, 2, 2, noise, relation)
        yield PersonCase(f"blocks of two people, {relation}", step, all_six)
    inside = {"classes": CLASSES, "examples": 1}
    step = _blocks(coins, 6, 1, 0.31, ZERO, **inside)
    yield PersonCase("a block whose episode may miss her", step, all_six, -1)
    step = _blocks(coins, 6, 1, 0.58, ZERO, number=3, **inside)
    yield PersonCase("three episodes of a block", step, all_six)
    step = _blocks(Bins("episode", steps_per_epoch=4), 2, 2, 0.55, ZERO)
    yield PersonCase("blocks, episodes in bins", step, all_six)


def person_audits(draws: int) -> Audits:
    """The audits by name; of a design by epochs of one epoch."""

    def audit(name: str, case: PersonCase, steps: int) -> list[AuditRow]:
        found = audit_person(
            case.step,
            case.data,
            others=case.others,
            num_steps=steps,
            deltas=(DELTA,),
            num_draws=draws,
        )
        attacker = f"{PERSON}, others {case.others:g}"
        if not case.is_attained:
            attacker += f", {UNATTAINED}"
        return release_rows(name, found, attacker)

    audits: Audits = {}
    for case in person_cases():
        steps = 1
        scheme = case.step.design.schemes[0]
        if isinstance(scheme, Bins):
            steps = int(np.asarray(scheme.steps_per_epoch))
        name = f"{case.name} ({case.step.noise_multiplier:g}), T={steps}"
        audits[name] = partial(audit, name, case, steps)
    return audits
