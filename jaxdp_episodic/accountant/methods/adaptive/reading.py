"""Epsilon and delta off a curve of certified values: divergences at points log g."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.adaptive.recursion import Row, Window
from jaxdp_episodic.accountant.methods.question import Question

# Points to the right of an answer through which a line bounds it from below.
_SECANTS = 2 ** np.arange(6)
# Rounding of a few operations.
_ROUNDING = 4e-15
# Rounding of a logarithm, relative to 1 and its size.
_LOG_ROUNDING = 1e-15


class Curve(NamedTuple):
    """Bounds ``values`` of a convex, falling function of g at ``x = log g``, x[0] = 0.

    The points are evenly spaced in x.
    """

    x: np.ndarray
    values: np.ndarray


def curve_of(row: Row, window: Window, *, up: bool) -> Curve:
    """The bounds that a row says, from g = 1 on."""
    here = slice(-window.first, None)
    sign = 1.0 if up else -1.0
    values = (row.values + sign * row.error)[here] / window.weights[here]
    values = values * (1 + sign * _ROUNDING)
    values = np.minimum(values, 1.0) if up else np.maximum(values, 0.0)
    return Curve(window.points[here], values)


def epsilon_above(curve: Curve, delta: float) -> float:
    """*Upper bound* of the epsilon at delta: by a chord in g, above what is convex."""
    small = curve.values <= delta
    if not small.any():
        return math.inf
    i = int(np.argmax(small))
    if i == 0:
        return 0.0
    x, before, after = float(curve.x[i - 1]), *curve.values[i - 1 : i + 1].tolist()
    share = (before - delta) / (before - after)
    growth = math.expm1(float(curve.x[i]) - x)
    found = x + math.log1p(growth * share)
    return min(found * (1 + _ROUNDING) + 1e-300, float(curve.x[i]))


def value_above(curve: Curve, epsilon: float) -> float:
    """*Upper bound* of the value at epsilon, by the same chord."""
    if epsilon >= curve.x[-1]:
        return float(curve.values[-1])
    i = int(np.searchsorted(curve.x, epsilon, side="right")) - 1
    x, before, after = float(curve.x[i]), *curve.values[i : i + 2].tolist()
    share = math.expm1(epsilon - x) / math.expm1(float(curve.x[i + 1]) - x)
    return max((before - share * (before - after)) * (1 + _ROUNDING), 0.0)


def epsilon_below(curve: Curve, above: Curve, delta: float) -> float:
    """*Lower bound* of the epsilon at delta.

    At a point the truth is at least ``curve``; left of it at least the line through
    that and any value of ``above`` to its right, as a convex function lies above the
    prolongation of its chords.
    """
    large = np.flatnonzero(curve.values >= delta)
    if not large.size:
        i, found = -1, 0.0
    else:
        i = int(large[-1])
        found = float(curve.x[i])
    j = i + 1
    if j >= len(curve.x):
        return found
    x, value = float(curve.x[j]), float(curve.values[j])
    for slope in _slopes(curve, above, j):
        # delta = value + slope (1 - g / g_j)
        back = (delta - value) / slope if slope > 0 else math.inf
        if back < 1:
            found = max(found, x + math.log1p(-back) - _ROUNDING * (1 + abs(x)))
    return min(found, x)


def value_below(curve: Curve, above: Curve, epsilon: float) -> float:
    """*Lower bound* of the value at epsilon, by the same lines."""
    j = int(np.searchsorted(curve.x, epsilon))
    if j >= len(curve.x):
        return 0.0
    value = float(curve.values[j])
    back = -math.expm1(epsilon - float(curve.x[j]))
    steepest = max([s for s in _slopes(curve, above, j)], default=0.0)
    return max(value + max(steepest, 0.0) * back, 0.0) * (1 - _ROUNDING)


def _slopes(curve: Curve, above: Curve, j: int) -> list[float]:
    """Falls of the truth per ``g / g_j`` left of the point j: lower bounds."""
    further = j + _SECANTS
    further = further[further < len(curve.x)]
    gaps = np.expm1(curve.x[further] - curve.x[j])
    return ((curve.values[j] - above.values[further]) / gaps).tolist()


def upper_end(question: Question, curve: Curve, shift: float, scale: float) -> float:
    """The *upper end* that a curve from above says.

    Args:
      question: of one target.
      curve: from above.
      shift: nats by which losses may be off.
      scale: error of the logarithms of the values.
    """
    target = float(question.target)
    if question.is_epsilon:
        return epsilon_above(curve, math.exp(target - scale)) + shift
    found = value_above(curve, max(target - shift, 0.0))
    # Of g below 1 the divergence is at most 1 - g more than at 1.
    found += max(shift - target, 0.0)
    if not found > 0:  # Of NaN nothing is known.
        return question.nothing if found == 0 else question.everything
    log_found = math.log(found) + scale
    return min(log_found + _LOG_ROUNDING * (1 + abs(log_found)), 0.0)


def lower_end(
    question: Question, curve: Curve, above: Curve, shift: float, scale: float
) -> float:
    """The *lower end* that curves from below and above say; see `upper_end`."""
    target = float(question.target)
    if question.is_epsilon:
        return max(epsilon_below(curve, above, math.exp(target + scale)) - shift, 0.0)
    found = value_below(curve, above, target + shift)
    return math.log(found) - scale - _LOG_ROUNDING * 700 if found > 0 else -math.inf
