"""What the benchmark shows: the machine, a table to read, a chart."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxdp_episodic as jde

PACKAGES = (
    "jax",
    "jaxlib",
    "numpy",
    "scipy",
    "mpmath",
    "dp-accounting",
    "opacus",
    "torch",
    "autodp",
)
OURS = "jaxdp-episodic"
_RULE = "-" * 88


def describe_machine() -> dict[str, Any]:
    """Versions, cores, processor, and how busy the machine is."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": {OURS: jde.__version__}
        | {name: _version(name) for name in PACKAGES},
    }


def table(results: dict[str, Any]) -> str:
    """The whole run for a reader."""
    lines = [
        *_heading(results),
        *_grid(results["grid"], results["machine"]["cores"]),
        *_million(results["million"]),
        *_calibration(results["calibration"]),
        *_scalar_and_command_line(results),
        *_in_jax(results["in_jax"]),
        *_accelerator(results["accelerator"]),
    ]
    return "\n".join(lines)


def draw_chart(results: dict[str, Any], target: Path) -> str:
    """Draws milliseconds an epsilon and a calibration; returns what was written."""
    try:
        import matplotlib
    except ImportError as error:
        return f"no chart: cannot be imported ({error})"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
    for axis, part, title in (
        (axes[0], "grid", "one epsilon"),
        (axes[1], "calibration", "one calibrated noise multiplier"),
    ):
        bars = {OURS: results[part]["seconds_per_setting"]}
        for name, peer in results[part]["peers"].items():
            if "skipped" not in peer:
                bars[name] = peer["total_seconds"] / peer["num_settings"]
        milliseconds = [1e3 * seconds for seconds in bars.values()]
        colors = ["tab:orange"] + ["tab:gray"] * (len(bars) - 1)
        drawn = axis.barh(list(bars), milliseconds, color=colors)
        axis.bar_label(drawn, labels=[f" {value:.3g}" for value in milliseconds])
        axis.set_xscale("log")
        axis.margins(x=0.25)
        axis.invert_yaxis()
        axis.set_xlabel("milliseconds, mean (log scale)")
        axis.set_title(f"{title}, by Rényi-DP", fontsize=10)
    figure.savefig(target, dpi=160)
    plt.close(figure)
    return str(target)


def _heading(results: dict[str, Any]) -> Iterator[str]:
    machine = results["machine"]
    yield f"{machine['processor']}, {machine['cores']} cores, {machine['system']}"
    versions = [f"{k} {v or 'missing'}" for k, v in machine["versions"].items()]
    yield ", ".join([f"Python {machine['python']}", *versions[:6]])
    yield ", ".join(versions[6:])
    if machine["load"] is not None:
        yield (
            f"load before {machine['load']:.1f}, after {machine['load_after']:.1f}: "
            "above 1 before, others were using the machine"
        )
    if results["quick"]:
        yield "a quick run: its sizes are too small for a judgement of speed"
    yield (
        f"delta {results['delta']:g}, {results['num_steps']} steps unless said "
        f"otherwise, seed {results['seed']}"
    )
    yield "three signed numbers: smallest, median and largest relative difference"
    yield f"ours: best of {results['sizes']['repeats']} timings; peers: one"


def _grid(part: dict[str, Any], cores: int) -> Iterator[str]:
    yield from _title("1. Epsilon of the sampled Gaussian by Rényi-DP, a grid")
    yield from _ours(part)
    batch = part["batch_of_the_sample"]
    yield (
        f"the peers' settings only, in one call: {_time(batch['seconds'])} for "
        f"{batch['num_settings']}"
    )
    yield from _peers(part, f"peers' loops use one core, ours all {cores}")
    yield _monotone(part)
    yield f"ours against the best of 4,000 orders: {_spread(part['search_excess'])}"
    yield f"our rdp against 50-digit series: {_spread(part['rdp_error'])}"


def _million(part: dict[str, Any]) -> Iterator[str]:
    yield from _title("2. Rates x noise x numbers of steps, a process of its own")
    yield from _ours(part)
    yield f"first call, compiling included: {_time(part['first_seconds'])}"
    peak, before = part["peak_memory_bytes"], part["peak_memory_bytes_before"]
    if peak is not None:
        yield (
            f"peak memory {peak / 2**20:,.0f} MiB, of which {before / 2**20:,.0f} MiB "
            "after the imports"
        )
    yield f"epsilons not finite: {part['num_not_finite']}; {_monotone(part)}"


def _calibration(part: dict[str, Any]) -> Iterator[str]:
    yield from _title("3. Smallest noise for a target epsilon, by Rényi-DP")
    yield from _ours(part)
    yield from _peers(
        part, "opacus is asked for epsilon to 0.01, dp-accounting for the noise to 1e-6"
    )
    yield f"our epsilon against its target: {_spread(part['epsilon_reached'])}"


def _scalar_and_command_line(results: dict[str, Any]) -> Iterator[str]:
    part = results["scalar"]
    yield from _title("4. One epsilon a call, warm")
    yield (
        f"{part['num_calls']} calls: median {_time(part['median_seconds'])}, largest "
        f"{_time(part['largest_seconds'])}; the first, which compiles, "
        f"{_time(part['first_seconds'])}"
    )
    part = results["command_line"]
    yield from _title("5. Command line, a process each")
    if "skipped" in part:
        yield f"skipped: {part['skipped']}"
        return
    later = part["next_seconds"]
    yield (
        f"{part['request']}: {_time(part['first_seconds'])} with no kept kernels, then "
        f"{_time(min(later))} to {_time(max(later))}"
    )


def _in_jax(part: dict[str, Any]) -> Iterator[str]:
    yield from _title("In a jitted program, float32: ours, and fifteen lines of jnp")
    for count, found in part.items():
        if not isinstance(found, dict):
            continue
        yield (
            f"{count} steps, {part['num_settings']} settings: ours "
            f"{_time(found['seconds'])}, below the best bound of any order in "
            f"{found['ours_below_proven']:.0%}; theirs "
            f"{_time(found['their_seconds'])}, in {found['theirs_below_proven']:.0%}, "
            f"and below the true epsilon in {found['theirs_below_true']:.0%}"
        )


def _accelerator(part: dict[str, Any]) -> Iterator[str]:
    yield from _title("6. Accelerator, float64")
    if "skipped" in part:
        yield f"skipped: {part['skipped']}"
        return
    yield part["device"]
    yield from _ours(part)
    yield f"against the CPU's epsilons: {_spread(part['relative_to_cpu'])}"
    yield (
        f"ceiling {part['exponentials_per_second']:.3g} exponentials a second; one "
        f"epsilon takes the time of {part['exponentials_per_setting']:,.0f}"
    )


def _title(text: str) -> Iterator[str]:
    yield from ("", text, _RULE)


def _ours(part: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{part['num_settings']:,} settings in {_time(part['seconds'])} (worst "
        f"{_time(part['worst_seconds'])}), {1 / part['seconds_per_setting']:,.0f} a "
        f"second; compiling {_time(part['compile_seconds'])}"
    )


def _monotone(part: dict[str, Any]) -> str:
    return f"not monotone in the settings: {part['num_not_monotone']}"


def _peers(part: dict[str, Any], remark: str) -> Iterator[str]:
    """One row a system; the ratio is that of mean times a setting."""
    ours = part["seconds_per_setting"]
    yield _row("", "settings", "mean", "median", "largest", "ratio", "excess over ours")
    yield _row(OURS, f"{part['num_settings']:,}", _time(ours), "", "", "1", "")
    for name, peer in part["peers"].items():
        if "skipped" in peer:
            yield f"{name:<15}skipped: {peer['skipped']}"
            continue
        mean = peer["total_seconds"] / peer["num_settings"]
        yield _row(
            name,
            str(peer["num_settings"]),
            _time(mean),
            _time(peer["median_seconds"]),
            _time(peer["largest_seconds"]),
            f"{mean / ours:,.0f}",
            _spread(peer["relative_excess"]),
        )
        if peer["num_failed"]:
            yield f"{'':<15}no finite answer in {peer['num_failed']} settings"
    yield f"({remark})"


def _row(name: str, *cells: str) -> str:
    widths = (8, 9, 9, 9, 7, 0)
    return f"{name:<15}" + "  ".join(
        cell.rjust(width) for cell, width in zip(cells, widths, strict=True)
    )


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _spread(values: dict[str, Any] | None) -> str:
    if values is None:
        return "no values"
    if "skipped" in values:
        return f"skipped: {values['skipped']}"
    return " / ".join(f"{values[k]:+.2g}" for k in ("smallest", "median", "largest"))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name, if the system tells."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown processor"
