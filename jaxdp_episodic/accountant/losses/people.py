"""Dominating pairs of a person who may be in several clip units of a step.

Reference: docs/proofs.md, "People in many units". The pair is a mixture over C
components (what the other units reveal). In each one the person's number of
contributions is J ~ Binomial(n, q), and ``B^±`` is the mixture of N(± J s).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np

from jaxdp_episodic.accountant.losses.excess import (
    LARGE_LOSS,
    Windows,
    log_integral,
    only_root,
    settle,
    sum_of,
    unless_gaussian,
)
from jaxdp_episodic.accountant.losses.gaussian import (
    SMALLEST,
    GaussianLoss,
    positive,
    sampled_displacement,
    scaled,
)
from jaxdp_episodic.accountant.losses.loss_nodes import (
    FURTHEST_LEFT,
    LossNodes,
    NodeRule,
    collected,
    half_line,
    path_points,
    weighted,
)
from jaxdp_episodic.accountant.losses.mixture_halves import (
    LOG_ZERO,
    NEGLIGIBLE,
    PROFILE_ERROR,
    Half,
    log_rest,
)
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    MomentRule,
    Nodes,
    Quadrature,
    Tails,
)
from jaxdp_episodic.accountant.numerics.binomial import log_binomial
from jaxdp_episodic.accountant.numerics.loops import Array, logsumexp, map_first
from jaxdp_episodic.accountant.numerics.quadrature import in_blocks
from jaxdp_episodic.accountant.numerics.special import (
    LOG_SQRT_2PI,
    Pair,
    log1p_complex,
)

# --- The components ---


class Components(NamedTuple):
    """Components of settings of any shape: arrays (C, ...), the last two (...)."""

    count: Array  # n >= 1, the largest number of contributions
    log_weight: Array  # log-probability of the component; -inf for padding
    log_some: Array  # ``log p``, p the probability of any contribution
    log_none: Array  # ``log(1 - p)``, kept finite
    log_rest: Array  # ``log(1 - q)`` of each contribution, kept finite
    shift: Array  # s > 0
    cover: Array  # e > 0; the components' weights are relative to it

    def log_shares(self, j: Array) -> Array:
        """Returns ``log(b_j / p) - j² s² / 2``; j has one further axis in front."""
        counts, rests = self.count, self.log_rest
        if self.shift.ndim:
            # Computed for the first setting alone if all have these counts and rates:
            # profiles have thousands of points.
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


# Smallest scaled sum that is accurate: terms that underflow are below 1e-100 of it.
_LEAST_SUM = 1e-200
_AT_ONCE = 2**14  # inaccurate sums that are computed again at once
_TINY = 1e-300  # replaces a sum of 0 before its logarithm is taken


def _log_products(left: np.ndarray, right: np.ndarray, factor: np.ndarray) -> Array:
    """Returns (C, K, n) logs of ``sum_j e^(left + right) factor``, as products."""
    # (J, C, n) by (J, K, n). Each node's largest term is scaled to 1.
    column = np.max(left, axis=1, keepdims=True)
    scaled = column + right
    top = np.max(scaled, axis=0)
    rows = np.exp(left - column).transpose(2, 1, 0)
    # A complex number is two real columns.
    columns = (np.exp(scaled - top) * factor).transpose(2, 0, 1)
    columns = np.ascontiguousarray(columns).view(np.float64)
    found = in_blocks(rows, columns).view(factor.dtype).transpose(1, 2, 0)
    found, peak = np.ascontiguousarray(found), top + np.zeros(found.shape)
    poor = np.argwhere(np.abs(found) < _LEAST_SUM)
    for first in range(0, len(poor), _AT_ONCE):
        i, k, n = poor[first : first + _AT_ONCE].T
        exact = left[:, i, n] + right[:, k, n]
        peak[i, k, n] = highest = np.max(exact, axis=0)
        found[i, k, n] = np.sum(np.exp(exact - highest) * factor[:, k, n], axis=0)
    size = peak + np.log(np.maximum(np.abs(found), _TINY))
    return size + 1j * np.angle(found) if np.iscomplexobj(found) else size


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


# --- Their losses and densities on one side of the floors ---

# Largest |P/Q - 1| for which log P/Q is computed as log1p of it.
_LARGEST_NEAR = 0.5


@dataclass(frozen=True)
class Side:
    """Where the losses of n settings' components are positive, or negative."""

    parts: Components  # (C, n) components
    numbers: Array  # (J, 1, 1) the j of their sums, from 1 on
    log_shares: Array  # (J, C, n); see `Components.log_shares`
    floor: Array  # (C, n) where P/Q = 1; distances w are measured from it
    replaced: bool  # whether Q is ``B^-``; then the other side is the mirror image
    sign: float  # 1 above the floor, -1 below

    @classmethod
    def both(cls, parts: Components, *, replaced: bool) -> tuple[Self, ...]:
        """Returns the sides; floors are 0, or where ``B^+`` crosses N(0)."""
        floor, j = np.zeros_like(parts.log_some), parts.numbers()
        if not replaced:
            half, _ = parts.halves(np.ones_like(parts.cover), replaced=False)
            floor = half.place(floor)
        above = cls(parts, j, parts.log_shares(j), floor, replaced, 1.0)
        if replaced:
            return (above,)
        below = dataclasses.replace(above, sign=-1.0)
        return above, below.up_to(np.zeros_like(parts.cover))

    def take(self, rows: np.ndarray) -> Self:
        """Selects settings."""
        return dataclasses.replace(
            self,
            parts=Components(*(a[..., rows] for a in self.parts)),
            log_shares=self.log_shares[..., rows],
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
    def covers(self) -> bool:
        """Whether any e is below 1."""
        return bool(np.any(self.parts.cover < 1))

    def at(self, w: Array) -> tuple[Array, Array]:
        """Returns log P/Q, and the log of Q's density, at distances w, (K, n).

        For Re w >= 0; complex log P/Q are right up to multiples of 2 pi i.
        """
        cover, tilt = self.parts.cover, self.floor * self.parts.shift
        x = self.floor[:, None] + self.sign * w
        log_e, own = np.log(cover), 0.0 * x
        more, less = (1, -1 if self.replaced else 0) if self.sign > 0 else (0, -1)
        if self.replaced or self.covers or self.sign < 0:
            own = self._mixture(-self.sign * tilt, w)
        base = own if self.replaced else 0.0 * x
        if self.covers and not self.replaced:
            base = log_add(log_e, own + log_rest(cover))
        change = self._sum(tilt, w, more, less) - base + log_e
        if self.sign > 0:
            loss = log_add(0.0, change)
        else:
            small = change.real < math.log(_LARGEST_NEAR)
            near = _log1p(-np.exp(np.where(small, change, -1.0)))
            loss = np.where(small, near, own - base)
        return loss, base - 0.5 * x * x - LOG_SQRT_2PI

    def weighted_at(self, w: Array) -> tuple[Array, Array]:
        """Returns `at` with the weights, for w of any shape (..., n)."""
        loss, density = self.at(w.reshape(-1, w.shape[-1]))
        density = density + self.parts.log_weight[:, None]
        return loss.reshape(-1, *w.shape), density.reshape(-1, *w.shape)

    def _mixture(self, tilt: Array | float, w: Array) -> Array:
        """Returns the log of ``b_0`` plus `_sum` of ``e^{-j s w}``."""
        return log_add(self.parts.log_none[:, None], self._sum(tilt, w, -1))

    def _sum(
        self, tilt: Array | float, w: Array, more: int, less: int | None = None
    ) -> Array:
        """Log of ``sum_j b_j e^{j tilt - j²s²/2} (e^{more jsw} - e^{less jsw})``."""
        js = self.numbers * self.parts.shift
        exponent = more * js * w
        factor = np.exp(exponent - exponent.real)
        if less is not None:
            factor = factor * -np.expm1((less - more) * js * w)
        shares = self.log_shares + self.numbers * tilt
        found = _log_products(shares, exponent.real, factor)
        return found + self.parts.log_some[:, None]

    def mean_at(self, x: Array) -> Array:
        """Returns the mean of j under ``B^+`` at real x, (C, n)."""
        terms = self.log_shares + self.numbers * self.parts.shift * (x + 0 * self.floor)
        value = logsumexp(terms)
        mean = np.sum(np.exp(terms - value) * self.numbers, axis=0)
        gap = self.parts.log_none - self.parts.log_some - value
        return mean / (1 + np.exp(np.minimum(gap, 700.0)))

    def turning_point(self) -> tuple[Array, Array]:
        """Returns the distance up to which paths stay low, and a shift for it."""
        # If e < 1 zeros of the density lie where e B^+ = (1-e) B^-, pi apart in angle.
        s, cover = self.parts.shift, self.parts.cover
        if not self.covers:
            return 0.0 * s, s
        odds = log_rest(cover) - np.log(cover)
        some = odds > 0
        pair = self.parts.halves(np.ones_like(s), replaced=True)[0]
        kink = pair.place(np.where(some, odds, 0.0) + np.zeros_like(self.floor))
        kink = np.maximum(np.where(some, kink, 0.0), self.floor)
        mean = 0.5 * np.max(self.mean_at(kink) + self.mean_at(-self.floor), axis=0)
        turn = np.where(cover < 1, np.maximum(mean, 1.0), 1.0)
        return np.max(kink - self.floor, axis=0), turn * s


# --- Their Rényi moments ---

# Half-width of the window around a peak, in standard deviations.
_HALF_WIDTH = 9.2
# Panels per standard deviation, and per 1 / shift: zeros are pi / shift away.
_DENSITY = 0.25
_SHIFT_DENSITY = 0.4
# Largest number of peaks that are probed for the ends of the window.
_NUM_PEAKS = 64
# Points that are probed for the ends of the window below the floor.
_NUM_PROBES = 48
# Nats below the largest density at which the integrand is negligible, and nats by which
# it may be larger between two probed points than at both.
_NEGLIGIBLE = 42.0
_BETWEEN = 40.0
# Settings whose numbers of panels are within this ratio get the same number.
_ALIKE = 1.5
_MOST_PANELS = 4096  # largest number of panels
_USUAL_PANELS = 32  # panels of a rule that gets the densities above, of 16 nodes
# Largest density of panels over that for a single Gaussian.
_SHARPEST = 6.0


def _log_excess(
    t: Array, parts: Components, rule: MomentRule, *, replaced: bool
) -> tuple[Array, ...]:
    """Computes `Moments.log_excess` of (C, n) components."""
    if replaced:
        rule = rule._replace(direction="symmetric")
    sides = Side.both(parts, replaced=replaced)
    excess = functools.reduce(sum_of, [_integral(t, side, rule) for side in sides])
    # A component's profile is at most that of a shift by all its contributions.
    shift = parts.count * parts.shift * (2 if replaced else 1)
    weight = parts.log_weight + np.log(parts.cover)
    return unless_gaussian(np.zeros_like(t) > 0, weight, 0.5 * shift * shift, t, excess)


def _integral(t: Array, side: Side, rule: MomentRule) -> tuple[Array, ...]:
    """Integrates over one side: the log-excess and its derivatives over it."""
    windows = _windows(t, side, rule.direction)
    low, high, density = windows
    panels, per_panel, _ = rule.quadrature
    length = np.sum(high - low, axis=0)
    # As many panels per peak as the rule has.
    wanted = np.max(density, axis=0) * length + np.sum(high > low, axis=0)
    wanted = np.clip(wanted * panels / _USUAL_PANELS, 4, _MOST_PANELS)
    wanted = np.where(np.isnan(wanted), 4, wanted)  # without noise there is no moment
    # Settings with similar numbers of panels are integrated together.
    size = np.ceil(np.log(wanted) / np.log(_ALIKE))
    found = np.full((1 + 2 * rule.with_derivatives, t.size), np.nan)
    probed = low + np.linspace(0.0, 1.0, 17)[:, None, None] * (high - low)
    for alike in np.unique(size):
        rows = np.flatnonzero(size == alike)
        few = side.take(rows)
        if side.sign > 0:
            few = few.up_to(np.max(high[:, rows], axis=0))
        number = Quadrature(int(np.max(wanted[rows])), per_panel)
        found[:, rows] = log_integral(
            few.weighted_at,
            (low[:, rows], high[:, rows], density[:, rows]),
            probed[..., rows].reshape(-1, rows.size),
            np.zeros(rows.size),
            t[rows],
            rule._replace(quadrature=number),
        )
    return tuple(found)


def _windows(t: Array, side: Side, direction: str) -> Windows:
    """Windows near the floor, and where peaks of ``Q (P/Q)^(1+t)`` count, (J, n)."""
    floor, s = side.floor, side.parts.shift
    top = np.max(floor, axis=0)
    spread = top - np.min(floor, axis=0)
    if side.sign > 0:
        near = _HALF_WIDTH + np.maximum(spread, 0.5 * _HALF_WIDTH)
    else:
        near = 2 * _HALF_WIDTH + top
    low, high = 0 * near[None], near[None]
    if (side.sign > 0) == (direction != "backward"):
        if side.sign > 0:
            points, others, slack = _peaks_above(t, side, near)
            power, reach = 1 + t, 0.5 * spread
        else:
            points, others, slack = _peaks_below(t, side)
            power, reach = -t, spread

        def largest(w: Array) -> Array:
            loss, density = side.weighted_at(np.maximum(w, 0.0))
            return np.max(density + power * loss, axis=0)

        found, reach = largest(points), _HALF_WIDTH + reach
        most = np.maximum(np.max(found, axis=0), np.max(largest(others), axis=0))
        counts = found > most - _NEGLIGIBLE - slack
        first = np.min(np.where(counts, points, np.inf), axis=0) - reach
        last = np.max(np.where(counts, points, 0.0), axis=0) + reach
        low = np.stack([0 * near, np.clip(first, 0.0, last)])
        high = np.stack([near, last])
    few = np.max(side.parts.count, axis=0)
    # Upper bound of the variance of j, below and between the floors.
    variance = np.minimum(0.25 * few, 1 / (s * s))
    # Peaks may be narrower than N(0).
    sharp = _DENSITY * np.minimum(np.sqrt(1 + t * s * s * variance), _SHARPEST)
    is_mixed = np.any(side.parts.log_rest > LOG_ZERO, axis=0)
    density = np.maximum(np.where(is_mixed, sharp, _DENSITY), _SHIFT_DENSITY * s)
    return low, high, density + 0 * low


def _peaks_above(t: Array, side: Side, near: Array) -> tuple[Array, Array, Array]:
    """Returns (K, n) peaks, points near the floor, and nats lost between peaks."""
    floor, s, last = side.floor, side.parts.shift, len(side.numbers)
    alpha, size = 1 + t, min(_NUM_PEAKS, last)
    index = np.arange(1, size + 1)[:, None]
    grown = np.round(np.exp((index - 1) / max(size - 1, 1) * np.log(last + 0.0)))
    j = np.where(last > size, grown, np.minimum(index, last + 0.0))
    # A peak of N(j s) over N(0), and over N(-j s); and those in between: stationary
    # points of a component's exponent, from both ends.
    over = 2 * alpha - 1 if side.covers or side.replaced else alpha

    def slope(x: Array) -> tuple[Array, Array]:
        rise = np.stack([alpha * s * side.mean_at(row) for row in x])
        if side.replaced:
            rise += np.stack([(alpha - 1) * s * side.mean_at(-row) for row in x])
        return rise, np.zeros_like(x)

    zero, end = np.zeros_like(floor), (2 * alpha - 1) * side.parts.count * s
    settled = settle(slope, np.stack([zero, end]), zero, end)
    peaks = [alpha * j * s, over * j * s, np.max(settled, 1), np.min(settled, 1)]
    middle = 0.5 * (np.max(floor, axis=0) + np.min(floor, axis=0))
    base = 0.5 * near * np.linspace(0.0, 1.0, 5)[:, None]
    slack = np.minimum((alpha * s) ** 2 / 8, _BETWEEN)
    return np.concatenate(peaks) - middle, base, slack


def _peaks_below(t: Array, side: Side) -> tuple[Array, Array, Array]:
    """Returns the same to where ``B^+`` no longer decreases."""
    floor, s = side.floor, side.parts.shift

    # The last peak is at x = -t s E j, whose mean decreases with x.
    def slope(x: Array) -> Array:
        return -t * s * side.mean_at(x)

    peaks = floor - only_root(slope, -t * len(side.numbers) * s + 0 * floor, 0 * floor)
    far = np.max(peaks, axis=0)
    points = np.concatenate([far * np.linspace(0.0, 1.0, _NUM_PROBES)[:, None], peaks])
    slack = np.minimum((far / _NUM_PROBES) ** 2 / 8, _BETWEEN)
    return points, points, slack


# --- Their nodes ---

# Height of paths times the shift; zeros are at a height of pi.
_ANGLE = 1.2
# Height to which paths rise directly, in standard deviations.
_TOP = 1.8
# Length of a line, in standard deviations, for which the rule's number of nodes
# suffices; and the largest factor of that number on longer lines.
_USUAL_LENGTH = 30.0
_MOST_DENSE = 8.0
# Shift passed to `half_line` for a constant spacing.
_EVEN = 1.0
NOWHERE = 1e9  # an x for "never" of a path that rises from x on


def _nodes(parts: Components, rule: NodeRule, *, replaced: bool) -> LossNodes:
    """Computes `Nodes.nodes` of (C, n) components."""
    # Two half-lines, or one and its mirror image. Zeros of sum_j b_j e^{j s x - j²
    # s²/2} lie where Im x is an odd multiple of pi / s (Laguerre). Mixtures of both
    # signs have lower ones, and paths stay below them.
    backward, log_cut, height = (a + 0 * parts.cover for a in rule[:3])
    above, *below = Side.both(parts, replaced=replaced)
    s, zero = parts.shift, np.zeros_like(parts.shift)
    kink, turn = above.turning_point()
    most = np.maximum(_ANGLE / s, _TOP)

    def path(side: Side, end: Array, kink: Array) -> tuple[Array, Pair]:
        end = np.maximum(end, 2.0)
        # A number of nodes with the rule's density, for a line of any length.
        longer = np.max(end * np.maximum(s, 1.0)) / _USUAL_LENGTH
        number = int(rule.num_nodes * np.clip(longer, 1.0, _MOST_DENSE))
        line = half_line(zero, end, (kink,), zero + _EVEN, number)
        # Paths rise after the kink, or never if zeros are low.
        rise = np.where(_ANGLE / s < _TOP, NOWHERE, kink)
        (re, im), (own, turned) = path_points(line, zero, rise, turn, height, most=most)
        # Below the floor w is mirrored, and the path traversed backwards.
        return re + 1j * side.sign * im, (own, side.sign * turned)

    # Where densities fall to the cuts, right and left.
    js = above.numbers * s
    weight = np.max(above.log_shares + parts.log_weight + parts.log_some, axis=1)
    over = (weight[:, None] + 0.5 * js * js) - log_cut
    seen = np.where(over > 0, js + np.sqrt(2 * np.maximum(over, 0.0)), 0.0)
    reach = np.sqrt(-2 * log_cut)
    high = np.maximum(reach, np.max(seen, axis=0))
    above = above.up_to(np.max(high, axis=0))
    paths = [path(above, high - np.min(above.floor, axis=0), kink)]
    for side in below:
        left = np.where(backward > 0, reach, np.minimum(reach, -FURTHEST_LEFT))
        paths.append(path(side, left + np.max(side.floor, axis=0), zero))
    # Losses y with P's density, and if replaced -y with Q's.
    ways, sign, forward = [backward], 1 - 2 * backward, 1 - backward
    if replaced:
        ways, sign, forward = [zero, zero + 1], 1.0, 1.0

    def one(cut: Array, *paths: tuple[Array, Pair]) -> LossNodes:
        found, ends = [], []
        for side, (w, element) in zip([above, *below], paths, strict=True):
            ratio = side.weighted_at(w)
            found += [_weighted(*ratio, element, way, cut) for way in ways]
            ends.append(side.weighted_at(w[-1:].real))
        a, b, c, d = map(np.concatenate, zip(*found, strict=True))
        loss, density = map(np.hstack, zip(*ends, strict=True))
        density = np.maximum(density + forward * loss, cut)
        loss, density = (x.reshape(-1, s.size) for x in (sign * loss, density))
        return collected((a, b), (c, d), density, loss)

    return map_first(one, log_cut, *paths)


def _weighted(
    loss: Array, density: Array, element: Pair, backward: Array, log_cut: Array
) -> list[Array]:
    """Returns (C K, n) parts of losses and weights on a path; 0 below the cut."""
    unwrapped = loss.real, np.unwrap(loss.imag, axis=1)
    pairs = weighted(unwrapped, (density.real, density.imag), element, backward)
    counts = density.real + (1 - backward) * loss.real > log_cut
    found = (np.where(counts, part, 0.0) for pair in pairs for part in pair)
    return [part.reshape(-1, part.shape[-1]) for part in found]


# --- The mechanism ---

# Error of losses from rounding a root, over 1 + u: the largest of 400 that were
# compared with 50 digits. For large losses the methods add more.
_ROOT_ROUNDING = 4e-16
# Rounding of the logarithm of a weight, over the square of the shift that it contains:
# one unit in the last place. (At 5,000 shifts delta was 3e-11 too small, a hundredth.)
_SQUARE_ROUNDING = 2.0**-52


@dataclass(frozen=True)
class PeopleLoss(GaussianLoss, Nodes):
    """Contributions of a person that are 0 where the person's slots are null."""

    # Not compiled: XLA takes half a minute to compile sums of all lengths. NumPy leaves
    # out negligible terms, and takes a tenth of a second.

    cover_rate: Array  # e in [0, 1], the sum of the weights
    shift: Array  # s >= 0 of one contribution, the clip norm over the noise
    counts: tuple[Array, ...]  # whole numbers n_i >= 0, as floats; >= 1 where e < 1
    log_weights: tuple[Array, ...]  # of the components
    # log(1 - q) of each component; next to 1 it has digits that q would lack.
    log_rests: tuple[Array, ...]
    is_symmetric: ClassVar[bool] = False
    forward_is_larger: ClassVar[bool] = True
    padding: ClassVar[dict[str, float]] = {
        "counts": 1.0,
        "log_weights": -np.inf,
        "log_rests": -1.0,
    }
    compiles: ClassVar[bool] = False
    # For larger shifts the rounding of their squares is not far below the losses.
    LARGEST_LOSS: ClassVar[float] = 1e3

    @property
    def loses_nothing(self) -> Array:
        """Whether nothing is sampled, no unit holds the person, or noise is inf."""
        return super().loses_nothing | np.equal(self._largest_count(), 0)

    def log_kept(self) -> Array:
        """See `PrivacyLoss`: without noise any contribution has an infinite loss."""
        seen = np.minimum(self.outer_rate * self.hints().rate * (1 + 1e-12), 1.0)
        with np.errstate(divide="ignore"):
            bare = np.where(self.has_too_little_noise, np.log1p(-seen), -np.inf)
        return np.where(self.is_unprotected, bare, 0.0)

    def hints(self) -> Hints:
        """See `PrivacyLoss`: the mean number of contributions if there are any."""
        n, log_weight, log_rest = self._table(self.shape)
        weight, expected = np.exp(log_weight), -n * np.expm1(log_rest)
        draws = np.minimum(n, expected + 8 * np.sqrt(expected) + 3)
        most = np.max(np.where(weight > 0, draws, 0.0), axis=0, initial=1.0)
        rate = np.minimum(np.sum(-weight * np.expm1(n * log_rest), axis=0), 1.0)
        mean = np.sum(weight * expected, axis=0) / np.maximum(rate, 1e-300)
        return Hints(rate, rate, self.shift * np.maximum(mean, 1.0), self.shift * most)

    def largest_loss(self, *, backward: bool) -> Array:
        """See `PrivacyLoss`: backward log of ``(1-e) + e / b_0``, b_0 = P(J = 0)."""
        if not backward or self.is_symmetric:
            return super().largest_loss(backward=backward)
        (n, weight, log_rest), e = self._table(self.shape), self.cover_rate
        rest = np.max(np.where(weight > -np.inf, -n * log_rest, 0.0), axis=0)
        loss = np.where(rest < 1, np.log1p(e * np.expm1(np.minimum(rest, 1.0))), rest)
        return np.where(rest < -LOG_ZERO, loss, np.inf)

    @property
    def terms_of_profile(self) -> int:
        """See `Profile`: every number of contributions, for every component."""
        return len(self.counts) * int(np.max(self._largest_count(), initial=1.0))

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """See `Profile`: weighted sums over the components."""
        shape = np.broadcast_shapes(np.shape(u), self.shape)
        u, parts = self._components(u, shape)
        factors = self.outer_rate, self.chance, self.shift, self._largest_count()
        factors = [np.broadcast_to(factor, shape) for factor in factors]
        found = []
        for half in parts.halves(parts.cover, replaced=self.is_symmetric):
            both = half.tails(u + np.zeros_like(half.q_zero))
            profile, tail = (logsumexp(parts.log_weight + a) for a in both)
            found.append(scaled((profile, tail), *factors))
        return found[0], found[-1]

    def tail_displacement(self, u: Array) -> Array:
        """See `Profile`: that of the sampled Gaussian, plus a root's rounding."""
        sampled = sampled_displacement(u, 1.0 - 1e-16 + 0 * self.cover_rate)
        return sampled + _ROOT_ROUNDING * (1 + np.minimum(u, LARGE_LOSS))

    def profile_error(self) -> Array:
        """See `Profile`: the squared shifts are added and subtracted again."""
        most = self._largest_count() * self.shift
        return PROFILE_ERROR + _SQUARE_ROUNDING * most * most

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `Moments`; exact up to quadrature error."""
        t, parts = self._components(t, np.broadcast_shapes(np.shape(t), self.shape))
        return _log_excess(t, parts, rule, replaced=self.is_symmetric)

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`."""
        _, parts = self._components(self.shift, self.shape)
        return _nodes(parts, rule, replaced=self.is_symmetric)

    def _components(self, u: Array, shape: tuple[int, ...]) -> tuple[Array, Components]:
        """Returns u, broadcast to a shape, and the components."""
        u, e, s = (np.broadcast_to(a, shape) for a in (u, self.cover_rate, self.shift))
        count, weight, log_rest = self._table(shape)
        some = ((log_rest < 0) | self.loses_nothing) & (count > 0)
        e, count = positive(e, 1.0), np.where(count > 0, count, 1.0)
        weight = np.where(some, weight - np.log(e), -np.inf)
        log_rest = np.minimum(log_rest, -SMALLEST)
        s = np.clip(np.where(s > 0, s, 1.0), self.SMALLEST_LOSS, self.LARGEST_LOSS)
        log_none = np.maximum(count * log_rest, LOG_ZERO)
        log_some = np.log(-np.expm1(log_none))
        return u, Components(count, weight, log_some, log_none, log_rest, s, e)

    def _largest_count(self) -> Array:
        n, weight, log_rest = self._table(self.shape)
        return np.max(np.where((weight > -np.inf) & (log_rest < 0), n, 0.0), axis=0)

    def _table(self, shape: tuple[int, ...]) -> tuple[Array, Array, Array]:
        """Returns counts, log-weights and finite log(1 - q), (C, *shape) each."""
        fields = self.counts, self.log_weights, self.log_rests
        count, weight, log_rest = (self.stacked(columns, shape) for columns in fields)
        return count, weight, np.maximum(log_rest, LOG_ZERO)


@dataclass(frozen=True)
class ReplacedPeopleLoss(PeopleLoss):
    """Contributions of a person that are replaced by other ones; symmetric."""

    is_symmetric: ClassVar[bool] = True
