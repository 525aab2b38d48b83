"""Tails of a sum of independent ``A - g B``, lognormal on both sides; NumPy only.

With ``A = e^{s x - s²/2}``, ``B = e^{-s x - s²/2}``, x standard normal, and the sum
``T = k + U_1 + ... + U_n`` of n copies of ``U = A - g B``,

    E[T_+] = (1/2 pi i) int K(p)^n e^{p k} / p² dp,   K(p) = E e^{p U},

P(T > 0) is the same with 1/p and the density of T at 0 with 1 in place of 1/p². K is
infinite for p > 0, yet it is the boundary value of a function that is analytic off the
positive axis. So the contour comes from infinity below, runs to the axis on its lower
side, back to 0, and returns on the upper side: as the two halves are conjugate only
imaginary parts are left. Those of the part along the axis are integrals of a positive
function (`_Jumps`), by the path of steepest descent from the larger saddle of ``p A -
x²/2``: so what one rare large jump does keeps its *relative* precision. The rest is a
ray into the upper half plane from a point c, where the integrand is small.

Neighbours share a contour, that of one of them. With ``h = (g_0 / g)^{1/2}``, g_0 of
that one, ``delta = -log(h) / s`` and ``p' = p / h``,

    K(p) = E[e^{-delta x - delta²/2} e^{p' (A - g_0 B)}],   B = h B(x) under the mean,

so one exponential serves all of them; and what they need of K is so smooth in delta
that it is known at a few, whatever places are asked for. All contours of a table are
made side by side. Nodes are on the last axis, before that moves delta.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.numerics.complex_exponentials import exp_in_place
from jaxdp_episodic.numerics.loops import complex_of
from jaxdp_episodic.numerics.quadrature import chebyshev_points, through_points
from jaxdp_episodic.numerics.skewed_rays import Rays, direction_of, law_on_rays
from jaxdp_episodic.numerics.skewed_starts import AROUND, Starts, narrowness
from jaxdp_episodic.numerics.skewed_terms import (
    Law,
    Terms,
    gauss,
    larger_saddle,
    law_on_axis,
    log_law,
    place_of,
    too_rare,
)

# Of contours that serve the same places, these and finer ones: where theirs lies, and
# how much finer laws are.
_MIDDLE, _FINER = (0.35, 0.42), (1.0, 1.3)
# Nodes of a ray; of so many terms, with a lower shift, the law along it is smooth: then
# it is known at so many. Of few it is not, and of more its rounding would count twice.
_NODES, _KNOWN_OF_RAY, _SMOOTH, _SOFT = (80, 88), (32, 40), (16, 2e4), 2.5
# Moves at which the law is known: as many as make K^n that precise, as if it had a pole
# at such a move; of few terms, where more cancels, as if they were so many.
_PRECISE, _POLE, _FEW, _FEWEST = 1e-11, 4.0, 30, 5
# Places in asinh where ends of the ray are looked for, in widths of the integrand, by
# how fine laws; where it has fallen enough, and at least.
_SCOUTS, _ROUGHLY = (np.linspace(2.2, 8.2, 16), np.linspace(2.2, 5.2, 8)), 0.75
_FALL, _FALLEN = -37.0, -25.0
# More than the ray can be in units of its scale and of the integrand at c.
_LARGEST_RAY = 3.0
# Part of the axis is all that counts where the ray is so many nats below it.
_NO_RAY = 28.0
# Places along the axis at which the law is known: so many, of many terms fewer, and
# so many more for a shift of 1, by that power of it; and how many times as many.
_KNOWN, _MANY, _MORE, _POWER, _TIMES = (36, 26), 50, 18, 1.5, (1.0, 1.15)
# Panels of jumps, over 1 + shift, and nodes of each.
_PANELS, _EACH = (3, 4), 22
# So far before jumps are too rare to count the axis ends.
_BEFORE = 1e-9


class _Jumps(NamedTuple):
    """The axis from 0 to c, by nodes p, (N,).

    Attributes:
      p: from c on.
      log_weight: of the rule.
      fields: (E, 6 N) log of ``|K|`` and of K's angle; logs of the law's others over
        K, the imaginary parts over the angle. All are smooth where that is tiny, too.
    """

    p: np.ndarray
    log_weight: np.ndarray
    fields: np.ndarray


class Contours(NamedTuple):
    """Contours for places from 0 to an end; made by `contours`.

    Attributes:
      terms: what is added up.
      ends: (J - 1,) log g from where on places have the next one.
      rays: of all J.
      reach: the largest move; the law is known at its Chebyshev points, (E,).
      at_start: (J, E) log of ``|K^n|`` where contours leave the axis.
      p: (J, N) nodes of the rays.
      step: (J, N) their weights.
      fields: (J, E, 6 N) parts of ``n log K`` and of the law's others over K.
      jumps: along the axis; None where all are too rare.
    """

    terms: Terms
    ends: np.ndarray
    rays: Rays
    reach: float
    at_start: np.ndarray
    p: np.ndarray
    step: np.ndarray
    fields: np.ndarray
    jumps: list[_Jumps | None]

    def log_tails(self, log_g: np.ndarray) -> np.ndarray:
        """Logarithms of ``E[T_+]``, ``E[D; T > 0]`` and ``E[D² delta(T)]``, (3, m).

        D is the sum of the B plus ``idle``: minus the derivative of T in g. NaN where
        more cancels than double precision has.
        """
        result, which = np.empty((3, len(log_g))), np.searchsorted(self.ends, log_g)
        with np.errstate(all="ignore"):
            for i in np.unique(which).tolist():
                at = np.flatnonzero(which == i)
                result[:, at] = self._by(i, log_g[at])
        return result

    def _by(self, i: int, log_g: np.ndarray) -> np.ndarray:
        """By one contour."""
        s, c = self.terms.shift, float(self.rays.start[i])
        move = 0.5 * (log_g - self.rays.log_g[i]) / s
        scale = np.exp(-s * move)
        share = _shares(self.at_start.shape[1], move / self.reach)
        members = _Members(
            share, self.terms.constant(log_g) * scale, scale[:, None], self.terms
        )
        base = share @ self.at_start[i] + c * members.constant
        powers = np.array([[2], [1], [0]])
        top = base - powers * math.log(c)
        largest = top + math.log(_LARGEST_RAY * self.rays.width[i])
        total, needed = np.zeros(top.shape), np.ones(len(log_g), bool)
        jumps = self.jumps[i]
        if jumps is not None:
            part, high = members.on_axis(jumps, c)
            known = largest <= np.log(part) + high - _NO_RAY
            needed = ~np.all(known, axis=0)
            both = np.maximum(top, high)
            total, top = part * np.exp(high - both), both
        if needed.any():
            some = members.take(needed)
            ray = some.on_ray(self.p[i], self.step[i], self.fields[i], base[needed], c)
            # The integrand is largest at c: a law that is not resolved shows.
            is_small = np.abs(ray[0]) <= _LARGEST_RAY * self.rays.width[i]
            ray = np.where(is_small, ray, np.nan)
            own = base[needed] - powers * math.log(c)
            total[:, needed] += ray * np.exp(own - top[:, needed])
        found = np.where(total > 0, np.log(total) + top, np.nan)
        return found + (1 - powers) * np.log(scale)


class _Members(NamedTuple):
    """Places of one contour, (M,).

    Attributes:
      share: (M, E) of values at moves in theirs.
      constant: ``k h``.
      scale: (M, 1) h.
      terms: what is added up.
    """

    share: np.ndarray
    constant: np.ndarray
    scale: np.ndarray
    terms: Terms

    def take(self, rows: np.ndarray) -> _Members:
        """Some of them."""
        kept = (self.share[rows], self.constant[rows], self.scale[rows])
        return _Members(*kept, self.terms)

    def on_ray(
        self,
        p: np.ndarray,
        step: np.ndarray,
        fields: np.ndarray,
        base: np.ndarray,
        c: float,
    ) -> np.ndarray:
        """Shares of the three integrals, over ``e^base c^-m``, their size at c."""
        found = self._at(fields)
        found[:, 0] += np.multiply.outer(self.constant, np.real(p)) - base[:, None]
        found[:, 1] += np.multiply.outer(self.constant, np.imag(p))
        is_whole = found[:, 0, -1] < _FALLEN
        value, once, twice = self._factors(found)
        over = c / p
        rows = value @ (step * over * over), (value * once) @ (step * over)
        rows = np.imag(np.stack([*rows, (value * twice) @ step]))
        return np.where(is_whole, rows, np.nan)

    def on_axis(self, jumps: _Jumps, c: float) -> tuple[np.ndarray, np.ndarray]:
        """Shares of the integrals, and the logarithm of their scale."""
        n, found = self.terms.count, self._at(jumps.fields)
        size = n * found[:, 0] + np.multiply.outer(self.constant, jumps.p)
        size += jumps.log_weight
        top = np.max(size, axis=1)
        angle = np.exp(found[:, 1])
        found[:, 3::2] *= angle[:, None]
        exp_in_place(found[:, 2::2], found[:, 3::2])
        found[:, 0], found[:, 1] = size - top[:, None], n * angle
        value, once, twice = self._factors(found)
        over = c / jumps.p
        rows = np.imag(value) @ (over * over), np.imag(value * once) @ over
        rows = np.stack([*rows, np.sum(np.imag(value * twice), axis=1)])
        return rows, top - np.array([[2], [1], [0]]) * math.log(c)

    def _at(self, fields: np.ndarray) -> np.ndarray:
        return (self.share @ fields).reshape(len(self.share), 6, -1)

    def _factors(self, parts: np.ndarray) -> tuple[np.ndarray, ...]:
        """``K^n e^{pk}``, and what it is multiplied with in the other integrands."""
        exp_in_place(parts[:, 0], parts[:, 1])
        value, first, second = (
            complex_of(np, parts[:, i], parts[:, i + 1]) for i in (0, 2, 4)
        )
        once = self.terms.count * self.scale * first
        alike = self.terms.count * self.scale**2 * second
        alike -= once * once / self.terms.count
        once += self.terms.idle
        return value, once, once * once + alike


def contours(terms: Terms, starts: Starts, *, finer: bool = False) -> Contours:
    """Contours for all places; ``finer`` are others, with more nodes, to compare."""
    s, n = terms.shift, terms.count
    number, passed = max(math.ceil(starts.passed[-1]), 1), starts.passed
    ends, log_g = (
        np.interp(share / number * passed[-1], passed, starts.log_g)
        for share in (np.arange(number + 1), np.arange(number) + _MIDDLE[finer])
    )
    # Of what is multiplied with ``sinh(s x)``, which changes less.
    log_start = np.log(starts.start) + 0.5 * starts.log_g
    start = np.exp(np.interp(log_g, starts.log_g, log_start) - 0.5 * log_g)
    with np.errstate(all="ignore"):
        reach = 0.5 * float(np.max(np.maximum(log_g - ends[:-1], ends[1:] - log_g))) / s
        reach = max(reach, 1e-300) * (1 + 1e-9)
        moves = math.log(max(n, _FEW) / _PRECISE) / math.log(_POLE / reach)
        move = reach * chebyshev_points(max(math.ceil(moves), _FEWEST) + finer)
        # The law about the starts, and along the axis from 0 to those.
        first = larger_saddle(np.log(start), s)
        length = float(too_rare(s, move)) - _BEFORE - first
        mine = np.flatnonzero(length > 0)
        first, length = first[mine, None], length[mine, None]
        known = (_KNOWN[n > _MANY] + _MORE * s**_POWER) * _TIMES[finer]
        points = 0.5 * (1 + chebyshev_points(round(known)))
        p = np.multiply.outer(start, AROUND).reshape(-1)
        at = np.exp(place_of(first + length * points, s)).reshape(-1)
        each = np.repeat(log_g, 3), np.repeat(log_g[mine], len(points))
        law = law_on_axis(np.append(p, at), np.concatenate(each), terms, move)
        power = n * np.real(log_law(Law(*(part[: len(p)] for part in law))))
        power = power.reshape(-1, 3, len(move))
        middle = power @ _shares(len(move), np.zeros(1))[0]
        rays = Rays(log_g, start, start / narrowness(middle), direction_of(terms))
        law = Law(*(part[len(p) :] for part in law))
        jumps: list[_Jumps | None] = [None] * number
        for i, one in zip(mine, _jumps(law, first, length, s, finer), strict=True):
            jumps[i] = one
        at_start = power[:, 1]
        found = _on_rays(terms, rays, ends, at_start, move, finer)
    return Contours(terms, ends[1:-1], rays, reach, at_start, *found, jumps)


def _shares(number: int, x: np.ndarray) -> np.ndarray:
    """(m, number): values at x of what is known at Chebyshev points."""
    return through_points(chebyshev_points(number), np.eye(number), x).T


@functools.lru_cache
def _between(known: int, nodes: int, panels: int) -> np.ndarray:
    """From values at Chebyshev points to those at nodes of panels."""
    return _shares(known, 2 * gauss(nodes, panels)[0] - 1)


def _by_moves(fields: np.ndarray) -> np.ndarray:
    """From (6, J, N, E) to (J, E, 6 N)."""
    fields = fields.transpose(1, 3, 0, 2)
    return fields.reshape(*fields.shape[:2], -1)


def _jumps(
    law: Law, first: np.ndarray, length: np.ndarray, s: float, finer: bool
) -> list[_Jumps]:
    """The axis from 0 to the starts, by the larger saddle in place of p.

    The logarithm of p falls by s as that grows by 1, and e^{pk} with it.
    """
    if not len(first):
        return []
    angle = np.angle(law.whole)
    rows = [np.real(log_law(law)), np.log(angle)]
    for part in (law.first / law.whole, law.second / law.whole):
        rows += [np.log(np.abs(part)), np.angle(part) / angle]
    fields = np.stack(rows).reshape(6, len(first), -1, angle.shape[1])
    panels = math.ceil(_PANELS[finer] * (1 + s))
    fields = _by_moves(_between(fields.shape[2], _EACH, panels) @ fields)
    place, weight = gauss(_EACH, panels)
    x = first + length * place
    p = np.exp(place_of(x, s))
    weight = np.log(p * (s - 1 / x) * length * weight / math.pi)
    return [_Jumps(*one) for one in zip(p, weight, fields, strict=True)]


def _on_rays(
    terms: Terms,
    rays: Rays,
    ends: np.ndarray,
    at_start: np.ndarray,
    move: np.ndarray,
    finer: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``p``, ``step`` and ``fields`` of `Contours`."""
    end = _last(terms, rays, ends, at_start, move)[:, None]
    place, weight = gauss(_NODES[finer], 1)
    known = _KNOWN_OF_RAY[finer]
    is_smooth = _SMOOTH[0] <= terms.count <= _SMOOTH[1] and terms.shift < _SOFT
    at = 0.5 * (chebyshev_points(known) + 1) if is_smooth else place
    law = law_on_rays(rays.at(at * end), rays.log_g, terms, move, _FINER[finer])
    law[0] *= terms.count
    fields = np.stack([np.real(law), np.imag(law)], axis=1).reshape(6, *law.shape[1:])
    if is_smooth:
        fields = _between(known, _NODES[finer], 1) @ fields
    u = place * end
    step = np.cosh(u) * rays.width[:, None] * weight * end / math.pi
    return rays.at(u), rays.direction * step, _by_moves(fields)


def _last(
    terms: Terms,
    rays: Rays,
    ends: np.ndarray,
    at_start: np.ndarray,
    move: np.ndarray,
) -> np.ndarray:
    """Where, in u, integrands have fallen enough at all of each contour's places."""
    three = move[-1] * np.array([-1.0, 0.0, 1.0])
    scouts = _SCOUTS[terms.count >= _SMOOTH[0]]
    p = rays.at(scouts)
    power = np.real(law_on_rays(p, rays.log_g, terms, three, _ROUGHLY)[0])
    # From these three to the contour's first place, its own, and its last.
    log_g = np.stack([ends[:-1], rays.log_g, ends[1:]], axis=1)
    own = 0.5 * (log_g - rays.log_g[:, None]) / terms.shift
    power, base = (
        np.einsum(
            "jke,jue->juk",
            _shares(size, own / move[-1]).reshape(*own.shape, size),
            rows,
        )
        for size, rows in ((3, terms.count * power), (len(move), at_start[:, None]))
    )
    constant = terms.constant(log_g) * np.exp(-terms.shift * own)
    fall = np.real(p) - rays.start[:, None]
    above = power + fall[..., None] * constant[:, None] - base - _FALL
    is_gone = above < 0
    at = np.argmax(is_gone, axis=1)[:, None]
    after, before = (
        np.take_along_axis(above, np.maximum(at - i, 0), axis=1)[:, 0] for i in (0, 1)
    )
    share = np.where((after < 0) & (before > 0), after / (after - before), 0.0)
    # No integrand falls off faster than a Gaussian's.
    square, at = np.sinh(scouts) ** 2, at[:, 0]
    square = square[at] - share * (square[at] - square[np.maximum(at - 1, 0)])
    last = np.where(is_gone.any(axis=1), np.arcsinh(np.sqrt(square)), scouts[-1])
    return last.max(axis=1)
