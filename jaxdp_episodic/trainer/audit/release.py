"""Audits of anything that releases: call it with and without the unit, and compare."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep
from jaxdp_episodic.accountant.questions.api import epsilon
from jaxdp_episodic.trainer.audit.confidence import (
    BACKWARD,
    FORWARD,
    EpsilonBound,
    best_event,
    check_confidence,
    event_bound,
)

Release = Callable[[jax.Array, bool], Any]
"""``release(key, with_unit)`` returns what is released, a pytree of arrays."""

Score = Callable[[Any], Any]
"""From a release to one number, large where the unit seems to be there."""

# At which claims are tested: with few calls a large delta shows more than a small one.
DELTAS = (1e-5, 1e-3, 1e-2, 1e-1)
# Share of the draws by which score and event are chosen; the others are counted.
CHOOSING_SHARE = 0.3
_MOST_THRESHOLDS = 2000  # that are tried for an event


class ReleaseAudit(NamedTuple):
    """What calls of a mechanism show about its epsilon; arrays over deltas.

    Attributes:
      claimed: (k,) epsilon at each delta; *upper bounds* if the claim is true.
      bounds: one a delta; all of them hold together with the stated confidence.
    """

    claimed: np.ndarray
    bounds: tuple[EpsilonBound, ...]

    @property
    def is_violated(self) -> bool:
        """True if the calls disprove the claim at a delta with 99.99 % confidence."""
        return any(
            bound.disproves(float(claim))
            for bound, claim in zip(self.bounds, self.claimed, strict=True)
        )


def claimed_epsilons(
    step: GaussianStep | ComposedSteps,
    num_steps: int | None = None,
    deltas: Sequence[float] = DELTAS,
) -> np.ndarray:
    """Returns the exact epsilons of a run at these deltas (*upper bounds*)."""
    return np.asarray(epsilon(step, num_steps=num_steps, delta=list(deltas)))


def audit_release(
    release: Release,
    *,
    claimed: Sequence[float] | np.ndarray,
    deltas: Sequence[float] = DELTAS,
    num_draws: int = 10_000,
    score: Score | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    is_jax: bool = False,
    draws_at_once: int = 4096,
    on_draws: Callable[[int], None] | None = None,
) -> ReleaseAudit:
    """Calls a mechanism many times with and without a unit; bounds epsilon from below.

    Unlike `audit_mechanism` it knows nothing of what is inside, so it catches faults of
    code: too little noise, no clipping, a unit drawn too often. A claim is a whole
    curve: several deltas are tested, and their bounds hold together.

    The first calls choose the score, where none is given (the direction in which the
    means differ), and the events; the others are counted.

    Args:
      release: ``release(key, with_unit)``. Calls must be independent given their keys;
        one that draws its own randomness, as a trainer does, may ignore the key.
      claimed: (k,) claimed epsilon at each delta; see `claimed_epsilons`.
      deltas: (k,) each in (0, 1).
      num_draws: calls with the unit, and as many without, at least 100.
      score: from what is released to a number, large where the unit seems to be
        there; must not depend on the calls. The likelihood ratio of the claimed
        mechanism is best.
      confidence: of all bounds together, in [0.5, 1).
      seed: of the keys.
      is_jax: the release and the score are JAX functions, to be vectorized over keys
        and compiled.
      draws_at_once: how many of these are vectorized.
      on_draws: is called now and then with the number of calls made since, of twice
        ``num_draws``.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a number out of range, or a score that is NaN.
    """
    levels = np.atleast_1d(_validation.open_unit_array("deltas", list(deltas)))
    claims = np.atleast_1d(_validation.nonnegative_array("claimed", list(claimed)))
    if claims.shape != levels.shape or claims.ndim != 1:
        raise ValueError(
            f"claimed must have one epsilon a delta, got shapes {claims.shape} and "
            f"{levels.shape}"
        )
    number = _validation.whole_number("num_draws", num_draws, minimum=100)
    check_confidence(confidence)
    of_call = _scored(release, score, is_jax, draws_at_once, on_draws or (lambda _: 0))
    key = jax.random.key(seed)

    def scores(number: int, direction: np.ndarray | None = None) -> Any:
        """Scores of fresh calls with the unit, and without it."""
        nonlocal key
        found = []
        for is_in in (True, False):
            key, fresh = jax.random.split(key)
            parts = of_call(fresh, number, is_in)
            rows = [part if direction is None else part @ direction for part in parts]
            found.append(np.concatenate(rows)[:number])
        return tuple(found)

    choosing = int(CHOOSING_SHARE * number)
    choice, direction = scores(choosing), None
    if score is None:
        direction = choice[0].mean(axis=0) - choice[1].mean(axis=0)
        choice = choice[0] @ direction, choice[1] @ direction
    counted = scores(number - choosing, direction)
    return ReleaseAudit(claims, score_bounds(choice, counted, levels, confidence))


def score_bounds(
    choice: tuple[np.ndarray, np.ndarray],
    counted: tuple[np.ndarray, np.ndarray],
    deltas: Sequence[float] | np.ndarray,
    confidence: float = 0.95,
) -> tuple[EpsilonBound, ...]:
    """Returns the bound at each delta that scores of independent releases show.

    Args:
      choice: scores ``(with the unit, without)``, by which the events are chosen.
      counted: others, equally many of both, that are counted.
      deltas: each in (0, 1).
      confidence: of all bounds together.

    Raises:
      ValueError: unequal numbers of scores, or NaN among them.
    """
    if len(counted[0]) != len(counted[1]) or len(choice[0]) != len(choice[1]):
        raise ValueError(
            "scores must be equally many with and without the unit, got "
            f"{len(counted[0])} and {len(counted[1])}"
        )
    if any(np.isnan(s).any() for s in (*choice, *counted)):
        raise ValueError("scores must not be NaN")
    number, share = len(counted[0]), 1 / len(deltas)
    edges, events = {}, {}
    for direction, sign, both in (
        (FORWARD, 1.0, choice),
        (BACKWARD, -1.0, choice[::-1]),
    ):
        edges[direction] = _thresholds(sign * np.concatenate(choice))
        hits, misses = (
            len(one) - np.searchsorted(np.sort(sign * one), edges[direction], "right")
            for one in both
        )
        # One more: an event without a false hit yet may still have a chance of one.
        events[direction] = hits, misses + 1
    error, bounds = share * (1 - confidence), []
    for delta in map(float, deltas):
        direction, index = best_event(
            events, len(choice[0]), num_later=number, delta=delta, error=error
        )
        sign, edge = 1.0 if direction == FORWARD else -1.0, edges[direction][index]
        above = [int(np.sum(sign * one > edge)) for one in counted]
        hits, misses = above if sign > 0 else above[::-1]
        bounds.append(
            event_bound(
                hits,
                misses,
                number,
                delta=delta,
                confidence=confidence,
                direction=direction,
                threshold=sign * edge,
                share=share,
            )
        )
    return tuple(bounds)


def _thresholds(scores: np.ndarray) -> np.ndarray:
    """Scores to be tried as thresholds, more of the large ones."""
    scores = np.unique(scores)
    if len(scores) <= _MOST_THRESHOLDS:
        return scores
    ranks = np.geomspace(1, len(scores), _MOST_THRESHOLDS)
    return scores[len(scores) - np.unique(ranks.astype(int))]


def _scored(
    release: Release,
    score: Score | None,
    is_jax: bool,
    draws_at_once: int,
    on_draws: Callable[[int], Any],
) -> Callable[[jax.Array, int, bool], Iterator[np.ndarray]]:
    """Yields scores of calls with fresh keys; without a score, all released numbers."""
    numpy: Any = jnp if is_jax else np

    def flat(released: Any) -> Any:
        leaves = jax.tree.leaves(released)
        return numpy.concatenate([numpy.ravel(leaf) for leaf in leaves])

    def one_call(key: jax.Array, is_in: bool) -> Any:
        return (flat if score is None else score)(release(key, is_in))

    def one_by_one(key: jax.Array, number: int, is_in: bool) -> Iterator[np.ndarray]:
        # JAX compiles for seconds to take an array of keys apart; NumPy does not.
        data = np.asarray(jax.random.key_data(jax.random.split(key, number)))
        kind = jax.random.key_impl(key)
        for row in data:
            scored = one_call(jax.random.wrap_key_data(row, impl=kind), is_in)
            yield np.asarray(scored, np.float64)[None]
            on_draws(1)

    compiled = {
        is_in: jax.jit(jax.vmap(functools.partial(one_call, is_in=is_in)))
        for is_in in (True, False)
    }

    def vectorized(key: jax.Array, number: int, is_in: bool) -> Iterator[np.ndarray]:
        size = min(draws_at_once, number)
        for done in range(0, number, size):
            keys = jax.random.split(jax.random.fold_in(key, done), size)
            yield np.asarray(compiled[is_in](keys), np.float64)
            on_draws(size)

    return vectorized if is_jax else one_by_one
