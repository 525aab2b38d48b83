"""Paths in the complex plane on which losses are integrated."""

# Nodes and weights of the trapezoidal rule. Reference: Trefethen and Weideman (2014),
# SIAM Review 56(3).

from __future__ import annotations

from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    fori_loop,
    map_first,
    namespace,
    sigmoid,
)

Pair = tuple[Array, Array]
"""Real and imaginary part, or nodes and weights."""

# Largest imaginary part ("height") of the path, in standard deviations: it amplifies
# rounding errors at real z by e^{1.8²/2} = 5 at most.
_TOP = 1.8
# Height times shift at the kink: the log-ratio is singular at pi.
_KINK_ANGLE = 1.2
# Slope of the path at the end of a domain: steep, so that e^{zL} falls off faster than
# it oscillates.
_SLOPE_AT_FLOOR = 2.0
# Slope behind the kink, up to `_TOP`.
_SLOPE_BEHIND_KINK = 0.4
# Slope beyond that.
_SLOPE_AT_END = 0.3
# First node of a half-line: e^-13 from its end, where e^{zL} has a boundary layer of
# width 1/|z|; below it e^{zL} - 1 is linear but for 1e-17.
_DEEPEST_LAYER = 13.0
# Nodes at a kink are closer where the shift exceeds this, in proportion to it.
_CROWDING_SHIFT = 1.5
# Width of the stretch where they are closer, in units of 1 / shift.
_CROWDING_WIDTH = 3.0
# Largest spacing of nodes, in standard deviations: further apart they may step over a
# Gaussian, which no comparison of two rules would show.
_WIDEST = 1.25
# Steps of the fixed-point iteration for the inverse of a change of variables.
_FIXED_POINT_STEPS = 6


def whole_line(low: Array, high: Array, kink: Array, s: Array, num_nodes: int) -> Pair:
    """Nodes from about ``low`` to ``high`` and weights, (J, n): closer at the kink."""
    xp = namespace(low, high, kink, s)
    share, width = _crowding(s)

    def inverse(x: Array) -> Array:
        u = x
        for _ in range(_FIXED_POINT_STEPS):
            u = x + share * width * xp.tanh((u - kink) / width)
        return u

    begin, end = inverse(low), inverse(high)
    spacing = (end - begin) / (num_nodes - 1)
    u = begin + spacing * xp.arange(num_nodes, dtype=s.dtype)[:, None]
    bent = xp.tanh((u - kink) / width)
    x = u - share * width * bent
    return x, _unless_wide(spacing) * (1 - share * (1 - bent * bent))


def half_line(
    floor: Array, high: Array, kinks: tuple[Array, ...], s: Array, num_nodes: int
) -> Pair:
    """Nodes from ``floor`` to about ``high`` and weights; closer at the kinks."""
    xp = namespace(floor, high, kinks[0], s)
    num_nodes = 6 * num_nodes // 7
    share, width = _crowding(s)
    if len(kinks) == 2:
        # Where both kinks coincide the share is that of one.
        apart = xp.abs(kinks[0] - kinks[1]) / width
        share = share / (1 + 1 / xp.cosh(xp.minimum(apart, 300.0)) ** 2)

    def crowding(v: Array, centers: tuple[Array, ...]) -> tuple[Array, Array]:
        shift, slope = xp.zeros_like(v), xp.zeros_like(v)
        for center in centers:
            bent = xp.tanh((v - center) / width)
            shift = shift + share * width * (bent + xp.tanh(center / width))
            slope = slope + share * (1 - bent * bent)
        return shift, slope

    goals = tuple(kink - floor for kink in kinks)

    def inverse(_: Array, centers: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(
            goal + crowding(center, centers)[0]
            for goal, center in zip(goals, centers, strict=True)
        )

    # A loop: XLA's simplifier does not get through twelve unrolled steps.
    centers = fori_loop(xp, 0, _FIXED_POINT_STEPS, inverse, goals)
    end = fori_loop(
        xp,
        0,
        _FIXED_POINT_STEPS,
        lambda _, end: high - floor + crowding(end, centers)[0],
        high - floor,
    )
    spacing = (end + _DEEPEST_LAYER) / (num_nodes - 1)
    u = spacing * xp.arange(num_nodes, dtype=s.dtype)[:, None] - _DEEPEST_LAYER
    v, rise = _softplus(u)
    shift, slope = crowding(v, centers)
    weight = _unless_wide(spacing) * rise * (1 - slope)
    # The first node stands for all those before it: geometric series of the weights,
    # to second order, and of what is linear in the nodes.
    node, ratio = v - shift, xp.exp(-spacing)
    bent = (ratio * weight[1] - weight[0]) * ratio * ratio / (1 - ratio**2)
    first = (weight[:1] - bent) / (1 - ratio)
    weight = xp.concatenate([first, weight[1:]])
    node = xp.concatenate([node[:1] / (1 + ratio), node[1:]])
    return floor + node, weight


def _crowding(s: Array) -> tuple[Array, Array]:
    """Share by which the spacing is less at a kink, and the width of that."""
    xp = namespace(s)
    share = xp.maximum(1 - _CROWDING_SHIFT / s, 0.0)
    # So that the width in x, not in u, is `_CROWDING_WIDTH` / s.
    return share, _CROWDING_WIDTH / s / (1 - 0.76 * share)


def _unless_wide(spacing: Array) -> Array:
    """The spacing, NaN where it is too wide."""
    xp = namespace(spacing)
    return xp.where(spacing <= _WIDEST, spacing, xp.nan)


def _softplus(x: Array) -> tuple[Array, Array]:
    """``log(1 + e^x)`` and its derivative."""
    xp = namespace(x)
    return xp.maximum(x, 0.0) + xp.log1p(xp.exp(-xp.abs(x))), sigmoid(x)


def path_points(
    line: Pair,
    floor: Array,
    kink: Array,
    s: Array,
    height: Array,
    *,
    last: Array | float = 0.0,
    most: Array | float = 1e30,
) -> tuple[Pair, Pair]:
    """Points on paths above the (V, J, n) nodes of a line, and dx with the weights."""

    def lift(node: Array, weight: Array, height: Array) -> tuple[Pair, Pair]:
        imaginary, slope = _imaginary_part(node, floor, kink, s, last, most)
        return (node, height * imaginary), (weight, weight * (height * slope))

    return map_first(lift, *line, height)


def half_line_points(
    floor: Array,
    high: Array,
    kinks: tuple[Array, ...],
    rise: Array,
    last: Array,
    s: Array,
    height: Array,
    num_nodes: int,
) -> tuple[Pair, Pair]:
    """`path_points` above `half_line` to (V, n) ends; they may rise from ``rise``."""
    line = map_first(lambda high: half_line(floor, high, kinks, s, num_nodes), high)
    return path_points(line, floor, rise, s, height, last=last)


def _imaginary_part(
    node: Array,
    floor: Array,
    kink: Array,
    s: Array,
    last: Array | float,
    most: Array | float,
) -> Pair:
    """Imaginary part of the path at its real nodes, and its slope."""
    xp = namespace(node)
    at_kink = xp.minimum(_TOP, _KINK_ANGLE / s)
    starts = xp.isfinite(floor)
    along = xp.where(starts, node - xp.where(starts, floor, 0.0), 0.0)
    bent = xp.tanh(_SLOPE_AT_FLOOR * along / at_kink)
    height = xp.where(starts, at_kink * bent, at_kink)
    slope = xp.where(starts, _SLOPE_AT_FLOOR * (1 - bent * bent), 0.0)
    begin = kink + 1.0
    stop = begin + (_TOP - at_kink) / _SLOPE_BEHIND_KINK
    tail = xp.maximum(xp.maximum(stop, 2.0), last)
    # A path that starts on the real line must start there exactly.
    origin = xp.where(starts, floor, -1e30)
    for corner, rise in (
        (begin, _SLOPE_BEHIND_KINK),
        (stop, -_SLOPE_BEHIND_KINK),
        (tail, _SLOPE_AT_END),
        (tail + (most - _TOP) / _SLOPE_AT_END, -_SLOPE_AT_END),
    ):
        before, _ = _bend(origin - corner)
        behind, steeper = _bend(node - corner)
        height = height + rise * (behind - before)
        slope = slope + rise * steeper
    return height, slope


def _bend(x: Array) -> tuple[Array, Array]:
    """A smooth ``max(x, 0)`` and its derivative; analytic while ``|Im x| < 2``."""
    xp = namespace(x)
    root = xp.sqrt(x * x + 4.0)
    # Without cancellation at x = -1e30.
    smaller = 2.0 / (root + xp.abs(x))
    return xp.where(x > 0, x + smaller, smaller), 0.5 * (1 + x / root)
