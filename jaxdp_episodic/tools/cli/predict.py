"""``jaxdp-episodic predict``: classes, or numbers, by what a run has released."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from jaxdp_episodic.files.table_file import check_suffix, writing
from jaxdp_episodic.tools.cli.messages import (
    File,
    aligned,
    option,
    printable,
    reported,
    waiting,
)
from jaxdp_episodic.tools.cli.process import ended_by_sigterm
from jaxdp_episodic.trainer.data.examples import Examples, read_examples

_SHOWN = 20  # most rows on a terminal


@dataclass(frozen=True)
class Predict:
    """Say of examples which class they are of, or their values, by a run's release."""

    release: Annotated[Path, tyro.conf.Positional, option("RELEASE")]
    """Folder `release` of a run or a search."""
    support: Annotated[Path, option("PATH")]
    """What is known: a folder with a folder of images for each class; an .npz, .csv or
    .parquet file, as the training data had it."""
    queries: Annotated[tuple[str, ...], option("PATH ...")]
    """What is asked: images, a folder of them, or as --support; where it says the
    classes, or values, it is said how many are right."""
    network: File = None
    """The ONNX file of the run's features, if it had one; no release holds it."""
    out: File = None
    """Write all of it: .csv, .jsonl or .parquet."""

    def run(self) -> int:
        """Predicts; returns the exit code."""
        return reported(self.release, self._predicted, says_warnings=True)

    def _predicted(self) -> list[str]:
        if self.out is not None:
            check_suffix(self.out)
        # Imported here: Flax costs a second, which no help should pay.
        from jaxdp_episodic.trainer.run.loading import load_release

        release = load_release(self.release, features=self.network)
        how = {"shape": release.example_shape, "source": release.source}
        support = read_examples([self.support], **how)
        queries = read_examples([Path(name) for name in self.queries], **how)
        with ended_by_sigterm(), waiting("predicting (new kinds compile first)"):
            answer = _values if release.is_regression else _classes
            answers = answer(release, support, queries)
        lines = _shown(answers, is_written=self.out is not None)
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with writing(self.out, answers.types) as write:
                write(answers.rows)
            lines.append(f"written: {self.out}")
        return lines


class _Answers(NamedTuple):
    """A row for each query, and what is to be said of all."""

    types: dict[str, str]  # column -> Arrow type
    rows: list[dict[str, Any]]
    said: list[str]


def _classes(release: Any, support: Examples, queries: Examples) -> _Answers:
    """The class of each query."""
    if support.units is None:
        raise ValueError(
            "support must say the class of each example: a folder for each class, or "
            "an array labels or a column of classes"
        )
    found = release.classify(support.features, support.units, queries.features)
    kind = "int64" if found.classes.dtype.kind in "iu" else "string"
    types = {"query": "string", "predicted": kind, "score": "float64"}
    columns = {
        "query": queries.names,
        "predicted": found.labels.tolist(),
        "score": found.scores.max(axis=1).astype(float).tolist(),
    }
    said = []
    if queries.units is not None:
        types = {"query": "string", "class": "string", **types}
        columns["class"] = queries.units.astype(str).tolist()
        right = queries.units.astype(str) == found.labels.astype(str)
        said.append(
            f"accuracy  {right.mean():.4f} ({int(right.sum()):,} of {right.size:,})"
        )
        known = np.isin(queries.units.astype(str), found.classes.astype(str))
        if not known.all():
            said.append(
                f"{int((~known).sum()):,} queries are of classes that the support does "
                "not have: none of them can be right"
            )
    return _Answers(types, _rows(types, columns), said)


def _values(release: Any, support: Examples, queries: Examples) -> _Answers:
    """The value of each query, task by task."""
    for name, part in (("support", support), ("queries", queries)):
        if part.units is None:
            raise ValueError(
                f"{name} must say the task of each example: an array labels, or the "
                "column that groups them"
            )
    if support.targets is None:
        raise ValueError("support must have a target for each example")
    assert support.units is not None and queries.units is not None
    values = np.empty(len(queries.names), np.float32)
    for task in np.unique(queries.units):
        known, asked = support.units == task, queries.units == task
        if not known.any():
            raise ValueError(f"support must have examples of the task {task.item()!r}")
        values[asked] = release.predict(
            support.features[known], support.targets[known], queries.features[asked]
        )
    types = {"query": "string", "task": "string", "predicted": "float64"}
    columns: dict[str, Any] = {
        "query": queries.names,
        "task": queries.units.astype(str).tolist(),
        "predicted": values.astype(float).tolist(),
    }
    said = []
    if queries.targets is not None:
        types["target"] = "float64"
        columns["target"] = queries.targets.astype(float).tolist()
        error = math.sqrt(np.mean(np.square(values - queries.targets)))
        said.append(f"rmse  {error:.4g} ({len(values):,} queries)")
    return _Answers(types, _rows(types, columns), said)


def _rows(types: dict[str, str], columns: dict[str, Any]) -> list[dict[str, Any]]:
    cells = zip(*(columns[name] for name in types), strict=True)
    return [dict(zip(types, row, strict=True)) for row in cells]


def _shown(answers: _Answers, *, is_written: bool) -> list[str]:
    """The first rows as a table, and what is said of all."""
    rows = [
        # In names of files and classes there may be ends of lines.
        tuple(
            f"{v:.4g}" if isinstance(v, float) else printable(str(v))
            for v in row.values()
        )
        for row in answers.rows[:_SHOWN]
    ]
    lines = aligned([tuple(answers.types), *rows], left=len(answers.types) - 1)
    more = len(answers.rows) - len(rows)
    if more:
        hint = "" if is_written else "; --out FILE.csv has all"
        lines.append(f"... and {more:,} more{hint}")
    return [*lines, *([""] if answers.said else []), *answers.said]
