"""Plain tables as TOML text; reading is the standard library's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(table: Mapping[str, Any]) -> str:
    """Returns the TOML document of a table; ``tomllib.loads`` gives it back.

    Args:
      table: strings, numbers, truth values, lists and tables of these. What is None is
        left out.

    Raises:
      TypeError: a value that TOML has no form for.
    """
    return "\n".join(_lines(table, ())).strip() + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Values first, then the tables below; tables in lists are written in line."""
    lines = [
        f"{_key(k)} = {_value(v)}"
        for k, v in table.items()
        if v is not None and not isinstance(v, Mapping)
    ]
    for key, value in table.items():
        if isinstance(value, Mapping):
            place = (*path, key)
            lines += ["", f"[{'.'.join(map(_key, place))}]", *_lines(value, place)]
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
