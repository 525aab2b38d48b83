"""Derivatives of ``log(delta)`` along given directions of the pairs' fields.

Forward-mode differentiation of the exact accountants' own kernels. The contour is held
constant, because the integral does not depend on it; so is the path in the plane on
which the distributions of the losses are integrated (`losses.loss_nodes`).

A direction is a `Run` itself: for each step the derivatives of its fields, and of its
count, per unit of a user's field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from jaxdp_episodic.accountant._engine import compiled, jitted, on_jax, using_engine
from jaxdp_episodic.accountant.losses.loss_nodes import NUM_NODES
from jaxdp_episodic.accountant.losses.protocols import Nodes, Profile
from jaxdp_episodic.accountant.methods.engine import Chunks, in_chunks
from jaxdp_episodic.accountant.methods.exact import contour as contours
from jaxdp_episodic.accountant.methods.exact import integral
from jaxdp_episodic.accountant.methods.exact.mgf import steps_of
from jaxdp_episodic.accountant.methods.run import Group, Run, stacked_steps

# Nodes of the contour, tried one after the other.
_NODES = (289, 769)
# Largest error estimate of log(delta) with which its derivative is returned.
_TOLERANCE = 1e-7
# A second contour, with other nodes, and to what relative error the derivatives on
# both must agree to be returned.
_OTHER_CENTER, _OTHER_END, _AGREEMENT = 0.98, 1.1, 1e-6
# Nats below delta at which the distributions are cut, as in `exact`.
_CUT = 50.0
_CHUNKS = Chunks(4, (4,), (8, 512, 4096))
_PROFILE_CHUNKS = Chunks(512, (8, 512), (8, 512, 4096))
# A rate of 1 is replaced by one that is less by this.
_NEAREST_RATE = 2.0**-52
_SMALLEST_COUNT = 1e-300


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


def single_step_slopes(
    epsilon: np.ndarray, loss: Profile, moved: list[Profile]
) -> Slopes:
    """Of one step, by its profile: of the direction with the larger delta.

    Args:
      epsilon: (n,) nats.
      loss: fields (n,).
      moved: derivatives of the fields, along each direction.
    """
    zero = np.zeros_like(epsilon)
    value, slope = _profile_slopes(epsilon, loss, zero - 1.0, loss.map(np.zeros_like))
    rows = [_profile_slopes(epsilon, loss, zero, along)[1] for along in moved]
    return Slopes(value, zero, slope, np.array(rows).reshape(len(moved), -1))


def _profile_slopes(*arrays: Any) -> tuple[np.ndarray, ...]:
    """``log(delta)`` and its derivative along one direction; (n,)."""
    with using_engine("jax"):
        return in_chunks(lambda part: _profile_kernel(*part), arrays, _PROFILE_CHUNKS)


def _profile_derivative(
    epsilon: Any, loss: Profile, epsilon_moved: Any, loss_moved: Profile
) -> Any:
    import jax

    def worst(epsilon: Any, loss: Profile) -> Any:
        (forward, _), (backward, _) = loss.log_tails(epsilon)
        return jax.numpy.maximum(forward, backward)

    return jax.jvp(worst, (epsilon, loss), (epsilon_moved, loss_moved))


_profile_kernel = compiled(_profile_derivative)


def composed_slopes(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    run: Run,
    directions: list[Run],
) -> Slopes:
    """Of a composed run, by the contour integral: the larger one's of both directions.

    Args:
      epsilon: (n,) nats, > 0.
      log_delta: (n,) about its value there; at what distance distributions may be cut.
      run: fields (n,); counts are real numbers >= 0.
      directions: what to differentiate by, each a direction for every step.
    """
    too_many = np.zeros(epsilon.shape, bool)
    losses = []
    for loss, count in zip(run.losses, run.counts, strict=True):
        kept, _, many = cast(Nodes, loss).truncated(log_delta, count)
        losses.append(kept)
        too_many |= many
    problem = (epsilon, log_delta, run.with_losses(tuple(losses)), directions)
    best = _one_direction(*problem, backward=False)
    if not run.is_symmetric:
        other = _one_direction(*problem, backward=True)
        larger = other.log_delta > best.log_delta
        both = zip(other, best, strict=True)
        best = Slopes(*(np.where(larger, new, old) for new, old in both))
    return best._replace(log_delta=np.where(too_many, -np.inf, best.log_delta))


def _one_direction(
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    run: Run,
    directions: list[Run],
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
            run.take(index),
            [direction.take(index) for direction in directions],
            backward,
        )
        better = part.error < best.error[index]
        for whole, piece in zip(best, part, strict=True):
            whole[..., index] = np.where(better, piece, whole[..., index])
    return best


def _contours(
    num_nodes: int,
    epsilon: np.ndarray,
    log_delta: np.ndarray,
    run: Run,
    directions: list[Run],
    backward: bool,
) -> Slopes:
    shape = epsilon.shape
    groups = tuple(map(_inside, run.groups()))
    moved = [_grouped(run, each) for each in directions]
    arrays = (
        epsilon,
        np.minimum(log_delta, 0.0) - np.log(np.maximum(run.num_steps, 1.0)) - _CUT,
        np.full(shape, float(backward)),
    )
    # Powers of two, each of which is compiled.
    terms = tuple(1 << (int(g.loss.num_terms.max()) - 1).bit_length() for g in groups)
    kernel = _chunk_kernel(terms, num_nodes)
    with using_engine("jax"):
        result = in_chunks(
            lambda part: on_jax(kernel, *part), (arrays, groups, moved), _CHUNKS
        )
    value, error, slope, *along = result
    known = np.isfinite(value) & np.isfinite(error)
    rows = np.array(along).reshape(len(directions), *shape)
    return Slopes(
        np.where(known, value, -np.inf), np.where(known, error, np.inf), slope, rows
    )


def _inside(group: Group) -> Group:
    """The steps with rates below 1 where the nodes' derivatives need that."""
    loss = group.loss
    if loss.is_symmetric:
        below = {
            name: np.minimum(rate, 1 - _NEAREST_RATE)
            for name, rate in loss.rates.items()
            if name == "rate"
        }
        loss = dataclasses.replace(loss, **below)
    # Steps with a count of 0 still have a derivative by their count.
    return Group(loss, np.maximum(group.count, _SMALLEST_COUNT))


def _grouped(run: Run, moved: Run) -> tuple[Group, ...]:
    """A direction in the order of `Run.groups`."""
    steps = []
    for taken, loss, count in zip(run.counts, moved.losses, moved.counts, strict=True):
        # Of a step with a count of 0 only the count moves anything.
        still = loss.map(lambda f, taken=taken: np.where(taken > 0, f, 0.0))
        steps.append(Group(still, count))
    return stacked_steps(steps)


def _chunk_kernel(terms: tuple[int, ...], num_nodes: int) -> Callable[..., Any]:
    """Nodes, contour and derivatives of one chunk: jitted one by one."""
    import jax.numpy as jnp

    def call(arrays: Any, groups: Any, moved: Any) -> tuple[Any, ...]:
        epsilon, log_cut, backward = arrays
        sizes = [{"num_nodes": NUM_NODES, "num_terms": number} for number in terms]
        lay_nodes = jitted(steps_of, ("num_nodes", "num_terms"))
        steps = tuple(
            lay_nodes(group, backward, log_cut, **size)
            for group, size in zip(groups, sizes, strict=True)
        )
        contour = jitted(contours.lay_contour)(epsilon, steps)
        other = contour._replace(
            center=contour.center * _OTHER_CENTER, end=contour.end * _OTHER_END
        )
        solve = jitted(_log_delta_derivative, ("num_nodes",))
        along = []
        solution = None
        for directions in moved:
            steps_moved = tuple(
                jitted(_steps_derivative, ("num_nodes", "num_terms"))(
                    group, backward, log_cut, direction, **size
                )
                for group, direction, size in zip(
                    groups, directions, sizes, strict=True
                )
            )
            moving = epsilon, steps, steps_moved
            solution, derivative = solve(contour, *moving, num_nodes=num_nodes)
            # Unlike the value, M^T's derivative by T depends on the branch of log M.
            _, again = solve(other, *moving, num_nodes=num_nodes)
            apart = jnp.abs(derivative - again) > _AGREEMENT * jnp.abs(again)
            along.append(jnp.where(apart, jnp.nan, derivative))
        assert solution is not None  # there is at least one direction
        return (solution.value, solution.log_error, solution.slope, *along)

    return call


def _steps_derivative(
    group: Any, backward: Any, log_cut: Any, direction: Any, **sizes: int
) -> Any:
    import jax

    def steps(group: Group) -> Any:
        return steps_of(group, backward, log_cut, **sizes)

    return jax.jvp(steps, (group,), (direction,))[1]


def _log_delta_derivative(
    contour: Any, epsilon: Any, steps: Any, moved: Any, *, num_nodes: int
) -> Any:
    import jax

    def solve(steps: Any) -> Any:
        return integral.log_delta(epsilon, contour, steps, num_nodes=num_nodes)

    solution, derivative = jax.jvp(solve, (steps,), (moved,))
    return solution, derivative.value
