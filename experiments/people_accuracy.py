"""What protecting people costs: accuracy against epsilon, glyphs dealt to people.

``python experiments/people_accuracy.py`` trains what is not yet in
``people_accuracy.csv``, which lies beside this script and gets a line as soon as a run
is finished, then writes ``people_accuracy.md`` and ``.png``. All else is equal: fixed
wavelet features, a linear embedding, equally many episodes, steps, and delta 1e-5.
``--repeats 0`` only writes these; ``--quick`` trains a few short runs, kept elsewhere.

Nobody drew the glyphs. As people count the 41 typefaces, of which 20 are in each class;
and, made up, 3,600 people who are dealt ten drawings each at random, of ten classes.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from drawing import logarithmic, new_figure, save
from few_shot import COLOURS, markdown

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.report.ledger_file import read_ledger
from jaxdp_episodic.data import ExampleTable, Owners, truncated
from jaxdp_episodic.tools.cli import keep_compiled_kernels, use_all_cores
from jaxdp_episodic.trainer.config.training_parts import PeopleConfig
from jaxdp_episodic.trainer.config.training_step import StepConfig
from jaxdp_episodic.trainer.data.splits import TRAIN
from jaxdp_episodic.trainer.run.assemble import Tables, run_parts
from jaxdp_episodic.trainer.run.run_files import LEDGER
from jaxdp_episodic.trainer.statistics.statistics import Started
from jaxdp_episodic.training import (
    Evaluation,
    ProtoNet,
    StartConfig,
    Trainer,
    TrainingConfig,
    read_config,
)

HERE = Path(__file__).resolve().parent
CONFIGS, RESULTS = HERE.parent / "configs", HERE / "people_accuracy.csv"
EPSILONS = (1.0, 2.0, 4.0, 8.0, math.inf)
QUICK_STEPS = 3
CLASSES = 1_800
DRAWINGS = 20  # of a class
LOOSE = 1e-3  # share of a target that calibrations may leave
DEALT = 7  # the seed by which drawings are dealt: public, as who owns what is made up


class People(NamedTuple):
    """Who are the people.

    Attributes:
      number: of people.
      drawings: of each, at most, each of another class.
      block: people a block.
      episodes: a step, on average.
      steps: of a run.
      pairs: how private statistics pair, of `StartConfig`.
    """

    number: int
    drawings: int
    block: int
    episodes: int
    steps: int
    pairs: str


TYPEFACES = "41 typefaces"
QUICK = "3,600 people, 10 drawings each"
PEOPLE = {
    TYPEFACES: People(41, CLASSES, 2, 20, 20, "people"),
    QUICK: People(3_600, 10, 20, 60, 100, "class"),
}
USUAL, GROUP = "usual episodes", "usual episodes, group privacy"
BLOCKS, STATISTICS = "episodes in blocks of people", "private statistics of people"
DESIGNS = (USUAL, BLOCKS, STATISTICS, GROUP)
NOTHING = "features alone"


class Run(NamedTuple):
    """What is trained: for whom (a key of `PEOPLE`), how, and the target."""

    people: str
    design: str
    epsilon: float


class Trained(NamedTuple):
    """What one run came to: a line of the results.

    Attributes:
      noise: multiplier of the gradient steps; of statistics that of the last.
      test: accuracy on the test classes.
      ledger: epsilon of a person that its ledger says it was charged.
      seconds: of CPU, without the calibration.
    """

    noise: float
    test: float
    ledger: float
    seconds: float


class DealtTables(Tables):
    """The glyphs, with the people of a setting as owners of those for training."""

    def __init__(self, name: str, cache: Path) -> None:
        config = config_of(Run(name, GROUP, math.inf))  # which bounds nobody
        kept = dataclasses.replace(config.features, cache=str(cache))
        super().__init__(dataclasses.replace(config, features=kept), None)
        self._name = name

    def load(self, split: str) -> ExampleTable:
        """Returns a split; somebody beyond the bounds is an error."""
        table = super().load(split)
        if split != TRAIN:
            return table
        people = PEOPLE[self._name]
        if self._name != TYPEFACES:
            table = dataclasses.replace(table, owners=dealt(people))
        table, self.truncation = truncated(table, bounds(people), truncate=False)
        return table


def dealt(people: People) -> Owners:
    """Deals the drawings at random, to each person of as many different classes.

    One drawing of every class is in each of 20 rounds; a round is shuffled and cut.
    """
    random = np.random.default_rng(DEALT)
    rounds = random.permuted(np.tile(np.arange(DRAWINGS), (CLASSES, 1)), axis=1)
    place = np.stack([random.permutation(CLASSES) for _ in range(DRAWINGS)])
    hand = place // people.drawings  # (rounds, classes)
    of_round = hand + np.arange(DRAWINGS)[:, None] * (CLASSES // people.drawings)
    codes = of_round[rounds, np.arange(CLASSES)[:, None]]
    return Owners(codes.reshape(-1), np.arange(people.number))


def bounds(people: People) -> jde.PersonBounds:
    """The public bounds of a person."""
    return jde.PersonBounds(examples=1, classes=people.drawings)


def episodes_of(design: str, people: People) -> int:
    """The episodes of which a step draws."""
    return people.number // people.block if design == BLOCKS else CLASSES // 5


def sampling(design: str, people: People) -> Any:
    """How a step draws: about `EPISODES` episodes, of all classes or of blocks."""
    rate = people.episodes / episodes_of(design, people)
    episodes = jde.Poisson("episode", sampling_probability=rate)
    if design != BLOCKS:
        drawn = jde.WithoutReplacement("example", size=2, population=DRAWINGS)
        return jde.GroupedClasses(
            num_classes=CLASSES, ways=5, episodes=episodes, examples=drawn
        )
    return jde.PeopleBlocks(
        num_people=people.number,
        people_per_block=people.block,
        episodes=episodes,
        sampling=jde.MultistageSampling(
            jde.WithoutReplacement("class", size=5),
            jde.WithoutReplacement("example", size=2),
        ),
    )


def config_of(run: Run, steps: int | None = None) -> TrainingConfig:
    """The run as a config.

    Group privacy: what is (e/k, d')-private for one drawing is (e, d)-private for k of
    them, ``d = d' (exp(e) - 1) / (exp(e/k) - 1)`` (Vadhan 2017, Lemma 2.2).
    """
    people = PEOPLE[run.people]
    is_group, is_start = run.design == GROUP, run.design == STATISTICS
    # An episode of a block looks at what is there: bounds would say nothing of it.
    bounded = None if run.design in (GROUP, BLOCKS) else people.drawings
    config = read_config(CONFIGS / f"glyphs_{'plda' if is_start else 'linear'}.toml")
    statistics = StartConfig(kind="plda", pairs=people.pairs, num_people=people.number)
    step = StepConfig(
        sampling=sampling(run.design, people),
        privacy_unit="example" if is_group else "person",
        neighboring_relation="add_remove" if run.design == BLOCKS else "zero_out",
    )
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, owner="typeface"),
        step=step,
        epsilon=run.epsilon,
        people=bounded and PeopleConfig(classes=bounded, examples=1),
        start=statistics if is_start else None,
        num_steps=None if is_start else steps or people.steps,
        evaluation=None,
    )
    if is_group and math.isfinite(run.epsilon):
        one = run.epsilon / people.drawings
        delta = config.delta * math.expm1(one) / math.expm1(run.epsilon)
        config = dataclasses.replace(config, epsilon=one, delta=delta)
    return config


def trained(
    run: Run, steps: int | None, tables: Tables, repeats: int, place: Path
) -> Iterator[Trained]:
    """Trains so often, in the folder ``place``, which is removed; calibrates once."""
    config, data = config_of(run, steps), tables.load(TRAIN)
    evaluation = evaluation_on(tables)
    parts = run_parts(config, data)
    budget, is_start = parts["budget"], run.design == STATISTICS
    noise = float((budget.before[-1] if is_start else budget.step).noise_multiplier)
    first: tuple[Any, float] | None = None
    for _ in range(repeats):
        begun = time.process_time()
        shutil.rmtree(place, ignore_errors=True)
        trainer = Trainer(data=data, truncation=tables.truncation, **parts)
        trainer.train(place, checkpoint_every=10**6, log_every=10**6)
        learner = Started(trainer.learner) if is_start else trainer.learner
        score = evaluation(learner, trainer.params).mean
        content = read_ledger(place / LEDGER)
        charged = content.run_charged(), content.delta
        if first is None:
            first = charged, epsilon_charged(run, config, *charged)
        elif first[0] != charged:
            raise AssertionError(f"{run}: {charged} is charged, {first[0]} before")
        yield Trained(noise, score, first[1], time.process_time() - begun)
    shutil.rmtree(place, ignore_errors=True)


def epsilon_charged(
    run: Run, config: TrainingConfig, charged: tuple[Any, Any], delta: float
) -> float:
    """The epsilon of a person by what a ledger says was charged."""
    if math.isinf(run.epsilon):
        return run.epsilon
    step, num_steps = charged
    found = float(jde.epsilon(step, num_steps=num_steps, delta=delta))
    if not config.epsilon * (1 - LOOSE) < found <= config.epsilon:
        raise AssertionError(f"{run}: the ledger says {found!r}")
    return found * (PEOPLE[run.people].drawings if run.design == GROUP else 1)


def evaluation_on(tables: Tables) -> Evaluation:
    """The score on the test classes."""
    return Evaluation(tables.load("test"), ways=5, shots=1, queries=5)


def nothing_learned(tables: Tables) -> Iterator[Trained]:
    """What the features tell apart by themselves: no training, no epsilon."""
    learner = ProtoNet(lambda _, inputs: inputs, ways=5, distance="cosine")
    yield Trained(0.0, evaluation_on(tables)(learner, {}).mean, 0.0, 0.0)


def read_results(path: Path) -> dict[Run, list[Trained]]:
    """All that was trained so far."""
    found: dict[Run, list[Trained]] = defaultdict(list)
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            for people, design, epsilon, *line in list(csv.reader(file))[1:]:
                run = Run(people, design, float(epsilon))
                found[run].append(Trained(*map(float, line)))
    return found


def append_result(path: Path, run: Run, line: Trained) -> None:
    """Writes one line, and the head before the first."""
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow((*Run._fields, *Trained._fields))
        numbers = [f"{value:.6g}" for value in line[:-1]]
        writer.writerow((*run[:2], f"{run.epsilon:g}", *numbers, f"{line[-1]:.1f}"))


def train_missing(
    wanted: Sequence[Run], repeats: int, steps: int | None, results: Path, out: Path
) -> None:
    """Trains what ``results`` does not have so often yet."""
    tables: dict[str, Tables] = {}
    for run in wanted:
        needed = min(repeats, 1) if run.people == NOTHING else repeats
        missing = needed - len(read_results(results)[run])
        if missing <= 0:
            continue
        people = QUICK if run.people == NOTHING else run.people
        if people not in tables:
            tables[people] = DealtTables(people, out / "features")
        lines = nothing_learned(tables[people])
        if run.people != NOTHING:
            lines = trained(run, steps, tables[people], missing, out / "run")
        for line in lines:
            append_result(results, run, line)
            print(*run, *(f"{value:.4g}" for value in line), flush=True)


def table(found: Mapping[Run, list[Trained]]) -> str:
    """Accuracy of each design at each epsilon, and the noise of an episode."""
    lines = []
    for people in PEOPLE:
        for design in DESIGNS:
            runs = [found.get(Run(people, design, e), []) for e in EPSILONS]
            if design == GROUP:  # without noise it is the same run
                runs[-1] = found.get(Run(people, USUAL, math.inf), [])
            noise = per_episode(Run(people, design, 8.0), found)
            if any(runs):
                lines.append([people, design, *map(shown, runs), noise])
    epsilons = [f"{epsilon:g}" for epsilon in EPSILONS[:-1]]
    head = ["people", "design", *epsilons, "no noise", "noise an episode, epsilon 8"]
    return markdown(head, lines)


def shown(runs: Sequence[Trained]) -> str:
    """Mean of the test scores, and how many they are."""
    if not runs:
        return ""
    return f"{np.mean([line.test for line in runs]):.3f} ({len(runs)})"


def per_episode(run: Run, found: Mapping[Run, list[Trained]]) -> str:
    """Noise of the mean of a step's episodes, in clip norms."""
    if run.design == STATISTICS or run not in found:
        return ""
    return f"{found[run][0].noise / PEOPLE[run.people].episodes:.2g}"


def draw(found: Mapping[Run, list[Trained]], path: Path) -> None:
    """Test accuracy against epsilon, a panel for each setting."""
    figure, panels = new_figure(len(PEOPLE), size=(9, 4.8), sharey=True)
    finite = list(EPSILONS[:-1])
    for axes, people in zip(panels, PEOPLE, strict=True):
        for place, design in enumerate(DESIGNS):
            lines = {
                e: [line.test for line in found[Run(people, design, e)]]
                for e in finite
                if Run(people, design, e) in found
            }
            if lines:
                draw_line(axes, place, design, lines)
        logarithmic(axes, "x", finite)
        axes.set_xlim(0.9 * finite[0], 1.15 * finite[-1])
        axes.set_xlabel("epsilon of a person, delta = 1e-5")
        axes.set_title(people, loc="left")
        nothing = found.get(Run(NOTHING, NOTHING, 0.0), [])
        for line in nothing[:1]:
            axes.axhline(line.test, color="0.5", linewidth=1, linestyle=":")
            axes.annotate(
                NOTHING,
                (finite[0], line.test),
                xytext=(0, 3),
                textcoords="offset points",
                color="0.35",
                fontsize=8.5,
            )
    panels[0].set_ylabel("accuracy on unseen syllables, 5-way 1-shot")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9
    )
    save(figure, path)


def draw_line(
    axes: Any, place: int, design: str, lines: dict[float, list[float]]
) -> None:
    """One design: means, with a bar from the least to the largest."""
    means = np.array([np.mean(scores) for scores in lines.values()])
    ends = np.array([(min(scores), max(scores)) for scores in lines.values()]).T
    axes.errorbar(
        list(lines),
        means,
        yerr=np.abs(ends - means),
        label=design,
        color=COLOURS[place],
        marker="os^D"[place],
        markersize=5,
        markerfacecolor="white",
        linestyle=("-", "--", "-.", ":")[place],
        linewidth=1.6,
        capsize=2.5,
    )


def wanted_runs(epsilons: Sequence[float]) -> list[Run]:
    """All runs, those that say most first."""
    runs = [Run(NOTHING, NOTHING, 0.0)]
    for epsilon in epsilons:
        for people in reversed(PEOPLE):
            runs += [
                Run(people, design, epsilon)
                for design in DESIGNS
                if math.isfinite(epsilon) or design != GROUP
            ]
    return runs


def main() -> None:
    """Trains what is not there yet; writes table and figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/people_accuracy"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--people", nargs="+", default=list(PEOPLE), choices=PEOPLE)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    use_all_cores()
    keep_compiled_kernels()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results, steps = RESULTS, None
    wanted = [
        run
        for run in wanted_runs((8.0, 1.0, math.inf, 4.0, 2.0))
        if run.people in (*options.people, NOTHING)
    ]
    if options.quick:
        results, steps = out / "quick.csv", QUICK_STEPS
        wanted = [run for run in wanted if run.people == QUICK and run.epsilon == 8]
    repeats = min(options.repeats, 1) if options.quick else options.repeats
    train_missing(wanted, repeats, steps, results, out)
    found = read_results(results)
    (out / "people_accuracy.md").write_text(table(found), encoding="utf-8")
    print(table(found))
    draw(found, out / "people_accuracy.png")


if __name__ == "__main__":
    main()
