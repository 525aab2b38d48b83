"""Laws of the privacy loss of one Gaussian step, as sums over nodes in the plane.

With ``L = log(P/Q)`` the privacy loss under P, the moment generating function
``M(z) = E_P[e^{z L}]`` is needed far from the real axis, where ``e^{z L}`` oscillates.
All densities here are analytic, so the path of integration may leave the real line: on
a path above it (for ``e^{zL}`` and ``Im z > 0``; below it for ``e^{-zL}``) the
integrand falls off instead of oscillating, and one fixed set of nodes serves every z.

Several laws of the same steps are made at once (V, the leading axis): they differ in
path and cut, and so check one another.

The laws are *cut* where the Gaussian density has fallen below a level that the caller
chooses. Without what is beyond it, M has no far bump that would grow like
``e^{c² s²/2}``: the contour may cross the real axis where it is best for the losses
that do occur. The nodes are those of `loss_paths`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxdp_episodic.losses.loss_paths import (
    Pair,
    Path,
    half_line,
    points,
    whole_line,
)
from jaxdp_episodic.losses.windows import antipodal_turns
from jaxdp_episodic.numerics.complex_exponentials import (
    expm1_complex,
    log1p_complex,
    log_add_complex,
    log_complex,
    polar,
    times,
    versine_sine,
)

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
# Left of it Q has a mass of 1e-19.
_FURTHEST_LEFT = -9.0
# Nodes of a law, unless the caller takes fewer.
NUM_NODES = 384


class LossLaw(NamedTuple):
    """Nodes of ``E_P[e^{zL}]`` over the losses that are not 0; arrays over settings.

    Of several laws all arrays have one more axis in front.

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


def sampled_law(
    sampling_probability: Array,
    shift: Array,
    backward: Array,
    log_cut: Array,
    height: Array,
    num_nodes: int = NUM_NODES,
) -> LossLaw:
    """Law of the sampled pair ``((1-p) N(0,1) + p N(shift,1), N(0,1))``.

    Args:
      sampling_probability: (n,) p in (0, 1].
      shift: (n,) > 0.
      backward: (n,) 1 where P and Q are exchanged, else 0.
      log_cut: (V, n) < 0, logarithm of the density (its peak being 1) at the cuts.
      height: (V, n) scales the path's distance from the real line; about 1.
      num_nodes: of the rule. 160 give 1e-8 of M up to shifts of 4, the default 1e-12.

    Returns:
      V laws, exact up to quadrature error and the losses beyond the cuts.
    """
    s, p = shift, _Rate.of(sampling_probability)
    low, high, turn = _sampled_ends(p, s, log_cut)
    # There P and Q differ by log(1 - p), and losses that low hardly matter.
    low = jnp.where(backward > 0, low, jnp.maximum(low, _FURTHEST_LEFT))
    # P's density carries the losses y; Q's the losses -y of the exchanged pair, on the
    # path below the real line, where everything is conjugate.
    sign, forward = 1 - 2 * backward, 1 - backward

    def place(low: Array, high: Array) -> Pair:
        return whole_line(low, high, turn, s, num_nodes)

    nowhere = jnp.full_like(s, -jnp.inf)
    x, element = _path_points(_each(place, low, high), nowhere, turn, s, height)
    y = _each(lambda x: _log_mixture(_gaussian_loss(x, s), p), x)

    def finish(x: Pair, element: Pair, y: Pair) -> LossLaw:
        normal = _log_normal(x)
        weights = times(
            polar(normal[0] + forward * y[0], sign * normal[1] + forward * y[1]),
            (element[0], sign * element[1]),
        )
        ends = jnp.stack([x[0][0], x[0][-1]])
        end_loss = sign * _real_log_mixture(s * (ends - 0.5 * s), p)
        end_log_weight = -0.5 * ends * ends + forward * end_loss
        return _law((sign * y[0], y[1]), weights, end_log_weight, end_loss)

    return _each(finish, x, element, y)


def swapped_law(
    sampling_probability: Array,
    shift: Array,
    log_cut: Array,
    height: Array,
    num_nodes: int = NUM_NODES,
) -> LossLaw:
    """Law whose two profiles are both the forward one of the sampled pair.

    Arguments as `sampled_law`; there are twice as many nodes.
    """
    s, p = shift, _Rate.of(sampling_probability)
    floor = 0.5 * s
    _, high, turn = _sampled_ends(p, s, log_cut)
    turn = jnp.maximum(turn, floor)

    def place(high: Array) -> Pair:
        return half_line(floor, high, (turn,), s, num_nodes)

    x, element = _path_points(_each(place, high), floor, turn, s, height)
    y = _each(lambda x: _log_mixture(_gaussian_loss(x, s), p), x)

    def finish(x: Pair, element: Pair, y: Pair) -> LossLaw:
        end = x[0][-1]
        end_loss = _real_log_mixture(s * (end - 0.5 * s), p)
        return _symmetric(y, _log_normal(x), element, end, end_loss)

    return _each(finish, x, element, y)


def antipodal_law(
    sampling_probability: Array,
    inner_rate: Array,
    shift: Array,
    log_cut: Array,
    height: Array,
    num_nodes: int = NUM_NODES,
) -> LossLaw:
    """Law whose two profiles are ``H_g(P || Q)`` of the antipodal pair.

    The pair is that of `losses.moments.log_excess_antipodal`; arguments as
    there and in `swapped_law`.
    """
    s, r = shift, inner_rate
    p, log_r = _Rate.of(sampling_probability), jnp.log(r)
    turns = antipodal_turns(p.log, jnp.log1p(-sampling_probability), log_r, s)
    turns = tuple(jnp.clip(t, 0.0, 1e9) for t in turns)
    floor = jnp.zeros_like(s)
    _, high, _ = _sampled_ends(p, s, log_cut)

    def place(high: Array) -> Pair:
        return half_line(floor, high, turns, s, num_nodes)

    line = _each(place, high)
    x, element = _path_points(line, floor, jnp.maximum(*turns), s, height)

    def ratio(x: Pair) -> tuple[Pair, Pair]:
        base = log_add_complex(p.log_rest, (p.log - s * (x[0] + 0.5 * s), -s * x[1]))
        shrunk = expm1_complex(-2 * s * x[0], -2 * s * x[1])
        rise = log_complex(-shrunk[0], -shrunk[1])
        excess = (
            p.log + log_r + s * (x[0] - 0.5 * s) + rise[0] - base[0],
            s * x[1] + rise[1] - base[1],
        )
        return log_add_complex(jnp.zeros_like(s), excess), base

    y, base = _each(ratio, x)

    def finish(x: Pair, element: Pair, y: Pair, base: Pair) -> LossLaw:
        normal = _log_normal(x)
        density = (base[0] + normal[0], base[1] + normal[1])
        end = x[0][-1]
        (end_loss, _), _ = ratio((end, jnp.zeros_like(end)))
        return _symmetric(y, density, element, end, end_loss)

    return _each(finish, x, element, y, base)


class _Rate(NamedTuple):
    """A rate p, ``log(p)`` and ``log(1 - p)``, which is finite; (n,)."""

    rate: Array
    log: Array
    log_rest: Array

    @classmethod
    def of(cls, rate: Array) -> _Rate:
        return cls(rate, jnp.log(rate), jnp.maximum(jnp.log1p(-rate), -1e300))


def _each(function: Callable[..., Any], *arrays: Any) -> Any:
    """A function of each of V laws.

    A loop, since what a loop returns is computed once; XLA would otherwise compute it
    again for each of its uses, which takes four times as long.
    """
    return jax.lax.map(lambda one: function(*one), arrays)


def _path_points(
    line: Pair, floor: Array, turn: Array, s: Array, height: Array
) -> tuple[Pair, Pair]:
    """Points above the (V, J, n) nodes of a line, and dx."""

    def lift(node: Array, weight: Array, height: Array) -> tuple[Pair, Pair]:
        return points(Path(node, weight, floor, turn, s, height))

    return _each(lift, *line, height)


def _gaussian_loss(x: Pair, s: Array) -> Pair:
    """``log(phi(x - s) / phi(x))``."""
    return s * (x[0] - 0.5 * s), s * x[1]


def _sampled_ends(p: _Rate, s: Array, log_cut: Array) -> tuple[Array, Array, Array]:
    """Where the sampled pair's densities are cut, and where the log-ratio turns."""
    reach = jnp.sqrt(-2 * log_cut)
    high = jnp.maximum(reach, s + jnp.sqrt(2 * jnp.maximum(p.log - log_cut, 1.0)))
    turn = jnp.clip(0.5 * s + (p.log_rest - p.log) / s, -20.0, 1e9)
    return -reach, high, turn


def _symmetric(
    y: Pair, density: Pair, element: Pair, high: Array, end_loss: Array
) -> LossLaw:
    """Losses y with P's density and -y with Q's."""
    above = times(polar(density[0] + y[0], density[1] + y[1]), element)
    below = times(polar(density[0], -density[1]), (element[0], -element[1]))
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


def _log_mixture(exponent: Pair, p: _Rate) -> Pair:
    """``log(1 - p + p e^l)``, continued past the turn."""
    low = jnp.minimum(exponent[0], 700.0)
    versine, sine = versine_sine(exponent[1])
    # p (e^l - 1), without cancellation where the loss is small
    gained, grown = jnp.expm1(low), jnp.exp(low)
    near = (p.rate * (gained * (1 - versine) - versine), p.rate * grown * sine)
    gap = exponent[0] + p.log - p.log_rest
    small = jnp.exp(-jnp.abs(gap))
    far = (small * (1 - versine), -small * sine)
    behind = (gap > 0) & (near[0] ** 2 + near[1] ** 2 > 0.25)
    re, im = log1p_complex(
        *(jnp.where(behind, b, a) for a, b in zip(near, far, strict=True))
    )
    return (
        re + jnp.where(behind, exponent[0] + p.log, 0.0),
        im + jnp.where(behind, exponent[1], 0.0),
    )


def _real_log_mixture(exponent: Array, p: _Rate) -> Array:
    small = p.rate * jnp.expm1(jnp.minimum(exponent, 1.0))
    far = jnp.logaddexp(p.log_rest, p.log + exponent)
    near = (exponent < 1.0) & (jnp.abs(small) < 0.25)
    return jnp.where(near, jnp.log1p(jnp.where(near, small, 0.0)), far)


def _log_normal(x: Pair) -> Pair:
    """``log phi(x)`` for complex x."""
    return 0.5 * (x[1] * x[1] - x[0] * x[0]) - _LOG_SQRT_2PI, -x[0] * x[1]
