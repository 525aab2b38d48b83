"""Checks of random allocation's tables, S side by side, by what is known without them.

A table holds the profile ``H(w) = E(W - w)_+`` of a ratio W of mean 1. For convex f

    E f(W) - f(1) = int f''(w) min(H(w), H(w) - 1 + w) dw,

and for ``f = e^{-pw}``, and powers of w - 1, the left side is known without a contour,
by `numerics.ratio_means`. The integrand has a peak, whose position depends on p, or the
power, and is anywhere in a table: so small errors are seen far out as well as in the
middle, also those that all contours share.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.loops import at
from jaxdp_episodic.accountant.numerics.mean_moments import log_excess_transform
from jaxdp_episodic.accountant.numerics.quadrature import in_blocks
from jaxdp_episodic.accountant.numerics.ratio_means import (
    Moments,
    log_distances,
    log_middle_distance,
    scaled_powers,
)
from jaxdp_episodic.accountant.numerics.skewed_terms import at_gauss, gauss

# Logarithm of a tail, over its largest, down to which the allowed error is relative;
# below it the error may grow as the tail falls,
CHECKED = -36.0
# for so many more nats.
RAREST = 16.0
# The relative error.
_ALLOWED = 1e-7
# Gauss-Legendre nodes of a panel for each `_LONG` of its length in log w, whose number
# is between the two.
_NODES = 32
_LONG = 8.0
_FEWEST = 2
_MOST = 6
# Number of Laplace transforms that are compared.
_TRANSFORMS = 24
# Parts a of the distances, and spacing of log p; see `log_distances`.
_PARTS = np.array([0.5, 0.75])
_SPACING = 0.35
# Largest contribution of jumps beyond a table to a moment, over one term's part of it:
# twice what 1,280 random tables, all but four of them good, had.
_JUMPS = 2.0
# A moment is compared where this share of it, or less, is unknown beyond the table.
_KNOWN = 0.1


def allowed_off(log_tail: np.ndarray) -> np.ndarray:
    """Error of the logarithm of a tail that is allowed."""
    return _ALLOWED * np.exp(np.clip(CHECKED - log_tail, 0.0, RAREST))


class Nodes(NamedTuple):
    """Nodes x of a rule over S tables, with weights, (S, N), and values, (R, S, N)."""

    x: np.ndarray
    weight: np.ndarray
    rows: np.ndarray


def num_nodes(core: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """(S,) nodes for each panel of `chebyshev_tables.side_by_side`."""
    longest = np.max(core[:, None] * np.diff(np.sinh(edges)), axis=1)
    return _NODES * np.clip(np.ceil(longest / _LONG), _FEWEST, _MOST).astype(int)


def nodes_of(
    core: np.ndarray, edges: np.ndarray, values: np.ndarray, number: int
) -> Nodes:
    """Of `chebyshev_tables.side_by_side`, ``number`` for each panel."""
    z, weight = gauss(number, 1)
    width, core = np.diff(edges)[..., None], core[:, None]
    z = (edges[:, :-1, None] + width * z).reshape(len(core), -1)
    weight = core * np.cosh(z) * (width * weight).reshape(z.shape)
    rows = in_blocks(values, at_gauss(values.shape[-1], number).T)
    return Nodes(core * np.sinh(z), weight, rows.reshape(-1, *z.shape))


def panels_agree(values: np.ndarray, nodes: Nodes, ratio: np.ndarray) -> np.ndarray:
    """(S, P) whether rows are integrals of the next ones and panels continuous.

    This sees errors of one row, or from one panel on, not those that all rows share, as
    by a part that every contour leaves out.

    ``values`` (3, S, P, nodes) are tables', whose `nodes_of` follow; ``ratio`` (S, N)
    is the factor of the next row, ``scale e^±x``.
    """
    step = np.exp(np.minimum(np.diff(nodes.rows, axis=0), 700.0))
    fall = (step * ratio * nodes.weight).reshape(2, *values.shape[1:3], -1).sum(axis=3)
    error = np.abs(values[:2, ..., -1] - values[:2, ..., 0] + fall).max(axis=0)
    jump = np.zeros_like(error)
    jump[:, 1:] = np.abs(values[:, :, 1:, 0] - values[:, :, :-1, -1]).max(axis=0)
    top = values[0, :, :1, 0]
    begin, end = (allowed_off(values[0, ..., i] - top) for i in (0, -1))
    return (error <= end) & (jump <= begin)


class Side(NamedTuple):
    """Profiles at nodes on one side of w = 1, (S, N) each; see the module."""

    log_w: np.ndarray  # away from 0
    log_gain: np.ndarray  # of H, or of H - 1 + w below 1
    weight: np.ndarray  # of the rule, in log w; 0 at padding
    error: np.ndarray  # of log_gain, bound
    last: np.ndarray  # (S, 2) index of the last two nodes

    def integrals(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Integrals over log w of ``f'' H w``, (S, T, N), and their errors; (S, T).

        Beyond the last node it is taken to fall no slower than there.
        """
        weights = np.stack([self.weight, self.weight * self.error], axis=-1)
        total, error = np.moveaxis(in_blocks(values, weights), -1, 0)
        before, last = np.moveaxis(self.ends(values), -1, 0)
        slope = np.log(last / before) / np.abs(np.diff(self.ends(self.log_w)))
        beyond = np.where(slope < 0, last / -slope, np.inf)
        return total, error + 2 * np.where(last > 0, beyond, 0.0)

    def of(self, log_second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`integrals` by ``log f''``, (S, T, N)."""
        return self.integrals(
            np.exp(log_second + (self.log_gain + self.log_w)[:, None])
        )

    def ends(self, rows: np.ndarray) -> np.ndarray:
        """The last two of (S, ..., N)."""
        found = rows[np.arange(len(rows))[:, None], ..., self.last]
        return np.moveaxis(found, 1, -1)


def side_of(
    nodes: Nodes, sign: float, scale: np.ndarray, error: np.ndarray | float
) -> Side:
    """Of tables by ``|log w|`` whose first row is the profile times a scale."""
    gain = nodes.rows[0]
    error = allowed_off(gain - gain[:, :1]) + np.reshape(error, (-1, 1))
    log_gain = gain - np.log(scale)[:, None]
    last = np.sum(nodes.weight > 0, axis=1)[:, None] - np.array([2, 1])
    return Side(sign * nodes.x, log_gain, nodes.weight, error, last)


def moments_agree(
    low: Side, high: Side, core: np.ndarray, exact: Moments
) -> np.ndarray:
    """(S,) whether profiles have the moments from the second on, up to the table's end.

    Those that are -inf are unknown.
    """
    whole, jumps, log_w = (field[:, 2:] for field in exact)
    signs = (-1.0) ** np.arange(whole.shape[1])
    found, rest = np.zeros(whole.shape), np.zeros(whole.shape)
    for side, sign in ((low, signs), (high, signs**2)):
        for i, (row, scale) in enumerate(zip(whole, core, strict=True)):
            one = at(side, slice(i, i + 1))
            most = int(np.max(np.flatnonzero(row != -np.inf), initial=0))
            first = np.exp(one.log_gain + one.log_w)[0] / scale**2
            away = np.abs(np.expm1(one.log_w))[0] / scale
            total, error = one.integrals(scaled_powers(away, first, most)[None])
            found[i, : most + 1] += sign[: most + 1] * total[0]
            rest[i, : most + 1] += error[0]
    # Rare jumps may be the larger part, beyond the end, where the rest still falls.
    beyond = log_w > high.ends(high.log_w)[:, 1:]
    rest = rest + np.where(beyond, _JUMPS * jumps, 0.0)
    # Of what a few terms make beyond the end together there is no such bound.
    agree = (rest > _KNOWN * np.abs(whole)) | (np.abs(found - whole) <= rest)
    return np.all(agree | np.isneginf(whole), axis=1)


def transforms_agree(
    low: Side, high: Side, count: np.ndarray, shift: np.ndarray
) -> np.ndarray:
    """(S,) whether they have the Laplace transforms of means of terms, at several p.

    At the p of one deviation a distribution of the right mass and mean whose shift is
    1e-4 too large has an error of 2e-4.
    """
    # From the p at which e^{-pw} ends at the last node to that at the first.
    end, slope = low.ends(low.log_w), np.diff(low.ends(low.log_gain))
    last = np.log(slope / np.diff(end)) - end[:, 1:]
    first = -high.ends(high.log_w)[:, 1:]
    log_p = first + (last - first) * np.linspace(0, 1, _TRANSFORMS)
    exact = log_excess_transform(log_p, count, count, shift)
    size = np.stack([2 * log_p - exact, -np.exp(log_p)], axis=-1)
    found = []
    for side in (low, high):
        rows = np.stack([np.ones_like(side.log_w), np.exp(side.log_w)], axis=1)
        found.append(side.of(in_blocks(size, rows)))
    return _are_one(*found)


def distances_agree(
    low: Side, high: Side, slots: int, count: int, shift: float
) -> np.ndarray:
    """(S,) whether a ratio's have ``E (W - 1)² / (W + 1)`` and ``E (W - 1)² W^{a-1}``.

    Under little noise moments are made beyond a table; the first of these never is.
    """
    middle = log_middle_distance(slots, count, shift)
    apart = log_distances(slots, count, shift, _PARTS, _SPACING)
    exact = np.append(apart, middle)[:, None]
    a = _PARTS[:, None]
    found = []
    for side in (low, high):
        w = np.exp(side.log_w)
        second = a * (a + 1) * w * w + 2 * a * (1 - a) * w + (1 - a) * (2 - a)
        parts = np.log(second) + (a - 3) * side.log_w
        nearest = np.log(8.0) - 3 * np.log1p(w)
        found.append(side.of((np.concatenate([parts, nearest]) - exact)[None]))
    return _are_one(*found)


def _are_one(
    below: tuple[np.ndarray, np.ndarray], above: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """(S,) whether integrals of both sides add up to 1, up to their errors."""
    return np.all(np.abs(below[0] + above[0] - 1) <= below[1] + above[1], axis=1)
