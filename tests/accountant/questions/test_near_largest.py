"""Delta where the largest loss is just above epsilon, against enumeration."""

import itertools
import math

import numpy as np
import pytest

import jaxdp_episodic as jde


def enumerated_delta(epsilons, at):
    """Delta of composed pure DP: every combination of the losses +e and -e."""
    total = 0.0
    for signs in itertools.product((1, -1), repeat=len(epsilons)):
        pairs = list(zip(signs, epsilons, strict=True))
        loss = math.fsum(s * e for s, e in pairs)
        chance = math.prod(1 / (1 + math.exp(-s * e)) for s, e in pairs)
        total += chance * max(0.0, -math.expm1(at - loss))
    return total


@pytest.mark.parametrize("epsilons", [(1.0, 2.0), (0.3, 0.3, 0.3), (2.0, 0.5, 0.5)])
@pytest.mark.parametrize("gap", [0.0, 1e-9, 1e-3, 0.1, 0.29])
def test_pure_dp_up_to_its_largest_loss(epsilons, gap):
    run = jde.compose(*((jde.ApproximateDP(e), 1) for e in epsilons))
    at = sum(epsilons) - gap
    truth = enumerated_delta(epsilons, at)
    # For every method: with one other sign the loss is below epsilon.
    value = jde.delta(run, epsilon=at, method="rdp")
    assert truth * (1 - 1e-12) <= value <= truth * (1 + 1e-9) + 1e-11


def test_laplace_and_failures_near_the_end():
    """Values of dp-accounting's tests."""
    run = jde.compose((jde.LaplaceRelease(1.0), 3), (jde.LaplaceRelease(2.0), 2))
    assert 0 <= jde.delta(run, epsilon=4.0, method="rdp") < 1e-11
    drawn = jde.LaplaceRelease(0.5, sampling_probability=0.2)
    most = 3 * math.log1p(0.2 * math.expm1(2.0))
    gap = np.array([1e-9, 1e-6])
    # All three draws are on one side; the largest loss is less by the gap.
    beyond = (0.8 * math.exp(-2) + 0.2) / 2
    value = jde.delta(drawn, epsilon=most - gap, num_steps=3, method="rdp")
    assert np.all(value <= gap * beyond**3 * 1.01 + 1e-14)
    failing = jde.compose(
        (jde.ApproximateDP(1.0, 0.1), 1), (jde.ApproximateDP(2.0, 0.2), 1)
    )
    assert 0.28 <= jde.delta(failing, epsilon=3.0, method="rdp") < 0.28 + 1e-11


def test_a_setting_without_loss_does_not_affect_others():
    # Gaussian losses are unbounded: delta near 1 was called a certified bound.
    step = jde.GaussianStep(
        jde.Poisson("unit", sampling_probability=0.5), noise_multiplier=2.0
    )
    asked = {"epsilon": 5.0, "return_info": True, "engine": "numpy"}
    alone, info = jde.delta(step, num_steps=10_000, **asked)
    both, infos = jde.delta(step, num_steps=[10_000, 0], **asked)
    assert both.tolist() == [alone, 0.0]
    assert not info.is_certified_bound
    assert infos.is_certified_bound.tolist() == [False, False]
