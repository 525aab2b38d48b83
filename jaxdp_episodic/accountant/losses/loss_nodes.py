"""Loss distributions as complex nodes and weights.

The moment-generating function ``M(z) = E_P[e^{zL}]`` is the integral of ``e^{zL(x)}
p(x) dx`` over the real line. The integrand is analytic, so the line may be moved into
the upper half-plane, where ``e^{zL}`` oscillates less for the z that a contour integral
needs. The trapezoidal rule on that path gives nodes L and weights which serve every z:
M(z) is the sum of ``weight e^{z L}``. Reference: Trefethen and Weideman (2014), SIAM
Review 56(3), for the rule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    fori_loop,
    namespace,
    sigmoid,
    stored,
)
from jaxdp_episodic.accountant.numerics.special import (
    LOG_SQRT_2PI,
    Pair,
    log1p_bounded,
    log1p_complex,
    polar,
    times,
    versine_sine,
)

# Largest imaginary part of the path (its height), in standard deviations. It amplifies
# rounding errors at real z by at most e^{1.8²/2} = 5.
_TOP = 1.8
# Height of the path at a kink, times the shift. The log-ratio is singular at pi.
_KINK_ANGLE = 1.2
# Slope of the path at the start of a half-line: e^{zL} decays before it oscillates.
_SLOPE_AT_FLOOR = 2.0
# Slope of the path right of the kink, up to the height `_TOP`.
_SLOPE_BEHIND_KINK = 0.4
_SLOPE_AT_END = 0.3  # slope of the path further right
# Change of the slope at each corner of the path.
_RISES = np.array(
    [_SLOPE_BEHIND_KINK, -_SLOPE_BEHIND_KINK, _SLOPE_AT_END, -_SLOPE_AT_END]
)[:, None, None, None]
# First node of a half-line, e^-13 from its start. There e^{zL} has a boundary layer of
# width 1/|z|. Closer to the start e^{zL} - 1 is linear up to 1e-17.
_DEEPEST_LAYER = 13.0
# The spacing of nodes shrinks at a kink in proportion to the shift, above this shift.
_CROWDING_SHIFT = 1.5
# Width of the interval with smaller spacing, times the shift.
_CROWDING_WIDTH = 3.0
# Largest allowed spacing of nodes, in standard deviations. Wider spacing might step
# over a Gaussian, and then two rules could agree on a wrong value.
_WIDEST = 1.25
# Steps of the fixed-point iteration that inverts a change of variables.
_FIXED_POINT_STEPS = 6


def whole_line(low: Array, high: Array, kink: Array, s: Array, num_nodes: int) -> Pair:
    """Returns (..., J, n) real nodes from about ``low`` to ``high``, (..., n); weights.

    The nodes are x = u - share width tanh((u - kink) / width), u equally spaced: their
    spacing shrinks by this share at the kink.
    """
    xp = namespace(low, high, kink, s)
    share, width = _crowding(xp, s)
    ends = xp.array([low, high])

    def inverse(_: Array, u: Array) -> Array:
        return ends + share * width * xp.tanh((u - kink) / width)

    begin, end = fori_loop(xp, 0, _FIXED_POINT_STEPS, inverse, ends)
    spacing = ((end - begin) / (num_nodes - 1))[..., None, :]
    u = begin[..., None, :] + spacing * xp.arange(num_nodes, dtype=s.dtype)[:, None]
    bent = xp.tanh((u - kink) / width)
    x = u - share * width * bent
    weight = xp.where(spacing <= _WIDEST, spacing, xp.nan)
    return x, weight * (1 - share * (1 - bent * bent))


def half_line(
    floor: Array, high: Array, kinks: tuple[Array, ...], s: Array, num_nodes: int
) -> Pair:
    """Returns (..., J, n) real nodes from ``floor`` to about ``high``; their weights.

    The distance from the floor is log(1 + e^u) of equally spaced u, so nodes crowd at
    the floor; and they are closer at the kinks, as in `whole_line`.
    """
    xp = namespace(floor, high, kinks[0], s)
    num_nodes = 6 * num_nodes // 7
    share, width = _crowding(xp, s)
    if len(kinks) == 2:
        # If both kinks coincide the two reductions add up to that of one kink.
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

    # A loop, since XLA's simplifier does not terminate on twelve unrolled steps.
    centers = fori_loop(xp, 0, _FIXED_POINT_STEPS, inverse, goals)
    end = fori_loop(
        xp,
        0,
        _FIXED_POINT_STEPS,
        lambda _, end: high - floor + crowding(end, centers)[0],
        high - floor,
    )
    spacing = ((end + _DEEPEST_LAYER) / (num_nodes - 1))[..., None, :]
    u = spacing * xp.arange(num_nodes, dtype=s.dtype)[:, None] - _DEEPEST_LAYER
    v = xp.maximum(u, 0.0) + xp.log1p(xp.exp(-xp.abs(u)))  # log(1 + e^u)
    shift, slope = crowding(v, centers)
    weight = xp.where(spacing <= _WIDEST, spacing, xp.nan) * sigmoid(u) * (1 - slope)
    # The first node replaces all nodes left of it. Their weights, and weights times
    # nodes, are geometric series, here to second order.
    node, ratio = v - shift, xp.exp(-spacing)
    one, two = weight[..., :1, :], weight[..., 1:2, :]
    bent = (ratio * two - one) * ratio * ratio / (1 - ratio**2)
    first = (one - bent) / (1 - ratio)
    weight = xp.concatenate([first, weight[..., 1:, :]], axis=-2)
    first = node[..., :1, :] / (1 + ratio)
    return floor + xp.concatenate([first, node[..., 1:, :]], axis=-2), weight


def _crowding(xp: Any, s: Array) -> tuple[Array, Array]:
    """Returns the share by which nodes are closer at a kink, and over what width."""
    share = xp.maximum(1 - _CROWDING_SHIFT / s, 0.0)
    # In terms of x, not of u, the width is `_CROWDING_WIDTH` / s.
    return share, _CROWDING_WIDTH / s / (1 - 0.76 * share)


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
    """Returns complex points above (V, J, n) nodes of a line, and weighted dx.

    ``floor`` is the start of a half-line, or -inf; the path may rise at ``kink`` (at
    most to 1.2 / s there) and at ``last``, to the height ``most``. ``height``, (V, n),
    is a factor.
    """
    (node, weight), factor = line, height[:, None]
    xp = namespace(node, factor)
    at_kink = xp.minimum(_TOP, _KINK_ANGLE / s)
    starts = xp.isfinite(floor)
    along = xp.where(starts, node - xp.where(starts, floor, 0.0), 0.0)
    bent = xp.tanh(_SLOPE_AT_FLOOR * along / at_kink)
    imaginary = xp.where(starts, at_kink * bent, at_kink)
    slope = xp.where(starts, _SLOPE_AT_FLOOR * (1 - bent * bent), 0.0)
    begin = kink + 1.0
    stop = begin + (_TOP - at_kink) / _SLOPE_BEHIND_KINK
    tail = xp.maximum(xp.maximum(stop, 2.0), last)
    # A half-line must start exactly on the real line.
    origin = xp.where(starts, floor, -1e30)
    top = tail + (most - _TOP) / _SLOPE_AT_END
    corners = xp.stack(xp.broadcast_arrays(begin, stop, tail, top))[:, None, None]
    before, _ = _bend(xp, origin - corners)
    behind, steeper = _bend(xp, node - corners)
    imaginary = imaginary + (_RISES * (behind - before)).sum(axis=0)
    slope = slope + (_RISES * steeper).sum(axis=0)
    points = (node, factor * imaginary), (weight, weight * (factor * slope))
    return stored(xp, points)


def _bend(xp: Any, x: Array) -> tuple[Array, Array]:
    """Returns a smooth ``max(x, 0)``, analytic for ``|Im x| < 2``; its derivative."""
    root = xp.sqrt(x * x + 4.0)
    # Not (root + x) / 2, which cancels at x = -1e30.
    smaller = 2.0 / (root + xp.abs(x))
    return xp.where(x > 0, x + smaller, smaller), 0.5 * (1 + x / root)


# The point left of which Q = N(0, 1) has a negligible probability, 1e-19.
FURTHEST_LEFT = -9.0


class NodeRule(NamedTuple):
    """What `Nodes.nodes` shall compute, for (m,) settings."""

    backward: Array  # (m,) 1 for the direction with P and Q exchanged, else 0
    log_cut: Array  # (V, m) logarithm of the density where the domain is truncated
    height: Array  # (V, m) factor of the imaginary part of the path
    num_nodes: int  # of the trapezoidal rule
    num_terms: int = 1  # upper bound of `Nodes.num_terms` of all settings


class LossNodes(NamedTuple):
    """Nodes of ``E_P[e^{zL}]`` over the nonzero losses; arrays of n settings."""

    # For a mixture of several distributions all arrays have a further first axis.

    loss: Pair  # real and imaginary part of the losses at the nodes, each (J, n)
    weight: Pair  # real and imaginary part of the weights, each (J, n)
    mass: Array  # (n,) sum of the weights: the probability of a nonzero loss
    size: Array  # (n,) sum of ``|weight loss|``, the scale of rounding errors
    right: Array  # (n,) smallest ``Im L / Re L`` of the nodes with Re L > 0
    left: Array  # (n,) smallest ``Im L / -Re L`` of the other nodes
    end_log_weight: Array  # (2, n) logarithm of the density at both truncation points
    end_loss: Array  # (2, n) the loss at both truncation points


def collected(
    loss: Pair, weight: Pair, end_log_weight: Array, end_loss: Array
) -> LossNodes:
    """Returns `LossNodes` with the fields that follow from losses and weights."""
    xp = namespace(loss[0], weight[0], end_log_weight, end_loss)
    # A node whose weight underflowed must not add to e^{zL}, however large.
    some = (weight[0] != 0) | (weight[1] != 0)
    loss = xp.where(some, loss[0], 0.0), xp.where(some, loss[1], 0.0)

    steepest = []  # on the right, and on the left
    for along in (loss[0], -loss[0]):
        ratio = loss[1] / xp.where(along > 0, along, 1.0)
        steepest.append(xp.where(along > 0, ratio, xp.inf).min(axis=-2))
    mass = weight[0].sum(axis=-2)
    right, left = steepest
    size = (xp.hypot(*weight) * xp.hypot(*loss)).sum(axis=-2)
    return LossNodes(loss, weight, mass, size, right, left, end_log_weight, end_loss)


def weighted(
    loss: Pair, density: Pair, element: Pair, backward: Array | float
) -> tuple[Pair, Pair]:
    """Returns losses and weights on a path, given log Q and dx.

    Backward the losses change their sign, and the path is the complex conjugate.
    """
    sign, forward = 1 - 2 * backward, 1 - backward
    size = polar(density[0] + forward * loss[0], sign * density[1] + forward * loss[1])
    return (sign * loss[0], loss[1]), times(size, (element[0], sign * element[1]))


def two_sided(y: Pair, density: Pair, element: Pair, above: Array, *ends: Array):
    """Returns nodes of losses y under P where ``above``, of -y under Q elsewhere.

    Arrays (..., J, 2 n): each setting has both. ``density`` is log Q.
    """
    xp = namespace(y[0])
    loss, weight = (
        tuple(xp.concatenate(xp.split(a, 2, axis=-1), axis=-2) for a in pair)
        for pair in weighted(y, density, element, 1 - above)
    )
    both = (xp.stack(xp.split(end, 2, axis=-1), axis=-2) for end in ends)
    return collected(loss, weight, *both)


class Rate(NamedTuple):
    """A probability p, ``log(p)``, and ``log(1 - p)``, which is kept finite; (n,)."""

    rate: Array
    log: Array
    log_rest: Array

    @classmethod
    def of(cls, rate: Array) -> Rate:
        """Returns the rate with its logarithms."""
        xp = namespace(rate)
        return cls(rate, xp.log(rate), xp.maximum(xp.log1p(-rate), -1e300))


def log_mixture(exponent: Pair, p: Rate) -> Pair:
    """Returns ``log(1 - p + p e^l)`` for complex l, continuous right of the kink."""
    xp = namespace(exponent[0], p.rate)
    low = xp.minimum(exponent[0], 700.0)
    versine, sine = versine_sine(exponent[1])
    # p (e^l - 1), without cancellation if l is small
    gained, grown = xp.expm1(low), xp.exp(low)
    near = (p.rate * (gained * (1 - versine) - versine), p.rate * grown * sine)
    gap = exponent[0] + p.log - p.log_rest
    small = xp.exp(-xp.abs(gap))
    far = (small * (1 - versine), -small * sine)
    behind = (gap > 0) & (near[0] ** 2 + near[1] ** 2 > 0.25)
    part = xp.where(behind, far[0], near[0]), xp.where(behind, far[1], near[1])
    re, im = log1p_complex(*part)
    return (
        re + xp.where(behind, exponent[0] + p.log, 0.0),
        im + xp.where(behind, exponent[1], 0.0),
    )


def real_log_mixture(exponent: Array, p: Rate) -> Array:
    """Returns ``log(1 - p + p e^l)`` for real l, with full relative precision."""
    xp = namespace(exponent, p.rate)
    excess = p.rate * xp.expm1(xp.minimum(exponent, 700.0))
    central = (xp.abs(excess) <= 0.5) & (exponent <= 700.0)
    # Elsewhere factor out the larger of the two terms (1 - p) + p e^l. Near p = 1 and
    # for l << 0 their sum is far below 1, so that 1 + p (e^l - 1) has no digits left.
    gap = exponent + p.log - p.log_rest
    offset = xp.where(gap > 0, exponent + p.log, p.log_rest)
    argument = xp.where(central, excess, xp.exp(-xp.abs(gap)))
    return xp.where(central, 0.0, offset) + log1p_bounded(argument)


def log_normal(x: Pair) -> Pair:
    """Returns ``log phi(x)`` for complex x."""
    return 0.5 * (x[1] * x[1] - x[0] * x[0]) - LOG_SQRT_2PI, -x[0] * x[1]
