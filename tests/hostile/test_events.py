"""Events of dp_accounting that are small to write and large to expand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from jaxdp_episodic.accountant.interop.dp_event import from_dp_event


def event(name: Any, **fields: Any) -> Any:
    return SimpleNamespace(class_name=name, **fields)


def gaussian(noise: float = 1.0) -> Any:
    return event("GaussianDpEvent", noise_multiplier=noise)


def composed(events: Any) -> Any:
    return event("ComposedDpEvent", events=events)


def sampled(inner: Any, rate: float = 0.1) -> Any:
    return event("PoissonSampledDpEvent", event=inner, sampling_probability=rate)


def doubled(inner: Any, times: int) -> Any:
    for _ in range(times):
        inner = composed([inner, inner])
    return inner


def test_exponentially_nested_events_are_expanded_once():
    assert from_dp_event(doubled(gaussian(), 40)).counts == (2**40,)
    both = composed([gaussian(2.0), doubled(gaussian(3.0), 30), gaussian(2.0)])
    run: Any = from_dp_event(both)
    assert run.counts == (2, 2**30)
    assert [step.noise_multiplier for step in run.steps] == [2.0, 3.0]
    inside: Any = from_dp_event(sampled(doubled(gaussian(3.0), 20)))
    assert inside.steps[0].noise_multiplier == pytest.approx(3 / 2**10, rel=1e-9)


def test_impossible_counts_are_refused():
    for impossible in (
        doubled(gaussian(), 2000),
        sampled(doubled(gaussian(), 2000)),
        *(
            event("SelfComposedDpEvent", event=gaussian(), count=n)
            for n in (-1, 0.5, 10**400, math.nan, math.inf)
        ),
    ):
        with pytest.raises(ValueError, match="count must"):
            from_dp_event(impossible)


def test_an_event_within_itself_is_refused():
    events: list[Any] = []
    loop = composed(events)
    events += [gaussian(), composed([loop])]
    for endless in (loop, sampled(loop)):
        with pytest.raises(ValueError, match="composition of itself"):
            from_dp_event(endless)
    again = sampled(None, 0.5)
    again.event = again
    with pytest.raises(ValueError, match="sample of itself"):
        from_dp_event(again)


def test_look_alikes_of_events_are_refused():
    for name in ("GaussianDpEvent", "ComposedDpEvent"):
        with pytest.raises(TypeError, match="must have a field"):
            from_dp_event(event(name))
    for name in (b"\xff", 7, "", None):
        with pytest.raises(TypeError, match="must be a DpEvent"):
            from_dp_event(event(name))
    with pytest.raises(TypeError, match="events must be a list"):
        from_dp_event(composed(7))


def test_samples_may_be_nested_deeply():
    deep: Any = gaussian()
    for _ in range(5000):
        deep = sampled(deep, 0.999)
    assert len(from_dp_event(deep).steps) == 1
    for _ in range(5000):
        deep = sampled(composed([deep]))
    with pytest.raises(NotImplementedError, match="of it of a PoissonSampledDpEvent"):
        from_dp_event(deep)
    selected: Any = gaussian()
    for _ in range(5000):
        selected = event("RepeatAndSelectDpEvent", event=selected, mean=3.0, shape=1.0)
    with pytest.raises(ValueError, match="nested so deeply"):
        from_dp_event(selected)
