"""Numbers as they are printed: a bound that is rounded is still a bound."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context


def upward(value: float, digits: int = 5) -> str:
    """Returns a number with so many digits, rounded up."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounding = Context(prec=digits, rounding=ROUND_CEILING)
    return f"{float(rounding.create_decimal(value)):.{digits}g}"
