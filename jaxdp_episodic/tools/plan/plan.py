"""Which design should I run? A search over designs within privacy and compute.

Every candidate is calibrated to the same (epsilon, delta). They are compared by

* ``signal_to_noise``: of a sum of ``m`` complete contributions (the others give nothing
  or little: `EpisodeSampler.complete_units`) with noise of standard
  deviation ``noise_multiplier`` clip norms in every direction, the ratio
  ``m / noise_multiplier``: what the step would have if all contributions had the clip
  norm and agreed. With the whole step as one contribution, ``m = 1``.
* ``num_steps``: more updates, each noisier;
* ``total_episodes``: what has to be computed. An episode with more examples than the
  smallest that is tried counts by its examples.

A candidate that another one beats in one of the three and equals or beats in the others
is not on the front. To choose from the front one needs to know how much noise learning
bears; `effective_steps` is an estimate of it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.serialization import spec_to_dict
from jaxdp_episodic.accountant.describe.step import STEP
from jaxdp_episodic.files.table_file import writing
from jaxdp_episodic.tools.plan.designs import BLOCKS, EPOCHS, Design, possible_designs
from jaxdp_episodic.tools.plan.question import (
    PlanDescription,
    PlanRequest,
    learning_rate,
)
from jaxdp_episodic.tools.plan.settings import (
    Candidates,
    budgeted,
    calibrated_noise,
    complete_contributions,
    in_epochs,
    planned_step,
    recommended,
)
from jaxdp_episodic.trainer.draw.complete import Needs
from jaxdp_episodic.trainer.run.contributions import (
    LEAST_IN_RUN,
    LEAST_SHARE,
    better_settings,
)

TABLE = "plan.csv"
CONFIG = "recommended.toml"


class Plan(NamedTuple):
    """The candidates, one entry each in every (n,) array."""

    designs: tuple[Design, ...]  # the designs that were compared
    design: np.ndarray  # index of the candidate's design among them
    episodes_per_step: np.ndarray  # on average
    complete_per_step: np.ndarray  # contributions that are complete, on average
    num_steps: np.ndarray  # of the run
    # The smallest that keeps the run within the target, or up to 1e-3 more, relative.
    noise_multiplier: np.ndarray
    signal_to_noise: np.ndarray  # of a step; see the module
    total_episodes: np.ndarray  # of the run, weighted by examples
    effective_steps: np.ndarray  # an *estimate*; see `effective_steps`
    # No other candidate is at least as good in everything and better in something.
    is_on_front: np.ndarray
    recommended: int  # index of the recommended candidate
    left_out: dict[str, str]  # why designs were left out, by name
    gains: dict[str, str]  # what epochs gain on coins, by the name of the design

    def best_of(self, design: int) -> int:
        """Returns the index of a design's candidate that is recommended within it."""
        return recommended(
            np.where(self.design == design, self.effective_steps, -np.inf),
            self.total_episodes,
        )


def make_plan(request: PlanRequest, population: Population) -> Plan:
    """Returns the candidates within privacy and compute, compared.

    Args:
      request: the question.
      population: the tree of classes or tasks and their examples, two levels.
    """
    compute, learning, episode = request.compute, request.learning, request.episode
    designs = [
        design
        for design in possible_designs(
            population,
            ways=episode.ways,
            sizes=episode.examples,
            stated_size=episode.population,
            num_people=request.num_people,
        )
        if design.scheme in request.schemes
    ]
    unit = min(design.examples for design in designs)
    parts: list[Candidates] = []
    left_out, gains = {}, {}
    for design in designs:
        weight = design.examples / unit
        of_people = request.people is not None
        episodes, steps = budgeted(compute, design, weight, of_people=of_people)
        if not episodes.size:
            left_out[design.name] = (
                f"{compute.fewest_steps} steps of one episode exceed total_episodes"
            )
            continue
        try:
            if design.scheme == EPOCHS:
                coins = next((c for c in parts if c.design.is_rival_of(design)), None)
                episodes, steps, gain = in_epochs(
                    request, population, design, coins, (episodes, steps)
                )
                gains |= {design.name: gain} if gain else {}
            complete = complete_contributions(request, population, design, episodes)
            some = complete * steps >= LEAST_IN_RUN
            if not some.any():
                share = float(np.max(complete / episodes))
                left_out[design.name] = (
                    f"{np.max(complete * steps):.2g} episodes in the run would be "
                    "complete, fewer than one"
                    + _better(request, population, design, float(episodes[0]), share)
                )
                continue
            episodes, steps, complete = (a[some] for a in (episodes, steps, complete))
            noise = calibrated_noise(request, population, design, episodes, steps)
        except (ValueError, NotImplementedError) as error:
            left_out[design.name] = str(error)
            continue
        good = np.isfinite(noise) & (noise > 0)
        episodes, steps, noise, complete = (
            a[good] for a in (episodes, steps, noise, complete)
        )
        is_one = design.clip_unit == STEP  # complete or not, as a whole
        worth = effective_steps(
            steps * complete if is_one else steps,
            noise_multiplier=noise,
            episodes_per_step=episodes if is_one else complete,
            is_one_contribution=is_one,
            effective_dimension=learning.effective_dimension,
            alignment=learning.alignment,
        )
        total = np.ceil(episodes * steps * weight)
        parts.append(Candidates(design, episodes, steps, noise, total, worth, complete))
    kept = tuple(part.design for part in parts)
    if not sum(part.steps.size for part in parts):
        reasons = "; ".join(f"{k}: {v}" for k, v in left_out.items())
        raise ValueError(
            f"no design of levels {population.level_names} is within epsilon="
            f"{request.epsilon:g} and the budget of episodes "
            f"({reasons or 'no finite noise'})"
        )
    columns = [
        np.concatenate(column) for column in zip(*(p[1:] for p in parts), strict=True)
    ]
    episodes, steps, noise, total, worth, complete = columns
    signal = complete / noise
    return Plan(
        designs=kept,
        design=np.repeat(np.arange(len(parts)), [part.steps.size for part in parts]),
        episodes_per_step=episodes,
        complete_per_step=complete,
        num_steps=steps,
        noise_multiplier=noise,
        signal_to_noise=signal,
        total_episodes=total,
        effective_steps=worth,
        is_on_front=_front(np.stack([-signal, -steps, total])),
        recommended=recommended(worth, total),
        left_out=left_out,
        gains=gains,
    )


def advice(plan: Plan, request: PlanRequest, population: Population) -> list[str]:
    """Returns what to change where few contributions of the recommended are complete.

    A sentence; none where a third or more are.
    """
    best = plan.recommended
    design = plan.designs[int(plan.design[best])]
    episodes = float(plan.episodes_per_step[best])
    drawn = 1.0 if design.clip_unit == STEP else episodes
    share = float(plan.complete_per_step[best]) / drawn
    if share >= LEAST_SHARE:
        return []
    said = _better(request, population, design, episodes, share)
    return [f"few of the recommended design's contributions are complete{said}"]


def _better(
    request: PlanRequest,
    population: Population,
    design: Design,
    episodes: float,
    share: float,
) -> str:
    """What else would make more contributions complete, as the end of a sentence."""
    step = planned_step(request, population, design, episodes)
    needs = Needs.of(request.episode.shots, request.episode.ways is None)
    return better_settings(share, step, population, needs)


def effective_steps(
    num_steps: Any,
    *,
    noise_multiplier: Any,
    episodes_per_step: Any,
    is_one_contribution: Any,
    effective_dimension: int,
    alignment: float,
) -> np.ndarray:
    """Returns how many steps without any noise a run is worth; an *estimate*.

    On a smooth loss a gradient step of the best length gains
    ``|g|^2 / (|g|^2 + E|noise|^2)`` of what it would gain without noise. With
    contributions of the clip norm whose mean has norm ``alignment`` (``a``), over
    ``m`` episodes and ``d`` directions, the ratio of the squared norms of signal and
    noise is ``a^2 / ((1 - a^2)/m + d noise_multiplier^2 / m^2)``. Clipping the mean of
    all episodes as one contribution makes its norm 1, the noise ``d
    noise_multiplier^2``. Curvature, adaptive optimizers and shrinking gradients are
    not in it: it ranks designs, it does not foretell accuracy.

    Args:
      num_steps: (n,).
      noise_multiplier: (n,).
      episodes_per_step: (n,).
      is_one_contribution: (n,) whether the whole step is clipped at once.
      effective_dimension: ``d``, directions in which noise hurts.
      alignment: in (0, 1].

    Returns:
      (n,) at most ``num_steps``.

    Reference: Bottou, Curtis, Nocedal (2018), arXiv:1606.04838v3, Lemma 4.4 at its best
    step length.
    """
    m, noise = np.asarray(episodes_per_step, np.float64), np.asarray(noise_multiplier)
    drawn = (1 - alignment**2) / m
    added = effective_dimension * noise**2
    each = alignment**2 / (drawn + added / m**2)
    share = alignment**2 / (alignment**2 + drawn)
    once = share / (1 - share + added)
    ratio = np.where(is_one_contribution, once, each)
    return np.asarray(num_steps * ratio / (1 + ratio))


def training_config(
    plan: Plan, description: PlanDescription, candidate: int | None = None
) -> dict[str, Any] | None:
    """Returns a candidate as a training config, the recommended one by default.

    None if the plan's file has no data or no table ``train``, and of episodes in blocks
    of people: a plan does not say what one draws within its block.
    """
    train, request = description.train, description.request
    index = plan.recommended if candidate is None else candidate
    design = plan.designs[int(plan.design[index])]
    if train is None or description.data is None or design.scheme == BLOCKS:
        return None
    episodes = float(plan.episodes_per_step[index])
    num_steps = int(plan.num_steps[index])
    sampling = spec_to_dict(design.sampling(episodes))
    sampling.pop("version")
    config = config_around(description, num_steps, design.clip_unit, sampling)
    meant_for, rate = request.learning.learning_rate_steps, learning_rate(train)
    if meant_for is not None and rate is not None:
        scaled = rate * math.sqrt(meant_for / num_steps)
        rounded = float(f"{scaled:.4g}")
        config["optimizer"] = {**train["optimizer"], "learning_rate": rounded}
    if design.clip_unit == request.privacy_unit and "normalizer" not in config:
        # The number of protected units is private; the mean that was planned with is
        # the public estimate that the trainer asks for.
        config["normalizer"] = episodes
    return config


def config_around(
    description: PlanDescription, num_steps: int, clip_unit: str, sampling: Any
) -> dict[str, Any]:
    """Returns a training config of a plan's file, with steps that draw and clip so."""
    request, train = description.request, description.train or {}
    people = {}
    if request.people is not None:
        numbers = request.people.numbers.items()
        people = {"people": {name: int(number) for name, number in numbers}}
    return {
        "version": 1,
        "epsilon": request.epsilon,
        "delta": request.delta,
        "num_steps": num_steps,
        **{k: v for k, v in train.items() if k != "learner"},
        "data": description.data,
        "step": {
            "clip_unit": clip_unit,
            "privacy_unit": request.privacy_unit,
            "neighboring_relation": request.neighboring_relation,
            "sampling": sampling,
        },
        **people,
        "learner": {"shots": request.episode.shots, **train.get("learner", {})},
    }


def write_table(path: Path, plan: Plan) -> None:
    """Writes all candidates as CSV; whole or not at all."""
    first, last = map(Plan._fields.index, ("episodes_per_step", "is_on_front"))
    numbers = Plan._fields[first : last + 1]
    names = ("design", "clip_unit", "examples", *numbers, "is_recommended")
    columns = [np.asarray(getattr(plan, name)).tolist() for name in numbers]
    rows = []
    for index, cells in enumerate(zip(*columns, strict=True)):
        design = plan.designs[int(plan.design[index])]
        what = (design.name, design.clip_unit, design.examples)
        row = (*what, *cells, index == plan.recommended)
        rows.append(dict(zip(names, row, strict=True)))
    with writing(path, dict.fromkeys(names, "string")) as write:
        write(rows)


def _front(costs: np.ndarray) -> np.ndarray:
    """(n,) which columns of the (3, n) costs no other column dominates."""
    order = np.lexsort(costs[::-1])
    is_on_front = np.zeros(costs.shape[1], bool)
    front = np.zeros((costs.shape[0], 0))
    for index in order.tolist():
        point = costs[:, index : index + 1]
        if not np.any(np.all(front <= point, axis=0)):
            is_on_front[index] = True
            front = np.concatenate([front, point], axis=1)
    return is_on_front
