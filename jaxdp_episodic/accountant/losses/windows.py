"""Windows ``(low, high, density)`` in which the integrands of the moments are large."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    fori_loop,
    namespace,
)

Windows = tuple[Array, Array, Array]
"""Low end, high end and density of panels of J windows, each (J, n)."""

# Half-width of the window around a Gaussian bump, in standard deviations.
_BUMP_HALF_WIDTH = 9.2
# Panels per standard deviation there: 16 nodes resolve 4 deviations to 1e-13.
_BUMP_DENSITY = 0.25
# Longest stretch of bumps, in standard deviations, that is one window.
_LONGEST_STRETCH = 500.0
# Longest stretch on which that window has the bumps' own density of panels.
_DENSE_STRETCH = 60.0
# The same over that density on a longer stretch.
_SPARSE_SHARE = 0.3
# Stretch within which the integrand is at most e^60 larger than at its known bumps.
_SHORT_STRETCH = 40.0
# Half-widths of the windows around a transition of the log-ratio, in units of 1/shift.
_TRANSITION_HALF_WIDTHS = np.array([[6.0], [16.0], [50.0]])
# Panels there, per 1/shift: the singularities of the log-ratio lie at a distance of pi.
_TRANSITION_DENSITIES = np.array([[0.4], [0.15], [0.05]])
# Most steps of `settle`.
_SETTLING_STEPS = 14
# Most bisections of `only_root`, and the bracket that is narrow enough, in deviations.
_BISECTIONS = 40
_NARROW_BRACKET = 1e-2


def windows_around(
    centers: list[Array], *others: Windows, between: Callable[[], Array] | None = None
) -> tuple[Windows, Array]:
    """Windows (low, high, density), each (J, n), and the centers (K, n)."""
    # Transitions matter only where a bump reaches: they are cut to the bumps' extent.
    xp = namespace(centers[0])
    bumps = xp.stack(centers)
    bottom = xp.min(bumps, axis=0) - _BUMP_HALF_WIDTH
    top = xp.max(bumps, axis=0) + _BUMP_HALF_WIDTH
    # Two bumps that nearly merge leave weight between them, over many deviations:
    # where they are not far apart the whole stretch is one window.
    span = top - bottom
    end = xp.where(span < _LONGEST_STRETCH, top, bottom)
    near = _BUMP_DENSITY * xp.where(span < _DENSE_STRETCH, 1.0, _SPARSE_SHARE)
    windows = [(bottom[None], end[None], near[None]), *others]
    if xp is not np or not np.all(span < _SHORT_STRETCH):
        if between is not None:
            bumps = xp.concatenate([bumps, between()])
        density = xp.full_like(bumps, _BUMP_DENSITY)
        windows.append((bumps - _BUMP_HALF_WIDTH, bumps + _BUMP_HALF_WIDTH, density))
    low, high, density = (xp.concatenate(a) for a in zip(*windows, strict=True))
    low, high = (xp.minimum(xp.maximum(a, bottom), top) for a in (low, high))
    return (low, high, density), bumps


def transitions(first: Array, last: Array, s: Array) -> Windows:
    """Graded windows around the stretch from ``first`` to ``last``."""
    half = _TRANSITION_HALF_WIDTHS / s
    return first - half, last + half, _TRANSITION_DENSITIES * s


def settle(slope, start: Array, low: Array, high: Array) -> Array:
    """Follows ``x = slope(x)`` from starts (k, n) to the bumps nearby."""
    # Newton's step where the exponent is more concave than a unit Gaussian, else the
    # fixed-point step, or the bracket's middle: at a kink they would alternate.
    xp = namespace(start, low, high)

    def near(x: Array) -> Array:
        """Centers of windows, which are 18 deviations long, need few digits."""
        return 1e-2 + 1e-4 * xp.abs(x)

    def follow(_: int, state: tuple[Array, Array, Array, Array]):
        x, low, high, last_move = state
        value, derivative = slope(x)
        low = xp.where(value >= x, x, low)
        high = xp.where(value <= x, x, high)
        step = x + (value - x) / xp.maximum(1.0 - derivative, 1.0)
        inside = (step >= low) & (step <= high)
        shrinks = 2 * xp.abs(step - x) <= last_move
        moved = xp.where(inside & shrinks, step, 0.5 * (low + high))
        # Starts that have converged move by rounding errors only, which must not send
        # them to the middle of a wide bracket, and so to another bump.
        moved = xp.where(last_move <= near(x), x, moved)
        return moved, low, high, xp.abs(moved - x)

    if xp is not np:  # whose loop keeps its shapes
        low, high = (xp.broadcast_to(end, start.shape) for end in (low, high))
    state = (start, low, high, 4 * (high - low))
    x, *_ = fori_loop(
        xp, 0, _SETTLING_STEPS, follow, state, lambda s: (s[3] <= near(s[0])).all()
    )
    return x


def only_root(slope, low: Array, high: Array) -> Array:
    """The one solution of ``x = slope(x)`` for a decreasing slope, by bisection."""
    xp = namespace(low, high)

    def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        above = slope(middle) >= middle
        return xp.where(above, middle, low), xp.where(above, high, middle)

    def is_narrow(bracket: tuple[Array, Array]) -> bool:
        return (bracket[1] - bracket[0] <= _NARROW_BRACKET).all()

    low, high = fori_loop(xp, 0, _BISECTIONS, halve, (low, high), is_narrow)
    return 0.5 * (low + high)
