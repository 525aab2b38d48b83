"""Helpers for the benchmarks: processes, clocks and tables.

A benchmark is a list of parts. Each part runs in its own process and returns rows of
numbers, which are printed as a table and written to ``results.json``. No benchmark
fails because it is slow. Times are meaningful only on an idle machine, so the load is
recorded with them.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jaxdp-episodic", "jax", "jaxlib", "numpy", "scipy", "dp-accounting")
PACKAGES += ("opacus", "torch", "autodp", "prv-accountant")
Rows = list[dict[str, Any]]


def describe_machine() -> dict[str, Any]:
    """Returns versions, cores, processor, and how busy the machine is."""
    affinity = getattr(os, "sched_getaffinity", None)
    processor, information = platform.processor(), Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text().splitlines()
        names = [line.split(":", 1)[1] for line in lines if "model name" in line]
        processor = names[0].strip() if names else processor
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor,
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "load": load(),
        "versions": versions,
    }


def load() -> float | None:
    """Returns the mean number of waiting processes of the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def run_parts(
    doc: str | None,
    parts: Mapping[str, Callable[..., Rows]],
    *,
    sizes: Any,
    quick: Any,
    out: str,
    on_cpu: bool = True,
) -> dict[str, Rows]:
    """Reads the command line, then runs part by part; returns the rows of each.

    Parts are functions of the sizes (``quick`` with ``--quick``). ``--out`` names
    another folder for ``results.json`` than ``out``. JAX sees the CPU alone where
    ``on_cpu``.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small, to see it works")
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    options = parser.parse_args()
    chosen = quick if options.quick else sizes
    machine, found = describe_machine(), {}
    print(json.dumps(machine), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        measure = functools.partial(parts[name], chosen)
        begun = time.monotonic()
        found[name] = in_fresh_process(measure, on_cpu=on_cpu)
        print(f"\n{name} ({time.monotonic() - begun:.0f} s)\n{table(found[name])}")
        results = {"quick": options.quick, "machine": machine, "load after": load()}
        text = json.dumps({**results, **found}, indent=1, default=str) + "\n"
        (options.out / "results.json").write_text(text, encoding="utf-8")
    print(f"\nwritten: {options.out / 'results.json'}")
    return found


def in_fresh_process(
    measure: Callable[..., Any], *arguments: Any, on_cpu: bool = True
) -> Any:
    """Runs a part in a new process, so that memory and compiling are its own."""
    with mock.patch.dict(os.environ):
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        if on_cpu:
            os.environ["JAX_PLATFORMS"] = "cpu"
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            return pool.submit(measure, *arguments).result()


def peak_mib() -> float | None:
    """Returns the largest resident memory of this process so far; None if unknown."""
    # Not getrusage: a process inherits its parent's peak there.
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            (line,) = (line for line in file if line.startswith("VmHWM"))
    except OSError:
        return None
    return int(line.split()[1]) / 1024


class Cost(NamedTuple):
    """The cost of a process, and its output."""

    wall: float
    cpu: float
    mib: float
    output: str

    def row(self) -> dict[str, Any]:
        """Returns wall and CPU seconds, and the peak of resident memory."""
        return {"wall s": self.wall, "CPU s": self.cpu, "MiB": self.mib}


def cost_of(command: Iterable[object], **environment: str) -> Cost:
    """Runs a command to its end, with changes to the environment; it must not fail.

    The peak of memory is that of the process alone if this one is small, as a new
    process begins with its parent's.
    """
    words = [str(word) for word in command]
    with tempfile.TemporaryFile("w+") as output:
        begun = time.perf_counter()
        process = subprocess.Popen(
            words, env={**os.environ, **environment}, stdout=output
        )
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        wall = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise RuntimeError(f"{words} ended with {process.returncode}:\n{text}")
    unit = 1 if sys.platform == "darwin" else 1024
    cpu = used.ru_utime + used.ru_stime
    return Cost(wall, cpu, used.ru_maxrss * unit / 2**20, text)


def timed(call: Callable[[], Any], repeats: int) -> tuple[dict[str, Any], Any]:
    """Times a first call, which compiles, then takes the best of some more.

    Returns a row with seconds of the first call, and milliseconds of the clock and of
    processors for each setting; and the answer.
    """

    def once() -> tuple[float, float, Any]:
        begun, worked = time.perf_counter(), time.process_time()
        answer = call()
        return time.perf_counter() - begun, time.process_time() - worked, answer

    first, worked, answer = once()
    later = [once()[:2] for _ in range(repeats)] or [(first, worked)]
    wall, cpu = (min(values) for values in zip(*later, strict=True))
    size = int(getattr(answer, "size", 1))
    row = {"settings": size, "first s": first}
    return row | {"ms each": 1e3 * wall / size, "CPU ms each": 1e3 * cpu / size}, answer


def spread(values: Any) -> str:
    """Returns the least, the median and the largest value, in words."""
    numbers = sorted(float(value) for value in values)
    if not numbers:
        return ""
    chosen = numbers[0], numbers[len(numbers) // 2], numbers[-1]
    return " / ".join(f"{value:+.2g}" for value in chosen)


def table(rows: Rows) -> str:
    """Returns rows as aligned columns; a row may lack some."""
    heads = list(dict.fromkeys(name for row in rows for name in row))
    lines = [heads, *([_plain(row.get(name, "")) for name in heads] for row in rows)]
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Returns lines of words, the first column to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [w.rjust(n) for w, n in zip(line[1:], widths[1:], strict=True)]
        ).rstrip()
        for line in lines
    )


def _plain(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"
