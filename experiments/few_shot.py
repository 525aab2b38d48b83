"""Private few-shot learning on the glyphs: what each pipeline reaches at each epsilon.

``python experiments/few_shot.py --out results/few_shot`` trains each pipeline at each
epsilon, as often as ``--repeats`` says, every run with fresh entropy; a run that is in
``scores.json`` is not trained again. It writes that file, ``table.md`` and
``few_shot.png``. ``--ablation`` takes one part of the linear pipeline away at a time.
Scores are those on the test classes, 600 episodes; the settings were chosen on the
validation classes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jaxdp_episodic.cli import use_all_cores
from jaxdp_episodic.files.atomic import write_atomically
from jaxdp_episodic.training.config import TrainingConfig, read_config
from jaxdp_episodic.training.run import run_training

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# Name in the table -> config.
PIPELINES = {
    "convolutions from scratch": "glyphs_5w1s",
    "P1: features, linear, episodes": "glyphs_linear",
    "P2: features, private statistics": "glyphs_plda",
    "P3: P2, then episodes": "demo",
    "schools: mixed model, RMSE": "schools_mixed",  # under add_remove
}
RELATIONS = ("zero_out", "add_remove")
Change = Callable[[TrainingConfig], dict[str, Any]]


def learner(**fields: Any) -> Change:
    """A run with other fields of its learner."""
    return lambda config: {"learner": dataclasses.replace(config.learner, **fields)}


ABLATION: dict[str, Change] = {
    "all of P1": lambda config: {},
    "Euclidean distances": learner(distance="euclidean", temperature=1.0),
    "no average of the parameters": lambda config: {
        "optimizer": dataclasses.replace(config.optimizer, ema=None)
    },
    "no re-splits": learner(resplits=False),
    "the mean not taken off": lambda config: {"start": None},
}


def score_of(config: TrainingConfig, folder: Path) -> float:
    """The test score of a run, which is not kept."""
    assert config.evaluation is not None
    config = dataclasses.replace(
        config,
        checkpoint_every=10_000,
        features=dataclasses.replace(config.features, cache=str(folder / "features")),
        evaluation=dataclasses.replace(
            config.evaluation, splits=("test",), every=None, without_noise=False
        ),
    )
    place = folder / "run"
    shutil.rmtree(place, ignore_errors=True)
    result = run_training(config, place, base=folder)
    ledger = result.trainer.budget.spent(result.trainer.num_steps_charged)
    assert config.epsilon == np.inf or ledger <= config.epsilon
    shutil.rmtree(place)
    return result.scores["test"].mean


def with_relation(config: TrainingConfig, relation: str) -> TrainingConfig:
    """The same run under another neighbouring relation."""
    step = dataclasses.replace(config.step, neighboring_relation=relation)
    return dataclasses.replace(config, step=step)


def wanted(options: argparse.Namespace) -> dict[str, TrainingConfig]:
    """The runs that were asked for, by ``name | relation | epsilon``."""
    runs = {}
    names = [n for n in PIPELINES if any(p in n for p in options.pipelines)]
    for name in [] if options.ablation else names:
        config = read_config(CONFIGS / f"{PIPELINES[name]}.toml")
        for relation in options.relations:
            for epsilon in options.epsilons:
                run = dataclasses.replace(config, epsilon=epsilon)
                key = f"{name} | {relation} | {epsilon:g}"
                runs[key] = with_relation(run, relation)
    if options.ablation:
        config = read_config(CONFIGS / "glyphs_linear.toml")
        for name, change in ABLATION.items():
            for epsilon in options.epsilons:
                run = dataclasses.replace(config, epsilon=epsilon, **change(config))
                runs[f"{name} | zero_out | {epsilon:g}"] = run
    return runs


def table(scores: dict[str, list[float]]) -> str:
    """Mean and standard deviation of all runs, as Markdown."""
    keys = [tuple(key.split(" | ")) for key in scores]
    epsilons = sorted({float(epsilon) for _, _, epsilon in keys})
    lines = ["| pipeline | relation | " + " | ".join(f"{e:g}" for e in epsilons) + " |"]
    lines.append("|---|---|" + "---|" * len(epsilons))
    for name, relation in dict.fromkeys((n, r) for n, r, _ in keys):
        cells = []
        for epsilon in epsilons:
            found = scores.get(f"{name} | {relation} | {epsilon:g}", [])
            cell = f"{np.mean(found):.4f}" if found else ""
            if len(found) > 1:
                cell += f" ± {np.std(found, ddof=1):.4f}"
            cells.append(cell + (f" ({len(found)})" if found else ""))
        lines.append(f"| {name} | {relation} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(scores: dict[str, list[float]], path: Path) -> None:
    """Score against epsilon, a line for each pipeline."""
    figure = Figure((7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    for name in PIPELINES:
        for relation, style in zip(RELATIONS, ("-", "--"), strict=True):
            points = [
                (float(key.split(" | ")[2]), np.mean(found))
                for key, found in scores.items()
                if key.startswith(f"{name} | {relation} | ") and not key.endswith("inf")
            ]
            if points:
                axes.plot(
                    *zip(*sorted(points), strict=True),
                    style,
                    color=f"C{list(PIPELINES).index(name)}",
                    marker="o",
                    ms=4,
                    label=f"{name} ({relation})",
                )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("epsilon at delta = 1e-5, one drawing protected")
    axes.set_ylabel("test accuracy, 5-way 1-shot")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Trains what is not there yet; writes scores, table and figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/few_shot"))
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--relations", nargs="+", default=RELATIONS, choices=RELATIONS)
    parser.add_argument("--pipelines", nargs="+", default=["P1", "P2", "P3"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ablation", action="store_true")
    options = parser.parse_args()
    use_all_cores()
    name = "ablation" if options.ablation else "scores"
    path = options.out.resolve() / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    scores = json.loads(path.read_text()) if path.exists() else {}
    for repeat in range(options.repeats):
        for key, config in wanted(options).items():
            if len(scores.get(key, [])) <= repeat:
                found = score_of(config, path.parent)
                scores.setdefault(key, []).append(round(found, 5))
                text = json.dumps(scores, indent=1).encode()
                write_atomically(path, lambda file, text=text: file.write(text))
    (path.parent / f"{name}.md").write_text(table(scores))
    print(table(scores))
    if not options.ablation:
        draw(scores, path.parent / "few_shot.png")


if __name__ == "__main__":
    main()
