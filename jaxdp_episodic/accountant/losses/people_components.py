"""Visible components of a person's privacy loss: numbers of contributions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.mixture_halves import Half
from jaxdp_episodic.accountant.numerics.combinatorics import log_binomial
from jaxdp_episodic.accountant.numerics.loops import Array
from jaxdp_episodic.accountant.numerics.special import log_add

# Stands for log 0 where -inf would poison a gradient.
LOG_ZERO = -1e30
# Nats below the largest term of a sum at which others are left out: e^-46 of 1e4 terms
# is 1e-16.
NEGLIGIBLE = 46.0
# Size of exponents below which their sum is one of expm1, nats.
_SMALL_TILT = 0.5


class Components(NamedTuple):
    """C components of settings of any shape: arrays (C, ...), the last two (...)."""

    count: Array  # n
    log_weight: Array  # given that the person is in; -inf loses nothing
    log_some: Array  # ``log p``
    log_none: Array  # ``log(1 - p)``, finite
    rate: Array  # q in (0, 1]
    shift: Array  # s > 0
    is_hidden: Array  # whether a coin besides decides that all count: see `drawn_by`

    @classmethod
    def of(
        cls, count: Array, log_weight: Array, rate: Array, shift: Array
    ) -> Components:
        """Of counts, log-weights and rates (C, ...), and shifts (...)."""
        some = count > 0
        n = np.where(some, count, 1.0)
        log_rest = log_complement(rate)
        log_none = np.maximum(n * log_rest, LOG_ZERO)
        log_some = np.log(-np.expm1(log_none))
        weight = np.where(some, log_weight, -np.inf)
        never = np.zeros_like(shift) > 0
        return cls(n, weight, log_some, log_none, rate, shift, never)

    def drawn_by(self, coin: Array) -> Components:
        """The same where a coin (...,) decides whether there are any."""
        log_some = self.log_some + np.log(coin)
        log_none = np.maximum(np.log1p(-np.minimum(np.exp(log_some), 1.0)), LOG_ZERO)
        return self._replace(
            log_some=log_some, log_none=log_none, is_hidden=coin + 0 * self.shift < 1
        )

    def above(self, least: np.ndarray) -> Components:
        """Those whose weight is above a level somewhere, or the largest."""
        used = np.any(self.log_weight > least, axis=1)
        used[np.argmax(np.max(self.log_weight, axis=1))] = True
        *columns, shift, is_hidden = self
        return Components._make([*(a[used] for a in columns), shift, is_hidden])

    def log_shares(self, j: Array) -> Array:
        """``log(b_j / p) - j² s² / 2``; j has one axis more, in front."""
        share = self._one_of_equals()._log_chances(j) - 0.5 * (j * self.shift) ** 2
        return np.where(j <= self.count, np.maximum(share, LOG_ZERO), LOG_ZERO)

    def _log_chances(self, j: Array) -> Array:
        """``log(b_j / p)`` of j up to the counts, without a coin besides."""
        kept = np.minimum(j, self.count)
        rest = self.count - kept
        log_rest = log_complement(self.rate)
        share = log_binomial(self.count + 0 * j, kept) + kept * np.log(self.rate)
        share = share + np.where(rest > 0, rest * log_rest, 0.0)
        # Without a coin besides: it is as likely for every j.
        return share - np.log(-np.expm1(np.maximum(self.count * log_rest, LOG_ZERO)))

    def halves(self, cover: Array, *, replaced: bool) -> tuple[Half, ...]:
        """Of all components: in each, ``B^-`` to ``B^+`` moves with chance e."""
        j = np.arange(1.0, np.max(self.count, initial=1.0) + 1)
        j = j.reshape(-1, *(1,) * self.count.ndim)
        js = j * self.shift + 0 * self.count
        mass = np.maximum(self.log_shares(j) + 0.5 * js * js + self.log_some, LOG_ZERO)
        log_e, rest = np.log(cover), log_complement(cover)
        move, kept, none = mass + log_e, mass + rest, self.log_none + 0 * js[0]
        at_zero = log_add(none + rest, log_e + 0 * none)
        if replaced:
            return (Half("turn", -js, js, move, none, mass, none, kept),)
        up = Half.rising(js, move, at_zero, none, -js, kept)
        return up, Half("fall", -js, js[:0], move, none, mass, at_zero, kept)

    def floors(self, *, replaced: bool) -> Array:
        """Where the losses are 0: 0, or where ``B^+`` crosses N(0)."""
        if replaced:
            return np.zeros_like(self.log_some)
        half = self.halves(np.ones_like(self.shift), replaced=False)[0]
        return half.place(np.zeros_like(half.q_zero))

    def place_of_ratio(self, v: Array) -> Array:
        """Where ``B^+`` is ``e^v B^-``, v >= 0."""
        half = self.halves(np.ones_like(self.shift), replaced=True)[0]
        return half.place(v + np.zeros_like(half.q_zero))

    def _one_of_equals(self) -> Components:
        """The first setting alone, if numbers and rates of all are the same."""
        if self.shift.ndim == 0:
            return self
        first = Components(*(a[..., :1] for a in self))
        same = np.all(self.count == first.count) and np.all(self.rate == first.rate)
        return first if same else self


class Terms(NamedTuple):
    """The j of the components' sums."""

    numbers: Array  # (J, 1, ...) from 1 on
    shift: Array  # s
    log_shares: Array  # (J, C, ...); see `Components.log_shares`

    @classmethod
    def all_of(cls, parts: Components) -> Terms:
        """Every j of the components."""
        j = np.arange(1.0, np.max(parts.count, initial=1.0) + 1)
        j = j.reshape(-1, *(1,) * parts.count.ndim)
        return cls(j, parts.shift, parts.log_shares(j))

    def up_to(self, x: Array) -> Terms:
        """Those that count at x and to its left, or beyond it."""
        js = self.numbers * self.shift
        kept = 1
        # As densities at x, and as masses.
        for term in (self.log_shares + js * x, self.log_shares + 0.5 * js * js):
            # What is not a number counts.
            counts = ~(term <= np.max(term, axis=0) - NEGLIGIBLE)
            rows = np.any(counts, axis=tuple(range(1, term.ndim)))
            kept = int(np.max(np.flatnonzero(rows) + 1, initial=kept))
        return Terms(self.numbers[:kept], self.shift, self.log_shares[:kept])

    @property
    def last(self) -> int:
        """The largest j."""
        return len(self.numbers)

    def log_ratio(self, x: Array) -> tuple[Array, Array]:
        """The log-ratio at x, (C, ...), and the mean of j there."""
        s, j, share = self.shift, self.numbers, self.log_shares
        value, mean = self.log_sum(share + j * s * x)
        reach = self.last * s * (np.abs(x) + 0.5 * self.last * s)
        small = reach < _SMALL_TILT
        if not np.any(small):
            return value, mean
        tilt = np.where(small, j * s * (np.where(small, x, 0.0) - 0.5 * j * s), 0.0)
        near = np.sum(np.exp(share + 0.5 * (j * s) ** 2) * np.expm1(tilt), axis=0)
        return np.where(small, np.log1p(near), value), mean

    def log_sum(self, terms: Array) -> tuple[Array, Array]:
        """``log sum_j e^term`` of (J, C, ...) terms, and the mean of j."""
        peak = np.max(terms, axis=0)
        grown = np.exp(terms - peak)
        total = np.sum(grown, axis=0)
        return np.log(total) + peak, np.sum(grown * self.numbers, axis=0) / total


def log_complement(rate: Array) -> Array:
    """``log(1 - rate)``, finite."""
    return np.where(rate < 1, np.log1p(-np.where(rate < 1, rate, 0.5)), LOG_ZERO)
