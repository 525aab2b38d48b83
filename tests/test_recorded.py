"""Answers are those that were recorded of the code before its losses were merged.

``python -m recorded.record`` wrote the tables; see there for the settings. Kinds of
pairs are exact to 1e-6, or certified to 1e-4, as `recorded.questions.EXACT` says.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from recorded.questions import FOLDER, ask, compared, recorded, worst
from recorded.record import KINDS, SMALL_SIZE

# Of ends by another plan of lattices some are wider.
WIDE = 0.05
# Specs of a kind that the fast test asks, and kinds of which every answer is slow.
FEW = 2
SLOW = (
    *("people_trees", "people_grouped"),
    *(name for name in KINDS if name.startswith("allocation")),
)


def _recorded_kinds():
    return [name for name in KINDS if (FOLDER / f"{name}.json.gz").exists()]


def _faults(kind, rows, ends=None):
    """Answers that break a rule; and how many intervals are wider, of all."""
    faults, wide = [], []
    for row in rows:
        given = {key: row[key] for key in _GIVEN if key in row}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # next to no noise
            found = ask(row["question"], row["step"], given, ends=ends or row["ends"])
        for rule, kept in compared(kind, row, found):
            if rule == "mostly as narrow":
                wide += np.ravel(~kept).tolist()
            elif not np.all(kept):
                at = np.argwhere(~np.atleast_1d(kept))[:3].tolist()
                faults.append((row["question"], rule, at, worst(row, found), row))
    return faults, wide


_GIVEN = ("num_steps", "orders", "delta", "epsilon")


def _is_fast(row):
    """A small spec, and no calibration."""
    sizes = len(row.get("num_steps", ()))
    return sizes == SMALL_SIZE and row["question"] != "calibrate"


@pytest.mark.parametrize("kind", [k for k in _recorded_kinds() if k not in SLOW])
def test_some_answers(kind):
    rows = [row for row in recorded(kind) if _is_fast(row)][:FEW]
    faults, _ = _faults(kind, rows, "none")
    assert not faults


@pytest.mark.slow
@pytest.mark.parametrize("kind", _recorded_kinds())
def test_all_answers(kind):
    faults, wide = _faults(kind, recorded(kind))
    assert not faults
    assert np.mean(wide or [False]) <= WIDE
