"""Randomized response: its forms by their distributions, sampling by the mixture."""

import mpmath as mp
import numpy as np
import pytest

from jaxdp_episodic.accountant.bounds.approximate_dp import amplified_epsilon
from jaxdp_episodic.accountant.bounds.randomized_response import (
    epsilon_of_keep_probability,
    keep_probability,
    linear_epsilon,
    linear_keep_probability,
    linear_truth_probability,
    response_distribution,
    subsampled_linear_parameter,
    subsampled_response_epsilon,
    truth_probability,
)

FORMS = np.concatenate([[0.0], 10.0 ** np.linspace(-9, 1.4, 50)])


def privacy(dist):
    """Largest log-ratio of the answers' chances, over answers and both directions."""
    return np.abs(np.log(dist[..., 0, :]) - np.log(dist[..., 1, :])).max(axis=-1)


def mixture(keep):
    """Distribution of: keep the bit with this chance, else a fair coin."""
    return keep[..., None, None] * np.eye(2) + (1 - keep[..., None, None]) / 2


def test_usual_form():
    dist = response_distribution(truth_probability(FORMS))
    np.testing.assert_allclose(privacy(dist), FORMS, atol=1e-12, rtol=1e-5)
    np.testing.assert_allclose(dist, mixture(keep_probability(FORMS)), atol=1e-15)
    np.testing.assert_allclose(dist.sum(axis=-1), 1, rtol=1e-15)
    back = epsilon_of_keep_probability(keep_probability(FORMS[:40]))
    np.testing.assert_allclose(back, FORMS[:40], rtol=1e-12)


def test_linear_form_is_the_lectures_mixture():
    truth = linear_truth_probability(FORMS)
    np.testing.assert_allclose(truth, (1 + FORMS) / (2 + FORMS), rtol=1e-15)
    np.testing.assert_allclose(1 - truth, 1 / (2 + FORMS), rtol=1e-13)
    dist = response_distribution(truth)
    np.testing.assert_allclose(
        dist, mixture(linear_keep_probability(FORMS)), rtol=1e-14
    )
    np.testing.assert_allclose(privacy(dist), linear_epsilon(FORMS), atol=1e-13)
    assert np.all(linear_epsilon(FORMS) <= FORMS)


def test_sampling_the_linear_form_is_the_linear_form():
    rng = np.random.default_rng(0)
    a, p = 10 ** rng.uniform(-6, 3, 1_000), rng.uniform(0, 1, 1_000)
    dist = p[:, None, None] * response_distribution(linear_truth_probability(a))
    dist += (1 - p[:, None, None]) / 2
    new = subsampled_linear_parameter(a, sampling_probability=p)
    np.testing.assert_allclose(
        dist, response_distribution(linear_truth_probability(new))
    )
    np.testing.assert_allclose(new, 2 * a * p / (2 + a - a * p), rtol=1e-14)
    assert np.all(new <= a * (1 + 1e-15))
    small = subsampled_linear_parameter(1e-6, sampling_probability=0.3)
    assert small == pytest.approx(3e-7, rel=1e-6)


def test_sampling_the_usual_form_at_60_digits():
    rng = np.random.default_rng(1)
    eps, p = 10 ** rng.uniform(-6, 2, 1_000), rng.uniform(0, 1, 1_000)
    p[:100] = 1 - 10 ** rng.uniform(-15, -2, 100)
    values = subsampled_response_epsilon(eps, sampling_probability=p)
    for value, e, q in zip(values, eps, p, strict=True):
        with mp.workdps(60):
            truth = mp.mpf(q) / (1 + mp.exp(-mp.mpf(e))) + (1 - mp.mpf(q)) / 2
            exact = float(mp.log(truth / (1 - truth)))
        assert value == pytest.approx(exact, rel=1e-12)
    assert np.all(values <= amplified_epsilon(eps, rate=p) * (1 + 1e-12))


def test_edges():
    assert truth_probability(np.inf) == 1
    assert linear_truth_probability(np.inf) == 1
    assert epsilon_of_keep_probability(1.0) == np.inf
    assert subsampled_linear_parameter(np.inf, sampling_probability=1.0) == np.inf
    assert subsampled_linear_parameter(np.inf, sampling_probability=0.0) == 0
    assert subsampled_linear_parameter(0.0, sampling_probability=0.5) == 0
    assert subsampled_response_epsilon(np.inf, sampling_probability=1.0) == np.inf
    half = subsampled_response_epsilon(np.inf, sampling_probability=0.5)
    assert half == pytest.approx(np.log(3))
    assert isinstance(half, np.float64)
    for function in (truth_probability, linear_epsilon, linear_keep_probability):
        with pytest.raises(ValueError, match=">= 0"):
            function(-0.1)
        with pytest.raises(TypeError):
            function("1")
    with pytest.raises(ValueError, match="truth"):
        response_distribution(1.2)
