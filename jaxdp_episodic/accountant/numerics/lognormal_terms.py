"""``K(p) = E e^{±p (A - m)}`` of one lognormal term, just above the real axis.

``A = e^{s x - s²/2}``, x standard normal; see `numerics.lognormal_sums`. Rows are
independent of one another, whatever they belong to: sums, contours, parts of contours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.loops import complex_of, map_arrays
from jaxdp_episodic.accountant.numerics.skewed_terms import (
    SQRT_2PI,
    gauss,
    larger_saddle,
    steepest,
    too_rare,
)
from jaxdp_episodic.accountant.numerics.special import log_normal_tail

# Range of a table, in standard deviations of the sum or of the one term that jumps:
# what is beyond has a probability of e^-84.
REACH = 13.0
# Range of one term's normal variable under its tilted distribution, in standard
# deviations: N(0, 1) has a mass of 1e-17 beyond.
_TILTED_REACH = 8.5
# Below this shift m = 1, else 0: K^n and e^{pk} would cancel in too many digits, and
# n arg K turn too often between the points of a ray to be followed (with 0.05, tables
# of 16 to 35 terms failed up to 0.07). From 0.35 on m = 1 loses the upper tails of few.
_CENTRED_SHIFT = 0.15
# Shift below which K falls off like a Gaussian's on a vertical ray: with 0.35 tables of
# two terms are off by 3e-6 there, with 0.24 by 6e-3, and with this by 2e-8.
_LIGHT_SHIFT = 0.28
# Array elements that fit the cache (measured).
_CACHED_ELEMENTS = 2**17
# Rows of one call of a kernel: fewer take longer, more leave the cache (measured).
_ROWS = 2048


class Sums(NamedTuple):
    """Sums of terms, and the tail of each that is asked for; (R,) each."""

    count: np.ndarray  # n terms
    shift: np.ndarray  # s > 0
    upper: np.ndarray  # 1 for the tail of large sums, 0 for that of small ones

    @property
    def sign(self) -> np.ndarray:
        """1 for upper tails, -1 for lower ones."""
        return 2 * self.upper - 1

    @property
    def mean(self) -> np.ndarray:
        """The m of ``A - m``."""
        return np.where(self.shift < _CENTRED_SHIFT, 1.0, 0.0)

    @property
    def lowest(self) -> np.ndarray:
        """Where the range of x ends on the left, even if all terms are small."""
        return -_TILTED_REACH - REACH / np.sqrt(self.count)

    @property
    def highest(self) -> np.ndarray:
        """Where it ends on the right."""
        return np.maximum(-self.lowest, REACH) + self.shift

    @property
    def last_saddle(self) -> np.ndarray:
        """The larger saddle at which a jump is too rare to count."""
        return np.maximum(self.highest, too_rare(self.shift))

    @property
    def is_light(self) -> np.ndarray:
        """Where K falls off like a Gaussian's: rays are vertical."""
        return self.shift < _LIGHT_SHIFT

    def centred_term(self, log_a: np.ndarray) -> np.ndarray:
        """``±(A - m)`` at log A, (..., R)."""
        return (np.expm1(log_a) + (1 - self.mean)) * self.sign

    def constant(self, log_ratio: np.ndarray) -> np.ndarray:
        """``k = ±(n m - x)`` at ``x = n e^±log_ratio``, (..., R); all digits near 0."""
        y = self.sign * log_ratio
        value = np.where(self.mean > 0, np.expm1(y), np.exp(y))
        return -self.count * self.sign * value


class AxisTransform(NamedTuple):
    """On the upper side of the real axis, complex; (R,) each."""

    whole: np.ndarray  # K
    excess: np.ndarray  # K - 1, without cancellation


def transform_on_axis(
    terms: Sums, p: np.ndarray, *, rules: tuple, jumps: bool
) -> AxisTransform:
    """At real p > 0, (R,), of as many terms; ``jumps``: these are upper tails.

    ``rules`` are Gauss–Legendre's nodes and panels, of the integral and of its jumps.
    """
    s, low, end = terms.shift, terms.lowest, terms.highest
    saddle = larger_saddle(np.log(p), s) if jumps else end
    end = np.minimum(saddle, end)
    node, weight = (rule[:, None] for rule in gauss(*rules[0]))
    v = low + (end - low) * node
    normal = (end - low) * weight * np.exp(-0.5 * v * v) / SQRT_2PI
    term = terms.centred_term(s * v - 0.5 * s * s)
    exponent = np.minimum(p * term, 700.0)
    grown = np.expm1(exponent) * normal
    excess = np.sum(grown, axis=0) - np.exp(log_normal_tail(end)) + 0j
    # Upper tails have K >= 1; lower ones a K that may be far below.
    tilted = grown + normal if jumps else np.exp(exponent) * normal
    whole = np.sum(tilted, axis=0) + 0j
    if jumps:
        _, dv, exponent = steepest(saddle, s, gauss(*rules[1]))
        exponent = np.clip(exponent - (terms.mean * p)[:, None], -745, 700)
        size = np.exp(exponent) / SQRT_2PI
        size[~(saddle < terms.last_saddle)] = 0.0
        grown = size * complex_of(np, *dv)
        jump = np.sum(grown, axis=1)
        whole, excess = whole + jump, excess + jump
    return AxisTransform(whole, excess)


def similar_rows(num_nodes: np.ndarray, each: int) -> Iterator[tuple[np.ndarray, int]]:
    """Batches of rows, (R,), that fit the cache, and the most nodes one of them has.

    ``each``: array elements a node.
    """
    order, begin = np.argsort(-num_nodes, kind="stable"), 0
    while begin < len(order):
        most = int(num_nodes[order[begin]])
        size = max(_CACHED_ELEMENTS // (each * most), 1)
        yield order[begin : begin + size], most
        begin += size


def by_rows(kernel: Any, *arrays: Any, **static: Any) -> list[np.ndarray]:
    """``kernel(*arrays, **static)``, `_ROWS` of the last axis at a time."""
    parts = []
    for begin in range(0, arrays[-1].shape[-1], _ROWS):
        rows = slice(begin, begin + _ROWS)
        some = map_arrays(lambda array, rows=rows: array[..., rows], arrays)
        parts.append(kernel(*some, **static))
    return [np.concatenate(part, axis=-1) for part in zip(*parts, strict=True)]
