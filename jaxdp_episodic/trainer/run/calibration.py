"""Temperatures that make a release's scores probabilities, and their reliability.

They are fitted on the held-out data that chose the released stage: these are public to
the run, or declared unprotected. Private validation data never come here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import scipy.optimize
import scipy.special

from jaxdp_episodic import _validation
from jaxdp_episodic.trainer.learners.learners import ABSENT
from jaxdp_episodic.trainer.run.evaluation import Evaluation

_SHOTS = (1, 2, 4, 8, 16)  # fitted as far as the held-out classes have examples
_MOST_WAYS = 2  # times the fitted number of classes: beyond, errors exceed 0.05
_EPISODES = 200  # of each fit
_LOG_SCALE = (-12.0, 12.0)  # of 1 / temperature
_DIGITS = 3  # of a stored temperature
_BINS = 10  # of a reliability diagram


class Calibration(NamedTuple):
    """Temperatures fitted on episodes of held-out classes."""

    ways: int  # classes of an episode
    shots: tuple[int, ...]  # support examples of a class, increasing
    temperatures: tuple[float, ...]  # for each number of shots

    def temperature(self, shots: float) -> float:
        """Log-log interpolated; constant beyond the fitted numbers of shots."""
        known = np.log(self.shots), np.log(self.temperatures)
        return math.exp(np.interp(math.log(shots), *known))

    def covers(self, ways: int, shots: float) -> bool:
        """Whether probabilities for such a support have been fitted."""
        is_fitted = self.shots[0] <= shots <= self.shots[-1]
        return is_fitted and ways <= _MOST_WAYS * self.ways

    def __str__(self) -> str:
        first, last = self.shots[0], self.shots[-1]
        shots = f"{first}" if first == last else f"{first} to {last}"
        return f"episodes of {self.ways} classes with {shots} labelled examples of each"


class Reliability(NamedTuple):
    """How often the predicted class is right, by its probability, on held-out data."""

    probability: tuple[float, ...]  # mean of each bin of [0, 1] that holds queries
    accuracy: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def error(self) -> float:
        """Expected calibration error: the mean gap between the two over all queries.

        Reference: Guo, Pleiss, Sun, Weinberger (2017), arXiv:1706.04599.
        """
        gaps = np.abs(np.subtract(self.probability, self.accuracy))
        return float(np.average(gaps, weights=self.counts))


def calibrated(evaluation: Evaluation, learner: Any, params: Any) -> Calibration | None:
    """Returns the temperatures of a stage; None of regression, or a diverged model."""
    ways = evaluation.ways
    if learner.is_regression or ways is None or ways < 2:
        return None
    sizes = evaluation.data.population.children_counts[-1]  # of the classes
    most = int(np.median(sizes)) - evaluation.queries
    wanted = {evaluation.shots, *(shots for shots in _SHOTS if shots <= most)}
    fitted = {}
    for shots in sorted(wanted):
        logits, targets = evaluation.with_shots(shots, _EPISODES).logits(
            learner, params
        )
        if not np.isfinite(logits).all():
            return None
        fitted[shots] = _temperature(logits, targets)
    return Calibration(ways, tuple(fitted), tuple(fitted.values()))


def reliability(
    evaluation: Evaluation, learner: Any, params: Any, temperature: float
) -> Reliability:
    """Returns how reliable a stage's probabilities are on the evaluation's episodes."""
    logits, targets = evaluation.logits(learner, params)
    probabilities = scipy.special.softmax(logits / temperature, axis=1)
    top, right = probabilities.max(axis=1), logits.argmax(axis=1) == targets
    bins = np.minimum((top * _BINS).astype(int), _BINS - 1)
    counts = np.bincount(bins, minlength=_BINS)
    used = counts > 0
    means = (np.bincount(bins, x, _BINS)[used] / counts[used] for x in (top, right))
    probability, accuracy = (tuple(mean.tolist()) for mean in means)
    return Reliability(probability, accuracy, tuple(counts[used].tolist()))


def calibration_of(told: Mapping[str, Any]) -> Calibration:
    """Returns the calibration that a release's file states, checked."""
    ways = _validation.whole_number("calibration.ways", told["ways"])
    shots, temperatures = told["shots"], told["temperatures"]
    is_table = isinstance(shots, list) and isinstance(temperatures, list)
    if not is_table or not 0 < len(shots) == len(temperatures):
        raise ValueError("calibration must have one temperature for each of its shots")
    for number in shots:
        _validation.whole_number("calibration.shots", number)
    if sorted(set(shots)) != shots:
        raise ValueError(f"calibration.shots must increase, got {shots}")
    for value in temperatures:
        _validation.float32_number("calibration.temperatures", value)
    return Calibration(ways, tuple(shots), tuple(temperatures))


def _temperature(logits: np.ndarray, targets: np.ndarray) -> float:
    """The maximum-likelihood temperature.

    Targets are smoothed by one query, or a separable sample would have temperature 0.
    Reference: Platt (1999), Probabilistic outputs for support vector machines.
    """
    smooth = 1 / (len(logits) + 2)
    own, is_there = (np.arange(len(logits)), targets), logits > ABSENT

    def loss(log_scale: float) -> float:
        log_p = scipy.special.log_softmax(math.exp(log_scale) * logits, axis=1)
        spread = log_p.mean(where=is_there)
        return -float((1 - smooth) * log_p[own].mean() + smooth * spread)

    scale = scipy.optimize.minimize_scalar(loss, bounds=_LOG_SCALE, method="bounded").x
    return float(f"{math.exp(-scale):.{_DIGITS}g}")
