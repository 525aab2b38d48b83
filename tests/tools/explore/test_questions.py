"""The page's numbers are the API's, its errors the library's, its files the CLI's."""

import copy
import dataclasses
import json

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions.gdp import upper_delta
from jaxdp_episodic.tools import cli
from jaxdp_episodic.tools.explore import questions
from jaxdp_episodic.tools.requests.request import EpsilonRequest, read_request
from pages import ROOT

OMNIGLOT = ROOT / "configs" / "omniglot.toml"
EXAMPLES = questions.start(None)["examples"]


def settings(step=None, **fields):
    """A question of the page: a request after a round trip through JSON."""
    request = {"version": 1, "type": "EpsilonRequest", "num_steps": 50, "delta": 1e-5}
    request |= {"method": "rdp", "step": step or EXAMPLES["MultistageSampling"]}
    return json.loads(json.dumps({"request": request | fields, "epsilon": 3.0}))


def request_of(question):
    return EpsilonRequest.from_dict(question["request"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_epsilon_is_that_of_the_api(name):
    question = settings(EXAMPLES[name], method="exact")
    step = request_of(question).step
    found = questions.answer("epsilon", question)
    assert found["epsilon"] == jde.epsilon(step, num_steps=50, delta=1e-5)
    assert float(found["text"]) >= found["epsilon"]
    assert found["nature"] == "exact, rounded up"
    assert found["remarks"] == []


def test_an_exact_answer_that_is_a_bound_is_marked():
    rare = jde.Poisson("example", sampling_probability=1e-5)
    step = jde.GaussianStep(rare, noise_multiplier=1.0).to_dict()
    run = {"method": "exact", "num_steps": 10, "delta": 1e-100}
    found = questions.answer("epsilon", settings(step, **run))
    assert found["nature"] == "certified upper bound"
    assert questions.answer("epsilon", settings())["nature"] == "upper bound"


def test_all_levels_exact_and_certified():
    question = settings()
    step = request_of(question).step
    rows = questions.answer("levels", question)["levels"]
    assert [row["level"] for row in rows] == ["task", "class", "example"]
    for row in rows:
        protected = dataclasses.replace(step, privacy_unit=row["level"])
        run = {"num_steps": 50, "delta": 1e-5}
        assert row["epsilon"] == jde.epsilon(protected, **run)
        ends = jde.epsilon_interval(protected, **run)
        assert (row["lower"], row["upper"]) == ends
        shown = [float(end) for end in row["ends"].split(" to ")]
        assert shown[0] <= row["lower"] <= row["epsilon"] <= row["upper"] <= shown[1]


def test_epsilon_along_the_run():
    epochs = copy.deepcopy(EXAMPLES["MultistageSampling"])
    epochs["sampling"]["levels"][0] = {
        "type": "ShuffledEpochs", "name": "task", "steps_per_epoch": 7
    }  # fmt: skip
    found = questions.answer("run", settings(epochs, num_steps=30))
    assert found["num_steps"] == [0, 7, 14, 21, 28, 30]  # shown at their ends
    question = settings(num_steps=1_000)
    found = questions.answer("run", question)
    steps = np.array(found["num_steps"])
    assert steps[0] == 0 and steps[-1] == 1_000 and np.all(np.diff(steps) > 0)
    step = request_of(question).step
    values = jde.epsilon(step, num_steps=steps, delta=1e-5, method="rdp")
    np.testing.assert_array_equal(found["epsilon"], values)


@pytest.mark.slow
def test_the_curve_and_its_attacker():
    question = settings()
    step, run = request_of(question).step, {"num_steps": 50, "method": "rdp"}
    curve = questions.answer("curve", question)
    deltas = upper_delta(step, epsilon=curve["epsilon"], **run)
    np.testing.assert_array_equal(curve["delta"], deltas)
    assert curve["epsilon"][0] == 0 and curve["delta"][-1] < 2e-12
    attack = questions.answer("attack", question)
    alpha = attack["false_positive_rate"]
    caught = jde.true_positive_rate(step, false_positive_rate=alpha, **run)
    np.testing.assert_array_equal(attack["true_positive_rate"], caught)
    said = float(attack["facts"]["advantage"].removeprefix("at most "))
    assert 1 <= said / jde.advantage(step, **run) < 1.01


def test_the_attacker_of_the_default_design_has_a_curve():
    """Regression: its curve asked for more points than a round may add, and failed."""
    found = questions.answer("attack", {"request": questions.start(None)["request"]})
    assert "error" not in found and found["facts"]["method"] == "exact"


def test_the_noise_of_each_target():
    question = settings()
    found = questions.answer("noise", question)
    assert found["targets"] == [1.0, 2.0, 3.0, 4.0, 8.0]
    noises = jde.calibrate_noise_multiplier(
        request_of(question).step,
        epsilon=found["targets"],
        delta=1e-5,
        num_steps=50,
        method="rdp",
    )
    np.testing.assert_array_equal(found["noise"], noises)
    assert all(float(t) >= n for t, n in zip(found["texts"], noises, strict=True))


def changed(place, value):
    """The question with one key of its request changed; a place like "step.x[1].y"."""
    question = settings()
    *above, key = place.replace("[", ".").replace("]", "").split(".")
    table = question["request"]
    for name in above:
        table = table[int(name) if name.isdigit() else name]
    table[key] = value
    return question


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("step.noise_multiplier", -1, "noise_multiplier must be >= 0, got -1"),
        ("num_steps", 2.5, "num_steps must be a whole number >= 0"),
        (
            "step.sampling.levels[0].sampling_probability",
            1.5,
            "sampling_probability must lie in [0, 1], got 1.5",
        ),
    ],
)
def test_errors_name_their_field_and_have_the_librarys_text(place, value, message):
    question = changed(place, value)
    with pytest.raises((TypeError, ValueError)) as raised:
        request_of(question)
    for part in ("epsilon", "run"):
        error = questions.answer(part, question)["error"]
        assert error["place"] == place
        assert message in error["message"]
        theirs = str(raised.value).replace(" or an array of numbers", "")
        assert theirs.endswith(error["message"])
    assert questions.answer("toml", question) == {"error": error}


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"request": []}, "request must be a table"),
        (settings(num_steps=[1, 2]), "every field must be a scalar"),
        (settings(delta=None, epsilon=1.0), "delta must be given, as the page"),
        (settings({"type": "ApproximateDP", "epsilon": 1}), "got a ApproximateDP"),
    ],
)
def test_requests_that_the_page_cannot_show_are_refused(question, message):
    assert message in questions.answer("epsilon", question)["error"]["message"]


@pytest.mark.parametrize("target", ["x", [1, 2], True, 9e-7])
def test_a_target_is_checked(target):
    question = {**settings(), "epsilon": target}
    assert "epsilon must" in questions.answer("noise", question)["error"]["message"]
    assert "epsilon" in questions.answer("epsilon", question)


@pytest.mark.parametrize("file", ["omniglot.toml", "schools.toml"])
def test_a_request_file_is_loaded_and_saved(file, tmp_path, capsys):
    start = questions.start(ROOT / "configs" / file)
    question = json.loads(json.dumps({"request": start["request"]}))
    out = tmp_path / "saved.toml"
    out.write_text(questions.answer("toml", question)["toml"])
    first = read_request(ROOT / "configs" / file, EpsilonRequest)
    assert read_request(out, EpsilonRequest) == first
    assert start["name"] == file.removesuffix(".toml")
    assert cli.run(["epsilon", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["epsilon"]
    assert said == questions.answer("epsilon", question)["epsilon"]


def test_the_default_design_is_the_readmes():
    assert read_request(OMNIGLOT, EpsilonRequest) == EpsilonRequest.from_dict(
        questions.start(None)["request"]
    )


def test_files_of_more_than_one_setting_are_refused(capsys):
    for file in ("omniglot_grid.toml", "two_phases.toml"):
        assert cli.run(["explore", str(ROOT / "configs" / file)]) == 2
        said = capsys.readouterr().err
        assert "the page shows" in said and said.count("\n") == 1


def test_warnings_are_shown_as_remarks():
    assert questions.answer("epsilon", settings())["remarks"] == []
    loud = changed("step.sampling.levels[2].size", 60)  # of 50
    (remark,) = questions.answer("epsilon", loud)["remarks"]
    assert "level 'example': size exceeds the number of units there are" in remark
    start = questions.start(ROOT / "configs" / "schools.toml")
    request = {**start["request"], "delta": 0.5, "method": "rdp"}
    (remark,) = questions.answer("epsilon", {"request": request})["remarks"]
    assert "protected units is at least 1" in remark


BOUNDS = {"type": "PersonBounds", "examples": 1, "classes": 2, "tasks": 2}


@pytest.mark.parametrize(
    ("name", "people", "levels"),
    [("MultistageSampling", {"people": BOUNDS}, 4), ("PeopleBlocks", {}, 2)],
)
def test_people_are_shown_as_a_level(name, people, levels):
    of_people = EXAMPLES[name] | {"privacy_unit": "person"} | people
    question = settings(of_people, num_steps=3)
    step = request_of(question).step
    rows = questions.answer("levels", question)["levels"]
    assert len(rows) == levels and rows[0]["level"] == "person"
    assert rows[0]["epsilon"] == jde.epsilon(step, num_steps=3, delta=1e-5)
    assert rows[0]["lower"] <= rows[0]["epsilon"] <= rows[0]["upper"]
    assert rows[-1].get("epsilon", 0.0) < rows[0]["epsilon"]
    for row in rows[1:]:
        assert ("message" in row) == (name == "PeopleBlocks")
