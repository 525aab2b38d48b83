"""One request about the privacy of a run, in a form that a TOML file can hold."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.releases import RELEASES
from jaxdp_episodic.accountant.describe.runs import (
    DisjointParts,
    parts_of,
    refuse_disjoint,
)
from jaxdp_episodic.accountant.describe.spec import (
    Counts,
    NonNegatives,
    Positives,
    PositiveShares,
    Spec,
    numbers,
    refuse_hostile,
)
from jaxdp_episodic.accountant.describe.step import AnyStep, ComposedSteps, GaussianStep
from jaxdp_episodic.accountant.questions import api, calibration
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.files.archive import read_arrays
from jaxdp_episodic.files.table_file import read_csv_columns
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.trainer.data.owners import check_text_size

NOISE = "noise_multiplier"
NUM_STEPS = "num_steps"
RATE = "rate"
_SOUGHT = (NOISE, NUM_STEPS, RATE)
_LARGEST = "largest within the target"


class EpsilonRequest(Spec, kw_only=True):
    """Asks for the cost of a run: epsilon at a delta, or delta at an epsilon."""

    step: AnyStep | DisjointParts | AdaptiveRun
    num_steps: Counts | None = None
    delta: Annotated[ArrayLike, numbers(_validation.open_unit_array)] | None = None
    epsilon: NonNegatives | None = None
    method: str = "exact"

    def check_values(self) -> None:
        """Refuses a method or fields that do not go with the run."""
        api.check_method(self.method)
        composed = isinstance(self.step, AdaptiveRun | ComposedSteps)
        if not isinstance(self.step, AdaptiveRun | DisjointParts):
            api.check_step(self.step)
        elif isinstance(self.step, DisjointParts):
            composed = self.step.have_counts
        elif self.method == "rdp":
            raise ValueError(
                "method must be 'exact' or 'pld' for an adaptive run, got 'rdp'"
            )
        if composed != (self.num_steps is None):
            rule = "be left out for" if composed else "be given unless step is"
            raise ValueError(
                f"num_steps must {rule} an adaptive run or one with its own counts, "
                f"got {self.num_steps!r}"
            )
        if (self.delta is None) == (self.epsilon is None):
            given = "neither" if self.delta is None else "both"
            raise ValueError(
                "give exactly one of delta (to get epsilon) and epsilon (to get "
                f"delta), got {given}"
            )
        if self.epsilon is not None and np.isinf(self.epsilon).any():
            raise ValueError(f"epsilon must be finite, got {self.epsilon!r}")

    @property
    def quantity(self) -> str:
        """The quantity of the answer: "epsilon" or "delta"."""
        return "epsilon" if self.epsilon is None else "delta"

    @property
    def nature(self) -> str:
        """How the answer relates to the true cost, in words."""
        if isinstance(self.step, AdaptiveRun) and self.step.composition() is None:
            return "certified upper bound"
        natures = {"exact": "exact, rounded up", "pld": "certified upper bound"}
        return natures.get(self.method, "upper bound")

    def planned(self, what: str) -> AnyStep:
        """Returns the step; refuses an adaptive run or disjoint parts for ``what``."""
        if isinstance(self.step, AdaptiveRun):
            raise NotImplementedError(
                f"{what} covers runs fixed in advance, got an AdaptiveRun"
            )
        refuse_disjoint(self.step, what)
        return cast(AnyStep, self.step)

    def answer(self) -> np.ndarray | np.float64:
        """Returns epsilon or delta, of the request's shape."""
        value, info = self.answer_with_info()
        bounds = int(np.sum(info.is_certified_bound))
        is_exact = self.method == "exact" and not isinstance(self.step, AdaptiveRun)
        if is_exact and bounds:
            warnings.warn(
                f"{bounds:,} of {np.size(value):,} answers could not be computed "
                "exactly and are certified upper bounds",
                stacklevel=2,
            )
        return value

    def answer_with_info(self) -> tuple[np.ndarray | np.float64, api.PrivacyInfo]:
        """Returns epsilon or delta, and its error."""
        step, asks_epsilon = self.step, self.epsilon is None
        if isinstance(step, AdaptiveRun):
            step = step.composition() or step
        if isinstance(step, AdaptiveRun):  # the upper end of its certified interval
            ends = (
                step.epsilon_interval(delta=self.delta)
                if asks_epsilon
                else step.delta_interval(epsilon=self.epsilon)
            )
            with np.errstate(invalid="ignore"):  # both infinite
                width = np.where(ends[1] == ends[0], 0.0, np.subtract(ends[1], ends[0]))
            is_bound = np.ones(np.shape(ends[1]), bool)
            return ends[1], api.PrivacyInfo(width[()], is_bound[()])
        run: dict[str, Any] = {"num_steps": self.num_steps, "method": self.method}
        if asks_epsilon:
            return api.epsilon(step, delta=self.delta, return_info=True, **run)
        return api.delta(step, epsilon=self.epsilon, return_info=True, **run)


class CalibrationRequest(Spec, kw_only=True):
    """Asks for the noise, number of steps or rate that keeps a run within a target."""

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"calibrate": _SOUGHT}

    step: GaussianStep
    calibrate: str
    epsilon: Positives
    delta: PositiveShares
    num_steps: Counts | None = None
    level: str | None = None
    method: str = "exact"

    def check_values(self) -> None:
        """Refuses fields that do not go with what is sought."""
        api.check_method(self.method)
        sought = _validation.choice("calibrate", self.calibrate, _SOUGHT)
        needed = {"num_steps": sought != NUM_STEPS, "level": sought == RATE}
        for name, is_needed in needed.items():
            value = getattr(self, name)
            if is_needed != (value is not None):
                rule = "be given" if is_needed else "be left out"
                raise ValueError(
                    f"{name} must {rule} with calibrate={sought!r}, got {value!r}"
                )
        if self.level is not None:
            _validation.choice("level", self.level, self.step.design.level_names)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the answer: the broadcast shape of the numbers that it uses."""
        used = dict(self.all_numbers)
        if self.calibrate == NOISE:  # it replaces that of the step
            used.pop(f"step.{NOISE}", None)
        return _validation.broadcast_shape(**used)

    @classmethod
    def from_dict(cls, mapping: Any, *, where: str | None = None) -> Self:
        """Returns the request that ``mapping`` describes; see `spec_from_dict`."""
        if isinstance(mapping, Mapping) and isinstance(mapping.get("step"), Mapping):
            if mapping.get("calibrate") not in (NUM_STEPS, RATE):
                mapping = {**mapping, "step": {NOISE: 1.0, **mapping["step"]}}
        return super().from_dict(mapping, where=where)

    @property
    def quantity(self) -> str:
        """The calibrated quantity: "noise_multiplier", "num_steps" or "rate"."""
        return self.calibrate

    @property
    def nature(self) -> str:
        """Which of all values that meet the target the answer is, in words."""
        is_noise = self.quantity == NOISE
        return "smallest that meets the target" if is_noise else _LARGEST

    def answer(self) -> np.ndarray | np.float64 | np.int64:
        """Returns the calibrated value, of the request's shape; it meets the target.

        See `jaxdp_episodic.calibrate_noise_multiplier`, `calibrate_num_steps` and
        `calibrate_rate` for the answer if no value or every value meets it.
        """
        names = ("epsilon", "delta", "method", "num_steps", "level")
        given = {name: getattr(self, name) for name in names}
        given = {name: value for name, value in given.items() if value is not None}
        return getattr(calibration, f"calibrate_{self.calibrate}")(self.step, **given)


Request = EpsilonRequest | CalibrationRequest


def steps_of(request: Request) -> tuple[GaussianStep, ...]:
    """Returns the different Gaussian steps of the run."""
    return tuple(p for p in parts_of(request.step) if isinstance(p, GaussianStep))


def caveats_on(request: Request) -> list[str]:
    """Returns warnings that belong to the answer."""
    caveats = []
    for step in steps_of(request):
        levels = zip(step.level_names_used, step.path_rates.clipped, strict=True)
        caveats += [
            f"level {level!r}: size exceeds the number of units there are, so all are "
            "drawn (rate 1)"
            for level, clipped in levels
            if np.any(clipped)
        ]
    return list(dict.fromkeys(caveats))


_MAX_BYTES = 2**30  # of a table of records (npz: uncompressed)
_RELEASE_NAMES = tuple(kind.__name__ for kind in RELEASES)
_POPULATION_KEYS = ("sizes", "file", "levels", "row_level")

_CONFIG = "a training config, for `train`, `report` and `audit`"
# The first of these keys that a file has tells its kind.
_KINDS = {
    "episode": "a plan, for `plan`",
    "axes": "a sweep, for `sweep`",
    "hyperparameters": "a search, for `tune`",
    "learner": _CONFIG,
    "data": _CONFIG,
    "step": "a request, for `epsilon`",
}

AnyRequest = TypeVar("AnyRequest", EpsilonRequest, CalibrationRequest)


def read_request(
    path: str | Path, kind: type[AnyRequest], **overrides: Any
) -> AnyRequest:
    """Returns the validated request in a TOML file; ``overrides`` replace its keys."""
    path = Path(path)
    mapping = read_toml(path)
    refuse_other_kind(mapping, "a request", *kind.__dataclass_fields__)
    mapping |= {name: value for name, value in overrides.items() if value is not None}
    if "population" in mapping:  # one table for all steps
        tree = read_population(mapping.pop("population"), path.parent)
        mapping = with_population(mapping, tree)
    if kind is EpsilonRequest and "calibrate" in mapping:
        raise ValueError("a file with the key 'calibrate' is for `calibrate`")
    return kind.from_dict(mapping, where="request")


def refuse_other_kind(mapping: Mapping[str, Any], what: str, *own: str) -> None:
    """Refuses a file for another command; ``own`` are the keys that tell its kind."""
    key = next((key for key in _KINDS if key in mapping), None)
    if key is not None and key not in own:
        raise ValueError(f"{what} must be given, got {_KINDS[key]}: it has {key!r}")


def read_population(table: Any, folder: Path) -> Population:
    """Returns the tree that a ``[population]`` table describes."""
    refuse_hostile("population", table)
    _validation.instance("population", table, Mapping, "a table of keys")
    for key in table:
        _validation.choice("a key of population", key, _POPULATION_KEYS)
    if ("sizes" in table) == ("file" in table):
        given = "both" if "sizes" in table else "neither"
        raise ValueError(f"population: give exactly one of sizes and file, got {given}")
    levels = _names("levels", table.get("levels", []))
    if "file" in table:
        ids = _ids(table, levels, folder)
        with _validation.prefixed(f"population.file {table['file']!r}"):
            return Population.from_ids(**ids)
    if "row_level" in table:
        raise ValueError("population: row_level goes with file, not with sizes")
    with _validation.prefixed("population.sizes"):
        return Population.from_sizes(table["sizes"], level_names=levels)


def _ids(table: Mapping[str, Any], levels: list[str], folder: Path) -> dict[str, Any]:
    """Level -> column of ids of the records in ``table["file"]``."""
    name = _validation.instance("population.file", table["file"], str, "a file name")
    if not levels:
        raise ValueError("population: missing key 'levels', the columns, top first")
    path = folder / name
    if "\0" in name or not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            "population.file must lie in the request's folder or below it, "
            f"got {name!r}"
        )
    if path.suffix not in (".csv", ".npz"):
        raise ValueError(f"population.file must end in .csv or .npz, got {path.name!r}")
    with _validation.prefixed(path.name):
        if path.suffix == ".npz":
            ids: dict[str, Any] = read_arrays(path, max_bytes=_MAX_BYTES, names=levels)
        else:
            ids = read_csv_columns(path, levels, max_bytes=_MAX_BYTES)
            for level, column in ids.items():
                check_text_size(level, column)
                ids[level] = np.array(column, str)
    if "row_level" in table:
        (row_level,) = _names("row_level", [table["row_level"]])
        if row_level in ids:
            raise ValueError(f"population.row_level: {row_level!r} is among levels")
        ids[row_level] = None
    return ids


def _names(key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        shown = _validation.shown(value)
        raise TypeError(f"population.{key} must be names, got {shown}")
    return value


def with_population(mapping: dict[str, Any], tree: Population) -> dict[str, Any]:
    """Returns the file's dictionary with the tree in the table of every step."""

    def filled(step: Any) -> Any:
        if not isinstance(step, Mapping):
            return step  # reading the step refuses it
        if "population" in step:
            raise ValueError("give the population once: in the step or at the top")
        if step.get("type") in _RELEASE_NAMES:
            return step  # it samples no units
        if "parts" in step:
            raise ValueError(
                "population must be given in the step of each part, as disjoint parts "
                "have different data, got one at the top"
            )
        if isinstance(step.get("steps"), list):
            return {**step, "steps": [filled(part) for part in step["steps"]]}
        if isinstance(options := step.get("options"), Mapping):
            return {**step, "options": {k: filled(v) for k, v in options.items()}}
        return {**step, "population": tree}

    return {k: filled(v) if k == "step" else v for k, v in mapping.items()}
