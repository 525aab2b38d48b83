"""Texts that say who a guarantee protects."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jaxdp_episodic.accountant.describe.people import PersonBounds
from jaxdp_episodic.accountant.describe.schemes import ORIGINAL, OWNED, PERSON
from jaxdp_episodic.accountant.describe.step import GaussianStep


def protected_unit(*steps: GaussianStep) -> str:
    """Returns the protected unit in words, such as "one example"."""
    step = step_of_bounds(steps)
    return unit_in_words(str(step.privacy_unit), step.people)


def step_of_bounds(steps: Sequence[GaussianStep]) -> GaussianStep:
    """Returns the step with the largest bounds: statistics have bounds of 1."""

    def most(step: GaussianStep) -> float:
        bounds = {} if step.people is None else step.people.numbers
        return math.prod(float(np.max(bound)) for bound in bounds.values())

    return max(steps, key=most)


def unit_in_words(privacy_unit: str, people: PersonBounds | None) -> str:
    """Returns a privacy unit and its bounds in words."""
    if privacy_unit not in OWNED:
        return f"one {privacy_unit}"
    is_joined = people is not None and makes_one(people)
    bounds = bounds_in_words(people)
    if privacy_unit == PERSON:
        return "one person" + (
            " with all of their examples" if is_joined else f", {bounds}"
        )
    if is_joined:
        return "one original example with all of its copies"
    return f"one original example with {bounds.replace('examples', 'copies', 1)}"


def changed_unit(privacy_unit: str, neighboring_relation: str) -> str:
    """Returns the difference of two neighbouring data sets in words."""
    if privacy_unit == ORIGINAL:
        return {
            "add_remove": "one example, with all of its copies, more or less",
            "replace_one": "the content of one example, and of all of its copies, "
            "replaced",
            "zero_out": "the slots of one example and of all of its copies emptied "
            "or filled",
        }[neighboring_relation]
    if privacy_unit == PERSON:
        return {
            "add_remove": "one person, with all of their examples, more or less",
            "replace_one": "the content of all examples of one person replaced",
            "zero_out": "all slots of one person emptied or filled",
        }[neighboring_relation]
    return {
        "add_remove": f"one `{privacy_unit}` more or less",
        "replace_one": f"the content of one `{privacy_unit}` replaced",
        "zero_out": f"one `{privacy_unit}` slot emptied or filled",
    }[neighboring_relation]


def makes_one(people: PersonBounds) -> bool:
    """Whether each person has at most one unit, as in statistics of joined examples."""
    return not people.shape and people.numbers == {"examples": 1}


def bounds_in_words(people: PersonBounds | None) -> str:
    """Returns the bounds of a person in words."""
    if people is None:
        return "all examples"
    if people.shape:
        return "all examples within bounds that vary"
    words = {"tasks": ("task", "tasks"), "classes": ("class", "classes")}
    found = []
    for name, (one, several) in words.items():
        if name in people.numbers:
            number = int(people.numbers[name])
            where = " of each" if found else ""
            found.append(f"at most {number:,} {one if number == 1 else several}{where}")
    where = [f"in {', '.join(found)}"] if found else []
    if "examples" in people.numbers:
        inside = " in each" if found else ""
        where.append(f"at most {int(people.numbers['examples']):,}{inside}")
    return ", ".join(["all examples", *where])
