"""What the command line sets up in its own process, and never in a caller's."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = "jaxdp-episodic"

_CACHE = "JAX_COMPILATION_CACHE_DIR"


class Terminated(KeyboardInterrupt):
    """SIGTERM came: whoever runs machines wants the process to end."""


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the body as Ctrl-C does, with `Terminated`.

    The first one counts; those that come while the body winds up are ignored. Outside
    of the main thread, where Python hears no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def use_all_cores() -> None:
    """Makes JAX see one CPU device a core, before it starts; for our own process.

    Episodes are spread over devices, and XLA's own threads gain them almost nothing.
    Whoever has set the number of devices in ``XLA_FLAGS`` keeps it.
    """
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={cores}".strip()


def keep_compiled_kernels() -> None:
    """Makes this process keep compiled kernels on disk, so the next starts faster.

    For a process of our own, never for a caller's. Whoever has set JAX's cache, by
    ``JAX_COMPILATION_CACHE_DIR`` or by switching it off, keeps that setting; a folder
    that cannot be written is left alone. JAX is not imported for it.
    """
    if os.environ.get(_CACHE) is not None:
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: nobody's home
        base = Path(home) if home else Path("~/.cache").expanduser()
        folder = base / PROGRAM / "kernels"  # JAX's keys hold its version
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return
        os.environ[_CACHE] = str(folder)  # read when JAX is imported
        if "jax" in sys.modules:
            name = "jax.experimental.compilation_cache.compilation_cache"
            importlib.import_module(name).set_cache_dir(str(folder))
