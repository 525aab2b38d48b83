"""Certified ends of one step against many digits: they are at most 1e-10 apart."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from jaxdp_episodic.accounting.pld import interval, single
from jaxdp_episodic.accounting.run import SAMPLED, SWAPPED, DominatingPair


def pair(kind, outer, rate, sensitivity, noise):
    fields = (outer, rate, 1.0, sensitivity, noise, 1.0)
    return DominatingPair(kind, *(np.array([float(f)]) for f in fields))


def gaussian(s, g):
    t = mpmath.log(g) / s - s / 2

    def tail(x):
        return mpmath.erfc(x / mpmath.sqrt(2)) / 2

    return tail(t) - g * tail(t + s)


def exact_delta(kind, outer, rate, sensitivity, noise, epsilon):
    """The larger direction of either profile, 40 digits."""
    outer, p, s = mpmath.mpf(outer), mpmath.mpf(rate), mpmath.mpf(sensitivity) / noise
    g = mpmath.exp(mpmath.mpf(epsilon))
    forward = outer * p * gaussian(s, 1 + (g - 1) / p)
    k = 1 - g * (1 - p)
    if kind == SWAPPED or k <= 0:
        return forward
    return max(forward, outer * k * gaussian(s, g * p / k))


SETTINGS = [
    (SAMPLED, 1.0, 0.3, 1.0, 0.7, 0.25),
    (SAMPLED, 0.1, 1e-4, 1.0, 0.3, 2.0),
    (SAMPLED, 1.0, 0.5, 1.0, 1.0, math.log(2) * (1 - 1e-9)),
    (SAMPLED, 1.0, 1.0, 1.0, 5.0, 1.1),
    (SWAPPED, 1.0, 1e-3, 2.0, 1.0, 0.01),
]


@pytest.mark.parametrize("kind, outer, rate, sensitivity, noise, epsilon", SETTINGS)
def test_ends_hold_the_truth(kind, outer, rate, sensitivity, noise, epsilon):
    run = (pair(kind, outer, rate, sensitivity, noise),), (np.ones(1),)
    with mpmath.workdps(40):
        truth = exact_delta(kind, outer, rate, sensitivity, noise, epsilon)
        log_truth = mpmath.log(truth)
        lower, upper = interval.log_delta_bounds(np.array([epsilon]), *run)
        assert mpmath.mpf(float(lower[0])) <= log_truth <= mpmath.mpf(float(upper[0]))
        assert upper[0] - lower[0] <= 1e-10
        goal = float(log_truth)
        lower, upper = interval.epsilon_bounds(np.array([goal]), *run)
        assert exact_delta(
            kind, outer, rate, sensitivity, noise, float(upper[0])
        ) <= mpmath.exp(goal)
        assert exact_delta(
            kind, outer, rate, sensitivity, noise, float(lower[0])
        ) >= mpmath.exp(goal)
        assert upper[0] - lower[0] <= 1e-10 * epsilon


def test_profiles_are_read_off_with_their_errors(monkeypatch):
    """A profile that is known less well gives ends that are further apart."""
    run = (pair(SWAPPED, 1.0, 0.1, 2.0, 1.0),), (np.ones(1),)
    goal = np.array([math.log(1e-5)])
    evaluate = single.loss_lattice.evaluate_tails

    def doubtful(*arguments):
        return [
            tuple(t._replace(profile_error=1e-4 * t.profile) for t in both)
            for both in evaluate(*arguments)
        ]

    lower, upper = interval.epsilon_bounds(goal, *run)
    monkeypatch.setattr(single.loss_lattice, "evaluate_tails", doubtful)
    wide_lower, wide_upper = interval.epsilon_bounds(goal, *run)
    assert wide_lower < lower <= upper < wide_upper
    assert wide_upper - wide_lower < 1e-2
