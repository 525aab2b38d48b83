"""The picture of a training run: its stages, and loss, scores, epsilon by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.report.sentences import upward
from jaxdp_episodic.tools.plots.figures import BLUE, VERMILION, new_figure, plain, save
from jaxdp_episodic.trainer.run.evaluation import Reliability, Score, digits

_BLACK = "#333333"
# Colour and marker of each part of the held-out data.
_STYLES = ((BLUE, "o"), (VERMILION, "s"), (_BLACK, "D"))
# Heights, inches.
_ROW = 0.42  # of a stage
_PANEL = 2.4  # of a panel over the steps
_ABOVE = {"frameon": False, "loc": "lower left", "bbox_to_anchor": (0.0, 1.0)}

_Records = Sequence[tuple[int, Mapping[str, Mapping[str, Any]]]]


def draw_run(
    path: Path,
    *,
    epsilons: Sequence[tuple[int, float]],
    losses: Sequence[tuple[int, float]],
    scores: _Records,
    target_epsilon: float,
    stages: Mapping[str, Mapping[str, Score]] = MappingProxyType({}),
    released: str = "",
    without_noise: Mapping[str, Mapping[str, Any]] | None = None,
    meaning: str = "",
    is_guarantee: bool = False,
) -> None:
    """Draws the stages, and below them loss, scores and epsilon against the step."""
    # The scores before the first step are among the stages.
    scores = [record for record in scores if record[0] > 0] or scores
    has_steps = len(epsilons) > 1
    has_scores = len(scores) > 1 or bool(scores and not stages)
    number = bool(losses) + has_scores + 1
    heights = _ROW * (len(stages) + 3) if stages else 0.0, _PANEL * number
    figure = new_figure(7.2, sum(heights))
    whole, panels = figure, []
    if stages:
        upper, whole = figure.subfigures(2, height_ratios=heights)
        panels = [upper.subplots()]
        _draw_stages(panels[0], stages, released)
    below = whole.subplots(number, sharex=has_steps, squeeze=False)[:, 0]
    if losses:
        steps, values = np.array(losses, float).T
        below[0].plot(steps, values, color="#bbbbbb", lw=0.8)
        below[0].set_ylabel("training loss\n(private)")
        if (width := max(1, len(values) // 30)) > 1:
            smooth = np.convolve(values, np.ones(width) / width, "valid")
            mean = {"c": _BLACK, "label": f"mean of {width} steps"}
            below[0].plot(steps[width - 1 :], smooth, **mean)
            below[0].legend(**_ABOVE)
    if has_scores:
        _draw_scores(below[-2], scores, without_noise or {})
    _draw_epsilon(below[-1], epsilons, target_epsilon, is_guarantee)
    label = "step" if has_steps or np.isinf(target_epsilon) else "epsilon (nats)"
    below[-1].set_xlabel(f"{label}\n\n{meaning}" if meaning else label)
    plain(*panels, *below)
    save(figure, path, is_private=True)


def draw_reliability(path: Path, found: Mapping[str, Reliability]) -> None:
    """Draws accuracy and share of queries by probability, for each held-out part."""
    figure = new_figure(4.6, 5.2)
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    upper.plot([0, 1], [0, 1], color=_BLACK, ls=":", lw=1, label="exact")
    for (split, one), (color, marker) in zip(found.items(), _STYLES, strict=False):
        label = f"{split}, error {one.error:.3f}"
        line = {"color": color, "marker": marker, "ms": 4.5}
        upper.plot(one.probability, one.accuracy, label=label, **line)
        lower.plot(one.probability, np.array(one.counts) / sum(one.counts), **line)
    upper.set(ylim=(0, 1.02), xlim=(0, 1.02), ylabel="share that is right")
    upper.legend(frameon=False, loc="lower right")
    lower.set(ylim=(0, None), ylabel="share of queries")
    lower.set_xlabel("probability of the predicted class (mean of a bin)")
    plain(upper, lower)
    save(figure, path, is_private=True)


def _draw_stages(
    axes: Any, stages: Mapping[str, Mapping[str, Score]], released: str
) -> None:
    """Draws a row per stage, from the top: its scores with their intervals."""
    splits = list(dict.fromkeys(name for scores in stages.values() for name in scores))
    for place, (split, style) in enumerate(zip(splits, _STYLES, strict=False)):
        shown = [scores[split]._asdict() for scores in stages.values()]
        rows = [row + 0.22 * place - 0.11 for row in range(len(shown))]
        _intervals(axes, shown, rows, *style, split)
    for row, scores in enumerate(stages.values()):
        words = "   ".join(digits(score.mean) for score in scores.values())
        place = {"transform": axes.get_yaxis_transform(), "va": "center"}
        axes.text(1.01, row, words, **place)
    names = [f"{n}\n(released)" if n == released else n for n in stages]
    axes.set_yticks(range(len(stages)), names)
    axes.set_ylim(len(stages) - 0.5, -0.5)
    kind = next(iter(next(iter(stages.values())).values())).name
    _end_at_one(axes, "x", kind)
    axes.set_xlabel(f"{kind} (held out) of each stage of the run")
    axes.legend(ncols=len(splits), **_ABOVE)


def _draw_scores(
    axes: Any, scores: _Records, without_noise: Mapping[str, Mapping[str, Any]]
) -> None:
    """Draws scores with their intervals, one line per part of the held-out data."""
    names = list(dict.fromkeys(name for _, parts in scores for name in parts))
    for name, (color, marker) in zip(names, _STYLES, strict=False):
        rows = [(step, parts[name]) for step, parts in scores if name in parts]
        found = [score for _, score in rows]
        label = f"{name}, private: {digits(found[-1]['mean'])}"
        _intervals(axes, found, [step for step, _ in rows], color, marker, label, "y")
        if name in without_noise:
            bare = without_noise[name]["mean"]
            label = f"{name}, without noise (not private): {digits(bare)}"
            axes.axhline(bare, color=color, ls="--", lw=1, label=label)
        axes.set_ylabel(found[0]["name"] + "\n(held out)")
    if names:
        _end_at_one(axes, "y", found[0]["name"])
        # Above the panel, as lines and error bars may be anywhere within it.
        axes.legend(ncols=2, columnspacing=1.0, handlelength=1.5, **_ABOVE)


def _intervals(
    axes: Any,
    scores: Sequence[Mapping[str, Any]],
    places: Sequence[float],
    color: str,
    marker: str,
    label: str,
    along: str = "x",
) -> None:
    """Marks scores with their intervals along an axis; on "y" a line joins them."""
    mean = np.array([score["mean"] for score in scores])
    ends = np.array([[score["low"], score["high"]] for score in scores]).T
    xy = (mean, places) if along == "x" else (places, mean)
    style: dict[str, Any] = {f"{along}err": np.abs(ends - mean), "color": color}
    ls = "" if along == "x" else "-"
    axes.errorbar(*xy, marker=marker, ls=ls, ms=4.5, capsize=2, label=label, **style)


def _end_at_one(axes: Any, along: str, kind: str) -> None:
    """Ends the axis of an accuracy where it is 1, with room for the mark."""
    low, high = getattr(axes, f"get_{along}lim")()
    if kind == "accuracy" and high > 1:
        axes.set(**{f"{along}lim": (low, 1 + 0.02 * (1 - low))})


def _draw_epsilon(
    axes: Any, epsilons: Sequence[tuple[int, float]], target: float, is_guarantee: bool
) -> None:
    """Draws epsilon by step, or as a bar if there is only one."""
    spent = "guarantee" if is_guarantee else "spent"
    if np.isinf(target):
        where = {"ha": "center", "va": "center", "transform": axes.transAxes}
        axes.text(0.5, 0.5, "no noise: epsilon is infinite", **where)
        axes.set(yticks=[], ylabel="epsilon (nats)")
    elif len(epsilons) > 1:
        axes.plot(*zip(*epsilons, strict=True), color=_BLACK, label=spent)
        axes.locator_params("x", integer=True)
        if not is_guarantee:
            axes.axhline(target, color=VERMILION, ls="--", label="target")
        axes.set(ylim=(0, 1.12 * target), ylabel="epsilon (nats)")
        axes.legend(frameon=False, loc="lower right")
    else:
        value = epsilons[-1][1] if epsilons else 0.0
        axes.barh([0], [value], 0.5, color=_BLACK, label=f"{spent}: {upward(value)}")
        if not is_guarantee:
            axes.axvline(target, c=VERMILION, ls="--", label=f"target: {target:.15g}")
        axes.set(xlim=(0, 1.12 * max(target, value)), ylim=(-0.6, 0.6), yticks=[])
        axes.legend(ncols=2, **_ABOVE)
