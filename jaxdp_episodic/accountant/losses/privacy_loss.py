"""The base classes of all mechanisms: what a privacy loss can answer.

A mechanism is a dominating pair (P, Q), described by arrays of parameters (its fields),
one entry a setting. Its privacy loss is log P/Q: under P forward; backward P and Q are
exchanged. Reference: Zhu, Dong, Wang (2022), arXiv:2106.08567.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from jaxdp_episodic.accountant.losses.loss_nodes import LossNodes, NodeRule
from jaxdp_episodic.accountant.numerics.loops import (
    Array,
    field_names,
    logsumexp,
    map_arrays,
    namespace,
)

Tails = tuple[Array, Array]
"""``log H_g(P||Q)`` (the profile) and ``log(g Q(L > log g))`` (the tail); backward with
P and Q exchanged."""

# Smallest rate that kernels compute with. A smaller positive rate is raised to it,
# which raises epsilon. Products and squares of several rates must not underflow.
_SMALLEST_RATE = 1e-60


class Quadrature(NamedTuple):
    """Size of a quadrature: number of panels, and Gauss–Legendre nodes in each."""

    num_panels: int
    nodes_per_panel: int
    lattice: float = 0.0  # if > 0 a trapezoidal rule with an error of e^-lattice


class MomentRule(NamedTuple):
    """What `Moments.log_excess` shall compute, and how."""

    direction: str  # "forward", "backward", or "symmetric" (both are equal)
    quadrature: Quadrature
    with_derivatives: bool = False  # also the first two in t, divided by the excess


class Hints(NamedTuple):
    """A sampled Gaussian with a similar privacy loss; searches start from it."""

    rate: Array  # sampling probability
    odds: Array  # P/Q is about ``odds e^{shift x}`` where it is large
    shift: Array  # distance of the two means, in standard deviations of the noise
    furthest: Array  # the largest shift with a probability that matters

    @classmethod
    def unsampled(cls, shift: Array) -> Self:
        """Returns the hints of the Gaussian mechanism without sampling."""
        one = namespace(shift).ones_like(shift)
        return cls(one, one, shift, shift)


@dataclass(frozen=True)
class PrivacyLoss(abc.ABC):
    """Base of all mechanisms: their fields, and facts that need no integral."""

    outer_rate: Array  # probability of a release; a factor of profiles and of M - 1
    # Range of losses, and of the shifts that cause them, in which squares of exponents
    # neither underflow nor overflow. Larger ones give inf; smaller ones are raised.
    SMALLEST_LOSS: ClassVar[float] = 1e-20
    LARGEST_LOSS: ClassVar[float] = 1e70

    padding: ClassVar[dict[str, float]] = {}  # values of missing parts, see `stack`
    compiles: ClassVar[bool] = True  # whether JAX may compile the kernels

    # --- Arrays ---

    def map(self, function: Callable[[Array], Array]) -> Self:
        """Returns the mechanism with a function applied to every field."""
        return map_arrays(function, self)

    @property
    def fields(self) -> tuple[Array, ...]:
        """All arrays, in the order of the fields; of a tuple field each part."""
        arrays: list[Array] = []
        map_arrays(arrays.append, self)
        return tuple(arrays)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Broadcast shape of the fields."""
        return np.broadcast_shapes(*map(np.shape, self.fields))

    @classmethod
    def stack(cls, losses: Sequence[Self]) -> Self:
        """Stacks mechanisms along a new first axis; shorter tuple fields are padded."""
        stacked: list[Any] = []
        for name in field_names(cls):
            values = list(map(operator.attrgetter(name), losses))
            if name not in cls.padding:
                stacked.append(np.array(values))
                continue
            shape = np.shape(next((value[0] for value in values if value), 0.0))
            filler = np.full(shape, cls.padding[name])
            columns = itertools.zip_longest(*values, fillvalue=filler)
            stacked.append(tuple(np.stack(column) for column in columns))
        return cls(*stacked)

    def stacked(self, columns: tuple[Array, ...], shape: tuple[int, ...]) -> Array:
        """Returns a tuple field as one array; its first axis counts the parts."""
        xp = namespace(*self.fields)
        return xp.stack([xp.broadcast_to(column, shape) for column in columns])

    # --- Facts ---

    @property
    @abc.abstractmethod
    def is_symmetric(self) -> bool:
        """Class constant: whether the profiles of both directions are equal."""
        # Abstract, without a default: a wrong True would make epsilon too small.

    @functools.cached_property
    def rates(self) -> dict[str, Array]:
        """The fields that are probabilities, by name; the outer rate comes first."""
        rates = {}
        for name in field_names(type(self)):
            if name.endswith("rate"):
                rates[name] = getattr(self, name)
        return rates

    @functools.cached_property
    def chance(self) -> Array:
        """Probability that a release involves the unit: the product of all rates."""
        return math.prod(self.rates.values(), start=1.0)

    @functools.cached_property
    def loses_nothing(self) -> Array:
        """Whether P and Q are equal: a rate is 0. The product may be 0 by underflow."""
        nothing = np.False_
        for rate in self.rates.values():
            nothing = nothing | (rate == 0)
        return nothing

    @property
    def is_unprotected(self) -> Array:
        """Whether there is no noise, or so little that kernels would overflow."""
        return np.zeros(self.shape, bool)

    @property
    def has_too_little_noise(self) -> Array:
        """Whether `is_unprotected` holds despite some noise, so inf is only a bound."""
        return self.is_unprotected & np.isfinite(self.__dict__.get("shift", np.inf))

    def kept_in_range(self) -> Self:
        """Returns fields that kernels can compute with; the loss never shrinks."""
        raised = dict(self.rates)
        for name, rate in raised.items():
            raised[name] = np.maximum(rate, _SMALLEST_RATE)
        return dataclasses.replace(self, **raised)

    @abc.abstractmethod
    def hints(self) -> Hints:
        """Returns a similar sampled Gaussian, from which searches start."""

    def largest_loss(self, *, backward: bool) -> Array:
        """Returns an upper bound of the loss in one direction, or inf."""
        return np.full(self.shape, np.inf)

    def log_kept(self) -> Array:
        """Returns ``log(1 - f)``, f the probability of an infinite loss."""
        # Profiles are f plus 1 - f times those that the kernels compute.
        if not np.any(self.is_unprotected):
            return np.zeros(self.shape)
        with np.errstate(divide="ignore"):
            unseen = np.log1p(-np.minimum(self.chance, 1.0))
        bare = np.where(self.has_too_little_noise, unseen, -np.inf)
        return np.where(self.is_unprotected, bare, 0.0)

    def with_little_noise(self) -> PrivacyLoss | None:
        """Returns a pair that dominates this one where `is_unprotected`, or None."""
        return None


class NoisyLoss(PrivacyLoss):
    """Base of the mechanisms that add noise."""

    # The distance of two means over the noise. Not a field here, since subclasses list
    # it after their rates.
    shift: Array

    @functools.cached_property
    def loses_nothing(self) -> Array:
        """Whether nothing is sampled, or the noise is infinite."""
        return super().loses_nothing | (self.shift == 0)

    @functools.cached_property
    def is_unprotected(self) -> Array:
        """Whether there is no noise, or next to none."""
        return ~self.loses_nothing & (self.shift > self.LARGEST_LOSS)

    def kept_in_range(self) -> Self:
        """Returns rates and shifts that kernels can compute with."""
        shift = np.clip(self.shift, self.SMALLEST_LOSS, self.LARGEST_LOSS)
        return dataclasses.replace(super().kept_in_range(), shift=shift)

    @property
    def rate_within(self) -> Array:
        """The product of all rates except the outer one."""
        return math.prod([*self.rates.values()][1:], start=1.0)


# Protocols. A method raises an error if a mechanism lacks the one that it needs.


class Profile(PrivacyLoss):
    """Mechanisms whose hockey-stick divergences are known."""

    may_have_atoms: ClassVar[bool] = True  # whether some loss but 0 has a probability

    @property
    def terms_of_profile(self) -> int:
        """Length of the sums that `log_tails` computes at each point."""
        return 1

    @abc.abstractmethod
    def log_tails(self, u: Array) -> tuple[Tails, Tails]:
        """Returns the forward and the backward `Tails` at ``u = log g >= 0``."""

    def tail_displacement(self, u: Array) -> Array:
        """Returns a bound, in nats, of the error of u that rounding amounts to."""
        return namespace(u).zeros_like(u)

    def profile_error(self) -> Array:
        """Returns the error of both `Tails`, divided by 1 + their absolute value."""
        return np.full(self.shape, 4e-15)

    def mass_error(self) -> Array:
        """Returns a further relative error of both `Tails`, whatever their size."""
        return np.zeros(self.shape)


class FiniteValues(Profile):
    """Mechanisms with finitely many losses."""

    @abc.abstractmethod
    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (J,) losses and their log-probabilities; fields must be scalars."""

    @property
    def largest_size(self) -> np.ndarray:
        """The largest absolute value of a loss, in nats."""
        return np.maximum(*(self.largest_loss(backward=b) for b in (False, True)))

    def tail_displacement(self, u: Array) -> Array:
        """The rounding error of the losses: two units in the last place."""
        return 4e-16 * self.largest_size + np.zeros_like(u)


def tails_of_values(u: Array, loss: Array, log_mass: Array) -> Tails:
    """Returns the tails at u of losses, first axis, with log-probabilities."""
    xp = namespace(u, loss, log_mass)
    above = loss > u
    gap = xp.where(above, u - loss, -1.0)
    return (
        logsumexp(xp.where(above, log_mass + xp.log(-xp.expm1(gap)), -xp.inf)),
        logsumexp(xp.where(above, log_mass + gap, -xp.inf)),
    )


class Moments(PrivacyLoss):
    """Mechanisms whose Rényi moments are known."""

    forward_is_larger: ClassVar[bool] = False  # True only if *proven* at all orders
    has_lattice: ClassVar[bool] = False  # whether a trapezoidal rule is exact

    @abc.abstractmethod
    def log_excess(self, t: Array, rule: MomentRule) -> tuple[Array, ...]:
        """Returns ``log(E_Q[(P/Q)^{1+t}] - 1)`` at t > 0, without the outer rate.

        If ``rule.with_derivatives``, the first two derivatives of the excess in t
        follow, each divided by the excess.
        """

    def largest_on_lattice(self, rule: Quadrature) -> Array:
        """Returns the largest t that the trapezoidal rule can do; <= 0: none."""
        raise NotImplementedError(f"{type(self).__name__} has no lattice")


class Nodes(PrivacyLoss):
    """Mechanisms whose loss distribution is known as complex weighted nodes."""

    nodes_exchange: ClassVar[bool] = False  # forward nodes give backward moments too
    # Number of distributions of which the loss distribution is a mixture; if there may
    # be several, see `IndependentEpisodesLoss.truncated`.
    num_terms: Array = 1.0

    @abc.abstractmethod
    def nodes(self, rule: NodeRule) -> LossNodes:
        """Returns the loss distribution as V sums over nodes, cut at V levels."""

    def bulk(self) -> tuple[Array, Array]:
        """Returns a loss near most forward ones, or 0, and those without the unit."""
        nothing = namespace(self.outer_rate).zeros_like(self.outer_rate)
        return nothing, nothing

    def gaussian_shift(self) -> Array:
        """Returns the shift if P and Q are Gaussians up to the outer rate; else 0."""
        return namespace(self.outer_rate).zeros_like(self.outer_rate)


class Bounds(Profile):
    """Mechanisms whose certified ends are computed from other pairs."""

    @abc.abstractmethod
    def certified(self, *, up: bool) -> Profile:
        """Returns the pair from which the upper or lower certified end is computed."""


class BoundingPair(Bounds):
    """Pairs that only bound another one, from above or below."""

    @abc.abstractmethod
    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """See `FiniteValues`: thousands of losses, near one another."""
