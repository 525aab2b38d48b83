"""The base of all mechanisms: fields of a *dominating pair* (P, Q)."""
# And facts that need no computing. Reference: Zhu, Dong, Wang (2022),
# arXiv:2106.08567.

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from jaxdp_episodic.accountant.losses.loss_nodes import LossNodes, NodeRule
from jaxdp_episodic.accountant.numerics.loops import Array, map_arrays, namespace

Tails = tuple[Array, Array]
"""Logarithms of ``H_g`` and of g times the second mass of the losses above log g."""

# Smallest rate that kernels compute with; smaller ones are raised to it, which raises
# epsilon. Products and squares of several must stay above the smallest float64.
_SMALLEST_RATE = 1e-60


class Quadrature(NamedTuple):
    """Size of a quadrature: panels and Gauss–Legendre nodes in each."""

    num_panels: int
    nodes_per_panel: int
    lattice: float = 0.0


class MomentRule(NamedTuple):
    """How `Moments.log_excess` is asked for."""

    direction: str  # "forward", "backward", or "symmetric": both alike
    quadrature: Quadrature  # its size
    with_derivatives: bool = False  # two in t, over the excess; for searches


class Hints(NamedTuple):
    """A sampled Gaussian of about the same privacy loss, with which searches start."""

    rate: Array  # sampling probability
    odds: Array  # factor of ``e^{shift x}`` in P/Q where that is large
    shift: Array  # distance of the two means, in standard deviations of the noise
    furthest: Array  # the largest such distance that is not too rare to count

    @classmethod
    def unsampled(cls, shift: Array) -> Self:
        """The Gaussian mechanism itself."""
        one = namespace(shift).ones_like(shift)
        return cls(one, one, shift, shift)


@dataclass(frozen=True)
class PrivacyLoss(abc.ABC):
    """Base of all mechanisms: their fields, and facts that need no computing."""

    outer_rate: Array  # that anything is seen; a factor on profiles and M - 1
    # Range of losses, and of shifts that make them, in which squares of exponents
    # neither vanish nor overflow. Larger ones answer inf; smaller ones are raised.
    SMALLEST_LOSS: ClassVar[float] = 1e-20
    LARGEST_LOSS: ClassVar[float] = 1e70

    padding: ClassVar[dict[str, float]] = {}  # stands for a missing part
    compiles: ClassVar[bool] = True  # whether JAX compiles the kernels

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
        """Returns several of this class as one, with a new first axis."""
        stacked: list[Any] = []
        for field in dataclasses.fields(cls):
            values = [getattr(loss, field.name) for loss in losses]
            if field.name not in cls.padding:
                stacked.append(np.array(values))
                continue
            shape = np.shape(next((value[0] for value in values if value), 0.0))
            filler = np.full(shape, cls.padding[field.name])
            columns = itertools.zip_longest(*values, fillvalue=filler)
            stacked.append(tuple(np.stack(column) for column in columns))
        return cls(*stacked)

    def stacked(self, columns: tuple[Array, ...], shape: tuple[int, ...]) -> Array:
        """A field that is a tuple as one array, with a first axis for the parts."""
        xp = namespace(*self.fields)
        return xp.stack([xp.broadcast_to(column, shape) for column in columns])

    # --- Facts ---

    @property
    @abc.abstractmethod
    def is_symmetric(self) -> bool:
        """Class constant: whether both directions' profiles are the same function."""
        # Without a default: where it is wrongly true, epsilon is too small.

    @functools.cached_property
    def rates(self) -> dict[str, Array]:
        """The fields that are probabilities, by name."""
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name.endswith("rate")}

    @functools.cached_property
    def chance(self) -> Array:
        """Probability that the step sees the unit: the product of all rates."""
        return math.prod(self.rates.values(), start=1.0)

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
        raised = {n: np.maximum(rate, _SMALLEST_RATE) for n, rate in self.rates.items()}
        return dataclasses.replace(self, **raised)

    def scaled(self, factor: Array) -> Self:
        """Returns the mechanism with its noise divided by a factor."""
        raise NotImplementedError(f"{type(self).__name__} has no noise to change")

    @abc.abstractmethod
    def hints(self) -> Hints:
        """Where searches start."""

    def largest_loss(self, *, backward: bool) -> Array:
        """Upper bound of the loss of one direction; inf where there is none."""
        return np.full(self.shape, np.inf)

    def log_kept(self) -> Array:
        """``log(1 - f)``, f the probability of losing everything at once."""
        # The pair is 1 - f times the one that kernels compute with.
        with np.errstate(divide="ignore"):
            unseen = np.log1p(-np.minimum(self.chance, 1.0))
        bare = np.where(self.has_too_little_noise, unseen, -np.inf)
        return np.where(self.is_unprotected, bare, 0.0)

    def with_little_noise(self) -> PrivacyLoss | None:
        """A pair that dominates this one, for steps that `is_unprotected` names."""
        return None


class NoisyLoss(PrivacyLoss):
    """Base of the mechanisms that add noise: they have a ``shift``."""

    @property
    def loses_nothing(self) -> Array:
        """Where nothing is drawn, or the noise is infinite."""
        xp = namespace(self.chance, self._shift)
        return xp.equal(self.chance, 0.0) | xp.equal(self._shift, 0.0)

    @property
    def is_unprotected(self) -> Array:
        """Where there is (nearly) no noise."""
        return ~self.loses_nothing & (self._shift > self.LARGEST_LOSS)

    def kept_in_range(self) -> Self:
        """Returns rates and shifts that kernels can compute with."""
        shift = np.clip(self._shift, self.SMALLEST_LOSS, self.LARGEST_LOSS)
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
        inner = (rate for name, rate in self.rates.items() if name != "outer_rate")
        return math.prod(inner, start=1.0)

    @property
    def _shift(self) -> Any:
        # Subclasses put the field behind their rates.
        return self.__dict__["shift"]


# A method refuses, by name, a mechanism without the protocol that it needs.


class Profile(PrivacyLoss):
    """Mechanisms whose hockey-stick divergences are known."""

    may_have_atoms: ClassVar[bool] = True  # other than at loss 0

    @abc.abstractmethod
    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """Both directions' tails at ``u = log g >= 0``: forward and backward."""

    def tail_displacement(self, u: Array) -> Array:
        """Bound of the displacement in u, by rounding, of the tails at u."""
        return namespace(u).zeros_like(u)

    def profile_error(self) -> Array:
        """Relative error of both tails, for each unit of 1 + |log| of either."""
        return np.full(self.shape, 4e-15)


class FiniteValues(Profile):
    """Mechanisms whose losses are finitely many."""

    @abc.abstractmethod
    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """(J,) losses and the logarithms of their masses, of scalar fields."""

    @property
    def num_values(self) -> int:
        """How many losses `values` lists, at most."""
        return len(self.values()[0])

    @property
    def largest_size(self) -> np.ndarray:
        """The largest absolute value of a loss."""
        return np.maximum(*(self.largest_loss(backward=b) for b in (False, True)))

    def tail_displacement(self, u: Array) -> Array:
        """The rounding error of the losses: two units in the last place."""
        return 4e-16 * self.largest_size + np.zeros_like(u)


class Moments(PrivacyLoss):
    """Mechanisms whose Rényi moments are known."""

    forward_is_larger: ClassVar[bool] = False  # only where *proven* at all orders
    has_lattice: ClassVar[bool] = False  # a sum of equally spaced nodes is exact

    @abc.abstractmethod
    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """``log(E_Q[(P/Q)^{1+t}] - 1)`` at t > 0, but for the outer rate."""

    def largest_on_lattice(self, rule: Quadrature) -> Array:
        """Largest t at which a lattice has enough nodes; <= 0: there is none."""
        raise NotImplementedError(f"{type(self).__name__} has no lattice")


class Nodes(PrivacyLoss):
    """Mechanisms whose loss distribution is known as weighted nodes."""

    nodes_exchange: ClassVar[bool] = False  # they serve backward moments too

    @abc.abstractmethod
    def nodes(self, rule: NodeRule) -> LossNodes:
        """The loss distribution as a sum over nodes; V of them, cut at V levels."""

    @property
    def num_terms(self) -> Array:
        """How many distributions the loss distribution is a mixture of."""
        return np.ones(self.shape)

    def truncated(
        self, log_goal: np.ndarray, count: np.ndarray
    ) -> tuple[Self, np.ndarray, np.ndarray]:
        """Returns the mechanism without terms that add nothing to delta."""
        del count
        return self, np.full(log_goal.shape, -np.inf), np.zeros(log_goal.shape, bool)

    def largest_node(self, log_cut: np.ndarray) -> np.ndarray:
        """Bound of the size of all losses of `nodes`, cut at a level; or inf."""
        return np.full(np.broadcast_shapes(self.shape, log_cut.shape), np.inf)

    def bulk_loss(self) -> Array:
        """Loss near which most of the forward distribution is, or 0."""
        return namespace(self.outer_rate).zeros_like(self.outer_rate)

    def bulk_width(self) -> Array:
        """Distance from `bulk_loss` of the losses where the unit is not drawn."""
        return namespace(self.outer_rate).zeros_like(self.outer_rate)

    def gaussian_shift(self) -> Array:
        """Shift where the pair is, but for the outer rate, two Gaussians; else 0."""
        return namespace(self.outer_rate).zeros_like(self.outer_rate)


class Bounds(Profile):
    """Mechanisms whose certified ends are computed of other pairs."""

    @abc.abstractmethod
    def certified(self, *, up: bool) -> Profile:
        """The pair that one certified end is computed of."""


class BoundingPair(Bounds):
    """Pairs that exist to bound another one, and are no mechanism's own."""

    @abc.abstractmethod
    def certified_error(self) -> tuple[Array, Array]:
        """Bounds of the errors of its log H_g and log g: nats, per step."""

    @abc.abstractmethod
    def least_spacing(self) -> Array:
        """Spacing of a lattice below which a finer one does not narrow the interval."""
