"""What a strategy may do, as a finite graph of states without cycles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

# Most states of a graph.
MOST_STATES = 2_000_000


class Graph(NamedTuple):
    """States in an order in which each comes after all that it can lead to."""

    moves: tuple[tuple[tuple[int, int], ...], ...]  # (option, next); the last is first
    spent: tuple[int, ...]  # for each state the price paid on the way to it

    def most(self, costs: np.ndarray) -> np.ndarray:
        """The largest sum of costs (options, ...) that a path collects."""
        best: list[np.ndarray] = []
        for moves in self.moves:
            ends = [costs[k] + best[to] for k, to in moves]
            best.append(np.maximum.reduce(ends) if ends else np.zeros(costs.shape[1:]))
        return best[-1]

    def path_of_most(self, costs: Sequence[float]) -> np.ndarray:
        """How often each option is taken on a path that collects the largest sum."""
        best: list[tuple[float, tuple[int, int] | None]] = []
        for moves in self.moves:
            ends = [(costs[k] + best[to][0], (k, to)) for k, to in moves]
            best.append(max(ends, default=(0.0, None)))
        taken, move = np.zeros(len(costs)), best[-1][1]
        while move is not None:
            taken[move[0]] += 1
            move = best[move[1]][1]
        return taken

    def groups(self, most: int) -> Iterator[range]:
        """States one after the other none of which leads to another of them."""
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


def explored(
    starts: Sequence[Any],
    moves: Callable[[Any], Iterable[tuple[int, Any]]],
    spent: Callable[[Any], int],
) -> tuple[Graph, dict[Any, int]]:
    """The graph of all states that are reached, and each state's number."""
    found: dict[Any, tuple[tuple[int, Any], ...]] = {}
    depth: dict[Any, int] = {}  # the longest way on
    for start in starts:
        waiting = [start]
        while waiting:
            state = waiting[-1]
            if state not in found:
                found[state] = tuple(moves(state))
                if len(found) > MOST_STATES:
                    raise ValueError(
                        f"the menu has more than {MOST_STATES:,} states: take coarser "
                        "prices or fewer rules"
                    )
            ahead = [to for _, to in found[state] if to not in depth]
            waiting += ahead
            if not ahead:
                waiting.pop()
                ends = (depth[to] for _, to in found[state])
                depth.setdefault(state, 1 + max(ends, default=-1))
    # States of one depth are solved together.
    states = sorted(depth, key=depth.__getitem__)
    number = {state: i for i, state in enumerate(states)}
    graph = Graph(
        tuple(tuple((k, number[to]) for k, to in found[s]) for s in states),
        tuple(spent(s) for s in states),
    )
    return graph, number


def budget_graph(prices: Sequence[int], budget: int) -> Graph:
    """The states of a budget: what is left, as far as a path leads there."""

    def moves(left: int) -> Iterable[tuple[int, int]]:
        return ((k, left - price) for k, price in enumerate(prices) if price <= left)

    return explored([budget], moves, lambda left: budget - left)[0]
