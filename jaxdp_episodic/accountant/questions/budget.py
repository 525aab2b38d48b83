"""The privacy budget of a run: its noise, its number of steps, and when it ends."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import epoch_scheme
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    compose,
    steps_owed,
)
from jaxdp_episodic.accountant.numerics.roots import largest_within
from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of, rdp as rdp_of
from jaxdp_episodic.accountant.questions.calibration import (
    calibrate_noise_multiplier,
    calibrate_num_steps,
)
from jaxdp_episodic.accountant.questions.dominating_pair import runs_of

# Largest number of steps: the device numbers them with 32-bit integers.
_MOST_STEPS = 2**31 - 1
# Number of steps whose epsilons are computed together.
_STEPS_AHEAD = 4096
# Relative tolerance of a calibration, and of the sum of shares.
_SHARES = 1e-7
# Range of inverse noise multipliers of the search with steps before.
_INVERSE_NOISE = (1e-12, 1e12)
# Rényi orders at which two budgets are compared.
_ORDERS = (2.0, 8.0)


class BudgetExhaustedError(RuntimeError):
    """The next step would exceed the target epsilon."""


@dataclass(frozen=True, eq=False)
class PrivacyBudget:
    """A step, a target, and the number of steps of the run. See `plan_budget`.

    Attributes:
      step: the step with its final noise multiplier; all fields are scalars.
      epsilon: the target, nats; inf for a run without privacy.
      delta: the target, in (0, 1).
      num_steps: number of steps of the run, including those of ``before``; known before
        the first one.
      permitted_steps: the largest number of steps whose epsilon is within the target,
        >= ``num_steps``; equal to ``num_steps`` with steps ``before``. For epoch
        schemes, only whole epochs beyond ``num_steps``.
      before: other steps, with their noise, with which the run begins, each once.
        Epochs begin after them.
    """

    step: GaussianStep
    epsilon: float
    delta: float
    num_steps: int
    permitted_steps: int
    before: tuple[GaussianStep, ...] = ()

    def __post_init__(self) -> None:
        _validation.instance("before", self.before, tuple, "a tuple of GaussianSteps")
        for name, steps in (("step", [self.step]), ("before", self.before)):
            for one in steps:
                _validation.instance(name, one, GaussianStep, "GaussianSteps only")
        _validation.one("epsilon", self.epsilon, _validation.nonnegative_array)
        _validation.one("delta", self.delta, _validation.open_unit_array)
        for name in ("num_steps", "permitted_steps"):
            _validation.whole_number(name, getattr(self, name), minimum=0)

    def spent(self, num_steps: Any) -> np.ndarray | np.float64:
        """Returns epsilon after that many steps (*upper bound*; shape of the input).

        For epoch schemes it is that of the steps to be charged, see `owed`.
        """
        return epsilon_of(self.run(self.owed(num_steps)), delta=self.delta)

    def owed(self, num_steps: Any) -> np.ndarray | np.int64:
        """Returns the steps to be charged if the run ends after that many.

        An epoch that has begun is charged as a whole, unless the end was planned.
        """
        taken = _validation.integer_array("num_steps", num_steps, minimum=0)
        first = len(self.before)
        drawn = np.maximum(taken - first, 0)
        owed = steps_owed(self.step, drawn, self.num_steps - first)
        return (np.minimum(taken, first) + owed)[()]

    @property
    def planned(self) -> int | None:
        """The number of steps if their cost depends on its being fixed; else None."""
        return self.num_steps if epoch_scheme(self.step.design) is not None else None

    def run(self, num_steps: Any) -> ComposedSteps:
        """Returns the first ``num_steps`` steps as a composed run."""
        taken = _validation.integer_array("num_steps", num_steps, minimum=0)
        first = ((one, np.clip(taken - i, 0, 1)) for i, one in enumerate(self.before))
        return compose(*first, (self.step, np.maximum(taken - len(self.before), 0)))

    @property
    def phases(self) -> tuple[tuple[GaussianStep, int], ...]:
        """The different steps in the order of the run, and their counts."""
        rest = self.num_steps - len(self.before)
        return *((step, 1) for step in self.before), (self.step, rest)

    @property
    def takes_steps(self) -> bool:
        """False if the run consists of the steps ``before`` only."""
        return self.num_steps > len(self.before)

    @property
    def is_private(self) -> bool:
        """False if the run has no finite epsilon."""
        return bool(np.isfinite(self.epsilon))


def public_budget(budget: PrivacyBudget) -> PrivacyBudget | None:
    """Returns the budget without private sizes; None if the costs depend on them."""
    step = budget.step
    if step.population is None or step.neighboring_relation != "add_remove":
        return budget
    if any(one.population is not None for one in budget.before):
        return None
    if not budget.takes_steps:
        return budget  # the step itself is not run
    try:
        public = dataclasses.replace(step, population=None)
        bare = dataclasses.replace(budget, step=public)
        # Compare the Rényi divergences of the step itself, not epsilons, which may be 0
        # for all sizes, or negligible compared with the steps before.
        first = len(budget.before)
        owed = int(budget.owed(first + 1)) - first
        ours, theirs = (
            rdp_of(compose((one.step, owed)), _ORDERS) for one in (budget, bare)
        )
        same = np.allclose(ours, theirs, rtol=1e-9, atol=0.0)
    except (ValueError, NotImplementedError):  # the sampling lacks public sizes
        return None
    return bare if same else None


class SpentAhead:
    """Epsilon after each step of a run, computed for many steps at a time."""

    def __init__(self, budget: PrivacyBudget) -> None:
        self._budget = budget
        runs = runs_of(budget.step, np.ones(()))
        self._is_slow = not all(loss.compiles for run in runs for loss in run.losses)
        self._spent = functools.lru_cache(maxsize=1)(self._of_group)

    def at(self, step: int) -> float:
        """Returns epsilon after that many steps, at least 1 (*upper bound*)."""
        # Group the same steps wherever a run begins: the last digit depends on what is
        # computed together, and a resumed run must report the same.
        first, number = step - (step - 1) % _STEPS_AHEAD, _STEPS_AHEAD
        if self._is_slow:
            # The next term of a sequence that grows by a fifth, at least by 1.
            first, number = 1, 1
            while first < step:
                first += max(first // 5, 1)
            first = max(step, min(first, self._budget.num_steps))
        last = max(step, min(first + number - 1, self._budget.num_steps))
        return float(self._spent(first, last)[max(step - first, 0)])

    def _of_group(self, first: int, last: int) -> np.ndarray:
        """Epsilon after each number of steps from ``first`` to ``last``."""
        owed = self._budget.owed(np.arange(first, last + 1))
        kept, before = np.unique(owed), len(self._budget.before)
        if before:
            kept = kept[(kept <= before) | (kept % 10 == 0) | (kept == kept[-1])]
        return np.asarray(self._budget.spent(kept))[np.searchsorted(kept, owed)]


def plan_budget(
    step: GaussianStep,
    *,
    epsilon: Any,
    delta: Any,
    num_steps: Any = None,
    before: Sequence[tuple[GaussianStep, float]] = (),
) -> PrivacyBudget:
    """Returns the budget of a run: noise for its steps, or steps for its noise.

    With ``num_steps`` the noise multiplier of ``step`` is replaced by the smallest one
    whose epsilon after that many steps is within the target. Without it, the step keeps
    its noise and the run has as many steps as the target permits. In both cases the
    number of steps is known before the first one.

    Args:
      step: the step; every numeric field a scalar.
      epsilon: the target, > 0. ``inf`` means no privacy: the noise multiplier becomes
        0 and ``num_steps`` must be given.
      delta: the target, in (0, 1).
      num_steps: whole number >= 1, or None.
      before: other steps with which the run begins, each once and on all data, with
        the share in (0, 1] of the budget for each. A step with share a gets the noise
        with which it alone would meet the target, divided by sqrt(a): shares divide the
        sum of squared shifts of Gaussian mechanisms. Then the noise of ``step`` is
        calibrated to what remains. ``num_steps`` does not include these steps, and may
        be 0 if the shares sum to 1.

    Raises:
      ValueError: a step with arrays, or a target that does not permit a single step.
      NotImplementedError: steps ``before`` in epochs.
    """
    _validation.instance("step", step, GaussianStep, "a GaussianStep")
    if step.shape:
        raise ValueError(
            "step must be one setting with scalar fields, "
            f"got fields of shape {step.shape}"
        )
    target = _validation.one("epsilon", epsilon, _validation.real_array)
    if not target > 0:
        raise ValueError(f"epsilon must be > 0, got {_validation.shown(epsilon)}")
    allowed = _validation.one("delta", delta, _validation.open_unit_array)
    steps = num_steps
    if steps is not None:
        steps = _validation.whole_number(
            "num_steps", steps, minimum=0 if before else 1, maximum=_MOST_STEPS
        )
    if before or np.isinf(target):
        if steps is None:
            why = "steps before" if before else "epsilon=inf"
            raise ValueError(f"num_steps must be given with {why}, got None")
        return _of_fixed_length(step, target, allowed, steps, before)
    if steps is not None:
        noise = _noise(step, target, allowed, steps)
        step = dataclasses.replace(step, noise_multiplier=noise)
    permitted = calibrate_num_steps(step, epsilon=target, delta=allowed)
    permitted = min(int(permitted), _MOST_STEPS)
    if permitted < 1:
        raise ValueError(
            f"epsilon={target:g} at delta={allowed:g} does not permit a single step "
            f"with noise_multiplier={step.noise_multiplier:g}; give num_steps to have "
            "the noise calibrated, or use more noise"
        )
    planned = permitted if steps is None else min(steps, permitted)
    if epoch_scheme(step.design) is not None:
        length = int(step.cycle)  # beyond the plan, whole epochs are charged
        permitted = max(planned, permitted // length * length)
    return PrivacyBudget(step, target, allowed, planned, permitted)


def _of_fixed_length(
    step: GaussianStep,
    epsilon: float,
    delta: float,
    num_steps: int,
    before: Sequence[tuple[GaussianStep, float]],
) -> PrivacyBudget:
    """The budget of a run that begins with other steps, or has no privacy."""
    for row in before:
        one = row[0] if isinstance(row, Sequence) and len(row) == 2 else [row]
        _validation.instance("before", one, GaussianStep, "(step, share) pairs")
    if any(epoch_scheme(one.design) or one.bands for one, _ in before):
        raise NotImplementedError(
            "before must be steps on all data; steps of epoch schemes, or with bands, "
            "use only a part"
        )
    shares = _validation.probability_array("shares", [share for _, share in before])
    total = float(shares.sum())
    if not (shares > 0).all() or total > 1 + _SHARES or (num_steps and total >= 1):
        most = "less than 1 with num_steps > 0" if num_steps else "at most 1"
        raise ValueError(
            f"shares of the steps in before must be > 0 and sum to {most}, got "
            f"{shares.tolist()}"
        )

    def budget(noises: Sequence[float], noise: float) -> PrivacyBudget:
        first = tuple(
            dataclasses.replace(one, noise_multiplier=own)
            for (one, _), own in zip(before, noises, strict=True)
        )
        rest = dataclasses.replace(step, noise_multiplier=noise)
        all_steps = len(first) + num_steps
        return PrivacyBudget(rest, epsilon, delta, all_steps, all_steps, first)

    if np.isinf(epsilon):
        return budget([0.0] * len(before), 0.0)
    alone = functools.cache(lambda one: _noise(one, epsilon, delta, 1))
    noises = [alone(one) / math.sqrt(share) for one, share in before]
    if not num_steps:
        # The squared shifts sum to that of the target, up to rounding.
        planned = budget([own * (1 + _SHARES) for own in noises], 1.0)
        spent = float(planned.spent(planned.num_steps))
        if not spent <= epsilon:
            raise ValueError(
                "the steps in before must use all data, so that shares add up; got "
                f"steps with epsilon={spent:g} for the target {epsilon:g}"
            )
        return planned

    def excess(inverse: np.ndarray, _: np.ndarray) -> np.ndarray:
        planned = budget(noises, float(1 / inverse[0]))
        return np.atleast_1d(np.log(planned.spent(planned.num_steps) / epsilon))

    # Initial value: as if the steps before were more steps of this kind.
    start = math.sqrt(1 - total) / _noise(step, epsilon, delta, num_steps)
    found = largest_within(
        excess, np.array([start]), _INVERSE_NOISE, slope=1.0, tolerance=_SHARES
    )
    if not found[0]:
        raise ValueError(
            f"no noise keeps {num_steps} steps after those in before within "
            f"epsilon={epsilon:g} at delta={delta:g}"
        )
    return budget(noises, float(1 / found[0]))


def _noise(step: GaussianStep, epsilon: float, delta: float, num_steps: int) -> float:
    noise = calibrate_noise_multiplier(
        step, epsilon=epsilon, delta=delta, num_steps=num_steps
    )
    if not np.isfinite(noise):
        raise ValueError(
            f"no finite noise keeps {num_steps} steps within epsilon={epsilon:g} at "
            f"delta={delta:g}"
        )
    return float(noise)
