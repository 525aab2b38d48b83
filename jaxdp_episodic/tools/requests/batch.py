"""Many requests, one per row of a file. Rows that differ in numbers alone are one call.

A bad row gets its own error and affects no other. Files may be hostile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import GroupedClasses
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.spec import mapped, refuse_hostile
from jaxdp_episodic.accountant.describe.step import AnyStep, gaussian_parts
from jaxdp_episodic.accountant.questions.api import check_method
from jaxdp_episodic.accountant.report.report import privacy_report
from jaxdp_episodic.files.json_file import json_lines, parse_json
from jaxdp_episodic.files.parquet_file import parquet_batches
from jaxdp_episodic.files.table_file import (
    check_suffix,
    column_places,
    csv_lines,
    writing,
)
from jaxdp_episodic.tools.requests import request as requests
from jaxdp_episodic.trainer.data.table import unit_labels

# Errors that a row may cause; any other is a defect of the library and is raised.
_ROW_ERRORS = (TypeError, ValueError, NotImplementedError, OverflowError, OSError)
_LABELS = str | int | float | None  # of a row

KeyPath = tuple[str, ...]
Table = Mapping[str, Any]


class Answer(NamedTuple):
    """The answer to one row."""

    id: Any  # the row's own label, or None
    # "epsilon", "delta" or the calibrated quantity; None with an error.
    quantity: str | None
    # An *upper bound* on epsilon or delta, or a value that meets the target.
    value: float | None
    method: str | None  # how the value was computed
    error: str | None  # one line, or None


def answer_requests(
    rows: Iterable[Mapping[str, Any] | Exception],
    *,
    method: str = "rdp",
    base: Path | None = None,
) -> list[Answer]:
    """Answers many requests, in order."""
    check_method(method)
    answers: list[Answer] = []
    trees: dict[str, Population] = {}
    groups: dict[requests.Request, dict[int, requests.Request]] = {}

    def fail(row: int, error: BaseException) -> None:
        answers[row] = answers[row]._replace(error=_validation.one_line(error))

    for index, row in enumerate(rows):
        label = row.get("id") if isinstance(row, Mapping) else None
        is_label = isinstance(label, _LABELS)
        answers.append(Answer(label if is_label else None, None, None, None, None))
        try:
            _validation.instance("id", label, _LABELS, "a text or a number")
            if isinstance(row, Exception):
                raise ValueError(str(row)) from row
            _validation.instance("a row", row, Mapping, "a table of keys")
            table = {key: value for key, value in row.items() if key != "id"}
            request = _request(table, method, base or Path(), trees)
            # Equal for requests that differ in numbers alone.
            alike = mapped(request, lambda *_: ..., checked=False)
            groups.setdefault(alike, {})[index] = request
        except _ROW_ERRORS as error:
            fail(index, error)
    for members in groups.values():
        _answer_group(members, answers, fail)
    return answers


def _request(
    table: Table, method: str, base: Path, trees: dict[str, Population]
) -> requests.Request:
    """The request of a row; ``trees`` are the populations that were read before."""
    refuse_hostile("a row", table)
    mapping = {"version": 1, "method": method} | _given(table)
    population = mapping.pop("population", None)
    if population is not None:
        text = json.dumps(population, sort_keys=True, default=np.ndarray.tolist)
        if text not in trees:
            trees[text] = requests.read_population(population, base)
        mapping = requests.with_population(mapping, trees[text])
    is_search = "calibrate" in mapping
    kind = requests.CalibrationRequest if is_search else requests.EpsilonRequest
    request = kind.from_dict(mapping, where="request")
    if request.shape:
        raise ValueError(
            f"a row must be one setting, got lists of numbers of shape {request.shape}"
        )
    return request


def _given(value: Any) -> Any:
    """A row without the keys that have no value."""
    if isinstance(value, Mapping):
        return {key: _given(one) for key, one in value.items() if one is not None}
    return list(map(_given, value)) if isinstance(value, list | tuple) else value


def _together(parts: Sequence[requests.Request]) -> requests.Request:
    """Requests that differ in numbers alone as one, with arrays of numbers."""

    def column(where: str, _: Any) -> np.ndarray:
        return np.array([one.all_numbers[where] for one in parts])

    return mapped(parts[0], column) if len(parts) > 1 else parts[0]


def _answer_group(
    rows: Mapping[int, requests.Request],
    answers: list[Answer],
    fail: Callable[[int, BaseException], None],
) -> None:
    """Fills in the answers of rows at once, or by halves if that fails."""
    try:
        request = _together([*rows.values()])
        values = np.broadcast_to(np.asarray(request.answer(), np.float64), len(rows))
    except (*_ROW_ERRORS, MemoryError) as error:
        if len(rows) == 1:
            fail(next(iter(rows)), error)
            return
        for half in np.array_split([*rows], 2):
            _answer_group({row: rows[row] for row in half}, answers, fail)
        return
    known = {"quantity": request.quantity, "method": request.method}
    for row, value in zip(rows, values.tolist(), strict=True):
        answers[row] = answers[row]._replace(value=value, **known)


def nested(leaves: Iterable[tuple[KeyPath, Any]], above: KeyPath = ()) -> Any:
    """Returns the nested table with these leaves at their paths; no path is empty."""
    inside: dict[str, list[tuple[KeyPath, Any]]] = {}
    for path, leaf in leaves:
        inside.setdefault(path[0], []).append((path[1:], leaf))
    table: dict[str, Any] = {}
    for key, below in inside.items():
        here = (*above, key)
        whole = [leaf for path, leaf in below if not path]
        if len(below) == len(whole) == 1:
            table[key] = whole[0]
            continue
        # A column may hold a table, to which other columns add keys.
        if not all(isinstance(leaf, Mapping) for leaf in whole):
            raise ValueError(f"{'.'.join(here)!r} is both a value and a table")
        parts = [((name,), value) for leaf in whole for name, value in leaf.items()]
        table[key] = nested([*parts, *(pair for pair in below if pair[0])], here)
    if "0" in table and all(key.isdecimal() for key in table):
        last = max(map(int, table))
        if last < 2 * len(table):  # otherwise one name could make a list of any length
            return [table.get(str(index)) for index in range(last + 1)]
    return table


_ROWS_AT_ONCE = 20_000  # rows answered by one call, or held as Python objects
_BYTES_AT_ONCE = 2**25  # of text; as Python objects it takes up to 20 times as much
_TYPES = ("string", "string", "float64", "string", "string")
_COLUMNS = {"row": "int64"} | dict(zip(Answer._fields, _TYPES, strict=True))
_MAX_PARTS = 32  # of a dotted name; the deepest field of a request has 8
_MAX_UNITS = 10**8  # rows of a table of units: a file of a few GB
# Names of columns whose cells are always texts.
_TEXTS = frozenset(
    "type name id method calibrate level clip_unit privacy_unit neighboring_relation "
    "small_units file row_level".split()
)

# A row's number, its table or its error, and its size in bytes or characters.
Numbered = tuple[int, Mapping[str, Any] | Exception, int]


class BatchResult(NamedTuple):
    """The outcome of a file of requests."""

    num_rows: int  # rows that were read
    num_errors: int  # rows with an error
    first_error: str | None  # the first error, with its row; None if there is none


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
        raise ValueError(f"--out must not be the file of requests, got {out}")
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
    """The rows of a CSV file, numbered from 1 below the line of names."""
    # Bytes that are not UTF-8 become lone surrogates, an error of their own row.
    lines = csv_lines(path, errors="surrogateescape")
    with _validation.prefixed(path.name):
        paths = _paths(next(lines)[1])
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
    """The rows of a Parquet file, numbered from 1."""
    number, paths = 0, None
    with _validation.prefixed(path.name):
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
    """The value of a CSV cell: a number, a truth value, JSON or a text."""
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


def unit_budgets(
    step: AnyStep, *, delta: Any, num_steps: Any = None, method: str = "rdp"
) -> tuple[dict[str, np.ndarray], float]:
    """Returns the epsilon of every protected unit, and how far rates were rounded.

    The columns are the ids of the units above each protected unit (their indices in a
    level without ids), level by level from the top, and ``epsilon``: (U,) nats, *upper
    bounds*. Rates were rounded up by at most the second result, relatively.
    """
    steps = gaussian_parts(step, "epsilon_per_unit")
    # An untrusted file may name 2**53 units in one number.
    number = max(one.num_protected_units or 0 for one in steps)
    if number > _MAX_UNITS:
        raise ValueError(
            f"population must have at most {_MAX_UNITS:,} protected units for a table "
            f"of them, got {number:,}"
        )
    report = privacy_report(
        step, delta=delta, num_steps=num_steps, method=method, per_unit=True
    )
    first = next(one for one in steps if one.population is not None)
    tree, spread = first.population, report.distribution
    assert tree is not None and spread is not None  # there is a population
    assert spread.unit_epsilons is not None  # by per_unit
    # The episodes of grouped classes are no units of the tree.
    names = first.level_names_used[int(isinstance(first.design, GroupedClasses)) :]
    if "epsilon" in names:
        raise ValueError("no level may have the name of the column 'epsilon'")
    columns = {n: unit_labels(tree, i + 1, len(names)) for i, n in enumerate(names)}
    return columns | {"epsilon": spread.unit_epsilons}, spread.rate_rounding


def write_columns(path: Path, columns: Mapping[str, Any]) -> None:
    """Writes a table as ``.jsonl``, ``.csv`` or ``.parquet``, atomically."""
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    kinds = {"i": "int64", "u": "int64", "f": "float64"}
    types = {k: kinds.get(v.dtype.kind, "string") for k, v in arrays.items()}
    with writing(path, types) as write:
        for start in range(0, len(next(iter(arrays.values()))), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            cells = [column[part].tolist() for column in arrays.values()]
            rows = zip(*cells, strict=True)
            write([dict(zip(columns, row, strict=True)) for row in rows])
