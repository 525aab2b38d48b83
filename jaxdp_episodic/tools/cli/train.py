"""``train``, ``tune`` and ``predict``: a private run, a charged search, a release."""

from __future__ import annotations

import math
import os
import shlex
from contextlib import nullcontext
from typing import Any

import numpy as np

from jaxdp_episodic._progress import standard_error
from jaxdp_episodic.accountant.report.sentences import upward
from jaxdp_episodic.files.table_file import check_suffix
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.tools.cli import command
from jaxdp_episodic.tools.cli.flags import UsageError
from jaxdp_episodic.tools.requests.batch import write_columns
from jaxdp_episodic.tools.requests.request import refuse_other_kind
from jaxdp_episodic.trainer.config.training_config import read_config
from jaxdp_episodic.trainer.data.user_files import Examples, read_examples

_PROCESSES = ("coordinator", "num_processes", "process_index")


def do_train(o: command.Options) -> list[str]:
    """The command ``train``."""

    def left_behind() -> str:
        from jaxdp_episodic.trainer.run.run_files import files_of_a_run

        if o.distributed and not _is_first():
            return ""
        if not files_of_a_run(o.out):
            return "; nothing was trained yet, start again"
        return f"; continue with --resume --out {shlex.quote(str(o.out))}"

    o.left_behind = left_behind
    kind = "--distributed" if o.distributed else "one process"
    o.refuse_others(kind, dict.fromkeys(_PROCESSES, ("--distributed",)))
    if o.distributed:
        # JAX, which reads this when it is imported, leaves SIGTERM to us: we commit a
        # checkpoint.
        os.environ["JAX_ENABLE_PREEMPTION_SERVICE"] = "false"
    book = _booking(o)
    refuse_other_kind(read_toml(o.file), "a training config", "learner", "data")
    command.use_all_cores()
    from jaxdp_episodic.tools.train.run import run_training

    given = [getattr(o, name) for name in _PROCESSES]
    with command.one_of_several(*given) if o.distributed else nullcontext():
        how = {"title": o.file.stem, "base": o.file.parent, "book": book}
        result = run_training(read_config(o.file), o.out, resume=o.resume, **how)
        return [str(result)] if _is_first() else []


def do_tune(o: command.Options) -> list[str]:
    """The command ``tune``."""

    def left_behind() -> str:
        from jaxdp_episodic.tools.train.search import STATE

        if not (o.out / STATE).exists():
            return "; no search was drawn yet, start again"
        return f"; continue with --resume --out {shlex.quote(str(o.out))}"

    o.left_behind = left_behind
    book = _booking(o)
    command.use_all_cores()
    from jaxdp_episodic.tools.train import search as searches
    from jaxdp_episodic.trainer.run.evaluation import digits

    base, is_public = o.file.parent, o.held_out_is_public
    search = searches.read_search(o.file, held_out_is_public=is_public)
    if o.cost_only:
        budget = searches.search_budget(search, base, standard_error())
        each, whole = upward(budget.run_epsilon, 5), upward(budget.epsilon, 5)
        rows = {"each run": f"epsilon {each}"}
        return command.facts(rows | {"the search": f"epsilon {whole} (upper bound)"})
    run = searches.run_search(search, o.out, resume=o.resume, base=base, book=book)
    delta = f"delta {search.delta:.15g}"
    rows = {"epsilon": f"{upward(run.epsilon, 5)} (upper bound, {delta})"}
    if run.chosen is None:
        rows["release"] = "none: no run was drawn"
    else:
        rows["chosen"] = ", ".join(f"{k} = {v}" for k, v in run.hyperparameters.items())
        rows["score"] = f"{digits(abs(run.score))} ({search.split})"
        rows["to release"] = str(o.out / searches.RELEASE)
    rows["secret"] = f"everything else in {o.out}, the number of runs too"
    return command.facts(rows, 10)


def _booking(o: command.Options) -> Any:
    """The book that a run or a search is charged to, if any."""
    o.refuse_others("--book" if o.book else "no book", {"floor": ("--book",)})
    if o.book is None:
        return None
    from jaxdp_episodic.tools.train.run import Booking

    return Booking(o.book, o.floor)


def _is_first() -> bool:
    """Returns whether this is the process that prints and writes."""
    from jaxdp_episodic.trainer.gradient.processes import all_processes

    return all_processes().is_first


_MOST_ROWS = 20  # on a terminal


def do_predict(o: command.Options) -> list[str]:
    """The command ``predict``."""
    if not o.queries:
        raise UsageError("--queries needs a path")
    if o.out is not None:
        check_suffix(o.out)
    from jaxdp_episodic.trainer.run.loading import load_release

    release = load_release(o.release, features=o.network)
    how = {"shape": release.example_shape, "source": release.source}
    support = read_examples([o.support], **how)
    queries = read_examples(list(o.queries), **how)
    with command.waiting("predicting (the first prediction compiles)"):
        answer = _values if release.is_regression else _classes
        columns, summary = answer(release, support, queries)
    rows = list(zip(*columns.values(), strict=True))
    cells = [tuple(columns)]
    for row in rows[:_MOST_ROWS]:  # names of files and classes may be untrusted
        texts = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in row)
        cells.append(tuple(map(command.printable, texts)))
    lines = command.aligned(cells, left=len(columns) - 1)
    if more := rows[_MOST_ROWS:]:
        hint = "" if o.out else "; --out FILE.csv has all"
        lines.append(f"... and {len(more):,} more{hint}")
    lines += ["", *summary] if summary else []
    if o.out is not None:
        o.out.parent.mkdir(parents=True, exist_ok=True)
        write_columns(o.out, columns)
        lines.append(f"written: {o.out}")
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
            said = f"examples of the task {task.item()!r}"
            raise ValueError(f"--support must have {said}")
        given = support.features[known], support.targets[known]
        values[wanted] = release.predict(*given, queries.features[wanted])
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
