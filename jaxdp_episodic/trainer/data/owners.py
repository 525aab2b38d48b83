"""Ids from outside, and whose an example is: the person that a guarantee is for."""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation

# Of all that one file from outside makes in memory, uncompressed, unless a call says
# otherwise: inputs of a table, or the ids of one level.
MAX_BYTES = 4 * 2**30


def id_array(name: str, ids: Any) -> np.ndarray:
    """Returns ids as an array that keeps apart what differs."""
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
                    f"{name} must be ids of one type, strings not ending in a NUL, got "
                    f"{one!r} in record {record}"
                )
    return array


def check_text_size(name: str, ids: Sequence[Any]) -> None:
    """Refuses ids whose array, each as long as the longest, takes over 4 GiB."""
    longest = max((len(one) for one in ids if isinstance(one, str)), default=0)
    if 4 * longest * len(ids) > MAX_BYTES:
        raise ValueError(
            f"{name} must be ids that take at most {MAX_BYTES} bytes, got "
            f"{len(ids)}, the longest of {longest} characters"
        )


# What programs write where nobody is named, in lower case. Taken for a name, it would
# hide that somebody's examples may be among them.
_NOBODY = frozenset(("", "-1", "<na>", "n/a", "na", "nan", "nat", "none", "null"))
# What holds several ids.
_SEVERAL = (list, tuple, set, frozenset, dict, np.ndarray)
DRAWER = "drawer"
"""Whose a drawing of Omniglot is, by the name of its file: ``0001_12.png`` is 12's."""
_NAMED = {DRAWER: r"^\d+_(\d+)\."}


@dataclass(frozen=True, eq=False)
class Owners:
    """The owner of each example; make it of ids with `from_ids`.

    A code says who is the same as whom, and nothing else: where ``names`` are those who
    are there, a code moves when somebody joins. What must stay when others come and go
    (which block a person is in) is made of names, or of a public list.

    Attributes:
      codes: (R,) int64, index into ``names`` of each example's owner.
      names: (P,) integers or strings, each once: the list of people. Somebody on it
        may own nothing.
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
                "codes of owners must be integers, one an example, got "
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
        """Returns the owners that have these ids, sorted.

        Args:
          ids: (R,) integers or strings, one an example. Equal ids are one person,
            different ids are different people: nothing else tells them apart.
          name: what errors call them.
          where: what they call the example at a place, from 0.

        Raises:
          TypeError: ids that are neither integers nor strings.
          ValueError: an example without an owner (None, NaN, -1, "", "NA" and the
            like) or with several; ids that differ in blanks at an end or in how
            Unicode composes a letter.
        """
        if isinstance(ids, str | bytes) or not hasattr(ids, "__iter__"):
            raise TypeError(
                f"{name} must be one id an example, got {_validation.shown(ids)}"
            )
        is_array = isinstance(ids, np.ndarray) and ids.dtype.kind in "iufU"
        if not is_array or ids.ndim != 1:
            ids = list(ids)
            for place, cell in enumerate(ids):
                if isinstance(cell, _SEVERAL):
                    raise ValueError(
                        f"{name} must be one id an example, got "
                        f"{_validation.shown(cell)} in {where(place)}: examples of "
                        "several people can be accounted for, but not trained on, as "
                        "what one of them keeps would depend on the others"
                    )
            is_array = False
        # Of an array each value is looked at once.
        cells, codes = ids, np.arange(len(ids))
        if is_array:
            values, codes = np.unique(ids, return_inverse=True)
            cells = values.tolist()
        nobody = np.array([str(one).strip().lower() in _NOBODY for one in cells], bool)
        places = np.flatnonzero(nobody[codes]) if len(nobody) else codes
        if len(places):
            raise ValueError(
                f"{name} must be given for every example, {len(places):,} of "
                f"{len(ids):,} have none, the first is {where(int(places[0]))}"
            )
        values, codes = np.unique(
            ids if is_array else id_array(name, ids), return_inverse=True
        )
        if values.dtype.kind not in "iuU":
            raise TypeError(
                f"{name} must be integer or string ids, got an array of {values.dtype}"
            )
        if values.dtype.kind == "U":  # two spellings of one person would count as two
            seen: dict[str, str] = {}
            for one in values.tolist():
                plain = unicodedata.normalize("NFC", one).strip()
                if (other := seen.setdefault(plain, one)) != one:
                    raise ValueError(
                        f"{name} must be spelled alike wherever a person is meant, got "
                        f"{_validation.shown(other)} and {_validation.shown(one)}"
                    )
        return cls(codes, values)

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: Any) -> Owners:
        """Returns the owners of some examples; the list of people stays."""
        return Owners(self.codes[rows], self.names)

    @property
    def present(self) -> np.ndarray:
        """Names of those who own an example, sorted."""
        return self.names[np.unique(self.codes)]

    def statistics(
        self, classes: np.ndarray | None, tasks: np.ndarray | None = None
    ) -> PeopleStatistics:
        """Returns how many examples, classes and tasks people are in.

        By the (R,) index of each example's class, and of the unit above that; None:
        there are none.
        """
        person = np.unique(self.codes, return_inverse=True)[1].reshape(-1)
        number = int(person.max(initial=-1)) + 1
        classes = np.zeros_like(person) if classes is None else classes
        pairs, examples = _pairs(person, classes)
        in_all = np.bincount(pairs[0], minlength=number)
        most, most_tasks = in_all.max(initial=0), None
        if tasks is not None:
            task_of = np.zeros(int(classes.max(initial=-1)) + 1, np.int64)
            task_of[classes] = tasks
            (owner, _), within = _pairs(pairs[0], task_of[pairs[1]])
            most = within.max(initial=0)
            most_tasks = int(np.bincount(owner).max(initial=0))
        return PeopleStatistics(
            number,
            int(examples.max(initial=0)),
            int(most),
            float(in_all.mean()) if number else 0.0,
            most_tasks,
        )


class PeopleStatistics(NamedTuple):
    """How many people there are, and where their examples lie.

    They are the data's, and as private as these: no bounds that are public.
    """

    people: int  # who own an example
    most_examples: int  # of one person in one class
    # with an example of one person; where there are tasks, within one
    most_classes: int
    mean_classes: float  # of all people, in all tasks
    # with an example of one person; None: there is no such level
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
    r"""Returns the function from a path to the owner that its last part names."""
    if not isinstance(pattern, str):
        raise TypeError(
            f"owner must be a regular expression, got {_validation.shown(pattern)}"
        )
    pattern = _NAMED.get(pattern, pattern)
    try:
        with warnings.catch_warnings(action="error"):  # another meaning one day
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


def _pairs(
    first: np.ndarray, second: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """The different pairs of whole numbers, sorted, and how often each is there."""
    width = int(second.max(initial=0)) + 1
    keys, counts = np.unique(first * width + second, return_counts=True)
    return divmod(keys, width), counts
