"""Dominating pairs of a person who may be in several clip units of a step.

Reference: docs/proofs.md, "People in many units". The pair is a mixture over C
components (what the other units reveal). In each one the person's number of
contributions is J ~ Binomial(n, q), and ``B^±`` is the mixture of N(± J s).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np

from jaxdp_episodic.accountant.losses.excess import (
    LARGE_LOSS,
    LARGEST_EXPONENT,
    Windows,
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
    Pair,
    collected,
    half_line,
    path_points,
    weighted,
    whole_line,
)
from jaxdp_episodic.accountant.losses.mixture_halves import LOG_ZERO, PROFILE_ERROR
from jaxdp_episodic.accountant.losses.people_ratios import (
    NOWHERE,
    Components,
    Points,
    Ratio,
    Ratios,
)
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    MomentRule,
    Nodes,
    Tails,
)
from jaxdp_episodic.accountant.numerics.loops import Array, logsumexp, map_first
from jaxdp_episodic.accountant.numerics.power_excess import (
    scaled_power_excess,
    scaled_power_excess_derivatives,
)
from jaxdp_episodic.accountant.numerics.quadrature import integrate_panels, lay_panels

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
# Nats below the largest weight at which a search for the best order leaves components
# out (any order gives a bound). With fewer nodes per panel than this it is a search.
_NEGLIGIBLE_IN_SEARCH = 18.0
_NODES_OF_ANSWER = 12
# Share of an answer's nodes that the first search has. With more nodes per panel than
# this a search is the second one, with half of them.
_LEAST_SHARE = 0.3
_NODES_NEAR_ANSWER = 10
# Settings whose numbers of panels are within this ratio get the same number.
_ALIKE = 1.5
_MOST_PANELS = 4096  # largest number of panels
# Largest density of panels over that for a single Gaussian.
_SHARPEST = 6.0


def _log_excess(
    t: Array, parts: Components, cover: Array, rule: MomentRule, *, replaced: bool
) -> tuple[Array, ...]:
    """Computes `Moments.log_excess` of (C, n) components whose weights add up to e."""
    is_search = rule.quadrature.nodes_per_panel < _NODES_OF_ANSWER
    if is_search:
        parts = parts.above(np.max(parts.log_weight, axis=0) - _NEGLIGIBLE_IN_SEARCH)
    ratios = Ratios.of(parts, cover, replaced=replaced)
    # Excesses increase with the ratio and are summed over the components, so an upper
    # bound of negligible components suffices.
    ratios = dataclasses.replace(ratios, is_rough=True)
    direction = "symmetric" if replaced else rule.direction
    rule = rule._replace(direction=direction)
    windows = _upper_windows(t, ratios, direction)
    excess = _integrals(Ratios.upper, windows, t, ratios, rule)
    if not replaced:
        windows = _lower_windows(t, ratios, direction)
        below = ratios.up_to(np.zeros_like(t))
        below = _integrals(Ratios.lower, windows, t, below, rule)
        excess = sum_of(excess, below)
    # A component's profile is at most that of a shift by all its contributions.
    shift = parts.count * parts.shift * (2 if replaced else 1)
    weight = parts.log_weight + np.log(cover)
    return unless_gaussian(np.zeros_like(t) > 0, weight, 0.5 * shift * shift, t, excess)


def _integrals(
    ratio: Callable[[Ratios, Points], Ratio],
    windows: Windows,
    t: Array,
    ratios: Ratios,
    rule: MomentRule,
) -> tuple[Array, ...]:
    """Integrates over one half-line: the log-excess and its derivatives over it."""
    low, high, density = windows
    per_panel = rule.quadrature.nodes_per_panel
    length = np.sum(high - low, axis=0)
    # As many panels per peak as the rule has.
    wanted = np.max(density, axis=0) * length + np.sum(high > low, axis=0)
    share = rule.quadrature.num_panels * per_panel / 512
    least = _LEAST_SHARE if per_panel < _NODES_NEAR_ANSWER else 0.5
    wanted = np.clip(wanted * 16 / per_panel * max(share, least), 4, _MOST_PANELS)
    wanted = np.where(np.isnan(wanted), 4, wanted)  # without noise there is no moment
    # Settings with similar numbers of panels are integrated together.
    size = np.ceil(np.log(wanted) / np.log(_ALIKE))
    found = np.full((1 + 2 * rule.with_derivatives, t.size), np.nan)
    for alike in np.unique(size):
        rows = np.flatnonzero(size == alike)
        part, *some = (a[..., rows] for a in (t, *windows))
        few = ratios.take(rows)
        if ratio is Ratios.upper:
            few = few.up_to(np.max(some[1], axis=0))
        number = int(np.max(wanted[rows]))
        found[:, rows] = _integral(ratio, (*some,), part, few, rule, number)
    return tuple(found)


def _integral(
    ratio: Callable[[Ratios, Points], Ratio],
    windows: Windows,
    t: Array,
    ratios: Ratios,
    rule: MomentRule,
    number: int,
) -> tuple[Array, ...]:
    """Computes `_integrals` with a given number of panels for all settings."""
    low, high, density = windows
    per_panel = rule.quadrature.nodes_per_panel
    share = np.linspace(0.0, 1.0, 17)[:, None, None]
    y, b = _densities(ratio, (low + share * (high - low)).reshape(-1, t.size), ratios)
    direction = rule.direction
    exponents = [b + (1 + t) * y] * (direction != "backward")
    exponents += [b - t * y] * (direction != "forward")
    peak = np.max(np.stack(exponents), axis=(0, 1, 2))
    peak = np.maximum(peak - LARGEST_EXPONENT, 0.0)

    def integrand(w: Array) -> tuple[Array, ...]:
        y, b = _densities(ratio, w.reshape(-1, w.shape[-1]), ratios)
        if rule.with_derivatives:
            found = scaled_power_excess_derivatives(y, b - peak, t, direction)
        else:
            found = (scaled_power_excess(y, b - peak, t, direction),)
        return tuple(np.sum(part, axis=0).reshape(w.shape) for part in found)

    lefts, rights = lay_panels(low, high, density, np.zeros_like(t), num_panels=number)
    total, *derivatives = integrate_panels(
        integrand, lefts, rights, nodes_per_panel=per_panel
    )
    safe = np.maximum(total, 1e-300)
    return np.log(total) + peak, *(d / safe for d in derivatives)


def _upper_windows(t: Array, ratios: Ratios, direction: str) -> Windows:
    """Windows near the floor and, forward, from the first to the last peak."""
    floor, zero = ratios.floor, np.zeros_like(t)
    s, last = ratios.parts.shift, ratios.terms.last
    spread = np.max(floor, axis=0) - np.min(floor, axis=0)
    near = zero, zero + _HALF_WIDTH + np.maximum(spread, 0.5 * _HALF_WIDTH)
    if direction == "backward":
        return _windows(t, ratios, near)
    alpha, size = 1 + t, min(_NUM_PEAKS, last)
    index = np.arange(1, size + 1)[:, None]
    grown = np.round(np.exp((index - 1) / max(size - 1, 1) * np.log(last + 0.0)))
    j = np.where(last > size, grown, np.minimum(index, last + 0.0))
    # A peak of N(j s) over N(0), and over N(-j s); and those in between.
    tops = (
        (2 * alpha - 1) * j * s if ratios.covers or ratios.replaced else alpha * j * s
    )
    settled = _settled(alpha, ratios)
    peaks = np.concatenate(
        [alpha * j * s, tops, np.max(settled, 1), np.min(settled, 1)]
    )
    peaks = peaks - 0.5 * (np.max(floor, axis=0) + np.min(floor, axis=0))
    found = np.max(_exponent(Ratios.upper, peaks, t, ratios), axis=0)
    base = 0.5 * near[1] * np.linspace(0.0, 1.0, 5)[:, None]
    base = np.max(_exponent(Ratios.upper, base, t, ratios), axis=(0, 1))
    top = np.maximum(np.max(found, axis=0), base)
    counts = found > top - _NEGLIGIBLE - np.minimum((alpha * s) ** 2 / 8, _BETWEEN)
    reach = _HALF_WIDTH + 0.5 * spread
    low = np.min(np.where(counts, peaks, np.inf), axis=0) - reach
    high = np.max(np.where(counts, peaks, 0.0), axis=0) + reach
    low = np.clip(low, 0.0, high)
    return _windows(t, ratios, near, (low, high))


def _settled(alpha: Array, ratios: Ratios) -> Array:
    """Returns (2, C, n) stationary points of a component's exponent, from both ends."""
    s, zero = ratios.parts.shift, np.zeros_like(ratios.floor)
    top = (2 * alpha - 1) * ratios.parts.count * s

    def slope(x: Array) -> tuple[Array, Array]:
        rise = np.stack([alpha * s * ratios.mean_at(row) for row in x])
        if ratios.replaced:
            rise += np.stack([(alpha - 1) * s * ratios.mean_at(-row) for row in x])
        return rise, np.zeros_like(x)

    return settle(slope, np.stack([zero, top]), zero, top)


def _lower_windows(t: Array, ratios: Ratios, direction: str) -> Windows:
    """Windows near the floor and, backward, to where ``B^+`` no longer decreases."""
    floor, zero = ratios.floor, np.zeros_like(t)
    spread = np.max(floor, axis=0) - np.min(floor, axis=0)
    near = zero, zero + 2 * _HALF_WIDTH + np.max(floor, axis=0)
    if direction == "forward":
        return _windows(t, ratios, near)
    # The last peak is at x = -t s E j, whose mean decreases with x.
    s, last = ratios.parts.shift, ratios.terms.last

    def slope(x: Array) -> Array:
        return -t * s * ratios.mean_at(x)

    peaks = floor - only_root(slope, -t * last * s + 0 * floor, 0 * floor)
    far = np.max(peaks, axis=0)
    share = np.linspace(0.0, 1.0, _NUM_PROBES)[:, None]
    points = np.concatenate([far * share, peaks])
    found = np.max(_exponent(Ratios.lower, points, -1 - t, ratios), axis=0)
    gap = far / _NUM_PROBES
    slack = np.minimum(gap * gap / 8, _BETWEEN)
    counts = found > np.max(found, axis=0) - _NEGLIGIBLE - slack
    high = np.max(np.where(counts, points, 0.0), axis=0) + _HALF_WIDTH + spread
    low = np.min(np.where(counts, points, np.inf), axis=0) - _HALF_WIDTH - spread
    return _windows(t, ratios, near, (np.clip(low, 0.0, high), high))


def _exponent(
    ratio: Callable[[Ratios, Points], Ratio], w: Array, t: Array, ratios: Ratios
) -> Array:
    """Returns weighted ``log(Q (P/Q)^{1+t})`` at (K, n) distances; (C, K, n)."""
    loss, density = _densities(ratio, np.maximum(w, 0.0), ratios)
    return density + (1 + t) * loss


def _densities(
    ratio: Callable[[Ratios, Points], Ratio], w: Array, ratios: Ratios
) -> tuple[Array, Array]:
    """Returns losses and weighted log-densities of Q at (K, n) distances."""
    found = ratio(ratios, (w, None))
    return found.loss[0], found.log_density()[0] + ratios.parts.log_weight[:, None]


def _windows(t: Array, ratios: Ratios, *ends: tuple[Array, Array]) -> Windows:
    """Returns both ends and panel densities: peaks may be narrower than N(0)."""
    s = ratios.parts.shift
    few = np.max(ratios.parts.count, axis=0)
    # Upper bound of the variance of j, below and between the floors.
    variance = np.minimum(0.25 * few, 1 / (s * s))
    sharp = _DENSITY * np.minimum(np.sqrt(1 + t * s * s * variance), _SHARPEST)
    is_mixed = np.any(ratios.parts.log_rest > LOG_ZERO, axis=0)
    sharp = np.where(is_mixed, sharp, _DENSITY)
    density = np.maximum(sharp, _SHIFT_DENSITY * s)
    low, high = (np.stack(side) for side in zip(*ends, strict=True))
    return low, high, density + 0 * low


# Height of paths times the shift; zeros are at a height of pi.
_ANGLE = 1.2
# Height to which paths rise directly, in standard deviations.
_TOP = 1.8
# Length of a line, in standard deviations, for which the rule's number of nodes
# suffices; and the largest factor of that number on longer lines.
_USUAL_LENGTH = 30.0
_MOST_DENSE = 8.0
# Shift passed to `whole_line` and `half_line` for a constant spacing.
_EVEN = 1.0


class _Piece(NamedTuple):
    """An integrand on a path: ratios (C, K, n), and weighted dx (K, n)."""

    ratio: Ratio
    element: Pair
    angle: Array
    backward: Array


def _nodes(
    parts: Components, cover: Array, rule: NodeRule, *, replaced: bool
) -> LossNodes:
    """Computes `Nodes.nodes` of (C, n) components; their weights add up to <= 1."""
    # Zeros of sum_j b_j e^{j s x - j² s²/2} lie where Im x is an odd multiple of pi / s
    # (Laguerre). Mixtures of both signs have lower ones, and paths stay below them.
    backward, log_cut, height = (a + 0 * cover for a in rule[:3])
    rule = NodeRule(backward, log_cut, height, rule.num_nodes)
    parts = parts.above(np.min(rule.log_cut, axis=0))
    ratios = Ratios.of(parts, cover, replaced=replaced)
    is_whole = not ratios.covers and not replaced
    found = _whole(ratios, rule) if is_whole else _halves(ratios, rule)
    return _shortened(found)


def _whole(ratios: Ratios, rule: NodeRule) -> LossNodes:
    """Nodes of mixtures of Gaussians against N(0), on one path along the line."""
    s = ratios.parts.shift
    zero = np.zeros_like(s)
    reach, high = _ends(ratios, rule.log_cut)
    ratios = ratios.up_to(np.max(high, axis=0))
    low = np.where(rule.backward > 0, -reach, np.maximum(-reach, FURTHEST_LEFT))
    number = _enough(rule.num_nodes, high - low, s)
    line = whole_line(low, high, zero, zero + _EVEN, number)
    most = np.maximum(_ANGLE / s, _TOP)
    points = path_points(line, zero - np.inf, _rise(zero, s), s, rule.height, most=most)

    def one(x: Pair, element: Pair, log_cut: Array) -> LossNodes:
        # The imaginary loss at the first node, to which the multiple of 2 pi is chosen.
        angle = s * x[1][0] * ratios.mean_at(x[0][0] + zero)
        piece = _Piece(ratios.whole(x), element, angle, rule.backward)
        ends = np.stack([x[0][0], x[0][-1]])
        at_ends = ratios.whole((ends, np.zeros_like(ends)))
        return _gathered([piece], at_ends, ratios, log_cut)

    return map_first(one, *points, rule.log_cut)


def _halves(ratios: Ratios, rule: NodeRule) -> LossNodes:
    """Nodes of two half-lines, or of one and its mirror image."""
    s, floor, backward = ratios.parts.shift, ratios.floor, rule.backward
    zero = np.zeros_like(s)
    kink, turn = ratios.turning_point()
    most = np.maximum(_ANGLE / s, _TOP)

    def points(end: Array, kink: Array) -> tuple[Pair, Pair]:
        end = np.maximum(end, 2.0)
        number = _enough(rule.num_nodes, end, np.where(ratios.parts.is_hidden, turn, s))
        line = half_line(zero, end, (kink,), zero + _EVEN, number)
        return path_points(line, zero, _rise(kink, s), turn, rule.height, most=most)

    reach, high = _ends(ratios, rule.log_cut)
    ratios = ratios.up_to(np.max(high, axis=0))
    left = np.where(backward > 0, reach, np.minimum(reach, -FURTHEST_LEFT))
    above = points(high - np.min(floor, axis=0), kink)
    below = above
    if not ratios.replaced:
        below = points(left + np.max(floor, axis=0), zero)

    def one(
        above: tuple[Pair, Pair], below: tuple[Pair, Pair], cut: Array
    ) -> LossNodes:
        (w, element), nothing = above, np.zeros_like(floor)
        end = ratios.upper((w[0][-1:], np.zeros_like(w[0][:1])))
        upper = ratios.upper(w)
        if ratios.replaced:
            # Losses y with P's density, and -y with Q's.
            both = [_Piece(upper, element, nothing, zero + k) for k in range(2)]
            return _gathered(both, end, ratios, cut)
        w, (re, im) = below
        last = ratios.lower((w[0][-1:], np.zeros_like(w[0][:1])))
        ends = Ratio(
            *(
                (np.hstack([a, b]), np.hstack([angle, other]))
                for (a, angle), (b, other) in zip(end, last, strict=True)
                if angle is not None and other is not None
            )
        )
        # The mirror image of the path, traversed backwards.
        lower = ratios.lower((w[0], -w[1]))
        pieces = [
            _Piece(upper, element, nothing, backward),
            _Piece(lower, (re, -im), nothing, backward),
        ]
        return _gathered(pieces, ends, ratios, cut)

    return map_first(one, above, below, rule.log_cut)


def _ends(ratios: Ratios, log_cut: Array) -> tuple[Array, Array]:
    """Returns (V, n) points, left and right, where densities fall to the cuts."""
    parts, js = ratios.parts, ratios.terms.numbers * ratios.parts.shift
    weight = parts.log_weight + parts.log_some + ratios.terms.log_shares
    weight = weight + 0.5 * js * js

    def one(log_cut: Array) -> Array:
        above = weight - log_cut
        seen = js + np.sqrt(2 * np.maximum(above, 0.0))
        return np.max(np.where(above > 0, seen, 0.0), axis=(0, 1))

    reach = np.sqrt(-2 * log_cut)
    return reach, np.maximum(reach, map_first(one, log_cut))


def _enough(num_nodes: int, length: Array, s: Array) -> int:
    """Returns a number of nodes with the rule's density, for a line of any length."""
    longer = np.max(length * np.maximum(s, 1.0)) / _USUAL_LENGTH
    return int(num_nodes * np.clip(longer, 1.0, _MOST_DENSE))


def _rise(kink: Array, s: Array) -> Array:
    """Returns where paths may rise: after the kink, or never if zeros are low."""
    return np.where(_ANGLE / s < _TOP, NOWHERE, kink)


def _gathered(
    pieces: list[_Piece], ends: Ratio, ratios: Ratios, log_cut: Array
) -> LossNodes:
    """Returns the nodes of all components, (K, n); those without weight come last."""
    log_weight = ratios.parts.log_weight
    losses, weights = [], []
    for piece in pieces:
        loss, weight = _weighted(piece, log_weight, log_cut)
        losses.append(loss)
        weights.append(weight)
    loss, weight = (
        (np.concatenate(list(map(_flat, re))), np.concatenate(list(map(_flat, im))))
        for re, im in (zip(*losses, strict=True), zip(*weights, strict=True))
    )
    sign, forward = 1 - 2 * pieces[-1].backward, 1 - pieces[-1].backward
    if ratios.replaced:
        sign, forward = 1.0, 1.0
    density = ends.log_density()[0] + forward * ends.loss[0] + log_weight[:, None]
    density = np.maximum(density, log_cut)
    return collected(loss, weight, _flat(density), _flat(sign * ends.loss[0]))


def _weighted(piece: _Piece, log_weight: Array, log_cut: Array) -> tuple[Pair, Pair]:
    """Returns losses and weights of a piece, (C, K, n); 0 below the cut."""
    re, im = piece.ratio.loss
    assert im is not None  # paths lie in the plane
    im = np.unwrap(im, axis=1)
    turns = np.round((piece.angle[:, None] - im[:, :1]) / (2 * math.pi))
    im = im + 2 * math.pi * turns
    size, angle = piece.ratio.log_density()
    size = size + log_weight[:, None]
    found = weighted((re, im), (size, angle), piece.element, piece.backward)
    counts = size + (1 - piece.backward) * re > log_cut
    a, b, c, d = (np.where(counts, part, 0.0) for pair in found for part in pair)
    return (a, b), (c, d)


def _flat(a: Array) -> Array:
    """Reshapes (C, K, n) to (C K, n)."""
    return a.reshape(-1, a.shape[-1])


def _shortened(nodes: LossNodes) -> LossNodes:
    """Drops rows of (V, K, n) nodes that have no weight in any setting."""
    used = (nodes.weight[0] != 0) | (nodes.weight[1] != 0)
    number = int(np.max(np.sum(used, axis=1), initial=1))
    order = np.argsort(~used, axis=1, kind="stable")[:, :number]

    def taken(pair: Pair) -> Pair:
        re, im = (np.take_along_axis(part, order, axis=1) for part in pair)
        return re, im

    return nodes._replace(loss=taken(nodes.loss), weight=taken(nodes.weight))


# Components are left out up to this share of delta, which is then added to delta.
_TRUNCATED_SHARE = 1e-9
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
        rate, mean, most = np.zeros(()), np.zeros(()), np.zeros(())
        for n, log_weight, log_rest in self._parts():
            weight, expected = np.exp(log_weight), -n * np.expm1(log_rest)
            some = -np.expm1(n * log_rest)
            rate, mean = rate + weight * some, mean + weight * expected
            draws = np.minimum(n, expected + 8 * np.sqrt(expected) + 3)
            most = np.maximum(most, np.where(weight > 0, draws, 0.0))
        rate = np.minimum(rate, 1.0)
        number = np.maximum(mean / np.maximum(rate, 1e-300), 1.0)
        return Hints(rate, rate, self.shift * number, self.shift * most)

    def largest_loss(self, *, backward: bool) -> Array:
        """See `PrivacyLoss`: backward log of ``(1-e) + e / b_0``, b_0 = P(J = 0)."""
        if not backward or self.is_symmetric:
            return super().largest_loss(backward=backward)
        rest, e = np.zeros(()), self.cover_rate
        for n, weight, log_rest in self._parts():
            rest = np.maximum(rest, np.where(weight > -np.inf, -n * log_rest, 0.0))
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

    def truncated(
        self, log_goal: np.ndarray, count: np.ndarray
    ) -> tuple[Self, np.ndarray, np.ndarray]:
        """See `Nodes`: leaves out components that add 1e-9 of the goal at most."""
        shape = np.broadcast_shapes(self.shape, np.shape(log_goal), np.shape(count))
        weights = self.stacked(self.log_weights, shape)
        with np.errstate(divide="ignore"):
            log_count = np.log(count)
        least = log_goal + np.log(_TRUNCATED_SHARE) - log_count
        order = np.argsort(weights, axis=0)
        lost = np.logaddexp.accumulate(np.take_along_axis(weights, order, axis=0))
        gone = lost <= least
        log_added = log_count + np.max(np.where(gone, lost, -np.inf), axis=0)
        left_out = np.zeros(weights.shape, bool)
        np.put_along_axis(left_out, order, gone, axis=0)
        weights = np.where(left_out, -np.inf, weights)
        kept = dataclasses.replace(self, log_weights=tuple(weights))
        return kept, log_added, np.zeros(shape, bool)

    def nodes(self, rule: NodeRule) -> LossNodes:
        """See `Nodes`."""
        e, parts = self._components(self.shift, self.shape)[1:]
        return _nodes(parts, e, rule, replaced=self.is_symmetric)

    def _components(
        self, u: Array, shape: tuple[int, ...]
    ) -> tuple[Array, Array, Components]:
        """Returns u and e, broadcast to a shape, and the components."""
        u, e, s = (np.broadcast_to(a, shape) for a in (u, self.cover_rate, self.shift))
        count, weight, log_rest = (
            self.stacked(columns, shape) for columns in zip(*self._parts(), strict=True)
        )
        some = (log_rest < 0) | self.loses_nothing
        weight, e = np.where(some, weight, -np.inf), positive(e, 1.0)
        log_rest = np.minimum(log_rest, -SMALLEST)
        s = np.clip(np.where(s > 0, s, 1.0), self.SMALLEST_LOSS, self.LARGEST_LOSS)
        return u, e, Components.of(count, weight - np.log(e), log_rest, s)

    def _largest_count(self) -> Array:
        largest = np.zeros(())
        for n, weight, log_rest in self._parts():
            is_there = (weight > -np.inf) & (log_rest < 0)
            largest = np.maximum(largest, np.where(is_there, n, 0.0))
        return largest

    def _parts(self) -> Iterator[tuple[Array, Array, Array]]:
        """Iterates over the count, log-weight and finite log(1 - q) of components."""
        parts = zip(self.counts, self.log_weights, self.log_rests, strict=True)
        for count, log_weight, log_rest in parts:
            yield count, log_weight, np.maximum(log_rest, LOG_ZERO)


@dataclass(frozen=True)
class ReplacedPeopleLoss(PeopleLoss):
    """Contributions of a person that are replaced by other ones; symmetric."""

    is_symmetric: ClassVar[bool] = True


@dataclass(frozen=True)
class ReplacedUnitLoss(ReplacedPeopleLoss):
    """Replaced contributions of a unit that is itself sampled, unseen, at a rate."""

    unit_rate: Array  # sampling probability of the unit
    is_symmetric: ClassVar[bool] = True

    def hints(self) -> Hints:
        """See `PrivacyLoss`: of a sampled unit."""
        drawn = super().hints()
        rate = drawn.rate * self.unit_rate
        return drawn._replace(rate=rate, odds=rate)

    def _components(
        self, u: Array, shape: tuple[int, ...]
    ) -> tuple[Array, Array, Components]:
        u, e, parts = super()._components(u, shape)
        rate = positive(np.broadcast_to(self.unit_rate, shape), 1.0)
        return u, e, parts.sampled_together(rate)
