"""Scores on held-out tasks, without noise and with it; calibrated probabilities.

The guarantee does not cover data that an `Evaluation` scores. Temperatures are fitted
on those that chose the released stage.

A noisy score of a `PrivateValidation` may steer the run and be released. Each clip unit
(an episode of held-out classes) contributes 2 score - 1, which lies in [-1, 1] and
depends on what was drawn of it and on released parameters. The sum with Gaussian noise
is accounted as a `GaussianStep`. Proof: docs/proofs.md, "Noisy validation".
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.optimize
import scipy.special

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import (
    IndependentEpisodes,
    MultistageSampling,
    WithoutReplacement,
    epoch_scheme,
)
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.trainer.config.training_parts import DISCRETE, NOISES
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.generators import Keys, generator
from jaxdp_episodic.trainer.draw.sampler import Draw, EpisodeSampler
from jaxdp_episodic.trainer.gradient.noise import checked_noise, drawn_noise
from jaxdp_episodic.trainer.gradient.precision import as_trained, training_dtype
from jaxdp_episodic.trainer.learners.episode import (
    make_blocks,
    to_episode,
    zero_block,
)
from jaxdp_episodic.trainer.learners.learners import ABSENT, Classifier, ProtoNet
from jaxdp_episodic.trainer.run import checks
from jaxdp_episodic.trainer.statistics.statistics import Started

_BLOCK_EPISODES = 50  # most episodes in a block
_BLOCK_BYTES = 2**26  # most bytes of a block's float32 inputs
_Z95 = 1.959963984540054  # normal quantile at 97.5 %


def digits(score: float) -> str:
    """Returns a score as text; one of prices, say, needs no decimals."""
    return f"{score:.4f}" if abs(score) < 1e3 else f"{score:,.0f}"


class Score(NamedTuple):
    """A mean over episodes, with a 95 % interval.

    Attributes:
      name: "accuracy", or "rmse" (root of the mean squared error over all queries).
      mean: the score.
      low: lower end of the interval.
      high: upper end of the interval.
      num_episodes: number of episodes.
    """

    name: str
    mean: float
    low: float
    high: float
    num_episodes: int

    def __str__(self) -> str:
        return (
            f"{self.name} {digits(self.mean)}   (95 % interval {digits(self.low)} to "
            f"{digits(self.high)}, {self.num_episodes:,} held-out episodes)"
        )


class EpisodeScores(NamedTuple):
    """The scores of one learner on J episodes of an `Evaluation`, by class or task."""

    sums: np.ndarray  # (J, K) float64 hits of each class; or (J, 1) squared errors
    weights: np.ndarray  # (J, K) float64 numbers of queries, the same for every learner
    groups: np.ndarray  # (J, K) integers: the class or task; -1 if it has no examples
    is_regression: bool

    @property
    def value(self) -> float:
        """Mean score over all queries; minus the mean error for regression.

        It is -inf if the mean is not finite.
        """
        value = float(self.sums.sum() / self.weights.sum())
        if not math.isfinite(value):
            return -math.inf
        return -value if self.is_regression else value

    def score(self) -> Score:
        """Returns the mean over all queries, and its interval by the delta method."""
        number, mean = len(self.sums), self.sums.sum() / self.weights.sum()
        half = _Z95 * self._over_episodes(self.sums - mean * self.weights)
        low, high = mean - half, mean + half
        if not self.is_regression:
            return Score("accuracy", mean, max(low, 0.0), min(high, 1.0), number)
        low, mean, high = (math.sqrt(max(value, 0.0)) for value in (low, mean, high))
        return Score("rmse", mean, low, high, number)

    @property
    def has_other_classes(self) -> bool:
        """Whether the episodes do not all have the same classes (tasks)."""
        return self.num_classes > (self.groups >= 0).sum(axis=1).min()

    @property
    def num_classes(self) -> int:
        """Number of different classes (tasks) in all episodes."""
        return len(np.unique(self.groups[self.groups >= 0]))

    def ahead_of(self, other: EpisodeScores) -> tuple[float, float]:
        """Returns how much higher `value` is than another's, and its standard error.

        The standard error is of paired differences, over the draw of the episodes and
        of their classes (tasks). If all episodes have the same classes, it is over
        episodes only.
        """
        differences = self.sums - other.sums
        if self.is_regression:
            differences = -differences
        mean = differences.sum() / self.weights.sum()
        residuals = differences - mean * self.weights
        error = self._over_episodes(residuals)
        if self.has_other_classes:
            error = math.hypot(error, self._over_classes(residuals))
        return float(mean), error

    def _over_episodes(self, residuals: np.ndarray) -> float:
        """Standard error of a ratio to the weights, from each episode's residuals."""
        of_each = residuals.sum(axis=1)
        deviation = of_each.std(ddof=1) / self.weights.sum()
        return float(deviation) * math.sqrt(len(of_each))

    def _over_classes(self, residuals: np.ndarray) -> float:
        """Standard error over the draw of the classes, beyond that of the episodes.

        Episodes that share classes are correlated. The product of the residuals of two
        episodes counts once for each class that they share (Aronow, Samii and Assenova
        2015, doi:10.1093/pan/mpv018; their dyads are episodes here). The sum is scaled
        up from the classes in the episodes to all possible classes, and multiplied by
        the quantile of Student's t, with one degree of freedom less than classes, that
        has the same probability as one standard error of a normal: 1.32 for 3 classes,
        1.08 for 8.
        """
        there, of_each = self.groups >= 0, residuals.sum(axis=1)
        names, where = np.unique(self.groups[there], return_inverse=True)
        number, ways = len(names), there.sum() / len(there)
        of_slots = np.broadcast_to(of_each[:, None], there.shape)[there]
        share = np.bincount(where) / len(of_each)  # of the episodes that have a class
        alone = (1 - 2 * share) * np.bincount(where, np.square(of_slots))
        alone += share**2 * np.square(of_each).sum()
        shared = np.square(np.bincount(where, of_slots)) - alone
        scale = (number - 1) / (number - ways)
        scale *= math.sqrt(number / (number - 1)) / self.weights.sum()
        quantile = scipy.special.stdtrit(number - 1, scipy.special.ndtr(1.0))
        return float(quantile * scale * math.sqrt(max(shared.sum(), 0.0)))


class Evaluation:
    """Scores a learner on the same held-out episodes at each call.

    The score is *an estimate*, with a normal interval over the choice of the episodes
    from these classes. The training's epsilon does not protect the held-out people:
    publishing a score discloses their data.

    Args:
      data: the held-out data.
      ways: classes an episode; None for regression, one task an episode.
      shots: support examples, of each class or of the task.
      queries: query examples, of each class or of the task.
      num_episodes: at least 2; 600 is customary in the field.
      seed: of the episodes.

    Attributes:
      data, ways, shots, queries: as given.

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
        given = {"shots": shots, "queries": queries}
        if ways is not None:
            given["ways"] = ways
        for name, value in given.items():
            _validation.whole_number(name, value)
        _validation.whole_number("num_episodes", num_episodes, minimum=2)
        _validation.instance("data", data, ExampleTable, "an ExampleTable")
        if ways is None and data.targets is None:
            raise ValueError("data must have targets for regression, got none")
        names, counts = data.level_names, data.population.children_counts
        most = int(np.max(counts[len(names) - 2], initial=0))
        if ways is not None and ways > most:
            raise ValueError(
                f"ways must be at most {most}, the number of held-out classes, got "
                f"{ways}"
            )
        # Slots beyond the largest class would be computed and masked.
        largest = int(np.max(counts[-1], initial=0))
        sizes = [1] * (len(names) - 2) + [1 if ways is None else ways]
        sizes.append(shots + min(queries, max(largest - shots, 1)))
        levels = [
            WithoutReplacement(name, size=size)
            for name, size in zip(names, sizes, strict=True)
        ]
        sampler = EpisodeSampler(
            IndependentEpisodes(MultistageSampling(*levels), num_episodes=num_episodes),
            data.population,
            clip_unit="episode",
        )
        with _validation.prefixed(f"seed={seed!r}"):
            generator = np.random.default_rng(seed)
        draw = sampler.draw(generator)
        # Drop the axes of levels above the episode, which have one unit each.
        shape = (num_episodes, *draw.mask.shape[-1 if ways is None else -2 :])
        examples, mask = draw.examples.reshape(shape), draw.mask.reshape(shape)
        # no clip unit is null
        self._draw = draw._replace(examples=examples, mask=mask, holds_null=None)
        self.data, self.ways, self.shots, self.queries = data, ways, shots, queries
        self._seed = seed
        self._how = {"ways": ways, "shots": shots}
        # The first example of each class (task), if any, is in its first slot.
        groups = np.where(mask[..., 0], data.class_places[examples[..., 0]], -1)
        self._groups = groups.reshape(num_episodes, -1)
        # The block size changes no score: episodes are evaluated one by one.
        bytes_each = 4 * math.prod(shape[1:]) * math.prod(data.features.shape[1:])
        fitting = max(_BLOCK_BYTES // max(bytes_each, 1), 1)
        self._block_size = min(_BLOCK_EPISODES, num_episodes, fitting)

    def __call__(self, learner: Any, params: Any) -> Score:
        """Returns the score of a learner, for any number of ways."""
        return self.episodes(learner, params).score()

    def episodes(self, learner: Any, params: Any) -> EpisodeScores:
        """Returns the scores of each class of each episode that has a query."""
        score = functools.partial(scores_of, num_classes=self._groups.shape[1])
        sums, queries = self._of_each(score, learner, params)
        used = queries.sum(axis=1) > 0
        if np.count_nonzero(used) < 2:
            raise ValueError(
                "evaluation needs at least 2 episodes with a query example"
            )
        groups, kind = self._groups[used], self.ways is None
        return EpisodeScores(sums[used], queries[used], groups, kind)

    def with_shots(self, shots: int, num_episodes: int) -> Evaluation:
        """Returns an evaluation on the same data with other episodes."""
        how = {"ways": self.ways, "queries": self.queries, "seed": self._seed}
        return Evaluation(self.data, shots=shots, num_episodes=num_episodes, **how)

    def logits(self, learner: Any, params: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns each query's logits, (Q, ways) float64, and its class, (Q,)."""

        def there(logits: Any, targets: Any, mask: Any) -> tuple[Any, Any]:
            return logits[mask > 0].astype(np.float64), targets[mask > 0]

        return self._of_each(there, learner, params)

    def trace(self, learner: Any, params: Any) -> None:
        """Traces the predictions for a block; raises what the learner raises."""
        zeros = zero_block(self.data, self._draw.mask.shape[1:], self._block_size)
        ask = functools.partial(predicted_of_block, learner=learner, **self._how)
        jax.eval_shape(ask, params, zeros)

    def _of_each(
        self, act: Callable[..., tuple[Any, Any]], learner: Any, params: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Joins what ``act`` makes of each block's predictions, targets and mask."""
        found = []
        for block in make_blocks(self._draw, self.data, block_size=self._block_size):
            asked = predicted_of_block(params, block, learner=learner, **self._how)
            found.append(act(*(np.asarray(a)[block.unit_mask > 0] for a in asked)))
        first, second = map(np.concatenate, zip(*found, strict=True))
        return first, second


def for_ways(learner: Any, ways: int | None) -> Any:
    """Returns the learner for this number of classes, if it is for any number."""
    if isinstance(learner, Started):
        return Started(for_ways(learner.learner, ways))
    if isinstance(learner, ProtoNet | Classifier) and ways is not None:
        return dataclasses.replace(learner, ways=ways)
    return learner


@functools.partial(jax.jit, static_argnames=("learner", "ways", "shots"))
def predicted_of_block(
    params: Any,
    block: Any,
    *,
    learner: Any,
    ways: int | None,
    shots: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the predictions, targets and mask of the queries of each episode.

    ``ways`` is None for regression.
    """
    learner, is_regression = for_ways(learner, ways), ways is None

    def one(block: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        block = as_trained(block, training_dtype(params))
        episode = to_episode(block, shots=shots, is_regression=is_regression)
        predicted, mask = learner.predict(params, episode), episode.query_mask
        if predicted.ndim != 2 - is_regression or len(predicted) != len(mask):
            wanted = "(queries,) values" if is_regression else "(queries, ways) logits"
            raise ValueError(
                f"predict must return {wanted} for {len(mask)} queries, got shape "
                f"{predicted.shape}"
            )
        return predicted, episode.query_targets, mask

    return jax.lax.map(one, block)


def scores_of(
    predicted: Any, targets: Any, mask: Any, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns hits (or squared errors) and queries of each class of each episode."""
    predicted, targets, mask = (
        np.asarray(a, float) for a in (predicted, targets, mask)
    )
    if predicted.ndim == 2:
        with np.errstate(all="ignore"):  # of a run that diverged
            score = np.square(predicted - targets)
    else:
        score = predicted.argmax(axis=2) == targets
    score, shape = np.where(mask > 0, score, 0.0), (len(mask), num_classes, -1)
    return score.reshape(shape).sum(axis=2), mask.reshape(shape).sum(axis=2)


# --- Noisy scores of private data ---

GRID = 2**16
"""Grid steps in a contribution of 1, the largest."""

# Clip units whose scores are computed in one call.
_AT_ONCE = 50


class NoisyScore(NamedTuple):
    """A released score: unbiased value, and standard deviation of its noise."""

    value: float
    deviation: float


class PrivateValidation:
    """The noisy score of a model on private held-out tasks: one release a call.

    The score of an episode is the share of correct queries or, for regression, 1 less
    the mean squared error over ``error_bound``, at least 0. An episode without queries,
    or with a score that is not finite, contributes nothing.

    Args:
      data: the held-out data.
      step: how episodes are sampled, with a noise multiplier relative to 1, the largest
        contribution of an episode; this step is charged. Its clip unit is one episode,
        and its sizes are public: stated in the sampling, or
        ``population=data.population`` under replace_one.
      shots: support examples, of each class or of the task; the others are queries.
      error_bound: public, > 0, for regression; None for classification.
      normalizer: public number of episodes a call. Default: their mean, if public.
      fixed: every call uses the same episodes, so that scores differ by model and noise
        only. Permitted only if every unit is in every sample: then the accounting does
        not rely on a secret sample.
      noise: "discrete" or "gaussian"; see `Trainer`.

    Attributes:
      step: as given.
      data: as given.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a value out of range; sizes that do not fit; a clip unit that is not
        one episode; ``fixed`` with a sampling that leaves units out.
      NotImplementedError: sampling in epochs.
    """

    def __init__(
        self,
        data: ExampleTable,
        step: GaussianStep,
        *,
        shots: int,
        error_bound: float | None = None,
        normalizer: float | None = None,
        fixed: bool = False,
        noise: str = DISCRETE,
    ) -> None:
        checks.check_data(step, data)
        if epoch_scheme(step.design) is not None or step.bands is not None:
            raise NotImplementedError(
                "a validation in epochs or with bands is not covered: a single step of "
                "an epoch has no guarantee of its own, and groups take turns; sample "
                "at every call (Poisson, WithoutReplacement)"
            )
        self.step, self.data, self.shots = step, data, shots
        _validation.whole_number("shots", shots)
        self.noise = _validation.choice("noise", noise, NOISES)
        checked_noise(step.noise_multiplier, noise)
        self.error_bound = error_bound
        if error_bound is not None:
            self.error_bound = _validation.float32_number("error_bound", error_bound)
            if data.targets is None:
                raise ValueError("data must have targets with error_bound, got none")
        self._sampler = checks.sampler_of(step, data)
        shape, axes = self._sampler.slot_shape, 1 if error_bound is not None else 2
        if len(shape) != axes or shape[-1] <= shots:
            raise ValueError(
                "step must clip one episode with more examples of each class (or of "
                f"the task) than shots={shots}, got {axes} axes of {shape}"
                if len(shape) == axes
                else f"step.clip_unit must be one episode of {axes} level(s) of slots "
                f"below it, got {str(step.clip_unit)!r} with {len(shape)}"
            )
        self._how = {"ways": None if axes == 1 else shape[-2], "shots": shots}
        self.normalizer = checks.public_normalizer(normalizer, step, self._sampler)
        self.fixed = _validation.flag("fixed", fixed)
        if fixed and not _draws_everybody(step):
            raise ValueError(
                "fixed must be False unless every protected unit is in every sample: "
                "the guarantee relies on a new and secret sample each time"
            )
        self._kept: Draw | None = None

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise of a score."""
        return float(self.step.noise_multiplier) / (2 * self.normalizer)

    def described(self) -> dict[str, Any]:
        """Returns what it is, as plain values."""
        return {
            "data": self.data.fingerprint,
            "shots": self.shots,
            "error_bound": self.error_bound,
            "normalizer": self.normalizer,
            "fixed": self.fixed,
        }

    def check_learner(self, learner: Any) -> None:
        """Refuses a learner whose predictions cannot be scored here."""
        if learner.is_regression != (self.error_bound is not None):
            raise ValueError(
                "error_bound must be given for a learner of numbers, and only for "
                f"such, got {self.error_bound!r} for {type(learner).__name__}"
            )
        checks.check_targets(learner, self.data, self.step)
        learns_alone = not getattr(learner, "couples_examples", True)
        if learns_alone and getattr(learner, "ways", None) is None:
            raise ValueError(
                "learner must predict on episodes to be validated, got "
                f"{type(learner).__name__}"
            )

    def release(self, learner: Any, params: Any, keys: Keys, number: int) -> np.ndarray:
        """Returns the noised mean contribution, a float64 scalar: all that is released.

        Args:
          learner: makes the predictions.
          params: released parameters.
          keys: of the run.
          number: of the release in the run; its keys are used for nothing else.
        """
        multiplier = checked_noise(self.step.noise_multiplier, self.noise)
        draw = self._draw(keys, number)
        total = int(np.sum(self._contributions(learner, params, draw)))
        stream = generator(keys.new("noise", number))
        noise = drawn_noise(self.noise, GRID * multiplier, 1, stream)[0]
        return np.asarray((total + noise) / GRID / self.normalizer, np.float64)

    def try_out(self, learner: Any, params: Any) -> None:
        """Compiles the predictions for a block, and makes them for zeros."""
        zeros = zero_block(self.data, self._sampler.slot_shape, _AT_ONCE)
        jax.block_until_ready(self._predicted(learner, params, zeros))

    def score(self, released: Any) -> NoisyScore:
        """Returns the score that a release stands for; a function of the release."""
        return NoisyScore((1 + float(released)) / 2, self.deviation)

    def _draw(self, keys: Keys, number: int) -> Draw:
        if not self.fixed:
            return self._sampler.draw(generator(keys.new("draw", number)))
        kept = self._kept or self._sampler.draw(generator(keys.new("validation", 0)))
        self._kept = kept
        return kept

    def _contributions(self, learner: Any, params: Any, draw: Draw) -> np.ndarray:
        """(J,) whole numbers of grid steps in [-GRID, GRID]; 0 for null units."""
        found = []
        for block in make_blocks(draw, self.data, block_size=_AT_ONCE):
            asked = jax.device_get(self._predicted(learner, params, block))
            sums, weights = (each.sum(axis=1) for each in scores_of(*asked, 1))
            # The value for a unit without queries is not used.
            mean = sums / np.maximum(weights, 1.0)
            score = mean if self.error_bound is None else 1 - mean / self.error_bound
            counts = (block.unit_mask > 0) & (weights > 0) & np.isfinite(score)
            score = np.clip(np.where(counts, score, 0.5), 0.0, 1.0)
            found.append(np.rint((2 * score - 1) * GRID).astype(np.int64))
        return np.concatenate(found)

    def _predicted(self, learner: Any, params: Any, block: Any) -> Any:
        return predicted_of_block(params, block, learner=learner, **self._how)


def _draws_everybody(step: GaussianStep) -> bool:
    """Whether every protected unit is in every draw, and changes no other unit's."""
    if step.people is not None:
        return False
    is_last = str(step.privacy_unit) == step.design.level_names[-1]
    if step.neighboring_relation == "add_remove" and not is_last:
        return False
    return all(math.isclose(float(np.min(r)), 1.0) for r in step.path_rates.rates)


# --- Calibrated probabilities ---

_SHOTS = (1, 2, 4, 8, 16)  # fitted if the held-out classes have as many examples
# times the fitted number of classes; above, the calibration error exceeds 0.05
_MOST_WAYS = 2
_EPISODES = 200  # episodes of each fit
_LOG_SCALE = (-12.0, 12.0)  # range of log(1 / temperature)
_DIGITS = 3  # significant digits of a temperature
_BINS = 10  # of probabilities


class Calibration(NamedTuple):
    """Temperatures fitted on episodes of held-out classes."""

    ways: int  # classes of an episode
    shots: tuple[int, ...]  # support examples of a class, increasing
    temperatures: tuple[float, ...]  # for each number of shots

    def temperature(self, shots: float) -> float:
        """Log-log interpolated temperature; constant outside the fitted shots."""
        known = np.log(self.shots), np.log(self.temperatures)
        return math.exp(np.interp(math.log(shots), *known))

    def covers(self, ways: int, shots: float) -> bool:
        """Returns whether probabilities were fitted for such a support."""
        is_fitted = self.shots[0] <= shots <= self.shots[-1]
        return is_fitted and ways <= _MOST_WAYS * self.ways

    def __str__(self) -> str:
        first, last = self.shots[0], self.shots[-1]
        shots = f"{first}" if first == last else f"{first} to {last}"
        labelled = f"{shots} labelled example{'s' * (last > 1)}"
        return f"episodes of {self.ways} classes with {labelled} of each"


class Reliability(NamedTuple):
    """How often the predicted class is right, by its probability, on held-out data."""

    probability: tuple[float, ...]  # mean of each bin of [0, 1] that has queries
    accuracy: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def error(self) -> float:
        """Expected calibration error: mean gap between the two over all queries.

        Reference: Guo, Pleiss, Sun, Weinberger (2017), arXiv:1706.04599.
        """
        gaps = np.abs(np.subtract(self.probability, self.accuracy))
        return float(np.average(gaps, weights=self.counts))


def calibrated(evaluation: Evaluation, learner: Any, params: Any) -> Calibration | None:
    """Returns a stage's temperatures; None for regression, or infinite logits."""
    ways = evaluation.ways
    if learner.is_regression or ways is None or ways < 2:
        return None
    sizes = evaluation.data.population.children_counts[-1]  # of the classes
    most = int(np.median(sizes)) - evaluation.queries
    wanted = {evaluation.shots, *(shots for shots in _SHOTS if shots <= most)}
    fitted = {}
    for shots in sorted(wanted):
        logits, targets = evaluation.with_shots(shots, _EPISODES).logits(
            learner, params
        )
        if not np.isfinite(logits).all():
            return None
        fitted[shots] = _temperature(logits, targets)
    return Calibration(ways, tuple(fitted), tuple(fitted.values()))


def reliability(
    evaluation: Evaluation, learner: Any, params: Any, temperature: float
) -> Reliability:
    """Returns how reliable a stage's probabilities are on the evaluation's episodes."""
    logits, targets = evaluation.logits(learner, params)
    probabilities = scipy.special.softmax(logits / temperature, axis=1)
    top, right = probabilities.max(axis=1), logits.argmax(axis=1) == targets
    bins = np.minimum((top * _BINS).astype(int), _BINS - 1)
    counts = np.bincount(bins, minlength=_BINS)
    used = counts > 0
    means = (np.bincount(bins, x, _BINS)[used] / counts[used] for x in (top, right))
    probability, accuracy = (tuple(mean.tolist()) for mean in means)
    return Reliability(probability, accuracy, tuple(counts[used].tolist()))


def calibration_of(fields: Mapping[str, Any]) -> Calibration:
    """Returns the calibration in a release's file, checked."""
    ways = _validation.whole_number("calibration.ways", fields["ways"])
    shots, temperatures = fields["shots"], fields["temperatures"]
    is_table = isinstance(shots, list) and isinstance(temperatures, list)
    if not is_table or not 0 < len(shots) == len(temperatures):
        raise ValueError("calibration must have one temperature for each of its shots")
    for number in shots:
        _validation.whole_number("calibration.shots", number)
    if sorted(set(shots)) != shots:
        raise ValueError(f"calibration.shots must increase, got {shots}")
    for value in temperatures:
        _validation.float32_number("calibration.temperatures", value)
    return Calibration(ways, tuple(shots), tuple(temperatures))


def _temperature(logits: np.ndarray, targets: np.ndarray) -> float:
    """The maximum-likelihood temperature.

    Targets are smoothed by one query: without that a separable sample has temperature
    0. Reference: Platt (1999), Probabilistic outputs for support vector machines.
    """
    smooth = 1 / (len(logits) + 2)
    own, is_there = (np.arange(len(logits)), targets), logits > ABSENT

    def loss(log_scale: float) -> float:
        log_p = scipy.special.log_softmax(math.exp(log_scale) * logits, axis=1)
        spread = log_p.mean(where=is_there)
        return -float((1 - smooth) * log_p[own].mean() + smooth * spread)

    scale = scipy.optimize.minimize_scalar(loss, bounds=_LOG_SCALE, method="bounded").x
    return float(f"{math.exp(-scale):.{_DIGITS}g}")
