"""`EpisodicAccountant` as a dp_accounting accountant, and events in both directions."""

from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation, UnsupportedEventError, dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.interop.dp_accounting import (
    RELATIONS,
    EpisodicAccountant,
    from_dp_event,
    to_dp_event,
)
from jaxdp_episodic.accountant.questions.tuning import (
    DEFAULT_ORDERS,
    PoissonTrials,
    curve_to_epsilon,
    tuned_rdp,
)

ADD, REPLACE, SPECIAL = NeighboringRelation
DELTA = 1e-6
COMPOSED = dp_event.ComposedDpEvent


def gaussian(noise=1.0):
    return dp_event.GaussianDpEvent(noise)


def poisson(rate=0.1, event=None):
    return dp_event.PoissonSampledDpEvent(rate, event or gaussian())


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
        for epsilon in (0, 100, np.inf):
            assert accountant.get_delta(epsilon) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("relation", list(NeighboringRelation))
def test_agrees_with_dp_accountings_accountants(relation):
    event = COMPOSED([dp_event.SelfComposedDpEvent(poisson(), 10), gaussian(4.0)])
    theirs = PLDAccountant(relation, 1e-3).compose(event)  # faster, 1e-6 off
    value = {}
    for method in ("exact", "pld", "rdp"):
        ours = EpisodicAccountant(relation, method).compose(event)
        value[method] = ours.get_epsilon(DELTA)
        run = from_dp_event(event, neighboring_relation=RELATIONS[relation])
        assert value[method] == jde.epsilon(run, delta=DELTA, method=method)
        assert ours.get_delta(1.0) == jde.delta(run, epsilon=1.0, method=method)
        assert jde.epsilon(ours.run, delta=DELTA, method=method) == value[method]
    assert value["exact"] <= theirs.get_epsilon(DELTA) <= value["exact"] * (1 + 1e-4)
    assert value["exact"] <= value["pld"] <= value["rdp"]


def test_agrees_at_dp_accountings_orders():
    relation = SPECIAL
    orders = [2.0, 3.0, 5.0, 8.0, 21.0, np.inf]
    nested = poisson(0.05, COMPOSED([gaussian(4.0), gaussian(5.0)]))
    inner = [dp_event.NoOpDpEvent(), COMPOSED([gaussian(9.0), nested])]
    event = COMPOSED([dp_event.SelfComposedDpEvent(poisson(0.02), 50), *inner])
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
    class EpsilonDeltaDpEvent(dp_event.DpEvent):
        epsilon, delta = 0.5, 1e-7

    event, orders = (
        COMPOSED([EpsilonDeltaDpEvent(), gaussian(5.0)]),
        [2.0, 8.0, 24.0, 30.0],
    )
    at_orders = EpisodicAccountant(method="rdp", orders=orders).compose(event)
    run = from_dp_event(event)
    expected = jde.epsilon(run, delta=DELTA, method="rdp", orders=orders)
    assert at_orders.get_epsilon(DELTA) == pytest.approx(expected, rel=1e-12)
    assert at_orders.get_epsilon(1e-8) == np.inf
    delta = at_orders.get_delta(at_orders.get_epsilon(DELTA))
    assert delta == pytest.approx(DELTA, rel=1e-9)
    # Pure DP, sampled: Balle, Barthe, Gaboardi (2018), Theorem 8.
    sampled: Any = from_dp_event(poisson(0.1, EpsilonDeltaDpEvent())).steps[0]
    assert sampled.epsilon == pytest.approx(np.log1p(0.1 * np.expm1(0.5)), rel=1e-12)
    assert sampled.delta == pytest.approx(1e-8, rel=1e-12)
    replaced: Any = from_dp_event(
        poisson(0.1, EpsilonDeltaDpEvent()), neighboring_relation="replace_one"
    ).steps[0]
    assert replaced.epsilon == 0.5


def test_refusals_hold_the_refused_event():
    bad = dp_event.UnsupportedDpEvent()
    for accountant in accountants():
        for event in (bad, COMPOSED([gaussian(), bad]), poisson(0.1, COMPOSED([bad]))):
            found = accountant._maybe_compose(event, 1, False)
            assert found is not None and found.invalid_event == bad
            assert not accountant.supports(event)
            with pytest.raises(
                UnsupportedEventError, match="caused by subevent Unsupp"
            ):
                accountant.compose(event)
        assert accountant.get_epsilon(DELTA) == 0
    # An event is unsupported if the method cannot answer it.
    zcdp = COMPOSED([gaussian(), dp_event.ZCDpEvent(0.1)])
    assert EpisodicAccountant(method="rdp").supports(zcdp)
    found = EpisodicAccountant()._maybe_compose(zcdp, 1, False)
    assert found is not None and found.invalid_event == zcdp.events[1]
    for event, covered in (
        (dp_event.RandomizedResponseDpEvent(0.1, 3), {REPLACE, SPECIAL}),
        (dp_event.SingleEpochTreeAggregationDpEvent(1.0, 5), {SPECIAL}),
        (dp_event.MixtureOfGaussiansDpEvent(1.0, [1.0], [1.0]), {ADD, SPECIAL}),
        (poisson(0.1, dp_event.LaplaceDpEvent(1.0)), {ADD, SPECIAL}),
        (poisson(0.1, dp_event.DiscreteLaplaceDpEvent(1.0, 1)), {ADD, SPECIAL}),
    ):
        assert {
            r for r in RELATIONS if EpisodicAccountant(r).supports(event)
        } == covered


def test_it_works_in_dp_accountings_calibration():
    noise = dp_accounting.calibrate_dp_mechanism(
        lambda: EpisodicAccountant(method="rdp"),
        lambda s: dp_event.SelfComposedDpEvent(poisson(0.01, gaussian(s)), 100),
        1.0,
        1e-6,
        tol=1e-4,
    )
    step = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=0.01), noise_multiplier=noise
    )
    epsilon = jde.epsilon(step, num_steps=100, delta=1e-6, method="rdp")
    assert epsilon == pytest.approx(1.0, rel=1e-3)


def test_equal_events_are_counted_and_answers_cached():
    accountant = EpisodicAccountant(method="rdp")
    for i in range(1000):
        accountant.compose(poisson(0.01, gaussian(1.0 + i % 2)))
    assert accountant.run.counts == (500, 500)
    assert accountant.ledger is not None
    first = accountant.get_epsilon(DELTA)
    assert accountant._known
    assert accountant.get_epsilon(DELTA) == first
    accountant.compose(gaussian(3.0))
    assert accountant.get_epsilon(DELTA) > first


def test_wrong_arguments():
    for make, error in (
        (lambda: EpisodicAccountant("remove"), ValueError),
        (lambda: EpisodicAccountant(method="prv"), ValueError),
        (lambda: EpisodicAccountant(orders=[2.0]), ValueError),
        (lambda: EpisodicAccountant(method="rdp", orders=[0.5]), ValueError),
        (lambda: EpisodicAccountant().get_epsilon(1.5), ValueError),
        (lambda: EpisodicAccountant().get_delta(-1.0), ValueError),
        (lambda: EpisodicAccountant().compose(gaussian(), 0), ValueError),
        (lambda: EpisodicAccountant().rdp, ValueError),
    ):
        with pytest.raises(error):
            make()


# --- Single events ---


def test_the_best_of_several_runs():
    event = dp_event.RepeatAndSelectDpEvent(dp_event.LaplaceDpEvent(1.0), 1000, 1)
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


def test_tree_aggregation_has_the_height_of_its_binary_length():
    for steps, height in ((1, 1), (3, 2), (4, 3), ([10, 1600, 3], 11)):
        event = dp_event.SingleEpochTreeAggregationDpEvent(5.0, steps)
        ours = EpisodicAccountant(SPECIAL, "rdp", orders=[3.0]).compose(event)
        theirs = RdpAccountant([3.0], SPECIAL).compose(event)
        assert ours.rdp[0] == pytest.approx(1.5 * height / 25, rel=1e-11)
        assert ours.rdp[0] == pytest.approx(theirs.rdp[0], rel=1e-11)
    empty = dp_event.SingleEpochTreeAggregationDpEvent(5.0, [0])
    assert EpisodicAccountant(SPECIAL).compose(empty).get_epsilon(DELTA) == 0
    with pytest.raises(ValueError, match="step_counts"):
        from_dp_event(
            dp_event.SingleEpochTreeAggregationDpEvent(5.0, [-3]),
            neighboring_relation="zero_out",
        )


def test_draws_with_replacement_are_independent_episodes_of_one():
    event = dp_event.SampledWithReplacementDpEvent(100, 5, gaussian(2.0))
    for relation in RELATIONS.values():
        (step,) = from_dp_event(event, neighboring_relation=relation).steps
        one = jde.WithoutReplacement("example", size=1, population=100)
        assert step == jde.GaussianStep(
            jde.IndependentEpisodes(one, num_episodes=5),
            noise_multiplier=2.0,
            neighboring_relation=relation,
        )
    none = dp_event.SampledWithReplacementDpEvent(100, 0, gaussian(2.0))
    assert from_dp_event(none).counts == (0,)


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


def test_discrete_gaussian_against_its_divergences():
    class DiscreteGaussianDpEvent(dp_event.DpEvent):
        sigma, sensitivity, dimension = 4.0, 2.0, None

    event = DiscreteGaussianDpEvent()
    known = jde.rdp(from_dp_event(event), 3.0)
    assert known == pytest.approx(3.0 * 4 / 32, rel=1e-12)
    replaced = from_dp_event(event, neighboring_relation="replace_one")
    assert jde.rdp(replaced, 3.0) == pytest.approx(4 * known, rel=1e-12)
    assert not EpisodicAccountant().supports(event)


@pytest.mark.slow
def test_truncated_samples_and_mixtures_cost_at_most_dp_accountings_answer():
    cut = dp_event.TruncatedSubsampledGaussianDpEvent(4, 0.5, 2, 2.0)
    for relation in RELATIONS:
        theirs = PLDAccountant(relation, 1e-3).compose(cut).get_epsilon(DELTA)
        ours = EpisodicAccountant(relation).compose(cut).get_epsilon(DELTA)
        assert 0.4 * theirs <= ours <= theirs * (1 + 1e-3)


# --- Steps to events ---

POISSON = jde.Poisson("example", sampling_probability=0.1)
FEW = jde.WithoutReplacement("example", size=5, population=100)
ROUND_TRIPS = [
    jde.GaussianStep(POISSON, noise_multiplier=1.5),
    jde.GaussianStep(
        jde.Poisson("example", sampling_probability=1.0), noise_multiplier=2.0
    ),
    jde.GaussianStep(FEW, noise_multiplier=1.5),
    jde.GaussianStep(
        jde.IndependentEpisodes(
            jde.WithoutReplacement("example", size=1, population=50), num_episodes=4
        ),
        noise_multiplier=3.0,
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


def test_round_trips_of_runs():
    run = jde.compose((ROUND_TRIPS[0], 300), (ROUND_TRIPS[4], 1), (ROUND_TRIPS[2], 40))
    assert from_dp_event(to_dp_event(run)) == run
    nested = jde.compose((run, 3), (from_dp_event(poisson()), 2))
    assert from_dp_event(to_dp_event(nested)) == nested
    nothing = jde.compose((ROUND_TRIPS[0], 0))
    assert to_dp_event(nothing) == dp_event.NoOpDpEvent()
    tasks = jde.MultistageSampling(
        jde.Poisson("task", sampling_probability=0.1),
        jde.WithoutReplacement("example", size=5, population=20),
    )
    whole = jde.GaussianStep(
        tasks, noise_multiplier=1.5, clip_unit="task", privacy_unit="task"
    )
    assert to_dp_event(whole) == poisson(0.1, gaussian(1.5))


def test_steps_without_an_event_are_refused_by_name():
    tasks = jde.MultistageSampling(
        jde.Poisson("task", sampling_probability=0.1),
        jde.WithoutReplacement("example", size=5, population=20),
    )
    many = jde.IndependentEpisodes(FEW, num_episodes=3)
    for step, words in (
        (
            jde.GaussianStep(tasks, noise_multiplier=1.0, clip_unit="task"),
            "clip_unit='task'",
        ),
        (jde.GaussianStep(many, noise_multiplier=1.0), "IndependentEpisodes"),
        (jde.RenyiDP([2.0], [0.1]), "RenyiDP has no event"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            to_dp_event(step)
    with pytest.raises(ValueError, match="one setting"):
        to_dp_event(jde.LaplaceRelease(np.array([1.0, 2.0])))
    with pytest.raises(TypeError, match="step must be"):
        to_dp_event(poisson())
    if hasattr(dp_event, "EpsilonDeltaDpEvent"):
        assert from_dp_event(to_dp_event(jde.ApproximateDP(1.0, 1e-5))).steps
    else:
        with pytest.raises(NotImplementedError, match="ApproximateDP has no event"):
            to_dp_event(jde.ApproximateDP(1.0, 1e-5))


def test_a_mutated_event_is_read_again():
    accountant = EpisodicAccountant()
    event = dp_event.ComposedDpEvent([gaussian(9.0)])
    assert accountant.supports(event)
    event.events.append(gaussian(1.0))
    accountant.compose(event)
    event.events.append(gaussian(0.5))
    accountant.compose(event)
    noises = [step.noise_multiplier for step in accountant.run.steps]
    assert noises == [9.0, 1.0, 0.5] and accountant.run.counts == (2, 2, 1)
