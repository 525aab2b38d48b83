"""The picture of a training run: its stages; loss, scores, epsilon by the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxdp_episodic.tools.plots.figures import new_figure, plain, save
from jaxdp_episodic.trainer.run.evaluation import Score

_BLACK = "#333333"
_BLUE = "#2a6fbb"
_ORANGE = "#c8641b"
# Of the parts of the held-out data.
_STYLES = ((_BLUE, "o"), (_ORANGE, "s"), (_BLACK, "D"))
_ROW = 0.42  # height of a stage, inches


def draw_run(
    path: Path,
    *,
    epsilons: Sequence[tuple[int, float]],
    losses: Sequence[tuple[int, float]],
    scores: Sequence[tuple[int, Mapping[str, Mapping[str, Any]]]],
    target_epsilon: float,
    stages: Mapping[str, Mapping[str, Score]] = MappingProxyType({}),
    released: str = "",
    without_noise: Mapping[str, Mapping[str, Any]] | None = None,
    meaning: str = "",
    is_guarantee: bool = False,
) -> None:
    """Draws the stages; below them loss, scores and epsilon against the step.

    Args:
      path: of the picture, .png or .svg; readable by its owner only, as losses are
        private.
      epsilons: steps, and what was spent after each.
      losses: steps and training losses, which are private; may be empty.
      scores: steps, and for each part of the held-out data its score as in the log;
        may be empty.
      target_epsilon: inf for a run without noise.
      stages: scores of each stage, on each part of the held-out data; may be empty.
      released: the stage that is.
      without_noise: last scores of the same run without noise, which is not private.
      meaning: a sentence or two below, of what the protection means.
      is_guarantee: the epsilons are what holds at any time, of a run that chooses.
    """
    rows, height = 3 if losses else 2, _ROW * (len(stages) + 3) if stages else 0.0
    figure = new_figure(7.2, 7.4 + height)
    whole, over = figure, []
    if stages:
        upper, whole = figure.subfigures(2, height_ratios=(height, 7.4))
        over = [upper.subplots()]
        _draw_stages(over[0], stages, released)
    panels = list(whole.subplots(rows, sharex=True))
    *tops, middle, bottom = panels
    for top in tops:
        _draw_losses(top, np.array(losses, float))
        top.set_ylabel("training loss\n(private)")
    _draw_scores(middle, scores, without_noise or {})
    if np.isfinite(target_epsilon):
        label = "guarantee" if is_guarantee else "spent"
        bottom.plot(*zip(*epsilons, strict=True), color=_BLACK, label=label)
        if not is_guarantee:
            bottom.axhline(target_epsilon, color=_ORANGE, ls="--", label="target")
        bottom.set_ylim(0, 1.12 * target_epsilon)
        bottom.legend(frameon=False, loc="lower right")
    else:
        where = {"ha": "center", "va": "center", "transform": bottom.transAxes}
        bottom.text(0.5, 0.5, "no noise: epsilon is infinite", **where)
        bottom.set_yticks([])
    bottom.set_ylabel("epsilon (nats)")
    bottom.set_xlabel("step" + ("\n\n" + meaning if meaning else ""))
    plain(*over, *panels)
    save(figure, path, is_private=True)


def _draw_stages(
    axes: Any, stages: Mapping[str, Mapping[str, Score]], released: str
) -> None:
    """Each stage's scores with their intervals, a row each, the simplest on top."""
    splits = list(
        dict.fromkeys(split for scores in stages.values() for split in scores)
    )
    for split, (color, marker) in zip(splits, _STYLES, strict=False):
        shown = [(row, scores[split]) for row, scores in enumerate(stages.values())]
        means = np.array([score.mean for _, score in shown])
        ends = np.array([[score.low, score.high] for _, score in shown]).T
        axes.errorbar(
            means,
            [row + 0.22 * splits.index(split) - 0.11 for row, _ in shown],
            xerr=np.abs(ends - means),
            color=color,
            marker=marker,
            ls="",
            ms=5,
            capsize=2,
            label=split,
        )
    for row, (name, scores) in enumerate(stages.items()):
        words = "   ".join(f"{score.mean:.4f}" for score in scores.values())
        weight = "bold" if name == released else "normal"
        place = {"transform": axes.get_yaxis_transform(), "va": "center"}
        axes.text(1.01, row, words, fontweight=weight, **place)
    names = [f"{n}\n(released)" if n == released else n for n in stages]
    axes.set_yticks(range(len(stages)), names)
    axes.set_ylim(len(stages) - 0.5, -0.5)
    kind = next(iter(next(iter(stages.values())).values())).name
    axes.set_xlabel(f"{kind} (held out) of what the run has at each stage")
    above = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0)}
    axes.legend(frameon=False, ncols=len(splits), **above)


def _draw_losses(axes: Any, losses: np.ndarray) -> None:
    """Every step in grey, and a running mean."""
    steps, values = losses.T
    axes.plot(steps, values, color="#bbbbbb", lw=0.8)
    width = max(1, len(values) // 30)
    if width > 1:
        smooth = np.convolve(values, np.ones(width) / width, "valid")
        axes.plot(
            steps[width - 1 :], smooth, color=_BLACK, label=f"mean of {width} steps"
        )
        axes.legend(frameon=False)


def _draw_scores(
    axes: Any,
    scores: Sequence[tuple[int, Mapping[str, Mapping[str, Any]]]],
    without_noise: Mapping[str, Mapping[str, Any]],
) -> None:
    """Score with its interval, one line for each part of the held-out data.

    Beside it, dashed, what it would be without noise.
    """
    # What there was before the first step is among the stages.
    scores = [record for record in scores if record[0] > 0] or scores
    names = list(dict.fromkeys(name for _, parts in scores for name in parts))
    for name, (color, marker) in zip(names, _STYLES, strict=False):
        rows = [(step, parts[name]) for step, parts in scores if name in parts]
        steps = [step for step, _ in rows]
        mean = np.array([score["mean"] for _, score in rows])
        ends = np.array([[score["low"], score["high"]] for _, score in rows]).T
        axes.errorbar(
            steps,
            mean,
            np.abs(ends - mean),
            color=color,
            marker=marker,
            ms=4,
            capsize=2,
            label=f"{name}, private: {mean[-1]:.4f}",
        )
        if name in without_noise:
            bare = without_noise[name]["mean"]
            label = f"{name}, without noise (not private): {bare:.4f}"
            axes.axhline(bare, color=color, ls="--", lw=1, label=label)
        axes.set_ylabel(rows[0][1]["name"] + "\n(held out)")
    if names:
        # Above the panel: within it no place is free of all lines and error bars.
        above = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0)}
        narrow = {"columnspacing": 1.0, "handlelength": 1.5}
        axes.legend(frameon=False, ncols=2, **above, **narrow)
