"""Adaptive runs: options, guarantees, and dictionaries."""

import pickle

import numpy as np
import pytest

import jaxdp_episodic as jde


def gaussian(noise, rate=0.1, **others):
    draw = jde.Poisson("example", sampling_probability=rate)
    return jde.GaussianStep(draw, noise_multiplier=noise, **others)


SLOW, FAST, CHECK = gaussian(1.5), gaussian(2.2), jde.LaplaceRelease(10.0)
MENU = {"slow": SLOW, "fast": FAST, "check": CHECK}
QUOTAS = {"slow": 20, "fast": 3, "check": 5}
TWO = {"slow": SLOW, "fast": FAST}


def priced(budget=None, options=TWO, prices=(5, 2), **others):
    """A run of two options with these prices."""
    prices = dict(zip(options, prices, strict=True))
    return jde.AdaptiveRun(options, prices=prices, budget=budget, **others)


EPOCHS = jde.GaussianStep(
    jde.RandomAllocation("example", steps_per_epoch=10), noise_multiplier=1.0
)
# As an option its worst strategy is no composition.
WITHIN = priced(7)


def test_quotas_cost_their_composition():
    slow, fast = gaussian([1.5, 2.0]), gaussian([[3.0], [4.0]])
    run = jde.AdaptiveRun({"slow": slow, "fast": fast}, quotas={"slow": 3, "fast": 2})
    every = jde.compose((slow, 3), (fast, 2))
    found = run.epsilon(delta=1e-5)
    np.testing.assert_array_equal(found, jde.epsilon(every, delta=1e-5))
    assert found.shape == (2, 2)
    np.testing.assert_array_equal(run.delta(epsilon=1.0), jde.delta(every, epsilon=1.0))
    with pytest.raises(ValueError, match="do not broadcast.*'slow'.*'fast'"):
        fast = gaussian([1, 2, 3.0])
        jde.AdaptiveRun({"slow": slow, "fast": fast}, quotas={"slow": 3, "fast": 2})


def test_a_charge_returns_a_run_with_less_left_and_the_same_guarantee():
    run = jde.AdaptiveRun(MENU, quotas={"slow": 2, "fast": 1, "check": 0})
    after = run.charge("slow").charge("fast")
    assert run.left == {"slow": 2, "fast": 1, "check": 0}
    assert set(run.taken.values()) == {0}
    assert after.left == {"slow": 1, "fast": 0, "check": 0}
    assert after.taken == {"slow": 1, "fast": 1, "check": 0}
    assert (after.most("slow"), after.most("fast")) == (1, 0)
    assert after.can("slow") and not after.can("fast") and not run.can("check")
    assert after != run and after.epsilon(delta=1e-5) == run.epsilon(delta=1e-5)
    assert after.taken_composed() == jde.compose((SLOW, 1), (FAST, 1))
    with pytest.raises(ValueError, match=r"'fast' is not allowed now: its quota of 1"):
        after.charge("fast")
    with pytest.raises(ValueError, match="did you mean 'slow'"):
        run.charge("slwo")


def test_adaptive_runs_round_trip_through_dictionaries():
    rules = jde.RuleBook.in_order(["slow", "fast", "check"])
    run = jde.AdaptiveRun(MENU, quotas=QUOTAS, rules=rules).charge("fast")
    again = jde.AdaptiveRun.from_dict(run.to_dict())
    assert again == run and hash(again) == hash(run)
    assert again.state == "fast" and not again.can("slow")
    assert pickle.loads(pickle.dumps(run)) == run
    tables = run.options, run.quotas, run.taken, rules.moves, rules.moves["fast"]
    assert not any(hasattr(table, "update") for table in tables)  # none can change


@pytest.mark.parametrize(
    "change",
    [
        *({"taken": {"slow": 21}}, {"state": "slow"}, {"quota": QUOTAS}),
        *({"quotas": {**QUOTAS, **one}} for one in ({"other": 1}, {"slow": -1})),
    ],
)
def test_invalid_dictionaries_are_refused(change):
    written = jde.AdaptiveRun(MENU, quotas=QUOTAS).to_dict()
    with pytest.raises(ValueError):
        jde.AdaptiveRun.from_dict({**written, **change})


@pytest.mark.parametrize(
    ("state", "taken"),
    [("x", {}), ("nowhere", {}), ("a", {"fast": 1}), ("b", {"slow": 1}), ("b", {})],
)
def test_a_state_that_the_rules_cannot_reach_is_refused(state, taken):
    # Epsilon would be that from state "a", which allows less than "x".
    rules = jde.RuleBook("a", {"a": {"fast": "b"}, "x": {"slow": "y"}})
    with pytest.raises(ValueError, match="state must be one that the rules reach"):
        jde.AdaptiveRun(MENU, rules=rules, state=state, taken=taken)
    run = jde.AdaptiveRun(MENU, rules=rules).charge("fast")
    assert jde.AdaptiveRun.from_dict(run.to_dict()) == run
    loop = jde.RuleBook.every(["slow", "fast"], 3)
    assert loop.states_after(["fast"], 3_001) == {"fast, 1 of 3"}


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (gaussian(1.0, neighboring_relation="zero_out"), "neighboring_rel"),
        (jde.ZeroConcentratedDP(0.1), "only Rényi divergences"),
        ("slow", "must be a GaussianStep"),
        (EPOCHS, "only whole epochs"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(other, match):
    refused = ValueError, TypeError, NotImplementedError
    with pytest.raises(refused, match=match) as caught:
        jde.AdaptiveRun({"slow": SLOW, "other": other}, quotas={"slow": 1, "other": 1})
    assert "'other'" in str(caught.value)


def test_rule_books():
    book = jde.RuleBook.at_most_changes(["a", "b"], 1)
    state = book.start
    for name in "aab":
        state = book.after(state, name)
    assert book.after(state, "b") and book.after(state, "a") is None
    every = jde.RuleBook.every(["a", "b"], 3)
    state = every.after(every.start, "a")
    assert every.after(state, "b") is None
    assert every.after(every.after(state, "a"), "a") == every.start
    assert jde.RuleBook.every(["a"], 1).has_cycles()
    assert not jde.RuleBook("x", {"x": {"a": "y"}}).has_cycles()
    for start, name, rule in (("z", "a", "^start"), ("x", "", "^each name in moves")):
        with pytest.raises(ValueError, match=rule):
            jde.RuleBook(start, {"x": {name: "y"}})
    with pytest.raises(ValueError, match="name, all different"):
        jde.RuleBook.in_order(["a", "a"])
    rules = jde.RuleBook.freely(["slow", "fast"]).preceded_by(["check", "wide"])
    with pytest.raises(ValueError, match="no state may have the name '0 of 1 first'"):
        rules.preceded_by(["check"]).preceded_by(["wide"])


# --- Prices ---

PRICES = {"slow": 5, "fast": 2, "check": 3}


@pytest.mark.slow
def test_prices_reduce_the_budget_and_keep_the_guarantee():
    run = jde.AdaptiveRun(MENU, prices=PRICES, budget=12)
    assert (run.left, run.most("slow"), run.most("fast")) == (12, 2, 6)
    after = run.charge("slow").charge("check").charge("fast")
    assert (after.spent, after.left) == (10, 2)
    assert after.can("fast") and not after.can("check")
    with pytest.raises(ValueError, match="it costs 5, and 2 of the budget is left"):
        after.charge("slow")
    assert jde.AdaptiveRun.from_dict(after.to_dict()) == after
    lower, upper = run.epsilon_interval(delta=1e-5)
    assert lower < upper < lower + 1e-4
    assert after.epsilon(delta=1e-5) == run.epsilon(delta=1e-5) == upper
    # More than any fixed choice, less than all options together.
    fixed = [((SLOW, 2),), ((FAST, 6),), ((CHECK, 4),), ((FAST, 3), (CHECK, 2))]
    most = max(jde.epsilon(jde.compose(*one), delta=1e-5) for one in fixed)
    assert most <= upper + 1e-9
    below, above = run.delta_interval(epsilon=upper)
    assert below <= 1e-5 <= above * (1 + 1e-3)


@pytest.mark.slow
def test_extreme_options():
    assert WITHIN.epsilon(delta=1.0) == 0 and WITHIN.epsilon(delta=0.0) == np.inf
    assert WITHIN.delta(epsilon=np.inf) == 0
    bounds = {"a": jde.ApproximateDP(0.5, 1e-6), "b": jde.ApproximateDP(0.2)}
    bounded = priced(7, bounds, (3, 1))
    assert bounded.delta(epsilon=np.inf) == pytest.approx(2e-6, rel=1e-5)
    leaky = jde.compose((gaussian(2.1, rate=1.0), 1), (jde.ApproximateDP(0.0, 1e-4), 1))
    mixed = priced(1, {"a": gaussian(2.0, rate=1.0), "b": leaky}, (1, 1))
    for some, delta in ((bounded, 1e-6), (bounded, 0.0), (mixed, 1e-5)):
        assert some.epsilon(delta=delta) == np.inf
    nothing = jde.AdaptiveRun(MENU, prices=PRICES, budget=1)
    assert nothing.epsilon(delta=1e-5) == 0 and not nothing.can("fast")
    assert nothing.cost_of_adaptivity(delta=1e-5).ratio == 1
    bare = priced(2, {"a": gaussian(0.0), "b": SLOW}, (1, 1))
    assert bare.epsilon(delta=1e-5) == np.inf and bare.delta(epsilon=1.0) == 1
    # Losses of a million nats, too large for a lattice.
    few = priced(1, {"a": gaussian(1e-3, rate=1e-3), "b": SLOW}, (1, 1))
    with pytest.warns(UserWarning, match="the interval of the worst strategy"):
        assert few.epsilon(delta=1e-5) > 1e5 and few.delta(epsilon=1e3) >= 1e-3


def test_options_without_sampling_are_exact_and_small_deltas_close():
    options = {name: gaussian(noise, 1.0) for name, noise in (("a", 10.0), ("b", 20.0))}
    # Squared shifts 1/100 and 1/400: together shift 1 for every strategy.
    one = jde.delta(gaussian(1.0, 1.0), epsilon=0.5, num_steps=1)
    assert priced(400, options, (4, 1)).delta(epsilon=0.5) == pytest.approx(one, 1e-12)
    fails, steep = jde.ApproximateDP(0.1, 1e-14), jde.LaplaceRelease(1.73)
    for some in ({"a": SLOW, "b": fails}, {"a": gaussian(3.05, 0.0036), "b": steep}):
        assert np.diff(priced(9, some, (8, 6)).epsilon_interval(delta=1e-12)) < 1e-4


@pytest.mark.slow
def test_each_theorem_has_its_own_worst_strategy():
    # For "a", one theorem treats all 100 examples as drawn: shift 4. Another one gives
    # far less, so that "b", with shift 4/3, costs most.
    user = jde.WithoutReplacement(
        "user", size=10, population=10, population_is_exact=True
    )

    def step(examples, noise):
        return jde.GaussianStep(
            jde.MultistageSampling(user, examples),
            noise_multiplier=noise,
            clip_unit="example",
            privacy_unit="user",
            neighboring_relation="replace_one",
        )

    few = jde.Poisson("example", sampling_probability=0.01, population=100)
    one = jde.WithoutReplacement("example", size=1, population=1)
    options = {"a": step(few, 50.0), "b": step(one, 1.5)}
    run = priced(1, options, (1, 1))
    alone = jde.epsilon(options["b"], num_steps=1, delta=1e-5)
    assert run.epsilon(delta=1e-5) >= alone * (1 - 1e-9)


def test_blocks_are_charged_with_their_first_step():
    run = priced(11, TWO, (5, 3), blocks={"fast": 2})
    assert run.most("fast") == 6
    after = run.charge("fast")
    assert (after.spent, after.most("fast")) == (3, 5)
    after = after.charge("slow")
    assert (after.spent, after.left, after.most("fast")) == (8, 3, 3)
    after = after.charge("fast")
    assert after.spent == 8 and jde.AdaptiveRun.from_dict(after.to_dict()) == after
    two = priced(11, {"slow": SLOW, "fast": jde.compose((FAST, 2))}, (5, 3))
    assert run.epsilon(delta=1e-5) == two.epsilon(delta=1e-5)


def test_an_option_above_the_target_is_refused_with_its_cost():
    least = float(jde.epsilon(SLOW, num_steps=1, delta=1e-5))
    with pytest.raises(ValueError, match=rf"too small.*'slow'.* costs {least:.4g}"):
        jde.AdaptiveRun(TWO, epsilon=0.5 * least, delta=1e-5)


@pytest.mark.slow
def test_the_budget_for_a_target_is_the_largest_that_is_certified():
    run = priced(epsilon=0.8, delta=1e-5)
    assert run.epsilon(delta=1e-5) <= 0.8 < priced(run.budget + 2).epsilon(delta=1e-5)
    again = {**run.to_dict(), "epsilon": 0.8, "delta": 1e-5}
    with pytest.raises(ValueError, match="budget must be None with epsilon"):
        jde.AdaptiveRun.from_dict(again)
    del again["budget"]
    assert jde.AdaptiveRun.from_dict(again).budget == run.budget
    with pytest.raises(ValueError, match="permit no option"):
        priced(epsilon=0.01, delta=1e-7)


@pytest.mark.slow
def test_default_prices_follow_the_numbers_that_a_target_allows():
    options = {"slow": gaussian(3.0), "fast": gaussian(5.0)}
    run = jde.AdaptiveRun(options, epsilon=1.0, delta=1e-5)
    assert run.epsilon(delta=1e-5) <= 1.0
    cost = run.cost_of_adaptivity(delta=1e-5)
    assert 1 <= cost.ratio < 1.1 and 0 <= cost.held_back < 0.15
    for name, step in options.items():
        alone = int(jde.calibrate_num_steps(step, epsilon=1.0, delta=1e-5))
        assert 0.8 * alone < cost.numbers[name] <= alone


@pytest.mark.slow
def test_an_odometer_may_be_read_at_any_time():
    run = priced(12, odometer="margin", delta=1e-5)
    assert run.epsilon_so_far == 0 and run.odometer_interval()[1] <= 1e-5 * (1 + 1e-3)
    after = run.charge("slow")
    assert 0 < after.epsilon_so_far < after.charge("slow").epsilon_so_far
    assert after.odometer[12] > run.epsilon(delta=1e-5)
    assert jde.AdaptiveRun.from_dict(after.to_dict()) == after
    with pytest.raises(ValueError, match="odometer must be given"):
        _ = priced(12).epsilon_so_far


@pytest.mark.parametrize("odometer", ["margin", [0.0, 1e-12], [0.0, 5e-7]])
def test_an_odometer_may_be_far_smaller_than_the_lattice(odometer):
    """At a delta this large epsilon is 0, up to rounding."""
    option = jde.RandomizedResponse(0.9, 2)
    delta = 0.3 if odometer == "margin" else None
    run = priced(1, {"a": option}, (1,), odometer=odometer, delta=delta)
    assert (most := max(run.odometer)) < (1e-11 if odometer == "margin" else 6e-7)
    lower, upper = run.odometer_interval()  # the true answer: 0.55 against 0.45
    assert 0.1 - max(1e-9, 1.1 * most) < lower <= upper < 0.1 + 1e-9
    assert lower <= 0.55 - 0.45 * np.exp(most) <= upper and 0.1 <= upper + 1e-11


def test_an_adaptive_run_with_prices_may_be_an_option():
    options = {"run": WITHIN, "check": CHECK}
    run = jde.AdaptiveRun(options, quotas={"run": 2, "check": 3})
    assert jde.AdaptiveRun.from_dict(run.to_dict()) == run
    after = run.charge("check")
    assert after.taken_composed() == jde.compose((CHECK, 1))
    with pytest.raises(NotImplementedError, match="'run' was charged.*not known here"):
        after.charge("run").taken_composed()
    with pytest.raises(NotImplementedError, match="blocks of an option that is a run"):
        priced(9, options, (4, 1), blocks={"run": 2}).epsilon(delta=1e-5)
    # Quotas within quotas multiply.
    game = priced(2, {"a": jde.ApproximateDP(0.5), "b": jde.ApproximateDP(0.2)}, (2, 1))
    two, four = (jde.AdaptiveRun({"c": game}, quotas={"c": n}) for n in (2, 4))
    both = jde.AdaptiveRun({"c": two}, quotas={"c": 2}).delta(epsilon=0.5)
    assert both == pytest.approx(four.delta(epsilon=0.5), rel=1e-6)


def test_an_empty_option_is_skipped():
    nothing = priced(1)
    rules = jde.RuleBook("a", {"a": {"run": "b"}, "b": {"slow": "c"}})
    run = jde.AdaptiveRun({"run": nothing, "slow": SLOW}, rules=rules)
    lower, upper = run.epsilon_interval(delta=1e-5)
    assert lower <= jde.epsilon(SLOW, num_steps=1, delta=1e-5) <= upper < lower + 1e-3


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "must be given to end the run"),
        ({"prices": PRICES}, "prices need a budget"),
        ({"budget": 5}, "must be given to end the run"),
        ({"prices": {**PRICES, "slow": 0}, "budget": 5}, r"prices\['slow'\] must be"),
        ({"prices": {"slow": 1}, "budget": 5}, "prices must have every option"),
        ({"prices": PRICES, "budget": 5, "quotas": QUOTAS}, "None with quotas"),
        ({"prices": PRICES, "budget": 0}, "budget must be a whole number >= 1"),
        ({"prices": PRICES, "budget": 5, "epsilon": 1.0, "delta": 0.1}, "budget must"),
        ({"prices": PRICES, "epsilon": 1.0}, "needs a delta"),
        ({"prices": PRICES, "budget": 5, "delta": 1e-5}, "delta must be None"),
        ({"prices": PRICES, "budget": 5, "odometer": "margin"}, "needs a delta"),
        ({"prices": PRICES, "budget": 5, "odometer": [0.1]}, "list of 6 finite"),
        ({"quotas": QUOTAS, "odometer": [0.1]}, "odometer must be None"),
        ({"quotas": QUOTAS, "blocks": {"slow": 2}}, "blocks must be None"),
        ({"rules": jde.RuleBook("x", {"x": {"slow": "x"}})}, "do not end a run"),
    ],
)
def test_invalid_limits_of_runs_are_refused(given, match):
    with pytest.raises(ValueError, match=match):
        jde.AdaptiveRun(MENU, **given)


@pytest.mark.slow
def test_each_setting_equals_its_single_run():
    # No sampling, rates of another shape, and a worst strategy of rate 0.
    noises, rates = np.array([0.0, 1.5]), np.array([[0.1], [0.0]])
    run = priced(12, {"slow": gaussian(noises, rates), "fast": gaussian(3.0, rates)})
    assert run.shape == (2, 2)
    assert jde.AdaptiveRun.from_dict(run.to_dict()) == run
    deltas = np.array([1e-5, 1e-7])
    lower, upper = run.epsilon_interval(delta=deltas)
    value, back = run.epsilon(delta=deltas), run.delta(epsilon=1.0)
    for i, j in np.ndindex(2, 2):
        rate = float(rates[i, 0])
        slow, fast = gaussian(float(noises[j]), rate), gaussian(3.0, rate)
        one = priced(12, {"slow": slow, "fast": fast})
        at = float(deltas[j])
        assert one.epsilon_interval(delta=at) == (lower[i, j], upper[i, j])
        assert one.epsilon(delta=at) == value[i, j]
        assert one.delta(epsilon=1.0) == back[i, j]
    assert value[0, 0] == np.inf and value[1, 1] == 0 < value[0, 1]
    with pytest.raises(ValueError, match="options: .2, 2., delta: .3,."):
        run.epsilon(delta=[1e-5, 1e-6, 1e-7])
    with pytest.raises(ValueError, match=r"delta.*2\.0"):
        run.epsilon(delta=[1e-5, 2.0])


def test_questions_about_one_run_refuse_several_settings():
    two = gaussian([1.5, 2.0])
    run = priced(12, {"slow": two, "fast": gaussian(3.0)})
    for what, ask in {
        "charge": lambda: run.charge("slow"),
        "cost_of_adaptivity": lambda: run.cost_of_adaptivity(delta=0.1),
        "odometer": lambda: priced(12, run.options, odometer="margin", delta=1e-5),
        "epsilon": lambda: jde.AdaptiveRun({"a": two}, epsilon=1, delta=0.1),
    }.items():
        match = rf"{what} needs a run of one setting.*\(2,\)"
        with pytest.raises(ValueError, match=match):
            ask()


def test_rules_of_inner_quotas_have_no_lower_end():
    """Either option is allowed, not both: counting both is an upper bound."""
    either = jde.RuleBook("start", {"start": {"a": "end", "b": "end"}})
    options = {"a": jde.ApproximateDP(0.5), "b": jde.ApproximateDP(0.7)}
    inner = jde.AdaptiveRun(options, quotas={"a": 1, "b": 1}, rules=either)
    run = jde.AdaptiveRun({"run": inner}, quotas={"run": 1})
    true = jde.delta(options["b"], epsilon=0.3, num_steps=1)
    lower, upper = run.delta_interval(epsilon=0.3)
    assert lower <= true < upper
    lower, _ = run.epsilon_interval(delta=0.01)
    assert lower <= jde.epsilon(options["b"], delta=0.01, num_steps=1)
