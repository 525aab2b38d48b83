"""Releases: parts of a run other than Gaussian steps, or with known guarantees only."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Annotated, Any, ClassVar, Self

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe import spec
from jaxdp_episodic.accountant.describe.rates import (
    NEIGHBORING_RELATIONS,
    Relation,
)

# Largest number of values of a finite loss distribution.
_MOST_VALUES = 1000
# Allowed rounding error of a sum of probabilities.
_SUM_ERROR = 1e-9
_FINITE = _validation.reals("be >= 0 and finite", lambda a: (a >= 0) & np.isfinite(a))


class Release(spec.Spec):
    """Base of the releases, each a step of a run like a `GaussianStep`.

    A release has no privacy unit: its guarantee holds for the units that the rest of
    the run protects. The fields in ``numeric`` may be arrays. A release without such
    fields is always a single setting.
    """

    called = "release"
    # The relation of the guarantee; None means that of the rest of the run.
    neighboring_relation = None
    # Relations covered by a theorem; () if the release has no relation.
    relations: ClassVar[tuple[str, ...]] = ()
    # Whether a sampling probability below 1 is refused under replace_one.
    whole_if_replaced: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        relation, covered, how, also = self.neighboring_relation, self.relations, "", ""
        if not covered:
            return
        if self.whole_if_replaced and not self.is_traced:
            if np.any(np.less(getattr(self, "sampling_probability", 1), 1)):
                how = " and a sampling_probability below 1"
                also = ", and 'replace_one' with sampling_probability=1"
                covered = tuple(name for name in covered if name != "replace_one")
        if relation not in covered:
            raise NotImplementedError(
                f"{type(self).__name__} with neighboring_relation={relation!r}{how} "
                f"has no theorem here; covered: {covered}{also}"
            )


class LaplaceRelease(Release):
    """The sum of contributions clipped in the L1 norm, plus Laplace noise.

    Every coordinate gets independent noise of scale ``noise_multiplier`` times the L1
    clip norm. The total contribution of a protected unit is clipped. Units are Poisson
    sampled.

    Attributes:
      noise_multiplier: scale of the noise in L1 clip norms, >= 0.
      sampling_probability: probability in [0, 1] that a unit is sampled, independently
        of the others.
      neighboring_relation: "add_remove" (one unit more or less), "zero_out" (its data
        become null; its slot is still sampled), or "replace_one" (its content is
        replaced, a change of up to two clip norms), which needs a probability of 1.

    Raises:
      NotImplementedError: sampling under "replace_one".
    """

    relations = NEIGHBORING_RELATIONS
    whole_if_replaced = True

    noise_multiplier: spec.NonNegatives
    _: KW_ONLY
    sampling_probability: spec.Probabilities = 1.0
    neighboring_relation: Relation = "add_remove"


class ApproximateDP(Release):
    """A part of the run that is only known to be (epsilon, delta)-DP.

    Accounted as the worst such mechanism: with probability delta it reveals everything,
    otherwise it is a randomized response. The guarantee must hold for the units and the
    relation of the rest of the run, given any earlier releases.

    Attributes:
      epsilon: >= 0, nats.
      delta: in [0, 1].

    Reference: Kairouz, Oh, Viswanath (2015), arXiv:1311.0776, Theorem 3.3.
    """

    epsilon: spec.NonNegatives
    delta: spec.Probabilities = 0.0


class ZeroConcentratedDP(Release):
    """A part of the run that is only known to be (xi, rho)-zCDP.

    That is, ``rdp(alpha) <= xi + rho alpha`` for every order. Only ``method="rdp"``
    covers a run with such a part. All methods cover a Gaussian mechanism, whose rho is
    ``1 / (2 noise_multiplier²)``: set ``is_gaussian``.

    Attributes:
      rho: >= 0, nats.
      xi: >= 0, nats.
      is_gaussian: whether the part is a Gaussian mechanism with this rho.

    Reference: Bun and Steinke (2016), arXiv:1605.02065, Definition 1.1, Lemma 2.4.
    """

    rho: spec.NonNegatives
    _: KW_ONLY
    xi: spec.NonNegatives = 0.0
    is_gaussian: Annotated[bool, _validation.flag] = False

    def check_values(self) -> None:
        """Refuses a Gaussian mechanism with xi > 0."""
        if self.is_gaussian and np.any(self.xi):
            raise ValueError(f"xi must be 0 with is_gaussian=True, got {self.xi!r}")

    @classmethod
    def of_gaussian(cls, noise_multiplier: Any) -> Self:
        """Returns the Gaussian mechanism with this noise, over the sensitivity."""
        noise = _validation.nonnegative_array("noise_multiplier", noise_multiplier)
        with np.errstate(divide="ignore", over="ignore"):
            return cls(0.5 / np.square(noise), is_gaussian=True)


class RenyiDP(Release):
    """A part of the run with known Rényi divergences at some orders.

    Only ``method="rdp"`` covers a run with such a part. Between two orders the chord of
    the convex function ``(alpha - 1) rdp(alpha)`` is used. Above the last finite order
    only order inf, if it is given, bounds the divergence.

    Attributes:
      orders: (A,) ascending, each > 1; the last may be inf.
      rdp: (A,) nats, >= 0, upper bounds for both directions; inf if unknown.

    Raises:
      ValueError: different lengths, or orders that do not ascend.
    """

    orders: Annotated[Any, _validation.order_or_inf_array]
    rdp: Annotated[Any, _validation.nonnegative_array]

    def check_values(self) -> None:
        """Refuses orders that do not ascend."""
        _check_lists(orders=self.orders, rdp=self.rdp)
        if np.any(np.diff(self.orders) <= 0):
            shown = _validation.shown(np.asarray(self.orders).tolist())
            raise ValueError(f"orders must be ascending, got {shown}")


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

    relations = ("replace_one", "zero_out")

    noise_parameter: spec.Probability
    num_buckets: spec.Size
    _: KW_ONLY
    neighboring_relation: Relation = "replace_one"


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

    relations = NEIGHBORING_RELATIONS
    whole_if_replaced = True

    noise_parameter: spec.NonNegative
    _: KW_ONLY
    sensitivity: spec.Size = 1
    sampling_probability: spec.Probability = 1.0
    neighboring_relation: Relation = "add_remove"

    def check_values(self) -> None:
        """Refuses a loss distribution of too many values."""
        if self.sensitivity > _MOST_VALUES:
            raise NotImplementedError(
                f"sensitivity must be at most {_MOST_VALUES:,} (the loss has as many "
                f"values), got {self.sensitivity:,}"
            )


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

    relations = ("add_remove", "zero_out")

    sensitivities: Annotated[Any, _FINITE]
    probabilities: Annotated[Any, _validation.probability_array]
    _: KW_ONLY
    standard_deviation: spec.NonNegative
    sampling_probability: spec.Probability = 1.0
    neighboring_relation: Relation = "add_remove"

    def check_values(self) -> None:
        """Refuses probabilities whose sum is not 1."""
        _check_lists(sensitivities=self.sensitivities, probabilities=self.probabilities)
        total = float(np.sum(self.probabilities))
        if not abs(total - 1) <= _SUM_ERROR:
            raise ValueError(f"probabilities must add up to 1, got {total!r}")


class TruncatedPoissonRelease(Release):
    """A Poisson sample truncated to a largest batch size, plus Gaussian noise.

    From a sample of more than ``batch_size`` units a uniformly random subset of this
    size is kept. See docs/proofs.md, "A truncated Poisson sample".

    Attributes:
      noise_multiplier: standard deviation of the noise in clip norms, >= 0.
      sampling_probability: in [0, 1].
      batch_size: whole number >= 0.
      population: number of units of the data set, whole number >= 1. Under add_remove
        it may be that of either neighbour; under zero_out it counts all slots.
      neighboring_relation: "add_remove", "replace_one" or "zero_out".
    """

    relations = NEIGHBORING_RELATIONS

    noise_multiplier: spec.NonNegatives
    _: KW_ONLY
    sampling_probability: spec.Probabilities
    batch_size: spec.Counts
    population: spec.Sizes
    neighboring_relation: Relation = "add_remove"


def _check_lists(**lists: np.ndarray) -> None:
    """Refuses anything but lists of numbers, all of one length."""
    (first, like), *_ = lists.items()
    for name, values in lists.items():
        if np.ndim(values) != 1 or np.size(values) == 0:
            shown = _validation.shown(values)
            raise ValueError(f"{name} must be a list of numbers, got {shown}")
        if len(values) != len(like):
            raise ValueError(
                f"{name} must have as many numbers as {first} ({len(like)}), got "
                f"{len(values)}"
            )


RELEASES = tuple(Release.__subclasses__())
