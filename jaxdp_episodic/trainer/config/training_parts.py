"""The parts of a training config, and the steps of its private statistics: no JAX."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    OWNED,
    PERSON,
    GroupedClasses,
    MultistageSampling,
    Poisson,
)
from jaxdp_episodic.accountant.describe.population import BOUNDS, PersonBounds
from jaxdp_episodic.accountant.describe.spec import AT_LEAST_ONE
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.trainer.data.fields import (
    CheckedSpec,
    Count,
    Flag,
    Natural,
    Positive,
    Text,
    listed,
    numbers,
    one_of,
    set_fields,
    whole,
    within,
)
from jaxdp_episodic.trainer.data.scales import CHECKS

CROSS_ENTROPY = "cross_entropy"
SQUARED_ERROR = "squared_error"
LOSSES = (CROSS_ENTROPY, SQUARED_ERROR)
EUCLIDEAN = "euclidean"
COSINE = "cosine"
DISTANCES = (EUCLIDEAN, COSINE)
PLDA = "plda"
MIXED = "mixed"
BAYES = "bayes"
CLOSED_FORM = (PLDA, MIXED)  # private statistics only, without gradient steps
PROTONET = "protonet"
CLASSIFIER = "classifier"
PROTOTYPES = (PROTONET, PLDA, CLASSIFIER)  # predict among any number of classes
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
ALL = "all"
FILM = "film"
LORA = "lora"
HEAD = "head"
TRAINED = (ALL, FILM, LORA, HEAD)

# With fewer episodes a step a linear map keeps its inputs beside its outputs. Measured
# accuracy: +0.04 to +0.06 with 3 (texts), -0.02 to -0.03 with 360 (glyphs).
_FEW_EPISODES = 30

# Limits of what an untrusted config may ask for.
MOST_INNER_STEPS = 10_000  # of an episode
_MOST_LAYERS = 64
MOST_UNITS = 2**14  # of a layer
_LARGEST_SEED = 2**31 - 1  # that NNX takes
_MOST_EPISODES = 10**7  # of an evaluation
_MOST_PIXELS = 2048  # of a side
_MOST_PARTS = 64  # of a side

DISCRETE = "discrete"
GAUSSIAN = "gaussian"
NOISES = (DISCRETE, GAUSSIAN)
"""Noise of a sum: discrete Gaussian (hardened), or float64 Gaussian."""
BANDED = "banded"
AUTO = "auto"

FIXED = "fixed"
QUANTILE = "quantile"
NORMALIZE = "normalize"
# Default bounds of a clip norm that follows a quantile, in units of the first one.
_LOWEST = 1e-3
_HIGHEST = 1e3
# Range of these bounds: every value in it is a valid float32 clip norm.
_LEAST_NORM = 1e-12
_MOST_NORM = 1e12

NONE = "none"
WAVELETS = "wavelets"
ONNX = "onnx"
SCALED = "scaled"
FEATURES = (NONE, WAVELETS, ONNX, SCALED)
# Features of a channel: 5 x 5 coefficients of the image and of 16 Gabor filters.
NUM_WAVELETS = 425
LEAST_SIDE = 8  # pixels of an image for wavelets
RGB = "rgb"
BGR = "bgr"
GREY = "grey"
NUM_CHANNELS = {RGB: 3, BGR: 3, GREY: 1}
MEAN = "mean"
MAX = "max"
# Default settings of a network; None: see `FeaturesConfig`.
_OF_NETWORKS: dict[str, Any] = {
    **{"path": None, "output": None, "size": None, "channels": RGB},
    **{"channels_last": False, "mean": 0.0, "std": 1.0, "pool": MEAN, "grid": 1},
}

checked_decay = functools.partial(within(0.0, 1.0, "[)"), "ema")
"""Returns the decay of an average; ValueError unless it lies in [0, 1)."""

Loss = Annotated[str, one_of(*LOSSES)]
Norm = Annotated[float, within(_LEAST_NORM, _MOST_NORM)]
Layers = functools.partial(
    numbers, most=_MOST_LAYERS, check=AT_LEAST_ONE, what="numbers"
)


def _bands(name: str, value: Any) -> int | str:
    if value == AUTO:
        return AUTO
    try:
        return _validation.whole_number(name, value, minimum=2)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be a whole number >= 2 or {AUTO!r}, got "
            f"{_validation.shown(value)}"
        ) from None


class NoiseConfig(CheckedSpec):
    """Correlated noise: the table form of ``noise``. See docs/correlated.md."""

    kind: Annotated[str, one_of(BANDED)] = BANDED
    # Number of groups of the units, and of steps that share noise; "auto": see
    # `choose_bands`.
    bands: Annotated[int | str, _bands] = AUTO
    groups: Text  # level whose units are grouped
    horizon: Annotated[float, within(1.0, math.inf)] = 30.0  # steps of memory
    law: Annotated[str, one_of(*NOISES)] = DISCRETE


def checked_noise(name: str, value: Any) -> str | NoiseConfig:
    """Returns the noise of a config: a word, or a table."""
    if isinstance(value, NoiseConfig):
        return value
    if value == BANDED:
        raise ValueError(
            f"{name} must be one of {NOISES}, or a table with kind={BANDED!r} and "
            f"groups, got {value!r}"
        )
    return _validation.choice(name, value, NOISES)


class PeopleConfig(CheckedSpec):
    """Public bounds of what one person owns; see `PersonBounds`."""

    examples: Count | None = None
    classes: Count | None = None
    tasks: Count | None = None
    truncate: Flag = True  # leaves out what exceeds them; false: that is an error

    def check_values(self) -> None:
        """Refuses bounds that bound nothing."""
        _ = self.bounds

    @property
    def bounds(self) -> PersonBounds:
        """The bounds, for a step and for `truncated`."""
        return PersonBounds(**{name: getattr(self, name) for name in BOUNDS})


class LearnerConfig(CheckedSpec):
    """What an episode teaches, and how; docs/training.md lists the keys."""

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"kind": LEARNERS}

    kind: Annotated[str, one_of(*LEARNERS)]
    shots: Count  # support examples, of each class or of the task
    # between prototypes and queries
    distance: Annotated[str, one_of(*DISTANCES)] = EUCLIDEAN
    # of "classifier": embedding by which other classes are told apart
    embed: Annotated[str, one_of(*EMBEDS)] = BOTH
    temperature: Positive = 1.0
    resplits: Flag = False  # of prototypes: every example is support in turn
    # of "maml" and "anil", on the support
    inner_steps: Annotated[int, whole(1, MOST_INNER_STEPS)] = 3
    inner_learning_rate: Positive = 0.1
    first_order: Flag = False  # no derivatives of the inner gradients
    checkpoint: Flag = False  # recomputes inner steps: less memory, more time
    loss: Loss = CROSS_ENTROPY
    # of "anil": key of the parameters that are adapted
    head: Text = "head"
    # of "bayes": number of directions in which tasks differ
    rank: Annotated[int, whole(1, MOST_UNITS)] = 3
    prior_scale: Positive = 1.0  # initial standard deviation of a task's weights
    # initial standard deviation of a target around its task's line
    noise_scale: Positive = 1.0

    def check_values(self) -> None:
        """Refuses another loss than the learner's."""
        loss = _LOSS_OF.get(self.kind, self.loss)
        if self.loss != loss:
            raise ValueError(f"loss must be {loss!r} with kind={self.kind!r}")

    @property
    def is_regression(self) -> bool:
        """True if the targets are numbers."""
        return self.loss == SQUARED_ERROR


class ModelConfig(CheckedSpec):
    """The network; docs/training.md lists the keys."""

    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"kind": MODELS}

    kind: Annotated[str, one_of(*MODELS)]
    # of each convolution (stride 2), or units of each hidden layer
    channels: Annotated[tuple[int, ...], Layers] = (16, 32, 32)
    # number of outputs; a classifier has one for each class instead
    embedding: Count = 32
    # of "linear": inputs beside the outputs; None: see `skips`
    skip: Flag | None = None
    # of the initial parameters, which are public
    seed: Annotated[int, whole(0, _LARGEST_SEED)] = 0
    # a release or a file of initial parameters, which are public
    parameters: Text | None = None
    train: Annotated[str, one_of(*TRAINED)] = ALL  # other parameters are constant
    rank: Annotated[int, whole(1, MOST_UNITS)] = 4  # of "lora"

    def check_values(self) -> None:
        """Refuses layers that are too large, and parts of a network that has none."""
        if self.train != ALL and self.kind == LINEAR:
            raise ValueError(
                f"train must be {ALL!r} with kind={LINEAR!r}, which has one layer, got "
                f"{self.train!r}"
            )
        if max(*self.channels, self.embedding) > MOST_UNITS:
            raise ValueError(
                f"channels and embedding must be at most {MOST_UNITS}, got "
                f"{self.channels} and {self.embedding}"
            )

    def described(self) -> dict[str, Any]:
        """Returns what the network is, without its initial and trained parameters."""
        beside = ("parameters", "train", "rank")
        return {k: v for k, v in self.to_dict().items() if k not in beside}

    def skips(self, sampling: Any) -> bool:
        """Returns ``skip``, or its default, which depends on public numbers only."""
        if self.skip is not None or not isinstance(sampling, GroupedClasses):
            return bool(self.skip)
        episodes = np.asarray(sampling.num_classes) // np.asarray(sampling.ways)
        return bool(episodes < _FEW_EPISODES)


class OptimizerConfig(CheckedSpec):
    """The optimizer of the outer loop, which sees noised gradients only."""

    # SGD has momentum 0.9
    kind: Annotated[str, one_of("adam", "adamw", "sgd")] = "adam"
    learning_rate: Positive = 2e-3
    # cosine: to zero at the last step
    schedule: Annotated[str, one_of("constant", "cosine")] = "constant"
    warmup_steps: Natural = 0  # of a linear warm-up
    weight_decay: Annotated[  # of "adamw"
        float, within(0.0, float("inf"), "[)", rule="be a finite number >= 0")
    ] = 1e-4
    # decay of the average that is released; None: the last parameters are released
    ema: Annotated[float, within(0.0, 1.0, "[)")] | None = None
    # of "adam": see `noise_corrected_adam`; None: no correction
    noise_floor: Positive | None = None

    def check_values(self) -> None:
        """Refuses a noise floor for an optimizer without one."""
        if self.noise_floor is not None and self.kind != "adam":
            raise ValueError(
                f"noise_floor goes with kind='adam' only, got kind={self.kind!r}"
            )


class ClippingConfig(CheckedSpec):
    """How contributions are bounded by the clip norm C, and how C changes.

    Epsilon is the same for all kinds, under every relation: a contribution has norm C
    at most. With "quantile" each step also releases, with noise, how many contributions
    had norm C or less, and the next step has ``C exp(-rate (share - quantile))``.

    Attributes:
      kind: "fixed": longer contributions are scaled down to C, which is constant;
        "quantile": C follows a quantile of the contributions' norms; "normalize": all
        are scaled to norm C, up or down, except zero.
      quantile: of "quantile", as the rest: in (0, 1), the share of contributions that
        should have norm C or less.
      rate: > 0, at most 10; how fast C follows.
      count_noise: r: the count has r times the gradient's noise multiplier. Together
        with the count, the gradient needs sqrt(1 + 1 / (4 r^2)) times the noise: 0.12 %
        more for 10. In [0.3, 500]: below, the gradient's noise would be twice as large;
        above, too few grid steps would be left for the count (60 at 500).
      minimum: smallest C. None: 1/1,000 of the first.
      maximum: largest C. None: 1,000 times the first.

    Reference:
      Andrew, Thakkar, McMahan, Ramaswamy (2021). Differentially private learning with
      adaptive clipping. arXiv:1905.03871, Theorem 1.
    """

    kind: Annotated[str, one_of(FIXED, QUANTILE, NORMALIZE)] = QUANTILE
    quantile: Annotated[float, within(0.0, 1.0, "()")] = 0.5
    rate: Annotated[float, within(0.0, 10.0, "(]")] = 0.2
    count_noise: Annotated[float, within(0.3, 500.0)] = 10.0
    minimum: Norm | None = None
    maximum: Norm | None = None

    @property
    def counts(self) -> bool:
        """True if each step releases the count of short contributions."""
        return self.kind == QUANTILE

    def bounds(self, l2_clip_norm: float) -> tuple[float, float]:
        """Returns the least and the greatest C of a run with this first C.

        Raises:
          ValueError: the first C is not between them.
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


class EvaluationConfig(CheckedSpec):
    """How the model is judged on held-out tasks."""

    # may be empty
    splits: Annotated[tuple[str, ...], functools.partial(listed, least=0)] = (
        "validation",
    )
    # of prototypes only; None: as in training, also for shots
    ways: Count | None = None
    shots: Count | None = None
    queries: Count = 5
    # 600 is customary in the field
    num_episodes: Annotated[int, whole(2, _MOST_EPISODES)] = 600
    # steps between evaluations; None: after the last step only
    every: Count | None = None
    # releases the best stage on "validation", else on the first split that is not
    # "test"; false: the last stage. None: true unless people are protected, as they may
    # be in both parts.
    select: Flag | None = None
    without_noise: Flag = False  # trains without noise too, for the report's picture
    # leaves out training examples that the held-out splits have too
    drop_duplicates: Flag = False


def _sides(name: str, value: Any) -> tuple[int, int]:
    """Height and width."""
    sides = _validation.integer_array(name, value, minimum=1)
    if sides.shape not in ((), (2,)) or sides.max() > _MOST_PIXELS:
        raise ValueError(
            f"{name} must be one number or [height, width], at most {_MOST_PIXELS}, "
            f"got {_validation.shown(value)}"
        )
    height, width = np.broadcast_to(sides, 2).tolist()
    return height, width


class FeaturesConfig(CheckedSpec):
    """Fixed features of the examples; docs/backbones.md lists the keys."""

    kind: Annotated[str, one_of(*FEATURES)] = NONE
    # folder of each split's features, as private as the data; None: the run's folder
    cache: Text | None = None
    path: Text | None = None  # of "onnx", as the rest: the file
    output: Text | None = None  # name of a value of the network; None: its first output
    # to which images are scaled; None: the file's, or their own
    size: Annotated[tuple[int, ...], _sides] | None = None
    channels: Annotated[str, one_of(*NUM_CHANNELS)] | None = None
    channels_last: Flag | None = None  # inputs are (1, H, W, C) instead of (1, C, H, W)
    # subtracted from pixels in [0, 1], for each channel or all; `std` then divides.
    # With "scaled" both are lists, with one number for each feature
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    pool: Annotated[str, one_of(MEAN, MAX, NONE)] | None = None  # over positions
    # parts of each axis that are pooled separately
    grid: Annotated[int, whole(1, _MOST_PARTS)] | None = None

    def check_values(self) -> None:
        """Checks the settings of a network, and fills in what is left out."""
        given = [name for name in _OF_NETWORKS if getattr(self, name) is not None]
        if self.kind != ONNX:
            own = CHECKS if self.kind == SCALED else {}
            if others := [name for name in given if name not in own]:
                raise ValueError(
                    f"{others[0]} is for kind={ONNX!r}, got it with kind={self.kind!r}"
                )
            set_fields(self, **{n: own[n](n, getattr(self, n)) for n in own})
            return
        if self.path is None:
            raise ValueError(f"path must be given with kind={ONNX!r}: an ONNX file")
        left_out = _OF_NETWORKS.keys() - given
        set_fields(self, **{name: _OF_NETWORKS[name] for name in left_out})
        if self.pool == NONE and self.grid != 1:
            raise ValueError(f"grid is for a pool other than {NONE!r}, got {self.grid}")
        channels = NUM_CHANNELS[str(self.channels)]
        for name in ("mean", "std"):  # one number for each channel
            value = getattr(self, name)
            found = _validation.real_array(name, value)
            if found.shape not in ((), (1,), (channels,)) or np.abs(found).max() > 1e6:
                raise ValueError(
                    f"{name} must be one number or {channels}, one a channel, in "
                    f"[-1e6, 1e6], got {_validation.shown(value)}"
                )
            set_fields(self, **{name: tuple(np.broadcast_to(found, channels).tolist())})
        if self.std is not None and 0 in self.std:
            raise ValueError(f"std must not be 0, got {self.std}")

    @property
    def network(self) -> dict[str, Any]:
        """The settings of a network, without its path."""
        return {n: getattr(self, n) for n in _OF_NETWORKS if n != "path"}


# --- Private statistics ---

CLASS = "class"
PEOPLE = "people"
TOTAL = "total"
MEANS = "means"
PAIR = "pair"  # level of pairs of examples
GIVEN = "contribution"  # level of each person's contribution
# Default share of the budget if gradient steps follow.
_SHARES = {MEAN: 0.02, PLDA: 0.6}
MOST_FEATURES = 4096  # their covariance takes 128 MB
MOST_SLOPES = 63  # n slopes have (n + 1)^4 moments of pairs
MOST_POWERS = 8
_MOST_STAGES = 64  # of the covariance within classes

Share = Annotated[float, within(0.0, 1.0, "()")]
Stages = functools.partial(
    numbers, most=_MOST_STAGES, check=_validation.positive_array, what="shares"
)


class StartConfig(CheckedSpec):
    """Private statistics that a run begins with.

    Attributes:
      kind: "plda"; "mean": only the mean, which is subtracted; or "mixed", for the
        learner of that name.
      share: of the budget, in (0, 1); see `plan_budget`. None: 0.6 for "plda", 0.02 for
        "mean". All of it if nothing follows (``learner.kind`` "plda", "mixed").
      mean: share of the mean among the statistics; it and the next two sum to 1.
      within: share of each stage of the covariance within classes.
      total: share of the last statistic, which says how classes differ.
      between: the last statistic: "total", the covariance of all examples; or "means",
        the mean of every class, if examples are protected: fewer numbers and so less
        noise, if there are fewer classes than features.
      pairs: if people are protected, "class": examples are paired at random within each
        class, for people who share few classes; or "people": people are paired, and the
        pairs in all classes that they share are one contribution.
      num_people: public number of people, or of slots for them; needed under zero_out
        if people are paired.
      dimensions: largest number of directions that are kept; None: all. Keep all if
        there are few classes or much noise.
      pooled: of "mixed", as the rest: share in (0, 1) of what all tasks have in common;
        the pairs of examples of a task have the rest.
      powers: number of powers of each feature in the common line; see `MixedModel`.
      slopes: number of features, the first ones, that have a slope in each task.
      target_bound: public bound to which the targets are clipped.
    """

    kind: Annotated[str, one_of(MEAN, PLDA, MIXED)] = PLDA
    share: Share | None = None
    mean: Positive = 0.02
    within: Annotated[tuple[float, ...], Stages] = (0.05, 0.1, 0.2, 0.35)
    total: Positive = 0.28
    between: Annotated[str, one_of(TOTAL, MEANS)] = TOTAL
    pairs: Annotated[str, one_of(CLASS, PEOPLE)] = CLASS
    num_people: Count | None = None
    dimensions: Annotated[int, whole(1, MOST_FEATURES)] | None = None
    pooled: Share = 0.5
    powers: Annotated[int, whole(1, MOST_POWERS)] = 2
    slopes: Annotated[int, whole(0, MOST_SLOPES)] = 1
    target_bound: Positive = 1.0

    def check_values(self) -> None:
        """Refuses shares that do not sum to 1."""
        total = math.fsum((self.mean, *self.within, self.total))
        if abs(total - 1) > 1e-9:
            raise ValueError(
                "the shares mean, within and total must sum to 1, got "
                f"{self.mean}, {list(self.within)} and {self.total}: {total:.10g}"
            )

    def check_use(self, learner: str, num_steps: int | None) -> None:
        """Refuses statistics that do not fit the kind of learner and its steps."""
        alone = learner in CLOSED_FORM
        if alone and (self.kind != learner or self.share is not None):
            raise ValueError(
                f"start must be of kind {learner!r} and without a share with "
                f"learner.kind={learner!r}, which spends all of the budget on it"
            )
        if not alone and self.kind == MIXED:
            raise ValueError(
                f"start.kind={MIXED!r} is for learner.kind={MIXED!r}, got {learner!r}"
            )
        if not alone and num_steps is None:
            raise ValueError("num_steps must be given with start, got None")

    def shares(self, is_all: bool) -> tuple[float, ...]:
        """Returns each statistic's share of the budget; ``is_all``: no steps follow."""
        given = _SHARES.get(self.kind, 1.0) if self.share is None else self.share
        own = {
            MEAN: (1.0,),
            PLDA: (self.mean, *self.within, self.total),
            MIXED: (self.pooled, 1 - self.pooled),
        }[self.kind]
        return tuple((1.0 if is_all else given) * share for share in own)


def statistics_steps(
    levels: Sequence[str],
    config: StartConfig,
    *,
    privacy_unit: str,
    neighboring_relation: str,
) -> tuple[GaussianStep, ...]:
    """Returns the step of each statistic, in order, with a noise multiplier of 1."""
    *_, class_level, example_level = levels
    units = (class_level, example_level, *OWNED)
    _validation.choice("privacy_unit", privacy_unit, units)
    if PAIR in levels:
        raise ValueError(
            f"no level of the data may be named {PAIR!r} with private statistics, got "
            f"{tuple(levels)}"
        )
    is_person = privacy_unit in OWNED
    if config.pairs == PEOPLE and not is_person:
        raise ValueError(
            f"start.pairs={PEOPLE!r} is for privacy_unit={PERSON!r}, got "
            f"{privacy_unit!r}"
        )
    if config.between == MEANS and privacy_unit != example_level:
        raise ValueError(
            f"start.between={MEANS!r} is for privacy_unit={example_level!r}, got "
            f"{privacy_unit!r}"
        )

    def step(*names: str, clip_unit: str) -> GaussianStep:
        everybody = [Poisson(name, sampling_probability=1.0) for name in names]
        bounds = dict.fromkeys(("examples", "classes")[: len(names)], 1)
        return GaussianStep(
            MultistageSampling(*everybody),
            noise_multiplier=1.0,
            clip_unit=clip_unit,
            privacy_unit=privacy_unit,
            neighboring_relation=neighboring_relation,
            people=PersonBounds(**bounds) if is_person else None,
        )

    if is_person:
        one = step(GIVEN, clip_unit=GIVEN)
        pairs = step(PAIR, GIVEN, clip_unit=PAIR)
    else:
        one = pairs = step(*levels, clip_unit=privacy_unit)
        if privacy_unit == example_level:
            pairs = step(*levels[:-1], PAIR, example_level, clip_unit=PAIR)
    if config.kind == PLDA:
        return (one, *[pairs] * len(config.within), one)
    return (one,) if config.kind == MEAN else (one, pairs)


def contribution_norm(step: GaussianStep) -> float:
    """Returns the norm that the noise multiplier of a statistic's step is relative to.

    If one contribution is replaced by another the step counts twice its norm, but the
    two are at most sqrt(2) apart, as if each had norm sqrt(1/2). Otherwise it is 1.
    """
    of_pair = step.clip_unit == PAIR
    relation = step.neighboring_relation
    is_replaced = relation == "replace_one" or (of_pair and relation == "add_remove")
    return math.sqrt(0.5) if is_replaced else 1.0
