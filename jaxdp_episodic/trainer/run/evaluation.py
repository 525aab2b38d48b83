"""How well a learner does on held-out tasks, with a confidence interval."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Generator
from contextlib import closing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import IndependentEpisodes
from jaxdp_episodic.accountant.describe.schemes import (
    MultistageSampling,
    WithoutReplacement,
)
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.sampler import EpisodeSampler
from jaxdp_episodic.trainer.gradient.precision import as_trained, training_dtype
from jaxdp_episodic.trainer.learners.episode import (
    Block,
    code_of,
    decoded,
    make_blocks,
    prefetched,
    to_episode,
)
from jaxdp_episodic.trainer.learners.learners import Classifier, ProtoNet
from jaxdp_episodic.trainer.statistics.statistics import Started

_BLOCK_EPISODES = 50  # most in a block
_BLOCK_BYTES = 2**26  # most of a block's float32 inputs
_Z95 = 1.959963984540054  # normal quantile at 97.5 %


class Score(NamedTuple):
    """The mean over episodes, with a 95 % interval for the mean.

    Attributes:
      name: "accuracy", or "rmse" (root of the mean squared error over all queries).
      mean: the score.
      low: lower end of the interval.
      high: upper end of the interval.
      num_episodes: episodes that it is the mean of.
    """

    name: str
    mean: float
    low: float
    high: float
    num_episodes: int

    def __str__(self) -> str:
        return (
            f"{self.name} {self.mean:.4f}   (95 % interval {self.low:.4f} to "
            f"{self.high:.4f}, {self.num_episodes:,} held-out episodes)"
        )


class EpisodeScores(NamedTuple):
    """The scores of one learner on the episodes of an `Evaluation`.

    Attributes:
      sums: (J,) float64, of each episode's hits or squared errors.
      weights: (J,) float64, its queries: the same for every learner.
      is_regression: the sums are of squared errors.
    """

    sums: np.ndarray
    weights: np.ndarray
    is_regression: bool

    @property
    def value(self) -> float:
        """The mean over all queries, of errors times -1; -inf if it is no number."""
        value = float(self.sums.sum() / self.weights.sum())
        if not math.isfinite(value):
            return -math.inf
        return -value if self.is_regression else value

    def score(self) -> Score:
        """Ratio of the sums over all queries, and its interval by the delta method."""
        number, mean = self.sums.size, self.sums.sum() / self.weights.sum()
        half = _Z95 * self._error(self.sums - mean * self.weights)
        low, high = mean - half, mean + half
        if not self.is_regression:
            return Score("accuracy", mean, max(low, 0.0), min(high, 1.0), number)
        low, mean, high = (math.sqrt(max(value, 0.0)) for value in (low, mean, high))
        return Score("rmse", mean, low, high, number)

    def ahead_of(self, other: EpisodeScores) -> tuple[float, float]:
        """How much higher `value` is than another learner's on the same episodes.

        Returns:
          The difference and its standard error, of the differences episode by episode:
          what makes an episode hard for both is not in it.
        """
        differences = self.sums - other.sums
        if self.is_regression:
            differences = -differences
        mean = differences.sum() / self.weights.sum()
        return float(mean), self._error(differences - mean * self.weights)

    def _error(self, residuals: np.ndarray) -> float:
        """Standard error of a ratio to the weights, by what remains of each episode."""
        deviation = (residuals / self.weights.mean()).std(ddof=1)
        return float(deviation) / math.sqrt(residuals.size)


class Evaluation:
    """Draws the same held-out episodes every time; call it with a learner and params.

    The result is *an estimate*: a normal interval for the mean over all episodes of
    this kind, over the draw of the episodes only, not over the choice of classes. The
    held-out people are not protected by the training's epsilon: publishing a score
    discloses theirs.

    Args:
      data: the held-out data.
      ways: classes an episode; None for regression, one task an episode.
      shots: support examples, of each class or of the task.
      queries: query examples, likewise.
      num_episodes: at least 2; 600 is the custom of the field.
      seed: of the episodes.

    Attributes:
      data: as given.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range, or more ways than classes.
    """

    def __init__(
        self,
        data: ExampleTable,
        *,
        ways: int | None,
        shots: int,
        queries: int,
        num_episodes: int = 600,
        seed: int = 0,
    ) -> None:
        for name, value, least in (
            ("shots", shots, 1),
            ("queries", queries, 1),
            ("num_episodes", num_episodes, 2),
            ("ways", 1 if ways is None else ways, 1),
        ):
            _validation.integer_array(name, value, minimum=least)
        if ways is None and data.targets is None:
            raise ValueError(
                "data must have targets for regression, got a table without"
            )
        names = data.level_names
        drawn = [1] * (len(names) - 2) + [1 if ways is None else ways]
        drawn.append(shots + queries)
        levels = [
            WithoutReplacement(name, size=size)
            for name, size in zip(names, drawn, strict=True)
        ]
        self._is_regression, self._shots, self._ways = ways is None, shots, ways
        most = int(np.max(data.population.children_counts[len(names) - 2], initial=0))
        if ways is not None and ways > most:
            raise ValueError(
                f"ways must be at most the {most} classes that are held out, got {ways}"
            )
        sampler = EpisodeSampler(
            IndependentEpisodes(MultistageSampling(*levels), num_episodes=num_episodes),
            data.population,
            clip_unit="episode",
        )
        draw = sampler.draw(np.random.default_rng(seed))
        # Levels above the episode have one unit each: their axes are dropped.
        keep = 1 if ways is None else 2
        shape = (num_episodes, *draw.mask.shape[-keep:])
        draw = draw._replace(
            examples=draw.examples.reshape(shape), mask=draw.mask.reshape(shape)
        )
        self._draw, self.data = draw, data
        # Episodes are evaluated one by one: the block size changes no score.
        bytes_each = 4 * math.prod(shape[1:]) * math.prod(data.features.shape[1:])
        fitting = max(_BLOCK_BYTES // max(bytes_each, 1), 1)
        self._block_size = min(_BLOCK_EPISODES, num_episodes, fitting)

    def __call__(self, learner: Any, params: Any) -> Score:
        """Returns the score of the learner with these parameters.

        `ProtoNet` and `Classifier`, whatever their ways, tell as many classes apart as
        the episodes have.
        """
        return self.episodes(learner, params).score()

    def episodes(self, learner: Any, params: Any) -> EpisodeScores:
        """Returns the scores episode by episode; those without a query are left out."""
        learner = for_ways(learner, self._ways)
        scores, weights = [], []
        with closing(self._blocks()) as blocks:
            for block in blocks:
                score, weight = scores_of_block(
                    params,
                    block,
                    learner=learner,
                    shots=self._shots,
                    is_regression=self._is_regression,
                    encoding=code_of(self.data),
                )
                scores.append(np.asarray(score)[block.unit_mask > 0])
                weights.append(np.asarray(weight)[block.unit_mask > 0])
        sums, queries = (
            np.concatenate(a).astype(np.float64) for a in (scores, weights)
        )
        used = queries > 0
        if np.count_nonzero(used) < 2:
            raise ValueError(
                "evaluation needs at least 2 episodes with a query example"
            )
        return EpisodeScores(sums[used], queries[used], self._is_regression)

    def _blocks(self) -> Generator[Block, None, None]:
        """The episodes, gathered anew each time: all at once they may not fit."""
        size, draw = self._block_size, self._draw

        def made(start: int) -> Block:
            here = slice(start, start + size)
            examples, mask = draw.examples[here], draw.mask[here]  # there are no nulls
            part = draw._replace(examples=examples, mask=mask, holds_null=None)
            return make_blocks(part, self.data, block_size=size)[0]

        starts = range(0, len(draw.mask), size)
        return prefetched(made, ((start,) for start in starts))


def for_ways(learner: Any, ways: int | None) -> Any:
    """Returns the learner for this number of classes, if it can tell any apart."""
    if isinstance(learner, Started):
        return Started(for_ways(learner.learner, ways))
    if isinstance(learner, ProtoNet | Classifier) and ways is not None:
        return dataclasses.replace(learner, ways=ways)
    return learner


@functools.partial(
    jax.jit, static_argnames=("learner", "shots", "is_regression", "encoding")
)
def scores_of_block(
    params: Any,
    block: Any,
    *,
    learner: Any,
    shots: int,
    is_regression: bool,
    encoding: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns sums of hits (or squared errors) and numbers of queries, of episodes.

    Each is a function of its own row of the block and of the parameters.
    """

    def one(block: Any) -> tuple[jax.Array, jax.Array]:
        block = decoded(as_trained(block, training_dtype(params)), encoding)
        episode = to_episode(block, shots=shots, is_regression=is_regression)
        predicted = learner.predict(params, episode)
        weight = episode.query_mask
        if is_regression:
            score = jnp.square(predicted - episode.query_targets)
        else:
            kind = episode.query_targets.dtype
            best = jax.lax.argmax(predicted, predicted.ndim - 1, kind)
            hits = best == episode.query_targets
            score = hits.astype(weight.dtype)
        return jnp.sum(score * weight), jnp.sum(weight)

    return jax.lax.map(one, block)
