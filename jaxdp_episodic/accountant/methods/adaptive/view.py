"""Where the recursion is looked at: windows about the answer, and how steep it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.adaptive.problem import FURTHEST, Filter
from jaxdp_episodic.accountant.methods.adaptive.reading import Curve, epsilon_above
from jaxdp_episodic.accountant.methods.adaptive.recursion import Row, Window
from jaxdp_episodic.accountant.methods.question import Question

# Largest exponent of a weight over the window: float64 ends at 700.
_MOST_EXPONENT = 300.0
# Nats that a window has at least on either side of what is asked.
_LEAST_REACH = 1e-3
# Share of delta to which values fall at the window's right end.
_RIGHT_SHARE = 1e-6
# Value to which they fall at its left end.
_LEFT_VALUE = 1e-6
# Nats over which a slope is taken.
_SLOPE_NATS = 0.05
# Largest tilt, per nat.
_MOST_TILT = 100.0
# Logarithm of deltas that a pass without any tilt resolves.
_LEAST_LOG_BOTH = -20.0
# Ratio of two orientations' windows up to which one spacing serves both.
_ALIKE = 3.0


class View(NamedTuple):
    """Where one orientation's curve is looked at.

    Attributes:
      at, log_size: the answer that is expected, epsilon and log(delta).
      tilt: how steep log(delta) is there.
      left, right: nats to the ends of the window, from g = 1.
    """

    at: float
    log_size: float
    tilt: float
    left: float
    right: float


def expected_view(
    question: Question, filters: Mapping[bool, Filter], backward: bool, lost: float
) -> View:
    """Where the answer is expected: not finite where there is none.

    Args:
      question: of one target.
      filters: of the orientations.
      backward: the orientation.
      lost: probability that everything is lost at once.
    """
    of = filters[backward]
    at = log_size = float(question.target)
    if question.is_epsilon:
        at, order = of.epsilon(log_size)
    else:
        log_size, order = of.log_delta(at)
    if not (math.isfinite(at) and math.isfinite(log_size)):
        return View(at, log_size, 0.0, 0.0, 0.0)
    right = max(of.epsilon(log_size + math.log(_RIGHT_SHARE))[0], at)
    left = filters.get(not backward, of).epsilon(math.log(_LEFT_VALUE))[0]
    left, right = (min(x + _LEAST_REACH, FURTHEST) for x in (left, right))
    # Values that do not fall to the right are not to be multiplied up.
    tilt = 0.0 if lost else min(order - 1, _MOST_TILT)
    return View(at, log_size, tilt, left, right)


def are_alike(views: Mapping[bool, View]) -> bool:
    """Whether one coarse pass, with no tilt, serves two orientations."""
    rights = [view.right for view in views.values()]
    least = min(view.log_size for view in views.values())
    is_wide = max(rights) < _ALIKE * min(rights)
    return len(rights) == 2 and is_wide and least > _LEAST_LOG_BOTH


def seen_view(question: Question, view: View, curve: Curve, lost: float) -> View:
    """The view that a coarse curve shows; see `expected_view`."""
    at = view.at
    if question.is_epsilon:
        at = min(epsilon_above(curve, math.exp(view.log_size)), at)
    log_values = np.log(curve.values + 1e-300)
    log_size, beside = np.interp([at, at + _SLOPE_NATS], curve.x, log_values)
    small = np.flatnonzero(log_values <= log_size + math.log(_RIGHT_SHARE))
    end = int(small[0]) if small.size else len(curve.x) - 1
    right = float(curve.x[end])
    # Of a heavy tail less than the slope: tilted, it would be larger than the rest.
    tilt = (log_size - beside) / _SLOPE_NATS
    if right > at + _SLOPE_NATS:
        tilt = min(tilt, (log_size - log_values[end]) / (right - at))
    return View(
        at,
        min(float(log_size), 0.0),
        0.0 if lost else float(np.clip(tilt, 0.0, _MOST_TILT)),
        view.left,
        min(max(right, at) + _LEAST_REACH, FURTHEST),
    )


def window_of(view: View, step: float) -> Window:
    """The window of a view, on a lattice of a spacing."""
    first = -math.ceil(view.left / step)
    size = math.ceil(view.right / step) - first + 3
    window = Window(step, first, size, view.tilt, min(view.at, view.right))
    return lengthened(window, size)


def lengthened(window: Window, size: int) -> Window:
    """A window of a size, further to the right, whose weights float64 can hold."""
    tilt = min(window.tilt, _MOST_EXPONENT / (window.step * size))
    return window._replace(size=size, tilt=tilt)


def narrowed(view: View, row: Row, window: Window, share: float) -> View:
    """A view without what strategies seldom cross, and gain little from beyond.

    To be u nats left of g = 1 a run from the answer has lost u nats more than that, and
    there the value is v(-u): about v(at + u) v(-u) in all. The same at u nats right of
    the answer, as losses below -u have about the mass v(-u). An estimate: both ends of
    the answer hold on every window. At either end ``share`` of the answer may leave
    the window and come back.
    """
    values = np.abs(row.values / window.weights)
    zero = -window.first
    at = zero + int(np.clip(round(view.at / window.step), 0, window.size - 1 - zero))
    u = np.arange(min(zero, window.size - 1 - at) + 1)
    # Both fall, but for rounding.
    left, right = (np.minimum.accumulate(values[i]) for i in (zero - u, at + u))
    small = left * right <= share * values[at]
    if not small.any():
        return view
    reach = window.step * int(np.argmax(small)) + _LEAST_REACH
    right = min(view.right, max(view.at, 0.0) + reach)
    return view._replace(left=min(view.left, reach), right=right)
