"""The question of a plan, and the file that it is in."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.people import PersonBounds
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.schemes import PERSON
from jaxdp_episodic.accountant.describe.serialization import spec_from_dict
from jaxdp_episodic.accountant.describe.spec import (
    AT_LEAST_ONE,
    Spec,
    set_checked,
    set_positive,
)
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.tools.plan.designs import SCHEMES
from jaxdp_episodic.tools.requests.request_file import read_population
from jaxdp_episodic.trainer.data.sources import SOURCES, DataSource

_MAX_SIZES = 100  # numbers of examples to try; each is a search of its own
# Of a training config; the table ``train`` must leave them out.
_SET_BY_PLAN = ("epsilon", "delta", "num_steps", "step", "data")


@dataclass(frozen=True, eq=False, kw_only=True)
class EpisodeShape(Spec):
    """What an episode is.

    Attributes:
      shots: examples of each class (or of the task) to learn from.
      examples: support and query together, one number or several to try. All examples
        are tried as well.
      ways: classes; None if the tasks are units of the tree.
      population: a public lower bound of the number of examples of a class or task: the
        plan then rests on it alone. None: on the sizes of the data, which under
        ``add_remove`` are private, and so is the plan.
    """

    shots: int
    examples: tuple[int, ...]
    ways: int | None = None
    population: int | None = None

    def __post_init__(self) -> None:
        set_checked(self, AT_LEAST_ONE, "shots", one=True)
        set_checked(self, AT_LEAST_ONE, "ways", "population", one=True, optional=True)
        sizes = np.atleast_1d(AT_LEAST_ONE("examples", self.examples))
        if sizes.ndim != 1 or not sizes.size:
            shown = _validation.shown(self.examples)
            raise ValueError(f"examples must be some numbers, got {shown}")
        if sizes.size > _MAX_SIZES:
            raise ValueError(f"examples must be at most {_MAX_SIZES} numbers")
        if sizes.min() <= self.shots:
            raise ValueError(
                "examples must exceed shots (a query is needed), got "
                f"{_validation.shown(self.examples)} with shots={self.shots}"
            )
        object.__setattr__(self, "examples", tuple(sizes.tolist()))


@dataclass(frozen=True, eq=False, kw_only=True)
class Compute(Spec):
    """How much may be computed.

    Attributes:
      episodes_per_step: the most that a step may have, on average.
      total_episodes: the most that the run may have.
      fewest_steps: of the run.
      most_steps: of the run.
    """

    episodes_per_step: int
    total_episodes: int
    fewest_steps: int = 20
    most_steps: int = 10_000

    def __post_init__(self) -> None:
        names = ("episodes_per_step", "total_episodes", "fewest_steps", "most_steps")
        set_checked(self, AT_LEAST_ONE, *names, one=True)
        if self.fewest_steps > self.most_steps:
            raise ValueError(
                "fewest_steps must be at most most_steps, got "
                f"{self.fewest_steps} and {self.most_steps}"
            )
        if self.total_episodes < self.fewest_steps:
            raise ValueError(
                "total_episodes must be at least fewest_steps, got "
                f"{self.total_episodes} and {self.fewest_steps}"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Learning(Spec):
    """What is known of the learning, and guesses where nothing is.

    Attributes:
      effective_dimension: number of directions in which noise hurts, those in which the
        loss is curved: far fewer than parameters. A guess, for `effective_steps`.
      alignment: in (0, 1], norm of the mean contribution in clip norms; a guess, for
        `effective_steps`.
      learning_rate_steps: length of the run that ``train.optimizer.learning_rate`` was
        chosen for. A recommended config of another length gets it times
        ``sqrt(learning_rate_steps / num_steps)``: what noise adds up to grows with the
        root of the number of steps. None: the learning rate is taken as it is.
    """

    effective_dimension: int = 1_000
    alignment: float = 0.3
    learning_rate_steps: int | None = None

    def __post_init__(self) -> None:
        set_checked(self, AT_LEAST_ONE, "effective_dimension", one=True)
        set_checked(self, AT_LEAST_ONE, "learning_rate_steps", one=True, optional=True)
        set_positive(self, "alignment")
        if self.alignment > 1:
            raise ValueError(f"alignment must lie in (0, 1], got {self.alignment!r}")


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanRequest(Spec):
    """What is to be planned; the dictionary form is what a TOML file holds.

    Attributes:
      epsilon: the target, > 0 and finite.
      delta: the target, in (0, 1).
      episode: what an episode is.
      compute: how much may be computed.
      data: where the examples come from; or a table ``population`` in the file.
      learning: guesses that rank designs.
      privacy_unit: level of the protected unit, or "person"; None: the last.
      people: bounds of what one person may own, where people are protected.
      num_people: length of the public list of people, where they are: designs in blocks
        of them, which need no bounds, are compared too.
      neighboring_relation: "add_remove", "replace_one" or "zero_out".
      schemes: which ways to draw are compared: "poisson", "epochs" (random
        allocation, where it costs less than coins do at their best), "without
        replacement", "independent", whose calibration takes longest by far, and
        "blocks" of people.
      method: of the calibration.
    """

    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "data": SOURCES,
        "episode": (EpisodeShape,),
        "compute": (Compute,),
        "learning": (Learning,),
        "people": (PersonBounds,),
    }

    epsilon: float
    delta: float
    episode: EpisodeShape
    compute: Compute
    data: DataSource | None = None
    learning: Learning = field(default_factory=Learning)
    privacy_unit: str | None = None
    people: PersonBounds | None = None
    num_people: int | None = None
    neighboring_relation: str = "add_remove"
    schemes: tuple[str, ...] = SCHEMES
    method: str = "rdp"

    def __post_init__(self) -> None:
        set_positive(self, "epsilon")
        set_checked(self, _validation.open_unit_array, "delta", one=True)
        if not isinstance(self.schemes, list | tuple):
            shown = _validation.shown(self.schemes)
            raise TypeError(f"schemes must be a list of names, got {shown}")
        if not self.schemes:
            raise ValueError(f"schemes must be some of {SCHEMES}, got {self.schemes!r}")
        for scheme in self.schemes:
            _validation.choice("schemes", scheme, SCHEMES)
        relation = self.neighboring_relation
        _validation.choice("neighboring_relation", relation, NEIGHBORING_RELATIONS)
        set_checked(self, AT_LEAST_ONE, "num_people", one=True, optional=True)
        knows_people = self.people is not None or self.num_people is not None
        if knows_people != (self.privacy_unit == PERSON):
            rule = "be left out" if knows_people else "be given, one of them or both"
            raise ValueError(
                f"people and num_people must {rule} with privacy_unit="
                f"{self.privacy_unit!r}"
            )
        if self.people is not None and self.people.shape:
            raise ValueError(f"people must be of one setting, got {self.people!r}")


class PlanDescription(NamedTuple):
    """A plan's file, read.

    Attributes:
      request: the question.
      population: the tree of classes or tasks and their examples.
      train: the table ``train``, what a training config needs besides; or None.
      data: the table ``data`` as it stands; or None.
      feature_shape: of an example of the data; or None.
      people: who own the data; None: not known.
      has_public_units: whether the data say that their list of classes is public.
    """

    request: PlanRequest
    population: Population
    train: dict[str, Any] | None
    data: dict[str, Any] | None
    feature_shape: tuple[int, ...] | None = None
    people: int | None = None
    has_public_units: bool = False


def read_plan(path: Path) -> PlanDescription:
    """Returns the question in a TOML file; its data are loaded for their sizes.

    Besides the fields of `PlanRequest` it has either a table ``data`` or a table
    ``population`` (``levels`` and ``sizes``, as in a request file), and may have a
    table ``train`` with the rest of a training config: learner (without ``shots``),
    model, optimizer, ``l2_clip_norm``, evaluation.

    Raises:
      OSError: a file that cannot be read.
      TypeError: something of the wrong type.
      ValueError: not TOML, an unknown or missing key, a value out of range.
    """
    mapping = read_toml(path)
    train = mapping.pop("train", None)
    if train is not None and not isinstance(train, dict):
        shown = _validation.shown(train)
        raise TypeError(f"train must be a table of keys, got {shown}")
    for name in _SET_BY_PLAN:
        if train is not None and name in train:
            raise ValueError(f"train.{name}: the plan says this, leave it out")
    table = mapping.pop("population", None)
    kinds = {
        "episode": EpisodeShape,
        "compute": Compute,
        "learning": Learning,
        "people": PersonBounds,
    }
    for name, kind in kinds.items():  # each table has the type that it can only have
        if isinstance(mapping.get(name), dict):
            mapping[name] = {"type": kind.__name__, **mapping[name]}
    table_of_plan = {"type": PlanRequest.__name__, **mapping}
    request = spec_from_dict(PlanRequest, table_of_plan, where="plan")
    if (
        request.learning.learning_rate_steps is not None
        and learning_rate(train) is None
    ):
        raise ValueError(
            "learning.learning_rate_steps needs train.optimizer.learning_rate, a number"
        )
    if (request.data is None) == (table is None):
        raise ValueError("give exactly one of the tables data and population")
    if request.data is None:
        tree = _population(table)
        return PlanDescription(request, tree, train, None)
    loaded = request.data.load("train", path.parent)
    shape = loaded.features.shape[1:]
    tree, people = loaded.population, loaded.people
    number = None if people is None else people.people
    listed = loaded.has_public_units
    return PlanDescription(request, tree, train, mapping["data"], shape, number, listed)


def learning_rate(train: Mapping[str, Any] | None) -> float | None:
    """Returns the learning rate of the table ``train``, if it states a finite one."""
    optimizer = (train or {}).get("optimizer")
    rate = optimizer.get("learning_rate") if isinstance(optimizer, Mapping) else None
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        return None
    return float(rate) if abs(rate) <= sys.float_info.max else None


def _population(table: Any) -> Population:
    if not isinstance(table, dict) or set(table) - {"sizes", "levels"}:
        raise ValueError(
            "population must have the keys sizes and levels, got "
            f"{_validation.shown(table)}"
        )
    return read_population(table, Path())
