"""Prices of a menu by themselves, and the budget that a target allows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant.describe.menu import MOST_BUDGET, Menu
from jaxdp_episodic.accountant.describe.step import compose
from jaxdp_episodic.accountant.methods.adaptive.method import solver_of
from jaxdp_episodic.accountant.methods.run import DeltaAt
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.strategies import (
    Game,
    equivalent,
    game_of,
    least_of_theorems,
    part_of,
)

# Budgets that prices are laid for.
_SCALES = np.arange(120, 601, 4)
# Least price: what a price loses by rounding is then a tenth of it at most.
_LEAST_PRICE = 5
# Blocks that are tried for each option.
_BLOCKS = (1, 2, 3, 4, 5, 6, 8)
# Least number of blocks of an option that the target allows, of those tried.
_LEAST_BLOCKS = 40
# Loss of shares that a budget's unit is worth: of two scales about as good the smaller.
_COST_OF_A_UNIT = 1e-5
# Most steps of one option.
_MOST_STEPS = 2**40
# Width of log(delta) that is enough to find a budget.
_WIDTH = 2e-3


class Prices(NamedTuple):
    """Whole prices, and how many steps each of them pays for."""

    prices: dict[str, int]
    blocks: dict[str, int]


class AdaptivityCost(NamedTuple):
    """What the freedom to choose costs, at one delta.

    Attributes:
      epsilon: of the worst strategy.
      alone: epsilon of each option where the whole budget goes to it.
      numbers: how often each may be taken then.
      ratio: ``epsilon`` over the largest of ``alone``.
      held_back: share of the budget to be held back for the worst strategy to cost no
        more than the largest of ``alone``.
    """

    epsilon: float
    alone: dict[str, float]
    numbers: dict[str, int]
    ratio: float
    held_back: float


def number_alone(option: Any, epsilon: float, delta: float) -> float:
    """How often an option alone stays within a target, with a fraction."""
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
    if not math.isfinite(before):  # of no step at all, say
        return float(low) if low else math.exp(goal - after)
    return low + min(max((goal - before) / (after - before), 0.0), 1.0)


def _largest_within(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number below ``high`` that fits, as ``low`` does; by bisection."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def default_prices(
    options: Mapping[str, Any], epsilon: float, delta: float, *, blocks: bool
) -> Prices:
    """Prices and blocks for a target."""
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
                f"{name!r}, which taken once has {least:.4g}: take a larger one, or "
                "more noise"
            )
        if number == math.inf:
            raise ValueError(
                f"prices must be given: option {name!r} alone may be taken without end "
                f"at epsilon={epsilon:g}, delta={delta:g}"
            )
        numbers[name] = number
        is_step = blocks and not isinstance(part_of(option), Game)
        # Powers of 2 as well, for what is taken thousands of times.
        most = max(int(number / _LEAST_BLOCKS), 1) if is_step else 1
        powers = {2**i for i in range(most.bit_length())}
        lengths.append(sorted({m for m in {*_BLOCKS, *powers} if m <= most}))
    found = [_laid(list(numbers.values()), lengths, float(s)) for s in _SCALES]
    _, prices, chosen = min(found)
    return Prices(
        dict(zip(numbers, prices, strict=True)),
        {n: m for n, m in zip(numbers, chosen, strict=True) if m > 1},
    )


def _laid(
    numbers: Sequence[float], lengths: Sequence[Sequence[int]], scale: float
) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    """Prices and blocks at one scale, and what they lose of the smallest share."""
    choices = []
    for number, own in zip(numbers, lengths, strict=True):
        options = []
        for length in own:
            exact = scale * length / number
            price = max(round(exact), 1)
            too_cheap = max(_LEAST_PRICE - price, 0) / _LEAST_PRICE
            # Half a block is what the end of the budget leaves, on average.
            rest = 0.5 * length / number
            options.append((price / exact, rest + 0.05 * too_cheap, price, length))
        # Near to each other in their ratio to the exact price: the best few.
        options.sort(key=lambda o: abs(math.log(o[0])) + o[1])
        choices.append(options[:4])
    if len(numbers) > 5:
        choices = [
            options[:2] if i < 8 else options[:1] for i, options in enumerate(choices)
        ]
    best = (math.inf, (), ())
    for chosen in itertools.product(*choices):
        ratios = [ratio for ratio, *_ in chosen]
        loss = 1 - min(ratios) / max(ratios) + max(rest for _, rest, *_ in chosen)
        loss += _COST_OF_A_UNIT * scale
        if loss < best[0]:
            best = loss, tuple(o[2] for o in chosen), tuple(o[3] for o in chosen)
    return best


def largest_budget(menu: Menu, epsilon: float, delta: float) -> int:
    """The largest budget whose worst strategy is certified to be within a target."""
    assert menu.prices is not None
    blocks = menu.blocks or {}
    # One block more than is allowed is too much.
    alone = [
        price * (number_alone(menu.options[n], epsilon, delta) / blocks.get(n, 1) + 1)
        for n, price in menu.prices.items()
    ]
    # By rules an option may not be taken so often that it alone would be too much.
    most = min(min(alone) if menu.rules is None else max(alone), MOST_BUDGET + 1.0)
    if most > MOST_BUDGET:
        raise ValueError(
            f"prices must be such that the target is worth at most {MOST_BUDGET:,} "
            f"units, got {dict(menu.prices)}"
        )
    most = max(math.ceil(most), 1)
    found = _largest_of(menu, most, epsilon, delta)
    if found < min(menu.prices.values()):
        raise ValueError(
            f"epsilon={epsilon:g} and delta={delta:g} allow no option of the menu: the "
            f"budget would be {found}, the prices are {dict(menu.prices)}"
        )
    return found


def _largest_of(menu: Menu, most: int, epsilon: float, delta: float) -> int:
    """The largest budget up to ``most`` that keeps a target."""
    every = game_of(menu, most, every=True)
    if not every.steps:
        return 0
    if equivalent(every) is not None:

        def fits(budget: int) -> bool:
            same = equivalent(game_of(menu, budget))
            return (
                same is None or api.delta(same, epsilon=epsilon, method="pld") <= delta
            )

        return _largest_within(fits, 0, most + 1)
    question = DeltaAt(np.asarray(epsilon))
    # The rows of one recursion are the worst strategies of all smaller budgets.
    ends = least_of_theorems(
        every,
        lambda problem: solver_of(question, problem, _WIDTH).ends_of(every.budgets),
    )
    too_large = np.flatnonzero(ends > math.log(delta))
    return int(too_large[0]) - 1 if too_large.size else most


def adaptivity_cost(
    menu: Menu, worst: float, alone: Mapping[str, float], delta: float
) -> AdaptivityCost:
    """What the freedom to choose costs."""
    assert menu.budget is not None
    numbers = {name: menu.most(name) for name in menu.options}
    largest = max(alone.values())
    held_back = 0.0
    if largest > 0:
        smaller = largest_budget(menu, largest * (1 + 1e-9), delta)
        held_back = max(1 - smaller / menu.budget, 0.0)
    ratio = worst / largest if largest > 0 else math.inf if worst > 0 else 1.0
    return AdaptivityCost(worst, dict(alone), numbers, ratio, held_back)
