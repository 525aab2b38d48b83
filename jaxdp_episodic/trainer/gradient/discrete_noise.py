"""Contributions on an integer grid, for discrete Gaussian noise.

A clipped contribution is rounded to whole grid steps, of which a clip norm has `GRID`.
Before that it is shortened by as much as rounding may lengthen it. So sums are whole
numbers, and the noise is an exact discrete Gaussian. No contribution depends on how
others were rounded, and no output is possible under only one of two neighbouring data
sets. The privacy cost is that of Gaussian noise with the same multiplier, see
`covering_variance`.
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
"""Grid steps per clip norm."""

MOST_ROWS = 2**15
"""Most rows in a block, so that their sum fits into 32 bits."""

MOST_UNITS = 2**22
"""Most clip units in a step, so that sums of the upper halves fit into 32 bits."""

# A sum over blocks is stored as two numbers: multiples of 2^8 = 256, and the rest.
_HALF = 8
# Squares that are summed in one row. Shorter rows have a smaller rounding error.
_ROW = 2**12
# Approximate largest number of rows. More rows would compile slowly.
_MOST_ROWS = 256
# Midpoint of 2^23 and 2^24, where float32 represents exactly the whole numbers.
_MIDDLE = np.float32(3 * 2**22)
# Relative rounding error of a float32 sum or product.
_UNIT = 2.0**-24


def on_grid(contribution: Any, l2_clip_norm: Array) -> Any:
    """Returns a contribution clipped to this norm in grid steps: norm <= `GRID`."""
    # Rounding to nearest may lengthen a vector by half the diagonal of a grid cell, and
    # the rounding error of the norm may leave it longer than the clip norm. The
    # contribution is shortened beforehand by both. So the bound holds without looking
    # at the whole numbers, provided that clipping saw exactly the numbers rounded here.
    # See docs/proofs.md.
    sizes = [leaf.size for leaf in jax.tree.leaves(contribution)]
    # In float32's range, because the clip norm is far from the range's ends.
    scale = steps_in_norm(*sizes) / l2_clip_norm
    return jax.tree.map(lambda leaf: _nearest(leaf * scale), contribution)


def sum_of_squares(leaves: Sequence[Array]) -> Array:
    """Returns the sum of squares, with the error bound of `_shortened`."""
    # Each row is summed in any order. The row sums are then added pairwise, half to
    # half: a compiler does not merge these additions with those within a row.
    length = _longest_row([leaf.size for leaf in leaves])
    rows = [row for leaf in leaves for row in _rows(leaf.reshape(-1), length)]
    sums = jnp.concatenate([jnp.sum(jnp.square(row), axis=1) for row in rows])
    number = 1 << (len(sums) - 1).bit_length()
    sums = jnp.pad(sums, (0, number - len(sums)))
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return sums[0]


def halves(block_sum: Any) -> Any:
    """Returns a block's sum as leaves (2, ...): a and b of the number 256 a + b."""
    return jax.tree.map(
        lambda x: jnp.stack([x >> _HALF, x & (2**_HALF - 1)]), block_sum
    )


def steps_in_norm(*sizes: int) -> float:
    """Returns the usable grid steps per clip norm, for leaves of these sizes."""
    # A norm's relative error is half that of its square; then half a cell's diagonal.
    steps = GRID * math.sqrt(_shortened(sizes)) - 0.5 * math.sqrt(sum(sizes))
    if steps < GRID / 2:
        raise ValueError(
            f"noise='discrete' supports up to about 10^9 parameters, got {sum(sizes):,}"
        )
    return steps


def _nearest(numbers: Array) -> Array:
    """Returns the nearest whole numbers, int32, of numbers below 2^22."""
    if numbers.dtype != np.float32:
        return jnp.round(numbers).astype(jnp.int32)
    # Near _MIDDLE, consecutive float32 are consecutive whole numbers and bit patterns.
    # A rounding followed by a safe conversion takes 4 % of a step of the demo.
    shifted = jax.lax.bitcast_convert_type(numbers + _MIDDLE, jnp.int32)
    return shifted - int(_MIDDLE.view(np.int32))


def _longest_row(sizes: Sequence[int]) -> int:
    """Returns the largest number of squares summed in one row."""
    return max(_ROW, -(-sum(sizes) // _MOST_ROWS))


def _rows(flat: Array, longest: int) -> list[Array]:
    """Returns an array as matrices of rows; one matrix if its size divides well."""
    size = flat.size
    lengths = (n for n in range(min(longest, size), longest // 4, -1) if not size % n)
    length = next(lengths, min(longest, size))
    even = size // length * length if length else 0
    parts = [flat[:even].reshape(-1, length)] if even else []
    return parts + ([flat[even:].reshape(1, -1)] if even < size else [])


def _shortened(sizes: Sequence[int]) -> float:
    """Returns a factor c <= 1: a computed sum of squares lies within [c, 1/c] times it.

    Within a row, in any order, a number takes part in at most as many additions as the
    row has other numbers; then in one addition per halving of the row sums. Each
    addition, and the square itself, has a relative error of at most one unit.
    """
    longest = _longest_row(sizes)
    # Rows have at least a quarter of that length, except two per leaf.
    rows = sum(4 * size // longest + 2 for size in sizes)
    additions = min(longest, max(sizes)) + rows.bit_length()
    return math.exp(-_UNIT * (additions + 4))


def check_rows(rows: list[int], num_processes: int) -> None:
    """Raises if there are more rows of clip units than int32 sums can hold."""
    if max(rows) > MOST_ROWS:
        raise ValueError(
            f"discrete noise supports blocks of up to {MOST_ROWS:,} rows, got "
            f"{max(rows):,}"
        )
    number = num_processes * sum(rows)
    if number > MOST_UNITS:
        raise ValueError(
            f"discrete noise supports up to {MOST_UNITS:,} rows of clip units per "
            f"step, got {number:,}"
        )


def whole_sum(total: Any) -> list[np.ndarray]:
    """Returns the int64 sums, one per leaf, of NumPy arrays made by `halves`."""
    return [
        (leaf[0].astype(np.int64) << _HALF) + leaf[1] for leaf in jax.tree.leaves(total)
    ]
