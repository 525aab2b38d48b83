"""Moments of a person's privacy loss: one quadrature for all visible components.

The excess (`losses.excess`) of each component is an integral over the two half-lines of
`people_ratios`. Components share the nodes, as distances from their own floors; windows
lie around the bumps of all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxdp_episodic.accountant.losses.excess import (
    LARGEST_EXPONENT,
    sum_of,
    unless_gaussian,
)
from jaxdp_episodic.accountant.losses.people_components import Components
from jaxdp_episodic.accountant.losses.people_ratios import Ratio, Ratios
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.losses.windows import Windows, only_root, settle
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    namespace,
    stop_gradient,
)
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
# Panels in JAX, whose number is fixed, over those of the rule.
_PANELS = 3
# Largest number of panels.
_MOST_PANELS = 4096
# Largest density of panels over that of a Gaussian's bump.
_SHARPEST = 6.0


def log_excess(
    t: Array, parts: Components, cover: Array, rule: MomentRule, *, replaced: bool
) -> tuple[Array, ...]:
    """See `Moments.log_excess`; of (C, n) components whose weights add up to e."""
    is_search = rule.quadrature.nodes_per_panel < _NODES_OF_ANSWER
    if is_search and namespace(t, cover) is np:
        parts = parts.above(np.max(parts.log_weight, axis=0) - _NEGLIGIBLE_IN_SEARCH)
    ratios = Ratios.of(parts, cover, replaced=replaced)
    direction = "symmetric" if replaced else rule.direction
    rule = rule._replace(direction=direction)
    windows = _upper_windows(t, ratios, direction)
    few = ratios.up_to(namespace(t).max(windows[1], axis=0))
    excess = _integral(few.upper, windows, t, few, rule)
    if not replaced:
        windows = _lower_windows(t, ratios, direction)
        few = ratios.up_to(namespace(t).zeros_like(t))
        below = _integral(few.lower, windows, t, few, rule)
        excess = sum_of(excess, below)
    xp = namespace(t, cover)
    # A component's profile is at most that of a shift of all its contributions.
    shift = parts.count * parts.shift * (2 if replaced else 1)
    weight = parts.log_weight + xp.log(cover)
    return unless_gaussian(xp.zeros_like(t) > 0, weight, 0.5 * shift * shift, t, excess)


def _integral(
    ratio: Callable[..., Ratio],
    windows: Windows,
    t: Array,
    ratios: Ratios,
    rule: MomentRule,
) -> tuple[Array, ...]:
    """Logarithm of the excess of one half-line, and its derivatives over it."""
    xp = namespace(t, *windows)
    windows = stop_gradient(xp, windows)
    low, high, density = windows
    number, per_panel = (
        rule.quadrature.num_panels * _PANELS,
        rule.quadrature.nodes_per_panel,
    )
    if xp is np:
        length = np.sum(high - low, axis=0)
        # As dense as the rule's own panels are on bumps.
        wanted = np.max(np.max(density, axis=0) * length) + np.max(
            np.sum(high > low, 0)
        )
        share = rule.quadrature.num_panels * per_panel / 512
        number = int(
            np.clip(wanted * 16 / per_panel * max(share, 0.5), 4, _MOST_PANELS)
        )
    weight = ratios.parts.log_weight[:, None]

    def densities(w: Array) -> tuple[Array, Array]:
        """Losses and weighted log-densities at (K, n) distances."""
        found = ratio((w, None))
        return found.loss[0], found.log_density()[0] + weight

    share = xp.linspace(0.0, 1.0, 17, dtype=t.dtype)[:, None, None]
    y, b = densities((low + share * (high - low)).reshape(-1, t.shape[-1]))
    direction = rule.direction
    exponents = [b + (1 + t) * y] * (direction != "backward")
    exponents += [b - t * y] * (direction != "forward")
    peak = xp.max(xp.stack(exponents), axis=(0, 1, 2))
    peak = stop_gradient(xp, xp.maximum(peak - LARGEST_EXPONENT, 0.0))

    def integrand(w: Array) -> tuple[Array, ...]:
        y, b = densities(w.reshape(-1, w.shape[-1]))
        if rule.with_derivatives:
            found = scaled_power_excess_derivatives(y, b - peak, t, direction)
        else:
            found = (scaled_power_excess(y, b - peak, t, direction),)
        return tuple(xp.sum(part, axis=0).reshape(w.shape) for part in found)

    lefts, rights = lay_panels(low, high, density, xp.zeros_like(t), num_panels=number)
    total, *derivatives = integrate_panels(
        integrand, lefts, rights, nodes_per_panel=per_panel
    )
    safe = xp.maximum(total, 1e-300)
    return xp.log(total) + peak, *(d / safe for d in derivatives)


def _upper_windows(t: Array, ratios: Ratios, direction: str) -> Windows:
    """Near the floor, and forward from the first to the last bump that counts."""
    xp = namespace(t, ratios.floor)
    floor, zero = ratios.floor, xp.zeros_like(t)
    s, last = ratios.parts.shift, ratios.terms.last
    spread = xp.max(floor, axis=0) - xp.min(floor, axis=0)
    near = zero, zero + _HALF_WIDTH + xp.maximum(spread, 0.5 * _HALF_WIDTH)
    if direction == "backward":
        return _windows(t, ratios, near)
    alpha, size = 1 + t, _NUM_BUMPS
    if xp is np:
        size = int(min(size, last))
    index = xp.arange(1, size + 1, dtype=s.dtype)[:, None]
    grown = xp.round(xp.exp((index - 1) / max(size - 1, 1) * xp.log(last + 0.0)))
    j = xp.where(last > size, grown, xp.minimum(index, last + 0.0))
    # A bump of N(j s) over N(0), and over N(-j s); and those in between.
    tops = (
        (2 * alpha - 1) * j * s if ratios.covers or ratios.replaced else alpha * j * s
    )
    settled = _settled(alpha, ratios)
    bumps = xp.concatenate(
        [alpha * j * s, tops, xp.max(settled, 1), xp.min(settled, 1)]
    )
    bumps = bumps - 0.5 * (xp.max(floor, axis=0) + xp.min(floor, axis=0))
    found = xp.max(_exponent(ratios.upper, bumps, t, ratios), axis=0)
    base = 0.5 * near[1] * xp.linspace(0.0, 1.0, 5, dtype=s.dtype)[:, None]
    base = xp.max(_exponent(ratios.upper, base, t, ratios), axis=(0, 1))
    top = xp.maximum(xp.max(found, axis=0), base)
    counts = found > top - _NEGLIGIBLE - xp.minimum((alpha * s) ** 2 / 8, _BETWEEN)
    reach = _HALF_WIDTH + 0.5 * spread
    low = xp.min(xp.where(counts, bumps, xp.inf), axis=0) - reach
    high = xp.max(xp.where(counts, bumps, 0.0), axis=0) + reach
    low = xp.clip(low, 0.0, high)
    return _windows(t, ratios, near, (low, high))


def _settled(alpha: Array, ratios: Ratios) -> Array:
    """(2, C, n) where the exponent of a component is stationary, from both ends."""
    xp = namespace(alpha, ratios.floor)
    s, terms = ratios.parts.shift, ratios.terms
    zero = xp.zeros_like(ratios.floor)
    top = (2 * alpha - 1) * ratios.parts.count * s

    def mean(x: Array) -> Array:
        value, j = terms.log_ratio(x)
        gap = ratios.parts.log_none - ratios.parts.log_some - value
        return s * j / (1 + xp.exp(xp.minimum(gap, 700.0)))

    def slope(x: Array) -> tuple[Array, Array]:
        rise = xp.stack([alpha * mean(row) for row in x])
        if ratios.replaced:
            rise = rise + xp.stack([(alpha - 1) * mean(-row) for row in x])
        return rise, xp.zeros_like(x)

    return settle(slope, xp.stack([zero, top]), zero, top)


def _lower_windows(t: Array, ratios: Ratios, direction: str) -> Windows:
    """Near the floor, and backward on to where ``B^+`` falls no more."""
    xp = namespace(t, ratios.floor)
    floor, zero = ratios.floor, xp.zeros_like(t)
    spread = xp.max(floor, axis=0) - xp.min(floor, axis=0)
    near = zero, zero + 2 * _HALF_WIDTH + xp.max(floor, axis=0)
    if direction == "forward":
        return _windows(t, ratios, near)
    # The last bump is at x = -t s E j, whose mean falls with x.
    s, terms = ratios.parts.shift, ratios.terms

    def slope(x: Array) -> Array:
        value, mean = terms.log_ratio(x)
        gap = ratios.parts.log_none - ratios.parts.log_some - value
        return -t * s * mean / (1 + xp.exp(xp.minimum(gap, 700.0)))

    bumps = floor - only_root(slope, -t * terms.last * s + 0 * floor, 0 * floor)
    far = xp.max(bumps, axis=0)
    share = xp.linspace(0.0, 1.0, _NUM_PROBES, dtype=s.dtype)[:, None]
    points = xp.concatenate([far * share, bumps])
    found = xp.max(_exponent(ratios.lower, points, -1 - t, ratios), axis=0)
    gap = far / _NUM_PROBES
    slack = xp.minimum(gap * gap / 8, _BETWEEN)
    counts = found > xp.max(found, axis=0) - _NEGLIGIBLE - slack
    high = xp.max(xp.where(counts, points, 0.0), axis=0) + _HALF_WIDTH + spread
    low = xp.min(xp.where(counts, points, xp.inf), axis=0) - _HALF_WIDTH - spread
    return _windows(t, ratios, near, (xp.clip(low, 0.0, high), high))


def _exponent(ratio: Callable[..., Ratio], w: Array, t: Array, ratios: Ratios) -> Array:
    """``log(Q (P/Q)^{1+t})``, weighted, at (K, n) distances; (C, K, n)."""
    xp = namespace(w, t)
    found = ratio((xp.maximum(w, 0.0), None))
    weight = ratios.parts.log_weight[:, None]
    return found.log_density()[0] + (1 + t) * found.loss[0] + weight


def _windows(t: Array, ratios: Ratios, *ends: tuple[Array, Array]) -> Windows:
    """Low and high ends, and densities of panels: bumps may be sharper than N(0)."""
    s = ratios.parts.shift
    xp = namespace(s)
    few = xp.max(ratios.parts.count, axis=0)
    # Variance of j at most, below and among the floors.
    variance = xp.minimum(0.25 * few, 1 / (s * s))
    sharp = _DENSITY * xp.minimum(xp.sqrt(1 + t * s * s * variance), _SHARPEST)
    sharp = xp.where(ratios.parts.rate < 1, sharp, _DENSITY)
    density = xp.maximum(sharp, _SHIFT_DENSITY * s)
    low, high = (xp.stack(side) for side in zip(*ends, strict=True))
    return low, high, density + 0 * low
