"""Rounding of reported numbers to the safe side."""

from __future__ import annotations

import functools
import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context


def _rounded(value: float, digits: int = 4, *, zeros: bool = False, how: str) -> str:
    """A number with ``digits`` significant digits."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = Context(prec=digits, rounding=how).create_decimal(float(value))
    return f"{rounded:g}" if zeros else f"{float(rounded):.{digits}g}"


upward = functools.partial(_rounded, how=ROUND_CEILING)
downward = functools.partial(_rounded, how=ROUND_FLOOR)
