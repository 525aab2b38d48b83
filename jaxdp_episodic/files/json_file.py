"""JSON: read without repeated keys and with bounded line length; plain values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxdp_episodic.files.archive import check_plain_file, read_bounded

MAX_LINE_BYTES = 2**24  # of JSON lines and CSV, far more than a row needs
TOO_LONG = "longer than 16 MiB"


def parse_json(text: str | bytes, *, allow_infinity: bool = True) -> Any:
    """Returns the value of a JSON text, given as string or as UTF-8 bytes."""
    try:
        return json.loads(
            text if isinstance(text, str) else text.decode(),
            object_pairs_hook=_without_repeats,
            parse_constant=None if allow_infinity else _refused,
        )
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not valid JSON: {error.msg} at column {error.colno}"
        ) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None


def read_json(path: Path, *, max_bytes: int) -> Any:
    """Returns the value in a JSON file of unknown origin."""
    return parse_json(read_bounded(path, max_bytes))


def json_lines(path: Path) -> Iterator[tuple[int, Any, int]]:
    """Yields (line number, object or error, bytes) of a file's non-empty lines."""
    check_plain_file(path)
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
                yield number, ValueError(f"line {number}: {TOO_LONG}"), 0
            elif not line.isspace():
                yield number, _object(number, line), len(line)


def plain(value: Any) -> Any:
    """Returns a value with only types that JSON supports."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # of NumPy or JAX
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def differences(theirs: Any, ours: Any, there: str, here: str) -> dict[str, str]:
    """Returns dotted key -> description of each difference between two JSON values."""
    old, new, found = _flat(theirs), _flat(json.loads(json.dumps(ours))), {}
    for key in sorted(old.keys() | new.keys()):
        before, now = (one.get(key, "(nothing)") for one in (old, new))
        if before != now:
            found[key] = f"{before} {there}, {now} {here}"
    return found


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns nested dictionaries and lists as one dictionary of dotted keys."""
    if isinstance(value, Mapping):
        items = [(f"{prefix}.{k}" if prefix else str(k), v) for k, v in value.items()]
    elif isinstance(value, list):
        items = [(f"{prefix}[{i}]", v) for i, v in enumerate(value)]
    else:
        return {prefix: value}
    return {k: v for key, item in items for k, v in _flat(item, key).items()}


def _object(number: int, line: bytes) -> dict[str, Any] | Exception:
    try:
        found = parse_json(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
    except ValueError as error:
        return ValueError(f"line {number}: {error}")
    if not isinstance(found, dict):
        return TypeError(f"line {number}: must be an object, got {str(found)[:60]!r}")
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError(f"the key {repeated(k for k, _ in pairs)!r} occurs twice")
    return table


def repeated(names: Iterable[str]) -> str | None:
    """Returns the first repeated name, cut short; None if all are different."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name[:60]
        seen.add(name)
    return None


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
