"""A run (privacy losses and their counts), a question about it, and an answer.

Deltas are logarithms.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.privacy_loss import (
    Bounds,
    Moments,
    Nodes,
    PrivacyLoss,
    Profile,
)
from jaxdp_episodic.accountant.numerics.loops import Array, map_arrays, namespace, taken
from jaxdp_episodic.accountant.numerics.roots import largest_within

# Rounding error of a logarithm after a few operations, relative to 1 and its size.
_ROUNDING = 1e-15


class Answer(NamedTuple):
    """Answers of the settings' shape."""

    value: np.ndarray  # epsilon, or log(delta)
    error: np.ndarray  # estimate: nats of epsilon, or a share of delta; inf if unknown
    is_certified: np.ndarray  # whether the value is an upper bound, not exact


class Interval(NamedTuple):
    """Certified ends of epsilon or of log(delta)."""

    lower: float
    upper: float


@dataclass(frozen=True)
class _TargetQuestion:
    """Base of `EpsilonAt` and `DeltaAt`; (n,) targets."""

    target: np.ndarray

    def at(self, target: np.ndarray) -> Self:
        """Returns the question with another target."""
        return type(self)(target)


@dataclass(frozen=True)
class EpsilonAt(_TargetQuestion):
    """Epsilon at ``target = log(delta)``."""

    nothing: ClassVar[float] = 0.0  # answer of a run without loss
    everything: ClassVar[float] = np.inf  # answer of a run without protection
    is_epsilon: ClassVar[bool] = True

    def scale(self, value: np.ndarray) -> np.ndarray:
        """Returns what an error is relative to: epsilon, but at least 1e-3."""
        return np.maximum(np.abs(value), 1e-3)

    def at_end(self, largest_loss: np.ndarray) -> np.ndarray:
        """Whether delta is 0 or 1, so that `end_value` is the answer."""
        del largest_loss
        return np.isneginf(self.target) | (self.target >= 0)

    def end_value(self, largest_loss: np.ndarray, log_kept: np.ndarray) -> np.ndarray:
        """Returns the answer at an end: at 0 the largest loss, which may be inf."""
        without = np.where(log_kept < 0, np.inf, largest_loss)
        return np.where(self.target >= 0, 0.0, without)

    def inside(self) -> EpsilonAt:
        """Returns the question with delta 1/2 in place of 0 and 1."""
        end = np.isneginf(self.target) | (self.target >= 0)
        return EpsilonAt(np.where(end, -np.log(2.0), self.target))

    def given_kept(self, log_kept: np.ndarray, *, up: bool = True) -> EpsilonAt:
        """Returns the question about the pair given a finite loss."""
        # delta' = (delta - f) / (1 - f), with f = 1 - e^log_kept the probability of an
        # infinite loss, rounded down for an answer that is an upper bound. Near f the
        # error of the difference of logarithms is f / (delta - f) times as large.
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            log_lost = np.log(-np.expm1(log_kept))
            gap = np.exp(log_lost - self.target)
            left = self.target + np.log1p(-gap)
            sizes = 2 + np.abs(self.target) + np.abs(log_lost)
            error = _ROUNDING * (sizes + np.abs(left) + sizes * gap / (1 - gap))
            left = left - error if up else left + error
            left = np.where(gap < 1, left - log_kept, -np.inf)
            if not up:  # rounding may have moved the quotient to the other side of 1
                left = np.where(np.abs(gap - 1) <= 4 * _ROUNDING * sizes, 0.0, left)
            left = np.where(log_kept == 0, self.target, left)
        # Rounding must not raise delta to 1.
        return EpsilonAt(np.minimum(left, -1e-300))

    def with_failure(
        self, value: np.ndarray, log_kept: np.ndarray, *, up: bool = True
    ) -> np.ndarray:
        """Turns the answer to `given_kept` into the full one: inf if delta < f."""
        hopeless = np.isneginf(self.given_kept(log_kept, up=up).target)
        return np.where(hopeless, np.inf, value)


@dataclass(frozen=True)
class DeltaAt(_TargetQuestion):
    """``log(delta)`` at ``target = epsilon``; methods as those of `EpsilonAt`."""

    nothing: ClassVar[float] = -np.inf
    everything: ClassVar[float] = 0.0
    is_epsilon: ClassVar[bool] = False

    def scale(self, value: np.ndarray) -> float:
        """Returns 1, as errors of delta are relative."""
        del value
        return 1.0

    def at_end(self, largest_loss: np.ndarray) -> np.ndarray:
        """Whether epsilon is infinite, or at least the largest loss."""
        return self.target >= largest_loss

    def end_value(self, largest_loss: np.ndarray, log_kept: np.ndarray) -> np.ndarray:
        """Returns the probability of an infinite loss."""
        del largest_loss
        return self.with_failure(np.full(np.shape(log_kept), -np.inf), log_kept)

    def inside(self) -> DeltaAt:
        """Returns the question with epsilon 1 in place of inf."""
        return DeltaAt(np.where(np.isposinf(self.target), 1.0, self.target))

    def given_kept(self, log_kept: np.ndarray, *, up: bool = True) -> DeltaAt:
        """Returns the question with the same epsilon."""
        del log_kept, up
        return self

    def with_failure(
        self, value: np.ndarray, log_kept: np.ndarray, *, up: bool = True
    ) -> np.ndarray:
        """Returns ``f + (1 - f) delta'``, rounded; the relative error shrinks."""
        with np.errstate(divide="ignore"):
            log_lost = np.log(-np.expm1(log_kept))
        whole = np.logaddexp(log_lost, log_kept + value)
        whole = np.minimum(_outward(whole, up=up), 0.0)
        return np.where(log_kept == 0, value, whole)


Question = EpsilonAt | DeltaAt


def _outward(log_value: np.ndarray, *, up: bool) -> np.ndarray:
    """Adds or subtracts the rounding of a sum of logarithms."""
    error = _ROUNDING * (2 + np.abs(np.where(np.isfinite(log_value), log_value, 0.0)))
    return log_value + error if up else log_value - error


# The protocols that a method needs (searches start with the Rényi bound).
_PROTOCOLS = {"rdp": (Moments,), "exact": (Profile, Moments), "pld": (Profile, Moments)}


class Facts(NamedTuple):
    """What is known of a run without an integral; arrays of the run's shape."""

    loses_nothing: np.ndarray  # whether no step taken has a finite loss but 0
    is_unprotected: np.ndarray  # whether some of these steps are unprotected
    has_too_little_noise: np.ndarray  # whether some have too little for kernels
    log_kept: np.ndarray  # log of the probability that no step has an infinite loss
    # Upper bounds of the finite losses, forward and backward.
    largest_losses: tuple[np.ndarray, np.ndarray]
    most_lost: np.ndarray  # the same in either direction; inf without noise


class Group(NamedTuple):
    """K steps of one mechanism in each of n settings; arrays (K, n)."""

    loss: Any  # with the protocols that the method needs
    count: Array


@dataclass(frozen=True)
class Run:
    """Steps and the number of each of them, at every setting and on every path."""

    # Fields broadcast with one another and with the counts to ``(*settings, P)``, the
    # last axis over the distinct paths (1 without a `Population`).
    losses: tuple[PrivacyLoss, ...]
    counts: tuple[np.ndarray, ...]  # the number of each step; whole numbers as floats

    # --- Arrays ---

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Broadcast shape of all fields and counts."""
        arrays: list[Any] = []
        map_arrays(arrays.append, self)
        return np.broadcast_shapes(*map(np.shape, arrays))

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Self:
        """Returns the run with a function applied to every array."""
        return map_arrays(function, self)

    def flattened(self, shape: tuple[int, ...]) -> Self:
        """Returns the run broadcast to a shape, in one dimension."""
        if shape == self.shape == (1,):
            arrays: list[Any] = []
            map_arrays(arrays.append, self)
            if set(map(np.shape, arrays)) == {shape}:
                return self  # with its cached properties

        def flat(field: np.ndarray) -> np.ndarray:
            return np.broadcast_to(np.asarray(field, np.float64), shape).reshape(-1)

        return self.map(flat)

    def take(self, index: np.ndarray) -> Self:
        """Returns the settings with ascending indices of a flattened run."""
        if index.shape == self.shape:
            return self  # with its cached properties
        return self.map(lambda field: field[index])

    def take_paths(self, index: np.ndarray) -> Self:
        """Returns the run on some of the paths only."""

        # An axis of length 1 stands for all paths.
        def take(field: np.ndarray) -> np.ndarray:
            return field if np.shape(field)[-1:] in ((), (1,)) else field[..., index]

        return self.map(take)

    def with_axis(self) -> Self:
        """Returns the run with a further last axis of length 1."""
        return self.map(lambda field: np.asarray(field)[..., None])

    def in_reach(self) -> Self:
        """Returns an *upper bound* of the run that needs less noise."""
        uses = []
        for loss, count in zip(self.losses, self.counts, strict=True):
            beyond = loss.is_unprotected & (count > 0)
            other = loss.with_little_noise() if np.any(beyond) else None
            if other is None:
                uses.append((loss, count))
                continue
            uses.append((other, np.where(beyond, count, 0.0)))
            if not np.all(beyond):
                # Unused fields must not raise errors where no step is left.
                some = np.unravel_index(np.argmin(beyond), beyond.shape)

                def filled(
                    field: Array, where: Array = beyond, at: Any = some
                ) -> Array:
                    return np.where(
                        where, np.broadcast_to(field, where.shape)[at], field
                    )

                fields = loss.map(filled)
                uses.append((fields, np.where(beyond, 0.0, count)))
        return type(self)(*zip(*uses, strict=True))

    def kept(self) -> Self:
        """Returns the run without unprotected steps: given a finite loss."""
        pairs = zip(self.losses, self.counts, strict=True)
        kept = (np.where(loss.is_unprotected, 0.0, count) for loss, count in pairs)
        return type(self)(self.losses, tuple(kept))

    # --- Facts that need no integral ---

    @property
    def is_symmetric(self) -> bool:
        """Whether both directions are equal for every step."""
        return all(map(operator.attrgetter("is_symmetric"), self.losses))

    @property
    def forward_is_larger(self) -> bool:
        """Whether the forward moment is proven to be at least the backward one."""
        return all(
            loss.is_symmetric or (isinstance(loss, Moments) and loss.forward_is_larger)
            for loss in self.losses
        )

    @functools.cached_property
    def facts(self) -> Facts:
        """What is known of the run without an integral; read-only."""
        some, unprotected, too_little = np.zeros((3, *self.shape), bool)
        log_kept, forward, backward = np.zeros((3, *self.shape))
        with np.errstate(invalid="ignore"):  # no step times an infinite amount
            for loss, count in zip(self.losses, self.counts, strict=True):
                taken = count > 0
                loses = taken & ~loss.loses_nothing
                some |= loses
                if np.any(loss.is_unprotected):
                    unprotected |= loses & loss.is_unprotected
                    too_little |= taken & loss.has_too_little_noise
                log_kept += np.where(taken, count * loss.log_kept(), 0.0)
                for most, back in ((forward, False), (backward, True)):
                    most += np.where(loses, count * loss.largest_loss(backward=back), 0)
        largest = forward * (1 + 1e-12), backward * (1 + 1e-12)
        most = np.where(unprotected, np.inf, np.maximum(*largest))
        for fact in (some, unprotected, too_little, log_kept, *largest, most):
            fact.setflags(write=False)
        return Facts(~some, unprotected, too_little, log_kept, largest, most)

    def gaussian_shift(self) -> np.ndarray:
        """Returns the shift if all steps are Gaussians without sampling; else 0."""
        square, are_gaussian = np.zeros(self.shape), np.ones(self.shape, bool)
        for loss, count in zip(self.losses, self.counts, strict=True):
            kept = loss.kept_in_range()
            known = kept.gaussian_shift() if isinstance(kept, Nodes) else 0.0
            shift = np.where(loss.outer_rate >= 1, known, 0.0)
            taken = (count > 0) & ~loss.loses_nothing
            are_gaussian &= ~taken | (shift > 0)
            square = square + np.where(taken, count * shift * shift, 0.0)
        return np.where(are_gaussian, np.sqrt(square), 0.0)

    def refuse(self, method: str) -> None:
        """Raises NotImplementedError if a mechanism lacks a method's protocols."""
        for loss in self.losses:
            lacking = []
            for protocol in _PROTOCOLS[method]:
                if not isinstance(loss, protocol):
                    lacking.append(protocol.__name__)
            if not lacking:
                continue
            name = type(loss).__name__.removesuffix("Loss")
            if lacking == [Profile.__name__]:
                raise NotImplementedError(
                    f"{name} is known by its Rényi divergence alone, which method="
                    f"{method!r} cannot answer; method='rdp' covers it"
                )
            what = " and ".join(lacking)
            raise NotImplementedError(
                f"{name} lacks {what}, which method={method!r} asks for"
            )

    def certified(self, *, up: bool) -> Self:
        """Returns the run from which the upper or lower certified ends follow."""
        losses = (
            one.certified(up=up) if isinstance(one, Bounds) else one
            for one in self.losses
        )
        return type(self)(tuple(losses), self.counts)

    def groups(self) -> tuple[Group, ...]:
        """Returns the steps by mechanism, with fields that kernels accept."""
        by_class: dict[type, list[Group]] = {}
        everywhere = functools.partial(np.broadcast_to, shape=self.shape)
        for loss, count in zip(self.losses, self.counts, strict=True):
            left_out = np.logical_or(loss.loses_nothing, loss.is_unprotected)
            one = Group(loss.kept_in_range(), np.where(left_out, 0.0, count))
            by_class.setdefault(type(loss), []).append(map_arrays(everywhere, one))
        groups = []
        for kind, steps in by_class.items():
            losses, counts = zip(*steps, strict=True)
            flat = operator.methodcaller("reshape", len(counts), -1)
            stacked = Group(kind.stack(losses), np.array(counts))
            groups.append(map_arrays(flat, stacked))
        return tuple(groups)


# --- Runs with a closed form: one step, or Gaussian steps alone ---

# Nats of delta, the largest stated error, within which directions count as equal.
_ALIKE = 1e-6


def _log_delta(epsilon: Array, loss: Profile) -> Array:
    xp = namespace(epsilon, loss.outer_rate)
    (forward, _), (backward, _) = loss.log_tails(epsilon)
    return xp.minimum(xp.maximum(forward, backward), 0.0)


def _slope(epsilon: Array, loss: Profile) -> tuple[Array, Array]:
    """Returns ``log(delta)`` and minus its derivative, of the larger direction."""
    # If both are equal, as at 0, the one with the smaller slope is larger further on.
    xp = namespace(epsilon, loss.outer_rate)
    (forward, tail_forward), (backward, tail_backward) = loss.log_tails(epsilon)
    profile = xp.maximum(forward, backward)
    tail = xp.where(forward >= backward, tail_forward, tail_backward)
    are_alike = xp.minimum(forward, backward) > profile - _ALIKE
    tail = xp.where(are_alike, xp.minimum(tail_forward, tail_backward), tail)
    # Beyond the largest loss profile and tail are 0.
    slope = xp.exp(xp.where(xp.isfinite(profile), tail - profile, 0.0))
    return profile, slope


delta_of_profile = float64_boundary(_log_delta)
slope_of_profile = float64_boundary(_slope)
# Range of the epsilons that are searched for, above 0.
_EPSILONS = (1e-30, 1e36)
_WIDTH = 2e-15  # relative distance from a point at which delta is larger


@np.errstate(all="ignore")
def epsilon_of_profile(log_delta: np.ndarray, loss: Profile) -> np.ndarray:
    """Returns the epsilon at which the profile, as computed, is at most delta, (n,)."""
    size = log_delta.size
    loss = loss.map(lambda a: np.broadcast_to(a, size) if np.ndim(a) < 2 else a)
    found = np.zeros(size)
    left = np.flatnonzero(~(_log_delta(found, loss) <= log_delta))
    goal, rest = log_delta[left], taken(loss, left)

    def excess(inverse: np.ndarray, index: np.ndarray) -> np.ndarray:
        return _log_delta(1 / inverse, taken(rest, index)) - goal[index]

    ends = 1 / _EPSILONS[1], 1 / _EPSILONS[0]
    start = np.ones(left.size)
    inverse = largest_within(excess, start, ends, slope=1.0, tolerance=_WIDTH)
    found[left] = 1 / inverse
    return found


# Relative rounding error of the shift of composed Gaussians, for each step.
_SHIFT_ROUNDING = 4e-16


def one_gaussian(shift: np.ndarray) -> SampledGaussianLoss:
    """Returns the one step that Gaussian steps compose to; see `Run.gaussian_shift`."""
    always = np.ones(np.shape(shift))
    return SampledGaussianLoss(always, always, shift)


def shift_error(run: Run) -> float:
    """Bounds the relative rounding error of `Run.gaussian_shift`."""
    return _SHIFT_ROUNDING * (2 + len(run.losses))
