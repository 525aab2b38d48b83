"""Keeps compiled kernels from using up the mappings that Linux grants a process.

XLA maps each of a kernel's functions on its own, a few hundred times for one of ours.
Linux grants 65,530 mappings (``vm.max_map_count``), and behind the last one XLA ends
the process with a segmentation fault: some hundred different shapes or designs later.
"""

from __future__ import annotations

import time
from pathlib import Path

import jax

_MAPPINGS = Path("/proc/self/maps")
_LIMIT = Path("/proc/sys/vm/max_map_count")
# Share of the limit at which everything that was compiled is forgotten. Between two
# looks, which take some milliseconds, far less than the rest can be compiled.
_CROWDED = 0.6
_SECONDS_BETWEEN_LOOKS = 2.0
_next_look = 0.0


def forget_kernels_if_crowded() -> None:
    """Clears JAX's caches where the process has used most of its mappings.

    What is called again is compiled again; numbers do not change. Other systems than
    Linux have no such limit.
    """
    global _next_look
    now = time.monotonic()
    if now < _next_look:
        return
    _next_look = now + _SECONDS_BETWEEN_LOOKS
    try:
        limit = int(_LIMIT.read_text())
        used = _MAPPINGS.read_bytes().count(b"\n")
    except OSError:
        return
    if used > _CROWDED * limit:
        jax.clear_caches()
