"""Events of ``dp_accounting`` as trees: what they hold, fields, joint noises."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from jaxdp_episodic import _validation

Parts = list[tuple[Any, int]]
# By which what is put together errs to the safe side, relative.
ROUNDING_MARGIN = 1e-13


def uncomposed(event: Any) -> Iterator[tuple[Any, int]]:
    """The events that a composition consists of, and how often each happens.

    In the order in which they first happen. A composition may hold one event many
    times, at every depth: taken apart one by one thirty doublings would be a billion
    events. So each event object is looked at once, its parents first.
    """
    events, held = _inside(event)
    graph = {name: [id(inner) for inner, _ in parts] for name, parts in held.items()}
    counts = dict.fromkeys(graph, 0)
    counts[id(event)] = 1
    try:
        children_first = [*TopologicalSorter(graph).static_order()]
    except CycleError:
        raise ValueError("event must not be a composition of itself") from None
    for name in reversed(children_first):
        for inner, repeats in held[name]:
            counts[id(inner)] += counts[name] * repeats
    for part in events:
        if not _is_composed(part):
            count = counts[id(part)]
            _validation.integer_array("count", count, minimum=0)
            yield part, count


def _inside(event: Any) -> tuple[list[Any], dict[int, Parts]]:
    """All event objects as they first happen, and by their id what each holds."""
    found: list[Any] = []
    held: dict[int, Parts] = {}
    waiting = [event]  # a stack of our own, as Python recurses less deeply
    while waiting:
        part = waiting.pop()
        if id(part) not in held:
            found.append(part)
            held[id(part)] = _parts(part)
            waiting.extend(inner for inner, _ in reversed(held[id(part)]))
    return found, held


def _is_composed(event: Any) -> bool:
    return kind(event) in ("SelfComposedDpEvent", "ComposedDpEvent", "NoOpDpEvent")


def _parts(event: Any) -> Parts:
    """What a composition holds directly, and how often; of other events nothing."""
    name = kind(event)
    if name == "SelfComposedDpEvent":
        count = field(event, "count")
        _check_is_one_number("count", count)
        repeats = _validation.integer_array("count", count, minimum=0)
        return [(field(event, "event"), int(repeats))]
    if name == "ComposedDpEvent":
        events = field(event, "events")
        if not isinstance(events, list | tuple):
            shown = _validation.shown(events)
            raise TypeError(f"events must be a list of events, got {shown}")
        return [(inner, 1) for inner in events]
    return []


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
    _check_is_one_number(name, value)
    return value


def nonnegative(event: Any, name: str) -> float:
    """A field that is one number >= 0."""
    return float(_validation.nonnegative_array(name, number(event, name)))


def whole(event: Any, name: str, *, minimum: int) -> int:
    """A field that is one whole number."""
    return int(_validation.integer_array(name, number(event, name), minimum=minimum))


def _check_is_one_number(name: str, value: Any) -> None:
    if np.ndim(value):
        raise ValueError(
            f"{name} must be one number in an event, got {_validation.shown(value)}"
        )


def kind(event: Any) -> str:
    """The name of an event's class; refuses what is no event."""
    name = getattr(event, "class_name", type(event).__name__)
    kind = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
    if not kind.endswith("DpEvent"):
        raise TypeError(
            f"event must be a DpEvent of dp_accounting, got {_validation.shown(event)}"
        )
    return kind


# --- Several releases about the same data ---


def joint_noise(parts: Parts) -> float:
    """That of GaussianDpEvents."""
    return joint([(nonnegative(part, "noise_multiplier"), n) for part, n in parts])


def joint(noises: list[tuple[float, int]]) -> float:
    """The noise multiplier of several Gaussian releases taken together.

    Their average, weighted by precision, is sufficient for the sum: precisions add up.
    """
    releases = [(noise, count) for noise, count in noises if count]
    if len(releases) == 1 and releases[0][1] == 1:
        return releases[0][0]
    least = min((noise for noise, _ in releases), default=np.inf)
    if least == 0 or np.isinf(least):
        return least
    # Relative to the least noise, so that no square overflows; rounded down.
    precision = sum(count * (least / noise) ** 2 for noise, count in releases)
    return least / float(np.sqrt(float(precision))) * (1 - ROUNDING_MARGIN)


def joint_scale(parts: Parts) -> float:
    """The noise multiplier of several LaplaceDpEvents taken together.

    Several vectors are one, with an L1 norm that adds up: each is measured in scales of
    its own noise, and one coordinate that moves as far as all of them dominates (see
    `losses.laplace`).
    """
    scales = [(nonnegative(part, "noise_multiplier"), n) for part, n in parts if n]
    least = min((scale for scale, _ in scales), default=np.inf)
    if least == 0 or np.isinf(least) or scales == [(least, 1)]:
        return least
    moved = sum(count * (least / scale) for scale, count in scales)
    return least / float(moved) * (1 - ROUNDING_MARGIN)
