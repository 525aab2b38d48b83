"""The lower distribution of one step: outcomes merged at random into grid points."""

# Reference: docs/proofs.md, "The two ends of an interval".

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.certified.lattice import BinMasses

# Targets tried, as shares of the gain that the bins beside a grid point can give it.
_TARGET_SHARES = (0.7, 0.85, 0.95, 1.0)
# Nats between grid points beyond which a loss is computed as at this distance: its
# exponential would overflow, and the upper one gets at most e^-690 of the mass anyway.
_MOST_NATS = 690.0
# Mass of a grid point from which on a shift is tried.
_PEAK_MASS = 0.005
# Grid points on either side of the heaviest by which shifts are compared.
_NEAR = 400
# Largest shift of the grid, as a share of the distance to the heaviest point's next.
_LARGEST_SHIFT = 0.4
# Shifts of either sign that are tried, and how often the best one's distance is halved.
_SCANNED = 4
_HALVINGS = 9
# Relative margin by which shares stay below the quotients they are rounded from.
_SHARE_MARGIN = 1e-13
# Rounding error of a sum of products over the sum of their sizes.
_SUM_ERROR = 2e-15
# Largest exponent of a moment by which candidates are compared.
_MOST_EXPONENT = 300.0


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
) -> tuple[np.ndarray, float]:
    """The best lower distribution on the grid ``points[::2]``, shifted as a whole."""
    # Which target wastes least depends on how steep the density is; a narrow peak
    # beside the heaviest grid point would waste a whole bin, so shifts are tried.
    atom = np.where(points[::2] == 0, max(bins.atom - bins.atom_error, 0.0), 0.0)
    shifts = {0.0}
    if may_shift and not atom.any():
        shifts.add(_best_shift(points, bins, tilt))
    found = [_best_masses(points, bins, tilt, shift) for shift in shifts]
    _, masses, shift = max(found, key=lambda one: one[0])
    return masses + atom, shift


def _best_masses(
    points: np.ndarray, bins: BinMasses, tilt: float, shift: float
) -> tuple[float, np.ndarray, float]:
    """The moment ``E e^{tilt L}`` of the best candidate, its masses, the shift."""
    losses = points[::2] + shift
    tilt = min(tilt, _MOST_EXPONENT / max(float(losses[-1]), 1e-300))
    growth = np.exp(tilt * losses)
    halves = _halves(points, bins, shift)
    best = -math.inf, np.zeros(len(losses)), shift
    for target in _targets(halves):
        masses = _share_out(halves, target)
        # A product of BLAS would wake its threads here, see `quadrature.in_blocks`.
        best = max(best, (float(np.sum(masses * growth)), masses, shift), key=_first)
    return best


def _best_shift(points: np.ndarray, bins: BinMasses, tilt: float) -> float:
    """*Estimate* of the best shift, by what is near the heaviest grid point."""
    mass = bins.bottom + bins.top
    around = np.append(mass[::2], 0.0) + np.append(0.0, mass[1::2])
    heaviest = int(np.argmax(around))
    if around[heaviest] < _PEAK_MASS or not 0 < heaviest < len(around) - 1:
        return 0.0
    first, last = max(heaviest - _NEAR, 0), min(heaviest + _NEAR, len(around) - 1)
    few = points[2 * first : 2 * last + 1]
    parts = {
        name: getattr(bins, name)[2 * first : 2 * last]
        for name in ("bottom", "top", "top_error", "mass_error")
    }
    near = bins._replace(**parts, above_gain=0.0)
    step = _LARGEST_SHIFT * float(
        min(np.diff(points[::2][heaviest - 1 : heaviest + 2]))
    )

    def tried(shifts: Sequence[float]) -> tuple[float, np.ndarray, float]:
        return max((_best_masses(few, near, tilt, s) for s in shifts), key=_first)

    best = tried([step * i / _SCANNED for i in range(-_SCANNED, _SCANNED + 1)])
    step /= _SCANNED
    for _ in range(_HALVINGS):
        step /= 2
        best = max(best, tried([best[2] - step, best[2] + step]), key=_first)
    return best[2]


def _first(found: tuple[float, np.ndarray, float]) -> float:
    return found[0]


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
    """Masses on the grid points whose gain and loss are the target, if possible."""
    # In each bin (1 - x) gain_a + y gain_b is the target of the lower grid point and x
    # loss_a + (1 - y) loss_b that of the upper one.
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
