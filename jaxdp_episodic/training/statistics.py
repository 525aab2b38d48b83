"""Private statistics in closed form: a metric of classes, or a model of tasks.

A private PLDA (probabilistic linear discriminant analysis): the noised mean of the
features; then, stage by stage, the covariance of differences within classes, each taken
in the space that the stages before have whitened; last, the covariance of everything
there. The metric that follows weighs each direction by how much of its variance is
between classes. There are no gradients: each statistic is one sum over all of the data,
released once with Gaussian noise, one charged step of a run. A private mixed model, for
numbers, is made likewise: see `mixed`.

What one protected unit can change of each sum is proved in docs/proofs.md, "Private
statistics"; `PrivateStatistics.steps` says it to the accountant.

Reference: Ioffe (2006), doi:10.1007/11744085_41 (PLDA); Dwork, Talwar, Thakurta, Zhang
(2014), doi:10.1145/2591796.2591883 (a noised second moment of unit-norm rows).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic import _validation
from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.requests.training_parts import MIXED, PLDA
from jaxdp_episodic.requests.training_start import (
    MEAN,
    MOST_FEATURES,
    StartConfig,
    contribution_norm,
    statistics_steps,
)
from jaxdp_episodic.training.episode import Episode
from jaxdp_episodic.training.mixed import Mixed, MixedModel
from jaxdp_episodic.training.plda import (
    ROWS,
    Start,
    chunks,
    projected,
    second_moment,
    sum_of,
    sum_with_count,
    symmetric_noise,
    unit_rows,
    weighed_projection,
    whitened,
    with_mean,
    with_noise,
)

_PAIRS, _ALL = "pairs", "all"


class PrivateStatistics:
    """The statistics of a table: their steps, and their releases.

    Args:
      data: the table; features are flattened, and but for "mixed" scaled to norm 1.
      config: which statistics.
      privacy_unit: one of the last two levels of the table: an example, or a class.
      neighboring_relation: as of `GaussianStep`.
      slots: public number of slots for examples of every class, where under zero_out
        examples are protected; else None.

    Attributes:
      data: the table.
      steps: see `statistics_steps`.
      dimensions: columns of the projection.

    Raises:
      ValueError: another privacy unit, too many features, fewer slots than examples;
        of "mixed" no targets, or fewer features than slopes.
    """

    def __init__(
        self,
        data: ExampleTable,
        config: StartConfig,
        *,
        privacy_unit: str,
        neighboring_relation: str,
        slots: int | None = None,
    ) -> None:
        self.config, self.data = config, data
        self._made: tuple[Start, ExampleTable] | None = None
        self._by_class = privacy_unit == data.level_names[-2]
        number = math.prod(data.features.shape[1:])
        self._features = data.features.reshape(data.num_examples, number)
        self._sizes = np.asarray(data.population.children_counts[-1], np.int64)
        self._mixed = MixedModel.of(config) if config.kind == MIXED else None
        columns = number if self._mixed is None else number * self._mixed.powers
        if columns > MOST_FEATURES:
            raise ValueError(
                f"private statistics take at most {MOST_FEATURES} features, got "
                f"{columns}; take fixed features"
            )
        if self._mixed is not None:
            self._mixed.initial(number)  # refuses too many slopes
            if data.targets is None:
                raise ValueError(
                    f"data must have targets for statistics of kind {MIXED!r}, got a "
                    "table without"
                )
        self.dimensions = number
        if config.kind == PLDA:
            self.dimensions = min(config.dimensions, number)
        self._slots = None
        if neighboring_relation == "zero_out" and not self._by_class:
            self._slots = _validation.whole_number("slots", slots)
            if self._slots < self._sizes.max(initial=0):
                raise ValueError(
                    "slots must be at least the examples of every class, got "
                    f"{slots} slots and a class of {self._sizes.max()}"
                )
        self.steps = statistics_steps(
            data.level_names,
            config,
            privacy_unit=privacy_unit,
            neighboring_relation=neighboring_relation,
        )

    def learner(self, learner: Any) -> Any:
        """Returns a learner on examples, of one on what the statistics make of them."""
        return learner if self._mixed is not None else Started(learner)

    def initial(self) -> Start | Mixed:
        """Returns what is known before the first release: nothing."""
        number = self._features.shape[1]
        if self._mixed is not None:
            return self._mixed.initial(number)
        return Start(
            jnp.zeros(number, jnp.float32),
            jnp.zeros((), jnp.float32),
            jnp.eye(number, dtype=jnp.float32),
            jnp.zeros((number, self.dimensions), jnp.float32),
        )

    def release(
        self,
        state: Any,
        place: int,
        generator: np.random.Generator,
        key: Array,
        noise_multiplier: float,
    ) -> Start | Mixed:
        """Releases one statistic with its noise; returns what it adds to the state.

        Args:
          state: what the statistics before came to.
          place: which statistic, from 0.
          generator: of the pairs.
          key: of the noise, used for nothing else.
          noise_multiplier: of this statistic's step; 0 adds no noise.
        """
        noised = self.noised_sum(state, place, generator, key, noise_multiplier)
        noise = noise_multiplier * contribution_norm(self.steps[place])
        kind = self._kind(place)
        if self._mixed is not None:
            adds = self._mixed.with_line if kind == _ALL else self._mixed.with_tasks
            return adds(state, noised, noise)
        if kind == MEAN:
            state = with_mean(state, noised)
            if self.config.kind == MEAN:
                return state._replace(projection=state.whitening)
            return state
        if kind == _PAIRS:
            return whitened(state, noised, noise)
        return weighed_projection(state, noised, noise, self.dimensions)

    def noised_sum(
        self,
        state: Any,
        place: int,
        generator: np.random.Generator,
        key: Array,
        noise_multiplier: float,
    ) -> np.ndarray:
        """Returns a statistic's sum with its noise, of which all else is a function.

        Arguments are those of `release`.
        """
        noise = noise_multiplier * contribution_norm(self.steps[place])
        kind, pairs, weights = self._kind(place), None, self._weights()
        if kind == _PAIRS:
            *pairs, weights = self._pairs(generator)
        total = self._total(kind, state, weights, pairs)
        if kind == MEAN:
            normal = jax.random.normal(key, total.shape, jnp.float32)
        else:
            normal = symmetric_noise(key, len(total))
        return with_noise(total, normal, noise)

    def _total(
        self,
        kind: str,
        state: Any,
        weights: np.ndarray,
        pairs: Sequence[np.ndarray] | None = None,
    ) -> np.ndarray:
        """A statistic's sum over all rows, or over pairs of them."""
        parts = self._parts(kind, weights, pairs)
        return sum_of(self._summed(kind, state, *part) for part in parts)

    def _summed(self, kind: str, state: Any, rows: Any, weights: Any) -> np.ndarray:
        if self._mixed is not None:
            if kind == _ALL:
                return self._mixed.pooled_moment(rows, weights)
            return self._mixed.pair_moment(rows, weights, state)
        if kind == MEAN:
            return sum_with_count(rows, weights)
        center = state.mean if kind == _ALL else jnp.zeros_like(state.mean)
        return second_moment(rows, weights, center, state.whitening)

    def table(self, state: Start) -> ExampleTable:
        """Returns the data with projected features; made once for a state."""
        if self._made is None or self._made[0] is not state:
            data = self.data
            parts = [
                np.asarray(_projected(rows, state.mean, state.projection))
                for rows, _ in chunks(self._features, self._weights())
            ]
            features = np.concatenate(parts)[: data.num_examples]
            table = ExampleTable(features, data.targets, data.population)
            self._made = (state, table)
        return self._made[1]

    def _kind(self, place: int) -> str:
        """Of what a statistic is: examples' mean, or moments of pairs or of all."""
        last = len(self.steps) - 1
        if self._mixed is not None:
            return _PAIRS if place == last else _ALL
        return MEAN if place == 0 else _ALL if place == last else _PAIRS

    def _parts(
        self, kind: str, weights: np.ndarray, pairs: Sequence[np.ndarray] | None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All rows, or pairs of them, and what they count, in `chunks`.

        Of a metric's moments rows have norm 1, and of a pair there is the difference;
        of a mixed model the targets are behind the features, and of a pair there are
        both rows. No more than a chunk is gathered at a time: all may not fit into
        memory.
        """
        for start in range(0, max(len(weights), 1), ROWS):
            here = slice(start, start + ROWS)
            if pairs is None:
                rows = self._rows(kind, here)
            else:
                first, second = (self._rows(kind, side[here]) for side in pairs)
                if self._mixed is None:
                    rows = first - second
                else:
                    rows = np.concatenate([first, second], axis=1)
            yield from chunks(rows, weights[here])

    def _rows(self, kind: str, which: slice | np.ndarray) -> np.ndarray:
        features, targets = self._features[which], self.data.targets
        if self._mixed is None:
            return features if kind == MEAN else unit_rows(features)
        assert targets is not None
        return np.concatenate([features, targets[which, None]], axis=1)

    def _weights(self) -> np.ndarray:
        """(R,) what each example counts: where a class is clipped, its share of it."""
        if not self._by_class:
            return np.ones(len(self._features), np.float32)
        return np.repeat(1 / np.maximum(self._sizes, 1), self._sizes).astype(np.float32)

    def _pairs(
        self, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Disjoint random pairs within each class: two rows, and what the pair counts.

        All slots are put into random order and paired, first with second and so on; a
        pair with an empty slot is none. Without slots the examples themselves are.
        """
        sizes = self._sizes
        slots = sizes if self._slots is None else np.full(len(sizes), self._slots)
        owner = np.repeat(np.arange(len(sizes)), slots)  # a class's slots lie together
        begins = (np.cumsum(slots) - slots)[owner]
        order = np.lexsort((generator.random(len(owner)), owner)) - begins
        rank = np.arange(len(owner)) - begins
        first = np.flatnonzero((rank % 2 == 0) & (rank + 1 < slots[owner]))
        both = np.stack([order[first], order[first + 1]], axis=1)
        owner = owner[first]
        there = (both < sizes[owner, None]).all(axis=1)
        both, owner = both[there], owner[there]
        rows = (np.cumsum(sizes) - sizes)[owner, None] + both
        number = np.bincount(owner, minlength=len(sizes))
        weights = np.ones(len(rows), np.float32)
        if self._by_class:
            weights = np.repeat(1 / np.maximum(number, 1), number).astype(np.float32)
        return rows[:, 0], rows[:, 1], weights


@dataclass(frozen=True)
class Started:
    """A learner on examples, of one on what the statistics make of them.

    Attributes:
      learner: on projected features.
    """

    learner: Any

    @property
    def is_regression(self) -> bool:
        """As the other learner."""
        return self.learner.is_regression

    def loss(self, params: Any, episode: Episode) -> Array:
        """The other learner's loss; parameters are those of `predict`."""
        return self.learner.loss(params["model"], _seen(params["start"], episode))

    def predict(self, params: Any, episode: Episode) -> Array:
        """Predictions by ``{"start": {"mean", "projection"}, "model": …}``."""
        return self.learner.predict(params["model"], _seen(params["start"], episode))


def _seen(start: Any, episode: Episode) -> Episode:
    """The episode with projected features."""
    inputs = episode.support_inputs, episode.query_inputs
    seen = [
        projected(one, start["mean"], start["projection"]).astype(mask.dtype)
        for one, mask in zip(
            inputs, (episode.support_mask, episode.query_mask), strict=True
        )
    ]
    return episode._replace(support_inputs=seen[0], query_inputs=seen[1])


_projected = jax.jit(projected)
