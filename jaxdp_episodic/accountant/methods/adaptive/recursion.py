"""The worst strategy, by a recursion over the loss so far.

With ``w(x, g)`` the largest divergence that a strategy in state x still reaches,

    w(x, g) = max((1 - g)_+, max over moves of E w(next, g e^-L)),

and ``v = w - (1 - g)_+`` (docs/proofs.md, "Runs that adapt"): from ``v = 0`` where
nothing can be taken, each move gives ``s(g) + E v(next, g e^-L)`` with ``s`` the
option's own divergence less ``(1 - g)_+``. Nothing cancels, v is large about g = 1 only
and falls to both sides, and left of 1 it is the other orientation's divergence times g.

On the points ``log g = j h`` an expectation over lattice losses is a convolution. The
values are multiplied by ``e^(tilt x)`` first, which commutes with the maximum and makes
those the largest that matter, as rounding is relative to the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.adaptive.graph import Graph
from jaxdp_episodic.accountant.methods.adaptive.kernel import Kernel

# Error of a transform for each level, in machine precisions: Higham (2002), Accuracy
# and Stability of Numerical Algorithms, Theorem 24.2, has 4.1; doubled.
_TRANSFORM_ERROR = 8.0
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


def own_profile(kernel: Kernel, window: Window, *, up: bool) -> np.ndarray:
    """(size,) ``E (1 - g e^-L)_+ - (1 - g)_+`` of an option.

    From above at least, and >= 0; from below at most; sums of terms of one sign, but
    for what the masses lack left of g = 1.
    """
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
    found = np.where(place >= 0, right, left)
    # From below it may be negative: with what it is added to it bounds a sum, and is
    # none of this option alone.
    return np.maximum(found, 0.0) if up else found


def solve(
    graph: Graph,
    kernels: Sequence[Kernel],
    window: Window,
    *,
    up: bool,
    beyond: Callable[[np.ndarray], np.ndarray] | None = None,
    payoff: Callable[[int], np.ndarray] | None = None,
    visit: Callable[[int, Row], bool] | None = None,
) -> Row:
    """The row of the state in which the run begins.

    Args:
      graph: its states.
      kernels: of the options, all from above or all from below.
      window: where the values are wanted.
      up: from above: beyond the window values count as those at its ends; from below
        they are 0 there.
      beyond: upper bounds of v of all states at points on the right of the window,
        where they are known to be less than at its end.
      payoff: of stopping in a state, more than ``(1 - g)_+``: (size,) not weighted.
      visit: called with each state and its row; ends the recursion where it is true.
    """
    plan = _Plan(kernels, window, beyond, up=up)
    last = graph.last_uses()
    rows: dict[int, Row] = {}
    spectra: dict[int, tuple[np.ndarray, float]] = {}
    ends: dict[int, list[int]] = {}
    for state, end in enumerate(last):
        ends.setdefault(end, []).append(state)
    row = plan.nothing()
    for state, moves in enumerate(graph.moves):
        row = plan.nothing() if payoff is None else plan.stopping(payoff(state))
        for option, to in moves:
            if to not in spectra:
                spectra[to] = plan.spectrum(rows[to])
            row = plan.better(row, option, rows[to], spectra[to])
        if visit is not None and visit(state, row):
            break
        rows[state] = row
        for done in ends.get(state, ()):
            if done != state:
                rows.pop(done, None)
                spectra.pop(done, None)
    return row


class _Plan:
    """Kernels and their transforms on a window."""

    def __init__(
        self,
        kernels: Sequence[Kernel],
        window: Window,
        beyond: Callable[[np.ndarray], np.ndarray] | None,
        *,
        up: bool,
    ) -> None:
        size, h = window.size, window.step
        self.weights = weights = window.weights
        self.own = [own_profile(k, window, up=up) * weights for k in kernels]
        # Losses beyond the window's size lead to its end all the same.
        folded = [_folded(k, size) for k in kernels]
        self.right = max(max(-first, 0) for first, _ in folded)
        self.left = max(max(first + len(m) - 1, 0) for first, m in folded)
        self.size = size
        self.length = _good_length(size + self.left + self.right)
        further = h * np.arange(1, self.right + 1)
        with np.errstate(over="ignore"):
            self.growth = np.exp(window.tilt * further)
            self.limit = np.full(self.right, np.inf)
            if beyond is not None:
                x = window.points[-1] + further
                # A bound that is too small for float64 is not 0.
                bound = np.maximum(beyond(x), 1e-300)
                self.limit = bound * np.exp(window.tilt * (x - window.center))
        self.decay = np.exp(-window.tilt * h * np.arange(self.left, 0, -1))
        self.up = up
        self.transforms: list[np.ndarray] = []
        self.norms: list[tuple[float, float]] = []
        for first, masses in folded:
            index = first + np.arange(len(masses))
            tilted = masses * np.exp(window.tilt * h * index)
            circle = np.zeros(self.length)
            circle[index % self.length] = tilted
            self.transforms.append(np.fft.rfft(circle))
            total = float(tilted.sum()) * (1 + 1e-12)
            self.norms.append((total, 2 * float(np.linalg.norm(tilted)) + total))
        levels = math.log2(self.length) + 2
        self.machine = _TRANSFORM_ERROR * levels * float(np.finfo(np.float64).eps)

    def nothing(self) -> Row:
        """Of a state in which nothing can be taken."""
        return Row(np.zeros(self.size), 0.0)

    def stopping(self, payoff: np.ndarray) -> Row:
        """Of a state in which stopping is worth more than nothing."""
        return Row(payoff * self.weights, 0.0)

    def spectrum(self, row: Row) -> tuple[np.ndarray, float]:
        """The transform of a row, and the norm of its values."""
        padded = np.zeros(self.length)
        padded[: self.size] = row.values
        if self.up:
            # Both sides of g = 1 v falls away from it: it is no more than at the ends,
            # where it is no more than these values and their error.
            first, last = (float(row.values[i]) + row.error for i in (0, -1))
            if last > 0:
                with np.errstate(over="ignore"):
                    right = np.minimum(last * self.growth, self.limit)
                padded[self.size : self.size + self.right] = right
            padded[self.length - self.left :] = first * self.decay
        # Of values near to the least of float64 the squares would be 0.
        peak = float(padded.max())
        norm = peak * float(np.linalg.norm(padded / peak)) if peak else 0.0
        return np.fft.rfft(padded), norm

    def better(
        self, row: Row, option: int, after: Row, spectrum: tuple[np.ndarray, float]
    ) -> Row:
        """The row where one more option may be taken."""
        transform, norm = spectrum
        total, size = self.norms[option]
        own = self.own[option]
        if norm == 0:
            return Row(np.maximum(row.values, own), row.error)
        mean = np.fft.irfft(transform * self.transforms[option], self.length)
        mean = mean[: self.size] + own
        # Of both transforms, and of the inverse of their product.
        error = total * after.error + self.machine * norm * size
        np.maximum(mean, row.values, out=mean)
        return Row(mean, max(error, row.error))


def _folded(kernel: Kernel, size: int) -> tuple[int, np.ndarray]:
    """Masses within ``size`` cells of 0; those beyond count at the last of these."""
    last = kernel.first + len(kernel.masses) - 1
    if kernel.first >= -size and last <= size:
        return kernel.first, kernel.masses
    first, end = (min(max(e, -size), size) for e in (kernel.first, last))
    index = np.clip(kernel.first + np.arange(len(kernel.masses)), first, end) - first
    return first, np.bincount(index, kernel.masses, minlength=end - first + 1)


def _good_length(least: int) -> int:
    """An even length from ``least`` on without prime factors above 5."""
    best = 2 ** math.ceil(math.log2(max(least, 16)))
    five = 1
    while five < best:
        three = five
        while three < best:
            length = three * 2 ** max(math.ceil(math.log2(least / three)), 1)
            if least <= length < best:
                best = length
            three *= 3
        five *= 5
    return best
