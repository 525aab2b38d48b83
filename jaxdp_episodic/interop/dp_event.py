"""Reads the mechanism descriptions of another library, ``dp_accounting``.

Its ``DpEvent`` objects are recognised by the name of their class, or by the
``class_name`` of their named-tuple form, so that library need not be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accounting.trial_counts import NegativeBinomialTrials, PoissonTrials
from jaxdp_episodic.accounting.tuning import run_rdp, tuned_rdp
from jaxdp_episodic.describe.designs import IndependentEpisodes
from jaxdp_episodic.describe.mechanisms import (
    DiscreteLaplaceRelease,
    GaussianMixtureRelease,
    RandomizedResponse,
    TruncatedPoissonRelease,
)
from jaxdp_episodic.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.describe.releases import (
    ApproximateDP,
    LaplaceRelease,
    RenyiDP,
    ZeroConcentratedDP,
)
from jaxdp_episodic.describe.schemes import Poisson, WithoutReplacement
from jaxdp_episodic.describe.step import ComposedSteps, GaussianStep, OneStep, compose
from jaxdp_episodic.interop.event_tree import (
    ROUNDING_MARGIN,
    Parts,
    field,
    joint,
    joint_noise,
    joint_scale,
    kind,
    nonnegative,
    number,
    uncomposed,
    whole,
)

LEVEL = "example"
# Orders at which a repeated run is known: a chord between two of the middle ones is
# within 3e-4 of the curve.
_ORDERS = 1 + np.concatenate(
    [
        np.geomspace(1e-6, 1e-2, 40, endpoint=False),
        np.geomspace(1e-2, 1e4, 300, endpoint=False),
        np.geomspace(1e4, 1e12, 60),
    ]
)


class EventNotCovered(NotImplementedError):
    """An event without a theorem here.

    Attributes:
      event: the offending one, which may lie deep inside the one that was read.
    """

    def __init__(self, event: Any, why: str) -> None:
        super().__init__(
            f"{kind(event)} cannot be imported: {why}; covered: {', '.join(_COVERED)}, "
            "ComposedDpEvent and SelfComposedDpEvent of these"
        )
        self.event = event


def from_dp_event(
    event: Any, *, neighboring_relation: str = "add_remove"
) -> ComposedSteps:
    """Returns the run that a ``dp_accounting`` ``DpEvent`` describes.

    The mechanism is the one that the events' documentation defines: a sum of vectors
    of norm at most C, one a record, plus noise of standard deviation
    ``noise_multiplier`` times C. One record more or less moves the sum by C, a record
    replaced by another moves it by 2C, and so it is accounted here, as by the source
    library's ``PLDAccountant``. Its ``RdpAccountant`` takes the same number for noise
    over *sensitivity*, 2C, also where records are replaced: there its epsilon is that
    of twice the noise. Do not double a ``noise_multiplier`` that means noise over C:
    the epsilon would be too small.

    The events have no levels: here there is one, "example", clipped and protected.
    ``source_dataset_size`` may be the size of either neighbour: it is used as a lower
    bound of the larger one's.

    Args:
      event: one of those that the module's table lists, or a composition of such.
      neighboring_relation: "add_remove", "replace_one" or "zero_out" (their
        REPLACE_SPECIAL); the events do not say.

    Returns:
      A composed run, equal steps taken together. Its noise multipliers are exact;
      that of several releases about one draw is a lower bound, within 1e-12.

    Raises:
      TypeError: a field of the wrong type, or what is no event at all.
      ValueError: a field out of range, e.g. a sample larger than its source.
      EventNotCovered: another event, or one under a relation that no theorem covers;
        a NotImplementedError that carries the offending event.
    """
    _validation.choice(
        "neighboring_relation", neighboring_relation, NEIGHBORING_RELATIONS
    )
    # As keys of a dictionary equal steps fall together, in order of appearance.
    counts: dict[OneStep, int] = {}
    for _, step, count in steps_of(event, neighboring_relation):
        counts[step] = counts.get(step, 0) + count
    if not counts:
        counts[nothing(neighboring_relation)] = 0
    return compose(*counts.items())


def steps_of(
    event: Any, neighboring_relation: str, orders: np.ndarray | None = None
) -> Iterator[tuple[Any, OneStep, int]]:
    """Yields the events inside that are no composition, their steps and counts.

    What is known by its Rényi curve alone is known at the given orders too.

    Raises:
      as `from_dp_event`.
    """
    for part, count in uncomposed(event):
        step = _step(part, neighboring_relation, orders)
        if step is not None:
            yield part, step, count


def nothing(relation: str) -> OneStep:
    """Returns a step that draws nobody."""
    return _sampled_gaussian(0.0, 1.0, relation)


def _step(
    event: Any, relation: str, orders: np.ndarray | None = None
) -> OneStep | None:
    """One release; None of an event that releases nothing."""
    if kind(event) == "RepeatAndSelectDpEvent":
        return _repeat_and_select(event, relation, orders)
    if kind(event) not in _READERS:
        raise EventNotCovered(event, "no theorem here")
    return _READERS[kind(event)](event, relation)


# --- Releases about all the data ---


def _gaussian(event: Any, relation: str) -> OneStep:
    return _sampled_gaussian(1.0, nonnegative(event, "noise_multiplier"), relation)


def _laplace(event: Any, relation: str) -> OneStep:
    return LaplaceRelease(
        nonnegative(event, "noise_multiplier"), neighboring_relation=relation
    )


def _zcdp(event: Any, relation: str) -> OneStep:
    del relation
    return ZeroConcentratedDP(nonnegative(event, "rho"), xi=nonnegative(event, "xi"))


def _epsilon_delta(event: Any, relation: str) -> OneStep:
    del relation
    return ApproximateDP(nonnegative(event, "epsilon"), number(event, "delta"))


def _tree(event: Any, relation: str) -> OneStep | None:
    """A record is in one node at each height of one tree at most.

    A tree over n steps, whose counter is the binary number of the step, is as high as
    n has bits (Kairouz et al. 2021, arXiv:2103.00039, appendix D).
    """
    if relation != "zero_out":
        raise _wrong_relation(event, relation, "'zero_out'")
    noise = nonnegative(event, "noise_multiplier")
    counts = _validation.integer_array(
        "step_counts", field(event, "step_counts"), minimum=0
    )
    if counts.size == 0:
        raise ValueError("step_counts must have at least one number of steps, got none")
    height = int(counts.max()).bit_length()
    if height == 0:
        return None
    return _sampled_gaussian(1.0, joint([(noise, height)]), relation)


def _randomized_response(event: Any, relation: str) -> OneStep:
    if relation == "add_remove":
        raise _wrong_relation(event, relation, "'replace_one' or 'zero_out'")
    return RandomizedResponse(
        number(event, "noise_parameter"),
        whole(event, "num_buckets", minimum=1),
        neighboring_relation=relation,
    )


def _discrete_laplace(event: Any, relation: str, rate: float = 1.0) -> OneStep:
    try:
        return DiscreteLaplaceRelease(
            nonnegative(event, "noise_parameter"),
            sensitivity=whole(event, "sensitivity", minimum=1),
            sampling_probability=rate,
            neighboring_relation=relation,
        )
    except NotImplementedError as error:
        raise EventNotCovered(event, str(error)) from None


def _discrete_gaussian(event: Any, relation: str) -> OneStep:
    """Its divergences are at most the Gaussian's, whatever the dimension.

    Canonne, Kamath, Steinke (2020), arXiv:2004.00010, Theorem 4.
    """
    moved = nonnegative(event, "sensitivity")
    moved *= 2.0 if relation == "replace_one" else 1.0
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        rho = 0.5 * np.square(np.float64(moved) / nonnegative(event, "sigma"))
    return ZeroConcentratedDP(0.0 if moved == 0 else rho * (1 + ROUNDING_MARGIN))


def _gaussian_mixture(event: Any, relation: str, rate: float = 1.0) -> OneStep:
    if relation == "replace_one":
        raise _wrong_relation(event, relation, "'add_remove' or 'zero_out'")
    return GaussianMixtureRelease(
        np.asarray(field(event, "sensitivities")),
        np.asarray(field(event, "sampling_probs")),
        standard_deviation=nonnegative(event, "standard_deviation"),
        sampling_probability=rate,
        neighboring_relation=relation,
    )


def _truncated(event: Any, relation: str) -> OneStep | None:
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
        # The larger neighbour of nothing is one.
        population=max(population, 1),
        neighboring_relation=relation,
    )


def _repeat_and_select(
    event: Any, relation: str, orders: np.ndarray | None = None
) -> OneStep:
    """The best of a random number of runs, by `tuned_rdp`."""
    mean, shape = number(event, "mean"), number(event, "shape")
    if np.isposinf(_validation.real_array("shape", shape)):
        trials = PoissonTrials(expected_runs=mean)
    else:
        eta = nonnegative(event, "shape")
        trials = NegativeBinomialTrials(expected_runs=mean, eta=eta)
    try:
        run = from_dp_event(field(event, "event"), neighboring_relation=relation)
    except RecursionError:
        raise ValueError("event must not repeat runs nested so deeply") from None
    grid = _ORDERS if orders is None else np.union1d(_ORDERS, orders)
    return RenyiDP(grid, tuned_rdp(trials, grid, run_rdp(run, grid)))


def _wrong_relation(event: Any, relation: str, covered: str) -> EventNotCovered:
    return EventNotCovered(
        event, f"neighboring_relation must be {covered}, got {relation!r}"
    )


# --- Releases about a sample ---


def _poisson(event: Any, relation: str) -> OneStep:
    """A Poisson draw of what one step or several draw, or release."""
    rate, inner, seen = 1.0, event, set()
    # A draw of a draw is a draw.
    while kind(inner) == "PoissonSampledDpEvent":
        rate *= float(
            _validation.probability_array(
                "sampling_probability", number(inner, "sampling_probability")
            )
        )
        seen.add(id(inner))
        inner = field(inner, "event")
        if id(inner) in seen:
            raise ValueError("event must not be a sample of itself")
    parts = list(uncomposed(inner))
    kinds = {kind(part) for part, _ in parts}
    if kinds <= {"GaussianDpEvent"}:
        return _sampled_gaussian(rate, joint_noise(parts), relation)
    if kinds == {"LaplaceDpEvent"} and relation != "replace_one":
        return LaplaceRelease(
            joint_scale(parts), sampling_probability=rate, neighboring_relation=relation
        )
    one = parts[0][0] if sum(count for _, count in parts) == 1 else None
    if kinds == {"EpsilonDeltaDpEvent"} and one is not None:
        return _sampled_claim(rate, one, relation)
    if kinds == {"DiscreteLaplaceDpEvent"} and one is not None:
        return _discrete_laplace(one, relation, rate)
    if kinds == {"MixtureOfGaussiansDpEvent"} and one is not None:
        return _gaussian_mixture(one, relation, rate)
    raise _unsampled(event, parts, relation)


def _fixed_size(event: Any, relation: str) -> OneStep | None:
    """So many draws without replacement, or each an episode of one record."""
    parts = _gaussian_parts(event, relation)
    size = whole(event, "sample_size", minimum=0)
    population = whole(event, "source_dataset_size", minimum=1)
    if size == 0:
        return None
    sampling: Any
    if kind(event) == "SampledWithReplacementDpEvent":
        one = WithoutReplacement(LEVEL, size=1, population=population)
        sampling = IndependentEpisodes(one, num_episodes=size)
    elif size <= population:
        sampling = WithoutReplacement(LEVEL, size=size, population=population)
    else:
        raise ValueError(
            "sample_size must be at most source_dataset_size, got "
            f"{size!r} of {population!r}"
        )
    return GaussianStep(
        sampling, noise_multiplier=joint_noise(parts), neighboring_relation=relation
    )


def _gaussian_parts(sampled: Any, relation: str) -> Parts:
    """What is released about one draw, all of it Gaussian."""
    parts = list(uncomposed(field(sampled, "event")))
    if any(kind(part) != "GaussianDpEvent" for part, _ in parts):
        raise _unsampled(sampled, parts, relation)
    return parts


def _unsampled(sampled: Any, parts: Parts, relation: str) -> EventNotCovered:
    """The refusal of such a sample; what has no theorem at all is refused itself."""
    for part, _ in parts:
        if kind(part) not in _COVERED:
            return EventNotCovered(part, "no theorem here")
    inner = ", ".join(dict.fromkeys(kind(part) for part, _ in parts))
    return EventNotCovered(
        sampled,
        f"no theorem of it of a {inner} under neighboring_relation={relation!r}",
    )


def _sampled_gaussian(rate: float, noise: float, relation: str) -> GaussianStep:
    scheme = Poisson(LEVEL, sampling_probability=rate)
    return GaussianStep(scheme, noise_multiplier=noise, neighboring_relation=relation)


def _sampled_claim(rate: float, event: Any, relation: str) -> OneStep:
    """A sample of something (epsilon, delta)-DP.

    With a record more or less ``log(1 + rate (e^epsilon - 1))`` and ``rate delta``
    (Balle, Barthe, Gaboardi 2018, arXiv:1807.01647, Theorem 8); where it is replaced
    the draws are the same, and by joint convexity delta alone shrinks.
    """
    epsilon, delta = nonnegative(event, "epsilon"), number(event, "delta")
    delta = float(_validation.probability_array("delta", delta))
    if relation == "add_remove":
        with np.errstate(over="ignore"):
            amplified = np.log1p(rate * np.expm1(epsilon))
        epsilon = min(float(amplified) * (1 + ROUNDING_MARGIN), epsilon)
    return ApproximateDP(epsilon, min(rate * delta * (1 + ROUNDING_MARGIN), delta))


# One entry for each event that is no composition, but RepeatAndSelectDpEvent.
_READERS: dict[str, Callable[[Any, str], OneStep | None]] = {
    # RandomAllocationDpEvent goes here, once its theorem is there.
    "DiscreteGaussianDpEvent": _discrete_gaussian,
    "DiscreteLaplaceDpEvent": _discrete_laplace,
    "EpsilonDeltaDpEvent": _epsilon_delta,
    "GaussianDpEvent": _gaussian,
    "LaplaceDpEvent": _laplace,
    "MixtureOfGaussiansDpEvent": _gaussian_mixture,
    "NonPrivateDpEvent": lambda _, relation: _sampled_gaussian(1.0, 0.0, relation),
    "PoissonSampledDpEvent": _poisson,
    "RandomizedResponseDpEvent": _randomized_response,
    "SampledWithReplacementDpEvent": _fixed_size,
    "SampledWithoutReplacementDpEvent": _fixed_size,
    "SingleEpochTreeAggregationDpEvent": _tree,
    "TruncatedSubsampledGaussianDpEvent": _truncated,
    "ZCDpEvent": _zcdp,
}
_COVERED = sorted([*_READERS, "RepeatAndSelectDpEvent"])
