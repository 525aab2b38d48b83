"""Visible components of a person's privacy loss: numbers of contributions, given n.

Component n is ``B^+ = sum_j b_j N(j s)``, ``b_j = P(Bin(n, q) = j)``, and ``B^-`` its
mirror image. What remains of it without ``j = 0``, where nothing is lost, is

    log sum_{j >= 1} b_j / p e^{j s x - j² s² / 2},    p = P(Bin(n, q) >= 1),

the log-ratio `log_ratio` of the two Gaussian mixtures at x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.combinatorics import log_binomial
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    fori_loop,
    namespace,
    stop_gradient,
)

# Stands for log 0 where -inf would poison a gradient.
LOG_ZERO = -1e30
# Nats below the largest term of a sum at which others are left out: e^-46 of 1e4 terms
# is 1e-16.
NEGLIGIBLE = 46.0
# Size of exponents below which their sum is one of expm1, nats.
_SMALL_TILT = 0.5


class Components(NamedTuple):
    """C components of settings of any shape; arrays (C, ...), or (...) of the last two.

    Attributes:
      count: n.
      log_weight: of the component, given that the person is in; -inf where nothing can
        be lost.
      log_some: ``log p``.
      log_none: ``log(1 - p)``, finite.
      rate: q in (0, 1].
      shift: s > 0.
    """

    count: Array
    log_weight: Array
    log_some: Array
    log_none: Array
    rate: Array
    shift: Array

    @classmethod
    def of(
        cls, count: Array, log_weight: Array, rate: Array, shift: Array
    ) -> Components:
        """Of counts and log-weights (C, ...), rates and shifts (...)."""
        xp = namespace(count, log_weight, rate, shift)
        count = stop_gradient(xp, count)
        some = count > 0
        n = xp.where(some, count, 1.0)
        log_rest = log_complement(rate)
        log_none = xp.maximum(n * log_rest, LOG_ZERO)
        log_some = xp.log(-xp.expm1(log_none))
        weight = xp.where(some, log_weight, -xp.inf)
        return cls(n, weight, log_some, log_none, rate, shift)

    def log_shares(self, j: Array) -> Array:
        """``log(b_j / p) - j² s² / 2``; j has one axis more, in front."""
        xp = namespace(self.count, j)
        kept = xp.minimum(j, self.count)
        rest = self.count - kept
        log_rest = log_complement(self.rate)
        share = log_binomial(self.count + 0 * j, kept) + kept * xp.log(self.rate)
        share = share + xp.where(rest > 0, rest * log_rest, 0.0) - self.log_some
        share = share - 0.5 * (j * self.shift) ** 2
        return xp.where(j <= self.count, xp.maximum(share, LOG_ZERO), LOG_ZERO)


class Terms(NamedTuple):
    """The j of the components' sums: all rows in NumPy, a function of j in JAX.

    Attributes:
      last: the largest j.
      shift: s.
      log_shares: (J, C, ...) in NumPy; see `Components.log_shares`.
      of: the same of j.
    """

    last: Array
    shift: Array
    log_shares: Array | None
    of: Callable[[Array], Array]

    @classmethod
    def all_of(cls, parts: Components) -> Terms:
        """Every j >= 1 of the components."""
        xp = namespace(*parts)
        most = xp.max(parts.count, initial=1.0)
        if xp is not np:
            return cls(most.astype(int), parts.shift, None, parts.log_shares)
        j = np.arange(1.0, most + 1).reshape(-1, *(1,) * parts.count.ndim)
        return cls(most, parts.shift, parts.log_shares(j), parts.log_shares)

    def up_to(self, x: Array) -> Terms:
        """Those that count at x and to its left; NumPy only."""
        if self.log_shares is None:
            return self
        term = self.log_shares + self.numbers * self.shift * x
        counts = term > np.max(term, axis=0) - NEGLIGIBLE
        kept = 1 + int(np.max(np.flatnonzero(np.any(counts, (*range(1, term.ndim),)))))
        return self._replace(last=kept, log_shares=self.log_shares[:kept])

    @property
    def numbers(self) -> Array:
        """J as a column; NumPy only."""
        rows = np.arange(1.0, len(self.log_shares) + 1)
        return rows.reshape(-1, *(1,) * (self.log_shares.ndim - 1))

    def log_ratio(self, x: Array) -> tuple[Array, Array]:
        """The log-ratio at x, (C, ...), and the mean of j there."""
        s = self.shift
        xp = namespace(s, x)
        value, mean = self.log_sum(lambda j, share: share + j * s * x)
        reach = self.last * s * (xp.abs(x) + 0.5 * self.last * s)
        small = reach < _SMALL_TILT
        if xp is np and not np.any(small):
            return value, mean
        safe = xp.where(small, x, 0.0)

        def gained(j: Array, share: Array) -> Array:
            tilt = xp.where(small, j * s * (safe - 0.5 * j * s), 0.0)
            return xp.exp(share + 0.5 * (j * s) ** 2) * xp.expm1(tilt)

        near = xp.log1p(self.plain_sum(gained))
        return xp.where(small, near, value), mean

    def least(self, of: Callable[[Array, Array], Array]) -> Array:
        """The least of ``of(j, log_share)`` over j."""
        if self.log_shares is not None:
            return np.min(of(self.numbers, self.log_shares), axis=0)
        xp = namespace(self.shift)

        def lower(k: Array, least: Array) -> Array:
            return xp.minimum(least, of(*self.row(k))[0])

        first = of(*self.row(xp.ones(())))[0]
        return fori_loop(xp, 2, self.last + 1, lower, first)

    def log_sum_of(
        self, weight: Callable[[Array, Array], Array], factor: Callable[..., Array], *at: Array
    ) -> Array:
        """Logarithm of the sum over j of ``e^weight(j, log_share)`` times factors.

        Args:
          weight: upper bounds of the terms' logarithms; NumPy leaves out what is
            negligible beside the largest one of all components.
          factor: maps j s and ``at`` to the logarithms of the factors.
          *at: (C, ...) arrays.
        """
        s = self.shift
        if self.log_shares is None:
            return self.log_sum(lambda j, share: weight(j, share) + factor(j * s, *at))[0]
        bound = weight(self.numbers, self.log_shares)
        used = bound > np.max(bound, axis=0) - NEGLIGIBLE
        slope = self.numbers * s
        chosen = (np.broadcast_to(a, bound.shape)[used] for a in (slope, *at))
        terms = np.full(bound.shape, -np.inf)
        terms[used] = bound[used] + factor(*chosen)
        peak = np.max(terms, axis=0)
        return peak + np.log(np.sum(np.exp(terms - peak), axis=0))

    def plain_sum(self, term: Callable[[Array, Array], Array]) -> Array:
        """The sum of ``term(j, log_share)`` over j."""
        if self.log_shares is not None:
            return np.sum(term(self.numbers, self.log_shares), axis=0)
        xp = namespace(self.shift)
        start = term(*self.row(xp.ones(())))[0]
        return fori_loop(
            xp,
            2,
            self.last + 1,
            lambda k, total: total + term(*self.row(k))[0],
            start,
        )

    def row(self, k: Array) -> tuple[Array, Array]:
        """J with all axes, and its log-shares; JAX only."""
        j = k.astype(self.shift.dtype).reshape((1,) * (self.shift.ndim + 2))
        return j, self.of(j)

    def log_sum(self, term: Callable[[Array, Array], Array]) -> tuple[Array, Array]:
        """Logarithm of the sum of ``e^term(j, log_share)`` over j, and the mean of j."""
        if self.log_shares is not None:
            terms = term(self.numbers, self.log_shares)
            peak = np.max(terms, axis=0)
            grown = np.exp(terms - peak)
            total = np.sum(grown, axis=0)
            return np.log(total) + peak, np.sum(grown * self.numbers, axis=0) / total
        xp = namespace(self.shift)

        def add(k: Array, state: tuple[Array, Array, Array]) -> tuple[Array, ...]:
            peak, total, mean = state
            found = term(*self.row(k))[0]
            higher = stop_gradient(xp, xp.maximum(peak, found))
            less, grown = xp.exp(peak - higher), xp.exp(found - higher)
            return higher, total * less + grown, mean * less + k * grown

        first = term(*self.row(xp.ones(())))[0]
        start = (
            stop_gradient(xp, first),
            *(xp.exp(first - stop_gradient(xp, first)),) * 2,
        )
        peak, total, mean = fori_loop(xp, 2, self.last + 1, add, start)
        return xp.log(total) + peak, mean / total


def log_complement(rate: Array) -> Array:
    """``log(1 - rate)``, finite."""
    xp = namespace(rate)
    return xp.where(rate < 1, xp.log1p(-xp.where(rate < 1, rate, 0.5)), LOG_ZERO)
