"""Exact delta of epochs at random settings, against `experiments/allocation_oracle.py`.

`allocation_random.csv` is what the script wrote; its oracles share no code with the
package.
"""

import csv
from pathlib import Path

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant._engine import using_engine
from jaxdp_episodic.accountant.losses.allocation_tables import (
    forget_tables,
    make_sum_tables,
    sum_tables,
)
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
        assert found >= true * (1 - oracle)
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


@pytest.mark.slow
def test_engines_agree():
    """Kernels on JAX ask the host for the tables."""
    rows = [row for row in ROWS if row["relation"] == "add_remove"][:50]
    names = ("steps", "noise", "epochs", "epsilon")
    steps, noise, epochs, epsilon = (
        np.array([float(row[name]) for row in rows]) for name in names
    )
    epoch = jde.GaussianStep(
        jde.RandomAllocation("unit", steps_per_epoch=steps.astype(int)),
        noise_multiplier=noise,
        neighboring_relation="add_remove",
    )
    found = []
    for engine in ("numpy", "jax"):
        forget_tables()
        with using_engine(engine):
            asked = {"epsilon": epsilon, "num_steps": steps * epochs}
            found.append(jde.delta(epoch, return_info=True, **asked))
    (ours, info), (theirs, other) = found
    np.testing.assert_array_equal(info.is_certified_bound, other.is_certified_bound)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.slow
def test_tables_side_by_side():
    # Also of few terms with light shifts, which have more nodes.
    asked = [(2, 0.3), (3, 0.1), (4, 2.5), (15, 0.2), (20, 2.0), (1000, 1.4)]
    asked += [(50_000, 0.3), (500_000, 3.0)]
    forget_tables()
    theirs = make_sum_tables(asked)
    forget_tables()
    for setting, pair in zip(asked, theirs, strict=True):
        for ours, other in zip(sum_tables(*setting), pair, strict=True):
            np.testing.assert_allclose(ours.edges, other.edges, rtol=1e-13)
            seen = ours.values[0] > ours.values[0].max() - 36
            for row, same in zip(ours.values, other.values, strict=True):
                size = 1 + np.abs(same[seen])
                assert np.max(np.abs(row - same)[seen] / size) < 1e-9
    forget_tables()
