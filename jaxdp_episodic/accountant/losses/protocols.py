"""What a method may ask of a mechanism: small protocols over `PrivacyLoss`."""

# A method refuses, by name, a mechanism without the protocol that it needs.

from __future__ import annotations

import abc
from typing import ClassVar, Self

import numpy as np

from jaxdp_episodic.accountant.losses.loss_nodes import LossNodes, NodeRule
from jaxdp_episodic.accountant.losses.privacy_loss import (
    MomentRule,
    PrivacyLoss,
    Quadrature,
    Tails,
)
from jaxdp_episodic.accountant.numerics.loops import Array, namespace


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
