"""Recommends a pipeline: private statistics, gradient steps after them, or neither.

Signal-to-noise ratios decide, computed from sizes alone; docs/plan.md has the formulas
and limits. The expected gain is that of training on similar data that were measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.designs import CLASS, ORIGINAL, PERSON
from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of
from jaxdp_episodic.accountant.questions.calibration import calibrate_noise_multiplier
from jaxdp_episodic.tools.plan import question
from jaxdp_episodic.tools.plan.plan import budgeted, possible_designs
from jaxdp_episodic.tools.plan.question import PlanDescription, PlanRequest
from jaxdp_episodic.trainer.config.training_parts import (
    MEAN,
    MEANS,
    MIXED,
    NUM_WAVELETS,
    ONNX,
    PLDA,
    WAVELETS,
    StartConfig,
    contribution_norm,
    statistics_steps,
)

PICTURES = "pictures"
NUMBERS = "numbers"
EPSILONS = 1.0, 8.0  # at which all data sets were measured
_MOST_SIMILAR = 3  # data sets that are named
_TOO_FAR = math.log(50)  # distance: sum of the absolute log ratios of the three sizes
# Data whose numbers of features differ by this factor are of another kind: colour
# pictures have three times those of grey ones, hashed texts 32 times those of tables.
_OTHER_KIND = 2.5


class Measured(NamedTuple):
    """A data set, and what a run's release gained over its untrained features."""

    name: str
    title: str  # for readers who do not know the data set
    kind: str  # PICTURES or NUMBERS
    classes: int  # to train on
    examples: int  # of a class
    features: int  # of an example
    gains: tuple[float, float]  # in accuracy, at each of EPSILONS


# The table in docs/accuracy.md, "Other kinds of data"; a test compares the two. The
# page's spoken words are left out, as spectrograms are unlike other pictures.
MEASURED = (
    Measured("syllables", "syllables", PICTURES, 1_085, 4, 425, (0.0764, 0.1440)),
    Measured("material icons", "icons", PICTURES, 741, 4, 425, (0.0077, 0.0097)),
    Measured("phosphor icons", "icons", PICTURES, 885, 4, 425, (0.0247, 0.0411)),
    Measured("emoji", "emoji", PICTURES, 751, 4, 1_275, (0.0106, 0.0251)),
    Measured("digits", "digits", PICTURES, 5, 170, 425, (0.0116, 0.0032)),
    Measured("typefaces", "typefaces", PICTURES, 11, 500, 425, (0.1701, 0.2193)),
    Measured("mnist", "digits", PICTURES, 5, 800, 425, (0.0816, 0.0795)),
    Measured("letters", "letters", NUMBERS, 15, 772, 16, (0.1514, 0.1552)),
    Measured("modules", "code", NUMBERS, 22, 600, 512, (0.0068, 0.0173)),
    Measured("languages", "short texts", NUMBERS, 26, 500, 512, (0.0209, 0.0567)),
    Measured("libraries", "code", NUMBERS, 22, 2_000, 512, (0.0047, 0.0110)),
    Measured("few languages", "short texts", NUMBERS, 9, 520, 512, (0.0036, 0.0062)),
)


def measured_gains(kind: str, sizes: Sequence[float], epsilon: float) -> str:
    """Returns a sentence: what training gained on measured data of similar sizes."""
    # The sizes are the classes, examples and features of a `Measured`.
    distance = {
        one: sum(abs(math.log(a / b)) for a, b in zip(one[3:6], sizes, strict=True))
        for one in MEASURED
        if one.kind == kind
        and max(one.features, sizes[2]) < _OTHER_KIND * min(one.features, sizes[2])
    }
    near = sorted(distance, key=distance.__getitem__)[:_MOST_SIMILAR]
    near = [one for one in near if distance[one] <= _TOO_FAR]
    if not near:
        return "no data of this kind and size were measured (docs/accuracy.md)"
    gained = []
    for place in [0] * (epsilon < EPSILONS[1]) + [1] * (epsilon > EPSILONS[0]):
        gains = [one.gains[place] for one in near]
        ends = dict.fromkeys(f"{gain:.2f}" for gain in (min(gains), max(gains)))
        gained.append(f"{' to '.join(ends)} at epsilon {EPSILONS[place]:g}")
    names = ", ".join(dict.fromkeys(one.title for one in near))
    which = "" if epsilon in EPSILONS else f"; epsilon {epsilon:g} was not measured"
    return (
        f"data like these ({names}) gained accuracy over untrained features: "
        f"{', '.join(gained)} (docs/accuracy.md{which})"
    )


STEPS = "steps"
STATISTICS = "statistics"
BOTH = "statistics, then steps"
NONE = "do not train"
MIXED_MODEL = "mixed model"

# Smallest signal-to-noise ratio for statistics. They helped at 0.25 and above. At 0.17
# (41 people) and below the last stage was up to 0.006 worse than untrained features
# (docs/plan.md).
MIN_STATISTICS = 0.2
# Smallest signal-to-noise ratio for steps after statistics. From 5.7 on they were as
# good as statistics alone or better, at 1.4 and below worse.
MIN_STEPS = 5.0
# Fewest classes for steps after statistics. With 13 letters, 12 typefaces, 100 glyphs
# and 170 words they lost 0.002 to 0.017 at epsilon 8, with 300 classes they gained.
MIN_CLASSES_OF_STEPS = 200
# Fewest and most classes for class means in place of the total covariance, if no steps
# follow. Means were better with 500 to 2,000 examples of each of 4 to 22 classes, worse
# with 170 examples and fewer, or with 50 classes and more (docs/plan.md).
CLASSES_OF_MEANS = 4, 30
EXAMPLES_OF_MEANS = 400  # fewest examples per class for class means, on average
MIN_MIXED_RATIO = 20.0  # the smallest at which a mixed model was measured, docs/plan.md
_DIMENSIONS = 128  # of the space in which steps after statistics were measured
# Keys of a training config that belong to gradient steps.
_OF_STEPS = "model l2_clip_norm clipping num_steps normalizer optimizer".split()


class Pipeline(NamedTuple):
    """A recommended pipeline."""

    name: str = ""  # one of the constants above; "": no rule covers the data
    reason: str = ""  # a sentence
    start: dict[str, Any] | None = None  # table ``start`` of the config; None: none
    # Kind of a learner without gradient steps; None: the learner of the design.
    learner: str | None = None
    ratio: float = math.nan  # signal to noise; NaN if nothing was compared
    # Pipeline -> its signal-to-noise ratio, and the smallest ratio that it needs.
    weighed: Mapping[str, tuple[float, float]] = {}
    gains: str = ""  # what training gained on similar data, a sentence
    offer: str = ""  # what another relation would allow, a sentence

    @property
    def lines(self) -> list[str]:
        """The choice and its reason, what to expect, and other options."""
        named = f"{self.name}: {self.reason}" if self.name else ""
        said = {"pipeline": named, "expected": self.gains, "option": self.offer}
        return [f"{name}: {text}" for name, text in said.items() if text]

    def left_for_steps(self, request: PlanRequest) -> PlanRequest:
        """Returns the request with the epsilon left for steps, an *estimate*."""
        if self.start is None or self.learner is not None:
            return request
        left = 1 - math.fsum(StartConfig(**self.start).shares(False))
        step = one_release(request)
        noise = noise_of_one(step, request) / math.sqrt(left)
        step = dataclasses.replace(step, noise_multiplier=noise)
        rest = float(epsilon_of(step, num_steps=1, delta=request.delta))
        return dataclasses.replace(request, epsilon=rest)

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the training config of a design, changed to this pipeline."""
        if self.start is None:
            return dict(config)
        if self.learner is None:
            return {**config, "start": self.start}
        kept = {k: v for k, v in config.items() if k not in _OF_STEPS}
        learner = {"kind": self.learner, "shots": config["learner"]["shots"]}
        if self.learner == MIXED:
            learner["loss"] = "squared_error"
        return {**kept, "start": self.start, "learner": learner}


def recommended_pipeline(
    description: PlanDescription,
    *,
    is_chosen: bool = True,  # the run chooses its stage by held-out data
) -> Pipeline:
    """Returns the pipeline for a plan's data, without a name if no rule covers them."""
    request, train = description.request, description.train
    shape, levels = description.feature_shape, description.population.level_names
    unit = request.privacy_unit
    if train is None or "start" in train or shape is None or len(levels) != 2:
        return Pipeline()
    if unit not in (None, *levels, PERSON):
        return Pipeline()
    if request.episode.ways is None:
        return _of_numbers(description, math.prod(shape))
    kind = train.get("features", {}).get("kind")
    if kind == ONNX:
        return Pipeline()
    if kind == WAVELETS:
        number = NUM_WAVELETS * (shape[-1] if len(shape) == 3 else 1)
    elif len(shape) == 1:
        number = shape[0]
    else:
        return Pipeline(
            STEPS,
            "images without fixed features need gradient steps for everything, at a "
            "high price (on the glyphs 0.69 at epsilon 1, where features have 0.97)",
        )
    if is_chosen or unit == PERSON or levels[0] != CLASS:
        return _of_features(description, number)
    # Measured at epsilon 8 with 30 made-up classes of 40 examples, 10 or 24 features,
    # two data sets of each: accuracy on new classes minus that of the features. Signal
    # and noise equal in all directions: steps -0.001 and -0.003, statistics -0.13 and
    # -0.15, both together -0.09. Some directions without signal: steps +0.02 and +0.03,
    # statistics +0.12, both together +0.10 and +0.14.
    ratio = _ratio_of_steps(description, number)
    why = (
        "nothing is held out to choose a stage by. If the untrained features were "
        "already good, gradient steps did not worsen them, but statistics did"
    )
    if ratio < MIN_STEPS:
        why += (
            f". Their signal to noise is {ratio:.2g} ({MIN_STEPS:g} is needed): the "
            "features as they are cost no privacy"
        )
    return Pipeline(STEPS, why, ratio=ratio)


def _of_features(description: PlanDescription, number: int) -> Pipeline:
    """The pipeline for classes, with this number of fixed features."""
    request, levels = description.request, description.population.level_names
    config, units, steps = StartConfig(kind=PLDA), _num_contributions(description), 0.0
    total = _ratio(description, config, -1, config.shares(False)[-1], units, number)
    weighed = {STATISTICS: (total, MIN_STATISTICS)}
    why = (
        f"signal to noise of private statistics: {total:.2g} ({MIN_STATISTICS:g} is "
        f"needed), from {units:,.0f} contributions "
        f"({request.privacy_unit or levels[-1]})"
    )
    classes = len(_class_sizes(description))
    has_many = classes >= MIN_CLASSES_OF_STEPS
    if request.privacy_unit != PERSON and has_many:
        steps = _ratio_of_steps(description, number)
        weighed[BOTH] = steps, MIN_STEPS
        why += f"; of gradient steps on episodes: {steps:.2g} ({MIN_STEPS:g} is needed)"
    start: dict[str, Any] = {"kind": PLDA}
    last, offer = _last_statistic(description, number)
    facts = {"weighed": weighed, "ratio": total, "offer": offer}
    if request.privacy_unit in (None, levels[-1]):  # gains were measured so
        train, sizes = description.train or {}, _class_sizes(description)
        is_picture = train.get("features", {}).get("kind") == WAVELETS
        shape = classes, max(float(sizes.mean()), 1.0), number
        kind = PICTURES if is_picture else NUMBERS
        facts["gains"] = measured_gains(kind, shape, request.epsilon)
    alone = {"start": start | last, "learner": PLDA, **facts}
    if total < MIN_STATISTICS and steps < MIN_STEPS:
        return Pipeline(
            NONE,
            f"{why}. That is not enough: the features as they are cost no privacy. The "
            "config runs statistics all the same, to show what they would gain",
            **alone,
        )
    compute, without = request.compute, None
    if request.privacy_unit == PERSON:
        without = "gradient steps were not measured where people are protected"
    elif not has_many:
        without = (
            f"gradient steps after them need {MIN_CLASSES_OF_STEPS} classes, got "
            f"{classes}"
        )
    elif levels[0] != CLASS:
        without = f"episodes are drawn from a level that is called {CLASS!r}"
    elif steps < MIN_STEPS:
        without = "so gradient steps are left out"
    elif min(compute.most_steps, compute.total_episodes) < question.STEPS:
        without = f"fewer than {question.STEPS} steps are within the budget"
    if without is not None:
        return Pipeline(STATISTICS, f"{why}; {without}", **alone)
    return Pipeline(BOTH, why, start | {"dimensions": _DIMENSIONS}, **facts)


def _last_statistic(
    description: PlanDescription, number: int
) -> tuple[dict[str, Any], str]:
    """Keys of ``start`` for the last statistic, and a sentence on what allows means."""
    request, levels = description.request, description.population.level_names
    sizes, (fewest, most) = _class_sizes(description), CLASSES_OF_MEANS
    is_few = fewest <= len(sizes) <= min(most, number)
    is_large = sizes.sum() >= EXAMPLES_OF_MEANS * len(sizes)
    if not (is_few and is_large) or request.privacy_unit not in (None, levels[-1]):
        return {}, ""
    if request.copies > 1:
        return {}, ""  # class means are defined for examples without copies
    # The number of means is released.
    is_private = not description.has_public_units
    if request.neighboring_relation == "add_remove" and is_private:
        return {}, (
            f"with --relation zero_out --population N (no {levels[0]} has more than N, "
            f"and that is public), or with a public list of {levels[0]} units, "
            "statistics end with class means: accuracy 0.01 to 0.03 higher on digits, "
            "typefaces and letters, the same on texts"
        )
    return {"between": MEANS}, ""


def _of_numbers(description: PlanDescription, number: int) -> Pipeline:
    """The pipeline for regression."""
    config = StartConfig(kind=MIXED)
    own, shares = 1 + min(config.slopes, number), config.shares(True)
    # Moment -> its place, its share, contributions, and entries.
    line = 0, shares[0], _num_contributions(description), 2 + config.powers * number
    pairs = 1, max(shares[1:]), _num_pairs(description), own * (own + 1) // 2 + 1
    ratio = min(_ratio(description, config, *m) / m[-1] for m in (line, pairs))
    why = (
        f"signal to noise of a mixed model's moments: {ratio:.3g} "
        f"({MIN_MIXED_RATIO:g} is needed)"
    )
    if ratio < MIN_MIXED_RATIO:
        return Pipeline(STEPS, why, ratio=ratio)
    return Pipeline(
        MIXED_MODEL,
        f"{why}. It suits targets that are nearly linear in the features and their "
        "powers",
        {"kind": MIXED, "slopes": own - 1},
        MIXED,
        ratio,
    )


# --- Ratios of signal to noise ---


def _ratio(
    description: PlanDescription,
    config: StartConfig,
    place: int,  # of the statistic
    share: float,  # its part of the squared distances
    number: float,
    directions: int,
) -> float:
    """Contributions to a statistic over the largest eigenvalue of their noise."""
    request, levels = description.request, description.population.level_names
    step = _statistics(request, levels, config)[place]
    noise = noise_of_one(step, request) * contribution_norm(step) / math.sqrt(share)
    return number / (noise * math.sqrt(2 * directions))


def _ratio_of_steps(description: PlanDescription, number: int) -> float:
    """Sum of a run's complete episodes divided by its noise; 0 if none is complete."""
    request, best = description.request, 0.0
    try:
        designs = possible_designs(request, description.population)
    except ValueError:
        return best
    for design in designs:
        if design.scheme != question.POISSON or not design.is_multistage:
            continue
        try:
            episodes, steps = budgeted(design, 1.0)
            index = int(np.argmax(episodes * np.minimum(steps, question.STEPS)))
            complete, _ = design.complete(episodes[[index]])
            noise = design.noise(episodes[[index]], steps[[index]])
        except (ValueError, NotImplementedError):
            continue
        signal = float(complete[0]) * math.sqrt(steps[index])
        best = max(best, signal / (float(noise[0]) * math.sqrt(number)))
    return best


def _num_contributions(description: PlanDescription) -> float:
    """Number of protected units with examples; each gives one contribution."""
    request, sizes = description.request, _class_sizes(description)
    unit, bounds = request.privacy_unit, request.people
    if unit == description.population.level_names[0]:
        return float(np.count_nonzero(sizes))
    if unit != PERSON:
        return float(sizes.sum()) / request.copies
    if known := description.people or request.num_people:
        return float(known)
    assert bounds is not None  # `PlanRequest` requires bounds or a list of people
    most = math.prod(np.maximum(list(bounds.numbers.values()), 1).tolist())
    return float(math.ceil(sizes.sum() / most))


def _num_pairs(description: PlanDescription) -> float:
    """Number of contributions of pairs: of examples, classes with a pair, or people."""
    unit, sizes = description.request.privacy_unit, _class_sizes(description)
    if unit == description.population.level_names[0]:
        return float(np.count_nonzero(sizes > 1))
    if unit == PERSON:
        return _num_contributions(description) / 2
    slots = sizes  # number that a class is drawn from; under zero_out public slots
    if description.request.neighboring_relation == "zero_out":
        public = description.request.episode.population
        slots = np.full_like(sizes, public or sizes.max())
    return float(np.sum(sizes * (sizes - 1) / (2 * np.maximum(slots - 1, 1))))


def _class_sizes(description: PlanDescription) -> np.ndarray:
    """Examples of each class, (C,)."""
    return np.asarray(description.population.children_counts[1], np.float64)


def _statistics(
    request: PlanRequest, levels: tuple[str, ...], config: StartConfig
) -> Any:
    is_copied = request.copies > 1 and request.privacy_unit != PERSON
    return statistics_steps(
        levels,
        config,
        privacy_unit=ORIGINAL if is_copied else request.privacy_unit or levels[-1],
        neighboring_relation=request.neighboring_relation,
    )


def one_release(request: PlanRequest) -> Any:
    """Returns one Gaussian release to which every example contributes separately."""
    nobody: Any = {"privacy_unit": None, "people": None, "num_people": None}
    plain = dataclasses.replace(request, **nobody)
    return _statistics(plain, ("class", "example"), StartConfig(kind=MEAN))[0]


def noise_of_one(step: Any, request: PlanRequest) -> float:
    """Returns the noise multiplier of one release that spends the whole target."""
    target: Any = {"epsilon": request.epsilon, "delta": request.delta}
    return float(calibrate_noise_multiplier(step, **target, num_steps=1))
