"""Random allocation: a unit takes part in one secret, uniform step of an epoch.

Profiles and moments are bounds, computed by NumPy, one setting at a time. References:
docs/proofs.md, "Random allocation"; Chua et al. (2024), arXiv:2412.16802, and Feldman
and Shenfeld (2025), arXiv:2502.08202, for the pair.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from jaxdp_episodic.accountant.losses.allocated_moments import (
    antipodal_excess,
    lower_hull,
    sum_excess,
)
from jaxdp_episodic.accountant.losses.excess import excess_of, log_excess_of_atoms
from jaxdp_episodic.accountant.losses.gaussian import (
    GaussianLoss,
    SampledGaussianLoss,
    drawn_tails,
    inner_exponent,
    scaled,
)
from jaxdp_episodic.accountant.losses.gaussian_mixtures import AntipodalGaussianLoss
from jaxdp_episodic.accountant.losses.privacy_loss import (
    BoundingPair,
    Bounds,
    Hints,
    MomentRule,
    Profile,
    Quadrature,
    Tails,
)
from jaxdp_episodic.accountant.numerics.convex_sums import lognormal_sum
from jaxdp_episodic.accountant.numerics.loops import Array
from jaxdp_episodic.accountant.numerics.signed_sums import GAIN_ROUNDING, profile_bounds

# Range of shifts of bounding pairs. Less noise is treated as none, more as 1e4.
SMALLEST_SHIFT = 1e-4
LARGEST_SHIFT = 10.0


@dataclass(frozen=True)
class AllocatedLoss(GaussianLoss, Bounds):
    """Base: a unit takes part in one secret step of an epoch."""

    shift: Array  # s >= 0, the clip norm over the noise
    slots: Array  # t, whole number, the steps of an epoch
    steps: Array  # j, whole number, 2 <= j <= t, the steps that are run
    # Maps a direction, (m,) orders minus 1 and the fields of one setting to (3, m): the
    # log-excess and two derivatives.
    _excess: ClassVar[Callable[..., np.ndarray]]
    _bounding: ClassVar[type[BoundingLoss]]
    compiles: ClassVar[bool] = False

    @property
    def _drawn_rate(self) -> Array:
        """The probability that the unit's step is run, for `with_little_noise`."""
        # If the step is revealed, an epoch is one step of Poisson sampling at this
        # rate, which dominates since H_g is jointly convex. Losses are at most
        # log(slots) larger.
        return np.minimum(self.steps / np.maximum(self.slots, 1.0), 1.0)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """*Upper bounds*: from the pair of the upper certified ends."""
        pair: Any = self.kept_in_range().certified(up=True)
        mass_error, loss_error = pair.errors()
        log_kept, below = pair.log_kept(), np.maximum(loss_error - u, 0.0)
        with np.errstate(divide="ignore"):
            # For g < 1, H_g is at most H_1 + 1 - g.
            rest = np.logaddexp(np.log(-np.expm1(log_kept)), np.log(below))
            forward, backward = (
                (np.logaddexp(profile + mass_error + log_kept, rest), tail)
                for profile, tail in pair.log_tails(np.maximum(u - loss_error, 0.0))
            )
        return forward, backward

    def certified(self, *, up: bool) -> Profile:
        """Returns a finite pair that dominates this one, or is dominated by it."""
        kept = self.kept_in_range()
        # Shifts below the range are raised to its end, or lowered to 0.
        raised = np.where(self.shift > 0, np.maximum(self.shift, kept.shift), 0.0)
        shift = raised if up else np.where(raised > self.shift, 0.0, self.shift)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields |= {"shift": shift, "slots": kept.slots, "steps": kept.steps}
        return self._bounding(**fields, above=np.full(self.shape, 1.0 * up))

    def kept_in_range(self) -> Self:
        """See `PrivacyLoss`."""
        steps = np.maximum(self.steps, 2.0)
        return dataclasses.replace(
            super().kept_in_range(),
            # A larger shift counts as unprotected, and nothing is computed.
            shift=np.clip(self.shift, SMALLEST_SHIFT, LARGEST_SHIFT),
            steps=steps,
            slots=np.maximum(self.slots, steps),
        )

    @property
    def is_unprotected(self) -> Array:
        """Whether there is less noise than bounding pairs are computed for."""
        return ~self.loses_nothing & (self.shift > LARGEST_SHIFT)

    def hints(self) -> Hints:
        """See `PrivacyLoss`: as many Poisson steps at rate 1 / slots."""
        rate = self.rate_within / self.slots
        return Hints(rate * np.sqrt(self.steps), rate, self.shift, self.shift)

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`; an upper bound."""
        excess = functools.partial(self._excess, rule.direction)
        found = by_setting(excess, t, *self.fields[1:])
        return tuple(found[: 3 if rule.with_derivatives else 1])


def by_setting(
    function: Callable[..., np.ndarray], u: np.ndarray, *fields: np.ndarray
) -> np.ndarray:
    """Returns (k, ..., n): ``function(u, *setting)`` for each setting's elements."""
    arrays = np.broadcast_arrays(u, *fields)
    flat = [np.asarray(a, np.float64).reshape(-1) for a in arrays]
    rows = np.stack(flat[1:])
    # Elements of a setting are mostly neighbours: compare the first of each run.
    changes = np.any(rows[:, 1:] != rows[:, :-1], axis=0)
    begins = np.append(0, np.flatnonzero(changes) + 1)
    settings, inverse = np.unique(rows[:, begins], axis=1, return_inverse=True)
    which = np.repeat(inverse.reshape(-1), np.diff(np.append(begins, rows.shape[1])))
    chosen = [np.flatnonzero(which == i) for i in range(settings.shape[1])]
    parts = [
        function(flat[0][rows], *setting)
        for rows, setting in zip(chosen, settings.T.tolist(), strict=True)
    ]
    result = np.concatenate(parts, axis=1)
    result[:, np.concatenate(chosen)] = result.copy()
    return result.reshape(-1, *arrays[0].shape)


# --- Finite pairs that dominate, or are dominated, in any composition ---

_CACHED = 256  # settings whose pairs are cached, for each kind
# Bound of the error of a loss, the log of a rounded ratio, over 1 + its size.
_LOSS_ERROR = 4e-16

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(n,) losses, ascending, and at each the profile and ``g Q(L >= log g)``."""


class FinitePair(NamedTuple):
    """A pair with finitely many losses, which is Poisson sampled at ``rate``."""

    loss: np.ndarray  # (n,) losses with sampling, ascending
    mass: np.ndarray  # (n,) their P-probabilities; the rest is at loss 0
    forward: Rows  # without sampling
    backward: Rows  # without sampling
    lost: float  # truncated probability, charged as an infinite loss
    rate: float = 1.0  # sampling probability
    mass_error: float = 0.0  # bound of the error of log H_g
    ratio_error: float = 0.0  # bound of the error of log g, nats

    def tails(self, u: np.ndarray) -> np.ndarray:
        """Returns the four rows of `Profile.log_tails` at u, (m,)."""
        inner = np.minimum(inner_exponent(np, u, np.float64(self.rate)), 1e300)
        inner = u if self.rate >= 1 else inner
        found = []
        for loss, profile, weight in (self.forward, self.backward):
            # Profiles are linear in e^u between losses.
            above = np.searchsorted(loss, inner, side="right")
            beyond = above == len(loss)
            above = np.minimum(above, len(loss) - 1)
            gap = np.minimum(inner - loss[above], 0.0)
            with np.errstate(divide="ignore"):
                value = np.log(profile[above] - weight[above] * np.expm1(gap))
                tail = np.log(weight[above]) + gap
            tails = np.where(beyond, -np.inf, value), np.where(beyond, -np.inf, tail)
            found += drawn_tails(tails, u, np.float64(self.rate))
        return np.stack(found)


@dataclass(frozen=True)
class BoundingLoss(AllocatedLoss, BoundingPair):
    """Base: the finite pair from which certified ends are computed."""

    above: Array  # 1 where it dominates, 0 where it is dominated
    may_have_atoms: ClassVar[bool] = True
    # Maps the fields of one setting to its pair.
    _pair: ClassVar[Callable[..., FinitePair]]
    # Relative rounding error of the profiles.
    _rounding: ClassVar[float]

    def certified(self, *, up: bool) -> Self:
        """See `Bounds`."""
        return dataclasses.replace(self, above=np.full(self.shape, 1.0 * up))

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See `Profile`: of the finite pair as computed."""
        fields = self.fields[1:]
        a, b, c, d = by_setting(lambda u, *s: self._pair(*s).tails(u), u, *fields)
        return scaled((a, b), self.outer_rate), scaled((c, d), self.outer_rate)

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """See `FiniteValues`: of the finite pair."""
        pair = self._pair(*(float(field) for field in self.fields[1:]))
        drawn = float(self.outer_rate) * pair.mass
        loss, mass = np.append(pair.loss, 0.0), np.append(drawn, 1 - drawn.sum())
        kept = mass > 0
        return loss[kept], np.log(mass[kept])

    def log_kept(self) -> Array:
        """See `PrivacyLoss`: truncated probability is charged as an infinite loss."""
        return np.log1p(self.outer_rate * np.expm1(self._facts()[0]))

    def errors(self) -> tuple[Array, Array]:
        """Returns bounds of the errors of log H_g and of log g, in nats."""
        return tuple(self._facts()[2:])

    def profile_error(self) -> Array:
        """See `Profile`."""
        return np.full(self.shape, self._rounding)

    def mass_error(self) -> Array:
        """See `Profile`."""
        return self.errors()[0]

    def tail_displacement(self, u: Array) -> Array:
        """See `Profile`: losses are rounded logarithms of rounded ratios."""
        _, largest, _, ratio_error = self._facts()
        return np.zeros_like(u) + _LOSS_ERROR * (1 + largest) + ratio_error

    @classmethod
    def _excess(cls, direction: str, order: np.ndarray, *setting: float) -> np.ndarray:
        """The moments of the finite pair."""
        pair = cls._pair(*setting)
        rule = MomentRule(direction, Quadrature(0, 0), with_derivatives=True)
        given = pair.loss[:, None], np.log(pair.mass)[:, None], order
        return np.stack(log_excess_of_atoms(*given, rule))

    def _facts(self) -> np.ndarray:
        """Returns (4, ...): `log_kept`, the largest loss, and `errors`."""

        def facts(usable: np.ndarray, *setting: float) -> np.ndarray:
            if not usable.any():
                return np.zeros((4, len(usable)))
            pair = self._pair(*setting)
            log_kept = np.log1p(-pair.rate * pair.lost * (1 + 1e-9))
            largest = np.abs(pair.loss).max(initial=0.0)
            found = log_kept, largest, pair.mass_error, pair.ratio_error
            return usable * np.array(found)[:, None]

        usable = ~np.asarray(self.is_unprotected | self.loses_nothing)
        return by_setting(facts, 1.0 * usable, *self.kept_in_range().fields[1:])


# --- With against without the unit: bounds of W in convex order ---

# Bound of the relative error of two sums of up to 2^16 numbers in extended precision.
_SUM_ERROR = 2 * 2**16 * float(np.finfo(np.longdouble).eps)
# Bound of the error of rounding a sum and its logarithm: 18 units in the last place.
_ROUNDING = 4e-15


@functools.lru_cache(_CACHED)
def epoch_distribution(
    shift: float, slots: float, steps: float, above: float
) -> FinitePair:
    """Returns W of one setting as finitely many values, a bound in convex order."""
    found = lognormal_sum(round(steps), shift, above=above > 0)
    values, masses = found.atoms()
    idle = slots - steps
    ratio = (idle + values) / slots
    # What is truncated from P or Q is subtracted from both, and charged as infinite
    # loss.
    lost = max(found.lost, (found.infinite + idle * found.lost) / slots)
    whole = float(masses.sum())
    masses = masses / whole
    mean = float(np.sum(ratio * masses))
    ratio = ratio / mean
    loss, with_unit = np.log(ratio), ratio * masses
    mass_error = found.mass_error + found.place_error + abs(np.log(whole)) + _ROUNDING
    return FinitePair(
        loss,
        with_unit,
        (loss, *_profile(ratio, masses)),
        (-loss[::-1], *_profile(1 / ratio[::-1], with_unit[::-1])),
        lost,
        mass_error=float(mass_error),
        ratio_error=float(found.place_error + abs(np.log(mean)) + _ROUNDING),
    )


def _profile(ratio: np.ndarray, masses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``E(W - g)_+`` at all ratios g, and ``g P(W >= g)``."""
    above = _summed_from(masses)
    gained = above[1:] * np.diff(ratio)
    return np.append(_summed_from(gained), 0.0), ratio * above


def _summed_from(array: np.ndarray) -> np.ndarray:
    """Returns ``sum(array[i:])`` for every i."""
    return np.cumsum(array[::-1], dtype=np.longdouble)[::-1].astype(np.float64)


@dataclass(frozen=True)
class AllocatedBoundingLoss(BoundingLoss):
    """The bounding pair of `AllocatedGaussianLoss`."""

    is_symmetric: ClassVar[bool] = False
    _rounding: ClassVar[float] = _ROUNDING + _SUM_ERROR
    _pair = staticmethod(epoch_distribution)


@dataclass(frozen=True)
class AllocatedGaussianLoss(AllocatedLoss):
    """``W = ((slots - steps) + A_1 + ... + A_steps) / slots`` is P/Q."""

    is_symmetric: ClassVar[bool] = False
    _excess = staticmethod(sum_excess)
    _bounding: ClassVar[type[BoundingLoss]] = AllocatedBoundingLoss

    def largest_loss(self, *, backward: bool) -> Array:
        """See `PrivacyLoss`: W is at least ``(slots - steps) / slots``."""
        if not backward:
            return super().largest_loss(backward=backward)
        with np.errstate(divide="ignore"):
            least = (self.slots - self.steps) / self.slots
            return np.broadcast_to(-np.log(least), self.shape)

    def with_little_noise(self) -> SampledGaussianLoss:
        """See `PrivacyLoss`: the step is revealed."""
        return SampledGaussianLoss(self.outer_rate, self._drawn_rate, self.shift)


# --- A contribution that changes its sign: bounds of a convex profile D ---

_BASES = (1, 2, 4, 8, 16, 32)  # losses skipped by the chords of lower lines
_LAST_RATIO = 1e3  # lower bounds are 0 at this multiple of the last g, or before
_LEAST_SLOPE = 1e-300  # of the last line of lower bounds; positive


@functools.lru_cache(_CACHED)
def _bounding_rows(
    shift: float, slots: float, steps: float, above: float
) -> tuple[Rows, float]:
    """Returns a convex profile above or below D without its last value, and that."""
    u, low, high = profile_bounds(round(slots), round(steps), shift)
    # D decreases from 1. NaN is no bound.
    g, low, high = np.exp(u), np.fmax(low, 0.0), np.fmin(high, 1.0)
    low = low * (1 - GAIN_ROUNDING)
    high = np.minimum.accumulate(high) * (1 + GAIN_ROUNDING)
    # D is convex in g, so chords between upper bounds are upper bounds.
    ends = (g, high) if above > 0 else _below_chords(g, low, high)
    g, value = _convex(*ends)
    # The rounding error of the pair's probabilities.
    value = value * (1 + GAIN_ROUNDING if above > 0 else 1 - GAIN_ROUNDING)
    infinite = float(value[-1])
    # The rows of the profile given a finite loss.
    value = np.maximum(value - infinite, 0.0) / (1 - infinite)
    slope = np.maximum(-np.diff(value) / np.diff(g), 0.0)
    slope = np.maximum.accumulate(slope[::-1])[::-1]
    gained = slope * np.diff(g.astype(np.longdouble))
    scaled = g * np.append(slope[0], slope)
    return (np.log(g), np.append(_summed_from(gained), 0.0), scaled), infinite


def antipodal_pair(*fields: float) -> FinitePair:
    """Returns the symmetric pair of a bound of ``r D(1 + (g - 1)/r)``."""
    *setting, rate = fields
    rows, infinite = _bounding_rows(*setting)
    loss, _, scaled = rows
    mass = -np.diff(np.append(scaled * np.exp(-loss), 0.0))[1:]
    loss, kept = np.log1p(rate * np.expm1(loss[1:])), mass > 0
    loss, mass = loss[kept], mass[kept]
    return FinitePair(
        np.concatenate([-loss[::-1], loss]),
        np.concatenate([mass[::-1], mass * np.exp(loss)]),
        rows,
        rows,
        infinite,
        rate,
    )


def _mirrored(g: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Extends values to all 1/g, increasing, by ``D(g) = 1 - g + g D(1/g)``."""
    z = np.concatenate([1 / g[:0:-1], g])
    return z, np.concatenate([(1 - 1 / g + value / g)[:0:-1], value])


def _below_chords(
    g: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns corners of a function below D, from g = 1 on: two lines in each cell."""
    size = len(g)
    g, low = _mirrored(g, low)
    high = _mirrored(g[size - 1 :], high)[1]
    # D is convex: at each g its slope is at least that of any chord that ends there,
    # and at most that of any chord that starts there.
    slope, back = np.full(len(g), -np.inf), np.full(len(g), np.inf)
    for base in (base for base in _BASES if base < len(g)):
        run = g[base:] - g[:-base]
        slope[base:] = np.fmax(slope[base:], (low[base:] - high[:-base]) / run)
        back[:-base] = np.fmin(back[:-base], (high[base:] - low[:-base]) / run)
    g, low, slope, back = (x[size - 1 :] for x in (g, low, slope, back))
    # Slopes rise, so the lines that begin at a g are below D at all others too.
    slope, back = np.maximum.accumulate(slope), np.minimum.accumulate(back[::-1])[::-1]
    gaps, kept = np.diff(g), 1 - GAIN_ROUNDING
    for i in range(1, len(g)):
        low[i] = max(low[i], low[i - 1] * kept + slope[i - 1] * gaps[i - 1])
    for i in range(len(g) - 1, 0, -1):
        low[i - 1] = max(low[i - 1], low[i] * kept - back[i] * gaps[i - 1])
    left, right, start, end = g[:-2], g[1:-1], low[:-2], low[1:-1]
    from_left, from_right = slope[:-2], back[1:-1]
    bend = from_right - from_left
    with np.errstate(divide="ignore", invalid="ignore"):
        x = left + (start - end + from_right * (right - left)) / bend
    x = np.where(bend > 0, np.clip(x, left, right), right)
    y = np.maximum(start + from_left * (x - left), end + from_right * (x - right))
    # In the last cell and beyond it a single line down to 0; a steeper one is lower.
    least = float(low[-2] / (_LAST_RATIO * g[-1]))
    steepest = max(-float(slope[-2]), least, _LEAST_SLOPE)
    last = g[-2] + low[-2] / steepest
    places = np.concatenate([g[:-1], x, [last]])
    values = np.concatenate([low[:-1], np.maximum(y, 0.0), [0.0]])
    order = np.argsort(places, kind="stable")
    return places[order], values[order]


def _convex(g: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the corners of the convex hull from below of points and mirror images."""
    z, y = _mirrored(g, value)
    corners = lower_hull(z, y)
    kept = corners[corners >= len(g) - 1]
    # g = 1 need not be a corner
    x, top = z[kept], y[kept]
    if x[0] > 1:
        before = corners[z[corners] < 1][-1]
        share = (1 - z[before]) / (x[0] - z[before])
        at_one = y[before] + share * (top[0] - y[before])
        x, top = np.append(1.0, x), np.append(at_one, top)
    return x, top


@dataclass(frozen=True)
class AllocatedAntipodalBoundingLoss(BoundingLoss):
    """The bounding pair of `AllocatedAntipodalLoss`."""

    inner_rate: Array  # see `AllocatedAntipodalLoss`
    is_symmetric: ClassVar[bool] = True
    _rounding: ClassVar[float] = 8e-15
    _pair = staticmethod(antipodal_pair)

    @classmethod
    def _excess(cls, direction: str, order: np.ndarray, *setting: float) -> np.ndarray:
        """At the ends of the range of shifts the moments without allocation."""
        shift, rate = setting[0], setting[-1]
        if SMALLEST_SHIFT < shift < LARGEST_SHIFT:
            return super()._excess(direction, order, *setting)
        # ``rate (M - 1)``, M the moment of a shift of 2s (Jensen).
        square = 2 * shift * shift
        slope = square * (1 + 2 * order)
        excess = excess_of(square * order * (1 + order), slope, 2 * square, True)
        return np.stack([np.log(rate) + excess[0], *excess[1:]])


@dataclass(frozen=True)
class AllocatedAntipodalLoss(AllocatedLoss):
    """The pair with the profile ``r D_t(1 + (g - 1)/r)`` in both directions."""

    inner_rate: Array  # r in [0, 1], sampling below the allocated level
    is_symmetric: ClassVar[bool] = True
    _excess = staticmethod(antipodal_excess)
    _bounding: ClassVar[type[BoundingLoss]] = AllocatedAntipodalBoundingLoss

    def with_little_noise(self) -> AntipodalGaussianLoss:
        """See `PrivacyLoss`: the step is revealed."""
        inner, drawn = self.inner_rate, self._drawn_rate
        return AntipodalGaussianLoss(self.outer_rate, drawn, inner, self.shift)
