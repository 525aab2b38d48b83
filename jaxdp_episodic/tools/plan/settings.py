"""Numbers of episodes and steps to try of a design, and the noise that they take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.step import STEP, GaussianStep
from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of
from jaxdp_episodic.accountant.questions.calibration import calibrate_noise_multiplier
from jaxdp_episodic.tools.plan.designs import BLOCKS, EPOCHS, INDEPENDENT, Design
from jaxdp_episodic.tools.plan.question import Compute, PlanRequest
from jaxdp_episodic.trainer.draw.complete import Needs
from jaxdp_episodic.trainer.draw.sampler import EpisodeSampler
from jaxdp_episodic.trainer.run.checks import level_of_slots

# Independent episodes cost a sum over their number, and every length of an epoch has a
# distribution of its own: seconds for a few points.
_SLOW = (INDEPENDENT, EPOCHS)
_GRID = (18, 18)  # numbers of episodes a step, and of steps, that are tried
_COARSE_GRID = (6, 5)  # the same of slow schemes
_PEOPLE_GRID = (4, 3)  # of a person in many episodes: seconds for each
# Relative, of a candidate's noise, from above: a twentieth of what _NEARLY_BEST tells
# apart. What is trained is calibrated on its own.
_NOISE_TOLERANCE = 1e-3
# Of candidates whose effective steps are at least this share of the best one's, the one
# with the fewest episodes is recommended: the estimate is no better than that.
_NEARLY_BEST = 0.98


class Candidates(NamedTuple):
    """Settings of one design, (n,) each; see `plan.Plan`."""

    design: Design
    episodes: np.ndarray
    steps: np.ndarray
    noise: np.ndarray
    total: np.ndarray
    worth: np.ndarray
    complete: np.ndarray


def budgeted(
    compute: Compute, design: Design, weight: float, *, of_people: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs of episodes a step and steps within the budget, with its edges.

    Fewer of what takes long to calibrate, as people do who are in many episodes.
    """
    budget = compute.total_episodes / weight
    most = min(compute.episodes_per_step, design.most_episodes)
    largest = int(min(most, budget / compute.fewest_steps))
    if largest < 1:
        return np.zeros(0), np.zeros(0)
    sizes = _COARSE_GRID if design.scheme in _SLOW else _GRID
    if of_people and design.scheme != BLOCKS:
        sizes = _PEOPLE_GRID
    episodes = np.unique(np.rint(np.geomspace(1, largest, sizes[0])))
    grid = np.geomspace(compute.fewest_steps, compute.most_steps, sizes[1])
    pairs = set()
    for m in episodes.tolist():
        last = min(compute.most_steps, int(budget // m))
        steps = {int(t) for t in np.rint(grid) if t <= last} | {last}
        pairs |= {(int(m), t) for t in steps if t >= compute.fewest_steps}
    array = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    return array[:, 0].astype(np.float64), array[:, 1]


def calibrated_noise(
    request: PlanRequest,
    population: Population,
    design: Design,
    episodes: np.ndarray,
    steps: np.ndarray,
) -> np.ndarray:
    """Returns the smallest noise of each setting, to 1e-3, by one call for all."""
    return np.asarray(
        calibrate_noise_multiplier(
            planned_step(request, population, design, episodes),
            epsilon=request.epsilon,
            delta=request.delta,
            num_steps=steps,
            method=request.method,
            tolerance=_NOISE_TOLERANCE,
        )
    )


def complete_contributions(
    request: PlanRequest, population: Population, design: Design, episodes: np.ndarray
) -> np.ndarray:
    """Returns how many contributions of a step are complete, on average; (n,).

    *Exact*, but of blocks of people all are counted: what an episode draws there is not
    said. See `EpisodeSampler.complete_units`.

    Raises:
      ValueError: sizes that contradict the public ones.
    """
    if design.scheme == BLOCKS:
        return episodes
    numbers, place = np.unique(episodes, return_inverse=True)
    if design.clip_unit != STEP:  # what one episode draws does not depend on others
        numbers = numbers[-1:]
    needs = Needs.of(request.episode.shots, request.episode.ways is None)
    found = []
    for number in numbers:
        step = planned_step(request, population, design, number)
        sampler = EpisodeSampler(
            step.design,
            population,
            clip_unit=str(step.clip_unit),
            population_is_accounted=step.population is not None,
            privacy_unit=step.privacy_unit,
            slots_of=level_of_slots(step),
        )
        found.append(sampler.complete_units(needs))
    if design.clip_unit == STEP:
        return np.array([units.complete for units in found])[place]
    return found[0].share * episodes


def recommended(worth: np.ndarray, total: np.ndarray) -> int:
    """Returns the index of the cheapest of those that are nearly the best."""
    near = np.flatnonzero(worth >= _NEARLY_BEST * worth.max())
    return int(near[np.lexsort((-worth[near], total[near]))[0]])


def in_epochs(
    request: PlanRequest,
    population: Population,
    design: Design,
    coins: Candidates | None,
    settings: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns settings of a design by epochs, and what it gains on coins there.

    Epochs are of whole numbers of steps, two or more. With coins to compare with, those
    settings are taken at which they do best for their numbers of episodes, if epochs
    cost less at the one of them that is recommended: the same batches, as many steps,
    by the request's method.

    Raises:
      ValueError: epochs cost as much, or more, or no epoch has two steps.
    """
    episodes, steps = settings
    if coins is not None and coins.steps.size:
        order = np.argsort(-coins.worth, kind="stable")
        order = np.append(recommended(coins.worth, coins.total), order)
        _, first = np.unique(coins.episodes[order], return_index=True)
        best = order[np.sort(first)][: len(np.unique(episodes))]
        episodes, steps = coins.episodes[best], coins.steps[best]
    length = np.ceil(design.most_episodes / episodes)
    length, steps = (a[length > 1] for a in (length, steps))
    if not length.size:
        raise ValueError("everybody takes part in every step")
    episodes = design.most_episodes / length
    if coins is None or not coins.steps.size:
        return episodes, steps, ""
    first = episodes[:1], steps[:1]
    noise = calibrated_noise(request, population, coins.design, *first)
    step = planned_step(request, population, design, first[0], noise)
    asked = {"delta": request.delta, "method": request.method}
    spent = float(np.asarray(epsilon_of(step, num_steps=first[1], **asked))[0])
    where = f"{first[0][0]:,.4g} episodes, {steps[0]:,} steps and noise {noise[0]:.4g}"
    compared = f"at {where} epochs cost epsilon {spent:.4g}, coins {request.epsilon:g}"
    if not spent < request.epsilon:
        raise ValueError(compared)
    return episodes, steps, compared


def planned_step(
    request: PlanRequest,
    population: Population,
    design: Design,
    episodes: np.ndarray | float,
    noise: np.ndarray | float = 1.0,
) -> GaussianStep:
    """Returns the step of a design with so many episodes, a number or an array."""
    in_blocks = design.scheme == BLOCKS
    rests_on_sizes = request.episode.population is None and not in_blocks
    return GaussianStep(
        design.sampling(episodes),
        noise_multiplier=noise,
        clip_unit=design.clip_unit,
        privacy_unit=request.privacy_unit,
        people=None if in_blocks else request.people,
        neighboring_relation=request.neighboring_relation,
        small_units="keep",
        population=population if rests_on_sizes else None,
    )
