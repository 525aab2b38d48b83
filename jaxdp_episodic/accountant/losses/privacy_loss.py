"""What a method may ask of a mechanism: the protocol of all privacy losses.

A `PrivacyLoss` describes one step's *dominating pair* (P, Q): two distributions whose
hockey-stick divergences ``H_g(P || Q)`` and ``H_g(Q || P)`` are upper bounds of those
of the mechanism's outputs with a protected unit against without it, for every pair of
neighbours and every ``g >= 1`` (Zhu, Dong, Wang 2022, arXiv:2106.08567). Its privacy
loss is ``L = log P/Q`` under P. Everything else follows from the pair.

To add a mechanism is one file here with one class, and its test. The methods
`methods.rdp`, `methods.exact` and `methods.certified` are written against this
protocol alone; a method of a mechanism that lacks what it needs refuses it by name.

Fields are arrays that broadcast together: one object is one setting or a million, with
the paths of a population as last axis. Their derivatives, too, are objects of the same
class. Kernels (`log_tails`, `log_excess`, `nodes` and what they call) are pure
functions of the fields and take their array namespace from them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from jaxdp_episodic.accountant.losses.loss_nodes import LossNodes, NodeRule
from jaxdp_episodic.accountant.losses.moves import Moves
from jaxdp_episodic.accountant.numerics.loops import Array, map_arrays, namespace

Tails = tuple[Array, Array]
"""Logarithms of ``H_g`` and of g times the second mass of the losses above log g."""

# Rates are raised to this floor, which raises epsilon: products and squares of several
# must stay above the smallest float64.
_SMALLEST_RATE = 1e-60


class Quadrature(NamedTuple):
    """Size of a quadrature: panels and Gauss–Legendre nodes in each."""

    num_panels: int
    nodes_per_panel: int


class MomentRule(NamedTuple):
    """How `PrivacyLoss.log_excess` is asked for.

    Attributes:
      direction: "forward", or "backward" with P and Q exchanged; of mixtures
        "symmetric" as well, where both profiles are the forward one.
      quadrature: its size.
      with_derivatives: append the first two derivatives of the excess in t, each
        divided by the excess, good enough for a search.
    """

    direction: str
    quadrature: Quadrature
    with_derivatives: bool = False


class Hints(NamedTuple):
    """A sampled Gaussian of about the same privacy loss, with which searches start.

    No answer depends on it, only how soon it is found.

    Attributes:
      rate: probability of the move.
      odds: factor of ``e^{shift x}`` in P/Q where that is large.
      shift: of the move, in standard deviations of the noise.
      furthest: the largest move that is not too rare to count.
    """

    rate: Array
    odds: Array
    shift: Array
    furthest: Array


@dataclass(frozen=True)
class PrivacyLoss:
    """Base of all mechanisms.

    Attributes:
      outer_rate: probability that the step sees anything of the unit's surroundings;
        a factor on both profiles, and so on ``M - 1``.
      is_symmetric: class constant; whether both directions are that of ``P || Q``.
      rate_fields: class constant; names of the fields that are probabilities.
      methods: class constant; the methods that have what they need of the mechanism.
      has_nodes: class constant; whether there are `nodes`. Without them "exact" answers
        single steps from the profile, and several by the certified upper end.
      padding: class constant; names of the fields that are tuples of arrays, as many as
        the mechanism has parts, and what stands for a part that is not there.
      is_estimate: class constant; whether profiles are estimates, so that but for
        moments only what is computed of `certified` is proven.
      may_have_atoms: class constant; whether a loss other than 0 may have a probability
        of its own.
      has_slopes: class constant; whether JAX can differentiate its kernels.
      states_largest: class constant; whether `largest_loss` is exact, not rounded.
    """

    outer_rate: Array
    is_symmetric: ClassVar[bool] = True
    methods: ClassVar[tuple[str, ...]] = ("rdp", "exact", "pld")
    rate_fields: ClassVar[tuple[str, ...]] = ("outer_rate",)
    has_nodes: ClassVar[bool] = True
    padding: ClassVar[dict[str, float]] = {}
    is_estimate: ClassVar[bool] = False
    may_have_atoms: ClassVar[bool] = True
    has_slopes: ClassVar[bool] = True
    states_largest: ClassVar[bool] = False

    # --- Arrays ---

    def map(self, function: Callable[[Array], Array]) -> Self:
        """Returns the same mechanism with a function applied to every field."""
        return map_arrays(function, self)

    @property
    def fields(self) -> tuple[Array, ...]:
        """The arrays, in the order of the class' attributes; columns one by one."""
        arrays: list[Array] = []
        map_arrays(arrays.append, self)
        return tuple(arrays)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Broadcast shape of the fields."""
        return np.broadcast_shapes(*(np.shape(field) for field in self.fields))

    @classmethod
    def stack(cls, losses: list[Self]) -> Self:
        """Returns several of this class as one, with a new first axis.

        Of fields that are tuples the shorter ones are filled up by ``padding``.
        """
        stacked: list[Any] = []
        for field in dataclasses.fields(cls):
            values = [getattr(loss, field.name) for loss in losses]
            if field.name not in cls.padding:
                stacked.append(np.stack(values))
                continue
            filler = np.full(np.shape(values[0][0]), cls.padding[field.name])
            columns = itertools.zip_longest(*values, fillvalue=filler)
            stacked.append(tuple(np.stack(column) for column in columns))
        return cls(*stacked)

    def prepare(self, *, slopes: bool = False) -> None:
        """Computes tables that kernels will need, side by side, if there are any.

        Args:
          slopes: whether they will be differentiated.
        """

    # --- What needs no computing ---

    @property
    def chance(self) -> Array:
        """Probability that the step sees the unit: the product of all rates."""
        return math.prod((getattr(self, a) for a in self.rate_fields), start=1.0)

    @property
    def loses_nothing(self) -> Array:
        """Where P and Q are the same distribution."""
        return np.equal(self.chance, 0)

    @property
    def is_unprotected(self) -> Array:
        """Where there is no noise, or so little that kernels would overflow."""
        return np.zeros(self.shape, bool)

    @property
    def has_too_little_noise(self) -> Array:
        """Where there is some noise all the same, so that inf is a bound."""
        return self.is_unprotected & np.isfinite(getattr(self, "shift", np.inf))

    def kept_in_range(self) -> Self:
        """Returns fields that kernels can compute with, none of less privacy loss."""
        raised = {
            name: np.maximum(getattr(self, name), _SMALLEST_RATE)
            for name in self.rate_fields
        }
        return dataclasses.replace(self, **raised)

    def scaled(self, factor: Array) -> Self:
        """Returns the mechanism with its noise divided by a factor."""
        raise NotImplementedError(f"{type(self).__name__} has no noise to change")

    def hints(self) -> Hints:
        """Where searches start."""
        raise NotImplementedError

    def largest_loss(self, *, backward: bool) -> Array:
        """Upper bound of the loss of one direction; inf where there is none."""
        del backward
        return np.full(self.shape, np.inf)

    def log_kept(self) -> Array:
        """``log(1 - f)``, f the probability of losing everything at once.

        The pair is ``(1 - f)`` times the one that kernels compute with; the rest has an
        infinite loss.
        """
        return np.zeros(self.shape)

    def certified(self, *, up: bool) -> PrivacyLoss:
        """The pair that certified ends are computed of: this one, or a bound of it.

        Up, it dominates this pair; else it is dominated by it. Both hold in any
        composition, up to `certified_error` in each step.
        """
        del up
        return self

    def certified_error(self) -> tuple[Array, Array]:
        """Bounds of the errors of log H_g and log g of `certified`: nats, per step."""
        return np.zeros(self.shape), np.zeros(self.shape)

    def grain(self) -> Array:
        """Spacing of a lattice below which a finer one does not narrow the interval."""
        return np.zeros(self.shape)

    # --- Profiles ---

    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """Both directions' tails at ``u = log g >= 0``: forward and backward.

        Elementwise; *exact* for the pair up to rounding (of the logarithm 1e-15 of its
        size, or of 1), so upper bounds for the mechanism.
        """
        raise NotImplementedError(_lacks(self, "an exact privacy profile"))

    def values(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(J,) losses and the logarithms of their masses, where there are no others.

        Of scalar fields; forward, up to `profile_error` and `tail_displacement`.
        """
        return None

    @property
    def num_values(self) -> float:
        """How many losses `values` lists, at most; inf where it lists none."""
        return np.inf

    def tail_displacement(self, u: Array) -> Array:
        """Bound of the displacement in u, by rounding, of the tails at u."""
        return namespace(u).zeros_like(u)

    def profile_error(self) -> Array:
        """Relative error of both tails, for each unit of 1 + |log| of either.

        1.3e-15 is the largest that was measured of closed forms, against 60 digits.
        """
        return np.full(self.shape, 4e-15)

    def profile_error_at(self, u: Array) -> Array:
        """Relative error of the profile at u; infinite where it is an upper bound."""
        return self.profile_error() + np.zeros(np.shape(u))

    def smallest_loss(self) -> Array:
        """Losses below it, in size, are taken for 0 by the certified method."""
        hints = self.hints()
        return 1e-14 * np.maximum(hints.rate * np.minimum(hints.shift, 1.0), 1e-60)

    @property
    def composes_by(self) -> Array | None:
        """What a closed form of several steps depends on; None if there is none."""
        return None

    def composed(
        self, target: float, count: float, *, of_epsilon: bool
    ) -> tuple[float, float]:
        """Epsilon at log(delta), or log(delta) at epsilon, of ``count`` steps alike.

        Args:
          target: log(delta) or epsilon >= 0.
          count: whole number; fields are scalars.
          of_epsilon: which of the two is asked for.

        Returns:
          The value and a bound of its error, in nats; NaN where it takes too long.
        """
        raise NotImplementedError(_lacks(self, "a closed form of its composition"))

    # --- Rényi moments ---

    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """``log(E_Q[(P/Q)^{1+t}] - 1)`` at t > 0, but for the outer rate.

        Args:
          t: (n,) order minus one; the fields are (n,).
          rule: which direction, how finely; whether to append the derivatives.
        """
        raise NotImplementedError(_lacks(self, "Rényi moments"))

    def moves(self) -> Moves:
        """The pair of one setting, scalar fields, as a table to draw from."""
        raise NotImplementedError(f"{type(self).__name__} has no table to draw from")

    # --- Loss distribution ---

    def nodes(self, rule: NodeRule) -> LossNodes:
        """The loss distribution as a sum over nodes; V of them, cut at V levels."""
        raise NotImplementedError(_lacks(self, "a loss distribution"))

    @property
    def num_terms(self) -> Array:
        """How many distributions the loss distribution is a mixture of."""
        return np.ones(self.shape)

    def truncated(
        self, log_goal: np.ndarray, count: np.ndarray
    ) -> tuple[Self, np.ndarray, np.ndarray]:
        """Returns the mechanism without terms that add nothing to delta.

        Returns:
          It, the logarithm of an upper bound of what they add in ``count`` steps, and
          where there are too many terms left.
        """
        too_many = (count > 0) & (not self.has_nodes)
        return self, np.full(log_goal.shape, -np.inf), too_many

    def spike(self) -> Array:
        """Loss at which most of the forward distribution is, or 0."""
        return namespace(self.outer_rate).zeros_like(self.outer_rate)

    def spread(self) -> Array:
        """How far from the spike the losses are where the unit is not drawn."""
        return namespace(self.outer_rate).zeros_like(self.outer_rate)

    def gaussian_shift(self) -> Array:
        """Shift where the pair is, but for the outer rate, two Gaussians; else 0."""
        return namespace(self.outer_rate).zeros_like(self.outer_rate)


def _lacks(loss: PrivacyLoss, what: str) -> str:
    return f"{type(loss).__name__} lacks {what}: it is known by its bounds alone"


@dataclass(frozen=True)
class NoisyLoss(PrivacyLoss):
    """Base of the mechanisms that add noise: they have a ``shift``.

    It is how far the protected unit moves the sum, in scales of the noise (standard
    deviations of a Gaussian): 0 is infinite noise, inf is none.
    """

    # Shifts are kept in a range in which squares of exponents neither vanish nor
    # overflow; beyond it the answer is inf, as without noise.
    _SMALLEST_SHIFT: ClassVar[float] = 1e-20
    _LARGEST_SHIFT: ClassVar[float] = 1e70

    @property
    def loses_nothing(self) -> Array:
        """Where nothing is drawn, or the noise is infinite."""
        return np.equal(self.chance, 0) | np.equal(self._shift, 0)

    @property
    def is_unprotected(self) -> Array:
        """Where there is (nearly) no noise."""
        return ~self.loses_nothing & (self._shift > self._LARGEST_SHIFT)

    def kept_in_range(self) -> Self:
        """Returns rates and shifts that kernels can compute with."""
        shift = np.clip(self._shift, self._SMALLEST_SHIFT, self._LARGEST_SHIFT)
        return dataclasses.replace(super().kept_in_range(), shift=shift)

    def scaled(self, factor: Array) -> Self:
        """Returns the mechanism with its noise divided by a factor."""
        # Infinite shift times 0: no noise from the start stays none.
        with np.errstate(invalid="ignore", over="ignore"):
            shift = self._shift * factor
        return dataclasses.replace(self, shift=np.where(np.isnan(shift), np.inf, shift))

    @property
    def _inner_rate(self) -> Array:
        """The product of the rates below the outer one."""
        inner = (name for name in self.rate_fields if name != "outer_rate")
        return math.prod((getattr(self, name) for name in inner), start=1.0)

    @property
    def _shift(self) -> Any:
        # Subclasses put the field behind their rates.
        return self.__dict__["shift"]


@dataclass(frozen=True)
class GaussianLoss(NoisyLoss):
    """Base of the mechanisms with Gaussian noise."""

    may_have_atoms: ClassVar[bool] = False

    def hints(self) -> Hints:
        """The rates' product and the shift."""
        rate = self._inner_rate
        return Hints(rate, rate, self._shift, self._shift)
