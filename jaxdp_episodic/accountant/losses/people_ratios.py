"""Losses and densities of a person's components, at real and complex points.

See `losses.people` for the components.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from jaxdp_episodic.accountant.losses.mixture_halves import (
    LOG_ZERO,
    NEGLIGIBLE,
    Half,
    log_rest,
)
from jaxdp_episodic.accountant.numerics.binomial import log_binomial
from jaxdp_episodic.accountant.numerics.loops import Array, logsumexp
from jaxdp_episodic.accountant.numerics.quadrature import in_blocks
from jaxdp_episodic.accountant.numerics.special import (
    LOG_SQRT_2PI,
    cos_sin,
    expm1_complex,
    log_add,
    log_add_complex,
    times,
)

# Largest exponent, in nats, for which a sum of exponentials is computed by expm1.
_SMALL_TILT = 0.5


class Components(NamedTuple):
    """Components of settings of any shape: arrays (C, ...), the last two (...)."""

    count: Array  # n >= 1, the largest number of contributions
    log_weight: Array  # log-probability of the component; -inf for padding
    log_some: Array  # ``log p``, p the probability of any contribution
    log_none: Array  # ``log(1 - p)``, kept finite
    log_rest: Array  # ``log(1 - q)`` of each contribution, kept finite
    shift: Array  # s > 0

    def log_shares(self, j: Array) -> Array:
        """Returns ``log(b_j / p) - j² s² / 2``; j has one further axis in front."""
        counts, rests = self.count, self.log_rest
        if self.shift.ndim:
            # Computed for the first setting alone if all have these counts and rates.
            count, rest = counts[..., :1], rests[..., :1]
            if np.all(counts == count) and np.all(rests == rest):
                counts, rests = count, rest
        kept = np.minimum(j, counts)
        more = counts - kept
        share = log_binomial(counts + 0 * j, kept) + kept * np.log(-np.expm1(rests))
        share = share + np.where(more > 0, more * rests, 0.0)
        share = share - np.log(-np.expm1(np.maximum(counts * rests, LOG_ZERO)))
        share = share - 0.5 * (j * self.shift) ** 2
        return np.where(j <= self.count, np.maximum(share, LOG_ZERO), LOG_ZERO)

    def numbers(self) -> Array:
        """Returns all j, with one further axis in front."""
        j = np.arange(1.0, np.max(self.count, initial=1.0) + 1)
        return j.reshape(-1, *(1,) * self.count.ndim)

    def halves(self, cover: Array, *, replaced: bool) -> tuple[Half, ...]:
        """Pairs of all components: ``B^-`` becomes ``B^+`` with probability e."""
        j = self.numbers()
        js = j * self.shift + 0 * self.count
        mass = np.maximum(self.log_shares(j) + 0.5 * js * js + self.log_some, LOG_ZERO)
        log_e, rest = np.log(cover), log_rest(cover)
        move, kept, none = mass + log_e, mass + rest, self.log_none + 0 * js[0]
        at_zero = log_add(none + rest, log_e + 0 * none)
        if replaced:
            return (Half("turn", -js, js, move, none, mass, none, kept),)
        up = Half.rising(js, move, at_zero, none, -js, kept)
        return up, Half("fall", -js, js[:0], move, none, mass, at_zero, kept)


# Sums over j are matrix products, with each node's largest term scaled to 1.

# Smallest scaled sum that is accurate: terms that underflow are below 1e-100 of it.
_LEAST_SUM = 1e-200
_AT_ONCE = 2**14  # inaccurate sums that are computed again at once
_TINY = 1e-300  # replaces a sum of 0 before its logarithm is taken


class Factor(NamedTuple):
    """``e^exponent (re + i im)``, arrays (..., K, n); im is None for real ones."""

    exponent: Array
    re: Array
    im: Array | None = None


Points = tuple[Array, Array | None]
"""Real and imaginary part, (K, n) each; the latter is None on the real line."""


def power(w: Points, slope: Array) -> Factor:
    """Returns ``e^{slope w}``."""
    exponent = slope * w[0]
    if w[1] is None:
        return Factor(exponent, np.ones_like(exponent))
    return Factor(exponent, *cos_sin(slope * w[1]))


def gained(w: Points, slope: Array) -> Factor:
    """Returns ``e^{slope w} - 1`` without cancellation near 0."""
    tilt = slope * w[0]
    exponent = np.maximum(tilt, 0.0)
    if w[1] is None:
        return Factor(
            exponent, np.where(tilt > 0, -np.expm1(-exponent), np.expm1(tilt))
        )
    angle = slope * w[1]
    low = np.minimum(tilt, 1.0)
    less = np.exp(-exponent)
    near = expm1_complex(low, angle)
    cosine, sine = cos_sin(angle)
    far = tilt > 1
    return Factor(
        exponent,
        np.where(far, cosine - less, near[0] * less),
        np.where(far, sine, near[1] * less),
    )


def shrunk(w: Points, slope: Array) -> Factor:
    """Returns ``1 - e^{-slope w}`` for Re w >= 0."""
    less = gained((-w[0], None if w[1] is None else -w[1]), slope)
    return Factor(less.exponent, -less.re, None if less.im is None else -less.im)


def turned(w: Points, slope: Array) -> Factor:
    """Returns ``e^{slope w} - e^{-slope w}`` for Re w >= 0."""
    less, grown = shrunk(w, 2 * slope), power(w, slope)
    if less.im is None or grown.im is None:
        return Factor(grown.exponent, less.re)
    product = times((less.re, less.im), (grown.re, grown.im))
    return Factor(grown.exponent, *product)


def log_products(
    exponent: np.ndarray, factor: Factor
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the logarithms of ``sum_j e^exponent factor``, (C, K, n)."""
    column = np.max(exponent, axis=1, keepdims=True)
    left = np.exp(exponent - column).transpose(2, 1, 0)
    scaled = column + factor.exponent
    top = np.max(scaled, axis=0)
    grown = np.exp(scaled - top)
    parts = [part for part in (factor.re, factor.im) if part is not None]
    # (n, C, J) by (n, J, K) to (C, K, n)
    found = [in_blocks(left, (grown * part).transpose(2, 0, 1)) for part in parts]
    re, *im = found = [np.ascontiguousarray(a.transpose(1, 2, 0)) for a in found]
    poor = (np.hypot(re, im[0]) if im else np.abs(re)) < _LEAST_SUM
    peak = np.broadcast_to(top, re.shape)
    if np.any(poor):
        peak = peak.copy()
        _sum_again(np.argwhere(poor), exponent, factor, parts, (peak, *found))
    if not im:
        return peak + np.log(np.maximum(re, _TINY)), None
    return peak + np.log(np.maximum(np.hypot(re, im[0]), _TINY)), np.arctan2(im[0], re)


def _sum_again(
    where: np.ndarray,
    exponent: np.ndarray,
    factor: Factor,
    parts: list[np.ndarray],
    results: tuple[np.ndarray, ...],
) -> None:
    """Replaces single sums, at (m, 3) indices ``where``, by accurate ones."""
    for first in range(0, len(where), _AT_ONCE):
        i, k, n = where[first : first + _AT_ONCE].T
        exact = exponent[:, i, n] + factor.exponent[:, k, n]
        top = np.max(exact, axis=0)
        peak, *values = results
        peak[i, k, n] = top
        for part, value in zip(parts, values, strict=True):
            wide = np.broadcast_to(part, factor.exponent.shape)[:, k, n]
            value[i, k, n] = np.sum(np.exp(exact - top) * wide, axis=0)


NOWHERE = 1e9  # an x for "never" of a path that rises from x on
# Largest |P/Q - 1| for which log P/Q is computed as log1p of it.
_LARGEST_NEAR = 0.5


Ratio = tuple[Points, Points]
"""log P/Q, complex ones up to multiples of 2 pi i; and the log of Q's density."""


@dataclass(frozen=True)
class Ratios:
    """The components of n settings, with the terms of their sums."""

    parts: Components  # (C, n) components
    numbers: Array  # (J, 1, 1) the j of their sums, from 1 on
    log_shares: Array  # (J, C, n); see `Components.log_shares`
    cover: Array  # (n,) e
    floor: Array  # (C, n) where P/Q = 1; distances w are measured from it
    replaced: bool  # whether Q is ``B^-``
    covers: bool  # whether any e is below 1

    @classmethod
    def of(cls, parts: Components, cover: Array, *, replaced: bool) -> Self:
        """Computes terms and floors: 0, or where ``B^+`` crosses N(0)."""
        floor, j = np.zeros_like(parts.log_some), parts.numbers()
        if not replaced:
            floor = parts.halves(np.ones_like(cover), replaced=False)[0].place(floor)
        shares, covers = parts.log_shares(j), bool(np.any(cover < 1))
        return cls(parts, j, shares, cover, floor, replaced, covers)

    def take(self, rows: np.ndarray) -> Self:
        """Selects settings."""
        return dataclasses.replace(
            self,
            parts=Components(*(a[..., rows] for a in self.parts)),
            log_shares=self.log_shares[..., rows],
            cover=self.cover[rows],
            floor=self.floor[:, rows],
        )

    def up_to(self, w: Array) -> Self:
        """Keeps the terms that matter at distances up to w, (n,), or beyond."""
        x = w + np.max(self.floor, axis=0) + 0 * self.floor
        js, kept = self.numbers * self.parts.shift, 1
        # As densities at x, and as probabilities.
        for term in (self.log_shares + js * x, self.log_shares + 0.5 * js * js):
            # NaN is not negligible.
            counts = ~(term <= np.max(term, axis=0) - NEGLIGIBLE)
            rows = np.any(counts, axis=(1, 2))
            kept = int(np.max(np.flatnonzero(rows) + 1, initial=kept))
        return dataclasses.replace(
            self, numbers=self.numbers[:kept], log_shares=self.log_shares[:kept]
        )

    @property
    def last(self) -> int:
        """The largest j."""
        return len(self.numbers)

    def upper(self, w: Points) -> Ratio:
        """Returns the `Ratio` at ``floor + w``, Re w >= 0, (K, n)."""
        s, log_e = self.parts.shift, np.log(self.cover)
        x = self._at(w)
        if self.replaced:
            rise = self._sum(0.0, turned, w)
            base = self._mixture(0.0, w)
        else:
            rise = self._sum(self.floor * s, gained, w)
            base = self._base(self._mixture(-self.floor * s, w) if self.covers else x)
        return _add(0.0 * x[0], _less(rise, base, -log_e)), _density(base, x)

    def lower(self, w: Points) -> Ratio:
        """Returns the `Ratio` at ``floor - w``, Re w >= 0, (K, n)."""
        s = self.parts.shift
        x = self._at((-w[0], None if w[1] is None else -w[1]))
        fall = self._sum(self.floor * s, shrunk, w)
        own = self._mixture(self.floor * s, w)
        base = self._base(own)
        log_v = _less(fall, base, -np.log(self.cover))
        far = _less(own, base)
        small = log_v[0] < math.log(_LARGEST_NEAR)
        bounded = np.where(small, log_v[0], -1.0)
        if log_v[1] is None:
            near = np.log1p(-np.exp(bounded))
            return (np.where(small, near, far[0]), None), _density(base, x)
        near = log_add_complex(np.zeros_like(bounded), (bounded, log_v[1] + math.pi))
        re, im = (np.where(small, a, b) for a, b in zip(near, far, strict=True))
        return (re, im), _density(base, x)

    def mean_at(self, x: Array) -> Array:
        """Returns the mean of j under ``B^+`` at real x, (C, n)."""
        s, j, share = self.parts.shift, self.numbers, self.log_shares
        x = x + np.zeros_like(self.floor)
        terms = share + j * s * x
        value = logsumexp(terms)
        mean = np.sum(np.exp(terms - value) * j, axis=0)
        reach = self.last * s * (np.abs(x) + 0.5 * self.last * s)
        small = reach < _SMALL_TILT
        if np.any(small):
            tilt = np.where(small, j * s * (np.where(small, x, 0.0) - 0.5 * j * s), 0.0)
            near = np.exp(share + 0.5 * (j * s) ** 2) * np.expm1(tilt)
            value = np.where(small, np.log1p(np.sum(near, axis=0)), value)
        gap = self.parts.log_none - self.parts.log_some - value
        return mean / (1 + np.exp(np.minimum(gap, 700.0)))

    def turning_point(self) -> tuple[Array, Array]:
        """Returns the distance up to which paths stay low, and a shift for it."""
        # If e < 1 zeros of the density lie where e B^+ = (1-e) B^-, pi apart in angle.
        s = self.parts.shift
        if not self.covers:
            return 0.0 * s, s
        odds = log_rest(self.cover) - np.log(self.cover)
        some = odds > 0
        pair = self.parts.halves(np.ones_like(s), replaced=True)[0]
        kink = pair.place(np.where(some, odds, 0.0) + np.zeros_like(self.floor))
        kink = np.maximum(np.where(some, kink, 0.0), self.floor)
        mean = 0.5 * np.max(self.mean_at(kink) + self.mean_at(-self.floor), axis=0)
        turn = np.where(self.cover < 1, np.maximum(mean, 1.0), 1.0)
        return np.max(kink - self.floor, axis=0), turn * s

    def _at(self, w: Points) -> Points:
        """Returns the points at distances w from the floors, (C, K, n)."""
        floor = self.floor[:, None]
        return floor + w[0], None if w[1] is None else 0 * floor + w[1]

    def _sum(
        self, tilt: Array | float, factor: Callable[[Points, Array], Factor], w: Points
    ) -> Points:
        """Log of ``p sum_j b_j / p e^{j tilt - j² s² / 2} factor(w, j s)``."""
        exponent = self.log_shares + self.numbers * tilt
        re, im = log_products(exponent, factor(w, self.numbers * self.parts.shift))
        return re + self.parts.log_some[:, None], im

    def _mixture(self, tilt: Array | float, w: Points) -> Points:
        """Returns the log of ``b_0`` plus `_sum` of ``e^{-j s w}``."""
        moved = self._sum(tilt, lambda w, slope: power(w, -slope), w)
        return _add(self.parts.log_none[:, None], moved)

    def _base(self, mixture: Points) -> Points:
        """Returns the log of ``e N(0) + (1 - e)`` times the mixture, if any e < 1."""
        re, im = mixture
        if not self.covers:
            return re * 0.0, None if im is None else im * 0.0
        return _add(np.log(self.cover), (re + log_rest(self.cover), im))


def _density(base: Points, x: Points) -> Points:
    """Returns the log of a density at x, given that of its ratio to N(0)'s."""
    (re, im), (size, angle) = x, base
    if im is None or angle is None:
        return size - 0.5 * re * re - LOG_SQRT_2PI, None
    return size + 0.5 * (im - re) * (im + re) - LOG_SQRT_2PI, angle - re * im


def _add(first: Array, second: Points) -> Points:
    """Returns ``log(e^a + e^b)`` for a real a."""
    if second[1] is None:
        return log_add(first + 0 * second[0], second[0]), None
    return log_add_complex(first + 0 * second[0], (second[0], second[1]))


def _less(first: Points, second: Points, more: Array | float = 0.0) -> Points:
    """Returns the difference of two logarithms, less one more real number."""
    im = None
    if first[1] is not None and second[1] is not None:
        im = first[1] - second[1]
    return first[0] - second[0] - more, im
