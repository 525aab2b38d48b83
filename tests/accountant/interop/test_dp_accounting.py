"""Import of dp_accounting's events, against its accountant where that is right."""

import collections
import dataclasses
import functools
import types
from typing import Any, cast

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant
from scipy import stats

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.interop.dp_accounting import (
    EpisodicAccountant,
    to_dp_event,
)
from jaxdp_episodic.accountant.interop.dp_event import (
    FIELDS,
    EventNotCovered,
    from_dp_event,
)

# These tests are about the Rényi bounds.
rdp_epsilon = functools.partial(jde.epsilon, method="rdp")

DELTA = 1e-6


def gaussian(noise: Any = 1.0):
    return dp_event.GaussianDpEvent(noise)


def poisson(probability=0.01, event=None):
    return dp_event.PoissonSampledDpEvent(probability, event or gaussian())


THEIRS = {
    "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
}
GAUSSIAN = gaussian(2.0)
TWICE = dp_event.MixtureOfGaussiansDpEvent(1.5, [0.0, 1.0, 2.0], [0.81, 0.18, 0.01])
ONCE = dp_event.MixtureOfGaussiansDpEvent(1.0, [0.5, 1.5], [0.75, 0.25])


def sampled(rate, *events):
    return dp_event.PoissonSampledDpEvent(rate, dp_event.ComposedDpEvent(list(events)))


def often(count, event):
    return dp_event.SelfComposedDpEvent(event, count)


def epsilon(event, **options):
    return rdp_epsilon(from_dp_event(event, **options), delta=DELTA)


def test_equal_events_become_one_step():
    events = [poisson(0.01), gaussian(9.0), poisson(0.01), poisson(0.02)]
    run = from_dp_event(
        dp_event.ComposedDpEvent([*events, dp_event.SelfComposedDpEvent(events[0], 7)])
    )
    assert run.counts == (9, 1, 1)
    assert [step.noise_multiplier for step in run.steps] == [1.0, 9.0, 1.0]
    schemes = [
        jde.MultistageSampling(jde.Poisson("example", sampling_probability=p))
        for p in (0.01, 1.0, 0.02)
    ]
    assert [step.sampling for step in run.steps] == schemes
    assert {step.privacy_unit for step in run.steps} == {"example"}
    assert {step.clip_unit for step in run.steps} == {"example"}


@pytest.mark.parametrize("steps", [0, -1, 0.5, float("inf")])
def test_a_steps_attribute_counts_for_epochs_only(steps):
    # Regression: such an attribute removed the charge of another event.
    event = type("GaussianDpEvent", (), {"noise_multiplier": 1.0, "num_steps": steps})
    assert epsilon(event()) == epsilon(gaussian())


def test_named_tuples_are_events_too():
    event = dp_event.SelfComposedDpEvent(poisson(0.02), 10)
    assert from_dp_event(event.to_named_tuple()) == from_dp_event(event)


def test_compositions_may_be_nested_deeply():
    event = poisson()
    for _ in range(5000):
        event = dp_event.ComposedDpEvent([event, dp_event.NoOpDpEvent()])
    assert from_dp_event(event).counts == (1,)


def test_no_release_costs_nothing_and_no_noise_everything():
    for event in (
        dp_event.ComposedDpEvent([]),
        dp_event.SelfComposedDpEvent(poisson(), 0),
        poisson(0.5, dp_event.ComposedDpEvent([])),
    ):
        assert epsilon(event, neighboring_relation="replace_one") == 0
    assert epsilon(dp_event.NonPrivateDpEvent()) == np.inf
    assert epsilon(gaussian(0.0)) == np.inf
    both = dp_event.ComposedDpEvent([gaussian(0.0), gaussian(1.0)])
    assert epsilon(poisson(0.1, both)) == np.inf
    bare = dp_event.MixtureOfGaussiansDpEvent(0.0, [0.0, 1.0], [0.9, 0.1])
    run = from_dp_event(sampled(0.5, bare, TWICE))
    assert jde.epsilon(run, delta=DELTA) == np.inf
    never = dp_event.SelfComposedDpEvent(dp_event.NonPrivateDpEvent(), 0)
    assert epsilon(dp_event.ComposedDpEvent([never, poisson()])) == pytest.approx(
        epsilon(poisson()), rel=1e-12
    )


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_sampling_without_replacement(relation):
    event = dp_event.SelfComposedDpEvent(
        dp_event.SampledWithoutReplacementDpEvent(1000, 20, gaussian(2.0)), 50
    )
    scheme = jde.WithoutReplacement("example", size=20, population=1000)
    step = jde.GaussianStep(
        jde.MultistageSampling(scheme),
        noise_multiplier=2.0,
        neighboring_relation=relation,
    )
    expected = rdp_epsilon(step, num_steps=50, delta=DELTA)
    assert epsilon(event, neighboring_relation=relation) == expected


def test_all_of_an_exact_population_is_full_participation():
    event = dp_event.SampledWithoutReplacementDpEvent(10, 10, gaussian())
    everybody = jde.epsilon(from_dp_event(gaussian()), delta=1e-5)
    exact = from_dp_event(event, population_is_exact=True)
    assert jde.epsilon(exact, delta=1e-5) == everybody
    # One more may be present and drawn in another's place.
    assert jde.epsilon(from_dp_event(event), delta=1e-5) > 2 * everybody
    with pytest.raises(TypeError, match="population_is_exact"):
        from_dp_event(event, population_is_exact=cast(Any, "yes"))
    with pytest.raises(ValueError, match="neighboring_relation"):
        from_dp_event(poisson(), neighboring_relation="replace_all")


def test_a_random_allocation_is_an_epoch(monkeypatch):
    # As proposed to dp_accounting (its pull request 414); in no release yet.
    fields = ["event", "num_selected", "num_steps"]
    allocation = dataclasses.make_dataclass("RandomAllocationDpEvent", fields)
    event = dp_event.SelfComposedDpEvent(allocation(gaussian(2.0), 2, 11), 3)
    (step,), (count,) = (lambda run: (run.steps, run.counts))(from_dp_event(event))
    scheme = jde.RandomAllocation("example", steps_per_epoch=11, times=2)
    assert step == jde.GaussianStep(scheme, noise_multiplier=2.0) and count == 33
    # Of 414: "exact_epsilon = 2.4265" for 10 of 100, on a grid.
    run = from_dp_event(allocation(gaussian(2.0), 10, 100))
    assert 2.4265 < rdp_epsilon(run, delta=1e-6) < 2.4265 * 1.1
    nobody = from_dp_event(allocation(gaussian(2.0), 0, 11))
    assert jde.epsilon(nobody, delta=1e-6) == 0
    with pytest.raises(ValueError, match="num_selected must be at most num_steps"):
        from_dp_event(allocation(gaussian(), 12, 11))
    with pytest.raises(NotImplementedError, match="of it of a LaplaceDpEvent"):
        from_dp_event(allocation(dp_event.LaplaceDpEvent(1.0), 1, 11))
    once = jde.GaussianStep(
        jde.RandomAllocation("example", steps_per_epoch=11), noise_multiplier=2.0
    )
    with pytest.raises(NotImplementedError, match="no event"):
        to_dp_event(jde.compose((once, 22)))
    monkeypatch.setattr(dp_event, "RandomAllocationDpEvent", allocation, raising=False)
    assert to_dp_event(jde.compose((once, 22))) == dp_event.SelfComposedDpEvent(
        allocation(gaussian(2.0), 1, 11), 2
    )
    for other in (once, jde.compose((once, 12))):
        with pytest.raises(NotImplementedError, match="an epoch of 11 steps"):
            to_dp_event(other)


def test_joint_noise_of_several_releases_is_a_lower_bound():
    for noises in ([1e-170, 1e-170], [1e180, 1e180, 1e180], [0.3, 7.0]):
        event = poisson(0.1, dp_event.ComposedDpEvent([gaussian(s) for s in noises]))
        joint = from_dp_event(event).steps[0].noise_multiplier
        least = min(noises)
        exact = least / np.sqrt(sum((least / s) ** 2 for s in noises))
        assert exact * (1 - 1e-12) < joint < exact
    huge = dp_event.SelfComposedDpEvent(gaussian(1.0), 10**15)
    joint = from_dp_event(poisson(0.1, huge)).steps[0].noise_multiplier
    assert joint == pytest.approx(10**-7.5, rel=1e-12)


@pytest.mark.parametrize(
    "event, name",
    [
        (dp_event.UnsupportedDpEvent(), "UnsupportedDpEvent"),
        (dp_event.SingleEpochTreeAggregationDpEvent(1.0, 3), "TreeAggregation"),
        (
            poisson(0.1, dp_event.RepeatAndSelectDpEvent(gaussian(), 3.0, 1.0)),
            "of it of a RepeatAndSelectDpEvent",
        ),
        (
            dp_event.SampledWithReplacementDpEvent(9, 3, dp_event.LaplaceDpEvent(1.0)),
            "of it of a LaplaceDpEvent",
        ),
        (
            poisson(0.1, dp_event.LaplaceDpEvent(1.0)),
            "PoissonSampledDpEvent.*must be 'add_remove' or 'zero_out'",
        ),
        (
            dp_event.ComposedDpEvent([poisson(), dp_event.UnsupportedDpEvent()]),
            "UnsupportedDpEvent",
        ),
        (sampled(0.5, GAUSSIAN, TWICE), "must be 'add_remove' or 'zero_out'"),
        (sampled(0.5, often(300, TWICE)), "256 different joint norms"),
        (sampled(0.5, dp_event.LaplaceDpEvent(1.0), TWICE), "no theorem"),
    ],
)
def test_other_events_are_refused_by_name(event, name):
    relation = "replace_one" if "must be" in name else "add_remove"
    with pytest.raises(EventNotCovered, match=f"{name}.*covered: "):
        from_dp_event(event, neighboring_relation=relation)


@pytest.mark.parametrize(
    "name", ["PermuteAndFlipDpEvent", "ExponentialMechanismDpEvent"]
)
def test_only_epsilon_of_pure_mechanisms_is_used(name):
    kind = dataclasses.make_dataclass(name, ["epsilon"])  # of versions after 0.6
    for relation in ("add_remove", "replace_one"):
        run = from_dp_event(kind(0.5), neighboring_relation=relation)
        assert run == jde.compose((jde.ApproximateDP(0.5), 1))
    (sampled,) = from_dp_event(poisson(0.1, kind(0.5))).steps
    assert isinstance(sampled, jde.ApproximateDP)
    assert sampled.epsilon == pytest.approx(np.log1p(0.1 * np.expm1(0.5)), rel=1e-12)
    with pytest.raises(ValueError, match="epsilon"):
        from_dp_event(kind(-0.5))


def test_a_sampled_composition_is_charged_without_its_empty_parts():
    pure = dataclasses.make_dataclass("ExponentialMechanismDpEvent", ["epsilon"])
    laplace = dp_event.DiscreteLaplaceDpEvent
    for quiet, loud in ((pure(0.1), pure(5.0)), (laplace(0.1, 1), laplace(3.0, 1))):
        never = dp_event.SelfComposedDpEvent(quiet, 0)
        for parts in ([never, loud], [loud, never]):
            event = poisson(0.5, dp_event.ComposedDpEvent(parts))
            assert from_dp_event(event) == from_dp_event(poisson(0.5, loud))


def _with_field(event, name, value=None):
    """An event with an additional field, as of a later version."""
    kind = type(event)
    more = dataclasses.make_dataclass(
        kind.__name__, [*(one.name for one in kind.__attrs_attrs__), name]
    )
    held = {one.name: getattr(event, one.name) for one in kind.__attrs_attrs__}
    return more(**held, **{name: value})


def _later_events():
    """Events of a later version at every place where events are read."""
    later = _with_field(gaussian(), "scale_of_later")
    without = functools.partial(dp_event.SampledWithoutReplacementDpEvent, 9, 3)
    yield later
    yield _with_field(dp_event.NoOpDpEvent(), "scale_of_later")
    yield _with_field(dp_event.NonPrivateDpEvent(), "scale_of_later")
    yield _with_field(dp_event.ComposedDpEvent([gaussian()]), "scale_of_later", 3)
    yield _with_field(dp_event.SelfComposedDpEvent(gaussian(), 2), "scale_of_later")
    yield poisson(0.5, later)
    yield poisson(0.5, _with_field(poisson(), "scale_of_later"))
    yield without(later)
    yield dp_event.ComposedDpEvent([gaussian(), without(later)])
    yield dp_event.RepeatAndSelectDpEvent(later, 3.0, 1.0)
    fields = {"class_name": "ZCDpEvent", "rho": 0.5, "xi": 0.0, "scale_of_later": 0}
    yield collections.namedtuple("Wrapper", fields)(**fields)
    vague = types.SimpleNamespace(class_name="GaussianDpEvent", noise_multiplier=1.0)
    vague.scale_of_later = None
    yield vague


@pytest.mark.parametrize("event", list(_later_events()))
def test_unknown_fields_are_refused_by_name(event):
    with pytest.raises(EventNotCovered, match="scale_of_later") as caught:
        from_dp_event(event)
    assert caught.value.event is not None
    if isinstance(event, dp_event.DpEvent):
        assert not EpisodicAccountant().supports(event)


def test_the_known_fields_equal_dp_accountings():
    for name, fields in FIELDS.items():
        theirs = getattr(dp_event, name, None)  # some are of later versions
        if theirs is not None:
            declared = [one.name for one in theirs.__attrs_attrs__]
            assert sorted(declared) == sorted(fields.split()), name


@pytest.mark.parametrize(
    "event, error, words",
    [
        (1.0, TypeError, "event must be a DpEvent"),
        (gaussian(np.array([1.0, 2.0])), ValueError, "one number"),
        (gaussian("1"), TypeError, "noise_multiplier"),
        (poisson(1.3), ValueError, "sampling_probability"),
        (dp_event.SelfComposedDpEvent(poisson(), cast(Any, 1.5)), ValueError, "count"),
        (
            dp_event.SampledWithoutReplacementDpEvent(10, 11, gaussian()),
            ValueError,
            "sample_size must be at most",
        ),
    ],
)
def test_wrong_fields_are_refused(event, error, words):
    with pytest.raises(error, match=words):
        from_dp_event(event)


# --- Mixtures of Gaussians ---


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["zero_out", "add_remove"])
def test_composed_mixtures_agree_with_dp_accounting(relation):
    # With rate 1 releases are composed, not joined.
    event = dp_event.ComposedDpEvent([often(60, TWICE), sampled(1.0, ONCE, TWICE)])
    theirs = PLDAccountant(THEIRS[relation], value_discretization_interval=1e-2)
    bound = theirs.compose(often(61, TWICE)).compose(ONCE).get_epsilon(1e-6)
    run = from_dp_event(event, neighboring_relation=relation)
    assert sorted(run.counts) == [1, 61]
    value = jde.epsilon(run, delta=1e-6)
    assert value <= bound <= value * (1 + 1e-3)


def divergences(rate, g, *laws):
    """Both directions of two joint releases of one sample, on a grid of the plane.

    A unit shifts each release along its own axis.
    """
    at = np.linspace(-9, 13, 1_101)
    x, y = at[:, None], at[None, :]
    nobody = np.exp(-0.5 * (x * x + y * y)) / (2 * np.pi)
    somebody = (1 - rate) * nobody
    for a, p in zip(*laws[0], strict=True):
        for b, q in zip(*laws[1], strict=True):
            moved = np.exp(a * x - 0.5 * a * a + b * y - 0.5 * b * b)
            somebody = somebody + rate * p * q * moved * nobody
    cell = (at[1] - at[0]) ** 2
    return [
        cell * np.maximum(one - g * other, 0).sum()
        for one, other in ((somebody, nobody), (nobody, somebody))
    ]


def law(event):
    if event is GAUSSIAN:
        return [0.5], [1.0]
    sizes = np.array(event.sensitivities) / event.standard_deviation
    return sizes, event.sampling_probs


@pytest.mark.parametrize("pair", [(TWICE, GAUSSIAN), (ONCE, TWICE)])
def test_joint_releases_of_a_sample_cost_at_least_the_truth(pair):
    run = from_dp_event(sampled(0.3, *pair))
    for at in (0.05, 0.4):
        true = max(divergences(0.3, np.exp(at), *map(law, pair)))
        assert true * (1 - 1e-6) <= jde.delta(run, epsilon=at) <= 1.8 * true


def test_one_size_is_exact_and_equal_norms_are_joined():
    one = dp_event.MixtureOfGaussiansDpEvent(3.0, [1.5], [1.0])
    both = sampled(0.2, often(3, one), often(2, dp_event.GaussianDpEvent(4.0)))
    value = jde.epsilon(from_dp_event(often(40, both)), delta=1e-6)
    joint = sampled(0.2, dp_event.GaussianDpEvent((3 / 4 + 2 / 16) ** -0.5))
    assert value == pytest.approx(
        jde.epsilon(from_dp_event(often(40, joint)), delta=1e-6), rel=1e-9
    )
    (step,) = from_dp_event(sampled(0.2, often(9, TWICE))).steps
    sums = {a + 4 * b for a in range(10) for b in range(10 - a)}
    assert len(step.sensitivities) == len(sums)
    assert step.probabilities.sum() == pytest.approx(1, abs=1e-12)


# --- People as events ---


BINOMIAL = stats.binom.pmf(np.arange(13), 12, 0.1)
OF_USERS = 0.25 * stats.binom.pmf(np.arange(9), 8, 0.2) + 0.75 * np.eye(9)[0]


def poisson_level(name, rate, **options):
    return jde.Poisson(name, sampling_probability=rate, **options)


def person(*levels, clip_unit=None, relation="add_remove", **bounds):
    return jde.GaussianStep(
        jde.MultistageSampling(*levels),
        noise_multiplier=4.0,
        clip_unit=clip_unit,
        privacy_unit="person",
        people=jde.PersonBounds(**bounds),
        neighboring_relation=relation,
    )


EXAMPLE = poisson_level("example", 0.1)
USERS = jde.GaussianStep(
    jde.MultistageSampling(
        poisson_level("user", 0.25), poisson_level("example", 0.2, population=8)
    ),
    noise_multiplier=4.0,
    clip_unit="example",
    privacy_unit="user",
)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("step", "law"),
    [
        (person(EXAMPLE, examples=12, relation="zero_out"), BINOMIAL),
        # Every drawn class contains the person.
        (
            person(
                poisson_level("class", 0.1),
                poisson_level("example", 1.0),
                clip_unit="class",
                relation="zero_out",
                classes=12,
                examples=2,
            ),
            BINOMIAL,
        ),
        (USERS, OF_USERS),
    ],
)
def test_people_without_reactions_are_a_mixture_of_gaussians(step, law):
    event = to_dp_event(step)
    assert event.standard_deviation == 4.0
    np.testing.assert_array_equal(event.sensitivities, np.arange(len(law)))
    np.testing.assert_allclose(event.sampling_probs, law, rtol=1e-11)
    theirs = PLDAccountant(
        THEIRS[step.neighboring_relation], value_discretization_interval=1e-2
    )
    bound = theirs.compose(to_dp_event(jde.compose((step, 50)))).get_epsilon(1e-6)
    value = jde.epsilon(step, num_steps=50, delta=1e-6)
    assert value <= bound <= value * (1 + 2e-3)
    back = from_dp_event(event, neighboring_relation=step.neighboring_relation)
    again = jde.epsilon(jde.compose((back, 50)), delta=1e-6)
    assert again == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    "step",
    [
        person(EXAMPLE, examples=12, relation="replace_one"),
        # The example drawn in the place of the person's reveals the draw.
        person(
            poisson_level("class", 0.1),
            jde.WithoutReplacement("example", size=2, population=20),
            clip_unit="class",
            classes=12,
            examples=1,
        ),
        # Which classes are drawn is visible.
        person(
            poisson_level("class", 0.1),
            EXAMPLE,
            clip_unit="example",
            classes=3,
            examples=2,
        ),
    ],
)
def test_other_people_have_no_event(step):
    with pytest.raises(NotImplementedError, match="has no event in dp_accounting"):
        to_dp_event(step)
