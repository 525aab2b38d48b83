"""A budget for runs chosen one after another: mu-GDP with floors."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import norm

import jaxdp_episodic as jde
from designs import sampled as step
from jaxdp_episodic.accountant.losses.finite import FiniteLoss
from jaxdp_episodic.accountant.methods.adaptive.method import profiles_above
from jaxdp_episodic.accountant.methods.adaptive.problem import Problem
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.questions import gdp
from jaxdp_episodic.accountant.questions.budget import (
    BudgetExhaustedError,
    PrivacyBudget,
    SpentAhead,
    plan_budget,
)
from jaxdp_episodic.accountant.questions.gdp import (
    GdpBudget,
    GdpPrice,
    gdp_price,
    price_of_curve,
    price_of_rdp,
)
from jaxdp_episodic.accountant.questions.tuning import DEFAULT_ORDERS
from jaxdp_episodic.bounds import Gaussian
from jaxdp_episodic.trainer.run.ledger import Ledger
from menus import budget_graph, two_groups
from oracles import adaptive
from training_runs import GROUPED, flat_step

DELTA = 1e-5


def gaussian_delta(mu, epsilon):
    return Gaussian(noise_multiplier=1 / mu).delta(epsilon)


RARELY = jde.ApproximateDP(0.0, 1e-9)


# --- Prices ---


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rate", "noise", "floor"),
    [(0.01, 0.7, 1e-3), (0.01, 0.7, 1e-7), (0.5, 2.0, 1e-40)],
)
def test_a_price_holds_everywhere_and_no_smaller_one(rate, noise, floor):
    one = step(rate, noise)
    mu = gdp_price(one, num_steps=1, floor=floor).mu
    epsilons = np.linspace(0, 60, 40_001)
    true = jde.privacy_profile(one, epsilons)
    assert np.all(true <= floor + (1 - floor) * gaussian_delta(mu, epsilons))
    less = floor + (1 - floor) * gaussian_delta(mu / (1 + 4e-3), epsilons)
    assert np.any(true > less)


def test_runs_that_lose_nothing():
    assert gdp_price(step(0.0, 1.0), num_steps=5, floor=1e-9).mu == 0
    # Losses with a probability below the floor are covered by the floor.
    assert gdp_price(RARELY, num_steps=1, floor=1e-8).mu == 0


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
def test_price_of_a_renyi_curve_is_above_the_truth(mu):
    found = price_of_rdp(DEFAULT_ORDERS, mu**2 / 2 * DEFAULT_ORDERS, floor=1e-7)
    assert mu <= found.mu <= 1.7 * mu
    assert found.floor == 1e-7


def test_mu_of_a_budget_is_the_largest():
    budget = GdpBudget(2.0, DELTA, 1e-6)
    assert 1e-6 + (1 - 1e-6) * gaussian_delta(budget.mu, 2.0) <= DELTA
    larger = GdpBudget(2.0 * (1 + 1e-6), DELTA, 1e-6)
    assert 1e-6 + (1 - 1e-6) * gaussian_delta(larger.mu, 2.0) > DELTA
    # D(mu, 2) at nine tenths of delta.
    assert gaussian_delta(budget.mu, 2.0) == pytest.approx(0.9e-5, rel=1e-5)


# --- Adaptive choices: every strategy over finite runs, as a recursion ---


def _cut(rate, noise, cells=20):
    """A sampled Gaussian rounded to cells: probabilities with and without a unit."""
    edges = np.concatenate([[-np.inf], np.linspace(-3, 4.5, cells - 1), [np.inf]])
    edges = edges * noise if noise > 1 else edges
    with_unit, without = (np.diff(norm.cdf(edges, m, noise)) for m in (1.0, 0.0))
    return rate * with_unit + (1 - rate) * without, without


def _worst(menu, mu2, floors, direction, epsilon):
    """Delta of the worst strategy, which chooses runs by the loss so far."""

    def moves(left):
        for k, (_, price) in enumerate(menu):
            after = left[0] - Fraction(price.mu) ** 2, left[1] - Fraction(price.floor)
            if min(after) >= 0:
                yield k, after

    pairs = [_cut(*kind)[:: -1 if direction else 1] for kind, _ in menu]
    g = math.exp(epsilon)
    return adaptive.worst_by_history(pairs, moves, (mu2, floors), lambda _: g)


@pytest.mark.parametrize("direction", [0, 1])
def test_no_strategy_exceeds_the_budget(direction):
    kinds = [(0.05, 0.6), (0.4, 1.5)]
    menu = [(k, gdp_price(step(*k), num_steps=1, floor=1e-4)) for k in kinds]
    cheap, dear = sorted(price.mu for _, price in menu)
    mu2, floors = Fraction(dear**2 + 2 * cheap**2), Fraction(3e-4)
    for epsilon in (0.1, 1.0, 4.0):
        found = _worst(menu, mu2, floors, direction, epsilon)
        bound = 3e-4 + (1 - 3e-4) * gaussian_delta(math.sqrt(mu2), epsilon)
        assert found <= bound
    # Mu without the floors is no budget.
    twice = _worst(menu, Fraction(2 * dear**2), Fraction(2e-4), 0, 5.0)
    assert twice > 1.5 * gaussian_delta(math.sqrt(2) * dear, 5.0)


def test_sums_are_exact():
    budget = GdpBudget(4.0, DELTA, 1e-6)
    tenth = GdpPrice(0.0, 1e-7)
    # In floats ten times 1e-7 is 1e-6; exactly it is slightly more or less.
    fits = 10 * Fraction(1e-7) <= Fraction(1e-6)
    assert budget.permits([tenth] * 9, tenth) is fits
    half = GdpPrice(budget.mu / math.sqrt(2), 0.0)
    assert budget.permits([half], half) is (
        2 * Fraction(half.mu) ** 2 <= Fraction(budget.mu) ** 2
    )
    for share in np.linspace(0.05, 0.95, 19):  # square roots round up, or down
        paid = GdpPrice(share * budget.mu, share * budget.floors)
        left = budget.left([paid])
        assert budget.permits([paid], left)
        more = GdpPrice(math.nextafter(left.mu, 9.0), left.floor)
        assert not budget.permits([paid], more)


@pytest.mark.slow
def test_mu_down_to_a_floor_far_below_rounding():
    one, floor = step(0.1, 1.5), 1e-60
    mu = gdp.gdp_mu(one, num_steps=50, smallest_delta=floor)
    # Without sampling it is 4.71; only rare draws reach this tail.
    assert 1.0 < mu < 1.2
    at = np.array([2.0, 16.0])
    true = jde.delta(one, epsilon=at, num_steps=50)
    assert np.all(true <= gaussian_delta(mu, at)) and true[-1] < 1e-50


# --- Prices of adaptive runs: the worst strategy's profile ---

FLOOR = 1e-6
SLOW, FAST = step(0.1, 1.5), step(0.1, 2.2)
MENU = {"slow": SLOW, "fast": FAST}
RUN = jde.AdaptiveRun(MENU, prices={"slow": 5, "fast": 2}, budget=40)
BARE = jde.AdaptiveRun(
    {"slow": SLOW, "bare": step(0.1, 0.0)}, prices={"slow": 1, "bare": 1}, budget=2
)
SEVERAL = jde.AdaptiveRun({"slow": step(0.1, [1.5, 2.0])}, quotas={"slow": 2})


def test_a_profile_is_above_the_truth_everywhere_and_close_to_it():
    one = np.ones(1)
    menu = [([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]), ([0.1, 0.9], [0.05, 0.95])]
    losses = [
        tuple(
            tuple(np.full(1, x) for x in a) for a in (np.log(p) - np.log(q), np.log(p))
        )
        for p, q in (map(np.array, pair) for pair in menu)
    ]
    graph = budget_graph((2, 1), 6)
    runs = [Run((FiniteLoss(one, *columns, 0 * one),), (one,)) for columns in losses]
    found = profiles_above(Problem.of(graph, runs), 1e-6)
    assert found is not None
    for backward, (epsilons, deltas) in zip((False, True), found, strict=True):
        pairs = [(q, p) if backward else (p, q) for p, q in menu]
        for i in np.linspace(0, len(epsilons) - 1, 9).astype(int):
            g = np.exp(epsilons[i])
            exact = adaptive.worst_by_history(
                pairs, adaptive.by_prices((2, 1)), 6, lambda _, g=g: g
            )
            assert exact - 1e-12 <= deltas[i] <= exact + 2e-4


@pytest.mark.slow
def test_compositions_cost_their_composition():
    quotas = jde.AdaptiveRun(MENU, quotas={"slow": 4, "fast": 10})
    plan = jde.compose((SLOW, 4), (FAST, 10))
    assert gdp_price(quotas, floor=FLOOR) == gdp_price(plan, floor=FLOOR)
    # The library does not see that these are the same.
    twins = {"one": SLOW, "other": step(0.1, 1.5)}
    run = jde.AdaptiveRun(twins, prices=dict.fromkeys(twins, 5), budget=40)
    assert run.composition() is None
    fixed = jde.compose((step(0.1, 1.5 * (1 + 1e-9)), 8))
    exact = gdp_price(fixed, floor=FLOOR).mu
    assert gdp_price(run, floor=FLOOR).mu == pytest.approx(exact, rel=3e-3)


def test_the_most_expensive_path_counts():
    run = two_groups()
    mu = gdp_price(run, floor=FLOOR).mu
    for epsilon in (0.0, 0.3, 0.6):
        claimed = Gaussian(noise_multiplier=1 / mu).delta(epsilon)
        true = run.delta_interval(epsilon=epsilon)[0]
        assert true <= FLOOR + (1 - FLOOR) * claimed
        assert true > run.delta_interval(epsilon=epsilon)[1] * (1 - 1e-2)


def of_curve(epsilons, deltas):
    return price_of_curve(np.array(epsilons), np.array(deltas), floor=1e-9)


REFUSED = [
    (lambda: GdpBudget(0.0, DELTA, 1e-6), "epsilon must be > 0"),
    (lambda: GdpBudget(1e6, DELTA, 1e-6), "which gives no privacy"),
    (lambda: GdpBudget(1.0, 1.0, 1e-6), "delta must lie in"),
    (lambda: GdpBudget(1.0, DELTA, DELTA), "floors must be below delta"),
    (lambda: GdpBudget(1.0, DELTA, 0.0), "floors must lie in"),
    (lambda: GdpBudget([1.0, 2.0], DELTA, 1e-6), "epsilon must be"),
    (lambda: GdpBudget(1.0, DELTA, 1e-6).left([GdpPrice(9.0, 0.0)]), "not exceed"),
    (lambda: GdpPrice(np.inf, 0.0), "mu must be finite"),
    (lambda: GdpPrice(math.nan, 0.0), "mu must not be NaN"),
    (lambda: GdpPrice(1.0, 1.0), "floor must lie in"),
    (lambda: gdp_price(SLOW, num_steps=1, floor=1e-101), "floor must be one number"),
    (lambda: gdp_price(SEVERAL, floor=FLOOR), "price needs a run of one setting"),
    (
        lambda: gdp_price(step(0.1, [1.0, 2.0]), num_steps=1, floor=1e-9),
        "a price needs one setting",
    ),
    (lambda: gdp_price(BARE, floor=FLOOR), "the run has no mu"),
    (lambda: gdp_price(step(0.5, 0.0), num_steps=5, floor=1e-9), "the run has no mu"),
    (lambda: gdp_price(RARELY, num_steps=2, floor=1e-9), "try a larger floor"),
    (lambda: gdp_price(RUN, num_steps=2, floor=FLOOR), "must be None for an Adaptive"),
    (lambda: of_curve([0.0, 1.0], [0.1, math.nan]), "must start at 0"),
    (lambda: of_curve([0.5, 1.0], [0.1, 0.0]), "must start at 0"),
    (lambda: of_curve([0.0, 1.0], [0.1, 0.2]), "must start at 0"),
    (lambda: of_curve([0.0, 1.0], [1.1, 0.0]), "must start at 0"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=range(len(REFUSED)))
def test_budgets_and_runs_without_a_price_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- The budget of one run: known before the first step, never exceeded ---


def test_noise_and_steps_are_calibrated_for_each_other():
    budget = plan_budget(flat_step(), epsilon=2.0, delta=DELTA, num_steps=300)
    assert budget.num_steps == 300 <= budget.permitted_steps
    assert budget.spent(budget.permitted_steps) <= 2.0
    assert budget.spent(budget.permitted_steps + 1) > 2.0
    noise = budget.step.noise_multiplier
    less = flat_step(noise_multiplier=noise * 0.999)
    assert jde.epsilon(less, num_steps=300, delta=DELTA) > 2.0
    budget = plan_budget(flat_step(noise_multiplier=1.7), epsilon=2.0, delta=DELTA)
    assert budget.step.noise_multiplier == 1.7
    assert budget.num_steps == budget.permitted_steps
    assert budget.spent(budget.num_steps) <= 2.0 < budget.spent(budget.num_steps + 1)


def test_over_random_budgets_the_ledger_stops_at_the_last_permitted_step():
    """Step by step, against epsilon computed for that number of steps."""
    rng, number = np.random.default_rng(5), 20
    rate, noise = 10 ** rng.uniform(-3, 0, number), rng.uniform(0.8, 6.0, number)
    target = 10 ** rng.uniform(-0.5, 1.2, number)
    delta = 10 ** rng.uniform(-9, -3, number)
    steps = flat_step(noise_multiplier=noise, rate=rate)
    permitted = jde.calibrate_num_steps(steps, epsilon=target, delta=delta)
    used = np.flatnonzero((permitted >= 1) & (permitted <= 2_000))
    assert used.size > 0.3 * number
    taken = np.zeros(number, np.int64)
    for i in used:
        step = flat_step(noise_multiplier=noise[i], rate=rate[i])
        most = int(permitted[i])
        ledger = Ledger(PrivacyBudget(step, target[i], delta[i], most, most))
        with pytest.raises(BudgetExhaustedError):
            while True:
                ledger.charge()
        taken[i] = ledger.charged
    spent = jde.epsilon(steps, num_steps=taken, delta=delta)
    more = jde.epsilon(steps, num_steps=taken + 1, delta=delta)
    assert np.all(spent[used] <= target[used])
    assert np.all(more[used] > target[used])


def test_a_budget_without_privacy_is_stated():
    budget = plan_budget(GROUPED, epsilon=np.inf, delta=DELTA, num_steps=7)
    assert not budget.is_private
    assert budget.step.noise_multiplier == 0.0
    assert budget.num_steps == 7
    assert budget.spent(7) == np.inf


def test_a_ledger_resumes():
    budget = plan_budget(flat_step(), epsilon=2.0, delta=DELTA, num_steps=10)
    ledger = Ledger(budget, charged=budget.permitted_steps)
    with pytest.raises(BudgetExhaustedError, match="would exceed epsilon=2"):
        ledger.charge()
    assert ledger.charged == budget.permitted_steps
    for charged in (-1, budget.permitted_steps + 1):
        with pytest.raises(ValueError, match="charged must lie in 0"):
            Ledger(budget, charged=charged)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be > 0"),
        ({"epsilon": float("nan")}, "epsilon must not be NaN"),
        ({"epsilon": [1.0, 2.0]}, "epsilon must be one number"),
        ({"delta": 0.0}, "delta must lie in"),
        ({"num_steps": 0}, "num_steps must be a whole number >= 1"),
        ({"num_steps": 2**31}, "at most 2,147,483,647"),
        ({"epsilon": np.inf, "num_steps": None}, "must be given with"),
        ({"epsilon": 0.01, "num_steps": None}, "not permit a single step"),
        ({"step": flat_step(noise_multiplier=[1.0, 2.0])}, "one setting"),
        ({"step": "step"}, "must be a GaussianStep"),
    ],
)
def test_bad_input(changes, message):
    asked = {"step": flat_step(), "epsilon": 2.0, "delta": DELTA, "num_steps": 10}
    with pytest.raises((ValueError, TypeError), match=message):
        plan_budget(**{**asked, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 1.0}, "step must be GaussianSteps only, got 1.0"),
        ({"before": (1.0,)}, "before must be GaussianSteps only, got 1.0"),
        ({"before": None}, "before must be a tuple of GaussianSteps, got None"),
        ({"epsilon": -1.0}, "epsilon must be >= 0, got -1.0"),
        ({"delta": 1.0}, "delta must lie in"),
        ({"num_steps": 2.5}, "num_steps must be a whole number >= 0"),
        ({"permitted_steps": -1}, "permitted_steps must be a whole number >= 0"),
    ],
)
def test_a_budget_of_wrong_parts_is_refused(changes, message):
    parts = {"step": flat_step(), "epsilon": 2.0, "delta": DELTA}
    parts |= {"num_steps": 10, "permitted_steps": 10, **changes}
    with pytest.raises((ValueError, TypeError), match=message):
        PrivacyBudget(**parts)


def test_epsilon_along_a_run_is_of_few_steps_and_never_too_small(monkeypatch):
    """All 2^31 steps at once would take 16 GiB before the first one."""
    asked = []

    def counted(self, num_steps):
        asked.append(num_steps)
        return np.sqrt(num_steps)

    monkeypatch.setattr(PrivacyBudget, "spent", counted)
    most = 2**31 - 1
    ahead = SpentAhead(PrivacyBudget(flat_step(), 1e9, DELTA, most, most))
    steps = [1, 2, 100, 4096, 4097, 9_000, most]
    np.testing.assert_array_equal([ahead.at(n) for n in steps], np.sqrt(steps))
    assert max(map(np.size, asked)) <= 4096 and len(asked) == 4
    # For people in many units one epsilon takes as long as a training step.
    asked.clear()
    person = dataclasses.replace(
        GROUPED, privacy_unit="person", people=jde.PersonBounds(examples=1, classes=3)
    )
    ahead = SpentAhead(PrivacyBudget(person, 1e9, DELTA, 13, 13))
    charged = [*range(1, 11), 12, 12, 13]
    found = [ahead.at(n) for n in range(1, 14)]
    np.testing.assert_array_equal(found, np.sqrt(charged))
    assert asked == [*range(1, 11), 12, 13]
