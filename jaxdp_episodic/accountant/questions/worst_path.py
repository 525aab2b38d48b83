"""Epsilon or delta of a run by any method: composes each path, then maximizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxdp_episodic.accountant.losses.privacy_loss import PrivacyLoss, Profile
from jaxdp_episodic.accountant.methods import rdp
from jaxdp_episodic.accountant.methods.certified import method as pld
from jaxdp_episodic.accountant.methods.exact import method as exact
from jaxdp_episodic.accountant.methods.run import Answer, Question, Run

# Methods by their public name.
METHODS: dict[str, Callable[[Question, Run], Answer]] = {
    "exact": exact.exact_answer,
    "pld": pld.pld_answer,
    "rdp": rdp.rdp_answer,
}
# "exact" for calibration, with the Rényi bound instead of certified ends.
CONTOUR = "contour"
_ANSWERS = {**METHODS, CONTOUR: functools.partial(exact.exact_answer, certify=False)}
# Rates are rounded up to powers of exp(spacing); the finest, 0.1 %, is tried first.
_FINEST_SPACING = 2.0**-10
# Factor by which the spacing grows.
_COARSER = 2.0**0.5
# Relative; exceeds the rounding errors of log and exp of a rate above 1e-300.
_ROUNDING_MARGIN = 1e-12
# Largest number of comparisons; after it, paths that may be dominated are kept.
_MOST_COMPARISONS = 10**8


def answer(question: Question, runs: Sequence[Run], method: str) -> Answer:
    """Returns epsilon or log(delta) of the worst path, the smallest over the runs."""
    question = question.at(np.asarray(question.target, np.float64)[..., None])
    every, alone = [], len(runs) == 1
    for run in runs:
        run.refuse("exact" if method == CONTOUR else method)
        # Of several runs the smallest counts on each path, so all paths are needed.
        if alone and run.shape[-1] > 1:
            run = run.take_paths(undominated_paths(run))
        shape = np.broadcast_shapes(question.target.shape, run.shape)
        nothing = np.zeros(shape)
        if 0 in shape:
            every.append(Answer(nothing, nothing, np.zeros(shape, bool)))
            continue
        little = run.facts.has_too_little_noise
        if np.any(run.facts.is_unprotected):
            run = run.in_reach()
        log_kept, most = run.facts.log_kept, run.facts.most_lost
        at_end, end, asked = question.at_end(most), nothing, question
        if some_at_end := np.any(at_end):
            end = np.broadcast_to(question.end_value(most, log_kept), shape)
            if np.all(at_end):
                every.append(Answer(end, nothing, np.zeros(shape, bool)))
                continue
            asked = question.inside()
        kept, left = run, asked
        if may_fail := np.any(log_kept) or np.any(little):  # given a finite loss
            kept, left = run.kept(), asked.given_kept(log_kept)
            left = left.at(np.where(np.isneginf(left.target), -1.0, left.target))
        if alone and kept.shape[-1] > 1 and not (may_fail or method == "rdp"):
            found = _of_worst(left, kept, method)
        else:
            found = _at_most(_ANSWERS[method](left, kept), left, kept)
        if may_fail:  # bounds if there is little noise
            value, error, certified = found
            hopeless = np.isneginf(asked.given_kept(log_kept).target)
            value = asked.with_failure(value, log_kept)
            bound = little & (value != asked.nothing)
            error = np.where(bound, np.inf, np.where(hopeless, 0.0, error))
            certified = (certified & ~hopeless) | (bound & (method != "rdp"))
            found = Answer(value, error, certified)
        if some_at_end:
            value, error = np.where(at_end, (end, nothing), found[:2])
            found = Answer(value, error, ~at_end & found.is_certified)
        every.append(found)
    value, error, certified = every[0] if alone else chosen(every, np.argmin)
    if value.shape[-1] == 1:
        return Answer(value[..., 0], error[..., 0], certified[..., 0])
    index = value.argmax(axis=-1)[..., None]
    fields = (value, error, certified)
    return Answer(*(np.take_along_axis(a, index, -1)[..., 0] for a in fields))


def chosen(found: Sequence[Sequence[Any]], arg_best: Any) -> list[np.ndarray]:
    """Returns the fields of the tuples with the best first field, by setting."""
    shape = np.broadcast_shapes(*(np.shape(field) for one in found for field in one))
    fields = [
        np.stack([np.broadcast_to(part, shape) for part in field])
        for field in zip(*found, strict=True)
    ]
    index = arg_best(fields[0], axis=0)[None]
    return [np.take_along_axis(field, index, axis=0)[0] for field in fields]


def _at_most(found: Answer, question: Question, run: Run) -> Answer:
    """An answer on each path, lowered to what the largest loss implies."""
    most = run.facts.most_lost
    if question.is_epsilon:
        found = found._replace(value=np.minimum(found.value, most))
    elif np.any(limited := np.isfinite(most)):
        bound = np.maximum(
            *(_near_largest(question.target, run, backward=b) for b in (False, True))
        )
        lower = limited & (bound < found.value)
        found = found._replace(
            value=np.where(lower, bound, found.value),
            is_certified=found.is_certified | lower,
        )
    return found


@np.errstate(all="ignore")
def _near_largest(epsilon: np.ndarray, run: Run, *, backward: bool) -> np.ndarray:
    """Bound on log(delta) in a direction whose largest loss is just above epsilon."""
    gap = np.maximum(run.facts.largest_losses[backward] - epsilon, 0.0)
    gap = np.where(run.facts.is_unprotected, np.inf, gap)
    chance = np.zeros(gap.shape)
    for loss, count in zip(run.losses, run.counts, strict=True):
        # The largest loss is rounded; an infinite one gives no bound.
        u = loss.largest_loss(backward=backward) * (1 - 1e-12) - gap
        inside = np.isfinite(u) & (u > 0) & (count > 0) & ~loss.loses_nothing
        if not isinstance(loss, Profile) or not np.any(inside):
            continue  # no tail probability is known, or it is 1
        tails = loss.kept_in_range().log_tails(np.where(inside, u, 1.0))
        within = np.fmin(np.logaddexp(*tails[backward]) + 1e-12, 0.0)
        chance += np.where(inside, count * np.where(inside, within, 0.0), 0.0)
    return np.log(-np.expm1(-gap)) + chance


def _of_worst(question: Question, run: Run, method: str) -> Answer:
    """The answers of the paths that may be the worst; -inf for the others."""
    shape = np.broadcast_shapes(question.target.shape, run.shape)
    bound = rdp.rdp_answer(question, run).value.reshape(-1, shape[-1])
    target = np.broadcast_to(question.target, shape).reshape(bound.shape)
    flat = run.map(lambda field: np.broadcast_to(field, shape).reshape(bound.shape))
    nothing = np.full(bound.shape, -np.inf)
    found = Answer(nothing, np.zeros(bound.shape), np.zeros(bound.shape, bool))

    def ask(row: np.ndarray, path: np.ndarray) -> None:
        some = flat.map(lambda field: field[row, path])
        asked = question.at(target[row, path])
        part = _at_most(_ANSWERS[method](asked, some), asked, some)
        for every, values in zip(found, part, strict=True):
            every[row, path] = values

    settings, first = np.arange(len(bound)), bound.argmax(axis=1)
    ask(settings, first)
    others = bound > found.value[settings, first][:, None]
    others[settings, first] = False
    if np.any(others):
        ask(*np.nonzero(others))
    return Answer(*(field.reshape(shape) for field in found))


def undominated_paths(run: Run) -> np.ndarray:
    """Returns the paths that may be the worst at some target."""
    columns = _columns(run)
    if columns.shape[1] == 0:
        return np.arange(min(run.shape[-1], 1))
    _, first = np.unique(columns, axis=0, return_index=True)
    # Ranks have the order of the numbers, are fast to compare and can be added: no
    # other path dominates the one with the largest sum.
    ranks = [np.unique(column, return_inverse=True)[1] for column in columns[first].T]
    left = first[np.argsort(-np.sum(ranks, axis=0), kind="stable")]
    kept = []
    budget = _MOST_COMPARISONS
    while left.size and budget > 0:
        best = left[0]
        kept.append(best)
        left = left[(columns[left] > columns[best]).any(axis=1)]
        budget -= left.size * columns.shape[1] + 1
    return np.sort(np.concatenate([np.array(kept, np.int64), left]))


def equal_paths(run: Run, path: int) -> np.ndarray:
    """Returns the paths whose dominating pairs equal those of one path."""
    columns = _columns(run)
    return np.flatnonzero((columns == columns[path]).all(axis=1))


def rounded_up(run: Run, most: int) -> tuple[Run, np.ndarray, float]:
    """Returns a run on at most ``most`` paths, with rates rounded up.

    Also the new path of each old one, and the largest relative increase of a rate.
    """
    coarse, spacing, excess = run, 0.0, 0.0
    while True:
        _, first, group = np.unique(
            _columns(coarse), axis=0, return_index=True, return_inverse=True
        )
        # From a spacing of 1024 every positive rate has become 1.
        if len(first) <= most or spacing > 1024:
            return coarse.take_paths(first), group.reshape(-1), excess
        spacing = spacing * _COARSER or _FINEST_SPACING
        coarse = Run(tuple(_rounded(one, spacing) for one in run.losses), run.counts)
        excess = float(np.expm1(spacing)) if spacing < 700 else np.inf
        excess += 2 * _ROUNDING_MARGIN


def _columns(run: Run) -> np.ndarray:
    """(P, D) the numbers that differ between paths; epsilon increases in each."""
    paths = run.shape[-1]
    parts = [np.zeros((paths, 0))]
    for loss in run.losses:
        for field in loss.fields:
            if np.shape(field)[-1:] not in ((), (1,)):
                column = np.moveaxis(field, -1, 0).reshape(paths, -1)
                parts.append(column[:, (column != column[:1]).any(axis=0)])
    return np.concatenate(parts, axis=1)


def _rounded(loss: PrivacyLoss, spacing: float) -> PrivacyLoss:
    """The loss with each rate that varies rounded up to a power of exp(spacing)."""

    def up(rate: np.ndarray) -> np.ndarray:
        if rate.shape[-1] == 1:
            return rate
        with np.errstate(divide="ignore"):  # log(0) = -inf: 0 stays 0
            power = np.ceil(np.log(rate) / spacing) * spacing
        raised = np.minimum(np.exp(power) * (1 + _ROUNDING_MARGIN), 1.0)
        return np.maximum(raised, rate)

    rates = {name: up(rate) for name, rate in loss.rates.items()}
    return dataclasses.replace(loss, **rates)
