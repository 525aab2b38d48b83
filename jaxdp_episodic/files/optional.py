"""Optional modules, imported only where they are used."""

from __future__ import annotations

import functools
import importlib
from typing import Any


def installing(extra: str) -> str:
    """Returns the command that installs an extra (there is no package on an index)."""
    return f"in a clone of jaxdp-episodic, pip install '.[{extra}]'"


def require(module: str, *, purpose: str, extra: str | None = "data") -> Any:
    """Returns an optional module; an ImportError says what needs and installs it."""
    # ``extra`` None: the module is installed by its own name.
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        command = f"pip install {name}" if extra is None else installing(extra)
        raise ImportError(
            f"{purpose} needs {name}, which is not installed or does not work; "
            f"{command} brings it"
        ) from error


@functools.cache
def check_version(distribution: str, known: tuple[str, ...]) -> None:
    """Raises if an installed library's "major.minor" is not one of those known."""
    metadata = importlib.import_module("importlib.metadata")  # slow and rarely needed
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return
    if not any(found == one or found.startswith(f"{one}.") for one in known):
        raise NotImplementedError(
            f"{distribution} {found} is not supported: its fields are known only for "
            f"versions {', '.join(known)}"
        )


def require_pyarrow(*, purpose: str) -> tuple[Any, Any]:
    """Returns ``pyarrow`` and ``pyarrow.parquet``."""
    parquet = require("pyarrow.parquet", purpose=purpose, extra="sweep")
    return require("pyarrow", purpose=purpose, extra="sweep"), parquet
