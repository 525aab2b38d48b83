"""Derivatives of ``log(delta)`` along given directions of the pairs' fields.

Forward-mode differentiation of the exact accountants' own kernels. The contour is held
constant, because the integral does not depend on it; so is the path in the plane on
which the laws of the losses are integrated (`losses.loss_laws`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp_episodic._precision import float64_boundary
from jaxdp_episodic.accounting.evaluation import in_chunks, step_groups
from jaxdp_episodic.accounting.exact import contour as contour_layout
from jaxdp_episodic.accounting.exact import integral
from jaxdp_episodic.accounting.exact.episode_terms import cut_terms
from jaxdp_episodic.accounting.exact.loss_nodes import steps_kernel
from jaxdp_episodic.accounting.profile import log_profile
from jaxdp_episodic.accounting.rdp.kernels import StepGroup
from jaxdp_episodic.accounting.run import EPISODES, SAMPLED, DominatingPair

# Nodes of the contour, tried one after the other.
_NODES = (289, 769)
# Largest error estimate of log(delta) with which its derivative is returned.
_TOLERANCE = 1e-7
# A second contour, with other nodes, and to what relative error the derivatives on
# both must agree to be returned.
_OTHER_CENTER, _OTHER_END, _AGREEMENT = 0.98, 1.1, 1e-6
# Nats below delta at which the laws are cut, as in `exact`.
_CUT = 50.0
_CPU_CHUNKS, _PROFILE_CHUNKS = (4,), (8, 512)
_ACCELERATOR_CHUNKS = (8, 512, 4096)
# What is always drawn has a rate this far from 1 instead.
_NEAREST_RATE = 2.0**-52
_SMALLEST_COUNT = 1e-300


class Direction(NamedTuple):
    """How one step's pair moves per unit of a user's field; arrays (n,).

    Attributes:
      outer_rate, rate, inner_rate, shift: derivatives of the pair's fields.
      count: derivative of how often the step is taken.
    """

    outer_rate: np.ndarray
    rate: np.ndarray
    inner_rate: np.ndarray
    shift: np.ndarray
    count: np.ndarray


class Slopes(NamedTuple):
    """What is known about ``log(delta)`` at some epsilon; arrays (n,).

    Attributes:
      log_delta: its value, by the same nodes; -inf where it is not known.
      error: estimate of the absolute error of ``log_delta``.
      slope: ``-d log(delta) / d epsilon``.
      along: (D, n) its derivative along each direction; NaN where two contours do not
        agree on it.
    """

    log_delta: np.ndarray
    error: np.ndarray
    slope: np.ndarray
    along: np.ndarray


Directions = tuple[Direction, ...]
"""One for each step of the run."""


def single_step_slopes(
    epsilon: np.ndarray, pair: DominatingPair, moved: list[Direction]
) -> Slopes:
    """Of one step, by its profile: the larger one's of the two.

    Args:
      epsilon: (n,) nats.
      pair: fields (n,).
      moved: the directions; the ``count`` of each must be 0.
    """
    fields = (pair.outer_rate, pair.rate, pair.inner_rate)
    shift = pair.sensitivity / pair.noise_multiplier
    primals = (epsilon, *fields, shift, pair.num_episodes)
    zero = np.zeros_like(epsilon)
    along = [(zero, d.outer_rate, d.rate, d.inner_rate, d.shift, zero) for d in moved]
    value, slope = _profile_slopes(pair.kind, primals, (-1.0 + zero, *[zero] * 5))
    rows = [_profile_slopes(pair.kind, primals, each)[1] for each in along]
    return Slopes(value, zero, slope, np.array(rows).reshape(len(moved), -1))


def _profile_slopes(
    kind: str, primals: tuple[np.ndarray, ...], moved: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, ...]:
    """``log(delta)`` and its derivative along one direction; (n,)."""
    on_cpu = jax.default_backend() == "cpu"
    sizes = _PROFILE_CHUNKS if on_cpu else _ACCELERATOR_CHUNKS
    kernel = _profile_kernel()
    return in_chunks(lambda part: kernel(*part, kind=kind), (primals, moved), sizes)


@functools.cache
def _profile_kernel() -> Callable[..., Any]:
    def kernel(primals: Any, tangents: Any, *, kind: str) -> Any:
        def worst(*arrays: jax.Array) -> jax.Array:
            return jnp.maximum(*log_profile(*arrays, kind=kind))

        return jax.jvp(worst, primals, tangents)

    return float64_boundary(jax.jit(kernel, static_argnames="kind"))


def composed_slopes(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
    directions: list[Directions],
) -> Slopes:
    """Of a composed run, by the contour integral: the larger one's of both directions.

    Args:
      epsilon: (n,) nats, > 0.
      log_delta: (n,) about its value there; at what distance laws may be cut.
      pairs: dominating pairs of the steps with fields (n,).
      counts: (n,) each; real numbers >= 0.
      directions: what to differentiate by, each a direction for every step.
    """
    cut, _, too_many = cut_terms(log_delta, pairs, counts)
    problem = (epsilon, log_delta, cut, counts, directions)
    best = _one_direction(*problem, backward=False)
    if any(pair.kind == SAMPLED for pair in pairs):
        other = _one_direction(*problem, backward=True)
        larger = other.log_delta > best.log_delta
        both = zip(other, best, strict=True)
        best = Slopes(*(np.where(larger, new, old) for new, old in both))
    return best._replace(log_delta=np.where(too_many, -np.inf, best.log_delta))


def _one_direction(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
    directions: list[Directions],
    *,
    backward: bool,
) -> Slopes:
    size = epsilon.size
    best = Slopes(
        np.full(size, -np.inf),
        np.full(size, np.inf),
        np.ones(size),
        np.zeros((len(directions), size)),
    )
    for num_nodes in _NODES:
        index = np.flatnonzero(~(best.error <= _TOLERANCE))
        if index.size == 0:
            break
        part = _contours(
            num_nodes,
            epsilon[index],
            log_delta[index],
            tuple(p._replace(**_taken(p, index)) for p in pairs),
            tuple(count[index] for count in counts),
            [tuple(_take(d, index) for d in each) for each in directions],
            backward,
        )
        better = part.error < best.error[index]
        for whole, piece in zip(best, part, strict=True):
            whole[..., index] = np.where(better, piece, whole[..., index])
    return best


def _taken(pair: DominatingPair, index: np.ndarray) -> dict[str, np.ndarray]:
    fields = pair._asdict()
    del fields["kind"]
    return {name: field[index] for name, field in fields.items()}


def _take(direction: Direction, index: np.ndarray) -> Direction:
    return Direction(*(field[index] for field in direction))


def _contours(
    num_nodes: int,
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
    directions: list[Directions],
    backward: bool,
) -> Slopes:
    shape = epsilon.shape
    kinds, groups, _, _ = step_groups(pairs, counts, shape)
    groups = tuple(map(_inside, kinds, groups))
    moved = [_grouped(kinds, pairs, each) for each in directions]
    arrays = (
        epsilon,
        np.minimum(log_delta, 0.0) - np.log(np.maximum(sum(counts), 1.0)) - _CUT,
        np.full(shape, float(backward)),
    )
    most = [
        int(g.num_episodes.max()) if k == EPISODES else 1
        for k, g in zip(kinds, groups, strict=True)
    ]
    # Powers of two, each of which is compiled.
    terms = tuple(1 << (m - 1).bit_length() for m in most)
    kernel = float64_boundary(_chunk_kernel(kinds, terms, num_nodes))
    on_cpu = jax.default_backend() == "cpu"
    sizes = _CPU_CHUNKS if on_cpu else _ACCELERATOR_CHUNKS
    result = in_chunks(lambda part: kernel(*part), (arrays, groups, moved), sizes)
    value, error, slope, *along = result
    known = np.isfinite(value) & np.isfinite(error)
    rows = np.array(along).reshape(len(directions), *shape)
    return Slopes(
        np.where(known, value, -np.inf), np.where(known, error, np.inf), slope, rows
    )


def _inside(kind: str, group: StepGroup) -> StepGroup:
    """The steps with rates below 1 where the laws' derivatives need that."""
    rate = group.rate
    if kind != SAMPLED:
        rate = np.minimum(rate, 1 - _NEAREST_RATE)
    # Steps that are not taken still have a derivative by their number.
    return group._replace(rate=rate, count=np.maximum(group.count, _SMALLEST_COUNT))


def _grouped(
    kinds: tuple[str, ...], pairs: tuple[DominatingPair, ...], each: Directions
) -> tuple[StepGroup, ...]:
    """The directions in the order of `step_groups`."""
    groups = []
    for kind in kinds:
        chosen = [d for pair, d in zip(pairs, each, strict=True) if pair.kind == kind]
        outer, rate, inner, shift, count = map(np.stack, zip(*chosen, strict=True))
        groups.append(StepGroup(outer, rate, inner, shift, np.zeros_like(count), count))
    return tuple(groups)


def _chunk_kernel(
    kinds: tuple[str, ...], terms: tuple[int, ...], num_nodes: int
) -> Callable[..., tuple[jax.Array, ...]]:
    """Laws, contour and derivatives of one chunk: jitted one by one."""

    def call(arrays: Any, groups: Any, moved: Any) -> tuple[jax.Array, ...]:
        epsilon, log_cut, backward = arrays
        steps = tuple(
            steps_kernel(kind, count)(group, backward, log_cut)
            for kind, count, group in zip(kinds, terms, groups, strict=True)
        )
        contour = _lay_contour()(epsilon, steps)
        other = contour._replace(
            center=contour.center * _OTHER_CENTER, end=contour.end * _OTHER_END
        )
        along = []
        solution = None
        for directions in moved:
            steps_moved = tuple(
                _steps_derivative(kind, count)(group, backward, log_cut, direction)
                for kind, count, group, direction in zip(
                    kinds, terms, groups, directions, strict=True
                )
            )
            solution, derivative = _log_delta_derivative()(
                num_nodes, epsilon, contour, steps, steps_moved
            )
            # Unlike the value, M^T's derivative by T depends on the branch of log M.
            _, again = _log_delta_derivative()(
                num_nodes, epsilon, other, steps, steps_moved
            )
            apart = jnp.abs(derivative - again) > _AGREEMENT * jnp.abs(again)
            along.append(jnp.where(apart, jnp.nan, derivative))
        assert solution is not None  # there is at least one direction
        return (solution.value, solution.log_error, solution.slope, *along)

    return call


@functools.cache
def _lay_contour() -> Callable[..., Any]:
    return jax.jit(contour_layout.lay_contour)


@functools.cache
def _steps_derivative(kind: str, num_terms: int) -> Callable[..., Any]:
    def kernel(group: Any, backward: Any, log_cut: Any, direction: Any) -> Any:
        def steps(group: StepGroup) -> Any:
            return steps_kernel(kind, num_terms)(group, backward, log_cut)

        return jax.jvp(steps, (group,), (direction,))[1]

    return jax.jit(kernel)


@functools.cache
def _log_delta_derivative() -> Callable[..., Any]:
    def kernel(num_nodes: int, epsilon: Any, contour: Any, steps: Any, moved: Any):
        def solve(steps: Any) -> Any:
            return integral.log_delta(num_nodes, epsilon, contour, steps)

        solution, derivative = jax.jvp(solve, (steps,), (moved,))
        return solution, derivative.value

    return jax.jit(kernel, static_argnums=0)
