"""Loss distributions of steps as nodes, and their moments at real and complex orders.

Pure kernels; settings are the last axis.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.loss_nodes import LossNodes, NodeRule
from jaxdp_episodic.accountant.methods.run import Group
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    at,
    fori_loop,
    map_arrays,
    where_needed,
)
from jaxdp_episodic.accountant.numerics.special import (
    Pair,
    log1p_complex,
    polar,
    sum_exp_moments,
    sum_expm1,
)

# Lean of the contour (slope of its asymptote, dx / dy) relative to the largest at which
# the terms of the nodes decay. At 1 a Gaussian's would not.
_LEAN_SHARE = 0.7
# The same for the nodes of the checking rule.
_CHECK_LEAN_SHARE = 0.9
# Every 8th node of the contour is also computed by the checking rule of the losses.
_CHECK_STRIDE = 8
# Bound of a rule's error over its difference from the checking rule; 2 was observed.
CHECK_FACTOR = 4.0
# Rounding of M - 1 relative to E|z L|: hundreds of terms, whose errors mostly cancel.
_MOMENT_ROUNDING = 1e-16
# Rounding of log M relative to its size.
_ROUNDING = 4e-16
# The checking rule: imaginary part of its path relative to the main rule's. With a much
# lower path the terms of rare large losses would decay too slowly on the contour, and
# the check would be the less accurate rule.
_CHECK_HEIGHT = 0.9
# The checking rule: nats by which it truncates at a lower density.
_CHECK_CUT = -8.0
# Nats by which the density must fall between two parts of a distribution.
_VALLEY = 2.0
# Largest loss up to which no two parts lie so far apart that their phases can agree
# again: a Gaussian of shift s has the mean s²/2 and the width s.
_NEAR_LOSS = 80.0
# Distance of two parts, in their widths, from which they lie far apart.
_WIDTHS = 3.0
# Largest error of a rule's total probability with which it is used.
_MASS_ERROR = 1e-3
# Largest log-density, relative to its peak, at which distributions are truncated.
_LEAST_CUT = -18.0
# Undetected error of moments of the exchanged pair, relative to 1 and to their
# logarithm; 5e-5 was observed in 1,000 random settings.
_CHECK_MARGIN = 1e-3
# Log of the largest contribution of the truncated losses on the contour: M^T may be 1,
# of which 1e-6 may be left without the bulk.
_TRUNCATED = -40.0
# Logarithm of the largest integrand of these moments at the truncation.
_NEGLIGIBLE_END = -25.0
# Stands for log(0) where -inf would make NaN.
LOG_ZERO = -1e300


class Steps(NamedTuple):
    """K steps of one kind in each of n settings; arrays are (K, n) except the nodes."""

    nodes: LossNodes  # arrays (J, K n), setting by setting within a step
    check: LossNodes  # the same by the checking rule
    count: Array  # number of times that each step runs
    outer_rate: Array  # probability that the step can see the unit
    # (n,) the composed loss without the unit, of steps whose losses nearly all equal it
    # and whose ``outer_rate`` is 1
    location: Array
    width: Array  # (n,) largest distance of losses without the unit from ``location``
    # (2, n) the largest leans of a contour to the right and to the left
    steepest: Array
    log_atom: Array  # (n,) ``T log A``, A the probability of the atom at loss 0
    # (n,) the largest real c at which truncated losses are negligible on the contour
    largest_center: Array
    # (n,) whether parts of the losses lie so far apart that |M| need not fall along the
    # contour, as their phases agree again.
    lie_apart: Array


def steps_of(
    xp: Any, group: Group, backward: Array, log_cut: Array, num_nodes: int
) -> Steps:
    """The nodes of one group's losses, (K, n), by the main and the checking rule."""
    shape = group.count.shape
    loss = map_arrays(operator.methodcaller("reshape", -1), group.loss)
    back, cut = xp.tile(xp.array([backward, log_cut]), len(group.count))
    # The cut is relative to the probability of the steps that see the unit.
    cut = cut - xp.log(loss.outer_rate)
    cuts = xp.minimum(xp.array([cut, cut + _CHECK_CUT]), _LEAST_CUT)
    heights = xp.array([xp.ones_like(cut), xp.full_like(cut, _CHECK_HEIGHT)])
    num_terms = int(np.max(loss.num_terms))  # 1 on JAX
    rules = loss.nodes(NodeRule(back, cuts, heights, num_nodes, num_terms))
    nodes, check = at(rules, 0), at(rules, 1)
    least = xp.exp(xp.minimum(cut, _LEAST_CUT))
    apart = _lie_apart(xp, nodes, least, loss)
    # A path that does not rise above the real line has no place for a contour.
    flat = (nodes.right <= 0) | (nodes.left <= 0)
    apart = (apart | flat).reshape(shape) & (group.count > 0)
    mass = nodes.mass
    # A rule whose total is no probability, or differs from the check, becomes NaN.
    right = xp.abs(mass - 0.5) <= 0.5 + _MASS_ERROR
    right = right & (xp.abs(mass - check.mass) <= _MASS_ERROR)
    mass = group.loss.outer_rate * xp.where(right, mass, xp.nan).reshape(shape)
    # The total of a distribution without an atom at 0 is 1 up to rounding.
    left = xp.where(mass > 1 - 1e-12, 0.0, 1 - mass)
    none = left <= 0
    log_left = xp.where(none, LOG_ZERO, xp.log(xp.where(none, 1.0, left)))
    bulk_loss, bulk_width = group.loss.bulk()
    leans = xp.array([nodes.right, nodes.left]), xp.array([check.right, check.left])
    leans = xp.minimum(_LEAN_SHARE * leans[0], _CHECK_LEAN_SHARE * leans[1])
    leans = xp.where(group.count > 0, leans.reshape(2, *shape), xp.inf)
    number, end_loss = (group.count * group.loss.outer_rate).reshape(-1), nodes.end_loss
    log_mass = xp.log(xp.maximum(number, 1e-300)) + nodes.end_log_weight
    largest = (_TRUNCATED - log_mass) / xp.where(end_loss > 0, end_loss, 1.0)
    largest = xp.where((end_loss > 0) & (number > 0), largest, xp.inf).min(axis=0)
    return Steps(
        nodes,
        check,
        group.count,
        group.loss.outer_rate,
        (group.count * ((1 - 2 * backward) * bulk_loss)).sum(axis=0),
        (group.count * bulk_width).sum(axis=0),
        leans.min(axis=1),
        xp.where(group.count > 0, group.count * log_left, 0.0).sum(axis=0),
        largest.reshape(shape).min(axis=0),
        apart.any(axis=0),
    )


def _composed(xp: Any, terms: Array, steps: Steps) -> Array:
    """Sum over steps of count times term, (..., K n) to (..., n); 0 times inf is 0."""
    count = steps.count.reshape(-1)
    terms = xp.where(count > 0, count * terms, 0.0)
    if len(steps.count) == 1:
        return terms
    return terms.reshape(*terms.shape[:-1], len(steps.count), -1).sum(axis=-2)


def real_moments(
    xp: Any, c: Array, groups: tuple[Steps, ...], *, by_check: bool = False
) -> Array:
    """``T log M(c)`` and its first two derivatives, at real c; (3, ..., n)."""
    total = 0.0
    for steps in groups:
        nodes = steps.check if by_check else steps.nodes
        wide = xp.tile(c, len(steps.count))
        sums = sum_exp_moments(wide, nodes.weight, nodes.loss)
        outer = steps.outer_rate.reshape(-1)
        excess = outer * (sums[0] - nodes.mass)
        moment = 1 + xp.maximum(excess, -1 + 1e-300)
        first = outer * sums[1] / moment
        second = outer * sums[2] / moment - first * first
        log_moment = xp.log1p(xp.maximum(excess, -1 + 1e-15))
        parts = xp.array([log_moment, first, second])
        total = total + _composed(xp, parts, steps)
    return total


def exchanged_moments(xp: Any, c: Array, steps: Steps) -> Array:
    """*Upper bound* of ``T log M(c)``, c > 0, with P and Q exchanged; inf if unknown.

    For one kind of step.
    """
    # E_Q[e^{-cL}] = E_P[e^{-(1+c)L}] is a sum over the same nodes. The logarithms of
    # Q's density and of the integrand are concave, so the truncated part is negligible
    # if both ends are low.
    z, nodes, check = -(1 + c), steps.nodes, steps.check
    first = sum_exp_moments(z, nodes.weight, nodes.loss)[0] / nodes.mass
    again = sum_exp_moments(z, check.weight, check.loss)[0] / check.mass
    mean = xp.maximum(first, again) + CHECK_FACTOR * xp.abs(first - again)
    times, outer = steps.count[0], steps.outer_rate[0]
    known = xp.minimum(first, again) > 1 - _CHECK_MARGIN
    count = xp.log(xp.maximum(times * outer, 1e-300))
    for log_weight, loss in zip(nodes.end_log_weight, nodes.end_loss, strict=True):
        known = known & (count + log_weight + z * loss < _NEGLIGIBLE_END)
    bound = times * xp.log1p(outer * nodes.mass * xp.maximum(mean - 1, 0.0))
    return xp.where(known, bound + _CHECK_MARGIN * (1 + bound), xp.inf)


class Bulk(NamedTuple):
    """The Gaussian that many small losses add up to, next to the atom; (n,) arrays."""

    variance: Array  # v; 0 if there is none
    log_atom: Array  # ``T log A``: the logarithm of the atom at loss 0
    log_mass: Array  # ``log(1 - A^T)``


def bulk_of(xp: Any, groups: tuple[Steps, ...]) -> Bulk:
    """The bulk of a run."""
    # M^T of a Gaussian's losses is e^{v z (1 + z) / 2}. v makes it agree with M^T at
    # z = -1/2, where rare large losses hardly count. Any v is a valid control variate.
    middle = xp.full_like(groups[0].count[0], -0.5)
    power = xp.expm1(xp.minimum(real_moments(xp, middle, groups)[0], 0.0))  # M^T - 1
    log_atom = groups[0].log_atom
    for steps in groups[1:]:
        log_atom = log_atom + steps.log_atom
    rest = -xp.expm1(log_atom)  # 1 - A^T
    some = (rest > 0) & (power > -rest)
    share = xp.where(some, power + rest, 1.0) / xp.where(some, rest, 1.0)
    variance = xp.where(some, -8 * xp.log(xp.minimum(share, 1.0)), 0.0)
    return Bulk(variance, log_atom, xp.log(xp.maximum(rest, 1e-300)))


def without_bulk(xp: Any, z: Pair, log_power: Pair, bulk: Bulk) -> tuple[Pair, Array]:
    """``M^T`` minus the atom and the bulk, at (K, n) points, over e^size; size."""
    variance, log_atom, log_mass = bulk
    log_re = 0.5 * variance * (z[0] * (1 + z[0]) - z[1] * z[1]) + log_mass
    log_re = xp.where(variance > 0, log_re, LOG_ZERO)
    log_im = 0.5 * variance * z[1] * (1 + 2 * z[0])
    size = xp.maximum(xp.maximum(log_power[0], log_re), log_atom)
    sizes, angles = xp.array([log_power[0], log_re]), xp.array([log_power[1], log_im])
    re, im = polar(sizes - size, angles)
    re = re[0] - re[1] - xp.exp(log_atom - size)
    im = im[0] - im[1]
    nothing = (re == 0) & (im == 0)
    return (xp.where(nothing, 1e-150, re), im), size


def log_powers(
    xp: Any, z: Pair, groups: tuple[Steps, ...], *, checked: bool
) -> tuple[Pair, Array]:
    """``T log M`` at (K, n) points, and a bound of its error."""
    re = im = error = xp.zeros_like(z[0])
    for steps in groups:
        nodes, check = steps.nodes, steps.check
        wide = xp.tile(z[0], len(steps.count)), xp.tile(z[1], len(steps.count))
        # M - 1 = outer_rate E[e^{zL} - 1]
        excess, outer = sum_expm1(wide, nodes.weight, nodes.loss), steps.outer_rate
        outer = outer.reshape(-1)
        log_moment = log1p_complex(outer * excess[0], outer * excess[1])
        size = outer * nodes.size * xp.hypot(*wide)
        off = _MOMENT_ROUNDING * xp.minimum(size, 3.0)
        off = off + _ROUNDING * xp.hypot(*log_moment)
        if checked:
            some = slice(None, None, _CHECK_STRIDE)
            at_some = wide[0][some], wide[1][some]
            again = sum_expm1(at_some, check.weight, check.loss)
            # |M' - M| / |M|
            gap = xp.hypot(
                outer * excess[0][some] - outer * again[0],
                outer * excess[1][some] - outer * again[1],
            )
            gap = CHECK_FACTOR * gap * xp.exp(-log_moment[0][some])
            off += xp.repeat(gap, _CHECK_STRIDE, axis=0)[: z[0].shape[0]]
        re = re + _composed(xp, log_moment[0], steps)
        im = im + _composed(xp, log_moment[1], steps)
        error = error + _composed(xp, off, steps)
    return (re, im), error


def _lie_apart(xp: Any, nodes: LossNodes, least: Array, mechanism: Any) -> Array:
    """Whether the mean losses of two parts lie far apart, in their widths, (m,)."""
    # A part begins behind a valley of the density, which lies below both sides.
    size, zero = xp.hypot(*nodes.weight), xp.zeros_like(nodes.mass)
    height = xp.log(xp.maximum(size, 1e-300))
    both = xp.stack([height, height[::-1]], axis=1)
    sides = xp.maximum.accumulate(both, axis=0)
    low = xp.minimum(sides[:, 0], sides[::-1, 1]) - height > _VALLEY
    begins = low & ~xp.concatenate([0 > height[:1] * 0, low[:-1]])

    def flushed(state: tuple[Array, ...]) -> tuple[Array, ...]:
        size, first, second, low, high, width = state
        some = size > least
        size = xp.where(some, size, 1.0)
        mean = first / size
        square = xp.maximum(second / size - mean * mean, 0.0)
        return (
            xp.where(some, xp.minimum(low, mean), low),
            xp.where(some, xp.maximum(high, mean), high),
            xp.where(some, xp.maximum(width, square), width),
        )

    def add(j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        new, before, loss = at(begins, j), flushed(state), at(nodes.loss[0], j)
        ends = (xp.where(new, a, b) for a, b in zip(before, state[3:], strict=True))
        part = at(size, j)
        terms = zip((part, part * loss, part * loss * loss), state[:3], strict=True)
        return *(a + xp.where(new, 0.0, b) for a, b in terms), *ends

    # Steps that do not see the unit have loss 0: an atom, whatever the others have.
    atom = 1 - mechanism.outer_rate * nodes.mass > 1e-12
    seen = xp.where(size > least, xp.abs(nodes.loss[0]), 0.0)
    needed = (atom | xp.any(begins, axis=0)) & (xp.max(seen, axis=0) > _NEAR_LOSS)
    # Not asked of several overlapping terms, whose answers have a sufficient error
    # estimate: none of 300 with little noise was outside of its certified ends.
    needed = needed & (mechanism.num_terms <= 1)

    def gap_in_widths() -> Array:
        start = zero, zero, zero, zero + xp.inf, zero - xp.inf, zero
        low, high, square = flushed(fori_loop(xp, 0, len(begins), add, start))
        low = xp.where(atom, xp.minimum(low, 0.0), low)
        gap = xp.where(atom, xp.maximum(high, 0.0), high) - low
        return gap / xp.sqrt(square)

    return where_needed(xp, ~needed, zero, gap_in_widths) > _WIDTHS
