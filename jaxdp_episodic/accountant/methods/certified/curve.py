"""Certified delta and epsilon of the distribution of a sum of privacy losses."""

# Reference: docs/theory.md, "Certified".

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.lattice_sums import (
    LOG_ERROR,
    SUMS_ERROR,
    LatticeSum,
)

# Smallest log(delta) that is solved for: below it exponentials underflow.
LEAST_LOG_DELTA = -700.0
# Nats beyond which weights of cells are 0 to float64.
_LARGEST_EXPONENT = 745.0
# Relative error of a sum of weighted cells: of the largest exponents that count, which
# a weight was computed of.
_WEIGHT_ERROR = 1e-13
# Steps of a search for epsilon, at most.
_MOST_STEPS = 60
# Factor of the distance, by the slope, at which a certified epsilon is expected.
_STEP_MARGIN = 1.01
# Relative distance of epsilons that a search does not tell apart.
_NEAR = 1e-13


class Curve(NamedTuple):
    """One end of the hockey-stick curve of a sum of losses."""

    whole: LatticeSum  # the sum's finite losses
    infinite: float  # mass at an infinite loss
    up: bool  # whether it is an upper end, or a lower one
    weights: np.ndarray  # (2, n) e^{-c x} and e^{-(1 + c) x}

    @classmethod
    def of(cls, whole: LatticeSum, infinite: float, *, up: bool) -> Curve:
        """The curve of a sum."""
        step = whole.tilt * whole.spacing
        number = min(len(whole.cells), math.ceil(_LARGEST_EXPONENT / step) + 1)
        x = whole.spacing * np.arange(number)
        weights = np.exp(-whole.tilt * x)
        return cls(whole, infinite, up, np.stack([weights, weights * np.exp(-x)]))

    def estimate(self, epsilon: float) -> tuple[float, float]:
        """*Estimates* of log(delta) of finite losses and of minus its slope."""
        (total, beyond), exponent = self._sums(epsilon)
        slope = min(beyond / max(total, 1e-300), 10 / self.whole.spacing)
        return math.log(max(total, 1e-300)) + exponent, slope

    def log_delta(self, epsilon: float) -> float:
        """log(delta) at an epsilon >= 0, rounded to the safe side."""
        sum_, sign = self.whole, 1 if self.up else -1
        at = epsilon - sign * sum_.shift
        bound = chernoff_log_delta(sum_, self.infinite, epsilon) if self.up else 0.0
        if self.up and at < sum_.start:
            return bound  # masses below the window are missing
        at = max(at, sum_.start)
        (total, beyond), exponent = self._sums(at)
        rounded = _WEIGHT_ERROR * (total + 2 * beyond)
        total += sign * (rounded + self._slack())
        if not total > 0:
            return 0.0 if self.up else -math.inf
        value = math.log(total) + exponent
        value += sign * _exponent_error(sum_, value, at)
        if not self.up:
            return min(value, 0.0)
        return min(_with_infinite(value, self.infinite), bound)

    def epsilon(self, log_delta: float, near: float) -> float:
        """The epsilon at a delta, rounded to the safe side, from an estimate of it."""
        value, slope = self.log_delta(near), self.estimate(near)[1]
        step = min(_STEP_MARGIN * abs(value - log_delta), 1.0) / max(slope, 1e-300)
        step = max(step, _NEAR * (near + 1e-300))
        bound = math.inf
        if self.up:
            bound = chernoff_epsilon(self.whole, self.infinite, log_delta)
        tried, sign = near, 1 if self.up else -1
        for _ in range(_MOST_STEPS):
            # Each one is certified by itself: no monotonicity is used.
            if sign * (log_delta - self.log_delta(tried)) >= 0:
                return min(tried, bound)
            tried = near + sign * step
            step *= 2
            if tried <= 0 or tried >= bound:
                break
        return bound if self.up else 0.0

    def estimated_epsilon(self, log_delta: float, near: float) -> float:
        """*Estimate* of the epsilon at a delta of finite losses, by Newton's method."""
        low = max(self.whole.start, 0.0)
        high = self.whole.start + self.whole.spacing * len(self.whole.cells)
        if self.estimate(low)[0] <= log_delta:
            return low
        at = min(max(near, low), high)
        for _ in range(_MOST_STEPS):
            value, slope = self.estimate(at)
            low, high = (at, high) if value > log_delta else (low, at)
            following = at + (value - log_delta) / max(slope, 1e-300)
            if abs(following - at) <= _NEAR * (at + 1e-9):
                break
            at = following if low < following < high else 0.5 * (low + high)
        return at

    def _sums(self, epsilon: float) -> tuple[tuple[float, float], float]:
        """Tilted delta, minus its derivative, and the exponent of both."""
        sum_ = self.whole
        exponent = sum_.log_moment - sum_.tilt * epsilon
        first = max(math.floor((epsilon - sum_.start) / sum_.spacing) + 1, 0)
        gap = max(sum_.start + first * sum_.spacing - epsilon, 0.0)
        cells = np.maximum(sum_.cells[first : first + self.weights.shape[1]], 0.0)
        # Products of BLAS would wake its threads.
        ones, decays = (
            float(np.sum(cells * weights[: len(cells)])) for weights in self.weights
        )
        ones *= math.exp(-sum_.tilt * gap)
        decays *= math.exp(-(1 + sum_.tilt) * gap)
        return (max(ones - decays, 0.0), decays), exponent

    def _slack(self) -> float:
        """Bound of the error of ``sum of p_i k(x_i - eps)``."""
        # The sum of k over a lattice is at most e^w and the integral 1 / (c (1 + c))
        # over the spacing; of its squares with the integral 1 / (2 c (1 + c) (1 + 2
        # c)).
        sum_ = self.whole
        c, number = sum_.tilt, len(sum_.cells)
        most = math.exp(log_weight(c))
        integral = 1 / (sum_.spacing * c * (1 + c))
        weights = min(most + integral, most * number)
        squares = min(most**2 + 0.5 * integral / (1 + 2 * c), most**2 * number)
        single, together = sum_.rounding
        rounding = min(single * weights, together * math.sqrt(squares))
        below, above = sum_.outside
        # Mass above the window is missing; mass outside of it has been wrapped in.
        truncated = above if self.up else below + above
        return (most * truncated + rounding) * (1 + SUMS_ERROR)


def log_weight(tilt: float) -> float:
    """``w(c) = log max e^{-c x} (1 - e^{-x})`` over x > 0; at ``x = log(1 + 1/c)``."""
    return -math.log1p(tilt) - tilt * math.log1p(1 / tilt)


def chernoff_log_delta(whole: LatticeSum, infinite: float, epsilon: float) -> float:
    """*Upper bound* of log(delta) that needs no cells."""
    bound = whole.log_moment - whole.tilt * (epsilon - whole.shift)
    bound += log_weight(whole.tilt)
    bound += _exponent_error(whole, bound, epsilon)
    return _with_infinite(bound, infinite)


def chernoff_epsilon(whole: LatticeSum, infinite: float, log_delta: float) -> float:
    """*Upper bound* of epsilon that needs no cells."""
    level = log_delta - _exponent_error(whole, log_delta, 0.0)
    if not level > LEAST_LOG_DELTA:
        return math.inf  # rounding leaves nothing of delta
    share = 1 - infinite * (1 + SUMS_ERROR) / math.exp(level)
    if share <= 0:
        return math.inf
    level += math.log(share) - LOG_ERROR
    bound = (whole.log_moment + log_weight(whole.tilt) - level) / whole.tilt
    bound += LOG_ERROR * (abs(bound) + abs(whole.log_moment) / whole.tilt)
    return max(bound + whole.shift, 0.0)


def _with_infinite(log_delta: float, infinite: float) -> float:
    lost = math.log(max(infinite, 1e-300))
    return min(float(np.logaddexp(log_delta, lost)) + LOG_ERROR, 0.0)


def _exponent_error(whole: LatticeSum, log_delta: float, epsilon: float) -> float:
    """Bound of the error of log(delta) from the masses and from rounded exponents."""
    large = abs(whole.log_moment) + whole.tilt * abs(epsilon)
    # of few operations
    return whole.relative + LOG_ERROR * (1 + abs(log_delta) + 1e-3 * large)
