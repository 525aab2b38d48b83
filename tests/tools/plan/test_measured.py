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
    ("sizes", "epsilon", "said"),
    [
        ((PICTURES, 6, 700), 1.0, "data like these (mnist, "),
        ((PICTURES, 1_300, 4), 8.0, "over untrained features at epsilon 8 "),
        ((PICTURES, 1_300, 4), 2.0, "over untrained features at epsilon 1 "),
        ((NUMBERS, 20, 1_000), 0.5, "data like these (modules, "),
        ((NUMBERS, 10, 4), 1.0, "no data like these were measured"),
    ],
)
def test_the_sets_with_about_as_many_classes_and_examples_are_named(
    sizes, epsilon, said
):
    assert said in said_of_alike(*sizes, epsilon)
