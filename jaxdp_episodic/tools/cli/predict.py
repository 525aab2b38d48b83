"""``jaxdp-episodic predict``: classes or numbers, predicted by a release."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from jaxdp_episodic.files.table_file import check_suffix, writing
from jaxdp_episodic.tools.cli.command import (
    Command,
    File,
    UsageError,
    aligned,
    option,
    printable,
    waiting,
)
from jaxdp_episodic.trainer.data.examples import Examples, read_examples

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
            columns, said = answer(release, support, queries)
        rows = list(zip(*columns.values(), strict=True))
        lines = _table(columns, rows[:_MOST_ROWS])
        if more := rows[_MOST_ROWS:]:
            hint = "" if self.out else "; --out FILE.csv has all"
            lines.append(f"... and {len(more):,} more{hint}")
        lines += ["", *said] if said else []
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            types = {str: "string", int: "int64", float: "float64"}
            kinds = {name: types[type(cells[0])] for name, cells in columns.items()}
            with writing(self.out, kinds) as write:
                write([dict(zip(columns, row, strict=True)) for row in rows])
            lines.append(f"written: {self.out}")
        return lines


# Column -> its cells, one a query; and what is to be said of all.
_Answers = tuple[dict[str, list[Any]], list[str]]


def _classes(release: Any, support: Examples, queries: Examples) -> _Answers:
    """The class of each query."""
    if support.units is None:
        raise ValueError(
            "support must say the class of each example: a folder for each class, or "
            "an array labels or a column of classes"
        )
    found = release.classify(support.features, support.units, queries.features)
    columns: dict[str, list[Any]] = {"query": list(queries.names)}
    said = []
    if queries.units is not None:
        asked = queries.units.astype(str)
        columns["class"] = asked.tolist()
        right = asked == found.labels.astype(str)
        said.append(
            f"accuracy  {right.mean():.4f} ({int(right.sum()):,} of {right.size:,})"
        )
        if unknown := int(np.sum(~np.isin(asked, found.classes.astype(str)))):
            said.append(
                f"{unknown:,} queries are of classes that the support does not have: "
                "none of them can be right"
            )
    columns["predicted"] = found.labels.tolist()
    name = "probability" if found.is_calibrated else "score"
    columns[name] = found.scores.max(axis=1).astype(float).tolist()
    if not found.is_calibrated:
        said.append(_why_no_probability(release.calibration))
    return columns, said


def _why_no_probability(calibration: Any) -> str:
    head = "score orders predictions, it is no probability: "
    if calibration is None:
        return f"{head}the release is not calibrated"
    return f"{head}the release is calibrated for {calibration}"


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
    """Some rows as a table; names of files and classes may hold ends of lines."""
    cells = [
        tuple(f"{v:.4g}" if isinstance(v, float) else printable(str(v)) for v in row)
        for row in rows
    ]
    return aligned([tuple(columns), *cells], left=len(columns) - 1)
