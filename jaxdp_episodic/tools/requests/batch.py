"""Many questions at once: one description a row, equal kinds in one vectorized call.

Rows that differ in nothing but their numbers become one request whose fields are
arrays. A row with a bad value gets an error of its own; it costs the others nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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

_POPULATION = "population"
_EPISODES = ("step", "sampling", "num_episodes")
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


@dataclass
class _Group:
    """Rows that are alike but for their numbers."""

    fixed: dict[KeyPath, Any]
    paths: list[KeyPath]
    tree: Population | None
    rows: list[int] = field(default_factory=list)
    numbers: list[list[float]] = field(default_factory=list)

    def request(self, part: Any) -> Request:
        """The request of some of the rows: scalars for one row, else arrays."""
        leaves = dict(self.fixed)
        rows = [self.numbers[row] for row in part]
        columns: Any = zip(*rows, strict=True)
        for path, column in zip(self.paths, columns, strict=bool(self.paths)):
            # Whole numbers stay whole, beyond 2**53 too, where they are refused.
            kind = np.int64 if all(type(n) is int for n in column) else np.float64
            leaves[path] = np.array(column, kind) if len(column) > 1 else column[0]
        mapping = nested(leaves.items())
        if self.tree is not None:
            mapping = request_file.with_population(mapping, self.tree)
        kind = CalibrationRequest if "calibrate" in mapping else EpsilonRequest
        return kind.from_dict({"type": kind.__name__, **mapping}, where="request")


def answer_requests(
    rows: Iterable[Mapping[str, Any] | Exception],
    *,
    method: str = "rdp",
    base: Path | None = None,
) -> list[Answer]:
    """Answers many requests, in order."""
    check_method(method)
    answers: list[Answer] = []
    groups: dict[Any, _Group] = {}

    def fail(row: int, error: BaseException) -> None:
        said = " ".join(str(error).split()) or type(error).__name__
        answers[row] = answers[row]._replace(error=said)

    for index, row in enumerate(rows):
        label = row.get("id") if isinstance(row, Mapping) else None
        is_label = isinstance(label, str | int | float | None)
        answers.append(Answer(label if is_label else None, None, None, None, None))
        try:
            if not is_label:
                wrong = _validation.shown(label)
                raise TypeError(f"id must be a text or a number, got {wrong}")
            _sort_in(groups, index, row, method, base or Path())
        except _ROW_ERRORS as error:
            fail(index, error)
    for group in groups.values():
        _answer_group(group, answers, fail)
    return answers


def _sort_in(
    groups: dict[Any, _Group], index: int, row: Any, method: str, base: Path
) -> None:
    """Takes a row apart and puts it with those that are like it."""
    if isinstance(row, Exception):
        raise ValueError(str(row)) from row
    if not isinstance(row, Mapping):
        raise TypeError(f"a row must be a table of keys, got {_validation.shown(row)}")
    leaves = dict(_leaves({key: value for key, value in row.items() if key != "id"}))
    paths = [p for p, v in leaves.items() if type(v) in (int, float)]
    paths = sorted(p for p in paths if p != ("version",))
    fixed = {path: leaves[path] for path in sorted(leaves.keys() - set(paths))}
    key = tuple(paths), tuple((path, _key(leaf)) for path, leaf in fixed.items())
    group = groups.get(key)
    if group is None:
        fixed = {("version",): 1, ("method",): method} | fixed
        tree = None
        if (_POPULATION,) in fixed:
            tree = request_file.read_population(fixed.pop((_POPULATION,)), base)
        group = groups[key] = _Group(fixed, paths, tree)
    group.rows.append(index)
    group.numbers.append([leaves[path] for path in paths])


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the leaves of a row with their places; populations stay whole."""
    where = ".".join(path)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        return
    if type(value) in (float, str, bool, int):
        if type(value) is int and abs(value) > _MAX_INTEGER:
            raise ValueError(f"{where} holds an integer of more than 64 bits")
        yield path, value
    elif len(path) > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    elif isinstance(value, Mapping):
        if path and (not value or path[-1] == _POPULATION):
            serialization.refuse_hostile(_POPULATION, value)
            yield path, value
            return
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: keys must be strings, got {key!r}")
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list | tuple) and (
        (path[0] == "step" and path[-1] == "counts")
        or any(isinstance(item, Mapping) for item in value)
    ):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, str(index)))
    else:
        raise TypeError(
            f"{where} must be a number or a string (a row is one setting), got "
            f"{_validation.shown(value)}"
        )


def _key(leaf: Any) -> Any:
    """A hashable stand-in for what is not a number; True is not 1."""
    if not isinstance(leaf, Mapping):
        return type(leaf).__name__, leaf
    return json.dumps(leaf, sort_keys=True, default=np.ndarray.tolist)


def _answer_group(
    group: _Group, answers: list[Answer], fail: Callable[[int, BaseException], None]
) -> None:
    """Fills in the answers of the rows of a group."""

    def check(part: np.ndarray) -> None:
        for one in parts_of(group.request(part).step):
            dominating_pair(one)

    def fill(part: np.ndarray) -> None:
        request = group.request(part)
        values = np.broadcast_to(np.asarray(request.answer(), np.float64), part.shape)
        known = {"quantity": request.quantity, "method": request.method}
        for row, value in zip(part, values.tolist(), strict=True):
            index = group.rows[row]
            answers[index] = answers[index]._replace(value=value, **known)

    def done(act: Callable[[np.ndarray], None], part: np.ndarray) -> np.ndarray:
        """Acts on as many rows at once as possible, halving what fails."""
        try:
            if part.size:
                act(part)
            return part
        except (*_ROW_ERRORS, MemoryError) as error:
            if part.size == 1:
                fail(group.rows[part[0]], error)
                return part[:0]
        return np.concatenate([done(act, half) for half in np.array_split(part, 2)])

    # Checks are cheap and come first, so that the rest is one large call. Settings are
    # evaluated in blocks, and a block takes as long as its longest sum: like to like.
    good = done(check, np.arange(len(group.rows)))
    if _EPISODES in group.paths:
        place = group.paths.index(_EPISODES)
        number = np.array([float(group.numbers[row][place]) for row in good])
        good = good[np.argsort(number, kind="stable")]
    done(fill, good)


def nested(leaves: Iterable[tuple[KeyPath, Any]], above: KeyPath = ()) -> Any:
    """Returns the table in which values lie where their paths, none empty, say."""
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
            raise ValueError(f"{'.'.join(here)!r} is both a value and a table")
        parts = [((name,), value) for leaf in whole for name, value in leaf.items()]
        table[key] = nested([*parts, *(pair for pair in below if pair[0])], here)
    if "0" in table and all(key.isdecimal() for key in table):
        last = max(map(int, table))
        if last < 2 * len(table):  # else one name would make a list of any length
            return [table.get(str(index)) for index in range(last + 1)]
    return table
