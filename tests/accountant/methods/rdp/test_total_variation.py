"""Rényi-DP with total variation: epsilon is 0 if delta is at least that."""

import numpy as np
import pytest
from scipy.stats import norm

import jaxdp_episodic as jde


def sampled(rate, noise):
    scheme = jde.Poisson("user", sampling_probability=rate)
    return jde.GaussianStep(scheme, noise_multiplier=noise)


@pytest.mark.parametrize("num_steps", [1, 2, 30])
def test_epsilon_is_0_from_the_total_variation_on(num_steps):
    rate, noise = 1e-6, 1.0
    one = rate * (norm.cdf(0.5 / noise) - norm.cdf(-0.5 / noise))
    every = -np.expm1(num_steps * np.log1p(-one))

    def epsilon(delta):
        return jde.epsilon(
            sampled(rate, noise), delta=delta, num_steps=num_steps, method="rdp"
        )

    assert epsilon(every * (1 + 1e-9)) == 0 < epsilon(every * (1 - 1e-9))
    delta = jde.delta(
        sampled(rate, noise), epsilon=1e-9, num_steps=num_steps, method="rdp"
    )
    assert every * (1 - 1e-12) <= delta <= every * (1 + 1e-9)


def test_one_step_of_a_rare_and_of_a_frequent_unit():
    """Rényi-DP alone says 0.2634."""
    for method in ("rdp", "exact", "pld"):
        step = sampled(np.array([1e-6, 0.1]), 1.0)
        rare, often = jde.epsilon(step, delta=1e-5, num_steps=1, method=method)
        assert rare == 0 < often


def test_mechanisms_with_moments_only_are_unchanged():
    release = jde.ZeroConcentratedDP(1e-12)
    assert jde.epsilon(release, delta=0.5, num_steps=1, method="rdp") >= 0
