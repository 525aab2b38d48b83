"""Training on data on the disk: memory, and speed against the same data in memory.

    python experiments/benchmarks/stored.py [--quick] [--only CASE ...]

Data are generated in a temporary folder (``TMPDIR``; up to 8 GB) and removed after:

* ``mini_imagenet``: folders of 60,000 JPEG files in its layout, 38,400 to train on,
  84 x 84 x 3; imported, and trained by the command line, test classes evaluated;
* ``million``: an npz archive of 1,000,000 x 32 x 32 x 3 in 1,000 classes; likewise.

Import and training are processes of their own, by the command line as a user runs them.
Memory is the kernel's peak of the resident set (``ru_maxrss``): all pages, mapped files
included, the page cache not.

Then steps of a linear embedding, which compute little and so wait for the disk, are
timed in turn in processes that have the same data on disk and in memory; "not cached"
drops the file from the page cache before every step. The benchmark fails only if
resident memory exceeds `LIMIT`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import statistics
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import Rows, cost_of, in_fresh_process, run_parts
from PIL import Image

LIMIT = 1_430  # MiB of resident memory
_CONFIG = """
version = 1
epsilon = 8.0
delta = 1e-8
num_steps = {steps}
l2_clip_norm = 0.1
[data]
type = "Stored"
path = "{data}"
[step]
privacy_unit = "example"
neighboring_relation = "zero_out"
[step.sampling]
type = "GroupedClasses"
num_classes = {classes}
ways = 5
episodes = {{ type = "Poisson", name = "episode", sampling_probability = {rate} }}
[step.sampling.examples]
type = "WithoutReplacement"
name = "example"
size = 6
population = {each}
[learner]
kind = "protonet"
shots = 1
[model]
{model}
embedding = 64
[evaluation]
splits = ["test"]
queries = 15
num_episodes = {episodes}
"""
CONV = 'kind = "conv_embedding"\nchannels = [16, 16, 16, 16]'
LINEAR = 'kind = "linear"'
HELD_OUT = 20  # classes of the million's held-out archive


def mini_imagenet(is_quick: bool) -> Rows:
    """Folders of pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder, each = Path(name), 600 // (20 if is_quick else 1)
        _write_pictures(folder / "source", each)
        case = {"classes": 64, "each": each, "rate": 1.0}
        return measured(folder, [folder / "source"], case, is_quick)


def _write_pictures(folder: Path, each: int) -> None:
    """Writes folders in the layout of mini-ImageNet, with meaningless drawings."""
    rng = np.random.default_rng(0)
    for part, classes in {"train": 64, "val": 16, "test": 20}.items():
        for number in range(classes):
            place = folder / part / f"n{number:08d}"
            place.mkdir(parents=True)
            colours = rng.integers(0, 256, (7, 7, 3))
            for example in range(each):
                noisy = np.clip(colours + rng.integers(-90, 91, (7, 7, 3)), 0, 255)
                image = Image.fromarray(noisy.astype(np.uint8))
                image = image.resize((84, 84), Image.Resampling.BILINEAR)
                image.save(place / f"{place.name}{example:08d}.jpg")


def million(is_quick: bool) -> Rows:
    """An archive of noise around a pattern for each class."""
    with tempfile.TemporaryDirectory() as name:
        folder, small = Path(name), is_quick
        classes, each = (200, 50) if small else (1_000, 1_000)
        (folder / "source").mkdir()
        paths = [folder / "source" / f"{part}.npz" for part in ("train", "held")]
        for path, number in zip(paths, (classes, HELD_OUT), strict=True):
            _write_npz(path, (number, each, 32, 32, 3))
        case = {"classes": classes, "each": each, "rate": 0.06}
        sources = [paths[0], "--test", paths[1]]
        return measured(folder, sources, case, is_quick)


def _write_npz(path: Path, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(path.name))
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("images.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for _ in range(shape[0]):
                pattern = rng.integers(0, 192, shape[2:], dtype=np.uint8)
                noise = rng.integers(0, 64, shape[1:], dtype=np.uint8)
                file.write((pattern + noise).data)


def measured(
    folder: Path, sources: list[Any], case: dict[str, Any], is_quick: bool
) -> Rows:
    """Imports the data of a case, trains on them, and times steps."""
    ours, data = [sys.executable, "-m", "jaxdp_episodic"], folder / "data"
    rows = [
        {"what": "import"} | cost_of([*ours, "data", "import", *sources, data]).row()
    ]
    shutil.rmtree(folder / "source")
    column, config = data / "train" / "features.npy", folder / "config.toml"
    rows[0]["GB on the disk"] = column.stat().st_size / 1e9
    parts = {**case, "data": data, "episodes": 20 if is_quick else 40}
    text = _CONFIG.format(**parts, steps=4 if is_quick else 8, model=CONV)
    config.write_text(text, encoding="utf-8")
    cost = cost_of([*ours, "train", config, "--out", folder / "run"])
    rows.append({"what": "train"} | cost.row())
    text = _CONFIG.format(**parts, steps=4 if is_quick else 40, model=LINEAR)
    config.write_text(text, encoding="utf-8")
    variants = ["disk", "memory", "disk, not cached"]
    if not hasattr(os, "posix_fadvise"):
        variants.pop()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(1 if is_quick else 3):
        for name in variants:
            taken = in_fresh_process(steps_a_second, config, column, folder, name)
            found[name].append(taken)
    for name, values in found.items():
        rates, resident = zip(*values, strict=True)
        speed = {"steps a second": statistics.median(rates), "MiB": max(resident)}
        rows.append({"what": name, **speed})
    return rows


def steps_a_second(
    config: Path, column: Path, folder: Path, variant: str
) -> tuple[float, float]:
    """Times steps; returns their rate, and MiB of resident memory."""
    import resource

    from jaxdp_episodic.trainer.run.assemble import Tables, assembled
    from jaxdp_episodic.training import read_config

    whole = dataclasses.replace(read_config(config), evaluation=None)
    tables = Tables(whole, None)
    if variant == "memory":
        table = tables.load("train")
        tables._loaded["train"] = dataclasses.replace(table, features=table.features[:])
    trainer, _, _ = assembled(whole, tables)
    times = [time.perf_counter()]

    def on_step(_: Any) -> None:
        times.append(time.perf_counter())
        if variant.endswith("not cached"):
            with column.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    with tempfile.TemporaryDirectory(dir=folder) as place:
        run = Path(place) / "run"
        trainer.train(run, on_step=on_step, checkpoint_every=10**6)
    taken = np.diff(times)[len(times) // 4 :]  # the first ones compile
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    return 1 / float(np.median(taken)), peak


if __name__ == "__main__":
    rows = run_parts(
        __doc__,
        {"mini_imagenet": mini_imagenet, "million": million},
        sizes=False,
        quick=True,
        out="results/benchmark-stored",
    )
    worst = max(
        r["MiB"]
        for some in rows.values()
        for r in some
        if r["what"] in ("import", "train")
    )
    if worst > LIMIT:
        raise SystemExit(f"{worst:,.0f} MiB were resident, the limit is {LIMIT:,}")
