"""What the command line sets up in its own process, and never in a caller's."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from jaxdp_episodic.accountant._kernel_cache import CACHE_VARIABLE, kernel_folder

PROGRAM = "jaxdp-episodic"

_RESEND_S = 0.05  # until a signal that was lost in a callback is sent again
_JOIN_S = 300  # until a process that nobody joins gives up: clusters start slowly
_HEARTBEAT_S = 30  # until a process that is gone is noticed
_SHUTDOWN_S = 60  # for the others to end in order
_ADDRESS = re.compile(r"[^\s:]+:\d{1,5}|\[[0-9a-fA-F:.%]+\]:\d{1,5}")


class Terminated(KeyboardInterrupt):
    """SIGTERM came: whoever runs machines wants the process to end."""


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the body as Ctrl-C does, with `Terminated`."""
    # The first one counts, later ones are ignored. One that is raised in a callback is
    # lost, and sent again; what the body swallows is raised at its end.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    kinds = {signal.SIGTERM: Terminated, signal.SIGINT: KeyboardInterrupt}
    come: set[type[KeyboardInterrupt]] = set()
    timers = []

    def end(number: int, frame: Any) -> None:
        kind = kinds[signal.Signals(number)]
        come.add(kind)
        if kind is Terminated:
            signal.signal(number, signal.SIG_IGN)
        raise kind

    def not_raised(args: Any) -> None:
        number = next((n for n, kind in kinds.items() if kind is args.exc_type), None)
        if number is None:
            hook(args)
            return
        signal.signal(number, end)
        timer = threading.Timer(_RESEND_S, os.kill, (os.getpid(), number))
        timer.daemon = True
        timers.append(timer)
        timer.start()

    # Whoever ignores Ctrl-C, or handles it otherwise, goes on to.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        del kinds[signal.SIGINT]
    before = {number: signal.signal(number, end) for number in kinds}
    # Modules run callbacks while they are imported, whose exceptions go nowhere else.
    hook, sys.unraisablehook = sys.unraisablehook, not_raised
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if come:  # and somebody has swallowed it
        raise Terminated if Terminated in come else KeyboardInterrupt


def use_all_cores() -> None:
    """Makes JAX see one CPU device a core, before it starts; for our own process."""
    # Episodes are spread over devices; XLA's own threads gain almost nothing.
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={cores}".strip()


def keep_our_sigterm() -> None:
    """Makes JAX, before it starts, leave SIGTERM to us: we commit a checkpoint."""
    os.environ["JAX_ENABLE_PREEMPTION_SERVICE"] = "false"


@contextlib.contextmanager
def one_of_several(
    coordinator: str | None, number: int | None, index: int | None
) -> Iterator[None]:
    """Makes this process one of several, by JAX's own runtime, for the body."""
    given = coordinator, number, index
    if coordinator is not None and not _ADDRESS.fullmatch(coordinator):
        raise ValueError(f"--coordinator must be HOST:PORT, got {coordinator!r}")
    if number is not None and number < 1:
        raise ValueError(f"--num-processes must be at least 1, got {number}")
    if index is not None and not 0 <= index < (number or index + 1):
        raise ValueError(
            f"--process-index must be in 0 .. --num-processes - 1, got {index}"
        )
    import jax

    # JAX ends a process that nobody joins with words of its own.
    print(f"{PROGRAM}: waits up to {_JOIN_S} s for all processes", file=sys.stderr)
    try:
        jax.distributed.initialize(
            *given,
            cluster_detection_method=None if None in given else "deactivate",
            initialization_timeout=_JOIN_S,
            heartbeat_timeout_seconds=_HEARTBEAT_S,
            shutdown_timeout_seconds=_SHUTDOWN_S,
        )
    except ValueError as error:
        raise ValueError(
            "no cluster of Slurm, Open MPI or Kubernetes was found that says all of "
            "it; give --coordinator HOST:PORT, --num-processes N and --process-index I"
        ) from error
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConnectionError(f"the other processes were not found: {reason}") from None
    from jaxdp_episodic.trainer.gradient.processes import all_processes

    processes = all_processes()
    found = f"process {processes.index} of {processes.count}"
    print(f"{PROGRAM}: {found}", file=sys.stderr)
    with processes.together():
        yield
    jax.distributed.shutdown()


def end_process(code: int) -> None:
    """Ends this process at once: waiting for the others in order is for a good end."""
    with contextlib.suppress(OSError):  # nobody may be left to read it
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def keep_compiled_kernels() -> None:
    """Makes this process keep compiled kernels on disk, so the next starts faster."""
    # Whoever has set JAX's cache, or switched it off, keeps that setting.
    folder = kernel_folder()
    if folder is not None:
        os.environ[CACHE_VARIABLE] = str(folder)  # read when JAX is imported
        if "jax" in sys.modules:
            name = "jax.experimental.compilation_cache.compilation_cache"
            importlib.import_module(name).set_cache_dir(str(folder))
