"""The budget is known before the first step, and never exceeded."""

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.budget import (
    BudgetExhaustedError,
    PrivacyBudget,
    SpentAhead,
    plan_budget,
)
from jaxdp_episodic.accountant.report.adaptive_words import TAKEN, budget_in_words
from jaxdp_episodic.trainer.run.ledger import Ledger
from training_runs import GROUPED, flat_step

DELTA = 1e-5


def test_noise_is_calibrated_for_the_steps():
    budget = plan_budget(flat_step(), epsilon=2.0, delta=DELTA, num_steps=300)
    assert budget.num_steps == 300
    assert budget.spent(300) <= 2.0
    assert budget.spent(budget.permitted_steps) <= 2.0
    assert budget.spent(budget.permitted_steps + 1) > 2.0
    less = jde.GaussianStep(
        budget.step.design, noise_multiplier=budget.step.noise_multiplier * 0.999
    )
    assert jde.epsilon(less, num_steps=300, delta=DELTA) > 2.0


def test_steps_are_calibrated_for_the_noise():
    step = flat_step(noise_multiplier=1.7)
    budget = plan_budget(step, epsilon=2.0, delta=DELTA)
    assert budget.step.noise_multiplier == 1.7
    assert budget.num_steps == budget.permitted_steps
    assert budget.spent(budget.num_steps) <= 2.0 < budget.spent(budget.num_steps + 1)


def test_over_random_budgets_the_ledger_stops_at_the_last_permitted_step():
    """Step by step, against epsilon computed for that number of steps."""
    rng, number = np.random.default_rng(5), 20
    rate, noise = 10 ** rng.uniform(-3, 0, number), rng.uniform(0.8, 6.0, number)
    target, delta = (
        10 ** rng.uniform(-0.5, 1.2, number),
        10 ** rng.uniform(-9, -3, number),
    )
    sampling = jde.Poisson("user", sampling_probability=rate)
    steps = jde.GaussianStep(sampling, noise_multiplier=noise)
    permitted = jde.calibrate_num_steps(steps, epsilon=target, delta=delta)
    used = np.flatnonzero((permitted >= 1) & (permitted <= 2_000))
    assert used.size > 0.3 * number
    taken = np.zeros(number, np.int64)
    for i in used:
        step = flat_step(noise_multiplier=noise[i], rate=rate[i])
        budget = PrivacyBudget(
            step, target[i], delta[i], int(permitted[i]), int(permitted[i])
        )
        ledger = Ledger(budget)
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
    ("changes", "error", "message"),
    [
        ({"epsilon": 0.0}, ValueError, "epsilon must be > 0"),
        ({"epsilon": float("nan")}, ValueError, "epsilon must not be NaN"),
        ({"epsilon": [1.0, 2.0]}, ValueError, "epsilon must be one number"),
        ({"delta": 0.0}, ValueError, "delta must lie in"),
        ({"num_steps": 0}, ValueError, "num_steps must be a whole number >= 1"),
        ({"num_steps": 2**31}, ValueError, "at most 2,147,483,647"),
        ({"epsilon": np.inf, "num_steps": None}, ValueError, "must be given with"),
        ({"epsilon": 0.01, "num_steps": None}, ValueError, "not permit a single step"),
    ],
)
def test_bad_input(changes, error, message):
    arguments = {"epsilon": 2.0, "delta": DELTA, "num_steps": 10, **changes}
    with pytest.raises(error, match=message):
        plan_budget(flat_step(), **arguments)


def test_one_setting_only():
    with pytest.raises(ValueError, match="must be one setting"):
        plan_budget(flat_step(noise_multiplier=[1.0, 2.0]), epsilon=1.0, delta=DELTA)
    with pytest.raises(TypeError, match="must be a GaussianStep"):
        plan_budget("step", epsilon=1.0, delta=DELTA)


def test_epsilon_of_a_run_of_any_length_takes_little_memory(monkeypatch):
    """All 2^31 steps at once would take 16 GiB before the first one."""
    step = flat_step()
    budget = PrivacyBudget(step, 1e9, DELTA, 2**31 - 1, 2**31 - 1)
    asked = []

    def counted(self, num_steps):
        asked.append(np.size(num_steps))
        return np.sqrt(num_steps)

    monkeypatch.setattr(PrivacyBudget, "spent", counted)
    ahead = SpentAhead(budget)
    steps = [1, 2, 100, 4096, 4097, 9_000, 2**31 - 1]
    values = [ahead.at(step) for step in steps]
    assert max(asked) <= 4096 and len(asked) == 4
    np.testing.assert_array_equal(values, np.sqrt(steps))


@pytest.mark.slow
def test_epsilon_along_a_run_of_people_is_of_few_steps_and_never_too_small(monkeypatch):
    """For people in many units one epsilon takes as long as a training step."""
    design = jde.MultistageSampling(
        jde.Poisson("class", sampling_probability=0.1),
        jde.WithoutReplacement("example", size=2, population=20),
    )
    people = jde.PersonBounds(examples=1, classes=3)
    step = jde.GaussianStep(
        design,
        noise_multiplier=3.0,
        clip_unit="class",
        privacy_unit="person",
        people=people,
        neighboring_relation="zero_out",
    )
    budget = PrivacyBudget(step, 1e9, DELTA, 13, 13)
    exact = np.asarray(budget.spent(np.arange(1, 14)))
    asked, spent = [], PrivacyBudget.spent
    monkeypatch.setattr(
        PrivacyBudget, "spent", lambda self, n: asked.append(n) or spent(self, n)
    )
    ahead = SpentAhead(budget)
    found = np.array([ahead.at(n) for n in range(1, 14)])
    assert np.all(found >= exact * (1 - 1e-8))
    assert found[-1] == pytest.approx(exact[-1], rel=1e-8)
    np.testing.assert_allclose(np.delete(found, 10), np.delete(exact, 10), rtol=1e-8)
    assert found[10] == found[11]
    assert asked == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13]


def test_a_message_names_few_of_many_options():
    names = [f"option {i}" for i in range(30)]
    options = {name: flat_step() for name in names}
    run = jde.AdaptiveRun(options, quotas=dict.fromkeys(names, 7))
    budget = AdaptiveBudget((run,), DELTA)
    words = "7 of 'option 0', 7 of 'option 1', 7 of 'option 2', 7 of 'option 3', "
    assert budget.left_in_words() == words + "26 more options"
    (taken,) = [
        text
        for name, text in budget_in_words(budget.charge("option 20"))
        if name == TAKEN
    ]
    assert taken.startswith("1 of 'option 20' (6 left), 0 of 'option 0'")
    assert taken.endswith("0 of 'option 2' (7 left), 26 more options")
