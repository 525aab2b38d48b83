"""Modules that are imported only where they are used."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, *, purpose: str) -> Any:
    """Returns an optional module.

    Args:
      module: its import name.
      purpose: what needs it, for the message.

    Raises:
      ImportError: it is not installed; the message names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs {module.partition('.')[0]}, which is not installed or "
            "does not work; pip install 'jaxdp-episodic[data]' brings it"
        ) from error
