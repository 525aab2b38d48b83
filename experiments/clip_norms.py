"""Which clip norm? With Adam, on the glyphs: fixed ones, one that follows, and none.

Results are in ``clip_norms.csv``; see `study` for the command. Pipelines are those of
``few_shot.py``; scores are of the validation classes. Some ten minutes of one core.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drawing import (
    BLUE,
    YELLOW,
    draw_runs,
    logarithmic,
    markdown,
    new_figure,
    save,
)
from few_shot import P1, P3, FewShot
from study import Results, Run, Study, cpu_seconds, shown, trained

from jaxdp_episodic.trainer.config.training_parts import ClippingConfig

FIXED = (1e-4, 1e-2, 0.1, 1.0, 10.0)
MEDIAN = ClippingConfig(kind="quantile", quantile=0.5)
CLIPPINGS: dict[str, tuple[float, ClippingConfig | None]] = {
    **{f"fixed at {norm:g}": (norm, None) for norm in FIXED},
    "follows the median, from 1": (1.0, MEDIAN),
    "follows the median, from 10": (10.0, MEDIAN),
    "normalized": (1.0, ClippingConfig(kind="normalize")),
}
FREE = list(CLIPPINGS)[len(FIXED) :]
# Of the demo, whose statistics have said most before the steps begin: one run each.
OF_THE_DEMO = ("fixed at 0.1", "fixed at 10", *FREE[1:])
LOOKS = {1.0: (YELLOW, "-", "o"), 8.0: (BLUE, "-", "s")}


class ClipNorms(Study):
    """Clip norms at two epsilons, of P1 and of the demo."""

    name, keys = "clip_norms", ("pipeline", "clipping", "epsilon")

    def __init__(self) -> None:
        self._few_shot = FewShot()

    def runs(self) -> Iterator[Run]:
        """All of P1, then those of the demo."""
        yield from ((P1, name, e) for e in LOOKS for name in CLIPPINGS)
        yield from ((P3, name, e) for e in LOOKS for name in OF_THE_DEMO)

    def number_of(self, run: Run, repeats: int) -> int:
        """The demo is trained once."""
        return min(repeats, 1) if run[0] == P3 else repeats

    def train(self, run: Run, repeat: int) -> dict[str, Any]:
        """Score on the validation classes, and epsilon by the ledger."""
        del repeat
        begun = time.process_time()
        pipeline, name, epsilon = run
        norm, clipping = CLIPPINGS[name]
        self._few_shot.steps = self.steps
        whole = (pipeline, "", "example", "zero_out", epsilon)
        config = self._few_shot.config(whole, self.out / "features")
        config = dataclasses.replace(config, l2_clip_norm=norm, clipping=clipping)
        tables = self._few_shot.tables_of(config)
        scores, _, ledger = trained(config, tables, self.out / "run")
        values = {"validation": scores["validation"], "ledger": ledger}
        return values | cpu_seconds(begun)

    def tables(self, found: Results) -> dict[str, str]:
        """All clippings at both epsilons."""
        columns = [(p, e) for p in (P1, P3) for e in LOOKS]
        rows = [
            [
                name,
                *(
                    shown(found.column("validation", (p, name, e)), 3)
                    for p, e in columns
                ),
            ]
            for name in CLIPPINGS
        ]
        head = ["clip norm", *(f"{p}, epsilon {e:g}" for p, e in columns)]
        return {self.name: markdown(head, rows)}

    def draw(self, found: Results, path: Path) -> None:
        """Accuracy against a fixed clip norm, and beside it what needs none."""
        figure, (fixed, others) = new_figure(
            2, size=(8.6, 4.0), sharey=True, width_ratios=(2.2, 1.6)
        )
        for epsilon, look in LOOKS.items():
            for axes, places in (
                (fixed, dict(zip(FIXED, CLIPPINGS, strict=False))),
                (others, dict(enumerate(FREE))),
            ):
                runs = {place: (P1, name, epsilon) for place, name in places.items()}
                color, line, marker = look
                draw_runs(
                    axes,
                    found.along("validation", runs),
                    (color, line if axes is fixed else "", marker),
                    ends="std",
                    label=f"epsilon {epsilon:g}",
                    markerfacecolor=color,
                )
        logarithmic(fixed, "x", FIXED)
        fixed.set(xlabel="clip norm, fixed", ylabel="accuracy on unseen syllables")
        fixed.set_title("a clip norm to choose", loc="left")
        fixed.legend(frameon=False, loc="lower left")
        words = [name.replace(", ", ",\n").replace(" the", "\nthe") for name in FREE]
        others.set_xticks(range(len(FREE)), words)
        others.set_xlim(-0.6, len(FREE) - 0.4)
        others.set_title("none to choose", loc="left")
        save(figure, path)


if __name__ == "__main__":
    ClipNorms().main(__doc__)
