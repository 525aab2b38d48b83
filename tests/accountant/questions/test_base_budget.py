"""One budget for runs chosen one after another: units of a base step, with floors."""

import math

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.methods.adaptive import comparison
from jaxdp_episodic.accountant.questions.base_budget import (
    BaseBudget,
    BasePrice,
    base_price,
)
from rows import fast_and_slow

DELTA = 1e-5


def step(rate, noise, **fields):
    sampling = jde.Poisson("example", sampling_probability=rate)
    return jde.GaussianStep(sampling, noise_multiplier=noise, **fields)


# Rate and noise of a run and its steps, rate and noise of the base, and the units of an
# independent computation: in its own kind a run costs little more than its steps.
PRICES = [
    (0.1, 1.5, 50, 0.1, 1.5, 51),
    (0.1, 1.5, 300, 0.1, 1.5, 301),
    (0.01, 0.7, 500, 0.01, 0.7, 501),
    (1.0, 10.0, 30, 1.0, 20.0, 121),
    (0.0, 1.0, 30, 0.1, 1.5, 0),
]


@pytest.mark.parametrize(
    "rate,noise,steps,base_rate,base_noise,units",
    fast_and_slow(PRICES, lambda rate, _, steps, *__: steps == 50 or rate == 0),
)
def test_prices_are_those_of_an_independent_computation(
    rate, noise, steps, base_rate, base_noise, units
):
    # Not quite the base: steps of the base itself are only counted.
    base, run = step(base_rate, base_noise), step(rate, noise * (1 + 1e-9))
    found = base_price(run, base, num_steps=steps, floor=1e-7)
    assert found == BasePrice(units, 1e-7)


def test_steps_of_the_base_are_counted():
    base = step(0.1, 1.5)
    assert base_price(base, base, num_steps=7, floor=1e-7) == BasePrice(7, 0.0)
    run = jde.compose((base, 3), (step(0.1, 1.5), 4))
    assert base_price(run, base, num_steps=2, floor=1e-7) == BasePrice(14, 0.0)
    other = jde.compose((base, 3), (step(0.1, 1.6), 1))
    assert 4 <= base_price(other, base, floor=1e-7).units <= 5


# A run, its steps, and a base of another kind.
KINDS = [
    (step(0.01, 1.0), 50, step(0.1, 1.5)),
    (step(0.01, 1.0), 50, step(1.0, 20.0)),
    (step(0.02, 1.0), 20, step(0.02, 2.0)),
    (step(1.0, 10.0), 1, step(0.01, 1.0)),
]


@pytest.mark.parametrize(
    "run,steps,base", fast_and_slow(KINDS, lambda run, _, base: base == KINDS[1][2])
)
def test_a_price_holds_everywhere_and_a_small_one_does_not(run, steps, base):
    """By the other method, that has no lattice: contour integrals."""
    floor = 1e-6
    units = base_price(run, base, num_steps=steps, floor=floor).units
    at = np.linspace(0, 5, 26)
    true = jde.delta(run, epsilon=at, num_steps=steps)

    def claimed(number):
        return floor + (1 - floor) * jde.delta(base, epsilon=at, num_steps=number)

    assert np.all(true <= claimed(units) * (1 + 1e-9))
    assert np.any(true > claimed(units // 2))


def test_one_direction_is_not_enough(monkeypatch):
    """What adds somebody to a rare draw loses little in the other direction."""
    arguments = {"num_steps": 1, "floor": 1e-6}
    run, base = step(1.0, 20.0), step(0.05, 1.0)
    both = base_price(run, base, **arguments).units
    whole = comparison.Problem.of

    def forward_alone(*of):
        return whole(*of)._replace(orientations=(False,))

    monkeypatch.setattr(comparison.Problem, "of", forward_alone)
    assert base_price(run, base, **arguments).units < 0.8 * both


# --- Adaptive choices: every strategy over finite runs, as a recursion ---


def _ndtr(x):
    return np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])


def _cut(rate, noise, cells=24):
    """A sampled Gaussian whose output is told by its cell only: (p, q), both ways."""
    edges = np.concatenate([[-np.inf], np.linspace(-3, 4.5, cells - 1), [np.inf]])
    q, p = (np.diff(_ndtr((edges * max(noise, 1) - m) / noise)) for m in (0.0, 1.0))
    p = rate * p + (1 - rate) * q
    return [(p, q), (q, p)]


def _worst(menu, units, runs, direction, g):
    """Delta at log g of the worst strategy of so many runs, in view of the loss."""
    worst = max(0.0, 1 - g)
    for pair, price in menu:
        if runs and price.units <= units:
            p, q = pair[direction]
            rest = units - price.units, runs - 1
            after = [_worst(menu, *rest, direction, g * ratio) for ratio in q / p]
            worst = max(worst, float(np.dot(p, after)))
    return worst


def test_no_strategy_exceeds_the_budget():
    base, floor = step(0.2, 1.5), 1e-4
    menu = []
    for kind in ((0.05, 0.6), (0.4, 1.5)):
        price = base_price(step(*kind), base, num_steps=1, floor=floor)
        assert price.floor == floor
        menu.append((_cut(*kind), price))
    units = sum(price.units for _, price in menu)
    for direction in (0, 1):
        for epsilon in (0.1, 1.0, 4.0):
            found = _worst(menu, units, 2, direction, math.exp(epsilon))
            floors = 2 * floor
            bound = jde.delta(base, epsilon=epsilon, num_steps=units)
            assert found <= floors + (1 - floors) * bound


def test_units_of_a_budget_are_the_most():
    budget = BaseBudget(step(0.1, 1.5), 4.0, DELTA, 2e-6)
    left = (DELTA - 2e-6) / (1 - 2e-6)
    for units, fits in ((budget.units, True), (budget.units + 1, False)):
        cost = jde.epsilon(budget.base, num_steps=units, delta=left)
        assert (cost <= 4.0) is np.bool_(fits)
    half = BasePrice(budget.units - 3, 1e-6)
    assert budget.permits([half], BasePrice(3, 1e-6))
    assert not budget.permits([half], BasePrice(4, 0.0))
    assert not budget.permits([half], BasePrice(3, 1.1e-6))
    assert budget.left([half]) == BasePrice(3, 1e-6)


# --- What is refused ---


def test_runs_without_a_price():
    base = step(0.1, 1.5)
    with pytest.raises(ValueError, match="no number of base steps up to 1,000,000"):
        base_price(step(0.5, 0.0), base, num_steps=3, floor=1e-6)
    # What is lost with a chance below the floor is in the floor.
    release = jde.ApproximateDP(0.0, 1e-9)
    assert base_price(release, base, num_steps=1, floor=1e-8).units == 0
    with pytest.raises(ValueError, match="a larger floor may do"):
        base_price(release, base, num_steps=2, floor=1e-9)
    with pytest.raises(ValueError, match="a price is of one run"):
        base_price(step(0.1, [1.0, 2.0]), base, num_steps=1, floor=1e-6)
    with pytest.raises(ValueError, match="floor must be one number in"):
        base_price(base, base, num_steps=1, floor=1e-101)


@pytest.mark.parametrize(
    "base,error,message",
    [
        (jde.compose((step(0.1, 1.0), 2)), NotImplementedError, "got several"),
        (step(0.1, [1.0, 2.0]), ValueError, "base must be of one setting"),
        (step(0.1, 0.0), ValueError, "base must have noise"),
        (step(0.0, 1.0), ValueError, "base must fit 1 to 1,000,000 times"),
        (step(1.0, 0.01), ValueError, "got one that fits 0 times"),
        (
            jde.GaussianStep(
                jde.RandomAllocation("example", steps_per_epoch=4), noise_multiplier=1.0
            ),
            NotImplementedError,
            "got a step of an epoch",
        ),
        (
            jde.GaussianStep(
                jde.MultistageSampling(
                    jde.Poisson("class", sampling_probability=0.1),
                    jde.WithoutReplacement("example", size=2),
                ),
                noise_multiplier=1.0,
                clip_unit="example",
                population=jde.Population.from_sizes([5, 20]),
            ),
            NotImplementedError,
            "one of several paths or theorems",
        ),
        ("base", TypeError, "step"),
    ],
)
def test_bases_that_are_none(base, error, message):
    with pytest.raises(error, match=message):
        BaseBudget(base, 4.0, DELTA, 2e-6)
