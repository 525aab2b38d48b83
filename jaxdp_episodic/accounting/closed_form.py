"""Runs of one mechanism whose composition has a closed form."""

from __future__ import annotations

import numpy as np

from jaxdp_episodic.accounting.question import Question
from jaxdp_episodic.accounting.run import Run
from jaxdp_episodic.losses.sampled_gaussian import SampledGaussianLoss

# Of the shift of composed Gaussians: of as many roundings as steps and a few.
_SHIFT_ROUNDING = 4e-16


def are_alike(run: Run) -> np.ndarray:
    """Where all steps are of one mechanism that has a closed form of several."""
    shape = run.shape  # of all losses: a run of thousands would ask for it as often
    alike = np.ones(shape, bool)
    # The first step that is taken, and what the others must agree with.
    kind, key = np.full(shape, -1), np.full(shape, np.nan)
    kinds = list(dict.fromkeys(type(loss) for loss in run.losses))
    for loss, count in zip(run.losses, run.counts, strict=True):
        taken = (count > 0) & ~loss.loses_nothing
        form = loss.composes_by
        own = np.full(shape, np.nan) if form is None else form
        number = kinds.index(type(loss))
        first = taken & (kind < 0)
        kind, key = np.where(first, number, kind), np.where(first, own, key)
        alike &= ~taken | ((kind == number) & (key == own))
    return alike & (kind >= 0)


def composed(question: Question, run: Run) -> tuple[float, float]:
    """One setting by the closed form of its mechanism."""
    taken = [
        (loss, float(count))
        for loss, count in zip(run.losses, run.counts, strict=True)
        if count > 0 and not loss.loses_nothing
    ]
    loss = taken[0][0].kept_in_range()
    count = sum(count for _, count in taken)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        return loss.composed(
            float(question.target), count, of_epsilon=question.is_epsilon
        )


def one_gaussian(shift: np.ndarray) -> SampledGaussianLoss:
    """The one step that composed Gaussian steps are; see `Run.gaussian_shift`."""
    always = np.ones(np.shape(shift))
    return SampledGaussianLoss(always, always, shift)


def shift_error(run: Run) -> float:
    """Bound of the rounding error of `Run.gaussian_shift`, relative."""
    return _SHIFT_ROUNDING * (2 + len(run.losses))
