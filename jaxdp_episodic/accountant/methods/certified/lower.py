"""The lower distribution of one step, whose hockey-stick curve lies below the true one.

Each bin between two grid points has two halves, A below the point that splits it and B
above. A goes to the lower grid point and B to the upper one, except for a share x of A
and y of B that go the other way. At a grid point u, with ``gain`` the sum of
``P - e^u Q`` over what comes from the bin above and ``loss`` that of ``e^u Q - P`` over
what comes from the bin below, the merged outcome has a loss of at least u where
``gain >= loss``. Merging is post-processing, so no hockey-stick divergence rises; what
``gain`` exceeds ``loss`` by is wasted.

Two ways to choose the shares: bin by bin, so that both its grid points have what they
aim at; and from both ends of the distribution towards its heaviest grid point, each
grid point balanced in turn. A distribution that is a narrow spike in the main has its
heaviest grid point balanced last, by moving all grid points along a little: a spike off
the lattice would cost a whole bin.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.certified.lattice import BinMasses

# Shares of the gain that the bins beside a grid point can give it, tried as targets.
_REACHES = (0.7, 0.85)
# Of grid points further apart than so many nats the upper one gets e^-690 of the mass
# between them at the most, where it would be less.
_MOST_RISE = 690.0
# A grid point with at least this share of the mass is treated as a spike.
_SPIKE = 0.05
# How far grid points move at most, over the spacing at the spike; how often it is
# tried.
_FURTHEST, _TRIALS = 0.4, 8
# The next trial keeps this share of the distance of two trials from either.
_LEAST_SHARE = 0.05
# A negligible waste at the heaviest grid point, over the mass and the spacing.
_SMALL_WASTE = 1e-7
# Shares are kept a little on the safe side of quotients, which are rounded; rounding
# of a sum of products, over their size.
_ROUNDED, _UNIT = 1e-13, 2e-15


class LowerDistribution(NamedTuple):
    """Masses ``(m,)`` on the grid points, and the move common to all of those."""

    masses: np.ndarray
    move: float


class _Halves(NamedTuple):
    """Mass, gain and loss of both halves of each bin, on the safe side."""

    mass_a: np.ndarray
    mass_b: np.ndarray
    gain_a: np.ndarray
    gain_b: np.ndarray
    loss_a: np.ndarray
    loss_b: np.ndarray
    above_gain: float


def lower_distribution(
    points: np.ndarray, bins: BinMasses, tilt: float
) -> LowerDistribution:
    """The best lower distribution on the grid ``points[::2]``, moved as a whole.

    Of the candidates, the one of the largest moment ``E e^{tilt L}``.

    Args:
      points: (2 m - 1,) grid points and the points that split the bins between them.
      bins: of the bins between the points.
      tilt: c > 0.
    """
    grid = points[::2]
    atom = np.where(grid == 0, max(bins.atom - bins.atom_error, 0.0), 0.0)
    halves = _halves(points, bins, 0.0)
    # Which target wastes least depends on how steep the density is.
    tries = [
        LowerDistribution(_share_out(halves, target) + atom, 0.0)
        for target in _targets(halves)
    ]
    around = np.append(halves.mass_a, 0.0) + np.append(0.0, halves.mass_b)
    heaviest = int(np.argmax(around))
    inside = 0 < heaviest < len(grid) - 1
    if inside and around[heaviest] > _SPIKE:
        tries += _swept(points, bins, heaviest)
    scores = [_score(t, grid, tilt) for t in tries]
    return tries[int(np.argmax(scores))]


def _score(bins: LowerDistribution, grid: np.ndarray, tilt: float) -> float:
    """About the logarithm of the moment; differences of it keep their digits."""
    reach = min(tilt, 300.0 / max(float(grid[-1]), 1e-300))
    # Of so many numbers BLAS's products wake its threads, see `quadrature.in_blocks`.
    growth = float(np.sum(bins.masses * np.expm1(reach * grid)))
    growth += float(bins.masses.sum()) - 1
    return float(np.log1p(max(growth, -1 + 1e-15))) + reach * bins.move


def _halves(points: np.ndarray, bins: BinMasses, move: float) -> _Halves:
    """Masses, gains and losses of half bins for the grid ``points[::2] + move``."""
    grid = points[::2]
    first, whole = points[1::2] - grid[:-1], grid[1:] - grid[:-1]
    nothing = np.zeros_like(whole)
    parts = []
    for half, low, high in ((0, nothing, first), (1, first, whole)):
        bottom, top = bins.bottom[half::2], bins.top[half::2]
        off, wrong = bins.mass_error[half::2], bins.top_error[half::2]
        mass, sure = bottom + top, np.maximum(top - wrong, 0.0)
        # from the lower grid point up to the half's ends, and from those to the upper
        # one
        near, far = -np.expm1(move - low), -np.expm1(move - high)
        size = mass * np.abs(near) + sure * (far - near)
        gain = mass * near - off * np.abs(near) + sure * (far - near) - _UNIT * size
        near = np.expm1(np.minimum(whole - high + move, _MOST_RISE))
        far = np.expm1(np.minimum(whole - low + move, _MOST_RISE))
        size = mass * np.abs(far) + sure * (far - near)
        loss = mass * far + off * np.abs(far) - sure * (far - near) + _UNIT * size
        # Mass that may lie below its grid point is dropped; a negative loss is 0.
        kept = np.where(gain >= 0, np.maximum(mass - off, 0.0), 0.0)
        parts.append((kept, np.maximum(gain, 0.0), np.maximum(loss, 0.0)))
    (mass_a, gain_a, loss_a), (mass_b, gain_b, loss_b) = parts
    above = max(bins.above_gain * (1 - _ROUNDED), 0.0) if move <= 0 else 0.0
    # The mass above the last grid point is merged into it but not counted: at a large
    # tilt it would outweigh all the rest.
    return _Halves(mass_a, mass_b, gain_a, gain_b, loss_a, loss_b, above)


def _swept(
    points: np.ndarray, bins: BinMasses, heaviest: int
) -> list[LowerDistribution]:
    """Candidates whose grid points are balanced in turn, at several moves of all."""
    grid = points[::2]
    if bins.atom > 0 and grid[heaviest] != 0:
        return []
    atom = max(bins.atom - bins.atom_error, 0.0)
    room = _FURTHEST * min(np.diff(grid[heaviest - 1 : heaviest + 2]))
    tries, move = [], 0.0
    left, right = (
        (-room, math.nan),
        (room, math.nan),
    )  # waste falls as the grid moves up
    for _ in range(_TRIALS):
        halves = _halves(points, bins, move)
        # the atom lies at the heaviest grid point before it is moved
        step = float(np.expm1(move))
        held = -atom * step - 2 * bins.atom_error * abs(step)
        masses, waste = _sweep(halves, heaviest, atom, held)
        tries.append(LowerDistribution(masses, move))
        weight = max(float(masses[heaviest]), _SPIKE)
        if abs(waste) <= _SMALL_WASTE * weight * room:
            break
        if waste > 0:
            left = move, waste
        else:
            right = move, waste
        # a spike's own slope, until the zero lies between two trials
        share = left[1] / (left[1] - right[1])
        if math.isnan(share):
            move = float(np.clip(move + waste / weight, -room, room))
        else:
            share = min(max(share, _LEAST_SHARE), 1 - _LEAST_SHARE)
            move = left[0] + share * (right[0] - left[0])
    return tries


def _sweep(
    halves: _Halves, heaviest: int, atom: float, held: float
) -> tuple[np.ndarray, float]:
    """Masses, each grid point balanced in turn from both ends to the heaviest one.

    Returns:
      ``(m,)`` masses, and gain less loss at the heaviest grid point: waste if positive,
      else what lacks.
    """
    mass_a, mass_b, gain_a, gain_b, loss_a, loss_b = (h.tolist() for h in halves[:6])
    masses = [0.0] * (len(mass_a) + 1)
    gain = halves.above_gain
    for i in range(len(mass_a) - 1, heaviest - 1, -1):
        # as much goes up as the upper grid point's gain allows
        x = y = 0.0
        if gain < loss_b[i]:
            y = 1 - gain / loss_b[i] * (1 - _ROUNDED)
        elif loss_a[i] > 0:
            x = min((gain - loss_b[i]) / loss_a[i] * (1 - _ROUNDED), 1.0)
        masses[i + 1] += x * mass_a[i] + (1 - y) * mass_b[i]
        masses[i] += (1 - x) * mass_a[i] + y * mass_b[i]
        gain = (1 - x) * gain_a[i] + y * gain_b[i]
    loss = risen = 0.0
    for i in range(heaviest):
        # as much stays as balances what has come from below
        x = y = 0.0
        if loss < gain_a[i]:
            x = 1 - loss / gain_a[i]
        elif gain_b[i] > 0:
            y = min((loss - gain_a[i]) / gain_b[i], 1.0)
        kept = _kept((1 - x) * gain_a[i] + y * gain_b[i], loss)
        if i:
            masses[i - 1] += (1 - kept) * risen
            masses[i] += kept * risen
        masses[i] += (1 - x) * mass_a[i] + y * mass_b[i]
        risen = x * mass_a[i] + (1 - y) * mass_b[i]
        loss = x * loss_a[i] + (1 - y) * loss_b[i]
    # an atom below its grid point is a loss too
    kept = _kept(gain + max(held, 0.0), loss + max(-held, 0.0))
    if held < 0 and kept < 1:
        masses[heaviest - 1] += (1 - kept) * (risen + atom)
        masses[heaviest] += kept * (risen + atom)
    else:
        masses[heaviest - 1] += (1 - kept) * risen
        masses[heaviest] += kept * risen + atom
    return np.array(masses), gain + held - loss


def _kept(gain: float, loss: float) -> float:
    """The share of what comes from below that a gain can balance."""
    return min(gain / loss * (1 - _ROUNDED), 1.0) if loss > 0 else 1.0


def _targets(halves: _Halves) -> list[np.ndarray]:
    """Candidates for the gain and loss of each grid point."""
    _, _, gain_a, gain_b, loss_a, loss_b, above_gain = halves
    gains, losses = np.append(gain_a, above_gain), np.append(0.0, loss_b)
    larger = np.maximum(gains, losses)
    reach = np.minimum(
        np.append(gain_a + gain_b, above_gain), np.append(0.0, loss_a + loss_b)
    )
    result = [larger]
    for share in _REACHES:
        target = np.minimum(larger, share * reach)
        # A bin that gives one grid point less than its half gives the other one more.
        fewer_losses = np.maximum(loss_b - target[1:], 0.0)
        fewer_gains = np.maximum(gain_a - target[:-1], 0.0)
        more = np.zeros(len(larger))
        more[:-1] = np.where(
            fewer_losses > 0, gain_a + fewer_losses * _ratio(gain_b, loss_b), 0.0
        )
        more[1:] = np.where(
            fewer_gains > 0,
            np.maximum(more[1:], loss_b + fewer_gains * _ratio(loss_a, gain_a)),
            more[1:],
        )
        result.append(np.maximum(target, more))
    return result


def _share_out(halves: _Halves, target: np.ndarray) -> np.ndarray:
    """Masses on the grid points where both sides of each aim at the target."""
    mass_a, mass_b, gain_a, gain_b, loss_a, loss_b, above_gain = halves
    lack_gain, lack_loss = target[:-1] - gain_a, target[1:] - loss_b
    # Across hundreds of nats losses overflow: there all goes to the lower grid point.
    with np.errstate(over="ignore", invalid="ignore"):
        determinant = gain_b * loss_a - gain_a * loss_b
        scale = np.where(determinant > 0, determinant, 1.0)
        x = (lack_gain * loss_b + lack_loss * gain_b) / scale
        y = (lack_gain * loss_a + lack_loss * gain_a) / scale
    near = np.isfinite(x) & np.isfinite(y)
    x = np.where(near & (determinant > 0), np.clip(x, 0.0, 1.0), 0.0)
    y = np.where(near & (determinant > 0), np.clip(y, 0.0, 1.0), 1.0 - near)
    gain = np.append((1 - x) * gain_a + y * gain_b, above_gain)[1:]
    loss = x * loss_a + (1 - y) * loss_b
    # Shares a little below the quotient: it is rounded.
    kept = np.minimum(gain / np.where(loss > 0, loss, 1.0) * (1 - 1e-14), 1.0)
    kept = np.where(loss > 0, kept, 1.0)
    to_upper = x * mass_a + (1 - y) * mass_b
    masses = np.zeros(len(target))
    masses[:-1] += (1 - x) * mass_a + y * mass_b + (1 - kept) * to_upper
    masses[1:] += kept * to_upper
    return masses


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(b > 0, a / np.where(b > 0, b, 1.0), 0.0)
