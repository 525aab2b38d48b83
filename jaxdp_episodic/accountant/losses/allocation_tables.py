"""Tables of what an epoch of random allocation loses, made once for each setting.

One epoch is a sum of independent terms, `numerics.skewed_sums`, whose tails take
milliseconds each. They are smooth: their logarithms are interpolated, and a table
serves every loss, order and number of epochs of a setting. They are made by NumPy,
before threads or kernels on JAX ask the host for them (`numerics.loops.on_host`).
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.numerics.chebyshev_tables import (
    LEAST,
    MOST_HALVINGS,
    MOST_OFF,
    Table,
    side_by_side,
    tabulated,
)
from jaxdp_episodic.accountant.numerics.ratio_means import (
    Moments,
    moments_of_ratio,
)
from jaxdp_episodic.accountant.numerics.skewed_starts import starts_for
from jaxdp_episodic.accountant.numerics.skewed_sums import contours as skewed_contours
from jaxdp_episodic.accountant.numerics.skewed_terms import Terms
from jaxdp_episodic.accountant.numerics.table_checks import (
    Nodes,
    distances_agree,
    moments_agree,
    nodes_of,
    num_nodes,
    panels_agree,
    side_of,
)
from jaxdp_episodic.accountant.numerics.two_terms import log_tails_of_two

# Halvings of a panel where losses crowd at 0: of two terms, or where some steps idle.
_MOST_HALVINGS_OF_CROWDED = 24
# Standard deviations beyond which a term is negligible.
REACH = 13.0
# Tables that are kept.
_CAPACITY = 4096
# Terms up to which one large A and small B of all others reach beyond the usual end.
_FEW_TERMS = 8


def _core(count: float, shift: float) -> float:
    """Standard deviation of the logarithm of the terms' mean, if they are many."""
    return math.sqrt(np.log1p(np.expm1(min(shift * shift, 700.0)) / count))


def _checked(table: Table, error: float) -> Table:
    """The table, with the error of its integrals; without values if that is large."""
    if error <= MOST_OFF:
        off = np.maximum(table.off, error)
        return table._replace(error=max(table.error, error), off=off)
    return table.without()


def _fitted(
    tables: list[Table], scale: np.ndarray, sign: float, number: int | None = None
) -> tuple[list[Table], Nodes]:
    """Tables up to where rows at ``scale e^±x`` disagree, and their nodes.

    ``number`` for each panel, or as many as the longest one needs.
    """
    core, edges, values = side_by_side(tables)
    number = number or int(num_nodes(core, edges).max())
    nodes = nodes_of(core, edges, values, number)
    fits = panels_agree(values, nodes, scale[:, None] * np.exp(sign * nodes.x))
    is_cut = ~np.all(fits, axis=1) & ~np.isnan(values[0, :, 0, 0])
    if not np.any(is_cut):
        return tables, nodes
    tables = list(tables)
    for i in np.flatnonzero(is_cut).tolist():
        tables[i] = tables[i].up_to(int(np.argmin(fits[i])))
    return _fitted(tables, scale, sign, number)


class _Kept(dict):
    """Tables by setting, up to a capacity; threads may add some."""

    def __init__(self, make: Callable[[list[Any]], Iterable[Any]]) -> None:
        super().__init__()
        self._make, self._keeping = make, threading.Lock()

    def made(self, asked: list[Any]) -> list[Any]:
        """Makes tables and keeps them; the oldest make room for them."""
        result = list(self._make(asked))
        with self._keeping:
            for one, tables in zip(asked, result, strict=True):
                while len(self) >= _CAPACITY:
                    del self[next(iter(self))]
                self[one] = tables
        return result

    def of(self, *setting: float) -> Any:
        """Returns the tables of one setting."""
        return self.get(setting) or self.made([setting])[0]

    def prepare(self, settings: Iterable[Any]) -> None:
        """Makes those that there are not, of as many settings as are kept."""
        self.made(sorted({*settings} - self.keys())[:_CAPACITY])


def antipodal_table(slots: int, count: int, shift: float) -> Table:
    """Of ``sum A - g sum B + (1 - g)(slots - count)`` at ``g = e^log_g``.

    It has no values unless its density has mass 1, mean 1 and the profile at the mean,
    and that the moments and distances that `numerics.table_checks` knows.
    """
    return _antipodal.of(slots, count, shift)


def _made_antipodal(setting: tuple[int, int, float]) -> Table:
    """`antipodal_table`, not kept."""
    slots, count, shift = setting
    terms = Terms(count, shift, float(slots - count))
    core = 2 * _core(count, shift) * count / slots
    end = _antipodal_end(terms, core)
    starts = functools.cache(lambda: starts_for(terms, end))
    along = functools.cache(lambda finer: skewed_contours(terms, starts(), finer=finer))

    def evaluate(
        _: np.ndarray, log_g: np.ndarray, *, finer: bool = False
    ) -> np.ndarray:
        if count == 2:
            constant = terms.constant(log_g)
            return np.stack(log_tails_of_two(constant, shift, log_g, terms.idle))
        return along(finer).log_tails(log_g)

    ends = np.array([core]), np.array([end])
    most = _MOST_HALVINGS_OF_CROWDED if terms.idle or count == 2 else MOST_HALVINGS
    (table,) = tabulated(*ends, evaluate, most=most)
    return _checked_antipodal(table, *setting)


def _antipodal_end(terms: Terms, core: float) -> float:
    """Log g at which their table ends, at the latest."""
    count, shift, idle = terms
    top = shift * (shift + REACH) - 0.5 * shift * shift
    end = max(REACH * core, float(np.logaddexp(0.0, top - math.log(count + idle))))
    if 1 < count <= _FEW_TERMS:
        # One A is large, and the others' B are all small.
        end = max(end, REACH * shift * math.sqrt(count / (count - 1)))
    end = min(end, 2 * shift * (REACH + shift))
    if idle:
        # By the best moment E(sum A - (g - 1) idle)_+ is below LEAST beyond it.
        rare = shift * math.sqrt(2 * (math.log(count) - LEAST)) + 0.5 * shift * shift
        end = min(end, math.log1p(count / idle * math.exp(min(rare, 700.0))))
    return end


def _checked_antipodal(table: Table, slots: int, count: int, shift: float) -> Table:
    """The table as far as it passes all of `table_checks`."""
    with np.errstate(all="ignore"):
        (table,), nodes = _fitted([table], np.ones(1), 1.0)
        (log_g,), (weight,) = nodes.x, nodes.weight
        share = np.exp(nodes.rows[2, 0] + log_g - math.log(slots)) * weight
        gain = math.exp(table.values[0, 0, 0]) / slots
        mass_error = abs(share.sum() + share @ np.exp(log_g) - 1)
        error = float(max(mass_error, abs(share @ np.expm1(log_g) / gain - 1)))
        high = side_of(nodes, 1.0, np.array([slots]), table.error)
        # E(wY - X)_+ is w times that of 1/w.
        low = high._replace(log_w=-high.log_w, log_gain=high.log_gain - high.log_w)
        exact = moments_of_ratio(slots, count, shift, table.core)
        exact = Moments(*(field[None] for field in exact))
        agree = moments_agree(low, high, np.array([table.core]), exact)
        agree &= distances_agree(low, high, slots, count, shift)
    agrees = math.isfinite(mass_error) and agree.item()
    return _checked(table, error if agrees else math.inf)


# By slots, count and shift; one after the other, as side by side, or in threads, they
# take no less time.
_antipodal = _Kept(functools.partial(map, _made_antipodal))
make_antipodal_tables, prepare_antipodal = _antipodal.made, _antipodal.prepare


def forget_tables() -> None:
    """Empties the cache."""
    _antipodal.clear()


def by_setting(
    function: Callable[..., np.ndarray], u: np.ndarray, *fields: np.ndarray
) -> np.ndarray:
    """(k, ..., n): ``function(u, *setting)`` of the elements of each setting.

    It maps (m,) arguments and scalar fields to (k, m); u (..., n) and fields broadcast.
    """
    arrays = np.broadcast_arrays(u, *fields)
    flat = [np.asarray(a, np.float64).reshape(-1) for a in arrays]
    rows = np.stack(flat[1:])
    # Elements of a setting are mostly neighbours: one of each run is looked at.
    changes = np.any(rows[:, 1:] != rows[:, :-1], axis=0)
    begins = np.append(0, np.flatnonzero(changes) + 1)
    settings, inverse = np.unique(rows[:, begins], axis=1, return_inverse=True)
    which = np.repeat(inverse.reshape(-1), np.diff(np.append(begins, rows.shape[1])))
    chosen = [np.flatnonzero(which == i) for i in range(settings.shape[1])]
    parts = [
        function(flat[0][rows], *setting)
        for rows, setting in zip(chosen, settings.T.tolist(), strict=True)
    ]
    result = np.concatenate(parts, axis=1)
    result[:, np.concatenate(chosen)] = result.copy()
    return result.reshape(-1, *arrays[0].shape)
