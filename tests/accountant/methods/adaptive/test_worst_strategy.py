"""The worst strategy: reference values, closed forms, identities, planted faults."""

import itertools
import math

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses.finite import FiniteLoss
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.laplace import LaplaceLoss
from jaxdp_episodic.accountant.methods.adaptive import method
from jaxdp_episodic.accountant.methods.adaptive.method import Solver, odometer_delta
from jaxdp_episodic.accountant.methods.adaptive.problem import Problem, explored
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt, Run
from menus import budget_graph
from oracles import adaptive
from rows import fast_and_slow

ONE = np.ones(1)


def answered(question, graph, options, width=None, backward=None):
    """Certified ends of log delta or of epsilon, of one direction or of both."""
    problem = Problem.of(graph, options)
    if backward is not None:
        problem = problem._replace(orientations=(backward,))
    return Solver(question, problem).answer(width)


def at_delta(delta):
    return EpsilonAt(np.array(math.log(delta)))


def gaussian(noise, rate, steps=1):
    loss = SampledGaussianLoss(ONE, np.array([rate]), np.array([1 / noise]))
    return Run((loss,), (np.array([float(steps)]),))


def laplace(epsilon):
    return Run((LaplaceLoss(ONE, ONE, np.array([epsilon])),), (ONE,))


def finite(p, q):
    p, q = np.array(p), np.array(q)
    columns = [tuple(np.full(1, x) for x in a) for a in (np.log(p / q), np.log(p))]
    return Run((FiniteLoss(ONE, *columns, 0 * ONE),), (ONE,))


def rule_graph(rules, names, prices, budget):
    """The states of a set of rules and a budget."""
    priced = dict(zip(names, prices, strict=True))

    def moves(state):
        left, rule = state
        for k, name in enumerate(names):
            after = rules.after(rule, name)
            if after is not None and priced[name] <= left:
                yield k, (left - priced[name], after)

    start = (budget, rules.start)
    return explored([start], moves, lambda state: budget - state[0])[0]


THREE = [gaussian(noise, 0.1) for noise in (1.5, 2.2, 3.3)]
LAPLACE = [gaussian(2.0, 0.1), laplace(0.2)]
QUERIES = [gaussian(1.5, 0.1), gaussian(3.0, 0.1), gaussian(20.0, 1.0), laplace(0.1)]
RUNS = [gaussian(1.5, 0.1, 10), gaussian(0.8, 0.01, 100), gaussian(5.0, 1.0)]
UNLIKE = [gaussian(0.7, 0.01), gaussian(1.4, 0.01, 20)]

# options, prices, budget, backward, epsilon, delta's ends on a lattice of 1e-4
REFERENCE = [
    (THREE, (15, 5, 2), 60, False, 0.5, 7.901474295803627e-4, 7.901483177401149e-4),
    (THREE, (15, 5, 2), 60, True, 0.5, 3.4495823049880685e-5, 3.449668509382135e-5),
    (LAPLACE, (1, 3), 12, False, 1.0, 1.4364592370622323e-5, 1.4364621097593808e-5),
    (QUERIES, (8, 2, 3, 6), 40, False, 1.0, 1.8789730193e-5, 1.8789742578e-5),
    (RUNS, (3, 2, 2), 7, True, 2.0, 5.920439545550092e-10, 5.92178897278274e-10),
    (UNLIKE, (3, 1), 120, False, 2.0, 1.5359570891633754e-5, 1.5360000061081255e-5),
    (UNLIKE, (3, 1), 120, True, 2.0, 1.0720286547629536e-8, 1.0730851166053238e-8),
]


@pytest.mark.parametrize(
    ("options", "prices", "budget", "backward", "epsilon", "low", "high"),
    fast_and_slow(REFERENCE, lambda _, p, b, back, *__: b == 12 or (b == 60 and back)),
)
def test_reference_values(options, prices, budget, backward, epsilon, low, high):
    question = DeltaAt(np.array(epsilon))
    found = answered(question, budget_graph(prices, budget), options, None, backward)
    lower, upper = math.exp(found.lower), math.exp(found.upper)
    # Both are certified, so they overlap; ours is about as narrow.
    assert lower <= high and upper >= low
    assert upper - lower <= 1e-3 * upper


# Pairs without a common lattice; prices, budget, largest g.
FINITE = [
    ([([0.5, 0.3, 0.2], [0.4, 0.3, 0.3]), ([0.1, 0.9], [0.05, 0.95])], (2, 1), 6, 1.6),
    # On a coarse lattice the lower Q-masses of these add up to more than 1.
    (
        [([0.949, 0.027, 0.024], [0.93, 0.01, 0.06]), ([0.6, 0.4], [0.07, 0.93])],
        *((1, 1), 3, 2.3),
    ),
    # Every fixed order of these costs 3/40 at 3/2, a strategy 1/10.
    ([([0.2, 0.8], [0.1, 0.9]), ([0.9, 0.1], [0.7, 0.3])], (1, 1), 2, 1.5),
    ([([2 / 3, 1 / 3], [1 / 3, 2 / 3]), ([0.75, 0.25], [0.25, 0.75])], (2, 3), 8, 4.0),
]


@pytest.mark.parametrize(("menu", "prices", "budget", "largest"), FINITE)
@pytest.mark.parametrize("backward", [False, True])
def test_both_ends_converge_to_the_exact_value(menu, prices, budget, largest, backward):
    given = budget_graph(prices, budget), [finite(*pair) for pair in menu], 1e-3
    pairs = [(q, p) if backward else (p, q) for p, q in menu]
    for g in (1.0, largest):
        found = answered(DeltaAt(np.array(math.log(g))), *given, backward)
        exact = adaptive.worst_by_history(
            pairs, adaptive.by_prices(prices), budget, lambda _, g=g: g
        )
        lower, upper = math.exp(found.lower), math.exp(found.upper)
        assert lower <= exact * (1 + 1e-12) and exact <= upper * (1 + 1e-12)
        assert upper <= exact * (1 + 1e-4)
        # Ends of epsilon are equally close.
        ends = answered(at_delta(exact * (1 - 1e-3)), *given, backward)
        assert ends.upper >= math.log(g) - 1e-12


@pytest.mark.parametrize("backward", [False, True])
def test_a_coarse_lattice_is_loose_and_safe(backward):
    # Where merging is loose, v of the lower masses alone may exceed the truth.
    p = np.array([0.4144769, 0.3605172, 0.2250059])
    q = np.exp([0.04462021, 0.04777777, -0.17729856]) * p
    menu = [(p / p.sum(), q / q.sum())]
    for epsilon in (0.66724623, 0.32125926):
        masses = np.array([math.exp(epsilon), 1.0]) / (1 + math.exp(epsilon))
        menu.append((masses, masses[::-1]))
    prices, budget = (2, 1, 3), 6
    options = [finite(*pair) for pair in menu]
    problem = Problem.of(budget_graph(prices, budget), options)
    solver = Solver(DeltaAt(np.array(0.3)), problem)
    window = solver.window(solver.views[backward]._replace(tilt=0.0), 0.0095)
    pairs = [pair[::-1] if backward else pair for pair in menu]
    exact = [
        adaptive.worst_by_history(
            pairs, adaptive.by_prices(prices), budget, lambda _, x=x: math.exp(x)
        )
        for x in window.points[-window.first : 80 - window.first : 16]
    ]
    for first, (up, sign) in itertools.product((window.first, 0), ((1, 1), (0, -1))):
        one = window._replace(first=first, size=window.size - first + window.first)
        row = solver.row(backward, one, up=bool(up))
        gap = sign * (row.values / one.weights)[-first : 80 - first : 16] + row.error
        assert (gap - sign * np.array(exact)).min() >= -1e-12 and row.error > 1e-17


def test_ends_are_safe_at_the_limit_of_work(monkeypatch):
    given = at_delta(1e-6), budget_graph((15, 5, 2), 60), THREE
    fine = answered(*given)
    monkeypatch.setattr(method, "_MOST_WORK", 0.0)
    monkeypatch.setattr(method, "_SURE_POINTS", 0)
    coarse = answered(*given, 1e-9)
    assert coarse.upper - coarse.lower > 10 * (fine.upper - fine.lower)
    assert coarse.lower <= fine.lower and fine.upper <= coarse.upper < math.inf


def test_one_option_costs_its_composition():
    draw = jde.Poisson("example", sampling_probability=0.1)
    step = jde.GaussianStep(draw, noise_multiplier=1.5)
    exact = jde.epsilon(step, num_steps=8, delta=1e-6)
    found = answered(at_delta(1e-6), budget_graph((3,), 25), THREE[:1])
    assert found.lower <= exact * (1 + 1e-9) and exact <= found.upper * (1 + 1e-9)
    assert found.upper - found.lower < 1e-4


def test_composing_the_taken_steps_is_no_filter():
    # No fixed order of this budget costs more than 2.2839; a strategy does.
    found = answered(at_delta(1e-5), budget_graph((15, 5, 2), 600), THREE, 5e-3)
    assert 2.3325 < found.lower <= 2.337359 <= found.upper < 2.3424


def test_a_profile_of_rare_steps_has_few_points():
    options = [gaussian(noise, 1e-3) for noise in (0.6, 0.9)]
    found = method.profiles_above(Problem.of(budget_graph((3, 1), 20), options), 1e-10)
    assert found is not None and len(found[0][0]) < 1_100


def test_rules_lower_the_cost():
    names, prices = ("a", "b", "c"), (15, 5, 2)
    changes = jde.RuleBook.at_most_changes(names, 1)
    order = jde.RuleBook.in_order(names[::-1])
    graphs = [rule_graph(r, names, prices, 60) for r in (order, changes)]
    graphs.append(budget_graph(prices, 60))
    first, second, most = (answered(at_delta(1e-5), g, THREE, 1e-4) for g in graphs)
    assert first.upper < second.lower and second.upper < most.lower


ODOMETERS = [
    ([gaussian(1.75, 0.1)], (1,), 50, 0.3, 0.25, False, 3.35246260e-5, 3.35263231e-5),
    ([gaussian(1.75, 0.1)], (1,), 50, 0.3, 0.25, True, 7.511574857e-11, 7.54507547e-11),
    (THREE, (15, 5, 2), 600, 0.3, 0.09, False, 4.486429613e-5, 4.486543149e-5),
    ([gaussian(14, 1)], (1,), 200, 0.2, 0.3, False, 2.217027858e-5, 2.217326164e-5),
]


@pytest.mark.parametrize(
    ("options", "prices", "budget", "first", "root", "backward", "low", "high"),
    fast_and_slow(ODOMETERS, lambda _, p, b, *__: b == 50 and __[2] is False),
)
def test_odometers(options, prices, budget, first, root, backward, low, high):
    problem = Problem.of(budget_graph(prices, budget), options)
    problem = problem._replace(orientations=(backward,))
    stated = (first + root * np.sqrt(np.arange(budget + 1))).tolist()
    found = odometer_delta(problem, stated)
    assert math.exp(found.lower) <= high and math.exp(found.upper) >= low
    assert found.upper - found.lower < 5e-3


@pytest.mark.slow
def test_the_margin_makes_a_valid_odometer():
    problem = Problem.of(budget_graph((1,), 50), [gaussian(1.75, 0.1)])
    one = math.log(1e-5)
    solver = method.solver_of(at_delta(1e-5), problem)
    naive = solver.ends_of({i: i for i in range(51)})
    assert naive[50] == pytest.approx(2.0006, abs=5e-4)
    # Read at a chosen time, the naive odometer is wrong by a factor of eight.
    assert math.exp(odometer_delta(problem, naive.tolist()).lower) > 7.7e-5
    more = method.margin(problem, naive.tolist(), one)
    assert more == pytest.approx(0.2142, abs=1e-3)
    assert odometer_delta(problem, (naive + more).tolist()).upper <= one + 1e-3
    less = odometer_delta(problem, (naive + more - 0.005).tolist())
    assert less.lower > one
