"""The same quantities at 60 digits, straight from their definitions (slow)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mpmath as mp
import numpy as np
from mpmath.calculus.quadrature import GaussLegendre

DIGITS = 60

Mixture = Sequence[tuple[Any, Any]]
"""Weights and means of unit-variance normals."""


def density(mixture: Mixture) -> Callable[[Any], Any]:
    """Density of a mixture of N(mean, 1), given as (weight, mean) pairs."""
    parts = [(mp.mpf(w), mp.mpf(m)) for w, m in mixture if w != 0]
    scale = 1 / mp.sqrt(2 * mp.pi)
    return lambda x: scale * mp.fsum(w * mp.exp(-((x - m) ** 2) / 2) for w, m in parts)


def sampled_pair(p: float, shift: float) -> tuple[Mixture, Mixture]:
    """(1-p) N(0) + p N(s) and N(0)."""
    weight, s = mp.mpf(p), mp.mpf(shift)
    return [(1 - weight, 0), (weight, s)], [(1, 0)]


def symmetric_pair(p: float, r_in: float, shift: float) -> tuple[Mixture, Mixture]:
    """(1-p) N(0) + p(1-r) N(-s) + p r N(s) and (1-p) N(0) + p N(-s)."""
    w, r, s = mp.mpf(p), mp.mpf(r_in), mp.mpf(shift)
    return [(1 - w, 0), (w * (1 - r), -s), (w * r, s)], [(1 - w, 0), (w, -s)]


def mp_sampled_gaussian(p: float, shift: float, alpha: float, *, direction: str):
    """M(alpha) - 1 of the sampled pair; the plain trapezoid rule on the whole line."""
    with mp.workdps(DIGITS):
        top, bottom = (density(m) for m in sampled_pair(p, shift))
        if direction == "backward":
            top, bottom = bottom, top
        a, s = mp.mpf(alpha), mp.mpf(shift)

        def integrand(x):
            return top(x) ** a * bottom(x) ** (1 - a)

        # The integrand is negligible (e^-160 of its peak) beyond this window, which
        # only has to be wide enough: it is found in ordinary floating point.
        mixtures = sampled_pair(p, shift)
        order = float(alpha) if direction == "forward" else 1 - float(alpha)
        wide = np.linspace(-(alpha + 1) * shift - 20, (alpha + 1) * shift + 20, 200_001)
        log_top, log_bottom = (_float_log_density(m, wide) for m in mixtures)
        logs = order * log_top + (1 - order) * log_bottom
        keep = np.flatnonzero(logs > max(np.max(logs), 0.0) - 160)
        low, high = wide[max(keep[0] - 1, 0)], wide[min(keep[-1] + 1, wide.size - 1)]
        step = min(mp.mpf("0.4"), mp.mpf("0.2") / s, 1 / (s * mp.sqrt(a)))
        return _trapezoid_minus_one(integrand, mp.mpf(low), mp.mpf(high), step)


def _float_log_density(mixture: Mixture, x: np.ndarray) -> np.ndarray:
    """Log density of the mixture, up to a constant, in double precision."""
    parts = [float(mp.log(w)) - (x - float(m)) ** 2 / 2 for w, m in mixture if w > 0]
    return np.logaddexp.reduce(parts)


def _trapezoid_minus_one(integrand: Callable, low, high, step):
    """int integrand - 1 over [low, high], halving the step until it settles."""
    count = int(mp.ceil((high - low) / step))
    total = mp.fsum(integrand(low + k * step) for k in range(count + 1))
    previous = total * step - 1
    for _ in range(6):
        middles = (low + (k + mp.mpf(1) / 2) * step for k in range(count))
        total += mp.fsum(integrand(x) for x in middles)
        step, count = step / 2, 2 * count
        result = total * step - 1
        if abs(result / previous - 1) < mp.mpf(10) ** -25:
            return result
        previous = result
    raise ArithmeticError("the trapezoid rule did not settle")


def mp_hockey_stick(top: Mixture, bottom: Mixture, g: Any, *, cuts: Sequence = ()):
    """H_g = int max(0, P - g Q) over the line, split at the zeros of the difference."""
    with mp.workdps(DIGITS):
        p, q = density(top), density(bottom)
        g = mp.mpf(g)
        means = [mp.mpf(m) for _, m in (*top, *bottom)]
        ends = [min(means) - 20, *cuts, max(means) + 20]
        grid = [ends[0] + (ends[-1] - ends[0]) * mp.mpf(k) / 400 for k in range(401)]
        grid = sorted({*grid, *(mp.mpf(c) for c in cuts)})

        def gap(x):
            return p(x) - g * q(x)

        signs = [gap(x) for x in grid]
        total, start = mp.mpf(0), None
        for i in range(len(grid) - 1):
            a, b = grid[i], grid[i + 1]
            if signs[i] > 0 and start is None:
                start = a
            if (signs[i] > 0) != (signs[i + 1] > 0):
                root = mp.findroot(
                    gap, (a, b), solver="anderson", tol=mp.mpf(10) ** -90
                )
                total += _gauss(gap, start, root) if signs[i] > 0 else 0
                start = root if signs[i + 1] > 0 else None
            elif start is not None and b - start > 1:
                total += _gauss(gap, start, b)
                start = b
        if start is not None:
            total += _gauss(gap, start, grid[-1])
        return total


def _quad(integrand: Callable, points: Sequence):
    """Gauss-Legendre between the points; each panel at two degrees that agree."""
    panels = list(zip(points[:-1], points[1:], strict=True))
    values = [_gauss(integrand, *panel, 3) for panel in panels]
    wrong = range(len(panels))
    for degree in (4, 5, 6):
        finer = {i: _gauss(integrand, *panels[i], degree) for i in wrong}
        error = {i: abs(finer[i] - values[i]) for i in wrong}
        for i in wrong:
            values[i] = finer[i]
        total = mp.fsum(values)
        allowed = abs(total) * mp.mpf(10) ** -25 / len(panels)
        wrong = [i for i in wrong if not error[i] <= allowed]
        if not wrong:
            return total
    raise ArithmeticError(f"degrees differ in {len(wrong)} panels")


def _gauss(function: Callable, low, high, degree: int = 5):
    """Gauss-Legendre over one short interval, with 3 * 2^(degree - 1) nodes."""
    middle, half = (low + high) / 2, (high - low) / 2
    nodes = _nodes(degree, mp.mp.prec)
    return half * mp.fsum(w * function(middle + half * x) for x, w in nodes)


@functools.cache
def _nodes(degree: int, precision: int):
    """Nodes and weights in [-1, 1]."""
    return GaussLegendre(mp.mp).calc_nodes(degree, precision)


def mp_half_line(
    top: Mixture, bottom: Mixture, alpha: float, start: Any, breakpoints: Sequence
):
    """E_Q[(f_alpha + f_{1-alpha})(P/Q); x > start], f_a(L) = L^a - 1 - a(L-1)."""
    with mp.workdps(DIGITS):
        p, q, a = density(top), density(bottom), mp.mpf(alpha)

        def integrand(x):
            ratio = p(x) / q(x)
            dual = ratio ** (1 - a) - 1 - (1 - a) * (ratio - 1)
            return q(x) * (ratio**a - 1 - a * (ratio - 1) + dual)

        points = sorted({mp.mpf(start), *(mp.mpf(b) for b in breakpoints)})
        value = _quad(integrand, points)
        return value


def mp_swapped(eta: float, shift: float, alpha: float, breakpoints: Sequence):
    """M(alpha) - 1 for h_fwd = h_bwd = eta D(shift, 1 + (g-1)/eta)."""
    with mp.workdps(DIGITS):
        start = mp.mpf(shift) / 2
        return mp_half_line(*sampled_pair(eta, shift), alpha, start, breakpoints)


def mp_symmetric(p: float, r_in: float, shift: float, alpha: float, breakpoints):
    """M(alpha) - 1 for h_fwd = h_bwd = H_g(P* || Q*)."""
    with mp.workdps(DIGITS):
        return mp_half_line(*symmetric_pair(p, r_in, shift), alpha, 0, breakpoints)


def mp_gaussian_profile(shift: Any, g: Any):
    """D(shift, g) = H_g(N(shift,1) || N(0,1)), at the working precision."""
    mu, eps = mp.mpf(shift), mp.log(g)
    return mp.ncdf(mu / 2 - eps / mu) - g * mp.ncdf(-mu / 2 - eps / mu)


def mp_moment_from_profiles(
    forward: Callable, backward: Callable, alpha: float, breakpoints: Sequence
):
    """M(alpha) - 1 by the Sason-Verdu identity, from two profiles g -> h(g)."""
    with mp.workdps(DIGITS):
        z = mp.mpf(alpha) - 1

        def integrand(u):
            g = mp.exp(u)
            return mp.exp(z * u) * forward(g) + mp.exp(-(1 + z) * u) * backward(g)

        points = sorted({mp.mpf(0), *(mp.mpf(b) for b in breakpoints)})
        value = _quad(integrand, points)
        return z * (1 + z) * value
