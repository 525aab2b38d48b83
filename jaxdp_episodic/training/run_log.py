"""The log of a run: JSON lines in which private diagnostics are kept apart.

Every record has three compartments, and which one a number belongs to is decided where
it is computed:

* top level: public. Step, epsilon, learning rate: functions of the settings and of what
  was released.
* ``"private"``: computed from private training data without noise (loss, gradient
  norms, realised batch sizes, and seconds, which grow with the realised batch). Nothing
  of it may be released, and nothing of it steers the run.
* ``"held_out"``: results on held-out people. The training did not see them, so its
  epsilon does not cover them: releasing such a number discloses *their* data.

`releasable_records` leaves the last two out.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PRIVATE, HELD_OUT = "private", "held_out"


class RunLog:
    """Appends records to a file; one JSON object a line, readable by the owner only.

    Args:
      path: the file; made with its folders' permissions, mode 600.
      keep_through: on a resume, records of later steps than this are dropped: they
        belong to steps that will be taken again. None keeps all.
    """

    def __init__(self, path: Path, *, keep_through: int | None = None) -> None:
        self._path = path
        if path.exists() and keep_through is not None:
            _rewrite(path, keep_through)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = os.fdopen(descriptor, "a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record; numbers that JSON lacks become strings."""
        self._file.write(json.dumps(_plain(record), allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Makes what was written survive a power failure."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a log; a last line cut off by a crash is left out.

    Raises:
      OSError: a file that cannot be read.
      ValueError: a line, other than the last, that is no JSON object.
    """
    return list(_records(path))


def releasable_records(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records without what was computed from anybody's data in the clear.

    Records that hold nothing but a step number after that are left out.
    """
    public = [
        {key: value for key, value in record.items() if key not in (PRIVATE, HELD_OUT)}
        for record in records
    ]
    return [record for record in public if record.keys() - {"step"}]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except ValueError:
            if number >= len(lines) - 1:
                return  # cut off in the middle of a write
            raise ValueError(f"{path}, line {number}: not JSON") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object")
        yield record


def _rewrite(path: Path, keep_through: int) -> None:
    """Drops the records of later steps, atomically."""
    kept = [r for r in _records(path) if r.get("step", 0) <= keep_through]
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8", opener=_owner_only) as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: NaN and infinities as strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
