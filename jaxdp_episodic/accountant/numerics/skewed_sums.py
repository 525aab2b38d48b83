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

from jaxdp_episodic.accountant.numerics.complex_exponentials import exp_complex
from jaxdp_episodic.accountant.numerics.loops import complex_of
from jaxdp_episodic.accountant.numerics.quadrature import (
    chebyshev_points,
    in_blocks,
    through_points,
)
from jaxdp_episodic.accountant.numerics.skewed_rays import (
    Rays,
    direction_of,
    transforms_on_rays,
)
from jaxdp_episodic.accountant.numerics.skewed_starts import AROUND, Starts, narrowness
from jaxdp_episodic.accountant.numerics.skewed_terms import (
    Terms,
    Transforms,
    gauss,
    larger_saddle,
    log_transform,
    place_of,
    too_rare,
    transforms_on_axis,
)

# Of contours that serve the same places, these and finer ones: where theirs lies, and
# how much finer integrals of one term are.
_MIDDLE, _FINER = (0.35, 0.42), (1.0, 1.3)
# Nodes of a ray; of so many terms, with a lower shift, K along it is smooth: then
# it is known at so many. Of few it is not, and of more its rounding would count twice.
_NODES, _KNOWN_OF_RAY, _SMOOTH, _SOFT = (80, 88), (32, 40), (16, 2e4), 2.5
# Moves at which K is known: as many as make K^n that precise, as if it had a pole
# at such a move; of few terms, where more cancels, as if they were so many.
_PRECISE, _POLE, _FEW, _FEWEST = 1e-11, 4.0, 30, 5
# Places in asinh where ends of the ray are looked for, in widths of the integrand, by
# how fine integrals; where it has fallen enough, and at least.
_PROBES, _COARSELY = (np.linspace(2.2, 8.2, 16), np.linspace(2.2, 5.2, 8)), 0.75
_FALL, _FALLEN = -37.0, -25.0
# More than the ray can be in units of its scale and of the integrand at c.
_LARGEST_RAY = 3.0
# Part of the axis is all that counts where the ray is so many nats below it.
_NO_RAY = 28.0
# Places along the axis at which K is known: so many, of many terms fewer, and
# so many more for a shift of 1, by that power of it; and how many times as many.
_KNOWN, _MANY, _MORE, _POWER, _TIMES = (36, 26), 50, 18, 1.5, (1.0, 1.15)
# Panels of jumps, over 1 + shift, and nodes of each.
_PANELS, _EACH = (3, 4), 22
# Places whose integrands fit the cache; and powers of p by which the three differ.
_AT_ONCE, _POWERS = 128, np.array([[2], [1], [0]])
# So far before jumps are too rare to count the axis ends.
_BEFORE = 1e-9


class _Jumps(NamedTuple):
    """Of C contours the axis from 0 to c, by nodes p, (C, N).

    Attributes:
      p: from c on.
      log_weight: of the rule.
      fields: as those of `Contours`, (C, E, 6 N): logs of ``|K|`` and of K's angle, and
        of K's derivatives by g imaginary parts over the angle. All are smooth where
        that is tiny, too.
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
      reach: the largest move; K is known at its Chebyshev points, (E,).
      at_start: (J, E) log of ``|K^n|`` where contours leave the axis.
      p: (J, N) nodes of the rays.
      step: (J, N) their weights.
      fields: (J, E, 6 N) parts of ``n log K`` and of K's derivatives over K, of nodes
        in turn.
      jumps: along the axis.
      rank: (J,) which of them a contour has; -1 where all are too rare.
    """

    terms: Terms
    ends: np.ndarray
    rays: Rays
    reach: float
    at_start: np.ndarray
    p: np.ndarray
    step: np.ndarray
    fields: np.ndarray
    jumps: _Jumps
    rank: np.ndarray

    def log_tails(self, log_g: np.ndarray) -> np.ndarray:
        """Logarithms of ``E[T_+]``, ``E[D; T > 0]`` and ``E[D² delta(T)]``, (3, m).

        D is the sum of the B plus ``idle``: minus the derivative of T in g. NaN where
        more cancels than double precision has.
        """
        with np.errstate(all="ignore"):
            parts = range(0, len(log_g), _AT_ONCE)
            rows = [self._log_tails(log_g[i : i + _AT_ONCE]) for i in parts]
        return np.concatenate(rows, axis=1)

    def _log_tails(self, log_g: np.ndarray) -> np.ndarray:
        """Of so many that all fits the cache."""
        s, which = self.terms.shift, np.searchsorted(self.ends, log_g)
        c, width = self.rays.start[which], self.rays.width[which]
        move = 0.5 * (log_g - self.rays.log_g[which]) / s
        scale = np.exp(-s * move)
        share = _shares(self.at_start.shape[1], move / self.reach)
        constant = self.terms.constant(log_g) * scale
        members = _Members(which, share, constant, scale, c, self.terms)
        base = np.sum(share * self.at_start[which], axis=1) + c * constant
        top = base - _POWERS * np.log(c)
        total, needed = np.zeros(top.shape), np.ones(len(log_g), bool)
        at = np.flatnonzero(self.rank[which] >= 0)
        if len(at):
            some = members.take(at)
            part, high = some._replace(which=self.rank[which[at]]).on_axis(self.jumps)
            largest = top[:, at] + np.log(_LARGEST_RAY * width[at])
            known = largest <= np.log(part) + high - _NO_RAY
            needed[at] = ~np.all(known, axis=0)
            both = np.maximum(top[:, at], high)
            total[:, at], top[:, at] = part * np.exp(high - both), both
        at = np.flatnonzero(needed)
        if len(at):
            ray = members.take(at).on_ray(self, base[at])
            # The integrand is largest at c: K that is not resolved shows.
            is_small = np.abs(ray[0]) <= _LARGEST_RAY * width[at]
            ray = np.where(is_small, ray, np.nan)
            own = base[at] - _POWERS * np.log(c[at])
            total[:, at] += ray * np.exp(own - top[:, at])
        found = np.where(total > 0, np.log(total) + top, np.nan)
        return found + (1 - _POWERS) * np.log(scale)


class _Members(NamedTuple):
    """Places, (M,).

    Attributes:
      which: numbers of their contours.
      share: (M, E) of values at moves in theirs.
      constant: ``k h``.
      scale: h.
      start: c.
      terms: what is added up.
    """

    which: np.ndarray
    share: np.ndarray
    constant: np.ndarray
    scale: np.ndarray
    start: np.ndarray
    terms: Terms

    def take(self, rows: np.ndarray) -> _Members:
        """Some of them."""
        share, constant, scale = self.share[rows], self.constant[rows], self.scale[rows]
        which, start = self.which[rows], self.start[rows]
        return _Members(which, share, constant, scale, start, self.terms)

    def on_ray(self, along: Contours, base: np.ndarray) -> np.ndarray:
        """Shares of the three integrals, over ``e^base c^-m``, their size at c."""
        p, (log, first, second) = along.p[self.which], self._at(along.fields)
        log += self.constant[:, None] * p - base[:, None]
        is_whole = np.real(log[:, -1]) < _FALLEN
        value = exp_complex(log) * along.step[self.which]
        return np.where(is_whole, self._integrals(value, first, second, p), np.nan)

    def on_axis(self, jumps: _Jumps) -> tuple[np.ndarray, np.ndarray]:
        """Shares of the integrals, and the logarithm of their scale."""
        p, (log, first, second) = jumps.p[self.which], self._at(jumps.fields)
        n, angle = self.terms.count, np.exp(np.imag(log))
        size = n * np.real(log) + self.constant[:, None] * p
        size += jumps.log_weight[self.which]
        top = np.max(size, axis=1)
        value = exp_complex(complex_of(np, size - top[:, None], n * angle))
        first.imag *= angle
        second.imag *= angle
        rows = self._integrals(value, first, second, p)
        return rows, top - _POWERS * np.log(self.start)

    def _at(self, fields: np.ndarray) -> np.ndarray:
        """(3, M, N): the transforms at nodes of each one's contour."""
        found = np.empty((len(self.which), fields.shape[2]))
        for i in np.unique(self.which).tolist():
            mine = self.which == i
            found[mine] = in_blocks(self.share[mine], fields[i])
        return np.moveaxis(found.view(complex).reshape(len(found), 3, -1), 1, 0)

    def _integrals(
        self, value: np.ndarray, first: np.ndarray, second: np.ndarray, p: np.ndarray
    ) -> np.ndarray:
        """Imaginary parts of sums of ``K^n e^{pk}`` and what it is multiplied with."""
        n, over = self.terms.count, self.start[:, None] / p
        scale = self.scale[:, None]
        once = n * scale * first
        twice = n * scale**2 * second - once * once / n
        once += self.terms.idle
        twice += once * once
        parts = value * over * over, value * once * over, value * twice
        return np.stack([np.imag(np.sum(part, axis=1)) for part in parts])


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
        # The transforms about the starts, and along the axis from 0 to those.
        first = larger_saddle(np.log(start), s)
        length = float(too_rare(s, move)) - _BEFORE - first
        mine = np.flatnonzero(length > 0)
        first, length = first[mine, None], length[mine, None]
        known = (_KNOWN[n > _MANY] + _MORE * s**_POWER) * _TIMES[finer]
        points = 0.5 * (1 + chebyshev_points(round(known)))
        p = np.multiply.outer(start, AROUND).reshape(-1)
        at = np.exp(place_of(first + length * points, s)).reshape(-1)
        each = np.repeat(log_g, 3), np.repeat(log_g[mine], len(points))
        transforms = transforms_on_axis(
            np.append(p, at), np.concatenate(each), terms, move
        )
        power = n * np.real(
            log_transform(Transforms(*(part[: len(p)] for part in transforms)))
        )
        power = power.reshape(-1, 3, len(move))
        middle = power @ _shares(len(move), np.zeros(1))[0]
        rays = Rays(log_g, start, start / narrowness(middle), direction_of(terms))
        shape = len(mine), len(points), len(move)
        transforms = Transforms(*(part[len(p) :].reshape(shape) for part in transforms))
        jumps, rank = _jumps(transforms, first, length, s, finer), np.full(number, -1)
        rank[mine] = np.arange(len(mine))
        at_start = power[:, 1]
        found = _on_rays(terms, rays, ends, at_start, move, finer)
    return Contours(terms, ends[1:-1], rays, reach, at_start, *found, jumps, rank)


def _shares(number: int, x: np.ndarray) -> np.ndarray:
    """(m, number): values at x of what is known at Chebyshev points."""
    return through_points(chebyshev_points(number), np.eye(number), x).T


@functools.lru_cache
def _between(known: int, nodes: int, panels: int) -> np.ndarray:
    """From values at Chebyshev points to those at nodes of panels."""
    return _shares(known, 2 * gauss(nodes, panels)[0] - 1)


def _through(rows: np.ndarray, nodes: int, panels: int) -> np.ndarray:
    """Rows (..., N, E) at Chebyshev points, at nodes of panels."""
    between = _between(rows.shape[-2], nodes, panels)
    between = np.broadcast_to(between, (*rows.shape[:-2], *between.shape))
    return in_blocks(between, rows.view(float)).view(complex)


def _by_moves(fields: np.ndarray) -> np.ndarray:
    """From (3, J, N, E) to the parts, (J, E, 6 N)."""
    parts, j, n, e = fields.shape
    fields = np.ascontiguousarray(fields.transpose(1, 3, 0, 2))
    return fields.reshape(j, e, parts * n).view(float)


def _jumps(
    transforms: Transforms, first: np.ndarray, length: np.ndarray, s: float, finer: bool
) -> _Jumps:
    """The axis from 0 to the starts, by the larger saddle in place of p.

    The logarithm of p falls by s as that grows by 1, and e^{pk} with it.
    """
    angle = np.angle(transforms.whole)
    rows = [complex_of(np, np.real(log_transform(transforms)), np.log(angle))]
    for part in (
        transforms.first / transforms.whole,
        transforms.second / transforms.whole,
    ):
        rows.append(complex_of(np, np.log(np.abs(part)), np.angle(part) / angle))
    panels = math.ceil(_PANELS[finer] * (1 + s))
    fields = _through(np.stack(rows), _EACH, panels)
    angle, others = np.exp(np.imag(fields[0])), np.imag(fields[1:])
    others *= angle
    fields[1:] = exp_complex(fields[1:])
    others /= angle
    place, weight = gauss(_EACH, panels)
    x = first + length * place
    p = np.exp(place_of(x, s))
    weight = np.log(p * (s - 1 / x) * length * weight / math.pi)
    return _Jumps(p, weight, _by_moves(fields))


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
    transforms = transforms_on_rays(
        rays.at(at * end), rays.log_g, terms, move, _FINER[finer]
    )
    transforms[0] *= terms.count
    if is_smooth:
        transforms = _through(transforms, _NODES[finer], 1)
    u = place * end
    step = np.cosh(u) * rays.width[:, None] * weight * end / math.pi
    return rays.at(u), rays.direction * step, _by_moves(transforms)


def _last(
    terms: Terms,
    rays: Rays,
    ends: np.ndarray,
    at_start: np.ndarray,
    move: np.ndarray,
) -> np.ndarray:
    """Where, in u, integrands have fallen enough at all of each contour's places."""
    three = move[-1] * np.array([-1.0, 0.0, 1.0])
    probes = _PROBES[terms.count >= _SMOOTH[0]]
    p = rays.at(probes)
    power = np.real(transforms_on_rays(p, rays.log_g, terms, three, _COARSELY)[0])
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
    square, at = np.sinh(probes) ** 2, at[:, 0]
    square = square[at] - share * (square[at] - square[np.maximum(at - 1, 0)])
    last = np.where(is_gone.any(axis=1), np.arcsinh(np.sqrt(square)), probes[-1])
    return last.max(axis=1)
