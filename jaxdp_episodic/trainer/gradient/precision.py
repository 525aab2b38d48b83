"""The type that a step computes in: float64 where a parameter is, float32 elsewhere.

The parameters decide it, and nothing else does: neither JAX's x64, which makes float64
of every array whose type nobody states, nor the data. Contributions, their norms, sums,
noise and the optimizer's state have it; parameters of lower precision keep their own.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

_WIDE = (np.dtype(np.float32), np.dtype(np.float64))


def training_dtype(params: Any) -> np.dtype:
    """Returns float64 if a leaf is, else float32."""
    kinds = (jax.dtypes.canonicalize_dtype(x.dtype) for x in jax.tree.leaves(params))
    return np.dtype(np.float64 if _WIDE[1] in kinds else np.float32)


def as_trained(data: Any, dtype: Any) -> Any:
    """Casts float32 and float64 arrays to the type of training; others stay."""
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if leaf.dtype in _WIDE else leaf, data
    )


def at_least_float32(array: Any) -> Any:
    """Returns floats of lower precision, and whole numbers, as float32."""
    return array.astype(training_dtype(array))
