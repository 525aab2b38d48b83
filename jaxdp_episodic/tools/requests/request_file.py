"""Request files: TOML, with the data set's sizes in it or in a table beside it.

Files are not trusted: nothing in them is executed, arrays are read without pickle, and
every error names the file and the place.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe import serialization
from jaxdp_episodic.accountant.describe.mechanisms import RELEASES
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.files.archive import read_arrays
from jaxdp_episodic.files.csv_file import read_csv_columns
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.tools.requests.request import CalibrationRequest, EpsilonRequest
from jaxdp_episodic.trainer.data.ids import check_text_size

_MAX_BYTES = 2**30  # of a table of records; of npz uncompressed
_RELEASE_NAMES = tuple(kind.__name__ for kind in RELEASES)
_POPULATION_KEYS = ("sizes", "file", "levels", "row_level")

# Keys of other kinds of files, which no request has, and what those are.
_OTHER_KINDS = {
    "learner": "a training config, for `train` and `report`",
    "axes": "a sweep, for `sweep`",
    "hyperparameters": "a search, for `tune`",
    "episode": "a plan, for `plan`",
}

AnyRequest = TypeVar("AnyRequest", EpsilonRequest, CalibrationRequest)


def read_request(
    path: str | Path, kind: type[AnyRequest], **overrides: Any
) -> AnyRequest:
    """Returns the request in a TOML file, fully validated; nothing is computed yet."""
    path = Path(path)
    mapping = read_toml(path)
    for key, other in _OTHER_KINDS.items():
        if key in mapping and key not in kind.__dataclass_fields__:
            raise ValueError(f"a request must be given, got {other}: it has {key!r}")
    mapping |= {name: value for name, value in overrides.items() if value is not None}
    if "population" in mapping:
        # One table for all steps; each step's own dictionary form has it too.
        tree = read_population(mapping.pop("population"), path.parent)
        mapping = with_population(mapping, tree)
    if kind is EpsilonRequest and "calibrate" in mapping:
        raise ValueError("a file with the key 'calibrate' is one for `calibrate`")
    return kind.from_dict({"type": kind.__name__, **mapping}, where="request")


def read_population(table: Any, folder: Path) -> Population:
    """Returns the tree that a ``[population]`` table describes."""
    serialization.refuse_hostile("population", table)
    if not isinstance(table, Mapping):
        shown = _validation.shown(table)
        raise TypeError(f"population must be a table of keys, got {shown}")
    for key in table:
        if key not in _POPULATION_KEYS:
            hint = _validation.nearest(key, _POPULATION_KEYS)
            hint = hint or f"; the keys are {_POPULATION_KEYS}"
            raise ValueError(f"population: unknown key {_validation.shown(key)}{hint}")
    if ("sizes" in table) == ("file" in table):
        given = "both" if "sizes" in table else "neither"
        raise ValueError(f"population: give exactly one of sizes and file, got {given}")
    levels = _names("levels", table.get("levels", []))
    if "file" in table:
        ids = _ids(table, levels, folder)
        made, place = partial(Population.from_ids, **ids), f"file {table['file']!r}"
    elif "row_level" in table:
        raise ValueError("population: row_level belongs to a file, not to sizes")
    else:
        made, place = (
            partial(Population.from_sizes, table["sizes"], level_names=levels),
            "sizes",
        )
    try:
        return made()
    except (TypeError, ValueError) as error:
        raise type(error)(f"population.{place}: {error}") from None


def _ids(table: Mapping[str, Any], levels: list[str], folder: Path) -> dict[str, Any]:
    """Level to the column of ids of the records in ``table["file"]``."""
    name = table["file"]
    if not isinstance(name, str):
        shown = _validation.shown(name)
        raise TypeError(f"population.file must be a file name, got {shown}")
    if not levels:
        raise ValueError("population: missing key 'levels', the columns, top first")
    path = folder / name
    if "\0" in name or not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            "population.file must lie in the request's folder or below it, "
            f"got {name!r}"
        )
    ids: dict[str, Any] = dict(_columns(path, levels))
    if "row_level" in table:
        (row_level,) = _names("row_level", [table["row_level"]])
        if row_level in ids:
            raise ValueError(f"population.row_level: {row_level!r} is among levels")
        ids[row_level] = None
    return ids


def _columns(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    """The named columns of a table of records."""
    try:
        if path.suffix == ".npz":
            return read_arrays(path, max_bytes=_MAX_BYTES, names=names)
        if path.suffix == ".csv":
            columns = read_csv_columns(path, names, max_bytes=_MAX_BYTES)
            for name, column in columns.items():
                check_text_size(name, column)
            return {name: np.array(cells, str) for name, cells in columns.items()}
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    raise ValueError(f"population.file must end in .csv or .npz, got {path.name!r}")


def _names(key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        shown = _validation.shown(value)
        raise TypeError(f"population.{key} must be names, got {shown}")
    return value


def with_population(mapping: dict[str, Any], tree: Population) -> dict[str, Any]:
    """The file's dictionary with the tree in the table of every step."""

    def filled(step: Any) -> Any:
        if not isinstance(step, Mapping):
            return step  # refused where steps are read
        if "population" in step:
            raise ValueError("give the population once: in the step or at the top")
        if step.get("type") in _RELEASE_NAMES:
            return step  # no units of its own
        if isinstance(step.get("steps"), list):
            return {**step, "steps": [filled(part) for part in step["steps"]]}
        if isinstance(options := step.get("options"), Mapping):
            return {**step, "options": {k: filled(v) for k, v in options.items()}}
        return {**step, "population": tree}

    return {k: filled(v) if k == "step" else v for k, v in mapping.items()}
