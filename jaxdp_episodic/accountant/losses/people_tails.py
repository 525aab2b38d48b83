"""Profiles of a person's visible components: one root each, sums of normal tails.

With ``b_j`` and p of `people_components`, ``M^± = sum_{j>=1} b_j / p e^{±jsx-j²s²/2}``
and numbers ``K >= 0`` and ``c >= 0`` of the theorem, ``B^+ - c B^- - g N(0)`` (or
without ``N(0)``) is positive beyond the one t where ``M^+ = K + c M^-`` (Descartes'
rule of signs), and its mass there is, with m the Mills ratio,

    p sum_j b_j / p [phi(t-js) (m(t-js) - m(t)) + c phi(t+js) (m(t) - m(t+js))]:

all terms are positive, at the g for which that t is the root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.gaussian import LARGEST, inner_exponent
from jaxdp_episodic.accountant.losses.mixture_halves import log_lost
from jaxdp_episodic.accountant.losses.people_components import (
    LOG_ZERO,
    Components,
    Terms,
    log_complement,
)
from jaxdp_episodic.accountant.losses.privacy_loss import Tails
from jaxdp_episodic.accountant.losses.sampled import weight_left
from jaxdp_episodic.accountant.numerics.loops import Array, fori_loop, logsumexp
from jaxdp_episodic.accountant.numerics.power_excess import log_expm1
from jaxdp_episodic.accountant.numerics.special import (
    log_add,
    log_mills,
    log_mills_difference,
    log_normal_density,
    log_saturating_tail,
)

# Most steps of the search for a root: Newton's, or halvings.
_MOST_STEPS = 100
# A step, in losses, that leaves an error of about its square.
_LAST_STEP = 5e-10


class _Sides(NamedTuple):
    """An equation ``M^+ = right(x, log M^-)``; logarithms."""

    right: Callable[[Array], Array]  # log(K + c M^-) of log M^-
    log_mirrored: Array | None  # log c; None where it is 0 and the root of any sign
    least: Array  # log K
    most: Array  # log(K + c)


def forward_tails(
    u: Array, parts: Components, cover: Array, *, replaced: bool
) -> Tails:
    """Profile and tail of ``(1-e) B^- + e B^+`` against Q, of all components.

    Q is ``B^-``, or ``(1-e) B^- + e N(0)`` where the person's contributions are not
    replaced.

    Args:
      u: (...,) log g >= 0.
      parts: see `Components`.
      cover: (...,) e in (0, 1].
      replaced: which.
    """
    log_gain = _log_gain(u)
    log_e, log_uncovered = np.log(cover), log_complement(cover)
    odds = parts.log_none - parts.log_some
    if replaced:
        v = np.minimum(inner_exponent(u, cover), LARGEST)
        sides = _mirrored_sides(v, log_gain - log_e, odds)
    else:
        log_c = np.maximum(log_gain + log_uncovered - log_e, LOG_ZERO)
        own = log_gain + log_add(-parts.log_some, log_uncovered - log_e + odds)

        def right(m: Array) -> Array:
            return log_add(0.0, log_add(own, log_c + m))

        sides = _Sides(right, log_c + 0 * odds, right(2 * LOG_ZERO + 0 * odds), None)
        sides = sides._replace(most=right(np.zeros_like(odds)))
    terms = Terms.all_of(parts)
    t, terms = _root(sides, terms)
    return _beyond(t, u, parts, terms, cover, replaced=replaced)


def _log_gain(u: Array) -> Array:
    """``log(e^u - 1)``, finite."""
    return np.where(u > 0, log_expm1(np.where(u > 0, u, 1.0)), LOG_ZERO)


def _beyond(
    t: Array,
    u: Array,
    parts: Components,
    terms: Terms,
    cover: Array,
    *,
    replaced: bool,
) -> Tails:
    """Profile and tail beyond the roots t, (C, ...)."""
    s, log_p, log_none = parts.shift, parts.log_some, parts.log_none
    js, log_shares = terms.numbers * s, terms.log_shares
    mirror, plain = log_shares - js * t, log_shares + 0.5 * js * js
    log_m, _ = terms.log_sum(mirror)
    log_density, _ = terms.log_sum(plain + log_normal_density(t - js))
    log_q = log_complement(cover)
    mirrored = log_add(log_none, log_p + log_m)  # of B^- over N(0) at t
    # The density of N(0) at t times g, or g1: of P's there, its share.
    v = inner_exponent(u, cover) if replaced else u
    gained = np.log(-np.expm1(-np.where(v > 0, v, 1.0)))
    gained = np.where(v > 0, gained, LOG_ZERO)
    if replaced:
        share = log_add(gained + log_none, log_p + log_m)
        log_c = 0.0 * u
    else:
        log_c = gained + log_q - np.log(cover)
        share = log_add(
            log_p - u, gained + log_add(0.0, log_q - np.log(cover) + mirrored)
        )
    base = log_p + log_density - share

    def tail(js: Array, t: Array) -> Array:
        return -0.5 * np.maximum(t - js, 0.0) ** 2

    near = terms.log_sum_of(
        plain + tail(js, t),
        lambda js, t: log_saturating_tail(t - js, js) - tail(js, t),
        t,
    )
    far = terms.log_sum_of(mirror, lambda js, t: log_mills_difference(t, js), t)
    beyond = terms.log_sum_of(mirror, lambda js, t: log_mills(t + js), t)
    profile = log_p + log_add(near, base + log_c + far)
    middle = log_mills(t)
    lost = log_add(log_none + middle, log_p + beyond)
    if not replaced:
        lost = log_add(log_q + lost, np.log(cover) + middle)
    profile, lost = (logsumexp(parts.log_weight + a) for a in (profile, base + lost))
    if replaced:
        lost = lost - np.log1p((1 - cover) / cover * -np.expm1(-u))
    return profile + np.log(cover), lost


def backward_tails(u: Array, parts: Components, cover: Array) -> Tails:
    """Profile and tail of ``(1-e) B^+ + e N(0)`` against ``B^+``."""
    v = np.minimum(inner_exponent(u, cover), LARGEST)
    log_p, log_none = parts.log_some, parts.log_none
    # 1 - g1 b_0, and the g at which N(0) is taken against what is left
    k = weight_left(v, np.exp(log_p), np.exp(log_none))
    alive = k > 0
    k = np.where(alive, k, 1.0)
    small = v <= 1
    near = np.log1p(np.expm1(np.where(small, v, 1.0)) / k)
    loss = np.where(small, near, v + log_p - np.log(k))
    loss = np.where(alive, loss, 1.0)
    terms = Terms.all_of(parts)
    sides = _Sides(lambda _: -loss, None, -loss, -loss)
    x, terms = _root(sides, terms)
    tilted = terms.log_shares + terms.numbers * parts.shift * x
    share = tilted - terms.log_sum(tilted)[0]
    inside = terms.log_sum_of(share, lambda js, x: log_lost(-x, js), x)
    beyond = terms.log_sum_of(share, lambda js, x: log_mills(js - x), x)
    beyond = beyond + log_normal_density(x)
    lost = np.where(
        log_none > LOG_ZERO, np.minimum(v, 700.0) + log_none + inside, -np.inf
    )
    profile = np.where(alive, np.log(k) + inside, -np.inf)
    tail = np.where(alive, np.logaddexp(lost, beyond), -np.inf)
    profile, tail = (logsumexp(parts.log_weight + a) for a in (profile, tail))
    tail = tail - np.log1p((1 - cover) / cover * -np.expm1(-u))
    return profile + np.log(cover), tail


def _mirrored_sides(v: Array, log_gain: Array, odds: Array) -> _Sides:
    """Of ``B^+ = e^v B^-``; of ``log(e^v - 1)`` and the log-odds of b_0."""

    def right(m: Array) -> Array:
        return m + log_add(0.0, log_gain + log_add(0.0, odds - m))

    return _Sides(right, v + 0 * odds, log_gain + odds, right(np.zeros_like(odds)))


def root_of_ratio(v: Array, parts: Components, terms: Terms) -> Array:
    """Where ``B^+`` is ``e^v B^-``, v >= 0."""
    sides = _mirrored_sides(v, _log_gain(v), parts.log_none - parts.log_some)
    return _root(sides, terms)[0]


def root_at_zero(parts: Components, terms: Terms) -> Array:
    """Where ``B^+`` crosses N(0): the root of ``M^+ = 1``."""
    zero = np.zeros_like(parts.log_some)
    return _root(_Sides(lambda _: zero, None, zero, zero), terms)[0]


def _root(sides: _Sides, terms: Terms) -> tuple[Array, Terms]:
    """Where both sides of the equation are the same, and the terms that count there."""
    s, last = terms.shift, terms.last
    nothing = 1e300 + 0 * sides.least

    # Each term alone is a lower bound of the sum, the largest of all an upper one.
    js = terms.numbers * s
    high = np.min((sides.most - terms.log_shares) / js, axis=0)
    low = np.min(sides.least / js + 0.5 * js, axis=0)
    if sides.log_mirrored is not None:
        # Steps to a root at 0 may end on its other side.
        low = np.maximum(low, 0.0) - 0.1
    high = np.maximum(high, low)
    terms = terms.up_to(high)

    def gap(x: Array) -> tuple[Array, Array]:
        """Difference of the logarithms of both sides, and its slope."""
        up, mean = terms.log_ratio(x)
        if sides.log_mirrored is None:
            return up - sides.right(up), s * mean
        down, other = terms.log_ratio(-x)
        right = sides.right(down)
        share = np.exp(np.minimum(sides.log_mirrored + down - right, 0.0))
        return up - right, s * (mean + share * other)

    def improve(_: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        x, low, high, _ = state
        value, slope = gap(x)
        low, high = np.where(value <= 0, x, low), np.where(value >= 0, x, high)
        step = x - value / slope
        inside = (step >= low) & (step <= high)
        moved = np.where(inside, step, 0.5 * (low + high))
        return moved, low, high, np.abs(moved - x)

    def settled(state: tuple[Array, ...]) -> bool:
        size = np.maximum(last * s, 1.0)
        return bool(np.all(state[3] * size <= _LAST_STEP + 4e-16 * np.abs(state[0])))

    start = high, low, high, nothing
    x, *_ = fori_loop(np, 0, _MOST_STEPS, improve, start, settled)
    return x, terms
