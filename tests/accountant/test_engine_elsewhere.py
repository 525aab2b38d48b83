"""Questions within a caller's jit, transfer guard or forked process."""

import os
import sys

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant import _engine

float64_square = _engine.float64_boundary(lambda x: x * x)


def step(noise=1.0):
    scheme = jde.Poisson("user", sampling_probability=0.01)
    return jde.GaussianStep(scheme, noise_multiplier=noise)


@pytest.mark.parametrize("named", ["delta", "num_steps", "noise_multiplier"])
def test_a_traced_number_is_refused_by_name(named):
    jax = pytest.importorskip("jax")

    def ask(x):
        known = {"delta": 1e-5, "num_steps": 10, "noise_multiplier": 1.0, named: x}
        return jde.epsilon(step(known.pop("noise_multiplier")), **known)

    with pytest.raises(TypeError, match=f"{named} must be a known number.*jax.jit"):
        jax.make_jaxpr(ask)(1)


def on_numpy():
    return jde.epsilon(step(), delta=1e-5, num_steps=10, method="rdp", engine="numpy")


def on_jax():
    with _engine.using_engine("jax"):
        return float64_square(np.float64(1 / 3))


@pytest.mark.parametrize("ask", [on_numpy, on_jax])
def test_known_numbers_are_answered_inside_a_trace_and_under_a_transfer_guard(ask):
    jax = pytest.importorskip("jax")
    found = []
    with jax.transfer_guard("disallow"):
        found.append(ask())

    def inside(x):
        found.append(ask())
        return x

    jax.make_jaxpr(inside)(1.0)
    np.testing.assert_array_equal(found, ask())


def _with_branches(x):
    """1 / x and the square root of x, where 0 and -1 are not selected."""
    jnp = pytest.importorskip("jax").numpy
    return jnp.where(x > 0, 1 / x, 0.0), jnp.where(x >= 0, jnp.sqrt(x), 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["debug_nans", "debug_infs"])
def test_branches_that_are_not_taken_may_be_infinite_or_nan(name):
    """A caller's NaN check must not fail on our intermediate values."""
    jax = pytest.importorskip("jax")
    kernel = _engine.float64_boundary(_with_branches)
    x = np.array([-1.0, 0.0, 4.0])

    def answers():
        rdp = jde.rdp(step([0.0, 1.0, np.inf]), [2.0, 1e6], engine="jax")
        with _engine.using_engine("jax"):
            return kernel(x), _engine.float64_boundary(_nothing_known)(x), rdp

    def check(found):
        (inverse, root), unknown, rdp = found
        np.testing.assert_array_equal(inverse, [0, 0, 0.25])
        np.testing.assert_array_equal(root, [2, 0, 2])
        assert np.isnan(unknown[0]) and np.isinf(unknown[1]) and unknown[2] == 0.25
        assert np.isinf(rdp[0]).all() and np.isfinite(rdp[1:]).all()

    with getattr(jax, name)(True):
        check(answers())
        # The caller's code is checked before and after.
        with pytest.raises(FloatingPointError):
            jax.numpy.log(-1.0 if name == "debug_nans" else 0.0)
    check(answers())


def _nothing_known(x):
    """An answer that is NaN or infinite."""
    jnp = pytest.importorskip("jax").numpy
    return jnp.where(x < 0, jnp.nan, 1 / x)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
def test_a_forked_process_answers_on_numpy():
    pytest.importorskip("jax")
    assert not _engine._is_fork_of_jax
    expected = jde.epsilon(step(), delta=1e-5, num_steps=10)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with _engine.using_engine("auto"):
                same = _engine.choose_engine(10**9, 1) == "numpy"
            answer = jde.epsilon(step(), delta=1e-5, num_steps=10, engine="numpy")
            code = 0 if same and abs(answer - expected) < 1e-9 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert "jax" in sys.modules
