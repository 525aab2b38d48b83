"""What the losses of random allocation share."""

# Profiles and moments are bounds, made by NumPy setting by setting: see docs/proofs.md,
# "Random allocation".

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from jaxdp_episodic.accountant.losses.gaussian import GaussianLoss
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    MomentRule,
    Tails,
)
from jaxdp_episodic.accountant.losses.protocols import Bounds, Profile
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
)

# Shifts that pairs are made for: noise of 1e4 and of 0.1 clip norms. Less noise counts
# as none, more as 1e4.
SMALLEST_SHIFT = 1e-4
LARGEST_SHIFT = 10.0


@dataclass(frozen=True)
class AllocatedLoss(GaussianLoss, Bounds):
    """Base: a unit in one secret slot of ``slots``, of which ``steps`` >= 2 are run."""

    # Maps direction, orders less one (m,) and the fields of one setting to (3, m): the
    # log-excess and two derivatives.
    _excess: ClassVar[Callable[..., np.ndarray]]
    compiles: ClassVar[bool] = False

    @property
    def _slots(self) -> Array:
        return self.__dict__["slots"]

    @property
    def _steps(self) -> Array:
        return self.__dict__["steps"]

    @property
    def _drawn_rate(self) -> Array:
        """Chance that the unit's slot is run: the rate of `with_little_noise`."""
        # With the slot revealed an epoch is a Poisson draw at this rate, and H_g is
        # jointly convex. Its losses are at most log(slots) above the epoch's.
        return np.minimum(self._steps / np.maximum(self._slots, 1.0), 1.0)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """*Upper bounds*: those of the pair that the upper certified ends are of."""
        pair: Any = self.kept_in_range().certified(up=True)
        mass_error, loss_error = pair.certified_error()
        log_kept, below = pair.log_kept(), np.maximum(loss_error - u, 0.0)
        with np.errstate(divide="ignore"):
            # H_g of g below 1 is at most 1 - g more than that of 1.
            rest = np.logaddexp(np.log(-np.expm1(log_kept)), np.log(below))
            forward, backward = (
                (np.logaddexp(profile + mass_error + log_kept, rest), tail)
                for profile, tail in pair.log_tails(np.maximum(u - loss_error, 0.0))
            )
        return forward, backward

    def bounding_pair(self, bounding: Callable[..., Profile], *, up: bool) -> Profile:
        """`Bounds.certified`, of a class with these fields and ``above``."""
        kept = self.kept_in_range()
        # Shifts that are too small: up to the smallest, down to 0.
        raised = np.where(self._shift > 0, np.maximum(self._shift, kept._shift), 0.0)
        shift = raised if up else np.where(raised > self._shift, 0.0, self._shift)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields |= {"shift": shift, "slots": kept._slots, "steps": kept._steps}
        return bounding(**fields, above=np.full(self.shape, 1.0 * up))

    def kept_in_range(self) -> Self:
        """Returns numbers that pairs can be made of, none of less privacy loss."""
        steps = np.maximum(self._steps, 2.0)
        return dataclasses.replace(
            super().kept_in_range(),
            # Beyond the largest the step is unprotected, and nothing is computed.
            shift=np.clip(self._shift, SMALLEST_SHIFT, LARGEST_SHIFT),
            steps=steps,
            slots=np.maximum(self._slots, steps),
        )

    @property
    def is_unprotected(self) -> Array:
        """Where there is (nearly) no noise: less than pairs are made for."""
        return ~self.loses_nothing & (self._shift > LARGEST_SHIFT)

    def hints(self) -> Hints:
        """As many Poisson draws at rate 1 / slots."""
        rate = self._inner_rate / self._slots
        return Hints(rate * np.sqrt(self._steps), rate, self._shift, self._shift)

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `PrivacyLoss`."""
        excess = functools.partial(self._excess, rule.direction)
        found = by_setting(excess, t, *self.fields[1:])
        return tuple(found[: 3 if rule.with_derivatives else 1])


def by_setting(
    function: Callable[..., np.ndarray], u: np.ndarray, *fields: np.ndarray
) -> np.ndarray:
    """(k, ..., n): ``function(u, *setting)`` of the elements of each setting."""
    arrays = np.broadcast_arrays(u, *fields)
    flat = [np.asarray(a, np.float64).reshape(-1) for a in arrays]
    rows = np.stack(flat[1:])
    # Elements of a setting are mostly neighbours: one of each run is looked at.
    changes = np.any(rows[:, 1:] != rows[:, :-1], axis=0)
    begins = np.append(0, np.flatnonzero(changes) + 1)
    settings, inverse = np.unique(rows[:, begins], axis=1, return_inverse=True)
    which = np.repeat(inverse.reshape(-1), np.diff(np.append(begins, rows.shape[1])))
    chosen = [np.flatnonzero(which == i) for i in range(settings.shape[1])]
    parts = [
        function(flat[0][rows], *setting)
        for rows, setting in zip(chosen, settings.T.tolist(), strict=True)
    ]
    result = np.concatenate(parts, axis=1)
    result[:, np.concatenate(chosen)] = result.copy()
    return result.reshape(-1, *arrays[0].shape)
