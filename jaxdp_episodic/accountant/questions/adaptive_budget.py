"""The budget of an adaptive run: the options that it may still use."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import OWNED, epoch_scheme
from jaxdp_episodic.accountant.describe.runs import reachable
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    compose,
    one_protection,
)
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of

# Largest number of releases: the device numbers them with 32-bit integers.
_MOST_RELEASES = 2**31 - 1
# Largest number of options named in a message.
_MOST_NAMED = 4


def in_words(texts: Iterable[str]) -> str:
    """Returns texts about options as a comma-separated list, shortened if long."""
    every = list(texts)
    if len(every) > _MOST_NAMED + 1:
        more = f"{len(every) - _MOST_NAMED} more options"
        every = [*every[:_MOST_NAMED], more]
    return ", ".join(every)


@dataclass(frozen=True, eq=False)
class AdaptiveBudget:
    """The options of a training run that chooses their order adaptively.

    If the data have parts such that no protected unit is in two of them (training data
    and held-out data), each part may have its own `AdaptiveRun`, whose options use this
    part only. For a unit of one part, the releases about the other parts are functions
    of public facts and earlier releases. So the guarantee is the largest of the runs'
    epsilons, not their composition. People may be in several parts: put all options
    into one run.

    Args:
      runs: one run without charges for each part of the data.
      delta: in (0, 1).
      first: names of options that are used first, in this order, and never again. Each
        must have its number of occurrences here as its quota, or rules that imply this.
      checks: names of options that use held-out data; all others train.

    Attributes:
      options: all options by name; each a step of one setting.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range, an option in two runs, options with different
        units or relations, or private sizes.
      NotImplementedError: a step of an epoch scheme, or people with several runs.
    """

    runs: tuple[AdaptiveRun, ...]
    delta: float
    first: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        runs = (self.runs,) if isinstance(self.runs, AdaptiveRun) else tuple(self.runs)
        if not runs or not all(isinstance(run, AdaptiveRun) for run in runs):
            raise TypeError(
                f"runs must be AdaptiveRun objects, got {_validation.shown(self.runs)}"
            )
        delta = _validation.one("delta", self.delta, _validation.open_unit_array)
        object.__setattr__(self, "runs", runs)
        object.__setattr__(self, "delta", delta)
        for field in ("first", "checks"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        names = [name for run in runs for name in run.options]
        if len(set(names)) < len(names):
            raise ValueError(f"each option must be in one run only, got {names}")
        for name, option in self.options.items():
            _check_option(name, option)
        one_protection("options", tuple(self.options.values()))
        if len(runs) > 1 and self.a_step.privacy_unit in OWNED:
            raise NotImplementedError(
                "people and copies of an example may be in several parts of the data: "
                "put all options into one run"
            )
        for name in (*self.first, *self.checks):
            self.option(name)
        self._check_first()
        if not self.training:
            raise ValueError("at least one option must train, got checks only")
        banded = [name for name, step in self.options.items() if step.bands]
        if banded and list(self.training) != banded:
            raise NotImplementedError(
                f"option {banded[0]!r} has bands: it must be the only option that "
                f"trains, got {list(self.training)}"
            )

    def _check_first(self) -> None:
        """Refuses options in ``first`` that could be used again, or are checks."""
        for name in self.first:
            run, number = self._run_of(name), self.first.count(name)
            if run.rules is None and (run.quotas or {}).get(name) != number:
                quota = "none" if run.quotas is None else run.quotas[name]
                raise ValueError(
                    f"option {name!r} is in first {number} time(s) and must have this "
                    f"quota, got {quota}"
                )
            if name in self.checks:
                raise ValueError(f"checks must not name {name!r}, which is in first")
        for run in self.runs:
            first, rules = self._first_of(run), run.rules
            if not first or rules is None:
                continue
            state = rules.start
            for name in first:
                if set(rules.moves.get(state, {})) != {name}:
                    raise ValueError(
                        f"rules must allow only {name!r} in state {state!r}, because "
                        f"it is in first, got {sorted(rules.moves.get(state, {}))}"
                    )
                state = rules.moves[state][name]
            later = {n for s in reachable(rules, state) for n in rules.moves.get(s, {})}
            if not later.isdisjoint(first):
                raise ValueError(
                    "rules must not allow options of first again, got "
                    f"{sorted(later.intersection(first))}"
                )

    @functools.cached_property
    def options(self) -> Mapping[str, Any]:
        """All options by name."""
        return {name: step for run in self.runs for name, step in run.options.items()}

    @property
    def training(self) -> tuple[str, ...]:
        """The options that take gradient steps."""
        others = (*self.first, *self.checks)
        return tuple(name for name in self.options if name not in others)

    @property
    def a_step(self) -> GaussianStep:
        """Any of the options: all have the same privacy unit and relation."""
        return next(iter(self.options.values()))

    @property
    def step(self) -> GaussianStep:
        """The first of the options that train."""
        return self.options[self.training[0]]

    @property
    def before(self) -> tuple[GaussianStep, ...]:
        """The steps of the options in ``first``."""
        return tuple(self.options[name] for name in self.first)

    @functools.cached_property
    def epsilon(self) -> float:
        """The guarantee at ``delta``, nats: an *upper bound* for every strategy.

        It is that of the whole run and does not depend on charges.
        """
        return self.epsilon_at(self.delta)

    def epsilon_at(self, delta: float) -> float:
        """Returns the guarantee at another delta."""
        return max(float(run.epsilon(delta=delta)) for run in self.runs)

    @property
    def permitted_steps(self) -> int:
        """Same as ``num_steps``; each charge also checks what remains."""
        return self.num_steps

    @property
    def takes_steps(self) -> bool:
        """True: some options train."""
        return True

    @property
    def planned(self) -> None:
        """None: the number of steps is not fixed in advance."""

    @property
    def is_private(self) -> bool:
        """False if the run has no finite epsilon."""
        return bool(np.isfinite(self.epsilon))

    @property
    def num_steps(self) -> int:
        """An upper bound on the number of releases that are still possible."""
        return min(sum(self.left.values()), _MOST_RELEASES)

    @property
    def taken(self) -> dict[str, int]:
        """How often each option has been charged."""
        return {n: int(k) for run in self.runs for n, k in run.taken.items()}

    @property
    def left(self) -> dict[str, int]:
        """How often each option may still be used if no other is."""
        return {name: self.most(name) for name in self.options}

    def most(self, name: str) -> int:
        """Returns how often an option may still be used if no other is.

        The options in ``first`` that are still due are used before.
        """
        run = self._run_of(name)
        if name in self.first:
            return self.first.count(name) - int(run.taken[name])
        if run.rules is not None:
            first = self._first_of(run)
            for one in first[sum(int(run.taken[n]) for n in set(first)) :]:
                run = run.charge(one)
        return int(run.most(name))

    def _first_of(self, run: AdaptiveRun) -> list[str]:
        """The options of a run in ``first``, in order."""
        return [name for name in self.first if name in run.options]

    def can(self, name: str) -> bool:
        """Returns whether an option is allowed now."""
        return bool(self._run_of(name).can(name))

    def charge(self, name: str) -> Self:
        """Returns the budget after one more use of an option.

        Raises:
          ValueError: an unknown option, or one that is not allowed now.
        """
        own = self._run_of(name)
        runs = tuple(one.charge(name) if one is own else one for one in self.runs)
        charged = dataclasses.replace(self, runs=runs)
        # The guarantee does not change and is not computed again.
        if "epsilon" in vars(self):
            vars(charged)["epsilon"] = self.epsilon
        return charged

    def option(self, name: Any) -> GaussianStep:
        """Returns the option with this name.

        Raises:
          ValueError: an unknown name.
        """
        if not isinstance(name, str) or name not in self.options:
            raise ValueError(
                f"there is no option {_validation.shown(name)}; the options are "
                f"{sorted(self.options)}"
            )
        return self.options[name]

    def composed(self, counts: Mapping[str, int]) -> ComposedSteps:
        """Returns these numbers of each option as a composed run."""
        return compose(*((self.options[name], n) for name, n in counts.items()))

    def epsilon_taken(self) -> float:
        """Returns epsilon of a fixed run with the charged steps, an *upper bound*.

        *Information, no guarantee*: the steps were chosen adaptively. With several runs
        it is the largest.
        """
        values = [0.0]
        for run in self.runs:
            if (taken := run.taken_composed()) is not None:
                values.append(float(epsilon_of(taken, delta=self.delta)))
        return max(values)

    def as_fixed(self) -> ComposedSteps | None:
        """Returns the composed run that costs as much as the worst strategy, or None.

        It is the composition of all quotas of a single run without rules.
        """
        run, *others = self.runs
        if others or run.quotas is None or run.rules is not None:
            return None
        return self.composed(dict(run.quotas))

    def left_in_words(self) -> str:
        """Returns how often each option may still be used, as a text for messages."""
        return in_words(f"{number:,} of {n!r}" for n, number in self.left.items())

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for ledgers."""
        return {
            "delta": self.delta,
            "runs": [run.to_dict() for run in self.runs],
            "first": list(self.first),
            "checks": list(self.checks),
        }

    @classmethod
    def from_dict(cls, mapping: Any) -> Self:
        """Returns the budget that `to_dict` returned; the input may be untrusted.

        Raises:
          TypeError, ValueError, NotImplementedError: not such a budget.
        """
        keys = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(mapping, Mapping) or mapping.keys() != keys:
            raise ValueError(f"a budget must have the keys {sorted(keys)}")
        lists = [mapping[name] for name in ("runs", "first", "checks")]
        if not all(isinstance(one, list) for one in lists):
            raise TypeError("runs, first and checks must be lists")
        for run in lists[0]:
            if isinstance(run, Mapping) and run.keys() & {"epsilon", "delta"}:
                raise ValueError(
                    "runs must have budgets, not targets epsilon and delta"
                )
        made = tuple(AdaptiveRun.from_dict(run, where="runs") for run in lists[0])
        return cls(made, mapping["delta"], tuple(lists[1]), tuple(lists[2]))

    def _run_of(self, name: str) -> AdaptiveRun:
        self.option(name)
        return next(run for run in self.runs if name in run.options)


def _check_option(name: str, option: Any) -> None:
    """Refuses options that a trainer cannot run alone, or that use private sizes."""
    _validation.instance(f"option {name!r}", option, GaussianStep, "a GaussianStep")
    if option.shape:
        raise ValueError(
            f"option {name!r} must be of one setting, got fields of shape "
            f"{option.shape}"
        )
    if epoch_scheme(option.design) is not None:
        raise NotImplementedError(
            f"option {name!r} is a step of an epoch scheme, which has no guarantee of "
            "its own; options must sample in every step"
        )
    if option.population is not None and option.neighboring_relation == "add_remove":
        raise ValueError(
            f"option {name!r} uses private sizes: state public ones in its sampling, "
            "because the budget is public"
        )
