"""TOML: read within bounds of size and depth, and written.

What is not trusted is bounded before the standard library parses it.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdp_episodic.files.archive import check_plain_file

MAX_BYTES = 2**24  # the sizes of a million units fit in
# Levels of brackets, and parts of a dotted key: far more than any schema here has. The
# standard library's parser recurses for the former and is quadratic in the latter.
_MAX_DEPTH = 64
# Strings and comments whole, so that what they hold is not counted. A string that is
# not closed reaches as far as it can: the parser refuses it at its beginning.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"""|\Z)'
    r"|'''.*?(?:'''|\Z)"
    r'|"(?:\\.|[^"\\\n])*+"?'
    r"|'[^'\n]*+'?"
    r"|\#[^\n]*+"
    r"|[\[\]{}.=,\n]",
    re.DOTALL,
)
_WIDTH = 100  # letters of a line with a comment; of longer ones it stands above
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the content of a TOML file of at most `MAX_BYTES`."""
    check_plain_file(path)
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"must have at most {MAX_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    _check_depth(text)
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also an integer of thousands of digits
        raise ValueError(f"not valid TOML: {error}") from None
    except RecursionError:  # the caller has used up most of Python's stack
        raise ValueError("not valid TOML: nested too deeply") from None


def _check_depth(text: str) -> None:
    """Refuses what is nested deeply, in time linear in the text."""
    brackets = parts = 0
    for token in _TOKEN.finditer(text):
        match token[0]:
            case "[" | "{":
                brackets += 1
                parts = 0
            case "]" | "}":
                brackets -= 1
            case ".":
                parts += 1
            case "=" | "," | "\n":
                parts = 0
        if brackets > _MAX_DEPTH or parts > _MAX_DEPTH:
            line = text.count("\n", 0, token.start()) + 1
            raise ValueError(
                f"not valid TOML: nested deeper than {_MAX_DEPTH} levels in line {line}"
            )


def to_toml(table: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Returns the TOML document of a table; ``tomllib.loads`` gives it back."""
    return "\n".join(_lines(table, (), comments or {})).strip() + "\n"


def _lines(
    table: Mapping[str, Any], path: tuple[str, ...], comments: Mapping[str, str]
) -> list[str]:
    """Values first, then the tables below; tables in lists are written in line."""

    def explained(line: str, key: str) -> list[str]:
        comment = comments.get(".".join((*path, key)))
        if comment is None:
            return [line]
        # Controls, of which a name may have some, are no part of a comment.
        said = f"# {''.join(c if c.isprintable() else '?' for c in comment)}"
        one = f"{line}  {said}"
        return [one] if len(one) <= _WIDTH else [said, line]

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
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        inside = (f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
        return "{ " + ", ".join(inside) + " }"
    raise TypeError(f"TOML has no form for {value!r}")


def _text(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
