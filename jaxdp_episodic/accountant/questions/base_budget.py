"""One budget for runs that are designed one after another: units of a base step.

A run costs ``(units, floor)`` if, for both directions and every ``g >= 0``,

    H_g(run) <= floor + (1 - floor) H_g(base, units times),

the base being one step, composed with itself. Units and floors add up, also where each
run is chosen in view of all that was released before; see `BaseBudget`. Where
`GdpPrice` describes a run by a Gaussian, this describes it by steps like its own: runs
of few steps, whose losses are rare and large, then pay for what they are.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import epoch_scheme
from jaxdp_episodic.accountant.describe.step import (
    AnyStep,
    ComposedSteps,
    GaussianStep,
    OneStep,
)
from jaxdp_episodic.accountant.methods.adaptive.comparison import least_number
from jaxdp_episodic.accountant.methods.adaptive.graph import ONCE
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.calibration import calibrate_num_steps
from jaxdp_episodic.accountant.questions.dominating_pair import runs_of
from jaxdp_episodic.accountant.questions.gdp_budget import (
    FloorBudget,
    check_number,
    checked_floor,
)
from jaxdp_episodic.accountant.questions.strategy_prices import worst_of, worst_units
from jaxdp_episodic.accountant.questions.worst_path import undominated_paths

# Most units of a price: a base of so little cost is no unit.
MOST_UNITS = 10**6


@dataclass(frozen=True)
class BasePrice:
    """What a run takes of a `BaseBudget`.

    Attributes:
      units: whole number >= 0, of base steps that the run is at most.
      floor: in [0, 1), the probability of what they leave out.
    """

    units: int
    floor: float

    def __post_init__(self) -> None:
        if type(self.units) is not int or not self.units >= 0:
            raise ValueError(
                "units must be a whole number >= 0, got "
                f"{_validation.shown(self.units)}"
            )
        check_number(self, "floor", below=1)

    @property
    def amount(self) -> int:
        """The units."""
        return self.units


@dataclass(frozen=True)
class BaseBudget(FloorBudget):
    """A total (epsilon, delta), and how many units of a base step runs may take of it.

    For every adaptive choice of runs, each with a price that was fixed before it began,
    with ``sum units_j <= units`` and ``sum floor_j <= floors``, all that they release
    together has ``delta(eps) <= floors + (1 - floors) delta_units(eps)`` for every
    eps >= 0, an *upper bound*, ``delta_units`` being that of the base taken ``units``
    times; and so is (epsilon, delta)-private. A run that ends early gives nothing back.

    Attributes:
      base: one step or release of single settings, as `base_price` takes it.
      method: how delta of the base is computed; see `jaxdp_episodic.delta`.

    Raises:
      NotImplementedError, TypeError: see `base_price`.
      ValueError: a value out of range; a base that does not fit once, or always.

    Reference: proven in docs/proofs.md, "One budget for a data set"; that filters are
    free where all runs are compositions of one is known (Regehr et al. (2026),
    arXiv:2602.15815).
    """

    base: OneStep
    epsilon: float
    delta: float
    floors: float
    method: str = "exact"

    def __post_init__(self) -> None:
        _ = _base_run(self.base)
        self._check_total()
        api.check_method(self.method)
        _ = self.units

    @functools.cached_property
    def units(self) -> int:
        """How many units all runs together may have, rounded down."""
        left = (self.delta - self.floors) / (1 - self.floors) * (1 - 1e-12)
        found = calibrate_num_steps(
            self.base, epsilon=self.epsilon, delta=left, method=self.method
        )
        units = int(found)
        if not 1 <= units <= MOST_UNITS:
            raise ValueError(
                f"base must fit 1 to {MOST_UNITS:,} times into epsilon="
                f"{self.epsilon:g} at delta={self.delta:g}, got one that fits "
                f"{units:,} times"
            )
        return units

    @property
    def total(self) -> int:
        """The units."""
        return self.units

    def _price_within(self, amount: int, floor: float) -> BasePrice:
        return BasePrice(amount, floor)


def base_price(
    step: AnyStep | AdaptiveRun, base: OneStep, *, num_steps: Any = None, floor: Any
) -> BasePrice:
    """Returns the price of a run in units of a base, fixed before the run begins.

    The smallest whole number of units that is proven to be enough, which is a certified
    *upper end*: the run from above and the base from below are put on one lattice of
    losses, where both are linear in g between its points, and are compared at all of
    them, in both directions. Steps of the base itself cost their number, and no floor.

    Args:
      step: the step, or a run made by `compose`; all fields scalars. Of an
        `AdaptiveRun` it is the price of any way to choose.
      base: one step or release, of one setting and one path, each time anew.
      num_steps: whole number >= 0; of a composed run as of `epsilon`.
      floor: in [1e-100, 1); it has to be above the rounding, about 1e-11.

    Raises:
      NotImplementedError: a base of several steps, of an epoch, of several paths or
        theorems; steps without certified ends.
      TypeError: an argument of the wrong type.
      ValueError: a base that loses nothing; a run that no number of units up to a
        million describes at this floor; fields that are arrays.
    """
    lost = checked_floor(floor)
    unit = _base_run(base)
    if isinstance(step, AdaptiveRun):
        step, num_steps = worst_of(step, num_steps), None
    if isinstance(step, AdaptiveRun):
        return _price(worst_units(step, unit, floor=lost, most=MOST_UNITS), lost)
    runs, shape = api.checked_runs(step, num_steps)
    if shape:
        raise ValueError(f"a price is of one run, got settings of shape {shape}")
    number = _number_of_base_steps(step, base, num_steps)
    if number is not None:
        return BasePrice(number, 0.0)
    # Each theorem holds by itself: that of the fewest units counts.
    return _price(min(_of_paths(run, unit, lost) for run in runs), lost)


def _price(units: float, floor: float) -> BasePrice:
    if units > MOST_UNITS:
        raise ValueError(
            f"no number of base steps up to {MOST_UNITS:,} describes the run at "
            f"floor={floor:g}: a larger floor may do, or a base more like it"
        )
    return BasePrice(int(units), floor)


def _number_of_base_steps(step: AnyStep, base: OneStep, num_steps: Any) -> int | None:
    """How many base steps a run consists of; None where it has others."""
    times = 1 if num_steps is None else int(num_steps)
    if not isinstance(step, ComposedSteps):
        return times if step == base else None
    if any(one != base for one in step.steps):
        return None
    return times * sum(int(count) for count in step.counts)


def _of_paths(run: Run, unit: Run, floor: float) -> float:
    """The units of the dearest path; inf where they are too many."""
    run.refuse("pld")
    run = run.take_paths(undominated_paths(run))
    paths = [run.take_paths(np.array([i])) for i in range(run.num_paths)]
    return max(
        least_number(ONCE, [path], unit, floor=floor, most=MOST_UNITS) for path in paths
    )


def _base_run(base: Any) -> Run:
    """The base, taken once, as its one pair.

    With several theorems a step has several pairs, each sound. A price that compares
    with one of them, and a guarantee that takes another, would not be.
    """
    if isinstance(base, ComposedSteps):
        raise NotImplementedError("base must be one step or release, got several")
    api.check_step(base)
    if base.shape:
        raise ValueError(f"base must be of one setting, got shape {base.shape}")
    if isinstance(base, GaussianStep) and epoch_scheme(base.design) is not None:
        raise NotImplementedError(
            "base must be drawn anew each time, got a step of an epoch"
        )
    runs = runs_of(base, np.asarray(1))
    if len(runs) != 1 or runs[0].num_paths != 1:
        raise NotImplementedError(
            "base must have one pair, got one of several paths or theorems (a "
            "population, or people): state the step of the dearest path"
        )
    runs[0].refuse("pld")
    if float(runs[0].log_kept()[0]) == -math.inf or not runs[0].losses:
        raise ValueError("base must have noise, got one that may lose everything")
    return runs[0]
