"""What a run is, as plain values: a checkpoint of another run is told by them."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxdp_episodic.accounting.step import GaussianStep


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
