"""One chunk of a sweep: which settings it has, and their answers.

The chunk is the unit of everything: its arrays have the same shape wherever it is
evaluated, so its bytes are the same on one device, on four, or on another worker.
"""

from __future__ import annotations

import warnings

import numpy as np

from jaxdp_episodic.sweep.description import Sweep
from jaxdp_episodic.sweep.grid import METHOD, QUANTITY


def num_chunks(size: int, chunk_size: int) -> int:
    """Returns how many chunks so many settings are."""
    return -(-size // chunk_size)


def chunk_range(number: int, size: int, chunk_size: int) -> tuple[int, int]:
    """Returns the first setting of a chunk, and the one after its last."""
    start = number * chunk_size
    return start, min(start + chunk_size, size)


def evaluate_chunk(sweep: Sweep, number: int) -> tuple[np.ndarray, list[str]]:
    """Returns the answers of one chunk, and what the library warned of.

    Args:
      sweep: the sweep.
      number: which chunk, from 0.

    Returns:
      (n,) float64 answers: upper bounds, the smallest noise that is enough, or the
      largest permitted number of steps (at most 2**53, hence exact); warnings.

    Raises:
      ValueError: settings that are out of range together.
      NotImplementedError: settings that no theorem covers.
      MemoryError: a chunk that does not fit into memory.
    """
    grid = sweep.grid
    start, stop = chunk_range(number, grid.size, sweep.chunk_size)
    values = grid.values(np.arange(start, stop))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answers = _answers(sweep, values, stop - start)
    return answers, list(dict.fromkeys(str(w.message) for w in caught))


def _answers(sweep: Sweep, values: dict[str, np.ndarray], size: int) -> np.ndarray:
    """Answers of settings, those with the same quantity and method in one call."""
    quantity = values.get(QUANTITY, np.full(size, sweep.quantities[0]))
    method = values.get(METHOD, np.full(size, sweep.methods[0]))
    answers = np.empty(size)
    for asked in sweep.quantities:
        for way in sweep.methods:
            chosen = np.flatnonzero((quantity == asked) & (method == way))
            if not chosen.size:
                continue
            some = {name: column[chosen] for name, column in values.items()}
            answers[chosen] = sweep.request(asked, way, some).answer()
    return answers
