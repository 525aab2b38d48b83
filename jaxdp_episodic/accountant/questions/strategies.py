"""The worst strategy of an adaptive run: its game, its ends, prices and budgets."""

from __future__ import annotations

import bisect
import functools
import itertools
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
# Block lengths that are tried; the powers of 2 for options that are used often.
_BLOCKS = (1, 2, 3, 4, 5, 6, *(2**i for i in range(3, 40)))
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
    within: tuple[int, int] | None = None  # the current game and its state


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

    opened = []
    for name in names:
        part, games = _opened(menu.options[name])
        times = (menu.blocks or {}).get(name, 1)
        if times > 1:
            if games or isinstance(part, Game):
                raise NotImplementedError(
                    "blocks of an option that is a run with prices or rules have no "
                    "theorem here; covered: blocks of steps, releases and composed runs"
                )
            part = compose((part, times))
        opened.append((part, games))
    starts = [(left, start) for left in range(0 if every else most, most + 1)]
    return _joined(starts, moves, opened, lambda own: most - own[0])


def _joined(
    starts: Sequence[Any],
    moves: Callable[[Any], Iterable[tuple[int, Any]]],
    opened: Sequence[tuple[Any, Sequence[tuple[Game, int]]]],
    spent: Callable[[Any], int],
) -> Game:
    """The game of a run's own states together with the games of its options.

    ``moves`` gives (option, next own state), ``opened`` what each option is.
    """
    pending = [(k, *each) for k, (_, games) in enumerate(opened) for each in games]
    added = [[n * (k == own) for own, _, n in pending] for k in range(len(opened))]
    parts = [*(part for part, _ in opened), *(game for _, game, _ in pending)]

    def within(i: int, at: int, after: _State) -> Iterator[tuple[Any, _State]]:
        graph = parts[i].graph
        for k, to in graph.moves[at]:
            yield (i, k), after._replace(within=(i, to) if graph.moves[to] else None)

    def begun(i: int, after: _State) -> Iterable[tuple[Any, _State]]:
        if isinstance(parts[i], Game):
            return within(i, len(parts[i].graph.moves) - 1, after)
        return [((i, 0), after)]

    def following(state: _State) -> Iterator[tuple[Any, _State]]:
        if state.within:
            yield from within(*state.within, state)
            return
        for k, to in moves(state.own):
            more = tuple(map(operator.add, state.pending, added[k]))
            yield from begun(k, _State(to, more))
        for j, n in enumerate(state.pending):
            if n:
                fewer = (*state.pending[:j], n - 1, *state.pending[j + 1 :])
                yield from begun(len(opened) + j, _State(state.own, fewer))

    begin = [_State(own, (0,) * len(pending)) for own in starts]
    graph: Any  # of moves (part and its step, next state); then numbered
    graph, number = explored(begin, following, lambda state: spent(state.own))
    used = sorted({move for own in graph.moves for move, _ in own})
    place = {move: i for i, move in enumerate(used)}
    named = (tuple((place[move], to) for move, to in own) for own in graph.moves)
    owners = ((parts[i], k) for i, k in used)
    steps = (one.steps[k] if isinstance(one, Game) else one for one, k in owners)
    budgets = {number[state]: i for i, state in enumerate(begin)}
    return Game(tuple(steps), graph._replace(moves=tuple(named)), budgets)


def part_of(option: Any) -> Any:
    """Returns an option as a step or a composed run if possible; else as a game."""
    part, games = _opened(option)
    if not games:
        return part
    # The composed options first, then the games in any order.
    return _joined([1], lambda own: [(0, 0)] * own, [(part, games)], lambda _: 0)


def _opened(option: Any) -> tuple[Any, list[tuple[Game, int]]]:
    """What taking an option is: its step or game, and games that it leaves open."""
    if not isinstance(option, Menu):
        return option, []
    if option.quotas is None:
        game = game_of(option)
        if not game.steps:
            return compose(*((step, 0) for step in parts_of(option))), []
        same = equivalent(game)
        return (game if same is None else same), []
    steps, games = list[tuple[Any, int]](), list[tuple[Game, int]]()
    for name, quota in option.quotas.items():
        part, more = _opened(option.options[name])
        games += [(game, quota * number) for game, number in more if quota]
        if not isinstance(part, Game):
            steps.append((part, quota))
        elif quota:
            games.append((part, quota))
    return compose(*(steps or [(step, 0) for step in parts_of(option)])), games


def equivalent(game: Game) -> ComposedSteps | None:
    """Returns the composed run that is the worst strategy; None if it is not one."""
    squares = [1.0] * len(game.steps)
    if len(game.steps) > 1:  # only Gaussian steps without sampling have an equivalent
        for i, step in enumerate(game.steps):
            run, *others = runs_of(step, np.asarray(1))
            shift = np.unique(run.gaussian_shift())
            if others or shift.size != 1 or (run.facts.log_kept < 0).any():
                return None
            squares[i] = float(shift[0]) ** 2
    if not squares or 0.0 in squares:
        return None
    counts = game.graph.path_of_most(squares).astype(np.int64).tolist()
    return compose(*zip(game.steps, counts, strict=True))


def ends(question: Question, game: Game, *, width: float | None = None) -> Interval:
    """Returns certified ends of epsilon or log(delta), the largest over paths."""
    theorems = []
    for problems in problems_by_theorem(game):
        solvers = [Solver(question, problem) for problem in problems]
        solvers.sort(key=lambda solver: -max(solver.uppers.values()))
        worst = Interval(-math.inf, -math.inf)
        for solver in solvers:
            found = solver.answer(width, at_least=worst.lower)
            worst = Interval(*map(max, worst, found))
        theorems.append(worst)
    found = Interval(*map(min, zip(*theorems, strict=True)))
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


def problems_by_theorem(game: Game) -> Iterator[list[Problem]]:
    """Yields for each theorem the problems of the paths that no other path exceeds."""
    for joint, lengths in _by_theorem(game):
        if joint.shape[-1] > 1:
            joint = joint.take_paths(undominated_paths(joint))
        paths = (joint.take_paths(np.array([i])) for i in range(joint.shape[-1]))
        yield [Problem.of(game.graph, _apart(one, lengths)) for one in paths]


def _by_theorem(game: Game) -> Iterator[tuple[Run, list[int]]]:
    """Yields for each theorem the run of all steps, and how many losses each has."""
    each = [runs_of(step, np.asarray(1)) for step in game.steps]
    steps, counts = zip(*(parts_of_run(step, 1) for step in game.steps), strict=True)
    joint = runs_of_parts(sum(steps, ()), sum(counts, ()))  # on the paths of all
    for theorem, run in enumerate(joint):
        # Steps with fewer theorems repeat their last one.
        runs = (some[min(theorem, len(some) - 1)] for some in each)
        yield run, [len(one.losses) for one in runs]


def _apart(joint: Run, lengths: Sequence[int]) -> list[Run]:
    """Returns the run of each step, given their numbers of losses."""
    uses = zip(joint.losses, joint.counts, strict=True)
    return [Run(*zip(*itertools.islice(uses, n), strict=True)) for n in lengths]


def least_of_theorems(game: Game, of_path: Callable[[Problem], Any]) -> Any:
    """Returns the smallest over theorems of the largest over paths."""
    theorems = (map(of_path, problems) for problems in problems_by_theorem(game))
    most = (functools.reduce(np.maximum, paths) for paths in theorems)
    return functools.reduce(np.minimum, most)


def as_deltas(found: Interval) -> Interval:
    """Returns the ends of delta from those of its logarithm."""
    lower, upper = map(np.asarray, found)
    return Interval(
        float(api.delta_of(lower, up=False)), float(api.delta_of(upper, up=True))
    )


def largest_losses(game: Game) -> tuple[float, float]:
    """Returns *upper bounds* of the largest loss and of P(inf), for any strategy."""
    largest, lost = 0.0, 0.0
    for joint, lengths in _by_theorem(game):
        facts = [run.facts for run in _apart(joint, lengths)]
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
    found = least_of_theorems(game, lambda one: odometer_delta(one, odometer))
    return Interval(*map(float, found))


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


@functools.lru_cache(maxsize=64)
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
        number, part = number_alone(option, epsilon, delta), part_of(option)
        is_game = isinstance(part, Game)
        if number < 1:
            ask: Any = type(option).epsilon if is_game else api.epsilon
            least = ask(option if is_game else compose((part, 1)), delta=delta)
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
        most = int(number / _LEAST_BLOCKS) if blocks and not is_game else 1
        lengths.append([m for m in _BLOCKS if m <= max(most, 1)])
    chosen = []
    for number, own in zip(numbers.values(), lengths, strict=True):
        # At each scale, (S, 1), the best length, (L,), of this option.
        exact = _SCALES[:, None] * own / number
        price = np.maximum(np.rint(exact), 1.0)
        ratio, too_cheap = price / exact, np.maximum(_LEAST_PRICE - price, 0)
        # On average, half a block of the budget remains unused.
        rest = 0.5 * np.array(own) / number + 0.05 * too_cheap / _LEAST_PRICE
        best = np.argmin(np.abs(np.log(ratio)) + rest, axis=1)
        every = (ratio, rest, price, np.broadcast_to(own, price.shape))
        chosen.append([x[np.arange(len(best)), best] for x in every])
    ratios, rests, prices, found = np.stack(chosen, axis=1)
    loss = 1 - ratios.min(axis=0) / ratios.max(axis=0) + rests.max(axis=0)
    least = int(np.argmin(loss + _COST_OF_A_UNIT * _SCALES))
    prices, found = (x[:, least].astype(int).tolist() for x in (prices, found))
    blocks_of = {n: m for n, m in zip(numbers, found, strict=True) if m > 1}
    return dict(zip(numbers, prices, strict=True)), blocks_of


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
