"""What privacy costs in accuracy: epsilon against score, glyphs and schools.

``python experiments/frontier.py --out results/frontier`` trains each config at epsilon
1, 2, 4, 8 and without noise, with the same settings otherwise, and writes ``table.md``,
``scores.json`` and ``frontier.png``. The schools need the extra ``[data]``. Scores are
those on the test split; the settings were chosen on the validation split.

Two baselines for the schools, both without privacy: *pooled*, one linear regression on
all training pupils, and *per school*, a ridge regression on the support pupils of each
held-out school alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from jaxdp_episodic.tools.cli import use_all_cores
from jaxdp_episodic.tools.train.run import run_training
from jaxdp_episodic.training import (
    Episode,
    Evaluation,
    Score,
    TrainingConfig,
    read_config,
)

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TARGETS = (1.0, 2.0, 4.0, 8.0, float("inf"))
RUNS = {"glyphs 5-way 1-shot": "glyphs_5w1s", "schools": "train_schools"}
RIDGES = (0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Pooled:
    """One linear regression for everybody; ``params`` are its coefficients."""

    is_regression: ClassVar[bool] = True

    def predict(self, params: Any, episode: Episode) -> Any:
        """Predictions for the queries."""
        return with_one(episode.query_inputs) @ params


@dataclass(frozen=True)
class PerSchool:
    """A ridge regression on the support of each school; ``params`` is the ridge."""

    is_regression: ClassVar[bool] = True

    def predict(self, params: Any, episode: Episode) -> Any:
        """Predictions for the queries."""
        inputs = with_one(episode.support_inputs)
        weighted = inputs * episode.support_mask[:, None]
        ridge = params * jnp.eye(inputs.shape[1]).at[-1, -1].set(1e-3)
        coefficients = jnp.linalg.solve(
            weighted.T @ inputs + ridge, weighted.T @ episode.support_targets
        )
        return with_one(episode.query_inputs) @ coefficients


def with_one(inputs: Any) -> Any:
    """Inputs (n, d) with a column of ones."""
    return jnp.concatenate([inputs, jnp.ones((len(inputs), 1))], axis=1)


def school_baselines(config: TrainingConfig) -> dict[str, Score]:
    """Returns the test scores of the two baselines."""
    assert config.evaluation is not None
    episodes = {
        split: Evaluation(
            config.data.load(split),
            ways=None,
            shots=config.learner.shots,
            queries=config.evaluation.queries,
            num_episodes=config.evaluation.num_episodes,
        )
        for split in ("validation", "test")
    }
    train = config.data.load("train")
    assert train.targets is not None
    inputs = np.concatenate([train.features, np.ones((train.num_examples, 1))], axis=1)
    coefficients = np.linalg.lstsq(inputs, train.targets, rcond=None)[0]
    pooled = episodes["test"](Pooled(), jnp.asarray(coefficients, jnp.float32))
    chosen = min(
        RIDGES, key=lambda r: episodes["validation"](PerSchool(), jnp.float32(r)).mean
    )
    return {
        "pooled": pooled,
        "per school": episodes["test"](PerSchool(), jnp.float32(chosen)),
    }


def train(name: str, target: float, folder: Path) -> Score:
    """Returns the test score of one config at one epsilon, of its last stage."""
    config = read_config(CONFIGS / f"{name}.toml")
    assert config.evaluation is not None
    config = dataclasses.replace(
        config,
        epsilon=target,
        checkpoint_every=10_000,
        evaluation=dataclasses.replace(config.evaluation, select=False),
    )
    result = run_training(
        config, folder / f"{name}-{target:g}", title=f"{name}, epsilon {target:g}"
    )
    return result.scores["test"]


def table(scores: dict[str, dict[str, Score]]) -> str:
    """The scores as Markdown."""
    rows = ["| | " + " | ".join(scores) + " |", "|---" * (len(scores) + 1) + "|"]
    names = list(dict.fromkeys(name for column in scores.values() for name in column))
    for name in names:
        cells = []
        for column in scores.values():
            s = column.get(name)
            cells.append(f"{s.mean:.3f} ({s.low:.3f} to {s.high:.3f})" if s else "")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def draw(scores: dict[str, dict[str, Score]], path: Path) -> None:
    """Score against epsilon, one panel a data set."""
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(scores)))
    for axes, (title, column) in zip(panels, scores.items(), strict=True):
        trained = [column[label(target)] for target in TARGETS]
        x = np.arange(len(TARGETS))
        mean = np.array([s.mean for s in trained])
        ends = np.array([[s.low, s.high] for s in trained]).T
        axes.errorbar(
            x,
            mean,
            np.abs(ends - mean),
            color="#2a6fbb",
            marker="o",
            capsize=3,
            label="trained on episodes",
        )
        styles = zip(("--", ":"), ("#333333", "#c8641b"), strict=True)
        rest = {k: v for k, v in column.items() if not k.startswith("epsilon")}
        for (name, score), (style, color) in zip(rest.items(), styles, strict=False):
            axes.axhline(score.mean, ls=style, color=color, label=f"{name}, no privacy")
        axes.set_xticks(
            x, [f"{t:g}" if np.isfinite(t) else "no noise" for t in TARGETS]
        )
        axes.set_xlabel("epsilon at delta = 1e-5")
        axes.set_ylabel(f"{trained[0].name}, held out (95 %)")
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        # Below: within, it would hide a baseline.
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    figure.savefig(path, dpi=150)


def label(target: float) -> str:
    """The table's name of a target."""
    return f"epsilon {target:g}" if np.isfinite(target) else "epsilon inf (no noise)"


def main() -> None:
    """Trains everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/frontier"))
    parser.add_argument("--only", choices=list(RUNS.values()), help="one data set")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    use_all_cores()
    scores: dict[str, dict[str, Score]] = {}
    for title, name in RUNS.items():
        if options.only in (None, name):
            scores[title] = {label(t): train(name, t, options.out) for t in TARGETS}
            if name == "train_schools":
                config = read_config(CONFIGS / f"{name}.toml")
                scores[title] |= school_baselines(config)
    plain = {k: {n: s._asdict() for n, s in v.items()} for k, v in scores.items()}
    (options.out / "scores.json").write_text(json.dumps(plain, indent=2) + "\n")
    (options.out / "table.md").write_text(table(scores))
    draw(scores, options.out / "frontier.png")
    print(table(scores))


if __name__ == "__main__":
    main()
