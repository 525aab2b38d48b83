"""Mixtures of Gaussians among dp_accounting's events: alone, composed, sampled."""

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.interop.dp_event import EventNotCovered, from_dp_event

THEIRS = {
    "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
}
GAUSSIAN = dp_event.GaussianDpEvent(2.0)
TWICE = dp_event.MixtureOfGaussiansDpEvent(1.5, [0.0, 1.0, 2.0], [0.81, 0.18, 0.01])
ONCE = dp_event.MixtureOfGaussiansDpEvent(1.0, [0.5, 1.5], [0.75, 0.25])


def sampled(rate, *events):
    return dp_event.PoissonSampledDpEvent(rate, dp_event.ComposedDpEvent(list(events)))


def often(count, event):
    return dp_event.SelfComposedDpEvent(event, count)


@pytest.mark.slow
@pytest.mark.parametrize(
    "relation", ["zero_out", pytest.param("add_remove", marks=pytest.mark.slow)]
)
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


@pytest.mark.parametrize("epsilon", [0.05, 0.4])
@pytest.mark.parametrize("pair", [(TWICE, GAUSSIAN), (ONCE, TWICE), (ONCE, ONCE)])
def test_joint_releases_of_a_sample_cost_at_least_the_truth(pair, epsilon):
    run = from_dp_event(sampled(0.3, *pair))
    true = max(divergences(0.3, np.exp(epsilon), *map(law, pair)))
    assert true * (1 - 1e-6) <= jde.delta(run, epsilon=epsilon) <= 1.8 * true


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


def test_shifts_without_noise_are_infinite_losses():
    bare = dp_event.MixtureOfGaussiansDpEvent(0.0, [0.0, 1.0], [0.9, 0.1])
    run = from_dp_event(sampled(0.5, bare, TWICE))
    assert jde.epsilon(run, delta=1e-6) == np.inf


@pytest.mark.parametrize(
    ("event", "relation", "message"),
    [
        (sampled(0.5, GAUSSIAN, TWICE), "replace_one", "'add_remove' or 'zero_out'"),
        (sampled(0.5, often(300, TWICE)), "zero_out", "256 different joint norms"),
        (sampled(0.5, dp_event.LaplaceDpEvent(1.0), TWICE), "zero_out", "no theorem"),
    ],
)
def test_unsupported_events_are_refused(event, relation, message):
    with pytest.raises(EventNotCovered, match=message):
        from_dp_event(event, neighboring_relation=relation)
