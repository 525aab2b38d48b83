"""How far what a pipeline adds up stands out of its noise, from sizes alone.

With D features, C classes and n examples of them, all in units of what one of D
directions of a vector, or of a covariance, bears:

* within classes: (pairs / D) / (noise sqrt(2 D)), the noise's largest eigenvalue
  (Wigner's semicircle) below; what is learned serves every class, new ones too;
* between classes: C classes differ in C - 1 directions at most, so their means have
  (n / min(C - 1, D)) / (noise sqrt(2 D));
* steps on examples, T of them: (n / C) rate sqrt(T) / (noise sqrt(D)) a class;
* steps on episodes: complete episodes sqrt(T) / (noise sqrt(D)) a run.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.schemes import MultistageSampling, Poisson
from jaxdp_episodic.accountant.describe.step import GaussianStep
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
CLASSIFIER_STEPS = 200  # likewise of a classifier


def classifier_step(description: PlanDescription, rate: float) -> GaussianStep:
    """Returns the step of a classifier: each example by a coin, clipped alone."""
    request = description.request
    classes, example = description.population.level_names
    slots = None
    if request.neighboring_relation == "zero_out":
        slots = int(class_slots(description)[0])
    return GaussianStep(
        MultistageSampling(
            Poisson(classes, sampling_probability=1.0),
            Poisson(example, sampling_probability=rate, population=slots),
        ),
        noise_multiplier=1.0,
        clip_unit=example,
        privacy_unit=request.privacy_unit or example,
        neighboring_relation=request.neighboring_relation,
        people=request.people,
    )


def ratio_of_moments(
    description: PlanDescription,
    kind: str,
    directions: int,
    *,
    of_pairs: bool = True,
) -> float:
    """Mean signal of a direction over the noise's largest eigenvalue."""
    request, population = description.request, description.population
    config = StartConfig(kind=kind)
    sizes = class_sizes(description)
    if request.privacy_unit == population.level_names[0]:
        number = float(np.count_nonzero(sizes > (1 if of_pairs else 0)))
    elif not of_pairs:
        number = float(sizes.sum())
    else:
        slots = class_slots(description)
        number = float(np.sum(sizes * (sizes - 1) / (2 * np.maximum(slots - 1, 1))))
    index = 1 if of_pairs else 0
    step = _steps(request, population.level_names, config)[index]
    shares = config.shares(kind == MIXED)
    share = max(shares[1:]) if of_pairs else shares[0]
    noise = noise_of_one(step, request) * contribution_norm(step) / math.sqrt(share)
    return number / directions / (noise * math.sqrt(2 * directions))


def ratio_between(description: PlanDescription, number: int) -> float:
    """The same of the means of classes, in the total covariance."""
    request, population = description.request, description.population
    config, sizes = StartConfig(kind=PLDA), class_sizes(description)
    classes = int(np.count_nonzero(sizes))
    is_class = request.privacy_unit == population.level_names[0]
    total = float(classes if is_class else sizes.sum())
    step = _steps(request, population.level_names, config)[-1]
    noise = noise_of_one(step, request) * contribution_norm(step)
    noise /= math.sqrt(config.shares(False)[-1])
    directions = max(min(classes - 1, number), 1)
    return total / directions / (noise * math.sqrt(2 * number))


def ratio_of_classifier(
    description: PlanDescription, number: int, rate: float
) -> float:
    """What a class's examples add up to over a run, over its noise."""
    request, sizes = description.request, class_sizes(description)
    noise = calibrate_noise_multiplier(
        classifier_step(description, rate),
        epsilon=request.epsilon,
        delta=request.delta,
        num_steps=CLASSIFIER_STEPS,
        method=request.method,
    )
    drawn = rate * math.sqrt(CLASSIFIER_STEPS) * float(np.mean(sizes[sizes > 0]))
    return drawn / (float(noise) * math.sqrt(number))


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


def classifier_rate(request: PlanRequest, examples: float) -> float:
    """A share of the examples a step that costs as many as the budget of episodes."""
    compute, episode = request.compute, request.episode
    each = (episode.ways or 1) * episode.examples[0]
    wanted = compute.total_episodes * each / (CLASSIFIER_STEPS * max(examples, 1.0))
    return float(f"{min(wanted, 1.0):.2g}")


def class_sizes(description: PlanDescription) -> np.ndarray:
    """Returns the examples of each class, (C,)."""
    return np.asarray(description.population.children_counts[1], np.float64)


def class_slots(description: PlanDescription) -> np.ndarray:
    """Returns what is drawn from in each class, (C,): under zero_out public slots."""
    request, sizes = description.request, class_sizes(description)
    if request.neighboring_relation != "zero_out":
        return sizes
    return np.full_like(sizes, request.episode.population or sizes.max())


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
    plain = dataclasses.replace(request, privacy_unit=None)
    return _steps(plain, levels, StartConfig(kind=MEAN))[0]


def noise_of_one(step: Any, request: PlanRequest) -> float:
    """The noise of one such release within the whole target."""
    return float(
        calibrate_noise_multiplier(
            step, epsilon=request.epsilon, delta=request.delta, num_steps=1
        )
    )
