"""Which clip norm? With Adam, on the glyphs: fixed ones, one that follows, and none.

``python experiments/clip_norms.py --repeats 3`` trains what is not yet in
``clip_norms.csv``, which lies beside this script and gets a line as soon as a run is
finished, then writes ``clip_norms.md`` and ``clip_norms.png`` from all that is there;
``--repeats 0`` only writes these. Runs, scores and checks are those of ``few_shot.py``;
scores are of the validation classes. Some ten minutes of one core.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from drawing import logarithmic, new_figure, save
from few_shot import P1, P3, Run, config_of, markdown, trained

from jaxdp_episodic.trainer.config.training_parts import ClippingConfig
from jaxdp_episodic.trainer.run.assemble import Tables

RESULTS = Path(__file__).resolve().with_suffix(".csv")
FIXED = (1e-4, 1e-2, 0.1, 1.0, 10.0)
MEDIAN = ClippingConfig(kind="quantile", quantile=0.5)
NORMALIZED = ClippingConfig(kind="normalize")
CLIPPINGS: dict[str, tuple[float, ClippingConfig | None]] = {
    **{f"fixed at {norm:g}": (norm, None) for norm in FIXED},
    "follows the median, from 1": (1.0, MEDIAN),
    "follows the median, from 10": (10.0, MEDIAN),
    "normalized": (1.0, NORMALIZED),
}
# Of the demo, whose statistics have said most before the steps begin: one run each.
OF_THE_DEMO = (
    "fixed at 0.1",
    "fixed at 10",
    "follows the median, from 10",
    "normalized",
)
EPSILONS = (1.0, 8.0)
COLOURS = {1.0: "#E69F00", 8.0: "#0072B2"}  # Okabe and Ito
MARKERS = {1.0: "o", 8.0: "s"}


class Setting(NamedTuple):
    """What is trained: a pipeline of ``few_shot.py``, a clipping, and the target."""

    pipeline: str
    clipping: str
    epsilon: float


Found = Mapping[Setting, list[float]]


def settings(repeat: int) -> list[Setting]:
    """All settings of one repeat."""
    found = [Setting(P1, name, e) for e in EPSILONS for name in CLIPPINGS]
    if repeat == 1:
        found += [Setting(P3, name, e) for e in EPSILONS for name in OF_THE_DEMO]
    return found


def read_results() -> dict[Setting, list[float]]:
    """All scores so far."""
    found: dict[Setting, list[float]] = defaultdict(list)
    if RESULTS.exists():
        with RESULTS.open(newline="", encoding="utf-8") as file:
            for pipeline, clipping, epsilon, score, *_ in list(csv.reader(file))[1:]:
                found[Setting(pipeline, clipping, float(epsilon))].append(float(score))
    return found


def append_result(setting: Setting, line: Any) -> None:
    """Writes one line, on the disk before this returns."""
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow((*Setting._fields, "validation", "ledger", "seconds"))
        numbers = f"{line.validation:.7g}", f"{line.ledger:.7g}", f"{line.seconds:.1f}"
        writer.writerow((*setting[:2], f"{setting.epsilon:g}", *numbers))
        file.flush()
        os.fsync(file.fileno())


def train_missing(repeats: int, out: Path) -> None:
    """Trains, repeat by repeat, what the results do not have so often yet."""
    tables: Tables | None = None
    for repeat in range(repeats):
        for setting in settings(repeat):
            if len(read_results()[setting]) > repeat:
                continue
            run = Run(setting.pipeline, "", "example", "zero_out", setting.epsilon)
            norm, clipping = CLIPPINGS[setting.clipping]
            config = dataclasses.replace(
                config_of(run, out / "features"), l2_clip_norm=norm, clipping=clipping
            )
            tables = tables or Tables(config, None)  # the same for both pipelines
            line = trained(run, config, tables, out / "run")
            append_result(setting, line)
            print(repeat, *setting, f"{line.validation:.4f}", flush=True)


def shown(scores: list[float]) -> str:
    """Mean, standard deviation and number."""
    if not scores:
        return ""
    spread = f" ± {np.std(scores, ddof=1):.3f}" if len(scores) > 1 else ""
    return f"{np.mean(scores):.3f}{spread} ({len(scores)})"


def table(found: Found) -> str:
    """All clippings at both epsilons."""
    columns = [(p, e) for p in (P1, P3) for e in EPSILONS]
    head = ["clip norm", *(f"{p}, epsilon {e:g}" for p, e in columns)]
    lines = [
        [name, *(shown(found.get(Setting(p, name, e), [])) for p, e in columns)]
        for name in CLIPPINGS
    ]
    return markdown(head, lines)


def draw(found: Found, path: Path) -> None:
    """Accuracy against a fixed clip norm, and beside it what needs none."""
    figure, (fixed, others) = new_figure(
        2, size=(8.6, 4.0), sharey=True, width_ratios=(2.2, 1.6)
    )
    free = [name for name in CLIPPINGS if not name.startswith("fixed")]
    for epsilon in EPSILONS:
        for axes, names, places in (
            (fixed, [f"fixed at {norm:g}" for norm in FIXED], FIXED),
            (others, free, range(len(free))),
        ):
            scores = [found[Setting(P1, name, epsilon)] for name in names]
            axes.errorbar(
                places,
                [np.mean(each) for each in scores],
                yerr=[np.std(each, ddof=1) for each in scores],
                label=f"epsilon {epsilon:g}",
                color=COLOURS[epsilon],
                marker=MARKERS[epsilon],
                linestyle="-" if axes is fixed else "none",
                markersize=5,
                linewidth=1.6,
                capsize=2.5,
            )
    logarithmic(fixed, "x", list(FIXED))
    fixed.set_xlabel("clip norm, fixed")
    fixed.set_ylabel("accuracy on unseen syllables")
    fixed.set_title("a clip norm to choose", loc="left")
    fixed.legend(frameon=False, loc="lower left")
    words = [name.replace(", ", ",\n").replace(" the", "\nthe") for name in free]
    others.set_xticks(range(len(free)), words)
    others.set_xlim(-0.6, len(free) - 0.4)
    others.set_title("none to choose", loc="left")
    save(figure, path)


def main() -> None:
    """Trains what is not there yet; writes table and figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/clip_norms"))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    train_missing(options.repeats, out)
    found = read_results()
    (out / "clip_norms.md").write_text(table(found), encoding="utf-8")
    print(table(found))
    draw(found, out / "clip_norms.png")


if __name__ == "__main__":
    main()
