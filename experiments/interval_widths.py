"""How far apart the certified ends of epsilon are, over random settings.

``python experiments/interval_widths.py`` draws 1,000 settings in the usual ranges
(``--settings``, ``--seed``), prints quantiles of the ends' relative distance and of the
CPU time of a setting, and the settings whose ends are further apart than 1e-4, of which
there should be none: its exit code is then 1.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

import jaxdp_episodic as jde

GOAL = 1e-4
QUANTILES = (0.1, 0.5, 0.9, 0.99, 1.0)
# Epsilons outside of it nobody publishes.
SMALLEST, LARGEST = 1e-3, 100.0


def random_setting(rng: np.random.Generator) -> tuple[jde.GaussianStep, int, float]:
    """A step, its number and a delta of at least 1e-12."""
    rate = 10 ** rng.uniform(-4, 0)
    tasks = jde.Poisson("task", sampling_probability=rate)
    if rng.random() < 0.3:
        size = max(round(1_000 * rate), 1)
        tasks = jde.WithoutReplacement("task", size=size, population=1_000)
    levels, units = [tasks], {}
    if rng.random() < 0.3:
        inner = jde.WithoutReplacement(
            "example", size=rng.integers(1, 10), population=10
        )
        levels.append(inner)
        units = {
            "privacy_unit": "example",
            "clip_unit": rng.choice(["task", "example"]).item(),
        }
    step = jde.GaussianStep(
        jde.MultistageSampling(*levels),
        noise_multiplier=10 ** rng.uniform(-0.3, 1),
        neighboring_relation=rng.choice(
            ["add_remove", "replace_one", "zero_out"]
        ).item(),
        **units,
    )
    return step, int(10 ** rng.uniform(0, 5)), 10 ** rng.uniform(-12, -3)


def main() -> int:
    """Runs the experiment; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    widths, seconds, wide = [], [], []
    while len(widths) < options.settings:
        step, num_steps, delta = random_setting(rng)
        begin = time.process_time()
        low, high = jde.epsilon_interval(step, delta=delta, num_steps=num_steps)
        spent = time.process_time() - begin
        if not SMALLEST <= high <= LARGEST:
            continue
        widths.append((high - low) / high)
        seconds.append(spent)
        if widths[-1] > GOAL:
            wide.append((widths[-1], low, high, step, num_steps, delta))
    print("quantile        relative width  CPU seconds")
    for q, width, spent in zip(
        QUANTILES,
        np.quantile(widths, QUANTILES),
        np.quantile(seconds, QUANTILES),
        strict=True,
    ):
        print(f"{q:<15} {width:<15.2e} {spent:.3f}")
    print(f"mean            {np.mean(widths):<15.2e} {np.mean(seconds):.3f}")
    for row in wide:
        print(*row)
    return int(bool(wide))


if __name__ == "__main__":
    sys.exit(main())
