"""Tails of a sum of independent ``A - g B``, lognormal on both sides; NumPy only.

With ``A = e^{s x - s²/2}``, ``B = e^{-s x - s²/2}``, x standard normal, and the sum
``T = k + U_1 + ... + U_n`` of n copies of ``U = A - g B``, k = (1 - g) idle,

    E[T_+] = (1/2 pi i) int K(p)^n e^{p k} / p² dp,   K(p) = E e^{p U},

P(T > 0) is the same with 1/p, and the density of T at 0 with 1, in place of 1/p².

*The contour.* K is infinite for p > 0, yet it is the boundary value of a function that
is analytic off the positive axis. So the contour comes from infinity below the axis,
runs along its lower side from a point c back to 0, and returns on the upper side: as
the two halves are conjugate only imaginary parts are left. Those of the part along the
axis are integrals of a positive function (`_Axis`), by the path of steepest descent
from the larger saddle point of ``p A - x²/2``: so the probability of a single big jump
keeps its *relative* precision. The rest is a ray from c into the upper half plane, with
c where the integrand is small.

*Tilts.* Neighbouring g share the contour laid for one of them, g_0. With ``h = (g_0 /
g)^{1/2}``, the tilt ``d = -log(h) / s`` and ``p' = p / h``,

    K(p) = E[e^{-d x - d²/2} e^{p' (A - g_0 B)}],   B = h B(x) under the mean,

so one exponential serves all of them; and K is so smooth in d that it is interpolated
from a few Chebyshev points. All contours of a table are made side by side. Nodes are on
the last axis, tilts on the one before.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.numerics.complex_exponentials import (
    exp_complex,
    log_near,
)
from jaxdp_episodic.accountant.numerics.loops import at, complex_of
from jaxdp_episodic.accountant.numerics.quadrature import (
    chebyshev_points,
    chebyshev_shares,
    in_blocks,
)
from jaxdp_episodic.accountant.numerics.skewed_rays import (
    Rays,
    direction_of,
    ends_of_rays,
    transforms_on_rays,
)
from jaxdp_episodic.accountant.numerics.skewed_starts import AROUND, Starts, narrowness
from jaxdp_episodic.accountant.numerics.skewed_terms import (
    Terms,
    Transforms,
    at_gauss,
    gauss,
    larger_saddle,
    place_of,
    too_rare,
    transforms_on_axis,
)

# Numbers of terms, and shifts, for which K along a ray is interpolated from Chebyshev
# points: of fewer terms it is not smooth, of more its rounding would count twice.
_FEWEST_SMOOTH = 16
_MOST_SMOOTH = 2e4
_LARGEST_SMOOTH_SHIFT = 2.5
# Tilts at which K is known: Chebyshev's error of K^n is below 1e-11 for a pole at 4;
# of few terms, where more cancels, as if there were 30; and 5 at the least.
_TILT_ERROR = 1e-11
_TILT_POLE = 4.0
_FEWEST_TERMS = 30
_FEWEST_TILTS = 5
# Nats by which the integrand has fallen, at least, at the end of a ray.
_LEAST_FALL = 25.0
# Bound of the integral along the ray, in units of its width and of the integrand at c.
_LARGEST_RAY = 3.0
# Nats below the integral along the axis at which the ray is negligible.
_NEGLIGIBLE_RAY = 28.0
# Chebyshev points of K along the axis: these and 18 s^1.5.
_AXIS_POINTS = 36
_AXIS_POINTS_OF_MANY = 26
_MANY_TERMS = 50
_AXIS_POINTS_OF_SHIFT = 18
# Gauss-Legendre nodes of a panel along the axis.
_PANEL_NODES = 22
# The axis ends this much before jumps are negligible; see `skewed_terms.too_rare`.
_BEFORE_NEGLIGIBLE = 1e-9
# Values of g whose integrands fit the cache.
_CACHED = 128
# Powers of p by which the three integrands differ.
_POWERS = np.array([[2], [1], [0]])


class _Rule(NamedTuple):
    """Where contours lie and how many nodes they have."""

    anchor: float  # position of log g_0 in the interval that its contour serves
    fineness: float  # nodes of the integrals of one term, relative to what they need
    ray_nodes: int  # Gauss-Legendre nodes of a ray
    smooth_points: int  # Chebyshev points of a ray along which K is smooth
    more_tilts: int  # tilts beyond those needed
    axis_factor: float  # Chebyshev points along the axis, relative to what is needed
    axis_panels: int  # of the integral along the axis, over 1 + s


_USED = _Rule(0.35, 1.0, 80, 32, 0, 1.0, 3)
# Other contours, with more nodes: the difference estimates the error of both.
_FINER = _Rule(0.42, 1.3, 88, 40, 1, 1.15, 4)


class _Axis(NamedTuple):
    """The axis from 0 to c, of C contours.

    Fields are as those of `Contours`, (C, E, 6 N): logs of ``|K|`` and of K's argument;
    and of K's derivatives by g imaginary parts over the argument. All are smooth where
    that is tiny, too.
    """

    p: np.ndarray  # (C, N) nodes, from c on
    log_weight: np.ndarray  # (C, N) of the rule
    fields: np.ndarray


class Contours(NamedTuple):
    """J contours, which together serve all log g from 0 to an end; see `contours`."""

    terms: Terms  # of the sum
    ends: np.ndarray  # (J - 1,) log g from which on the next contour serves
    rays: Rays  # of all J
    reach: float  # the largest tilt; K is known at its Chebyshev points, (E,)
    at_start: np.ndarray  # (J, E) log of ``|K^n|`` where contours leave the axis
    p: np.ndarray  # (J, N) nodes of the rays
    step: np.ndarray  # (J, N) their weights
    # (J, E, 6 N) parts of ``n log K`` and of K's derivatives over K, of nodes in turn.
    fields: np.ndarray
    axis: _Axis  # the part along the axis
    # (J,) which row of `axis` a contour has; -1 where all jumps are negligible.
    rank: np.ndarray

    @np.errstate(all="ignore")
    def log_tails(self, log_g: np.ndarray) -> np.ndarray:
        """Logarithms of ``E[T_+]``, ``E[D; T > 0]`` and ``E[D² delta(T)]``, (3, m).

        D is the sum of the B plus ``idle``: minus the derivative of T in g. NaN where
        more cancels than double precision has.
        """
        parts = range(0, len(log_g), _CACHED)
        return np.concatenate(
            [self._log_tails(log_g[i : i + _CACHED]) for i in parts], axis=1
        )

    def _log_tails(self, log_g: np.ndarray) -> np.ndarray:
        s, which = self.terms.shift, np.searchsorted(self.ends, log_g)
        c, width = self.rays.start[which], self.rays.width[which]
        tilt = 0.5 * (log_g - self.rays.log_g[which]) / s
        scale = np.exp(-s * tilt)
        share = chebyshev_shares(self.at_start.shape[1], tilt / self.reach)
        constant = self.terms.constant(log_g) * scale
        members = _Members(which, share, constant, scale, c)
        base = np.sum(share * self.at_start[which], axis=1) + c * constant
        top = base - _POWERS * np.log(c)
        total, needed = np.zeros(top.shape), np.ones(len(log_g), bool)
        i = np.flatnonzero(self.rank[which] >= 0)
        if len(i):
            some = at(members, i)._replace(which=self.rank[which[i]])
            part, high = some.on_axis(self)
            largest = top[:, i] + np.log(_LARGEST_RAY * width[i])
            negligible = largest <= np.log(part) + high - _NEGLIGIBLE_RAY
            needed[i] = ~np.all(negligible, axis=0)
            both = np.maximum(top[:, i], high)
            total[:, i], top[:, i] = part * np.exp(high - both), both
        i = np.flatnonzero(needed)
        if len(i):
            ray = at(members, i).on_ray(self, base[i])
            # The integrand is largest at c, unless K is not resolved.
            is_small = np.abs(ray[0]) <= _LARGEST_RAY * width[i]
            ray = np.where(is_small, ray, np.nan)
            own = base[i] - _POWERS * np.log(c[i])
            total[:, i] += ray * np.exp(own - top[:, i])
        found = np.where(total > 0, np.log(total) + top, np.nan)
        return found + (1 - _POWERS) * np.log(scale)


class _Members(NamedTuple):
    """Values of g, (M,), each on the contour of its interval."""

    which: np.ndarray  # number of the contour
    share: np.ndarray  # (M, E) weights of K at the contour's tilts
    constant: np.ndarray  # k h
    scale: np.ndarray  # h
    start: np.ndarray  # c

    def on_ray(self, along: Contours, base: np.ndarray) -> np.ndarray:
        """Parts of the three integrals, over ``e^base c^-m``, their size at c."""
        p, (log, first, second) = along.p[self.which], self._at(along.fields)
        log += self.constant[:, None] * p - base[:, None]
        is_whole = np.real(log[:, -1]) < -_LEAST_FALL
        value = exp_complex(log) * along.step[self.which]
        found = self._integrals(along.terms, value, first, second, p)
        return np.where(is_whole, found, np.nan)

    def on_axis(self, along: Contours) -> tuple[np.ndarray, np.ndarray]:
        """Parts of the integrals, and the logarithm of their scale."""
        axis, n = along.axis, along.terms.count
        p, (log, first, second) = axis.p[self.which], self._at(axis.fields)
        angle = np.exp(np.imag(log))
        size = n * np.real(log) + self.constant[:, None] * p
        size += axis.log_weight[self.which]
        top = np.max(size, axis=1)
        value = exp_complex(complex_of(np, size - top[:, None], n * angle))
        first.imag *= angle
        second.imag *= angle
        rows = self._integrals(along.terms, value, first, second, p)
        return rows, top - _POWERS * np.log(self.start)

    def _at(self, fields: np.ndarray) -> np.ndarray:
        """(3, M, N): the transforms at nodes of each one's contour."""
        found = np.empty((len(self.which), fields.shape[2]))
        for i in np.unique(self.which).tolist():
            mine = self.which == i
            found[mine] = in_blocks(self.share[mine], fields[i])
        return np.moveaxis(found.view(complex).reshape(len(found), 3, -1), 1, 0)

    def _integrals(
        self,
        terms: Terms,
        value: np.ndarray,
        first: np.ndarray,
        second: np.ndarray,
        p: np.ndarray,
    ) -> np.ndarray:
        """Imaginary parts of the sums of ``K^n e^{pk}`` times 1/p², D/p and D²."""
        n, over = terms.count, self.start[:, None] / p
        scale = self.scale[:, None]
        once = n * scale * first
        twice = n * scale**2 * second - once * once / n
        once += terms.idle
        twice += once * once
        parts = value * over * over, value * once * over, value * twice
        return np.stack([np.imag(np.sum(part, axis=1)) for part in parts])


@np.errstate(all="ignore")
def contours(terms: Terms, starts: Starts, *, finer: bool = False) -> Contours:
    """Contours for all log g; ``finer`` are others, with more nodes, to compare."""
    s, n, rule = terms.shift, terms.count, _FINER if finer else _USED
    number, passed = max(math.ceil(starts.passed[-1]), 1), starts.passed
    ends, log_g = (
        np.interp(share / number * passed[-1], passed, starts.log_g)
        for share in (np.arange(number + 1), np.arange(number) + rule.anchor)
    )
    # log p + log(g) / 2, the factor of sinh(s x) in p U, changes less than log p.
    log_start = np.log(starts.start) + 0.5 * starts.log_g
    start = np.exp(np.interp(log_g, starts.log_g, log_start) - 0.5 * log_g)
    reach = 0.5 * float(np.max(np.maximum(log_g - ends[:-1], ends[1:] - log_g))) / s
    reach = max(reach, 1e-300) * (1 + 1e-9)
    tilts = math.log(max(n, _FEWEST_TERMS) / _TILT_ERROR)
    tilts = math.ceil(tilts / math.log(_TILT_POLE / reach))
    tilt = reach * chebyshev_points(max(tilts, _FEWEST_TILTS) + rule.more_tilts)
    # The transforms about the starts, and along the axis from 0 to those.
    first = larger_saddle(np.log(start), s)
    length = float(too_rare(s, tilt)) - _BEFORE_NEGLIGIBLE - first
    mine = np.flatnonzero(length > 0)
    first, length = first[mine, None], length[mine, None]
    points = _AXIS_POINTS_OF_MANY if n > _MANY_TERMS else _AXIS_POINTS
    points = (points + _AXIS_POINTS_OF_SHIFT * s**1.5) * rule.axis_factor
    points = 0.5 * (1 + chebyshev_points(round(points)))
    p = np.multiply.outer(start, AROUND).reshape(-1)
    on_axis = np.exp(place_of(first + length * points, s)).reshape(-1)
    each = np.repeat(log_g, 3), np.repeat(log_g[mine], len(points))
    transforms = transforms_on_axis(
        np.append(p, on_axis), np.concatenate(each), terms, tilt
    )
    power = log_near(transforms.whole[: len(p)], transforms.excess[: len(p)])
    power = n * np.real(power).reshape(-1, 3, len(tilt))
    middle = power @ chebyshev_shares(len(tilt), np.zeros(1))[0]
    rays = Rays(log_g, start, start / narrowness(middle), direction_of(terms))
    shape = len(mine), len(points), len(tilt)
    transforms = Transforms(*(part[len(p) :].reshape(shape) for part in transforms))
    axis, rank = _axis(transforms, first, length, s, rule), np.full(number, -1)
    rank[mine] = np.arange(len(mine))
    at_start = power[:, 1]
    found = _on_rays(terms, rays, ends, at_start, tilt, rule)
    return Contours(terms, ends[1:-1], rays, reach, at_start, *found, axis, rank)


def _through(rows: np.ndarray, nodes: int, panels: int) -> np.ndarray:
    """Rows (..., N, E) at Chebyshev points, interpolated at nodes of panels."""
    between = at_gauss(rows.shape[-2], nodes, panels)
    between = np.broadcast_to(between, (*rows.shape[:-2], *between.shape))
    return in_blocks(between, rows.view(float)).view(complex)


def _by_tilts(fields: np.ndarray) -> np.ndarray:
    """From (3, J, N, E) to the parts, (J, E, 6 N)."""
    parts, j, n, e = fields.shape
    fields = np.ascontiguousarray(fields.transpose(1, 3, 0, 2))
    return fields.reshape(j, e, parts * n).view(float)


def _axis(
    transforms: Transforms,
    first: np.ndarray,
    length: np.ndarray,
    s: float,
    rule: _Rule,
) -> _Axis:
    """The axis from 0 to the starts, with the larger saddle as variable in place of p.

    There log p is nearly linear, of slope -s.
    """
    angle = np.angle(transforms.whole)
    rows = [
        complex_of(
            np, np.real(log_near(transforms.whole, transforms.excess)), np.log(angle)
        )
    ]
    for part in (transforms.first, transforms.second):
        part = part / transforms.whole
        rows.append(complex_of(np, np.log(np.abs(part)), np.angle(part) / angle))
    panels = math.ceil(rule.axis_panels * (1 + s))
    fields = _through(np.stack(rows), _PANEL_NODES, panels)
    angle, others = np.exp(np.imag(fields[0])), np.imag(fields[1:])
    others *= angle
    fields[1:] = exp_complex(fields[1:])
    others /= angle
    points, weight = gauss(_PANEL_NODES, panels)
    x = first + length * points
    p = np.exp(place_of(x, s))
    weight = np.log(p * (s - 1 / x) * length * weight / math.pi)
    return _Axis(p, weight, _by_tilts(fields))


def _on_rays(
    terms: Terms,
    rays: Rays,
    ends: np.ndarray,
    at_start: np.ndarray,
    tilt: np.ndarray,
    rule: _Rule,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``p``, ``step`` and ``fields`` of `Contours`."""
    end = ends_of_rays(terms, rays, ends, at_start, tilt)[:, None]
    nodes, weight = gauss(rule.ray_nodes, 1)
    is_smooth = _FEWEST_SMOOTH <= terms.count <= _MOST_SMOOTH
    is_smooth &= terms.shift < _LARGEST_SMOOTH_SHIFT
    known = 0.5 * (chebyshev_points(rule.smooth_points) + 1) if is_smooth else nodes
    transforms = transforms_on_rays(
        rays.at(known * end), rays.log_g, terms, tilt, rule.fineness
    )
    transforms[0] *= terms.count
    if is_smooth:
        transforms = _through(transforms, rule.ray_nodes, 1)
    u = nodes * end
    step = np.cosh(u) * rays.width[:, None] * weight * end / math.pi
    return rays.at(u), rays.direction * step, _by_tilts(transforms)
