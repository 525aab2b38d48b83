"""The hardened noise: contributions on an integer grid, discrete Gaussian noise.

A clipped contribution is rounded to whole grid steps, `GRID` of them to the clip norm,
and shortened before by as much as all roundings may lengthen it. The sum is one of
whole numbers, and the noise is exactly discrete Gaussian: no contribution depends
on how others were rounded, and there is no number that only one of two
neighbours can give. What it costs is that of Gaussian noise of the same
multiplier, by `covering_variance`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

GRID = 60_000
"""Grid steps in a clip norm."""

MOST_ROWS = 2**15
"""Most rows of a block: their sum stays within 32 bits."""

MOST_UNITS = 2**22
"""Most clip units of a step: sums of the upper halves stay within 32 bits."""

# The sum over blocks is kept as two: multiples of 256, and the rest.
_HALF = 8
# Squares in a row that are added up at once: the fewer, the less they are rounded
# together.
_ROW = 2**12
# Rows of that length or longer, about: more would take long to compile.
_MOST_ROWS = 256
# In the middle between 2^23 and 2^24, where float32 has the whole numbers alone.
_MIDDLE = np.float32(3 * 2**22)
# Of float32: relative error of a sum or product.
_UNIT = 2.0**-24


def on_grid(contribution: Any, l2_clip_norm: Array) -> Any:
    """Returns a clipped contribution in whole grid steps, of an l2-norm <= `GRID`.

    Rounding to the nearest may lengthen a vector by half the diagonal of a cell, and
    clipping leave it longer than the clip norm by the rounding of its norm: it is
    shortened by as much before. So the bound needs no look at the whole numbers, if
    clipping saw the very numbers that are rounded here: docs/proofs.md.

    Args:
      contribution: pytree of float32, or float64, of `clip_by_norm`.
      l2_clip_norm: C in [1e-18, 1e18], as it was clipped to.

    Returns:
      Pytree of int32.
    """
    sizes = [leaf.size for leaf in jax.tree.leaves(contribution)]
    # In the range of float32, as the clip norm is not near its ends.
    scale = steps_in_norm(*sizes) / l2_clip_norm
    return jax.tree.map(lambda leaf: _nearest(leaf * scale), contribution)


def sum_of_squares(leaves: Sequence[Array]) -> Array:
    """Returns the sum of the squares of all numbers, rounded as `_shortened` allows.

    Rows are summed by themselves, in whatever order. Their sums are then added half to
    half: additions that a compiler does not merge with those of a row.
    """
    length = _longest_row([leaf.size for leaf in leaves])
    rows = [row for leaf in leaves for row in _rows(leaf.reshape(-1), length)]
    sums = jnp.concatenate([jnp.sum(jnp.square(row), axis=1) for row in rows])
    number = 1 << (len(sums) - 1).bit_length()
    sums = jnp.pad(sums, (0, number - len(sums)))
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return sums[0]


def no_sum(params: Any) -> Any:
    """Returns the empty sum: int32 pytree, (2, ...) for each leaf (...)."""
    return jax.tree.map(lambda leaf: np.zeros((2, *leaf.shape), np.int32), params)


def halves(block_sum: Any) -> Any:
    """Returns a block's sum as (2, ...) a leaf; ``256 a + b`` is the number."""
    return jax.tree.map(
        lambda x: jnp.stack([x >> _HALF, x & (2**_HALF - 1)]), block_sum
    )


def steps_in_norm(*sizes: int) -> float:
    """Returns how many grid steps a clip norm has, for leaves of these sizes."""
    # A norm is off by half as much as its square; then half the diagonal of a cell.
    steps = GRID * math.sqrt(_shortened(sizes)) - 0.5 * math.sqrt(sum(sizes))
    if steps < GRID / 2:
        raise ValueError(
            f"noise='discrete' takes up to about 10^9 parameters, got {sum(sizes):,}"
        )
    return steps


def _nearest(numbers: Array) -> Array:
    """Nearest whole numbers, int32, of numbers that are below 2^22."""
    if numbers.dtype != np.float32:
        return jnp.round(numbers).astype(jnp.int32)
    # Around here float32 has the whole numbers alone, in turn as bits. Rounding first,
    # then converting what might be NaN or too large, takes 4 % of a step of the demo.
    shifted = jax.lax.bitcast_convert_type(numbers + _MIDDLE, jnp.int32)
    return shifted - int(_MIDDLE.view(np.int32))


def _longest_row(sizes: Sequence[int]) -> int:
    """Most squares that are added up in a row."""
    return max(_ROW, -(-sum(sizes) // _MOST_ROWS))


def _rows(flat: Array, longest: int) -> list[Array]:
    """An array as matrices of rows; one where its size has a fitting divisor."""
    size = flat.size
    lengths = (n for n in range(min(longest, size), longest // 4, -1) if not size % n)
    length = next(lengths, min(longest, size))
    even = size // length * length if length else 0
    parts = [flat[:even].reshape(-1, length)] if even else []
    return parts + ([flat[even:].reshape(1, -1)] if even < size else [])


def _shortened(sizes: Sequence[int]) -> float:
    """Factor that a sum of squares is within, up or down, of the exact one.

    In whatever order, a number passes as many additions as there are numbers beside
    it in its row, at most; then one for each time that the rows' sums are halved. Each,
    and its square, is off by one unit, up or down: so the sum is within this factor.
    """
    longest = _longest_row(sizes)
    # Rows are no shorter than a quarter, but for two of each leaf.
    rows = sum(4 * size // longest + 2 for size in sizes)
    additions = min(longest, max(sizes)) + rows.bit_length()
    return math.exp(-_UNIT * (additions + 4))


def check_rows(rows: list[int], num_processes: int) -> None:
    """Refuses more rows of clip units than int32 sums have room for."""
    if max(rows) > MOST_ROWS:
        raise ValueError(
            f"a block of discrete noise takes up to {MOST_ROWS:,} rows, got "
            f"{max(rows):,}"
        )
    number = num_processes * sum(rows)
    if number > MOST_UNITS:
        raise ValueError(
            f"a step with discrete noise takes up to {MOST_UNITS:,} rows of clip "
            f"units, got {number:,}"
        )


def whole_sum(total: Any) -> list[np.ndarray]:
    """Returns the sums of what `halves` returned, NumPy arrays, int64, a leaf each."""
    return [
        (leaf[0].astype(np.int64) << _HALF) + leaf[1] for leaf in jax.tree.leaves(total)
    ]
