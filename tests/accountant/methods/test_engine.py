"""Engines, chunks, threads and the caller's flags do not change answers."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant._engine import in_threads, num_cores, using_engine
from jaxdp_episodic.accountant.methods import engine as accounting_engine

# These tests are about the Rényi bounds.
rdp_epsilon = functools.partial(jde.epsilon, method="rdp")
rdp_delta = functools.partial(jde.delta, method="rdp")

ENGINES = ("numpy", "jax")
MANY = 4096 + 1


def settings(size):
    """Rates and noises of `size` different settings of all regimes."""
    rng = np.random.default_rng(12)
    rates = 10 ** rng.uniform(-6, 0, MANY)
    noises = 10 ** rng.uniform(-0.5, 2, MANY)
    rates[::97], noises[5::101], noises[3::89] = 1.0, np.inf, 0.0
    return rates[:size], noises[:size]


def step(rate, noise):
    sampling = jde.Poisson("user", sampling_probability=rate)
    return jde.GaussianStep(sampling, noise_multiplier=noise)


def answers(engine):
    """Answers to every kind of question; on JAX, which compiles each, to a few."""
    with using_engine(engine):
        return list(questions() if engine == "numpy" else few_questions())


def few_questions():
    yield jde.rdp(step(*settings(8)), 7.5, direction="forward")
    yield jde.rdp(step(1e-6, 0.5), 300.0, direction="forward")
    yield jde.privacy_profile(step(*settings(20)), 0.01)


def questions():
    yield from few_questions()
    grid = step(*settings(20))
    nested = jde.GaussianStep(
        jde.MultistageSampling(
            jde.Poisson("group", sampling_probability=[1e-3, 0.1]),
            jde.WithoutReplacement("user", size=1, population=7),
        ),
        noise_multiplier=1.3,
        clip_unit="group",
    )
    fixed_size = jde.GaussianStep(
        jde.WithoutReplacement("user", size=3, population=1000),
        noise_multiplier=0.8,
        neighboring_relation="replace_one",
    )
    yield jde.rdp(grid, [1 + 1e-6, 300.0], direction="backward")
    yield rdp_epsilon(grid, delta=1e-12, num_steps=1000)
    yield rdp_delta(grid, epsilon=0.3, num_steps=1000)
    yield rdp_epsilon(step(1e-12, 0.5), delta=1e-9, num_steps=10**7)
    yield rdp_epsilon(fixed_size, delta=1e-7, num_steps=10)
    yield jde.privacy_profile(nested, [0.0, 0.5])


def identical(ours, theirs):
    return all(
        isinstance(a, np.ndarray | np.float64)
        and a.dtype == b.dtype == np.float64
        and a.tobytes() == b.tobytes()
        for a, b in zip(ours, theirs, strict=True)
    )


def x64_is_on():
    """Whether the caller's new arrays are float64, which the flag decides."""
    return jnp.asarray(np.float64(1)).dtype == jnp.float64


@pytest.fixture(scope="module")
def reference():
    return {engine: answers(engine) for engine in ENGINES}


@pytest.mark.slow
def test_engines_agree_on_every_question(reference):
    with using_engine("jax"):
        for ours, theirs in zip(questions(), reference["numpy"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    run = {"num_steps": 1000, "delta": 1e-6}
    exact = [jde.epsilon(step(*settings(20)), engine=e, **run) for e in ENGINES]
    np.testing.assert_allclose(*exact, rtol=2e-6)  # each has an error of 1e-6


@pytest.mark.slow
def test_flags_and_engines_are_per_thread(reference):
    def with_flag(enabled, engine):
        with jax.enable_x64(enabled):
            found = answers(engine)
            return found, x64_is_on()

    flags, engines = [False, True, True, False] * 2, [*ENGINES * 3, "jax", "jax"]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(with_flag, flags, engines))
    for (found, after), enabled, engine in zip(results, flags, engines, strict=True):
        assert after == enabled
        assert identical(found, reference[engine])


class TestCallersFlag:
    @pytest.mark.few(2)
    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("enabled", [False, True])
    def test_flag_is_unchanged_and_changes_nothing(self, enabled, engine, reference):
        with jax.enable_x64(enabled):
            found = answers(engine)
            assert x64_is_on() == enabled
        assert identical(found, reference[engine])

    @pytest.mark.parametrize("enabled", [False, True])
    def test_flag_is_unchanged_by_an_error(self, enabled):
        with jax.enable_x64(enabled):
            with pytest.raises(ValueError, match="delta"):
                rdp_epsilon(step(0.1, 1.0), delta=2.0, num_steps=1)
            with pytest.raises(ValueError, match="orders"):
                jde.rdp(step(0.1, 1.0), 0.5)
            assert x64_is_on() == enabled


def settings_of(size):
    return step(*settings(size))


def epsilon_of(asked):
    return rdp_epsilon(asked, delta=1e-6, num_steps=300)


def rdp_of(asked):
    return jde.rdp(asked, 5.5, direction="forward")


def delta_of(asked):
    return rdp_delta(asked, epsilon=1.0, num_steps=300)


class TestChunks:
    @pytest.mark.parametrize("size", [1, 8, 9, 64, 65, 513])
    def test_every_setting_is_answered_in_its_place(self, size, engine):
        seen = []

        def kernel(part):
            (numbers, table) = part
            seen.append(numbers.shape[-1])
            return numbers + table.sum(axis=0), table[1]

        numbers, table = np.arange(size), np.arange(3 * size).reshape(3, size)
        sizes = accounting_engine.Chunks(64, (8, 64), (8, 64))
        both = accounting_engine.in_chunks(kernel, (numbers, table), sizes)
        np.testing.assert_array_equal(both[0], numbers + table.sum(axis=0))
        np.testing.assert_array_equal(both[1], table[1])
        if engine == "jax":  # each is compiled
            assert set(seen) == {8 if size <= 8 else 64}
        else:
            assert sum(seen) == size and max(seen) <= 64

    def test_any_number_of_workers_gives_the_same(self, monkeypatch):
        found = rdp_of(settings_of(600))
        for cores in (1, 3):
            monkeypatch.setattr(
                accounting_engine, "num_cores", lambda cores=cores: cores
            )
            np.testing.assert_array_equal(rdp_of(settings_of(600)), found)

    def test_results_are_fresh_arrays(self):
        for question in (rdp_of, epsilon_of, delta_of):
            values = question(settings_of(9))
            assert values.flags.writeable and values.flags.c_contiguous
            values[:] = -1
            assert np.all(question(settings_of(9)) >= 0)

    def test_any_shape_equals_the_flat_grid(self):
        rates, noises = settings(240)
        flat, shape = epsilon_of(step(rates, noises)), (3, 4, 4, 5)
        values = epsilon_of(step(rates.reshape(shape), noises.reshape(shape)))
        assert values.shape == shape
        np.testing.assert_array_equal(values.reshape(-1), flat)
        np.testing.assert_array_equal(flat == 0, np.isinf(noises))
        np.testing.assert_array_equal(np.isposinf(flat), noises == 0)


@pytest.mark.parametrize(
    "setting",
    [
        functools.partial(jax.numpy_rank_promotion, "raise"),
        # Panels computed in 16 bits would be wrong, and epsilon too small.
        functools.partial(jax.default_matmul_precision, "BF16_BF16_F32"),
    ],
)
def test_a_callers_array_settings_do_not_matter(engine, setting):
    expected = rdp_of(settings_of(9))
    with setting():
        got = rdp_of(settings_of(9))
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
            sizes = accounting_engine.Chunks(9, (2,), (2,))
            with using_engine("jax"):
                (found,) = accounting_engine.in_chunks(kernel, np.arange(9.0), sizes)
        np.testing.assert_array_equal(found, np.arange(9.0))
        assert len(seen) == 2 * 5
        assert seen[1::2] == [wanted] * 5


def test_threads_share_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)), raising=False)

    def inner(_):
        return in_threads(lambda _: num_cores(), [0, 1], 5)

    assert in_threads(inner, range(3), 3) == [[2, 2]] * 3
    assert in_threads(lambda _: num_cores(), [0] * 30, 24) == [1] * 30
    assert num_cores() == 12
