"""The worst strategy of a menu: its options' pairs, path by path, and the answers."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.menu import Menu, parts_of
from jaxdp_episodic.accountant.describe.step import ComposedSteps, compose
from jaxdp_episodic.accountant.methods.adaptive.graph import (
    Graph,
    Nested,
    budget_graph,
    counts_graph,
    graph_of_budgets,
    rule_graph,
    unfolded,
    with_pending,
)
from jaxdp_episodic.accountant.methods.adaptive.method import AT_MOST, Solver
from jaxdp_episodic.accountant.methods.adaptive.problem import Ends, Problem
from jaxdp_episodic.accountant.methods.question import Question
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.questions.api import delta_of
from jaxdp_episodic.accountant.questions.dominating_pair import runs_of
from jaxdp_episodic.accountant.questions.worst_path import rounded_up, undominated_paths

# Most paths that are solved one by one; beyond, rates are rounded up to make paths
# equal.
_MOST_PATHS = 8
# Logarithm of a delta that may be known less well than to a share: 1e-20.
_LOG_NEGLIGIBLE = -46.0
# Largest budget whose graph is kept for the next question: some MB.
_MOST_KEPT = 10_000


class Game(NamedTuple):
    """A menu as the recursion takes it.

    Attributes:
      steps: of the options that some strategy can reach, those of nested games among
        them, each a step or a composed run.
      graph: the states; its options are numbered as ``steps``.
      budgets: of the states between options, their numbers in the menu's own graph;
        in a game of all budgets that is what is left.
    """

    steps: tuple[Any, ...]
    graph: Graph
    budgets: dict[int, int]


def game_of(menu: Menu, budget: int | None = None) -> Game:
    """The game that a menu with prices, or with rules alone, is.

    Args:
      menu: the menu.
      budget: in place of the menu's own.
    """
    names = tuple(menu.options)
    prices = None if menu.prices is None else [menu.prices[n] for n in names]
    spent = int((menu.budget or 0) if budget is None else budget)
    if menu.rules is not None:
        rules = menu.rules
        graph = rule_graph(names, rules.moves, rules.start, prices, spent)
    else:
        assert prices is not None
        build = _kept_graph if spent <= _MOST_KEPT else budget_graph
        graph = build(tuple(prices), spent)
    return _of_graph(menu, graph)


# Settings of one run have one graph.
_kept_graph = functools.lru_cache(maxsize=1)(budget_graph)


def game_of_budgets(menu: Menu, most: int) -> Game:
    """The game of prices alone in which each smaller budget has a state as well."""
    assert menu.prices is not None
    return _of_graph(menu, graph_of_budgets(list(menu.prices.values()), most))


def _of_graph(menu: Menu, graph: Graph) -> Game:
    """The game of a graph whose options are the menu's, in their order.

    What a run of quotas holds may be taken at any time after it began: what is composed
    of it at once, which costs the most (docs/proofs.md, "Runs that adapt"), and each
    game of it whenever no other game is under way.
    """
    names, blocks = tuple(menu.options), menu.blocks or {}
    used = sorted({k for moves in graph.moves for k, _ in moves})
    number = {k: i for i, k in enumerate(used)}
    parts, pending = list[Any](), list[tuple[int, Game, int]]()
    for i, k in enumerate(used):
        option, times = menu.options[names[k]], blocks.get(names[k], 1)
        part, games = part_of(option), []
        if _has_quotas(option) and isinstance(part, Game):
            part, games = _free_within(option)
        if times > 1 and (games or isinstance(part, Game)):
            raise NotImplementedError(
                "blocks of an option that is a run with prices or rules have no "
                "theorem here; covered: blocks of steps, releases and composed runs"
            )
        parts.append(part if times == 1 else compose((part, times)))
        pending += [(i, *each) for each in games]
    if len(used) < len(names):
        graph = graph._replace(
            moves=tuple(tuple((number[k], to) for k, to in own) for own in graph.moves)
        )
    if not pending:
        return _unfolded(parts, graph)
    added = {
        i: tuple(n if owner == i else 0 for owner, _, n in pending) for i, *_ in pending
    }
    graph, places = with_pending(graph, added)
    found = _unfolded([*parts, *(game for _, game, _ in pending)], graph)
    own = {state: i for i, state in enumerate(places)}
    budgets = {s: own[i] for s, i in found.budgets.items() if i in own}
    return found._replace(budgets=budgets)


def _unfolded(parts: Sequence[Any], graph: Graph) -> Game:
    """The game of a graph whose options are steps, or games that are taken whole."""
    steps, numbers = list[Any](), list[int | Nested]()
    for part in parts:
        if isinstance(part, Game):
            number = range(len(steps), len(steps) + len(part.steps))
            numbers.append(Nested(part.graph, tuple(number)))
            steps += part.steps
        else:
            numbers.append(len(steps))
            steps.append(part)
    if not any(isinstance(part, Game) for part in parts):
        return Game(tuple(steps), graph, {i: i for i in range(len(graph.moves))})
    game, places = unfolded(graph, numbers)
    return Game(tuple(steps), game, {state: i for i, state in enumerate(places)})


def part_of(option: Any) -> Any:
    """Returns an option as a step or a composed run, where it is one; else its game."""
    if not isinstance(option, Menu):
        return option
    if option.quotas is not None:
        return _part_of_quotas(option)
    game = game_of(option)
    if not game.steps:
        return compose(*((step, 0) for step in parts_of(option)))
    same = equivalent(game)
    return game if same is None else same


def _part_of_quotas(menu: Menu) -> Any:
    """All of them composed; games follow the others, in view of what these released.

    So a strategy within them attains the most (docs/proofs.md, "Runs that adapt").
    Rules only take from what it may do.
    """
    composed, games = _free_within(menu)
    if not games:
        return composed
    first = [composed] if any(np.any(count) for count in composed.counts) else []
    graph = counts_graph([n for _, n in games], is_preceded=bool(first))
    return _unfolded([*(game for game, _ in games), *first], graph)


def _has_quotas(option: Any) -> bool:
    return isinstance(option, Menu) and option.quotas is not None


def _free_within(menu: Menu) -> tuple[ComposedSteps, list[tuple[Game, int]]]:
    """What a run of quotas allows at any time: steps, all composed, and games.

    Of quotas within quotas as well, whose own options may lie between all others.
    """
    steps, games = list[tuple[Any, int]](), list[tuple[Game, int]]()
    waiting = [(menu, 1)]
    for run, times in waiting:
        for name, quota in (run.quotas or {}).items():
            option, number = run.options[name], times * quota
            if _has_quotas(option):
                waiting.append((option, number))
                continue
            part = part_of(option)
            if isinstance(part, Game):
                games += [(part, number)] if number else []
            else:
                steps.append((part, number))
    steps = steps or [(step, 0) for step in parts_of(menu)]
    return compose(*steps), games


def equivalent(game: Game) -> ComposedSteps | None:
    """A composition that the worst strategy is, where there is one.

    That is of one option; and of Gaussians alone, which are totally ordered by their
    shift: a strategy that collects the largest sum of squares is the worst of all. By
    one theorem: by another, which may say less of it, another strategy is the worst.
    """
    if not game.steps:
        return None
    if len(game.steps) == 1:
        taken = game.graph.path_of_most([1.0])
    else:
        squares = []
        for run, *others in map(all_runs, game.steps):
            if others:
                return None
            shift = np.unique(run.gaussian_shift())
            if shift.size != 1 or not (shift > 0).all() or run.is_unprotected.any():
                return None
            squares.append(float(shift[0]) ** 2)
        taken = game.graph.path_of_most(squares)
    counts = taken.astype(np.int64).tolist()
    return compose(*zip(game.steps, counts, strict=True))


def all_runs(step: Any) -> tuple[Run, ...]:
    """The runs that a step, or a composed one, is: one for each theorem; paths last."""
    count = None if isinstance(step, ComposedSteps) else np.asarray(1)
    return runs_of(step, count)


def ends(question: Question, game: Game, *, width: float | None = None) -> Ends:
    """Certified ends of one answer: the supremum over paths, taken last.

    Of several theorems the least end counts, path by path.

    Args:
      question: one target inside of its range.
      game: of at least one option.
      width: see `Solver.answer`.
    """
    by_theorem = [
        _ends_of_paths(question, *problems, width)
        for problems in problems_by_theorem(game)
    ]
    found = Ends(*map(min, zip(*by_theorem, strict=True)))
    _warn_of_width(question, found, max(width or 0.0, AT_MOST))
    return found


def _warn_of_width(question: Question, found: Ends, width: float) -> None:
    """Says so where ends are further apart than is usual, if the upper one matters."""
    apart = found.upper - found.lower if found.upper > found.lower else 0.0
    is_small = not question.is_epsilon and found.upper < _LOG_NEGLIGIBLE
    if apart <= width or math.isinf(found.upper) or is_small:
        return
    far = f"{apart:.1e} nats" if question.is_epsilon else f"a factor e^{apart:.2g}"
    what = "epsilon" if question.is_epsilon else "delta"
    warnings.warn(
        f"the worst strategy's {what} is certified only to {far} between its ends, "
        f"more than {width:g}: the upper end holds, but may be too large by as much; "
        "coarser prices and a smaller budget make it closer",
        stacklevel=2,
    )


def _ends_of_paths(
    question: Question,
    above: Sequence[Problem],
    below: Sequence[Problem],
    width: float | None,
) -> Ends:
    lower, upper = question.nothing, question.nothing
    solvers = [Solver(question, problem) for problem in above]
    # The worst first: most others then need no second look.
    for solver in sorted(solvers, key=lambda s: -s.expected):
        found = solver.answer(width, at_least=lower)
        upper = max(upper, found.upper)
        if not below:
            lower = max(lower, found.lower)
    for problem in below:
        lower = max(lower, Solver(question, problem).answer(width).lower)
    return Ends(min(lower, upper), upper)


def problems_by_theorem(game: Game) -> Iterator[tuple[list[Problem], list[Problem]]]:
    """Of each theorem, which holds by itself, the problems of the paths.

    Where these stand for more paths, also some of a lower end.
    """
    for runs in _runs_by_theorem(game):
        yield _problems_of(game.graph, runs)


def _runs_by_theorem(game: Game) -> Iterator[tuple[Run, ...]]:
    """Of each theorem the runs of all steps; a step with fewer keeps its last one."""
    each = [all_runs(step) for step in game.steps]
    for theorem in range(max(map(len, each))):
        yield tuple(some[min(theorem, len(some) - 1)] for some in each)


def _problems_of(
    graph: Graph, runs: Sequence[Run]
) -> tuple[list[Problem], list[Problem]]:
    """The problems of one theorem."""
    joint = Run(
        tuple(loss for run in runs for loss in run.losses),
        tuple(count for run in runs for count in run.counts),
    )
    if joint.num_paths > 1:
        joint = joint.take_paths(undominated_paths(joint))
    if joint.num_paths <= _MOST_PATHS:
        return [_path(graph, runs, joint, i) for i in range(joint.num_paths)], []
    fewer, group, _ = rounded_up(joint, _MOST_PATHS)
    above = [_path(graph, runs, fewer, i) for i in range(fewer.num_paths)]
    members = np.unique(group, return_index=True)[1].tolist()
    return above, [_path(graph, runs, joint, i) for i in members]


def _path(graph: Graph, runs: Sequence[Run], joint: Run, index: int) -> Problem:
    """The problem of one path of a joint run."""
    one = joint.take_paths(np.array([index]))
    options, at = [], 0
    for run in runs:
        end = at + len(run.losses)
        options.append(Run(one.losses[at:end], one.counts[at:end]))
        at = end
    return Problem.of(graph, options)


def least_of_theorems(game: Game, of_path: Callable[[Problem], Any]) -> Any:
    """The least over theorems, each of which holds by itself, of the worst path's."""
    return functools.reduce(
        np.minimum,
        (
            functools.reduce(np.maximum, map(of_path, above))
            for above, _ in problems_by_theorem(game)
        ),
    )


def as_deltas(found: Ends) -> Ends:
    """Ends of delta from those of its logarithm."""
    lower, upper = map(np.asarray, found)
    return Ends(float(delta_of(lower, up=False)), float(delta_of(upper, up=True)))


def largest_loss(game: Game) -> float:
    """*Upper bound* of what any strategy loses; inf where there is none."""
    most = 0.0
    for steps in _runs_by_theorem(game):
        costs = np.array([float(run.most_lost.max()) for run in steps])
        lost = any(np.any(run.log_kept() < 0) for run in steps)
        total = math.inf if lost else float(game.graph.most(costs))
        most = max(most, total)
    return most


def lost_at_once(game: Game) -> float:
    """*Upper bound* of the probability that a strategy loses everything at once."""
    most = 0.0
    for steps in _runs_by_theorem(game):
        costs = np.array([-float(run.log_kept().min()) for run in steps])
        with np.errstate(invalid="ignore"):
            lost = -math.expm1(-float(game.graph.most(costs)))
        most = max(most, lost)
    return min(most * (1 + 1e-12), 1.0)
