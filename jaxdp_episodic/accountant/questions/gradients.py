"""Epsilon and its derivatives by fields of a step, by name."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import asking_together
from jaxdp_episodic.accountant.describe.designs import epoch_scheme
from jaxdp_episodic.accountant.describe.schemes import (
    PERSON,
    EpochScheme,
    Poisson,
    Scheme,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    compose,
    gaussian_parts,
)
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.derivatives import (
    METHODS,
    Parameter,
    is_constant,
    scale_of_rate,
    slopes,
)
from jaxdp_episodic.accountant.questions.dominating_pair import (
    in_one_place,
    runs_of_parts,
)

# Names of the fields that every step has.
NOISE = "noise_multiplier"
COUNT = "num_steps"
_NAME = "epsilon_and_gradient"


def epsilon_and_gradient(
    step: GaussianStep | ComposedSteps,
    *,
    delta: Any,
    num_steps: Any = None,
    wrt: tuple[str, ...] = ("noise_multiplier",),
    method: str = "exact",
) -> tuple[Any, dict[str, Any]]:
    """Returns epsilon and its derivatives by fields of the step, at fixed delta.

    ``d eps / d field = (d log delta / d field) / (-d log delta / d eps)`` on the worst
    path and in the worse direction, where log(delta) is what the method solves. The
    numerator is a difference of that smooth function: relative error mostly below 1e-8,
    6e-7 at most of some thousand, of random allocation 1e-6 (*estimates*;
    docs/proofs.md).

    What can be named, of steps in epochs only the first:

    * "noise_multiplier"; the derivative in nats per unit of it.
    * "num_steps", treated as a real number: nats per step more. M(z)^T is continued to
      real T; after very few steps that depends on the contour, and is NaN then.
    * "LEVEL.sampling_probability" of a Poisson level, "school.sampling_probability".
    * "LEVEL.size" of a level without replacement, treated as a real number (the rate is
      size over population; the population stays).

    Of a composed run a name moves all steps that have the field, by the same amount;
    with an index, "noise_multiplier[0]", one step's only. Levels below the privacy unit
    have no rate and cannot be named, nor can the number of independent episodes.

    The derivative is *NaN*, never a wrong number, where it is not known: where epsilon
    is ``inf`` or only a certified bound (`PrivacyInfo.is_certified_bound`), where the
    integral's error estimate is above 1e-7 (of random allocation 1e-5) or two contours
    disagree by 1e-6, where a rate is at an end (a probability of 0, or within 1e-10 of
    1; a size equal to the population), and where epsilon is 0 but delta is reached
    there. It is 0 where epsilon 0 needs less than delta. Where two paths or directions
    are equally bad epsilon has a kink; the derivative is that of one.

    Args:
      step: the step, or a run made by `compose`.
      delta: in (0, 1).
      num_steps: whole number >= 0; of a composed run as of `epsilon`.
      wrt: names of fields.
      method: "exact" or "rdp".

    Returns:
      ``(epsilon, gradient)``: float64 nats of the broadcast shape of step, ``delta``
      and ``num_steps``, and for every name in ``wrt`` the derivative, of that shape.

    Raises:
      ValueError: ``num_steps`` given twice or not at all, or a name that the step does
        not have.
      NotImplementedError: steps in epochs, and another name than "noise_multiplier".
    """
    gaussian_parts(step, _NAME)  # refuses others
    _validation.open_unit_array("delta", delta)
    _validation.choice("method", method, METHODS)
    if isinstance(step, ComposedSteps) and num_steps is not None:
        step, num_steps = compose((step, num_steps)), None
    names = _checked_names(wrt, step)
    log_delta = np.log(np.asarray(delta, np.float64))
    runs, shape = api.checked_runs(step, num_steps, delta=log_delta)
    # The moves of a setting take no longer than its epsilon, but more to compile.
    with asking_together(math.prod(shape)):
        value, info = api.epsilon(
            step, delta=delta, num_steps=num_steps, method=method, return_info=True
        )
        # A name whose steps are all named one by one is their sum.
        every = field_names(step)
        alone = {n: [e for e in every if e.startswith(f"{n}[")] for n in names}
        sums = {n: some for n, some in alone.items() if some and {*some} <= {*names}}
        apart = [name for name in names if name not in sums]
        known = np.where(info.is_certified_bound, np.inf, value)
        log_delta = np.broadcast_to(log_delta, shape)
        fields = [_parameter(name, step, num_steps, shape) for name in apart]
        by_epsilon, along = slopes(known, log_delta, runs, fields, method)
        still = is_constant(known, log_delta, runs, method)
    rows = np.where(still, 0.0, along / by_epsilon)
    gradient = dict(zip(apart, rows, strict=True))
    for name, parts in sums.items():
        gradient[name] = np.sum([gradient[part] for part in parts], axis=0)
    return value, {name: gradient[name][()] for name in names}


def _parameter(
    name: str,
    step: GaussianStep | ComposedSteps,
    num_steps: Any,
    shape: tuple[int, ...],
) -> Parameter:
    """The field of that name: of all steps that have it, or of one."""
    plain, _, index = name.partition("[")
    parts = gaussian_parts(step, _NAME)
    counts = step.counts if isinstance(step, ComposedSteps) else (num_steps,)
    counts = [np.broadcast_to(np.asarray(n, np.float64), shape) for n in counts]
    chosen = [int(index[:-1])] if index else range(len(parts))
    chosen = [i for i in chosen if plain in field_names(parts[i])]

    def moved(displacement: np.ndarray) -> Sequence[Run]:
        """Runs whose counts may be real numbers."""
        steps, taken = list(parts), list(counts)
        for i in chosen:
            if plain == COUNT:
                taken[i] = taken[i] + displacement
            else:
                steps[i] = _moved(steps[i], plain, displacement)
        return runs_of_parts(steps, taken)

    if plain == COUNT:
        least = np.min([counts[i] for i in chosen], axis=0)
        return Parameter(np.maximum(least, 1.0)[..., None], moved, least)
    scales = np.broadcast_arrays(*(_scale(parts[i], plain) for i in chosen))
    return Parameter(np.min(scales, axis=0), moved)


def _scale(step: GaussianStep, name: str) -> np.ndarray:
    """What a field's differences are taken at shares of, with an axis of paths."""
    if name == NOISE:
        return np.asarray(step.noise_multiplier, np.float64)[..., None]
    scheme = _rate_names(step)[name]
    rate = np.asarray(getattr(scheme, scheme.rate_field), np.float64)[..., None]
    if not isinstance(scheme, WithoutReplacement):
        return scale_of_rate(rate)
    draw, group = _drawn(step, scheme)
    # No larger size can be drawn: nothing changes with it.
    return np.where(draw > group, draw, group * scale_of_rate(draw / group))


def _drawn(step: GaussianStep, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """How many units of a level are drawn without replacement, of how many."""
    levels, position = step.path_rates, step.level_names_used.index(scheme.name)
    draw, group = levels.draw_sizes[position], levels.group_sizes[position]
    assert draw is not None and group is not None  # it has a size
    return draw, group


def _moved(step: GaussianStep, name: str, displacement: np.ndarray) -> GaussianStep:
    """The step with a field displaced, by real numbers."""
    if name == NOISE:
        noise = step.noise_multiplier + displacement
        return dataclasses.replace(step, noise_multiplier=noise)
    scheme = _rate_names(step)[name]
    if isinstance(scheme, Poisson):
        rate = scheme.sampling_probability + displacement
        scheme = dataclasses.replace(scheme, sampling_probability=rate)
        return dataclasses.replace(step, sampling=step.design.with_scheme(scheme))
    # A size is a whole number; its rate is not.
    step = in_one_place(step)
    if step.privacy_unit == PERSON:
        raise NotImplementedError(
            f"{_NAME} does not cover {name!r} with privacy_unit='person'"
        )
    draw, group = _drawn(step, scheme)
    levels, position = step.path_rates, step.level_names_used.index(scheme.name)
    # No larger size can be drawn.
    slope = np.where(draw > group, 0.0, 1.0 / group)
    rate = levels.rates[position] + displacement[..., None] * slope
    rates = list(levels.rates)
    rates[position] = np.minimum(rate, 1.0)
    other = copy.copy(step)
    # The cached property of the copy.
    vars(other)["path_rates"] = dataclasses.replace(levels, rates=tuple(rates))
    return other


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
    parts = gaussian_parts(step, _NAME)
    has_epochs = any(epoch_scheme(part.design) is not None for part in parts)
    for name in wrt:
        _validation.choice("wrt", name, allowed)
    for name in wrt if has_epochs else ():
        if name.partition("[")[0] != NOISE:
            raise NotImplementedError(
                f"{_NAME} with epochs covers {NOISE!r} only, got {name!r}"
            )
    return tuple(wrt)


def _rate_names(step: GaussianStep) -> dict[str, Scheme]:
    """Names of the fields that set a rate, and the schemes of their levels."""
    used = step.level_names_used
    # The length of an epoch is a whole number.
    return {
        f"{scheme.name}.{scheme.rate_field}": scheme
        for scheme in step.design.schemes
        if not isinstance(scheme, EpochScheme) and scheme.name in used
    }
