"""One chunk of a sweep: which settings it has, and their answers.

The chunk is the unit of everything: its arrays have the same shape wherever it is
evaluated, so its bytes are the same on one device, on four, or on another worker.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp_episodic.requests.request import EpsilonRequest
from jaxdp_episodic.sweep.description import Sweep
from jaxdp_episodic.sweep.grid import METHOD, QUANTITY

# The answers' column where several quantities are asked for.
VALUE = "value"
# How well an epsilon or a delta is known, where that is more than "a bound": the fields
# of `PrivacyInfo`. Calibrated values have no error of their own (NaN).
INFO = ("error", "is_certified_bound")
# The same words for every chunk, so that they are said once.
_CERTIFIED = (
    "some answers could not be computed exactly and are certified upper bounds: those "
    "with is_certified_bound in the table"
)


def answer_columns(description: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the columns that are computed, of a `Sweep.description`."""
    words = {axis["field"]: axis.get("values") for axis in description["axes"]}
    quantities = words.get(QUANTITY) or [description[QUANTITY]]
    methods = words.get(METHOD) or [description[METHOD]]
    name = VALUE if QUANTITY in words else description[QUANTITY]
    return (name, *INFO) if _have_info(quantities, methods) else (name,)


def _have_info(quantities: Sequence[str], methods: Sequence[str]) -> bool:
    evaluated = any(quantity in ("epsilon", "delta") for quantity in quantities)
    return evaluated and any(method != "rdp" for method in methods)


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
      (n, 1) float64 answers: upper bounds, the smallest noise that is enough, or the
      largest permitted number of steps (at most 2**53, hence exact); where
      `answer_columns` says so (n, 3), with the two columns of `INFO`; warnings.

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
    """Answers (n, k) of settings, those with the same quantity and method at once."""
    quantity = values.get(QUANTITY, np.full(size, sweep.quantities[0]))
    method = values.get(METHOD, np.full(size, sweep.methods[0]))
    has_info = _have_info(sweep.quantities, sweep.methods)
    answers = np.full((size, 1 + has_info * len(INFO)), np.nan)
    for asked in sweep.quantities:
        for way in sweep.methods:
            chosen = np.flatnonzero((quantity == asked) & (method == way))
            if not chosen.size:
                continue
            some = {name: column[chosen] for name, column in values.items()}
            request = sweep.request(asked, way, some)
            if has_info and isinstance(request, EpsilonRequest):
                value, info = request.answer_with_info()
                answers[chosen] = np.stack([value, *info], axis=-1)
                if way == "exact" and np.any(info.is_certified_bound):
                    warnings.warn(_CERTIFIED, stacklevel=2)
            else:
                answers[chosen, 0] = request.answer()
                answers[chosen, 2:] = 0.0  # whether it is a certified bound
    return answers
