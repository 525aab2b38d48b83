"""Each protected unit's own epsilon, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.designs import GroupedClasses
from jaxdp_episodic.accountant.describe.step import AnyStep, gaussian_parts
from jaxdp_episodic.accountant.report.report import privacy_report
from jaxdp_episodic.files.table_file import writing
from jaxdp_episodic.trainer.data.table import unit_labels

_ROWS_AT_ONCE = 20_000  # made into Python's objects and written
_MAX_UNITS = 10**8  # rows of a table: a file of a few GB


class UnitBudgets(NamedTuple):
    """One entry a protected unit, in the order of the `Population`."""

    # Level name to (U,) ids of the units on the way to each protected unit, the levels
    # top to bottom; the index in its level where a level has no ids.
    units: dict[str, np.ndarray]
    epsilon: np.ndarray  # (U,) nats, *upper bounds*
    rate_rounding: float  # rates were rounded up by at most this share; 0 if not at all


def unit_budgets(
    step: AnyStep,
    *,
    delta: Any,
    num_steps: Any = None,
    method: str = "rdp",
) -> UnitBudgets:
    """Returns the epsilon of every protected unit of a real population.

    Under ``add_remove`` the table discloses sizes that are themselves private: it is
    for those who hold the data.

    Args:
      step: a step with a `Population`, or a run made by `compose`.
      delta: in (0, 1), one number.
      num_steps: whole number >= 0; None for a composed run.
      method: as of `privacy_report`.
    """
    steps = gaussian_parts(step, "epsilon_per_unit")
    # An untrusted file may name 2**53 units in one number.
    number = max(one.num_protected_units or 0 for one in steps)
    if number > _MAX_UNITS:
        raise ValueError(
            f"population must have at most {_MAX_UNITS:,} protected units to list "
            f"them, has {number:,}"
        )
    report = privacy_report(
        step, delta=delta, num_steps=num_steps, method=method, per_unit=True
    )
    assert report.distribution is not None  # there is a population
    epsilon = report.distribution.unit_epsilons
    assert epsilon is not None  # asked for
    first = next(one for one in steps if one.population is not None)
    tree = first.population
    assert tree is not None
    # The episodes of grouped classes are formed, not found in the tree.
    formed = isinstance(first.design, GroupedClasses)
    names = first.level_names_used[int(formed) :]
    labels = {n: unit_labels(tree, i + 1, len(names)) for i, n in enumerate(names)}
    return UnitBudgets(labels, epsilon, report.distribution.rate_rounding)


def write_unit_budgets(path: Path, budgets: UnitBudgets) -> None:
    """Writes the table as ``.jsonl``, ``.csv`` or ``.parquet``; whole or not at all."""
    if "epsilon" in budgets.units:
        raise ValueError("a level named 'epsilon' has no place beside the column")
    types = {
        name: "int64" if ids.dtype.kind in "iu" else "string"
        for name, ids in budgets.units.items()
    }
    names = [*types, "epsilon"]
    with writing(path, {**types, "epsilon": "float64"}) as write:
        for start in range(0, budgets.epsilon.size, _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            columns = (*budgets.units.values(), budgets.epsilon)
            rows = zip(*(column[part].tolist() for column in columns), strict=True)
            write([dict(zip(names, cells, strict=True)) for cells in rows])
