"""Modules that are imported only where they are used."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, *, purpose: str, extra: str = "data") -> Any:
    """Returns an optional module.

    Args:
      module: its import name.
      purpose: what needs it, for the message.
      extra: that brings it, for the message.

    Raises:
      ImportError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs {module.partition('.')[0]}, which is not installed or "
            f"does not work; pip install 'jaxdp-episodic[{extra}]' brings it"
        ) from error


def require_pyarrow(*, purpose: str) -> tuple[Any, Any]:
    """Returns ``pyarrow`` and ``pyarrow.parquet``; see `require`."""
    parquet = require("pyarrow.parquet", purpose=purpose, extra="sweep")
    return require("pyarrow", purpose=purpose, extra="sweep"), parquet
