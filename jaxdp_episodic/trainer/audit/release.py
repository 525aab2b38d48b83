"""Audits of anything that releases: call it with and without the unit, and compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.step import ComposedSteps, GaussianStep
from jaxdp_episodic.accountant.questions.api import epsilon
from jaxdp_episodic.trainer.audit.bounds import (
    CHOOSING_SHARE,
    EpsilonBound,
    check_confidence,
    score_bounds,
)

Release = Callable[[jax.Array, bool], Any]
"""``release(key, with_unit)`` returns what is released, a pytree of arrays."""

Score = Callable[[Any], Any]
"""From a release to one number, large where the unit seems to be there."""

# At which claims are tested: with few calls a large delta shows more than a small one.
DELTAS = (1e-5, 1e-3, 1e-2, 1e-1)


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
        """Whether the calls disprove the claim at a delta with 99.99 % confidence."""
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


def checked_claim(
    claimed: Any, deltas: Any, num_draws: Any, confidence: float
) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the claims, deltas and draws of an audit, or refuses them."""
    levels = np.atleast_1d(_validation.open_unit_array("deltas", list(deltas)))
    claims = np.atleast_1d(_validation.nonnegative_array("claimed", list(claimed)))
    if claims.shape != levels.shape or claims.ndim != 1:
        raise ValueError(
            f"claimed must have one epsilon a delta, got shapes {claims.shape} and "
            f"{levels.shape}"
        )
    check_confidence(confidence)
    number = _validation.whole_number("num_draws", num_draws, minimum=100)
    return claims, levels, number


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

    It knows nothing of what is inside, so it catches faults of code: too little noise,
    no clipping, a unit drawn too often. A claim is a whole curve: several deltas are
    tested, and their bounds hold together.

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
    claims, levels, number = checked_claim(claimed, deltas, num_draws, confidence)
    call = _scored(release, score, is_jax, draws_at_once)
    keys = jax.random.split(jax.random.key(seed), 4)

    def scores(part: Any, number: int, direction: np.ndarray | None) -> Any:
        """Scores of fresh calls with the unit, and without it."""
        found = []
        for key, is_in in zip(part, (True, False), strict=True):
            rows = []
            for called in call(key, number, is_in):
                rows.append(called if direction is None else called @ direction)
                if on_draws is not None:
                    on_draws(len(called))
            found.append(np.concatenate(rows)[:number])
        return tuple(found)

    choosing = int(CHOOSING_SHARE * number)
    choice, direction = scores(keys[:2], choosing, None), None
    if score is None:
        direction = choice[0].mean(axis=0) - choice[1].mean(axis=0)
        choice = choice[0] @ direction, choice[1] @ direction
    counted = scores(keys[2:], number - choosing, direction)
    return ReleaseAudit(claims, score_bounds(choice, counted, levels, confidence))


def _scored(
    release: Release, score: Score | None, is_jax: bool, draws_at_once: int
) -> Callable[[jax.Array, int, bool], Any]:
    """Yields scores of calls with fresh keys; without a score, all released numbers."""
    numpy: Any = jnp if is_jax else np

    def flat(released: Any) -> Any:
        leaves = jax.tree.leaves(released)
        return numpy.concatenate([numpy.ravel(leaf) for leaf in leaves])

    def one_call(key: jax.Array, is_in: bool) -> Any:
        return (flat if score is None else score)(release(key, is_in))

    def one_by_one(key: jax.Array, number: int, is_in: bool) -> Any:
        # JAX compiles for seconds to take an array of keys apart; NumPy does not.
        data = np.asarray(jax.random.key_data(jax.random.split(key, number)))
        kind = jax.random.key_impl(key)
        for row in data:
            scored = one_call(jax.random.wrap_key_data(row, impl=kind), is_in)
            yield np.asarray(scored, np.float64)[None]

    compiled = jax.jit(jax.vmap(one_call, in_axes=(0, None)), static_argnums=1)

    def vectorized(key: jax.Array, number: int, is_in: bool) -> Any:
        size = min(draws_at_once, number)
        for done in range(0, number, size):
            keys = jax.random.split(jax.random.fold_in(key, done), size)
            yield np.asarray(compiled(keys, is_in), np.float64)

    return vectorized if is_jax else one_by_one
