"""Rows as whole numbers, each a function of itself alone, and their exact sums.

Private statistics are sums over rows. A row's contribution must not depend on the
others, not even on its index, nor the sum on their order: else a missing row would
change how all others are rounded. So all here is arithmetic on whole numbers that
float64 holds, at most 2^53, in which matrix products are exact in any order; and
operations on single numbers, which are rounded the same at any index.
"""

from __future__ import annotations

import math

import numpy as np

STEPS = 2**18
"""Grid steps in norm 1 of a row."""

PRODUCT_STEPS = STEPS**2
"""Steps in norm 1 of a sum: of products of two rows, or of rows times `STEPS`."""

MOST_EXAMPLES = 2**26
"""Most rows of a sum: with as many steps each it stays below 2^62."""

_EXACT = 2**53  # float64 has all whole numbers up to it
# Bits of a row's largest entry while its norm is computed: squares of 2^13 of them,
# more than a row has, sum to less than 2^53.
_NORM_BITS = 20
# Bits of the two factors of an exact product together.
_PRODUCT_BITS = 51
# Rows whose products are summed in float64 at once: as many of norm `STEPS`, and their
# rounding, stay below 2^53.
_EXACT_ROWS = 2**16
# Sum of squares of rows, above which the norm of their outer products' sum is not
# computed: of up to 2^12 columns it is 2^42 or more then; below, sums stay under 2^62.
_MOST_SQUARES = 2**48
# Part of a length by which a group falls short of its bound, for the rounding of rows
# whose norm was that of shorter ones.
_SHORTER = 2.0**-10


def unit(rows: np.ndarray) -> np.ndarray:
    """Returns float64 rows of norm 1; those not finite, or too short, are zero."""
    rows = rows.astype(np.float64)
    low, high = (f(rows, axis=1, initial=0.0) for f in (np.min, np.max))
    largest = np.maximum(high, -low)  # NaN where a row has one
    fits = np.isfinite(largest) & (largest > 1e-30)
    rows[~fits] = 0.0
    rows *= (2.0**_NORM_BITS / np.where(fits, largest, 1.0))[:, None]
    whole = np.rint(rows, out=rows)
    whole /= np.sqrt(np.maximum(squares(whole), 1.0))[:, None]
    return whole


def squares(whole: np.ndarray) -> np.ndarray:
    """The sum of the squares of each row of whole numbers, exact up to 2^53."""
    return np.einsum("ij,ij->i", whole, whole)


def on_grid(rows: np.ndarray, most: int | np.ndarray) -> np.ndarray:
    """Returns rows of norm <= 1 as whole numbers, float64, whose squares are bounded.

    Rounding may lengthen a row by half the diagonal of a cell, so it is shortened by
    this before. A row that is still too long had a norm above 1, and becomes zero.

    ``most`` bounds the sum of a row's squares, or (n,) of each row's, and is at most
    ``STEPS**2``: a row of norm 1 is its root long.
    """
    length = np.sqrt(most) - 0.51 * math.sqrt(rows.shape[1])
    whole = rows * np.maximum(length, 0.0).reshape(-1, 1)
    np.rint(whole, out=whole)
    whole[~(squares(whole) <= most)] = 0.0  # NaN is not, either
    return whole


def as_one(rows: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns rows of norm <= 1 as whole numbers, each group's as long as may be.

    The sum of a group's outer products has at most the norm ``STEPS**2`` (Frobenius),
    and nearly that where a row is not zero. It is checked as a whole number; a group
    that rounding made too long has its rows divided by the root of their number.

    Args:
      rows: (n, D), finite; D at most 2^12.
      groups: (n,) codes; equal ones lie together.
    """
    whole = on_grid(rows, STEPS**2)  # right for groups of one row
    begins = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]][: len(rows)])
    ends = np.append(begins[1:], len(rows))[: len(begins)]
    several = ends - begins > 1
    for start, stop in zip(begins[several], ends[several], strict=True):
        whole[start:stop] = _one_group(rows[start:stop])
    return whole


def _one_group(rows: np.ndarray) -> np.ndarray:
    most = STEPS**2 // len(rows)
    safe = on_grid(rows, most)  # their squares sum to at most STEPS**2
    square = _square_of_moment(safe)
    if not square:
        return safe
    length = math.sqrt(most) - 0.51 * math.sqrt(rows.shape[1])
    length *= math.sqrt(PRODUCT_STEPS / math.sqrt(square)) * (1 - _SHORTER)
    longer = np.rint(rows * min(length, STEPS))
    square = _square_of_moment(longer)
    return safe if square is None or square > PRODUCT_STEPS**2 else longer


def _square_of_moment(whole: np.ndarray) -> int | None:
    """The squared norm of the sum of outer products, exactly; None: it is too large."""
    if not squares(whole).sum() <= _MOST_SQUARES:
        return None
    # Rows with rows give the same as columns with columns. No sum of some of the terms
    # of a product is larger than that of the squares, by Cauchy's inequality.
    is_wide = len(whole) <= whole.shape[1]
    products = whole @ whole.T if is_wide else whole.T @ whole
    high, low = divmod(products.astype(np.int64).ravel(), STEPS)
    parts = high @ high, high @ low, low @ low
    return sum(int(x) * y for x, y in zip(parts, (STEPS**2, 2 * STEPS, 1), strict=True))


def times(whole: np.ndarray, matrix: np.ndarray, longest: float) -> np.ndarray:
    """Returns ``whole @ matrix`` up to a factor, exactly, as whole numbers.

    The matrix is rounded, to about 2^-31 of its longest column.

    ``whole`` (n, D) and the public ``matrix`` (D, k); ``longest`` is a public bound of
    the rows' norms. Products that would not be exact are a `ValueError`.
    """
    matrix = matrix.astype(np.float64)
    reach = longest * np.linalg.norm(matrix, axis=0).max(initial=0.0)
    bits = _PRODUCT_BITS - math.ceil(math.log2(reach)) if reach else 0
    rounded = np.rint(np.ldexp(matrix, bits))
    # No sum of some of a product's terms is larger, by Cauchy's inequality.
    reach = longest * np.linalg.norm(rounded, axis=0).max(initial=0.0)
    if not reach < _EXACT / 2:
        raise ValueError(
            "matrix must have columns whose products with rows are below 2^52, got "
            f"{reach:.3g}"
        )
    return whole @ rounded


def outer_products(whole: np.ndarray) -> np.ndarray:
    """Returns the exact sum of the outer products of whole rows, (D, D) int64."""
    total = np.zeros((whole.shape[1],) * 2, np.int64)
    for part in _parts(whole):
        _check_sum(len(part) * squares(part).max(initial=0.0))
        total += (part.T @ part).astype(np.int64)
    return total


def totals(whole: np.ndarray) -> np.ndarray:
    """Returns the sum of whole rows, (D,) int64, exactly; raises as above."""
    total = np.zeros(whole.shape[1], np.int64)
    for part in _parts(whole):
        _check_sum(len(part) * np.abs(part).max(initial=0.0))
        total += np.sum(part, axis=0).astype(np.int64)
    return total


def _parts(whole: np.ndarray) -> list[np.ndarray]:
    return np.array_split(whole, 1 + len(whole) // _EXACT_ROWS)


def _check_sum(most: float) -> None:
    if not most < _EXACT:
        raise ValueError(f"sums must be below 2^53 to be exact, got up to {most:.3g}")
