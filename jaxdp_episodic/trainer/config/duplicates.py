"""Examples that two tables have in common, and how they are left out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxdp_episodic.trainer.data.table import ExampleTable

# Equal examples of at least so many numbers are copies, and not equal by chance.
_LEAST_COMPARED = 64


def shared_rows(data: ExampleTable, other: ExampleTable) -> list[int]:
    """Returns which examples another table has too, equal bit for bit."""
    rows, others = data.features, other.features
    if not (isinstance(rows, np.ndarray) and isinstance(others, np.ndarray)):
        return []
    if rows[:1].size < _LEAST_COMPARED or not len(others):
        return []
    seen = {hash(row.tobytes()) for row in others}
    same = (i for i, row in enumerate(rows) if hash(row.tobytes()) in seen)
    return [i for i in same if np.ptp(rows[i]) > 0]


def rows_held_out(data: ExampleTable, held_out: Iterable[ExampleTable]) -> np.ndarray:
    """Returns the rows, ascending, of examples that held-out data have too."""
    found = [shared_rows(data, other) for other in held_out]
    return np.unique(np.array([row for rows in found for row in rows], int))


def without_rows(data: ExampleTable, rows: np.ndarray) -> ExampleTable:
    """Returns the table without some rows; units that lose all of theirs stay."""
    return data.take(np.setdiff1d(np.arange(data.num_examples), rows))
