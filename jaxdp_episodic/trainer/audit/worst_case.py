"""What an adversary lets one step do: who contributes what, and how often.

The theorem's triple (docs/theory.md, "Profiles"): seen along one direction and in
units of the noise, the protected unit's clip unit contributes one number if it is not
drawn, one if it is drawn and the protected unit is not reached, one if it is reached.
The tables are made from the rates of the step that is accounted, level by level, not
from its dominating pair, so that an audit finds a step resolved to the wrong pair.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses,
    IndependentEpisodes,
    block_lengths,
    epoch_scheme,
)
from jaxdp_episodic.accountant.describe.schemes import (
    PERSON,
    MultistageSampling,
    Poisson,
    RandomAllocation,
    Scheme,
    ShuffledEpochs,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import STEP, GaussianStep
from jaxdp_episodic.accountant.numerics.binomial import log_binomial_mass
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair
from jaxdp_episodic.trainer.audit.person_contributions import person_contributions

# Contributions of one unit in a step: a table has a branch for each number of them.
_MOST_CONTRIBUTIONS = 512
# Chances below are left out: no count of up to 10^10 draws shows them.
_NEGLIGIBLE = 1e-15
_TAIL_DEVIATIONS = 40  # beyond which a binomial number has a negligible chance


class Branches(NamedTuple):
    """What can happen to the protected unit in one step, as a finite table.

    Or in one block of an epoch, in one step of which the unit takes part: the others
    are as if the mean were 0, and the table is of the step that the unit is given.
    """

    # Chance that the unit above the clip level is drawn. Its other contributions show
    # whether it was, so a step without it reveals nothing.
    outer_rate: float
    weight: np.ndarray  # (c,) chances, given that it was; they add up to 1
    with_unit: np.ndarray  # (c,) mean of the release with the unit, in noise deviations
    # (c,) the same without it, or with another content in its place.
    without_unit: np.ndarray
    # The release at which both are equally likely; used if ``is_mirrored``.
    mirror: float
    # (k,) by which all means are multiplied; the draw of it is visible.
    multiplier: np.ndarray
    multiplier_weight: np.ndarray  # (k,) its probabilities
    # A dominating pair whose two directions are alike: each of the two distributions
    # has the losses above 0 of the table's forward direction, and below 0 mirrored
    # those of the other.
    is_mirrored: bool
    block: int = 1  # steps of which one is the unit's, all alike
    taken: int = 1  # how many of them are taken, the first ones


def worst_case(step: GaussianStep, path: int = 0) -> Branches:
    """Returns an actual mechanism: fixed data sets and contributions, nothing adaptive.

    The contributions are collinear and antipodal. For one step they reach the
    theorem's bound for `MultistageSampling` and for Poisson draws of grouped episodes.
    Elsewhere, and for many steps, the claim is that of a dominating pair which no data
    set need reach: there the table is a *lower bound* of the worst case.

    Of one setting and one of its distinct paths. More contributions of one unit than a
    table can have raise `NotImplementedError`.
    """
    shift = 1 / float(step.noise_multiplier)
    if step.privacy_unit == PERSON:
        weight, present, absent = person_contributions(step)
        return _table(1.0, weight, shift * present, shift * absent)
    rates = [float(_at(rate, path)) for rate in step.path_rates.rates]
    if epoch_scheme(step.design) is not None:
        return _in_epochs(step, rates, shift)
    if step.neighboring_relation == "zero_out":
        return _zeroed(step, rates, shift)
    if isinstance(step.design, IndependentEpisodes):
        return _several_episodes(step.design, math.prod(rates), shift)
    if isinstance(step.design, GroupedClasses):
        return _grouped(step.design, rates, shift)
    if step.clip_unit == STEP:
        return _swapped(1.0, math.prod(rates), 2 * shift)
    return _multistage(step, cast("Any", step.design), rates, shift, path)


def dominating_branches(step: GaussianStep, path: int = 0) -> Branches:
    """Returns the dominating pair that is accounted, as something to draw from.

    Under zero_out, of people, and by random allocation, the pair is no table; there it
    is `worst_case`, that of the forward direction or near it. Of shuffled epochs it is
    the pair of a whole epoch. Arguments are those of `worst_case`.
    """
    is_no_table = step.neighboring_relation == "zero_out" or step.privacy_unit == PERSON
    if is_no_table or isinstance(epoch_scheme(step.design), RandomAllocation):
        return worst_case(step, path)
    loss = dominating_pair(step).map(lambda field: np.float64(_at(field, path)))
    pair = loss.mixture()
    table = _table(
        float(loss.outer_rate), pair.weight, pair.with_unit, pair.without_unit
    )._replace(mirror=pair.threshold, is_mirrored=loss.is_symmetric)
    if pair.draws is not None:
        number, weight = _binomial(*pair.draws)
        number, weight = number[number > 0], weight[number > 0]
        if len(number):
            weight = weight / weight.sum()
            table = table._replace(multiplier=number, multiplier_weight=weight)
    return table


def tables_of_run(
    make: Callable[[GaussianStep, int], Branches],
    step: GaussianStep,
    num_steps: int,
    path: int = 0,
) -> list[tuple[Branches, int]]:
    """Returns the tables of a run of one step, of epochs by block, and their counts.

    By `worst_case` or `dominating_branches`; the last epoch may be a part, fixed in
    advance.
    """
    table, scheme = make(step, path), epoch_scheme(step.design)
    if scheme is None:
        return [(table, num_steps)]
    is_pair = make is dominating_branches and step.neighboring_relation != "zero_out"
    if is_pair and isinstance(scheme, ShuffledEpochs):
        # The pair of an epoch, begun or finished.
        return [(table, -(-num_steps // int(block_lengths(scheme).sum())))]
    found = Counter(blocks_of_run(step, num_steps))
    return [
        (table._replace(block=length, taken=taken), count)
        for (length, taken), count in found.items()
    ]


def blocks_of_run(step: GaussianStep, num_steps: int) -> list[tuple[int, int]]:
    """Returns length and taken steps of each block of a run; 1 and 1 without epochs."""
    scheme = epoch_scheme(step.design)
    if scheme is None:
        return [(1, 1)] * num_steps
    lengths = block_lengths(scheme).tolist()
    epochs, rest = divmod(num_steps, sum(lengths))
    found = [(length, length) for length in lengths] * epochs
    for length in lengths:
        if rest > 0:
            found.append((length, min(rest, length)))
        rest -= length
    return found


def _multistage(
    step: GaussianStep,
    sampling: MultistageSampling,
    rates: list[float],
    shift: float,
    path: int,
) -> Branches:
    """The unit's own level-by-level draw; see the theorem."""
    clip, number = _clipped(step, sampling, len(rates))
    outer, rate = math.prod(rates[: clip - 1]), rates[clip - 1]
    inner = math.prod(rates[clip:])
    removed = clip == len(rates) and step.neighboring_relation == "add_remove"
    if isinstance(sampling.levels[clip - 1], Poisson):
        if removed:
            return _drawn(outer, rate, number, shift, absent=0.0)
        if len(number[0]) > 1:
            return _drawn(outer, rate, number, shift, absent=-1.0)
        return _antipodal(outer, rate, inner, shift * number[0][0])
    covers = step.path_rates.covers_all(clip, step.neighboring_relation)
    everyone = removed and bool(_at(covers, path))
    if everyone or len(number[0]) > 1:
        # All take part, or the others' contributions would be a noise of their own:
        # the others contribute nothing.
        return _drawn(outer, rate, number, shift, absent=0.0 if removed else -1.0)
    # All others contribute -1 each, so that one of them is swapped for the unit.
    return _swapped(outer, rate * inner, 2 * shift * number[0][0])


def _clipped(
    step: GaussianStep, sampling: MultistageSampling, last: int
) -> tuple[int, tuple[np.ndarray, np.ndarray]]:
    """The level that is clipped, or the protected one above; its contributions."""
    clip = sampling.level_names.index(str(step.clip_unit)) + 1
    return min(clip, last), _contributions(sampling.levels[last:clip])


def _zeroed(step: GaussianStep, rates: list[float], shift: float) -> Branches:
    """What holds the protected unit contributes +1, or 0 where it is null; else -1."""
    design: Any = step.design
    if isinstance(design, IndependentEpisodes):
        table = _several_episodes(design, math.prod(rates), shift)
        return table._replace(without_unit=0.5 * table.with_unit)
    if isinstance(design, GroupedClasses):
        table = _grouped(design, rates, shift)
        if len(table.weight) > 2:  # coins
            return table._replace(without_unit=np.minimum(table.with_unit, 0.0))
        return _null(1.0, 1.0, float(table.weight[1]), shift)
    if step.clip_unit == STEP:
        return _null(1.0, 1.0, math.prod(rates), shift)
    clip, number = _clipped(step, design, len(rates))
    outer, rate = math.prod(rates[: clip - 1]), rates[clip - 1]
    if len(number[0]) > 1:
        return _drawn(outer, rate, number, shift, absent=0.0)
    shift, inner = shift * float(number[0][0]), math.prod(rates[clip:])
    if isinstance(design.levels[clip - 1], Poisson):
        return _null(outer, rate, inner, shift)
    return _null(outer, 1.0, rate * inner, shift)


def _in_epochs(step: GaussianStep, rates: list[float], shift: float) -> Branches:
    """The step of an epoch that the unit's clip unit is given; see docs/proofs.md.

    In shuffled epochs all others contribute -1, and batches are of public sizes, so
    that the swap shows.
    """
    design = step.design
    is_grouped = isinstance(design, GroupedClasses)
    inner = math.prod(rates[2 if is_grouped else 1 :])
    is_top = len(rates) == 1 and not is_grouped
    relation = step.neighboring_relation
    if is_top and relation == "add_remove":
        return _table(1.0, [1.0], [shift], [0.0])
    if isinstance(epoch_scheme(design), ShuffledEpochs):
        null = shift if relation == "zero_out" else 0.0
        return _table(1.0, [1 - inner, inner], [0.0, 2 * shift], [0.0, null])
    null = 0.0 if relation == "zero_out" else -shift
    if is_top:
        return _table(1.0, [1.0], [shift], [null])
    return _table(1.0, [1 - inner, inner], [-shift, shift], [-shift, null])


def _grouped(design: GroupedClasses, rates: list[float], shift: float) -> Branches:
    """Episodes of classes: with rates of episode, class and, below it, example."""
    episode, class_, *below = rates
    inner = math.prod(below)
    if design.episodes is not None:
        if isinstance(design.episodes, Poisson):
            return _antipodal(1.0, episode, inner, shift)
        return _swapped(1.0, episode * class_ * inner, 2 * shift)
    # Drawn classes that the grouping leaves over are in no episode.
    classes, ways = int(np.asarray(design.num_classes)), int(np.asarray(design.ways))
    scheme: Any = design.classes
    if isinstance(scheme, Poisson):
        drawn, weight = _binomial(classes, class_)
        placed = float(np.sum(weight * (drawn // ways * ways))) / classes
        # How many episodes there are is itself random: the others contribute nothing.
        return _antipodal(1.0, placed, inner, shift)
    drawn = min(int(np.asarray(scheme.size)), classes)
    return _swapped(1.0, drawn // ways * ways / classes * inner, 2 * shift)


def _several_episodes(design: Any, rate: float, shift: float) -> Branches:
    """All episodes contribute -1, those that hold the unit +1."""
    number, weight = _binomial(int(np.asarray(design.num_episodes)), rate)
    return _table(1.0, weight, 2 * shift * number, np.zeros(len(number)))


def _drawn(
    outer: float,
    rate: float,
    number: tuple[np.ndarray, np.ndarray],
    shift: float,
    *,
    absent: float,
) -> Branches:
    """A unit that makes a random number of contributions if it is drawn."""
    times, weight = number
    weights = np.concatenate([[1 - rate], rate * weight])
    means = np.concatenate([[0.0], shift * times])
    return _table(outer, weights, means, absent * means)


def _swapped(outer: float, rate: float, shift: float) -> Branches:
    """The mean is ``shift`` where the unit is reached, else 0."""
    table = _table(outer, [1 - rate, rate], [0.0, shift], [0.0, 0.0])
    return table._replace(mirror=0.5 * shift)


def _antipodal(outer: float, rate: float, inner: float, shift: float) -> Branches:
    """Not drawn; drawn and not reached; reached."""
    return _table(
        outer,
        [1 - rate, rate * (1 - inner), rate * inner],
        [0.0, -shift, shift],
        [0.0, -shift, -shift],
    )


def _null(outer: float, rate: float, inner: float, shift: float) -> Branches:
    """As `_antipodal`, with 0 in place of the contribution that holds the unit."""
    table = _antipodal(outer, rate, inner, shift)
    return table._replace(without_unit=np.minimum(table.with_unit, 0.0))


def _table(outer: float, weight: Any, with_unit: Any, without_unit: Any) -> Branches:
    return Branches(
        outer_rate=float(outer),
        weight=np.asarray(weight, np.float64),
        with_unit=np.asarray(with_unit, np.float64),
        without_unit=np.asarray(without_unit, np.float64),
        mirror=0.0,
        multiplier=np.ones(1),
        multiplier_weight=np.ones(1),
        is_mirrored=False,
    )


def _contributions(levels: tuple[Scheme, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Distribution of the number of clipped contributions of one drawn unit."""
    number, weight = np.ones(1), np.ones(1)
    for scheme in levels:
        if isinstance(scheme, WithoutReplacement):
            size = int(np.asarray(scheme.size))
            if scheme.population is not None and scheme.population_is_exact:
                size = min(size, int(np.asarray(scheme.population)))
            number = number * size
            continue
        assert isinstance(scheme, Poisson)  # nothing is drawn by epochs down here
        children = int(np.asarray(scheme.population))
        rate = float(np.asarray(scheme.sampling_probability))
        mass = np.zeros(int(number.max()) * children + 1)
        _check_number(len(mass) - 1)
        for times, chance in zip(number, weight, strict=True):
            drawn, chances = _binomial(int(times) * children, rate)
            mass[drawn.astype(int)] += chance * chances
        number, weight = np.flatnonzero(mass).astype(np.float64), mass[mass > 0]
    return number, weight


def _binomial(trials: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """A binomial distribution without negligible values, as numbers and chances."""
    if trials * rate > _MOST_CONTRIBUTIONS**2:
        _check_number(trials)
    tail = _TAIL_DEVIATIONS * (math.sqrt(trials * rate + 1) + 1)
    last = min(trials, int(trials * rate + tail))
    number = np.arange(last + 1).astype(np.float64)
    mass = np.exp(log_binomial_mass(number, np.asarray(trials), np.asarray(rate)))
    kept = mass > _NEGLIGIBLE
    return number[kept], mass[kept] / mass[kept].sum()


def _check_number(most: int) -> None:
    if most > _MOST_CONTRIBUTIONS:
        raise NotImplementedError(
            f"an audit simulates at most {_MOST_CONTRIBUTIONS} contributions of one "
            f"unit in a step, got up to {most:,}"
        )


def _at(field: np.ndarray, path: int) -> Any:
    """The value of one path; fields that are alike for all paths have length 1."""
    field = np.atleast_1d(field)
    return field[min(path, field.shape[-1] - 1)]
