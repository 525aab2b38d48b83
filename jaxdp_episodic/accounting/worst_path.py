"""The worst path of a run, by any method: composed first, the largest taken last."""

from __future__ import annotations

import numpy as np

from jaxdp_episodic.accounting.evaluation import evaluate
from jaxdp_episodic.accounting.exact import answer
from jaxdp_episodic.accounting.exact.answer import ExactAnswer
from jaxdp_episodic.accounting.paths import take_paths, undominated_paths
from jaxdp_episodic.accounting.pld import interval
from jaxdp_episodic.accounting.run import DominatingPair

_RDP_KERNELS = {"epsilon": "best_epsilon", "log_delta": "best_log_delta"}


def worst(
    quantity: str,
    target: np.ndarray,
    pairs: tuple[DominatingPair, ...],
    counts: tuple[np.ndarray, ...],
    method: str,
) -> ExactAnswer:
    """Epsilon or log(delta) of the worst path.

    Args:
      quantity: "epsilon" or "log_delta".
      target: log(delta) or epsilon, without a path axis.
      pairs: dominating pairs of the run's steps, paths last.
      counts: how often each is taken, with a path axis of length 1.
      method: "rdp", "exact" or "pld" (its upper end).

    Returns:
      Value, error and whether it is certified only, of the broadcast shape without
      the path axis; the error of "rdp" is ``inf``: it is a bound.
    """
    target = np.asarray(target, np.float64)[..., None]
    pairs = take_paths(pairs, undominated_paths(pairs))
    shape = np.broadcast_shapes(
        target.shape, *(p.shape for p in pairs), *(np.shape(c) for c in counts)
    )
    if 0 in shape:
        empty = np.zeros(shape[:-1])
        return ExactAnswer(empty, empty, np.zeros(empty.shape, bool))
    # Of one path there is nothing to choose.
    bound = np.zeros(shape)
    if method == "rdp" or shape[-1] > 1:
        bound, _ = evaluate(_RDP_KERNELS[quantity], target, pairs, counts)
    if method == "rdp":
        value = bound.max(axis=-1)
        unknown = np.full(value.shape, np.inf)
        return ExactAnswer(value, unknown, np.zeros(value.shape, bool))
    rows = _Rows(quantity, target, pairs, counts, method, bound)
    return rows.worst()


class _Rows:
    """Settings by paths; only paths that may be the worst are evaluated."""

    def __init__(
        self,
        quantity: str,
        target: np.ndarray,
        pairs: tuple[DominatingPair, ...],
        counts: tuple[np.ndarray, ...],
        method: str,
        bound: np.ndarray,
    ) -> None:
        self.quantity, self.method, self.shape = quantity, method, bound.shape
        self.target, self.pairs, self.counts = target, pairs, counts
        self.bound = bound.reshape(-1, bound.shape[-1])

    def worst(self) -> ExactAnswer:
        """First the path with the largest Rényi bound, then those above its value."""
        settings, paths = self.bound.shape
        first = self.bound.argmax(axis=1)
        best = self._at(np.arange(settings), first)
        rivals = self.bound > best.value[:, None]
        rivals[np.arange(settings), first] = False
        row, path = np.nonzero(rivals)
        if row.size:
            others = self._at(row, path)
            # Ascending, so that the last one written for a row is the largest.
            order = np.argsort(others.value, kind="stable")
            larger = order[others.value[order] > best.value[row[order]]]
            for kept, new in zip(best, others, strict=True):
                kept[row[larger]] = new[larger]
        shape = self.shape[:-1]
        return ExactAnswer(*(field.reshape(shape) for field in best))

    def _at(self, row: np.ndarray, path: np.ndarray) -> ExactAnswer:
        """The answers at some settings and paths, each (m,)."""
        place = (*np.unravel_index(row, self.shape[:-1] or (1,)), path)

        def take(field: np.ndarray) -> np.ndarray:
            whole = np.broadcast_to(np.asarray(field, np.float64), self.shape)
            return whole.reshape(*(self.shape[:-1] or (1,)), self.shape[-1])[place]

        target = take(self.target)
        pairs = tuple(
            DominatingPair(pair.kind, *(take(field) for field in pair[1:]))
            for pair in self.pairs
        )
        counts = tuple(take(count) for count in self.counts)
        if self.method == "exact":
            solve = (
                answer.exact_epsilon
                if self.quantity == "epsilon"
                else answer.exact_log_delta
            )
            return solve(target, pairs, counts)
        bounds = (
            interval.epsilon_bounds
            if self.quantity == "epsilon"
            else interval.log_delta_bounds
        )
        lower, upper = bounds(target, pairs, counts)
        width = np.where(upper == lower, 0.0, upper - lower)
        return ExactAnswer(upper, width, np.ones(upper.shape, bool))
