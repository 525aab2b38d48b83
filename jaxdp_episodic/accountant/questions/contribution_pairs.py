"""Dominating pairs of one clipped contribution, and of several of a protected unit.

The theorems are in docs/theory.md, "Profiles" and "People"; proofs.md, "People in many
units". A clip unit *holds* a person if its drawn content has one of the person's
examples.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe import designs, people_laws as laws
from jaxdp_episodic.accountant.describe.population import BOUNDS, levels_of_people
from jaxdp_episodic.accountant.describe.rates import (
    max_contributions,
    most_children_drawn,
)
from jaxdp_episodic.accountant.describe.step import STEP, GaussianStep
from jaxdp_episodic.accountant.losses import gaussian_mixtures as mixtures, people
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss
from jaxdp_episodic.accountant.numerics.loops import logsumexp

Pairs = tuple[PrivacyLoss, ...]

# A rate of 1, with a path axis.
ALWAYS = np.ones(1)
# The smallest normal number: threads of JAX may take smaller ones for 0.
_SMALLEST_PRODUCT = np.finfo(np.float64).tiny
# Smaller positive rates of levels are raised to it: products over all levels of a
# person are then normal numbers. Kernels raise rates to it anyway.
_SMALLEST_RATE = 1e-60
# Largest number of clip units of one person: distributions and sums have as many terms.
MOST_UNITS = 20_000
# Largest product of the number of components and the largest number of units: an
# epsilon then takes about 20 s and 2 GB (93 x 360, a person in every class of the
# glyphs, 2 s).
MOST_TERMS = 300_000
# Largest number of products for a distribution over groups (one second), and of
# entries.
_MOST_PRODUCTS = 50_000_000
_MOST_CELLS = 2_000_000
# Largest number of values of a distribution, with 8 bytes each in about ten arrays.
_MOST_LISTED = 10_000_000
# Up to so many components all are kept: rare ones decide Rényi divergences.
_FEW_NUMBERS = 100
_MOST_NUMBERS = 600  # most components in Theorem M: an epsilon by rdp takes 3 s
# Poisson rate up to which Theorem 2 is skipped: its epsilon exceeded that of Theorem A
# in all of 320 settings below rate 0.44; at 0.5 it was smaller in one, by 8 per cent.
_RARE = 0.2


def column(number: Any) -> np.ndarray:
    """Returns a field as float64 with a path axis."""
    return np.asarray(number, np.float64)[..., None]


def shift_of(noise: Any, sensitivity: np.ndarray | float) -> np.ndarray:
    """Returns a sensitivity in standard deviations of the noise."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.divide(sensitivity, column(noise))


def product(rates: Sequence[np.ndarray]) -> np.ndarray:
    """The product of rates with a path axis; 1 if there are none, 0 only if one is."""
    found: np.ndarray = math.prod(rates, start=ALWAYS)
    if np.all(found >= _SMALLEST_PRODUCT):
        return found
    some = functools.reduce(operator.and_, [np.asarray(rate) > 0 for rate in rates])
    return np.where(some, np.maximum(found, _SMALLEST_PRODUCT), found)


# --- At most one clipped contribution depends on the unit: theory.md, "Profiles" ---


def one_contribution(
    step: GaussianStep,
    poisson_rate: np.ndarray | None,
    inner: np.ndarray = ALWAYS,
    *,
    outer: np.ndarray = ALWAYS,
    is_unit: bool = False,
    norms: np.ndarray | float = 1.0,
) -> PrivacyLoss:
    """The rows of the multistage theorem."""
    # ``poisson_rate`` is p if the clip level is Poisson sampled, and None if it is
    # drawn without replacement or the whole step is one contribution. ``inner`` is r_in
    # with Poisson sampling, else eta = p r_in; ``outer`` is r_out; ``norms`` the
    # largest norm of the unit's contribution in clip norms.
    relation, is_poisson = step.neighboring_relation, poisson_rate is not None
    rate = inner if poisson_rate is None else poisson_rate
    shift = shift_of(step.noise_multiplier, norms)
    twice = shift_of(step.noise_multiplier, 2.0 * norms)
    match relation, is_poisson, is_unit:
        case "zero_out", False, _:
            # If the unit is not drawn, another contribution takes its place: not the
            # sampled pair, even if the unit itself is clipped.
            return mixtures.ZeroedGaussianLoss(outer, ALWAYS, inner, shift)
        case "zero_out", True, False:
            return mixtures.ZeroedGaussianLoss(outer, rate, inner, shift)
        case "zero_out" | "add_remove", True, True:
            return SampledGaussianLoss(outer, rate, shift)
        case _, True, _:
            return mixtures.AntipodalGaussianLoss(outer, rate, inner, shift)
        case "add_remove", False, True:
            # If all children are drawn, no other takes the unit's place: C, not 2C.
            level = step.path_rates.num_levels
            everyone = step.path_rates.covers_all(level, relation)
            return SampledGaussianLoss(outer, rate, np.where(everyone, shift, twice))
    return mixtures.SwappedGaussianLoss(outer, inner, twice)


# --- Several contributions may depend on the unit: theory.md, "People" ---


class Mixture(NamedTuple):
    """The parameters of a `PeopleLoss` at one setting."""

    outer: float  # factor of both profiles
    cover: float  # e = P(J >= 1) in Theorems 1 and 2; otherwise 1
    counts: np.ndarray  # number of contributions of each component
    log_weights: np.ndarray  # of the components; their sum is ``cover``
    log_rests: float | np.ndarray = -np.inf  # log(1 - q), q that of a contribution


class Settings:
    """The distinct settings of levels and other numbers."""

    def __init__(self, stages: Sequence[laws.Stage], *numbers: Any) -> None:
        columns = [field for stage in stages for field in stage]
        columns += [column(number) for number in numbers]
        arrays = np.broadcast_arrays(np.ones(1), *columns)
        table = np.stack([array.reshape(-1) for array in arrays], axis=1)
        table = np.where(table > 0, np.maximum(table, _SMALLEST_RATE), table)
        rows, inverse = np.unique(table, axis=0, return_inverse=True)
        self._inverse = inverse.reshape(arrays[0].shape)
        self._rows, end = [], 1 + 4 * len(stages)
        for row in rows.tolist():
            read = tuple(laws.Stage(*row[i : i + 4]) for i in range(1, end, 4))
            self._rows.append((read, *row[end:]))

    def each(self, function: Callable[..., float]) -> np.ndarray:
        """Evaluates a function of the stages and other numbers at every setting."""
        values = np.array([function(*row) for row in self._rows], np.float64)
        return values[self._inverse]

    def mixtures(self, theorem: Any, most_terms: float = MOST_TERMS) -> tuple[Any, ...]:
        """Evaluates a theorem's `Mixture` at every setting; its fields as arrays."""
        # Each has a path axis; of the last three there is one per component.
        found = [theorem(*row) for row in self._rows]
        size = max((len(mixture.counts) for mixture in found), default=1)
        most = max((mixture.counts[-1] for mixture in found), default=1.0)
        if size * most > most_terms:
            raise NotImplementedError(
                f"a person in up to {most:,.0f} clip units needs sums of {size:,} "
                f"components, more than {MOST_TERMS:,} terms in all; use smaller "
                "bounds or PeopleBlocks"
            )
        numbers = np.array([mixture[:2] for mixture in found]).reshape(-1, 2)
        tables = np.ones((3, len(found), size))
        for row, (_, _, counts, *logs) in enumerate(found):
            # Pad with the last component, so that shifts ascend.
            tables[:, row] = np.reshape([counts[-1], -np.inf, -1.0], (3, 1))
            tables[:, row, : len(counts)] = np.broadcast_arrays(counts, *logs)
        each = (one[self._inverse] for one in numbers.T)
        lists = (tuple(one[self._inverse] for one in table.T) for table in tables)
        return (*each, *lists)


def theorem_a(
    units: np.ndarray, masses: np.ndarray, rate: float, chance: float
) -> Mixture:
    """Theorem A with p ``rate`` and r ``chance``, for a distribution of m ``units``."""
    # n = m - Binomial(m, p (1 - r)) units are not drawn without the person; each of
    # them holds the person with probability theta = p r / (1 - p + p r).
    share = 1 - rate + rate * chance
    drawn = laws.mixed([laws.log_binomial_law(n, share) for n in units], masses)
    missed = _log_missed(rate, chance)
    return Mixture(1.0, 1.0, *laws.tails_moved_up(drawn), missed)


def _log_missed(rate: float, chance: Any = 1.0) -> Any:
    """Returns ``log(1 - theta)``: theta is p ``rate`` if r ``chance`` is 1."""
    odds = rate / (1 - rate) if rate < 1 else np.inf
    return -np.log1p(np.where(np.greater(chance, 0), odds, 0.0) * chance)


def theorem_a_of_groups(
    classes: float, ways: float, bound: float, chance: float, rate: float
) -> Mixture:
    """Theorem A for Poisson-sampled groups of classes, averaged over partitions."""
    groups, fullest = classes // ways, min(ways, bound)
    most = min(bound, groups) + 1
    products = most * (fullest + 1) * (bound + 1)
    cells = max(most, fullest + 1) * (bound + 1)
    exact = bound >= classes or ways == 1
    if exact or products > _MOST_PRODUCTS or cells > _MOST_CELLS:
        held = laws.probability_of_any(fullest, chance)
        return theorem_a(np.array([min(bound, groups)]), np.zeros(1), rate, held)
    table = laws.log_unseen_groups(classes, ways, bound, chance, rate)
    number, held = np.nonzero(table > -np.inf)
    # -log(1 - theta_a) of groups with a = 0, 1, ... of the person's classes: the
    # probability that such a group is not drawn, given that it is not drawn without
    # the person.
    shown = laws.probability_of_any(np.arange(1.0, fullest + 2), chance)
    missed = np.append(0.0, -_log_missed(rate, shown))
    each, more = np.divmod(held, np.maximum(number, 1))
    log_none = (number - more) * missed[each]
    log_none += more * np.where(more > 0, missed[each + (more > 0)], 0.0)
    count, none, weight = laws.fewer_binomials(number, log_none, table[number, held])
    return Mixture(1.0, 1.0, count, weight, -none / np.maximum(count, 1))


def theorem_2(law: np.ndarray, worst: np.ndarray, rate: float = 1.0) -> Mixture:
    """Theorem 2 with p ``rate``, and with 1 Theorem 1."""
    # ``law`` is the distribution of the number of units that would hold the person if
    # they were drawn (Theorem 1: of drawn units that hold the person). ``worst`` is
    # that of the worst visible case over which ``law`` averages; it gives e.
    counts, masses = laws.tails_moved_up(law)
    some = counts > 0
    reached = float(np.exp(masses[some]).sum())
    cover = min(max(float(np.exp(worst[1:]).sum()), reached), 1.0)
    if not reached > 0:
        return Mixture(0.0, 1.0, np.ones(1), np.zeros(1))
    weights = masses[some] + np.log(cover / reached)
    outer, missed = min(reached / cover, 1.0), _log_missed(rate)
    return Mixture(outer, cover, counts[some], weights, missed)


def theorem_m(numbers: np.ndarray, masses: np.ndarray) -> Mixture:
    """Theorem M: the mixture over the contributions; ``cover`` is P(J >= 1)."""
    some = numbers > 0
    if not np.any(some):
        return Mixture(1.0, 0.0, np.ones(1), np.zeros(1))
    numbers, masses = numbers[some], masses[some]
    chance = float(np.clip(np.exp(logsumexp(masses)), _SMALLEST_PRODUCT, 1.0))
    # Many neighbouring numbers are moved up to the largest of each few.
    first = np.arange(0, len(numbers), -(-len(numbers) // _MOST_NUMBERS))
    numbers = numbers[np.append(first[1:], len(numbers)) - 1]
    masses = np.logaddexp.reduceat(masses, first) - logsumexp(masses)
    return Mixture(1.0, chance, numbers, masses)


def person_stages(step: GaussianStep) -> tuple[laws.Stage, ...]:
    """Returns the levels that have bounds of a person, top to bottom; worst path."""
    if step.people is None:
        return ()
    rates, stages = step.path_rates, []
    schemes = levels_of_people(step.design)
    for up, (name, scheme) in enumerate(zip(BOUNDS, schemes, strict=False), start=1):
        if scheme is None:
            continue
        bound, zero = column(step.people.numbers[name]), np.zeros(1)
        draw, group = rates.draw_sizes[-up], rates.group_sizes[-up]
        most = np.max(bound if draw is None else np.minimum(bound, draw), initial=0)
        if most > _MOST_LISTED:
            raise NotImplementedError(
                f"people.{name} must be at most {_MOST_LISTED:,} if as many can be "
                f"sampled, got {most:,.0f}"
            )
        if draw is not None and group is not None:
            # A parent with fewer children than a draw takes has all of them drawn, so
            # the worst parent has exactly `draw` children.
            fewest = np.maximum(np.min(group, axis=-1, keepdims=True), draw)
            stages.append(laws.Stage(bound, zero, draw, fewest))
            continue
        if scheme.population is not None:
            # The population of a Poisson level bounds everybody's children.
            bound = np.minimum(bound, column(scheme.population))
        rate = np.max(rates.rates[-up], axis=-1, keepdims=True)
        stages.append(laws.Stage(bound, rate, zero, zero))
    return tuple(reversed(stages))


def refuse_many(*bounds: Any) -> None:
    """Refuses bounds whose product exceeds the largest number of clip units."""
    units = product([np.asarray(bound, np.float64) for bound in bounds])
    if np.max(units, initial=0) > MOST_UNITS:
        raise NotImplementedError(
            f"a person in more than {MOST_UNITS:,} clip units cannot be computed; the "
            f"bounds in people allow {np.max(units):,.0f}"
        )


def mixture_pair(
    step: GaussianStep, settings: Settings, theorem: Any, *, leaves: bool = False
) -> PrivacyLoss:
    """The dominating pair of a theorem's `Mixture` at each setting."""
    # Contributions vanish in the other data set (``leaves``), or they change.
    leaves = leaves or step.neighboring_relation == "zero_out"
    kind = people.PeopleLoss if leaves else people.ReplacedPeopleLoss
    outer, cover, *lists = settings.mixtures(theorem)
    return kind(outer, cover, shift_of(step.noise_multiplier, 1.0), *lists)


def _pair_m(
    step: GaussianStep,
    settings: Settings,
    theorem: Any,
    visible: np.ndarray = ALWAYS,
    rate: np.ndarray = ALWAYS,
) -> PrivacyLoss:
    """Theorem M; ``visible`` multiplies the profiles, ``rate`` P(J >= 1)."""
    replaced = step.neighboring_relation == "replace_one"
    kind = mixtures.ReplacedMixtureLoss if replaced else mixtures.GaussianMixtureLoss
    _, cover, counts, log_weights, _ = settings.mixtures(theorem, np.inf)
    shifts = tuple(shift_of(step.noise_multiplier, count) for count in counts)
    return kind(visible, product([rate, cover]), shifts, log_weights)


def contributions(step: GaussianStep, sampling: designs.MultistageSampling) -> Pairs:
    """Dominating pairs of a protected unit above the clip level."""
    # docs/theory.md, "A unit above what is clipped": the row of the unit with the norm
    # of all its contributions (`certain`), and Theorem M for the number that is drawn.
    *above, rate = step.path_rates.rates
    outer, unit = product(above), len(above) + 1
    relation = step.neighboring_relation
    clip = sampling.level_names.index(str(step.clip_unit)) + 1
    at: Any = {"unit_level": unit, "clip_level": clip, "neighboring_relation": relation}
    most = max_contributions(sampling, step.population, **at)
    below, zero = [], np.zeros(1)  # the unit owns all of the drawn children
    for level in range(unit, clip):
        children = most_children_drawn(sampling, step.population, level, relation)
        scheme, own = sampling.levels[level], ALWAYS
        if isinstance(scheme, designs.Poisson):
            own = column(scheme.sampling_probability)
        below.append(laws.Stage(column(children), own, zero, zero))
    is_poisson = isinstance(sampling.levels[unit - 1], designs.Poisson)
    drawn = (rate, ALWAYS) if is_poisson else (None, rate)
    certain = one_contribution(
        step, *drawn, outer=outer, is_unit=True, norms=column(most)
    )
    others_react = not is_poisson and relation == "add_remove"
    many = math.prod(float(np.max(stage.bound, initial=1)) for stage in below)
    is_certain = all(np.all(stage.rate == 1) for stage in below)
    if others_react or is_certain or many > MOST_UNITS:
        return (certain,)  # under add_remove other units are drawn in its place

    def number(stages: Any, most: float) -> Mixture:
        counts, masses = laws.log_visible(stages, _FEW_NUMBERS)
        return theorem_m(np.minimum(counts, most), masses)

    settings = Settings(below, most)
    if not is_poisson:  # the draw of the unit is visible
        return certain, _pair_m(step, settings, number, product([outer, rate]))
    return (_pair_m(step, settings, number, outer, rate),)


def tree_of_person(step: GaussianStep, sampling: designs.MultistageSampling) -> Pairs:
    """Dominating pairs of a person; levels above the clip level count as visible."""
    stages = person_stages(step)
    if step.clip_unit == STEP:
        # The whole step is one contribution, which holds the person or not.
        chance = Settings(stages).each(laws.probability_of_holding)
        return (one_contribution(step, None, chance),)
    clip = sampling.level_names.index(str(step.clip_unit))
    is_poisson = isinstance(sampling.levels[clip], designs.Poisson)
    leaves = step.neighboring_relation == "add_remove"
    if leaves and not is_poisson and len(sampling.levels) == 1:
        # docs/proofs.md, "A sample of fixed size without the examples of a person".
        def exchanged(stages: Any) -> Mixture:
            found = theorem_m(*laws.tails_moved_up(laws.log_drawn(stages[0])))
            # Each of the person's examples replaces another one: 2 clip norms.
            return found._replace(counts=2 * found.counts)

        return (_pair_m(step, Settings(stages), exchanged),)
    is_last = is_poisson and clip == len(sampling.levels) - 1
    return _clip_units(step, stages, clip, is_poisson, is_last=is_last)


def blocks_of_people(step: GaussianStep, design: designs.PeopleBlocks) -> Pairs:
    """Dominating pairs of `PeopleBlocks`: one block's episodes can hold the person."""
    rate = getattr(design.episodes, "sampling_probability", 0.0)
    size = getattr(design.episodes, "size", 0.0)
    is_poisson = isinstance(design.episodes, designs.Poisson)
    units, number = design.num_possible_episodes, design.episodes_per_block
    if np.all(np.equal(number, 1)):
        chance = probability_in_episode(step)
        share = column(np.minimum(size, units) / units)
        drawn = (column(rate), chance) if is_poisson else (None, share * chance)
        return (one_contribution(step, *drawn),)
    episodes = laws.Stage(*map(column, (number, rate, size, units)))
    return _clip_units(step, (episodes, *person_stages(step)), 0, is_poisson)


def _clip_units(
    step: GaussianStep,
    stages: Sequence[laws.Stage],
    clip: int,
    is_poisson: bool,
    *,
    is_last: bool = False,
) -> Pairs:
    """Dominating pairs for clip units at level ``clip`` of the stages."""
    # The levels above are visible; the contents of all levels below may hold the
    # person. ``is_last``: whether Poisson-sampled examples are clipped one by one.
    refuse_many(*(stage.bound for stage in stages[: clip + 1]))
    settings, unit = Settings(stages), stages[clip]

    def chance(stages: Any) -> float:
        return laws.probability_of_holding(stages[clip + 1 :])

    def mixture_a(stages: Any) -> Mixture:
        counts, masses = laws.log_visible(stages[:clip])
        unit, held = stages[clip], chance(stages)
        return theorem_a(counts * unit.bound, masses, unit.rate, held)

    def mixture_2(stages: Any) -> Mixture:
        counts, masses = laws.log_visible(stages[:clip])
        unit, held = stages[clip], chance(stages)
        if is_poisson:
            each = [laws.log_binomial_law(n * unit.bound, held) for n in counts]
        else:  # Theorem 1
            each = laws.sums_of(laws.log_held(laws.log_drawn(unit), held), counts)
        rate = unit.rate if is_poisson else 1.0
        return theorem_2(laws.mixed(each, masses), each[-1], rate)

    if is_last:  # Theorem M
        # A removed example is like one that is not drawn: add_remove is as zero_out.
        leaves = step.neighboring_relation == "add_remove"
        return (mixture_pair(step, settings, mixture_a, leaves=leaves),)
    if not is_poisson:
        return (mixture_pair(step, settings, mixture_2),)
    # Where Theorem A gives a smaller epsilon than Theorem 2: see `_RARE`.
    only_a = (settings.each(chance) == 1) | ((unit.rate <= _RARE) & (unit.bound > 1))
    theorems = (mixture_a,) if np.all(only_a) else (mixture_a, mixture_2)
    return tuple(mixture_pair(step, settings, theorem) for theorem in theorems)


def groups_of_person(step: GaussianStep, design: designs.GroupedClasses) -> Pairs:
    """Dominating pairs of a person in `GroupedClasses` with a fresh partition."""
    assert step.people is not None and design.episodes is not None  # checked
    bound = step.people.numbers["classes"]
    refuse_many(np.minimum(bound, design.num_possible_episodes))
    rate = getattr(design.episodes, "sampling_probability", 0.0)
    size = getattr(design.episodes, "size", 0.0)
    is_poisson = isinstance(design.episodes, designs.Poisson)
    given = (design.num_classes, design.ways, bound, rate, size)
    settings = Settings(person_stages(step), *given)

    def mixture_a(stages: Any, *of: Any) -> Mixture:
        classes, ways, bound, rate, _ = of
        chance = laws.probability_of_holding(stages)
        return theorem_a_of_groups(classes, ways, bound, chance, rate)

    def mixture_2(stages: Any, *of: Any) -> Mixture:
        classes, ways, bound, rate, size = of
        groups, chance = classes // ways, laws.probability_of_holding(stages)
        # The distributions of the episodes that would hold the person: mean and worst.
        mean = worst = laws.log_reached_worst(groups, ways, bound, chance)
        if classes <= laws.MOST_AVERAGED:
            mean = laws.log_reached_mean(classes, ways, bound, chance)
        if is_poisson:
            return theorem_2(mean, worst, rate)
        drawn = []  # Theorem 1
        for law in (mean, worst):
            numbers, masses = laws.tails_moved_up(law)
            stages = [laws.Stage(number, 0.0, size, groups) for number in numbers]
            drawn.append(laws.mixed(list(map(laws.log_drawn, stages)), masses))
        return theorem_2(*drawn)

    if not is_poisson:
        return (mixture_pair(step, settings, mixture_2),)
    # Only the groups of a person in every class are alike, as `_RARE` supposes.
    are_alike = (bound == design.num_classes) & (design.num_possible_episodes > 1)
    only_a = are_alike & np.less_equal(rate, _RARE)
    theorems = (mixture_a,) if np.all(only_a) else (mixture_a, mixture_2)
    return tuple(mixture_pair(step, settings, theorem) for theorem in theorems)


def probability_in_episode(step: GaussianStep) -> np.ndarray:
    """Returns the probability that one draw through all levels holds the person."""
    return Settings(person_stages(step)).each(laws.probability_of_holding)
