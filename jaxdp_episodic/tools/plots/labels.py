"""What a column is called in a picture, with its unit, and how numbers are written."""

from __future__ import annotations

import math

import numpy as np

_PLAIN = {
    "noise_multiplier": "noise multiplier (clip norms)",
    "num_steps": "number of steps",
    "delta": "delta (probability)",
    "epsilon": "epsilon (nats)",
    "num_classes": "classes in the pool (number)",
    "ways": "ways (classes an episode)",
    "num_episodes": "episodes a step (number)",
    "people.examples": "most examples of a person in a class (number)",
    "people.classes": "most classes of a person (number)",
    "people.tasks": "most tasks of a person (number)",
    "num_people": "people in all (number)",
    "people_per_block": "people in a block (number)",
}
_OF_A_LEVEL = {
    "sampling_probability": "sampling probability of each {}",
    "size": "{}: drawn of each group (number)",
    "population": "{}: units in a group (number)",
}
ANSWERS = {
    "epsilon": "epsilon (nats), upper bound",
    "delta": "delta (probability), upper bound",
    "noise_multiplier": "smallest noise multiplier (clip norms)",
    "num_steps": "largest number of steps",
}
"""Labels of the answers, which say on which side of the truth they are."""


def axis_label(field: str) -> str:
    """Returns the label of an axis: what the field is, and its unit."""
    place, _, name = field.rpartition(".")
    if field in _PLAIN:
        return _PLAIN[field]
    if name in _OF_A_LEVEL and place:
        *phase, level = place.split(".")
        return _OF_A_LEVEL[name].format(level) + "".join(f", {p}" for p in phase)
    if name in _PLAIN:
        return f"{_PLAIN[name]}, {place}"
    return field.replace("_", " ")


def short_label(field: str) -> str:
    """Returns the label of an axis without its unit."""
    return axis_label(field).partition(" (")[0]


def number(value: object) -> str:
    """Returns a value for a legend or a title."""
    if isinstance(value, str):
        return value
    real = float(value)  # pyright: ignore[reportArgumentType]: a NumPy number
    if real == round(real) and 1000 <= abs(real) < 1e15:
        return f"{real:,.0f}"
    return f"{real:.3g}"


def is_logarithmic(points: np.ndarray) -> bool:
    """Returns whether positive values look even on a logarithmic scale.

    They span a factor of at least five, and their ratios vary less than their steps.
    """
    if points.size < 2 or points.min() <= 0 or not np.isfinite(points).all():
        return False
    ordered = np.sort(points)
    if ordered[-1] < 5 * ordered[0]:
        return False
    if points.size == 2:
        return True
    ratios, steps = np.diff(np.log(ordered)), np.diff(ordered)
    return bool(_variation(ratios) < _variation(steps))


def round_levels(low: float, high: float, most: int = 9) -> list[float]:
    """Returns round numbers (1, 2, 5 times a power of ten) between two positive ones.

    Where these are too many they are 1 and 3, or powers of ten; where there are too
    few, evenly spaced numbers take their place.
    """
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside: list[float] = []
    for digits in ((1, 2, 5), (1, 3), (1,)):
        levels = [float(f"{m}e{e}") for e in exponents for m in digits]
        inside = [level for level in levels if low < level < high]
        if len(inside) <= most:
            break
    while len(inside) > most:
        inside = inside[::2]
    if len(inside) >= 3:
        return inside
    step = 10.0 ** math.floor(math.log10((high - low) / 2 or 1.0))
    even = np.arange(math.ceil(low / step), math.floor(high / step) + 1) * step
    while even.size > most:
        even = even[::2]
    return [float(f"{level:.12g}") for level in even if low < level < high]


def _variation(gaps: np.ndarray) -> float:
    """The coefficient of variation."""
    return float(np.std(gaps) / np.mean(gaps)) if np.mean(gaps) > 0 else 0.0
