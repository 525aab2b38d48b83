"""Gauss–Legendre quadrature on panels placed where an integrand needs them."""

# Settings are the *last* axis: XLA on the CPU vectorizes along that axis only.

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    at,
    computed_once,
    fori_loop,
    namespace,
)

# Half the number of real multiplications from which BLAS uses several threads. These
# then busy-wait on cores that other work needs.
_SINGLE_THREADED = 2**17
_SINGLE_THREADED_COMPLEX = 2**15  # the same for complex multiplications
# Least number of rows of a block: with fewer, products take several times as long.
_LEAST_ROWS = 8
# More panels than these are laid only if windows ask for them.
_MANY_PANELS = 128
_ENOUGH = 2.0  # panels that are then laid for each that windows ask for


@functools.cache
def gauss_legendre(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the Gauss–Legendre rule on [0, 1], each (num_nodes,)."""
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    return (nodes + 1) / 2, weights / 2


def integrate_panels(
    integrand: Callable[[Array], tuple[Array, ...]],
    lefts: Array,
    rights: Array,
    *,
    nodes_per_panel: int,
) -> tuple[Array, ...]:
    """Integrals over all panels of each setting, one for each returned function."""
    xp, (nodes, weights) = namespace(lefts, rights), gauss_legendre(nodes_per_panel)
    width = rights - lefts
    if xp is np:
        # All nodes at once: few calls of NumPy.
        values = integrand(lefts + width * nodes[:, None, None])
        weights = weights[:, None, None] * width
        return tuple(np.sum(weights * value, axis=(0, 1)) for value in values)

    # One node after another, of all panels at once: arrays that fit the cache.
    import jax

    def add_node(k: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        node, weight = at(xp.stack([nodes, weights], axis=1), k)
        pairs = zip(totals, integrand(lefts + width * node), strict=True)
        return tuple(total + weight * value for total, value in pairs)

    start = jax.tree.map(xp.zeros_like, jax.eval_shape(integrand, lefts))
    totals = fori_loop(xp, 0, nodes_per_panel, add_node, start)
    return tuple(xp.sum(width * total, axis=0) for total in totals)


def lay_panels(
    low: Array, high: Array, density: Array, floor: Array, *, num_panels: int
) -> tuple[Array, Array]:
    """Left and right edges of panels that cover the union of windows."""
    # There are no panels between windows: the integrand must be negligible there.
    xp = namespace(low, high, density, floor)
    low, high = xp.maximum(low, floor), xp.maximum(high, floor)
    if xp is np:  # windows within the first one that ask for no more panels
        more = (density > density[:1]) | (low < low[:1]) | (high > high[:1])
        used = np.append(True, np.any(more & (high > low), axis=1)[1:])
        low, high, density = low[used], high[used], density[used]
    ends = xp.sort(xp.concatenate([low, high]), axis=0)
    ends, low, high, density = computed_once(xp, (ends, low, high, density))
    left, length = ends[:-1], xp.diff(ends, axis=0)
    middle = left + 0.5 * length
    inside = (middle > low[:, None]) & (middle < high[:, None])
    panels_per_unit = xp.max(xp.where(inside, density[:, None], 0.0), axis=0)
    share = panels_per_unit * length
    # Those of adjoining segments are scaled to add up to an integer.
    is_gap = (share <= 0) & (length > 0)
    run = np.tri(len(share)) @ is_gap.astype(share.dtype)
    run_share = xp.sum(xp.where(run == run[:, None], share[:, None], 0.0), axis=0)
    total = xp.sum(share, axis=0)
    gaps = xp.sum(is_gap, axis=0, dtype=share.dtype)
    if xp is np and num_panels > _MANY_PANELS:
        enough = np.max(_ENOUGH * total + gaps, initial=0, where=np.isfinite(total))
        num_panels = min(num_panels, max(_MANY_PANELS, int(enough) + 2))
    spare = num_panels - 1 - gaps
    safe_run = xp.where(run_share > 0, run_share, 1.0)
    safe_total = xp.where(total > 0, total, 1.0)
    whole = xp.ceil(run_share * (spare / safe_total) * (1 - 1e-12))
    edges = _edges(left, length, share * (whole / safe_run), num_panels)
    return computed_once(xp, edges)


def _edges(
    left: Array, length: Array, share: Array, num_panels: int
) -> tuple[Array, Array]:
    """Left and right edges of the panels: where the cumulated share is an integer."""
    # A left edge differs from the right edge before it only at a gap.
    xp = namespace(left, length, share)
    after = np.tri(len(share)) @ share
    before = after - share
    right, has_some = left + length, share > 0
    panel = length / xp.where(has_some, share, 1.0)
    slack = 1e-9  # cumulated shares are integers at a gap only up to rounding
    begins = xp.where(has_some, before - slack, xp.inf)[:, None]
    ends = xp.where(has_some, after + slack, -xp.inf)[:, None]
    target = np.arange(num_panels + 1, dtype=np.float64)[:, None]
    # (segments, edges, n)
    position = left[:, None] + (target - before[:, None]) * panel[:, None]
    position = xp.clip(position, left[:, None], right[:, None])
    lefts = xp.where(begins <= target[:-1], position[:, :-1], -xp.inf)
    rights = xp.where(ends >= target[1:], position[:, 1:], xp.inf)
    lefts, rights = xp.max(lefts, axis=0), xp.min(rights, axis=0)
    # Panels beyond the last one are empty, but their nodes must be finite.
    return lefts, xp.where(xp.isfinite(rights), rights, lefts)


def in_blocks(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """``rows @ matrix``, (..., R, N) and (..., N, M), on a single thread."""
    number, (length, width) = rows.shape[-2], matrix.shape[-2:]
    products = _SINGLE_THREADED_COMPLEX if np.iscomplexobj(rows) else _SINGLE_THREADED
    most = products // length
    if number * width <= most:
        return rows @ matrix
    wide = min(width, max(most // _LEAST_ROWS, 1))
    each = max(most // wide, 1)
    result = np.empty((*rows.shape[:-1], width), np.result_type(rows, matrix))
    for i in range(0, number, each):
        part = rows[..., i : i + each, :]
        for j in range(0, width, wide):
            result[..., i : i + each, j : j + wide] = part @ matrix[..., j : j + wide]
    return result
