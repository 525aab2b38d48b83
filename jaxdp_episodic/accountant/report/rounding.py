"""How claims are written: rounded to the safe side."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context


def upward(value: float, digits: int = 4) -> str:
    """Returns a claim with so many digits, rounded up: it is still an upper bound."""
    return _rounded(value, digits, ROUND_CEILING)


def downward(value: float, digits: int = 4) -> str:
    """Returns a finding with so many digits, rounded down."""
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, how: str) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounding = Context(prec=digits, rounding=how)
    return f"{float(rounding.create_decimal(value)):.{digits}g}"
