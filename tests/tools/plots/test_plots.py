"""The pictures of the privacy curve, with its numbers, and of a training run."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.tools.plots import curve as curve_plot, run
from jaxdp_episodic.tools.plots.run import draw_reliability, draw_run
from jaxdp_episodic.trainer.run.evaluation import Reliability, Score

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")


def poisson_step(rate, noise):
    sampling = jde.Poisson("user", sampling_probability=rate)
    return jde.GaussianStep(sampling, noise_multiplier=noise)


STEP = poisson_step(0.1, 0.7)


class Drawn(NamedTuple):
    """The picture, return value and files of one call."""

    curve: curve_plot.PrivacyCurve
    path: Path
    figure: Any


def kept_figures(module, patch):
    """The list to which the module's new figures are added."""
    figures, new_figure = [], module.new_figure

    def keep(*size):
        figures.append(new_figure(*size))
        return figures[-1]

    patch.setattr(module, "new_figure", keep)
    return figures


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    path = tmp_path_factory.mktemp("curve") / "new" / "curve.png"  # is created
    with pytest.MonkeyPatch.context() as patch:
        figures = kept_figures(curve_plot.figures, patch)
        curve = curve_plot.plot_curve(STEP, path, num_steps=1, method="exact")
    return Drawn(curve, path, *figures)


def test_the_files_hold_the_curve(drawn):
    curve, path = drawn.curve, drawn.path
    assert path.read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in path.parent.iterdir()} == {path.name, "curve.json"}
    assert list(curve.delta) == ["exact", "pld", "rdp"]
    for method, deltas in curve.delta.items():
        expected = jde.delta(STEP, epsilon=curve.epsilon, num_steps=1, method=method)
        assert np.all(deltas >= expected)
        np.testing.assert_allclose(deltas, expected, rtol=1e-6, atol=1e-15)
    assert curve.advantage == jde.advantage(STEP, num_steps=1)
    gain = curve.true_positive_rate - curve.false_positive_rate
    assert gain.max() == pytest.approx(curve.advantage, rel=1e-2)

    document = json.loads((path.parent / "curve.json").read_text())
    assert document.pop("version") == 1
    assert list(document) == list(curve._fields)
    assert document["delta"]["rdp"] == curve.delta["rdp"].tolist()
    assert document["true_positive_rate"] == curve.true_positive_rate.tolist()
    assert document["gdp_mu"] == curve.gdp_mu


def test_the_picture_has_a_line_for_each_method(drawn):
    left, right = drawn.figure.axes
    assert "nats" in left.get_xlabel()
    assert "probability" in left.get_ylabel()
    assert [line.get_label() for line in left.lines] == ["exact", "pld", "rdp"]
    assert right.get_xscale() == right.get_yscale() == "log"
    assert "guessing" in [line.get_label() for line in right.lines]
    # Greyscale: no two lines of a panel share their dashes.
    for axes in (left, right):
        dashes = [str(line._dash_pattern) for line in axes.lines]
        assert len(set(dashes)) == len(dashes)
    (note,) = (text.get_text() for text in right.texts)
    assert "advantage at most" in note
    assert "mu =" in note


@pytest.mark.slow
def test_no_noise_and_no_draw(tmp_path):
    draw = curve_plot.plot_curve
    leak = draw(poisson_step(1.0, 0.0), tmp_path / "a.png", num_steps=1)
    assert leak.gdp_mu == np.inf
    assert json.loads((tmp_path / "a.json").read_text())["gdp_mu"] == "inf"
    assert curve_plot.summary(leak)["advantage"] == "at most 1"
    silent = draw(poisson_step(0.0, 1.0), tmp_path / "b.png", num_steps=1)
    assert silent.gdp_mu == silent.advantage == 0
    np.testing.assert_array_equal(silent.delta["exact"], 0)


def test_the_summary_is_rounded_up(drawn):
    curve = drawn.curve
    facts = curve_plot.summary(curve)
    rate = np.interp(0.01, *curve[3:5])
    expected = {"advantage": curve.advantage, "true positives at 0.01": rate}
    for name, value in expected.items():
        shown = float(facts[name].removeprefix("at most "))
        assert value * (1 - 1e-9) <= shown <= value * 1.02
    assert curve.gdp_mu <= float(facts["Gaussian mu"].split()[0])


def test_a_curve_is_of_one_setting(tmp_path):
    grid = poisson_step(0.1, np.array([1.5, 2.0]))
    with pytest.raises(ValueError, match="of the step, and num_steps, must be a sc"):
        curve_plot.plot_curve(grid, tmp_path / "c.png", num_steps=3, method="rdp")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install .\.\[plot\]"):
        curve_plot.plot_curve(poisson_step(0.1, 1.0), tmp_path / "c.png", num_steps=1)
    assert list(tmp_path.iterdir()) == []


# --- The picture of a training run, from made-up logs ---

SCORE = {"name": "accuracy", "mean": 0.5, "low": 0.4, "high": 0.7}


@pytest.fixture
def drawn_run(tmp_path, monkeypatch):
    """Draws the picture; returns its axes from top to bottom."""
    figures = kept_figures(run, monkeypatch)

    def draw(name="report.png", **parts):
        given = {"epsilons": [(1, 0.5), (2, 0.9)], "losses": [], "scores": []}
        draw_run(tmp_path / name, **{"target_epsilon": 2.0} | given | parts)
        assert [file.name for file in tmp_path.iterdir()] == [name]
        return figures[-1].axes

    return draw


def test_loss_scores_and_epsilon(drawn_run):
    top, middle, bottom = drawn_run(
        losses=[(step, 1 / step) for step in range(1, 91)],
        scores=[(1, {"validation": SCORE}), (2, {"validation": SCORE, "test": SCORE})],
        without_noise={"test": {**SCORE, "mean": 1.0}},
        meaning="what it means",
    )
    assert top.get_ylabel() == "training loss\n(private)"
    assert [line.get_label() for line in top.lines][1] == "mean of 3 steps"
    assert middle.get_ylabel() == "accuracy\n(held out)"
    assert {text.get_text() for text in middle.get_legend().get_texts()} == {
        "validation, private: 0.5000",
        "test, private: 0.5000",
        "test, without noise (not private): 1.0000",
    }
    assert 1 < middle.get_ylim()[1] < 1.02  # no accuracy is larger
    # The legend is above the panel and does not cover the error bars.
    assert middle.get_legend().get_window_extent().y0 >= middle.bbox.y1
    assert bottom.get_xlabel() == "step\n\nwhat it means"
    assert [line.get_label() for line in bottom.lines] == ["spent", "target"]
    assert bottom.lines[0].get_ydata().tolist() == [0.5, 0.9]


def test_stages_are_shown_and_the_released_one_is_named(drawn_run):
    score = Score("accuracy", 0.8, 0.7, 0.9, 20)
    better = score._replace(mean=1.0, high=1.0)
    panel, middle, _ = drawn_run(
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
        "1.0000   0.8000",
    ]
    assert 1 < panel.get_xlim()[1] < 1.01  # no accuracy is larger
    assert panel.get_xlabel().startswith("accuracy (held out)")
    assert panel.yaxis_inverted()  # the simplest on top
    (line, *_) = middle.lines
    assert line.get_xdata().tolist() == [1, 2]  # the line before belongs to a stage


def test_statistics_alone_are_drawn_as_a_bar(drawn_run):
    score = Score("accuracy", 0.8, 0.7, 0.9, 20)
    stages = {"features": {"validation": score}, "statistics": {"validation": score}}
    panel, bar = drawn_run(
        epsilons=[(2, 0.87501)], scores=[(2, {"validation": SCORE})], stages=stages
    )
    assert panel.get_xlabel().startswith("accuracy (held out)")
    (spent,) = bar.patches
    assert spent.get_width() == 0.87501 and bar.get_xlabel() == "epsilon (nats)"
    said = {text.get_text() for text in bar.get_legend().get_texts()}
    assert said == {"spent: 0.8751", "target: 2"}


def test_without_noise_and_without_logs(drawn_run):
    (bottom,) = drawn_run("report.svg", target_epsilon=math.inf)
    (text,) = bottom.texts
    assert text.get_text() == "no noise: epsilon is infinite"


def test_reliability_of_each_part_against_the_diagonal(tmp_path):
    one = Reliability((0.5, 0.9), (0.7, 0.8), (1, 3))
    draw_reliability(tmp_path / "r.png", {"validation": one, "test": one})
    assert (tmp_path / "r.png").stat().st_mode & 0o077 == 0
