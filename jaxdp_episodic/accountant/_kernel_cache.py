"""Compiled kernels on the disk: where they lie, and which ones are said to be there."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def kernel_folder() -> Path | None:
    """Returns the user's folder of compiled kernels, made if missing.

    None where ``JAX_COMPILATION_CACHE_DIR`` says another, or none, and where the folder
    cannot be written.
    """
    if os.environ.get(CACHE_VARIABLE) is not None:
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: nobody's home
        base = Path(home) if home else Path("~/.cache").expanduser()
        folder = base / "jaxdp-episodic" / "kernels"  # JAX's keys hold its version
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if os.access(folder, os.W_OK) else None
    return None


@contextlib.contextmanager
def keeping_kernels() -> Iterator[None]:
    """Keeps on disk what JAX compiles in the body, unless the caller has a cache."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    chosen = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]: made at run time
    folder = kernel_folder() if chosen is None else None
    if folder is None:
        yield
        return
    compilation_cache.set_cache_dir(str(folder))
    compilation_cache.reset_cache()  # JAX decides once, at its first compilation
    try:
        yield
    finally:
        compilation_cache.set_cache_dir(None)
        compilation_cache.reset_cache()


def is_kept(kernel: tuple[Any, ...]) -> bool:
    """Whether a process has compiled it onto the disk, by a mark beside the kernels.

    Where that is wrong, as of another version of ours, it is compiled too early once.
    """
    mark = _mark(kernel)
    return mark is not None and mark.exists()


def note_kept(kernel: tuple[Any, ...]) -> None:
    """Says to other processes that a kernel lies on the disk, if there is a cache."""
    mark = _mark(kernel)
    if mark is not None:
        with contextlib.suppress(OSError):
            mark.touch()


def _mark(kernel: tuple[Any, ...]) -> Path | None:
    """The file that says that a kernel is in JAX's persistent cache, if that is on."""
    folder = os.environ.get(CACHE_VARIABLE)
    config = getattr(sys.modules.get("jax"), "config", None)
    if config is not None:
        folder = getattr(config, "jax_compilation_cache_dir", folder)
    return Path(folder) / _mark_name(kernel) if folder else None


@functools.cache
def _mark_name(kernel: tuple[Any, ...]) -> str:
    """The same in all processes with this version of JAX."""

    def said(part: Any) -> str:
        if isinstance(part, tuple):
            return f"({','.join(map(said, part))})"
        return getattr(part, "__qualname__", None) or repr(part)

    version = importlib.metadata.version("jaxlib")
    digest = hashlib.blake2b(f"{version} {said(kernel)}".encode(), digest_size=16)
    return f"jaxdp-episodic-{digest.hexdigest()}"
