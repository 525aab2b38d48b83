"""Reads the events of ``dp_accounting`` as runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.accountant.bounds.subsampling import amplify_poisson
from jaxdp_episodic.accountant.describe import designs, releases
from jaxdp_episodic.accountant.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.accountant.describe.spec import AT_LEAST_ONE, AT_LEAST_ZERO, Check
from jaxdp_episodic.accountant.describe.step import (
    ComposedSteps,
    GaussianStep,
    OneStep,
    compose,
)
from jaxdp_episodic.accountant.questions import api, tuning
from jaxdp_episodic.files.optional import check_version

Parts = list[tuple[Any, int]]  # events, and how often each happens
Law = tuple[np.ndarray, np.ndarray]  # values, ascending, and their probabilities

# Versions of dp_accounting whose events are covered.
_VERSIONS = ("0.6",)
# Rényi orders at which the best of several runs is computed. Between two of the middle
# orders the chord, an upper bound, is within 3e-4 of the curve.
_ORDERS = 1 + np.concatenate(
    [
        np.geomspace(1e-6, 1e-2, 40, endpoint=False),
        np.geomspace(1e-2, 1e4, 300, endpoint=False),
        np.geomspace(1e4, 1e12, 60),
    ]
)
# Name of the level; events have only one.
_LEVEL = "example"
# Largest number of different norms of joint releases. Each is a term of the loss with
# its own quadrature nodes (60 take 2 s, 200 a minute).
_MOST_NORMS = 256
# Relative distance below which squared norms are merged into the larger one.
_EQUAL_SQUARES = 1e-12
# Relative; exceeds the rounding errors of joint releases, and is added or subtracted
# on the safe side.
_ROUNDING_MARGIN = 1e-13
_TINY = 2.0**-1022
# The field of a sampling probability, and its check.
_RATE = "sampling_probability", _validation.probability_array
_SUFFIX = "DpEvent"  # of the names of all events
# Fields of the named-tuple form that state the class.
_OF_NAMED_TUPLES = "module_name class_name"


def from_dp_event(
    event: Any,
    *,
    neighboring_relation: str = "add_remove",
    population_is_exact: bool = False,
) -> ComposedSteps:
    """Returns the run that a ``dp_accounting`` ``DpEvent`` describes.

    The mechanism is a sum of vectors of norm at most C, one per record, plus noise of
    standard deviation ``noise_multiplier`` times C. Adding or removing a record moves
    the sum by C, and replacing one by 2C, as in dp_accounting's ``PLDAccountant``. Do
    not double the noise to agree with its ``RdpAccountant``: docs/dp_accounting.md.

    Events have no levels; the run has one, "example", which is clipped and protected.
    ``source_dataset_size`` may be the size of either neighbour, so it is used as a
    lower bound of the larger size.

    Args:
      event: an event of the table in docs/dp_accounting.md, or a composition of them.
      neighboring_relation: "add_remove", "replace_one" or "zero_out" (dp_accounting's
        REPLACE_SPECIAL); events do not state it.
      population_is_exact: True states that every ``source_dataset_size`` is the size of
        the larger neighbour. Sampling all records under add_remove then costs the same
        as full participation.

    Returns:
      A composed run in which equal steps are counted. Its noise multipliers are exact;
      that of several releases about one sample is a lower bound, within 1e-12.

    Raises:
      TypeError: a field of the wrong type, or an object that is no event.
      ValueError: a field out of range, e.g. a sample larger than its source.
      EventNotCovered: another event, one with an unknown field, or one under a relation
        that no theorem covers; a NotImplementedError with the offending event.
      NotImplementedError: another version of ``dp_accounting`` is installed.
    """
    _validation.choice(
        "neighboring_relation", neighboring_relation, NEIGHBORING_RELATIONS
    )
    _validation.flag("population_is_exact", population_is_exact)
    # A dictionary counts equal steps, in order of appearance.
    counts: dict[Any, int] = {}
    for part, step, count in steps_of(event, neighboring_relation):
        if population_is_exact and kind(part) == "SampledWithoutReplacement":
            (scheme,) = step.design.schemes
            exact = dataclasses.replace(scheme, population_is_exact=True)
            step = dataclasses.replace(step, sampling=exact)
        counts[step] = counts.get(step, 0) + count
    return compose(*(counts or {nothing(neighboring_relation): 0}).items())


def steps_of(
    event: Any, neighboring_relation: str, orders: np.ndarray | None = None
) -> Iterator[tuple[Any, Any, int]]:
    """Yields the elementary events of an event, with their steps and counts."""
    check_version("dp-accounting", _VERSIONS)
    for part, count in uncomposed(event):
        name = kind(part)
        given = {"orders": orders} if name == "RepeatAndSelect" else {}
        step = (EVENTS[name].read or _released)(part, neighboring_relation, **given)
        if step is not None:  # something is released
            # An epoch counts as all of its steps.
            is_epoch = name == "RandomAllocation"
            steps = number(part, "num_steps", AT_LEAST_ONE) if is_epoch else 1
            yield part, step, count * steps


def nothing(relation: str) -> OneStep:
    """Returns a step that draws no example."""
    return gaussian(0.0, 1.0, relation)


def joint(noises: list[tuple[float, int]], power: int = 2) -> float:
    """Returns the noise multiplier of several Gaussian releases as one release."""
    taken = [(noise, count) for noise, count in noises if count]
    least = min((noise for noise, _ in taken), default=np.inf)
    if least == 0 or np.isinf(least) or taken == [(least, 1)]:
        return least
    # Relative to the smallest noise, so that no square overflows.
    total = float(sum(count * (least / noise) ** power for noise, count in taken))
    return least / total ** (1 / power) * (1 - _ROUNDING_MARGIN)


# --- Events and their fields ---


class EventNotCovered(NotImplementedError):
    """An event that no theorem covers here; ``event`` is the event itself."""

    def __init__(self, event: Any, why: str) -> None:
        super().__init__(
            f"{_name(event)} cannot be imported: {why}; covered: "
            f"{', '.join(name + _SUFFIX for name in sorted(EVENTS))}"
        )
        self.event = event


def uncomposed(event: Any) -> Iterator[tuple[Any, int]]:
    """Yields the elementary events of a composition, if covered, and their counts."""
    held: dict[int, tuple[Any, Parts | None]] = {}
    waiting = [event]  # a stack, since deep nesting would exceed Python's recursion
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
            if kind(part) not in EVENTS:
                raise EventNotCovered(part, "no theorem here")
            _validation.integer_array("count", counts[key], minimum=0)
            yield part, counts[key]


def _parts(event: Any) -> Parts | None:
    """Returns a composition's direct parts and their counts; None for other events."""
    match kind(event):
        case "NoOp":
            return []
        case "SelfComposed":
            return [(field(event, "event"), number(event, "count", AT_LEAST_ZERO))]
        case "Composed":
            events = field(event, "events")
            if not isinstance(events, list | tuple):
                shown = _validation.shown(events)
                raise TypeError(f"events must be a list of events, got {shown}")
            return [(inner, 1) for inner in events]
        case "PoissonSampled":
            # Sampling with probability 1 is the inner event.
            if number(event, *_RATE) == 1:
                return [(field(event, "event"), 1)]
    return None


def field(event: Any, name: str) -> Any:
    """Returns a field; TypeError if an object with an event's name lacks it."""
    try:
        return getattr(event, name)
    except AttributeError:
        raise TypeError(f"{_name(event)} must have a field {name!r}") from None


def number(event: Any, name: str, check: Check = _validation.nonnegative_array) -> Any:
    """Returns a field that is one number and passes the check."""
    return _validation.one(name, field(event, name), check)


def kind(event: Any) -> str:
    """Returns the name of an event without "DpEvent"; refuses unknown fields."""
    name = _name(event).removesuffix(_SUFFIX)
    if name == _name(event):
        raise TypeError(
            f"event must be a DpEvent of dp_accounting, got {_validation.shown(event)}"
        )
    if name in EVENTS:
        unknown = _unknown_fields(event, f"{EVENTS[name].fields} {_OF_NAMED_TUPLES}")
        if unknown:
            raise EventNotCovered(event, f"no theorem of its {unknown}")
    return name


def _name(event: Any) -> str:
    name = getattr(event, "class_name", type(event).__name__)
    if isinstance(name, bytes):
        return name.decode("utf-8", "replace")
    return name if isinstance(name, str) else _validation.shown(name)


def _unknown_fields(thing: Any, known: str) -> str:
    """Returns the names of an object's fields that are not among the known ones."""
    held = {*getattr(thing, "__dict__", ())}
    for declared in ("_fields", "__dataclass_fields__"):
        held.update(getattr(type(thing), declared, ()))
    held.update(one.name for one in getattr(type(thing), "__attrs_attrs__", ()))
    return ", ".join(sorted(held - set(known.split())))


def refuse_unknown(thing: Any, known: str) -> None:
    """Raises NotImplementedError if an object has fields that are not known."""
    if unknown := _unknown_fields(thing, known):
        raise NotImplementedError(
            f"{type(thing).__name__} is not covered with {unknown}; known fields: "
            f"{known.replace(' ', ', ')}"
        )


# --- One release ---


def _released(event: Any, relation: str, **given: Any) -> Any:
    """Returns the release of an event; ``given`` replaces fields of the event."""
    name = kind(event)
    cls = EVENTS[name].release
    if cls.relations and relation not in cls.relations:
        raise _wrong_relation(event, relation, *cls.relations)
    for theirs in EVENTS[name].fields.split():
        ours = OURS.get(theirs, theirs)
        if ours in given:
            continue
        check = cls.numeric.get(ours)
        given[ours] = number(event, theirs, check) if check else field(event, theirs)
    if cls.relations:
        given["neighboring_relation"] = relation
    try:
        return cls(**given)
    except NotImplementedError as error:
        raise EventNotCovered(event, str(error)) from None


def _unsampled_gaussian(event: Any, relation: str) -> OneStep:
    """Gaussian noise on the whole data set, or none."""
    noise = number(event, "noise_multiplier") if EVENTS[kind(event)].fields else 0.0
    return gaussian(1.0, noise, relation)


def _tree(event: Any, relation: str) -> OneStep | None:
    """Tree aggregation: a record is in at most one node at each height of a tree."""
    if relation != "zero_out":
        raise _wrong_relation(event, relation, "zero_out")
    noise = number(event, "noise_multiplier")
    counts = AT_LEAST_ZERO("step_counts", field(event, "step_counts"))
    if counts.size == 0:
        raise ValueError("step_counts must have at least one number of steps, got none")
    height = int(counts.max()).bit_length()
    return gaussian(1.0, joint([(noise, height)]), relation) if height else None


def _discrete_gaussian(event: Any, relation: str) -> OneStep:
    """Discrete Gaussian noise: its divergences are at most those of the Gaussian."""
    moved = number(event, "sensitivity")
    moved *= 2.0 if relation == "replace_one" else 1.0
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        rho = 0.5 * np.square(np.float64(moved) / number(event, "sigma"))
    rho = 0.0 if moved == 0 else rho * (1 + _ROUNDING_MARGIN)
    return releases.ZeroConcentratedDP(rho)


def _truncated(event: Any, relation: str) -> OneStep | None:
    """A Poisson sample that is truncated to a physical batch."""
    population = number(event, "dataset_size", AT_LEAST_ZERO)
    # The larger of two neighbours has at least one record.
    step = _released(event, relation, population=max(population, 1))
    return None if population == 0 and relation != "add_remove" else step


def _repeat_and_select(
    event: Any, relation: str, orders: np.ndarray | None = None
) -> OneStep:
    """The best of a random number of runs, by `tuned_rdp`."""
    mean, eta = number(event, "mean"), number(event, "shape")
    if np.isinf(eta):
        trials: Any = tuning.PoissonTrials(expected_runs=mean)
    else:
        trials = tuning.NegativeBinomialTrials(expected_runs=mean, eta=eta)
    try:
        run = from_dp_event(field(event, "event"), neighboring_relation=relation)
    except RecursionError:
        raise ValueError("event must not repeat runs nested so deeply") from None
    grid = _ORDERS if orders is None else np.union1d(_ORDERS, orders)
    curve = tuning.tuned_rdp(trials, grid, api.rdp(run, grid))
    return releases.RenyiDP(grid, curve)


def _wrong_relation(event: Any, relation: str, *covered: str) -> EventNotCovered:
    """Returns the error for an event whose theorem does not cover the relation."""
    names = " or ".join(map(repr, covered))
    return EventNotCovered(
        event, f"neighboring_relation must be {names}, got {relation!r}"
    )


def gaussian(sampling: Any, noise: Any, relation: str) -> GaussianStep:
    """Returns a Gaussian step on a sample, of a scheme or with a Poisson rate."""
    if isinstance(sampling, float):
        sampling = designs.Poisson(_LEVEL, sampling_probability=sampling)
    return GaussianStep(sampling, noise_multiplier=noise, neighboring_relation=relation)


# --- Releases about a sample ---


def _joint_noise(parts: Parts, power: int = 2) -> float:
    return joint([(number(one, "noise_multiplier"), n) for one, n in parts], power)


def _poisson(event: Any, relation: str) -> OneStep:
    """A Poisson sample, on which one or several releases are made."""
    rate, inner, seen = 1.0, event, set()
    # A Poisson sample of a Poisson sample is a Poisson sample.
    while kind(inner) == "PoissonSampled":
        if id(inner) in seen:
            raise ValueError("event must not be a sample of itself")
        seen.add(id(inner))
        share = number(inner, *_RATE)
        rate = max(rate * share, min(rate, share, _TINY))  # 0 only if one is
        inner = field(inner, "event")
    parts = [*uncomposed(inner)]
    kinds = {kind(part) for part, _ in parts}
    # The only part with a count of 1; it need not be the first.
    is_one = sum(count for _, count in parts) == 1
    one = next(part for part, count in parts if count) if is_one else None
    if kinds <= {"Gaussian"}:
        return gaussian(rate, _joint_noise(parts), relation)
    is_mixture = kinds <= {"Gaussian", "MixtureOfGaussians"}
    if relation == "replace_one" and (is_mixture or kinds == {"Laplace"}):
        raise _wrong_relation(event, relation, "add_remove", "zero_out")
    if kinds == {"Laplace"}:
        given = {"noise_multiplier": _joint_noise(parts, 1)}
        return _released(parts[0][0], relation, sampling_probability=rate, **given)
    if kinds <= {"DiscreteLaplace", "MixtureOfGaussians"} and is_one:
        return _released(one, relation, sampling_probability=rate)
    if is_mixture:
        return _joint_mixture(event, parts, relation, rate)
    if is_one and {EVENTS[name].release for name in kinds} == {releases.ApproximateDP}:
        claim = _released(one, relation)
        amplified, delta = amplify_poisson(
            claim.epsilon, claim.delta, sampling_probability=rate
        )
        epsilon = amplified if relation == "add_remove" else claim.epsilon
        return releases.ApproximateDP(epsilon, delta)
    raise _unsampled(event, parts, relation)


def _fixed_size(event: Any, relation: str) -> OneStep | None:
    """Records drawn without replacement; or with it, each draw an episode of one."""
    noise = _noise_of_sample(event, relation)
    size = number(event, "sample_size", AT_LEAST_ZERO)
    population = number(event, "source_dataset_size", AT_LEAST_ONE)
    if size == 0:
        return None
    sampling: Any
    if kind(event) == "SampledWithReplacement":
        one = designs.WithoutReplacement(_LEVEL, size=1, population=population)
        sampling = designs.IndependentEpisodes(one, num_episodes=size)
    elif size <= population:
        sampling = designs.WithoutReplacement(_LEVEL, size=size, population=population)
    else:
        raise ValueError(
            "sample_size must be at most source_dataset_size, got "
            f"{size!r} of {population!r}"
        )
    return gaussian(sampling, noise, relation)


def _random_allocation(event: Any, relation: str) -> OneStep | None:
    """An epoch: each record is in ``num_selected`` steps, a uniform random subset."""
    noise = _noise_of_sample(event, relation)
    steps = number(event, "num_steps", AT_LEAST_ONE)
    selected = number(event, "num_selected", AT_LEAST_ZERO)
    if selected > steps:
        raise ValueError(
            f"num_selected must be at most num_steps, got {selected!r} of {steps!r}"
        )
    if selected == 0:
        return None
    scheme = designs.RandomAllocation(_LEVEL, steps_per_epoch=steps, times=selected)
    return gaussian(scheme, noise, relation)


def _noise_of_sample(sampled: Any, relation: str) -> float:
    """Returns the joint noise of the releases on one sample, if all are Gaussian."""
    parts = [*uncomposed(field(sampled, "event"))]
    if any(kind(part) != "Gaussian" for part, _ in parts):
        raise _unsampled(sampled, parts, relation)
    return _joint_noise(parts)


def _unsampled(sampled: Any, parts: Parts, relation: str) -> EventNotCovered:
    """Returns the error for a sample on which no theorem covers the releases."""
    inner = ", ".join(dict.fromkeys(_name(part) for part, _ in parts))
    return EventNotCovered(
        sampled,
        f"no theorem of it of a {inner} under neighboring_relation={relation!r}",
    )


def _joint_mixture(sampled: Any, parts: Parts, relation: str, rate: float) -> OneStep:
    """Mixtures and Gaussians on one sample, as one mixture over their joint norms."""
    law: Law = np.zeros(1), np.ones(1)
    for part, count in parts:
        several = _squares(part)
        while count:  # by doubling
            law = _plus(law, several, sampled) if count % 2 else law
            count //= 2
            several = _plus(several, several, sampled) if count else several
    squares, chance = law
    bare = np.isinf(squares).any()  # a release without noise
    norms = 1.0 * (squares > 0) if bare else np.sqrt(squares) * (1 + _ROUNDING_MARGIN)
    return releases.GaussianMixtureRelease(
        norms,
        chance / chance.sum(),
        standard_deviation=0.0 if bare else 1.0,
        sampling_probability=rate,
        neighboring_relation=relation,
    )


def _squares(event: Any) -> Law:
    """Returns the law of the squared sensitivity, in variances of the noise."""
    if kind(event) == "Gaussian":
        noise = number(event, "noise_multiplier")
        sizes, chance = np.ones(1), np.ones(1)
    else:
        one = _released(event, "add_remove")
        noise = one.standard_deviation
        sizes, chance = np.asarray(one.sensitivities), np.asarray(one.probabilities)
    with np.errstate(divide="ignore", over="ignore"):
        squares = np.square(sizes / (noise or np.where(sizes > 0, 0.0, 1.0)))
    return squares, chance / chance.sum()


def _plus(a: Law, b: Law, event: Any) -> Law:
    """Returns the law of a sum of two independent values; merges equal values."""
    values = np.add.outer(a[0], b[0]).ravel()
    chance = np.multiply.outer(a[1], b[1]).ravel()
    values, chance = values[chance > 0], chance[chance > 0]
    order = np.argsort(values, kind="stable")
    values, chance = values[order], chance[order]
    is_larger = values[1:] > values[:-1] * (1 + _EQUAL_SQUARES)
    starts = np.flatnonzero(np.append(True, is_larger))
    if len(starts) > _MOST_NORMS:
        raise EventNotCovered(
            event, f"its releases have more than {_MOST_NORMS} different joint norms"
        )
    ends = np.append(starts[1:], len(values))
    return values[ends - 1], np.add.reduceat(chance, starts)


# --- The tables ---


class Event(NamedTuple):
    """How an event is read."""

    fields: str  # an unknown field may change what is released
    release: Any = None  # the class that describes it
    read: Callable[..., Any] | None = None  # for other events, or in place of the class


_SIZES = "source_dataset_size sample_size event"
EVENTS = {
    "NoOp": Event(""),
    "NonPrivate": Event("", read=_unsampled_gaussian),
    "Composed": Event("events"),
    "SelfComposed": Event("event count"),
    "RepeatAndSelect": Event("event mean shape", read=_repeat_and_select),
    "Gaussian": Event("noise_multiplier", read=_unsampled_gaussian),
    "DiscreteGaussian": Event("sigma sensitivity dimension", read=_discrete_gaussian),
    "SingleEpochTreeAggregation": Event("noise_multiplier step_counts", read=_tree),
    "PoissonSampled": Event("sampling_probability event", read=_poisson),
    "SampledWithReplacement": Event(_SIZES, read=_fixed_size),
    "SampledWithoutReplacement": Event(_SIZES, read=_fixed_size),
    "RandomAllocation": Event("event num_selected num_steps", read=_random_allocation),
    "Laplace": Event("noise_multiplier", releases.LaplaceRelease),
    "DiscreteLaplace": Event(
        "noise_parameter sensitivity", releases.DiscreteLaplaceRelease
    ),
    "RandomizedResponse": Event(
        "noise_parameter num_buckets", releases.RandomizedResponse
    ),
    "MixtureOfGaussians": Event(
        "standard_deviation sensitivities sampling_probs",
        releases.GaussianMixtureRelease,
    ),
    "ZC": Event("rho xi", releases.ZeroConcentratedDP),
    "EpsilonDelta": Event("epsilon delta", releases.ApproximateDP),
    # Only this claim is used of these two.
    "ExponentialMechanism": Event("epsilon", releases.ApproximateDP),
    "PermuteAndFlip": Event("epsilon", releases.ApproximateDP),
    "TruncatedSubsampledGaussian": Event(
        "dataset_size sampling_probability truncated_batch_size noise_multiplier",
        releases.TruncatedPoissonRelease,
        _truncated,
    ),
}
"""Covered events, without "DpEvent"; a release is written as the first of its class."""
OURS = {
    "sampling_probs": "probabilities",
    "dataset_size": "population",
    "truncated_batch_size": "batch_size",
}
"""Names of fields that release classes name otherwise."""
