"""Method "rdp" as a function of arrays that JAX may trace: no host decides anything."""

# NaN where the lattice has too few nodes, or another bound may be lower.

from __future__ import annotations

import functools

import numpy as np

from jaxdp_episodic.accountant.methods.rdp import kernels
from jaxdp_episodic.accountant.methods.rdp.kernels import log_moment
from jaxdp_episodic.accountant.methods.rdp.method import may_be_less
from jaxdp_episodic.accountant.methods.run import Group
from jaxdp_episodic.accountant.numerics.loops import Array, by_blocks, namespace

Groups = tuple[Group, ...]
KINDS = ("epsilon", "delta", "rdp")
"""What is asked: epsilon at log(delta), log(delta) at epsilon, a curve at an order."""


def bound(kind: str, target: Array, groups: Groups, block: int) -> tuple[Array, Array]:
    """*Upper bound*, as `method.rdp_bound` has it, and its order; each (n,)."""
    xp = namespace(target)
    if kind == "rdp":
        order = target
        value, _ = kernels.rdp(
            order, groups, direction="forward", on_lattice=True, block=block
        )
        return value, order
    kernel = kernels.best_epsilon if kind == "epsilon" else kernels.best_log_delta
    value, order = kernel(target, groups, on_lattice=True, block=block)
    log_delta = target if kind == "epsilon" else value
    lower = may_be_less(log_delta, groups)
    if kind == "epsilon":
        lower &= value > 0
    return xp.where(lower, np.nan, value), order


def at_order(
    kind: str, target: Array, groups: Groups, block: int, order: Array
) -> Array:
    """The same at a given order, not the best one; differentiable, (n,)."""
    if kind == "rdp":
        return bound(kind, target, groups, block)[0]
    moment = functools.partial(log_moment, rule=kernels.LATTICE_ANSWER)
    (spent,) = by_blocks(moment, (order - 1, groups), block)
    of = kernels.epsilon_at if kind == "epsilon" else kernels.log_delta_at
    return of(target, order - 1, spent)
