"""Adaptive runs against all enumerated strategies, and what breaks naive filters."""

from __future__ import annotations

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses.finite import FiniteLoss
from jaxdp_episodic.accountant.methods.adaptive.method import Solver
from jaxdp_episodic.accountant.methods.adaptive.problem import Problem
from jaxdp_episodic.accountant.methods.run import DeltaAt, Run
from menus import budget_graph
from oracles import adaptive

# Largest number of histories of an enumerated run.
MOST_HISTORIES = 3_000


def _histories(state, moves, outputs, known):
    if state not in known:
        after = (_histories(to, moves, outputs, known) for _, to in moves(state))
        known[state] = 1 + outputs * sum(after)
    return known[state]


def _menus(rng, number):
    """Random menus, prices and a budget, with few enough histories to enumerate."""
    made = 0
    while made < number:
        options, outputs = int(rng.integers(1, 4)), int(rng.integers(2, 4))
        menu = adaptive.random_menu(rng, options, outputs)
        prices = [int(c) for c in rng.integers(1, 4, options)]
        budget, moves = int(rng.integers(1, 6)), adaptive.by_prices(prices)
        if _histories(budget, moves, outputs, {}) <= MOST_HISTORIES:
            made += 1
            yield menu, prices, budget


def finite_run(p, q):
    """A run of one step whose pair has these masses."""
    columns = [tuple(np.full(1, x) for x in a) for a in (np.log(p / q), np.log(p))]
    return Run((FiniteLoss(np.ones(1), *columns, np.zeros(1)),), (np.ones(1),))


@pytest.mark.parametrize(
    "number", [2, pytest.param(30, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_recursion_is_the_worst_of_all_strategies(number):
    rng = np.random.default_rng(number)
    for menu, prices, budget in _menus(rng, number):
        moves, graph = adaptive.by_prices(prices), budget_graph(prices, budget)
        # Without infinite losses, which are tested below.
        menu = [tuple(0.9 * m + 0.1 / len(m) for m in pair) for pair in menu]
        for epsilon in rng.uniform(0.0, 2.0, 2):
            g = np.exp(epsilon)
            true = _worst(menu, moves, budget, lambda _, g=g: g)
            problem = Problem.of(graph, [finite_run(*pair) for pair in menu])
            found = Solver(DeltaAt(np.array(epsilon)), problem).answer(None)
            lower, upper = np.exp(found)
            assert lower * (1 - 1e-12) <= true <= upper * (1 + 1e-12)
            assert upper <= true * (1 + 1e-4) + 1e-12


# --- Runs within runs ---


def _claim(epsilon, lost=0.0):
    """A release that reveals everything with some probability, and its pair."""
    masses = (1 - lost) * np.array([np.exp(epsilon), 1.0]) / (1 + np.exp(epsilon))
    pair = (masses, masses[::-1])
    if lost:
        pair = [lost, *pair[0], 0.0], [0.0, *pair[1], lost]
    return jde.ApproximateDP(epsilon, lost), pair


def _answer(rng, most_lost=None):
    """A release of two to four outputs, and its pair."""
    is_response = rng.random() < 0.5
    if is_response:
        share, buckets = float(rng.uniform(0.3, 0.9)), int(rng.integers(2, 4))
    else:
        epsilon = float(rng.uniform(0.1, 1.0))
    lost = float(rng.uniform(0.0, most_lost)) if most_lost else 0.0
    if not is_response:
        return _claim(epsilon, lost)
    uniform = np.full(buckets, 1 / buckets)
    own = share * uniform + (1 - share) * np.eye(buckets)[0]
    release = jde.RandomizedResponse(share, buckets, neighboring_relation="zero_out")
    return release, (own, uniform)


def _worst(menu, moves, state, ratio):
    """The worst case in both directions, by the maximum at each history."""
    return max(
        adaptive.worst_by_history(pairs, moves, state, ratio)
        for pairs in (menu, [(q, p) for p, q in menu])
    )


def _limited(rng, depth, leaves, what):
    """A random run, the same for the oracle, and its leaves' pairs in ``leaves``."""
    options, mirrored = {}, []
    for name in "abc"[: int(rng.integers(1, 3))]:
        if depth and rng.random() < 0.7:
            kind = "prices" if what == "quotas" or rng.random() < 0.4 else "quotas"
            options[name], inner = _limited(rng, depth - 1, leaves, kind)
            mirrored.append(inner)
        else:
            options[name], pair = _answer(rng, 0.1)
            mirrored.append(len(leaves))
            leaves.append(pair)
    numbers = tuple(int(n) for n in rng.integers(1, 3, len(options)))
    limits = {what: dict(zip(options, numbers, strict=True))}
    run = adaptive.Run(tuple(mirrored), **{what: numbers})
    if what == "prices":
        limits["budget"] = int(rng.integers(1, 4))
        run = run._replace(budget=limits["budget"])
    return jde.AdaptiveRun(options, **limits), run


@pytest.mark.parametrize(
    "number", [2, pytest.param(10, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_runs_within_runs_are_the_worst_of_all_strategies(number):
    """Of random limits, down to three levels; also of strategies that leave midway."""
    rng, checked, deep = np.random.default_rng(number), 0, 0
    while checked < number:
        leaves = []
        what = "quotas" if rng.random() < 0.5 else "prices"
        run, mirrored = _limited(rng, 2, leaves, what)
        start, epsilon = adaptive.begun(mirrored), rng.uniform(0, 1.2)
        most = 1_000 if number < 5 else 20_000
        if not 20 < _histories(start, adaptive.interleaved, 2, {}) < most:
            continue
        checked += 1
        deep += run.composition() is None
        g = np.exp(epsilon)
        true = _worst(leaves, adaptive.interleaved, start, lambda _, g=g: g)
        lower, upper = run.delta_interval(epsilon=epsilon)
        assert lower * (1 - 1e-9) - 1e-15 <= true <= upper * (1 + 1e-9)
        # Too many values for the exact recursion: by the lattice.
        assert upper - lower <= 1e-3 * upper
    assert deep > number / 3


def test_a_priced_run_of_quotas_may_come_after_options_beside_them():
    """Score; then b, chosen by the score; then search: more than the whole of a."""

    def geometric(noise, sensitivity=1):
        how = {"sensitivity": sensitivity, "sampling_probability": 0.5}
        release = jde.DiscreteLaplaceRelease(noise, **how)
        k = np.arange(-150, 151)
        masses = [np.exp(-noise * np.abs(k - at)) for at in (sensitivity, 0)]
        other, without = (m / m.sum() for m in masses)
        with_unit = 0.5 * (other + without)
        # Outputs of equal loss are merged, which changes no divergence.
        losses = np.round(np.log(with_unit / without), 12)
        values, which = np.unique(losses, return_inverse=True)
        pair = [np.bincount(which, m, len(values)) for m in (with_unit, without)]
        return release, pair

    menu = _claim(1.0), _claim(0.5, 0.05), geometric(1.2), _claim(0.5)
    (score, u, v, w, x), pairs = zip(geometric(0.7, 2), *menu, strict=True)
    one = {"prices": {"u": 1, "v": 1}, "budget": 1}
    search = jde.AdaptiveRun({"u": u, "v": v}, **one)
    parts = {"score": score, "search": search}
    run = jde.AdaptiveRun(
        {
            "a": jde.AdaptiveRun(parts, quotas={"score": 1, "search": 1}),
            "b": jde.AdaptiveRun({"u": w, "v": x}, **one),
        },
        quotas={"a": 1, "b": 1},
    )
    inner = adaptive.Run((1, 2), prices=(1, 1), budget=1)
    a = adaptive.Run((0, inner), quotas=(1, 1))
    b = adaptive.Run((3, 4), prices=(1, 1), budget=1)
    start = adaptive.begun(adaptive.Run((a, b), quotas=(1, 1)))
    true = _worst(pairs, adaptive.interleaved, start, lambda _: np.exp(1.5))
    lower, upper = run.delta_interval(epsilon=1.5)
    assert lower * (1 - 1e-9) <= true <= upper * (1 + 1e-9)
    assert true == pytest.approx(0.16185622, rel=1e-7)


def test_an_odometer_and_a_target_with_runs_that_stay_open():
    """Of prices, and of quotas that holds one of prices, within prices."""
    rng = np.random.default_rng(9)
    answers = (_answer(rng, *z) for z in ((0.1,), (), ()))
    (plain, *parts), menu = zip(*answers, strict=True)
    costs = (1, int(rng.integers(1, 3)))
    priced = {"prices": dict(zip("ab", costs, strict=True)), "budget": 2}
    inner = jde.AdaptiveRun(dict(zip("ab", parts, strict=True)), **priced)
    within = adaptive.Run((1, 2), prices=costs, budget=2)
    quotas = {"plain": 1, "run": 1}
    outer = jde.AdaptiveRun({"plain": plain, "run": inner}, quotas=quotas)
    prices, stated = {"plain": 1, "open": 2}, [0.0, 0.2, 0.5, 0.9]

    def true(mirrored, budget, ratio):
        run = adaptive.Run((0, mirrored), prices=(1, 2), budget=budget)
        return _worst(menu, adaptive.interleaved, adaptive.begun(run), ratio)

    mirrored = adaptive.Run((0, within), quotas=(1, 1))
    for one, same in ((inner, within), (outer, mirrored)):
        options = {"plain": plain, "open": one}
        run = jde.AdaptiveRun(options, prices=prices, budget=3, odometer=stated)
        lower, upper = run.odometer_interval()
        worst = true(same, 3, lambda state: np.exp(stated[3 - state.left]))
        assert lower <= worst <= upper <= lower * 1.01
    # The largest budget that keeps a target is that of the enumeration.
    delta = true(mirrored, 3, lambda _: np.exp(0.5)) * 1.01
    assert delta < true(mirrored, 4, lambda _: np.exp(0.5)) * 0.99
    found = jde.AdaptiveRun(options, prices=prices, epsilon=0.5, delta=delta)
    assert found.budget == 3


def test_odometers_and_budgets_count_the_direction_that_costs_more():
    """It is backward: answers of one who is not asked are hardly ever true ones."""
    response = jde.RandomizedResponse(0.05, 4, neighboring_relation="zero_out")
    pair = 0.05 / 4 + 0.95 * np.eye(4)[0], np.full(4, 0.25)
    claim, other = _claim(0.1)
    options, prices = {"a": response, "b": claim}, {"a": 1, "b": 1}

    def worst(budget, stated):
        moves = adaptive.by_prices([1, 1])
        return [
            adaptive.worst_by_history(
                pairs, moves, budget, lambda left: np.exp(stated[budget - left])
            )
            for pairs in ([pair, other], [pair[::-1], other])
        ]

    stated = [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    run = jde.AdaptiveRun(options, prices=prices, budget=5, odometer=stated)
    lower, upper = run.odometer_interval()
    forward, backward = worst(5, stated)
    assert 2 * forward < lower <= backward <= upper <= lower * 1.01
    asked = {"odometer": "margin", "delta": 0.3}
    run = jde.AdaptiveRun(options, prices=prices, budget=5, **asked)
    assert max(worst(5, run.odometer)) <= 0.3 * (1 + 1e-9)
    run = jde.AdaptiveRun(options, prices=prices, epsilon=6.0, delta=0.3)
    within, beyond = (max(worst(n, [6.0] * 6)) for n in (run.budget, run.budget + 1))
    assert within <= 0.3 < beyond
