"""The picture of an audit: what is claimed next to what was found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp_episodic.tools.plots.figures import (
    BLUE,
    VERMILION,
    check_suffix,
    new_figure,
    plain,
    save,
)

_TIP_RIGHT = 5  # matplotlib's triangle whose tip, not its middle, is at the value


def plot_audit(rows: Sequence[Any], path: str | Path, *, title: str = "") -> None:
    """Draws claimed and audited epsilons, a line a row: at least one `AuditRow`."""
    path = check_suffix(path)
    if not rows:
        raise ValueError("rows must not be empty")
    figure = new_figure(9.0, 1.7 + 0.42 * len(rows))
    axes = figure.add_subplot()
    heights = np.arange(len(rows))[::-1]
    exact = np.array([row.claimed_exact for row in rows])
    rdp = np.array([row.claimed_rdp for row in rows], float)
    audited = np.array([row.audited for row in rows])
    axes.hlines(heights, audited, exact, color="#bbbbbb", lw=2, zorder=1)
    style: dict[str, Any] = {"marker": _TIP_RIGHT, "ls": "", "color": BLUE, "ms": 7}
    axes.plot(audited, heights, label="audited (lower bound)", **style)
    axes.plot(exact, heights, "|", color="black", ms=13, mew=2, label="claimed, exact")
    if not np.isnan(rdp).all():
        style = {"color": VERMILION, "ms": 6, "mew": 1.6}
        axes.plot(rdp, heights, "x", label="claimed, RDP", **style)
    labels = [f"{row.name}\n{row.attacker}, delta {row.delta:g}" for row in rows]
    axes.set_yticks(heights, labels, fontsize=8)
    axes.set_xlabel("epsilon (nats)")
    # A little room for the marks of audits that showed nothing.
    axes.set_xlim(left=-0.02 * axes.get_xlim()[1])
    axes.set_ylim(-0.7, len(rows) - 0.3)
    plain(axes, grid="x")
    if title:
        axes.set_title(title, fontsize=11, loc="left", pad=26)  # above the legend
    where: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(frameon=False, fontsize=8, ncols=3, **where)
    save(figure, path)
