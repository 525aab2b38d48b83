"""Reads events that are releases about all of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.mechanisms import (
    DiscreteLaplaceRelease,
    GaussianMixtureRelease,
    RandomizedResponse,
    TruncatedPoissonRelease,
)
from jaxdp_episodic.accountant.describe.releases import (
    ApproximateDP,
    LaplaceRelease,
    ZeroConcentratedDP,
)
from jaxdp_episodic.accountant.describe.schemes import Poisson
from jaxdp_episodic.accountant.describe.step import GaussianStep, OneStep
from jaxdp_episodic.accountant.interop.event_tree import (
    ROUNDING_MARGIN,
    EventNotCovered,
    field,
    joint,
    nonnegative,
    number,
    whole,
)

LEVEL = "example"
"""The one level that events have."""

R = TypeVar("R", bound=Callable[..., OneStep | None])

READERS: dict[str, Callable[..., OneStep | None]] = {}
"""Events that are read, compositions apart: what reads each, given the relation."""


def reads(*kinds: str) -> Callable[[R], R]:
    """Makes a function the reader of events of these classes."""

    def enter(reader: R) -> R:
        READERS.update(dict.fromkeys(kinds, reader))
        return reader

    return enter


@reads("GaussianDpEvent")
def gaussian(event: Any, relation: str) -> OneStep:
    """A Gaussian release about everybody."""
    return sampled_gaussian(1.0, nonnegative(event, "noise_multiplier"), relation)


@reads("NonPrivateDpEvent")
def non_private(_: Any, relation: str) -> OneStep:
    """A release without noise."""
    return sampled_gaussian(1.0, 0.0, relation)


@reads("LaplaceDpEvent")
def laplace(event: Any, relation: str) -> OneStep:
    """A Laplace release, its noise over the L1 clip norm."""
    return LaplaceRelease(
        nonnegative(event, "noise_multiplier"), neighboring_relation=relation
    )


@reads("ZCDpEvent")
def zcdp(event: Any, _: str) -> OneStep:
    """What is known by its zCDP alone."""
    return ZeroConcentratedDP(nonnegative(event, "rho"), xi=nonnegative(event, "xi"))


@reads("EpsilonDeltaDpEvent")
def epsilon_delta(event: Any, _: str) -> ApproximateDP:
    """What is known to be (epsilon, delta)-DP alone."""
    return ApproximateDP(nonnegative(event, "epsilon"), number(event, "delta"))


@reads("ExponentialMechanismDpEvent", "PermuteAndFlipDpEvent")
def pure(event: Any, _: str) -> ApproximateDP:
    """What is epsilon-DP: no more is used of its loss, an upper bound."""
    return ApproximateDP(nonnegative(event, "epsilon"))


@reads("SingleEpochTreeAggregationDpEvent")
def tree(event: Any, relation: str) -> OneStep | None:
    """A record is in one node at each height of one tree at most.

    A tree over n steps, whose counter is the binary number of the step, is as high as
    n has bits (Kairouz et al. 2021, arXiv:2103.00039, appendix D).
    """
    if relation != "zero_out":
        raise wrong_relation(event, relation, "'zero_out'")
    noise = nonnegative(event, "noise_multiplier")
    counts = _validation.integer_array(
        "step_counts", field(event, "step_counts"), minimum=0
    )
    if counts.size == 0:
        raise ValueError("step_counts must have at least one number of steps, got none")
    height = int(counts.max()).bit_length()
    if height == 0:
        return None
    return sampled_gaussian(1.0, joint([(noise, height)]), relation)


@reads("RandomizedResponseDpEvent")
def randomized_response(event: Any, relation: str) -> OneStep:
    """One answer of several, changed or made null."""
    if relation == "add_remove":
        raise wrong_relation(event, relation, "'replace_one' or 'zero_out'")
    return RandomizedResponse(
        number(event, "noise_parameter"),
        whole(event, "num_buckets", minimum=1),
        neighboring_relation=relation,
    )


@reads("DiscreteLaplaceDpEvent")
def discrete_laplace(event: Any, relation: str, rate: float = 1.0) -> OneStep:
    """Whole numbers with two-sided geometric noise."""
    try:
        return DiscreteLaplaceRelease(
            nonnegative(event, "noise_parameter"),
            sensitivity=whole(event, "sensitivity", minimum=1),
            sampling_probability=rate,
            neighboring_relation=relation,
        )
    except NotImplementedError as error:
        raise EventNotCovered(event, str(error)) from None


@reads("DiscreteGaussianDpEvent")
def discrete_gaussian(event: Any, relation: str) -> OneStep:
    """Its divergences are at most the Gaussian's, whatever the dimension.

    Canonne, Kamath, Steinke (2020), arXiv:2004.00010, Theorem 4.
    """
    moved = nonnegative(event, "sensitivity")
    moved *= 2.0 if relation == "replace_one" else 1.0
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        rho = 0.5 * np.square(np.float64(moved) / nonnegative(event, "sigma"))
    return ZeroConcentratedDP(0.0 if moved == 0 else rho * (1 + ROUNDING_MARGIN))


@reads("MixtureOfGaussiansDpEvent")
def gaussian_mixture(event: Any, relation: str, rate: float = 1.0) -> OneStep:
    """A sum that one record changes by one of several distances."""
    if relation == "replace_one":
        raise wrong_relation(event, relation, "'add_remove' or 'zero_out'")
    return GaussianMixtureRelease(
        np.asarray(field(event, "sensitivities")),
        np.asarray(field(event, "sampling_probs")),
        standard_deviation=nonnegative(event, "standard_deviation"),
        sampling_probability=rate,
        neighboring_relation=relation,
    )


@reads("TruncatedSubsampledGaussianDpEvent")
def truncated(event: Any, relation: str) -> OneStep | None:
    """A Poisson sample that is cut to a physical batch."""
    population = whole(event, "dataset_size", minimum=0)
    noise = nonnegative(event, "noise_multiplier")
    rate = _validation.probability_array(
        "sampling_probability", number(event, "sampling_probability")
    )
    size = whole(event, "truncated_batch_size", minimum=0)
    if population == 0 and relation != "add_remove":
        return None
    return TruncatedPoissonRelease(
        noise,
        sampling_probability=rate,
        batch_size=size,
        # The larger of two neighbours has at least one record.
        population=max(population, 1),
        neighboring_relation=relation,
    )


def wrong_relation(event: Any, relation: str, covered: str) -> EventNotCovered:
    """The refusal of an event under another relation than those of its theorem."""
    return EventNotCovered(
        event, f"neighboring_relation must be {covered}, got {relation!r}"
    )


def sampled_gaussian(rate: float, noise: float, relation: str) -> GaussianStep:
    """A Gaussian release about a Poisson sample."""
    scheme = Poisson(LEVEL, sampling_probability=rate)
    return GaussianStep(scheme, noise_multiplier=noise, neighboring_relation=relation)
