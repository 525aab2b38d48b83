"""Reads the mechanism descriptions of another library, ``dp_accounting``.

Its ``DpEvent`` objects are recognised by the name of their class, or by the
``class_name`` of their named-tuple form, so that library need not be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxdp_episodic import _validation
from jaxdp_episodic.describe.designs import IndependentEpisodes
from jaxdp_episodic.describe.rates import NEIGHBORING_RELATIONS
from jaxdp_episodic.describe.releases import (
    ApproximateDP,
    LaplaceRelease,
    ZeroConcentratedDP,
)
from jaxdp_episodic.describe.schemes import Poisson, WithoutReplacement
from jaxdp_episodic.describe.step import ComposedSteps, GaussianStep, OneStep, compose

LEVEL = "example"
_ROUNDING_MARGIN = 1e-13

Parts = list[tuple[Any, int]]


class EventNotCovered(NotImplementedError):
    """An event without a theorem here.

    Attributes:
      event: the offending one, which may lie deep inside the one that was read.
    """

    def __init__(self, event: Any, why: str) -> None:
        covered = "; ".join(sorted(name for name in _READERS))
        super().__init__(
            f"{_kind(event)} cannot be imported: {why}; covered: {covered}, "
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
    event: Any, neighboring_relation: str
) -> Iterator[tuple[Any, OneStep, int]]:
    """Yields the events inside that are no composition, their steps and counts.

    Raises:
      as `from_dp_event`.
    """
    for part, count in _uncomposed(event):
        step = _step(part, neighboring_relation)
        if step is not None:
            yield part, step, count


def nothing(neighboring_relation: str) -> OneStep:
    """Returns a step that draws nobody."""
    return _sampled_gaussian(0.0, 1.0, neighboring_relation)


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


def _step(event: Any, relation: str) -> OneStep | None:
    """One release; None of an event that releases nothing."""
    if _kind(event) not in _READERS:
        raise EventNotCovered(event, "no theorem here")
    return _READERS[_kind(event)](event, relation)


# --- Releases about all the data ---


def _gaussian(event: Any, relation: str) -> OneStep:
    return _sampled_gaussian(1.0, _nonnegative(event, "noise_multiplier"), relation)


def _non_private(event: Any, relation: str) -> OneStep:
    del event
    return _sampled_gaussian(1.0, 0.0, relation)


def _laplace(event: Any, relation: str) -> OneStep:
    return LaplaceRelease(
        _nonnegative(event, "noise_multiplier"), neighboring_relation=relation
    )


def _zcdp(event: Any, relation: str) -> OneStep:
    del relation
    return ZeroConcentratedDP(_nonnegative(event, "rho"), xi=_nonnegative(event, "xi"))


def _epsilon_delta(event: Any, relation: str) -> OneStep:
    del relation
    delta = _number(event, "delta")
    return ApproximateDP(_nonnegative(event, "epsilon"), delta)


def _tree(event: Any, relation: str) -> OneStep | None:
    """A record is in one node at each height of one tree at most.

    A tree over n steps, whose counter is the binary number of the step, is as high as
    n has bits (Kairouz et al. 2021, arXiv:2103.00039, appendix D).
    """
    if relation != "zero_out":
        raise EventNotCovered(
            event, f"neighboring_relation must be 'zero_out', got {relation!r}"
        )
    noise = _nonnegative(event, "noise_multiplier")
    counts = _validation.integer_array(
        "step_counts", _field(event, "step_counts"), minimum=0
    )
    if counts.size == 0:
        raise ValueError("step_counts must have at least one number of steps, got none")
    height = int(counts.max()).bit_length()
    if height == 0:
        return None
    return _sampled_gaussian(1.0, _joint([(noise, height)]), relation)


# --- Releases about a sample ---


def _poisson(event: Any, relation: str) -> OneStep:
    """A Poisson draw of what one step or several draw, or release."""
    rate, inner = 1.0, event
    # A draw of a draw is a draw.
    while _kind(inner) == "PoissonSampledDpEvent":
        rate *= float(
            _validation.probability_array(
                "sampling_probability", _number(inner, "sampling_probability")
            )
        )
        inner = _field(inner, "event")
    parts = list(_uncomposed(inner))
    kinds = {_kind(part) for part, _ in parts}
    if kinds <= {"GaussianDpEvent"}:
        return _sampled_gaussian(rate, _joint_noise(parts), relation)
    if kinds == {"LaplaceDpEvent"} and relation != "replace_one":
        return _sampled_laplace(rate, parts, relation)
    if kinds == {"EpsilonDeltaDpEvent"} and sum(count for _, count in parts) == 1:
        return _sampled_claim(rate, parts[0][0], relation)
    raise _unsampled(event, parts, relation)


def _without_replacement(event: Any, relation: str) -> OneStep | None:
    parts = _gaussian_parts(event, relation)
    size, population = _drawn_of(event)
    if size == 0:
        return None
    if size > population:
        raise ValueError(
            "sample_size must be at most source_dataset_size, got "
            f"{size!r} of {population!r}"
        )
    scheme = WithoutReplacement(LEVEL, size=size, population=population)
    return GaussianStep(
        scheme, noise_multiplier=_joint_noise(parts), neighboring_relation=relation
    )


def _with_replacement(event: Any, relation: str) -> OneStep | None:
    """Every one of the draws is an episode of one record."""
    parts = _gaussian_parts(event, relation)
    size, population = _drawn_of(event)
    if size == 0:
        return None
    one = WithoutReplacement(LEVEL, size=1, population=population)
    return GaussianStep(
        IndependentEpisodes(one, num_episodes=size),
        noise_multiplier=_joint_noise(parts),
        neighboring_relation=relation,
    )


def _drawn_of(event: Any) -> tuple[int, int]:
    return (
        _whole(event, "sample_size", minimum=0),
        _whole(event, "source_dataset_size", minimum=1),
    )


def _gaussian_parts(sampled: Any, relation: str) -> Parts:
    """What is released about one draw, all of it Gaussian."""
    parts = list(_uncomposed(_field(sampled, "event")))
    if any(_kind(part) != "GaussianDpEvent" for part, _ in parts):
        raise _unsampled(sampled, parts, relation)
    return parts


def _unsampled(sampled: Any, parts: Parts, relation: str) -> EventNotCovered:
    """The refusal of a sample of such releases: it names the first that is in the way.

    What cannot even be read alone is what is in the way.
    """
    for part, _ in parts:
        _step(part, relation)
    inner = ", ".join(dict.fromkeys(_kind(part) for part, _ in parts))
    return EventNotCovered(
        sampled,
        f"no theorem of it of a {inner} under neighboring_relation={relation!r}",
    )


def _sampled_gaussian(rate: float, noise: float, relation: str) -> GaussianStep:
    scheme = Poisson(LEVEL, sampling_probability=rate)
    return GaussianStep(scheme, noise_multiplier=noise, neighboring_relation=relation)


def _sampled_laplace(rate: float, parts: Parts, relation: str) -> OneStep:
    """Several vectors about one draw are one, with an L1 norm that adds up.

    Each with a noise of its own is the same vector in units of that noise; one
    coordinate that moves as far as all of them dominates (see `losses.laplace`).
    """
    scales = [(_nonnegative(part, "noise_multiplier"), n) for part, n in parts if n]
    least = min((scale for scale, _ in scales), default=np.inf)
    if least > 0 and np.isfinite(least) and scales != [(least, 1)]:
        moved = sum(count * (least / scale) for scale, count in scales)
        least = least / float(moved) * (1 - _ROUNDING_MARGIN)
    return LaplaceRelease(
        least, sampling_probability=rate, neighboring_relation=relation
    )


def _sampled_claim(rate: float, event: Any, relation: str) -> OneStep:
    """A sample of something (epsilon, delta)-DP.

    Where one record more or less is what may differ, ``log(1 + rate (e^epsilon - 1))``
    and ``rate delta`` (Balle, Barthe, Gaboardi 2018, arXiv:1807.01647, Theorem 8);
    where it is replaced the draws are the same, and by joint convexity delta alone
    shrinks.
    """
    epsilon, delta = _nonnegative(event, "epsilon"), _number(event, "delta")
    delta = float(_validation.probability_array("delta", delta))
    if relation == "add_remove":
        with np.errstate(over="ignore"):
            amplified = np.log1p(rate * np.expm1(epsilon))
        epsilon = min(float(amplified) * (1 + _ROUNDING_MARGIN), epsilon)
    return ApproximateDP(epsilon, min(rate * delta * (1 + _ROUNDING_MARGIN), delta))


def _joint_noise(parts: Parts) -> float:
    return _joint([(_nonnegative(part, "noise_multiplier"), n) for part, n in parts])


def _joint(noises: list[tuple[float, int]]) -> float:
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
    return least / float(np.sqrt(float(precision))) * (1 - _ROUNDING_MARGIN)


# One entry for each event that is no composition.
_READERS: dict[str, Callable[[Any, str], OneStep | None]] = {
    "EpsilonDeltaDpEvent": _epsilon_delta,
    "GaussianDpEvent": _gaussian,
    "LaplaceDpEvent": _laplace,
    "NonPrivateDpEvent": _non_private,
    "PoissonSampledDpEvent": _poisson,
    "SampledWithReplacementDpEvent": _with_replacement,
    "SampledWithoutReplacementDpEvent": _without_replacement,
    "SingleEpochTreeAggregationDpEvent": _tree,
    "ZCDpEvent": _zcdp,
}


# --- Fields ---


def _number(event: Any, name: str) -> Any:
    value = _field(event, name)
    _check_is_one_number(name, value)
    return value


def _nonnegative(event: Any, name: str) -> float:
    return float(_validation.nonnegative_array(name, _number(event, name)))


def _whole(event: Any, name: str, *, minimum: int) -> int:
    return int(_validation.integer_array(name, _number(event, name), minimum=minimum))


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
