"""What random allocation loses in an epoch, as tables that are made once a setting.

One epoch is a sum of independent terms, `numerics.skewed_sums`, whose tails take
milliseconds each. They are smooth: logarithms of them are interpolated, and a table
serves every loss, order and number of epochs of a setting. Those of add_remove are made
side by side, before threads or kernels on JAX ask the host for them
(`numerics.loops.on_host`), and know their derivatives by the shift.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxdp_episodic._engine import engine_name, jitted, on_jax
from jaxdp_episodic.numerics.chebyshev_tables import (
    LEAST,
    MOST_HALVINGS,
    MOST_OFF,
    Table,
    tabulated,
)
from jaxdp_episodic.numerics.lognormal_rays import log_law_on_rays, paths
from jaxdp_episodic.numerics.lognormal_sums import Axis, axis_of, contours
from jaxdp_episodic.numerics.lognormal_terms import (
    Call,
    Rows,
    Sums,
    by_rows,
    joined,
    law_on_axis,
    parts,
)
from jaxdp_episodic.numerics.ratio_means import powers_of_mean, powers_of_ratio
from jaxdp_episodic.numerics.skewed_starts import starts_for
from jaxdp_episodic.numerics.skewed_sums import contours as skewed_contours
from jaxdp_episodic.numerics.skewed_terms import Terms
from jaxdp_episodic.numerics.table_checks import (
    Places,
    distances_agree,
    fitting,
    places_of,
    powers_agree,
    side_of,
    transforms_agree,
)
from jaxdp_episodic.numerics.two_terms import log_tails_of_two

# Jumps up to so many deviations beyond the mean of one that is there are in the table;
# what is rarer has a probability of e^-84.
_REACH = 13.0
# Halvings of a panel where losses crowd at 0: those of few terms where the rest idles.
_MOST_OF_CROWDED = 24
# So many nats a tail is below its bound, at least.
_ABOVE = 4.0
# Tables that are kept, and of sums; how many sums' are made side by side, by NumPy and
# on JAX, and from how many on that makes them.
_CACHED, MOST_SUMS, _SIDE_BY_SIDE, _FEW_SUMS = 256, 4096, (64, 128), 8
# Rows of kernels: what takes less than calling them, and fits the cache.
_ROWS = {log_law_on_rays: 512, law_on_axis: 2048, paths: 2048}
_FEW = 8


def _core(count: float, shift: float) -> float:
    """Scale of the logarithm of the mean of the terms."""
    return math.sqrt(np.log1p(np.expm1(min(shift * shift, 700.0)) / count))


def _checked(table: Table, off: float) -> Table:
    """The table, without its values where integrals of its parts do not agree."""
    if off <= MOST_OFF:
        error = max(table.error, off)
        return table._replace(error=error, off=np.maximum(table.off, off))
    return table.without()


def _fitted(table: Table, scale: float, sign: float) -> tuple[Table, Places]:
    """The table up to where rows at ``scale e^±place`` do not fit, and its nodes."""
    nodes = places_of(table.core, table.edges, table.values)
    fits = fitting(table.values, nodes, scale * np.exp(sign * nodes.place))
    if np.all(fits) or np.isnan(table.values[0, 0, 0]):
        return table, nodes
    return _fitted(table.up_to(int(np.argmin(fits))), scale, sign)


# The tables that were made, by count, shift, and whether with slopes.
_kept: dict[tuple[int, float, bool], tuple[Table, Table]] = {}
_keeping = threading.Lock()


def sum_tables(
    count: int, shift: float, *, slopes: bool = False
) -> tuple[Table, Table]:
    """Tails of the sum X of lognormal terms of mean 1, by ``|log(X / count)|``.

    ``log E(X - x)_+``, ``log P(X > x)`` and the log-density at ``x = count e^place``
    (rising), and ``log E(x - X)_+``, ``log P(X < x)`` and it at ``count e^-place``;
    their derivatives by the shift, at x, as well.

    Their densities must have mass 1, mean 1, and give the first tails at the mean;
    these must have the transforms and powers that `numerics.table_checks` knows.
    """
    found = _kept.get((count, shift, slopes))
    return found or make_sum_tables([(count, shift)], slopes=slopes)[0]


def make_sum_tables(
    settings: Iterable[tuple[int, float]], *, slopes: bool = False
) -> list[tuple[Table, Table]]:
    """`sum_tables` of many settings, (count, shift), side by side; they are kept."""
    asked = list(settings)
    on_device = engine_name() == "jax" and len(asked) >= _FEW_SUMS
    size, result = _SIDE_BY_SIDE[on_device], []
    for begin in range(0, len(asked), size):
        part = asked[begin : begin + size]
        count, shift = np.array(part, np.float64).T
        up = np.repeat([1.0, 0.0], len(part))
        terms = Sums(np.tile(count, 2), np.tile(shift, 2), up)
        made = _made(terms, slopes=slopes, call=_compiled if on_device else by_rows)
        for i, (n, s) in enumerate(part):
            pair = _vouched(made[i], made[i + len(part)], n, s)
            with _keeping:  # threads make some, too
                while len(_kept) >= MOST_SUMS:
                    del _kept[next(iter(_kept))]
                _kept[n, s, slopes] = pair
            result.append(pair)
    return result


def forget_sum_tables() -> None:
    """They are made again when they are asked for."""
    _kept.clear()


def are_kept(count: int, shift: float, *, slopes: bool = False) -> bool:
    """Whether there are these `sum_tables` already."""
    return (count, shift, slopes) in _kept


def _vouched(
    rising: Table, falling: Table, count: int, shift: float
) -> tuple[Table, Table]:
    """The tables as far as all that is known of them agrees; see `table_checks`."""
    mass, mean, off, tables, sides = 0.0, 0.0, [], [], []
    with np.errstate(all="ignore"):
        for table, sign in ((rising, 1.0), (falling, -1.0)):
            table, nodes = _fitted(table, count, sign)
            ratio = np.exp(sign * nodes.place)
            share = np.exp(nodes.rows[2]) * nodes.weight * ratio * count
            mass, mean = mass + share.sum(), mean + share @ ratio
            gain = math.exp(table.values[0, 0, 0]) / count
            off.append(abs(share @ np.abs(np.expm1(sign * nodes.place)) / gain - 1))
            tables.append(table)
            sides.append(side_of(nodes, sign, count, table.error))
        high, low = sides
        core = float(rising.core)
        agree = (
            math.isfinite(mass)
            and transforms_agree(low, high, count, shift)
            and powers_agree(low, high, core, powers_of_mean(count, shift, core))
        )
    worst = float(max(abs(mass - 1), abs(mean - 1), *off)) if agree else math.inf
    rising, falling = (_checked(table, worst) for table in tables)
    return rising, falling


def _made(terms: Sums, *, slopes: bool, call: Call = by_rows) -> list[Table]:
    """Tables of sums, those that rise first, before anything vouches for them."""
    count, shift, up = terms.count, terms.shift, terms.rising > 0
    axis = axis_of(terms, call)
    core = np.array([_core(*one) for one in zip(count, shift, strict=True)])
    top = shift * (shift + _REACH) - 0.5 * shift * shift
    spread = np.minimum(shift, np.sqrt(np.expm1(shift**2) / count))
    end = np.where(
        up,
        np.maximum(_REACH * core, np.logaddexp(0.0, top - np.log(count))),
        _REACH * spread + 0.5 * shift * shift,
    )
    down = np.flatnonzero(~up)
    # As far as what no tail is above is not too small.
    end[down] = np.minimum(end[down], _last_places(axis.take(down), LEAST + _ABOVE))

    # Each is there twice, once with finer sums; those that rise stand first.
    rising = np.flatnonzero(up)
    rows = np.concatenate([rising, rising, down, down])
    is_finer = np.repeat([0, 1, 0, 1], [len(rising)] * 2 + [len(down)] * 2)
    mine = np.argsort(rows + len(rows) * is_finer, kind="stable")

    how = {"finer": is_finer > 0, "slopes": slopes, "call": call}
    along = contours(axis.take(rows), end[rows], **how)

    def evaluate(
        which: np.ndarray, place: np.ndarray, *, finer: bool = False
    ) -> np.ndarray:
        return along.log_tails(mine[which + len(up) * finer], place)

    return tabulated(core, end, evaluate)


def _last_places(axis: Axis, least: float) -> np.ndarray:
    """Beyond which ``log E(n e^-place - X)_+`` is below ``least``, (S,): Chernoff's."""
    with np.errstate(all="ignore"):
        # T_+ is at most e^{p T - 1} / p.
        constant = (least + 1 + axis.log_p - axis.power) / np.exp(axis.log_p)
        constant = np.where(np.isfinite(constant), constant, -np.inf).max(axis=1)
        share = constant / axis.terms.count
        place = -np.where(axis.terms.mean > 0, np.log1p(share), np.log(share))
        return np.where(place > 0, place, np.inf)


def _compiled(kernel: Any, *arrays: Any, **static: Any) -> Rows:
    """`by_rows` on JAX, which has all parts to do before any is asked for."""
    run, rows = jitted(kernel, tuple(static)), _ROWS[kernel]

    def every(*arrays: Any) -> list:
        return [run(*part, **static) for part in parts(arrays, rows, pad=True)]

    size = arrays[-1].shape[-1]
    return [row[..., :size] for row in joined(on_jax(every, *arrays))]


@functools.lru_cache(_CACHED)
def antipodal_table(bins: int, count: int, shift: float) -> Table:
    """Of ``sum A - g sum B + (1 - g)(bins - count)`` at ``g = e^place``."""
    idle = float(bins - count)
    top = shift * (shift + _REACH) - 0.5 * shift * shift
    core = 2 * _core(count, shift) * count / bins
    end = max(_REACH * core, float(np.logaddexp(0.0, top - math.log(bins))))
    if 1 < count <= _FEW:
        # One A is large, and the others' B are all small.
        end = max(end, _REACH * shift * math.sqrt(count / (count - 1)))
    end = min(end, 2 * shift * (_REACH + shift))

    terms = Terms(count, shift, idle)
    starts = functools.cache(lambda: starts_for(terms, end))
    along = functools.cache(lambda finer: skewed_contours(terms, starts(), finer=finer))

    def evaluate(
        _: np.ndarray, place: np.ndarray, *, finer: bool = False
    ) -> np.ndarray:
        if count == 2:
            constant = terms.constant(place)
            return np.stack(log_tails_of_two(constant, shift, place, idle))
        return along(finer).log_tails(place)

    ends = np.array([core]), np.array([end])
    most = _MOST_OF_CROWDED if idle or count == 2 else MOST_HALVINGS
    (table,) = tabulated(*ends, evaluate, most=most)
    with np.errstate(all="ignore"):
        table, nodes = _fitted(table, 1.0, 1.0)
        share = np.exp(nodes.rows[2] + nodes.place - math.log(bins)) * nodes.weight
        gain = math.exp(table.values[0, 0, 0]) / bins
        mass = abs(share.sum() + share @ np.exp(nodes.place) - 1)
        off = float(max(mass, abs(share @ np.expm1(nodes.place) / gain - 1)))
        high = side_of(nodes, 1.0, bins, table.error)
        # E(wY - X)_+ is w times that of 1/w.
        low = high._replace(log_w=-high.log_w, log_gain=high.log_gain - high.log_w)
        agree = (
            math.isfinite(mass)
            and powers_agree(low, high, core, powers_of_ratio(bins, count, shift, core))
            and distances_agree(low, high, bins, count, shift)
        )
    return _checked(table, off if agree else math.inf)


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
