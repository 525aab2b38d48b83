"""Draws episodes: exactly what the accounted sampling says, from the same object.

On the host, in NumPy: a draw decides shapes, and takes well under a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.describe.designs import EPISODE, GroupedClasses, IndependentEpisodes
from jaxdp_episodic.describe.population import Population
from jaxdp_episodic.describe.schemes import (
    RESERVED_LEVEL_NAME,
    MultistageSampling,
    Poisson,
    Scheme,
    WithoutReplacement,
    numeric_fields,
)
from jaxdp_episodic.draw import clip_rows, tree_draw


class Draw(NamedTuple):
    """What one step drew; J clip units, 0 included.

    Attributes:
      examples: (J, *slot_shape) int64, places of the drawn examples (units of the last
        level) in the population's order; 0 where masked.
      mask: (J, *slot_shape) bool, True where a slot holds a drawn example. On the last
        axis those come first, in uniformly random order, so that the first ``shots``
        of them are a random support. On the axes before it the drawn units come
        first, also in random order; one that has nothing below it keeps its slot.
      units: (J,) int64, place of each clip unit among all units of its level; -1 where
        it was formed in the draw (an episode, the step), or is null.
      holds_null: (J,) bool, whether a null slot was drawn: such a clip unit has to
        contribute zero. None stands for none.
    """

    examples: np.ndarray
    mask: np.ndarray
    units: np.ndarray
    holds_null: np.ndarray | None = None


def step_generator(entropy: int, step: int) -> np.random.Generator:
    """Returns the random generator of one step, a function of its arguments only.

    So a resumed run draws what the interrupted one would have drawn, with the same
    version of NumPy. The generator (PCG64DXSM, seeded through a 128-bit hash) is
    statistically strong, not cryptographically: whoever sees many raw numbers of it
    could predict others. Draws therefore stay secret, and so does the entropy.

    Args:
      entropy: whole number >= 0 of any size; from the operating system, of 128 bits or
        more, for a private run.
      step: whole number >= 0; different steps have independent streams.

    Raises:
      TypeError: an argument that is not a whole number.
      ValueError: a negative one.
    """
    for name, value in (("entropy", entropy), ("step", step)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name} must be a whole number >= 0, got {value!r}")
        if value < 0:
            raise ValueError(f"{name} must be a whole number >= 0, got {value}")
    seed = np.random.SeedSequence(int(entropy), spawn_key=(int(step),))
    return np.random.Generator(np.random.PCG64DXSM(seed))


class EpisodeSampler:
    """Draws what a sampling spec describes from a real population.

    Nothing is capped, skipped or reused: every unit that a Poisson draw picks is
    returned, a unit that has become empty is still drawn (and contributes masked
    slots), one with fewer children than asked for gives all it has, and every call
    draws afresh.

    The real sizes of ``population`` rule the draw. If the spec has a ``population`` of
    its own, a public number, it must not contradict them, because the step may be
    accounted by it: without replacement it must not exceed the children of any unit
    (equal them, if said to be exact), under Poisson not fall below them.

    Args:
      sampling: the spec that is accounted, all its numeric fields scalars; a single
        scheme is wrapped.
      population: the tree that is drawn from, with as many levels as the spec has (for
        `GroupedClasses`: classes and examples).
      clip_unit: the level whose units become the rows of a draw, or "step": one row.
        The two episodic designs know "episode" only.
      population_is_accounted: True says that the step is given this `Population`, whose
        sizes then replace those of the spec, which need not fit.
      slots_of: under zero_out the protected level. The ``population`` of its scheme (or
        the ``num_classes`` of grouped classes) is then the number of slots that every
        unit one level up has; all are drawn alike, filled or not, see
        `Draw.holds_null`.

    Attributes:
      sampling: as given, a single scheme wrapped.
      population: as given.
      clip_unit: as given.
      slot_shape: one axis for each level below the clip unit. Its length is ``size``
        without replacement, the largest number of children under Poisson, and
        ``ways`` for the classes of an episode.
      expected_units: mean number of clip units in a draw.
      max_units: largest possible number of clip units in a draw.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: a spec with arrays, an unknown level, or a population that does not
        fit the spec.
      NotImplementedError: a clip unit for which the design has no theorem.
    """

    def __init__(
        self,
        sampling: MultistageSampling | GroupedClasses | IndependentEpisodes | Scheme,
        population: Population,
        *,
        clip_unit: str,
        population_is_accounted: bool = False,
        slots_of: str | None = None,
    ) -> None:
        if isinstance(sampling, Poisson | WithoutReplacement):
            sampling = MultistageSampling(sampling)
        if not isinstance(population, Population):
            raise TypeError(f"population must be a Population, got {population!r}")
        self.sampling, self.population = sampling, population
        self.clip_unit = _checked_clip_unit(sampling, clip_unit)
        _refuse_arrays(sampling)
        if slots_of is not None:
            _validation.choice("slots_of", slots_of, sampling.level_names)
        self._rows, self._below = clip_rows.rows_and_levels(
            sampling, population, clip_unit, slots_of
        )
        if not population_is_accounted:
            for level in (*self._rows.levels, *self._below):
                tree_draw.check_public_sizes(level)
        widths = tuple(level.width for level in self._below)
        self.slot_shape: tuple[int, ...] = (*self._rows.inner_shape, *widths)
        self.expected_units: float = self._rows.expected
        self.max_units: int = self._rows.largest

    def draw(self, generator: np.random.Generator) -> Draw:
        """Returns a fresh draw, a function of the generator's state only.

        Raises:
          TypeError: anything but a NumPy ``Generator``.
        """
        if not isinstance(generator, np.random.Generator):
            raise TypeError(
                f"generator must be a numpy.random.Generator, got {generator!r}"
            )
        starts, units = self._rows.draw(generator)
        examples, mask, null = tree_draw.fill_slots(starts, self._below, generator)
        return Draw(examples, mask, units, null)


def _checked_clip_unit(sampling: Any, clip_unit: str) -> str:
    if not isinstance(
        sampling, MultistageSampling | GroupedClasses | IndependentEpisodes
    ):
        raise TypeError(
            "sampling must be a Poisson, WithoutReplacement, MultistageSampling, "
            f"GroupedClasses or IndependentEpisodes, got {sampling!r}"
        )
    levels = sampling.level_names
    _validation.choice("clip_unit", clip_unit, (RESERVED_LEVEL_NAME, *levels))
    if not isinstance(sampling, MultistageSampling) and clip_unit != EPISODE:
        raise NotImplementedError(
            f"clip_unit={clip_unit!r} with {type(sampling).__name__} has no theorem "
            "here; covered: clip_unit='episode'"
        )
    return clip_unit


def _refuse_arrays(
    sampling: MultistageSampling | GroupedClasses | IndependentEpisodes,
) -> None:
    """A spec with arrays is many settings, and a run has one."""
    for name, value in _numbers(sampling):
        if np.ndim(value):
            raise ValueError(
                f"{name} must be a single number, because a run has one setting, got "
                f"an array of shape {np.shape(value)}"
            )


def _numbers(
    sampling: MultistageSampling | GroupedClasses | IndependentEpisodes,
) -> Iterator[tuple[str, Any]]:
    """All numeric fields and what to call them."""
    if isinstance(sampling, GroupedClasses):
        yield "num_classes", sampling.num_classes
        yield "ways", sampling.ways
        schemes = [sampling.episodes, sampling.classes, sampling.examples]
    elif isinstance(sampling, IndependentEpisodes):
        yield "num_episodes", sampling.num_episodes
        schemes = sampling.sampling.levels
    else:
        schemes = sampling.levels
    for scheme in schemes:
        if scheme is not None:
            for field, value in numeric_fields(scheme).items():
                yield f"{field} of level {scheme.name!r}", value
