"""Runs kernels over broadcast grids: masks, chunks, threads.

A grid of any shape is flattened and cut into chunks of a few fixed sizes, so that a
kernel is compiled once and not for every shape. On the CPU a chunk is worked off in
blocks that fit the cache, and chunks run side by side, one a core; on an accelerator a
chunk is one launch. Memory is bounded by the chunk, not by the grid.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxdp_episodic._precision import float64_boundary
from jaxdp_episodic.accounting.rdp import kernels
from jaxdp_episodic.accounting.rdp.kernels import StepGroup
from jaxdp_episodic.accounting.run import DominatingPair

_CPU_BLOCK = 64
_CPU_CHUNKS = (8, _CPU_BLOCK, 8 * _CPU_BLOCK)
# From so many settings on, blocks are worked off several in a chunk: each chunk costs
# its start, but its last one is filled up, and all cores should have some.
_CPU_MANY = 4 * _CPU_CHUNKS[-1]
_ACCELERATOR_CHUNKS = (8, 2048, 131072)

# Rates and inverse noise are raised to these floors, which raises epsilon: their
# squares and products must stay above the smallest float64.
_SMALLEST_RATE = 1e-60
_SMALLEST_SHIFT = 1e-20
# Beyond it squares of exponents overflow; the answer is inf, as without noise.
_LARGEST_SHIFT = 1e70


def evaluate(
    kernel_name: str,
    target: np.ndarray,
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
    *,
    direction: str = "forward",
) -> tuple[np.ndarray, np.ndarray]:
    """Evaluates one of the kernels of `rdp_kernels` at every setting and path.

    Args:
      kernel_name: "rdp", "best_epsilon" or "best_log_delta".
      target: orders, log(delta) or epsilon; broadcasts with the pairs.
      pairs: dominating pairs of the run's steps.
      counts: how often each is taken.
      direction: of "rdp".

    Returns:
      ``(value, order)`` of the common broadcast shape. Settings that lose nothing
      (rate 0, no steps, infinite noise) have value 0, or -inf for log(delta), and
      order inf; settings without noise have inf, or 0 for log(delta).
    """
    shape = np.broadcast_shapes(
        np.shape(target), *(p.shape for p in pairs), *(np.shape(c) for c in counts)
    )
    if 0 in shape:
        return np.zeros(shape), np.zeros(shape)
    kinds, groups, silent, unprotected = step_groups(pairs, counts, shape)
    safe_target = np.broadcast_to(np.asarray(target, np.float64), shape)
    arrays = (_flat(safe_target, shape), groups)
    on_cpu = _platform() == "cpu"
    sizes = _ACCELERATOR_CHUNKS
    if on_cpu:
        sizes = _CPU_CHUNKS if arrays[0].size >= _CPU_MANY else _CPU_CHUNKS[:-1]

    def kernel(part: Any) -> tuple[np.ndarray, np.ndarray]:
        chunk = part[0].shape[-1]
        return _boundary_kernel()(
            part,
            kernel_name=kernel_name,
            kinds=kinds,
            direction=direction,
            block=min(chunk, _CPU_BLOCK) if on_cpu else chunk,
        )

    value, order = in_chunks(kernel, arrays, sizes)
    value, order = value.reshape(shape), order.reshape(shape)
    nothing, everything = (
        (-np.inf, 0.0) if kernel_name == "best_log_delta" else (0.0, np.inf)
    )
    value = np.where(silent, nothing, np.where(unprotected, everything, value))
    order = np.where(silent | unprotected, np.inf, order)
    # A NaN would compare as safe in the wrong direction; it becomes the upper end.
    return np.where(np.isnan(value), everything, value), order


def step_groups(
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
    shape: tuple[int, ...],
) -> tuple[tuple[str, ...], tuple[StepGroup, ...], np.ndarray, np.ndarray]:
    """Sorts the steps by kind and takes out what no kernel can compute.

    Returns the kinds, one `StepGroup` of (K, n) arrays for each, and masks of the
    settings that lose nothing and of those that are not protected at all.
    """
    silent = np.ones(shape, bool)
    unprotected = np.zeros(shape, bool)
    by_kind: dict[str, list[StepGroup]] = {}
    for pair, count in zip(pairs, counts, strict=True):
        rate = pair.outer_rate * pair.rate * pair.inner_rate
        noise = pair.noise_multiplier
        idle = (rate == 0) | (count == 0) | np.isinf(noise)
        with np.errstate(divide="ignore", over="ignore"):
            shift = pair.sensitivity / np.where(noise > 0, noise, 1.0)
        bare = ~idle & ((noise == 0) | (shift > _LARGEST_SHIFT))
        silent &= idle
        unprotected |= bare
        group = StepGroup(
            outer_rate=np.maximum(pair.outer_rate, _SMALLEST_RATE),
            rate=np.maximum(pair.rate, _SMALLEST_RATE),
            inner_rate=np.maximum(pair.inner_rate, _SMALLEST_RATE),
            shift=np.clip(shift, _SMALLEST_SHIFT, _LARGEST_SHIFT),
            num_episodes=pair.num_episodes,
            count=np.where(idle | bare, 0.0, count),
        )
        by_kind.setdefault(pair.kind, []).append(group)
    groups = tuple(
        StepGroup(
            *(
                np.stack([_flat(array, shape) for array in field])
                for field in zip(*group, strict=True)
            )
        )
        for group in by_kind.values()
    )
    return tuple(by_kind), groups, silent, unprotected


def _flat(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The array broadcast to ``shape`` and flattened, without a copy if constant."""
    size = int(np.prod(shape))
    if np.size(array) == 1:
        return np.broadcast_to(np.reshape(array, ()), (size,))
    return np.broadcast_to(array, shape).reshape(size)


def in_chunks(
    kernel: Callable[[Any], tuple[np.ndarray, ...]],
    arrays: Any,
    sizes: tuple[int, ...],
) -> tuple[np.ndarray, ...]:
    """Calls a kernel chunk by chunk, on the CPU one chunk a core.

    Args:
      kernel: maps the arrays of one chunk to as many (chunk,) results as it likes.
      arrays: pytree of arrays with the settings as last axis.
      sizes: of a chunk, ascending: the first that holds all settings, else the last.
        There must be at least one setting.

    Returns:
      The results, each (n,).
    """
    size = jax.tree.leaves(arrays)[0].shape[-1]
    chunk = _chunk_size(size, sizes)

    def work(start: int) -> tuple[np.ndarray, ...]:
        stop = min(start + chunk, size)
        # The last setting fills up the last chunk: valid numbers, thrown away below.
        pad = chunk - (stop - start)
        part = jax.tree.map(lambda a: _padded(a[..., start:stop], pad), arrays)
        return tuple(result[: stop - start] for result in kernel(part))

    starts = range(0, size, chunk)
    workers = min(len(starts), num_cores()) if _platform() == "cpu" else 1
    if workers <= 1:
        parts = [work(start) for start in starts]
    else:
        # A thread of its own would work on the first device, whatever the caller's is.
        device = _default_device()

        def on_device(start: int) -> tuple[np.ndarray, ...]:
            with jax.default_device(device):
                return work(start)

        with ThreadPoolExecutor(workers) as pool:
            parts = list(pool.map(on_device, starts))
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _default_device() -> Any:
    """What `jax.default_device` was set to in this thread; None: the first device."""
    return jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]: made at run time


def _platform() -> str:
    """The platform of the device that this thread computes on."""
    device = _default_device()
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def _chunk_size(size: int, sizes: tuple[int, ...]) -> int:
    return next((c for c in sizes if size <= c), sizes[-1])


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


@functools.cache
def _boundary_kernel() -> Callable[..., Any]:
    static = ("kernel_name", "kinds", "direction", "block")
    return float64_boundary(jax.jit(_blockwise, static_argnames=static))


def _blockwise(
    arrays: Any,
    *,
    kernel_name: str,
    kinds: tuple[str, ...],
    direction: str,
    block: int,
) -> tuple[jax.Array, jax.Array]:
    """The kernel over one chunk, block after block."""

    def on_block(part: Any) -> tuple[jax.Array, jax.Array]:
        target, groups = part
        if kernel_name == "rdp":
            value = kernels.rdp(kinds, direction, target, groups)
            return value, target
        kernel = getattr(kernels, kernel_name)
        return kernel(kinds, target, groups)

    def to_blocks(a: jax.Array) -> jax.Array:
        """(..., n) to (n / block, ..., block)."""
        parts = a.reshape(*a.shape[:-1], -1, block)
        return jax.numpy.moveaxis(parts, -2, 0)

    if arrays[0].shape[-1] == block:
        return on_block(arrays)
    value, order = jax.lax.map(on_block, jax.tree.map(to_blocks, arrays))
    return value.reshape(-1), order.reshape(-1)
