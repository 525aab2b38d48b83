"""The parts of a training config that say what trains: no arrays, no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.people import BOUNDS, PersonBounds
from jaxdp_episodic.accountant.describe.spec import (
    Spec,
    check_flags,
    set_positive,
    set_whole_numbers,
)

CROSS_ENTROPY = "cross_entropy"
SQUARED_ERROR = "squared_error"
LOSSES = (CROSS_ENTROPY, SQUARED_ERROR)
EUCLIDEAN = "euclidean"
COSINE = "cosine"
DISTANCES = (EUCLIDEAN, COSINE)
PLDA = "plda"
MIXED = "mixed"
CLOSED_FORM = (PLDA, MIXED)  # private statistics alone, without gradient steps
LEARNERS = ("protonet", "maml", "anil", *CLOSED_FORM)
_LOSS_OF = {"protonet": CROSS_ENTROPY, PLDA: CROSS_ENTROPY, MIXED: SQUARED_ERROR}

CONV_EMBEDDING = "conv_embedding"
LINEAR = "linear"
CONV_CLASSIFIER = "conv_classifier"
MLP_KIND = "mlp"
EMBEDDINGS = (CONV_EMBEDDING, LINEAR)
MODELS = (*EMBEDDINGS, CONV_CLASSIFIER, MLP_KIND)

NONE = "none"
WAVELETS = "wavelets"
FEATURES = (NONE, WAVELETS)
# Features of a channel: 16 Gabor filters and the image, 5 x 5 coefficients of each.
NUM_WAVELETS = 425

# Limits of what an untrusted config may ask for.
_MOST_INNER_STEPS = 10_000  # of an episode
_MOST_LAYERS = 64
_MOST_UNITS = 2**14  # of a layer
_LARGEST_SEED = 2**31 - 1  # of NNX

_OPTIMIZERS = ("adam", "adamw", "sgd")
_SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True, eq=False, kw_only=True)
class PeopleConfig(Spec):
    """Public bounds of what one person owns, and what becomes of more.

    Attributes:
      examples: as of `PersonBounds`, like the next two.
      classes: of a person.
      tasks: of a person.
      truncate: leave out what people own beyond the bounds; false: it is an error.
    """

    examples: int | None = None
    classes: int | None = None
    tasks: int | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_flags(self, "truncate")
        for name in BOUNDS:
            if getattr(self, name) is not None:
                set_whole_numbers(self, name)
        _ = self.bounds  # refuses none at all

    @property
    def bounds(self) -> PersonBounds:
        """The bounds, for a step and for `truncated`."""
        return PersonBounds(**{name: getattr(self, name) for name in BOUNDS})


@dataclass(frozen=True, eq=False, kw_only=True)
class LearnerConfig(Spec):
    """What an episode teaches, and how.

    Attributes:
      kind: "protonet", "maml", "anil"; "plda", "mixed": private statistics alone.
      shots: support examples, of each class or of the task.
      distance: of "protonet": "euclidean" or "cosine".
      temperature: of "protonet": factor of the logits.
      resplits: of "protonet": train on every example as support.
      inner_steps: gradient steps on the support set (not for ProtoNet).
      inner_learning_rate: of these steps.
      first_order: do not differentiate through the inner steps' gradients.
      checkpoint: recompute the inner steps in the backward pass: less memory, more
        time.
      loss: "cross_entropy" (classification) or "squared_error" (regression).
      head: of "anil": top-level key of the parameters that are adapted.
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"kind": LEARNERS}

    kind: str
    shots: int
    distance: str = EUCLIDEAN
    temperature: float = 1.0
    resplits: bool = False
    inner_steps: int = 3
    inner_learning_rate: float = 0.1
    first_order: bool = False
    checkpoint: bool = False
    loss: str = CROSS_ENTROPY
    head: str = "head"

    def __post_init__(self) -> None:
        _validation.choice("kind", self.kind, LEARNERS)
        _validation.choice("loss", self.loss, LOSSES)
        set_whole_numbers(self, "shots")
        _validation.choice("distance", self.distance, DISTANCES)
        set_whole_numbers(self, "inner_steps", maximum=_MOST_INNER_STEPS)
        set_positive(self, "inner_learning_rate", "temperature")
        check_flags(self, "first_order", "checkpoint", "resplits")
        if not isinstance(self.head, str):
            raise TypeError(f"head must be a string, got {self.head!r}")
        loss = _LOSS_OF.get(self.kind, self.loss)
        if self.loss != loss:
            raise ValueError(f"loss must be {loss!r} with kind={self.kind!r}")

    @property
    def is_regression(self) -> bool:
        """True if the targets are numbers."""
        return self.loss == SQUARED_ERROR


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelConfig(Spec):
    """The network.

    Attributes:
      kind: "conv_embedding" or "linear" (for ProtoNet), "conv_classifier" or "mlp".
      channels: of each convolution (stride 2 each), or units of each hidden layer.
      embedding: size of the embedding, of "conv_embedding" and "linear".
      seed: of the initial parameters, which are public.
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"kind": MODELS}

    kind: str
    channels: tuple[int, ...] = (16, 32, 32)
    embedding: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        _validation.choice("kind", self.kind, MODELS)
        channels = _validation.integer_array("channels", self.channels, minimum=1)
        if channels.ndim != 1 or not 1 <= channels.size <= _MOST_LAYERS:
            raise ValueError(
                f"channels must be a list of 1 to {_MOST_LAYERS} numbers, got "
                f"{_validation.shown(self.channels)}"
            )
        object.__setattr__(self, "channels", tuple(channels.tolist()))
        set_whole_numbers(self, "embedding")
        if max(*self.channels, self.embedding) > _MOST_UNITS:
            raise ValueError(
                f"channels and embedding must be at most {_MOST_UNITS}, got "
                f"{self.channels} and {self.embedding}"
            )
        set_whole_numbers(self, "seed", minimum=0, maximum=_LARGEST_SEED)


@dataclass(frozen=True, eq=False, kw_only=True)
class FeaturesConfig(Spec):
    """Fixed features of the examples; see `FixedFeatures`.

    Attributes:
      kind: "none" (the examples as they are) or "wavelets" (of images).
      cache: folder for the features of each split; they are as private as the data.
        None: ``features`` in the run's folder.
    """

    kind: str = NONE
    cache: str | None = None

    def __post_init__(self) -> None:
        _validation.choice("kind", self.kind, FEATURES)
        if self.cache is not None and (
            not isinstance(self.cache, str) or not self.cache or "\0" in self.cache
        ):
            raise TypeError(f"cache must be a non-empty string, got {self.cache!r}")


@dataclass(frozen=True, eq=False, kw_only=True)
class OptimizerConfig(Spec):
    """The optimizer of the outer loop, which sees noised gradients only.

    Attributes:
      kind: "adam", "adamw" or "sgd" (with momentum 0.9).
      learning_rate: its start.
      schedule: "constant" or "cosine" (down to zero at the last step).
      warmup_steps: linear warm-up.
      weight_decay: of "adamw".
      ema: decay of the average of the parameters that is evaluated and released, in
        [0, 1); None: the last parameters are. See `averaged`.
      noise_floor: of "adam": subtracts the noise's variance from the second moments, of
        which at least this multiple of it remains; None: subtracts nothing. See
        `noise_corrected_adam`.
    """

    kind: str = "adam"
    learning_rate: float = 2e-3
    schedule: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 1e-4
    ema: float | None = None
    noise_floor: float | None = None

    def __post_init__(self) -> None:
        _validation.choice("kind", self.kind, _OPTIMIZERS)
        _validation.choice("schedule", self.schedule, _SCHEDULES)
        set_positive(self, "learning_rate")
        set_whole_numbers(self, "warmup_steps", minimum=0)
        decay = _validation.nonnegative_array("weight_decay", self.weight_decay)
        if decay.ndim or not np.isfinite(decay):
            raise ValueError(
                f"weight_decay must be a finite number, got {self.weight_decay!r}"
            )
        object.__setattr__(self, "weight_decay", float(decay))
        if self.ema is not None:
            object.__setattr__(self, "ema", checked_decay(self.ema))
        if self.noise_floor is not None:
            set_positive(self, "noise_floor")
            if self.kind != "adam":
                raise ValueError(
                    f"noise_floor goes with kind='adam' only, got kind={self.kind!r}"
                )


def checked_decay(decay: Any) -> float:
    """Returns a decay of an average.

    Raises:
      TypeError: no number.
      ValueError: not one in [0, 1).
    """
    value = _validation.probability_array("ema", decay)
    if value.ndim or not value < 1:
        raise ValueError(f"ema must lie in [0, 1), got {decay!r}")
    return float(value)
