"""Runs kernels over many settings: chunks, threads, devices.

The settings are cut into chunks of a few fixed sizes, so that JAX compiles a kernel
once and not for every number of settings. On the CPU a chunk fits the cache, and chunks
run side by side, one a core; on an accelerator a chunk is one launch, and the next one
is made ready meanwhile. Memory is bounded by the chunk, not by the grid.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant._engine import chosen_device, engine_name, in_threads
from jaxdp_episodic.accountant.numerics.loops import map_arrays

# Chunks that an accelerator is given at once.
_AHEAD = 2
# Number of settings on NumPy below which a thread costs more than it saves.
_FEW = 8


class Chunks(NamedTuple):
    """Sizes of chunks, ascending: the first that holds all settings, or the last."""

    numpy: int  # largest size for the NumPy engine, which takes any
    cpu: tuple[int, ...]  # for JAX on the CPU
    accelerator: tuple[int, ...]  # for JAX elsewhere


def in_chunks(
    kernel: Callable[[Any], tuple[np.ndarray, ...]], arrays: Any, sizes: Chunks
) -> tuple[np.ndarray, ...]:
    """Calls a kernel chunk by chunk, on the CPU one chunk a core; results are (n,).

    The kernel maps nested arrays, whose last axis are the settings, at least one, to a
    tuple of results of a chunk.
    """
    size = num_settings(arrays)
    on_numpy = engine_name() != "jax"
    if on_numpy:
        chunk = min(size, sizes.numpy)
        # Every core gets settings.
        if size >= max(_FEW, sizes.numpy // 4):
            chunk = min(chunk, -(-size // num_cores()))
    else:
        widths = sizes.cpu if on_cpu() else sizes.accelerator
        chunk = next((width for width in widths if size <= width), widths[-1])

    def work(start: int) -> tuple[np.ndarray, ...]:
        stop = min(start + chunk, size)
        # The last chunk is padded with the last setting, which is dropped below.
        pad = 0 if on_numpy else chunk - (stop - start)
        part = map_arrays(lambda a: _padded(a[..., start:stop], pad), arrays)
        return tuple(result[..., : stop - start] for result in kernel(part))

    starts = range(0, size, chunk)
    # While a device computes a chunk the next one is made ready.
    side_by_side = num_cores() if on_numpy or on_cpu() else _AHEAD
    workers = min(len(starts), side_by_side)
    if workers <= 1:
        parts = [work(start) for start in starts]
    else:
        parts = in_threads(work, starts, workers, on_numpy=on_numpy)
    return tuple(np.concatenate(column, axis=-1) for column in zip(*parts, strict=True))


def num_settings(arrays: Any) -> int:
    """Returns the length of the last axis of nested arrays."""
    sizes: list[int] = []
    map_arrays(lambda array: sizes.append(array.shape[-1]), arrays)
    return sizes[0]


def on_cpu() -> bool:
    """Whether JAX computes on the CPU in this thread."""
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


def num_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
