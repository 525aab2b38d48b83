"""Private statistics in closed form: a metric of classes, or a model of tasks.

A private PLDA (probabilistic linear discriminant analysis) first releases the noised
mean of the features. Then it releases, in stages, the covariance of differences within
classes, each in the space whitened by earlier stages. Last it releases the covariance
of everything in that space, or the mean of every class. The resulting metric weights
each direction by the share of its variance that is between classes. There are no
gradients: each statistic is one sum of whole numbers over all data, released once with
noise, in one charged step of a run. A private mixed model for numbers works the same
way: see `mixed`.

docs/proofs.md, "Private statistics", proves how far one protected unit can move each
sum; `PrivateStatistics.steps` states it to the accountant.

Reference: Ioffe (2006), doi:10.1007/11744085_41 (PLDA); Dwork, Talwar, Thakurta, Zhang
(2014), doi:10.1145/2591796.2591883 (a noised second moment of unit-norm rows).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.population import PersonBounds
from jaxdp_episodic.trainer.config.training_parts import (
    DISCRETE,
    MEAN,
    MEANS,
    MIXED,
    MOST_FEATURES,
    NOISES,
    PLDA,
    StartConfig,
    contribution_norm,
    statistics_steps,
)
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.generators import generator as random_generator
from jaxdp_episodic.trainer.gradient.noise import checked_noise, drawn_noise
from jaxdp_episodic.trainer.learners.episode import Episode
from jaxdp_episodic.trainer.statistics import plda
from jaxdp_episodic.trainer.statistics.mixed import Mixed, MixedModel
from jaxdp_episodic.trainer.statistics.terms import (
    MOST_EXAMPLES,
    PRODUCT_STEPS,
    Contributors,
    Terms,
    check_classes,
)

_ROWS = 4096  # rows read at a time, because all may not fit into memory
# Kinds of moments: of pairs of examples, of all examples.
_PAIRS = "pairs"
_ALL = "all"
STATISTICS = "statistics"
"""Stage of a run after all statistics; the stage after the first is `MEAN`."""
WITHIN = "within"
"""Stage before the means of classes: only whitened within classes."""


class PrivateStatistics:
    """The private statistics of a table: their steps and releases.

    Args:
      data: the table; features are flattened, and scaled to norm 1 except for "mixed".
      config: which statistics.
      privacy_unit: one of the table's last two levels (example or class), or "person":
        the owner of examples, which may be in many classes.
      neighboring_relation: as in `GaussianStep`.
      slots: public number of slots for the examples of every class; given under
        zero_out if examples are protected, or people with ``config.pairs`` "class".
      people: public bounds of people that the table satisfies; required if people are
        protected under add_remove with ``config.pairs`` "class".
      noise: "discrete" or "gaussian"; see `Trainer`.
      shots: support examples of new classes, which the means of classes are used for.

    Attributes:
      config: which statistics.
      data: the table.
      noise: kind of noise.
      steps: see `statistics_steps`.
      dimensions: columns of the projection.

    Raises:
      ValueError: another privacy unit or noise, too many features or examples, fewer
        slots than data, a person beyond the bounds, protected people without owners, or
        what `check_classes` refuses; for "mixed" no targets, or fewer features than
        slopes.
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
        self._made: tuple[plda.Start, ExampleTable] | None = None
        number = math.prod(data.features.shape[1:])
        self._features = data.features.reshape(data.num_examples, number)
        self._mixed = MixedModel.of(config) if config.kind == MIXED else None
        columns = number * (1 if self._mixed is None else self._mixed.powers)
        if columns > MOST_FEATURES:
            raise ValueError(
                f"private statistics support at most {MOST_FEATURES} features, got "
                f"{columns}; use fixed features"
            )
        _validation.whole_number(
            "examples", data.num_examples, minimum=0, maximum=MOST_EXAMPLES
        )
        if self._mixed is not None:
            self._mixed.initial(number)  # raises for too many slopes
            if data.targets is None:
                raise ValueError(
                    f"data must have targets for statistics of kind {MIXED!r}, but has "
                    "none"
                )
        self.dimensions = number
        if config.kind == PLDA and config.dimensions is not None:
            self.dimensions = min(config.dimensions, number)
        # Public, unless classes are protected; their noised number is then released.
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
        of_pairs = [_PAIRS] * (len(self.steps) - 2)
        last = MEANS if config.between == MEANS else _ALL
        kinds = [_ALL, _PAIRS] if self._mixed else [MEAN, *of_pairs, last]
        self._kinds = kinds[: len(self.steps)]
        self._units = Contributors(data, config, **who, slots=slots, people=people)

    def learner(self, learner: Any) -> Any:
        """Returns a learner on examples, given one on the projected features."""
        return Started(learner) if self._mixed is None else self._mixed

    def stages(self, state: Any) -> dict[str, dict[str, Any]]:
        """Returns what predictions need after each available stage, in order.

        "mean": only the mean; for a mixed model the line of all tasks. "within": before
        the means of classes, for new classes that differ in other directions.
        "statistics": all. A stage that was given up or released nothing is absent.
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

    def initial(self) -> plda.Start | Mixed:
        """Returns the state before the first release."""
        number = self._features.shape[1]
        if self._mixed is not None:
            return self._mixed.initial(number)
        return plda.Start(
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
    ) -> plda.Start | Mixed:
        """Releases one statistic with its noise, and returns the new state.

        Args:
          state: state after the earlier statistics.
          index: which statistic, from 0.
          generator: for the random pairs.
          key: of the noise: 32 secret bytes, used for nothing else.
          noise_multiplier: of this statistic's step; 0 adds no noise.
        """
        noised = self.noised_sum(state, index, generator, key, noise_multiplier)
        return self.with_sum(state, index, noised, noise_multiplier)

    def with_sum(
        self, state: Any, index: int, noised: np.ndarray, noise_multiplier: float
    ) -> plda.Start | Mixed:
        """Returns the state updated with the result of `noised_sum`.

        It depends only on releases and on the table's shape. Arguments as in `release`.
        """
        noise = noise_multiplier * contribution_norm(self.steps[index])
        kind = self._kinds[index]
        if self._mixed is not None:
            adds = self._mixed.with_line if kind == _ALL else self._mixed.with_tasks
            return adds(state, noised, noise)
        if kind == MEAN:
            state = plda.with_mean(state, noised)
            if self.config.kind == MEAN:
                return state._replace(projection=state.whitening)
            return state
        if kind == _PAIRS:
            before_means = self.config.between == MEANS
            ridge = plda.RIDGE_BEFORE_MEANS if before_means else plda.RIDGE_OF_NOISE
            return plda.whitened(state, noised, noise, ridge)
        if kind == MEANS:
            norm = contribution_norm(self.steps[index])
            noised, noise = noised / norm, noise / norm
            return plda.class_projection(
                state, noised, noise, self.dimensions, self._shots
            )
        classes = max(float(state.count), 1.0)
        if self._num_classes is not None:
            classes = float(self._num_classes)
        return plda.weighed_projection(state, noised, noise, self.dimensions, classes)

    def noised_sum(
        self,
        state: Any,
        index: int,
        generator: np.random.Generator,
        key: bytes,
        noise_multiplier: float,
    ) -> np.ndarray:
        """Returns a statistic's noised sum, float64: everything that is released.

        Sum and discrete noise are whole numbers of which `PRODUCT_STEPS` make norm 1,
        the largest norm of a contribution. Arguments as in `release`.
        """
        multiplier = checked_noise(noise_multiplier, self.noise)
        deviation = multiplier * contribution_norm(self.steps[index]) * PRODUCT_STEPS
        kind = self._kinds[index]
        total = self._total(kind, state, self._terms(kind, generator))
        stream = random_generator(key)
        if kind in (MEAN, MEANS):
            noise = drawn_noise(self.noise, deviation, total.size, stream)
            noise = noise.reshape(total.shape)
        else:
            noise = plda.symmetric_noise(self.noise, deviation, len(total), stream)
        return (total + noise) / PRODUCT_STEPS

    def sum_of_zeros(self, state: Any, index: int) -> np.ndarray:
        """Returns the sum for one example, or pair, of zeros; reads no data."""
        kind = self._kinds[index]
        columns = self._features.shape[1] + (self._mixed is not None)
        rows = [np.zeros((1, columns))] * (2 if kind == _PAIRS else 1)
        terms = Terms((), np.ones(1, np.int64))
        total = self._sum_of(kind, state, rows, terms, np.zeros(1, np.int64))
        return np.append(total, 0) if kind == MEAN else total

    def _terms(self, kind: str, generator: np.random.Generator) -> Terms:
        """Returns the terms that a statistic sums."""
        units = self._units
        return units.pairs(generator) if kind == _PAIRS else units.examples()

    def _total(self, kind: str, state: Any, terms: Terms) -> np.ndarray:
        """Returns a statistic's sum over its terms, int64."""
        number = len(terms.shares)
        edges = np.arange(_ROWS, number, _ROWS)
        if terms.groups is not None:  # a group is never split
            ends = np.flatnonzero(np.diff(terms.groups, append=-1)) + 1
            edges = np.unique(ends[np.searchsorted(ends, edges)])
        total: Any = 0
        for start, stop in itertools.pairwise([0, *edges, number]):
            total = total + self._summed(kind, state, terms, slice(start, stop))
        if kind == MEAN:
            total = np.append(total, self._units.number * plda.COUNTED)
        return total

    def _summed(self, kind: str, state: Any, terms: Terms, here: slice) -> np.ndarray:
        """Returns the sum over some of the terms; without rows they are all rows."""
        which = [side[here] for side in terms.rows] or [here]
        groups = None if terms.groups is None else terms.groups[here]
        rows = [self._rows(kind, side) for side in which]
        part = Terms((), terms.shares[here], groups)
        return self._sum_of(kind, state, rows, part, self.data.class_places[here])

    def _sum_of(
        self,
        kind: str,
        state: Any,
        sides: list[np.ndarray],
        terms: Terms,
        owner: np.ndarray,
    ) -> np.ndarray:
        """Returns the sum over rows, or pairs of two sides; ``owner`` are classes."""
        rows, *others = sides
        if self._mixed is not None:
            rows = np.concatenate([rows, *others], axis=1)
            if kind == _ALL:
                return self._mixed.pooled_moment(rows, terms.shares)
            return self._mixed.pair_moment(rows, terms.shares, state)
        if kind == MEAN:
            return plda.sum_of_rows(rows, terms.shares)
        for other in others:
            rows = rows - other
        if kind == MEANS:
            # Two rows may be 2 apart. They are shortened so that two contributions are
            # as far apart as `contribution_norm` states.
            most = round(PRODUCT_STEPS * contribution_norm(self.steps[-1]) ** 2)
            number = len(self._units.sizes)
            return plda.sums_by_class(
                rows, owner, number, most, state.whitening, state.mean
            )
        center = state.mean if kind == _ALL else None
        return plda.second_moment(rows, terms, state.whitening, center)

    def table(self, state: plda.Start) -> ExampleTable:
        """Returns the data with projected features; computed once per state.

        Each row's result depends bit for bit only on that row, as clipping requires.
        """
        if self._made is None or self._made[0] is not state:
            data = self.data
            parts = [
                plda.whitened_rows(
                    plda.whole_rows(self._features[start : start + _ROWS]),
                    state.projection,
                    state.mean,
                ).astype(np.float32)
                for start in range(0, max(data.num_examples, 1), _ROWS)
            ]
            self._made = (state, data.with_features(np.concatenate(parts)))
        return self._made[1]

    def _rows(self, kind: str, which: slice | np.ndarray) -> np.ndarray:
        """Returns rows for `_sum_of`; for a mixed model features, then the target."""
        features, targets = self._features[which], self.data.targets
        if self._mixed is None:
            return features if kind == MEAN else plda.whole_rows(features)
        assert targets is not None
        return np.concatenate([features, targets[which, None]], axis=1)


@dataclass(frozen=True)
class Started:
    """A learner on examples that projects them for another learner."""

    learner: Any  # on projected features

    @property
    def is_regression(self) -> bool:
        """As in the other learner."""
        return self.learner.is_regression

    def loss(self, params: Any, episode: Episode) -> Array:
        """Returns the other learner's loss; parameters as in `predict`."""
        return self.learner.loss(params["model"], _seen(params["start"], episode))

    def predict(self, params: Any, episode: Episode) -> Array:
        """Predicts with ``{"start": {"mean", "projection"}, "model": …}``."""
        return self.learner.predict(params["model"], _seen(params["start"], episode))

    def embedding(self, params: Any, inputs: Array) -> Array:
        """Returns the other learner's embedding of examples; see `ProtoNet`."""
        start = params["start"]
        seen = plda.projected(inputs, start["mean"], start["projection"])
        if jnp.issubdtype(inputs.dtype, jnp.floating):
            seen = seen.astype(inputs.dtype)
        return self.learner.embedding(params["model"], seen)


def _seen(start: Any, episode: Episode) -> Episode:
    """Returns the episode with projected features."""
    number = len(episode.support_inputs)
    inputs = jnp.concatenate([episode.support_inputs, episode.query_inputs])
    seen = plda.projected(inputs, start["mean"], start["projection"])
    seen = seen.astype(episode.support_mask.dtype)
    return episode._replace(support_inputs=seen[:number], query_inputs=seen[number:])
