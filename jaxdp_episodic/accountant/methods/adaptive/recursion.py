"""The worst strategy, by a recursion over the loss so far on a lattice of log g.

Reference: docs/proofs.md, "Runs that adapt".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
        values = np.clip(values * (1 + sign * _ROUNDING), 0.0, 1.0)
        return cls(window.points[here], values)

    def upper_end(self, question: Question, shift: float, scale: float) -> float:
        """Returns the *upper end* of a question's answer; self is from above.

        Losses may have errors of ``shift`` nats, and log H_g errors of ``scale``.
        """
        target = float(question.target)
        if question.is_epsilon:
            return self.epsilon_above(math.exp(target - scale)) + shift
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
        """Returns the *lower end* of an answer; self is from below. See `upper_end`."""
        # A convex function lies above the continuation of its chords.
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
        """Lower bound >= 0 of minus the slope in ``g / g_j``, left of the point j."""
        further = j + _SECANTS
        further = further[further < len(self.x)]
        falls = (self.values[j] - above.values[further]) / self._gap(j, further)
        return float(np.max(np.nan_to_num(falls, nan=0.0), initial=0.0))

    def _gap(self, i: int, j: int | np.ndarray) -> np.ndarray:
        return np.expm1(self.x[j] - self.x[i])


# Cells of transforms that are computed at once, which fit a core's cache.
_MOST_CELLS = 2**17
# Norm below which squares may be 0 in float64: the largest value bounds it instead.
_LEAST_NORM = 1e-140
# Odd factors of the length of a transform.
_LENGTHS = (1, 3, 5, 9, 15, 25)
_SUM_ROUNDING = 4.5e-16  # rounding of a running sum, for each term


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


class Pass(NamedTuple):
    """A recursion from one side, above or below, in one orientation."""

    kernels: Sequence[Kernel]  # of the options, all from above or all from below
    window: Window
    up: bool  # beyond the window values are as at its ends if up, else 0
    beyond: Callable[[np.ndarray], np.ndarray]  # upper bounds of v right of the window
    payoff: Callable[[int], np.ndarray] | None = None  # of stopping, minus (1 - g)_+


def own_profile(kernel: Kernel, window: Window, *, up: bool) -> np.ndarray:
    """Returns (size,) ``E (1 - g e^-L)_+ - (1 - g)_+`` for an option's losses."""
    h, last = window.step, kernel.first + len(kernel.masses) - 1
    low, high = min(kernel.first, 0), max(last, 0)
    p = np.zeros(high - low + 1)
    p[kernel.first - low : last - low + 1] = kernel.masses
    x = h * np.arange(low, high + 1)
    lost = -math.expm1(-h)
    # For losses above j: h_j = sum over i > j of (1 - e^-h) G_i, where G_i is the sum
    # of p e^-(l - x_i) over losses l >= x_i. Below 0 with P and Q exchanged.
    above = np.exp(x) * np.cumsum((p * np.exp(-x))[::-1])[::-1]
    above = lost * np.append(np.cumsum(above[::-1])[::-1][1:], 0.0)
    below = np.exp(-x) * np.cumsum(p)
    below = lost * np.append(0.0, np.cumsum(below)[:-1])
    slack = _SUM_ROUNDING * 2 * (len(p) + 8)
    sign = 1.0 if up else -1.0
    above, below = above * (1 + sign * slack), below * (1 + sign * slack)
    place = window.first + np.arange(window.size)
    points = window.points
    inside = np.clip(place - low, 0, len(p) - 1)
    right = np.where(place >= high, 0.0, above[inside]) + kernel.infinite
    g = np.exp(np.minimum(points, 0.0))
    left = np.where(place <= low, 0.0, below[inside])
    left = g * left + sign * (kernel.p_error + g * kernel.q_error)
    left += g * kernel.q_infinite
    own = np.where(place >= 0, right, left)
    # From below it may be negative: unlike w, v does not increase with the losses, so
    # it is a bound only together with its mean over the same probabilities.
    return np.maximum(own, 0.0) if up else own


def solve(
    graph: Graph,
    passes: Sequence[Pass],
    visit: Callable[[int, list[Row]], bool] | None = None,
) -> list[Row]:
    """Returns for each pass the row of the state in which the run begins.

    ``visit`` sees every state with its rows, and ends the recursion by True.
    """
    with np.errstate(over="ignore"):
        plan = _Plan(passes)
        # Of each state the last one that leads to it.
        last = list(range(len(graph.moves)))
        for state, moves in enumerate(graph.moves):
            for _, to in moves:
                last[to] = state
        ends: dict[int, list[int]] = {}
        for state, end in enumerate(last):
            ends.setdefault(end, []).append(state)
        spectra: dict[int, _Spectrum] = {}
        for group in graph.groups(plan.together):
            ways = [[(k, spectra[to]) for k, to in graph.moves[s]] for s in group]
            values, errors, sure = plan.better(plan.stopping(group), ways)
            if visit is not None:
                for state, value, bounds in zip(group, values, errors, strict=True):
                    rows = _rows(value, bounds)
                    if visit(state, rows):
                        return rows
            spectra |= zip(group, plan.spectra(values, errors, sure), strict=True)
            for state in group:
                for done in ends.get(state, ()):
                    del spectra[done]
    return _rows(values[-1], errors[-1])


def _rows(values: np.ndarray, errors: list[float]) -> list[Row]:
    return [Row(v, e) for v, e in zip(values, errors, strict=True)]


class _Spectrum(NamedTuple):
    """The transforms of a state's rows, one of each of P passes."""

    transforms: np.ndarray  # (P, length / 2 + 1)
    norms: list[float]  # of the values
    errors: list[float]
    sure: np.ndarray  # (P, 2) P- and Q-probability of an infinite loss, some strategy


class _Plan:
    """Kernels and their transforms on the windows of P passes."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.passes = passes
        self.size = size = passes[0].window.size
        self.weights = np.stack([each.window.weights for each in passes])
        # Losses larger than the window lead to its end.
        folded = [[_folded(k, size) for k in each.kernels] for each in passes]
        every = list(itertools.chain(*folded))
        self.right = max(max(-first, 0) for first, _ in every)
        self.left = max(max(first + len(m) - 1, 0) for first, m in every)
        least = max(size + self.left + self.right, 16)
        self.length = min(m * 2 ** math.ceil(math.log2(least / m)) for m in _LENGTHS)
        self.machine = transform_error(self.length)
        options = [self._options(*each) for each in zip(passes, folded, strict=True)]
        # By option, then by pass.
        self.own, self.transforms, norms = (
            np.stack(each, axis=1) for each in zip(*options, strict=True)
        )
        self.norms = norms.tolist()
        # Infinite losses are left out in a tilted window.
        self.at_once = [
            [
                (
                    np.array([k.infinite, k.q_infinite]) * (one.window.tilt == 0),
                    k.least(one.window.step),
                )
                for one, k in zip(passes, kernels, strict=True)
            ]
            for kernels in zip(*(one.kernels for one in passes), strict=True)
        ]
        ends = [self._beyond(each) for each in passes]
        self.growth, self.limit, self.decay = map(np.stack, zip(*ends, strict=True))
        # Reused for each state: new memory pages take as long as the transforms.
        cells = len(passes) * self.length
        self.together = max(len(self.own), _MOST_CELLS // cells)
        shape = (self.together, len(passes))
        self.products = np.empty((*shape, self.length // 2 + 1), np.complex128)
        self.means = np.empty((*shape, self.length))

    def _options(self, one: Pass, folded: Sequence[tuple[int, np.ndarray]]) -> Any:
        """Returns a pass' K profiles, (K, size), transforms, and norms (K, 2)."""
        window = one.window
        own = [own_profile(k, window, up=one.up) for k in one.kernels] * window.weights
        circles, norms = np.zeros((len(folded), self.length)), []
        for circle, (first, masses) in zip(circles, folded, strict=True):
            index = first + np.arange(len(masses))
            tilted = masses * np.exp(window.tilt * window.step * index)
            circle[index % self.length] = tilted
            total = float(tilted.sum()) * (1 + 1e-12)
            # Errors of both transforms, and of the inverse of their product.
            size = 2 * float(np.linalg.norm(tilted)) + total
            norms.append((total, self.machine * size))
        return own, np.fft.rfft(circles), np.array(norms)

    def _beyond(self, one: Pass) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns bounds of the growth right of a window, and the decay left of it."""
        window, right = one.window, np.arange(1, self.right + 1)
        exponent = window.tilt * window.step
        x = window.points[-1] + window.step * right
        # A bound that underflows must not become 0.
        limit = np.maximum(one.beyond(x), 1e-300)
        limit = limit * np.exp(window.tilt * (x - window.center))
        decay = np.exp(-exponent * np.arange(self.left, 0, -1))
        return one.up * np.exp(exponent * right), limit, one.up * decay

    def stopping(self, group: range) -> np.ndarray:
        """Returns (m, P, size) weighted values of stopping in each state."""
        found = np.zeros((len(group), *self.weights.shape))
        for i, one in enumerate(self.passes):
            if one.payoff is not None:
                for j, state in enumerate(group):
                    found[j, i] = one.payoff(state) * self.weights[i]
        return found

    def spectra(
        self, values: np.ndarray, errors: Sequence[list[float]], sure: np.ndarray
    ) -> list[_Spectrum]:
        """Returns the spectra of the rows of m states, (m, P, size)."""
        end = self.size + self.right
        padded = self.means[: len(values)]
        padded[..., : self.size] = values
        padded[..., end : self.length - self.left] = 0.0
        # From above, v decreases away from g = 1 on both sides, so beyond the ends it
        # is at most these values and their error.
        off = np.array(errors)[..., None]
        last = np.maximum(values[..., -1:] + off, 1e-300)
        right = padded[..., self.size : end]
        np.minimum(np.multiply(last, self.growth, out=right), self.limit, out=right)
        left = padded[..., self.length - self.left :]
        np.multiply(values[..., :1] + off, self.decay, out=left)
        for i, one in enumerate(self.passes):
            if not one.up:
                # An infinite loss counts at every g; on the left g times Q's
                # probability.
                cells = one.window.step * np.arange(self.left, 0, -1)
                right[:, i] = sure[:, i, :1]
                left[:, i] = sure[:, i, 1:] * np.exp(one.window.points[0] - cells)
        norms = np.sqrt(np.vecdot(padded, padded))
        if norms.min() < _LEAST_NORM:
            largest = math.sqrt(self.length) * np.abs(padded).max(axis=-1)
            norms = np.where(norms < _LEAST_NORM, largest, norms)
        transforms = np.fft.rfft(padded)
        return list(map(_Spectrum, transforms, norms.tolist(), errors, sure))

    def better(
        self, best: np.ndarray, ways: Sequence[Sequence[tuple[int, _Spectrum]]]
    ) -> tuple[np.ndarray, list[list[float]], np.ndarray]:
        """Returns the maxima of stopping and of every option followed by its rows."""
        # One error for each state: it may grow with the steps, not with the states.
        errors = [[0.0] * len(self.passes) for _ in ways]
        sure = np.zeros((len(ways), len(self.passes), 2))
        moves = [
            (values, bounds, least, *way)
            for values, bounds, least, each in zip(
                best, errors, sure, ways, strict=True
            )
            for way in each
        ]
        if not moves:
            return best, errors, sure
        products, means = self.products[: len(moves)], self.means[: len(moves)]
        # All transforms of all states at once.
        for product, move in zip(products, moves, strict=True):
            _, bounds, least, option, after = move
            np.multiply(after.transforms, self.transforms[option], out=product)
            pairs = zip(self.norms[option], after.errors, after.norms, strict=True)
            for i, ((total, rounding), error, norm) in enumerate(pairs):
                bounds[i] = max(bounds[i], total * error + rounding * norm)
            for i, (lost, kept) in enumerate(self.at_once[option]):
                found = (lost + kept * after.sure[i]) * (1 - 1e-13)
                least[i] = np.maximum(least[i], found)
        np.fft.irfft(products, self.length, out=means)
        for mean, (values, _, _, option, _) in zip(means, moves, strict=True):
            np.maximum(values, mean[:, : self.size] + self.own[option], out=values)
        return best, errors, sure


def _folded(kernel: Kernel, size: int) -> tuple[int, np.ndarray]:
    """Returns probabilities within ``size`` cells of 0; others move to that end."""
    index = np.clip(kernel.index, -size, size)
    first = int(index[0])
    return first, np.bincount(index - first, kernel.masses)
