"""Finite pairs that bound an epoch in which a contribution may flip its sign.

Reference: docs/proofs.md, "Random allocation".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxdp_episodic.accountant.losses.allocated import LARGEST_SHIFT, SMALLEST_SHIFT
from jaxdp_episodic.accountant.losses.allocated_bounds import (
    BoundingLoss,
    tails_between,
)
from jaxdp_episodic.accountant.losses.allocation_tables import by_setting
from jaxdp_episodic.accountant.losses.antipodal_bounds import (
    PiecewiseLinearPair,
    antipodal_bounding_pair,
)
from jaxdp_episodic.accountant.losses.gaussian import drawn_tails, inner_exponent
from jaxdp_episodic.accountant.losses.privacy_loss import Tails
from jaxdp_episodic.accountant.numerics.loops import Array, namespace, on_host
from jaxdp_episodic.accountant.numerics.power_excess import log_expm1


@dataclass(frozen=True)
class AllocatedAntipodalBoundingLoss(BoundingLoss):
    """``r D(1 + (g - 1)/r)`` in both directions, D of `antipodal_bounding_pair`.

    Attributes:
      outer_rate: see `PrivacyLoss`; always 1.
      inner_rate: r in [0, 1], below the level that is allocated.
      shift: s > 0.
      bins: t, whole number.
      taken: j, whole number, 2 <= j <= t.
      above: see `BoundingLoss`.
    """

    inner_rate: Array
    shift: Array
    bins: Array
    taken: Array
    above: Array
    is_symmetric: ClassVar[bool] = True
    _rounding: ClassVar[float] = 8e-15

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """Of the finite pair."""
        xp = namespace(u, *self.fields)
        u, r, *fields = xp.broadcast_arrays(u, *self.fields[1:])

        def rows(*arrays: np.ndarray) -> np.ndarray:
            return by_setting(_tails, *arrays)

        inner = xp.minimum(inner_exponent(u, r), 1e300)
        found = on_host(rows, u.shape, inner, *fields, number=2)
        tails = drawn_tails((found[0], found[1]), u, r)
        return tails, tails

    @classmethod
    def _excess(cls, direction: str, order: np.ndarray, *setting: float) -> np.ndarray:
        """At the ends of the range as without sampling."""
        rate, shift = setting[:2]
        if not SMALLEST_SHIFT < shift < LARGEST_SHIFT:
            return _unsampled(order, rate, shift)
        return super()._excess(direction, order, *setting)

    @staticmethod
    def _atoms(rate: float, *setting: float) -> tuple[np.ndarray, np.ndarray]:
        """Losses but for 0."""
        pair = _pair(*setting)
        mass = -np.diff(np.append(pair.scaled * np.exp(-pair.loss), 0.0))[1:]
        mass = np.maximum(mass, 0.0)
        loss = np.log1p(rate * np.expm1(pair.loss[1:]))
        kept = mass > 0
        loss, mass = loss[kept], mass[kept]
        both = np.concatenate([-loss[::-1], loss])
        return both, np.concatenate([mass[::-1], mass * np.exp(loss)])

    @staticmethod
    def _facts_of_setting(rate: float, *setting: float) -> tuple[float, ...]:
        loss, mass = AllocatedAntipodalBoundingLoss._atoms(rate, *setting)
        gap = float(np.sum(np.diff(loss) * mass[1:]))
        lost = float(np.log1p(-rate * _pair(*setting).infinite * (1 + 1e-9)))
        return lost, gap, float(loss.max(initial=0.0)), 0.0, 0.0


def _unsampled(z: np.ndarray, rate: float, shift: float) -> np.ndarray:
    """``rate (M - 1)``, M of a shift of 2s, with derivatives over it (Jensen)."""
    growth = 2 * shift * shift
    with np.errstate(over="ignore"):
        share = 1 / -np.expm1(-growth * z * (1 + z))
    slope = growth * (1 + 2 * z)
    excess = np.log(rate) + log_expm1(growth * z * (1 + z))
    return np.stack([excess, slope * share, (2 * growth + slope**2) * share])


def _pair(shift: float, bins: float, taken: float, above: float) -> PiecewiseLinearPair:
    return antipodal_bounding_pair(round(bins), round(taken), shift, above=above > 0)


def _tails(u: np.ndarray, *setting: float) -> np.ndarray:
    """Both rows of `log_tails` at r = 1."""
    pair = _pair(*setting)
    return np.stack(tails_between(u, pair.loss, pair.profile, pair.scaled))
