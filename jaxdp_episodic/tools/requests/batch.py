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
from jaxdp_episodic.accountant.describe.runs import parts_of
from jaxdp_episodic.accountant.describe.spec import refuse_hostile
from jaxdp_episodic.accountant.describe.step import AnyStep, gaussian_parts
from jaxdp_episodic.accountant.questions.api import check_method
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair
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

_POPULATION = "population"
# Errors that a row may cause; any other is a defect of the library and is raised.
_ROW_ERRORS = (TypeError, ValueError, NotImplementedError, OverflowError, OSError)
_LABELS = str | int | float | None  # of a row
_MAX_DEPTH = 32  # levels of a row; the deepest field of a request is at level 8
_MAX_INTEGER = 2**63 - 1  # NumPy's largest

KeyPath = tuple[str, ...]
Table = Mapping[str, Any]
Ask = Callable[[Sequence[Table]], requests.Request]


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
    groups: dict[Any, tuple[Ask, dict[int, Table]]] = {}

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
            stencil = _stencil(table)
            if stencil not in groups:
                groups[stencil] = _asker(table, method, base or Path()), {}
            groups[stencil][1][index] = table
        except _ROW_ERRORS as error:
            fail(index, error)
    for ask, members in groups.values():
        _answer_group(ask, members, answers, fail)
    return answers


def _asker(first: Table, method: str, base: Path) -> Ask:
    """Returns the function from some rows with one stencil to their request."""
    table = first.get(_POPULATION)
    tree = None if table is None else requests.read_population(table, base)

    def ask(rows: Sequence[Table]) -> requests.Request:
        mapping = {"version": 1, "method": method} | _stacked(rows)
        mapping.pop(_POPULATION, None)
        if tree is not None:
            mapping = requests.with_population(mapping, tree)
        is_search = "calibrate" in mapping
        kind = requests.CalibrationRequest if is_search else requests.EpsilonRequest
        return kind.from_dict(mapping, where="request")

    return ask


def _stencil(value: Any, path: KeyPath = ()) -> Any:
    """A hashable stand-in for a row, equal for rows that differ in numbers alone."""
    where = ".".join(path)
    if value is None or isinstance(value, str | int | float | np.generic):
        if isinstance(value, int) and abs(value) > _MAX_INTEGER:
            raise ValueError(f"{where} holds an integer of more than 64 bits")
        return () if _varies(value, path) else (type(value).__name__, value)
    if len(path) > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        if path[-1:] == (_POPULATION,):
            refuse_hostile(_POPULATION, value)
            return json.dumps(value, sort_keys=True, default=np.ndarray.tolist)
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where}: keys must be strings, got {key!r}")
        keys = sorted(key for key, item in value.items() if item is not None)
        return "table", *((key, _stencil(value[key], (*path, key))) for key in keys)
    is_counts = path[:1] == ("step",) and path[-1] == "counts"
    if isinstance(value, list | tuple):
        if is_counts or any(isinstance(item, Mapping) for item in value):
            items = enumerate(value)
            return "list", *(_stencil(item, (*path, str(i))) for i, item in items)
    raise TypeError(
        f"{where} must be a number or a string (a row is one setting), got "
        f"{_validation.shown(value)}"
    )


def _varies(value: Any, path: KeyPath) -> bool:
    """Whether a leaf is a number that may differ among rows answered together."""
    # Numbers of bands must be scalars.
    is_fixed = path == ("version",) or path[-2:-1] == ("bands",)
    is_number = isinstance(value, int | float | np.number)
    return is_number and not isinstance(value, bool) and not is_fixed


def _stacked(values: Sequence[Any], path: KeyPath = ()) -> Any:
    """Rows with one stencil as one table, with arrays for their numbers."""
    first = values[0]
    if isinstance(first, Mapping) and path[-1:] != (_POPULATION,):
        keys = [key for key, item in first.items() if item is not None]
        return {k: _stacked([one[k] for one in values], (*path, k)) for k in keys}
    if isinstance(first, list | tuple):
        items = enumerate(zip(*values, strict=True))
        return [_stacked(each, (*path, str(i))) for i, each in items]
    if len(values) == 1 or not _varies(first, path):
        return first
    # Integers stay integers; those beyond 2**53 are refused later.
    whole = all(isinstance(value, int | np.integer) for value in values)
    return np.array(values, np.int64 if whole else np.float64)


def _answer_group(
    ask: Ask,
    rows: dict[int, Table],
    answers: list[Answer],
    fail: Callable[[int, BaseException], None],
) -> None:
    """Fills in the answers of the rows of a group."""

    def check(part: list[int]) -> None:
        for one in parts_of(ask([rows[row] for row in part]).step):
            dominating_pair(one)

    def fill(part: list[int]) -> None:
        request = ask([rows[row] for row in part])
        values = np.broadcast_to(np.asarray(request.answer(), np.float64), len(part))
        known = {"quantity": request.quantity, "method": request.method}
        for row, value in zip(part, values.tolist(), strict=True):
            answers[row] = answers[row]._replace(value=value, **known)

    def done(act: Callable[[list[int]], None], part: list[int]) -> list[int]:
        """Acts on all rows at once, or on halves if that fails; returns good rows."""
        try:
            if part:
                act(part)
            return part
        except (*_ROW_ERRORS, MemoryError) as error:
            if len(part) == 1:
                fail(part[0], error)
                return []
        half = len(part) // 2
        return done(act, part[:half]) + done(act, part[half:])

    # Cheap checks come first, so that the rest is one large call.
    done(fill, done(check, [*rows]))


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
