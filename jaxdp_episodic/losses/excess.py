"""``log(E_Q[(P/Q)^alpha] - 1)`` of a pair of distributions on the line, by quadrature.

For a dominating pair (P, Q) and an order ``alpha = 1 + t``, ``t > 0``, the quantity is

    excess(t) = E_Q[(P/Q)^alpha] - 1 = E_Q[f_alpha(P/Q - 1)],
    f_a(v) = (1 + v)^a - 1 - a v >= 0.

The excess, not the moment, is summed: at small sampling rates it is 1e-15 and less
and would drown in the 1. The same function serves every pair:

* forward: ``E_Q[f_alpha(v)]``; backward, with the roles of P and Q exchanged:
  ``E_Q[f_{1-alpha}(v)]``, as ``E_P[(Q/P)^alpha] = E_Q[(P/Q)^{1-alpha}]``;
* a mechanism whose forward and backward profile are the same function ``H_g(P || Q)``:
  ``E_Q[f_alpha(v) + f_{1-alpha}(v); v > 0]``. (Equation (1) of Sason and Verdú 2016,
  arXiv:1508.00335, writes the moment as an integral of the two profiles; its part in
  ``g > 1`` of the first is ``E_Q[f_alpha(v); v > 0]``, and of the second, for the
  profile of the exchanged pair, ``E_Q[f_{1-alpha}(v); v > 0]``.)

Everything is kept as a logarithm, so neither ``t = 4095`` nor a rate of 1e-12 leaves
the range of float64. Errors of the quadrature are below 1e-10 relative (measured
against mpmath and against much finer rules in the tests).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxdp_episodic.losses.privacy_loss import MomentRule
from jaxdp_episodic.losses.windows import Windows
from jaxdp_episodic.numerics.loops import Array, namespace, stop_gradient
from jaxdp_episodic.numerics.power_excess import (
    log_expm1,
    scaled_power_excess,
    scaled_power_excess_derivatives,
)
from jaxdp_episodic.numerics.quadrature import integrate_panels, lay_panels

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
# Beyond it float64 cannot place nodes within a bump. The moment at rate 1 is used in
# place of the integral: an upper bound, as moments grow with the rate.
FARTHEST_BUMP = 1e9
_LARGEST_EXPONENT = 600.0


def log_integral(
    log_parts: Callable[[Array], tuple[Array, Array]],
    windows: Windows,
    bumps: Array,
    floor: Array,
    t: Array,
    rule: MomentRule,
) -> tuple[Array, ...]:
    """``log of the integral of e^{b(x)} f(e^{y(x)} - 1)`` over x >= floor.

    ``y`` is the log-ratio and ``b`` the log-density. f is ``f_alpha`` (forward),
    ``f_{1-alpha}`` (backward) or their sum (symmetric). With derivatives, also the
    first two derivatives of the integral in t, divided by it.
    """
    xp = namespace(windows[0], bumps, floor, t)
    # The panels are a choice of nodes, not part of the function: no gradient.
    windows, bumps, floor = stop_gradient(xp, (windows, bumps, floor))
    direction, quadrature, with_derivatives = rule
    y, b = log_parts(xp.maximum(bumps, floor))
    exponents = [b + (1 + t) * y] * (direction != "backward")
    exponents += [b - t * y] * (direction != "forward")
    # Large moments are scaled down by their size at the bumps. Were a bump missed by
    # far the sum would overflow to inf, which is the safe side.
    peak = xp.max(xp.concatenate(exponents), axis=0)
    peak = stop_gradient(xp, xp.maximum(peak - _LARGEST_EXPONENT, 0.0))

    def integrand(x: Array) -> tuple[Array, ...]:
        y, b = log_parts(x)
        if with_derivatives:
            return scaled_power_excess_derivatives(y, b - peak, t, direction)
        return (scaled_power_excess(y, b - peak, t, direction),)

    lefts, rights = lay_panels(*windows, floor, num_panels=quadrature.num_panels)
    total, *derivatives = integrate_panels(
        integrand, lefts, rights, nodes_per_panel=quadrature.nodes_per_panel
    )
    return xp.log(total) + peak, *(d / total for d in derivatives)


def unless_gaussian(
    is_gaussian: Array, scale: Array, t: Array, excess: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Replaces the integral where the pair is Gaussian, ``L(t) = scale t (1 + t)``."""
    xp = namespace(is_gaussian, scale, t, excess[0])
    slope = scale * (1 + 2 * t)
    results = excess_of(scale * t * (1 + t), slope, 2 * scale, len(excess) > 1)
    return tuple(
        xp.where(is_gaussian, exact, integral)
        for exact, integral in zip(results, excess, strict=True)
    )


def excess_of(
    log_moment: Array, slope: Array, bend: Array | float, with_derivatives: bool
) -> tuple[Array, ...]:
    """``log(e^L - 1)`` of a moment's logarithm L, given with two derivatives."""
    xp = namespace(log_moment, slope)
    excess = log_expm1(log_moment)
    if not with_derivatives:
        return (excess,)
    inverse = 1 / -xp.expm1(-log_moment)
    return excess, slope * inverse, (bend + slope * slope) * inverse
