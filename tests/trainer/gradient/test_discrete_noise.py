"""Discrete noise: integers from the clipped contribution to the release."""

import itertools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp_episodic.trainer.config.training_config import TrainingConfig, read_config
from jaxdp_episodic.trainer.draw.generators import generator
from jaxdp_episodic.trainer.gradient import clipping, discrete_noise, private_gradient
from jaxdp_episodic.trainer.gradient.discrete_gaussian import (
    covering_variance,
    sample_discrete_gaussian,
)
from jaxdp_episodic.trainer.gradient.discrete_noise import (
    GRID,
    MOST_ROWS,
    MOST_UNITS,
    steps_in_norm,
)
from jaxdp_episodic.trainer.gradient.precision import training_dtype
from jaxdp_episodic.trainer.gradient.private_gradient import PrivateGradient
from training_runs import KEY, Rows, linear_loss, noised, plain_trainer

ROOT = Path(__file__).resolve().parents[3]


def rows(data):
    return Rows(np.asarray(data, np.float32), np.ones(len(data), np.float32))


def leaves_loss(params, unit):
    """Its gradient is the row itself, here of several arrays."""
    return jnp.sum(jnp.stack(list(map(jnp.vdot, params, unit.data))))


def added(contribution, clip=1.0, loss=leaves_loss):
    """What a compiled step adds to its sum: integers, int64."""
    block = Rows([leaf[None] for leaf in contribution], np.ones(1, np.float32))
    params = [np.zeros(leaf.shape, leaf.dtype) for leaf in contribution]
    clip = np.asarray(clip, training_dtype(params))
    total = PrivateGradient(loss)._sum(params, [block], clip).gradient
    return np.concatenate(discrete_noise.whole_sum(total))


def squares(numbers):
    """The sum of their squares, as a Python integer."""
    values, counts = np.unique(numbers, return_counts=True)
    return sum(int(v) ** 2 * int(n) for v, n in zip(values, counts, strict=True))


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


@pytest.mark.parametrize("entries", [1, 100, 70_000])
def test_contributions_are_rounded_on_the_grid(entries):
    vector = np.random.default_rng(entries).normal(size=entries)
    vector = (vector / np.linalg.norm(vector)).astype(np.float32)
    numbers = added([vector * np.float32(0.3)], 0.3)
    back = numbers / steps_in_norm(entries)
    clipped = vector * (1 - clipping._MARGIN)
    assert np.abs(back - clipped).max() <= 0.51 / steps_in_norm(entries)
    assert 1 - steps_in_norm(1, 10**7) / GRID < 0.032  # hardly shortened
    with pytest.raises(ValueError, match=r"up to about 10\^9 parameters, got 10,000"):
        steps_in_norm(10**10)


def rounded_up(entries, steps, dtype):
    """The longest unclipped row whose entries are just above half a grid step."""
    mean_square = (steps * (1 - 1.1 * clipping._MARGIN)) ** 2 / entries
    half = 0.5 + 4e-3  # float32 cannot represent more digits of a single entry
    low = math.floor(math.sqrt(mean_square) - half) + half
    share = (mean_square - low**2) / ((low + 1) ** 2 - low**2)
    vector = np.full(entries, low)
    vector[: int(share * entries)] += 1
    return [(vector / steps).astype(dtype)]


SIZES = [1, 4_096, 4_097, 1_000_000]
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@DTYPES
@pytest.mark.parametrize("entries", SIZES)
def test_rounding_all_entries_up_stays_within_the_grid(entries, dtype):
    """It comes so close that a larger norm could not be allowed."""
    steps = steps_in_norm(entries)
    vector = rounded_up(entries, steps, dtype)
    with jax.enable_x64(dtype == np.float64):
        numbers = added(vector)
    np.testing.assert_array_less(vector[0] * steps + 0.49, numbers)
    # Less the allowance for float32 rounding and the last entry's remainder.
    assert (0.99975 * GRID - 1) ** 2 < squares(numbers) <= GRID**2


def adversarial(entries, dtype):
    """Unit vectors: one entry, equal entries, random ones, many magnitudes."""
    rng = np.random.default_rng(entries)
    one = np.zeros(entries)
    one[entries // 2] = -1.0
    normal = rng.normal(size=entries)
    wide = normal * 10.0 ** rng.uniform(-30, 0, size=entries)
    for vector in (one, np.ones(entries), normal, wide):
        # The largest entries first: squares of small ones may vanish.
        scaled = vector / np.abs(vector).max()
        yield (scaled / np.linalg.norm(scaled)).astype(dtype)


@DTYPES
@pytest.mark.parametrize(
    ("clip", "entries"),
    [
        *itertools.product([1e-18, 1e18], [1, 4_097]),
        pytest.param(1.0, SIZES[-1], marks=pytest.mark.slow),
    ],
)
def test_nothing_beyond_the_grid_is_added(entries, clip, dtype):
    small, large = {np.float32: (1e-30, 3e38), np.float64: (1e-300, 1e300)}[dtype]
    with jax.enable_x64(dtype == np.float64):
        for direction in adversarial(entries, dtype):
            for norm in (small, clip * (1 - 1e-7), clip, clip * (1 + 1e-7), large):
                numbers = added([direction * dtype(norm)], clip)
                assert squares(numbers) <= GRID**2
                # What is clipped keeps its norm.
                assert norm < clip or squares(numbers) > (0.98 * GRID) ** 2
        subnormal = np.full(entries, np.finfo(dtype).smallest_subnormal, dtype)
        assert squares(added([subnormal], clip)) == 0
        for bad, rest in itertools.product((np.nan, np.inf, -np.inf), (0.0, large)):
            vector = np.full(entries, rest, dtype)
            vector[-1] = bad
            np.testing.assert_array_equal(added([vector], clip), 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [(1, 1), (2**15 * 3 + 7, 5, 70_000)])
def test_vectors_near_the_clip_norm_are_added_whole(sizes):
    """On both sides of the limit, and in several leaves."""
    rng, entries = np.random.default_rng(sum(sizes)), sum(sizes)
    for length in np.linspace(0.99, 1.02, 21):
        vector = rng.normal(size=entries)
        vector *= length / np.linalg.norm(vector)
        parts = np.split(vector.astype(np.float32), np.cumsum(sizes)[:-1])
        assert (0.97 * GRID) ** 2 < squares(added(parts)) <= GRID**2


def test_numbers_are_rounded_to_the_nearest():
    """Halves go to the even integer, as in `numpy.round`; also next to halves."""
    halves = np.arange(-3_000, 3_000, dtype=np.float32) / 2
    ends = np.array([2**22 - 0.5, 2**22 - 1, 60_000.496], np.float32)
    for numbers in (halves, ends, -ends):
        for near in (-np.inf, np.inf):
            for x in (numbers, np.nextafter(numbers, np.float32(near))):
                found = jax.jit(discrete_noise._nearest)(x)
                assert found.dtype == np.int32
                np.testing.assert_array_equal(found, np.round(x))


def floors_loss(params, unit):
    """Its gradient ends with an operation that is easy to find in a program."""
    return jnp.vdot(params[0], jnp.floor(unit.data[0]))


def kernels_with(*operations):
    """The texts of the kernels of a compiled step that contain each operation."""
    params, clip = [np.zeros(8_000, np.float32)], np.float32(1.0)
    block = Rows([np.ones((2, 8_000), np.float32)], np.ones(2, np.float32))
    gradient = PrivateGradient(floors_loss)
    totals = private_gradient._zero_totals(params, True)
    text = gradient._add.lower(params, totals, block, clip).compile().as_text()
    parts = text.split("\n\n")
    return [[part for part in parts if f" {name}(" in part] for name in operations]


def test_both_passes_read_a_contribution_that_is_computed_once():
    """If it were fused into both, they might round it differently."""
    (floor,), (rounding,) = kernels_with("floor", "bitcast-convert")
    assert floor != rounding
    assert " s32[8000]" in rounding and " add(" in rounding  # norm and sum in one pass


@pytest.mark.parametrize("rows", [1, 8])
def test_the_rounding_of_a_sum_of_squares_is_allowed_for(rows):
    """Rows in any order, among them the worst known; then in halves."""
    shape = rows, discrete_noise._ROW
    numbers = np.full(shape, GRID / math.sqrt(math.prod(shape)), np.float32).round()
    squares = np.square(numbers)
    exact = float(np.sum(numbers.astype(np.float64) ** 2))
    for sums in (
        np.cumsum(np.sort(squares), axis=1, dtype=np.float32)[:, -1],
        squares.sum(axis=1, dtype=np.float32),  # pairwise
        np.cumsum(squares, axis=1, dtype=np.float32)[:, -1],
    ):
        while len(sums) > 1:
            sums = np.add(*np.split(sums, 2))
        assert abs(sums[0] / exact - 1) < 1 - discrete_noise._shortened([numbers.size])


@pytest.mark.parametrize(
    "sizes",
    [
        (1,),
        (3, 0, 2**12),
        (2**12 + 1, 54_400),
        (2**20 + 7,),
        pytest.param((3, 10**7), marks=pytest.mark.slow),
    ],
)
def test_sums_of_squares_cover_all_numbers_in_short_rows(sizes):
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


# --- The sum with its noise ---


def test_the_release_is_an_integer_sum_plus_the_noise():
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
    # Rounding the other way in float32 makes one grid step.
    np.testing.assert_allclose(found, expected, atol=2 * clip / GRID, rtol=1e-6)


def test_order_and_blocks_change_no_bit():
    """Integer sums do not depend on the order; float32 sums do."""
    data = (
        np.random.default_rng(1).normal(size=(24, 50))
        * 10.0 ** np.arange(-4, 20, 1)[:, None]
    )
    whole_draw = released([rows(data)], entries=50)
    np.testing.assert_array_equal(released([rows(data[::-1])], entries=50), whole_draw)
    parts = [rows(part) for part in np.array_split(data, 4)]
    np.testing.assert_array_equal(released(parts, entries=50), whole_draw)


def test_sums_of_very_many_units_do_not_overflow():
    """Full blocks, and the halves of a full step, of equal units."""
    one = int(added([np.array([1.0], np.float32)])[0])
    full, blocks = one * MOST_ROWS, MOST_UNITS // MOST_ROWS
    assert one > 0.999 * GRID and full < 2**31
    for sign in (1, -1):
        tree = discrete_noise.halves([jnp.asarray([sign * full], jnp.int32)])
        many = [np.asarray(leaf, np.int64) * blocks for leaf in tree]
        assert np.abs(many[0]).max() < 2**31
        # As many blocks as rows: the largest possible lower halves.
        assert 255 * MOST_UNITS < 2**31
        total = discrete_noise.whole_sum([many[0].astype(np.int32)])
        assert total[0] == sign * full * blocks
    for rows_of_blocks, message in (
        ([1, MOST_ROWS + 1], "discrete noise supports blocks of up to 32,768 rows"),
        ([MOST_ROWS] * 65, r"up to 4,194,304 rows.*got 4,259,840"),
    ):
        with pytest.raises(ValueError, match=message):
            discrete_noise.check_rows(rows_of_blocks, 2)
    discrete_noise.check_rows([MOST_ROWS] * 64, 2)
    with pytest.raises(ValueError, match="discrete noise supports blocks"):
        released([rows(np.ones((MOST_ROWS + 1, 2)))], entries=2)
    with pytest.raises(ValueError, match=r"noise must be at most 1e\+06"):
        released([rows(np.ones((2, 2)))], entries=2, noise=2e6)


# --- In a run ---


def test_a_config_chooses_the_noise():
    assert plain_trainer().run["noise"] == "discrete"  # so another is another run
    config = read_config(ROOT / "configs" / "glyphs_5w1s.toml")
    assert config.noise == "discrete"
    plain = {**config.to_dict(), "noise": "gaussian"}
    assert TrainingConfig.from_dict(plain).noise == "gaussian"
    with pytest.raises(ValueError, match="did you mean 'discrete'"):
        TrainingConfig.from_dict({**plain, "noise": "discret"})
