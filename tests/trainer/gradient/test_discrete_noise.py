"""The hardened noise: whole numbers from the clipped contribution to the release."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxdp_episodic.accountant.numerics.discrete_gaussian import (
    covering_variance,
    sample_discrete_gaussian,
)
from jaxdp_episodic.accountant.questions.budget import BudgetExhaustedError
from jaxdp_episodic.trainer.config.training_config import TrainingConfig, read_config
from jaxdp_episodic.trainer.draw.generators import generator
from jaxdp_episodic.trainer.gradient import discrete_noise
from jaxdp_episodic.trainer.gradient.discrete_noise import (
    GRID,
    MOST_ROWS,
    MOST_UNITS,
    on_grid,
    steps_in_norm,
)
from jaxdp_episodic.trainer.gradient.private_gradient import PrivateGradient
from jaxdp_episodic.trainer.run.description import RunMismatchError
from training_runs import KEY, assert_same, noised, plain_trainer, trainer

ROOT = Path(__file__).resolve().parents[3]


@jax.jit
def added(contribution, clip):
    """What a step adds to its sum."""
    numbers, fits = on_grid(contribution, clip)
    return jax.tree.map(lambda x: jnp.where(fits, x, 0.0).astype(jnp.int32), numbers)


class Rows(NamedTuple):
    data: Any
    unit_mask: Any


def linear_loss(params, unit):
    """Its gradient is the row itself."""
    return jnp.vdot(params, unit.data)


def rows(data):
    return Rows(np.asarray(data, np.float32), np.ones(len(data), np.float32))


def whole(tree):
    leaves = [np.asarray(leaf, np.int64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.ravel() for leaf in leaves])


def released(blocks, *, entries, key=KEY, noise=1.0, clip=1.0, normalizer=1.0):
    gradient, _ = noised(
        PrivateGradient(linear_loss),
        jnp.zeros(entries),
        blocks,
        key,
        l2_clip_norm=clip,
        noise_multiplier=noise,
        normalizer=normalizer,
    )
    return np.asarray(gradient)


# --- Contributions on the grid ---


@pytest.mark.parametrize("entries", [1, 2, 100, 70_000, 1_200_000])
@pytest.mark.parametrize("clip", [1e-18, 0.3, 1e18])
def test_contributions_are_on_the_grid_and_within_it(entries, clip):
    rng = np.random.default_rng(entries)
    vector = rng.normal(size=entries)
    vector = (vector / np.linalg.norm(vector)).astype(np.float32)
    numbers = whole(added([vector * np.float32(clip)], jnp.float32(clip)))
    assert 0 < (numbers**2).sum() <= GRID**2
    back = numbers / steps_in_norm(entries)
    assert np.abs(back - vector).max() <= 0.51 / steps_in_norm(entries)


def test_rounding_all_entries_up_stays_within_the_grid():
    """Every entry is just above a half, the worst case for the norm."""
    entries = 1_000_000
    steps = steps_in_norm(entries)
    entry = (math.floor(steps / 1_000 - 0.502) + 0.502) / steps
    vector = [np.full(entries, entry, np.float32)]
    numbers = whole(added(vector, jnp.float32(1.0)))
    assert len(set(numbers)) == 1 and numbers[0] == math.ceil(entry * steps)
    assert (numbers**2).sum() <= GRID**2


@pytest.mark.parametrize(
    "vector", [[1.1, 0.0], [0.8, 0.8], [np.nan, 0.0], [np.inf, 0.0], [3e38, 3e38]]
)
def test_what_is_longer_than_the_clip_norm_becomes_zero(vector):
    """Clipping rules it out; the bound does not rest on it."""
    numbers = whole(added([np.array(vector, np.float32)], jnp.float32(1.0)))
    np.testing.assert_array_equal(numbers, 0)


@pytest.mark.parametrize("sizes", [(1, 1), (40_000,), (2**15 * 3 + 7, 5, 70_000)])
def test_no_vector_beyond_the_grid_is_added(sizes):
    """On both sides of the limit, by whole numbers of Python; in several leaves."""
    rng, entries = np.random.default_rng(sum(sizes)), sum(sizes)
    steps, kept = steps_in_norm(*sizes), []
    for length in np.linspace(0.99, 1.02, 61):
        vector = rng.normal(size=entries)
        # In grid steps; the clip norm is not known to be one.
        vector *= length * GRID / np.linalg.norm(vector) / steps
        parts = np.split(vector.astype(np.float32), np.cumsum(sizes)[:-1])
        numbers = [int(x) for x in whole(added(parts, jnp.float32(1.0)))]
        squares = sum(x * x for x in numbers)
        assert squares <= GRID**2
        if length * GRID <= steps:
            assert squares > 0.97 * GRID**2  # nothing that is short enough is lost
        kept.append(squares > 0)
    assert any(kept) and not all(kept)


@pytest.mark.parametrize(
    ("sizes", "lost"), [((16_384,), 0.004), ((10**6,), 0.011), ((1, 10**7), 0.032)]
)
def test_contributions_are_hardly_shortened(sizes, lost):
    assert 1 - steps_in_norm(*sizes) / GRID < lost


@pytest.mark.parametrize("order", ["sorted", "pairwise", "float32 by one"])
@pytest.mark.parametrize("rows", [1, 8])
def test_the_rounding_of_a_sum_of_squares_is_allowed_for(order, rows):
    """Rows in any order, such as the worst that are known; then half to half."""
    shape = rows, discrete_noise._ROW
    numbers = np.full(shape, GRID / math.sqrt(math.prod(shape)), np.float32).round()
    squares = np.square(numbers)
    sums = {
        "sorted": np.cumsum(np.sort(squares), axis=1, dtype=np.float32)[:, -1],
        "pairwise": squares.sum(axis=1, dtype=np.float32),
        "float32 by one": np.add.accumulate(squares, axis=1, dtype=np.float32)[:, -1],
    }[order]
    while len(sums) > 1:
        sums = np.add(*np.split(sums, 2))
    exact = float(np.sum(numbers.astype(np.float64) ** 2))
    assert abs(sums[0] / exact - 1) < 1 - discrete_noise._shortened([numbers.size])


@pytest.mark.parametrize(
    "sizes",
    [
        (1,),
        (3, 0, 2**12),
        (2**12 + 1, 54_400),
        (2**20 + 7,),
        (10**6, 10**6),
        (3, 10**7),
    ],
)
def test_sums_of_squares_are_those_of_all_numbers_in_short_rows(sizes):
    rng = np.random.default_rng(sum(sizes))
    leaves = [rng.normal(size=size).astype(np.float32) for size in sizes]
    found = jax.jit(discrete_noise.sum_of_squares)(leaves)
    exact = sum(np.sum(leaf.astype(np.float64) ** 2) for leaf in leaves)
    assert abs(float(found) / exact - 1) < 1 - discrete_noise._shortened(sizes)
    longest = discrete_noise._longest_row(sizes)
    rows = [r for leaf in leaves for r in discrete_noise._rows(leaf, longest)]
    assert sum(row.size for row in rows) == sum(sizes)
    assert max(row.shape[1] for row in rows) <= longest
    halvings = (sum(map(len, rows)) - 1).bit_length()
    allowed = -math.log(discrete_noise._shortened(sizes)) * 2**24
    assert min(longest, max(sizes)) + halvings + 4 <= allowed + 1e-6


def test_parameters_beyond_counting_are_refused():
    with pytest.raises(ValueError, match=r"up to about 10\^9 parameters, got 10,000"):
        steps_in_norm(10**10)


# --- The sum with its noise ---


def test_the_release_is_the_sum_of_whole_numbers_and_the_noise():
    data = np.random.default_rng(0).normal(size=(9, 6))
    clip, noise, normalizer = 0.7, 1.3, 4.0
    steps = steps_in_norm(6)
    clipped = (
        data * np.minimum(1, clip * (1 - 1e-5) / np.linalg.norm(data, axis=1))[:, None]
    )
    total = np.round(clipped / clip * steps).sum(axis=0)
    variance = covering_variance(noise * GRID * (1 + 1e-12))
    drawn = sample_discrete_gaussian(variance, 6, generator(KEY))
    found = released([rows(data)], entries=6, noise=noise, clip=clip, normalizer=4.0)
    expected = (total + drawn) * clip / steps / normalizer
    # A rounding to the other side in float32 is a grid step.
    np.testing.assert_allclose(found, expected, atol=2 * clip / GRID, rtol=1e-6)


def test_the_noise_has_its_deviation():
    found = released([rows(np.zeros((1, 40_000)))], entries=40_000, noise=0.8, clip=3.0)
    deviation = 3.0 * 0.8 * GRID / steps_in_norm(40_000)
    assert stats.kstest(found / deviation, "norm").pvalue > 1e-6


def test_order_and_blocks_change_no_bit():
    """Sums of whole numbers do not depend on the order; float32's do."""
    data = (
        np.random.default_rng(1).normal(size=(24, 50))
        * 10.0 ** np.arange(-4, 20, 1)[:, None]
    )
    whole_draw = released([rows(data)], entries=50)
    np.testing.assert_array_equal(released([rows(data[::-1])], entries=50), whole_draw)
    parts = [rows(part) for part in np.array_split(data, 4)]
    np.testing.assert_array_equal(released(parts, entries=50), whole_draw)


def test_sums_of_very_many_units_do_not_overflow():
    """Of full blocks, and the halves of a full step's, every unit the same one."""
    one = int(whole(added([np.array([1.0], np.float32)], jnp.float32(1.0)))[0])
    full, blocks = one * MOST_ROWS, MOST_UNITS // MOST_ROWS
    assert one > 0.999 * GRID and full < 2**31
    for sign in (1, -1):
        tree = discrete_noise.halves([jnp.asarray([sign * full], jnp.int32)])
        many = [np.asarray(leaf, np.int64) * blocks for leaf in tree]
        assert np.abs(many[0]).max() < 2**31
        # As many blocks as there are rows: the most that the lower halves can be.
        assert 255 * MOST_UNITS < 2**31
        total = discrete_noise.whole_sum([many[0].astype(np.int32)])
        assert total[0] == sign * full * blocks
    for rows_of_blocks, message in (
        ([MOST_ROWS + 1], "a block of discrete noise takes up to 32,768 rows"),
        ([MOST_ROWS] * 65, r"up to 4,194,304 rows.*got 4,259,840"),
    ):
        with pytest.raises(ValueError, match=message):
            discrete_noise.check_rows(rows_of_blocks, 2)
    discrete_noise.check_rows([MOST_ROWS] * 64, 2)


# --- In a run ---


def test_a_run_takes_its_steps_and_no_more(tmp_path):
    run = plain_trainer()
    records = run.train(tmp_path)
    assert records[-1]["epsilon"] == run.budget.spent(6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))
    with pytest.raises(BudgetExhaustedError):
        run.step()


def test_resume_is_bit_exact(tmp_path):
    whole_run = plain_trainer()
    whole_run.train(tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(progress):
        if progress.step == 4:
            raise Stop

    first = plain_trainer()
    with pytest.raises(Stop):
        first.train(tmp_path / "parts", checkpoint_every=2, on_step=stop)
    second = plain_trainer()
    second.resume(tmp_path / "parts")
    second.train(tmp_path / "parts")
    assert_same(whole_run, second)
    with pytest.raises(RunMismatchError, match="noise"):
        plain_trainer(seed=None, noise="gaussian").resume(tmp_path / "parts")


@pytest.mark.parametrize(
    ("noise", "error", "message"),
    [
        ("discret", ValueError, "did you mean 'discrete'"),
        (None, TypeError, "noise must be one of"),
    ],
)
def test_another_noise_is_refused(noise, error, message):
    with pytest.raises(error, match=message):
        plain_trainer(noise=noise)


def test_without_noise_a_run_takes_the_sums_alone():
    assert trainer(epsilon=np.inf).run["noise"] == "discrete"
    data = [[3.0, 4.0], [0.2, 0.1]]
    found = released([rows(data)], entries=2, noise=0.0)
    np.testing.assert_allclose(found, [0.8, 0.9], atol=3e-5)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"key": b"short"}, ValueError, "key must have 32 bytes, got 5"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ({"noise_multiplier": 2e6}, ValueError, r"noise must be at most 1e\+06"),
        (
            {"blocks": [rows(np.ones((MOST_ROWS + 1, 2)))]},
            ValueError,
            "a block of discrete noise takes",
        ),
    ],
)
def test_bad_input(changes, error, message):
    arguments = {
        "blocks": [rows(np.ones((2, 2)))],
        "key": KEY,
        "l2_clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "normalizer": 1.0,
        **changes,
    }
    with pytest.raises(error, match=message):
        noised(PrivateGradient(linear_loss), jnp.zeros(2), **arguments)


def test_a_config_says_which_noise():
    config = read_config(ROOT / "configs" / "glyphs_5w1s.toml")
    assert config.noise == "discrete"
    plain = {**config.to_dict(), "noise": "gaussian"}
    assert TrainingConfig.from_dict(plain).noise == "gaussian"
    with pytest.raises(ValueError, match="noise must be one of"):
        TrainingConfig.from_dict({**plain, "noise": "laplace"})
