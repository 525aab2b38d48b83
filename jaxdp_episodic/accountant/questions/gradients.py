"""Epsilon and its derivatives by fields of a step, by name."""

from __future__ import annotations

import functools
import math
import re
from typing import Any, cast

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant._engine import asking_together
from jaxdp_episodic.accountant.describe.designs import epoch_scheme
from jaxdp_episodic.accountant.describe.schemes import EpochScheme, Scheme
from jaxdp_episodic.accountant.describe.spec import mapped
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    compose,
    gaussian_parts,
)
from jaxdp_episodic.accountant.losses.protocols import Bounds
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.derivatives import (
    COUNT,
    METHODS,
    SIZE,
    Field,
    is_constant,
    slopes,
    slopes_of_bounds,
    total,
)

# Names of the fields that every step has.
NOISE = "noise_multiplier"
NUM_STEPS = "num_steps"
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
    6e-7 at most of some thousand (*estimates*; docs/proofs.md).

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
    is ``inf`` or only a certified bound (`PrivacyInfo.is_certified_bound`), but for
    random allocation, of which differences of bounds are right to some 1e-3; where the
    integral's error estimate is above 1e-7 or two contours disagree by 1e-6; where a
    rate is at an end (a probability of 0, or within 1e-10 of 1; a size equal to the
    population); and where epsilon is 0 but delta is reached there. It is 0 where
    epsilon 0 needs less than delta. Where two paths or directions are equally bad
    epsilon has a kink; the derivative is that of one.

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
    parts = gaussian_parts(step, _NAME)  # refuses others
    _validation.open_unit_array("delta", delta)
    _validation.choice("method", method, METHODS)
    if isinstance(step, ComposedSteps) and num_steps is not None:
        step, num_steps = compose((step, num_steps)), None
    wanted = _checked_names(wrt, step)
    log_delta = np.log(np.asarray(delta, np.float64))
    runs, shape = api.checked_runs(step, num_steps, delta=log_delta)
    counts = step.counts if isinstance(step, ComposedSteps) else (num_steps,)
    counts = [np.broadcast_to(np.asarray(n, np.float64), shape) for n in counts]
    with asking_together(math.prod(shape)):
        value, info = api.epsilon(
            step, delta=delta, num_steps=num_steps, method=method, return_info=True
        )
        known = np.where(info.is_certified_bound, np.inf, value)
        log_delta = np.broadcast_to(log_delta, shape)
        fields = list(dict.fromkeys(one for some in wanted.values() for one in some))
        by_epsilon, along = slopes(known, log_delta, parts, counts, fields, method)
        still = is_constant(known, log_delta, runs, method)
        bounded = [isinstance(loss, Bounds) for run in runs for loss in run.losses]
        bounded = any(bounded) & info.is_certified_bound & np.isfinite(value)
        wide = {}
        if np.any(bounded):
            wide = slopes_of_bounds(log_delta, parts, counts, fields, method)
    gradient = {}
    for name, some in wanted.items():
        row = total([along[one] for one in some]) / by_epsilon
        if wide:
            row = np.where(bounded, sum(wide[one] for one in some), row)
        gradient[name] = np.where(still, 0.0, row)[()]
    return value, gradient


def field_names(step: GaussianStep | ComposedSteps) -> tuple[str, ...]:
    """Returns the names of what epsilon can be differentiated by.

    Of a composed run: each name, which moves all steps that have it, then the same of
    every step alone, with its index in brackets.
    """
    return tuple(_fields(step))


def _fields(step: GaussianStep | ComposedSteps) -> dict[str, list[Field]]:
    """By name the fields that it moves."""
    if isinstance(step, GaussianStep):
        return {name: [(0, place)] for name, place in _places(step).items()}
    together: dict[str, list[Field]] = {}
    alone: dict[str, list[Field]] = {}
    for i, part in enumerate(step.gaussian_steps):
        for name, place in _places(part).items():
            together.setdefault(name, []).append((i, place))
            alone[f"{name}[{i}]"] = [(i, place)]
    return together | alone


def _places(step: GaussianStep) -> dict[str, str]:
    """By name the place of a field of one step."""
    found, used = {NOISE: NOISE, NUM_STEPS: COUNT}, step.level_names_used

    def note(where: str, value: Any) -> Any:
        *path, field = re.findall(r"\w+", where)
        owner: Any = functools.reduce(
            lambda spec, key: spec[int(key)] if key.isdigit() else getattr(spec, key),
            path,
            cast("Any", step),
        )
        # The length of an epoch is a whole number.
        is_drawn = isinstance(owner, Scheme) and not isinstance(owner, EpochScheme)
        if is_drawn and owner.name in used and field == owner.rate_field:
            name = f"{owner.name}.{field}"
            found[name] = name if name.endswith(SIZE) else where
        return value

    mapped(step, note)
    return found


def _checked_names(
    wrt: Any, step: GaussianStep | ComposedSteps
) -> dict[str, list[Field]]:
    """By name the fields of a step that are asked for; refuses other names."""
    if isinstance(wrt, str) or not isinstance(wrt, tuple | list):
        raise TypeError(f"wrt must be a tuple of names, got {_validation.shown(wrt)}")
    fields = _fields(step)
    parts = gaussian_parts(step, _NAME)
    has_epochs = any(epoch_scheme(part.design) is not None for part in parts)
    for name in wrt:
        _validation.choice("wrt", name, tuple(fields))
        if has_epochs and name.partition("[")[0] != NOISE:
            raise NotImplementedError(
                f"{_NAME} with epochs covers {NOISE!r} only, got {name!r}"
            )
    return {name: fields[name] for name in wrt}
