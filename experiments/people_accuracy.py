"""What protecting people costs: accuracy against epsilon, glyphs dealt to people.

Results are in ``people_accuracy.csv``; see `study` for the command. All else is equal:
fixed wavelet features, a linear embedding, equally many episodes, steps, and delta
1e-5.

Nobody drew the glyphs. As people count the 41 typefaces, of which 20 are in each class;
and, made up, 3,600 people who are dealt ten drawings each at random, of ten classes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from drawing import (
    BLUE,
    GREEN,
    SKY,
    YELLOW,
    draw_level,
    draw_runs,
    logarithmic,
    markdown,
    new_figure,
    save,
)
from study import CONFIGS, Results, Run, Study, cpu_seconds, shown, trained, untrained

import jaxdp_episodic as jde
from jaxdp_episodic.data import ExampleTable, Owners, truncated
from jaxdp_episodic.trainer.config.training_config import StepConfig
from jaxdp_episodic.trainer.config.training_parts import PeopleConfig
from jaxdp_episodic.trainer.data.splits import TRAIN
from jaxdp_episodic.trainer.run.assemble import Tables
from jaxdp_episodic.training import StartConfig, TrainingConfig, read_config

EPSILONS = (1.0, 2.0, 4.0, 8.0, math.inf)
FINITE = EPSILONS[:-1]
CLASSES = 1_800
DRAWINGS = 20  # of a class
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


TYPEFACES, MANY = "41 typefaces", "3,600 people, 10 drawings each"
PEOPLE = {
    TYPEFACES: People(41, CLASSES, 2, 20, 20, "people"),
    MANY: People(3_600, 10, 20, 60, 100, "class"),
}
USUAL, GROUP = "usual episodes", "usual episodes, group privacy"
BLOCKS, STATISTICS = "episodes in blocks of people", "private statistics of people"
DESIGNS = {
    USUAL: (SKY, "-", "o"),
    BLOCKS: (YELLOW, "--", "s"),
    STATISTICS: (GREEN, "-.", "^"),
    GROUP: (BLUE, ":", "D"),
}
NOTHING = "features alone"


class DealtTables(Tables):
    """The glyphs, with the people of a setting as owners of those for training."""

    def __init__(self, name: str, config: TrainingConfig) -> None:
        super().__init__(config, None)
        self._name = name

    def load(self, split: str) -> ExampleTable:
        """Returns a split; somebody beyond the bounds is an error."""
        table = super().load(split)
        if split != TRAIN:
            return table
        people = PEOPLE[self._name]
        if self._name != TYPEFACES:
            table = dataclasses.replace(table, owners=dealt(people))
        bounds = jde.PersonBounds(examples=1, classes=people.drawings)
        table, self.truncation = truncated(table, bounds, truncate=False)
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


def sampling(design: str, people: People) -> Any:
    """Returns how a step draws: episodes of all classes, or of blocks of people."""
    number = people.number // people.block if design == BLOCKS else CLASSES // 5
    rate = people.episodes / number
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


def config_of(run: Run, cache: Path, steps: int | None = None) -> TrainingConfig:
    """Returns the run as a config.

    Group privacy: what is (e/k, d')-private for one drawing is (e, d)-private for k of
    them, ``d = d' (exp(e) - 1) / (exp(e/k) - 1)`` (Vadhan 2017, Lemma 2.2).
    """
    name, design, epsilon = run
    people, is_group, is_start = PEOPLE[name], design == GROUP, design == STATISTICS
    # An episode of a block looks at what is there: bounds would say nothing of it.
    bounded = None if design in (GROUP, BLOCKS) else people.drawings
    config = read_config(CONFIGS / f"glyphs_{'plda' if is_start else 'linear'}.toml")
    assert config.evaluation is not None
    statistics = StartConfig(kind="plda", pairs=people.pairs, num_people=people.number)
    step = StepConfig(
        sampling=sampling(design, people),
        privacy_unit="example" if is_group else "person",
        neighboring_relation="add_remove" if design == BLOCKS else "zero_out",
    )
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, owner="typeface"),
        features=dataclasses.replace(config.features, cache=str(cache)),
        step=step,
        epsilon=epsilon,
        people=bounded and PeopleConfig(classes=bounded, examples=1),
        start=statistics if is_start else None,
        num_steps=None if is_start else steps or people.steps,
        evaluation=dataclasses.replace(
            config.evaluation, splits=("test",), without_noise=False
        ),
    )
    if is_group and math.isfinite(epsilon):
        one = epsilon / people.drawings
        delta = config.delta * math.expm1(one) / math.expm1(epsilon)
        config = dataclasses.replace(config, epsilon=one, delta=delta)
    return config


class PeopleAccuracy(Study):
    """Designs at each epsilon, for two sets of people."""

    name, repeats, keys = "people_accuracy", 2, ("people", "design", "epsilon")

    def __init__(self) -> None:
        self._tables: dict[str, Tables] = {}

    def runs(self) -> Iterator[Run]:
        """All, those that say most first."""
        for epsilon in (8.0, 1.0, math.inf, 4.0, 2.0):
            for people in (MANY, TYPEFACES):
                for design in DESIGNS:
                    if math.isfinite(epsilon) or design != GROUP:
                        yield people, design, epsilon
        yield NOTHING, NOTHING, 0.0

    def number_of(self, run: Run, repeats: int) -> int:
        """What learns nothing is the same each time."""
        return min(repeats, 1) if run[0] == NOTHING else repeats

    def train(self, run: Run, repeat: int) -> dict[str, Any]:
        """Noise of the gradient steps (or the last statistic), score, and epsilon."""
        del repeat
        people, cache = run[0] if run[0] != NOTHING else MANY, self.out / "features"
        if people not in self._tables:  # of a config that bounds nobody
            config = config_of((people, GROUP, math.inf), cache)
            self._tables[people] = DealtTables(people, config)
        tables = self._tables[people]
        if run[0] == NOTHING:
            values = {"noise": 0.0, "test": untrained(tables, "test"), "ledger": 0.0}
            return values | {"seconds": 0.0}
        begun, config = time.process_time(), config_of(run, cache, self.steps)
        scores, trainer, epsilon = trained(config, tables, self.out / "run")
        budget: Any = trainer.budget
        step = budget.before[-1] if run[1] == STATISTICS else budget.step
        factor = PEOPLE[people].drawings if run[1] == GROUP else 1
        values = {"noise": float(step.noise_multiplier), "test": scores["test"]}
        return values | {"ledger": factor * epsilon} | cpu_seconds(begun)

    def tables(self, found: Results) -> dict[str, str]:
        """Accuracy of each design at each epsilon, and the noise of an episode."""
        rows = []
        for name, people in PEOPLE.items():
            for design in DESIGNS:
                runs = [(name, design, e) for e in EPSILONS]
                if design == GROUP:  # without noise it is the same run
                    runs[-1] = (name, USUAL, math.inf)
                cells = [shown(found.column("test", r), 3, ends="none") for r in runs]
                noise = found.column("noise", (name, design, 8.0))
                each = f"{noise[0] / people.episodes:.2g}" if len(noise) else ""
                rows.append(
                    [name, design, *cells, each if design != STATISTICS else ""]
                )
        epsilons = [f"{epsilon:g}" for epsilon in FINITE]
        head = ["people", "design", *epsilons, "no noise"]
        return {self.name: markdown([*head, "noise an episode, epsilon 8"], rows)}

    def draw(self, found: Results, path: Path) -> None:
        """Test accuracy against epsilon, a panel for each setting."""
        figure, panels = new_figure(len(PEOPLE), size=(9, 4.8), sharey=True)
        for axes, people in zip(panels, PEOPLE, strict=True):
            for design, look in DESIGNS.items():
                runs = {e: (people, design, e) for e in FINITE}
                if scores := found.along("test", runs):
                    draw_runs(axes, scores, look, ends="range", label=design)
            logarithmic(axes, "x", FINITE)
            axes.set_xlim(0.9 * FINITE[0], 1.15 * FINITE[-1])
            axes.set_xlabel("epsilon of a person, delta = 1e-5")
            axes.set_title(people, loc="left")
            for value in found.column("test", (NOTHING, NOTHING, 0.0)):
                draw_level(axes, NOTHING, FINITE[0], value)
        panels[0].set_ylabel("accuracy on unseen syllables, 5-way 1-shot")
        handles, labels = panels[-1].get_legend_handles_labels()
        style: dict[str, Any] = {"ncols": 2, "frameon": False, "fontsize": 9}
        figure.legend(handles, labels, loc="outside lower center", **style)
        save(figure, path)


if __name__ == "__main__":
    PeopleAccuracy().main(__doc__)
