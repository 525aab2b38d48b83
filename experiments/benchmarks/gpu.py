"""The library on an accelerator: its tests, whole sweeps, one call, training steps.

    make bench-gpu [GPU_JAX='jax[cuda13]'] [GPU_FLAGS='--only sweeps']

or ``python experiments/benchmarks/gpu.py [--quick] [--only PART ...]`` in any
environment whose JAX finds the device. Without a device everything runs on the CPU, and
the first part says so; use ``--quick`` there.

* device: its name, and what drives it;
* tests: accounting, losses and bounds with every kernel on JAX, hence on the device;
* sweeps: ten million settings by Rényi DP and a million by the exact method, each the
  command ``jaxdp-episodic sweep`` with nothing compiled before, picture included;
* one_call: settings a second of one call;
* training: private steps of MAML and ProtoNet, with and without deterministic
  operations, in float32 and in JAX's default precision of products (on NVIDIA's
  devices, TensorFloat-32), and whether a second process gets the same bits.

The exit code is 1 if a test fails.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import time
from typing import Any, NamedTuple
from unittest import mock

from harness import ROOT, Rows, in_fresh_process, run_parts, timed
from sweep import EXAMPLES, Grid, sweep

_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


class Sizes(NamedTuple):
    """How much is measured."""

    tests: tuple[str, ...] = tuple(
        f"tests/accountant/{room}"
        for room in ("methods", "questions", "losses", "bounds")
    )
    rdp: Grid = Grid(10, 1_000, 1_000)
    exact: Grid = Grid(10, 400, 250)
    calls: tuple[tuple[str, int], ...] = (("rdp", 1_024), ("exact", 256))
    learners: tuple[str, ...] = ("maml", "protonet")
    episodes: int = 0  # as in training.py
    steps: int = 20


QUICK = Sizes(
    tests=("tests/accountant/losses/test_known_parts.py",),
    rdp=Grid(2, 30, 30),
    exact=Grid(2, 8, 16),
    calls=(("rdp", 64), ("exact", 8)),
    learners=("linear",),
    episodes=2,
    steps=2,
)


def device(sizes: Sizes) -> Rows:
    """The device's name, and its driver."""
    import jax

    first = jax.devices()[0]
    driver = str(first.client.platform_version).replace("\n", "; ")
    row = {"device": first.device_kind, "platform": first.platform, "driver": driver}
    return [row | {"devices": jax.device_count()}]


def tests(sizes: Sizes) -> Rows:
    """The fast tests of everything that has kernels, with all kernels on JAX."""
    command = ["-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    process = subprocess.run(
        [sys.executable, *command, *sizes.tests],
        cwd=ROOT,
        env={**os.environ, "JAXDP_EPISODIC_ENGINE": "jax"},
        capture_output=True,
        text=True,
    )
    lines = process.stdout.strip().splitlines()[-60:]
    if process.returncode:
        print("\n".join([*lines, process.stderr[-1000:]]), flush=True)
    return [{"tests": lines[-1], "failed": bool(process.returncode)}]


def sweeps(sizes: Sizes) -> Rows:
    """Whole sweeps by the command."""
    return [
        sweep(method, grid, EXAMPLES)
        for method, grid in (("rdp", sizes.rdp), ("exact", sizes.exact))
    ]


def one_call(sizes: Sizes) -> Rows:
    """Settings per second in one call of a square grid."""
    import numpy as np

    import jaxdp_episodic as jde

    rows: Rows = []
    for method, side in sizes.calls:
        rate = np.geomspace(0.01, 1.0, side)[:, None]
        draw = jde.Poisson("example", sampling_probability=rate)
        step = jde.GaussianStep(draw, noise_multiplier=np.geomspace(0.7, 6.0, side))
        question: dict[str, Any] = {"num_steps": 1_000, "delta": 1e-5, "engine": "jax"}
        question["method"] = method
        row, _ = timed(lambda s=step, a=question: jde.epsilon(s, **a), 3)
        rows.append({"method": method, **row, "a second": 1e3 / row["ms each"]})
    return rows


def training(sizes: Sizes) -> Rows:
    """Seconds of a private step, by learner, precision and order of summation."""
    rows: Rows = []
    modes = itertools.product(sizes.learners, ("float32", "default"), (True, False))
    for learner, precision, deterministic in modes:
        flags = os.environ.get("XLA_FLAGS", "").replace(_DETERMINISTIC, "")
        changed = {"XLA_FLAGS": f"{flags} {_DETERMINISTIC * deterministic}".strip()}
        if precision != "default":
            changed["JAX_DEFAULT_MATMUL_PRECISION"] = precision
        with mock.patch.dict(os.environ, changed):
            work = step, learner, sizes.episodes, sizes.steps
            (one, bits), (two, again) = (
                in_fresh_process(*work, on_cpu=False) for _ in range(2)
            )
        rows.append(
            {
                "learner": learner,
                "precision": precision,
                "deterministic": deterministic,
                "ms a step": 1e3 * min(one, two),
                "same bits in two processes": bits == again,
            }
        )
    return rows


def step(learner: str, episodes: int, steps: int) -> tuple[float, str]:
    """Seconds of a private training step, and a digest of its gradient's bits."""
    import jax
    from training import CASES, Case, flattened

    spec = CASES[learner]
    case = Case(learner, spec._replace(episodes=episodes or spec.episodes))
    gradient = jax.block_until_ready(case.private_step())
    digest = hashlib.sha256()
    for name, leaf in sorted(flattened(gradient).items()):
        digest.update(name.encode() + leaf.tobytes())
    begun = time.perf_counter()
    for _ in range(steps):
        jax.block_until_ready(case.private_step())
    return (time.perf_counter() - begun) / steps, digest.hexdigest()


PARTS = {
    "device": device,
    "tests": tests,
    "sweeps": sweeps,
    "one_call": one_call,
    "training": training,
}

if __name__ == "__main__":
    out = "results/benchmark-gpu"
    found = run_parts(__doc__, PARTS, sizes=Sizes(), quick=QUICK, out=out, on_cpu=False)
    sys.exit(any(row["failed"] for row in found.get("tests", ())))
