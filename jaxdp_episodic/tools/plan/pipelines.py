"""Which pipeline: private statistics, gradient steps on episodes after them, or none?

Signal-to-noise ratios decide, from sizes alone; docs/plan.md has formulas and limits.
What to expect is what training gained on data that were measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.designs import CLASS
from jaxdp_episodic.accountant.describe.schemes import ORIGINAL, PERSON
from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of
from jaxdp_episodic.accountant.questions.calibration import calibrate_noise_multiplier
from jaxdp_episodic.tools.plan.plan import (
    POISSON,
    budgeted,
    possible_designs,
)
from jaxdp_episodic.tools.plan.question import STEPS as MEASURED_STEPS
from jaxdp_episodic.tools.plan.question import PlanDescription, PlanRequest
from jaxdp_episodic.trainer.config.training_parts import (
    MIXED,
    NUM_WAVELETS,
    ONNX,
    PLDA,
    WAVELETS,
)
from jaxdp_episodic.trainer.config.training_start import (
    MEAN,
    MEANS,
    StartConfig,
    contribution_norm,
    statistics_steps,
)

PICTURES = "pictures"
NUMBERS = "numbers"
EPSILONS = 1.0, 8.0  # at which all sets were measured
_ALIKE = 3  # sets that are named
_TOO_FAR = math.log(50)  # logarithms of the ratios of all three sizes, summed
# Ratio of features from which on data are of another kind: pictures in colour have
# three times those of grey ones, hashed texts 32 times those of measurements.
_OTHER_KIND = 2.5


class Measured(NamedTuple):
    """A set, and what a run released gained over its untrained features."""

    name: str
    said: str  # for readers who do not know the set
    kind: str  # PICTURES or NUMBERS
    classes: int  # to train on
    examples: int  # of a class
    features: int  # of an example
    gains: tuple[float, float]  # in accuracy, at each of EPSILONS


# The table of docs/accuracy.md, "Other kinds of data"; a test compares the two.
# Without the page's spoken words, as spectrograms are unlike other pictures.
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


def said_of_alike(kind: str, sizes: Sequence[float], epsilon: float) -> str:
    """Returns what sets like one of ``sizes`` (as `Measured` has them) gained."""
    apart = {
        one: sum(abs(math.log(a / b)) for a, b in zip(one[3:6], sizes, strict=True))
        for one in MEASURED
        if one.kind == kind
        and max(one.features, sizes[2]) < _OTHER_KIND * min(one.features, sizes[2])
    }
    near = sorted(apart, key=apart.__getitem__)[:_ALIKE]
    near = [one for one in near if apart[one] <= _TOO_FAR]
    if not near:
        return "no data of this kind and size were measured (docs/accuracy.md)"
    places = [0] * (epsilon < EPSILONS[1]) + [1] * (epsilon > EPSILONS[0])
    said = [f"{_gained(near, i)} at epsilon {EPSILONS[i]:g}" for i in places]
    names = ", ".join(dict.fromkeys(one.said for one in near))
    which = "" if epsilon in EPSILONS else f"; epsilon {epsilon:g} was not measured"
    return (
        f"data like these ({names}) gained accuracy over untrained features: "
        f"{', '.join(said)} (docs/accuracy.md{which})"
    )


def _gained(near: Sequence[Measured], place: int) -> str:
    """The least and the most, or one number where both round alike."""
    gains = [one.gains[place] for one in near]
    ends = dict.fromkeys(f"{gain:.2f}" for gain in (min(gains), max(gains)))
    return " to ".join(ends)


STEPS = "steps"
STATISTICS = "statistics"
BOTH = "statistics, then steps"
NONE = "do not train"
MIXED_MODEL = "mixed model"

# Statistics helped at 0.25 and all above, not at 0.17 (41 people) and below, where the
# last stage was up to 0.006 worse than untrained features (docs/plan.md).
MIN_STATISTICS = 0.2
# Of a run of episodes: from 5.7 on steps after statistics were as good as these alone
# or better, at 1.4 and below worse.
MIN_STEPS = 5.0
# Classes to train on, for steps after statistics: with 13 letters, 12 typefaces, 100
# glyphs and 170 words they lost 0.002 to 0.017 at epsilon 8, with 300 they gained.
MIN_CLASSES_OF_STEPS = 200
# Means of classes in place of the total covariance, where no steps follow: better with
# 500 to 2,000 examples of each of 4 to 22 classes, worse with 170 and fewer, or with 50
# and more classes (docs/plan.md).
CLASSES_OF_MEANS = 4, 30
EXAMPLES_OF_MEANS = 400  # of a class, on average: the fewest
MIN_MIXED_RATIO = 20.0  # the smallest at which a mixed model was measured, docs/plan.md
_DIMENSIONS = 128  # of the space that steps after statistics were measured in
# Keys of a training config that are for gradient steps.
_OF_STEPS = "model l2_clip_norm clipping num_steps normalizer optimizer".split()


class Pipeline(NamedTuple):
    """What is recommended."""

    name: str  # one of the constants above
    reason: str  # a sentence
    start: dict[str, Any] | None = None  # of a training config; None: none
    # Kind of the learner, where it is not that of episodes; else None.
    learner: str | None = None
    ratio: float = math.nan  # see the module; NaN where nothing was compared
    # What was weighed: signal to noise, and the least that each takes, by pipeline.
    weighed: Mapping[str, tuple[float, float]] = {}
    alike: str = ""  # what sets like these data gained, a sentence
    offer: str = ""  # what another relation would allow, a sentence

    @property
    def lines(self) -> list[str]:
        """What to say: the choice and why, what to expect, what else there is."""
        named = f"pipeline: {self.name}: {self.reason}"
        expected = f"expected: {self.alike}" if self.alike else ""
        offer = f"option: {self.offer}" if self.offer else ""
        return [line for line in (named, expected, offer) if line]

    def left_for_steps(self, request: PlanRequest) -> PlanRequest:
        """Returns the question with the epsilon left to steps, an *estimate*."""
        if self.start is None or self.learner is not None:
            return request
        left = 1 - math.fsum(StartConfig(**self.start).shares(False))
        step = one_release(request)
        noise = noise_of_one(step, request) / math.sqrt(left)
        step = dataclasses.replace(step, noise_multiplier=noise)
        rest = float(epsilon_of(step, num_steps=1, delta=request.delta))
        return dataclasses.replace(request, epsilon=rest)

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the training config of a design as that of this pipeline."""
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
    description: PlanDescription, *, is_chosen: bool = True
) -> Pipeline | None:
    """Returns the pipeline for the sizes of a plan's data; None: nothing is known."""
    request, train = description.request, description.train
    shape, levels = description.feature_shape, description.population.level_names
    unit = request.privacy_unit
    if train is None or "start" in train or shape is None or len(levels) != 2:
        return None
    if unit not in (None, *levels, PERSON):
        return None
    if request.episode.ways is None:
        return _of_numbers(description, math.prod(shape))
    kind = train.get("features", {}).get("kind")
    if kind == ONNX:
        return None
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
    # Measured with 30 made-up classes of 40 examples, 10 or 24 features, at epsilon 8,
    # two of each: accuracy on new classes less that of the features. Classes and noise
    # alike in all directions: steps -0.001 and -0.003, statistics -0.13 and -0.15, both
    # -0.09. Directions of noise alone: +0.02 and +0.03, +0.12, and +0.10 and +0.14.
    ratio = _ratio_of_steps(description, number)
    why = (
        "nothing is held out to choose a stage by. Where the features were good as "
        "they are, gradient steps left them so, which statistics did not"
    )
    if ratio < MIN_STEPS:
        why += (
            f". Their signal to noise is {ratio:.2g} ({MIN_STEPS:g} is needed): the "
            "features as they are cost no privacy"
        )
    return Pipeline(STEPS, why, ratio=ratio)


def _of_features(description: PlanDescription, number: int) -> Pipeline:
    """The pipeline of classes with so many fixed features."""
    request, levels = description.request, description.population.level_names
    total, steps = _ratio_of_statistics(description, number), 0.0
    weighed = {STATISTICS: (total, MIN_STATISTICS)}
    why = (
        f"signal to noise of private statistics: {total:.2g} ({MIN_STATISTICS:g} is "
        f"needed), from {_num_contributions(description):,.0f} contributions "
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
    said = {"weighed": weighed, "ratio": total, "offer": offer}
    said["alike"] = _gained_by_alike(description, number)
    alone = {"start": start | last, "learner": PLDA, **said}
    if total < MIN_STATISTICS and steps < MIN_STEPS:
        return Pipeline(
            NONE,
            f"{why}. That is not enough: the features as they are cost no privacy. The "
            "config runs statistics all the same, to show what they would bring",
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
        without = f"episodes are drawn of a level that is called {CLASS!r}"
    elif steps < MIN_STEPS:
        without = "so gradient steps are left out"
    elif min(compute.most_steps, compute.total_episodes) < MEASURED_STEPS:
        without = f"fewer than {MEASURED_STEPS} steps are within the budget"
    if without is not None:
        return Pipeline(STATISTICS, f"{why}; {without}", **alone)
    start |= {"dimensions": _DIMENSIONS}
    return Pipeline(BOTH, why, start, **said)


def _gained_by_alike(description: PlanDescription, number: int) -> str:
    """What sets of about these sizes gained; of examples alone some were measured."""
    request, sizes = description.request, _class_sizes(description)
    if request.privacy_unit not in (None, description.population.level_names[-1]):
        return ""
    is_picture = (description.train or {}).get("features", {}).get("kind") == WAVELETS
    shape = len(sizes), max(float(sizes.mean()), 1.0), number
    return said_of_alike(PICTURES if is_picture else NUMBERS, shape, request.epsilon)


def _last_statistic(
    description: PlanDescription, number: int
) -> tuple[dict[str, Any], str]:
    """What statistics end with, in their config, and words on what would allow means.

    Under add_remove only a public list may say how many means are released.
    """
    request, levels = description.request, description.population.level_names
    sizes, (fewest, most) = _class_sizes(description), CLASSES_OF_MEANS
    is_few = fewest <= len(sizes) <= min(most, number)
    is_large = sizes.sum() >= EXAMPLES_OF_MEANS * len(sizes)
    if not (is_few and is_large) or request.privacy_unit not in (None, levels[-1]):
        return {}, ""
    if request.copies > 1:
        return {}, ""  # means are of examples without copies
    is_private = not description.has_public_units
    if request.neighboring_relation == "add_remove" and is_private:
        return {}, (
            f"with --relation zero_out --population N (no {levels[0]} has more than N, "
            f"and that is public), or with a public list of {levels[0]} units, "
            "statistics end with class means: 0.01 to 0.03 more on digits, typefaces "
            "and letters, nothing on texts"
        )
    return {"between": MEANS}, ""


def _of_numbers(description: PlanDescription, number: int) -> Pipeline:
    """The pipeline of regression."""
    config = StartConfig(kind=MIXED)
    own = 1 + min(config.slopes, number)
    entries, line = own * (own + 1) // 2 + 1, 2 + config.powers * number
    ratio = min(
        _ratio_of_moments(description, config, entries, of_pairs=True),
        _ratio_of_moments(description, config, line, of_pairs=False),
    )
    why = (
        f"signal to noise of a mixed model's moments: {ratio:.3g} "
        f"({MIN_MIXED_RATIO:g} is needed)"
    )
    if ratio < MIN_MIXED_RATIO:
        return Pipeline(STEPS, why, ratio=ratio)
    return Pipeline(
        MIXED_MODEL,
        f"{why}. It suits targets that are near lines in the features and their powers",
        {"kind": MIXED, "slopes": own - 1},
        MIXED,
        ratio,
    )


# --- Ratios of signal to noise ---


def _ratio_of_moments(
    description: PlanDescription,
    config: StartConfig,
    directions: int,
    *,
    of_pairs: bool,
) -> float:
    """Mean signal of a direction over the noise's largest eigenvalue."""
    request, shares = description.request, config.shares(True)
    number = _num_pairs(description) if of_pairs else _num_contributions(description)
    share = max(shares[1:]) if of_pairs else shares[0]
    levels = description.population.level_names
    step = _statistics(request, levels, config)[int(of_pairs)]
    noise = noise_of_one(step, request) * contribution_norm(step) / math.sqrt(share)
    return number / directions / (noise * math.sqrt(2 * directions))


def _ratio_of_statistics(description: PlanDescription, number: int) -> float:
    """The total covariance's trace over its noise's largest eigenvalue."""
    config, levels = StartConfig(kind=PLDA), description.population.level_names
    step = _statistics(description.request, levels, config)[-1]
    noise = noise_of_one(step, description.request) * contribution_norm(step)
    noise /= math.sqrt(config.shares(False)[-1])
    return _num_contributions(description) / (noise * math.sqrt(2 * number))


def _ratio_of_steps(description: PlanDescription, number: int) -> float:
    """What complete episodes add up to over a run, over its noise; 0 if none can be."""
    request, best = description.request, 0.0
    try:
        designs = possible_designs(request, description.population)
    except ValueError:
        return best
    for design in designs:
        if design.scheme != POISSON or not design.is_multistage:
            continue
        episodes, steps = budgeted(request.compute, design, 1.0)
        if not episodes.size:
            continue
        index = int(np.argmax(episodes * np.minimum(steps, MEASURED_STEPS)))
        try:
            complete, _ = design.complete(episodes[[index]])
            noise = design.noise(episodes[[index]], steps[[index]])
        except (ValueError, NotImplementedError):
            continue
        signal = float(complete[0]) * math.sqrt(steps[index])
        best = max(best, signal / (float(noise[0]) * math.sqrt(number)))
    return best


def _num_contributions(description: PlanDescription) -> float:
    """Protected units that have examples: each gives one contribution."""
    request, sizes = description.request, _class_sizes(description)
    unit, bounds = request.privacy_unit, request.people
    if unit == description.population.level_names[0]:
        return float(np.count_nonzero(sizes))
    if unit != PERSON:
        return float(sizes.sum()) / request.copies
    if known := description.people or request.num_people:
        return float(known)
    assert bounds is not None  # or people are listed, which `PlanRequest` asks for
    most = math.prod(np.maximum(list(bounds.numbers.values()), 1).tolist())
    return float(math.ceil(sizes.sum() / most))


def _num_pairs(description: PlanDescription) -> float:
    """Contributions of pairs: of examples, of classes that have one, or of people."""
    unit, sizes = description.request.privacy_unit, _class_sizes(description)
    if unit == description.population.level_names[0]:
        return float(np.count_nonzero(sizes > 1))
    if unit == PERSON:
        return _num_contributions(description) / 2
    slots = sizes  # what is drawn from in each class: under zero_out public slots
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
    """A Gaussian mechanism: one statistic in which every example is by itself."""
    plain = dataclasses.replace(
        request, privacy_unit=None, people=None, num_people=None
    )
    return _statistics(plain, ("class", "example"), StartConfig(kind=MEAN))[0]


def noise_of_one(step: Any, request: PlanRequest) -> float:
    """The noise of one such release within the whole target."""
    target: Any = {"epsilon": request.epsilon, "delta": request.delta}
    return float(calibrate_noise_multiplier(step, **target, num_steps=1))
