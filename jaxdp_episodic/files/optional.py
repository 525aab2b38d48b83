"""Modules that are imported only where they are used."""

from __future__ import annotations

import functools
import importlib
from typing import Any


def require(module: str, *, purpose: str, extra: str | None = "data") -> Any:
    """Returns an optional module.

    Args:
      module: its import name.
      purpose: what needs it, for the message.
      extra: that brings it, for the message; None: it is installed by its own name.

    Raises:
      ImportError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        source = name if extra is None else f"'jaxdp-episodic[{extra}]'"
        raise ImportError(
            f"{purpose} needs {name}, which is not installed or does not work; pip "
            f"install {source} brings it"
        ) from error


@functools.cache
def check_version(distribution: str, known: tuple[str, ...]) -> None:
    """Refuses a library whose descriptions may mean something else than was read.

    Where it is not installed there is nothing to refuse.

    Args:
      distribution: its name on the package index.
      known: the beginnings, "major.minor", of the versions that are read.

    Raises:
      NotImplementedError: another version, by name.
    """
    metadata = importlib.import_module("importlib.metadata")  # slow, and rarely needed
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return
    if not any(found == one or found.startswith(f"{one}.") for one in known):
        raise NotImplementedError(
            f"{distribution} {found} is not covered: what its fields mean was read of "
            f"versions {', '.join(known)}"
        )


def require_pyarrow(*, purpose: str) -> tuple[Any, Any]:
    """Returns ``pyarrow`` and ``pyarrow.parquet``; see `require`."""
    parquet = require("pyarrow.parquet", purpose=purpose, extra="sweep")
    return require("pyarrow", purpose=purpose, extra="sweep"), parquet
