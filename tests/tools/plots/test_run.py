"""The picture of a training run, from made-up logs."""

import math

import pytest

from jaxdp_episodic.tools.plots import run
from jaxdp_episodic.tools.plots.run import draw_reliability, draw_run
from jaxdp_episodic.trainer.run.evaluation import Reliability, Score

pytest.importorskip("matplotlib").use("Agg")

SCORE = {"name": "accuracy", "mean": 0.5, "low": 0.4, "high": 0.7}


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draws the picture; returns its axes from top to bottom."""
    figures = []
    new_figure = run.new_figure

    def keep(*size):
        figures.append(new_figure(*size))
        return figures[-1]

    monkeypatch.setattr(run, "new_figure", keep)

    def draw(name="report.png", **parts):
        given = {
            "epsilons": [(1, 0.5), (2, 0.9)],
            "losses": [],
            "scores": [],
            "target_epsilon": 2.0,
        }
        draw_run(tmp_path / name, **given | parts)
        assert [file.name for file in tmp_path.iterdir()] == [name]
        return figures[-1].axes

    return draw


def test_loss_scores_and_epsilon(drawn):
    top, middle, bottom = drawn(
        losses=[(step, 1 / step) for step in range(1, 91)],
        scores=[(1, {"validation": SCORE}), (2, {"validation": SCORE, "test": SCORE})],
        without_noise={"test": {**SCORE, "mean": 0.9}},
        meaning="what it means",
    )
    assert top.get_ylabel() == "training loss\n(private)"
    assert [line.get_label() for line in top.lines][1] == "mean of 3 steps"
    assert middle.get_ylabel() == "accuracy\n(held out)"
    assert {text.get_text() for text in middle.get_legend().get_texts()} == {
        "validation, private: 0.5000",
        "test, private: 0.5000",
        "test, without noise (not private): 0.9000",
    }
    # The legend is above the panel and does not cover the error bars.
    assert middle.get_legend().get_window_extent().y0 >= middle.bbox.y1
    assert bottom.get_xlabel() == "step\n\nwhat it means"
    assert [line.get_label() for line in bottom.lines] == ["spent", "target"]
    assert bottom.lines[0].get_ydata().tolist() == [0.5, 0.9]


def test_stages_are_shown_and_the_released_one_is_named(drawn):
    score = Score("accuracy", 0.8, 0.7, 0.9, 20)
    better = score._replace(mean=0.9, high=0.95)
    panel, middle, _ = drawn(
        scores=[(step, {"validation": SCORE}) for step in (0, 1, 2)],
        stages={
            "features": {"validation": score, "test": score},
            "steps": {"validation": better, "test": score},
        },
        released="steps",
    )
    rows = [label.get_text() for label in panel.get_yticklabels()]
    assert rows == ["features", "steps\n(released)"]
    assert [text.get_text() for text in panel.texts] == [
        "0.8000   0.8000",
        "0.9000   0.8000",
    ]
    assert panel.get_xlabel().startswith("accuracy (held out)")
    assert panel.yaxis_inverted()  # the simplest on top
    (line, *_) = middle.lines
    assert line.get_xdata().tolist() == [1, 2]  # the line before belongs to a stage


def test_statistics_alone_are_drawn_as_a_bar(drawn):
    score = Score("accuracy", 0.8, 0.7, 0.9, 20)
    stages = {"features": {"validation": score}, "statistics": {"validation": score}}
    panel, bar = drawn(
        epsilons=[(2, 0.9)], scores=[(2, {"validation": SCORE})], stages=stages
    )
    assert panel.get_xlabel().startswith("accuracy (held out)")
    (spent,) = bar.patches
    assert spent.get_width() == 0.9 and bar.get_xlabel() == "epsilon (nats)"
    said = {text.get_text() for text in bar.get_legend().get_texts()}
    assert said == {"spent: 0.9", "target: 2"}


def test_without_noise_and_without_logs(drawn):
    scores, bottom = drawn("report.svg", target_epsilon=math.inf)
    assert not scores.lines
    (text,) = bottom.texts
    assert text.get_text() == "no noise: epsilon is infinite"


def test_reliability_of_each_part_against_the_diagonal(tmp_path):
    one = Reliability((0.5, 0.9), (0.7, 0.8), (1, 3))
    draw_reliability(tmp_path / "r.png", {"validation": one, "test": one})
    assert (tmp_path / "r.png").stat().st_mode & 0o077 == 0
