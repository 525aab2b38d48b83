"""Roots of monotone functions, for many elements at once.

`largest_within` runs on the host, `smallest_within` is a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.numerics.loops import Array, namespace, while_loop

_MAX_EVALUATIONS = 200
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
    low: np.ndarray,
    high: np.ndarray,
    *,
    tolerance: float | np.ndarray,
    integer: bool = False,
    ends: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Largest x in [low, high) that was evaluated and has ``excess(x) <= 0``.

    ``excess(x, index)`` is increasing, for the elements ``index``: the logarithm of a
    ratio. ``tolerance`` is relative; ``ends`` are the values at low and high, if known.

    Raises:
      RuntimeError: no convergence, as the function is not increasing.
    """
    # The secant method in (log x, excess) in a bracket; in (log x, ratio) where the
    # ratio is 0 at the lower end. Points are placed half a tolerance beside the
    # estimate, so that both ends converge.
    low, high = np.array(low, np.float64), np.array(high, np.float64)
    last_x, last_f = low.copy(), np.full(low.shape, np.nan)
    old_width = np.full((2, *low.shape), np.inf)
    trial = np.sqrt(low) * np.sqrt(high)
    below = last_f.copy()
    if ends is not None:
        below, above = (np.array(end, np.float64) for end in ends)
        is_zero = np.isneginf(below)
        last_x, last_f = np.where(is_zero, (high, above), (low, below))
        first = _secant(high, above, last_x, last_f)
        inside = (first > low) & (first < high)
        trial = np.where(inside, first, trial)
    for _ in range(_MAX_EVALUATIONS):
        open_ = high - low > (1 if integer else tolerance * low)
        active = np.flatnonzero(open_)
        if active.size == 0:
            return low
        x = trial[active]
        if integer:
            x = np.clip(np.rint(x), low[active] + 1, high[active] - 1)
        f = excess(x, active)
        within = f <= 0
        low[active] = np.where(within, x, low[active])
        high[active] = np.where(within, high[active], x)
        below[active] = np.where(within, f, below[active])
        last = last_x[active], last_f[active]
        values = np.array([f, last[1]])
        with np.errstate(over="ignore"):
            values = np.where(np.isneginf(below[active]), np.expm1(values), values)
        new, old = values
        known = np.isfinite(f)  # other points give no line
        trial[active] = np.where(known, _secant(x, new, last[0], old), np.nan)
        slow = np.ones(low.shape, bool)
        slow[active] = ~(np.abs(new) <= 0.1 * np.abs(old))
        last_x[active], last_f[active] = np.where(known, (x, f), last)
        # Finished elements may have high = 0, but these results are not used.
        with np.errstate(divide="ignore", invalid="ignore"):
            width = np.log(high) - np.log(low)
            # Towards the farther end.
            nudge = 1 + (0.5 / high if integer else 0.4 * tolerance)
            trial *= np.where(high / trial > trial / low, nudge, 1 / nudge)
        stuck = ~(trial > low) | ~(trial < high)
        stuck |= slow & (width > 0.5 * old_width[0])
        trial = np.where(stuck, np.sqrt(low) * np.sqrt(high), trial)
        old_width = np.stack([old_width[1], width])
    raise RuntimeError(f"no convergence after {_MAX_EVALUATIONS} evaluations")


def _secant(
    x: np.ndarray, f: np.ndarray, last_x: np.ndarray, last_f: np.ndarray
) -> np.ndarray:
    """Root of the line through two points in (log x, f); NaN if it does not rise."""
    with np.errstate(all="ignore"):
        slope = (f - last_f) / np.log(x / last_x)
        trial = x * np.exp(-f / slope)
    return np.where((slope > 0) & np.isfinite(trial), trial, np.nan)


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
