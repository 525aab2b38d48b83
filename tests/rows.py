"""Rows of long parametrisations: few fast ones, that stand for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def fast_and_slow(rows: Iterable[Any], is_fast: Callable[..., bool]) -> list[Any]:
    """All rows for `pytest.mark.parametrize`, marked slow where ``is_fast`` says no.

    It is asked with the values of a row, one by one if the row is a tuple.
    """
    marked = []
    for row in rows:
        values = row if isinstance(row, tuple) else (row,)
        marks = () if is_fast(*values) else (pytest.mark.slow,)
        marked.append(pytest.param(*values, marks=marks))
    return marked
