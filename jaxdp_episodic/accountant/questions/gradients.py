"""Derivatives of epsilon by the implicit-function theorem.

They are taken along a *tangent* of the run: the derivatives of its pairs' fields by a
field that a user sets. A pair's shift is in inverse proportion to the noise, each of
its rates a product of levels' rates: each derivative is the field over what it is
differentiated by.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import epoch_scheme
from jaxdp_episodic.accountant.describe.schemes import EpochScheme
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    compose,
    gaussian_parts,
)
from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss
from jaxdp_episodic.accountant.losses.protocols import Tabulated
from jaxdp_episodic.accountant.methods.exact.method import exact_answer
from jaxdp_episodic.accountant.methods.question import DeltaAt, EpsilonAt
from jaxdp_episodic.accountant.methods.rdp.method import rdp_bound
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair, run_of
from jaxdp_episodic.accountant.questions.gradient_kernels import (
    ATTAINED,
    Problem,
    gradient_of_rows,
)
from jaxdp_episodic.accountant.questions.paths import undominated_paths
from jaxdp_episodic.files.optional import require

# Names of the fields that every step has.
NOISE = "noise_multiplier"
COUNT = "num_steps"
# Points of a difference quotient, in widths.
_POINTS = np.array([-2.0, -1.0, 1.0, 2.0])
# Width, as a share of the noise multiplier.
_WIDTH = 4e-3
# Weights of the quotient, of fourth order, and of one of second order that checks it.
_FOURTH_ORDER = np.array([1.0, -8.0, 8.0, -1.0]) / 12
_SECOND_ORDER = np.array([-1.0, 0.0, 0.0, 1.0]) / 4
# Relative difference of the two up to which the first is returned.
_APART = 1e-3


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
      ValueError: ``num_steps`` given twice or not at all, or a
        name that the step does not have.
      NotImplementedError: steps in epochs, and another name than "noise_multiplier".
      ImportError: JAX is not installed, and the derivative is not by differences.
    """
    gaussian_parts(step, "epsilon_and_gradient")  # refuses others
    _validation.open_unit_array("delta", delta)
    if isinstance(step, ComposedSteps) and num_steps is not None:
        step, num_steps = compose((step, num_steps)), None
    names = _checked_names(wrt, step)
    value, info = api.epsilon(step, delta=delta, num_steps=num_steps, return_info=True)
    log_delta = np.log(np.asarray(delta, np.float64))
    runs, shape = api.checked_runs(step, num_steps, delta=log_delta)
    accounted = runs[0]
    tables = [loss for loss in accounted.losses if isinstance(loss, Tabulated)]
    # Of several pairs the least counts; pairs of many parts have no tangent here.
    mixtures = len(runs) > 1 or any(loss.padding for loss in accounted.losses)
    if mixtures:
        _refuse_all_but_noise("several contributions of a unit", names)
    if mixtures or not all(loss.has_slopes for loss in tables):
        return value, {
            name: _by_differences(name, step, delta, num_steps) for name in names
        }
    require("jax", purpose="epsilon_and_gradient", extra=None)
    paths = undominated_paths(accounted)
    counts = None if num_steps is None else np.asarray(num_steps, np.float64)
    tangents = [_tangent(name, step, counts).take_paths(paths) for name in names]
    problem = Problem(log_delta[..., None], accounted.take_paths(paths), tangents)
    certified = np.reshape(info.is_certified_bound, -1)
    rows = _gradient(problem, shape, np.reshape(value, -1), certified)
    gradient = {
        name: row.reshape(shape)[()] for name, row in zip(names, rows, strict=True)
    }
    return value, gradient


def _refuse_all_but_noise(what: str, names: Iterable[str]) -> None:
    for name in names:
        if name.partition("[")[0] != NOISE:
            raise NotImplementedError(
                f"epsilon_and_gradient with {what} covers {NOISE!r} only, got {name!r}"
            )


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
    points = np.reshape(_POINTS, (-1, *(1,) * len(shape))) * width
    changed = list(parts)
    for i, noise in zip(chosen, noises, strict=True):
        changed[i] = dataclasses.replace(parts[i], noise_multiplier=noise + points)
    run: Any = changed[0]
    if isinstance(step, ComposedSteps):
        run = compose(*zip(changed, step.counts, strict=True))
    found, info = api.epsilon(run, delta=delta, num_steps=num_steps, return_info=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = np.tensordot(_FOURTH_ORDER, found, 1) / width
        check = np.tensordot(_SECOND_ORDER, found, 1) / width
        apart = ~(np.abs(slope - check) <= _APART * np.abs(slope))
    bad = apart | np.any(info.is_certified_bound, axis=0)
    return np.where(bad, np.nan, slope)[()]


def _gradient(
    problem: Problem,
    shape: tuple[int, ...],
    epsilon: np.ndarray,
    certified: np.ndarray,
) -> np.ndarray:
    """(names, n) derivatives, from epsilon and whether it is only a bound."""
    num_paths = problem.run.num_paths
    shape = shape or (1,)
    every_path = np.arange(num_paths)[None]

    def rows(index: np.ndarray, path: np.ndarray) -> Problem:
        """Settings by their flat index, with a path each; the two broadcast."""
        index, path = np.broadcast_arrays(index, path)
        entries = (*np.unravel_index(index, shape), path)
        return problem.map(
            lambda field: np.broadcast_to(field, (*shape, num_paths))[entries]
        )

    result = np.full((len(problem.tangents), epsilon.size), np.nan)
    index = np.flatnonzero(epsilon <= 0)
    if index.size:
        # 0 where delta is not even reached at epsilon 0.
        every = rows(index[:, None], every_path)
        at_zero = exact_answer(DeltaAt(np.zeros(())), every.run).value
        result[:, index[(at_zero < every.log_delta).all(axis=-1)]] = 0.0
    index = np.flatnonzero((epsilon > 0) & np.isfinite(epsilon) & ~certified)
    if not index.size or not problem.tangents:
        return result
    # The path of each setting that attains its epsilon.
    worst = np.zeros(index.size, np.int64)
    if num_paths > 1:
        every = rows(index[:, None], every_path)
        bound, _ = rdp_bound(EpsilonAt(every.log_delta), every.run)
        least = epsilon[index] * (1 - ATTAINED)
        row, path = np.nonzero(bound >= least[:, None])
        some = rows(index[row], path)
        values = exact_answer(EpsilonAt(some.log_delta), some.run).value
        # Ascending, so that the last one written for a row is the largest.
        order = np.argsort(values, kind="stable")
        worst[row[order]] = path[order]
    result[:, index] = gradient_of_rows(epsilon[index], rows(index, worst))
    return result


def field_names(step: GaussianStep | ComposedSteps) -> tuple[str, ...]:
    """Returns the names of what epsilon can be differentiated by.

    Of a composed run: each name, which moves all steps that have it, then the same of
    every step alone, with its index in brackets.
    """
    if isinstance(step, GaussianStep):
        return NOISE, COUNT, *_rate_names(step)
    each = [field_names(part) for part in step.gaussian_steps]
    together = dict.fromkeys(name for names in each for name in names)
    alone = (f"{name}[{i}]" for i, names in enumerate(each) for name in names)
    return *together, *alone


def _checked_names(wrt: Any, step: GaussianStep | ComposedSteps) -> tuple[str, ...]:
    """Returns ``wrt`` as a tuple of names that the step has; refuses others."""
    if isinstance(wrt, str) or not isinstance(wrt, tuple | list):
        raise TypeError(f"wrt must be a tuple of names, got {_validation.shown(wrt)}")
    allowed = field_names(step)
    parts = (step,) if isinstance(step, GaussianStep) else step.gaussian_steps
    has_epochs = any(epoch_scheme(part.design) is not None for part in parts)
    for name in wrt:
        _validation.choice("wrt", name, allowed)
    if has_epochs:
        _refuse_all_but_noise("epochs", wrt)
    return tuple(wrt)


def _tangent(name: str, step: GaussianStep | ComposedSteps, num_steps: Any) -> Run:
    """The derivative of each step's pair and count by the field; as `run_of` has them.

    NaN where epsilon has no derivative by a rate, which is 0 or 1.
    """
    plain, _, index = name.partition("[")
    if isinstance(step, ComposedSteps):
        parts, counts = step.gaussian_steps, step.counts
    else:
        parts, counts = (step,), (num_steps,)
    found = []
    for i, (part, count) in enumerate(zip(parts, counts, strict=True)):
        has_field = not index or i == int(index[:-1])
        found += _tangents(plain if has_field else "", part, count)
    return Run(*zip(*found, strict=True))


def _tangents(
    name: str, step: GaussianStep, count: Any
) -> list[tuple[PrivacyLoss, np.ndarray]]:
    """Of one kind of steps; 0 by a field that they do not have."""
    losses = [dominating_pair(step)]
    names = _rate_names(step)
    if epoch_scheme(step.design) is not None:
        # An epoch is made of blocks, and parts of them.
        losses, names = list(run_of(step, count).losses), {}
    found = []
    for loss in losses:
        fields = {}
        if name == NOISE:
            noise = np.asarray(step.noise_multiplier, np.float64)[..., None]
            shift = loss.hints().shift
            with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
                fields["shift"] = np.where(noise > 0, -shift / noise, 0.0)
        elif name in names:
            fields = _by_rate(step, names[name])
        along = dataclasses.replace(loss.map(np.zeros_like), **fields)
        found.append((along, np.full(1, float(name == COUNT))))
    return found


def _rate_names(step: GaussianStep) -> dict[str, int]:
    """Names of the fields that set a rate, and the position of their level."""
    used = step.level_names_used
    # The length of an epoch is a whole number.
    return {
        f"{scheme.name}.{scheme.rate_field}": used.index(scheme.name)
        for scheme in step.design.schemes
        if not isinstance(scheme, EpochScheme) and scheme.name in used
    }


def _by_rate(step: GaussianStep, position: int) -> dict[str, np.ndarray]:
    """The derivatives of the pair's rates of which the level's rate is a factor.

    Which these are is found by halving it, all levels alike: so there is one place
    where designs meet theorems.
    """
    levels = step.path_rates
    rate = levels.rates[position]
    draw, group = levels.draw_sizes[position], levels.group_sizes[position]
    if draw is None or group is None:
        slope = np.ones_like(rate)
        smooth = (rate > 0) & (rate < 1)
    else:
        # No larger size can be drawn.
        slope = np.where(draw > group, 0.0, 1.0 / group)
        smooth = draw != group
    loss, before = dominating_pair(step), _pair_at(step, {})
    after = _pair_at(step, {position: 0.25})
    relative = slope / np.where(smooth & (rate > 0), rate, 1.0)
    return {
        field: np.where(smooth, getattr(loss, field) * relative, np.nan)
        for field in before.rates
        if np.any(getattr(before, field) != getattr(after, field))
    }


def _pair_at(step: GaussianStep, rates: dict[int, float]) -> PrivacyLoss:
    """The pair of a step whose levels all have rate 1/2, but for those named."""
    levels = step.path_rates
    drawn = tuple(np.full(1, rates.get(i, 0.5)) for i in range(levels.num_levels))
    other = copy.copy(step)
    # The cached property of the copy.
    vars(other)["path_rates"] = dataclasses.replace(levels, rates=drawn)
    return dominating_pair(other)
