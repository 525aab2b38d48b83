"""What is known of random allocation's tables without them: are they right?

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

from jaxdp_episodic.numerics.mean_moments import log_excess_transform
from jaxdp_episodic.numerics.quadrature import chebyshev_points, through_points
from jaxdp_episodic.numerics.ratio_means import (
    Powers,
    log_distances,
    log_middle_distance,
    power_factors,
)
from jaxdp_episodic.numerics.skewed_terms import gauss

# How far down logarithms are held to a relative error, and to what is absolute for so
# many nats below it.
CHECKED, RAREST = -36.0, 16.0
_AGREEING = 1e-7
# Nodes of a panel, for so much of log w, at least and at most; and number of transforms
# that are compared.
_NODES, _LONG, _LEAST, _MOST, _TRANSFORMS = 32, 8.0, 2, 6, 24
# Parts a of the distances; see `log_distances`.
_PARTS = np.array([0.5, 0.75])
# What jumps beyond a table may make of a power, over one term's part of it.
_JUMPS = 8.0
# A power is compared where its integral is known to such a share.
_KNOWN = 0.1


def allowed_off(log_tail: np.ndarray) -> np.ndarray:
    """By how much the logarithm of a tail may be off."""
    return _AGREEING * np.exp(np.clip(CHECKED - log_tail, 0.0, RAREST))


class Places(NamedTuple):
    """Of a table: places with weights of a rule, (N,), and rows there, (R, N)."""

    place: np.ndarray
    weight: np.ndarray
    rows: np.ndarray


def places_of(core: float, edges: np.ndarray, values: np.ndarray) -> Places:
    """Of a `chebyshev_tables.Table`'s core, edges and values."""
    longest = core * np.diff(np.sinh(edges)).max()
    number = _NODES * int(np.clip(np.ceil(longest / _LONG), _LEAST, _MOST))
    z, weight = gauss(number, 1)
    width = np.diff(edges)[:, None]
    z = (edges[:-1, None] + width * z).reshape(-1)
    weight = core * np.cosh(z) * (width * weight).reshape(-1)
    rows = values @ _through(values.shape[2], number)
    return Places(core * np.sinh(z), weight, rows.reshape(len(values), -1))


@functools.cache
def _through(known: int, number: int) -> np.ndarray:
    """(known, number): from values at Chebyshev points to those at a panel's nodes."""
    x = 2 * gauss(number, 1)[0] - 1
    return through_points(chebyshev_points(known), np.eye(known), x)


def fitting(values: np.ndarray, nodes: Places, ratio: np.ndarray) -> np.ndarray:
    """(panels,) whether rows are integrals of the next ones, without a jump between.

    This sees what is off in one row, or from one panel on, not what is off in the same
    way in all of them, as what every contour leaves out.

    Args:
      values: (3, panels, nodes) of a table.
      nodes: `places_of` it.
      ratio: (N,) at these; it changes by itself times the place's change.
    """
    step = np.exp(np.minimum(np.diff(nodes.rows[:3], axis=0), 700.0))
    fall = (step * ratio * nodes.weight).reshape(2, values.shape[1], -1).sum(axis=2)
    off = np.abs(values[:2, :, -1] - values[:2, :, 0] + fall).max(axis=0)
    jump = np.abs(values[:3, 1:, 0] - values[:3, :-1, -1]).max(axis=0)
    begin, end = (allowed_off(values[0, :, i] - values[0, 0, 0]) for i in (0, -1))
    return (off <= end) & (np.append(0.0, jump) <= begin)


class Side(NamedTuple):
    """A profile at places on one side of w = 1, (N,) each; see the module.

    Attributes:
      log_w: away from 0.
      log_gain: of H, or of H - 1 + w below 1.
      weight: of the rule, in log w.
      spare: by how much log_gain may be off.
    """

    log_w: np.ndarray
    log_gain: np.ndarray
    weight: np.ndarray
    spare: np.ndarray

    def integrals(self, log_second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of ``f''``, (T, N), times H: (T,) each, and by how much they may be off."""
        values = np.exp(log_second + (self.log_gain + self.log_w))
        return self.totals(values @ self.weights.T, values[:, -2:])

    @property
    def weights(self) -> np.ndarray:
        """Of the rule, and those times what may be off; (2, N)."""
        return np.stack([self.weight, self.weight * self.spare])

    def totals(
        self, sums: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """`integrals` of ``f'' H w``, of its sums with `weights` and last two, (T, 2).

        Beyond the last place it is taken to fall no slower than there.
        """
        before, last = ends.T
        slope = np.log(last / before) / np.abs(np.diff(self.log_w[-2:]))
        beyond = np.where(slope < 0, last / -slope, np.inf)
        beyond = np.where(last > 0, beyond, 0.0)
        return sums[:, 0], sums[:, 1] + 2 * beyond


def side_of(nodes: Places, sign: float, scale: float, error: float) -> Side:
    """Of a table by ``|log w|`` whose first row is the profile times a scale."""
    gain = nodes.rows[0]
    spare = allowed_off(gain - gain[0]) + error
    return Side(sign * nodes.place, gain - np.log(scale), nodes.weight, spare)


def powers_agree(low: Side, high: Side, core: float, exact: Powers) -> bool:
    """Whether the profile has the powers, from the second one on, up to its end."""
    left = np.arange(len(exact.all) - 2.0)

    log_w, log_gain = (np.append(*pair) for pair in zip(low[:2], high[:2], strict=True))
    first = np.exp(log_gain + log_w) / core**2
    away = np.abs(np.expm1(log_w)) / core
    many, few, scale = power_factors(away, first, len(left) - 1)

    def totals(side: Side, at: slice) -> tuple[np.ndarray, np.ndarray]:
        weighted = few[:, at] * side.weights[:, None]
        sums = (many[:, at] @ weighted.transpose(0, 2, 1)) * scale
        ends = many[:, at][:, None, -2:] * few[:, at][:, -2:] * scale[..., None]
        sums, ends = sums.reshape(2, -1).T, ends.reshape(-1, 2)
        return side.totals(sums[: len(left)], ends[: len(left)])

    below, off = totals(low, slice(len(low.log_w)))
    above, more = totals(high, slice(len(low.log_w), None))
    found = (-1.0) ** left * below + above
    # Rare jumps may be the larger part, beyond the end, where the rest still falls.
    beyond = exact.place[2:] > high.log_w[-1]
    rest = off + more + np.where(beyond, _JUMPS * exact.jumps[2:], 0.0)
    # What is made beyond the end, by a few terms together, is not known so well.
    known = ~(rest > _KNOWN * np.abs(exact.all[2:]))
    return bool(np.all(np.abs(found - exact.all[2:])[known] <= rest[known]))


def transforms_agree(low: Side, high: Side, count: int, shift: float) -> bool:
    """Whether it has the Laplace transforms of the mean of terms, at several p.

    That of one deviation sees a law of the right mass and mean that is of a shift which
    is 1e-4 larger: by some 2e-4.
    """
    # From where e^{-pw} ends at the last place to where it does at the first.
    slope = np.diff(low.log_gain[-2:]) / np.diff(low.log_w[-2:])
    first, last = -high.log_w[-1], np.log(slope[0]) - low.log_w[-1]
    log_p = np.linspace(first, last, _TRANSFORMS)
    exact = log_excess_transform(log_p, count, count, shift)
    found = [
        side.integrals(
            (2 * log_p - exact)[:, None] - np.outer(np.exp(log_p), np.exp(side.log_w))
        )
        for side in (low, high)
    ]
    return _are_one(*found)


def distances_agree(low: Side, high: Side, bins: int, count: int, shift: float) -> bool:
    """Whether a ratio's has ``E (W - 1)² / (W + 1)`` and ``E (W - 1)² W^{a-1}``.

    Of little noise the powers are beyond a table; the first of these never is.
    """
    middle = log_middle_distance(bins, count, shift)
    exact = np.append(log_distances(bins, count, shift, _PARTS), middle)[:, None]
    a = _PARTS[:, None]
    found = []
    for side in (low, high):
        w = np.exp(side.log_w)
        second = a * (a + 1) * w * w + 2 * a * (1 - a) * w + (1 - a) * (2 - a)
        parts = np.log(second) + (a - 3) * side.log_w
        nearest = np.log(8.0) - 3 * np.log1p(w)
        found.append(side.integrals(np.concatenate([parts, nearest[None]]) - exact))
    return _are_one(*found)


def _are_one(
    below: tuple[np.ndarray, np.ndarray], above: tuple[np.ndarray, np.ndarray]
) -> bool:
    """Whether integrals of both sides add up to 1, by what they may be off."""
    return bool(np.all(np.abs(below[0] + above[0] - 1) <= below[1] + above[1]))
