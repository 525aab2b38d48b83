"""Ids read from outside, and owners: the person that each example belongs to."""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation

# Largest memory, uncompressed, for one outside file, unless the caller sets another
# limit: the features of a table, or the ids of one level. In bytes.
MAX_BYTES = 4 * 2**30


def id_array(name: str, ids: Any) -> np.ndarray:
    """Returns ids as an array in which different ids stay different."""
    if isinstance(ids, list | tuple):
        check_text_size(name, ids)
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError) as error:  # ragged
        raise TypeError(f"{name} must be integer or string ids: {error}") from None
    if array is not ids and array.dtype.kind == "U":
        for record, one in enumerate(ids, start=1):
            if not isinstance(one, str) or one.endswith("\0"):
                raise ValueError(
                    f"{name} must be ids of one type, strings without a trailing NUL, "
                    f"got {one!r} in record {record}"
                )
    return array


def check_text_size(name: str, ids: Sequence[Any]) -> None:
    """Raises if an array of these ids, padded to the longest, exceeds 4 GiB."""
    longest = max((len(one) for one in ids if isinstance(one, str)), default=0)
    if 4 * longest * len(ids) > MAX_BYTES:
        raise ValueError(
            f"{name} must be ids that take at most {MAX_BYTES} bytes, got "
            f"{len(ids)}, the longest of {longest} characters"
        )


# What programs write for a missing owner, in lower case. Read as a name, it would merge
# unknown people into one.
_NO_OWNER = frozenset(("", "-1", "<na>", "n/a", "na", "nan", "nat", "none", "null"))
# Types of a cell with several ids.
_SEVERAL = (list, tuple, set, frozenset, dict, np.ndarray)
DRAWER = "drawer"
"""Owner rule of Omniglot: drawer 12 owns ``0001_12.png``."""
_NAMED = {DRAWER: r"^\d+_(\d+)\."}


@dataclass(frozen=True, eq=False)
class Owners:
    """The owner of each example; create with `from_ids`.

    Codes only tell people apart. They change when ``names`` lists the people present
    and somebody joins. Whatever must not depend on other people (such as a person's
    block) must use names, or codes into a public list.

    Attributes:
      codes: (R,) int64, index of each example's owner in ``names``.
      names: (P,) distinct integers or strings: the list of people. A person on the list
        may own no example.
    """

    codes: np.ndarray
    names: np.ndarray

    def __post_init__(self) -> None:
        names = np.array(self.names)
        if names.ndim != 1 or names.dtype.kind not in "iuU":
            raise TypeError(
                "names of owners must be a list of integers or strings, got "
                f"{names.dtype} of shape {names.shape}"
            )
        if len(np.unique(names)) < len(names):
            raise ValueError("names of owners must be different")
        codes = np.array(self.codes)
        if codes.ndim != 1 or codes.dtype.kind not in "iu":
            raise TypeError(
                "codes of owners must be integers, one per example, got "
                f"{codes.dtype} of shape {codes.shape}"
            )
        if codes.size and not 0 <= int(codes.min()) <= int(codes.max()) < len(names):
            raise ValueError(
                f"codes of owners must lie in 0 .. {len(names) - 1}, got "
                f"{int(codes.min())} .. {int(codes.max())}"
            )
        for field, array in (("codes", codes.astype(np.int64)), ("names", names)):
            array.setflags(write=False)
            object.__setattr__(self, field, array)

    @classmethod
    def from_ids(
        cls,
        ids: Any,
        *,
        name: str = "owner",
        where: Callable[[int], str] = lambda place: f"record {place + 1}",
    ) -> Owners:
        """Returns the owners with these ids, sorted.

        Args:
          ids: (R,) integers or strings, one per example. Equal ids are one person,
            different ids are different people.
          name: the name of the argument in error messages.
          where: returns the name, in error messages, of the example at an index.

        Raises:
          TypeError: ids that are neither integers nor strings.
          ValueError: an example without an owner (None, NaN, -1, "", "NA" and the
            like) or with several; ids that differ only in outer blanks or in Unicode
            composition.
        """
        if isinstance(ids, str | bytes) or not hasattr(ids, "__iter__"):
            raise TypeError(
                f"{name} must be one id per example, got {_validation.shown(ids)}"
            )
        is_array = isinstance(ids, np.ndarray)
        cells = ids.tolist() if is_array else list(ids)
        for place, cell in enumerate(cells):
            if isinstance(cell, _SEVERAL):
                raise ValueError(
                    f"{name} must be one id per example, got "
                    f"{_validation.shown(cell)} in {where(place)}: training does not "
                    "support examples of several people, because which of one "
                    "person's examples are kept would depend on the others"
                )
        is_missing = [str(one).strip().lower() in _NO_OWNER for one in cells]
        if any(is_missing):
            first = where(is_missing.index(True))
            raise ValueError(
                f"{name} must be given for every example, but {sum(is_missing):,} of "
                f"{len(cells):,} have none, the first is {first}"
            )
        is_typed = is_array and ids.dtype.kind != "O"
        array = ids if is_typed else id_array(name, cells)
        values, codes = np.unique(array, return_inverse=True)
        if values.dtype.kind not in "iuU":
            raise TypeError(
                f"{name} must be integer or string ids, got an array of {values.dtype}"
            )
        if values.dtype.kind == "U":  # two spellings of a person would count as two
            seen: dict[str, str] = {}
            for one in values.tolist():
                plain = unicodedata.normalize("NFC", one).strip()
                if (other := seen.setdefault(plain, one)) != one:
                    raise ValueError(
                        f"{name} must be spelled the same for the same person, got "
                        f"{_validation.shown(other)} and {_validation.shown(one)}"
                    )
        return cls(codes, values)

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: Any) -> Owners:
        """Returns the owners of some examples; ``names`` stays the same."""
        return Owners(self.codes[rows], self.names)

    @property
    def present(self) -> np.ndarray:
        """Names of the people who own an example, sorted."""
        return self.names[np.unique(self.codes)]

    def statistics(
        self, classes: np.ndarray, tasks: np.ndarray | None = None
    ) -> PeopleStatistics:
        """Returns how many examples, classes and tasks each person appears in.

        Args:
          classes: (R,) index of each example's class.
          tasks: (R,) index of the unit above that class; None: no such level.
        """
        places = classes.tolist()
        examples = Counter(zip(self.codes.tolist(), places, strict=True))
        in_all = within = Counter(person for person, _ in examples)
        most_tasks = None
        if tasks is not None:
            above = dict(zip(places, tasks.tolist(), strict=True))
            within = Counter((person, above[place]) for person, place in examples)
            in_tasks = Counter(person for person, _ in within)
            most_tasks = max(in_tasks.values(), default=0)
        return PeopleStatistics(
            len(in_all),
            max(examples.values(), default=0),
            max(within.values(), default=0),
            len(examples) / max(len(in_all), 1),
            most_tasks,
        )


class PeopleStatistics(NamedTuple):
    """How many people there are, and how their examples are spread.

    These numbers are as private as the data. Do not use them as public bounds.
    """

    people: int  # number who own an example
    most_examples: int  # largest number of examples of one person in one class
    # Largest number of classes with an example of one person; within one task if there
    # are tasks.
    most_classes: int
    mean_classes: float  # mean over people of the number of classes, in all tasks
    # Largest number of tasks with an example of one person; None: no such level
    most_tasks: int | None = None

    def __str__(self) -> str:
        tasks = "" if self.most_tasks is None else f"{_many(self.most_tasks, 'task')}, "
        of_one = "" if self.most_tasks is None else " of one"
        people = "1 person" if self.people == 1 else f"{self.people:,} people, each"
        return (
            f"{people} in at most {tasks}{_many(self.most_classes, 'class', 'classes')}"
            f"{of_one} ({self.mean_classes:,.1f} in the mean), at most "
            f"{_many(self.most_examples, 'example')} in one"
        )


def owner_of_name(pattern: str) -> Callable[[str], str | None]:
    r"""Returns the function from a path to the owner given in its file name."""
    _validation.instance("owner", pattern, str, "a regular expression")
    pattern = _NAMED.get(pattern, pattern)
    try:
        # A warning means that the pattern may change its meaning in a later Python.
        with warnings.catch_warnings(action="error"):
            compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError, Warning):
        compiled = None
    if compiled is None or compiled.groups != 1:
        raise ValueError(
            "owner must be a regular expression with one group, such as '^(\\d+)_', "
            f"got {_validation.shown(pattern)}"
        )

    def owner(path: str) -> str | None:
        found = compiled.search(path.rpartition("/")[2])
        return None if found is None else found[1]

    return owner


def _many(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"
