"""The graph and the options of a recursion, and Rényi's filter of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from jaxdp_episodic.accountant.losses.privacy_loss import FiniteValues, Profile
from jaxdp_episodic.accountant.methods.certified import lattice
from jaxdp_episodic.accountant.methods.rdp import epsilon_at, log_delta_at, rdp_curve
from jaxdp_episodic.accountant.methods.run import (
    EpsilonAt,
    Question,
    Run,
    one_gaussian,
    shift_error,
)

MOST_STATES = 2_000_000  # largest number of states of a graph


class Graph(NamedTuple):
    """States in an order in which each comes after all that it can lead to."""

    # Of each state (option, next state); the run starts in the last state.
    moves: tuple[tuple[tuple[int, int], ...], ...]
    spent: tuple[int, ...]  # of each state the price paid on the way to it

    def most(self, costs: np.ndarray) -> np.ndarray:
        """Returns the largest sum of costs (options, ...) over all paths."""
        best: list[np.ndarray] = []
        for moves in self.moves:
            ends = [costs[k] + best[to] for k, to in moves]
            best.append(np.maximum.reduce(ends) if ends else np.zeros(costs.shape[1:]))
        return best[-1]

    def path_of_most(self, costs: Sequence[float]) -> np.ndarray:
        """Returns how often a path with the largest sum takes each option."""
        best: list[tuple[float, tuple[int, int] | None]] = []
        for moves in self.moves:
            ends = [(costs[k] + best[to][0], (k, to)) for k, to in moves]
            best.append(max(ends, default=(0.0, None)))
        taken, move = np.zeros(len(costs)), best[-1][1]
        while move is not None:
            taken[move[0]] += 1
            move = best[move[1]][1]
        return taken


def explored(
    starts: Sequence[Any],
    moves: Callable[[Any], Iterable[tuple[Any, Any]]],
    spent: Callable[[Any], int],
) -> tuple[Graph, dict[Any, int]]:
    """Returns the graph of all reachable states, and each state's number."""
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
    states = sorted(depth, key=depth.__getitem__)
    number = {state: i for i, state in enumerate(states)}
    graph = Graph(
        tuple(tuple((k, number[to]) for k, to in found[s]) for s in states),
        tuple(spent(s) for s in states),
    )
    return graph, number


# Orders at which Rényi's filter is computed.
_ORDERS = 1 + np.geomspace(0.05, 500.0, 40)
RDP_ROUNDING = 1e-9  # relative rounding error of Rényi's bound
# Number of atoms of a loss that shall be lattice points, the heaviest ones.
_MOST_ATOMS = 4
FURTHEST = 100.0  # largest loss of a lattice, in nats
# Rounding of a point of the lattice, relative.
_POINT_ROUNDING = 2.3e-16


class Option(NamedTuple):
    """An option as bounded for one end."""

    losses: tuple[Profile, ...]  # of its steps, with scalar fields
    counts: tuple[float, ...]  # number of each of these steps
    log_kept: float  # logarithm of the probability of a finite loss
    displaced: float  # bound of the error of its losses, nats

    @classmethod
    def of(cls, run: Run, *, up: bool) -> Option:
        """From a run of one setting; several Gaussian steps become one."""
        reached = run.in_reach() if up else run
        kept = reached.kept()
        log_kept = float(reached.facts.log_kept[0])
        if not up and run.facts.has_too_little_noise[0]:
            log_kept = 0.0  # the probability of an infinite loss is an upper bound
        bounding = kept.certified(up=up)
        pairs = zip(kept.losses, bounding.losses, kept.counts, strict=True)
        for one, other, count in pairs:
            if other is not one and count[0] > 0:
                log_kept += float(count[0] * other.log_kept()[0])
        shift = float(bounding.gaussian_shift()[0])
        if shift > 0:
            # The shift is rounded.
            shift *= 1 + shift_error(bounding) * (1 if up else -1)
            taken = [(one_gaussian(np.asarray(shift)), 1.0)]
        else:
            taken = [
                (
                    loss.map(lambda field: np.float64(field[0])).kept_in_range(),
                    float(count[0]),
                )
                for loss, count in zip(bounding.losses, bounding.counts, strict=True)
                if count[0] > 0 and not loss.loses_nothing[0]
            ]
        displaced = 0.0
        for loss, n in taken:
            rounding = _POINT_ROUNDING * FURTHEST
            profile = cast(Profile, loss)
            displaced += n * (lattice.displacement(profile) + rounding)
        losses, counts = zip(*taken, strict=True) if taken else ((), ())
        return cls(losses, counts, log_kept, displaced)


class Problem(NamedTuple):
    """A graph and its options, on one path."""

    graph: Graph
    runs: tuple[Run, ...]  # the options, each of one setting
    upper: tuple[Option, ...]  # bounded from above
    lower: tuple[Option, ...]  # bounded from below
    orientations: tuple[bool, ...]  # backward or not; forward only if symmetric

    @classmethod
    def of(cls, graph: Graph, runs: Sequence[Run]) -> Problem:
        """From options that are runs of one setting and path."""
        for run in runs:
            run.refuse("pld")
        flat = tuple(run.flattened((1,)) for run in runs)
        alike = all(run.is_symmetric for run in flat)
        upper, lower = (
            tuple(Option.of(run, up=up) for run in flat) for up in (True, False)
        )
        return cls(graph, flat, upper, lower, (False,) if alike else (False, True))

    def atoms(self) -> np.ndarray:
        """Returns absolute losses that have a probability, the largest first."""
        sizes: set[float] = set()
        for loss in (loss for option in self.lower for loss in option.losses):
            if isinstance(loss, FiniteValues):
                values, log_masses = loss.values()
                order = np.argsort(-log_masses)[:_MOST_ATOMS]
                sizes |= set(np.abs(values[order]).tolist())
            elif loss.may_have_atoms:
                sizes |= {float(loss.largest_loss(backward=b)) for b in (False, True)}
        return np.array(sorted((x for x in sizes if 0 < x < math.inf), reverse=True))


class Filter(NamedTuple):
    """Rényi's filter of one orientation: the largest sum of moments, by order."""

    # An *upper bound* for every strategy at every order: Feldman and Zrnic (2021).

    t: np.ndarray  # orders, less 1
    value: np.ndarray  # t times the divergence

    @classmethod
    def of(cls, problem: Problem) -> dict[bool, Filter]:
        """Returns the filter of a problem in each of its orientations."""
        names = ["backward" if b else "forward" for b in problem.orientations]
        curves = [[rdp_curve(_ORDERS, r, name) for name in names] for r in problem.runs]
        most = problem.graph.most(np.array(curves))
        pairs = zip(problem.orientations, most, strict=True)
        t = _ORDERS - 1
        return {backward: cls(t, t * rdp) for backward, rdp in pairs}

    def epsilon(self, log_delta: float) -> float:
        """Returns epsilon at a delta."""
        return self.best(EpsilonAt(np.asarray(log_delta)))[0]

    def best(self, question: Question) -> tuple[float, float]:
        """Returns epsilon or log(delta), and the order, less 1, that attains it."""
        at = epsilon_at if question.is_epsilon else log_delta_at
        values = at(question.target, self.t, self.value)
        best = int(np.argmin(values))
        found = float(values[best])
        found = max(found, 0.0) if question.is_epsilon else min(found, 0.0)
        return found, float(self.t[best])

    def answer(self, question: Question, log_lost: float) -> float:
        """*Upper bound* of a question's answer, including infinite losses."""
        found, _ = self.best(question)
        found += RDP_ROUNDING * (1 + abs(found))
        if question.is_epsilon:
            return found if log_lost == -math.inf else math.inf
        return min(float(np.logaddexp(found, log_lost)), 0.0)

    def bound(self, x: np.ndarray) -> np.ndarray:
        """*Upper bounds* of delta at many epsilons."""
        log_delta = log_delta_at(x[:, None], self.t, self.value).min(axis=-1)
        log_delta = np.minimum(log_delta, 0.0)
        return np.exp(log_delta) * (1 + RDP_ROUNDING)
