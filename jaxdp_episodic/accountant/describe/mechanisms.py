"""Releases of single settings or truncated samples, and the list of all releases."""

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

# Largest number of values of a finite loss distribution.
_MOST_VALUES = 1000
# Allowed rounding error of a sum of probabilities.
_SUM_ERROR = 1e-9


@dataclass(frozen=True, eq=False)
class RandomizedResponse(Release):
    """k-ary randomized response: the unit's answer, or with probability p a random one.

    Attributes:
      noise_parameter: p in [0, 1], the probability of a uniformly random answer.
      num_buckets: number k of possible answers, whole number >= 1.
      neighboring_relation: "replace_one" (the unit has another answer) or "zero_out"
        (its answer is uniformly random).

    Raises:
      NotImplementedError: "add_remove", which would change the number of answers.
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
    """A sum of integer vectors plus discrete Laplace noise.

    Each coordinate gets independent noise: the integer x has probability
    ``tanh(a/2) e^{-a|x|}``. Units are Poisson sampled, and the total contribution of a
    protected unit has an L1 norm of at most ``sensitivity``.

    Attributes:
      noise_parameter: a >= 0. A larger a means less noise, but 0 means no noise.
      sensitivity: whole number >= 1.
      sampling_probability: probability in [0, 1] that a unit is sampled.
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
        """Refuses a loss distribution of too many values."""
        if self.sensitivity > _MOST_VALUES:
            raise NotImplementedError(
                f"sensitivity must be at most {_MOST_VALUES:,} (the loss has as many "
                f"values), got {self.sensitivity:,}"
            )


@dataclass(frozen=True, eq=False)
class GaussianMixtureRelease(Release):
    """The Gaussian mechanism for a unit whose contribution has a random size.

    Without the unit the output is ``N(0, standard_deviation²)``; with it, a mixture of
    Gaussians shifted by the sensitivities. For vectors give the norms.

    Attributes:
      sensitivities: (J,) each >= 0.
      probabilities: (J,) of the sensitivities; their sum is 1.
      standard_deviation: of the noise, >= 0.
      sampling_probability: probability in [0, 1] that the unit is sampled.
      neighboring_relation: "add_remove" or "zero_out".

    Raises:
      ValueError: different lengths, or probabilities whose sum is not 1.
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
                f"sensitivities must be a list of finite numbers, got {shown}"
            )
        check_as_long("probabilities", chance, "sensitivities", norms)
        if not abs(float(chance.sum()) - 1) <= _SUM_ERROR:
            raise ValueError(f"probabilities must add up to 1, got {chance.sum()!r}")
        object.__setattr__(self, "sensitivities", frozen_number(norms))
        object.__setattr__(self, "probabilities", frozen_number(chance))
        super().__post_init__()


@dataclass(frozen=True, eq=False)
class TruncatedPoissonRelease(Release):
    """A Poisson sample truncated to a largest batch size, plus Gaussian noise.

    Each unit is Poisson sampled. From a sample of more than ``batch_size`` units a
    uniformly random subset of this size is kept. Its contributions are clipped and
    summed. See docs/proofs.md, "A Poisson sample that is cut".

    Attributes:
      noise_multiplier: standard deviation of the noise in clip norms, >= 0.
      sampling_probability: in [0, 1].
      batch_size: whole number >= 0.
      population: number of units of the data set, whole number >= 1. Under add_remove
        it may be that of either neighbour; under zero_out it counts all slots.
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
