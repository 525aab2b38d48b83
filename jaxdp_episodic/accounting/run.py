"""From a step to its dominating pair: which theorem holds, with which numbers.

This is the one place where the description of a step meets the theorems. Every
accountant takes the result, a `DominatingPair`, whatever the design was. In the
multistage theorem (docs/theory.md, "Profiles") ``c`` is the clip level and ``L`` the
privacy unit's; the levels above ``c`` only scale delta (``outer_rate``), level ``c``
and those below it amplify.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxdp_episodic.describe.designs import GroupedClasses, IndependentEpisodes
from jaxdp_episodic.describe.rates import max_contributions
from jaxdp_episodic.describe.schemes import MultistageSampling, Poisson
from jaxdp_episodic.describe.step import STEP, ComposedSteps, GaussianStep

MOST_EPISODES = 1_000_000
SAMPLED, SWAPPED, ANTIPODAL, EPISODES = "sampled", "swapped", "antipodal", "episodes"


class DominatingPair(NamedTuple):
    """One step's dominating pair, for every setting and every path.

    Array fields are float64 and broadcast together to ``(*step.shape, P)``, the last
    axis over the distinct paths (P = 1 without a `Population`).

    Attributes:
      kind: "sampled", "swapped", "antipodal" or "episodes": which profile of
        ``losses.profiles`` holds.
      outer_rate: chance that the unit above the clip level is drawn; a factor on delta.
      rate: amplification rate at the clip level (``p``, or ``eta`` for "swapped" and
        "episodes").
      inner_rate: rate below the clip level; only "antipodal" has one, else 1.
      sensitivity: how far one protected unit moves the sum, in clip norms: the shift of
        the pair is ``sensitivity / noise_multiplier``.
      noise_multiplier: of the step.
      num_episodes: independent episodes a step; 1 elsewhere.
    """

    kind: str
    outer_rate: np.ndarray
    rate: np.ndarray
    inner_rate: np.ndarray
    sensitivity: np.ndarray
    noise_multiplier: np.ndarray
    num_episodes: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Broadcast shape: the step's shape and the paths."""
        return np.broadcast_shapes(*(np.shape(a) for a in self[1:]))

    def with_noise_multiplier(self, noise_multiplier: np.ndarray) -> DominatingPair:
        """Returns the same pair at other noise, without a path axis."""
        return self._replace(noise_multiplier=np.asarray(noise_multiplier)[..., None])


def dominating_pair(step: GaussianStep) -> DominatingPair:
    """Returns the dominating pair of one step.

    Raises:
      ValueError: contributions clipped below the privacy unit, of which no public
        bound of the number is known.
      NotImplementedError: more independent episodes than a sum can have terms.
    """
    if isinstance(step.design, IndependentEpisodes):
        rate = _product(step.path_rates.rates)
        episodes = np.asarray(step.design.num_episodes, np.float64)[..., None]
        if np.max(episodes, initial=0) > MOST_EPISODES:
            raise NotImplementedError(
                f"num_episodes must be at most {MOST_EPISODES:,} (the bound sums "
                f"as many terms), got {np.max(episodes):,.0f}"
            )
        return _pair(step, EPISODES, rate=rate, sensitivity=2.0, num_episodes=episodes)
    if isinstance(step.design, GroupedClasses):
        return _grouped_pair(step, step.design)
    return _multistage_pair(step, step.design)


def resolve(
    step: GaussianStep | ComposedSteps, num_steps: np.ndarray | None
) -> tuple[tuple[DominatingPair, ...], tuple[np.ndarray, ...]]:
    """Returns the pairs of a run and how often each is taken, with a path axis."""
    if isinstance(step, ComposedSteps):
        pairs = tuple(dominating_pair(part) for part in step.steps)
        counts = tuple(np.asarray(c, np.float64)[..., None] for c in step.counts)
        return pairs, counts
    assert num_steps is not None  # the callers check
    return (dominating_pair(step),), (np.asarray(num_steps, np.float64)[..., None],)


def _multistage_pair(
    step: GaussianStep, sampling: MultistageSampling
) -> DominatingPair:
    """The rows of the multistage theorem."""
    levels = step.path_rates
    last = levels.num_levels
    add_remove = step.neighboring_relation == "add_remove"
    if step.clip_unit == STEP:
        return _pair(step, SWAPPED, rate=_product(levels.rates), sensitivity=2.0)
    clip = sampling.level_names.index(str(step.clip_unit)) + 1
    contributions = np.ones(1)
    if clip > last:
        # Clipped below the protected unit: the unit contributes k clip norms.
        contributions = _contributions(step, sampling, last, clip)
        clip = last
    outer = _product(levels.rates[: clip - 1])
    rate, inner = levels.rates[clip - 1], _product(levels.rates[clip:])
    if isinstance(sampling.levels[clip - 1], Poisson):
        if clip == last and add_remove:
            return _pair(
                step, SAMPLED, outer=outer, rate=rate, sensitivity=contributions
            )
        return _pair(
            step,
            ANTIPODAL,
            outer=outer,
            rate=rate,
            inner=inner,
            sensitivity=contributions,
        )
    if clip == last and add_remove:
        # Drawing all children for certain leaves nothing to be swapped for: C, not 2C.
        everyone = levels.covers_all(clip, step.neighboring_relation)
        sensitivity = np.where(everyone, 1.0, 2.0) * contributions
        return _pair(step, SAMPLED, outer=outer, rate=rate, sensitivity=sensitivity)
    return _pair(
        step, SWAPPED, outer=outer, rate=rate * inner, sensitivity=2 * contributions
    )


def _grouped_pair(step: GaussianStep, sampling: GroupedClasses) -> DominatingPair:
    """Grouped classes: a class is in at most one episode of a step."""
    episode_rate, class_rate, *below = step.path_rates.rates
    inner = _product(below)
    if isinstance(sampling.episodes, Poisson):
        # Given the public partition: a Poisson draw of clip units. A class below its
        # episode is protected at inner rate 1, with the antipodal pair for both
        # relations: an emptied class moves its episode, it does not remove it.
        return _pair(step, ANTIPODAL, rate=episode_rate, inner=inner)
    rate = episode_rate * class_rate * inner
    return _pair(step, SWAPPED, rate=rate, sensitivity=2.0)


def _contributions(
    step: GaussianStep, sampling: MultistageSampling, unit_level: int, clip_level: int
) -> np.ndarray:
    """(..., 1) the most clipped contributions of one protected unit in a step."""
    bound = max_contributions(
        sampling,
        step.population,
        unit_level=unit_level,
        clip_level=clip_level,
        neighboring_relation=step.neighboring_relation,
    )
    return np.asarray(bound, np.float64)[..., None]


def _pair(
    step: GaussianStep,
    kind: str,
    *,
    rate: np.ndarray,
    outer: np.ndarray | float = 1.0,
    inner: np.ndarray | float = 1.0,
    sensitivity: np.ndarray | float = 1.0,
    num_episodes: np.ndarray | float = 1.0,
) -> DominatingPair:
    return DominatingPair(
        kind,
        outer_rate=_with_path_axis(outer),
        rate=_with_path_axis(rate),
        inner_rate=_with_path_axis(inner),
        sensitivity=_with_path_axis(sensitivity),
        noise_multiplier=np.asarray(step.noise_multiplier, np.float64)[..., None],
        num_episodes=_with_path_axis(num_episodes),
    )


def _with_path_axis(field: np.ndarray | float) -> np.ndarray:
    return np.atleast_1d(np.asarray(field, np.float64))


def _product(rates: tuple[np.ndarray, ...] | list[np.ndarray]) -> np.ndarray:
    result = np.ones(1)
    for rate in rates:
        result = result * rate
    return result
