"""Finite pairs that bound one epoch of random allocation from both sides."""
# They hold in any composition (docs/proofs.md, "Random allocation").

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np

from jaxdp_episodic.accountant.losses.allocated import AllocatedLoss, by_setting
from jaxdp_episodic.accountant.losses.finite import log_excess_of_atoms
from jaxdp_episodic.accountant.losses.gaussian import scaled
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule, Quadrature, Tails
from jaxdp_episodic.accountant.losses.protocols import BoundingPair
from jaxdp_episodic.accountant.numerics.convex_sums import lognormal_sum
from jaxdp_episodic.accountant.numerics.loops import Array

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
