"""How far what a pipeline adds up stands out of its noise, from sizes alone.

In units of what one contribution gives in the one direction in which it lies:

* statistics, of N contributions in D features: N / (noise sqrt(2 D)), all of the signal
  over the noise's largest eigenvalue (Wigner's semicircle). In how many directions the
  signal lies nobody knows beforehand; the largest of them have most of it, and the
  number of classes says little of that;
* episodes, of which so many are complete a step, T steps: complete sqrt(T) / (noise
  sqrt(D)) a run.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.schemes import PERSON
from jaxdp_episodic.accountant.questions.calibration import calibrate_noise_multiplier
from jaxdp_episodic.tools.plan.designs import POISSON, possible_designs
from jaxdp_episodic.tools.plan.question import PlanDescription, PlanRequest
from jaxdp_episodic.tools.plan.settings import (
    budgeted,
    calibrated_noise,
    complete_contributions,
)
from jaxdp_episodic.trainer.config.training_parts import MIXED, PLDA
from jaxdp_episodic.trainer.config.training_start import (
    MEAN,
    StartConfig,
    contribution_norm,
    statistics_steps,
)

MEASURED_STEPS = 300  # of the runs on episodes that the limits were read from


def ratio_of_moments(
    description: PlanDescription,
    kind: str,
    directions: int,
    *,
    of_pairs: bool = True,
) -> float:
    """Mean signal of a direction over the noise's largest eigenvalue."""
    request, config = description.request, StartConfig(kind=kind)
    number = num_pairs(description) if of_pairs else num_contributions(description)
    index = 1 if of_pairs else 0
    step = _steps(request, description.population.level_names, config)[index]
    shares = config.shares(kind == MIXED)
    share = max(shares[1:]) if of_pairs else shares[0]
    noise = noise_of_one(step, request) * contribution_norm(step) / math.sqrt(share)
    return number / directions / (noise * math.sqrt(2 * directions))


def ratio_of_statistics(description: PlanDescription, number: int) -> float:
    """The total covariance's trace over its noise's largest eigenvalue."""
    config = StartConfig(kind=PLDA)
    levels = description.population.level_names
    step = _steps(description.request, levels, config)[-1]
    noise = noise_of_one(step, description.request) * contribution_norm(step)
    noise /= math.sqrt(config.shares(False)[-1])
    return num_contributions(description) / (noise * math.sqrt(2 * number))


def ratio_of_steps(description: PlanDescription, number: int) -> float:
    """What complete episodes add up to over a run, over its noise; 0 if none can be."""
    request, episode = description.request, description.request.episode
    best = 0.0
    try:
        designs = possible_designs(
            description.population,
            ways=episode.ways,
            sizes=episode.examples,
            stated_size=episode.population,
        )
    except ValueError:
        return best
    for design in designs:
        if design.scheme != POISSON or not design.is_multistage:
            continue
        episodes, steps = budgeted(request.compute, design, 1.0)
        if not episodes.size:
            continue
        index = int(np.argmax(episodes * np.minimum(steps, MEASURED_STEPS)))
        one = slice(index, index + 1)
        try:
            asked = description.population, design, episodes[one]
            complete = complete_contributions(request, *asked)
            noise = calibrated_noise(request, *asked, steps[one])
        except (ValueError, NotImplementedError):
            continue
        signal = float(complete[0]) * math.sqrt(steps[index])
        best = max(best, signal / (float(noise[0]) * math.sqrt(number)))
    return best


def num_contributions(description: PlanDescription) -> float:
    """Protected units that have examples: each gives one contribution.

    People who are not counted are at least as many as their bounds allow.
    """
    request, sizes = description.request, class_sizes(description)
    unit, bounds = request.privacy_unit, request.people
    if unit == description.population.level_names[0]:
        return float(np.count_nonzero(sizes))
    if unit != PERSON:
        return float(sizes.sum())
    if known := description.people or request.num_people:
        return float(known)
    assert bounds is not None  # or people are listed, which `PlanRequest` asks for
    most = math.prod(np.maximum(list(bounds.numbers.values()), 1).tolist())
    return float(math.ceil(sizes.sum() / most))


def num_pairs(description: PlanDescription) -> float:
    """Contributions of pairs: of examples, of classes that have one, or of people."""
    unit, sizes = description.request.privacy_unit, class_sizes(description)
    if unit == description.population.level_names[0]:
        return float(np.count_nonzero(sizes > 1))
    if unit == PERSON:
        return num_contributions(description) / 2
    slots = sizes  # what is drawn from in each class: under zero_out public slots
    if description.request.neighboring_relation == "zero_out":
        public = description.request.episode.population
        slots = np.full_like(sizes, public or sizes.max())
    return float(np.sum(sizes * (sizes - 1) / (2 * np.maximum(slots - 1, 1))))


def class_sizes(description: PlanDescription) -> np.ndarray:
    """Returns the examples of each class, (C,)."""
    return np.asarray(description.population.children_counts[1], np.float64)


def _steps(request: PlanRequest, levels: tuple[str, ...], config: StartConfig) -> Any:
    return statistics_steps(
        levels,
        config,
        privacy_unit=request.privacy_unit or levels[-1],
        neighboring_relation=request.neighboring_relation,
    )


def one_release(request: PlanRequest) -> Any:
    """A Gaussian mechanism: one statistic in which every example is by itself."""
    levels = ("class", "example")
    plain = dataclasses.replace(
        request, privacy_unit=None, people=None, num_people=None
    )
    return _steps(plain, levels, StartConfig(kind=MEAN))[0]


def noise_of_one(step: Any, request: PlanRequest) -> float:
    """The noise of one such release within the whole target."""
    return float(
        calibrate_noise_multiplier(
            step, epsilon=request.epsilon, delta=request.delta, num_steps=1
        )
    )
