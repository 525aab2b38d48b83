"""The runner of the accuracy studies: trains missing runs, writes tables and a picture.

Each study is a script beside this one. A CSV file of the same name keeps its runs, one
line per finished run:

    python experiments/NAME.py [--repeats N] [--only WORD ...] [--quick] [--out FOLDER]

trains each run until the file has it N times, then writes tables and a picture of all
finished runs into ``--out``. ``--repeats 0`` only writes these. ``--only`` selects the
runs with all words among their fields, such as ``--only schools`` or ``--only P1 8``.
``--quick`` trains one short run, which is kept in ``--out``.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic import epsilon as epsilon_of
from jaxdp_episodic.tools.cli import keep_compiled_kernels, use_all_cores
from jaxdp_episodic.trainer.run.assemble import Tables, assembled
from jaxdp_episodic.trainer.run.ledger_file import read_ledger
from jaxdp_episodic.trainer.statistics.statistics import Started
from jaxdp_episodic.training import Evaluation, ProtoNet, TrainingConfig

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parent / "configs"
Run = tuple[Any, ...]
SAME_EPSILON = 1e-6  # relative: the solver's stated error, and rounding
QUICK_STEPS = 3


class Results:
    """The finished runs of a study in a CSV file; its first columns identify a run."""

    def __init__(self, path: Path, keys: Sequence[str]) -> None:
        self._path, self._keys = path, keys
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                self.rows = [{k: _value(v) for k, v in r.items()} for r in reader]

    def of(self, run: Run) -> list[dict[str, Any]]:
        """Returns the finished runs of these settings."""
        return [row for row in self.rows if tuple(row[k] for k in self._keys) == run]

    def column(self, name: str, run: Run) -> np.ndarray:
        """Returns one column of the finished runs of these settings."""
        return np.array([row[name] for row in self.of(run)])

    def along(self, name: str, runs: dict[float, Run]) -> dict[float, np.ndarray]:
        """Returns the column of each run that is finished."""
        found = {place: self.column(name, run) for place, run in runs.items()}
        return {place: values for place, values in found.items() if len(values)}

    def add(self, run: Run, values: dict[str, Any]) -> None:
        """Adds a line; it is on the disk when this returns."""
        row = dict(zip(self._keys, run, strict=True)) | values
        is_new = not self._path.exists()
        with self._path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow({name: _text(value) for name, value in row.items()})
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(row)
        print(*(_text(value) for value in row.values()), flush=True)


def _value(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _text(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)


class Study:
    """A study; a script derives from it, and calls `main`."""

    name: str  # of the script, its results, tables and picture
    keys: tuple[str, ...]  # columns that identify a run
    repeats = 3  # of each run, unless the command line gives another number
    rare: tuple[str, ...] = ()  # runs with these are trained only if --only names them
    out: Path  # folder of this call
    steps: int | None = None  # gradient steps of every run; None: those of the study

    def runs(self) -> Iterable[Run]:
        """Returns all runs, the most informative ones first."""
        raise NotImplementedError

    def train(self, run: Run, repeat: int) -> dict[str, Any]:
        """Trains once; returns the values of the other columns."""
        raise NotImplementedError

    def tables(self, found: Results) -> dict[str, str]:
        """Returns tables in Markdown, by the name of their file."""
        raise NotImplementedError

    def draw(self, found: Results, path: Path) -> None:
        """Draws the picture, if the study has one."""

    def number_of(self, run: Run, repeats: int) -> int:
        """Returns how often a run is trained."""
        del run
        return repeats

    def main(self, doc: str | None) -> None:
        """Trains missing runs, repeat by repeat; writes tables and picture."""
        parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
        default = Path("results") / self.name
        parser.add_argument("--out", type=Path, default=default)
        parser.add_argument("--repeats", type=int, default=self.repeats)
        parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
        parser.add_argument("--quick", action="store_true", help="one short run")
        options = parser.parse_args()
        use_all_cores()
        keep_compiled_kernels()
        self.out = options.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        found = Results(HERE / f"{self.name}.csv", self.keys)
        words = {_value(word) for word in options.only}
        wanted = [
            run
            for run in dict.fromkeys(self.runs())
            if words <= set(run) and not set(self.rare) & (set(run) - words)
        ]
        repeats = options.repeats
        if options.quick:
            (self.out / "quick.csv").unlink(missing_ok=True)
            found = Results(self.out / "quick.csv", self.keys)
            wanted, repeats, self.steps = wanted[:1], 1, QUICK_STEPS
        for repeat in range(repeats):
            for run in wanted:
                is_wanted = repeat < self.number_of(run, repeats)
                if is_wanted and len(found.of(run)) <= repeat:
                    found.add(run, self.train(run, repeat))
        for name, text in self.tables(found).items():
            (self.out / f"{name}.md").write_text(text, encoding="utf-8")
            print(text)
        self.draw(found, self.out / f"{self.name}.png")


def trained(
    config: TrainingConfig, tables: Tables, place: Path, *, projects: bool = True
) -> tuple[dict[str, float], Any, float]:
    """Trains a config in the folder ``place``, which is removed.

    Epsilon is computed from the ledger and compared with that of the run. With
    ``projects`` the statistics of ``start`` change the features. Returns the score of
    each split, the trainer, and epsilon (inf without noise).
    """
    shutil.rmtree(place, ignore_errors=True)
    trainer, evaluations, _ = assembled(config, tables)
    trainer.train(place, checkpoint_every=10**6, log_every=10**6)
    is_started = config.start is not None and projects
    learner = Started(trainer.learner) if is_started else trainer.learner
    scores = {k: one(learner, trainer.params).mean for k, one in evaluations.items()}
    epsilon = float("inf")
    if config.epsilon != epsilon:
        content = read_ledger(place)
        step, num_steps = content.run_charged()
        epsilon = float(epsilon_of(step, num_steps=num_steps, delta=content.delta))
        stated = float(trainer.budget.spent(trainer.num_steps_charged))
        if not epsilon <= config.epsilon or abs(epsilon / stated - 1) > SAME_EPSILON:
            raise AssertionError(f"ledger {epsilon!r}, run {stated!r}: {config}")
    shutil.rmtree(place)
    return scores, trainer, epsilon


def untrained(tables: Tables, split: str, ways: int = 5) -> float:
    """Returns the accuracy of the features without training."""
    learner = ProtoNet(lambda _, inputs: inputs, ways=ways, distance="cosine")
    return Evaluation(tables.load(split), ways=ways, shots=1, queries=5)(
        learner, {}
    ).mean


def cpu_seconds(begun: float) -> dict[str, float]:
    """Returns the column of CPU time since ``begun``, of `time.process_time`."""
    return {"seconds": round(time.process_time() - begun, 1)}


def shown(values: Any, digits: int = 4, *, ends: str = "std") -> str:
    """Returns the mean, the spread and the number of the runs, as text."""
    if not len(values):
        return ""
    mean = f"{np.mean(values):.{digits}f}"
    if ends == "range":
        return f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"
    if ends == "none" or len(values) == 1:
        return f"{mean} ({len(values)})"
    return f"{mean} ± {np.std(values, ddof=1):.{digits}f} ({len(values)})"
