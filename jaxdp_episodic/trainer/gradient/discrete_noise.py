"""The hardened noise: contributions on an integer grid, discrete Gaussian noise.

A clipped contribution is rounded to whole grid steps, `GRID` of them to the clip norm.
The norm of what is then added is checked, by more than the check may be rounded; the
sum is one of whole numbers, and the noise is exactly discrete Gaussian: nothing that is
released depends on how floating-point numbers were rounded, and there is no number that
only one of two neighbours can give. What it costs is that of Gaussian noise of the same
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
# Squares that are added up at once: the fewer, the less they are rounded together.
_AT_ONCE = 2**15
# Most parts, or compiling them would take long.
_MOST_PARTS = 256
# Of float32: relative error of a sum or product.
_UNIT = 2.0**-24


def on_grid(contribution: Any, l2_clip_norm: Array) -> Any:
    """Returns a clipped contribution in whole grid steps, of an l2-norm <= `GRID`.

    Rounding to the nearest may lengthen a vector by half the diagonal of a cell, so it
    is shortened by as much before. One that is too long all the same, which clipping
    rules out, becomes zero: the bound holds for the whole numbers, whatever float32
    did to the contribution.

    Args:
      contribution: pytree of float32, or float64, of norm <= C.
      l2_clip_norm: C > 0, scalar.

    Returns:
      int32 pytree.
    """
    leaves, structure = jax.tree.flatten(contribution)
    sizes = [leaf.size for leaf in leaves]
    steps, at_once = steps_in_norm(*sizes), _at_once(sizes)
    # Divided first: no product that could leave float32's range.
    rounded = [jnp.round(leaf / l2_clip_norm * steps) for leaf in leaves]
    squares = [
        jnp.vdot(part, part, precision=jax.lax.Precision.HIGHEST)
        for x in rounded
        for part in jnp.split(x.reshape(-1), list(range(at_once, x.size, at_once)))
    ]
    fits = sum(squares[1:], squares[0]) <= GRID**2 * _shortened(sizes)
    # False for NaN too: nothing is cast that has no integer.
    whole = [jnp.where(fits, x, 0.0).astype(jnp.int32) for x in rounded]
    return jax.tree.unflatten(structure, whole)


def no_sum(params: Any) -> Any:
    """Returns the empty sum: int32 pytree, (2, ...) for each leaf (...)."""
    return jax.tree.map(lambda leaf: np.zeros((2, *leaf.shape), np.int32), params)


def halves(block_sum: Any) -> Any:
    """Returns a block's sum of whole numbers as (2, ...) a leaf, to be added up.

    ``256 a + b`` is the number.
    """
    return jax.tree.map(
        lambda x: jnp.stack([x >> _HALF, x & (2**_HALF - 1)]), block_sum
    )


def steps_in_norm(*sizes: int) -> float:
    """Returns how many grid steps a clip norm is before it is rounded.

    Args:
      sizes: of each leaf of the parameters.

    Raises:
      ValueError: so many entries that rounding takes half of the clip norm.
    """
    # Half the diagonal of a cell, and a little for float32.
    steps = GRID * _shortened(sizes) - 0.51 * math.sqrt(sum(sizes))
    if steps < GRID / 2:
        raise ValueError(
            f"noise='discrete' takes up to about 10^9 parameters, got {sum(sizes):,}"
        )
    return steps


def _at_once(sizes: Sequence[int]) -> int:
    """Squares of a leaf that are added up at once."""
    return max(_AT_ONCE, -(-sum(sizes) // _MOST_PARTS))


def _shortened(sizes: Sequence[int]) -> float:
    """Factor of norms that allows for the rounding of a sum of squares.

    In whatever order, a number passes as many additions as there are numbers beside
    it, at most. Each, and its square, is off by one unit, up or down: so the sum is
    within this factor, and what is shortened by it is not taken for too long.
    """
    at_once = _at_once(sizes)
    parts = sum(-(-size // at_once) for size in sizes)
    return math.exp(-_UNIT * (min(at_once, max(sizes)) + parts + 4))


def check_rows(rows: list[int], num_processes: int) -> None:
    """Refuses more rows of clip units than sums have room for.

    Args:
      rows: of each block.
      num_processes: with as many each.

    Raises:
      ValueError: a block of more than `MOST_ROWS`, or in all more than `MOST_UNITS`.
    """
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
