"""The date, machine and versions of a measurement."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from typing import Any

PACKAGES = ("jaxdp-episodic", "jax", "numpy", "hypothesis", "pyarrow")


def provenance() -> dict[str, Any]:
    """Returns the day, the machine in words, and versions, as plain values for JSON."""
    affinity = getattr(os, "sched_getaffinity", None)
    there = os.cpu_count() or 1
    used = len(affinity(0)) if affinity else there
    cores = f"{used} of {there} cores" if used < there else f"{there} cores"
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{cores}, {platform.system()} {platform.machine()}",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
    }
