"""Many questions at once: one description a row, equal kinds in one vectorized call.

Rows that differ in nothing but their numbers become one request whose fields are
arrays. A row with a bad value gets an error of its own; it costs the others nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe import serialization
from jaxdp_episodic.accountant.describe.menu import parts_of
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.questions.api import check_method
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair
from jaxdp_episodic.tools.requests import request_file
from jaxdp_episodic.tools.requests.request import (
    CalibrationRequest,
    EpsilonRequest,
    Request,
)

POPULATION = "population"
EPISODES = ("step", "sampling", "num_episodes")
_ID = "id"
_VERSION = "version"
# What a row may cause; anything else is a defect of the library and is not hidden.
_ROW_ERRORS = (TypeError, ValueError, NotImplementedError, OverflowError, OSError)
_MAX_DEPTH = 32  # levels of a row; the deepest field of a request is at level 8
_MAX_INTEGER = 2**63 - 1  # NumPy's largest

KeyPath = tuple[str, ...]


class Answer(NamedTuple):
    """The answer to one row."""

    id: Any  # the row's own label, or None
    # "epsilon" or "delta", or what was calibrated; None with an error.
    quantity: str | None
    # An *upper bound* of the former, a checked setting for the latter.
    value: float | None
    method: str | None  # how it was computed
    error: str | None  # why there is no answer, in one line; else None


class _Group(NamedTuple):
    """Rows that are alike but for their numbers."""

    template: dict[KeyPath, Any]
    paths: tuple[KeyPath, ...]
    rows: list[int]
    numbers: list[tuple[float, ...]]
    tree: Population | None


def answer_requests(
    rows: Iterable[Mapping[str, Any] | Exception],
    *,
    method: str = "rdp",
    base: Path | None = None,
) -> list[Answer]:
    """Answers many requests, in order.

    A row is the dictionary form of an `EpsilonRequest` or, if it has the key
    ``calibrate``, of a `CalibrationRequest`: the keys of a request file, a table
    ``population`` included. It may leave out ``version``, and may have an ``id``, which
    is handed back. What is None counts as left out. Numbers are scalars: a row is one
    setting.

    Rows of the same kind (the same keys, names, schemes and, if any, population) are
    evaluated by one call, whatever their order, and each gets what it would get alone:
    the same to rounding for "rdp". What the library warns of is warned of once for
    all rows of a kind.

    Args:
      rows: mappings; an exception in place of one is an error in its row.
      method: of rows that do not name one: "rdp", "exact" or "pld". The default is the
        fast upper bound.
      base: folder that a population's ``file`` is relative to; None: the current one.

    Returns:
      One `Answer` a row. Nothing is raised for what a row says.

    Raises:
      ValueError: an unknown ``method``.
    """
    check_method(method)
    answers: list[Answer] = []
    groups: dict[Any, _Group] = {}
    for index, row in enumerate(rows):
        label = row.get(_ID) if isinstance(row, Mapping) else None
        is_label = isinstance(label, str | int | float | None)
        answers.append(Answer(label if is_label else None, None, None, None, None))
        try:
            if not is_label:
                wrong = _validation.shown(label)
                raise TypeError(f"id must be a text or a number, got {wrong}")
            _sort_in(groups, index, row, method, base or Path())
        except _ROW_ERRORS as error:
            answers[index] = _failure(answers[index], error)
    for group in groups.values():
        _answer_group(group, answers)
    return answers


def _sort_in(
    groups: dict[Any, _Group], index: int, row: Any, method: str, base: Path
) -> None:
    """Takes a row apart and puts it with those that are like it."""
    if isinstance(row, Exception):
        raise ValueError(str(row)) from row
    if not isinstance(row, Mapping):
        raise TypeError(f"a row must be a table of keys, got {_validation.shown(row)}")
    leaves: list[tuple[KeyPath, Any]] = []
    for key, value in row.items():
        if key != _ID:
            _flatten((key,), value, leaves)
    fixed, paths, numbers = [], [], []
    for path, leaf in sorted(leaves, key=lambda item: item[0]):
        if type(leaf) is float or type(leaf) is int and path[0] != _VERSION:
            paths.append(path)
            numbers.append(leaf)
        else:
            fixed.append((path, leaf))
    key = (tuple(paths), tuple((path, _key(leaf)) for path, leaf in fixed))
    group = groups.get(key)
    if group is None:
        template = {(_VERSION,): 1, ("method",): method, **dict(fixed)}
        tree = None
        if (POPULATION,) in template:
            tree = request_file.read_population(template.pop((POPULATION,)), base)
        group = groups[key] = _Group(template, tuple(paths), [], [], tree)
    group.rows.append(index)
    group.numbers.append(tuple(numbers))


def _flatten(path: KeyPath, value: Any, leaves: list[tuple[KeyPath, Any]]) -> None:
    """Appends the leaves below a value; populations stay whole."""
    kind = type(value)
    if value is None:
        return
    if kind is float or kind is str or kind is bool:
        leaves.append((path, value))
    elif kind is int:
        if abs(value) > _MAX_INTEGER:
            raise ValueError(f"{_named(path)} holds an integer of more than 64 bits")
        leaves.append((path, value))
    elif len(path) > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    elif isinstance(value, np.generic):
        _flatten(path, value.item(), leaves)
    elif isinstance(value, Mapping):
        if not value or (path[-1] == POPULATION):
            serialization.refuse_hostile(POPULATION, value)
            leaves.append((path, value))
            return
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{_named(path)}: keys must be strings, got {key!r}")
            _flatten((*path, key), item, leaves)
    elif isinstance(value, list | tuple) and (
        (path[0] == "step" and path[-1] == "counts")
        or any(isinstance(item, Mapping) for item in value)
    ):
        for index, item in enumerate(value):
            _flatten((*path, str(index)), item, leaves)
    else:
        raise TypeError(
            f"{_named(path)} must be a number or a string (a row is one setting), got "
            f"{_validation.shown(value)}"
        )


def _answer_group(group: _Group, answers: list[Answer]) -> None:
    """Fills in the answers of the rows of a group."""
    columns = np.empty((len(group.rows), len(group.paths)), object)
    for row, numbers in enumerate(group.numbers):
        columns[row] = numbers
    everything = np.arange(len(group.rows))

    def check(part: np.ndarray) -> None:
        request = _request(group, columns[part])
        for one in parts_of(request.step):
            dominating_pair(one)

    def fail(row: int, error: Exception) -> None:
        index = group.rows[row]
        answers[index] = _failure(answers[index], error)

    def fill(part: np.ndarray) -> None:
        request = _request(group, columns[part])
        values = np.broadcast_to(np.asarray(request.answer(), np.float64), part.shape)
        for row, value in zip(part.tolist(), values.tolist(), strict=True):
            index = group.rows[row]
            answers[index] = answers[index]._replace(
                quantity=request.quantity, value=value, method=request.method
            )

    # Checks are cheap and come first, so that the rest is one large call. Settings are
    # evaluated in blocks, and a block takes as long as its longest sum: like to like.
    good = _without_failures(check, everything, fail)
    if EPISODES in group.paths:
        number = columns[good, group.paths.index(EPISODES)]
        good = good[np.argsort(number.astype(np.float64), kind="stable")]
    _without_failures(fill, good, fail)


def _without_failures(
    act: Callable[[np.ndarray], None],
    rows: np.ndarray,
    fail: Callable[[int, Exception], None],
) -> np.ndarray:
    """Acts on as many rows as possible at once; halves what fails.

    Returns the rows that did not fail; ``fail`` is called with each of the others.
    """
    good, parts = [rows[:0]], [rows] if rows.size else []
    while parts:
        part = parts.pop()
        try:
            act(part)
        except (*_ROW_ERRORS, MemoryError) as error:
            if part.size == 1:
                fail(int(part[0]), error)
            else:
                parts += [part[part.size // 2 :], part[: part.size // 2]]
        else:
            good.append(part)
    return np.concatenate(good)


def _request(group: _Group, columns: np.ndarray) -> Request:
    """The request of some rows of a group: scalars for one row, else arrays."""
    leaves = dict(group.template)
    for path, column in zip(group.paths, columns.T, strict=True):
        # Whole numbers stay whole, beyond 2**53 too, where they are refused.
        whole = all(type(number) is int for number in column)
        values = column.astype(np.int64 if whole else np.float64)
        leaves[path] = values if len(values) > 1 else column[0]
    mapping = nested(leaves.items())
    if group.tree is not None:
        mapping = request_file.with_population(mapping, group.tree)
    kind = CalibrationRequest if "calibrate" in mapping else EpsilonRequest
    mapping.setdefault("type", kind.__name__)
    return kind.from_dict(mapping, where="request")


def nested(leaves: Iterable[tuple[KeyPath, Any]], above: KeyPath = ()) -> Any:
    """Returns the table in which values lie where their paths, none empty, say.

    A table with a key "0", and no keys but whole numbers, is a list; items of it that
    are left out are None, and refused where something is expected. A value where
    another path has a table is a `ValueError`, which says where the table lies.
    """
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
        # A column may be a table, to which the others add keys.
        if not all(isinstance(leaf, Mapping) for leaf in whole):
            raise ValueError(f"{_named(here)!r} is both a value and a table")
        parts = [((name,), value) for leaf in whole for name, value in leaf.items()]
        table[key] = nested([*parts, *(pair for pair in below if pair[0])], here)
    if "0" in table and all(key.isdecimal() for key in table):
        last = max(map(int, table))
        if last < 2 * len(table):  # else one name would make a list of any length
            return [table.get(str(index)) for index in range(last + 1)]
    return table


def _key(leaf: Any) -> Any:
    """A hashable stand-in for what is not a number; True is not 1."""
    if isinstance(leaf, Mapping):
        return json.dumps(leaf, sort_keys=True, default=_plain)
    return type(leaf).__name__, leaf


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"population holds {_validation.shown(value)}")


def _failure(answer: Answer, error: BaseException) -> Answer:
    return answer._replace(error=" ".join(str(error).split()) or type(error).__name__)


def _named(path: KeyPath) -> str:
    return ".".join(path)
