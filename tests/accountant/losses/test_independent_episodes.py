"""Sums over the number of episodes: the kept terms against all terms."""

import math

import numpy as np
import pytest

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    SwappedGaussianLoss,
    ZeroedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.independent_episodes import (
    IndependentEpisodesLoss,
    ZeroedEpisodesLoss,
)
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.methods.rdp.kernels import COARSE, FINE

# eta, shift, B and order - 1: the mean, the largest k, or k = 1 dominates.
SETTINGS = np.array(
    [
        (0.2, 0.01, 360, 3.0),
        (0.2, 0.01, 360, 20.0),
        (0.01, 0.02, 200, 8.0),
        (1e-4, 0.02, 50, 20.0),
        (1e-3, 0.1, 40, 2.0),
        (0.9, 0.02, 150, 0.5),
        (1.0, 0.1, 30, 4.0),
        (0.3, 1.0, 1, 5.0),
    ]
).T


def every_term(kind, eta, shift, number, t):
    """log of the sum of all terms, in plain Python."""
    any_rate = -math.expm1(number * math.log1p(-eta)) if eta < 1 else 1.0
    k = np.arange(1.0, number + 1)
    one, rate = np.ones_like(k), np.full_like(k, any_rate)
    if kind is ZeroedEpisodesLoss:
        loss = ZeroedGaussianLoss(one, one, rate, k * shift)
    else:
        loss = SwappedGaussianLoss(one, rate, k * shift)
    ask = float64_boundary(
        lambda order: loss.log_excess(order, MomentRule("forward", FINE))
    )
    (excess,) = ask(np.full_like(k, t))
    terms = []
    for j, value in zip(range(1, int(number) + 1), excess.tolist(), strict=True):
        if eta == 1 and j < number:
            continue
        rest = (number - j) * math.log1p(-eta) if j < number else 0.0
        log_mass = math.log(math.comb(int(number), j)) + j * math.log(eta) + rest
        terms.append(log_mass - math.log(any_rate) + value)
    peak = max(terms)
    return peak + math.log(math.fsum(math.exp(term - peak) for term in terms))


@pytest.mark.parametrize("kind", [IndependentEpisodesLoss, ZeroedEpisodesLoss])
def test_dropped_terms_do_not_matter(kind):
    eta, shift, number, t = SETTINGS
    loss = kind(np.ones_like(eta), eta, shift, number)
    (found,) = float64_boundary(
        lambda t: loss.log_excess(t, MomentRule("forward", FINE))
    )(t)
    truth = np.array([every_term(kind, *row) for row in SETTINGS.T])
    np.testing.assert_allclose(np.expm1(found - truth), 0.0, atol=1e-12)
    # For searches: few terms, and slopes that agree with differences.
    search = float64_boundary(
        lambda t: loss.log_excess(t, MomentRule("forward", COARSE, True))
    )
    rough, slope, _ = search(t)
    step = 1e-6 * t
    up, down = search(t + step)[0], search(t - step)[0]
    np.testing.assert_allclose(rough, truth, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=1e-3)
