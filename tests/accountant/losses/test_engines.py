"""Kernels of mechanisms that compile give the same on both engines."""

from __future__ import annotations

import numpy as np
import pytest

from jaxdp_episodic.accountant._engine import (
    float64_boundary,
    jitted,
    on_jax,
    using_engine,
)
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.independent_episodes import (
    IndependentEpisodesLoss,
)
from jaxdp_episodic.accountant.losses.loss_nodes import NodeRule
from jaxdp_episodic.accountant.losses.people import PeopleLoss
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule, Quadrature
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.numerics.complex_exponentials import sum_expm1
from jaxdp_episodic.accountant.numerics.loops import at, map_arrays

SIZE = 6
RNG = np.random.default_rng(6)
OUTER, RATE, INNER = 10 ** RNG.uniform(-4, 0, (3, SIZE))
SHIFT = 10 ** RNG.uniform(-1, 0.5, SIZE)
Z = np.outer([-0.5, 0.2, 0.6], np.ones(SIZE)), np.full((3, SIZE), 1.0)
LOSSES = {
    "sampled": SampledGaussianLoss(OUTER, RATE, SHIFT),
    "swapped": SwappedGaussianLoss(OUTER, RATE, SHIFT),
    "antipodal": AntipodalGaussianLoss(OUTER, RATE, INNER, SHIFT),
    "episodes": IndependentEpisodesLoss(OUTER, RATE, SHIFT, np.full(SIZE, 3.0)),
}


def tails(loss):
    return loss.log_tails(np.linspace(0, 2, SIZE))


def forward_excess(loss):
    return loss.log_excess(
        np.linspace(0.5, 40, SIZE), MomentRule("forward", Quadrature(32, 16), True)
    )


def backward_excess(loss):
    return loss.log_excess(
        np.linspace(0.5, 40, SIZE), MomentRule("backward", Quadrature(32, 16))
    )


def nodes(loss):
    cut = np.full((1, SIZE), -100.0)
    backward = np.arange(SIZE) % 2.0
    found = loss.nodes(NodeRule(backward, cut, np.ones((1, SIZE)), 96, 3))
    # Quantities of the nodes; the nodes' order and number depend on the engine.
    weight, place = at((found.weight, found.loss), 0)
    z = Z[0] + 0 * found.mass[0], Z[1] + 0 * found.mass[0]
    return sum_expm1(z, weight, place), found.mass, found.right, found.left


# Those of one profile are compiled by the tests of the engine and of derivatives, too.
QUICK = [("antipodal", tails), ("episodes", tails)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name, kernel",
    [
        pytest.param(
            name, kernel, marks=[pytest.mark.slow] * ((name, kernel) not in QUICK)
        )
        for name in LOSSES
        for kernel in (tails, forward_excess, backward_excess, nodes)
    ],
)
def test_engines_agree(name, kernel):
    found = {}
    for engine in ("numpy", "jax"):
        leaves = found[engine] = []
        with using_engine(engine):
            map_arrays(leaves.append, float64_boundary(kernel)(LOSSES[name]))
    for ours, theirs in zip(*found.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-13)


def test_other_mechanisms_use_numpy_or_are_refused_by_name():
    parts = (np.ones(SIZE),), (np.zeros(SIZE),), (np.log1p(-RATE),)
    loss = PeopleLoss(np.ones(SIZE), np.ones(SIZE), SHIFT, *parts)
    with using_engine("jax"):
        found = float64_boundary(tails)(loss)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(found, tails(loss))
    with pytest.raises(NotImplementedError, match="PeopleLoss is computed by NumPy"):
        on_jax(jitted(tails), loss)
