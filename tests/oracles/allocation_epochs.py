"""Many epochs of random allocation, add_remove, by Mellin transforms in many digits.

With W the product of all epochs' likelihood ratios and z = c + iy, c > 0, the mean
``E(x - W)_+`` is ``1/(2 pi) int E[W^-z] x^{1+z} / (z (1 + z)) dy``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Any, NamedTuple

import mpmath
import numpy as np

mp: Any = mpmath.mp

MOST_HEIGHT = 120.0
TILTS = np.geomspace(0.4, 60, 60)


class Epochs(NamedTuple):
    """So many whole epochs of ``steps`` steps."""

    steps: int
    number: int


class _Sizes(NamedTuple):
    """``c``, the height and its period, and what cancels, in nats."""

    tilt: float
    height: float
    period: float
    nats: float


def delta(
    parts: Sequence[Epochs],
    shift: float,
    epsilon: float,
    direction: str,
    relative: float = 1e-11,
) -> tuple[Any, float] | None:
    """``H_g(P || Q)`` ("remove") or ``H_g(Q || P)``, and how far other sizes are off.

    None where they differ by more than ``relative``, or the height of the transform
    would be above `MOST_HEIGHT`: where the loss hardly varies, or hardly ever.
    """
    log_x = epsilon if direction == "remove" else -epsilon
    log_least = min(log_x, 0.0) - 30.0
    for _ in range(3):
        values = []
        for change in (1.0, 0.83):
            sizes = _sizes(parts, shift, log_x, log_least, change)
            if sizes is None:
                return None
            with mp.workdps(math.ceil(sizes.nats / math.log(10)) + 15):
                put, g = _gain(parts, shift, log_x, sizes, change), mp.exp(epsilon)
                values.append(put - (g - 1) if direction == "remove" else put * g)
        value, other = values
        off = float(abs(value - other) / abs(value)) if value else math.inf
        if value > 0 and off < relative:
            return value, off
        log_least -= 16.0
    return None


def _sizes(
    parts: Sequence[Epochs],
    shift: float,
    log_x: float,
    log_least: float,
    change: float,
) -> _Sizes | None:
    """What brings the error of the transform's sum below ``e^log_least``."""
    logs = sum(part.number * _log_moments(part.steps, shift, TILTS) for part in parts)
    chernoff = logs + (1 + TILTS) * log_x - np.log(TILTS * (TILTS + 1))
    low = np.nanmin(chernoff)
    slope = np.gradient(np.gradient(logs, TILTS), TILTS)
    best = None
    for place in np.flatnonzero(chernoff <= low + 20):
        tilt = float(TILTS[place]) * change
        if not 2 < place < len(TILTS) - 8:
            continue
        nats = max(float(chernoff[place]), log_x) + 6 - log_least
        # The loss's tilted deviation is the transform's width.
        width = math.sqrt(max(float(slope[place]), 1e-9))
        height = math.sqrt(2 * (nats + 8)) / width * 1.6 / change
        above = (max(log_x, 0.0) - log_least + 4) / tilt
        beyond = TILTS > 1.1 * tilt
        below = np.min((chernoff[beyond] - log_least + 4) / (TILTS[beyond] - tilt))
        period = max(above, float(below), 1.0) / change
        cost = (2 * height + nats) ** 3 * (nats / tilt + 10)
        if height < MOST_HEIGHT and (best is None or cost < best[0]):
            lost = nats + math.pi / 2 * height + 12
            best = cost, _Sizes(tilt, height, period, lost)
    return None if best is None else best[1]


def _log_moments(steps: int, shift: float, tilts: np.ndarray) -> np.ndarray:
    """``log E[W^-c]`` of one epoch, to a few digits: for the choice of sizes."""
    x = np.linspace(-9 - 2 * shift, 9 + 2 * shift, 401)
    weight = np.exp(-x * x / 2)
    weight /= weight.sum()
    terms = np.exp(shift * x - shift * shift / 2)
    v = np.linspace(-90, 25 + shift * 9, 1_500) - math.log(steps)
    p = np.exp(v)[:, None] * terms
    less, left = np.expm1(-p) @ weight, np.exp(-np.minimum(p, 700.0)) @ weight
    logs = np.where(less > -0.5, np.log1p(np.maximum(less, -0.5)), np.log(left))
    logs = steps * logs
    found = []
    for c in tilts:
        exponent = c * v + logs
        most = exponent.max()
        total = np.exp(exponent - most).sum() * (v[1] - v[0])
        found.append(most + math.log(total) + c * math.log(steps) - math.lgamma(c))
    return np.array(found)


def _gain(
    parts: Sequence[Epochs], shift: float, log_x: float, sizes: _Sizes, change: float
) -> Any:
    """``E(x - W)_+``."""
    tilt, height, period, nats = sizes
    # Aliases of the transform's integrand are e^{-pi/2 (2 pi/h - 2y)} of it.
    step = 2 * math.pi / (2 * height + nats) * change
    fine = _finest(shift, nats)
    step = min(step, shift * fine)
    folded = math.ceil(period / step)
    number = math.ceil(height * folded * step / (2 * math.pi)) + 1
    spacing = mp.mpf(step)
    every = 2 * mp.pi / (folded * spacing)
    heights = [mp.mpc(tilt, m * every) for m in range(number)]
    logs = [mp.mpc(0)] * number
    for part in parts:
        row = _transform(part, shift, tilt, spacing, folded, number, nats)
        for m, (z, value) in enumerate(zip(heights, row, strict=True)):
            logs[m] += part.number * (
                mp.log(value) + z * mp.log(part.steps) - mp.loggamma(z)
            )
    total = mp.mpf(0)
    for m, (z, log) in enumerate(zip(heights, logs, strict=True)):
        term = (mp.exp(log + (1 + z) * mp.mpf(log_x)) / (z * (z + 1))).real
        total += term if m else term / 2
    return total * every / mp.pi


def _finest(shift: float, nats: float) -> float:
    """Spacing of the normal variable at which the sum for L is right to ``e^-nats``."""
    wide = math.pi * math.sqrt(2 / nats)
    if wide >= 4 * shift:
        return wide
    return math.pi**2 / (shift * nats + math.pi**2 / (8 * shift))


def _transform(
    part: Epochs,
    shift: float,
    tilt: float,
    step: Any,
    folded: int,
    number: int,
    nats: float,
) -> list[Any]:
    """``int e^(zv) L(e^v)^t dv`` at so many heights."""
    bits = mp.prec + 20
    h, s = float(step), shift
    skip = max(1, math.floor(s * _finest(s, nats) / h))
    side = math.ceil(math.sqrt(2 * nats + 10) * s / (skip * h))
    start = -math.log(part.steps) - (nats + 10) / tilt
    # L^t is e^-nats at most where p times the smallest term is about nats.
    end = (
        -math.log(part.steps) + math.log(nats) + min(s * math.sqrt(2 * nats), 3 + 9 * s)
    )
    count = math.ceil((end - start) / h)
    first = mp.mpf(start) - mp.mpf(s) ** 2 / 2 - side * skip * step
    ratio, inner = mp.exp(step), mp.exp(first)
    table = []
    for _ in range(count + 2 * side * skip):
        table.append(int(mp.ldexp(mp.exp(-inner), bits)) if inner < 3 * nats else 0)
        inner *= ratio
    width = skip * step / mp.mpf(s)
    dist = [mp.exp(-((j * width) ** 2) / 2) for j in range(-side, side + 1)]
    scale = mp.fsum(dist)  # the sum of the weights, 1 up to the same error
    density = [int(mp.ldexp(one / scale, bits)) for one in dist]
    row: list[Any] = []
    for k in range(count):
        value = sum(map(mul, density, table[k : k + 2 * side * skip + 1 : skip]))
        v = mp.mpf(start) + k * step
        if value <= 0:
            row.append(mp.mpf(0))
            continue
        log = mp.log(mp.ldexp(mp.mpf(value), -2 * bits))
        row.append(mp.exp(mp.mpf(tilt) * v + part.steps * log))
    most = max(row)
    sums = [0] * folded
    for k, value in enumerate(row):
        sums[k % folded] += int(mp.ldexp(value / most, bits))
    roots = [mp.expjpi(mp.mpf(2 * k) / folded) for k in range(folded)]
    cosines = [int(mp.ldexp(root.real, bits)) for root in roots]
    sines = [int(mp.ldexp(root.imag, bits)) for root in roots]
    found = []
    for m in range(number):
        places = [m * r % folded for r in range(folded)]
        real = sum(map(mul, sums, [cosines[place] for place in places]))
        imag = sum(map(mul, sums, [sines[place] for place in places]))
        value = mp.mpc(mp.ldexp(real, -2 * bits), mp.ldexp(imag, -2 * bits))
        turn = mp.expj(2 * mp.pi * m / (folded * step) * mp.mpf(start))
        found.append(value * turn * most * step)
    return found
