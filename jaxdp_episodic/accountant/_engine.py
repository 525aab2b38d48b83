"""The two engines of every formula, and the float64 boundary in front of them.

A kernel is a pure function of arrays that takes its namespace from its arguments
(`numerics.loops.namespace`). The *NumPy* engine calls it as it is: no compiling, no
JAX in the process. The *JAX* engine compiles it, for large batches and
accelerators. This file alone chooses between them, and alone knows of x64.

Privacy accounting in float32 is wrong in the dangerous direction (``log1p`` of a
1e-12 offset is exactly 0), so every public number is computed in float64. The
caller's own JAX settings are never touched: the flag is set in a thread-local
context around an *already jitted* kernel, and NumPy arrays come back, because a
float64 JAX array outside the context decays to float32 at its first use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic.accountant._kernel_cache import is_kept, note_kept
from jaxdp_episodic.accountant.numerics.loops import map_arrays
from jaxdp_episodic.files.optional import require

ENGINES = ("auto", "numpy", "jax")
VARIABLE = "JAXDP_EPISODIC_ENGINE"
# Minimum elements of the largest argument for which "auto" compiles a single kernel.
_COMPILED_ELEMENTS = 2**21
# The engine that the body runs on.
_chosen: ContextVar[str | None] = ContextVar("engine", default=None)
# Settings that the body asks about in all its calls; 0: each call counts alone.
_together: ContextVar[int] = ContextVar("together", default=0)
# Threads among which this one shares the cores.
_sharing: ContextVar[int] = ContextVar("sharing", default=1)
# XLA's options for programs on the CPU; measured in November 2026 with jaxlib 0.10.2.
_CPU_OPTIONS = {
    # Bits of a vector. XLA's own choice is 256; where a processor has no more this
    # changes nothing.
    "xla_cpu_prefer_vector_width": 512,
    # LLVM's higher levels compile a quarter longer, and programs get no faster.
    "xla_backend_optimization_level": 1,
    # Fusion emitters make an LLVM module of each of 360 small functions, which takes
    # 20 ms of CPU each. Without them all are one module: 15 s became 8 s. Then loops
    # must not overwrite what they read; see `numerics.loops.turned`.
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}

# Linux's table of this process's memory mappings, and their largest number.
_MAPPINGS = Path("/proc/self/maps")
_MAPPINGS_LIMIT = Path("/proc/sys/vm/max_map_count")
# Share of that number at which JAX's caches are cleared; seconds between two checks, in
# which far less than the rest can be compiled. A check takes some milliseconds.
_LARGEST_SHARE = 0.6
_CHECK_INTERVAL = 2.0
_next_check = 0.0
# How often JAX's caches have been cleared.
num_clearings = 0
# What "auto" has compiled since then.
_compiled: set[tuple[Any, ...]] = set()
# Share of the time to compile a kernel from which "auto" does, where NumPy would take
# as long: whoever asks so much asks again.
_PAYS_FROM = 0.25
# Whether this process was forked off one that had JAX, whose threads it lacks.
_is_fork_of_jax = False
# Dataclasses that JAX knows; chunks in several threads may bring the same one.
_registered: set[type] = set()
_registering = threading.Lock()


def engine_name() -> str:
    """Returns what was asked for: "numpy", "jax", or "auto" if nothing was.

    Raises:
      ValueError: the environment variable ``JAXDP_EPISODIC_ENGINE`` names no engine.
    """
    if chosen := _chosen.get():
        return chosen
    named = os.environ.get(VARIABLE, "auto")
    if named not in ENGINES:
        raise ValueError(f"{VARIABLE} must be one of {ENGINES}, got {named!r}")
    return named


@contextlib.contextmanager
def using_engine(name: str) -> Iterator[None]:
    """Everything in the body runs on this engine; "auto" chooses anew.

    Raises:
      ValueError: no such engine.
      ImportError: "jax" where JAX is not installed.
    """
    if name not in ENGINES:
        raise ValueError(f"engine must be one of {ENGINES}, got {name[:60]!r}")
    if name == "jax" and not _has_jax():
        require("jax", purpose="the engine 'jax'", extra=None)
    with using_choice(name):
        yield


@contextlib.contextmanager
def using_choice(name: str) -> Iterator[None]:
    """As `using_engine`, of what `choose_engine` says."""
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def _note_fork() -> None:
    global _is_fork_of_jax
    _is_fork_of_jax = "jax" in sys.modules


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


class Kernel(NamedTuple):
    """A kernel that "auto" may compile; times are of the CPU, in seconds."""

    name: str
    numpy_seconds: float  # that a setting takes on NumPy
    compile_seconds: float
    least: int = 1  # settings from which JAX is faster once it is compiled
    what: tuple[Any, ...] = ()  # what else it is compiled for; each has a ``repr``


def choose_engine(settings: int, kernel: int | Kernel, losses: Any = ()) -> str:
    """Returns the engine that was asked for, or for "auto" the one that pays.

    NumPy, always, of a mechanism that does not compile; for "auto" without JAX and
    behind ``os.fork()``, where JAX may wait for ever for its threads. Else JAX, where
    NumPy would take a quarter of the time to compile or more, or where the kernel is
    compiled already, in this process or in JAX's cache on the disk. For a ``kernel``
    that is a number: from so many settings on.
    """
    name = engine_name() if never_compiled(losses) is None else "numpy"
    if name != "auto":
        return name
    if _is_fork_of_jax or not _has_jax():
        return "numpy"
    if isinstance(kernel, int):
        return "jax" if settings >= kernel else "numpy"
    if settings < kernel.least:
        return "numpy"
    key, together = (kernel.name, *kernel.what), _together.get()
    seconds = max(settings, together) * kernel.numpy_seconds
    if seconds < _PAYS_FROM * kernel.compile_seconds and (
        together or not (key in _compiled or is_kept(key))
    ):
        return "numpy"
    if key not in _compiled:
        _compiled.add(key)
        note_kept(key)
    return "jax"


@contextlib.contextmanager
def asking_together(settings: int) -> Iterator[None]:
    """The body asks about so many settings in all, as a search or a sweep does.

    Their number alone decides what is compiled, and not what has been compiled before:
    a sweep that is resumed has the digits of one that is not.
    """
    token = _together.set(settings)
    try:
        yield
    finally:
        _together.reset(token)


def never_compiled(tree: Any) -> str | None:
    """Returns a mechanism's name in a tree whose class has ``compiles = False``."""
    if isinstance(tree, tuple | list):
        return next(filter(None, map(never_compiled, tree)), None)
    return None if getattr(tree, "compiles", True) else type(tree).__name__


@functools.cache
def _has_jax() -> bool:
    return importlib.util.find_spec("jax") is not None


def float64_boundary(
    kernel: Callable[..., Any], static: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Wraps a kernel so that it runs in float64 on either engine and returns NumPy.

    Positional arguments become float64 NumPy arrays (integers and booleans too: a
    kernel sees real numbers only), which also makes a tracer raise at once instead
    of being silently rounded.

    Keyword arguments of these names are static: they set a shape or choose code. The
    kernel is a pure function of arrays, not jitted, whose signature stays.
    """

    @functools.wraps(kernel)
    def call(*args: Any, **static_values: Any) -> Any:
        converted = map_arrays(_float64, args)
        engine = choose_engine(_largest(converted), _COMPILED_ELEMENTS, converted)
        if engine == "numpy":
            with np.errstate(all="ignore"):
                return map_arrays(np.asarray, kernel(*converted, **static_values))
        return on_jax(jitted(kernel, static), *converted, **static_values)

    return call


def on_jax(jitted_kernel: Callable[..., Any], *args: Any, **static: Any) -> Any:
    """Calls a jitted function in float64 and returns NumPy arrays.

    Raises:
      NotImplementedError: an argument is a mechanism that does not compile.
    """
    import jax
    import jax.core

    if name := never_compiled(args):
        raise NotImplementedError(f"{name} is computed by NumPy alone, not by JAX")
    converted = map_arrays(_float64, args)
    register_dataclasses(converted)
    # A caller's settings are for the caller's code. Kernels broadcast, move arrays to
    # the device and back, and have inf and NaN in branches not taken. Training may
    # multiply in 16 bits, not we.
    with (
        jax.transfer_guard("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.enable_x64(True),
        jax.numpy_rank_promotion("allow"),
        jax.default_matmul_precision("highest"),
    ):
        # Within a caller's jit known numbers are computed at once; elsewhere that would
        # compile each constant of a kernel by itself.
        is_traced = isinstance(jax.numpy.asarray(0.0), jax.core.Tracer)
        at_once = jax.ensure_compile_time_eval if is_traced else contextlib.nullcontext
        with at_once():
            answer = map_arrays(np.asarray, jitted_kernel(*converted, **static))
    clear_kernels_if_crowded()
    return answer


def chosen_device() -> Any:
    """What `jax.default_device` was set to in this thread; None: the first device."""
    import jax

    return jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]: made at run time


def in_threads(
    work: Callable[[Any], Any],
    items: Sequence[Any],
    workers: int,
    *,
    device: Any = None,
) -> list[Any]:
    """Results of items, in threads that use the caller's engine and share its cores.

    JAX's settings of the caller's thread are not theirs, so ``device`` says its device.
    """
    contexts = [copy_context() for _ in items]
    for context in contexts:
        context.run(_sharing.set, _sharing.get() * min(workers, len(items)))

    def there(context: Context, item: Any) -> Any:
        if device is None:
            return context.run(work, item)
        import jax

        # A new thread's default device is the first one, whatever the caller's is.
        with jax.default_device(device):
            return context.run(work, item)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(there, contexts, items))


def num_cores() -> int:
    """Returns how many cores this thread may use: its share of the process's."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(cores // _sharing.get(), 1)


def compiled(kernel: Callable[..., Any], static: tuple[str, ...] = ()) -> Any:
    """Wraps a kernel so that it always runs on JAX; else as `float64_boundary`."""

    @functools.wraps(kernel)
    def call(*args: Any, **static_values: Any) -> Any:
        return on_jax(jitted(kernel, static), *args, **static_values)

    return call


def call_in_float64(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a user's function of arrays, which may be written in NumPy or in JAX."""
    if "jax" not in sys.modules:
        return np.asarray(function(*args))
    import jax  # waits where another thread has only begun

    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        return np.asarray(function(*args))


@functools.cache
def jitted(kernel: Callable[..., Any], static: tuple[str, ...] = ()) -> Any:
    """Returns ``jax.jit`` of a kernel, one for each."""
    import jax

    options = None
    if jax.default_backend() == "cpu":
        said = os.environ.get("XLA_FLAGS", "")  # what the user chose stays
        options = {name: v for name, v in _CPU_OPTIONS.items() if name not in said}
    return jax.jit(kernel, static_argnames=static, compiler_options=options)


def register_dataclasses(tree: Any) -> None:
    """Makes JAX see the arrays in the dataclasses of a tree."""
    if isinstance(tree, tuple | list):
        for part in tree:
            register_dataclasses(part)
    elif dataclasses.is_dataclass(tree):
        with _registering:
            if type(tree) not in _registered:
                _register(type(tree))
        for field in dataclasses.fields(tree):
            register_dataclasses(getattr(tree, field.name))


def _register(kind: type) -> None:
    """Makes JAX see the arrays of a dataclass.

    Not by ``register_dataclass``: to jaxlib 0.10 trees of two such classes with equally
    many fields are equal, and depending on memory addresses one mechanism's settings
    went through the kernel compiled for another's.
    """
    from jax.tree_util import register_pytree_node

    names = [field.name for field in dataclasses.fields(kind)]
    register_pytree_node(
        kind,
        lambda one: (tuple(getattr(one, name) for name in names), kind),
        lambda kind, arrays: kind(*arrays),
    )
    _registered.add(kind)


def _float64(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


def _largest(tree: Any) -> int:
    sizes = [0]
    map_arrays(lambda array: sizes.append(array.size), tree)
    return max(sizes)


def clear_kernels_if_crowded() -> None:
    """Clears JAX's caches if the process has used most of its memory mappings.

    XLA maps each function of a kernel by itself, a few hundred for one of ours. Linux
    grants 65,530 mappings (``vm.max_map_count``), and without one XLA ends the process
    with a segmentation fault. Kernels called again are compiled again; numbers do not
    change. Other systems than Linux have no such limit.
    """
    global _next_check, num_clearings
    now = time.monotonic()
    if now < _next_check:
        return
    _next_check = now + _CHECK_INTERVAL
    try:
        limit = int(_MAPPINGS_LIMIT.read_text())
        used = _MAPPINGS.read_bytes().count(b"\n")
    except OSError:
        return
    if used > _LARGEST_SHARE * limit:
        import jax

        num_clearings += 1
        _compiled.clear()
        jax.clear_caches()
