"""Speed of the private training step, next to the same step without privacy.

    make bench-training

or ``python experiments/benchmarks/training.py [--quick] [--only CASE ...]``.

One step: the gradient of each episode of a block, clipped, summed, with noise. It is
compared with the gradient of the mean loss (vmap, and one episode after the other), and
with the other kind of noise; noise is drawn before the clock starts, as the trainer
does. The working memory of 8 and of 256 episodes is measured, too. Each case runs in
its own process; the steps alternate, and the median is printed.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from harness import Rows, run_parts, spread

from jaxdp_episodic.trainer.draw.generators import Keys
from jaxdp_episodic.trainer.learners.episode import Block, contribution_loss
from jaxdp_episodic.trainer.learners.models import split_model
from jaxdp_episodic.training import MAML, ConvNet, Linear, PrivateGradient, ProtoNet

WAYS, SHOTS, CLIP_NORM, NOISE, SEED = 5, 1, 0.1, 1.0, 0
NOISES = ("gaussian", "discrete")
PRIVATE = "private"


class Spec(NamedTuple):
    """A learner, and the episodes of its step."""

    episodes: int
    outputs: int
    shape: tuple[int, ...] = (28, 28, 1)
    channels: tuple[int, ...] = (32, 32, 32, 32)
    queries: int = 5


CASES = {
    "maml": Spec(16, 5),
    "protonet": Spec(64, 64),
    # A step of the demo: fixed features, a linear embedding, cosines, both re-splits.
    "linear": Spec(360, 128, (425,), (), 1),
    # The same of 10^6 parameters.
    "million": Spec(24, 1_000, (1_000,), (), 1),
}


class Case:
    """Data, parameters, and the steps of one learner."""

    def __init__(self, name: str, spec: Spec) -> None:
        self.learner, self.params = learner_and_params(name, spec)
        rng = np.random.default_rng(SEED)
        # A pattern for each class, plus noise, so that something can be learned.
        shape = (spec.episodes, WAYS, SHOTS + spec.queries, *spec.shape)
        slots = rng.normal(size=(*shape[:2], 1, *shape[3:])) + rng.normal(size=shape)
        mask = np.ones(shape[:3], np.float32)
        units = np.ones(spec.episodes, np.float32)
        self.block = Block(slots.astype(np.float32), np.zeros_like(mask), mask, units)
        self.loss = contribution_loss(self.learner, mask.shape[1:], shots=SHOTS)
        self.devices, self.keys = jax.local_devices(), Keys(SEED)
        self.gradients = {
            kind: PrivateGradient(self.loss, devices=self.devices, noise=kind)
            for kind in NOISES
        }

    def private_step(self) -> Any:
        """The clipped, noised gradient."""
        return self.noised("gaussian", self.noise("gaussian", 0))

    def noise(self, kind: str, place: int) -> Any:
        """The noise of a step."""
        key = self.keys.new("noise", place)
        return self.gradients[kind].noise(self.params, key, NOISE)

    def noised(self, kind: str, noise: Any) -> Any:
        """The clipped gradient plus this noise."""
        settings = {"l2_clip_norm": CLIP_NORM, "noise_multiplier": NOISE}
        normalizer = float(len(self.block.unit_mask))
        return self.gradients[kind](
            self.params, [self.block], noise, normalizer=normalizer, **settings
        )[0]

    def plain_step(self, *, side_by_side: bool) -> Callable[[], Any]:
        """The gradient of the mean loss, over the same devices."""
        rows = jax.sharding.PartitionSpec("shard")
        whole = jax.sharding.PartitionSpec()
        mesh = jax.sharding.Mesh(np.array(self.devices), ("shard",))

        def share(params: Any, block: Block) -> Any:
            def mean_loss(params: Any) -> Any:
                return jnp.mean(jax.vmap(self.loss, (None, 0))(params, block))

            def add(total: Any, unit: Block) -> tuple[Any, None]:
                new = jax.grad(self.loss)(params, unit)
                return jax.tree.map(jnp.add, total, new), None

            params = jax.lax.pcast(params, "shard", to="varying")
            if side_by_side:
                gradient = jax.grad(mean_loss)(params)
            else:
                zero = jax.tree.map(jnp.zeros_like, params)
                gradient, _ = jax.lax.scan(add, zero, block)
            return jax.lax.pmean(gradient, "shard")

        step = jax.jit(
            jax.shard_map(share, mesh=mesh, in_specs=(whole, rows), out_specs=whole)
        )
        by_row = jax.sharding.NamedSharding(mesh, rows)
        return lambda: step(self.params, jax.device_put(self.block, by_row))

    def memory(self, number: int) -> float:
        """Working memory of the private step, MiB, for a block of that many."""
        block = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((number, *a.shape[1:]), a.dtype), self.block
        )
        one_device = PrivateGradient(self.loss, devices=self.devices[:1])
        return one_device.temporary_bytes(self.params, block) / 2**20


def learner_and_params(name: str, spec: Spec) -> tuple[Any, Any]:
    """The learner of a case and its initial parameters."""
    rngs = nnx.Rngs(SEED)
    if spec.channels:
        net: Any = ConvNet(spec.shape, spec.channels, spec.outputs, rngs=rngs)
    else:
        net = Linear(math.prod(spec.shape), spec.outputs, rngs=rngs)
    apply, params = split_model(net)
    if name == "maml":
        return MAML(apply, inner_steps=3, inner_learning_rate=0.1), params
    if name == "protonet":
        return ProtoNet(apply, ways=WAYS), params
    how: Any = {"distance": "cosine", "temperature": 4.0, "resplits": True}
    return ProtoNet(apply, ways=WAYS, **how), params


def flattened(params: Any) -> dict[str, np.ndarray]:
    """Nested dictionaries as one, its keys joined by "/"."""
    pairs = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(k.key for k in path): np.asarray(leaf) for path, leaf in pairs}


def measured(name: str, runs: int) -> Rows:
    """Times all steps of a case in turn; the first of each compiles."""
    case = Case(name, CASES[name])
    steps: dict[str, Callable[..., Any]] = {
        PRIVATE: case.private_step,
        "not private, vmap": case.plain_step(side_by_side=True),
        "not private, loop": case.plain_step(side_by_side=False),
    }
    steps |= {f"{k} noise": functools.partial(case.noised, k) for k in NOISES}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in steps}
    for place in range(runs + 1):
        for kind, step in steps.items():
            drawn = kind.removesuffix(" noise")
            given = (case.noise(drawn, place),) if drawn in NOISES else ()
            begun, worked = time.perf_counter(), time.process_time()
            jax.block_until_ready(step(*given))
            spent = time.perf_counter() - begun, time.process_time() - worked
            found[kind] += [spent] * (place > 0)
    ours = statistics.median(wall for wall, _ in found[PRIVATE])
    plain = np.array([cpu for _, cpu in found["gaussian noise"]])
    rows: Rows = []
    for kind, values in found.items():
        wall, cpu = np.array(values).T
        row = {"step": kind, "ms": 1e3 * float(np.median(wall))}
        row |= {"worst ms": 1e3 * wall.max(), "CPU ms": 1e3 * float(np.median(cpu))}
        rows.append(row | {"times ours": float(np.median(wall)) / ours})
    rows[0]["MiB for 8, 256"] = f"{case.memory(8):.1f}, {case.memory(256):.1f}"
    rows[-1]["more CPU than gaussian, in pairs"] = spread(cpu / plain - 1)
    return rows


if __name__ == "__main__":
    parts = {name: functools.partial(measured, name) for name in CASES}
    run_parts(__doc__, parts, sizes=20, quick=2, out="results/benchmark-training")
