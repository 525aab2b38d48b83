"""The levels of a design that a rate is sought for: their schemes and sizes."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.describe.designs import (
    CLASS,
    GroupedClasses,
    schemes_of,
    with_scheme,
)
from jaxdp_episodic.describe.schemes import (
    EpochScheme,
    Poisson,
    RandomAllocation,
    Scheme,
    WithoutReplacement,
)
from jaxdp_episodic.describe.step import GaussianStep, Sampling


def scheme_of(step: GaussianStep, level: str) -> Scheme:
    """The scheme that draws a level."""
    _validation.choice("level", level, step.design.level_names)
    for scheme in schemes_of(step.design):
        if scheme.name == level:
            return scheme
    raise ValueError(f"level must be one that is drawn, got {level!r}, which is not")


def with_rate(step: GaussianStep, level: str, rate: np.ndarray) -> Sampling:
    """The step's sampling with another probability, size or epoch at one level."""
    scheme = scheme_of(step, level)
    field = "sampling_probability" if isinstance(scheme, Poisson) else "size"
    if isinstance(scheme, EpochScheme):
        field = "steps_per_epoch"
    changed = dataclasses.replace(scheme, **{field: rate})
    return with_scheme(step.design, changed)


def smallest_size(step: GaussianStep, level: str) -> np.ndarray:
    """One; of classes, as many as an episode needs; of an epoch, its blocks."""
    drawn, scheme = step.design, scheme_of(step, level)
    if isinstance(scheme, RandomAllocation):
        return np.asarray(scheme.times)
    sized = isinstance(scheme, WithoutReplacement)
    if sized and isinstance(drawn, GroupedClasses) and level == CLASS:
        return np.asarray(drawn.ways)
    return np.asarray(1)


def largest_size(step: GaussianStep, level: str) -> np.ndarray:
    """Sizes beyond this draw nothing more, or are refused where small units are."""
    rates = step.path_rates
    names = step.level_names_used
    if level not in names:
        raise ValueError(
            f"level must be one of {names}, at or above the privacy unit, got {level!r}"
        )
    group = rates.group_sizes[names.index(level)]
    assert group is not None  # a level without replacement has a size
    refused = step.small_units == "error"
    return group.min(axis=-1) if refused else group.max(axis=-1)
