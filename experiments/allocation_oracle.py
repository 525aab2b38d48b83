"""One epoch of random allocation against 50 digits, many against certified ends.

``python experiments/allocation_oracle.py --settings 40 --seed 0``.

The oracle shares no code, and no method, with the package: with X the sum of t
lognormal terms, all of them positive, ``E(x - X)_+`` is the sum over a lattice of
``K(p)^t e^{px} / p²`` on a vertical line (a Fourier series of period L > x: what is
folded in from below is 0, and from above it is smaller by ``e^{-Re(p) L}``), in 50
digits, as 35 and more cancel. ``E(X - x)_+`` is that and the mean less x.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import mpmath
import numpy as np

import jaxdp_episodic as jde

DIGITS, NEGLIGIBLE = 50, 75.0  # nats that aliases are smaller by
MOST_TERMS = 400


def laplace(p: mpmath.mpc, shift: mpmath.mpf, places: list, spacing: mpmath.mpf):
    """``E e^{-pA}``; the line is turned so that pA is (nearly) real."""
    turned = mpmath.arg(p) * min(1.0, float(shift) / 0.4)
    rotated = p * mpmath.expjpi(-turned / mpmath.pi)
    move = turned / shift
    factor = mpmath.expj(spacing * move)
    phase = mpmath.expj(places[0][0] * move)
    total = mpmath.mpc(0)
    for _, term, density in places:
        total += mpmath.exp(-rotated * term) * density * phase
        phase *= factor
    return total * spacing * mpmath.exp(move * move / 2)


def nodes(shift: mpmath.mpf) -> tuple[list, mpmath.mpf]:
    """Places, terms and densities of the trapezoidal rule."""
    spacing = mpmath.mpf(min(0.4, 0.12 / float(shift)))
    number = math.ceil(13 / float(spacing))
    result = []
    for k in range(-number, number + math.ceil(float(shift / spacing)) + 1):
        x = k * spacing
        density = mpmath.exp(-x * x / 2) / mpmath.sqrt(2 * mpmath.pi)
        result.append((x, mpmath.exp(shift * x - shift * shift / 2), density))
    return result, spacing


def gain_below(count: int, shift: float, x: mpmath.mpf, least: float):
    """``E(x - X)_+`` to about ``least``, or None where it takes too long."""
    s = mpmath.mpf(shift)
    places, spacing = nodes(s)
    period = x * mpmath.mpf("1.05")
    center: Any = NEGLIGIBLE / period
    step: Any = 2 * mpmath.pi / period
    total = mpmath.mpf(0)
    for k in range(MOST_TERMS):
        p = mpmath.mpc(center, k * step)
        power = laplace(p, s, places, spacing) ** count
        term = power * mpmath.exp(p * x) / (p * p)
        total += term.real * (1 if k else mpmath.mpf(1) / 2)
        if k > 3 and abs(term) * step * 30 < least:
            return total * step / mpmath.pi
    return None


def oracle(steps: int, noise: float, epsilon: float, least: float):
    """Delta of one epoch: the larger of remove and add."""
    g: Any = mpmath.exp(mpmath.mpf(epsilon))
    above = gain_below(steps, 1 / noise, steps * g, least * steps * 1e-9)
    below = gain_below(steps, 1 / noise, steps / g, least * steps / float(g) * 1e-9)
    if above is None or below is None:
        return None
    return max((above - steps * (g - 1)) / steps, below * g / steps)


def main() -> None:
    """Prints a line for each setting, and the worst."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--settings", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    mpmath.mp.dps = DIGITS
    rng = np.random.default_rng(asked.seed)
    worst = {"oracle": 0.0, "flagged": 0, "outside": 0, "oracles": 0, "intervals": 0}
    for _ in range(asked.settings):
        steps = round(math.exp(rng.uniform(math.log(2), math.log(1e6))))
        noise = math.exp(rng.uniform(math.log(0.3), math.log(10)))
        epochs = round(math.exp(rng.uniform(0, math.log(1e4)))) * rng.integers(2) or 1
        log_delta = rng.uniform(-12, -2)
        drawn = jde.RandomAllocation("unit", steps_per_epoch=steps)
        step = jde.GaussianStep(drawn, noise_multiplier=noise)
        number = steps * int(epochs)
        begun = time.process_time()
        epsilon = float(jde.epsilon(step, delta=10**log_delta, num_steps=number))
        found, info = jde.delta(
            step, epsilon=epsilon, num_steps=number, return_info=True
        )
        spent = time.process_time() - begun
        line = f"{steps:8d} {noise:7.3f} {epochs:6d} {epsilon:10.5g} {found:11.4g}"
        is_flagged = bool(info.is_certified_bound)
        worst["flagged"] += is_flagged
        true = None
        if epochs == 1 and epsilon > 0:
            true = oracle(steps, noise, epsilon, 10**log_delta)
        if true is not None:
            off = float(found / true - 1)
            if is_flagged:
                worst["outside"] += off < -1e-12
            else:
                worst["oracle"] = max(worst["oracle"], abs(off))
            worst["oracles"] += 1
            line += f"  oracle {off:9.1e}"
        elif number <= 2**31:
            low, high = jde.delta_interval(step, epsilon=epsilon, num_steps=number)
            inside = low * (1 - 1e-12) <= found <= high * (1 + 1e-12)
            worst["outside"] += not inside
            worst["intervals"] += 1
            line += f"  interval {high / low - 1 if low else math.inf:8.1e} {inside}"
        print(line, f"{spent:6.2f} s", "flagged" if is_flagged else "", flush=True)
    print(worst)


if __name__ == "__main__":
    main()
