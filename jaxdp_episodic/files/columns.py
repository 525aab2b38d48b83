"""Names of a file's columns or keys, which must differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxdp_episodic import _validation


def repeated(names: Iterable[str]) -> str | None:
    """Returns the first name that is there again, cut short; None if all differ."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name[:60]
        seen.add(name)
    return None


def column_places(names: Sequence[str], wanted: Iterable[str]) -> list[int]:
    """Returns where the wanted columns are among those of a file.

    Raises:
      ValueError: two columns of one name, or none of a wanted name; the message names
        the nearest.
    """
    twice = repeated(names)
    if twice is not None:
        raise ValueError(f"two columns {twice!r}")
    indices = {name: index for index, name in enumerate(names)}
    for name in wanted:
        if name not in indices:
            there = f"; the columns are {_validation.shown(list(names))}"
            hint = _validation.nearest(name, names) or there
            raise ValueError(f"no column {name!r}{hint}")
    return [indices[name] for name in wanted]
