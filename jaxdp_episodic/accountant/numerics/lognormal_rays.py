"""``K(p) = E e^{±p (A - m)}`` of one lognormal term on rays away from the axis.

Of small sums p is as it is, of large ones -p, on the sheet that is met through the
upper half plane: ``K(p) = E e^{-pA}`` for ``0 <= arg p <= pi``, the large ones' being
its conjugate. With ``w e^w = p s² e^{-s²/2}``, Lambert's function, the exponent ``-pA -
x²/2`` has its saddle at ``x = -w/s``, and about it, ``x = y - w/s``,

    K(p) = e^{-(w² + 2w) / (2 s²)} G(w),
    G(w) = E e^{-w E(y)},   E(y) = (e^{sy} - 1 - s y) / s²,

y standard normal. The path of y follows the steepest one: through 0 in its direction,
``-arg(1 + w)/2``, to where ``w e^{sy}`` is positive on the right and ``y - w/s`` real
on the left. Nodes are closer where ``e^{-wE}`` ends, on the right.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.complex_exponentials import (
    Pair,
    divided,
    exp_in_place,
    expm1_complex,
    polar,
    times,
)
from jaxdp_episodic.accountant.numerics.lambert import lambert, lambert_near
from jaxdp_episodic.accountant.numerics.lognormal_terms import Sums, alike, log_near
from jaxdp_episodic.accountant.numerics.skewed_terms import SQRT_2PI, larger_saddle

# From so many terms on K - 1 needs all its digits.
_MANY = 3e4
# Where a path's end is looked for, and nats below the top there, and besides for terms.
_PROBES, _DEPTH, _OF_TERMS = np.arange(-15.0, 26.0, 1.2)[:, None], 37.0, 0.7
# By how much the spacing shrinks to the right, over the shift, from so many 1/s before
# the end of e^{-wE} on, between these.
_SHRINKS, _BEFORE, _FIRST, _LAST = 2.0, 2.0, -3.0, 6.0
# Spacing where the normal density alone decides, of shifts below one, and elsewhere, of
# those above another; less of heavy ones.
_WIDE, _CLOSE, _LIGHT, _HEAVY = 0.62, 0.38, (0.3, 0.45), 2.0
# Steepness of a bend, over the shift, from which on it decides; and the steepest.
_STEEP, _STEEPEST = 0.4, 2.5
# Deviations within which all of the normal density is; it is needed below a shift.
_WHOLE, _FAR = 8.7, 4.0
# Of the sum of a path's masses.
_ROUNDING = 1e-14


class Path(NamedTuple):
    """Of each row, ``y = u + i (height/(1 + e^{-2 slope (u - turn)}) - offset)``; (K,).

    With ``u = t - (1 - 1/shrinks) log(1 + e^t) + middle`` at t = first + spacing i.
    """

    first: np.ndarray
    spacing: np.ndarray
    number: np.ndarray
    shrinks: np.ndarray
    middle: np.ndarray
    height: np.ndarray
    turn: np.ndarray
    slope: np.ndarray
    offset: np.ndarray
    is_tame: np.ndarray  # whether the normal density is nowhere large on it
    is_whole: np.ndarray  # whether all of it is there
    real: np.ndarray  # of w, where the path was made for it
    imaginary: np.ndarray


def _argument(terms: Sums, real: np.ndarray, imaginary: np.ndarray) -> Pair:
    """``w e^w``; the large ones' is conjugate."""
    s = terms.shift
    scale = s * s * np.exp(-0.5 * s * s)
    return -terms.sign * scale * real, scale * imaginary


def paths(
    terms: Sums,
    real: np.ndarray,
    imaginary: np.ndarray,
    least: np.ndarray,
    fine: np.ndarray,
) -> Path:
    """Paths for rows of neighbouring p, made for one of them.

    Args:
      terms: (K,).
      real: part of p, (K,).
      imaginary: the other.
      least: size of the smallest of the neighbours, over that of p.
      fine: how many times as many nodes, (K,).
    """
    s = terms.shift
    z = _argument(terms, real, imaginary)
    w = lambert(z)
    w = w[0], np.maximum(w[1], 1e-9 * (np.abs(w[0]) + w[1]))
    size = np.sqrt(w[0] * w[0] + w[1] * w[1])
    angle = np.arctan2(w[1], w[0])
    whole = angle + w[1]
    turned = 0.5 * np.arctan2(w[1], 1 + w[0])
    slope = np.tan(turned) * s * whole / (2 * w[1] * angle)
    slope = np.minimum(slope, _STEEPEST)
    turn = np.log(angle / w[1]) / (2 * slope)
    # No later than at the other saddle, where the integrand begins to grow.
    log_p = np.log(np.hypot(real, imaginary))
    log_z = log_p - 0.5 * s * s + 2 * np.log(s)
    other = larger_saddle(log_p, s) + w[0] / s
    turn = np.where(log_z < -1, np.minimum(turn, np.maximum(other, 0.0)), turn)
    height = -whole / s
    end = np.log(s * s / size) / s
    shrinks = np.maximum(_SHRINKS * s, 1.0)
    none = np.zeros_like(s)
    path = Path(
        none,
        none,
        none,
        shrinks,
        np.where(shrinks > 1, np.clip(end - _BEFORE / s, _FIRST, _LAST), 0.0),
        height,
        turn,
        slope,
        height / (1 + np.exp(2 * slope * turn)),
        none,
        none,
        *w,
    )
    y, _ = _places(path, _PROBES)
    lost = times(w, _exponent(s, y))
    normal = 0.5 * (y[1] * y[1] - y[0] * y[0])
    below = normal - np.minimum(lost[0], np.minimum(least, 1.0) * lost[0])
    below = np.where(np.isnan(below), -np.inf, below)
    depth = _DEPTH + _OF_TERMS * np.log(terms.count)
    left, right = y[0] < 0, y[0] >= 0
    is_out = below < -depth
    # Of many terms all of the normal density, where that is not too far.
    is_far = (terms.count > _MANY) & (s < _FAR)
    is_first = left & is_out & (~is_far | (y[0] < -_WHOLE))
    first = np.max(np.where(is_first, _PROBES, _PROBES[0]), axis=0)
    # Else where there is least, before it grows.
    least = np.min(np.where(right, below, np.inf), axis=0)
    is_out = right & (is_out | (below <= least))
    last = np.min(np.where(is_out, _PROBES, _PROBES[-1]), axis=0)
    end = (_WHOLE + 0.1 - path.middle) * shrinks
    last = np.where(is_far, np.maximum(last, end), last)
    inside = (first <= _PROBES) & (_PROBES <= last)
    light, heavy = _LIGHT
    close = np.clip((heavy - s) / (heavy - light), 0.0, 1.0)
    spacing = _CLOSE + (_WIDE - _CLOSE) * close
    spacing = spacing * np.minimum(1.0, _HEAVY / s) ** 0.25
    spacing = spacing * np.minimum(1.0, _STEEP * s / slope)
    narrow = np.sqrt(np.hypot(1 + w[0], w[1]))
    spacing = spacing * np.minimum(1.0, shrinks / narrow) / fine
    number = 8 * np.ceil((last - first) / spacing / 8)
    reached = np.where(inside, y[0], 0.0)
    reached = np.minimum(-np.min(reached, axis=0), np.max(reached, axis=0))
    return path._replace(
        first=first,
        spacing=(last - first) / (number - 1),
        number=number,
        is_tame=np.max(np.where(inside, normal, -1.0), axis=0) < 1,
        is_whole=is_far | (reached >= _WHOLE),
    )


def _places(path: Path, t: np.ndarray) -> tuple[Pair, Pair]:
    """Places y and their derivative along t; (..., K)."""
    less = 1 - 1 / path.shrinks
    small = np.exp(-np.abs(t))
    softly = np.maximum(t, 0.0) + np.log1p(small)
    share = np.where(t > 0, 1.0, small) / (1 + small)
    u, du = t - less * softly + path.middle, 1 - less * share
    bent = 1 / (1 + np.exp(-2 * path.slope * (u - path.turn)))
    v = path.height * bent - path.offset
    return (u, v), (du, du * 2 * path.slope * path.height * bent * (1 - bent))


def _exponent(s: np.ndarray, y: Pair) -> Pair:
    """E(y)."""
    grown = expm1_complex(s * y[0], s * y[1])
    return (grown[0] - s * y[0]) / (s * s), (grown[1] - s * y[1]) / (s * s)


def log_transform_on_rays(
    terms: Sums,
    path: Path,
    real: np.ndarray,
    imaginary: np.ndarray,
    *,
    slopes: bool = False,
) -> tuple[np.ndarray, ...]:
    """``n log K`` at complex p, (B, K), where each of K rows has a path of its own.

    Args:
      terms: (K,).
      path: by `paths`.
      real: part of p.
      imaginary: the other.
      slopes: whether to append derivatives by the shift at fixed p.

    Returns:
      Real and imaginary parts, (B, K) each.
    """
    s, square = terms.shift, terms.shift**2
    w = lambert_near(_argument(terms, real, imaginary), (path.real, path.imaginary))
    is_tame = path.is_tame > 0
    # Near 1 the mass of the density is taken off term by term, or their sum, if all of
    # it is there and nothing cancels.
    near_one = is_tame & (terms.count > _MANY)
    total, mass, *moved = _summed(terms, path, (-w[0], -w[1]), near_one, slopes)
    taken = np.where(near_one, 0.0, np.where(is_tame, mass[0], 1.0))
    taken = taken, np.where(near_one | ~is_tame, 0.0, mass[1])
    # On a steep path the normal density turns too fast for nodes that do for the rest.
    is_known = np.hypot(mass[0] - 1, mass[1]) < _ROUNDING
    is_missing = is_tame & ~(is_known & (path.is_whole > 0))
    missing = np.where(is_missing, mass[0] - 1, 0.0), np.where(is_missing, mass[1], 0.0)
    excess = tuple(
        a - less + rest for a, less, rest in zip(total, taken, missing, strict=True)
    )
    whole = np.where(near_one, excess[0] + 1, total[0])
    whole = whole, np.where(near_one, excess[1], total[1])
    re, im = log_near(whole, excess)
    # -(w² + 2w) / (2 s²), and p m more: (e^{w + s²/2} - 1) w / s² of these.
    grown = expm1_complex(w[0] + 0.5 * square, w[1])
    less = times(w, (-1 - 0.5 * w[0], -0.5 * w[1]))
    more = times(w, (grown[0] - 0.5 * w[0], grown[1] - 0.5 * w[1]))
    centred = terms.mean > 0
    re = re + np.where(centred, more[0], less[0]) / square
    im = im + np.where(centred, more[1], less[1]) / square
    result = terms.count * re, -terms.sign * terms.count * im
    if not slopes:
        return result
    # p A and x - s, in the mean of the distribution that e^{-pA} tilts.
    once, grown = moved
    away = times((w[0] / s + s, w[1] / s), once)
    moved = times(w, (away[0] - grown[0], away[1] - grown[1]))
    moved = divided(moved, (whole[0] * square, whole[1] * square))
    return (*result, terms.count * moved[0], -terms.sign * terms.count * moved[1])


def _node(terms: Sums, path: Path, i: np.ndarray, *, slopes: bool) -> list[Pair]:
    """Of node i its mass, E, and ``e^{sy}`` and times y; of the shape of all."""
    s = terms.shift
    y, slope = _places(path, path.first + path.spacing * i)
    part = path.spacing / SQRT_2PI
    mass = 0.5 * (y[1] * y[1] - y[0] * y[0]), -y[0] * y[1]
    exp_in_place(*mass)
    mass = times(mass, (part * slope[0], part * slope[1]))
    nodes = [mass, _exponent(s, y)]
    if slopes:
        once = polar(s * y[0], s * y[1])
        nodes += [once, times(once, y)]
    return nodes


def _summed(
    terms: Sums, path: Path, p: Pair, near_one: np.ndarray, slopes: bool
) -> list[Pair]:
    """Sums of ``e^{pE}``, less 1 where ``near_one``, times masses; (B, K).

    The masses' sum, and those with ``e^{sy}`` and ``y e^{sy}``, if asked for: of rows
    of about as many nodes by matrices times the masses.
    """
    size = len(p[0])
    sums = np.empty((2 + 4 * slopes, size, len(path.number)))
    whole = np.empty((2, len(path.number)))
    for rows, most in alike(path.number, size):
        column = rows[:, None]
        ways, every = Path(*(field[column] for field in path)), np.arange(most)
        # Behind its last one a row has that again, without mass.
        is_there = every < ways.number
        every = np.minimum(every, ways.number - 1)
        mass, above, *moved = _node(terms.take(column), ways, every, slopes=slopes)
        mass = np.where(is_there, mass[0], 0.0), np.where(is_there, mass[1], 0.0)
        whole[:, rows] = [part.sum(axis=1) for part in mass]
        # What real and imaginary parts of exponentials are multiplied with.
        columns = [mass, *(times(mass, part) for part in moved)]
        columns = [[(re, im), (-im, re)] for re, im in columns]
        columns = np.moveaxis(np.array(columns), (1, 0, 2), (0, -2, -1))
        columns = columns.reshape(2, len(rows), most, -1)
        each = np.stack([part[:, rows].T for part in p], axis=-1)
        (re, im), many = above, near_one[rows]
        grown = each @ np.array([[re, -im], [im, re]]).transpose(0, 2, 1, 3)
        less = expm1_complex(*grown[:, many]) if np.any(many) else None
        exp_in_place(*grown)
        added = np.sum(grown @ columns, axis=0)
        if less is not None:
            added[many, :, :2] = np.sum(less @ columns[:, many, :, :2], axis=0)
        sums[:, :, rows] = added.transpose(2, 1, 0)
    return [(sums[0], sums[1]), (whole[0], whole[1])] + [
        (sums[i], sums[i + 1]) for i in range(2, len(sums), 2)
    ]
