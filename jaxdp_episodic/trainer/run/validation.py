"""A noisy score on private held-out data, which may steer the run and be released.

Each clip unit (an episode of held-out classes) contributes 2 score - 1, which lies in
[-1, 1] and depends on what was drawn of it and on released parameters. The sum with
Gaussian noise is accounted as a `GaussianStep`. Proof: docs/proofs.md, "Noisy
validation".
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import epoch_scheme
from jaxdp_episodic.accountant.describe.step import GaussianStep
from jaxdp_episodic.trainer.config.training_parts import DISCRETE, NOISES
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.generators import Keys, generator
from jaxdp_episodic.trainer.draw.sampler import Draw
from jaxdp_episodic.trainer.gradient.noise import checked_noise, drawn_noise
from jaxdp_episodic.trainer.learners.episode import (
    Block,
    code_of,
    make_blocks,
    zero_block,
)
from jaxdp_episodic.trainer.run import checks
from jaxdp_episodic.trainer.run.evaluation import scores_of_block

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
        if epoch_scheme(step.design) is not None or step.bands is not None:
            raise NotImplementedError(
                "a validation in epochs or with bands is not covered: a single step of "
                "an epoch has no guarantee of its own, and groups take turns; sample "
                "at every call (Poisson, WithoutReplacement)"
            )
        checks.check_data(step, data)
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
        if not self.fixed:
            draw = self._sampler.draw(generator(keys.new("draw", number)))
        else:
            key = keys.new("validation", 0)
            draw = self._kept or self._sampler.draw(generator(key))
            self._kept = draw
        total = int(np.sum(self._contributions(learner, params, draw)))
        stream = generator(keys.new("noise", number))
        noise = drawn_noise(self.noise, GRID * multiplier, 1, stream)[0]
        return np.asarray((total + noise) / GRID / self.normalizer, np.float64)

    def trace(self, learner: Any, params: Any) -> None:
        """Traces the scores of a block; raises what the learner raises."""
        jax.eval_shape(functools.partial(self._scores, learner), params, self._zeros)

    def try_out(self, learner: Any, params: Any) -> None:
        """Compiles the scores of a block, and runs them on zeros."""
        jax.block_until_ready(self._scores(learner, params, self._zeros))

    def score(self, released: Any) -> NoisyScore:
        """Returns the score that a release stands for; a function of the release."""
        return NoisyScore((1 + float(released)) / 2, self.deviation)

    def _contributions(self, learner: Any, params: Any, draw: Draw) -> np.ndarray:
        """(J,) whole numbers of grid steps in [-GRID, GRID]; 0 for null units."""
        found = []
        for block in make_blocks(draw, self.data, block_size=_AT_ONCE):
            both = jax.device_get(self._scores(learner, params, block))
            sums, weights = (a.astype(np.float64).sum(axis=1) for a in both)
            # The value for a unit without queries is not used.
            mean = sums / np.maximum(weights, 1.0)
            score = mean if self.error_bound is None else 1 - mean / self.error_bound
            counts = (block.unit_mask > 0) & (weights > 0) & np.isfinite(score)
            score = np.clip(np.where(counts, score, 0.5), 0.0, 1.0)
            found.append(np.rint((2 * score - 1) * GRID).astype(np.int64))
        return np.concatenate(found)

    @property
    def _zeros(self) -> Block:
        return zero_block(self.data, self._sampler.slot_shape, _AT_ONCE)

    def _scores(self, learner: Any, params: Any, block: Any) -> Any:
        """Sums and weights of a block's episodes."""
        ways = None if self.error_bound is not None else self._sampler.slot_shape[-2]
        how = {"ways": ways, "shots": self.shots, "encoding": code_of(self.data)}
        return scores_of_block(params, block, learner=learner, **how)


def _draws_everybody(step: GaussianStep) -> bool:
    """Whether every protected unit is in every draw, and changes no other unit's."""
    if step.people is not None:
        return False
    is_last = str(step.privacy_unit) == step.design.level_names[-1]
    if step.neighboring_relation == "add_remove" and not is_last:
        return False
    return all(math.isclose(float(np.min(r)), 1.0) for r in step.path_rates.rates)
