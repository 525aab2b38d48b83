"""Runs that adapt: what may be chosen, what it costs, how it is written down."""

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


def test_quotas_cost_what_all_of_them_composed_cost():
    run = jde.AdaptiveRun(MENU, quotas=QUOTAS)
    every = jde.compose((SLOW, 20), (FAST, 3), (CHECK, 5))
    deltas = np.array([1e-7, 1e-5])
    np.testing.assert_array_equal(
        run.epsilon(delta=deltas), jde.epsilon(every, delta=deltas)
    )
    assert run.delta(epsilon=1.0) == jde.delta(every, epsilon=1.0)
    lower, upper = run.epsilon_interval(delta=1e-5)
    assert lower <= run.epsilon(delta=1e-5) <= upper
    assert run.delta_interval(epsilon=1.0) == jde.delta_interval(every, epsilon=1.0)


def test_a_charge_is_a_new_run_with_less_left_and_the_same_guarantee():
    run = jde.AdaptiveRun(MENU, quotas={"slow": 2, "fast": 1, "check": 0})
    after = run.charge("slow").charge("fast")
    assert run.left == {"slow": 2, "fast": 1, "check": 0} and not any(
        run.taken.values()
    )
    assert after.left == {"slow": 1, "fast": 0, "check": 0}
    assert after.taken == {"slow": 1, "fast": 1, "check": 0}
    assert (after.most("slow"), after.most("fast")) == (1, 0)
    assert after.can("slow") and not after.can("fast") and not run.can("check")
    assert after != run and after.epsilon(delta=1e-5) == run.epsilon(delta=1e-5)
    assert after.taken_composed() == jde.compose((SLOW, 1), (FAST, 1))
    with pytest.raises(ValueError, match=r"'fast' cannot be taken: its quota of 1"):
        after.charge("fast")
    with pytest.raises(ValueError, match="did you mean 'slow'"):
        run.charge("slwo")


def test_it_is_read_again_as_it_was_written():
    rules = jde.RuleBook.in_order(["slow", "fast", "check"])
    run = jde.AdaptiveRun(MENU, quotas=QUOTAS, rules=rules).charge("fast")
    again = jde.AdaptiveRun.from_dict(run.to_dict())
    assert again == run and hash(again) == hash(run)
    assert again.state == "fast" and not again.can("slow")
    assert pickle.loads(pickle.dumps(run)) == run


@pytest.mark.parametrize(
    "change",
    [
        {"taken": {"slow": 21}},
        {"quotas": {"slow": 1}},
        {"quotas": {**QUOTAS, "other": 1}},
        {"quotas": {**QUOTAS, "slow": -1}},
        {"state": "slow"},
        {"quota": QUOTAS},
    ],
)
def test_what_is_not_right_in_a_file_is_refused(change):
    written = jde.AdaptiveRun(MENU, quotas=QUOTAS).to_dict()
    with pytest.raises(ValueError):
        jde.AdaptiveRun.from_dict({**written, **change})


@pytest.mark.parametrize(
    ("other", "error", "match"),
    [
        (gaussian(1.0, neighboring_relation="zero_out"), ValueError, "neighboring_rel"),
        (jde.RenyiDP([2.0], [1.0]), NotImplementedError, "Rényi divergences alone"),
        (jde.ZeroConcentratedDP(0.1), NotImplementedError, "Rényi divergences alone"),
        (gaussian([1.0, 2.0]), ValueError, "one setting"),
        ("slow", TypeError, "must be a GaussianStep"),
        (
            jde.GaussianStep(
                jde.RandomAllocation("example", steps_per_epoch=10), noise_multiplier=1
            ),
            NotImplementedError,
            "only whole epochs",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(other, error, match):
    with pytest.raises(error, match=match) as caught:
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
    with pytest.raises(ValueError, match="start"):
        jde.RuleBook("z", {"x": {"a": "y"}})
    with pytest.raises(ValueError, match="different names"):
        jde.RuleBook.in_order(["a", "a"])
