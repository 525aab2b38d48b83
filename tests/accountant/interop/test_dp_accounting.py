"""dp_accounting: its events in both directions, and an accountant of its kind."""

import collections
import dataclasses
import functools
import types
from typing import Any, cast

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, UnsupportedEventError, dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import stats

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.interop.dp_accounting import (
    RELATIONS,
    EpisodicAccountant,
    to_dp_event,
)
from jaxdp_episodic.accountant.interop.dp_event import (
    EVENTS,
    EventNotCovered,
    from_dp_event,
)
from jaxdp_episodic.accountant.questions.tuning import (
    DEFAULT_ORDERS,
    PoissonTrials,
    curve_to_epsilon,
    tuned_rdp,
)

# These tests are about the Rényi bounds.
rdp_epsilon = functools.partial(jde.epsilon, method="rdp")

ADD, REPLACE, SPECIAL = NeighboringRelation
DELTA = 1e-6
COMPOSED = dp_event.ComposedDpEvent
LAPLACE = dp_event.LaplaceDpEvent(1.0)
UNSUPPORTED = dp_event.UnsupportedDpEvent()


def gaussian(noise: Any = 1.0):
    return dp_event.GaussianDpEvent(noise)


def poisson(probability=0.1, event=None):
    return dp_event.PoissonSampledDpEvent(probability, event or gaussian())


GAUSSIAN = gaussian(2.0)
TWICE = dp_event.MixtureOfGaussiansDpEvent(1.5, [0.0, 1.0, 2.0], [0.81, 0.18, 0.01])
ONCE = dp_event.MixtureOfGaussiansDpEvent(1.0, [0.5, 1.5], [0.75, 0.25])


def sampled(rate, *events):
    return dp_event.PoissonSampledDpEvent(rate, COMPOSED(list(events)))


def often(count, event):
    return dp_event.SelfComposedDpEvent(event, count)


def epsilon(event, **options):
    return rdp_epsilon(from_dp_event(event, **options), delta=DELTA)


# --- Events to runs ---


def test_equal_events_become_one_step():
    events = [poisson(0.01), gaussian(9.0), poisson(0.01), poisson(0.02)]
    event = COMPOSED([*events, often(7, events[0])])
    run = from_dp_event(event)
    assert run.counts == (9, 1, 1)
    assert [step.noise_multiplier for step in run.steps] == [1.0, 9.0, 1.0]
    schemes = [
        jde.MultistageSampling(jde.Poisson("example", sampling_probability=p))
        for p in (0.01, 1.0, 0.02)
    ]
    assert [step.sampling for step in run.steps] == schemes
    assert {step.privacy_unit for step in run.steps} == {"example"}
    assert {step.clip_unit for step in run.steps} == {"example"}
    assert from_dp_event(event.to_named_tuple()) == run


@pytest.mark.parametrize("steps", [0, 0.5])
def test_a_steps_attribute_counts_for_epochs_only(steps):
    # Regression: such an attribute removed the charge of another event.
    event = type("GaussianDpEvent", (), {"noise_multiplier": 1.0, "num_steps": steps})
    assert epsilon(event()) == epsilon(gaussian())


def test_no_release_costs_nothing_and_no_noise_everything():
    for event in (COMPOSED([]), often(0, poisson()), poisson(0.5, COMPOSED([]))):
        assert epsilon(event, neighboring_relation="replace_one") == 0
    assert epsilon(dp_event.NonPrivateDpEvent()) == epsilon(gaussian(0.0)) == np.inf
    rare = from_dp_event(poisson(1e-200, poisson(1e-200, gaussian(1e-3))))
    assert jde.rdp(rare, 64.0) > 31e6  # the product of the rates is not 0
    both = COMPOSED([gaussian(0.0), gaussian(1.0)])
    assert epsilon(poisson(0.1, both)) == np.inf
    bare = dp_event.MixtureOfGaussiansDpEvent(0.0, [0.0, 1.0], [0.9, 0.1])
    run = from_dp_event(sampled(0.5, bare, TWICE))
    assert jde.epsilon(run, delta=DELTA) == np.inf
    never = often(0, dp_event.NonPrivateDpEvent())
    assert epsilon(COMPOSED([never, poisson()])) == pytest.approx(
        epsilon(poisson()), rel=1e-12
    )


@pytest.mark.parametrize("relation", RELATIONS.values())
def test_draws_of_fixed_size(relation):
    """With replacement, each of them is an episode of one."""
    one = jde.WithoutReplacement("example", size=1, population=100)
    for event, design in (
        (
            dp_event.SampledWithoutReplacementDpEvent(100, 20, GAUSSIAN),
            dataclasses.replace(one, size=20),
        ),
        (
            dp_event.SampledWithReplacementDpEvent(100, 5, GAUSSIAN),
            jde.IndependentEpisodes(one, num_episodes=5),
        ),
    ):
        step = jde.GaussianStep(
            design, noise_multiplier=2.0, neighboring_relation=relation
        )
        run = from_dp_event(often(50, event), neighboring_relation=relation)
        assert run == jde.compose((step, 50))
    none = dp_event.SampledWithReplacementDpEvent(100, 0, GAUSSIAN)
    assert from_dp_event(none).counts == (0,)


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
    twice = jde.RandomAllocation("example", steps_per_epoch=11, times=2)
    expected = jde.compose((jde.GaussianStep(twice, noise_multiplier=2.0), 33))
    assert from_dp_event(often(3, allocation(GAUSSIAN, 2, 11))) == expected
    # Of 414: "exact_epsilon = 2.4265" for 10 of 100, on a grid.
    run = from_dp_event(allocation(GAUSSIAN, 10, 100))
    assert 2.4265 < rdp_epsilon(run, delta=1e-6) < 2.4265 * 1.1
    nobody = from_dp_event(allocation(GAUSSIAN, 0, 11))
    assert jde.epsilon(nobody, delta=1e-6) == 0
    with pytest.raises(ValueError, match="num_selected must be at most num_steps"):
        from_dp_event(allocation(gaussian(), 12, 11))
    with pytest.raises(NotImplementedError, match="of it of a LaplaceDpEvent"):
        from_dp_event(allocation(LAPLACE, 1, 11))
    once = jde.GaussianStep(
        jde.RandomAllocation("example", steps_per_epoch=11), noise_multiplier=2.0
    )
    with pytest.raises(NotImplementedError, match="no event"):
        to_dp_event(jde.compose((once, 22)))
    monkeypatch.setattr(dp_event, "RandomAllocationDpEvent", allocation, raising=False)
    expected = often(2, allocation(GAUSSIAN, 1, 11))
    assert to_dp_event(jde.compose((once, 22))) == expected
    for other in (once, jde.compose((once, 12))):
        with pytest.raises(NotImplementedError, match="an epoch of 11 steps"):
            to_dp_event(other)


def test_joint_noise_of_several_releases_is_a_lower_bound():
    for noises in ([1e-170, 1e-170], [1e180, 1e180, 1e180], [0.3, 7.0]):
        event = poisson(0.1, COMPOSED([gaussian(s) for s in noises]))
        joint = from_dp_event(event).steps[0].noise_multiplier
        least = min(noises)
        exact = least / np.sqrt(sum((least / s) ** 2 for s in noises))
        assert exact * (1 - 1e-12) < joint < exact
    huge = from_dp_event(poisson(0.1, often(10**15, gaussian())))
    assert huge.steps[0].noise_multiplier == pytest.approx(10**-7.5, rel=1e-12)


@pytest.mark.slow
def test_nested_sampling_and_several_laplace_releases():
    twice = from_dp_event(poisson(0.5, poisson(0.2))).steps[0]
    assert twice == from_dp_event(poisson(0.1)).steps[0]
    several = COMPOSED([dp_event.LaplaceDpEvent(2.0), dp_event.LaplaceDpEvent(6.0)])
    step: Any = from_dp_event(poisson(0.3, several)).steps[0]
    assert step.noise_multiplier == pytest.approx(1.5, rel=1e-12)
    assert step.noise_multiplier < 1.5
    # At rate 1 it is at least the composition of the two.
    joint = from_dp_event(poisson(1.0, several))
    apart = jde.epsilon(from_dp_event(several), delta=1e-3)
    assert apart <= jde.epsilon(joint, delta=1e-3)


class EpsilonDeltaDpEvent(dp_event.DpEvent):
    epsilon, delta = 0.5, 1e-7


def test_only_epsilon_and_delta_of_other_mechanisms_are_used(monkeypatch):
    of_pure = "PermuteAndFlipDpEvent", "ExponentialMechanismDpEvent"  # after 0.6
    pure = [dataclasses.make_dataclass(name, ["epsilon"]) for name in of_pure]
    for event, delta in ((EpsilonDeltaDpEvent(), 1e-7), *((p(0.5), 0) for p in pure)):
        for relation in ("add_remove", "replace_one"):
            run = from_dp_event(event, neighboring_relation=relation)
            assert run == jde.compose((jde.ApproximateDP(0.5, delta), 1))
            (step,) = from_dp_event(
                poisson(0.1, event), neighboring_relation=relation
            ).steps
            # Balle, Barthe, Gaboardi (2018), Theorem 8.
            amplified = np.log1p(0.1 * np.expm1(0.5))
            expected = amplified if relation == "add_remove" else 0.5
            assert isinstance(step, jde.ApproximateDP)
            assert step.epsilon == pytest.approx(expected, rel=1e-12)
            assert step.delta == pytest.approx(0.1 * delta, rel=1e-12)
    with pytest.raises(ValueError, match="epsilon"):
        from_dp_event(pure[0](-0.5))
    # Written as such an event, a claim would lose its delta.
    monkeypatch.setattr(dp_event, of_pure[1], pure[1], raising=False)
    with pytest.raises(NotImplementedError, match="no event in the installed"):
        to_dp_event(jde.ApproximateDP(0.5, 1e-7))


def test_a_sampled_composition_is_charged_without_its_empty_parts():
    pure = dataclasses.make_dataclass("ExponentialMechanismDpEvent", ["epsilon"])
    laplace = dp_event.DiscreteLaplaceDpEvent
    for quiet, loud in ((pure(0.1), pure(5.0)), (laplace(0.1, 1), laplace(3.0, 1))):
        never = often(0, quiet)
        for parts in ([never, loud], [loud, never]):
            event = poisson(0.5, COMPOSED(parts))
            assert from_dp_event(event) == from_dp_event(poisson(0.5, loud))


def test_tree_aggregation_has_the_height_of_its_binary_length():
    tree = dp_event.SingleEpochTreeAggregationDpEvent
    for steps, height in ((1, 1), (3, 2), (4, 3), ([10, 1600, 3], 11)):
        event = tree(5.0, steps)
        ours = EpisodicAccountant(SPECIAL, "rdp", orders=[3.0]).compose(event)
        theirs = RdpAccountant([3.0], SPECIAL).compose(event)
        assert ours.rdp[0] == pytest.approx(1.5 * height / 25, rel=1e-11)
        assert ours.rdp[0] == pytest.approx(theirs.rdp[0], rel=1e-11)
    empty = EpisodicAccountant(SPECIAL).compose(tree(5.0, [0]))
    assert empty.get_epsilon(DELTA) == 0
    with pytest.raises(ValueError, match="step_counts"):
        from_dp_event(tree(5.0, [-3]), neighboring_relation="zero_out")


def test_discrete_gaussian_against_its_divergences():
    class DiscreteGaussianDpEvent(dp_event.DpEvent):
        sigma, sensitivity, dimension = 4.0, 2.0, None

    event = DiscreteGaussianDpEvent()
    known = jde.rdp(from_dp_event(event), 3.0)
    assert known == pytest.approx(3.0 * 4 / 32, rel=1e-12)
    replaced = from_dp_event(event, neighboring_relation="replace_one")
    assert jde.rdp(replaced, 3.0) == pytest.approx(4 * known, rel=1e-12)
    assert not EpisodicAccountant().supports(event)


def test_the_best_of_several_runs():
    event = dp_event.RepeatAndSelectDpEvent(LAPLACE, 1000, 1)
    orders = [2.0, 64.0, 1e10]
    ours = EpisodicAccountant(method="rdp", orders=orders).compose(event)
    theirs = RdpAccountant(orders).compose(event)
    # Papernot and Steinke (2022), Corollary 3: three epsilons.
    assert ours.rdp[-1] == pytest.approx(3.0, rel=1e-8)
    assert np.all(ours.rdp <= theirs.rdp * (1 + 1e-9))
    poissonian = dp_event.RepeatAndSelectDpEvent(gaussian(5.0), 10, np.inf)
    trials = PoissonTrials(expected_runs=10.0)
    run = from_dp_event(gaussian(5.0))
    tuned = tuned_rdp(trials, DEFAULT_ORDERS, jde.rdp(run, DEFAULT_ORDERS))
    cost = curve_to_epsilon(DEFAULT_ORDERS, tuned, delta=DELTA)
    found = EpisodicAccountant(method="rdp").compose(poissonian).get_epsilon(DELTA)
    assert found == pytest.approx(cost, rel=2e-3)


# --- Mixtures of Gaussians ---


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


OF_TWICE = np.array([0.0, 1.0, 2.0]) / 1.5, [0.81, 0.18, 0.01]
OF_ONCE = [0.5, 1.5], [0.75, 0.25]


@pytest.mark.parametrize(
    ("event", "law"), [(GAUSSIAN, ([0.5], [1.0])), (ONCE, OF_ONCE)]
)
def test_joint_releases_of_a_sample_cost_at_least_the_truth(event, law):
    run = from_dp_event(sampled(0.3, event, TWICE))
    for at in (0.05, 0.4):
        true = max(divergences(0.3, np.exp(at), law, OF_TWICE))
        assert true * (1 - 1e-6) <= jde.delta(run, epsilon=at) <= 1.8 * true


def test_one_size_is_exact_and_equal_norms_are_joined():
    one = dp_event.MixtureOfGaussiansDpEvent(3.0, [1.5], [1.0])
    both = sampled(0.2, often(3, one), often(2, gaussian(4.0)))
    value = jde.epsilon(from_dp_event(often(40, both)), delta=1e-6)
    joint = sampled(0.2, gaussian((3 / 4 + 2 / 16) ** -0.5))
    assert value == pytest.approx(
        jde.epsilon(from_dp_event(often(40, joint)), delta=1e-6), rel=1e-9
    )
    (step,) = from_dp_event(sampled(0.2, often(9, TWICE))).steps
    sums = {a + 4 * b for a in range(10) for b in range(10 - a)}
    assert len(step.sensitivities) == len(sums)
    assert step.probabilities.sum() == pytest.approx(1, abs=1e-12)
    # With rate 1 releases are composed, not joined.
    apart = COMPOSED([often(60, TWICE), sampled(1.0, ONCE, TWICE)])
    assert from_dp_event(apart) == from_dp_event(COMPOSED([often(61, TWICE), ONCE]))


# --- Refusals ---


EVERY = tuple(RELATIONS.values())
ONLY_REPLACED = ("replace_one",)
SELECTED = dp_event.RepeatAndSelectDpEvent(gaussian(), 3.0, 1.0)
DRAWN = dp_event.SampledWithReplacementDpEvent(9, 3, LAPLACE)
TREE = dp_event.SingleEpochTreeAggregationDpEvent(1.0, 5)
ANSWER = dp_event.RandomizedResponseDpEvent(0.1, 3)
WHOLE = dp_event.DiscreteLaplaceDpEvent(1.0, 1)


@pytest.mark.parametrize(
    ("event", "relations", "words"),
    [
        (UNSUPPORTED, EVERY, "UnsupportedDpEvent"),
        (COMPOSED([poisson(), UNSUPPORTED]), EVERY, "UnsupportedDpEvent"),
        (poisson(0.1, SELECTED), EVERY, "of it of a RepeatAndSelectDpEvent"),
        (DRAWN, EVERY, "of it of a LaplaceDpEvent"),
        (sampled(0.5, often(300, TWICE)), EVERY, "256 different joint norms"),
        (sampled(0.5, LAPLACE, TWICE), EVERY, "no theorem"),
        (TREE, ("add_remove", "replace_one"), "Tree.*must be 'zero_out'"),
        (ANSWER, ("add_remove",), "must be 'replace_one' or 'zero_out'"),
        (ONCE, ONLY_REPLACED, "must be 'add_remove' or 'zero_out'"),
        (poisson(0.1, LAPLACE), ONLY_REPLACED, "PoissonSampledDpEvent.*must be 'add_"),
        (poisson(0.1, WHOLE), ONLY_REPLACED, "DiscreteLaplace.* has no theorem here"),
        (sampled(0.5, GAUSSIAN, TWICE), ONLY_REPLACED, "must be 'add_remove'"),
    ],
)
def test_events_without_a_theorem_are_refused_by_name(event, relations, words):
    found = [r for r in EVERY if not EpisodicAccountant(r).supports(event)]
    assert found == list(relations)
    with pytest.raises(EventNotCovered, match=f"{words}.*covered: "):
        from_dp_event(event, neighboring_relation=found[0])


def test_refusals_hold_the_refused_event():
    bad = UNSUPPORTED
    for accountant in accountants():
        for event in (bad, COMPOSED([gaussian(), bad]), sampled(0.1, bad)):
            found = accountant._maybe_compose(event, 1, False)
            assert found is not None and found.invalid_event == bad
            with pytest.raises(UnsupportedEventError, match="by subevent Unsupp"):
                accountant.compose(event)
        assert accountant.get_epsilon(DELTA) == 0
    # An event is unsupported if the method cannot answer it.
    zcdp = COMPOSED([gaussian(), dp_event.ZCDpEvent(0.1)])
    assert EpisodicAccountant(method="rdp").supports(zcdp)
    found = EpisodicAccountant()._maybe_compose(zcdp, 1, False)
    assert found is not None and found.invalid_event == zcdp.events[1]


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
    without = dp_event.SampledWithoutReplacementDpEvent(9, 3, later)
    yield later
    yield _with_field(dp_event.NoOpDpEvent(), "scale_of_later")
    yield _with_field(dp_event.NonPrivateDpEvent(), "scale_of_later")
    yield _with_field(COMPOSED([gaussian()]), "scale_of_later", 3)
    yield _with_field(often(2, gaussian()), "scale_of_later")
    yield poisson(0.5, later)
    yield poisson(0.5, _with_field(poisson(), "scale_of_later"))
    yield COMPOSED([gaussian(), without])
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
    for name, row in EVENTS.items():
        theirs = getattr(dp_event, f"{name}DpEvent", None)  # some are of later versions
        if theirs is not None:
            declared = [one.name for one in theirs.__attrs_attrs__]
            assert sorted(declared) == sorted(row.fields.split()), name


def nested(depth: int) -> list[Any]:
    """Deeper than Python's stack."""
    return functools.reduce(lambda inner, _: [inner], range(depth), [])


@pytest.mark.parametrize(
    "event, error, words",
    [
        (gaussian(np.array([1.0, 2.0])), ValueError, "one number"),
        (gaussian("1"), TypeError, "noise_multiplier"),
        (poisson(1.3), ValueError, "sampling_probability"),
        (types.SimpleNamespace(class_name=nested(5000)), TypeError, "a DpEvent"),
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


# --- The accountant ---


def accountants():
    methods: list[tuple[str, Any]] = [("exact", None), ("pld", None), ("rdp", None)]
    methods.append(("rdp", [2.0]))
    return [EpisodicAccountant(r, m, orders=o) for r in RELATIONS for m, o in methods]


def test_no_loss_and_infinite_loss():
    for accountant in accountants():
        accountant.compose(dp_event.NoOpDpEvent())
        for delta in (0, 1e-12, 1):
            assert accountant.get_epsilon(delta) == 0
        for epsilon in (0, 1e-12, np.inf):
            assert accountant.get_delta(epsilon) == 0
        accountant.compose(COMPOSED([dp_event.NonPrivateDpEvent(), gaussian()]))
        for delta in (0, 0.99, 1):
            assert accountant.get_epsilon(delta) == np.inf
        assert all(accountant.get_delta(e) == 1 for e in (0, 100, np.inf))
        assert accountant._orders is None or np.all(accountant.rdp == np.inf)


@pytest.mark.few(1)
@pytest.mark.parametrize("relation", list(NeighboringRelation))
def test_agrees_with_dp_accountings_accountants(relation):
    event = COMPOSED([often(10, poisson()), gaussian(4.0)])
    theirs = PLDAccountant(relation, 1e-3).compose(event)  # faster, 1e-6 off
    value = {}
    for method in ("exact", "pld", "rdp"):
        ours = EpisodicAccountant(relation, method).compose(event)
        value[method] = ours.get_epsilon(DELTA)
        run = from_dp_event(event, neighboring_relation=RELATIONS[relation])
        assert value[method] == jde.epsilon(run, delta=DELTA, method=method)
        assert ours.get_delta(1.0) == jde.delta(run, epsilon=1.0, method=method)
        assert ours.run == run
    assert value["exact"] <= theirs.get_epsilon(DELTA) <= value["exact"] * (1 + 1e-4)
    assert value["exact"] <= value["pld"] <= value["rdp"]


def test_agrees_at_dp_accountings_orders():
    relation = SPECIAL
    orders = [2.0, 3.0, 5.0, 8.0, 21.0, np.inf]
    nested = poisson(0.05, COMPOSED([gaussian(4.0), gaussian(5.0)]))
    inner = [dp_event.NoOpDpEvent(), COMPOSED([gaussian(9.0), nested])]
    event = COMPOSED([often(50, poisson(0.02)), *inner])
    ours = EpisodicAccountant(relation, "rdp", orders=orders).compose(event)
    theirs = RdpAccountant(orders[:-1], relation).compose(event)
    np.testing.assert_allclose(ours.rdp[:-1], theirs.rdp, rtol=1e-9)
    assert np.isinf(ours.rdp[-1])
    for ask, target in (
        ("get_epsilon_and_optimal_order", DELTA),
        ("get_delta_and_optimal_order", 1.5),
    ):
        value, order = getattr(ours, ask)(target)
        expected, best = getattr(theirs, ask)(target)
        assert value == pytest.approx(expected, rel=1e-9)
        assert order == best
    free = EpisodicAccountant(relation, "rdp").compose(event)
    value, order = free.get_epsilon_and_optimal_order(DELTA)
    assert value <= ours.get_epsilon(DELTA)
    at_best = EpisodicAccountant(relation, "rdp", orders=[order]).compose(event)
    assert at_best.get_epsilon(DELTA) == pytest.approx(value, rel=1e-9)
    with pytest.raises(NotImplementedError, match="has a Rényi order, got method="):
        EpisodicAccountant().get_epsilon_and_optimal_order(DELTA)
    low = EpisodicAccountant(method="rdp", orders=[1.0]).compose(gaussian(2.0))
    assert low.rdp[0] == pytest.approx(0.125, rel=1e-6)


def test_failure_probabilities_count_at_orders_too():
    event = COMPOSED([EpsilonDeltaDpEvent(), gaussian(5.0)])
    orders = [2.0, 8.0, 24.0, 30.0]
    at_orders = EpisodicAccountant(method="rdp", orders=orders).compose(event)
    run = from_dp_event(event)
    expected = jde.epsilon(run, delta=DELTA, method="rdp", orders=orders)
    assert at_orders.get_epsilon(DELTA) == pytest.approx(expected, rel=1e-12)
    assert at_orders.get_epsilon(1e-8) == np.inf
    delta = at_orders.get_delta(at_orders.get_epsilon(DELTA))
    assert delta == pytest.approx(DELTA, rel=1e-9)


def test_equal_events_are_counted_and_mutated_ones_read_again():
    accountant = EpisodicAccountant(method="rdp")
    for i in range(1000):
        accountant.compose(poisson(0.01, gaussian(1.0 + i % 2)))
    assert accountant.run.counts == (500, 500)
    first = accountant.get_epsilon(DELTA)
    assert accountant.get_epsilon(DELTA) == first
    event = COMPOSED([gaussian(9.0)])
    assert accountant.supports(event)
    event.events.append(gaussian(1.0))
    accountant.compose(event)
    assert accountant.get_epsilon(DELTA) > first
    event.events.append(gaussian(0.5))
    accountant.compose(event)
    noises = [step.noise_multiplier for step in accountant.run.steps]
    assert noises == [1.0, 2.0, 9.0, 1.0, 0.5]
    assert accountant.run.counts == (500, 500, 2, 2, 1)


def test_wrong_arguments():
    for make in (
        lambda: EpisodicAccountant("remove"),
        lambda: EpisodicAccountant(method="prv"),
        lambda: EpisodicAccountant(orders=[2.0]),
        lambda: EpisodicAccountant(method="rdp", orders=[0.5]),
        lambda: EpisodicAccountant().get_epsilon(1.5),
        lambda: EpisodicAccountant().get_delta(-1.0),
        lambda: EpisodicAccountant().compose(gaussian(), 0),
        lambda: EpisodicAccountant().rdp,
    ):
        with pytest.raises(ValueError):
            make()


# --- Steps to events ---

EXAMPLE = jde.Poisson("example", sampling_probability=0.1)
EVERYBODY = jde.Poisson("example", sampling_probability=1.0)
FEW = jde.WithoutReplacement("example", size=5, population=100)
ONE = jde.WithoutReplacement("example", size=1, population=50)
ROUND_TRIPS = [
    jde.GaussianStep(EXAMPLE, noise_multiplier=1.5),
    jde.GaussianStep(EVERYBODY, noise_multiplier=2.0),
    jde.GaussianStep(FEW, noise_multiplier=1.5),
    jde.GaussianStep(
        jde.IndependentEpisodes(ONE, num_episodes=4), noise_multiplier=3.0
    ),
    jde.LaplaceRelease(2.0),
    jde.LaplaceRelease(2.0, sampling_probability=0.3),
    jde.DiscreteLaplaceRelease(0.5, sensitivity=3, sampling_probability=0.2),
    jde.GaussianMixtureRelease([0.0, 2.0], [0.3, 0.7], standard_deviation=1.5),
    jde.TruncatedPoissonRelease(
        1.0, sampling_probability=0.1, batch_size=8, population=60
    ),
    jde.ZeroConcentratedDP(0.1, xi=0.2),
    jde.RandomizedResponse(0.2, 4),
]


@pytest.mark.parametrize("step", ROUND_TRIPS, ids=range(len(ROUND_TRIPS)))
def test_round_trips(step):
    relation = step.neighboring_relation or "add_remove"
    for run in (step, jde.compose((step, 7))):
        back = from_dp_event(to_dp_event(run), neighboring_relation=relation)
        assert back.steps == (step,)
        assert back.counts == ((1,) if run is step else (7,))


TASKS = jde.MultistageSampling(jde.Poisson("task", sampling_probability=0.1), FEW)


def test_round_trips_of_runs():
    run = jde.compose((ROUND_TRIPS[0], 300), (ROUND_TRIPS[4], 1), (ROUND_TRIPS[2], 40))
    assert from_dp_event(to_dp_event(run)) == run
    nested = jde.compose((run, 3), (from_dp_event(poisson()), 2))
    assert from_dp_event(to_dp_event(nested)) == nested
    assert to_dp_event(jde.compose((ROUND_TRIPS[0], 0))) == dp_event.NoOpDpEvent()
    whole = jde.GaussianStep(
        TASKS, noise_multiplier=1.5, clip_unit="task", privacy_unit="task"
    )
    assert to_dp_event(whole) == poisson(0.1, gaussian(1.5))


def person(*levels, clip_unit=None, relation="add_remove", **bounds):
    return jde.GaussianStep(
        jde.MultistageSampling(*levels),
        noise_multiplier=4.0,
        clip_unit=clip_unit,
        privacy_unit="person",
        people=jde.PersonBounds(**bounds),
        neighboring_relation=relation,
    )


CLASS = jde.Poisson("class", sampling_probability=0.1)
USERS = jde.GaussianStep(
    jde.MultistageSampling(
        jde.Poisson("user", sampling_probability=0.25),
        jde.Poisson("example", sampling_probability=0.2, population=8),
    ),
    noise_multiplier=4.0,
    clip_unit="example",
    privacy_unit="user",
)


def test_people_without_reactions_are_a_mixture_of_gaussians():
    binomial = stats.binom.pmf(np.arange(13), 12, 0.1)
    of_users = 0.25 * stats.binom.pmf(np.arange(9), 8, 0.2) + 0.75 * np.eye(9)[0]
    # Each drawn class contains the person.
    classes = {"clip_unit": "class", "classes": 12, "examples": 2}
    alone = person(EXAMPLE, examples=12, relation="zero_out")
    for step, expected in (
        (alone, binomial),
        (person(CLASS, EVERYBODY, relation="zero_out", **classes), binomial),
        (USERS, of_users),
    ):
        event = to_dp_event(step)
        assert event.standard_deviation == 4.0
        np.testing.assert_array_equal(event.sensitivities, np.arange(len(expected)))
        np.testing.assert_allclose(event.sampling_probs, expected, rtol=1e-11)
    theirs = PLDAccountant(SPECIAL, value_discretization_interval=1e-2)
    bound = theirs.compose(to_dp_event(jde.compose((alone, 50)))).get_epsilon(1e-6)
    value = jde.epsilon(alone, num_steps=50, delta=1e-6)
    assert value <= bound <= value * (1 + 2e-3)
    back = from_dp_event(to_dp_event(alone), neighboring_relation="zero_out")
    again = jde.epsilon(jde.compose((back, 50)), delta=1e-6)
    assert again == pytest.approx(value, rel=1e-9)


NO_EVENT = "has no event in dp_accounting"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (person(EXAMPLE, examples=12, relation="replace_one"), NO_EVENT),
        # The example drawn in the place of the person's reveals the draw.
        (person(CLASS, FEW, clip_unit="class", classes=12, examples=1), NO_EVENT),
        # Which classes are drawn is visible.
        (person(CLASS, EXAMPLE, clip_unit="example", classes=3, examples=2), NO_EVENT),
        (
            jde.GaussianStep(TASKS, noise_multiplier=1.0, clip_unit="task"),
            "clip_unit='task'",
        ),
        (
            jde.GaussianStep(
                jde.IndependentEpisodes(FEW, num_episodes=3), noise_multiplier=1.0
            ),
            "IndependentEpisodes",
        ),
        (jde.RenyiDP([2.0], [0.1]), "RenyiDP has no event"),
        (jde.ApproximateDP(1.0, 1e-5), "ApproximateDP has no event"),  # in 0.6
    ],
)
def test_steps_without_an_event_are_refused_by_name(step, words):
    with pytest.raises(NotImplementedError, match=words):
        to_dp_event(step)


def test_other_arguments_have_no_event():
    with pytest.raises(ValueError, match="one setting"):
        to_dp_event(jde.LaplaceRelease(np.array([1.0, 2.0])))
    with pytest.raises(TypeError, match="step must be"):
        to_dp_event(poisson())
