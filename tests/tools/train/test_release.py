"""Releases hold no count of private units, and their statements are true."""

import dataclasses
import json
import warnings

import pytest
from rich.console import Console

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions.budget import (
    PrivacyBudget,
    plan_budget,
    public_budget,
)
from jaxdp_episodic.tools.train.run import _shown_warnings, run_training
from jaxdp_episodic.trainer.config.training_config import read_config
from jaxdp_episodic.trainer.config.training_parts import StartConfig, statistics_steps
from jaxdp_episodic.trainer.run.report import markdown_report, privacy_statement
from training_runs import classes, grouped_step, trainer, tree_step

TASKS = """
version = 1
epsilon = 8.0
delta = 1e-5
num_steps = 2
l2_clip_norm = 0.5
normalizer = 30
[data]
type = "Sinusoids"
num_tasks = 777
points = 40
[step]
clip_unit = "task"
privacy_unit = "task"
[step.sampling]
type = "MultistageSampling"
levels = [
  { type = "Poisson", name = "task", sampling_probability = 0.04 },
  { type = "WithoutReplacement", name = "point", size = 20 },
]
[learner]
kind = "maml"
shots = 10
inner_steps = 1
loss = "squared_error"
[model]
kind = "mlp"
channels = [4]
"""
POINTS = TASKS.replace('privacy_unit = "task"', 'privacy_unit = "point"').replace(
    "normalizer = 30\n", ""
)


def released(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    result = run_training(read_config(path), tmp_path / "out", console=Console())
    release = tmp_path / "out" / "release"
    texts = {p.name: p.read_text() for p in release.iterdir() if p.suffix != ".npz"}
    return result, texts, (tmp_path / "out" / "report.md").read_text()


pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def hardened(undrawn, tmp_path_factory):
    """A run on public sizes with discrete noise."""
    text = POINTS.replace("size = 20 }", "size = 20, population = 40 }")
    return released(tmp_path_factory.mktemp("hardened"), 'noise = "discrete"\n' + text)


@pytest.mark.slow
def test_the_number_of_protected_units_is_not_released(tmp_path):
    """Neither the count nor the mean size of a draw."""
    result, texts, report = released(tmp_path, TASKS)
    expected = result.trainer.sampler.expected_units
    everything = "".join(texts.values())
    assert expected == pytest.approx(777 * 0.04)
    for number in ("777", f"{expected:g}", "mean units"):
        assert number not in everything
    assert "mean units" in report
    assert json.loads(texts["run.json"])["steps"] == 2  # depends on public facts only
    assert "one `task` more or less" in texts["privacy.md"]


def sizes(numbers, *levels):
    return jde.Population.from_sizes(
        numbers, level_names=levels or ("class", "example")
    )


def test_the_same_holds_with_a_population():
    """With a population in the step, only the report has the counts."""
    bounds = {"privacy_unit": "task", "population": sizes([40] * 777, "task", "point")}
    step = tree_step("task", {"task": 0.04, "point": (20,)}, **bounds)
    budget = plan_budget(step, epsilon=8.0, delta=1e-5, num_steps=2)
    view = public_budget(budget)
    assert view is not None and view.step.population is None
    assert "777" in privacy_statement(budget, 2)
    assert "777" not in privacy_statement(budget, 2, for_release=True)


def test_a_step_that_alone_costs_nothing_may_rest_on_private_sizes():
    """Its epsilon is 0 for all sizes, but private ones calibrated its noise."""

    def view(bound):
        how = {"noise_multiplier": 20.0, "population": sizes([20] * 50)}
        levels = {"class": 1e-3, "example": (4, bound)}
        step = tree_step("example", levels, privacy_unit="example", **how)
        budget = PrivacyBudget(step, 1.0, 1e-5, 10, 10)
        assert budget.spent(1) == 0
        return public_budget(budget)

    assert view(10) is None
    assert view(20) is not None


def test_statistics_alone_rest_on_no_private_sizes():
    """Statistics use everybody, so the sizes for the other step are not used."""
    how = {"privacy_unit": "example", "population": sizes([4321])}
    step = tree_step("class", {"class": 0.1, "example": (4,)}, **how)
    everybody = statistics_steps(
        ("class", "example"),
        StartConfig(kind="mixed"),
        privacy_unit="example",
        neighboring_relation="add_remove",
    )

    def budget(steps):
        before = [(one, 0.5) for one in steps]
        return plan_budget(step, epsilon=1.0, delta=1e-5, num_steps=0, before=before)

    planned = budget(everybody)
    text = privacy_statement(planned, planned.num_steps, for_release=True)
    assert "must not be published" not in text and "4321" not in text
    sized = [dataclasses.replace(s, population=step.population) for s in everybody[:1]]
    assert public_budget(dataclasses.replace(planned, before=tuple(sized))) is None


@pytest.mark.parametrize(
    ("relation", "share"), [("add_remove", 1.0), ("replace_one", 0.5)]
)
def test_the_stated_noise_of_statistics_is_what_is_added(relation, share):
    (step,) = statistics_steps(
        ("class", "example"),
        StartConfig(kind="mean"),
        privacy_unit="example",
        neighboring_relation=relation,
    )
    step = dataclasses.replace(step, noise_multiplier=8.0)
    budget = PrivacyBudget(step, 1.0, 1e-5, 1, 1, (step,))
    text = privacy_statement(budget, 1)
    assert f"standard deviation {8 * share**0.5:.5g} for each example" in text
    # Nobody takes the noise multiplier 8 of the report below for another noise.
    assert ("multiplier below is sqrt(2) times the standard" in text) == (share < 1)


def test_with_people_the_counts_of_examples_are_private():
    bounds = jde.PersonBounds(examples=1, classes=1)
    how = {"privacy_unit": "person", "people": bounds, "population": sizes([4321])}
    step = tree_step("class", {"class": 0.1, "example": (4,)}, **how)
    text = privacy_statement(PrivacyBudget(step, 1.0, 1e-5, 1, 1), 1, for_release=True)
    assert "one `person` more or less" in text and "4321" not in text
    assert "How many `example` units" in text


@pytest.mark.slow
def test_what_was_computed_from_private_sizes_is_not_released(tmp_path):
    """Noise calibrated to private sizes reveals them; so does epsilon along the run."""
    result, texts, report = released(tmp_path, POINTS)
    assert "must not be published" in " ".join(report.split())
    noise = result.trainer.budget.step.noise_multiplier
    everything = "".join(texts.values())
    for number in (f"{noise:.5g}"[:5], 'epsilon spent"', "777", "mean units"):
        assert number not in everything
    assert texts["log.jsonl"] == ""
    assert "rest on public facts alone" in texts["privacy.md"]
    assert json.loads(texts["run.json"]).keys() == {
        "target",
        "noise",
        "clip norm",
        "protected",
        "clipped",
        "stage",
    }


def test_results_from_public_sizes_are_released(hardened):
    """Here for a run with discrete noise."""
    result, texts, _ = hardened
    facts = json.loads(texts["run.json"])
    assert facts["noise"] == "discrete"
    words = " ".join(texts["privacy.md"].split())
    assert "discrete Gaussian noise of" in words and "are whole numbers" in words
    assert facts["mean units a step"] == pytest.approx(777 * 0.04)  # tasks are public
    assert facts["noise multiplier"] == result.trainer.budget.step.noise_multiplier
    assert len(texts["log.jsonl"].splitlines()) == 3


def test_no_epsilon_where_the_divisor_is_private(hardened):
    """The default divisor is 0.04 times the number of tasks, which is private."""
    result, texts, report = hardened
    for page in (texts["privacy.md"], report):
        assert "task   not covered: the divisor was the mean number" in page
    budget = result.trainer.budget
    assert "the divisor" not in privacy_statement(budget, 2)  # a public guess


def test_a_large_delta_is_warned_of():
    data = classes()  # 180 examples
    with pytest.warns(UserWarning, match="delta=0.1 times 180 protected units"):
        trainer(data=data, step=grouped_step(data), delta=0.1)


def test_the_command_shows_warnings(capsys):
    """Warnings of the library and of its callers are printed once each."""
    with _shown_warnings(Console()):
        for _ in range(2):
            warnings.warn("delta=0.1 times 800 protected units", stacklevel=1)
    printed = " ".join(capsys.readouterr().out.split())
    assert printed == "warning: delta=0.1 times 800 protected units"


def test_epsilons_beside_scores_are_rounded_up():
    score = {"name": "accuracy", "mean": 0.5, "low": 0.4, "high": 0.6}
    record = {"step": 1, "epsilon": 1.00002, "held_out": {"test": score}}
    shown = {"title": "a", "facts": {}, "statement": "", "picture": None}
    assert "| 1 | 1.001 |  | test |" in markdown_report([record], **shown)
