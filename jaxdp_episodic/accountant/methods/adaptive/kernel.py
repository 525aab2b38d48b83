"""One option's privacy loss on a lattice, bounded from above or from below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.losses.privacy_loss import FiniteValues, Profile
from jaxdp_episodic.accountant.methods.adaptive.problem import Option
from jaxdp_episodic.accountant.methods.certified import lattice
from jaxdp_episodic.accountant.methods.certified.plan import graded_grid, with_splits
from jaxdp_episodic.accountant.numerics.lattice_sums import (
    LatticeSum,
    Summand,
    cells_of_sum,
    log_sum,
    tilted,
)

# Log of the probability outside of a window, relative to the wanted divergence.
_LOG_NEGLIGIBLE = -45.0
# Losses, in nats, at which a step's largest relevant loss is searched for.
_REACHES = np.geomspace(1e-9, 1e4, 400)
# Exponents of Chernoff's bound, on either side of the tilt.
_EXPONENTS = np.geomspace(0.01, 300.0, 24)
# Largest number of cells of the lattice on which steps are composed.
_MOST_CELLS = 2**21
# Relative rounding of the probabilities of a kernel, and of their total.
_SUM_ERROR = 1e-14
# Rounding of an exponential, for each unit of 1 plus its exponent.
_ROUNDING = 2.3e-16
# Rounding of products of probabilities and of sums of a few of them.
_FEW = 1e-13


class Spacing(NamedTuple):
    """A lattice of losses, the window of interest, and the side that is bounded."""

    step: float  # h, nats; has few bits, so that ``j h`` is exact
    reach: int  # in cells; larger losses are infinite, smaller ones are moved here
    log_size: float  # logarithm of the wanted divergences, <= 0
    log_left_out: float  # log of the share that a move may lose by truncation
    backward: bool  # whether P and Q are exchanged
    tilt: float  # of the window
    up: bool  # from above, not from below
    parts: int = 1  # cells in a cell of the coarser lattice

    @property
    def log_cut(self) -> float:
        """Logarithm of the probability that may be truncated."""
        negligible = _LOG_NEGLIGIBLE if self.parts > 1 else self.log_left_out
        return min(self.log_size, 0.0) + negligible


class Kernel(NamedTuple):
    """Probabilities of an option's losses on the lattice, in one orientation."""

    first: int  # lattice number of the first probability
    masses: np.ndarray  # (m,) P-probabilities of finite losses
    infinite: float  # P-probability of an infinite loss

    @property
    def index(self) -> np.ndarray:
        """(m,) lattice numbers."""
        return self.first + np.arange(len(self.masses))


def kernel_of(option: Option, spacing: Spacing) -> Kernel:
    """Returns the kernel of an option."""
    losses, counts = option.losses, option.counts
    number = sum(counts)
    if number == 0:
        whole = Kernel(0, np.ones(1), 0.0)
    elif number == 1:
        whole = _of_one(losses[0], spacing)
    else:
        whole = _of_several(losses, counts, spacing)
    outward = 1 if spacing.up else -1
    sure = math.exp(option.log_kept) * (1 + outward * _SUM_ERROR)
    lost = -math.expm1(option.log_kept) * (1 + outward * _FEW)
    infinite = min(lost + sure * whole.infinite, 1.0)
    return Kernel(whole.first, sure * whole.masses, infinite)


def _of_several(
    losses: Sequence[Profile], counts: Sequence[float], spacing: Spacing
) -> Kernel:
    """Returns the kernel of a sum of steps, composed on a finer lattice."""
    # The error of each step is of second order: n steps at h / (4 sqrt n) have a
    # sixteenth of the error of one step at h.
    halvings = math.ceil(math.log2(4 * math.sqrt(sum(counts))))
    while True:
        parts = 2**halvings
        fine = spacing._replace(
            step=spacing.step / parts, reach=spacing.reach * parts, parts=parts
        )
        steps = [_of_one(loss, fine) for loss in losses]
        pairs = list(zip(steps, counts, strict=True))
        summands = [
            Summand(one.index, fine.step * one.index, one.masses, n) for one, n in pairs
        ]
        # Rounding is relative to the largest probability, which the tilt moves.
        tilts = [tilted(summands, t) for t in sorted({0.0, fine.tilt})]
        first, size, lost = _window(tilts, fine)
        if size <= _MOST_CELLS or halvings == 0:
            break
        halvings = max(halvings - math.ceil(math.log2(size / _MOST_CELLS)), 0)
    known, up = [], spacing.up
    for whole, some, _ in tilts:
        cells, rounding, _ = cells_of_sum(some, first, size)
        cells = np.maximum(cells, 0.0)
        points = fine.step * (first + np.arange(size))
        exponent = whole.log_moment - whole.tilt * points
        rounded = _ROUNDING * (8 + np.abs(exponent) + abs(whole.log_moment))
        error = rounding + (whole.relative + rounded) * cells
        # Aliasing adds to the cells.
        cells = cells + error if up else np.maximum(cells - error - 2 * lost, 0.0)
        with np.errstate(over="ignore"):
            known.append(cells * np.exp(exponent))
    masses = (np.minimum if up else np.maximum).reduce(known)
    if max(one.infinite for one in steps) > 0.5:
        at_once = 1.0
    else:
        at_once = -math.expm1(sum(n * math.log1p(-one.infinite) for one, n in pairs))
    at_once = min(at_once * (1 + _FEW) + lost, 1.0) if up else at_once * (1 - _FEW)
    whole = Kernel(first, masses, at_once)
    return whole if parts == 1 else _coarser(whole, spacing, parts)


def _window(
    tilts: Sequence[tuple[LatticeSum, list[Summand], list[np.ndarray]]], fine: Spacing
) -> tuple[int, int, float]:
    """Returns first cell and number of cells of a sum, and the probability outside."""
    # Chernoff's bound of the sum, and of the tilted sum, which is aliased.
    parts = tilts[0][1]
    log_cut = fine.log_cut - math.log(max(sum(one.count for one in parts), 1.0))
    exponents = np.concatenate([-_EXPONENTS, _EXPONENTS])
    high = low = 0.0
    for _, some, logs in tilts:
        moments = np.zeros(len(exponents))
        for one, log_mass in zip(some, logs, strict=True):
            # Row by row, since the whole table would be large.
            every = [log_sum(log_mass + c * one.values) for c in exponents]
            moments += one.count * np.array(every)
        downward, upward = np.split((moments - log_cut) / exponents, 2)
        low, high = min(low, float(downward.max())), max(high, float(upward.min()))
    # A loss of the sum is between the sums of the furthest losses.
    least, most = (sum(n * int(i[at]) for i, *_, n in parts) for at in (0, -1))
    first = int(max(math.floor(low / fine.step), least))
    last = int(min(math.ceil(high / fine.step), most))
    size = 2 ** math.ceil(math.log2(max(last - first + 1, 16)))
    is_whole = first == least and last == most
    return first, size, 0.0 if is_whole else 2 * math.exp(log_cut)


def _of_one(loss: Profile, spacing: Spacing) -> Kernel:
    """Returns the kernel of one step."""
    low, high = _reach(loss, spacing)
    # Of a fine lattice not all points are used, but where losses are small.
    span, widest = (-spacing.step * low, spacing.step * high), spacing.parts
    grid = graded_grid([0.0], spacing.step, widest * spacing.step, span)
    index = grid.astype(int)
    points = with_splits(spacing.step * index)
    bins = lattice.bins_of_step(points, loss, backward=spacing.backward)
    found, infinite = _bounded(points, bins, spacing)
    return Kernel(int(index[0]), np.bincount(index - index[0], found), infinite)


def _bounded(
    points: np.ndarray, bins: lattice.BinMasses, spacing: Spacing
) -> tuple[np.ndarray, float]:
    """Returns probabilities of lattice points that bound bins, and of infinity."""
    if spacing.up:
        return lattice.upper_masses(points, bins)
    return lattice.lower_masses(points, bins), 0.0


def _reach(loss: Profile, spacing: Spacing) -> tuple[int, int]:
    """Returns the cells to the furthest losses below and above 0."""
    if isinstance(loss, FiniteValues):
        values = loss.values()[0]
        ends = [max(-float(values.min()), 0.0), max(float(values.max()), 0.0)]
        ends = ends[::-1] if spacing.backward else ends
    else:
        own, other = _log_tails(_REACHES, loss)[:: -1 if spacing.backward else 1]
        # P's probability of losses below -u is e^-u times the other direction's tail.
        # It is placed at the end; tilted, that is hardly sooner.
        masses = other[1] - (1 + spacing.tilt) * _REACHES, np.logaddexp(*own)
        small = (np.append((mass < spacing.log_cut)[:-1], True) for mass in masses)
        ends = [float(_REACHES[np.argmax(each)]) for each in small]
    cells = (math.ceil(min(e / spacing.step, 1e9)) + 1 for e in ends)
    down, up = (min(c, spacing.reach) for c in cells)
    return down, up


_log_tails = float64_boundary(lambda u, loss: loss.log_tails(u))


def _coarser(fine: Kernel, spacing: Spacing, parts: int) -> Kernel:
    """Moves the probabilities to a coarser lattice."""
    # Each is split to the points around it, with P- and Q-probability kept; from below
    # they are lowered until chords between points of the coarser lattice lie below.
    first = fine.first // parts
    last = -(-(fine.first + len(fine.masses)) // parts)
    points = 0.5 * spacing.step * np.arange(2 * first, 2 * last + 1)
    losses = spacing.step / parts * fine.index
    bins = lattice.bins_of_masses(points, losses, fine.masses, 4e-15 * fine.masses)
    masses, above = _bounded(points, bins, spacing)
    return Kernel(first, masses, fine.infinite + above)
