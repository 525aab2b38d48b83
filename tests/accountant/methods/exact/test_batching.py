"""What goes together: epsilons on one contour as each alone, sums of one length."""

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.methods.exact import batching
from jaxdp_episodic.accountant.methods.exact.batching import (
    LARGEST_RATIO,
    NEAR,
    shared_contours,
)
from jaxdp_episodic.accountant.methods.exact.method import _may_exceed
from jaxdp_episodic.accountant.methods.question import EpsilonAt
from jaxdp_episodic.accountant.methods.run import Run


@pytest.mark.parametrize(
    ("rate", "noise", "steps"),
    # The last one: many small losses, and rare large ones that stand out from them.
    [(0.02, 1.0, 500), (0.5, 8.0, 40), (1e-3, 0.4, 60)],
)
def test_together_as_alone(rate, noise, steps):
    step = jde.GaussianStep(
        jde.Poisson("unit", sampling_probability=rate), noise_multiplier=noise
    )
    epsilons = np.concatenate([[0.0, 1e-8, 1.1e-8], np.linspace(0.01, 4.0, 24)])
    ask = {"num_steps": steps, "return_info": True, "engine": "numpy"}
    together, info = jde.delta(step, epsilon=epsilons, **ask)
    for i in range(0, len(epsilons), 5):
        alone, own = jde.delta(step, epsilon=epsilons[i], **ask)
        assert info.is_certified_bound[i] == own.is_certified_bound
        np.testing.assert_allclose(together[i], alone, rtol=1e-9)


def test_what_shares_a_contour():
    fields = np.array([[1.0], [0.1], [0.5]]) * np.ones(9)
    fields[2, 4] = 0.6
    run = Run((SampledGaussianLoss(*fields),), (np.full(9, 10.0),))
    epsilon = np.array([0.0, 1.0, 1.9, 2.9, 1.0, 1.2, 1.1, 1.3, 1.4])
    log_delta = np.array([-1.0, -5.0, -9.5, -9.9, -5.0, -5.1, -5.2, -5.3, -9.0])
    alone = np.arange(9) == 6
    members, middle = shared_contours(epsilon, run, log_delta, alone)
    columns = [sorted(set(column)) for column in members.T]
    assert sorted(columns) == [[0], [1], [2, 8], [3], [4], [5, 7], [6]]
    for column, place in zip(columns, middle, strict=True):
        assert place in column
        assert epsilon[place] <= LARGEST_RATIO * epsilon[column[0]]
        assert np.ptp(log_delta[column]) <= NEAR


def test_each_setting_of_a_batch_is_compared_by_itself():
    """A direction that one setting need not look at another one must."""
    size = 12
    fields = np.array([[1.0], [0.1], [0.5]]) * np.ones(size)
    run = Run((SampledGaussianLoss(*fields),), (np.full(size, 10.0),))
    question = EpsilonAt(np.full(size, np.log(1e-5)))
    least, order = np.where(np.arange(size) % 3, 9.0, 0.001), np.full(size, 8.0)
    rival = _may_exceed(question, run, least, order)
    np.testing.assert_array_equal(rival, least < 1)
    for i in range(3):
        at = np.array([i])
        alone = _may_exceed(question.take(at), run.take(at), least[at], order[at])
        np.testing.assert_array_equal(alone, rival[at])


def test_sums_are_padded_to_longer_ones_where_few_differ():
    few = np.array([1.0, 2.0, 8.0, 2.0])
    np.testing.assert_array_equal(batching._padded(few), 8.0)
    many = np.repeat([1.0, 2.0, 8.0], [2, batching._MOST_PADDED, 3])
    padded = batching._padded(many)
    np.testing.assert_array_equal(padded, np.where(many == 8, 8.0, 2.0))
