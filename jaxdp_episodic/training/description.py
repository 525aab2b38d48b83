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
from jaxdp_episodic.files.json_file import differences
from jaxdp_episodic.training.processes import Processes

# What all processes of a run must have alike: draws depend on NumPy, too.
_SAME_EVERYWHERE = ("jax", "jaxlib", "numpy", "matmul_precision", "x64")
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


def described_types(params: Any) -> dict[str, Any]:
    """Returns the parameters' type, or types by place; nothing where all are float32.

    A state that is restored takes the types that the run has now: a step that was
    charged and is taken again would add the same noise to another sum, or other noise
    to the same one.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    types = {jax.tree_util.keystr(place): str(leaf.dtype) for place, leaf in leaves}
    kinds = set(types.values())
    if kinds <= {"float32"}:
        return {}
    return {"types": kinds.pop() if len(kinds) == 1 else types}


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
    """A checkpoint, or another process, belongs to a run with other settings."""


def refuse_other_run(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses to go on with a run whose description differs, and shows how.

    Args:
      saved: description in the checkpoint.
      wanted: description of the run that wants to go on. Nested dictionaries of plain
        values, as in JSON.

    Raises:
      RunMismatchError: they differ anywhere.
    """
    found = differences(saved, wanted, "in the checkpoint", "now")
    if found:
        raise RunMismatchError(f"the checkpoint is of another run: {_listed(found)}")


def agreed(
    processes: Processes, run: Mapping[str, Any], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the environment of a run's processes, if all have the same run.

    What differs from process to process stands there as a list, process by process;
    the devices do so in any case, if their number matters to the rounding of a sum.

    Args:
      processes: all of which call this.
      run: description of this process's run; see `described_run`.
      environment: of this process; see `described_environment`.

    Raises:
      RunMismatchError: another run than the first process's, or other versions.
      RunEndedError: another process found that, or has ended.
    """
    if processes.count == 1:
        return dict(environment)
    own = {**run, **{name: environment[name] for name in _SAME_EVERYWHERE}}
    first = processes.shared_value(json.loads(json.dumps(own)))
    found = differences(first, own, "in the first process", "here")
    if found:
        raise RunMismatchError(
            f"process {processes.index} of {processes.count} has another run than the "
            f"first: {_listed(found)}"
        )
    each = processes.gathered(environment)
    joined = {
        name: value if all(e[name] == value for e in each) else [e[name] for e in each]
        for name, value in each[0].items()
    }
    devices = [e["devices"] for e in each]
    joined["repeats"] = all(e["repeats"] for e in each)
    if not isinstance(devices[0], str):
        joined["devices"] = devices
        # Nobody promises that processes on GPUs sum in the same order twice.
        cpus = all(kind == "cpu" for kinds in devices for kind in kinds)
        joined["repeats"] = joined["repeats"] and cpus
    return joined


def _listed(found: Mapping[str, str]) -> str:
    return "; ".join(f"{key}: {words}" for key, words in found.items())


def described_environment(
    devices: Sequence[Any], block_size: int, *, sums_are_exact: bool = False
) -> dict[str, Any]:
    """Returns all that may change the last bits of a step, or its draw.

    ``repeats`` says whether two processes that agree in everything else get the same
    bits. On CPUs they do. On GPUs sums are made in no fixed order, unless XLA is told
    otherwise by ``XLA_FLAGS=--xla_gpu_deterministic_ops=true``; of other devices
    nothing is assumed.

    Args:
      devices: JAX devices over which blocks are spread.
      block_size: clip units in a block.
      sums_are_exact: of whole numbers: how many devices there are changes nothing, if
        they are of one kind, which alone is then said.
    """
    kinds: Any = [str(device.device_kind) for device in devices]
    if sums_are_exact and len(set(kinds)) == 1:
        kinds = kinds[0]
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
        "devices": kinds,
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
