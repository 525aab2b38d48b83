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
# Cells of transforms that are made at once, which stay in a core's cache.
_MOST_CELLS = 2**17
# Norm below which squares may be 0 in float64: the largest value bounds it instead.
_LEAST_NORM = 1e-140
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
    """(size,) ``E (1 - g e^-L)_+ - (1 - g)_+`` of an option's masses.

    From above at least, from below at most that; sums of terms of one sign, but for
    what the masses lack left of g = 1.
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
    own = np.where(place >= 0, right, left)
    # From below it may be less than 0: v does not grow with the losses, as w does, so
    # that only with its mean over the same masses it is a bound.
    return np.maximum(own, 0.0) if up else own


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
    for group in graph.groups(plan.together):
        ways = [[(k, rows[to], spectra[to]) for k, to in graph.moves[s]] for s in group]
        starts = [
            plan.nothing() if payoff is None else plan.stopping(payoff(state))
            for state in group
        ]
        found = plan.better(starts, ways)
        for state, row in zip(group, found, strict=True):
            if visit is not None and visit(state, row):
                return row
        used = [s for s in group if last[s] != s]
        rows |= dict(zip(group, found, strict=True))
        spectra |= dict(zip(used, plan.spectra([rows[s] for s in used]), strict=True))
        for state in group:
            for done in ends.get(state, ()):
                rows.pop(done)
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
        self.own = np.array([own_profile(k, window, up=up) for k in kernels]) * weights
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
        # Used again for each state: fresh pages take as long as the transforms.
        self.together = max(len(kernels), _MOST_CELLS // self.length)
        self.products = np.empty((self.together, self.length // 2 + 1), np.complex128)
        self.means = np.empty((self.together, self.length))
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

    def spectra(self, rows: Sequence[Row]) -> list[tuple[np.ndarray, float]]:
        """The transforms of rows, and the norms of their values."""
        padded = self.means[: len(rows)]
        padded[:, self.size :] = 0.0
        for line, row in zip(padded, rows, strict=True):
            line[: self.size] = row.values
        if self.up:
            # Both sides of g = 1 v falls away from it: it is no more than at the ends,
            # where it is no more than these values and their error.
            error = np.array([row.error for row in rows])
            first, last = (padded[:, i] + error for i in (0, self.size - 1))
            right = padded[:, self.size : self.size + self.right]
            with np.errstate(over="ignore", invalid="ignore"):
                np.multiply(last[:, None], self.growth, out=right)
            right[last == 0] = 0.0  # also times what is too large for float64
            np.minimum(right, self.limit, out=right)
            np.multiply(
                first[:, None], self.decay, out=padded[:, self.length - self.left :]
            )
        norms = np.sqrt(np.einsum("ij,ij->i", padded, padded))
        small = norms < _LEAST_NORM
        largest = np.abs(padded[small]).max(axis=1, initial=0.0)
        norms[small] = math.sqrt(self.length) * largest
        norms = norms.tolist()
        return list(zip(np.fft.rfft(padded), norms, strict=True))

    def better(
        self,
        rows: Sequence[Row],
        ways: Sequence[Sequence[tuple[int, Row, tuple[np.ndarray, float]]]],
    ) -> list[Row]:
        """The rows where options, each with the row after it, may be taken as well."""
        errors, places = [row.error for row in rows], []
        best = np.stack([row.values for row in rows])
        # All transforms of all states at once.
        for state, moves in enumerate(ways):
            for option, after, (transform, norm) in moves:
                if norm == 0:
                    np.maximum(best[state], self.own[option], out=best[state])
                    continue
                total, size = self.norms[option]
                # Of both transforms, and of the inverse of their product.
                error = total * after.error + self.machine * norm * size
                errors[state] = max(errors[state], error)
                product = self.products[len(places)]
                np.multiply(transform, self.transforms[option], out=product)
                places.append((state, option))
        if places:
            means = self.means[: len(places)]
            np.fft.irfft(self.products[: len(places)], self.length, out=means)
            for (state, option), mean in zip(
                places, means[:, : self.size], strict=True
            ):
                mean += self.own[option]
                np.maximum(best[state], mean, out=best[state])
        return [Row(v, e) for v, e in zip(best, errors, strict=True)]


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
