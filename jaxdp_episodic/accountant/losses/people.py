"""Dominating pairs of a person who may be in several clip units of a step.

Reference: docs/proofs.md, "People in many units". The pair is a mixture over C
components (what the other units reveal). In each one the person's number of
contributions is J ~ Binomial(n, q), and ``B^±`` is the mixture of N(± J s).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

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
from jaxdp_episodic.accountant.losses.mixture_halves import LOG_ZERO, PROFILE_ERROR
from jaxdp_episodic.accountant.losses.people_ratios import (
    NOWHERE,
    Components,
    Ratio,
    Ratios,
)
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    MomentRule,
    Nodes,
    Quadrature,
    Tails,
)
from jaxdp_episodic.accountant.numerics.loops import Array, logsumexp, map_first
from jaxdp_episodic.accountant.numerics.special import Pair

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
    t: Array, parts: Components, cover: Array, rule: MomentRule, *, replaced: bool
) -> tuple[Array, ...]:
    """Computes `Moments.log_excess` of (C, n) components whose weights add up to e."""
    ratios = Ratios.of(parts, cover, replaced=replaced)
    if replaced:
        rule = rule._replace(direction="symmetric")
    windows = _upper_windows(t, ratios, rule.direction)
    excess = _integrals(Ratios.upper, windows, t, ratios, rule)
    if not replaced:
        windows = _lower_windows(t, ratios, rule.direction)
        below = ratios.up_to(np.zeros_like(t))
        excess = sum_of(excess, _integrals(Ratios.lower, windows, t, below, rule))
    # A component's profile is at most that of a shift by all its contributions.
    shift = parts.count * parts.shift * (2 if replaced else 1)
    weight = parts.log_weight + np.log(cover)
    return unless_gaussian(np.zeros_like(t) > 0, weight, 0.5 * shift * shift, t, excess)


def _integrals(
    ratio: Callable[[Ratios, Array], Ratio],
    windows: Windows,
    t: Array,
    ratios: Ratios,
    rule: MomentRule,
) -> tuple[Array, ...]:
    """Integrates over one half-line: the log-excess and its derivatives over it."""
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
    shares = np.linspace(0.0, 1.0, 17)[:, None, None]
    for alike in np.unique(size):
        rows = np.flatnonzero(size == alike)
        low, high, density = (a[..., rows] for a in windows)
        few = ratios.take(rows)
        if ratio is Ratios.upper:
            few = few.up_to(np.max(high, axis=0))
        probed = (low + shares * (high - low)).reshape(-1, rows.size)
        found[:, rows] = log_integral(
            functools.partial(_densities, ratio, few),
            (low, high, density),
            probed,
            np.zeros(rows.size),
            t[rows],
            rule._replace(quadrature=Quadrature(int(np.max(wanted[rows])), per_panel)),
        )
    return tuple(found)


def _densities(
    ratio: Callable[[Ratios, Array], Ratio], ratios: Ratios, w: Array
) -> tuple[Array, Array]:
    """Returns losses and weighted log-densities of Q at distances w, (..., n)."""
    loss, density = ratio(ratios, w.reshape(-1, w.shape[-1]))
    density = density + ratios.parts.log_weight[:, None]
    return loss.reshape(-1, *w.shape), density.reshape(-1, *w.shape)


def _upper_windows(t: Array, ratios: Ratios, direction: str) -> Windows:
    """Windows near the floor and, forward, from the first to the last peak."""
    floor, s, last = ratios.floor, ratios.parts.shift, ratios.last
    bottom, top = np.min(floor, axis=0), np.max(floor, axis=0)
    near = _HALF_WIDTH + np.maximum(top - bottom, 0.5 * _HALF_WIDTH)
    if direction == "backward":
        return _windows(t, ratios, near)
    alpha, size = 1 + t, min(_NUM_PEAKS, last)
    index = np.arange(1, size + 1)[:, None]
    grown = np.round(np.exp((index - 1) / max(size - 1, 1) * np.log(last + 0.0)))
    j = np.where(last > size, grown, np.minimum(index, last + 0.0))
    # A peak of N(j s) over N(0), and over N(-j s); and those in between: stationary
    # points of a component's exponent, from both ends.
    over = 2 * alpha - 1 if ratios.covers or ratios.replaced else alpha

    def slope(x: Array) -> tuple[Array, Array]:
        rise = np.stack([alpha * s * ratios.mean_at(row) for row in x])
        if ratios.replaced:
            rise += np.stack([(alpha - 1) * s * ratios.mean_at(-row) for row in x])
        return rise, np.zeros_like(x)

    zero, end = np.zeros_like(floor), (2 * alpha - 1) * ratios.parts.count * s
    settled = settle(slope, np.stack([zero, end]), zero, end)
    peaks = [alpha * j * s, over * j * s, np.max(settled, 1), np.min(settled, 1)]
    peaks = np.concatenate(peaks) - 0.5 * (top + bottom)
    base = 0.5 * near * np.linspace(0.0, 1.0, 5)[:, None]
    slack = np.minimum((alpha * s) ** 2 / 8, _BETWEEN)
    far = _counting(Ratios.upper, peaks, base, t, ratios, slack, 0.5 * (top - bottom))
    return _windows(t, ratios, near, far)


def _lower_windows(t: Array, ratios: Ratios, direction: str) -> Windows:
    """Windows near the floor and, backward, to where ``B^+`` no longer decreases."""
    floor, s = ratios.floor, ratios.parts.shift
    top = np.max(floor, axis=0)
    near = 2 * _HALF_WIDTH + top
    if direction == "forward":
        return _windows(t, ratios, near)

    # The last peak is at x = -t s E j, whose mean decreases with x.
    def slope(x: Array) -> Array:
        return -t * s * ratios.mean_at(x)

    peaks = floor - only_root(slope, -t * ratios.last * s + 0 * floor, 0 * floor)
    far = np.max(peaks, axis=0)
    points = np.concatenate([far * np.linspace(0.0, 1.0, _NUM_PROBES)[:, None], peaks])
    slack = np.minimum((far / _NUM_PROBES) ** 2 / 8, _BETWEEN)
    spread = top - np.min(floor, axis=0)
    far = _counting(Ratios.lower, points, points, -1 - t, ratios, slack, spread)
    return _windows(t, ratios, near, far)


def _counting(
    ratio: Callable[[Ratios, Array], Ratio],
    points: Array,
    others: Array,
    t: Array,
    ratios: Ratios,
    slack: Array,
    spread: Array,
) -> tuple[Array, Array]:
    """Returns ends around the (K, n) points where ``Q (P/Q)^{1+t}`` counts."""

    def largest(w: Array) -> Array:
        loss, density = _densities(ratio, ratios, np.maximum(w, 0.0))
        return np.max(density + (1 + t) * loss, axis=0)

    found, reach = largest(points), _HALF_WIDTH + spread
    top = np.maximum(np.max(found, axis=0), np.max(largest(others), axis=0))
    counts = found > top - _NEGLIGIBLE - slack
    low = np.min(np.where(counts, points, np.inf), axis=0) - reach
    high = np.max(np.where(counts, points, 0.0), axis=0) + reach
    return np.clip(low, 0.0, high), high


def _windows(
    t: Array, ratios: Ratios, near: Array, *others: tuple[Array, Array]
) -> Windows:
    """Returns both ends and panel densities: peaks may be narrower than N(0)."""
    s = ratios.parts.shift
    few = np.max(ratios.parts.count, axis=0)
    # Upper bound of the variance of j, below and between the floors.
    variance = np.minimum(0.25 * few, 1 / (s * s))
    sharp = _DENSITY * np.minimum(np.sqrt(1 + t * s * s * variance), _SHARPEST)
    is_mixed = np.any(ratios.parts.log_rest > LOG_ZERO, axis=0)
    sharp = np.where(is_mixed, sharp, _DENSITY)
    density = np.maximum(sharp, _SHIFT_DENSITY * s)
    low, high = map(np.stack, zip((np.zeros_like(t), near), *others, strict=True))
    return low, high, density + 0 * low


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


def _nodes(
    parts: Components, cover: Array, rule: NodeRule, *, replaced: bool
) -> LossNodes:
    """Computes `Nodes.nodes` of (C, n) components; their weights add up to <= 1."""
    # Two half-lines, or one and its mirror image. Zeros of sum_j b_j e^{j s x - j²
    # s²/2} lie where Im x is an odd multiple of pi / s (Laguerre). Mixtures of both
    # signs have lower ones, and paths stay below them.
    backward, log_cut, height = (a + 0 * cover for a in rule[:3])
    ratios = Ratios.of(parts, cover, replaced=replaced)
    s, floor = ratios.parts.shift, ratios.floor
    zero = np.zeros_like(s)
    kink, turn = ratios.turning_point()
    most = np.maximum(_ANGLE / s, _TOP)

    def points(end: Array, kink: Array) -> tuple[Array, Pair]:
        end = np.maximum(end, 2.0)
        # A number of nodes with the rule's density, for a line of any length.
        longer = np.max(end * np.maximum(s, 1.0)) / _USUAL_LENGTH
        number = int(rule.num_nodes * np.clip(longer, 1.0, _MOST_DENSE))
        line = half_line(zero, end, (kink,), zero + _EVEN, number)
        # Paths rise after the kink, or never if zeros are low.
        rise = np.where(_ANGLE / s < _TOP, NOWHERE, kink)
        (re, im), element = path_points(line, zero, rise, turn, height, most=most)
        return re + 1j * im, element

    reach, high = _ends(ratios, log_cut)
    ratios = ratios.up_to(np.max(high, axis=0))
    left = np.where(backward > 0, reach, np.minimum(reach, -FURTHEST_LEFT))
    above = points(high - np.min(floor, axis=0), kink)
    below = above
    if not replaced:
        below = points(left + np.max(floor, axis=0), zero)

    def one(
        above: tuple[Array, Pair], below: tuple[Array, Pair], cut: Array
    ) -> LossNodes:
        (w, element), upper = above, ratios.upper(above[0])
        ends = [ratios.upper(w[-1:].real)]
        # Losses y with P's density, and if replaced -y with Q's.
        pieces, sign = [(upper, element, backward)], 1 - 2 * backward
        if replaced:
            pieces, sign = [(upper, element, zero + k) for k in range(2)], 1.0
        else:
            w, (re, im) = below
            ends.append(ratios.lower(w[-1:].real))
            # The mirror image of the path, traversed backwards.
            pieces.append((ratios.lower(w.conj()), (re, -im), backward))
        log_weight = ratios.parts.log_weight[:, None]
        found = [_weighted(*piece, log_weight, cut) for piece in pieces]
        a, b, c, d = map(np.concatenate, zip(*found, strict=True))
        forward = 1.0 if replaced else 1 - backward
        loss, density = (np.hstack([end[i] for end in ends]) for i in range(2))
        density = np.maximum(density + forward * loss + log_weight, cut)
        loss, density = (x.reshape(-1, s.size) for x in (sign * loss, density))
        return collected((a, b), (c, d), density, loss)

    return map_first(one, above, below, log_cut)


def _ends(ratios: Ratios, log_cut: Array) -> tuple[Array, Array]:
    """Returns (V, n) points, left and right, where densities fall to the cuts."""
    parts, js = ratios.parts, ratios.numbers * ratios.parts.shift
    weight = parts.log_weight + parts.log_some + ratios.log_shares
    weight = weight + 0.5 * js * js

    def one(log_cut: Array) -> Array:
        above = weight - log_cut
        seen = js + np.sqrt(2 * np.maximum(above, 0.0))
        return np.max(np.where(above > 0, seen, 0.0), axis=(0, 1))

    reach = np.sqrt(-2 * log_cut)
    return reach, np.maximum(reach, map_first(one, log_cut))


def _weighted(
    ratio: Ratio, element: Pair, backward: Array, log_weight: Array, log_cut: Array
) -> list[Array]:
    """Returns (C K, n) parts of losses and weights on a path; 0 below the cut."""
    loss, density = ratio[0], ratio[1] + log_weight
    unwrapped = loss.real, np.unwrap(loss.imag, axis=1)
    pairs = weighted(unwrapped, (density.real, density.imag), element, backward)
    counts = density.real + (1 - backward) * loss.real > log_cut
    found = (np.where(counts, part, 0.0) for pair in pairs for part in pair)
    return [part.reshape(-1, part.shape[-1]) for part in found]


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
        u, e, parts = self._components(u, shape)
        factors = self.outer_rate, self.chance, self.shift, self._largest_count()
        factors = [np.broadcast_to(factor, shape) for factor in factors]
        found = []
        for half in parts.halves(e, replaced=self.is_symmetric):
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
        t, e, parts = self._components(t, np.broadcast_shapes(np.shape(t), self.shape))
        return _log_excess(t, parts, e, rule, replaced=self.is_symmetric)

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`."""
        e, parts = self._components(self.shift, self.shape)[1:]
        return _nodes(parts, e, rule, replaced=self.is_symmetric)

    def _components(
        self, u: Array, shape: tuple[int, ...]
    ) -> tuple[Array, Array, Components]:
        """Returns u and e, broadcast to a shape, and the components."""
        u, e, s = (np.broadcast_to(a, shape) for a in (u, self.cover_rate, self.shift))
        count, weight, log_rest = self._table(shape)
        some = ((log_rest < 0) | self.loses_nothing) & (count > 0)
        e, count = positive(e, 1.0), np.where(count > 0, count, 1.0)
        weight = np.where(some, weight - np.log(e), -np.inf)
        log_rest = np.minimum(log_rest, -SMALLEST)
        s = np.clip(np.where(s > 0, s, 1.0), self.SMALLEST_LOSS, self.LARGEST_LOSS)
        log_none = np.maximum(count * log_rest, LOG_ZERO)
        log_some = np.log(-np.expm1(log_none))
        return u, e, Components(count, weight, log_some, log_none, log_rest, s)

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
