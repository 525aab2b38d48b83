"""What a run is, and what its rounding depends on, as plain values.

A checkpoint of another run is told by the first, and by the second whether a step can
be taken again bit for bit.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np

from jaxdp_episodic.accounting.evaluation import num_cores
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


_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def described_environment(devices: Sequence[Any], block_size: int) -> dict[str, Any]:
    """Returns all that may change the last bits of a step, or its draw.

    ``repeats`` says whether two processes that agree in everything else get the same
    bits. On CPUs they do. On GPUs sums are made in no fixed order, unless XLA is told
    otherwise by ``XLA_FLAGS=--xla_gpu_deterministic_ops=true``; of other devices
    nothing is assumed.

    Args:
      devices: JAX devices over which blocks are spread.
      block_size: clip units in a block.
    """
    flags = " ".join(sorted(os.environ.get("XLA_FLAGS", "").split()))
    platforms = {device.platform for device in devices}
    config: Any = jax.config  # its flags are made at run time
    return {
        "repeats": platforms == {"cpu"}
        or (platforms == {"gpu"} and _DETERMINISTIC in flags.split()),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "machine": f"{platform.system()} {platform.machine()} {_processor()}",
        "cores": num_cores(),
        "devices": [str(device.device_kind) for device in devices],
        "xla_flags": flags,
        "matmul_precision": str(config.jax_default_matmul_precision),
        "x64": bool(config.jax_enable_x64),
        "block_size": block_size,
    }


def _processor() -> str:
    """The processor's model: compilers use what it can do."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return platform.processor()
    names = [line for line in text.splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.processor()
