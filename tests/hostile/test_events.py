"""Events of dp_accounting that are small to write and large to expand."""

import math
from typing import Any, NamedTuple

import pytest

from jaxdp_episodic.accountant.interop.dp_event import from_dp_event


class Gaussian(NamedTuple):
    noise_multiplier: Any = 1.0
    class_name: str = "GaussianDpEvent"


class Composed(NamedTuple):
    events: Any
    class_name: str = "ComposedDpEvent"


class Repeated(NamedTuple):
    event: Any
    count: Any
    class_name: str = "SelfComposedDpEvent"


class Sampled:  # mutable: it may contain itself
    def __init__(self, event: Any, sampling_probability: Any = 0.1):
        self.event, self.sampling_probability = event, sampling_probability
        self.class_name = "PoissonSampledDpEvent"


class Selected(NamedTuple):
    event: Any
    mean: Any = 3.0
    shape: Any = 1.0
    class_name: str = "RepeatAndSelectDpEvent"


def doubled(event: Any, times: int) -> Any:
    for _ in range(times):
        event = Composed([event, event])
    return event


def test_exponentially_nested_events_are_expanded_once():
    assert from_dp_event(doubled(Gaussian(), 40)).counts == (2**40,)
    both = Composed([Gaussian(2.0), doubled(Gaussian(3.0), 30), Gaussian(2.0)])
    run: Any = from_dp_event(both)
    assert run.counts == (2, 2**30)
    assert [step.noise_multiplier for step in run.steps] == [2.0, 3.0]
    inside: Any = from_dp_event(Sampled(doubled(Gaussian(3.0), 20)))
    assert inside.steps[0].noise_multiplier == pytest.approx(3 / 2**10, rel=1e-9)


def test_impossible_counts_are_refused():
    for event in (
        doubled(Gaussian(), 2000),
        Sampled(doubled(Gaussian(), 2000)),
        *(Repeated(Gaussian(), n) for n in (-1, 0.5, 10**400, math.nan, math.inf)),
    ):
        with pytest.raises(ValueError, match="count must"):
            from_dp_event(event)


def test_an_event_within_itself_is_refused():
    events: list[Any] = []
    loop = Composed(events)
    events += [Gaussian(), Composed([loop])]
    for event in (loop, Sampled(loop)):
        with pytest.raises(ValueError, match="composition of itself"):
            from_dp_event(event)
    again = Sampled(None, 0.5)
    again.event = again
    with pytest.raises(ValueError, match="sample of itself"):
        from_dp_event(again)


def test_look_alikes_of_events_are_refused():
    class Odd(NamedTuple):
        class_name: Any

    for name in ("GaussianDpEvent", "ComposedDpEvent"):
        with pytest.raises(TypeError, match="must have a field"):
            from_dp_event(Odd(name))
    for name in (b"\xff", 7, "", None):
        with pytest.raises(TypeError, match="must be a DpEvent"):
            from_dp_event(Odd(name))
    with pytest.raises(TypeError, match="events must be a list"):
        from_dp_event(Composed(7))


def test_samples_may_be_nested_deeply():
    deep: Any = Gaussian()
    for _ in range(5000):
        deep = Sampled(deep, 0.999)
    assert len(from_dp_event(deep).steps) == 1
    for _ in range(5000):
        deep = Sampled(Composed([deep]))
    with pytest.raises(NotImplementedError, match="of it of a PoissonSampledDpEvent"):
        from_dp_event(deep)
    selected: Any = Gaussian()
    for _ in range(5000):
        selected = Selected(selected)
    with pytest.raises(ValueError, match="nested so deeply"):
        from_dp_event(selected)
