"""Which pipeline: private statistics, episodes after them, or none?

Each is judged by how far what it adds up stands out of its noise (`ratios`).
The limits below were read from runs on several kinds of data; docs/plan.md has them.
They are rules of thumb for data alike, no theorems. A run with validation classes
releases the simplest of its stages that is as good as the best, so that a rule that
fails costs what could have been won, and no more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxdp_episodic.accountant.describe.designs import CLASS
from jaxdp_episodic.accountant.describe.schemes import PERSON
from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of
from jaxdp_episodic.tools.plan.question import PlanDescription, PlanRequest
from jaxdp_episodic.tools.plan.ratios import (
    MEASURED_STEPS,
    class_sizes,
    noise_of_one,
    num_contributions,
    one_release,
    ratio_of_moments,
    ratio_of_statistics,
    ratio_of_steps,
)
from jaxdp_episodic.trainer.config.training_parts import (
    MIXED,
    NUM_WAVELETS,
    ONNX,
    PLDA,
    WAVELETS,
)
from jaxdp_episodic.trainer.config.training_start import MEANS, StartConfig

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
# Means of classes in place of the total covariance, where no steps follow: better with
# 12 and 18 classes; of 20 examples each 12 were as good, 50 worse by 0.003, and five
# classes by 0.01 (docs/plan.md).
CLASSES_OF_MEANS = 10, 30
MIN_MIXED_RATIO = 20.0  # the smallest at which a mixed model was measured, docs/plan.md
_DIMENSIONS = 128  # of the space that steps after statistics were measured in


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

    def comparison(self) -> list[str]:
        """Returns each pipeline's signal to noise, and the least that it takes."""
        return [
            f"  {name}: signal to noise {found:.2g}, of at least {least:g}"
            for name, (found, least) in self.weighed.items()
        ]

    def left_for_steps(self, request: PlanRequest) -> PlanRequest:
        """Returns the question about gradient steps: with the epsilon left to them.

        As of one Gaussian mechanism with the rest of the squared distance: an
        *estimate*, by which designs are ranked. Training calibrates it exactly.
        """
        if self.start is None or self.learner is not None:
            return request
        config = StartConfig(**self.start)
        left = 1 - math.fsum(config.shares(False))
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
        gone = "model l2_clip_norm clipping num_steps normalizer optimizer".split()
        kept = {k: v for k, v in config.items() if k not in gone}
        learner = {"kind": self.learner, "shots": config["learner"]["shots"]}
        if self.learner == MIXED:
            learner["loss"] = "squared_error"
        return {**kept, "start": self.start, "learner": learner}


def recommended_pipeline(
    description: PlanDescription, *, is_chosen: bool = True
) -> Pipeline | None:
    """Returns the pipeline for the sizes of a plan's data.

    Without ``is_chosen`` no data are held out to choose a stage by, and the last one is
    released as it comes: of classes with fixed features it is then that of steps alone,
    for a model that has the features beside what it learns.

    None where the plan's file has no table ``train``, one with a ``start`` of its own,
    or with features by a network, whose number is not known before it runs; or a
    privacy unit other than a class (task), an example or a person.
    """
    request, train = description.request, description.train
    shape = description.feature_shape
    levels = description.population.level_names
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
            "images without fixed features leave all to gradient steps, at a high "
            "price (on the glyphs 0.69 at epsilon 1, where features have 0.97)",
        )
    if is_chosen or unit == PERSON or levels[0] != CLASS:
        return _of_features(description, number)
    return _unscored(description, number)


def _unscored(description: PlanDescription, number: int) -> Pipeline:
    """The pipeline of classes with so many fixed features where nothing is held out."""
    # Measured with 30 made-up classes of 40 examples, 10 or 24 features, at epsilon 8,
    # two of each: accuracy on new classes less that of the features. Classes and noise
    # alike in all directions: steps -0.001 and -0.003, statistics -0.13 and -0.15, both
    # -0.09. Directions of noise alone: +0.02 and +0.03, +0.12, and +0.10 and +0.14.
    ratio = ratio_of_steps(description, number)
    why = (
        "nothing is held out to choose a stage by, and where the features were good as "
        "they are, steps alone left them so, which statistics did not"
    )
    if ratio < MIN_STEPS:
        why += (
            f". They hardly stand out of their noise, {ratio:.2g}, of at least "
            f"{MIN_STEPS:g}: the features as they are cost no privacy"
        )
    return Pipeline(STEPS, why, ratio=ratio)


def _of_features(description: PlanDescription, number: int) -> Pipeline:
    """The pipeline of classes with so many fixed features."""
    request, levels = description.request, description.population.level_names
    total = ratio_of_statistics(description, number)
    weighed, steps = {STATISTICS: (total, MIN_STATISTICS)}, 0.0
    if request.privacy_unit != PERSON:
        steps = ratio_of_steps(description, number)
        weighed[BOTH] = steps, MIN_STEPS
    what = (
        f"{num_contributions(description):,.0f} contributions "
        f"({request.privacy_unit or levels[-1]})"
    )
    start: dict[str, Any] = {"kind": PLDA}
    last, unlisted = _last_statistic(description, number)
    alone = {"start": start | last, "learner": PLDA, "weighed": weighed, "ratio": total}
    if total < MIN_STATISTICS and steps < MIN_STEPS:
        return Pipeline(
            NONE,
            f"{what} are too few for anything to stand out of its noise: the features "
            "as they are cost no privacy. The config runs statistics all the same, to "
            "show what they would bring",
            **alone,
        )
    why = (
        f"what {what} have in common stands out: ratio {total:.2g}, of at least "
        f"{MIN_STATISTICS:g}"
    )
    compute, without = request.compute, None
    if request.privacy_unit == PERSON:
        without = "steps after them were not measured where people are protected"
    elif levels[0] != CLASS:
        without = f"episodes are drawn of a level that is called {CLASS!r}"
    elif steps < MIN_STEPS:
        without = f"episodes add nothing: {steps:.2g}, of at least {MIN_STEPS:g}"
    elif min(compute.most_steps, compute.total_episodes) < MEASURED_STEPS:
        without = f"fewer than {MEASURED_STEPS} steps are within the budget"
    if without is not None:
        return Pipeline(STATISTICS, f"{why}; {without}{unlisted}", **alone)
    return Pipeline(
        BOTH,
        f"{why}, and so do steps: {steps:.2g}, of at least {MIN_STEPS:g}",
        {**start, "dimensions": _DIMENSIONS},
        ratio=total,
        weighed=weighed,
    )


def _last_statistic(
    description: PlanDescription, number: int
) -> tuple[dict[str, Any], str]:
    """What statistics end with, in their config, and words on what it would take.

    Where an example alone in its class is protected together with its being there, only
    a public list may say how many means are released.
    """
    request, levels = description.request, description.population.level_names
    fewest, most = CLASSES_OF_MEANS
    is_few = fewest <= len(class_sizes(description)) <= min(most, number // 2)
    if not is_few or request.privacy_unit not in (None, levels[-1]):
        return {}, ""
    if request.neighboring_relation == "add_remove" and (
        not description.has_public_units
    ):
        said = f"; with a public list of {levels[0]} units, or under zero_out, "
        return {}, f"{said}statistics would end with a mean of each"
    return {"between": MEANS}, ""


def _of_numbers(description: PlanDescription, number: int) -> Pipeline:
    """The pipeline of regression."""
    config = StartConfig(kind=MIXED)
    own = 1 + min(config.slopes, number)
    entries = own * (own + 1) // 2 + 1
    line = 2 + config.powers * number
    ratio = min(
        ratio_of_moments(description, MIXED, entries),
        ratio_of_moments(description, MIXED, line, of_pairs=False),
    )
    if ratio < MIN_MIXED_RATIO:
        return Pipeline(
            STEPS,
            "the moments of a mixed model would not stand out of their noise as where "
            f"it was measured: ratio {ratio:.3g}, of at least {MIN_MIXED_RATIO:g}",
            ratio=ratio,
        )
    return Pipeline(
        MIXED_MODEL,
        f"the moments of a mixed model stand out: ratio {ratio:.3g}, of at least "
        f"{MIN_MIXED_RATIO:g}; if targets are about lines in the features and their "
        "powers",
        {"kind": MIXED, "slopes": own - 1},
        MIXED,
        ratio,
    )
