"""Epochs of random allocation, add_remove, by densities of sums that are added up.

The log-density of a sum of lognormal terms is a spline; that of two sums' sum an
integral of positive terms over both shares.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.interpolate import make_interp_spline
from scipy.optimize import minimize_scalar
from scipy.special import ndtri

# Logarithm of what is left out below; deviations of one term that jumps.
LEFT, JUMPS = 130.0, 13.5
# Nodes of distributions, of integrals a width of the narrower distribution, and of the
# last distribution, and steps of the inversion in widths of the saddle.
SIZES = ((700, 4.0, 5000, 0.25), (900, 5.5, 6000, 0.17))
TOGETHER, MOST = 100, 1e-10


class Density(NamedTuple):
    """Log-density of log X by the place z, ``log X = middle + core sinh z``."""

    count: int
    middle: float
    core: float
    low: float
    high: float
    spline: Any

    def at(self, v: np.ndarray) -> np.ndarray:
        z = np.arcsinh((v - self.middle) / self.core)
        inside = (z >= self.low) & (z <= self.high)
        return np.where(inside, self.spline(np.clip(z, self.low, self.high)), -np.inf)

    @property
    def width(self) -> float:
        """The narrowest that it is, as a Gaussian."""
        z = np.linspace(self.low, self.high, 400)
        v, row = self.middle + self.core * np.sinh(z), self.spline(z)
        bend = -np.gradient(np.gradient(row, v), v)[row > row.max() - 60]
        return 1 / math.sqrt(np.percentile(bend[3:-3], 97))


def one_term(shift: float) -> Density:
    def row(z: np.ndarray) -> np.ndarray:
        v = np.sinh(z) * shift - 0.5 * shift**2
        log_of = math.log(shift * math.sqrt(2 * math.pi))
        return -0.5 * ((v + 0.5 * shift**2) / shift) ** 2 - log_of

    end = math.asinh(38)
    return Density(1, -0.5 * shift**2, shift, -end, end, row)


def ends(count: int, shift: float) -> tuple[float, float]:
    """Of log X: what is beyond them is rarer than anything that is asked for."""
    core = math.sqrt(math.log1p(math.expm1(shift**2) / count))
    jumping = np.unique(np.round(np.geomspace(1, count, 60)))
    jump = shift * (shift + JUMPS) / np.sqrt(jumping) - shift**2 / 2
    high = float(np.max(np.log(count - jumping + jumping * np.exp(jump))))
    low = math.log(count) - shift * math.sqrt(2 * LEFT / count) - shift**2 / 2
    if LEFT / count < 700:
        small = shift * float(ndtri(math.exp(-LEFT / count))) - shift**2 / 2
        low = max(low, small)
    if core < 0.3:
        high = max(high, math.log(count) + 17 * core)
        low = max(low, math.log(count) - 17 * core)
    return low, max(high, math.log(count) + 1e-3)


def added(
    one: Density, other: Density, shift: float, nodes: int, fine: float
) -> Density:
    """The distribution of the sum of two sums."""
    count = one.count + other.count
    low, high = ends(count, shift)
    core = math.sqrt(math.log1p(math.expm1(shift**2) / count))
    middle = min(max(math.log(count) - 0.5 * core**2, low), high)
    core = min(core, 1.5 * max(1.0, shift / 3))
    first, last = (math.asinh((end - middle) / core) for end in (low, high))
    z = np.linspace(first, last, nodes)
    v = middle + core * np.sinh(z)
    widest = (
        high
        + 1
        - min(
            ends(part.count, shift)[0] if part.count > 1 else -38 * shift
            for part in (one, other)
        )
    )
    step = min(one.width if one.count > 1 else shift, other.width, 1.0) / fine
    u = np.arange(-math.ceil(widest / step), math.ceil(widest / step) + 1) * step
    shares = -np.logaddexp(0, -u), -np.logaddexp(0, u)
    rows = []
    for begin in range(0, nodes, TOGETHER):
        place = v[begin : begin + TOGETHER, None]
        both = one.at(place + shares[0]) + other.at(place + shares[1])
        rows.append(np.logaddexp.reduce(both, axis=1) + math.log(step))
    row = np.concatenate(rows)
    there = np.flatnonzero(np.isfinite(row))
    z, row = z[there[0] : there[-1] + 1], row[there[0] : there[-1] + 1]
    return Density(count, middle, core, z[0], z[-1], make_interp_spline(z, row, 7))


def density_of(count: int, shift: float, nodes: int, fine: float) -> Density:
    power, left, total = one_term(shift), count, None
    while left:
        if left & 1:
            total = added(power, total, shift, nodes, fine) if total else power
        left >>= 1
        if left:
            power = added(power, power, shift, nodes, fine)
    assert total is not None
    return total


def _by_size(
    steps: int,
    shift: float,
    epochs: int,
    epsilon: float,
    size: tuple[int, float, int, float],
) -> tuple[float, float]:
    """Delta, and by how much mass and mean of all epochs are off."""
    density = density_of(steps, shift, *size[:2])
    z, step = np.linspace(density.low, density.high, size[2], retstep=True)
    loss = density.middle + density.core * np.sinh(z) - math.log(steps)
    mass = density.spline(z) + np.log(density.core * np.cosh(z) * step)
    whole, mean = np.exp(mass).sum(), np.exp(mass + loss).sum()
    off = epochs * float(max(abs(whole - 1), abs(mean / whole - 1)))
    mass -= np.log(whole)
    found = []
    for forward in (True, False):

        def log_size(log_c: float, forward: bool = forward) -> float:
            c = math.exp(log_c)
            power = 1 + c if forward else -c
            moment = np.logaddexp.reduce(mass + power * loss)
            return float(epochs * moment - c * epsilon - math.log(c * (c + 1)))

        best: Any = minimize_scalar(log_size, bounds=(-6, 7), method="bounded")
        c, top = math.exp(best.x), best.fun
        sizes = [log_size(math.log(c * (1 + h))) for h in (-1e-3, 0.0, 1e-3)]
        bend = (sizes[0] - 2 * sizes[1] + sizes[2]) / (1e-3 * c) ** 2
        spacing, total = size[3] / math.sqrt(bend), 0.0
        for begin in range(0, 20_000, TOGETHER):
            z = c + 1j * spacing * np.arange(begin, begin + TOGETHER)
            power = 1 + z if forward else -z
            tilted = mass + power[0].real * loss
            kept = tilted > tilted.max() - 50
            least = tilted.max()
            grown = np.exp(tilted[kept] - least)
            turned = np.exp(1j * np.multiply.outer(power.imag, loss[kept])) @ grown
            term = epochs * (np.log(turned) + least) - z * epsilon - top
            term = np.exp(term) / (z * (z + 1))
            term[0] *= 0.5 if begin == 0 else 1.0
            total += float(term.real.sum())
            if abs(term[-20:]).max() < 1e-17:
                break
        found.append(total * spacing / math.pi * math.exp(top))
    return max(found), off


def delta(
    steps: int, shift: float, epochs: int, epsilon: float
) -> tuple[float, float] | None:
    """Delta of whole epochs, and its relative error: by other sizes, and by masses."""
    # None where that is above `MOST`: then it is no measure of the error.
    coarse, fine = (_by_size(steps, shift, epochs, epsilon, size) for size in SIZES)
    error = abs(coarse[0] / fine[0] - 1) + fine[1] + 1e-12
    return (fine[0], error) if error < MOST else None
