"""The questions: how much privacy does this step, or this run, cost?"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accounting.evaluation import evaluate
from jaxdp_episodic.accounting.path_rows import take_paths, undominated_paths
from jaxdp_episodic.accounting.resolution import DominatingPair, resolve
from jaxdp_episodic.accounting.step import ComposedSteps, GaussianStep

METHODS = ("exact", "pld", "rdp")
DIRECTIONS = ("forward", "backward", "both")


def rdp(
    step: GaussianStep | ComposedSteps, orders: Any, *, direction: str = "both"
) -> np.ndarray | np.float64:
    """Returns the Rényi-DP curve of one step (or of a composed run).

    ``D_alpha(P || Q)`` of the dominating pair (forward), of the pair exchanged
    (backward), or the larger of the two. *Exact* for the dominating pair up to 1e-10
    relative, hence an upper bound for the step. With a `Population` it is the worst
    path's at each order. Integer orders of a sampled Gaussian could be summed as a
    series; the quadrature used for all real orders agrees with it (tested).

    Args:
      step: the step, or a run made by `compose`.
      orders: real orders, each > 1 and finite; any shape, also empty.
      direction: "forward", "backward" or "both".

    Returns:
      float64 nats of shape ``step.shape + np.shape(orders)``; a scalar order adds no
      axis, and all-scalar input gives an ``np.float64``. ``inf`` without noise.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: an order not above 1, an unknown direction.

    Reference: Mironov, Talwar, Zhang (2019), arXiv:1908.10530, for the sampled
    Gaussian and the fact that its forward direction is the larger (Theorem 5); Sason
    and Verdú (2016), arXiv:1508.00335, for the other profiles.
    """
    _check_step(step)
    orders = _validation.order_array("orders", orders)
    _validation.choice("direction", direction, DIRECTIONS)
    pairs, counts = resolve(step, np.asarray(1))
    grid = orders.reshape(-1)
    pairs = tuple(
        DominatingPair(pair.kind, *(field[..., None] for field in pair[1:]))
        for pair in pairs
    )
    counts = tuple(count[..., None] for count in counts)
    values = _zeros(step.shape, 1, len(grid))
    for one in ("forward", "backward") if direction == "both" else (direction,):
        value, _ = evaluate("rdp", grid, pairs, counts, direction=one)
        values = np.maximum(values, value)
    worst = values.max(axis=-2).reshape(step.shape + orders.shape)
    return _scalar_or_array(worst)


def epsilon(
    step: GaussianStep | ComposedSteps,
    *,
    delta: Any,
    num_steps: Any = None,
    method: str = "rdp",
    orders: Any = None,
) -> np.ndarray | np.float64:
    """Returns epsilon of ``num_steps`` steps at the given delta.

    An *upper bound*: Rényi-DP of the dominating pair, converted at the best real order
    (Canonne, Kamath, Steinke 2020, arXiv:2004.00010, Proposition 12). The order is
    searched without ends, so it never sticks to a grid; the search can only err
    upwards. With a `Population` it is the worst path's.

    Args:
      step: the step, or a run made by `compose`.
      delta: in (0, 1).
      num_steps: whole number >= 0; None for a composed run, which has its own counts.
      method: "rdp". "pld" (certified) and "exact" are not there yet.
      orders: use only these orders (1-d, not empty) instead of the search. If the
        best of them is the first or last, a warning says that the grid is too short.

    Returns:
      float64 nats of the broadcast shape of step, ``delta`` and ``num_steps``;
      ``inf`` without noise, 0 where nothing is drawn or no step taken.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range, or ``num_steps`` given twice or not at all.
      NotImplementedError: a method that is not there yet.
    """
    _check_step(step)
    check_method(method)
    delta = _validation.open_unit_array("delta", delta)
    _warn_about_delta(step, delta)
    pairs, counts, shape = _run(step, num_steps, delta=delta)
    if orders is not None:
        return _epsilon_on_grid(pairs, counts, delta, orders, shape)
    return _scalar_or_array(worst_epsilon(pairs, counts, delta, shape))


def delta(
    step: GaussianStep | ComposedSteps,
    *,
    epsilon: Any,
    num_steps: Any = None,
    method: str = "rdp",
) -> np.ndarray | np.float64:
    """Returns delta of ``num_steps`` steps at the given epsilon.

    An *upper bound*, as `epsilon`: the same conversion read the other way, at the order
    that is best for it.

    Args:
      step: the step, or a run made by `compose`.
      epsilon: >= 0 and finite, nats.
      num_steps: whole number >= 0; None for a composed run.
      method: "rdp". "pld" (certified) and "exact" are not there yet.

    Returns:
      float64 in [0, 1] of the broadcast shape; 1 without noise.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range, or ``num_steps`` given twice or not at all.
      NotImplementedError: a method that is not there yet.
    """
    _check_step(step)
    check_method(method)
    target = _validation.nonnegative_array("epsilon", epsilon)
    if np.isinf(target).any():
        raise ValueError(f"epsilon must be finite, got {epsilon!r}")
    pairs, counts, shape = _run(step, num_steps, epsilon=target)
    pairs = take_paths(pairs, undominated_paths(pairs))
    log_delta, _ = evaluate("best_log_delta", target[..., None], pairs, counts)
    worst = np.broadcast_to(log_delta.max(axis=-1), shape)
    # exp rounds to the nearest: one ulp up keeps the bound.
    return _scalar_or_array(np.minimum(np.nextafter(np.exp(worst), 2.0), 1.0))


def worst_epsilon(
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
    delta: np.ndarray,
    shape: tuple[int, ...],
) -> np.ndarray:
    """Epsilon by Rényi-DP: each path composed first, the largest taken last."""
    pairs = take_paths(pairs, undominated_paths(pairs))
    value, _ = evaluate("best_epsilon", np.log(delta)[..., None], pairs, counts)
    return np.broadcast_to(value.max(axis=-1), shape)


def check_method(method: str) -> None:
    """Refuses methods that do not exist, and those that do not exist yet."""
    _validation.choice("method", method, METHODS)
    if method != "rdp":
        raise NotImplementedError(
            f"method={method!r} is not implemented yet; available: 'rdp'"
        )


def _run(
    step: GaussianStep | ComposedSteps, num_steps: Any, **targets: np.ndarray
) -> tuple[tuple[DominatingPair, ...], tuple[np.ndarray, ...], tuple[int, ...]]:
    """The pairs and counts of a run, and the shape of the answer."""
    named: dict[str, Any] = {"step": np.empty(step.shape, np.uint8), **targets}
    if isinstance(step, ComposedSteps):
        if num_steps is not None:
            raise ValueError(
                "num_steps must be None for a composed run, whose steps have their own "
                f"counts, got {num_steps!r}"
            )
        steps = None
    else:
        if num_steps is None:
            raise ValueError("num_steps must be a whole number >= 0, got None")
        steps = _validation.integer_array("num_steps", num_steps, minimum=0)
        named["num_steps"] = steps
    shape = _validation.broadcast_shape(**named)
    return *resolve(step, steps), shape


def _epsilon_on_grid(
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
    delta: np.ndarray,
    orders: Any,
    shape: tuple[int, ...],
) -> np.ndarray | np.float64:
    """Epsilon with the orders given by the user only."""
    grid = _validation.order_array("orders", orders)
    if grid.ndim != 1 or grid.size == 0:
        raise ValueError(
            "orders must be a 1-d array with at least one order, "
            f"got shape {grid.shape}"
        )
    grid = np.unique(grid)
    pairs = tuple(
        DominatingPair(pair.kind, *(field[..., None] for field in pair[1:]))
        for pair in pairs
    )
    curve, _ = evaluate("rdp", grid, pairs, tuple(c[..., None] for c in counts))
    t = grid - 1
    values = curve + np.log1p(-1 / grid)
    values = values - (np.log(delta)[..., None, None] + np.log(grid)) / t
    best = np.argmin(values, axis=-1)
    result = np.maximum(values.min(axis=-1), 0.0)
    nothing = (curve == 0).all(axis=-1)
    if np.any(~nothing & np.isfinite(result) & ((best == 0) | (best == t.size - 1))):
        warnings.warn(
            "the best order is the first or the last of `orders`: a longer grid, or "
            "orders=None, gives a smaller epsilon",
            stacklevel=3,
        )
    result = np.where(nothing, 0.0, result)
    return _scalar_or_array(np.broadcast_to(result.max(axis=-1), shape))


def _check_step(step: Any) -> None:
    if not isinstance(step, GaussianStep | ComposedSteps):
        raise TypeError(f"step must be a GaussianStep or a composed run, got {step!r}")


def _warn_about_delta(step: GaussianStep | ComposedSteps, delta: np.ndarray) -> None:
    """Warns where a delta lets the mechanism publish somebody's data outright."""
    parts = step.steps if isinstance(step, ComposedSteps) else (step,)
    units = [n for part in parts if (n := part.num_protected_units) is not None]
    if units and delta.size and np.max(delta) * units[0] >= 1:
        warnings.warn(
            f"delta={np.max(delta):g} times {units[0]} protected units is at least 1: "
            "publishing one of them outright would satisfy it; take delta well below "
            f"{1 / units[0]:.1e}",
            stacklevel=3,
        )


def _zeros(shape: tuple[int, ...], *more: int) -> np.ndarray:
    return np.zeros((*shape, *more))


def _scalar_or_array(values: np.ndarray) -> np.ndarray | np.float64:
    return np.float64(values) if np.ndim(values) == 0 else np.array(values)
