"""What a run is, and what its rounding depends on, as plain values.

A checkpoint of another run is told by the first, and by the second whether a step can
be taken again bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np

from jaxdp_episodic.accounting.budget import PrivacyBudget
from jaxdp_episodic.accounting.engine import num_cores
from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.describe.step import GaussianStep

_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


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
        "before": [described_step(step) for step in budget.before],
        "target": {
            "epsilon": str(budget.epsilon),
            "delta": budget.delta,
            "num_steps": budget.num_steps,
        },
        "learner": described_learner(learner),
        # By level, those without records included: what is gone is named as such.
        "units": {
            name: data.population.num_units(place)
            for place, name in enumerate(data.level_names, start=1)
        },
        "data": data.fingerprint,
        "seed": "from the operating system" if seed is None else seed,
        **settings,
    }


def described_step(step: GaussianStep) -> dict[str, Any]:
    """Returns the step without its population; the data's fingerprint stands for it."""
    fields = step.to_dict()
    return {k: fields[k] for k in fields if k not in ("version", "type", "population")}


def described_learner(learner: Any) -> dict[str, Any]:
    """Returns a learner's type and those of its fields that are plain values."""
    plain: dict[str, Any] = {"type": type(learner).__name__}
    if dataclasses.is_dataclass(learner):
        for field in dataclasses.fields(learner):
            value = getattr(learner, field.name)
            if isinstance(value, bool | int | float | str):
                plain[field.name] = value
    return plain


class RunMismatchError(ValueError):
    """A checkpoint belongs to a run with other settings."""


def refuse_other_run(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses to go on with a run whose description differs, and shows how.

    Args:
      saved: description in the checkpoint.
      wanted: description of the run that wants to go on. Nested dictionaries of plain
        values, as in JSON.

    Raises:
      RunMismatchError: they differ anywhere.
    """
    old, new = _flat(saved), _flat(json.loads(json.dumps(wanted)))
    missing = "(nothing)"
    differences = [
        f"{key}: {old.get(key, missing)} in the checkpoint, {new.get(key, missing)} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, missing) != new.get(key, missing)
    ]
    if differences:
        raise RunMismatchError(
            "the checkpoint is of another run: " + "; ".join(differences)
        )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries and lists as one dictionary of dotted keys."""
    if isinstance(value, Mapping):
        items = [(f"{prefix}.{k}" if prefix else str(k), v) for k, v in value.items()]
    elif isinstance(value, list):
        items = [(f"{prefix}[{i}]", v) for i, v in enumerate(value)]
    else:
        return {prefix: value}
    return {k: v for key, item in items for k, v in _flat(item, key).items()}


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
