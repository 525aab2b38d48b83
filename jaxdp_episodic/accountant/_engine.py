"""The two engines of every formula, and the float64 boundary in front of them.

A kernel is a pure function of arrays that takes its namespace from its arguments
(`numerics.loops.namespace`). The *NumPy* engine calls it directly, without importing
JAX. The *JAX* engine compiles it, for large batches and accelerators. Only this file
chooses between them and sets x64.

Privacy accounting in float32 is wrong in the dangerous direction (``log1p`` of a
1e-12 offset is exactly 0), so every public number is computed in float64. The
caller's own JAX settings are never changed: the flag is set in a thread-local
context around a jitted kernel. NumPy arrays are returned, because outside the context
a float64 JAX array becomes float32 at its first use.
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

from jaxdp_episodic.accountant.numerics.loops import field_names, map_arrays, taken
from jaxdp_episodic.files.optional import require

ENGINES = ("auto", "numpy", "jax")
VARIABLE = "JAXDP_EPISODIC_ENGINE"
# Elements of the largest argument from which "auto" compiles a kernel that has no entry
# of its own.
_COMPILED_ELEMENTS = 2**21
# The engine of this context; None: not chosen.
_chosen: ContextVar[str | None] = ContextVar("engine", default=None)
# Total number of settings of all calls in this context; 0: each call counts alone.
_together: ContextVar[int] = ContextVar("together", default=0)
# Number of threads that share the process's cores.
_sharing: ContextVar[int] = ContextVar("sharing", default=1)
# XLA's own choice is 256 bits; where a processor has no more it changes nothing. LLVM's
# higher levels compile a quarter longer. Fusion emitters make an LLVM module of each of
# 360 functions: 15 s instead of 8 s; without them see `numerics.loops.turned`.
_CPU_OPTIONS = {
    "xla_cpu_prefer_vector_width": 512,
    "xla_backend_optimization_level": 1,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
_float64 = functools.partial(np.asarray, dtype=np.float64)
_has_jax = functools.cache(lambda: importlib.util.find_spec("jax") is not None)

# Linux's table of this process's memory mappings, and their largest number.
_MAPPINGS = Path("/proc/self/maps")
_MAPPINGS_LIMIT = Path("/proc/sys/vm/max_map_count")
# Share of that number at which JAX's caches are cleared.
_LARGEST_SHARE = 0.6
# Seconds between two checks, which take some milliseconds each. Far fewer than the
# remaining mappings can be added in between.
_CHECK_INTERVAL = 2.0
_next_check = 0.0
# Keys of the kernels that "auto" has compiled since then.
_compiled: set[tuple[Any, ...]] = set()
# "auto" compiles if NumPy would take this share of the compile time or more: a caller
# with that many settings usually asks again.
_PAYS_FROM = 0.25
# Whether this process was forked from one that had imported JAX: JAX's threads do not
# exist in it.
_is_fork_of_jax = False
# Dataclasses registered with JAX; several threads may register the same one.
_registered: set[type] = set()
_registering = threading.Lock()


def engine_name() -> str:
    """Returns the chosen engine: "numpy", "jax" or "auto" (the default)."""
    if chosen := _chosen.get():
        return chosen
    named = os.environ.get(VARIABLE, "auto")
    if named not in ENGINES:
        raise ValueError(f"{VARIABLE} must be one of {ENGINES}, got {named!r}")
    return named


@contextlib.contextmanager
def using_engine(name: str) -> Iterator[None]:
    """Runs everything in the body on this engine."""
    if name not in ENGINES:
        raise ValueError(f"engine must be one of {ENGINES}, got {name[:60]!r}")
    if name == "jax" and not _has_jax():
        require("jax", purpose="the engine 'jax'", extra=None)
    with using_choice(name):
        yield


@contextlib.contextmanager
def _within(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Sets a variable of this context in the body."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# As `using_engine`, without checks, for an answer of `choose_engine`.
using_choice = functools.partial(_within, _chosen)


def _note_fork() -> None:
    global _is_fork_of_jax
    _is_fork_of_jax = "jax" in sys.modules


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


class Kernel(NamedTuple):
    """A kernel that "auto" may compile; times in seconds of CPU."""

    name: str
    numpy_seconds: float  # per setting, on NumPy
    compile_seconds: float
    least: int = 1  # number of settings from which the compiled kernel is faster
    what: tuple[Any, ...] = ()  # other keys of the compiled program


def choose_engine(settings: int, kernel: int | Kernel, losses: Any = ()) -> str:
    """Returns the chosen engine; for "auto" the one that costs less.

    A mechanism with ``compiles = False`` is always computed by NumPy. "auto" is NumPy
    if JAX is not installed, and in a process forked from one with JAX, which could wait
    for ever for JAX's threads. Otherwise it is JAX if NumPy would take a quarter of the
    compile time or more, or if this process has compiled the kernel already. If
    ``kernel`` is a number, it is JAX from that many settings.
    """
    name = engine_name()
    if name != "auto":
        return name if name == "numpy" or never_compiled(losses) is None else "numpy"
    if _is_fork_of_jax or not _has_jax():
        return "numpy"
    least = kernel if isinstance(kernel, int) else kernel.least
    if settings < least or never_compiled(losses) is not None:
        return "numpy"
    if isinstance(kernel, int):
        return "jax"
    key, together = (kernel.name, *kernel.what), _together.get()
    seconds = max(settings, together) * kernel.numpy_seconds
    if seconds < _PAYS_FROM * kernel.compile_seconds:
        if together or key not in _compiled:
            return "numpy"
    _compiled.add(key)
    return "jax"


def asking_together(
    settings: int, *, once: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Declares the total number of settings of all calls in the body.

    Only that number then decides whether to compile, not what is compiled already: a
    resumed sweep has the same digits as one that was not interrupted. ``once`` says
    that nobody asks again: then NumPy must take as long as compiling.
    """
    return _within(_together, int(_PAYS_FROM * settings) if once else settings)


def never_compiled(tree: Any) -> str | None:
    """Returns the class name of a mechanism in a tree that has ``compiles = False``."""
    if isinstance(tree, tuple | list):
        return next(filter(None, map(never_compiled, tree)), None)
    return None if getattr(tree, "compiles", True) else type(tree).__name__


def float64_boundary(
    kernel: Callable[..., Any], static: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Wraps a kernel to run in float64 on either engine and to return NumPy arrays.

    Positional arguments are converted to float64 NumPy arrays, integers and booleans
    too. A JAX tracer raises an error instead of being rounded.

    The keyword arguments named in ``static`` set a shape or choose code. The kernel is
    a pure function of arrays and not jitted; the wrapper has its signature.
    """

    @functools.wraps(kernel)
    def call(*args: Any, **static_values: Any) -> Any:
        converted = map_arrays(_float64, args)
        sizes = [0]
        map_arrays(lambda array: sizes.append(array.size), converted)
        engine = choose_engine(max(sizes), _COMPILED_ELEMENTS, converted)
        if engine == "numpy":
            with np.errstate(all="ignore"):
                return map_arrays(np.asarray, kernel(*converted, **static_values))
        return on_jax(jitted(kernel, static), *converted, **static_values)

    return call


def on_jax(jitted_kernel: Callable[..., Any], *args: Any, **static: Any) -> Any:
    """Calls a jitted function in float64 and returns NumPy arrays."""
    import jax
    import jax.core

    if name := never_compiled(args):
        raise NotImplementedError(f"{name} is computed by NumPy only, not by JAX")
    converted = map_arrays(_float64, args)
    register_dataclasses(converted)
    # The caller's JAX settings must not apply to kernels, which broadcast, move arrays
    # to the device and back, have inf and NaN in branches that are not selected, and
    # need full precision in products.
    with (
        jax.transfer_guard("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.enable_x64(True),
        jax.numpy_rank_promotion("allow"),
        jax.default_matmul_precision("highest"),
    ):
        # Within a caller's jit, evaluate at once. Elsewhere that would compile each
        # constant of a kernel separately.
        is_traced = isinstance(jax.numpy.asarray(0.0), jax.core.Tracer)
        at_once = jax.ensure_compile_time_eval if is_traced else contextlib.nullcontext
        with at_once():
            answer = map_arrays(np.asarray, jitted_kernel(*converted, **static))
    clear_kernels_if_crowded()
    return answer


def chosen_device() -> Any:
    """Returns this thread's `jax.default_device`; None: the first device."""
    import jax

    return jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]: made at run time


def in_threads(
    work: Callable[[Any], Any],
    items: Sequence[Any],
    workers: int,
    *,
    device: Any = None,
) -> list[Any]:
    """Maps ``work`` over items, in threads with the caller's engine and its cores.

    New threads do not inherit JAX's settings, so pass the caller's ``device``.
    """
    contexts = [copy_context() for _ in items]
    for context in contexts:
        context.run(_sharing.set, _sharing.get() * min(workers, len(items)))

    def there(context: Context, item: Any) -> Any:
        if device is None:
            return context.run(work, item)
        import jax

        # In a new thread the default device is the first one.
        with jax.default_device(device):
            return context.run(work, item)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(there, contexts, items))


def num_cores() -> int:
    """Returns the number of cores for this thread: its share of the process's."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(cores // _sharing.get(), 1)


def call_in_float64(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a user's function of arrays, written in NumPy or in JAX, in float64."""
    if "jax" not in sys.modules:
        return np.asarray(function(*args))
    import jax  # waits if another thread is importing it

    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        return np.asarray(function(*args))


@functools.cache
def jitted(kernel: Callable[..., Any], static: tuple[str, ...] = ()) -> Any:
    """Returns ``jax.jit`` of a kernel, always the same one."""
    import jax

    options = _cpu_options() if jax.default_backend() == "cpu" else None
    return jax.jit(kernel, static_argnames=static, compiler_options=options)


@functools.cache
def _cpu_options() -> dict[str, Any]:
    """Returns XLA's options, which change only times; none if this XLA lacks one."""
    import jax

    flags = os.environ.get("XLA_FLAGS", "")  # the user's choice is kept
    options = {name: v for name, v in _CPU_OPTIONS.items() if name not in flags}
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
        return options
    return {}


def register_dataclasses(tree: Any) -> None:
    """Registers the dataclasses of a tree as pytree nodes.

    ``register_dataclass`` is not used: jaxlib 0.10 takes trees of two such classes with
    equally many fields for equal, and one mechanism's settings went through the kernel
    compiled for another's.
    """
    if isinstance(tree, tuple | list):
        for part in tree:
            register_dataclasses(part)
    elif dataclasses.is_dataclass(tree):
        names = field_names(type(tree))
        with _registering:
            if type(tree) not in _registered:
                from jax.tree_util import register_pytree_node

                register_pytree_node(
                    type(tree),
                    lambda one: (
                        tuple(getattr(one, name) for name in names),
                        type(one),
                    ),
                    lambda kind, arrays: kind(*arrays),
                )
                _registered.add(type(tree))
        for name in names:
            register_dataclasses(getattr(tree, name))


def clear_kernels_if_crowded() -> None:
    """Clears JAX's caches if the process has used most of its memory mappings.

    XLA maps the functions of a kernel into memory one by one. Linux allows 65,530
    mappings (``vm.max_map_count``); beyond that XLA ends with a segmentation fault.
    Kernels called again are compiled again, with the same results.
    """
    global _next_check
    now = time.monotonic()
    if now < _next_check:
        return
    _next_check = now + _CHECK_INTERVAL
    try:
        limit = int(_MAPPINGS_LIMIT.read_text())
        used = _MAPPINGS.read_bytes().count(b"\n")
    except OSError:  # other systems than Linux have no such limit
        return
    if used > _LARGEST_SHARE * limit:
        import jax

        _compiled.clear()
        jax.clear_caches()


# --- Many settings, in chunks of a few sizes ---

# So JAX compiles each kernel once, and memory does not grow with their number.

# Chunks in flight on an accelerator.
_AHEAD = 2
# Number of settings below which threads cost more than they save on NumPy.
_FEW = 8


class Chunks(NamedTuple):
    """Numbers of settings in a chunk.

    JAX uses the smallest size that holds all settings, or the largest.
    """

    numpy: int  # largest size on NumPy
    cpu: tuple[int, ...]  # of JAX on the CPU, ascending
    accelerator: tuple[int, ...]  # of JAX on other devices, ascending


def in_chunks(
    kernel: Callable[..., tuple[np.ndarray, ...]],
    arrays: tuple[Any, ...],
    sizes: Chunks,
    engine: str | None = None,
) -> tuple[np.ndarray, ...]:
    """Calls a kernel of some arrays chunk by chunk, in parallel; results are (n,).

    On JAX a chunk is padded with its last setting, and the padding removed again.
    """
    on_jax, device = (engine or engine_name()) == "jax", None
    size = arrays[0].shape[-1]
    if on_jax:
        widths = sizes.cpu if on_cpu() else sizes.accelerator
        chunk = next((width for width in widths if size <= width), widths[-1])
        device = chosen_device()
    else:
        chunk = min(size, sizes.numpy)
        # Use all cores.
        if size >= max(_FEW, sizes.numpy // 4):
            chunk = min(chunk, -(-size // num_cores()))
        if size <= chunk:
            return tuple(map(np.array, kernel(*arrays)))

    def work(start: int) -> tuple[np.ndarray, ...]:
        stop = min(start + chunk, size)
        part: Any = slice(start, stop)
        if on_jax and stop < start + chunk:  # the last setting fills up the chunk
            part = np.minimum(np.arange(start, start + chunk), size - 1)
        found = kernel(*taken(arrays, part))
        return tuple(result[..., : stop - start] for result in found)

    starts = range(0, size, chunk)
    # On an accelerator the next chunk is prepared while the device computes one.
    workers = _AHEAD if on_jax and not on_cpu() else num_cores()
    workers = min(len(starts), workers)
    if workers <= 1:
        parts = list(map(work, starts))
    else:
        parts = in_threads(work, starts, workers, device=device)
    return tuple(np.concatenate(column, axis=-1) for column in zip(*parts, strict=True))


def on_cpu() -> bool:
    """Whether JAX's device in this thread is a CPU."""
    import jax

    device = chosen_device()
    if device is None:
        return jax.default_backend() == "cpu"
    return (device if isinstance(device, str) else device.platform) == "cpu"
