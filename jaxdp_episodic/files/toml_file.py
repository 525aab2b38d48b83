"""TOML: read with bounds on size and depth, and written.

Files of unknown origin are checked before the standard library parses them.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdp_episodic.files.archive import read_bounded

MAX_BYTES = 2**24  # enough for the sizes of a million units
# The standard library's parser takes quadratic time for keys of many parts. It recurses
# for brackets, whose depth `refuse_hostile` bounds.
_MOST_PARTS = 64  # of a key; no schema here has a tenth as many
_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
# A longer key, where a key may begin.
_LONG_KEY = re.compile(
    rf"(?:^|[\[{{,])[ \t]*(?:{_PART}[ \t]*\.[ \t]*){{{_MOST_PARTS}}}", re.MULTILINE
)
_WIDTH = 100  # longest line with a comment; a longer comment is on a line above
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the content of a TOML file of at most `MAX_BYTES`."""
    data = read_bounded(path, MAX_BYTES)
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    if found := _LONG_KEY.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(
            f"not valid TOML: a key of more than {_MOST_PARTS} parts in line {line}"
        )
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also an integer of thousands of digits
        raise ValueError(f"not valid TOML: {error}") from None
    except RecursionError:  # the caller has used most of Python's stack
        raise ValueError("not valid TOML: nested too deeply") from None


def to_toml(table: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Returns a table as a TOML document, which ``tomllib.loads`` reads back."""
    return "\n".join(_lines(table, (), comments or {})).strip() + "\n"


def _lines(
    table: Mapping[str, Any], path: tuple[str, ...], comments: Mapping[str, str]
) -> list[str]:
    """Returns values first, then subtables; tables in lists are written inline."""

    def explained(line: str, key: str) -> list[str]:
        comment = comments.get(".".join((*path, key)))
        if comment is None:
            return [line]
        # Control characters, which a name may contain, are not allowed in comments.
        note = f"# {''.join(c if c.isprintable() else '?' for c in comment)}"
        one = f"{line}  {note}"
        return [one] if len(one) <= _WIDTH else [note, line]

    lines = []
    for key, value in table.items():
        if value is not None and not isinstance(value, Mapping):
            lines += explained(f"{_key(key)} = {_value(value)}", key)
    for key, value in table.items():
        if isinstance(value, Mapping):
            below = (*path, key)
            head = explained(f"[{'.'.join(map(_key, below))}]", key)
            lines += ["", *head, *_lines(value, below, comments)]
    return lines


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str | int):  # also true and false, which JSON writes alike
        return _text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        inside = (f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
        return "{ " + ", ".join(inside) + " }"
    raise TypeError(f"TOML cannot represent {value!r}")


def _text(text: str | int) -> str:
    # JSON's escapes are valid in TOML; only DEL must be escaped in addition.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
