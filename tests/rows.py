"""Rows of long parametrizations: a few fast ones represent the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def fast_and_slow(rows: Iterable[Any], is_fast: Callable[..., bool]) -> list[Any]:
    """All rows for `pytest.mark.parametrize`, marked slow where ``is_fast`` says no.

    ``is_fast`` gets the values of a row as arguments.
    """
    marked = []
    for row in rows:
        values = row if isinstance(row, tuple) else (row,)
        marks = () if is_fast(*values) else (pytest.mark.slow,)
        marked.append(pytest.param(*values, marks=marks))
    return marked
