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
    log1p_complex,
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
    """``e^exponent value``, arrays (..., K, n); values are complex off the line."""

    exponent: Array
    value: Array


def power(w: Array, slope: Array) -> Factor:
    """Returns ``e^{slope w}``."""
    z = slope * w
    return Factor(z.real, np.exp(z - z.real))


def gained(w: Array, slope: Array) -> Factor:
    """Returns ``e^{slope w} - 1`` without cancellation near 0."""
    z = slope * w
    exponent = np.maximum(z.real, 0.0)
    return Factor(exponent, np.expm1(z - exponent) - np.expm1(-exponent))


def shrunk(w: Array, slope: Array) -> Factor:
    """Returns ``1 - e^{-slope w}`` for Re w >= 0."""
    exponent, value = gained(-w, slope)
    return Factor(exponent, -value)


def turned(w: Array, slope: Array) -> Factor:
    """Returns ``e^{slope w} - e^{-slope w}`` for Re w >= 0."""
    exponent, value = power(w, slope)
    return Factor(exponent, value * shrunk(w, 2 * slope).value)


def log_products(exponent: np.ndarray, factor: Factor) -> np.ndarray:
    """Returns the logarithms of ``sum_j e^exponent factor``, (C, K, n)."""
    column = np.max(exponent, axis=1, keepdims=True)
    left = np.exp(exponent - column).transpose(2, 1, 0)
    scaled = column + factor.exponent
    top = np.max(scaled, axis=0)
    right = (np.exp(scaled - top) * factor.value).transpose(2, 0, 1)
    # (n, C, J) by (n, J, K) to (C, K, n). A complex number is two real columns.
    columns = np.ascontiguousarray(right).view(np.float64)
    found = in_blocks(left, columns).view(right.dtype).transpose(1, 2, 0)
    found, peak = np.ascontiguousarray(found), top + np.zeros(found.shape)
    poor = np.argwhere(np.abs(found) < _LEAST_SUM)
    for first in range(0, len(poor), _AT_ONCE):
        i, k, n = poor[first : first + _AT_ONCE].T
        exact = exponent[:, i, n] + factor.exponent[:, k, n]
        peak[i, k, n] = highest = np.max(exact, axis=0)
        terms = np.exp(exact - highest) * factor.value[:, k, n]
        found[i, k, n] = np.sum(terms, axis=0)
    size = peak + np.log(np.maximum(np.abs(found), _TINY))
    return size + 1j * np.angle(found) if np.iscomplexobj(found) else size


NOWHERE = 1e9  # an x for "never" of a path that rises from x on
# Largest |P/Q - 1| for which log P/Q is computed as log1p of it.
_LARGEST_NEAR = 0.5


Ratio = tuple[Array, Array]
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

    def upper(self, w: Array) -> Ratio:
        """Returns the `Ratio` at ``floor + w``, Re w >= 0, (K, n)."""
        tilt, x = self.floor * self.parts.shift, self.floor[:, None] + w
        if self.replaced:
            rise, base = self._sum(0.0, turned, w), self._mixture(0.0, w)
        else:
            rise = self._sum(tilt, gained, w)
            base = self._base(self._mixture(-tilt, w) if self.covers else x)
        return log_add(0.0, rise - base + np.log(self.cover)), _log_density(base, x)

    def lower(self, w: Array) -> Ratio:
        """Returns the `Ratio` at ``floor - w``, Re w >= 0, (K, n)."""
        tilt, x = self.floor * self.parts.shift, self.floor[:, None] - w
        own = self._mixture(tilt, w)
        base = self._base(own)
        log_v = self._sum(tilt, shrunk, w) - base + np.log(self.cover)
        small = log_v.real < math.log(_LARGEST_NEAR)
        near = _log1p(-np.exp(np.where(small, log_v, -1.0)))
        return np.where(small, near, own - base), _log_density(base, x)

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

    def _sum(
        self, tilt: Array | float, factor: Callable[[Array, Array], Factor], w: Array
    ) -> Array:
        """Log of ``p sum_j b_j / p e^{j tilt - j² s² / 2} factor(w, j s)``."""
        exponent = self.log_shares + self.numbers * tilt
        found = log_products(exponent, factor(w, self.numbers * self.parts.shift))
        return found + self.parts.log_some[:, None]

    def _mixture(self, tilt: Array | float, w: Array) -> Array:
        """Returns the log of ``b_0`` plus `_sum` of ``e^{-j s w}``."""
        moved = self._sum(tilt, lambda w, slope: power(w, -slope), w)
        return log_add(self.parts.log_none[:, None], moved)

    def _base(self, mixture: Array) -> Array:
        """Returns the log of ``e N(0) + (1 - e)`` times the mixture, if any e < 1."""
        if not self.covers:
            return 0.0 * mixture
        return log_add(np.log(self.cover), mixture + log_rest(self.cover))


def _log_density(base: Array, x: Array) -> Array:
    """Returns the log of a density at x, given that of its ratio to N(0)'s."""
    return base - 0.5 * x * x - LOG_SQRT_2PI


def log_add(first: Array | float, second: Array) -> Array:
    """Returns ``log(e^a + e^b)`` for a real a; continuous if ``|Im b| < pi``."""
    gap = second - first
    above = gap.real > 0
    larger = np.where(above, second, first)
    return larger + _log1p(np.exp(np.where(above, -gap, gap)))


def _log1p(z: Array) -> Array:
    """Returns ``log(1 + z)``; NumPy's own loses digits of small complex numbers."""
    if not np.iscomplexobj(z):
        return np.log1p(z)
    re, im = log1p_complex(z.real, z.imag)
    return re + 1j * im
