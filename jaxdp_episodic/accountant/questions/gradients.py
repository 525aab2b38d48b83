"""Derivatives of epsilon by the implicit-function theorem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import using_engine
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    compose,
    gaussian_parts,
)
from jaxdp_episodic.accountant.losses.protocols import Profile, Tabulated
from jaxdp_episodic.accountant.methods.exact.method import exact_answer
from jaxdp_episodic.accountant.methods.question import DeltaAt, EpsilonAt
from jaxdp_episodic.accountant.methods.rdp.method import rdp_bound
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.gradient_fields import (
    checked_names,
    direction,
)
from jaxdp_episodic.accountant.questions.gradient_kernels import (
    Slopes,
    composed_slopes,
    single_step_slopes,
)
from jaxdp_episodic.accountant.questions.paths import undominated_paths

# Differences of epsilon at these places, in widths of a share of the noise: of fourth
# order, and of second at twice the width, by which they are checked.
_PLACES, _WIDTH, _APART = np.array([-2.0, -1.0, 1.0, 2.0]), 4e-3, 1e-3
_NEAR = np.array([1.0, -8.0, 8.0, -1.0]) / 12
_FAR = np.array([-1.0, 0.0, 0.0, 1.0]) / 4
# Relative error of epsilon up to which a direction, or a path, is taken to attain it;
# and the least epsilon that it is relative to.
_ATTAINED, _SMALLEST_EPSILON = 2e-6, 1e-3
# Error of log(delta) from terms of independent episodes that are left out.
_LEFT_OUT = 1e-8
# Largest error estimate of log(delta) with which its derivative is returned; and the
# same for mechanisms whose tables have estimated errors, which it includes.
_LARGEST_ERROR, _LARGEST_OF_TABLES = 1e-7, 1e-5


def epsilon_and_gradient(
    step: GaussianStep | ComposedSteps,
    *,
    delta: Any,
    num_steps: Any = None,
    wrt: tuple[str, ...] = ("noise_multiplier",),
) -> tuple[Any, dict[str, Any]]:
    """Returns the exact epsilon and its derivatives by fields of the step.

    By the implicit-function theorem, at fixed delta,

        d eps / d field = (d log delta / d field) / (-d log delta / d eps),

    where both derivatives are of the integral (for one step: of the profile) that
    `epsilon` with method "exact" solves, on the worst path and in the worse of the two
    directions. *Exact* up to rounding and quadrature, not differences: relative error
    about 1e-8 (docs/theory.md, "Exact", for the integral).

    What can be named:

    * "noise_multiplier"; the derivative in nats per unit of it.
    * "num_steps", treated as a real number: nats per step more. M(z)^T is continued to
      real T; after very few steps that depends on the contour, and is NaN then.
    * "LEVEL.sampling_probability" of a Poisson level, "school.sampling_probability".
    * "LEVEL.size" of a level without replacement, treated as a real number (the rate is
      size over population; the population stays).

    With steps in epochs "noise_multiplier" alone; of random allocation whose units may
    turn around (replace_one, episodes) by differences of exact epsilons (*estimate*,
    relative error about 1e-6).

    Of a composed run a name moves all steps that have the field, by the same amount;
    with an index, "noise_multiplier[0]", "num_steps[1]", it moves one step's only.
    Levels below the privacy unit have no rate and cannot be named, nor can the number
    of independent episodes.

    The derivative is *NaN*, never a wrong number, where it is not known: where epsilon
    is ``inf`` or only a certified bound (`PrivacyInfo.is_certified_bound`), where the
    integral's error estimate is above 1e-7 (of random allocation, which includes its
    tables', 1e-5) or two contours disagree by 1e-6, where a
    rate is at an end (a probability of 0 or 1, a size equal to the population), and
    where epsilon is 0 but delta is reached there. It is 0 where epsilon 0 needs less
    than delta. Where two paths or directions are equally bad epsilon has a kink; the
    derivative is that of one.

    Args:
      step: the step, or a run made by `compose`.
      delta: in (0, 1).
      num_steps: whole number >= 0; of a composed run as of `epsilon`.
      wrt: names of fields.

    Returns:
      ``(epsilon, gradient)``: float64 nats of the broadcast shape of step, ``delta``
      and ``num_steps``, and for every name in ``wrt`` the derivative, of that shape.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range, ``num_steps`` given twice or not at all, or a
        name that the step does not have.
      NotImplementedError: steps in epochs, and another name than "noise_multiplier".
    """
    gaussian_parts(step, "epsilon_and_gradient")  # refuses others
    _validation.open_unit_array("delta", delta)
    if isinstance(step, ComposedSteps) and num_steps is not None:
        step, num_steps = compose((step, num_steps)), None
    names = checked_names(wrt, step)
    value, info = api.epsilon(step, delta=delta, num_steps=num_steps, return_info=True)
    log_delta = np.log(np.asarray(delta, np.float64))
    accounted, shape = api.checked_run(step, num_steps, delta=log_delta)
    tables = [loss for loss in accounted.losses if isinstance(loss, Tabulated)]
    if not all(loss.has_slopes for loss in tables):
        return value, {
            name: _by_differences(name, step, delta, num_steps) for name in names
        }
    paths = undominated_paths(accounted)
    counts = None if num_steps is None else np.asarray(num_steps, np.float64)
    moved = [direction(name, step, counts).take_paths(paths) for name in names]
    problem = _Problem(log_delta[..., None], accounted.take_paths(paths), moved)
    certified = np.reshape(info.is_certified_bound, -1)
    rows = _gradient(problem, shape, np.reshape(value, -1), certified)
    gradient = {
        name: row.reshape(shape)[()] for name, row in zip(names, rows, strict=True)
    }
    return value, gradient


def _by_differences(
    name: str, step: GaussianStep | ComposedSteps, delta: Any, num_steps: Any
) -> Any:
    """The derivative by a noise multiplier, as differences of exact epsilons."""
    _, _, index = name.partition("[")
    parts = gaussian_parts(step, "epsilon_and_gradient")
    chosen = [int(index[:-1])] if index else range(len(parts))
    noises = [np.asarray(parts[i].noise_multiplier, np.float64) for i in chosen]
    shape = np.shape(api.epsilon(step, delta=delta, num_steps=num_steps, method="rdp"))
    width = _WIDTH * np.broadcast_to(
        np.min(np.broadcast_arrays(*noises), axis=0), shape
    )
    places = np.reshape(_PLACES, (-1, *(1,) * len(shape))) * width
    moved = list(parts)
    for i, noise in zip(chosen, noises, strict=True):
        moved[i] = dataclasses.replace(parts[i], noise_multiplier=noise + places)
    changed: Any = moved[0]
    if isinstance(step, ComposedSteps):
        changed = compose(*zip(moved, step.counts, strict=True))
    found, info = api.epsilon(
        changed, delta=delta, num_steps=num_steps, return_info=True
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        near, far = (
            np.tensordot(weights, found, 1) / width for weights in (_NEAR, _FAR)
        )
        apart = ~(np.abs(near - far) <= _APART * np.abs(near))
    bad = apart | np.any(info.is_certified_bound, axis=0)
    return np.where(bad, np.nan, near)[()]


class _Problem(NamedTuple):
    """A run, its target and what it moves along: one direction for each name.

    At every setting and path, the last axis of every array, or at settings with one
    path each, (n,).
    """

    log_delta: np.ndarray
    run: Run
    moved: list[Run]

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> _Problem:
        """Applies a function to every array."""
        moved = [along.map(function) for along in self.moved]
        return _Problem(function(self.log_delta), self.run.map(function), moved)


def _gradient(
    problem: _Problem,
    shape: tuple[int, ...],
    epsilon: np.ndarray,
    certified: np.ndarray,
) -> np.ndarray:
    """(names, n) derivatives, from epsilon and whether it is only a bound."""
    num_paths = problem.run.num_paths
    shape = shape or (1,)
    every_path = np.arange(num_paths)[None]

    def rows(index: np.ndarray, path: np.ndarray) -> _Problem:
        """Settings by their flat index, with a path each; the two broadcast."""
        index, path = np.broadcast_arrays(index, path)
        place = (*np.unravel_index(index, shape), path)
        return problem.map(
            lambda field: np.broadcast_to(field, (*shape, num_paths))[place]
        )

    result = np.full((len(problem.moved), epsilon.size), np.nan)
    index = np.flatnonzero(epsilon <= 0)
    if index.size:
        # 0 where delta is not even reached at epsilon 0.
        every = rows(index[:, None], every_path)
        at_zero = exact_answer(DeltaAt(np.zeros(())), every.run).value
        result[:, index[(at_zero < every.log_delta).all(axis=-1)]] = 0.0
    index = np.flatnonzero((epsilon > 0) & np.isfinite(epsilon) & ~certified)
    if not index.size or not problem.moved:
        return result
    # The path of each setting that attains its epsilon.
    worst = np.zeros(index.size, np.int64)
    if num_paths > 1:
        every = rows(index[:, None], every_path)
        bound, _ = rdp_bound(EpsilonAt(every.log_delta), every.run)
        least = epsilon[index] * (1 - _ATTAINED)
        row, path = np.nonzero(bound >= least[:, None])
        some = rows(index[row], path)
        values = exact_answer(EpsilonAt(some.log_delta), some.run).value
        # Ascending, so that the last one written for a row is the largest.
        order = np.argsort(values, kind="stable")
        worst[row[order]] = path[order]
    result[:, index] = _of_rows(epsilon[index], rows(index, worst))
    return result


def _of_rows(epsilon: np.ndarray, rows: _Problem) -> np.ndarray:
    """(names, n) derivatives where epsilon is positive and finite."""
    tables = [loss for loss in rows.run.losses if isinstance(loss, Tabulated)]
    with using_engine("jax"):
        for loss in tables:
            loss.prepare(slopes=True)
    largest = _LARGEST_OF_TABLES if tables else _LARGEST_ERROR
    result = np.full((len(rows.moved), epsilon.size), np.nan)
    single = rows.run.num_steps == 1
    by_count = [i for i, along in enumerate(rows.moved) if np.any(along.counts)]
    others = [i for i in range(len(rows.moved)) if i not in by_count]
    every = list(range(len(rows.moved)))
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
            slopes = _by_profile(epsilon[index], part)
        else:
            slopes = composed_slopes(epsilon[index], *part)
        scale = np.maximum(epsilon[index], _SMALLEST_EPSILON) * slopes.slope
        gap = np.abs(slopes.log_delta - part.log_delta)
        attained = gap <= _ATTAINED * scale + slopes.error + _LEFT_OUT
        known = attained & (slopes.error < largest) & ~undefined
        with np.errstate(divide="ignore", invalid="ignore"):
            found = slopes.along / slopes.slope
        result[np.array(names)[:, None], index] = np.where(known, found, np.nan)
    return result


def _defined(
    rows: _Problem, index: np.ndarray, names: list[int]
) -> tuple[_Problem, np.ndarray]:
    """Some settings and names, with 0 for NaN; and where (names, n) there was one."""
    some = rows._replace(moved=[rows.moved[name] for name in names])
    some = some.map(lambda field: field[index])
    undefined = np.zeros((len(names), index.size), bool)
    for bad, along in zip(undefined, some.moved, strict=True):
        steps = zip(along.losses, along.counts, some.run.counts, strict=True)
        for loss, moved, count in steps:
            bad |= np.isnan(np.stack((*loss.fields, moved))).any(axis=0) & (count > 0)
    moved = [along.map(np.nan_to_num) for along in some.moved]
    return some._replace(moved=moved), undefined


def _by_profile(epsilon: np.ndarray, rows: _Problem) -> Slopes:
    """Where one of the steps is taken once, by that step's profile."""
    value, error, slope = np.zeros((3, epsilon.size))
    along = np.zeros((len(rows.moved), epsilon.size))
    for i, (loss, count) in enumerate(
        zip(rows.run.losses, rows.run.counts, strict=True)
    ):
        taken = np.flatnonzero(count == 1)
        if taken.size == 0:
            continue

        def take(field: np.ndarray, taken: np.ndarray = taken) -> np.ndarray:
            return field[taken]

        moved: Any = [along.losses[i].map(take) for along in rows.moved]
        slopes = single_step_slopes(
            epsilon[taken], cast(Profile, loss.map(take)), moved
        )
        value[taken], error[taken] = slopes.log_delta, slopes.error
        slope[taken], along[:, taken] = slopes.slope, slopes.along
    return Slopes(value, error, slope, along)
