"""The worst strategy where all losses are finitely many: exact, but for rounding.

The recursion ``w(x, g) = max((1 - g)_+, max over moves of E w(next, g e^-L))`` at one g
asks of each state for as many losses so far as there are numbers of atoms that add up
to them, whatever their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.losses.protocols import FiniteValues, Profile
from jaxdp_episodic.accountant.methods.adaptive.graph import Graph
from jaxdp_episodic.accountant.methods.adaptive.problem import Ends, Problem, Side
from jaxdp_episodic.accountant.methods.question import Question

# Most pairs of a state and a loss so far: about a second.
MOST_VALUES = 200_000
# Most atoms of one option.
_MOST_ATOMS = 32
# Relative error of a delta above which the other recursion may know it better.
_MOST_ERROR = 1e-7
# Points of one round of the search for an epsilon.
_POINTS = 33
# Rounds of it, at most.
_MOST_ROUNDS = 14
# Width of an epsilon that ends the search, relative to 1 and its size.
_WIDTH = 1e-14
# Nats beyond which no epsilon is looked for.
_FURTHEST = 1e4
# Rounding of a value, for each unit of 1, of moves and of nats.
_ROUNDING = 2e-15


class Atoms(NamedTuple):
    """One option's losses, (J,) finite ones and their P-masses; the mass at infinity.

    What has a Q-mass alone needs no mention.
    """

    losses: np.ndarray
    masses: np.ndarray
    infinite: float = 0.0

    @classmethod
    def of_pair(cls, p: Sequence[float], q: Sequence[float]) -> Atoms:
        """Those of two lists of probabilities, zeros among them."""
        first, second = np.asarray(p, np.float64), np.asarray(q, np.float64)
        both = (first > 0) & (second > 0)
        losses = np.log(first[both]) - np.log(second[both])
        return cls(losses, first[both], float(first[second == 0].sum()))


def worst_of_finite(
    graph: Graph, options: Sequence[Atoms], log_g: np.ndarray
) -> tuple[np.ndarray, float] | None:
    """``H_g`` of the worst strategy at any g > 0, and a bound of its absolute error.

    Args:
      graph: the states.
      options: their losses, in one orientation.
      log_g: (n,) any real numbers.

    Returns:
      (n,) values and the error; None where there are too many values.
    """
    offsets = np.cumsum([0, *(len(o.losses) for o in options)])
    losses = np.concatenate([o.losses for o in options])
    start = (0,) * len(losses)
    # From the start on: which numbers of atoms may have been seen in each state.
    needed: list[set[tuple[int, ...]]] = [set() for _ in graph.moves]
    needed[-1].add(start)
    total = 1
    for state in range(len(graph.moves) - 1, -1, -1):
        for option, to in graph.moves[state]:
            before = len(needed[to])
            for seen in needed[state]:
                for j in range(offsets[option], offsets[option + 1]):
                    needed[to].add((*seen[:j], seen[j] + 1, *seen[j + 1 :]))
            total += len(needed[to]) - before
            if total > MOST_VALUES:
                return None
    log_g = np.asarray(log_g, np.float64)
    found: list[dict[tuple[int, ...], np.ndarray]] = []
    furthest, most_moves = 0.0, 0
    for state, moves in enumerate(graph.moves):
        values = {}
        for seen in needed[state]:
            lost = float(np.dot(seen, losses))
            furthest, most_moves = max(furthest, abs(lost)), max(most_moves, sum(seen))
            value = np.maximum(-np.expm1(np.minimum(log_g - lost, 0.0)), 0.0)
            for option, to in moves:
                atoms, first = options[option], offsets[option]
                mean = np.full(log_g.shape, atoms.infinite)
                for i, mass in enumerate(atoms.masses.tolist()):
                    j = int(first) + i
                    after = (*seen[:j], seen[j] + 1, *seen[j + 1 :])
                    mean += mass * found[to][after]
                value = np.maximum(value, mean)
            values[seen] = value
        found.append(values)
    error = _ROUNDING * (2 + most_moves + furthest)
    return found[-1][start], error


def ends_of_finite(question: Question, problem: Problem) -> Ends | None:
    """Ends of epsilon or log(delta), as close as rounding lets them be.

    None where an option has other losses, or too many, and where rounding is more than
    a small share of what is asked.
    """
    side = problem.upper
    menus: Any = [
        [
            _atoms_of(*option, backward=backward)
            for option in zip(side.losses, side.counts, side.log_kept, strict=True)
        ]
        for backward in problem.orientations
    ]
    if any(option is None for options in menus for option in options):
        return None
    # Of the masses themselves, once a move.
    relative = float(problem.graph.most(_mass_errors(side)))

    def values(x: np.ndarray) -> np.ndarray | None:
        """(2, n) from below and above."""
        found: list[Any] = [worst_of_finite(problem.graph, one, x) for one in menus]
        if any(each is None for each in found):
            return None
        worst = np.maximum.reduce([value for value, _ in found])
        error = max(error for _, error in found) + relative
        return np.stack([worst - error, worst + error])

    target = float(question.target)
    if question.is_epsilon:
        return _epsilon_ends(values, math.exp(target))
    found = values(np.array([target]))
    if found is None or not np.ptp(found) <= _MOST_ERROR * found[0, 0]:
        return None
    return Ends(math.log(found[0, 0]), math.log(min(found[1, 0], 1.0)))


def _epsilon_ends(
    values: Callable[[np.ndarray], np.ndarray | None], delta: float
) -> Ends | None:
    """Where falling values, known from below and above, reach a delta."""
    high, found = 1.0, values(np.ones(1))
    while found is not None and found[1, 0] > delta and high <= _FURTHEST:
        high *= 2
        found = values(np.array([high]))
    if found is None or found[1, 0] > delta or np.ptp(found) > _MOST_ERROR * delta:
        return None
    brackets = []
    for which in (0, 1):
        low, top = 0.0, high
        for _ in range(_MOST_ROUNDS):
            x = np.linspace(low, top, _POINTS)
            found = values(x)
            assert found is not None  # as before, at other g
            i = int(np.argmax(found[which] <= delta))
            low, top = float(x[max(i - 1, 0)]), float(x[i])
            if top - low <= _WIDTH * (1 + top):
                break
        brackets.append((low, top))
    # Below, the last point that is surely too small; above, the first that is not.
    return Ends(max(brackets[0][0] - _WIDTH, 0.0), brackets[1][1] + _WIDTH)


def _atoms_of(
    losses: Sequence[Profile],
    counts: Sequence[float],
    log_kept: float,
    *,
    backward: bool,
) -> Atoms | None:
    """One option's atoms, all of its steps together."""
    found, masses = np.zeros(1), np.full(1, math.exp(log_kept))
    for loss, count in zip(losses, counts, strict=True):
        if not isinstance(loss, FiniteValues):
            return None
        own, log_masses = loss.values()
        if backward:
            own, log_masses = -own, log_masses - own
        for _ in range(int(count)):
            if len(found) * len(own) > _MOST_ATOMS:
                return None
            found = np.add.outer(found, own).reshape(-1)
            masses = np.multiply.outer(masses, np.exp(log_masses)).reshape(-1)
    return Atoms(found, masses, -math.expm1(log_kept))


def _mass_errors(side: Side) -> np.ndarray:
    """Bounds of the relative errors of the options' masses."""
    return np.array(
        [
            sum(count * _mass_error(loss) for loss, count in zip(*each, strict=True))
            for each in zip(side.losses, side.counts, strict=True)
        ]
    )


def _mass_error(loss: Any) -> float:
    values, log_masses = loss.values()
    size = 1 + np.abs(values).max() + np.abs(log_masses).max()
    return float(np.max(loss.profile_error()) * size)
