"""The worst strategy: reference values, closed forms, identities, planted faults."""

import itertools
import math

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses.finite import FiniteLoss
from jaxdp_episodic.accountant.losses.laplace import LaplaceLoss
from jaxdp_episodic.accountant.losses.randomized_response import (
    RandomizedResponseLoss,
)
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.methods.adaptive import method
from jaxdp_episodic.accountant.methods.adaptive.finite import Atoms, worst_of_finite
from jaxdp_episodic.accountant.methods.adaptive.graph import (
    budget_graph,
    graph_of_budgets,
    rule_graph,
)
from jaxdp_episodic.accountant.methods.adaptive.method import Solver
from jaxdp_episodic.accountant.methods.adaptive.odometer import (
    filter_epsilons,
    margin,
    odometer_delta,
)
from jaxdp_episodic.accountant.methods.adaptive.problem import Problem
from jaxdp_episodic.accountant.methods.question import DeltaAt, EpsilonAt
from jaxdp_episodic.accountant.methods.run import Run
from rows import fast_and_slow

ONE = np.ones(1)


def gaussian(noise, rate, steps=1):
    loss = SampledGaussianLoss(ONE, np.array([rate]), np.array([1 / noise]))
    return Run((loss,), (np.array([float(steps)]),))


def laplace(epsilon):
    return Run((LaplaceLoss(ONE, ONE, np.array([epsilon])),), (ONE,))


def finite(p, q):
    p, q = np.array(p), np.array(q)
    columns = [tuple(np.full(1, x) for x in a) for a in (np.log(p / q), np.log(p))]
    return Run((FiniteLoss(ONE, *columns),), (ONE,))


def responses(epsilon, count=1):
    loss = RandomizedResponseLoss(ONE, np.array([epsilon]), np.zeros(1))
    return Run((loss,), (np.array([float(count)]),))


THREE = [gaussian(noise, 0.1) for noise in (1.5, 2.2, 3.3)]
LAPLACE = [gaussian(2.0, 0.1), laplace(0.2)]
QUERIES = [gaussian(1.5, 0.1), gaussian(3.0, 0.1), gaussian(20.0, 1.0), laplace(0.1)]
RUNS = [gaussian(1.5, 0.1, 10), gaussian(0.8, 0.01, 100), gaussian(5.0, 1.0)]
UNLIKE = [gaussian(0.7, 0.01), gaussian(1.4, 0.01, 20)]
HALF = [gaussian(4.0, 0.5), gaussian(8.0, 0.5)]

# options, prices, budget, backward, epsilon, delta's ends on a lattice of 1e-4
REFERENCE = [
    (THREE, (15, 5, 2), 60, False, 0.5, 7.901474295803627e-4, 7.901483177401149e-4),
    (THREE, (15, 5, 2), 60, False, 1.0, 7.362361306309763e-6, 7.362368225761439e-6),
    (THREE, (15, 5, 2), 60, True, 0.5, 3.4495823049880685e-5, 3.449668509382135e-5),
    (HALF, (4, 1), 40, True, 0.5, 0.024161441822582796, 0.024161469626781135),
    (HALF, (4, 1), 40, True, 1.5, 1.0283832764255806e-5, 1.0283897853686483e-5),
    (LAPLACE, (1, 3), 12, False, 0.25, 0.07366063389211598, 0.07366064286934673),
    (LAPLACE, (1, 3), 12, False, 1.0, 1.4364592370622323e-5, 1.4364621097593808e-5),
    (QUERIES, (8, 2, 3, 6), 40, False, 0.5, 2.544186028701e-3, 2.544187897857e-3),
    (QUERIES, (8, 2, 3, 6), 40, False, 1.0, 1.8789730193e-5, 1.8789742578e-5),
    (QUERIES, (8, 2, 3, 6), 40, True, 1.0, 1.412031748860e-9, 1.412073502660e-9),
    (RUNS, (3, 2, 2), 7, False, 2.0, 1.3629840530483081e-5, 1.362995220175511e-5),
    (RUNS, (3, 2, 2), 7, True, 1.0, 3.355173759898403e-4, 3.3551758999663046e-4),
    (RUNS, (3, 2, 2), 7, True, 2.0, 5.920439545550092e-10, 5.92178897278274e-10),
    (UNLIKE, (3, 1), 120, False, 1.0, 1.6540606403787604e-3, 1.6542882330298936e-3),
    (UNLIKE, (3, 1), 120, False, 2.0, 1.5359570891633754e-5, 1.5360000061081255e-5),
    (UNLIKE, (3, 1), 120, True, 0.5, 0.02391613592798947, 0.023918000772525327),
    (UNLIKE, (3, 1), 120, True, 2.0, 1.0720286547629536e-8, 1.0730851166053238e-8),
    (THREE, (15, 5, 2), 600, False, 1.0, 0.011426641261909736, 0.0114269312823593),
    (THREE, (15, 5, 2), 600, False, 2.28, 1.414795530729e-5, 1.414831225926e-5),
    (THREE, (15, 5, 2), 600, True, 1.0, 0.009273684859544797, 0.009274004665390998),
    (THREE, (15, 5, 2), 600, True, 2.28, 1.53379188529489e-6, 1.5340109205547846e-6),
]


@pytest.mark.parametrize(
    ("options", "prices", "budget", "backward", "epsilon", "low", "high"),
    fast_and_slow(REFERENCE, lambda _, p, b, back, *__: b == 12 or (b == 60 and back)),
)
def test_reference_values(options, prices, budget, backward, epsilon, low, high):
    problem = Problem.of(budget_graph(prices, budget), options)
    problem = problem._replace(orientations=(backward,))
    found = Solver(DeltaAt(np.array(epsilon)), problem).answer(None)
    lower, upper = math.exp(found.lower), math.exp(found.upper)
    # Both are sure, so that they overlap; and ours is about as close.
    assert lower <= high and upper >= low
    assert upper - lower <= 1e-3 * upper


def test_both_ends_close_in_on_what_is_exact(monkeypatch):
    # Atoms that are on no common lattice, and the recursion that does without one.
    options = [([0.5, 0.3, 0.2], [0.4, 0.3, 0.3]), ([0.1, 0.9], [0.05, 0.95])]
    # Of these, on a coarse lattice, Q-masses from below add up to more than 1.
    unlike = [([0.949, 0.027, 0.024], [0.93, 0.01, 0.06]), ([0.6, 0.4], [0.07, 0.93])]
    cases = [(options, (2, 1), 6, (0.0, 0.5)), (unlike, (1, 1), 3, (0.0, 0.83))]
    for menu, prices, budget, epsilons in cases:
        problem = Problem.of(budget_graph(prices, budget), [finite(*o) for o in menu])
        for backward, epsilon in itertools.product((False, True), epsilons):
            one = problem._replace(orientations=(backward,))
            exact = Solver(DeltaAt(np.array(epsilon)), one).answer(None)
            assert exact.upper - exact.lower < 1e-11
            monkeypatch.setattr(method, "ends_of_finite", lambda *_: None)
            solver = Solver(DeltaAt(np.array(epsilon)), one)
            found = solver.answer(3e-3)
            monkeypatch.undo()
            assert solver.lower <= exact.upper and found.upper >= exact.lower
            assert found.upper - found.lower < 1e-2


@pytest.mark.parametrize("backward", [False, True])
def test_a_coarse_lattice_wastes_and_stays_on_its_side(backward):
    # Where merging wastes much, v of the lower masses alone may be above the truth.
    p = [0.4144769, 0.3605172, 0.2250059]
    q = np.exp([0.04462021, 0.04777777, -0.17729856]) * p
    options = [responses(0.66724623), finite(p / np.sum(p), q / q.sum())]
    options.append(responses(0.32125926, 3))
    problem = Problem.of(budget_graph((1, 2, 3), 8), options)
    solver = Solver(DeltaAt(np.array(0.3)), problem)
    view = solver.views[backward]._replace(tilt=0.0)
    window = solver.window(view, 0.0095)
    atoms = []
    for losses, counts in zip(problem.upper.losses, problem.upper.counts, strict=True):
        (loss,), (count,) = losses, counts
        values, masses = loss.values()
        if backward:
            values, masses = -values, masses - values
        found, weights = np.zeros(1), np.ones(1)
        for _ in range(int(count)):
            found = np.add.outer(found, values).reshape(-1)
            weights = np.multiply.outer(weights, np.exp(masses)).reshape(-1)
        atoms.append(Atoms(found, weights))
    middle = -window.first
    place = slice(middle, middle + 80, 8)
    exact = worst_of_finite(problem.graph, atoms, window.points[place])
    assert exact is not None
    for up, sign in ((True, 1), (False, -1)):
        (row,) = solver.rows(backward, window, up)
        gap = sign * (row.values + sign * row.error)[place] - sign * exact[0]
        assert gap.min() >= -1e-12


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_finite_menus_lie_between_the_ends(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    options = []
    for _ in range(int(rng.integers(1, 4))):
        size = int(rng.integers(2, 4))
        q, p = rng.dirichlet(3 * np.ones(size)), rng.dirichlet(3 * np.ones(size))
        share = rng.uniform(0.05, 1.0)
        options.append(finite(share * p + (1 - share) * q, q))
        if rng.random() < 0.3:
            options.append(responses(rng.uniform(0.05, 1.0), int(rng.integers(1, 4))))
    prices = rng.integers(1, 4, len(options)).tolist()
    problem = Problem.of(budget_graph(prices, int(rng.integers(3, 8))), options)
    for question in (
        DeltaAt(np.array(rng.uniform(0.0, 1.0))),
        EpsilonAt(np.array(math.log(10.0 ** rng.uniform(-3, -1)))),
    ):
        exact = Solver(question, problem).answer(None)
        monkeypatch.setattr(method, "ends_of_finite", lambda *_: None)
        found = Solver(question, problem).answer(3e-3)
        monkeypatch.undo()
        assert found.lower <= exact.upper + 1e-12
        assert found.upper >= exact.lower - 1e-12


def test_ends_are_sure_where_the_work_has_come_to_its_end(monkeypatch):
    problem = Problem.of(budget_graph((15, 5, 2), 60), THREE)
    question = EpsilonAt(np.array(math.log(1e-6)))
    fine = Solver(question, problem).answer(None)
    monkeypatch.setattr(method, "_MOST_WORK", 0.0)
    monkeypatch.setattr(method, "_SURE_POINTS", 0)
    coarse = Solver(question, problem).answer(1e-9)
    assert coarse.upper - coarse.lower > 10 * (fine.upper - fine.lower)
    assert coarse.lower <= fine.lower and fine.upper <= coarse.upper < math.inf


@pytest.mark.slow
def test_a_tiny_delta_takes_no_more_work_than_there_is():
    problem = Problem.of(budget_graph((15, 5, 2), 600), THREE)
    solver = Solver(EpsilonAt(np.array(math.log(1e-100))), problem)
    found = solver.answer(None)
    renyi = max(f.epsilon(math.log(1e-100))[0] for f in solver.filters.values())
    assert 0 <= solver.work_left < method._MOST_WORK
    assert 17 < found.lower <= found.upper <= renyi * (1 + 1e-8)


def test_gaussians_alone_have_a_closed_form():
    options = [gaussian(2.0, 1.0), gaussian(4.0, 1.0)]
    problem = Problem.of(budget_graph((4, 1), 7), options)
    found = Solver(DeltaAt(np.array(0.5)), problem).answer(None)
    exact = 0.10683522913799616  # of shift² 7/16, 40 digits
    assert math.exp(found.lower) <= exact <= math.exp(found.upper)
    assert found.upper - found.lower < 1e-3


def test_one_option_costs_what_its_composition_costs():
    draw = jde.Poisson("example", sampling_probability=0.1)
    step = jde.GaussianStep(draw, noise_multiplier=1.5)
    exact = jde.epsilon(step, num_steps=8, delta=1e-6)
    problem = Problem.of(budget_graph((3,), 25), THREE[:1])
    found = Solver(EpsilonAt(np.array(math.log(1e-6))), problem).answer(None)
    assert found.lower <= exact * (1 + 1e-9) and exact <= found.upper * (1 + 1e-9)
    assert found.upper - found.lower < 1e-4


def test_the_other_orientation_is_the_left_side_of_the_same_recursion():
    problem = Problem.of(budget_graph((15, 5, 2), 30), THREE)
    solver = Solver(DeltaAt(np.array(0.3)), problem)
    solver.share = 1e-12  # kernels keep what would move no digit of one answer
    rows = {}
    for backward in (False, True):
        view = solver.views[backward]._replace(tilt=0.0, left=2.0, right=2.0)
        window = solver.window(view, 2.0**-9)
        rows[backward] = solver.rows(backward, window, True)[0].values
    x = window.points
    middle = -window.first
    left = rows[False][:middle][::-1] / np.exp(x[:middle][::-1])
    right = rows[True][middle + 1 :]
    size = min(len(left), len(right), 300)  # to 0.6 nats
    # On the left the errors of the masses count in full: 1e-12 a step.
    np.testing.assert_allclose(left[:size], right[:size], rtol=1e-6, atol=1e-10)


def test_composing_what_was_taken_is_no_filter():
    # No fixed order of this budget costs more than 2.2839; a strategy does.
    problem = Problem.of(budget_graph((15, 5, 2), 600), THREE)
    solver = Solver(EpsilonAt(np.array(math.log(1e-5))), problem)
    found = solver.answer(5e-3)
    assert 2.3325 < found.lower <= 2.337359 <= found.upper < 2.3424


def test_rules_cost_less_than_freedom():
    names, prices = ("a", "b", "c"), (15, 5, 2)
    changes = jde.RuleBook.at_most_changes(names, 1)
    order = jde.RuleBook.in_order(names[::-1])
    graphs = [rule_graph(names, r.moves, r.start, prices, 60) for r in (order, changes)]
    graphs.append(budget_graph(prices, 60))
    one = math.log(1e-5)
    found = [
        Solver(EpsilonAt(np.array(one)), Problem.of(graph, THREE)).answer(1e-4)
        for graph in graphs
    ]
    assert found[0].upper < found[1].lower and found[1].upper < found[2].lower


@pytest.mark.slow
def test_one_change_of_noise_reference():
    names = ("a", "b", "c")
    rules = jde.RuleBook.at_most_changes(names, 1)
    graph = rule_graph(names, rules.moves, rules.start, (15, 5, 2), 600)
    problem = Problem.of(graph, THREE)._replace(orientations=(False,))
    for epsilon, low, high in (
        (1.0, 0.01124892639569653, 0.011250909340336727),
        (2.0, 6.628923439894897e-5, 6.630079567720281e-5),
    ):
        found = Solver(DeltaAt(np.array(epsilon)), problem).answer(None)
        assert math.exp(found.lower) <= high and math.exp(found.upper) >= low
        assert found.upper - found.lower < 1e-3


ODOMETERS = [
    ([gaussian(1.75, 0.1)], (1,), 50, 0.3, 0.25, False, 3.35246260e-5, 3.35263231e-5),
    ([gaussian(1.75, 0.1)], (1,), 50, 0.3, 0.25, True, 7.511574857e-11, 7.54507547e-11),
    (THREE, (15, 5, 2), 600, 0.3, 0.09, False, 4.486429613e-5, 4.486543149e-5),
    (THREE, (15, 5, 2), 600, 0.3, 0.09, True, 3.1878267836e-7, 3.1913176369e-7),
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
def test_the_margin_makes_an_odometer_of_what_is_none():
    problem = Problem.of(graph_of_budgets((1,), 50), [gaussian(1.75, 0.1)])
    one = math.log(1e-5)
    naive = filter_epsilons(problem, one, {i: i for i in range(51)})
    assert naive[50] == pytest.approx(2.0006, abs=5e-4)
    # Read at a moment of one's own choice it is wrong by a factor of eight.
    assert math.exp(odometer_delta(problem, naive.tolist()).lower) > 7.7e-5
    more = margin(problem, naive.tolist(), one)
    assert more == pytest.approx(0.2142, abs=1e-3)
    stated = naive + more
    found = odometer_delta(problem, stated.tolist())
    assert found.upper <= one + 1e-3
    less = odometer_delta(problem, (naive + more - 0.005).tolist())
    assert less.lower > one


@pytest.mark.slow
def test_an_odometer_with_a_huge_epsilon_holds_with_what_its_others_say():
    problem = Problem.of(budget_graph((5, 2), 12), THREE[:2])
    # As good as no promise at the end: what counts is to stop just before it.
    ends = [odometer_delta(problem, [0.1] * 12 + [last]) for last in (40.0, 5e3)]
    before = Problem.of(budget_graph((5, 2), 11), THREE[:2])
    least = Solver(DeltaAt(np.array(0.1)), before).answer(1e-3).lower
    for found in ends:
        assert least <= found.upper < least + 1e-2


# --- Finitely many losses ---

ADAPTIVE = [([0.2, 0.8], [0.1, 0.9]), ([0.9, 0.1], [0.7, 0.3])]
INFINITE = [([0.25, 0.75], [0.0, 1.0]), ([0.6, 0.4], [0.4, 0.6])]
NEITHER = [([0.05, 0.65, 0.3], [0.0, 0.4, 0.6]), ([0.7, 0.3, 0.0], [0.5, 0.4, 0.1])]
RESPONSES = [([2 / 3, 1 / 3], [1 / 3, 2 / 3]), ([0.75, 0.25], [0.25, 0.75])]


@pytest.mark.parametrize(
    ("menu", "prices", "budget", "backward", "g", "exact"),
    [
        (ADAPTIVE, (1, 1), 2, False, 1.5, 1 / 10),  # every fixed order: 3/40
        (ADAPTIVE, (1, 1), 2, True, 0.5, 13 / 25),
        (INFINITE, (3, 1), 5, False, 1.5, 193 / 625),
        (INFINITE, (3, 1), 5, True, 3.0, 237 / 3125),
        (NEITHER, (2, 1), 4, False, 0.8, 5143 / 10000),
        (NEITHER, (2, 1), 4, False, 4.0, 39 / 400),
        (NEITHER, (2, 1), 4, True, 2.0, 711 / 2000),
        (RESPONSES, (2, 5), 20, False, 2.0, 152233 / 236196),
        (RESPONSES, (2, 5), 20, True, 4.0, 137 / 256),
    ],
)
def test_finite_menus(menu, prices, budget, backward, g, exact):
    pairs = [pair[::-1] if backward else pair for pair in menu]
    options = [Atoms.of_pair(*pair) for pair in pairs]
    found = worst_of_finite(budget_graph(prices, budget), options, np.log([g]))
    assert found is not None
    assert abs(found[0][0] - exact) <= found[1] < 1e-12


def test_pairs_good_for_g_of_1_on_are_not_enough():
    # (0, 1) against (.4, .6): "dominated", for g >= 1 alone, by (.3, .7) and (.7, .3).
    true = [Atoms.of_pair([0.0, 1.0], [0.4, 0.6])]
    wrong = [Atoms.of_pair([0.7, 0.3], [0.3, 0.7])]
    graph = budget_graph((1,), 2)
    for options, delta in ((true, 0.64), (wrong, 0.4)):
        found = worst_of_finite(graph, options, np.zeros(1))
        assert found is not None and found[0][0] == pytest.approx(delta, abs=1e-12)


def test_quotas_are_free_in_random_menus():
    rng = np.random.default_rng(7)
    for _ in range(20):
        pairs = [(rng.dirichlet(np.ones(2)), rng.dirichlet(np.ones(2))) for _ in "ab"]
        options = [Atoms.of_pair(*pair) for pair in pairs]
        # Both options twice, in any order, as rules; and all of them composed.
        moves = {
            f"{i}{j}": {
                **({"a": f"{i - 1}{j}"} if i else {}),
                **({"b": f"{i}{j - 1}"} if j else {}),
            }
            for i in range(3)
            for j in range(3)
        }
        free = rule_graph(("a", "b"), moves, "22")
        line = {"4": {"a": "3"}, "3": {"a": "2"}, "2": {"b": "1"}, "1": {"b": "0"}}
        fixed = rule_graph(("a", "b"), line, "4")
        log_g = np.log([0.5, 1.0, 1.7])
        values = [worst_of_finite(graph, options, log_g) for graph in (free, fixed)]
        assert values[0] is not None and values[1] is not None
        np.testing.assert_allclose(values[0][0], values[1][0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("most", [1, 2, 7, 1000])
def test_states_that_are_taken_together_do_not_lead_to_one_another(most):
    order = jde.RuleBook.in_order(["a", "b"])
    graphs = [
        budget_graph((25, 14, 8, 5), 200),
        budget_graph((1,), 5),
        rule_graph(("a", "b"), order.moves, order.start, (3, 2), 30),
    ]
    for graph in graphs:
        groups = list(graph.groups(most))
        assert [s for group in groups for s in group] == list(range(len(graph.moves)))
        for group in groups:
            moves = [move for state in group for move in graph.moves[state]]
            assert all(to < group.start for _, to in moves)
            assert len(group) == 1 or max(len(moves), len(group)) <= most
    # Something is gained: the least price is how many go together.
    assert most < 1000 or len(list(graphs[0].groups(most))) <= 200 / 5 + 2


@pytest.mark.slow
def test_an_orientation_that_is_not_resolved_leaves_the_other_one_its_end(monkeypatch):
    # Backward a coarse lattice finds no upper end: Rényi's stands, and that is small.
    heavy = [gaussian(noise, 0.001) for noise in (0.6, 0.8, 1.0)]
    problem = Problem.of(budget_graph((25, 5, 2), 500), heavy)
    solver = Solver(EpsilonAt(np.array(math.log(1e-6))), problem)
    renyi = dict(solver.uppers)
    assert renyi[True] < 0.1 * renyi[False]
    inf = math.inf
    found = Solver.upper_end
    monkeypatch.setattr(
        Solver, "upper_end", lambda s, c: inf if c.x[-1] < 0.5 else found(s, c)
    )
    ends = solver.answer(1e-3)
    assert solver.uppers[True] == renyi[True] < ends.lower
    assert ends.upper - ends.lower < 5e-3
