"""Kernels that a process asks again and again are compiled beside its questions.

A call compiles where that pays in it alone (`_engine.choose_engine`). Smaller calls
count together: once a process has asked one kernel of enough settings, a thread
compiles it. NumPy answers until that is done, then JAX does. What is compiled in vain
takes at most about four times the CPU time of the answers before it: 7 s by "rdp", 3
and 15 s for the two passes that most settings of "exact" take.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant import _engine
from jaxdp_episodic.accountant._engine import may_compile_beside, using_engine
from jaxdp_episodic.accountant._kernel_cache import is_kept, note_kept

Kernel = tuple[Hashable, ...]
"""A kernel's name, of what types and shapes, and its width."""

# Multiple of what is enough at which a kernel is compiled.
_LEARNED_AT = 1.0
# The same of a kernel on the disk, relative to that: 1.3 s of CPU time in place of 6.8
# by "rdp", 3.8 in place of 25 for all that "exact" takes.
_KEPT_SHARE = 0.2
# Settings from which a chunk of 64 is no slower than NumPy, which takes four to five
# times as long for a setting.
_FEWEST = 16
# Seconds for which a fork waits while JAX is being imported; that takes 0.4 to 3.
_LONGEST_IMPORT = 30.0

# Whether the question is about a batch. The paths of one setting are none: what a run's
# ledger says of it has the same digits whatever its process was asked before.
_in_batch: ContextVar[bool] = ContextVar("in_batch", default=False)

_lock = threading.Lock()
_asked: dict[Kernel, int] = {}
# What compiles a kernel, of those whose turn will come, in their order.
_waiting: dict[Kernel, Callable[[], object]] = {}
# After how many clearings of JAX's caches a kernel was compiled.
_compiled: dict[Kernel, int] = {}
_failed: set[Kernel] = set()
_thread: threading.Thread | None = None
# Held while JAX is being imported; whether a fork waits with it.
_importing = threading.Lock()
_forking = False


class Learnable(NamedTuple):
    """A kernel that may be compiled beside the questions, in chunks of some widths."""

    name: tuple[Hashable, ...]  # all that it is compiled for, but its arrays
    widths: tuple[int, ...]  # ascending; the last is the best one for these settings
    enough: int  # settings asked of it for which it is compiled


class Ended(Exception):
    """The process ends: what it has no more use for is not compiled."""


@contextlib.contextmanager
def asked_of(settings: int) -> Iterator[None]:
    """The body is about so many settings: kernels are learned for a batch."""
    token = _in_batch.set(settings >= _FEWEST)
    try:
        yield
    finally:
        _in_batch.reset(token)


def kernels_of(learnable: Learnable, arrays: Any, size: int) -> dict[int, Kernel]:
    """The kernels by width; none where they may not be learned, or for few settings."""
    if size < _FEWEST or not _in_batch.get() or not may_compile_beside(arrays):
        return {}
    shapes = _signature(arrays)
    return {width: (learnable.name, shapes, width) for width in learnable.widths}


def compiled_width(kernels: dict[int, Kernel]) -> int | None:
    """The largest width for which there is a compiled kernel."""
    ready = (w for w, kernel in reversed(kernels.items()) if _is_compiled(kernel))
    return next(ready, None)


def count(
    kernel: Kernel, settings: int, enough: int, call: Callable[[], object]
) -> None:
    """Notes what NumPy was asked; if that is enough ``call``, on JAX, is compiled."""
    global _thread
    with _lock:
        if kernel in _failed or kernel in _waiting or _is_compiled(kernel):
            return
        if _compiled.pop(kernel, None) is not None:  # and cleared since
            _asked[kernel] = 0
        _asked[kernel] = _asked.get(kernel, 0) + settings
        least = _LEARNED_AT * enough
        if least * _KEPT_SHARE <= _asked[kernel] < least and is_kept(kernel):
            least *= _KEPT_SHARE
        if _asked[kernel] < least or not threading.main_thread().is_alive():
            return
        _waiting[kernel] = call
        if _thread is None:
            # No daemon: XLA cannot be interrupted, and aborts a process that ends under
            # it (jaxlib 0.10: "FATAL: exception not rethrown").
            _thread = threading.Thread(target=_compile_all, name="jaxdp-episodic")
            _thread.start()


def stop_if_ended() -> None:
    """Ends what is compiled beside a main thread that has ended, between two kernels.

    Raises:
      Ended: in the thread that compiles.
    """
    ended = not threading.main_thread().is_alive()
    if ended and threading.current_thread() is _thread:
        raise Ended


def learned_on() -> Any:
    """The device of learned kernels, which are called in threads of their own.

    What is compiled is found again only under equal settings of JAX: a new thread's.
    """
    import jax

    return jax.local_devices(backend="cpu")[0]


def _is_compiled(kernel: Kernel) -> bool:
    return _compiled.get(kernel) == _engine.num_clearings


def _signature(tree: Any) -> Hashable:
    """Types and shapes in a tree of arrays, but for their last axis."""
    if isinstance(tree, np.ndarray):
        return tree.shape[:-1]
    if dataclasses.is_dataclass(tree):
        fields = (getattr(tree, f.name) for f in dataclasses.fields(tree))
        return (type(tree), *map(_signature, fields))
    return tuple(map(_signature, tree)) if isinstance(tree, tuple) else tree


def _compile_all() -> None:
    global _thread
    while True:
        with _lock:
            kernel = next(iter(_waiting), None)
            if kernel is None or not threading.main_thread().is_alive():
                _waiting.clear()
                _thread = None
                return
            call = _waiting[kernel]
        clearings = _engine.num_clearings
        try:
            with _importing:
                import jax
            stop_if_ended()
            with using_engine("jax"), jax.default_device(learned_on()):
                call()
        except Ended:
            continue
        except Exception:
            said = "a kernel could not be compiled: NumPy goes on answering"
            logging.getLogger("jaxdp_episodic").warning(said, exc_info=True)
            with _lock:
                _failed.add(kernel)
        else:
            _compiled[kernel] = clearings
            note_kept(kernel)
        finally:
            with _lock:
                _waiting.pop(kernel, None)


def _before_fork() -> None:
    # A child could never import what another thread of its parent had begun to.
    global _forking
    _forking = _importing.acquire(timeout=_LONGEST_IMPORT)


def _after_fork() -> None:
    if _forking:
        _importing.release()


def _after_fork_in_child() -> None:
    """The thread is not there; `_engine` says whether JAX is."""
    global _lock, _importing, _thread
    _lock, _importing, _thread = threading.Lock(), threading.Lock(), None
    _waiting.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork,
        after_in_child=_after_fork_in_child,
    )
