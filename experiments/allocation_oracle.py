"""Exact delta of random allocation at random settings against oracles.

``python experiments/allocation_oracle.py --settings 500 --seed 0 --out FILE.csv`` takes
random epochs (2 to 10^6 steps, noise 0.3 to 10, 1 to 10^4 of them, delta 1e-12 to 1e-2)
and a third of the times one epoch under replace_one (delta from 1e-6), and adds a line
to the file for each; lines that it has are not computed again. ``--quick`` leaves out
settings that need either of the latter two of these oracles, or more than
``--seconds`` (those are named); ``--first 500`` begins with the 500th. From the
10,000th on there is little noise, 0.15 to 0.3 (2 to 2,000 steps, 1 to 30 epochs).

Five oracles, which share no code and no method with the package:

* ``mellin``: Mellin transforms in 25 to 200 digits (`tests/oracles/allocation_epochs`),
  computed twice; whole epochs whose loss varies enough.
* ``laws``: the same at noise below 0.3, where that takes minutes, by distributions of
  sums that are added up, in double precision (`tests/oracles/allocation_densities`),
  twice;
* ``characteristic``: one epoch under replace_one, by characteristic functions in double
  precision (`tests/oracles/allocation`), twice: right to 1e-13 (g - 1) / delta.
* ``contour``: one epoch, below, in 50 digits.
* ``interval``: where none of them serves the package's own certified ends, which is
  no oracle: whether exact delta is inside, and by how much they differ.

The contour: with X the sum of t
lognormal terms, all of them positive, ``E(x - X)_+`` is the sum over a lattice of
``K(p)^t e^{px} / p²`` on a vertical line (a Fourier series of period L > x: what is
folded in from below is 0, and from above it is smaller by ``e^{-Re(p) L}``), in 50
digits, as 35 and more cancel. ``E(X - x)_+`` is that and the mean less x.
"""

from __future__ import annotations

import argparse
import csv
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import mpmath
import numpy as np

import jaxdp_episodic as jde

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from oracles import allocation, allocation_densities, allocation_epochs  # noqa: E402 - found by the path

DIGITS, NEGLIGIBLE = 50, 75.0  # nats that aliases are smaller by
MOST_TERMS = 400
# Ranges of steps, noise and epochs; and from which number on the others.
RANGES, LITTLE_NOISE = ((1e6, 0.3, 10.0, 1e4), (2e3, 0.15, 0.3, 30.0)), 10_000


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


COLUMNS: tuple[str, ...] = (
    "number",
    "relation",
    "steps",
    "noise",
    "epochs",
    "epsilon",
    "delta",
    "oracle",
    "oracle_error",
    "off",
    "flagged",
    "seconds",
)


def setting(number: int, seed: int) -> tuple[str, int, float, int, float]:
    """Relation, steps, noise, epochs and delta of one random setting."""
    rng = np.random.default_rng([seed, number])
    most, low, high, often = RANGES[number >= LITTLE_NOISE]
    steps = round(math.exp(rng.uniform(math.log(2), math.log(most))))
    noise = float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.4g}")
    epochs = round(math.exp(rng.uniform(0, math.log(often))))
    delta = 10 ** rng.uniform(-12, -2)
    if rng.integers(3):
        return "add_remove", steps, noise, epochs if rng.integers(4) else 1, delta
    return "replace_one", round(steps**0.5) + 1, noise, 1, delta**0.5


def quick_delta(
    relation: str, steps: int, noise: float, epochs: int, epsilon: float
) -> tuple[str, float, float] | None:
    """Which oracle, its delta, and its relative error; None where neither serves."""
    if relation == "replace_one":
        one, other = (
            allocation.antipodal_of_many(steps, steps, 1 / noise, epsilon, fine)
            for fine in (1.0, 1.4)
        )
        error = abs(other / one - 1) + 1e-13 * math.expm1(epsilon) / one
        return ("characteristic", one, error) if error < 1e-4 else None
    if noise < 0.3:
        dist = allocation_densities.delta(steps, 1 / noise, epochs, epsilon)
        return None if dist is None else ("laws", *dist)
    parts = [allocation_epochs.Epochs(steps, epochs)]
    found = allocation_epochs.delta(parts, 1 / noise, epsilon, "remove")
    return None if found is None else ("mellin", float(found[0]), found[1])


def slow_delta(
    step: jde.GaussianStep, epochs: int, epsilon: float, about: float
) -> tuple[str, float, float]:
    """The same by the other two; ``about`` is near to delta."""
    drawn: Any = step.design
    steps, noise = int(drawn.steps_per_epoch), float(step.noise_multiplier)
    if epochs == 1 and step.neighboring_relation == "add_remove":
        value = oracle(steps, noise, epsilon, about)
        if value is not None:
            return "contour", float(value), 1e-9
    low, high = jde.delta_interval(step, epsilon=epsilon, num_steps=steps * epochs)
    middle = math.sqrt(low * high)
    return "interval", middle, high / middle - 1 if middle else math.inf


def row(number: int, seed: int, *, quick: bool) -> dict[str, Any]:
    """One line of the file; empty where there is none, or epsilon is 0."""
    relation, steps, noise, epochs, delta = setting(number, seed)
    drawn = jde.RandomAllocation("unit", steps_per_epoch=steps)
    step = jde.GaussianStep(
        drawn, noise_multiplier=noise, neighboring_relation=relation
    )
    begun = time.process_time()
    asked: dict[str, Any] = {"num_steps": steps * epochs}
    epsilon = float(f"{float(jde.epsilon(step, delta=delta, **asked)):.4g}")
    if epsilon <= 0:
        return {}
    found, info = jde.delta(step, epsilon=epsilon, return_info=True, **asked)
    spent = time.process_time() - begun
    true = quick_delta(relation, steps, noise, epochs, epsilon)
    if true is None:
        if quick:
            return {}
        true = slow_delta(step, epochs, epsilon, float(found))
    name, value, error = true
    values = (number, relation, steps, noise, epochs, epsilon, f"{value:.15g}", name)
    values += (f"{error:.1e}", f"{found / value - 1:.1e}")
    values += (int(info.is_certified_bound), f"{spent:.2f}")
    return dict(zip(COLUMNS, values, strict=True))


def summary(rows: list[dict[str, Any]]) -> None:
    """Prints how far exact delta was off, by oracle."""
    for name in ("mellin", "laws", "characteristic", "contour", "interval"):
        chosen = [one for one in rows if one["oracle"] == name]
        exact = [one for one in chosen if not int(one["flagged"])]
        # Only what the oracle itself does not explain.
        off = [
            max(abs(float(one["off"])) - float(one["oracle_error"]), 0.0)
            for one in exact
        ]
        ends = [float(one["off"]) for one in chosen if int(one["flagged"])]
        print(
            f"{name}: {len(chosen)} settings, exact in {len(exact)}, off by at most "
            f"{max(off, default=0):.1e}; flagged ends from {min(ends, default=0):.1e}"
        )


def _gave_up(*_: object) -> None:
    raise TimeoutError


def main() -> None:
    """Adds lines to the file, prints them, and what was worst."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--settings", type=int, default=40)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    mpmath.mp.dps = DIGITS
    signal.signal(signal.SIGALRM, _gave_up)
    rows: list[dict[str, Any]] = []
    if asked.out.exists():
        with asked.out.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    known = {int(one["number"]) for one in rows}
    with asked.out.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for number in range(asked.first, asked.settings):
            if number in known:
                continue
            signal.alarm(asked.seconds if asked.quick else 0)
            try:
                found = row(number, asked.seed, quick=asked.quick)
            except TimeoutError:
                print(f"{number}: the oracle takes too long")
                continue
            finally:
                signal.alarm(0)
            if not found:
                continue
            writer.writerow(found)
            file.flush()
            rows.append(found)
            print(*found.values(), flush=True)
    summary(rows)


if __name__ == "__main__":
    main()
