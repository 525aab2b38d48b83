"""Distributions of the number of clip units that hold a person, for one setting.

A distribution on the whole numbers is an array of log-probabilities, the first that
of 0. See docs/theory.md, "People".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.binomial import log_binomial, log_binomial_mass
from jaxdp_episodic.accountant.numerics.loops import logsumexp

# Probability of the lower tail that is moved up to the first value kept. Moving
# probability upwards can only raise the divergence.
_LOWER_TAIL = 1e-17
# The same for the upper tail, which is moved up to a few values.
_UPPER_TAIL = 1e-30
# Distance of the first of these values, in widths of what is kept; it doubles each
# time.
_FIRST_STEP = 1 / 8
# Probabilities that underflow are raised to this share of the largest one.
_VANISHED = 1e-300
# Largest number of binomial distributions times units, and of distributions: an epsilon
# then takes about 2 s, and is within 1 per cent of that with all distributions.
_MOST_TERMS = 20_000
_MOST_LAWS = 128
# Largest number of classes for which partitions are averaged, in .4 s; the time grows
# with the square. For more classes the worst partition is used.
MOST_AVERAGED = 10_000


class Stage(NamedTuple):
    """How the children of a drawn unit are drawn; fields may be arrays of settings."""

    bound: Any  # largest number of a unit's children that can hold the person
    rate: Any  # probability of Poisson sampling; unused otherwise
    size: Any  # number drawn without replacement; 0 for Poisson sampling
    group: Any  # children of a unit, or a lower bound; unused for Poisson sampling

    @property
    def is_poisson(self) -> bool:
        """Whether the children are Poisson sampled."""
        return self.size == 0


def log_drawn(stage: Stage) -> np.ndarray:
    """Returns the distribution of the drawn children that can hold the person."""
    if stage.is_poisson:
        return log_binomial_law(stage.bound, stage.rate)
    # Hypergeometric, from the ratios of successive probabilities.
    group, size = stage.group, min(stage.size, stage.group)
    bound = min(stage.bound, group)
    rest = group - bound
    low, high = int(max(0, size - rest)), int(min(bound, size))
    j = np.arange(low, high, dtype=np.float64)
    ratio = (bound - j) / (j + 1) * ((size - j) / (rest - size + j + 1))
    inside = np.concatenate([[0.0], np.cumsum(np.log(ratio))])
    return np.concatenate([np.full(low, -np.inf), inside - logsumexp(inside)])


def log_binomial_law(number: float, rate: float) -> np.ndarray:
    """Returns the log-probabilities of Binomial(number, rate)."""
    return log_binomial_mass(
        np.arange(int(number) + 1.0), np.asarray(number), np.asarray(rate)
    )


def probability_of_holding(stages: Sequence[Stage]) -> float:
    """Returns the probability that a drawn unit's content holds the person."""
    chance = 1.0
    for stage in reversed(stages):
        if stage.is_poisson:
            chance = probability_of_any(stage.bound, stage.rate * chance)
            continue
        law = log_drawn(stage)
        if chance == 1 and np.isneginf(law[0]):
            continue  # the draw always includes a child that holds the person
        some = probability_of_any(np.arange(1.0, len(law)), chance)
        chance = min(float(np.sum(np.exp(law[1:]) * some)), 1.0)
    return chance


def probability_of_any(number: Any, chance: float) -> Any:
    """Returns ``1 - (1 - chance)^number``."""
    with np.errstate(divide="ignore"):  # log1p(-1) = -inf is correct
        return -np.expm1(number * np.log1p(-chance))


def log_visible(
    stages: Sequence[Stage], most_kept: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many drawn units can hold the person: numbers, log-probabilities.

    Tails are moved up unless there are at most ``most_kept`` numbers.
    """
    numbers, masses = np.ones(1), np.zeros(1)
    for stage in stages:
        if stage.is_poisson:
            laws = [log_binomial_law(n * stage.bound, stage.rate) for n in numbers]
        else:
            laws = sums_of(log_drawn(stage), numbers)
        law = mixed(laws, masses)
        if len(law) <= most_kept:
            numbers = np.flatnonzero(law > -np.inf).astype(np.float64)
            masses = law[law > -np.inf]
        else:
            numbers, masses = tails_moved_up(law)
    return numbers, masses


def log_held(law: np.ndarray, chance: float) -> np.ndarray:
    """Returns the distribution of how many of a random number hold the person."""
    if chance >= 1:
        return law
    some = law > -np.inf
    numbers = np.arange(float(len(law)))[some]
    return mixed([log_binomial_law(n, chance) for n in numbers], law[some])


def mixed(laws: Sequence[np.ndarray], masses: np.ndarray) -> np.ndarray:
    """Returns the mixture of distributions with these log-probabilities."""
    table = np.full((len(laws), max(map(len, laws))), -np.inf)
    for row, law, mass in zip(table, laws, masses, strict=True):
        row[: len(law)] = law + mass
    return logsumexp(table)


def tails_moved_up(law: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the relevant values and their log-probabilities; moves tails upwards."""
    values = np.flatnonzero(law > -np.inf)
    mass = np.exp(law[values] - np.max(law[1:], initial=law[0]))
    total = mass[values > 0].sum() or mass.sum()
    first = int(np.searchsorted(np.cumsum(mass), _LOWER_TAIL * total))
    above = np.cumsum(mass[::-1])[::-1]
    last = int(np.flatnonzero(above > _UPPER_TAIL * total)[-1])
    width = max(values[last] - values[first], 1)
    step = np.maximum((values[last + 1 :] - values[last]) / (_FIRST_STEP * width), 1)
    # Values beyond the last are moved to the largest value of their group.
    group = np.concatenate(
        [np.maximum(np.arange(last + 1), first), last + 1 + np.floor(np.log2(step))]
    )
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    ends = np.append(starts[1:], len(values))
    ranges = zip(starts, ends, strict=True)
    kept = np.array([logsumexp(law[values[a:b]]) for a, b in ranges])
    return values[ends - 1].astype(np.float64), kept


def fewer_binomials(
    number: np.ndarray, log_none: np.ndarray, log_weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns fewer binomial distributions, of rounded up numbers, with weights."""
    # ``log_none`` is minus the log-probability of 0 successes.
    most = np.clip(_MOST_TERMS / max(np.max(number), 1.0), 2.0, _MOST_LAWS)
    if len(number) <= most:
        return number.astype(np.float64), log_none, log_weight
    totals = np.full(int(np.max(number)) + 1, -np.inf)
    np.logaddexp.at(totals, number, log_weight)
    numbers, _ = tails_moved_up(totals)
    # Divide the values between the two numbers by how much rounding each moves the
    # mean.
    each = min(np.max(log_none / np.maximum(number, 1)), 700.0)
    moved = np.ptp(numbers) * -(np.expm1(-each) + each * np.exp(-each))
    rest = np.ptp(np.minimum(log_none, 700.0)) * np.exp(-each) + 1e-300
    groups = int(np.clip(np.sqrt(most * moved / rest), 1, min(most, len(numbers))))
    ends = numbers[:: len(numbers) // -groups][::-1]
    place = np.searchsorted(ends, number)
    found = []
    for index, end in enumerate(ends):
        here = place == index
        none, inverse = _fewer(log_none[here], log_weight[here], int(most / len(ends)))
        weight = np.full(len(none), -np.inf)
        np.logaddexp.at(weight, inverse, log_weight[here])
        found.append((np.full(len(none), end), none, weight))
    count, none, weight = (np.concatenate(part) for part in zip(*found, strict=True))
    return count, none, weight


def _fewer(
    values: np.ndarray, log_weight: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns about ``most`` values, and which of them each value is raised to."""
    kept, place = np.unique(values, return_inverse=True)
    if len(kept) <= most:
        return kept, place
    counts = log_weight > np.max(log_weight) + np.log(_UPPER_TAIL)
    low, high = np.min(values[counts]), np.max(values[counts])
    with np.errstate(invalid="ignore"):  # inf - inf at rate 1: all are raised to inf
        step = max(high - low, 1e-300) / max(most - 1, 1)
        index = np.ceil((np.clip(values, low, high) - low) / step)
        # Beyond the relevant values steps grow.
        index += np.ceil(np.log2(1 + np.maximum(values - high, 0.0) / step))
    index, place = np.unique(index, return_inverse=True)
    largest = np.zeros(len(index))
    np.maximum.at(largest, place, values)
    return largest, place


def log_reached_worst(
    groups: float, ways: float, bound: float, chance: float
) -> np.ndarray:
    """The distribution of the groups that hold a person, in the worst partition."""
    each, more = divmod(int(min(bound, groups * ways)), int(groups))
    parts = [
        log_binomial_law(number, probability_of_any(times, chance) if times else 0.0)
        for number, times in ((more, each + 1), (groups - more, each))
    ]
    return _sum_of(*parts)


def log_reached_mean(
    classes: float, ways: float, bound: float, chance: float
) -> np.ndarray:
    """Returns the same averaged over random partitions, which leave out the rest."""
    ways, groups = int(ways), int(classes // ways)
    places = groups * ways
    held = log_held(log_drawn(Stage(bound, 0.0, places, classes)), chance)
    reached = np.arange(min(groups, len(held) - 1) + 1)
    law = np.where(reached == 0, 0.0, -np.inf)
    found = law + held[0]
    with np.errstate(divide="ignore"):
        log_of = np.log(np.arange(places + 1.0))
    new = log_of[places - reached * ways]
    # The classes that hold the person, and are not left out, get places one by one.
    for placed, mass in enumerate(held[1:]):
        now = slice(-(-placed // ways), placed + 2)  # numbers that are possible
        stays = law[now] + log_of[reached[now] * ways - placed]
        moves = np.append(-np.inf, (law[now] + new[now])[:-1])
        law[now] = np.logaddexp(stays, moves) - log_of[places - placed]
        found[now] = np.logaddexp(found[now], mass + law[now])
    return found


def log_unseen_groups(
    classes: float, ways: float, bound: float, chance: float, rate: float
) -> np.ndarray:
    """The joint distribution of n and c in Theorem A averaged over partitions."""
    # n of the person's groups are not drawn without the person (not in L), and hold c
    # of the person's classes: docs/proofs.md, "People in many units".
    groups, bound = int(classes // ways), int(bound)
    rest, most = int(classes - groups * ways), min(bound, groups)
    a = np.arange(min(int(ways), bound) + 1.0)
    choices = log_binomial(np.full_like(a, ways), a)
    with np.errstate(divide="ignore"):
        alone = a * np.log1p(-chance) if chance < 1 else np.where(a > 0, -np.inf, 0.0)
        seen = np.log(rate) + alone
        own = choices + np.log(-np.expm1(seen))
        others = choices + seen
    own[0], others[0] = -np.inf, 0.0
    out = np.arange(min(rest, bound) + 1.0)
    left_out = log_binomial(np.full_like(out, rest), out)
    found = np.full((most + 1, bound + 1), -np.inf)
    power = _times(_power(others, groups - most, bound + 1), left_out)
    for row in found[::-1]:
        row[:] = power[::-1]
        power = _times(power, others)
    number = np.arange(most + 1.0)
    found += log_binomial(np.full_like(number, groups), number)[:, None]
    power = np.where(np.arange(bound + 1) == 0, 0.0, -np.inf)
    for row in found:
        row += power
        power = _times(power, own)
    return found - logsumexp(found.ravel())


def _power(taps: np.ndarray, exponent: int, size: int) -> np.ndarray:
    """The logarithms of the first coefficients of a power; the first tap must be 1."""
    found = np.where(np.arange(size) == 0, 0.0, -np.inf)
    if exponent < size:
        for _ in range(exponent):
            found = _times(found, taps)
        return found
    k = np.arange(1.0, len(taps))
    for n in range(1, size):
        some = k[:n]
        terms = np.log(some * (exponent + 1) - n) + taps[1 : n + 1]
        found[n] = logsumexp(terms + found[max(n - len(k), 0) : n][::-1]) - np.log(n)
    return found


def _times(power: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """The logarithms of a product's coefficients, as many as the first factor has."""
    table = np.full((len(taps), len(power)), -np.inf)
    for a, tap in enumerate(taps):
        table[a, a:] = power[: len(power) - a] + tap
    return logsumexp(table)


def _sum_of(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The distribution of a sum of two independent numbers."""
    peaks = np.max(one), np.max(other)
    product = np.convolve(np.exp(one - peaks[0]), np.exp(other - peaks[1]))
    return np.log(np.maximum(product, _VANISHED)) + sum(peaks)


def sums_of(law: np.ndarray, numbers: np.ndarray) -> list[np.ndarray]:
    """Returns the distributions of sums of n independent numbers, n ascending."""
    found, power, reached = [], np.zeros(1), 0
    for number in numbers.astype(int):
        while reached < number:
            power, reached = _sum_of(power, law), reached + 1
        found.append(power)
    return found
