"""The budget of a run that adapts: what it may still do, whatever it has seen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import epoch_scheme
from jaxdp_episodic.accountant.describe.schemes import OWNED
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep, compose
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.api import epsilon as epsilon_of

# Most releases of a run: they are numbered by 32-bit integers on the device.
_MOST_RELEASES = 2**31 - 1
_KEYS = {"delta", "runs", "first", "checks"}


# Options that a line of text names; of more it says how many there are.
_MOST_NAMED = 4


def in_words(texts: Iterable[str]) -> str:
    """Returns texts about options as a list that fits into a message."""
    every = list(texts)
    if len(every) > _MOST_NAMED + 1:
        more = f"{len(every) - _MOST_NAMED} more options"
        every = [*every[:_MOST_NAMED], more]
    return ", ".join(every)


@dataclass(frozen=True, eq=False)
class AdaptiveBudget:
    """What a run may take, in an order that it chooses on the way.

    Where data have parts that no protected unit is in two of (trained on, held out),
    each part may have an `AdaptiveRun` of its own: its options look at this part alone.
    Whoever is in one part sees the options of the others as functions of public facts
    and of releases, so the guarantee is the largest of the runs' epsilons, not their
    composition. Of people, who may be in both, all options have to be in one run.

    Args:
      runs: of each part of the data, at their start; one, where a unit may be in all.
      delta: in (0, 1).
      first: names of options that are taken first, in this order, and never again:
        each has a quota, which is how often it is named here, or rules that say so.
      checks: names of options that look at held-out data; all others train.

    Attributes:
      options: all options by name: steps of single settings.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range; an option that is in two runs, or options for
        other units or another relation; sizes that are private.
      NotImplementedError: a step of an epoch; people in several runs.
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
        delta = _validation.open_unit_array("delta", self.delta)
        object.__setattr__(self, "runs", runs)
        object.__setattr__(self, "delta", _validation.single("delta", delta))
        for field in ("first", "checks"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        names = [name for run in runs for name in run.options]
        if len(set(names)) < len(names):
            raise ValueError(f"each option must be in one run, got {names}")
        for name, option in self.options.items():
            _check_option(name, option)
        for field in ("privacy_unit", "neighboring_relation"):
            found = {getattr(option, field) for option in self.options.values()}
            if len(found) > 1:
                raise ValueError(
                    f"options must have the same {field}, got {sorted(map(str, found))}"
                )
        if len(runs) > 1 and self.a_step.privacy_unit in OWNED:
            raise NotImplementedError(
                "people, and copies of an example, may be in several parts of the "
                "data: put all options into one run"
            )
        for name in (*self.first, *self.checks):
            self.option(name)
        self._check_first()
        if not self.training:
            raise ValueError("one option or more must train, got checks alone")
        banded = [name for name, step in self.options.items() if step.bands]
        if banded and list(self.training) != banded:
            raise NotImplementedError(
                f"option {banded[0]!r} has bands: it must be the only option that "
                f"trains, got {list(self.training)}"
            )

    def _check_first(self) -> None:
        """Refuses what could be chosen once more, or is none of the statistics."""
        for name in self.first:
            run, number = self._run_of(name), self.first.count(name)
            if run.rules is not None:
                self._check_rules_of_first(run)
            elif run.quotas is None or run.quotas[name] != number:
                quota = "none" if run.quotas is None else run.quotas[name]
                raise ValueError(
                    f"option {name!r} is taken first, {number} time(s), and must have "
                    f"that as its quota, got {quota}"
                )
            if name in self.checks:
                raise ValueError(f"checks must not name {name!r}, which is taken first")

    def _check_rules_of_first(self, run: AdaptiveRun) -> None:
        """Refuses rules by which one of the first could come otherwise, or again."""
        rules = run.rules
        assert rules is not None
        first = self._first_of(run)
        state, later = rules.start, set[str]()
        for name in first:
            if set(rules.moves.get(state, {})) != {name}:
                raise ValueError(
                    f"rules must allow {name!r} alone where it is taken first, got "
                    f"{sorted(rules.moves.get(state, {}))}"
                )
            state = rules.moves[state][name]
        waiting, seen = [state], set[str]()
        while waiting:
            here = waiting.pop()
            if here not in seen:
                seen.add(here)
                later |= rules.moves.get(here, {}).keys()
                waiting += rules.moves.get(here, {}).values()
        if not later.isdisjoint(first):
            raise ValueError(
                "rules must not allow what is taken first once more, got "
                f"{sorted(later.intersection(first))}"
            )

    @functools.cached_property
    def options(self) -> Mapping[str, GaussianStep]:
        """All options by name."""
        return {name: step for run in self.runs for name, step in run.options.items()}

    @property
    def training(self) -> tuple[str, ...]:
        """The options that take gradient steps."""
        others = (*self.first, *self.checks)
        return tuple(name for name in self.options if name not in others)

    @property
    def a_step(self) -> GaussianStep:
        """One of the options: all protect the same unit under the same relation."""
        return next(iter(self.options.values()))

    @property
    def step(self) -> GaussianStep:
        """The first of the options that train."""
        return self.options[self.training[0]]

    @property
    def before(self) -> tuple[GaussianStep, ...]:
        """The steps that are taken first."""
        return tuple(self.options[name] for name in self.first)

    @functools.cached_property
    def epsilon(self) -> float:
        """The guarantee, nats: *upper bound* of any way to choose, at ``delta``.

        It is that of the run as it was stated, whatever was taken since.
        """
        return self.epsilon_at(self.delta)

    def epsilon_at(self, delta: float) -> float:
        """Returns the guarantee at another delta."""
        return max(float(run.epsilon(delta=delta)) for run in self.runs)

    @property
    def permitted_steps(self) -> int:
        """As ``num_steps``: each charge looks at what is left besides."""
        return self.num_steps

    @property
    def takes_steps(self) -> bool:
        """True: there are options that train."""
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
        """An upper bound of the releases that are still possible."""
        total = sum(self.most(name) for name in self.options)
        return min(total, _MOST_RELEASES)

    @property
    def taken(self) -> dict[str, int]:
        """How often each option was taken."""
        return {n: int(k) for run in self.runs for n, k in run.taken.items()}

    @property
    def left(self) -> dict[str, int]:
        """How often each option could still be taken, if nothing else is."""
        return {name: self.most(name) for name in self.options}

    def most(self, name: str) -> int:
        """Returns how often an option could still be taken, if nothing else is.

        But for what is taken first, which is taken before it.
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
        """What of a run is taken first, in order."""
        return [name for name in self.first if name in run.options]

    def can(self, name: str) -> bool:
        """Returns whether an option can be taken now."""
        return bool(self._run_of(name).can(name))

    def charge(self, name: str) -> Self:
        """Returns the budget after one more of an option.

        Raises:
          ValueError: an unknown option, or more than is left.
        """
        own = self._run_of(name)
        runs = tuple(one.charge(name) if one is own else one for one in self.runs)
        charged = dataclasses.replace(self, runs=runs)
        # What was promised does not move, and is not computed again.
        if "epsilon" in vars(self):
            vars(charged)["epsilon"] = self.epsilon
        return charged

    def option(self, name: Any) -> GaussianStep:
        """Returns the option of a name.

        Raises:
          ValueError: there is none.
        """
        if not isinstance(name, str) or name not in self.options:
            raise ValueError(
                f"there is no option {_validation.shown(name)}; the options are "
                f"{sorted(self.options)}"
            )
        return self.options[name]

    def composed(self, counts: Mapping[str, int]) -> ComposedSteps:
        """Returns so many of each option as a run that was fixed in advance."""
        return compose(*((self.options[name], n) for name, n in counts.items()))

    def epsilon_taken(self) -> float:
        """Returns what a fixed run with the same steps would cost; *upper bound*.

        *Information, no guarantee*: the steps were chosen on the way. Of several runs
        the largest.
        """
        values = [0.0]
        for run in self.runs:
            counts = {name: int(k) for name, k in run.taken.items() if k}
            if counts:
                run_taken = self.composed(counts)
                values.append(float(epsilon_of(run_taken, delta=self.delta)))
        return max(values)

    def as_fixed(self) -> ComposedSteps | None:
        """Returns the fixed run that costs as much as any choice; None: there is none.

        That is the composition of all quotas, of one run that has nothing else.
        """
        run, *others = self.runs
        if others or run.quotas is None or run.rules is not None:
            return None
        return self.composed(dict(run.quotas))

    def left_in_words(self) -> str:
        """Returns how often each option could still be taken, for messages."""
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
        """Returns the budget that `to_dict` gave; what it reads may be untrusted.

        Raises:
          TypeError, ValueError, NotImplementedError: no such budget.
        """
        if not isinstance(mapping, Mapping) or mapping.keys() != _KEYS:
            raise ValueError(f"a budget must have the keys {sorted(_KEYS)}")
        lists = [mapping[name] for name in ("runs", "first", "checks")]
        if not all(isinstance(one, list) for one in lists):
            raise TypeError("runs, first and checks must be lists")
        for run in lists[0]:
            if isinstance(run, Mapping) and run.keys() & {"epsilon", "delta"}:
                raise ValueError("runs must state budgets, and no targets to search")
        made = tuple(AdaptiveRun.from_dict(run, where="runs") for run in lists[0])
        return cls(made, mapping["delta"], tuple(lists[1]), tuple(lists[2]))

    def _run_of(self, name: str) -> AdaptiveRun:
        self.option(name)
        return next(run for run in self.runs if name in run.options)


def _check_option(name: str, option: Any) -> None:
    """Refuses what a trainer cannot take by itself, and what rests on private sizes."""
    if not isinstance(option, GaussianStep):
        raise TypeError(
            f"option {name!r} must be a GaussianStep, got {_validation.shown(option)}"
        )
    if option.shape:
        raise ValueError(
            f"option {name!r} must be of one setting, got fields of shape "
            f"{option.shape}"
        )
    if epoch_scheme(option.design) is not None:
        raise NotImplementedError(
            f"option {name!r} is a step of an epoch, which has no guarantee of its "
            "own; options draw anew in every step"
        )
    if option.population is not None and option.neighboring_relation == "add_remove":
        raise ValueError(
            f"option {name!r} rests on private sizes: state public ones in its "
            "sampling, as its budget is public"
        )
