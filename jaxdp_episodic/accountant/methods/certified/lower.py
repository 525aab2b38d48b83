"""The lower distribution of one step: its hockey-stick curve lies below the true one.

Outcomes are merged at random into grid points. Merging is post-processing, so no
hockey-stick divergence rises. A point between neighbouring grid points u < v splits
their bin into halves A, below, and B, above. A is merged into u, but for a share x that
goes to v; B into v, but for a share y that goes to u. With

    gain(u) = sum of P - e^u Q >= 0 over what comes to u from the bin above it,
    loss(u) = sum of e^u Q - P >= 0 over what comes to u from the bin below it,

the merged outcome has ``P >= e^u Q``, a privacy loss of at least u, where ``gain >=
loss``, and the lower distribution says that it is u. Where the gain is less, the share
``gain / loss`` of what comes from below stays, and the rest goes to the grid point
below. A gain above the loss is wasted: it makes the interval wider.

The shares are chosen in two ways, and the better distribution is kept:

* bin by bin (`_share_out`): x and y solve two linear equations, so that gain and loss
  are equal to the same target at both of the bin's grid points;
* from both ends (`_balance`): each grid point in turn gets a gain equal to its loss,
  until only the heaviest is left. A narrow peak there would waste as much as a whole
  bin; so all grid points are shifted together until it is balanced too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.certified.lattice import BinMasses

# Targets tried, as shares of the gain that the bins beside a grid point can give it.
_TARGET_SHARES = (0.7, 0.85)
# Nats between grid points beyond which a loss is computed as at this distance: its
# exponential would overflow, and the upper one gets at most e^-690 of the mass anyway.
_MOST_NATS = 690.0
# Mass from which on a grid point is balanced as a peak.
_PEAK_MASS = 0.05
# Largest shift of the grid, as a share of the distance to the peak's neighbours.
_LARGEST_SHIFT = 0.4
# Shifts that are tried.
_TRIALS = 8
# Least distance of a trial from the ends of its bracket, as a share of the bracket.
_LEAST_SHARE = 0.05
# Negligible waste at the heaviest grid point, over its mass and the largest shift.
_SMALL_WASTE = 1e-7
# Relative margin by which shares stay below the quotients they are rounded from.
_SHARE_MARGIN = 1e-13
# Rounding error of a sum of products over the sum of their sizes.
_SUM_ERROR = 2e-15
# Largest exponent of a moment by which candidates are compared.
_MOST_EXPONENT = 300.0


class LowerDistribution(NamedTuple):
    """Masses ``(m,)`` on the grid points, and the shift common to all of those."""

    masses: np.ndarray
    shift: float


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
    points: np.ndarray, bins: BinMasses, tilt: float, *, may_shift: bool = True
) -> LowerDistribution:
    """The best lower distribution on the grid ``points[::2]``, shifted as a whole.

    Of the candidates, the one of the largest moment ``E e^{tilt L}``.

    Args:
      points: (2 m - 1,) grid points and the points that split the bins between them.
      bins: of the bins between the points.
      tilt: c > 0.
      may_shift: whether the grid may be shifted.
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
    if inside and around[heaviest] > _PEAK_MASS:
        tries += _balanced(points, bins, heaviest, _TRIALS if may_shift else 1)
    scores = [_score(t, grid, tilt) for t in tries]
    return tries[int(np.argmax(scores))]


def _score(bins: LowerDistribution, grid: np.ndarray, tilt: float) -> float:
    """About the logarithm of the moment; differences of it keep their digits."""
    tilt = min(tilt, _MOST_EXPONENT / max(float(grid[-1]), 1e-300))
    # A product of BLAS would wake its threads here, see `quadrature.in_blocks`.
    growth = float(np.sum(bins.masses * np.expm1(tilt * grid)))
    growth += float(bins.masses.sum()) - 1
    return float(np.log1p(max(growth, -1 + 1e-15))) + tilt * bins.shift


def _halves(points: np.ndarray, bins: BinMasses, shift: float) -> _Halves:
    """Masses, gains and losses of half bins for the grid ``points[::2] + shift``."""
    grid = points[::2]
    first, whole = points[1::2] - grid[:-1], grid[1:] - grid[:-1]
    nothing = np.zeros_like(whole)
    parts = []
    for half, low, high in ((0, nothing, first), (1, first, whole)):
        bottom, top = bins.bottom[half::2], bins.top[half::2]
        error, top_error = bins.mass_error[half::2], bins.top_error[half::2]
        mass, sure = bottom + top, np.maximum(top - top_error, 0.0)
        # 1 - e^{u - l} at the half's lower and upper end l, u the lower grid point
        near, far = -np.expm1(shift - low), -np.expm1(shift - high)
        size = mass * np.abs(near) + sure * (far - near)
        gain = mass * near - error * np.abs(near) + sure * (far - near)
        gain -= _SUM_ERROR * size
        # e^{v - l} - 1 at the upper and lower end, v the upper grid point
        near = np.expm1(np.minimum(whole - high + shift, _MOST_NATS))
        far = np.expm1(np.minimum(whole - low + shift, _MOST_NATS))
        size = mass * np.abs(far) + sure * (far - near)
        loss = mass * far + error * np.abs(far) - sure * (far - near)
        loss += _SUM_ERROR * size
        # Mass that may lie below its grid point is dropped; a negative loss is 0.
        kept = np.where(gain >= 0, np.maximum(mass - error, 0.0), 0.0)
        parts.append((kept, np.maximum(gain, 0.0), np.maximum(loss, 0.0)))
    (mass_a, gain_a, loss_a), (mass_b, gain_b, loss_b) = parts
    above = max(bins.above_gain * (1 - _SHARE_MARGIN), 0.0) if shift <= 0 else 0.0
    # The mass above the last grid point is merged into it but not counted: at a large
    # tilt it would outweigh all the rest.
    return _Halves(mass_a, mass_b, gain_a, gain_b, loss_a, loss_b, above)


def _balanced(
    points: np.ndarray, bins: BinMasses, heaviest: int, trials: int
) -> list[LowerDistribution]:
    """Candidates whose grid points are balanced in turn, at several shifts of all.

    The waste at the heaviest one falls as the grid is shifted up; its zero is searched
    for by the slope of a peak, and in a bracket by the secant.
    """
    grid = points[::2]
    if bins.atom > 0 and grid[heaviest] != 0:
        return []
    atom = max(bins.atom - bins.atom_error, 0.0)
    most = _LARGEST_SHIFT * min(np.diff(grid[heaviest - 1 : heaviest + 2]))
    tries, shift = [], 0.0
    left, right = (-most, math.nan), (most, math.nan)  # shifts, and the waste there
    for _ in range(trials):
        halves = _halves(points, bins, shift)
        # the atom lies at the heaviest grid point before the shift
        change = float(np.expm1(shift))
        atom_gain = -atom * change - 2 * bins.atom_error * abs(change)
        masses, waste = _balance(halves, heaviest, atom, atom_gain)
        tries.append(LowerDistribution(masses, shift))
        weight = max(float(masses[heaviest]), _PEAK_MASS)
        if abs(waste) <= _SMALL_WASTE * weight * most:
            break
        if waste > 0:
            left = shift, waste
        else:
            right = shift, waste
        share = left[1] / (left[1] - right[1])
        if math.isnan(share):  # no bracket yet
            shift = float(np.clip(shift + waste / weight, -most, most))
        else:
            share = min(max(share, _LEAST_SHARE), 1 - _LEAST_SHARE)
            shift = left[0] + share * (right[0] - left[0])
    return tries


def _balance(
    halves: _Halves, heaviest: int, atom: float, atom_gain: float
) -> tuple[np.ndarray, float]:
    """Masses, each grid point balanced in turn from both ends to the heaviest one.

    Args:
      halves: of the bins.
      heaviest: index, > 0, of the grid point that is balanced last.
      atom: mass there, of the loss 0.
      atom_gain: its ``P - e^u Q`` at the shifted grid point u, negative for a loss.

    Returns:
      ``(m,)`` masses, and gain less loss at the heaviest grid point.
    """
    # Bin by bin, as this loop takes most of a setting's time.
    rows = [*zip(*(half.tolist() for half in halves[:6]), strict=True)]
    sure, gain, here = 1 - _SHARE_MARGIN, halves.above_gain, 0.0
    above = []
    for mass_a, mass_b, gain_a, gain_b, loss_a, loss_b in rows[: heaviest - 1 : -1]:
        # the upper grid point gets a loss equal to its gain
        up, down, own = mass_b, mass_a, gain_a
        if gain < loss_b:
            y = 1 - gain / loss_b * sure
            up, down, own = (1 - y) * mass_b, mass_a + y * mass_b, gain_a + y * gain_b
        elif loss_a > 0:
            x = (gain - loss_b) / loss_a * sure
            x = 1.0 if x > 1 else x  # NaN stays NaN
            up, down, own = x * mass_a + mass_b, (1 - x) * mass_a, (1 - x) * gain_a
        above.append(here + up)
        here, gain = down, own
    masses = [0.0]
    loss = from_below = 0.0
    for mass_a, mass_b, gain_a, gain_b, loss_a, loss_b in rows[:heaviest]:
        # the lower grid point keeps a gain equal to its loss
        up, down, own, lost = mass_b, mass_a, gain_a, loss_b
        if loss < gain_a:
            x = 1 - loss / gain_a
            up, down, own = x * mass_a + mass_b, (1 - x) * mass_a, (1 - x) * gain_a
            lost = x * loss_a + loss_b
        elif gain_b > 0:
            y = (loss - gain_a) / gain_b
            y = 1.0 if y > 1 else y
            up, down, own = (1 - y) * mass_b, mass_a + y * mass_b, gain_a + y * gain_b
            lost = (1 - y) * loss_b
        kept = _kept(own, loss)
        masses[-1] += (1 - kept) * from_below
        masses.append(kept * from_below + down)
        from_below, loss = up, lost
    masses = [*masses[1:], here, *above[::-1]]
    # an atom below its grid point is a loss too
    kept = _kept(gain + max(atom_gain, 0.0), loss + max(-atom_gain, 0.0))
    if atom_gain < 0 and kept < 1:
        masses[heaviest - 1] += (1 - kept) * (from_below + atom)
        masses[heaviest] += kept * (from_below + atom)
    else:
        masses[heaviest - 1] += (1 - kept) * from_below
        masses[heaviest] += kept * from_below + atom
    return np.array(masses), gain + atom_gain - loss


def _kept(gain: float, loss: float) -> float:
    """The share of what comes from below that a gain can balance."""
    share = gain / loss * (1 - _SHARE_MARGIN) if loss > 0 else 1.0
    return 1.0 if share > 1 else share


def _targets(halves: _Halves) -> list[np.ndarray]:
    """Candidates for the gain and loss of each grid point."""
    _, _, gain_a, gain_b, loss_a, loss_b, above_gain = halves
    gains, losses = np.append(gain_a, above_gain), np.append(0.0, loss_b)
    larger = np.maximum(gains, losses)
    most = np.minimum(
        np.append(gain_a + gain_b, above_gain), np.append(0.0, loss_a + loss_b)
    )
    result = [larger]
    for share in _TARGET_SHARES:
        target = np.minimum(larger, share * most)
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
    """Masses on the grid points whose gain and loss are the target where they can be.

    In each bin ``(1 - x) gain_a + y gain_b`` is the target of the lower grid point and
    ``x loss_a + (1 - y) loss_b`` that of the upper one.
    """
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
