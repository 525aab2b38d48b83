"""Private few-shot learning on other kinds of data than glyphs, by configs of `init`.

``python experiments/small_sets.py`` makes the sets first. Each is given to `init`, and
the config that `init` writes is trained unedited. Results are in ``kinds_of_data.csv``;
see `study` for the command. A run chooses its released stage on the validation classes;
then each of its stages is scored on the test classes.
"""

from __future__ import annotations

import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from drawing import markdown
from small_sets import FOLDER, KINDS, place_of
from study import Results, Run, Study, cpu_seconds

from jaxdp_episodic.tools.plan.first_config import Wishes, first_config
from jaxdp_episodic.tools.plan.source import Source, described_source
from jaxdp_episodic.trainer.run.assemble import Tables, assembled
from jaxdp_episodic.training import TrainingConfig

EPSILONS = (1.0, 8.0)
NO_HARM = 0.005  # a release further below the untrained features counts as harm


class KindsOfData(Study):
    """Sets at each epsilon."""

    name, keys, repeats = "kinds_of_data", ("set", "epsilon"), 2
    _last: tuple[str, Source] | None = None

    def runs(self) -> Iterator[Run]:
        """Each set at all epsilons, then the next set."""
        for name in KINDS:
            yield from ((name, epsilon) for epsilon in EPSILONS)

    def _config(self, name: str, epsilon: float) -> tuple[dict[str, Any], str]:
        """The config that `init` writes, and its pipeline; a set is read once."""
        written = self.out / f"{name.replace(' ', '_')}_{epsilon:g}.toml"
        if not written.exists():
            if self._last is None or self._last[0] != name:
                self._last = name, described_source(place_of(name).resolve(), written)
            text, _ = first_config(self._last[1], Wishes(epsilon=epsilon))
            sizes = "/".join(
                str(part.num_units["class"]) for part in self._last[1].parts.values()
            )
            copies = f", {len(self._last[1].duplicates)} copies" * bool(
                self._last[1].duplicates
            )
            written.write_text(f"# {sizes} classes{copies}\n{text}", encoding="utf-8")
        text = written.read_text(encoding="utf-8")
        table = tomllib.loads(text)
        start = table.get("start", {})
        last = f" ({start.get('between', 'total')})" * (start.get("kind") == "plda")
        steps = ", then steps" * ("num_steps" in table and bool(start))
        what = f"statistics{last}{steps}" if start else "steps"
        return table, f"{text.splitlines()[0][2:]}; {what}"

    def train(self, run: Run, repeat: int) -> dict[str, Any]:
        """Test scores of the untrained, the released and the best stage, and of all.

        The difference is that of released and untrained, episode by episode, and its
        standard error is over episodes and classes. ``stages`` has of each what it
        scores on validation and test classes.
        """
        begun, (name, epsilon) = time.process_time(), run
        table, what = self._config(name, epsilon)
        cache = (FOLDER / "features" / name.replace(" ", "_")).resolve()
        table["features"] = table.get("features", {}) | {"cache": str(cache)}
        if self.steps is not None and "num_steps" in table:
            table["num_steps"] = self.steps
        config = TrainingConfig.from_dict(table)
        trainer, held_out, _ = assembled(config, Tables(config, self.out))
        validation = {"validation": held_out["validation"]}
        with tempfile.TemporaryDirectory() as scratch:
            trainer.train(Path(scratch), evaluations=validation, checkpoint_every=10**6)
        first, test = (
            {
                stage.name: held_out[split].episodes(stage.learner, stage.params)
                for stage in trainer.stages()
            }
            for split in ("validation", "test")
        )
        released, names = trainer.released.name, list(test)
        difference, error = test[released].ahead_of(test[names[0]])
        best = max(names, key=lambda one: test[one].value)
        each = (f"{n} {first[n].value:.4f} {test[n].value:.4f}" for n in names)
        return {
            "seed": repeat,
            "what": what,
            "untrained": f"{test[names[0]].value:.4f}",
            "released": f"{test[released].value:.4f}",
            "stage": released,
            "best": f"{test[best].value:.4f}",
            "best_stage": best,
            "difference": f"{difference:.4f}",
            "error": f"{error:.4f}",
            **cpu_seconds(begun),
            "stages": "; ".join(each),
        }

    def tables(self, found: Results) -> dict[str, str]:
        """What releases gain over untrained features, and how far they are below."""
        rows = []
        for name in KINDS:
            runs = [found.of((name, epsilon)) for epsilon in EPSILONS]
            finished = [row for run in runs for row in run]
            if finished:
                classes, _, _ = finished[0]["what"].partition("; ")
                before = np.mean([row["untrained"] for row in finished])
                cells = classes.replace(" classes", ""), f"{before:.3f}"
                rows.append([name, *cells, *map(gain, runs)])
        if not rows:
            return {}
        epsilons = (f"epsilon {epsilon:g}" for epsilon in EPSILONS)
        text = markdown(["set", "classes", "untrained", *epsilons], rows)
        return {self.name: f"{text}\n{harm(found.rows)}\n"}


def gain(rows: list[dict[str, Any]]) -> str:
    """Returns the mean difference of released and untrained, and the stages."""
    if not rows:
        return ""
    difference, error = (
        np.mean([row[key] for row in rows]) for key in ("difference", "error")
    )
    stages = ", ".join(dict.fromkeys(row["stage"] for row in rows))
    return f"{difference:+.3f} ± {error:.3f}, {stages}"


def harm(rows: list[dict[str, Any]]) -> str:
    """Returns, in words, how far the release is below the untrained features."""
    differences = [float(row["difference"]) for row in rows]
    few = sum(value < -NO_HARM for value in differences)
    behind = np.array([float(row["best"]) - float(row["released"]) for row in rows])
    worst = rows[int(behind.argmax())]
    return (
        f"**Does it harm?** {few} of {len(rows)} runs release a stage that is more "
        f"than {NO_HARM:g} below untrained features; the smallest difference is "
        f"{min(differences):+.4f}. The [stage](stages.md) of the same run with the "
        f"best test score, which a run cannot know, is ahead by "
        f"{behind.mean():.4f} on average, by "
        f"more than 0.01 in {np.count_nonzero(behind > 0.01)} runs, and by "
        f"{behind.max():.4f} at most ({worst['set']}, epsilon {worst['epsilon']:g})."
    )


if __name__ == "__main__":
    KindsOfData().main(__doc__)
