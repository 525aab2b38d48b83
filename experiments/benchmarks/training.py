"""Speed of the private training step, next to the same step in PyTorch, in one run.

    .venv-bench/bin/python experiments/benchmarks/training.py [--quick] [--cores 1]

in the environment that ``make bench`` makes, or in any with the library (without torch
only ours is measured).

One step: the gradient of each episode of a block, clipped, summed, with noise. Both
sides get the same network, parameters and images, and their sums without noise are
compared. Each side runs in its own process, on two cores of the CPU (ours as two
devices); runs alternate, and the median counts. PyTorch (vmap of grad) is measured with
two threads and with one, because on a busy machine its threads hinder each other by up
to fifty times; the faster is compared. ``--cores 1`` pins both sides to one core; the
processor time of a step, which stands beside its time, is then what to compare where
other programs run, too.

Then what hardened noise adds to a step: steps with either kind in turn, in one process,
their noise drawn before the clock runs, as the trainer draws it ahead.

Nothing here fails for being slow: the numbers are for a reader.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from harness import Rows, describe_machine, load, spread, table

from jaxdp_episodic.trainer.draw.generators import Keys
from jaxdp_episodic.trainer.learners.episode import Block, contribution_loss
from jaxdp_episodic.trainer.learners.models import split_model
from jaxdp_episodic.training import MAML, ConvNet, Linear, PrivateGradient, ProtoNet

FOLDER = Path(__file__).parent
SIDE, CHANNELS = 28, (32, 32, 32, 32)
COMMON = {
    "shape": (SIDE, SIDE, 1),
    "channels": CHANNELS,
    "groups": math.gcd(8, CHANNELS[0]),
    "ways": 5,
    "shots": 1,
    "queries": 5,
    "l2_clip_norm": 0.1,
    "noise_multiplier": 1.0,
    "seed": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "maml": COMMON
    | {"episodes": 16, "inner_steps": 3, "inner_learning_rate": 0.1, "outputs": 5},
    "protonet": COMMON | {"episodes": 64, "outputs": 64},
    # A step of the demo: fixed features, a linear embedding, cosines, both re-splits.
    "linear": COMMON
    | {
        "episodes": 360,
        "shape": (425,),
        "channels": (),
        "queries": 1,
        "outputs": 128,
        "temperature": 4.0,
    },
    # The same of 10^6 parameters.
    "million": COMMON
    | {
        "episodes": 24,
        "shape": (1000,),
        "channels": (),
        "queries": 1,
        "outputs": 1000,
        "temperature": 4.0,
    },
}
NOISES = ("gaussian", "discrete")
PRIVATE, SIDE_BY_SIDE, IN_TURN = "private", "not private, vmap", "not private, loop"


def main() -> None:
    """Measures both sides in turn, prints a table, writes results.json."""
    parser = argparse.ArgumentParser(description="speed of private training steps")
    parser.add_argument("--quick", action="store_true", help="one short run")
    parser.add_argument("--out", type=Path, default=Path("results/benchmark-training"))
    parser.add_argument("--cores", type=int, choices=(1, 2), default=2)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(json.loads(options.worker))
        return
    machine, cores = describe_machine(), options.cores
    print(json.dumps(machine), f"{cores} cores are used", flush=True)
    if cores == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    runs, steps, pairs = (1, 1, 2) if options.quick else (5, 2, 40)
    report: dict[str, Any] = {"machine": machine, "cores": cores, "runs": runs}
    with tempfile.TemporaryDirectory() as folder:
        cases = {name: written(name, CASES[name], folder) for name in options.cases}
        setting = json.dumps({"threads": cores, "cases": cases})
        workers = {"jax": Worker([__file__, "--worker", setting], cores)}
        if importlib.util.find_spec("torch") is None:
            print("torch: not installed, skipped", file=sys.stderr)
        else:
            workers["torch"] = Worker([str(FOLDER / "torch_peer.py"), setting], cores)
        for name in cases:
            rows = measured(name, workers, runs, steps, Path(folder))
            seconds = workers["jax"].ask(case=name, pairs=pairs)
            rows += noise_rows(seconds)
            report[name] = rows
            print(f"\n{name}: {CASES[name]['episodes']} episodes a step\n{table(rows)}")
        for worker in workers.values():
            worker.close()
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report | {"load after": load()}, indent=1) + "\n"
    (options.out / "results.json").write_text(text, encoding="utf-8")


# --- Both sides, in turn ---


class Worker:
    """A process that takes commands, one JSON object a line, and answers likewise.

    ``{"case": …, "variant": …, "steps": n}`` is answered by the seconds of one
    step, and those of processors,
    ``{"case": …, "variant": …, "write": file}`` writes the clipped sum without noise,
    ``{"case": …, "pairs": n}`` is answered by those of steps with either kind of noise.
    """

    def __init__(self, command: list[str], cores: int) -> None:
        flag = f"--xla_force_host_platform_device_count={cores}"
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip(),
                "JAX_PLATFORMS": "cpu",
                "OMP_NUM_THREADS": str(cores),
            },
        )
        self.variants: list[str] = self._answer()["variants"]

    def ask(self, **command: Any) -> dict[str, Any]:
        """Sends a command and waits for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a worker ended; its error is above")
        return json.loads(line)


def measured(
    case: str, workers: dict[str, Worker], runs: int, steps: int, folder: Path
) -> Rows:
    """Times every variant in turn; the two sides' sums and the memory stand beside."""
    sides = [(s, v, worker) for s, worker in workers.items() for v in worker.variants]
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for side, variant, worker in sides:  # compiles, and warms the caches
        worker.ask(case=case, variant=variant, steps=1)
        found[side, variant] = [worker.ask(case=case, variant=variant, steps=1)]
    for _ in range(runs):
        for side, variant, worker in sides:
            values = found[side, variant]
            fastest = min(v[0]["seconds"] for (s, _), v in found.items() if s == side)
            # What is far behind is not repeated: it is not what is compared.
            if values[0]["seconds"] <= 4 * fastest or side == "jax":
                values.append(worker.ask(case=case, variant=variant, steps=steps))
    ours = statistics.median(v["seconds"] for v in found["jax", PRIVATE][1:])
    rows: Rows = []
    for (side, variant), values in found.items():
        wall, cpu = (
            [v[clock] for v in values[1:] or values]
            for clock in ("seconds", "cpu_seconds")
        )
        median = statistics.median(wall)
        rows.append(
            {
                "step": f"{side}, {variant}",
                "ms": 1e3 * median,
                "worst ms": 1e3 * max(wall),
                "CPU ms": 1e3 * statistics.median(cpu),
                "times ours": median / ours,
            }
        )
    sizes = workers["jax"].ask(case=case, memory=[8, 256])["temporary_bytes"]
    words = ", ".join(f"{size / 2**20:.1f} for {number}" for number, size in sizes)
    rows[0]["MiB for episodes"] = words
    if "torch" in workers:
        sums = []
        for side, variant in (
            ("jax", PRIVATE),
            ("torch", workers["torch"].variants[0]),
        ):
            file = folder / f"{case}-{side}.npz"
            workers[side].ask(case=case, variant=variant, write=str(file))
            sums.append(dict(np.load(file)))
        rows[0]["sums apart"] = relative_distance(*sums)
    return rows


def relative_distance(one: dict[str, Any], two: dict[str, Any]) -> float:
    """l2-norm of the difference over that of the first."""
    assert one.keys() == two.keys(), (one.keys(), two.keys())
    apart = sum(np.sum(np.square(one[name] - two[name])) for name in one)
    return float(np.sqrt(apart / sum(np.sum(np.square(v)) for v in one.values())))


def noise_rows(seconds: dict[str, dict[str, list[float]]]) -> Rows:
    """Returns what discrete noise adds to a step, pair by pair."""
    rows: Rows = []
    for kind, clocks in seconds.items():
        row: dict[str, Any] = {"step": f"jax, {PRIVATE}, {kind} noise in turn"}
        row["ms"] = 1e3 * statistics.median(clocks["seconds"])
        row["CPU ms"] = 1e3 * statistics.median(clocks["cpu_seconds"])
        plain = np.array(seconds[NOISES[0]]["cpu_seconds"])
        more = np.array(clocks["cpu_seconds"]) / plain - 1
        rows.append(row | {"more CPU than gaussian, in pairs": spread(more)})
    return rows


# --- Our side ---


def timed(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Seconds of a step, by the clock and of processors, in the mean of some."""
    by_clock, of_processors = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return {
        "seconds": (time.perf_counter() - by_clock) / steps,
        "cpu_seconds": (time.process_time() - of_processors) / steps,
    }


def serve(setting: dict[str, Any]) -> None:
    """Answers commands; see `Worker`."""
    cases = {name: Case(name, spec) for name, spec in setting["cases"].items()}
    print(json.dumps({"variants": [PRIVATE, SIDE_BY_SIDE, IN_TURN]}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        case, answer = cases[command["case"]], {}
        if "memory" in command:
            sizes = [(number, case.memory(number)) for number in command["memory"]]
            answer["temporary_bytes"] = sizes
        elif "pairs" in command:
            answer = case.with_noises(command["pairs"])
        elif "write" in command:
            total = case.private_step(noise_multiplier=0.0, normalizer=1.0)
            np.savez(command["write"], allow_pickle=False, **flattened(total))
        else:
            step = case.steps[command["variant"]]
            answer = timed(
                lambda step=step: jax.block_until_ready(step()), command["steps"]
            )
        print(json.dumps(answer), flush=True)


class Case:
    """Data, parameters, and the steps of one learner."""

    def __init__(self, name: str, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.learner, self.params = learner_and_params(name, spec)
        slots = np.load(spec["file"])["slots"]
        mask = np.ones(slots.shape[:3], np.float32)
        self.block = Block(
            slots, np.zeros_like(mask), mask, np.ones(len(slots), np.float32)
        )
        self.loss = contribution_loss(self.learner, mask.shape[1:], shots=spec["shots"])
        self.devices = jax.local_devices()
        self.gradient = PrivateGradient(self.loss, devices=self.devices)
        self.keys = Keys(0)
        self.steps = {
            PRIVATE: self.private_step,
            SIDE_BY_SIDE: self.plain_step(side_by_side=True),
            IN_TURN: self.plain_step(side_by_side=False),
        }

    def private_step(
        self, noise_multiplier: float | None = None, normalizer: float | None = None
    ) -> Any:
        """The clipped, noised gradient."""
        noise: float = self.spec["noise_multiplier"]
        noise = noise if noise_multiplier is None else noise_multiplier
        key = self.keys.new("noise", 0)
        return self.gradient(
            self.params,
            [self.block],
            self.gradient.noise(self.params, key, noise),
            l2_clip_norm=self.spec["l2_clip_norm"],
            noise_multiplier=noise,
            normalizer=normalizer or len(self.block.unit_mask),
        )[0]

    def with_noises(self, number: int) -> dict[str, dict[str, list[float]]]:
        """Seconds of steps with either kind of noise, in turn, but for the first."""
        found: dict[str, dict[str, list[float]]] = {kind: {} for kind in NOISES}
        gradients = {
            kind: PrivateGradient(self.loss, devices=self.devices, noise=kind)
            for kind in NOISES
        }
        settings = {
            name: self.spec[name] for name in ("l2_clip_norm", "noise_multiplier")
        }
        for place in range(number + 1):
            for kind, gradient in gradients.items():
                key = self.keys.new("noise", place)
                noise = gradient.noise(self.params, key, settings["noise_multiplier"])
                took = timed(
                    lambda gradient=gradient, noise=noise: jax.block_until_ready(
                        gradient(
                            self.params, [self.block], noise, normalizer=1.0, **settings
                        )[0]
                    ),
                    1,
                )
                for clock, value in took.items() if place else ():
                    found[kind].setdefault(clock, []).append(value)
        return found

    def plain_step(self, *, side_by_side: bool) -> Callable[[], Any]:
        """The gradient of the mean loss, over the same devices."""
        rows = jax.sharding.PartitionSpec("shard")
        whole = jax.sharding.PartitionSpec()
        mesh = jax.sharding.Mesh(np.array(self.devices), ("shard",))

        def share(params: Any, block: Block) -> Any:
            def mean_loss(params: Any) -> Any:
                return jnp.mean(jax.vmap(self.loss, (None, 0))(params, block))

            params = jax.lax.pcast(params, "shard", to="varying")
            if side_by_side:
                gradient = jax.grad(mean_loss)(params)
            else:
                zero = jax.tree.map(jnp.zeros_like, params)

                def add(total: Any, unit: Block) -> tuple[Any, None]:
                    new = jax.grad(self.loss)(params, unit)
                    return jax.tree.map(jnp.add, total, new), None

                gradient, _ = jax.lax.scan(add, zero, block)
            return jax.lax.pmean(gradient, "shard")

        step = jax.jit(
            jax.shard_map(share, mesh=mesh, in_specs=(whole, rows), out_specs=whole)
        )
        by_row = jax.sharding.NamedSharding(mesh, rows)
        return lambda: step(self.params, jax.device_put(self.block, by_row))

    def memory(self, number: int) -> int:
        """Working memory of the private step, bytes, for a block of that many."""
        block = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((number, *a.shape[1:]), a.dtype), self.block
        )
        one_device = PrivateGradient(self.loss, devices=self.devices[:1])
        return one_device.temporary_bytes(self.params, block)


def learner_and_params(name: str, spec: dict[str, Any]) -> tuple[Any, Any]:
    """The learner of a case and its initial parameters."""
    shape, rngs = tuple(spec["shape"]), nnx.Rngs(spec["seed"])
    if not spec["channels"]:
        net = Linear(math.prod(shape), spec["outputs"], rngs=rngs)
    else:
        net = ConvNet(shape, spec["channels"], spec["outputs"], rngs=rngs)
    apply, params = split_model(net)
    if not spec["channels"]:
        learner = ProtoNet(
            apply,
            ways=spec["ways"],
            distance="cosine",
            temperature=spec["temperature"],
            resplits=True,
        )
        return learner, params
    if name == "protonet":
        return ProtoNet(apply, ways=spec["ways"]), params
    return (
        MAML(
            apply,
            inner_steps=spec["inner_steps"],
            inner_learning_rate=spec["inner_learning_rate"],
        ),
        params,
    )


def written(name: str, spec: dict[str, Any], folder: str) -> dict[str, Any]:
    """The case with a file that holds its images and initial parameters."""
    slots = spec["shots"] + spec["queries"]
    rng = np.random.default_rng(spec["seed"])
    # A pattern for each class and noise around it, so that there is something to learn.
    shape = (spec["episodes"], spec["ways"], 1, *spec["shape"])
    pattern = rng.normal(size=shape)
    images = pattern + rng.normal(size=(*shape[:2], slots, *shape[3:]))
    file = Path(folder) / f"{name}.npz"
    _, params = learner_and_params(name, spec)
    named = {f"param:{key}": leaf for key, leaf in flattened(params).items()}
    arrays: dict[str, Any] = {"slots": images.astype(np.float32), **named}
    np.savez(file, **arrays)
    return spec | {"file": str(file)}


def flattened(params: Any) -> dict[str, np.ndarray]:
    """Nested dictionaries as one, its keys joined by "/"."""
    pairs = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(k.key for k in path): np.asarray(leaf) for path, leaf in pairs}


if __name__ == "__main__":
    main()
