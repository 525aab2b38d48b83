"""What a strategy may do, as a finite graph of states without cycles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# Most states of a graph.
MOST_STATES = 2_000_000
_TOO_MANY = (
    f"the menu has more than {MOST_STATES:,} states: take coarser prices or fewer rules"
)


class Graph(NamedTuple):
    """States in an order in which each comes after all that it can lead to.

    Attributes:
      moves: for each state pairs of an option's number and the next state's; the run
        begins in the last state.
      spent: for each state the price paid on the way to it; zeros without prices.
    """

    moves: tuple[tuple[tuple[int, int], ...], ...]
    spent: tuple[int, ...]

    def most(self, costs: np.ndarray) -> np.ndarray:
        """The largest sum of costs (options, ...) that a path collects."""
        best: list[np.ndarray] = []
        for moves in self.moves:
            ends = [costs[k] + best[to] for k, to in moves]
            best.append(np.maximum.reduce(ends) if ends else np.zeros(costs.shape[1:]))
        return best[-1]

    def path_of_most(self, costs: Sequence[float]) -> np.ndarray:
        """How often each option is taken on a path that collects the largest sum."""
        taken = np.zeros(len(costs))
        best = np.zeros(len(self.moves))
        first: list[tuple[int, int] | None] = []
        for state, moves in enumerate(self.moves):
            move = max(moves, key=lambda m: costs[m[0]] + best[m[1]], default=None)
            first.append(move)
            if move is not None:
                best[state] = costs[move[0]] + best[move[1]]
        move = first[-1]
        while move is not None:
            taken[move[0]] += 1
            move = first[move[1]]
        return taken

    def groups(self, most: int) -> Iterator[range]:
        """States one after the other none of which leads to another of them.

        Args:
          most: moves of a group, and states; a state with more is one by itself.
        """
        start = number = 0
        for state, moves in enumerate(self.moves):
            number += max(len(moves), 1)
            is_apart = all(to < start for _, to in moves)
            if state > start and not (is_apart and number <= most):
                yield range(start, state)
                start, number = state, max(len(moves), 1)
        yield range(start, len(self.moves))

    def last_uses(self) -> list[int]:
        """For each state the last one that leads to it."""
        last = list(range(len(self.moves)))
        for state, moves in enumerate(self.moves):
            for _, to in moves:
                last[to] = state
        return last


class Nested(NamedTuple):
    """An option that is a graph of its own, taken as a whole.

    Attributes:
      graph: its states; of more than one.
      options: the numbers that its options have in the graph that it is nested in.
    """

    graph: Graph
    options: tuple[int, ...]


def unfolded(
    graph: Graph, parts: Sequence[int | Nested]
) -> tuple[Graph, tuple[int, ...]]:
    """The graph in which nested options are gone through move by move.

    Where a nested option ends, the state follows to which it led; it is never left
    before, as going on costs a strategy nothing (docs/proofs.md, "Runs that adapt").

    Args:
      graph: the states.
      parts: of its options, the number that each has in the new graph, or its own.

    Returns:
      The graph, and the new number of each state.
    """
    moves: list[tuple[tuple[int, int], ...]] = []
    spent, places = list[int](), list[int]()
    begun: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
    for own, paid in zip(graph.moves, graph.spent, strict=True):
        here: list[tuple[int, int]] = []
        for option, to in own:
            part = parts[option]
            if not isinstance(part, Nested):
                here.append((part, places[to]))
                continue
            if (option, to) not in begun:
                begun[option, to] = _entered(part, places[to], moves)
                # Paid for in full before it begins.
                spent += [graph.spent[to]] * (len(moves) - len(spent))
            here += begun[option, to]
        places.append(len(moves))
        moves.append(tuple(here))
        spent.append(paid)
        if len(moves) > MOST_STATES:
            raise ValueError(_TOO_MANY)
    return Graph(tuple(moves), tuple(spent)), tuple(places)


def _entered(
    inner: Nested, after: int, moves: list[tuple[tuple[int, int], ...]]
) -> tuple[tuple[int, int], ...]:
    """The first moves of a nested option; ``after`` follows where it ends.

    Its further states are added to ``moves``.
    """
    places = list[int]()
    for own in inner.graph.moves:
        here = tuple((inner.options[k], places[to]) for k, to in own)
        places.append(len(moves) if own else after)
        if own:
            moves.append(here)
    return moves.pop()  # the start: who takes the option is in it


def budget_graph(prices: Sequence[int], budget: int) -> Graph:
    """The states of a budget: what is left, as far as a path leads there.

    Args:
      prices: of the options, whole numbers >= 1.
      budget: >= 0.
    """
    return _explored([budget], _bought(prices), lambda left: budget - left, _itself)[0]


def graph_of_budgets(prices: Sequence[int], most: int) -> Graph:
    """The states of all budgets up to one: in state b there is b left."""
    every = range(most + 1)
    return _explored(every, _bought(prices), lambda left: most - left, _itself)[0]


def _bought(prices: Sequence[int]) -> Callable[[int], Iterable[tuple[int, int]]]:
    return lambda left: ((k, left - c) for k, c in enumerate(prices) if c <= left)


def _itself(state: Any) -> Any:
    return state


def counts_graph(counts: Sequence[int], *, is_preceded: bool) -> Graph:
    """The states of quotas, in any order.

    Args:
      counts: of the options, how often each may be taken.
      is_preceded: by one more option, the last, which is taken first and once.
    """

    def moves(state: tuple[int, ...]) -> Iterable[tuple[int, tuple[int, ...]]]:
        *left, first = state
        if first:
            return [(len(left), (*left, 0))]
        return ((k, _one_less(state, k)) for k, n in enumerate(left) if n)

    return _explored([(*counts, int(is_preceded))], moves, lambda _: 0, sum)[0]


def _one_less(counts: tuple[int, ...], k: int) -> tuple[int, ...]:
    return (*counts[:k], counts[k] - 1, *counts[k + 1 :])


def rule_graph(
    names: Sequence[str],
    moves: Mapping[str, Mapping[str, str]],
    start: str,
    prices: Sequence[int] | None = None,
    budget: int = 0,
) -> Graph:
    """The states of a rule book, with what is left of a budget where there is one.

    Args:
      names: of the options, in their order.
      moves: for each state of the rules the options, and the states they lead to.
      start: where the rules begin.
      prices: of the options; None where the rules alone end every run.
      budget: >= 0.
    """
    costs = [0] * len(names) if prices is None else prices
    # Prices make what is left fall along every move; without, the longest way on does.
    depth = _depths(moves, start) if prices is None else {}

    def allowed(state: tuple[int, str]) -> Iterable[tuple[int, tuple[int, str]]]:
        left, rule = state
        after = moves.get(rule, {})
        for k, name in enumerate(names):
            if name in after and costs[k] <= left:
                yield k, (left - costs[k], after[name])

    def order(state: tuple[int, str]) -> tuple[int, int]:
        return state[0], depth.get(state[1], 0)

    return _explored([(budget, start)], allowed, lambda s: budget - s[0], order)[0]


def with_pending(
    graph: Graph, added: Mapping[int, Sequence[int]]
) -> tuple[Graph, tuple[int, ...]]:
    """The graph of options that leave others behind, free to be taken at any time.

    Args:
      graph: the states.
      added: for some of its options, how often each further option may be taken later.
        Further options are numbered after those of the graph.

    Returns:
      The graph, and the new number of each state with nothing pending.
    """
    nothing = (0,) * len(next(iter(added.values())))
    further = 1 + max((k for moves in graph.moves for k, _ in moves), default=-1)

    def moves(at: tuple[int, tuple[int, ...]]) -> Iterable[tuple[int, Any]]:
        state, pending = at
        for k, to in graph.moves[state]:
            more = added.get(k, nothing)
            yield k, (to, tuple(a + b for a, b in zip(pending, more, strict=True)))
        for j, n in enumerate(pending):
            if n:
                yield further + j, (state, _one_less(pending, j))

    begin = [(state, nothing) for state in range(len(graph.moves))]
    found, number = _explored(
        begin, moves, lambda at: graph.spent[at[0]], lambda at: (at[0], sum(at[1]))
    )
    return found, tuple(number[at] for at in begin)


def _explored(
    starts: Sequence[Any],
    moves: Callable[[Any], Iterable[tuple[int, Any]]],
    spent: Callable[[Any], int],
    order: Callable[[Any], Any],
) -> tuple[Graph, dict[Any, int]]:
    """The graph of what is reached, and each state's number.

    ``order`` falls along every move; of the last start it is the largest.
    """
    found: dict[Any, tuple[tuple[int, Any], ...]] = {}
    waiting = list(starts)
    while waiting:
        state = waiting.pop()
        if state in found:
            continue
        found[state] = tuple(moves(state))
        if len(found) > MOST_STATES:
            raise ValueError(_TOO_MANY)
        waiting += [to for _, to in found[state]]
    states = sorted(found, key=order)
    number = {state: i for i, state in enumerate(states)}
    graph = Graph(
        tuple(tuple((k, number[to]) for k, to in found[s]) for s in states),
        tuple(spent(s) for s in states),
    )
    return graph, number


def _depths(moves: Mapping[str, Mapping[str, str]], start: str) -> dict[str, int]:
    """The longest way on from each state; the moves have no cycle."""
    depth: dict[str, int] = {}
    stack = [(start, False)]
    while stack:
        state, is_left = stack.pop()
        following = moves.get(state, {}).values()
        if is_left:
            depth[state] = max((depth[to] + 1 for to in following), default=0)
        elif state not in depth:
            stack.append((state, True))
            stack += [(to, False) for to in following if to not in depth]
    return depth
