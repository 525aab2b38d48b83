"""Runs on disjoint parts of the data, and the options of adaptive runs."""

from __future__ import annotations

import functools
import graphlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Annotated, Any, Self

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe import spec
from jaxdp_episodic.accountant.describe.designs import (
    checked_name,
    epoch_scheme,
    refuse_repeats,
)
from jaxdp_episodic.accountant.describe.releases import (
    Release,
    RenyiDP,
    ZeroConcentratedDP,
)
from jaxdp_episodic.accountant.describe.step import (
    AnyStep,
    ComposedSteps,
    GaussianStep,
    compose,
    one_protection,
)

# What assigns a unit to its part of the data.
FIXED = "fixed"
CONTENT = "content"
# Largest number of states of a rule book.
_MOST_STATES = 10_000
# Largest budget: the recursion has one row for each unit of it.
MOST_BUDGET = 1_000_000


_Natural = Annotated[int, spec.number(spec.AT_LEAST_ZERO)]
_Budget = functools.partial(_validation.whole_number, maximum=MOST_BUDGET)
_Membership = functools.partial(_validation.choice, allowed=(FIXED, CONTENT))


class DisjointParts(spec.Spec):
    """Runs on disjoint parts of the data; made by `disjoint`.

    Attributes:
      names: names of the parts, all different.
      parts: the run of each part: a step, a release or a composed run.
      membership: what assigns a unit to its part; see `disjoint`.
    """

    names: tuple[Annotated[str, checked_name], ...]
    parts: tuple[AnyStep, ...]
    membership: Annotated[str, _Membership] | None = None

    def check_fields(self) -> None:
        """Checks that each part has a name, and that all protect the same units."""
        super().check_fields()
        refuse_repeats("names", self.names, 1)
        if len(self.parts) != len(self.names):
            raise ValueError(
                f"parts must have one run for each of {self.names}, "
                f"got {len(self.parts)}"
            )
        one_protection("disjoint parts", self.steps)
        # One change must not affect two parts.
        relations = {step.neighboring_relation for step in self.steps} - {None}
        (relation,) = relations or {None}
        if self.membership == FIXED or relation == "add_remove":
            return
        if self.membership == CONTENT:
            raise NotImplementedError(
                f"membership={CONTENT!r} under {relation} has no theorem here: a "
                "changed unit may leave one part and join another, so that two parts "
                f"change; covered: add_remove, or membership={FIXED!r}"
            )
        if relation != "zero_out":  # there each slot is public and in one part
            raise ValueError(
                f"membership must be given under {relation or 'an unknown relation'}: "
                f"{FIXED!r} if no change of the data moves a unit to another part, got "
                "None"
            )

    @property
    def steps(self) -> tuple[GaussianStep | Release, ...]:
        """The steps of all parts."""
        return tuple(step for part in self.parts for step in parts_of(part))

    @property
    def have_counts(self) -> bool:
        """Whether every part is a composed run, which has its own counts."""
        return all(isinstance(part, ComposedSteps) for part in self.parts)


def disjoint(
    parts: Mapping[str, AnyStep], *, membership: str | None = None
) -> DisjointParts:
    """Returns runs on disjoint parts of the data, of which the most expensive counts.

    ``disjoint({"spring": step_a, "autumn": step_b})``. At each delta the cost is that
    of the most expensive part, not the sum (parallel composition). The parts may run in
    any order, and each may use the releases of the others.

    Conditions that nothing checks: no protected unit is in two parts; the part of a
    unit does not depend on the data of others, as a cluster or "the first thousand"
    does; noise, rates and numbers of steps of all parts are fixed in advance.

    Args:
      parts: name of each part -> its step, release or run made by `compose`, all with
        the same privacy unit and relation. A release that uses the data of all parts
        belongs in the run of every part.
      membership: "fixed" if no change of the data moves a unit to another part;
        "content" if the record's content determines its part, which only add_remove
        covers. It must be given under replace_one.

    Raises:
      ValueError: no parts, parts that protect different units, or a missing membership.
      NotImplementedError: membership "content" under zero_out or replace_one.

    Reference: McSherry (2009), "Privacy integrated queries", Theorem 4; docs/proofs.md,
    "Disjoint parts".
    """
    _validation.instance("parts", parts, Mapping, "a table of names and steps")
    for name, part in parts.items():
        checked_name("each name of parts", name)
        spec.checked(f"part {name!r}", part, AnyStep)
    return DisjointParts(tuple(parts), tuple(parts.values()), membership)


def refuse_disjoint(step: Any, what: str) -> None:
    """Refuses disjoint parts in a function that takes one run."""
    if isinstance(step, DisjointParts):
        raise NotImplementedError(
            f"{what} does not cover disjoint parts: call it for the run of each part, "
            f"{step.names}. Covered: epsilon, delta, rdp, their intervals, trade_off, "
            "true_positive_rate, advantage and gdp_mu. To calibrate, calibrate each "
            "part to the same target"
        )


# --- Adaptive runs ---


class RuleBook(spec.Spec):
    """A graph of the options that each state of an adaptive run allows.

    ``RuleBook("early", {"early": {"slow": "early", "fast": "late"}, "late": {"fast":
    "late"}})`` allows "slow" any number of times, but not after "fast". A state that
    allows no option may be omitted. The graph may have cycles, as here, if prices or
    quotas end the run. A run may stop in every state.

    Attributes:
      start: the state in which the run begins.
      moves: for each state, a table from each allowed option to the next state.

    Raises:
      ValueError: a start that is no state, or more than 10,000 states.
    """

    start: spec.Word
    moves: Mapping[spec.Word, Mapping[spec.Word, spec.Word]]

    def check_values(self) -> None:
        """Refuses a start that is no state, and too many states."""
        _validation.choice("start", self.start, self.moves)
        if len(self.moves) > _MOST_STATES:
            raise ValueError(
                f"moves must have at most {_MOST_STATES:,} states, got "
                f"{len(self.moves):,}"
            )

    @classmethod
    def in_order(cls, options: Sequence[str]) -> Self:
        """Returns "only in this order": no option after one that is later in the list.

        If the options are sorted by decreasing noise, the noise can only decrease. Any
        option may be skipped.
        """
        names = _names(options)
        moves = {
            name: {later: later for later in names[i:]} for i, name in enumerate(names)
        }
        return cls(names[0], moves)

    @classmethod
    def at_most_changes(cls, options: Sequence[str], changes: int) -> Self:
        """Returns "at most ``changes`` changes from one option to another"."""
        names = _names(options)
        most = _validation.whole_number("changes", changes, minimum=0)
        moves = {"start": {name: f"{name}, 0 changes" for name in names}}
        for done in range(most + 1):
            for name in names:
                moves[f"{name}, {done} changes"] = {
                    other: f"{other}, {done + (other != name)} changes"
                    for other in names
                    if done < most or other == name
                }
        return cls("start", moves)

    @classmethod
    def every(cls, options: Sequence[str], steps: int) -> Self:
        """Returns "decide every ``steps`` steps": each choice is kept for that long."""
        names = _names(options)
        length = _validation.whole_number("steps", steps)

        def after(name: str, done: int) -> str:
            return "decide" if done == length else f"{name}, {done} of {length}"

        moves = {"decide": {name: after(name, 1) for name in names}}
        for name, done in itertools.product(names, range(1, length)):
            moves[after(name, done)] = {name: after(name, done + 1)}
        return cls("decide", moves)

    @classmethod
    def freely(cls, options: Sequence[str]) -> Self:
        """Returns "any option at any time"."""
        names = _names(options)
        return cls("free", {"free": dict.fromkeys(names, "free")})

    def preceded_by(self, options: Sequence[str]) -> Self:
        """Returns "first these options, each once, in this order", then these rules."""
        names = _names(options)
        states = [f"{i} of {len(names)} first" for i in range(len(names))]
        if not self.moves.keys().isdisjoint(states):
            raise ValueError(
                f"no state may have the name {states[0]!r}, which marks the options "
                "that come first"
            )
        after = zip(states, names, [*states[1:], self.start], strict=True)
        first = {state: {name: following} for state, name, following in after}
        return type(self)(states[0], {**first, **self.moves})

    @property
    def options(self) -> frozenset[str]:
        """All options that some state allows."""
        return frozenset(name for options in self.moves.values() for name in options)

    def after(self, state: str, option: str) -> str | None:
        """Returns the state after an option; None if the state does not allow it."""
        return self.moves.get(state, {}).get(option)

    def states_after(self, options: Iterable[str], moves: int) -> frozenset[str]:
        """Returns the states that ``moves`` moves by these options can lead to."""
        names, here = tuple(options), frozenset([self.start])
        number: dict[frozenset[str], int] = {}
        while here not in number and len(number) <= moves:
            number[here] = len(number)
            after = (self.after(state, name) for state in here for name in names)
            here = frozenset(state for state in after if state is not None)
        found = list(number)
        if moves < len(found):
            return found[moves]
        # From here on the sets of states repeat.
        first = number[here]
        return found[first + (moves - first) % (len(found) - first)]

    def has_cycles(self) -> bool:
        """Whether these rules alone allow an endless run."""
        reached = reachable(self, self.start)
        ways = {state: self.moves.get(state, {}).values() for state in reached}
        try:
            graphlib.TopologicalSorter(ways).prepare()
        except graphlib.CycleError:
            return True
        return False


def reachable(rules: RuleBook, start: str) -> set[str]:
    """Returns the states that rules lead to from one state, itself included."""
    found, waiting = set[str](), [start]
    while waiting:
        here = waiting.pop()
        if here not in found:
            found.add(here)
            waiting += rules.moves.get(here, {}).values()
    return found


def _names(options: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of options; refuses repeated ones."""
    names = spec.checked("options", options, tuple[spec.Word, ...])
    refuse_repeats("options", names, 1)
    return names


class Menu(spec.Spec):
    """Base of `AdaptiveRun`: its fields, the charged options and the allowed ones."""

    called = "AdaptiveRun"

    options: Mapping[spec.Word, GaussianStep | Release | ComposedSteps | Menu]
    quotas: Mapping[str, _Natural] | None = None
    prices: Mapping[str, spec.Size] | None = None
    budget: Annotated[int, _Budget] | None = None
    blocks: Mapping[str, spec.Size] | None = None
    rules: RuleBook | None = None
    odometer: tuple[float, ...] | None = None
    taken: Mapping[str, _Natural] = field(default_factory=dict)
    state: spec.Word | None = None

    # --- What is left ---

    def one_setting(self, what: str) -> None:
        """Raises if the run has several settings."""
        if self.shape:
            raise ValueError(
                f"{what} needs a run of one setting, got options of shape {self.shape}"
            )

    @property
    def spent(self) -> int:
        """The price of the charged options; the first step of a block pays for all."""
        return sum(self._price_of(name, n) for name, n in self.taken.items())

    @property
    def left(self) -> Any:
        """What remains: of the budget, or else of each option's quota."""
        if self.prices is not None:
            return int(self.budget or 0) - self.spent
        if self.quotas is not None:
            quotas = self.quotas.items()
            return {name: quota - self.taken[name] for name, quota in quotas}
        return {name: self.most(name) for name in self.options}

    def can(self, option: str) -> bool:
        """Whether the run allows an option now."""
        return self._refusal(option) is None

    def charge(self, option: str) -> Self:
        """Returns the run with one more use of an option; call it *before* the option.

        An option that has begun is charged in full, whether it completes or not.

        Raises:
          ValueError: the run does not allow the option now.
        """
        self.one_setting("charge")
        refusal = self._refusal(option)
        if refusal is not None:
            raise ValueError(f"option {option!r} is not allowed now: {refusal}")
        state = self.state
        if self.rules is not None and state is not None:
            state = self.rules.after(state, option)
        return self._charged({**self.taken, option: self.taken[option] + 1}, state)

    def _charged(self, taken: Mapping[str, int], state: str | None) -> Self:
        """Returns the run with these charges."""
        after = object.__new__(type(self))
        # Cached results are about the whole run and remain valid.
        charges = {"taken": MappingProxyType(taken), "state": state}
        after.__dict__.update(self.__dict__, **charges)
        return after

    def most(self, option: str) -> int:
        """Returns how often an option may still be used if no other option is."""
        _validation.choice("option", option, self.options)
        if self.rules is None and self.quotas is not None:
            return self.quotas[option] - self.taken[option]
        if self.rules is None and self.prices is not None:
            block, paid = self._block(option), self.left // self.prices[option]
            return -self.taken[option] % block + paid * block
        number, now = 0, self
        while now.can(option):
            number += 1
            now = now.charge(option)
        return number

    def _refusal(self, option: str) -> str | None:
        """Returns why the run does not allow an option now; None if it does."""
        _validation.choice("option", option, self.options)
        number = self.taken[option]
        if self.quotas is not None and number >= self.quotas[option]:
            return f"its quota of {self.quotas[option]} is used up"
        if self.prices is not None:
            price = self._price_of(option, number + 1) - self._price_of(option, number)
            if price > self.left:
                return f"it costs {price}, and {self.left} of the budget is left"
        if self.rules is not None and self.state is not None:
            if self.rules.after(self.state, option) is None:
                return f"the rules do not allow it in state {self.state!r}"
        return None

    def _block(self, option: str) -> int:
        return 1 if self.blocks is None else self.blocks.get(option, 1)

    def _price_of(self, option: str, number: int) -> int:
        if self.prices is None:
            return 0
        return self.prices[option] * -(-number // self._block(option))

    # --- Checks ---

    def check_fields(self) -> None:
        """Checks each field, and that all tables are about the options."""
        super().check_fields()
        _check_options(self.options)
        for name in ("quotas", "prices", "blocks", "taken"):
            table = getattr(self, name)
            if table is None:
                continue
            for option in table:
                _validation.choice(f"options of {name}", option, self.options)
            missing = [option for option in self.options if option not in table]
            if missing and name in ("quotas", "prices"):
                raise ValueError(
                    f"{name} must have every option, {missing[0]!r} is missing"
                )
        taken = MappingProxyType({**dict.fromkeys(self.options, 0), **self.taken})
        object.__setattr__(self, "taken", taken)
        if any(taken.values()):
            self.one_setting("taken")
        if self.rules is None:
            if self.state is not None:
                raise ValueError(f"state must be None without rules, got {self.state}")
            return
        for name in sorted(self.rules.options):
            _validation.choice("options of rules", name, self.options)
        if self.blocks is not None:
            raise NotImplementedError(
                "blocks with rules have no theorem here; covered: one of the two"
            )
        if self.state is None:
            object.__setattr__(self, "state", self.rules.start)

    def _set_odometer(self, odometer: Any) -> None:
        """Checks and sets the epsilons of the odometer, one for each price spent."""
        if self.prices is None or self.budget is None:
            raise ValueError("odometer must be None without prices and a budget")
        values = _validation.nonnegative_array("odometer", odometer)
        if values.shape != (self.budget + 1,) or not np.isfinite(values).all():
            raise ValueError(
                f"odometer must be a list of {self.budget + 1:,} finite epsilons, one "
                f"for each price spent from 0 to the budget, got {values.shape}"
            )
        object.__setattr__(self, "odometer", tuple(values.tolist()))

    def _check_bands(self) -> None:
        """Refuses bands in several kinds of steps, and prices for part of a round."""
        banded = [
            (name, part)
            for name, option in self.options.items()
            for part in parts_of(option)
            if isinstance(part, GaussianStep) and part.bands is not None
        ]
        for name, step in banded:
            nested = isinstance(self.options[name], Menu)
            if len(banded) > 1 or nested or self.rules is not None:
                raise NotImplementedError(
                    f"option {name!r} has bands, which have no theorem with rules, "
                    "within another adaptive run or together with other steps with "
                    "bands, because one group might then get all steps of the most "
                    "expensive kind; covered: one kind of step with bands, and quotas, "
                    "or prices of whole rounds"
                )
            alone = self.options[name] is step
            part = np.any(np.mod(self._block(name), step.cycle))
            if self.prices is not None and alone and part:
                raise NotImplementedError(
                    f"option {name!r} has {step.cycle} bands: its price must be for "
                    f"a round of all groups, blocks={{{name!r}: {step.cycle}}}, got "
                    f"{self._block(name)}"
                )

    def check_values(self) -> None:
        """Refuses a run that never ends, or one charged with more than it allows."""
        self._check_bands()
        limits = self.quotas is not None or self.prices is not None
        if not limits and self.rules is not None and self.rules.has_cycles():
            raise ValueError(
                "rules with a cycle do not end a run: add quotas, or prices and a "
                "budget"
            )
        over = [n for n, q in (self.quotas or {}).items() if self.taken[n] > q]
        if over or (self.prices is not None and self.left < 0):
            raise ValueError(
                f"taken must be within the quotas and the budget, got {self.taken}"
            )
        if self.rules is not None:
            # The epsilon is computed from the start of the rules.
            used = [name for name, number in self.taken.items() if number]
            number = sum(self.taken.values())
            if self.state not in self.rules.states_after(used, number):
                raise ValueError(
                    "state must be one that the rules reach with the options in taken, "
                    f"got {self.state!r} after {dict(self.taken)}"
                )


def _check_options(options: Mapping[str, Any]) -> None:
    """Checks each option by itself, and that all can be in one run."""
    if not options:
        raise TypeError("options must be a table of at least one step, got {}")
    for name, option in options.items():
        _check_option(f"option {name!r}", option)
    for (one, first), (other, second) in itertools.combinations(options.items(), 2):
        both = f"options {one!r} and {other!r} cannot be in one run"
        with _validation.prefixed(both):
            compose(*((step, 1) for step in (*parts_of(first), *parts_of(second))))
        for pair in itertools.product(parts_of(first), parts_of(second)):
            steps = [part for part in pair if isinstance(part, GaussianStep)]
            levels = {step.design.level_names for step in steps}
            bounds = [step.people for step in steps if step.people is not None]
            if len(bounds) == 2 and len(levels) == 1 and bounds[0] != bounds[1]:
                raise ValueError(
                    f"{both}: people must be the same PersonBounds, got "
                    f"{' and '.join(map(_validation.shown, bounds))}"
                )


def parts_of(option: Any) -> tuple[GaussianStep | Release, ...]:
    """Returns the steps of which an option consists."""
    if isinstance(option, Menu):
        return tuple(part for one in option.options.values() for part in parts_of(one))
    several = isinstance(option, ComposedSteps | DisjointParts)
    return option.steps if several else (option,)


def _check_option(what: str, option: Any) -> None:
    """Refuses a step or run that has no theorem as an option."""
    counts = option.counts if isinstance(option, ComposedSteps) else (1,)
    if isinstance(option, Menu):
        if any(option.taken.values()):
            raise ValueError(f"{what} must be a run without charges, got one with some")
        return  # its own parts were checked when it was made
    for part, count in zip(parts_of(option), counts, strict=True):
        if isinstance(part, Release):
            zcdp = isinstance(part, ZeroConcentratedDP) and not part.is_gaussian
            if zcdp or isinstance(part, RenyiDP):
                raise NotImplementedError(
                    f"{what} is a {type(part).__name__}, of which only Rényi "
                    "divergences are known; an adaptive run needs the privacy profiles "
                    "of both directions"
                )
            continue
        # For bands alone see `Menu._check_bands`.
        alone = option is part and epoch_scheme(part.design) is None
        if not alone and np.any(np.mod(count, part.cycle)):
            raise NotImplementedError(
                f"{what} has {count} steps, but epochs of {part.cycle}: the steps of "
                "an epoch depend on one another through the secret allocation, so only "
                f"whole epochs can be options: compose((step, {part.cycle}))"
            )


def check_kind(given: Mapping[str, Any], *, wants_margin: bool) -> None:
    """Refuses limits that do not end the run, or that exclude one another."""
    has = {name: value is not None for name, value in given.items()}
    by_target = has["epsilon"]
    if not has["delta"] and (by_target or wants_margin):
        needs = f"epsilon={given['epsilon']!r}" if by_target else "odometer='margin'"
        raise ValueError(f"{needs} needs a delta, got None")
    if not any(has[name] for name in ("epsilon", "quotas", "prices", "rules")):
        raise ValueError(
            "one of quotas, prices, rules, or epsilon and delta must be given to end "
            "the run"
        )
    aimless = not by_target and not wants_margin
    # (condition, its words, the arguments that must then be None).
    refused = (
        (aimless, "without epsilon, or an odometer with a margin", ("delta",)),
        (has["quotas"], "with quotas", ("prices", "budget", "blocks", "epsilon")),
        (by_target, "with epsilon", ("budget",)),
        (not has["prices"], "without prices", ("budget", "blocks")),
    )
    for holds, why, names in refused:
        for name in names:
            if holds and has[name]:
                shown = _validation.shown(given[name])
                raise ValueError(f"{name} must be None {why}, got {shown}")
    if has["prices"] and not has["budget"] and not by_target:
        raise ValueError("prices need a budget, or epsilon and delta instead")
    if wants_margin and not (has["prices"] or by_target):
        raise ValueError("odometer must be None without prices and a budget")
