"""A training run as a TOML file: the schema, from which `run.assemble` builds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import checked_sampling
from jaxdp_episodic.accountant.describe.schemes import PERSON, MultistageSampling
from jaxdp_episodic.accountant.describe.spec import Spec, set_whole_numbers
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.trainer.config.training_adaptive import AdaptiveConfig, OptionConfig
from jaxdp_episodic.trainer.config.training_evaluation import EvaluationConfig
from jaxdp_episodic.trainer.config.training_features import FeaturesConfig
from jaxdp_episodic.trainer.config.training_parts import (
    BAYES,
    CLASSIFIER,
    CLOSED_FORM,
    CONV_CLASSIFIER,
    EMBEDDINGS,
    HIDDEN,
    LINEAR,
    MLP_KIND,
    NORMALIZE,
    PROTONET,
    PROTOTYPES,
    ClippingConfig,
    LearnerConfig,
    ModelConfig,
    OptimizerConfig,
    PeopleConfig,
)
from jaxdp_episodic.trainer.config.training_start import StartConfig
from jaxdp_episodic.trainer.config.training_step import StepConfig
from jaxdp_episodic.trainer.data.people import Truncation, truncated
from jaxdp_episodic.trainer.data.sources import SOURCES, DataSource, Stored
from jaxdp_episodic.trainer.data.splits import TRAIN
from jaxdp_episodic.trainer.data.table import ExampleTable

DISCRETE = "discrete"
GAUSSIAN = "gaussian"
NOISES = (DISCRETE, GAUSSIAN)
"""What is added to a sum: the hardened discrete noise, or float64 Gaussian noise."""

# Parts that a config may leave out.
_OPTIONAL = ("evaluation", "start", "model", "people", "clipping", "adaptive")


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingConfig(Spec):
    """A private training run; the dictionary form is what a TOML file holds.

    Attributes:
      data: where the examples come from.
      step: how episodes are drawn, what is clipped and who is protected. Its noise
        multiplier is left out where ``num_steps`` is given.
      epsilon: the target, > 0; ``inf`` trains without noise.
      delta: the target, in (0, 1).
      num_steps: steps of the run; the noise is calibrated for them. None: the run takes
        as many as the step's own noise permits.
      people: bounds of what one person owns, where people are protected; None: there
        are none.
      learner: what an episode teaches, and how.
      model: the network; none with private statistics alone, like the next two; "bayes"
        may have none, and takes the features as they are.
      features: fixed features in place of the examples' own.
      start: private statistics that the run begins with; None: none.
      optimizer: of the outer loop.
      l2_clip_norm: bound of each clip unit's gradient; where it follows a quantile, in
        the first step; of "normalize" 1 by default.
      clipping: what is made of the bound; None: longer gradients are scaled to it.
      normalizer: public divisor of the noised sum; see `Trainer`.
      block_size: clip units computed in one call; see `Trainer`.
      evaluation: on held-out data; None: none.
      checkpoint_every: steps between checkpoints.
      noise: "discrete", or "gaussian"; see `Trainer`.
      seed: None: the operating system's entropy. A number is *not private*.
      adaptive: what the run may choose on the way; None: nothing.
    """

    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "data": SOURCES,
        "step": (StepConfig,),
        "people": (PeopleConfig,),
        "learner": (LearnerConfig,),
        "model": (ModelConfig,),
        "features": (FeaturesConfig,),
        "start": (StartConfig,),
        "optimizer": (OptimizerConfig,),
        "clipping": (ClippingConfig,),
        "evaluation": (EvaluationConfig,),
        "adaptive": (AdaptiveConfig,),
    }

    data: DataSource
    step: StepConfig
    epsilon: float
    delta: float
    learner: LearnerConfig
    model: ModelConfig | None = None
    l2_clip_norm: float | None = None
    clipping: ClippingConfig | None = None
    start: StartConfig | None = None
    people: PeopleConfig | None = None
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    num_steps: int | None = None
    normalizer: float | None = None
    block_size: int | None = None
    evaluation: EvaluationConfig | None = None
    checkpoint_every: int = 100
    noise: str = DISCRETE
    seed: int | None = None
    adaptive: AdaptiveConfig | None = None

    def __post_init__(self) -> None:
        _validation.choice("noise", self.noise, NOISES)
        for name in ("l2_clip_norm", "normalizer"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _validation.float32_number(name, value))
        set_whole_numbers(self, "checkpoint_every")
        for name in ("num_steps", "block_size", "seed"):
            if getattr(self, name) is not None:
                set_whole_numbers(self, name, minimum=0 if name == "seed" else 1)
        _validation.single("delta", _validation.open_unit_array("delta", self.delta))
        target = _validation.real_array("epsilon", self.epsilon)
        if not _validation.single("epsilon", target) > 0:
            raise ValueError(f"epsilon must be > 0, got {self.epsilon!r}")
        self._check_parts()
        self._check_people()
        kind = self.learner.kind
        ways = None if self.evaluation is None else self.evaluation.ways
        if ways is not None and kind not in PROTOTYPES:
            raise ValueError(
                f"evaluation.ways must not be given with learner.kind={kind!r}, whose "
                f"network has one output for each class of training, got {ways}"
            )
        if kind in CLOSED_FORM:
            self._check_statistics_alone(kind)
        else:
            self._check_steps(kind)
        if kind == CLASSIFIER:
            self._check_classifier()
        if self.start is not None:
            self.start.check_use(kind, self.num_steps)
        if self.adaptive is not None:
            self._check_adaptive(self.adaptive)

    @property
    def start_shares(self) -> tuple[float, ...]:
        """Of each statistic that the run begins with, in its budget."""
        if self.start is None:
            return ()
        return self.start.shares(self.learner.kind in CLOSED_FORM)

    def training_data(
        self, base: Path | None = None
    ) -> tuple[ExampleTable, Truncation | None]:
        """Returns what is trained on, and what bounding people has left out of it.

        Args:
          base: folder that paths are relative to.

        Raises:
          OSError, TypeError, ValueError: data that cannot be read, as of the loaders;
            people beyond their bounds, or not known.
          NotImplementedError: classes split by their names where one may be replaced.
        """
        data = self.data.load(TRAIN, base)
        if getattr(self.data, "class_split", None) is not None:
            self.step.check_split(data.level_names)
        if self.people is None:
            return data, None
        return truncated(data, self.people.bounds, truncate=self.people.truncate)

    def _check_people(self) -> None:
        """Refuses bounds of people whom nothing protects, or nobody knows."""
        in_blocks = isinstance(self.step.sampling, PeopleBlocks)
        protects_people = self.step.privacy_unit == PERSON or in_blocks
        if not protects_people:
            if self.people is not None:
                raise ValueError(
                    f"people is for step.privacy_unit={PERSON!r}, got "
                    f"{self.step.privacy_unit!r}"
                )
            return
        if self.people is None and not in_blocks:
            raise ValueError(
                f"people must be given with step.privacy_unit={PERSON!r}: public "
                "bounds of what one person owns"
            )
        is_known = isinstance(self.data, Stored) or getattr(self.data, "owner", None)
        if not is_known:
            raise ValueError(
                f"data.owner must be given with step.privacy_unit={PERSON!r}: it says "
                "whose an example is; got data of type "
                f"{type(self.data).__name__!r} without"
            )

    def _check_statistics_alone(self, kind: str) -> None:
        """Refuses what a run of private statistics has no use for."""
        names = ("model", "l2_clip_norm", "clipping", "num_steps", "normalizer")
        given = [name for name in names if getattr(self, name) is not None]
        given += ["step.noise_multiplier"] * (self.step.noise_multiplier is not None)
        if given:
            raise ValueError(
                f"{given[0]} must not be given with learner.kind={kind!r}, which takes "
                "no gradient steps"
            )
        if self.start is None:
            object.__setattr__(self, "start", StartConfig(kind=kind))

    def _check_steps(self, kind: str) -> None:
        """Refuses a run of gradient steps without what they need."""
        kind_of_clipping = None if self.clipping is None else self.clipping.kind
        if self.l2_clip_norm is None and kind_of_clipping == NORMALIZE:
            object.__setattr__(self, "l2_clip_norm", 1.0)
        needed = ("l2_clip_norm",) if kind == BAYES else ("model", "l2_clip_norm")
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be given with learner.kind={kind!r}")
        assert self.l2_clip_norm is not None
        if self.clipping is not None:
            self.clipping.bounds(self.l2_clip_norm)
        fits = {
            PROTONET: EMBEDDINGS,
            BAYES: EMBEDDINGS,
            CLASSIFIER: (LINEAR, CONV_CLASSIFIER),
        }
        fits = (*fits.get(kind, (CONV_CLASSIFIER,)), MLP_KIND)
        if self.model is not None and self.model.kind not in fits:
            # Its outputs are not what the learner takes.
            raise ValueError(
                f"model.kind must be one of {fits} with learner.kind={kind!r}, got "
                f"{self.model.kind!r}"
            )
        if (self.num_steps is None) == (self.step.noise_multiplier is None):
            given = "neither" if self.num_steps is None else "both"
            raise ValueError(
                "give exactly one of num_steps (the noise is calibrated) and "
                f"step.noise_multiplier (the steps are), got {given}"
            )

    def _check_classifier(self) -> None:
        """Refuses a classifier of classes that are no public list, or of episodes."""
        design = checked_sampling(self.step.sampling)
        names = design.level_names
        unit = self.step.privacy_unit
        if unit not in (None, names[-1], PERSON):
            raise ValueError(
                f"step.privacy_unit must be {names[-1]!r} or {PERSON!r} with "
                f"learner.kind={CLASSIFIER!r}, whose outputs say which classes there "
                f"are: their list is public; got {unit!r}"
            )
        if not isinstance(design, MultistageSampling) or (
            self.step.clip_unit != names[-1]
        ):
            raise ValueError(
                f"step.clip_unit must be {names[-1]!r}, and step.sampling draw classes "
                f"and examples, level by level, with learner.kind={CLASSIFIER!r}: "
                "nothing interacts, and each example is clipped alone; got clip_unit="
                f"{self.step.clip_unit!r} with {type(design).__name__}"
            )
        assert self.model is not None
        if self.learner.embed == HIDDEN and self.model.kind == LINEAR:
            raise ValueError(
                f"learner.embed={HIDDEN!r} needs a model that makes some, got "
                f"model.kind={LINEAR!r}"
            )
        if self.evaluation is not None and self.evaluation.ways is None:
            raise ValueError(
                f"evaluation.ways must be given with learner.kind={CLASSIFIER!r}, "
                "which trains on no episodes"
            )

    def _check_adaptive(self, adaptive: AdaptiveConfig) -> None:
        """Refuses what a run that chooses on the way cannot have, or needs."""
        kind, options = self.learner.kind, list(adaptive.options.values())
        if kind in CLOSED_FORM:
            raise ValueError(
                f"adaptive is for runs of gradient steps, got learner.kind={kind!r}"
            )
        if self.evaluation is not None and self.evaluation.without_noise:
            raise ValueError(
                "evaluation.without_noise must be false with adaptive: without noise "
                "the run would choose otherwise"
            )
        if adaptive.has_quotas and self.num_steps is None:
            raise ValueError("num_steps must be given with adaptive quotas, got None")
        if adaptive.has_quotas and options[0].most is not None:
            most = sum(option.most or 0 for option in options)
            if most != self.num_steps:
                raise ValueError(
                    f"num_steps must be that of all options together, {most}, got "
                    f"{self.num_steps}"
                )
        if self.start is not None and self.num_steps is None:
            raise ValueError("num_steps must be given with start, got None")
        if not adaptive.has_quotas and self.epsilon == float("inf"):
            raise ValueError("epsilon must be finite with adaptive prices, got inf")

    def _check_parts(self) -> None:
        """Refuses a part of the run that is none of its specs, such as a list."""
        for name, classes in self.nested_specs.items():
            part = getattr(self, name)
            if part is None and name in _OPTIONAL:
                continue
            if not isinstance(part, classes):
                names = " or ".join(cls.__name__ for cls in classes)
                shown = _validation.shown(part)
                raise TypeError(f"{name} must be a {names}, got {shown}")

    @classmethod
    def from_dict(cls, mapping: Any, *, where: str | None = None) -> Self:
        """Returns the run that ``mapping`` describes; see `spec_from_dict`.

        Types that cannot be other than they are may be left out.
        """
        return super().from_dict(_with_types(cls, mapping), where=where)


def _with_types(cls: type[Spec], mapping: Any) -> Any:
    """A spec's tables with the types that cannot be other than they are."""
    if not isinstance(mapping, Mapping):
        return mapping
    filled = dict(mapping)
    for name, (kind, *others) in cls.nested_specs.items():
        table = filled.get(name)
        if others or not isinstance(table, Mapping):
            continue
        if kind is OptionConfig:  # a table of them
            made: Any = {key: _typed(kind, one) for key, one in table.items()}
        else:
            made = _typed(kind, _with_types(kind, table))
        filled[name] = made
    return filled


def _typed(cls: type, table: Any) -> Any:
    return {"type": cls.__name__, **table} if isinstance(table, Mapping) else table


def read_config(path: Path) -> TrainingConfig:
    """Returns the run in a TOML file, fully validated; no data is read yet.

    Paths in it are relative to the file.

    Raises:
      OSError: a file that cannot be read.
      TypeError: something of the wrong type.
      ValueError: not UTF-8, not TOML, an unknown or missing key, a value out of range.
      NotImplementedError: a combination that no theorem covers.
    """
    mapping = read_toml(path)
    return TrainingConfig.from_dict(
        {"type": TrainingConfig.__name__, **mapping}, where="config"
    )
