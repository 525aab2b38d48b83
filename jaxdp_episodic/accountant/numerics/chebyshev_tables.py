"""Logarithms of tails as piecewise polynomials, with an estimate of their error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.quadrature import chebyshev_points
from jaxdp_episodic.accountant.numerics.table_checks import CHECKED, RAREST

# Length of a Chebyshev panel in asinh(x / core), and its number of points.
_PANEL_LENGTH = 1.3
_NODES = 16
# Logarithm below which nothing is tabulated.
LEAST = -90.0
# Ends that are tried together, relative to the furthest.
_SHORTER = 0.95 ** np.arange(4)
# Largest Chebyshev coefficient of the last three of a panel; others are halved, at most
# so often.
_LAST_COEFFICIENTS = 1e-9
MOST_HALVINGS = 4
# Growth of the log of that limit for each nat by which tails are rarer than `CHECKED`.
_SLACK = 0.5
# Number of panels that are halved at once where more halvings are asked for, the
# roughest first: rounding errors stay rough in ever more panels, a kink in one or two.
_MOST_HALVED = 12
# Largest relative error of integrals of a table that may be used.
MOST_OFF = 1e-7
# Points at which a table is checked; the factor from differences seen there to errors,
# and the rounding that is added.
_CHECKS = 64
_SAFETY = 10.0
_ROUNDING = 1e-13
# Largest gap between two of them, in nats, where tails are as rare as `CHECKED`.
_CHECKS_APART = 5.5
# Share of these points at which finer sums may fail.
_FEW_FAIL = 0.2

Evaluate = Callable[..., np.ndarray]
"""Maps numbers of tables and points x, (m,), to (3, m); ``finer=True`` by other sums,
with more nodes."""


class Table(NamedTuple):
    """Logarithms of three tails at x >= 0, piecewise Chebyshev.

    Errors are *estimates*, with a safety factor, from the difference to sums with more
    nodes at other points.
    """

    core: float  # scale; interpolation is in asinh(x / core)
    edges: np.ndarray  # (panels + 1,) of that, from 0
    values: np.ndarray  # (3, panels, nodes)
    error: float  # largest error of the logarithms, down to e^-36
    off: np.ndarray  # (3, panels) largest error in each panel, however rare its tails

    @property
    def end(self) -> float:
        """The largest x."""
        return self.core * math.sinh(self.edges[-1])

    def at(self, place: np.ndarray) -> np.ndarray:
        """(3, m) logarithms; beyond the end those of the end, which are larger."""
        z, panel = self._panels(place)
        left, right = self.edges[panel], self.edges[panel + 1]
        return _within(self.values[:, panel], left, right, z)

    def off_at(self, place: np.ndarray) -> np.ndarray:
        """(m,) error of the third row, of alternating sign from panel to panel."""
        _, panel = self._panels(place)
        return self.off[2, panel] * (-1.0) ** panel

    def further_error(self, place: np.ndarray) -> np.ndarray:
        """(m,) errors beyond `error` where tails are rarer than `CHECKED`."""
        _, panel = self._panels(place)
        far = self.values[0, 0, 0] + CHECKED
        # The panel where that begins may have no checked point before it.
        begins = self.values[0, panel, -1] < far
        is_far = self.at(place)[0] < np.where(begins, far + _CHECKS_APART, far)
        # Twice, as the finer sums have errors as well.
        rough = _SAFETY * np.abs(self.values[0] @ _LAST.T).max(axis=1)
        off = np.maximum(2 * self.off[:2].max(axis=0), rough)
        return np.where(is_far, off[panel], 0.0)

    def _panels(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``asinh(x / core)``, within the table, and its panel."""
        z = np.arcsinh(np.maximum(place, 0.0) / self.core)
        z = np.minimum(z, self.edges[-1])
        panel = np.searchsorted(self.edges, z, side="right") - 1
        return z, np.minimum(panel, len(self.edges) - 2)

    def without(self) -> Table:
        """The table with NaN for values."""
        return self._replace(values=self.values * np.nan, error=1.0)

    def up_to(self, panel: int) -> Table:
        """The first panels; `without` values if there is none."""
        if panel == 0:
            return self.without()
        return self._replace(
            edges=self.edges[: panel + 1],
            values=self.values[:, :panel],
            off=self.off[:, :panel],
        )


def side_by_side(tables: list[Table]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cores (T,), edges (T, P + 1) and three values (3, T, P, nodes) of tables.

    Padded with panels of length 0 at the end of a table.
    """
    number = [table.values.shape[1] for table in tables]
    edges = np.empty((len(tables), max(number) + 1))
    values = np.empty((3, len(tables), max(number), _NODES))
    for i, (n, table) in enumerate(zip(number, tables, strict=True)):
        edges[i, : n + 1], edges[i, n + 1 :] = table.edges, table.edges[-1]
        values[:, i, :n] = table.values
        values[:, i, n:] = table.values[:, -1:, -1:]
    return np.array([table.core for table in tables]), edges, values


_POINTS = chebyshev_points(_NODES)
_WEIGHTS = (-1.0) ** np.arange(_NODES)
_WEIGHTS[[0, -1]] /= 2
# From values at the points to their last three Chebyshev coefficients.
_LAST = np.linalg.inv(np.polynomial.chebyshev.chebvander(_POINTS, _NODES - 1))[-3:]


def _within(
    values: np.ndarray, left: np.ndarray, right: np.ndarray, z: np.ndarray
) -> np.ndarray:
    """Values (R, ..., nodes) of panels from left to right, (...), at z; (R, ...)."""
    x = (2 * z - left - right) / (right - left)
    # Barycentric interpolation at Chebyshev points of the second kind.
    away = x[..., None] - _POINTS
    share = _WEIGHTS / np.where(away == 0, 1e-300, away)
    share = share / share.sum(axis=-1, keepdims=True)
    return np.einsum("...k,i...k->i...", share, values)


def tabulated(
    core: np.ndarray,
    end: np.ndarray,
    evaluate: Evaluate,
    *,
    most: int = MOST_HALVINGS,
) -> list[Table]:
    """Tables of functions of x, made side by side.

    Of (T,) scales and largest x, before which a table may end, with at most so many
    halvings of a panel.
    """
    end, tables = end.copy(), np.arange(len(core))
    open_ = tables
    for _ in range(13):
        tried = end[open_, None] * _SHORTER
        last = evaluate(np.repeat(open_, len(_SHORTER)), tried.reshape(-1))
        good = np.all(np.isfinite(last), axis=0) & (last[0] > LEAST)
        good = good.reshape(tried.shape)
        found = good.any(axis=1)
        first = _SHORTER[np.argmax(good, axis=1)]
        end[open_] *= np.where(found, first, _SHORTER[1] * _SHORTER[-1])
        open_ = open_[~found]
        if not len(open_):
            break
    whole = np.arcsinh(end / core)
    number = np.maximum(np.ceil(whole / _PANEL_LENGTH), 1)
    mine: np.ndarray = np.repeat(tables, number.astype(int))
    rank = np.arange(len(mine)) - np.searchsorted(mine, mine)
    # Inferring these around the loop takes the type checker seconds.
    left: np.ndarray
    right: np.ndarray
    left, right = (whole[mine] * (rank + i) / number[mine] for i in (0, 1))
    done: list[list[tuple[float, float, np.ndarray, np.ndarray]]] = [[] for _ in tables]
    for depth in range(most + 1):
        if not len(mine):
            break
        z = left[:, None] + (right - left)[:, None] * 0.5 * (_POINTS + 1)
        place = (core[mine][:, None] * np.sinh(z)).reshape(-1)
        values = evaluate(np.repeat(mine, _NODES), place)
        values = values.reshape(len(values), *z.shape)
        last = np.abs(values @ _LAST.T)
        rough = last.max(axis=(0, 2))
        # The truncated coefficients are smaller than the last two.
        left_out = last[..., 1:].max(axis=2)
        unknown = ~np.all(np.isfinite(values), axis=(0, 2))
        left_out[:, unknown] = np.nan
        rarer = np.clip(CHECKED - values[0, :, 0], 0.0, RAREST)
        # More halvings do not help against rounding, nor where values are missing.
        allowed = np.where((rarer > 0) | unknown, MOST_HALVINGS, most)
        again = ~(rough <= _LAST_COEFFICIENTS * np.exp(_SLACK * rarer)) & (
            depth < allowed
        )
        if most > MOST_HALVINGS:
            # Of panels with missing values those nearest to 0: all beyond is dropped.
            for those in (again & unknown, again & ~unknown):
                order = np.argsort(np.where(unknown, left, -rough)[those])
                again[np.flatnonzero(those)[order[_MOST_HALVED:]]] = False
        for i in np.flatnonzero(~again).tolist():
            one = float(left[i]), float(right[i]), values[:, i], left_out[:, i]
            done[mine[i]].append(one)
        mine, left, right = mine[again], left[again], right[again]
        middle, mine = 0.5 * (left + right), np.tile(mine, 2)
        left, right = np.append(left, middle), np.append(middle, right)
    joined = [_joined(*one) for one in zip(core.tolist(), whole, done, strict=True)]
    return _with_errors(joined, evaluate)


def _joined(
    core: float, whole: float, done: list[tuple[float, float, np.ndarray, np.ndarray]]
) -> Table:
    """A table of panels, up to the first one with missing values."""
    done.sort(key=lambda panel: panel[0])
    bad = [i for i, (*_, left_out) in enumerate(done) if math.isnan(left_out[0])]
    kept = done[: bad[0]] if bad else done
    if not kept:
        nothing = np.full((3, 1, _NODES), np.nan)
        return Table(core, np.array([0.0, whole]), nothing, 1.0, np.ones((3, 1)))
    left, right, values, left_out = zip(*kept, strict=True)
    edges, values = np.array([left[0], *right]), np.stack(values, axis=1)
    return Table(core, edges, values, 0.0, np.stack(left_out, axis=1))


def _largest(rows: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Maxima of rows (R, T, N) over the ranges from ``first`` to ``end``, (T, P)."""
    begins = rows.shape[-1] * np.arange(rows[..., 0].size).reshape(*rows.shape[:2], 1)
    cuts = begins[..., None] + np.stack([first, end], axis=-1)
    flat = np.append(rows.reshape(-1), 0.0)  # where the last one ends
    largest = np.maximum.reduceat(flat, cuts.reshape(-1))[::2]
    return largest.reshape(cuts.shape[:-1])


def _with_errors(tables: list[Table], evaluate: Evaluate) -> list[Table]:
    """The tables with their errors, by finer sums between the points."""
    known = [i for i, table in enumerate(tables) if np.isfinite(table.values[0, 0, 0])]
    if not known:
        return tables
    core, edges, values = side_by_side([tables[i] for i in known])
    places = np.arange(_CHECKS)
    # Nearly up to the end, where most digits are lost.
    z = edges[:, -1:] * (places + 0.37) / (_CHECKS - 0.6)
    place = core[:, None] * np.sinh(z)
    finer = evaluate(np.repeat(known, _CHECKS), place.reshape(-1), finer=True)
    # Number of points before each edge, and the panel of each point.
    before = np.sum(z[:, None] < edges[..., None], axis=2)
    panel = np.sum(places[:, None] >= before[:, None, 1:-1], axis=2)
    at = np.arange(len(known))[:, None], panel
    found = _within(values[:, *at], edges[at], edges[at[0], panel + 1], z)
    counts = found[0] > found[0].max(axis=1, keepdims=True) + CHECKED
    differ = np.abs(found - finer.reshape(found.shape))
    # Where a few of the finer sums fail their neighbours stand for them.
    failed = np.where(np.isnan(differ).mean(axis=(0, 2)) < _FEW_FAIL, 0.0, 1.0)
    differ = np.where(np.isnan(differ), failed[:, None], np.minimum(differ, 1.0))
    # The points next to a panel count as well: some have no point of their own.
    near = np.maximum(before[:, :-1] - 1, 0), np.minimum(before[:, 1:], _CHECKS - 1) + 1
    seen = _largest(differ, *near).swapaxes(0, 1)
    error = _SAFETY * np.max(np.where(counts, differ, 0.0), axis=(0, 2)) + _ROUNDING
    result = list(tables)
    for i, largest, here in zip(known, error.tolist(), seen, strict=True):
        off = np.maximum(tables[i].off, _SAFETY * here[:, : tables[i].off.shape[1]])
        off = np.minimum(off + _ROUNDING, 1.0)
        result[i] = tables[i]._replace(error=largest, off=off)
    return result
