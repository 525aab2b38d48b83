"""Adaptive runs: steps are charged first, chosen once, and resumed unchanged."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest

import jaxdp_episodic as jde
from crash_rigs import ending
from jaxdp_episodic.accountant.questions.budget import BudgetExhaustedError
from jaxdp_episodic.accountant.report.in_words import budget_in_words
from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.config.training_adaptive import (
    NextWhenStalled,
    Released,
    ScoreThen,
    SpendRest,
    StopWhenStalled,
)
from jaxdp_episodic.trainer.data.people import Truncation
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.ledger import Ledger
from jaxdp_episodic.trainer.run.ledger_file import read_ledger
from jaxdp_episodic.trainer.run.mechanisms import check_apart
from jaxdp_episodic.trainer.run.report import privacy_statement
from jaxdp_episodic.trainer.run.run_files import read_log
from jaxdp_episodic.trainer.run.store import RunStore, create_store
from jaxdp_episodic.training import AdaptiveBudget, ClippingConfig, RuleError
from training_runs import (
    CHECK,
    DELTA,
    LOUD,
    OPTIONS,
    QUIET,
    adaptive,
    adaptive_budget,
    assert_same,
    by_parity,
    classes,
    plain_trainer,
    score_on,
    tree_step,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run, folder = adaptive(), tmp_path_factory.mktemp("whole")
    run.train(folder)
    return run, folder


def test_a_run_takes_what_the_rule_chooses_and_reports_what_is_left(whole, capsys):
    run, folder = whole
    chosen = run.ledger.options
    assert len(chosen) == 8 and set(chosen) == set(OPTIONS)
    content = read_ledger(folder / run_files.STORE)
    assert content.charged == 8 and content.has_ended and content.is_closed
    assert content.adaptive_taken.taken == run.ledger.now.taken
    records = read_log(folder / run_files.STORE)
    assert [r["step"] for r in records] == list(range(9))
    assert [r["option"] for r in records[1:]] == chosen
    # The guarantee is constant; what is left changes.
    assert {r["epsilon"] for r in records} == {run.budget.epsilon}
    assert records[0]["left"] == {"loud": 4, "quiet": 3, "check": 3}
    assert sum(records[-1]["left"].values()) == 10 - 8
    scores = [r["score"] for r in records if "score" in r]
    assert len(scores) == chosen.count("check") == len(run.scores) > 0
    assert [r["option"] for r in records if "score" in r] == ["check"] * len(scores)
    assert cli.run(["epsilon", "--ledger", str(folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["epsilon"] == run.budget.epsilon
    assert answer["taken"] == run.ledger.now.taken and answer["has_ended"]


def test_disjoint_parts_of_the_data_are_charged_separately():
    runs = (
        jde.AdaptiveRun({"loud": LOUD, "quiet": QUIET}, quotas={"loud": 4, "quiet": 3}),
        jde.AdaptiveRun({"check": CHECK}, quotas={"check": 3}),
    )
    apart = AdaptiveBudget(runs, DELTA, checks=("check",))
    each = [float(run.epsilon(delta=DELTA)) for run in runs]
    assert apart.epsilon == max(each) < adaptive_budget().epsilon
    assert AdaptiveBudget.from_dict(apart.to_dict()).to_dict() == apart.to_dict()
    # The held-out data are the training data, so the parts overlap.
    wide = dataclasses.replace(CHECK.design, num_classes=30)
    check = dataclasses.replace(CHECK, sampling=wide)
    runs = (runs[0], jde.AdaptiveRun({"check": check}, quotas={"check": 3}))
    plan = AdaptiveBudget(runs, DELTA, checks=("check",))
    with pytest.raises(ValueError, match="got all of the training data"):
        adaptive(plan=plan, checks={"check": score_on(classes(), check)})


def pictures(seed, first=0, each=6):
    """Twelve classes of examples that are long enough to be recognized."""
    features = np.random.default_rng(seed).normal(size=(12 * each, 64))
    features[::6] = 0.0  # blank examples identify nobody
    names = np.repeat([f"class {first + i:02}" for i in range(12)], each)
    return ExampleTable.from_records(features, units={"class": names})


def test_a_protected_unit_in_both_parts_is_not_counted_apart():
    """Classes are known by their names, examples by their content."""
    check = dataclasses.replace(CHECK, privacy_unit="class")
    of_classes = score_on(pictures(1), check, normalizer=4.0)
    check_apart("check", of_classes, pictures(2, first=12))
    found = "got 1 'class' units in both, such as 'class 11'"
    with pytest.raises(ValueError, match=found):
        check_apart("check", of_classes, pictures(2, first=11))
    held_out, trained = pictures(1), pictures(2)
    check_apart("check", score_on(held_out), trained)  # other drawings of the classes
    features = held_out.features.copy()
    features[35] = trained.features[41]
    both = score_on(held_out.with_features(features))
    with pytest.raises(ValueError, match="got 1 examples .* such as row 35"):
        check_apart("check", both, trained)
    # Two of many drawings may be equal: a warning says so, and the run continues.
    held_out, trained = pictures(1, each=100), pictures(2, each=100)
    features = held_out.features.copy()
    features[1] = trained.features[2]
    with pytest.warns(UserWarning, match="has 1 examples .* row 1: by chance"):
        check_apart("check", score_on(held_out.with_features(features)), trained)


# --- Interrupted, killed, resumed ---


def test_the_rule_is_not_asked_again_about_a_charged_release(tmp_path, whole):
    """Resumed runs equal undisturbed ones: see test_crashes.py."""
    asked = []

    def counting(released):
        asked.append(released.number)
        return by_parity(released)

    run, again = adaptive(counting), adaptive(counting)
    call = 1 + whole[0].ledger.options.index("check")
    with ending(RunStore, "release", call):
        run.train(tmp_path, checkpoint_every=3)
    assert again.resume(tmp_path) == call - 1
    again.train(tmp_path, checkpoint_every=3)
    assert_same(again, whole[0])
    assert asked == list(range(9))  # once for each release, and to end


def test_without_a_seed_an_interrupted_release_is_dropped_and_stays_charged(tmp_path):
    run = adaptive(lambda released: "check", seed=None)
    with ending(RunStore, "release", 2):
        run.train(tmp_path)
    again = adaptive(lambda released: "check", seed=None)
    with pytest.warns(UserWarning, match="step 2 was charged and interrupted"):
        assert again.resume(tmp_path) == 2
    with pytest.raises(RuleError, match="'check' .* used up or not permitted now"):
        again.train(tmp_path)
    assert [score.release for score in again.scores] == [1, 3]
    assert again.ledger.now.taken["check"] == 3


def test_a_chosen_end_is_final(tmp_path):
    other = adaptive(lambda released: 1 / 0)
    with pytest.raises(RuleError):
        other.train(tmp_path)
    run = adaptive(lambda released: None)
    run.resume(tmp_path)
    run.train(tmp_path)
    assert run.ledger.has_ended and run.num_steps_taken == 0
    with pytest.raises(Exception, match="chosen to end"):
        run.step()
    with pytest.raises(FileExistsError, match="the run has gone on"):
        other.train(tmp_path)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda released: 1 / 0, "rule raised ZeroDivisionError after 0 releases"),
        (lambda released: "fast", r"one of \['check', 'loud', 'quiet'\].*'fast'"),
        (lambda released: 3, "got 3"),
        (lambda released: released.data, "AttributeError"),
    ],
)
def test_a_bad_rule_is_refused_before_anything_is_charged(tmp_path, rule, message):
    run = adaptive(rule)
    with pytest.raises(RuleError, match=message):
        run.train(tmp_path)
    assert run.num_steps_charged == 0
    assert read_ledger(tmp_path / run_files.STORE).charged == 0


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("step", "rule raised RuntimeError.* what a step calls"),
        ("train", "must take no steps of its run, took some aft"),
    ],
)
def test_a_rule_cannot_step_its_run(act, message, tmp_path):
    choices = iter([lambda: run.step() and "quiet", lambda: "loud"])
    run = adaptive(lambda released: next(choices)())
    with pytest.raises(RuleError, match=message):
        run.step() if act == "step" else run.train(tmp_path)


def test_an_exception_in_a_rule_loses_nothing(tmp_path, whole):
    def tired(released):
        if released.number == 4:
            raise OSError("no network")
        return by_parity(released)

    with pytest.raises(RuleError, match="OSError after 4 releases: no network"):
        adaptive(tired).train(tmp_path)
    run = adaptive()
    with pytest.warns(UserWarning, match="rule: tired in the checkpoint"):
        assert run.resume(tmp_path) == 4
    run.train(tmp_path)
    assert_same(run, whole[0])


def test_another_budget_is_another_run(tmp_path, whole):
    _, folder = whole
    other = adaptive(plan=adaptive_budget((4, 3, 2)))
    with pytest.raises(ValueError, match="another run"):
        other.resume(folder)
    other = adaptive(checks={"check": score_on(classes(num_classes=12, seed=6))})
    with pytest.raises(ValueError, match="another run: checks.check.data"):
        other.resume(folder)
    run = adaptive(StopWhenStalled(train="loud", every=2))
    with pytest.warns(UserWarning, match="rule"):
        run.resume(folder)


def test_reading_a_ledger_does_not_search_for_a_budget():
    described = adaptive_budget().to_dict()
    described["runs"][0] |= {"epsilon": 1.0, "delta": 1e-5}
    with pytest.raises(ValueError, match="not targets epsilon"):
        AdaptiveBudget.from_dict(described)
    for wrong in ({}, {**described, "runs": {}}, {**described, "first": ["no"]}, 3):
        with pytest.raises((TypeError, ValueError)):
            AdaptiveBudget.from_dict(wrong)


def quotas_of(*steps, apart=False):
    """Runs of steps, of which the second one may be of other data."""
    named = dict(zip(("step", "check"), steps, strict=False))
    pairs = [{name: step} for name, step in named.items()] if apart else [named]
    return [jde.AdaptiveRun(one, quotas=dict.fromkeys(one, 2)) for one in pairs]


OF_PEOPLE = tree_step(
    "class",
    {"class": 0.1, "example": 0.5},
    noise_multiplier=4.0,
    privacy_unit="person",
    people=jde.PersonBounds(classes=2, examples=1),
)
WITH_COPIES = dataclasses.replace(
    OF_PEOPLE, privacy_unit="original", people=jde.PersonBounds(examples=1, classes=4)
)
COUNTED = dataclasses.replace(QUIET, population=classes().population)
ZEROED = dataclasses.replace(QUIET, neighboring_relation="zero_out")


@pytest.mark.parametrize(
    ("runs", "checks", "error", "message"),
    [
        (quotas_of(COUNTED), (), ValueError, "uses private sizes"),
        *(
            (
                quotas_of(step, step, apart=True),
                ("check",),
                NotImplementedError,
                "people and copies of an",
            )
            for step in (OF_PEOPLE, WITH_COPIES)
        ),
        (quotas_of(QUIET) * 2, (), ValueError, "each option must be in one run"),
        (quotas_of(QUIET), ("step",), ValueError, "got checks only"),
        (
            quotas_of(QUIET, ZEROED, apart=True),
            ("check",),
            ValueError,
            "same neighboring_relation",
        ),
    ],
)
def test_invalid_options_are_refused(runs, checks, error, message):
    with pytest.raises(error, match=message):
        AdaptiveBudget(tuple(runs), DELTA, checks=checks)


def test_option_names_must_not_be_keys_of_a_runs_description():
    run = jde.AdaptiveRun({"delta": LOUD}, quotas={"delta": 2})
    plan = AdaptiveBudget((run,), DELTA)
    with pytest.raises(ValueError, match="options must not be named .* got 'delta'"):
        adaptive(plan=plan, checks={})


@pytest.mark.parametrize(
    ("first", "quotas", "message"),
    [
        # If resumed, "loud" would be charged and another step be taken.
        (("loud",), (2, 3, 3), "'loud' is in first 1 time.* got 2"),
        (("loud", "loud"), (1, 3, 3), "'loud' is in first 2 time.* got 1"),
        (("check",), (4, 3, 1), "checks must not name 'check'"),
    ],
)
def test_first_options_cannot_be_chosen_again(first, quotas, message):
    with pytest.raises(ValueError, match=message):
        adaptive_budget(quotas, first=first)
    run = jde.AdaptiveRun(
        {"loud": LOUD, "quiet": QUIET}, prices={"loud": 1, "quiet": 3}, budget=9
    )
    with pytest.raises(ValueError, match="must have this quota, got none"):
        AdaptiveBudget((run,), DELTA, first=("loud",))
    held = adaptive_budget((1, 3, 3), first=("loud",)).charge("loud")
    assert not held.can("loud") and held.before == (LOUD,)


def test_composed_with_other_ledgers_it_is_charged_its_quotas(tmp_path, whole, capsys):
    _, folder = whole
    other = plain_trainer(num_steps=2, step=QUIET)
    other.train(tmp_path / "other")
    paths = [str(f / run_files.STORE) for f in (folder, tmp_path / "other")]
    asked = [word for path in paths for word in ("--ledger", path)]
    assert cli.run(["epsilon", *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    owed = jde.compose((LOUD, 4), (QUIET, 3 + 2), (CHECK, 3))
    assert found["epsilon"] == pytest.approx(jde.epsilon(owed, delta=DELTA))
    copy = tmp_path / "copy"
    copy.write_bytes((folder / run_files.STORE).read_bytes())
    assert cli.run(["epsilon", "--ledger", paths[0], "--ledger", str(copy)]) == 2
    assert "copies of one adaptive run" in capsys.readouterr().err


# --- Prices ---


def test_budget_saved_on_one_option_is_left_for_another(tmp_path):
    run = jde.AdaptiveRun(
        {"loud": LOUD, "quiet": QUIET},
        prices={"loud": 1, "quiet": 4},
        budget=12,
        odometer=[0.0, *[2.0] * 12],
    )
    checks = jde.AdaptiveRun({"check": CHECK}, quotas={"check": 3})
    plan = AdaptiveBudget((run, checks), DELTA, checks=("check",))
    alone = [jde.epsilon(LOUD, num_steps=12, delta=DELTA), checks.epsilon(delta=DELTA)]
    assert max(alone) <= plan.epsilon
    ledger, path = Ledger(plan), tmp_path / run_files.STORE
    create_store(path, plan, is_seeded=False)
    with contextlib.closing(RunStore(path)) as store, ledger.writing_to(store, {}):
        for name in ("loud", "quiet", "check", "loud", "quiet"):
            ledger.choose(name)
            ledger.charge()
        with pytest.raises(BudgetExhaustedError, match="'quiet' is used up or"):
            ledger.choose("quiet")
    content = read_ledger(path)
    assert content.adaptive_taken.runs[0].spent == 10
    said = " ".join(text for _, text in budget_in_words(ledger.now))
    assert "10 of 12 spent" in said and "so far at most epsilon 2," in said
    with pytest.raises(NotImplementedError, match="only adaptive runs of quotas"):
        content.groups_owed()


def test_the_report_names_other_releases_and_what_was_left_out():
    bounds = jde.PersonBounds(classes=2, examples=1)
    how = {
        "clipping": ClippingConfig(quantile=0.3),
        "truncation": Truncation(
            bounds=bounds, people=7, people_cut=3, examples_kept=19, examples_dropped=41
        ),
    }
    own, released = (
        privacy_statement(adaptive_budget(), for_release=for_release, **how)
        for for_release in (False, True)
    )
    words = "The run released the parameters and the clip norm after every step"
    for said in (own, released):
        assert "a norm that follows the 0.3 quantile of their norms" in said
        assert words in said
        assert "within bounds, in at most 2 classes" in said
    assert "41" in own and "41" not in released  # private counts


def rounds(scores, options=("a", "b"), **how):
    """The choices of a built-in rule for these successive scores."""
    rule = NextWhenStalled(options=options, every=1, **how)
    seen, taken = [], {"a": 0, "b": 0, "check": 0}
    waiting, last = list(scores), None
    for number in range(40):
        left = {"a": 9, "b": 9, "check": len(waiting)}
        last = rule(Released(number, {}, tuple(seen), dict(taken), left, last))
        taken[last] += 1
        if last == "check":
            seen.append(ScoreThen(number, "check", waiting.pop(0), 0.1))
        elif not waiting:
            return last
    raise AssertionError("it does not end")


def test_built_in_rules_detect_a_stall():
    assert rounds([0.1, 0.2, 0.3]) == "a"
    assert rounds([0.1, 0.2, 0.2]) == "b"
    assert rounds([0.1, 0.3, 0.2, 0.4], patience=2) == "a"
    assert rounds([0.1, 0.3, 0.2, 0.3], patience=2) == "b"
    assert rounds([0.1, 0.25], margin=1.0) == "a"
    assert rounds([0.1, 0.19], margin=1.0) == "b"
    rest = SpendRest(first="a", number=2, rest="b")
    states = [({"a": 0, "b": 0}, 9), ({"a": 2, "b": 0}, 9), ({"a": 1, "b": 0}, 0)]
    found = [
        rest(Released(0, {}, (), taken, {"a": left, "b": 5}, None))
        for taken, left in states
    ]
    assert found == ["a", "b", "b"]
    assert rest(Released(0, {}, (), {"a": 2, "b": 5}, {"a": 7, "b": 0}, "b")) is None
