"""What a row of the recursion says of epsilon and delta."""

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


class Curve(NamedTuple):
    """Bounds of a convex, falling function of g at evenly spaced ``x = log g``."""

    x: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, row: Row, window: Window, *, up: bool) -> Curve:
        """The bounds that a row says, from g = 1 on."""
        here = slice(-window.first, None)
        sign = 1.0 if up else -1.0
        values = (row.values + sign * row.error)[here] / window.weights[here]
        values = np.clip(values * (1 + sign * _ROUNDING), 0.0, 1.0)
        return cls(window.points[here], values)

    def upper_end(self, question: Question, shift: float, scale: float) -> float:
        """The *upper end* of one target's answer that a curve from above says."""
        target = float(question.target)
        if question.is_epsilon:
            return self.epsilon_above(math.exp(target - scale)) + shift
        epsilon = max(target - shift, 0.0)
        i = int(np.searchsorted(self.x, epsilon, side="right")) - 1
        found = float(self.values[i])
        if i < len(self.x) - 1:
            share = math.expm1(epsilon - self.x[i]) / self._gap(i, i + 1)
            found -= share * (found - float(self.values[i + 1]))
        # Of g below 1 the divergence is at most 1 - g more than at 1.
        found = found * (1 + _ROUNDING) + max(shift - target, 0.0)
        if not found > 0:  # Of NaN nothing is known.
            return question.nothing if found == 0 else question.everything
        return min(math.log(found) + scale + _ROUNDING * (1 - math.log(found)), 0.0)

    def epsilon_above(self, delta: float) -> float:
        """*Upper bound* of the epsilon at delta."""
        small = np.flatnonzero(self.values <= delta)
        if not small.size:
            return math.inf
        if not (i := int(small[0])):
            return 0.0
        before, after = self.values[i - 1 : i + 1].tolist()
        share = (before - delta) / (before - after) if before > delta else 1.0
        found = self.x[i - 1] + math.log1p(self._gap(i - 1, i) * share)
        return min(float(found) * (1 + _ROUNDING) + 1e-300, float(self.x[i]))

    def lower_end(
        self, above: Curve, question: Question, shift: float, scale: float
    ) -> float:
        """The *lower end* that curves from below and above say; see `upper_end`."""
        # A convex function lies above the prolongation of its chords.
        target = float(question.target)
        if question.is_epsilon:
            return max(self._epsilon(above, math.exp(target + scale)) - shift, 0.0)
        j = int(np.searchsorted(self.x, target + shift))
        if j >= len(self.x):
            return question.nothing
        back = -math.expm1(target + shift - float(self.x[j]))
        found = float(self.values[j]) + self._steepest(above, j) * back
        found *= 1 - _ROUNDING
        return math.log(found) - scale - _ROUNDING * 700 if found > 0 else -math.inf

    def _epsilon(self, above: Curve, delta: float) -> float:
        large = np.flatnonzero(self.values >= delta)
        j = int(large[-1]) + 1 if large.size else 0
        found = float(self.x[j - 1]) if j else 0.0
        if j >= len(self.x):
            return found
        x, slope = float(self.x[j]), self._steepest(above, j)
        # delta = value + slope (1 - g / g_j)
        back = (delta - float(self.values[j])) / slope if slope > 0 else math.inf
        if back < 1:
            found = max(found, x + math.log1p(-back) - _ROUNDING * (1 + abs(x)))
        return min(found, x)

    def _steepest(self, above: Curve, j: int) -> float:
        """Lower bound >= 0 of the truth's fall per ``g / g_j`` left of the point j."""
        further = j + _SECANTS
        further = further[further < len(self.x)]
        falls = (self.values[j] - above.values[further]) / self._gap(j, further)
        return float(np.max(np.nan_to_num(falls, nan=0.0), initial=0.0))

    def _gap(self, i: int, j: int | np.ndarray) -> np.ndarray:
        return np.expm1(self.x[j] - self.x[i])
