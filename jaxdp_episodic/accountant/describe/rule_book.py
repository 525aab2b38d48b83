"""Which option of an adaptive run may follow which: a finite graph of states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.spec import Spec

# Most states of a rule book.
_MOST_STATES = 10_000


@dataclass(frozen=True, eq=False)
class RuleBook(Spec):
    """What may be taken next, as a graph: states, and in each the options allowed.

    ``RuleBook("early", {"early": {"slow": "early", "fast": "late"}, "late": {"fast":
    "late"}})``: "slow" as often as one likes, but never after "fast". A state that
    allows nothing may be left out. Where prices or quotas end the run anyway the graph
    may have cycles, as here. Stopping is allowed in every state.

    Attributes:
      start: the state in which the run begins.
      moves: for each state the options that are allowed, and the state to which each
        of them leads.

    Raises:
      ValueError: no state, a start that is none, more than 10,000 states.
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
        """Returns "only in this order": no option after one that stands behind it.

        With options by falling noise it says that noise is only lowered. Any of them
        may be skipped.
        """
        names = _checked_names(options)
        moves = {
            name: {later: later for later in names[i:]} for i, name in enumerate(names)
        }
        return cls(names[0], moves)

    @classmethod
    def at_most_changes(cls, options: Sequence[str], changes: int) -> Self:
        """Returns "at most so many changes from one option to another"."""
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
        """Returns "decide every so many steps": each choice is kept for that long."""
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
        """Returns "any of them, whenever one likes"."""
        names = _checked_names(options)
        return cls("free", {"free": dict.fromkeys(names, "free")})

    def preceded_by(self, options: Sequence[str]) -> Self:
        """Returns "first these, each once and in this order", and then these rules."""
        names = _checked_names(options)
        states = [f"{i} of {len(names)} first" for i in range(len(names))]
        if not self.moves.keys().isdisjoint(states):
            raise ValueError(f"states must have other names than {states[0]!r}")
        after = zip(states, names, [*states[1:], self.start], strict=True)
        first = {state: {name: following} for state, name, following in after}
        return type(self)(states[0], {**first, **self.moves})

    @property
    def options(self) -> frozenset[str]:
        """The options that are allowed somewhere."""
        return frozenset(name for options in self.moves.values() for name in options)

    def after(self, state: str, option: str) -> str | None:
        """Returns the state to which an option leads, None where it is not allowed."""
        return self.moves.get(state, {}).get(option)

    def states_after(self, options: Iterable[str], moves: int) -> frozenset[str]:
        """Returns the states to which so many moves by these options may lead."""
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
        # From here on they come again and again.
        first = number[here]
        return found[first + (moves - first) % (len(found) - first)]

    def has_cycles(self) -> bool:
        """Whether a run under these rules alone might never end."""
        # Depth first, without recursion: states on the way down, and finished ones.
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
    """Refuses what is no name of an option or a state."""
    if not isinstance(name, str):
        shown = _validation.shown(name)
        raise TypeError(f"{what} must have names as keys, got {shown}")
    if not name:
        raise ValueError(f"{what} must have names of one letter or more, got ''")
    return name


def _checked_names(options: Sequence[str]) -> list[str]:
    if isinstance(options, str) or not isinstance(options, Sequence):
        shown = _validation.shown(options)
        raise TypeError(f"options must be a list of names, got {shown}")
    names = [checked_word("options", name) for name in options]
    if not names or len(set(names)) < len(names):
        shown = _validation.shown(options)
        raise ValueError(f"options must be different names, at least one, got {shown}")
    return names
