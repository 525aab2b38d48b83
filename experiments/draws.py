"""Which draw? Coins, fixed size, epochs in random bins, epochs shuffled.

``python experiments/draws.py --out results/draws``.

Every unit is used as often, in one of t steps on average. Epsilon of all four, for
examples that are clipped one by one and for a fifth of the examples of an episode; how
often a unit is seen in ten epochs; and how much batches vary in size.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np
from drawing import logarithmic, new_figure, rounded, save, write_table

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.numerics.binomial import log_binomial_mass

NOISE, DELTA = 1.0, 1e-6
STEPS = np.array([5, 10, 20, 50, 100, 200, 500, 1_000])
EXAMPLE_EPOCHS, EPISODE_EPOCHS = 10, 10
BATCH = 200  # mean size, for what is said of sizes
MEANS, SIZE_COLORS = (5, 20, 200), ("#D55E00", "#009E73", "#0072B2")
EXAMPLES, DRAWN = 20, 4  # of a class; so the inner rate is 1/5
STYLES = {
    "coins (Poisson)": ("#0072B2", "-", "o"),
    "fixed size (without replacement)": ("#D55E00", "--", "^"),
    "epochs, random bins (RandomAllocation)": ("#009E73", "-.", "s"),
    "epochs, shuffled (ShuffledEpochs)": ("#CC79A7", ":", "D"),
}
COINS, FIXED, BINS, SHUFFLED = STYLES


def scheme(draw: str, name: str, steps: int) -> jde.Poisson:
    """The scheme that takes a unit into one of so many steps, on average."""
    schemes = {
        COINS: lambda: jde.Poisson(name, sampling_probability=1 / steps),
        FIXED: lambda: jde.WithoutReplacement(name, size=BATCH),
        BINS: lambda: jde.RandomAllocation(name, steps_per_epoch=steps),
        SHUFFLED: lambda: jde.ShuffledEpochs(name, steps_per_epoch=steps),
    }
    return schemes[draw]()


def examples(draw: str, steps: int) -> jde.GaussianStep:
    """Examples drawn, and clipped, one by one; 200 a step."""
    drawn = scheme(draw, "example", steps)
    if draw == FIXED:
        drawn = jde.WithoutReplacement("example", size=BATCH, population=BATCH * steps)
    return jde.GaussianStep(drawn, noise_multiplier=NOISE)


def episodes(draw: str, steps: int) -> jde.GaussianStep:
    """Five-way episodes of a partition of all classes; 200 a step."""
    below = jde.WithoutReplacement("example", size=DRAWN, population=EXAMPLES)
    sampling = jde.GroupedClasses(
        num_classes=5 * BATCH * steps,
        ways=5,
        episodes=scheme(draw, "episode", steps),
        examples=below,
    )
    return jde.GaussianStep(sampling, noise_multiplier=NOISE)


def epsilons(make, epochs: int) -> dict[str, list[float]]:
    """Epsilon of each draw over so many epochs, for every length of an epoch."""
    return {
        draw: rounded(
            [
                jde.epsilon(make(draw, int(t)), num_steps=epochs * int(t), delta=DELTA)
                for t in STEPS
            ],
            5,
        )
        for draw in STYLES
    }


def one_epoch(steps: int = 10) -> dict[str, dict[str, float]]:
    """Coins and bins in one epoch: examples, and examples that are replaced."""
    result = {}
    for draw in (COINS, BINS):
        drawn = scheme(draw, "example", steps)
        step = jde.GaussianStep(drawn, noise_multiplier=NOISE)
        other = dataclasses.replace(step, neighboring_relation="replace_one")
        epsilon = jde.epsilon(step, num_steps=steps, delta=DELTA)
        delta = jde.delta(other, num_steps=steps, epsilon=1.0)
        result[draw] = {
            "epsilon": float(f"{epsilon:.4f}"),
            "delta at epsilon 1, one replaced": float(f"{delta:.4g}"),
        }
    return result


def binomial(trials: int, rate: float, most: int) -> np.ndarray:
    """Chances of 0 to ``most`` successes."""
    number = np.arange(most + 1.0)
    return np.exp(log_binomial_mass(number, np.asarray(trials), np.asarray(rate)))


def sizes(steps: int, units: int) -> dict[str, float]:
    """The size of a batch by coins or into bins: both are binomial."""
    mass = binomial(units, 1 / steps, units)
    below = np.cumsum(mass)
    low, high = np.searchsorted(below, [1e-3, 1 - 1e-3])
    mean = units / steps
    return {
        "mean": mean,
        "one in a thousand is below": int(low),
        "one in a thousand is above": int(high),
        "chance of an empty batch": float(f"{mass[0]:.3g}"),
        "rows of memory per unit": float(f"{rows(mean) / mean:.3g}"),
    }


def rows(mean: float) -> int:
    """Rows that the trainer keeps for almost any draw."""
    return int(np.ceil(mean + 3 * np.sqrt(mean) + 1))


def draw_figure(costs: list[dict[str, list[float]]], seen, path: Path) -> None:
    """Writes the picture: two panels of epsilon, one of how often a unit is seen."""
    figure, panels = new_figure(3, size=(13.5, 4.4))
    titles = (
        f"Examples, {EXAMPLE_EPOCHS} epochs",
        f"A fifth of an episode's examples, {EPISODE_EPOCHS} epoch"
        + ("s" if EPISODE_EPOCHS > 1 else ""),
    )
    for axes, title, found in zip(panels, titles, costs, strict=False):
        for name, (color, line, marker) in STYLES.items():
            style = {"color": color, "linestyle": line, "marker": marker}
            axes.plot(STEPS, found[name], **style, markerfacecolor="white", label=name)
        logarithmic(axes, "x", [5, 10, 50, 200, 1_000])
        logarithmic(axes, "y", [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50])
        axes.set(title=title, xlabel="steps in an epoch")
    panels[0].set_ylabel(f"epsilon (nats), delta = {DELTA:g}, noise {NOISE:g}")
    panels[0].legend(frameon=False, fontsize=8.5, loc="lower left")
    number = np.arange(len(seen))
    panels[2].bar(number, seen, color=STYLES[COINS][0], label="coins, fixed size")
    panels[2].bar(
        [EXAMPLE_EPOCHS],
        [1.0],
        width=0.5,
        facecolor="none",
        edgecolor=STYLES[BINS][0],
        hatch="//",
        label="epochs",
    )
    panels[2].set(
        title="How often a unit is seen in ten epochs",
        xlabel="steps with the unit (epochs of 100 steps)",
        ylabel="share of the units",
    )
    panels[2].legend(frameon=False)
    save(figure, path)


def draw_sizes(path: Path) -> None:
    """Writes the second picture: sizes of batches, memory, empty batches."""
    figure, (sizes_axes, memory, empty) = new_figure(3, size=(13.5, 3.9))
    for mean, color, line in zip(MEANS, SIZE_COLORS, ("-", "--", "-."), strict=True):
        # Of 100 steps; where the size is far from the mean there is nothing to see.
        most = int(2.6 * mean)
        mass = binomial(100 * mean, 0.01, most)
        sizes_axes.plot(
            np.arange(most + 1) / mean,
            mass * mean,
            color=color,
            linestyle=line,
            marker="o" if mean < 50 else None,
            markersize=4,
            label=f"a mean of {mean} units",
        )
    sizes_axes.axvline(1.0, color="0.35", linewidth=1.2, linestyle=":")
    sizes_axes.annotate(
        "fixed size,\nshuffled",
        (1.0, 5.6),
        xytext=(0.93, 5.6),
        ha="right",
        va="top",
        fontsize=9,
    )
    sizes_axes.set(
        title="Sizes of batches, by coins and in bins",
        xlabel="units in a batch, relative to the mean",
        ylabel="density",
        xlim=(0, 2.6),
        ylim=(0, 6),
    )
    sizes_axes.legend(frameon=False, loc="upper right")
    mean = np.unique(np.round(np.geomspace(2, 1_000, 120)))
    memory.plot(mean, [rows(m) / m for m in mean], color=STYLES[COINS][0])
    memory.axhline(1.0, color="0.35", linewidth=1.2, linestyle=":")
    memory.set(
        title="Memory",
        xlabel="mean number of units in a batch",
        ylabel="rows kept for each unit",
        ylim=(0.8, 4.2),
    )
    logarithmic(memory, "x", [2, 5, 20, 100, 1_000])
    few = np.arange(1, 26)
    empty.plot(
        few, [binomial(100 * int(m), 0.01, 0)[0] for m in few], "o-", markersize=4
    )
    empty.lines[0].set_color(STYLES[COINS][0])
    logarithmic(empty, "y")
    empty.set(
        title="Empty batches",
        xlabel="mean number of units in a batch",
        ylabel="share of the batches",
        xlim=(0, 26),
    )
    save(figure, path)


def main() -> None:
    """Prints and writes the table, draws the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/draws"))
    folder = parser.parse_args().out
    costs = [epsilons(examples, EXAMPLE_EPOCHS), epsilons(episodes, EPISODE_EPOCHS)]
    seen = binomial(100 * EXAMPLE_EPOCHS, 0.01, 25)
    draw_figure(costs, seen, folder / "draws.png")
    draw_sizes(folder / "batch_sizes.png")
    table = {
        "noise multiplier": NOISE,
        "delta": DELTA,
        "steps in an epoch": STEPS.tolist(),
        f"epsilon of an example, {EXAMPLE_EPOCHS} epochs": costs[0],
        f"epsilon of an example of an episode, inner rate {DRAWN / EXAMPLES:g}, "
        f"{EPISODE_EPOCHS} epoch(s)": costs[1],
        "one epoch of 10 steps": one_epoch(),
        "share of units never seen in ten epochs of 100 steps": {
            "coins, fixed size": rounded(seen[:1], 3)[0],
            "epochs": 0.0,
        },
        "sizes of batches, coins and bins": [sizes(100, 100 * mean) for mean in MEANS],
    }
    write_table(table, folder / "draws.json")
    for found in costs:
        print(f"{'steps in an epoch':40}" + "".join(f"{t:9}" for t in STEPS))
        for name, values in found.items():
            print(f"{name:40}" + "".join(f"{value:9.4g}" for value in values))
    print(f"Written to {folder}")


if __name__ == "__main__":
    main()
