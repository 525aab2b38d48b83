"""The description of a search: a base run, and distributions for its fields."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.questions import tuning
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.trainer.config.training_config import TrainingConfig, read_config
from jaxdp_episodic.trainer.config.training_parts import CLOSED_FORM, NONE, SCALED
from jaxdp_episodic.trainer.data import fields
from jaxdp_episodic.trainer.data.splits import TRAIN

# Most combinations of values that change a run's cost; each needs a calibration.
_MAX_VARIANTS = 64
# Fields of a run that a search sets, or that would break its guarantee.
_FIXED = ("epsilon", "delta", "data", "evaluation", "seed", "version", "type")
# Keys of the run, and of its start, that a run of statistics alone must not have.
_OF_STEPS = ("model", "l2_clip_norm", "clipping", "num_steps", "normalizer")
_OF_A_START = ("kind", "share")
_finite = fields.within(-math.inf, math.inf, "()", rule="be a finite number")
_table = functools.partial(_validation.instance, kinds=dict, words="a table of keys")
_DIMENSIONS = 128  # largest number that a search around a config tries, as in `plan`


def _some(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not value:
        shown = _validation.shown(value)
        raise ValueError(f"{name} must be a list of values, got {shown}")
    return tuple(value)


class Choice(fields.CheckedSpec):
    """One of some values, all equally likely."""

    values: Annotated[tuple[Any, ...], _some]

    def draw(self, generator: np.random.Generator) -> Any:
        """Returns one value."""
        return self.values[int(generator.integers(len(self.values)))]


class Integers(fields.CheckedSpec):
    """A whole number from ``low`` to ``high``, both included."""

    low: Annotated[int, fields.whole(-(2**53))]
    high: Annotated[int, fields.whole(-(2**53))]

    def check_values(self) -> None:
        """Refuses an empty range."""
        if self.low > self.high:
            raise ValueError(f"low must be at most high, got {self.low}, {self.high}")

    @property
    def values(self) -> range:
        """All values."""
        return range(self.low, self.high + 1)

    def draw(self, generator: np.random.Generator) -> int:
        """Returns one value."""
        return int(generator.integers(self.low, self.high, endpoint=True))


class Uniform(fields.CheckedSpec):
    """A number between ``low`` and ``high``."""

    low: Annotated[float, _finite]
    high: Annotated[float, _finite]

    def check_values(self) -> None:
        """Refuses an empty range."""
        if not self.low < self.high:
            raise ValueError(f"low must be below high, got {self.low!r}, {self.high!r}")

    def draw(self, generator: np.random.Generator) -> float:
        """Returns one value."""
        return float(generator.uniform(self.low, self.high))


class LogUniform(Uniform):
    """A number between ``low`` and ``high``, both > 0, with a uniform logarithm."""

    def check_values(self) -> None:
        """Refuses a range with numbers that have no logarithm, or an empty one."""
        super().check_values()
        if not self.low > 0:
            raise ValueError(f"low must be > 0, got {self.low!r}")

    def draw(self, generator: np.random.Generator) -> float:
        """Returns one value."""
        logs = math.log(self.low), math.log(self.high)
        return min(max(math.exp(generator.uniform(*logs)), self.low), self.high)


Distribution = Choice | Integers | Uniform | LogUniform


class Search(fields.CheckedSpec):
    """The target of a search, its number of runs, and the distributions of both."""

    nested_specs: ClassVar[Any] = {
        "trials": get_args(tuning.Trials),
        "hyperparameters": get_args(Distribution),
    }

    delta: Annotated[float, fields.within(0.0, 1.0, "()")]  # of the whole search
    trials: tuning.Trials  # the distribution of the number of runs
    # Dotted name of a field of the run to its distribution.
    hyperparameters: Mapping[str, Distribution]
    run: Annotated[dict[str, Any], _table]  # the base run, without epsilon and delta
    split: fields.Text = "validation"  # the run with its best score is released
    # Must be true, so that scores are post-processing of the private models. Scores on
    # private held-out data would disclose these.
    held_out_is_public: bool = False
    # Of the whole search; that of each run is calibrated.
    epsilon: fields.Positive | None = None
    run_epsilon: fields.Positive | None = None  # of each; the search's is computed

    def check_values(self) -> None:
        """Refuses what would break the guarantee, and searches without a target."""
        if self.trials.shape:
            shown = _validation.shown(self.trials)
            raise ValueError(f"fields of trials must be single numbers, got {shown}")
        if (self.epsilon is None) == (self.run_epsilon is None):
            raise ValueError(
                "give exactly one of epsilon (of the whole search) and run_epsilon (of "
                f"each run), got {'neither' if self.epsilon is None else 'both'}"
            )
        if self.held_out_is_public is not True:
            raise NotImplementedError(
                "held_out_is_public must be true, as no theorem covers a choice by "
                "scores on private held-out data, got "
                f"{_validation.shown(self.held_out_is_public)}"
            )
        for name in self.hyperparameters:
            if name.split(".")[0] in _FIXED:
                raise ValueError(
                    f"hyperparameters.{name} must be left out: it must be the same for "
                    "all runs"
                )
        if self.run.get("seed") is not None:
            raise ValueError("run.seed must be left out: a fixed seed is not private")
        for name in ("epsilon", "delta"):
            if name in self.run:
                raise ValueError(f"run.{name} must be at the top of the file instead")
        number = math.prod(len(values) for values in self._priced.values())
        if number > _MAX_VARIANTS:
            raise ValueError(
                f"hyperparameters {sorted(self._priced)} change a run's privacy cost: "
                f"they must have at most {_MAX_VARIANTS} combinations, got {number}"
            )

    @functools.cached_property
    def _priced(self) -> dict[str, Any]:
        """The values of the hyperparameters that change a run's privacy cost."""
        priced = {n: d for n, d in self.hyperparameters.items() if is_priced(n)}
        for name, dist in priced.items():
            if not isinstance(dist, Choice | Integers):
                raise NotImplementedError(
                    f"hyperparameters.{name} changes a run's privacy cost, so it must "
                    f"be Choice or Integers, got {type(dist).__name__}"
                )
        return {name: getattr(dist, "values") for name, dist in priced.items()}  # noqa: B009

    def draw(self, generator: np.random.Generator) -> dict[str, Any]:
        """Returns hyperparameters of one run, by dotted name."""
        return {name: d.draw(generator) for name, d in self.hyperparameters.items()}

    def variants(self) -> Iterator[dict[str, Any]]:
        """Yields every combination of the values that change a run's privacy cost."""
        for values in itertools.product(*self._priced.values()):
            yield dict(zip(self._priced, values, strict=True))

    def config(self, values: Mapping[str, Any], epsilon: float) -> TrainingConfig:
        """Returns the validated config of a run with these hyperparameters."""
        table = copy.deepcopy(dict(self.run))
        table |= {"epsilon": epsilon, "delta": self.delta, "version": 1}
        for name, value in values.items():
            _set(table, name, value)
        learner, start = table.get("learner"), table.get("start")
        if isinstance(learner, dict) and learner.get("kind") in CLOSED_FORM:
            for name in _OF_STEPS:  # the learner takes none
                table.pop(name, None)
            if isinstance(start, dict):
                kept = {k: v for k, v in start.items() if k not in _OF_A_START}
                table["start"] = {**kept, "kind": learner["kind"]}
        config = TrainingConfig.from_dict(table, where="run")
        if config.adaptive is not None:
            raise ValueError(
                "run.adaptive must be left out: a search has runs fixed in advance"
            )
        split, wanted = self.split, config.evaluation
        if wanted is None or split not in wanted.splits:
            raise ValueError(
                f"run.evaluation.splits must have {split!r}, on which runs are compared"
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        """Returns the search as plain values, in the form of ``search.json``."""
        table = super().to_dict()
        laws = {name: dist.to_dict() for name, dist in self.hyperparameters.items()}
        del table["hyperparameters"], table["run"]
        settings = table | {"type": "SearchSettings"}
        return {"settings": settings, "laws": laws, "run": dict(self.run)}


def is_priced(name: str) -> bool:
    """True if a field of a run changes its Rényi DP curve at a given epsilon."""
    first = name.split(".")[0]
    priced = ("num_steps", "learner", "learner.kind")
    return first in ("step", "start", "people") or name in priced


def read_search(path: Path, *, held_out_is_public: bool = False) -> Search:
    """Returns the search in a TOML file; paths of data are relative to it."""
    mapping = read_toml(path)
    if "data" in mapping and "run" not in mapping:
        if not held_out_is_public:
            raise ValueError(
                "--held-out-is-public must be given for a training config, as runs are "
                "compared on its held-out data; give it if these data are public"
            )
        config = read_config(path)  # names what is wrong
        mapping = search_around(mapping, config, path.parent)
    if held_out_is_public:
        mapping["held_out_is_public"] = True
    tables = mapping.get("hyperparameters")
    for name, table in tables.items() if isinstance(tables, dict) else ():
        if not isinstance(table, dict) or "type" not in table:
            raise TypeError(
                f"hyperparameters.{name} must be a table with a type (names with dots "
                f"need quotes), got {_validation.shown(table)}"
            )
    return Search.from_dict(mapping, where="search")


def search_around(
    mapping: Mapping[str, Any], config: TrainingConfig, base: Path
) -> dict[str, Any]:
    """Returns a search's file around a training config, with four expected runs."""
    run = {k: v for k, v in mapping.items() if k not in ("version", "epsilon", "delta")}
    searched: dict[str, Any] = {}
    optimizer, clip = run.get("optimizer"), run.get("l2_clip_norm")
    if isinstance(optimizer, dict) and (rate := optimizer.get("learning_rate")):
        ends = {"low": rate / 4, "high": rate * 4}
        searched["optimizer.learning_rate"] = {"type": "LogUniform", **ends}
    if clip:
        values = [clip / 2, clip, clip * 2]
        searched["l2_clip_norm"] = {"type": "Choice", "values": values}
    if not searched and isinstance(run.get("start"), dict):
        columns, most = (run.get("data") or {}).get("features"), _DIMENSIONS
        if isinstance(columns, list):
            most = min(most, len(columns))
        elif config.features.kind in (NONE, SCALED):  # of others more, or unknown
            shape = config.data.load(TRAIN, base).features.shape[1:]
            most = min(most, math.prod(shape))
        values = sorted({max(1, most // part) for part in (4, 2, 1)})
        searched["start.dimensions"] = {"type": "Choice", "values": values}
    splits = (run.get("evaluation") or {}).get("splits") or ["validation"]
    target = {name: mapping.get(name) for name in ("epsilon", "delta")}
    return {
        "version": 1,
        **target,
        "split": splits[0],
        "held_out_is_public": False,
        "trials": {"type": "NegativeBinomialTrials", "expected_runs": 4.0, "eta": 0.0},
        "hyperparameters": searched,
        "run": run,
    }


def _set(table: dict[str, Any], name: str, value: Any) -> None:
    """Sets the field with a dotted name; numbers are indices of lists."""
    *above, last = name.split(".")
    inner: Any = table
    for part in above:
        if isinstance(inner, list) and part.isdecimal() and int(part) < len(inner):
            inner = inner[int(part)]
        elif isinstance(inner, dict):
            inner = inner.setdefault(part, {})
        else:
            raise ValueError(f"hyperparameters.{name}: the run has no {part!r}")
    if not isinstance(inner, dict):
        raise ValueError(f"hyperparameters.{name}: the run has no such field")
    inner[last] = value
