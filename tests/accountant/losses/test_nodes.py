"""Moments of losses in the complex plane, against mpmath on the real line."""

import mpmath
import numpy as np
import pytest
from scipy.stats import norm

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
    ZeroedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.loss_nodes import NodeRule
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.methods.exact.mgf import exchanged_moments, steps_of
from jaxdp_episodic.accountant.methods.rdp import FINE, log_moment
from jaxdp_episodic.accountant.methods.run import Group
from jaxdp_episodic.accountant.numerics.loops import at
from jaxdp_episodic.accountant.numerics.special import sum_expm1
from oracles import precise

LOG_CUT = -120.0  # of the density: 15.5 standard deviations
LOSSES = {
    "antipodal": AntipodalGaussianLoss,
    "forward": lambda o, p, r, s: SampledGaussianLoss(o, p, s),
    "backward": lambda o, p, r, s: SampledGaussianLoss(o, p, s),
    "symmetric": lambda o, p, r, s: SwappedGaussianLoss(o, p, s),
    "zeroed": ZeroedGaussianLoss,
    "zeroed backward": ZeroedGaussianLoss,
}


def moments(loss, backward, cut, height, z):
    nodes = loss.nodes(NodeRule(backward, cut[None], height[None], 384))
    one = at(nodes, 0)
    return *sum_expm1(z, one.weight, one.loss), one


def computed(kind, p, r, s, z, *, height=1.0, log_cut=LOG_CUT):
    """``M(z) - 1`` at some z, and the distribution."""
    one = np.ones(1)
    re, im, dist = float64_boundary(moments)(
        LOSSES[kind](one, p * one, r * one, s * one),
        one * kind.endswith("backward"),
        log_cut * one,
        height * one,
        (z.real[:, None], z.imag[:, None]),
    )
    return re[:, 0] + 1j * im[:, 0], dist


def pieces(kind, p, r, s):
    """Mixtures and the parts of the line on which they count; zeroed ones meet."""
    sampled, (upper, lower) = precise.sampled_pair(p, s), precise.zeroed_pairs(p, r, s)
    whole, above, below = (-np.inf, np.inf), (s / 2, np.inf), (-np.inf, s / 2)
    if kind == "antipodal":
        return [(*precise.symmetric_pair(p, r, s), 0.0, np.inf)]
    if kind == "symmetric":
        return [(*sampled, *above)]
    if kind.startswith("zeroed"):
        return [(*upper, *above), (*lower, *below)]
    return [(*sampled, *whole)]


def integrated(kind, p, r, s, z):
    """``M(z) - 1`` from each definition, 20 digits, on the real line."""
    z = mpmath.mpc(z)
    far, total = 28 + 3 * (1 + float(z.real)) * s, mpmath.mpf(0)
    for top, bottom, *ends in pieces(kind, p, r, s):
        over, under = precise.density(top), precise.density(bottom)

        def term(x, over=over, under=under):
            a, b = over(x), under(x)
            loss = mpmath.log(a / b)
            forward, backward = a * mpmath.expm1(z * loss), b * mpmath.expm1(-z * loss)
            if kind in ("forward", "zeroed"):
                return forward
            return backward if kind.endswith("backward") else forward + backward

        with mpmath.workdps(20):
            points = mpmath.linspace(*np.clip(ends, -far, far), 24)
            total += mpmath.quad(term, points)
    return complex(total)


# Kind, p, r, s and center; `integrated` there and 3j above it.
CASES = {
    ("forward", 1e-2, 1.0, 1.0, 6.0): (
        *(0.004291059071668739, 0.002751417379539728 + 0.004177368038109385j),
    ),
    ("backward", 1e-2, 1.0, 1.0, 6.0): (
        *(0.003061454222879614, 0.0025382673759775758 + 0.0027096144426309206j),
    ),
    ("symmetric", 1e-2, 1.0, 1.0, 6.0): (
        *(0.006273227396506362, 0.0044418919502238925 + 0.005884676453169387j),
    ),
    ("forward", 0.5, 1.0, 2.0, 2.0): (
        *(20364.32323363792, -0.9750093810845446 - 0.087791322477897j),
    ),
    ("antipodal", 0.1, 0.1, 1.0, 5.0): (
        *(0.007727201861748281, 0.004964343260195579 + 0.008533558820666146j),
    ),
    ("antipodal", 1.0, 1.0, 1.0, 2.0): (
        *(162753.79141900392, -0.9996176488828372 - 0.0024490855388353784j),
    ),
    ("zeroed", 0.3, 0.4, 1.0, 2.0): (
        *(0.12406217672675317, -0.14486682345889942 + 0.1013941151609365j),
    ),
    ("zeroed backward", 0.02, 0.05, 1.5, 4.0): (
        *(7.606926283057332e-05, 4.672859373518534e-05 + 0.0001000570086838454j),
    ),
}


@pytest.mark.parametrize("setting", CASES)
def test_moments_near_the_axis_against_integration(setting):
    value, _ = computed(*setting[:4], setting[4] + np.array([0.0, 3.0j]))
    exact = np.array(CASES[setting])
    # Relative to the summed terms: the losses' mass, and the moment on the axis.
    digits = 1e-9 if setting[0].startswith("zeroed") else 1e-12
    assert np.all(np.abs(value - exact) <= digits * np.abs(exact[0]))


@pytest.mark.slow
@pytest.mark.parametrize("setting", CASES)
def test_recorded_values_equal_the_integral(setting):
    for height, value in zip((0, 3j), CASES[setting], strict=True):
        found = integrated(*setting[:4], complex(setting[4] + height))
        assert abs(found - value) <= 1e-14 * abs(CASES[setting][0])


@pytest.mark.parametrize(("kind", "p", "r", "s", "center"), CASES)
def test_another_path_gives_the_same_far_out(kind, p, r, s, center):
    """Cauchy's theorem: any path that resolves the integrand gives the same."""
    height = np.array([0.0, 0.3, 3.0, 30.0, 300.0, 3000.0])
    other = {"height": 0.85, "log_cut": LOG_CUT - 8}
    _, dist = computed(kind, p, r, s, np.array([complex(center)]), **other)
    z = center + height * (1j + 0.7 * min(dist.right[0], 1.0))
    first, _ = computed(kind, p, r, s, z)
    second, _ = computed(kind, p, r, s, z, **other)
    scale = np.maximum(np.abs(first), 1e-6 * np.abs(first[0]))
    np.testing.assert_array_less(np.abs(first - second), 1e-14 + 1e-8 * scale)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_mass_is_that_of_nonzero_losses(kind):
    p, r, s = 0.3, 0.4, 0.8
    _, dist = computed(kind, p, r, s, np.array([1.0 + 0j]))
    expected = 0.0  # all but the atom at 0, which the halves leave out
    for top, bottom, *ends in pieces(kind, p, r, s):
        counted = top if kind in ("forward", "zeroed") else bottom
        parts = top + bottom if kind in ("symmetric", "antipodal") else counted
        for w, m in parts:
            low, high = (norm.sf(end - float(m)) for end in ends)
            expected += float(w) * (low - high)
    np.testing.assert_allclose(dist.mass[0], expected, rtol=1e-13)


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind != "zeroed"])
def test_the_distribution_is_cut_at_the_given_loss(kind):
    p, s, log_cut = 0.1, 1.5, -50.0
    _, dist = computed(kind, p, 0.5, s, np.array([1.0 + 0j]), log_cut=log_cut)
    used = np.isfinite(dist.end_log_weight)
    if kind == "forward":
        # To the left losses are 0, and Q's density is e^-40.5 at the end.
        np.testing.assert_allclose(dist.end_log_weight[0], -40.5, atol=0.2)
        used[0] = False
    assert np.all(dist.end_log_weight[used] < log_cut + 3)
    # losses at the nodes lie between those at the cuts
    assert dist.loss[0].max() <= dist.end_loss.max() + 1e-6


def test_the_exchanged_moment_is_no_less_than_its_quadrature():
    rng, size = np.random.default_rng(2), 60
    p, outer = (10 ** rng.uniform(-6, 0, size) for _ in range(2))
    p[::9], outer[::2] = 1.0, 1.0
    s = 10 ** rng.uniform(-1.7, 1.3, size)
    count = np.round(10 ** rng.uniform(0.3, 6, size))
    group = Group(SampledGaussianLoss(outer[None], p[None], s[None]), count[None])
    c = 10 ** rng.uniform(-2, 3, (6, size))
    with np.errstate(all="ignore"):
        cut = -60.0 - np.log(count)
        steps = steps_of(np, group, 0 * s, cut, 112)
        bound = exchanged_moments(np, c, steps)
        rule = MomentRule("backward", FINE)
        least = np.array([log_moment(row, (group,), rule)[0] for row in c])
    known = np.isfinite(bound)
    assert known.mean() > 0.7
    assert np.all((bound >= least)[known])
