"""Paths in the complex plane on which losses are integrated: nodes and weights.

The rule is the trapezoidal one after a change of variables: on analytic integrands that
fall off at both ends it converges exponentially (Trefethen and Weideman 2014, SIAM
Review 56(3)), with a third of the nodes that Gauss-Legendre panels take.

The path must stay away from the zeros of the likelihood ratio, which have an imaginary
part of pi/shift, above its turning points; beyond those it may rise.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    fori_loop,
    namespace,
    stop_gradient,
)

Pair = tuple[Array, Array]
"""Real and imaginary part, or nodes and weights."""

# Imaginary part ("height") of the path, in standard deviations: e^{1.8²/2} = 5 is the
# factor by which it may amplify rounding errors at real z.
_TOP = 1.8
# Imaginary part times shift where the log-ratio turns; its singularities are at pi.
_TURN_ANGLE = 1.2
# Slopes of the path: from the end of the domain (steep, so that e^{zL} falls off
# faster than it oscillates), behind the turn, further out.
_RISE_AT_FLOOR, _RISE_BEHIND_TURN, _RISE_AT_END = 2.0, 0.4, 0.3
# Where a domain begins, e^{zL} has a boundary layer of width 1/|z|: nodes there are
# e^{-u} from the end, down to this u, below which e^{zL} - 1 is linear but for 1e-17.
_DEEPEST_LAYER = 13.0
# At a turn nodes are closer than elsewhere by shift over this, in so many 1 / shift.
_TURN_SHIFT, _TURN_WIDTH = 1.5, 3.0
_FIXED_POINTS = 6


class Path(NamedTuple):
    """Real nodes (J, n) with their weights, and what shapes a path through them.

    Its imaginary part is at most about ``most``, in the scale of the nodes.
    """

    node: Array
    weight: Array
    floor: Array
    turn: Array
    shift: Array
    height: Array
    most: float = 1e30


def whole_line(low: Array, high: Array, turn: Array, s: Array, num_nodes: int) -> Pair:
    """Nodes from about ``low`` to ``high`` and weights, (J, n): closer at the turn.

    ``x(u) = u - share width tanh((u - turn) / width)``.
    """
    xp = namespace(low, high, turn, s)
    share, width = _crowding(s)

    def place(x: Array) -> Array:
        u = x
        for _ in range(_FIXED_POINTS):
            u = x + share * width * xp.tanh((u - turn) / width)
        return u

    begin, end = place(low), place(high)
    spacing = (end - begin) / (num_nodes - 1)
    u = begin + spacing * xp.arange(num_nodes, dtype=s.dtype)[:, None]
    bent = xp.tanh((u - turn) / width)
    # An integral does not depend on its path: derivatives are taken with it held.
    return stop_gradient(
        xp, (u - share * width * bent, spacing * (1 - share * (1 - bent * bent)))
    )


def half_line(
    floor: Array, high: Array, turns: tuple[Array, ...], s: Array, num_nodes: int
) -> Pair:
    """Nodes from ``floor`` to about ``high`` and weights; closer at the turns.

    ``x = floor + v - sum of share width tanh((v - turn) / width)`` (0 at v = 0) with
    ``v = log(1 + e^u)``; 6/7 of as many as on a whole line.
    """
    xp = namespace(floor, high, turns[0], s)
    num_nodes = 6 * num_nodes // 7
    share, width = _crowding(s)
    if len(turns) == 2:
        # Where both turns coincide the share is that of one.
        apart = xp.abs(turns[0] - turns[1]) / width
        share = share / (1 + 1 / xp.cosh(xp.minimum(apart, 300.0)) ** 2)

    def bends(v: Array, places: tuple[Array, ...]) -> tuple[Array, Array]:
        shift, slope = xp.zeros_like(v), xp.zeros_like(v)
        for place in places:
            bent = xp.tanh((v - place) / width)
            shift = shift + share * width * (bent + xp.tanh(place / width))
            slope = slope + share * (1 - bent * bent)
        return shift, slope

    goals = tuple(turn - floor for turn in turns)

    def better_places(_: Array, places: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(
            goal + bends(place, places)[0]
            for goal, place in zip(goals, places, strict=True)
        )

    # Unrolled, twelve of them in a row are more than XLA's simplifier gets through.
    places = fori_loop(xp, 0, _FIXED_POINTS, better_places, goals)
    end = fori_loop(
        xp,
        0,
        _FIXED_POINTS,
        lambda _, end: high - floor + bends(end, places)[0],
        high - floor,
    )
    spacing = (end + _DEEPEST_LAYER) / (num_nodes - 1)
    u = spacing * xp.arange(num_nodes, dtype=s.dtype)[:, None] - _DEEPEST_LAYER
    v, rise = _softplus(u)
    shift, slope = bends(v, places)
    weight = spacing * rise * (1 - slope)
    # The first one stands for all those before it, geometric series: of the weights,
    # which bend a little, and of what is linear in the nodes.
    node, ratio = v - shift, xp.exp(-spacing)
    bent = (ratio * weight[1] - weight[0]) * ratio * ratio / (1 - ratio**2)
    first = (weight[:1] - bent) / (1 - ratio)
    weight = xp.concatenate([first, weight[1:]])
    node = xp.concatenate([node[:1] / (1 + ratio), node[1:]])
    node, weight = stop_gradient(xp, (node, weight))
    # The path moves along with the end of the domain, where it must start.
    return floor + node, weight


def _crowding(s: Array) -> tuple[Array, Array]:
    """Share of the spacing that is taken away at a turn, and the width of that."""
    xp = namespace(s)
    share = xp.maximum(1 - _TURN_SHIFT / s, 0.0)
    # In x the width is that of the place where x(u) is steep again.
    return share, _TURN_WIDTH / s / (1 - 0.76 * share)


def _softplus(x: Array) -> tuple[Array, Array]:
    """``log(1 + e^x)`` and its derivative."""
    xp = namespace(x)
    small = xp.exp(-xp.abs(x))
    rise = xp.where(x > 0, 1.0, small) / (1 + small)
    return xp.maximum(x, 0.0) + xp.log1p(small), rise


def points(path: Path) -> tuple[Pair, Pair]:
    """Nodes on the path, and ``dx`` with the weights."""
    xp = namespace(path.node)
    height, slope = stop_gradient(xp, _imaginary_parts(path))
    return (path.node, height), (path.weight, path.weight * slope)


def _imaginary_parts(path: Path) -> tuple[Array, Array]:
    """Imaginary part of the path at its real nodes, and its slope."""
    xp = namespace(path.node)
    node = path.node
    at_turn = xp.minimum(_TOP, _TURN_ANGLE / path.shift)
    starts = xp.isfinite(path.floor)
    along = xp.where(starts, node - xp.where(starts, path.floor, 0.0), 0.0)
    bent = xp.tanh(_RISE_AT_FLOOR * along / at_turn)
    height = xp.where(starts, at_turn * bent, at_turn)
    slope = xp.where(starts, _RISE_AT_FLOOR * (1 - bent * bent), 0.0)
    begin = path.turn + 1.0
    stop = begin + (_TOP - at_turn) / _RISE_BEHIND_TURN
    # A path that starts on the real line must start there exactly.
    origin = xp.where(starts, path.floor, -1e30)
    for corner, rise in (
        (begin, _RISE_BEHIND_TURN),
        (stop, -_RISE_BEHIND_TURN),
        (xp.maximum(stop, 2.0), _RISE_AT_END),
        (xp.maximum(stop, 2.0) + (path.most - _TOP) / _RISE_AT_END, -_RISE_AT_END),
    ):
        before, _ = _bend(origin - corner)
        behind, turned = _bend(node - corner)
        height = height + rise * (behind - before)
        slope = slope + rise * turned
    return path.height * height, path.height * slope


def _bend(x: Array) -> tuple[Array, Array]:
    """A smooth ``max(x, 0)`` and its derivative; analytic while ``|Im x| < 2``."""
    xp = namespace(x)
    root = xp.sqrt(x * x + 4.0)
    # Without cancellation at x = -1e30.
    smaller = 2.0 / (root + xp.abs(x))
    return xp.where(x > 0, x + smaller, smaller), 0.5 * (1 + x / root)
