"""A training run as a TOML file: the schema, and how it becomes a `Trainer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import numpy as np
import optax
from flax import nnx

from jaxdp_episodic import _validation
from jaxdp_episodic.data.sources import SOURCES, DataSource
from jaxdp_episodic.describe.spec import Spec
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.training import models
from jaxdp_episodic.training.learners import ANIL, MAML, ProtoNet
from jaxdp_episodic.training.private_gradient import NOISES, checked_setting
from jaxdp_episodic.training.step_config import StepConfig

_LOSSES = ("cross_entropy", "squared_error")
_OPTIMIZERS = ("adam", "adamw", "sgd")
_SCHEDULES = ("constant", "cosine")
# What a stranger's config may make of a network, and of an episode's inner loop.
_MOST_LAYERS, _WIDEST = 64, 2**14
_MOST_INNER_STEPS, _MOST_EPISODES = 10_000, 10**7
_LARGEST_SEED = 2**31 - 1


@dataclass(frozen=True, eq=False, kw_only=True)
class LearnerConfig(Spec):
    """What an episode teaches, and how.

    Attributes:
      kind: "protonet", "maml" or "anil".
      shots: support examples, of each class or of the task.
      inner_steps: gradient steps on the support set (not for ProtoNet).
      inner_learning_rate: of these steps.
      first_order: do not differentiate through the inner steps' gradients.
      checkpoint: recompute the inner steps in the backward pass: less memory, more
        time.
      loss: "cross_entropy" (classification) or "squared_error" (regression).
      head: of "anil": top-level key of the parameters that are adapted.
    """

    kind: str
    shots: int
    inner_steps: int = 3
    inner_learning_rate: float = 0.1
    first_order: bool = False
    checkpoint: bool = False
    loss: str = "cross_entropy"
    head: str = "head"

    def __post_init__(self) -> None:
        _validation.choice("kind", self.kind, ("protonet", "maml", "anil"))
        _validation.choice("loss", self.loss, _LOSSES)
        _whole(self, "shots")
        _whole(self, "inner_steps", maximum=_MOST_INNER_STEPS)
        _positive(self, "inner_learning_rate")
        _flags(self, "first_order", "checkpoint")
        if not isinstance(self.head, str):
            raise TypeError(f"head must be a string, got {self.head!r}")
        if self.kind == "protonet" and self.loss != "cross_entropy":
            raise ValueError("loss must be 'cross_entropy' with kind='protonet'")

    @property
    def is_regression(self) -> bool:
        """True if the targets are numbers."""
        return self.loss == "squared_error"

    def learner(self, apply: Any, ways: int | None) -> Any:
        """Returns the learner for a model's ``apply(params, inputs)``."""
        if self.kind == "protonet":
            return ProtoNet(apply, ways=int(ways or 1))
        inner = {
            "inner_steps": self.inner_steps,
            "inner_learning_rate": self.inner_learning_rate,
            "first_order": self.first_order,
            "checkpoint": self.checkpoint,
            "task_loss": self.loss,
        }
        if self.kind == "maml":
            return MAML(apply, **inner)
        return ANIL(apply, head=self.head, **inner)


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelConfig(Spec):
    """The network.

    Attributes:
      kind: "conv_embedding" (for ProtoNet), "conv_classifier" or "mlp".
      channels: of each convolution (stride 2 each), or units of each hidden layer.
      embedding: size of the embedding; only of "conv_embedding".
      seed: of the initial parameters, which are public.
    """

    kind: str
    channels: tuple[int, ...] = (16, 32, 32)
    embedding: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        kinds = ("conv_embedding", "conv_classifier", "mlp")
        _validation.choice("kind", self.kind, kinds)
        channels = _validation.integer_array("channels", self.channels, minimum=1)
        if channels.ndim != 1 or not 1 <= channels.size <= _MOST_LAYERS:
            raise ValueError(
                f"channels must be a list of 1 to {_MOST_LAYERS} numbers, got "
                f"{_validation.shown(self.channels)}"
            )
        object.__setattr__(self, "channels", tuple(channels.tolist()))
        _whole(self, "embedding")
        if max(*self.channels, self.embedding) > _WIDEST:
            raise ValueError(
                f"channels and embedding must be at most {_WIDEST}, got "
                f"{self.channels} and {self.embedding}"
            )
        _whole(self, "seed", minimum=0, maximum=_LARGEST_SEED)

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> Any:
        """Returns the NNX module for inputs of this shape (without a batch axis)."""
        rngs = nnx.Rngs(self.seed)
        if self.kind == "mlp":
            size = int(np.prod(input_shape))
            return models.MLP(size, self.channels, num_outputs, rngs=rngs)
        if len(input_shape) != 3:
            raise ValueError(
                f"kind={self.kind!r} needs images (height, width, channels), "
                f"got features of shape {input_shape}"
            )
        outputs = self.embedding if self.kind == "conv_embedding" else num_outputs
        return models.ConvNet(input_shape, self.channels, outputs, rngs=rngs)


@dataclass(frozen=True, eq=False, kw_only=True)
class OptimizerConfig(Spec):
    """The optimizer of the outer loop, which sees noised gradients only.

    Attributes:
      kind: "adam", "adamw" or "sgd" (with momentum 0.9).
      learning_rate: its start.
      schedule: "constant" or "cosine" (down to zero at the last step).
      warmup_steps: linear warm-up.
      weight_decay: of "adamw".
    """

    kind: str = "adam"
    learning_rate: float = 2e-3
    schedule: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        _validation.choice("kind", self.kind, _OPTIMIZERS)
        _validation.choice("schedule", self.schedule, _SCHEDULES)
        _positive(self, "learning_rate")
        _whole(self, "warmup_steps", minimum=0)
        decay = _validation.nonnegative_array("weight_decay", self.weight_decay)
        if decay.ndim or not np.isfinite(decay):
            raise ValueError(
                f"weight_decay must be a finite number, got {self.weight_decay!r}"
            )
        object.__setattr__(self, "weight_decay", float(decay))

    def build(self, num_steps: int) -> optax.GradientTransformation:
        """Returns the optax optimizer of a run of that many steps."""
        peak, warmup = self.learning_rate, min(self.warmup_steps, num_steps - 1)
        if self.schedule == "cosine":
            later = optax.cosine_decay_schedule(peak, max(num_steps - warmup, 1))
        else:
            later = optax.constant_schedule(peak)
        schedule = later
        if warmup:
            rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
            schedule = optax.join_schedules([rise, later], [warmup])
        if self.kind == "sgd":
            return optax.sgd(schedule, momentum=0.9)
        if self.kind == "adamw":
            return optax.adamw(schedule, weight_decay=self.weight_decay)
        return optax.adam(schedule)


@dataclass(frozen=True, eq=False, kw_only=True)
class EvaluationConfig(Spec):
    """How the model is judged on held-out tasks.

    Attributes:
      splits: names of the held-out parts of the data, e.g. ("validation",).
      queries: query examples, of each class or of the task.
      num_episodes: episodes, at least 2; 600 is the custom of the field.
      every: steps between evaluations; None: at the two ends only.
    """

    splits: tuple[str, ...] = ("validation",)
    queries: int = 5
    num_episodes: int = 600
    every: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.splits, list | tuple) or not all(
            isinstance(name, str) for name in self.splits
        ):
            shown = _validation.shown(self.splits)
            raise TypeError(f"splits must be a list of names, got {shown}")
        object.__setattr__(self, "splits", tuple(self.splits))
        _whole(self, "queries")
        _whole(self, "num_episodes", minimum=2, maximum=_MOST_EPISODES)
        if self.every is not None:
            _whole(self, "every")


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
      learner: what an episode teaches, and how.
      model: the network.
      optimizer: of the outer loop.
      l2_clip_norm: bound of each clip unit's gradient.
      normalizer: public divisor of the noised sum; see `Trainer`.
      block_size: clip units worked off in one go; see `Trainer`.
      evaluation: on held-out data; None: none.
      checkpoint_every: steps between checkpoints.
      noise: "gaussian", or "discrete"; see `Trainer`.
      seed: None: the operating system's entropy. A number is *not private*.
    """

    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "data": SOURCES,
        "step": (StepConfig,),
        "learner": (LearnerConfig,),
        "model": (ModelConfig,),
        "optimizer": (OptimizerConfig,),
        "evaluation": (EvaluationConfig,),
    }

    data: DataSource
    step: StepConfig
    epsilon: float
    delta: float
    learner: LearnerConfig
    model: ModelConfig
    l2_clip_norm: float
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    num_steps: int | None = None
    normalizer: float | None = None
    block_size: int | None = None
    evaluation: EvaluationConfig | None = None
    checkpoint_every: int = 100
    noise: str = "gaussian"
    seed: int | None = None

    def __post_init__(self) -> None:
        _validation.choice("noise", self.noise, NOISES)
        for name in ("l2_clip_norm", "normalizer"):
            value = getattr(self, name)
            if value is not None or name == "l2_clip_norm":
                object.__setattr__(self, name, checked_setting(name, value))
        _whole(self, "checkpoint_every")
        for name in ("num_steps", "block_size", "seed"):
            if getattr(self, name) is not None:
                _whole(self, name, minimum=0 if name == "seed" else 1)
        if _validation.open_unit_array("delta", self.delta).ndim:
            raise ValueError(f"delta must be a number, got {self.delta!r}")
        target = _validation.real_array("epsilon", self.epsilon)
        if target.ndim or not target > 0:
            raise ValueError(
                f"epsilon must be > 0 and one number, got {self.epsilon!r}"
            )
        self._check_parts()
        self._check_model()
        if (self.num_steps is None) == (self.step.noise_multiplier is None):
            given = "neither" if self.num_steps is None else "both"
            raise ValueError(
                "give exactly one of num_steps (the noise is calibrated) and "
                f"step.noise_multiplier (the steps are), got {given}"
            )

    def _check_parts(self) -> None:
        """Refuses a part of the run that is none of its specs, such as a list."""
        for name, classes in self.nested_specs.items():
            part = getattr(self, name)
            if part is None and name == "evaluation":
                continue
            if not isinstance(part, classes):
                names = " or ".join(cls.__name__ for cls in classes)
                shown = _validation.shown(part)
                raise TypeError(f"{name} must be a {names}, got {shown}")

    def _check_model(self) -> None:
        """Refuses a network whose outputs are not what the learner takes them for."""
        learner, model = self.learner.kind, self.model.kind
        embeds = learner == "protonet"
        if model == ("conv_classifier" if embeds else "conv_embedding"):
            others = ("conv_embedding" if embeds else "conv_classifier", "mlp")
            raise ValueError(
                f"model.kind must be one of {others} with learner.kind={learner!r}, "
                f"got {model!r}"
            )

    @classmethod
    def from_dict(cls, mapping: Any, *, where: str | None = None) -> Self:
        """Returns the run that ``mapping`` describes; see `spec_from_dict`.

        Types that cannot be other than they are may be left out.
        """
        if isinstance(mapping, Mapping):
            mapping = dict(mapping)
            for name, classes in cls.nested_specs.items():
                table = mapping.get(name)
                if len(classes) == 1 and isinstance(table, Mapping):
                    mapping[name] = {"type": classes[0].__name__, **table}
        return super().from_dict(mapping, where=where)


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


def built_model(
    config: TrainingConfig, input_shape: tuple[int, ...], ways: int | None
) -> tuple[Any, Any]:
    """Returns ``(learner, params)`` of a config; ``ways`` is None for regression."""
    module = config.model.build(input_shape, 1 if ways is None else ways)
    apply, params = models.split_model(module)
    return config.learner.learner(apply, ways), params


def num_parameters(params: Any) -> int:
    """Returns how many numbers the parameters are."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _whole(
    spec: Any, *names: str, minimum: int = 1, maximum: int | None = None
) -> None:
    for name in names:
        value = getattr(spec, name)
        array = _validation.integer_array(name, value, minimum=minimum)
        if array.ndim:
            raise ValueError(f"{name} must be a number, got {_validation.shown(value)}")
        if maximum is not None and array > maximum:
            raise ValueError(f"{name} must be at most {maximum:,}, got {value!r}")
        object.__setattr__(spec, name, int(array))


def _positive(spec: Any, name: str) -> None:
    value = getattr(spec, name)
    array = _validation.positive_array(name, value)
    if array.ndim:
        raise ValueError(f"{name} must be a number, got {value!r}")
    object.__setattr__(spec, name, float(array))


def _flags(spec: Any, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(spec, name), bool):
            raise TypeError(
                f"{name} must be true or false, got {getattr(spec, name)!r}"
            )
