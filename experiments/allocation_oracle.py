"""Delta of random allocation at random settings against oracles.

``python experiments/allocation_oracle.py --settings 500 --out FILE.csv`` draws random
settings: 1 to 10^4 epochs of 2 to 10^6 steps, noise 0.3 to 10, delta 1e-12 to 1e-2; a
third of them is one epoch under replace_one (delta from 1e-6). It adds a line to the
file for each setting that an oracle answers within ``--seconds``, and skips settings
that the file has.

Two oracles share no code and no method with the package:

* ``mellin``: Mellin transforms in 25 to 200 digits (`tests/oracles/allocation_epochs`),
  computed twice; whole epochs whose loss varies enough.
* ``characteristic``: one epoch under replace_one, by characteristic functions in double
  precision (`tests/oracles/allocation`), twice; error 1e-13 (g - 1) / delta.

A third one, ``laws``, answered the recorded settings from the 10,000th on, which have
little noise (0.15 to 0.3): `tests/oracles/allocation_densities` of commit 19b43618.

Epochs under add_remove are answered by certified upper bounds, flagged in the file.
``off`` says how far above the oracle they are; it must not be negative.
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

from oracles import allocation, allocation_epochs  # noqa: E402 - found by the path

# Largest number of steps, range of noise, and largest number of epochs.
RANGES = 1e6, 0.3, 10.0, 1e4
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
    most, low, high, often = RANGES
    steps = round(math.exp(rng.uniform(math.log(2), math.log(most))))
    noise = float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.4g}")
    epochs = round(math.exp(rng.uniform(0, math.log(often))))
    delta = 10 ** rng.uniform(-12, -2)
    if rng.integers(3):
        return "add_remove", steps, noise, epochs if rng.integers(4) else 1, delta
    return "replace_one", round(steps**0.5) + 1, noise, 1, delta**0.5


def true_delta(
    relation: str, steps: int, noise: float, epochs: int, epsilon: float
) -> tuple[str, float, float] | None:
    """An oracle's name, its delta and its relative error; None if no oracle answers."""
    if relation == "replace_one":
        one, other = (
            allocation.antipodal_of_many(steps, steps, 1 / noise, epsilon, fine)
            for fine in (1.0, 1.4)
        )
        error = abs(other / one - 1) + 1e-13 * math.expm1(epsilon) / one
        return ("characteristic", one, error) if error < 1e-4 else None
    parts = [allocation_epochs.Epochs(steps, epochs)]
    found = allocation_epochs.delta(parts, 1 / noise, epsilon, "remove")
    return None if found is None else ("mellin", float(found[0]), found[1])


def row(number: int, seed: int) -> dict[str, Any] | None:
    """One line of the file; None if no oracle answers, or epsilon is 0."""
    relation, steps, noise, epochs, delta = setting(number, seed)
    step = jde.GaussianStep(
        jde.RandomAllocation("unit", steps_per_epoch=steps),
        noise_multiplier=noise,
        neighboring_relation=relation,
    )
    begun = time.process_time()
    question: dict[str, Any] = {"num_steps": steps * epochs}
    epsilon = float(f"{float(jde.epsilon(step, delta=delta, **question)):.4g}")
    if epsilon <= 0:
        return None
    found, info = jde.delta(step, epsilon=epsilon, return_info=True, **question)
    spent = time.process_time() - begun
    true = true_delta(relation, steps, noise, epochs, epsilon)
    if true is None:
        return None
    name, value, error = true
    values = (number, relation, steps, noise, epochs, epsilon, f"{value:.15g}", name)
    values += (f"{error:.1e}", f"{found / value - 1:.1e}")
    values += (int(info.is_certified_bound), f"{spent:.2f}")
    return dict(zip(COLUMNS, values, strict=True))


def summary(rows: list[dict[str, Any]]) -> None:
    """Prints the errors of delta, by oracle."""
    for name in dict.fromkeys(one["oracle"] for one in rows):
        chosen = [one for one in rows if one["oracle"] == name]
        bounds = [float(one["off"]) for one in chosen if int(one["flagged"])]
        # Without the error of the oracle itself.
        off = [
            max(abs(float(one["off"])) - float(one["oracle_error"]), 0.0)
            for one in chosen
            if not int(one["flagged"])
        ]
        print(
            f"{name}: {len(off)} exact, off by at most {max(off, default=0):.1e}; "
            f"{len(bounds)} certified, above by {min(bounds, default=0):.1e} to "
            f"{max(bounds, default=0):.1e}"
        )


def _gave_up(*_: object) -> None:
    raise TimeoutError


def main() -> None:
    """Adds lines to the file, and prints them and the largest errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--settings", type=int, default=40)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    mpmath.mp.dps = 50
    signal.signal(signal.SIGALRM, _gave_up)
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        with options.out.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    known = {int(one["number"]) for one in rows}
    with options.out.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for number in sorted({*range(options.first, options.settings)} - known):
            signal.alarm(options.seconds)
            try:
                found = row(number, options.seed)
            except TimeoutError:
                print(f"{number}: the oracle takes too long")
                continue
            finally:
                signal.alarm(0)
            if found is not None:
                writer.writerow(found)
                file.flush()
                rows.append(found)
                print(*found.values(), flush=True)
    summary(rows)


if __name__ == "__main__":
    main()
