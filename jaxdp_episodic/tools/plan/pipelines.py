"""Which pipeline: private statistics, gradient steps, or both? A rule as measured.

Each of D directions of a covariance within classes gets a share of the pairs, and noise
whose largest eigenvalue is known (Wigner's semicircle). The ratio of the two says how
far directions stand out, from the sizes of the data alone:

    ratio = (pairs / D) / (noise sqrt(2 D)).

The limits below were read from runs on the glyphs and the schools; docs/plan.md has
them. They are rules of thumb for data alike, no theorems.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of
from jaxdp_episodic.accountant.questions.calibration import calibrate_noise_multiplier
from jaxdp_episodic.tools.plan.question import PlanDescription, PlanRequest
from jaxdp_episodic.trainer.config.training_features import (
    NONE,
    NUM_WAVELETS,
    ONNX,
    WAVELETS,
)
from jaxdp_episodic.trainer.config.training_parts import MIXED, PLDA
from jaxdp_episodic.trainer.config.training_start import (
    MEAN,
    StartConfig,
    contribution_norm,
    statistics_steps,
)

MIN_RATIO = 0.15  # above it statistics helped the steps that follow, docs/plan.md
MIN_MIXED_RATIO = 20.0  # the smallest at which a mixed model was measured, docs/plan.md
_MEASURED_STEPS = 300  # of the runs that the two were read from


class Pipeline(NamedTuple):
    """What is recommended."""

    name: str  # "steps", "statistics", "statistics, then steps" or "mixed model"
    reason: str  # a sentence
    start: dict[str, Any] | None = None  # of a training config; None: none
    # Kind of the learner, where statistics are all; else None.
    learner: str | None = None
    ratio: float = math.nan  # see the module; NaN where nothing was compared

    def left_for_steps(self, request: PlanRequest) -> PlanRequest:
        """Returns the question about gradient steps: with the epsilon left to them.

        As of one Gaussian mechanism with the rest of the squared distance: an
        *estimate*, by which designs are ranked. Training calibrates it exactly.
        """
        if self.start is None or self.learner is not None:
            return request
        config = StartConfig(**self.start)
        left = 1 - math.fsum(config.shares(False))
        step = _one(request)
        noise = _noise(step, request) / math.sqrt(left)
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
    if unit is not None and unit not in levels:
        return None
    if request.episode.ways is None:
        return _of_numbers(description, math.prod(shape))
    kind = train.get("features", {}).get("kind", NONE)
    if kind == ONNX:
        return None
    if kind == WAVELETS:
        number = NUM_WAVELETS * (shape[-1] if len(shape) == 3 else 1)
    elif len(shape) == 1:
        number = shape[0]
    else:
        return Pipeline(
            "steps",
            "images without fixed features leave all to gradient steps, at a high "
            "price (on the glyphs 0.69 at epsilon 1, where features have 0.97)",
        )
    ratio = _ratio(description, PLDA, number)
    if ratio < MIN_RATIO:
        return Pipeline(
            "steps",
            f"covariances of {number} features would drown in their noise: ratio "
            f"{ratio:.2g}, and statistics help from {MIN_RATIO:g} on; only the mean "
            "is taken off",
            {"kind": MEAN},
            ratio=ratio,
        )
    why = f"covariances of {number} features stand out: ratio {ratio:.2g}, of at least "
    if (
        min(request.compute.most_steps, request.compute.total_episodes)
        < _MEASURED_STEPS
    ):
        return Pipeline(
            "statistics",
            f"{why}{MIN_RATIO:g}; fewer than {_MEASURED_STEPS} steps are within the "
            "budget",
            {"kind": PLDA},
            PLDA,
            ratio,
        )
    return Pipeline(
        "statistics, then steps", f"{why}{MIN_RATIO:g}", {"kind": PLDA}, ratio=ratio
    )


def _of_numbers(description: PlanDescription, number: int) -> Pipeline:
    """The pipeline of regression."""
    config = StartConfig(kind=MIXED)
    own = 1 + min(config.slopes, number)
    entries = own * (own + 1) // 2 + 1
    line = 2 + config.powers * number
    ratio = min(
        _ratio(description, MIXED, entries),
        _ratio(description, MIXED, line, of_pairs=False),
    )
    if ratio < MIN_MIXED_RATIO:
        return Pipeline(
            "steps",
            "the moments of a mixed model would not stand out of their noise as where "
            f"it was measured: ratio {ratio:.3g}, of at least {MIN_MIXED_RATIO:g}",
            ratio=ratio,
        )
    return Pipeline(
        "mixed model",
        f"the moments of a mixed model stand out: ratio {ratio:.3g}, of at least "
        f"{MIN_MIXED_RATIO:g}; if targets are about lines in the features and their "
        "powers",
        {"kind": MIXED, "slopes": own - 1},
        MIXED,
        ratio,
    )


def _ratio(
    description: PlanDescription,
    kind: str,
    directions: int,
    *,
    of_pairs: bool = True,
) -> float:
    """Mean signal of a direction over the noise's largest eigenvalue."""
    request, population = description.request, description.population
    config = StartConfig(kind=kind)
    sizes = np.asarray(population.children_counts[1], np.float64)
    if request.privacy_unit == population.level_names[0]:
        number = float(np.count_nonzero(sizes > (1 if of_pairs else 0)))
    elif not of_pairs:
        number = float(sizes.sum())
    else:
        slots = sizes
        if request.neighboring_relation == "zero_out":
            slots = np.full_like(sizes, request.episode.population or sizes.max())
        number = float(np.sum(sizes * (sizes - 1) / (2 * np.maximum(slots - 1, 1))))
    index = 1 if of_pairs else 0
    step = _steps(request, population.level_names, config)[index]
    shares = config.shares(kind == MIXED)
    share = max(shares[1:]) if of_pairs else shares[0]
    noise = _noise(step, request) * contribution_norm(step) / math.sqrt(share)
    return number / directions / (noise * math.sqrt(2 * directions))


def _steps(request: PlanRequest, levels: tuple[str, ...], config: StartConfig) -> Any:
    return statistics_steps(
        levels,
        config,
        privacy_unit=request.privacy_unit or levels[-1],
        neighboring_relation=request.neighboring_relation,
    )


def _one(request: PlanRequest) -> Any:
    """A Gaussian mechanism: one statistic in which every example is by itself."""
    levels = ("class", "example")
    plain = dataclasses.replace(request, privacy_unit=None)
    return _steps(plain, levels, StartConfig(kind=MEAN))[0]


def _noise(step: Any, request: PlanRequest) -> float:
    """The noise of one such release within the whole target."""
    return float(
        calibrate_noise_multiplier(
            step, epsilon=request.epsilon, delta=request.delta, num_steps=1
        )
    )
