"""The library on an accelerator: its tests there, sweeps, chunk sizes, training steps.

    make bench-gpu [GPU_JAX='jax[cuda13]'] [GPU_FLAGS='--only sweeps']

or ``python experiments/benchmarks/gpu.py [--small] [--only PART ...] [--out FOLDER]``
in any environment whose JAX finds the device. Where it finds none everything runs on
the CPU, and the first line says so; ``--small`` is for that. Each part runs in
processes of its own, and ``results.json`` is written after each: an interrupted run
loses one part.

* tests: accounting, losses and bounds with every kernel on JAX, hence on the device;
* sweeps: ten million settings by Rényi-DP and a million by the exact method, each the
  command ``jaxdp-episodic sweep`` with nothing compiled before, picture included;
* chunks: settings a second of one call, for several sizes of what is launched at once:
  those of `Chunks.accelerator`, to be chosen by what is measured here; of "rdp" also
  what the host alone takes of a call;
* training: private steps of MAML and ProtoNet, with and without deterministic
  operations, in float32 and in JAX's default precision of products (on NVIDIA's
  devices, TensorFloat-32), and whether a second process gets the same bits.

The exit code is 1 if a test fails, or a part does not come to its end.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from sweep import EXAMPLES, Grid, numbers, sweep

ROOT = Path(__file__).resolve().parents[2]
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


class Sizes(NamedTuple):
    """How much is measured."""

    tests: tuple[str, ...] = tuple(
        f"tests/accountant/{room}"
        for room in ("methods", "questions", "losses", "bounds")
    )
    rdp: Grid = Grid(10, 1_000, 1_000)
    exact: Grid = Grid(10, 400, 250)
    rdp_chunks: tuple[int, ...] = (65_536, 131_072, 262_144, 524_288, 1_048_576)
    exact_chunks: tuple[int, ...] = (4_096, 16_384, 65_536)
    calls: tuple[tuple[str, int], ...] = (("rdp", 2**20), ("exact", 2**16))
    learners: tuple[str, ...] = ("maml", "protonet")
    episodes: int = 0  # as in training.py
    steps: int = 20


SMALL = Sizes(
    tests=("tests/accountant/losses/test_renyi_curve.py",),
    rdp=Grid(2, 100, 100),
    exact=Grid(2, 16, 32),
    rdp_chunks=(2_048, 16_384),
    exact_chunks=(64,),
    calls=(("rdp", 2**14), ("exact", 2**6)),
    learners=("linear",),
    episodes=2,
    steps=2,
)


def main() -> int:
    """Measures part by part; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="to see that it works")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("results/benchmark-gpu"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, *rest = json.loads(arguments.worker)
        print(json.dumps(WORKERS[name](*rest)))
        return 0
    sizes = SMALL if arguments.small else Sizes()
    results: dict[str, Any] = {"small": arguments.small, "device": worker("device")}
    print("\n".join(f"{k}: {v}" for k, v in results["device"].items()), flush=True)
    failed = False
    for name in arguments.only:
        begun = time.monotonic()
        try:
            found = PARTS[name](sizes)
        except RuntimeError as error:
            found = {"failed": str(error)[-2000:]}
        failed |= "failed" in found
        results[name] = {"seconds": time.monotonic() - begun, **found}
        print(f"\n{name}\n{shown(results[name])}", flush=True)
        arguments.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(results, indent=1) + "\n"
        (arguments.out / "results.json").write_text(text, encoding="utf-8")
    print(f"\nwritten: {arguments.out / 'results.json'}")
    return int(failed)


# --- Parts ---


def tests(sizes: Sizes) -> dict[str, Any]:
    """The fast tests of all that has kernels, every one of these on JAX."""
    command = ["-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    process = subprocess.run(
        [sys.executable, *command, *sizes.tests],
        cwd=ROOT,
        env={**os.environ, "JAXDP_EPISODIC_ENGINE": "jax"},
        capture_output=True,
        text=True,
    )
    last = process.stdout.strip().splitlines()[-60:]
    if process.returncode:
        return {"failed": "\n".join([*last, process.stderr[-1000:]])}
    return {"said": last[-1]}


def sweeps(sizes: Sizes) -> dict[str, Any]:
    """Whole sweeps by the command; what is evaluated a second leaves out its start."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for method, grid in (("rdp", sizes.rdp), ("exact", sizes.exact)):
            cost = sweep(Path(folder) / method, method, grid, EXAMPLES)
            row = numbers(cost)
            rate = row["settings"] / row["of these evaluating"]
            found[method] = {**row, "settings a second evaluating": rate}
    return found


def chunks(sizes: Sizes) -> dict[str, Any]:
    """Settings a second of one call, by the size of a launch."""
    of = {"rdp": sizes.rdp_chunks, "exact": sizes.exact_chunks}
    return {
        f"{method}, {size:,} a launch": worker("call", method, settings, size, 3)
        for method, settings in sizes.calls
        for size in of[method]
    }


def training(sizes: Sizes) -> dict[str, Any]:
    """Seconds of a private step, by learner, precision and order of summation."""
    found = {}
    modes = itertools.product(sizes.learners, ("float32", "default"), (True, False))
    for learner, precision, deterministic in modes:
        flags = os.environ.get("XLA_FLAGS", "").replace(_DETERMINISTIC, "")
        environment = {"XLA_FLAGS": f"{flags} {_DETERMINISTIC * deterministic}".strip()}
        if precision != "default":
            environment["JAX_DEFAULT_MATMUL_PRECISION"] = precision
        work = ("step", learner, sizes.episodes, sizes.steps)
        row, again = (worker(*work, **environment) for _ in range(2))
        name = f"{learner}, {precision}, " + "not " * (not deterministic)
        found[f"{name}deterministic"] = {
            "ms a step": 1e3 * min(row["seconds"], again["seconds"]),
            "same bits in two processes": row["digest"] == again["digest"],
        }
    return found


PARTS: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "tests": tests,
    "sweeps": sweeps,
    "chunks": chunks,
    "training": training,
}


def worker(*work: Any, **environment: str) -> dict[str, Any]:
    """What a function of `WORKERS` returns in a process of its own."""
    process = subprocess.run(
        [sys.executable, __file__, "--worker", json.dumps(work)],
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false", **environment},
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise RuntimeError(f"{work}: {process.stderr}")
    return json.loads(process.stdout.splitlines()[-1])


def shown(values: dict[str, Any], indent: str = "  ") -> str:
    """Nested values for a reader, a line each."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            inside = "; ".join(f"{k} {plain(v)}" for k, v in value.items())
            lines.append(f"{indent}{key}: {inside}")
        else:
            lines.append(f"{indent}{key}: {plain(value)}")
    return "\n".join(lines)


def plain(value: Any) -> str:
    """A number with four digits."""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


# --- In processes of their own ---


def device() -> dict[str, Any]:
    """The device's name, and what drives it."""
    import jax

    import jaxdp_episodic

    first = jax.devices()[0]
    return {
        "device": first.device_kind,
        "platform": first.platform,
        "devices": jax.device_count(),
        "driver": str(first.client.platform_version).replace("\n", "; "),
        "jax": jax.__version__,
        "jaxdp-episodic": jaxdp_episodic.__version__,
    }


def call(method: str, settings: int, size: int, repeats: int) -> dict[str, Any]:
    """The best of some calls of `epsilon` with so many settings a launch."""
    import numpy as np

    import jaxdp_episodic as jde
    from jaxdp_episodic.accountant._engine import using_engine
    from jaxdp_episodic.accountant.methods.exact import solver
    from jaxdp_episodic.accountant.methods.rdp import method as rdp

    if method == "rdp":
        rdp._CHUNKS = rdp._CHUNKS._replace(accelerator=(size,))
    else:
        solver._CHUNKS = solver._CHUNKS._replace(accelerator=(size,))
    side = int(settings**0.5)
    rate = np.geomspace(0.01, 1.0, side)[:, None]
    noise = np.geomspace(0.7, 6.0, settings // side)
    step = jde.GaussianStep(
        jde.MultistageSampling(jde.Poisson("example", sampling_probability=rate)),
        noise_multiplier=noise,
    )
    times = []
    with using_engine("jax"):
        for _ in range(1 + repeats):  # the first one compiles
            begun = time.perf_counter()
            answer = jde.epsilon(step, num_steps=1_000, delta=1e-5, method=method)
            times.append(time.perf_counter() - begun)
        row = {
            "settings": int(np.size(answer)),
            "settings a second": np.size(answer) / min(times[1:]),
            "seconds of a call": min(times[1:]),
            "seconds of the first call": times[0],
        }
        if method == "rdp":
            nothing = mock.patch.object(rdp, "in_chunks", _nothing)
            with nothing:
                begun = time.perf_counter()
                jde.epsilon(step, num_steps=1_000, delta=1e-5, method=method)
                row["of these the host alone"] = time.perf_counter() - begun
    return row


def _nothing(kernel: Any, arrays: tuple[Any, ...], sizes: Any) -> tuple[Any, ...]:
    """In place of `in_chunks`: no kernel runs, and every answer is 1."""
    del kernel, sizes
    return tuple(arrays[0] * 0 + 1 for _ in range(2))


def step(learner: str, episodes: int, steps: int) -> dict[str, Any]:
    """Seconds of a private training step, and a digest of its gradient's bits."""
    import jax
    from training import CASES, Case, flattened, written

    spec = CASES[learner] | ({"episodes": episodes} if episodes else {})
    with tempfile.TemporaryDirectory() as folder:
        case = Case(learner, written(learner, spec, folder))
    gradient = jax.block_until_ready(case.private_step())
    digest = hashlib.sha256()
    for name, leaf in sorted(flattened(gradient).items()):
        digest.update(name.encode() + leaf.tobytes())
    begun = time.perf_counter()
    for _ in range(steps):
        jax.block_until_ready(case.private_step())
    seconds = (time.perf_counter() - begun) / steps
    return {"seconds": seconds, "digest": digest.hexdigest()}


WORKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "device": device,
    "call": call,
    "step": step,
}


if __name__ == "__main__":
    sys.exit(main())
