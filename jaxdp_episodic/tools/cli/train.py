"""``train``, ``tune`` and ``predict``: a private run, a charged search, a release."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from jaxdp_episodic.accountant.report.rounding import upward
from jaxdp_episodic.files.table_file import check_suffix, writing
from jaxdp_episodic.tools.cli.command import (
    Command,
    File,
    Folder,
    Name,
    Number,
    TomlFile,
    UsageError,
    Whole,
    aligned,
    end_process,
    facts,
    keep_our_sigterm,
    one_of_several,
    option,
    printable,
    use_all_cores,
    waiting,
)
from jaxdp_episodic.trainer.config.training_config import read_config
from jaxdp_episodic.trainer.data.examples import Examples, read_examples

_Book = Annotated[Name, option("FILE_OR_URL", is_optional=True)]


@dataclass
class Train(Command):
    """The command ``train``."""

    #: Training config, such as `init` writes: data, target, step, model, learner.
    file: TomlFile
    #: Folder for the log, the report and the release. It is created if missing.
    out: Folder
    #: Continue the run in DIR.
    resume: bool = False
    #: Charge the run to the privacy budget of its data set before it
    #: starts (see `book`).
    book: _Book = None
    #: Part of the budget's delta that the run may use, where prices are mu-GDP (see
    #: docs/book.md). Default: 1 % of that delta.
    floor: Number = None
    #: Train one run in several processes. Start this command once per process. Slurm,
    #: Open MPI, Kubernetes or the next three options give each its number.
    distributed: bool = False
    #: Host of process 0 and a free port on it.
    coordinator: Annotated[Name, option("HOST:PORT", is_optional=True)] = None
    #: Number of processes.
    num_processes: Whole = None
    #: Index of this process, from 0. Only process 0 writes into DIR.
    process_index: Whole = None

    _has_warnings = False

    def _lines(self) -> list[str]:
        given = self.coordinator, self.num_processes, self.process_index
        if not self.distributed and given != (None, None, None):
            raise UsageError(
                "--coordinator, --num-processes and --process-index are for a run with "
                "--distributed"
            )
        book = _booking(self, "a run")
        use_all_cores()
        if self.distributed:
            keep_our_sigterm()
        # Imported here: Flax costs a second, which no help should pay.
        from jaxdp_episodic.tools.train.run import run_training

        with one_of_several(*given) if self.distributed else nullcontext():
            result = run_training(
                read_config(self.file),
                self.out,
                resume=self.resume,
                title=self.file.stem,
                base=self.file.parent,
                book=book,
            )
            return [str(result)] if _is_first() else []

    def _after_interruption(self) -> str:
        from jaxdp_episodic.trainer.run.run_files import files_of_a_run

        if self.distributed and not _is_first():
            return ""
        if not files_of_a_run(self.out):
            return "; nothing was trained yet, start again"
        return f"; continue with --resume --out {self.out}"

    def run(self) -> int:
        """Trains; returns the exit code."""
        code = super().run()
        if self.distributed and code:
            end_process(code)
        return code


@dataclass
class Tune(Command):
    """The command ``tune``."""

    #: Search config (target, number of runs, run, hyperparameters), or a training
    #: config.
    file: TomlFile
    #: Folder for the runs and the release. It is created if missing.
    out: Folder
    #: Continue the search in DIR. The number of runs is not drawn again.
    resume: bool = False
    #: Charge the search to the privacy budget of its data set before it
    #: starts (see `book`).
    book: _Book = None
    #: Part of the budget's delta that the search may use, where prices are mu-GDP (see
    #: docs/book.md). Default: 1 % of that delta.
    floor: Number = None
    #: Only print the privacy cost of each run and of the search. Nothing is trained.
    cost_only: bool = False
    #: State that the held-out data are public, so that scores on them may choose the
    #: best run. Required if FILE.toml is a training config.
    held_out_is_public: bool = False

    _has_warnings = False

    def _lines(self) -> list[str]:
        book = _booking(self, "a search")
        use_all_cores()
        # Imported here: Flax costs a second, which no help should pay.
        from rich.console import Console

        from jaxdp_episodic.tools.train.search import RELEASE, run_search, search_budget
        from jaxdp_episodic.tools.train.search_space import read_search

        base, is_public = self.file.parent, self.held_out_is_public
        search = read_search(self.file, held_out_is_public=is_public)
        if self.cost_only:
            budget = search_budget(search, base, Console(stderr=True))
            return facts(
                {
                    "each run": f"epsilon {upward(budget.run_epsilon, 5)}",
                    "the search": f"epsilon {upward(budget.epsilon, 5)} (upper bound)",
                }
            )
        found = run_search(search, self.out, resume=self.resume, base=base, book=book)
        delta = f"delta {search.settings.delta:g}"
        rows = {"epsilon": f"{upward(found.epsilon, 5)} (upper bound, {delta})"}
        if found.chosen is None:
            rows["release"] = "none: no run was drawn"
        else:
            named = found.hyperparameters.items()
            rows["chosen"] = ", ".join(f"{k} = {v}" for k, v in named)
            rows["score"] = f"{abs(found.score):.4f} ({search.settings.split})"
            rows["to release"] = str(self.out / RELEASE)
        rows["secret"] = f"everything else in {self.out}, the number of runs too"
        return facts(rows, 10)

    def _after_interruption(self) -> str:
        from jaxdp_episodic.tools.train.search import STATE

        if not (self.out / STATE).exists():
            return "; no search was drawn yet, start again"
        return f"; continue with --resume --out {self.out}"


def _booking(command: Any, what: str) -> Any:
    """The book that a run or a search is charged to, if any."""
    if command.book is None:
        if command.floor is not None:
            raise UsageError(f"--floor is for {what} with --book")
        return None
    from jaxdp_episodic.tools.train.booked import Booking

    return Booking(command.book, command.floor)


def _is_first() -> bool:
    """Returns whether this is the process that prints and writes."""
    from jaxdp_episodic.trainer.gradient.processes import all_processes

    return all_processes().is_first


_MOST_ROWS = 20  # on a terminal


@dataclass
class Predict(Command):
    """The command ``predict``."""

    #: The folder `release` of a run or a search.
    release: Annotated[Path, tyro.conf.Positional, option("RELEASE")]
    #: Labelled examples: a folder with a folder of images for each class, or
    #: an .npz, .csv or .parquet file like the training data.
    support: Annotated[Path, option("PATH")]
    #: Examples to predict: images, a folder of them, or as --support. If they have
    #: classes or values, the accuracy or the error is printed.
    queries: Annotated[tuple[str, ...], option("PATH ...")]
    #: The ONNX file of the run's features, if it had one: no release contains it.
    network: File = None
    #: Write all predictions: .csv, .jsonl or .parquet.
    out: File = None

    def _lines(self) -> list[str]:
        if not self.queries:
            raise UsageError("--queries needs a path")
        if self.out is not None:
            check_suffix(self.out)
        # Imported here: Flax costs a second, which no help should pay.
        from jaxdp_episodic.trainer.run.loading import load_release

        release = load_release(self.release, features=self.network)
        how = {"shape": release.example_shape, "source": release.source}
        support = read_examples([self.support], **how)
        queries = read_examples([Path(name) for name in self.queries], **how)
        with waiting("predicting (the first prediction compiles)"):
            answer = _values if release.is_regression else _classes
            columns, summary = answer(release, support, queries)
        rows = list(zip(*columns.values(), strict=True))
        lines = _table(columns, rows[:_MOST_ROWS])
        if more := rows[_MOST_ROWS:]:
            hint = "" if self.out else "; --out FILE.csv has all"
            lines.append(f"... and {len(more):,} more{hint}")
        lines += ["", *summary] if summary else []
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            types = {str: "string", int: "int64", float: "float64"}
            kinds = {name: types[type(cells[0])] for name, cells in columns.items()}
            with writing(self.out, kinds) as write:
                write([dict(zip(columns, row, strict=True)) for row in rows])
            lines.append(f"written: {self.out}")
        return lines


# Column -> its cells, one per query; and lines on all queries together.
_Answers = tuple[dict[str, list[Any]], list[str]]


def _classes(release: Any, support: Examples, queries: Examples) -> _Answers:
    """The predicted class of each query."""
    if support.units is None:
        raise ValueError(
            "--support must give the class of each example: a folder for each class, "
            "or an array labels or a column of classes"
        )
    found = release.classify(support.features, support.units, queries.features)
    columns: dict[str, list[Any]] = {"query": list(queries.names)}
    summary = []
    if queries.units is not None:
        classes = queries.units.astype(str)
        columns["class"] = classes.tolist()
        right = classes == found.labels.astype(str)
        summary.append(
            f"accuracy  {right.mean():.4f} ({int(right.sum()):,} of {right.size:,})"
        )
        if unknown := int(np.sum(~np.isin(classes, found.classes.astype(str)))):
            summary.append(
                f"{unknown:,} queries are of classes that the support does not have: "
                "none of them can be right"
            )
    columns["predicted"] = found.labels.tolist()
    name = "probability" if found.is_calibrated else "score"
    columns[name] = found.scores.max(axis=1).astype(float).tolist()
    if not found.is_calibrated:
        known = release.calibration
        why = "not calibrated" if known is None else f"calibrated for {known}"
        summary.append(
            f"a score orders predictions and is no probability: the release is {why}"
        )
    return columns, summary


def _values(release: Any, support: Examples, queries: Examples) -> _Answers:
    """The predicted value of each query, task by task."""
    for name, part in (("support", support), ("queries", queries)):
        if part.units is None:
            raise ValueError(
                f"--{name} must give the task of each example: an array labels, or the "
                "column that groups them"
            )
    if support.targets is None:
        raise ValueError("--support must have a target for each example")
    assert support.units is not None and queries.units is not None
    values = np.empty(len(queries.names), np.float32)
    for task in np.unique(queries.units):
        known, wanted = support.units == task, queries.units == task
        if not known.any():
            raise ValueError(
                f"--support must have examples of the task {task.item()!r}"
            )
        values[wanted] = release.predict(
            support.features[known], support.targets[known], queries.features[wanted]
        )
    columns: dict[str, list[Any]] = {
        "query": list(queries.names),
        "task": queries.units.astype(str).tolist(),
        "predicted": values.astype(float).tolist(),
    }
    if queries.targets is None:
        return columns, []
    columns["target"] = queries.targets.astype(float).tolist()
    error = math.sqrt(np.mean(np.square(values - queries.targets)))
    return columns, [f"rmse  {error:.4g} ({len(values):,} queries)"]


def _table(columns: dict[str, Any], rows: list[tuple[Any, ...]]) -> list[str]:
    """Rows as a table; control characters in names of files and classes are escaped."""
    cells = [
        tuple(f"{v:.4g}" if isinstance(v, float) else printable(str(v)) for v in row)
        for row in rows
    ]
    return aligned([tuple(columns), *cells], left=len(columns) - 1)
