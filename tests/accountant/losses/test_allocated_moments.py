"""Moments of random allocation, against sums and integrals by definition."""

import itertools
import math

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses import allocated_moments as ours
from oracles import allocation
from rows import fast_and_slow

TIGHT = 3e-11


def excess_of(z, direction, s, t, j):
    row = ours.sum_excess(direction, np.array([float(z)]), s, float(t), float(j))
    return float(row[0, 0])


def drawn_excess(z, r, s, t, j):
    row = ours.antipodal_excess(
        "forward", np.array([float(z)]), r, s, float(t), float(j)
    )
    return float(row[0, 0])


@pytest.mark.parametrize(
    ("t", "j", "s"), [(2, 2, 1.0), (3, 2, 0.3), (5, 5, 2.0), (4, 3, 0.01)]
)
def test_whole_orders_are_the_sum_over_all_compositions(t, j, s):
    for n in (2, 3, 5):
        exact = math.log(allocation.whole_excess(n, t, j, s))
        found = excess_of(n - 1, "forward", s, t, j)
        assert exact <= found <= exact + TIGHT


@pytest.mark.parametrize(("t", "s"), [(2, 2.5), (5, 0.7), (60, 0.2)])
def test_powers_are_integrals_over_two_steps_noise(t, s):
    for z in (0.02, 0.5, 0.985, 0.995, 1.5, 3.25):
        mean = allocation.mean_of_two(
            lambda w, y, z=z: w ** (1 + z) - 1 - (1 + z) * (w - 1), t, s
        )
        exact = math.log(mean)
        found = excess_of(z, "forward", s, t, 2)
        # Between the chords' ends just below 2, and where 1 is subtracted from 1.
        loose = 1e-4 if 0.99 < z < 1 else 1e-10 + 3e-12 / math.exp(exact)
        assert exact - 1e-13 / math.exp(exact) - 1e-12 <= found <= exact + loose
        below = math.log(
            allocation.mean_of_two(lambda w, y, z=z: w**-z - 1 + z * (w - 1), t, s)
        )
        found = excess_of(z, "backward", s, t, 2)
        loose = TIGHT + 1e-15 / math.exp(below)
        assert below - loose + TIGHT <= found <= below + loose


@pytest.mark.parametrize(("t", "s"), [(2, 0.5), (3, 1.0), (20, 0.7)])
@pytest.mark.parametrize("r", [1.0, 0.6, 0.05])
def test_antipodal_moments_are_above_the_profiles_and_near_them(t, s, r):
    for n in (2, 3, 6):
        exact = math.log(allocation.drawn_moment_of_two(n, t, s, r))
        found = drawn_excess(n - 1, r, s, t, 2)
        assert exact - 1e-9 <= found
        if r == 1:
            assert found <= exact + 1e-9
        elif n * r < 3:
            assert found <= exact + 0.35


def test_an_epoch_of_two_steps_is_a_gaussian_move():
    # (A_1 + A_2) / (B_1 + B_2) = e^{s (x_1 + x_2)}.
    for n in (2, 5, 12):
        assert drawn_excess(n - 1, 1.0, 0.5, 2, 2) == pytest.approx(
            math.log(math.expm1(0.25 * n * (n - 1))), abs=TIGHT
        )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("r", "noise"),
    fast_and_slow(
        itertools.product([0.999, 0.4, 0.02, 1e-4], [0.2, 0.3, 0.5]),
        lambda r, noise: noise > 0.2 or r in (0.999, 1e-4),
    ),
)
def test_units_below_two_steps_are_drawn_from_that_move(noise, r):
    for n in (2, 3, 6):
        exact = allocation.log_excess_of_drawn_move(n, math.sqrt(2) / noise, r)
        found = drawn_excess(n - 1, r, 1 / noise, 2, 2)
        assert exact <= found
        if n == 2:
            assert found <= exact + 0.7


def test_between_whole_orders_and_beyond_the_sums():
    # Convex in the order, also where one formula takes over from another.
    for s, t, j in ((1.0, 10.0, 10.0), (0.2, 50.0, 20.0), (3.0, 100.0, 100.0)):
        z = np.array([0.3, 0.9, 0.97, 1.0, 1.5, 2.0, 7.0, 30.0, 31.5, 40.0, 200.0])
        for rows in (
            ours.sum_excess("forward", z, s, t, j),
            ours.antipodal_excess("forward", z, 1.0, s, t, j),
            ours.antipodal_excess("forward", z, 0.2, s, t, j),
        ):
            log_moment = np.logaddexp(0.0, rows[0])
            assert np.all(np.isfinite(rows[0]))
            # t D_{1+t} over t: divergences grow with the order.
            assert np.all(np.diff(log_moment / z) >= -1e-9)


def test_hoelders_bound_takes_over_above_the_integrals():
    known = ours._antipodal_moments(0.3, 40.0, 40.0, 64)
    summed = ours._MOST_TILTED
    ours._MOST_TILTED = 20
    try:
        ours._antipodal_moments.cache_clear()
        bounded = ours._antipodal_moments(0.3, 40.0, 40.0, 64)
    finally:
        ours._MOST_TILTED = summed
        ours._antipodal_moments.cache_clear()
    ratio = bounded[21:] / known[21:]
    assert np.all(ratio >= 1) and np.all(ratio < 2.5)


def epsilon(t, noise, relation, steps, **options):
    drawn = jde.RandomAllocation("unit", steps_per_epoch=t)
    step = jde.GaussianStep(
        drawn, noise_multiplier=noise, neighboring_relation=relation
    )
    return jde.epsilon(step, delta=1e-6, num_steps=steps, method="rdp", **options)


def test_what_was_loose_or_not_a_number():
    # Before: inf, or 10 to 100 nats above.
    for t, noise, relation, most in (
        (2, 1 / 0.85, "replace_one", 7.0),
        (30, 3.0, "add_remove", 0.27),
        (100, 3.3, "replace_one", 0.33),
    ):
        assert 0 < epsilon(t, noise, relation, t) < most
    # Never dearer than coins, whose moments are the larger ones.
    for t, noise, epochs in ((10, 1.0, 1), (10_000, 1.0, 100), (1_000, 10.0, 1)):
        coins = jde.GaussianStep(
            jde.Poisson("unit", sampling_probability=1 / t), noise_multiplier=noise
        )
        asked = {"delta": 1e-6, "num_steps": t * epochs, "method": "rdp"}
        ours_now = epsilon(t, noise, "add_remove", t * epochs)
        assert ours_now < jde.epsilon(coins, **asked) * (1 + 1e-6)


@pytest.mark.slow
def test_a_batch_is_its_settings():
    steps, noise = np.array([[5], [40]]), np.array([0.7, 2.0, 30.0])
    for relation in ("add_remove", "replace_one"):
        every = epsilon(steps, noise, relation, 3 * steps)
        alone = [
            [epsilon(t, n, relation, 3 * t) for n in noise.tolist()] for t in (5, 40)
        ]
        np.testing.assert_allclose(every, alone, rtol=2e-3)
        assert np.all(np.diff(every, axis=1) < 0)


@pytest.mark.slow
def test_both_engines_agree():
    for relation in ("add_remove", "replace_one"):
        one = epsilon(12, 1.5, relation, 36, engine="numpy")
        other = epsilon(12, 1.5, relation, 36, engine="jax")
        # Chords have corners, about which the two searches end at other orders.
        loose = 1e-9 if relation == "add_remove" else 2e-3
        assert other == pytest.approx(one, rel=loose)


def test_the_search_finds_the_best_order():
    # Near order 1 too, where the excess grows like the order less one.
    for noise, t, steps in ((0.6146, 2, 238), (0.35, 50, 100), (5.0, 7, 40)):
        drawn = jde.RandomAllocation("unit", steps_per_epoch=t)
        for relation in ("add_remove", "replace_one"):
            step = jde.GaussianStep(
                drawn, noise_multiplier=noise, neighboring_relation=relation
            )
            a = 1 + np.geomspace(0.01, 60, 200)
            spent = jde.rdp(jde.compose((step, steps)), a)
            spent = spent + np.log1p(-1 / a) - (math.log(1e-6) + np.log(a)) / (a - 1)
            found = epsilon(t, noise, relation, steps)
            assert found <= spent.min() * (1 + 1e-3)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_of_order_one_nothing_is_above_one(direction):
    # The best order of a run that loses all beside; it was an exception.
    with np.errstate(all="ignore"):
        assert excess_of(0.0, direction, 0.3, 20, 20) == -np.inf
