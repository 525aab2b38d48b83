"""What random allocation loses in an epoch, as tables that are made once a setting.

One epoch is a sum of independent terms, `numerics.skewed_sums`, whose tails take
milliseconds each. They are smooth: logarithms of them are interpolated, and a table
serves every loss, order and number of epochs of a setting. Tables are made by NumPy on
the host, for JAX too (`numerics.loops.on_host`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.losses.antipodal_law import bound_at
from jaxdp_episodic.losses.table_checks import CHECKED, allowed_off, fitting, transform
from jaxdp_episodic.numerics.convex_sums import lognormal_sum
from jaxdp_episodic.numerics.lognormal_sums import Contours, contours, log_bounds
from jaxdp_episodic.numerics.skewed_sums import log_tails
from jaxdp_episodic.numerics.skewed_terms import Terms, gauss
from jaxdp_episodic.numerics.two_terms import log_tails_of_two

# Chebyshev panels, each so long in asinh(place / core), with so many nodes.
_PANEL, _NODES = 1.3, 16
# Jumps up to so many deviations beyond the mean of one that is there are in the table;
# what is rarer has a probability of e^-84.
_REACH = 13.0
# Logarithm below which nothing is tabulated.
_LEAST = -90.0
# A panel whose last Chebyshev coefficients are larger is halved, so often at most.
_ROUGHNESS, _MOST_HALVINGS = 1e-8, 4
# The same of two terms, whose losses crowd at 0 where the rest idles.
_MOST_OF_TWO = 10
_CACHED = 256
_FEW = 8
# Largest relative error of integrals of a table that may be used, and their nodes.
_MOST_OFF, _CHECK_NODES = 1e-7, 600
_DENSE, _CROWDED = 4.0, 16.0
# Places at which a table is checked, and the spare factor.
_LOOKS = 3
_CHECKS, _SPARE, _ROUNDING = 16, 10.0, 1e-13
# Share of these places at which finer sums may fail.
_FEW_FAIL = 0.2


Evaluate = Callable[..., np.ndarray]


class Table(NamedTuple):
    """Logarithms of three tails at places >= 0, piecewise Chebyshev.

    Attributes:
      core: scale of the middle; interpolation is in ``asinh(place / core)``.
      edges: (panels + 1,) of that, from 0.
      values: (3, panels, nodes) at Chebyshev points.
      error: estimate of the largest error of the logarithms, with some to spare: how
        much sums with more nodes differ, between the points, down to e^-36.
      off: (panels,) the same of each panel's third, wherever it is.
    """

    core: float
    edges: np.ndarray
    values: np.ndarray
    error: float
    off: np.ndarray

    @property
    def end(self) -> float:
        """The last place."""
        return self.core * math.sinh(self.edges[-1])

    def at(self, place: np.ndarray) -> np.ndarray:
        """(3, m) logarithms; beyond the end those of the end, which are larger."""
        z, panel = self._panels(place)
        left, right = self.edges[panel], self.edges[panel + 1]
        x = (2 * z - left - right) / (right - left)
        # Barycentric interpolation at Chebyshev points of the second kind.
        away = x[:, None] - _POINTS
        hit = away == 0
        share = np.where(hit, 0.0, _WEIGHTS / np.where(hit, 1.0, away))
        share = np.where(hit.any(axis=1, keepdims=True), hit.astype(float), share)
        share = share / share.sum(axis=1, keepdims=True)
        return np.einsum("mk,imk->im", share, self.values[:, panel])

    def off_at(self, place: np.ndarray) -> np.ndarray:
        """(m,) how far the third may be off, to either side in turn: panel by panel."""
        _, panel = self._panels(place)
        return self.off[panel] * (-1.0) ** panel

    def _panels(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where in the table places are, and the panel."""
        z = np.arcsinh(np.maximum(place, 0.0) / self.core)
        z = np.minimum(z, self.edges[-1])
        panel = np.searchsorted(self.edges, z, side="right") - 1
        return z, np.minimum(panel, len(self.edges) - 2)


_POINTS = -np.cos(np.pi * np.arange(_NODES) / (_NODES - 1))
_WEIGHTS = (-1.0) ** np.arange(_NODES)
_WEIGHTS[[0, -1]] /= 2
# From values at the points to their last three Chebyshev coefficients.
_LAST = np.linalg.inv(np.polynomial.chebyshev.chebvander(_POINTS, _NODES - 1))[-3:]


def _core(count: float, shift: float) -> float:
    """Scale of the logarithm of the mean of the terms."""
    return math.sqrt(np.log1p(np.expm1(min(shift * shift, 700.0)) / count))


def _tabulated(
    core: float, end: float, evaluate: Evaluate, most: int = _MOST_HALVINGS
) -> Table:
    """The table of a function of places (m,) to three logarithms (3, m)."""
    for _ in range(50):
        last = evaluate(np.array([end]))
        if np.all(np.isfinite(last)) and last[0, 0] > _LEAST:
            break
        end *= 0.95
    whole = math.asinh(end / core)
    number = max(math.ceil(whole / _PANEL), 1)
    open_ = [(whole * i / number, whole * (i + 1) / number) for i in range(number)]
    done: list[tuple[float, float, np.ndarray]] = []
    for depth in range(most + 1):
        if not open_:
            break
        ends = np.array(open_)
        z = ends[:, :1] + np.diff(ends) * 0.5 * (_POINTS + 1)
        values = evaluate(core * np.sinh(z).reshape(-1)).reshape(3, *z.shape)
        smooth = np.abs(values @ _LAST.T).max(axis=(0, 2)) <= _ROUGHNESS
        open_ = []
        for (left, right), bad, one in zip(
            ends.tolist(), ~smooth, np.moveaxis(values, 1, 0), strict=True
        ):
            middle = 0.5 * (left + right)
            if bad and depth < most:
                open_ += [(left, middle), (middle, right)]
            else:
                done.append((left, right, one))
    done.sort(key=lambda panel: panel[0])
    bad = [i for i, (*_, one) in enumerate(done) if not np.all(np.isfinite(one))]
    # Without what cannot be computed and all beyond it.
    done = done[: bad[0]] if bad else done
    if not done:
        nothing = np.full((3, 1, _NODES), np.nan)
        return Table(core, np.array([0.0, whole]), nothing, 1.0, np.ones(1))
    edges = np.array([done[0][0], *(right for _, right, _ in done)])
    values = np.stack([one for *_, one in done], axis=1)
    # The next coefficients, which are left out, are smaller than the last two.
    left_out = np.abs(values[2] @ _LAST[1:].T).max(axis=1)
    table = Table(core, edges, values, 0.0, left_out)
    z = edges[-1] * (np.arange(_CHECKS) + 0.37) / _CHECKS
    place = core * np.sinh(z)
    found = table.at(place)
    counts = found[0] > found[0].max() + CHECKED
    differ = np.abs(found - evaluate(place, finer=True))
    if not np.all(differ[:, counts] <= _MOST_OFF):
        # So few of them, and far from one another, may not share what they did.
        alone = [evaluate(one, finer=True) for one in place[:, None]]
        differ = np.fmin(differ, np.abs(found - np.concatenate(alone, axis=1)))
    # Where only the finer sums fail their neighbours answer for them.
    failed = 0.0 if np.isnan(differ).mean() < _FEW_FAIL else 1.0
    differ = np.nan_to_num(differ, nan=failed, posinf=1.0)
    # Of a panel those next to it count as well, some have no place in them.
    after = np.searchsorted(z, edges)
    near = zip(np.maximum(after[:-1] - 1, 0), after[1:] + 1, strict=True)
    seen = np.array([differ[2, first:last].max() for first, last in near])
    error = float(_SPARE * np.max(np.where(counts, differ, 0.0)) + _ROUNDING)
    off = np.minimum(np.maximum(left_out, _SPARE * seen) + _ROUNDING, 1.0)
    return table._replace(error=error, off=off)


def _checked(table: Table, off: float) -> Table:
    """The table, without its values where integrals of its parts do not agree."""
    if off <= _MOST_OFF:
        error = max(table.error, off)
        return table._replace(error=error, off=np.maximum(table.off, off))
    return table._replace(values=table.values * np.nan, error=1.0)


def _panels(end: float, top: float = _DENSE) -> tuple[np.ndarray, np.ndarray]:
    """Gauss–Legendre nodes and weights from 0 to an end, e^top times denser near 0."""
    z, w = gauss(_CHECK_NODES, 1)
    place = end * np.expm1(top * z) / math.expm1(top)
    return place, w * top * end * np.exp(top * z) / math.expm1(top)


@functools.lru_cache(_CACHED)
def sum_tables(count: int, shift: float) -> tuple[Table, Table]:
    """Both `sum_table`, rising and falling, checked with one another.

    Their densities must have mass 1, mean 1, the `transform`, and give the
    first tails at the mean.
    """
    tables = [
        _between_ends(sum_table(count, shift, rising=up), count, shift, rising=up)
        for up in (True, False)
    ]
    mass, mean, gains, moved = 0.0, 0.0, [], 0.0
    tested = 1 / _core(count, shift)
    for table, sign in zip(tables, (1, -1), strict=True):
        place, weight = _panels(table.end)
        ratio = np.exp(sign * place)
        share = np.exp(table.at(place)[2]) * weight * ratio * count
        mass, mean = mass + share.sum(), mean + share @ ratio
        gain = math.exp(table.at(np.zeros(1))[0, 0]) / count
        gap = np.expm1(sign * place)
        gains.append(abs(float(share @ np.abs(gap)) / gain - 1))
        moved += share @ (np.expm1(-tested * gap) + tested * gap)
    gains.append(abs(float(moved) / transform(count, shift, tested) - 1))
    off = float(max(abs(mass - 1), abs(mean - 1), *gains))
    rising, falling = (_checked(table, off) for table in tables)
    return rising, falling


def _between_ends(table: Table, count: int, shift: float, *, rising: bool) -> Table:
    """The table up to where its rows do not fit, or the first leaves certified ends.

    The ends, by sums that share nothing with the table, are some 1e-3 away, 1e-2 where
    tails are rare: they are there to see what all rows and panels lack, as a path that
    is left out. What is off by 1e-7 is seen by `fitting` if only a row or some panels
    are, and else by the mass, the mean and the transform of `sum_tables`.
    """
    half = 0.5 * np.diff(table.edges)[:, None]
    place = table.core * np.sinh(table.edges[:-1, None] + half * (_POINTS + 1))
    x = count * np.exp(place if rising else -place)
    sign = 1.0 if rising else -1.0
    outside = ~fitting(*table[:3], lambda place: count * np.exp(sign * place))
    for above, side in ((True, 1), (False, -1)):
        law = lognormal_sum(count, shift, above=above, rough=True)
        # Values of the law are off by a share: read off as far to its side.
        moved = x * (1 - sign * side * 2 * law.place_error)
        with np.errstate(divide="ignore"):
            end = np.log(law.gain(moved.reshape(-1), rising=rising)).reshape(x.shape)
        allowed = law.mass_error + allowed_off(table.values[0])
        outside |= np.any(side * (table.values[0] - end) > allowed, axis=1)
    return _up_to(table, int(np.argmax(outside))) if np.any(outside) else table


@functools.lru_cache(_CACHED)
def sum_table(count: int, shift: float, *, rising: bool) -> Table:
    """Tails of the sum X of lognormal terms of mean 1, by ``|log(X / count)|``.

    ``log E(X - x)_+``, ``log P(X > x)`` and the log-density at ``x = count e^place``
    (rising), or ``log E(x - X)_+``, ``log P(X < x)`` and it at ``count e^-place``.
    """
    core = _core(count, shift)
    if rising:
        top = shift * (shift + _REACH) - 0.5 * shift * shift
        end = max(_REACH * core, float(np.logaddexp(0.0, top - math.log(count))))
    else:
        spread = shift * min(1.0, math.sqrt(math.expm1(shift**2) / count) / shift)
        end = _REACH * spread + 0.5 * shift * shift
        # As far as what no tail is above is not too small.
        ends = end * 0.93 ** np.arange(100)
        end = float(ends[np.argmax(log_bounds(count, shift, ends) > _LEAST)])

    @functools.cache
    def along(finer: bool) -> Contours:
        return contours(count, shift, end, rising=rising, finer=finer)

    def evaluate(place: np.ndarray, *, finer: bool = False) -> np.ndarray:
        return along(finer).log_tails(place)

    return _tabulated(core, end, evaluate)


@functools.lru_cache(_CACHED)
def antipodal_table(bins: int, count: int, shift: float) -> Table:
    """Of ``sum A - g sum B + (1 - g)(bins - count)`` at ``g = e^place``."""
    idle = float(bins - count)
    top = shift * (shift + _REACH) - 0.5 * shift * shift
    core = 2 * _core(count, shift) * count / bins
    end = max(_REACH * core, float(np.logaddexp(0.0, top - math.log(bins))))
    if count <= _FEW:
        end += _REACH * shift  # the others' B may all be small
    end = min(end, 2 * shift * (_REACH + shift))

    def evaluate(place: np.ndarray, *, finer: bool = False) -> np.ndarray:
        constant = -np.expm1(place) * idle
        if count == 2:
            return np.stack(log_tails_of_two(constant, shift, place, idle))
        terms = Terms(count, constant, shift, place, idle)
        return np.stack(log_tails(terms, finer=finer))

    most = _MOST_OF_TWO if count == 2 else _MOST_HALVINGS
    table = _tabulated(core, end, evaluate, most)
    table = _between_antipodal_ends(table, bins, count, shift)
    place, weight = _panels(table.end, _CROWDED if count == 2 else _DENSE)
    rows = table.at(place)
    share = np.exp(rows[2] + place - math.log(bins)) * weight
    gain = math.exp(table.at(np.zeros(1))[0, 0]) / bins
    mass = abs(float(share.sum() + share @ np.exp(place)) - 1)
    return _checked(table, max(mass, abs(float(share @ np.expm1(place)) / gain - 1)))


def _between_antipodal_ends(table: Table, bins: int, count: int, shift: float) -> Table:
    """The table up to where rows do not fit, or the first is seen to leave its ends.

    As in `_between_ends`. Ends are looked at in the middle of a few panels, and at the
    last end; where one is seen to leave, it is searched from which on.
    """
    fits = fitting(*table[:3], np.exp)
    if not np.all(fits):
        table = _up_to(table, int(np.argmin(fits)))
    panels = table.values.shape[1]

    def agrees(panel: int) -> bool:
        left, right = table.edges[panel : panel + 2]
        z = right if panel == panels - 1 else 0.5 * (left + right)
        u = table.core * math.sinh(float(z))
        value = float(table.at(np.array([u]))[0, 0]) - math.log(bins)
        allowed = float(allowed_off(np.array(value)))
        low, high = (
            math.log(end) if end > 0 else -math.inf
            for end in (
                bound_at(u, bins, count, shift, above=up) for up in (False, True)
            )
        )
        return low - allowed <= value <= high + allowed

    good = -1
    for panel in np.unique(np.linspace(0, panels - 1, _LOOKS).astype(int)).tolist():
        if agrees(panel):
            good = panel
            continue
        while panel - good > 1:
            middle = (good + panel) // 2
            good, panel = (middle, panel) if agrees(middle) else (good, middle)
        return _up_to(table, panel)
    return table


def _up_to(table: Table, panel: int) -> Table:
    """Its first panels; without any it has no values."""
    if panel == 0:
        return table._replace(values=table.values * np.nan, error=1.0)
    return table._replace(
        edges=table.edges[: panel + 1],
        values=table.values[:, :panel],
        off=table.off[:panel],
    )


def by_setting(
    function: Callable[..., np.ndarray], place: np.ndarray, *fields: np.ndarray
) -> np.ndarray:
    """Applies ``function(place, *setting)`` to the elements of each setting.

    Args:
      function: maps (m,) places and scalar fields to (k, m).
      place: (..., n).
      *fields: broadcast with it.

    Returns:
      (k, ..., n).
    """
    arrays = np.broadcast_arrays(place, *fields)
    flat = [np.asarray(a, np.float64).reshape(-1) for a in arrays]
    rows = np.stack(flat[1:])
    # Most often those of a setting are neighbours: one of each stretch is looked at.
    changes = np.any(rows[:, 1:] != rows[:, :-1], axis=0)
    begins = np.append(0, np.flatnonzero(changes) + 1)
    settings, inverse = np.unique(rows[:, begins], axis=1, return_inverse=True)
    which = np.repeat(inverse.reshape(-1), np.diff(np.append(begins, rows.shape[1])))
    result: np.ndarray | None = None
    for i, setting in enumerate(settings.T.tolist()):
        chosen = slice(None)
        if settings.shape[1] > 1:
            chosen = np.flatnonzero(which == i)
        part = function(flat[0][chosen], *setting)
        if result is None:
            result = np.empty((len(part), flat[0].size))
        result[:, chosen] = part
    assert result is not None  # there is a setting
    return result.reshape(-1, *arrays[0].shape)
