"""Rényi-DP read at given orders only, without a search."""

from __future__ import annotations

import numpy as np

from jaxdp_episodic.accounting.question import Answer, Question
from jaxdp_episodic.accounting.rdp.method import rdp_curve
from jaxdp_episodic.accounting.run import Run


def answer_at_orders(
    question: Question, run: Run, orders: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds of epsilon or log(delta) by the best of some orders, and its place.

    Args:
      question: broadcasts with the run, settings by paths.
      run: any that Rényi-DP answers.
      orders: (K,) each > 1; inf stands for the largest loss.

    Reference: Canonne, Kamath, Steinke (2020), arXiv:2004.00010, Proposition 12.
    """
    endless, log_kept = np.isinf(orders), run.log_kept()
    target = question.given_kept(log_kept).target[..., None]
    curve = rdp_curve(np.where(endless, 2.0, orders), run.with_axis(), "forward")
    curve = np.where(endless, run.most_lost[..., None], curve)
    if question.is_epsilon:
        values = epsilons_at_orders(curve, orders, target)
    else:
        t = orders - 1
        with np.errstate(invalid="ignore"):  # inf - inf where nothing is protected
            gap = curve - target + np.log1p(-1 / orders)
            values = np.where(gap == 0, 0.0, t * gap) - np.log(orders)
            values = np.where(endless, np.where(gap <= 0, -np.inf, 0.0), values)
        values = np.minimum(values, 0.0)
    values = np.where(np.isnan(values), question.everything, values)
    nothing_lost = (curve == 0).all(axis=-1, keepdims=True)
    values = np.where(nothing_lost, question.nothing, values)
    answer = values.min(axis=-1)
    if np.any(log_kept):
        found = Answer(answer, np.zeros(()), np.zeros(()))
        answer = question.with_failure(found, log_kept).value
    if question.is_epsilon:
        at_one = np.where(run.is_unprotected, np.inf, 0.0)
        answer = np.where(question.target >= 0, at_one, answer)
    answer = np.where(run.loses_nothing, question.nothing, answer)
    return answer, values.argmin(axis=-1)


def epsilons_at_orders(
    curve: np.ndarray, orders: np.ndarray, log_delta: np.ndarray
) -> np.ndarray:
    """(..., K) what a curve's value at each of the orders says of epsilon, >= 0."""
    t = orders - 1
    with np.errstate(invalid="ignore"):  # inf - inf where nothing is protected
        penalty = np.where(np.isinf(t), 0.0, (log_delta + np.log(orders)) / t)
        return np.maximum(curve + np.log1p(-1 / orders) - penalty, 0.0)
