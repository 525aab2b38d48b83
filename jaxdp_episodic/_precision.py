"""The float64 boundary: the only file that knows about x64.

Privacy accounting in float32 is wrong in the dangerous direction (``log1p`` of a
1e-12 offset is exactly 0), so every public number is computed in float64. The
caller's own JAX settings are never touched: the flag is set in a thread-local
context around an *already jitted* kernel, and NumPy arrays come back, because a
float64 JAX array outside the context decays to float32 at its first use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxdp_episodic._mappings import forget_kernels_if_crowded


def float64_boundary(jitted_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a jitted kernel so that it runs in float64 and returns NumPy.

    Positional arguments become float64 NumPy arrays (integers and booleans too: a
    kernel sees real numbers only), which also makes a tracer raise at once instead
    of being silently rounded. Keyword arguments are static and passed as they are.

    Args:
      jitted_kernel: a ``jax.jit`` function. It must be jitted *inside* the boundary:
        a jit around it would round its inputs to float32 first.

    Returns:
      A function of the same signature whose outputs are NumPy arrays.
    """

    @functools.wraps(jitted_kernel)
    def call(*args: Any, **static: Any) -> Any:
        converted = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), args)
        # Kernels broadcast; a caller who forbids that means the caller's own code.
        with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
            answer = jax.tree.map(np.asarray, jitted_kernel(*converted, **static))
        forget_kernels_if_crowded()
        return answer

    return call
