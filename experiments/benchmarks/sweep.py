"""Speed and memory of sweeps: everything from the command to the table.

    make bench-sweep    # or experiments/benchmarks/sweep.py [--quick] [--only PART ...]

Each sweep is the command ``jaxdp-episodic sweep`` in a process of its own, with nothing
compiled before, its picture included. Settings are those of grouped classes (the design
of ``configs/sweep_episodes.toml``), and of Poisson-sampled examples: numbers of steps,
noise multipliers and rates. ``one_call`` asks the same settings in one call of
`jaxdp_episodic.epsilon`, with which the sweeps are compared. ``menus`` is a batch of
adaptive runs, four noises and a budget of 1,000 each, both ends of the worst strategy's
epsilon.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import Rows, cost_of, run_parts, timed

_AXES = {
    "num_steps": (100, 10_000),
    "noise_multiplier": (0.7, 6.0),
    "rate": (0.01, 1.0),
}
_TEXT = """
version = 1
delta = 1e-5
method = "{method}"
[step]
type = "GaussianStep"
{sampling}
[[axes]]
field = "num_steps"
geomspace = [100, 10_000, {steps}]
[[axes]]
field = "noise_multiplier"
geomspace = [0.7, 6.0, {noises}]
[[axes]]
field = "{drawn}.sampling_probability"
geomspace = [0.01, 1.0, {rates}]
"""


class Design(NamedTuple):
    """Sampling in a description, and which of its units is Poisson sampled."""

    sampling: str
    drawn: str


GROUPED = Design(
    """
[step.sampling]
type = "GroupedClasses"
num_classes = 1_623
ways = 5
episodes = { type = "Poisson", name = "episode" }
examples = { type = "WithoutReplacement", name = "example", size = 4, population = 20 }
""",
    "episode",
)
EXAMPLES = Design(
    """
[step.sampling]
type = "MultistageSampling"
levels = [{ type = "Poisson", name = "example" }]
""",
    "example",
)


class Grid(NamedTuple):
    """Numbers of values of the axes."""

    steps: int
    noises: int
    rates: int


class Sizes(NamedTuple):
    """How much is measured."""

    rdp: Grid = Grid(4, 500, 500)
    exact: Grid = Grid(10, 100, 100)
    many_rdp: Grid = Grid(10, 1_000, 1_000)
    many_exact: Grid = Grid(10, 400, 250)
    menus: int = 50


QUICK = Sizes(Grid(2, 20, 20), Grid(2, 6, 6), Grid(2, 30, 30), Grid(2, 8, 16), 2)


def sweep(method: str, grid: Grid, design: Design = GROUPED) -> dict[str, Any]:
    """Returns the cost of one sweep by the command."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sweep.toml"
        text = _TEXT.format(method=method, **grid._asdict(), **design._asdict())
        file.write_text(text, encoding="utf-8")
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "jaxdp_episodic", "sweep", file, "--out", out]
        cost = cost_of(command)
    found = re.search(r"^evaluated +([\d,]+) in ([\d.,]+) s", cost.output, re.M)
    assert found is not None, cost.output
    settings, seconds = (float(text.replace(",", "")) for text in found.groups())
    return {
        "sweep": f"{method}, {design.drawn}s",
        "settings": int(settings),
        **cost.row(),
        "of these evaluating": seconds,
        "a second, all included": settings / cost.wall,
    }


def sweeps(sizes: Sizes) -> Rows:
    """Sweeps by both methods, and the start alone."""
    return [
        sweep("rdp", Grid(1, 2, 2)),
        sweep("rdp", sizes.rdp, EXAMPLES),
        sweep("rdp", sizes.rdp),
        sweep("exact", sizes.exact),
        sweep("rdp", sizes.many_rdp, EXAMPLES),
        sweep("exact", sizes.many_exact, EXAMPLES),
    ]


def one_call(sizes: Sizes) -> Rows:
    """The settings of two of these sweeps in one call each."""
    import jaxdp_episodic as jde

    rows: Rows = []
    for method, grid in (("rdp", sizes.rdp), ("exact", sizes.exact)):
        axes = zip(_AXES.values(), grid, strict=True)
        values = [np.geomspace(low, high, n) for (low, high), n in axes]
        steps, noise, rate = np.meshgrid(*values)
        design = jde.GroupedClasses(
            num_classes=1_623,
            ways=5,
            episodes=jde.Poisson("episode", sampling_probability=rate),
            examples=jde.WithoutReplacement("example", size=4, population=20),
        )
        step = jde.GaussianStep(design, noise_multiplier=noise)
        question: dict[str, Any] = {"num_steps": np.rint(steps), "delta": 1e-5}
        question["method"] = method
        row, _ = timed(lambda s=step, a=question: jde.epsilon(s, **a), 2)
        rows.append({"one call": method, **row, "a second": 1e3 / row["ms each"]})
    return rows


def menus(sizes: Sizes) -> Rows:
    """A batch of menus; their worst strategies are found on all cores."""
    import jaxdp_episodic as jde

    draw = jde.Poisson("example", sampling_probability=0.1)
    prices = {1.5: 30, 2.2: 11, 3.3: 5, 5.0: 2}
    scale = np.linspace(1.0, 1.1, sizes.menus)
    run = jde.AdaptiveRun(
        {f"{n:g}": jde.GaussianStep(draw, noise_multiplier=n * scale) for n in prices},
        prices={f"{n:g}": price for n, price in prices.items()},
        budget=1000,
    )
    begun, worked = time.perf_counter(), sum(os.times()[:4])
    lower, upper = run.epsilon_interval(delta=1e-5)
    row = {
        "menus": sizes.menus,
        "a minute": 60 * sizes.menus / (time.perf_counter() - begun),
        "CPU s each": (sum(os.times()[:4]) - worked) / sizes.menus,
        "widest interval": float((upper - lower).max()),
    }
    return [row]


PARTS = {"sweeps": sweeps, "one_call": one_call, "menus": menus}

if __name__ == "__main__":
    out = "results/benchmark-sweep"
    run_parts(__doc__, PARTS, sizes=Sizes(), quick=QUICK, out=out)
