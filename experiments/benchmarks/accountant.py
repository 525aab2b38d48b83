"""Speed and tightness of the accountant, next to other accountants, in one run.

    make bench

or, in any environment with the library (a peer that is missing is named and skipped),
``python experiments/benchmarks/accountant.py [--quick] [--out FOLDER]``.

What is compared: epsilon by Rényi-DP of a Poisson-sampled Gaussian mechanism, and the
noise for a target epsilon. Ours is one call for a whole grid on all cores, theirs a
loop on one core, which is what they offer. The peers get a sample of the grid, drawn at
random in each of its cells, and times are compared by the setting. Compile time is
listed apart. Each part runs in a fresh process, on the CPU unless it says otherwise.

Nothing here fails for being slow: the numbers are for a reader.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from in_jax import measure_in_jax
from peers import DELTA, EPSILON_PEERS, NOISE_PEERS, NUM_STEPS, run_peers, summary
from presentation import describe_machine, draw_chart, table

import jaxdp_episodic as jde

METHOD = "rdp"
SEED = 20_240
SAMPLING_PROBABILITIES = (1e-4, 0.3)
NOISE_MULTIPLIERS = (0.5, 8.0)
TARGET_EPSILONS = (0.5, 10.0)
STEP_COUNTS = (100, 10_000)

CONFIG = Path(__file__).parents[2] / "configs" / "omniglot.toml"


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
      cells: the peers' sample has one setting in each of cells x cells cells.
      per_cell: our grid has per_cell x per_cell settings in each cell.
      million: how many rates, noise multipliers and numbers of steps.
      calibrations: how many rates, target epsilons and numbers of steps.
      peer_calibrations: how many of them the peers get.
      scalar_calls: calls of one setting each.
      accelerator: the accelerator's grid has the square of this.
      repeats: of our timings; the best counts.
    """

    cells: int = 8
    per_cell: int = 32
    million: tuple[int, int, int] = (100, 100, 100)
    calibrations: tuple[int, int, int] = (25, 20, 20)
    peer_calibrations: int = 16
    scalar_calls: int = 200
    accelerator: int = 1_000
    repeats: int = 3


QUICK = Sizes(
    cells=4,
    per_cell=32,
    million=(20, 50, 50),
    calibrations=(10, 10, 5),
    peer_calibrations=2,
    scalar_calls=50,
    accelerator=300,
    repeats=2,
)


def main() -> None:
    """Measures all parts, prints the table, writes results.json and the chart."""
    parser = argparse.ArgumentParser(description="speed against other accountants")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--out", type=Path, default=Path("results/benchmark"))
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else Sizes()
    machine = describe_machine()
    parts: dict[str, Any] = {}
    for name, measure in (
        ("grid", measure_grid),
        ("million", measure_million),
        ("calibration", measure_calibration),
        ("scalar", measure_scalar),
        ("command_line", measure_command_line),
    ):
        print(f"measuring: {name} …", file=sys.stderr, flush=True)
        parts[name] = in_fresh_process(measure, sizes)
    parts["in_jax"] = in_fresh_process(measure_in_jax, DELTA)
    sample = parts["grid"].pop("sample")
    parts["accelerator"] = in_fresh_process(
        measure_accelerator, sizes, sample, on_cpu=False
    )
    machine["load_after"] = describe_machine()["load"]
    results = {
        "version": 1,
        "quick": arguments.quick,
        "seed": SEED,
        "delta": DELTA,
        "num_steps": NUM_STEPS,
        "sizes": asdict(sizes),
        "machine": machine,
        "sample": sample,
        **parts,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / "results.json"
    target.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(table(results))
    print(f"\nwritten: {target}, {draw_chart(results, arguments.out / 'chart.png')}")


def in_fresh_process(
    measure: Callable[..., dict[str, Any]], *arguments: Any, on_cpu: bool = True
) -> dict[str, Any]:
    """Runs one part by itself: its memory is its own and nothing is compiled before."""
    with mock.patch.dict(os.environ):
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        if on_cpu:
            os.environ["JAX_PLATFORMS"] = "cpu"
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            return pool.submit(measure, *arguments).result()


def measure_grid(sizes: Sizes) -> dict[str, Any]:
    """Epsilons over rates x noise: ours in one call, the peers' on a sample."""
    length = sizes.cells * sizes.per_cell
    rates = np.geomspace(*SAMPLING_PROBABILITIES, length)
    noise = np.geomspace(*NOISE_MULTIPLIERS, length)
    step = sampled_gaussian(rates[:, None], noise)
    timing, epsilons = timed(lambda: run_epsilon(step), sizes.repeats)

    generator = np.random.default_rng(SEED)
    corners = np.indices((sizes.cells, sizes.cells)).reshape(2, -1) * sizes.per_cell
    row, column = corners + generator.integers(sizes.per_cell, size=corners.shape)
    chosen = sampled_gaussian(rates[row], noise[column])
    chosen_timing, ours = timed(lambda: run_epsilon(chosen), sizes.repeats)
    settings = list(zip(rates[row].tolist(), noise[column].tolist(), strict=True))
    return {
        **timing,
        "batch_of_the_sample": chosen_timing,
        "same_in_both_batches": bool(np.array_equal(ours, epsilons[row, column])),
        "num_not_monotone": count_not_monotone(epsilons),
        "search_excess": search_excess(chosen, ours),
        "rdp_error": rdp_error(chosen, settings),
        "sample": {"settings": settings, "epsilons": ours.tolist()},
        "peers": run_peers(EPSILON_PEERS, settings, ours),
    }


def search_excess(step: jde.GaussianStep, ours: np.ndarray) -> dict[str, float] | None:
    """How far above the best of 4,000 orders our searched order ends (relative)."""
    orders = 1 + np.geomspace(1e-3, 1e5, 4_000)
    with warnings.catch_warnings():
        # Small losses are best at an order beyond the last one.
        warnings.simplefilter("ignore")
        asked = {"num_steps": NUM_STEPS, "delta": DELTA, "method": METHOD}
        dense = jde.epsilon(step, orders=orders, **asked)
    return summary(ours / dense - 1)


def rdp_error(
    step: jde.GaussianStep, settings: list[tuple[float, float]]
) -> dict[str, Any] | None:
    """Relative error of `rdp` at integer orders, where the series has 50 digits."""
    try:
        import mpmath
    except ImportError as error:
        return {"skipped": f"cannot be imported ({error})"}

    def series(rate: float, noise: float, alpha: int) -> float:
        # Mironov, Talwar, Zhang (2019), arXiv:1908.10530, Section 3.3, less its 1.
        p, s = mpmath.mpf(rate), mpmath.mpf(noise)
        terms = [
            mpmath.binomial(alpha, k)
            * p**k
            * (1 - p) ** (alpha - k)
            * mpmath.expm1(k * (k - 1) / (2 * s * s))
            for k in range(2, alpha + 1)
        ]
        return float(mpmath.log1p(mpmath.fsum(terms)) / (alpha - 1))

    orders = [2, 8, 64]
    with mpmath.workdps(50):
        exact = [[series(*setting, alpha) for alpha in orders] for setting in settings]
    return summary(jde.rdp(step, orders) / np.asarray(exact) - 1)


def measure_million(sizes: Sizes) -> dict[str, Any]:
    """Epsilons over rates x noise x numbers of steps: time and memory."""
    before = peak_memory()
    num_rates, num_noises, num_counts = sizes.million
    step = sampled_gaussian(
        np.geomspace(*SAMPLING_PROBABILITIES, num_rates)[:, None, None],
        np.geomspace(*NOISE_MULTIPLIERS, num_noises)[:, None],
    )
    counts = np.rint(np.geomspace(1, 100_000, num_counts))
    timing, epsilons = timed(lambda: run_epsilon(step, counts), sizes.repeats)
    return {
        **timing,
        "num_not_finite": int((~np.isfinite(epsilons)).sum()),
        "num_not_monotone": count_not_monotone(epsilons),
        "peak_memory_bytes": peak_memory(),
        "peak_memory_bytes_before": before,
    }


def count_not_monotone(epsilons: np.ndarray) -> int:
    """How many settings cost more than a neighbour that is less private in one field.

    Epsilon grows with the rate (axis 0) and the steps (axis 2, if there) and falls with
    the noise (axis 1). Where this is broken by more than 1e-6 the search missed the
    best order: still an upper bound, but a loose one.
    """
    loose = np.zeros(epsilons.shape, bool)
    for axis, sign in zip(range(epsilons.ndim), (1, -1, 1), strict=False):
        ordered = np.moveaxis(epsilons, axis, 0)[::sign]
        found = np.moveaxis(loose, axis, 0)[::sign]  # a view: marks `loose`
        found[:-1] |= ordered[:-1] > ordered[1:] * (1 + 1e-6)
    return int(loose.sum())


def measure_calibration(sizes: Sizes) -> dict[str, Any]:
    """The smallest noise for rates x target epsilons x numbers of steps."""
    num_rates, num_targets, num_counts = sizes.calibrations
    fields = np.broadcast_arrays(
        np.geomspace(*SAMPLING_PROBABILITIES, num_rates)[:, None, None],
        np.geomspace(*TARGET_EPSILONS, num_targets)[:, None],
        np.rint(np.geomspace(*STEP_COUNTS, num_counts)).astype(np.int64),
    )
    rates, targets, counts = (field.ravel() for field in fields)

    def calibrate() -> np.ndarray:
        sampling = jde.Poisson("example", sampling_probability=rates)
        step = jde.GaussianStep(sampling, noise_multiplier=1.0)  # its noise is ignored
        noise = jde.calibrate_noise_multiplier(
            step, epsilon=targets, delta=DELTA, num_steps=counts, method=METHOD
        )
        return np.asarray(noise)

    timing, noise = timed(calibrate, sizes.repeats)
    reached = run_epsilon(sampled_gaussian(rates, noise), counts)
    generator = np.random.default_rng(SEED)
    chosen = generator.choice(noise.size, sizes.peer_calibrations, replace=False)
    columns = (field[chosen].tolist() for field in (rates, targets, counts))
    settings = list(zip(*columns, strict=True))
    return {
        **timing,
        "epsilon_reached": summary(reached / targets - 1),
        "peers": run_peers(NOISE_PEERS, settings, noise[chosen]),
    }


def measure_scalar(sizes: Sizes) -> dict[str, Any]:
    """One epsilon a call, other numbers in each, the description included."""
    generator = np.random.default_rng(SEED)
    ends = np.log([SAMPLING_PROBABILITIES, NOISE_MULTIPLIERS])
    settings = np.exp(generator.uniform(*ends.T, size=(1 + sizes.scalar_calls, 2)))
    seconds = []
    for rate, noise in settings.tolist():
        start = time.perf_counter()
        run_epsilon(sampled_gaussian(rate, noise))
        seconds.append(time.perf_counter() - start)
    return {
        "num_calls": sizes.scalar_calls,
        "first_seconds": seconds[0],
        "median_seconds": float(np.median(seconds[1:])),
        "largest_seconds": max(seconds[1:]),
    }


def measure_command_line(sizes: Sizes) -> dict[str, Any]:
    """The command from nothing: without kept kernels, then with those it has kept."""
    program = "from jaxdp_episodic.tools.cli import main; main()"
    command = [sys.executable, "-c", program, "epsilon", str(CONFIG), "--json"]
    seconds = []
    with tempfile.TemporaryDirectory() as empty:
        environment = dict(os.environ, XDG_CACHE_HOME=empty, LOCALAPPDATA=empty)
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "true"
        for _ in range(1 + sizes.repeats):
            start = time.perf_counter()
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True
            )
            seconds.append(time.perf_counter() - start)
            if done.returncode:
                return {"skipped": f"it failed: {done.stderr.strip()[-300:]}"}
    return {
        "request": CONFIG.name,
        "first_seconds": seconds[0],
        "next_seconds": seconds[1:],
    }


def measure_accelerator(sizes: Sizes, sample: dict[str, Any]) -> dict[str, Any]:
    """The same kind of grid on JAX's default device, if that is not a CPU."""
    if jax.default_backend() == "cpu":
        return {"skipped": "JAX finds no accelerator"}
    step = sampled_gaussian(
        np.geomspace(*SAMPLING_PROBABILITIES, sizes.accelerator)[:, None],
        np.geomspace(*NOISE_MULTIPLIERS, sizes.accelerator),
    )
    timing, _ = timed(lambda: run_epsilon(step), sizes.repeats)
    chosen = sampled_gaussian(*np.transpose(sample["settings"]))
    exponentials = float64_exponentials_per_second(sizes.repeats)
    return {
        "device": jax.devices()[0].device_kind,
        **timing,
        "relative_to_cpu": summary(run_epsilon(chosen) / sample["epsilons"] - 1),
        "exponentials_per_second": exponentials,
        "exponentials_per_setting": exponentials * timing["seconds_per_setting"],
    }


def float64_exponentials_per_second(repeats: int) -> float:
    """The device's ceiling: float64 exponentials, summed where they are computed."""
    per_element, num_elements = 64, 2**22

    def total(x: jax.Array) -> jax.Array:
        powers = (jnp.exp(x * (1 + k / per_element)) for k in range(per_element))
        return jnp.sum(sum(powers, start=jnp.zeros_like(x)))

    with jax.enable_x64(True):
        compiled = jax.jit(total)
        x = jnp.linspace(-1.0, 0.0, num_elements, dtype=jnp.float64)
        timing, _ = timed(lambda: np.asarray(compiled(x)), repeats)
    return per_element * num_elements / timing["seconds"]


def sampled_gaussian(sampling_probability: Any, noise: Any) -> jde.GaussianStep:
    """The step that every system here knows."""
    draw = jde.Poisson("example", sampling_probability=sampling_probability)
    return jde.GaussianStep(jde.MultistageSampling(draw), noise_multiplier=noise)


def run_epsilon(step: jde.GaussianStep, num_steps: Any = NUM_STEPS) -> np.ndarray:
    """Epsilon by our default method."""
    return np.asarray(
        jde.epsilon(step, num_steps=num_steps, delta=DELTA, method=METHOD)
    )


def timed(
    call: Callable[[], np.ndarray], repeats: int
) -> tuple[dict[str, Any], np.ndarray]:
    """Times a call that compiles, then the best of the next ones, which do not.

    Returns:
      Seconds of the first call, of the best and the worst later one, and what the
      first took longer (compile time, to the noise of the machine); and the answer.
    """
    start = time.perf_counter()
    answer = call()
    first = time.perf_counter() - start
    later = []
    for _ in range(repeats):
        start = time.perf_counter()
        answer = call()
        later.append(time.perf_counter() - start)
    timing = {
        "num_settings": int(np.size(answer)),
        "first_seconds": first,
        "compile_seconds": max(first - min(later), 0.0),
        "seconds": min(later),
        "worst_seconds": max(later),
        "seconds_per_setting": min(later) / max(np.size(answer), 1),
    }
    return timing, answer


def peak_memory() -> int | None:
    """Largest resident memory of this process so far, in bytes; None if unknown."""
    # Not getrusage: a process inherits its parent's peak there.
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    fields = dict(
        line.split(":", 1) for line in status.read_text().splitlines() if ":" in line
    )
    return int(fields["VmHWM"].split()[0]) * 1024


if __name__ == "__main__":
    main()
