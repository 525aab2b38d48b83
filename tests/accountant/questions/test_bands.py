"""Correlated noise: what every question says of it, and how many bands pay."""

import itertools
import math

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic import traced
from jaxdp_episodic.accountant.interop.dp_accounting import to_dp_event
from jaxdp_episodic.accountant.numerics.band_coefficients import (
    band_coefficients,
    band_error,
)
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.budget import PrivacyBudget, plan_budget
from jaxdp_episodic.trainer.run.ledgers import read_ledgers
from training_runs import charged_run

DELTA = 1e-5


def poisson(rate=0.2, name="user"):
    return jde.Poisson(name, sampling_probability=rate)


def drawn(size, population, name="drawing"):
    return jde.WithoutReplacement(name, size=size, population=population)


def plain(sampling, noise=1.0, relation="add_remove", **fields):
    return jde.GaussianStep(
        sampling, noise_multiplier=noise, neighboring_relation=relation, **fields
    )


def on(level, count, *args, horizon=30.0, **fields):
    bands = jde.Bands(count, level=level, horizon=horizon)
    return jde.banded(plain(*args, **fields), bands)


def episodes(rate, size, population):
    return jde.MultistageSampling(
        poisson(rate, "episode"), drawn(size, population, "drawing")
    )


def bins(steps):
    return jde.RandomAllocation("user", steps_per_epoch=steps)


# --- Every question answers as of the steps of one group ---

BANDED = {
    "a coin": on("user", 4, poisson(), 1.3),
    "everybody": on("user", 3, poisson(1.0), 2.0),
    "replaced": on("user", 2, drawn(3, 23, "user"), 1.5, "replace_one"),
    "drawings of an episode": on(
        "drawing", 3, episodes(0.3, 2, 20), 1.4, "zero_out", clip_unit="episode"
    ),
    "one band": on("user", 1, poisson(), 1.3),
}
QUESTIONS = {
    "epsilon": lambda s, n: jde.epsilon(s, num_steps=n, delta=DELTA),
    "epsilon by rdp": lambda s, n: jde.epsilon(
        s, num_steps=n, delta=DELTA, method="rdp"
    ),
    "delta": lambda s, n: jde.delta(s, num_steps=n, epsilon=0.7),
    "interval": lambda s, n: jde.epsilon_interval(s, num_steps=n, delta=DELTA),
    "noise": lambda s, n: jde.calibrate_noise_multiplier(
        s, epsilon=2.0, delta=DELTA, num_steps=n
    ),
    "one step": lambda s, _: jde.rdp(s, [1.5, 8.0]),
    "report": lambda s, n: jde.privacy_report(s, num_steps=n, delta=DELTA).epsilon,
    "in a program": lambda s, n: traced.epsilon(s, num_steps=n, delta=DELTA),
    "a menu": lambda s, n: jde.AdaptiveRun({"train": s}, quotas={"train": n}).epsilon(
        delta=DELTA
    ),
}


@pytest.mark.parametrize(
    ("case", "question"),
    [
        *(("a coin", question) for question in QUESTIONS),
        *itertools.product(list(BANDED)[1:], ["epsilon", "delta", "one step"]),
    ],
)
def test_a_run_costs_what_the_steps_of_one_group_do(case, question):
    step, ask = BANDED[case], QUESTIONS[question]
    for number in (1, 7, 8) if question in ("epsilon", "delta") else (7,):
        uses = math.ceil(number / step.bands.count)
        np.testing.assert_allclose(
            ask(step, number), ask(step.in_group, uses), rtol=1e-9
        )


def test_uses_are_those_of_the_group_that_has_most():
    step = BANDED["a coin"]
    np.testing.assert_array_equal(
        step.uses(np.arange(10)), [0] + [1] * 4 + [2] * 4 + [3]
    )
    for kind in (np.uint8, np.uint64, np.float64):
        assert step.uses(kind(255)) == 64
    steps = on("user", 4, poisson(np.array([0.1, 0.3])), np.array([[1.0], [2.0]]))
    found = jde.epsilon(steps, num_steps=9, delta=DELTA)
    alone = jde.epsilon(plain(poisson(0.1), 2.0), num_steps=3, delta=DELTA)
    assert found.shape == (2, 2) and found[1, 0] == pytest.approx(alone, rel=1e-9)


def test_a_budget_permits_every_group_its_last_step():
    step = on("user", 4, poisson(), 1.3)
    most = jde.calibrate_num_steps(step, epsilon=3.0, delta=DELTA)
    uses = jde.calibrate_num_steps(step.in_group, epsilon=3.0, delta=DELTA)
    assert most == 4 * uses > 4
    budget = plan_budget(step, epsilon=3.0, delta=DELTA)
    assert (budget.num_steps, budget.permitted_steps) == (most, most)
    assert budget.spent(most) == budget.spent(most - 3) <= 3.0 < budget.spent(most + 1)
    rate = jde.calibrate_rate(step, level="user", epsilon=3.0, delta=DELTA, num_steps=9)
    assert rate == jde.calibrate_rate(
        step.in_group, level="user", epsilon=3.0, delta=DELTA, num_steps=3
    )


@pytest.mark.slow
def test_an_epoch_is_that_of_every_group():
    step = on("user", 3, bins(4), 2.0)
    budget = PrivacyBudget(step, 8.0, DELTA, 30, 30)
    np.testing.assert_array_equal(
        budget.owed([0, 1, 12, 13, 24, 25, 31]), [0, 12, 12, 24, 24, 30, 36]
    )
    for taken, epochs in ((1, 4), (13, 8), (25, 10)):
        expected = jde.epsilon(step.in_group, num_steps=epochs, delta=DELTA)
        assert budget.spent(taken) == pytest.approx(expected, rel=1e-9)


def test_runs_are_counted_separately_and_copies_are_refused(tmp_path):
    step = on("user", 2, poisson(), 1.3)
    twice = jde.compose((step, 3), (step, 3))
    budget = PrivacyBudget(step, 8.0, DELTA, 50, 50)
    one, two = (charged_run(tmp_path / name, budget, 3) for name in ("one", "two"))
    charged, _ = read_ledgers([one, two]).run_charged()
    four = jde.epsilon(step.in_group, num_steps=4, delta=DELTA)
    for run in (twice, charged):
        assert jde.epsilon(run, delta=DELTA) == pytest.approx(four, rel=1e-9)
    assert jde.compose((jde.compose((step, 4)), 3)).counts == (12,)
    with pytest.raises(NotImplementedError, match="part of a round of its groups"):
        jde.compose((jde.compose((step, 3)), 2))
    copy = tmp_path / "copy"
    copy.write_bytes(one.read_bytes())
    charged_run(copy, None, 2)
    charged_run(one, None, 3)
    with pytest.raises(NotImplementedError, match="copies of one run with bands"):
        read_ledgers([one, copy]).run_charged()


def menu(**fields):
    step = on("user", 3, poisson(), 2.0)
    check = plain(poisson(1.0), 9.0)
    return jde.AdaptiveRun({"train": step, "check": check}, **fields)


def test_prices_pay_for_rounds_of_all_groups():
    step, check = on("user", 3, poisson(), 2.0), plain(poisson(1.0), 9.0)
    run = menu(**PRICED, blocks={"train": 3})
    other = jde.AdaptiveRun({"train": step.in_group, "check": check}, **PRICED)
    assert run.most("train") == 12
    assert run.epsilon(delta=DELTA) == pytest.approx(other.epsilon(delta=DELTA))


PRICED = {"prices": {"train": 1, "check": 1}, "budget": 4}
QUOTAS = {"train": 3, "check": 1}
TWO = on("user", 2, poisson())
ASKED = {"epsilon": 1.0, "delta": DELTA, "num_steps": 9}
BEFORE = [(on("user", 2, poisson(1.0)), 0.1)]


def adapting(*steps, **limits):
    """A run of options a, b, ..."""
    return jde.AdaptiveRun(dict(zip("ab", steps, strict=False)), **limits)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: menu(**PRICED), "round of all groups, blocks={'train': 3}, got 1"),
        (lambda: menu(**PRICED, blocks={"train": 4}), "of all groups.* got 4"),
        (
            lambda: adapting(TWO, BANDED["a coin"], quotas={"a": 4, "b": 4}),
            "covered: one kind of step with bands",
        ),
        (
            lambda: adapting(TWO, rules=jde.RuleBook("go", {"go": {"a": "end"}})),
            "no theorem with rules",
        ),
        (
            lambda: adapting(menu(quotas=QUOTAS), quotas={"a": 2}),
            "within another adaptive run",
        ),
        (lambda: adapting(jde.compose((TWO, 3)), quotas={"a": 2}), "has 3 steps"),
        (
            lambda: AdaptiveBudget(menu(quotas=QUOTAS), delta=DELTA),
            "the only option that trains",
        ),
        (
            lambda: plan_budget(plain(poisson()), **ASKED, before=BEFORE),
            "or with bands, use only a part",
        ),
        (
            lambda: jde.epsilon_and_gradient(
                TWO, num_steps=3, delta=DELTA, wrt=("num_steps",)
            ),
            "epochs or bands",
        ),
        (
            lambda: jde.choose_bands(plain(drawn(2, 20)), **ASKED, level="drawing"),
            "no public lower bound",
        ),
    ],
)
def test_what_has_no_theorem_is_refused(make, message):
    with pytest.raises(NotImplementedError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda one: jde.banded(one, jde.Bands(2, level="a")), "step must be a Gauss"),
        (lambda one: plan_budget(TWO, **ASKED, before=[(one, 0.1)]), "before must be"),
        (
            lambda one: plan_budget(TWO, **ASKED, before=[one]),
            "must be .step, share. pairs",
        ),
    ],
)
def test_other_mechanisms_are_refused_by_name(make, message):
    with pytest.raises(TypeError, match=message):
        make(jde.LaplaceRelease(5.0))


def test_a_report_and_an_event_are_of_one_group():
    report = jde.privacy_report(BANDED["a coin"], num_steps=8, delta=DELTA)
    (text,) = (text for text in report.preconditions if text.startswith("Groups:"))
    assert "every 'user' is in one of 4 groups" in text
    assert "charged its whole plan" in text
    assert report.worst_path.inclusion_rate == pytest.approx(0.2 / 4)
    run = jde.compose((on("user", 2, poisson()), 5))
    assert to_dp_event(run) == to_dp_event(jde.compose((plain(poisson()), 3)))


# --- Which number of bands: the reference's own optimum and noise ---

# Bands, steps, RMSE of the prefix sums of the best coefficients there are.
OPTIMA = [
    (1, 300, 12.267844),
    (5, 300, 5.855852),
    (10, 1000, 7.590657),
    (20, 20, 1.818324),
]
# Closed form, cut to 5 and normalised: coefficients of (1 - x)^(-1/2).
CLOSED_FORM = [0.79985941, 0.39992971, 0.29994728, 0.24995607, 0.21871156]
DEMO = episodes(1.0, 2, 20)
# A step, its target and length; bands, noise, relative noise at horizons.
CHOICES = {
    "demo": (
        (plain(DEMO, relation="zero_out", clip_unit="episode"), 8.0, 300),
        {
            1: (1.917224, {np.inf: 1.0}),
            5: (2.822617, {np.inf: 0.70275, 100: 0.752, 30: 0.837, 3: 1.267}),
            10: (3.28759, {np.inf: 0.627422, 100: 0.716, 30: 0.861, 3: 1.474}),
        },
    ),
    "users in bins": ((plain(bins(20)), 8.0, 20), {5: (0.526351, {np.inf: 0.702168})}),
}


def test_coefficients_are_near_the_best_there_are():
    for bands, steps, best in OPTIMA:
        kernel = band_coefficients(bands, steps, np.inf)
        assert kernel.shape == (bands,)
        assert np.linalg.norm(kernel) == pytest.approx(1.0, abs=1e-12)
        assert best * (1 - 1e-6) <= band_error(kernel, steps, np.inf) <= best * 1.0015
        assert np.all(np.abs(np.roots(kernel[::-1])) > 1.001)
    assert band_error(np.array(CLOSED_FORM), 300, np.inf) == pytest.approx(6.336874)
    alone = np.sqrt(np.mean(np.cumsum(0.9 ** (2 * np.arange(50)))))
    assert band_error(np.ones(1), 50, 10.0) == pytest.approx(alone, rel=1e-12)


def test_restarts_cost_what_they_do_at_random_places():
    """Factors of the theory: sums with restarts at random steps, relative to none."""
    steps, bands, factors = 300, 10, [1.04, 1.12, 1.34]
    kernel = band_coefficients(bands, steps, np.inf)
    alone = band_error(kernel, steps, np.inf)
    for number, factor in zip((1, 3, 10), factors, strict=True):
        found = band_error(kernel, steps, np.inf, number) / alone
        assert found == pytest.approx(factor, rel=0.02)
        assert band_error(np.ones(1), steps, 9.0, number) == pytest.approx(
            band_error(np.ones(1), steps, 9.0), rel=1e-12
        )
    # In each step: independent noise of a smaller first coefficient.
    broken = band_error(kernel, steps, 30.0, 2 * steps) * kernel[0]
    assert broken == pytest.approx(band_error(np.ones(1), steps, 30.0), rel=1e-12)


def test_a_choice_weighs_restarts_and_statistics():
    given = {"epsilon": 8.0, "delta": DELTA, "num_steps": 4, "horizon": np.inf}
    step = plain(poisson(0.5))
    first = plain(poisson(1.0)), 0.3
    unbroken = jde.choose_bands(step, **given)
    broken = jde.choose_bands(step, **given, restarts=2)
    assert unbroken.step.bands is not None and broken.relative_noise[0] == 1.0
    assert (broken.relative_noise[1:] > unbroken.relative_noise[1:]).all()
    after = jde.choose_bands(step, **given, before=[first])
    i = after.chosen
    planned = plan_budget(
        after.steps[i], epsilon=8.0, delta=DELTA, num_steps=4, before=[first]
    )
    assert planned.step.noise_multiplier == after.noise_multiplier[i]
    assert (after.noise_multiplier > unbroken.noise_multiplier).all()


@pytest.mark.slow
@pytest.mark.parametrize("case", CHOICES)
def test_choices_are_those_of_the_reference(case):
    (step, epsilon, num_steps), rows = CHOICES[case]
    horizons = {h for _, expected in rows.values() for h in expected}
    for horizon in horizons:
        table = jde.choose_bands(
            step, epsilon=epsilon, delta=DELTA, num_steps=num_steps, horizon=horizon
        )
        assert table.step == table.steps[int(np.argmin(table.relative_noise))]
        for bands, (noise, expected) in rows.items():
            (i,) = np.flatnonzero(table.bands == bands)
            if noise is not None:
                assert table.noise_multiplier[i] == pytest.approx(noise, rel=2e-6)
            if horizon in expected:
                assert table.relative_noise[i] == pytest.approx(
                    expected[horizon], rel=2e-3
                )
            spent = jde.epsilon(table.steps[i], num_steps=num_steps, delta=DELTA)
            assert spent <= epsilon


@pytest.mark.slow
def test_candidates_draw_as_many_units():
    grouped = jde.GroupedClasses(
        num_classes=31,
        ways=3,
        episodes=poisson(0.2, "episode"),
        examples=drawn(2, 9, "example"),
    )
    table = jde.choose_bands(
        plain(grouped, relation="zero_out"), epsilon=4.0, delta=DELTA, num_steps=4
    )
    rows = list(zip(table.levels, table.bands.tolist(), strict=True))
    assert rows == [
        ("", 1),
        *(("class", n) for n in (2, 3, 4)),
        *(("example", n) for n in (2, 3, 4)),
    ]
    made = table.steps[3]  # 7 classes of a group are 2 episodes, of 10 in all
    assert made.design.episodes.sampling_probability == pytest.approx(0.8)
    ratio = table.noise_multiplier[3] * band_error(band_coefficients(4, 4, 30), 4, 30)
    ratio /= table.noise_multiplier[0] * band_error(np.ones(1), 4, 30)
    assert table.relative_noise[3] == pytest.approx(ratio * 10 / 8)
    assert "*" in str(table) and "relative_noise" in str(table)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step": BANDED["a coin"]}, "one setting without bands"),
        ({"step": plain(poisson([0.1, 0.2]))}, "one setting without bands"),
        ({"num_steps": 0}, "num_steps"),
        ({"level": "task"}, "groups must be of level 'user' .* got 'task'"),
        ({"epsilon": [1.0, 2.0]}, "epsilon must be one number"),
        ({"horizon": -1}, "horizon must be >= 1, got -1"),
        ({"horizon": math.nan, "num_steps": 1}, "horizon"),
        ({"restarts": -1}, "restarts must be a whole number >= 0"),
        ({"before": [(plain(poisson(1.0)), 1.0)]}, "shares .* sum to less than 1"),
    ],
)
def test_bad_arguments_of_the_choice(changed, message):
    given = {"step": plain(poisson()), "epsilon": 1.0, "delta": DELTA, "num_steps": 9}
    with pytest.raises((ValueError, NotImplementedError), match=message):
        jde.choose_bands(**{**given, **changed})
