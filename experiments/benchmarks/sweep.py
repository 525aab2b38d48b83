"""Speed and memory of sweeps: everything from the command to the table.

    .venv/bin/python experiments/benchmarks/sweep.py [--quick] [--out FOLDER]

Each sweep is the command ``jaxdp-episodic sweep`` in a process of its own, with nothing
compiled before, its picture included; wall time, CPU time and peak memory are the
operating system's of that process. Settings are those of grouped classes (the design of
``configs/sweep_episodes.toml``), and once of examples drawn by coins: numbers of steps,
noise multipliers and rates.

* a million settings by Rényi-DP, and as many in one call of the bare kernel
  (`rdp_bound` of `accountant.methods.rdp.method`, on arrays made before), whose
  throughput the sweep's is compared with;
* a hundred thousand by the exact method;
* of examples drawn by coins ten million by Rényi-DP and a million by the exact method.

And a batch of menus: four noises and a budget of 1,000 each, both ends of the worst
strategy's epsilon.

Nothing here fails for being slow: the numbers are for a reader. Times mean something on
an idle machine only; on a shared one, CPU times mean a little more.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

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
    """Sampling in a description, and which of its units is drawn by coins."""

    sampling: str
    drawn: str


GROUPED = Design(
    """
[step.sampling]
type = "GroupedClasses"
num_classes = 1_623
ways = 5
episodes = { type = "Poisson", name = "episode" }

[step.sampling.examples]
type = "WithoutReplacement"
name = "example"
size = 4
population = 20
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
    """How many values each axis has."""

    steps: int
    noises: int
    rates: int

    @property
    def size(self) -> int:
        """Settings in all."""
        return self.steps * self.noises * self.rates


class Sizes(NamedTuple):
    """How much is measured."""

    rdp: Grid = Grid(4, 500, 500)
    exact: Grid = Grid(10, 100, 100)
    many_rdp: Grid = Grid(10, 1_000, 1_000)
    many_exact: Grid = Grid(10, 400, 250)
    menus: int = 50


QUICK = Sizes(Grid(2, 50, 50), Grid(2, 6, 6), Grid(2, 100, 100), Grid(2, 16, 32), 4)


class Cost(NamedTuple):
    """What a process took, and what it printed."""

    wall_seconds: float
    cpu_seconds: float
    peak_mib: float
    output: str


def main() -> None:
    """Measures, prints, and writes ``results.json``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small, to see it works")
    parser.add_argument("--out", type=Path, default=Path("results/benchmark-sweep"))
    parser.add_argument("--kernel", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--menus", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kernel:
        print(json.dumps(bare_kernel(arguments.kernel)))
        return
    if arguments.menus:
        print(json.dumps(worst_strategies(arguments.menus)))
        return
    sizes = QUICK if arguments.quick else Sizes()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, Any] = measured(sizes, Path(folder))
    # Only now: the parent of the processes measured must be small, as a new process
    # begins with its parent's peak of memory.
    from presentation import describe_machine

    results = {
        "machine": describe_machine(),
        "load before": load,
        "load after": os.getloadavg(),
        **results,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, default=str) + "\n"
    (arguments.out / "results.json").write_text(text, encoding="utf-8")
    print("\n".join(report(results)))
    print(f"written: {arguments.out / 'results.json'}")


def measured(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """All measurements, each in a process of its own."""
    start = sweep(folder / "start", "rdp", Grid(1, 2, 2))
    plain = sweep(folder / "examples", "rdp", sizes.rdp, EXAMPLES)
    rdp = sweep(folder / "rdp", "rdp", sizes.rdp)
    kernel = json.loads(run(__file__, "--kernel", folder / "rdp.toml").output)
    exact = sweep(folder / "exact", "exact", sizes.exact)
    many = {
        "many": sweep(folder / "many", "rdp", sizes.many_rdp, EXAMPLES),
        "many, exact": sweep(folder / "exact2", "exact", sizes.many_exact, EXAMPLES),
    }
    rate = evaluated(rdp)[0] / max(rdp.wall_seconds - start.wall_seconds, 1e-9)
    return {
        "start alone": numbers(start),
        "rdp, examples": numbers(plain),
        "rdp": numbers(rdp) | {"settings a second after the start": rate},
        "bare kernel": kernel,
        "sweep relative to the bare kernel": rate / kernel["settings a second"],
        "the same by cpu seconds": kernel["cpu seconds"]
        / max(rdp.cpu_seconds - start.cpu_seconds, 1e-9),
        "exact": numbers(exact),
        "menus": json.loads(run(__file__, "--menus", sizes.menus).output),
        **{name: numbers(cost) for name, cost in many.items()},
    }


def sweep(out: Path, method: str, grid: Grid, design: Design = GROUPED) -> Cost:
    """One sweep by the command."""
    file = out.with_suffix(".toml")
    text = _TEXT.format(method=method, **grid._asdict(), **design._asdict())
    file.write_text(text, encoding="utf-8")
    return run("-m", "jaxdp_episodic", "sweep", file, "--out", out)


def run(*arguments: object) -> Cost:
    """Runs Python; the costs are those of its process alone."""
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    with tempfile.TemporaryFile("w+") as output:
        begun = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)], env=environment, stdout=output
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise RuntimeError(f"{arguments} ended with {process.returncode}:\n{text}")
    unit = 1 if sys.platform == "darwin" else 1024
    cpu = usage.ru_utime + usage.ru_stime
    return Cost(wall, cpu, usage.ru_maxrss * unit / 2**20, text)


def evaluated(cost: Cost) -> tuple[int, float]:
    """Settings that a sweep evaluated, and the seconds that it says it took."""
    found = re.search(r"^evaluated +([\d,]+) in ([\d.,]+) s", cost.output, re.M)
    assert found is not None, cost.output
    return int(found[1].replace(",", "")), float(found[2].replace(",", ""))


def numbers(cost: Cost) -> dict[str, float]:
    """What is reported of a sweep."""
    settings, seconds = evaluated(cost)
    return {
        "settings": settings,
        "wall seconds, all included": cost.wall_seconds,
        "of these evaluating": seconds,
        "cpu seconds": cost.cpu_seconds,
        "peak MiB": cost.peak_mib,
        "settings a second, all included": settings / cost.wall_seconds,
    }


def bare_kernel(file: Path) -> dict[str, float]:
    """The kernel alone, on the settings of a sweep: nothing read, checked or saved."""
    # In a process of its own, which may be large.
    import numpy as np

    from jaxdp_episodic.accountant.methods.question import EpsilonAt
    from jaxdp_episodic.accountant.methods.rdp.method import rdp_bound
    from jaxdp_episodic.accountant.questions.dominating_pair import run_of
    from jaxdp_episodic.tools.requests.request import EpsilonRequest
    from jaxdp_episodic.tools.sweep.description import read_sweep

    described = read_sweep(file)
    values = described.grid.values(np.arange(described.grid.size))
    request = described.request("epsilon", "rdp", values)
    assert isinstance(request, EpsilonRequest)
    run = run_of(request.planned("a sweep"), np.asarray(values["num_steps"]))
    target = np.log(np.full((described.grid.size, 1), described.delta))

    def seconds(rows: int) -> tuple[float, float]:
        some = run.map(lambda field: _first(field, rows))
        begun, worked = time.perf_counter(), time.process_time()
        rdp_bound(EpsilonAt(target[:rows]), some)
        return time.perf_counter() - begun, time.process_time() - worked

    seconds(described.chunk_size)  # compiles
    taken, worked = seconds(described.grid.size)
    return {
        "settings": described.grid.size,
        "seconds": taken,
        "cpu seconds": worked,
        "settings a second": described.grid.size / taken,
    }


def worst_strategies(number: int) -> dict[str, float]:
    """A batch of menus, whose worst strategies are found on all cores."""
    import numpy as np

    import jaxdp_episodic as jde

    draw = jde.Poisson("example", sampling_probability=0.1)
    prices = {1.5: 30, 2.2: 11, 3.3: 5, 5.0: 2}
    scale = np.linspace(1.0, 1.1, number)
    menus = jde.AdaptiveRun(
        {f"{n:g}": jde.GaussianStep(draw, noise_multiplier=n * scale) for n in prices},
        prices={f"{n:g}": price for n, price in prices.items()},
        budget=1000,
    )
    begun, worked = time.perf_counter(), sum(os.times()[:4])
    lower, upper = menus.epsilon_interval(delta=1e-5)
    seconds = time.perf_counter() - begun
    return {
        "menus": number,
        "menus a minute": 60 * number / seconds,
        "cpu seconds a menu": (sum(os.times()[:4]) - worked) / number,
        "widest interval": float((upper - lower).max()),
    }


def _first(field: Any, rows: int) -> Any:
    """The first rows of a field that has one a setting."""
    return field[:rows] if getattr(field, "ndim", 0) == 2 and len(field) > 1 else field


def report(results: dict[str, Any]) -> list[str]:
    """The numbers for a reader."""
    names = {
        "rdp, examples": "RDP, examples",
        "rdp": "RDP, grouped",
        "exact": "exact",
        "many": "RDP, examples",
        "many, exact": "exact, examples",
    }
    lines = ["settings          method           wall s   cpu s   a second   peak MiB"]
    for key, name in names.items():
        row = results[key]
        lines.append(
            f"{row['settings']:>14,}    {name:15}"
            f"{row['wall seconds, all included']:8.1f}{row['cpu seconds']:8.1f}"
            f"{row['settings a second, all included']:11,.0f}{row['peak MiB']:11,.0f}"
        )
    kernel, share = results["bare kernel"], results["sweep relative to the bare kernel"]
    menus = results["menus"]
    return [
        *lines,
        f"bare kernel: {kernel['settings a second']:,.0f} settings a second; the "
        f"sweep, its start left out, has {share:.0%} of that, "
        f"{results['the same by cpu seconds']:.0%} by CPU time",
        f"menus of four noises, budget 1,000: {menus['menus a minute']:,.0f} a minute, "
        f"{menus['cpu seconds a menu']:.2f} CPU s each; ends at most "
        f"{menus['widest interval']:.1e} nats apart",
        f"load before {results['load before'][0]:.1f}, after "
        f"{results['load after'][0]:.1f}",
    ]


if __name__ == "__main__":
    main()
