"""The privacy loss of one step on a lattice: an upper and a lower distribution.

References: Doroshenko et al. (2022), arXiv:2207.04380; docs/theory.md, "Certified".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant._engine import Chunks, float64_boundary, in_chunks
from jaxdp_episodic.accountant.losses.privacy_loss import (
    BoundingPair,
    FiniteValues,
    Profile,
)
from jaxdp_episodic.accountant.numerics.loops import Array

# Losses at which a profile is evaluated in one call of its kernel.
_CHUNKS = Chunks(8192, (256, 4096), (4096, 65536))
# Terms of sums, over all points of a call, whose arrays fit a CPU's cache: with 870
# terms a point, 0.4 of the time of 8,192 points a call.
_TERMS_AT_ONCE = 2**16
# Relative rounding error of a probability: nine operations of 2^-52 each.
_ARITHMETIC_ERROR = 2e-15
# Rounding of the point where a loss is reached: four operations of 2^-51, relative.
_LOSS_ROUNDING = 2e-15
# Loss in nats up to which `Profile.profile_error` covers that rounding.
_LARGE_LOSS = 128.0
_SPLIT_ERROR = 4e-15  # relative rounding error of the split of an atom
# Logarithms of a profile, and of its tail G, below which they are treated as 0, since
# `bin_masses` computes differences and quotients of them.
_LEAST_LOG_PROFILE = -700.0
_LEAST_LOG_SCALED = -740.0


class Tails(NamedTuple):
    """The profile and the tail of one direction at points ``|e|``: (m,) arrays."""

    profile: np.ndarray  # h
    scaled: np.ndarray  # ``G = -dh/du``, that is g times the Q-mass beyond u
    profile_error: np.ndarray  # absolute
    scaled_error: np.ndarray  # absolute


class BinMasses(NamedTuple):
    """P-probabilities of bins between m points, split to their ends: (m - 1,)."""

    # A loss at a point belongs to the lower end of the bin above.

    bottom: np.ndarray  # at the lower end of each bin
    top: np.ndarray  # at its upper end
    top_error: np.ndarray  # bound of the error of ``top``
    mass_error: np.ndarray  # bound of the error of ``bottom + top``
    above: float  # P-probability at and above the last point
    above_error: float  # bound of its error
    below: float  # upper bound of the P-probability below the first point


def evaluate_tails(
    loss: Profile, points: np.ndarray, *, backward: bool = False
) -> tuple[Tails, Tails]:
    """Returns one direction's and the other's tails at ``|points|``, (m,)."""
    flat = np.abs(points)
    least = _least_loss(loss)
    displaced = np.where(flat < least, 2 * least, 0.0) + loss.tail_displacement(flat)
    displaced = displaced + loss_rounding(flat)
    every = loss.map(lambda field: np.full(flat.shape, field))
    chunk = min(_CHUNKS.numpy, max(_TERMS_AT_ONCE // loss.terms_of_profile, 16))
    h, scaled, other, other_scaled = in_chunks(
        _log_tails, (np.maximum(flat, least), every), _CHUNKS._replace(numpy=chunk)
    )
    errors = displaced, loss.profile_error(), loss.mass_error()
    forward = _tails(h, scaled, *errors)
    reverse = _tails(other, other_scaled, *errors)
    return (reverse, forward) if backward else (forward, reverse)


def displacement(loss: Profile) -> float:
    """Bounds how far computed losses are from the true ones, in nats."""
    furthest = loss.tail_displacement(np.float64(np.inf))
    return float(2 * _least_loss(loss) + furthest)


def _least_loss(loss: Profile) -> np.ndarray:
    """Returns the absolute loss below which losses are treated as 0."""
    hints = loss.hints()
    return 1e-14 * np.maximum(hints.rate * np.minimum(hints.shift, 1.0), 1e-290)


def loss_rounding(u: np.ndarray | float) -> np.ndarray:
    """Bounds how far large losses are displaced by rounding alone, in nats."""
    return np.where(np.abs(u) > _LARGE_LOSS, _LOSS_ROUNDING * np.abs(u), 0.0)


def _tails(
    log_h: np.ndarray,
    log_scaled: np.ndarray,
    displaced: np.ndarray,
    relative: np.ndarray,
    of_mass: np.ndarray,
) -> Tails:
    # NaN stays NaN: the probabilities are then NaN too, and rejected.
    no_h = log_h <= _LEAST_LOG_PROFILE
    no_scaled = no_h | (log_scaled <= _LEAST_LOG_SCALED)
    log_h = np.where(no_h, 0.0, log_h)
    log_scaled = np.where(no_scaled, 0.0, log_scaled)
    profile = np.where(no_h, 0.0, np.exp(log_h))
    scaled = np.where(no_scaled, 0.0, np.exp(log_scaled))
    error = relative * (1 + np.abs(log_h) + np.abs(log_scaled)) + of_mass
    change = displacement_error(displaced)
    return Tails(
        profile, scaled, error * profile + change * scaled, (error + change) * scaled
    )


def displacement_error(displaced: np.ndarray) -> np.ndarray:
    """Bounds the relative change of G if losses are displaced by these nats."""
    return 2 * np.expm1(np.minimum(displaced, 700.0))


def _tails_kernel(u: Array, loss: Profile) -> tuple[Array, Array, Array, Array]:
    forward, backward = loss.log_tails(u)
    return *forward, *backward


_log_tails = float64_boundary(_tails_kernel)


def bin_masses(points: np.ndarray, own: Tails, other: Tails) -> BinMasses:
    """Returns the probabilities of the bins, from the tails of both directions."""
    # A bin from a to b >= 0 has the P-probability h(a) + G(a) - h(b) - G(b), and top =
    # (h(a) - h(b)) / (1 - e^{a-b}) - G(b) keeps its Q-probability. Below 0 the other
    # direction, with profile k and tail f, gives mass = e^b f(b) - e^a f(a) and top =
    # e^b (f(b) - (k(b) - k(a)) / (e^{b-a} - 1)).
    a, b = points[:-1], points[1:]
    width = b - a
    # bins of a coarse loss may be wide enough for an overflow
    shrink, grow = -np.expm1(-width), np.expm1(np.minimum(width, 700.0))
    h, g, h_error, g_error = own
    top = (h[:-1] - h[1:]) / shrink - g[1:]
    mass = (h[:-1] - h[1:]) + (g[:-1] - g[1:])
    top_error = (h_error[:-1] + h_error[1:]) / shrink + g_error[1:]
    top_size = (h[:-1] + h[1:]) / shrink + g[1:]
    mass_error = h_error[:-1] + h_error[1:] + g_error[:-1] + g_error[1:]
    mass_size = h[:-1] + g[:-1]  # P-probability above the lower end
    k, f, k_error, f_error = other
    # these weights are used below 0 only
    weight_a, weight_b = np.exp(np.minimum(a, 0)), np.exp(np.minimum(b, 0))
    below = b <= 0
    top = np.where(below, weight_b * (f[1:] - (k[1:] - k[:-1]) / grow), top)
    mass = np.where(below, weight_b * f[1:] - weight_a * f[:-1], mass)
    error = weight_b * ((k_error[1:] + k_error[:-1]) / grow + f_error[1:])
    top_error = np.where(below, error, top_error)
    size = weight_b * ((k[1:] + k[:-1]) / grow + f[1:])
    top_size = np.where(below, size, top_size)
    error = weight_b * f_error[1:] + weight_a * f_error[:-1]
    mass_error = np.where(below, error, mass_error)
    mass_size = np.where(below, weight_b * f[1:], mass_size)
    zero = int(np.searchsorted(points, 0.0))
    if 0 < zero < len(points) and points[zero] > 0:
        # The bin with 0 inside: its lower end from below, its upper end from above.
        i = zero - 1
        high = -np.expm1(a[i]) + weight_a[i] * k[i]
        error = weight_a[i] * k_error[i] + h_error[zero]
        top[i] = (high - h[zero]) / shrink[i] - g[zero]
        mass[i] = 1 - (h[zero] + g[zero]) - weight_a[i] * f[i]
        top_error[i] = error / shrink[i] + g_error[zero]
        top_size[i] = (high + h[zero]) / shrink[i] + g[zero]
        mass_error[i] = h_error[zero] + g_error[zero] + weight_a[i] * f_error[i]
        mass_size[i] = 1.0
    elif zero < len(mass) and points[zero] == 0:
        mass[zero] += max(1 - h[zero] - g[zero] - f[zero], 0.0)
        mass_error[zero] += h_error[zero] + g_error[zero] + f_error[zero]
        mass_error[zero] += _ARITHMETIC_ERROR
    top = np.maximum(top, 0.0)
    mass_error = mass_error + 2 * _ARITHMETIC_ERROR * mass_size
    # Outside of the points: the tails, or 1 minus the opposite direction's.
    above, above_error = float(h[-1] + g[-1]), float(h_error[-1] + g_error[-1])
    if points[-1] <= 0:
        above = 1 - float(weight_b[-1] * f[-1])
        above_error = float(weight_b[-1] * f_error[-1])
    if points[0] <= 0:
        under = float(weight_a[0] * (f[0] + f_error[0]))
    else:
        under = 1 - float(h[0] + g[0]) + float(h_error[0] + g_error[0])
        under += _ARITHMETIC_ERROR
    return BinMasses(
        bottom=np.maximum(mass - top, 0.0),
        top=top,
        top_error=top_error + _ARITHMETIC_ERROR * top_size,
        # bottom + top exceeds the bin's probability if the top alone does
        mass_error=mass_error + np.maximum(top - mass, 0.0),
        above=above,
        above_error=above_error + _ARITHMETIC_ERROR * max(above, points[-1] <= 0),
        below=under,
    )


def merged_losses(points: np.ndarray, bins: BinMasses) -> tuple[np.ndarray, np.ndarray]:
    """Returns the P-probability of every bin, and ``log(P / Q)`` of the bin."""
    mass = bins.bottom + bins.top
    share = bins.top / np.where(mass > 0, mass, 1.0)
    change = np.maximum(share * np.expm1(points[:-1] - points[1:]), -1 + 1e-15)
    return mass, np.minimum(points[:-1] - np.log1p(change), points[1:])


def upper_masses(points: np.ndarray, bins: BinMasses) -> tuple[np.ndarray, float]:
    """Returns the upper distribution on ``points[::2]``, and at an infinite loss."""
    # An error of the upper end's part lifts losses and adds no probability.
    whole = bins.bottom + bins.top + bins.mass_error
    top = np.minimum(bins.top + bins.top_error, whole)
    masses = np.append(whole - top, 0.0) + np.append(0.0, top)
    masses[0] += bins.below * (1 + 1e-12)
    # The probabilities of the other points are split to both sides.
    grid = points[::2]
    share = np.expm1(grid[:-1] - points[1::2]) / np.expm1(grid[:-1] - grid[1:])
    joined = masses[::2].copy()
    joined[:-1] += (1 - share) * masses[1::2] * (1 + 4e-15)
    joined[1:] += share * masses[1::2] * (1 + 4e-15)
    # Adds everything that underflows above the last point.
    return joined, bins.above + bins.above_error + 1e-300


# --- Steps with finitely many losses ---

Finite = FiniteValues | BoundingPair


def atoms_of(loss: Finite, *, backward: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns (J,) losses of one direction, and their log-probabilities."""
    losses, log_masses = loss.values()
    return (-losses, log_masses - losses) if backward else (losses, log_masses)


def bins_of_step(
    points: np.ndarray, loss: Profile, *, backward: bool, slack: float = 0.0
) -> BinMasses:
    """Returns the bins of one direction of a step; ``slack``: see `bins_of_values`."""
    if isinstance(loss, Finite):
        return bins_of_values(points, loss, backward=backward, slack=slack)
    return bin_masses(points, *evaluate_tails(loss, points, backward=backward))


def bins_of_values(
    points: np.ndarray, loss: Finite, *, backward: bool, slack: float = 0.0
) -> BinMasses:
    """Computes `bin_masses` for one direction of a step with finitely many losses."""
    # An atom's probability is known to 1e-15 of itself, a difference of tails to 1e-15
    # of 1. Losses within ``slack`` of a point count as that point; below it they would
    # cost the lower distribution a whole bin.
    losses, log_masses = atoms_of(loss, backward=backward)
    place = np.minimum(np.searchsorted(points, losses - slack), len(points) - 1)
    losses = np.where(np.abs(points[place] - losses) <= slack, points[place], losses)
    mass = np.exp(log_masses)
    error = float(loss.profile_error()) * (1 + np.abs(log_masses) + np.abs(losses))
    error += _SPLIT_ERROR + float(loss.mass_error())
    return bins_of_masses(points, losses, mass, error * mass)


def bins_of_masses(
    points: np.ndarray, losses: np.ndarray, mass: np.ndarray, error: np.ndarray
) -> BinMasses:
    """Computes `bin_masses` for (J,) losses with probabilities and error bounds."""
    cell = np.searchsorted(points, losses, side="right") - 1
    under, over = cell < 0, cell >= len(points) - 1
    inside = ~under & ~over
    cell, atoms = cell[inside], losses[inside]
    start = points[cell]
    share = np.expm1(start - atoms) / np.expm1(start - points[cell + 1])
    under_mass = float((mass + error)[under].sum())

    def summed(weights: np.ndarray) -> np.ndarray:
        return np.bincount(cell, weights, minlength=len(points) - 1)

    above, above_error = float(mass[over].sum()), float(error[over].sum())
    mass, error = mass[inside], error[inside]
    return BinMasses(
        bottom=summed((1 - share) * mass),
        top=summed(share * mass),
        top_error=summed(share * error),
        mass_error=summed(error),
        above=above,
        above_error=above_error,
        below=under_mass,
    )


# --- The lower distribution: docs/proofs.md, "The two ends of an interval" ---

# Widest bin, in nats, that is shared out to both ends; exponentials overflow beyond.
_MOST_NATS = 690.0
# Largest size of a loss, in nats, at which the room for gaps is computed.
_MOST_EXPONENT = 300.0
# Share of the room for gaps that is used, if smaller ones elsewhere do.
_ROOM = 0.5
# Factor of what one cell needs at a point, up to which the other cell uses the room: a
# lattice's center is slightly beside its peak.
_MORE = 1.01
# Share of a bin's probability that makes up for its rounding errors.
_ENOUGH = 1e-9
# Relative rounding error of a gap and of a probability that follows from gaps.
_GAP_ERROR = 1e-14
# The same of a probability for each point that was left out.
_MOVE_ERROR = 1e-15


def lower_masses(points: np.ndarray, bins: BinMasses) -> np.ndarray:
    """Returns the lower distribution on ``points[::2]``."""
    mass = np.maximum(bins.bottom + bins.top - bins.mass_error, 0.0)
    whole = mass[::2] + mass[1::2]
    used = np.flatnonzero(whole)
    # The last bin that is used goes to its lower end; so that it makes up for rounding,
    # all bins from one on that has enough, if need be; then all bins.
    enough = np.cumsum(whole[used][::-1])[::-1][1:] > _ENOUGH * whole[used][:-1]
    lasts = [*used[-1:], *used[1:][enough][-1:], 0]
    found = (_shared_out(points, bins, mass, int(last)) for last in lasts)
    return next(one for one in found if one is not None)


def _shared_out(
    points: np.ndarray, bins: BinMasses, mass: np.ndarray, last: int
) -> np.ndarray | None:
    """Returns the lower distribution if bins from the last one on are not shared."""
    # Its profile lies below the true one by a gap at each grid point: so large that the
    # chord over each bin of the grid is below a line that is below the true profile.
    grid = points[::2]
    width = np.diff(grid)
    top = np.minimum(np.maximum(bins.top - bins.top_error, 0.0), mass)
    bottom, most = mass - top, bins.bottom + bins.top + bins.mass_error
    shared = (np.arange(len(width)) < last) & (width < _MOST_NATS)
    width = np.where(shared, width, _MOST_NATS)
    first = np.where(shared, points[1::2] - grid[:-1], 0.0)
    second = np.where(shared, grid[1:] - points[1::2], 0.0)
    share, middle = np.expm1(-first) / np.expm1(-width), top[::2] + bottom[1::2]
    raised = np.where(shared, share * middle + top[1::2], 0.0)
    rest = np.where(shared, (1 - share) * middle, middle + top[1::2])
    masses = np.append(bottom[::2] + rest, 0.0) + np.append(0.0, raised)
    # E[1 - e^{u - L}] of the losses L from u, the bin's lower end, to the point in
    # between, and to v, its upper end; E[e^{v - L} - 1] to v likewise.
    high = np.minimum(bins.top + bins.top_error, most)
    low = most - np.minimum(top, most)
    near, whole = -np.expm1(-first), np.where(shared, -np.expm1(-width), 0.0)
    gain = high[::2] * near
    whole_gain = gain + (most - high)[1::2] * near + high[1::2] * whole
    near, whole = np.expm1(second), np.where(shared, np.expm1(width), 0.0)
    loss = low[1::2] * near
    whole_loss = loss + (most - low)[::2] * near + low[::2] * whole
    # What the first bin that is not shared loses is a gap at its lower end already.
    near, whole = -np.expm1(grid[last] - points[2 * last + 1 : 2 * last + 3])
    lost = (middle[last] * near + top[2 * last + 1] * whole) * (1 - 2 * _GAP_ERROR)
    for part in (loss, whole_loss):
        part[last - 1 : last] = np.maximum(part[last - 1 : last] - lost, 0.0)
    gaps = _gaps(grid, masses, (gain, whole_gain), (loss, whole_loss))
    return _lowered(grid, masses, gaps * (1 + _GAP_ERROR))


def _gaps(
    grid: np.ndarray,
    masses: np.ndarray,
    gains: tuple[np.ndarray, np.ndarray],
    losses: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """Returns sufficient gaps at the grid points."""
    # A line that touches the profile at the point in between needs gain and loss; one
    # that touches it at u needs 0 and the whole loss. As no gap may exceed the room
    # above 0 and 1 - g, the others are better beside steep ends of the density.
    ratio = np.exp(np.clip(grid, -_MOST_EXPONENT, _MOST_EXPONENT))
    step, density = np.diff(ratio), masses / ratio
    below = np.append(0.0, np.cumsum(np.cumsum(density[:-1]) * step))
    above = np.cumsum(np.cumsum(density[:0:-1]) * step[::-1])[::-1]
    above = np.append(above, 0.0)
    gain, loss = np.append(gains[0], 0.0), np.append(0.0, losses[0])
    gaps = np.maximum(
        np.minimum(gain, np.maximum(_ROOM * below, np.minimum(_MORE * loss, below))),
        np.minimum(loss, np.maximum(_ROOM * above, np.minimum(_MORE * gain, above))),
    )
    for one, other, part, rest in (
        (gaps[:-1], gaps[1:], gains, losses),
        (gaps[1:], gaps[:-1], losses, gains),
    ):
        lack = 1 - one / np.maximum(np.maximum(part[0], one), 1e-300)
        more = rest[0] + lack * (rest[1] - rest[0])
        other[:] = np.where(one < part[0], np.maximum(other, more), other)
    return gaps


def _lowered(
    grid: np.ndarray, masses: np.ndarray, gaps: np.ndarray
) -> np.ndarray | None:
    """Returns probabilities of a profile lowered by gaps; None if one is below 0."""
    last = int(np.flatnonzero(masses).max(initial=0))
    if gaps[last] > 0:
        return None
    used = np.flatnonzero((masses[: last + 1] > 0) | (gaps[: last + 1] > 0))
    # At g = 0 there is no gap.
    x = np.append(-math.inf, grid[used])
    masses, gaps = np.append(0.0, masses[used]), np.append(0.0, gaps[used])
    kept, masses = _convex(x, masses, gaps)
    found, size = _with_gaps(x[kept], masses, gaps[kept])
    found -= _GAP_ERROR * size
    found -= (_GAP_ERROR + _MOVE_ERROR * (len(x) - len(kept))) * masses
    # What rounding has made negative is taken from larger losses.
    missing, end = 0.0, 0
    for i in np.flatnonzero(found < 0).tolist():
        end = max(end, i)
        while end < len(found) and (missing > 0 or found[end] < 0):
            rest = float(found[end]) - missing
            missing, found[end] = max(-rest, 0.0), max(rest, 0.0)
            end += 1
    result = np.zeros(len(grid))
    result[used[kept[1:] - 1]] = found[1:]
    return result if missing == 0 else None


def _with_gaps(
    x: np.ndarray, masses: np.ndarray, gaps: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns probabilities if a profile is lowered by gaps, and the size of terms."""
    width = np.minimum(np.diff(x), _MOST_NATS)
    up, down = (
        np.append(1 / np.expm1(width), 0.0),
        np.append(0.0, -1 / np.expm1(-width)),
    )
    step = np.diff(gaps, prepend=gaps[:1], append=gaps[-1:])
    size = np.append(gaps, 0.0) + np.append(0.0, gaps)
    found = masses - step[1:] * up + step[:-1] * down
    return found, size[1:] * up + size[:-1] * down


def _convex(
    x: np.ndarray, masses: np.ndarray, gaps: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the points between which the lowered profile is convex, and masses."""
    # Left out are points at which it would be concave, until there is none.
    todo = np.flatnonzero(_with_gaps(x, masses, gaps)[0] < 0).tolist()
    if not todo:
        return np.arange(len(x)), masses
    at, mass, gap, number = x.tolist(), masses.tolist(), gaps.tolist(), len(x)
    before, after = list(range(-1, number - 1)), list(range(1, number + 1))
    kept = np.ones(number, bool)
    while todo:
        i = todo.pop()
        left, right = before[i], after[i]
        if not kept[i] or left < 0 or right == number:
            continue
        down = math.expm1(max(at[left] - at[i], -_MOST_NATS))
        up = math.expm1(min(at[right] - at[i], _MOST_NATS))
        if mass[i] >= (gap[right] - gap[i]) / up + (gap[i] - gap[left]) / down:
            continue
        kept[i], after[left], before[right] = False, right, left
        share = down / math.expm1(max(at[left] - at[right], -_MOST_NATS))
        mass[left] += (1 - share) * mass[i]
        mass[right] += share * mass[i]
        todo += [left, right]
    return np.flatnonzero(kept), np.array(mass)[kept]
