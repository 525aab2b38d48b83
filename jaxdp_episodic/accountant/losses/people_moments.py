"""Moments of a person's privacy loss: one quadrature for all visible components."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxdp_episodic.accountant.losses.excess import (
    LARGEST_EXPONENT,
    sum_of,
    unless_gaussian,
)
from jaxdp_episodic.accountant.losses.people_components import Components
from jaxdp_episodic.accountant.losses.people_products import Points
from jaxdp_episodic.accountant.losses.people_ratios import Ratio, Ratios
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.losses.windows import Windows, only_root, settle
from jaxdp_episodic.accountant.numerics.loops import Array
from jaxdp_episodic.accountant.numerics.power_excess import (
    scaled_power_excess,
    scaled_power_excess_derivatives,
)
from jaxdp_episodic.accountant.numerics.quadrature import integrate_panels, lay_panels

# Half-width of the window around a bump, in standard deviations.
_HALF_WIDTH = 9.2
# Panels per standard deviation, and per 1 / shift, where zeros are pi away.
_DENSITY = 0.25
_SHIFT_DENSITY = 0.4
# Numbers of contributions around whose bumps there are windows.
_NUM_BUMPS = 64
# Points that show where there is weight below the floor.
_NUM_PROBES = 48
# Nats below the largest density at which there is none, and those by which a density
# may be larger between two points than at both.
_NEGLIGIBLE = 42.0
_BETWEEN = 40.0
# Nats below the largest weight at which components are left out of a search for the
# best order, and fewest nodes per panel of what is no search: any order is a bound.
_NEGLIGIBLE_IN_SEARCH = 18.0
_NODES_OF_ANSWER = 12
# Share of an answer's nodes that a first search has, and fewest nodes per panel of a
# second one, which has half of them.
_LEAST_SHARE = 0.3
_NODES_NEAR_ANSWER = 10
# Ratio of the panels that settings want within which they get the same number.
_ALIKE = 1.5
# Largest number of panels.
_MOST_PANELS = 4096
# Largest density of panels over that of a Gaussian's bump.
_SHARPEST = 6.0


def log_excess(
    t: Array, parts: Components, cover: Array, rule: MomentRule, *, replaced: bool
) -> tuple[Array, ...]:
    """See `Moments.log_excess`; of (C, n) components whose weights add up to e."""
    is_search = rule.quadrature.nodes_per_panel < _NODES_OF_ANSWER
    if is_search:
        parts = parts.above(np.max(parts.log_weight, axis=0) - _NEGLIGIBLE_IN_SEARCH)
    ratios = Ratios.of(parts, cover, replaced=replaced)
    # Excesses grow with the ratio, and are summed over components.
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
    # A component's profile is at most that of a shift of all its contributions.
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
    """Logarithms of the excess of one half-line, and its derivatives over it."""
    low, high, density = windows
    per_panel = rule.quadrature.nodes_per_panel
    length = np.sum(high - low, axis=0)
    # As dense as the rule's own panels are on bumps.
    wanted = np.max(density, axis=0) * length + np.sum(high > low, axis=0)
    share = rule.quadrature.num_panels * per_panel / 512
    least = _LEAST_SHARE if per_panel < _NODES_NEAR_ANSWER else 0.5
    wanted = np.clip(wanted * 16 / per_panel * max(share, least), 4, _MOST_PANELS)
    wanted = np.where(np.isnan(wanted), 4, wanted)  # without noise, which has no moment
    # Settings that want about as many panels are integrated together.
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
    """The same of settings with a number of panels."""
    low, high, density = windows
    per_panel = rule.quadrature.nodes_per_panel
    weight = ratios.parts.log_weight[:, None]

    def densities(w: Array) -> tuple[Array, Array]:
        """Losses and weighted log-densities at (K, n) distances."""
        found = ratio(ratios, (w, None))
        return found.loss[0], found.log_density()[0] + weight

    share = np.linspace(0.0, 1.0, 17)[:, None, None]
    y, b = densities((low + share * (high - low)).reshape(-1, t.shape[-1]))
    direction = rule.direction
    exponents = [b + (1 + t) * y] * (direction != "backward")
    exponents += [b - t * y] * (direction != "forward")
    peak = np.max(np.stack(exponents), axis=(0, 1, 2))
    peak = np.maximum(peak - LARGEST_EXPONENT, 0.0)

    def integrand(w: Array) -> tuple[Array, ...]:
        y, b = densities(w.reshape(-1, w.shape[-1]))
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
    """Near the floor, and forward from the first to the last bump that counts."""
    floor, zero = ratios.floor, np.zeros_like(t)
    s, last = ratios.parts.shift, ratios.terms.last
    spread = np.max(floor, axis=0) - np.min(floor, axis=0)
    near = zero, zero + _HALF_WIDTH + np.maximum(spread, 0.5 * _HALF_WIDTH)
    if direction == "backward":
        return _windows(t, ratios, near)
    alpha, size = 1 + t, min(_NUM_BUMPS, last)
    index = np.arange(1, size + 1)[:, None]
    grown = np.round(np.exp((index - 1) / max(size - 1, 1) * np.log(last + 0.0)))
    j = np.where(last > size, grown, np.minimum(index, last + 0.0))
    # A bump of N(j s) over N(0), and over N(-j s); and those in between.
    tops = (
        (2 * alpha - 1) * j * s if ratios.covers or ratios.replaced else alpha * j * s
    )
    settled = _settled(alpha, ratios)
    bumps = np.concatenate(
        [alpha * j * s, tops, np.max(settled, 1), np.min(settled, 1)]
    )
    bumps = bumps - 0.5 * (np.max(floor, axis=0) + np.min(floor, axis=0))
    found = np.max(_exponent(Ratios.upper, bumps, t, ratios), axis=0)
    base = 0.5 * near[1] * np.linspace(0.0, 1.0, 5)[:, None]
    base = np.max(_exponent(Ratios.upper, base, t, ratios), axis=(0, 1))
    top = np.maximum(np.max(found, axis=0), base)
    counts = found > top - _NEGLIGIBLE - np.minimum((alpha * s) ** 2 / 8, _BETWEEN)
    reach = _HALF_WIDTH + 0.5 * spread
    low = np.min(np.where(counts, bumps, np.inf), axis=0) - reach
    high = np.max(np.where(counts, bumps, 0.0), axis=0) + reach
    low = np.clip(low, 0.0, high)
    return _windows(t, ratios, near, (low, high))


def _settled(alpha: Array, ratios: Ratios) -> Array:
    """(2, C, n) where the exponent of a component is stationary, from both ends."""
    s, zero = ratios.parts.shift, np.zeros_like(ratios.floor)
    top = (2 * alpha - 1) * ratios.parts.count * s

    def slope(x: Array) -> tuple[Array, Array]:
        rise = np.stack([alpha * s * ratios.mean_at(row) for row in x])
        if ratios.replaced:
            rise += np.stack([(alpha - 1) * s * ratios.mean_at(-row) for row in x])
        return rise, np.zeros_like(x)

    return settle(slope, np.stack([zero, top]), zero, top)


def _lower_windows(t: Array, ratios: Ratios, direction: str) -> Windows:
    """Near the floor, and backward on to where ``B^+`` falls no more."""
    floor, zero = ratios.floor, np.zeros_like(t)
    spread = np.max(floor, axis=0) - np.min(floor, axis=0)
    near = zero, zero + 2 * _HALF_WIDTH + np.max(floor, axis=0)
    if direction == "forward":
        return _windows(t, ratios, near)
    # The last bump is at x = -t s E j, whose mean falls with x.
    s, last = ratios.parts.shift, ratios.terms.last

    def slope(x: Array) -> Array:
        return -t * s * ratios.mean_at(x)

    bumps = floor - only_root(slope, -t * last * s + 0 * floor, 0 * floor)
    far = np.max(bumps, axis=0)
    share = np.linspace(0.0, 1.0, _NUM_PROBES)[:, None]
    points = np.concatenate([far * share, bumps])
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
    """``log(Q (P/Q)^{1+t})``, weighted, at (K, n) distances; (C, K, n)."""
    found = ratio(ratios, (np.maximum(w, 0.0), None))
    weight = ratios.parts.log_weight[:, None]
    return found.log_density()[0] + (1 + t) * found.loss[0] + weight


def _windows(t: Array, ratios: Ratios, *ends: tuple[Array, Array]) -> Windows:
    """Low and high ends, and densities of panels: bumps may be sharper than N(0)."""
    s = ratios.parts.shift
    few = np.max(ratios.parts.count, axis=0)
    # Variance of j at most, below and among the floors.
    variance = np.minimum(0.25 * few, 1 / (s * s))
    sharp = _DENSITY * np.minimum(np.sqrt(1 + t * s * s * variance), _SHARPEST)
    sharp = np.where(np.any(ratios.parts.rate < 1, axis=0), sharp, _DENSITY)
    density = np.maximum(sharp, _SHIFT_DENSITY * s)
    low, high = (np.stack(side) for side in zip(*ends, strict=True))
    return low, high, density + 0 * low
