"""What a step takes, by the clock and of processors."""

from __future__ import annotations

import time
from collections.abc import Callable


def timed(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Seconds of a step, which waits for its own end, in the mean of some."""
    by_clock, of_processors = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return {
        "seconds": (time.perf_counter() - by_clock) / steps,
        "cpu_seconds": (time.process_time() - of_processors) / steps,
    }
