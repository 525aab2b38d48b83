"""Random allocation and shuffled epochs: answers against integrals by definition.

`allocation_random.csv` has delta of whole epochs at random settings, by oracles that
share no code with the package: `experiments/allocation_oracle.py` of commit 19b43618.
"""

from __future__ import annotations

import csv
import functools
import math
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses import allocated_moments as ours
from jaxdp_episodic.accountant.losses.allocated import (
    AllocatedAntipodalBoundingLoss,
    AllocatedBoundingLoss,
)
from jaxdp_episodic.accountant.questions.dominating_pair import runs_of
from oracles import allocation, people_epochs

PATH = Path(__file__).parents[2] / "allocation_random.csv"
with PATH.open(encoding="utf-8", newline="") as file:
    ROWS = [row for row in csv.DictReader(file) if row["oracle"] != "interval"]
# Two that are quick: one epoch at delta 3e-11, and 48 epochs of two steps. The others
# take two minutes.
ROWS = [row for row in ROWS if row["number"] in ("2", "66")] + ROWS[::8]
ADD, REPLACE = "add_remove", "replace_one"
# Relative width of certified ends of epsilon; those of delta are some times wider.
WIDTH = {ADD: 1e-4, REPLACE: 1e-3}
NARROW = 1e-2
# Error of the trapezoidal rule on a grid of releases, by a kink between its points.
GRID = 2e-3
ALWAYS = jde.Poisson("unit", sampling_probability=1.0)


def step(steps, noise, relation=ADD, **fields):
    drawn = jde.RandomAllocation("unit", steps_per_epoch=steps, **fields)
    return jde.GaussianStep(
        drawn, noise_multiplier=noise, neighboring_relation=relation
    )


def by_definition(steps, taken, noise, epsilon, relation):
    """Delta of two or three of an epoch's steps."""
    if relation == REPLACE:
        return allocation.antipodal(steps, taken, 1 / noise, epsilon)
    return max(
        allocation.add_remove(steps, taken, 1 / noise, epsilon, direction)
        for direction in ("remove", "add")
    )


# --- Delta and epsilon ---


@pytest.mark.few(2)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["number"])
def test_random_settings(row):
    steps, epochs = int(row["steps"]), int(row["epochs"])
    epoch = step(steps, float(row["noise"]), row["relation"])
    asked = {"epsilon": float(row["epsilon"]), "num_steps": steps * epochs}
    found, info = jde.delta(epoch, return_info=True, **asked)
    true, oracle = float(row["delta"]), 2 * float(row["oracle_error"])
    if info.is_certified_bound:
        assert true * (1 - oracle) <= found <= true * (1 + NARROW + oracle)
    else:
        assert found == pytest.approx(true, rel=1e-9 + oracle)
        # The estimate is at least the error, except for the last digits.
        assert abs(found / true - 1) <= info.error + oracle + 1e-13
        assert info.error < 1e-6


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("steps", "taken", "noise", "epsilon", "relation"),
    [
        (2, 2, 5.0, 0.3, ADD),
        (4, 2, 1 / 3, 0.6, ADD),
        (2, 2, 12.065, 0.69, ADD),  # far in the tail, with much noise
        (9, 2, 1 / 1.6, 0.4, REPLACE),
        (5, 2, 1 / 3.4, 2.0, REPLACE),
        (3, 3, 1 / 0.7, 0.9, REPLACE),
        (3, 3, 1 / 0.7, 0.9, ADD),
        (12, 3, 1 / 1.4, 0.1, ADD),
        (3, 3, 7.7628, 1.7028, REPLACE),
        (30, 3, 1 / 0.3, 0.6, REPLACE),
    ],
)
def test_a_few_steps_by_definition(steps, taken, noise, epsilon, relation):
    true = by_definition(steps, taken, noise, epsilon, relation)
    epoch, asked = step(steps, noise, relation), {"num_steps": taken}
    low, high = jde.delta_interval(epoch, epsilon=epsilon, **asked)
    assert low <= true * (1 + 1e-12) and true * (1 - 1e-12) <= high
    found, info = jde.delta(epoch, epsilon=epsilon, return_info=True, **asked)
    assert found >= true * (1 - 1e-9)
    if true > 1e-15:  # further out there is no lower bound
        assert found <= true * (1 + max(info.error, 1e-8))
        assert info.error < NARROW and high <= low * (1 + NARROW)


@pytest.mark.parametrize(("noise", "delta"), [(0.4, 1e-26), (0.6, 1e-30), (2.0, 1e-33)])
def test_the_smallest_deltas_are_met(noise, delta):
    """Regression: they were not found, or a table was 1e-3 too small."""
    asked = {"delta": delta, "num_steps": 2, "return_info": True}
    value, info = jde.epsilon(step(2, noise), **asked)
    assert info.is_certified_bound and info.error < 1e-4 * value
    for found, is_met in ((value, True), (value * (1 - 1e-4), False)):
        true = allocation.add_remove(2, 2, 1 / noise, float(found), "remove")
        assert (true <= delta) == is_met


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("steps", "taken", "noise", "epsilon", "true"),
    [
        # Positive terms were added by convolutions, to a relative 1e-10.
        (1000, 6, 1 / 0.3, 0.004, 1.7275531203709538e-06),
        # Nodes of a part of an epoch were 17 nats of D apart.
        (63, 12, 1 / 0.28807022743688293, 0.254, 2.9600151085833e-17),
        # Little noise.
        (40, 40, 0.4, 5.0, None),
        (12, 12, 0.3, 3.0, None),
        (2_000, 2_000, 0.45, 0.2, None),
    ],
)
def test_many_replaced_steps(steps, taken, noise, epsilon, true):
    if true is None:
        true = allocation.antipodal_of_many(steps, taken, 1 / noise, epsilon, 1.2)
    found = jde.delta(step(steps, noise, REPLACE), epsilon=epsilon, num_steps=taken)
    assert true * (1 - 3e-9) <= found <= true * (1 + 3e-3)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("relation", "steps", "noise", "num_steps", "delta"),
    [
        # D fell by 20 nats, and to 0, from one node to the next.
        (REPLACE, 5, 6.4717, 2, 1.24e-10),
        # Nodes further apart than all losses left no lower bound and raised.
        (REPLACE, 30, 6.68, 2, 1e-10),
        (REPLACE, 10**6, 30.0, 2, 1e-10),
        (REPLACE, 103, 1.3912, 12, 2.07e-8),
        # Lattices finer than the losses lowered the lower end by up to 0.7 %.
        (ADD, 341, 6.808, 341 * 8, 4e-7),
        # Rounding of the losses' tails added 6e-7 to each epoch's probability.
        (ADD, 6438, 1.152, 6438 * 9746, 7e-4),
        # D is small at 1: its first cell was too wide, and the lower end 0.
        (REPLACE, 10, 1.0, 1000, 1e-6),
        (REPLACE, 86431, 7.366, 86431 * 267, 4e-6),
        # Little noise.
        (REPLACE, 10, 0.3, 100, 1e-6),
        (REPLACE, 116, 0.392, 116 * 435, 4e-12),
    ],
)
def test_ends_are_close_and_contain_answers(relation, steps, noise, num_steps, delta):
    epoch = step(steps, noise, relation)
    asked = {"delta": delta, "num_steps": num_steps}
    value = jde.epsilon(epoch, **asked)
    low, high = jde.epsilon_interval(epoch, **asked)
    assert 0 < low <= value <= high < low + WIDTH[relation] * max(1, low)
    assert low <= jde.epsilon(epoch, method="rdp", **asked)


def test_ends_of_hard_questions_contain_answers():
    true = 2.9600151085833e-17
    asked = {"epsilon": 0.254, "num_steps": 12}
    low, high = jde.delta_interval(step(63, 1 / 0.28807022743688293, REPLACE), **asked)
    assert 0 < low <= true <= high <= true * 1.003
    asked = {"delta": 7e-4, "num_steps": 6438 * 9746}
    low, high = jde.epsilon_interval(step(6438, 1.152), **asked)
    # With points of one epoch four times closer: 4.518166 to 4.518311.
    assert low <= 4.518311 and 4.518166 <= high


@pytest.mark.parametrize("outer", [0.3, 1.0])
@pytest.mark.parametrize("inner", [(), (0.4,), (1.0,)])
def test_losses_of_bounding_pairs_have_their_profiles(outer, inner):
    kind = AllocatedAntipodalBoundingLoss if inner else AllocatedBoundingLoss
    # 3 of an epoch's 5 steps
    loss = kind(*map(np.float64, (outer, 0.8, 5.0, 3.0, 1.0, *inner)))
    value, log_mass = loss.values()
    for total in (np.exp(log_mass), np.exp(log_mass - value)):
        assert total.sum() == pytest.approx(1, abs=1e-12)
    u = np.array([0.0, 0.01, 0.3, 0.7])
    both = (value, log_mass), (-value, log_mass - value)
    for (found, _), (losses, masses) in zip(loss.log_tails(u), both, strict=True):
        gain = np.maximum(-np.expm1(u[:, None] - losses), 0.0)
        assert np.exp(found) == pytest.approx(gain @ np.exp(masses), rel=1e-9)


def test_two_replaced_steps_are_a_gaussian_mechanism():
    """``w = e^{s (x + x')}``: each epoch is a Gaussian of shift s sqrt(2)."""
    for epochs in (1, 7):
        gaussian = jde.GaussianStep(ALWAYS, noise_multiplier=1 / (0.4 * np.sqrt(2)))
        moved = jde.epsilon(gaussian, delta=1e-6, num_steps=epochs)
        asked = {"delta": 1e-6, "num_steps": 2 * epochs}
        low, high = jde.epsilon_interval(step(2, 1 / 0.4, REPLACE), **asked)
        assert low <= moved * (1 + 1e-9) and moved * (1 - 1e-9) <= high
        assert high <= low + 2e-4 * max(low, 1)


# --- Counts and extremes ---


@pytest.mark.parametrize(
    ("times", "num_steps", "expected"),
    [
        # Blocks of 4 and 3 steps: two epochs, and three or four steps of a third one.
        (2, 17, {(4, 4): 2, (3, 3): 2, (4, 3): 1}),
        (2, 18, {(4, 4): 3, (3, 3): 2}),
        # Blocks of 3, 2 and 2: an epoch and two blocks.
        (3, 12, {(3, 3): 2, (2, 2): 3}),
    ],
)
def test_epochs_and_blocks_are_counted(times, num_steps, expected):
    run = runs_of(step(7, 1.0, times=times), np.asarray(num_steps))[0]
    found = {
        (float(loss.slots[0]), float(loss.steps[0])): float(count[0])
        for loss, count in zip(run.losses, run.counts, strict=True)
    }
    assert found == expected
    with pytest.raises(ValueError, match="whole number"):
        jde.epsilon(step(7, 1.0), delta=1e-6, num_steps=1.5)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_parts_of_an_epoch_cost_more_for_each_step(relation):
    """Parts of no step or one step need no pair of their own."""
    found = jde.epsilon(
        step(4, 1.0171, relation), delta=1e-5, num_steps=np.array([0, 1, 4])
    )
    assert found[0] == 0 and np.all(np.diff(found) > 0)
    first = jde.GaussianStep(
        jde.Poisson("unit", sampling_probability=0.25),
        noise_multiplier=1.0171,
        neighboring_relation=relation,
    )
    assert found[1] == pytest.approx(jde.epsilon(first, delta=1e-5, num_steps=1))


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_extreme_settings(relation):
    asked = {"delta": 1e-6, "num_steps": 8}
    for noise, steps, value in ((0.0, 8, np.inf), (np.inf, 8, 0.0), (1.0, 0, 0.0)):
        epoch, asked = step(4, noise, relation), {"delta": 1e-6, "num_steps": steps}
        assert jde.epsilon(epoch, **asked) == value
        assert jde.epsilon_interval(epoch, **asked)[1] == value
    # With so much noise the tables' shift is raised, for the upper end only.
    low, high = jde.epsilon_interval(step(4, 1e6, relation), delta=1e-9, num_steps=8)
    assert 0 == low <= high < 1e-3


def test_uncomputable_settings_are_never_too_small():
    """With some noise: at least the cost of two steps, which is known."""
    known = jde.GaussianStep(ALWAYS, noise_multiplier=0.05)
    asked = {"num_steps": 8, "return_info": True}
    least = jde.epsilon(known, delta=1e-6, num_steps=2)
    for (value, info), most in (
        (jde.epsilon(step(4, 0.05), delta=1e-6, **asked), least),
        (jde.delta(step(4, 0.05), epsilon=3.0, **asked), 1 - 1e-12),
    ):
        assert value >= most * (1 - 1e-9) and np.isinf(info.error)
        assert info.is_certified_bound
    # At most the Rényi bound with its rounding, and that of participating every step.
    asked = {"delta": 1e-150, "num_steps": 3}
    value, info = jde.epsilon(step(3, 1.0), return_info=True, **asked)
    assert info.is_certified_bound and info.error > 0
    assert value <= jde.epsilon(step(3, 1.0), method="rdp", **asked) * (1 + 1e-12)
    always = jde.GaussianStep(ALWAYS, noise_multiplier=1.0)
    assert 0 < value < jde.epsilon(always, **asked)


# --- Contributions that depend on earlier releases ---


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("steps", "taken", "spacing"), [(2, 2, 0.05), (4, 2, 0.05), (3, 3, 0.2)]
)
@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_adaptive_contributions_cost_no_more(relation, steps, taken, spacing):
    s, g = 1.1, np.exp([0.0, 0.3, 0.9])
    claimed = jde.delta(
        step(steps, 1 / s, relation), epsilon=np.log(g), num_steps=taken
    )
    design = people_epochs.epoch(steps, (1.0,), taken)
    axis = people_epochs.grid(design, s, spacing)
    without = "zero_out" if relation == ADD else relation

    def told(table, other):
        return np.maximum(*people_epochs.masses(design, (table, other), s, g, axis))

    ones = np.ones((2, taken, people_epochs.REGIONS))
    far = people_epochs.other_world(ones, without, -ones)
    # Constant contributions attain the claim; half the shift, a tempting mistake, is
    # exceeded.
    assert told(ones, far) == pytest.approx(claimed, rel=2 * GRID)
    assert np.all(claimed > 1.2 * told(ones / 2, far / 2))
    rng = np.random.default_rng(steps + taken)
    for sign in (1, -1):
        tables = people_epochs.attack(rng, design, without, s, g[1], sign=sign)
        assert np.all(told(*tables) <= claimed * (1 + GRID))


# --- Moments ---


def moment(kernel, direction, order, s, *fields):
    row = kernel(direction, np.array([order - 1.0]), s, *map(float, fields))
    return float(row[0, 0])


excess = functools.partial(moment, ours.sum_excess)
drawn_excess = functools.partial(moment, ours.antipodal_excess, "forward")


@pytest.mark.parametrize(("t", "j", "s"), [(2, 2, 1.0), (5, 5, 2.0), (4, 3, 0.01)])
def test_integer_orders_equal_the_power_of_a_series(t, j, s):
    with mp.workdps(60):
        exact = [float(mp.log(e)) for e in allocation.whole_excess(t, j, s, 5)[2:]]
    for n, value in enumerate(exact, 2):
        assert value <= excess("forward", n, s, t, j) <= value + 3e-11


@pytest.mark.few(2)
@pytest.mark.parametrize(("t", "s"), [(5, 0.7), (60, 0.2), (2, 2.5)])
def test_moments_equal_integrals_over_two_steps_noise(t, s):
    def mean(power):
        return allocation.mean_of_two(lambda w, y: w**power - 1 - power * (w - 1), t, s)

    for z in (0.02, 0.5, 0.985, 0.995, 1.5, 3.25):
        exact = mean(1 + z)
        found = excess("forward", 1 + z, s, t, 2)
        # Between the chords' ends just below 2, and where 1 - 1 cancels.
        loose = 1e-4 if 0.99 < z < 1 else 1e-10 + 3e-12 / exact
        assert -1e-13 / exact - 1e-12 <= found - math.log(exact) <= loose
        exact = mean(-z)
        off = excess("backward", 1 + z, s, t, 2) - math.log(exact)
        assert abs(off) <= 3e-11 + 1e-15 / exact


@pytest.mark.parametrize(("t", "s"), [(2, 0.5), (3, 1.0), (20, 0.7)])
@pytest.mark.parametrize("r", [1.0, 0.6, 0.05])
def test_antipodal_moments_are_slightly_above_the_profiles(t, s, r):
    for n in (2, 3, 6):
        exact = math.log(allocation.drawn_moment_of_two(n, t, s, r))
        found = drawn_excess(n, s, t, 2, r)
        assert exact - 1e-9 <= found
        if r == 1:
            assert found <= exact + 1e-9
        elif n * r < 3:
            assert found <= exact + 0.35


def by_rdp(t, noise, relation, steps):
    asked = {"delta": 1e-6, "num_steps": steps, "method": "rdp"}
    return jde.epsilon(step(t, noise, relation), **asked)


def test_rdp_bounds_are_close_and_at_most_those_of_poisson():
    # Regression: inf, or 10 to 100 nats above.
    for t, noise, relation, most in (
        (2, 1 / 0.85, REPLACE, 7.0),
        (30, 3.0, ADD, 0.27),
        (100, 3.3, REPLACE, 0.33),
    ):
        assert 0 < by_rdp(t, noise, relation, t) < most
    for t, noise, epochs in ((10, 1.0, 1), (10_000, 1.0, 100), (1_000, 10.0, 1)):
        coins = jde.GaussianStep(
            jde.Poisson("unit", sampling_probability=1 / t), noise_multiplier=noise
        )
        asked = {"delta": 1e-6, "num_steps": t * epochs, "method": "rdp"}
        most = jde.epsilon(coins, **asked) * (1 + 1e-6)
        assert by_rdp(t, noise, ADD, t * epochs) < most
