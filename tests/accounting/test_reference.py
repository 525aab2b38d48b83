"""Reference and published figures, and the edges, through the public API."""

import functools
import json
import threading
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.bounds.mechanisms import Gaussian
from jaxdp_episodic.bounds.subsampled_rdp import rdp_poisson_subsampled
from oracles import moments as oracle

# The bounds by Rényi-DP are what these tests are about.
rdp_epsilon = functools.partial(jde.epsilon, method="rdp")
rdp_delta = functools.partial(jde.delta, method="rdp")

TABLES = json.loads((Path(__file__).parent.parent / "reference.json").read_text())
PUBLISHED = TABLES["published"]


def poisson(rate):
    return jde.Poisson("example", sampling_probability=rate)


def sampled(rate, noise, relation="add_remove"):
    return jde.GaussianStep(
        poisson(rate), noise_multiplier=noise, neighboring_relation=relation
    )


def table_step(row):
    """The step of a row of `multistage_epsilon`."""
    levels, clip = [], None
    for i, level in enumerate(row["levels"]):
        name = f"level{i}"
        if level["scheme"] == "poisson":
            levels.append(jde.Poisson(name, sampling_probability=level["rate"]))
        else:
            size = round(level["rate"] * 1000)
            levels.append(jde.WithoutReplacement(name, size=size, population=1000))
        clip = name if level["clipped"] else clip
    return jde.GaussianStep(
        jde.MultistageSampling(*levels),
        noise_multiplier=row["noise_multiplier"],
        clip_unit=clip,
        neighboring_relation=row["neighboring_relation"],
    )


def test_every_reference_rdp_row_in_both_directions():
    rows = TABLES["sampled_gaussian_rdp"]
    assert len(rows) == 42
    for row in rows:
        step = sampled(row["sampling_probability"], row["noise_multiplier"])
        for direction in ("forward", "backward"):
            found = jde.rdp(step, row["alpha"], direction=direction)
            assert found == pytest.approx(float(row[f"rdp_{direction}"]), rel=1e-9)


@pytest.mark.parametrize("alpha", [1 + 1e-6, 1.5, 2, 7.3, 33.5, 4096])
@pytest.mark.parametrize("noise", [0.7, 3.0])
def test_rdp_at_rate_1e_12(alpha, noise):
    found = jde.rdp(sampled(1e-12, noise), alpha, direction="forward")
    lm1 = oracle.fine_sampled_gaussian(1e-12, 1 / noise, alpha, direction="forward")
    truth = oracle.rdp_from_log_moment(lm1, alpha)
    assert found == pytest.approx(float(truth), rel=1e-9)


@pytest.mark.parametrize("rate", [1e-8, 0.01, 0.4, 1 - 1e-9])
@pytest.mark.parametrize("noise", [0.5, 1.0, 6.0])
def test_the_quadrature_is_the_series_at_integer_orders(rate, noise):
    orders = np.concatenate([np.arange(2, 65), [128, 255, 1024]])
    series = rdp_poisson_subsampled(
        Gaussian(noise), sampling_probability=rate, orders=orders, bound="tight"
    )
    found = jde.rdp(sampled(rate, noise), orders, direction="forward")
    np.testing.assert_allclose(found, series, rtol=1e-10)


@pytest.mark.parametrize("row", PUBLISHED["rdp_per_step"])
def test_published_rdp(row):
    step = sampled(row["sampling_probability"], row["noise_multiplier"])
    found = row["num_steps"] * jde.rdp(step, row["orders"])
    theirs = np.array(row["rdp"])
    whole = np.array(row["orders"]) % 1 == 0
    np.testing.assert_allclose(found[whole], theirs[whole], rtol=row["rtol"])
    assert np.all(found[~whole] <= theirs[~whole] * (1 + row["rtol"]))


@pytest.mark.parametrize("row", PUBLISHED["epsilon_rdp"])
def test_published_epsilons(row):
    step = sampled(row["sampling_probability"], row["noise_multiplier"])
    found = rdp_epsilon(step, num_steps=row["num_steps"], delta=row["delta"])
    assert 0.98 * row["epsilon"] <= found <= row["epsilon"] + 1e-4


@pytest.mark.parametrize("row", PUBLISHED["epsilon_tight"])
def test_rdp_is_above_published_tight_epsilons(row):
    step = sampled(row["sampling_probability"], row["noise_multiplier"])
    found = rdp_epsilon(step, num_steps=row["num_steps"], delta=row["delta"])
    assert found >= row["epsilon"] - row["atol"]


@pytest.mark.parametrize("row", TABLES["multistage_epsilon"])
def test_multistage_rows_are_bounded_and_not_loose(row):
    found = rdp_epsilon(table_step(row), num_steps=row["num_steps"], delta=row["delta"])
    assert row["epsilon"] <= found <= 1.65 * row["epsilon"]


def gaussian_rdp(alpha, shift):
    return alpha * shift**2 / 2


@pytest.mark.parametrize("noise", [1e-6, 0.5, 2.0, 1e6])
@pytest.mark.parametrize("alpha", [1 + 1e-6, 2, 4096])
def test_rate_one_is_the_gaussian_mechanism(noise, alpha):
    full = jde.WithoutReplacement("e", size=7, population=7)
    exact = jde.WithoutReplacement("e", size=7, population=7, population_is_exact=True)
    cases = [
        (poisson(1.0), "add_remove", 1),
        (exact, "add_remove", 1),
        (full, "add_remove", 2),
        (poisson(1.0), "replace_one", 2),
        (exact, "replace_one", 2),
    ]
    for sampling, relation, sensitivity in cases:
        step = jde.GaussianStep(
            sampling, noise_multiplier=noise, neighboring_relation=relation
        )
        expected = gaussian_rdp(alpha, sensitivity / noise)
        assert jde.rdp(step, alpha) == pytest.approx(expected, rel=1e-10)


def test_edges_of_epsilon():
    step = sampled(0.01, 1.0)
    run = {"num_steps": 100, "delta": 1e-5}
    assert rdp_epsilon(sampled(0.0, 1.0), **run) == 0
    assert rdp_epsilon(sampled(0.0, 0.0), **run) == 0
    assert rdp_epsilon(sampled(0.01, 0.0), **run) == np.inf
    assert rdp_epsilon(sampled(0.01, np.inf), **run) == 0
    assert rdp_epsilon(step, num_steps=0, delta=1e-5) == 0
    assert rdp_delta(sampled(0.01, 0.0), num_steps=1, epsilon=1.0) == 1
    assert rdp_delta(sampled(0.0, 1.0), num_steps=1, epsilon=1.0) == 0
    assert 0 < rdp_epsilon(step, num_steps=10**7, delta=1e-12) < np.inf
    assert 0 < rdp_epsilon(step, num_steps=1, delta=1e-300) < np.inf
    assert rdp_epsilon(sampled(np.ones((0, 3)), 1.0), **run).shape == (0, 3)
    assert jde.rdp(step, []).shape == (0,)


def test_shapes_and_types():
    step = sampled(np.full((2, 1), 0.01), np.array([1.0, 2.0, 3.0]))
    assert jde.rdp(step, [2, 3, 4, 5]).shape == (2, 3, 4)
    assert jde.rdp(step, 2).shape == (2, 3)
    assert isinstance(jde.rdp(sampled(0.1, 1.0), 2), np.float64)
    assert isinstance(rdp_epsilon(sampled(0.1, 1.0), num_steps=1, delta=0.1), float)
    grid = rdp_epsilon(step, num_steps=[[[1]], [[9]]], delta=1e-5)
    assert grid.shape == (2, 2, 3)
    assert grid.dtype == np.float64


@pytest.mark.parametrize("size", [1, 8, 9, 64, 65, 513, 1030])
def test_a_batch_gives_what_scalars_give(size):
    rng = np.random.default_rng(3)
    rate, noise = 10 ** rng.uniform(-4, -0.5, size), rng.uniform(0.5, 5, size)
    batch = rdp_epsilon(sampled(rate, noise), num_steps=300, delta=1e-6)
    for i in {0, size // 2, size - 1}:
        one = rdp_epsilon(sampled(rate[i], noise[i]), num_steps=300, delta=1e-6)
        assert one == pytest.approx(batch[i], rel=1e-12)


def test_composition_adds_up():
    a, b = sampled(0.01, 1.0), sampled(0.02, 2.0)
    both = jde.compose((a, 300), (b, 200))
    orders = np.array([1.5, 2, 8, 40])
    once = jde.rdp(jde.compose((a, 1), (b, 1)), orders)
    np.testing.assert_allclose(once, jde.rdp(a, orders) + jde.rdp(b, orders))
    split = rdp_epsilon(jde.compose((a, 100), (a, 200)), delta=1e-5)
    whole = rdp_epsilon(a, num_steps=300, delta=1e-5)
    assert split == pytest.approx(whole, rel=1e-9)
    assert rdp_epsilon(both, delta=1e-5) > whole


def test_delta_inverts_epsilon():
    rng = np.random.default_rng(4)
    step = sampled(10 ** rng.uniform(-3, -0.5, 50), rng.uniform(0.6, 4, 50))
    epsilon = rdp_epsilon(step, num_steps=500, delta=1e-6)
    found = rdp_delta(step, num_steps=500, epsilon=epsilon)
    np.testing.assert_allclose(found, 1e-6, rtol=1e-2)


def test_the_search_is_near_the_best_order():
    rng = np.random.default_rng(5)
    rate, noise = 10 ** rng.uniform(-4, -0.5, 100), 10 ** rng.uniform(-0.3, 0.9, 100)
    steps = np.rint(10 ** rng.uniform(0, 6, 100))
    step, run = sampled(rate, noise), {"num_steps": steps, "delta": 1e-5}
    found = rdp_epsilon(step, **run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some best orders are at the grid's end
        best = rdp_epsilon(step, orders=1 + np.geomspace(1e-4, 1e5, 3000), **run)
    assert np.all(found <= best * (1 + 5e-3))
    assert np.mean(found <= best * (1 + 1e-5)) > 0.97


def test_epsilon_is_monotone_on_a_grid():
    rate = np.geomspace(1e-4, 0.3, 40)[:, None]
    noise = np.geomspace(0.5, 8, 50)
    grid = rdp_epsilon(sampled(rate, noise), num_steps=1000, delta=1e-5)
    assert np.all(np.diff(grid, axis=0) >= -5e-3 * grid[1:])
    assert np.all(np.diff(grid, axis=1) <= 5e-3 * grid[:, 1:])


def test_the_worst_path_is_not_that_of_the_largest_inclusion():
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


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: sampled(1.3, 1.0), ValueError, "sampling_probability.*1.3"),
        (lambda: sampled(True, 1.0), TypeError, "sampling_probability"),
        (lambda: sampled("0.1", 1.0), TypeError, "sampling_probability.*0.1"),
        (lambda: sampled(np.nan, 1.0), ValueError, "sampling_probability.*NaN"),
        (lambda: sampled(0.1, -1.0), ValueError, "noise_multiplier.*-1"),
        (
            lambda: jde.WithoutReplacement("e", size=2.5, population=9),
            ValueError,
            "size.*2.5",
        ),
        (
            lambda: jde.GaussianStep(poisson(0.1), noise_multiplier=1, clip_unit="x"),
            ValueError,
            "clip_unit.*'x'",
        ),
        (lambda: jde.rdp(sampled(0.1, 1), 1.0), ValueError, "orders.*1.0"),
        (
            lambda: rdp_epsilon(sampled(0.1, 1), num_steps=1, delta=1.0),
            ValueError,
            "delta.*1.0",
        ),
        (
            lambda: rdp_epsilon(sampled(0.1, 1), num_steps=-1, delta=0.1),
            ValueError,
            "num_steps.*-1",
        ),
        (
            lambda: rdp_epsilon(sampled(0.1, 1), num_steps=1, delta=0.1, orders=[]),
            ValueError,
            "orders",
        ),
        (
            lambda: rdp_epsilon(sampled(0.1, 1), num_steps=1, delta=0.1, method="plb"),
            ValueError,
            "did you mean 'pld'",
        ),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_grid_of_orders_that_is_too_short_warns():
    with pytest.warns(UserWarning, match="first or the last"):
        rdp_epsilon(sampled(0.01, 1.0), num_steps=1000, delta=1e-5, orders=[2, 3])


def test_x64_is_neither_needed_nor_touched():
    step = sampled(np.geomspace(1e-12, 0.5, 20), 1.3)
    results = {}

    def answer(name, flag):
        with jax.enable_x64(flag):
            results[name] = rdp_epsilon(step, num_steps=1000, delta=1e-5)
            assert jax.config.read("jax_enable_x64") is flag

    answer("off", False)
    answer("on", True)
    thread = threading.Thread(target=answer, args=("thread", False))
    thread.start()
    thread.join()
    for result in results.values():
        assert result.dtype == np.float64
        np.testing.assert_array_equal(result, results["off"])
    assert len(results) == 3
