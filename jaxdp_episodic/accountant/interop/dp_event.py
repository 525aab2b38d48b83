"""Reads the mechanism descriptions of another library, ``dp_accounting``.

Its ``DpEvent`` objects are recognised by the name of their class, or by the
``class_name`` of their named-tuple form, so that library need not be installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import IndependentEpisodes
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.releases import (
    ApproximateDP,
    LaplaceRelease,
    RenyiDP,
)
from jaxdp_episodic.accountant.describe.schemes import (
    MultistageSampling,
    RandomAllocation,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    OneStep,
    compose,
)
from jaxdp_episodic.accountant.interop import release_event as release
from jaxdp_episodic.accountant.interop.event_tree import (
    ROUNDING_MARGIN,
    VERSIONS,
    EventNotCovered,
    Parts,
    field,
    joint_noise,
    joint_scale,
    kind,
    nonnegative,
    number,
    uncomposed,
    whole,
)
from jaxdp_episodic.accountant.interop.release_event import LEVEL, READERS, reads
from jaxdp_episodic.accountant.questions.trial_counts import (
    NegativeBinomialTrials,
    PoissonTrials,
)
from jaxdp_episodic.accountant.questions.tuning import run_rdp, tuned_rdp
from jaxdp_episodic.files.optional import check_version

# Rényi orders at which a repeated run is known. Between two of the middle ones the
# chord, by which the divergence is bounded, is within 3e-4 of the curve.
_ORDERS = 1 + np.concatenate(
    [
        np.geomspace(1e-6, 1e-2, 40, endpoint=False),
        np.geomspace(1e-2, 1e4, 300, endpoint=False),
        np.geomspace(1e4, 1e12, 60),
    ]
)

# Events known to be (epsilon, delta)-DP, and no more.
_CLAIMS = {
    "EpsilonDeltaDpEvent",
    "ExponentialMechanismDpEvent",
    "PermuteAndFlipDpEvent",
}
# What is joined to a mixture about one sample.
_MIXED = {"GaussianDpEvent", "MixtureOfGaussiansDpEvent"}


def from_dp_event(
    event: Any,
    *,
    neighboring_relation: str = "add_remove",
    population_is_exact: bool = False,
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
      population_is_exact: states that every ``source_dataset_size`` is the size of the
        larger neighbour, not only a lower bound of it. Where all are drawn add_remove
        then costs what full participation does.

    Returns:
      A composed run, equal steps taken together. Its noise multipliers are exact;
      that of several releases about one draw is a lower bound, within 1e-12.

    Raises:
      TypeError: a field of the wrong type, or what is no event at all.
      ValueError: a field out of range, e.g. a sample larger than its source.
      EventNotCovered: another event, one with a field that is not known here, or one
        under a relation that no theorem covers; a NotImplementedError that carries the
        offending event.
      NotImplementedError: another version of ``dp_accounting`` is installed.
    """
    _validation.choice(
        "neighboring_relation", neighboring_relation, NEIGHBORING_RELATIONS
    )
    _validation.flag("population_is_exact", population_is_exact)
    # As keys of a dictionary equal steps fall together, in order of appearance.
    counts: dict[OneStep, int] = {}
    read = steps_of(
        event, neighboring_relation, population_is_exact=population_is_exact
    )
    for _, step, count in read:
        counts[step] = counts.get(step, 0) + count
    if not counts:
        counts[nothing(neighboring_relation)] = 0
    return compose(*counts.items())


def steps_of(
    event: Any,
    neighboring_relation: str,
    orders: np.ndarray | None = None,
    *,
    population_is_exact: bool = False,
) -> Iterator[tuple[Any, OneStep, int]]:
    """Yields the events inside that are no composition, their steps and counts.

    What is known by its Rényi curve alone is known at the given orders too.

    Raises:
      as `from_dp_event`.
    """
    check_version("dp-accounting", VERSIONS)
    for part, count in uncomposed(event):
        step = _step(part, neighboring_relation, orders)
        if population_is_exact and isinstance(step, GaussianStep):
            step = _of_exact_population(step)
        if step is not None:
            # The event of a whole epoch counts as its steps.
            is_epoch = kind(part) == "RandomAllocationDpEvent"
            steps = whole(part, "num_steps", minimum=1) if is_epoch else 1
            yield part, step, count * steps


def nothing(relation: str) -> OneStep:
    """Returns a step that draws nobody."""
    return release.sampled_gaussian(0.0, 1.0, relation)


def _step(
    event: Any, relation: str, orders: np.ndarray | None = None
) -> OneStep | None:
    """One release; None of an event that releases nothing."""
    if kind(event) == "RepeatAndSelectDpEvent":
        return _repeat_and_select(event, relation, orders)
    if kind(event) not in READERS:
        raise EventNotCovered(event, "no theorem here")
    return READERS[kind(event)](event, relation)


@reads("RepeatAndSelectDpEvent")
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


# --- Releases about a sample ---


@reads("PoissonSampledDpEvent")
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
        return release.sampled_gaussian(rate, joint_noise(parts), relation)
    if kinds == {"LaplaceDpEvent"}:
        if relation == "replace_one":
            raise release.wrong_relation(event, relation, "'add_remove' or 'zero_out'")
        return LaplaceRelease(
            joint_scale(parts), sampling_probability=rate, neighboring_relation=relation
        )
    # Of a composition the part that happens, which need not be the first.
    is_one = sum(count for _, count in parts) == 1
    one = next(part for part, count in parts if count) if is_one else None
    if kinds <= _CLAIMS and one is not None:
        return _sampled_claim(rate, READERS[kind(one)](one, relation), relation)
    if kinds == {"DiscreteLaplaceDpEvent"} and one is not None:
        return release.discrete_laplace(one, relation, rate)
    if kinds == {"MixtureOfGaussiansDpEvent"} and one is not None:
        return release.gaussian_mixture(one, relation, rate)
    if "MixtureOfGaussiansDpEvent" in kinds and kinds <= _MIXED:
        return release.joint_mixture(event, parts, relation, rate)
    raise _unsampled(event, parts, relation)


@reads("SampledWithReplacementDpEvent", "SampledWithoutReplacementDpEvent")
def _fixed_size(event: Any, relation: str) -> OneStep | None:
    """Records drawn without replacement; or each draw an episode of one record."""
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


@reads("RandomAllocationDpEvent")
def _random_allocation(event: Any, relation: str) -> OneStep | None:
    """An epoch: each record in ``num_selected`` steps, a uniform subset of its own.

    Of a random partition into blocks one step each: at most what the blocks lose, see
    docs/proofs.md, "Random allocation", `times`.
    """
    parts = _gaussian_parts(event, relation)
    steps = whole(event, "num_steps", minimum=1)
    selected = whole(event, "num_selected", minimum=0)
    if selected > steps:
        raise ValueError(
            f"num_selected must be at most num_steps, got {selected!r} of {steps!r}"
        )
    if selected == 0:
        return None
    scheme = RandomAllocation(LEVEL, steps_per_epoch=steps, times=selected)
    return GaussianStep(
        scheme, noise_multiplier=joint_noise(parts), neighboring_relation=relation
    )


def _of_exact_population(step: GaussianStep) -> GaussianStep:
    scheme = step.design
    if isinstance(scheme, MultistageSampling):
        (scheme,) = scheme.levels
    if not isinstance(scheme, WithoutReplacement):
        return step
    exact = dataclasses.replace(scheme, population_is_exact=True)
    return dataclasses.replace(step, sampling=exact)


def _gaussian_parts(sampled: Any, relation: str) -> Parts:
    """What is released about one draw, all of it Gaussian."""
    parts = list(uncomposed(field(sampled, "event")))
    if any(kind(part) != "GaussianDpEvent" for part, _ in parts):
        raise _unsampled(sampled, parts, relation)
    return parts


def _unsampled(sampled: Any, parts: Parts, relation: str) -> EventNotCovered:
    """The refusal of such a sample; what has no theorem at all is refused itself."""
    for part, _ in parts:
        if kind(part) not in READERS:
            return EventNotCovered(part, "no theorem here")
    inner = ", ".join(dict.fromkeys(kind(part) for part, _ in parts))
    return EventNotCovered(
        sampled,
        f"no theorem of it of a {inner} under neighboring_relation={relation!r}",
    )


def _sampled_claim(rate: float, claim: Any, relation: str) -> OneStep:
    """A sample of something (epsilon, delta)-DP.

    With a record more or less ``log(1 + rate (e^epsilon - 1))`` and ``rate delta``
    (Balle, Barthe, Gaboardi 2018, arXiv:1807.01647, Theorem 8); where it is replaced
    the draws are the same, and by joint convexity delta alone shrinks.
    """
    epsilon, delta = float(claim.epsilon), float(claim.delta)
    if relation == "add_remove":
        with np.errstate(over="ignore"):
            amplified = np.log1p(rate * np.expm1(epsilon))
        epsilon = min(float(amplified) * (1 + ROUNDING_MARGIN), epsilon)
    return ApproximateDP(epsilon, min(rate * delta * (1 + ROUNDING_MARGIN), delta))
