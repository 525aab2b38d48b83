"""Which design should I run? A search over designs within privacy and compute.

Every candidate is calibrated to the same (epsilon, delta). They are compared by

* ``signal_to_noise``: of a sum of ``m`` clipped contributions with noise of standard
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

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accounting.calibration import calibrate_noise_multiplier
from jaxdp_episodic.describe.population import Population
from jaxdp_episodic.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.describe.step import STEP, GaussianStep
from jaxdp_episodic.plan.plan_designs import (
    INDEPENDENT,
    SCHEMES,
    Design,
    class_designs,
    task_designs,
)

# Points of the grids; independent episodes cost a sum over their number.
_GRID, _COARSE_GRID = (18, 18), (6, 5)
# Of candidates within this share of the best, the one that computes least is chosen.
_NEARLY_BEST = 0.98


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is to be planned.

    Attributes:
      population: the tree of classes or tasks and their examples, two levels.
      epsilon: the target, > 0 and finite.
      delta: the target, in (0, 1).
      ways: classes of an episode; None if the tasks are units of the tree.
      examples: numbers of examples of each class or task in an episode, support and
        query, one or more to try. All examples are tried as well.
      privacy_unit: level of the protected unit; None: the last.
      neighboring_relation: "add_remove" or "replace_one".
      stated_size: a public lower bound of the number of examples of a class or task:
        the plan then rests on it alone. None: on the sizes of the population, which
        under ``add_remove`` are private, and so is the plan.
      episodes_per_step: the most that a step may have, on average.
      total_episodes: the most that the run may have.
      fewest_steps: of the run.
      most_steps: of the run.
      effective_dimension: number of directions in which noise hurts, those in which the
        loss is curved: far fewer than parameters. A guess, for `effective_steps`.
      alignment: in (0, 1], norm of the mean contribution in clip norms; a guess, for
        `effective_steps`.
      schemes: which ways to draw are compared: "poisson", "without replacement" and
        "independent", whose calibration takes longest by far.
      method: of the calibration.

    Raises:
      TypeError: a field of the wrong type.
      ValueError: a value out of range.
    """

    population: Population
    epsilon: float
    delta: float
    examples: tuple[int, ...]
    episodes_per_step: int
    total_episodes: int
    ways: int | None = None
    privacy_unit: str | None = None
    neighboring_relation: str = "add_remove"
    stated_size: int | None = None
    fewest_steps: int = 20
    most_steps: int = 10_000
    effective_dimension: int = 1_000
    alignment: float = 0.3
    schemes: tuple[str, ...] = SCHEMES
    method: str = "rdp"

    def __post_init__(self) -> None:
        if not isinstance(self.population, Population):
            raise TypeError(f"population must be a Population, got {self.population!r}")
        if self.population.num_levels != 2:
            raise NotImplementedError(
                "population must have two levels (classes or tasks, and examples), "
                f"got {self.population.num_levels}"
            )
        whole = (
            "episodes_per_step",
            "total_episodes",
            "fewest_steps",
            "most_steps",
            "effective_dimension",
        )
        for name in (*whole, "ways", "stated_size"):
            value = getattr(self, name)
            if value is not None or name in whole:
                object.__setattr__(self, name, _whole(name, value))
        sizes = _validation.integer_array("examples", list(self.examples), minimum=1)
        if sizes.ndim != 1 or not sizes.size:
            raise ValueError(f"examples must be some numbers, got {self.examples!r}")
        object.__setattr__(self, "examples", tuple(sizes.tolist()))
        for name, check in (
            ("epsilon", _validation.positive_array),
            ("delta", _validation.open_unit_array),
            ("alignment", _validation.positive_array),
        ):
            array = check(name, getattr(self, name))
            if array.ndim:
                raise ValueError(f"{name} must be one number, got {self!r}")
            object.__setattr__(self, name, float(array))
        if self.alignment > 1:
            raise ValueError(f"alignment must lie in (0, 1], got {self.alignment!r}")
        if self.ways is not None and self.ways > self.population.num_units(1):
            raise ValueError(
                f"ways must be at most the {self.population.num_units(1)} classes, "
                f"got {self.ways}"
            )
        if not isinstance(self.schemes, list | tuple) or not self.schemes:
            raise ValueError(f"schemes must be some of {SCHEMES}, got {self.schemes!r}")
        for scheme in self.schemes:
            _validation.choice("schemes", scheme, SCHEMES)
        if self.fewest_steps > self.most_steps:
            raise ValueError(
                "fewest_steps must be at most most_steps, got "
                f"{self.fewest_steps} and {self.most_steps}"
            )
        if self.total_episodes < self.fewest_steps:
            raise ValueError(
                "total_episodes must be at least fewest_steps, got "
                f"{self.total_episodes} and {self.fewest_steps}"
            )
        _validation.choice(
            "neighboring_relation", self.neighboring_relation, NEIGHBORING_RELATIONS
        )


class Plan(NamedTuple):
    """The candidates, one entry each in every (n,) array.

    Attributes:
      designs: the designs that were compared.
      design: place of the candidate's design among them.
      episodes_per_step: on average.
      num_steps: of the run.
      noise_multiplier: the smallest that keeps the run within the target.
      signal_to_noise: of a step; see the module.
      total_episodes: of the run, weighted by examples.
      effective_steps: an *estimate*; see `effective_steps`.
      is_on_front: no other candidate is at least as good in everything and better in
        something.
      recommended: place of the recommended candidate.
      left_out: why designs were left out, by name.
    """

    designs: tuple[Design, ...]
    design: np.ndarray
    episodes_per_step: np.ndarray
    num_steps: np.ndarray
    noise_multiplier: np.ndarray
    signal_to_noise: np.ndarray
    total_episodes: np.ndarray
    effective_steps: np.ndarray
    is_on_front: np.ndarray
    recommended: int
    left_out: dict[str, str]

    def best_of(self, design: int) -> int:
        """Returns the place of a design's candidate that is recommended within it."""
        return _recommended(
            np.where(self.design == design, self.effective_steps, -np.inf),
            self.total_episodes,
        )


def make_plan(request: PlanRequest) -> Plan:
    """Returns the candidates within privacy and compute, compared.

    Raises:
      ValueError: no design is possible; the message has the reasons.
    """
    names = request.population.level_names
    if request.ways is None:
        designs = task_designs(
            request.population,
            sizes=request.examples,
            stated_size=request.stated_size,
        )
    else:
        designs = class_designs(
            request.population,
            ways=request.ways,
            sizes=request.examples,
            stated_size=request.stated_size,
        )
    designs = [design for design in designs if design.scheme in request.schemes]
    unit = min(design.examples for design in designs)
    parts, kept, left_out = [], [], {}
    for design in designs:
        weight = design.examples / unit
        episodes, steps = _settings(request, design, weight)
        if not episodes.size:
            left_out[design.name] = (
                f"{request.fewest_steps} steps of one episode exceed total_episodes"
            )
            continue
        try:
            noise = _noise(request, design, episodes, steps)
        except (ValueError, NotImplementedError) as error:
            left_out[design.name] = str(error)
            continue
        good = np.isfinite(noise) & (noise > 0)
        place = np.full(int(good.sum()), len(kept))
        total = np.ceil(episodes * steps * weight)
        parts.append([place, *(a[good] for a in (episodes, steps, noise, total))])
        kept.append(design)
    if not parts or not sum(part[0].size for part in parts):
        reasons = "; ".join(f"{k}: {v}" for k, v in left_out.items())
        raise ValueError(
            f"no design of levels {names} is within epsilon={request.epsilon:g} and "
            f"the budget of episodes ({reasons or 'no finite noise'})"
        )
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    place, episodes, steps, noise, total = columns
    contributions = np.concatenate(
        [d.clipped_contributions(episodes[place == i]) for i, d in enumerate(kept)]
    )
    whole = np.array([d.clip_unit == STEP for d in kept])[place]
    worth = effective_steps(
        steps,
        noise_multiplier=noise,
        episodes_per_step=episodes,
        is_one_contribution=whole,
        effective_dimension=request.effective_dimension,
        alignment=request.alignment,
    )
    signal = contributions / noise
    return Plan(
        designs=tuple(kept),
        design=place,
        episodes_per_step=episodes,
        num_steps=steps,
        noise_multiplier=noise,
        signal_to_noise=signal,
        total_episodes=total,
        effective_steps=worth,
        is_on_front=_front(np.stack([-signal, -steps, total])),
        recommended=_recommended(worth, total),
        left_out=left_out,
    )


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


def _settings(
    request: PlanRequest, design: Design, weight: float
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of episodes a step and steps within the budget, the edges included."""
    budget = request.total_episodes / weight
    most = min(request.episodes_per_step, design.most_episodes)
    largest = int(min(most, budget / request.fewest_steps))
    if largest < 1:
        return np.zeros(0), np.zeros(0)
    sizes = _COARSE_GRID if design.scheme == INDEPENDENT else _GRID
    episodes = np.unique(np.rint(np.geomspace(1, largest, sizes[0])))
    grid = np.geomspace(request.fewest_steps, request.most_steps, sizes[1])
    pairs = set()
    for m in episodes.tolist():
        last = min(request.most_steps, int(budget // m))
        steps = {int(t) for t in np.rint(grid) if t <= last} | {last}
        pairs |= {(int(m), t) for t in steps if t >= request.fewest_steps}
    array = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _noise(
    request: PlanRequest, design: Design, episodes: np.ndarray, steps: np.ndarray
) -> np.ndarray:
    """The smallest noise of each setting, by one call for all."""
    if design.scheme == INDEPENDENT and np.unique(episodes).size > 1:
        # A block of settings takes as long as its longest sum: like to like.
        noise = np.empty(episodes.size)
        for number in np.unique(episodes):
            same = episodes == number
            noise[same] = _noise(request, design, episodes[same], steps[same])
        return noise
    sampling = design.sampling(episodes)
    step = GaussianStep(
        sampling,
        noise_multiplier=1.0,
        clip_unit=design.clip_unit,
        privacy_unit=request.privacy_unit,
        neighboring_relation=request.neighboring_relation,
        small_units="keep",
        population=None if request.stated_size is not None else request.population,
    )
    return np.asarray(
        calibrate_noise_multiplier(
            step,
            epsilon=request.epsilon,
            delta=request.delta,
            num_steps=steps,
            method=request.method,
        )
    )


def _recommended(worth: np.ndarray, total: np.ndarray) -> int:
    """The cheapest of those that are nearly the best."""
    near = np.flatnonzero(worth >= _NEARLY_BEST * worth.max())
    return int(near[np.lexsort((-worth[near], total[near]))[0]])


def _front(costs: np.ndarray) -> np.ndarray:
    """(n,) which columns of the (3, n) costs no other column dominates."""
    order = np.lexsort(costs[::-1])
    is_on_front = np.zeros(costs.shape[1], bool)
    front = np.zeros((costs.shape[0], 0))
    for place in order.tolist():
        point = costs[:, place : place + 1]
        if not np.any(np.all(front <= point, axis=0)):
            is_on_front[place] = True
            front = np.concatenate([front, point], axis=1)
    return is_on_front


def _whole(name: str, value: Any) -> int:
    array = _validation.integer_array(name, value, minimum=1)
    if array.ndim:
        raise ValueError(f"{name} must be one number, got {value!r}")
    return int(array)
