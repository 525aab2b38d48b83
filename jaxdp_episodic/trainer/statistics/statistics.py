"""Private statistics in closed form: a metric of classes, or a model of tasks.

A private PLDA (probabilistic linear discriminant analysis): the noised mean of the
features; then, stage by stage, the covariance of differences within classes, each taken
in the space that the stages before have whitened; last, the covariance of everything
there, or the mean of every class. The metric that follows weighs each direction by how
much of its variance is between classes. There are no gradients: each statistic is one
sum over all of the data, of whole numbers, released once with noise, one charged step
of a run. A private mixed model, for numbers, is made likewise: see `mixed`.

What one protected unit can change of each sum is proved in docs/proofs.md, "Private
statistics"; `PrivateStatistics.steps` says it to the accountant.

Reference: Ioffe (2006), doi:10.1007/11744085_41 (PLDA); Dwork, Talwar, Thakurta, Zhang
(2014), doi:10.1145/2591796.2591883 (a noised second moment of unit-norm rows).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.people import PersonBounds
from jaxdp_episodic.trainer.config.training_parts import DISCRETE, MIXED, NOISES, PLDA
from jaxdp_episodic.trainer.config.training_start import (
    MEAN,
    MEANS,
    MOST_FEATURES,
    StartConfig,
    contribution_norm,
    statistics_steps,
)
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.generators import generator as random_generator
from jaxdp_episodic.trainer.gradient.noise import checked_noise, drawn_noise
from jaxdp_episodic.trainer.learners.episode import Episode
from jaxdp_episodic.trainer.statistics.mixed import Mixed, MixedModel
from jaxdp_episodic.trainer.statistics.plda import (
    COUNTED,
    RIDGE_BEFORE_MEANS,
    RIDGE_OF_NOISE,
    Start,
    class_projection,
    projected,
    second_moment,
    sum_of_rows,
    sums_by_class,
    symmetric_noise,
    weighed_projection,
    whitened,
    whitened_rows,
    whole_rows,
    with_mean,
)
from jaxdp_episodic.trainer.statistics.terms import (
    MOST_EXAMPLES,
    PRODUCT_STEPS,
    Contributors,
    Terms,
    check_classes,
)

_ROWS = 4096  # gathered at a time: all may not fit into memory
# Kinds of moments: of pairs of examples, of all examples.
_PAIRS = "pairs"
_ALL = "all"
STATISTICS = "statistics"
"""Stage of a run after all of them; the one after the first is `MEAN`."""
WITHIN = "within"
"""Stage before means of classes: whitened within these, and no more."""


class PrivateStatistics:
    """The statistics of a table: their steps, and their releases.

    Args:
      data: the table; features are flattened, and but for "mixed" scaled to norm 1.
      config: which statistics.
      privacy_unit: one of the last two levels of the table, an example or a class; or
        "person", the owners of examples, which may be in many classes.
      neighboring_relation: as of `GaussianStep`.
      slots: public number of slots for examples of every class, under zero_out where
        examples are protected, or people with ``config.pairs`` "class"; else None.
      people: public bounds of people, to which the table was cut; needed where these
        are protected under add_remove with ``config.pairs`` "class".
      noise: "discrete" or "gaussian"; see `Trainer`.
      shots: support examples of the classes to come, by which classes' means are used.

    Attributes:
      config: which statistics.
      data: the table.
      noise: of which kind.
      steps: see `statistics_steps`.
      dimensions: columns of the projection.

    Raises:
      ValueError: another privacy unit or noise, too many features or examples, fewer
        slots than there is data for, somebody above the bounds, people to protect and
        no owners; what `check_classes` refuses; of "mixed" no targets, or fewer
        features than slopes.
    """

    def __init__(
        self,
        data: ExampleTable,
        config: StartConfig,
        *,
        privacy_unit: str,
        neighboring_relation: str,
        slots: int | None = None,
        people: PersonBounds | None = None,
        noise: str = DISCRETE,
        shots: int = 1,
    ) -> None:
        self.config, self.data = config, data
        self.noise = _validation.choice("noise", noise, NOISES)
        self._shots = _validation.whole_number("shots", shots, minimum=0)
        self._made: tuple[Start, ExampleTable] | None = None
        number = math.prod(data.features.shape[1:])
        self._features = data.features.reshape(data.num_examples, number)
        self._mixed = MixedModel.of(config) if config.kind == MIXED else None
        columns = number if self._mixed is None else number * self._mixed.powers
        if columns > MOST_FEATURES:
            raise ValueError(
                f"private statistics take at most {MOST_FEATURES} features, got "
                f"{columns}; take fixed features"
            )
        _validation.whole_number(
            "examples", data.num_examples, minimum=0, maximum=MOST_EXAMPLES
        )
        if self._mixed is not None:
            self._mixed.initial(number)  # refuses too many slopes
            if data.targets is None:
                raise ValueError(
                    f"data must have targets for statistics of kind {MIXED!r}, got a "
                    "table without"
                )
        self.dimensions = number
        if config.kind == PLDA and config.dimensions is not None:
            self.dimensions = min(config.dimensions, number)
        # Public, unless classes are protected, whose noised number is released.
        is_private = privacy_unit == data.level_names[-2]
        classes = len(data.population.children_counts[-1])
        if config.kind == PLDA and config.between == MEANS:
            check_classes(data, number, neighboring_relation)
        self._num_classes = None if is_private else classes
        who = {
            "privacy_unit": privacy_unit,
            "neighboring_relation": neighboring_relation,
        }
        self.steps = statistics_steps(data.level_names, config, **who)
        self._who = Contributors.of(data, config, **who, slots=slots, people=people)

    def learner(self, learner: Any) -> Any:
        """Returns a learner on examples, of one on what the statistics make of them."""
        return Started(learner) if self._mixed is None else self._mixed

    def stages(self, state: Any) -> dict[str, dict[str, Any]]:
        """Returns what predictions need after each stage that is there, in order.

        "mean": the mean alone, of a mixed model the line of all tasks; "within": before
        means of classes, for new ones that differ in other directions; "statistics":
        all. One that was given up, or came to nothing, is not there.
        """
        found, last = {}, state.released()
        if self._mixed is not None:
            if np.any(state.coefficients):
                alone = jnp.zeros_like(state.covariance), jnp.ones_like(state.variance)
                one = state._replace(covariance=alone[0], variance=alone[1])
                found[MEAN] = one.released()
            is_whole = np.any(state.covariance)
        else:
            if state.count > 0:
                every = jnp.eye(len(state.mean), dtype=jnp.float32)
                found[MEAN] = state._replace(projection=every).released()
            is_whole = self.config.kind == PLDA and np.any(state.projection)
            if is_whole and self.config.between == MEANS:
                found[WITHIN] = state._replace(projection=state.whitening).released()
        return found | ({STATISTICS: last} if is_whole else {})

    def initial(self) -> Start | Mixed:
        """Returns the state before the first release."""
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
        index: int,
        generator: np.random.Generator,
        key: bytes,
        noise_multiplier: float,
    ) -> Start | Mixed:
        """Releases one statistic with its noise; returns the state with it.

        Args:
          state: of the statistics before.
          index: which statistic, from 0.
          generator: of the pairs.
          key: of the noise: 32 secret bytes, used for nothing else.
          noise_multiplier: of this statistic's step; 0 adds no noise.
        """
        noised = self.noised_sum(state, index, generator, key, noise_multiplier)
        return self.with_sum(state, index, noised, noise_multiplier)

    def with_sum(
        self, state: Any, index: int, noised: np.ndarray, noise_multiplier: float
    ) -> Start | Mixed:
        """Returns the state with a sum of `noised_sum`; arguments as of `release`.

        It is a function of what was released, and of the table's shape alone.
        """
        noise = noise_multiplier * contribution_norm(self.steps[index])
        kind = self._kind(index)
        if self._mixed is not None:
            adds = self._mixed.with_line if kind == _ALL else self._mixed.with_tasks
            return adds(state, noised, noise)
        if kind == MEAN:
            state = with_mean(state, noised)
            if self.config.kind == MEAN:
                return state._replace(projection=state.whitening)
            return state
        if kind == _PAIRS:
            before_means = self.config.between == MEANS
            ridge = RIDGE_BEFORE_MEANS if before_means else RIDGE_OF_NOISE
            return whitened(state, noised, noise, ridge)
        if kind == MEANS:
            norm = contribution_norm(self.steps[index])
            noised, noise = noised / norm, noise / norm
            return class_projection(state, noised, noise, self.dimensions, self._shots)
        classes = max(float(state.count), 1.0)
        if self._num_classes is not None:
            classes = float(self._num_classes)
        return weighed_projection(state, noised, noise, self.dimensions, classes)

    def noised_sum(
        self,
        state: Any,
        index: int,
        generator: np.random.Generator,
        key: bytes,
        noise_multiplier: float,
    ) -> np.ndarray:
        """Returns a statistic's sum with its noise, float64: all that is released.

        Sum and discrete noise are whole numbers, `PRODUCT_STEPS` of them to the most
        that one contributes, which is 1. Arguments are those of `release`.
        """
        multiplier = checked_noise(noise_multiplier, self.noise)
        deviation = multiplier * contribution_norm(self.steps[index]) * PRODUCT_STEPS
        kind = self._kind(index)
        total = self._total(kind, state, self._terms(kind, generator))
        stream = random_generator(key)
        if kind in (MEAN, MEANS):
            noise = drawn_noise(self.noise, deviation, total.size, stream)
            noise = noise.reshape(total.shape)
        else:
            noise = symmetric_noise(self.noise, deviation, len(total), stream)
        return (total + noise) / PRODUCT_STEPS

    def sum_of_zeros(self, state: Any, index: int) -> np.ndarray:
        """Returns the sum of one example, or pair, of zeros; reads nobody's data."""
        kind = self._kind(index)
        columns = self._features.shape[1] + (self._mixed is not None)
        rows = [np.zeros((1, columns))] * (2 if kind == _PAIRS else 1)
        terms = Terms((), np.ones(1, np.int64))
        total = self._sum_of(kind, state, rows, terms, np.zeros(1, np.int64))
        return np.append(total, 0) if kind == MEAN else total

    def _terms(self, kind: str, generator: np.random.Generator) -> Terms:
        """What a statistic is summed over."""
        return self._who.pairs(generator) if kind == _PAIRS else self._who.examples()

    def _total(self, kind: str, state: Any, terms: Terms) -> np.ndarray:
        """A statistic's sum over its terms, int64."""
        total: Any = 0
        for here in _chunks(terms):
            total = total + self._summed(kind, state, _part(terms, here), here)
        if kind == MEAN:
            total = np.append(total, self._who.number * COUNTED)
        return total

    def _summed(self, kind: str, state: Any, terms: Terms, here: slice) -> np.ndarray:
        """The sum over some terms; without rows of their own those of a slice."""
        rows = [self._rows(kind, which) for which in terms.rows or (here,)]
        return self._sum_of(kind, state, rows, terms, self.data.class_places[here])

    def _sum_of(
        self,
        kind: str,
        state: Any,
        sides: list[np.ndarray],
        terms: Terms,
        owner: np.ndarray,
    ) -> np.ndarray:
        """The sum over rows, of pairs the rows of both; of classes ``owner`` each."""
        rows, *others = sides
        if self._mixed is not None:
            rows = np.concatenate([rows, *others], axis=1)
            if kind == _ALL:
                return self._mixed.pooled_moment(rows, terms.shares)
            return self._mixed.pair_moment(rows, terms.shares, state)
        if kind == MEAN:
            return sum_of_rows(rows, terms.shares)
        for other in others:
            rows = rows - other
        if kind == MEANS:
            # Two rows are up to 2 apart: shorter ones no more than `contribution_norm`
            # says that two contributions are.
            most = round(PRODUCT_STEPS * contribution_norm(self.steps[-1]) ** 2)
            number = len(self._who.sizes)
            return sums_by_class(rows, owner, number, most, state.whitening, state.mean)
        center = state.mean if kind == _ALL else None
        return second_moment(rows, terms, state.whitening, center)

    def table(self, state: Start) -> ExampleTable:
        """Returns the data with projected features; made once for a state.

        What is made of a row depends on it alone, to the last bit, as clipping needs.
        """
        if self._made is None or self._made[0] is not state:
            data = self.data
            parts = [
                whitened_rows(
                    whole_rows(self._features[start : start + _ROWS]),
                    state.projection,
                    state.mean,
                ).astype(np.float32)
                for start in range(0, max(data.num_examples, 1), _ROWS)
            ]
            self._made = (state, data.with_features(np.concatenate(parts)))
        return self._made[1]

    def _kind(self, index: int) -> str:
        """Kind of a statistic: mean, moments of pairs or of all, or classes' means."""
        last = len(self.steps) - 1
        if self._mixed is not None:
            return _PAIRS if index == last else _ALL
        if 0 < index < last:
            return _PAIRS
        of_all = MEANS if self.config.between == MEANS else _ALL
        return MEAN if index == 0 else of_all

    def _rows(self, kind: str, which: slice | np.ndarray) -> np.ndarray:
        """Rows as `_summed` takes them: of a mixed model features, then the target."""
        features, targets = self._features[which], self.data.targets
        if self._mixed is None:
            return features if kind == MEAN else whole_rows(features)
        assert targets is not None
        return np.concatenate([features, targets[which, None]], axis=1)


def _chunks(terms: Terms) -> Iterator[slice]:
    """Some thousands of terms each; those of a group are in one."""
    number, start = len(terms.shares), 0
    ends = np.arange(0)
    if terms.groups is not None:
        ends = np.flatnonzero(np.diff(terms.groups)) + 1
    while start < number or not start:
        stop = start + _ROWS
        if terms.groups is not None:
            stop = int(np.append(ends[ends >= stop][:1], number)[0])
        yield slice(start, min(stop, number))
        start = max(stop, 1)


def _part(terms: Terms, here: slice) -> Terms:
    rows = tuple(side[here] for side in terms.rows)
    groups = None if terms.groups is None else terms.groups[here]
    return Terms(rows, terms.shares[here], groups)


@dataclass(frozen=True)
class Started:
    """A learner on examples, of one on what the statistics make of them."""

    learner: Any  # on projected features

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

    def embedding(self, params: Any, inputs: Array) -> Array:
        """As the other learner, of examples; see `ProtoNet.embedding`."""
        start = params["start"]
        seen = projected(inputs, start["mean"], start["projection"])
        is_float = jnp.issubdtype(inputs.dtype, jnp.floating)
        seen = seen.astype(inputs.dtype if is_float else seen.dtype)
        return self.learner.embedding(params["model"], seen)


def _seen(start: Any, episode: Episode) -> Episode:
    """The episode with projected features."""
    number = len(episode.support_inputs)
    inputs = jnp.concatenate([episode.support_inputs, episode.query_inputs])
    seen = projected(inputs, start["mean"], start["projection"])
    seen = seen.astype(episode.support_mask.dtype)
    return episode._replace(support_inputs=seen[:number], query_inputs=seen[number:])
