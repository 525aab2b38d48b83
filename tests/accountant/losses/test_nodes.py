"""Moments of losses in the complex plane, against mpmath on the real line."""

import functools

import mpmath
import numpy as np
import pytest
from scipy.stats import norm

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.loss_nodes import NUM_NODES, NodeRule
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.numerics.complex_exponentials import sum_expm1
from jaxdp_episodic.accountant.numerics.loops import at

LOG_CUT = -120.0  # of the density: 15.5 standard deviations
LOSSES = {
    "antipodal": AntipodalGaussianLoss,
    "forward": lambda o, p, r, s: SampledGaussianLoss(o, p, s),
    "backward": lambda o, p, r, s: SampledGaussianLoss(o, p, s),
    "symmetric": lambda o, p, r, s: SwappedGaussianLoss(o, p, s),
}


def moments(loss, backward, cut, height, z):
    nodes = loss.nodes(NodeRule(backward, cut[None], height[None], NUM_NODES))
    one = at(nodes, 0)
    return *sum_expm1(z, one.weight, one.loss), one


def computed(kind, p, r, s, z, *, height=1.0, log_cut=LOG_CUT):
    """``M(z) - 1`` at some z, and the distribution."""
    one = np.ones(1)
    re, im, dist = float64_boundary(moments)(
        LOSSES[kind](one, p * one, r * one, s * one),
        one * (kind == "backward"),
        log_cut * one,
        height * one,
        (z.real[:, None], z.imag[:, None]),
    )
    return re[:, 0] + 1j * im[:, 0], dist


@functools.cache
def integrated(kind, p, r, s, z):
    """``M(z) - 1`` from each definition, 20 digits, on the real line."""
    p, r, s, z = mpmath.mpf(p), mpmath.mpf(r), mpmath.mpf(s), mpmath.mpc(z)

    def densities(x):
        if kind == "antipodal":
            q = (1 - p) * mpmath.npdf(x) + p * mpmath.npdf(x, -s)
            return q + p * r * (mpmath.npdf(x, s) - mpmath.npdf(x, -s)), q
        q = mpmath.npdf(x)
        return (1 - p) * q + p * mpmath.npdf(x, s), q

    def term(x):
        a, b = densities(x)
        loss = mpmath.log(a / b)
        forward = a * mpmath.expm1(z * loss)
        backward = b * mpmath.expm1(-z * loss)
        return {"forward": forward, "backward": backward}.get(kind, forward + backward)

    start = {"symmetric": s / 2, "antipodal": mpmath.mpf(0)}.get(kind, mpmath.mpf(-14))
    top = 14 + 3 * (1 + z.real) * s
    edges = mpmath.linspace(start, top, 16)
    with mpmath.workdps(20):
        return complex(mpmath.quad(term, edges))


CASES = [
    ("forward", 1e-2, 1.0, 1.0, 6.0),
    ("backward", 1e-2, 1.0, 1.0, 6.0),
    ("symmetric", 1e-2, 1.0, 1.0, 6.0),
    ("forward", 0.5, 1.0, 2.0, 2.0),
    ("symmetric", 1.0, 1.0, 0.5, 4.0),
    ("antipodal", 0.1, 0.1, 1.0, 5.0),
    ("antipodal", 1.0, 1.0, 1.0, 2.0),
]


@pytest.mark.parametrize(
    ("kind", "p", "r", "s", "center"),
    [
        # Many digits take long: the fast tests have one setting of each kind.
        case
        if case[0] not in {kind for kind, *_ in CASES[:place]}
        else pytest.param(*case, marks=pytest.mark.slow)
        for place, case in enumerate(CASES)
    ],
)
def test_moments_near_the_axis_against_integration(kind, p, r, s, center):
    z = center + np.array([0.0, 3.0j])
    value, _ = computed(kind, p, r, s, z)
    exact = np.array([integrated(kind, p, r, s, complex(one)) for one in z])
    # Relative to what is summed: the losses' mass, and the moment on the axis.
    assert np.all(np.abs(value - exact) <= 1e-12 * np.abs(exact[0]))


@pytest.mark.parametrize(("kind", "p", "r", "s", "center"), CASES)
def test_another_path_gives_the_same_far_out(kind, p, r, s, center):
    """Cauchy's theorem: the path does not matter, if it resolves the integrand."""
    height = np.array([0.0, 0.3, 3.0, 30.0, 300.0, 3000.0])
    other = {"height": 0.85, "log_cut": LOG_CUT - 8}
    _, dist = computed(kind, p, r, s, np.array([complex(center)]), **other)
    z = center + height * (1j + 0.7 * min(dist.right[0], 1.0))
    first, _ = computed(kind, p, r, s, z)
    second, _ = computed(kind, p, r, s, z, **other)
    scale = np.maximum(np.abs(first), 1e-6 * np.abs(first[0]))
    np.testing.assert_array_less(np.abs(first - second), 1e-14 + 1e-8 * scale)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_mass_is_that_of_the_losses_that_are_not_zero(kind):
    p, r, s = 0.3, 0.4, 0.8
    _, dist = computed(kind, p, r, s, np.array([1.0 + 0j]))
    if kind in ("forward", "backward"):
        expected = 1.0
    elif kind == "symmetric":
        # 1 - P(x <= s/2) - Q(x > s/2) and what is left is the atom
        expected = p * norm.cdf(s / 2) + (2 - p) * norm.sf(s / 2)
    else:
        # both halves of the antipodal pair, the densities of P and Q for x > 0
        above = (1 - p) * 0.5 + p * norm.sf(s)
        gained = p * r * (norm.cdf(s) - norm.sf(s))
        expected = 2 * above + gained
    np.testing.assert_allclose(dist.mass[0], expected, rtol=1e-13)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_cut_is_where_it_was_asked_for(kind):
    p, s, log_cut = 0.1, 1.5, -50.0
    _, dist = computed(kind, p, 0.5, s, np.array([1.0 + 0j]), log_cut=log_cut)
    used = np.isfinite(dist.end_log_weight)
    if kind == "forward":
        # To the left, where nothing is lost, Q's density is e^-40.5 at the end.
        np.testing.assert_allclose(dist.end_log_weight[0], -40.5, atol=0.2)
        used[0] = False
    assert np.all(dist.end_log_weight[used] < log_cut + 3)
    # the losses at the nodes lie between those at the cuts
    assert dist.loss[0].max() <= dist.end_loss.max() + 1e-6
