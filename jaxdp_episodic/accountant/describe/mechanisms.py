"""More mechanisms that may be parts of a run, and the list of all releases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.releases import (
    ApproximateDP,
    LaplaceRelease,
    Release,
    RenyiDP,
    ZeroConcentratedDP,
    check_as_long,
)
from jaxdp_episodic.accountant.describe.spec import (
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    Check,
    frozen_number,
)

# Values of a finite loss, at most.
_MOST_VALUES = 1000
# Rounding of the sum of probabilities.
_SUM_ERROR = 1e-9


@dataclass(frozen=True, eq=False)
class RandomizedResponse(Release):
    """One of k answers about a unit: with probability p a uniform one, else its own.

    Attributes:
      noise_parameter: p in [0, 1], of a uniform answer.
      num_buckets: k >= 1, whole.
      neighboring_relation: "replace_one" (the unit's answer is another one) or
        "zero_out" (its answer is uniform).

    Raises:
      NotImplementedError: "add_remove", where there would be an answer more or less.
    """

    singles: ClassVar[Mapping[str, Check]] = {
        "noise_parameter": _validation.probability_array,
        "num_buckets": AT_LEAST_ONE,
    }
    relations: ClassVar[tuple[str, ...]] = ("replace_one", "zero_out")

    noise_parameter: float
    num_buckets: int
    _: KW_ONLY
    neighboring_relation: str = "replace_one"


@dataclass(frozen=True, eq=False)
class DiscreteLaplaceRelease(Release):
    """A sum of integer vectors plus integer noise of mass ``tanh(a/2) e^{-a|x|}``.

    Every coordinate gets noise of its own. What one protected unit gives, drawn by
    Poisson sampling, has an L1 norm of at most ``sensitivity``.

    Attributes:
      noise_parameter: a >= 0; the larger, the less noise.
      sensitivity: whole number >= 1.
      sampling_probability: that a unit takes part, in [0, 1].
      neighboring_relation: as of a `LaplaceRelease`.

    Raises:
      NotImplementedError: sampling under "replace_one", or a sensitivity above 1,000.
    """

    singles: ClassVar[Mapping[str, Check]] = {
        "noise_parameter": _validation.nonnegative_array,
        "sensitivity": AT_LEAST_ONE,
        "sampling_probability": _validation.probability_array,
    }
    relations: ClassVar[tuple[str, ...]] = NEIGHBORING_RELATIONS
    whole_if_replaced: ClassVar[bool] = True

    noise_parameter: float
    _: KW_ONLY
    sensitivity: int = 1
    sampling_probability: float = 1.0
    neighboring_relation: str = "add_remove"

    def check_values(self) -> None:
        """Refuses a loss of too many values."""
        if self.sensitivity > _MOST_VALUES:
            raise NotImplementedError(
                f"sensitivity must be at most {_MOST_VALUES:,} (the loss has as many "
                f"values), got {self.sensitivity:,}"
            )


@dataclass(frozen=True, eq=False)
class GaussianMixtureRelease(Release):
    """Gaussian noise, and a unit whose contribution has a random size.

    Without the unit ``N(0, standard_deviation²)``, with it a mixture of Gaussians moved
    by the sensitivities. Of vectors take the norms.

    Attributes:
      sensitivities: (J,) each >= 0.
      probabilities: (J,) of the sensitivities; they add up to 1.
      standard_deviation: of the noise, >= 0.
      sampling_probability: that the unit takes part at all, in [0, 1].
      neighboring_relation: "add_remove" or "zero_out".

    Raises:
      ValueError: lengths that differ.
      NotImplementedError: "replace_one".

    Reference: Choquette-Choo, Ganesh, Steinke, Thakurta (2023), arXiv:2310.15526.
    """

    singles: ClassVar[Mapping[str, Check]] = {
        "standard_deviation": _validation.nonnegative_array,
        "sampling_probability": _validation.probability_array,
    }
    relations: ClassVar[tuple[str, ...]] = ("add_remove", "zero_out")

    sensitivities: Any
    probabilities: Any
    _: KW_ONLY
    standard_deviation: float
    sampling_probability: float = 1.0
    neighboring_relation: str = "add_remove"

    def __post_init__(self) -> None:
        norms = _validation.nonnegative_array("sensitivities", self.sensitivities)
        chance = _validation.probability_array("probabilities", self.probabilities)
        if norms.ndim != 1 or norms.size == 0 or not np.all(np.isfinite(norms)):
            shown = _validation.shown(self.sensitivities)
            raise ValueError(
                f"sensitivities must be a list of finite ones, got {shown}"
            )
        check_as_long("probabilities", chance, "sensitivities", norms)
        if not abs(float(chance.sum()) - 1) <= _SUM_ERROR:
            raise ValueError(f"probabilities must add up to 1, got {chance.sum()!r}")
        object.__setattr__(self, "sensitivities", frozen_number(norms))
        object.__setattr__(self, "probabilities", frozen_number(chance))
        super().__post_init__()


@dataclass(frozen=True, eq=False)
class TruncatedPoissonRelease(Release):
    """A Poisson sample cut to a batch of fixed size at random, plus Gaussian noise.

    Each unit is sampled for itself; of more than ``batch_size`` that number is kept,
    all sets alike. The contributions of those are clipped and summed. See
    docs/proofs.md, "A Poisson sample that is cut".

    Attributes:
      noise_multiplier: standard deviation of the noise in clip norms, >= 0.
      sampling_probability: in [0, 1].
      batch_size: whole number >= 0.
      population: of the data set, whole number >= 1. Under add_remove it may be either
        neighbour; under zero_out it counts the null ones, which are drawn too.
      neighboring_relation: "add_remove", "replace_one" or "zero_out".
    """

    numeric: ClassVar[Mapping[str, Check]] = {
        "noise_multiplier": _validation.nonnegative_array,
        "sampling_probability": _validation.probability_array,
        "batch_size": AT_LEAST_ZERO,
        "population": AT_LEAST_ONE,
    }
    relations: ClassVar[tuple[str, ...]] = NEIGHBORING_RELATIONS

    noise_multiplier: float | np.ndarray
    _: KW_ONLY
    sampling_probability: float | np.ndarray
    batch_size: int | np.ndarray
    population: int | np.ndarray
    neighboring_relation: str = "add_remove"


RELEASES = (
    LaplaceRelease,
    ApproximateDP,
    ZeroConcentratedDP,
    RenyiDP,
    RandomizedResponse,
    DiscreteLaplaceRelease,
    GaussianMixtureRelease,
    TruncatedPoissonRelease,
)
