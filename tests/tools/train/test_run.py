"""``train``: from a config to a checkpoint, a log, a report and a release."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from jaxdp_episodic.accountant.questions.budget import plan_budget
from jaxdp_episodic.tools import cli
from jaxdp_episodic.tools.train import run
from jaxdp_episodic.tools.train.run import Result
from jaxdp_episodic.trainer.run.evaluation import Score
from jaxdp_episodic.trainer.run.loop import Selection, Stage
from jaxdp_episodic.trainer.run.run_files import read_log
from training_runs import TINY_LINEAR, PlainBudget, charged_run, flat_step

LINEAR = TINY_LINEAR.replace("8.0\ndelta = 1e-5", "8.0000012\ndelta = 1.0000012e-5")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(LINEAR, encoding="utf-8")
    return path


@pytest.fixture
def train(monkeypatch, config, tmp_path):
    # This process has its devices already.
    monkeypatch.setattr(cli, "use_all_cores", lambda: None)

    def run(*arguments):
        return cli.run(
            ["train", str(config), "--out", str(tmp_path / "out"), *arguments]
        )

    return run


def shown(scores, bare, selection=None):
    """The lines that a finished run prints."""
    budget = plan_budget(flat_step(), epsilon=8.0, delta=1e-5, num_steps=9)
    trainer: Any = SimpleNamespace(budget=budget, is_seeded=False)
    return str(Result(trainer, 1.0, 50.49101, scores, Path("out"), bare, selection))


def test_the_score_without_noise_is_shown_below_the_private_one():
    score = Score("accuracy", 0.9, 0.8, 1.0, 600)
    stages = dict.fromkeys(("features", "steps"), {"test": score})
    words = Stage("steps", None, {}), 10, None, "the choice was turned off"
    bare = {"test": score._replace(mean=0.99)}
    selection = Selection(*words, stages, {})
    lines = shown({"test": score, "validation": score}, bare, selection).splitlines()
    assert lines[0].startswith("test        accuracy 0.9000")
    assert lines[1].split() == "0.9900 without noise, not private".split()
    assert lines[2].startswith("validation  accuracy 0.9000")
    assert lines[3].split() + lines[4].split() == "stages test features 0.9000".split()
    assert lines[5].split() == "steps 0.9000 is released".split()
    assert lines[6].endswith("no choice was made: the choice was turned off")
    assert lines[8].split()[:4] == "50.492 for the same".split()  # rounded up


@pytest.mark.parametrize(
    ("name", "behind", "said", "better"),
    [
        ("accuracy", ["features", "steps"], "on all 5 c", 0.95),
        ("rmse", ["features", "mean", "steps"], "the best on 5 tasks of 'dev'", 0.85),
    ],
)
def test_the_compared_stages_are_printed(name, behind, said, better):
    score = Score(name, 0.9, 0.8, 1.0, 600)
    scores = {stage: {"dev": score} for stage in ("features", "mean", "steps")}
    pairs = dict.fromkeys(behind, (0.0, 0.0))
    selection = Selection(Stage("steps", None, {}), 9, "dev", "", scores, pairs, 5)
    printed = shown({}, {}, selection)
    assert said in printed
    assert "'steps' gained nothing over 'mean' (0.9000 after 0.9000)" in printed
    scores["steps"] = {"dev": score._replace(mean=better)}
    assert "'steps' gained" not in shown({}, {}, selection)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run, and its stdout and stderr."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.toml").write_text(LINEAR, encoding="utf-8")
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "use_all_cores", lambda: None)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            arguments = [str(folder / "tiny.toml"), "--out", str(folder / "out")]
            assert cli.run(["train", *arguments]) == 0
    return folder / "out", SimpleNamespace(out=out.getvalue(), err=err.getvalue())


def test_the_folder_of_a_finished_run(train, finished, tmp_path, capsys):
    folder, printed = finished
    out = tmp_path / "out"
    shutil.copytree(folder, out)
    names = ".lock run.sqlite release report.md report.png reliability.png"
    assert {p.name for p in out.iterdir()} == set(names.split())
    assert "validation  accuracy 0." in printed.out
    assert "target 8.0000012, delta 1.0000012e-05, one example" in printed.out
    assert "step 3 is the last" in " ".join(printed.err.split())
    report = (out / "report.md").read_text()
    assert report.startswith("# tiny\n") and "Private: this page" in report
    for words in (
        "epsilon 8.0000012, delta 1.0000012e-05",
        "was epsilon <= 8.0000012.",
    ):
        assert words in report
    assert "expected (private): 5 contributions (episode) a step" in printed.err
    assert "that took part were complete" in report
    for path in (out / "release").glob("*.[jm]*"):  # no text contains a count of a draw
        assert "complete" not in path.read_text(), path
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    private = (path for path in out.iterdir() if path.name != "release")
    assert all(path.stat().st_mode & 0o077 == 0 for path in private)
    names = "parameters.npz privacy.md log.jsonl run.json release.json"
    assert {p.name for p in (out / "release").iterdir()} == set(names.split())
    statement = (out / "release" / "privacy.md").read_text()
    assert ", 1.0000012e-05)-differentially private" in statement
    assert "one `example` more or less" in statement
    assert "must not be published" not in statement
    facts = json.loads((out / "release" / "run.json").read_text())
    assert facts["steps"] == 3 and facts["epsilon spent"] <= 8.0000012
    # The released stage is one of those shown.
    last = read_log(out / "run.sqlite")[-1]
    assert facts["stage"] == last["released"] in last["stages"]["scores"]
    assert f"The run released the stage {facts['stage']!r}" in statement
    assert f"| **{facts['stage']}** |" in report
    assert f"released    {facts['stage']}, the best on" in printed.out
    lines = (out / "release" / "log.jsonl").read_text().splitlines()
    public = list(map(json.loads, lines))
    assert public[-1]["released"] == facts["stage"]
    assert not any("stages" in record or "held_out" in record for record in public)
    # A second run without a seed does not overwrite it.
    assert "not private" not in printed.out + statement + str(facts)
    before = (out / "run.sqlite").read_bytes()
    assert train() == 2
    error = capsys.readouterr().err
    assert "holds a run; resume it" in error and error.count("\n") == 1
    assert (out / "run.sqlite").read_bytes() == before


def test_resume(train, finished, tmp_path, capsys, config):
    out = tmp_path / "out"
    assert train("--resume") == 2
    assert "no run: begin one there, without resume" in capsys.readouterr().err
    assert not out.exists()
    shutil.copytree(finished[0], out)
    (out / "run.sqlite").rename(out / "log.jsonl")
    assert train("--resume") == 2
    assert "only log.jsonl of a run, which cannot go on" in capsys.readouterr().err
    shutil.rmtree(out)
    shutil.copytree(finished[0], tmp_path / "out")
    parameters = (tmp_path / "out" / "release" / "parameters.npz").read_bytes()
    assert train("--resume") == 0  # nothing is left to do: the release is the same
    again = tmp_path / "out" / "release" / "parameters.npz"
    assert again.read_bytes() == parameters
    capsys.readouterr()
    config.write_text(LINEAR.replace("l2_clip_norm = 0.1", "l2_clip_norm = 0.2"))
    assert train("--resume") == 2
    assert "l2_clip_norm: 0.1 in the checkpoint, 0.2 now" in capsys.readouterr().err


def test_a_run_that_ended_before_any_charge_starts_again(
    train, finished, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out"
    out.mkdir()
    budget = PlainBudget(flat_step(), 8.0, 1e-5, 3, 3)
    for charges, check in enumerate(("refuse_other_files", "refuse_without_run")):
        monkeypatch.setattr(run.run_files, check, Mock(side_effect=ValueError(check)))
        charged_run(out / "run.sqlite", budget, charges)
        assert train("--resume") == 2
        said = capsys.readouterr().err
        assert check in said and ("the run starts again" in said) == (charges == 0)


@pytest.mark.parametrize(
    ("old", "new", "reason", "epsilons"),
    [
        ("epsilon = 8.0", "epsilon = inf", "inf (not private)", {0.0, "inf"}),
        pytest.param(
            *("num_steps = 3", "num_steps = 3\nseed = 3"),
            *("not private: draws and noise come from a fixed seed", None),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no noise", "a seed"],
)
def test_what_is_not_private_is_called_so(
    train, config, capsys, tmp_path, old, new, reason, epsilons
):
    config.write_text(TINY_LINEAR.replace(old, new))
    assert train() == 0
    printed, release = capsys.readouterr(), tmp_path / "out" / "release"
    assert "not private" in printed.err and reason in printed.out
    assert "Not private" in (release / "privacy.md").read_text()
    if epsilons:
        records = read_log(tmp_path / "out" / "run.sqlite")
        assert {record["epsilon"] for record in records} == epsilons
    else:
        facts = json.loads((release / "run.json").read_text())
        assert reason.endswith(facts["not private"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("population = 20", "population = 21", "population"),
        ("size = 3,", "size = 1,", "shots must be less than"),
        ('type = "Glyphs"\nsmall = true', 'type = "Npz"\npath = "no.npz"', "No such"),
    ],
)
def test_user_errors_are_one_line(train, config, capsys, tmp_path, old, new, message):
    text = TINY_LINEAR.replace(old, new)
    assert text != TINY_LINEAR
    config.write_text(text)
    code = train()
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.startswith("jaxdp-episodic: error: ") and error.count("\n") == 1
    assert re.search(message, error), error
    assert not (tmp_path / "out" / "run.sqlite").exists()


@pytest.mark.parametrize(
    ("where", "hint"),
    [
        ("run.trainer.Trainer.step", "--resume --out 'a b'"),
        ("run.assemble.plan", "nothing was trained yet, start again"),
    ],
)
def test_an_interruption_says_how_to_continue(
    train, monkeypatch, capsys, tmp_path, where, hint
):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"jaxdp_episodic.trainer.{where}", interrupted)
    monkeypatch.chdir(tmp_path)
    assert train("--out", "a b") == 130
    assert hint in capsys.readouterr().err
