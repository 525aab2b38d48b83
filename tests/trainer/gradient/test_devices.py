"""Several simulated devices give the same as one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# They are compiled in a process of their own.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdp_episodic.training import (
    MAML, MLP, PrivateGradient, classification_episode, split_model
)


class Rows(NamedTuple):
    data: Any
    unit_mask: Any


apply, params = split_model(MLP(4, (5,), 3, rngs=nnx.Rngs(0)))
learner = MAML(apply, inner_steps=1)


def loss(params, unit):
    episode = classification_episode(unit.data, jnp.ones((3, 3), jnp.float32), shots=1)
    return learner.loss(params, episode)


data = np.random.default_rng(0).normal(size=(12, 3, 3, 4)).astype(np.float32)
data[4, 0, 0, 0] = np.nan
masks = {"all": np.ones(12), "some": np.arange(12) % 3 != 1, "none": np.zeros(12)}
devices = jax.local_devices()
report = {"devices": len(devices)}
settings = {"l2_clip_norm": 0.5, "noise_multiplier": 0.7, "normalizer": 5.0}
for kind in ("discrete", "gaussian"):
    gradients = [
        PrivateGradient(
            loss, devices=devices[:number], units_at_once=at_once, noise=kind
        )
        for number, at_once in ((1, 1), (2, 1), (4, 2))
    ]
    for name, mask in masks.items():
        results = [
            gradient(
                params,
                [Rows(data, mask.astype(np.float32))] * 2,
                gradient.noise(params, bytes(32), 0.7),
                **settings,
            )
            for gradient in gradients
        ]
        flat = [
            np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result)])
            for result in results
        ]
        found = [float(np.max(np.abs(one - flat[0]))) for one in flat]
        if kind == "discrete":
            sums = [jax.tree.leaves(jax.device_get(result[0])) for result in results]
            found = [
                max(float(np.max(np.abs(a - b))) for a, b in zip(one, sums[0]))
                for one in sums
            ]
        report[f"{name} {kind}"] = found
        report[name + "-units"] = [float(one[1]["num_units"]) for one in results]
try:
    gradients[2](params, [Rows(data[:3], np.ones(3, np.float32))],
                 gradients[2].noise(params, bytes(32), 0.7), **settings)
except ValueError as error:
    report["error"] = str(error)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report():
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("drawn, units", [("all", 24), ("some", 16), ("none", 0)])
def test_any_number_of_devices_gives_the_same(report, drawn, units):
    assert report["devices"] == 4
    # Noise and integer sums are equal; float sums in another order nearly so.
    assert max(report[f"{drawn} discrete"]) == 0
    assert max(report[f"{drawn} gaussian"]) < 1e-5
    assert report[f"{drawn}-units"] == [units] * 3


def test_rows_must_divide_among_devices(report):
    assert "multiple of the 4 device(s), got 3" in report["error"]
