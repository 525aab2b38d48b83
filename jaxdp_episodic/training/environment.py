"""What the rounding of a step depends on: whether it can be taken again bit for bit."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np

from jaxdp_episodic.accounting.engine import num_cores

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
