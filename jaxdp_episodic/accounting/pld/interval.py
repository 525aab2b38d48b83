"""Certified intervals for delta and epsilon by composing privacy loss distributions.

Each step's loss is bracketed by two laws on a lattice (`accounting.pld.lattice`),
whose convolution powers come from Fourier transforms of the exponentially *tilted*
laws (`numerics.fourier`), so that the cells that matter are the largest and rounding
stays relative to delta. What is cut off, wrapped around or rounded is bounded and
added to the upper end, taken from the lower. A single step is read off its profile
(`accounting.pld.single`). The interval holds the exact hockey-stick
curve of the composed dominating pair, forward and backward composed separately and
the larger taken at the end (docs/theory.md, "From profiles to answers").

Reference: Doroshenko, Ghazi, Kamath, Kumar, Manurangsi (2022), arXiv:2207.04380 (the
upper law); Koskela, Jälkö, Honkela (2020), arXiv:1906.03049 (Fourier accountant);
Zhu, Dong, Wang (2022), arXiv:2106.08567 (composition of dominating pairs).
"""

from __future__ import annotations

import math

import numpy as np

from jaxdp_episodic.accounting import evaluation
from jaxdp_episodic.accounting.pld import refine, single
from jaxdp_episodic.accounting.pld.interval_state import Setting, Step
from jaxdp_episodic.accounting.pld.window import Target
from jaxdp_episodic.accounting.run import DominatingPair

_BLOCK = 64
# Widths that are enough if no other is asked for: of epsilon, and of delta.
DEFAULT_EPSILON_SHARE, DEFAULT_EPSILON_WIDTH = 0.01, 1e-4
DEFAULT_DELTA_SHARE = 0.02
_MOST_ROUNDS = 7
# delta below it, and the masses behind it, leave the range of float64.
_LEAST_LOG_DELTA = -550.0


def epsilon_bounds(
    log_delta: np.ndarray,
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
    *,
    max_width: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns certified ends of epsilon of a composed run at given delta.

    Args:
      log_delta: (n,) natural logarithms of delta, < 0.
      pairs: dominating pairs of the run's steps, fields broadcastable to (n,).
      counts: (n,) each, how often each step is taken: whole numbers.
      max_width: nats; ends further apart than it are an error. Without it the width
        aimed for is the larger of 1 % of epsilon and 1e-4.

    Returns:
      ``(lower, upper)``: (n,) nats each, *lower* and *upper bound* of the exact
      epsilon of the composed dominating pair; 0 and inf where nothing is known.

    Raises:
      ValueError: max_width cannot be reached on a lattice of
        `refine.LARGEST_LATTICE` cells, or a count is not a whole number.
    """
    shape = np.shape(log_delta)
    upper, _ = evaluation.evaluate("best_epsilon", log_delta, pairs, counts)
    upper = np.array(np.broadcast_to(upper, shape), np.float64)
    lower = np.zeros(shape)
    floor = DEFAULT_EPSILON_WIDTH if max_width is None else max_width
    share = DEFAULT_EPSILON_SHARE if max_width is None else 0.0
    everyone = _steps_of(pairs, counts, len(upper))
    settings: dict[int, Setting] = {}
    for i, steps in enumerate(everyone):
        finite = np.isfinite(upper[i]) and log_delta[i] > _LEAST_LOG_DELTA
        if finite and upper[i] > floor:
            target = Target(float(log_delta[i]), None, floor, share)
            settings[i] = Setting(steps, target, 0.0, float(upper[i]))
    _solve(list(settings.values()))
    for i, setting in settings.items():
        lower[i], upper[i] = setting.lower, setting.upper
    if max_width is not None:
        missed = np.isfinite(upper) & (upper - lower > max_width)
        if np.any(missed):
            raise ValueError(
                f"max_width {max_width:g} cannot be reached: the ends of epsilon are "
                f"{np.max((upper - lower)[missed]):.3g} apart on a lattice of at most "
                f"{refine.LARGEST_LATTICE:,} cells"
            )
    return lower, upper


def log_delta_bounds(
    epsilon: np.ndarray,
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
    *,
    relative_width: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns certified ends of log(delta) of a composed run at given epsilon.

    Args:
      epsilon: (n,) nats, >= 0.
      pairs: dominating pairs of the run's steps, fields broadcastable to (n,).
      counts: (n,) each, how often each step is taken: whole numbers.
      relative_width: of delta, aimed for; 2 % by default.

    Returns:
      ``(lower, upper)``: (n,) nats each, *lower* and *upper bound* of the logarithm of
      the exact delta of the composed dominating pair; -inf and 0 where nothing is
      known.

    Raises:
      ValueError: a count is not a whole number.
    """
    shape = np.shape(epsilon)
    upper, _ = evaluation.evaluate("best_log_delta", epsilon, pairs, counts)
    upper = np.minimum(np.array(np.broadcast_to(upper, shape), np.float64), 0.0)
    lower = np.full(shape, -np.inf)
    unprotected = np.zeros(shape, bool)
    for pair, count in zip(pairs, counts, strict=True):
        rate = pair.outer_rate * pair.rate * pair.inner_rate
        unprotected |= (pair.noise_multiplier == 0) & (rate > 0) & (count > 0)
    share = DEFAULT_DELTA_SHARE if relative_width is None else relative_width
    settings: dict[int, Setting] = {}
    for i, steps in enumerate(_steps_of(pairs, counts, len(upper))):
        if upper[i] > _LEAST_LOG_DELTA and not unprotected[i] and steps:
            target = Target(None, float(epsilon[i]), 0.0, share)
            settings[i] = Setting(steps, target, -math.inf, float(upper[i]))
    _solve(list(settings.values()))
    for i, setting in settings.items():
        lower[i], upper[i] = setting.lower, setting.upper
    return lower, upper


def _steps_of(
    pairs: tuple[DominatingPair, ...], counts: tuple[np.ndarray, ...], size: int
) -> list[tuple[Step, ...]]:
    """The steps of every setting that lose anything."""
    columns = []
    for pair, count in zip(pairs, counts, strict=True):
        arrays = (*pair[1:], np.asarray(count, np.float64))
        outer, rate, inner, moved, noise, episodes, times = (
            np.broadcast_to(a, (size,)) for a in arrays
        )
        if np.any(times != np.rint(times)):
            raise ValueError("counts must be whole numbers")
        idle = (outer * rate * inner == 0) | (times == 0) | np.isinf(noise)
        # Noise near 1e-308 is as good as none.
        with np.errstate(divide="ignore", over="ignore"):
            shift = moved / np.where(noise > 0, noise, 1.0)
        columns.append(
            [
                None
                if idle[i]
                else Step(
                    pair.kind,
                    (outer[i], rate[i], inner[i], shift[i], episodes[i]),
                    float(times[i]),
                )
                for i in range(size)
            ]
        )
    rows = zip(*columns, strict=True)
    return [tuple(s for s in row if s is not None) for row in rows]


def _solve(settings: list[Setting]) -> None:
    """Narrows the ends of all settings, block by block."""
    for start in range(0, len(settings), _BLOCK):
        block = settings[start : start + _BLOCK]
        single.narrow([s for s in block if single.is_single(s)])
        block = [s for s in block if not single.is_single(s)]
        refine.look_roughly(block)
        for _ in range(_MOST_ROUNDS):
            block = [s for s in block if _unfinished(s)]
            if not block:
                break
            refine.lay_lattices(block)
            refine.compose(block)


def _unfinished(setting: Setting) -> bool:
    """Whether the ends are too far apart and something can be done about it."""
    width, enough = _widths(setting)
    if width <= enough or setting.out_of_memory or setting.last_attempt:
        return False
    if setting.least_spacing > 0:
        pass  # a coarser lattice is to be tried, nothing else
    elif setting.guessed:
        if setting.rounds:
            setting.scale *= 0.7
    elif setting.rounds:
        setting.scale *= min(max(0.7 * enough / width, 0.1), 0.4)
    return True


def _widths(setting: Setting) -> tuple[float, float]:
    target = setting.target
    width = setting.upper - setting.lower
    if target.log_delta is None:
        return width, target.proportion
    return width, max(target.floor, target.proportion * setting.lower)
