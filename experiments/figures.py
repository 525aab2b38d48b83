"""The figures and tables of the documentation that need no training.

    python experiments/figures.py NAME [--out FOLDER]

draws one of them, prints its table, and writes both into ``results/NAME`` or
``FOLDER``. ``make figures`` makes all, and copies them to docs. Figures of sampling
designs are here, those of `jaxdp_episodic.bounds` in ``figures_of_bounds.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    draw_curve,
    draw_level,
    logarithmic,
    markdown,
    new_figure,
    rounded,
    save,
)
from figures_of_bounds import FIGURES as OF_BOUNDS
from study import CONFIGS

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.numerics.band_coefficients import (
    band_coefficients,
    band_error,
)
from jaxdp_episodic.accountant.numerics.binomial import log_binomial_mass
from jaxdp_episodic.tools.plots.pictures import draw
from jaxdp_episodic.tools.sweep.description import read_sweep
from jaxdp_episodic.tools.sweep.run import read_columns, run_sweep
from jaxdp_episodic.trainer.run.assemble import plan
from jaxdp_episodic.training import read_config

Table = dict[str, Any]


def episode_costs(folder: Path) -> Table:
    """The privacy cost of the episodes of a meta-learning run.

    5-way few-shot learning on Omniglot's 1,623 characters with 20 drawings each: about
    65 episodes a step, 4 drawings of every character in them, each episode's gradient
    clipped. Then 160 schools of unequal size: the smallest determines epsilon.
    """
    classes, number, noise, delta, run = 1_623, 65, 2.0, 1e-5, 300
    steps = np.array([10, 30, 100, 300, 700, 1_500, 3_000, 5_000])
    targets = np.array([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0])
    rate = number / (classes // 5)
    draws = {
        "exactly 65, without replacement": (
            jde.WithoutReplacement("episode", size=number),
            (ORANGE, "s"),
        ),
        "each by its own coin (Poisson)": (
            jde.Poisson("episode", sampling_probability=rate),
            (BLUE, "o"),
        ),
    }
    figure, (left, right) = new_figure(2, size=(10.5, 4.6), width_ratios=(1.25, 1))
    table: Table = {}
    ends = {}
    for title, (episodes, (color, marker)) in draws.items():
        drawings = jde.WithoutReplacement("example", size=4, population=20)
        step = jde.GaussianStep(
            jde.GroupedClasses(
                num_classes=classes, ways=5, episodes=episodes, examples=drawings
            ),
            noise_multiplier=noise,
        )
        question: Table = {"num_steps": steps, "delta": delta}
        drawing = np.asarray(jde.epsilon(step, **question))
        whole = dataclasses.replace(step, privacy_unit="class")
        character = np.asarray(jde.epsilon(whole, **question))
        target: Table = {"epsilon": targets, "delta": delta, "num_steps": run}
        needed = np.asarray(jde.calibrate_noise_multiplier(step, **target))
        style: Table = {"linewidth": 1.5}
        look = color, "--", marker
        draw_curve(left, steps, character, look, **style)
        style |= {"markerfacecolor": color}
        look = color, "-", marker
        draw_curve(left, steps, drawing, look, label=title, **style)
        draw_curve(right, targets, needed, look, **style)
        ends = {"one character": character[-1], "one drawing": drawing[-1]}
        table[title] = {
            f"epsilon of a drawing, {run} steps": drawing[steps == run].item(),
            f"epsilon of a character, {run} steps": character[steps == run].item(),
            "noise for epsilon 2": needed[targets == 2].item(),
        }
    for name, value in ends.items():
        style = {"xytext": (6, -1), "textcoords": "offset points", "va": "top"}
        left.annotate(name, (steps[-1], value), **style)
    logarithmic(left, "x")
    logarithmic(left, "y")
    left.xaxis.set_major_formatter("{x:,.0f}")
    left.set(
        title=f"{number} episodes a step, noise multiplier {noise:g}",
        xlim=(8, 30_000),
        xlabel="training steps",
        ylabel=f"epsilon (nats) at delta = {delta:g}",
    )
    left.legend(loc="upper left", frameon=False, borderaxespad=0.2)
    logarithmic(right, "x", targets[[0, 1, 3, 5, 7]].tolist())
    logarithmic(right, "y", [1, 2, 5, 10])
    right.set(
        title=f"Noise that {run} steps need, for one drawing",
        ylim=(0.9, 14),
        xlabel=f"target epsilon (nats) at delta = {delta:g}",
        ylabel="noise multiplier (clip norms)",
    )
    save(figure, folder / "episodes.png", dpi=160)
    # Pupils of each school, and how many schools of that size there are.
    real = np.repeat(
        [20, 35, 60, 90, 140, 220, 320, 430], [9, 14, 22, 30, 34, 28, 15, 8]
    )
    alike = np.full(len(real), int(real.mean()))
    for title, pupils in (("schools all alike", alike), ("schools as they are", real)):
        tree = jde.Population.from_sizes(pupils, level_names=("school", "pupil"))
        step = jde.GaussianStep(
            jde.MultistageSampling(
                jde.Poisson("school", sampling_probability=0.05),
                jde.WithoutReplacement("pupil", size=8),
            ),
            noise_multiplier=noise,
            clip_unit="school",
            privacy_unit="pupil",
            population=tree,
        )
        found = float(jde.epsilon(step, num_steps=1_000, delta=delta))
        table[title] = {"epsilon of the worst-off pupil, 1,000 steps": found}
    return rounded(table, 4)


def designs(folder: Path) -> Table:
    """The privacy cost of ways to draw the episodes of a step, at equal work.

    Every design processes, on average, 64 episodes of 5 classes a step, 4 of the 20
    examples of each class, for 300 steps, out of the same 1,800 classes; each
    episode's gradient is clipped and one example is protected.
    """
    classes, ways, number, shots, each = 1_800, 5, 64, 4, 20
    steps, delta = 300, 1e-5
    noises = np.round(np.geomspace(0.6, 5.0, 16), 6)
    tasks = classes // ways
    rate: Table = {"sampling_probability": number / tasks}
    of_class = jde.WithoutReplacement("example", size=shots, population=each)
    of_task = jde.WithoutReplacement(
        "example", size=ways * shots, population=ways * each
    )
    pool: Table = {"num_classes": classes, "ways": ways, "examples": of_class}
    one = jde.WithoutReplacement("class", size=ways, population=classes)
    fixed = jde.WithoutReplacement("task", size=number, population=tasks)
    samplings = {
        "fixed tasks, Poisson": jde.MultistageSampling(
            jde.Poisson("task", **rate), of_task
        ),
        "fresh episodes, Poisson": jde.GroupedClasses(
            episodes=jde.Poisson("episode", **rate), **pool
        ),
        "fixed tasks, without replacement": jde.MultistageSampling(fixed, of_task),
        "fresh episodes, without replacement": jde.GroupedClasses(
            episodes=jde.WithoutReplacement("episode", size=number), **pool
        ),
        "classes by Poisson, then grouped": jde.GroupedClasses(
            classes=jde.Poisson("class", **rate), **pool
        ),
        "independent episodes": jde.IndependentEpisodes(
            jde.MultistageSampling(one, of_class), num_episodes=number
        ),
    }
    found = {
        name: np.asarray(
            jde.epsilon(
                jde.GaussianStep(
                    sampling,
                    noise_multiplier=noises,
                    clip_unit="task" if name.startswith("fixed") else "episode",
                ),
                num_steps=steps,
                delta=delta,
            )
        )
        for name, sampling in samplings.items()
    }
    # Designs with equal epsilons share a curve and a name.
    curves = {
        "independent episodes": ("independent episodes", GREY, ":", "x"),
        "fresh episodes, without replacement": (
            "without replacement (fixed tasks or fresh\nepisodes), classes by Poisson",
            *(ORANGE, "--", "^"),
        ),
        "fresh episodes, Poisson": (
            "Poisson (fixed tasks or fresh episodes)",
            *(BLUE, "-", "o"),
        ),
    }
    figure, (axes,) = new_figure(size=(8, 4.8))
    for name, (label, *look) in curves.items():
        draw_curve(axes, noises, found[name], look, label=label)
    logarithmic(axes, "x", [0.6, 1, 2, 5])
    logarithmic(axes, "y")
    axes.set(
        title=f"{number} episodes of {ways} classes a step, {steps} steps, "
        f"{classes:,} classes",
        xlabel="noise multiplier (clip norms of an episode)",
        ylabel=f"epsilon (nats) of an example at delta = {delta:g}",
    )
    axes.legend(frameon=False, loc="upper right")
    save(figure, folder / "designs.png")
    return {
        "method": "exact",
        "delta": delta,
        "steps": steps,
        "noise multipliers": noises.tolist(),
        "epsilon": rounded(found),
    }


def stages(folder: Path) -> Table:
    """What each stage of sampling gains: one run, with more and more stages counted.

    Every step draws a quarter of the districts, a fifth of their schools, and 8 of the
    40 pupils of each school drawn; a school's gradient is clipped and one pupil is
    protected. The run, its work and its noise are the same on every curve. A stage that
    is not counted is assumed to draw everybody.
    """
    steps, delta, shown_at = 500, 1e-6, 2.0
    noises = np.round(np.geomspace(0.6, 8.0, 16), 6)

    def epsilon(districts: float, schools: float, pupils: int, noise: Any) -> Any:
        sampling = jde.MultistageSampling(
            jde.Poisson("district", sampling_probability=districts),
            jde.Poisson("school", sampling_probability=schools),
            jde.WithoutReplacement("pupil", size=pupils, population=40),
        )
        units: Table = {"clip_unit": "school", "privacy_unit": "pupil"}
        step = jde.GaussianStep(sampling, noise_multiplier=noise, **units)
        return np.asarray(jde.epsilon(step, num_steps=steps, delta=delta))

    counted = {
        "no stage counted": ((1.0, 1.0, 40), "#7f7f7f", ":", "x"),
        "districts counted": ((0.25, 1.0, 40), ORANGE, "-.", "s"),
        "districts and schools": ((0.25, 0.2, 40), GREEN, "--", "^"),
        "districts, schools and pupils": ((0.25, 0.2, 8), BLUE, "-", "o"),
    }
    figure, (axes,) = new_figure(size=(8, 4.8))
    found, at = {}, {}
    for name, (rates, *look) in counted.items():
        found[name] = epsilon(*rates, noises)
        at[name] = float(epsilon(*rates, shown_at))
        draw_curve(axes, noises, found[name], look)
        style: Table = {"xytext": (7, 0), "textcoords": "offset points"}
        style |= {"va": "center", "annotation_clip": False}
        axes.annotate(name, (noises[-1], found[name][-1]), **style)
    values = list(at.values())
    for before, after in zip(values, values[1:], strict=False):
        arrow = {"arrowstyle": "->", "color": "0.25", "shrinkA": 4, "shrinkB": 4}
        ends: Table = {"xytext": (shown_at, before), "arrowprops": arrow}
        axes.annotate("", (shown_at, after), **ends)
        style = {"xytext": (5, -2), "textcoords": "offset points", "color": "0.25"}
        middle = shown_at, np.sqrt(before * after)
        axes.annotate(f"÷ {before / after:.2g}", middle, va="center", **style)
    logarithmic(axes, "x", [0.6, 1, 2, 4, 8])
    logarithmic(axes, "y")
    axes.set(
        title=f"The same run of {steps} steps, accounted with more and more stages",
        xlabel="noise multiplier (clip norms of a school)",
        ylabel=f"epsilon (nats) of a pupil at delta = {delta:g}",
    )
    save(figure, folder / "stages.png")
    return {
        "delta": delta,
        "steps": steps,
        "noise multipliers": noises.tolist(),
        "epsilon by the stages counted": rounded(found),
        f"epsilon at noise multiplier {shown_at:g}": rounded(at, 5),
    }


def poisson_against_without_replacement(folder: Path) -> Table:
    """The noise that Poisson sampling and sampling without replacement need.

    A step uses a share of 10,000 examples, Poisson sampled or sampled without
    replacement. For every share: the smallest noise multiplier that keeps 500 steps
    within the target, under both relations.
    """
    examples = 10_000
    target: Table = {"num_steps": 500, "epsilon": 2.0, "delta": 1e-6}
    sizes = np.unique(np.rint(np.geomspace(10, examples, 19))).astype(int)
    rates = sizes / examples
    schemes = {
        "Poisson": (
            jde.Poisson("example", sampling_probability=rates),
            (BLUE, "-", "o"),
        ),
        "without replacement": (
            jde.WithoutReplacement("example", size=sizes, population=examples),
            (ORANGE, "--", "^"),
        ),
    }
    titles = {
        "add_remove": "One example more or less",
        "replace_one": "One example replaced by another",
    }
    figure, panels = new_figure(2, size=(10.5, 4.6), sharey=True)
    found: dict[str, Table] = {}
    for axes, (relation, title) in zip(panels, titles.items(), strict=True):
        found[relation] = {}
        for name, (scheme, look) in schemes.items():
            step = jde.GaussianStep(
                scheme, noise_multiplier=1.0, neighboring_relation=relation
            )
            noise = np.asarray(jde.calibrate_noise_multiplier(step, **target))
            found[relation][name] = rounded(noise, 5)
            draw_curve(axes, rates, noise, look, label=name)
        logarithmic(axes, "x", [0.001, 0.01, 0.1, 1])
        logarithmic(axes, "y", [0.5, 1, 2, 5, 10, 20, 50, 100])
        axes.set(title=title, xlabel="share of the examples in a step (mean)")
    panels[0].set_ylabel(
        f"noise multiplier (clip norms) for\nepsilon = {target['epsilon']:g} nats, "
        f"delta = {target['delta']:g}, {target['num_steps']} steps"
    )
    panels[0].legend(frameon=False, loc="upper left")
    save(figure, folder / "poisson_against_without_replacement.png")
    return {
        "examples": examples,
        "steps": target["num_steps"],
        "epsilon": target["epsilon"],
        "delta": target["delta"],
        "share drawn": rates.tolist(),
        "noise multiplier": found,
    }


def draws(folder: Path) -> Table:
    """Compares Poisson sampling, sampling without replacement, and two kinds of epochs.

    Every unit is used in one of t steps on average. Shows epsilon of all four over ten
    epochs, for examples that are clipped one by one and for a fifth of the examples of
    an episode; how often a unit is seen; and how much batches vary in size.
    """
    noise, delta, epochs, size = 1.0, 1e-6, 10, 200
    lengths = np.array([5, 10, 20, 50, 100, 200, 500, 1_000])
    poisson, bins = "Poisson sampling", "epochs, random bins (RandomAllocation)"
    fixed = "sampling without replacement"
    schemes: dict[str, tuple[Callable[..., Any], tuple[str, str, str]]] = {
        poisson: (
            lambda name, t: jde.Poisson(name, sampling_probability=1 / t),
            (BLUE, "-", "o"),
        ),
        fixed: (
            lambda name, t: jde.WithoutReplacement(name, size=size),
            (ORANGE, "--", "^"),
        ),
        bins: (
            lambda name, t: jde.RandomAllocation(name, steps_per_epoch=t),
            (GREEN, "-.", "s"),
        ),
        "epochs, shuffled (ShuffledEpochs)": (
            lambda name, t: jde.ShuffledEpochs(name, steps_per_epoch=t),
            (PINK, ":", "D"),
        ),
    }

    def examples(draw_of: str, t: int) -> jde.GaussianStep:
        drawn = schemes[draw_of][0]("example", t)
        if draw_of == fixed:
            drawn = dataclasses.replace(drawn, population=size * t)
        return jde.GaussianStep(drawn, noise_multiplier=noise)

    def episodes(draw_of: str, t: int) -> jde.GaussianStep:
        sampling = jde.GroupedClasses(
            num_classes=5 * size * t,
            ways=5,
            episodes=schemes[draw_of][0]("episode", t),
            examples=jde.WithoutReplacement("example", size=4, population=20),
        )
        return jde.GaussianStep(sampling, noise_multiplier=noise)

    figure, panels = new_figure(3, size=(13.5, 4.4))
    titles = (
        f"Examples, {epochs} epochs",
        f"A fifth of an episode's examples, {epochs} epochs",
    )
    costs: list[Table] = []
    for axes, title, make in zip(panels, titles, (examples, episodes), strict=False):
        costs.append({})
        for name, (_, look) in schemes.items():
            values = [
                jde.epsilon(make(name, t), num_steps=epochs * t, delta=delta)
                for t in lengths.tolist()
            ]
            costs[-1][name] = rounded(values, 5)
            draw_curve(axes, lengths, values, look, label=name, markersize=6)
        logarithmic(axes, "x", [5, 10, 50, 200, 1_000])
        logarithmic(axes, "y", [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50])
        axes.set(title=title, xlabel="steps in an epoch")
    panels[0].set_ylabel(f"epsilon (nats), delta = {delta:g}, noise {noise:g}")
    panels[0].legend(frameon=False, fontsize=8.5, loc="lower left")
    seen = _binomial(100 * epochs, 0.01, 25)
    panels[2].bar(np.arange(26), seen, color=BLUE, label="sampling")
    style: Table = {"facecolor": "none", "edgecolor": GREEN, "hatch": "//"}
    panels[2].bar([epochs], [1.0], width=0.5, label="epochs", **style)
    panels[2].set(
        title="How often a unit is seen in ten epochs",
        xlabel="steps with the unit (epochs of 100 steps)",
        ylabel="share of the units",
    )
    panels[2].legend(frameon=False)
    save(figure, folder / "draws.png")
    means = {5: (ORANGE, "-"), 20: (GREEN, "--"), 200: (BLUE, "-.")}
    _batch_sizes(means, folder / "batch_sizes.png")
    one_epoch = {}
    for name in (poisson, bins):
        step = jde.GaussianStep(schemes[name][0]("example", 10), noise_multiplier=noise)
        other = dataclasses.replace(step, neighboring_relation="replace_one")
        epsilon = jde.epsilon(step, num_steps=10, delta=delta)
        replaced = jde.delta(other, num_steps=10, epsilon=1.0)
        one_epoch[name] = {
            "epsilon": float(f"{epsilon:.4f}"),
            "delta at epsilon 1, one replaced": rounded(replaced, 4),
        }
    sizes = []
    for mean in means:
        below = np.cumsum(mass := _binomial(100 * mean, 1 / 100, 100 * mean))
        low, high = np.searchsorted(below, [1e-3, 1 - 1e-3])
        sizes.append(
            {
                "mean": float(mean),
                "one in a thousand is below": int(low),
                "one in a thousand is above": int(high),
                "probability of an empty batch": rounded(mass[0], 3),
                "rows of memory per unit": rounded(_rows(mean) / mean, 3),
            }
        )
    return {
        "noise multiplier": noise,
        "delta": delta,
        "steps in an epoch": lengths.tolist(),
        f"epsilon of an example, {epochs} epochs": costs[0],
        f"epsilon of an example of an episode, inner rate 0.2, {epochs} epoch(s)": (
            costs[1]
        ),
        "one epoch of 10 steps": one_epoch,
        "share of units never seen in ten epochs of 100 steps": {
            "sampling": rounded(seen[0], 3),
            "epochs": 0.0,
        },
        "sizes of batches, Poisson sampling and bins": sizes,
    }


def _binomial(trials: int, rate: float, most: int) -> np.ndarray:
    """Probabilities of 0 to ``most`` successes."""
    number = np.arange(most + 1.0)
    return np.exp(log_binomial_mass(number, np.asarray(trials), np.asarray(rate)))


def _rows(mean: float) -> int:
    """Number of rows that the trainer allocates, enough for almost any draw."""
    return int(np.ceil(mean + 3 * np.sqrt(mean) + 1))


def _batch_sizes(means: dict[int, tuple[str, str]], path: Path) -> None:
    """Draws sizes of batches, memory, and empty batches."""
    figure, (sizes, memory, empty) = new_figure(3, size=(13.5, 3.9))
    for mean, look in means.items():
        # Of 100 steps, with sizes near the mean only.
        most = int(2.6 * mean)
        mass = _binomial(100 * mean, 0.01, most)
        style: Table = {"markersize": 4, "markerfacecolor": look[0]}
        style["label"] = f"a mean of {mean} units"
        look = *look, "o" if mean < 50 else ""
        draw_curve(sizes, np.arange(most + 1) / mean, mass * mean, look, **style)
    sizes.axvline(1.0, color="0.35", linewidth=1.2, linestyle=":")
    place: Table = {"xytext": (0.93, 5.6), "ha": "right", "va": "top", "fontsize": 9}
    sizes.annotate("fixed size,\nshuffled", (1.0, 5.6), **place)
    sizes.set(
        title="Sizes of batches, Poisson sampling and bins",
        xlabel="units in a batch, relative to the mean",
        ylabel="density",
        xlim=(0, 2.6),
        ylim=(0, 6),
    )
    sizes.legend(frameon=False, loc="upper right")
    mean = np.unique(np.round(np.geomspace(2, 1_000, 120)))
    memory.plot(mean, [_rows(m) / m for m in mean], color=BLUE)
    memory.axhline(1.0, color="0.35", linewidth=1.2, linestyle=":")
    memory.set(title="Memory", ylabel="rows kept for each unit", ylim=(0.8, 4.2))
    logarithmic(memory, "x", [2, 5, 20, 100, 1_000])
    few = np.arange(1, 26)
    shares = [_binomial(100 * m, 0.01, 0)[0] for m in few.tolist()]
    style = {"markersize": 4, "markerfacecolor": BLUE}
    draw_curve(empty, few, shares, (BLUE, "-", "o"), **style)
    logarithmic(empty, "y")
    empty.set(title="Empty batches", ylabel="share of the batches", xlim=(0, 26))
    for axes in (memory, empty):
        axes.set_xlabel("mean number of units in a batch")
    save(figure, path)


def correlated(folder: Path) -> Table:
    """Correlated against independent noise, in what an optimizer remembers.

    300 steps on all of 360 episodes of 2 of 20 drawings, one drawing protected
    (`zero_out`), drawings in as many groups as there are bands. Coefficients are fitted
    to each horizon, or once to plain sums.
    """
    steps, horizons = 300, [1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 1_000]
    episodes = jde.GroupedClasses(
        num_classes=1_800,
        ways=5,
        episodes=jde.Poisson("episode", sampling_probability=1.0),
        examples=jde.WithoutReplacement("example", size=2, population=20),
    )
    plain = jde.GaussianStep(
        episodes, noise_multiplier=1.0, neighboring_relation="zero_out"
    )
    figure, (axes,) = new_figure(size=(7.6, 4.8))
    table: Table = {"steps": steps, "horizons": horizons}
    curves = {
        (8.0, 10): (BLUE, "-", "o"),
        (8.0, 2): (GREEN, "-", "D"),
        (1.0, 10): (ORANGE, "-", "s"),
        (1.0, 2): (PINK, "-", "^"),
    }
    for (epsilon, count), look in curves.items():
        target: Table = {"epsilon": epsilon, "delta": 1e-5, "num_steps": steps}
        step = jde.banded(plain, jde.Bands(count, level="example"))
        noise = [jde.calibrate_noise_multiplier(s, **target) for s in (step, plain)]
        label, fits = f"epsilon {epsilon:g}, {count} bands", {"fitted": look}
        if (epsilon, count) == (8.0, 10):
            fits["for plain sums"] = (look[0], ":", look[2])
        for fit, style in fits.items():
            found = []
            for horizon in horizons:
                aim = horizon if fit == "fitted" else math.inf
                kernel = band_coefficients(count, steps, aim)
                errors = [band_error(c, steps, horizon) for c in (kernel, np.ones(1))]
                found.append(float(noise[0] * errors[0] / (noise[1] * errors[1])))
            words = label + (", fitted to plain sums" if fit != "fitted" else "")
            draw_curve(axes, horizons, found, style, label=words)
            table[words] = rounded(found, 4)
    draw_level(axes, "independent noise", horizons[0], 1.0, xytext=(0, -11))
    axes.axvline(30, color="0.5", linewidth=1, linestyle=":")
    logarithmic(axes, "x", [1, 3, 10, 30, 100, 300, 1_000])
    logarithmic(axes, "y", [0.5, 0.7, 1, 1.5, 2, 3, 4])
    axes.set(
        xlabel="horizon: steps that the optimizer remembers",
        ylabel="noise in what it remembers,\nrelative to independent noise",
    )
    axes.legend(frameon=False)
    save(figure, folder / "correlated.png")
    return table


def iso_epsilon_demo(folder: Path) -> Table:
    """Lines of equal epsilon over noise and steps, with a star at a run.

    Evaluates ``configs/sweep_glyphs.toml`` and draws it, as ``jaxdp-episodic sweep``
    and ``plot --kind contours`` do; the star is ``configs/glyphs_5w1s.toml``, whose
    noise is calibrated here as the trainer does it.
    """
    config = read_config(CONFIGS / "glyphs_5w1s.toml")
    budget = plan(config, config.data.load("train"))
    sampling: Any = budget.step.design
    noise, steps = "noise_multiplier", "num_steps"
    rate = "episode.sampling_probability"
    place = {
        noise: float(f"{np.asarray(budget.step.noise_multiplier).item():.5g}"),
        steps: budget.num_steps,
        rate: np.asarray(sampling.episodes.sampling_probability).item(),
    }
    columns = (rate, steps, noise, "epsilon")
    with tempfile.TemporaryDirectory() as sweep:
        outcome = run_sweep(read_sweep(CONFIGS / "sweep_glyphs.toml"), sweep)
        assert outcome.table is not None  # of a whole sweep there is one
        blocks = list(read_columns(outcome.table, columns))
        draw(
            Path(sweep),
            kind="contours",
            x=noise,
            y=steps,
            by=rate,
            levels=(0.5, 1, 2, 4, 8, 16, 32, 64, 128),
            mark={field: str(value) for field, value in place.items()},
            out=folder / "iso_epsilon_demo.png",
        )
    rates, counts, noises, epsilon = (
        np.concatenate([block[column] for block in blocks]) for column in columns
    )
    rows = (rates == place[rate]) & (counts == place[steps])
    return {
        "demo": place,
        "at the demo's rate and steps": {
            "noise multiplier": rounded(noises[rows]),
            "epsilon": rounded(epsilon[rows]),
        },
    }


FIGURES: dict[str, Callable[[Path], Table]] = {
    "designs": designs,
    "draws": draws,
    "iso_epsilon_demo": iso_epsilon_demo,
    "poisson_against_without_replacement": poisson_against_without_replacement,
    "correlated": correlated,
    "stages": stages,
    "episode_costs": episode_costs,
    **OF_BOUNDS,
}


def shown(table: Any, indent: str = "") -> str:
    """Returns nested results as text."""
    if isinstance(table, list) and table and isinstance(table[0], dict):
        heads = list(table[0])
        text = markdown(heads, ([f"{row[h]}" for h in heads] for row in table))
        return "\n" + text.rstrip()
    if isinstance(table, list):
        cells = (shown(value) if isinstance(value, list) else value for value in table)
        return " ".join(f"{c:.6g}" if isinstance(c, float) else f"{c}" for c in cells)
    if isinstance(table, dict):
        inner = indent + "  "
        rows = (f"\n{inner}{name}: {shown(v, inner)}" for name, v in table.items())
        return "".join(rows)
    return str(table)


def main() -> None:
    """Makes one figure, and its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=FIGURES)
    parser.add_argument("--out", type=Path, help="default: results/NAME")
    options = parser.parse_args()
    folder = options.out or Path("results") / options.name
    folder.mkdir(parents=True, exist_ok=True)
    table = FIGURES[options.name](folder)
    text = json.dumps(table, indent=1) + "\n"
    (folder / f"{options.name}.json").write_text(text, encoding="utf-8")
    print(shown(table).strip(), f"Written to {folder}", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
