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
    Parts,
    field,
    joint,
    kind,
    nonnegative,
    number,
    whole,
)

LEVEL = "example"
"""The one level that events have."""

# Most different norms of what is joined: the loss sums as many terms, each of which
# needs nodes of its own (60 take 2 s, 200 a minute).
_MOST_NORMS = 256
# Squared norms this close, relative, are taken for equal: the larger one.
_EQUAL_SQUARES = 1e-12

Law = tuple[np.ndarray, np.ndarray]
"""Values, ascending, and their probabilities."""

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


def joint_mixture(sampled: Any, parts: Parts, relation: str, rate: float) -> OneStep:
    """Mixtures and Gaussians released about one sample: a mixture of their joint norms.

    Whoever is drawn moves each release by a size of its own: a mixture of vectors, in
    deviations of each noise, dominated by that of their norms (Choquette-Choo, Ganesh,
    Steinke, Thakurta 2023, arXiv:2310.15526, Corollary 4.7). It may react to earlier
    releases: from the last one back, the mean of a convex function of a sum of
    exponentials grows with each correlation among them (Kahane's inequality). An upper
    bound where more than one of the sizes is random.
    """
    if relation == "replace_one":
        raise wrong_relation(sampled, relation, "'add_remove' or 'zero_out'")
    law: Law = np.zeros(1), np.ones(1)
    for part, count in parts:
        law = _plus(law, _times(_squares(part), count, sampled), sampled)
    squares, chance = law
    bare = np.isinf(squares).any()  # a size without any noise shows whoever has one
    norms = 1.0 * (squares > 0) if bare else np.sqrt(squares) * (1 + ROUNDING_MARGIN)
    return GaussianMixtureRelease(
        norms,
        chance / chance.sum(),
        standard_deviation=0.0 if bare else 1.0,
        sampling_probability=rate,
        neighboring_relation=relation,
    )


def _squares(event: Any) -> Law:
    """The squared sizes of what one release is moved by, in deviations of its noise."""
    if kind(event) == "GaussianDpEvent":
        noise = nonnegative(event, "noise_multiplier")
        sizes, chance = np.ones(1), np.ones(1)
    else:
        one: Any = gaussian_mixture(event, "add_remove")
        noise = one.standard_deviation
        sizes, chance = np.asarray(one.sensitivities), np.asarray(one.probabilities)
    with np.errstate(divide="ignore", over="ignore"):
        squares = np.square(sizes / (noise or np.where(sizes > 0, 0.0, 1.0)))
    return squares, chance / chance.sum()


def _times(law: Law, count: int, event: Any) -> Law:
    """The sum of so many independent values, by doubling."""
    total: Law = np.zeros(1), np.ones(1)
    while count:
        if count % 2:
            total = _plus(total, law, event)
        count //= 2
        law = _plus(law, law, event) if count else law
    return total


def _plus(a: Law, b: Law, event: Any) -> Law:
    """The sum of two independent values, equal ones together."""
    values = np.add.outer(a[0], b[0]).ravel()
    chance = np.multiply.outer(a[1], b[1]).ravel()
    values, chance = values[chance > 0], chance[chance > 0]
    order = np.argsort(values, kind="stable")
    values, chance = values[order], chance[order]
    starts = [0]
    for i, value in enumerate(values):
        if value > values[starts[-1]] * (1 + _EQUAL_SQUARES):
            starts.append(i)
    if len(starts) > _MOST_NORMS:
        raise EventNotCovered(
            event, f"its releases have more than {_MOST_NORMS} different joint norms"
        )
    ends = [*starts[1:], len(values)]
    return values[np.array(ends) - 1], np.add.reduceat(chance, starts)


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
