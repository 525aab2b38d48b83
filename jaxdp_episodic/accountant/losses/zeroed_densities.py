"""Densities of the zeroed Gaussian's joint loss distribution, on two half-lines.

The half-lines meet at s/2. Here are the densities on the real line and in the complex
plane, where they change from one Gaussian to another, and where the integrands of the
moments have their weight; see `zeroed_gaussian`.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxdp_episodic.accountant.losses.integration_paths import Pair
from jaxdp_episodic.accountant.losses.loss_nodes import LOG_SQRT_2PI
from jaxdp_episodic.accountant.losses.windows import (
    Windows,
    only_root,
    rising_kink,
    settle,
    three_bumps,
    transitions,
    windows_around,
)
from jaxdp_episodic.accountant.numerics.complex_exponentials import (
    expm1_complex,
    log1p_complex,
    log_add_complex,
    log_complex,
    polar,
    times,
)
from jaxdp_episodic.accountant.numerics.loops import Array, namespace, sigmoid
from jaxdp_episodic.accountant.numerics.special import log_add

# Stands for log 0 where -inf would poison a gradient.
LOG_ZERO = -1e30


def log_rest(rate: Array) -> Array:
    """``log(1 - rate)``, finite."""
    xp = namespace(rate)
    return xp.where(rate < 1, xp.log1p(-xp.where(rate < 1, rate, 0.5)), LOG_ZERO)


@dataclass(frozen=True)
class ZeroedLogs:
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
    def of(cls, p: Array, r: Array, s: Array) -> ZeroedLogs:
        """Of rates in (0, 1]."""
        xp = namespace(p, r, s)
        log_p, log_r = xp.log(p), xp.log(r)
        null = xp.log((1 - p) + p * r)
        return cls(log_rest(p), log_p + log_rest(r), log_p + log_r, log_p, null, s)

    def upper(self, x: Array) -> tuple[Array, Array]:
        """Log-ratio of P1 to Q1 and log-density of Q1, at real ``x > s/2``."""
        xp = namespace(x, self.shift)
        s = self.shift
        tilt = s * (x - 0.5 * s)
        base = log_add(self.null, self.kept - tilt - s * s)
        excess = self.reached + tilt + xp.log(-xp.expm1(-tilt)) - base
        return log_add(0.0, excess), base - 0.5 * x * x - LOG_SQRT_2PI

    def lower(self, w: Array) -> tuple[Array, Array]:
        """Log-ratio of P2 to Q2 and log-density of Q2, at ``s - w``, ``w > s/2``."""
        xp = namespace(w, self.shift)
        s = self.shift
        tilt = s * (w - 0.5 * s)
        base = log_add(self.null, self.kept - tilt)
        missing = xp.exp(self.reached + xp.log(-xp.expm1(-tilt)) - base)
        small = missing < 0.5
        near = xp.log1p(-xp.where(small, missing, 0.0))
        far = log_add(self.absent, self.drawn - tilt) - base
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


def _first_kink(logs: ZeroedLogs, s: Array) -> Array:
    """Where about ``P1/Q1 = 2``."""
    kink = rising_kink(logs.null, logs.reached, logs.kept, s)
    return namespace(kink).clip(kink, 0.0, 1e300)


def _base_kink(logs: ZeroedLogs, s: Array) -> Array:
    """Where Q1's density leaves N(-s) for N(0)."""
    xp = namespace(logs.null, s)
    return xp.clip((logs.kept - logs.null) / s - 0.5 * s, -1e300, 1e300)


def _lower_kinks(logs: ZeroedLogs, s: Array) -> tuple[Array, Array]:
    """Where P2's and Q2's densities leave N(s) for N(0), as places w."""
    xp = namespace(logs.null, s)
    return tuple(
        xp.clip(0.5 * s - (log_rest - log_drawn) / s, -1e300, 1e300)
        for log_rest, log_drawn in ((logs.absent, logs.drawn), (logs.null, logs.kept))
    )


def path_kinks(
    logs: ZeroedLogs, s: Array
) -> tuple[tuple[Array, Array], tuple[Array, Array], Array]:
    """Turns of the two paths, and where the lower one may rise.

    That is nowhere where the losses end: beyond the kink they are ``e^{-sw}`` from
    there, and their imaginary part must not change its sign.
    """
    xp = namespace(logs.null, s)
    upper = (_first_kink(logs, s), _base_kink(logs, s))
    top, bottom = _lower_kinks(logs, s)
    endless = logs.absent <= 0.5 * LOG_ZERO  # p = 1: P2 has no kink
    top = xp.where(endless, bottom, top)

    def kept(kink: Array) -> Array:
        return xp.clip(kink, 0.5 * s, 0.5 * s + 1e9)

    lower = (kept(top), kept(bottom))
    rise = xp.where(endless, lower[1], 1e9)
    return (kept(upper[0]), kept(upper[1])), lower, rise


# --- Moments ---


def upper_windows(
    t: Array, logs: ZeroedLogs, s: Array, direction: str
) -> tuple[Windows, Array]:
    """Where the integrand has weight at ``x > s/2``; as of the antipodal pair."""
    xp = namespace(t, s)
    alpha = 1 + t
    zero = xp.zeros_like(s)
    kink, base_kink = _first_kink(logs, s), _base_kink(logs, s)
    knee = xp.maximum(kink - xp.log(alpha) / s, 0.5 * s)
    centers = [0.5 * s, s, xp.clip(base_kink, 2 * s, 3 * s), xp.clip(knee, s, 3 * s)]
    if direction == "forward":
        slope = three_bumps(logs.absent, logs.kept, logs.reached, base_kink, t, s)
        top = (2 * alpha - 1) * s
        starts = xp.stack([top, alpha * s, zero])
        middle = xp.clip(base_kink, alpha * s, top)
        centers += [top, alpha * s, middle, *settle(slope, starts, zero, top)]
    return windows_around(
        centers, transitions(knee, kink, s), transitions(base_kink, base_kink, s)
    )


def lower_windows(
    t: Array, logs: ZeroedLogs, s: Array, direction: str
) -> tuple[Windows, Array]:
    """Where the integrand has weight at ``x = s - w < s/2``, as places w.

    For small v it is ``v² Q2``, whose slope is that of 1, or of ``e^{-sx}`` between
    Q2's kink and s/2; else ``v Q2``, like N(0). Backward ``(Q2/P2)^t Q2`` has a bump
    at ``x = -t s`` between the kinks of P2 and Q2.
    """
    xp = namespace(t, s)
    zero = xp.zeros_like(s)
    top, bottom = _lower_kinks(logs, s)
    # alpha |v| = 1
    knee = 0.5 * s - (xp.log1p(t) + logs.reached - logs.kept) / s
    knee = xp.clip(knee, 0.5 * s, xp.maximum(bottom, 0.5 * s))
    centers = [0.5 * s, s, *(xp.clip(kink, s, 2 * s) for kink in (bottom, knee))]
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
        centers, transitions(knee, bottom, s), transitions(top, top, s)
    )
