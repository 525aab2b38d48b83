"""Sampling rates along every path, from a sampling and an optional population."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    EpochScheme,
    GroupedClasses,
    IndependentEpisodes,
    MultistageSampling,
    PeopleBlocks,
    Poisson,
    Sampling,
    Scheme,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.population import DistinctPaths, Population
from jaxdp_episodic.accountant.describe.spec import checked
from jaxdp_episodic.accountant.numerics.binomial import log_binomial_tail

NEIGHBORING_RELATIONS = ("add_remove", "replace_one", "zero_out")
Relation = Annotated[
    str, functools.partial(_validation.choice, allowed=NEIGHBORING_RELATIONS)
]


@dataclass(frozen=True, eq=False)
class PathRates:
    """Rates of every level along P distinct paths, each (*shape of the scheme, P)."""

    rates: tuple[np.ndarray, ...]  # probability to draw a child of a drawn parent
    group_sizes: tuple[np.ndarray | None, ...]  # number of children; None if unknown
    # Number of children drawn without replacement; None for other schemes.
    draw_sizes: tuple[np.ndarray | None, ...]
    sizes_are_exact: tuple[bool, ...]  # whether the level's spec states that
    multiplicity: np.ndarray  # (P,) number of units of the last level on each path
    paths: DistinctPaths | None  # of the population

    @property
    def num_levels(self) -> int:
        """Number of levels; the last one is that of the protected unit."""
        return len(self.rates)

    @property
    def clipped(self) -> tuple[np.ndarray, ...]:
        """For each level, where a draw takes more children than there are (rate 1)."""
        return tuple(
            np.zeros(1, bool) if draw is None or group is None else draw > group
            for draw, group in zip(self.draw_sizes, self.group_sizes, strict=True)
        )

    def covers_all(self, level: int, neighboring_relation: str) -> np.ndarray:
        """Where all children are certainly drawn in both neighbours; False is safe."""
        draw, group = self.draw_sizes[level - 1], self.group_sizes[level - 1]
        if draw is None or group is None:
            return self.rates[level - 1] == 1
        if self.sizes_are_exact[level - 1]:
            return draw >= group
        if self.paths is None:
            return np.zeros(np.broadcast_shapes(draw.shape, group.shape), bool)
        may_join = neighboring_relation == "add_remove" and level == self.num_levels
        return draw >= group + int(may_join)


def path_rates(
    sampling: MultistageSampling | GroupedClasses | PeopleBlocks,
    population: Population | None = None,
    num_levels_used: int | None = None,
) -> PathRates:
    """Returns the rates of each level along every distinct path."""
    checked("sampling", sampling, MultistageSampling | GroupedClasses | PeopleBlocks)
    checked("population", population, Population | None)
    names, paths = sampling.level_names, None
    used = len(names) if num_levels_used is None else num_levels_used
    schemes: tuple[Scheme | None, ...] = sampling.schemes
    sizes: list[Any] = [None] * len(names)  # of each level, where others do not say
    if not isinstance(sampling, MultistageSampling):
        sizes[0] = np.asarray(sampling.num_possible_episodes, np.int64)[..., None]
    if isinstance(sampling, GroupedClasses):
        schemes = sampling.episodes, sampling.classes, sampling.examples
        sizes[1] = np.asarray(sampling.num_classes, np.int64)[..., None]
        if population is not None:
            _check_fits(names[1:], population)
            classes = population.num_units(1)
            if np.any(np.asarray(sampling.num_classes) != classes):
                raise ValueError(
                    f"population must have num_classes={sampling.num_classes!r} units "
                    f"at its first level, got {classes}"
                )
            paths = population.distinct_paths(max(used - 1, 1))
            sizes[2] = paths.sizes[:, -1]
    elif population is not None and isinstance(sampling, MultistageSampling):
        _check_fits(names[:used], population)
        paths = population.distinct_paths(used)
        sizes[:used] = paths.sizes.T
    columns = zip(*map(_level_rates, schemes[:used], sizes), strict=True)
    multiplicity = np.ones(1, np.int64) if paths is None else paths.multiplicity
    return PathRates(*columns, multiplicity=multiplicity, paths=paths)


def inclusion_rates(
    sampling: Sampling, population: Population | None = None
) -> np.ndarray:
    """Returns the probability that a unit of the last level takes part in a step.

    *Exact* for exact sizes and an *upper bound* for lower bounds on sizes, for
    `GroupedClasses`, whose left-out classes are ignored, and for `PeopleBlocks`: the
    sum over a block's episodes, without left-out people.

    Use it for reports only: an epsilon computed with it as a sampling rate is too
    small. See docs/theory.md, "Why the product rate alone is wrong".

    Returns:
      float64 of the sampling's shape; with a ``population``, a last axis over the
      distinct paths is added.
    """
    drawn = sampling.sampling if isinstance(sampling, IndependentEpisodes) else sampling
    levels = path_rates(drawn, population)
    shape = (*sampling.shape, len(levels.multiplicity))
    inclusion = np.broadcast_to(inclusion_along(levels, sampling), shape)
    return inclusion[..., 0][()] if population is None else np.array(inclusion)


def inclusion_along(levels: PathRates, sampling: Sampling) -> np.ndarray:
    """Returns the (..., P) probability that a unit of the last level takes part."""
    inclusion = functools.reduce(np.multiply, levels.rates)
    if isinstance(sampling, IndependentEpisodes):
        episodes = np.asarray(sampling.num_episodes)[..., None]
        with np.errstate(divide="ignore"):  # log1p(-1) = -inf is correct
            inclusion = -np.expm1(episodes * np.log1p(-inclusion))
    elif isinstance(sampling, PeopleBlocks):
        inclusion = inclusion * np.asarray(sampling.episodes_per_block)[..., None]
    return np.minimum(inclusion, 1.0)


def max_contributions(
    sampling: MultistageSampling,
    population: Population | None = None,
    *,
    unit_level: int,
    clip_level: int,
    neighboring_relation: str,
) -> np.ndarray:
    """Returns the largest number of clipped contributions of a protected unit."""
    if population is not None:
        _check_fits(sampling.level_names[:clip_level], population)
        if neighboring_relation != "add_remove":
            return population.max_contributions(sampling.levels, unit_level, clip_level)
    bound = np.asarray(1, np.int64)
    for level in range(unit_level, clip_level):
        at = level, neighboring_relation
        children = most_children_drawn(sampling, population, *at)
        if np.any(bound * children.astype(np.float64) > 2**53):
            raise ValueError("one unit must make at most 2**53 contributions, got more")
        bound = np.asarray(bound * children)
    return bound[()]


def most_children_drawn(
    sampling: MultistageSampling,
    population: Population | None,
    level: int,
    neighboring_relation: str,
) -> np.ndarray:
    """Returns a public bound on the drawn children of one unit of a level."""
    scheme, largest = sampling.levels[level], 0
    bound: Any = scheme.population
    is_fixed = isinstance(scheme, WithoutReplacement)
    if population is not None:
        largest = int(np.max(population.children_counts[level], initial=0))
    if population is not None and neighboring_relation != "add_remove":
        bound = max(largest, 1)  # nobody joins
    elif is_fixed and not scheme.population_is_exact:
        return np.asarray(scheme.size, np.int64)  # its population is a lower bound
    elif bound is None:
        raise ValueError(
            f"level {scheme.name!r}: population must be a public upper bound on how "
            "many of its units one protected unit can have, as each is clipped by "
            "itself; got None"
        )
    elif np.any(np.less(bound, largest)):
        raise ValueError(
            f"level {scheme.name!r}: population must be an upper bound on the "
            f"children of one unit, got {scheme.population!r}, but the "
            f"Population has a unit with {largest}"
        )
    bound = np.asarray(bound, np.int64)
    return np.minimum(scheme.size, bound) if is_fixed else bound


def _level_rates(
    scheme: Scheme | None, sizes: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, bool]:
    """One level's entries of `PathRates`; ``sizes`` replace the scheme's population."""
    group = sizes
    if scheme is None:  # all are drawn
        return np.ones(1), group, None, False
    if group is None and scheme.population is not None:
        group = np.asarray(scheme.population, np.int64)[..., None]
    if isinstance(scheme, Poisson):
        rate = np.asarray(scheme.sampling_probability, np.float64)[..., None]
        return rate, group, None, False
    if isinstance(scheme, EpochScheme):
        steps = np.asarray(scheme.steps_per_epoch, np.float64)
        # A unit picks one step of each block: the shortest block has the largest rate.
        return 1 / np.floor_divide(steps, scheme.times)[..., None], group, None, False
    if group is None:
        raise ValueError(
            f"level {scheme.name!r}: WithoutReplacement needs population=, the number "
            "of children in the larger neighbour or a public lower bound on it; or "
            "the step needs a Population"
        )
    draw = np.asarray(scheme.size)[..., None]  # real in differences
    exact = scheme.population_is_exact and sizes is None
    return np.minimum(draw, group) / group, group, draw, exact


def _check_fits(level_names: tuple[str, ...], population: Population) -> None:
    """Refuses a population with too few levels or with other names."""
    pairs = zip(level_names, population.level_names, strict=False)
    if population.num_levels < len(level_names) or any(a != b for a, b in pairs):
        raise ValueError(
            f"population must have at least {len(level_names)} levels {level_names} "
            f"as the sampling has, got {population.level_names} and "
            f"{population.num_levels} levels in all"
        )


# --- A Poisson sample truncated at random: docs/proofs.md ---

# Relative increase of the probabilities: twice the error of binomial tails, 1e-10.
_RAISED = 2e-10
# Exceeds the relative rounding error of the logarithm of a tiny tail.
_LOG_ROUNDING = 1e-14
_TINY = float(np.finfo(np.float64).tiny)


def cut_weights(
    population: np.ndarray, batch_size: np.ndarray, rate: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the logs of P(M < b) and P(M >= b), r, and a factor for lower bounds."""
    # M other units are in the sample, b is the batch size; all three are upper bounds.
    # r = E[q b / (M + 1) | M >= b] = b P(Binomial(N, q) > b) / (N P(M >= b)). The
    # factor is within 1e-9 of 1, unless of 1e8 units the batch is hardly ever full.
    n, b, q = np.broadcast_arrays(population, batch_size, rate)
    inside = (q > 0) & (q < 1)
    p = np.where(inside, np.maximum(q, _TINY), 0.5)  # odds of less overflow
    others = n - 1
    never, always = q <= 0, others >= b

    def weights(side: str, other: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        whole = log_binomial_tail(others - b + 1, others, 1 - p, side=side)
        cut = log_binomial_tail(b, others, p, side=side)
        beneath = log_binomial_tail(b, others, p, side=other)
        joint = log_binomial_tail(b + 1, n, p, side=side)
        known = np.where(never, b > 0, ~always), np.where(never, b <= 0, always)
        whole, cut = (
            np.where(inside, log, np.where(is_sure, 0.0, -np.inf))
            for log, is_sure in zip((whole, cut), known, strict=True)
        )
        seen = beneath > np.log(_TINY)
        beneath = np.where(seen, beneath, 0.0)
        share = np.where(seen, np.exp(joint - beneath) * b / n, np.inf)
        drawn = np.where(inside, share, np.where(never, 0.0, b / n))
        # If all of M >= b, M + 1 is at least b + 1.
        drawn = np.minimum(drawn, q * b / (b + 1))
        return whole, cut, drawn

    *most, drawn = weights("upper", "lower")
    *least, share = weights("lower", "upper")
    most = [np.minimum(log * (1 - _LOG_ROUNDING) + _RAISED, 0.0) for log in most]
    drawn = np.minimum(np.maximum(drawn * (1 + 2 * _RAISED), _TINY * (b > 0)), q)
    sure = np.divide(share, drawn, out=np.ones(n.shape), where=drawn > 0)
    for high, low in zip(most, least, strict=True):
        below = np.subtract(low, high, out=np.zeros(n.shape), where=high > -np.inf)
        sure = np.minimum(sure, np.exp(below))
    sure = np.where(inside, sure * (1 - 2 * _RAISED), 1 - 4 * _RAISED)
    return most[0], most[1], drawn, sure
