"""The parts of a training config that say what trains: no arrays, no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import GroupedClasses
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
BAYES = "bayes"
CLOSED_FORM = (PLDA, MIXED)  # private statistics alone, without gradient steps
PROTONET = "protonet"
CLASSIFIER = "classifier"
PROTOTYPES = (PROTONET, PLDA, CLASSIFIER)  # tell any number of classes apart
LEARNERS = (PROTONET, "maml", "anil", CLASSIFIER, BAYES, *CLOSED_FORM)
_LOSS_OF = {
    **dict.fromkeys(PROTOTYPES, CROSS_ENTROPY),
    **dict.fromkeys((MIXED, BAYES), SQUARED_ERROR),
}
LOGITS = "logits"
HIDDEN = "features"
BOTH = "both"
EMBEDS = (BOTH, LOGITS, HIDDEN)

CONV_EMBEDDING = "conv_embedding"
LINEAR = "linear"
CONV_CLASSIFIER = "conv_classifier"
MLP_KIND = "mlp"
EMBEDDINGS = (CONV_EMBEDDING, LINEAR)
MODELS = (*EMBEDDINGS, CONV_CLASSIFIER, MLP_KIND)

# Episodes a step below which a linear map had better keep its inputs. Measured: with 3
# they save 0.04 to 0.06 (texts); with 360 they cost 0.02 to 0.03 (glyphs).
_FEW_EPISODES = 30

# Limits of what an untrusted config may ask for.
MOST_INNER_STEPS = 10_000  # of an episode
_MOST_LAYERS = 64
MOST_UNITS = 2**14  # of a layer
_LARGEST_SEED = 2**31 - 1  # of NNX

_OPTIMIZERS = ("adam", "adamw", "sgd")
_SCHEDULES = ("constant", "cosine")

FIXED = "fixed"
QUANTILE = "quantile"
NORMALIZE = "normalize"
CLIPPINGS = (FIXED, QUANTILE, NORMALIZE)
# Of a clip norm that follows a quantile, by default in units of the one it begins with.
_LOWEST = 1e-3
_HIGHEST = 1e3
# Range of its bounds: within that of any clip norm, rounded to float32 or not.
_LEAST_NORM = 1e-12
_MOST_NORM = 1e12
# Range of the count's noise. Below it, the gradient's noise grows by more than twice;
# above, there were few of the grid's steps left to count in (60 at the end).
_LEAST_COUNT_NOISE = 0.3
_MOST_COUNT_NOISE = 500.0


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
      kind: "protonet", "maml", "anil"; "bayes" (see `BayesianRegression`);
        "classifier", of the training classes, whose list is public; "plda", "mixed":
        private statistics alone.
      shots: support examples, of each class or of the task; of "classifier", which
        draws no support, in evaluation.
      distance: of "protonet" and "classifier": "euclidean" or "cosine".
      embed: of "classifier": what held-out classes are told apart by, its "logits",
        its "features", which the last layer sees, or "both".
      temperature: of "protonet": factor of the logits.
      resplits: of "protonet": train on every example as support.
      inner_steps: gradient steps on the support set (not for ProtoNet).
      inner_learning_rate: of these steps.
      first_order: do not differentiate through the inner steps' gradients.
      checkpoint: recompute the inner steps in the backward pass: less memory, more
        time.
      loss: "cross_entropy" (classification) or "squared_error" (regression).
      head: of "anil": top-level key of the parameters that are adapted.
      rank: of "bayes", as the rest: directions in which tasks differ most.
      prior_scale: first standard deviation of a task's weights.
      noise_scale: first standard deviation of a target around its task's line.
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"kind": LEARNERS}

    kind: str
    shots: int
    distance: str = EUCLIDEAN
    embed: str = BOTH
    temperature: float = 1.0
    resplits: bool = False
    inner_steps: int = 3
    inner_learning_rate: float = 0.1
    first_order: bool = False
    checkpoint: bool = False
    loss: str = CROSS_ENTROPY
    head: str = "head"
    rank: int = 3
    prior_scale: float = 1.0
    noise_scale: float = 1.0

    def __post_init__(self) -> None:
        _validation.choice("kind", self.kind, LEARNERS)
        _validation.choice("loss", self.loss, LOSSES)
        set_whole_numbers(self, "shots")
        _validation.choice("distance", self.distance, DISTANCES)
        _validation.choice("embed", self.embed, EMBEDS)
        set_whole_numbers(self, "inner_steps", maximum=MOST_INNER_STEPS)
        set_whole_numbers(self, "rank", maximum=MOST_UNITS)
        set_positive(self, "inner_learning_rate", "temperature")
        set_positive(self, "prior_scale", "noise_scale")
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
      kind: "conv_embedding" or "linear" (for ProtoNet), "conv_classifier" or "mlp"; a
        classifier takes any of the last three.
      channels: of each convolution (stride 2 each), or units of each hidden layer.
      embedding: outputs for prototypes, or for the lines of "bayes"; a classifier has
        one for each class.
      skip: of "linear" with prototypes: what they are taken of are the inputs, too,
        beside the outputs, so that nothing is lost where nothing is learned. None:
        where grouped classes make fewer than 30 episodes a step.
      seed: of the initial parameters, which are public.
    """

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"kind": MODELS}

    kind: str
    channels: tuple[int, ...] = (16, 32, 32)
    embedding: int = 32
    skip: bool | None = None
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
        if self.skip is not None:
            check_flags(self, "skip")
        if max(*self.channels, self.embedding) > MOST_UNITS:
            raise ValueError(
                f"channels and embedding must be at most {MOST_UNITS}, got "
                f"{self.channels} and {self.embedding}"
            )
        set_whole_numbers(self, "seed", minimum=0, maximum=_LARGEST_SEED)

    def skips(self, sampling: Any) -> bool:
        """Returns ``skip``, or what it is by default: of public numbers alone."""
        if self.skip is not None or not isinstance(sampling, GroupedClasses):
            return bool(self.skip)
        episodes = np.asarray(sampling.num_classes) // np.asarray(sampling.ways)
        return bool(episodes < _FEW_EPISODES)


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


@dataclass(frozen=True, eq=False, kw_only=True)
class ClippingConfig(Spec):
    """What is made of contributions by the clip norm C, and what C is.

    Epsilon is the same for all kinds, under every relation: a contribution is at most C
    long. Of "quantile" each step also releases, with noise, how many contributions were
    at most C long, and the next step has ``C exp(-rate (share - quantile))``.

    Attributes:
      kind: "fixed": longer contributions are scaled down to C, which stays as it is;
        "quantile": C follows a quantile of the contributions' norms; "normalize": all
        are scaled to norm C, up or down, and only zero stays zero.
      quantile: of "quantile", as the rest: the share of contributions, in (0, 1), that
        are to be at most C long.
      rate: > 0, at most 10; how fast C follows.
      count_noise: r: the count has r times the gradient's noise multiplier. Joined to
        it, the gradient needs sqrt(1 + 1 / (4 r^2)) times the noise: 0.12 % more for
        10. In [0.3, 500].
      minimum: least C. None: 1/1,000 of the first.
      maximum: greatest C. None: 1,000 times the first.

    Reference:
      Andrew, Thakkar, McMahan, Ramaswamy (2021). Differentially private learning with
      adaptive clipping. arXiv:1905.03871, Theorem 1.
    """

    kind: str = QUANTILE
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float = 10.0
    minimum: float | None = None
    maximum: float | None = None

    def __post_init__(self) -> None:
        _validation.choice("kind", self.kind, CLIPPINGS)
        _set_in(self, "quantile", 0.0, 1.0, is_open=True)
        _set_in(self, "rate", 0.0, 10.0)
        if not self.rate:
            raise ValueError(f"rate must be > 0, got {self.rate!r}")
        _set_in(self, "count_noise", _LEAST_COUNT_NOISE, _MOST_COUNT_NOISE)
        for name in ("minimum", "maximum"):
            if getattr(self, name) is not None:
                _set_in(self, name, _LEAST_NORM, _MOST_NORM)

    @property
    def counts(self) -> bool:
        """True if each step releases how many contributions were short."""
        return self.kind == QUANTILE

    def bounds(self, l2_clip_norm: float) -> tuple[float, float]:
        """Returns the least and the greatest C of a run that begins with this one.

        Raises:
          ValueError: it is not between them.
        """
        if not self.counts:
            return l2_clip_norm, l2_clip_norm
        low, high = self.minimum, self.maximum
        low = max(_LOWEST * l2_clip_norm, _LEAST_NORM) if low is None else low
        high = min(_HIGHEST * l2_clip_norm, _MOST_NORM) if high is None else high
        if not low <= l2_clip_norm <= high:
            raise ValueError(
                f"l2_clip_norm must lie in [{low:g}, {high:g}], between minimum and "
                f"maximum of its clipping, got {l2_clip_norm:g}"
            )
        return low, high


def _set_in(
    spec: Spec, name: str, low: float, high: float, *, is_open: bool = False
) -> None:
    """Checks a field of a frozen spec: one number in a range, with its ends or not."""
    value = getattr(spec, name)
    number = _validation.single(name, _validation.real_array(name, value))
    if not low <= number <= high or (is_open and number in (low, high)):
        ends = f"({low:g}, {high:g})" if is_open else f"[{low:g}, {high:g}]"
        raise ValueError(f"{name} must lie in {ends}, got {value!r}")
    object.__setattr__(spec, name, float(number))


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
