"""The worst strategy, by a recursion over the loss so far on a lattice of log g.

Reference: docs/proofs.md, "Runs that adapt".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.adaptive.kernel import Kernel
from jaxdp_episodic.accountant.methods.adaptive.problem import Graph
from jaxdp_episodic.accountant.methods.run import Question
from jaxdp_episodic.accountant.numerics.lattice_sums import transform_error

# Points right of an answer, through which a line bounds the curve from below.
_SECANTS = 2 ** np.arange(6)
_ROUNDING = 4e-15  # rounding of a few operations


class Curve(NamedTuple):
    """Bounds of a convex, decreasing function of g at evenly spaced ``x = log g``."""

    x: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, row: Row, window: Window, *, up: bool) -> Curve:
        """Returns the bounds that follow from a row, from g = 1 on."""
        here = slice(-window.first, None)
        sign = 1.0 if up else -1.0
        values = (row.values + sign * row.error)[here] / window.weights[here]
        least = 0.0 if up else row.sure
        values = np.clip(values * (1 + sign * _ROUNDING), least, 1.0)
        return cls(window.points[here], values)

    def upper_end(self, question: Question, shift: float) -> float:
        """Returns the *upper end* of a question's answer; self is from above.

        Losses may have errors of ``shift`` nats.
        """
        target = float(question.target)
        if question.is_epsilon:
            return self.epsilon_above(math.exp(target)) + shift
        epsilon = max(target - shift, 0.0)
        i = int(np.searchsorted(self.x, epsilon, side="right")) - 1
        found = float(self.values[i])
        if i < len(self.x) - 1:
            share = math.expm1(epsilon - self.x[i]) / self._gap(i, i + 1)
            found -= share * (found - float(self.values[i + 1]))
        # For g < 1, the divergence is at most that at 1, plus 1 - g.
        found = found * (1 + _ROUNDING) + max(shift - target, 0.0)
        if not found > 0:  # NaN says nothing.
            return question.nothing if found == 0 else question.everything
        return min(math.log(found) + _ROUNDING * (1 - math.log(found)), 0.0)

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

    def lower_end(self, above: Curve, question: Question, shift: float) -> float:
        """Returns the *lower end* of an answer; self is from below. See `upper_end`."""
        # A convex function lies above the continuation of its chords.
        target = float(question.target)
        if question.is_epsilon:
            return max(self._epsilon(above, math.exp(target)) - shift, 0.0)
        j = int(np.searchsorted(self.x, target + shift))
        if j >= len(self.x):
            return question.nothing
        back = -math.expm1(target + shift - float(self.x[j]))
        found = float(self.values[j]) + self._steepest(above, j) * back
        found *= 1 - _ROUNDING
        return math.log(found) - _ROUNDING * 700 if found > 0 else -math.inf

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
        """Lower bound >= 0 of minus the slope in ``g / g_j``, left of the point j."""
        further = j + _SECANTS
        further = further[further < len(self.x)]
        falls = (self.values[j] - above.values[further]) / self._gap(j, further)
        return float(np.max(np.nan_to_num(falls, nan=0.0), initial=0.0))

    def _gap(self, i: int, j: int | np.ndarray) -> np.ndarray:
        return np.expm1(self.x[j] - self.x[i])


# Norm below which squares may be 0 in float64: the largest value bounds it instead.
_LEAST_NORM = 1e-140
# Odd factors of the length of a transform.
_LENGTHS = (1, 3, 5, 9, 15, 25)


class Window(NamedTuple):
    """The points ``log g = step * (first + i)``, i < size, and the tilt there."""

    step: float
    first: int
    size: int
    tilt: float
    center: float

    @property
    def points(self) -> np.ndarray:
        """(size,) log g."""
        return self.step * (self.first + np.arange(self.size))

    @property
    def weights(self) -> np.ndarray:
        """(size,) factors of the values."""
        return np.exp(self.tilt * (self.points - self.center))


class Row(NamedTuple):
    """The weighted values of one state on the window, and a bound of their errors."""

    values: np.ndarray
    error: float
    sure: float  # probability of an infinite loss, some strategy


class Pass(NamedTuple):
    """A recursion from one side, above or below, in one orientation."""

    kernels: Sequence[Kernel]  # of the options, all from above or all from below
    window: Window
    up: bool  # beyond the window w is as at its ends if up, else little
    beyond: Callable[[np.ndarray], np.ndarray]  # upper bounds of w right of the window
    payoff: Callable[[int], np.ndarray] | None = None  # of stopping, if not (1 - g)_+


def solve(
    graph: Graph, one: Pass, visit: Callable[[int, Row], None] | None = None
) -> Row:
    """Returns the row of the state in which the run begins.

    ``visit`` sees every state with its row.
    """
    with np.errstate(over="ignore"):
        plan = _Plan(one)
        # Of each state the last one that leads to it.
        last = {to: state for state, moves in enumerate(graph.moves) for _, to in moves}
        spectra: dict[int, _Spectrum] = {}
        for state, moves in enumerate(graph.moves):
            row = plan.best(state, [(k, spectra[to]) for k, to in moves])
            if visit is not None:
                visit(state, row)
            spectra[state] = plan.spectrum(row)
            for to in {to for _, to in moves if last[to] == state}:
                del spectra[to]
    return row


class _Spectrum(NamedTuple):
    """The transform of a state's row."""

    transform: np.ndarray  # (length / 2 + 1,)
    norm: float  # of the values
    error: float
    sure: float  # see `Row`


class _Move(NamedTuple):
    """An option on the window of a pass."""

    transform: np.ndarray  # of its tilted losses
    total: float  # their probability: the growth of errors
    rounding: float  # error of a mean, for each unit of a row's norm
    infinite: float  # probability of an infinite loss
    finite: float  # probability of all others


class _Plan:
    """The options of a pass, and how its rows continue beyond the window."""

    def __init__(self, one: Pass) -> None:
        self.one, window = one, one.window
        self.weights = window.weights
        reach = np.array([kernel.index[[0, -1]] for kernel in one.kernels])
        right, left = np.clip(reach * [-1, 1], 0, window.size).max(axis=0).tolist()
        least = max(window.size + left + right, 16)
        self.length = min(m * 2 ** math.ceil(math.log2(least / m)) for m in _LENGTHS)
        self.moves = [self._move(kernel) for kernel in one.kernels]
        # Reused for each state: new memory pages take as long as a transform.
        self.padded = np.zeros(self.length)
        self.right = slice(window.size, window.size + right)
        self.left = slice(self.length - left, self.length)
        # Right of a window: bounds of the growth, and of the values.
        cells, before = np.arange(1, right + 1), np.arange(left, 0, -1)
        exponent = window.tilt * window.step
        x = window.points[-1] + window.step * cells
        self.growth = np.exp(exponent * cells)
        # A bound that underflows must not become 0.
        limit = np.maximum(one.beyond(x), 1e-300)
        self.limit = limit * np.exp(window.tilt * (x - window.center))
        self.decay = np.exp(-exponent * before)
        # (1 - g)_+ within the window, and left of it.
        self.stop = _guessed(window.points) * self.weights
        x = window.points[0] - window.step * before
        self.before = _guessed(x) * self.weights[0] * self.decay

    def _move(self, kernel: Kernel) -> _Move:
        """The option with this kernel."""
        window, masses, infinite = self.one.window, kernel.masses, kernel.infinite
        # Losses larger than the window lead to its end.
        index = np.clip(kernel.index, -window.size, window.size)
        tilted = masses * np.exp(window.tilt * window.step * index)
        circle = np.bincount(index % self.length, tilted, self.length)
        total = float(tilted.sum()) * (1 + 1e-12)
        # Errors of both transforms, and of the inverse of their product.
        rounding = 2 * float(np.linalg.norm(circle)) + total
        rounding *= transform_error(self.length)
        if self.one.up:  # further losses would lead further left, where w is at most 1
            infinite += float(masses[kernel.index > window.size].sum())
        return _Move(np.fft.rfft(circle), total, rounding, infinite, masses.sum())

    def best(self, state: int, ways: Sequence[tuple[int, _Spectrum]]) -> Row:
        """The maximum of stopping and of every option followed by its row."""
        values, error, sure = self.stop.copy(), 0.0, 0.0
        if self.one.payoff is not None:
            values = self.one.payoff(state) * self.weights
        for option, after in ways:
            move = self.moves[option]
            mean = np.fft.irfft(after.transform * move.transform, self.length)
            mean = mean[: len(values)] + move.infinite * self.weights
            np.maximum(values, mean, out=values)
            # One error for each state: it may grow with the steps, not with the states.
            error = max(error, move.total * after.error + move.rounding * after.norm)
            sure = max(sure, (move.infinite + move.finite * after.sure) * (1 - 1e-13))
        return Row(values, error, sure)

    def spectrum(self, row: Row) -> _Spectrum:
        """The spectrum of a row."""
        padded, (values, error, sure) = self.padded, row
        padded[: len(values)] = values
        padded[self.left] = self.before
        if self.one.up:
            # w decreases with g, and w - (1 - g)_+ away from g = 1 on both sides.
            last = max(values[-1] + error, 1e-300)
            padded[self.right] = np.minimum(last * self.growth, self.limit)
            more = max(values[0] - self.stop[0], 0.0) + error
            padded[self.left] += more * self.decay
        elif not self.one.window.tilt:
            padded[self.right] = sure  # an infinite loss counts at every g
        # No BLAS product, which would wake its threads: 40 times slower on busy cores.
        norm = math.sqrt(np.einsum("i,i", padded, padded))
        if norm < _LEAST_NORM:
            norm = math.sqrt(self.length) * float(np.abs(padded).max())
        return _Spectrum(np.fft.rfft(padded), norm, error, sure)


def _guessed(x: np.ndarray) -> np.ndarray:
    """Returns ``(1 - g)_+``."""
    return -np.expm1(np.minimum(x, 0.0))
