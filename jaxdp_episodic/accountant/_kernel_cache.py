"""The cache of compiled kernels on disk: its folder, and which kernels it holds."""

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
    """Returns the folder of compiled kernels, made if missing; None if it cannot be."""
    if os.environ.get(CACHE_VARIABLE) is not None:  # the user's choice: a folder or ""
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home folder
        base = Path(home) if home else Path("~/.cache").expanduser()
        folder = base / "jaxdp-episodic" / "kernels"  # JAX's keys hold its version
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if os.access(folder, os.W_OK) else None
    return None


@contextlib.contextmanager
def keeping_kernels() -> Iterator[None]:
    """Keeps on disk what JAX compiles in the body, unless the caller set a cache."""
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
    """Whether a mark file says that a process has stored this kernel in JAX's cache.

    A wrong mark, left by another version, costs one compilation that does not pay.
    """
    mark = _mark(kernel)
    return mark is not None and mark.exists()


def note_kept(kernel: tuple[Any, ...]) -> None:
    """Marks a kernel as stored in JAX's cache, if there is one."""
    mark = _mark(kernel)
    if mark is not None:
        with contextlib.suppress(OSError):
            mark.touch()


def _mark(kernel: tuple[Any, ...]) -> Path | None:
    """The mark file of a kernel in JAX's cache folder; None without a cache."""
    folder = os.environ.get(CACHE_VARIABLE)
    config = getattr(sys.modules.get("jax"), "config", None)
    if config is not None:
        folder = getattr(config, "jax_compilation_cache_dir", folder)
    return Path(folder) / _mark_name(kernel) if folder else None


@functools.cache
def _mark_name(kernel: tuple[Any, ...]) -> str:
    """Equal in all processes with the same version of jaxlib."""

    def text(part: Any) -> str:
        if isinstance(part, tuple):
            return f"({','.join(map(text, part))})"
        return getattr(part, "__qualname__", None) or repr(part)

    version = importlib.metadata.version("jaxlib")
    digest = hashlib.blake2b(f"{version} {text(kernel)}".encode(), digest_size=16)
    return f"jaxdp-episodic-{digest.hexdigest()}"
