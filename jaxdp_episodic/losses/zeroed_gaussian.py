"""The zeroed Gaussian: a contribution that is there, or 0 because its data are null.

It holds under zero_out (docs/proofs.md, "The zero-out relation"). With unit variances,
the clip unit drawn with probability p and the protected unit reached inside a drawn
one with probability r, the two profiles are those of two *different* pairs,

    forward   H_g(P1 || Q1),  P1 = (1-p) N(0) + p (1-r) N(-s) + p r N(s)
                              Q1 = (1-p+pr) N(0) + p (1-r) N(-s)
    backward  H_g(Q2 || P2),  P2 = (1-p) N(0) + p N(s)
                              Q2 = (1-p+pr) N(0) + p (1-r) N(s):

forward the contributions without the protected unit pull the other way, backward the
same way. ``r = 1`` is the sampled pair; ``p = 1`` is what holds without replacement.

Both likelihood ratios are 1 at ``x = s/2`` and grow. One joint law has both profiles:
its losses above 0 are those of (P1, Q1) at ``x > s/2``, its losses below 0 those of
(P2, Q2) at ``x < s/2``, and what is missing to mass 1 is an atom at loss 0. In the
second half ``x = s - w``, so that both are half-lines that begin at s/2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxdp_episodic.losses.excess import (
    FARTHEST_BUMP,
    LOG_SQRT_2PI,
    log_integral,
    unless_gaussian,
)
from jaxdp_episodic.losses.gaussian import (
    LARGEST,
    gaussian_tails,
    inner_exponent,
    positive,
    scaled,
)
from jaxdp_episodic.losses.loss_nodes import (
    FURTHEST_LEFT,
    LossNodes,
    collected,
    log_normal,
    path_points,
)
from jaxdp_episodic.losses.paths import Pair, half_line
from jaxdp_episodic.losses.privacy_loss import GaussianLoss, Hints, Quadrature, Tails
from jaxdp_episodic.losses.windows import (
    Windows,
    only_root,
    settle,
    transitions,
    windows_around,
)
from jaxdp_episodic.numerics.complex_exponentials import (
    expm1_complex,
    log1p_complex,
    log_add_complex,
    log_complex,
    polar,
    times,
)
from jaxdp_episodic.numerics.loops import (
    Array,
    map_first,
    namespace,
    sigmoid,
    softmax,
)
from jaxdp_episodic.numerics.special import (
    log_mills,
    log_mills_difference,
    log_normal_density,
    log_normal_tail,
    log_saturating_tail,
)

# Stands for log 0 where -inf would poison a gradient.
_LOG_ZERO = -1e30
# As in `sampled_gaussian`: largest exponent that is exponentiated, rounding of a
# difference times expm1, and how far a backward loss moves where k cancels.
_LARGEST_EXPONENT = 100.0
_DIFFERENCE_ERROR = 4.0
_MOVE = 2e-15
# Smaller shares are 0.
_LEAST_LOG_SHARE = -700.0


@dataclass(frozen=True)
class ZeroedGaussianLoss(GaussianLoss):
    """A clip unit's contribution, drawn at random, that is 0 where a null is reached.

    Attributes:
      outer_rate: see `PrivacyLoss`.
      rate: p in [0, 1], at the clip level under Poisson sampling; else 1.
      inner_rate: r in [0, 1], that the protected unit is reached, given the former.
      shift: s >= 0, the clip norm over the noise.
    """

    rate: Array
    inner_rate: Array
    shift: Array
    is_symmetric: ClassVar[bool] = False
    rate_fields: ClassVar[tuple[str, ...]] = ("outer_rate", "rate", "inner_rate")

    def hints(self) -> Hints:
        """P/Q grows like ``p r / (1 - p + p r) e^{sx}`` in the end."""
        xp = namespace(*self.fields)
        rate = self.rate * self.inner_rate
        odds = rate / xp.maximum(1 - self.rate, self.rate)
        return Hints(rate, odds, self.shift, self.shift)

    def largest_loss(self, *, backward: bool) -> Array:
        """Q2 over P2 is at most ``(1-p+pr) / (1-p)``."""
        p, r = np.broadcast_arrays(self.rate, self.inner_rate)
        bounded = (p < 1) if backward else np.zeros(p.shape, bool)
        rest = np.where(bounded, 1 - p, 1.0)
        return np.where(bounded, np.log1p(p * r / rest), np.inf)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See `_forward` and `_backward`.

        Where the backward losses end, k cancels; it errs upwards, see
        `tail_displacement`.
        """
        xp = namespace(u, *self.fields)
        u, outer, p, r, s = xp.broadcast_arrays(u, *self.fields)
        rate, inner = positive(p, 1.0), positive(r, 1.0)
        forward = _forward(u, rate, inner, positive(s, LARGEST))
        backward = _backward(u, rate, inner, s)
        return scaled(forward, outer, p, r, s), scaled(backward, outer, p, r, s)

    def tail_displacement(self, u: Array) -> Array:
        """See `PrivacyLoss`; as of the sampled pair."""
        xp = namespace(u, *self.fields)
        rate = self.rate * self.inner_rate
        largest = rate / xp.maximum(1 - self.rate + rate, 1e-300)
        moved = _MOVE * xp.minimum(-xp.expm1(-u), largest)
        return xp.where(self.rate < 1, moved, 0.0)

    def log_excess(
        self,
        t: Array,
        direction: str,
        quadrature: Quadrature,
        *,
        with_derivatives: bool = False,
    ) -> tuple[Array, ...]:
        """See `PrivacyLoss`; exact up to quadrature error: two half-lines."""
        xp = namespace(t, *self.fields)
        t, p, r, s = xp.broadcast_arrays(t, self.rate, self.inner_rate, self.shift)
        logs = _Logs.of(p, r, s)
        pieces = (
            (logs.upper, _upper_windows(t, logs, s, direction)),
            (logs.lower, _lower_windows(t, logs, s, direction)),
        )
        upper, lower = (
            log_integral(
                log_parts,
                *windows,
                0.5 * s,
                t,
                direction,
                quadrature,
                with_derivatives,
            )
            for log_parts, windows in pieces
        )
        total = xp.logaddexp(upper[0], lower[0])
        shares = xp.exp(upper[0] - total), xp.exp(lower[0] - total)
        ratios = (
            shares[0] * a + shares[1] * b
            for a, b in zip(upper[1:], lower[1:], strict=True)
        )
        whole = (p >= 1) & (r >= 1)
        far = (1 + 2 * t) * s > FARTHEST_BUMP
        return unless_gaussian(whole | far, 0.5 * s * s, t, (total, *ratios))

    def nodes(
        self,
        backward: Array,
        log_cut: Array,
        height: Array,
        num_nodes: int,
        num_terms: int,
    ) -> LossNodes:
        """See `PrivacyLoss`; two half-lines."""
        del num_terms
        xp = namespace(*self.fields, backward, log_cut, height)
        s = self.shift
        logs = _Logs.of(self.rate, self.inner_rate, s)
        upper_turns, lower_turns, lower_rise = _path_turns(logs, s)
        floor = 0.5 * s
        reach = xp.sqrt(-2 * log_cut)
        seen = xp.sqrt(2 * xp.maximum(logs.reached - log_cut, 1.0))
        high = xp.maximum(xp.maximum(reach, s + seen), floor + 2.0)
        # Losses that low hardly matter.
        most = floor - FURTHEST_LEFT
        ends = (
            xp.where(backward > 0, xp.minimum(high, most), high),
            xp.where(backward > 0, s + reach, xp.minimum(s + reach, s - FURTHEST_LEFT)),
        )

        def laid(
            end: Array, turns: tuple[Array, ...], rise: Array
        ) -> tuple[Pair, Pair]:
            def place(end: Array) -> Pair:
                return half_line(floor, end, turns, s, num_nodes)

            return path_points(map_first(place, end), floor, rise, s, height)

        above, above_element = laid(ends[0], upper_turns, xp.maximum(*upper_turns))
        below, below_element = laid(ends[1], lower_turns, lower_rise)
        # x = s - w on the mirror image of the path, which is run through backwards.
        below = (s - below[0], below[1])
        below_element = (below_element[0], -below_element[1])
        above_y, above_base = map_first(logs.upper_complex, above)
        below_y, below_base = map_first(logs.lower_complex, below)
        sign, forward = 1 - 2 * backward, 1 - backward

        def finish(
            above: Pair,
            above_element: Pair,
            above_y: Pair,
            above_base: Pair,
            below: Pair,
            below_element: Pair,
            below_y: Pair,
            below_base: Pair,
        ) -> LossNodes:
            def weighted(x: Pair, element: Pair, y: Pair, base: Pair) -> Pair:
                normal = log_normal(x)
                return times(
                    polar(
                        normal[0] + base[0] + forward * y[0],
                        sign * (normal[1] + base[1]) + forward * y[1],
                    ),
                    (element[0], sign * element[1]),
                )

            halves = (
                weighted(above, above_element, above_y, above_base),
                weighted(below, below_element, below_y, below_base),
            )
            weight = tuple(xp.concatenate(pair) for pair in zip(*halves, strict=True))
            loss = (
                sign * xp.concatenate([above_y[0], below_y[0]]),
                xp.concatenate([above_y[1], below_y[1]]),
            )
            x = xp.stack([above[0][-1], below[0][-1]])
            (one, base1), (two, base2) = (
                logs.upper(x[0]),
                logs.lower(s - x[1]),
            )
            y, base = xp.stack([one, two]), xp.stack([base1, base2])
            return collected(loss, (weight[0], weight[1]), base + forward * y, sign * y)

        return map_first(
            finish,
            above,
            above_element,
            above_y,
            above_base,
            below,
            below_element,
            below_y,
            below_base,
        )

    def gaussian_shift(self) -> Array:
        """The shift, where the unit is always reached."""
        xp = namespace(*self.fields)
        always = (self.rate >= 1) & (self.inner_rate >= 1)
        return xp.where(always, self.shift, 0.0)


# --- Profiles ---


def _forward(u: Array, p: Array, r: Array, s: Array) -> Tails:
    """Profile and tail of P1 against Q1, for positive p, r and s.

    P1 > g Q1 beyond ``t = s/2 + (A1 + A2)/s``, where

        A1 = log(1 + (g-1) (1-p+pr) / (pr)),  A2 = log((1 + sqrt(1 + kappa)) / 2),
        kappa = 4 (g-1) (1-r)/r e^{-s² - 2 A1},

    and with the Mills ratio m and ``X = p r phi(t-s)``, the density of N(s) there,

        h = X [(m(t-s) - m(t)) + (1 - e^{-A2}) (m(t) - m(t+s))],
        G = m(t) [X e^{-A2} + (1-p) phi(t)] + m(t+s) [X (1 - e^{-A2}) + p(1-r) phi(t+s)]

    (the densities of P1 and of g Q1 are the same at t): every term is positive.
    """
    xp = namespace(u, p, r, s)
    a1, a2, log_share = _angles(u, p, r, s)
    x = xp.minimum((a1 + a2) / s - 0.5 * s, LARGEST)  # t - s
    t = xp.maximum(x + s, 0.5 * s)
    log_p, log_r = xp.log(p), xp.log(r)
    reached = log_p + log_r
    density = log_normal_density(x)
    moved = density + log_share + log_mills_difference(t, s)
    profile = reached + xp.logaddexp(log_saturating_tail(x, s), moved)
    absent = _log_rest(p)
    near = log_mills(t) + reached + density - a2
    far = log_mills(t + s) + reached + density + log_share
    tail = xp.logaddexp(near, far)
    tail = xp.logaddexp(tail, absent + log_normal_tail(t))
    kept = log_p + _log_rest(r) + log_normal_tail(t + s)
    return profile, xp.logaddexp(tail, kept)


def _angles(u: Array, p: Array, r: Array, s: Array) -> tuple[Array, Array, Array]:
    """A1, A2 and ``log(1 - e^{-A2})``, for p and r in (0, 1]."""
    xp = namespace(u, p, r, s)
    a1 = inner_exponent(u, p * r / ((1 - p) + p * r))
    a1 = xp.minimum(a1, LARGEST)
    some = (u > 0) & (r < 1)
    log_g1 = xp.where(some, u, 1.0)
    log_g1 = xp.minimum(log_g1 + xp.log(-xp.expm1(-log_g1)), LARGEST)
    log_odds = xp.log1p(-xp.where(some, r, 0.5)) - xp.log(r)
    log_kappa = math.log(4.0) + log_g1 + log_odds - s * s - 2 * a1
    some = some & (log_kappa > _LEAST_LOG_SHARE)
    kappa = xp.exp(xp.where(some, log_kappa, 0.0))
    rise = kappa / (2 * (1 + xp.sqrt(1 + kappa)))  # e^{A2} - 1
    rise = xp.where(some, rise, 1.0)
    a2 = xp.log1p(rise)
    share = xp.where(some, xp.log(rise) - a2, _LOG_ZERO)
    return a1, xp.where(some, a2, 0.0), share


def _backward(u: Array, p: Array, r: Array, s: Array) -> Tails:
    """Profile and tail of Q2 against P2, for positive p and r.

    With ``k = pr - (g-1)(1-p)``, and D and G of the Gaussian at ``1 + (g-1)/k``,

        h = k D,   -dh/du = g (1-p) (D + G) + k g / (g-1+r) G.
    """
    xp = namespace(u, p, r, s)
    taken = (1 - p) * xp.expm1(xp.minimum(u, _LARGEST_EXPONENT))
    k = p * r - taken * (1 - _DIFFERENCE_ERROR * xp.finfo(u.dtype).eps)
    alive = k > 0
    k = xp.where(alive, k, 1.0)
    # 1 + (g-1)/k = p (g - 1 + r) / k
    small = u <= 1
    near = xp.log1p(xp.expm1(xp.where(small, u, 1.0)) / k)
    large = xp.where(small, 1.0, u)
    far = large + xp.log1p(-(1 - r) * xp.exp(-large)) + xp.log(p) - xp.log(k)
    inner = xp.where(alive, xp.where(small, near, far), 1.0)
    profile, tail = gaussian_tails(s, inner)
    absent = xp.minimum(u, 700.0) + _log_rest(p) + xp.logaddexp(profile, tail)
    # g / (g - 1 + r), without the cancellation
    slope = -xp.log(r + (1 - r) * -xp.expm1(-u))
    whole = xp.logaddexp(xp.where(p < 1, absent, -xp.inf), xp.log(k) + slope + tail)
    return (
        xp.where(alive, xp.log(k) + profile, -xp.inf),
        xp.where(alive, whole, -xp.inf),
    )


def _log_rest(rate: Array) -> Array:
    """``log(1 - rate)``, finite."""
    xp = namespace(rate)
    return xp.where(rate < 1, xp.log1p(-xp.where(rate < 1, rate, 0.5)), _LOG_ZERO)


# --- The joint law ---


@dataclass(frozen=True)
class _Logs:
    """Logarithms of the weights of P1, Q1, P2 and Q2; and the shift.

    Attributes:
      absent: of ``1 - p``.
      kept: of ``p (1 - r)``.
      reached: of ``p r``.
      drawn: of p.
      null: of ``1 - p + p r``.
      shift: s.
    """

    absent: Array
    kept: Array
    reached: Array
    drawn: Array
    null: Array
    shift: Array

    @classmethod
    def of(cls, p: Array, r: Array, s: Array) -> _Logs:
        """Of rates in (0, 1]."""
        xp = namespace(p, r, s)
        log_p, log_r = xp.log(p), xp.log(r)
        null = xp.log((1 - p) + p * r)
        return cls(_log_rest(p), log_p + _log_rest(r), log_p + log_r, log_p, null, s)

    def upper(self, x: Array) -> tuple[Array, Array]:
        """Log-ratio of P1 to Q1 and log-density of Q1, at real ``x > s/2``."""
        xp = namespace(x, self.shift)
        s = self.shift
        tilt = s * (x - 0.5 * s)
        base = xp.logaddexp(self.null, self.kept - tilt - s * s)
        excess = self.reached + tilt + xp.log(-xp.expm1(-tilt)) - base
        return xp.logaddexp(0.0, excess), base - 0.5 * x * x - LOG_SQRT_2PI

    def lower(self, w: Array) -> tuple[Array, Array]:
        """Log-ratio of P2 to Q2 and log-density of Q2, at ``s - w``, ``w > s/2``."""
        xp = namespace(w, self.shift)
        s = self.shift
        tilt = s * (w - 0.5 * s)
        base = xp.logaddexp(self.null, self.kept - tilt)
        missing = xp.exp(self.reached + xp.log(-xp.expm1(-tilt)) - base)
        small = missing < 0.5
        near = xp.log1p(-xp.where(small, missing, 0.0))
        far = xp.logaddexp(self.absent, self.drawn - tilt) - base
        x = s - w
        return xp.where(small, near, far), base - 0.5 * x * x - LOG_SQRT_2PI

    def upper_complex(self, x: Pair) -> tuple[Pair, Pair]:
        """Log-ratio of P1 to Q1, and log-density of Q1 over that of N(0)."""
        xp = namespace(x[0], self.shift)
        s = self.shift
        tilt = (s * (x[0] - 0.5 * s), s * x[1])
        base = log_add_complex(self.null, (self.kept - tilt[0] - s * s, -tilt[1]))
        shrunk = expm1_complex(-tilt[0], -tilt[1])
        rise = log_complex(-shrunk[0], -shrunk[1])
        excess = (
            self.reached + tilt[0] + rise[0] - base[0],
            tilt[1] + rise[1] - base[1],
        )
        return log_add_complex(xp.zeros_like(s), excess), base

    def lower_complex(self, x: Pair) -> tuple[Pair, Pair]:
        """Log-ratio of P2 to Q2, and log-density of Q2 over that of N(0)."""
        xp = namespace(x[0], self.shift)
        s = self.shift
        tilt = (s * (x[0] - 0.5 * s), s * x[1])
        base = log_add_complex(self.null, (self.kept + tilt[0], tilt[1]))
        # v = p r (l - 1) / base, without cancellation where the loss is small
        gained = expm1_complex(*tilt)
        scale = polar(self.reached - base[0], -base[1])
        v = times(scale, gained)
        near = log1p_complex(*v)
        top = log_add_complex(self.absent, (self.drawn + tilt[0], tilt[1]))
        small = v[0] * v[0] + v[1] * v[1] < 0.25
        y = (
            xp.where(small, near[0], top[0] - base[0]),
            xp.where(small, near[1], top[1] - base[1]),
        )
        return y, base


def _first_turn(logs: _Logs, s: Array) -> Array:
    """Where about ``P1/Q1 = 2``: ``p r (l² - l) = null l + kept e^{-s²}``."""
    xp = namespace(logs.null, s)
    root = xp.logaddexp(
        logs.null,
        0.5
        * xp.logaddexp(2 * logs.null, math.log(4.0) + logs.reached + logs.kept - s * s),
    )
    return xp.clip((root - math.log(2.0) - logs.reached) / s + 0.5 * s, 0.0, 1e300)


def _base_turn(logs: _Logs, s: Array) -> Array:
    """Where Q1's density leaves N(-s) for N(0)."""
    xp = namespace(logs.null, s)
    return xp.clip((logs.kept - logs.null) / s - 0.5 * s, -1e300, 1e300)


def _lower_turns(logs: _Logs, s: Array) -> tuple[Array, Array]:
    """Where P2's and Q2's densities leave N(s) for N(0), as places w."""
    xp = namespace(logs.null, s)
    return tuple(
        xp.clip(0.5 * s - (log_rest - log_drawn) / s, -1e300, 1e300)
        for log_rest, log_drawn in (
            (logs.absent, logs.drawn),
            (logs.null, logs.kept),
        )
    )


def _path_turns(
    logs: _Logs, s: Array
) -> tuple[tuple[Array, Array], tuple[Array, Array], Array]:
    """Turns of the two paths, and where the lower one may rise.

    That is nowhere where the losses end: beyond the turn they are ``e^{-sw}`` from
    there, and their imaginary part must not change its sign.
    """
    xp = namespace(logs.null, s)
    upper = (_first_turn(logs, s), _base_turn(logs, s))
    top, bottom = _lower_turns(logs, s)
    endless = logs.absent <= 0.5 * _LOG_ZERO  # p = 1: P2 has no turn
    top = xp.where(endless, bottom, top)

    def kept(turn: Array) -> Array:
        return xp.clip(turn, 0.5 * s, 0.5 * s + 1e9)

    lower = (kept(top), kept(bottom))
    rise = xp.where(endless, lower[1], 1e9)
    return (kept(upper[0]), kept(upper[1])), lower, rise


# --- Moments ---


def _upper_windows(
    t: Array, logs: _Logs, s: Array, direction: str
) -> tuple[Windows, Array]:
    """Where the integrand has weight at ``x > s/2``; as of the antipodal pair."""
    xp = namespace(t, s)
    alpha = 1 + t
    zero = xp.zeros_like(s)
    turn, base_turn = _first_turn(logs, s), _base_turn(logs, s)
    knee = xp.maximum(turn - xp.log(alpha) / s, 0.5 * s)
    centers = [0.5 * s, s, xp.clip(base_turn, 2 * s, 3 * s), xp.clip(knee, s, 3 * s)]
    if direction == "forward":

        def slope(x: Array) -> tuple[Array, Array]:
            """Slope of log(Q1 (P1/Q1)^alpha) plus x, and its derivative."""
            base_weight = sigmoid(s * (base_turn - x))
            terms = xp.stack(
                [
                    logs.absent + 0 * x,
                    logs.kept - s * (x + 0.5 * s),
                    logs.reached + s * (x - 0.5 * s),
                ]
            )
            _, down, up = softmax(xp.maximum(terms, -1e300))
            tilt = up - down
            return (
                s * (t * base_weight + alpha * tilt),
                s * s * (alpha * (up + down - tilt * tilt))
                - s * s * (t * base_weight * (1 - base_weight)),
            )

        top = (2 * alpha - 1) * s
        starts = xp.stack([top, alpha * s, zero])
        middle = xp.clip(base_turn, alpha * s, top)
        centers += [top, alpha * s, middle, *settle(slope, starts, zero, top)]
    return windows_around(
        centers,
        transitions(knee, turn, s),
        transitions(base_turn, base_turn, s),
    )


def _lower_windows(
    t: Array, logs: _Logs, s: Array, direction: str
) -> tuple[Windows, Array]:
    """Where the integrand has weight at ``x = s - w < s/2``, as places w.

    For small v it is ``v² Q2``, whose slope is that of 1, or of ``e^{-sx}`` between
    Q2's turn and s/2; else ``v Q2``, like N(0). Backward ``(Q2/P2)^t Q2`` has a bump
    at ``x = -t s`` between the turns of P2 and Q2.
    """
    xp = namespace(t, s)
    zero = xp.zeros_like(s)
    top, bottom = _lower_turns(logs, s)
    # alpha |v| = 1
    knee = 0.5 * s - (xp.log1p(t) + logs.reached - logs.kept) / s
    knee = xp.clip(knee, 0.5 * s, xp.maximum(bottom, 0.5 * s))
    centers = [0.5 * s, s, *(xp.clip(turn, s, 2 * s) for turn in (bottom, knee))]
    if direction == "backward":
        far = (1 + t) * s  # where x = -t s

        def fall(x: Array) -> Array:
            return -t * s * sigmoid(s * (x - (s - top)))

        def slope(w: Array) -> tuple[Array, Array]:
            """Slope, along w, of log(Q2 (Q2/P2)^t) plus (w - s)²/2, plus s."""
            of_top, of_base = sigmoid(s * (top - w)), sigmoid(s * (bottom - w))
            return (
                s + t * s * of_top - (1 + t) * s * of_base,
                s * s * (1 + t) * of_base * (1 - of_base)
                - s * s * t * of_top * (1 - of_top),
            )

        starts = xp.stack([far, s, xp.clip(bottom, s, far)])
        centers += [
            s - only_root(fall, -t * s, zero),
            xp.clip(top, s, far),
            *settle(slope, starts, zero, far),
        ]
    return windows_around(
        centers,
        transitions(knee, bottom, s),
        transitions(top, top, s),
    )
