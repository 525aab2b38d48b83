"""What each stage of sampling buys: one run, with its stages counted one by one.

``python experiments/stages.py --out results/stages``.

Every step draws a quarter of the districts, a fifth of their schools, and 8 of the 40
pupils of each school drawn; a school's gradient is clipped and one pupil is protected.
The run, its work and its noise are the same on every curve. Only the accounting
differs: a stage that is not counted is taken to draw everybody.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from drawing import (
    draw_curve,
    logarithmic,
    new_figure,
    path_option,
    rounded,
    save,
    write_table,
)

import jaxdp_episodic as jde

DISTRICTS, SCHOOLS, PUPILS, ALL_PUPILS = 0.25, 0.2, 8, 40
STEPS, DELTA = 500, 1e-6
NOISES = np.round(np.geomspace(0.6, 8.0, 16), 6)
SHOWN_AT = 2.0
# Rates of the districts and of their schools, and pupils drawn, as the accounting has
# them; then the look of the curve and where its name stands.
COUNTED = {
    "no stage counted": ((1.0, 1.0, ALL_PUPILS), "#7f7f7f", ":", "x"),
    "districts counted": ((DISTRICTS, 1.0, ALL_PUPILS), "#D55E00", "-.", "s"),
    "districts and schools": ((DISTRICTS, SCHOOLS, ALL_PUPILS), "#009E73", "--", "^"),
    "districts, schools and pupils": (
        (DISTRICTS, SCHOOLS, PUPILS),
        "#0072B2",
        "-",
        "o",
    ),
}


def epsilon(
    districts: float, schools: float, pupils: int, noise: np.ndarray | float
) -> np.ndarray:
    """Epsilon of a pupil, by the exact method."""
    sampling = jde.MultistageSampling(
        jde.Poisson("district", sampling_probability=districts),
        jde.Poisson("school", sampling_probability=schools),
        jde.WithoutReplacement("pupil", size=pupils, population=ALL_PUPILS),
    )
    step = jde.GaussianStep(
        sampling, noise_multiplier=noise, clip_unit="school", privacy_unit="pupil"
    )
    return np.asarray(jde.epsilon(step, num_steps=STEPS, delta=DELTA))


def draw(found: dict[str, np.ndarray], at: dict[str, float], path: Path) -> None:
    """Writes the picture: curves, and between them what a stage buys at one noise."""
    figure, (axes,) = new_figure(size=(8, 4.8))
    for name, (_, *look) in COUNTED.items():
        draw_curve(axes, NOISES, found[name], look)
        axes.annotate(
            name,
            (NOISES[-1], found[name][-1]),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            annotation_clip=False,
        )
    values = list(at.values())
    for before, after in zip(values, values[1:], strict=False):
        axes.annotate(
            "",
            (SHOWN_AT, after),
            xytext=(SHOWN_AT, before),
            arrowprops={
                "arrowstyle": "->",
                "color": "0.25",
                "shrinkA": 4,
                "shrinkB": 4,
            },
        )
        axes.annotate(
            f"÷ {before / after:.2g}",
            (SHOWN_AT, np.sqrt(before * after)),
            xytext=(5, -2),
            textcoords="offset points",
            va="center",
            color="0.25",
        )
    logarithmic(axes, "x", [0.6, 1, 2, 4, 8])
    logarithmic(axes, "y")
    axes.set(
        title=f"The same run of {STEPS} steps, accounted with more and more stages",
        xlabel="noise multiplier (clip norms of a school)",
        ylabel=f"epsilon (nats) of a pupil at delta = {DELTA:g}",
    )
    save(figure, path)


def main() -> None:
    """Prints and writes the table, draws the picture."""
    folder = path_option(__doc__, "--out", "results/stages")
    found = {name: epsilon(*rates, NOISES) for name, (rates, *_) in COUNTED.items()}
    at = {
        name: float(epsilon(*rates, SHOWN_AT)) for name, (rates, *_) in COUNTED.items()
    }
    draw(found, at, folder / "stages.png")
    table = {
        "delta": DELTA,
        "steps": STEPS,
        "noise multipliers": NOISES.tolist(),
        "epsilon by the stages counted": {k: rounded(v) for k, v in found.items()},
        f"epsilon at noise multiplier {SHOWN_AT:g}": {
            k: float(f"{v:.5g}") for k, v in at.items()
        },
    }
    write_table(table, folder / "stages.json")
    for name, value in at.items():
        print(f"{name:32} epsilon {value:8.4g} at noise multiplier {SHOWN_AT:g}")
    print(f"Written to {folder}")


if __name__ == "__main__":
    main()
