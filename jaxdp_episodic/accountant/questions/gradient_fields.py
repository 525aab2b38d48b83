"""How the dominating pairs of a run move with the fields that a user sets."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import epoch_scheme
from jaxdp_episodic.accountant.describe.schemes import EpochScheme
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep
from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair, run_of

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
        raise TypeError(f"wrt must be a tuple of names, got {_validation.shown(wrt)}")
    allowed = field_names(step)
    parts = (step,) if isinstance(step, GaussianStep) else step.gaussian_steps
    has_epochs = any(epoch_scheme(part.design) is not None for part in parts)
    for name in wrt:
        _validation.choice("wrt", name, allowed)
        if has_epochs and name.partition("[")[0] != NOISE:
            raise NotImplementedError(
                f"epsilon_and_gradient with epochs covers {NOISE!r} only, got {name!r}"
            )
    return tuple(wrt)


def direction(name: str, step: GaussianStep | ComposedSteps, num_steps: Any) -> Run:
    """How each step's pair moves per unit of the field; as `run_of` has them.

    Returns:
      Derivatives of the losses' fields and of the counts, with a path axis like those
      of the pairs; NaN where epsilon has no derivative by a rate, which is 0 or 1.
    """
    plain, _, index = name.partition("[")
    one = isinstance(step, GaussianStep)
    parts = (step,) if one else step.gaussian_steps
    counts = (num_steps,) if one else step.counts
    chosen = (int(index[:-1]),) if index else range(len(parts))
    moved = [
        each
        for i, (part, count) in enumerate(zip(parts, counts, strict=True))
        for each in _moved(plain if i in chosen else "", part, count)
    ]
    return Run(*zip(*moved, strict=True))


def _moved(
    name: str, step: GaussianStep, count: Any
) -> list[tuple[PrivacyLoss, np.ndarray]]:
    """Of one kind of steps; nothing moves with a field that they do not have."""
    losses = [dominating_pair(step)]
    names = _rate_names(step)
    if epoch_scheme(step.design) is not None:
        # An epoch is made of blocks, and parts of them.
        losses, names = list(run_of(step, count).losses), {}
    moved = []
    for loss in losses:
        still = loss.map(np.zeros_like)
        if name == NOISE:
            noise = np.asarray(step.noise_multiplier, np.float64)[..., None]
            shift = loss.hints().shift
            with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
                slope = np.where(noise > 0, -shift / noise, 0.0)
            still = dataclasses.replace(still, **{"shift": slope})
        elif name in names:
            still = dataclasses.replace(still, **_along_rate(step, names[name]))
        moved.append((still, np.full(1, float(name == COUNT))))
    return moved


def _rate_names(step: GaussianStep) -> dict[str, int]:
    """Names of the fields that set a rate, and the position of their level."""
    used = step.level_names_used
    # The length of an epoch is a whole number.
    return {
        f"{scheme.name}.{scheme.rate_field}": used.index(scheme.name)
        for scheme in step.design.schemes
        if not isinstance(scheme, EpochScheme) and scheme.name in used
    }


def _along_rate(step: GaussianStep, position: int) -> dict[str, np.ndarray]:
    """Every rate of the pair is a product of levels' rates."""
    levels = step.path_rates
    rate = levels.rates[position]
    draw, group = levels.draw_sizes[position], levels.group_sizes[position]
    if draw is None or group is None:
        speed = np.ones_like(rate)
        smooth = (rate > 0) & (rate < 1)
    else:
        # No larger size can be drawn.
        speed = np.where(draw > group, 0.0, 1.0 / group)
        smooth = draw != group
    loss = dominating_pair(step)
    relative = speed / np.where(smooth & (rate > 0), rate, 1.0)
    return {
        field: np.where(smooth, getattr(loss, field) * relative, np.nan)
        for field in _products(step, position)
    }


def _products(step: GaussianStep, position: int) -> list[str]:
    """Which rates of the pair the level's rate is a factor of.

    Found by halving it, everything else alike: so there is one place where designs
    meet theorems.
    """
    before = _pair_at(step, {})
    after = _pair_at(step, {position: 0.25})
    return [
        field
        for field in before.rates
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
