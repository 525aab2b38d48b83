"""Speed, error and memory of the exact and the certified epsilon, next to peers.

In the environment that ``make bench`` makes:

    .venv-bench/bin/python experiments/benchmarks/exact.py [--quick] [--out FOLDER]

(any environment with the library will do; a peer that is missing is named and skipped).

Settings: numbers of steps 10 to 1e5, delta 1e-9 to 1e-4, rates 1e-4 to 0.3, noise 0.5
to 5, log-uniform, of which those are kept whose epsilon by Rényi-DP lies between 0.1
and 20: outside of that nobody trains, and the peers' memory is not bounded. The batch
has as many settings of each of four kinds of step, and each kind is one call. The peers
get the first 64 sampled Gaussians one by one, as that is what they offer; a peer's
process runs on one core, ours on all. CPU time stands next to wall time, as a machine
may be shared: ratios of both are given.

The errors are those against our own contour integral on another contour with more nodes
(``reference``), which must itself lie in our certified interval for every setting. The
peers' answers are bounds or estimates by design:

* dp-accounting's ``PLDAccountant`` with its defaults (pessimistic, spacing 1e-4);
* prv-accountant with the errors that its documentation names: 0.1 in epsilon and
  delta / 1000; its estimate is compared, which is far better than that;
* autodp's characteristic function, the larger of its two neighbouring relations, for a
  few settings. Its quadrature was removed from scipy in version 1.14; `_quadrature` is
  that function again.

Nothing here fails for being slow: the numbers are for a reader.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers import summary
from presentation import describe_machine

import jaxdp_episodic as jde
from accountant import in_fresh_process, peak_memory
from jaxdp_episodic.accountant._engine import float64_boundary, using_engine
from jaxdp_episodic.accountant.losses.loss_nodes import NUM_NODES
from jaxdp_episodic.accountant.methods.exact import contour as contour_layout
from jaxdp_episodic.accountant.methods.exact import integral
from jaxdp_episodic.accountant.methods.exact.mgf import steps_of
from jaxdp_episodic.accountant.questions.dominating_pair import run_of

SEED = 20_241
NUM_STEPS, DELTAS = (10, 1e5), (1e-9, 1e-4)
RATES, NOISE_MULTIPLIERS = (1e-4, 0.3), (0.5, 5.0)
EPSILONS = (0.1, 20.0)
KINDS = ("sampled", "swapped", "antipodal", "episodes")


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
      batch: settings of the mixed batch, enough of each kind for JAX.
      peers: sampled Gaussians that the peers get.
      autodp: how many of them autodp gets.
      scalar_calls: warm calls of one setting each.
      memory: sizes of the batches whose memory is measured.
      repeats: of our timings; the best counts.
    """

    batch: int = 16_000
    peers: int = 64
    autodp: int = 1
    scalar_calls: int = 20
    memory: tuple[int, ...] = (10_000, 100_000)
    repeats: int = 3


QUICK = Sizes(64, peers=8, memory=(1_000,), repeats=2)


def main() -> None:
    """Measures all parts, prints the table, writes exact.json."""
    parser = argparse.ArgumentParser(description="the exact epsilon against peers")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--out", type=Path, default=Path("results/benchmark"))
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else Sizes()
    machine = describe_machine()
    parts: dict[str, Any] = {}
    for name, measure in (
        ("batch", measure_batch),
        ("sample", measure_sample),
        ("scalar", measure_scalar),
    ):
        print(f"measuring: {name} …", file=sys.stderr, flush=True)
        parts[name] = in_fresh_process(measure, sizes)
    for name in PEERS:
        print(f"measuring: {name} …", file=sys.stderr, flush=True)
        reference = parts["sample"]["reference"]
        parts[name] = in_fresh_process(measure_peer, name, sizes, reference)
    parts["memory"] = []
    for size in sizes.memory:
        print(f"measuring: memory of {size:,} …", file=sys.stderr, flush=True)
        parts["memory"].append(in_fresh_process(measure_memory, size))
    machine["load_after"] = describe_machine()["load"]
    results = {
        "version": 1,
        "quick": arguments.quick,
        "seed": SEED,
        "sizes": asdict(sizes),
        "machine": machine,
        **parts,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / "exact.json"
    target.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print("\n".join(_table(results)))
    print(f"\nwritten: {target}")


def draw(kind: str, size: int) -> tuple[jde.GaussianStep, np.ndarray, np.ndarray]:
    """Settings of one kind of step: the step, numbers of steps and deltas, (size,)."""
    return _described(kind, _fields(kind, size))


def one_by_one(size: int) -> list[tuple[float, float, int, float]]:
    """The sampled Gaussians of `draw`: rate, noise, number of steps, delta."""
    rate, noise, steps, delta, _ = _fields("sampled", size).tolist()
    return [
        (p, s, int(t), d) for p, s, t, d in zip(rate, noise, steps, delta, strict=True)
    ]


def _fields(kind: str, size: int) -> np.ndarray:
    """Rates, noise, numbers of steps, deltas, numbers of episodes: (5, size)."""
    generator = np.random.default_rng([SEED, KINDS.index(kind)])

    def spread(ends: tuple[float, float], count: int) -> np.ndarray:
        return np.exp(generator.uniform(np.log(ends[0]), np.log(ends[1]), count))

    parts: list[np.ndarray] = []
    while sum(part.shape[1] for part in parts) < size:
        # Of a fixed length, so that a longer batch begins with the shorter one.
        count = 256
        fields = np.stack(
            [
                spread(RATES, count),
                spread(NOISE_MULTIPLIERS, count),
                np.rint(spread(NUM_STEPS, count)),
                spread(DELTAS, count),
                generator.integers(2, 6, count),
            ]
        )
        step, steps, delta = _described(kind, fields)
        bound = jde.epsilon(step, num_steps=steps, delta=delta, method="rdp")
        parts.append(fields[:, (bound > EPSILONS[0]) & (bound < EPSILONS[1])])
    return np.concatenate(parts, axis=1)[:, :size]


def _described(
    kind: str, fields: np.ndarray
) -> tuple[jde.GaussianStep, np.ndarray, np.ndarray]:
    rate, noise, steps, delta, episodes = fields
    example = jde.Poisson("example", sampling_probability=rate)
    options: dict[str, Any] = {}
    if kind == "episodes":
        design = jde.IndependentEpisodes(example, num_episodes=episodes.astype(int))
    elif kind == "antipodal":
        # Classes are drawn and clipped, half of a class's examples are used.
        classes = jde.Poisson("class", sampling_probability=rate)
        half = jde.Poisson("example", sampling_probability=0.5)
        design = jde.MultistageSampling(classes, half)
        options["clip_unit"] = "class"
    else:
        design = jde.MultistageSampling(example)
        options["clip_unit"] = "step" if kind == "swapped" else "example"
    step = jde.GaussianStep(design, noise_multiplier=noise, **options)
    return step, steps.astype(np.int64), delta


def measure_batch(sizes: Sizes) -> dict[str, Any]:
    """The mixed batch by the exact accountant, kind by kind."""
    problems = {kind: draw(kind, sizes.batch // len(KINDS)) for kind in KINDS}
    kinds, certified = {}, 0
    for kind, (step, steps, delta) in problems.items():

        def call(step=step, steps=steps, delta=delta) -> Any:
            # By itself "auto" leaves to NumPy what is not worth compiling for one call.
            return jde.epsilon(
                step, num_steps=steps, delta=delta, engine="jax", return_info=True
            )

        timing, (epsilon, info) = timed(call, sizes.repeats)
        certified += int(np.sum(info.is_certified_bound))
        kinds[kind] = {
            **timing,
            "num_certified_only": int(np.sum(info.is_certified_bound)),
            "stated_error": summary(info.error / epsilon),
        }
    alone = [part for kind, part in kinds.items() if kind != "episodes"]
    return {
        "kinds": kinds,
        **_total(list(kinds.values())),
        "without_episodes": _total(alone),
        "num_certified_only": certified,
    }


def _total(parts: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("num_settings", "seconds", "cpu_seconds", "first_seconds")
    return {name: sum(part[name] for part in parts) for name in names}


def measure_sample(sizes: Sizes) -> dict[str, Any]:
    """Exact and certified on the peers' settings, with the exact ones' errors."""
    step, steps, delta = draw("sampled", sizes.peers)

    def exact() -> np.ndarray:
        return jde.epsilon(step, num_steps=steps, delta=delta, method="exact")

    def certified() -> tuple[np.ndarray, np.ndarray]:
        return jde.epsilon_interval(step, num_steps=steps, delta=delta)

    exact_timing, epsilon = timed(exact, sizes.repeats)
    certified_timing, (lower, upper) = timed(certified, sizes.repeats)
    reference = reference_epsilon(sizes, epsilon)
    return {
        "exact": exact_timing,
        "certified": certified_timing,
        "reference": reference.tolist(),
        "exact_error": summary(np.abs(epsilon / reference - 1)),
        "certified_width": summary((upper - lower) / reference),
        "num_reference_outside": int(((reference < lower) | (reference > upper)).sum()),
    }


def reference_epsilon(sizes: Sizes, near: np.ndarray) -> np.ndarray:
    """Epsilons of the peers' settings, finer and in another way than `jde.epsilon`.

    Sixteen times the nodes, on a contour laid for other epsilons, with the
    distributions that otherwise check: other paths in the plane, cut later. ``near``
    says where to begin.
    """
    step, steps, delta = draw("sampled", sizes.peers)
    run = run_of(step, steps).flattened((len(near), 1))
    log_cut = np.log(delta) - np.log(steps) - 90.0

    def kernel(target: Any, near: Any, log_cut: Any, groups: Any, backward: Any) -> Any:
        (group,) = groups
        both = steps_of(group, backward, log_cut, num_nodes=NUM_NODES, num_terms=1)
        both = (both._replace(nodes=both.check, check=both.nodes),)
        contour = contour_layout.lay_contour(0.93 * near, both)
        solution = integral.epsilon(
            target, near, 2 * near, contour, both, num_nodes=1_537
        )
        return solution.value

    answer = float64_boundary(kernel)
    found = np.zeros(len(near))
    with using_engine("numpy"):  # JAX takes minutes to compile them as one
        for i in range(0, len(near), 8):
            part = slice(i, i + 8)
            fields = (np.log(delta[part]), near[part], log_cut[part])
            groups = run.take(np.arange(len(near))[part]).groups()
            for backward in (0.0, 1.0):
                way = np.full(len(near[part]), backward)
                found[part] = np.fmax(found[part], answer(*fields, groups, way))
    return found


def measure_scalar(sizes: Sizes) -> dict[str, Any]:
    """One exact epsilon a call, other numbers in each, the description included."""
    seconds, cpu = [], []
    for rate, noise, count, delta in one_by_one(1 + sizes.scalar_calls):
        start, cpu_start = time.perf_counter(), time.process_time()
        example = jde.Poisson("example", sampling_probability=rate)
        one = jde.GaussianStep(jde.MultistageSampling(example), noise_multiplier=noise)
        jde.epsilon(one, num_steps=count, delta=delta, method="exact")
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return {
        "num_calls": sizes.scalar_calls,
        "first_seconds": seconds[0],
        "median_seconds": float(np.median(seconds[1:])),
        "median_cpu_seconds": float(np.median(cpu[1:])),
        "largest_seconds": max(seconds[1:]),
    }


def measure_memory(size: int) -> dict[str, Any]:
    """Peak memory of one exact call over ``size`` sampled Gaussians."""
    step, steps, delta = draw("sampled", size)
    before = peak_memory()
    timing, _ = timed(
        lambda: jde.epsilon(step, num_steps=steps, delta=delta, method="exact"), 0
    )
    return {**timing, "peak_memory_bytes": peak_memory(), "before_bytes": before}


def measure_peer(name: str, sizes: Sizes, reference: list[float]) -> dict[str, Any]:
    """One peer's loop over its settings, after one call that is not timed."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    settings = one_by_one(sizes.peers)
    try:
        call = PEERS[name]()
    except ImportError as error:
        return {"skipped": f"cannot be imported ({error})"}
    if name == "autodp":
        settings = settings[: sizes.autodp]
    else:
        with suppress(Exception):  # if it fails it is counted below
            call(*settings[0])
    seconds, cpu, excess = [], [], []
    for (rate, noise, count, delta), epsilon in zip(settings, reference, strict=False):
        start, cpu_start = time.perf_counter(), time.process_time()
        try:
            asked = epsilon if name == "autodp" else delta
            wanted = delta if name == "autodp" else epsilon
            excess.append(call(rate, noise, count, asked) / wanted - 1)
        except Exception:  # whatever a peer raises: it has no answer here
            excess.append(np.nan)
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    good = np.isfinite(excess)
    return {
        "num_settings": len(settings),
        "seconds": sum(seconds),
        "cpu_seconds": sum(cpu),
        "largest_seconds": max(seconds),
        "num_failed": int((~good).sum()),
        "excess": summary(np.asarray(excess)[good]),
        "error": summary(np.abs(np.asarray(excess)[good])),
        "of": "delta" if name == "autodp" else "epsilon",
    }


def dp_accounting_pld() -> Callable[[float, float, int, float], float]:
    """Epsilon by dp-accounting's privacy-loss distributions."""
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    def epsilon(rate: float, noise: float, num_steps: int, delta: float) -> float:
        event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise))
        return PLDAccountant().compose(event, num_steps).get_epsilon(delta)

    return epsilon


def prv_accountant() -> Callable[[float, float, int, float], float]:
    """Epsilon, the estimate between its bounds, by prv-accountant."""
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant  # pyright: ignore[reportMissingImports]

    def epsilon(rate: float, noise: float, num_steps: int, delta: float) -> float:
        step = PoissonSubsampledGaussianMechanism(
            sampling_probability=rate, noise_multiplier=noise
        )
        accountant = PRVAccountant(
            prvs=[step],
            max_self_compositions=[num_steps],
            eps_error=0.1,
            delta_error=delta / 1_000,
        )
        ends = accountant.compute_epsilon(
            delta=delta, num_self_compositions=[num_steps]
        )
        return float(ends[1])

    return epsilon


def autodp_characteristic_function() -> Callable[[float, float, int, float], float]:
    """Delta at given epsilon by autodp's characteristic function.

    Its search for epsilon stops at a relative error of 1e-2 in 1 - delta, so delta is
    asked for.
    """
    from autodp import mechanism_zoo, transformer_zoo
    from scipy import integrate

    integrate.quadrature = _quadrature  # pyright: ignore[reportAttributeAccessIssue]

    def delta(rate: float, noise: float, num_steps: int, epsilon: float) -> float:
        largest = 0.0
        for relation in ("add_only", "remove_only"):
            gaussian = mechanism_zoo.GaussianMechanism(sigma=noise, phi_off=False)
            gaussian.neighboring = relation
            sampling = transformer_zoo.AmplificationBySampling_pld(
                PoissonSampling=True, neighboring=relation
            )
            run = transformer_zoo.ComposeAFA()([sampling(gaussian, rate)], [num_steps])
            largest = max(largest, float(run.approx_delta(epsilon)))
        return largest

    return delta


PEERS: dict[str, Callable[[], Callable[[float, float, int, float], float]]] = {
    "dp-accounting": dp_accounting_pld,
    "prv-accountant": prv_accountant,
    "autodp": autodp_characteristic_function,
}


def _quadrature(
    function: Callable[[np.ndarray], np.ndarray],
    low: float,
    high: float,
    *,
    tol: float,
    rtol: float,
    maxiter: int,
) -> tuple[Any, Any]:
    """Gauss-Legendre rules of ascending order until two agree."""
    value, error = np.inf, np.inf
    for order in range(1, maxiter + 1):
        node, weight = np.polynomial.legendre.leggauss(order)
        half = 0.5 * (high - low)
        new = half * np.sum(weight * function(half * (node + 1) + low))
        value, error = new, abs(new - value)
        if error < tol or error < rtol * abs(value):
            break
    return value, error


def timed(call: Callable[[], Any], repeats: int) -> tuple[dict[str, Any], Any]:
    """Wall and CPU seconds of the first call and of the best of the later ones."""

    def once() -> tuple[float, float, Any]:
        start, cpu = time.perf_counter(), time.process_time()
        answer = call()
        return time.perf_counter() - start, time.process_time() - cpu, answer

    first, first_cpu, answer = once()
    later = [once()[:2] for _ in range(repeats)] or [(first, first_cpu)]
    part = answer[0] if isinstance(answer, tuple) else answer
    timing = {
        "num_settings": int(np.size(part)),
        "first_seconds": first,
        "seconds": min(wall for wall, _ in later),
        "cpu_seconds": min(cpu for _, cpu in later),
    }
    return timing, answer


def _table(results: dict[str, Any]) -> Iterator[str]:
    """The whole run for a reader."""
    machine = results["machine"]
    load = machine["load"], machine["load_after"]
    yield f"{machine['processor']}, {machine['cores']} cores; load {load[0]}, {load[1]}"
    yield "wall and CPU milliseconds a setting, warm; ratios of wall and of CPU times"
    sample, batch = results["sample"], results["batch"]
    peer = results["dp-accounting"]
    yield _row("", "settings", "wall", "CPU", "ratios to dp-accounting's PLD", "error")
    for name, part in batch["kinds"].items():
        yield _timing(f"exact, {name}", part, peer, part["stated_error"], "stated ")
    # Nobody else accounts for independent episodes.
    yield _timing("exact, but episodes", batch["without_episodes"], peer, None)
    yield _timing("exact, all kinds", batch, peer, None)
    yield _timing("exact, peers'", sample["exact"], peer, sample["exact_error"])
    yield _timing("certified, peers'", sample["certified"], peer, None)
    for name in PEERS:
        part = results[name]
        if "skipped" in part:
            yield f"{name:<20}skipped: {part['skipped']}"
            continue
        of = "of delta " if part["of"] == "delta" else ""
        yield _timing(name, part, peer, part["error"], of)
        if part["num_failed"]:
            yield f"{'':<20}no finite answer in {part['num_failed']} settings"
    yield "error: largest and median relative error of epsilon unless it says otherwise"
    width = sample["certified_width"]
    yield (
        f"certified intervals: width / epsilon {width['median']:.2g} in the median, "
        f"{width['largest']:.2g} at most; {sample['num_reference_outside']} do not "
        "hold the reference"
    )
    yield f"exact batch: {batch['num_certified_only']} settings only certified"
    scalar = results["scalar"]
    yield (
        f"one exact epsilon, warm: {1e3 * scalar['median_seconds']:.1f} ms in the "
        f"median (CPU {1e3 * scalar['median_cpu_seconds']:.1f}), "
        f"{1e3 * scalar['largest_seconds']:.1f} at most; the first, which compiles, "
        f"{scalar['first_seconds']:.1f} s"
    )
    for part in results["memory"]:
        peak = part["peak_memory_bytes"]
        peak = "unknown" if peak is None else f"{peak / 2**20:,.0f} MiB"
        yield (
            f"{part['num_settings']:,} settings in one call: "
            f"{part['first_seconds']:.1f} s, peak memory {peak}"
        )


def _timing(
    name: str,
    part: dict[str, Any],
    peer: dict[str, Any],
    error: dict[str, float] | None,
    remark: str = "",
) -> str:
    each = [part[key] / part["num_settings"] for key in ("seconds", "cpu_seconds")]
    ratios = ""
    if "skipped" not in peer:
        theirs = [
            peer[key] / peer["num_settings"] for key in ("seconds", "cpu_seconds")
        ]
        ratios = " / ".join(f"{a / b:,.3g}" for a, b in zip(theirs, each, strict=True))
    errors = ""
    if error is not None:
        errors = f"{remark}{error['largest']:.1e}, {error['median']:.1e}"
    wall, cpu = (f"{1e3 * seconds:.3g} ms" for seconds in each)
    return _row(name, f"{part['num_settings']:,}", wall, cpu, ratios, errors)


def _row(name: str, *cells: str) -> str:
    widths = (8, 9, 9, 17, 0)
    return f"{name:<20}" + "  ".join(
        cell.rjust(width) for cell, width in zip(cells, widths, strict=True)
    )


if __name__ == "__main__":
    main()
