"""Prices of adaptive runs in a book: the worst strategy's profile, at all g."""

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses.finite import FiniteLoss
from jaxdp_episodic.accountant.methods.adaptive.method import profiles_above
from jaxdp_episodic.accountant.methods.adaptive.problem import Problem
from jaxdp_episodic.accountant.methods.run import Run
from jaxdp_episodic.accountant.questions.gdp_budget import gdp_price
from jaxdp_episodic.bounds import Gaussian
from menus import budget_graph, two_groups
from oracles import adaptive

FLOOR = 1e-6
# Epsilons of the comparison, nats.
AT = np.array([0.0, 0.5, 1.0, 1.2, 1.3, 1.35, 1.4, 2.0])


def step(noise, rate=0.1):
    draw = jde.Poisson("example", sampling_probability=rate)
    return jde.GaussianStep(draw, noise_multiplier=noise)


SLOW, FAST = step(1.5), step(2.2)
MENU = {"slow": SLOW, "fast": FAST}
RUN = jde.AdaptiveRun(MENU, prices={"slow": 5, "fast": 2}, budget=40)


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
    runs = [Run((FiniteLoss(one, *columns),), (one,)) for columns in losses]
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
def test_a_price_holds_for_the_worst_strategy_and_a_smaller_one_does_not():
    mu = gdp_price(RUN, floor=FLOOR).mu
    lower, upper = RUN.delta_interval(epsilon=AT)

    def by_mu(mu):
        profile = [Gaussian(noise_multiplier=1 / mu).delta(float(e)) for e in AT]
        return FLOOR + (1 - FLOOR) * np.array(profile)

    assert (upper <= by_mu(mu) * (1 + 1e-3)).all()
    assert (lower > by_mu(0.98 * mu)).any()
    # Slightly more than plans of it cost.
    plans = [jde.compose((SLOW, 4), (FAST, 10)), jde.compose((FAST, 20))]
    assert max(gdp_price(plan, floor=FLOOR).mu for plan in plans) < mu


@pytest.mark.slow
def test_compositions_cost_their_composition():
    quotas = jde.AdaptiveRun(MENU, quotas={"slow": 4, "fast": 10})
    plan = jde.compose((SLOW, 4), (FAST, 10))
    assert gdp_price(quotas, floor=FLOOR) == gdp_price(plan, floor=FLOOR)
    # The library does not see that these are the same.
    twins = {"one": SLOW, "other": step(1.5)}
    run = jde.AdaptiveRun(twins, prices=dict.fromkeys(twins, 5), budget=40)
    assert run.composition() is None
    fixed = jde.compose((step(1.5 * (1 + 1e-9)), 8))
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


def test_runs_without_a_price_are_refused():
    bare = jde.AdaptiveRun(
        {"slow": SLOW, "bare": step(0.0)}, prices={"slow": 1, "bare": 1}, budget=2
    )
    with pytest.raises(ValueError, match="the run has no mu"):
        gdp_price(bare, floor=FLOOR)
    with pytest.raises(ValueError, match="num_steps must be None for an AdaptiveRun"):
        gdp_price(RUN, num_steps=2, floor=FLOOR)
    several = jde.AdaptiveRun({"slow": step([1.5, 2.0])}, quotas={"slow": 2})
    with pytest.raises(ValueError, match="price needs a run of one setting"):
        gdp_price(several, floor=FLOOR)
