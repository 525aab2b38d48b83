"""What the freedom to choose costs: the table of docs/adaptive.md.

    python experiments/adaptive_table.py

Each menu is one draw at several noises. Prices and blocks are those that a target
gives; the ratio is the worst strategy's epsilon over that of the costliest option alone
with the same budget. Minutes on one core.
"""

from __future__ import annotations

import jaxdp_episodic as jde

# Rate, least noise, factors of it, epsilon; delta is 1e-5.
MENUS = (
    (0.1, 1.75, (1.0, 1.5), 2.0),
    (0.1, 1.75, (1.0, 2.0), 2.0),
    (0.1, 1.75, (1.0, 1.5, 2.2), 2.0),
    (0.1, 2.93, (1.0, 2.0), 1.0),
    (0.1, 0.80, (1.0, 2.0), 8.0),
    (0.01, 0.96, (1.0, 2.0), 2.0),
    (0.01, 0.71, (1.0, 2.0), 2.0),
    (0.5, 7.19, (1.0, 2.0), 2.0),
    (1.0, 14.1, (1.0, 2.0), 2.0),
)
DELTA = 1e-5


def menu(
    rate: float, noise: float, factors: tuple[float, ...]
) -> dict[str, jde.GaussianStep]:
    """The options, by their noise."""
    draw = jde.Poisson("example", sampling_probability=rate)
    return {
        f"{noise * factor:g}": jde.GaussianStep(draw, noise_multiplier=noise * factor)
        for factor in factors
    }


def main() -> None:
    """Prints the table."""
    print("| rate | noise | target | steps alone | steps of each | ratio | held back |")
    print("|---|---|---|---|---|---|---|")
    for rate, noise, factors, epsilon in MENUS:
        options = menu(rate, noise, factors)
        alone = [
            int(jde.calibrate_num_steps(step, epsilon=epsilon, delta=DELTA))
            for step in options.values()
        ]
        run = jde.AdaptiveRun(options, epsilon=epsilon, delta=DELTA)
        cost = run.cost_of_adaptivity(delta=DELTA)
        cells = (
            f"{rate:g}",
            ", ".join(options),
            f"{epsilon:g}",
            ", ".join(f"{n:,}" for n in alone),
            ", ".join(f"{n:,}" for n in cost.numbers.values()),
            f"{cost.ratio:.3f}",
            f"{100 * cost.held_back:.1f} %",
        )
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
