"""The picture of a plan: the gain and the cost of each design."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.describe.step import STEP
from jaxdp_episodic.tools.plan.plan import Plan
from jaxdp_episodic.tools.plan.question import SCHEMES
from jaxdp_episodic.tools.plots import figures

# Of each way to draw, in the order of `SCHEMES`.
_COLORS = (figures.BLUE, "#009e73", figures.VERMILION, "#7f7f7f", "#cc79a7")
_MARKERS = "ovs^P"
_DASHED = (0, (5, 2))


def draw_plan(plan: Plan, path: Path, *, title: str, draws: bool) -> None:
    """Draws two Pareto fronts; a star marks the recommended design if ``draws``."""
    figure = figures.new_figure(10.4, 5.6)
    left, right = figure.subplots(1, 2)
    # The scales are logarithmic.
    shown = [one for one in plan.candidates if one.effective_steps > 0]
    if not shown:
        raise ValueError("no setting gains anything")
    sizes = sorted({one.design.examples for one in plan.candidates})
    for design, group in itertools.groupby(shown, lambda one: one.design):
        whole, scheme = design.clip_unit == STEP, SCHEMES.index(design.scheme)
        style: dict[str, Any] = {
            "color": _COLORS[scheme],
            "ls": figures.DOTTED if whole else "-" if design.is_multistage else _DASHED,
            "marker": "D" if whole else _MARKERS[scheme],
            "ms": 4,
            "mfc": None if design.is_multistage else "white",
            "lw": 1.6,
            "alpha": max(0.5 ** sizes.index(design.examples), 0.3),
        }
        mine = list(group)
        x, y = np.array([(one.num_steps, one.signal_to_noise) for one in mine]).T
        front = figures.front_of(-x, -y)[::-1]
        left.loglog(x[front], y[front], label=design.name, **style)
        x, y = np.array([(one.total_episodes, one.effective_steps) for one in mine]).T
        front = figures.front_of(x, -y)
        right.loglog(x[front], y[front], drawstyle="steps-post", **style)
    best = plan.recommended
    star: dict[str, Any] = figures.STAR | {"color": "#f0c000"}
    if draws:
        x, y = best.num_steps, best.signal_to_noise
        left.plot(x, y, label="recommended", **star)
        right.plot(best.total_episodes, best.effective_steps, **star)
    ratio = "signal to noise of a step\n(clipped contributions / noise)"
    left.set(xlabel="steps of the run", ylabel=ratio)
    left.set_title("At equal privacy, within the budget", fontsize=11)
    right.set(xlabel="episodes of the run", ylabel="effective steps (estimate)")
    right.set_title("What more computing buys", fontsize=11)
    figures.plain(left, right)
    # Leaves out designs that achieve next to nothing, which would stretch the axis.
    worth = [one.effective_steps for one in plan.candidates]
    bottom = max(max(worth) / 300, min(worth) / 1.3)
    wide = [one.total_episodes for one in shown if one.effective_steps >= bottom]
    right.set(xlim=(min(wide) / 1.4, max(wide) * 1.4), ylim=(bottom, max(worth) * 1.6))
    for axis in (left.xaxis, left.yaxis, right.xaxis, right.yaxis):
        figures.plain_ticks(axis, *axis.get_view_interval())
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=2)
    figure.suptitle(title, fontsize=12)
    figures.save(figure, path)
