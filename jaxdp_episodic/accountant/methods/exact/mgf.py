"""Steps as nodes of their losses, and moments of these at real and complex orders.

Pure kernels, which share the one rule by which nodes are laid and checked.

The batch is the last axis of every array; nodes of the contour (K) and of the losses
(J) come first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxdp_episodic.accountant.losses.loss_nodes import LossNodes, NodeRule
from jaxdp_episodic.accountant.methods.run import Group
from jaxdp_episodic.accountant.numerics.complex_exponentials import (
    Pair,
    expm1_complex,
    log1p_complex,
    polar,
    sum_exp_moments,
    sum_expm1,
)
from jaxdp_episodic.accountant.numerics.loops import Array, at, map_arrays, namespace

# At every so many nodes of the contour the moment is checked with other loss nodes.
_CHECK_STRIDE = 8
# Two rules of as many nodes have about the same error: bound of that of either, over
# their difference (twice was seen).
_CHECK_FACTOR = 4.0
# Rounding of M - 1 relative to E|z L| (hundreds of terms, whose errors mostly cancel),
# and of log M relative to its size.
_MOMENT_ROUNDING, _ROUNDING = 1e-16, 4e-16
_LOG_NOTHING = -1e300
# Imaginary part of the checking nodes' path, relative to the other's, and by how many
# nats they are cut later. Much lower, the terms of rare large losses would fall off too
# slowly on the contour, and the check would be the less accurate of the two.
_CHECK_HEIGHT, _CHECK_CUT = 0.9, -8.0
# None is cut nearer than where the density is e^-18 of its peak.
_LEAST_CUT = -18.0


class Steps(NamedTuple):
    """K steps of one kind in each of n settings.

    Attributes:
      nodes, check: by two rules; arrays (J, K n), setting by setting within a step.
      count: (K, n) how often each is taken.
      outer_rate: (K, n) probability that the step sees anything.
      spike: (K, n) loss of the steps that see nothing of the unit, where most are at
        one loss and ``outer_rate`` is 1; else 0.
      gaussian_shift: (K, n) shift of steps that always see the unit: their M is known
        in closed form; 0 for the others.
      spread: (K, n) how far a step's losses that see nothing may lie from ``spike``.
      is_discrete: (K n,) where losses have atoms other than at 0, all of them bounded;
        None for mechanisms that never do, which need not be compiled with them.
    """

    nodes: LossNodes
    check: LossNodes
    count: Array
    outer_rate: Array
    spike: Array
    gaussian_shift: Array
    spread: Array
    is_discrete: Array | None


def steps_of(
    group: Group, backward: Array, log_cut: Array, *, num_nodes: int, num_terms: int
) -> Steps:
    """The nodes of one group's losses, and others that check them.

    Args:
      group: (K, n) steps.
      backward: (n,) 1 or 0.
      log_cut: (n,) logarithm of the density at which the distributions are cut.
      num_nodes: of each.
      num_terms: of those that are mixtures, else 1.
    """
    xp = namespace(group.count, backward, log_cut)
    shape = group.count.shape

    def flat(a: Array) -> Array:
        return xp.broadcast_to(a, shape).reshape(-1)

    loss, back, cut = map_arrays(flat, (group.loss, backward, log_cut))
    # The cut is relative to the mass of the steps that see the unit.
    cut = cut - xp.log(loss.outer_rate)
    # The nodes and those that check them.
    cuts = xp.minimum(xp.stack([cut, cut + _CHECK_CUT]), _LEAST_CUT)
    heights = xp.stack([xp.ones_like(cut), xp.full_like(cut, _CHECK_HEIGHT)])
    both = loss.nodes(NodeRule(back, cuts, heights, num_nodes, num_terms))
    sign = 1 - 2 * backward
    nodes = at(both, 0)
    atoms = None
    if group.loss.may_have_atoms:
        # Nodes of a smooth density on the real line stand for no atoms.
        atoms = ((nodes.right <= 0) | (nodes.left <= 0)) & (nodes.spacing <= 0)
        atoms = atoms & (loss.gaussian_shift() <= 0)
    return Steps(
        nodes,
        at(both, 1),
        group.count,
        group.loss.outer_rate,
        sign * group.loss.bulk_loss(),
        group.loss.gaussian_shift(),
        group.loss.bulk_width(),
        atoms,
    )


def real_moments(c: Array, groups: tuple[Steps, ...]) -> tuple[Array, Array, Array]:
    """``T log M(c)`` and its first two derivatives, at real c; (..., n)."""
    xp = namespace(c, groups[0].count)
    totals = [xp.zeros_like(c)] * 3
    for steps in groups:
        repeats = steps.count.shape[0]
        apart = (*c.shape[:-1], repeats, c.shape[-1])
        nodes = steps.nodes
        wide = xp.broadcast_to(c[..., None, :], apart).reshape(*c.shape[:-1], -1)

        sums = sum_exp_moments(wide, nodes.weight, nodes.loss)
        outer = steps.outer_rate.reshape(-1)
        excess = outer * (sums[0] - nodes.mass)
        moment = 1 + xp.maximum(excess, -1 + 1e-300)
        first = outer * sums[1] / moment
        second = outer * sums[2] / moment - first * first
        shift = steps.gaussian_shift.reshape(-1)
        square = shift * shift
        parts = (xp.log1p(xp.maximum(excess, -1 + 1e-15)), first, second)
        known = (0.5 * wide * (wide + 1) * square, (wide + 0.5) * square, square)
        count = steps.count.reshape(-1)
        for i, (part, closed) in enumerate(zip(parts, known, strict=True)):
            value = count * xp.where(shift > 0, closed, part)
            value = xp.where(count > 0, value, 0.0)
            totals[i] = totals[i] + xp.sum(value.reshape(apart), axis=-2)
    return totals[0], totals[1], totals[2]


def log_atoms(groups: tuple[Steps, ...]) -> Array:
    """``T log A``."""
    xp = namespace(groups[0].count)
    total = xp.zeros_like(groups[0].count[0])
    for steps in groups:
        mass = steps.outer_rate * steps.nodes.mass.reshape(steps.count.shape)
        # The mass of a distribution without an atom is 1 but for rounding.
        left = xp.where(mass > 1 - 1e-12, 0.0, 1 - mass)
        left = xp.where(steps.gaussian_shift > 0, 0.0, left)
        some = left > 0
        log_left = xp.where(some, xp.log(xp.where(some, left, 1.0)), -1e300)
        total += xp.sum(xp.where(steps.count > 0, steps.count * log_left, 0.0), 0)
    return total


def core_variance(groups: tuple[Steps, ...]) -> Array:
    """Variance v of the Gaussian that the many small losses add up to; (n,).

    ``M^T`` of losses of a Gaussian is ``e^{v z (1 + z) / 2}``; v is such that, with the
    atom, it agrees at ``z = -1/2``, where rare large losses hardly count. Any v serves
    as a control variate: what is subtracted from the integrand is added to delta.
    """
    xp = namespace(groups[0].count)
    middle = xp.full_like(groups[0].count[0], -0.5)
    grown = xp.expm1(xp.minimum(real_moments(middle, groups)[0], 0.0))
    lost = xp.expm1(log_atoms(groups))
    some = (lost < 0) & (grown > lost)
    share = xp.where(some, grown - lost, 1.0) / xp.where(some, -lost, 1.0)
    return xp.where(some, -8 * xp.log(xp.minimum(share, 1.0)), 0.0)


def log_core(z: Pair, variance: Array, log_atom: Array) -> Pair:
    """``log((1 - A^T) e^{v z (1 + z) / 2})``; very small where v is 0."""
    xp = namespace(z[0], variance, log_atom)
    re = 0.5 * variance * (z[0] * (1 + z[0]) - z[1] * z[1])
    im = 0.5 * variance * z[1] * (1 + 2 * z[0])
    return xp.where(variance > 0, re + log_core_share(log_atom), _LOG_NOTHING), im


def log_core_share(log_atom: Array) -> Array:
    """``log(1 - A^T)``."""
    xp = namespace(log_atom)
    return xp.log(xp.maximum(-xp.expm1(log_atom), 1e-300))


def without_core(
    z: Pair, log_power: Pair, variance: Array, log_atom: Array
) -> tuple[Pair, Array]:
    """``M^T`` less the atom and the Gaussian core, at (K, n) points.

    Returns:
      It, relative to the largest of what is subtracted from one another, to which
      rounding errors are relative too; and the logarithm of that.
    """
    xp = namespace(z[0], log_power[0], variance, log_atom)
    core = log_core(z, variance, log_atom)
    size = xp.maximum(xp.maximum(log_power[0], core[0]), log_atom)
    power = polar(log_power[0] - size, log_power[1])
    less = polar(core[0] - size, core[1])
    re = power[0] - less[0] - xp.exp(log_atom - size)
    im = power[1] - less[1]
    nothing = (re == 0) & (im == 0)
    return (xp.where(nothing, 1e-150, re), im), size


def log_powers(
    z: Pair, groups: tuple[Steps, ...], *, checked: bool
) -> tuple[Pair, Array]:
    """``T log M`` at (K, n) points and a bound of its error."""
    xp = namespace(z[0], groups[0].count)
    re, im, error = (xp.zeros_like(z[0]) for _ in range(3))
    for steps in groups:
        repeats = steps.count.shape[0]
        wide = (xp.tile(z[0], (1, repeats)), xp.tile(z[1], (1, repeats)))
        log_moment = _log_moment(wide, steps, steps.nodes)
        outer = steps.outer_rate.reshape(-1)
        size = outer * steps.nodes.size * xp.hypot(*wide)
        off = _MOMENT_ROUNDING * xp.minimum(size, 3.0)
        off = off + _ROUNDING * xp.hypot(*log_moment)
        if checked:
            some = (wide[0][::_CHECK_STRIDE], wide[1][::_CHECK_STRIDE])
            again = _log_moment(some, steps, steps.check)
            # The argument is known up to turns.
            turned = 2 * xp.sin(0.5 * (log_moment[1][::_CHECK_STRIDE] - again[1]))
            gap = xp.hypot(log_moment[0][::_CHECK_STRIDE] - again[0], turned)
            gap = _CHECK_FACTOR * gap
            off += xp.repeat(gap, _CHECK_STRIDE, axis=0)[: z[0].shape[0]]
        count = steps.count.reshape(-1)

        def total(a: Array, count=count, repeats=repeats) -> Array:
            a = xp.where(count > 0, count * a, 0.0)
            return xp.sum(a.reshape(a.shape[0], repeats, -1), axis=1)

        re, im = re + total(log_moment[0]), im + total(log_moment[1])
        error = error + total(off)
    return (re, im), error


def _log_moment(z: Pair, steps: Steps, nodes: LossNodes) -> Pair:
    xp = namespace(z[0], steps.count, nodes.mass)
    outer = steps.outer_rate.reshape(-1)
    re, im = sum_expm1(z, nodes.weight, nodes.loss)
    excess = (outer * re, outer * im)
    shift = steps.gaussian_shift.reshape(-1)
    square = 0.5 * shift * shift
    closed = (
        square * (z[0] * (1 + z[0]) - z[1] * z[1]),
        square * z[1] * (1 + 2 * z[0]),
    )
    always = outer >= 1
    # Steps that are taken with a probability need M itself.
    grown = expm1_complex(xp.minimum(closed[0], 700.0), closed[1])
    known = shift > 0
    mixed = log1p_complex(
        *(xp.where(known, outer * g, e) for g, e in zip(grown, excess, strict=True))
    )
    return (
        xp.where(known & always, closed[0], mixed[0]),
        xp.where(known & always, closed[1], mixed[1]),
    )


def have_atoms(groups: tuple[Steps, ...]) -> bool:
    """Whether any losses may have atoms other than at 0."""
    return any(steps.is_discrete is not None for steps in groups)


def last_imaginary_part(groups: tuple[Steps, ...]) -> Array:
    """Imaginary part of z up to which real nodes resolve their density; (n,)."""
    xp = namespace(groups[0].count)
    height = xp.full_like(groups[0].count[0], xp.inf)
    for steps in groups:
        spacing = steps.nodes.spacing
        counts = (spacing > 0) & (steps.count.reshape(-1) > 0)
        own = xp.where(counts, math.pi / xp.where(counts, spacing, 1.0), xp.inf)
        height = xp.minimum(height, xp.min(own.reshape(steps.count.shape), axis=0))
    return height


def first_return(groups: tuple[Steps, ...]) -> Array:
    """Imaginary part below which no two phases of atoms agree; (n,), inf without.

    Below it ``|M|`` of discrete losses falls along a vertical line, as its derivative
    is a sum of ``-(L - L') sin(y (L - L'))`` with arguments below pi.
    """
    xp = namespace(groups[0].count)
    height = xp.full_like(groups[0].count[0], xp.inf)
    for steps in groups:
        if steps.is_discrete is None:
            continue
        loss = steps.nodes.loss[0]
        width = xp.max(loss, axis=0) - xp.min(loss, axis=0)
        counts = steps.is_discrete & (steps.count.reshape(-1) > 0)
        own = xp.where(counts, math.pi / xp.maximum(width, 1e-300), xp.inf)
        height = xp.minimum(height, xp.min(own.reshape(steps.count.shape), axis=0))
    return height


def log_envelope(z: Pair, groups: tuple[Steps, ...]) -> Array:
    """Upper bound of ``T log |M|`` at (K, n) points that falls along a vertical line.

    Of discrete losses the sum of the nodes' absolute values, which tends to what atoms
    alone would give: their phases agree again and again far from the axis. Of others it
    is ``|M|`` itself.
    """
    xp = namespace(z[0], groups[0].count)
    total = xp.zeros_like(z[0])
    for steps in groups:
        repeats = steps.count.shape[0]
        x, y = (xp.tile(part, (1, repeats)) for part in z)
        bound = _log_moment((x, y), steps, steps.nodes)[0]
        if steps.is_discrete is not None:
            bound = xp.where(steps.is_discrete, _log_absolute(x, y, steps), bound)
        count = steps.count.reshape(-1)
        bound = xp.where(count > 0, count * bound, 0.0)
        total = total + xp.sum(bound.reshape(bound.shape[0], repeats, -1), axis=1)
    return total


def _log_absolute(x: Array, y: Array, steps: Steps) -> Array:
    """Logarithm of the sum of the nodes' absolute values, one step each."""
    xp = namespace(x, steps.count)
    nodes = steps.nodes
    size = xp.log(xp.maximum(xp.hypot(*nodes.weight), 1e-300))
    term = x[:, None] * nodes.loss[0] - y[:, None] * nodes.loss[1] + size
    outer = steps.outer_rate.reshape(-1)
    rest = xp.log(xp.maximum(1 - outer * nodes.mass, 1e-15))
    largest = xp.maximum(xp.max(term, axis=1), rest)
    every = xp.sum(xp.exp(term - largest[:, None]), axis=1)
    return largest + xp.log(outer * every + xp.exp(rest - largest))
