"""The swapped Gaussian: one contribution exchanged for another with probability eta.

Both directions are the forward profile of the sampled pair, ``eta D(s, 1 + (g-1)/eta)``
with s the full move: twice the clip norm over the noise. It holds under both relations
for draws without replacement at the clip level, and for a step clipped as a whole.

Reference: Balle, Barthe, Gaboardi (2018), arXiv:1807.01647v2, Theorem 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxdp_episodic.accountant.losses.gaussian import (
    GaussianLoss,
    drawn_tails,
    gaussian_tails,
    inner_exponent,
    positive,
    scaled,
)
from jaxdp_episodic.accountant.losses.integration_paths import Pair, half_line_points
from jaxdp_episodic.accountant.losses.loss_nodes import (
    LossNodes,
    NodeRule,
    Rate,
    gaussian_loss,
    log_mixture,
    log_normal,
    mirrored,
    real_log_mixture,
    sampled_ends,
)
from jaxdp_episodic.accountant.losses.privacy_loss import MixturePair, MomentRule, Tails
from jaxdp_episodic.accountant.losses.protocols import Nodes
from jaxdp_episodic.accountant.losses.sampled_gaussian import mixture_excess
from jaxdp_episodic.accountant.numerics.loops import Array, map_first, namespace


@dataclass(frozen=True)
class SwappedGaussianLoss(GaussianLoss, Nodes):
    """Both profiles ``eta D(shift, 1 + (g-1)/eta)``.

    Attributes:
      outer_rate: see `PrivacyLoss`.
      rate: eta in [0, 1], at the clip level and below it.
      shift: s >= 0, the full move.
    """

    rate: Array
    shift: Array
    is_symmetric: ClassVar[bool] = True

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See `Profile`; two equal pairs."""
        xp = namespace(u, *self.fields)
        u, outer, eta, s = xp.broadcast_arrays(u, *self.fields)
        rate = positive(eta, 1.0)
        inner = gaussian_tails(s, inner_exponent(u, rate))
        tails = scaled(drawn_tails(inner, u, rate), outer, eta, s)
        return tails, tails

    def mixture(self) -> MixturePair:
        """See `PrivacyLoss`."""
        return MixturePair.sampled(float(self.rate), float(self.shift))

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`; exact up to quadrature error."""
        symmetric = rule._replace(direction="symmetric")
        return mixture_excess(t, self.rate, self.shift, symmetric)

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`: losses above 0 on one path, below on its mirror image."""
        _, log_cut, height, num_nodes, _ = rule
        xp = namespace(*self.fields, log_cut, height)
        s, p = self.shift, Rate.of(self.rate)
        floor = 0.5 * s
        _, high, kink = sampled_ends(p, s, log_cut)
        kink = xp.maximum(kink, floor)

        x, element = half_line_points(floor, high, (kink,), kink, s, height, num_nodes)
        y = map_first(lambda x: log_mixture(gaussian_loss(x, s), p), x)

        def finish(x: Pair, element: Pair, y: Pair) -> LossNodes:
            end = x[0][-1]
            end_loss = real_log_mixture(s * (end - 0.5 * s), p)
            return mirrored(y, log_normal(x), element, -0.5 * end * end, end_loss)

        return map_first(finish, x, element, y)

    def gaussian_shift(self) -> Array:
        """The shift, where the unit is always drawn."""
        xp = namespace(*self.fields)
        return xp.where(self.rate >= 1, self.shift, 0.0)
