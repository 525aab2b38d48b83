"""Training on data that stay on the disk: memory, and speed against the same in memory.

    python experiments/benchmarks/stored.py [--quick] [--out FOLDER] [--cases NAME ...]

Data are generated in a temporary folder (``TMPDIR``; up to 8 GB) and removed after:

* ``mini-imagenet``: folders of 60,000 JPEG files in its layout, 38,400 to train on,
  84 x 84 x 3; imported, and trained by the command line, test classes evaluated;
* ``million``: an npz archive of 1,000,000 x 32 x 32 x 3 in 1,000 classes; likewise.

Import and training are processes of their own, by the command line as a user runs them.
Memory is the kernel's peak of the resident set (``ru_maxrss``): all pages, mapped files
included. The page cache, which the kernel takes back when it wants, is no part of it.

Then steps of a linear embedding are timed, which compute least and so wait soonest, in
processes that have the same data on the disk and in memory, by turns; "not cached"
drops the file from the page cache before every step. Nothing here fails for being slow;
more resident memory than `LIMIT` does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

LIMIT = 1.5e9  # bytes of resident memory
FOLDER = Path(__file__).resolve().parent
IMPORT, TRAIN = "import", "train"

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
examples = {{ type = "WithoutReplacement", name = "example", size = 6, population = {each} }}
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
"""  # noqa: E501 - a table of TOML is one line

CONV = 'kind = "conv_embedding"\nchannels = [16, 16, 16, 16]'
LINEAR = 'kind = "linear"'

CASES: dict[str, dict[str, Any]] = {
    "mini-imagenet": {"classes": 64, "each": 600, "rate": 1.0, "shape": (84, 84, 3)},
    "million": {"classes": 1000, "each": 1000, "rate": 0.06, "shape": (32, 32, 3)},
}
HELD_OUT = 20  # classes of the million's held-out archive


def main() -> None:
    """Measures the cases, prints a table, writes results.json."""
    parser = argparse.ArgumentParser(description="training on data on the disk")
    parser.add_argument("--quick", action="store_true", help="a hundredth of the data")
    parser.add_argument("--out", type=Path, default=Path("results/benchmark-stored"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(json.loads(options.worker))
        return
    # As after Ctrl-C: nothing is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results = {}
    for name in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measured(name, Path(folder), options.quick)
            print(text(name, results[name]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    path.write_text(json.dumps({"quick": options.quick, **results}, indent=2) + "\n")
    print(f"\nwritten: {path}")
    worst = max(
        r[part]["resident"] for r in results.values() for part in (IMPORT, TRAIN)
    )
    if worst > LIMIT:
        raise SystemExit(f"{worst / 1e9:.2f} GB were resident, the limit is {LIMIT:g}")


def measured(name: str, folder: Path, quick: bool) -> dict[str, Any]:
    """Makes the data of a case, imports them, trains on them, and times its steps."""
    case = dict(CASES[name])
    if quick:
        case["each"] //= 20
        case["classes"] //= 5 if name == "million" else 1
    data, source = folder / "data", folder / "source"
    say(f"{name}: generating")
    sources = generated(name, source, case)
    say(f"{name}: importing")
    result: dict[str, Any] = {"case": {**case, "shape": list(case["shape"])}}
    result[IMPORT] = run(["data", "import", *sources, str(data)])
    shutil.rmtree(source)
    column = data / "train" / "features.npy"
    result["bytes"] = column.stat().st_size
    steps, episodes = (4, 20) if quick else (8, 40)
    config = folder / "config.toml"
    parts = {**case, "data": data, "steps": steps, "episodes": episodes}
    config.write_text(_CONFIG.format(**parts, model=CONV))
    say(f"{name}: training {steps} steps, and an evaluation at either end")
    result[TRAIN] = run(["train", str(config), "--out", str(folder / "run")])
    say(f"{name}: timing steps")
    parts["steps"] = 4 if quick else 40
    config.write_text(_CONFIG.format(**parts, model=LINEAR))
    result["steps"] = timed(config, column, folder, rounds=1 if quick else 3)
    return result


def say(what: str) -> None:
    """Says what is under way."""
    print(f"{what} …", file=sys.stderr, flush=True)


def generated(name: str, folder: Path, case: dict[str, Any]) -> list[str]:
    """Writes the source of a case; returns how the command line names it."""
    folder.mkdir()
    if name == "mini-imagenet":
        path = FOLDER.parent / "image_folders.py"
        spec = importlib.util.spec_from_file_location("image_folders", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.generate(name, folder, module.LAYOUT[name][0], case["each"])
        return [str(folder)]
    files = {"train": case["classes"], "held": HELD_OUT}
    for file, classes in files.items():
        _write_npz(folder / f"{file}.npz", (classes, case["each"], *case["shape"]))
    return [str(folder / "train.npz"), "--held-out", str(folder / "held.npz")]


def _write_npz(path: Path, shape: tuple[int, ...]) -> None:
    """Noise around a pattern for each class, written class by class."""
    rng = np.random.default_rng(len(path.name))
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("images.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for _ in range(shape[0]):
                pattern = rng.integers(0, 192, shape[2:], dtype=np.uint8)
                noise = rng.integers(0, 64, shape[1:], dtype=np.uint8)
                file.write((pattern + noise).data)


def run(command: list[str]) -> dict[str, Any]:
    """Runs a command of ours to its end; its time, and its peak of resident memory."""
    whole = [sys.executable, "-m", "jaxdp_episodic", *command]
    begun = time.perf_counter()
    child = subprocess.Popen(whole, stdout=subprocess.DEVNULL)
    try:
        _, status, used = os.wait4(child.pid, 0)
    except BaseException:
        child.kill()
        raise
    if status:
        raise SystemExit(f"ended with status {status}: {' '.join(whole)}")
    return {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "resident": used.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }


# --- Steps, timed ---


def timed(config: Path, column: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Steps a second of the same run in memory and from the disk, by turns."""
    setting = {"config": str(config), "column": str(column), "folder": str(folder)}
    found: dict[str, list[float]] = {}
    workers = {}
    for kind in ("disk", "memory"):
        text = json.dumps({**setting, "kind": kind})
        workers[kind] = subprocess.Popen(
            [sys.executable, __file__, "--worker", text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    variants = [("disk", "cached"), ("memory", "cached")]
    if hasattr(os, "posix_fadvise"):
        variants.append(("disk", "not cached"))
    resident = {}
    for place in range(rounds + 1):
        for kind, variant in variants:
            worker = workers[kind]
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write(variant + "\n")
            worker.stdin.flush()
            answer = json.loads(worker.stdout.readline())
            resident[kind] = answer["resident"]
            if place:  # the first compiles
                name = kind if variant == "cached" else f"{kind}, {variant}"
                found.setdefault(name, []).append(answer["steps_a_second"])
    for worker in workers.values():
        worker.communicate()
    return {
        "steps_a_second": {k: statistics.median(v) for k, v in found.items()},
        "rounds": found,
        "resident": resident,
    }


def serve(setting: dict[str, Any]) -> None:
    """Times steps for each line of standard input, and answers with one."""
    import dataclasses
    import resource

    from jaxdp_episodic.trainer.run.assemble import Tables, assembled
    from jaxdp_episodic.training import read_config

    config = dataclasses.replace(read_config(Path(setting["config"])), evaluation=None)
    tables = Tables(config, None)
    if setting["kind"] == "memory":
        table = tables.load("train")
        tables._loaded["train"] = dataclasses.replace(table, features=table.features[:])
    for number, line in enumerate(sys.stdin):
        trainer, _, _ = assembled(config, tables)
        times = [time.perf_counter()]
        uncached = line.strip() == "not cached"

        def on_step(progress: Any, times: list = times, drop: bool = uncached) -> None:
            times.append(time.perf_counter())
            if drop:
                with open(setting["column"], "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        folder = Path(setting["folder"]) / f"{setting['kind']}-{number}"
        trainer.train(folder, on_step=on_step, checkpoint_every=10**6)
        taken = np.diff(times)[len(times) // 4 :]  # the first ones start up
        answer = {
            "steps_a_second": 1 / float(np.median(taken)),
            "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            * (1 if sys.platform == "darwin" else 1024),
        }
        print(json.dumps(answer), flush=True)


def text(name: str, result: dict[str, Any]) -> str:
    """A case for a reader."""
    case, speed = result["case"], result["steps"]["steps_a_second"]
    shape = " x ".join(map(str, case["shape"]))
    lines = [
        f"\n{name}: {case['classes'] * case['each']:,} x {shape} uint8, "
        f"{result['bytes'] / 1e9:.2f} GB on the disk"
    ]
    for part in (IMPORT, TRAIN):
        found = result[part]
        lines.append(
            f"  {part:<18}{found['seconds']:8.1f} s  {found['cpu_seconds']:8.1f} s of "
            f"CPU  {found['resident'] / 1e9:6.2f} GB resident at most"
        )
    lines += [f"  {kind:<18}{rate:8.2f} steps a second" for kind, rate in speed.items()]
    resident = result["steps"]["resident"]
    lines.append(
        f"  from the disk {speed['disk'] / speed['memory']:.2f} times the speed, in "
        f"{resident['disk'] / 1e9:.2f} GB instead of {resident['memory'] / 1e9:.2f}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
