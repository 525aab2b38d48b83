"""What the losses of random allocation share: fields, bounds, nodes from tables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np

from jaxdp_episodic.accountant.losses.allocation_tables import by_setting
from jaxdp_episodic.accountant.losses.gaussian import GaussianLoss
from jaxdp_episodic.accountant.losses.loss_nodes import LossNodes, NodeRule, collected
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Hints,
    MomentRule,
    Tails,
)
from jaxdp_episodic.accountant.losses.protocols import Bounds, Nodes, Profile, Tabulated
from jaxdp_episodic.accountant.numerics.chebyshev_tables import Table
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    map_first,
    namespace,
    on_host,
)

# Shifts that tables are made for: noise of 1e4 and of 0.1 clip norms. Less noise counts
# as none, more as 1e4.
SMALLEST_SHIFT = 1e-4
LARGEST_SHIFT = 10.0
# Nodes for each that a rule asks for: the real line needs more than a complex path.
# Half as many moved epsilons by 1.5e-11 at most.
_NODES_EACH = 4


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
        """Chance that the unit's slot is run: the rate of `with_little_noise`.

        With the slot revealed an epoch is a Poisson draw at this rate. The pair is the
        mean over the slots of such draws' pairs, and H_g is jointly convex. Of a unit
        that is there or not its losses are at most ``log(slots)`` above this one's; of
        one that is replaced about twice as large at little noise.
        """
        return np.minimum(self._steps / np.maximum(self._slots, 1.0), 1.0)

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """*Upper bounds*: those of the pair that the upper certified ends are of.

        The profiles include what that pair loses at once, and its errors.
        """
        pair = self.kept_in_range().certified(up=True)
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
        """Returns numbers that tables can be made of, none of less privacy loss."""
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
        """Where there is (nearly) no noise: less than tables are made for."""
        return ~self.loses_nothing & (self._shift > LARGEST_SHIFT)

    def hints(self) -> Hints:
        """As many Poisson draws at rate 1 / slots."""
        xp = namespace(*self.fields)
        rate = self._inner_rate / self._slots
        return Hints(rate * xp.sqrt(self._steps), rate, self._shift, self._shift)

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """See `PrivacyLoss`.

        *Upper bound* up to quadrature error: see `losses.allocated_moments`.
        """
        xp = namespace(t, *self.fields)
        order, *setting = xp.broadcast_arrays(t, *self.fields[1:])
        rows = functools.partial(
            by_setting, functools.partial(self._excess, rule.direction)
        )
        found = on_host(rows, order.shape, order, *setting, number=3)
        return tuple(found[: 3 if rule.with_derivatives else 1])


class TabulatedAllocation(AllocatedLoss, Tabulated, Nodes):
    """Base of those by tables."""

    # Maps shift, slots and steps of one setting to its tables.
    _tables: ClassVar[Callable[[float, float, float], list[Table]]]
    # Makes those of many settings: slots, steps and shift.
    _prepare: ClassVar[Callable[[list[tuple[int, int, float]]], None]]

    def profile_error(self) -> Array:
        """See `Profile`; as the tables estimate it."""

        def error(u: np.ndarray, *setting: float) -> np.ndarray:
            largest = max(table.error for table in self._tables(*setting))
            return np.full((1, len(u)), largest)

        return self._by_setting(error, np.zeros(self.shape))

    def _by_setting(self, function: Callable[..., np.ndarray], u: Array) -> Array:
        """``function(u, shift, slots, steps)``, one row, of fields kept in range."""
        kept = self.kept_in_range()  # of some no step may be run
        return by_setting(function, u, kept._shift, kept._slots, kept._steps)[0]

    def prepare(self) -> None:
        """Makes the tables, of settings in which something is lost, but not all."""
        kept = self.kept_in_range()
        is_asked = ~np.asarray(self.loses_nothing | self.is_unprotected)
        fields = (kept._slots, kept._steps, kept._shift)
        fields = (np.broadcast_to(f, self.shape)[is_asked].tolist() for f in fields)
        settings = [(round(t), round(j), s) for t, j, s in zip(*fields, strict=True)]
        type(self)._prepare(settings)


def tails_from(rows: Array) -> tuple[Tails, Tails]:
    """The four rows of a table as tails of both directions; 1 for NaN."""
    xp = namespace(rows)
    rows = xp.where(xp.isnan(rows), 0.0, rows)
    return (rows[0], rows[1]), (rows[2], rows[3])


class Asked(NamedTuple):
    """Nodes that are asked for of one distribution.

    Nodes that check others lie elsewhere, and use tables moved by their estimated
    error, so that the difference of the two includes it.
    """

    size: int
    backward: bool
    log_cut: float  # log-density at which the distribution is truncated
    checking: bool


def nodes_from(
    evaluate: Callable[..., np.ndarray],
    rule: NodeRule,
    *fields: Array,
) -> LossNodes:
    """Nodes on the real line, made on the host.

    Args:
      evaluate: maps what is `Asked` and the fields of one distribution to rows: losses,
        weights, and five of the ends and the spacing.
      rule: which nodes are asked for; those that check have a height below 1.
      *fields: (m,) each.
    """
    size = _NODES_EACH * rule.num_nodes
    number = 2 * size + 5

    def rows(
        backward: np.ndarray,
        cut: np.ndarray,
        height: np.ndarray,
        *fields: np.ndarray,
    ) -> np.ndarray:
        result = np.empty((number, *cut.shape))
        for i in np.ndindex(cut.shape):
            asked = size, bool(backward[i[-1]]), float(cut[i]), bool(height[i] < 1)
            setting = (float(field[i[-1]]) for field in fields)
            result[(slice(None), *i)] = evaluate(Asked(*asked), *setting)
        return result

    every = on_host(
        rows,
        rule.log_cut.shape,
        *(rule.backward, rule.log_cut, rule.height, *fields),
        number=number,
    )
    xp = namespace(every)

    def nodes_of(part: Array) -> LossNodes:
        loss, weight, rest = part[:size], part[size : 2 * size], part[2 * size :]
        nothing = xp.zeros_like(loss)
        nodes = collected((loss, nothing), (weight, nothing), rest[:2], rest[2:4])
        return nodes._replace(spacing=rest[4])

    return map_first(nodes_of, xp.moveaxis(every, 1, 0))
