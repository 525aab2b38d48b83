"""The lower distribution lies below the true one, and not far below it."""

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


def exact_profile(u, p, s):
    """Forward hockey-stick divergence of the sampled pair at e^u, 40 digits."""
    with mpmath.workdps(40):
        u, p, s = mpmath.mpf(u), mpmath.mpf(p), mpmath.mpf(s)
        if mpmath.expm1(u) + p <= 0:
            return 1 - mpmath.exp(u)
        z = (mpmath.log((mpmath.expm1(u) + p) / p) + s * s / 2) / s

        def tail(x):
            return mpmath.erfc(x / mpmath.sqrt(2)) / 2

        return (1 - p) * tail(z) + p * tail(z - s) - mpmath.exp(u) * tail(z)


def bins_of(p, s, spacing, center, count):
    grid = center + spacing * np.arange(-4.0, count)
    points = np.empty(2 * len(grid) - 1)
    points[::2], points[1::2] = grid, 0.5 * (grid[1:] + grid[:-1])
    loss = SampledGaussianLoss(*map(np.float64, (1.0, p, s)))
    ((own, other),) = lattice.evaluate_tails([loss], [points])
    return points, lattice.bin_masses(points, own, other)


# Most of the second distribution is a spike near -p, narrower than the spacing.
LATTICES = [(0.3, 1.0, 0.1, 0.05, 60), (3e-4, 1.9, 1.5e-3, -2.1e-4, 400)]


@pytest.mark.parametrize("p, s, spacing, center, count", LATTICES)
@pytest.mark.parametrize("tilt", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("may_shift", [True, False])
def test_the_lower_distribution_is_below(p, s, spacing, center, count, tilt, may_shift):
    points, bins = bins_of(p, s, spacing, center, count)
    masses, shift = lattice.lower_distribution(points, bins, tilt, may_shift=may_shift)
    assert may_shift or shift == 0
    losses = points[::2] + shift
    # between its losses, where the lower profile is straight and the true one is
    # convex, and right beside the losses
    for u in np.sort(np.concatenate([losses[:20], losses[:20] + 0.4 * spacing])):
        exact = float(exact_profile(u, p, s))
        mine = math.fsum(
            m * max(-math.expm1(u - x), 0.0)
            for m, x in zip(masses, losses, strict=True)
        )
        assert mine <= exact * (1 + 1e-12) + 1e-18


def test_a_peak_off_the_lattice_costs_little():
    """The error is of second order, wherever it is between two grid points."""
    p, s, spacing, _, count = LATTICES[1]
    fine_points, fine = bins_of(p, s, spacing / 50, -p, 50 * count)
    mass, loss = lattice.merged_losses(fine_points, fine)
    truth = math.log1p(float(mass @ np.expm1(3 * loss)))
    for place in (0.0, 0.05, 0.15, 0.3):
        points, bins = bins_of(p, s, spacing, -2.1e-4 + place * spacing, count)
        masses, shift = lattice.lower_distribution(points, bins, 3.0)
        growth = float(masses @ np.expm1(3 * (points[::2] + shift))) + masses.sum() - 1
        lost = truth - math.log1p(growth)
        # a twentieth of the spacing would be 2e-4, three spacings squared 7e-6
        assert 0 < lost <= 3 * spacing**2


def test_errors_of_the_masses_go_to_the_safe_side():
    points, bins = bins_of(*LATTICES[0])
    masses, _ = lattice.lower_distribution(points, bins, 1.0, may_shift=False)
    doubtful = bins._replace(
        mass_error=bins.mass_error + 1e-6 * (bins.bottom + bins.top),
        top_error=bins.top_error + 1e-6 * bins.top,
    )
    less, _ = lattice.lower_distribution(points, doubtful, 1.0, may_shift=False)
    gain = points[::2]
    assert less @ np.expm1(gain) + less.sum() < masses @ np.expm1(gain) + masses.sum()


# --- One step: certified ends are at most 1e-10 apart ---


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
