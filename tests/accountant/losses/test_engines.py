"""Kernels that compile: both engines agree, and CUDA and TPU take them.

No device is needed: programs are lowered for them, not run.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxdp_episodic.accountant import _engine
from jaxdp_episodic.accountant._engine import (
    float64_boundary,
    jitted,
    on_jax,
    using_engine,
)
from jaxdp_episodic.accountant.losses.gaussian import (
    SampledGaussianLoss,
    log_gaussian_profile,
)
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.loss_nodes import NodeRule
from jaxdp_episodic.accountant.losses.people import PeopleLoss
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule, Quadrature
from jaxdp_episodic.accountant.methods import rdp, run as single_steps
from jaxdp_episodic.accountant.methods.exact import solver
from jaxdp_episodic.accountant.methods.rdp import LARGER
from jaxdp_episodic.accountant.methods.run import Group
from jaxdp_episodic.accountant.numerics.loops import at, map_arrays
from jaxdp_episodic.accountant.numerics.special import sum_expm1
from rows import fast_and_slow

SIZE = 6
RNG = np.random.default_rng(6)
OUTER, RATE, INNER = 10 ** RNG.uniform(-4, 0, (3, SIZE))
SHIFT = 10 ** RNG.uniform(-1, 0.5, SIZE)
Z = np.outer([-0.5, 0.2, 0.6], np.ones(SIZE)), np.full((3, SIZE), 1.0)
LOSSES = {
    "sampled": SampledGaussianLoss(OUTER, RATE, SHIFT),
    "swapped": SwappedGaussianLoss(OUTER, RATE, SHIFT),
    "antipodal": AntipodalGaussianLoss(OUTER, RATE, INNER, SHIFT),
}


# --- Both engines agree ---


def tails(loss):
    return loss.log_tails(np.linspace(0, 2, SIZE))


def excess(loss):
    asked = (("forward", True), ("backward", False))
    rules = (MomentRule(way, Quadrature(32, 16), slopes) for way, slopes in asked)
    return [loss.log_excess(np.linspace(0.5, 40, SIZE), rule) for rule in rules]


def nodes(loss):
    cut = np.full((1, SIZE), -100.0)
    backward = np.arange(SIZE) % 2.0
    found = loss.nodes(NodeRule(backward, cut, np.ones((1, SIZE)), 96, 3))
    # Quantities of the nodes; the nodes' order and number depend on the engine.
    weight, place = at((found.weight, found.loss), 0)
    z = Z[0] + 0 * found.mass[0], Z[1] + 0 * found.mass[0]
    return sum_expm1(z, weight, place), found.mass, found.right, found.left


# Those of one profile are compiled by the tests of the engine and of derivatives, too.
@pytest.mark.parametrize(
    "name, kernel",
    fast_and_slow(
        [(name, kernel) for name in LOSSES for kernel in (tails, excess, nodes)],
        lambda name, kernel: (name, kernel) == ("antipodal", tails),
    ),
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


# --- Other platforms ---


NUMBERS, ROW = np.full(SIZE, 2.0), np.full((1, SIZE), 0.5)


def asked(loss):
    """Kernels of one mechanism with their arguments."""
    loss = loss.map(lambda field: np.broadcast_to(field, SIZE))
    groups = (Group(loss.map(lambda field: field[None]), ROW),)
    shape = solver.Shape(112, 32, 32)
    kernel = functools.partial(solver.one_pass, shape=shape)
    yield kernel, (3.0, 24.0, 0.0, *[NUMBERS] * 6, groups)
    rules = [MomentRule("backward", rdp.FINE)]
    for quadrature in {rdp.FINE, rdp.LATTICE if loss.has_lattice else rdp.FINE}:
        rules += [MomentRule(LARGER, quadrature, slopes) for slopes in (False, True)]
    for rule in rules:
        kernel = functools.partial(rdp.moments, rule=rule, block=SIZE)
        yield kernel, (NUMBERS, groups)
    for kernel in (
        single_steps.delta_of_profile,
        single_steps.slope_of_profile,
    ):
        yield kernel.__wrapped__, (NUMBERS, loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_kernels_of_mechanisms_lower(name):
    for kernel, arguments in asked(LOSSES[name]):
        lower(kernel, arguments)


def test_the_gaussian_profile_lowers():
    lower(log_gaussian_profile, (NUMBERS, NUMBERS))


def lower(kernel, arguments):
    _engine.register_dataclasses(arguments)
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        jitted = jax.jit(lambda *given: kernel(*given))
        lowered = jax.export.export(jitted, platforms=("cuda", "tpu"))(*arguments)
    assert set(lowered.platforms) == {"cuda", "tpu"}
