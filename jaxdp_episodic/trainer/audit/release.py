"""Audits of anything that releases: call it with and without the unit, and compare."""

from __future__ import annotations

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

DELTAS = (1e-5, 1e-3, 1e-2, 1e-1)
_CHOOSING = 0.3
_MOST_THRESHOLDS = 2000


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
    curve, and with few calls a large delta shows more than a small one; so several
    deltas are tested, and their bounds hold together.

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
    calls = _Calls(
        release, score, jax.random.key(seed), is_jax, draws_at_once, on_draws
    )
    choosing = int(_CHOOSING * number)
    pilot = calls.scores(choosing, True), calls.scores(choosing, False)
    direction = None
    if score is None:
        direction = pilot[0].mean(axis=0) - pilot[1].mean(axis=0)
        pilot = pilot[0] @ direction, pilot[1] @ direction
    counting = number - choosing
    scores = (
        calls.scores(counting, True, direction),
        calls.scores(counting, False, direction),
    )
    bounds = [
        score_bound(
            pilot,
            scores,
            delta=float(delta),
            confidence=confidence,
            share=1 / len(levels),
        )
        for delta in levels
    ]
    return ReleaseAudit(claims, tuple(bounds))


def score_bound(
    pilot: tuple[np.ndarray, np.ndarray],
    scores: tuple[np.ndarray, np.ndarray],
    *,
    delta: float,
    confidence: float = 0.95,
    share: float = 1.0,
) -> EpsilonBound:
    """Returns the bound that scores of many independent releases show.

    Args:
      pilot: scores ``(with the unit, without)``, by which the event is chosen.
      scores: others, equally many of both, that are counted.
      delta: in (0, 1).
      confidence: of the bound, or of several.
      share: what part of the error this one may take.

    Raises:
      ValueError: unequal numbers of scores, or NaN among them.
    """
    if len(scores[0]) != len(scores[1]) or len(pilot[0]) != len(pilot[1]):
        raise ValueError(
            "scores must be equally many with and without the unit, got "
            f"{len(scores[0])} and {len(scores[1])}"
        )
    if any(np.isnan(s).any() for s in (*pilot, *scores)):
        raise ValueError("scores must not be NaN")
    number = len(scores[0])
    edges, events = {}, {}
    for direction, sign, both in ((FORWARD, 1.0, pilot), (BACKWARD, -1.0, pilot[::-1])):
        edges[direction] = _thresholds(sign * np.concatenate(pilot))
        hits, misses = (
            len(one) - np.searchsorted(np.sort(sign * one), edges[direction], "right")
            for one in both
        )
        # One more: an event that has not come yet is not one that never comes.
        events[direction] = hits, misses + 1
    direction, place = best_event(
        events,
        len(pilot[0]),
        num_later=number,
        delta=delta,
        error=share * (1 - confidence),
    )
    sign, edge = 1.0 if direction == FORWARD else -1.0, edges[direction][place]
    above = [int(np.sum(sign * one > edge)) for one in scores]
    hits, misses = above if sign > 0 else above[::-1]
    return event_bound(
        hits,
        misses,
        number,
        delta=delta,
        confidence=confidence,
        direction=direction,
        threshold=sign * edge,
        share=share,
    )


def _thresholds(scores: np.ndarray) -> np.ndarray:
    """Scores of the pilot to be tried, more of the large ones."""
    scores = np.unique(scores)
    if len(scores) <= _MOST_THRESHOLDS:
        return scores
    ranks = np.geomspace(1, len(scores), _MOST_THRESHOLDS)
    return scores[len(scores) - np.unique(ranks.astype(int))]


class _Calls:
    """Calls a mechanism with keys that are never used twice, and scores it."""

    def __init__(
        self,
        release: Release,
        score: Score | None,
        key: jax.Array,
        is_jax: bool,
        at_once: int,
        on_draws: Callable[[int], None] | None,
    ) -> None:
        self._key, self._is_jax = key, is_jax
        self._at_once, self._on_draws = at_once, on_draws
        of_release = self._flat if score is None else score
        self._scored: dict[bool, Callable[[jax.Array], Any]] = {
            is_in: lambda one, is_in=is_in: of_release(release(one, is_in))
            for is_in in (True, False)
        }
        if is_jax:  # compiled once, for the pilot and for what is counted
            for is_in, scored in self._scored.items():
                self._scored[is_in] = jax.jit(jax.vmap(scored))

    def _flat(self, released: Any) -> Any:
        """All numbers of a release, as one vector."""
        numpy: Any = jnp if self._is_jax else np
        leaves = [numpy.ravel(leaf) for leaf in jax.tree.leaves(released)]
        return numpy.concatenate(leaves)

    def scores(
        self, number: int, with_unit: bool, direction: np.ndarray | None = None
    ) -> np.ndarray:
        """(number, ...) scores of fresh calls; of vectors, along a direction."""
        self._key, key = jax.random.split(self._key)
        parts = self._vectorized if self._is_jax else self._in_turn
        rows = [
            part if direction is None else part @ direction
            for part in parts(key, number, self._scored[with_unit])
        ]
        return np.concatenate(rows)[:number]

    def _in_turn(
        self, key: jax.Array, number: int, scored: Callable[[jax.Array], Any]
    ) -> Iterator[np.ndarray]:
        # JAX compiles for seconds to take an array of keys apart; NumPy does not.
        data = np.asarray(jax.random.key_data(jax.random.split(key, number)))
        kind = jax.random.key_impl(key)
        for one in data:
            row = scored(jax.random.wrap_key_data(one, impl=kind))
            yield np.asarray(row, np.float64)[None]
            self._count(1)

    def _vectorized(
        self, key: jax.Array, number: int, scored: Callable[[jax.Array], Any]
    ) -> Iterator[np.ndarray]:
        size = min(self._at_once, number)
        for done in range(0, number, size):
            keys = jax.random.split(jax.random.fold_in(key, done), size)
            yield np.asarray(scored(keys), np.float64)
            self._count(size)

    def _count(self, calls: int) -> None:
        if self._on_draws is not None:
            self._on_draws(calls)
