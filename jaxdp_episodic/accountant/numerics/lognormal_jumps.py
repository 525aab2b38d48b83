"""Jumps of large sums of lognormal terms: contours' part along the axis.

See `numerics.lognormal_sums`.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from jaxdp_episodic.accountant.numerics.lognormal_tails import ABSENT, Jumps, powers
from jaxdp_episodic.accountant.numerics.lognormal_terms import (
    AxisTransform,
    Sums,
    by_rows,
    log_axis_transform,
    transform_on_axis,
)
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

# Gauss-Legendre rules of the transform and of its jumps. Finer contours share their
# errors: below 1e-12 but where tails of two terms under much noise are below e^-70.
_RULES = (24, 4), (40, 1)
# Chebyshev nodes of the transform along the axis, and panels, over 1 + shift: of coarse
# and fine contours, and these for shifts above 2; and nodes of each.
_CHEBYSHEV, _PANELS, _EACH = (64, 88), ((3, 4), (4, 6)), 22


def jumps_of(
    terms: Sums,
    which: np.ndarray,
    start: np.ndarray,
    fine: np.ndarray,
    slopes: bool,
) -> Jumps:
    """Of the axis from 0 to the starts, by the larger saddle in place of p.

    Of sums that rise, which come first; the transform there is interpolated.

    Args:
      terms: (S,).
      which: of these each contour's, (J,), rising.
      start: (J,) where it leaves the axis.
      fine: (J,) 1 of those that are compared with, else 0.
      slopes: whether derivatives by the shift are asked for.
    """
    rising = terms.take(np.flatnonzero(terms.rising > 0))
    which = which[: np.searchsorted(which, len(rising.count))]
    if not len(which):
        return Jumps(np.zeros(0, int), np.zeros((0, 2, 0)), np.zeros((0, 0, 3)))
    start, fine, line = start[: len(which)], fine[: len(which)], rising.take(which)
    s, end = line.shift, line.edge
    first = larger_saddle(np.log(start), s)
    are_rare = first >= end  # too rare to count
    first = np.minimum(first, end - 1)
    panels = np.array(_PANELS)[(s > 2).astype(int), fine]
    panels = np.ceil(panels * (1 + s)).astype(int)
    # Nodes of all contours in turn.
    count = np.where(are_rare, 0, _EACH * panels)
    mine, rank, place, weight = in_turn(count, _rule)
    s, line, length = s[mine], line.take(mine), (end - first)[mine]
    x = first[mine] + length * place
    p = np.exp(place_of(x, s))
    # Finer contours share the transform, which the others know at fewer places.
    low, high = np.full(len(rising.count), np.inf), rising.edge - 1e-9
    np.minimum.at(low, which, first)
    points = 0.5 * (chebyshev_points(_CHEBYSHEV[1]) + 1)
    nodes = low[:, None] + (high - low)[:, None] * points
    every = rising.take(np.repeat(np.arange(len(low)), len(points)))
    at_p = np.exp(place_of(nodes.reshape(-1), every.shift))
    how = {"rules": _RULES, "jumps": True, "slopes": slopes}
    found = AxisTransform(*by_rows(transform_on_axis, every, at_p, **how))
    # Smooth where they are tiny, too.
    scale = np.where(every.mean > 0, at_p * at_p, at_p)
    # K turns by less than half a right angle: its real part is positive.
    real, _ = log_axis_transform(found._replace(imaginary=np.zeros_like(at_p)))
    rows = [np.log(found.imaginary) - real, real / scale]
    if slopes:
        moved = found.real_slope / found.real
        rows += [found.imaginary_slope / found.imaginary - moved, moved / scale]
    values = np.zeros((len(rows), 2, *nodes.shape))
    values[:, 1] = np.reshape(rows, (len(rows), *nodes.shape))
    values[:, 0, :, : _CHEBYSHEV[0]] = in_blocks(values[:, 1], _fewer(*_CHEBYSHEV))
    row, number = which[mine], np.repeat(_CHEBYSHEV, len(low))
    away = np.clip(2 * (x - low[row]) / (high - low)[row] - 1, -1.0, 1.0)
    row = row + len(low) * fine[mine]
    values = values.reshape(len(rows), len(number), -1)
    turn, real, *moved = through_columns(values, number, away, row)
    ratio, power = np.exp(turn), np.where(line.mean > 0, p * p, p)
    size = line.count * (real * power + 0.5 * np.log1p(ratio * ratio))
    size += np.log(p * (s - 1 / x) * length * weight / math.pi)
    angle = line.count * np.arctan(ratio)

    def dense(nodes: np.ndarray, otherwise: float = 0.0) -> np.ndarray:
        result = np.full((len(count), max(count.max(), 1)), otherwise)
        result[mine, rank] = nodes
        return result

    factors = [dense(np.sin(angle))]
    if slopes:
        turned = line.count * ratio * moved[0] / (1 + ratio * ratio)
        grown = line.count * moved[1] * power + ratio * turned
        factors.append(dense(grown * np.sin(angle) + turned * np.cos(angle)))
    parts = np.stack([dense(p), dense(size, ABSENT)], axis=1)
    return Jumps(np.maximum(count, 1), parts, powers(dense(start[mine] / p), *factors))


def _rule(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    return gauss(_EACH, nodes // _EACH)


@functools.lru_cache
def _fewer(few: int, many: int) -> np.ndarray:
    """(many, few): the same at `chebyshev_points`, from those at more of them."""
    return through_points(chebyshev_points(many), np.eye(many), chebyshev_points(few))
