"""The worst strategy, by a recursion over the loss so far on a lattice of log g."""
# Reference: docs/proofs.md, "Runs that adapt".

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


# Cells of transforms that are made at once, which stay in a core's cache.
_MOST_CELLS = 2**17
# Norm below which squares may be 0 in float64: the largest value bounds it instead.
_LEAST_NORM = 1e-140
# Odd factors of the length of a transform.
_LENGTHS = (1, 3, 5, 9, 15, 25)
# Rounding of sums of masses, one after the other: for each of them.
_SUM_ROUNDING = 4.5e-16


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
        """(size,) what values are multiplied by."""
        return np.exp(self.tilt * (self.points - self.center))


class Row(NamedTuple):
    """Values of one state on the window, weighted, and a bound of their errors."""

    values: np.ndarray
    error: float


class Pass(NamedTuple):
    """One side, from above or from below, in one orientation."""

    kernels: Sequence[Kernel]  # of the options, all from above or all from below
    window: Window  # where the values are wanted
    up: bool  # from above: values beyond the window as at its ends; else lost
    beyond: Callable[[np.ndarray], np.ndarray]  # upper bounds of v right of the window
    payoff: Callable[[int], np.ndarray] | None = None  # of stopping, above (1 - g)_+


def own_profile(kernel: Kernel, window: Window, *, up: bool) -> np.ndarray:
    """(size,) ``E (1 - g e^-L)_+ - (1 - g)_+`` of an option's masses."""
    h, last = window.step, kernel.first + len(kernel.masses) - 1
    low, high = min(kernel.first, 0), max(last, 0)
    p = np.zeros(high - low + 1)
    p[kernel.first - low : last - low + 1] = kernel.masses
    x = h * np.arange(low, high + 1)
    lost = -math.expm1(-h)
    # Of losses above j: h_j = sum over i > j of (1 - e^-h) G_i, where G_i is the sum of
    # p e^-(l - x_i) over the losses from x_i on; below 0 the same with P and Q
    # exchanged.
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
    # From below it may be less than 0: v does not grow with the losses, as w does, so
    # that only with its mean over the same masses it is a bound.
    return np.maximum(own, 0.0) if up else own


def solve(
    graph: Graph,
    passes: Sequence[Pass],
    visit: Callable[[int, list[Row]], bool] | None = None,
) -> list[Row]:
    """For each pass the row of the state in which the run begins."""
    with np.errstate(over="ignore"):
        plan = _Plan(passes)
        ends: dict[int, list[int]] = {}
        for state, end in enumerate(graph.last_uses()):
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
    """Of a state's rows, one of each of P passes."""

    transforms: np.ndarray  # (P, length / 2 + 1)
    norms: list[float]  # of the values
    errors: list[float]
    sure: np.ndarray  # P- and Q-mass that some strategy loses at once, (P, 2)


class _Plan:
    """Kernels and their transforms on the windows of P passes."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.passes = passes
        self.size = size = passes[0].window.size
        self.weights = np.stack([each.window.weights for each in passes])
        # Losses beyond the window's size lead to its end all the same.
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
        # Of a tilted window nothing is lost at once.
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
        # Used again for each state: fresh pages take as long as the transforms.
        cells = len(passes) * self.length
        self.together = max(len(self.own), _MOST_CELLS // cells)
        shape = (self.together, len(passes))
        self.products = np.empty((*shape, self.length // 2 + 1), np.complex128)
        self.means = np.empty((*shape, self.length))

    def _options(self, one: Pass, folded: Sequence[tuple[int, np.ndarray]]) -> Any:
        """Of a pass and K options: profiles (K, size), transforms, and norms (K, 2)."""
        window = one.window
        own = [own_profile(k, window, up=one.up) for k in one.kernels] * window.weights
        circles, norms = np.zeros((len(folded), self.length)), []
        for circle, (first, masses) in zip(circles, folded, strict=True):
            index = first + np.arange(len(masses))
            tilted = masses * np.exp(window.tilt * window.step * index)
            circle[index % self.length] = tilted
            total = float(tilted.sum()) * (1 + 1e-12)
            # Of both transforms, and of the inverse of their product.
            size = 2 * float(np.linalg.norm(tilted)) + total
            norms.append((total, self.machine * size))
        return own, np.fft.rfft(circles), np.array(norms)

    def _beyond(self, one: Pass) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What ends of a window grow to on its right, at most; decay to on its left."""
        window, right = one.window, np.arange(1, self.right + 1)
        exponent = window.tilt * window.step
        x = window.points[-1] + window.step * right
        # A bound that is too small for float64 is not 0.
        limit = np.maximum(one.beyond(x), 1e-300)
        limit = limit * np.exp(window.tilt * (x - window.center))
        decay = np.exp(-exponent * np.arange(self.left, 0, -1))
        return one.up * np.exp(exponent * right), limit, one.up * decay

    def stopping(self, group: range) -> np.ndarray:
        """(m, P, size) values of states, weighted, where they are the last."""
        found = np.zeros((len(group), *self.weights.shape))
        for i, one in enumerate(self.passes):
            if one.payoff is not None:
                for j, state in enumerate(group):
                    found[j, i] = one.payoff(state) * self.weights[i]
        return found

    def spectra(
        self,
        values: np.ndarray,
        errors: Sequence[list[float]],
        sure: np.ndarray,
    ) -> list[_Spectrum]:
        """Of the rows of m states, (m, P, size), bounds of their errors, and more."""
        end = self.size + self.right
        padded = self.means[: len(values)]
        padded[..., : self.size] = values
        padded[..., end : self.length - self.left] = 0.0
        # From above, v falls away from g = 1 on both sides of it: it is no more than
        # at the ends, where it is no more than these values and their error.
        off = np.array(errors)[..., None]
        last = np.maximum(values[..., -1:] + off, 1e-300)
        right = padded[..., self.size : end]
        np.minimum(np.multiply(last, self.growth, out=right), self.limit, out=right)
        left = padded[..., self.length - self.left :]
        np.multiply(values[..., :1] + off, self.decay, out=left)
        for i, one in enumerate(self.passes):
            if not one.up:
                # What is lost at once is lost at every g: by v of Q as much as g.
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
        """The rows where options, each with the rows after it, may be taken as well."""
        # Of each state its own: what grows with the steps must not with the states.
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
    """Masses within ``size`` cells of 0; those beyond count at the last of these."""
    index = np.clip(kernel.index, -size, size)
    first = int(index[0])
    return first, np.bincount(index - first, kernel.masses)
