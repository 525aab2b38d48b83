"""Engines: one source for every formula, float64 inside, NumPy results outside.

A process that compiles much does not exhaust its memory mappings.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxdp_episodic as jde
from designs import sampled as step
from jaxdp_episodic.accountant import _engine, _kernel_cache
from jaxdp_episodic.accountant._engine import (
    Chunks,
    choose_engine,
    engine_name,
    float64_boundary,
    in_chunks,
    jitted,
    using_engine,
)
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.numerics.loops import namespace
from oracles.mechanisms import SHIPPED


def log1p(x):
    return namespace(x).log1p(x)


def test_small_offsets_keep_their_digits(engine):
    value = float64_boundary(log1p)(1e-12)
    assert isinstance(value, np.ndarray) and value.dtype == np.float64
    assert abs(float(value) / 1e-12 - 1) < 1e-11
    for number in (3, True, np.float32(3), np.arange(3, dtype="i1")):
        seen = []
        float64_boundary(lambda x, seen=seen: seen.append(x.dtype) or x)(number)
        assert seen == [np.float64]


def test_trees_and_dataclasses_go_in_and_out(engine):
    out = float64_boundary(lambda tree: {"sum": tree["a"] + tree["b"][0]})(
        {"a": 1, "b": (2,)}
    )
    assert type(out["sum"]) is np.ndarray and out["sum"] == 3.0
    loss = SampledGaussianLoss(np.ones(1), np.full(1, 0.5), np.full(1, 2))
    double = float64_boundary(lambda loss: loss.map(lambda field: 2 * field))(loss)
    assert isinstance(double, SampledGaussianLoss)
    assert [type(field) for field in double.fields] == [np.ndarray] * 3
    assert [field.tolist() for field in double.fields] == [[2.0], [1.0], [4.0]]


def test_jax_distinguishes_mechanisms():
    """Equal trees with unequal hashes collide in JAX's caches one time in a hundred."""
    ones = [loss for loss in SHIPPED.values() if loss.compiles]
    same = functools.partial(_engine.on_jax, jitted(lambda loss: loss))
    assert [type(same(loss)) for loss in ones] == [type(loss) for loss in ones]
    for one, other in itertools.combinations(ones, 2):
        assert jax.tree.structure(one) != jax.tree.structure(other)


def test_a_tracer_raises_rather_than_being_rounded(engine):
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(float64_boundary(log1p))(0.5)


# --- Which engine ---


def spaces(function):
    """The namespaces that a kernel sees when it is called by a wrapper."""
    seen = []

    def kernel(x):
        seen.append(namespace(x))
        return x

    function(kernel)
    return seen


def test_the_requested_engine_runs_the_kernel(monkeypatch):
    def call(kernel):
        return float64_boundary(kernel)(1.0)

    with using_engine("numpy"):
        assert spaces(call) == [np]
        assert spaces(lambda kernel: _engine.on_jax(jitted(kernel), 1.0)) == [jnp]
        with using_engine("jax"):
            assert spaces(call) == [jnp]
        assert engine_name() == "numpy"
    for name, space in (("jax", jnp), ("numpy", np)):
        monkeypatch.setenv(_engine.VARIABLE, name)
        assert engine_name() == name and spaces(call) == [space]


def test_by_default_small_arguments_use_numpy(monkeypatch):
    monkeypatch.delenv(_engine.VARIABLE, raising=False)
    monkeypatch.setattr(_engine, "_COMPILED_ELEMENTS", 10)

    def call(size):
        return lambda kernel: float64_boundary(kernel)(np.zeros(size))

    assert spaces(call(9)) == [np] and spaces(call(10)) == [jnp]
    assert (choose_engine(4, 5), choose_engine(5, 5)) == ("numpy", "jax")
    with using_engine("numpy"):
        assert spaces(call(10)) == [np] and choose_engine(5, 5) == "numpy"


def test_compiled_kernels_are_used_at_once(monkeypatch):
    monkeypatch.delenv(_engine.VARIABLE, raising=False)
    # A quarter of the time to compile is that of 100 settings.
    some = _engine.Kernel("some", numpy_seconds=0.1, compile_seconds=40.0, least=10)

    def first_size(*what):
        kernel = some._replace(what=what)
        sizes = (9, 10, 99, 100)
        return next(n for n in sizes if choose_engine(n, kernel) == "jax")

    monkeypatch.setattr(_engine, "_compiled", set())
    assert (first_size(), first_size()) == (100, 10)
    with _engine.asking_together(99):
        assert first_size() == 100  # whatever is compiled
    with _engine.asking_together(399, once=True):
        assert first_size() == 100
    with _engine.asking_together(400, once=True):
        assert first_size() == 10
    with _engine.asking_together(100):
        assert first_size("other") == 10


def test_unknown_engines_are_refused(monkeypatch):
    monkeypatch.setenv(_engine.VARIABLE, "torch")
    with pytest.raises(ValueError, match="JAXDP_EPISODIC_ENGINE must be one of"):
        jde.epsilon(step(0.01, 1.0), num_steps=2, delta=1e-5)


def test_small_questions_need_no_jax():
    code = """
import sys
import jaxdp_episodic as jde
step = jde.GaussianStep(
    jde.Poisson("example", sampling_probability=0.3), noise_multiplier=1.0
)
for method in ("exact", "rdp", "pld"):
    jde.epsilon(step, num_steps=5, delta=1e-5, method=method)
assert "jax" not in sys.modules
"""
    environment = {k: v for k, v in os.environ.items() if k != _engine.VARIABLE}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_mappings_are_not_counted_at_every_call(monkeypatch, tmp_path):
    cleared, clock = [], itertools.count(100.0, 0.5)
    limit = tmp_path / "limit"
    limit.write_text("1")
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(1))
    monkeypatch.setattr(_engine, "_MAPPINGS_LIMIT", limit)
    monkeypatch.setattr(_engine, "_MAPPINGS", Path(__file__))
    monkeypatch.setattr(_engine, "_next_check", 0.0)
    monkeypatch.setattr(_engine, "_CHECK_INTERVAL", 2.0)
    monkeypatch.setattr(_engine.time, "monotonic", lambda: next(clock))
    for _ in range(9):
        _engine.clear_kernels_if_crowded()
    assert len(cleared) == 3
    # Other systems have no limit.
    monkeypatch.setattr(_engine, "_MAPPINGS_LIMIT", tmp_path / "missing")
    for _ in range(9):
        _engine.clear_kernels_if_crowded()
    assert len(cleared) == 3


def test_a_callers_process_keeps_kernels_for_a_while(tmp_path, monkeypatch):
    """Only within the block, and only without a cache of the caller."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    least = "jax_persistent_cache_min_compile_time_secs"
    ours, limit = jax.config.jax_compilation_cache_dir, getattr(jax.config, least)

    def kept():
        return len(list((tmp_path / "jaxdp-episodic" / "kernels").glob("*-cache")))

    with _kernel_cache.keeping_kernels():  # the tests' own cache
        assert jax.config.jax_compilation_cache_dir == ours
    assert not list(tmp_path.iterdir())
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update(least, 0)
    try:
        with _kernel_cache.keeping_kernels():
            jax.jit(lambda x: x * 3.25 + 1.5)(np.float32(1))
            number = kept()
        assert number > 0
        jax.jit(lambda x: x * 4.25 + 1.5)(np.float32(1))
        assert kept() == number and jax.config.jax_compilation_cache_dir is None
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")  # switched off
        with _kernel_cache.keeping_kernels():
            jax.jit(lambda x: x * 5.25 + 1.5)(np.float32(1))
        assert kept() == number
    finally:
        jax.config.update("jax_compilation_cache_dir", ours)
        jax.config.update(least, limit)
        compilation_cache.reset_cache()


def test_an_option_that_xla_lacks_is_left_out(monkeypatch):
    assert _engine._cpu_options()
    monkeypatch.setattr(_engine, "_CPU_OPTIONS", {"xla_cpu_no_such_option": False})
    assert _engine._cpu_options.__wrapped__() == {}


# --- Questions within a caller's jit, transfer guard or forked process ---


float64_square = _engine.float64_boundary(lambda x: x * x)


def on_numpy():
    run = {"delta": 1e-5, "num_steps": 10, "engine": "numpy"}
    return jde.epsilon(step(0.01, 1.0), **run)


def on_jax():
    with _engine.using_engine("jax"):
        return float64_square(np.float64(1 / 3))


@pytest.mark.parametrize("ask", [on_numpy, on_jax])
def test_known_numbers_are_answered_inside_a_trace_and_under_a_transfer_guard(ask):
    found = []
    with jax.transfer_guard("disallow"):
        found.append(ask())

    def inside(x):
        found.append(ask())
        return x

    jax.make_jaxpr(inside)(1.0)
    np.testing.assert_array_equal(found, ask())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["debug_nans", "debug_infs"])
def test_branches_that_are_not_taken_may_be_infinite_or_nan(name):
    """A caller's NaN check must not fail on our intermediate values."""

    def kernel(x):
        """Where 0 and -1 are not selected, and where the answer itself is unknown."""
        inverse = jnp.where(x > 0, 1 / x, 0.0)
        root = jnp.where(x >= 0, jnp.sqrt(x), 2.0)
        return inverse, root, jnp.where(x < 0, jnp.nan, 1 / x)

    def check():
        rdp = jde.rdp(step(0.01, [0.0, 1.0, np.inf]), [2.0, 1e6], engine="jax")
        with _engine.using_engine("jax"):
            found = float64_boundary(kernel)(np.array([-1.0, 0.0, 4.0]))
        expected = [[0, 0, 0.25], [2, 0, 2], [np.nan, np.inf, 0.25]]
        np.testing.assert_array_equal(found, expected)
        assert np.isinf(rdp[0]).all() and np.isfinite(rdp[1:]).all()

    with getattr(jax, name)(True):
        check()
        # The caller's code is checked before and after.
        with pytest.raises(FloatingPointError):
            jax.numpy.log(-1.0 if name == "debug_nans" else 0.0)
    check()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
def test_a_forked_process_answers_on_numpy():
    assert not _engine._is_fork_of_jax
    expected = on_numpy()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with _engine.using_engine("auto"):
                same = _engine.choose_engine(10**9, 1) == "numpy"
            code = 0 if same and abs(on_numpy() - expected) < 1e-9 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert "jax" in sys.modules


# --- Engines, chunks, threads and flags do not change answers ---


ENGINES = ("numpy", "jax")
MANY = 4096 + 1


def settings(size):
    """Rates and noises of `size` different settings of all regimes."""
    rng = np.random.default_rng(12)
    rates = 10 ** rng.uniform(-6, 0, MANY)
    noises = 10 ** rng.uniform(-0.5, 2, MANY)
    rates[::97], noises[5::101], noises[3::89] = 1.0, np.inf, 0.0
    return rates[:size], noises[:size]


def answers(engine):
    """Answers to a few questions; JAX compiles each."""
    with using_engine(engine):
        return [
            jde.rdp(step(*settings(8)), 7.5, direction="forward"),
            jde.rdp(step(1e-6, 0.5), 300.0, direction="forward"),
            jde.privacy_profile(step(*settings(20)), 0.01),
        ]


def identical(ours, theirs):
    return all(
        a.dtype == b.dtype == np.float64 and a.tobytes() == b.tobytes()
        for a, b in zip(ours, theirs, strict=True)
    )


def x64_is_on():
    """Whether the caller's new arrays are float64, which the flag decides."""
    return jnp.asarray(np.float64(1)).dtype == jnp.float64


def test_flags_and_engines_are_per_thread():
    """No answer depends on the caller's flag, which stays as it is."""
    reference = {engine: answers(engine) for engine in ENGINES}
    for ours, theirs in zip(*reference.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)

    def with_flag(enabled, engine):
        with jax.enable_x64(enabled):
            found = answers(engine)
            with pytest.raises(ValueError, match="delta"), using_engine(engine):
                jde.epsilon(step(0.1, 1.0), delta=2.0, num_steps=1)
            return found, x64_is_on()

    flags, engines = [False, True, True, False], [*ENGINES, *ENGINES]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(with_flag, flags, engines))
    for (found, after), enabled, engine in zip(results, flags, engines, strict=True):
        assert after == enabled
        assert identical(found, reference[engine])


def rdp_of(size):
    return jde.rdp(step(*settings(size)), 5.5, direction="forward")


class TestChunks:
    @pytest.mark.parametrize("size", [1, 8, 9, 64, 65, 513])
    def test_every_setting_is_answered_in_its_place(self, size, engine):
        seen = []

        def kernel(numbers, table):
            seen.append(numbers.shape[-1])
            return numbers + table.sum(axis=0), table[1]

        numbers, table = np.arange(size), np.arange(3 * size).reshape(3, size)
        sizes = Chunks(64, (8, 64), (8, 64))
        both = in_chunks(kernel, (numbers, table), sizes)
        np.testing.assert_array_equal(both[0], numbers + table.sum(axis=0))
        np.testing.assert_array_equal(both[1], table[1])
        if engine == "jax":  # each is compiled
            assert set(seen) == {8 if size <= 8 else 64}
        else:
            assert sum(seen) == size and max(seen) <= 64

    def test_any_number_of_workers_gives_the_same(self, monkeypatch):
        found = rdp_of(600)
        for cores in (1, 3):
            monkeypatch.setattr(_engine, "num_cores", lambda cores=cores: cores)
            np.testing.assert_array_equal(rdp_of(600), found)
        assert found.flags.writeable and found.flags.c_contiguous


@pytest.mark.parametrize(
    "setting",
    [
        functools.partial(jax.numpy_rank_promotion, "raise"),
        # Panels computed in 16 bits would be wrong, and epsilon too small.
        functools.partial(jax.default_matmul_precision, "BF16_BF16_F32"),
    ],
)
def test_a_callers_array_settings_do_not_matter(engine, setting):
    expected = rdp_of(9)
    with setting():
        got = rdp_of(9)
    np.testing.assert_array_equal(got, expected)


def test_threads_compute_on_the_callers_device():
    """The default device is set per thread; the pool's threads inherit it."""
    device, seen = jax.devices()[-1], []

    def kernel(part):
        seen.append(jnp.zeros(1).devices())
        seen.append(jax.config.jax_default_device)
        return (part,)

    for wanted in (device, None):
        seen.clear()
        with jax.default_device(wanted):
            sizes = Chunks(9, (2,), (2,))
            with using_engine("jax"):
                (found,) = in_chunks(kernel, (np.arange(9.0),), sizes)
        np.testing.assert_array_equal(found, np.arange(9.0))
        assert len(seen) == 2 * 5
        assert seen[1::2] == [wanted] * 5


def test_threads_share_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)

    def inner(_):
        return _engine.in_threads(lambda _: _engine.num_cores(), [0, 1], 5)

    assert _engine.in_threads(inner, range(3), 3) == [[2, 2]] * 3
    assert _engine.in_threads(lambda _: _engine.num_cores(), [0] * 30, 24) == [1] * 30
    assert _engine.num_cores() == 12
