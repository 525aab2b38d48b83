"""Reads the mechanism descriptions of another library, ``dp_accounting``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.describe import releases, schemes
from jaxdp_episodic.accountant.describe.designs import IndependentEpisodes
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    OneStep,
    compose,
)
from jaxdp_episodic.accountant.questions import api, tuning
from jaxdp_episodic.files.optional import check_version

Parts = list[tuple[Any, int]]
"""Events, and how often each happens."""
Law = tuple[np.ndarray, np.ndarray]
"""Values, ascending, and their probabilities."""

# Versions of dp_accounting whose events were read here.
_VERSIONS = ("0.6",)
# Rényi orders at which a repeated run is known. Between two of the middle ones the
# chord, by which the divergence is bounded, is within 3e-4 of the curve.
_ORDERS = 1 + np.concatenate(
    [
        np.geomspace(1e-6, 1e-2, 40, endpoint=False),
        np.geomspace(1e-2, 1e4, 300, endpoint=False),
        np.geomspace(1e4, 1e12, 60),
    ]
)
# The one level that events have.
_LEVEL = "example"
# Most different norms of what is joined: the loss sums as many terms, each of which
# needs nodes of its own (60 take 2 s, 200 a minute).
_MOST_NORMS = 256
# Squared norms this close, relative, are taken for equal: the larger one.
_EQUAL_SQUARES = 1e-12
# Relative; more than the rounding of what is put together, added on the safe side.
_ROUNDING_MARGIN = 1e-13
# Fields of the named-tuple form that say which class it describes.
_OF_NAMED_TUPLES = "module_name class_name"


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
    counts: dict[Any, int] = {}
    for _, step, count in steps_of(event, neighboring_relation):
        if population_is_exact and isinstance(step, GaussianStep):
            step = _of_exact_population(step)
        counts[step] = counts.get(step, 0) + count
    if not counts:
        counts[nothing(neighboring_relation)] = 0
    return compose(*counts.items())


def steps_of(
    event: Any, neighboring_relation: str, orders: np.ndarray | None = None
) -> Iterator[tuple[Any, Any, int]]:
    """Yields the events inside that are no composition, their steps and counts."""
    check_version("dp-accounting", _VERSIONS)
    for part, count in uncomposed(event):
        step = _read(part, neighboring_relation, orders)
        if step is not None:
            # The event of a whole epoch counts as its steps.
            is_epoch = kind(part) == "RandomAllocationDpEvent"
            steps = whole(part, "num_steps", minimum=1) if is_epoch else 1
            yield part, step, count * steps


def _of_exact_population(step: GaussianStep) -> GaussianStep:
    if not isinstance(step.design, schemes.MultistageSampling):
        return step
    (scheme,) = step.design.levels
    if not isinstance(scheme, schemes.WithoutReplacement):
        return step
    exact = dataclasses.replace(scheme, population_is_exact=True)
    return dataclasses.replace(step, sampling=exact)


def nothing(relation: str) -> OneStep:
    """Returns a step that draws nobody."""
    return _sampled_gaussian(0.0, 1.0, relation)


def joint(noises: list[tuple[float, int]], power: int = 2) -> float:
    """Returns the noise multiplier of several Gaussian releases taken together."""
    taken = [(noise, count) for noise, count in noises if count]
    least = min((noise for noise, _ in taken), default=np.inf)
    if least == 0 or np.isinf(least) or taken == [(least, 1)]:
        return least
    # Relative to the least noise, so that no square overflows.
    total = float(sum(count * (least / noise) ** power for noise, count in taken))
    return least / total ** (1 / power) * (1 - _ROUNDING_MARGIN)


# --- Events and their fields ---


class EventNotCovered(NotImplementedError):
    """An event without a theorem here."""

    def __init__(self, event: Any, why: str) -> None:
        super().__init__(
            f"{_name(event)} cannot be imported: {why}; covered: "
            f"{', '.join(sorted(FIELDS))}"
        )
        self.event = event


def uncomposed(event: Any) -> Iterator[tuple[Any, int]]:
    """The events that a composition consists of, and how often each happens."""
    held: dict[int, tuple[Any, Parts | None]] = {}
    waiting = [event]  # a stack of our own, as Python recurses less deeply
    while waiting:
        part = waiting.pop()
        if id(part) not in held:
            held[id(part)] = part, _parts(part)
            waiting.extend(inner for inner, _ in reversed(held[id(part)][1] or []))
    graph = {key: [id(inner) for inner, _ in p or []] for key, (_, p) in held.items()}
    counts = dict.fromkeys(graph, 0)
    counts[id(event)] = 1
    try:
        children_first = [*TopologicalSorter(graph).static_order()]
    except CycleError:
        raise ValueError("event must not be a composition of itself") from None
    for key in reversed(children_first):
        for inner, repeats in held[key][1] or []:
            counts[id(inner)] += counts[key] * repeats
    for key, (part, parts) in held.items():
        if parts is None:
            _validation.integer_array("count", counts[key], minimum=0)
            yield part, counts[key]


def _parts(event: Any) -> Parts | None:
    """What a composition holds directly, and how often; None of other events."""
    match kind(event):
        case "NoOpDpEvent":
            return []
        case "SelfComposedDpEvent":
            return [(field(event, "event"), whole(event, "count", minimum=0))]
        case "ComposedDpEvent":
            events = field(event, "events")
            if not isinstance(events, list | tuple):
                shown = _validation.shown(events)
                raise TypeError(f"events must be a list of events, got {shown}")
            return [(inner, 1) for inner in events]
        case "PoissonSampledDpEvent":
            # A sample of everybody is what is released about it.
            if bool(number(event, "sampling_probability") == 1):
                return [(field(event, "event"), 1)]
    return None


def field(event: Any, name: str) -> Any:
    """A field of an event; a class may have an event's name without being one."""
    try:
        return getattr(event, name)
    except AttributeError:
        raise TypeError(f"{kind(event)} must have a field {name!r}") from None


def number(event: Any, name: str) -> Any:
    """A field that is one number, or at least no array."""
    value = field(event, name)
    if np.ndim(value):
        raise ValueError(
            f"{name} must be one number in an event, got {_validation.shown(value)}"
        )
    return value


def nonnegative(event: Any, name: str) -> float:
    """A field that is one number >= 0."""
    return float(_validation.nonnegative_array(name, number(event, name)))


def whole(event: Any, name: str, *, minimum: int) -> int:
    """A field that is one whole number."""
    return int(_validation.integer_array(name, number(event, name), minimum=minimum))


def kind(event: Any) -> str:
    """The name of an event's class; refuses what is no event, and unknown fields."""
    name = _name(event)
    if not name.endswith("DpEvent"):
        raise TypeError(
            f"event must be a DpEvent of dp_accounting, got {_validation.shown(event)}"
        )
    if name in FIELDS:
        unknown = _unknown_fields(event, f"{FIELDS[name]} {_OF_NAMED_TUPLES}")
        if unknown:
            raise EventNotCovered(event, f"no theorem of its {unknown}")
    return name


def _name(event: Any) -> str:
    name = getattr(event, "class_name", type(event).__name__)
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def _unknown_fields(thing: Any, known: str) -> str:
    """The fields that another library's object has besides the known ones, by name."""
    held = {*getattr(thing, "__dict__", ())}
    for declared in ("_fields", "__dataclass_fields__"):
        held.update(getattr(type(thing), declared, ()))
    held.update(one.name for one in getattr(type(thing), "__attrs_attrs__", ()))
    return ", ".join(sorted(held - set(known.split())))


def refuse_unknown(thing: Any, known: str) -> None:
    """Refuses another library's object with fields that were not read here, by name."""
    if unknown := _unknown_fields(thing, known):
        raise NotImplementedError(
            f"{type(thing).__name__} is not covered with {unknown}; known fields: "
            f"{known.replace(' ', ', ')}"
        )


# --- One release ---


def _read(event: Any, relation: str, orders: np.ndarray | None = None) -> Any:
    """One release; None of an event that releases nothing."""
    name = kind(event)
    if name not in FIELDS:
        raise EventNotCovered(event, "no theorem here")
    if name == "RepeatAndSelectDpEvent":
        return _repeat_and_select(event, relation, orders)
    return _READERS.get(name, _released)(event, relation)


def _released(event: Any, relation: str, **given: Any) -> Any:
    """An event that is a release here; what is given comes before its fields."""
    cls, fields = RELEASED_AS[kind(event)]
    if cls.relations and relation not in cls.relations:
        raise _wrong_relation(event, relation, *cls.relations)
    for theirs, ours in fields.items():
        one = ours in cls.numeric or ours in cls.singles
        value = number(event, theirs) if one else np.asarray(field(event, theirs))
        given.setdefault(ours, value)
    if cls.relations:
        given["neighboring_relation"] = relation
    try:
        return cls(**given)
    except NotImplementedError as error:
        raise EventNotCovered(event, str(error)) from None


def _tree(event: Any, relation: str) -> OneStep | None:
    """A record is in one node at each height of one tree at most."""
    if relation != "zero_out":
        raise _wrong_relation(event, relation, "zero_out")
    noise = nonnegative(event, "noise_multiplier")
    counts = _validation.integer_array(
        "step_counts", field(event, "step_counts"), minimum=0
    )
    if counts.size == 0:
        raise ValueError("step_counts must have at least one number of steps, got none")
    height = int(counts.max()).bit_length()
    return (
        _sampled_gaussian(1.0, joint([(noise, height)]), relation) if height else None
    )


def _discrete_gaussian(event: Any, relation: str) -> OneStep:
    """Its divergences are at most the Gaussian's, whatever the dimension."""
    moved = nonnegative(event, "sensitivity")
    moved *= 2.0 if relation == "replace_one" else 1.0
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        rho = 0.5 * np.square(np.float64(moved) / nonnegative(event, "sigma"))
    rho = 0.0 if moved == 0 else rho * (1 + _ROUNDING_MARGIN)
    return releases.ZeroConcentratedDP(rho)


def _truncated(event: Any, relation: str) -> OneStep | None:
    """A truncated Poisson sample to a physical batch."""
    population = whole(event, "dataset_size", minimum=0)
    # The larger of two neighbours has at least one record.
    step = _released(event, relation, population=max(population, 1))
    return None if population == 0 and relation != "add_remove" else step


def _repeat_and_select(
    event: Any, relation: str, orders: np.ndarray | None = None
) -> OneStep:
    """The best of a random number of runs, by `tuned_rdp`."""
    mean, shape = number(event, "mean"), number(event, "shape")
    if np.isposinf(_validation.real_array("shape", shape)):
        trials: Any = tuning.PoissonTrials(expected_runs=mean)
    else:
        eta = nonnegative(event, "shape")
        trials = tuning.NegativeBinomialTrials(expected_runs=mean, eta=eta)
    try:
        run = from_dp_event(field(event, "event"), neighboring_relation=relation)
    except RecursionError:
        raise ValueError("event must not repeat runs nested so deeply") from None
    grid = _ORDERS if orders is None else np.union1d(_ORDERS, orders)
    curve = tuning.tuned_rdp(trials, grid, api.rdp(run, grid))
    return releases.RenyiDP(grid, curve)


def _wrong_relation(event: Any, relation: str, *covered: str) -> EventNotCovered:
    """The refusal of an event under another relation than those of its theorem."""
    names = " or ".join(map(repr, covered))
    return EventNotCovered(
        event, f"neighboring_relation must be {names}, got {relation!r}"
    )


def _sampled_gaussian(rate: float, noise: float, relation: str) -> GaussianStep:
    """A Gaussian release about a Poisson sample."""
    return _gaussian_step(
        schemes.Poisson(_LEVEL, sampling_probability=rate), noise, relation
    )


def _gaussian_step(sampling: Any, noise: float, relation: str) -> GaussianStep:
    return GaussianStep(sampling, noise_multiplier=noise, neighboring_relation=relation)


# --- Releases about a sample ---


def _joint_noise(parts: Parts, power: int = 2) -> float:
    return joint([(nonnegative(one, "noise_multiplier"), n) for one, n in parts], power)


def _poisson(event: Any, relation: str) -> OneStep:
    """A Poisson draw of what one step or several draw, or release."""
    rate, inner, seen = 1.0, event, set()
    # A draw of a draw is a draw.
    while kind(inner) == "PoissonSampledDpEvent":
        share = number(inner, "sampling_probability")
        rate *= float(_validation.probability_array("sampling_probability", share))
        seen.add(id(inner))
        inner = field(inner, "event")
        if id(inner) in seen:
            raise ValueError("event must not be a sample of itself")
    parts = list(uncomposed(inner))
    kinds = {kind(part) for part, _ in parts}
    # Of a composition the part that happens, which need not be the first.
    is_one = sum(count for _, count in parts) == 1
    one = next(part for part, count in parts if count) if is_one else None
    if kinds <= {"GaussianDpEvent"}:
        return _sampled_gaussian(rate, _joint_noise(parts), relation)
    is_mixture = kinds <= {"GaussianDpEvent", "MixtureOfGaussiansDpEvent"}
    if relation == "replace_one" and (is_mixture or kinds == {"LaplaceDpEvent"}):
        raise _wrong_relation(event, relation, "add_remove", "zero_out")
    if kinds == {"LaplaceDpEvent"}:
        return releases.LaplaceRelease(
            _joint_noise(parts, 1),
            sampling_probability=rate,
            neighboring_relation=relation,
        )
    if kinds <= {"DiscreteLaplaceDpEvent", "MixtureOfGaussiansDpEvent"} and is_one:
        return _released(one, relation, sampling_probability=rate)
    if is_mixture:
        return _joint_mixture(event, parts, relation, rate)
    if kinds <= _CLAIMS and is_one:
        return _sampled_claim(rate, _read(one, relation), relation)
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
        one = schemes.WithoutReplacement(_LEVEL, size=1, population=population)
        sampling = IndependentEpisodes(one, num_episodes=size)
    elif size <= population:
        sampling = schemes.WithoutReplacement(_LEVEL, size=size, population=population)
    else:
        raise ValueError(
            "sample_size must be at most source_dataset_size, got "
            f"{size!r} of {population!r}"
        )
    return _gaussian_step(sampling, _joint_noise(parts), relation)


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
    scheme = schemes.RandomAllocation(_LEVEL, steps_per_epoch=steps, times=selected)
    return _gaussian_step(scheme, _joint_noise(parts), relation)


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
        epsilon = min(float(amplified) * (1 + _ROUNDING_MARGIN), epsilon)
    return releases.ApproximateDP(
        epsilon, min(rate * delta * (1 + _ROUNDING_MARGIN), delta)
    )


def _joint_mixture(sampled: Any, parts: Parts, relation: str, rate: float) -> OneStep:
    """Mixtures and Gaussians of one sample, as a mixture of their joint norms."""
    law: Law = np.zeros(1), np.ones(1)
    for part, count in parts:
        law = _plus(law, _times(_squares(part), count, sampled), sampled)
    squares, chance = law
    bare = np.isinf(squares).any()  # a size without any noise shows whoever has one
    norms = 1.0 * (squares > 0) if bare else np.sqrt(squares) * (1 + _ROUNDING_MARGIN)
    return releases.GaussianMixtureRelease(
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


# --- The table ---


def _pure(event: Any, relation: str) -> OneStep:
    """Of what is epsilon-DP no more is used, an upper bound."""
    del relation
    return releases.ApproximateDP(nonnegative(event, "epsilon"))


# Events that are read: their fields, and what reads them. Where that is a release, a
# row serves both ways; "theirs=ours" is a field that has another name there.
_ROWS: tuple[tuple[str, str, Any], ...] = (
    ("NoOpDpEvent", "", None),
    ("ComposedDpEvent", "events", None),
    ("SelfComposedDpEvent", "event count", None),
    ("RepeatAndSelectDpEvent", "event mean shape", None),
    (
        "NonPrivateDpEvent",
        "",
        lambda event, relation: _sampled_gaussian(1.0, 0.0, relation),
    ),
    (
        "GaussianDpEvent",
        "noise_multiplier",
        lambda event, relation: _sampled_gaussian(
            1.0, nonnegative(event, "noise_multiplier"), relation
        ),
    ),
    ("DiscreteGaussianDpEvent", "sigma sensitivity dimension", _discrete_gaussian),
    ("ExponentialMechanismDpEvent", "epsilon", _pure),
    ("PermuteAndFlipDpEvent", "epsilon", _pure),
    ("SingleEpochTreeAggregationDpEvent", "noise_multiplier step_counts", _tree),
    ("PoissonSampledDpEvent", "sampling_probability event", _poisson),
    (
        "SampledWithReplacementDpEvent",
        "source_dataset_size sample_size event",
        _fixed_size,
    ),
    (
        "SampledWithoutReplacementDpEvent",
        "source_dataset_size sample_size event",
        _fixed_size,
    ),
    ("RandomAllocationDpEvent", "event num_selected num_steps", _random_allocation),
    ("LaplaceDpEvent", "noise_multiplier", releases.LaplaceRelease),
    (
        "DiscreteLaplaceDpEvent",
        "noise_parameter sensitivity",
        releases.DiscreteLaplaceRelease,
    ),
    (
        "RandomizedResponseDpEvent",
        "noise_parameter num_buckets",
        releases.RandomizedResponse,
    ),
    (
        "MixtureOfGaussiansDpEvent",
        "standard_deviation sensitivities sampling_probs=probabilities",
        releases.GaussianMixtureRelease,
    ),
    ("ZCDpEvent", "rho xi", releases.ZeroConcentratedDP),
    ("EpsilonDeltaDpEvent", "epsilon delta", releases.ApproximateDP),
    (
        "TruncatedSubsampledGaussianDpEvent",
        "dataset_size=population sampling_probability truncated_batch_size=batch_size "
        "noise_multiplier",
        releases.TruncatedPoissonRelease,
    ),
)
FIELDS = {
    name: " ".join(one.partition("=")[0] for one in fields.split())
    for name, fields, _ in _ROWS
}
"""Events that are read and the fields of each: one more may change what is released."""
RELEASED_AS = {
    name: (read, {f.partition("=")[0]: f.rpartition("=")[2] for f in fields.split()})
    for name, fields, read in _ROWS
    if isinstance(read, type)
}
"""Events that are a release here: its class, and each field as ours."""
_READERS: dict[str, Callable[..., Any]] = {
    "TruncatedSubsampledGaussianDpEvent": _truncated,
    **{n: read for n, _, read in _ROWS if read and not isinstance(read, type)},
}
# Events known to be (epsilon, delta)-DP, and no more.
_CLAIMS = {"EpsilonDeltaDpEvent", *(n for n, r in _READERS.items() if r is _pure)}
