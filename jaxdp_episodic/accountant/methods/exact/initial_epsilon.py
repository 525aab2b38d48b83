"""A first guess of epsilon at a delta, for which a first contour is laid."""

# Pure kernels.

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.gaussian import log_gaussian_profile
from jaxdp_episodic.accountant.methods.exact.contour import (
    Transform,
    largest_center,
    transform,
)
from jaxdp_episodic.accountant.methods.exact.mgf import (
    Steps,
    bulk_variance,
    checked_moment,
    exchanged_moments,
    real_moments,
)
from jaxdp_episodic.accountant.methods.rdp.first_order import first_order
from jaxdp_episodic.accountant.methods.rdp.kernels import epsilon_at, log_delta_at
from jaxdp_episodic.accountant.methods.run import Group
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    logsumexp,
    namespace,
    rows_at,
    where_needed,
)
from jaxdp_episodic.accountant.numerics.roots import log_crossing

# Saddle points tried, relative to the guess of Rényi's best order less 1, which of 400
# random settings was 0.4 to 40 times as large as that.
_SADDLE_POINTS = 1.75 ** np.arange(-8.0, 5.0)
# Range of that guess, order less 1.
_LEAST_ORDER = 1e-12
_LARGEST_ORDER = 1e12
# Orders at which the backward direction is bounded: their excess over 1 relative to the
# forward direction's best. Far above it where only that has rare large losses.
ORDER_FACTORS = np.array([1.0, 1.6, 4.0, 16.0, 64.0])[:, None]
# Smallest epsilon searched for, as a share of Rényi's bound.
_SMALLEST = 1e-4
# Number of settings up to which, on NumPy, one round of many points is faster than two
# of few: its calls count, not its points.
_FEW = 4
# Points of a round, and rounds, where each takes long.
_FEW_POINTS = 7, 2
# Stands for log(0) where -inf would make NaN.
_LOG_ZERO = -1e300


def order_near(log_delta: Array, guess: Array) -> Array:
    """The best order of Gaussian steps whose epsilon at that delta is a guess."""
    # Their epsilon is mu²/2 + mu sqrt(2 l) at order 1 + sqrt(2 l) / mu, l = -log delta.
    xp = namespace(log_delta, guess)
    root, guess = xp.sqrt(-log_delta), xp.maximum(guess, 1e-300)
    # sqrt(l + epsilon) - sqrt(l), without cancellation
    return 1 + root * (xp.sqrt(root * root + guess) + root) / guess


class First(NamedTuple):
    """What is known of epsilon before there is a contour; (n,) arrays."""

    epsilon: Array  # an approximation, no bound
    highest: Array  # Rényi's bound of this direction, at the order
    order: Array  # the best of a few


def first_epsilon(
    log_delta: Array,
    highest: Array,
    fields: tuple[Group, ...],
    groups: tuple[Steps, ...],
    bulk: Array | None = None,
) -> First:
    """An approximation of epsilon at the given delta, below ``highest``; (n,)."""
    # By the saddle-point approximation of delta; where there is none, because rare
    # large losses stand apart, by the larger delta of the two parts.
    xp = namespace(log_delta, highest, fields[0].count, groups[0].count)
    bulk = bulk_variance(groups) if bulk is None else bulk
    guess = xp.exp(first_order(fields, -log_delta))
    guess = xp.clip(guess, _LEAST_ORDER, _LARGEST_ORDER)
    c = xp.minimum(guess * _SADDLE_POINTS[:, None], largest_center(log_delta, groups))
    moments = real_moments(c, groups)
    bounds = epsilon_at(log_delta, c, moments[0])
    best = xp.where(xp.isnan(bounds), xp.inf, bounds).argmin(axis=0)[None]
    order, found = 1 + rows_at(c, best)[0], rows_at(moments[0], best)
    # An answer may rest on this bound: it has to hold by either rule.
    bound = epsilon_at(
        log_delta, order - 1, checked_moment(order[None] - 1, found, groups)[0]
    )
    bound = xp.where(bound >= 0, bound, xp.where(bound < 0, 0.0, xp.inf))
    highest = xp.minimum(highest, bound)
    near = _by_saddle_points(log_delta, c, moments, bulk, groups)
    near = where_needed(
        (near > 0) & (near < highest),
        near,
        functools.partial(_by_jumps, few=xp is np and np.size(highest) <= _FEW),
        (log_delta, highest, bulk, fields),
    )
    return First(near, highest, order)


def exchanged_is_less(
    log_delta: Array, epsilon: Array, order: Array, steps: Steps
) -> Array:
    """Where Rényi says that one step's exchanged pair has less delta, (n,)."""
    xp = namespace(log_delta, epsilon, order, steps.count)
    c = (order - 1) * ORDER_FACTORS
    bounds = log_delta_at(xp.maximum(epsilon, 0.0), c, exchanged_moments(c, steps))
    return xp.any(bounds < log_delta, axis=0)


def _by_jumps(
    log_delta: Array,
    highest: Array,
    bulk: Array,
    fields: tuple[Group, ...],
    few: bool,
) -> Array:
    """Epsilon at which the bulk and the sum of forward profiles are delta."""
    xp = namespace(log_delta, highest, bulk, fields[0].count)
    mu = xp.sqrt(xp.maximum(bulk, 0.0))

    def excess(epsilon: Array) -> Array:
        """Of log(delta) at (G, n) epsilons."""
        small = xp.where(mu > 0, log_gaussian_profile(mu, epsilon), _LOG_ZERO)
        once = [small[:, None]]
        for group in fields:
            forward, _ = group.loss.log_tails(epsilon[:, None])
            log_count = xp.log(xp.maximum(group.count, 1e-300))
            once.append(forward[0] + log_count)
        every = xp.maximum(xp.concatenate(once, axis=1), _LOG_ZERO)
        return logsumexp(xp.moveaxis(every, 1, 0)) - log_delta

    low = _SMALLEST * highest
    points, refinements = (101, 1) if few else (5, 3)
    if not all(group.loss.compiles for group in fields):
        points, refinements = _FEW_POINTS
    return log_crossing(
        excess, low, highest, num_points=points, num_refinements=refinements
    )


def _by_saddle_points(
    log_delta: Array,
    c: Array,
    moments: tuple[Array, ...],
    bulk: Array,
    groups: tuple[Steps, ...],
) -> Array:
    """Epsilon where the saddle-point approximation is delta; NaN if it is nowhere."""
    xp = namespace(log_delta, c, bulk, groups[0].count)
    with_bulk = transform(c, bulk, groups, moments)
    plain = transform(c, xp.zeros_like(bulk), groups, moments)
    at = Transform(
        *(
            xp.where(with_bulk.valid, a, b)
            for a, b in zip(with_bulk, plain, strict=True)
        )
    )
    x = at.slope
    used = with_bulk.valid & (bulk > 0)
    mu = xp.sqrt(xp.where(bulk > 0, bulk, 1.0))
    known = xp.where(used, log_gaussian_profile(mu, xp.maximum(x, 0.0)), _LOG_ZERO)
    approximate = at.log_value - c * x - 0.5 * xp.log(2 * math.pi * at.curvature)
    approximate = xp.logaddexp(approximate, known)
    # delta falls with c: the last point above it, and the next one
    above = (approximate >= log_delta) & (x > 0)
    index = xp.arange(c.shape[0])[:, None]
    last = xp.where(above, index, -1).max(axis=0)
    ends = xp.array([last, xp.minimum(last + 1, c.shape[0] - 1)])
    ends = xp.maximum(ends, 0)
    (x, end), (value, other), (low, high) = (
        rows_at(a, ends) for a in (x, approximate, c)
    )
    # The slope of log(delta) is about -c, and c linear in between.
    drop = (value - log_delta) / (value - other)
    rise = (high + low) * drop
    share = rise / (low + xp.sqrt(low * low + (high - low) * rise))
    found = (last >= 0) & (drop >= 0) & (drop <= 1)
    return xp.where(found, x + share * (end - x), xp.nan)
