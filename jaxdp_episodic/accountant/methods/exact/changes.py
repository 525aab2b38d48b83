"""How log(delta) on a contour changes with the steps: one more sum for all changes.

With ``F = M^T e^{-z epsilon} / (z (1 + z))`` a change d of the run changes delta by the
integral of ``F d(T log M)``. A quotient of moved steps is known node by node, of losses
L and weights w: ``d M = sum_j dw_j (e^{z L_j} - 1) + z w_j dL_j e^{z L_j}`` takes the
exponentials of M itself, and is linear in T log M, however many steps there are.

Pure kernels; axes as in `mgf`. Quotients are weighted sums over m moves of what is
there less what is here: R of each of P parameters, weights (P, m, R, n).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxdp_episodic.accountant.losses.loss_nodes import LossNodes
from jaxdp_episodic.accountant.methods.exact.contour import Contour
from jaxdp_episodic.accountant.methods.exact.integral import (
    bulk_delta,
    log_delta,
    trapezoidal,
)
from jaxdp_episodic.accountant.methods.exact.mgf import (
    Pair,
    Steps,
    bulk_variance,
    composed,
    for_each,
    half_square,
    log_atoms,
    log_bulk,
    log_bulk_mass,
    log_moment_of,
)
from jaxdp_episodic.accountant.numerics.complex_exponentials import (
    polar,
    sum_expm1,
    times,
)
from jaxdp_episodic.accountant.numerics.loops import Array, namespace

# Rounding of E[e^{-L} - 1], relative to E|L|, in which terms of complex nodes cancel.
_ROUNDED = 1e-13
# Of each parameter the groups of its moved steps, m n settings side by side.
_Moved = tuple[tuple[Steps, ...], ...]


def log_delta_changes(
    epsilon: Array,
    contour: Contour,
    groups: tuple[Steps, ...],
    moved: _Moved,
    weights: Array,
    *,
    num_nodes: int,
    by_nodes: bool,
) -> tuple[Array, ...]:
    """`integral.log_delta`, and quotients of log(delta), (P, R, n).

    Args:
      epsilon: (n,).
      contour: any.
      groups: the steps.
      moved: the same of every parameter, at its moves.
      weights: see above.
      num_nodes: of the contour.
      by_nodes: whether moved losses have the same nodes, displaced. If not, moments
        are computed at each move.
    """
    xp = namespace(epsilon, contour.center)
    z, direction, width, _ = trapezoidal(contour, num_nodes)
    rule, of_sums = (width * direction[0], width * direction[1]), []
    for i, steps in enumerate(groups):
        there = _Quotients(steps, tuple(one[i] for one in moved), weights)
        of_sums.append((there, *there.sums(z, by_nodes)))
    sums = tuple(here for _, here, _ in of_sums)
    found = log_delta(epsilon, contour, groups, num_nodes=num_nodes, sums=sums)
    if not moved:
        return (*found, xp.zeros((0, weights.shape[2], epsilon.size)))
    powers = [there.of_powers(z, *more) for there, *more in of_sums]
    re, im, *change = (sum(parts) for parts in zip(*powers, strict=True))

    def integral(log_value: Pair, change: Pair) -> Array:
        exponent = log_value[0] - z[0] * epsilon - found.value
        value = times(rule, polar(exponent, log_value[1] - z[1] * epsilon))
        return xp.sum(value[0] * change[0] - value[1] * change[1], axis=-2)

    def of_run(kernel: Callable[[tuple[Steps, ...]], Array]) -> Array:
        return _quotients(kernel(groups), [kernel(one) for one in moved], weights)

    # The atom and the bulk are subtracted from M^T, and the bulk's delta added.
    log_atom, bulk = log_atoms(groups), contour.bulk
    atom, variance = of_run(log_atoms), of_run(bulk_variance)
    variance = xp.where(bulk > 0, variance, 0.0)
    mass = -atom / xp.maximum(xp.expm1(-log_atom), 1e-300)
    half, real = half_square(z), xp.zeros_like(z[0])
    wide = variance[:, None]
    total = (
        integral((re, im), (change[0], change[1]))
        - integral((log_atom + real, real), (atom[:, None] + real, real))
        - integral(
            log_bulk(z, bulk, log_atom),
            (wide * half[0] + mass[:, None], wide * half[1]),
        )
    )
    known, _, density = bulk_delta(bulk, log_bulk_mass(log_atom), epsilon)
    total = total + xp.exp(known - found.value) * mass
    total = total + 0.5 * xp.exp(density - found.value) * variance
    return (*found, total.reshape(len(moved), weights.shape[2], epsilon.size))


class _Quotients(NamedTuple):
    """Quotients of what is known of K steps of one kind, and of moved ones."""

    here: Steps
    there: tuple[Steps, ...]
    weights: Array

    def of(self, get: Callable[[Steps], Array]) -> Array:
        """Of (..., K n) arrays, (P R, ..., K n)."""
        return _quotients(
            get(self.here), [get(one) for one in self.there], self.weights
        )

    def sums(self, z: Pair, by_nodes: bool) -> tuple[Pair, Pair]:
        """The nodes' ``E[e^{zL} - 1]`` at (k, n) points, and its quotients.

        It is 0 at z = -1, of losses of two distributions with one support. Where losses
        are small rounding errors are of terms that are linear in them, and cancel with
        those there.
        """
        xp, nodes = namespace(z[0]), self.here.nodes
        one = xp.ones_like(z[0][:1])
        z = xp.concatenate([z[0], -one]), xp.concatenate([z[1], 0 * one])
        wide = for_each(z[0], self.here), for_each(z[1], self.here)
        if by_nodes and self.there:
            here, change = self._of_nodes(wide)
        else:
            here = sum_expm1(wide, nodes.weight, nodes.loss)
            repeats = (1, len(self.here.count) * self.weights.shape[1])
            far = xp.tile(z[0], repeats), xp.tile(z[1], repeats)
            there = [
                sum_expm1(far, one.nodes.weight, one.nodes.loss) for one in self.there
            ]
            re, im = (
                _quotients(part, [one[k] for one in there], self.weights)
                for k, part in enumerate(here)
            )
            change = re, im
        last = xp.abs(here[0][-1]) + xp.abs(here[1][-1])
        is_zero = last <= _ROUNDED * nodes.size  # False where it is too large
        off = tuple(xp.where(is_zero, part[:, -1:], 0.0) for part in change)
        less = times((wide[0][:-1], wide[1][:-1]), (off[0], off[1]))
        re, im = (part[:, :-1] + more for part, more in zip(change, less, strict=True))
        return (here[0][:-1], here[1][:-1]), (re, im)

    def _of_nodes(self, z: Pair) -> tuple[Pair, Pair]:
        """The same, of nodes that are displaced, at any points."""
        xp, nodes = namespace(z[0]), self.here.nodes

        def moved(get: Callable[[LossNodes], Pair]) -> Pair:
            """The parts' quotients, (J, P R, K n)."""
            re, im = (self.of(lambda one, k=k: get(one.nodes)[k]) for k in range(2))
            return xp.moveaxis(re, 0, 1), xp.moveaxis(im, 0, 1)

        weight = nodes.weight[0][:, None], nodes.weight[1][:, None]
        change = moved(lambda nodes: nodes.weight)
        # sum_j w_j dL_j e^{z L_j} = sum_j w_j dL_j (e^{z L_j} - 1) + w_j dL_j
        far = times(weight, moved(lambda nodes: nodes.loss))
        re, im = (
            xp.concatenate(parts, axis=1)
            for parts in zip(weight, change, far, strict=True)
        )
        sums, number = sum_expm1(z, (re, im), nodes.loss), 1 + change[0].shape[1]
        re, im = (
            part[number:] + xp.sum(every, axis=0)[:, None]
            for part, every in zip(sums, far, strict=True)
        )
        shifted = times(z, (re, im))
        re, im = (
            part[1:number] + more for part, more in zip(sums, shifted, strict=True)
        )
        return (sums[0][0], sums[1][0]), (re, im)

    def of_powers(self, z: Pair, sums: Pair, change: Pair) -> tuple[Array, ...]:
        """``T log M`` of these steps, (k, n), and its quotients, two parts each."""
        steps, xp = self.here, namespace(z[0])
        wide = for_each(z[0], steps), for_each(z[1], steps)
        log_moment, excess = log_moment_of(wide, steps, sums)

        def each(get: Callable[[Steps], Array]) -> Array:
            return self.of(lambda one: get(one).reshape(-1))[:, None]

        some, outer = steps.gaussian_shift.reshape(-1) > 0, steps.outer_rate.reshape(-1)
        half, square = half_square(wide), each(lambda one: one.gaussian_shift**2)
        closed = square * half[0], square * half[1]
        grown = times((1 + excess[0], excess[1]), closed)
        seen, taken = each(lambda one: one.outer_rate), each(lambda one: one.count)
        re, im = (
            seen * e + outer * xp.where(some, g, c)
            for e, g, c in zip(excess, grown, change, strict=True)
        )
        # The moment itself may be too large to be squared.
        inverse = polar(-log_moment[0], -log_moment[1])
        changed = times((re, im), inverse)
        always, number = some & (outer >= 1), len(steps.count)
        power, total = [], []
        for log, c, m in zip(log_moment, closed, changed, strict=True):
            more = taken * log
            more = more.reshape(*more.shape[:-1], number, -1)
            part = composed(xp.where(always, c, m), steps)
            total.append(part + xp.sum(more, axis=-2))
            power.append(composed(log, steps))
        return (*power, *total)


def _quotients(here: Array, there: Sequence[Array], weights: Array) -> Array:
    """Of (..., k n) arrays and, of every parameter, (..., k m n): (P R, ..., k n)."""
    xp = namespace(here, weights)
    if not there:
        return xp.zeros((0, *here.shape))
    _, m, _, n = weights.shape
    every = xp.stack(there).reshape(len(there), *here.shape[:-1], -1, m, n)
    every = every - here.reshape(*here.shape[:-1], -1, 1, n)
    found = xp.einsum("p...kmn,pmrn->pr...kn", every, weights)
    return found.reshape(-1, *here.shape)
