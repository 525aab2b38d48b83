"""Rules of an adaptive run: a finite graph of states and allowed options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.spec import Spec

# Largest number of states of a rule book.
_MOST_STATES = 10_000


@dataclass(frozen=True, eq=False)
class RuleBook(Spec):
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

    start: str
    moves: Mapping[str, Mapping[str, str]]

    def __post_init__(self) -> None:
        if not isinstance(self.moves, Mapping):
            shown = _validation.shown(self.moves)
            raise TypeError(f"moves must be a table of states, got {shown}")
        moves = {}
        for state, options in self.moves.items():
            if not isinstance(options, Mapping):
                raise TypeError(
                    f"moves[{state!r}] must be a table of options and states, "
                    f"got {_validation.shown(options)}"
                )
            for name in (state, *options, *options.values()):
                checked_word("moves", name)
            moves[state] = MappingProxyType(dict(options))
        _validation.choice("start", self.start, moves)
        if len(moves) > _MOST_STATES:
            raise ValueError(
                f"moves must have at most {_MOST_STATES:,} states, got {len(moves):,}"
            )
        object.__setattr__(self, "moves", MappingProxyType(moves))

    @classmethod
    def in_order(cls, options: Sequence[str]) -> Self:
        """Returns "only in this order": no option after one that is later in the list.

        If the options are sorted by decreasing noise, the noise can only decrease. Any
        option may be skipped.
        """
        names = _checked_names(options)
        moves = {
            name: {later: later for later in names[i:]} for i, name in enumerate(names)
        }
        return cls(names[0], moves)

    @classmethod
    def at_most_changes(cls, options: Sequence[str], changes: int) -> Self:
        """Returns "at most ``changes`` changes from one option to another"."""
        names = _checked_names(options)
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
        names = _checked_names(options)
        length = _validation.whole_number("steps", steps)
        if length == 1:
            return cls("decide", {"decide": dict.fromkeys(names, "decide")})
        moves = {"decide": {name: f"{name}, 1 of {length}" for name in names}}
        for name in names:
            for done in range(1, length):
                last = done == length - 1
                after = "decide" if last else f"{name}, {done + 1} of {length}"
                moves[f"{name}, {done} of {length}"] = {name: after}
        return cls("decide", moves)

    @classmethod
    def freely(cls, options: Sequence[str]) -> Self:
        """Returns "any option at any time"."""
        names = _checked_names(options)
        return cls("free", {"free": dict.fromkeys(names, "free")})

    def preceded_by(self, options: Sequence[str]) -> Self:
        """Returns "first these options, each once, in this order", then these rules."""
        names = _checked_names(options)
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
        found: list[frozenset[str]] = []
        number: dict[frozenset[str], int] = {}
        while here not in number and len(found) <= moves:
            number[here] = len(found)
            found.append(here)
            after = (self.after(state, name) for state in here for name in names)
            here = frozenset(state for state in after if state is not None)
        if moves < len(found):
            return found[moves]
        # From here on the sets of states repeat.
        first = number[here]
        return found[first + (moves - first) % (len(found) - first)]

    def has_cycles(self) -> bool:
        """Whether these rules alone allow an endless run."""
        # Depth-first search without recursion: states on the stack, and finished ones.
        open_, done = set[str](), set[str]()
        stack = [(self.start, False)]
        while stack:
            state, is_left = stack.pop()
            if is_left:
                open_.discard(state)
                done.add(state)
                continue
            if state in done:
                continue
            open_.add(state)
            stack.append((state, True))
            for following in self.moves.get(state, {}).values():
                if following in open_:
                    return True
                stack.append((following, False))
        return False


def checked_word(what: str, name: Any) -> str:
    """Returns the name of an option or a state; refuses anything else."""
    if not isinstance(name, str):
        shown = _validation.shown(name)
        raise TypeError(f"{what} must have strings as names, got {shown}")
    if not name:
        raise ValueError(f"{what} must have non-empty names, got ''")
    return name


def _checked_names(options: Sequence[str]) -> list[str]:
    if isinstance(options, str) or not isinstance(options, Sequence):
        shown = _validation.shown(options)
        raise TypeError(f"options must be a list of names, got {shown}")
    names = [checked_word("options", name) for name in options]
    if not names or len(set(names)) < len(names):
        shown = _validation.shown(options)
        raise ValueError(
            f"options must be at least one name, all different, got {shown}"
        )
    return names
