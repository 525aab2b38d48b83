"""One epoch that may turn around as a finite law: what its certified ends rest on.

Reference: docs/proofs.md, "Random allocation".
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxdp_episodic.losses.allocated import (
    LARGEST_SHIFT,
    SMALLEST_SHIFT,
    AllocatedLoss,
)
from jaxdp_episodic.losses.allocated_law import coarse, tails_between
from jaxdp_episodic.losses.allocation_tables import by_setting
from jaxdp_episodic.losses.antipodal_law import AntipodalLaw, antipodal_law
from jaxdp_episodic.losses.finite import log_excess_of_atoms
from jaxdp_episodic.losses.gaussian import drawn_tails, inner_exponent
from jaxdp_episodic.losses.privacy_loss import Tails
from jaxdp_episodic.numerics.loops import Array, namespace, on_host
from jaxdp_episodic.numerics.power_excess import log_expm1

_ROUNDING, _MOVE, _GRAIN = 8e-15, 4e-16, 0.5


@dataclass(frozen=True)
class AllocatedAntipodalLawLoss(AllocatedLoss):
    """``r D(1 + (g - 1)/r)`` in both directions, D of `antipodal_law`.

    Attributes:
      outer_rate: see `PrivacyLoss`; always 1.
      inner_rate: r in [0, 1], below the level that is allocated.
      shift: s > 0.
      bins: t, whole number.
      taken: j, whole number, 2 <= j <= t.
      above: 1 for the law above, 0 for the one below.
    """

    inner_rate: Array
    shift: Array
    bins: Array
    taken: Array
    above: Array
    rate_fields: ClassVar[tuple[str, ...]] = ("outer_rate", "inner_rate")
    is_estimate: ClassVar[bool] = False
    may_have_atoms: ClassVar[bool] = True
    has_nodes: ClassVar[bool] = False
    methods: ClassVar[tuple[str, ...]] = ("rdp", "pld")

    def certified(self, *, up: bool) -> AllocatedAntipodalLawLoss:
        """See `PrivacyLoss`."""
        return dataclasses.replace(self, above=np.full(np.shape(self.above), 1.0 * up))

    def log_kept(self) -> Array:
        """But for what is cut off."""
        return self._facts()[0]

    def grain(self) -> Array:
        """Half of what neighbouring losses are apart, in the mean."""
        return self._facts()[1]

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """Of the law that is computed with."""
        xp = namespace(u, *self.fields)
        u, r, *fields = xp.broadcast_arrays(u, *self.fields[1:])

        def rows(*arrays: np.ndarray) -> np.ndarray:
            return by_setting(_tails, *arrays)

        inner = xp.minimum(inner_exponent(u, r), 1e300)
        found = on_host(rows, u.shape, inner, *fields, number=2)
        tails = drawn_tails((found[0], found[1]), u, r)
        return tails, tails

    def profile_error(self) -> Array:
        """See `PrivacyLoss`."""
        return np.full(self.shape, _ROUNDING)

    def tail_displacement(self, u: Array) -> Array:
        """The losses are logarithms, rounded."""
        return namespace(u).zeros_like(u) + _MOVE * (1 + self._facts()[2])

    @staticmethod
    def _excess(
        direction: str, order: np.ndarray, rate: float, *setting: float
    ) -> np.ndarray:
        """Of a coarser law, above; at the ends of the range as without sampling."""
        if not SMALLEST_SHIFT < setting[0] < LARGEST_SHIFT:
            return _unsampled(order, rate, setting[0])
        loss, mass = _atoms(_law(*setting), rate)
        loss, mass = coarse(loss, mass)
        given = loss[:, None], np.log(mass)[:, None], order, direction
        return np.stack(log_excess_of_atoms(*given, with_derivatives=True))

    def _facts(self) -> np.ndarray:
        """``(3, ...)``: `log_kept`, `grain`, the largest loss."""

        def facts(usable: np.ndarray, rate: float, *setting: float) -> np.ndarray:
            if not usable.any():
                return np.zeros((3, len(usable)))
            law = _law(*setting)
            loss, mass = _atoms(law, rate)
            gap = float(np.diff(loss) @ mass[1:])
            lost = np.log1p(-rate * law.infinite * (1 + 1e-9))
            return usable * np.array([[lost], [_GRAIN * gap], [loss.max(initial=0.0)]])

        # Settings that no law is made for have none to be wrong.
        kept = self.kept_in_range()
        usable = ~np.asarray(self.is_unprotected | self.loses_nothing)
        return by_setting(facts, 1.0 * usable, *kept.fields[1:])


def _unsampled(z: np.ndarray, rate: float, shift: float) -> np.ndarray:
    """``rate (M - 1)``, M of a shift of 2s, with derivatives over it (Jensen)."""
    growth = 2 * shift * shift
    with np.errstate(over="ignore"):
        share = 1 / -np.expm1(-growth * z * (1 + z))
    slope = growth * (1 + 2 * z)
    excess = np.log(rate) + log_expm1(growth * z * (1 + z))
    return np.stack([excess, slope * share, (2 * growth + slope**2) * share])


def _law(shift: float, bins: float, taken: float, above: float) -> AntipodalLaw:
    return antipodal_law(round(bins), round(taken), shift, above=above > 0)


def _atoms(law: AntipodalLaw, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Losses but for 0, increasing, and their masses under P."""
    mass = -np.diff(np.append(law.scaled * np.exp(-law.loss), 0.0))[1:]
    mass = np.maximum(mass, 0.0)
    loss = np.log1p(rate * np.expm1(law.loss[1:]))
    kept = mass > 0
    loss, mass = loss[kept], mass[kept]
    both = np.concatenate([-loss[::-1], loss])
    return both, np.concatenate([mass[::-1], mass * np.exp(loss)])


def _tails(u: np.ndarray, *setting: float) -> np.ndarray:
    """Both rows of `log_tails` at r = 1."""
    law = _law(*setting)
    return np.stack(tails_between(u, law.loss, law.profile, law.scaled))
