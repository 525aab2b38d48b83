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
    logsumexp,
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
      most: the largest count or more; static.
    """

    count: Array
    log_weight: Array
    log_some: Array
    log_none: Array
    rate: Array
    shift: Array
    most: int

    @classmethod
    def of(
        cls, count: Array, log_weight: Array, rate: Array, shift: Array, most: int
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
        return cls(n, weight, log_some, log_none, rate, shift, most)

    def above(self, least: np.ndarray) -> Components:
        """Those whose weight is above a level somewhere, or the largest; NumPy."""
        used = np.any(self.log_weight > least, axis=1)
        used[np.argmax(np.max(self.log_weight, axis=1))] = True
        return self._replace(
            count=self.count[used],
            log_weight=self.log_weight[used],
            log_some=self.log_some[used],
            log_none=self.log_none[used],
        )

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
    """The j of the components' sums.

    Attributes:
      numbers: (J, 1, ...) from 1 on.
      shift: s.
      log_shares: (J, C, ...); see `Components.log_shares`.
    """

    numbers: Array
    shift: Array
    log_shares: Array

    @classmethod
    def all_of(cls, parts: Components) -> Terms:
        """Every j of the components."""
        xp = namespace(*parts)
        most = parts.most
        if xp is np:
            most = int(min(most, np.max(parts.count, initial=1.0)))
        j = xp.arange(1.0, most + 1, dtype=parts.shift.dtype)
        j = j.reshape(-1, *(1,) * parts.count.ndim)
        return cls(j, parts.shift, parts.log_shares(j))

    def up_to(self, x: Array) -> Terms:
        """Those that count at x and to its left, or beyond it, in NumPy."""
        if namespace(x, self.shift) is not np:
            return self
        js = self.numbers * self.shift
        kept = 1
        # As densities at x, and as masses.
        for term in (self.log_shares + js * x, self.log_shares + 0.5 * js * js):
            counts = term > np.max(term, axis=0) - NEGLIGIBLE
            rows = np.any(counts, axis=tuple(range(1, term.ndim)))
            kept = max(kept, 1 + int(np.flatnonzero(rows)[-1]))
        return Terms(self.numbers[:kept], self.shift, self.log_shares[:kept])

    @property
    def last(self) -> int:
        """The largest j."""
        return len(self.numbers)

    def log_ratio(self, x: Array) -> tuple[Array, Array]:
        """The log-ratio at x, (C, ...), and the mean of j there."""
        s, j, share = self.shift, self.numbers, self.log_shares
        xp = namespace(s, x)
        value, mean = self.log_sum(share + j * s * x)
        reach = self.last * s * (xp.abs(x) + 0.5 * self.last * s)
        small = reach < _SMALL_TILT
        if xp is np and not np.any(small):
            return value, mean
        tilt = xp.where(small, j * s * (xp.where(small, x, 0.0) - 0.5 * j * s), 0.0)
        near = xp.sum(xp.exp(share + 0.5 * (j * s) ** 2) * xp.expm1(tilt), axis=0)
        return xp.where(small, xp.log1p(near), value), mean

    def log_sum(self, terms: Array) -> tuple[Array, Array]:
        """``log sum_j e^term`` of (J, C, ...) terms, and the mean of j."""
        xp = namespace(terms)
        peak = stop_gradient(xp, xp.max(terms, axis=0))
        grown = xp.exp(terms - peak)
        total = xp.sum(grown, axis=0)
        return xp.log(total) + peak, xp.sum(grown * self.numbers, axis=0) / total

    def log_sum_of(
        self, bound: Array, factor: Callable[..., Array], *at: Array
    ) -> Array:
        """Logarithm of the sum over j of ``e^bound`` times factors.

        Args:
          bound: (J, C, ...) upper bounds of the terms' logarithms, but for moderate
            factors; NumPy leaves out what is negligible beside the largest one.
          factor: maps j s and ``at`` to the logarithms of the factors.
          *at: (C, ...) arrays.
        """
        slope = self.numbers * self.shift
        if namespace(bound) is not np:
            return logsumexp(bound + factor(slope, *at))
        used = bound > np.max(bound, axis=0) - NEGLIGIBLE
        chosen = (np.broadcast_to(a, bound.shape)[used] for a in (slope, *at))
        terms = np.full(bound.shape, -np.inf)
        terms[used] = bound[used] + factor(*chosen)
        return logsumexp(terms)


def log_complement(rate: Array) -> Array:
    """``log(1 - rate)``, finite."""
    xp = namespace(rate)
    return xp.where(rate < 1, xp.log1p(-xp.where(rate < 1, rate, 0.5)), LOG_ZERO)
