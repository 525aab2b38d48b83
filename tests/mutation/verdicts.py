"""The verdict of a check, and the effort of a check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxdp_episodic.audit import EpsilonBound


class Effort(NamedTuple):
    """The effort of a check."""

    releases: int  # that an audit draws with the unit, and as many without
    draws: int  # of a sampler


QUICK = Effort(releases=1_200, draws=2_000)  # of the tests
FULL = Effort(releases=50_000, draws=20_000)  # of `make trust`


class Verdict(NamedTuple):
    """What a check found, and the numbers that say so."""

    is_caught: bool
    evidence: str
    claimed: float | None = None  # *upper bound* if the claim is true
    audited: float | None = None  # *lower bound*


Check = Callable[[Effort], Verdict]


def of_bounds(bounds: Sequence[EpsilonBound], claims: np.ndarray) -> Verdict:
    """The audit at the delta where the claim fails most, or comes closest to it."""

    def failure(pair: tuple[EpsilonBound, float]) -> tuple[bool, float]:
        bound, claimed = pair
        return bound.disproves(claimed), bound.epsilon - claimed

    pairs = zip(bounds, claims.tolist(), strict=True)
    return of_bound(*max(pairs, key=failure))


def of_bound(bound: EpsilonBound, claimed: float) -> Verdict:
    """An audit against a claimed epsilon."""
    is_caught, audited = bound.disproves(claimed), bound.epsilon
    # The rest may be due to chance.
    sign = ">" if is_caught else "(>)" if audited > claimed else "<="
    numbers = f"audited {audited:.3f} {sign} claimed {claimed:.3f}"
    return Verdict(is_caught, f"{numbers} at delta {bound.delta:g}", claimed, audited)
