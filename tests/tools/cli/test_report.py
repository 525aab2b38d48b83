"""``report``: a run's privacy in plain words."""

import dataclasses
import re
from typing import Any

import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.accountant.questions.gdp import advantage, true_positive_rate
from jaxdp_episodic.accountant.report.in_words import adaptive_in_words, report_in_words
from jaxdp_episodic.files.toml_file import to_toml
from jaxdp_episodic.tools import cli
from training_runs import PLAN, TINY

STEP = jde.GaussianStep(
    jde.MultistageSampling(
        jde.Poisson("patient", sampling_probability=0.01),
        jde.WithoutReplacement("record", size=1, population=2),
    ),
    noise_multiplier=1.0,
    privacy_unit="patient",
    clip_unit="record",
)
PATIENTS = {"version": 1, "num_steps": 500, "delta": 1e-5, "step": STEP.to_dict()}


@pytest.fixture
def said(tmp_path, capsys):
    """Runs the command on a file's text or table; returns its exit code and output."""

    def run(content):
        text = content if isinstance(content, str) else to_toml(content)
        (tmp_path / "run.toml").write_text(text, encoding="utf-8")
        code = cli.run(["report", str(tmp_path / "run.toml")])
        printed = capsys.readouterr()
        return code, " ".join((printed.out + printed.err).split())

    return run


def of(clip_unit="record", relation="add_remove"):
    """The report of the patients' request."""
    step = dataclasses.replace(STEP, clip_unit=clip_unit, neighboring_relation=relation)
    report = jde.privacy_report(step, num_steps=500, delta=1e-5, method="rdp")
    return report, " ".join(report_in_words(report).split())


def test_reports_of_requests_contain(said):
    code, words = said(PATIENTS | {"method": "rdp"})
    assert code == 0
    assert "This protects one patient: what the 500 steps" in words
    assert "with one `patient` more or less in the training data" in words
    assert "at delta 1e-05" in words
    assert "It holds if" in words and "Fresh samples" in words


def test_reported_odds_are_the_attackers_rounded_up():
    report, words = of()
    for level, epsilon in report.epsilon_by_level.items():
        step = dataclasses.replace(STEP, clip_unit="record", privacy_unit=level)
        same = jde.compose((step, 500))
        right = 50 + 50 * float(advantage(same, method="rdp"))
        found = 100 * float(
            true_positive_rate(same, false_positive_rate=0.01, method="rdp")
        )
        row = words.partition(f"| {level} | ")[2].split(" |")[:3]
        shown = [float(cell.strip(" |%")) for cell in row]
        for value, least in zip(shown, (epsilon, right, found), strict=True):
            assert least <= value < least + max(0.1, 1e-3 * least)


def test_the_report_explains_why_a_record_costs_more_than_its_patient():
    report, words = of()
    levels: Any = report.epsilon_by_level
    assert levels["record"] > 10 * levels["patient"]
    assert "Why one record costs more than one patient" in words
    assert "The sampling above the clip unit `record` may be visible" in words
    assert "If a `record` leaves, it is replaced" in words
    # It is absent if a patient is clipped as one unit.
    report, words = of("patient", "replace_one")
    levels = report.epsilon_by_level
    assert levels["record"] < levels["patient"] and "Why one" not in words
    assert "may be visible" not in words
    # Nor is an original, whose copies may be in several schools, compared with one.
    schools = jde.Poisson("a\n# B", sampling_probability=1.0), *STEP.design.schemes
    step = dataclasses.replace(
        STEP,
        sampling=jde.MultistageSampling(*schools),
        clip_unit="a\n# B",
        privacy_unit="original",
        people=jde.PersonBounds(tasks=2, classes=3, examples=2),
    )
    report = jde.privacy_report(step, num_steps=1, delta=0.01, method="rdp")
    assert report.epsilon > report.epsilon_by_level["a\n# B"]
    assert not re.search("Why one|\n# B", report_in_words(report))


def test_without_noise_the_report_says_that_nothing_is_hidden():
    step = jde.GaussianStep(
        jde.Poisson("record", sampling_probability=0.5), noise_multiplier=0.0
    )
    words = report_in_words(jde.privacy_report(step, num_steps=1, delta=1.0000012e-5))
    assert "Epsilon is infinite at delta 1.0000012e-05" in words
    assert "no 'record' is protected at all" in words


@pytest.mark.slow
def test_the_report_of_a_run_reads_its_data(said):
    code, words = said(TINY)
    assert code == 0
    assert "This protects one example: what the 3 steps" in words
    # Like the run's own statement: no epsilon if the default divisor is private.
    assert "epsilon is known" in words or "| class |" in words
    code, words = said(f"seed = 1\n{TINY}")
    assert code == 0 and words.startswith("**Not private**")
    code, words = said(TINY.replace("epsilon = 8.0", "epsilon = inf"))
    assert code == 0 and "trained without noise" in words


def test_a_config_that_training_refuses_is_refused(said):
    code, words = said(TINY.replace("shots = 1", "shots = 50"))
    assert code == 2 and "error: " in words and "shots must be less than" in words


@pytest.mark.slow
def test_the_report_of_a_plan_is_of_the_recommended_run(said):
    code, words = said(PLAN)
    assert code == 0 and "This protects one example" in words and "at delta" in words


def test_unanswerable_questions_are_refused(said):
    code, words = said("episode = 1")
    assert code == 2 and "plan: " in words
    code, words = said(PATIENTS | {"delta": None, "epsilon": 1.0})
    assert code == 2 and "a report needs a delta" in words
    code, words = said(PATIENTS | {"num_steps": [1, 2]})
    assert code == 2 and "a report needs one setting" in words
    assert said("version = 1")[0] == 2
    code, words = said(PLAN.partition("[train]")[0])
    assert code == 2 and "a plan without the table train recommends no run" in words


def a_budget(run, *others):
    return AdaptiveBudget((run, *others), 1e-5)


@pytest.mark.slow
def test_an_adaptive_run_is_reported_like_a_planned_one():
    """With a single option at a price the worst strategy is a composition."""
    step = jde.GaussianStep(
        jde.Poisson("record", sampling_probability=0.1), noise_multiplier=2.0
    )
    other = dataclasses.replace(step, noise_multiplier=4.0)
    menu = jde.AdaptiveRun(
        {"near": step, "far": other}, prices={"near": 2, "far": 1}, budget=40
    )
    quotas = jde.AdaptiveRun(
        {"near": step, "far": other}, quotas={"near": 20, "far": 0}
    )
    words = adaptive_in_words(a_budget(menu), ["A fact."])
    right, found = odds(words)
    # Twenty steps of one option are a strategy; the curve has few points.
    run = jde.compose((step, 20))
    least = (
        50 + 50 * advantage(run),
        100 * true_positive_rate(run, false_positive_rate=0.01),
    )
    assert least[0] <= right < least[0] + 1 and least[1] <= found < 1.1 * least[1]
    assert "| near | 2 | each record | 20 |" in words
    assert "| far | 4 | each record | 40 |" in words
    assert (
        "Choices: the steps were chosen by releases" in words and "* A fact." in words
    )
    exact = odds(adaptive_in_words(a_budget(quotas)))
    for value, bound in zip(exact, least, strict=True):
        assert bound <= value < bound + 0.1
    # The more expensive of two parts counts.
    held_out = jde.AdaptiveRun({"check": other}, quotas={"check": 1})
    both = adaptive_in_words(a_budget(quotas, held_out))
    assert odds(both) == exact and "Parts: with several budgets" in both


def odds(words):
    """The report's percentages: right answers, and detected changes."""
    said = " ".join(words.split())
    found = re.search(
        r"at most ([\d.]+) % of the answers .* at most ([\d.]+) % of", said
    )
    assert found is not None
    return float(found[1]), float(found[2])
