"""Tails of a sum of independent ``A - g B``, lognormal on both sides; NumPy only.

With ``A = e^{s x - s²/2}``, ``B = e^{-s x - s²/2}``, x standard normal, and the sum
``T = k + U_1 + ... + U_n`` of n copies of ``U = A - g B``,

    E[T_+] = (1/2 pi i) int K(p)^n e^{p k} / p² dp,   K(p) = E e^{p U},

P(T > 0) is the same with 1/p and the density of T at 0 with 1 in place of 1/p². K is
infinite for p > 0, yet it is the boundary value of a function that is analytic off the
positive axis. So the contour comes from infinity below, runs to the
axis on its lower side, back to 0, and returns on the upper side: as the two halves are
conjugate only imaginary parts are left. Those of the part along the axis are integrals
of a positive function (`_jump`), by the path of steepest descent from the larger saddle
of ``p A - x²/2``: so what one rare large jump does keeps its *relative* precision. The
rest is a ray into the upper half plane from a point c, where the integrand is small.

Neighbours share a contour, that of the middle one. With ``h = (g_0 / g)^{1/2}``, g_0 of
the middle, ``delta = -log(h) / s`` and ``p' = p / h``,

    K(p) = E[e^{-delta x - delta²/2} e^{p' (A - g_0 B)}],   B = h B(x) under the mean,

so one exponential serves all of them. Nodes of places are on the last axis.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.numerics.complex_exponentials import exp_complex
from jaxdp_episodic.numerics.quadrature import chebyshev_points, through_points
from jaxdp_episodic.numerics.skewed_starts import crossing
from jaxdp_episodic.numerics.skewed_terms import (
    ROUGH,
    SQRT_2PI,
    Law,
    Terms,
    ends_of,
    fine_rules,
    gauss,
    larger_saddle,
    law_on_axis,
    log_last,
    log_law,
    place_of,
    too_rare,
)

# Of so many terms, with a lower shift, the law along a ray is smooth: it is known at so
# many places. Of few it is not, and of more its rounding would count twice.
_SMOOTH, _SOFT, _KNOWN_OF_RAY = (16, 2e4), 2.5, (40, 56)
# Slope of the ray against the vertical; shifts below it have light tails.
_LEAN, _LIGHT = 0.4, 0.25
# Nodes of the ray, of the law of one term on it, and how many of the former share that.
_NODES, _BLOCK = (80, 160), 8
# Places in asinh where ends of the ray are looked for, in widths of the integrand,
# where it has fallen enough; and how much longer a neighbour's may be.
_SCOUTS, _FALL, _LONGER = np.linspace(1.2, math.asinh(90.0), 16), -37.0, 0.7
# More than the ray can be in units of its scale and of the integrand at c.
_LARGEST_RAY = 3.0
# Part of the axis is all that counts where the ray is so many nats below it.
_NO_RAY = 38.0
# Largest phase of a member's K^n at the start.
_STEADY = 6.5
# Places along the axis at which the law is known: so many, of many terms fewer, and
# so many more for each 1 of s.
_KNOWN, _FEW_KNOWN, _MANY, _MORE = 40, 24, 50, 16
# So far before jumps are too rare to count the axis ends.
_BEFORE = 1e-9
# Neighbours that may share a contour: so many at a time that are no more deviations
# apart, where no more nats cancel on it.
_SHARING, _ALIKE, _CANCELLED = 16, 3.4, 6.0


class _Group(NamedTuple):
    """Places that share a contour; arrays (E,).

    Attributes:
      middle: its terms, of one place.
      constant: ``k h`` of all of them.
      move: delta.
      scale: h.
    """

    middle: Terms
    constant: np.ndarray
    move: np.ndarray
    scale: np.ndarray


def log_tails(
    terms: Terms, *, finer: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logarithms of ``E[T_+]``, ``E[D; T > 0]`` and ``E[D² delta(T)]``.

    D is the sum of the B plus ``idle``: minus the derivative of T in g. n >= 2 and
    E T <= 0. NaN where more cancels than double precision has; ``finer`` takes half as
    many nodes more, to compare with.
    """
    result = np.full((3, len(terms.constant)), np.nan)
    stretches = [np.argsort(terms.log_g, kind="stable")]
    with np.errstate(all="ignore"):
        while stretches:
            parts = [
                part
                for left in stretches
                for part in np.array_split(left, -(-len(left) // _SHARING))
            ]
            middles = np.array([part[len(part) // 2] for part in parts])
            starts = crossing(_taken(terms, middles))
            stretches = []
            for i, part in enumerate(parts):
                at = len(part) // 2
                near, found = _on_one_contour(
                    _group(terms, part, at), at, float(starts[i]), finer
                )
                result[:, part[near]] = found
                for rest in (part[: near[0]], part[near[-1] + 1 :]):
                    if len(rest):
                        stretches.append(rest)
    return result[0], result[1], result[2]


def _taken(terms: Terms, cut: np.ndarray) -> Terms:
    return terms._replace(constant=terms.constant[cut], log_g=terms.log_g[cut])


def _group(terms: Terms, part: np.ndarray, at: int) -> _Group:
    """The places of one part, the middle of which is ``part[at]``."""
    middle, constant = _taken(terms, part[at : at + 1]), terms.constant[part]
    half = 0.5 * (terms.log_g[part] - middle.log_g)
    return _Group(middle, constant * np.exp(-half), half / terms.shift, np.exp(-half))


def _members(group: _Group, cut: slice) -> _Group:
    return group._replace(
        constant=group.constant[cut], move=group.move[cut], scale=group.scale[cut]
    )


def _on_one_contour(
    group: _Group, at: int, c: float, finer: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Which places are served by the contour of the one at ``at``, and (3, n) tails."""
    middle, n = group.middle, group.middle.count
    p = c * np.exp(np.array([-0.05, 0.0, 0.05]))
    axis = _axis(group, c, finer)
    law = law_on_axis(np.append(p, axis.p), middle, axis.rules, group.move)
    power = n * log_law(Law(*(part[:3] for part in law)))
    # A member's K^n may turn sooner than that of the middle.
    steady = np.abs(np.imag(power[1])) <= _STEADY
    growth = np.real(power) + np.multiply.outer(p, group.constant)
    base = growth[1]
    before, _, after = growth - base
    # Second derivative from unequal steps, times c², which alone may be nothing: the
    # variance of the tilted sum.
    low, _, high = p / c
    bend = 2 * (after[at] / (high - 1) + before[at] / (1 - low)) / (high - low)
    width = c / math.sqrt(max(float(bend), 0.0) + 2)
    slope = (after - before) / (p[2] - p[0])
    powers = np.array([[2], [1], [0]])
    scale = base - powers * math.log(c)
    # Parts, what they would be if nothing cancelled, and the logarithm of their scale.
    part, every, top = _jump(group, c, axis, Law(*(part[3:] for part in law)))
    largest = scale + math.log(_LARGEST_RAY * width)
    needed = np.any(largest > np.log(np.abs(part)) + top - _NO_RAY, axis=0)
    near = ~needed
    if needed[at]:
        points = _Points(c, width, _direction(middle))
        ends = _ends(group, points, base)
        alike = np.abs(slope - slope[at]) * width <= _ALIKE
        near |= alike & (ends <= min(ends[at], _SCOUTS[-1]) + _LONGER)
    near = _around(near & steady, at)
    cut = slice(near[0], near[-1] + 1)
    scale, part, every, top = (a[:, cut] for a in (scale, part, every, top))
    on_ray = np.zeros(scale.shape)
    if needed[at]:
        members, which = _members(group, cut), needed[cut]
        end = min(float(ends[cut][which].max()), float(_SCOUTS[-1]))
        on_ray = np.where(which, _ray(members, points, end, base[cut], finer), 0.0)
    total_top = np.maximum(scale, top)
    total = on_ray * np.exp(scale - total_top) + part * np.exp(top - total_top)
    size = np.logaddexp(scale + math.log(width), np.log(every) + top)
    found = np.where(total > 0, np.log(total) + total_top, np.nan)
    served = _around(np.all(found > size - _CANCELLED, axis=0), at - near[0])
    found = found + (1 - powers) * np.log(group.scale[cut])
    return near[served], found[:, served]


def _around(good: np.ndarray, at: int) -> np.ndarray:
    """Numbers of the stretch about one place, itself included, that is good."""
    bad = np.flatnonzero(~good)
    left, right = bad[bad < at], bad[bad > at]
    first = left[-1] + 1 if len(left) else 0
    return np.arange(first, right[0] if len(right) else len(good))


def _factors(group: _Group, first: np.ndarray, second: np.ndarray) -> tuple:
    """What K^n is multiplied with in the three integrands, by the law over K."""
    n, idle = group.middle.count, group.middle.idle
    first, second = group.scale * first, group.scale**2 * second
    square = n * (n - 1) * first**2 + n * second + 2 * idle * n * first + idle**2
    return 1.0, n * first + idle, square


# --- The ray ---


def _path(p: np.ndarray, group: _Group, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes v of one term's law, (L, N), and dv: bent where ``e^{pA}`` would grow.

    Far to the right ``p A`` is turned to the negative axis, about, at all of a row of
    p, (L, B).
    """
    terms, s = group.middle, group.middle.shift
    sizes, angles = np.log(np.abs(p)), np.angle(p)
    smallest, largest = sizes.min(axis=1), sizes.max(axis=1)
    angle = 0.5 * (angles.min(axis=1) + angles.max(axis=1))
    last = log_last(s)
    # Where the ray is vertical, e^{pA} is no larger than at its start.
    growth = largest
    if s < _LIGHT:
        growth = np.log(np.maximum(np.real(p).max(axis=1), 1e-300))
    turn = larger_saddle(np.minimum(growth, last), s)
    turn = np.where(growth >= last, (1 - (growth - last)) / s, turn)
    slope = min(2.0 * s, 2.5)
    end = (math.log(60.0) - smallest + 0.5 * s * s) / s
    low, edge = ends_of(s, group.move)
    high = np.minimum(np.maximum(end, turn + 3 / s), edge)
    # |e^{-p g B}| has vanished.
    fall = np.maximum(np.cos(angles), 0.3)
    gone = (sizes + terms.log_g - 0.5 * s * s - np.log(60.0 / fall)) / s
    low = np.maximum(low, np.minimum(gone.min(axis=1), high - 2))
    spacing = (high - low) / (nodes - 1)
    w = low[:, None] + spacing[:, None] * np.arange(nodes)
    bent = 0.5 * (1 + np.tanh(slope * (w - turn[:, None])))
    height = ((math.pi - angle) / s)[:, None]
    rise = 2 * slope * height * bent * (1 - bent)
    return w + 1j * height * bent, spacing[:, None] * (1 + 1j * rise)


def _law_off_axis(p: np.ndarray, group: _Group, nodes: int) -> tuple[np.ndarray, ...]:
    """``n log K``, and the law's others over K, at complex p of blocks: (M, E)."""
    terms, s, move = group.middle, group.middle.shift, group.move
    some = p.reshape(-1, _BLOCK)
    v, dv = _path(some, group, nodes)
    opposite = np.exp(-0.5 * s * s) * exp_complex(-s * v)
    exponent = math.exp(-s * s) / opposite - np.exp(terms.log_g) * opposite
    dv, normal = dv / SQRT_2PI, -0.5 * v * v
    grown = some[:, :, None] * exponent[:, None] + normal[:, None]
    grown = exp_complex(grown) * dv[:, None]
    # Near 1 the law's own mass is taken off term by term, if all of it is there.
    low, edge = ends_of(s, move)
    complete = (np.real(v[:, 0]) < low + 1.5) & (np.real(v[:, -1]) > edge - s - 3.8)
    rest = exp_complex(normal) * dv * complete[:, None]
    share = exp_complex(-v[:, :, None] * move - 0.5 * move * move)
    both = np.concatenate([grown, grown - rest[:, None]], axis=1) @ share
    whole, excess = both[:, :_BLOCK], both[:, _BLOCK:] - ~complete[:, None, None]
    share = opposite[:, :, None] * share
    first, second = grown @ share, grown @ (opposite[:, :, None] * share)
    parts = whole, excess, first, second
    whole, _, first, second = law = Law(*(a.reshape(-1, len(move)) for a in parts))
    return terms.count * log_law(law), first / whole, second / whole


class _Points(NamedTuple):
    """Of the ray: ``c + sinh(u) width direction``."""

    start: float
    width: float
    direction: complex

    def at(self, u: np.ndarray) -> np.ndarray:
        return self.start + np.sinh(u) * self.width * self.direction


def _direction(terms: Terms) -> complex:
    """Of light tails the ray is vertical: K falls off like a Gaussian's."""
    return 1j + (0.0 if terms.shift < _LIGHT else _LEAN)


def _ends(group: _Group, points: _Points, base: np.ndarray) -> np.ndarray:
    """Where, in u, each place's integrand has fallen enough, or infinity."""
    p = points.at(_SCOUTS)
    power = _law_off_axis(p, group, 96)[0]
    fallen = np.real(power + np.multiply.outer(p, group.constant)) - base < _FALL
    first = _SCOUTS[np.argmax(fallen, axis=0)]
    return np.where(fallen.any(axis=0), first, np.inf)


def _ray(
    group: _Group, points: _Points, end: float, base: np.ndarray, finer: bool
) -> np.ndarray:
    """The ray's shares of the three integrals, over ``e^base c^-m``, its size at c."""
    ray_nodes, law_nodes = ((2 + finer) * number // 2 for number in _NODES)
    place, weight = gauss(ray_nodes, 1)
    u = place * end
    p = points.at(u)
    n, known = group.middle.count, _KNOWN_OF_RAY[finer]
    if _SMOOTH[0] <= n <= _SMOOTH[1] and group.middle.shift < _SOFT:
        p_known = points.at(0.5 * end * (chebyshev_points(known) + 1))
        law = np.stack(_law_off_axis(p_known, group, law_nodes))
        law[0].imag = np.unwrap(law[0].imag / n, axis=0) * n
        power, *over_k = _between(known, ray_nodes, 1) @ law
    else:
        power, *over_k = _law_off_axis(p, group, law_nodes)
    value = exp_complex(power + np.multiply.outer(p, group.constant) - base)
    step = points.direction * points.width * np.cosh(u) * weight * end / math.pi
    value = value * step[:, None]
    over = (points.start / p)[:, None]
    shares = np.stack(
        [
            np.sum(np.imag(value * f * over**m), axis=0)
            for m, f in zip((2, 1, 0), _factors(group, *over_k), strict=True)
        ]
    )
    # The integrand is largest at c: a law that is not resolved shows.
    return np.where(np.abs(shares[0]) <= _LARGEST_RAY * points.width, shares, np.nan)


# --- Along the axis ---


class _Axis(NamedTuple):
    """The axis from 0 to c, by the larger saddle: where jumps are not too rare.

    Attributes:
      start, length: of the saddle's range.
      p: where the law is known, none if all are too rare; for `rules` of it.
      panels: of the rule for the integral.
    """

    start: float
    length: float
    p: np.ndarray
    rules: tuple
    panels: int


def _axis(group: _Group, c: float, finer: bool) -> _Axis:
    s = group.middle.shift
    start = float(larger_saddle(np.log(c), s))
    # The logarithm of p falls by s as x grows by 1, and e^{pk} with it.
    length = float(too_rare(s, group.move)) - _BEFORE - start
    if length <= 0:
        return _Axis(start, length, np.zeros(0), ROUGH, 0)
    known = _FEW_KNOWN if group.middle.count > _MANY else _KNOWN
    known = round((known + _MORE * s) * (1.4 if finer else 1.0))
    points = start + length * 0.5 * (1 + chebyshev_points(known))
    panels = (6 if finer else 4) * math.ceil(1 + s)
    return _Axis(start, length, np.exp(place_of(points, s)), fine_rules(s), panels)


def _jump(
    group: _Group, c: float, axis: _Axis, law: Law
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The axis' share of the three integrals, by the law at its p.

    Factor, what it would be if nothing cancelled, and the logarithm of its scale.
    """
    s, n, number = group.middle.shift, group.middle.count, len(group.move)
    if not len(axis.p):
        nothing = np.zeros((3, number))
        return nothing, nothing, nothing - np.inf
    # What is interpolated is smooth also where angles are tiny.
    over = [part / law.whole for part in (law.first, law.second)]
    turn = np.angle(law.whole)
    rows = [np.real(log_law(law)), np.log(turn)]
    rows += [np.log(np.abs(part)) for part in over]
    rows += [np.angle(part) / turn for part in over]
    found = _between(len(axis.p), 24, axis.panels) @ np.concatenate(rows, axis=1)
    power, turn, *over = (found[:, i * number :][:, :number] for i in range(len(rows)))
    turn = np.exp(turn)
    over = [exp_complex(over[i] + 1j * turn * over[i + 2]) for i in (0, 1)]
    place, weight = gauss(24, axis.panels)
    x, weight = axis.start + axis.length * place, axis.length * weight
    p = np.exp(place_of(x, s))
    size = n * power + np.multiply.outer(p, group.constant)
    size = size + np.log(p * (s - 1 / x) * weight / math.pi)[:, None]
    top = np.max(size, axis=0)
    weight, phase = np.exp(size - top), exp_complex(1j * n * turn)
    parts = [
        weight * (np.imag(phase * f) * ((c / p) ** m)[:, None])
        for m, f in zip((2, 1, 0), _factors(group, *over), strict=True)
    ]
    part, every = (
        np.stack([np.sum(a, axis=0) for a in rows])
        for rows in (parts, map(np.abs, parts))
    )
    return part, every, top - np.array([[2], [1], [0]]) * math.log(c)


@functools.lru_cache
def _between(known: int, nodes: int, panels: int) -> np.ndarray:
    """From values at Chebyshev points to those at nodes of panels."""
    place = 2 * gauss(nodes, panels)[0] - 1
    return through_points(chebyshev_points(known), np.eye(known), place).T
