"""Random allocation where a contribution changes its sign."""
# Under replace_one, and of episodes. Reference: docs/proofs.md, "Random allocation";
# Balle, Barthe, Gaboardi (2018), arXiv:1807.01647v2, Theorem 2.

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxdp_episodic.accountant.losses.allocated import (
    LARGEST_SHIFT,
    SMALLEST_SHIFT,
    AllocatedLoss,
    by_setting,
)
from jaxdp_episodic.accountant.losses.allocated_bounds import (
    BoundingLoss,
    tails_between,
)
from jaxdp_episodic.accountant.losses.allocated_moments import antipodal_excess
from jaxdp_episodic.accountant.losses.antipodal_bounds import (
    PiecewiseLinearPair,
    antipodal_bounding_pair,
)
from jaxdp_episodic.accountant.losses.gaussian import drawn_tails, inner_exponent
from jaxdp_episodic.accountant.losses.gaussian_mixtures import AntipodalGaussianLoss
from jaxdp_episodic.accountant.losses.privacy_loss import Tails
from jaxdp_episodic.accountant.losses.protocols import Profile
from jaxdp_episodic.accountant.numerics.loops import Array
from jaxdp_episodic.accountant.numerics.power_excess import log_expm1


@dataclass(frozen=True)
class AllocatedAntipodalLoss(AllocatedLoss):
    """``r D_t(1 + (g - 1)/r)`` in both directions."""

    inner_rate: Array  # r in [0, 1], below the level that is allocated
    shift: Array  # s >= 0, the clip norm over the noise
    slots: Array  # t, whole number, the steps of an epoch
    steps: Array  # j, whole number, 2 <= j <= t, those that are run
    is_symmetric: ClassVar[bool] = True
    _excess = staticmethod(antipodal_excess)

    def certified(self, *, up: bool) -> Profile:
        """The finite pair of a convex function above or below the profile."""
        return self.bounding_pair(AllocatedAntipodalBoundingLoss, up=up)

    def with_little_noise(self) -> AntipodalGaussianLoss:
        """The slot revealed: see `AllocatedLoss`."""
        inner, drawn = self.inner_rate, self._drawn_rate
        return AntipodalGaussianLoss(self.outer_rate, drawn, inner, self.shift)


@dataclass(frozen=True)
class AllocatedAntipodalBoundingLoss(BoundingLoss):
    """``r D(1 + (g - 1)/r)`` in both directions, D of `antipodal_bounding_pair`."""

    inner_rate: Array  # see `AllocatedAntipodalLoss`
    shift: Array  # s > 0
    slots: Array  # see `AllocatedAntipodalLoss`
    steps: Array  # see `AllocatedAntipodalLoss`
    above: Array  # see `BoundingLoss`
    is_symmetric: ClassVar[bool] = True
    _rounding: ClassVar[float] = 8e-15

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """Of the finite pair."""
        u, rate, *fields = np.broadcast_arrays(u, *self.fields[1:])
        inner = np.minimum(inner_exponent(u, rate), 1e300)
        profile, tail = by_setting(_pair_tails, inner, *fields)
        tails = drawn_tails((profile, tail), u, rate)
        return tails, tails

    @classmethod
    def _excess(cls, direction: str, order: np.ndarray, *setting: float) -> np.ndarray:
        """At the ends of the range as without sampling."""
        rate, shift = setting[:2]
        if not SMALLEST_SHIFT < shift < LARGEST_SHIFT:
            return _unsampled_excess(order, rate, shift)
        return super()._excess(direction, order, *setting)

    @staticmethod
    def _atoms(rate: float, *setting: float) -> tuple[np.ndarray, np.ndarray]:
        """Losses but for 0."""
        pair = _pair(*setting)
        mass = -np.diff(np.append(pair.scaled * np.exp(-pair.loss), 0.0))[1:]
        loss, kept = np.log1p(rate * np.expm1(pair.loss[1:])), mass > 0
        loss, mass = loss[kept], mass[kept]
        both = np.concatenate([-loss[::-1], loss])
        return both, np.concatenate([mass[::-1], mass * np.exp(loss)])

    @classmethod
    def _facts_of_setting(cls, rate: float, *setting: float) -> tuple[float, ...]:
        loss, mass = cls._atoms(rate, *setting)
        gap = float(np.sum(np.diff(loss) * mass[1:]))
        lost = float(np.log1p(-rate * _pair(*setting).infinite * (1 + 1e-9)))
        return lost, gap, float(loss.max(initial=0.0)), 0.0, 0.0


def _unsampled_excess(z: np.ndarray, rate: float, shift: float) -> np.ndarray:
    """``rate (M - 1)``, M of a shift of 2s, with derivatives over it (Jensen)."""
    growth = 2 * shift * shift
    with np.errstate(over="ignore"):
        share = 1 / -np.expm1(-growth * z * (1 + z))
    slope = growth * (1 + 2 * z)
    excess = np.log(rate) + log_expm1(growth * z * (1 + z))
    return np.stack([excess, slope * share, (2 * growth + slope**2) * share])


def _pair(
    shift: float, slots: float, steps: float, above: float
) -> PiecewiseLinearPair:
    return antipodal_bounding_pair(round(slots), round(steps), shift, above=above > 0)


def _pair_tails(u: np.ndarray, *setting: float) -> np.ndarray:
    """Both rows of `log_tails` at r = 1."""
    pair = _pair(*setting)
    return np.stack(tails_between(u, pair.loss, pair.profile, pair.scaled))
