"""What training gained on data that were measured, and on which of them data are like.

The table is that of docs/accuracy.md, "Other kinds of data"; a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

PICTURES = "pictures"
NUMBERS = "numbers"
EPSILONS = 1.0, 8.0  # at which all sets were measured
_ALIKE = 3  # sets that are named
_TOO_FAR = math.log(50)  # logarithms of the ratios of all three sizes, summed
# Ratio of features from which on data are of another kind: pictures in colour have
# three times those of grey ones, hashed texts 32 times those of measurements.
_OTHER_KIND = 2.5


class Measured(NamedTuple):
    """A set, and what a run released gained over its untrained features."""

    name: str
    said: str  # for readers who do not know the set
    kind: str  # PICTURES or NUMBERS
    classes: int  # to train on
    examples: int  # of a class
    features: int  # of an example
    gains: tuple[float, float]  # in accuracy, at each of EPSILONS


# Without the page's spoken words, as spectrograms are unlike other pictures.
MEASURED = (
    Measured("syllables", "syllables", PICTURES, 1_085, 4, 425, (0.0764, 0.1440)),
    Measured("material icons", "icons", PICTURES, 741, 4, 425, (0.0077, 0.0097)),
    Measured("phosphor icons", "icons", PICTURES, 885, 4, 425, (0.0247, 0.0411)),
    Measured("emoji", "emoji", PICTURES, 751, 4, 1_275, (0.0106, 0.0251)),
    Measured("digits", "digits", PICTURES, 5, 170, 425, (0.0116, 0.0032)),
    Measured("typefaces", "typefaces", PICTURES, 11, 500, 425, (0.1701, 0.2193)),
    Measured("mnist", "digits", PICTURES, 5, 800, 425, (0.0816, 0.0795)),
    Measured("letters", "letters", NUMBERS, 15, 772, 16, (0.1514, 0.1552)),
    Measured("modules", "code", NUMBERS, 22, 600, 512, (0.0068, 0.0173)),
    Measured("languages", "short texts", NUMBERS, 26, 500, 512, (0.0209, 0.0567)),
    Measured("libraries", "code", NUMBERS, 22, 2_000, 512, (0.0047, 0.0110)),
    Measured("few languages", "short texts", NUMBERS, 9, 520, 512, (0.0036, 0.0062)),
)


def said_of_alike(kind: str, sizes: Sequence[float], epsilon: float) -> str:
    """Returns what sets like one of ``sizes`` (as `Measured` has them) gained."""
    apart = {
        one: sum(abs(math.log(a / b)) for a, b in zip(one[3:6], sizes, strict=True))
        for one in MEASURED
        if one.kind == kind
        and max(one.features, sizes[2]) < _OTHER_KIND * min(one.features, sizes[2])
    }
    near = sorted(apart, key=apart.__getitem__)[:_ALIKE]
    near = [one for one in near if apart[one] <= _TOO_FAR]
    if not near:
        return "no data of this kind and size were measured (docs/accuracy.md)"
    places = [0] * (epsilon < EPSILONS[1]) + [1] * (epsilon > EPSILONS[0])
    said = [f"{_gained(near, i)} at epsilon {EPSILONS[i]:g}" for i in places]
    names = ", ".join(dict.fromkeys(one.said for one in near))
    which = "" if epsilon in EPSILONS else f"; epsilon {epsilon:g} was not measured"
    return (
        f"data like these ({names}) gained accuracy over untrained features: "
        f"{', '.join(said)} (docs/accuracy.md{which})"
    )


def _gained(near: Sequence[Measured], place: int) -> str:
    """The least and the most, or one number where both round alike."""
    gains = [one.gains[place] for one in near]
    ends = dict.fromkeys(f"{gain:.2f}" for gain in (min(gains), max(gains)))
    return " to ".join(ends)
