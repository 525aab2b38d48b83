"""What training gained on data that were measured, and on which of them data are like.

The table is that of docs/accuracy.md, "Other kinds of data"; a test compares the two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

PICTURES = "pictures"
NUMBERS = "numbers"
_ALIKE = 3  # sets that are named
_TOO_FAR = math.log(30)  # in classes and in examples of a class, summed


class Measured(NamedTuple):
    """A set, and what a run released gained over its untrained features."""

    name: str
    kind: str  # PICTURES or NUMBERS
    classes: int  # to train on
    examples: int  # of a class
    at_1: float  # gain in accuracy at epsilon 1
    at_8: float  # at epsilon 8


MEASURED = (
    Measured("syllables", PICTURES, 1_200, 4, 0.0884, 0.1487),
    Measured("material icons", PICTURES, 800, 4, 0.0080, 0.0087),
    Measured("phosphor icons", PICTURES, 1_000, 4, 0.0245, 0.0475),
    Measured("digits", PICTURES, 5, 170, 0.0078, 0.0358),
    Measured("typefaces", PICTURES, 12, 500, 0.1673, 0.2967),
    Measured("mnist", PICTURES, 5, 800, 0.0971, 0.1122),
    Measured("modules", NUMBERS, 18, 600, 0.0174, 0.0333),
    Measured("languages", NUMBERS, 18, 500, 0.0134, 0.0687),
    Measured("libraries", NUMBERS, 18, 2_000, 0.0097, 0.0038),
)


def said_of_alike(kind: str, classes: float, examples: float, epsilon: float) -> str:
    """Returns what the sets most like some data gained, as a sentence."""
    apart = {
        one: abs(math.log(one.classes / classes))
        + abs(math.log(one.examples / examples))
        for one in MEASURED
        if one.kind == kind
    }
    near = sorted(apart, key=apart.__getitem__)[:_ALIKE]
    near = [one for one in near if apart[one] <= _TOO_FAR]
    if not near:
        return "no data like these were measured (docs/accuracy.md)"
    at = 1 if epsilon < math.sqrt(8) else 8
    gains = [one.at_1 if at == 1 else one.at_8 for one in near]
    names = ", ".join(one.name for one in near)
    return (
        f"data like these ({names}) gained {min(gains):.2f} to {max(gains):.2f} of "
        f"accuracy over untrained features at epsilon {at} (docs/accuracy.md)"
    )
