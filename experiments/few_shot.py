"""Private few-shot learning on the glyphs: the accuracy of pipelines at each epsilon.

Results are in ``few_shot.csv``; see `study` for the command. No run has a seed, and
each epsilon is computed from the run's ledger. Scores are from 600 episodes; the
settings were chosen on the validation classes. ``--only schools`` trains the mixed
model of schools (extra ``[data]``), with RMSEs as scores.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from drawing import (
    BLUE,
    GREEN,
    SKY,
    YELLOW,
    draw_level,
    draw_runs,
    logarithmic,
    markdown,
    new_figure,
    save,
)
from study import CONFIGS, Results, Run, Study, cpu_seconds, shown, trained, untrained

from jaxdp_episodic.accountant.describe.designs import Poisson
from jaxdp_episodic.trainer.run.assemble import Tables
from jaxdp_episodic.training import TrainingConfig, read_config

EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
NOTHING, ZERO, ADD = "features alone", "zero_out", "add_remove"
SCRATCH, P1, P2, P3, SCHOOLS = "from scratch", "P1", "P2", "P3", "schools"
# Name in the tables, and config.
PIPELINES = {
    SCRATCH: ("convolutions from scratch", "glyphs_5w1s"),
    P1: ("P1: linear embedding by episodes", "glyphs_linear"),
    P2: ("P2: private statistics", "glyphs_plda"),
    P3: ("P3: P2, then episodes", "demo"),
    SCHOOLS: ("mixed model of schools, RMSE", "schools_mixed"),
}
LOOKS = {SCRATCH: (SKY, "o"), P1: (YELLOW, "s"), P2: (GREEN, "D"), P3: (BLUE, "^")}
SETTINGS = (("example", ZERO), ("example", ADD), ("class", ZERO), ("pupil", ADD))
TICKS = (0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
Change = Callable[[TrainingConfig], dict[str, Any]]


def part(name: str, **fields: Any) -> Change:
    """Returns a change of fields of one of a config's tables."""
    return lambda config: {name: dataclasses.replace(getattr(config, name), **fields)}


def half_of_the_episodes(config: TrainingConfig) -> dict[str, Any]:
    """A change: each episode of a partition is sampled with probability one half."""
    episodes = Poisson("episode", sampling_probability=0.5)
    sampling = dataclasses.replace(config.step.sampling, episodes=episodes)
    return part("step", sampling=sampling)(config)


CHANGES: dict[str, Change] = {
    "Euclidean distances": part("learner", distance="euclidean", temperature=1.0),
    "no average of the parameters": part("optimizer", ema=None),
    "the mean not taken off": lambda config: {"start": None},
    "the noise taken off Adam's second moments": part("optimizer", noise_floor=1.0),
    "no re-splits": part("learner", resplits=False),
    "100 steps instead of 300": lambda config: {"num_steps": 100},
    "each episode with probability 1/2": half_of_the_episodes,
    "clip norm 1 instead of 0.1": lambda config: {"l2_clip_norm": 1.0},
}


class FewShot(Study):
    """Pipelines at each epsilon, and P1 with one part removed or changed at a time."""

    name, repeats, rare = "few_shot", 5, (SCHOOLS,)
    keys = ("pipeline", "change", "protected", "relation", "epsilon")

    def __init__(self) -> None:
        self._tables: dict[str, Tables] = {}

    def runs(self) -> Iterator[Run]:
        """Pipelines, the ablation, what has no noise, and schools."""
        order = (1.0, 8.0, 0.25, 4.0, 2.0, 0.5)
        for unit in ("example", "class"):
            yield from ((p, "", unit, ZERO, e) for e in order for p in (P1, P2, P3))
        yield from ((P3, "", "example", ADD, e) for e in order)
        for change in ("", *CHANGES):
            relations = (ZERO,) if change else (ZERO, ADD)
            yield from (
                (P1, change, "example", r, e) for r in relations for e in (8.0, 1.0)
            )
        yield from ((SCRATCH, "", "example", ZERO, e) for e in order)
        yield NOTHING, "", "example", ZERO, 0.0
        yield from ((p, "", "example", ZERO, math.inf) for p in (P1, P2, P3))
        yield from ((SCHOOLS, "", "pupil", ADD, e) for e in (*EPSILONS, math.inf))

    def config(self, run: Run, cache: Path) -> TrainingConfig:
        """Returns a run as a config; its features are those in ``cache``."""
        pipeline, change, protected, relation, epsilon = run
        _, name = PIPELINES.get(pipeline, PIPELINES[P2])
        if protected == "class" and pipeline == P1:
            name = "glyphs_class"
        config = read_config(CONFIGS / f"{name}.toml")
        assert config.evaluation is not None
        changes: dict[str, Any] = {"epsilon": epsilon or math.inf}
        unit = {"neighboring_relation": relation, "privacy_unit": protected}
        splits = ("validation", "test")
        for one in (
            part("step", **unit),
            part("features", cache=str(cache)),
            part("evaluation", splits=splits, without_noise=False),
        ):
            changes |= one(config)
        config = dataclasses.replace(config, **changes)
        if change:
            config = dataclasses.replace(config, **CHANGES[change](config))
        if self.steps and config.num_steps:
            config = dataclasses.replace(config, num_steps=self.steps)
        return config

    def tables_of(self, config: TrainingConfig) -> Tables:
        """Returns the data of a config, which runs share."""
        data = repr((config.data.to_dict(), config.features.kind))
        if data not in self._tables:
            self._tables[data] = Tables(config, None)
        return self._tables[data]

    def train(self, run: Run, repeat: int) -> dict[str, Any]:
        """Scores on both splits, and epsilon by the ledger."""
        del repeat
        begun, config = time.process_time(), self.config(run, self.out / "features")
        tables = self.tables_of(config)
        if run[0] == NOTHING:
            scores = {k: untrained(tables, k) for k in ("validation", "test")}
            return scores | {"ledger": 0.0, "seconds": 0.0}
        projects = run[0] != SCHOOLS
        scores, _, ledger = trained(config, tables, self.out / "run", projects=projects)
        return scores | {"ledger": ledger} | cpu_seconds(begun)

    def tables(self, found: Results) -> dict[str, str]:
        """All pipelines at all epsilons; P1 without one part at a time."""
        rows = []
        for protected, relation in SETTINGS:
            for pipeline, (label, _) in PIPELINES.items():
                cells = [
                    shown(found.column("test", (pipeline, "", protected, relation, e)))
                    for e in (*EPSILONS, math.inf)
                ]
                if any(cells):
                    rows.append([label, f"{protected}, {relation}", *cells])
        head = ["pipeline", "protected", *(f"{e:g}" for e in EPSILONS), "no noise"]
        names = {"": "all of P1", ADD: "`add_remove` instead of `zero_out`"}
        lines = []
        for change in ("", ADD, *CHANGES):
            run = (
                (P1, "", "example", ADD)
                if change == ADD
                else (P1, change, "example", ZERO)
            )
            cells = []
            for epsilon in (8.0, 1.0):
                values = found.column("test", (*run, epsilon))
                whole = found.column("test", (P1, "", "example", ZERO, epsilon))
                cells.append(shown(values))
                if change and len(values) and len(whole):
                    cells[-1] += f": {np.mean(values) - np.mean(whole):+.4f}"
            lines.append([names.get(change, change), *cells])
        ablation = markdown(["P1 with", "epsilon 8", "epsilon 1"], lines)
        return {"frontier": markdown(head, rows), "ablation": ablation}

    def draw(self, found: Results, path: Path) -> None:
        """Accuracy against epsilon, for examples and for classes.

        Upwards is the error, logarithmic: from 0.98 to 0.99 is as far as from 0.6 to
        0.8.
        """
        figure, panels = new_figure(2, size=(9.6, 5.4), sharey=True)
        titles = {
            "example": "one drawing protected",
            "class": "one syllable protected, with all its drawings",
        }
        for axes, (protected, title) in zip(panels, titles.items(), strict=True):
            for pipeline, (color, marker) in LOOKS.items():
                for relation in (ZERO, ADD)[: 1 + (pipeline == P3)]:
                    runs = {e: (pipeline, "", protected, relation, e) for e in EPSILONS}
                    scores = found.along("test", runs)
                    if not scores:
                        continue
                    few, many = (
                        f({len(v) for v in scores.values()}) for f in (min, max)
                    )
                    words = f"{few}" if few == many else f"{few} to {many}"
                    is_plain = relation == ZERO
                    label = PIPELINES[pipeline][0] + ", add_remove" * (not is_plain)
                    draw_runs(
                        axes,
                        {e: 1 - values for e, values in scores.items()},
                        (color, "-" if is_plain else "--", marker),
                        ends="std",
                        label=f"{label} ({words} run{'s' * (words != '1')} each)",
                        markerfacecolor=color if is_plain else "white",
                    )
            logarithmic(axes, "x", EPSILONS)
            axes.set_xlim(0.9 * EPSILONS[0], 1.15 * EPSILONS[-1])
            axes.set(xlabel="epsilon at delta = 1e-5")
            axes.set_title(title, loc="left")
            for value in found.column("test", (NOTHING, "", "example", ZERO, 0.0))[:1]:
                draw_level(
                    axes,
                    "features alone, nothing learned",
                    EPSILONS[-1],
                    1 - value,
                    xytext=(0, -3),
                    ha="right",
                    va="top",
                )
            # Each has its own, as the numbers of runs differ.
            place: Any = {"loc": "upper left", "bbox_to_anchor": (0, -0.13)}
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=8.5, **place)
        axes = panels[0]
        logarithmic(axes, "y", [1 - accuracy for accuracy in TICKS])
        axes.yaxis.set_major_formatter(lambda error, _: f"{1 - error:g}")
        lowest = min(r["test"] for r in found.rows if r["pipeline"] != SCHOOLS)
        axes.set_ylim(1.2 * (1 - lowest), 1 - TICKS[-1])
        axes.set_ylabel("accuracy on unseen syllables, 5-way 1-shot")
        save(figure, path)


if __name__ == "__main__":
    FewShot().main(__doc__)
