"""Reads the mechanism descriptions of another library, ``dp_accounting``.

Its ``DpEvent`` objects are recognised by the name of their class, or by the
``class_name`` of their named-tuple form, so that library need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.describe.schemes import (
    MultistageSampling,
    Poisson,
    Scheme,
    WithoutReplacement,
)
from jaxdp_episodic.describe.step import ComposedSteps, GaussianStep, compose

LEVEL = "example"

_COVERED = (
    "GaussianDpEvent; PoissonSampledDpEvent and SampledWithoutReplacementDpEvent of "
    "Gaussian events or compositions of these; NoOpDpEvent; NonPrivateDpEvent; "
    "ComposedDpEvent and SelfComposedDpEvent of all these"
)
_ROUNDING_MARGIN = 1e-13

Parts = list[tuple[Any, int]]


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
      event: a GaussianDpEvent; a PoissonSampledDpEvent or
        SampledWithoutReplacementDpEvent of a GaussianDpEvent or of compositions of
        such (several releases about one draw); a NoOpDpEvent; a NonPrivateDpEvent;
        a ComposedDpEvent or SelfComposedDpEvent of all these.
      neighboring_relation: "add_remove" or "replace_one"; the events do not say.
      population_is_exact: states that every ``source_dataset_size`` is the size of the
        larger neighbour, not only a lower bound of it. Where all are drawn add_remove
        then costs what full participation does.

    Returns:
      A composed run, equal steps taken together. Its noise multipliers are exact;
      that of several releases about one draw is a lower bound, within 1e-12.

    Raises:
      TypeError: a field of the wrong type, or what is no event at all.
      ValueError: a field out of range, e.g. a sample larger than its source.
      NotImplementedError: another event, also inside a composition.
    """
    # As keys of a dictionary equal steps fall together, in order of appearance.
    counts: dict[GaussianStep, int] = {}
    for part, count in _uncomposed(event):
        step = _step(part, neighboring_relation, population_is_exact)
        counts[step] = counts.get(step, 0) + count
    if not counts:
        counts[_step_of(_drawn(0.0), 1.0, neighboring_relation)] = 0
    return compose(*counts.items())


def _uncomposed(event: Any) -> Iterator[tuple[Any, int]]:
    """The events that a composition consists of, and how often each happens.

    A composition may hold one event many times, at every depth: taken apart one by one
    thirty doublings would be a billion events. So each event object is looked at once,
    its parents first, with a stack of our own, as Python recurses less deeply.
    """
    ordered, parts = _children_first(event)
    counts = {id(part): 0 for part in ordered}
    counts[id(event)] = 1
    for part in reversed(ordered):
        for inner, repeats in parts[id(part)]:
            counts[id(inner)] += counts[id(part)] * repeats
    for part in _as_they_appear(event, parts):
        if not _is_composed(part):
            count = counts[id(part)]
            _validation.integer_array("count", count, minimum=0)
            yield part, count


def _children_first(event: Any) -> tuple[list[Any], dict[int, Parts]]:
    """All event objects, each after those that it holds, and what each holds."""
    ordered: list[Any] = []
    parts: dict[int, Parts] = {}
    is_done: dict[int, bool] = {}
    waiting = [(event, False)]
    while waiting:
        part, were_children = waiting.pop()
        if were_children:
            is_done[id(part)] = True
            ordered.append(part)
        elif id(part) not in is_done:
            is_done[id(part)] = False
            waiting.append((part, True))
            parts[id(part)] = _parts(part)
            for inner, _ in parts[id(part)]:
                if is_done.get(id(inner)) is False:
                    raise ValueError("event must not be a composition of itself")
                waiting.append((inner, False))
    return ordered, parts


def _as_they_appear(event: Any, parts: dict[int, Parts]) -> Iterator[Any]:
    """All event objects in the order in which they first happen."""
    seen: set[int] = set()
    waiting = [event]
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting.extend(inner for inner, _ in reversed(parts[id(part)]))


def _is_composed(event: Any) -> bool:
    return _kind(event) in ("SelfComposedDpEvent", "ComposedDpEvent", "NoOpDpEvent")


def _parts(event: Any) -> Parts:
    """What a composition holds directly, and how often; of other events nothing."""
    kind = _kind(event)
    if kind == "SelfComposedDpEvent":
        count = _field(event, "count")
        _check_is_one_number("count", count)
        repeats = _validation.integer_array("count", count, minimum=0)
        return [(_field(event, "event"), int(repeats))]
    if kind == "ComposedDpEvent":
        events = _field(event, "events")
        if not isinstance(events, list | tuple):
            shown = _validation.shown(events)
            raise TypeError(f"events must be a list of events, got {shown}")
        return [(inner, 1) for inner in events]
    return []


def _field(event: Any, name: str) -> Any:
    """A field of an event; a class may have an event's name without being one."""
    try:
        return getattr(event, name)
    except AttributeError:
        raise TypeError(f"{_kind(event)} must have a field {name!r}") from None


def _step(
    event: Any, neighboring_relation: str, population_is_exact: bool
) -> GaussianStep:
    """One step: a draw, or everybody, and a Gaussian release about them."""
    kind = _kind(event)
    if kind == "GaussianDpEvent":
        return _step_of(_drawn(1.0), _noise(event), neighboring_relation)
    if kind == "NonPrivateDpEvent":
        return _step_of(_drawn(1.0), 0.0, neighboring_relation)
    if kind == "PoissonSampledDpEvent":
        scheme = _drawn(_field(event, "sampling_probability"))
    elif kind == "SampledWithoutReplacementDpEvent":
        scheme = _drawn_without_replacement(
            _field(event, "sample_size"),
            _field(event, "source_dataset_size"),
            population_is_exact,
        )
    else:
        raise NotImplementedError(f"{kind} cannot be imported; covered: {_COVERED}")
    return _step_of(scheme, _joint_noise(event, kind), neighboring_relation)


def _joint_noise(sampled: Any, kind: str) -> float:
    """The noise multiplier of all Gaussian releases about one draw, taken together.

    Their average, weighted by precision, is sufficient for the sum: precisions add up.
    """
    if _kind(_field(sampled, "event")) == "GaussianDpEvent":
        return _noise(_field(sampled, "event"))
    releases = []
    for part, count in _uncomposed(_field(sampled, "event")):
        if _kind(part) != "GaussianDpEvent":
            raise NotImplementedError(
                f"{kind} of a {_kind(part)} cannot be imported; covered: {_COVERED}"
            )
        noise = _noise(part)
        if count:
            releases.append((noise, count))
    least = min((noise for noise, _ in releases), default=np.inf)
    if least == 0 or np.isinf(least):
        return least
    # Relative to the least noise, so that no square overflows; rounded down.
    precision = sum(count * (least / noise) ** 2 for noise, count in releases)
    return least / float(np.sqrt(float(precision))) * (1 - _ROUNDING_MARGIN)


def _noise(event: Any) -> float:
    _check_is_one_number("noise_multiplier", _field(event, "noise_multiplier"))
    noise = _validation.nonnegative_array(
        "noise_multiplier", _field(event, "noise_multiplier")
    )
    return float(noise)


def _drawn(sampling_probability: Any) -> Poisson:
    _check_is_one_number("sampling_probability", sampling_probability)
    return Poisson(LEVEL, sampling_probability=sampling_probability)


def _drawn_without_replacement(
    size: Any, population: Any, is_exact: bool
) -> WithoutReplacement:
    _check_is_one_number("sample_size", size)
    _check_is_one_number("source_dataset_size", population)
    scheme = WithoutReplacement(
        LEVEL, size=size, population=population, population_is_exact=is_exact
    )
    if size > population:
        raise ValueError(
            "sample_size must be at most source_dataset_size, got "
            f"{size!r} of {population!r}"
        )
    return scheme


def _step_of(scheme: Scheme, noise: float, neighboring_relation: str) -> GaussianStep:
    return GaussianStep(
        MultistageSampling(scheme),
        noise_multiplier=noise,
        neighboring_relation=neighboring_relation,
    )


def _check_is_one_number(name: str, value: Any) -> None:
    if np.ndim(value):
        raise ValueError(
            f"{name} must be one number in an event, got {_validation.shown(value)}"
        )


def _kind(event: Any) -> str:
    """The name of an event's class; refuses what is no event."""
    name = getattr(event, "class_name", type(event).__name__)
    kind = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
    if not kind.endswith("DpEvent"):
        raise TypeError(
            f"event must be a DpEvent of dp_accounting, got {_validation.shown(event)}"
        )
    return kind
