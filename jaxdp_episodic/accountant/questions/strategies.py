"""The worst strategy of an adaptive run: its game, its ends, prices and budgets."""

from __future__ import annotations

import bisect
import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.runs import MOST_BUDGET, Menu, parts_of
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    compose,
    parts_of as parts_of_run,
)
from jaxdp_episodic.accountant.methods.adaptive.method import (
    AT_MOST,
    Solver,
    margin,
    odometer_delta,
    solver_of,
)
from jaxdp_episodic.accountant.methods.adaptive.problem import Graph, Problem, explored
from jaxdp_episodic.accountant.methods.run import (
    DeltaAt,
    EpsilonAt,
    Interval,
    Question,
    Run,
)
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.dominating_pair import runs_of, runs_of_parts
from jaxdp_episodic.accountant.questions.worst_path import undominated_paths

# log(1e-20): below this delta the width of the ends causes no warning.
_LOG_NEGLIGIBLE = -46.0
# Budgets for which prices are tried.
_SCALES = np.arange(120, 601, 4)
# Smallest price: rounding then changes a price by at most a tenth.
_LEAST_PRICE = 5
# Block lengths that are tried for each option.
_BLOCKS = (1, 2, 3, 4, 5, 6, 8)
# Smallest number of blocks within the target for a block length to be tried.
_LEAST_BLOCKS = 40
# Penalty per unit of the budget, to prefer the smaller of two similar scales.
_COST_OF_A_UNIT = 1e-5
# Largest number of steps of one option.
_MOST_STEPS = 2**40
# Width of log(delta) in the search for a budget.
_WIDTH = 2e-3


class Game(NamedTuple):
    """An adaptive run in the form of the recursion."""

    steps: tuple[Any, ...]
    graph: Graph  # each move is an index into `steps` and the next state
    budgets: Mapping[int, int]  # state to budget, for the initial states


class _State(NamedTuple):
    """A state of a strategy."""

    own: Any  # remaining budget, and state of the rules
    pending: tuple[int, ...] = ()  # numbers of games that are paid for but not played
    within: tuple[int, ...] = ()  # index of the current game and its state, or ()


def game_of(menu: Menu, budget: int | None = None, *, every: bool = False) -> Game:
    """Returns the game of a run with prices or rules; ``every``: of all budgets."""
    names, rules = tuple(menu.options), menu.rules
    costs = [0 if menu.prices is None else int(menu.prices[n]) for n in names]
    most = int((menu.budget or 0) if budget is None else budget)
    start = None if rules is None else rules.start

    def moves(own: Any) -> Iterable[tuple[int, Any]]:
        left, rule = own
        for k, name in enumerate(names):
            after = None if rules is None else rules.after(rule, name)
            if costs[k] <= left and (rules is None or after is not None):
                yield k, (left - costs[k], after)

    parts, left_open = list[Any](), list[Sequence[tuple[Game, int]]]()
    for name in names:
        option, times = menu.options[name], (menu.blocks or {}).get(name, 1)
        part, games = part_of(option), []
        if isinstance(part, Game) and option.quotas is not None:
            part, games = _free_within(option)
        if times == 1:
            parts.append(part)
        elif games or isinstance(part, Game):
            raise NotImplementedError(
                "blocks of an option that is a run with prices or rules have no "
                "theorem here; covered: blocks of steps, releases and composed runs"
            )
        else:
            parts.append(compose((part, times)))
        left_open.append(games)
    starts = [(left, start) for left in range(0 if every else most, most + 1)]
    nothing = (0,) * sum(map(len, left_open))
    begin = [_State(own, nothing) for own in starts]
    return _joined(begin, moves, parts, left_open, lambda own: most - own[0])


def _joined(
    begin: Sequence[_State],
    moves: Callable[[Any], Iterable[tuple[int, Any]]],
    parts: Sequence[Any],
    left_open: Sequence[Sequence[tuple[Game, int]]],
    spent: Callable[[Any], int],
) -> Game:
    """The game of a run's own states together with the games of its options.

    ``moves`` gives (option, next own state); ``parts`` is the step or game of each
    option, ``left_open`` the games, with counts, that it leaves pending.
    """
    owners = [(k, *each) for k, games in enumerate(left_open) for each in games]
    added = [[n * (k == o) for o, _, n in owners] for k in range(len(parts))]
    every = [*parts, *(game for _, game, _ in owners)]
    steps, first = list[Any](), list[int]()
    for part in every:
        first.append(len(steps))
        steps += part.steps if isinstance(part, Game) else [part]

    def within(i: int, at: int, after: _State) -> Iterator[tuple[int, _State]]:
        graph = every[i].graph
        for k, to in graph.moves[at]:
            yield first[i] + k, after._replace(within=(i, to) * bool(graph.moves[to]))

    def begun(i: int, after: _State) -> Iterable[tuple[int, _State]]:
        if isinstance(every[i], Game):
            return within(i, len(every[i].graph.moves) - 1, after)
        return [(first[i], after)]

    def following(state: _State) -> Iterator[tuple[int, _State]]:
        own, pending, inner = state
        if inner:
            game, at = inner
            yield from within(game, at, state)
            return
        for k, to in moves(own):
            more = tuple(map(operator.add, pending, added[k]))
            yield from begun(k, _State(to, more))
        for j, n in enumerate(pending):
            if n:
                fewer = (*pending[:j], n - 1, *pending[j + 1 :])
                yield from begun(len(parts) + j, _State(own, fewer))

    graph, number = explored(begin, following, lambda state: spent(state.own))
    used = sorted({k for own in graph.moves for k, _ in own})
    if len(used) < len(steps):
        place = {k: i for i, k in enumerate(used)}
        fewer = (tuple((place[k], to) for k, to in own) for own in graph.moves)
        graph = graph._replace(moves=tuple(fewer))
    budgets = {number[state]: i for i, state in enumerate(begin)}
    return Game(tuple(steps[k] for k in used), graph, budgets)


def part_of(option: Any) -> Any:
    """Returns an option as a step or a composed run if possible; else as a game."""
    if not isinstance(option, Menu):
        return option
    if option.quotas is not None:  # composed options first, then games in any order
        composed, games = _free_within(option)
        if not games:
            return composed
        is_first = any(np.any(count) for count in composed.counts)
        numbers = tuple(number for _, number in games)
        begin = _State(1, (0,) * len(games)) if is_first else _State(0, numbers)
        return _joined(
            [begin], lambda own: [(0, 0)] * own, [composed], [games], lambda _: 0
        )
    game = game_of(option)
    if not game.steps:
        return compose(*((step, 0) for step in parts_of(option)))
    same = equivalent(game)
    return game if same is None else same


def _free_within(menu: Menu) -> tuple[ComposedSteps, list[tuple[Game, int]]]:
    """The composed steps of a run of quotas, and its games with their counts."""
    steps, games = list[tuple[Any, int]](), list[tuple[Game, int]]()
    waiting = [(menu, 1)]
    for run, times in waiting:
        for name, quota in (run.quotas or {}).items():
            option, number = run.options[name], times * quota
            if isinstance(option, Menu) and option.quotas is not None:
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
    """Returns the composed run that is the worst strategy; None if it is not one."""
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
            if (
                shift.size != 1
                or not (shift > 0).all()
                or (run.facts.log_kept < 0).any()
            ):
                return None
            squares.append(float(shift[0]) ** 2)
        taken = game.graph.path_of_most(squares)
    counts = taken.astype(np.int64).tolist()
    return compose(*zip(game.steps, counts, strict=True))


def all_runs(step: Any) -> tuple[Run, ...]:
    """Returns the runs of a step or a composed run, one for each theorem."""
    return runs_of(step, np.asarray(1))


def ends(question: Question, game: Game, *, width: float | None = None) -> Interval:
    """Returns certified ends of epsilon or log(delta), the largest over paths."""

    def of_path(problem: Problem, at_least: float) -> Interval:
        return Solver(question, problem).answer(width, at_least=at_least)

    found = _ends_by_theorem(game, of_path, question)
    apart = found.upper - found.lower if found.upper > found.lower else 0.0
    is_small = not question.is_epsilon and found.upper < _LOG_NEGLIGIBLE
    most = max(width or 0.0, AT_MOST)
    if apart > most and not (math.isinf(found.upper) or is_small):
        far = f"{apart:.1e} nats" if question.is_epsilon else f"a factor e^{apart:.2g}"
        what = "epsilon" if question.is_epsilon else "delta"
        warnings.warn(
            f"the interval of the worst strategy's {what} has a width of {far}, more "
            f"than {most:g}: the upper end is valid but may be too large by this much; "
            "use coarser prices and a smaller budget for a narrower one",
            stacklevel=2,
        )
    return found


def _ends_by_theorem(
    game: Game,
    of_path: Callable[[Problem, float], Interval],
    question: Question | None = None,
) -> Interval:
    """The smallest ends over theorems, each on its worst path."""
    found = []
    for problems in problems_by_theorem(game):
        if question is not None and len(problems) > 1:
            problems.sort(key=lambda problem: -Solver(question, problem).expected)
        lower, upper = -math.inf, -math.inf
        for problem in problems:
            each = of_path(problem, lower)
            lower, upper = max(lower, each.lower), max(upper, each.upper)
        found.append(Interval(min(lower, upper), upper))
    return Interval(*map(min, zip(*found, strict=True)))


def problems_by_theorem(game: Game) -> Iterator[list[Problem]]:
    """Yields for each theorem the problems of the paths that no other path exceeds."""
    for runs in _runs_by_theorem(game):
        joint = Run(
            tuple(loss for run in runs for loss in run.losses),
            tuple(count for run in runs for count in run.counts),
        )
        if joint.shape[-1] > 1:
            joint = joint.take_paths(undominated_paths(joint))
        problems = []
        for path in range(joint.shape[-1]):
            one, options, at = joint.take_paths(np.array([path])), [], 0
            for run in runs:
                end = at + len(run.losses)
                options.append(Run(one.losses[at:end], one.counts[at:end]))
                at = end
            problems.append(Problem.of(game.graph, options))
        yield problems


def _runs_by_theorem(game: Game) -> Iterator[tuple[Run, ...]]:
    """Yields for each theorem the runs of all steps, repeating a step's last one."""
    each = [all_runs(step) for step in game.steps]
    steps, counts = zip(*(parts_of_run(step, 1) for step in game.steps), strict=True)
    joint = runs_of_parts(sum(steps, ()), sum(counts, ()))  # on the paths of all
    for theorem, whole in enumerate(joint):
        runs, uses = [], list(zip(whole.losses, whole.counts, strict=True))
        for some in each:
            own = len(some[min(theorem, len(some) - 1)].losses)
            runs.append(Run(*zip(*uses[:own], strict=True)))
            del uses[:own]
        yield tuple(runs)


def least_of_theorems(game: Game, of_path: Callable[[Problem], Any]) -> Any:
    """Returns the smallest over theorems of the largest over paths."""
    return functools.reduce(
        np.minimum,
        (
            functools.reduce(np.maximum, map(of_path, problems))
            for problems in problems_by_theorem(game)
        ),
    )


def as_deltas(found: Interval) -> Interval:
    """Returns the ends of delta from those of its logarithm."""
    lower, upper = map(np.asarray, found)
    return Interval(
        float(api.delta_of(lower, up=False)), float(api.delta_of(upper, up=True))
    )


def largest_losses(game: Game) -> tuple[float, float]:
    """Returns *upper bounds* of the largest loss and of P(inf), for any strategy."""
    largest, lost = 0.0, 0.0
    for runs in _runs_by_theorem(game):
        facts = [run.facts for run in runs]
        costs = [(one.most_lost.max(), -one.log_kept.min()) for one in facts]
        loss, nats = game.graph.most(np.array(costs, np.float64)).tolist()
        largest = max(largest, math.inf if nats > 0 else loss)
        lost = max(lost, -math.expm1(-nats))
    return largest, min(lost * (1 + 1e-12), 1.0)


def odometer_ends(menu: Menu, odometer: Sequence[float]) -> Interval:
    """Returns certified ends of log(delta) with which an odometer holds."""
    game = game_of(menu)
    if not game.steps:
        return Interval(-math.inf, -math.inf)
    return _ends_by_theorem(game, lambda problem, _: odometer_delta(problem, odometer))


def odometer_with_margin(menu: Menu, log_delta: float) -> np.ndarray:
    """Returns the odometer: epsilon of a budget of the price spent, plus a margin."""
    game = game_of(menu)
    if not game.steps:
        return np.zeros(int(menu.budget or 0) + 1)
    budgets, question = game_of(menu, every=True), EpsilonAt(np.asarray(log_delta))
    epsilons = least_of_theorems(
        budgets,
        lambda problem: solver_of(question, problem).ends_of(budgets.budgets),
    )
    if not np.isfinite(epsilons).all():
        return epsilons
    # Epsilon grows with the budget; enforce it against rounding.
    stated = np.maximum.accumulate(epsilons)
    found = least_of_theorems(
        game, lambda problem: margin(problem, stated.tolist(), log_delta)
    )
    epsilons = stated + float(found)
    epsilons[0] = 0.0  # before the first release
    return epsilons


# --- Prices, and the largest budget within a target ---


def number_alone(option: Any, epsilon: float, delta: float) -> float:
    """Returns how often an option alone is within a target, as a real number."""
    step = part_of(option)
    if isinstance(step, Game):
        most = [(one, option.most(name)) for name, one in option.options.items()]
        return min(number_alone(one, epsilon, delta) / n for one, n in most if n)

    def log_delta(number: int) -> float:
        found = float(api.delta(compose((step, number)), epsilon=epsilon))
        return math.log(found) if found > 0 else -math.inf

    goal = math.log(delta)
    most = 1
    while log_delta(most) <= goal:
        most *= 2
        if most > _MOST_STEPS:
            return math.inf
    low = _largest_within(lambda number: log_delta(number) <= goal, most // 2, most)
    before, after = log_delta(low), log_delta(low + 1)
    if not math.isfinite(before):  # e.g. for no step
        return float(low) if low else math.exp(goal - after)
    return low + min(max((goal - before) / (after - before), 0.0), 1.0)


def _largest_within(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Bisects for the largest number below ``high`` that fits; ``low`` must fit."""
    above = range(low + 1, high)
    return low + bisect.bisect_left(above, True, key=lambda number: not fits(number))


def default_prices(
    options: Mapping[str, Any], epsilon: float, delta: float, *, blocks: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns whole prices for a target, and block lengths above 1."""
    numbers, lengths = {}, []
    for name, option in options.items():
        number = number_alone(option, epsilon, delta)
        if number < 1:
            part = part_of(option)
            least = (
                option.epsilon(delta=delta)
                if isinstance(part, Game)
                else api.epsilon(compose((part, 1)), delta=delta)
            )
            raise ValueError(
                f"epsilon={epsilon:g} is too small at delta={delta:g} for option "
                f"{name!r}, of which one use costs {least:.4g}: use a larger epsilon "
                "or more noise"
            )
        if number == math.inf:
            raise ValueError(
                f"prices must be given: option {name!r} alone has no limit "
                f"at epsilon={epsilon:g}, delta={delta:g}"
            )
        numbers[name] = number
        is_step = blocks and not isinstance(part_of(option), Game)
        # Also powers of 2, for options that are used thousands of times.
        most = max(int(number / _LEAST_BLOCKS), 1) if is_step else 1
        powers = {2**i for i in range(most.bit_length())}
        lengths.append(sorted({m for m in {*_BLOCKS, *powers} if m <= most}))
    found = [_laid(list(numbers.values()), lengths, float(s)) for s in _SCALES]
    _, prices, chosen = min(found)
    lengths = {n: m for n, m in zip(numbers, chosen, strict=True) if m > 1}
    return dict(zip(numbers, prices, strict=True)), lengths


def _laid(
    numbers: Sequence[float], lengths: Sequence[Sequence[int]], scale: float
) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    """Prices and blocks at one scale, and the loss of the smallest share."""
    chosen = []
    for number, own in zip(numbers, lengths, strict=True):
        options = []
        for length in own:
            exact = scale * length / number
            price = max(round(exact), 1)
            ratio, too_cheap = price / exact, max(_LEAST_PRICE - price, 0)
            # On average, half a block of the budget remains unused.
            rest = 0.5 * length / number + 0.05 * too_cheap / _LEAST_PRICE
            options.append((abs(math.log(ratio)) + rest, ratio, rest, price, length))
        chosen.append(min(options))
    _, ratios, rests, prices, blocks = zip(*chosen, strict=True)
    loss = 1 - min(ratios) / max(ratios) + max(rests) + _COST_OF_A_UNIT * scale
    return loss, prices, blocks


def largest_budget(menu: Menu, epsilon: float, delta: float) -> int:
    """Returns the largest budget whose certified epsilon is within a target."""
    assert menu.prices is not None
    blocks = menu.blocks or {}
    # An upper bound: each option alone with one block more than the target permits.
    alone = [
        price * (number_alone(menu.options[n], epsilon, delta) / blocks.get(n, 1) + 1)
        for n, price in menu.prices.items()
    ]
    # With rules an option alone may never exceed the target.
    most = min(min(alone) if menu.rules is None else max(alone), MOST_BUDGET + 1.0)
    if most > MOST_BUDGET:
        raise ValueError(
            f"prices must be smaller, so that the budget of the target is at most "
            f"{MOST_BUDGET:,}, got {dict(menu.prices)}"
        )
    most = max(math.ceil(most), 1)
    every = game_of(menu, most, every=True)
    if not every.steps:
        found = 0
    elif equivalent(every) is not None:

        def fits(budget: int) -> bool:
            same = equivalent(game_of(menu, budget))
            return (
                same is None or api.delta(same, epsilon=epsilon, method="pld") <= delta
            )

        found = _largest_within(fits, 0, most + 1)
    else:
        question = DeltaAt(np.asarray(epsilon))
        # One recursion has the worst strategies of all smaller budgets in its rows.
        ends = least_of_theorems(
            every,
            lambda problem: solver_of(question, problem, _WIDTH).ends_of(every.budgets),
        )
        too_large = np.flatnonzero(ends > math.log(delta))
        found = int(too_large[0]) - 1 if too_large.size else most
    if found < min(menu.prices.values()):
        raise ValueError(
            f"epsilon={epsilon:g} and delta={delta:g} permit no option: the budget "
            f"would be {found}, the prices are {dict(menu.prices)}"
        )
    return found
