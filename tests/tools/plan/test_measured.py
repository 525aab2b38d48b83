"""Published gains of data sets of the same kind, as in docs/accuracy.md."""

import re

import pytest

from jaxdp_episodic.tools.plan.pipelines import (
    EPSILONS,
    MEASURED,
    NUMBERS,
    PICTURES,
    measured_gains,
)
from pages import ROOT


@pytest.mark.parametrize("one", MEASURED, ids=lambda one: one.name)
def test_the_table_equals_the_docs(one):
    page = (ROOT / "docs" / "accuracy.md").read_text()
    for epsilon, gain in zip(EPSILONS, one.gains, strict=True):
        row = rf"^\|\s*{one.name}, {epsilon:g}\s*\|.*\|\s*([+-][\d.]+) ±"
        (found,) = re.findall(row, page, re.MULTILINE)
        assert float(found) == gain


@pytest.mark.parametrize(
    ("kind", "sizes", "epsilon", "said"),
    [
        (
            PICTURES,
            (6, 700, 425),
            1.0,
            "data like these (digits, typefaces) gained accuracy over untrained "
            "features: 0.01 to 0.17 at epsilon 1 (docs/accuracy.md)",
        ),
        (
            PICTURES,
            (1_300, 4, 425),
            4.0,
            "0.01 to 0.08 at epsilon 1, 0.01 to 0.14 at epsilon 8 "
            "(docs/accuracy.md; epsilon 4 was not measured)",
        ),
        (PICTURES, (700, 5, 1_275), 8.0, "(emoji) gained accuracy over untrained "),
        (PICTURES, (700, 5, 1_275), 8.0, ": 0.03 at epsilon 8 (docs/accuracy.md)"),
        (PICTURES, (170, 12, 425), 8.0, "(icons, syllables) gained"),
        (NUMBERS, (10, 900, 10), 0.5, "(letters) gained accuracy over untrained "),
        (NUMBERS, (10, 900, 10), 0.5, ": 0.15 at epsilon 1 (docs/accuracy.md; epsilon"),
        (NUMBERS, (10, 900, 512), 9.0, ": 0.01 to 0.06 at epsilon 8 (docs/accuracy.md"),
        (NUMBERS, (10, 900, 64), 1.0, "no data of this kind and size were measured"),
        (NUMBERS, (10, 4, 512), 1.0, "no data of this kind and size were measured"),
    ],
)
def test_data_sets_of_the_same_kind_and_size_are_named(kind, sizes, epsilon, said):
    assert said in measured_gains(kind, sizes, epsilon)
