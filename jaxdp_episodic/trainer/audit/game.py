"""The audit game of a described step: two neighbouring data sets, drawn and compared.

Nothing here knows a theorem, so wrong theorems, rates and samplers are found out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import CLASS, EPISODE, GroupedClasses
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.schemes import (
    ORIGINAL,
    OWNED,
    MultistageSampling,
    Poisson,
    ShuffledEpochs,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import (
    STEP,
    AnyStep,
    ComposedSteps,
    GaussianStep,
    gaussian_parts,
)
from jaxdp_episodic.trainer.audit.bounds import CHOOSING_SHARE, score_bounds
from jaxdp_episodic.trainer.audit.release import (
    DELTAS,
    ReleaseAudit,
    checked_claim,
    claimed_epsilons,
)
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.sampler import Draw, EpisodeSampler
from jaxdp_episodic.trainer.run.checks import check_owners, sampler_of

Contribute = Callable[[Draw], np.ndarray]
"""From a draw to the (J,) contributions of its clip units, in clip norms."""

# Different sums of which the likelihood ratio is made; more add little to it.
_MOST_SUMS = 512
# What clip units without the protected unit may contribute; the better one is taken.
_OTHERS = (-1.0, 0.0)
# Examples of a made-up table: a draw looks at all of its groups.
_MOST_EXAMPLES = 1_000_000
# Releases whose likelihood ratios are computed at once: 40 MB.
_ROWS_AT_ONCE = 10_000
# Children of a unit where the design states no number of them.
_FEW = 2


class World(NamedTuple):
    """One of two neighbouring data sets, as what is drawn and what is contributed.

    Attributes:
      sampler: draws from its data.
      contribute: what each drawn clip unit adds to the sum.
    """

    sampler: EpisodeSampler
    contribute: Contribute

    def runs(
        self, number: int, num_steps: int, generator: np.random.Generator
    ) -> np.ndarray:
        """Returns the (number, num_steps) sums of fresh runs, in clip norms."""
        return np.array([self._run(num_steps, generator) for _ in range(number)])

    def _run(self, num_steps: int, generator: np.random.Generator) -> list[float]:
        length = self.sampler.steps_per_epoch
        members: list[Any] = [None] * num_steps
        if length is not None:
            epochs = range(-(-num_steps // length))
            begun = [self.sampler.begin_epoch(generator) for _ in epochs]
            members = [one for epoch in begun for one in epoch][:num_steps]
        return [self._sum(self.sampler.draw(generator, who)) for who in members]

    def _sum(self, draw: Draw) -> float:
        found = np.asarray(self.contribute(draw), np.float64)
        if np.any(np.abs(found) > 1):
            raise ValueError("contributions must be at most 1 clip norm")
        if draw.holds_null is not None:
            found = np.where(draw.holds_null, 0.0, found)
        return float(found.sum())


class Part(NamedTuple):
    """Equal steps of a run, in both worlds."""

    worlds: tuple[World, World]  # with the unit, and without it
    noise_multiplier: float  # > 0
    num_steps: int = 1  # how many of them


def audit_mechanism(
    step: AnyStep,
    *,
    num_steps: int | None = None,
    data: ExampleTable | None = None,
    unit: int = 0,
    others: float | None = None,
    deltas: Sequence[float] = DELTAS,
    num_draws: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
    on_draws: Callable[[int], None] | None = None,
) -> ReleaseAudit:
    """Plays the audit game of a described run; bounds its epsilon from below.

    A clip unit that holds the protected unit contributes +1 clip norm. Without the unit
    it holds what takes its place and contributes -1 (``replace_one``), or is null
    (``zero_out``), or is what is drawn when the unit has left (``add_remove``). Clip
    units that do not hold it contribute ``others``: where that is below 0, whoever is
    drawn in the unit's place tells that it was not.

    Args:
      step: one setting, all fields scalars, with noise; or a composed run.
      num_steps: of the run, at most a few: each is drawn; None for a composed run.
      data: from which is drawn. None: a made-up table as small as the step allows.
      unit: place of the protected unit in its level; of a person, on the list of
        people. With a `Population` choose a unit in the smallest groups.
      others: in [-1, 1], of clip units of a public list those which could hold the
        unit; None: -1 or 0, whichever the first draws favour.
      deltas: at which the claim is tested; all bounds hold together.
      num_draws: runs with the unit, and as many without, at least 100.
      confidence: of all bounds together, in [0.5, 1).
      seed: of the draws and of the noise.
      on_draws: is called now and then with the number of runs drawn since, of
        `total_draws` in all.

    Returns:
      The claim and the bounds, *lower bounds* of epsilon.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a number out of range, arrays in the step, no noise, or data that do
        not fit.
      NotImplementedError: a step for which no table can be made up: give ``data``.
    """
    steps = _checked_parts(step, num_steps)
    claimed = claimed_epsilons(cast("Any", step), num_steps, deltas)
    if others is not None and not -1 <= others <= 1:
        raise ValueError(f"others must lie in [-1, 1], got {others!r}")
    drawn = [made_up(one) if data is None else (one, data) for one, _ in steps]
    choices = [
        [
            Part(worlds_of(*one, unit, value), _noise(one[0]), count)
            for one, (_, count) in zip(drawn, steps, strict=True)
        ]
        for value in (_OTHERS if others is None else (others,))
    ]
    return _play(choices, claimed, deltas, num_draws, confidence, seed, on_draws)


def total_draws(num_draws: int, *, others: float | None = None) -> int:
    """Returns how many runs `audit_mechanism` draws, with the unit and without."""
    choosing = int(CHOOSING_SHARE * num_draws)
    return 2 * (num_draws + choosing * (len(_OTHERS) - 1 if others is None else 0))


def audit_worlds(
    with_unit: World,
    without: World,
    *,
    noise_multiplier: float,
    claimed: Sequence[float] | np.ndarray,
    num_steps: int = 1,
    deltas: Sequence[float] = DELTAS,
    num_draws: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
    on_draws: Callable[[int], None] | None = None,
) -> ReleaseAudit:
    """Plays the game of two neighbouring data sets of whatever contributions.

    The first runs choose the score, the likelihood ratio of the mixtures of Gaussians
    around the sums that they had, and the events; the others are counted. Arguments and
    errors are those of `audit_mechanism`.
    """
    if not noise_multiplier > 0:
        raise ValueError(f"noise_multiplier must be > 0, got {noise_multiplier!r}")
    count = _validation.whole_number("num_steps", num_steps)
    parts = [[Part((with_unit, without), noise_multiplier, count)]]
    return _play(parts, claimed, deltas, num_draws, confidence, seed, on_draws)


def _play(
    choices: Sequence[Sequence[Part]],
    claimed: Any,
    deltas: Any,
    num_draws: int,
    confidence: float,
    seed: int,
    on_draws: Callable[[int], None] | None,
) -> ReleaseAudit:
    """Plays the game that shows most of the first draws, and counts the others."""
    claims, levels, number = checked_claim(claimed, deltas, num_draws, confidence)
    generator = np.random.default_rng(seed)
    choosing = int(CHOOSING_SHARE * number)

    def drawn(parts: Sequence[Part], number: int) -> list[tuple[Any, Any]]:
        """Sums and noised sums of each part, (with the unit, without)."""
        found = []
        for part in parts:
            sums = [
                world.runs(number, part.num_steps, generator) / part.noise_multiplier
                for world in part.worlds
            ]
            noised = [one + generator.normal(size=one.shape) for one in sums]
            found.append((sums, noised))
        if on_draws is not None:
            on_draws(2 * number)
        return found

    def scores(ratios: Any, found: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        there, gone = (
            sum(
                ratio(noised[side])
                for ratio, (_, noised) in zip(ratios, found, strict=True)
            )
            for side in (0, 1)
        )
        return there, gone

    games = []
    for parts in choices:
        found = drawn(parts, choosing)
        ratios = [
            likelihood_ratio(*sums, is_joint=part.worlds[0].sampler.steps_per_epoch)
            for part, (sums, _) in zip(parts, found, strict=True)
        ]
        choice = scores(ratios, found)
        shown = score_bounds(choice, choice, levels, confidence)
        games.append((sum(one.epsilon for one in shown), parts, ratios, choice))
    _, parts, ratios, choice = max(games, key=lambda game: game[0])
    counted = scores(ratios, drawn(parts, number - choosing))
    return ReleaseAudit(claims, score_bounds(choice, counted, levels, confidence))


def worlds_of(
    step: GaussianStep, data: ExampleTable, unit: int, others: float
) -> tuple[World, World]:
    """Returns the data with a unit, and without it; see `audit_mechanism`."""
    check_owners(step, data)
    own = _rows_of(step, data, unit)
    if not np.any(own):
        raise ValueError(
            f"unit must be a {step.privacy_unit} with an example in the data, "
            f"got {unit!r}"
        )

    def contribute(own: np.ndarray, value: float, reacting: Any) -> Contribute:
        def contributions(draw: Draw) -> np.ndarray:
            inner = tuple(range(1, draw.mask.ndim))
            holds = (own[draw.examples] & draw.mask).any(axis=inner)
            reacts = draw.mask.any(axis=inner)  # what is empty contributes nothing
            if reacting is not None:
                reacts = reacts & np.isin(draw.units, reacting)
            return np.where(holds, value, np.where(reacts, others, 0.0))

        return contributions

    reacting = _units_that_react(step, data, own, data)
    there = World(sampler_of(step, data), contribute(own, 1.0, reacting))
    if step.neighboring_relation == "replace_one":
        return there, World(there.sampler, contribute(own, -1.0, reacting))
    # Sizes that are accounted are those with the unit.
    if _leaves_the_list(step, data):
        kept = np.ones(len(data.population.children_counts[-1]), bool)
        kept[data.class_places[own]] = False
        left = data.of_classes(kept)
    else:
        left = data.take(np.flatnonzero(~own))
    gone = np.zeros(left.num_examples, bool)
    reacting = _units_that_react(step, data, own, left)
    sampler = sampler_of(step, left, is_smaller=True)
    return there, World(sampler, contribute(gone, 0.0, reacting))


def _rows_of(step: GaussianStep, data: ExampleTable, unit: int) -> np.ndarray:
    """(R,) bool: the examples of one protected unit."""
    if step.privacy_unit in OWNED:
        owners = data.owned(step.privacy_unit)
        assert owners is not None  # `check_owners`
        return owners.codes == unit
    names = list(data.level_names)
    _validation.choice("privacy_unit", step.privacy_unit, names)
    return data.places(names.index(str(step.privacy_unit)) + 1) == unit


def _leaves_the_list(step: GaussianStep, data: ExampleTable) -> bool:
    """Whether a unit that is out has no place in the tree; else it is an empty one."""
    names = list(data.level_names)
    if step.privacy_unit in OWNED or step.privacy_unit == names[-1]:
        return False  # rows that are left out are no place
    is_class = len(names) > 1 and step.privacy_unit == names[-2]
    if step.neighboring_relation == "zero_out":
        if not is_class:
            raise NotImplementedError(
                "an audit of zero_out is of examples, of people or of the units that "
                f"hold the examples, got {step.privacy_unit!r} of {tuple(names)}"
            )
        return True
    return is_class and isinstance(step.design, MultistageSampling)


def _units_that_react(
    step: GaussianStep, data: ExampleTable, own: np.ndarray, left: ExampleTable
) -> np.ndarray | None:
    """Units of the clip level whose other contents contribute; None: all."""
    # Where each is drawn by itself others would be a noise of their own; where one
    # takes the place of another those below the same parent show whether it was drawn.
    design = step.design
    if not isinstance(design, MultistageSampling) or step.clip_unit == STEP:
        return None
    level = design.level_names.index(str(step.clip_unit)) + 1
    is_renumbered = left is not data and _leaves_the_list(step, data)
    if isinstance(design.levels[level - 1], WithoutReplacement | ShuffledEpochs):
        if level == 1:
            return None
        parents = np.unique(data.places(level - 1)[own])
        if is_renumbered and level == len(design.levels):  # the parent itself is gone
            return np.zeros(0, np.int64)
        return np.unique(left.places(level)[np.isin(left.places(level - 1), parents)])
    if is_renumbered or level == len(design.levels):  # an example has no other content
        return np.zeros(0, np.int64)
    return np.unique(data.places(level)[own])


def made_up(step: GaussianStep) -> tuple[GaussianStep, ExampleTable]:
    """Returns the step as drawn from a table without features, and that table."""
    if step.population is not None:
        tree = step.population
        rows = tree.num_units(tree.num_levels)
        return step, ExampleTable(np.zeros((rows, 1), np.float32), None, tree)
    design: Any = step.design
    if isinstance(design, PeopleBlocks):
        raise NotImplementedError("data must be given for an audit of PeopleBlocks")
    schemes = [one for one in design.schemes if one.name != EPISODE]
    sizes = [_number(scheme) for scheme in schemes]
    names = tuple(scheme.name for scheme in schemes)
    if isinstance(design, GroupedClasses):
        names = CLASS, names[-1]
        sizes = [int(np.asarray(design.num_classes)), sizes[-1]]
    rows = math.prod(sizes)
    if rows > _MOST_EXAMPLES:
        raise NotImplementedError(
            f"data must be given for an audit of {rows:,} examples, more than "
            f"{_MOST_EXAMPLES:,}"
        )
    if step.neighboring_relation == "zero_out":  # numbers of slots, of no rate's
        for scheme, size in zip(schemes, sizes[-len(schemes) :], strict=True):
            if isinstance(scheme, Poisson) and scheme.population is None:
                stated = dataclasses.replace(scheme, population=size)
                design = design.with_scheme(stated)
        step = dataclasses.replace(step, sampling=design)
    nested: Any = sizes[-1]
    for size in reversed(sizes[:-1]):
        nested = [nested] * size
    owners = _one_owner(step, sizes) if step.privacy_unit in OWNED else None
    copies: dict[str, Any] = {
        "originals" if step.privacy_unit == ORIGINAL else "owners": owners
    }
    tree = Population.from_sizes(nested, level_names=names)
    return step, ExampleTable(np.zeros((rows, 1), np.float32), None, tree, **copies)


def _number(scheme: Any) -> int:
    """How many children a unit has, by what a scheme states of them."""
    stated = scheme.population
    if stated is None and isinstance(scheme, WithoutReplacement):
        stated = scheme.size
    if stated is None and isinstance(scheme, ShuffledEpochs):
        stated = _FEW * np.asarray(scheme.steps_per_epoch)
    # Where each is drawn by itself, others do not matter.
    return _FEW if stated is None else int(np.asarray(stated))


def _one_owner(step: GaussianStep, sizes: list[int]) -> Owners:
    """Owners of the examples: person 0 has as many as allowed, all others one each."""
    numbers = {} if step.people is None else step.people.numbers
    bounds = [
        int(np.asarray(numbers.get(name, 1)))
        for name in ("tasks", "classes", "examples")
    ]
    places = np.indices(sizes).reshape(len(sizes), -1)
    limits = bounds[-len(sizes) :]
    own = np.all(places < np.asarray(limits)[:, None], axis=0)
    codes = np.where(own, 0, np.cumsum(~own))
    return Owners(codes, np.arange(codes.max() + 1))


def _checked_parts(step: Any, num_steps: int | None) -> list[tuple[GaussianStep, int]]:
    """The different steps of a run of one setting, and how often each is taken."""
    gaussian_parts(step, "an audit")
    if step.shape:
        raise ValueError(
            f"step must be one setting, its fields scalars, got shape {step.shape}"
        )
    if isinstance(step, ComposedSteps):
        if num_steps is not None:
            raise ValueError(
                f"num_steps must be None for a composed run, got {num_steps!r}"
            )
        counts = [int(np.asarray(count)) for count in step.counts]
        parts = list(zip(step.gaussian_steps, counts, strict=True))
    else:
        parts = [(step, _validation.whole_number("num_steps", num_steps))]
    for one, _ in parts:
        if not 0 < _noise(one) < math.inf:
            raise ValueError(
                "noise_multiplier must be > 0 and finite for an audit (without noise "
                f"every claim is infinite), got {_noise(one):g}"
            )
    parts = [(one, count) for one, count in parts if count]
    if not parts:
        raise ValueError("the run must have at least one step to audit, got none")
    return parts


def _noise(step: GaussianStep) -> float:
    return float(np.asarray(step.noise_multiplier))


def likelihood_ratio(
    with_unit: np.ndarray, without: np.ndarray, *, is_joint: int | None
) -> Callable[[np.ndarray], np.ndarray]:
    """The log-likelihood ratio of releases, by (n, t) sums of each side."""
    # Steps that draw anew are independent, and their ratios add up; of an epoch not.
    mixtures = [
        _mixture(sums if is_joint else sums.reshape(-1, 1))
        for sums in (with_unit, without)
    ]

    def ratio(released: np.ndarray) -> np.ndarray:
        blocks = released.reshape(-1, mixtures[0][0].shape[1])
        found = []
        for start in range(0, len(blocks), _ROWS_AT_ONCE):
            rows, logs = blocks[start : start + _ROWS_AT_ONCE], []
            for means, weights in mixtures:
                exponents = rows @ means.T + (weights - 0.5 * (means**2).sum(axis=1))
                peak = exponents.max(axis=1, keepdims=True)
                logs.append(np.log(np.exp(exponents - peak).sum(axis=1)) + peak[:, 0])
            found.append(logs[0] - logs[1])
        return np.concatenate(found).reshape(len(released), -1).sum(axis=1)

    return ratio


def _mixture(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The most frequent of these sums, and the logarithms of their frequencies."""
    means, counts = np.unique(sums, axis=0, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:_MOST_SUMS]
    return means[most], np.log(counts[most] / counts[most].sum())
