"""Reads the mechanism descriptions of another library, ``dp_accounting``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe.designs import IndependentEpisodes
from jaxdp_episodic.accountant.describe.mechanisms import (
    GaussianMixtureRelease,
    TruncatedPoissonRelease,
)
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.releases import (
    ApproximateDP,
    LaplaceRelease,
    RenyiDP,
    ZeroConcentratedDP,
)
from jaxdp_episodic.accountant.describe.schemes import (
    MultistageSampling,
    Poisson,
    RandomAllocation,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    OneStep,
    compose,
)
from jaxdp_episodic.accountant.interop.event_tree import (
    FIELDS,
    RELEASED_AS,
    ROUNDING_MARGIN,
    VERSIONS,
    EventNotCovered,
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
from jaxdp_episodic.accountant.questions.tuning import (
    NegativeBinomialTrials,
    PoissonTrials,
    run_rdp,
    tuned_rdp,
)
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
# What a Poisson sample of is a release here.
_SAMPLED_ALONE = {"DiscreteLaplaceDpEvent", "MixtureOfGaussiansDpEvent"}
# The one level that events have.
_LEVEL = "example"
# Most different norms of what is joined: the loss sums as many terms, each of which
# needs nodes of its own (60 take 2 s, 200 a minute).
_MOST_NORMS = 256
# Squared norms this close, relative, are taken for equal: the larger one.
_EQUAL_SQUARES = 1e-12

Law = tuple[np.ndarray, np.ndarray]
"""Values, ascending, and their probabilities."""


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
    """Yields the events inside that are no composition, their steps and counts."""
    check_version("dp-accounting", VERSIONS)
    for part, count in uncomposed(event):
        step = _read(part, neighboring_relation, orders)
        if population_is_exact and isinstance(step, GaussianStep):
            step = _of_exact_population(step)
        if step is not None:
            # The event of a whole epoch counts as its steps.
            is_epoch = kind(part) == "RandomAllocationDpEvent"
            steps = whole(part, "num_steps", minimum=1) if is_epoch else 1
            yield part, step, count * steps


def nothing(relation: str) -> OneStep:
    """Returns a step that draws nobody."""
    return _sampled_gaussian(0.0, 1.0, relation)


def _read(
    event: Any, relation: str, orders: np.ndarray | None = None
) -> OneStep | None:
    """One release; None of an event that releases nothing."""
    name = kind(event)
    if name not in FIELDS:
        raise EventNotCovered(event, "no theorem here")
    if name == "RepeatAndSelectDpEvent":
        return _repeat_and_select(event, relation, orders)
    if name in _READERS:
        return _READERS[name](event, relation)
    return _released(event, relation)


def _released(event: Any, relation: str, rate: float = 1.0) -> Any:
    """An event that is a release here, about a Poisson sample."""
    cls, fields = RELEASED_AS[kind(event)]
    if cls.relations and relation not in cls.relations:
        raise _wrong_relation(event, relation, " or ".join(map(repr, cls.relations)))
    given: dict[str, Any] = {}
    for theirs, ours in fields.items():
        one = ours in cls.numeric or ours in cls.singles
        given[ours] = number(event, theirs) if one else np.asarray(field(event, theirs))
    if cls.relations:
        given["neighboring_relation"] = relation
    if rate != 1:
        given["sampling_probability"] = rate
    try:
        return cls(**given)
    except NotImplementedError as error:
        raise EventNotCovered(event, str(error)) from None


def _pure(event: Any) -> ApproximateDP:
    return ApproximateDP(nonnegative(event, "epsilon"))


def _tree(event: Any, relation: str) -> OneStep | None:
    """A record is in one node at each height of one tree at most."""
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


def _discrete_gaussian(event: Any, relation: str) -> OneStep:
    """Its divergences are at most the Gaussian's, whatever the dimension."""
    moved = nonnegative(event, "sensitivity")
    moved *= 2.0 if relation == "replace_one" else 1.0
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        rho = 0.5 * np.square(np.float64(moved) / nonnegative(event, "sigma"))
    return ZeroConcentratedDP(0.0 if moved == 0 else rho * (1 + ROUNDING_MARGIN))


def _truncated(event: Any, relation: str) -> OneStep | None:
    """A Poisson sample that is cut to a physical batch."""
    population = whole(event, "dataset_size", minimum=0)
    step = TruncatedPoissonRelease(
        number(event, "noise_multiplier"),
        sampling_probability=number(event, "sampling_probability"),
        batch_size=whole(event, "truncated_batch_size", minimum=0),
        # The larger of two neighbours has at least one record.
        population=max(population, 1),
        neighboring_relation=relation,
    )
    return None if population == 0 and relation != "add_remove" else step


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
    if kinds == {"LaplaceDpEvent"}:
        if relation == "replace_one":
            raise _wrong_relation(event, relation, "'add_remove' or 'zero_out'")
        return LaplaceRelease(
            joint_scale(parts), sampling_probability=rate, neighboring_relation=relation
        )
    # Of a composition the part that happens, which need not be the first.
    is_one = sum(count for _, count in parts) == 1
    one = next(part for part, count in parts if count) if is_one else None
    if kinds <= _CLAIMS and one is not None:
        return _sampled_claim(rate, _read(one, relation), relation)
    if kinds <= _SAMPLED_ALONE and one is not None:
        return _released(one, relation, rate)
    if "MixtureOfGaussiansDpEvent" in kinds and kinds <= _MIXED:
        return _joint_mixture(event, parts, relation, rate)
    raise _unsampled(event, parts, relation)


def _fixed_size(event: Any, relation: str) -> OneStep | None:
    """Records drawn without replacement; or each draw an episode of one record."""
    parts = _gaussian_parts(event, relation)
    size = whole(event, "sample_size", minimum=0)
    population = whole(event, "source_dataset_size", minimum=1)
    if size == 0:
        return None
    sampling: Any
    if kind(event) == "SampledWithReplacementDpEvent":
        one = WithoutReplacement(_LEVEL, size=1, population=population)
        sampling = IndependentEpisodes(one, num_episodes=size)
    elif size <= population:
        sampling = WithoutReplacement(_LEVEL, size=size, population=population)
    else:
        raise ValueError(
            "sample_size must be at most source_dataset_size, got "
            f"{size!r} of {population!r}"
        )
    return GaussianStep(
        sampling, noise_multiplier=joint_noise(parts), neighboring_relation=relation
    )


def _random_allocation(event: Any, relation: str) -> OneStep | None:
    """An epoch: each record in ``num_selected`` steps, a uniform subset of its own."""
    parts = _gaussian_parts(event, relation)
    steps = whole(event, "num_steps", minimum=1)
    selected = whole(event, "num_selected", minimum=0)
    if selected > steps:
        raise ValueError(
            f"num_selected must be at most num_steps, got {selected!r} of {steps!r}"
        )
    if selected == 0:
        return None
    scheme = RandomAllocation(_LEVEL, steps_per_epoch=steps, times=selected)
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
        if kind(part) not in FIELDS:
            return EventNotCovered(part, "no theorem here")
    inner = ", ".join(dict.fromkeys(kind(part) for part, _ in parts))
    return EventNotCovered(
        sampled,
        f"no theorem of it of a {inner} under neighboring_relation={relation!r}",
    )


def _sampled_claim(rate: float, claim: Any, relation: str) -> OneStep:
    """A sample of something (epsilon, delta)-DP."""
    epsilon, delta = float(claim.epsilon), float(claim.delta)
    if relation == "add_remove":
        with np.errstate(over="ignore"):
            amplified = np.log1p(rate * np.expm1(epsilon))
        epsilon = min(float(amplified) * (1 + ROUNDING_MARGIN), epsilon)
    return ApproximateDP(epsilon, min(rate * delta * (1 + ROUNDING_MARGIN), delta))


def _joint_mixture(sampled: Any, parts: Parts, relation: str, rate: float) -> OneStep:
    """Mixtures and Gaussians of one sample, as a mixture of their joint norms."""
    if relation == "replace_one":
        raise _wrong_relation(sampled, relation, "'add_remove' or 'zero_out'")
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
        one = _released(event, "add_remove")
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


def _wrong_relation(event: Any, relation: str, covered: str) -> EventNotCovered:
    """The refusal of an event under another relation than those of its theorem."""
    return EventNotCovered(
        event, f"neighboring_relation must be {covered}, got {relation!r}"
    )


def _sampled_gaussian(rate: float, noise: float, relation: str) -> GaussianStep:
    """A Gaussian release about a Poisson sample."""
    scheme = Poisson(_LEVEL, sampling_probability=rate)
    return GaussianStep(scheme, noise_multiplier=noise, neighboring_relation=relation)


_READERS: dict[str, Callable[..., OneStep | None]] = {
    "GaussianDpEvent": lambda event, relation: _sampled_gaussian(
        1.0, nonnegative(event, "noise_multiplier"), relation
    ),
    "NonPrivateDpEvent": lambda _, relation: _sampled_gaussian(1.0, 0.0, relation),
    # Of what is epsilon-DP no more is used, an upper bound.
    "ExponentialMechanismDpEvent": lambda event, _: _pure(event),
    "PermuteAndFlipDpEvent": lambda event, _: _pure(event),
    "SingleEpochTreeAggregationDpEvent": _tree,
    "DiscreteGaussianDpEvent": _discrete_gaussian,
    "TruncatedSubsampledGaussianDpEvent": _truncated,
    "PoissonSampledDpEvent": _poisson,
    "SampledWithReplacementDpEvent": _fixed_size,
    "SampledWithoutReplacementDpEvent": _fixed_size,
    "RandomAllocationDpEvent": _random_allocation,
}
"""What reads each event that is more, or less, than a release by `RELEASED_AS`."""
