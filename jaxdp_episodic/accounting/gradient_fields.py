"""How the dominating pairs of a run move with the fields that a user sets."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accounting.dominating_pair import dominating_pair
from jaxdp_episodic.accounting.gradient_kernels import Direction, Directions
from jaxdp_episodic.describe.designs import schemes_of
from jaxdp_episodic.describe.schemes import EpochScheme, Poisson
from jaxdp_episodic.describe.step import ComposedSteps, GaussianStep
from jaxdp_episodic.losses.privacy_loss import PrivacyLoss

NOISE, COUNT = "noise_multiplier", "num_steps"


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


def checked_names(wrt: Any, step: GaussianStep | ComposedSteps) -> tuple[str, ...]:
    """Returns ``wrt`` as a tuple of names that the step has; refuses others."""
    if isinstance(wrt, str) or not isinstance(wrt, tuple | list):
        raise TypeError(f"wrt must be a tuple of names, got {wrt!r}")
    allowed = field_names(step)
    for name in wrt:
        _validation.choice("wrt", name, allowed)
    return tuple(wrt)


def directions(name: str, step: GaussianStep | ComposedSteps) -> Directions:
    """How each step's pair moves per unit of the field.

    Returns:
      One `Direction` a step, its arrays with a path axis like those of the pair; NaN
      where epsilon has no derivative by a rate, which is 0 or 1.
    """
    if isinstance(step, GaussianStep):
        return (_direction(name, step),)
    plain, _, index = name.partition("[")
    chosen = range(len(step.gaussian_steps)) if not index else (int(index[:-1]),)
    return tuple(
        _direction(plain if i in chosen else "", part)
        for i, part in enumerate(step.gaussian_steps)
    )


def _direction(name: str, step: GaussianStep) -> Direction:
    """Of one step; nothing moves with a field that it does not have."""
    loss = dominating_pair(step)
    still = Direction(loss.map(np.zeros_like), np.zeros(1))
    if name == COUNT:
        return still._replace(count=np.ones(1))
    if name == NOISE:
        noise = np.asarray(step.noise_multiplier, np.float64)[..., None]
        shift = loss.hints().shift
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            slope = np.where(noise > 0, -shift / noise, 0.0)
        return still._replace(loss=dataclasses.replace(still.loss, shift=slope))
    names = _rate_names(step)
    return _along_rate(step, names[name]) if name in names else still


def _rate_names(step: GaussianStep) -> dict[str, int]:
    """Names of the fields that set a rate, and the position of their level."""
    # The length of an epoch is a whole number.
    drawn = schemes_of(step.design)
    schemes = [scheme for scheme in drawn if not isinstance(scheme, EpochScheme)]
    used = step.level_names_used
    names = {}
    for scheme in schemes:
        field = "sampling_probability" if isinstance(scheme, Poisson) else "size"
        if scheme.name in used:
            names[f"{scheme.name}.{field}"] = used.index(scheme.name)
    return names


def _along_rate(step: GaussianStep, position: int) -> Direction:
    """Every rate of the pair is a product of levels' rates."""
    levels = step.path_rates
    rate = levels.rates[position]
    draw, group = levels.draw_sizes[position], levels.group_sizes[position]
    if draw is None or group is None:
        speed = np.ones_like(rate)
        smooth = (rate > 0) & (rate < 1)
    else:
        # More than all cannot be drawn.
        speed = np.where(draw > group, 0.0, 1.0 / group)
        smooth = draw != group
    loss = dominating_pair(step)
    relative = speed / np.where(smooth & (rate > 0), rate, 1.0)
    moved = {
        field: np.where(smooth, getattr(loss, field) * relative, np.nan)
        for field in _products(step, position)
    }
    still = loss.map(np.zeros_like)
    return Direction(dataclasses.replace(still, **moved), np.zeros(1))


def _products(step: GaussianStep, position: int) -> list[str]:
    """Which rates of the pair the level's rate is a factor of.

    Found by halving it, everything else alike: so there is one place where designs
    meet theorems.
    """
    before = _pair_at(step, {})
    after = _pair_at(step, {position: 0.25})
    return [
        field
        for field in before.rate_fields
        if np.any(getattr(before, field) != getattr(after, field))
    ]


def _pair_at(step: GaussianStep, rates: dict[int, float]) -> PrivacyLoss:
    """The pair of a step whose levels all have rate 1/2, but for those named."""
    levels = step.path_rates
    drawn = tuple(np.full(1, rates.get(i, 0.5)) for i in range(levels.num_levels))
    other = copy.copy(step)
    # The cached property of the copy.
    vars(other)["path_rates"] = dataclasses.replace(levels, rates=drawn)
    return dominating_pair(other)
