"""``log(E_Q[(P/Q)^alpha] - 1)`` of a pair of distributions on the line."""
# By quadrature. Reference: docs/proofs.md, "Moments"; Sason and Verdú (2016),
# arXiv:1508.00335, Equation (1), for both profiles alike.

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    fori_loop,
    logsumexp,
    namespace,
)
from jaxdp_episodic.accountant.numerics.power_excess import (
    log_expm1,
    scaled_power_excess,
    scaled_power_excess_derivatives,
)
from jaxdp_episodic.accountant.numerics.quadrature import integrate_panels, lay_panels

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


# Largest logarithm of a term of a sum, nats; larger ones are scaled down: e^709
# overflows.
LARGEST_EXPONENT = 600.0
# Rounding error of a log-density, relative to the largest of its terms: half a unit in
# the last place for each operation, 1.25 in all near the bump and 3 at high orders.
ROUNDING = 4 * float(np.finfo(np.float64).eps)
# Largest size of a loss, nats, at which moments are right to 1e-10 without adding
# `ROUNDING` (tested): near 0 and at high orders, terms are small where the weight is.
LARGE_LOSS = 128.0
# Largest rounding error, nats, of the terms of a sum that is used: with a far larger
# one all of them may be 0.
_MOST_ROUNDING = 1.0


def log_integral(
    log_parts: Callable[[Array], tuple[Array, Array]],
    windows: Windows,
    bumps: Array,
    floor: Array,
    t: Array,
    rule: MomentRule,
) -> tuple[Array, ...]:
    """``log of the integral of e^{b(x)} f(e^{y(x)} - 1)`` over x >= floor."""
    xp = namespace(windows[0], bumps, floor, t)
    direction, quadrature, with_derivatives = rule
    y, b = log_parts(xp.maximum(bumps, floor))
    exponents = [b + (1 + t) * y] * (direction != "backward")
    exponents += [b - t * y] * (direction != "forward")
    # Large moments are scaled down by their size at the bumps. Were a bump missed by
    # far the sum would overflow to inf, which is the safe side.
    peak = xp.max(xp.concatenate(exponents), axis=0)
    peak = xp.maximum(peak - LARGEST_EXPONENT, 0.0)

    def integrand(x: Array) -> tuple[Array, ...]:
        y, b = log_parts(x)
        if with_derivatives:
            return scaled_power_excess_derivatives(y, b - peak, t, direction)
        return (scaled_power_excess(y, b - peak, t, direction),)

    lefts, rights = lay_panels(*windows, floor, num_panels=quadrature.num_panels)
    total, *derivatives = integrate_panels(
        integrand, lefts, rights, nodes_per_panel=quadrature.nodes_per_panel
    )
    return xp.log(total) + peak, *(d / total for d in derivatives)


def unless_gaussian(
    is_gaussian: Array,
    log_weight: Array,
    scale: Array,
    t: Array,
    excess: tuple[Array, ...],
    *,
    rounds: Array | float = 1.0,
) -> tuple[Array, ...]:
    """The integral and its rounding error, or a sum of Gaussians where that is less."""
    # The density of P is a difference of numbers as large as the losses, whose rounding
    # is a factor on the integral. Orders above 1 are hardly asked for there, and the
    # sum is hardly larger: moments are convex in the pair, f_{1-alpha}(v) <= t v, and
    # f_alpha(v) <= -t v for v < 0.
    xp = namespace(is_gaussian, scale, t, excess[0])
    log_weight, scale = xp.atleast_2d(log_weight), xp.atleast_2d(scale)
    slope, order = scale * (1 + 2 * t), 1 + t
    exact = excess_of(scale * t * order, slope, 2 * scale, len(excess) > 1)
    size = xp.max(scale, axis=0)
    reach = size * order * order
    is_far = 2 * ROUNDING * reach > _MOST_ROUNDING
    is_large, found = (size > LARGE_LOSS) | is_far, excess
    if xp is not np or np.any(is_large):
        parts = log_weight + xp.logaddexp(exact[0], xp.log(t))
        total = logsumexp(parts)
        share = xp.exp(parts - total)
        bound = total, *(xp.sum(share * part, axis=0) for part in exact[1:])
        rounded = xp.where(is_far, 1.0, rounds) * 2 * reach
        found = with_rounding(excess, rounded, bound, is_large)
    return tuple(
        xp.where(is_gaussian, gaussian[-1], part)
        for gaussian, part in zip(exact, found, strict=True)
    )


def with_rounding(
    excess: tuple[Array, ...],
    size: Array,
    bound: tuple[Array, ...],
    is_large: Array | None = None,
) -> tuple[Array, ...]:
    """A sum of terms with their rounding error, or a smaller upper bound."""
    xp = namespace(excess[0], size)
    counts = size > LARGE_LOSS if is_large is None else is_large
    raised = excess[0] + xp.where(counts, ROUNDING * size, 0.0)
    used = (raised < bound[0]) & (ROUNDING * size < _MOST_ROUNDING)
    used = used | xp.logical_not(counts)
    return tuple(
        xp.where(used, one, other)
        for one, other in zip((raised, *excess[1:]), bound, strict=True)
    )


def sum_of(first: tuple[Array, ...], second: tuple[Array, ...]) -> tuple[Array, ...]:
    """Logarithm of the sum of two excesses, and its derivatives over it."""
    xp = namespace(first[0], second[0])
    total = xp.logaddexp(first[0], second[0])
    finite = xp.where(xp.isfinite(total), total, 0.0)
    shares = xp.exp(first[0] - finite), xp.exp(second[0] - finite)

    def mean(values: tuple[Array, Array]) -> Array:
        pairs = zip(shares, values, strict=True)
        return sum(xp.where(share > 0, share * x, 0.0) for share, x in pairs)

    return total, *(mean(pair) for pair in zip(first[1:], second[1:], strict=True))


def excess_of(
    log_moment: Array, slope: Array, bend: Array | float, with_derivatives: bool
) -> tuple[Array, ...]:
    """``log(e^L - 1)`` of a moment's logarithm L, given with two derivatives."""
    xp = namespace(log_moment, slope)
    excess = log_expm1(log_moment)
    if not with_derivatives:
        return (excess,)
    inverse = 1 / -xp.expm1(-log_moment)
    return excess, slope * inverse, (bend + slope * slope) * inverse
