"""Plans as files: the question in TOML, a table of candidates, a config to train."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.data.sources import SOURCES, DataSource
from jaxdp_episodic.describe.population import Population
from jaxdp_episodic.describe.serialization import spec_from_dict, spec_to_dict
from jaxdp_episodic.describe.spec import Spec
from jaxdp_episodic.files.atomic import write_atomically
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.plan.plan import Plan, PlanRequest
from jaxdp_episodic.plan.plan_designs import SCHEMES
from jaxdp_episodic.requests.request_file import read_population

TABLE, CONFIG = "plan.csv", "recommended.toml"
_MOST_SIZES = 100
_TRAIN, _POPULATION = "train", "population"
_CHOSEN = ("epsilon", "delta", "num_steps", "step", "data")


@dataclass(frozen=True, eq=False, kw_only=True)
class EpisodeShape(Spec):
    """What an episode is.

    Attributes:
      shots: examples of each class (or of the task) to learn from.
      examples: support and query together, one number or several to try.
      ways: classes; None if the tasks are units of the tree.
      population: public lower bound of the examples of each class or task; None: the
        sizes of the data.
    """

    shots: int
    examples: tuple[int, ...]
    ways: int | None = None
    population: int | None = None

    def __post_init__(self) -> None:
        sizes = _validation.integer_array("examples", self.examples, minimum=1)
        if sizes.ndim == 0:
            sizes = sizes[None]
        shots = _validation.integer_array("shots", self.shots, minimum=1)
        if shots.ndim or sizes.ndim != 1 or not sizes.size:
            raise ValueError("shots must be a number and examples some numbers")
        if sizes.size > _MOST_SIZES:
            raise ValueError(f"examples must be at most {_MOST_SIZES} numbers")
        if sizes.min() <= shots:
            raise ValueError(
                "examples must exceed shots (a query is needed), got "
                f"{_validation.shown(self.examples)} with shots={self.shots}"
            )
        object.__setattr__(self, "examples", tuple(sizes.tolist()))


@dataclass(frozen=True, eq=False, kw_only=True)
class Compute(Spec):
    """How much may be computed; see `PlanRequest`."""

    episodes_per_step: int
    total_episodes: int
    fewest_steps: int = 20
    most_steps: int = 10_000


@dataclass(frozen=True, eq=False, kw_only=True)
class Learning(Spec):
    """What is known of the learning, and guesses where nothing is.

    Attributes:
      effective_dimension: see `effective_steps`.
      alignment: see `effective_steps`.
      learning_rate_steps: length of the run that ``train.optimizer.learning_rate`` was
        chosen for. A recommended config of another length gets it times
        ``sqrt(learning_rate_steps / num_steps)``: what noise adds up to grows with the
        root of the number of steps. None: the learning rate is taken as it is.
    """

    effective_dimension: int = 1_000
    alignment: float = 0.3
    learning_rate_steps: int | None = None

    def __post_init__(self) -> None:
        if self.learning_rate_steps is not None:
            name = "learning_rate_steps"
            steps = _validation.integer_array(name, getattr(self, name), minimum=1)
            if steps.ndim:
                raise ValueError(f"{name} must be one number, got {steps.tolist()}")


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanFile(Spec):
    """The question of a plan; the dictionary form is what a TOML file holds.

    Attributes:
      data: where the examples come from; or a table ``population`` in the file.
      epsilon: the target.
      delta: the target.
      episode: what an episode is.
      compute: how much may be computed.
      learning: guesses that rank designs.
      privacy_unit: see `PlanRequest`.
      neighboring_relation: see `PlanRequest`.
      schemes: which ways to draw are compared.
      method: of the calibration.
    """

    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "data": SOURCES,
        "episode": (EpisodeShape,),
        "compute": (Compute,),
        "learning": (Learning,),
    }

    epsilon: float
    delta: float
    episode: EpisodeShape
    compute: Compute
    data: DataSource | None = None
    learning: Learning = field(default_factory=Learning)
    privacy_unit: str | None = None
    neighboring_relation: str = "add_remove"
    schemes: tuple[str, ...] = SCHEMES
    method: str = "rdp"

    def __post_init__(self) -> None:
        if not isinstance(self.schemes, list | tuple):
            shown = _validation.shown(self.schemes)
            raise TypeError(f"schemes must be a list of names, got {shown}")


class PlanDescription(NamedTuple):
    """A plan's file, read.

    Attributes:
      file: the question.
      request: the same with its population.
      train: the table ``train``, what a training config needs besides; or None.
      data: the table ``data`` as it stands; or None.
    """

    file: PlanFile
    request: PlanRequest
    train: dict[str, Any] | None
    data: dict[str, Any] | None


def read_plan(path: Path) -> PlanDescription:
    """Returns the question in a TOML file; its data are loaded for their sizes.

    Besides the fields of `PlanFile` it has either a table ``data`` or a table
    ``population`` (``levels`` and ``sizes``, as in a request file), and may have a
    table ``train`` with the rest of a training config: learner (without ``shots``),
    model, optimizer, ``l2_clip_norm``, evaluation.

    Raises:
      OSError: a file that cannot be read.
      TypeError: something of the wrong type.
      ValueError: not TOML, an unknown or missing key, a value out of range.
    """
    mapping = read_toml(path)
    train = mapping.pop(_TRAIN, None)
    if train is not None and not isinstance(train, dict):
        shown = _validation.shown(train)
        raise TypeError(f"train must be a table of keys, got {shown}")
    for name in _CHOSEN:
        if train is not None and name in train:
            raise ValueError(f"train.{name}: the plan says this, leave it out")
    table = mapping.pop(_POPULATION, None)
    for name, kind in (("episode", EpisodeShape), ("compute", Compute)):
        mapping[name] = _typed(mapping.get(name), kind)
    if "learning" in mapping:
        mapping["learning"] = _typed(mapping["learning"], Learning)
    file = spec_from_dict(PlanFile, {"type": "PlanFile", **mapping}, where="plan")
    if file.learning.learning_rate_steps is not None and _learning_rate(train) is None:
        raise ValueError(
            "learning.learning_rate_steps needs train.optimizer.learning_rate, a number"
        )
    if (file.data is None) == (table is None):
        raise ValueError("give exactly one of the tables data and population")
    tree = (
        _population(table)
        if file.data is None
        else file.data.load("train", path.parent).population
    )
    return PlanDescription(file, _request(file, tree), train, mapping.get("data"))


def training_config(
    plan: Plan, description: PlanDescription, candidate: int | None = None
) -> dict[str, Any] | None:
    """Returns a candidate as a training config, the recommended one by default.

    None if the plan's file has no data or no table ``train``.
    """
    train, data = description.train, description.data
    if train is None or data is None:
        return None
    file = description.file
    place = plan.recommended if candidate is None else candidate
    design = plan.designs[int(plan.design[place])]
    episodes = int(plan.episodes_per_step[place])
    sampling = spec_to_dict(design.sampling(episodes))
    sampling.pop("version")
    learner = train.get("learner", {})
    config = {
        "version": 1,
        "epsilon": file.epsilon,
        "delta": file.delta,
        "num_steps": int(plan.num_steps[place]),
        **{k: v for k, v in train.items() if k != "learner"},
        "data": data,
        "step": {
            "clip_unit": design.clip_unit,
            "privacy_unit": file.privacy_unit,
            "neighboring_relation": file.neighboring_relation,
            "sampling": sampling,
        },
        "learner": {"shots": file.episode.shots, **learner},
    }
    meant_for, rate = file.learning.learning_rate_steps, _learning_rate(train)
    if meant_for is not None and rate is not None:
        scaled = rate * math.sqrt(meant_for / int(plan.num_steps[place]))
        rounded = float(f"{scaled:.4g}")
        config["optimizer"] = {**train["optimizer"], "learning_rate": rounded}
    if design.clip_unit == file.privacy_unit and "normalizer" not in config:
        # The number of protected units is private; the mean that was planned with is
        # the guess that the trainer asks for.
        config["normalizer"] = float(episodes)
    return config


def write_table(path: Path, plan: Plan) -> None:
    """Writes all candidates as CSV; whole or not at all.

    Raises:
      OSError: a file that cannot be written.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    numbers = (
        "episodes_per_step",
        "num_steps",
        "noise_multiplier",
        "signal_to_noise",
        "total_episodes",
        "effective_steps",
        "is_on_front",
    )
    rows.writerow(["design", "clip_unit", "examples", *numbers, "is_recommended"])
    columns = [np.asarray(getattr(plan, name)).tolist() for name in numbers]
    for place, cells in enumerate(zip(*columns, strict=True)):
        design = plan.designs[int(plan.design[place])]
        what = (design.name, design.clip_unit, design.examples)
        rows.writerow([*what, *cells, place == plan.recommended])
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def _request(file: PlanFile, tree: Population) -> PlanRequest:
    return PlanRequest(
        population=tree,
        epsilon=file.epsilon,
        delta=file.delta,
        ways=file.episode.ways,
        examples=file.episode.examples,
        stated_size=file.episode.population,
        privacy_unit=file.privacy_unit,
        neighboring_relation=file.neighboring_relation,
        episodes_per_step=file.compute.episodes_per_step,
        total_episodes=file.compute.total_episodes,
        fewest_steps=file.compute.fewest_steps,
        most_steps=file.compute.most_steps,
        effective_dimension=file.learning.effective_dimension,
        alignment=file.learning.alignment,
        schemes=tuple(file.schemes),
        method=file.method,
    )


def _learning_rate(train: Mapping[str, Any] | None) -> float | None:
    """The learning rate of the table ``train``, if it states one."""
    optimizer = (train or {}).get("optimizer")
    rate = optimizer.get("learning_rate") if isinstance(optimizer, Mapping) else None
    if isinstance(rate, int | float) and not isinstance(rate, bool):
        return float(rate)
    return None


def _typed(table: Any, kind: type) -> Any:
    """The table with the type that it can only have."""
    return {"type": kind.__name__, **table} if isinstance(table, dict) else table


def _population(table: Any) -> Population:
    if not isinstance(table, dict) or set(table) - {"sizes", "levels"}:
        raise ValueError(
            "population must have the keys sizes and levels, got "
            f"{_validation.shown(table)}"
        )
    return read_population(table, Path())
