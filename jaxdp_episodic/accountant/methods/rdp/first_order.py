"""Where the search for the best order starts."""

from __future__ import annotations

from jaxdp_episodic.accountant.methods.run import Group
from jaxdp_episodic.accountant.numerics.loops import Array, namespace

# Shift beyond which there is no order whose moment is that of small losses.
_LARGE_SHIFT = 1e3


def first_order(groups: tuple[Group, ...], budget: Array | float) -> Array:
    """An initial log t of the best order: the smaller of two approximations."""
    # One is where small rates spend the budget, the other where rate^alpha e^{alpha
    # (alpha-1) shift²/2} takes over: a search from the wrong side of that jump would
    # have to bisect.
    xp = namespace(groups[0].count)
    curvature, jump = 0.0, xp.inf
    for group in groups:
        hints = group.loss.hints()
        rate, s = hints.rate, hints.shift
        # The variance of the privacy loss: of order rate² where losses are small; for
        # large shifts a loss of s²/2 comes up with probability `rate`.
        growth = xp.expm1(xp.minimum(s * s, 30.0))
        variance = rate * (s**2 + 0.25 * s**4)
        small = xp.minimum(rate**2 * growth, variance)
        variance = xp.where(s > _LARGE_SHIFT, variance, small)
        curvature += xp.sum(group.count * group.loss.outer_rate * variance, axis=0)
        last = _jump_order(xp.log(hints.odds), s, group, budget)
        # Below order 2 the moment is that of small losses.
        jump = xp.minimum(jump, xp.min(xp.where(last > 2, last, xp.inf), axis=0))
    smooth = 0.5 * (xp.log(2.0 * budget) - xp.log(curvature))
    return xp.minimum(smooth, xp.log(jump - 1))


def _jump_order(
    log_rate: Array, s: Array, group: Group, budget: Array | float
) -> Array:
    """The order at which the jump of L(t) has spent the budget; inf without a jump."""
    xp = namespace(log_rate, s, group.count)
    half = 0.5 * s * s

    def reaching(log_excess: Array) -> Array:
        """Alpha with ``alpha log_rate + alpha (alpha-1) s²/2 = log_excess``."""
        b = log_rate - half
        root = xp.sqrt(xp.maximum(b * b + 4 * half * log_excess, 0.0))
        return xp.where(b < 0, (root - b) / (2 * half), xp.inf)

    counts = xp.maximum(group.count, 1e-300)
    log_outer = xp.log(group.loss.outer_rate)
    top = reaching(-log_outer)  # where M - 1 = 1 and growth slows down
    steepness = xp.maximum((top - 1) * (log_rate + top * s * s), 1.0)
    # t L' = count M steepness = budget; one nat more, to start on the steep side.
    needed = xp.log(budget) - xp.log(counts * steepness) + 1.0
    beyond = xp.maximum(top, xp.sqrt(2 * budget / counts) / s)
    return xp.where(needed > 0, beyond, reaching(xp.minimum(needed, 0.0) - log_outer))
