"""Epsilon, delta and RDP against published tables, closed forms and the oracles."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.bounds import Gaussian, rdp_poisson_subsampled
from oracles import moments

# These tests are about the Rényi bounds.
rdp_epsilon = functools.partial(jde.epsilon, method="rdp")
rdp_delta = functools.partial(jde.delta, method="rdp")

TABLES = json.loads((Path(__file__).parents[2] / "reference.json").read_text())
ROUNDING = 1e-12
ORDERS = np.array([1 + 1e-6, 1.25, 2.0, 7.5, 64.0, 4096.0])


def poisson_step(rate, noise, **fields):
    sampling = jde.Poisson("user", sampling_probability=rate)
    return jde.GaussianStep(sampling, noise_multiplier=noise, **fields)


def fixed_size_step(size, population, noise, *, exact=False, **fields):
    sampling = jde.WithoutReplacement(
        "user", size=size, population=population, population_is_exact=exact
    )
    return jde.GaussianStep(sampling, noise_multiplier=noise, **fields)


def gaussian_rdp(sensitivity, noise):
    return lambda alpha: alpha * (sensitivity / noise) ** 2 / 2


def table_step(row):
    """The step of one row of `multistage_epsilon`; rates are multiples of 1/1000."""
    levels = []
    for index, level in enumerate(row["levels"]):
        name = f"level_{index}"
        if level["scheme"] == "poisson":
            scheme = jde.Poisson(name, sampling_probability=level["rate"])
        else:
            size = round(1000 * level["rate"])
            assert size == pytest.approx(1000 * level["rate"], rel=1e-12)
            scheme = jde.WithoutReplacement(name, size=size, population=1000)
        levels.append(scheme)
    (clipped,) = (i for i, level in enumerate(row["levels"]) if level["clipped"])
    return jde.GaussianStep(
        jde.MultistageSampling(*levels),
        noise_multiplier=row["noise_multiplier"],
        clip_unit=f"level_{clipped}",
        neighboring_relation=row["neighboring_relation"],
    )


class TestReferenceTables:
    @pytest.mark.parametrize("direction", ["forward", "backward"])
    def test_rdp_of_the_sampled_gaussian(self, direction):
        rows = TABLES["sampled_gaussian_rdp"]
        assert len(rows) == 42
        for row in rows:
            step = poisson_step(row["sampling_probability"], row["noise_multiplier"])
            actual = jde.rdp(step, row["alpha"], direction=direction)
            expected = float(row[f"rdp_{direction}"])
            assert actual == pytest.approx(expected, rel=1e-9, abs=0), row

    @pytest.mark.parametrize("row", TABLES["published"]["rdp_per_step"])
    def test_published_rdp(self, row):
        step = poisson_step(row["sampling_probability"], row["noise_multiplier"])
        orders = np.array(row["orders"], float)
        actual = row["num_steps"] * jde.rdp(step, orders)
        published = np.array(row["rdp"])
        whole = orders == np.floor(orders)
        np.testing.assert_allclose(actual[whole], published[whole], rtol=row["rtol"])
        # Between integer orders theirs are upper bounds; the oracle gives the
        # difference.
        assert np.all(actual <= published * (1 + row["rtol"]))
        for value, alpha in zip(actual[~whole], orders[~whole], strict=True):
            log_moment = moments.fine_sampled_gaussian(
                row["sampling_probability"],
                1 / row["noise_multiplier"],
                float(alpha),
                direction="forward",
            )
            truth = moments.rdp_from_log_moment(log_moment, float(alpha))
            assert value == pytest.approx(row["num_steps"] * truth, rel=1e-10, abs=0)

    @pytest.mark.parametrize("row", TABLES["published"]["epsilon_rdp"])
    def test_published_epsilon_by_rdp(self, row):
        step = poisson_step(row["sampling_probability"], row["noise_multiplier"])
        actual = rdp_epsilon(step, delta=row["delta"], num_steps=row["num_steps"])
        assert actual <= row["epsilon"] + 1e-4
        assert actual >= 0.98 * row["epsilon"]

    @pytest.mark.parametrize("row", TABLES["published"]["epsilon_tight"])
    def test_never_below_the_tight_epsilon(self, row):
        step = poisson_step(row["sampling_probability"], row["noise_multiplier"])
        actual = rdp_epsilon(step, delta=row["delta"], num_steps=row["num_steps"])
        assert actual >= row["epsilon"] - row.get("atol", 0.0)

    @pytest.mark.parametrize("row", TABLES["multistage_epsilon"])
    def test_multistage_epsilon(self, row):
        actual = rdp_epsilon(
            table_step(row), delta=row["delta"], num_steps=row["num_steps"]
        )
        # The table has the tight epsilon, rounded to nine digits.
        assert actual >= row["epsilon"] - 1e-8
        assert actual <= 1.65 * row["epsilon"]

    def test_the_larger_of_both_directions_counts(self):
        step = poisson_step(np.array([1e-6, 0.1, 0.9, 1.0])[:, None], [0.3, 1.0, 30.0])
        one_way = [
            jde.rdp(step, ORDERS, direction=direction)
            for direction in ("forward", "backward")
        ]
        np.testing.assert_array_equal(jde.rdp(step, ORDERS), np.max(one_way, axis=0))

    @pytest.mark.parametrize("rate", [1e-8, 0.01, 0.4, 1 - 1e-9])
    @pytest.mark.parametrize("noise", [0.5, 1.0, 6.0])
    def test_the_quadrature_is_the_series_at_integer_orders(self, rate, noise):
        orders = np.concatenate([np.arange(2, 65), [128, 255, 1024]])
        series = rdp_poisson_subsampled(
            Gaussian(noise), sampling_probability=rate, orders=orders, bound="tight"
        )
        found = jde.rdp(poisson_step(rate, noise), orders, direction="forward")
        np.testing.assert_allclose(found, series, rtol=1e-10)


FULL_PARTICIPATION = [
    pytest.param(poisson_step(1.0, 1.5), 1.0, id="poisson add_remove"),
    pytest.param(
        poisson_step(1.0, 1.5, neighboring_relation="replace_one"),
        2.0,
        id="poisson replace_one",
    ),
    pytest.param(
        fixed_size_step(10, 10, 1.5, exact=True), 1.0, id="exact size add_remove"
    ),
    # A lower bound on the population does not show that everybody is drawn.
    pytest.param(fixed_size_step(10, 10, 1.5), 2.0, id="size bound add_remove"),
    pytest.param(
        fixed_size_step(12, 10, 1.5), 2.0, id="size above population add_remove"
    ),
    pytest.param(
        fixed_size_step(12, 10, 1.5, exact=True),
        1.0,
        id="exact size above population add_remove",
    ),
    pytest.param(
        fixed_size_step(10, 10, 1.5, exact=True, neighboring_relation="replace_one"),
        2.0,
        id="exact size replace_one",
    ),
    pytest.param(
        fixed_size_step(
            12, 10, 1.5, neighboring_relation="replace_one", small_units="keep"
        ),
        2.0,
        id="size above population replace_one",
    ),
    pytest.param(poisson_step(1.0, 1.5, clip_unit="step"), 2.0, id="clipped step"),
]


class TestRateOne:
    @pytest.mark.parametrize(("step", "sensitivity"), FULL_PARTICIPATION)
    def test_rdp_is_the_gaussian_mechanisms(self, step, sensitivity):
        for noise in (1e-6, 1.5, 1e6):
            step = dataclasses.replace(step, noise_multiplier=noise)
            expected = gaussian_rdp(sensitivity, noise)(ORDERS)
            np.testing.assert_allclose(jde.rdp(step, ORDERS), expected, rtol=1e-10)

    @pytest.mark.parametrize(("step", "sensitivity"), FULL_PARTICIPATION)
    def test_epsilon_is_the_converted_closed_form(self, step, sensitivity):
        def run(alpha):
            return 7 * gaussian_rdp(sensitivity, 1.5)(alpha)

        actual = rdp_epsilon(step, delta=1e-6, num_steps=7)
        assert actual == pytest.approx(moments.rdp_to_epsilon(run, 1e-6), rel=1e-8)


def silent_steps():
    return {
        "rate 0": poisson_step(0.0, 1.0),
        "rate 0 without noise": poisson_step(0.0, 0.0),
        "infinite noise": poisson_step(0.3, np.inf),
        "rate 0 above the clip level": jde.GaussianStep(
            jde.MultistageSampling(
                jde.Poisson("group", sampling_probability=0.0),
                jde.Poisson("user", sampling_probability=0.5),
            ),
            noise_multiplier=1.0,
            clip_unit="user",
        ),
        "rate 0 below the clip level": jde.GaussianStep(
            jde.MultistageSampling(
                jde.Poisson("group", sampling_probability=0.5),
                jde.Poisson("user", sampling_probability=0.0),
            ),
            noise_multiplier=1.0,
            clip_unit="group",
        ),
    }


class TestEnds:
    @pytest.mark.parametrize("name", silent_steps())
    def test_runs_without_loss(self, name):
        step = silent_steps()[name]
        for direction in ("forward", "backward", "both"):
            values = jde.rdp(step, ORDERS, direction=direction)
            np.testing.assert_array_equal(values, np.zeros_like(ORDERS))
        assert rdp_epsilon(step, delta=1e-6, num_steps=100) == 0
        assert rdp_epsilon(step, delta=1e-6, num_steps=100, orders=[2.0, 3.0]) == 0
        assert rdp_delta(step, epsilon=0.0, num_steps=100) == 0
        assert jde.privacy_profile(step, 0.0) == 0

    def test_extremes_in_a_grid_do_not_affect_other_settings(self):
        rates, noises = np.array([0.0, 0.1, 1.0])[:, None], [0.0, 1.0, np.inf]
        values = rdp_epsilon(poisson_step(rates, noises), delta=1e-6, num_steps=3)
        assert values.shape == (3, 3)
        assert np.all(values[0] == 0) and np.all(values[:, 2] == 0)
        assert np.all(np.isposinf(values[1:, 0]))
        for row, rate in ((1, 0.1), (2, 1.0)):
            alone = rdp_epsilon(poisson_step(rate, 1.0), delta=1e-6, num_steps=3)
            assert values[row, 1] == pytest.approx(alone, rel=ROUNDING)

    @pytest.mark.parametrize("delta", [1e-12, 1e-300])
    @pytest.mark.parametrize("noise", [0.7, 40.0])
    def test_tiny_delta(self, delta, noise):
        actual = rdp_epsilon(poisson_step(1.0, noise), delta=delta, num_steps=3)
        expected = moments.rdp_to_epsilon(
            lambda alpha: 3 * gaussian_rdp(1, noise)(alpha), delta
        )
        assert actual == pytest.approx(expected, rel=1e-8)
        step = poisson_step(0.01, noise)
        actual = rdp_epsilon(step, delta=delta, num_steps=3)
        assert 0 < actual < expected
        assert rdp_delta(step, epsilon=actual, num_steps=3) == pytest.approx(
            delta, rel=1e-4
        )

    def test_empty_grids(self):
        none = np.zeros(0)
        step = poisson_step(0.1, 1.0)
        assert jde.rdp(step, none).shape == (0,)
        assert jde.rdp(step, np.zeros((0, 3))).shape == (0, 3)
        assert jde.rdp(poisson_step(none, 1.0), [2.0, 3.0]).shape == (0, 2)
        assert rdp_epsilon(step, delta=none, num_steps=1).shape == (0,)
        assert rdp_epsilon(step, delta=1e-6, num_steps=none).shape == (0,)
        grid = poisson_step(np.zeros((2, 1)), none)
        assert rdp_epsilon(grid, delta=1e-6, num_steps=1).shape == (2, 0)
        on_orders = rdp_epsilon(grid, delta=1e-6, num_steps=1, orders=[2.0, 3.0])
        assert on_orders.shape == (2, 0)
        assert rdp_delta(grid, epsilon=1.0, num_steps=1).shape == (2, 0)
        assert jde.privacy_profile(step, none).shape == (0,)
        for values in (jde.rdp(step, none), rdp_epsilon(grid, delta=0.1, num_steps=1)):
            assert values.dtype == np.float64

    def test_no_noise_protects_nothing(self):
        step = poisson_step([1e-9, 0.5, 1.0], 0.0)
        assert np.all(np.isposinf(jde.rdp(step, 2.0)))
        assert np.all(np.isposinf(rdp_epsilon(step, delta=1e-6, num_steps=1)))
        np.testing.assert_array_equal(rdp_delta(step, epsilon=3.0, num_steps=1), 1.0)

    def test_no_steps(self):
        step = poisson_step(0.1, 1.0)
        assert rdp_epsilon(step, delta=1e-6, num_steps=0) == 0
        assert rdp_epsilon(poisson_step(0.1, 0.0), delta=1e-6, num_steps=0) == 0
        assert rdp_delta(step, epsilon=0.5, num_steps=0) == 0


STEP = poisson_step(0.1, 1.0)
# Function and arguments; then the value, the error and its message.
ASK = {
    "sampling_probability": lambda v: poisson_step(v, 1.0),
    "size": lambda v: fixed_size_step(v, 100, 1.0),
    "population": lambda v: fixed_size_step(1, v, 1.0),
    "noise_multiplier": lambda v: poisson_step(0.1, v),
    "delta": lambda v: rdp_epsilon(STEP, delta=v, num_steps=1),
    "num_steps": lambda v: rdp_epsilon(STEP, delta=1e-6, num_steps=v),
    "num_steps of delta": lambda v: rdp_delta(STEP, epsilon=1.0, num_steps=v),
    "epsilon": lambda v: rdp_delta(STEP, epsilon=v, num_steps=1),
    "orders": lambda v: jde.rdp(STEP, v),
    "orders of epsilon": lambda v: rdp_epsilon(STEP, delta=1e-6, num_steps=1, orders=v),
}
SHARE, WHOLE = r"must lie in \[0, 1\], got {}", "must be a whole number >= {} .*got {}"
NAN = "must not be NaN"
BAD = {
    "sampling_probability": {
        SHARE: (-0.1, 1.1),
        NAN: (np.nan,),
        r".*got 2.0 at index \(1,\)": ([0.1, 2.0],),
    },
    "size": {WHOLE.format(1, "{}"): (0, -3, 2.5, np.nan, np.inf)},
    "population": {WHOLE.format(1, "{}"): (0, -3, 2.5, np.nan, np.inf)},
    "noise_multiplier": {"must be >= 0, got {}": (-1.0,), NAN: (np.nan,)},
    "delta": {SHARE: (1.1, -1e-06), NAN: (np.nan,)},
    "num_steps": {
        WHOLE.format(0, "{}"): (-1, 1.5, np.nan, np.inf),
        "must be a whole number >= 0, got None": (None,),
    },
    "epsilon": {"must be >= 0, got {}": (-0.1,), NAN: (np.nan,)},
    "orders": {
        "must be > 1.*got {}": (1.0, 0.5),
        NAN: (np.nan,),
        r"must be > 1.*got 1.0 at index \(1,\)": ([2.0, 1.0],),
    },
}


def bad_inputs():
    for who in ASK:
        name = who.partition(" ")[0]
        for message, values in BAD[name].items():
            for value in values:
                yield who, value, ValueError, message.format(value)
        for value in (True, "0.1"):
            yield who, value, TypeError, f"must be a number .*got {value!r}"


class TestBadInputs:
    @pytest.mark.parametrize(("who", "value", "error", "message"), [*bad_inputs()])
    def test_invalid_numbers_are_refused(self, who, value, error, message):
        with pytest.raises(error, match=f"{who.partition(' ')[0]} {message}"):
            ASK[who](value)

    @pytest.mark.parametrize("orders", [2.0, [], [[2.0, 3.0]]])
    def test_order_grids_are_lists(self, orders):
        with pytest.raises(ValueError, match="orders must be a 1-d array"):
            rdp_epsilon(STEP, delta=1e-6, num_steps=1, orders=orders)

    def test_order_and_repetition_do_not_matter(self):
        def ask(orders):
            return rdp_epsilon(STEP, delta=1e-6, num_steps=100, orders=orders)

        assert ask([1.5, 2.5, 3.0, 9.0]) == ask([9.0, 3.0, 1.5, 2.5, 9.0])

    @pytest.mark.parametrize("field", ["clip_unit", "privacy_unit"])
    def test_unknown_level(self, field):
        message = f"{field} must be one of .*got 'usr'; did you mean 'user'"
        with pytest.raises(ValueError, match=message):
            poisson_step(0.1, 1.0, **{field: "usr"})
        with pytest.raises(TypeError, match=f"{field} must be one of .*got 1"):
            poisson_step(0.1, 1.0, **{field: 1})

    def test_unknown_choices(self):
        with pytest.raises(ValueError, match="direction must be one of .*'forwards'"):
            jde.rdp(STEP, 2.0, direction="forwards")
        with pytest.raises(ValueError, match="method must be .*'plb'; .* 'pld'"):
            rdp_epsilon(STEP, delta=1e-6, num_steps=1, method="plb")
        with pytest.raises(ValueError, match="neighboring_relation .*'add_or_remove'"):
            poisson_step(0.1, 1.0, neighboring_relation="add_or_remove")

    def test_small_units_are_refused_under_replace_one(self):
        message = "size must be at most the population, got size=12 of 10"
        with pytest.raises(ValueError, match=message):
            fixed_size_step(12, 10, 1.0, neighboring_relation="replace_one")

    def test_shapes_that_do_not_fit(self):
        with pytest.raises(ValueError, match="do not broadcast.*noise_multiplier"):
            poisson_step([0.1, 0.2], [1.0, 2.0, 3.0])
        with pytest.raises(ValueError, match="do not broadcast.*delta"):
            rdp_epsilon(poisson_step([0.1, 0.2], 1.0), delta=[0.1] * 3, num_steps=1)

    def test_other_types_than_steps_are_refused(self):
        for wrong in (None, "step", STEP.sampling):
            with pytest.raises(TypeError, match="step must be a GaussianStep"):
                jde.rdp(wrong, 2.0)


class TestOrderGrid:
    def test_warnings_for_orders_at_the_ends_of_the_grid(self):
        with pytest.warns(UserWarning, match="first or the last of `orders`"):
            rdp_epsilon(STEP, delta=1e-6, num_steps=100, orders=[2.0, 2.5, 3.0])
        with pytest.warns(UserWarning, match="first or the last of `orders`"):
            rdp_epsilon(STEP, delta=1e-6, num_steps=100, orders=[50.0, 60.0, 70.0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rdp_epsilon(STEP, delta=1e-6, num_steps=100, orders=range(2, 70))


def two_level_step(noise):
    return jde.GaussianStep(
        jde.MultistageSampling(
            jde.Poisson("group", sampling_probability=0.05),
            jde.WithoutReplacement("user", size=1, population=4),
        ),
        noise_multiplier=noise,
        clip_unit="group",
    )


class TestComposition:
    def test_rdp_adds_up(self):
        first, second = poisson_step(0.1, 1.0), two_level_step(2.0)
        run = jde.compose((first, 3), (second, 11))
        for direction in ("forward", "both"):
            parts = [
                jde.rdp(step, ORDERS, direction=direction) for step in (first, second)
            ]
            expected = 3 * parts[0] + 11 * parts[1]
            actual = jde.rdp(run, ORDERS, direction=direction)
            np.testing.assert_allclose(actual, expected, rtol=1e-11)

    def test_neither_order_nor_idle_steps_of_other_kinds_matter(self):
        second, silent = two_level_step(2.0), poisson_step(0.0, 0.0)
        bare = poisson_step(1.0, 0.0)
        orderings = [
            ((STEP, 50), (second, 200)),
            ((second, 200), (STEP, 50)),
            ((STEP, 50), (second, 200), (silent, 1000), (bare, 0)),
        ]
        values = [rdp_epsilon(jde.compose(*run), delta=1e-6) for run in orderings]
        assert values == pytest.approx([values[0]] * len(values), rel=1e-9)

    def test_a_composed_run_has_its_own_counts(self):
        run, times = jde.compose((STEP, 3)), np.array([0, 1, 4])
        several = rdp_epsilon(run, delta=1e-6, num_steps=times)
        alone = rdp_epsilon(STEP, delta=1e-6, num_steps=3 * times)
        np.testing.assert_allclose(several, alone, rtol=1e-12)
        assert rdp_epsilon(run, delta=1e-6) == several[1]
        with pytest.raises(ValueError, match="num_steps must be a whole number"):
            rdp_epsilon(run, delta=1e-6, num_steps=-1)
        with pytest.raises(ValueError, match="at least one"):
            jde.compose()
        with pytest.raises(TypeError, match="pairs"):
            jde.compose(STEP)
        with pytest.raises(ValueError, match="count must be a whole number >= 0"):
            jde.compose((STEP, -1))

    def test_the_same_step_twice(self):
        run = jde.compose((STEP, 120), (STEP, 80))
        at_once = rdp_epsilon(STEP, delta=1e-6, num_steps=200)
        assert rdp_epsilon(run, delta=1e-6) == pytest.approx(at_once, rel=1e-9)
        at_once = rdp_delta(STEP, epsilon=1.3, num_steps=200)
        assert rdp_delta(run, epsilon=1.3) == pytest.approx(at_once, rel=1e-9)

    def test_counts_broadcast(self):
        other = fixed_size_step(1, 50, 3.0)
        run = jde.compose((STEP, np.array([0, 10, 20])), (other, 5))
        values = rdp_epsilon(run, delta=1e-6)
        alone = rdp_epsilon(other, delta=1e-6, num_steps=5)
        assert values[0] == pytest.approx(alone, rel=1e-9)
        for value, count in zip(values, (0, 10, 20), strict=True):
            alone = rdp_epsilon(jde.compose((STEP, count), (other, 5)), delta=1e-6)
            assert value == pytest.approx(alone, rel=1e-9)


class TestBatches:
    def test_a_grid_equals_its_scalars(self):
        rates, noises = np.array([1e-6, 0.01, 0.5, 1.0]), np.array([0.3, 1.0, 40.0])
        deltas = np.array([1e-12, 1e-5])
        step = poisson_step(rates[:, None, None], noises[:, None])
        epsilons = rdp_epsilon(step, delta=deltas, num_steps=100)
        back = rdp_delta(step, epsilon=0.7, num_steps=100)
        assert epsilons.shape == (4, 3, 2)
        assert back.shape == (4, 3, 1)
        curves = jde.rdp(step, ORDERS)
        assert curves.shape == (4, 3, 1, len(ORDERS))
        for i, j in np.ndindex(4, 3):
            one = poisson_step(rates[i], noises[j])
            for k, delta in enumerate(deltas):
                alone = rdp_epsilon(one, delta=delta, num_steps=100)
                assert isinstance(alone, np.float64)
                assert epsilons[i, j, k] == pytest.approx(alone, rel=1e-9)
            alone = rdp_delta(one, epsilon=0.7, num_steps=100)
            assert back[i, j, 0] == pytest.approx(alone, rel=1e-8, abs=1e-300)
            np.testing.assert_allclose(
                curves[i, j, 0], jde.rdp(one, ORDERS), rtol=ROUNDING
            )

    def test_delta_inverts_epsilon(self):
        step = poisson_step([[1e-4], [0.05], [1.0]], [0.6, 1.0, 15.0])
        epsilons = rdp_epsilon(step, delta=1e-7, num_steps=500)
        deltas = rdp_delta(step, epsilon=epsilons, num_steps=500)
        # log(delta) at a fixed order moves by alpha - 1 for each nat of epsilon.
        np.testing.assert_allclose(np.log(deltas), math.log(1e-7), rtol=1e-3)

    def test_the_worst_path_of_a_population(self):
        # The first group is rarely drawn but all of its users are, the second vice
        # versa:
        # neither the product of the rates nor one level alone decides.
        population = jde.Population.from_sizes([3, 40], level_names=("group", "user"))
        sampling = jde.MultistageSampling(
            jde.Poisson("group", sampling_probability=0.1),
            jde.WithoutReplacement("user", size=3),
        )
        step = jde.GaussianStep(
            sampling, noise_multiplier=1.0, clip_unit="group", population=population
        )
        alone = []
        for size in (3, 40):
            one_path = jde.MultistageSampling(
                jde.Poisson("group", sampling_probability=0.1),
                jde.WithoutReplacement("user", size=3, population=size),
            )
            one = jde.GaussianStep(one_path, noise_multiplier=1.0, clip_unit="group")
            alone.append(rdp_epsilon(one, delta=1e-6, num_steps=50))
        worst = rdp_epsilon(step, delta=1e-6, num_steps=50)
        assert worst == pytest.approx(max(alone), rel=1e-9)

    def test_shapes_and_types(self):
        step = poisson_step(np.full((2, 1), 0.01), np.array([1.0, 2.0, 3.0]))
        assert jde.rdp(step, [2, 3, 4, 5]).shape == (2, 3, 4)
        assert jde.rdp(step, 2).shape == (2, 3)
        assert isinstance(jde.rdp(STEP, 2), np.float64)
        grid = rdp_epsilon(step, num_steps=[[[1]], [[9]]], delta=1e-5)
        assert grid.shape == (2, 2, 3)
        assert grid.dtype == np.float64

    def test_the_worst_path_is_not_that_of_the_largest_inclusion(self):
        """(outer, p) = (0.1, 0.2) is drawn more often, (0.015, 1) costs more."""

        def delta_of(outer, size):
            levels = jde.MultistageSampling(
                jde.Poisson("task", sampling_probability=outer),
                jde.WithoutReplacement("example", size=size, population=100),
            )
            step = jde.GaussianStep(
                levels,
                noise_multiplier=2.0,
                clip_unit="example",
                neighboring_relation="replace_one",
            )
            return jde.privacy_profile(step, 1.0)

        assert delta_of(0.1, 20) == pytest.approx(2.3e-4, rel=0.02)
        assert delta_of(0.015, 100) == pytest.approx(1.9e-3, rel=0.02)
