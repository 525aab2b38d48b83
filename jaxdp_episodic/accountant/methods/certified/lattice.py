"""The privacy loss of one step on a lattice: an upper and a lower distribution.

References: Doroshenko et al. (2022), arXiv:2207.04380; docs/theory.md, "Certified".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.losses.privacy_loss import FiniteValues, Profile
from jaxdp_episodic.accountant.methods.engine import Chunks, in_chunks
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

    bottom: np.ndarray  # at the lower end of each bin
    top: np.ndarray  # at its upper end
    top_error: np.ndarray  # bound of the error of ``top``
    mass_error: np.ndarray  # bound of the error of ``bottom + top``
    atom: float  # probability of the loss 0 exactly, if 0 is one of the points
    atom_error: float
    above: float  # P-probability above the last point
    above_error: float  # bound of its error
    above_gain: float  # lower bound of h at the last point
    below: float  # upper bound of the P-probability below the first point


def evaluate_tails(
    losses: Sequence[Profile], points: Sequence[np.ndarray]
) -> list[tuple[Tails, Tails]]:
    """Returns (forward, backward) tails of each step at its ``|points|``, (m_i,)."""
    lengths = [len(p) for p in points]
    flat = np.abs(np.concatenate(points))
    every = type(losses[0]).stack(list(losses)).map(lambda f: np.repeat(f, lengths))
    least = _least_loss(every)
    displaced = np.where(flat < least, 2 * least, 0.0) + every.tail_displacement(flat)
    displaced = displaced + loss_rounding(flat)
    u = np.maximum(flat, least)
    chunk = min(_CHUNKS.numpy, max(_TERMS_AT_ONCE // every.terms_of_profile, 16))
    own, own_scaled, other, other_scaled = in_chunks(
        lambda part: _log_tails(*part), (u, every), _CHUNKS._replace(numpy=chunk)
    )
    relative = every.profile_error()
    cuts = np.cumsum(lengths)[:-1]
    forward, backward = (
        [np.split(a, cuts) for a in _tails(*logs, displaced, relative)]
        for logs in ((own, own_scaled), (other, other_scaled))
    )
    return [
        (Tails(*(a[i] for a in forward)), Tails(*(a[i] for a in backward)))
        for i in range(len(points))
    ]


def displacement(loss: Profile) -> float:
    """Bounds how far computed losses are from the true ones, in nats."""
    furthest = loss.tail_displacement(np.float64(np.inf))
    return float(2 * _least_loss(loss) + furthest)


def _least_loss(loss: Profile) -> np.ndarray:
    """Returns the absolute loss below which losses are treated as 0."""
    hints = loss.hints()
    return 1e-14 * np.maximum(hints.rate * np.minimum(hints.shift, 1.0), 1e-60)


def loss_rounding(u: np.ndarray | float) -> np.ndarray:
    """Bounds how far large losses are displaced by rounding alone, in nats."""
    return np.where(np.abs(u) > _LARGE_LOSS, _LOSS_ROUNDING * np.abs(u), 0.0)


def _tails(
    log_h: np.ndarray,
    log_scaled: np.ndarray,
    displaced: np.ndarray,
    relative: np.ndarray,
) -> Tails:
    # NaN stays NaN: the probabilities are then NaN too, and rejected.
    no_h = log_h <= _LEAST_LOG_PROFILE
    no_scaled = no_h | (log_scaled <= _LEAST_LOG_SCALED)
    log_h = np.where(no_h, 0.0, log_h)
    log_scaled = np.where(no_scaled, 0.0, log_scaled)
    profile = np.where(no_h, 0.0, np.exp(log_h))
    scaled = np.where(no_scaled, 0.0, np.exp(log_scaled))
    error = relative * (1 + np.abs(log_h) + np.abs(log_scaled))
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
    atom = atom_error = 0.0
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
    elif zero < len(points) and points[zero] == 0:
        atom = max(1 - h[zero] - g[zero] - f[zero], 0.0)
        atom_error = float(h_error[zero] + g_error[zero] + f_error[zero])
        atom_error += _ARITHMETIC_ERROR
    # Outside of the points: the tails, or 1 minus the opposite direction's.
    above, above_error = float(h[-1] + g[-1]), float(h_error[-1] + g_error[-1])
    if points[-1] < 0:
        above = 1 - float(weight_b[-1] * f[-1])
        above_error = float(weight_b[-1] * f_error[-1])
    if points[0] <= 0:
        under = float(weight_a[0] * (f[0] + f_error[0]))
    else:
        under = 1 - float(h[0] + g[0]) + float(h_error[0] + g_error[0])
        under += _ARITHMETIC_ERROR
    top = np.maximum(top, 0.0)
    mass_error = mass_error + 2 * _ARITHMETIC_ERROR * mass_size
    return BinMasses(
        bottom=np.maximum(mass - top, 0.0),
        top=top,
        top_error=top_error + _ARITHMETIC_ERROR * top_size,
        # bottom + top exceeds the bin's probability if the top alone does
        mass_error=mass_error + np.maximum(top - mass, 0.0),
        atom=atom,
        atom_error=atom_error,
        above=above,
        above_error=above_error + _ARITHMETIC_ERROR * max(above, points[-1] < 0),
        # the profile decreases, so below 0 it is at least this
        above_gain=float(h[-1] - h_error[-1]),
        below=under,
    )


def merged_losses(points: np.ndarray, bins: BinMasses) -> tuple[np.ndarray, np.ndarray]:
    """Returns the P-probability of every bin, and ``log(P / Q)`` of the bin."""
    mass = bins.bottom + bins.top
    share = bins.top / np.where(mass > 0, mass, 1.0)
    change = np.maximum(share * np.expm1(points[:-1] - points[1:]), -1 + 1e-15)
    return mass, np.minimum(points[:-1] - np.log1p(change), points[1:])


def upper_masses(points: np.ndarray, bins: BinMasses) -> tuple[np.ndarray, float]:
    """Returns the upper distribution on the points, (m,), and at an infinite loss."""
    # An error of the upper end's part lifts losses and adds no probability.
    top = bins.top + bins.top_error
    masses = np.zeros(len(points))
    masses[1:] += top
    masses[:-1] += np.maximum(bins.bottom + bins.top + bins.mass_error - top, 0.0)
    masses[0] += bins.below * (1 + 1e-12)
    masses[points == 0] += bins.atom + bins.atom_error
    # Adds everything that underflows above the last point.
    return masses, bins.above + bins.above_error + 1e-300


def joined_bins(points: np.ndarray, masses: np.ndarray) -> np.ndarray:
    """Returns probabilities on ``points[::2]``; the others are split to both sides."""
    grid = points[::2]
    share = np.expm1(grid[:-1] - points[1::2]) / np.expm1(grid[:-1] - grid[1:])
    joined = masses[::2].copy()
    joined[:-1] += (1 - share) * masses[1::2] * (1 + 4e-15)
    joined[1:] += share * masses[1::2] * (1 + 4e-15)
    return joined


# --- Steps with finitely many losses ---


def atoms_of(loss: FiniteValues, *, backward: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns (J,) losses of one direction, and their log-probabilities."""
    losses, log_masses = loss.values()
    return (-losses, log_masses - losses) if backward else (losses, log_masses)


def bins_of_values(
    points: np.ndarray, loss: FiniteValues, *, backward: bool, slack: float = 0.0
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
    return bins_of_masses(points, losses, mass, (error + _SPLIT_ERROR) * mass)


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

    def summed(weights: np.ndarray) -> np.ndarray:
        return np.bincount(cell, weights, minlength=len(points) - 1)

    gain = mass[over] @ -np.expm1(points[-1] - losses[over])
    return BinMasses(
        bottom=summed((1 - share) * mass[inside]),
        top=summed(share * mass[inside]),
        top_error=summed(share * error[inside]),
        mass_error=summed(error[inside]),
        atom=0.0,
        atom_error=0.0,
        above=float(mass[over].sum()),
        above_error=float(error[over].sum()),
        above_gain=max(float(gain - error[over].sum()), 0.0),
        below=float((mass + error)[under].sum()),
    )


# Reference: docs/proofs.md, "The two ends of an interval".

# Targets that are tried, as shares of the gain that its bins can give a grid point.
_TARGET_SHARES = (0.7, 0.85, 0.95, 1.0)
# Distance of grid points, in nats, beyond which a loss is computed as at this one: its
# exponential would overflow, and the upper point gets at most e^-690 of it.
_MOST_NATS = 690.0
# Probability of a grid point above which shifts are tried.
_PEAK_MASS = 0.005
# Grid points on either side of the heaviest one by which shifts are compared.
_NEAR = 400
# Largest shift of the grid, as a share of the heaviest point's distance to the next.
_LARGEST_SHIFT = 0.4
# Number of shifts of either sign that are tried, then of halvings of the step.
_SCANNED = 4
_HALVINGS = 9
# Relative margin by which shares are below the rounded quotients.
_SHARE_MARGIN = 1e-13
# Rounding error of a sum of products over the sum of their absolute values.
_SUM_ERROR = 2e-15
# Largest exponent of the moment by which candidates are compared.
_MOST_EXPONENT = 300.0


class _Halves(NamedTuple):
    """Probability, gain and loss of both halves of each bin, rounded safely."""

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
    """Returns the best lower distribution on ``points[::2]``, and its shift."""
    # Which target wastes least depends on the slope of the density. Shifts of the grid
    # are tried since a peak next to the heaviest grid point would waste a whole bin.
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
    """Returns the candidate with the largest moment ``E e^{tilt L}``; moment first."""
    losses = points[::2] + shift
    tilt = min(tilt, _MOST_EXPONENT / max(float(losses[-1]), 1e-300))
    growth = np.exp(tilt * losses)
    halves = _halves(points, bins, shift)
    best = -math.inf, np.zeros(len(losses)), shift
    for target in _targets(halves):
        masses = _share_out(halves, target)
        # np.sum: a BLAS product would wake its threads, see `quadrature.in_blocks`.
        best = max(best, (float(np.sum(masses * growth)), masses, shift), key=_first)
    return best


def _best_shift(points: np.ndarray, bins: BinMasses, tilt: float) -> float:
    """*Estimates* the best shift from the bins near the heaviest grid point."""
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
    """Returns the halves of the bins for the grid ``points[::2] + shift``."""
    grid = points[::2]
    first, whole = points[1::2] - grid[:-1], grid[1:] - grid[:-1]
    nothing = np.zeros_like(whole)
    parts = []
    for half, low, high in ((0, nothing, first), (1, first, whole)):
        bottom, top = bins.bottom[half::2], bins.top[half::2]
        error, top_error = bins.mass_error[half::2], bins.top_error[half::2]
        mass, sure = bottom + top, np.maximum(top - top_error, 0.0)
        # 1 - e^{u - l} at both ends l of the half, u the lower grid point
        near, far = -np.expm1(shift - low), -np.expm1(shift - high)
        size = mass * np.abs(near) + sure * (far - near)
        gain = mass * near - error * np.abs(near) + sure * (far - near)
        gain -= _SUM_ERROR * size
        # e^{v - l} - 1 at both ends, v the upper grid point
        near = np.expm1(np.minimum(whole - high + shift, _MOST_NATS))
        far = np.expm1(np.minimum(whole - low + shift, _MOST_NATS))
        size = mass * np.abs(far) + sure * (far - near)
        loss = mass * far + error * np.abs(far) - sure * (far - near)
        loss += _SUM_ERROR * size
        # Probability that may be below its grid point is dropped; a negative loss is 0.
        kept = np.where(gain >= 0, np.maximum(mass - error, 0.0), 0.0)
        parts.append((kept, np.maximum(gain, 0.0), np.maximum(loss, 0.0)))
    (mass_a, gain_a, loss_a), (mass_b, gain_b, loss_b) = parts
    above = max(bins.above_gain * (1 - _SHARE_MARGIN), 0.0) if shift <= 0 else 0.0
    # The probability above the last grid point is merged into it but not added: at a
    # large tilt it would outweigh all the rest.
    return _Halves(mass_a, mass_b, gain_a, gain_b, loss_a, loss_b, above)


def _targets(halves: _Halves) -> list[np.ndarray]:
    """Returns candidates for the gain and loss of each grid point."""
    _, _, gain_a, gain_b, loss_a, loss_b, above_gain = halves
    gains, losses = np.append(gain_a, above_gain), np.append(0.0, loss_b)
    larger = np.maximum(gains, losses)
    most = np.minimum(
        np.append(gain_a + gain_b, above_gain), np.append(0.0, loss_a + loss_b)
    )
    result = [larger]
    for share in _TARGET_SHARES:
        target = np.minimum(larger, share * most)
        # A bin that gives less than its half to one grid point gives more to the other.
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
    """Returns probabilities on the grid points with these gains and losses, or less."""
    # In each bin (1 - x) gain_a + y gain_b is the target of the lower grid point, and x
    # loss_a + (1 - y) loss_b that of the upper one.
    mass_a, mass_b, gain_a, gain_b, loss_a, loss_b, above_gain = halves
    lack_gain, lack_loss = target[:-1] - gain_a, target[1:] - loss_b
    # Across hundreds of nats losses overflow: then all goes to the lower grid point.
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
    # Shares are a little below the rounded quotient.
    kept = np.minimum(gain / np.where(loss > 0, loss, 1.0) * (1 - 1e-14), 1.0)
    kept = np.where(loss > 0, kept, 1.0)
    to_upper = x * mass_a + (1 - y) * mass_b
    masses = np.zeros(len(target))
    masses[:-1] += (1 - x) * mass_a + y * mass_b + (1 - kept) * to_upper
    masses[1:] += kept * to_upper
    return masses


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(b > 0, a / np.where(b > 0, b, 1.0), 0.0)
