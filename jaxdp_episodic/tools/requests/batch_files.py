"""Files of requests and answers: JSON lines, CSV, Parquet; handled in parts.

Files are not trusted. A line that cannot be read is an error in its row, and the
answers replace an older file only when all of them are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.designs import GroupedClasses
from jaxdp_episodic.accountant.describe.serialization import refuse_hostile
from jaxdp_episodic.accountant.describe.step import AnyStep, gaussian_parts
from jaxdp_episodic.accountant.report.report import privacy_report
from jaxdp_episodic.files.csv_file import column_places, csv_lines
from jaxdp_episodic.files.json_file import json_lines, parse_json
from jaxdp_episodic.files.parquet_file import parquet_batches
from jaxdp_episodic.files.table_file import check_suffix, writing
from jaxdp_episodic.tools.requests.batch import Answer, KeyPath, answer_requests, nested
from jaxdp_episodic.trainer.data.table import unit_labels

_ROWS_AT_ONCE = 20_000  # answered by one call, or made into Python's objects
_BYTES_AT_ONCE = 2**25  # of text, of which Python makes up to twenty times as much
_TYPES = ("string", "string", "float64", "string", "string")
_COLUMNS = {"row": "int64"} | dict(zip(Answer._fields, _TYPES, strict=True))
_MAX_PARTS = 32  # of a dotted name; the deepest field of a request has 8
_MAX_UNITS = 10**8  # rows of a table of units: a file of a few GB
# Never numbers, whatever they look like.
_TEXTS = frozenset(
    "type name id method calibrate level clip_unit privacy_unit neighboring_relation "
    "small_units file row_level".split()
)

# A row's number, its table or what is wrong with it, how many bytes or characters.
Numbered = tuple[int, Mapping[str, Any] | Exception, int]


class BatchResult(NamedTuple):
    """What became of a file of requests."""

    num_rows: int  # rows that were read
    num_errors: int  # those that got an error
    first_error: str | None  # the first of these, with its row; None if there is none


def answer_file(
    source: Path,
    out: Path,
    *,
    method: str = "rdp",
    on_rows: Callable[[int], None] | None = None,
) -> BatchResult:
    """Answers every row of a file of requests, in order, in bounded memory."""
    rows = read_rows(source)
    if out.exists() and source.exists() and out.samefile(source):
        raise ValueError(f"out must be another file than the requests, got {out}")
    number, failed, first = 0, 0, None
    with writing(out, _COLUMNS) as write:
        for block in _blocks(rows):
            tables = [row for _, row, _ in block]
            answers = answer_requests(tables, method=method, base=source.parent)
            numbered = [(n, a) for (n, _, _), a in zip(block, answers, strict=True)]
            write([{"row": n, **answer._asdict()} for n, answer in numbered])
            errors = [f"row {n}: {a.error}" for n, a in numbered if a.error]
            number += len(block)
            failed += len(errors)
            first = first or next(iter(errors), None)
            if on_rows is not None:
                on_rows(number)
    return BatchResult(number, failed, first)


def read_rows(path: Path) -> Iterator[Numbered]:
    """Returns the rows of a file of requests, one after another."""
    check_suffix(path)
    readers = {".jsonl": json_lines, ".csv": _csv_rows, ".parquet": _parquet_rows}
    return readers[path.suffix](path)


def _blocks(rows: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    block: list[Numbered] = []
    weight = 0
    for row in rows:
        block.append(row)
        weight += row[2]
        if len(block) == _ROWS_AT_ONCE or weight > _BYTES_AT_ONCE:
            yield block
            block, weight = [], 0
    if block:
        yield block


def _csv_rows(path: Path) -> Iterator[Numbered]:
    """Row numbers from 1, the line of names apart, and tables."""
    # What is not UTF-8 becomes lone surrogates, which are found in their own row.
    lines = csv_lines(path, errors="surrogateescape")
    try:
        paths = _paths(next(lines)[1])
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    for number, (line, cells) in enumerate(lines, start=1):
        if isinstance(cells, ValueError):
            yield number, cells, 0
            continue
        row: Mapping[str, Any] | Exception
        try:
            pairs = zip(paths, cells, strict=True)
            row = nested([(p, _cell(p[-1], cell)) for p, cell in pairs if cell])
            refuse_hostile("a cell", row)
        except ValueError as error:
            row = ValueError(f"line {line}: {error}")
        yield number, row, sum(map(len, cells))


def _parquet_rows(path: Path) -> Iterator[Numbered]:
    """Row numbers from 1, and tables."""
    number, paths = 0, None
    try:
        for names, columns in parquet_batches(path, None, rows=_ROWS_AT_ONCE):
            paths = paths or _paths(names)
            for cells in zip(*columns, strict=True):
                number += 1
                pairs = zip(paths, cells, strict=True)
                try:
                    row = nested([pair for pair in pairs if pair[1] is not None])
                except ValueError as error:
                    row = error
                yield number, row, 0
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def _paths(names: Any) -> list[KeyPath]:
    """The parts of the columns' dotted names."""
    if not names:
        raise ValueError("no columns")
    column_places(names, ())
    for name in names:
        if name.count(".") >= _MAX_PARTS:
            raise ValueError(f"column {name[:60]!r} has more than {_MAX_PARTS} parts")
    return [tuple(name.split(".")) for name in names]


def _cell(name: str, cell: str) -> Any:
    """A cell of CSV: number, truth value, JSON or text."""
    if not cell.isprintable():
        raise ValueError("a cell holds characters that cannot be printed")
    if name in _TEXTS:
        return cell
    if cell[0] in "[{":
        return parse_json(cell)
    if cell in ("true", "false"):
        return cell == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(cell)
    return cell


# --- Each protected unit's own epsilon, as a table ---


class UnitBudgets(NamedTuple):
    """One entry a protected unit, in the order of the `Population`."""

    # Level name to (U,) ids of the units on the way to each protected unit, the levels
    # top to bottom; the index in its level where a level has no ids.
    units: dict[str, np.ndarray]
    epsilon: np.ndarray  # (U,) nats, *upper bounds*
    rate_rounding: float  # rates were rounded up by at most this share; 0 if not at all


def unit_budgets(
    step: AnyStep, *, delta: Any, num_steps: Any = None, method: str = "rdp"
) -> UnitBudgets:
    """Returns the epsilon of every protected unit of a real population."""
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
    first = next(one for one in steps if one.population is not None)
    tree, spread = first.population, report.distribution
    assert tree is not None and spread is not None  # there is a population
    assert spread.unit_epsilons is not None  # asked for
    # The episodes of grouped classes are formed, not found in the tree.
    names = first.level_names_used[int(isinstance(first.design, GroupedClasses)) :]
    labels = {n: unit_labels(tree, i + 1, len(names)) for i, n in enumerate(names)}
    return UnitBudgets(labels, spread.unit_epsilons, spread.rate_rounding)


def write_unit_budgets(path: Path, budgets: UnitBudgets) -> None:
    """Writes the table as ``.jsonl``, ``.csv`` or ``.parquet``; whole or not at all."""
    if "epsilon" in budgets.units:
        raise ValueError("a level named 'epsilon' has no place beside the column")
    columns: dict[str, np.ndarray] = budgets.units | {"epsilon": budgets.epsilon}
    kinds = {"i": "int64", "u": "int64", "f": "float64"}
    types = {k: kinds.get(v.dtype.kind, "string") for k, v in columns.items()}
    with writing(path, types) as write:
        for start in range(0, budgets.epsilon.size, _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            cells = [column[part].tolist() for column in columns.values()]
            rows = zip(*cells, strict=True)
            write([dict(zip(columns, row, strict=True)) for row in rows])
