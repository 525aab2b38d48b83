"""Adaptive runs by brute force: the best that can follow each history of a menu.

An option is a pair (P, Q) on finitely many outputs. What may be bought is a function
``moves(state) -> [(option, next state)]`` without cycles.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

Moves = Callable[[Hashable], list[tuple[int, Hashable]]]
Pair = tuple[Sequence, Sequence]


def by_prices(prices: Sequence[int]) -> Moves:
    """States are what is left of the budget."""
    return lambda left: [(k, left - c) for k, c in enumerate(prices) if c <= left]


def by_quotas(left: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """States are what is left of each option's quota: itself a `Moves`."""
    return [
        (k, (*left[:k], n - 1, *left[k + 1 :])) for k, n in enumerate(left) if n > 0
    ]


class Run(NamedTuple):
    """A run within runs: its limits and its options, leaves' numbers or runs."""

    options: tuple[Run | int, ...]
    quotas: tuple[int, ...] | None = None
    prices: tuple[int, ...] | None = None
    budget: int = 0


class Open(NamedTuple):
    """A run that has begun: what is left, and the runs within that have begun."""

    run: Run
    left: Hashable
    inner: tuple[Open, ...] = ()


def begun(run: Run) -> Open:
    return Open(run, run.budget if run.quotas is None else run.quotas)


def interleaved(state: Open) -> list[tuple[int, Open]]:
    """Every leaf that may be taken now: itself a `Moves`; runs may be left early."""
    run, left, inner = state
    afters = by_prices(run.prices)(left) if run.quotas is None else by_quotas(left)
    # Of what is within, what stays open beside something else.
    kept = tuple(_still_open(one) for one in inner if one.run.quotas is not None)
    found = []
    for k, after in afters:
        option = run.options[k]
        if isinstance(option, int):
            found.append((option, Open(run, after, kept)))
            continue
        for leaf, to in interleaved(begun(option)):
            found.append((leaf, Open(run, after, (*kept, to))))
    for i, one in enumerate(inner):
        others = tuple(
            _still_open(other)
            for j, other in enumerate(inner)
            if j != i and other.run.quotas is not None
        )
        for leaf, to in interleaved(one):
            found.append((leaf, Open(run, left, (*others, to))))
    return found


def _still_open(state: Open) -> Open:
    inner = tuple(_still_open(o) for o in state.inner if o.run.quotas is not None)
    return state._replace(inner=inner)


def worst_by_history(
    menu: Sequence[Pair], moves: Moves, state, ratio: Callable, p=1, q=1
):
    """The largest sum of (p - ratio(state) q)_+ that a strategy attains.

    By the maximum at each history: what is paid adds up over them.
    """
    after = [
        sum(
            worst_by_history(menu, moves, left, ratio, p * first, q * second)
            for first, second in zip(*menu[option], strict=True)
        )
        for option, left in moves(state)
    ]
    return max([p - ratio(state) * q, 0 * p, *after])


def random_menu(rng, options: int, outputs: int, grain: int = 12) -> list[Pair]:
    """Random pairs of masses k / grain, zeros (so infinite losses) among them."""

    def masses():
        cuts = np.sort(rng.integers(0, grain + 1, outputs - 1))
        return np.diff([0, *cuts, grain]) / grain

    return [(masses(), masses()) for _ in range(options)]
