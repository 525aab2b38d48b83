"""The moment of a whole run, of its steps' moments: a pure kernel of `methods.rdp`."""

from __future__ import annotations

from typing import Any

from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.methods.run import Group
from jaxdp_episodic.accountant.numerics.loops import Array, namespace, sigmoid

# The direction of what is reported: of each step the larger one, an upper bound of both
# directions of the run.
LARGER = "larger"


def log_moment(
    t: Array, groups: tuple[Group, ...], rule: MomentRule
) -> tuple[Array, ...]:
    """``L(t)`` of the whole run, (n,) >= 0; upper bound, exact up to quadrature."""
    xp = namespace(t, groups[0].count)
    totals: list[Array] = [xp.zeros_like(t)] * (3 if rule.with_derivatives else 1)
    for group in groups:
        shape = group.count.shape
        loss = group.loss.map(lambda a: a.reshape(-1))
        orders = xp.broadcast_to(t, shape).reshape(-1)
        excess, *ratios = _log_excess(loss, orders, rule)
        log_odds = excess + xp.log(loss.outer_rate)
        parts = [xp.logaddexp(0.0, log_odds)]
        if rule.with_derivatives:
            # M = 1 + r E: M'/M = E'/E (1 - 1/M), and so on
            first, second = ratios
            slope = sigmoid(log_odds) * first
            curvature = sigmoid(log_odds) * second - slope * slope
            parts += [slope, xp.maximum(curvature, 0.0)]
        for i, part in enumerate(parts):
            totals[i] = totals[i] + xp.sum(group.count * part.reshape(shape), axis=0)
    return tuple(totals)


def _log_excess(loss: Any, t: Array, rule: MomentRule) -> tuple[Array, ...]:
    """`Moments.log_excess`; of `LARGER` both, unless forward is known to be that."""
    if rule.direction != LARGER:
        return loss.log_excess(t, rule)
    forward = loss.log_excess(t, rule._replace(direction="forward"))
    if loss.is_symmetric or loss.forward_is_larger:
        return forward
    backward = loss.log_excess(t, rule._replace(direction="backward"))
    xp = namespace(t)
    is_forward = forward[0] >= backward[0]
    slopes = zip(forward[1:], backward[1:], strict=True)
    # Of a NaN the maximum is NaN.
    return xp.maximum(forward[0], backward[0]), *(
        xp.where(is_forward, one, other) for one, other in slopes
    )
