"""Where a monotone function of many elements crosses 0.

`largest_within` is host-side NumPy: the functions it searches are whole accountants,
and only the elements that still move are evaluated. `log_crossing` is a kernel, for
rough answers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxdp_episodic.numerics.loops import Array, namespace

_MAX_EVALUATIONS = 200


def largest_within(
    excess: Callable[[np.ndarray, np.ndarray], np.ndarray],
    low: np.ndarray,
    high: np.ndarray,
    *,
    tolerance: float,
    integer: bool = False,
    ends: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Largest x in [low, high) that was seen to have ``excess(x) <= 0``.

    A secant in (log x, excess), kept inside the bracket; when neither the bracket
    halves in two steps nor the excess shrinks to a tenth, its middle. Probes are placed
    half a tolerance beside the estimate, on the side whose end is farther away, so that
    both ends close in.

    Args:
      excess: maps x (m,) and the indices (m,) of the elements meant to an increasing
        function of x, (m,); NaN counts as positive.
      low: (n,) > 0, known to have excess <= 0.
      high: (n,) > low, known to have excess > 0. An element with ``high <= low`` is
        finished: its answer is ``low``.
      tolerance: relative width of the final bracket; ignored if ``integer``.
      integer: search whole numbers only, to the last one.
      ends: (n,) what is known of the excess at ``low`` and at ``high``, NaN where
        nothing is.

    Returns:
      (n,) x with ``excess(x) <= 0`` in the very evaluation that was made, or ``low``.

    Raises:
      RuntimeError: no convergence, which a function that is not increasing at all
        can cause.
    """
    low, high = np.array(low, np.float64), np.array(high, np.float64)
    last_x, last_f = low.copy(), np.full(low.shape, np.nan)
    old_width = np.full((2, *low.shape), np.inf)
    guess = np.sqrt(low) * np.sqrt(high)
    if ends is not None:
        last_x, last_f = low.copy(), np.array(ends[0], np.float64)
        first = _secant(high, np.asarray(ends[1], np.float64), last_x, last_f)
        inside = (first > low) & (first < high)
        guess = np.where(inside, first, guess)
    for _ in range(_MAX_EVALUATIONS):
        open_ = high - low > (1 if integer else tolerance * low)
        active = np.flatnonzero(open_)
        if active.size == 0:
            return low
        x = _inside(guess[active], low[active], high[active], integer)
        f = excess(x, active)
        within = f <= 0
        low[active] = np.where(within, x, low[active])
        high[active] = np.where(within, high[active], x)
        guess[active] = _secant(x, f, last_x[active], last_f[active])
        slow = np.ones(low.shape, bool)
        slow[active] = ~(np.abs(f) <= 0.1 * np.abs(last_f[active]))
        last_x[active], last_f[active] = x, f
        # Finished elements may have high = 0; what comes out for them is not used.
        with np.errstate(divide="ignore", invalid="ignore"):
            width = np.log(high) - np.log(low)
            # The end that is farther from the estimate is the one to move.
            nudge = 1 + (0.5 / high if integer else 0.4 * tolerance)
            guess *= np.where(high / guess > guess / low, nudge, 1 / nudge)
        stuck = ~(guess > low) | ~(guess < high)
        stuck |= slow & (width > 0.5 * old_width[0])
        guess = np.where(stuck, np.sqrt(low) * np.sqrt(high), guess)
        old_width = np.stack([old_width[1], width])
    raise RuntimeError(f"no convergence after {_MAX_EVALUATIONS} evaluations")


def _secant(
    x: np.ndarray, f: np.ndarray, last_x: np.ndarray, last_f: np.ndarray
) -> np.ndarray:
    """Where the line through two points in (log x, f) crosses 0; NaN if it cannot."""
    with np.errstate(all="ignore"):
        slope = (f - last_f) / np.log(x / last_x)
        guess = x * np.exp(-f / slope)
    return np.where((slope > 0) & np.isfinite(guess), guess, np.nan)


def _inside(
    guess: np.ndarray, low: np.ndarray, high: np.ndarray, integer: bool
) -> np.ndarray:
    """The guess as a point strictly between the ends."""
    if integer:
        return np.clip(np.rint(guess), low + 1, high - 1)
    return guess


def log_crossing(
    function: Callable[[Array], Array],
    low: Array,
    high: Array,
    *,
    num_points: int,
    num_rounds: int,
) -> Array:
    """About where a decreasing function crosses 0, on a logarithmic scale; a kernel.

    Each round evaluates points between the ends side by side, which takes few calls,
    and keeps the two about the crossing; the last two are interpolated.

    Args:
      function: maps (num_points, n) to values of that shape.
      low: (n,) > 0.
      high: (n,) >= low.
      num_points: in a round.
      num_rounds: each narrows the bracket, in log, by ``num_points - 1``.

    Returns:
      (n,) between the ends; an end where the sign does not change.
    """
    xp = namespace(low, high)
    low, high = xp.log(low), xp.log(high)
    share = np.linspace(0.0, 1.0, num_points)[:, None]
    index = np.arange(num_points)[:, None]
    bracket = values = xp.stack([low, high])
    for _ in range(num_rounds):
        x = bracket[0] + share * (bracket[1] - bracket[0])
        value = function(xp.exp(x))
        last = xp.max(xp.where(value > 0, index, 0), axis=0)
        ends = xp.stack([last, xp.minimum(last + 1, num_points - 1)])
        bracket = xp.take_along_axis(x, ends, axis=0)
        values = xp.take_along_axis(value, ends, axis=0)
    (x, end), (value, other) = bracket, values
    drop = value - other
    inside = (value > 0) & (drop > 0) & (drop < xp.inf)
    part = xp.where(inside, value / xp.where(inside, drop, 1.0), 0.0)
    return xp.exp(x + xp.clip(part, 0.0, 1.0) * (end - x))
