"""The privacy budget of a run: how much noise, how many steps, and when it ends."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accounting.api import epsilon as epsilon_of
from jaxdp_episodic.accounting.calibration import (
    calibrate_noise_multiplier,
    calibrate_num_steps,
)
from jaxdp_episodic.describe.designs import epoch_scheme
from jaxdp_episodic.describe.epochs import steps_owed
from jaxdp_episodic.describe.step import GaussianStep

# Steps are numbered by 32-bit integers on the device.
_MOST_STEPS = 2**31 - 1
_STEPS_AHEAD = 4096


class BudgetExhaustedError(RuntimeError):
    """The next step would exceed the target epsilon."""


@dataclass(frozen=True, eq=False)
class PrivacyBudget:
    """A step, a target, and the number of steps that the run takes. See `plan_budget`.

    Attributes:
      step: the step with its final noise multiplier; all its fields are scalars.
      epsilon: the target, nats; inf for a run without any privacy.
      delta: the target, in (0, 1).
      num_steps: steps that the run takes; known before the first one.
      permitted_steps: the largest number of steps whose epsilon is within the target,
        >= ``num_steps``. Of steps in epochs, beyond ``num_steps`` whole epochs only.
    """

    step: GaussianStep
    epsilon: float
    delta: float
    num_steps: int
    permitted_steps: int

    def spent(self, num_steps: Any) -> np.ndarray | np.float64:
        """Returns epsilon after that many steps (*upper bound*; shape of the input).

        Of steps in epochs that of the steps owed; see `owed`.
        """
        owed = self.owed(num_steps)
        return epsilon_of(self.step, num_steps=owed, delta=self.delta)

    def owed(self, num_steps: Any) -> np.ndarray | np.int64:
        """Returns the steps that are charged if the run ends after that many.

        Within an epoch, unless that end was planned, those of the whole epoch.
        """
        return steps_owed(self.step.design, num_steps, self.num_steps)[()]

    @property
    def planned(self) -> int | None:
        """The number of steps, where what they cost rests on its being fixed."""
        return self.num_steps if epoch_scheme(self.step.design) is not None else None

    @property
    def is_private(self) -> bool:
        """False if the run has no finite epsilon."""
        return bool(np.isfinite(self.epsilon))


def public_view(budget: PrivacyBudget) -> PrivacyBudget | None:
    """Returns the budget as public facts alone account it, or None if they do not.

    Under ``add_remove`` the sizes of groups of protected units are private. A budget
    that rests on them may not be published, nor its noise, which was calibrated to
    them; one that comes out the same without the `Population` does not rest on them.
    """
    step = budget.step
    if step.population is None or step.neighboring_relation != "add_remove":
        return budget
    try:
        bare = dataclasses.replace(
            budget, step=dataclasses.replace(step, population=None)
        )
        same = np.isclose(bare.spent(1), budget.spent(1), rtol=1e-9, atol=0.0)
    except (ValueError, NotImplementedError):  # it needs sizes that nobody stated
        return None
    return bare if same else None


class SpentAhead:
    """Epsilon after each step of a run, computed for many steps at a time.

    One vectorized call answers for a few thousand steps; all at once, a run of 2^31
    steps would take all memory before its first.
    """

    def __init__(self, budget: PrivacyBudget) -> None:
        self._budget = budget
        self._first, self._values = 0, np.zeros(0)

    def at(self, step: int) -> float:
        """Returns epsilon after that many steps, at least 1 (*upper bound*)."""
        place = step - self._first
        if not 0 <= place < len(self._values):
            last = max(step, min(step + _STEPS_AHEAD - 1, self._budget.num_steps))
            self._first, place = step, 0
            owed = self._budget.owed(np.arange(step, last + 1))
            # Many steps owe the same epoch.
            different, place_of = np.unique(owed, return_inverse=True)
            self._values = np.asarray(self._budget.spent(different))[place_of]
        return float(self._values[place])


def plan_budget(
    step: GaussianStep, *, epsilon: Any, delta: Any, num_steps: Any = None
) -> PrivacyBudget:
    """Returns the budget of a run: noise for its steps, or steps for its noise.

    With ``num_steps`` the noise is calibrated: the smallest noise multiplier whose
    epsilon after that many steps is within the target replaces that of ``step``.
    Without it, the step's own noise stays and the run takes as many steps as the
    target permits. Either way the last permitted step is known before the first.

    Args:
      step: the step; every numeric field a scalar.
      epsilon: the target, > 0. ``inf`` means no privacy: the noise multiplier becomes
        0 and ``num_steps`` must be given.
      delta: the target, in (0, 1).
      num_steps: whole number >= 1, or None.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range, a step with arrays, or a target that does not
        permit a single step.
    """
    if not isinstance(step, GaussianStep):
        raise TypeError(f"step must be a GaussianStep, got {step!r}")
    if step.shape:
        raise ValueError(
            "step must describe one setting, its fields scalars, "
            f"got fields of shape {step.shape}"
        )
    target = _validation.single("epsilon", _validation.real_array("epsilon", epsilon))
    if not target > 0:
        raise ValueError(f"epsilon must be > 0, got {epsilon!r}")
    allowed = _validation.single("delta", _validation.open_unit_array("delta", delta))
    steps = num_steps
    if steps is not None:
        steps = _validation.whole_number("num_steps", steps, maximum=_MOST_STEPS)
    if np.isinf(target):
        if steps is None:
            raise ValueError("num_steps must be given with epsilon=inf, got None")
        bare = dataclasses.replace(step, noise_multiplier=0.0)
        return PrivacyBudget(bare, target, allowed, steps, steps)
    if steps is not None:
        step = dataclasses.replace(
            step, noise_multiplier=_noise(step, target, allowed, steps)
        )
    permitted = calibrate_num_steps(step, epsilon=target, delta=allowed)
    permitted = min(int(permitted), _MOST_STEPS)
    if permitted < 1:
        raise ValueError(
            f"epsilon={target:g} at delta={allowed:g} does not permit a single step "
            f"with noise_multiplier={step.noise_multiplier:g}; give num_steps to have "
            "the noise calibrated, or more noise"
        )
    planned = permitted if steps is None else min(steps, permitted)
    scheme = epoch_scheme(step.design)
    if scheme is not None:  # what was not planned is charged by whole epochs
        length = int(np.asarray(scheme.steps_per_epoch))
        permitted = max(planned, permitted // length * length)
    return PrivacyBudget(step, target, allowed, planned, permitted)


def _noise(step: GaussianStep, epsilon: float, delta: float, num_steps: int) -> float:
    noise = calibrate_noise_multiplier(
        step,
        epsilon=epsilon,
        delta=delta,
        num_steps=num_steps,
    )
    if not np.isfinite(noise):
        raise ValueError(
            f"no finite noise keeps {num_steps} steps within epsilon={epsilon:g} at "
            f"delta={delta:g}"
        )
    return float(noise)
