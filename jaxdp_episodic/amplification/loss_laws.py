"""Laws of the privacy loss of one Gaussian step, as sums over nodes in the plane.

With ``L = log(P/Q)`` the privacy loss under P, the moment generating function
``M(z) = E_P[e^{z L}]`` is needed far from the real axis, where ``e^{z L}`` oscillates.
All densities here are analytic, so the path of integration may leave the real line: on
a path above it (for ``e^{zL}`` and ``Im z > 0``; below it for ``e^{-zL}``) the
integrand falls off instead of oscillating, and one fixed set of nodes serves every z.

The laws are *cut* where the Gaussian density has fallen below a level that the caller
chooses. Without what is beyond it, M has no far bump that would grow like
``e^{c² s²/2}``: the contour may cross the real axis where it is best for the losses
that do occur.

The path must stay away from the zeros of the log-ratio's argument, at a height of
pi/shift above its turning points; beyond those it may rise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxdp_episodic.amplification.windows import antipodal_turns
from jaxdp_episodic.numerics.complex_exponentials import (
    expm1_complex,
    log1p_complex,
    log_add_complex,
    log_complex,
    polar,
)
from jaxdp_episodic.numerics.quadrature import gauss_legendre

Pair = tuple[Array, Array]
"""Real and imaginary part."""

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
# Height of the path, in standard deviations: e^{1.8²/2} = 5 is what it may cost in
# cancellation at real z.
_TOP = 1.8
# Height times shift where the log-ratio turns; its singularities are at pi.
_TURN_ANGLE = 1.2
# Slopes of the path: from the end of the domain (steep, so that e^{zL} falls off
# faster than it oscillates), behind the turn, further out.
_RISE_AT_FLOOR, _RISE_BEHIND_TURN, _RISE_AT_END = 2.0, 0.4, 0.3
# Where a domain begins, e^{zL} has a boundary layer of width 1/|z|: panels shrink.
_LAYERS, _LAYER_RATIO = 5, 6.0
# Panels at a turn are narrower than elsewhere by shift over this.
_TURN_SHIFT = 1.5
_BISECTIONS = 40
_NUM_PANELS, _NODES_PER_PANEL = 24, 16


class LossLaw(NamedTuple):
    """Nodes of ``E_P[e^{zL}]`` over the losses that are not 0; arrays over settings.

    Attributes:
      loss: real and imaginary part of the losses at the nodes, each (J, n).
      weight: real and imaginary part of the weights, each (J, n).
      mass: (n,) sum of the weights: the probability of the losses that are not 0.
      size: (n,) sum of ``|weight loss|``, by which rounding errors are measured.
      right: (n,) smallest ``Im L / Re L`` of the nodes with Re L > 0: on lines of z
        that lean to the right less than that, the nodes' terms fall off.
      left: (n,) smallest ``Im L / -Re L`` of the others, for lines to the left.
      end_log_weight, end_loss: (2, n) logarithm of the density, and the loss, at the
        cuts.
    """

    loss: Pair
    weight: Pair
    mass: Array
    size: Array
    right: Array
    left: Array
    end_log_weight: Array
    end_loss: Array


class _Path(NamedTuple):
    """Real nodes (J, n) with their weights, and where a path has to be careful."""

    node: Array
    weight: Array
    floor: Array
    turn: Array
    shift: Array
    height: Array


def sampled_law(
    sampling_probability: Array,
    shift: Array,
    backward: Array,
    log_cut: Array,
    height: Array,
) -> LossLaw:
    """Law of the sampled pair ``((1-p) N(0,1) + p N(shift,1), N(0,1))``.

    Args:
      sampling_probability: (n,) p in (0, 1].
      shift: (n,) > 0.
      backward: (n,) 1 where P and Q are exchanged, else 0.
      log_cut: (n,) < 0, logarithm of the density (its peak being 1) at the cuts.
      height: (n,) scales the path's distance from the real line; about 1.

    Returns:
      Nodes, exact up to quadrature error and the losses beyond the cuts.
    """
    p, s = sampling_probability, shift
    low, high, turn = _sampled_ends(p, s, log_cut)
    edges = _edges(low, high, (turn,), s, _NUM_PANELS)
    path = _path(edges, jnp.full_like(s, -jnp.inf), turn, s, height)
    y, density = _sampled_ratio(path, p)
    # P's density carries the losses y; Q's the losses -y of the exchanged pair, on the
    # path below the real line, where everything is conjugate.
    sign, forward = 1 - 2 * backward, 1 - backward
    grown = (forward * y[0], forward * y[1])
    loss = (sign * y[0], y[1])
    weight = polar(*(density[0] + grown[0], sign * density[1] + grown[1]))
    ends = jnp.stack([low, high])
    end_loss = sign * _real_log_mixture(s * (ends - 0.5 * s), p)
    end_log_weight = -0.5 * ends * ends + forward * end_loss
    return _law(loss, weight, end_log_weight, end_loss)


def swapped_law(
    sampling_probability: Array, shift: Array, log_cut: Array, height: Array
) -> LossLaw:
    """Law whose two profiles are both the forward one of the sampled pair.

    Arguments as `sampled_law`.
    """
    p, s = sampling_probability, shift
    floor = 0.5 * s
    _, high, turn = _sampled_ends(p, s, log_cut)
    turn = jnp.maximum(turn, floor)
    edges = _graded_edges(floor, high, (turn,), s, _NUM_PANELS)
    path = _path(edges, floor, turn, s, height)
    y, density = _sampled_ratio(path, p)
    end_loss = _real_log_mixture(s * (high - 0.5 * s), p)
    return _symmetric(y, density, high, end_loss)


def antipodal_law(
    sampling_probability: Array,
    inner_rate: Array,
    shift: Array,
    log_cut: Array,
    height: Array,
) -> LossLaw:
    """Law whose two profiles are ``H_g(P || Q)`` of the antipodal pair.

    The pair is that of `amplification.moments.log_excess_antipodal`; arguments as
    there and in `sampled_law`.
    """
    p, r, s = sampling_probability, inner_rate, shift
    log_p, log_r = jnp.log(p), jnp.log(r)
    log_q = jnp.log1p(-p)
    base_turn, turn = antipodal_turns(log_p, log_q, log_r, s)
    log_q = jnp.maximum(log_q, -1e300)
    floor = jnp.zeros_like(s)
    _, high, _ = _sampled_ends(p, s, log_cut)
    turns = tuple(jnp.clip(t, 0.0, 1e9) for t in (base_turn, turn))
    edges = _graded_edges(floor, high, turns, s, _NUM_PANELS)
    path = _path(edges, floor, jnp.maximum(*turns), s, height)

    def ratio(x: Pair) -> tuple[Pair, Pair]:
        base = log_add_complex(log_q, (log_p - s * (x[0] + 0.5 * s), -s * x[1]))
        shrunk = expm1_complex(-2 * s * x[0], -2 * s * x[1])
        rise = log_complex(-shrunk[0], -shrunk[1])
        excess = (
            log_p + log_r + s * (x[0] - 0.5 * s) + rise[0] - base[0],
            s * x[1] + rise[1] - base[1],
        )
        return log_add_complex(jnp.zeros_like(s), excess), base

    x, speed = _points(path)
    y, base = ratio(x)
    normal = _log_normal(x)
    density = (base[0] + normal[0] + speed[0], base[1] + normal[1] + speed[1])
    (end_loss, _), _ = ratio((high, jnp.zeros_like(high)))
    return _symmetric(y, density, high, end_loss)


def _sampled_ends(p: Array, s: Array, log_cut: Array) -> tuple[Array, Array, Array]:
    """Where the sampled pair's densities are cut, and where the log-ratio turns."""
    log_p = jnp.log(p)
    log_q = jnp.maximum(jnp.log1p(-p), -1e300)
    reach = jnp.sqrt(-2 * log_cut)
    high = jnp.maximum(reach, s + jnp.sqrt(2 * jnp.maximum(log_p - log_cut, 1.0)))
    turn = jnp.clip(0.5 * s + (log_q - log_p) / s, -20.0, 1e9)
    return -reach, high, turn


def _sampled_ratio(path: _Path, p: Array) -> tuple[Pair, Pair]:
    """Losses of the sampled pair on the path, and log(density of Q times dx)."""
    s = path.shift
    x, speed = _points(path)
    y = _log_mixture((s * (x[0] - 0.5 * s), s * x[1]), p)
    normal = _log_normal(x)
    return y, (normal[0] + speed[0], normal[1] + speed[1])


def _symmetric(y: Pair, density: Pair, high: Array, end_loss: Array) -> LossLaw:
    """Losses y with P's density and -y with Q's."""
    above = polar(*(density[0] + y[0], density[1] + y[1]))
    below = polar(*(density[0], -density[1]))
    loss = (jnp.concatenate([y[0], -y[0]]), jnp.concatenate([y[1], y[1]]))
    weight = tuple(jnp.concatenate(pair) for pair in zip(above, below, strict=True))
    end_log_weight = -0.5 * high * high + end_loss
    ends = jnp.stack([end_log_weight, jnp.full_like(high, -jnp.inf)])
    return _law(
        loss, (weight[0], weight[1]), ends, jnp.stack([end_loss, jnp.zeros_like(high)])
    )


def _law(loss: Pair, weight: Pair, end_log_weight: Array, end_loss: Array) -> LossLaw:
    def steepest(sign: float) -> Array:
        along = sign * loss[0]
        ratio = loss[1] / jnp.where(along > 0, along, 1.0)
        return jnp.min(jnp.where(along > 0, ratio, jnp.inf), axis=0)

    mass = jnp.sum(weight[0], axis=0)
    right, left = steepest(1.0), steepest(-1.0)
    size = jnp.sum(jnp.hypot(*weight) * jnp.hypot(*loss), axis=0)
    return LossLaw(loss, weight, mass, size, right, left, end_log_weight, end_loss)


def _edges(
    low: Array, high: Array, turns: tuple[Array, ...], s: Array, num_panels: int
) -> Array:
    """Edges (m + 1, n) of panels that are narrower about the turns.

    Their density is ``1 + sum of A sech²((x - turn) / w)``, whose integral is inverted
    by bisection.
    """
    extra = jnp.maximum(s / _TURN_SHIFT - 1, 0.0)
    width = 3.0 / s

    def cumulated(x: Array) -> Array:
        total = x
        for turn in turns:
            total = total + extra * width * jnp.tanh((x - turn) / width)
        return total

    share = jnp.arange(num_panels + 1, dtype=s.dtype)[:, None] / num_panels
    begin, end = cumulated(low), cumulated(high)
    goal = begin + share * (end - begin)

    def halve(_: int, bracket: Pair) -> Pair:
        left, right = bracket
        middle = 0.5 * (left + right)
        below = cumulated(middle) < goal
        return jnp.where(below, middle, left), jnp.where(below, right, middle)

    start = (jnp.broadcast_to(low, goal.shape), jnp.broadcast_to(high, goal.shape))
    left, right = jax.lax.fori_loop(0, _BISECTIONS, halve, start)
    inside = (share > 0) & (share < 1)
    return jnp.where(inside, 0.5 * (left + right), jnp.where(share > 0, high, low))


def _graded_edges(
    low: Array, high: Array, turns: tuple[Array, ...], s: Array, num_panels: int
) -> Array:
    """The same with panels that shrink towards the lower end."""
    edges = _edges(low, high, turns, s, num_panels - _LAYERS)
    first = edges[1] - edges[0]
    powers = _LAYER_RATIO ** -jnp.arange(_LAYERS, 0, -1, dtype=s.dtype)
    layers = edges[0] + first * powers[:, None]
    return jnp.concatenate([edges[:1], layers, edges[1:]])


def _path(edges: Array, floor: Array, turn: Array, s: Array, height: Array) -> _Path:
    nodes, weights = gauss_legendre(_NODES_PER_PANEL)
    width = (edges[1:] - edges[:-1])[:, None]
    node = edges[:-1, None] + width * nodes.reshape(1, -1, 1)
    weight = width * weights.reshape(1, -1, 1)
    flat = (-1, s.shape[0])
    # An integral does not depend on its path: derivatives are taken with the path
    # held, only moved along with the end of the domain, where it must start.
    node, weight = jax.lax.stop_gradient((node.reshape(flat), weight.reshape(flat)))
    starts = jnp.isfinite(floor)
    end = jnp.where(starts, floor, 0.0)
    node = node + (end - jax.lax.stop_gradient(end))
    return _Path(node, weight, floor, turn, s, height)


def _points(path: _Path) -> tuple[Pair, Pair]:
    """Nodes on the path, and ``log dx`` with the weights."""
    height, slope = jax.lax.stop_gradient(_heights(path))
    speed = 0.5 * jnp.log1p(slope * slope) + jnp.log(path.weight)
    return (path.node, height), (speed, jnp.arctan(slope))


def _heights(path: _Path) -> tuple[Array, Array]:
    """Height of the path above its real nodes, and its slope."""
    node = path.node
    at_turn = jnp.minimum(_TOP, _TURN_ANGLE / path.shift)
    starts = jnp.isfinite(path.floor)
    along = jnp.where(starts, node - jnp.where(starts, path.floor, 0.0), 0.0)
    bent = jnp.tanh(_RISE_AT_FLOOR * along / at_turn)
    height = jnp.where(starts, at_turn * bent, at_turn)
    slope = jnp.where(starts, _RISE_AT_FLOOR * (1 - bent * bent), 0.0)
    begin = path.turn + 1.0
    stop = begin + (_TOP - at_turn) / _RISE_BEHIND_TURN
    # A path that starts on the real line must start there exactly.
    origin = jnp.where(starts, path.floor, -1e30)
    for corner, rise in (
        (begin, _RISE_BEHIND_TURN),
        (stop, -_RISE_BEHIND_TURN),
        (jnp.maximum(stop, 2.0), _RISE_AT_END),
    ):
        before = jnp.logaddexp(0.0, origin - corner)
        height = height + rise * (jnp.logaddexp(0.0, node - corner) - before)
        slope = slope + rise / (1 + jnp.exp(jnp.minimum(corner - node, 700.0)))
    return path.height * height, path.height * slope


def _log_mixture(exponent: Pair, p: Array) -> Pair:
    """``log(1 - p + p e^l)``, continued past the turn."""
    log_p, log_q = jnp.log(p), jnp.maximum(jnp.log1p(-p), -1e300)
    low = jnp.minimum(exponent[0], 700.0)
    re, im = expm1_complex(low, exponent[1])
    excess = (p * re, p * im)
    central = (excess[0] ** 2 + excess[1] ** 2 <= 0.25) & (exponent[0] < 700.0)
    near = log1p_complex(*(jnp.where(central, e, 0.0) for e in excess))
    far = log_add_complex(log_q, (exponent[0] + log_p, exponent[1]))
    return (
        jnp.where(central, near[0], far[0]),
        jnp.where(central, near[1], far[1]),
    )


def _real_log_mixture(exponent: Array, p: Array) -> Array:
    log_q = jnp.maximum(jnp.log1p(-p), -1e300)
    small = p * jnp.expm1(jnp.minimum(exponent, 1.0))
    far = jnp.logaddexp(log_q, jnp.log(p) + exponent)
    near = (exponent < 1.0) & (jnp.abs(small) < 0.25)
    return jnp.where(near, jnp.log1p(jnp.where(near, small, 0.0)), far)


def _log_normal(x: Pair) -> Pair:
    """``log phi(x)`` for complex x."""
    return 0.5 * (x[1] * x[1] - x[0] * x[0]) - _LOG_SQRT_2PI, -x[0] * x[1]
