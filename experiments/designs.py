"""Ways to draw the episodes of a step, at equal work: what each costs in privacy.

``python experiments/designs.py --out results/designs``.

Every design processes, on average, 64 episodes of 5 classes a step, 4 of the 20
examples of each class, for 300 steps, out of the same 1,800 classes; each episode's
gradient is clipped and one example is protected.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from drawing import draw_curve, new_figure, save, write_table

import jaxdp_episodic as jde

CLASSES, WAYS, EPISODES, SHOTS, EXAMPLES = 1_800, 5, 64, 4, 20
STEPS, DELTA = 300, 1e-5
NOISES = np.round(np.geomspace(0.6, 5.0, 16), 6)
TARGETS = (2.0, 8.0)
# Designs whose epsilons agree share a curve of the picture, under one name.
CURVES = {
    "independent episodes": ("independent episodes", "#999999", ":", "x"),
    "fresh episodes, without replacement": (
        "without replacement (fixed tasks or fresh\nepisodes), classes by Poisson",
        "#D55E00",
        "--",
        "^",
    ),
    "fresh episodes, Poisson": (
        "Poisson (fixed tasks or fresh episodes)",
        "#0072B2",
        "-",
        "o",
    ),
}


def designs() -> dict[str, jde.GaussianStep]:
    """The designs, each at all ``NOISES``."""
    tasks = CLASSES // WAYS
    rate = EPISODES / tasks
    of_class = jde.WithoutReplacement("example", size=SHOTS, population=EXAMPLES)
    of_task = jde.WithoutReplacement(
        "example", size=WAYS * SHOTS, population=WAYS * EXAMPLES
    )
    pool = {"num_classes": CLASSES, "ways": WAYS, "examples": of_class}
    episode = jde.MultistageSampling(
        jde.WithoutReplacement("class", size=WAYS, population=CLASSES), of_class
    )
    samplings = {
        "fixed tasks, Poisson": jde.MultistageSampling(
            jde.Poisson("task", sampling_probability=rate), of_task
        ),
        "fresh episodes, Poisson": jde.GroupedClasses(
            episodes=jde.Poisson("episode", sampling_probability=rate), **pool
        ),
        "fixed tasks, without replacement": jde.MultistageSampling(
            jde.WithoutReplacement("task", size=EPISODES, population=tasks), of_task
        ),
        "fresh episodes, without replacement": jde.GroupedClasses(
            episodes=jde.WithoutReplacement("episode", size=EPISODES), **pool
        ),
        "classes by Poisson, then grouped": jde.GroupedClasses(
            classes=jde.Poisson("class", sampling_probability=rate), **pool
        ),
        "independent episodes": jde.IndependentEpisodes(episode, num_episodes=EPISODES),
    }
    return {
        name: jde.GaussianStep(
            sampling,
            noise_multiplier=NOISES,
            clip_unit="task" if name.startswith("fixed") else "episode",
        )
        for name, sampling in samplings.items()
    }


def noise_for(target: float, epsilon: np.ndarray) -> float:
    """Noise at a target, between the noises of the picture; NaN outside of them."""
    inner = (-np.log(target), -np.log(epsilon), np.log(NOISES))
    return float(np.exp(np.interp(*inner, left=np.nan, right=np.nan)))


def draw(found: dict[str, np.ndarray], path: Path) -> None:
    """Writes the picture."""
    figure, (axes,) = new_figure(size=(8, 4.8))
    for name, (label, *look) in CURVES.items():
        draw_curve(axes, NOISES, found[name], look, label=label)
    axes.set(
        title=f"{EPISODES} episodes of {WAYS} classes a step, {STEPS} steps, "
        f"{CLASSES:,} classes",
        xscale="log",
        yscale="log",
        xlabel="noise multiplier (clip norms of an episode)",
        ylabel=f"epsilon (nats) of an example at delta = {DELTA:g}",
    )
    axes.set_xticks([0.6, 1, 2, 5])
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False, loc="upper right")
    save(figure, path)


def main() -> None:
    """Prints and writes the table, draws the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("results/designs"), metavar="DIR"
    )
    parser.add_argument("--method", choices=("exact", "rdp"), default="exact")
    arguments = parser.parse_args()
    folder = arguments.out
    found = {
        name: np.asarray(
            jde.epsilon(step, num_steps=STEPS, delta=DELTA, method=arguments.method)
        )
        for name, step in designs().items()
    }
    draw(found, folder / "designs.png")
    table = {
        "method": arguments.method,
        "delta": DELTA,
        "steps": STEPS,
        "noise multipliers": NOISES.tolist(),
        "epsilon": {k: [float(f"{e:.7g}") for e in v] for k, v in found.items()},
    }
    write_table(table, folder / "designs.json")
    print(f"Noise for epsilon {TARGETS[0]:g} and {TARGETS[1]:g}, {arguments.method}:")
    for name, epsilon in found.items():
        cells = "".join(f"{noise_for(t, epsilon):9.3f}" for t in TARGETS)
        print(f"  {name:38}{cells}")
    print(f"Written to {folder}")


if __name__ == "__main__":
    main()
