"""Certified intervals of epsilon and delta."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accounting.api import check_step, composed_run
from jaxdp_episodic.accounting.paths import take_paths, undominated_paths
from jaxdp_episodic.accounting.pld import interval
from jaxdp_episodic.accounting.run import DominatingPair
from jaxdp_episodic.describe.step import ComposedSteps, GaussianStep


def epsilon_interval(
    step: GaussianStep | ComposedSteps,
    *,
    delta: Any,
    num_steps: Any = None,
    max_width: float | None = None,
) -> tuple[Any, Any]:
    """Returns certified lower and upper ends of epsilon at the given delta.

    The true epsilon of the composed dominating pair lies between them, rounding
    errors included. (The upper end is one for the mechanism as well.) Privacy-loss
    distributions are rounded pessimistically and optimistically and composed by FFT;
    tails cut off and round-off are bounded and added. With a `Population` both ends
    are those of the largest epsilon over the paths.

    Args:
      step: the step, or a run made by `compose`.
      delta: in (0, 1).
      num_steps: whole number >= 0; None for a composed run.
      max_width: largest width of the interval in nats, > 0; None for 1 % of epsilon or
        1e-4, whichever is larger.

    Returns:
      ``(lower, upper)``, float64 nats of the broadcast shape; ``(inf, inf)`` without
      noise, ``(0, 0)`` where nothing is drawn.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range, or a width that cannot be met within the memory
        that the computation may use.

    Reference: Doroshenko, Ghazi, Kamath, Kumar, Manurangsi (2022), arXiv:2207.04380.
    """
    check_step(step)
    delta = _validation.open_unit_array("delta", delta)
    if max_width is not None:
        max_width = float(_validation.positive_array("max_width", max_width))
    pairs, counts, shape = composed_run(step, num_steps, delta=delta)
    ends = _bounds(
        interval.epsilon_bounds,
        np.log(delta),
        pairs,
        counts,
        shape,
        max_width=max_width,
    )
    return _shaped(ends[0], shape), _shaped(ends[1], shape)


def delta_interval(
    step: GaussianStep | ComposedSteps, *, epsilon: Any, num_steps: Any = None
) -> tuple[Any, Any]:
    """Returns certified lower and upper ends of delta at the given epsilon.

    See `epsilon_interval`.

    Args:
      step: the step, or a run made by `compose`.
      epsilon: >= 0 and finite, nats.
      num_steps: whole number >= 0; None for a composed run.

    Returns:
      ``(lower, upper)``, float64 in [0, 1] of the broadcast shape.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range.
    """
    check_step(step)
    target = _validation.nonnegative_array("epsilon", epsilon)
    if np.isinf(target).any():
        raise ValueError(f"epsilon must be finite, got {epsilon!r}")
    pairs, counts, shape = composed_run(step, num_steps, epsilon=target)
    lower, upper = _bounds(interval.log_delta_bounds, target, pairs, counts, shape)
    # exp rounds to the nearest: one ulp outwards keeps the interval.
    lower = np.maximum(np.nextafter(np.exp(lower), -1.0), 0.0)
    upper = np.minimum(np.nextafter(np.exp(upper), 2.0), 1.0)
    return _shaped(lower, shape), _shaped(upper, shape)


def _bounds(
    solve: Any,
    target: np.ndarray,
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
    shape: tuple[int, ...],
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Both ends for each path, the largest of each taken last."""
    pairs = take_paths(pairs, undominated_paths(pairs))
    target = np.broadcast_to(target, shape)[..., None]
    whole = np.broadcast_shapes(target.shape, *(pair.shape for pair in pairs))

    def flat(field: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(field, np.float64), whole).reshape(-1)

    flat_pairs = tuple(DominatingPair(p.kind, *map(flat, p[1:])) for p in pairs)
    ends = solve(flat(target), flat_pairs, tuple(map(flat, counts)), **options)
    lower, upper = (end.reshape(whole).max(axis=-1) for end in ends)
    return lower, upper


def _shaped(values: np.ndarray, shape: tuple[int, ...]) -> Any:
    return np.array(np.broadcast_to(values, shape))[()]
