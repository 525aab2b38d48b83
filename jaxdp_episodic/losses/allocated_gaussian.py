"""Random allocation, add/remove: a unit takes part in one secret step of an epoch.

With t steps in the epoch, of which j are taken, the pair is ``P = sum_{i<=j} N(s e_i)/t
+ (1 - j/t) N(0)`` against ``Q = N(0)`` on R^j; its likelihood ratio is

    W = ((t - j) + A_1 + ... + A_j) / t,   A_i = e^{s x_i - s²/2}, x_i ~ N(0, 1),

so that ``t H_g(P || Q) = E(X - x)_+`` with X the sum of the A, ``x = g t - (t - j)``,
and ``t H_g(Q || P) = g E(y - X)_+`` with ``y = t/g - (t - j)``. The same pair serves
zero_out of what is allocated.

Reference: docs/proofs.md, "Random allocation"; Chua et al. (2024), arXiv:2412.16802;
Feldman and Shenfeld (2025), arXiv:2502.08202, for the pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxdp_episodic.losses.allocated import (
    EXCESS_MARGIN,
    AllocatedLoss,
    nodes_from,
    reaches,
    tails_from,
)
from jaxdp_episodic.losses.allocated_law import AllocatedLawLoss
from jaxdp_episodic.losses.allocation_tables import by_setting, sum_tables
from jaxdp_episodic.losses.loss_nodes import LossNodes
from jaxdp_episodic.losses.privacy_loss import Quadrature, Tails
from jaxdp_episodic.numerics.loops import Array, namespace, on_host
from jaxdp_episodic.numerics.power_excess import (
    scaled_power_excess,
    scaled_power_excess_derivatives,
)
from jaxdp_episodic.numerics.special import log_normal_tail

# Nodes of a moment; and places at which the range of a distribution is looked for.
_MOMENT_NODES, _SCOUTS = 768, 600
_LARGEST_EXPONENT = 600.0
# A moment is complete if its integrand has fallen by so many nats at the end.
_COMPLETE = 14.0


@dataclass(frozen=True)
class AllocatedGaussianLoss(AllocatedLoss):
    """``W = ((bins - taken) + A_1 + ... + A_taken) / bins``.

    Attributes:
      outer_rate: see `PrivacyLoss`; always 1.
      shift: s >= 0.
      bins: t, whole number.
      taken: j, whole number, 2 <= j <= t.
    """

    shift: Array
    bins: Array
    taken: Array
    is_symmetric: ClassVar[bool] = False
    methods: ClassVar[tuple[str, ...]] = ("rdp", "exact", "pld")

    def certified(self, *, up: bool) -> AllocatedLawLoss:
        """A finite law above or below in convex order."""
        kept = self.kept_in_range()
        # What there is too much noise for is raised to where there is none.
        raised = np.where(self.shift > 0, np.maximum(self.shift, kept.shift), 0.0)
        shift = raised if up else np.where(raised > self.shift, 0.0, self.shift)
        return AllocatedLawLoss(
            self.outer_rate, shift, kept.bins, kept.taken, np.full(self.shape, 1.0 * up)
        )

    def largest_loss(self, *, backward: bool) -> Array:
        """Of a part of an epoch: W is at least the chance of a later step."""
        if not backward:
            return super().largest_loss(backward=backward)
        with np.errstate(divide="ignore"):
            least = (self.bins - self.taken) / self.bins
            return np.broadcast_to(-np.log(least), self.shape)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """By tables of the sum; its relative error is `profile_error`, an estimate."""
        xp = namespace(u, *self.fields)
        u, s, t, j = xp.broadcast_arrays(u, self.shift, self.bins, self.taken)

        def rows(*arrays: np.ndarray) -> np.ndarray:
            return by_setting(_tails, *arrays)

        return tails_from(on_host(rows, u.shape, u, s, t, j, number=4))

    def profile_error(self) -> Array:
        """See `PrivacyLoss`; as the tables estimate it."""

        def error(_: np.ndarray, s: float, j: float) -> np.ndarray:
            tables = sum_tables(round(j), s)
            return np.full((1, len(_)), max(table.error for table in tables))

        nothing = np.zeros(self.shape)
        return by_setting(error, nothing, self.shift, self.taken)[0]

    def nodes(
        self,
        backward: Array,
        log_cut: Array,
        height: Array,
        num_nodes: int,
        num_terms: int,
    ) -> LossNodes:
        """See `PrivacyLoss`: equally spaced in the logarithm of the sum."""
        del height, num_terms
        fields = (self.shift, self.bins, self.taken)
        return nodes_from(_node_rows, backward, log_cut, num_nodes, *fields)

    def log_excess(
        self,
        t: Array,
        direction: str,
        quadrature: Quadrature,
        *,
        with_derivatives: bool = False,
    ) -> tuple[Array, ...]:
        """See `PrivacyLoss`; of "forward" the larger of both directions.

        *Estimate*, with a margin above it: by quadrature of tables, and what these
        leave out. That the moments of P against Q are the larger ones is not proved.
        """
        del quadrature
        xp = namespace(t, *self.fields)
        order, s, bins, taken = xp.broadcast_arrays(t, *self.fields[1:])

        def rows(*arrays: np.ndarray) -> np.ndarray:
            both = by_setting(_excess_backward, *arrays)
            if direction != "backward":
                ahead = by_setting(_excess_forward, *arrays)
                both = np.where(ahead[:1] >= both[:1], ahead, both)
            return both

        found = on_host(rows, order.shape, order, s, bins, taken, number=3)
        excess = found[0] + EXCESS_MARGIN
        return (excess, *found[1:]) if with_derivatives else (excess,)


def _tails(u: np.ndarray, s: float, t: float, j: float) -> np.ndarray:
    """The four rows of `log_tails` at u >= 0."""
    count = round(j)
    with np.errstate(all="ignore"):
        # x / j of the forward direction, and of the backward one.
        above = np.log1p(np.expm1(u) * (t / j))
        ratio = np.expm1(-u) * (t / j)
        reached = ratio > -1
        below = -np.log1p(np.where(reached, ratio, 0.0))
        rising, falling = sum_tables(count, s)
        high, low = rising.at(above), falling.at(below)
        loss = low[0] + u - math.log(t)
        # Q(W < 1/g) less the profile.
        tail = low[1] + np.log(-np.expm1(np.minimum(loss - low[1], 0.0)))
        return np.stack(
            [
                high[0] - math.log(t),
                high[1] + u,
                np.where(reached, loss, -np.inf),
                np.where(reached, tail, -np.inf),
            ]
        )


def _log_density(
    place: np.ndarray, s: float, t: float, j: float
) -> tuple[np.ndarray, np.ndarray]:
    """``log W`` at ``log(X / j) = place``, and Q's log-density of the place."""
    count = round(j)
    rising, falling = sum_tables(count, s)
    high, low = rising.at(place)[2], falling.at(-place)[2]
    density = np.where(place >= 0, high, low) + place + math.log(j)
    return np.log1p(np.expm1(place) * (j / t)), density


def _law(
    size: int, log_cut: float, s: float, t: float, j: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses ``log W``, Q-masses, and the spacing of their places (as an array)."""
    rising, falling = sum_tables(round(j), s)
    scouts = np.linspace(-falling.end, rising.end, _SCOUTS)
    loss, density = _log_density(scouts, s, t, j)
    kept = np.flatnonzero(np.maximum(density, density + loss) > log_cut - 10)
    if not len(kept):
        nothing = np.full(size, np.nan)
        return nothing, nothing, np.asarray(np.nan)
    low = scouts[max(kept[0] - 1, 0)]
    high = scouts[min(kept[-1] + 1, _SCOUTS - 1)]
    place = np.linspace(low, high, size)
    spacing = place[1] - place[0]
    loss, density = _log_density(place, s, t, j)
    mass = np.exp(density) * spacing
    # Both laws have mass 1: what is missing to that is rounding, and is put right.
    tilt = 1 / (1 + np.exp(loss))
    matrix = np.array(
        [[np.sum(mass * k * f) for k in (1.0, tilt)] for f in (1.0, np.exp(loss))]
    )
    least = np.array([1 - matrix[0, 0], 1 - matrix[1, 0]])
    fix = np.linalg.solve(matrix, least)
    if not np.all(np.abs(fix) < 1e-5):
        mass = mass * np.nan
    return loss, mass * (1 + fix[0] + fix[1] * tilt), np.asarray(spacing)


def _node_rows(
    size: int, backward: bool, log_cut: float, s: float, t: float, j: float
) -> np.ndarray:
    """The rows of `nodes_from`."""
    loss, mass, spacing = _law(size, log_cut, s, t, j)
    rising, falling = sum_tables(round(j), s)
    table = falling if backward else rising
    rows = table.at(np.array([table.end]))[:, 0]
    # Of the direction's second law g times the mass counts as well.
    gain = rows[0] - np.log(t) if not backward else rows[0]
    beyond = np.logaddexp(gain, rows[1] + (0.0 if backward else table.end))
    if not reaches(float(beyond), log_cut):
        mass = mass * np.nan
    weight = mass if backward else mass * np.exp(loss)
    sign = -1.0 if backward else 1.0
    order = [0, -1] if backward else [-1, 0]
    with np.errstate(divide="ignore"):
        ends = np.log(weight[order] / spacing)
    return np.concatenate(
        [sign * loss, weight, ends, sign * loss[order], spacing[None]]
    )


def _excess(
    order: np.ndarray, direction: str, s: float, t: float, j: float
) -> tuple[np.ndarray, np.ndarray]:
    """(3, m): log-excess of the nodes at ``alpha - 1``, and two derivatives.

    And where the nodes hold all that counts of it.
    """
    loss, mass, _ = _law(_MOMENT_NODES, -np.inf, s, t, j)
    forward = direction == "forward"
    rows, complete = np.empty((3, len(order))), np.empty(len(order), bool)
    with np.errstate(all="ignore"):
        log_mass = np.log(mass)
        for i, z in enumerate(order.tolist()):
            size = log_mass + (1 + z if forward else -z) * loss
            peak = float(np.max(size))
            complete[i] = size[-1 if forward else 0] < peak - _COMPLETE
            scale = max(peak - _LARGEST_EXPONENT, 0.0)
            given = (loss, log_mass - scale, np.asarray(z), direction)
            total = np.sum(scaled_power_excess(*given))
            _, *slopes = scaled_power_excess_derivatives(*given)
            rows[0, i] = np.log(total) + scale
            rows[1:, i] = [np.sum(slope) / total for slope in slopes]
    return rows, complete & np.isfinite(rows[0])


def _bounded(
    rows: np.ndarray, complete: np.ndarray, added: np.ndarray, most: list[np.ndarray]
) -> np.ndarray:
    """The excess with what is added, where it is complete, and no more than it is.

    ``most`` is the logarithm of a moment that is larger, with two derivatives.
    """
    grown = -np.expm1(-most[0])
    log_most = np.log(grown) + most[0]
    slope = most[1] / grown
    other = np.stack([log_most, slope, (most[2] + most[1] ** 2) / grown])
    whole = np.where(complete, np.logaddexp(rows[0], added), np.inf)
    own = np.concatenate([whole[None], rows[1:]])
    return np.where(whole <= log_most, own, other)


def _excess_forward(order: np.ndarray, s: float, t: float, j: float) -> np.ndarray:
    """``E W^alpha``; what one jump beyond the table adds, with some to spare.

    With a jump A, ``W^alpha <= 2^{alpha-1} (rest^alpha + (A/t)^alpha)``. In all no more
    than without sampling, ``e^{s² alpha (alpha-1) / 2}`` (Jensen).
    """
    rows, complete = _excess(order, "forward", s, t, j)
    top = sum_tables(round(j), s)[0].end
    alpha = 1 + order
    grown = 0.5 * s * s * alpha * order
    with np.errstate(all="ignore"):
        # The whole sum but its mean is the jump.
        jump = np.asarray((math.log(j) + np.log(np.expm1(top)) + 0.5 * s * s) / s)
        rest = np.logaddexp(0.0, rows[0]) + log_normal_tail(jump)
        far = grown - alpha * math.log(t) + log_normal_tail(jump - alpha * s)
        added = math.log(j) + order * math.log(2.0) + np.logaddexp(rest, far)
        most = [grown, 0.5 * s * s * (1 + 2 * order), s * s + 0 * order]
        return _bounded(rows, complete, added, most)


def _excess_backward(order: np.ndarray, s: float, t: float, j: float) -> np.ndarray:
    """``E W^{1-alpha}``; what is below the table by Cauchy and Schwarz.

    ``W >= (A_1 ... A_j)^{1/t}``, so ``E W^-k <= e^{(k + k²/t) j s² / (2t)}``.
    """
    rows, complete = _excess(order, "backward", s, t, j)
    table = sum_tables(round(j), s)[1]
    rare = table.at(np.array([table.end]))[1, 0]

    def bound(k: np.ndarray) -> np.ndarray:
        return (k + k * k / t) * (j * s * s / (2 * t))

    with np.errstate(all="ignore"):
        added = 0.5 * (bound(2 * order) + rare)
        share = j * s * s / (2 * t)
        most = [bound(order), share * (1 + 2 * order / t), 2 * share / t + 0 * order]
        return _bounded(rows, complete, added, most)
