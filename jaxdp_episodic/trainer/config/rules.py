"""Rules of adaptive runs: from what was released to the next option, or None.

A rule has no memory: it gives the same answer in a resumed run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.data.fields import (
    CheckedSpec,
    Count,
    Natural,
    Text,
    text,
    within,
)

_MOST_OPTIONS = 64  # in an untrusted config


def _names(field: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not 1 <= len(values) <= _MOST_OPTIONS:
        raise TypeError(
            f"{field} must be a list of 1 to {_MOST_OPTIONS} names of options, got "
            f"{_validation.shown(values)}"
        )
    return tuple(text(field, value) for value in values)


Margin = Annotated[float, within(0.0, math.inf, "[)", rule="be >= 0 and finite")]


class ScoreThen(NamedTuple):
    """A released noisy score."""

    release: int  # number of the release in the run, from 1
    option: str  # the check's name
    value: float  # as in `NoisyScore`
    deviation: float  # standard deviation of its noise


class Released(NamedTuple):
    """All that a rule sees.

    Attributes:
      number: number of releases so far, those given up included.
      params: the parameters as they would be released now.
      scores: noisy scores, in order, without those given up.
      taken: how often each option was charged, by name.
      left: how often each option may still be used, if no other is.
      last: the last option; None before the first.
    """

    number: int
    params: Any
    scores: tuple[ScoreThen, ...]
    taken: Mapping[str, int]
    left: Mapping[str, int]
    last: str | None


Rule = Callable[[Released], str | None]
"""Returns the name of the next option, or None to end the run."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StopWhenStalled(CheckedSpec):
    """Trains until its steps are used up, or until noisy scores stop improving.

    Attributes:
      train: the option that trains.
      check: the option that releases a score.
      every: steps between two checks.
      patience: the run ends after so many checks in a row that are no better than the
        best before them.
      margin: by which a better score must be better, >= 0, in standard deviations of
        the scores' noise.
    """

    train: Text = "step"
    check: Text = "check"
    every: Count = 50
    patience: Count = 2
    margin: Margin = 0.0

    def __call__(self, released: Released) -> str | None:
        """Returns the check if one is due, else the training option, or None."""
        if _stalls(released, self):
            return None
        return _due(released, self, (self.train,)) or _if_left(released, self.train)


@dataclass(frozen=True, eq=False, kw_only=True)
class NextWhenStalled(CheckedSpec):
    """Takes one option until noisy scores stop improving, then the next one.

    With options of less and less noise this lowers the noise when the score stalls. The
    run ends when the current option is used up.

    Attributes:
      options: those that train, in order.
      check: as of `StopWhenStalled`, like the rest; steps of all options count.
      every: steps between two checks.
      patience: checks in a row without an improvement, after which the next option is
        taken; from then on scores are compared with later ones only.
      margin: of an improvement.
    """

    options: Annotated[tuple[str, ...], _names]
    check: Text = "check"
    every: Count = 50
    patience: Count = 1
    margin: Margin = 0.0

    def __call__(self, released: Released) -> str | None:
        """Returns the check if one is due, else the current option."""
        turn = min(_stalls(released, self), len(self.options) - 1)
        due = _due(released, self, self.options)
        return due or _if_left(released, self.options[turn])


@dataclass(frozen=True, eq=False, kw_only=True)
class SpendRest(CheckedSpec):
    """Takes one option a number of times, and spends the rest of the budget on another.

    Attributes:
      first: the option to begin with.
      number: how often it is taken.
      rest: the option on which the rest is spent.
    """

    first: Text
    number: Natural
    rest: Text

    def __call__(self, released: Released) -> str | None:
        """Returns the current option; None if nothing is left for it."""
        if released.taken.get(self.first, 0) < self.number:
            return _if_left(released, self.first) or _if_left(released, self.rest)
        return _if_left(released, self.rest)


RULES = (StopWhenStalled, NextWhenStalled, SpendRest)
"""The rules that a config can name."""


def options_of(rule: Any) -> tuple[str, ...]:
    """Returns the options that one of `RULES` may return."""
    if isinstance(rule, StopWhenStalled):
        return rule.train, rule.check
    if isinstance(rule, NextWhenStalled):
        return *rule.options, rule.check
    if isinstance(rule, SpendRest):
        return rule.first, rule.rest
    return ()


def _stalls(released: Released, rule: Any) -> int:
    """How often the scores have stalled; after a stall comparison begins again."""
    stalls = worse = 0
    best = -math.inf
    for score in released.scores:
        if score.option != rule.check:
            continue
        if score.value > best + rule.margin * score.deviation:
            best, worse = score.value, 0
            continue
        worse += 1
        if worse == rule.patience:
            stalls, worse, best = stalls + 1, 0, score.value
    return stalls


def _due(released: Released, rule: Any, options: Sequence[str]) -> str | None:
    """The check, if enough steps were taken since the last one and one is left."""
    steps = sum(released.taken.get(name, 0) for name in options)
    checks = released.taken.get(rule.check, 0)
    is_over = not any(released.left.get(name, 0) for name in options)
    if is_over or steps // rule.every <= checks:
        return None
    return _if_left(released, rule.check)


def _if_left(released: Released, option: str) -> str | None:
    """The option, or None if it is used up; unknown names are refused later."""
    return option if released.left.get(option, 1) else None
