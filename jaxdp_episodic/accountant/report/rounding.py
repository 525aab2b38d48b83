"""Rounding of reported numbers to the safe side."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context


def upward(value: float, digits: int = 4, *, zeros: bool = False) -> str:
    """Returns a number with ``digits`` significant digits, rounded up."""
    return _rounded(value, digits, ROUND_CEILING, zeros)


def downward(value: float, digits: int = 4, *, zeros: bool = False) -> str:
    """Returns a number with ``digits`` significant digits, rounded down."""
    return _rounded(value, digits, ROUND_FLOOR, zeros)


def _rounded(value: float, digits: int, how: str, zeros: bool) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = Context(prec=digits, rounding=how).create_decimal(float(value))
    return f"{rounded:g}" if zeros else f"{float(rounded):.{digits}g}"
