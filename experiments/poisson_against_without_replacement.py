"""Poisson sampling against drawing without replacement: the noise that each needs.

``python experiments/poisson_against_without_replacement.py --out results/NAME``.

A step takes part of 10,000 examples, by a coin for each or as many as that is on
average, drawn without replacement. For every share drawn: the smallest noise multiplier
that keeps 500 steps within the target, under both neighbouring relations.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from drawing import draw_curve, logarithmic, new_figure, rounded, save, write_table

import jaxdp_episodic as jde

EXAMPLES, STEPS, EPSILON, DELTA = 10_000, 500, 2.0, 1e-6
SIZES = np.unique(np.rint(np.geomspace(10, EXAMPLES, 19))).astype(int)
RATES = SIZES / EXAMPLES
SCHEMES = {
    "Poisson": ("#0072B2", "-", "o"),
    "without replacement": ("#D55E00", "--", "^"),
}
RELATIONS = {
    "add_remove": "One example more or less",
    "replace_one": "One example replaced by another",
}


def noise(scheme: str, relation: str) -> np.ndarray:
    """The smallest noise multiplier at every share, by the exact method."""
    if scheme == "Poisson":
        sampling = jde.Poisson("example", sampling_probability=RATES)
    else:
        sampling = jde.WithoutReplacement("example", size=SIZES, population=EXAMPLES)
    step = jde.GaussianStep(
        sampling, noise_multiplier=1.0, neighboring_relation=relation
    )
    return np.asarray(
        jde.calibrate_noise_multiplier(
            step, epsilon=EPSILON, delta=DELTA, num_steps=STEPS
        )
    )


def draw(found: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    """Writes the picture."""
    figure, panels = new_figure(2, size=(10.5, 4.6), sharey=True)
    for axes, (relation, title) in zip(panels, RELATIONS.items(), strict=True):
        for name, look in SCHEMES.items():
            draw_curve(axes, RATES, found[relation][name], look, label=name)
        logarithmic(axes, "x", [0.001, 0.01, 0.1, 1])
        logarithmic(axes, "y", [0.5, 1, 2, 5, 10, 20, 50, 100])
        axes.set(title=title, xlabel="share of the examples in a step (mean)")
    panels[0].set_ylabel(
        f"noise multiplier (clip norms) for\nepsilon = {EPSILON:g} nats, "
        f"delta = {DELTA:g}, {STEPS} steps"
    )
    panels[0].legend(frameon=False, loc="upper left")
    save(figure, path)


def main() -> None:
    """Prints and writes the table, draws the picture."""
    name = "poisson_against_without_replacement"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results") / name)
    folder = parser.parse_args().out
    found = {
        relation: {scheme: noise(scheme, relation) for scheme in SCHEMES}
        for relation in RELATIONS
    }
    draw(found, folder / f"{name}.png")
    table = {
        "examples": EXAMPLES,
        "steps": STEPS,
        "epsilon": EPSILON,
        "delta": DELTA,
        "share drawn": RATES.tolist(),
        "noise multiplier": {
            relation: {scheme: rounded(values, 5) for scheme, values in column.items()}
            for relation, column in found.items()
        },
    }
    write_table(table, folder / f"{name}.json")
    print(f"{'':12}" + "".join(f"{r + ', ' + s:>34}" for r in found for s in SCHEMES))
    for place in range(0, SIZES.size, 3):
        cells = (f"{found[r][s][place]:34.4g}" for r in found for s in SCHEMES)
        print(f"{RATES[place]:12.4g}" + "".join(cells))
    print(f"Written to {folder}")


if __name__ == "__main__":
    main()
