"""Random allocation, the sign of a contribution flipped: replace_one, and episodes.

``D_t(g) = H_g(P_s || P_-s)``, ``P_v = sum_{i<=j} N(v e_i)/t + (1 - j/t) N(0)`` on R^j:
a contribution at a secret step of an epoch against the opposite one. With r the chance
that the protected unit is reached in that step, both directions are

    h(g) = r D_t(1 + (g - 1)/r).

With the A and B of `numerics.skewed_sums`, ``t D_t(g) = E(sum A - g sum B + (1 - g)
(t - j))_+``. Under zero_out it is an upper bound. Certified ends are those of finite
pairs that bound it.

Reference: docs/proofs.md, "Random allocation"; Balle, Barthe, Gaboardi (2018),
arXiv:1807.01647v2, Theorem 2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxdp_episodic.accountant.losses.allocated import (
    LARGEST_SHIFT,
    SMALLEST_SHIFT,
    Asked,
    TabulatedAllocation,
    nodes_from,
    tails_from,
)
from jaxdp_episodic.accountant.losses.allocated_bounds import (
    BoundingLoss,
    tails_between,
)
from jaxdp_episodic.accountant.losses.allocated_moments import antipodal_excess
from jaxdp_episodic.accountant.losses.allocation_tables import (
    antipodal_table,
    by_setting,
    prepare_antipodal,
)
from jaxdp_episodic.accountant.losses.antipodal_bounds import (
    PiecewiseLinearPair,
    antipodal_bounding_pair,
)
from jaxdp_episodic.accountant.losses.gaussian import drawn_tails, inner_exponent
from jaxdp_episodic.accountant.losses.gaussian_mixtures import AntipodalGaussianLoss
from jaxdp_episodic.accountant.losses.loss_nodes import LossNodes, NodeRule
from jaxdp_episodic.accountant.losses.privacy_loss import Tails
from jaxdp_episodic.accountant.losses.protocols import Profile
from jaxdp_episodic.accountant.numerics.chebyshev_tables import Table
from jaxdp_episodic.accountant.numerics.loops import Array, namespace, on_host
from jaxdp_episodic.accountant.numerics.power_excess import log_expm1
from jaxdp_episodic.accountant.numerics.skewed_terms import gauss

# Number of losses at which the range of a distribution is looked for.
_TRIED = 400
# Share of a table over which the slope at its end is measured.
_TANGENT = 1e-3
# Gauss-Legendre nodes of a panel, and of those of nodes that check others.
_PANEL_NODES = 16
_CHECKING_PANEL_NODES = 32
# Error of the mass of P and Q above which a distribution is not used.
_MASS_ERROR = 1e-5


@dataclass(frozen=True)
class AllocatedAntipodalLoss(TabulatedAllocation):
    """``r D_t(1 + (g - 1)/r)`` in both directions.

    Attributes:
      outer_rate: see `PrivacyLoss`; always 1.
      inner_rate: r in [0, 1], below the level that is allocated.
      shift: s >= 0, the clip norm over the noise.
      slots: t, whole number, the steps of an epoch.
      steps: j, whole number, 2 <= j <= t, those that are run.
    """

    inner_rate: Array
    shift: Array
    slots: Array
    steps: Array
    is_symmetric: ClassVar[bool] = True
    # CPU time of an epsilon, 10 slots: 0.1 s at 2, 0.75 s at 6.3, 3.4 s at 9.95.
    slow_shift: ClassVar[float] = 4.5

    def certified(self, *, up: bool) -> Profile:
        """The finite pair of a convex function above or below the profile."""
        return self.bounding_pair(AllocatedAntipodalBoundingLoss, up=up)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """By tables; their relative error is `profile_error`, an estimate."""
        xp = namespace(u, *self.fields)
        u, r, s, t, j = xp.broadcast_arrays(u, *self.fields[1:])
        j = xp.maximum(j, 2.0)  # where none is run nobody asks
        t = xp.maximum(t, j)
        profile, tail = _drawn_tails(_tails, u, r, s, t, j)
        return tails_from(xp.stack([profile, tail, profile, tail]))

    def profile_error_at(self, u: Array) -> Array:
        """Larger at large u: sums of a few terms of little weight lose digits there."""

        def error(v: np.ndarray, s: float, t: float, j: float) -> np.ndarray:
            return antipodal_table(round(t), round(j), s).further_error(v)[None]

        further = self._by_setting(error, inner_exponent(u, self.inner_rate))
        return np.maximum(super().profile_error_at(u), further)

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`: Gauss–Legendre panels from the atom at 0."""
        fields = (self.inner_rate, self.shift, self.slots, self.steps)
        return nodes_from(_node_rows, rule, *fields)

    def with_little_noise(self) -> AntipodalGaussianLoss:
        """The slot revealed: see `AllocatedLoss`."""
        inner, drawn = self.inner_rate, self._drawn_rate
        return AntipodalGaussianLoss(self.outer_rate, drawn, inner, self.shift)

    _excess = staticmethod(antipodal_excess)

    @staticmethod
    def _prepare(settings: list[tuple[int, int, float]]) -> None:
        prepare_antipodal(settings)

    @staticmethod
    def _tables(s: float, t: float, j: float) -> list[Table]:
        return [antipodal_table(round(t), round(j), s)]


def _drawn_tails(
    tails: Callable[..., np.ndarray], u: Array, rate: Array, *fields: Array
) -> Tails:
    """Tails at u, of those by fields at rate 1 (Balle et al. 2018, Theorem 2)."""
    inner = namespace(u).minimum(inner_exponent(u, rate), 1e300)
    rows = functools.partial(by_setting, tails)
    found = on_host(rows, u.shape, inner, *fields, number=2)
    return drawn_tails((found[0], found[1]), u, rate)


def _tails(v: np.ndarray, s: float, t: float, j: float) -> np.ndarray:
    """``log D_t`` and ``log`` of minus its derivative in v = log g."""
    first, second, _ = antipodal_table(round(t), round(j), s).at(v)
    return np.stack([first - math.log(t), second + v - math.log(t)])


def _loss_distribution(
    asked: Asked, s: float, t: float, j: float
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Losses v > 0 at r = 1, Q-masses, the end, and the log-density of P there."""
    table = antipodal_table(round(t), round(j), s)
    # Tables of few terms end early. Beyond, the log-density is concave, and its tangent
    # an upper bound.
    edge = np.array([1 - _TANGENT, 1.0]) * table.end
    slope = np.diff(table.at(edge)[2]).item() / (_TANGENT * table.end) + 1

    def log_density(v: np.ndarray) -> np.ndarray:
        last = np.minimum(v, table.end)
        return table.at(last)[2] + last - math.log(t) + slope * (v - last)

    tried = np.linspace(0.0, table.end, _TRIED)
    left = log_density(tried) + tried - (asked.log_cut - 10)
    kept = np.flatnonzero(left > 0)
    end = float(tried[min(kept.max(initial=0) + 1, _TRIED - 1)])
    if left[-1] > 0:
        end += float(left[-1]) / (-1 - slope) if slope < -1 else np.nan
    number = _CHECKING_PANEL_NODES if asked.checking else _PANEL_NODES
    node, weight = gauss(number, asked.size // number)
    v = end * node
    mass = np.exp(log_density(v) + np.log(weight * end))
    if asked.checking:
        mass = np.where(v < table.end, mass * (1 + table.off_at(v)), 0.0)
    # At r = 1 both P and Q have mass 1: what is missing is rounding error.
    whole = np.sum(mass * (1 + np.exp(v)))
    if not abs(whole - 1) < _MASS_ERROR:
        mass = mass * np.nan
    return v, mass / whole, end, float(log_density(np.array([end]))[0] + end)


def _node_rows(asked: Asked, r: float, s: float, t: float, j: float) -> np.ndarray:
    """The rows of `nodes_from`: losses above 0 with P's mass, below with Q's."""
    half = asked.size // 2
    v, mass, end, end_density = _loss_distribution(asked._replace(size=half), s, t, j)
    # Q has the mass of the pair at r = 1; the loss is log(1 + r (e^v - 1)).
    loss = np.log1p(r * np.expm1(v))
    far = math.log1p(r * math.expm1(end))
    ends = [end_density - end + far, -np.inf, far, 0.0]
    return np.concatenate(
        [loss, -loss, mass * np.exp(loss), mass, ends, [2 * end / half]]
    )


@dataclass(frozen=True)
class AllocatedAntipodalBoundingLoss(BoundingLoss):
    """``r D(1 + (g - 1)/r)`` in both directions, D of `antipodal_bounding_pair`.

    Attributes:
      outer_rate, inner_rate, slots, steps: see `AllocatedAntipodalLoss`.
      shift: s > 0.
      above: see `BoundingLoss`.
    """

    inner_rate: Array
    shift: Array
    slots: Array
    steps: Array
    above: Array
    is_symmetric: ClassVar[bool] = True
    _rounding: ClassVar[float] = 8e-15

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """Of the finite pair."""
        fields = namespace(u, *self.fields).broadcast_arrays(u, *self.fields[1:])
        tails = _drawn_tails(_pair_tails, *fields)
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
