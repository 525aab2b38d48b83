"""Adaptive runs from a config: how they are built, refused and run."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from jaxdp_episodic.accountant.describe.runs import RuleBook
from jaxdp_episodic.accountant.questions.adaptive import AdaptiveRun
from jaxdp_episodic.accountant.questions.adaptive_budget import AdaptiveBudget
from jaxdp_episodic.audit import training_of_config
from jaxdp_episodic.files.toml_file import read_toml
from jaxdp_episodic.tools.train.run import run_training
from jaxdp_episodic.tools.train.search import read_search
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.assemble import Tables, assembled, budget_of
from jaxdp_episodic.trainer.run.ledger_file import read_ledger
from training_runs import flat_step

ROOT = Path(__file__).resolve().parents[3]


def described():
    """The demo's adaptive config, with a few classes and no features."""
    config = read_toml(ROOT / "configs" / "demo_adaptive.toml")
    config |= {
        "data": {"type": "Glyphs", "small": True},
        "num_steps": 9,
        "features": {},
    }
    config["start"] = {"kind": "mean"}
    config["step"]["sampling"] |= {"num_classes": 40, "ways": 4}
    config["adaptive"]["check"]["sampling"] |= {"num_classes": 8, "ways": 4}
    config["adaptive"]["check"]["number"] = 2
    config["adaptive"]["rule"]["every"] = 3
    config["model"]["embedding"] = 4
    config["evaluation"] |= {"num_episodes": 20, "queries": 2}
    return config


def config_of(changed=None, **changes):
    return TrainingConfig.from_dict(
        {"type": "TrainingConfig", **(changed or described()), **changes},
        where="config",
    )


@pytest.mark.slow
def test_the_demo_that_stops_when_it_stalls(tmp_path):
    config = config_of()
    assert TrainingConfig.from_dict(config.to_dict()) == config
    result = run_training(config, tmp_path)
    budget = result.trainer.ledger.now
    assert result.epsilon == budget.epsilon == pytest.approx(8, rel=1e-6)
    assert budget.taken["statistic 1"] == 1 and budget.taken["check"] >= 1
    content = read_ledger(tmp_path / run_files.STORE)
    assert content.adaptive_taken.taken == budget.taken and content.has_ended
    statement = (tmp_path / "release" / "privacy.md").read_text()
    assert "guarantee    epsilon 8 at delta 1e-05" in statement
    assert "it does not change" in statement and "Parts: " in statement
    assert "Fixed in advance" not in statement
    assert "episodes of `check` are the same each time" in statement
    released = (tmp_path / "release" / "log.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in released]
    assert {record["epsilon"] for record in records} == {budget.epsilon}
    # Scores without noise choose nothing, and are not released.
    assert all(
        record.keys().isdisjoint({"private", "held_out", "stages"})
        for record in records
    )
    assert sum("score" in record for record in records) == budget.taken["check"]


@pytest.mark.slow
def test_scores_that_share_the_budget_leave_less_for_the_steps(tmp_path):
    """The options' noise multipliers are one number times their factors."""

    def noises(**changes):
        config = described()
        config["adaptive"]["check"] |= changes
        trainer, *_ = assembled(config_of(config), Tables(config_of(config), None))
        assert trainer.budget.epsilon == pytest.approx(8, rel=1e-6)
        options = trainer.budget.options
        return [float(options[name].noise_multiplier) for name in ("step", "check")]

    apart, shared = noises(), noises(apart=False, share=0.1)
    assert apart[0] < shared[0] and apart[1] < shared[1]


def test_rules_permit_first_options_once():
    prices = {"statistic": 1, "loud": 2, "quiet": 3}
    options = dict.fromkeys(prices, flat_step(noise_multiplier=4.0, rate=0.5))

    def budget(rules):
        run = AdaptiveRun(options, prices=prices, budget=7, rules=rules)
        return AdaptiveBudget(run, 1e-5, ("statistic",))

    rules = RuleBook.freely(["loud", "quiet"])
    begun = budget(rules.preceded_by(["statistic"]))
    assert begun.left == {"statistic": 1, "loud": 3, "quiet": 2}
    assert begun.can("statistic") and not begun.can("quiet")
    after = begun.charge("statistic")
    assert after.left == {"statistic": 0, "loud": 3, "quiet": 2} and after.can("quiet")
    assert AdaptiveBudget.from_dict(after.to_dict()).left == after.left
    with pytest.raises(ValueError, match="rules must allow only 'statistic'"):
        budget(RuleBook.freely(list(prices)))
    moves = {"a": {"statistic": "b"}, "b": {"quiet": "b", "statistic": "b"}}
    with pytest.raises(ValueError, match="options of first again"):
        budget(RuleBook("a", moves))


@pytest.mark.slow
def test_a_users_rule_chooses_at_prices_after_the_statistics(tmp_path):
    config, asked = described(), []
    config["num_steps"] = 3
    config["start"]["share"] = 0.2
    config["adaptive"]["options"] = {"loud": {"noise": 1.5}, "quiet": {"noise": 1.0}}
    del config["adaptive"]["rule"]

    def rule(released):
        asked.append(sorted(released.left))
        if len(asked) < 4:
            return ("loud", "check", "loud")[len(asked) - 1]
        return "quiet" if released.left["quiet"] else None

    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    result = run_training(config_of(config), tmp_path, console=console, rule=rule)
    assert "gradient steps" not in console.file.getvalue()  # scores are none
    run, ledger = result.trainer.budget.runs[0], result.trainer.ledger
    assert run.prices["statistic 1"] == 1 and 7.5 < run.epsilon(delta=1e-5) <= 8.0
    assert asked[0] == ["check", "loud", "quiet", "statistic 1"]
    assert ledger.options[:4] == ["statistic 1", "loud", "check", "loud"]
    assert set(ledger.options[4:]) <= {"quiet"} and result.epsilon <= 8
    content = read_ledger(tmp_path / run_files.STORE)
    assert content.adaptive_taken.taken == ledger.now.taken
    statement = (tmp_path / "release" / "privacy.md").read_text()
    (row,) = [row for row in statement.splitlines() if row.startswith("| statistic 1")]
    assert row.endswith("| 1 |") and "(0 left)" not in statement


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("adaptive", {"rule": {"type": "StopWhenStalled", "check": "no"}}, "got 'no'"),
        ("adaptive", {"options": {"check": {}}}, "none named 'check'"),
        ("adaptive", {"options": {"a": {"most": 1}, "b": {}}}, "for all options or"),
        ("adaptive", {"options": {"step": {"most": 3}}}, "num_steps must be .* 3, go"),
        ("adaptive", {"only_lower": True}, "only_lower is for options with prices"),
        ("check", {"share": 0.5}, "left out with apart=true"),
        ("check", {"split": "all"}, "apart must be false with .* split='all'"),
        ("evaluation", {"without_noise": True}, "must be false with adaptive"),
        ("evaluation", {"drop_duplicates": True}, "must be false with adaptive.check"),
        ("learner", {"kind": "plda"}, "must not be given|runs of gradient steps"),
    ],
)
def test_bad_configs_are_refused(part, changes, message):
    config = described()
    table = config["adaptive"]["check"] if part == "check" else config[part]
    table |= changes
    with pytest.raises(ValueError, match=message):
        config_of(config)


def test_a_missing_split_names_the_check():
    config = described()
    config["adaptive"]["check"]["split"] = "valid"
    made = config_of(config)
    with pytest.raises(ValueError, match="adaptive.check: split must be .*'valid'"):
        budget_of(made, Tables(made, None).load)


def test_a_run_has_exactly_one_rule_if_it_adapts(tmp_path):
    def train(config, rule):
        run_training(config_of(config), tmp_path, rule=rule)

    config, rule = described(), lambda released: None
    with pytest.raises(ValueError, match="exactly one of adaptive.rule .* got both"):
        train(config, rule)
    del config["adaptive"]["rule"]
    with pytest.raises(ValueError, match="exactly one of adaptive.rule .* got neither"):
        train(config, None)
    del config["adaptive"]
    with pytest.raises(ValueError, match="rule is for a config with adaptive"):
        train(config, rule)


def test_commands_for_plans_refuse_adaptive_runs():
    with pytest.raises(NotImplementedError, match="adaptive has no plan"):
        training_of_config(config_of())
    search = read_search(ROOT / "configs" / "tune_glyphs.toml")
    run = {**search.run, "adaptive": described()["adaptive"]}
    with pytest.raises(ValueError, match="run.adaptive"):
        dataclasses.replace(search, run=run).config({}, 8.0)
