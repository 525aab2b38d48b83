"""What is known of random allocation's tables without them: are they right?"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

# How far down logarithms are held to a relative error, and to what is absolute for so
# many nats below it.
CHECKED = -36.0
_AGREEING, _RAREST = 1e-7, 16.0
# Range and nodes of a term's transform.
_REACH, _NODES = 13.0, 600


def allowed_off(log_tail: np.ndarray) -> np.ndarray:
    """By how much the logarithm of a tail may be off."""
    return _AGREEING * np.exp(np.clip(CHECKED - log_tail, 0.0, _RAREST))


def fitting(
    core: float,
    edges: np.ndarray,
    values: np.ndarray,
    ratio: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """(panels,) whether rows are integrals of the next ones, without a jump between.

    This sees what is off in one row, or from one panel on, not what is off in the same
    way in all of them, as what every contour leaves out.

    Args:
      core: of `chebyshev_tables.Table`, as edges and values.
      edges: (panels + 1,).
      values: (3, panels, nodes).
      ratio: of places (..., ); it changes by itself times the place's change.
    """
    points = -np.cos(np.linspace(0, np.pi, values.shape[2]))
    chebyshev = np.polynomial.chebyshev.chebvander(points, len(points) - 1)
    order = np.arange(0, len(points), 2)
    weight = 2 / (1 - order**2.0) @ np.linalg.inv(chebyshev)[::2]
    half = 0.5 * np.diff(edges)[:, None]
    z = edges[:-1, None] + half * (points + 1)
    step = ratio(core * np.sinh(z)) * core * np.cosh(z) * half
    fall = np.exp(np.minimum(np.diff(values, axis=0), 700.0)) * step @ weight
    off = np.abs(values[:2, :, -1] - values[:2, :, 0] + fall).max(axis=0)
    jump = np.abs(values[:, 1:, 0] - values[:, :-1, -1]).max(axis=0)
    off[1:] = np.maximum(off[1:], jump)
    return off <= allowed_off(values[0, :, -1] - values[0, 0, 0])


def transform(count: int, shift: float, q: float) -> float:
    """``E e^{-q (W - 1)} - 1``, W the mean of the terms, by one term's; all positive.

    A law of the right mass and mean that is not W's has another one: of a shift that is
    1e-4 larger it is off by some 2e-4, where q is that of one deviation.
    """
    z, width = np.linspace(-_REACH, _REACH + shift, _NODES, retstep=True)
    gap = q / count * np.expm1(shift * z - 0.5 * shift * shift)
    density = np.exp(-0.5 * z * z) * float(width) / math.sqrt(2 * math.pi)
    excess = float(density @ (np.expm1(-gap) + gap))
    return math.expm1(count * math.log1p(excess))
