"""Private few-shot learning on other kinds of data than the glyphs: nine small sets.

``python experiments/small_sets.py`` makes the sets first. Results are in
``kinds_of_data.csv``; see `study` for the command. Each set is trained by the pipeline
that `plan` recommends for it and the epsilon; ``--pipeline`` names another one. A run
chooses by the validation classes what it releases; only then each of its stages is
scored on the test classes. Sets that were kept for the end run only where ``--only``
names them.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from drawing import markdown
from small_sets import FOLDER, KINDS, SPLITS, TEXTS, Kind, file_name
from study import Results, Run, Study, cpu_seconds

from jaxdp_episodic import Population
from jaxdp_episodic.tools.plan.pipelines import (
    BOTH,
    STATISTICS,
    STEPS,
    Pipeline,
    recommended_pipeline,
)
from jaxdp_episodic.tools.plan.question import (
    Compute,
    EpisodeShape,
    PlanDescription,
    PlanRequest,
)
from jaxdp_episodic.trainer.config.training_parts import CLASSIFIER, PLDA
from jaxdp_episodic.trainer.config.training_start import MEAN
from jaxdp_episodic.trainer.run.assemble import Tables, assembled
from jaxdp_episodic.trainer.run.selection import chosen_by
from jaxdp_episodic.training import Evaluation, TrainingConfig

PLANNED = "recommended"  # in place of the name of a pipeline
CLASSES = "classifier"  # which `plan` does not recommend: it was never the best
EPSILONS = (1.0, 8.0, 0.5, 4.0)
NO_HARM = 0.005  # the most that a released stage may be below untrained features
_DELTA, _STEPS, _EPISODES = 1e-5, 200, 600


def question(kind: Kind, epsilon: float) -> PlanDescription:
    """Returns what `plan` is asked about a set: its sizes alone."""
    classes, ways = kind.classes[0], min(5, kind.classes[0])
    drawn, episodes = min(2 * kind.shots, kind.most), kind.classes[0] // ways
    request = PlanRequest(
        epsilon=epsilon,
        delta=_DELTA,
        neighboring_relation="zero_out",
        schemes=("poisson",),
        episode=EpisodeShape(
            shots=kind.shots, examples=(drawn,), ways=ways, population=kind.most
        ),
        compute=Compute(episodes_per_step=episodes, total_episodes=300 * episodes),
    )
    sizes = [kind.most] * classes
    population = Population.from_sizes(sizes, level_names=("class", "example"))
    is_text = kind.kind == TEXTS
    train = {"features": {"kind": "none" if is_text else "wavelets"}}
    shape = (512,) if is_text else (28, 28)
    return PlanDescription(request, population, train, None, shape)


@functools.cache
def pipeline_of(name: str, kind: Kind, epsilon: float) -> Pipeline:
    """Returns the pipeline of this name, which is `plan`'s where that recommends it."""
    planned = recommended_pipeline(question(kind, epsilon))
    assert planned is not None
    if name in (PLANNED, planned.name):
        return planned
    return {
        STATISTICS: Pipeline(name, "", {"kind": PLDA}, PLDA),
        CLASSES: Pipeline(name, "", {"kind": PLDA}, CLASSIFIER),
        STEPS: Pipeline(name, "", {"kind": MEAN}),
        BOTH: Pipeline(name, "", {"kind": PLDA, "dimensions": 128}),
    }[name]


def config_of(
    kind: Kind, epsilon: float, pipeline: Pipeline, folder: Path, steps: int
) -> TrainingConfig:
    """Returns a run as a file would have it."""
    asked = question(kind, epsilon)
    episode, train = asked.request.episode, asked.train
    assert train is not None
    paths = {split: str(folder / f"{split}.npz") for split in SPLITS}
    everything: dict[str, Any] = {"type": "Poisson", "sampling_probability": 1.0}
    examples = {"name": "example", "population": episode.population}
    examples |= {"type": "WithoutReplacement", "size": episode.examples[0]}
    step: dict[str, Any] = {
        "privacy_unit": "example",
        "neighboring_relation": "zero_out",
        "sampling": {
            "type": "GroupedClasses",
            "num_classes": kind.classes[0],
            "ways": episode.ways,
            "episodes": everything | {"name": "episode"},
            "examples": examples,
        },
    }
    config: dict[str, Any] = {
        "version": 1,
        "epsilon": epsilon,
        "delta": _DELTA,
        "num_steps": steps,
        "l2_clip_norm": 0.1,
        "data": {"type": "Npz", "path": paths.pop("train"), **paths},
        "features": train["features"] | {"cache": str(folder / "features")},
        "step": step,
        "learner": {
            "kind": "protonet",
            "shots": episode.shots,
            "distance": "cosine",
            "temperature": 4.0,
            "resplits": True,
        },
        "model": {"kind": "linear", "embedding": 128},
        "optimizer": {"kind": "adam", "learning_rate": 0.01, "ema": 0.97},
    }
    if pipeline.learner == CLASSIFIER:  # single examples are drawn, and clipped alone
        number = float(kind.classes[0] * kind.most)
        cost = asked.request.compute.total_episodes * (episode.ways or 1)
        rate = cost * episode.examples[0] / (_STEPS * number)
        rate = float(f"{min(rate, 1.0):.2g}")
        drawn = {"name": "example", "population": episode.population}
        drawn |= {"type": "Poisson", "sampling_probability": rate}
        levels = [everything | {"name": "class"}, drawn]
        sampling = {"type": "MultistageSampling", "levels": levels}
        learner = {k: config["learner"][k] for k in ("shots", "distance")}
        written = {
            **config,
            "l2_clip_norm": 0.5,
            "step": {**step, "clip_unit": "example", "sampling": sampling},
            "learner": {"kind": CLASSIFIER, **learner},
            "model": {"kind": "linear"},
            "normalizer": float(f"{rate * number:.4g}"),
            "start": pipeline.start,
        }
    else:
        written = pipeline.config(config)
    return TrainingConfig.from_dict({**written, "type": "TrainingConfig"})


@functools.cache
def evaluations(kind: Kind, folder: Path) -> Mapping[str, Evaluation]:
    """Returns the held-out episodes of a set, by split."""
    tables = Tables(config_of(kind, 1.0, Pipeline(STEPS, ""), folder, _STEPS), None)
    return {
        split: Evaluation(
            tables.load(split),
            ways=min(5, number),
            shots=kind.shots,
            queries=min(5, kind.most - kind.shots),
            num_episodes=_EPISODES,
        )
        for split, number in zip(SPLITS[1:], kind.classes[1:], strict=True)
    }


class KindsOfData(Study):
    """Sets at each epsilon."""

    name, keys = "kinds_of_data", ("set", "pipeline", "epsilon")
    rare = tuple(name for name, kind in KINDS.items() if kind.is_last)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """The pipeline, if it is not `plan`'s."""
        named = (PLANNED, STATISTICS, CLASSES, STEPS, BOTH)
        parser.add_argument("--pipeline", choices=named, default=PLANNED)

    def runs(self) -> Iterator[Run]:
        """All sets at an epsilon, then the next."""
        for epsilon in EPSILONS:
            for name, kind in KINDS.items():
                pipeline = pipeline_of(self.options.pipeline, kind, epsilon)
                yield name, pipeline.name, epsilon

    def train(self, run: Run, repeat: int) -> dict[str, Any]:
        """Test scores of the first, the last and the released stage, and of all.

        The difference is that of released and untrained, episode by episode, and its
        standard error is over episodes. ``stages`` has of each what it scores on
        validation and test classes.
        """
        begun, (name, used, epsilon) = time.process_time(), run
        kind, folder = KINDS[name], (FOLDER / file_name(name)).resolve()
        pipeline = pipeline_of(used, kind, epsilon)
        config = config_of(kind, epsilon, pipeline, folder, self.steps or _STEPS)
        trainer, _, _ = assembled(config, Tables(config, None))
        held_out = evaluations(kind, folder)
        validation = {"validation": held_out["validation"]}
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(scratch)
            trainer.train(place, evaluations=validation, checkpoint_every=10**6)
        by_split = {
            split: {
                stage.name: evaluation.episodes(stage.learner, stage.params)
                for stage in trainer.stages()
            }
            for split, evaluation in held_out.items()
        }
        first, test = by_split["validation"], by_split["test"]
        names = list(test)
        released, _ = chosen_by(first, last=names[-1])
        difference, error = test[released].ahead_of(test[names[0]])
        each = (f"{n} {first[n].value:.4f} {test[n].value:.4f}" for n in names)
        numbers = {
            "untrained": test[names[0]].value,
            "last": test[names[-1]].value,
            "released": test[released].value,
            "stage": released,
            "difference": difference,
            "error": error,
        }
        numbers = {k: v if k == "stage" else f"{v:.4f}" for k, v in numbers.items()}
        return {
            "seed": repeat,
            **numbers,
            **cpu_seconds(begun),
            "stages": "; ".join(each),
        }

    def tables(self, found: Results) -> dict[str, str]:
        """Means of the runs, and in words how much is lost by what is released.

        The standard error of the difference is over episodes. Runs share these: it is
        the mean of theirs, and knows nothing of the runs' noise.
        """
        if not found.rows:
            return {}
        rows, ahead = [], []
        runs = dict.fromkeys(tuple(row[k] for k in self.keys) for row in found.rows)
        for run in sorted(runs, key=lambda r: (list(KINDS).index(r[0]), r[2], r[1])):
            columns = ("untrained", "released", "last", "difference", "error")
            means = [found.column(c, run).astype(float).mean() for c in columns]
            before, released, last, difference, error = means
            stages = Counter(row["stage"] for row in found.of(run))
            ahead.append(difference)
            rows.append(
                [
                    f"{run[0]}, {run[2]:g}",
                    run[1],
                    f"{before:.3f}",
                    f"{released:.3f}",
                    ", ".join(f"{stage} ({n})" for stage, n in stages.items()),
                    f"{last:.3f}",
                    f"{difference:+.4f} ± {error:.4f}",
                ]
            )
        head = ["set, epsilon", "pipeline", "untrained", "released", "stage (runs)"]
        text = markdown([*head, "last stage", "difference"], rows)
        return {self.name: f"{text}\n{harm(found.rows, ahead)}\n"}


def harm(rows: list[dict[str, Any]], ahead: list[float]) -> str:
    """Returns how much is lost by what is released, in words."""
    differences = [float(row["difference"]) for row in rows]
    few = [sum(v < -NO_HARM for v in values) for values in (differences, ahead)]
    behind = np.array(
        [
            max(float(stage.split()[-1]) for stage in row["stages"].split("; "))
            - float(row["released"])
            for row in rows
        ]
    )
    worst = rows[int(behind.argmax())]
    return (
        f"**Does it do harm?** Of {len(rows)} runs {few[0]} release what is more than "
        f"{NO_HARM:g} below untrained features, and of the {len(ahead)} rows {few[1]}; "
        f"the least difference of a run is {min(differences):+.4f}. The best stage of "
        f"the same run is ahead by {behind.mean():.4f} in the mean, by more than 0.01 "
        f"in {np.count_nonzero(behind > 0.01)} runs, and by {behind.max():.4f} at most "
        f"({worst['set']}, epsilon {worst['epsilon']:g})."
    )


if __name__ == "__main__":
    KindsOfData().main(__doc__)
