"""A search over designs of training within a privacy and a compute budget.

All candidates have the same (epsilon, delta); docs/plan.md says how they are compared.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic._progress import ProgressBar
from jaxdp_episodic.accountant.describe.designs import (
    CLASS,
    EPISODE,
    EXAMPLE,
    GroupedClasses,
    IndependentEpisodes,
    MultistageSampling,
    PeopleBlocks,
    Poisson,
    RandomAllocation,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.population import Population, bounds_with_copies
from jaxdp_episodic.accountant.describe.step import STEP, GaussianStep, Sampling
from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of
from jaxdp_episodic.accountant.questions.bands import choose_bands
from jaxdp_episodic.accountant.questions.calibration import calibrate_noise_multiplier
from jaxdp_episodic.files.table_file import writing
from jaxdp_episodic.tools.plan import question
from jaxdp_episodic.trainer.draw.complete import Needs, complete_units
from jaxdp_episodic.trainer.draw.sampler import EpisodeSampler
from jaxdp_episodic.trainer.run import checks

_MAX_INDEPENDENT = 10**6  # episodes per step; no pool of classes bounds them


@dataclass(frozen=True, eq=False)
class Design:
    """One way to draw the episodes of a step, for any number of episodes."""

    request: question.PlanRequest
    population: Population  # of two levels: classes or tasks, and examples
    name: str  # in tables and pictures
    scheme: str  # one of `SCHEMES`
    clip_unit: str
    examples: int  # drawn from each unit, support and query together
    is_multistage: bool  # False if all examples of a drawn unit take part
    most_episodes: int  # the largest number that a step can have

    def poisson_of(self, other: Design) -> bool:
        """Whether this draws and clips the same as ``other``, by Poisson sampling."""
        ours = self.scheme, self.clip_unit, self.examples, self.is_multistage
        theirs = other.clip_unit, other.examples, other.is_multistage
        return ours == (question.POISSON, *theirs)

    def sampling(self, number: Any) -> Sampling:
        """Returns the sampling for a mean number of episodes, or an array of them."""
        request, episode = self.request, self.request.episode
        rate = np.minimum(np.asarray(number) / self.most_episodes, 1.0)[()]
        if self.scheme == question.BLOCKS:
            assert request.num_people is not None
            return PeopleBlocks(
                num_people=request.num_people,
                people_per_block=_people_of(request, self.population, self.examples),
                episodes=Poisson(EPISODE, sampling_probability=rate),
            )
        ways, everyone = episode.ways, self.population.num_units(1)
        unit, example = _levels(self.population, ways)
        level = unit if ways is None else EPISODE
        examples = WithoutReplacement(
            example, size=self.examples, population=episode.population
        )
        if self.scheme == question.INDEPENDENT:
            units = WithoutReplacement(unit, size=ways or 1, population=everyone)
            one = MultistageSampling(units, examples)
            return IndependentEpisodes(one, num_episodes=_whole(number))
        scheme: Any = Poisson(level, sampling_probability=rate)
        if self.scheme == question.EPOCHS:
            length = _whole(self.most_episodes / np.asarray(number, np.float64))
            scheme = RandomAllocation(level, steps_per_epoch=length)
        elif self.scheme == question.FIXED:
            known = everyone if ways is None else None
            scheme = WithoutReplacement(level, size=_whole(number), population=known)
        if ways is None:
            return MultistageSampling(scheme, examples)
        return GroupedClasses(
            num_classes=everyone, ways=ways, episodes=scheme, examples=examples
        )

    def step(self, episodes: Any, noise: Any = 1.0) -> GaussianStep:
        """Returns the step for a mean number of episodes, or an array of them."""
        request, in_blocks = self.request, self.scheme == question.BLOCKS
        uses_sizes = request.episode.population is None and not in_blocks
        sampling, owned = self.sampling(episodes), None if in_blocks else request.people
        unit, people = bounds_with_copies(
            sampling, request.privacy_unit, owned, request.copies
        )
        return GaussianStep(
            sampling,
            noise_multiplier=noise,
            clip_unit=self.clip_unit,
            privacy_unit=unit,
            people=people,
            neighboring_relation=request.neighboring_relation,
            small_units="keep",
            population=self.population if uses_sizes else None,
        )

    def noise(self, episodes: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Returns the noise multiplier of each setting, calibrated to 1e-3."""
        request = self.request
        found = calibrate_noise_multiplier(
            self.step(episodes),
            epsilon=request.epsilon,
            delta=request.delta,
            num_steps=steps,
            method=request.method,
            tolerance=_NOISE_TOLERANCE,
        )
        return np.asarray(found)

    def complete(self, episodes: np.ndarray) -> np.ndarray:
        """Returns (2, n): mean and maximum of complete contributions per step."""
        if self.scheme == question.BLOCKS:
            return np.stack([episodes, episodes])
        numbers, place = np.unique(episodes, return_inverse=True)
        if self.clip_unit != STEP:  # an episode's draw does not depend on the number
            numbers, place = numbers[-1:], 0 * place
        found = []
        for number in numbers:
            step = self.step(number)
            sampler = EpisodeSampler(
                step.design,
                self.population,
                clip_unit=str(step.clip_unit),
                population_is_accounted=step.population is not None,
                privacy_unit=step.privacy_unit,
                slots_of=checks.level_of_slots(step),
            )
            found.append(complete_units(sampler, self._needs))
        means = np.array([(units.complete, units.most) for units in found])[place].T
        drawn = episodes if self.clip_unit == STEP else found[0].drawn
        return means * episodes / drawn

    def better(self, episodes: float, share: float) -> str:
        """Returns the end of a sentence: settings with more complete contributions."""
        step = self.step(episodes)
        return checks.better_settings(share, step, self.population, self._needs)

    @property
    def _needs(self) -> Needs:
        episode = self.request.episode
        return Needs.of(episode.shots, episode.ways is None)


def possible_designs(
    request: question.PlanRequest, population: Population
) -> list[Design]:
    """Returns the designs of N-way episodes from a pool of classes, or of tasks."""
    episode, sizes = request.episode, sorted(set(request.episode.examples))
    unit, _ = _levels(population, episode.ways)
    most = population.num_units(1) // (episode.ways or 1)
    if episode.ways is None:
        rows = [
            (f"Poisson, each {unit} clipped", question.POISSON, unit),
            ("Poisson, whole step clipped", question.POISSON, STEP),
            (f"epochs, each {unit} clipped", question.EPOCHS, unit),
            (f"fixed number, each {unit} clipped", question.FIXED, unit),
        ]
    else:
        rows = [
            ("grouped classes, Poisson episodes", question.POISSON, EPISODE),
            ("grouped classes, epochs", question.EPOCHS, EPISODE),
            ("grouped classes, fixed number", question.FIXED, EPISODE),
        ]
    rows.append(("independent episodes", question.INDEPENDENT, EPISODE))
    several = len(sizes) > 1
    everyone = int(np.max(population.children_counts[1], initial=1))
    everyone = max(everyone, episode.population or 0)
    designs = []
    # The last number of examples is that of a whole class: no second stage.
    for size in (*(size for size in sizes if size < everyone), everyone):
        title = f", {size} examples" * several if size < everyone else ", all examples"
        for name, scheme, clip in rows:
            limit = _MAX_INDEPENDENT if scheme == question.INDEPENDENT else most
            what = scheme, clip, size, size < everyone, limit
            designs.append(Design(request, population, name + title, *what))
    listed = request.num_people or 0
    for size in sizes:
        people = _people_of(request, population, size)
        if people and listed >= people:
            name = f"blocks of {people:,} people" + f", {size} examples" * several
            what = question.BLOCKS, EPISODE, size, True, listed // people
            designs.append(Design(request, population, name, *what))
    return designs


def _people_of(request: question.PlanRequest, population: Population, size: int) -> int:
    """The fewest people who own, on average, what an episode draws; 0 if none do."""
    sizes, bound = population.children_counts[1], request.episode.population
    fewest = bound or int(np.min(sizes, initial=2**53))
    return math.ceil(size * (request.num_people or 0) / fewest) if fewest else 0


def _levels(population: Population, ways: int | None) -> tuple[str, str]:
    """Names of the two levels of a tree; other trees are refused."""
    if population.num_levels != 2:
        raise NotImplementedError(
            "population must have two levels (classes or tasks, and examples), "
            f"got {population.num_levels}; leave out the upper ones"
        )
    if ways is not None:
        if ways > population.num_units(1):
            raise ValueError(
                f"ways must be at most the {population.num_units(1)} classes, "
                f"got {ways}"
            )
        return CLASS, EXAMPLE
    if not population.level_names:
        raise ValueError(
            "population must name its levels, for example levels = ['school', 'pupil']"
        )
    task, example = (*population.level_names, EXAMPLE)[:2]
    return task, example


def _whole(number: Any) -> Any:
    return np.rint(number).astype(np.int64)[()]


TABLE = "plan.csv"
CONFIG = "recommended.toml"
# Schemes whose accounting takes seconds for a few points: independent episodes need a
# sum over their number, random allocation a distribution for each length of an epoch.
_SLOW = (question.INDEPENDENT, question.EPOCHS)
_GRID = (18, 18)  # tried numbers of episodes per step, and of steps
_COARSE_GRID = (6, 5)  # the same for slow schemes
_PEOPLE_GRID = (4, 3)  # the same if a person is in many episodes: seconds per point
# Relative excess of a candidate's noise: a twentieth of the difference that
# _NEARLY_BEST ignores. Training calibrates its noise again.
_NOISE_TOLERANCE = 1e-3
# Of the noise that the optimizer keeps: bands' estimate is no better than that.
_LEAST_GAIN = 0.05
# Among candidates with at least this share of the best one's effective steps, the one
# with the fewest episodes is recommended: the estimate is not more precise than that.
_NEARLY_BEST = 0.98


class Candidate(NamedTuple):
    """A setting of a design within the budgets."""

    design: Design
    episodes_per_step: float  # on average
    complete_per_step: float  # complete contributions, on average
    num_steps: int  # of the run
    # The smallest that keeps the run within the target, or up to 1e-3 more, relative.
    noise_multiplier: float
    signal_to_noise: float  # of a step
    total_episodes: float  # of the run, weighted by examples
    effective_steps: float  # an *estimate*; see `effective_steps`


class Plan(NamedTuple):
    """The candidates of all designs, compared."""

    candidates: list[Candidate]  # design by design
    # No other candidate is at least as good in everything and better in something.
    is_on_front: list[bool]
    recommended: Candidate
    left_out: dict[str, list[str]]  # why designs were left out -> their names
    gains: dict[str, str]  # design name -> what random allocation gains over Poisson

    @property
    def best(self) -> list[Candidate]:
        """The recommended candidate of each design."""
        groups = itertools.groupby(self.candidates, lambda one: one.design)
        return [recommended(list(of_design)) for _, of_design in groups]


def make_plan(
    request: question.PlanRequest, population: Population, console: Any = None
) -> Plan:
    """Returns the candidates within the privacy and compute budgets, compared."""
    designs = possible_designs(request, population)
    designs = [design for design in designs if design.scheme in request.schemes]
    smallest = min(design.examples for design in designs)
    candidates, left_out, gains = list[Candidate](), dict[str, list[str]](), {}
    with ProgressBar(console, "designs", len(designs)) as bar:
        for number, design in enumerate(designs):
            bar.show(number, text=design.name)
            weight = design.examples / smallest
            try:
                settings, gain = budgeted(design, weight), ""
                if design.scheme == question.EPOCHS:
                    forms = [c for c in candidates if c.design.poisson_of(design)]
                    settings, gain = in_epochs(design, settings, forms)
                candidates += _candidates(design, *settings, weight)
            except (ValueError, NotImplementedError) as error:
                left_out.setdefault(str(error), []).append(design.name)
                continue
            gains |= {design.name: gain} if gain else {}
    if not candidates:
        reasons = "; ".join(f"{why}, {who}" for why, who in left_out.items())
        raise ValueError(
            f"no design of levels {population.level_names} is within epsilon="
            f"{request.epsilon:g} and the budget of episodes "
            f"({reasons or 'no finite noise'})"
        )
    costs = [(-c.signal_to_noise, -c.num_steps, c.total_episodes) for c in candidates]
    is_on_front, front = [False] * len(costs), np.empty((0, 3))
    for index in sorted(range(len(costs)), key=costs.__getitem__):
        if not np.any(np.all(front <= costs[index], axis=1)):
            is_on_front[index] = True
            front = np.append(front, [costs[index]], axis=0)
    return Plan(candidates, is_on_front, recommended(candidates), left_out, gains)


def _candidates(
    design: Design, episodes: np.ndarray, steps: np.ndarray, weight: float
) -> list[Candidate]:
    """The candidates among the settings of a design: those with a finite noise."""
    complete, most = design.complete(episodes)
    some = most * steps >= checks.LEAST_IN_RUN
    if not some.any():
        share = float(np.max(complete / episodes))
        better = design.better(float(episodes[0]), share)
        raise ValueError(
            f"about {np.max(complete * steps):.2g} episodes in the run are complete, "
            f"fewer than one{better}"
        )
    episodes, steps, complete = (a[some] for a in (episodes, steps, complete))
    noise = design.noise(episodes, steps)
    good = np.isfinite(noise) & (noise > 0)
    columns = episodes, steps, complete, noise
    episodes, steps, complete, noise = (a[good] for a in columns)
    is_one = design.clip_unit == STEP  # the step is one contribution
    what = (steps * complete, episodes) if is_one else (steps, complete)
    worth = effective_steps(*what, noise, design.request.learning, is_one=is_one)
    total = np.ceil(episodes * steps * weight)
    columns = episodes, complete, steps, noise, complete / noise, total, worth
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [Candidate(design, *row) for row in rows]


def budgeted(design: Design, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns a grid of episodes per step and steps, up to the edge of the budget."""
    compute = design.request.compute
    budget = compute.total_episodes / weight
    most = min(compute.episodes_per_step, design.most_episodes)
    largest = int(min(most, budget / compute.fewest_steps))
    if largest < 1:
        raise ValueError(
            f"{compute.fewest_steps} steps of one episode exceed total_episodes"
        )
    sizes = _COARSE_GRID if design.scheme in _SLOW else _GRID
    if design.request.people is not None and design.scheme != question.BLOCKS:
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


def recommended(candidates: list[Candidate]) -> Candidate:
    """Returns the candidate with the fewest episodes among the best."""
    most = max(one.effective_steps for one in candidates)
    near = [one for one in candidates if one.effective_steps >= _NEARLY_BEST * most]
    return min(near, key=lambda one: (one.total_episodes, -one.effective_steps))


def in_epochs(
    design: Design, settings: tuple[np.ndarray, np.ndarray], poisson: list[Candidate]
) -> tuple[tuple[np.ndarray, np.ndarray], str]:
    """Returns settings for random allocation, and what it gains over Poisson there."""
    episodes, steps = settings
    if poisson:  # its candidates choose the settings
        ranked = sorted(poisson, key=lambda one: -one.effective_steps)
        best: dict[float, Candidate] = {}  # the best with each number of episodes
        for one in (recommended(poisson), *ranked):
            best.setdefault(one.episodes_per_step, one)
        few = list(best.values())[: len(np.unique(episodes))]
        episodes = np.array([one.episodes_per_step for one in few])
        steps = np.array([one.num_steps for one in few])
    length = np.ceil(design.most_episodes / episodes)
    length, steps = (a[length > 1] for a in (length, steps))
    if not length.size:
        raise ValueError("every unit takes part in every step")
    episodes = design.most_episodes / length
    if not poisson:
        return (episodes, steps), ""
    request, first = design.request, (episodes[:1], steps[:1])
    noise = poisson[0].design.noise(*first)
    step = design.step(first[0], noise)
    spent = epsilon_of(
        step, num_steps=first[1], delta=request.delta, method=request.method
    )
    spent = float(np.asarray(spent)[0])
    compared = (
        f"at {first[0][0]:,.4g} episodes, {steps[0]:,} steps and noise {noise[0]:.4g} "
        f"epochs cost epsilon {spent:.4g}, Poisson sampling {request.epsilon:g}"
    )
    if not spent < request.epsilon:
        raise ValueError(compared)
    return (episodes, steps), compared


def advice(plan: Plan) -> list[str]:
    """Returns a sentence on what to change if few contributions are complete."""
    best = plan.recommended
    drawn = 1.0 if best.design.clip_unit == STEP else best.episodes_per_step
    share = best.complete_per_step / drawn
    if share >= checks.LEAST_SHARE:
        return []
    better = best.design.better(best.episodes_per_step, share)
    return [f"few of the recommended design's contributions are complete{better}"]


def effective_steps(
    num_steps: np.ndarray,
    episodes_per_step: np.ndarray,
    noise_multiplier: np.ndarray,
    learning: question.Learning,
    *,
    is_one: bool,
) -> np.ndarray:
    """Returns the number of noiseless steps that gain as much; an *estimate*."""
    # On a smooth loss a gradient step of the best length gains
    # |g|^2 / (|g|^2 + E|noise|^2) of what it would gain without noise: Bottou, Curtis,
    # Nocedal (2018), arXiv:1606.04838v3, Lemma 4.4. Contributions have the clip norm,
    # and their mean the norm ``alignment``. If the mean is clipped as one contribution,
    # its norm is 1. Curvature, adaptive optimizers and shrinking gradients are left
    # out: the estimate ranks designs and does not predict accuracy.
    m, aligned = episodes_per_step, learning.alignment**2
    added = learning.effective_dimension * noise_multiplier**2
    with np.errstate(divide="ignore"):  # without a complete episode nothing is gained
        drawn = (1 - aligned) / m
        if is_one:
            share = aligned / (aligned + drawn)
            ratio = share / (1 - share + added)
        else:
            ratio = aligned / (drawn + added / m**2)
    return num_steps * ratio / (1 + ratio)


def training_config(
    plan: Plan, description: question.PlanDescription
) -> dict[str, Any] | None:
    """Returns the training config of the recommended candidate, if there can be one."""
    train, request, best = description.train, description.request, plan.recommended
    design, num_steps = best.design, best.num_steps
    # A plan does not say what an episode draws within a block of people.
    if train is None or description.data is None or design.scheme == question.BLOCKS:
        return None
    sampling = _table_of(design.sampling(best.episodes_per_step))
    config = config_around(description, num_steps, design.clip_unit, sampling)
    meant_for = request.learning.learning_rate_steps
    rate = question.learning_rate(train)
    if meant_for is not None and rate is not None:
        scaled = rate * math.sqrt(meant_for / num_steps)
        rounded = float(f"{scaled:.4g}")
        config["optimizer"] = {**train["optimizer"], "learning_rate": rounded}
    if design.clip_unit == request.privacy_unit and "normalizer" not in config:
        # The number of protected units is private. The trainer needs a public
        # estimate, for which the planned mean serves.
        config["normalizer"] = best.episodes_per_step
    return config


def config_around(
    description: question.PlanDescription, num_steps: int, clip_unit: str, sampling: Any
) -> dict[str, Any]:
    """Returns a training config of a plan's file, with this sampling and clip unit."""
    request, train = description.request, description.train or {}
    people = {}
    if request.people is not None:
        numbers = request.people.numbers.items()
        people = {"people": {name: int(number) for name, number in numbers}}
    return {
        **{"version": 1, "epsilon": request.epsilon, "delta": request.delta},
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
    """Writes all candidates as CSV, atomically."""
    rows = []
    for one, is_on_front in zip(plan.candidates, plan.is_on_front, strict=True):
        numbers, design = one._asdict(), one.design
        numbers["design"] = design.name
        row = {"design": "", "clip_unit": design.clip_unit, "examples": design.examples}
        last = {"is_on_front": is_on_front, "is_recommended": one is plan.recommended}
        rows.append(row | numbers | last)
    with writing(path, dict.fromkeys(rows[0], "string")) as write:
        write(rows)


def with_bands(config: dict[str, Any], plan: Plan) -> tuple[dict[str, Any], str]:
    """Returns the config of the recommended design, with bands if they pay, and why."""
    own = [key for key in ("noise", "adaptive") if key in config]
    if own:
        return config, f"correlated noise: not weighed, as the file has {own[0]!r}"
    best, target = plan.recommended, plan.recommended.design.request
    table = choose_bands(
        best.design.step(best.episodes_per_step),
        epsilon=target.epsilon,
        delta=target.delta,
        num_steps=best.num_steps,
    )
    if len(table.bands) == 1:
        return config, (
            "correlated noise: not for you, no level can be split into groups that are "
            "at least as large as a draw and hold every protected unit whole"
        )
    index = 1 + int(np.argmin(table.relative_noise[1:]))
    count, level = int(table.bands[index]), table.levels[index]
    found = (
        f"{count} groups of {level!r} leave {table.relative_noise[index]:.2f} of the "
        f"noise that an optimizer keeps over {table.horizon:g} steps"
    )
    if table.relative_noise[index] > 1 - _LEAST_GAIN:
        return config, f"correlated noise: not for you, at best {found}"
    step = {**config["step"], "sampling": _table_of(table.steps[index].design)}
    noise = {"kind": "banded", "bands": count, "groups": level}
    noise["horizon"] = table.horizon
    multiplier = f"its noise multiplier is {table.noise_multiplier[index]:.4g}"
    weighed = f"correlated noise: {found}; {multiplier}, all others are without"
    return {**config, "step": step, "noise": noise}, weighed


def _table_of(sampling: Any) -> dict[str, Any]:
    """A sampling as the table of a config."""
    return {k: v for k, v in sampling.to_dict().items() if k != "version"}
