"""What sets like some data gained, as docs/accuracy.md has it."""

import re

import pytest

from jaxdp_episodic.tools.plan.measured import (
    MEASURED,
    NUMBERS,
    PICTURES,
    said_of_alike,
)
from pages import ROOT


@pytest.mark.parametrize("one", MEASURED, ids=lambda one: one.name)
def test_the_table_is_that_of_the_docs(one):
    page = (ROOT / "docs" / "accuracy.md").read_text()
    for epsilon, gain in ((1, one.at_1), (8, one.at_8)):
        row = rf"^\|\s*{one.name}, {epsilon}\s*\|.*\|\s*([+-][\d.]+) ±"
        (found,) = re.findall(row, page, re.MULTILINE)
        assert float(found) == gain


@pytest.mark.parametrize(
    ("kind", "sizes", "epsilon", "said"),
    [
        (PICTURES, (6, 700, 425), 1.0, "data like these (mnist, typefaces, digits)"),
        (PICTURES, (1_300, 4, 425), 8.0, "over untrained features at epsilon 8 "),
        (PICTURES, (1_300, 4, 425), 2.0, "over untrained features at epsilon 1 "),
        (NUMBERS, (10, 900, 10), 0.5, "data like these (letters)"),
        (NUMBERS, (10, 4, 512), 1.0, "no data like these were measured"),
    ],
)
def test_the_sets_of_about_the_same_sizes_are_named(kind, sizes, epsilon, said):
    assert said in said_of_alike(kind, sizes, epsilon)
