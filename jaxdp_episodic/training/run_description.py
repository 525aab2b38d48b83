"""What a run is, as plain values: a checkpoint of another run is told by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.describe.step import GaussianStep
from jaxdp_episodic.training.budget import PrivacyBudget


def described_run(
    budget: PrivacyBudget,
    data: ExampleTable,
    learner: Any,
    *,
    seed: int | None,
    **settings: Any,
) -> dict[str, Any]:
    """Returns all that must be the same when a run is resumed.

    Args:
      budget: of the run.
      data: that it trains on.
      learner: that it trains.
      seed: None where entropy comes from the operating system.
      **settings: further plain values.
    """
    return {
        "step": described_step(budget.step),
        "target": {
            "epsilon": str(budget.epsilon),
            "delta": budget.delta,
            "num_steps": budget.num_steps,
        },
        "learner": described_learner(learner),
        "units": _num_units(data),  # so that a class that is gone is named as such
        "data": data.fingerprint,
        "seed": "from the operating system" if seed is None else seed,
        **settings,
    }


def described_step(step: GaussianStep) -> dict[str, Any]:
    """Returns the step without its population; the data's fingerprint stands for it."""
    return {
        "sampling": step.design.to_dict(),
        "noise_multiplier": step.noise_multiplier,
        "clip_unit": step.clip_unit,
        "privacy_unit": step.privacy_unit,
        "neighboring_relation": step.neighboring_relation,
        "small_units": step.small_units,
    }


def described_learner(learner: Any) -> dict[str, Any]:
    """Returns a learner's type and those of its fields that are plain values."""
    plain: dict[str, Any] = {"type": type(learner).__name__}
    if dataclasses.is_dataclass(learner):
        for field in dataclasses.fields(learner):
            value = getattr(learner, field.name)
            if isinstance(value, bool | int | float | str):
                plain[field.name] = value
    return plain


def _num_units(data: ExampleTable) -> Mapping[str, int]:
    """How many units the data have at each level, those without records included."""
    tree = data.population
    return {
        name: tree.num_units(place)
        for place, name in enumerate(data.level_names, start=1)
    }
