"""Contributions with a clip norm that follows a quantile, and normalized ones."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxdp_episodic.trainer.config.training_parts import ClippingConfig
from jaxdp_episodic.trainer.gradient import discrete_noise
from jaxdp_episodic.trainer.gradient.clipping import (
    longest,
    next_clip_norm,
    steps_of_vote,
)
from jaxdp_episodic.trainer.gradient.discrete_noise import GRID, steps_in_norm
from jaxdp_episodic.trainer.gradient.precision import training_dtype
from jaxdp_episodic.trainer.gradient.private_gradient import PrivateGradient
from training_runs import linear_loss, noised, plain_trainer

QUANTILE = ClippingConfig(count_noise=0.7)
CLIP, EXPECTED = 0.3, 8.0


class Units(NamedTuple):
    """Clip units whose contribution is their content."""

    data: Any
    slot_mask: Any
    unit_mask: Any


def units(data, there=None, drawn=None):
    data = np.asarray(data, np.float32)
    ones = np.ones(len(data), np.float32)
    there = ones if there is None else np.asarray(there, np.float32)
    drawn = ones if drawn is None else np.asarray(drawn, np.float32)
    return Units(data, np.repeat(there[:, None], 2, axis=1), drawn)


def given(block, clipping=QUANTILE, loss=linear_loss, params=None, clip=CLIP):
    """What a block adds to the sums: integers, the last one of the count."""
    params = np.zeros(block.data.shape[1], np.float32) if params is None else params
    gradient = PrivateGradient(loss, clipping=clipping)
    totals = gradient._sum(params, [block], np.asarray(clip, training_dtype(params)))
    sums = np.concatenate(
        [whole.ravel() for whole in discrete_noise.whole_sum(totals.gradient)]
    )
    return np.append(sums, steps_of_vote(clipping) * int(totals.votes))


# --- The contribution of one unit ---

NORMS = (0.0, 1e-42, 1e-25, 0.5, 1 - 1e-7, 1.0, 1 + 1e-7, 1.5, 1e30)


def lengths(clipping, entries, dtype: Any = np.float32):
    """Norms of clipped contributions of all lengths, joined with their votes."""
    rng = np.random.default_rng(entries)
    direction = rng.normal(size=entries)
    direction /= np.linalg.norm(direction)
    params, found = np.zeros(entries, dtype), {}
    for norm in NORMS:
        block = units([direction], None)._replace(
            data=(direction * norm * CLIP).astype(dtype)[None]
        )
        numbers = given(block, clipping, params=params)
        found[norm] = sum(int(n) ** 2 for n in numbers)
    return found


@pytest.mark.parametrize(
    ("count_noise", "entries"), [(0.3, 5_000), (7.0, 1), (500.0, 5_000)]
)
def test_gradient_and_vote_are_together_within_the_bound(count_noise, entries):
    """The noise is relative to this bound or a slightly larger one."""
    clipping = ClippingConfig(count_noise=count_noise)
    vote = steps_of_vote(clipping)
    assert 0 < vote <= GRID / (2 * count_noise)
    bound = GRID**2 + vote**2
    assert longest(clipping) >= math.sqrt(bound) / GRID
    assert longest(clipping) == pytest.approx(math.hypot(1, 0.5 / count_noise), 1e-2)
    squares = lengths(clipping, entries)
    assert max(squares.values()) <= bound
    assert squares[1.0] > 0.99 * bound
    with jax.enable_x64(True):
        assert max(lengths(clipping, entries, np.float64).values()) <= bound


@pytest.mark.parametrize("clip", [1e-18, 1e18])
def test_normalized_contributions_have_the_norm_and_never_more(clip):
    """Of all lengths, in their direction; what has none or is not finite is zero."""
    clipping = ClippingConfig(kind="normalize")
    rng = np.random.default_rng(0)
    for norm in (1e-37, 1e-30, 1e-10, 1e19, 1e38):
        data = rng.normal(size=60) * 10.0 ** rng.uniform(-9, 0, size=60)
        data *= norm / np.linalg.norm(data)
        found = given(units([data]), clipping, clip=clip)
        assert (0.99 * GRID) ** 2 < sum(int(n) ** 2 for n in found) <= GRID**2
        if norm > 1e-30:  # shorter ones have subnormal entries
            wanted = data / np.linalg.norm(data) * steps_in_norm(60)
            np.testing.assert_allclose(found[:-1], wanted, atol=2)
    for nothing in (0.0, 1e-42, np.nan, np.inf):
        block = units([[0.0, nothing]])
        np.testing.assert_array_equal(given(block, clipping, clip=clip), 0)
    with jax.enable_x64(True):
        squares = lengths(clipping, 60, np.float64)
        assert max(squares.values()) <= GRID**2
        assert min(square for norm, square in squares.items() if norm) > 0


# --- Units do not interact, and empty ones contribute nothing ---

SHORT, LONG, BAD = [0.1, 0.0], [3.0, 4.0], [np.nan, 1.0]
ROWS = units(
    [SHORT, LONG, [5.0, 0.0], BAD, SHORT, [0.0, 0.0], [0.0, 0.1], LONG],
    there=[1, 1, 1, 1, 0, 1, 1, 1],
    drawn=[1, 1, 0, 1, 1, 1, 1, 0],  # masked rows, also between the others
)
VOTES = [1, -1, 0, -1, 0, 1, 1, 0]


def of_row(row):
    """A block with this row alone and an empty unit behind it."""
    empty = units([[0.0, 0.0]], there=[0])
    pairs = zip(ROWS, empty, strict=True)
    return Units(*(np.concatenate([leaf[[row]], last]) for leaf, last in pairs))


def test_units_do_not_meet():
    """A release without noise is the sum of what each unit gives alone."""
    each = [given(of_row(row)) for row in range(len(VOTES))]
    vote, alone = steps_of_vote(QUANTILE), sum(each)
    assert [numbers[-1] for numbers in each] == [vote * wanted for wanted in VOTES]
    gradient = PrivateGradient(linear_loss, clipping=QUANTILE)
    released, private = noised(
        gradient,
        jnp.zeros(2),
        [ROWS],
        l2_clip_norm=CLIP,
        noise_multiplier=0.0,
        normalizer=EXPECTED,
    )
    unit = np.float32(CLIP) / steps_in_norm(2) / EXPECTED
    whole = np.asarray(released.gradient, np.float64) / unit
    np.testing.assert_allclose(whole, alone[:-1], atol=0.1)
    assert released.share == np.float32(0.5 + alone[-1] / vote / 2 / EXPECTED)
    assert released.share.dtype == np.float32
    assert private["num_units"] != EXPECTED  # otherwise the check is void


def test_noise_is_for_the_longest_contribution():
    """All entries have it."""
    clipping = ClippingConfig(count_noise=0.3)
    gradient = PrivateGradient(linear_loss, clipping=clipping)
    keys = (number.to_bytes(32, "big") for number in range(1_500))
    drawn = [gradient.noise(np.zeros(1), key, 2.0) for key in keys]
    found = np.array([np.concatenate([*map(np.ravel, d._unused[0])]) for d in drawn])
    deviation = 2.0 * math.hypot(GRID, steps_of_vote(clipping))
    for numbers in found.T:  # the gradient's one number, then the count's
        assert stats.kstest(numbers / deviation, "norm").pvalue > 1e-6
    assert abs(np.corrcoef(found.T)[0, 1]) < 0.1


def test_the_clip_norm_is_known_before_the_draw():
    """It is a function of earlier releases."""
    clipping = ClippingConfig(rate=2.0, count_noise=0.7)
    run = plain_trainer(clipping=clipping, num_steps=4)
    used, released, call = [], [], run._gradient.__call__

    class Noted:
        def __getattr__(self, name):
            return getattr(call.__self__, name)

        def __call__(self, *arguments, **named):
            used.append(named["l2_clip_norm"])
            result = call(*arguments, **named)
            released.append(result[0])
            return result

    run._main.gradient = Noted()
    for _ in range(4):
        run.step()
    wanted = 0.5
    for norm, release in zip([*used, run.clip_norm], [*released, None], strict=True):
        assert norm == np.float32(wanted)
        if release is not None:
            bounds = clipping.bounds(0.5)
            share = float(release.share)
            wanted = next_clip_norm(clipping, bounds, norm, share)
    assert len(set(used)) == 4
