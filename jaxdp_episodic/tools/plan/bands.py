"""Adds correlated noise to a planned run if it pays."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.serialization import spec_to_dict
from jaxdp_episodic.accountant.questions.bands import choose_bands
from jaxdp_episodic.tools.plan.plan import Plan

# Of the noise that the optimizer keeps: the estimate is no better than that.
_LEAST_GAIN = 0.05


def with_bands(config: dict[str, Any], plan: Plan) -> tuple[dict[str, Any], str]:
    """Returns the config of the recommended design, with bands if they pay, and why."""
    own = [key for key in ("noise", "adaptive") if key in config]
    if own:
        return config, f"correlated noise: not weighed, as the file has {own[0]!r}"
    best = plan.recommended
    design = plan.designs[int(plan.design[best])]
    table = choose_bands(
        design.step(float(plan.episodes_per_step[best])),
        epsilon=design.request.epsilon,
        delta=design.request.delta,
        num_steps=int(plan.num_steps[best]),
    )
    if len(table.bands) == 1:
        return config, (
            "correlated noise: not for you, no level can be split into groups that are "
            "at least as large as a draw and hold every protected unit whole"
        )
    index = 1 + int(np.argmin(table.relative_noise[1:]))
    count, level = int(table.bands[index]), table.levels[index]
    found = (
        f"{count} groups of {level!r} leave {table.relative_noise[index]:.2f} of the "
        f"noise that an optimizer keeps over {table.horizon:g} steps"
    )
    if table.relative_noise[index] > 1 - _LEAST_GAIN:
        return config, f"correlated noise: not for you, at best {found}"
    sampling = spec_to_dict(table.steps[index].design)
    sampling.pop("version")
    noise = {"kind": "banded", "bands": count, "groups": level}
    noise["horizon"] = table.horizon
    step = {**config["step"], "sampling": sampling}
    config = {**config, "step": step, "noise": noise}
    multiplier = f"its noise multiplier is {table.noise_multiplier[index]:.4g}"
    return config, f"correlated noise: {found}; {multiplier}, all others are without"
