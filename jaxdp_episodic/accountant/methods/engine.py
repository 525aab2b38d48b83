"""Runs kernels over many settings in chunks of a few sizes.

So JAX compiles each kernel once, and memory does not grow with the number of settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant._engine import (
    chosen_device,
    engine_name,
    in_threads,
    num_cores,
)
from jaxdp_episodic.accountant.numerics.loops import map_arrays

# Chunks in flight on an accelerator.
_AHEAD = 2
# Number of settings below which threads cost more than they save on NumPy.
_FEW = 8

_Kernel = Callable[[Any], tuple[np.ndarray, ...]]


class Chunks(NamedTuple):
    """Numbers of settings in a chunk.

    JAX uses the smallest size that holds all settings, or the largest.
    """

    numpy: int  # largest size on NumPy
    cpu: tuple[int, ...]  # of JAX on the CPU, ascending
    accelerator: tuple[int, ...]  # of JAX on other devices, ascending


def in_chunks(kernel: _Kernel, arrays: Any, sizes: Chunks) -> tuple[np.ndarray, ...]:
    """Calls a kernel chunk by chunk, in parallel; results are (n,).

    On JAX a chunk is padded with its last setting, and the padding removed again.
    """
    size, on_jax = num_settings(arrays), engine_name() == "jax"
    device, workers = None, num_cores()
    if on_jax:
        widths = sizes.cpu if on_cpu() else sizes.accelerator
        chunk = next((width for width in widths if size <= width), widths[-1])
        # The next chunk is prepared while the device computes one.
        workers = workers if on_cpu() else _AHEAD
        device = chosen_device()
    else:
        chunk = min(size, sizes.numpy)
        # Use all cores.
        if size >= max(_FEW, sizes.numpy // 4):
            chunk = min(chunk, -(-size // workers))
        if size <= chunk:
            return tuple(map(np.array, kernel(arrays)))

    def work(start: int) -> tuple[np.ndarray, ...]:
        number = min(chunk, size - start)
        pad = chunk - number if on_jax else 0
        part = map_arrays(
            lambda a: _padded(a[..., start : start + number], pad), arrays
        )
        return tuple(result[..., :number] for result in kernel(part))

    starts = range(0, size, chunk)
    workers = min(len(starts), workers)
    if workers <= 1:
        parts = list(map(work, starts))
    else:
        parts = in_threads(work, starts, workers, device=device)
    return tuple(np.concatenate(column, axis=-1) for column in zip(*parts, strict=True))


def num_settings(arrays: Any) -> int:
    """Returns the length of the last axis of nested arrays: of the first one."""
    while isinstance(arrays, tuple):
        arrays = arrays[0]
    return arrays.shape[-1]


def on_cpu() -> bool:
    """Whether JAX's device in this thread is a CPU."""
    import jax

    device = chosen_device()
    if device is None:
        return jax.default_backend() == "cpu"
    return (device if isinstance(device, str) else device.platform) == "cpu"


def _padded(array: np.ndarray, pad: int) -> np.ndarray:
    if pad == 0:
        return array
    last = np.broadcast_to(array[..., -1:], (*array.shape[:-1], pad))
    return np.concatenate([array, last], axis=-1)
