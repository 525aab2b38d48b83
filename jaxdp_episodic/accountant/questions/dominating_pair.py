"""From a step to its dominating pairs: which theorem holds, with which numbers.

The rows are those of docs/theory.md, "Which row, which theorem".
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxdp_episodic.accountant.describe import people_laws as laws, releases
from jaxdp_episodic.accountant.describe.designs import (
    OWNED,
    GroupedClasses,
    IndependentEpisodes,
    MultistageSampling,
    PeopleBlocks,
    Poisson,
    RandomAllocation,
    ShuffledEpochs,
    epoch_scheme,
)
from jaxdp_episodic.accountant.describe.population import BOUNDS
from jaxdp_episodic.accountant.describe.rates import cut_weights
from jaxdp_episodic.accountant.describe.spec import refuse_traced
from jaxdp_episodic.accountant.describe.step import (
    STEP,
    AnyStep,
    GaussianStep,
    OneStep,
    parts_of,
)
from jaxdp_episodic.accountant.losses import (
    allocated,
    finite,
    gaussian_mixtures as mixtures,
    independent_episodes as episodes,
    renyi_curve,
)
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.laplace import LaplaceLoss
from jaxdp_episodic.accountant.losses.loss_nodes import Rate, real_log_mixture
from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.numerics.loops import map_arrays
from jaxdp_episodic.accountant.questions import contribution_pairs as rows
from jaxdp_episodic.accountant.questions.contribution_pairs import (
    ALWAYS,
    Pairs,
    Settings,
    column,
    one_contribution,
    product,
    shift_of,
)

Uses = list[tuple[PrivacyLoss, np.ndarray]]
"""Dominating pairs and the number of uses of each."""

# Largest number of independent episodes of a step: the bound sums as many terms.
MOST_EPISODES = 1_000_000
# Largest number of populations of a run's truncated samples; each doubles the paths.
_MOST_POPULATIONS = 8
# Relative; exceeds the rounding errors of a square root and a division together.
_ROUNDED_UP = 2.0**-51


# --- Runs ---


def runs_of(step: AnyStep, num_steps: np.ndarray | None) -> tuple[Run, ...]:
    """Returns one run for each theorem that holds, with a path axis."""
    if step.is_traced:
        refuse_traced(step)
    return runs_of_parts(*parts_of(step, num_steps))


def runs_of_parts(
    steps: Sequence[OneStep], counts: Sequence[ArrayLike]
) -> tuple[Run, ...]:
    """Returns one run for each theorem; counts may be real numbers."""
    parts = list(map(_uses, steps, counts))
    if releases.TruncatedPoissonRelease in map(type, steps):
        parts = _on_all_paths(steps, parts)
    runs = []
    for theorem in range(max(map(len, parts))):
        uses: Uses = []
        for part in parts:
            uses += part[min(theorem, len(part) - 1)]
        runs.append(Run(*zip(*uses, strict=True)))
    return tuple(runs)


def _on_all_paths(steps: Sequence[OneStep], parts: list[Any]) -> list[list[Uses]]:
    """Combines every path of the tree with every size of the data set."""
    # Truncated samples have the sizes of both neighbours on the path axis.
    kind = releases.TruncatedPoissonRelease
    axes = [isinstance(s, kind) and np.asarray(s.population).tobytes() for s in steps]
    if len(set(axes)) == 1:
        return parts
    sizes = dict.fromkeys(axes, 1)
    if (number := len(sizes.keys() - {False})) > _MOST_POPULATIONS:
        raise NotImplementedError(
            "truncated Poisson samples of one run must have at most "
            f"{_MOST_POPULATIONS} different populations, got {number}"
        )
    for axis, part in zip(axes, parts, strict=True):
        arrays = (array for uses in part for use in uses for array in use)
        sizes[axis] = max(sizes[axis], *(array.shape[-1] for array in arrays))
    grid = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    places = dict(zip(sizes, grid, strict=True))

    def placed(field: np.ndarray, place: np.ndarray) -> np.ndarray:
        return field[..., place] if np.shape(field)[-1:] not in ((), (1,)) else field

    return [
        map_arrays(functools.partial(placed, place=places[axis]), part)
        for axis, part in zip(axes, parts, strict=True)
    ]


def _uses(step: OneStep, num_steps: ArrayLike) -> list[Uses]:
    """For each theorem the pairs of these steps; with epoch schemes, of epochs."""
    if not isinstance(step, GaussianStep):
        return [_uses_of_release(step, column(num_steps))]
    if step.bands is not None:  # the group with the most steps
        num_steps, step = step.uses(np.asarray(num_steps)), step.in_group
    count, step = column(num_steps), in_one_place(step)
    scheme = step.design.schemes[0]
    if isinstance(scheme, RandomAllocation):
        return [_allocated(step, u, scheme, count) for u in _all_units(step)]
    if isinstance(scheme, ShuffledEpochs):
        # An epoch that has begun costs as much as a complete one.
        count = np.ceil(count / column(scheme.steps_per_epoch))
    return [[(pair, count)] for pair in _pairs(step)]


# --- The table of designs ---


def dominating_pair(step: OneStep) -> PrivacyLoss:
    """Returns a dominating pair of one step: the first of `dominating_pairs`."""
    return dominating_pairs(step)[0]


def dominating_pairs(step: OneStep) -> Pairs:
    """Returns the dominating pairs of one step, one for each theorem that holds."""
    if not isinstance(step, GaussianStep):
        return (_release(step),)
    return _pairs(in_one_place(step.in_group))


def _pairs(step: GaussianStep) -> Pairs:
    """The rows by design, with the section of docs/theory.md that proves each."""
    design, scheme = step.design, step.design.schemes[0]
    below = design.level_names[len(step.path_rates.rates) :]  # the protected unit
    match design:
        case _ if isinstance(scheme, RandomAllocation):  # "Epochs": one step of a block
            rate = step.path_rates.rates[0]
            return tuple(_drawn_unit(step, units, rate) for units in _all_units(step))
        case _ if isinstance(scheme, ShuffledEpochs):  # "Epochs": without amplification
            return (_shuffled_epoch(step),)
        case IndependentEpisodes():  # "Other designs"; "People"
            return (_independent_episodes(step, design),)
        case PeopleBlocks():  # "People"
            return rows.blocks_of_people(step, design)
        case GroupedClasses() if step.privacy_unit in OWNED:  # "People"
            return rows.groups_of_person(step, design)
        case GroupedClasses():  # "Other designs": at most one episode has the class
            return (_group(step, design),)
        case MultistageSampling() if step.privacy_unit in OWNED:  # "People"
            return rows.tree_of_person(step, design)
        case MultistageSampling() if step.clip_unit in below:  # "A unit above ..."
            return rows.contributions(step, design)
        case MultistageSampling():  # "Profiles"
            return (_multistage(step, design),)
    raise TypeError(f"no theorem about {design!r}")


def in_one_place(step: GaussianStep) -> GaussianStep:
    """Returns the step for examples if each person has one example; else the step."""
    people, names = step.people, step.design.level_names
    if people is None or isinstance(step.design, PeopleBlocks):
        return step
    if any(np.any(np.greater(bound, 1)) for bound in people.numbers.values()):
        return step
    return dataclasses.replace(step, privacy_unit=names[-1], people=None)


def _multistage(step: GaussianStep, sampling: MultistageSampling) -> PrivacyLoss:
    """Profiles: the clip unit is the protected unit or above it."""
    rates = step.path_rates.rates
    if step.clip_unit == STEP:
        return one_contribution(step, None, product(rates))
    clip = sampling.level_names.index(str(step.clip_unit))
    rate, inner = rates[clip], product(rates[clip + 1 :])
    coins = isinstance(sampling.levels[clip], Poisson)
    return one_contribution(
        step,
        rate if coins else None,
        inner if coins else product(rates[clip:]),
        outer=product(rates[:clip]),
        is_unit=clip + 1 == len(rates),
    )


def _group(step: GaussianStep, design: GroupedClasses) -> PrivacyLoss:
    """Grouped classes: at most one episode of a step has the class."""
    episode, class_, *below = step.path_rates.rates
    if not isinstance(design.episodes, Poisson):
        return one_contribution(step, None, product(step.path_rates.rates))
    removes = step.neighboring_relation == "zero_out" and not below
    return one_contribution(step, episode, product(below), is_unit=removes)


def _independent_episodes(
    step: GaussianStep, design: IndependentEpisodes
) -> PrivacyLoss:
    """Independent episodes: Theorem 1 of "People" with J ~ Binomial(B, eta)."""
    count = column(design.num_episodes)
    if np.max(count, initial=0) > MOST_EPISODES:
        raise NotImplementedError(
            f"num_episodes must be at most {MOST_EPISODES:,}, got {np.max(count):,.0f}"
        )
    rate = product(step.path_rates.rates)
    if step.privacy_unit in OWNED:
        rate = rows.probability_in_episode(step)
    zeroed = step.neighboring_relation == "zero_out"
    kind = episodes.ZeroedEpisodesLoss if zeroed else episodes.IndependentEpisodesLoss
    shift = shift_of(step.noise_multiplier, 1.0 if zeroed else 2.0)
    return kind(ALWAYS, rate, shift, count)


# --- Epoch schemes: theory.md, "Epochs" ---


class _Allocated(NamedTuple):
    """The allocated units (clip units) of an epoch that can hold the protected unit."""

    is_whole: bool  # whether a contribution vanishes with the protected unit
    number: np.ndarray  # of the units, each allocated independently
    inner: np.ndarray  # probability r that a drawn one holds the protected unit
    # The same probability as a visible event: it is independent of the allocation.
    outer: np.ndarray = ALWAYS


def _all_units(step: GaussianStep) -> list[_Allocated]:
    """The cases that hold, each a run; proofs.md, "Epochs by random allocation"."""
    # Under zero_out (b), with r inside, and (d), r times the profile of a whole unit.
    units = _units_of(step)
    if units.is_whole or step.neighboring_relation != "zero_out":
        return [units]
    return [units, _Allocated(True, units.number, ALWAYS, units.inner)]


def _units_of(step: GaussianStep) -> _Allocated:
    """The allocated units; for a partition that is kept for an epoch, the worst one."""
    design, relation = step.design, step.neighboring_relation
    zeroed, leaves = relation == "zero_out", relation != "replace_one"
    if step.privacy_unit not in OWNED:
        first = 2 if isinstance(design, GroupedClasses) else 1
        inner = product(step.path_rates.rates[first:])
        whole = step.path_rates.num_levels == first
        return _Allocated(whole and (zeroed or (leaves and first == 1)), ALWAYS, inner)
    people: Any = step.people  # with bounds, except in blocks: checked
    if isinstance(design, PeopleBlocks):
        number, leaves = column(design.episodes_per_block), zeroed
        inner = rows.probability_in_episode(step)
    elif isinstance(design, GroupedClasses):

        def chance(stages: Any, ways: float, bound: float) -> Any:
            held = laws.probability_of_holding(stages)
            return laws.probability_of_any(min(ways, bound), held)

        bound, leaves = people.numbers["classes"], zeroed
        number = column(np.minimum(bound, design.num_possible_episodes))
        inner = Settings(rows.person_stages(step), design.ways, bound).each(chance)
    else:
        _, *below = rows.person_stages(step)
        inner = Settings(below).each(laws.probability_of_holding)
        leaves &= zeroed or not below
        number = column(people.numbers[BOUNDS[len(below)]])
    return _Allocated(leaves and bool(np.all(inner == 1)), number, inner)


def _allocated(
    step: GaussianStep, units: _Allocated, scheme: RandomAllocation, count: np.ndarray
) -> Uses:
    """The pairs of ``count`` steps: whole blocks and a part of one more."""
    # An epoch consists of ``times`` blocks.
    steps, times = column(scheme.steps_per_epoch), column(scheme.times)
    epochs, left = np.divmod(count, steps)
    short, num_long = np.divmod(steps, times)
    # The first `num_long` blocks of an epoch have one step more.
    in_long = np.minimum(left, num_long * (short + 1))
    whole_long, part_long = np.divmod(in_long, short + 1)
    whole_short, part_short = np.divmod(left - in_long, short)
    part_of = np.where(left < num_long * (short + 1), short + 1, short)
    part = part_long + part_short  # one of them is 0
    uses: Uses = []
    for bins, taken, number in (
        (short, short, epochs * (times - num_long) + whole_short),
        (short + 1, short + 1, epochs * num_long + whole_long),
        (part_of, part, (part > 0) * 1.0),
    ):
        many, one = number * (taken > 1), number * (taken == 1)
        if np.any(many):
            uses += _allocated_blocks(step, units, bins, taken, many)
        if np.any(one):
            uses.append((_drawn_unit(step, units, 1 / bins), one))
    return uses or [(_drawn_unit(step, units, 1 / steps), count)]


def _drawn_unit(step: GaussianStep, units: _Allocated, rate: np.ndarray) -> PrivacyLoss:
    """One step of a block: Poisson sampling of the units (with several, Theorem A)."""
    if np.any(units.number > 1):
        rows.refuse_many(units.number)
        chance = product([units.inner, units.outer])
        settings = Settings((), *(a[..., 0] for a in (units.number, rate, chance)))

        def theorem_a(_: Any, number: float, *of: float) -> rows.Mixture:
            return rows.theorem_a(np.array([number]), np.zeros(1), *of)

        return rows.mixture_pair(step, settings, theorem_a, leaves=units.is_whole)
    shift = shift_of(step.noise_multiplier, 1.0)
    if units.is_whole:
        return SampledGaussianLoss(units.outer, rate, shift)
    return mixtures.AntipodalGaussianLoss(ALWAYS, rate, units.inner, shift)


def _allocated_blocks(
    step: GaussianStep,
    units: _Allocated,
    bins: np.ndarray,
    taken: np.ndarray,
    number: np.ndarray,
) -> Uses:
    """Blocks, or parts of a block, of two or more steps."""
    number, root = number * units.number, np.sqrt(units.number)
    root = np.where(units.number > 1, root * (1 + _ROUNDED_UP), 1.0)
    shift = shift_of(step.noise_multiplier, root)
    if units.is_whole:
        loss = allocated.AllocatedGaussianLoss(units.outer, shift, bins, taken)
        return [(loss, number)]
    uses: Uses = []
    pairs = number * (bins == 2)
    if np.any(number - pairs):
        loss = allocated.AllocatedAntipodalLoss(ALWAYS, shift, bins, taken, units.inner)
        uses.append((loss, number - pairs))
    if np.any(pairs):
        shift = shift_of(step.noise_multiplier, np.sqrt(2.0) * root)
        uses.append((mixtures.SwappedGaussianLoss(ALWAYS, units.inner, shift), pairs))
    return uses


def _shuffled_epoch(step: GaussianStep) -> PrivacyLoss:
    """The pair of a shuffled epoch, without amplification."""
    units = _units_of(step)
    inner = np.where(units.number > 1, 1.0, units.inner)
    if units.is_whole and step.neighboring_relation == "add_remove":
        # The last unit takes the place of the removed one (2 clip norms) and leaves its
        # own batch (1 clip norm): sqrt(4 + 1) over the two steps.
        shift = shift_of(step.noise_multiplier, np.sqrt(5.0) * units.number)
        return SampledGaussianLoss(ALWAYS, ALWAYS, shift)
    # Order and batches do not change, only the contributions of the units.
    return one_contribution(step, None, inner, norms=units.number)


def shared_epoch(
    step: GaussianStep, num_steps: int, looks: int
) -> tuple[GaussianStep, int]:
    """Returns step and count of ``looks`` runs that share the draws of epochs."""
    scheme = epoch_scheme(step.design)
    if looks == 1:
        return step, num_steps
    if isinstance(scheme, ShuffledEpochs):
        return step, int(np.asarray(scheme.steps_per_epoch)) * looks
    if step.privacy_unit in OWNED or not _units_of(step).is_whole:
        raise NotImplementedError(
            f"{looks} uses of the same allocation of an epoch have no theorem with "
            f"privacy_unit={step.privacy_unit!r} under {step.neighboring_relation}; "
            "covered: add_remove and zero_out of what is allocated"
        )
    noise = np.asarray(step.noise_multiplier) / math.sqrt(looks) * (1 - _ROUNDED_UP)
    return dataclasses.replace(step, noise_multiplier=float(noise)), num_steps


# --- Releases ---


def _release(release: OneStep) -> PrivacyLoss:
    """The pair of a release; its fields have shape ``(*release.shape, P)``."""
    match release:
        case releases.LaplaceRelease():
            # The old and the new content are clipped: up to two clip norms apart.
            norms = 2.0 if release.neighboring_relation == "replace_one" else 1.0
            shift = shift_of(release.noise_multiplier, norms)
            return LaplaceLoss(ALWAYS, column(release.sampling_probability), shift)
        case releases.ApproximateDP(epsilon=epsilon, delta=delta):
            # Unless it fails, a bit that is true with probability 1 / (1 + e^-epsilon).
            # The largest number counts as infinite, and inf - inf would be NaN.
            size = np.minimum(column(epsilon), np.finfo(np.float64).max)
            log_truth = -np.log1p(np.exp(-size))
            masses = log_truth, log_truth - size
            return finite.FiniteLoss(ALWAYS, (size, -size), masses, column(delta))
        case releases.ZeroConcentratedDP(rho=rho, is_gaussian=True):
            return SampledGaussianLoss(ALWAYS, ALWAYS, np.sqrt(2 * column(rho)))
        case releases.ZeroConcentratedDP(rho=rho, xi=xi):
            return renyi_curve.ZeroConcentratedLoss.of(column(rho), column(xi))
        case releases.RenyiDP():
            curve = map(np.asarray, (release.orders, release.rdp))
            return renyi_curve.RenyiCurveLoss.of_orders(*curve)
        case releases.RandomizedResponse():
            return _randomized_response(release)
        case releases.DiscreteLaplaceRelease():
            return _discrete_laplace(release)
        case releases.GaussianMixtureRelease():
            return _gaussian_mixture(release)
        case releases.TruncatedPoissonRelease():
            return _truncated(release)
    raise TypeError(f"step must be a GaussianStep or a release, got {release!r}")


def _finite(losses: np.ndarray, log_masses: np.ndarray) -> PrivacyLoss:
    """A pair with these losses, never with an infinite one."""
    fields = tuple(losses[:, None]), tuple(log_masses[:, None])
    return finite.FiniteLoss(ALWAYS, *fields, np.zeros(1))


def _unprotected(rate: float) -> PrivacyLoss:
    """A pair that reveals everything if the unit is drawn."""
    return SampledGaussianLoss(ALWAYS, np.full(1, rate), np.full(1, np.inf))


def _randomized_response(release: releases.RandomizedResponse) -> PrivacyLoss:
    """Randomized response with k answers: uniform with probability p, else true."""
    p, k = float(release.noise_parameter), float(release.num_buckets)
    if p in (0, 1) or k <= 1:
        return _unprotected(float(p == 0 and k > 1))
    log_truth = np.log((1 - p) + p / k)
    if release.neighboring_relation == "zero_out":  # against a uniform answer
        losses = np.array([np.log1p((k - 1) * (1 - p)), np.log(p)])
        log_masses = np.array([log_truth, np.log(p * (k - 1) / k)])
    else:
        gain = np.log1p(k * (1 - p) / p)  # log of P/Q at the true answer
        losses = np.array([gain, 0.0, -gain])
        with np.errstate(divide="ignore"):
            log_masses = np.array([log_truth, np.log(p * (k - 2) / k), np.log(p / k)])
    return _finite(losses, log_masses)


def _discrete_laplace(release: releases.DiscreteLaplaceRelease) -> PrivacyLoss:
    """Integer noise with probability ``tanh(a/2) e^{-a|x|}``, moved, and sampled."""
    # Ghosh, Roughgarden, Sundararajan (2009), arXiv:0811.2841.
    a, chance = float(release.noise_parameter), release.sampling_probability
    if a == 0 or np.isinf(a) or chance == 0:
        return _unprotected(chance)  # a parameter of 0 means no noise
    twice = 2 if release.neighboring_relation == "replace_one" else 1
    k = np.arange((moved := twice * release.sensitivity) + 1.0)
    losses, log_masses = a * (moved - 2 * k), -np.log1p(np.exp(-a)) - a * k
    log_masses[1:-1] += np.log(-np.expm1(-a))
    if chance < 1:
        rate = Rate.of(np.float64(chance))
        # Not from the difference of losses, which has their rounding errors.
        undrawn, drawn = rate.log_rest + log_masses - losses, rate.log + log_masses
        losses = real_log_mixture(losses, rate)
        log_masses = np.logaddexp(undrawn, drawn)
    return _finite(losses, log_masses)


def _gaussian_mixture(release: releases.GaussianMixtureRelease) -> PrivacyLoss:
    norms, chance = np.asarray(release.sensitivities), np.asarray(release.probabilities)
    order = np.argsort(norms, kind="stable")
    order = order[(norms[order] > 0) & (chance[order] > 0)]
    if order.size == 0:
        return SampledGaussianLoss(ALWAYS, np.zeros(1), np.zeros(1))
    shift = shift_of(release.standard_deviation, norms[order])
    some = chance[order].sum()
    at_all = 1.0 if order.size == norms.size else min(float(some), 1.0)
    rate = product([np.full(1, release.sampling_probability), np.full(1, at_all)])
    shifts, weights = shift[:, None], np.log(chance[order] / some)[:, None]
    return mixtures.GaussianMixtureLoss(ALWAYS, rate, tuple(shifts), tuple(weights))


def _truncated(
    release: releases.TruncatedPoissonRelease,
) -> mixtures.TruncatedGaussianLoss:
    """docs/proofs.md, "A truncated Poisson sample"."""
    batch_size, rate = column(release.batch_size), column(release.sampling_probability)
    shift = shift_of(release.noise_multiplier, 1.0)
    *logs, cut_rate, sure = cut_weights(_sizes(release), batch_size, rate)
    kind = {
        "add_remove": mixtures.TruncatedGaussianLoss,
        "replace_one": mixtures.ReplacedTruncatedLoss,
        "zero_out": mixtures.ZeroedTruncatedLoss,
    }[release.neighboring_relation]
    return kind(ALWAYS, *logs, rate, cut_rate, shift, sure)


def _uses_of_release(release: OneStep, count: np.ndarray) -> Uses:
    """Poisson sampling where the batch size is the whole data set: not truncated."""
    if not isinstance(release, releases.TruncatedPoissonRelease):
        return [(_release(release), count)]
    pair = _truncated(release)
    uncut = column(release.batch_size) >= _sizes(release)
    plain: Uses = [(pair.parts()[0], np.where(uncut, count, 0.0))]
    cut: Uses = [(pair, np.where(uncut, 0.0, count))]
    return plain * bool(np.any(uncut)) + cut * (not np.all(uncut))


def _sizes(release: releases.TruncatedPoissonRelease) -> np.ndarray:
    """Sizes of the data set with the unit; both if it may be either neighbour's."""
    size = column(release.population)
    if release.neighboring_relation != "add_remove":
        return size
    return np.concatenate([size, size + 1], axis=-1)
