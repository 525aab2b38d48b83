"""Whether the first line of a CSV file names its columns, or is somebody's record.

Names of features are published with what is trained on them, so a record in their place
would be published, too. Messages have the place of a column and not what stands there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxdp_episodic.files.json_file import repeated


def refuse_numbers_as_names(
    file: Path, names: Sequence[str], used: Sequence[str]
) -> None:
    """Refuses columns that are named by numbers, but for plain whole ones.

    Those are the names of a data frame without names, of pixels and of years. ``names``
    are all of the first line, ``used`` those that are read; where one of these is not
    there, or two columns are named by one number, all columns are looked at.
    """
    twice = repeated(names)
    if twice is not None and _is_number(twice):
        _refuse(file, names.index(twice), "and another are named by one number")
    is_there = set(used) <= set(names)
    for place, name in enumerate(names):
        if is_there and name not in used:
            continue
        bare = name.strip()
        if _is_number(name) and not (bare.isascii() and bare.isdecimal()):
            _refuse(file, place, "is named by a number, as in a record")
        if is_there and not bare:  # what is not used may be a nameless index
            _refuse(file, place, "has no name")


def refuse_ids_as_names(
    file: Path, names: Sequence[str], ids: Mapping[str, Sequence[Any]]
) -> None:
    """Refuses columns of ids whose name is an id in them: it is that of a record.

    ``ids`` are their cells, by name. Columns that are all named by their places, 0, 1,
    ..., may be.
    """
    if sorted(names) == sorted(map(str, range(len(names)))):
        return
    for name, cells in ids.items():
        if name in cells:
            _refuse(file, names.index(name), "has its name in a record below, too")


def _refuse(file: Path, place: int, what: str) -> NoReturn:
    raise ValueError(
        f"{file}: the first line must name the columns, but column {place + 1} {what}; "
        "put a line of names above the records or, if these are names, give others "
        "(a letter before a number is enough)"
    )


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return "_" not in name  # "2019_2020" is a name, though Python reads it
