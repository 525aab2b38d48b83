"""What privacy costs on the schools, trained by gradient steps: epsilon against RMSE.

Results are in ``schools.csv``; see `study` for the command, which needs the extra
``[data]``. ``configs/train_schools.toml`` is trained at epsilon 1, 2, 4, 8 and without
noise, with the same settings otherwise. Scores are those on the test split, with 95 %
intervals; the settings were chosen on the validation split.

Two baselines without privacy: *pooled*, one linear regression on all training pupils,
and *per school*, a ridge regression on the support pupils of each held-out school
alone.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from drawing import markdown
from study import CONFIGS, Results, Run, Study

from jaxdp_episodic.training import Episode, Evaluation, read_config, run_training

EPSILONS = (1.0, 2.0, 4.0, 8.0, math.inf)
CONFIG = CONFIGS / "train_schools.toml"
POOLED, PER_SCHOOL = "pooled", "per school"
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


def baseline(name: str) -> Any:
    """Returns the test score of a baseline on the schools."""
    config = read_config(CONFIG)
    wanted = config.evaluation
    assert wanted is not None

    def score(split: str, learner: Any, params: Any) -> Any:
        episodes = Evaluation(
            config.data.load(split),
            ways=None,
            shots=config.learner.shots,
            queries=wanted.queries,
            num_episodes=wanted.num_episodes,
        )
        return episodes(learner, params)

    if name == POOLED:
        train = config.data.load("train")
        assert train.targets is not None
        inputs = np.asarray(with_one(train.features))
        coefficients = np.linalg.lstsq(inputs, train.targets, rcond=None)[0]
        return score("test", Pooled(), jnp.asarray(coefficients, jnp.float32))
    means = [score("validation", PerSchool(), jnp.float32(r)).mean for r in RIDGES]
    best = RIDGES[int(np.argmin(means))]
    return score("test", PerSchool(), jnp.float32(best))


class Schools(Study):
    """A config at each epsilon, and baselines."""

    name, repeats, keys = "schools", 1, ("epsilon",)

    def runs(self) -> list[Run]:
        """All epsilons, then what has none."""
        return [(epsilon,) for epsilon in (*EPSILONS, POOLED, PER_SCHOOL)]

    def train(self, run: Run, repeat: int) -> dict[str, Any]:
        """The test score of the last stage, and its interval."""
        del repeat
        (epsilon,) = run
        if isinstance(epsilon, str):
            score = baseline(epsilon)
        else:
            config = read_config(CONFIG)
            assert config.evaluation is not None
            config = dataclasses.replace(
                config,
                epsilon=epsilon,
                num_steps=self.steps or config.num_steps,
                evaluation=dataclasses.replace(config.evaluation, select=False),
            )
            folder = self.out / "run"
            shutil.rmtree(folder, ignore_errors=True)
            score = run_training(config, folder).scores["test"]
        return {name: float(getattr(score, name)) for name in ("mean", "low", "high")}

    def tables(self, found: Results) -> dict[str, str]:
        """Scores with their intervals."""
        text = "{mean:.3f} ({low:.3f} to {high:.3f})"
        rows = [
            [str(row["epsilon"]).removesuffix(".0"), text.format(**row)]
            for row in found.rows
        ]
        return {self.name: markdown(["epsilon", "test RMSE"], rows)}


if __name__ == "__main__":
    Schools().main(__doc__)
