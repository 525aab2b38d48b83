"""Omniglot and mini-ImageNet from folders of images: statistics and steps, and MAML.

``python experiments/image_folders.py omniglot DATA`` trains the configs train_omniglot
and train_omniglot_maml on the data in that folder, ``mini-imagenet`` those of its name;
each is a ``jaxdp-episodic train`` of its own too. It prints the test accuracy, what was
spent, and the time and memory of each.

The folders are as the data sets come: ``images_background`` and ``images_evaluation``
with ``alphabet/character/CCCC_DD.png``; ``train``, ``val``, ``test`` with
``class/*.jpg``. ``--generate`` first makes such folders, of the same layout and size,
of drawings that mean nothing: to see that all fits, and how long it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from jaxdp_episodic.files.toml_file import read_toml, to_toml
from jaxdp_episodic.trainer.run.run_files import read_log

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
OMNIGLOT, MINI_IMAGENET = NAMES = ("omniglot", "mini-imagenet")
PIPELINES = {"P3": "train_{}", "MAML": "train_{}_maml"}
# Classes of each folder, and examples of a class.
LAYOUT = {
    OMNIGLOT: ({"images_background": 964, "images_evaluation": 659}, 20),
    MINI_IMAGENET: ({"train": 64, "val": 16, "test": 20}, 600),
}
_ALPHABET = 33  # characters of an alphabet, about


def generate(name: str, folder: Path, counts: dict[str, int], examples: int) -> None:
    """Writes folders of generated images in the layout of a data set."""
    rng = np.random.default_rng(0)
    places = [(part, i) for part, number in counts.items() for i in range(number)]
    for number, (part, i) in enumerate(places):
        alphabet, character = divmod(i, _ALPHABET)
        place = folder / part / f"n{i:08d}"
        if name == OMNIGLOT:
            above = folder / part / f"Alphabet_{alphabet:02d}"
            place = above / f"character{character + 1:02d}"
        place.mkdir(parents=True)
        strokes = rng.integers(15, 90, (3, 4, 2))
        colours = rng.integers(0, 256, (7, 7, 3))
        for example in range(examples):
            if name == OMNIGLOT:
                image = Image.new("1", (105, 105), 1)
                pen = ImageDraw.Draw(image)
                for stroke in strokes + rng.integers(-6, 7, strokes.shape):
                    pen.line([tuple(p) for p in stroke.tolist()], fill=0, width=3)
                image.save(place / f"{number:04d}_{example + 1:02d}.png")
            else:
                noisy = np.clip(colours + rng.integers(-90, 91, (7, 7, 3)), 0, 255)
                image = Image.fromarray(noisy.astype(np.uint8))
                image = image.resize((84, 84), Image.Resampling.BILINEAR)
                image.save(place / f"{place.name}{example:08d}.jpg")


def config_on(name: str, pipeline: str, data: Path) -> dict[str, Any]:
    """Returns a shipped config with another folder of data."""
    path = CONFIGS / f"{PIPELINES[pipeline].format(name.replace('-', '_'))}.toml"
    config = read_toml(path)
    parts = list(LAYOUT[name][0])
    if name == OMNIGLOT:
        config["data"]["path"] = str(data / parts[0])
        config["data"]["test"] = str(data / parts[1])
    else:
        config["data"]["path"] = str(data)
    # Classes to train on, which are public: folders with images.
    depth = "*/*" if name == OMNIGLOT else "*"
    number = sum(place.is_dir() for place in (data / parts[0]).glob(depth))
    if not number:
        raise FileNotFoundError(f"no folders of classes in {data / parts[0]}")
    config["step"]["sampling"]["num_classes"] = number
    return config


def trained(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Trains in a process of its own; returns its scores, time and memory."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.with_suffix(".toml")
    path.write_text(to_toml(config), encoding="utf-8")
    command = [sys.executable, "-m", "jaxdp_episodic", "train", str(path)]
    begun = time.perf_counter()
    child = subprocess.Popen([*command, "--out", str(folder)])
    _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"training ended with status {status}: {' '.join(command)}")
    last = [record for record in read_log(folder) if "held_out" in record][-1]
    return {
        "scores": {k: score["mean"] for k, score in last["held_out"].items()},
        "epsilon": float(last["epsilon"]),
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_gib": used.ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20),
    }


def main() -> None:
    """Trains what is asked for, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, help="default: results/NAME")
    parser.add_argument(
        "--pipelines", nargs="+", choices=PIPELINES, default=list(PIPELINES)
    )
    parser.add_argument("--epsilon", type=float, help="in place of the configs'")
    parser.add_argument("--num-steps", type=int, help="in place of the configs'")
    parser.add_argument("--episodes", type=int, help="of the evaluation")
    parser.add_argument("--generate", action="store_true")
    options = parser.parse_args()
    data = options.data.resolve()
    if options.generate:
        begun = time.perf_counter()
        generate(options.name, data, *LAYOUT[options.name])
        print(f"generated in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    out = options.out or Path("results") / options.name
    results = {}
    for pipeline in options.pipelines:
        config = config_on(options.name, pipeline, data)
        for key in ("epsilon", "num_steps"):
            if getattr(options, key) is not None:
                config[key] = getattr(options, key)
        if options.episodes is not None:
            config["evaluation"]["num_episodes"] = options.episodes
        results[pipeline] = trained(config, out.resolve() / pipeline)
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print("| | test accuracy | epsilon | minutes | CPU minutes | peak memory |")
    print("|---|---|---|---|---|---|")
    for pipeline, found in results.items():
        print(
            f"| {pipeline} | {found['scores']['test']:.4f} | {found['epsilon']:.3f} | "
            f"{found['seconds'] / 60:.1f} | {found['cpu_seconds'] / 60:.1f} | "
            f"{found['peak_gib']:.1f} GiB |"
        )


if __name__ == "__main__":
    main()
