"""Epsilon, delta and RDP against published tables, closed forms and the oracles."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest

import jaxdp_episodic as jde
from designs import poisson, sampled, step as multistage
from oracles import moments

# These tests are about the Rényi bounds.
rdp_epsilon = functools.partial(jde.epsilon, method="rdp")
rdp_delta = functools.partial(jde.delta, method="rdp")

TABLES = json.loads((Path(__file__).parents[2] / "reference.json").read_text())
ROUNDING = 1e-12
ORDERS = np.array([1 + 1e-6, 1.25, 2.0, 7.5, 64.0, 4096.0])


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
            step = sampled(row["sampling_probability"], row["noise_multiplier"])
            actual = jde.rdp(step, row["alpha"], direction=direction)
            expected = float(row[f"rdp_{direction}"])
            assert actual == pytest.approx(expected, rel=1e-9, abs=0), row

    @pytest.mark.parametrize("row", TABLES["published"]["rdp_per_step"])
    def test_published_rdp(self, row):
        step = sampled(row["sampling_probability"], row["noise_multiplier"])
        orders = np.array(row["orders"], float)
        actual = row["num_steps"] * jde.rdp(step, orders)
        published = np.array(row["rdp"])
        whole = orders == np.floor(orders)
        np.testing.assert_allclose(actual[whole], published[whole], rtol=row["rtol"])
        # Between integer orders theirs are upper bounds.
        assert np.all(actual <= published * (1 + row["rtol"]))

    @pytest.mark.parametrize("kind", ["epsilon_rdp", "epsilon_tight"])
    def test_published_epsilons(self, kind):
        for row in TABLES["published"][kind]:
            step = sampled(row["sampling_probability"], row["noise_multiplier"])
            found = rdp_epsilon(step, delta=row["delta"], num_steps=row["num_steps"])
            if kind == "epsilon_rdp":
                assert 0.98 * row["epsilon"] <= found <= row["epsilon"] + 1e-4, row
            else:
                assert found >= row["epsilon"] - row.get("atol", 0.0), row

    @pytest.mark.parametrize("row", TABLES["multistage_epsilon"])
    def test_multistage_epsilon(self, row):
        """The table has the tight epsilon, rounded to nine digits."""
        step, tight = table_step(row), row["epsilon"]
        run = {"num_steps": row["num_steps"], "delta": row["delta"]}
        assert tight - 1e-8 <= rdp_epsilon(step, **run) <= 1.65 * tight
        found, info = jde.epsilon(step, **run, return_info=True)
        assert not info.is_certified_bound and info.error <= 1e-6 * found
        assert found == pytest.approx(tight, rel=1e-7)


FULL_PARTICIPATION = [
    (sampled(1.0, 1.5), 1.0),
    (sampled(1.0, 1.5, neighboring_relation="replace_one"), 2.0),
    (fixed_size_step(10, 10, 1.5, exact=True), 1.0),
    # A lower bound on the population does not show that everybody is drawn.
    (fixed_size_step(12, 10, 1.5), 2.0),
    (sampled(1.0, 1.5, clip_unit="step"), 2.0),
]


@pytest.mark.parametrize(("step", "sensitivity"), FULL_PARTICIPATION)
def test_rdp_at_rate_one_is_the_gaussian_mechanisms(step, sensitivity):
    for noise in (1e-6, 1.5, 1e6):
        step = dataclasses.replace(step, noise_multiplier=noise)
        expected = gaussian_rdp(sensitivity, noise)(ORDERS)
        np.testing.assert_allclose(jde.rdp(step, ORDERS), expected, rtol=1e-10)


SILENT = {
    "rate 0 without noise": sampled(0.0, 0.0),
    "infinite noise": sampled(0.3, np.inf),
    "rate 0 above the clip level": multistage(
        1.0, poisson("group", 0.0), poisson("user", 0.5), clip="user"
    ),
    "rate 0 below the clip level": multistage(
        1.0, poisson("group", 0.5), poisson("user", 0.0), clip="group"
    ),
}


class TestEnds:
    @pytest.mark.parametrize("step", SILENT.values(), ids=SILENT)
    def test_runs_without_loss(self, step):
        for direction in ("forward", "backward", "both"):
            np.testing.assert_array_equal(jde.rdp(step, ORDERS, direction=direction), 0)
        assert rdp_epsilon(step, delta=1e-6, num_steps=100) == 0
        assert rdp_epsilon(step, delta=1e-6, num_steps=100, orders=[2.0, 3.0]) == 0
        assert rdp_delta(step, epsilon=0.0, num_steps=100) == 0
        assert jde.privacy_profile(step, 0.0) == 0

    def test_extremes_in_a_grid_do_not_affect_other_settings(self):
        rates, noises = np.array([0.0, 0.1, 1.0])[:, None], [0.0, 1.0, np.inf]
        step = sampled(rates, noises)
        assert np.all(rdp_delta(step, epsilon=3.0, num_steps=1)[1:, 0] == 1)
        np.testing.assert_array_equal(rdp_epsilon(step, delta=1e-6, num_steps=0), 0)
        values = rdp_epsilon(step, delta=1e-6, num_steps=3)
        assert values.shape == (3, 3)
        assert np.all(values[0] == 0) and np.all(values[:, 2] == 0)
        assert np.all(np.isposinf(values[1:, 0]))
        for row, rate in ((1, 0.1), (2, 1.0)):
            alone = rdp_epsilon(sampled(rate, 1.0), delta=1e-6, num_steps=3)
            assert values[row, 1] == pytest.approx(alone, rel=ROUNDING)

    @pytest.mark.parametrize("delta", [1e-12, 1e-300])
    @pytest.mark.parametrize("noise", [0.7, 40.0])
    def test_tiny_delta(self, delta, noise):
        actual = rdp_epsilon(sampled(1.0, noise), delta=delta, num_steps=3)
        expected = moments.rdp_to_epsilon(
            lambda alpha: 3 * gaussian_rdp(1, noise)(alpha), delta
        )
        assert actual == pytest.approx(expected, rel=1e-8)
        step = sampled(0.01, noise)
        actual = rdp_epsilon(step, delta=delta, num_steps=3)
        assert 0 < actual < expected
        assert rdp_delta(step, epsilon=actual, num_steps=3) == pytest.approx(
            delta, rel=1e-4
        )

    def test_empty_grids(self):
        none = np.zeros(0)
        step = sampled(0.1, 1.0)
        assert jde.rdp(sampled(none, 1.0), [2.0, 3.0]).shape == (0, 2)
        assert rdp_epsilon(step, delta=1e-6, num_steps=none).shape == (0,)
        grid = sampled(np.zeros((2, 1)), none)
        on_orders = rdp_epsilon(grid, delta=1e-6, num_steps=1, orders=[2.0, 3.0])
        assert on_orders.shape == rdp_delta(grid, epsilon=1.0, num_steps=1).shape
        assert on_orders.shape == (2, 0) and on_orders.dtype == np.float64
        assert jde.privacy_profile(step, none).shape == (0,)


STEP = sampled(0.1, 1.0)
RUN = {"delta": 1e-6, "num_steps": 1}
SHARES = r"must lie in \[0, 1\], got"
INVALID = [
    (lambda: sampled(1.1, 1.0), f"sampling_probability {SHARES} 1.1"),
    (lambda: sampled(np.nan, 1.0), "sampling_probability must not be NaN"),
    (lambda: fixed_size_step(2.5, 9, 1.0), "size must be a whole number >= 1.*got 2.5"),
    (lambda: sampled(0.1, -1.0), "noise_multiplier must be >= 0, got -1.0"),
    (lambda: sampled(0.1, np.nan), "noise_multiplier must not be NaN"),
    (lambda: ask(delta=-1e-6), f"delta {SHARES} -1e-06"),
    (lambda: ask(delta=np.nan), "delta must not be NaN"),
    (lambda: ask(num_steps=1.5), "num_steps must be a whole number >= 0.*got 1.5"),
    (lambda: ask(num_steps=None), "num_steps must be a whole number >= 0, got None"),
    (lambda: rdp_delta(STEP, epsilon=-0.1, num_steps=1), "epsilon must be >= 0"),
    (lambda: rdp_delta(STEP, epsilon=np.nan, num_steps=1), "epsilon must not be NaN"),
    (lambda: ask(orders=[2.0, 1.0]), "orders must be > 1.*got 1.0 at index"),
    (lambda: ask(orders=[np.nan]), "orders must not be NaN"),
    (lambda: ask(orders=[[2.0, 3.0]]), "orders must be a 1-d array"),
    (lambda: jde.rdp(STEP, 1.0), "orders must be > 1, got 1.0"),
    (lambda: jde.rdp(STEP, 2.0, direction="x"), "direction must be one of .*got 'x'"),
    (lambda: ask(method="plb"), "method must be .*'plb'; .* 'pld'"),
    (lambda: ask(engine="cuda"), "engine must be one of .*got 'cuda'"),
    (
        lambda: sampled(0.1, 1.0, neighboring_relation="add_or_remove"),
        "neighboring_relation .*'add_or_remove'",
    ),
    (
        lambda: sampled(0.1, 1.0, clip_unit="usr"),
        "clip_unit must be one of .*got 'usr'; did you mean 'user'",
    ),
    (lambda: sampled(0.1, 1.0, privacy_unit="usr"), "privacy_unit must be one of"),
    (
        lambda: fixed_size_step(12, 10, 1.0, neighboring_relation="replace_one"),
        "size must be at most the population, got size=12 of 10",
    ),
    (lambda: sampled([0.1, 0.2], np.ones(3)), "do not broadcast.*noise_mult"),
    (lambda: ask(num_steps=[1, 2], delta=[0.1] * 3), "do not broadcast.*delta"),
    (lambda: jde.compose(), "at least one"),
    (lambda: jde.compose((STEP, -1)), r"counts\[0\] must be a whole number >= 0"),
    (lambda: ask(jde.compose((STEP, 3)), num_steps=-1), "num_steps must be a whole"),
    (lambda: jde.compose(STEP), "pairs"),
    (lambda: ask(STEP.sampling), "step must be a GaussianStep"),
    (lambda: ask(delta="0.1"), "delta must be a number .*got '0.1'"),
    (lambda: ask(orders=True), "orders must be a number .*got True"),
    (lambda: ask(engine=3), "engine must be a name or None, got 3"),
    (lambda: sampled(0.1, 1.0, clip_unit=1), "clip_unit must be one of .*got 1"),
]


def ask(step=STEP, **changed):
    return rdp_epsilon(step, **{**RUN, **changed})


@pytest.mark.parametrize(("call", "message"), INVALID, ids=range(len(INVALID)))
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_orders_at_the_ends_of_the_grid_are_warned_of():
    for orders in ([2.0, 2.5, 3.0], [50.0, 60.0, 70.0]):
        with pytest.warns(UserWarning, match="first or the last of `orders`"):
            ask(num_steps=100, orders=orders)
    ask(num_steps=100, orders=range(2, 70))


NESTED = multistage(
    2.0,
    poisson("group", 0.05),
    jde.WithoutReplacement("user", size=1, population=4),
    clip="group",
)


class TestComposition:
    def test_rdp_adds_up(self):
        first, second = STEP, NESTED
        run = jde.compose((first, 3), (second, 11))
        for direction in ("forward", "both"):
            one, other, actual = (
                jde.rdp(step, ORDERS, direction=direction)
                for step in (first, second, run)
            )
            np.testing.assert_allclose(actual, 3 * one + 11 * other, rtol=1e-11)

    def test_neither_order_nor_idle_steps_of_other_kinds_matter(self):
        second, silent, bare = NESTED, sampled(0.0, 0.0), sampled(1.0, 0.0)
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


class TestBatches:
    def test_a_grid_equals_its_scalars(self):
        rates, noises = np.array([1e-6, 0.01, 0.5, 1.0]), np.array([0.3, 1.0, 40.0])
        deltas = np.array([1e-12, 1e-5])
        step = sampled(rates[:, None, None], noises[:, None])
        epsilons = rdp_epsilon(step, delta=deltas, num_steps=100)
        back = rdp_delta(step, epsilon=0.7, num_steps=100)
        assert (epsilons.shape, back.shape) == ((4, 3, 2), (4, 3, 1))
        curves = jde.rdp(step, ORDERS)
        assert curves.shape == (4, 3, 1, len(ORDERS))
        for i, j in np.ndindex(4, 3):
            one = sampled(rates[i], noises[j])
            for k, delta in enumerate(deltas):
                alone = rdp_epsilon(one, delta=delta, num_steps=100)
                assert isinstance(alone, np.float64)
                assert epsilons[i, j, k] == pytest.approx(alone, rel=1e-9)
            alone = rdp_delta(one, epsilon=0.7, num_steps=100)
            assert back[i, j, 0] == pytest.approx(alone, rel=1e-8, abs=1e-300)
            curve = jde.rdp(one, ORDERS)
            np.testing.assert_allclose(curves[i, j, 0], curve, rtol=ROUNDING)


# --- The ends of targets, and engines ---


NEVER, BARE = sampled(0.0, 1.0), sampled(0.1, 0.0)
LAPLACE = jde.LaplaceRelease(2.0)
PART = jde.ApproximateDP(0.3, 1e-7)


@pytest.mark.parametrize("method", ["exact", "pld", "rdp"])
def test_ends_of_targets(method):
    def epsilons(step, steps):
        deltas = [0.0, 1e-5, 1.0]
        return jde.epsilon(step, delta=deltas, num_steps=steps, method=method)

    assert epsilons(STEP, 10)[0] == np.inf > epsilons(STEP, 10)[1] > 0
    np.testing.assert_array_equal(epsilons(BARE, 10), [np.inf, np.inf, 0])
    for step, steps in ((NEVER, 10), (STEP, 0), (jde.ApproximateDP(0.0), 3)):
        np.testing.assert_array_equal(epsilons(step, steps), 0)
    np.testing.assert_array_equal(epsilons(PART, 10)[::2], [np.inf, 0])
    for step, largest in ((LAPLACE, 5.0), (jde.ApproximateDP(0.3), 3.0)):
        np.testing.assert_allclose(epsilons(step, 10)[::2], [largest, 0], rtol=2e-12)

    def delta(step, epsilon, steps=10):
        return jde.delta(step, epsilon=epsilon, num_steps=steps, method=method)

    assert delta(STEP, np.inf) == delta(BARE, np.inf, 0) == delta(LAPLACE, np.inf) == 0
    assert delta(BARE, np.inf) == delta(BARE, 1.0) == 1
    assert 0 <= delta(PART, np.inf) + np.expm1(10 * np.log1p(-1e-7)) <= 1e-12
    for step, steps in ((NEVER, 10), (STEP, 0), (jde.ApproximateDP(0.0), 3)):
        assert delta(step, 0.0, steps) == delta(step, 2.0, steps) == 0
    assert delta(LAPLACE, 5.1) == 0


def test_intervals_at_the_ends():
    lower, upper = jde.epsilon_interval(STEP, delta=[0, 1e-5, 1], num_steps=10)
    np.testing.assert_array_equal([lower[::2], upper[::2]], [[np.inf, 0]] * 2)
    assert 0 < lower[1] < upper[1]
    lower, upper = jde.epsilon_interval(LAPLACE, delta=0.0, num_steps=10)
    assert lower == 0 and upper == pytest.approx(5.0)
    for step, known in ((STEP, 0), (BARE, 1), (LAPLACE, 0)):
        assert jde.delta_interval(step, epsilon=np.inf, num_steps=3) == (known, known)
    # A failure counts once beside epochs, whose pairs fail, too.
    bins = jde.RandomAllocation("a", steps_per_epoch=4)
    epochs = jde.GaussianStep(bins, noise_multiplier=1.0), 4
    ends = jde.delta_interval(jde.compose(epochs), epsilon=1.0)
    run = jde.compose(epochs, (jde.ApproximateDP(0.0, 0.01), 3))
    found = 1 - (1 - np.array(jde.delta_interval(run, epsilon=1.0))) / 0.99**3
    np.testing.assert_allclose(found, ends, rtol=1e-9)


def test_order_infinity_is_the_largest_loss():
    backward = jde.rdp(STEP, np.inf, direction="backward")
    assert backward == pytest.approx(-np.log1p(-0.1), rel=2e-12)
    assert np.isinf([jde.rdp(STEP, np.inf), jde.rdp(BARE, np.inf)]).all()
    assert jde.rdp(LAPLACE, [2.0, np.inf]).shape == (2,) and jde.rdp(NEVER, np.inf) == 0


@pytest.mark.parametrize("epsilons", [(1.0, 2.0), (0.3, 0.3, 0.3), (2.0, 0.5, 0.5)])
@pytest.mark.parametrize("gap", [0.0, 1e-9, 0.1])
def test_pure_dp_up_to_its_largest_loss(epsilons, gap):
    run = jde.compose(*((jde.ApproximateDP(e), 1) for e in epsilons))
    # With any other sign the loss is below epsilon.
    truth = math.prod(1 / (1 + math.exp(-e)) for e in epsilons) * -math.expm1(-gap)
    value = jde.delta(run, epsilon=sum(epsilons) - gap, method="rdp")
    assert truth * (1 - 1e-6) <= value <= truth * (1 + 1e-6) + 1e-11


def test_laplace_and_failures_near_the_end():
    """Values of dp-accounting's tests."""
    run = jde.compose((jde.LaplaceRelease(1.0), 3), (jde.LaplaceRelease(2.0), 2))
    assert 0 <= jde.delta(run, epsilon=4.0, method="rdp") < 1e-11
    drawn = jde.LaplaceRelease(0.5, sampling_probability=0.2)
    most = 3 * math.log1p(0.2 * math.expm1(2.0))
    gap = np.array([1e-9, 1e-6])
    # All three draws are on one side; the largest loss is less by the gap.
    beyond = (0.8 * math.exp(-2) + 0.2) / 2
    value = jde.delta(drawn, epsilon=most - gap, num_steps=3, method="rdp")
    assert np.all(value <= gap * beyond**3 * 1.01 + 1e-14)
    one, two = jde.ApproximateDP(1.0, 0.1), jde.ApproximateDP(2.0, 0.2)
    failing = jde.compose((one, 1), (two, 1))
    assert 0.28 <= jde.delta(failing, epsilon=3.0, method="rdp") < 0.28 + 1e-11


def test_a_setting_without_loss_does_not_affect_others():
    # Gaussian losses are unbounded: delta near 1 was called a certified bound.
    step = sampled(0.5, 2.0)
    asked = {"epsilon": 5.0, "return_info": True, "engine": "numpy"}
    alone, info = jde.delta(step, num_steps=10_000, **asked)
    both, infos = jde.delta(step, num_steps=[10_000, 0], **asked)
    assert both.tolist() == [alone, 0.0]
    assert not info.is_certified_bound
    assert infos.is_certified_bound.tolist() == [False, False]


def test_the_backward_direction_is_asked_where_it_is_the_larger_one():
    relation = {"neighboring_relation": "zero_out"}
    answers = jde.RandomizedResponse(noise_parameter=0.5, num_buckets=2, **relation)
    run = jde.compose((answers, 2), (sampled(0.9, 4.0, **relation), 1))
    x = np.linspace(-12, 12, 20_001)
    q = 0.0012 / 16 * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    p = np.outer([9, 3, 3, 1], q * (0.1 + 0.9 * np.exp(x / 4 - 1 / 32)))
    delta = np.maximum(4 * q - math.e * p, 0.0).sum()
    assert jde.epsilon(run, delta=delta) == pytest.approx(1.0, rel=1e-5)
