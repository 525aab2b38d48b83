"""What is asked of a run: epsilon at a delta, or delta at an epsilon; and the answer.

A method takes one of the two and a `Run` and returns an `Answer`. Deltas are logarithms
throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np


class Answer(NamedTuple):
    """Answers of the settings' shape.

    Attributes:
      value: epsilon, or log(delta).
      error: estimate of its error: of epsilon in nats, of delta relative. Where
        ``is_certified`` the width of the certified interval; ``inf`` for a bound of
        unknown tightness.
      is_certified: whether the value is not exact but a certified upper bound.
    """

    value: np.ndarray
    error: np.ndarray
    is_certified: np.ndarray


@dataclass(frozen=True)
class Question:
    """Base of the two.

    Attributes:
      target: what is given.
      nothing, everything: class constants; the answers of a run that loses nothing and
        of one that is not protected at all.
    """

    target: np.ndarray
    nothing: ClassVar[float]
    everything: ClassVar[float]
    is_epsilon: ClassVar[bool]

    def at(self, target: np.ndarray) -> Self:
        """Returns the same question with another target."""
        return type(self)(target)

    def take(self, index: np.ndarray) -> Self:
        """Returns the question of some settings."""
        return self.at(self.target[index])

    def scale(self, value: np.ndarray) -> np.ndarray | float:
        """What an error of the answer is relative to."""
        raise NotImplementedError

    def given_kept(self, log_kept: np.ndarray) -> Self:
        """Returns what is to be asked of what is left when nothing is lost at once.

        With probability ``1 - e^log_kept`` everything is lost; ``delta = 1 - k + k
        delta'``.
        """
        raise NotImplementedError

    def with_failure(self, answer: Answer, log_kept: np.ndarray) -> Answer:
        """Returns the answer to this question from that to `given_kept`'s."""
        raise NotImplementedError


@dataclass(frozen=True)
class EpsilonAt(Question):
    """Epsilon at ``target = log(delta)``."""

    nothing: ClassVar[float] = 0.0
    everything: ClassVar[float] = np.inf
    is_epsilon: ClassVar[bool] = True
    # Below it the error is absolute.
    smallest: ClassVar[float] = 1e-3

    def scale(self, value: np.ndarray) -> np.ndarray:
        """Epsilon, or a thousandth."""
        return np.maximum(np.abs(value), self.smallest)

    def given_kept(self, log_kept: np.ndarray) -> EpsilonAt:
        """``delta' = (delta - f) / (1 - f)``; NaN where delta is f or less."""
        with np.errstate(invalid="ignore", divide="ignore"):
            log_lost = np.log(-np.expm1(log_kept))
            left = self.target + np.log1p(-np.exp(log_lost - self.target))
            # Rounded down: a smaller delta asks for a larger epsilon.
            left = left - 4e-16 * (1 + np.abs(left) + np.exp(log_lost - left))
            left = np.where(log_kept == 0, self.target, left - log_kept)
        return EpsilonAt(left)

    def with_failure(self, answer: Answer, log_kept: np.ndarray) -> Answer:
        """Infinite where delta does not even cover the failure."""
        hopeless = np.isnan(self.given_kept(log_kept).target)
        hopeless |= np.isneginf(self.given_kept(log_kept).target)
        return Answer(
            np.where(hopeless, np.inf, answer.value),
            np.where(hopeless, 0.0, answer.error),
            np.where(hopeless, False, answer.is_certified),
        )


@dataclass(frozen=True)
class DeltaAt(Question):
    """``log(delta)`` at ``target = epsilon``."""

    nothing: ClassVar[float] = -np.inf
    everything: ClassVar[float] = 0.0
    is_epsilon: ClassVar[bool] = False

    def scale(self, value: np.ndarray) -> float:
        """Errors of delta are relative already."""
        del value
        return 1.0

    def given_kept(self, log_kept: np.ndarray) -> DeltaAt:
        """The same epsilon."""
        del log_kept
        return self

    def with_failure(self, answer: Answer, log_kept: np.ndarray) -> Answer:
        """``delta = f + (1 - f) delta'``, rounded up; the relative error shrinks."""
        with np.errstate(divide="ignore"):
            log_lost = np.log(-np.expm1(log_kept))
        value = np.minimum(np.logaddexp(log_lost, log_kept + answer.value) + 4e-16, 0.0)
        value = np.where(log_kept == 0, answer.value, value)
        return answer._replace(value=value)
