"""Certified ends of delta and epsilon from a few Fourier coefficients of the sum.

Where many losses are added, all but the lowest frequencies of their tilted distribution
are as good as 0. What delta asks of the distribution,
``sum of cells e^{-c x}(1 - e^{-x})`` over the excess x of the loss above epsilon, is a
sum over frequencies too (Parseval), with weights that are geometric series: no inverse
transform, and no cells.

What is left out, and every rounding, is bounded and goes to the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.accountant.methods.certified import window
from jaxdp_episodic.accountant.methods.certified.hockey_stick import (
    CertifiedDistribution,
    chernoff_epsilon,
    chernoff_log_delta,
    exponent_error,
    finite_level,
)
from jaxdp_episodic.accountant.methods.certified.window import Estimate

# Relative rounding error of one term of the sums below, about 20 operations.
_TERM_ERROR = 5e-15
# Steps of Newton's method, at most; a handful is the rule.
_MOST_ITERATIONS = 40
# Share of the precision by which the search stays on the safe side of its target.
_MARGIN = 1e-2
# Elements of the arrays that are worked on at a time.
_BLOCK = 2**21


class LowFrequencies(NamedTuple):
    """One certified distribution of the sum by its lowest Fourier coefficients."""

    certified: CertifiedDistribution  # everything but the cells, which are empty
    size: int  # N, the number of cells of the circle
    # (K,) complex; those of frequencies 0 to K - 1, the window's first cell being at
    # angle 0.
    coefficients: np.ndarray
    errors: np.ndarray  # (K,) bounds of their errors
    # Bound of the sum over all other frequencies k, both signs, of ``|b_k| / |(1 - z)(1
    # - z')|``, over N, where ``z = e^{-c h + i w h}``, ``z' = z e^{-h}``, h the
    # spacing.
    rest: float
    initial_epsilon: float  # epsilon that is expected
    precision: float  # nats of log(delta) that do not matter


class _Batch(NamedTuple):
    """Several `LowFrequencies`; (R, 1) each but the last four fields, (R, K)."""

    tilt: np.ndarray
    spacing: np.ndarray
    start: np.ndarray
    size: np.ndarray
    upper: np.ndarray  # whether the upper end is asked for
    truncated: np.ndarray  # what has to be added or taken off
    most: np.ndarray
    rest: np.ndarray
    step: np.ndarray  # z of each frequency
    term: np.ndarray  # coefficient / ((1 - z)(1 - z') N), twice but for frequency 0
    tail: np.ndarray  # the same without (1 - z)
    term_errors: np.ndarray  # bounds of the errors of ``term``


class _Values(NamedTuple):
    """Tilted delta at one epsilon each, rounded to the safe side; (R,) each."""

    total: np.ndarray
    slope: np.ndarray


def certified_ends(
    dists: Sequence[LowFrequencies],
    given: Sequence[float],
    upper: Sequence[bool],
    *,
    of_epsilon: bool,
) -> list[tuple[float, Estimate]]:
    """Certified ends of many sums; as `hockey_stick.certified_epsilon` of one.

    For each its log(delta) or epsilon is ``given``, and ``upper`` says which end is
    asked for: rounded to the safe side, with an estimate.
    """
    result: list[tuple[float, Estimate] | None] = [None] * len(dists)
    groups: dict[int, list[int]] = {}
    for i, dist in enumerate(dists):
        groups.setdefault(len(dist.coefficients).bit_length(), []).append(i)
    solve = _epsilons if of_epsilon else _log_deltas
    for length, members in groups.items():
        number = max(_BLOCK >> length, 1)
        for start in range(0, len(members), number):
            chosen = members[start : start + number]
            part = [dists[i] for i in chosen]
            ends = solve(
                part,
                _batch(part, [upper[i] for i in chosen]),
                np.array([given[i] for i in chosen]),
            )
            for i, end in zip(chosen, ends, strict=True):
                result[i] = end
    return [end for end in result if end is not None]


def _batch(dists: Sequence[LowFrequencies], upper: Sequence[bool]) -> _Batch:
    length = max(len(dist.coefficients) for dist in dists)
    coefficients = np.zeros((len(dists), length), complex)
    errors = np.zeros((len(dists), length))
    for i, dist in enumerate(dists):
        coefficients[i, : len(dist.coefficients)] = dist.coefficients
        errors[i, : len(dist.errors)] = dist.errors

    def column(values: Sequence[float]) -> np.ndarray:
        return np.array(values, np.float64)[:, None]

    tilt = column([dist.certified.tilt for dist in dists])
    spacing = column([dist.certified.spacing for dist in dists])
    size = column([dist.size for dist in dists])
    angle = 2 * math.pi * np.arange(length) / size
    decay, half = np.exp(-tilt * spacing), np.sin(0.5 * angle)
    step = decay * np.exp(1j * angle)
    # 1 - z without cancellation
    near = -np.expm1(-tilt * spacing) + 2 * decay * half**2 - 1j * np.imag(step)
    shrink = np.exp(-spacing)
    far = -np.expm1(-(tilt + 1) * spacing) + 2 * decay * shrink * half**2
    far = far - 1j * shrink * np.imag(step)
    both = np.where(np.arange(length) > 0, 2.0, 1.0) / size
    tail = both * coefficients / far
    truncated = [
        dist.certified.truncated[1] + (0.0 if up else dist.certified.truncated[0])
        for dist, up in zip(dists, upper, strict=True)
    ]
    weights = both / np.abs(near * far)
    return _Batch(
        tilt=tilt,
        spacing=spacing,
        start=column([dist.certified.start for dist in dists]),
        size=size,
        upper=np.array(upper)[:, None],
        truncated=column(truncated),
        most=np.exp(window.log_weight(tilt)),
        rest=column([dist.rest for dist in dists]),
        step=step,
        term=tail / near,
        tail=tail,
        term_errors=weights * (errors + _TERM_ERROR * np.abs(coefficients)),
    )


def _values(batch: _Batch, epsilon: np.ndarray) -> _Values:
    """Tilted delta at epsilon (R,), in the window, with all errors; its slope.

    With x = theta + m h the excesses of the cells m = 0 ... M - 1 above epsilon,

        sum e^{-c x}(1 - e^{-x}) z-phases = [e^{-c theta} A e^{i w h j} - e^{-c end} B]
            / ((1 - z)(1 - z')),
        A = 1 - e^{-theta} + z e^{-theta}(1 - e^{theta - h}),
        B = 1 - e^{-end} - z e^{-h}(1 - e^{h - end}),   end = theta + M h,

    j the number of the first cell: two geometric series, each term without
    cancellation.
    """
    position = (epsilon[:, None] - batch.start) / batch.spacing
    first = np.clip(np.ceil(position), 0, batch.size - 1)
    theta = np.clip(first - position, 0.0, 1.0) * batch.spacing
    end = theta + (batch.size - first) * batch.spacing
    number = np.arange(batch.step.shape[1])
    phase = np.exp(2j * math.pi * (np.mod(number * first, batch.size) / batch.size))
    near, far = np.exp(-batch.tilt * theta), np.exp(-batch.tilt * end)
    # A = a0 + a1 z and B = b0 - b1 z
    a0, b0 = -np.expm1(-theta), -np.expm1(-end)
    a1 = np.exp(-theta) * -np.expm1(theta - batch.spacing)
    b1 = np.exp(-batch.spacing) * -np.expm1(batch.spacing - end)
    a = near * (a0 + batch.step * a1) * phase
    b = far * (b0 - batch.step * b1)
    total = np.sum(np.real(batch.term * (a - b)), -1)
    decay = np.abs(batch.step[:, :1])
    bounds = near * (a0 + decay * a1) + far * (b0 + decay * b1)
    slack = bounds[:, 0] * np.sum(batch.term_errors, -1)
    # A is at most 1 - e^{-h}, and B as much and |1 - z'|, which is at most 2
    left_out = (-np.expm1(-batch.spacing) * (1 + far) + 2 * far) * batch.rest
    slack += (left_out + batch.most * batch.truncated)[:, 0]
    beyond = near * np.exp(-theta) * phase - far * np.exp(-end)
    beyond = np.sum(np.real(batch.tail * beyond), -1)
    slope = beyond / np.maximum(total, 1e-300)
    sign = np.where(batch.upper[:, 0], 1.0, -1.0)
    slope = np.clip(slope, 0.5 * batch.tilt[:, 0], 10 / batch.spacing[:, 0])
    return _Values(total + sign * slack * (1 + 1e-9), slope)


def _rows(batch: _Batch, chosen: np.ndarray) -> _Batch:
    return _Batch(*(field[chosen] for field in batch))


def _log_deltas(
    dists: Sequence[LowFrequencies], batch: _Batch, epsilon: np.ndarray
) -> list[tuple[float, Estimate]]:
    """Ends of log(delta) at epsilon; as `hockey_stick.certified_log_delta`."""
    shift = np.array([dist.certified.shift for dist in dists])
    sign = np.where(batch.upper[:, 0], 1.0, -1.0)
    at = np.maximum(epsilon - sign * shift, batch.start[:, 0])
    values = _values(batch, at)
    result = []
    for i, low in enumerate(dists):
        dist, total, here = low.certified, float(values.total[i]), float(at[i])
        log_delta = -math.inf
        if total > 0:
            log_delta = math.log(total) + dist.log_moment - dist.tilt * here
        slope = float(values.slope[i])
        estimate = Estimate(float(epsilon[i]), max(log_delta, -690.0), slope)
        log_delta += sign[i] * exponent_error(dist, log_delta, here)
        if batch.upper[i]:
            bound = chernoff_log_delta(dist, float(epsilon[i]))
            infinite = math.log(max(dist.infinite, 1e-300))
            log_delta = float(np.logaddexp(log_delta, infinite)) + 1e-12
            # an upper bound of 0 or less knows nothing
            inside = total > 0 and epsilon[i] - shift[i] >= dist.start
            log_delta = min(log_delta, bound) if inside else bound
        result.append((min(log_delta, 0.0), estimate))
    return result


def _epsilons(
    dists: Sequence[LowFrequencies], batch: _Batch, log_delta: np.ndarray
) -> list[tuple[float, Estimate]]:
    """Ends of epsilon at log(delta), by Newton's method.

    Every epsilon that is tried is a certified end if delta there is on the right side
    of the target; the search is for a point a little to that side.
    """
    upper = batch.upper[:, 0]
    sign = np.where(upper, 1.0, -1.0)
    level, bound, shift = np.empty((3, len(dists)))
    initial_epsilon, slack = np.empty((2, len(dists)))
    for i, (low, up) in enumerate(zip(dists, upper, strict=True)):
        dist, goal = low.certified, float(log_delta[i])
        largest = abs(dist.start) + low.size * dist.spacing
        bound[i] = chernoff_epsilon(dist, goal) if up else math.inf
        level[i] = goal + exponent_error(dist, goal, largest)
        if up:
            level[i] = finite_level(dist, goal, largest)
        shift[i], initial_epsilon[i] = dist.shift, low.initial_epsilon
        slack[i] = _MARGIN * low.precision
    moment = np.array([dist.certified.log_moment for dist in dists])
    tilt, start = batch.tilt[:, 0], batch.start[:, 0]
    left = np.maximum(start, 0.0)
    last = start + (batch.size - 1)[:, 0] * batch.spacing[:, 0]
    right = np.maximum(np.minimum(np.where(upper, bound, last), last), left)
    best = np.where(upper, np.inf, 0.0)
    at, slope = np.clip(initial_epsilon, left, right), tilt.copy()
    active = np.flatnonzero(np.isfinite(level))
    for _ in range(_MOST_ITERATIONS):
        here = at[active]
        total, slope[active] = _values(_rows(batch, active), here)
        alive = total > 0
        reached = np.log(np.where(alive, total, 1.0)) + moment[active]
        reached = np.where(alive, reached - tilt[active] * here, -np.inf)
        # An upper bound below 0 knows nothing; a lower one is no bound at all.
        reached = np.where(~alive & upper[active], np.inf, reached)
        missing = reached - level[active] + sign[active] * slack[active]
        fits = sign[active] * (reached - level[active]) <= 0
        better = np.where(upper[active], here < best[active], here > best[active])
        best[active] = np.where(fits & better, here, best[active])
        above = missing > 0
        left[active] = np.where(above, np.maximum(left[active], here), left[active])
        right[active] = np.where(above, right[active], np.minimum(right[active], here))
        away = np.where(np.isfinite(missing), missing, 0.0)
        step = here + away / slope[active]
        inside = np.isfinite(missing) & (step > left[active]) & (step < right[active])
        step = np.where(inside, step, 0.5 * (left[active] + right[active]))
        open_ = np.abs(missing) > 0.5 * slack[active]
        open_ &= right[active] - left[active] > 1e-15 * (1e-30 + right[active])
        at[active] = np.where(open_, step, here)
        active = active[open_]
        if not len(active):
            break
    best = np.where(upper, best + shift, np.maximum(best - shift, 0.0))
    best += sign * 1e-15 * np.where(np.isfinite(best), best, 0.0)
    best = np.where(upper, np.minimum(best, bound), best)
    return [
        (max(float(b), 0.0), Estimate(float(a), float(d), float(s)))
        for b, a, d, s in zip(best, at, log_delta, slope, strict=True)
    ]
