"""A pretrained network's features beside wavelets: the glyphs at epsilon 1.

``python experiments/onnx_features.py`` needs the extra ``[onnx]`` and the package
``rapidocr-onnxruntime`` (Apache-2.0; ``pip install --no-deps`` will do), of which it
takes a file alone: the text recognizer of PP-OCRv4, trained on pictures of text. Its
features are those of ``configs/demo_epsilon1_onnx.toml``, with the file's place filled
in. For each kind of features it prints the accuracy of 600 test episodes with nothing
learned, and after the run at epsilon 1; every run has fresh entropy. Features are kept
under ``--out``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import time
from pathlib import Path

from few_shot import Run, nothing_learned, trained

from jaxdp_episodic.trainer.run.assemble import Tables
from jaxdp_episodic.training import TrainingConfig, read_config

CONFIGS = Path(__file__).parent.parent / "configs"
NAMES = {"wavelets": "demo_epsilon1", "network": "demo_epsilon1_onnx"}
PACKAGE = "rapidocr_onnxruntime"
FILE = "models/ch_PP-OCRv4_rec_infer.onnx"


def place_of_network() -> Path:
    """Returns the path of the recognizer; the package's code is not run."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(
            "pip install --no-deps rapidocr-onnxruntime brings the network"
        )
    return Path(found.submodule_search_locations[0]) / FILE


def config_of(kind: str, out: Path) -> TrainingConfig:
    """Returns the run on one kind of features, which are kept under ``out``."""
    config = read_config(CONFIGS / f"{NAMES[kind]}.toml")
    features = dataclasses.replace(config.features, cache=str(out / kind))
    if kind == "network":
        features = dataclasses.replace(features, path=str(place_of_network()))
    assert config.evaluation is not None
    evaluation = dataclasses.replace(config.evaluation, without_noise=False)
    return dataclasses.replace(config, features=features, evaluation=evaluation)


def main() -> None:
    """Prints validation and test accuracy, and seconds of CPU, of every run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/onnx_features"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=NAMES, default=list(NAMES))
    asked = parser.parse_args()
    for kind in asked.kinds:
        out = asked.out.absolute()
        config, begun = config_of(kind, out), time.process_time()
        tables = Tables(config, None, folder=out)
        size = tables.load("train").features.shape[1]
        untrained = nothing_learned(config, tables)
        spent = time.process_time() - begun
        print(f"{kind}: {size} features, {spent:.0f} s of CPU", flush=True)
        print(f"  untrained   {untrained.validation:.4f} {untrained.test:.4f}")
        for _ in range(asked.repeats):
            run = Run(kind, "", "example", "zero_out", config.epsilon)
            found = trained(run, config, tables, out / "run")
            print(
                f"  epsilon {found.ledger:.4g}   {found.validation:.4f} "
                f"{found.test:.4f}   {found.seconds:.0f} s of CPU",
                flush=True,
            )


if __name__ == "__main__":
    main()
