"""Private few-shot learning on the glyphs: what each pipeline reaches at each epsilon.

``python experiments/few_shot.py --runs example class --repeats 5`` trains what is not yet
in ``few_shot.csv``, which lies beside this script and gets one line a run as soon as it
is finished, then writes ``table.md``, ``ablation.md`` and ``few_shot.png`` from all that
is there; ``--runs`` alone only writes these. Every run has fresh entropy, and its epsilon
is computed again from its ledger.

Scores are those of 600 episodes; the settings were chosen on the validation classes.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from drawing import logarithmic, new_figure, save

from jaxdp_episodic import epsilon as epsilon_of
from jaxdp_episodic.cli import use_all_cores
from jaxdp_episodic.describe.schemes import Poisson
from jaxdp_episodic.report.ledger_file import read_ledger
from jaxdp_episodic.training.assemble import Tables, assembled
from jaxdp_episodic.training.config import TrainingConfig, read_config
from jaxdp_episodic.training.run_files import LEDGER
from jaxdp_episodic.training.statistics import Started

HERE = Path(__file__).resolve().parent
CONFIGS, RESULTS = HERE.parent / "configs", HERE / "few_shot.csv"
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
SCRATCH, P1, P2, P3 = "convolutions from scratch", "P1", "P2", "P3"
PIPELINES = {
    SCRATCH: "glyphs_5w1s",
    P1: "glyphs_linear",
    P2: "glyphs_plda",
    P3: "demo",
}
NAMES = {
    SCRATCH: "convolutions from scratch",
    P1: "P1: features, then a linear embedding by episodes",
    P2: "P2: features, then private statistics",
    P3: "P3: P2, then episodes",
}
# As far as rounding and the solver's stated error may lead the two apart.
SAME_EPSILON = 1e-6
Change = Callable[[TrainingConfig], dict[str, Any]]


class Run(NamedTuple):
    """What is trained.

    Attributes:
      pipeline: a key of `PIPELINES`.
      change: a key of `CHANGES`; empty: none.
      protected: "example" or "class".
      relation: the neighbouring relation.
      epsilon: the target, at the config's delta.
    """

    pipeline: str
    change: str
    protected: str
    relation: str
    epsilon: float


def learner(**fields: Any) -> Change:
    """A run with other fields of its learner."""
    return lambda config: {"learner": dataclasses.replace(config.learner, **fields)}


def optimizer(**fields: Any) -> Change:
    """A run with other fields of its optimizer."""
    return lambda config: {"optimizer": dataclasses.replace(config.optimizer, **fields)}


def half_of_the_episodes(config: TrainingConfig) -> dict[str, Any]:
    """Each episode of a partition with probability one half."""
    episodes = Poisson("episode", sampling_probability=0.5)
    sampling = dataclasses.replace(config.step.sampling, episodes=episodes)
    return {"step": dataclasses.replace(config.step, sampling=sampling)}


CHANGES: dict[str, Change] = {
    "Euclidean distances": learner(distance="euclidean", temperature=1.0),
    "no average of the parameters": optimizer(ema=None),
    "no re-splits": learner(resplits=False),
    "the mean not taken off": lambda config: {"start": None},
    "each episode with probability 1/2": half_of_the_episodes,
    "100 steps instead of 300": lambda config: {"num_steps": 100},
    "clip norm 1 instead of 0.1": lambda config: {"l2_clip_norm": 1.0},
}


def runs_of(kind: str) -> Iterator[Run]:
    """The runs of one of `KINDS`, those that say most first."""
    if kind in ("example", "class"):
        for epsilon in (1.0, 8.0, 0.25, 4.0, 2.0, 0.5):
            for pipeline in (P1, P2, P3):
                yield Run(pipeline, "", kind, "zero_out", epsilon)
    elif kind == "scratch":
        for epsilon in (1.0, 8.0, 0.25, 4.0, 2.0, 0.5):
            yield Run(SCRATCH, "", "example", "zero_out", epsilon)
    elif kind == "add_remove":
        for epsilon in (1.0, 8.0, 0.25, 4.0, 2.0, 0.5):
            yield Run(P3, "", "example", "add_remove", epsilon)
    elif kind == "ablation":
        for epsilon in (8.0, 1.0):
            yield Run(P1, "", "example", "zero_out", epsilon)
            yield Run(P1, "", "example", "add_remove", epsilon)
            for change in CHANGES:
                yield Run(P1, change, "example", "zero_out", epsilon)
    else:
        for pipeline in (P1, P2, P3):
            yield Run(pipeline, "", "example", "zero_out", float("inf"))


KINDS = ("example", "class", "add_remove", "ablation", "scratch", "without_noise")


def config_of(run: Run, cache: Path) -> TrainingConfig:
    """The run as a config; its features are those in ``cache``."""
    config = read_config(CONFIGS / f"{PIPELINES[run.pipeline]}.toml")
    assert config.evaluation is not None
    config = dataclasses.replace(
        config,
        epsilon=run.epsilon,
        step=dataclasses.replace(
            config.step,
            neighboring_relation=run.relation,
            privacy_unit=run.protected,
        ),
        features=dataclasses.replace(config.features, cache=str(cache)),
        evaluation=dataclasses.replace(
            config.evaluation, splits=("validation", "test"), without_noise=False
        ),
    )
    if run.change:
        config = dataclasses.replace(config, **CHANGES[run.change](config))
    return config


class Trained(NamedTuple):
    """What one run came to: a line of the results.

    Attributes:
      validation: accuracy on the validation classes.
      test: on the test classes.
      ledger: epsilon that its ledger says it was charged.
      seconds: of CPU.
    """

    validation: float
    test: float
    ledger: float
    seconds: float


def trained(run: Run, config: TrainingConfig, tables: Tables, place: Path) -> Trained:
    """Trains once in the folder ``place``, which is removed."""
    begun = time.process_time()
    shutil.rmtree(place, ignore_errors=True)
    trainer, evaluations, _ = assembled(config, tables)
    trainer.train(place, checkpoint_every=10**6, log_every=10**6)
    learner = trainer.learner if config.start is None else Started(trainer.learner)
    scores = {
        split: evaluation(learner, trainer.params).mean
        for split, evaluation in evaluations.items()
    }
    charged = float("inf")
    if run.epsilon != charged:
        content = read_ledger(place / LEDGER)
        step, num_steps = content.run_charged()
        charged = float(epsilon_of(step, num_steps=num_steps, delta=content.delta))
        stated = float(trainer.budget.spent(trainer.num_steps_charged))
        if not charged <= run.epsilon or abs(charged / stated - 1) > SAME_EPSILON:
            raise AssertionError(
                f"{run}: the ledger says {charged!r}, the run {stated!r}"
            )
    shutil.rmtree(place)
    seconds = time.process_time() - begun
    return Trained(scores["validation"], scores["test"], charged, seconds)


def read_results() -> dict[Run, list[Trained]]:
    """All that was trained so far."""
    found: dict[Run, list[Trained]] = defaultdict(list)
    if RESULTS.exists():
        with RESULTS.open(newline="", encoding="utf-8") as file:
            for *run, epsilon, a, b, c, d in list(csv.reader(file))[1:]:
                line = Trained(float(a), float(b), float(c), float(d))
                found[Run(*run, float(epsilon))].append(line)
    return found


def append_result(run: Run, line: Trained) -> None:
    """Writes one line, on the disk before this returns."""
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow((*Run._fields, *Trained._fields))
        numbers = [f"{value:.7g}" for value in (run.epsilon, *line[:3])]
        writer.writerow((*run[:-1], *numbers, f"{line.seconds:.1f}"))
        file.flush()
        os.fsync(file.fileno())


def train_missing(kinds: Sequence[str], repeats: int, out: Path) -> None:
    """Trains, repeat by repeat, what the results do not have so often yet."""
    tables: dict[str, Tables] = {}
    wanted = dict.fromkeys(run for kind in kinds for run in runs_of(kind))
    for repeat in range(repeats):
        for run in wanted:
            if len(read_results()[run]) > repeat:
                continue
            config = config_of(run, out / "features")
            data = repr((config.data.to_dict(), config.features.kind))
            if data not in tables:
                tables[data] = Tables(config, None)
            line = trained(run, config, tables[data], out / "run")
            append_result(run, line)
            print(repeat, *run, f"{line.test:.4f}", f"{line.seconds:.0f} s", flush=True)


def main() -> None:
    """Trains what is not there yet; writes tables and figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/few_shot"))
    parser.add_argument("--runs", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    use_all_cores()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    train_missing(options.runs, options.repeats, out)


if __name__ == "__main__":
    main()
