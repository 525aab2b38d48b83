"""Private few-shot learning on the glyphs: what each pipeline reaches at each epsilon.

``python experiments/few_shot.py --runs example class --repeats 5`` trains what is not
yet in ``few_shot.csv``, which lies beside this script and gets a line as soon as a run
is finished, then writes ``frontier.md``, ``ablation.md`` and ``few_shot.png`` from all
that is there; ``--repeats 0`` only writes these. Every run has fresh entropy, and its
epsilon is computed again from its ledger.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from drawing import logarithmic, new_figure, save

from jaxdp_episodic import epsilon as epsilon_of
from jaxdp_episodic.accountant.describe.schemes import Poisson
from jaxdp_episodic.accountant.report.ledger_file import read_ledger
from jaxdp_episodic.tools.cli import use_all_cores
from jaxdp_episodic.trainer.run.assemble import Tables, assembled
from jaxdp_episodic.trainer.run.run_files import LEDGER
from jaxdp_episodic.trainer.statistics.statistics import Started
from jaxdp_episodic.training import Evaluation, ProtoNet, TrainingConfig, read_config

HERE = Path(__file__).resolve().parent
CONFIGS, RESULTS = HERE.parent / "configs", HERE / "few_shot.csv"
EPSILONS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
SCRATCH, P1, P2, P3, SCHOOLS = "from scratch", "P1", "P2", "P3", "schools"
PIPELINES = {
    SCRATCH: "glyphs_5w1s",
    P1: "glyphs_linear",
    P2: "glyphs_plda",
    P3: "demo",
    SCHOOLS: "schools_mixed",
}
BY_CLASS = {P1: "glyphs_class"}  # where another config is for whole classes
NAMES = {
    SCRATCH: "convolutions from scratch",
    P1: "P1: linear embedding by episodes",
    P2: "P2: private statistics",
    P3: "P3: P2, then episodes",
    SCHOOLS: "mixed model of schools, RMSE",
}
SETTINGS = (
    ("example", "zero_out"),
    ("example", "add_remove"),
    ("class", "zero_out"),
    ("pupil", "add_remove"),
)
NOTHING = "features alone"
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#0072B2")  # Okabe and Ito
TICKS = (0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
# As far as rounding and the solver's stated error may lead the two apart.
SAME_EPSILON = 1e-6
Change = Callable[[TrainingConfig], dict[str, Any]]


class Run(NamedTuple):
    """What is trained.

    Attributes:
      pipeline: a key of `PIPELINES`.
      change: a key of `CHANGES`; empty: none.
      protected: "example" or "class", of schools "pupil".
      relation: the neighbouring relation.
      epsilon: the target, at the config's delta.
    """

    pipeline: str
    change: str
    protected: str
    relation: str
    epsilon: float


def part(name: str, **fields: Any) -> Change:
    """A run with other fields in one of its tables."""
    return lambda config: {name: dataclasses.replace(getattr(config, name), **fields)}


def half_of_the_episodes(config: TrainingConfig) -> dict[str, Any]:
    """Each episode of a partition with probability one half."""
    episodes = Poisson("episode", sampling_probability=0.5)
    sampling = dataclasses.replace(config.step.sampling, episodes=episodes)
    return {"step": dataclasses.replace(config.step, sampling=sampling)}


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
        relations = {"": ("zero_out", "add_remove")}
        for change in ("", *CHANGES):
            for relation in relations.get(change, ("zero_out",)):
                for epsilon in (8.0, 1.0):
                    yield Run(P1, change, "example", relation, epsilon)
    elif kind == "schools":
        for epsilon in (*EPSILONS, float("inf")):
            yield Run(SCHOOLS, "", "pupil", "add_remove", epsilon)
    else:
        yield Run(NOTHING, "", "example", "zero_out", 0.0)
        for pipeline in (P1, P2, P3):
            yield Run(pipeline, "", "example", "zero_out", float("inf"))


KINDS = (
    "example",
    "class",
    "add_remove",
    "ablation",
    "scratch",
    "without_noise",
    "schools",
)


def config_of(run: Run, cache: Path) -> TrainingConfig:
    """The run as a config; its features are those in ``cache``."""
    name = PIPELINES.get(run.pipeline, PIPELINES[P2])
    if run.protected == "class":
        name = BY_CLASS.get(run.pipeline, name)
    config = read_config(CONFIGS / f"{name}.toml")
    assert config.evaluation is not None
    config = dataclasses.replace(
        config,
        epsilon=run.epsilon or float("inf"),
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
      test: on the test classes; of schools both are RMSEs.
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
    if run.pipeline == NOTHING:
        return nothing_learned(config, tables)
    shutil.rmtree(place, ignore_errors=True)
    trainer, evaluations, _ = assembled(config, tables)
    trainer.train(place, checkpoint_every=10**6, log_every=10**6)
    projects = config.start is not None and run.pipeline != SCHOOLS
    learner = Started(trainer.learner) if projects else trainer.learner
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


def nothing_learned(config: TrainingConfig, tables: Tables) -> Trained:
    """What the features tell apart by themselves: no training, no epsilon."""
    assert config.evaluation is not None
    learner = ProtoNet(lambda _, inputs: inputs, ways=5, distance="cosine")
    scores = [
        Evaluation(
            tables.load(split), ways=5, shots=1, queries=config.evaluation.queries
        )(learner, {}).mean
        for split in ("validation", "test")
    ]
    return Trained._make((*scores, 0.0, 0.0))


def read_results() -> dict[Run, list[Trained]]:
    """All that was trained so far."""
    found: dict[Run, list[Trained]] = defaultdict(list)
    if RESULTS.exists():
        with RESULTS.open(newline="", encoding="utf-8") as file:
            for *run, epsilon, a, b, c, d in list(csv.reader(file))[1:]:
                line = Trained(float(a), float(b), float(c), float(d))
                found[Run._make((*run, float(epsilon)))].append(line)
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


def train_missing(wanted: Iterable[Run], repeats: int, out: Path) -> None:
    """Trains, repeat by repeat, what the results do not have so often yet."""
    tables: dict[str, Tables] = {}
    wanted = dict.fromkeys(wanted)
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


def shown(found: Sequence[Trained]) -> str:
    """Mean, standard deviation and number of test scores."""
    if not found:
        return ""
    scores = [line.test for line in found]
    spread = f" ± {np.std(scores, ddof=1):.4f}" if len(scores) > 1 else ""
    return f"{np.mean(scores):.4f}{spread} ({len(scores)})"


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def frontier_table(found: Mapping[Run, list[Trained]]) -> str:
    """All pipelines at all epsilons; in brackets how many runs."""
    lines = []
    for protected, relation in SETTINGS:
        for pipeline in PIPELINES:
            row = [
                shown(found.get(Run(pipeline, "", protected, relation, epsilon), []))
                for epsilon in (*EPSILONS, float("inf"))
            ]
            if any(row):
                lines.append([NAMES[pipeline], f"{protected}, {relation}", *row])
    epsilons = [f"{epsilon:g}" for epsilon in EPSILONS]
    return markdown(["pipeline", "protected", *epsilons, "no noise"], lines)


def ablation_table(found: Mapping[Run, list[Trained]]) -> str:
    """P1 with one part taken away at a time: the score, and how far it falls."""
    lines = []
    for change in ("", "add_remove", *CHANGES):
        row = []
        for epsilon in (8.0, 1.0):
            whole = found.get(Run(P1, "", "example", "zero_out", epsilon), [])
            relation = "add_remove" if change == "add_remove" else "zero_out"
            name = "" if change == "add_remove" else change
            runs = found.get(Run(P1, name, "example", relation, epsilon), [])
            row.append(shown(runs))
            if change and runs and whole:
                means = [
                    np.mean([line.test for line in each]) for each in (runs, whole)
                ]
                row[-1] += f": {means[0] - means[1]:+.4f}"
        other = "`add_remove` in place of `zero_out`"
        label = other if change == "add_remove" else change or "all of P1"
        lines.append([label, *row])
    return markdown(["P1 with", "epsilon 8", "epsilon 1"], lines)


def draw(found: Mapping[Run, list[Trained]], path: Path) -> None:
    """Test accuracy against epsilon, for examples and for classes.

    Upwards is the error, logarithmic: from 0.98 to 0.99 is as far as from 0.6 to 0.8.
    """
    figure, panels = new_figure(2, size=(9.6, 5.4), sharey=True)
    titles = "one drawing protected", "one syllable protected, with all its drawings"
    for axes, title, protected in zip(
        panels, titles, ("example", "class"), strict=True
    ):
        for place, pipeline in enumerate(PIPELINES):
            for relation in ("zero_out", "add_remove")[: 1 + (pipeline == P3)]:
                lines = {
                    epsilon: [line.test for line in found[run]]
                    for epsilon in EPSILONS
                    if (run := Run(pipeline, "", protected, relation, epsilon)) in found
                }
                if lines:
                    draw_line(axes, place, pipeline, relation, lines)
        logarithmic(axes, "x", list(EPSILONS))
        axes.set_xlim(0.9 * EPSILONS[0], 1.15 * EPSILONS[-1])
        axes.set_xlabel("epsilon at delta = 1e-5")
        axes.set_title(title, loc="left")
    nothing = found.get(Run(NOTHING, "", "example", "zero_out", 0.0), [])
    for axes in panels if nothing else ():
        axes.axhline(1 - nothing[0].test, color="0.5", linewidth=1, linestyle=":")
        axes.annotate(
            "features alone, nothing learned",
            (EPSILONS[-1], 1 - nothing[0].test),
            xytext=(0, -3),
            textcoords="offset points",
            ha="right",
            va="top",
            color="0.35",
            fontsize=8.5,
        )
    axes = panels[0]
    logarithmic(axes, "y", [1 - accuracy for accuracy in TICKS])
    axes.yaxis.set_major_formatter(lambda error, _: f"{1 - error:g}")
    runs = [lines for run, lines in found.items() if run.pipeline != SCHOOLS]
    lowest = min(line.test for lines in runs for line in lines)
    axes.set_ylim(1.2 * (1 - lowest), 1 - TICKS[-1])
    axes.set_ylabel("accuracy on unseen syllables, 5-way 1-shot")
    for axes in panels:  # each has its own, as the numbers of runs differ
        axes.legend(
            frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(0, -0.13)
        )
    save(figure, path)


def draw_line(
    axes: Any, place: int, pipeline: str, relation: str, lines: dict[float, list[float]]
) -> None:
    """One pipeline: means, with a bar of one standard deviation to each side."""
    means = np.array([np.mean(scores) for scores in lines.values()])
    spread = [np.std(s, ddof=1) if len(s) > 1 else 0.0 for s in lines.values()]
    numbers = sorted({len(scores) for scores in lines.values()})
    runs = " to ".join(str(n) for n in dict.fromkeys((numbers[0], numbers[-1])))
    is_plain = relation == "zero_out"
    other = "" if is_plain else ", add_remove"
    axes.errorbar(
        list(lines),
        1 - means,
        yerr=spread,
        label=f"{NAMES[pipeline]}{other} ({runs} run{'s' * (runs != '1')} each)",
        color=COLOURS[place],
        marker="osD^"[place],
        markersize=5,
        markerfacecolor=COLOURS[place] if is_plain else "white",
        linestyle="-" if is_plain else "--",
        linewidth=1.6,
        capsize=2.5,
    )


def main() -> None:
    """Trains what is not there yet; writes tables and figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/few_shot"))
    parser.add_argument("--runs", nargs="*", default=KINDS[:-1], choices=KINDS)
    parser.add_argument("--pipelines", nargs="+", default=[NOTHING, *PIPELINES])
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    use_all_cores()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    wanted = [
        run
        for kind in options.runs
        for run in runs_of(kind)
        if run.pipeline in options.pipelines
        and run.epsilon in (0.0, *options.epsilons, float("inf"))
    ]
    train_missing(wanted, options.repeats, out)
    found = read_results()
    (out / "frontier.md").write_text(frontier_table(found))
    (out / "ablation.md").write_text(ablation_table(found))
    print(frontier_table(found), ablation_table(found), sep="\n")
    draw(found, out / "few_shot.png")


if __name__ == "__main__":
    main()
