"""The config of an adaptive run: its options, noisy scores and rule.

A rule leads from what was released to the next option, or to None. It has no memory: it
gives the same answer in a resumed run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import Scheme
from jaxdp_episodic.accountant.describe.step import Sampling
from jaxdp_episodic.trainer.config.training_parts import Share
from jaxdp_episodic.trainer.data.fields import (
    CheckedSpec,
    Count,
    Flag,
    Float32,
    Natural,
    Positive,
    Text,
    listed,
    whole,
    within,
)

_MOST_IN_RULE = 64  # options; limits what an untrusted config may ask for
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

    options: Annotated[tuple[str, ...], functools.partial(listed, most=_MOST_IN_RULE)]
    check: Text = "check"
    every: Count = 50
    patience: Count = 1
    margin: Margin = 0.0

    def __call__(self, released: Released) -> str | None:
        """Returns the check if one is due, else the current option."""
        turn = min(_stalls(released, self), len(self.options) - 1)
        due = _due(released, self, self.options)
        return due or _if_left(released, self.options[turn])


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


# --- The config ---

CHECK = "check"
"""Name of the option that releases a noisy score."""
STEP = "step"
"""Name of the option that trains, if a config names none."""
# Limits of what an untrusted config may ask for.
_MOST_OPTIONS = 16
_MOST_CHECKS = 10_000
# Splits of the package's own data that hold the training data.
_TRAINED_ON = ("train", "all")


class CheckConfig(CheckedSpec):
    """Noisy scores on private held-out tasks; see `PrivateValidation`."""

    # draws episodes from the held-out data; its sizes are public
    sampling: Sampling | Scheme
    number: Annotated[int, whole(1, _MOST_CHECKS)]  # most scores in the run
    split: Text = "validation"
    # of the budget, for all scores together, unless ``apart``; None: 0.05
    share: Share | None = None
    # held-out and training data share no protected unit, so each has the whole budget
    apart: Flag = False
    fixed: Flag = False
    error_bound: Float32 | None = None  # needed for regression
    normalizer: Float32 | None = None  # public number of episodes a score

    def check_values(self) -> None:
        """Refuses ``apart`` with training data or a share."""
        if self.apart and self.split in _TRAINED_ON:
            raise ValueError(
                "apart must be false with the training data, got "
                f"split={self.split!r}: a unit in both parts is charged for both"
            )
        if self.apart and self.share is not None:
            raise ValueError(
                "share must lie in (0, 1), and be left out with apart=true, got "
                f"{self.share!r}"
            )


class OptionConfig(CheckedSpec):
    """A kind of step that the run may take."""

    noise: Positive = 1.0  # factor of the run's noise multiplier
    # how often; None for all options: each has a price instead
    most: Count | None = None


class AdaptiveConfig(CheckedSpec):
    """An adaptive budget instead of a plan; docs/adaptive_training.md has the keys."""

    # None: a function given to `run_training`
    rule: StopWhenStalled | NextWhenStalled | SpendRest | None = None
    # kinds of steps by name
    options: Mapping[str, OptionConfig] = field(default_factory=dict)
    check: CheckConfig | None = None  # noisy scores for the rule, if any
    # options may only be taken in the order in which they are named; prices are lower
    only_lower: Flag = False

    def check_values(self) -> None:
        """Refuses options that do not fit together; adds one if there are none."""
        if len(self.options) > _MOST_OPTIONS or CHECK in self.options:
            raise ValueError(
                f"options must be at most {_MOST_OPTIONS} and none named {CHECK!r}, "
                f"got {sorted(self.options)}"
            )
        options = dict(self.options) or {STEP: OptionConfig()}
        for name, option in options.items():
            if not isinstance(option, OptionConfig):
                shown = _validation.shown(option)
                raise TypeError(f"options.{name} must be a table, got {shown}")
        object.__setattr__(self, "options", MappingProxyType(options))
        quotas = [option.most for option in options.values()]
        if len(options) > 1 and None in quotas and set(quotas) != {None}:
            raise ValueError("most must be given for all options or for none")
        if self.only_lower and self.has_quotas:
            raise ValueError(
                "only_lower is for options with prices, whose cost depends on their "
                "order; with quotas it does not"
            )
        known = [*options, *([CHECK] if self.check is not None else [])]
        rule, named = self.rule, ()
        if isinstance(rule, StopWhenStalled):
            named = rule.train, rule.check
        elif isinstance(rule, NextWhenStalled):
            named = *rule.options, rule.check
        elif isinstance(rule, SpendRest):
            named = rule.first, rule.rest
        for name in named:
            if name not in known:
                raise ValueError(
                    f"rule must name options of the run, {known}, got {name!r}"
                )

    @property
    def has_quotas(self) -> bool:
        """Whether each option has a quota instead of a price."""
        is_one = len(self.options) == 1
        return is_one or all(one.most is not None for one in self.options.values())

    @property
    def check_share(self) -> float:
        """Share of the budget for all scores together; 0 if they do not share it."""
        if self.check is None or self.check.apart:
            return 0.0
        return 0.05 if self.check.share is None else self.check.share
