"""Exact delta of epochs at random settings, against `experiments/allocation_oracle.py`.

`allocation_random.csv` is what the script wrote; its oracles share no code with the
package.
"""

import csv
from pathlib import Path

import pytest

import jaxdp_episodic as jde
from oracles import allocation, allocation_epochs

PATH = Path(__file__).parents[2] / "allocation_random.csv"
with PATH.open(encoding="utf-8", newline="") as file:
    ROWS = [row for row in csv.DictReader(file) if row["oracle"] != "interval"]


def exact(row):
    steps, epochs = int(row["steps"]), int(row["epochs"])
    step = jde.GaussianStep(
        jde.RandomAllocation("unit", steps_per_epoch=steps),
        noise_multiplier=float(row["noise"]),
        neighboring_relation=row["relation"],
    )
    asked = {"epsilon": float(row["epsilon"]), "num_steps": steps * epochs}
    return jde.delta(step, return_info=True, **asked)


def check(row):
    found, info = exact(row)
    true, oracle = float(row["delta"]), 2 * float(row["oracle_error"])
    if info.is_certified_bound:
        assert true * (1 - oracle) <= found <= true * (1 + 1e-2 + oracle)
    else:
        assert found == pytest.approx(true, rel=1e-9 + oracle)
        # The estimate is no smaller than the error, but for the last digits.
        assert abs(found / true - 1) <= info.error + oracle + 1e-13
        assert info.error < 1e-6


def test_random_settings_at_once():
    for number in ("2", "66"):  # one epoch, delta 3e-11; 48 of two steps
        (row,) = [row for row in ROWS if row["number"] == number]
        check(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["number"])
def test_random_settings(row):
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_mellin_transforms_against_the_definition(direction):
    found, error = allocation_epochs.delta(
        [allocation_epochs.Epochs(3, 1)], 1.0, 0.5, direction
    )
    true = allocation.add_remove(3, 3, 1.0, 0.5, direction)
    assert float(found) == pytest.approx(true, rel=1e-11)
    assert error < 1e-11
