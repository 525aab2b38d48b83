"""What the losses of random allocation share."""
# Profiles and moments are bounds, made by NumPy setting by setting: see docs/proofs.md,
# "Random allocation".

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from jaxdp_episodic.accountant.losses.allocated_moments import sum_excess
from jaxdp_episodic.accountant.losses.finite import log_excess_of_atoms
from jaxdp_episodic.accountant.losses.gaussian import GaussianLoss, scaled
from jaxdp_episodic.accountant.losses.privacy_loss import (
    BoundingPair,
    Bounds,
    Hints,
    MomentRule,
    Profile,
    Quadrature,
    Tails,
)
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.numerics.convex_sums import lognormal_sum
from jaxdp_episodic.accountant.numerics.loops import Array

# Shifts that pairs are made for: noise of 1e4 and of 0.1 clip norms. Less noise counts
# as none, more as 1e4.
SMALLEST_SHIFT = 1e-4
LARGEST_SHIFT = 10.0


@dataclass(frozen=True)
class AllocatedLoss(GaussianLoss, Bounds):
    """Base: a unit in one secret slot of ``slots``, of which ``steps`` >= 2 are run."""

    # Maps direction, orders less one (m,) and the fields of one setting to (3, m): the
    # log-excess and two derivatives.
    _excess: ClassVar[Callable[..., np.ndarray]]
    compiles: ClassVar[bool] = False

    @property
    def _slots(self) -> Array:
        return self.__dict__["slots"]

    @property
    def _steps(self) -> Array:
        return self.__dict__["steps"]

    @property
    def _drawn_rate(self) -> Array:
        """Chance that the unit's slot is run: the rate of `with_little_noise`."""
        # With the slot revealed an epoch is a Poisson draw at this rate, and H_g is
        # jointly convex. Its losses are at most log(slots) above the epoch's.
        return np.minimum(self._steps / np.maximum(self._slots, 1.0), 1.0)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """*Upper bounds*: those of the pair that the upper certified ends are of."""
        pair: Any = self.kept_in_range().certified(up=True)
        mass_error, loss_error = pair.certified_error()
        log_kept, below = pair.log_kept(), np.maximum(loss_error - u, 0.0)
        with np.errstate(divide="ignore"):
            # H_g of g below 1 is at most 1 - g more than that of 1.
            rest = np.logaddexp(np.log(-np.expm1(log_kept)), np.log(below))
            forward, backward = (
                (np.logaddexp(profile + mass_error + log_kept, rest), tail)
                for profile, tail in pair.log_tails(np.maximum(u - loss_error, 0.0))
            )
        return forward, backward

    def bounding_pair(self, bounding: Callable[..., Profile], *, up: bool) -> Profile:
        """`Bounds.certified`, of a class with these fields and ``above``."""
        kept = self.kept_in_range()
        # Shifts that are too small: up to the smallest, down to 0.
        raised = np.where(self._shift > 0, np.maximum(self._shift, kept._shift), 0.0)
        shift = raised if up else np.where(raised > self._shift, 0.0, self._shift)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields |= {"shift": shift, "slots": kept._slots, "steps": kept._steps}
        return bounding(**fields, above=np.full(self.shape, 1.0 * up))

    def kept_in_range(self) -> Self:
        """Returns numbers that pairs can be made of, none of less privacy loss."""
        steps = np.maximum(self._steps, 2.0)
        return dataclasses.replace(
            super().kept_in_range(),
            # Beyond the largest the step is unprotected, and nothing is computed.
            shift=np.clip(self._shift, SMALLEST_SHIFT, LARGEST_SHIFT),
            steps=steps,
            slots=np.maximum(self._slots, steps),
        )

    @property
    def is_unprotected(self) -> Array:
        """Where there is (nearly) no noise: less than pairs are made for."""
        return ~self.loses_nothing & (self._shift > LARGEST_SHIFT)

    def hints(self) -> Hints:
        """As many Poisson draws at rate 1 / slots."""
        rate = self._inner_rate / self._slots
        return Hints(rate * np.sqrt(self._steps), rate, self._shift, self._shift)

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `PrivacyLoss`."""
        excess = functools.partial(self._excess, rule.direction)
        found = by_setting(excess, t, *self.fields[1:])
        return tuple(found[: 3 if rule.with_derivatives else 1])


def by_setting(
    function: Callable[..., np.ndarray], u: np.ndarray, *fields: np.ndarray
) -> np.ndarray:
    """(k, ..., n): ``function(u, *setting)`` of the elements of each setting."""
    arrays = np.broadcast_arrays(u, *fields)
    flat = [np.asarray(a, np.float64).reshape(-1) for a in arrays]
    rows = np.stack(flat[1:])
    # Elements of a setting are mostly neighbours: one of each run is looked at.
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


# Reference: docs/proofs.md, "Random allocation"; Chua et al. (2024), arXiv:2412.16802;
# Feldman and Shenfeld (2025), arXiv:2502.08202, for the pair.


@dataclass(frozen=True)
class AllocatedGaussianLoss(AllocatedLoss):
    """``W = ((slots - steps) + A_1 + ... + A_steps) / slots``."""

    shift: Array  # s >= 0
    slots: Array  # t, whole number, the steps of an epoch
    steps: Array  # j, whole number, 2 <= j <= t, those that are run
    is_symmetric: ClassVar[bool] = False
    _excess = staticmethod(sum_excess)

    def certified(self, *, up: bool) -> Profile:
        """A finite pair that dominates this one, or is dominated, by convex order."""
        return self.bounding_pair(AllocatedBoundingLoss, up=up)

    def largest_loss(self, *, backward: bool) -> Array:
        """For a part of an epoch: W is at least ``(slots - steps) / slots``."""
        if not backward:
            return super().largest_loss(backward=backward)
        with np.errstate(divide="ignore"):
            least = (self.slots - self.steps) / self.slots
            return np.broadcast_to(-np.log(least), self.shape)

    def with_little_noise(self) -> SampledGaussianLoss:
        """The slot revealed: see `AllocatedLoss`."""
        return SampledGaussianLoss(self.outer_rate, self._drawn_rate, self.shift)


# They hold in any composition (docs/proofs.md, "Random allocation").

# Distributions that are kept.
_CACHED = 256
# Summands of a block: sums are formed block by block, in extended precision.
_BLOCK = 256
# Bound of the relative error of such sums of up to 2^16 masses.
_SUM_ERROR = 2 * (_BLOCK + 2**16 / _BLOCK) * float(np.finfo(np.longdouble).eps)
# Bound of that of rounding a sum and its logarithm: 18 units in the last place.
_ROUNDING = 4e-15
# Bound of the error of a loss over 1 + its size: a logarithm of a rounded ratio.
_LOSS_ERROR = 4e-16
# Spacing of the finest useful lattice over the mean gap between losses, of lower
# bounds, where cells with hardly a loss waste mass; and of upper ones.
_SPACING_BELOW = 3.2
_SPACING_ABOVE = 0.5
# Number of losses from which moments are computed.
_FEW_LOSSES = 512


class BoundingLoss(AllocatedLoss, BoundingPair):
    """Base: ``above`` is 1 where it dominates, 0 where it is dominated."""

    may_have_atoms: ClassVar[bool] = True
    # Map the fields of one setting to the losses and their masses under P, forward, and
    # to `_facts`.
    _atoms: ClassVar[Callable[..., tuple[np.ndarray, np.ndarray]]]
    _facts_of_setting: ClassVar[Callable[..., tuple[float, ...]]]
    # Relative rounding error of the profiles.
    _rounding: ClassVar[float]

    def certified(self, *, up: bool) -> Self:
        """See `Bounds`."""
        above = np.full(self.shape, 1.0 * up)
        return dataclasses.replace(self, **{"above": above})

    @property
    def _above(self) -> Array:
        return self.__dict__["above"]

    def log_kept(self) -> Array:
        """Of the mass that is truncated and charged as an infinite loss."""
        return np.log1p(self.outer_rate * np.expm1(self._facts()[0]))

    def least_spacing(self) -> Array:
        """In proportion to the mean gap between neighbouring losses."""
        return (
            np.where(self._above > 0, _SPACING_ABOVE, _SPACING_BELOW) * self._facts()[1]
        )

    def certified_error(self) -> tuple[Array, Array]:
        """See `BoundingPair`."""
        return tuple(self._facts()[3:])

    def profile_error(self) -> Array:
        """See `Profile`."""
        return np.full(self.shape, self._rounding)

    def tail_displacement(self, u: Array) -> Array:
        """The losses are logarithms, rounded, and so are inverse ratios."""
        return np.zeros_like(u) + _LOSS_ERROR * (1 + self._facts()[2])

    @classmethod
    def _excess(cls, direction: str, order: np.ndarray, *setting: float) -> np.ndarray:
        """Of a dominating pair with fewer losses."""
        loss, mass = coarse(*cls._atoms(*setting))
        rule = MomentRule(direction, Quadrature(0, 0), with_derivatives=True)
        given = loss[:, None], np.log(mass)[:, None], order
        return np.stack(log_excess_of_atoms(*given, rule))

    def _facts(self) -> np.ndarray:
        """``(5, ...)``: `log_kept`, mean gap, largest loss, `certified_error`."""

        def facts(usable: np.ndarray, *setting: float) -> np.ndarray:
            if not usable.any():
                return np.zeros((5, len(usable)))
            return usable * np.array(self._facts_of_setting(*setting))[:, None]

        usable = ~np.asarray(self.is_unprotected | self.loses_nothing)
        return by_setting(facts, 1.0 * usable, *self.kept_in_range().fields[1:])


@dataclass(frozen=True)
class AllocatedBoundingLoss(BoundingLoss):
    """The finite pair from which the certified ends of an epoch are computed."""

    shift: Array  # s > 0
    slots: Array  # t, whole number, the steps of an epoch
    steps: Array  # j, whole number, 2 <= j <= t, those that are run
    above: Array  # see `BoundingLoss`
    is_symmetric: ClassVar[bool] = False
    _rounding: ClassVar[float] = _ROUNDING + _SUM_ERROR

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """Of the finite pair as computed, up to `certified_error`."""
        u, outer, *fields = np.broadcast_arrays(u, *self.fields)
        found = by_setting(_tails, u, *fields)
        return scaled((found[0], found[1]), outer), scaled((found[2], found[3]), outer)

    @staticmethod
    def _atoms(*setting: float) -> tuple[np.ndarray, np.ndarray]:
        dist = epoch_distribution(*setting)
        return dist.loss, dist.with_unit

    @staticmethod
    def _facts_of_setting(*setting: float) -> tuple[float, ...]:
        dist = epoch_distribution(*setting)
        gap = float(np.sum(np.diff(dist.loss) * dist.with_unit[1:]))
        largest = float(np.abs(dist.loss[[0, -1]]).max())
        return dist.log_kept, gap, largest, dist.mass_error, dist.ratio_error


class EpochDistribution(NamedTuple):
    """Losses, and the rows that tails are read from; (n,) each."""

    loss: np.ndarray  # ascending
    with_unit: np.ndarray  # masses under P
    forward: tuple[np.ndarray, np.ndarray]
    backward: tuple[np.ndarray, np.ndarray]
    log_kept: float  # see `PrivacyLoss.log_kept`
    mass_error: float  # of the logarithm of profiles; see `certified_error`
    ratio_error: float  # of log g


@functools.lru_cache(_CACHED)
def epoch_distribution(
    shift: float, slots: float, steps: float, above: float
) -> EpochDistribution:
    """W of one setting as finitely many atoms, above or below in convex order."""
    found = lognormal_sum(round(steps), shift, above=above > 0)
    idle = slots - steps
    ratio, masses = (idle + found.values) / slots, found.masses
    # Mass truncated of P or Q is subtracted from both, and charged as an infinite loss.
    lost = max(found.lost, (found.infinite + idle * found.lost) / slots)
    whole = float(masses.sum())
    masses = masses / whole
    mean = float(np.sum(ratio * masses))
    ratio = ratio / mean
    loss = np.log(ratio)
    with_unit = ratio * masses
    mass_error = found.mass_error + found.place_error + abs(np.log(whole)) + _ROUNDING
    return EpochDistribution(
        loss,
        with_unit,
        _profile(ratio, masses),
        _profile(1 / ratio[::-1], with_unit[::-1]),
        float(np.log1p(-lost * (1 + 1e-9))),
        float(mass_error),
        float(found.place_error + abs(np.log(mean)) + _ROUNDING),
    )


def coarse(loss: np.ndarray, with_unit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A dominating pair of few losses, with masses under P."""
    chosen = np.linspace(0, len(loss) - 1, min(_FEW_LOSSES, len(loss))).round()
    few, ratio = np.exp(loss[chosen.astype(np.intp)]), np.exp(loss)
    cell = np.clip(np.searchsorted(few, ratio, side="right") - 1, 0, len(few) - 2)
    share = np.clip((ratio - few[cell]) / np.diff(few)[cell], 0.0, 1.0)
    mass = with_unit / ratio
    masses = np.bincount(cell, mass * (1 - share), len(few))
    masses += np.bincount(cell + 1, mass * share, len(few))
    kept = masses > 0
    return np.log(few[kept]), (masses * few)[kept]


def _profile(ratio: np.ndarray, masses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``E(W - g)_+`` at all ratios g, and ``g P(W >= g)``; sums of what is positive."""
    above = _summed_from(masses)
    gained = above[1:] * np.diff(ratio)
    return np.append(_summed_from(gained), 0.0), ratio * above


def _summed_from(array: np.ndarray) -> np.ndarray:
    """``sum(array[i:])`` at every i."""
    size = len(array)
    padded = np.pad(array[::-1], (0, -size % _BLOCK))
    blocks = padded.astype(np.longdouble).reshape(-1, _BLOCK)
    blocks = np.cumsum(blocks, axis=1)
    before = np.append(np.longdouble(0), np.cumsum(blocks[:-1, -1]))
    sums = (blocks + before[:, None]).reshape(-1)[:size][::-1]
    return sums.astype(np.float64)


def _tails(u: np.ndarray, *setting: float) -> np.ndarray:
    """The four rows of `log_tails`."""
    dist = epoch_distribution(*setting)
    forward = tails_between(u, dist.loss, *dist.forward)
    return np.stack([*forward, *tails_between(u, -dist.loss[::-1], *dist.backward)])


def tails_between(
    u: np.ndarray, loss: np.ndarray, profile: np.ndarray, scaled: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Tails at u (m,): profiles are linear in e^u between losses, 0 beyond the last."""
    above = np.searchsorted(loss, u, side="right")
    beyond = above == len(loss)
    above = np.minimum(above, len(loss) - 1)
    gap = np.minimum(u - loss[above], 0.0)
    with np.errstate(divide="ignore"):
        value = np.log(profile[above] - scaled[above] * np.expm1(gap))
        tail = np.log(scaled[above]) + gap
    return np.where(beyond, -np.inf, value), np.where(beyond, -np.inf, tail)
