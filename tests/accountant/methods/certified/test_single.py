"""Certified ends of one step against high precision: at most 1e-10 apart."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from jaxdp_episodic.accountant.losses.gaussian_mixtures import SwappedGaussianLoss
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.methods.certified import lattice
from jaxdp_episodic.accountant.methods.certified.method import pld_bounds
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt, Run


def run_of(kind, *fields):
    """One step."""
    return Run((kind(*(np.array([f]) for f in fields)),), (np.ones(1),))


def gaussian(s, g):
    t = mpmath.log(g) / s - s / 2

    def tail(x):
        return mpmath.erfc(x / mpmath.sqrt(2)) / 2

    return tail(t) - g * tail(t + s)


def exact_delta(kind, outer, rate, shift, epsilon):
    """The larger direction of either profile, 40 digits."""
    outer, p, s = mpmath.mpf(outer), mpmath.mpf(rate), mpmath.mpf(shift)
    g = mpmath.exp(mpmath.mpf(epsilon))
    forward = outer * p * gaussian(s, 1 + (g - 1) / p)
    k = 1 - g * (1 - p)
    if kind is SwappedGaussianLoss or k <= 0:
        return forward
    return max(forward, outer * k * gaussian(s, g * p / k))


SETTINGS = [
    (SampledGaussianLoss, 1.0, 0.3, 1 / 0.7, 0.25),
    (SampledGaussianLoss, 0.1, 1e-4, 1 / 0.3, 2.0),
    (SampledGaussianLoss, 1.0, 0.5, 1.0, math.log(2) * (1 - 1e-9)),
    (SampledGaussianLoss, 1.0, 1.0, 0.2, 1.1),
    (SwappedGaussianLoss, 1.0, 1e-3, 2.0, 0.01),
]


@pytest.mark.parametrize("kind, outer, rate, shift, epsilon", SETTINGS)
def test_ends_contain_the_truth(kind, outer, rate, shift, epsilon):
    run = run_of(kind, outer, rate, shift)

    def exact(epsilon):
        return exact_delta(kind, outer, rate, shift, epsilon)

    with mpmath.workdps(40):
        truth = exact(epsilon)
        log_truth = mpmath.log(truth)
        lower, upper = pld_bounds(DeltaAt(np.array([epsilon])), run)
        assert mpmath.mpf(float(lower[0])) <= log_truth <= mpmath.mpf(float(upper[0]))
        assert upper[0] - lower[0] <= 1e-10
        goal = float(log_truth)
        lower, upper = pld_bounds(EpsilonAt(np.array([goal])), run)
        assert exact(float(upper[0])) <= mpmath.exp(goal) <= exact(float(lower[0]))
        assert upper[0] - lower[0] <= 1e-10 * epsilon


def test_errors_of_profiles_widen_the_ends(monkeypatch):
    """A less accurate profile gives wider ends."""
    run = run_of(SwappedGaussianLoss, 1.0, 0.1, 2.0)
    goal = EpsilonAt(np.array([math.log(1e-5)]))
    evaluate = lattice.evaluate_tails

    def doubtful(*arguments):
        return [
            tuple(t._replace(profile_error=1e-4 * t.profile) for t in both)
            for both in evaluate(*arguments)
        ]

    lower, upper = pld_bounds(goal, run)
    monkeypatch.setattr(lattice, "evaluate_tails", doubtful)
    wide_lower, wide_upper = pld_bounds(goal, run)
    assert wide_lower < lower <= upper < wide_upper
    assert wide_upper - wide_lower < 1e-2
