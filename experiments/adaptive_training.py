"""What choosing on the way is worth: adaptive runs against fixed plans, on the glyphs.

``python experiments/adaptive_training.py`` trains what is not yet in
``adaptive_training.csv``, which lies beside this script and gets a line as soon as a
run is finished, then writes ``adaptive_training.md`` and ``.png``. All runs of a
pipeline have the same target; they are seeded, so that they can be repeated, and not
private.
``--seeds 0`` only writes tables and figure.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import textwrap
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from drawing import new_figure, save
from few_shot import markdown

from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.tools.cli import keep_compiled_kernels, use_all_cores
from jaxdp_episodic.training import TrainingConfig, run_training

HERE = Path(__file__).resolve().parent
CONFIGS, RESULTS = HERE.parent / "configs", HERE / "adaptive_training.csv"
EPSILONS = (1.0, 8.0)
DEMO, SCRATCH = "demo: statistics, then 300 steps", "from scratch, 150 steps"
FIXED = "fixed plan"
STOP = "stop when stalled, scores apart"
SHARED = "stop when stalled, scores share the budget"
LOWER = "lower the noise when stalled, scores apart"
REST = "75 steps at 1.5 x the noise, the rest at 0.8 x"
VARIANTS = {DEMO: (FIXED, STOP, SHARED), SCRATCH: (FIXED, STOP, LOWER, REST)}


class Trained(NamedTuple):
    """What one run came to: a line of the results.

    Attributes:
      steps: that trained.
      scores: noisy ones that were released.
      score_noise: standard deviation of the noise of one, of accuracy.
      test: accuracy on the test classes.
      epsilon: guaranteed.
      seconds: of the run.
    """

    steps: int
    scores: int
    score_noise: float
    test: float
    epsilon: float
    seconds: float


def config_of(pipeline: str, variant: str, epsilon: float, seed: int) -> TrainingConfig:
    """The config of a run."""
    demo = pipeline == DEMO
    config = read_toml(CONFIGS / ("demo.toml" if demo else "glyphs_linear.toml"))
    config |= {"epsilon": epsilon, "seed": seed + 1}
    config["evaluation"] = {"splits": ["test"], "queries": 5, "num_episodes": 600}
    config["features"]["cache"] = str(HERE.parent / "results" / "wavelets")
    if not demo:
        config["num_steps"] = 150
        del config["start"]  # which has no price
    config["model"]["seed"] = seed
    if variant != FIXED:
        config["adaptive"] = adaptive_of(variant, every=50 if demo else 25)
    return TrainingConfig.from_dict({"type": "TrainingConfig", **config})


def adaptive_of(variant: str, every: int) -> dict[str, Any]:
    """What a run may choose."""
    rule: dict[str, Any] = {"type": "StopWhenStalled", "every": every}
    adaptive = read_toml(CONFIGS / "demo_adaptive.toml")["adaptive"]
    if variant == SHARED:
        adaptive["check"]["apart"] = False
    if variant in (LOWER, REST):
        adaptive["options"] = {"loud": {"noise": 1.5}, "quiet": {"noise": 0.8}}
        adaptive["only_lower"] = True
        rule = {
            "type": "NextWhenStalled",
            "every": every,
            "options": ["loud", "quiet"],
        }
    if variant == REST:
        rule = {"type": "SpendRest", "first": "loud", "number": 75, "rest": "quiet"}
        del adaptive["check"]
    return adaptive | {"rule": rule}


def trained(pipeline: str, variant: str, epsilon: float, seed: int) -> Trained:
    """One run, of which the numbers alone are kept."""
    folder = HERE.parent / "results" / "adaptive_training"
    shutil.rmtree(folder, ignore_errors=True)
    started = time.perf_counter()
    result = run_training(config_of(pipeline, variant, epsilon, seed), folder)
    trainer: Any = result.trainer
    scores = [] if variant == FIXED else trainer.scores
    number = trainer.num_steps_taken - len(trainer.budget.before) - len(scores)
    return Trained(
        number,
        len(scores),
        scores[0].deviation if scores else 0.0,
        result.scores["test"].mean,
        result.epsilon,
        time.perf_counter() - started,
    )


def read_results() -> dict[tuple[str, str, float, int], Trained]:
    """What has been trained."""
    if not RESULTS.exists():
        return {}
    with open(RESULTS, newline="") as file:
        return {
            (r["pipeline"], r["variant"], float(r["target"]), int(r["seed"])): Trained(
                int(r["steps"]),
                int(r["scores"]),
                *(float(r[name]) for name in Trained._fields[2:]),
            )
            for r in csv.DictReader(file)
        }


def train_all(seeds: int, variants: list[str]) -> None:
    """Trains what is missing, seed by seed."""
    names = ("pipeline", "variant", "target", "seed", *Trained._fields)
    for seed in range(seeds):
        for pipeline, those in reversed(VARIANTS.items()):
            for epsilon in reversed(EPSILONS):
                for variant in those:
                    key = pipeline, variant, epsilon, seed
                    if key in read_results() or variant not in variants:
                        continue
                    row = (*key, *trained(*key))
                    is_new = not RESULTS.exists()
                    with open(RESULTS, "a", newline="") as file:
                        writer = csv.writer(file)
                        if is_new:
                            writer.writerow(names)
                        writer.writerow(row)
                    print(dict(zip(names, row, strict=True)), flush=True)


def table(results: dict[Any, Trained]) -> str:
    """The results, as Markdown: mean and range over seeds."""
    rows = []
    for pipeline, those in VARIANTS.items():
        for variant in those:
            row = [pipeline, variant]
            for epsilon in EPSILONS:
                found = of_variant(results, pipeline, variant, epsilon)
                if not found:
                    row += ["", ""]
                    continue
                test = np.array([one.test for one in found])
                steps = [one.steps for one in found]
                noise = found[0].score_noise
                ends = f" ({test.min():.4f} to {test.max():.4f})" * (len(found) > 1)
                row.append(f"{test.mean():.4f}{ends}")
                taken = f"{min(steps)} to {max(steps)}" if len(set(steps)) > 1 else ""
                row.append((taken or f"{steps[0]}") + f"; {noise:.3f}" * (noise > 0))
            rows.append(tuple(row))
    head = ["pipeline", "run"]
    for epsilon in EPSILONS:
        head += [f"accuracy, epsilon {epsilon:g}", "steps; noise of a score"]
    return markdown(head, rows)


def of_variant(
    results: dict[Any, Trained], pipeline: str, variant: str, epsilon: float
) -> list[Trained]:
    """All seeds of one kind of run."""
    return [v for k, v in results.items() if k[:3] == (pipeline, variant, epsilon)]


def draw(results: dict[Any, Trained]) -> None:
    """Accuracy of each seed, by kind of run."""
    figure, panels = new_figure(2, size=(11, 4.2))
    colours = dict(zip(EPSILONS, ("#0072B2", "#D55E00"), strict=True))
    for axes, (pipeline, those) in zip(panels, VARIANTS.items(), strict=True):
        seen = defaultdict(bool)
        for place, variant in enumerate(those):
            for epsilon, marker in zip(EPSILONS, "os", strict=True):
                found = of_variant(results, pipeline, variant, epsilon)
                label = None if seen[epsilon] else f"epsilon {epsilon:g}"
                seen[epsilon] = seen[epsilon] or bool(found)
                where = np.linspace(-0.12, 0.12, max(len(found), 2))[: len(found)]
                axes.plot(
                    place + where,
                    [one.test for one in found],
                    marker,
                    color=colours[epsilon],
                    label=label,
                    alpha=0.8,
                )
        axes.set_title(pipeline)
        short = [textwrap.fill(name, 16) for name in those]
        axes.set_xticks(range(len(those)), short, fontsize=8)
        axes.set_xlim(-0.5, len(those) - 0.5)
        axes.set_ylabel("accuracy on test classes")
        axes.legend(frameon=False, loc="center right")
    save(figure, HERE / "adaptive_training.png", grid="y")


def main() -> None:
    """Trains what is missing; writes table and figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    every = sorted({name for those in VARIANTS.values() for name in those})
    parser.add_argument("--variants", nargs="*", default=every)
    given = parser.parse_args()
    use_all_cores()
    keep_compiled_kernels()
    train_all(given.seeds, given.variants)
    results = read_results()
    if results:
        (HERE / "adaptive_training.md").write_text(table(results) + "\n")
        draw(results)


if __name__ == "__main__":
    main()
