"""Certified intervals of epsilon and delta."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accounting.api import check_step, checked_run
from jaxdp_episodic.accounting.paths import undominated_paths
from jaxdp_episodic.accounting.pld.method import pld_bounds
from jaxdp_episodic.accounting.question import Answer, DeltaAt, EpsilonAt, Question
from jaxdp_episodic.accounting.run import Run
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
    run, shape = checked_run(step, num_steps, delta=delta)
    return _ends(EpsilonAt(np.log(delta)), run, shape, max_width)


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
    run, shape = checked_run(step, num_steps, epsilon=target)
    lower, upper = _ends(DeltaAt(target), run, shape, None)
    # exp rounds to the nearest: one ulp outwards keeps the interval.
    lower = np.maximum(np.nextafter(np.exp(lower), -1.0), 0.0)
    upper = np.minimum(np.nextafter(np.exp(upper), 2.0), 1.0)
    return lower[()], upper[()]


def _ends(
    question: Question, run: Run, shape: tuple[int, ...], width: float | None
) -> tuple[Any, Any]:
    """Both ends for each path, the largest of each taken last."""
    run = run.take_paths(undominated_paths(run))
    question = question.at(np.broadcast_to(question.target, shape)[..., None])
    log_kept = run.log_kept()
    left = question.given_kept(log_kept)
    hopeless = np.isnan(left.target) | np.isneginf(left.target)
    left = left.at(np.where(hopeless, -1.0, left.target))
    nothing = np.zeros(())
    ends = []
    for end in pld_bounds(left, run, width=width):
        given = question.with_failure(Answer(end, nothing, nothing), log_kept).value
        ends.append(np.array(np.broadcast_to(given.max(axis=-1), shape))[()])
    return ends[0], ends[1]
