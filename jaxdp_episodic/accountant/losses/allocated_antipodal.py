"""Random allocation, the sign of a contribution flipped: replace_one, and episodes.

``D_t(g) = H_g(P_s || P_-s)``, ``P_v = sum_{i<=j} N(v e_i)/t + (1 - j/t) N(0)`` on R^j:
a contribution at a secret step of an epoch against the opposite one. With r the chance
that the protected unit is reached in that step, both directions are

    h(g) = r D_t(1 + (g - 1)/r).

With the A and B of `numerics.skewed_sums`, ``t D_t(g) = E(sum A - g sum B + (1 - g)
(t - j))_+``. Under zero_out it is an upper bound.

Reference: docs/proofs.md, "Random allocation"; Balle, Barthe, Gaboardi (2018),
arXiv:1807.01647v2, Theorem 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxdp_episodic.accountant.losses.allocated import (
    AllocatedLoss,
    nodes_from,
    tails_from,
)
from jaxdp_episodic.accountant.losses.allocated_antipodal_bounds import (
    AllocatedAntipodalBoundingLoss,
)
from jaxdp_episodic.accountant.losses.allocated_moments import antipodal_excess
from jaxdp_episodic.accountant.losses.allocation_tables import (
    antipodal_table,
    by_setting,
    each_once,
    prepare_antipodal,
)
from jaxdp_episodic.accountant.losses.gaussian import drawn_tails, inner_exponent
from jaxdp_episodic.accountant.losses.loss_nodes import LossNodes, NodeRule
from jaxdp_episodic.accountant.losses.privacy_loss import Tails
from jaxdp_episodic.accountant.losses.protocols import Nodes, Profile, Tabulated
from jaxdp_episodic.accountant.numerics.loops import Array, namespace, on_host

_PROBES = 400
# Share of a table over which its slope at the end is measured.
_TANGENT = 1e-3
# Nodes of a panel, and of those that check them.
_PER_PANEL = (16, 32)
# By how much the mass of P and Q may differ from 1.
_MASS_ERROR = 1e-5


@dataclass(frozen=True)
class AllocatedAntipodalLoss(AllocatedLoss, Tabulated, Nodes):
    """``r D_t(1 + (g - 1)/r)`` in both directions.

    Attributes:
      outer_rate: see `PrivacyLoss`; always 1.
      inner_rate: r in [0, 1], below the level that is allocated.
      shift: s >= 0, the clip norm over the noise.
      bins: t, whole number.
      taken: j, whole number, 2 <= j <= t.
    """

    inner_rate: Array
    shift: Array
    bins: Array
    taken: Array
    is_symmetric: ClassVar[bool] = True
    has_slopes: ClassVar[bool] = False

    def certified(self, *, up: bool) -> Profile:
        """The finite pair of a convex function above or below the profile."""
        return self.bounding_pair(AllocatedAntipodalBoundingLoss, up=up)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """By tables; their relative error is `profile_error`, an estimate."""
        xp = namespace(u, *self.fields)
        u, r, s, t, j = xp.broadcast_arrays(u, *self.fields[1:])
        j = xp.maximum(j, 2.0)  # where none is taken nothing is asked
        t = xp.maximum(t, j)

        def rows(*arrays: np.ndarray) -> np.ndarray:
            return by_setting(_tails, *arrays)

        inner = xp.minimum(inner_exponent(u, r), 1e300)
        found = on_host(rows, u.shape, inner, s, t, j, number=2)
        profile, tail = drawn_tails((found[0], found[1]), u, r)
        return tails_from(xp.stack([profile, tail, profile, tail]))

    def profile_error(self) -> Array:
        """See `Tabulated`; as the tables estimate it."""

        def error(_: np.ndarray, s: float, t: float, j: float) -> np.ndarray:
            return np.full((1, len(_)), antipodal_table(round(t), round(j), s).error)

        nothing = np.zeros(self.shape)
        kept = self.kept_in_range()  # some may take no step
        fields = kept._shift, kept._bins, kept._taken
        return by_setting(error, nothing, *fields)[0]

    def profile_error_at(self, u: Array) -> Array:
        """Larger at large u: sums of a few terms of little weight lose digits there."""

        def off(v: np.ndarray, s: float, t: float, j: float) -> np.ndarray:
            return antipodal_table(round(t), round(j), s).further_error(v)[None]

        kept = self.kept_in_range()
        inner = inner_exponent(u, self.inner_rate)
        further = by_setting(off, inner, kept._shift, kept._bins, kept._taken)[0]
        return np.maximum(super().profile_error_at(u), further)

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`: Gauss–Legendre panels from the atom at 0."""
        fields = (self.inner_rate, self.shift, self.bins, self.taken)
        return nodes_from(_node_rows, rule, *fields)

    def prepare(self, *, slopes: bool = False) -> None:
        """Makes the tables; they have no slopes."""
        del slopes
        kept = self.kept_in_range()
        is_asked = ~np.asarray(self.loses_nothing | self.is_unprotected)
        fields = (kept._bins, kept._taken, kept._shift)
        asked = each_once(*(np.broadcast_to(f, self.shape)[is_asked] for f in fields))
        prepare_antipodal([(round(t), round(j), s) for t, j, s in asked])

    _excess = staticmethod(antipodal_excess)


def _tails(v: np.ndarray, s: float, t: float, j: float) -> np.ndarray:
    """``log D_t`` and ``log`` of minus its derivative in v = log g."""
    first, second, _ = antipodal_table(round(t), round(j), s).at(v)
    return np.stack([first - math.log(t), second + v - math.log(t)])


def _loss_distribution(
    size: int, log_cut: float, checking: bool, s: float, t: float, j: float
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Places v = log g1 > 0, Q-masses, the end, and the log-density of P there."""
    table = antipodal_table(round(t), round(j), s)
    # Tables of few terms end early. Beyond, the log-density is concave, and its tangent
    # an upper bound.
    edge = np.array([1 - _TANGENT, 1.0]) * table.end
    slope = np.diff(table.at(edge)[2]).item() / (_TANGENT * table.end) + 1

    def density(v: np.ndarray) -> np.ndarray:
        last = np.minimum(v, table.end)
        return table.at(last)[2] + last - math.log(t) + slope * (v - last)

    probes = np.linspace(0.0, table.end, _PROBES)
    left = density(probes) + probes - (log_cut - 10)
    kept = np.flatnonzero(left > 0)
    last = kept[-1] if len(kept) else 0
    end = probes[min(last + 1, _PROBES - 1)]
    if left[-1] > 0:
        end += left[-1] / (-1 - slope) if slope < -1 else np.nan
    number = _PER_PANEL[checking]
    x, w = np.polynomial.legendre.leggauss(number)
    panels = size // number
    v = end / panels * (np.arange(panels)[:, None] + 0.5 * (x + 1)).reshape(-1)
    log_mass = density(v) + np.log(np.tile(0.5 * w * end / panels, panels))
    mass = np.exp(log_mass)
    if checking:
        mass = np.where(v < table.end, mass * (1 + table.off_at(v)), 0.0)
    # At r = 1 both P and Q have mass 1: what is missing is rounding error.
    whole = np.sum(mass * (1 + np.exp(v)))
    if not abs(whole - 1) < _MASS_ERROR:
        mass = mass * np.nan
    return v, mass / whole, end, float(density(np.array([end]))[0] + end)


def _node_rows(
    size: int,
    backward: bool,
    log_cut: float,
    checking: bool,
    r: float,
    s: float,
    t: float,
    j: float,
) -> np.ndarray:
    """The rows of `nodes_from`: losses above 0 with P's mass, below with Q's."""
    del backward
    half = size // 2
    v, mass, end, end_density = _loss_distribution(half, log_cut, checking, s, t, j)
    # Q has the mass of the pair at r = 1; the loss is log(1 + r (e^v - 1)).
    loss = np.log1p(r * np.expm1(v))
    far = math.log1p(r * math.expm1(end))
    spacing = 2 * end / half
    return np.concatenate(
        [
            np.concatenate([loss, -loss]),
            np.concatenate([mass * np.exp(loss), mass]),
            [end_density - end + far, -np.inf, far, 0.0, spacing],
        ]
    )
