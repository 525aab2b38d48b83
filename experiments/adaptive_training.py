"""What choosing on the way is worth: adaptive runs against fixed plans, on the glyphs.

Results are in ``adaptive_training.csv``; see `study` for the command. All runs of a
pipeline have the same target; they are seeded, so that they can be repeated, and not
private.
"""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from drawing import BLUE, ORANGE, markdown, new_figure, save
from study import CONFIGS, Results, Run, Study, shown

from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.training import TrainingConfig, run_training

EPSILONS = {8.0: (ORANGE, "s"), 1.0: (BLUE, "o")}
DEMO, SCRATCH = "demo: statistics, then 300 steps", "from scratch, 150 steps"
FIXED = "fixed plan"
STOP = "stop when stalled, scores apart"
SHARED = "stop when stalled, scores share the budget"
LOWER = "lower the noise when stalled, scores apart"
REST = "75 steps at 1.5 x the noise, the rest at 0.8 x"
VARIANTS = {DEMO: (FIXED, STOP, SHARED), SCRATCH: (FIXED, STOP, LOWER, REST)}


def adaptive_of(variant: str, every: int) -> dict[str, Any]:
    """Returns what a run may choose, as a config has it."""
    rule: dict[str, Any] = {"type": "StopWhenStalled", "every": every}
    adaptive = read_toml(CONFIGS / "demo_adaptive.toml")["adaptive"]
    if variant == SHARED:
        adaptive["check"]["apart"] = False
    if variant in (LOWER, REST):
        adaptive["options"] = {"loud": {"noise": 1.5}, "quiet": {"noise": 0.8}}
        adaptive["only_lower"] = True
        options = {"every": every, "options": ["loud", "quiet"]}
        rule = {"type": "NextWhenStalled", **options}
    if variant == REST:
        rule = {"type": "SpendRest", "first": "loud", "number": 75, "rest": "quiet"}
        del adaptive["check"]
    return adaptive | {"rule": rule}


class AdaptiveTraining(Study):
    """Kinds of runs of two pipelines at two epsilons."""

    name, keys = "adaptive_training", ("pipeline", "variant", "target")

    def runs(self) -> Iterator[Run]:
        """From scratch first, which is the faster one."""
        for pipeline, variants in reversed(VARIANTS.items()):
            yield from ((pipeline, v, e) for e in EPSILONS for v in variants)

    def config(self, run: Run, seed: int) -> TrainingConfig:
        """Returns the config of a run."""
        pipeline, variant, epsilon = run
        is_demo = pipeline == DEMO
        config = read_toml(CONFIGS / f"{'demo' if is_demo else 'glyphs_linear'}.toml")
        config |= {"epsilon": epsilon, "seed": seed + 1}
        config["evaluation"] = {"splits": ["test"], "queries": 5, "num_episodes": 600}
        config["features"]["cache"] = str(self.out / "wavelets")
        config["model"]["seed"] = seed
        if not is_demo:
            config["num_steps"] = 150
            del config["start"]  # which has no price
        if self.steps:
            config["num_steps"] = self.steps
        if variant != FIXED:
            config["adaptive"] = adaptive_of(variant, every=50 if is_demo else 25)
        return TrainingConfig.from_dict({"type": "TrainingConfig", **config})

    def train(self, run: Run, repeat: int) -> dict[str, Any]:
        """Steps, noisy scores and the deviation of their noise, and what came of it."""
        begun, folder = time.perf_counter(), self.out / "run"
        shutil.rmtree(folder, ignore_errors=True)
        result = run_training(self.config(run, repeat), folder)
        trainer: Any = result.trainer
        scores = [] if run[1] == FIXED else trainer.scores
        taken = trainer.num_steps_taken - len(trainer.budget.before) - len(scores)
        return {
            "seed": repeat,
            "steps": taken,
            "scores": len(scores),
            "score_noise": float(scores[0].deviation) if scores else 0.0,
            "test": result.scores["test"].mean,
            "epsilon": result.epsilon,
            "seconds": time.perf_counter() - begun,
        }

    def tables(self, found: Results) -> dict[str, str]:
        """Mean and range over seeds."""
        rows = []
        for pipeline, variants in VARIANTS.items():
            for variant in variants:
                cells = []
                for epsilon in sorted(EPSILONS):
                    run = (pipeline, variant, epsilon)
                    test, steps = (found.column(c, run) for c in ("test", "steps"))
                    if not len(test):
                        cells += ["", ""]
                        continue
                    ends = "range" if len(test) > 1 else "none"
                    noise = found.column("score_noise", run)[0]
                    taken = " to ".join(f"{n:g}" for n in sorted({*_ends(steps)}))
                    cells.append(shown(test, ends=ends).removesuffix(" (1)"))
                    cells.append(taken + f"; {noise:.3f}" * bool(noise > 0))
                rows.append([pipeline, variant, *cells])
        head = ["pipeline", "run"]
        for epsilon in sorted(EPSILONS):
            head += [f"accuracy, epsilon {epsilon:g}", "steps; noise of a score"]
        return {self.name: markdown(head, rows)}

    def draw(self, found: Results, path: Path) -> None:
        """Accuracy of each seed, by kind of run."""
        figure, panels = new_figure(2, size=(11, 4.2))
        for axes, (pipeline, variants) in zip(panels, VARIANTS.items(), strict=True):
            for epsilon in sorted(EPSILONS):
                color, marker = EPSILONS[epsilon]
                places: list[float] = []
                values: list[float] = []
                for place, variant in enumerate(variants):
                    test = found.column("test", (pipeline, variant, epsilon))
                    where = np.linspace(-0.12, 0.12, max(len(test), 2))[: len(test)]
                    places += [*(place + where)]
                    values += [*test]
                label = f"epsilon {epsilon:g}"
                style = {"color": color, "label": label, "alpha": 0.8}
                axes.plot(places, values, marker, **style)
            axes.set_title(pipeline)
            names = [textwrap.fill(name, 16) for name in variants]
            axes.set_xticks(range(len(names)), names, fontsize=8)
            axes.set(xlim=(-0.5, len(names) - 0.5), ylabel="accuracy on test classes")
            axes.legend(frameon=False, loc="center right")
        save(figure, path, grid="y")


def _ends(values: np.ndarray) -> tuple[float, float]:
    return min(values), max(values)


if __name__ == "__main__":
    AdaptiveTraining().main(__doc__)
