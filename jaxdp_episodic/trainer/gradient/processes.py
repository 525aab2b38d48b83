"""A run on several processes: what they exchange, and how they end together.

JAX knows which processes there are (`jax.distributed.initialize`). The first process
holds the run: ledger, checkpoints, log, optimizer and noise. The others make the same
secret draw, from entropy that the first one sends, and add their shares of the clipped
sum. Messages are not encrypted, and the sums in them have no noise yet, so the network
between the processes must be trusted.

A process that fails tells the others before it ends. If one is killed, its connections
break, or JAX's coordination service ends the others when its heartbeat stops.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax._src import distributed as _runtime  # its client has no public name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdp_episodic.accountant.questions.budget import BudgetExhaustedError

_AXIS = "process"
# Prefix of this package's keys at the coordinator.
_KEYS = "jaxdp-episodic"
# Longest wait for processes that are computing, in milliseconds.
_WEEK = 7 * 86_400_000
# Wait for the others to read why this process ends, in milliseconds.
_FIVE_SECONDS = 5_000
# Most characters of an error sent to the other processes.
_LONGEST = 1_000


class RunEndedError(ConnectionError):
    """Another process of the run has ended; the message gives the reason if known."""


class Processes:
    """The processes of this program; all call the same methods in the same order.

    Only `end` may be called by one process alone.
    """

    def __init__(self) -> None:
        self.count, self.index = jax.process_count(), jax.process_index()
        self._meetings = 0
        self._has_ended = False
        self._summed_before: set[Any] = set()
        if self.count == 1:
            return
        firsts = {d.process_index: d for d in reversed(jax.devices())}
        mesh = Mesh(np.array([firsts[i] for i in range(self.count)]), (_AXIS,))
        self._device = firsts[self.index]
        self._by_process = NamedSharding(mesh, PartitionSpec(_AXIS))
        one, same = PartitionSpec(_AXIS), PartitionSpec()
        summed = jax.shard_map(_summed, mesh=mesh, in_specs=one, out_specs=same)
        self._summed = jax.jit(summed)

    @property
    def is_first(self) -> bool:
        """Whether this process holds the run."""
        return self.index == 0

    def meet(self) -> None:
        """Waits for all others; raises `RunEndedError` if one failed or was killed."""
        if self.count == 1:
            return
        with self._as_run_ended():
            self._client.wait_at_barrier(f"{_KEYS}/{self._meetings}", _WEEK)
        self._meetings += 1
        reasons = self._reasons()
        if reasons:
            raise RunEndedError(reasons)

    def sum(self, tree: Any) -> Any:
        """Returns the sum over processes: the same bits in all, exact for integers."""
        if self.count == 1:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        kind = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if kind not in self._summed_before:
            # A first sum opens connections, and gloo allows half a minute for that.
            # Processes that load or compile for longer must meet before.
            self.meet()
            self._summed_before.add(kind)
        shards = jax.tree.map(self._shard, tree)
        with self._as_run_ended():
            return jax.block_until_ready(
                jax.tree.map(lambda a: a.addressable_data(0), self._summed(shards))
            )

    def shared(self, tree: Any) -> Any:
        """Returns the first process's arrays, in the structure of ``tree``."""
        if self.count == 1:
            return tree
        bits = jax.tree.map(_bits, tree)
        if not self.is_first:
            bits = jax.tree.map(jnp.zeros_like, bits)
        total = self.sum(bits)
        return tree if self.is_first else jax.tree.map(_from_bits, total, tree)

    def shared_value(self, value: Any) -> Any:
        """Returns the first process's value, which must be representable in JSON."""
        return json.loads(self.shared_bytes(json.dumps(value).encode()))

    def shared_bytes(self, content: bytes) -> bytes:
        """Returns the first process's bytes."""
        if self.count == 1:
            return content
        data = np.frombuffer(content, np.uint8)
        number = int(self.shared(np.array(len(data), np.int32)))
        data = data if self.is_first else np.zeros(number, np.uint8)
        return np.asarray(self.shared(data)).tobytes()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Tells the others if the body fails, so that all end with the reason."""
        try:
            yield
        except (RunEndedError, BudgetExhaustedError):
            raise  # BudgetExhaustedError occurs in all processes alike
        except BaseException as error:
            self.end(error)
            raise

    def end(self, error: BaseException) -> None:
        """Tells the others why this process ends; waits 5 s for them to read it."""
        if self.count == 1 or self._has_ended:
            return
        self._has_ended = True
        reason = " ".join(str(error).split())[:_LONGEST]
        text = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        with suppress(Exception):  # otherwise they end when their connections break
            self._client.key_value_set(f"{_KEYS}/ended/{self.index:06d}", text)
            self._client.wait_at_barrier(f"{_KEYS}/{self._meetings}", _FIVE_SECONDS)

    @property
    def _client(self) -> Any:
        return _runtime.global_state.client

    def _shard(self, leaf: Any) -> Array:
        """Returns this process's part of an array with one part per process."""
        own = leaf.addressable_data(0) if isinstance(leaf, Array) else leaf
        own = jax.device_put(own, self._device)[None]
        shape = (self.count, *own.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._by_process, [own])

    @contextmanager
    def _as_run_ended(self) -> Iterator[None]:
        """Turns what JAX raises when a process is gone into a `RunEndedError`."""
        try:
            yield
        except Exception as error:
            reasons = ""
            with suppress(Exception):  # the coordinator itself may be gone
                reasons = self._reasons()
            first = str(error).strip().partition("\n")[0]
            raise RunEndedError(
                reasons
                or "another process of the run has ended without giving a reason "
                f"(killed, out of memory, or unreachable): {first}"
            ) from error

    def _reasons(self) -> str:
        """Returns the reasons given by processes that failed."""
        found = self._client.key_value_dir_get(f"{_KEYS}/ended")
        return "; ".join(
            f"process {int(key.rpartition('/')[2])} has ended: {text}"
            for key, text in sorted(found)
        )


@functools.cache  # the processes of a program do not change
def all_processes() -> Processes:
    """Returns the processes that JAX was initialized with, including this one."""
    return Processes()


def _summed(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.psum(leaf[0], _AXIS), tree)


def _bits(leaf: Any) -> Array:
    """Returns an array's bits as integers of a type that can be summed."""
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        kind = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[leaf.dtype.itemsize]
        leaf = jax.lax.bitcast_convert_type(leaf, kind)
    return leaf.astype(jnp.int32) if leaf.dtype.itemsize < 4 else leaf


def _from_bits(bits: Array, like: Any) -> Array:
    kind = jnp.asarray(like).dtype
    if not jnp.issubdtype(kind, jnp.inexact):
        return bits.astype(kind)
    whole = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[kind.itemsize]
    return jax.lax.bitcast_convert_type(bits.astype(whole), kind)
