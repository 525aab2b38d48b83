"""Correlated noise under attack: enumerated runs against the claim of `jde.banded`.

Correct runs keep the claim, with crashes anywhere; each planted fault exceeds it.
Comparisons of simulations are 4.5 standard errors wide: a false alarm in 300,000.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

import jaxdp_episodic as jde
from oracles import banded
from oracles.banded import Mechanism, World, at, by_releases, never, poisson

RELATIONS = ("add_remove", "zero_out", "replace_one")
EPSILONS = (0.3, 1.0, 2.0)
WIDTH = 4.5
POISSON = jde.Poisson("example", sampling_probability=0.5)
EPOCHS = jde.RandomAllocation("example", steps_per_epoch=2)


def nested(examples):
    return jde.MultistageSampling(
        jde.Poisson("task", sampling_probability=0.6), examples
    )


def slots(size, population):
    return jde.WithoutReplacement("example", size=size, population=population)


class Design(NamedTuple):
    """A step's draws by the number of groups, as a design and enumerated."""

    sampling: Callable[[int], jde.MultistageSampling]
    relation: str
    name: str = "poisson"
    group: int = 0  # the protected unit's
    near: float = 0.95  # the share of the price that simple contributions attain

    def __str__(self):
        return f"{self.name}, {self.relation}"

    def step(self, noise, bands=2):
        step = jde.GaussianStep(
            self.sampling(bands),
            noise_multiplier=noise,
            neighboring_relation=self.relation,
            clip_unit="task" if self.name.startswith("nested") else None,
        )
        return jde.banded(step, jde.Bands(bands, level="example"))

    def worlds(self, groups, own, others):
        """With and without the protected unit, given its value and the others'."""
        held = {"zero_out": 0.0, "add_remove": 0.0, "replace_one": -1.0}[self.relation]
        within = [group == self.group for group in groups]
        if self.name == "allocation":
            units = {"u": self.group, "v": self.group, "w": 1 - self.group}
            runs = banded.allocated(groups, units, 2)
        else:
            runs = banded.independent([self._law(is_own) for is_own in within])
        names = {draw for path in runs for draws in path for draw in draws}
        values = dict.fromkeys(names, others)
        gone = values | {"u": lambda t, y: held * own(t, y)}
        if self.name.startswith("nested") and self.relation == "add_remove":
            gone["u"] = others
        return World(runs, values | {"u": own}), World(runs, gone)

    def _law(self, is_own):
        if self.name.startswith("nested"):  # the task contributes in every step
            share = 0.5 if is_own else 0.0
            return {("u",): 0.6 * share, ("v",): 0.6 * (1 - share), (): 0.4}
        if self.name == "slots":  # places 1 and 3 of five, or 0, 2 and 4
            names = "uv" if is_own else "vwx"
            return {(name,): 1 / len(names) for name in names}
        return poisson(("u", "v") if is_own else ("w",), 0.5)


DESIGNS = [
    *(Design(lambda b: POISSON, relation) for relation in RELATIONS),
    *(Design(lambda b: nested(POISSON), r, "nested", near=0.8) for r in RELATIONS),
    *(
        Design(lambda b: nested(slots(1, 2 * b)), r, "nested slots", near=0.8)
        for r in RELATIONS[1:]
    ),
    # The smallest group's last column is cut off.
    *(Design(lambda b: slots(1, 2 * b + 1), r, "slots", 1, 0.7) for r in RELATIONS[1:]),
    Design(lambda b: EPOCHS, "add_remove", "allocation"),
]


def by_name(designs):
    return pytest.mark.parametrize("design", designs, ids=str)


def constant(value):
    return lambda t, y: value


def unit(*coefficients):
    return np.array(coefficients) / math.hypot(*coefficients)


def claimed(step, num_steps):
    return jde.delta(step, num_steps=num_steps, epsilon=list(EPSILONS))


def excess(found, claims):
    """The largest excess of deltas over claims, in standard errors."""
    return ((found.values - claims) / np.maximum(found.errors, 1e-9)).max()


def worst(design, mechanism, groups, number):
    """Deltas if the unit contributes 1 and the others the most revealing of three."""
    rng = np.random.default_rng(len(groups))
    found = [
        banded.simulated(
            mechanism,
            design.worlds(groups, constant(1.0), constant(other)),
            EPSILONS,
            number,
            rng,
        )
        for other in (0.0, -1.0, 1.0)
    ]
    return max(found, key=lambda deltas: deltas.values[:, 0].max())


@pytest.mark.parametrize(
    "number", [800, pytest.param(8_000, marks=pytest.mark.slow)], ids=["few", "many"]
)
@by_name(DESIGNS)
def test_the_worst_run_costs_the_price_of_its_group(design, number):
    groups = [0, 1, 0, 1]
    found = worst(design, Mechanism(unit(4, 3), 1.5), groups, number)
    claims = claimed(design.step(1.5), 4)
    assert excess(found, claims) < WIDTH
    largest, error = found.values.max(0), found.errors.max(0)
    assert largest[0] + WIDTH * error[0] > design.near * claims[0]


def last_release(t, y):
    return np.sign(y[:, t - 1]) if t else 1.0


def all_releases(t, y):
    return np.tanh(y[:, :t].sum(1)) if t else -1.0


REACTIONS = {
    "constant": (constant(1.0), constant(-1.0)),
    "agrees": (last_release, last_release),
    "opposes": (all_releases, lambda t, y: -last_release(t, y)),
}
CRASHES = {
    "no crash": never,
    **{f"restart at {t}": at(restarts=(t,)) for t in (1, 3)},
    **{f"row {t} lost": at(lost=(t,)) for t in (0, 2)},
    "two restarts": at(restarts=(1, 3)),
    "restart in every step": at(restarts=range(6)),
    "lost, then restart": at(lost=(1,), restarts=(3,)),
    "by releases": by_releases(0.5),
}


def shuffled_rows():
    """Each design with each crash, in a mixed order."""
    rows = list(itertools.product(DESIGNS, CRASHES))
    order = np.random.default_rng(1).permutation(len(rows)).tolist()
    return [pytest.param(*rows[i], i, id=f"{rows[i][0]}, {rows[i][1]}") for i in order]


@pytest.mark.parametrize(("design", "crash", "seed"), shuffled_rows())
@pytest.mark.few(5)
def test_no_crash_and_no_reaction_costs_more(design, crash, seed):
    rng = np.random.default_rng(seed)
    bands = int(rng.choice([2, 3]))
    steps = int(rng.integers(bands + 1, 6))
    groups = [t % bands for t in range(steps)]
    noise = float(rng.uniform(0.7, 2.0))
    mechanism = Mechanism(unit(*rng.normal(size=bands)), noise, CRASHES[crash])
    worlds = design.worlds(groups, *REACTIONS[str(rng.choice(list(REACTIONS)))])
    found = banded.simulated(mechanism, worlds, EPSILONS, 2_000, rng)
    claims = claimed(design.step(noise, bands), steps)
    assert excess(found, claims) < WIDTH


# --- Whole numbers, enumerated ---


def hardened(whole, longest, noise, crash=never):
    """Integer coefficients, integer contributions up to ``longest``."""
    variance = noise**2 * longest**2 * sum(k * k for k in whole)
    return Mechanism(np.array(whole), math.sqrt(math.ceil(variance) + 16), crash)


@pytest.mark.parametrize(
    ("whole", "steps", "longest", "near"), [((4, 3), 2, 4, 0.9), ((2, 1), 3, 2, 0.0)]
)
@pytest.mark.parametrize("crash", ["no crash", "row 0 lost", "by releases"])
@pytest.mark.parametrize("other", [0, -1])
def test_integers_cost_at_most_the_price(other, crash, whole, steps, longest, near):
    groups = [t % len(whole) for t in range(steps)]
    laws = [poisson(("u",), 0.5) if group == 0 else {(): 1.0} for group in groups]
    worlds = tuple(
        World(banded.independent(laws), {"u": constant(float(longest * value))})
        for value in (1, other)
    )
    mechanism = hardened(whole, longest, 1.0, CRASHES[crash])
    found = banded.enumerated(mechanism, worlds, EPSILONS, longest * sum(whole))
    assert (np.abs(found.errors) < 1e-6).all()
    design = Design(lambda b: POISSON, "replace_one" if other else "zero_out")
    claims = claimed(design.step(1.0, len(whole)), steps)
    assert (found.values + found.errors <= claims).all()
    if crash == "no crash":
        assert (found.values.max(0) >= near * claims)[:2].all()


# --- Planted faults: each is charged as a correct run ---


def alone(groups):
    """The unit, in each step of group 0, and no other unit."""
    laws = [{("u",): 1.0} if group == 0 else {(): 1.0} for group in groups]
    runs = banded.independent(laws)
    return World(runs, {"u": constant(1.0)}), World(runs, {"u": constant(0.0)})


EQUAL, FALLING = unit(1, 1), unit(4, 3)
CYCLE = [0, 1, 0, 1]


# Runs, and the group of each step; charged as two bands on two groups in turn.
FAULTS = {
    "a column of norm 1.1": (Mechanism(1.1 * FALLING, 2.0), CYCLE),
    "the band kept while the cycle begins anew": (Mechanism(EQUAL, 2.0), [0, 0, 1, 0]),
    "the cycle begun anew": (Mechanism(FALLING, 2.0, at(restarts=range(6))), [0] * 6),
    "three bands on two groups": (Mechanism(unit(1, 1, 1), 2.0), [*CYCLE, 0]),
    "the price of the total for two copies": (
        Mechanism(FALLING, 2.0, at(restarts=(3,))),
        [0, 1, 0] * 2,
    ),
    "unlike noises in a band": (Mechanism(EQUAL, np.array([2.0, 1.0])), [0, 1]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_costs_more_than_it_is_charged(name):
    mechanism, groups = FAULTS[name]
    rng = np.random.default_rng(7)
    found = banded.simulated(mechanism, alone(groups), EPSILONS, 20_000, rng)
    everybody = jde.Poisson("example", sampling_probability=1.0)
    step = jde.GaussianStep(everybody, noise_multiplier=2.0)
    step = jde.banded(step, jde.Bands(2, level="example"))
    assert excess(found, claimed(step, len(groups))) > WIDTH
