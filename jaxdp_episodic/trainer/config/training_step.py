"""The step of a training config: what is accounted, without the data's sizes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.blocks import PeopleBlocks
from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses,
    IndependentEpisodes,
)
from jaxdp_episodic.accountant.describe.people import PersonBounds
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.schemes import Scheme, WithoutReplacement
from jaxdp_episodic.accountant.describe.step import GaussianStep, Sampling
from jaxdp_episodic.accountant.questions.api import epsilon as step_epsilon
from jaxdp_episodic.trainer.data.fields import CheckedSpec, one_of

_noise = functools.partial(_validation.float32_number, zero=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class StepConfig(CheckedSpec):
    """A `GaussianStep` without its sizes, which are public bounds or the data's own.

    Where every draw without replacement down to the protected unit states its
    ``population``, a public lower bound, the guarantee rests on these alone (and data
    that contradict them are refused). Else it rests on the sizes of the data: under
    ``add_remove`` the noise then depends on private sizes, and what is released leaves
    out all that was computed from them.

    Attributes:
      sampling: as of `GaussianStep`.
      noise_multiplier: None where it is calibrated.
      clip_unit: as of `GaussianStep`.
      privacy_unit: as of `GaussianStep`. "person" takes its bounds from the config's
        ``people``.
      neighboring_relation: as of `GaussianStep`. Under "zero_out" the protected level
        states its ``population``, the number of slots that are drawn, filled or not.
      small_units: as of `GaussianStep`.
    """

    nested_specs: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "sampling": GaussianStep.nested_specs["sampling"]
    }

    sampling: Sampling | Scheme
    noise_multiplier: Annotated[float, _noise] | None = None
    clip_unit: str | None = None
    privacy_unit: str | None = None
    neighboring_relation: Annotated[str, one_of(*NEIGHBORING_RELATIONS)] = "add_remove"
    small_units: str | None = None

    def step(
        self, population: Population, people: PersonBounds | None = None
    ) -> GaussianStep:
        """Returns the step on real data; without a noise multiplier, with one of 1."""
        if self.neighboring_relation == "zero_out":
            return self._with(None, people)  # slots, not what fills them
        if isinstance(self.sampling, PeopleBlocks):
            return self._with(None, people)  # its sizes are those within a block
        if self.neighboring_relation != "add_remove":
            is_public = _states_its_sizes(self.sampling)
            return self._with(None if is_public else population, people)
        # Sizes below the protected units cost nothing, stated or not: what the config
        # states is enough if the accountant can answer from it.
        try:
            step = self._with(None, people)
            step_epsilon(step, num_steps=1, delta=1e-5)
        except (ValueError, NotImplementedError):
            return self._with(population, people)
        return step

    def check_split(self, level_names: Sequence[str]) -> None:
        """Refuses data split by names of classes that a replacement may change."""
        unit, relation = str(self.privacy_unit), self.neighboring_relation
        if relation == "replace_one" and unit in level_names[:-1]:
            raise NotImplementedError(
                "validation and test of the data must be paths, not shares of the "
                f"classes, under {relation} with privacy_unit={unit!r}: what replaces "
                "a unit may have a name that is held out, and leave one less to train "
                "on"
            )

    def _with(
        self, population: Population | None, people: PersonBounds | None
    ) -> GaussianStep:
        noise = self.noise_multiplier
        return GaussianStep(
            self.sampling,
            noise_multiplier=1.0 if noise is None else noise,
            clip_unit=self.clip_unit,
            privacy_unit=self.privacy_unit,
            neighboring_relation=self.neighboring_relation,
            small_units=self.small_units,
            population=population,
            people=people,
        )


def _states_its_sizes(sampling: Sampling | Scheme) -> bool:
    """True if every draw without replacement of the data has a public population."""
    if isinstance(sampling, GroupedClasses):
        return sampling.examples.population is not None
    if isinstance(sampling, IndependentEpisodes):
        sampling = sampling.sampling
    levels = getattr(sampling, "levels", (sampling,))
    return all(
        scheme.population is not None
        for scheme in levels
        if isinstance(scheme, WithoutReplacement)
    )
