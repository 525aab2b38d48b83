"""Events of ``dp_accounting``: their fields, what they hold, joint noises."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

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
    Release,
    ZeroConcentratedDP,
)

Parts = list[tuple[Any, int]]
VERSIONS = ("0.6",)
"""Versions of dp_accounting whose events were read here."""

# Events that are a release here, read and written by it: their fields, and what the
# release calls one that has another name there.
_RELEASES: tuple[tuple[str, type[Release], str], ...] = (
    ("LaplaceDpEvent", LaplaceRelease, "noise_multiplier"),
    ("DiscreteLaplaceDpEvent", DiscreteLaplaceRelease, "noise_parameter sensitivity"),
    ("RandomizedResponseDpEvent", RandomizedResponse, "noise_parameter num_buckets"),
    (
        "MixtureOfGaussiansDpEvent",
        GaussianMixtureRelease,
        "standard_deviation sensitivities sampling_probs=probabilities",
    ),
    ("ZCDpEvent", ZeroConcentratedDP, "rho xi"),
    ("EpsilonDeltaDpEvent", ApproximateDP, "epsilon delta"),
    (
        "TruncatedSubsampledGaussianDpEvent",
        TruncatedPoissonRelease,
        "dataset_size=population sampling_probability truncated_batch_size=batch_size "
        "noise_multiplier",
    ),
)
RELEASED_AS = {
    name: (cls, {f.partition("=")[0]: f.rpartition("=")[2] for f in fields.split()})
    for name, cls, fields in _RELEASES
}
"""Each field as ours."""

FIELDS = {
    "NoOpDpEvent": "",
    "ComposedDpEvent": "events",
    "SelfComposedDpEvent": "event count",
    "NonPrivateDpEvent": "",
    "GaussianDpEvent": "noise_multiplier",
    "DiscreteGaussianDpEvent": "sigma sensitivity dimension",
    "ExponentialMechanismDpEvent": "epsilon",
    "PermuteAndFlipDpEvent": "epsilon",
    "SingleEpochTreeAggregationDpEvent": "noise_multiplier step_counts",
    "RepeatAndSelectDpEvent": "event mean shape",
    "PoissonSampledDpEvent": "sampling_probability event",
    "SampledWithReplacementDpEvent": "source_dataset_size sample_size event",
    "SampledWithoutReplacementDpEvent": "source_dataset_size sample_size event",
    "RandomAllocationDpEvent": "event num_selected num_steps",
    **{name: " ".join(fields) for name, (_, fields) in RELEASED_AS.items()},
}
"""Events that are read and the fields of each: one more may change what is released."""

# Fields of the named-tuple form that say which class it describes.
_OF_NAMED_TUPLES = "module_name class_name"
ROUNDING_MARGIN = 1e-13
"""Relative; more than the rounding of what is put together, added on the safe side."""


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
    name = kind(event)
    if name == "NoOpDpEvent":
        return []
    if name == "SelfComposedDpEvent":
        count = whole(event, "count", minimum=0)
        return [(field(event, "event"), count)]
    if name == "ComposedDpEvent":
        events = field(event, "events")
        if not isinstance(events, list | tuple):
            shown = _validation.shown(events)
            raise TypeError(f"events must be a list of events, got {shown}")
        return [(inner, 1) for inner in events]
    # A sample of everybody is what is released about it.
    is_sample = name == "PoissonSampledDpEvent"
    if is_sample and bool(number(event, "sampling_probability") == 1):
        return [(field(event, "event"), 1)]
    return None


def field(event: Any, name: str) -> Any:
    """A field of an event; a class may have an event's name without being one."""
    try:
        return getattr(event, name)
    except AttributeError:
        raise TypeError(f"{kind(event)} must have a field {name!r}") from None


# --- Fields ---


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
        unknown = unknown_fields(event, f"{FIELDS[name]} {_OF_NAMED_TUPLES}")
        if unknown:
            raise EventNotCovered(event, f"no theorem of its {unknown}")
    return name


def _name(event: Any) -> str:
    name = getattr(event, "class_name", type(event).__name__)
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)


def unknown_fields(thing: Any, known: str) -> str:
    """The fields that another library's object has besides the known ones, by name."""
    held = {*getattr(thing, "__dict__", ())}
    for declared in ("_fields", "__dataclass_fields__"):
        held.update(getattr(type(thing), declared, ()))
    held.update(one.name for one in getattr(type(thing), "__attrs_attrs__", ()))
    return ", ".join(sorted(held - set(known.split())))


def refuse_unknown(thing: Any, known: str) -> None:
    """Refuses another library's object with fields that were not read here, by name."""
    unknown = unknown_fields(thing, known)
    if unknown:
        raise NotImplementedError(
            f"{type(thing).__name__} is not covered with {unknown}; known fields: "
            f"{known.replace(' ', ', ')}"
        )


# --- Several releases about the same data ---


def joint_noise(parts: Parts) -> float:
    """That of GaussianDpEvents."""
    return joint([(nonnegative(part, "noise_multiplier"), n) for part, n in parts])


def joint(noises: list[tuple[float, int]], power: int = 2) -> float:
    """The noise multiplier of several Gaussian releases taken together."""
    releases = [(noise, count) for noise, count in noises if count]
    least = min((noise for noise, _ in releases), default=np.inf)
    if least == 0 or np.isinf(least) or releases == [(least, 1)]:
        return least
    # Relative to the least noise, so that no square overflows.
    total = float(sum(count * (least / noise) ** power for noise, count in releases))
    return least / total ** (1 / power) * (1 - ROUNDING_MARGIN)


def joint_scale(parts: Parts) -> float:
    """The noise multiplier of several LaplaceDpEvents taken together."""
    return joint([(nonnegative(part, "noise_multiplier"), n) for part, n in parts], 1)
