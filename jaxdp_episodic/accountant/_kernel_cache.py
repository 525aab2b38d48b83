"""The cache of compiled kernels on disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

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
