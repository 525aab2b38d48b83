"""Losses and densities of a person's visible components, on the line and above it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from jaxdp_episodic.accountant.losses.loss_nodes import LOG_SQRT_2PI
from jaxdp_episodic.accountant.losses.people_components import (
    Components,
    Terms,
    log_complement,
)
from jaxdp_episodic.accountant.losses.people_products import (
    Points,
    gained,
    log_products,
    power,
    shrunk,
    turned,
)
from jaxdp_episodic.accountant.numerics.complex_exponentials import log_add_complex
from jaxdp_episodic.accountant.numerics.loops import Array
from jaxdp_episodic.accountant.numerics.special import log_add

# Stands for nowhere, of a place where a path rises.
NOWHERE = 1e9
# Size of P/Q - 1 up to which its logarithm is that of 1 + (P/Q - 1).
_LARGEST_NEAR = 0.5
# Nats between the densities of N(0) up to which a component e^-460 below the largest
# one, of a weight above e^-70 of its, is nothing beside it.
_MOST_APART = 200.0


class Ratio(NamedTuple):
    """Of Q's density over that of N(0), and of P's over Q's, at (C, K, n) points."""

    loss: Points  # log P/Q, in the plane up to multiples of 2 pi i
    base: Points  # the logarithm of Q's density over that of N(0)
    x: Points  # the points, on the scale of the releases

    def log_density(self) -> Points:
        """Of Q."""
        (re, im), (base, angle) = self.x, self.base
        if im is None or angle is None:
            return base - 0.5 * re * re - LOG_SQRT_2PI, None
        return (
            base + 0.5 * (im - re) * (im + re) - LOG_SQRT_2PI,
            angle - re * im,
        )


@dataclass(frozen=True)
class Ratios:
    """The components of n settings."""

    parts: Components  # (C, n) components
    terms: Terms  # the j of their sums
    cover: Array  # (n,) e
    floor: Array  # (C, n)
    replaced: bool  # whether Q is ``B^-``
    covers: bool  # whether any e is below 1
    is_rough: bool = False  # far smaller components may be taken for more

    @classmethod
    def of(cls, parts: Components, cover: Array, *, replaced: bool) -> Self:
        """With their floors."""
        terms, floor = Terms.all_of(parts), parts.floors(replaced=replaced)
        covers = bool(np.any(cover < 1))
        return cls(parts, terms, cover, floor, replaced, covers)

    def take(self, rows: np.ndarray) -> Self:
        """Some of the settings."""
        shift, log_shares = (a[..., rows] for a in self.terms[1:])
        return dataclasses.replace(
            self,
            parts=Components(*(a[..., rows] for a in self.parts)),
            terms=self.terms._replace(shift=shift, log_shares=log_shares),
            cover=self.cover[rows],
            floor=self.floor[:, rows],
        )

    def up_to(self, w: Array) -> Self:
        """The same with the terms that count at distances w and below, (n,)."""
        x = w + np.max(self.floor, axis=0)
        terms = self.terms.up_to(x + 0 * self.floor)
        return dataclasses.replace(self, terms=terms)

    def upper(self, w: Points) -> Ratio:
        """At ``floor + w``, Re w >= 0, (K, n)."""
        s, log_e = self.parts.shift, np.log(self.cover)
        x, rough = self._at(w), self.is_rough and self._are_alike(w)
        if self.replaced:
            rise = self._sum(0.0, turned, w)
            base = self._mixture(0.0, -1.0, w)
        else:
            rise = self._sum(self.floor * s, gained, w, is_rough=rough)
            # At least e N(0), beside which what is rough is nothing.
            base = self._mixture(-self.floor * s, -1.0, w, is_rough=rough)
            base = self._base(base)
        return Ratio(_log1p_exp(_less(rise, base, -log_e)), base, x)

    def lower(self, w: Points) -> Ratio:
        """At ``floor - w``, Re w >= 0, (K, n)."""
        s = self.parts.shift
        x = self._at((-w[0], None if w[1] is None else -w[1]))
        fall = self._sum(self.floor * s, shrunk, w)
        own = self._mixture(self.floor * s, -1.0, w)
        base = self._base(own)
        log_v = _less(fall, base, -np.log(self.cover))
        far = _less(own, base)
        small = log_v[0] < math.log(_LARGEST_NEAR)
        bounded = np.where(small, log_v[0], -1.0)
        if log_v[1] is None:
            near = np.log1p(-np.exp(bounded))
            return Ratio((np.where(small, near, far[0]), None), base, x)
        near = log_add_complex(np.zeros_like(bounded), (bounded, log_v[1] + math.pi))
        loss = tuple(np.where(small, a, b) for a, b in zip(near, far, strict=True))
        return Ratio((loss[0], loss[1]), base, x)

    def whole(self, x: Points) -> Ratio:
        """At x, (K, n), where nothing is covered and Q is N(0)."""
        s, log_some = self.parts.shift, self.parts.log_some[:, None]
        js = self.terms.numbers * s
        height = 0.5 * js * js
        near = log_products(self.terms.log_shares + height, gained(x, js, height))
        far = self._mixture(0.0, 1.0, x)
        small = near[0] + log_some < math.log(_LARGEST_NEAR)
        bounded = np.where(small, near[0] + log_some, -1.0)
        zero = np.zeros_like(bounded)
        if near[1] is None:
            raise NotImplementedError
        one = log_add_complex(zero, (bounded, near[1]))
        loss = tuple(np.where(small, a, b) for a, b in zip(one, far, strict=True))
        wide = x[0] + zero, None if x[1] is None else x[1] + zero
        return Ratio((loss[0], loss[1]), (zero, zero), wide)

    def mean_at(self, x: Array) -> Array:
        """The mean of j under ``B^+`` at real x, (C, n)."""
        value, mean = self.terms.log_ratio(x + np.zeros_like(self.floor))
        gap = self.parts.log_none - self.parts.log_some - value
        return mean / (1 + np.exp(np.minimum(gap, 700.0)))

    def turning_point(self) -> tuple[Array, Array]:
        """The distance up to which paths are low, and the shift that says how low."""
        # With a cover zeros of the density lie where e B^+ = (1-e) B^-, with angles pi
        # apart.
        s = self.parts.shift
        if not self.covers:
            # Of a binomial law with more weight at 0 zeros may lie as low as where all
            # terms first fill a half-plane, anywhere.
            hidden = self.parts.is_hidden
            turn = np.where(hidden, self.terms.last * s, s)
            return np.where(hidden, NOWHERE, 0.0), turn
        odds = log_complement(self.cover) - np.log(self.cover)
        some = odds > 0
        kink = self.parts.place_of_ratio(np.where(some, odds, 0.0))
        kink = np.maximum(np.where(some, kink, 0.0), self.floor)
        mean = 0.5 * np.max(self.mean_at(kink) + self.mean_at(-self.floor), axis=0)
        turn = np.where(self.cover < 1, np.maximum(mean, 1.0), 1.0)
        return np.max(kink - self.floor, axis=0), turn * s

    def _at(self, w: Points) -> Points:
        """The points at distances w from the floors, (C, K, n)."""
        floor = self.floor[:, None]
        return floor + w[0], None if w[1] is None else 0 * floor + w[1]

    def _are_alike(self, w: Points) -> bool:
        """Whether densities of N(0) at ``floor + w`` are alike for all components."""
        highest = np.max(self.floor, axis=0)
        apart = highest - np.min(self.floor, axis=0)
        return bool(np.all(apart * (np.max(w[0], axis=0) + highest) < _MOST_APART))

    def _sum(
        self, tilt: Array | float, factor, w: Points, *, is_rough: bool = False
    ) -> Points:
        """``p sum_j b_j / p e^{j tilt - j² s² / 2} factor(w, j s)``."""
        j = self.terms.numbers
        exponent = self.terms.log_shares + j * tilt
        factors = factor(w, j * self.parts.shift)
        found = log_products(exponent, factors, is_rough=is_rough)
        return found[0] + self.parts.log_some[:, None], found[1]

    def _mixture(
        self, tilt: Array | float, sign: float, w: Points, *, is_rough: bool = False
    ) -> Points:
        """Of ``B^±`` over N(0): the same of ``e^{± j s w}``, and b_0."""
        return _add(
            self.parts.log_none[:, None],
            self._sum(
                tilt, lambda w, slope: power(w, sign * slope), w, is_rough=is_rough
            ),
        )

    def _base(self, mixture: Points) -> Points:
        """Of ``e N(0) + (1 - e)`` times the mixture."""
        if not self.covers:
            zero = mixture[0] * 0.0
            return zero, None if mixture[1] is None else zero
        share = log_complement(self.cover)
        return _add(np.log(self.cover), (mixture[0] + share, mixture[1]))


def _add(first: Array, second: Points) -> Points:
    """``log(e^a + e^b)`` of a real a."""
    if second[1] is None:
        return log_add(first + 0 * second[0], second[0]), None
    return log_add_complex(first + 0 * second[0], (second[0], second[1]))


def _log1p_exp(log_v: Points) -> Points:
    return _add(0.0 * log_v[0], log_v)


def _less(first: Points, second: Points, more: Array | float = 0.0) -> Points:
    """The difference of two logarithms, and of one more real number."""
    im = None
    if first[1] is not None and second[1] is not None:
        im = first[1] - second[1]
    return first[0] - second[0] - more, im
