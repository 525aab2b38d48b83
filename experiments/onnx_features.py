"""A pretrained network's features beside wavelets: the glyphs at epsilon 1.

Results are in ``onnx_features.csv``; see `study` for the command. It needs the extra
``[onnx]`` and the package ``rapidocr-onnxruntime`` (Apache-2.0; ``pip install
--no-deps`` will do), of which it takes one file: the text recognizer of PP-OCRv4,
trained on pictures of text. Its features are those of
``configs/demo_epsilon1_onnx.toml``, with the file's place filled in. Untrained are the
features alone.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from pathlib import Path
from typing import Any

from drawing import markdown
from study import (
    CONFIGS,
    Results,
    Run,
    Study,
    cpu_seconds,
    shown,
    trained,
    untrained,
)

from jaxdp_episodic.trainer.run.assemble import Tables
from jaxdp_episodic.training import read_config

CONFIG_OF = {"wavelets": "demo_epsilon1", "network": "demo_epsilon1_onnx"}
PACKAGE, FILE = "rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx"


def place_of_network() -> Path:
    """Returns the path of the recognizer; the package's code is not run."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(
            "pip install --no-deps rapidocr-onnxruntime brings the network"
        )
    return Path(found.submodule_search_locations[0]) / FILE


class OnnxFeatures(Study):
    """The demo at epsilon 1 on two kinds of features."""

    name, keys = "onnx_features", ("features",)

    def runs(self) -> list[Run]:
        """Both kinds."""
        return [(kind,) for kind in CONFIG_OF]

    def train(self, run: Run, repeat: int) -> dict[str, Any]:
        """Scores with nothing learned, and after the run."""
        del repeat
        begun, (kind,) = time.process_time(), run
        config = read_config(CONFIGS / f"{CONFIG_OF[kind]}.toml")
        features = dataclasses.replace(config.features, cache=str(self.out / kind))
        if kind == "network":
            features = dataclasses.replace(features, path=str(place_of_network()))
        steps = self.steps or config.num_steps
        config = dataclasses.replace(config, features=features, num_steps=steps)
        tables = Tables(config, None, folder=self.out)
        before = untrained(tables, "test")
        scores, _, epsilon = trained(config, tables, self.out / "run")
        values = {"untrained": before, "test": scores["test"], "ledger": epsilon}
        return values | cpu_seconds(begun)

    def tables(self, found: Results) -> dict[str, str]:
        """Test accuracy of both."""
        columns = ("untrained", "test")
        rows = [
            [k, *(shown(found.column(c, (k,))) for c in columns)] for k in CONFIG_OF
        ]
        return {self.name: markdown(["features", *columns], rows)}


if __name__ == "__main__":
    OnnxFeatures().main(__doc__)
