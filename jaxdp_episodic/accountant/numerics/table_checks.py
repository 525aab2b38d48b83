"""What is known of random allocation's tables without them: are they right?

Of S tables side by side.

A table holds the profile ``H(w) = E(W - w)_+`` of a ratio W of mean 1. For convex f

    E f(W) - f(1) = int f''(w) min(H(w), H(w) - 1 + w) dw,

and for ``f = e^{-pw}``, and powers of w - 1, the left side is known without a contour,
by `numerics.ratio_means`. What is integrated has a peak, which moves with p, or the
power, from one end of a table to the other: so little that is off is seen far out as
well as in the middle, and also what all contours leave out alike.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.mean_moments import log_excess_transform
from jaxdp_episodic.accountant.numerics.quadrature import (
    chebyshev_points,
    in_blocks,
    through_points,
)
from jaxdp_episodic.accountant.numerics.ratio_means import (
    Powers,
    log_distances,
    log_middle_distance,
    power_factors,
)
from jaxdp_episodic.accountant.numerics.skewed_terms import gauss

# How far down logarithms are held to a relative error, and to what is absolute for so
# many nats below it.
CHECKED, RAREST = -36.0, 16.0
_AGREEING = 1e-7
# Nodes of a panel, for so much of log w, at least and at most; and number of transforms
# that are compared.
_NODES, _LONG, _LEAST, _MOST, _TRANSFORMS = 32, 8.0, 2, 6, 24
# Parts a of the distances, and spacing; see `log_distances`.
_PARTS, _SPACING = np.array([0.5, 0.75]), 0.35
# What jumps beyond a table may make of a power, over one term's part of it.
_JUMPS = 8.0
# A power is compared where its integral is known to such a share.
_KNOWN = 0.1


def allowed_off(log_tail: np.ndarray) -> np.ndarray:
    """By how much the logarithm of a tail may be off."""
    return _AGREEING * np.exp(np.clip(CHECKED - log_tail, 0.0, RAREST))


class Places(NamedTuple):
    """Of S tables: places with weights of a rule, (S, N), and rows there, (R, S, N)."""

    place: np.ndarray
    weight: np.ndarray
    rows: np.ndarray


def num_nodes(core: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """(S,) of a panel, of `chebyshev_tables.side_by_side`."""
    longest = np.max(core[:, None] * np.diff(np.sinh(edges)), axis=1)
    return _NODES * np.clip(np.ceil(longest / _LONG), _LEAST, _MOST).astype(int)


def places_of(
    core: np.ndarray, edges: np.ndarray, values: np.ndarray, number: int
) -> Places:
    """Of `chebyshev_tables.side_by_side`, so many of each panel."""
    z, weight = gauss(number, 1)
    width, core = np.diff(edges)[..., None], core[:, None]
    z = (edges[:, :-1, None] + width * z).reshape(len(core), -1)
    weight = core * np.cosh(z) * (width * weight).reshape(z.shape)
    rows = in_blocks(values, _through(values.shape[-1], number))
    return Places(core * np.sinh(z), weight, rows.reshape(-1, *z.shape))


@functools.cache
def _through(known: int, number: int) -> np.ndarray:
    """(known, number): from values at Chebyshev points to those at a panel's nodes."""
    x = 2 * gauss(number, 1)[0] - 1
    return through_points(chebyshev_points(known), np.eye(known), x)


def fitting(values: np.ndarray, nodes: Places, ratio: np.ndarray) -> np.ndarray:
    """(S, P) whether rows are integrals of the next ones, without a jump between.

    This sees what is off in one row, or from one panel on, not what is off in the same
    way in all of them, as what every contour leaves out.

    Args:
      values: (3, S, P, nodes) of tables.
      nodes: `places_of` them.
      ratio: (S, N) at these; it changes by itself times the place's change.
    """
    step = np.exp(np.minimum(np.diff(nodes.rows, axis=0), 700.0))
    fall = (step * ratio * nodes.weight).reshape(2, *values.shape[1:3], -1).sum(axis=3)
    off = np.abs(values[:2, ..., -1] - values[:2, ..., 0] + fall).max(axis=0)
    jump = np.zeros_like(off)
    jump[:, 1:] = np.abs(values[:, :, 1:, 0] - values[:, :, :-1, -1]).max(axis=0)
    top = values[0, :, :1, 0]
    begin, end = (allowed_off(values[0, ..., i] - top) for i in (0, -1))
    return (off <= end) & (jump <= begin)


class Side(NamedTuple):
    """Profiles at places on one side of w = 1, (S, N) each; see the module.

    Attributes:
      log_w: away from 0.
      log_gain: of H, or of H - 1 + w below 1.
      weight: of the rule, in log w; behind the last place 0.
      spare: by how much log_gain may be off.
      last: (S, 2) the last two places.
    """

    log_w: np.ndarray
    log_gain: np.ndarray
    weight: np.ndarray
    spare: np.ndarray
    last: np.ndarray

    def integrals(self, log_second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of ``f''``, (S, T, N), times H: (S, T), and by how much they may be off."""
        values = log_second + (self.log_gain + self.log_w)[:, None]
        np.exp(values, out=values)
        weights = np.stack([self.weight, self.weight * self.spare], axis=-1)
        return self.totals(values @ weights, self.ends(values))

    def ends(self, rows: np.ndarray) -> np.ndarray:
        """The last two of (S, ..., N)."""
        found = rows[np.arange(len(rows))[:, None], ..., self.last]
        return np.moveaxis(found, 1, -1)

    def totals(
        self, sums: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """`integrals` of ``f'' H w``, of its sums with the weights, (S, T, 2).

        With the weights times what may be off, too; and of its last two. Beyond the
        last place it is taken to fall no slower than there.
        """
        before, last = np.moveaxis(ends, -1, 0)
        slope = np.log(last / before) / np.abs(np.diff(self.ends(self.log_w)))
        beyond = np.where(slope < 0, last / -slope, np.inf)
        beyond = np.where(last > 0, beyond, 0.0)
        return sums[..., 0], sums[..., 1] + 2 * beyond


def side_of(
    nodes: Places, sign: float, scale: np.ndarray, error: np.ndarray | float
) -> Side:
    """Of tables by ``|log w|`` whose first row is the profile times a scale."""
    gain = nodes.rows[0]
    spare = allowed_off(gain - gain[:, :1]) + np.reshape(error, (-1, 1))
    log_gain = gain - np.log(scale)[:, None]
    last = np.sum(nodes.weight > 0, axis=1)[:, None] - np.array([2, 1])
    return Side(sign * nodes.place, log_gain, nodes.weight, spare, last)


def powers_agree(low: Side, high: Side, core: np.ndarray, exact: Powers) -> np.ndarray:
    """(S,) whether profiles have the powers, from the second one on, up to the end.

    Of those that are there: others are -inf.
    """
    whole, jumps, place = (field[:, 2:] for field in exact)
    left, core = np.arange(whole.shape[1]), core[:, None]
    found, rest = np.zeros((2, *whole.shape))
    for side, sign in ((low, (-1.0) ** left), (high, 1.0)):
        first = np.exp(side.log_gain + side.log_w) / core**2
        away = np.abs(np.expm1(side.log_w)) / core
        many, few, scale = power_factors(away, first, len(left) - 1)
        many, few = many.swapaxes(0, 1), few.swapaxes(0, 1)
        weights = side.weight, side.weight * side.spare
        sums = [many @ (few * each[:, None]).swapaxes(1, 2) for each in weights]
        ends = side.ends(many)[:, :, None] * side.ends(few)[:, None]
        both = np.stack(sums, axis=-1) * scale[..., None], ends * scale[..., None]
        sums, ends = (x.reshape(len(x), -1, 2)[:, : len(left)] for x in both)
        total, off = side.totals(sums, ends)
        found, rest = found + sign * total, rest + off
    # Rare jumps may be the larger part, beyond the end, where the rest still falls.
    beyond = place > high.ends(high.log_w)[:, 1:]
    rest = rest + np.where(beyond, _JUMPS * jumps, 0.0)
    # What is made beyond the end, by a few terms together, is not known so well.
    agree = (rest > _KNOWN * np.abs(whole)) | (np.abs(found - whole) <= rest)
    return np.all(agree | np.isneginf(whole), axis=1)


def transforms_agree(
    low: Side, high: Side, count: np.ndarray, shift: np.ndarray
) -> np.ndarray:
    """(S,) whether they have the Laplace transforms of means of terms, at several p.

    That of one deviation sees a distribution of the right mass and mean whose shift is
    1e-4 larger: by some 2e-4.
    """
    # From where e^{-pw} ends at the last place to where it does at the first.
    end, slope = low.ends(low.log_w), np.diff(low.ends(low.log_gain))
    last = np.log(slope / np.diff(end)) - end[:, 1:]
    first = -high.ends(high.log_w)[:, 1:]
    log_p = first + (last - first) * np.linspace(0, 1, _TRANSFORMS)
    exact = log_excess_transform(log_p, count, count, shift)
    size = np.stack([2 * log_p - exact, -np.exp(log_p)], axis=-1)
    found = []
    for side in (low, high):
        rows = np.stack([np.ones_like(side.log_w), np.exp(side.log_w)], axis=1)
        found.append(side.integrals(in_blocks(size, rows)))
    return _are_one(*found)


def distances_agree(
    low: Side, high: Side, bins: int, count: int, shift: float
) -> np.ndarray:
    """(S,) whether a ratio's have ``E (W - 1)² / (W + 1)`` and ``E (W - 1)² W^{a-1}``.

    Of little noise the powers are beyond a table; the first of these never is.
    """
    middle = log_middle_distance(bins, count, shift)
    apart = log_distances(bins, count, shift, _PARTS, _SPACING)
    exact = np.append(apart, middle)[:, None]
    a = _PARTS[:, None]
    found = []
    for side in (low, high):
        w = np.exp(side.log_w)
        second = a * (a + 1) * w * w + 2 * a * (1 - a) * w + (1 - a) * (2 - a)
        parts = np.log(second) + (a - 3) * side.log_w
        nearest = np.log(8.0) - 3 * np.log1p(w)
        found.append(side.integrals((np.concatenate([parts, nearest]) - exact)[None]))
    return _are_one(*found)


def _are_one(
    below: tuple[np.ndarray, np.ndarray], above: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """(S,) whether integrals of both sides add up to 1, by what they may be off."""
    return np.all(np.abs(below[0] + above[0] - 1) <= below[1] + above[1], axis=1)
