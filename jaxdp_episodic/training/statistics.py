"""Private statistics in closed form: a mean, variance within and between classes.

A private PLDA (probabilistic linear discriminant analysis): the noised mean of the
features; then, stage by stage, the covariance of differences within classes, each taken
in the space that the stages before have whitened; last, the covariance of everything
there. The metric that follows weighs each direction by how much of its variance is
between classes. There are no gradients: each statistic is one sum over all of the data,
released once with Gaussian noise, one charged step of a run.

What one protected unit can change of each sum is proved in docs/proofs.md, "Private
statistics"; `PrivateStatistics.steps` says it to the accountant.

Reference: Ioffe (2006), doi:10.1007/11744085_41 (PLDA); Dwork, Talwar, Thakurta, Zhang
(2014), doi:10.1145/2591796.2591883 (a noised second moment of unit-norm rows).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic import _validation
from jaxdp_episodic.data.table import ExampleTable
from jaxdp_episodic.describe.schemes import MultistageSampling, Poisson
from jaxdp_episodic.describe.spec import Spec, set_positive, set_whole_numbers
from jaxdp_episodic.describe.step import GaussianStep
from jaxdp_episodic.training.episode import Episode
from jaxdp_episodic.training.learners import PLDA
from jaxdp_episodic.training.plda import (
    Start,
    chunks,
    projected,
    second_moment,
    sum_with_count,
    unit_rows,
    weighed_projection,
    whitened,
    with_mean,
    with_symmetric_noise,
)

MEAN = "mean"
KINDS = (MEAN, PLDA)
PAIR = "pair"
_WITHIN, _TOTAL = "within", "total"
_SHARES = {MEAN: 0.02, PLDA: 0.6}
_MOST_FEATURES = 4096  # a covariance has their square


@dataclass(frozen=True, eq=False, kw_only=True)
class StartConfig(Spec):
    """Private statistics that a run begins with.

    Attributes:
      kind: "plda", or "mean": the mean alone, which is taken off.
      share: of the budget, in (0, 1); see `plan_budget`. None: 0.6 of "plda", 0.02 of
        "mean". All of it where ``learner.kind`` is "plda", as nothing follows.
      mean: share of the mean among the statistics, like the next two; they sum to 1.
      within: of each stage of the covariance within classes.
      total: of the total covariance.
      dimensions: most directions that are kept.
    """

    kind: str = PLDA
    share: float | None = None
    mean: float = 0.02
    within: tuple[float, ...] = (0.05, 0.1, 0.2, 0.35)
    total: float = 0.28
    dimensions: int = 128

    def __post_init__(self) -> None:
        _validation.choice("kind", self.kind, KINDS)
        if self.share is not None:
            set_positive(self, "share")
            if not self.share < 1:
                raise ValueError(f"share must lie in (0, 1), got {self.share!r}")
        set_positive(self, "mean", "total")
        within = _validation.positive_array("within", self.within)
        if within.ndim != 1 or not 1 <= within.size <= 64:
            raise ValueError(
                "within must be a list of 1 to 64 shares, got "
                f"{_validation.shown(self.within)}"
            )
        object.__setattr__(self, "within", tuple(within.tolist()))
        total = math.fsum((self.mean, *self.within, self.total))
        if abs(total - 1) > 1e-9:
            raise ValueError(
                "the shares mean, within and total must sum to 1, got "
                f"{self.mean}, {list(self.within)} and {self.total}: {total:.10g}"
            )
        set_whole_numbers(self, "dimensions", maximum=_MOST_FEATURES)

    def shares(self, is_all: bool) -> tuple[float, ...]:
        """Returns the share of each statistic in the budget of the run.

        Args:
          is_all: nothing follows the statistics.
        """
        given = _SHARES[self.kind] if self.share is None else self.share
        own = (1.0,) if self.kind == MEAN else (self.mean, *self.within, self.total)
        return tuple((1.0 if is_all else given) * share for share in own)


def statistics_steps(
    levels: Sequence[str],
    config: StartConfig,
    *,
    privacy_unit: str,
    neighboring_relation: str,
) -> tuple[GaussianStep, ...]:
    """Returns the step of each statistic, in order, with a noise multiplier of 1.

    Everybody takes part in each. Examples are protected: each is clipped, or where it
    is one of a pair, the pair, which the level "pair" stands for; classes are
    protected: each is clipped.

    Args:
      levels: names of the data's levels, the last two of classes and examples.
      config: which statistics.
      privacy_unit: one of the last two levels.
      neighboring_relation: as of `GaussianStep`.

    Raises:
      ValueError: another privacy unit, or a level named "pair".
    """
    *_, class_level, example_level = levels
    _validation.choice("privacy_unit", privacy_unit, (class_level, example_level))
    if PAIR in levels:
        raise ValueError(
            f"no level of the data may be named {PAIR!r} with private statistics, got "
            f"{tuple(levels)}"
        )

    def step(names: Sequence[str], clip_unit: str) -> GaussianStep:
        everybody = [Poisson(name, sampling_probability=1.0) for name in names]
        return GaussianStep(
            MultistageSampling(*everybody),
            noise_multiplier=1.0,
            clip_unit=clip_unit,
            privacy_unit=privacy_unit,
            neighboring_relation=neighboring_relation,
        )

    one = pairs = step(levels, privacy_unit)
    if privacy_unit == example_level:
        pairs = step((*levels[:-1], PAIR, example_level), PAIR)
    return (one,) if config.kind == MEAN else (one, *[pairs] * len(config.within), one)


class PrivateStatistics:
    """The statistics of a table: their steps, and their releases.

    Args:
      data: the table; features are flattened and scaled to norm 1.
      config: which statistics.
      privacy_unit: one of the last two levels of the table: an example, or a class.
      neighboring_relation: as of `GaussianStep`.
      slots: public number of slots for examples of every class, where under zero_out
        examples are protected; else None.

    Attributes:
      steps: see `statistics_steps`.
      dimensions: columns of the projection.

    Raises:
      ValueError: another privacy unit, too many features, fewer slots than examples.
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
        self.config, self._data = config, data
        self._made: tuple[Start, ExampleTable] | None = None
        self._by_class = privacy_unit == data.level_names[-2]
        number = math.prod(data.features.shape[1:])
        self._features = data.features.reshape(data.num_examples, number)
        self._sizes = np.asarray(data.population.children_counts[-1], np.int64)
        if number > _MOST_FEATURES:
            raise ValueError(
                f"private statistics take at most {_MOST_FEATURES} features, got "
                f"{number}; take fixed features"
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

    def initial(self) -> Start:
        """Returns what is known before the first release: nothing."""
        number = self._features.shape[1]
        return Start(
            jnp.zeros(number, jnp.float32),
            jnp.zeros((), jnp.float32),
            jnp.eye(number, dtype=jnp.float32),
            jnp.zeros((number, self.dimensions), jnp.float32),
        )

    def release(
        self,
        state: Start,
        place: int,
        generator: np.random.Generator,
        key: Array,
        noise_multiplier: float,
    ) -> Start:
        """Releases one statistic with its noise; returns what it adds to the state.

        Args:
          state: what the statistics before came to.
          place: which statistic, from 0.
          generator: of the pairs.
          key: of the noise, used for nothing else.
          noise_multiplier: of this statistic's step; 0 adds no noise.
        """
        kind = self._kind(place)
        if kind == MEAN:
            state = with_mean(state, self._mean(key, noise_multiplier))
            if self.config.kind == MEAN:
                return state._replace(projection=state.whitening)
            return state
        if kind == _WITHIN:
            first, second, weights = self._pairs(generator)
            moment = self._moment(
                self._features, state, weights, key, noise_multiplier, (first, second)
            )
            return whitened(state, moment, noise_multiplier)
        weights = self._weights()
        moment = self._moment(self._features, state, weights, key, noise_multiplier)
        return weighed_projection(state, moment, noise_multiplier, self.dimensions)

    def table(self, state: Start) -> ExampleTable:
        """Returns the data with projected features; made once for a state."""
        if self._made is None or self._made[0] is not state:
            data = self._data
            parts = [
                np.asarray(_projected(rows, state.mean, state.projection))
                for rows, _ in chunks(self._features, self._weights())
            ]
            features = np.concatenate(parts)[: data.num_examples]
            table = ExampleTable(features, data.targets, data.population)
            self._made = (state, table)
        return self._made[1]

    def _kind(self, place: int) -> str:
        if place == 0:
            return MEAN
        return _TOTAL if place == len(self.steps) - 1 else _WITHIN

    def _weights(self) -> np.ndarray:
        """(R,) what each example counts: where a class is clipped, its share of it."""
        if not self._by_class:
            return np.ones(len(self._features), np.float32)
        return np.repeat(1 / np.maximum(self._sizes, 1), self._sizes).astype(np.float32)

    def _mean(self, key: Array, noise: float) -> np.ndarray:
        """The noised sum of ``(x, 1) / sqrt(2)``: its last entry counts."""
        total = jnp.zeros(self._features.shape[1] + 1, jnp.float32)
        for rows, weights in chunks(self._features, self._weights()):
            total = total + sum_with_count(rows, weights)
        noised = total + jnp.float32(noise) * jax.random.normal(key, total.shape)
        return np.asarray(noised, np.float64)

    def _pairs(
        self, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Disjoint random pairs within each class: two rows, and what the pair counts.

        All slots are put into random order and paired, first with second and so on; a
        pair with an empty slot is none. Without slots the examples themselves are.
        """
        sizes = self._sizes
        width = int(sizes.max(initial=0)) if self._slots is None else self._slots
        keys = generator.random((len(sizes), width))
        filled = np.arange(width) < sizes[:, None]
        if self._slots is None:  # those that are there first
            keys = np.where(filled, keys, 2.0)
        order = np.argsort(keys, axis=1)[:, : width // 2 * 2]
        both = order.reshape(len(sizes), -1, 2)
        there = (both < sizes[:, None, None]).all(axis=2)
        starts = np.cumsum(sizes) - sizes
        rows = (starts[:, None, None] + both)[there]
        number = there.sum(axis=1)
        weights = np.ones(len(rows), np.float32)
        if self._by_class:
            weights = np.repeat(1 / np.maximum(number, 1), number).astype(np.float32)
        return rows[:, 0], rows[:, 1], weights

    def _moment(
        self,
        features: np.ndarray,
        state: Start,
        weights: np.ndarray,
        key: Array,
        noise: float,
        pairs: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> np.ndarray:
        """The noised sum of outer products of rows of norm 1 in the whitened space."""
        number = features.shape[1]
        total = jnp.zeros((number, number), jnp.float32)
        center = state.mean
        if pairs is not None:
            first, second = (unit_rows(features[rows]) for rows in pairs)
            features, center = first - second, jnp.zeros_like(state.mean)
        else:
            features = unit_rows(features)
        for rows, shares in chunks(features, weights):
            total = total + second_moment(rows, shares, center, state.whitening)
        return np.asarray(with_symmetric_noise(total, key, noise), np.float64)


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

    def predict(self, params: Any, episode: Episode) -> Array:
        """Predictions by ``{"start": {"mean", "projection"}, "model": …}``."""
        start = params["start"]

        def seen(inputs: Array) -> Array:
            return projected(inputs, start["mean"], start["projection"])

        episode = episode._replace(
            support_inputs=seen(episode.support_inputs),
            query_inputs=seen(episode.query_inputs),
        )
        return self.learner.predict(params["model"], episode)


_projected = jax.jit(projected)
