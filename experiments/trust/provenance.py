"""The date, machine and versions of a measurement."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

import jaxdp_episodic as jde

PACKAGES = ("jax", "numpy", "hypothesis", "pyarrow")


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
            "jaxdp-episodic": jde.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
    }


def _version(package: str) -> str | None:
    """The version, or None where the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
