"""Roots of monotone functions, for many elements at once.

`largest_within` runs on the host, `smallest_within` is a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.numerics.loops import Array, namespace, while_loop

_MAX_EVALUATIONS = 200
# `largest_within`: largest and smallest first step, in log x, and the largest factor.
_FARTHEST = np.log(16.0)
_NEAREST = 5e-4
_LARGEST_FACTOR = 1e4
# `smallest_within`: relative width of the final bracket.
_WIDTH = 2e-15
# `smallest_within`: factor between the points tried for a bracket.
_FACTOR = 64.0
# `smallest_within`: range of these points.
_SMALLEST = 1e-30
_LARGEST = 1e36
# Absolute value at which function values are clipped, as they may be infinite.
_CLIP = 1e8


def largest_within(
    excess: Callable[[np.ndarray, np.ndarray], np.ndarray],
    start: np.ndarray,
    ends: tuple[Any, Any],
    *,
    slope: float,
    tolerance: float | np.ndarray = 0.0,
    whole: int = 0,
) -> np.ndarray:
    """Largest x between two ends that was evaluated and has ``excess(x) <= 0``, or 0.

    ``excess(x, index)`` is increasing, for the elements ``index``: the logarithm of a
    ratio. ``slope`` is a lower estimate of its derivative by log x, ``tolerance`` is
    relative. With ``whole=1`` x is a whole number, with -1 the inverse of one.

    Raises:
      RuntimeError: no convergence, as the function is not increasing.
    """
    # From the start by growing factors until the sign changes. Then the secant method
    # in (log x, excess) in a bracket; in (log x, ratio) where the ratio is 0 at the
    # lower end. Points are placed half a tolerance beside the estimate, so that both
    # ends converge.
    floor, ceiling, tolerances = (
        np.broadcast_to(a, start.shape) for a in (*ends, tolerance)
    )
    x, active = np.clip(start, floor, ceiling), np.arange(start.size)
    # Ends (0: not known) and their values, the last point and value, the last factor.
    state = np.repeat([0.0, 0.0, *5 * [np.nan]], x.size).reshape(7, -1)
    widths = np.full((2, x.size), np.inf)  # of the last two brackets
    for _ in range(_MAX_EVALUATIONS):
        if active.size == 0:
            return state[0]
        low, high, below, above, last_x, last_f, factor = state[:, active]
        at, f = x[active], excess(x[active], active)
        within, had_both = f <= 0, (low > 0) & (high > 0)
        low, high = np.where(within, (at, high), (low, at))
        below, above = np.where(within, (f, above), (below, f))
        both = (low > 0) & (high > 0)
        is_new = both & ~had_both
        with np.errstate(all="ignore"):
            # Towards the other sign.
            first = np.exp(np.maximum(np.fmin(np.abs(f) / slope, _FARTHEST), _NEAREST))
            grown = np.fmin(factor * factor, _LARGEST_FACTOR)
            factor = np.where(np.isnan(factor), first, grown)
            moved = at * np.where(within, factor, 1 / factor)
            # Within the bracket.
            new_x, new_f = np.where(is_new, (high, above), (at, f))
            old_x, old_f = np.where(is_new, (low, below), (last_x, last_f))
            is_ratio, known = np.isneginf(below) & ~is_new, np.isfinite(f)
            new, old = np.where(is_ratio, np.expm1((new_f, old_f)), (new_f, old_f))
            incline = (new - old) / np.log(new_x / old_x)
            trial = new_x * np.exp(-new / incline)
            width = np.log(high) - np.log(low)
            # Towards the farther end.
            nudge = 1 + (0.5 * high**-whole if whole else 0.4 * tolerances[active])
            nudge = np.where(high / trial > trial / low, nudge, 1 / nudge)
            trial = np.where(is_new, trial, trial * nudge)
            stuck = ~((incline > 0) & (known | is_new) & (trial > low) & (trial < high))
            stuck |= ~(np.abs(new) <= 0.1 * np.abs(old)) & (
                width > 0.5 * widths[0, active]
            )
            trial = np.where(stuck, np.sqrt(low) * np.sqrt(high), trial)
            is_open = high - low > tolerances[active] * low
            if whole:
                numbers = np.sort((low**whole, high**whole), axis=0)
                is_open = numbers[1] - numbers[0] > 1.5
                inside = np.rint(trial**whole)
                trial = np.clip(inside, numbers[0] + 1, numbers[1] - 1) ** whole
                moved = np.rint(moved**whole) ** whole
        least, most = floor[active], ceiling[active]
        x[active] = np.where(both, trial, np.clip(moved, least, most))
        last = np.where(known, (at, f), (last_x, last_f))
        end = np.where(np.isneginf(below), (high, above), (low, below))
        state[:, active] = low, high, below, above, *np.where(is_new, end, last), factor
        widths[:, active] = np.where(had_both, (widths[1, active], width), np.inf)
        going = np.where(within, at < most, at > least)
        active = active[np.where(both, is_open, going)]
    raise RuntimeError(f"no convergence after {_MAX_EVALUATIONS} evaluations")


def smallest_within(function: Callable[[Array], Array], start: Array) -> Array:
    """Approximates the smallest x with ``function(x) <= 0``, function decreasing.

    inf where the function is positive or NaN up to 1e36. Reference: Chandrupatla
    (1997), Advances in Engineering Software 28, 145-149.
    """
    first = function(start)
    xp = namespace(start, first)

    def known(f: Array) -> Array:  # NaN counts as positive
        return xp.where(f <= 0, xp.maximum(f, -_CLIP), xp.where(f > 0, f, _CLIP))

    searched = start > 0

    def unbracketed(state: tuple[Array, ...]) -> Array:
        (x, f), (other, _) = state
        away = xp.where(f > 0, x < _LARGEST, x > _SMALLEST)
        return searched & away & (other == x)

    def step_out(state: Any) -> Any:
        (x, f), (other, g) = state
        moved = unbracketed(state)
        probe = xp.where(moved, xp.where(f > 0, x * _FACTOR, x / _FACTOR), x)
        value = known(function(probe))
        # The two ends become different when the sign changes.
        crossed = (value > 0) != (f > 0)
        other = xp.where(moved & ~crossed, probe, other)
        g = xp.where(moved & ~crossed, value, g)
        return (xp.where(moved, probe, x), xp.where(moved, value, f)), (other, g)

    ends = ((start, known(first)), (start, known(first)))
    new, old = while_loop(xp, lambda state: xp.any(unbracketed(state)), step_out, ends)
    lost = searched & ~(new[1] <= 0) & (new[0] == old[0])

    def unsettled(state: tuple[Any, ...]) -> Array:
        count, (x, _), (other, _), _, _ = state
        wide = xp.abs(x - other) > _WIDTH * xp.maximum(x, other)
        return (count < _MAX_EVALUATIONS) & xp.any(wide)

    def interpolate(state: tuple[Any, ...]) -> tuple[Any, ...]:
        count, (x1, f1), (x2, f2), _, share = state
        x = x1 + share * (x2 - x1)
        f = known(function(x))
        same = (f > 0) == (f1 > 0)
        x3, f3 = xp.where(same, x1, x2), xp.where(same, f1, f2)
        x2, f2 = xp.where(same, x2, x1), xp.where(same, f2, f1)
        least = 0.5 * _WIDTH * xp.maximum(x, x2) / xp.maximum(xp.abs(x2 - x), _SMALLEST)
        share = xp.clip(_share((x, f), (x2, f2), (x3, f3)), least, 1 - least)
        return count + 1, (x, f), (x2, f2), (x3, f3), share

    state = (np.int64(0), new, old, old, xp.full_like(start, 0.5))
    _, new, old, _, _ = while_loop(xp, unsettled, interpolate, state)
    found = xp.where(new[1] <= 0, new[0], old[0])
    return xp.where(lost, xp.inf, found)


def _share(new: Any, old: Any, before: Any) -> Array:
    """Next point, as a fraction of the way from ``new`` to ``old``."""
    (x1, f1), (x2, f2), (x3, f3) = new, old, before
    xp = namespace(x1, f1)
    with np.errstate(all="ignore"):
        xi = (x1 - x2) / (x3 - x2)
        phi = (f1 - f2) / (f3 - f2)
        fits = (phi * phi < xi) & ((1 - phi) ** 2 < 1 - xi)
        share = f1 / (f2 - f1) * f3 / (f2 - f3)
        share = share + (x3 - x1) / (x2 - x1) * f1 / (f3 - f1) * f2 / (f3 - f2)
    # A fraction of 0 or 1 means a value of 0 there: the root is next to it.
    return xp.where(fits & (share >= 0) & (share <= 1), share, 0.5)
