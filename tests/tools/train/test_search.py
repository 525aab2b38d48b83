"""Hyperparameter search: what it may vary, what it costs, and its single draw."""

import io
import json
import math
import os
import re
import types

import numpy as np
import pytest
from rich.console import Console

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions.tuning import (
    DEFAULT_ORDERS,
    NegativeBinomialTrials,
    curve_to_epsilon,
    tuned_rdp,
)
from jaxdp_episodic.tools.train import search as search_module
from jaxdp_episodic.tools.train.search import read_search, run_search, search_budget
from jaxdp_episodic.trainer.run.assemble import plan
from pages import ROOT
from training_runs import TINY, search_file


@pytest.mark.slow
def test_budget_of_the_whole_search_calibrates_each_run(tmp_path):
    search = read_search(search_file(tmp_path))
    said = io.StringIO()
    budget = search_budget(search, tmp_path, Console(file=said))
    assert said.getvalue().count("the search costs") >= 3
    assert 0 < budget.run_epsilon < 8 and 7.9 < budget.epsilon <= 8
    config = search.config({}, budget.run_epsilon)
    one = plan(config, config.data.load("train", None))
    curve = jde.rdp(jde.compose((one.step, one.num_steps)), DEFAULT_ORDERS)
    tuned = tuned_rdp(search.trials, DEFAULT_ORDERS, curve)
    total = curve_to_epsilon(DEFAULT_ORDERS, tuned, delta=1e-5)
    assert total == pytest.approx(budget.epsilon, rel=1e-9)
    forward = read_search(search_file(tmp_path, target="run_epsilon = 1.0"))
    assert search_budget(forward, tmp_path).epsilon > 1
    assert budget.is_public


def test_all_runs_of_a_search_protect_the_same(tmp_path, monkeypatch):
    def planned(config, data):
        step = config.step.step(data.population, None)
        return types.SimpleNamespace(step=step, num_steps=1, run=lambda _: step)

    monkeypatch.setattr(search_module, "plan", planned)
    monkeypatch.setattr(search_module, "rdp", lambda *_: 0.0)
    monkeypatch.setattr(search_module, "public_budget", lambda budget: budget)
    relations = '["add_remove", "zero_out"]'
    more = f'"step.neighboring_relation" = {{ type = "Choice", values = {relations} }}'
    search = read_search(search_file(tmp_path, target="run_epsilon = 1.0", more=more))
    with pytest.raises(ValueError, match="got 2 different protections"):
        search_budget(search, tmp_path)


@pytest.mark.slow
def test_runs_that_differ_in_privacy_are_charged_as_the_worst_of_them(tmp_path):
    more = '"num_steps" = { type = "Choice", values = [3, 30, 4] }'
    both = read_search(search_file(tmp_path, target="run_epsilon = 1.0", more=more))
    more = more.replace("[3, 30, 4]", "[30]")  # costs most at the same epsilon
    one = read_search(search_file(tmp_path, target="run_epsilon = 1.0", more=more))
    least = search_budget(one, tmp_path).epsilon
    assert search_budget(both, tmp_path).epsilon >= least * (1 - 1e-9)


@pytest.mark.slow
def test_an_unreachable_target_is_refused(tmp_path):
    search = read_search(search_file(tmp_path, target="epsilon = 1e-6"))
    with pytest.raises(ValueError, match="epsilon must be larger for a search"):
        search_budget(search, tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": ""}, ValueError, "exactly one"),
        (
            {"more": '"num_steps" = { type = "Uniform", low = 3, high = 9 }'},
            NotImplementedError,
            "num_steps",
        ),
        (
            {"more": '"num_steps" = { type = "Integers", low = 3, high = 99 }'},
            ValueError,
            "combinations",
        ),
        (
            {"more": '"epsilon" = { type = "Choice", values = [1] }'},
            ValueError,
            "epsilon must be left out: it must be the same for all runs",
        ),
        ({"more": "model.channels = 3"}, TypeError, "must be a table with a type"),
        (
            {"more": '"model.seed" = { type = "Uniform", low = 3.0, high = 3.0 }'},
            ValueError,
            "low must be below high",
        ),
        ({"run": "seed = 3"}, ValueError, "not private"),
        ({"run": "epsilon = 3.0"}, ValueError, "at the top"),
    ],
)
def test_invalid_searches_are_refused(tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        read_search(search_file(tmp_path, **change))


def test_a_training_config_becomes_a_search(tmp_path):
    path = tmp_path / "run.toml"
    rate = '[optimizer]\nkind = "adam"\nlearning_rate = 8e-3\n'
    path.write_text(TINY + rate)
    with pytest.raises(ValueError, match="--held-out-is-public must be given"):
        read_search(path)
    path.write_text((TINY + rate).replace("8e-3", '"fast"'))
    with pytest.raises(TypeError, match=r"optimizer: learning_rate must be a number"):
        read_search(path, held_out_is_public=True)
    path.write_text(TINY + rate)
    search = read_search(path, held_out_is_public=True)
    assert search.epsilon == 8.0 and search.split == "validation"
    rates = search.hyperparameters["optimizer.learning_rate"]
    assert (rates.low, rates.high) == (2e-3, 32e-3)
    assert search.hyperparameters["l2_clip_norm"].values == (0.05, 0.1, 0.2)
    drawn = search.draw(np.random.default_rng(0))
    assert search.config(drawn, 1.0).l2_clip_norm == drawn["l2_clip_norm"]


def test_the_number_of_dimensions_is_at_most_that_of_columns(tmp_path):
    path = tmp_path / "run.toml"
    head, _, tail = TINY.partition("[data]")
    step = tail[tail.index("[step") : tail.index("[model]")].replace("protonet", "plda")
    head = head.replace("num_steps = 3\nl2_clip_norm = 0.1\n", "")
    path.write_text(
        f'{head}[data]\ntype = "Table"\npath = "x.csv"\nlabel = "kind"\n'
        f'features = ["a", "b", "c", "d", "e", "f"]\n[start]\nkind = "plda"\n{step}'
    )
    search = read_search(path, held_out_is_public=True)
    assert search.hyperparameters["start.dimensions"].values == (1, 3, 6)


def test_private_held_out_people_are_refused(tmp_path):
    path = search_file(tmp_path)
    path.write_text(path.read_text().replace("public = true", "public = false"))
    with pytest.raises(NotImplementedError, match="held_out_is_public"):
        read_search(path)


def test_unknown_hyperparameters_are_found_before_anything_is_stored(tmp_path):
    more = '"optimizer.learning_rat" = { type = "Choice", values = [1.0] }'
    search = read_search(search_file(tmp_path, target="run_epsilon = 1.0", more=more))
    # This distribution draws at least one run.
    with pytest.raises(ValueError, match="learning_rat"):
        run_search(search, tmp_path / "out", base=tmp_path)
    assert not (tmp_path / "out" / search_module.STATE).exists()


def test_draws_lie_in_their_ranges(tmp_path):
    search = read_search(search_file(tmp_path))
    generator = np.random.default_rng(0)
    drawn = [search.draw(generator) for _ in range(300)]
    rates = np.array([d["optimizer.learning_rate"] for d in drawn])
    assert rates.min() >= 1e-3 and rates.max() <= 1e-2
    assert 0.4 < np.mean(rates < 10**-2.5) < 0.6
    assert {d["l2_clip_norm"] for d in drawn} == {0.05, 0.1}
    assert {d["model.embedding"] for d in drawn} == {3, 4, 5}


class Trainings:
    """Stand-in for training: a given score for each run, or an interrupt."""

    def __init__(self, scores, stop_at=None):
        self.scores, self.stop_at, self.calls = scores, stop_at, []

    def __call__(self, config, folder, *, resume, title, base, console, book):
        assert book.name and book.paid is None
        place = int(folder.name)
        if place == self.stop_at:
            raise KeyboardInterrupt
        self.calls.append((place, config.optimizer.learning_rate))
        (folder / "release").mkdir(parents=True)
        (folder / "release" / "privacy.md").write_text(f"single run {place}\n")
        (folder / "release" / "run.json").write_text("{}")
        os.utime(folder / "release" / "run.json", (0, 0))  # long ago
        score = types.SimpleNamespace(name="accuracy", mean=self.scores[place])
        return types.SimpleNamespace(scores={"validation": score})


def test_a_resumed_search_does_not_draw_again(tmp_path, monkeypatch):
    path = search_file(tmp_path, target="run_epsilon = 1.00001")
    path.write_text(path.read_text().replace("delta = 1e-5", "delta = 1.2345641e-5"))
    search = read_search(path)
    out, numbers = tmp_path / "out", iter([4])  # a second draw fails
    monkeypatch.setattr(NegativeBinomialTrials, "draw", lambda *_: next(numbers))
    with pytest.raises(FileNotFoundError, match="no search to resume"):
        run_search(search, out, resume=True)
    scores = [0.5, math.nan, 0.75, 0.75]
    first, said = Trainings(scores, stop_at=2), io.StringIO()
    monkeypatch.setattr(search_module, "run_training", first)
    with pytest.raises(KeyboardInterrupt):
        run_search(search, out, base=tmp_path, console=Console(file=said, width=200))
    state = out / search_module.STATE
    stored = json.loads(state.read_text())
    (printed,) = re.findall("run epsilon (.*), the search (.*) at", said.getvalue())
    for shown, name in zip(printed, ("run_epsilon", "epsilon"), strict=True):
        assert 0 <= float(shown) - stored["budget"][name] < 1e-2  # rounded up
    assert [run["score"] for run in stored["runs"]] == [0.5, "-inf", None, None]
    with pytest.raises(FileExistsError, match="holds a search"):
        run_search(search, out, base=tmp_path)
    other = read_search(search_file(tmp_path, target="run_epsilon = 2.0"))
    with pytest.raises(ValueError, match="another search"):
        run_search(other, out, resume=True, base=tmp_path)
    whole = state.read_text()
    wrong = whole.replace('"values"', '"v"'), whole.replace('"-inf"', '"high"')
    for damaged in (whole[:-9], "[]", "{}", *wrong):
        state.write_text(damaged)
        with pytest.raises(ValueError, match="search.json: damaged"):
            run_search(search, out, resume=True)
    state.write_text(whole)
    second = Trainings(scores)
    monkeypatch.setattr(search_module, "run_training", second)
    result = run_search(search, out, resume=True, base=tmp_path)
    assert [place for place, _ in second.calls] == [2, 3]
    drawn = [run["values"]["optimizer.learning_rate"] for run in stored["runs"]]
    assert [rate for _, rate in first.calls + second.calls] == drawn
    # The first of equal scores wins; NaN loses.
    assert result.chosen == 2 and result.num_runs == 4 and result.score == 0.75
    statement = (out / "release" / "privacy.md").read_text()
    assert statement.startswith("# Privacy of the search")
    assert "single run 2" in statement
    (stated,) = re.findall(r"epsilon <= (\S+) at delta = 1.2345641e-05", statement)
    assert 0 <= float(stated) - result.epsilon < 1e-3  # rounded up
    chosen = json.loads((out / "release" / "hyperparameters.json").read_text())
    assert chosen == stored["runs"][2]["values"]
    # File times must not reveal how many runs came after the best one.
    assert all(p.stat().st_mtime > 1e6 for p in (out / "release").iterdir())
    assert run_search(search, out, resume=True, base=tmp_path).chosen == 2


def test_a_search_of_no_runs_releases_nothing(tmp_path):
    trials = 'type = "PoissonTrials"\nexpected_runs = 1e-9'
    path = search_file(tmp_path, target="run_epsilon = 1.0", trials=trials)
    search = read_search(path)
    result = run_search(search, tmp_path / "out", base=tmp_path)
    assert result.chosen is None and not (tmp_path / "out" / "release").exists()


def test_pipelines_are_searched_and_their_settings_priced():
    search = read_search(ROOT / "configs" / "tune_pipelines.toml")
    found = [search.config(values, 1.0) for values in search.variants()]
    kinds = [(c.learner.kind, c.start.kind, c.num_steps) for c in found]
    assert kinds == [
        ("protonet", "plda", 300),
        ("protonet", "mean", 300),
        *[("plda", "plda", None)] * 2,
    ]
    assert all(c.model is None for c in found[2:])
    # Each changes the Rényi DP at equal epsilon, and the search is charged by Rényi DP.
    names = ("start", "start.share", "start.within", "learner", "learner.kind")
    for name in (*names, "people.examples"):
        assert search_module.is_priced(name)
    assert not search_module.is_priced(
        "learner.temperature"
    ) and not search_module.is_priced("l2_clip_norm")
