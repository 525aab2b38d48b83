"""The type of a step's numbers: float64 if any parameter is float64, else float32.

Only the parameters decide it: neither the data nor JAX's x64 mode, which turns every
array without a stated type into float64. Contributions, their norms, sums, noise and
the optimizer's state have this type; parameters of lower precision keep their own.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

_WIDE = (np.dtype(np.float32), np.dtype(np.float64))


def training_dtype(params: Any) -> np.dtype:
    """Returns float64 if a leaf is float64, else float32."""
    kinds = (jax.dtypes.canonicalize_dtype(x.dtype) for x in jax.tree.leaves(params))
    return np.dtype(np.float64 if _WIDE[1] in kinds else np.float32)


def as_trained(data: Any, dtype: Any) -> Any:
    """Returns data with float32 and float64 arrays cast to the training type."""
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if leaf.dtype in _WIDE else leaf, data
    )


def at_least_float32(array: Any) -> Any:
    """Returns an array as float32, or as float64 if it is."""
    return array.astype(training_dtype(array))
