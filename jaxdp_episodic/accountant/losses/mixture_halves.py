"""A pair of Gaussian mixtures with increasing ratio: profiles, moments, loss nodes.

References: docs/theory.md; Balle, Barthe, Gaboardi (2018), arXiv:1807.01647v2, Theorems
2, 8 and 9.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np

from jaxdp_episodic.accountant.losses.excess import (
    LARGEST_TURN,
    HalfLine,
    Windows,
    log_integral,
    settle,
    transitions,
    windows_around,
)
from jaxdp_episodic.accountant.losses.gaussian import LARGEST, weight_left
from jaxdp_episodic.accountant.losses.loss_nodes import (
    FURTHEST_LEFT,
    NodeRule,
    half_line,
    path_points,
)
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule, Quadrature, Tails
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    fori_loop,
    logsumexp,
    namespace,
    softmax,
    stored,
)
from jaxdp_episodic.accountant.numerics.special import (
    LOG_SQRT_2PI,
    Pair,
    expm1_complex,
    log1p_complex,
    log_add,
    log_complex,
    log_expm1,
    log_mills,
    log_mills_difference,
    log_normal_density,
    log_normal_tail,
    log_saturating_tail,
    polar,
    times,
)

# Relative error of profiles and tails for each unit of 1 + |log|. It is three times the
# largest error in 360 random settings (60-digit reference), which comes from rounding
# the logarithms of rates of 1e-12.
PROFILE_ERROR = 1e-14
LOG_ZERO = -1e30  # replaces log 0 where -inf would give NaN
# Largest number of Newton or bisection steps for the x of a given loss.
_MOST_STEPS = 60
# Newton steps end below this step, in nats; the error is then about its square.
_LAST_STEP = 1e-9
# Largest relative residual that is removed by a last step.
_LARGEST_RESIDUAL = 1e-3
# Largest exponent of a P/Q - 1 that is used only if small: its square is finite.
_LARGEST_EXPONENT = 100.0
_FEW_ROWS = 4  # up to this number of rows none is left out
# Terms this many nats below the largest are left out: e^-46 times 1e4 terms is 1e-16.
NEGLIGIBLE = 46.0
# How far right of the kink paths rise if two centers lie on either side of 0.
_LATER = 1.0
_FURTHEST_KINK = 1e9  # largest x of a kink


class Half(NamedTuple):
    """P against Q, mixtures with an increasing ratio; rows (A, ...) or (B, ...)."""

    # Q has components at 0 and at centers ``low`` < 0. P is Q after some weight has
    # moved right: from 0 to centers above ("rise"), from low to centers above ("turn"),
    # or from low to 0 ("fall"). So P - g Q changes its sign once (Descartes), at x. H_g
    # is a sum of positive terms with Mills ratios m: each moved weight to h times
    # phi(x-h) (m(x-h) - m(x)), and each negative coefficient of P - g Q at l < 0 times
    # phi(x-l) (m(x) - m(x-l)).

    way: str  # "rise", "turn" or "fall"
    low: Array  # (A, ...) centers below 0
    high: Array  # (B, ...) centers above 0; B = 0 for a "fall"
    move: Array  # log of the moved weights: (A, ...) for a "fall", else (B, ...)
    q_zero: Array  # (...) log of Q's weight at 0
    q_low: Array  # (A, ...) log of Q's weights at ``low``
    p_zero: Array  # (...) log of P's weight at 0; those at ``high`` are ``move``
    p_low: Array  # (A, ...) log of P's weights at ``low``

    @classmethod
    def rising(
        cls, high: Array, move: Array, q_zero: Array, p_zero: Array, *stays: Array
    ) -> Self:
        """Weight moves from 0 to ``high``, (B, ...), and some stays at others."""
        low, kept = stays or (high[:0], high[:0])
        return cls("rise", low, high, move, q_zero, kept, p_zero, kept)

    @property
    def falls(self) -> bool:
        """Whether weight moves to 0. Then losses are bounded if Q has weight there."""
        return self.way == "fall"

    @property
    def centers(self) -> Array:
        """All centers: below 0, 0, above; ascending except for padding."""
        xp = namespace(self.q_zero)
        return xp.concatenate([self.low, 0 * self.q_zero[None], self.high])

    @property
    def log_p(self) -> Array:
        """Log of P's weights at the centers."""
        xp = namespace(self.q_zero)
        moved = self.move[:0] if self.falls else self.move
        return xp.concatenate([self.p_low, self.p_zero[None], moved])

    @property
    def log_q(self) -> Array:
        """Log of Q's weights at the centers."""
        xp = namespace(self.q_zero)
        none = xp.full_like(self.high, LOG_ZERO)
        return xp.concatenate([self.q_low, self.q_zero[None], none])

    @property
    def moves(self) -> tuple[Array, Array]:
        """Start and end of each move."""
        if self.way == "rise":
            return 0 * self.high, self.high
        return self.low, 0 * self.low if self.falls else self.high

    # --- On the real line ---

    def log_base(self, x: Array) -> Array:
        """Returns the log of Q's density over that of N(0), at x."""
        if not len(self.low):
            return _wide(self.q_zero, x, 0) + 0 * x
        low, weight = (_wide(a, x) for a in (self.low, self.q_low))
        below = logsumexp(weight + low * (x - 0.5 * low))
        return log_add(_wide(self.q_zero, x, 0), below)

    def gained(self, x: Array) -> tuple[Array, Array]:
        """Returns ``(P - Q) / N(0)`` at x as the log of a scale, and a factor."""
        xp = namespace(x, self.move)
        start, end, move = (_wide(a, x) for a in (*self.moves, self.move))
        tilt = (end - start) * (x - 0.5 * (end + start))
        larger = xp.where(tilt > 0, end, start)
        size = move + larger * (x - 0.5 * larger)
        scale = xp.max(size, axis=0)
        shrunk = xp.expm1(-xp.abs(tilt))
        part = xp.exp(size - scale) * xp.where(tilt > 0, -shrunk, shrunk)
        return scale, xp.sum(part, axis=0)

    def log_parts(self, x: Array) -> tuple[Array, Array]:
        """Returns log P/Q and log Q at real x >= `floor`."""
        xp = namespace(x, self.move)
        scale, number = self.gained(x)
        base = self.log_base(x)
        log_ratio = scale + xp.log(xp.maximum(number, 1e-300)) - base
        return log_add(0.0, log_ratio), base - 0.5 * x * x - LOG_SQRT_2PI

    def largest_loss(self) -> Array:
        """Returns the bound of losses: finite for a "fall" if Q keeps N(0)."""
        xp = namespace(self.move)
        kept = (self.q_zero > 0.5 * LOG_ZERO) & self.falls
        gained = logsumexp(self.move) - xp.where(kept, self.q_zero, 0.0)
        return xp.where(kept, log_add(0.0, gained), xp.inf)

    def floor(self) -> Array:
        """Returns the x where P/Q is 1."""
        start, end = self.moves
        if len(start) == 1:
            return 0.5 * (start + end)[0]
        xp = namespace(self.move)
        return self.root(xp.full_like(self.q_zero, LOG_ZERO), logsumexp(self.move))

    def place(self, u: Array) -> Array:
        """Returns the x where the loss is u >= 0; not for a "fall"."""
        log_gain = np.where(u > 0, log_expm1(np.where(u > 0, u, 1.0)), LOG_ZERO)
        return self.relevant(log_gain, log_gain).root(log_gain, log_gain)

    def root(self, log_gain: Array, log_left: Array) -> Array:
        """Returns the x where P = g Q, given log(g - 1) and log `weight_left`."""
        # Newton's method for the difference of the logs of the positive and the
        # negative part, one of which is convex; a last step for P - g Q itself recovers
        # all digits.
        xp = namespace(log_gain, self.move)
        at_zero, at_low = self._lacking(log_gain)

        def sides(x: Array) -> tuple[Array, Array, Array]:
            """Returns the logs of both parts and the slope of their difference."""
            terms = at_low + self.low * (x - 0.5 * self.low)
            if self.falls:
                less, mean = _log_mean(terms, self.low)
                return log_left, less, -mean
            below = xp.concatenate([at_zero[None], terms])
            centers = xp.concatenate([0 * at_zero[None], self.low])
            less, mean = _log_mean(below, centers)
            more, top = _log_mean(
                self.move + self.high * (x - 0.5 * self.high), self.high
            )
            return more, less, top - mean

        low, high = self._bracket(log_gain, log_left)

        def improve(_: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
            x, low, high, _ = state
            more, less, slope = sides(x)
            low, high = xp.where(more <= less, x, low), xp.where(more >= less, x, high)
            step = x - (more - less) / slope
            inside = (step >= low) & (step <= high)
            moved = xp.where(inside, step, 0.5 * (low + high))
            return moved, low, high, xp.abs(moved - x) * slope

        def settled(s: tuple[Array, ...]) -> Any:  # or no float is in the bracket
            return np.all((s[3] <= _LAST_STEP) | (np.nextafter(s[1], s[2]) >= s[2]))

        start = high, low, high, xp.full_like(high, xp.inf)
        x = fori_loop(xp, 0, _MOST_STEPS, improve, start, settled)[0]
        _, less, slope = sides(x)
        scale, number = self.gained(x)
        rest = number * xp.exp(scale - less)
        rest = rest - xp.exp(log_gain + self.log_base(x) - less)
        rest = xp.where(xp.abs(rest) < _LARGEST_RESIDUAL, rest, 0.0)
        return x - rest / slope

    def _bracket(self, log_gain: Array, log_left: Array) -> tuple[Array, Array]:
        """Returns bounds of the root, which follow from single terms."""
        xp = namespace(log_gain, self.move)
        at_zero, at_low = self._lacking(log_gain)
        if self.falls:
            low, high = (
                xp.max((log_left - n - at_low) / self.low + 0.5 * self.low, axis=0)
                for n in (0.0, math.log(len(self.low)))
            )
        else:
            bottom = xp.concatenate([at_zero[None], at_low - 0.5 * self.low**2])
            high = (logsumexp(bottom) - self.move) / self.high + 0.5 * self.high
            high = xp.min(high, axis=0)
            low = xp.zeros_like(high)
        low, high = xp.clip(low, -LARGEST, LARGEST), xp.clip(high, -LARGEST, LARGEST)
        return low, xp.maximum(low, high)

    def relevant(self, log_gain: Array, log_left: Array) -> Self:
        """Leaves out the last rows that are negligible in all settings (NumPy only)."""
        if namespace(self.move) is not np or len(self.move) <= _FEW_ROWS:
            return self
        low, high = self._bracket(log_gain, log_left)
        reach, far = (-low, -self.low) if self.falls else (high, self.high)
        kept = 1
        # Weights, densities at the root, and weights beyond it; of short moves less.
        beyond = -0.5 * np.maximum(reach - far, 0.0) ** 2
        for size in (self.move, self.move + np.log(np.minimum(far, 1.0))):
            for term in (size, size + far * (reach - 0.5 * far), size + beyond):
                # NaN is not negligible.
                counts = ~(term <= np.max(term, axis=0) - NEGLIGIBLE)
                rows = np.flatnonzero(np.any(counts, axis=tuple(range(1, term.ndim))))
                kept = max(kept, 1 + int(np.max(rows, initial=0)))
        names = "low", "high", "move", "q_low", "p_low"
        return self._replace(**{name: getattr(self, name)[:kept] for name in names})

    def _lacking(self, log_gain: Array) -> tuple[Array, Array]:
        """Returns the logs of the negative coefficients of P - g Q: at 0, low."""
        at_zero, at_low = log_gain + self.q_zero, log_gain + self.q_low
        if self.way == "rise":
            return log_add(at_zero, logsumexp(self.move)), at_low
        return at_zero, log_add(at_low, self.move)

    def tails(self, u: Array) -> Tails:
        """Returns the profile and the tail at ``u = log g >= 0``; see the class."""
        xp = namespace(u, self.move)
        some = u > 0
        safe = xp.where(some, u, 1.0)
        log_gain = xp.where(some, log_expm1(safe), LOG_ZERO)
        log_share = xp.where(some, xp.log(-xp.expm1(-safe)), LOG_ZERO)
        left = xp.ones_like(u)
        if self.falls:
            moved = xp.exp(logsumexp(self.move))
            left = weight_left(u, moved, xp.exp(self.q_zero))
        alive = left > 0
        log_left = xp.log(xp.where(alive, left, 1.0))
        return self.relevant(log_gain, log_left)._tails(
            u, (log_gain, log_share, log_left), alive
        )

    def _tails(self, u: Array, logs: tuple[Array, ...], alive: Array) -> Tails:
        """Computes `tails`; ``logs`` are of g - 1, 1 - 1/g and `weight_left`."""
        xp = namespace(u, self.move)
        log_gain, log_share, log_left = logs
        x = self.root(log_gain, log_left)
        from_zero, from_low = x - 0 * self.q_zero, x - self.low
        density = logsumexp(self.log_p + log_normal_density(x - self.centers))
        base = self.log_base(x)
        share = self.q_low + self.low * (x - 0.5 * self.low) - base
        zero = self.q_zero - base
        if self.falls:
            lacking = self._lacking(log_gain)[1] + self.low * (x - 0.5 * self.low)
            lacking = lacking - logsumexp(lacking)
            lost = _sum_of(lacking, log_lost, x, -self.low, rest=LOG_ZERO)
            profile = log_left + lost
            middle = u + self.q_zero + log_normal_tail(from_zero)
        else:
            beyond = -0.5 * xp.maximum(x - self.high, 0.0) ** 2
            profile = _sum_of(
                self.move + beyond,
                lambda x, high, less: log_saturating_tail(x - high, high) - less,
                x,
                self.high,
                beyond,
                rest=LOG_ZERO,
            )
            if len(self.low):
                lacking = log_share + density + share
                if self.way == "turn":
                    lacking = log_add(lacking, self.move + log_normal_density(from_low))
                at = x + 0 * self.low, -self.low
                profile = _sum_of(lacking, log_mills_difference, *at, rest=profile)
            middle = density + zero + log_mills(from_zero)
        tail = middle
        if len(self.low):
            tail = _sum_of(density + share, log_mills, from_low, rest=middle)
        return (xp.where(alive, profile, -xp.inf), xp.where(alive, tail, -xp.inf))

    # --- Moments ---

    def excess(self, t: Array, rule: MomentRule, floor: Array) -> tuple[Array, ...]:
        """Returns ``log E_Q[f(P/Q - 1); x > floor]``; see `excess.log_integral`."""
        parts, (panels, nodes, nats) = len(self.move), rule.quadrature
        if not panels:
            # Up to order 2 the integrand may peak where that of order 2 does.
            xp, backward = namespace(t), rule.direction == "backward"
            order = xp.where(backward, 1.0, xp.maximum(t, 1.0))
            # Q's mean center increases with x, so these x bracket the last peak.
            first = (1 + order) * xp.max(self.centers, axis=0)
            base = self.log_q + self.centers * (first - 0.5 * self.centers)
            last = first - order * _log_mean(base, self.centers)[1]
            line, peaks = self.half_line(last, nats), xp.stack([first, last])
            return log_integral(self.log_parts, line, peaks, floor, t, rule)
        # More panels for more peaks, or for one far from the others.
        panels = (2 + parts) * panels if parts > 1 else panels * (2 + self.falls) // 2
        rule = rule._replace(quadrature=Quadrature(panels, nodes))
        windows = self._windows(t, rule.direction, floor)
        return log_integral(self.log_parts, *windows, floor, t, rule)

    def half_line(self, last: Array, nats: Array | float) -> HalfLine:
        """Returns a rule for moments whose last peak is at most there."""
        # A sampled Gaussian's lattice loses a third of its nats, this one does not.
        # Peaks are sharper where a rare component of Q at 0 takes over.
        xp = namespace(self.q_zero)
        rare = xp.where(self.q_zero > 0.5 * LOG_ZERO, -self.q_zero, 0.0)
        furthest = xp.maximum(_widest(self.centers), LARGEST_TURN) * xp.sqrt(
            1 + rare / 25
        )
        return HalfLine.of(self.floor(), furthest, last, 0.65 * nats)

    def _windows(self, t: Array, direction: str, floor: Array) -> tuple[Windows, Array]:
        """Returns windows where the integrand is not negligible, and their centers."""
        # The integrand is a product of powers of mixtures. It peaks where x is a
        # weighted sum of their centers, or at a kink between two such points.
        xp = namespace(t, self.move)
        alpha, centers, log_p, log_q = 1 + t, self.centers, self.log_p, self.log_q
        has_p, has_q = log_p > 0.5 * LOG_ZERO, log_q > 0.5 * LOG_ZERO
        most = xp.max(xp.where(has_p, centers, -xp.inf), axis=0)
        near = xp.max(xp.where(has_q, centers, -xp.inf), axis=0)
        far = xp.min(xp.where(has_q, centers, xp.inf), axis=0)
        kinks = _kinks(centers, log_p) + _kinks(centers, log_q)
        (lead, _), (base, _) = self.sheet().lead_kinks(), kinks[-1]
        knee = lead[0] - xp.log(alpha) / _widest(centers)
        wide = 2 * most - far
        peaks = [floor, most, 2 * most - near, *self.high, *(2 * self.high)]
        peaks += [xp.clip(base, 2 * most - near, wide), xp.clip(knee, most, wide)]
        settled: Any = None
        if direction != "backward":
            both, places = (
                xp.stack([log_p, log_q], axis=1)[:, :, None],
                centers[:, None, None],
            )
            top, first = alpha * most - t * far, alpha * most - t * near
            peaks += [top, first, xp.clip(base, first, top)]

            def slope(x: Array) -> tuple[Array, Array]:
                """Returns the derivative of the exponent, plus x, and its own."""
                share = softmax(both + places * (x - 0.5 * places))
                p, q = mean = (share * places).sum(axis=0)
                pp, qq = (share * (places - mean) ** 2).sum(axis=0)
                return alpha * p - t * q, alpha * pp - t * qq

            starts = xp.concatenate([alpha * centers - t * near, top[None], base[None]])
            starts = xp.clip(starts, floor, top)
            ends = floor, xp.maximum(top, floor)

            settled = functools.partial(settle, slope, starts, *ends)

        graded = [
            transitions(kink - xp.log(alpha) / gap, kink, gap) for kink, gap in kinks
        ]
        return windows_around(peaks, *graded, between=settled)

    def sheet(self, rows: int = 0) -> Sheet:
        """Returns the pair for nodes in the plane, padded to a number of rows."""
        xp = namespace(self.move)
        weights = xp.stack([self.log_p, self.log_q], axis=1)
        none = xp.zeros((max(rows - len(weights), 0), *weights.shape[1:]))
        return Sheet(
            xp.concatenate([none[:, 0], self.centers]),
            xp.concatenate([none + LOG_ZERO, weights]),
            xp.stack([*self.moves, self.move]),
            self.floor(),
            self.largest_loss(),
        )


class Sheet(NamedTuple):
    """P and Q of `Half` pairs at complex points; rows of components or of moves."""

    centers: Array  # (C, ...)
    weights: Array  # (C, 2, ...) logs of P's and of Q's weights at the centers
    moves: Array  # (3, B, ...) starts and ends of moves, and logs of their weights
    floor: Array  # (...) the x where P/Q is 1
    most: Array  # (...) the bound of losses, or inf

    def lead_kinks(self) -> tuple[Array, Array]:
        """Returns the x from which the last center has half of P's, of Q's density.

        And how much further right paths shall rise.
        """
        # If a center is further away than the last center is from 0, zeros of the
        # density lie closer to the real line, so paths must rise later.
        xp, weight = namespace(self.floor), self.weights
        centers = self.centers[:, None]
        has = weight > 0.5 * LOG_ZERO
        last = xp.max(xp.where(has, centers, -xp.inf), axis=0)
        leads = has & (centers >= last)
        top = logsumexp(xp.where(leads, weight, LOG_ZERO))
        other = has & ~leads
        gap = xp.where(other, last - centers, 1.0)
        number = xp.maximum(xp.sum(other, axis=0), 1)
        kink = (weight - top + xp.log(number)) / gap + 0.5 * (last + centers)
        kink = xp.where(other, kink, -xp.inf)
        most = xp.max(kink, axis=0)
        apart = xp.max(xp.where(other & (kink >= most), gap, 0.0), axis=(0, 1))
        later = xp.where(apart > 1.5 * _widest(self.centers), _LATER, 0.0)
        return xp.clip(most, self.floor, self.floor + _FURTHEST_KINK), later

    def at(self, x: Pair, kinks: Array) -> tuple[Pair, Pair]:
        """Returns the logs of P/Q, and of Q over N(0), at complex (..., n) points."""
        xp = namespace(x[0])
        # The logs of both densities over that of N(0), (2, ..., n).
        centers, weight = (
            _wide(a, x[0], 2) for a in (self.centers[:, None], self.weights)
        )
        has = weight > 0.5 * LOG_ZERO
        last = xp.max(xp.where(has, centers, -xp.inf), axis=0)
        terms = xp.where(has, weight + centers * (x[0] - 0.5 * centers), LOG_ZERO)
        most = xp.max(terms, axis=0)
        common = xp.where(x[0] > _wide(kinks, x[0]), last * x[1], 0.0)
        parts = polar(terms - most, centers * x[1] - common)
        re, im = log_complex(*(xp.sum(a, axis=0) for a in parts))
        whole, base = zip(re + most, im + common, strict=True)
        start, end, move = (_wide(a, x[0]) for a in self.moves)
        tilt = (end - start) * (x[0] - 0.5 * (end + start)), (end - start) * x[1]
        # e^a - e^b as the larger one times expm1. The angle may be exactly 0.
        sign = xp.where(tilt[0] > 0, -1.0, 1.0)
        less = expm1_complex(-xp.abs(tilt[0]), sign * tilt[1])
        larger = xp.where(tilt[0] > 0, end, start)
        size = move + larger * (x[0] - 0.5 * larger) - base[0]
        angle = larger * x[1] - base[1]
        part = times(polar(xp.minimum(size, _LARGEST_EXPONENT), angle), less)
        ratio = stored(xp, tuple(xp.sum(sign * a, axis=0) for a in part))
        small = ratio[0] ** 2 + ratio[1] ** 2 < 0.25
        near = log1p_complex(*(xp.where(small, a, 0.0) for a in ratio))
        loss = (
            xp.where(small, a, b - c) for a, b, c in zip(near, whole, base, strict=True)
        )
        return tuple(loss), base

    def path(self, above: Array, rule: NodeRule) -> tuple[Pair, ...]:
        """Returns points, weighted dx, losses, and log Q over N(0), each (V, J, n)."""
        _, log_cut, height, num_nodes, _ = rule
        xp, floor = namespace(log_cut, self.floor), self.floor
        kinks, later = self.lead_kinks()
        # If losses are bounded, the path must not rise behind the kink: a branch cut is
        # there.
        rise = xp.max(kinks, axis=0) + later
        rise = xp.where(xp.isfinite(self.most), floor + _FURTHEST_KINK, rise)
        weight = xp.max(self.weights, axis=1)
        has = weight > 0.5 * LOG_ZERO
        seen = self.centers + xp.sqrt(2 * xp.maximum(weight - log_cut[:, None], 1.0))
        seen = xp.max(xp.where(has, seen, -xp.inf), axis=1)
        high = xp.maximum(xp.sqrt(-2 * log_cut), seen)
        # Beyond it Q has a probability of 1e-19.
        most = xp.maximum(floor, 0.0) - FURTHEST_LEFT
        high = xp.where(above > 0, high, xp.minimum(high, most))
        high = xp.maximum(high, floor + 2.0)
        last = xp.max(xp.where(has, self.centers, 0.0), axis=0)
        s, both = _widest(self.centers), (kinks[0], kinks[1])
        line = stored(xp, half_line(floor, high, both, s, num_nodes))
        x, element = path_points(line, floor, rise, s, height, last=last)
        return x, element, *stored(xp, self.at(x, kinks))


def _sum_of(
    bound: Array, factor: Callable[..., Array], *at: Array, rest: Array | float
) -> Array:
    """Returns the log of ``e^rest`` plus the sum over rows of ``e^bound * factor``."""
    # In NumPy the factor of a negligible term is not computed. It is at most 2, and at
    # most the width of the move, the second of ``at``; without one it is a Mills ratio.
    if namespace(bound) is not np or len(bound) <= _FEW_ROWS:
        return log_add(rest, logsumexp(bound + factor(*at)))
    first, *width = at
    if width:
        most = np.log(np.minimum(width[0], 1.0))
    else:
        most = np.minimum(first, 0.0) ** 2 / 2
    size = bound + most
    used = size > np.maximum(np.max(size, axis=0), rest) - NEGLIGIBLE
    terms = np.full(bound.shape, LOG_ZERO)
    chosen = (np.broadcast_to(a, bound.shape)[used] for a in at)
    terms[used] = bound[used] + factor(*chosen)
    return log_add(rest, logsumexp(terms))


def log_rest(rate: Array) -> Array:
    """Returns ``log(1 - rate)``, kept finite."""
    xp = namespace(rate)
    return xp.where(rate < 1, xp.log1p(-xp.where(rate < 1, rate, 0.5)), LOG_ZERO)


def log_lost(t: Array, width: Array) -> Array:
    """Returns ``log(phi(t) (m(t) - m(t + width)))`` for any t and any width > 0."""
    xp = namespace(t, width)
    t, width = xp.broadcast_arrays(t, width)
    # If t < -1 and t + width < 0: -expm1(z) + phi(t) (m(-t-width) - m(-t)) with z =
    # width (t + width / 2).
    left = (t < -1) & (t + width < 0)
    edge = xp.where(left, t, -2.0)
    step = xp.where(left, width, 1.0)
    z = step * (edge + 0.5 * step)
    rest = log_normal_density(edge) + log_mills_difference(-edge - step, step)
    inside = xp.log(-xp.expm1(z) + xp.exp(rest))
    return xp.where(left, inside, log_saturating_tail(xp.where(left, 0.0, t), width))


def _widest(centers: Array) -> Array:
    """Returns the largest distance of a center from 0."""
    xp = namespace(centers)
    return xp.max(xp.abs(centers), axis=0)


def _kinks(centers: Array, weight: Array) -> list[tuple[Array, Array]]:
    """Returns where each component falls below the next one, and their distance."""
    xp = namespace(weight)
    found = []
    after, above = centers[-1], weight[-1]
    for center, own in zip(centers[-2::-1], weight[-2::-1], strict=True):
        gap = xp.where(after > center, after - center, xp.maximum(xp.abs(after), 1e-60))
        kink = (xp.maximum(own, -1e6) - xp.maximum(above, -1e6)) / gap
        kink = xp.clip(kink + 0.5 * (after + center), -1e300, 1e300)
        found.append((kink, gap))
        has = own > 0.5 * LOG_ZERO
        after, above = xp.where(has, center, after), xp.where(has, own, above)
    return found


def _wide(a: Array, x: Array, rows: int = 1) -> Array:
    """Inserts axes between the rows and the settings of ``a`` to match points x."""
    missing = x.ndim - (a.ndim - rows)
    return a.reshape((*a.shape[:rows], *(1,) * missing, *a.shape[rows:]))


def _log_mean(terms: Array, values: Array) -> tuple[Array, Array]:
    """Returns the log of a sum of exponentials, and the mean of their values."""
    xp = namespace(terms)
    total = logsumexp(terms)
    return total, xp.sum(xp.exp(terms - total) * values, axis=0)
