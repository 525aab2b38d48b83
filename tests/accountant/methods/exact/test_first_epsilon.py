"""The first bound of epsilon, before any contour, against Rényi quadratures."""

import numpy as np
import pytest

from jaxdp_episodic.accountant.losses.gaussian_mixtures import GaussianMixtureLoss
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.methods.exact import contour, mgf
from jaxdp_episodic.accountant.methods.rdp.method import rdp_bound, rdp_curve
from jaxdp_episodic.accountant.methods.run import EpsilonAt, Run


def sampled(rate, noise, outer=1.0):
    return SampledGaussianLoss(*np.array([[outer], [rate], [1 / noise]]))


def mixture(rate, noise):
    shifts = (np.array([0.5 / noise]), np.array([1 / noise]))
    weights = (np.log([0.7]), np.log([0.3]))
    return GaussianMixtureLoss(np.ones(1), np.array([rate]), shifts, weights)


SETTINGS = [
    (sampled(0.01, 1.0), 1_000.0, 1e-5),
    (sampled(0.3, 0.8), 20.0, 1e-8),
    (sampled(0.02, 0.6, outer=0.1), 5_000.0, 1e-6),
    (sampled(0.97, 3.0), 50.0, 1e-5),
    (mixture(0.05, 1.2), 300.0, 1e-5),
]


def steps_of(loss, count, log_delta):
    run = Run((loss,), (np.array([count]),))
    cut, nothing = np.array([log_delta - np.log(count) - 50]), np.zeros(1)
    (group,) = run.groups()
    kinds = {"num_nodes": 112, "num_terms": 2}
    return run, group, mgf.steps_of(group, nothing, cut, **kinds)


@pytest.mark.parametrize("loss, count, delta", SETTINGS)
def test_moments_of_the_exchanged_pair_are_bounded(loss, count, delta):
    run, _, steps = steps_of(loss, count, np.log(delta))
    c = np.geomspace(0.1, 300, 24)[:, None]
    with np.errstate(all="ignore"):
        bound = mgf.exchanged_moments(c, steps)
    truth = c * rdp_curve(1 + c, run, "backward")
    known = np.isfinite(bound)
    assert np.all(truth <= bound)
    # Close enough to be useful, at least at small orders.
    assert known[0] and np.all(
        bound[:8][known[:8]] <= 1.01 * truth[:8][known[:8]] + 0.01
    )


def test_moments_of_truncated_terms_are_unknown():
    """The integrand of a high order is far left of where the nodes begin."""
    _, _, steps = steps_of(*SETTINGS[3][:2], np.log(1e-5))
    with np.errstate(all="ignore"):
        bound = mgf.exchanged_moments(np.array([[1.0], [1e3]]), steps)
    assert np.isfinite(bound[0]) and np.isinf(bound[1])


@pytest.mark.parametrize("loss, count, delta", SETTINGS)
def test_the_bound_is_above_the_best_one(loss, count, delta):
    log_delta = np.log([delta])
    run, group, steps = steps_of(loss, count, log_delta[0])
    with np.errstate(all="ignore"):
        first = contour.first_epsilon(log_delta, np.array([np.inf]), (group,), (steps,))
    best, _ = rdp_bound(EpsilonAt(log_delta), run)
    c = first.order - 1
    curve = rdp_curve(first.order, run, "forward")
    there = curve + np.log1p(-1 / first.order) - (log_delta + np.log1p(c)) / c
    assert first.highest == pytest.approx(there, rel=1e-8)
    assert best * (1 - 1e-9) <= first.highest <= 3 * best
    assert 0.3 * best < first.epsilon < best
