"""Derivatives of ``log(delta)`` along given tangents of a run.

Forward-mode differentiation of the exact accountants' own kernels. The contour is held
constant, because the integral does not depend on it; so is the path in the plane on
which the distributions of the losses are integrated (`losses.loss_nodes`).

A tangent is a `Run` itself: for each step the derivatives of its fields, and of its
count, by a user's field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from jaxdp_episodic.accountant._engine import compiled, jitted, on_jax, using_engine
from jaxdp_episodic.accountant.losses.loss_nodes import NUM_NODES
from jaxdp_episodic.accountant.losses.protocols import Nodes, Profile, Tabulated
from jaxdp_episodic.accountant.methods.engine import Chunks, in_chunks
from jaxdp_episodic.accountant.methods.exact import contour as contours
from jaxdp_episodic.accountant.methods.exact import integral
from jaxdp_episodic.accountant.methods.exact.mgf import steps_of
from jaxdp_episodic.accountant.methods.run import Group, Run, stacked_steps

# Nodes of the contour, tried one after the other.
_NODES = (289, 769)
# Largest error estimate of log(delta) with which no more nodes are tried.
_TOLERANCE = 1e-7
# Factors of the center and of the end of a second contour, which has other nodes.
_OTHER_CENTER = 0.98
_OTHER_END = 1.1
# Relative difference of the derivatives on both up to which they are returned.
_AGREEMENT = 1e-6
# Nats below delta at which the distributions are truncated, as in `exact`.
_CUT = 50.0
# Settings in a call of the kernels.
_CHUNKS = Chunks(4, (4,), (8, 512, 4096))
_PROFILE_CHUNKS = Chunks(512, (8, 512), (8, 512, 4096))
# What a rate of 1 is lowered by.
_NEAREST_RATE = 2.0**-52
# Count of steps not taken: with 0 the derivative by the count would be lost.
_SMALLEST_COUNT = 1e-300
# Relative error of epsilon up to which a direction, or a path, is taken to attain it.
ATTAINED = 2e-6
# The least epsilon, in nats, that it is relative to.
_SMALLEST_EPSILON = 1e-3
# Error of log(delta) from terms of independent episodes that are left out.
_LEFT_OUT = 1e-8
# Largest error estimate of log(delta) with which its derivative is returned.
_LARGEST_ERROR = 1e-7
# The same of mechanisms with tables, whose estimated errors it includes.
_LARGEST_OF_TABLES = 1e-5


class Problem(NamedTuple):
    """A run, its target and its tangents: one for each name.

    At every setting and path, the last axis of every array, or at settings with one
    path each, (n,).
    """

    log_delta: np.ndarray
    run: Run
    tangents: list[Run]

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Problem:
        """Applies a function to every array."""
        tangents = [along.map(function) for along in self.tangents]
        return Problem(function(self.log_delta), self.run.map(function), tangents)


class Slopes(NamedTuple):
    """What is known about ``log(delta)`` at some epsilon; arrays (n,)."""

    log_delta: np.ndarray  # its value, by the same nodes; -inf where it is not known
    error: np.ndarray  # estimate of the absolute error of ``log_delta``
    slope: np.ndarray  # ``-d log(delta) / d epsilon``
    # (D, n) its derivative along each tangent; NaN where two contours do not agree on
    # it.
    along: np.ndarray


def gradient_of_rows(epsilon: np.ndarray, rows: Problem) -> np.ndarray:
    """(names, n) derivatives where epsilon is positive and finite."""
    tables = [loss for loss in rows.run.losses if isinstance(loss, Tabulated)]
    with using_engine("jax"):
        for loss in tables:
            loss.prepare(slopes=True)
    largest = _LARGEST_OF_TABLES if tables else _LARGEST_ERROR
    result = np.full((len(rows.tangents), epsilon.size), np.nan)
    single = rows.run.num_steps == 1
    by_count = [i for i, along in enumerate(rows.tangents) if np.any(along.counts)]
    every = list(range(len(rows.tangents)))
    others = [i for i in every if i not in by_count]
    # The derivative by the number of steps needs the integral.
    for chosen, names, of_profile in (
        (single, others, True),
        (single, by_count, False),
        (~single, every, False),
    ):
        index = np.flatnonzero(chosen)
        if index.size == 0 or not names:
            continue
        part, undefined = _defined(rows, index, names)
        if of_profile:
            slopes = single_step_slopes(epsilon[index], part.run, part.tangents)
        else:
            slopes = composed_slopes(epsilon[index], *part)
        scale = np.maximum(epsilon[index], _SMALLEST_EPSILON) * slopes.slope
        gap = np.abs(slopes.log_delta - part.log_delta)
        attained = gap <= ATTAINED * scale + slopes.error + _LEFT_OUT
        known = attained & (slopes.error < largest) & ~undefined
        with np.errstate(divide="ignore", invalid="ignore"):
            found = slopes.along / slopes.slope
        result[np.array(names)[:, None], index] = np.where(known, found, np.nan)
    return result


def _defined(
    rows: Problem, index: np.ndarray, names: list[int]
) -> tuple[Problem, np.ndarray]:
    """Some settings and names, with 0 for NaN; and where (names, n) there was one."""
    some = rows._replace(tangents=[rows.tangents[name] for name in names])
    some = some.map(lambda field: field[index])
    undefined = np.zeros((len(names), index.size), bool)
    for bad, along in zip(undefined, some.tangents, strict=True):
        for loss, count in zip(along.losses, some.run.counts, strict=True):
            bad |= np.isnan(np.stack(loss.fields)).any(axis=0) & (count > 0)
    tangents = [along.map(np.nan_to_num) for along in some.tangents]
    return some._replace(tangents=tangents), undefined


def single_step_slopes(epsilon: np.ndarray, run: Run, tangents: list[Run]) -> Slopes:
    """Of runs of one step, by its profile: of the direction with the larger delta.

    Exactly one count of a setting is 1, the others are 0.
    """
    value, error, slope = np.zeros((3, epsilon.size))
    along = np.zeros((len(tangents), epsilon.size))
    for i, (loss, count) in enumerate(zip(run.losses, run.counts, strict=True)):
        taken = np.flatnonzero(count == 1)
        if taken.size == 0:
            continue

        def take(field: np.ndarray, taken: np.ndarray = taken) -> np.ndarray:
            return field[taken]

        at, one, still = epsilon[taken], loss.map(take), np.zeros(taken.size)
        value[taken], slope[taken] = _profile_slopes(
            at, one, still - 1.0, one.map(np.zeros_like)
        )
        for row, tangent in zip(along, tangents, strict=True):
            moving = at, one, still, tangent.losses[i].map(take)
            row[taken] = _profile_slopes(*moving)[1]
    return Slopes(value, error, slope, along)


def _profile_slopes(*arrays: Any) -> tuple[np.ndarray, ...]:
    """``log(delta)`` and its derivative along one tangent; (n,)."""
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
    tangents: list[Run],
) -> Slopes:
    """Of a composed run, by the contour integral: the larger one's of both directions.

    At epsilon > 0; ``log_delta`` is about its value there, for truncations. Counts are
    real numbers >= 0.
    """
    too_many = np.zeros(epsilon.shape, bool)
    losses = []
    for loss, count in zip(run.losses, run.counts, strict=True):
        kept, _, many = cast(Nodes, loss).truncated(log_delta, count)
        losses.append(kept)
        too_many |= many
    problem = (epsilon, log_delta, run.with_losses(tuple(losses)), tangents)
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
    tangents: list[Run],
    *,
    backward: bool,
) -> Slopes:
    size = epsilon.size
    best = Slopes(
        np.full(size, -np.inf),
        np.full(size, np.inf),
        np.ones(size),
        np.zeros((len(tangents), size)),
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
            [tangent.take(index) for tangent in tangents],
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
    tangents: list[Run],
    backward: bool,
) -> Slopes:
    shape = epsilon.shape
    groups = tuple(map(_inside, run.groups()))
    grouped = [_grouped(run, tangent) for tangent in tangents]
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
            lambda part: on_jax(kernel, *part), (arrays, groups, grouped), _CHUNKS
        )
    value, error, slope, *along = result
    known = np.isfinite(value) & np.isfinite(error)
    rows = np.array(along).reshape(len(tangents), *shape)
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


def _grouped(run: Run, tangent: Run) -> tuple[Group, ...]:
    """A tangent in the order of `Run.groups`."""
    steps = []
    each = zip(run.counts, tangent.losses, tangent.counts, strict=True)
    for taken, loss, count in each:
        # The fields of a step with a count of 0 change nothing, its count does.
        still = loss.map(lambda f, taken=taken: np.where(taken > 0, f, 0.0))
        steps.append(Group(still, count))
    return stacked_steps(steps)


def _chunk_kernel(terms: tuple[int, ...], num_nodes: int) -> Callable[..., Any]:
    """Nodes, contour and derivatives of one chunk: jitted one by one."""
    import jax.numpy as jnp

    def call(arrays: Any, groups: Any, tangents: Any) -> tuple[Any, ...]:
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
        steps_along = jitted(_steps_derivative, ("num_nodes", "num_terms"))
        for tangent in tangents:
            steps_tangent = tuple(
                steps_along(group, backward, log_cut, one, **size)
                for group, one, size in zip(groups, tangent, sizes, strict=True)
            )
            moving = epsilon, steps, steps_tangent
            solution, derivative = solve(contour, *moving, num_nodes=num_nodes)
            # Unlike the value, M^T's derivative by T depends on the branch of log M.
            _, again = solve(other, *moving, num_nodes=num_nodes)
            apart = jnp.abs(derivative - again) > _AGREEMENT * jnp.abs(again)
            along.append(jnp.where(apart, jnp.nan, derivative))
        assert solution is not None  # there is at least one tangent
        return (solution.value, solution.log_error, solution.slope, *along)

    return call


def _steps_derivative(
    group: Any, backward: Any, log_cut: Any, tangent: Any, **sizes: int
) -> Any:
    import jax

    def steps(group: Group) -> Any:
        return steps_of(group, backward, log_cut, **sizes)

    return jax.jvp(steps, (group,), (tangent,))[1]


def _log_delta_derivative(
    contour: Any, epsilon: Any, steps: Any, tangent: Any, *, num_nodes: int
) -> Any:
    import jax

    def solve(steps: Any) -> Any:
        return integral.log_delta(epsilon, contour, steps, num_nodes=num_nodes)

    solution, derivative = jax.jvp(solve, (steps,), (tangent,))
    return solution, derivative.value
