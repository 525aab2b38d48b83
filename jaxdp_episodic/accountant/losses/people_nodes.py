"""Loss distributions of a person's visible components, as nodes on common paths."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.integration_paths import (
    Pair,
    half_line,
    path_points,
    whole_line,
)
from jaxdp_episodic.accountant.losses.loss_nodes import (
    FURTHEST_LEFT,
    LossNodes,
    NodeRule,
    collected,
)
from jaxdp_episodic.accountant.losses.people_components import Components
from jaxdp_episodic.accountant.losses.people_ratios import NOWHERE, Ratio, Ratios
from jaxdp_episodic.accountant.numerics.complex_exponentials import polar, times
from jaxdp_episodic.accountant.numerics.loops import Array, map_first

# Height of paths times the shift, where zeros are pi away.
_ANGLE = 1.2
# Height up to which paths rise at once, in standard deviations.
_TOP = 1.8
# Length of a line for which the rule's nodes are enough, in deviations, where zeros are
# pi away; and by how much there are more of them at most.
_USUAL_LENGTH = 30.0
_MOST_DENSE = 8.0
# Shift for which nodes are not closer anywhere; see `paths`.
_EVEN = 1.0


class _Piece(NamedTuple):
    """What is integrated along a path: ratios (C, K, n), and weighted dx (K, n)."""

    ratio: Ratio
    element: Pair
    angle: Array
    backward: Array


def nodes(
    parts: Components, cover: Array, rule: NodeRule, *, replaced: bool
) -> LossNodes:
    """See `Nodes.nodes`; of (C, n) components whose weights add up to 1 at most."""
    # Zeros of sum_j b_j e^{j s x - j² s²/2} lie where Im x is an odd multiple of pi / s
    # (Laguerre); mixtures of both signs have lower ones, and paths stay below.
    backward, log_cut, height = (a + 0 * cover for a in rule[:3])
    rule = NodeRule(backward, log_cut, height, rule.num_nodes)
    parts = parts.above(np.min(rule.log_cut, axis=0))
    ratios = Ratios.of(parts, cover, replaced=replaced)
    is_whole = not ratios.covers and not replaced
    found = _whole(ratios, rule) if is_whole else _halves(ratios, rule)
    return _shortened(found)


def _whole(ratios: Ratios, rule: NodeRule) -> LossNodes:
    """Of mixtures of Gaussians against N(0), on one path along the line."""
    s = ratios.parts.shift
    zero = np.zeros_like(s)
    reach, high = _ends(ratios, rule.log_cut)
    ratios = ratios.up_to(np.max(high, axis=0))
    low = np.where(rule.backward > 0, -reach, np.maximum(-reach, FURTHEST_LEFT))
    number = _enough(rule.num_nodes, high - low, s)
    line = map_first(
        lambda a, b: whole_line(a, b, zero, zero + _EVEN, number), low, high
    )
    most = np.maximum(_ANGLE / s, _TOP)
    points = path_points(line, zero - np.inf, _rise(zero, s), s, rule.height, most=most)

    def one(x: Pair, element: Pair, log_cut: Array) -> LossNodes:
        # The angle at the first node, of which only the rest of 2 pi is known.
        angle = s * x[1][0] * ratios.mean_at(x[0][0] + zero)
        piece = _Piece(ratios.whole(x), element, angle, rule.backward)
        ends = np.stack([x[0][0], x[0][-1]])
        at_ends = ratios.whole((ends, np.zeros_like(ends)))
        return _gathered([piece], at_ends, ratios, log_cut)

    return map_first(one, *points, rule.log_cut)


def _halves(ratios: Ratios, rule: NodeRule) -> LossNodes:
    """Of two half-lines, or of one and its mirror image."""
    s, floor, backward = ratios.parts.shift, ratios.floor, rule.backward
    zero = np.zeros_like(s)
    kink, turn = ratios.turning_point()
    most = np.maximum(_ANGLE / s, _TOP)

    def points(end: Array, kink: Array) -> tuple[Pair, Pair]:
        end = np.maximum(end, 2.0)
        number = _enough(rule.num_nodes, end, np.where(ratios.parts.is_hidden, turn, s))
        line = map_first(
            lambda end: half_line(zero, end, (kink,), zero + _EVEN, number), end
        )
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
        # The mirror image of the path, which is run through backwards.
        lower = ratios.lower((w[0], -w[1]))
        pieces = [
            _Piece(upper, element, nothing, backward),
            _Piece(lower, (re, -im), nothing, backward),
        ]
        return _gathered(pieces, ends, ratios, cut)

    return map_first(one, above, below, rule.log_cut)


def _ends(ratios: Ratios, log_cut: Array) -> tuple[Array, Array]:
    """Where the densities at both sides have fallen to the cuts, (V, n)."""
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
    """A number of nodes as dense as the rule's own on a line of the usual length."""
    longer = np.max(length * np.maximum(s, 1.0)) / _USUAL_LENGTH
    return int(num_nodes * np.clip(longer, 1.0, _MOST_DENSE))


def _rise(kink: Array, s: Array) -> Array:
    """Where paths may rise: behind the kink, unless zeros are low everywhere."""
    return np.where(_ANGLE / s < _TOP, NOWHERE, kink)


def _gathered(
    pieces: list[_Piece], ends: Ratio, ratios: Ratios, log_cut: Array
) -> LossNodes:
    """The nodes of all components, (K, n); those of no weight come last."""
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
    """Losses and weights of a piece, (C, K, n); none below the cut."""
    (re, im), element = piece.ratio.loss, piece.element
    assert im is not None  # paths lie in the plane
    im = np.unwrap(im, axis=1)
    turns = np.round((piece.angle[:, None] - im[:, :1]) / (2 * math.pi))
    im = im + 2 * math.pi * turns
    sign, forward = 1 - 2 * piece.backward, 1 - piece.backward
    density, angle = piece.ratio.log_density()
    density = density + log_weight[:, None] + forward * re
    weight = times(
        polar(density, sign * angle + forward * im), (element[0], sign * element[1])
    )
    counts = density > log_cut
    loss = np.where(counts, sign * re, 0.0), np.where(counts, im, 0.0)
    return loss, (np.where(counts, weight[0], 0.0), np.where(counts, weight[1], 0.0))


def _flat(a: Array) -> Array:
    """(C, K, n) to (C K, n)."""
    return a.reshape(-1, a.shape[-1])


def _shortened(nodes: LossNodes) -> LossNodes:
    """The (V, K, n) nodes that have a weight, as many as the most of a setting."""
    used = (nodes.weight[0] != 0) | (nodes.weight[1] != 0)
    number = int(np.max(np.sum(used, axis=1), initial=1))
    order = np.argsort(~used, axis=1, kind="stable")[:, :number]

    def taken(pair: Pair) -> Pair:
        re, im = (np.take_along_axis(part, order, axis=1) for part in pair)
        return re, im

    return nodes._replace(loss=taken(nodes.loss), weight=taken(nodes.weight))
