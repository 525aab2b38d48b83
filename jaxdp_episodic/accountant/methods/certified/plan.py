"""Plans of privacy loss lattices: tilt, window, spacing, grids. *Estimates* only.

They decide how wide an interval is, never whether it holds.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.privacy_loss import Hints
from jaxdp_episodic.accountant.methods.certified.lattice import BinMasses, merged_losses

# Losses in nats at which every mechanism is evaluated: eight a decade.
_ANY_LOSSES = np.geomspace(1e-10, 1e13, 185)
# Points of a Gaussian loss, in standard deviations from its mean: ten in each.
_DEVIATIONS = np.linspace(-12.0, 12.0, 241)
# Smallest distance of two points, relative: rounding would dominate shorter cells.
_LEAST_GAP = 1e-9
# Smallest point, relative to the scale of small losses.
_LEAST_LOSS = 1e-4
# Largest point over the largest of the Gaussian's: those of antipodal shifts are four
# times as large.
_FURTHEST = 8.0
# First grid of tilts, in 1/nat, two a decade; small ones are for large losses.
_TILTS = np.geomspace(1e-18, 1e8, 53)
# Second grid, as factors of the best tilt of the first.
_FINER_TILTS = np.geomspace(10**-0.5, 10**0.5, 13)
# Relative distances of the tilts in Chernoff's bound of what is outside of the window.
_TILT_CHANGES = np.geomspace(0.01, 6.0, 14)
# Exponent below which log-moments are cut, where every loss is far below 0.
_LEAST_EXPONENT = -1e4
# Share of the planned width for truncation and aliasing.
_CUT_SHARE = 0.01
# Share of delta's relative width for single losses above the lattice.
_RARE_SHARE = 0.05
# Relative width of delta for this share if its slope is not known yet.
RARE_WIDTH = 0.02
# First guess of log(Chernoff bound / delta).
_FIRST_DOUBT = 6.0
# Nats of Chernoff's bound of log(delta) that are given up for a larger tilt.
_SPARE_NATS = 0.1
# Largest product of a tilt and the wanted width of epsilon.
_STEEPEST = 50.0
# Smallest log(delta) that is planned for; below -745 float64 underflows.
LEAST_LOG_DELTA = -600.0
# Largest number of single large losses that dominate a sum.
_LARGE_LOSSES = 3.0
# Spacings that are tried, nats.
_SPACINGS = np.geomspace(1e-13, 4e12, 640).tolist()
# Share of the wanted width for the error of the lattice.
_LATTICE_SHARE = 0.35
_GRID_SHARE = 0.05  # share for wider bins of the grids
# Largest exponent of a tilt across a bin wider than a nat.
_WIDEST_TILTED = 0.1
# Spacings from an anchor within which every lattice point is a grid point: where the
# density is steep the lower distribution's error is of first order.
_DENSE = 256
# Width of a bin further away, over its distance from the anchor.
_GROWTH = 0.005
# Number of spacings that are tried so that several atoms are lattice points.
_MOST_TRIED = 2000
# An atom less than this share of the spacing below a point counts as that point.
_ROUNDING = 1e-9
# Largest number of the widest bins of one step.
_MOST_BINS = 2**16
# The same times terms of a mixture, if points are nats apart: 2 to 5 s of CPU.
_MOST_TERMS_OF_BINS = 2**18


class Estimate(NamedTuple):
    """Delta at epsilon by an earlier plan; ``slope = -d log(delta) / d epsilon``."""

    epsilon: float
    log_delta: float
    slope: float
    doubt: float = 0.0  # nats by which log(delta) may be less


class Target(NamedTuple):
    """A question about one setting: delta at an epsilon, or epsilon at a delta."""

    given: float  # epsilon, or log(delta)
    of_epsilon: bool  # whether epsilon is asked for
    absolute: float  # wanted width of epsilon, nats
    relative: float  # the same relative to epsilon, or of delta relative to it

    def enough(self, answer: float) -> float:
        """Returns the wanted width: nats of epsilon, or a share of delta."""
        return max(self.absolute, self.relative * (answer if self.of_epsilon else 1.0))

    def width(self, known: Estimate) -> float:
        """Returns the wanted width in nats of epsilon."""
        return self.enough(known.epsilon) / (1.0 if self.of_epsilon else known.slope)


def log_weight(tilt: float) -> float:
    """Returns ``w(c) = log max_{x>0} e^{-c x} (1 - e^{-x})``, at x = log(1 + 1/c)."""
    return -math.log1p(tilt) - tilt * math.log1p(1 / tilt)


class CoarseLoss(NamedTuple):
    """The loss of one step in one direction, in b cells in order."""

    mass: np.ndarray  # (b,) P-probability of each cell
    loss: np.ndarray  # (b,) log(P/Q) of each cell
    edges: np.ndarray  # (b + 1,) of the cells
    count: float  # number of such steps

    @classmethod
    def of(cls, points: np.ndarray, bins: BinMasses, count: float) -> CoarseLoss:
        """From bins between points."""
        return cls(*merged_losses(points, bins), points, count)

    def without_rare(self, log_rare: float) -> CoarseLoss:
        """Leaves out the largest losses, up to a probability of all such steps."""
        above = self.count * np.cumsum(self.mass[::-1])[::-1]
        kept = int(np.count_nonzero(above > math.exp(log_rare))) or len(above)
        return CoarseLoss(
            self.mass[:kept], self.loss[:kept], self.edges[: kept + 1], self.count
        )

    def log_moment(self, tilts: np.ndarray) -> np.ndarray:
        """Returns ``log E_P exp(c L)`` of all steps at many tilts c."""
        alive = self.mass > 0
        exponent = np.log(self.mass[alive]) + tilts[:, None] * self.loss[alive]
        largest = exponent.max(-1, initial=_LEAST_EXPONENT)
        # Next to 0 the tails are not told apart, and masses may count twice.
        whole = np.sum(np.exp(exponent - largest[:, None]), -1) / self.mass.sum()
        return self.count * (np.log(whole + 1e-300) + largest)

    def tilted(self, tilt: float) -> np.ndarray:
        """Returns the probabilities of the tilted distribution."""
        with np.errstate(divide="ignore"):
            weight = np.log(self.mass) + tilt * self.loss
        weight = np.exp(weight - weight.max())
        return weight / weight.sum()

    @property
    def center(self) -> float:
        """Where a narrow peak would be: the median."""
        median = int(np.searchsorted(np.cumsum(self.mass), 0.5))
        return float(self.loss[min(median, len(self.loss) - 1)])


class Plan(NamedTuple):
    """The plan of one direction."""

    tilt: float  # c, the exponent of the exponential tilt
    epsilon: float  # the expected answer, or the given epsilon
    log_cut: float  # log of the tilted probability allowed outside of the window
    spacing: float  # largest spacing of the lattice, nats
    length: float  # of the window, nats, estimated from the coarse losses
    widest: float  # widest bin of a grid, nats
    ranges: tuple[tuple[float, float], ...]  # smallest and largest loss of each step


def coarse_points(hints: Hints) -> np.ndarray:
    """Returns losses of either sign and 0, ascending: the edges of the cells."""
    shift = float(hints.furthest)
    gaussian = shift * (0.5 * shift + _DEVIATIONS)
    # smaller losses are negligible, and larger ones do not occur
    least = _LEAST_LOSS * float(hints.rate) * min(float(hints.shift), 1.0)
    inside = (_ANY_LOSSES >= least) & (_ANY_LOSSES <= _FURTHEST * gaussian[-1])
    positive = np.union1d(_ANY_LOSSES[inside], gaussian[gaussian > 0])
    positive = positive[np.diff(positive, prepend=0.0) > _LEAST_GAP * positive]
    return np.concatenate([-positive[::-1], [0.0], positive])


def first_guess(whole: Sequence[CoarseLoss], target: Target) -> Estimate:
    """*Estimates* the answer by Chernoff's bound, and the slope by its tilt."""
    log_delta, epsilon = target.given, None
    if not target.of_epsilon:
        # Rare large losses raise the bound more than delta.
        epsilon, bound = target.given, _best_tilt(whole, target.given, 0.0)[1]
        log_delta = max(min(bound, 0.0) - _FIRST_DOUBT, LEAST_LOG_DELTA)
    losses = _without_rare(whole, log_delta + math.log(RARE_WIDTH))
    tilt, bound = _best_tilt(losses, epsilon, log_delta)
    if epsilon is None:
        epsilon = max(bound, 0.0)
        tilt = min(tilt, _STEEPEST / target.enough(epsilon))
    else:
        log_delta = max(min(bound, 0.0), LEAST_LOG_DELTA)
    return Estimate(epsilon, log_delta, tilt, _FIRST_DOUBT)


def make_plan(
    whole: Sequence[CoarseLoss],
    target: Target,
    known: Estimate,
    scale: float,
    rare: float = 0.0,
) -> Plan:
    """Chooses tilt, window and spacing for a width ``scale`` times the wanted one."""
    needed = min(known.slope * target.width(known), 1.0)
    log_rare = known.log_delta + math.log(max(needed * max(scale, 0.1), rare))
    losses = _without_rare(whole, log_rare)
    tilt, _ = _best_tilt(losses, known.epsilon, 0.0)
    if target.of_epsilon:
        # A smaller tilt keeps rare large losses rare, and the window short.
        tilt = min(tilt, known.slope, _STEEPEST / target.width(known))
    slope = max(known.slope, 0.1 * tilt)
    width = target.width(known._replace(slope=slope))
    log_moment = float(_log_moments(losses, np.array([tilt]))[0])
    log_bound = min(log_moment - tilt * known.epsilon + log_weight(tilt), 0.0)
    log_share = min(known.log_delta - log_bound, 0.0)
    log_cut = math.log(_CUT_SHARE * min(slope * width, 1.0) * min(scale, 1.0))
    log_cut += log_share - known.doubt
    low, high = _window(losses, tilt, log_moment, log_cut)
    # Bins across which the tilt hardly changes; wide ones if losses are large.
    widest = max(1 / (1 + slope), _WIDEST_TILTED / slope)
    weights = [_importance(one, tilt, log_share, 1 / len(losses)) for one in losses]
    spacing, longest = _lengths(losses, weights, slope, width * scale)
    ranges = []
    for one in losses:
        below = np.cumsum(one.tilted(tilt)) * (one.count * len(losses))
        lowest = int(np.searchsorted(below, math.exp(log_cut)))
        ranges.append((float(one.edges[lowest]), float(one.edges[-1])))
    return Plan(
        tilt,
        known.epsilon,
        log_cut,
        min(spacing, widest),
        high - min(low, known.epsilon),
        min(max(longest, spacing), widest),
        tuple(ranges),
    )


def _without_rare(losses: Sequence[CoarseLoss], log_delta: float) -> list[CoarseLoss]:
    """Leaves out large losses that add little to delta: each step has its share."""
    log_rare = log_delta + math.log(_RARE_SHARE / len(losses))
    return [one.without_rare(log_rare) for one in losses]


def _best_tilt(
    losses: Sequence[CoarseLoss], epsilon: float | None, log_delta: float
) -> tuple[float, float]:
    """Returns the tilt with the smallest Chernoff bound, and that bound."""
    best, bounds, spare = 1.0, np.empty(0), 0.0
    for factors in (_TILTS, _FINER_TILTS):
        tilts = best * factors
        weights = np.array([log_weight(float(c)) for c in tilts])
        exponents = _log_moments(losses, tilts) + weights
        if epsilon is not None:
            # If delta is near 1 the best tilt is close to 0, and the window of hardly
            # tilted losses long.
            bounds, spare = exponents - tilts * epsilon, _SPARE_NATS
        else:
            bounds = (exponents - log_delta) / tilts
        best = float(tilts[bounds <= bounds.min() + spare].max(initial=tilts[0]))
    return best, float(np.min(bounds))


def _log_moments(losses: Sequence[CoarseLoss], tilts: np.ndarray) -> np.ndarray:
    """Returns ``log M`` of the sum at many tilts."""
    return np.sum([one.log_moment(tilts) for one in losses], axis=0)


def _window(
    losses: Sequence[CoarseLoss], tilt: float, moment: float, log_cut: float
) -> tuple[float, float]:
    """Returns the window of the tilted sum, by Chernoff's bound."""
    ups, downs = tilt * (1 + _TILT_CHANGES), tilt * (1 - _TILT_CHANGES)
    moments = _log_moments(losses, np.concatenate([ups, downs]))
    up, down = moments[: len(ups)], moments[len(ups) :]
    high = np.min((up - moment - log_cut) / (ups - tilt))
    low = np.max((moment - down + log_cut) / (tilt - downs))
    return float(low), float(high)


def _importance(
    loss: CoarseLoss, tilt: float, log_share: float, part: float
) -> np.ndarray:
    """Returns the distribution of one of the step's losses given a sum >= epsilon."""
    # The tilted distribution, but a single large loss may dominate the sum if delta is
    # far below Chernoff's bound.
    weight = loss.tilted(tilt)
    rare = np.minimum(weight * math.exp(min(-log_share, 600.0)), 1 / loss.count)
    often = loss.count * float(rare[rare > weight].sum())
    rare *= min(1.0, _LARGE_LOSSES * part / max(often, 1e-300))
    return np.maximum(weight, rare)


def _lengths(
    losses: Sequence[CoarseLoss],
    weights: Sequence[np.ndarray],
    slope: float,
    width: float,
) -> tuple[float, float]:
    """Returns the largest spacing and, away from the center, the widest bin."""
    # Splitting a loss to the ends of a bin of width h adds a variance of at most h²/4,
    # or d h at a distance d from the center. The tilted log-moment grows by c (1 + c) /
    # 2 times that, and at most by c h.
    distance = np.concatenate([np.abs(one.loss - one.center) for one in losses])
    weight = np.concatenate(
        [one.count * each for one, each in zip(losses, weights, strict=True)]
    )

    def error(length: np.ndarray | float) -> float:
        variance = np.minimum(length * length / 4, distance * length)
        each = np.minimum(0.5 * (1 + slope) * variance, length)
        return float(np.sum(each * weight))

    def longer(longest: float) -> float:
        away = np.maximum(_GROWTH * distance, spacing)
        return error(np.minimum(away, max(longest, spacing))) - error(spacing)

    number = bisect.bisect_right(_SPACINGS, _LATTICE_SHARE * width, key=error)
    spacing = _SPACINGS[max(number - 1, 0)]
    number = bisect.bisect_right(_SPACINGS, _GRID_SHARE * width, key=longer)
    return spacing, _SPACINGS[max(number - 1, 0)]


def aligned(spacing: float, distances: np.ndarray, weights: np.ndarray) -> float:
    """Returns a slightly smaller spacing that nearly divides distances of atoms."""
    far = np.abs(distances) > spacing
    if not far.any():
        return spacing
    distances, weights = distances[far], weights[far]
    least = math.ceil(abs(distances[0]) / spacing)
    tried = abs(distances[0]) / (least + np.arange(min(least // 2, _MOST_TRIED) + 1))
    places = distances / tried[:, None]
    # An atom counts as the point below it.
    off = places - np.floor(places + _ROUNDING)
    return float(tried[np.argmin(np.sum(off * weights, axis=1) * tried)])


def graded_grid(
    anchors: Sequence[float],
    spacing: float,
    widest: float,
    span: tuple[float, float],
    num_terms: float = 1.0,
) -> np.ndarray:
    """Returns whole numbers j of grid points ``anchors[0] + j spacing``.

    Near the anchors every j is a grid point.
    """
    places = np.rint((np.array(anchors) - anchors[0]) / spacing)
    low = min(math.floor((span[0] - anchors[0]) / spacing), places.min() - 1)
    high = max(math.ceil((span[1] - anchors[0]) / spacing), places.max() + 1)
    # With little noise fewer points widen the interval, but answer in time.
    most = _MOST_BINS if spacing < 1 else _MOST_TERMS_OF_BINS / num_terms
    widest = max(math.floor(widest / spacing), math.ceil((high - low) / most), 1)
    at, parts = float(_DENSE), [np.arange(_DENSE + 1.0)]
    while at < high - low:
        step = math.floor(min(max(_GROWTH * at, 1.0), widest))
        # until steps may grow by a tenth, or to the end
        number = math.ceil((0.1 * at if step < widest else high - low - at) / step)
        parts.append(at + step * np.arange(1.0, number + 1))
        at += step * number
    offsets = np.concatenate(parts)
    grid = np.add.outer(places, np.concatenate([-offsets, offsets]))
    grid = np.unique(np.append(grid, [low, high]))
    return grid[(grid >= low) & (grid <= high)]


def with_splits(grid: np.ndarray) -> np.ndarray:
    """Returns the grid with a point in each bin: near a narrower one, counted there."""
    root = np.sqrt(np.diff(grid))
    before, after = np.append(root[0], root[:-1]), np.append(root[1:], root[-1])
    points = np.empty(2 * len(grid) - 1)
    ends = np.where(before > after, (grid[1:], -after), (grid[:-1], before))
    points[::2], points[1::2] = grid, ends[0] + root**2 * ends[1] / (before + after)
    return points
