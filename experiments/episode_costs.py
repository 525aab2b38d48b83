"""What the episodes of a meta-learning run cost in privacy.

Prints two tables and draws a picture:
``python experiments/episode_costs.py --out results/episode_costs``.

The first run is 5-way few-shot learning on Omniglot's 1,623 characters with 20 drawings
each: about 65 episodes a step, 4 drawings of every character in them (1 to learn from,
3 to be tested on), each episode's gradient clipped. The same episodes can be drawn in
two ways, and what they cost differs. The second run learns from schools of unequal
size.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from drawing import new_figure, path_option, save

import jaxdp_episodic as jde

NUM_CLASSES, WAYS, EPISODES_A_STEP = 1_623, 5, 65
DRAWN, DRAWINGS = 4, 20  # of the drawings of a character: shots + queries, and all
NOISE, DELTA, RUN = 2.0, 1e-5, 300
STEPS = np.array([10, 30, 100, 300, 700, 1_500, 3_000, 5_000])
TARGETS = np.array([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0])

# 160 schools: pupils in each, and how many schools of that size there are.
SCHOOL_SIZES = np.repeat(
    [20, 35, 60, 90, 140, 220, 320, 430], [9, 14, 22, 30, 34, 28, 15, 8]
)


class Cost(NamedTuple):
    """What one design costs; every array is (8,)."""

    title: str
    color: str
    marker: str
    drawing: np.ndarray  # epsilon of one drawing, at STEPS
    character: np.ndarray  # epsilon of one character, at STEPS
    noise: np.ndarray  # noise multiplier that a drawing needs for TARGETS


def designs() -> dict[str, jde.GroupedClasses]:
    """Returns two draws of 65 five-way episodes a step (the second: on average)."""
    pool = {
        "num_classes": NUM_CLASSES,
        "ways": WAYS,
        "examples": jde.WithoutReplacement("example", size=DRAWN, population=DRAWINGS),
    }
    fixed = jde.WithoutReplacement("episode", size=EPISODES_A_STEP)
    rate = EPISODES_A_STEP / (NUM_CLASSES // WAYS)
    coins = jde.Poisson("episode", sampling_probability=rate)
    return {
        "exactly 65, without replacement": jde.GroupedClasses(episodes=fixed, **pool),
        "each by its own coin (Poisson)": jde.GroupedClasses(episodes=coins, **pool),
    }


def cost(title: str, sampling: jde.GroupedClasses, color: str, marker: str) -> Cost:
    """Returns epsilons at both levels along the run, and noise for the targets."""

    def epsilon(privacy_unit: str) -> np.ndarray:
        step = jde.GaussianStep(
            sampling, noise_multiplier=NOISE, privacy_unit=privacy_unit
        )
        return np.asarray(jde.epsilon(step, num_steps=STEPS, delta=DELTA))

    step = jde.GaussianStep(sampling, noise_multiplier=NOISE)
    noise = jde.calibrate_noise_multiplier(
        step, epsilon=TARGETS, delta=DELTA, num_steps=RUN
    )
    return Cost(
        title, color, marker, epsilon("example"), epsilon("class"), np.asarray(noise)
    )


def show_designs(costs: list[Cost]) -> None:
    """Prints the first table."""
    at_run, at_target = STEPS == RUN, TARGETS == 2
    print(
        f"\nOmniglot, {WAYS}-way: {NUM_CLASSES:,} characters with {DRAWINGS} drawings "
        f"each, {EPISODES_A_STEP} episodes a step, {RUN} steps,\nnoise {NOISE:g} times "
        f"the clip norm of an episode's gradient, delta = {DELTA:g}.\n"
    )
    show_table(
        ("episodes of a step", "one drawing", "one character", "noise for eps = 2"),
        [
            (
                c.title,
                f"eps {c.drawing[at_run].item():.2f}",
                f"eps {c.character[at_run].item():.2f}",
                f"{c.noise[at_target].item():.2f}",
            )
            for c in costs
        ],
    )


def school_epsilon(pupils: np.ndarray) -> float:
    """Returns epsilon of the worst-off pupil after 1,000 steps."""
    step = jde.GaussianStep(
        jde.MultistageSampling(
            jde.Poisson("school", sampling_probability=0.05),
            jde.WithoutReplacement("pupil", size=8),
        ),
        noise_multiplier=NOISE,
        clip_unit="school",
        privacy_unit="pupil",
        population=jde.Population.from_sizes(pupils, level_names=("school", "pupil")),
    )
    return float(jde.epsilon(step, num_steps=1_000, delta=DELTA))


def show_schools() -> None:
    """Prints the second table: the smallest school sets the price."""
    real = SCHOOL_SIZES
    mean = np.full(len(real), int(real.mean()))
    print(
        f"\n{len(real)} schools with {real.sum():,} pupils: every step draws each "
        "school with probability 0.05,\nand 8 pupils of each drawn school; 1,000 steps."
        " The guarantee is the worst-off pupil's.\n"
    )
    show_table(
        ("sizes of the schools", "smallest", "largest", "one pupil"),
        [
            (
                title,
                *(f"{n}" for n in (s.min(), s.max())),
                f"eps {school_epsilon(s):.2f}",
            )
            for title, s in (("all alike (the mean)", mean), ("as they are", real))
        ],
    )


def show_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Prints aligned columns, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, tuple("-" * width for width in widths), *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(w) for cell, w in others)]
        print("  " + "   ".join(cells))


def draw(costs: list[Cost], path: Path) -> None:
    """Writes the picture: epsilon along the run, and noise for a target epsilon."""
    figure, (left, right) = new_figure(2, size=(10.5, 4.6), width_ratios=(1.25, 1))
    _draw_run(left, costs)
    _draw_noise(right, costs)
    save(figure, path, dpi=160)


def _draw_run(axes, costs: list[Cost]) -> None:
    """Epsilon against steps: colour and marker are the design, dashes the level."""
    for c in costs:
        style = {"color": c.color, "marker": c.marker, "markersize": 5.5}
        axes.plot(STEPS, c.character, linestyle="--", markerfacecolor="white", **style)
        axes.plot(STEPS, c.drawing, linestyle="-", label=c.title, **style)
    for name, values in (
        ("one character", costs[-1].character),
        ("one drawing", costs[-1].drawing),
    ):
        axes.annotate(
            name,
            (STEPS[-1], values[-1]),
            xytext=(6, -1),
            textcoords="offset points",
            va="top",
        )
    axes.set(
        title=f"{EPISODES_A_STEP} episodes a step, noise multiplier {NOISE:g}",
        xscale="log",
        yscale="log",
        xlim=(8, 30_000),
        xlabel="training steps",
        ylabel=f"epsilon (nats) at delta = {DELTA:g}",
    )
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(loc="upper left", frameon=False, borderaxespad=0.2)


def _draw_noise(axes, costs: list[Cost]) -> None:
    """Noise that one drawing needs, against the target epsilon."""
    for c in costs:
        axes.plot(TARGETS, c.noise, color=c.color, marker=c.marker, markersize=5.5)
    axes.set(
        title=f"Noise that {RUN} steps need, for one drawing",
        ylim=(0.9, 14),
        xscale="log",
        yscale="log",
        xlabel=f"target epsilon (nats) at delta = {DELTA:g}",
        ylabel="noise multiplier (clip norms)",
    )
    axes.set_xticks(TARGETS[[0, 1, 3, 5, 7]], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_yticks([1, 2, 5, 10], minor=False)
    axes.set_yticks([], minor=True)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")


def main() -> None:
    """Prints the tables and writes the picture."""
    folder = path_option(__doc__, "--out", "results/episode_costs")
    print(
        "The kernels are compiled first, which takes most of the time ...", flush=True
    )
    looks = (("#D55E00", "s"), ("#0072B2", "o"))
    costs = [
        cost(title, sampling, *look)
        for (title, sampling), look in zip(designs().items(), looks, strict=True)
    ]
    show_designs(costs)
    show_schools()
    picture = folder / "episodes.png"
    draw(costs, picture)
    print(f"\nThe picture: {picture}")


if __name__ == "__main__":
    main()
