"""Audits of a described run: simulate the worst case, count, bound epsilon below."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.schemes import PERSON
from jaxdp_episodic.accountant.describe.step import (
    AnyStep,
    ComposedSteps,
    GaussianStep,
    gaussian_parts,
)
from jaxdp_episodic.accountant.methods.question import EpsilonAt
from jaxdp_episodic.accountant.methods.rdp.method import rdp_bound
from jaxdp_episodic.accountant.questions.api import epsilon
from jaxdp_episodic.accountant.questions.dominating_pair import run_of
from jaxdp_episodic.trainer.audit.confidence import (
    BACKWARD,
    FORWARD,
    MOST_TRIALS,
    EpsilonBound,
    best_event,
    check_confidence,
    event_bound,
)
from jaxdp_episodic.trainer.audit.simulation import (
    NUM_BINS,
    exceedances,
    histogram,
    make_part,
    tallied,
)
from jaxdp_episodic.trainer.audit.worst_case import (
    Branches,
    dominating_branches,
    tables_of_run,
    worst_case,
)

# Share of the draws by which the event is chosen; the others are counted.
_CHOOSING_SHARE = 0.1
_MOST_NATS = 100.0  # no count of draws shows an epsilon near it


class MechanismAudit(NamedTuple):
    """The claim about a run, and what its simulation shows.

    Attributes:
      num_steps: of the run.
      claimed_rdp: epsilon by Rényi-DP; *upper bound*.
      claimed_exact: epsilon by the method "exact"; *upper bound*.
      dominating_pair: audit of what is accounted. Its bound tends to
        ``claimed_exact`` with the number of draws.
      fixed_data: audit of an actual mechanism, its data sets and contributions fixed.
        Where no data set reaches the dominating pair it stays below.
      is_one_audit: the two are the same mechanism, which was simulated once.
      seconds: that the simulation took.
      has_pair: what is accounted could be simulated; that of people cannot, and the
        audit is of fixed data in its place.
    """

    num_steps: int
    claimed_rdp: float
    claimed_exact: float
    dominating_pair: EpsilonBound
    fixed_data: EpsilonBound
    is_one_audit: bool
    seconds: float
    has_pair: bool = True

    @property
    def is_violated(self) -> bool:
        """True if an audit disproves a claim with 99.99 % confidence."""
        claimed = min(self.claimed_rdp, self.claimed_exact)
        return any(
            bound.disproves(claimed)
            for bound in (self.dominating_pair, self.fixed_data)
        )


def audit_mechanism(
    step: AnyStep,
    *,
    delta: float,
    num_steps: int | None = None,
    num_draws: int = 10**8,
    confidence: float = 0.95,
    seed: int = 0,
    on_draws: Callable[[int], None] | None = None,
) -> MechanismAudit:
    """Simulates a run with worst-case contributions and bounds its epsilon from below.

    The event is chosen by a tenth of the draws, among thresholds of the sum of the
    steps' log-likelihood ratios, in both directions of the neighbouring relation. How
    often it comes in the others is tested exactly, both counts at once (`ratio_test`).

    Args:
      step: one setting, all fields scalars, with noise; or a composed run. With a
        `Population` the path that costs most by Rényi-DP is simulated.
      delta: in (0, 1).
      num_steps: whole number >= 1; None for a composed run.
      num_draws: runs to simulate with the unit, and as many without, 100 to 10^10.
      confidence: of each lower bound, in [0.5, 1).
      seed: of the simulation.
      on_draws: is called now and then with the number of runs simulated since, of
        `total_draws` in all.

    Returns:
      The claim and the audits; the bounds are *lower bounds* of epsilon.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range, arrays in the step, or no noise.
      NotImplementedError: a step that no theorem covers or no table describes.
    """
    parts = _checked_parts(step, num_steps)
    _validation.open_unit_array("delta", delta)
    run: dict[str, Any] = {"delta": delta, "num_steps": num_steps}
    exact = float(epsilon(step, **run))
    claimed_rdp = float(epsilon(step, method="rdp", **run))
    _validation.whole_number("num_draws", num_draws, minimum=100, maximum=MOST_TRIALS)
    check_confidence(confidence)
    path = _worst_path(step, num_steps, delta)
    begun = time.perf_counter()
    tables = [_tables(make, parts, path) for make in (dominating_branches, worst_case)]
    is_one = _is_one(*tables)
    bounds = [
        audit_branches(
            table,
            delta=delta,
            num_draws=num_draws,
            confidence=confidence,
            reach=3 * min(exact, claimed_rdp, _MOST_NATS) + 1,
            key=jax.random.fold_in(jax.random.key(seed), index),
            on_draws=on_draws,
        )
        for index, table in enumerate(tables[:1] if is_one else tables)
    ]
    seconds = time.perf_counter() - begun
    total = sum(count for _, count in parts)
    has_pair = all(part.privacy_unit != PERSON for part, _ in parts)
    return MechanismAudit(
        total, claimed_rdp, exact, bounds[0], bounds[-1], is_one, seconds, has_pair
    )


def total_draws(step: AnyStep, num_draws: int) -> int:
    """Returns about how many runs an audit simulates, with the unit and without."""
    parts = [(part, 1) for part in gaussian_parts(step, "an audit")]
    is_one = _is_one(
        *(_tables(make, parts, 0) for make in (dominating_branches, worst_case))
    )
    return 2 * num_draws * (1 if is_one else 2)


def audit_branches(
    run: Sequence[tuple[Branches, int]],
    *,
    delta: float,
    num_draws: int,
    reach: float,
    key: jax.Array,
    confidence: float = 0.95,
    on_draws: Callable[[int], None] | None = None,
) -> EpsilonBound:
    """Returns a lower bound of the epsilon of a run given as tables.

    Each table is of a step (or block), with how many such there are. ``reach`` is the
    largest loss that can be a threshold; ``num_draws`` include those that choose it.
    """
    parts = [make_part(branches, count) for branches, count in run]
    keys = jax.random.split(key, 4)
    choosing = max(int(_CHOOSING_SHARE * num_draws), 1)
    counting = num_draws - choosing

    def counted(keys: Any, number: int, tally: Any, edges: list[float]) -> list[Any]:
        return [
            tallied(
                parts, key, number, tally, edges, with_unit=is_in, on_draws=on_draws
            )
            for key, is_in in zip(keys, (True, False), strict=True)
        ]

    (with_unit, _), (without, _) = counted(keys[:2], choosing, histogram, [reach])
    direction, index = best_event(
        {FORWARD: _tails(with_unit, reach), BACKWARD: _tails(without[::-1], reach)},
        int(with_unit.sum()),
        num_later=counting,
        delta=delta,
        error=1 - confidence,
    )
    edge = np.linspace(-reach, reach, NUM_BINS + 1)[1:-1][index]
    threshold = edge if direction == FORWARD else -edge
    (above_with, number), (above_without, _) = counted(
        keys[2:], counting, exceedances, [threshold]
    )
    hits, misses = int(above_with[0]), int(above_without[0])
    if direction == BACKWARD:
        hits, misses = number - misses, number - hits
    return event_bound(
        hits,
        misses,
        number,
        delta=delta,
        confidence=confidence,
        direction=direction,
        threshold=float(np.float32(threshold)),
    )


def _tails(counts: np.ndarray, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """How many losses lie above each inner edge, here and on the other side.

    The other side's number is not counted but estimated from this one's, as the loss is
    the logarithm of their ratio: rare counts would favour events that came by chance.
    """
    width = 2 * reach / NUM_BINS
    middles = -reach + width * (np.arange(NUM_BINS) + 0.5)
    rows = counts, counts * np.exp(-middles)
    here, there = (np.cumsum(row[::-1])[::-1][1:] for row in rows)
    return here, np.minimum(there, counts.sum())


def _checked_parts(step: Any, num_steps: int | None) -> list[tuple[GaussianStep, int]]:
    """The different steps of a run of one setting, and how often each is taken."""
    gaussian_parts(step, "an audit")
    if step.shape:
        raise ValueError(
            f"step must be one setting, its fields scalars, got shape {step.shape}"
        )
    if isinstance(step, ComposedSteps):
        if num_steps is not None:
            raise ValueError(
                f"num_steps must be None for a composed run, got {num_steps!r}"
            )
        counts = [int(np.asarray(count)) for count in step.counts]
        parts = list(zip(step.gaussian_steps, counts, strict=True))
    else:
        parts = [(step, _validation.whole_number("num_steps", num_steps))]
    for one, _ in parts:
        noise = float(one.noise_multiplier)
        if not 0 < noise < math.inf:
            raise ValueError(
                "noise_multiplier must be > 0 and finite for an audit (without noise "
                f"every claim is infinite), got {noise:g}"
            )
    parts = [(one, count) for one, count in parts if count]
    if not parts:
        raise ValueError("the run must have at least one step to audit, got none")
    return parts


def _worst_path(step: AnyStep, num_steps: int | None, delta: float) -> int:
    """The path with the largest Rényi bound."""
    steps = None if num_steps is None else np.asarray(num_steps)
    target = np.log(np.asarray([delta]))
    bound, _ = rdp_bound(EpsilonAt(target), run_of(step, steps))
    return int(np.argmax(np.ravel(bound)))


def _tables(
    make: Callable[[GaussianStep, int], Branches],
    parts: Sequence[tuple[GaussianStep, int]],
    path: int,
) -> list[tuple[Branches, int]]:
    """The tables of a run, and how often each of them comes."""
    tables = (tables_of_run(make, step, count, path) for step, count in parts)
    return list(itertools.chain.from_iterable(tables))


def _is_one(
    first: Sequence[tuple[Branches, int]], second: Sequence[tuple[Branches, int]]
) -> bool:
    """True if two runs are the same mechanism."""

    def alike(a: Branches, b: Branches) -> bool:
        if a.is_mirrored or b.is_mirrored:
            return False
        # The mirror point is used by mirrored tables alone.
        pairs = zip(a._replace(mirror=0.0), b._replace(mirror=0.0), strict=True)
        return all(
            np.shape(x) == np.shape(y) and np.allclose(x, y, rtol=1e-12)
            for x, y in pairs
        )

    return len(first) == len(second) and all(
        number == other and alike(a, b)
        for (a, number), (b, other) in zip(first, second, strict=True)
    )
