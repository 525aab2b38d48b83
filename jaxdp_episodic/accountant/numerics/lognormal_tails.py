"""Tails of sums of lognormal terms along given contours; NumPy only.

See `numerics.lognormal_sums`, which chooses the contours. Each has two parts: the real
axis up to where it starts, of which the imaginary part of K^n counts alone (`Jumps`),
and a ray (`Rays`).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.complex_exponentials import (
    exp_in_place,
    log_near,
)
from jaxdp_episodic.accountant.numerics.lognormal_terms import (
    AxisTransform,
    Sums,
    by_rows,
    similar_rows,
    transform_on_axis,
)
from jaxdp_episodic.accountant.numerics.loops import at
from jaxdp_episodic.accountant.numerics.quadrature import (
    chebyshev_points,
    in_blocks,
    in_turn,
    through_columns,
    through_points,
)
from jaxdp_episodic.accountant.numerics.skewed_terms import (
    gauss,
    larger_saddle,
    place_of,
)

# Arguments of one contour that are evaluated together (measured).
_TOGETHER = 8
# Logarithm of what is absent: e^ABSENT = 0.
ABSENT = -1e300
# Gauss-Legendre rules, nodes and panels, of the transform along the axis and of its
# jumps. Both contours that are compared share them: their own errors are below
# 1e-12 but for tails of two terms under much noise below e^-70.
_AXIS_RULES = ((24, 4), (40, 1))
# Chebyshev nodes of the transform along the axis, and of the finer contours.
_CHEBYSHEV = (64, 88)
# Panels along the axis over 1 + shift, and of finer contours, at shifts up to 2 and
# above; and Gauss-Legendre nodes of each. 99 % of 286 sums had errors below 2e-9; with
# one panel less below 8e-9, with 18 nodes below 4e-9.
_PANELS = ((3, 4), (4, 6))
_PANEL_NODES = 22


class Rays(NamedTuple):
    """Integrands ``e^{power + k p}`` times powers of ``start / p`` at nodes of rays.

    Shares are those of the second, first and zeroth power of ``start / p``.
    """

    num_nodes: np.ndarray  # (J,); rows are padded by `ABSENT`
    parts: list[np.ndarray]  # real, imaginary: (J, 2, N) of p from the start, and power
    share: list[np.ndarray]  # imaginary, real: (J, N, 3)

    def sums(self, contour: np.ndarray, constant: np.ndarray) -> np.ndarray:
        """Sums over nodes by second, first and zeroth power, (R, M, 3).

        Of contours (R,) and k, (R, M).
        """
        result = np.empty((*constant.shape, self.share[0].shape[-1]))
        for rows, most in similar_rows(self.num_nodes[contour], _TOGETHER):
            some = contour[rows]
            grown = [
                _exponents(part[some], constant[rows], most) for part in self.parts
            ]
            exp_in_place(*grown)
            result[rows] = grown[0] @ self.share[0][some, :most]
            result[rows] += grown[1] @ self.share[1][some, :most]
        return result


class Jumps(NamedTuple):
    """The same along the axis, all real: (J, 2, N), and (J, N, 3)."""

    num_nodes: np.ndarray
    parts: np.ndarray
    share: np.ndarray

    def sums(self, contour: np.ndarray, constant: np.ndarray) -> np.ndarray:
        """As those of rays, over e to the power that is last of all; (R, M, 4)."""
        result = np.empty((*constant.shape, self.share.shape[-1] + 1))
        for rows, most in similar_rows(self.num_nodes[contour], _TOGETHER):
            some = contour[rows]
            grown = _exponents(self.parts[some], constant[rows], most)
            largest = np.max(grown, axis=-1, keepdims=True)
            grown -= largest
            np.exp(grown, out=grown)
            result[rows, :, :-1] = grown @ self.share[some, :most]
            result[rows, :, -1:] = largest
        return result


def powers(over: np.ndarray, factor: Any = 1.0) -> np.ndarray:
    """``over`` squared, to the first and to the zeroth, by a factor; (..., 3)."""
    result = np.empty((*over.shape, 3), over.dtype)
    result[..., 2] = factor
    result[..., 1] = over * factor
    result[..., 0] = over * result[..., 1]
    return result


def _exponents(parts: np.ndarray, constant: np.ndarray, most: int) -> np.ndarray:
    """``k p + power`` at the first nodes, (R, M, most)."""
    p, power = parts[:, None, 0, :most], parts[:, None, 1, :most]
    return constant[..., None] * p + power


class Contours(NamedTuple):
    """Contours of S sums, each followed by finer ones; by `lognormal_sums.contours`."""

    terms: Sums  # (S,), upper tails first
    first: np.ndarray  # (2 S,) index of each sum's first contour, and first finer one
    start: np.ndarray  # (2 S, C) where these leave the axis, or cross it
    size: np.ndarray  # (2 S, C) log |K^n / p²| there; padded by inf
    starts: np.ndarray  # (2, J) where all contours do, and log |K^n| there
    rays: Rays  # of all contours, one after the other
    jumps: Jumps  # of those of upper tails

    def log_tails(
        self, which: np.ndarray, log_ratio: np.ndarray, *, finer: bool = False
    ) -> np.ndarray:
        """``log E(X - x)_+``, ``log P(X > x)``, log-density at ``x = n e^log_ratio``.

        Of lower tails ``log E(x - X)_+``, ``log P(X < x)``, it at ``n e^-log_ratio``.

        Of sums ``which`` (m,) at ``log_ratio`` >= 0; the ``finer`` contours tell the
        error of the others. (3, m); NaN where more cancels than double precision has.
        """
        with np.errstate(all="ignore"):
            constant = at(self.terms, which).constant(log_ratio)
            kind = 2 * which + finer
            # The contour on which the integrand is smallest: little cancels.
            size = self.size[kind] + constant[:, None] * self.start[kind]
            mine = np.argmin(size, axis=1)
            contour, column = _side_by_side(mine + self.first[kind])
            constant = constant[column]
            start, base = self.starts[:, contour, None]
            totals, top = self.rays.sums(contour, constant), base + start * constant
            upper = np.searchsorted(contour, len(self.jumps.num_nodes))
            if upper:
                sums = self.jumps.sums(contour[:upper], constant[:upper])
                both = np.maximum(top[:upper], sums[..., -1])
                totals[:upper] *= np.exp(top[:upper] - both)[..., None]
                totals[:upper] += sums[..., :-1] * np.exp(
                    sums[..., -1:] - both[..., None]
                )
                top[:upper] = both
            logs = np.log(totals) + top[..., None]
            logs -= np.log(start)[..., None] * np.array([2.0, 1.0, 0.0])
            result = np.empty((len(log_ratio), 3))
            result[column] = logs
        return result.T


def _side_by_side(contour: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Batches of `_TOGETHER` arguments of one contour, of contours (m,).

    (R,) contours, and (R, M) which arguments; padded by the last.
    """
    order = np.argsort(contour, kind="stable")
    every, number = np.unique(contour, return_counts=True)
    rows = -(-number // _TOGETHER)
    begin = np.repeat(np.cumsum(number) - number, rows)
    end = np.repeat(np.cumsum(number), rows)
    rank = np.arange(len(begin)) - np.repeat(np.cumsum(rows) - rows, rows)
    index = (begin + rank * _TOGETHER)[:, None] + np.arange(_TOGETHER)
    return np.repeat(every, rows), order[np.minimum(index, end[:, None] - 1)]


def jumps_of(
    terms: Sums, which: np.ndarray, start: np.ndarray, fine: np.ndarray
) -> Jumps:
    """Integrands of upper tails along the axis from 0 to the contours' starts.

    The variable is the larger saddle point x of ``p A - x²/2`` in place of p. On the
    axis ``K^n = |K|^n e^{i n arg K}``: of its imaginary part ``sin(n arg K)`` is left.

    Of terms (S,), upper tails first: ``which`` of these is each contour's, where it
    leaves the axis, and 1 of finer contours, else 0; (J,) each.
    """
    upper = at(terms, np.flatnonzero(terms.upper > 0))
    which = which[: np.searchsorted(which, len(upper.count))]
    if not len(which):
        return Jumps(np.zeros(0, int), np.zeros((0, 2, 0)), np.zeros((0, 0, 3)))
    start, fine, line = start[: len(which)], fine[: len(which)], at(upper, which)
    s, end = line.shift, line.last_saddle
    first = larger_saddle(np.log(start), s)
    is_rare = first >= end
    first = np.minimum(first, end - 1)
    panels = np.array(_PANELS)[(s > 2).astype(int), fine]
    panels = np.ceil(panels * (1 + s)).astype(int)
    # Nodes of all contours, one after the other.
    count = np.where(is_rare, 0, _PANEL_NODES * panels)
    mine, rank, node, weight = in_turn(count, _panel_rule)
    s, line, length = s[mine], at(line, mine), (end - first)[mine]
    x = first[mine] + length * node
    p = np.exp(place_of(x, s))
    # One transform for all contours of a sum, of which the coarse use fewer nodes.
    low, high = np.full(len(upper.count), np.inf), upper.last_saddle - 1e-9
    np.minimum.at(low, which, first)
    values = _along_axis(upper, low, high)
    row, number = which[mine], np.repeat(_CHEBYSHEV, len(low))
    position = np.clip(2 * (x - low[row]) / (high - low)[row] - 1, -1.0, 1.0)
    values = values.reshape(len(values), len(number), -1)
    column = row + len(low) * fine[mine]
    log_tangent, real = through_columns(values, number, position, column)
    tangent, power = np.exp(log_tangent), np.where(line.mean > 0, p * p, p)
    size = line.count * (real * power + 0.5 * np.log1p(tangent * tangent))
    size += np.log(p * (s - 1 / x) * length * weight / math.pi)  # -dp = p (s - 1/x) dx
    angle = line.count * np.arctan(tangent)

    def dense(nodes: np.ndarray, otherwise: float = 0.0) -> np.ndarray:
        result = np.full((len(count), max(count.max(), 1)), otherwise)
        result[mine, rank] = nodes
        return result

    parts = np.stack([dense(p), dense(size, ABSENT)], axis=1)
    share = powers(dense(start[mine] / p), dense(np.sin(angle)))
    return Jumps(np.maximum(count, 1), parts, share)


def _along_axis(terms: Sums, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Logarithms of tan(arg K) and of Re K over p, or p²; smooth.

    At Chebyshev points from low to high, (S,), in x, for coarse and for finer contours:
    (2, 2, S, N). Re K > 0, as arg K < pi/4.
    """
    points = 0.5 * (chebyshev_points(_CHEBYSHEV[1]) + 1)
    nodes = low[:, None] + (high - low)[:, None] * points
    terms = at(terms, np.repeat(np.arange(len(low)), len(points)))
    p = np.exp(place_of(nodes.reshape(-1), terms.shift))
    how = {"rules": _AXIS_RULES, "jumps": True}
    found = AxisTransform(*by_rows(transform_on_axis, terms, p, **how))
    scale = np.where(terms.mean > 0, p * p, p)
    real = np.real(log_near(np.real(found.whole), np.real(found.excess)))
    rows = [np.log(np.imag(found.whole)) - real, real / scale]
    values = np.zeros((2, 2, *nodes.shape))
    values[:, 1] = np.reshape(rows, (2, *nodes.shape))
    values[:, 0, :, : _CHEBYSHEV[0]] = in_blocks(values[:, 1], _fewer(*_CHEBYSHEV))
    return values


def _panel_rule(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    return gauss(_PANEL_NODES, nodes // _PANEL_NODES)


@functools.lru_cache
def _fewer(few: int, many: int) -> np.ndarray:
    """(many, few): values at ``few`` Chebyshev points from those at ``many``."""
    return through_points(chebyshev_points(many), np.eye(many), chebyshev_points(few))
