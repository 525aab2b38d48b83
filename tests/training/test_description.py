"""Whether a step can be taken again bit for bit."""

from typing import NamedTuple

import jax
import pytest

from jaxdp_episodic.training.description import described_environment


class Device(NamedTuple):
    platform: str
    device_kind: str = "some"


@pytest.mark.parametrize(
    ("platforms", "flags", "repeats"),
    [
        (["cpu", "cpu"], "", True),
        (["gpu"], "", False),
        (["gpu", "gpu"], "--a --xla_gpu_deterministic_ops=true", True),
        (["gpu"], "--xla_gpu_deterministic_ops=false", False),
        (["tpu"], "--xla_gpu_deterministic_ops=true", False),
        (["cpu", "gpu"], "--xla_gpu_deterministic_ops=true", False),
    ],
)
def test_which_devices_repeat_a_step(monkeypatch, platforms, flags, repeats):
    monkeypatch.setenv("XLA_FLAGS", flags)
    described = described_environment([Device(p) for p in platforms], 4)
    assert described["repeats"] is repeats
    assert described["devices"] == ["some"] * len(platforms)


def test_what_changes_rounding_is_in_it(monkeypatch):
    devices = jax.local_devices()
    here = described_environment(devices, 4)
    assert described_environment(devices, 4) == here
    assert here["jax"] == jax.__version__ and here["repeats"]
    assert described_environment(devices, 5) != here
    assert described_environment(devices * 2, 4) != here
    with jax.default_matmul_precision("bfloat16"):
        assert described_environment(devices, 4) != here
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert described_environment(devices, 4) != here
