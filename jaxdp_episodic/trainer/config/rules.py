"""Rules of adaptive runs: from what was released alone to the next option, or None.

A rule remembers nothing by itself: a resumed run asks it as the first one did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.data.fields import CheckedSpec, Count, Natural, within

_MOST_OPTIONS = 64  # that an untrusted config may name


def _name(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        shown = _validation.shown(value)
        raise TypeError(f"{field} must be the name of an option, got {shown}")
    return value


def _names(field: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not 1 <= len(values) <= _MOST_OPTIONS:
        raise TypeError(
            f"{field} must be a list of 1 to {_MOST_OPTIONS} names of options, got "
            f"{_validation.shown(values)}"
        )
    return tuple(_name(field, value) for value in values)


Option = Annotated[str, _name]
Margin = Annotated[float, within(0.0, math.inf, "[)", said="be >= 0 and finite")]


class ScoreThen(NamedTuple):
    """A noisy score that was released."""

    release: int  # its number in the run, from 1
    option: str  # the check's name
    value: float  # of `NoisyScore`, like the next
    deviation: float  # of its noise


class Released(NamedTuple):
    """All that a rule is given.

    Attributes:
      number: releases so far, those given up included.
      params: the parameters as they would be released now.
      scores: noisy scores, in order. One that was given up is missing.
      taken: how often each option was taken, by name.
      left: how often each could still be taken, if nothing else is.
      last: the option that was taken last; None before the first.
    """

    number: int
    params: Any
    scores: tuple[ScoreThen, ...]
    taken: Mapping[str, int]
    left: Mapping[str, int]
    last: str | None


Rule = Callable[[Released], str | None]
"""What comes next: the name of an option, or None to end the run."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StopWhenStalled(CheckedSpec):
    """Trains until its steps are taken, or noisy scores no longer improve.

    Attributes:
      train: the option that trains.
      check: the option that releases a score.
      every: steps between two checks.
      patience: checks in a row that are no better than the best before them, at which
        the run ends.
      margin: by which a score has to be better to count as an improvement, >= 0; in
        standard deviations of the scores' noise.
    """

    train: Option = "step"
    check: Option = "check"
    every: Count = 50
    patience: Count = 2
    margin: Margin = 0.0

    def __call__(self, released: Released) -> str | None:
        """Returns the check where one is due, else a step; None at a stall."""
        if _stalls(released, self):
            return None
        return _due(released, self, (self.train,)) or _if_left(released, self.train)


@dataclass(frozen=True, eq=False, kw_only=True)
class NextWhenStalled(CheckedSpec):
    """Takes one option until noisy scores no longer improve, then the next one.

    With options of less and less noise this is "lower the noise when the score stalls".
    The run ends where the option that is due cannot be taken any more.

    Attributes:
      options: those that train, in order.
      check: as of `StopWhenStalled`, like the rest; steps of all options count.
      every: steps between two checks.
      patience: checks in a row without an improvement, at which the next option's turn
        comes; scores are compared anew from there on.
      margin: of an improvement.
    """

    options: Annotated[tuple[str, ...], _names]
    check: Option = "check"
    every: Count = 50
    patience: Count = 1
    margin: Margin = 0.0

    def __call__(self, released: Released) -> str | None:
        """Returns the check where one is due, else the option whose turn it is."""
        turn = min(_stalls(released, self), len(self.options) - 1)
        due = _due(released, self, self.options)
        return due or _if_left(released, self.options[turn])


@dataclass(frozen=True, eq=False, kw_only=True)
class SpendRest(CheckedSpec):
    """Takes one option so many times, and spends the rest on another.

    Attributes:
      first: the option to begin with.
      number: how often.
      rest: the option on which all that is left is spent.
    """

    first: Option
    number: Natural
    rest: Option

    def __call__(self, released: Released) -> str | None:
        """Returns the option whose turn it is; None where nothing is left for it."""
        if released.taken.get(self.first, 0) < self.number:
            return _if_left(released, self.first) or _if_left(released, self.rest)
        return _if_left(released, self.rest)


RULES = (StopWhenStalled, NextWhenStalled, SpendRest)
"""Those that a config can name."""


def options_of(rule: Any) -> tuple[str, ...]:
    """Returns the options that one of `RULES` may ask for."""
    if isinstance(rule, StopWhenStalled):
        return rule.train, rule.check
    if isinstance(rule, NextWhenStalled):
        return *rule.options, rule.check
    if isinstance(rule, SpendRest):
        return rule.first, rule.rest
    return ()


def _stalls(released: Released, rule: Any) -> int:
    """How often the scores have stalled; after each they are compared anew."""
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
    """The check, if the steps since the last one make it due and one is left."""
    steps = sum(released.taken.get(name, 0) for name in options)
    asked = released.taken.get(rule.check, 0)
    is_over = not any(released.left.get(name, 0) for name in options)
    if is_over or steps // rule.every <= asked:
        return None
    return _if_left(released, rule.check)


def _if_left(released: Released, option: str) -> str | None:
    """The option, unless it is known and used up; an unknown one is asked for."""
    return option if released.left.get(option, 1) else None
