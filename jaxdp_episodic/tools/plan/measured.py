"""What training gained on data that were measured, and on which of them data are like.

The table is that of docs/accuracy.md, "Other kinds of data"; a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

PICTURES = "pictures"
NUMBERS = "numbers"
_ALIKE = 3  # sets that are named
_TOO_FAR = math.log(50)  # logarithms of the ratios of all three sizes, summed


class Measured(NamedTuple):
    """A set, and what a run released gained over its untrained features."""

    name: str
    kind: str  # PICTURES or NUMBERS
    classes: int  # to train on
    examples: int  # of a class
    features: int  # of an example
    at_1: float  # gain in accuracy at epsilon 1
    at_8: float  # at epsilon 8


MEASURED = (
    Measured("syllables", PICTURES, 1_085, 4, 425, 0.0764, 0.1440),
    Measured("material icons", PICTURES, 741, 4, 425, 0.0077, 0.0097),
    Measured("phosphor icons", PICTURES, 885, 4, 425, 0.0247, 0.0411),
    Measured("emoji", PICTURES, 751, 4, 1_275, 0.0106, 0.0251),
    Measured("words", PICTURES, 170, 12, 425, 0.0179, 0.0319),
    Measured("digits", PICTURES, 5, 170, 425, 0.0116, 0.0032),
    Measured("typefaces", PICTURES, 11, 500, 425, 0.1701, 0.2193),
    Measured("mnist", PICTURES, 5, 800, 425, 0.0816, 0.0795),
    Measured("letters", NUMBERS, 15, 772, 16, 0.1514, 0.1552),
    Measured("modules", NUMBERS, 22, 600, 512, 0.0068, 0.0173),
    Measured("languages", NUMBERS, 26, 500, 512, 0.0209, 0.0567),
    Measured("libraries", NUMBERS, 22, 2_000, 512, 0.0047, 0.0110),
    Measured("few languages", NUMBERS, 9, 520, 512, 0.0036, 0.0062),
)


def said_of_alike(kind: str, sizes: Sequence[float], epsilon: float) -> str:
    """Returns what the sets most like some data gained, as a sentence.

    ``sizes``: classes, examples of a class, features of an example.
    """
    apart = {
        one: sum(abs(math.log(a / b)) for a, b in zip(one[2:5], sizes, strict=True))
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
    ends = dict.fromkeys(f"{gain:.2f}" for gain in (min(gains), max(gains)))
    return (
        f"data like these ({names}) gained {' to '.join(ends)} of "
        f"accuracy over untrained features at epsilon {at} (docs/accuracy.md)"
    )
