"""Modules that are imported only where they are used."""

from __future__ import annotations

import functools
import importlib
from typing import Any


def require(module: str, *, purpose: str, extra: str | None = "data") -> Any:
    """Returns an optional module, or says by `ImportError` what needs it.

    And the ``extra`` that brings it; None: it is installed by its own name.
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

    That is one of another version than those whose beginnings, "major.minor", are
    known. Where it is not installed there is nothing to refuse.
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
