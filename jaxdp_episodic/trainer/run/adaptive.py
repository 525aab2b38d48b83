"""Trains privately, and chooses on the way what to do next, by what was released.

What may be chosen is fixed before the first step: the options, each a step of its own
that trains or a noisy score of held-out data, and how much of them the budget has. A
rule chooses; it is given releases and public facts, and nothing else reaches it. So the
guarantee is that of the worst rule there could be, whatever this one does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.budget import (
    BudgetExhaustedError,
    PrivacyBudget,
)
from jaxdp_episodic.trainer.config.rules import Released, Rule, ScoreThen
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.run import checks as run_checks
from jaxdp_episodic.trainer.run.apart import found_in_both
from jaxdp_episodic.trainer.run.description import described_step
from jaxdp_episodic.trainer.run.draws import PreparedStep
from jaxdp_episodic.trainer.run.ledger import AdaptiveLedger
from jaxdp_episodic.trainer.run.trainer import Trainer
from jaxdp_episodic.trainer.run.validation import PrivateValidation

# Most scores that a run keeps for its rule.
_MOST_SCORES = 100_000
# What a trainer has of the step that it takes, and another option has otherwise.
_OF_STEP = (
    "sampler",
    "complete_units",
    "normalizer",
    "_block_size",
    "_draws",
    "_gradient",
    "_noise_multiplier",
    "_update",
)


class RuleError(ValueError):
    """A rule raised, or returned what is no choice; nothing was charged for it."""


class AdaptiveState(NamedTuple):
    """What changes from release to release.

    Attributes:
      params: as of `TrainingState`, like the next two.
      optimizer_state: likewise.
      start: likewise.
      clip_norm: likewise.
      scores: of each noisy score in turn ``release`` (its number, 0 where there is none
        yet), ``check`` (index of the option) and ``value``, as released.
    """

    params: Any
    optimizer_state: Any
    start: Any
    clip_norm: Any
    scores: Any


class AdaptiveTrainer(Trainer):
    """A private run that chooses on the way; see `Trainer` for all that is alike.

    Args:
      learner: as of `Trainer`.
      params: likewise.
      data: the private training data.
      budget: what may be chosen. Options that train may differ in noise and sampling;
        those of ``budget.first`` are the steps of ``start``.
      rule: asked before each release; see `Released`. None ends the run, as does a
        budget of which nothing can be taken any more.
      checks: for each option of ``budget.checks`` the validation that it is.
      **arguments: as of `Trainer`; the same for all options.

    Attributes:
      checks: as given.

    Raises:
      TypeError, ValueError: as `Trainer`; an option that is neither a check's step nor
        one of the statistics where it should be.
    """

    ledger: AdaptiveLedger

    def __init__(
        self,
        learner: Any,
        params: Any,
        *,
        data: ExampleTable,
        budget: AdaptiveBudget,
        rule: Rule,
        checks: Mapping[str, PrivateValidation] = MappingProxyType({}),
        **arguments: Any,
    ) -> None:
        if not isinstance(budget, AdaptiveBudget):
            raise TypeError(f"budget must be an AdaptiveBudget, got {type(budget)}")
        if not callable(rule):
            raise TypeError(f"rule must be a function, got {_validation.shown(rule)}")
        self._rule, self.checks = rule, dict(checks)
        self.has_private_scores = bool(checks)
        super().__init__(
            learner, params, data=data, budget=cast(Any, budget), **arguments
        )
        self._of_option = {budget.training[0]: _of_step(self)}
        for name in budget.training[1:]:
            planned = _as_planned(budget, budget.options[name])
            one = Trainer(learner, params, data=data, budget=planned, **arguments)
            self._of_option[name] = _of_step(one)
        self._check_checks(budget)
        most = sum(budget.most(name) for name in self.checks)
        _validation.whole_number("scores", most, minimum=0, maximum=_MOST_SCORES)
        most = max(most, 1)  # Orbax stores no empty array
        scores = {
            "release": np.zeros(most, np.int32),
            "check": np.zeros(most, np.int32),
            "value": np.zeros(most, np.float32),
        }
        state = AdaptiveState(*self.state, scores)
        self._now = (self._gradient.on_devices(state), 0)
        options = budget.options.items()
        self.run = {
            **self.run,
            "adaptive": budget.to_dict() | {"runs": len(budget.runs)},
            "checks": {name: one.described() for name, one in self.checks.items()},
            "rule": getattr(rule, "to_dict", lambda: getattr(rule, "__name__", "?"))(),
        }
        # In stored runs the options stand beside these.
        taken = [name for name, _ in options if name in self.run["adaptive"]]
        if taken:
            raise ValueError(
                f"options must have other names than {sorted(self.run['adaptive'])}, "
                f"with which a run describes itself, got {taken[0]!r}"
            )
        self.run["adaptive"] |= {name: described_step(step) for name, step in options}

    @property
    def scores(self) -> tuple[ScoreThen, ...]:
        """The noisy scores that were released, in the first process."""
        state = cast(AdaptiveState, self.state)
        found, names = [], list(self.checks)
        columns = (np.asarray(state.scores[n]) for n in ("release", "check", "value"))
        for release, check, value in zip(*columns, strict=True):
            if release:
                name = names[check]
                score = self.checks[name].score(value)
                found.append(ScoreThen(int(release), name, *score))
        return tuple(found)

    @contextmanager
    def ahead(self) -> Iterator[Iterator[PreparedStep | None]]:
        """None for each release to come: what it is nobody knows before."""

        def releases() -> Iterator[None]:
            while self.choose() is not None:
                yield None

        yield releases()

    @property
    def has_ended(self) -> bool:
        """Whether the run has noted its end, or nothing is left to choose."""
        ledger = self.ledger
        if self.num_steps_taken < len(ledger.options):
            return False
        now = ledger.now
        is_begun = self.num_steps_taken >= len(now.first)
        return ledger.has_ended or (
            is_begun and not any(now.can(name) for name in now.options)
        )

    def choose(self) -> str | None:
        """Returns the option that comes next, chosen once; None: the run is over.

        All processes call it. What was chosen and not taken yet, also before the run
        was resumed, is not chosen again.

        Raises:
          RuleError: the rule raised, or asked for what there is not, or no more.
            Nothing is charged, and nothing lost.
        """
        self._join()
        with self._processes.together():
            return self._chosen_next()

    def _chosen_next(self) -> str | None:
        self._give_up_unreleased()
        number, ledger = self.num_steps_taken, self.ledger
        if number >= len(ledger.options) and not ledger.has_ended:
            name = self._choice(number)
            if name is None:
                ledger.end()
            else:
                ledger.choose(name)
        return ledger.options[number] if number < len(ledger.options) else None

    def _choice(self, number: int) -> str | None:
        """What comes after so many releases, decided in the first process."""
        now = self.ledger.now
        if number < len(now.first):
            return now.first[number]
        if not any(now.can(name) for name in now.options):
            return None
        choice = self._asked(number) if self._processes.is_first else None
        return self._processes.shared_value(choice)

    def _asked(self, number: int) -> str | None:
        now, options = self.ledger.now, self.ledger.options
        released = Released(
            number,
            self.params,
            self.scores,
            MappingProxyType(now.taken),
            MappingProxyType(now.left),
            options[-1] if options else None,
        )
        where = f"after {number:,} releases"
        try:
            choice = self._rule(released)
        except Exception as error:
            raise RuleError(
                f"rule raised {type(error).__name__} {where}: {error}; nothing was "
                "charged, and the run can go on with another rule"
            ) from error
        if choice is None:
            return None
        if not isinstance(choice, str) or choice not in now.options:
            raise RuleError(
                f"rule must return one of {sorted(now.options)}, or None to end the "
                f"run, got {_validation.shown(choice)} {where}"
            )
        if not now.can(choice):
            raise RuleError(
                f"rule asked {where} for {choice!r}, which cannot be taken any more, "
                f"or not now; left are {now.left_in_words()}"
            )
        return choice

    @property
    def has_public_accounting(self) -> bool:
        """True: the menu of such a run, and its prices, are public."""
        return True

    def accounting(self) -> Callable[[int], dict[str, Any]]:
        """Returns what says, of a release, the guarantee, the choice and what is left.

        The guarantee is the same from the first release to the last.
        """

        def facts(step: int) -> dict[str, Any]:
            said: dict[str, Any] = {"epsilon": self.budget.epsilon}
            if step:
                said["option"] = self.ledger.options[step - 1]
            said["left"] = self.ledger.now.left
            scores = self.scores
            if scores and scores[-1].release == step:
                said["score"] = scores[-1].value
                said["score_noise"] = scores[-1].deviation
            return said

        return facts

    def _step(self, prepared: PreparedStep | None) -> dict[str, Any]:
        name = self.choose()
        if name is None:
            raise BudgetExhaustedError("the run has chosen to end, or spent its budget")
        if name not in self.checks:
            self._use(name)
            return super()._step(None)
        state, number = self.state, self.num_steps_taken + 1
        if number > self.ledger.charged:
            self.ledger.charge()
        self._processes.meet()  # the first has charged
        if self._processes.is_first:
            check = self.checks[name]
            noised = check.release(self._stages.judged, self.params, self._keys, number)
            state = self._let_out(state, number, noised)
        self._processes.meet()
        self._now = (state, number)
        return {}

    def _after(self, state: Any, number: int, released: Any) -> Any:
        name = self.ledger.options[number - 1]
        if name not in self.checks:
            self._use(name)
            return super()._after(state, number, released)
        scores = {key: np.array(column) for key, column in state.scores.items()}
        place = int(np.count_nonzero(scores["release"]))
        scores["release"][place] = number
        scores["check"][place] = list(self.checks).index(name)
        scores["value"][place] = released
        return self._gradient.on_devices(state._replace(scores=scores))

    def _released_like(self, number: int) -> Any:
        if self.ledger.options[number - 1] in self.checks:
            return None
        return super()._released_like(number)

    def _use(self, name: str) -> None:
        """Takes up what an option is taken with; statistics have none of it."""
        if name not in self.ledger.now.first:
            vars(self).update(self._of_option[name])

    def _new_ledger(self, charged: int = 0) -> AdaptiveLedger:
        return AdaptiveLedger(cast(AdaptiveBudget, self.budget), charged=charged)

    def _share(self) -> None:
        super()._share()
        ledger = self.ledger
        options, has_ended = self._processes.shared_value(
            [ledger.options, ledger.has_ended]
        )
        if not self._processes.is_first:
            self.ledger = AdaptiveLedger(
                cast(AdaptiveBudget, self.budget),
                options,
                charged=ledger.charged,
                has_ended=has_ended,
            )

    def _check_checks(self, budget: AdaptiveBudget) -> None:
        """Refuses validations that are not those of the budget."""
        if set(self.checks) != set(budget.checks):
            raise ValueError(
                f"checks must be given for {sorted(budget.checks)}, the budget's, got "
                f"{sorted(self.checks)}"
            )
        for name, one in self.checks.items():
            if not isinstance(one, PrivateValidation):
                shown = _validation.shown(one)
                raise TypeError(f"check {name!r} must be a PrivateValidation: {shown}")
            if one.step != budget.options[name]:
                raise ValueError(
                    f"check {name!r} must have the step of the budget's option, got "
                    f"{one.step} against {budget.options[name]}"
                )
            if one.noise != self.noise:
                raise ValueError(
                    f"check {name!r} must have noise={self.noise!r} as the run has, "
                    f"got {one.noise!r}"
                )
            one.check_learner(self._stages.judged)
            run_checks.warn_about_delta(one.step, budget.delta, one.data)
            if len(budget.runs) > 1:
                _check_apart(name, one, self.data)


def _check_apart(name: str, check: PrivateValidation, data: ExampleTable) -> None:
    """Refuses to count apart what a protected unit of both would pay for twice."""
    found, by_chance = found_in_both(check.data, data, check.step)
    if found:
        raise ValueError(
            f"check {name!r} must be apart from the training data, got {found}: put "
            "its option into one run with those that train"
        )
    if by_chance:
        warnings.warn(
            f"check {name!r} is apart from the training data, but has {by_chance}: by "
            "chance, or whoever gave that example to both parts pays for one only",
            stacklevel=4,
        )


def _of_step(trainer: Trainer) -> dict[str, Any]:
    return {name: vars(trainer)[name] for name in _OF_STEP}


def _as_planned(budget: AdaptiveBudget, step: Any) -> PrivacyBudget:
    """A budget for the parts of a trainer that takes this option; it charges nothing.

    Its ledger and state are not used.
    """
    most = budget.num_steps
    return PrivacyBudget(
        step, budget.epsilon, budget.delta, most, most, before=budget.before
    )
