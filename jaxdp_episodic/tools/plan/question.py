"""The request for a plan, and its TOML file (docs/plan.md lists the keys)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    CLASS,
    PERSON,
    GroupedClasses,
    MultistageSampling,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.population import PersonBounds, Population
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.spec import AT_LEAST_ONE
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.tools.requests.request import read_population, refuse_other_kind
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.config.training_parts import CLOSED_FORM
from jaxdp_episodic.trainer.data import fields
from jaxdp_episodic.trainer.data.sources import DataSource
from jaxdp_episodic.trainer.data.table import ExampleTable

# Ways to draw the episodes of a step.
POISSON = "poisson"
EPOCHS = "epochs"
FIXED = "without replacement"
INDEPENDENT = "independent"
BLOCKS = "blocks"
SCHEMES = (POISSON, EPOCHS, FIXED, INDEPENDENT, BLOCKS)
_MAX_SIZES = 100  # numbers of examples to try; each needs a search
# Keys of a training config that the plan sets: the table ``train`` must not have them.
_SET_BY_PLAN = ("epsilon", "delta", "num_steps", "step", "data")
# Keys of a training config that `plan_around` leaves out of ``train``.
_OF_RUN = ("version", "start", "people", "normalizer", "seed", "adaptive")
STEPS = 300  # of the measured runs, see `pipelines`
MOST_EPISODES = 360  # per step, as in the demo
# Settings of the demo, with which all kinds of data were measured.
OF_CLASSES: dict[str, Any] = {
    "l2_clip_norm": 0.1,
    "learner": {"kind": "protonet", "distance": "cosine"}
    | {"temperature": 4.0, "resplits": True},
    "model": {"kind": "linear", "embedding": 128},
    "optimizer": {"kind": "adam", "learning_rate": 0.01, "ema": 0.97},
}
# Settings of train_schools.toml.
OF_TASKS: dict[str, Any] = {
    "l2_clip_norm": 0.1,
    "learner": {"kind": "maml", "inner_steps": 1}
    | {"inner_learning_rate": 0.05, "loss": "squared_error"},
    "model": {"kind": "mlp", "channels": [32]},
    "optimizer": {"kind": "adam", "learning_rate": 5e-3, "schedule": "cosine"},
}


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    value = [value] if np.ndim(value) == 0 else value
    what = "whole numbers"
    return fields.numbers(name, value, most=_MAX_SIZES, check=AT_LEAST_ONE, what=what)


class EpisodeShape(fields.CheckedSpec):
    """The sizes of an episode."""

    shots: fields.Count  # support examples of each class (or of the task)
    # Support and query together: one number or several to try. A design that uses all
    # examples of a class is tried as well.
    examples: Annotated[tuple[int, ...], _sizes]
    ways: fields.Count | None = None  # classes; None: the tasks are units of the tree
    # Public lower bound on the examples of a class or task. None: the plan uses the
    # data's sizes. Under ``add_remove`` these are private, and so is the plan.
    population: fields.Count | None = None

    def check_values(self) -> None:
        """Refuses numbers of examples that leave no query."""
        if min(self.examples) <= self.shots:
            raise ValueError(
                "examples must exceed shots (a query is needed), got "
                f"{_validation.shown(self.examples)} with shots={self.shots}"
            )


class Compute(fields.CheckedSpec):
    """The compute budget."""

    episodes_per_step: fields.Count  # upper bound on the mean number per step
    total_episodes: fields.Count  # upper bound for the run
    fewest_steps: fields.Count = 20  # of the run
    most_steps: fields.Count = 10_000  # of the run

    def check_values(self) -> None:
        """Refuses a budget without a number of steps."""
        for name in ("most_steps", "total_episodes"):
            if getattr(self, name) < self.fewest_steps:
                raise ValueError(
                    f"{name} must be at least fewest_steps, got {getattr(self, name)} "
                    f"and {self.fewest_steps}"
                )


class Learning(fields.CheckedSpec):
    """What is known about the learning problem; the defaults are guesses."""

    # Number of directions in which the loss is curved, so that noise hurts.
    effective_dimension: fields.Count = 1_000
    # Norm of the mean contribution, in clip norms.
    alignment: Annotated[float, fields.within(0.0, 1.0, "(]")] = 0.3
    # Number of steps that ``train.optimizer.learning_rate`` was chosen for. With
    # another number it is scaled by the square root of the ratio. None: not scaled.
    learning_rate_steps: fields.Count | None = None


def _schemes(name: str, value: Any) -> tuple[str, ...]:
    names = fields.listed(name, value)
    return tuple(_validation.choice(name, scheme, SCHEMES) for scheme in names)


class PlanRequest(fields.CheckedSpec):
    """The request for a plan; its dictionary form is the content of a TOML file."""

    epsilon: fields.Positive  # the target
    delta: Annotated[float, fields.within(0.0, 1.0, "()")]  # the target
    episode: EpisodeShape
    compute: Compute
    data: DataSource | None = None  # None: a table ``population`` in the file
    learning: Learning = field(default_factory=Learning)
    privacy_unit: str | None = None  # a level, or "person"; None: the last level
    people: PersonBounds | None = None  # bounds on what one person owns
    # On a public list; adds designs in blocks of people.
    num_people: fields.Count | None = None
    neighboring_relation: Annotated[str, fields.one_of(*NEIGHBORING_RELATIONS)] = (
        "add_remove"
    )
    # Ways to draw episodes that are compared.
    schemes: Annotated[tuple[str, ...], _schemes] = SCHEMES
    method: str = "rdp"  # of the calibration

    def check_values(self) -> None:
        """Refuses people without a person to protect, and the reverse."""
        knows_people = self.people is not None or self.num_people is not None
        if knows_people != (self.privacy_unit == PERSON):
            rule = "be left out" if knows_people else "be given, one of them or both"
            raise ValueError(
                f"people and num_people must {rule} with privacy_unit="
                f"{self.privacy_unit!r}"
            )
        if self.people is not None and self.people.shape:
            raise ValueError(f"people must be of one setting, got {self.people!r}")

    @property
    def copies(self) -> int:
        """Number of rotated copies of each class in the data, itself included."""
        return 1 if self.data is None else self.data.copies


class PlanDescription(NamedTuple):
    """The content of a plan's file."""

    request: PlanRequest
    population: Population  # the tree of classes or tasks and their examples
    train: dict[str, Any] | None  # the table ``train``: the rest of a training config
    data: dict[str, Any] | None  # the table ``data``, unchanged
    feature_shape: tuple[int, ...] | None = None  # of an example of the data
    people: int | None = None  # number of owners of the data; None: not known
    has_public_units: bool = False  # the data state that the list of classes is public

    @classmethod
    def of(
        cls, request: PlanRequest, data: ExampleTable, train: Any, table: Any
    ) -> Self:
        """Returns the plan for loaded data, with the tables ``train`` and ``data``."""
        owners = None if data.people is None else data.people.people
        facts = data.features.shape[1:], owners, data.has_public_units
        return cls(request, data.population, train, table, *facts)


def read_plan(path: Path) -> PlanDescription:
    """Returns the plan in a TOML file, or one around a config; loads data for sizes."""
    mapping = read_toml(path)
    refuse_other_kind(mapping, "a plan", "episode", "learner", "data")
    config = None
    if "step" in mapping and "episode" not in mapping:
        config = TrainingConfig.from_dict(mapping, where="config")
        mapping = plan_around(config, mapping)
    train = mapping.pop("train", None)
    _validation.instance("train", train, dict | None, "a table of keys")
    for name in _SET_BY_PLAN:
        if name in (train or {}):
            raise ValueError(f"train.{name} must be left out: the plan sets it")
    table = mapping.pop("population", None)
    request = PlanRequest.from_dict(mapping, where="plan")
    if request.learning.learning_rate_steps and learning_rate(train) is None:
        raise ValueError(
            "learning.learning_rate_steps needs train.optimizer.learning_rate, a number"
        )
    if (request.data is None) == (table is None):
        raise ValueError("give exactly one of the tables data and population")
    if request.data is None:
        tree = read_population(table, path.parent)
        return PlanDescription(request, tree, train, None)
    if config is None:
        loaded = request.data.load("train", path.parent)
    else:
        loaded, _ = config.training_data(path.parent)
    return PlanDescription.of(request, loaded, train, mapping["data"])


def plan_around(config: TrainingConfig, mapping: dict[str, Any]) -> dict[str, Any]:
    """Returns a plan's file with the target, data and episodes of a training config."""
    shots, ways, most = config.learner.shots, None, MOST_EPISODES
    sampling: Any = config.step.sampling
    kind = type(sampling)
    if kind is GroupedClasses:
        examples, ways = sampling.examples, int(sampling.ways)
        most = int(sampling.num_classes) // ways
    elif kind is MultistageSampling and len(sampling.levels) == 2:
        units, examples = sampling.levels
        if units.name == CLASS and isinstance(units, WithoutReplacement):
            ways = int(units.numbers["size"])
            most = max(int(units.numbers.get("population", ways)) // ways, 1)
    else:
        raise ValueError(
            "step.sampling must be of episodes of classes, or of tasks with examples, "
            "for a plan around this config; write a plan's file (docs/plan.md)"
        )
    steps, a_step = config.num_steps or STEPS, min(most, MOST_EPISODES)
    size = max(int(examples.numbers.get("size", 2 * shots)), shots + 1)
    bound = examples.population
    train = {k: v for k, v in mapping.items() if k not in (*_SET_BY_PLAN, *_OF_RUN)}
    if config.learner.kind in CLOSED_FORM:  # the config has no gradient steps
        train |= OF_TASKS if ways is None else OF_CLASSES
    train["learner"] = {k: v for k, v in train["learner"].items() if k != "shots"}
    step = config.step
    plan = {
        **{"version": 1, "epsilon": config.epsilon, "delta": config.delta},
        "privacy_unit": str(step.privacy_unit),
        "neighboring_relation": step.neighboring_relation,
        "schemes": ["poisson", "epochs"],
        "episode": dict(shots=shots, examples=[size], ways=ways, population=bound),
        "compute": {"episodes_per_step": a_step, "total_episodes": steps * a_step},
        "data": mapping["data"],
        "train": train,
    }
    if learning_rate(train) is not None:
        plan["learning"] = {"learning_rate_steps": steps}
    if config.people is not None:
        numbers = config.people.bounds.numbers.items()
        plan["people"] = {name: int(number) for name, number in numbers}
    return plan


def learning_rate(train: Mapping[str, Any] | None) -> float | None:
    """Returns the learning rate in the table ``train``; None if it is not finite."""
    optimizer = (train or {}).get("optimizer")
    rate = optimizer.get("learning_rate") if isinstance(optimizer, Mapping) else None
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        return None
    return float(rate) if abs(rate) <= sys.float_info.max else None
