"""Which pipeline: a classifier, private statistics, episodes, some of these, or none?

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

import numpy as np

from jaxdp_episodic.accountant.describe.designs import CLASS
from jaxdp_episodic.accountant.describe.serialization import spec_to_dict
from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of
from jaxdp_episodic.tools.plan.question import PlanDescription, PlanRequest
from jaxdp_episodic.tools.plan.ratios import (
    CLASSIFIER_STEPS,
    MEASURED_STEPS,
    class_sizes,
    class_slots,
    classifier_rate,
    classifier_step,
    noise_of_one,
    one_release,
    ratio_between,
    ratio_of_classifier,
    ratio_of_moments,
    ratio_of_steps,
)
from jaxdp_episodic.trainer.config.training_features import (
    NUM_WAVELETS,
    ONNX,
    WAVELETS,
)
from jaxdp_episodic.trainer.config.training_parts import (
    CLASSIFIER,
    COSINE,
    LINEAR,
    MIXED,
    PLDA,
)
from jaxdp_episodic.trainer.config.training_start import MEAN, StartConfig

STEPS = "steps"
STATISTICS = "statistics"
BOTH = "statistics, then steps"
CLASSES = "classifier"
NONE = "do not train"
MIXED_MODEL = "mixed model"

MIN_RATIO = 0.15  # above it statistics helped the steps that follow, docs/plan.md
MIN_MIXED_RATIO = 20.0  # the smallest at which a mixed model was measured, docs/plan.md
MIN_BETWEEN = 0.5  # of few classes' means, above which statistics alone helped
MIN_CLASSIFIER = 4.0  # of a class's part of a classifier, likewise
MIN_STEPS = 2.0  # of a run of episodes, likewise
# Classes below which logits, and episodes that draw some of them, tell of these alone:
# with 12 typefaces statistics were better, with 18 kinds of texts neither was.
FEWEST_CLASSES = 15
_DIMENSIONS = 128  # of the space that steps after statistics were measured in
_CLASSIFIER_NORM = 0.5  # to which these clipped each example


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
    # Of a classifier: the share of the examples that a step draws.
    rate: float = 1.0

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

    def config(
        self, config: Mapping[str, Any], description: PlanDescription
    ) -> dict[str, Any]:
        """Returns the training config of a design as that of this pipeline."""
        if self.learner == CLASSIFIER:
            return self._of_classes(config, description)
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

    def _of_classes(
        self, config: Mapping[str, Any], description: PlanDescription
    ) -> dict[str, Any]:
        """A classifier's config: single examples are drawn and clipped."""
        population = description.population
        step = classifier_step(description, self.rate)
        sampling = spec_to_dict(step.design)
        sampling.pop("version")
        learner = config["learner"]
        evaluation = dict(config.get("evaluation", {}))
        if evaluation:
            evaluation.setdefault("ways", description.request.episode.ways)
        rows = class_slots(description).sum() * self.rate
        # A learning rate of the episodes' design is scaled for its number of steps.
        kept = {k: v for k, v in (description.train or {}).items() if k == "optimizer"}
        return {
            **config,
            **kept,
            "num_steps": CLASSIFIER_STEPS,
            "l2_clip_norm": _CLASSIFIER_NORM,
            "step": {
                **config["step"],
                "clip_unit": population.level_names[-1],
                "sampling": sampling,
            },
            "start": self.start,
            "learner": {
                "kind": CLASSIFIER,
                "shots": learner["shots"],
                "distance": learner.get("distance", COSINE),
            },
            "model": {"kind": LINEAR},
            "normalizer": float(f"{rows:.4g}"),
            **({"evaluation": evaluation} if evaluation else {}),
        }


def recommended_pipeline(description: PlanDescription) -> Pipeline | None:
    """Returns the pipeline for the sizes of a plan's data.

    None where the plan's file has no table ``train``, one with a ``start`` of its own,
    or with features by a network, whose number is not known before it runs; or a
    privacy unit other than a class (task) or an example.
    """
    request, train = description.request, description.train
    shape = description.feature_shape
    levels = description.population.level_names
    unit = request.privacy_unit
    if train is None or "start" in train or shape is None or len(levels) != 2:
        return None
    if unit not in (None, *levels):
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
    return _of_features(description, number)


def _of_features(description: PlanDescription, number: int) -> Pipeline:
    """The pipeline of classes with so many fixed features."""
    request, sizes = description.request, class_sizes(description)
    classes = int(np.count_nonzero(sizes))
    rate = classifier_rate(request, float(class_slots(description).sum()))
    within = ratio_of_moments(description, PLDA, number)
    between = ratio_between(description, number)
    steps = ratio_of_steps(description, number)
    weighed = {BOTH: (within, MIN_RATIO), STATISTICS: (between, MIN_BETWEEN)}
    if request.privacy_unit != description.population.level_names[0]:
        found = ratio_of_classifier(description, number, rate)
        weighed[CLASSES] = found, MIN_CLASSIFIER
    weighed[STEPS] = steps, MIN_STEPS
    stands_out = {name for name, (found, least) in weighed.items() if found >= least}

    def chosen(name: str, why: str, **more: Any) -> Pipeline:
        ratio = weighed[name][0] if name in weighed else within
        return Pipeline(name, why, ratio=ratio, weighed=weighed, **more)

    has_episodes = description.population.level_names[0] == CLASS
    few_steps = (
        min(request.compute.most_steps, request.compute.total_episodes) < MEASURED_STEPS
    )
    if BOTH in stands_out and classes > number / 4:
        why = f"covariances of {number} features stand out: ratio {within:.2g}, of at "
        why += f"least {MIN_RATIO:g}"
        if few_steps or not has_episodes:
            why += (
                f"; fewer than {MEASURED_STEPS} steps are within the budget"
                if has_episodes
                else f"; episodes are drawn of a level that is called {CLASS!r}"
            )
            return chosen(STATISTICS, why, start={"kind": PLDA}, learner=PLDA)
        start = {"kind": PLDA, "dimensions": _DIMENSIONS}
        return chosen(BOTH, why, start=start)
    if CLASSES in stands_out and classes >= FEWEST_CLASSES:
        start = PLDA if stands_out & {BOTH, STATISTICS} else MEAN
        return chosen(
            CLASSES,
            f"{classes} classes differ in {classes - 1} directions at most, and many "
            f"examples tell them apart: ratio {weighed[CLASSES][0]:.2g}, of at least "
            f"{MIN_CLASSIFIER:g}",
            start={"kind": start},
            learner=CLASSIFIER,
            rate=rate,
        )
    if STATISTICS in stands_out:
        return chosen(
            STATISTICS,
            f"the means of {classes} classes stand out: ratio {between:.2g}, of at "
            f"least {MIN_BETWEEN:g}; they are too few to learn more from",
            start={"kind": PLDA},
            learner=PLDA,
        )
    if STEPS in stands_out and classes >= FEWEST_CLASSES and not few_steps:
        return chosen(
            STEPS,
            f"covariances of {number} features would drown in their noise: ratio "
            f"{within:.2g}, and statistics help from {MIN_RATIO:g} on; episodes stand "
            f"out ({steps:.2g}); before them only the mean is taken off",
            start={"kind": MEAN},
        )
    return chosen(
        NONE,
        "nothing that could be learned stands out of its noise; release the features "
        "as they are, which costs no privacy. The config says what statistics would "
        "bring",
        start={"kind": PLDA},
        learner=PLDA,
    )


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
