"""Where one orientation is looked at, and what a row of the recursion says there.

Views and windows come from Rényi's filter, and from coarse rows; answers are read off
curves of certified values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.adaptive.problem import FURTHEST, Filter
from jaxdp_episodic.accountant.methods.adaptive.recursion import Row, Window
from jaxdp_episodic.accountant.methods.question import Question

# Points to the right of an answer through which a line bounds it from below.
_SECANTS = 2 ** np.arange(6)
# Rounding of a few operations.
_ROUNDING = 4e-15
# Rounding of a logarithm, relative to 1 and its size.
_LOG_ROUNDING = 1e-15
# Largest exponent of a weight over the window: float64 ends at 700.
_MOST_EXPONENT = 300.0
# Nats that a window has at least on either side of what is asked.
_LEAST_REACH = 1e-3
# Share of delta to which values fall at the window's right end.
_RIGHT_SHARE = 1e-6
# Value to which they fall at its left end.
_LEFT_VALUE = 1e-6
# Nats over which a slope is taken.
_SLOPE_NATS = 0.05
# Largest tilt, per nat.
_MOST_TILT = 100.0


class Curve(NamedTuple):
    """Bounds ``values`` of a convex, falling function of g at ``x = log g``, x[0] = 0.

    The points are evenly spaced in x.
    """

    x: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, row: Row, window: Window, *, up: bool) -> Curve:
        """The bounds that a row says, from g = 1 on."""
        here = slice(-window.first, None)
        sign = 1.0 if up else -1.0
        values = (row.values + sign * row.error)[here] / window.weights[here]
        values = values * (1 + sign * _ROUNDING)
        values = np.minimum(values, 1.0) if up else np.maximum(values, 0.0)
        return cls(window.points[here], values)

    def epsilon_above(self, delta: float) -> float:
        """*Upper bound* of the epsilon at delta, by a chord in g: w is convex there."""
        small = self.values <= delta
        if not small.any():
            return math.inf
        i = int(np.argmax(small))
        if i == 0:
            return 0.0
        x, before, after = float(self.x[i - 1]), *self.values[i - 1 : i + 1].tolist()
        share = (before - delta) / (before - after)
        found = x + math.log1p(math.expm1(float(self.x[i]) - x) * share)
        return min(found * (1 + _ROUNDING) + 1e-300, float(self.x[i]))

    def value_above(self, epsilon: float) -> float:
        """*Upper bound* of the value at epsilon, by the same chord."""
        if epsilon >= self.x[-1]:
            return float(self.values[-1])
        i = int(np.searchsorted(self.x, epsilon, side="right")) - 1
        x, before, after = float(self.x[i]), *self.values[i : i + 2].tolist()
        share = math.expm1(epsilon - x) / math.expm1(float(self.x[i + 1]) - x)
        return max((before - share * (before - after)) * (1 + _ROUNDING), 0.0)

    def epsilon_below(self, above: Curve, delta: float) -> float:
        """*Lower bound* of the epsilon at delta, of values from below.

        At a point the truth is at least ``self``; left of it at least the line through
        that and any value of ``above`` to its right, as a convex function lies above
        the prolongation of its chords.
        """
        large = np.flatnonzero(self.values >= delta)
        j = int(large[-1]) + 1 if large.size else 0
        found = float(self.x[j - 1]) if j else 0.0
        if j >= len(self.x):
            return found
        x = float(self.x[j])
        slope = self._steepest(above, j)
        # delta = value + slope (1 - g / g_j)
        back = (delta - float(self.values[j])) / slope if slope > 0 else math.inf
        if back < 1:
            found = max(found, x + math.log1p(-back) - _ROUNDING * (1 + abs(x)))
        return min(found, x)

    def value_below(self, above: Curve, epsilon: float) -> float:
        """*Lower bound* of the value at epsilon, by the same lines."""
        j = int(np.searchsorted(self.x, epsilon))
        if j >= len(self.x):
            return 0.0
        back = -math.expm1(epsilon - float(self.x[j]))
        found = float(self.values[j]) + self._steepest(above, j) * back
        return found * (1 - _ROUNDING)

    def _steepest(self, above: Curve, j: int) -> float:
        """Lower bound >= 0 of the truth's fall per ``g / g_j`` left of the point j."""
        further = j + _SECANTS
        further = further[further < len(self.x)]
        gaps = np.expm1(self.x[further] - self.x[j])
        falls = (self.values[j] - above.values[further]) / gaps
        return float(max(falls, default=0.0)) if not np.isnan(falls).any() else 0.0

    def upper_end(self, question: Question, shift: float, scale: float) -> float:
        """The *upper end* of one target's answer that a curve from above says.

        Args:
          question: of one target.
          shift: nats by which losses may be off.
          scale: error of the logarithms of the values.
        """
        target = float(question.target)
        if question.is_epsilon:
            return self.epsilon_above(math.exp(target - scale)) + shift
        found = self.value_above(max(target - shift, 0.0))
        # Of g below 1 the divergence is at most 1 - g more than at 1.
        found += max(shift - target, 0.0)
        if not found > 0:  # Of NaN nothing is known.
            return question.nothing if found == 0 else question.everything
        log_found = math.log(found) + scale
        return min(log_found + _LOG_ROUNDING * (1 + abs(log_found)), 0.0)

    def lower_end(
        self, above: Curve, question: Question, shift: float, scale: float
    ) -> float:
        """The *lower end* that curves from below and above say; see `upper_end`."""
        target = float(question.target)
        if question.is_epsilon:
            return max(self.epsilon_below(above, math.exp(target + scale)) - shift, 0.0)
        found = self.value_below(above, target + shift)
        return math.log(found) - scale - _LOG_ROUNDING * 700 if found > 0 else -math.inf


class View(NamedTuple):
    """Where one orientation's curve is looked at.

    Attributes:
      at, log_size: the answer that is expected, epsilon and log(delta).
      tilt: how steep log(delta) is there.
      left, right: nats to the ends of the window, from g = 1.
    """

    at: float
    log_size: float
    tilt: float
    left: float
    right: float

    @classmethod
    def expected(
        cls,
        question: Question,
        filters: Mapping[bool, Filter],
        backward: bool,
        lost: float,
    ) -> View:
        """Where the answer is expected: not finite where there is none.

        Args:
          question: of one target.
          filters: of the orientations.
          backward: the orientation.
          lost: probability that everything is lost at once.
        """
        of = filters[backward]
        at = log_size = float(question.target)
        if question.is_epsilon:
            at, order = of.epsilon(log_size)
        else:
            log_size, order = of.log_delta(at)
        if not (math.isfinite(at) and math.isfinite(log_size)):
            return cls(at, log_size, 0.0, 0.0, 0.0)
        right = max(of.epsilon(log_size + math.log(_RIGHT_SHARE))[0], at)
        left = filters.get(not backward, of).epsilon(math.log(_LEFT_VALUE))[0]
        left, right = (min(x + _LEAST_REACH, FURTHEST) for x in (left, right))
        # Values that do not fall to the right are not to be multiplied up.
        tilt = 0.0 if lost else min(order - 1, _MOST_TILT)
        return cls(at, log_size, tilt, left, right)

    @property
    def reach(self) -> float:
        """Nats from end to end."""
        return self.left + self.right

    def window(self, step: float) -> Window:
        """The window on a lattice of a spacing; float64 can hold its weights."""
        first = -math.ceil(self.left / step)
        size = math.ceil(self.right / step) - first + 3
        tilt = min(self.tilt, _MOST_EXPONENT / (step * size))
        return Window(step, first, size, tilt, min(self.at, self.right))

    def seen(self, question: Question, curve: Curve, lost: float) -> View:
        """The view that a coarse curve shows; see `expected`."""
        at = self.at
        if question.is_epsilon:
            at = min(curve.epsilon_above(math.exp(self.log_size)), at)
        log_values = np.log(curve.values + 1e-300)
        log_size, beside = np.interp([at, at + _SLOPE_NATS], curve.x, log_values)
        small = np.flatnonzero(log_values <= log_size + math.log(_RIGHT_SHARE))
        end = int(small[0]) if small.size else len(curve.x) - 1
        right = float(curve.x[end])
        # Of a heavy tail less than the slope: tilted, it would be larger than the rest.
        tilt = (log_size - beside) / _SLOPE_NATS
        if right > at + _SLOPE_NATS:
            tilt = min(tilt, (log_size - log_values[end]) / (right - at))
        return View(
            at,
            min(float(log_size), 0.0),
            0.0 if lost else float(np.clip(tilt, 0.0, _MOST_TILT)),
            self.left,
            min(max(right, at) + _LEAST_REACH, FURTHEST),
        )

    def narrowed(self, row: Row, window: Window, share: float) -> View:
        """The view without what strategies seldom cross, and gain little from beyond.

        To be u nats left of g = 1 a run from the answer has lost u nats more than that,
        and there the value is v(-u): about v(at + u) v(-u) in all. The same at u nats
        right of the answer, as losses below -u have about the mass v(-u). An estimate:
        both ends of the answer hold on every window. At either end ``share`` of the
        answer may leave the window and come back.
        """
        values = np.abs(row.values / window.weights)
        zero = -window.first
        at = zero + int(
            np.clip(round(self.at / window.step), 0, window.size - 1 - zero)
        )
        u = np.arange(min(zero, window.size - 1 - at) + 1)
        # Both fall, but for rounding.
        left, right = (np.minimum.accumulate(values[i]) for i in (zero - u, at + u))
        small = left * right <= share * values[at]
        if not small.any():
            return self
        reach = window.step * int(np.argmax(small)) + _LEAST_REACH
        right = min(self.right, max(self.at, 0.0) + reach)
        return self._replace(left=min(self.left, reach), right=right)
