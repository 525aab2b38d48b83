"""Roots of monotone functions, for many elements at once, on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_MAX_EVALUATIONS = 200
_FARTHEST = np.log(16.0)  # largest first step, in log x
_NEAREST = 5e-4  # smallest first step
_LARGEST_FACTOR = 1e4  # between two points that are tried for a bracket


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
