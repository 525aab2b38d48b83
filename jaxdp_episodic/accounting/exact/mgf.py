"""Moments of the privacy loss of steps, at real and complex orders; pure kernels.

The batch is the last axis of every array; nodes of the contour (K) and of the losses
(J) come first.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxdp_episodic.losses.loss_laws import LossLaw
from jaxdp_episodic.numerics.complex_exponentials import (
    Pair,
    expm1_complex,
    log1p_complex,
    log_complex,
    polar,
    sum_exp_moments,
    sum_expm1,
)

# Every so many nodes of the contour are checked with another law.
_CHECK_STRIDE = 8
# Two laws of as many nodes are about equally good: of what they differ by, how many
# times as much either may be off (seen: twice).
_CHECK_FACTOR = 4.0
# Rounding of M - 1 relative to E|z L| (hundreds of terms, whose errors mostly cancel),
# and of log M relative to its size.
_MOMENT_ROUNDING, _ROUNDING = 1e-16, 4e-16
_LOG_NOTHING = -1e300


class Steps(NamedTuple):
    """K steps of one kind in each of n settings.

    Attributes:
      law, check: by two rules; arrays (J, K n), setting by setting within a step.
      count: (K, n) how often each is taken.
      outer_rate: (K, n) probability that the step sees anything.
      spike: (K, n) loss of the steps that see nothing of the unit, where most are at
        one loss and ``outer_rate`` is 1; else 0.
      gaussian_shift: (K, n) shift of steps that always see the unit: their M is known
        in closed form; 0 for the others.
      spread: (K, n) how far a step's losses that see nothing may lie from ``spike``.
    """

    law: LossLaw
    check: LossLaw
    count: Array
    outer_rate: Array
    spike: Array
    gaussian_shift: Array
    spread: Array


def real_moments(c: Array, groups: tuple[Steps, ...]) -> tuple[Array, Array, Array]:
    """``T log M(c)`` and its first two derivatives, at real c; (..., n)."""
    totals = [jnp.zeros_like(c)] * 3
    for steps in groups:
        repeats = steps.count.shape[0]
        apart = (*c.shape[:-1], repeats, c.shape[-1])
        law = steps.law
        wide = jnp.broadcast_to(c[..., None, :], apart).reshape(*c.shape[:-1], -1)

        sums = sum_exp_moments(wide, law.weight, law.loss)
        outer = steps.outer_rate.reshape(-1)
        excess = outer * (sums[0] - law.mass)
        moment = 1 + jnp.maximum(excess, -1 + 1e-300)
        first = outer * sums[1] / moment
        second = outer * sums[2] / moment - first * first
        shift = steps.gaussian_shift.reshape(-1)
        square = shift * shift
        parts = (jnp.log1p(jnp.maximum(excess, -1 + 1e-15)), first, second)
        known = (0.5 * wide * (wide + 1) * square, (wide + 0.5) * square, square)
        count = steps.count.reshape(-1)
        for i, (part, closed) in enumerate(zip(parts, known, strict=True)):
            value = count * jnp.where(shift > 0, closed, part)
            value = jnp.where(count > 0, value, 0.0)
            totals[i] = totals[i] + jnp.sum(value.reshape(apart), axis=-2)
    return totals[0], totals[1], totals[2]


def log_atoms(groups: tuple[Steps, ...]) -> Array:
    """``T log A``."""
    total = jnp.zeros_like(groups[0].count[0])
    for steps in groups:
        mass = steps.outer_rate * steps.law.mass.reshape(steps.count.shape)
        # The mass of a law without an atom is 1 but for rounding.
        left = jnp.where(mass > 1 - 1e-12, 0.0, 1 - mass)
        left = jnp.where(steps.gaussian_shift > 0, 0.0, left)
        some = left > 0
        log_left = jnp.where(some, jnp.log(jnp.where(some, left, 1.0)), -1e300)
        total += jnp.sum(jnp.where(steps.count > 0, steps.count * log_left, 0.0), 0)
    return total


def core_variance(groups: tuple[Steps, ...]) -> Array:
    """Variance v of the Gaussian that the many small losses add up to; (n,).

    ``M^T`` of losses of a Gaussian is ``e^{v z (1 + z) / 2}``; v is such that, with the
    atom, it agrees at ``z = -1/2``, where rare large losses hardly count. Any v serves
    as a control variate: what is subtracted from the integrand is added to delta.
    """
    middle = jnp.full_like(groups[0].count[0], -0.5)
    grown = jnp.expm1(jnp.minimum(real_moments(middle, groups)[0], 0.0))
    lost = jnp.expm1(log_atoms(groups))
    some = (lost < 0) & (grown > lost)
    share = jnp.where(some, grown - lost, 1.0) / jnp.where(some, -lost, 1.0)
    return jnp.where(some, -8 * jnp.log(jnp.minimum(share, 1.0)), 0.0)


def log_core(z: Pair, variance: Array, log_atom: Array) -> Pair:
    """``log((1 - A^T) e^{v z (1 + z) / 2})``; very small where v is 0."""
    re = 0.5 * variance * (z[0] * (1 + z[0]) - z[1] * z[1])
    im = 0.5 * variance * z[1] * (1 + 2 * z[0])
    return jnp.where(variance > 0, re + log_core_share(log_atom), _LOG_NOTHING), im


def log_core_share(log_atom: Array) -> Array:
    """``log(1 - A^T)``."""
    return jnp.log(jnp.maximum(-jnp.expm1(log_atom), 1e-300))


def without_core(
    z: Pair, log_power: Pair, variance: Array, log_atom: Array
) -> tuple[Pair, Array]:
    """Logarithm of ``M^T`` less the atom and the Gaussian core, and of its terms.

    Returns:
      The complex logarithm at the (K, n) points, and the real one of the largest of
      what is subtracted from one another, to which rounding errors are relative.
    """
    core = log_core(z, variance, log_atom)
    size = jnp.maximum(jnp.maximum(log_power[0], core[0]), log_atom)
    power = polar(log_power[0] - size, log_power[1])
    less = polar(core[0] - size, core[1])
    re = power[0] - less[0] - jnp.exp(log_atom - size)
    im = power[1] - less[1]
    nothing = (re == 0) & (im == 0)
    log_left = log_complex(jnp.where(nothing, 1e-150, re), im)
    return (log_left[0] + size, log_left[1]), size


def log_powers(
    z: Pair, groups: tuple[Steps, ...], *, checked: bool
) -> tuple[Pair, Array]:
    """``T log M`` at (K, n) points and a bound of its error."""
    re, im, error = (jnp.zeros_like(z[0]) for _ in range(3))
    for steps in groups:
        repeats = steps.count.shape[0]
        wide = (jnp.tile(z[0], (1, repeats)), jnp.tile(z[1], (1, repeats)))
        log_moment = _log_moment(wide, steps, steps.law)
        outer = steps.outer_rate.reshape(-1)
        size = outer * steps.law.size * jnp.hypot(*wide)
        off = _MOMENT_ROUNDING * jnp.minimum(size, 3.0)
        off = off + _ROUNDING * jnp.hypot(*log_moment)
        if checked:
            some = (wide[0][::_CHECK_STRIDE], wide[1][::_CHECK_STRIDE])
            again = _log_moment(some, steps, steps.check)
            # The argument is known up to turns.
            turned = 2 * jnp.sin(0.5 * (log_moment[1][::_CHECK_STRIDE] - again[1]))
            gap = jnp.hypot(log_moment[0][::_CHECK_STRIDE] - again[0], turned)
            gap = _CHECK_FACTOR * gap
            off += jnp.repeat(gap, _CHECK_STRIDE, axis=0)[: z[0].shape[0]]
        count = steps.count.reshape(-1)

        def total(a: Array, count=count, repeats=repeats) -> Array:
            a = jnp.where(count > 0, count * a, 0.0)
            return jnp.sum(a.reshape(a.shape[0], repeats, -1), axis=1)

        re, im = re + total(log_moment[0]), im + total(log_moment[1])
        error = error + total(off)
    return (re, im), error


def _log_moment(z: Pair, steps: Steps, law: LossLaw) -> Pair:
    outer = steps.outer_rate.reshape(-1)
    re, im = sum_expm1(z, law.weight, law.loss)
    excess = (outer * re, outer * im)
    shift = steps.gaussian_shift.reshape(-1)
    square = 0.5 * shift * shift
    closed = (
        square * (z[0] * (1 + z[0]) - z[1] * z[1]),
        square * z[1] * (1 + 2 * z[0]),
    )
    always = outer >= 1
    # Steps that are taken with a probability need M itself.
    grown = expm1_complex(jnp.minimum(closed[0], 700.0), closed[1])
    known = shift > 0
    mixed = log1p_complex(
        *(jnp.where(known, outer * g, e) for g, e in zip(grown, excess, strict=True))
    )
    return (
        jnp.where(known & always, closed[0], mixed[0]),
        jnp.where(known & always, closed[1], mixed[1]),
    )
