"""Method "exact" as a function of arrays that JAX may trace: no host decides anything.

The kernels of `solver`, with as many nodes as its first pass has, which is enough for
99 in 100 settings of Gaussians sampled at random. NaN: it is not, the other direction
may be the larger one, or `method` answers without an integral.

Of mechanisms whose numbers need not be moved into their range, and without mixtures.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from jaxdp_episodic.accountant.losses.excess import LARGE_LOSS
from jaxdp_episodic.accountant.methods.exact import contour as contours
from jaxdp_episodic.accountant.methods.exact import initial_epsilon, integral
from jaxdp_episodic.accountant.methods.exact.method import LOG_BOUND_OVER_DELTA
from jaxdp_episodic.accountant.methods.exact.mgf import Steps, steps_of
from jaxdp_episodic.accountant.methods.exact.solver import (
    COMPARISON,
    CUT,
    CUT_MARGIN,
    PASSES,
    SETTLED,
    TOLERANCE,
    judged_epsilon,
)
from jaxdp_episodic.accountant.methods.question import EpsilonAt
from jaxdp_episodic.accountant.methods.rdp.kernels import best_log_delta
from jaxdp_episodic.accountant.methods.rdp.total_variation import may_be_less
from jaxdp_episodic.accountant.methods.run import Group
from jaxdp_episodic.accountant.methods.slopes import LARGEST_ERROR
from jaxdp_episodic.accountant.numerics.loops import Array, by_blocks, namespace

Groups = tuple[Group, ...]
KINDS = ("epsilon", "delta")
"""What is asked: epsilon at log(delta), or log(delta) at epsilon."""

_PASS = PASSES[0]


class Held(NamedTuple):
    """What derivatives are taken at; (n,) arrays."""

    epsilon: Array  # the answer, or what it was asked at
    slope: Array  # ``-d log(delta) / d epsilon`` there
    error: Array  # of log(delta)
    log_cut: Array
    contour: contours.Contour


def bound(kind: str, target: Array, groups: Groups, block: int) -> tuple[Array, Held]:
    """Epsilon or log(delta), as `method.exact_answer` has it; each (n,).

    Both directions; *exact* up to its error, or NaN.
    """
    xp = namespace(target)
    arrays, answer = (target, groups), _epsilon
    if kind == "delta":
        least, order = best_log_delta(target, groups, on_lattice=True, block=block)
        arrays, answer = (target, least, order, groups), _log_delta
    value, *held = by_blocks(answer, arrays, block)
    value = xp.where(_has_contour(groups), value, xp.nan)
    if kind == "epsilon":
        value = xp.where(may_be_less(target, groups), xp.nan, value)
    epsilon, slope, error, log_cut, *laid = held
    return value, Held(epsilon, slope, error, log_cut, contours.Contour(*laid))


def at_contour(
    kind: str, target: Array, groups: Groups, block: int, held: Held
) -> Array:
    """The same with the contour held, differentiable, (n,); or NaN."""
    moved = functools.partial(_at_contour, kind)
    (value,) = by_blocks(moved, (target, groups, held), block)
    return value


def _at_contour(
    kind: str, target: Array, groups: Groups, held: Held
) -> tuple[Array, ...]:
    xp, epsilon = namespace(target), held.epsilon if kind == "epsilon" else target
    steps = _steps(groups, held.log_cut, backward=False, checked=False)
    nodes = _PASS.contour_nodes
    value = integral.log_delta(epsilon, held.contour, steps, num_nodes=nodes).value
    if kind == "epsilon":
        # The answer moves such that log(delta) is what it should be.
        value = epsilon + (value - target) / held.slope
    return (xp.where(held.error <= LARGEST_ERROR, value, xp.nan),)


def _epsilon(log_delta: Array, groups: Groups) -> tuple[Array, ...]:
    """Epsilon, and what is held, of one block."""
    xp = namespace(log_delta)
    log_cut = _log_cut(log_delta, groups)
    steps = _steps(groups, log_cut, backward=False)
    unknown = xp.full_like(log_delta, xp.inf)
    first = initial_epsilon.first_epsilon(log_delta, unknown, groups, steps)
    laid = contours.lay_contour(first.epsilon, steps, _PASS.fall)
    nodes = _PASS.contour_nodes
    ends = first.epsilon, first.highest
    found = integral.epsilon(log_delta, *ends, laid, steps, num_nodes=nodes)
    judged = judged_epsilon(found.value, found.log_error, found.slope, first.epsilon)
    value, error, is_far, _ = judged
    scale = EpsilonAt(log_delta).scale(value)
    known = (error <= SETTLED * TOLERANCE * scale) & ~is_far & (value > 0)
    known &= _backward_is_less(value, log_delta, first.order, log_cut, groups, steps)
    value = xp.where(known, value, xp.nan)
    return value, value, found.slope, found.log_error, log_cut, *laid


def _log_delta(
    epsilon: Array, bound: Array, order: Array, groups: Groups
) -> tuple[Array, ...]:
    """The same of log(delta), of which Rényi's bound is known, and its order."""
    xp = namespace(epsilon)
    goal = bound - LOG_BOUND_OVER_DELTA
    log_cut = _log_cut(goal, groups)
    steps = _steps(groups, log_cut, backward=False)
    laid = contours.lay_contour(epsilon, steps, _PASS.fall)
    nodes = _PASS.contour_nodes
    value, error, slope, _ = integral.log_delta(epsilon, laid, steps, num_nodes=nodes)
    known = (error <= SETTLED * TOLERANCE) & (value >= goal - CUT + CUT_MARGIN)
    known &= _backward_is_less(epsilon, value, order, log_cut, groups, steps)
    value = xp.where(known, value, xp.nan)
    return value, epsilon, slope, error, log_cut, *laid


def _backward_is_less(
    epsilon: Array,
    log_delta: Array,
    order: Array,
    log_cut: Array,
    groups: Groups,
    steps: tuple[Steps, ...],
) -> Array:
    """Where the exchanged pairs surely have less delta at an epsilon."""
    less = epsilon != epsilon
    if len(groups) == len(groups[0].count) == 1 and groups[0].loss.nodes_exchange:
        asked = log_delta, epsilon, order, steps[0]
        less = initial_epsilon.exchanged_is_less(*asked)
    others = _steps(groups, log_cut, backward=True)
    laid = contours.lay_contour(epsilon, others, COMPARISON.fall)
    nodes = COMPARISON.contour_nodes
    found = integral.log_delta(epsilon, laid, others, num_nodes=nodes)
    # An error estimate of a nat or more is not reliable.
    sure = (found.log_error < 1) & (found.value + found.log_error < log_delta)
    return less | ((epsilon > 0) & sure)


def _steps(
    groups: Groups, log_cut: Array, *, backward: bool, checked: bool = True
) -> tuple[Steps, ...]:
    direction = namespace(log_cut).full_like(log_cut, float(backward))
    rule = {"num_nodes": _PASS.loss_nodes, "num_terms": 1, "checked": checked}
    return tuple(steps_of(group, direction, log_cut, **rule) for group in groups)


def _log_cut(goal: Array, groups: Groups) -> Array:
    """Where distributions are truncated; see `solver`."""
    xp = namespace(goal)
    number = sum(xp.sum(group.count, axis=0) for group in groups)
    return xp.minimum(goal, 0.0) - xp.log(xp.maximum(number, 1.0)) - CUT


def _has_contour(groups: Groups) -> Array:
    """Where there is more than one step, and one that is no Gaussian of `method`.

    And where the densities of no step are rounded by more than others.
    """
    xp = namespace(groups[0].count)
    number, some, small = 0.0, False, True
    for loss, count in groups:
        taken, always = count > 0, (loss.outer_rate >= 1) & (loss.gaussian_shift() > 0)
        number = number + xp.sum(count, axis=0)
        some = some | xp.any(taken & ~always, axis=0)
        large = loss.hints().furthest ** 2 > 2 * LARGE_LOSS
        small = small & ~xp.any(taken & large, axis=0)
    return (number > 1) & some & small
