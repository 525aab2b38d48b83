"""Rényi moments by quadrature: ``log(E_Q[(P/Q)^alpha] - 1)`` of pairs on the line.

References: docs/proofs.md, "Moments"; Sason and Verdú (2016), arXiv:1508.00335,
Equation (1), which gives the moment as an integral of both profiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np

from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    fori_loop,
    logsumexp,
    namespace,
)
from jaxdp_episodic.accountant.numerics.quadrature import integrate_panels, lay_panels
from jaxdp_episodic.accountant.numerics.special import log_expm1, scaled_power_excess

Windows = tuple[Array, Array, Array]
"""Low end, high end and panels per unit length of J windows, each (J, n)."""

# Half-width of the window around a peak, in standard deviations.
_PEAK_HALF_WIDTH = 9.2
# Panels per standard deviation there: 16 nodes integrate 4 deviations to 1e-13.
_PEAK_DENSITY = 0.25
# Longest interval between peaks, in standard deviations, that gets one window.
_LONGEST_STRETCH = 500.0
# Longest such interval with the panel density of the peaks' own windows.
_DENSE_STRETCH = 60.0
_SPARSE_SHARE = 0.3  # factor of that density on a longer interval
# Length within which the integrand is at most e^60 times that at known peaks.
_SHORT_STRETCH = 40.0
# Half-widths of the windows around a transition of the log-ratio, times the shift.
_TRANSITION_HALF_WIDTHS = np.array([[6.0], [16.0], [50.0]])
# Panels there per 1/shift: singularities of the log-ratio are pi/shift away.
_TRANSITION_DENSITIES = np.array([[0.4], [0.15], [0.05]])
_SETTLING_STEPS = 14  # largest number of steps of `settle`
# Largest number of bisections of `only_root`, and its final bracket, in deviations.
_BISECTIONS = 40
_NARROW_BRACKET = 1e-2


def windows_around(
    centers: list[Array], *others: Windows, between: Callable[[], Array] | None = None
) -> tuple[Windows, Array]:
    """Returns windows (J, n) around centers and between them, and centers (K, n)."""
    # Transitions matter only near a peak, so they are cut to the range of the peaks.
    xp = namespace(centers[0])
    peaks = xp.stack(centers)
    bottom = xp.min(peaks, axis=0) - _PEAK_HALF_WIDTH
    top = xp.max(peaks, axis=0) + _PEAK_HALF_WIDTH
    # The integrand may be large between two peaks that nearly merge, many deviations
    # apart. If that interval is short enough, it is one window.
    span = top - bottom
    end = xp.where(span < _LONGEST_STRETCH, top, bottom)
    near = _PEAK_DENSITY * xp.where(span < _DENSE_STRETCH, 1.0, _SPARSE_SHARE)
    windows = [(bottom[None], end[None], near[None]), *others]
    if xp is not np or not np.all(span < _SHORT_STRETCH):
        if between is not None:
            peaks = xp.concatenate([peaks, between()])
        density = xp.full_like(peaks, _PEAK_DENSITY)
        windows.append((peaks - _PEAK_HALF_WIDTH, peaks + _PEAK_HALF_WIDTH, density))
    low, high, density = (xp.concatenate(a) for a in zip(*windows, strict=True))
    low, high = (xp.minimum(xp.maximum(a, bottom), top) for a in (low, high))
    return (low, high, density), peaks


def transitions(first: Array, last: Array, s: Array) -> Windows:
    """Returns windows of decreasing density around the interval [first, last]."""
    half = _TRANSITION_HALF_WIDTHS / s
    return first - half, last + half, _TRANSITION_DENSITIES * s


def settle(slope, start: Array, low: Array, high: Array) -> Array:
    """Iterates ``x = slope(x)`` from starts (k, n) to the nearby peaks.

    A peak of an exponent ``F(x) - x²/2`` is where F' = x. ``slope`` returns F' and F''.
    """
    # Newton's step where F is concave, else the fixed-point step. The bracket's middle
    # if a step leaves the bracket or does not halve the last one: it may alternate at a
    # kink.
    xp = namespace(start, low, high)

    def near(x: Array) -> Array:
        """Accuracy that suffices for the center of a window 18 deviations long."""
        return 1e-2 + 1e-4 * xp.abs(x)

    def follow(_: int, state: tuple[Array, Array, Array, Array]):
        x, low, high, last_move = state
        value, derivative = slope(x)
        low = xp.where(value >= x, x, low)
        high = xp.where(value <= x, x, high)
        step = x + (value - x) / xp.maximum(1.0 - derivative, 1.0)
        inside = (step >= low) & (step <= high)
        shrinks = 2 * xp.abs(step - x) <= last_move
        moved = xp.where(inside & shrinks, step, 0.5 * (low + high))
        # A converged start moves by rounding errors only. These must not send it to the
        # middle of a wide bracket, and so to another peak.
        moved = xp.where(last_move <= near(x), x, moved)
        return moved, low, high, xp.abs(moved - x)

    if xp is not np:  # JAX's loop needs constant shapes
        low, high = (xp.broadcast_to(end, start.shape) for end in (low, high))
    state = (start, low, high, 4 * (high - low))
    x, *_ = fori_loop(
        xp, 0, _SETTLING_STEPS, follow, state, lambda s: (s[3] <= near(s[0])).all()
    )
    return x


def only_root(slope, low: Array, high: Array) -> Array:
    """Solves ``x = slope(x)`` for a decreasing slope by bisection."""
    xp = namespace(low, high)

    def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        above = slope(middle) >= middle
        return xp.where(above, middle, low), xp.where(above, high, middle)

    def is_narrow(bracket: tuple[Array, Array]) -> bool:
        return (bracket[1] - bracket[0] <= _NARROW_BRACKET).all()

    low, high = fori_loop(xp, 0, _BISECTIONS, halve, (low, high), is_narrow)
    return 0.5 * (low + high)


# Largest logarithm of a term of a sum, in nats; larger ones are scaled down.
LARGEST_EXPONENT = 600.0
# Rounding error of a log-density, relative to the largest of its terms: half a unit in
# the last place for each operation. Measured: 1.25 units at peaks, 3 at high orders.
ROUNDING = 4 * float(np.finfo(np.float64).eps)
# Largest absolute loss, in nats, up to which moments have an error of 1e-10 without
# adding `ROUNDING` (tested). Near 0 and at high orders, terms are small where the
# integrand is large.
LARGE_LOSS = 128.0
# Largest rounding error, in nats, of terms with a usable sum: they may become 0.
_MOST_ROUNDING = 1.0


# With ``x = floor + c log(1 + e^w)`` an integrand of order (x - floor)² falls as e^{3w}
# on the left. The trapezoidal rule in w then needs a tenth of the panels' nodes:
# Trefethen and Weideman (2014), SIAM Review 56(3), Theorem 5.1.
_STRIP = 2.2  # half-width of the strip of w in which the integrand is analytic
_GROWTH = 5.0  # nats by which it may be larger there
LARGEST_TURN = 0.75  # of c <= 1 times a center: no zeros of P or Q in the strip
MOST_NODES = 512


class HalfLine(NamedTuple):
    """A trapezoidal rule for `log_integral`."""

    floor: Array
    scale: Array  # c
    length: Array  # of the nodes, in units of c
    first: Array  # the first w
    spacing: Array

    @classmethod
    def of(cls, floor: Array, furthest: Array, last: Array, nats: Array) -> Self:
        """For a furthest center and a last peak; the error is e^-nats."""
        xp = namespace(floor, last)
        scale = LARGEST_TURN / xp.maximum(furthest, LARGEST_TURN)
        length = (last - floor + xp.sqrt(2 * nats + 8)) / scale
        spacing = 2 * math.pi * _STRIP / (nats + _GROWTH)
        return cls(floor, scale, length, -nats / 3, spacing)

    @property
    def number(self) -> Array:
        """The number of nodes, at most `MOST_NODES` in use."""
        return (self.length - self.first) / self.spacing + 1

    def integrate(
        self, integrand: Callable[[Array], tuple[Array, ...]], parts: int
    ) -> tuple[Array, ...]:
        """Integrals from the floor, one for each part of the integrand."""
        xp, number = namespace(self.length), abs(self.number)
        # Not positive without noise, NaN at some orders: others keep their number.
        number = xp.max(xp.where(number < MOST_NODES, number, MOST_NODES))
        rows = int(number) + 1 if xp is np else 4  # nodes in a pass of JAX's loop
        first = self.first + self.spacing * np.arange(float(rows))[:, None]

        def values(i: Array) -> tuple[Array, ...]:
            grown = xp.exp(first + self.spacing * rows * xp.float64(i))
            moved = xp.log1p(grown)
            found = integrand(self.floor + self.scale * xp.minimum(moved, self.length))
            weight = self.scale * (self.spacing * grown / (1 + grown))
            weight = xp.where(moved <= self.length, weight, 0.0)
            return tuple(xp.sum(weight * a, axis=0) for a in found)

        def add(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            return tuple(a + b for a, b in zip(sums, values(i), strict=True))

        passes = xp.ceil(number / rows).astype(np.int32)
        nothing = (xp.zeros_like(self.length),) * parts
        return fori_loop(xp, 0, passes, add, nothing)


def log_integral(
    log_parts: Callable[[Array], tuple[Array, Array]],
    windows: Windows | HalfLine | tuple[Array, Array],
    peaks: Array,
    floor: Array,
    t: Array,
    rule: MomentRule,
) -> tuple[Array, ...]:
    """Returns the logarithm of the integral of ``e^{b(x)} f(e^{y(x)} - 1)`` over x.

    The domain is x >= floor; two arrays in place of windows are the panels' left and
    right edges. ``log_parts`` returns y = log P/Q and b = log Q; those of several
    pairs, which are added, have more dimensions in front. f is ``v -> (1 + v)^(1 + t)
    - 1 - (1 + t) v`` forward, ``v -> (1 + v)^(-t) - 1 + t v`` backward, and the sum of
    both if the direction is "symmetric". With ``rule.with_derivatives`` two derivatives
    in t follow, divided by the integral.
    """
    xp = namespace(peaks, floor, t)
    direction, quadrature, with_derivatives = rule
    parts = 3 if with_derivatives else 1

    y, b = log_parts(xp.maximum(peaks, floor))
    exponents = [b + (1 + t) * y] * (direction != "backward")
    exponents += [b - t * y] * (direction != "forward")
    # Large moments are scaled down by the integrand at its peaks. If a peak were
    # missed, the sum would overflow to inf, which is a safe answer.
    exponents = xp.concatenate(exponents)
    scale = xp.max(exponents, axis=tuple(range(exponents.ndim - 1)))
    scale = xp.maximum(scale - LARGEST_EXPONENT, 0.0)

    def integrand(x: Array) -> tuple[Array, ...]:
        y, b = log_parts(x)
        found = scaled_power_excess(y, b - scale, t, direction)[:parts]
        several = tuple(range(y.ndim - x.ndim))
        return tuple(xp.sum(a, axis=several) for a in found) if several else found

    if isinstance(windows, HalfLine):
        total, *derivatives = windows.integrate(integrand, parts)
    else:
        panels, nodes, _ = quadrature
        if len(windows) == 3:
            windows = lay_panels(*windows, floor, num_panels=panels)
        total, *derivatives = integrate_panels(
            integrand, *windows, nodes_per_panel=nodes
        )
    return xp.log(total) + scale, *(d / total for d in derivatives)


def unless_gaussian(
    is_gaussian: Array,
    log_weight: Array,
    scale: Array,
    t: Array,
    excess: tuple[Array, ...],
    *,
    rounds: Array | float = 1.0,
) -> tuple[Array, ...]:
    """Returns the integral plus its rounding error, or a smaller bound by Gaussians.

    P is a mixture with log-weights ``log_weight``, whose components have Rényi
    divergences ``alpha * scale`` from Q. Where ``is_gaussian``, P is the last
    component, and its closed form is returned. ``rounds`` is 0 where the integral has
    no rounding error of this kind.
    """
    # log P is a difference of numbers as large as the losses; its rounding is a factor
    # of the integral. The bound holds since moments are convex in the pair,
    # f_{1-alpha}(v) <= t v, and f_alpha(v) <= -t v for v < 0. At large losses it is
    # hardly larger.
    xp = namespace(is_gaussian, scale, t, excess[0])
    log_weight, scale = xp.atleast_2d(log_weight), xp.atleast_2d(scale)
    slope, order = scale * (1 + 2 * t), 1 + t
    exact = excess_of(scale * t * order, slope, 2 * scale, len(excess) > 1)
    size = xp.max(scale, axis=0)
    reach = size * order * order
    is_far = 2 * ROUNDING * reach > _MOST_ROUNDING
    is_large, found = (size > LARGE_LOSS) | is_far, excess
    if xp is not np or np.any(is_large):
        parts = log_weight + xp.logaddexp(exact[0], xp.log(t))
        total = logsumexp(parts)
        share = xp.exp(parts - total)
        bound = total, *(xp.sum(share * part, axis=0) for part in exact[1:])
        rounded = xp.where(is_far, 1.0, rounds) * 2 * reach
        found = with_rounding(excess, rounded, bound, is_large)
    return tuple(
        xp.where(is_gaussian, gaussian[-1], part)
        for gaussian, part in zip(exact, found, strict=True)
    )


def with_rounding(
    excess: tuple[Array, ...],
    size: Array,
    bound: tuple[Array, ...],
    is_large: Array | None = None,
) -> tuple[Array, ...]:
    """Returns a sum raised by its rounding error, or the bound if that is smaller."""
    xp = namespace(excess[0], size)
    counts = size > LARGE_LOSS if is_large is None else is_large
    raised = excess[0] + xp.where(counts, ROUNDING * size, 0.0)
    used = (raised < bound[0]) & (ROUNDING * size < _MOST_ROUNDING)
    used = used | xp.logical_not(counts)
    return tuple(
        xp.where(used, one, other)
        for one, other in zip((raised, *excess[1:]), bound, strict=True)
    )


def sum_of(first: tuple[Array, ...], second: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns the logarithm of the sum of two excesses, with derivatives over it."""
    xp = namespace(first[0], second[0])
    total = xp.logaddexp(first[0], second[0])
    finite = xp.where(xp.isfinite(total), total, 0.0)
    shares = xp.exp(first[0] - finite), xp.exp(second[0] - finite)
    return total, *(
        sum(xp.where(a > 0, a * x, 0.0) for a, x in zip(shares, pair, strict=True))
        for pair in zip(first[1:], second[1:], strict=True)
    )


def log_excess_of_atoms(
    loss: Array, log_mass: Array, t: Array, rule: MomentRule
) -> tuple[Array, ...]:
    """Computes `Moments.log_excess` of (J, n) losses with P's log-probabilities."""
    xp = namespace(loss, log_mass, t)
    base, direction = log_mass - loss, rule.direction  # Q's log-probabilities
    largest = xp.max(xp.where(log_mass > -xp.inf, xp.abs(loss), 0.0), axis=0)
    power = -t if direction == "backward" else 1 + t
    peak = xp.max(base + power * loss, axis=0) - LARGEST_EXPONENT
    peak = xp.maximum(peak, 0.0)
    parts = scaled_power_excess(loss, base - peak, t, direction)
    value, *slopes = (xp.sum(part, axis=0) for part in parts)
    # Q's log-probabilities have rounding errors as large as those of the losses. If
    # they are large use ``M - 1 <= E[e^(t L) - 1; L > 0]``, with probabilities of at
    # most 1.
    gain, mass = loss, log_mass
    if direction == "backward":
        gain, mass = -loss, xp.minimum(base + ROUNDING * largest, 0.0)
    above = gain > 0
    part = mass + log_expm1(t * xp.where(above, gain, 1.0))
    most = logsumexp(xp.where(above, part, -xp.inf))
    found = (xp.log(value) + peak,), (1 + t) * largest, (most,)
    (excess,) = with_rounding(*found)
    return excess, *(slope / value for slope in slopes * rule.with_derivatives)


def excess_of(
    log_moment: Array, slope: Array, bend: Array | float, with_derivatives: bool
) -> tuple[Array, ...]:
    """Returns ``log(e^L - 1)`` for the logarithm L of a moment and its derivatives."""
    xp = namespace(log_moment, slope)
    excess = log_expm1(log_moment)
    if not with_derivatives:
        return (excess,)
    inverse = 1 / -xp.expm1(-log_moment)
    return excess, slope * inverse, (bend + slope * slope) * inverse
