"""Certified ends of random allocation: distributions in convex order, composed."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses.allocated_bounds import (
    AllocatedBoundingLoss,
    epoch_distribution,
)
from oracles import allocation

ROWS = json.loads((Path(__file__).parents[2] / "allocation.json").read_text())["rows"]


def step(steps, noise, relation="add_remove"):
    drawn = jde.RandomAllocation("unit", steps_per_epoch=steps)
    return jde.GaussianStep(
        drawn, noise_multiplier=noise, neighboring_relation=relation
    )


def dist(shift, bins, taken, above):
    return AllocatedBoundingLoss(*map(np.asarray, (1.0, shift, bins, taken, above)))


def test_tails_are_sums_over_the_distribution():
    found = epoch_distribution(1.0, 8.0, 5.0, 1.0)
    masses = {"forward": found.with_unit, "backward": found.with_unit}
    masses["backward"] = found.with_unit * np.exp(-found.loss)
    u = np.array([0.0, 0.01, 0.3, 0.9, 2.0])
    every = dist(1.0, 8.0, 5.0, 1.0).log_tails(u)
    for sign, (direction, mass), (profile, tail) in zip(
        (1, -1), masses.items(), every, strict=True
    ):
        loss = sign * found.loss
        above = loss > u[:, None]
        gap = np.minimum(u[:, None] - loss, 0.0)
        expected = np.where(above, -np.expm1(gap), 0.0) @ mass
        assert np.exp(profile) == pytest.approx(expected, rel=1e-12, abs=1e-300)
        expected = np.where(above, np.exp(gap), 0.0) @ mass
        assert np.exp(tail) == pytest.approx(expected, rel=1e-12), direction
    beyond = dist(1.0, 8.0, 5.0, 1.0).log_tails(np.array([80.0]))
    assert all(np.isneginf(tail[0]) for pair in beyond for tail in pair)


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(
    ("steps", "taken", "shift", "epsilon"),
    [
        (2, 2, 0.2, 0.3),
        (7, 2, 1.0, 0.2),
        (4, 2, 3.0, 0.6),
        pytest.param(3, 3, 0.7, 0.9, marks=pytest.mark.slow),
        pytest.param(12, 3, 1.4, 0.1, marks=pytest.mark.slow),
    ],
)
def test_a_few_steps_by_definition(steps, taken, shift, epsilon, direction):
    truth = allocation.add_remove(steps, taken, shift, epsilon, direction)
    low, high = (
        float(np.exp(dist(shift, steps, taken, above).log_tails(np.array([epsilon]))
        [direction == "add"][0][0]))
        for above in (0.0, 1.0)
    )  # fmt: skip
    assert low < truth < high < low * 1.003


@pytest.mark.slow
def test_intervals_hold_the_reference_and_are_narrow():
    for row in ROWS[8:9]:
        steps, noise, epochs, direction, epsilon, delta = row
        asked = {"num_steps": steps * epochs}
        low, high = jde.delta_interval(step(steps, noise), epsilon=epsilon, **asked)
        assert delta <= high
        if direction == "remove":
            assert low <= delta
            low, high = jde.epsilon_interval(step(steps, noise), delta=delta, **asked)
            assert low <= epsilon <= high < low + 1e-4 * max(1, epsilon)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row[:5])))
def test_every_reference_value_is_held(row):
    steps, noise, epochs, direction, epsilon, delta = row
    asked = {"num_steps": steps * epochs}
    low, high = jde.delta_interval(step(steps, noise), epsilon=epsilon, **asked)
    assert delta <= high < low * 1.006
    assert low <= delta or direction == "add"
    value, info = jde.delta(
        step(steps, noise), epsilon=epsilon, return_info=True, **asked
    )
    assert info.is_certified_bound
    bound = jde.delta(step(steps, noise), epsilon=epsilon, method="rdp", **asked)
    assert delta <= value == min(high, bound)
    if direction == "remove":
        low, high = jde.epsilon_interval(step(steps, noise), delta=delta, **asked)
        assert low <= epsilon <= high < low + 1e-4 * max(1, epsilon)


@pytest.mark.slow
def test_composed_with_another_mechanism():
    """Two steps of an epoch and one Gaussian release: by integrals."""
    shift, other, epsilon = 1.0, 0.8, 1.0
    nodes, weights = np.polynomial.legendre.leggauss(160)
    y, weights = 10 * nodes, 10 * weights
    # Given the release's loss l the epoch is asked at epsilon - l.
    truth = 0.0
    for place, weight in zip(y + other, weights * norm.pdf(y), strict=True):
        left = epsilon - (other * place - other**2 / 2)
        truth += weight * allocation.add_remove(2, 2, shift, left, "remove")
    release = jde.GaussianStep(
        jde.Poisson("unit", sampling_probability=1.0), noise_multiplier=1 / other
    )
    run = jde.compose((step(2, 1 / shift), 2), (release, 1))
    low, high = jde.delta_interval(run, epsilon=epsilon)
    assert low <= truth <= high < low * 1.003


def planted_at(table, *, off, first, rows):
    values = table.values.copy()
    values[:, first:] += off * np.array(rows)[:, None, None]
    return table._replace(values=values)


def test_edges():
    none = jde.epsilon_interval(step(4, 0.0), delta=1e-6, num_steps=8)
    assert np.isposinf(none[1])
    assert jde.epsilon_interval(step(4, np.inf), delta=1e-6, num_steps=8) == (0, 0)
    assert jde.epsilon_interval(step(4, 1.0), delta=1e-6, num_steps=0) == (0, 0)
    # So much noise that the tables' shift is raised, for the upper end alone.
    low, high = jde.epsilon_interval(step(4, 1e6), delta=1e-9, num_steps=8)
    assert 0 == low <= high < 1e-3
    with pytest.raises(ValueError, match="max_width"):
        jde.epsilon_interval(step(4, 1.0), delta=1e-6, num_steps=8, max_width=1e-9)


@pytest.mark.slow
def test_both_engines_agree():
    asked = {"delta": 1e-6, "num_steps": np.array([20, 60])}
    epoch = step(20, 1.0)
    for method in ("pld", "exact"):
        values = [
            jde.epsilon(epoch, method=method, engine=engine, **asked)
            for engine in ("numpy", "jax")
        ]
        assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("relation", "steps", "noise", "epochs", "delta"),
    [
        # Lattices finer than the losses once put the lower end up to 0.7 % down.
        ("add_remove", 341, 6.808, 8, 4e-7),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("add_remove", 9, 3.867, 5125, 5e-4),
                ("add_remove", 6438, 1.152, 9746, 7e-4),
                # D small at 1: its first cell was too wide, and the lower end 0.
                ("replace_one", 10, 1.0, 100, 1e-6),
                ("replace_one", 2510, 7.966, 1834, 1e-12),
                ("replace_one", 86431, 7.366, 267, 4e-6),
                # Little noise.
                ("replace_one", 53, 0.657, 5, 8e-10),
                ("replace_one", 10, 0.3, 10, 1e-6),
                ("replace_one", 46, 0.306, 8, 6e-9),
                ("replace_one", 116, 0.392, 435, 4e-12),
            )
        ),
    ],
)
def test_ends_of_many_epochs_are_narrow(relation, steps, noise, epochs, delta):
    asked = {"delta": delta, "num_steps": steps * epochs}
    epoch = dataclasses.replace(step(steps, noise), neighboring_relation=relation)
    value, info = jde.epsilon(epoch, return_info=True, **asked)
    low, high = jde.epsilon_interval(epoch, **asked)
    assert info.is_certified_bound
    width = 1e-4 if relation == "add_remove" else 1e-3
    assert low <= value <= high < low * (1 + width)
