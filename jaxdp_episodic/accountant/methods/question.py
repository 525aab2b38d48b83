"""What is asked of a run: epsilon at a delta, or delta at an epsilon."""

# And the answer. Deltas are logarithms.

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np

from jaxdp_episodic.accountant.numerics.loops import Array, namespace

# Rounding error of a logarithm after a few operations, relative to 1 and its size.
_ROUNDING = 1e-15


class Answer(NamedTuple):
    """Answers of the settings' shape."""

    value: np.ndarray  # epsilon, or log(delta)
    error: np.ndarray  # estimate: nats of epsilon, or a share of delta; inf if unknown
    is_certified: np.ndarray  # an upper bound in place of an exact value


@dataclass(frozen=True)
class _Asked:
    """Base of `EpsilonAt` and `DeltaAt`; (n,) targets."""

    target: np.ndarray

    def at(self, target: np.ndarray) -> Self:
        """Returns the same question with another target."""
        return type(self)(target)

    def take(self, index: np.ndarray) -> Self:
        """Returns the question of some settings."""
        return self.at(self.target[index])


@dataclass(frozen=True)
class EpsilonAt(_Asked):
    """Epsilon at ``target = log(delta)``."""

    guess: np.ndarray | None = None  # of the answer; changes when it is found
    nothing: ClassVar[float] = 0.0  # of a run that loses nothing
    everything: ClassVar[float] = np.inf  # of one without protection
    is_epsilon: ClassVar[bool] = True

    def at(self, target: np.ndarray) -> EpsilonAt:
        """See `_Asked.at`; a guess is kept where there are as many targets."""
        guess = self.guess
        if guess is not None:
            guess = guess.reshape(target.shape) if guess.size == target.size else None
        return EpsilonAt(target, guess)

    def take(self, index: np.ndarray) -> EpsilonAt:
        """See `_Asked.take`."""
        guess = None if self.guess is None else self.guess[index]
        return EpsilonAt(self.target[index], guess)

    def scale(self, value: Array) -> Array:
        """What an error is relative to: epsilon, or 1e-3 where it is smaller."""
        xp = namespace(value)
        return xp.maximum(xp.abs(value), 1e-3)

    def at_end(self, largest_loss: np.ndarray) -> np.ndarray:
        """Where the target is at an end of its range, delta 0 or 1: see `end_value`."""
        del largest_loss
        return np.isneginf(self.target) | (self.target >= 0)

    def end_value(self, largest_loss: np.ndarray, log_kept: np.ndarray) -> np.ndarray:
        """The answer there: the largest loss, or inf where all may be lost; 0 at 1."""
        without = np.where(log_kept < 0, np.inf, largest_loss)
        return np.where(self.target >= 0, 0.0, without)

    def inside(self) -> EpsilonAt:
        """Returns the question with delta 1/2 in place of 0 and 1."""
        end = np.isneginf(self.target) | (self.target >= 0)
        return EpsilonAt(np.where(end, -np.log(2.0), self.target))

    def given_kept(self, log_kept: np.ndarray, *, up: bool = True) -> EpsilonAt:
        """Returns the question about the pair given that not all is lost at once."""
        # delta' = (delta - f) / (1 - f), rounded down for an answer that errs up; next
        # to f the error of the logarithms' difference is f / (delta - f) times as
        # large.
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            log_lost = np.log(-np.expm1(log_kept))
            gap = np.exp(log_lost - self.target)
            left = self.target + np.log1p(-gap)
            sizes = 2 + np.abs(self.target) + np.abs(log_lost)
            error = _ROUNDING * (sizes + np.abs(left) + sizes * gap / (1 - gap))
            left = left - error if up else left + error
            left = np.where(gap < 1, left - log_kept, -np.inf)
            if not up:  # Which side of 1 the quotient is on, rounding may have decided.
                left = np.where(np.abs(gap - 1) <= 4 * _ROUNDING * sizes, 0.0, left)
            left = np.where(log_kept == 0, self.target, left)
        # Rounding must not take delta to 1.
        return EpsilonAt(np.minimum(left, -1e-300))

    def with_failure(
        self, answer: Answer, log_kept: np.ndarray, *, up: bool = True
    ) -> Answer:
        """The answer from that to `given_kept`: inf where delta is less than f."""
        hopeless = np.isneginf(self.given_kept(log_kept, up=up).target)
        return Answer(
            np.where(hopeless, np.inf, answer.value),
            np.where(hopeless, 0.0, answer.error),
            np.where(hopeless, False, answer.is_certified),
        )


@dataclass(frozen=True)
class DeltaAt(_Asked):
    """``log(delta)`` at ``target = epsilon``; methods as those of `EpsilonAt`."""

    nothing: ClassVar[float] = -np.inf
    everything: ClassVar[float] = 0.0
    is_epsilon: ClassVar[bool] = False

    def scale(self, value: np.ndarray) -> float:
        """Errors of delta are relative already."""
        del value
        return 1.0

    def at_end(self, largest_loss: np.ndarray) -> np.ndarray:
        """Where epsilon is infinite, or at least the largest loss."""
        return self.target >= largest_loss

    def end_value(self, largest_loss: np.ndarray, log_kept: np.ndarray) -> np.ndarray:
        """The probability that everything is lost at once."""
        del largest_loss
        with np.errstate(divide="ignore"):
            log_lost = np.log(-np.expm1(log_kept))
        most = np.minimum(_outward(log_lost, up=True), 0.0)
        return np.where(log_kept < 0, most, -np.inf)

    def inside(self) -> DeltaAt:
        """Returns the question with epsilon 1 in place of inf."""
        return DeltaAt(np.where(np.isposinf(self.target), 1.0, self.target))

    def given_kept(self, log_kept: np.ndarray, *, up: bool = True) -> DeltaAt:
        """Returns the question with the same epsilon."""
        del log_kept, up
        return self

    def with_failure(
        self, answer: Answer, log_kept: np.ndarray, *, up: bool = True
    ) -> Answer:
        """``delta = f + (1 - f) delta'``, rounded; the relative error shrinks."""
        with np.errstate(divide="ignore"):
            log_lost = np.log(-np.expm1(log_kept))
        value = np.logaddexp(log_lost, log_kept + answer.value)
        value = np.minimum(_outward(value, up=up), 0.0)
        value = np.where(log_kept == 0, answer.value, value)
        return answer._replace(value=value)


Question = EpsilonAt | DeltaAt


def _outward(log_value: np.ndarray, *, up: bool) -> np.ndarray:
    """A sum of logarithms plus or minus its rounding, relative to their size."""
    error = _ROUNDING * (2 + np.abs(np.where(np.isfinite(log_value), log_value, 0.0)))
    return log_value + error if up else log_value - error
