"""Every kernel that compiles lowers for CUDA and TPU, without a device."""

import functools

import jax
import numpy as np
import pytest

from jaxdp_episodic.accountant import _engine
from jaxdp_episodic.accountant.losses.gaussian import log_gaussian_profile
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.independent_episodes import (
    IndependentEpisodesLoss,
)
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.methods import closed_form
from jaxdp_episodic.accountant.methods.exact import solver
from jaxdp_episodic.accountant.methods.rdp import kernels
from jaxdp_episodic.accountant.methods.rdp.kernels import LARGER
from jaxdp_episodic.accountant.methods.run import Group
from rows import fast_and_slow

SIZE = 4
ONE = np.full((1, SIZE), 0.5)
LOSSES = {
    "sampled": SampledGaussianLoss(ONE, ONE, ONE),
    "swapped": SwappedGaussianLoss(ONE, ONE, ONE),
    "antipodal": AntipodalGaussianLoss(ONE, ONE, ONE, ONE),
    "episodes": IndependentEpisodesLoss(ONE, ONE, ONE, 6 * ONE),
}
NUMBERS = np.full(SIZE, 2.0)


def exact(loss):
    shape = solver.Shape(112, (3,), (True,), False, 32, 32)
    kernel = functools.partial(solver.one_pass, shape=shape)
    return kernel, (*[NUMBERS] * 6, (Group(loss, ONE),), 3.0, 24.0, 0.0)


def rdp(kernel, loss, **static):
    kernel = functools.partial(kernel, block=SIZE, **static)
    return kernel, (NUMBERS, (Group(loss, ONE),))


def single(kernel, loss):
    return kernel, (
        NUMBERS,
        loss.map(lambda field: np.broadcast_to(field, ONE.shape)[0]),
    )


def asked(loss):
    """Kernels of one mechanism with their arguments."""
    yield exact(loss)
    for on_lattice in {False, loss.has_lattice}:
        yield rdp(kernels.best_epsilon, loss, on_lattice=on_lattice)
        yield rdp(kernels.best_log_delta, loss, on_lattice=on_lattice)
        yield rdp(kernels.rdp, loss, on_lattice=on_lattice, direction=LARGER)
    yield rdp(kernels.rdp, loss, on_lattice=False, direction="backward")
    yield single(closed_form.delta_of_profile.__wrapped__, loss)
    yield single(closed_form.epsilon_of_profile.__wrapped__, loss)
    yield single(closed_form.slope_of_profile.__wrapped__, loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", fast_and_slow(LOSSES, "sampled".__eq__))
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
