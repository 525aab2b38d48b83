"""A training run as a TOML file: the schema, from which `run.assemble` builds it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Self

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    PERSON,
    GroupedClasses,
    MultistageSampling,
    PeopleBlocks,
    Scheme,
    WithoutReplacement,
    checked_sampling,
)
from jaxdp_episodic.accountant.describe.population import (
    PersonBounds,
    Population,
    bounds_with_copies,
)
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.spec import SCHEMA_VERSION, spec_fields
from jaxdp_episodic.accountant.describe.step import (
    Bands,
    GaussianStep,
    Sampling,
    banded,
    checked_clip_unit,
    checked_privacy_unit,
)
from jaxdp_episodic.accountant.questions.api import epsilon as step_epsilon
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.trainer.config import training_parts as parts
from jaxdp_episodic.trainer.config.training_adaptive import AdaptiveConfig
from jaxdp_episodic.trainer.data.fields import (
    CheckedSpec,
    Count,
    Float32,
    Natural,
    one_of,
    set_fields,
    within,
)
from jaxdp_episodic.trainer.data.people import Truncation, truncated
from jaxdp_episodic.trainer.data.sources import DataSource, Stored
from jaxdp_episodic.trainer.data.splits import (
    TRAIN,
    rows_held_out,
    with_rotations,
    without_rows,
)
from jaxdp_episodic.trainer.data.table import ExampleTable

_noise = functools.partial(_validation.float32_number, zero=True)


class StepConfig(CheckedSpec):
    """A `GaussianStep` without sizes: public bounds, or private ones of the data.

    docs/own_data.md says what follows from private sizes.
    """

    sampling: Sampling | Scheme  # as of `GaussianStep`
    # None if it is calibrated
    noise_multiplier: Annotated[float, _noise] | None = None
    clip_unit: str | None = None  # as of `GaussianStep`
    # as of `GaussianStep`. "person" takes its bounds from the config's ``people``
    privacy_unit: str | None = None
    # as of `GaussianStep`. Under "zero_out" the protected level states its
    # ``population``, the number of slots that are drawn, filled or not
    neighboring_relation: Annotated[str, one_of(*NEIGHBORING_RELATIONS)] = "add_remove"
    small_units: str | None = None  # as of `GaussianStep`

    def check_values(self) -> None:
        """Refuses units that the sampling does not have, before any data are read."""
        design = checked_sampling(self.sampling)
        if self.clip_unit is not None:
            checked_clip_unit(design, self.clip_unit)
        checked_privacy_unit(design, self.privacy_unit)
        if design.shape:
            raise ValueError(
                f"sampling must be of one setting, got numbers of shape {design.shape}"
            )

    def step(
        self,
        population: Population,
        people: PersonBounds | None = None,
        copies: int = 1,
    ) -> GaussianStep:
        """Returns the step on data of these sizes, by default with noise multiplier 1.

        If classes have several copies, the protected unit includes all its copies.
        """
        if copies > 1:
            design, unit = checked_sampling(self.sampling), self.privacy_unit
            unit, people = bounds_with_copies(design, unit, people, copies)
            return dataclasses.replace(self, privacy_unit=unit).step(population, people)
        given = {name: getattr(self, name) for name in spec_fields(self)}
        if self.noise_multiplier is None:
            given["noise_multiplier"] = 1.0
        made = functools.partial(GaussianStep, **given, people=people)
        relation, design = self.neighboring_relation, checked_sampling(self.sampling)
        if relation == "zero_out" or isinstance(design, PeopleBlocks):
            return made()  # its sizes are those of slots, or of a block
        if relation == "replace_one":
            drawn = [
                one for one in design.schemes if isinstance(one, WithoutReplacement)
            ]
            if isinstance(design, GroupedClasses):
                drawn = [design.examples]
            is_public = all(one.population is not None for one in drawn)
            return made(population=None if is_public else population)
        # Sizes below the protected units are not needed: what the config states is
        # enough if the accountant can answer from it.
        try:
            step = made()
            step_epsilon(step, num_steps=1, delta=1e-5)
        except (ValueError, NotImplementedError):
            return made(population=population)
        return step


class TrainingConfig(CheckedSpec):
    """A private training run; the dictionary form is what a TOML file holds.

    The tables and their keys, ``[data]``, ``[step]`` and so on, are described in
    docs/training.md.

    Attributes:
      epsilon: the target, > 0; ``inf`` trains without noise.
      delta: the target, in (0, 1).
      num_steps: steps of the run, for which the noise is calibrated. None: as many as
        the step's own noise permits.
      model: the network; None for private statistics alone, and for "bayes" on the
        features as they are.
      l2_clip_norm: bound of each clip unit's gradient; the first one if it follows a
        quantile; 1 by default for "normalize".
      clipping: None: gradients longer than the bound are scaled to it.
      normalizer: public divisor of the noised sum; see `Trainer`.
      block_size: clip units computed in one call; see `Trainer`.
      checkpoint_every: steps between checkpoints.
      noise: "discrete", or "gaussian"; see `Trainer`. Or a `NoiseConfig`: correlated.
      seed: None: the operating system's entropy. A number is *not private*.
    """

    data: DataSource
    step: StepConfig
    epsilon: Annotated[float, within(0.0, math.inf, "(]", rule="be > 0")]
    delta: Annotated[float, within(0.0, 1.0, "()")]
    learner: parts.LearnerConfig
    model: parts.ModelConfig | None = None
    l2_clip_norm: Float32 | None = None
    clipping: parts.ClippingConfig | None = None
    start: parts.StartConfig | None = None
    people: parts.PeopleConfig | None = None
    features: parts.FeaturesConfig = field(default_factory=parts.FeaturesConfig)
    optimizer: parts.OptimizerConfig = field(default_factory=parts.OptimizerConfig)
    num_steps: Count | None = None
    normalizer: Float32 | None = None
    block_size: Count | None = None
    evaluation: parts.EvaluationConfig | None = None
    checkpoint_every: Count = 100
    noise: Annotated[str | parts.NoiseConfig, parts.checked_noise] = parts.DISCRETE
    seed: Natural | None = None
    adaptive: AdaptiveConfig | None = None

    def check_values(self) -> None:
        """Refuses parts that do not fit together, and fills in dependent defaults."""
        kind, clipping = self.learner.kind, self.clipping
        if kind in parts.CLOSED_FORM and self.start is None:
            set_fields(self, start=parts.StartConfig(kind=kind))
        if self.l2_clip_norm is None and clipping is not None:
            if kind not in parts.CLOSED_FORM and clipping.kind == parts.NORMALIZE:
                set_fields(self, l2_clip_norm=1.0)
        for mistake in self._mistakes():
            raise ValueError(mistake)

    @property
    def start_shares(self) -> tuple[float, ...]:
        """Each first statistic's share of the budget."""
        if self.start is None:
            return ()
        return self.start.shares(self.learner.kind in parts.CLOSED_FORM)

    def step_on(
        self, population: Population, step: StepConfig | None = None
    ) -> GaussianStep:
        """Returns the run's step, or another one, on data of these sizes."""
        people = None if self.people is None else self.people.bounds
        made = (step or self.step).step(population, people, self.data.copies)
        noise = self.noise
        if step is not None or isinstance(noise, str) or noise.bands == parts.AUTO:
            return made
        bands = Bands(int(noise.bands), level=noise.groups, horizon=noise.horizon)
        with _validation.prefixed("noise"):
            return banded(made, bands)

    @property
    def noise_law(self) -> str:
        """The distribution of each step's fresh noise: "discrete" or "gaussian"."""
        return self.noise if isinstance(self.noise, str) else self.noise.law

    def training_data(
        self, base: Path | None = None
    ) -> tuple[ExampleTable, Truncation | None]:
        """Returns the training data, and what was left out of them to bound people.

        Args:
          base: folder that paths are relative to.

        Raises:
          OSError, TypeError, ValueError: data that cannot be read, as of the loaders;
            people beyond their bounds, or not known.
          NotImplementedError: a split by class names that a replacement may change.
        """
        # Copies are made last: the bounds are those of people's own examples.
        source, copies = self.data, self.data.copies
        data = source.read(TRAIN, base)
        unit, relation = str(self.step.privacy_unit), self.step.neighboring_relation
        if getattr(source, "class_split", None) is not None:
            if relation == "replace_one" and unit in data.level_names[:-1]:
                raise NotImplementedError(
                    "validation and test of the data must be paths, not shares of the "
                    f"classes, under {relation} with privacy_unit={unit!r}: what "
                    "replaces a unit may have a name that is held out, and leave one "
                    "less to train on"
                )
        if self.evaluation is not None and self.evaluation.drop_duplicates:
            # Decides on each example by itself and public data: neighbouring data stay
            # so.
            held_out = (source.load(one, base) for one in self.evaluation.splits)
            data = without_rows(data, rows_held_out(data, held_out))
        truncation = None
        if self.people is not None:
            bounds, truncates = self.people.bounds, self.people.truncate
            data, truncation = truncated(data, bounds, truncate=truncates)
        return with_rotations(data) if copies > 1 else data, truncation

    def _mistakes(self) -> Iterator[str]:
        """Yields what is wrong between the parts, the most basic first."""
        yield from self._mistakes_of_people()
        kind, evaluation = self.learner.kind, self.evaluation
        with_kind = f"with learner.kind={kind!r}"
        if evaluation is not None and evaluation.ways is not None:
            if kind not in parts.PROTOTYPES:
                yield (
                    f"evaluation.ways must not be given {with_kind}, whose network has "
                    f"one output for each training class, got {evaluation.ways}"
                )
        if kind in parts.CLOSED_FORM:
            names = ("model", "l2_clip_norm", "clipping", "num_steps", "normalizer")
            given = [name for name in names if getattr(self, name) is not None]
            if self.step.noise_multiplier is not None:
                given.append("step.noise_multiplier")
            if isinstance(self.noise, parts.NoiseConfig):
                given.append(f"noise.kind={parts.BANDED!r}")
            if given:
                yield (
                    f"{given[0]} must not be given {with_kind}, which takes no "
                    "gradient steps"
                )
        else:
            yield from self._mistakes_of_steps(with_kind)
        if kind == parts.CLASSIFIER:
            yield from self._mistakes_of_classifiers(with_kind)
        if self.start is not None:
            self.start.check_use(kind, self.num_steps)
        if self.adaptive is not None:
            yield from self._mistakes_of_adaptive(self.adaptive)
        if evaluation is not None and evaluation.drop_duplicates:
            name = "evaluation.drop_duplicates must be false"
            if self.step.neighboring_relation == "replace_one":
                yield (
                    f"{name} under replace_one: an example that is replaced by a copy "
                    "of a held-out one would leave one less to train on"
                )
            if self.adaptive is not None and self.adaptive.check is not None:
                yield (
                    f"{name} with adaptive.check, whose held-out data are protected: "
                    "what is trained on would depend on them"
                )

    def _mistakes_of_people(self) -> Iterator[str]:
        """Bounds of people who are not protected, or whose data name no owners."""
        in_blocks = isinstance(self.step.sampling, PeopleBlocks)
        unit, with_unit = self.step.privacy_unit, f"step.privacy_unit={PERSON!r}"
        if unit != PERSON and not in_blocks:
            if self.people is not None:
                yield f"people is for {with_unit}, got {unit!r}"
            return
        if self.people is None and not in_blocks:
            yield (
                f"people must be given with {with_unit}: public bounds of what one "
                "person owns"
            )
        if not isinstance(self.data, Stored) and not getattr(self.data, "owner", None):
            yield (
                f"data.owner must be given with {with_unit}: it says whose an example "
                f"is; got data of type {type(self.data).__name__!r} without"
            )

    def _mistakes_of_steps(self, with_kind: str) -> Iterator[str]:
        """Gradient steps without what they need."""
        kind = self.learner.kind
        needed = ("l2_clip_norm",) if kind == parts.BAYES else ("model", "l2_clip_norm")
        for name in needed:
            if getattr(self, name) is None:
                yield f"{name} must be given {with_kind}"
        if self.clipping is not None and self.l2_clip_norm is not None:
            self.clipping.bounds(self.l2_clip_norm)
        fits = {
            parts.PROTONET: parts.EMBEDDINGS,
            parts.BAYES: parts.EMBEDDINGS,
            parts.CLASSIFIER: (parts.LINEAR, parts.CONV_CLASSIFIER),
        }
        fits = (*fits.get(kind, (parts.CONV_CLASSIFIER,)), parts.MLP_KIND)
        if self.model is not None and self.model.kind not in fits:
            # The learner cannot use its outputs.
            yield (
                f"model.kind must be one of {fits} {with_kind}, got {self.model.kind!r}"
            )
        is_auto = (
            isinstance(self.noise, parts.NoiseConfig) and self.noise.bands == parts.AUTO
        )
        if is_auto and (self.num_steps is None or math.isinf(self.epsilon)):
            yield (
                f"noise.bands={parts.AUTO!r} needs num_steps and a finite epsilon, got "
                f"num_steps={self.num_steps} and epsilon={self.epsilon:g}"
            )
        if (self.num_steps is None) == (self.step.noise_multiplier is None):
            yield (
                "give exactly one of num_steps (the noise is calibrated) and "
                "step.noise_multiplier (the steps are), got "
                f"{'neither' if self.num_steps is None else 'both'}"
            )

    def _mistakes_of_classifiers(self, with_kind: str) -> Iterator[str]:
        """A classifier with a private list of classes, or clipped by episodes."""
        design, step = checked_sampling(self.step.sampling), self.step
        example = design.level_names[-1]
        if step.privacy_unit not in (None, example, PERSON):
            yield (
                f"step.privacy_unit must be {example!r} or {PERSON!r} {with_kind}, "
                "whose outputs say which classes there are: their list is public; got "
                f"{step.privacy_unit!r}"
            )
        if not isinstance(design, MultistageSampling) or step.clip_unit != example:
            yield (
                f"step.clip_unit must be {example!r}, and step.sampling draw classes "
                f"and examples, level by level, {with_kind}: nothing interacts, and "
                f"each example is clipped alone; got clip_unit={step.clip_unit!r} with "
                f"{type(design).__name__}"
            )
        if self.model is not None and self.model.kind == parts.LINEAR:
            if self.learner.embed == parts.HIDDEN:
                yield (
                    f"learner.embed={parts.HIDDEN!r} needs a model that makes some, "
                    f"got model.kind={parts.LINEAR!r}"
                )
        if self.evaluation is not None and self.evaluation.ways is None:
            yield (
                f"evaluation.ways must be given {with_kind}, which trains on no "
                "episodes"
            )

    def _mistakes_of_adaptive(self, adaptive: AdaptiveConfig) -> Iterator[str]:
        """What an adaptive run cannot have, or needs."""
        kind, options = self.learner.kind, list(adaptive.options.values())
        if kind in parts.CLOSED_FORM:
            yield f"adaptive is for runs of gradient steps, got learner.kind={kind!r}"
        if self.evaluation is not None and self.evaluation.without_noise:
            yield (
                "evaluation.without_noise must be false with adaptive: without noise "
                "the run would make other choices"
            )
        if adaptive.has_quotas and self.num_steps is None:
            yield "num_steps must be given with adaptive quotas, got None"
        if adaptive.has_quotas and options[0].most is not None:
            most = sum(option.most or 0 for option in options)
            if most != self.num_steps:
                yield (
                    f"num_steps must be the sum of most over all options, {most}, got "
                    f"{self.num_steps}"
                )
        if isinstance(self.noise, parts.NoiseConfig):
            if self.noise.bands == parts.AUTO or len(options) > 1:
                yield (
                    "noise.bands must be a number, for one option that trains, with "
                    f"adaptive, got {self.noise.bands!r} and {len(options)} options"
                )
        if not adaptive.has_quotas and math.isinf(self.epsilon):
            yield "epsilon must be finite with adaptive prices, got inf"

    @classmethod
    def from_dict(cls, mapping: Any, *, where: str | None = None) -> Self:
        """Returns the run that ``mapping`` describes; see `spec_from_dict`."""
        noise = mapping.get("noise") if isinstance(mapping, Mapping) else None
        if isinstance(noise, Mapping):
            table, path = {"version": SCHEMA_VERSION, **noise}, where or cls.__name__
            noise = parts.NoiseConfig.from_dict(table, where=f"{path}.noise")
            mapping = {**mapping, "noise": noise}
        return super().from_dict(mapping, where=where)


def read_config(path: Path) -> TrainingConfig:
    """Returns the run in a TOML file, fully checked; no data are read yet.

    Paths in it are relative to the file.

    Raises:
      OSError: a file that cannot be read.
      TypeError: something of the wrong type.
      ValueError: not UTF-8, not TOML, an unknown or missing key, a value out of range.
      NotImplementedError: a combination that no theorem covers.
    """
    return TrainingConfig.from_dict(read_toml(path), where="config")
