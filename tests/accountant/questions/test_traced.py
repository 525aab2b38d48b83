"""Functions within JAX programs: the host's numbers under all transformations."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm

import jaxdp_episodic as jde
from designs import difference
from jaxdp_episodic import traced
from jaxdp_episodic.accountant.describe.spec import mapped
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.questions import dominating_pair, traced as in_jax
from jaxdp_episodic.accountant.questions.calibration import Question

DELTA = 1e-5


def step(noise: Any, rate: Any = 0.01, **more: Any) -> jde.GaussianStep:
    return jde.GaussianStep(
        jde.Poisson("example", sampling_probability=rate),
        noise_multiplier=noise,
        **more,
    )


def epsilon(
    noise: Any,
    rate: Any = 0.01,
    num_steps: Any = 1,
    delta: Any = DELTA,
    method: str = "exact",
) -> Any:
    """By default of one step, which needs no integral."""
    asked = {"delta": delta, "num_steps": num_steps, "method": method}
    return traced.epsilon(step(noise, rate), **asked)


def on_host(
    noise: Any, rate: Any = 0.01, num_steps: Any = 1, delta: Any = DELTA, **asked: Any
) -> Any:
    """The plain function, at numbers rounded to float32."""
    noise, rate = (np.asarray(a, np.float64) for a in (noise, rate))
    asked |= {"delta": delta, "num_steps": num_steps, "engine": "numpy"}
    return jde.epsilon(step(noise, rate), **asked)


def float32(*numbers):
    return jnp.asarray(numbers, jnp.float32)


NOISES = float32(0.6, 0.8, 1.1)


@pytest.fixture
def in_float32() -> Iterator[None]:
    """JAX with x64 off, whatever the flag of these tests."""
    with jax.enable_x64(False):
        yield


# --- Values ---


@pytest.mark.usefixtures("in_float32")
def test_subnormal_numbers_are_kept() -> None:
    """JAX flushes them to 0, and a rate of 0 loses nothing."""

    def delta(rate: Any, noise: Any = 2.0) -> Any:
        return traced.delta(step(noise, rate), epsilon=0.5, num_steps=1)

    rates = np.array([1e-38, 1e-40, 1e-44, 0.0], np.float32)
    found = np.asarray(jax.jit(delta)(rates), np.float64)
    asked = {"epsilon": 0.5, "num_steps": 1, "engine": "numpy"}
    true = jde.delta(step(2.0, rates.astype(np.float64)), **asked)
    assert np.all(found >= true) and found[2] > 0 == found[3]
    with jax.enable_x64(True):
        assert jax.jit(delta)(5e-324) > 0
        assert jax.jit(partial(delta, 5e-324))(2.0) > 0
    # A tiny delta must not become 0, at which no epsilon is finite.
    small = jax.jit(lambda d: epsilon(5.0, delta=d))(np.float32(1e-42))
    assert small < 4
    # Nor an answer that float32 cannot hold.
    tiny = jax.jit(lambda noise: traced.delta(step(noise), epsilon=40.0, num_steps=1))
    assert 0 < jde.delta(step(3.0), epsilon=40.0, num_steps=1) < 1e-60
    assert tiny(jnp.float32(3.0)) == np.finfo(np.float32).tiny

    with pytest.raises(jax.errors.JaxRuntimeError, match="must"):
        jax.block_until_ready(jax.jit(delta)(np.float32(-1e-42)))


@pytest.mark.usefixtures("in_float32")
def test_answers_are_float32_rounded_up() -> None:
    noises = jnp.linspace(0.4, 1.2, 300, dtype=jnp.float32)
    found = jax.jit(epsilon)(noises)
    true = on_host(noises)
    assert found.dtype == jnp.float32 and not found.weak_type
    found = np.asarray(found)
    assert np.all(found >= true)
    # By less than one unit in the last place; rounding to nearest may be too small.
    assert np.all(np.nextafter(found, np.float32(-1)) < true)
    assert np.mean(true.astype(np.float32) < true) > 0.3


def test_known_numbers_stay_float64() -> None:
    target = 1.0 + 1e-12  # as 1 in float32
    found = jax.jit(
        lambda rate: traced.delta(step(0.9, rate), epsilon=2.0, num_steps=1)
    )
    assert float(found(jnp.float32(target))) >= jde.delta(
        step(0.9, 1.0), epsilon=2.0, num_steps=1, engine="numpy"
    )
    answer = epsilon(0.8)  # nothing is traced
    assert isinstance(answer, jax.Array) and answer >= on_host(0.8)
    with jax.enable_x64(True):
        found = jax.jit(epsilon)(NOISES)
        assert found.dtype == jnp.float64
        np.testing.assert_array_equal(found, on_host(NOISES))


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int4])
def test_types_keep_their_value(dtype) -> None:
    """Also those that NumPy lacks; known or traced, in both precisions."""
    noise = jnp.asarray(2, dtype)
    true = on_host(2.0)
    for x64 in (False, True):
        with jax.enable_x64(x64):
            for found in (epsilon(noise), jax.jit(epsilon)(noise)):
                np.testing.assert_allclose(found, true, rtol=2e-7)
                assert found >= true
    assert jde.epsilon(step(noise), delta=DELTA, num_steps=1, engine="numpy") == true


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (True, "must be a number .* traces"),
        (1 + 1j, "must be a number .* traces"),  # a cast would drop a part
        ([0.8, 1.0], r"must be .* jax\.numpy\.stack"),
    ],
    ids=["bool", "complex", "list"],
)
def test_other_types_are_refused_by_name(number, message) -> None:
    """While tracing."""
    for ask, name in (
        (lambda x: epsilon(x), "noise_multiplier"),
        (lambda x: epsilon(1.0, num_steps=x), "num_steps"),
        (lambda x: epsilon(1.0, delta=x), "delta"),
        (lambda x: traced.rdp(step(1.0), x), "orders"),
    ):
        with pytest.raises(TypeError, match=f"{name} {message}"):
            jax.make_jaxpr(ask)(number)
    with pytest.raises(TypeError, match="noise_multiplier must be a number"):
        jax.make_jaxpr(epsilon)(jax.random.key(0))


# --- Transforms ---


def test_batches_and_scans_equal_their_settings() -> None:
    rates = np.float32([0.01, 0.02])  # vmap also maps over NumPy's constants
    true = on_host(NOISES[:, None], rates)
    grid = jax.vmap(jax.vmap(epsilon, (None, 0)), (0, None))
    np.testing.assert_allclose(jax.jit(lambda: grid(NOISES, rates))(), true, rtol=2e-7)
    np.testing.assert_allclose(epsilon(NOISES[:, None], rates), true, 2e-7)
    by_steps = jax.vmap(lambda n: epsilon(0.8, num_steps=n, method="rdp"))
    true = on_host(0.8, num_steps=np.arange(3), method="rdp")
    np.testing.assert_allclose(by_steps(jnp.arange(3, dtype=jnp.int32)), true, 2e-7)
    _, seen = jax.lax.scan(
        lambda noise, _: (noise * 1.25, epsilon(noise)), jnp.float32(0.6), length=3
    )
    np.testing.assert_allclose(seen, on_host(0.6 * 1.25 ** np.arange(3)), rtol=1e-5)


SEVERAL_DEVICES = """
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, numpy as np
import jaxdp_episodic as jde
from jaxdp_episodic import traced
from jaxdp_episodic.accountant.questions import traced as in_jax

P = jax.sharding.PartitionSpec


def step(noise):
    scheme = jde.Poisson("example", sampling_probability=0.01)
    return jde.GaussianStep(scheme, noise_multiplier=noise)


def epsilon(noise):
    return traced.epsilon(step(noise), delta=1e-5, num_steps=1)


noises = jnp.linspace(0.6, 1.3, 4)
true = np.asarray(epsilon(np.asarray(noises, np.float64)))
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("runs",))
specs = {"mesh": mesh, "in_specs": P("runs"), "out_specs": P("runs")}
each = jax.jit(jax.shard_map(epsilon, **specs))
explicit = jax.make_mesh((2,), ("r",), axis_types=(jax.sharding.AxisType.Explicit,))
placed = jax.device_put(noises, jax.NamedSharding(explicit, P("r")))
found = [jax.jit(jax.vmap(epsilon))(placed), jax.jit(epsilon)(placed)]
with ThreadPoolExecutor(6) as pool:
    found.extend(pool.map(lambda _: each(noises), range(18)))
for one in found:
    np.testing.assert_allclose(one, true, rtol=2e-7)

in_jax.FEWEST = 2  # compiled: of each device's two settings, too
with jax.enable_x64(True):
    noises, placed = (a.astype(np.float64) for a in (noises, placed))
    slopes = jax.grad(lambda noise: traced.rdp(step(noise), 8.0).sum())
    one = np.asarray(slopes(noises))
    for other in (jax.jit(slopes)(placed), jax.shard_map(slopes, **specs)(noises)):
        np.testing.assert_allclose(other, one, rtol=1e-9)
"""


@pytest.mark.slow
def test_several_devices_and_threads() -> None:
    """More callbacks than cores: none waits for another one."""
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SEVERAL_DEVICES]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr


# --- Derivatives ---


def delta(module: Any, noise: Any, epsilon: Any) -> Any:
    return module.delta(step(noise), epsilon=epsilon, num_steps=1)


def rdp(module: Any, noise: Any, order: Any) -> Any:
    return module.rdp(step(noise), order)


def of_release(module: Any, own: Any, lost: Any, epsilon: Any) -> Any:
    """Names of its numbers are names of the question's, too."""
    return module.delta(jde.ApproximateDP(own, lost), epsilon=epsilon, num_steps=1)


def epsilon_by(method: str) -> Any:
    def ask(module: Any, noise: Any, rate: Any, delta: Any) -> Any:
        asked = {"delta": delta, "num_steps": 1, "method": method}
        return module.epsilon(step(noise, rate), **asked)

    return ask


@pytest.mark.parametrize(
    ("ask", "at"),
    [
        (epsilon_by("exact"), (0.8, 0.01, DELTA)),
        (epsilon_by("rdp"), (0.8, 0.01, DELTA)),
        (delta, (0.8, 0.5)),
        (rdp, (0.8, 4.0)),
        (of_release, (0.5, 0.01, 0.2)),
    ],
    ids=["exact", "rdp", "delta", "curve", "release"],
)
def test_derivatives_by_every_argument(ask, at) -> None:
    by = tuple(range(len(at)))
    with jax.enable_x64(True):
        program = jax.jit(jax.value_and_grad(partial(ask, traced), by))
        value, slopes = program(*map(jnp.asarray, at))
    assert float(value) == pytest.approx(ask(jde, *at), rel=1e-14)
    for i, slope in enumerate(slopes):

        def plain(x, i=i):
            return ask(jde, *at[:i], x, *at[i + 1 :])

        assert slope == pytest.approx(difference(plain, at[i]), rel=1e-7), i


def test_derivatives_of_certified_bounds() -> None:
    """Of a Gaussian with randomized responses, against the mixture of Gaussians."""
    wrong = np.arange(7)
    mass = binom.pmf(wrong, 6, 1 / (1 + np.exp(0.4)))

    def true(noise: float) -> float:
        def excess(x: float) -> float:
            left = x - 0.4 * (6 - 2 * wrong)
            below = np.exp(left) * norm.cdf(-0.5 / noise - left * noise)
            return mass @ (norm.cdf(0.5 / noise - left * noise) - below) - DELTA

        return brentq(excess, 0.0, 60.0, xtol=1e-12)

    def asked(noise: Any) -> Any:
        run = jde.compose((step(noise, 1.0), 1), (jde.ApproximateDP(0.4), 6))
        return traced.epsilon(run, delta=DELTA)

    slope = jax.jit(jax.grad(asked))
    assert slope(0.8) == pytest.approx(difference(true, 0.8), rel=1e-3)
    assert np.isnan(jax.grad(slope)(0.8))  # certified ends are not that accurate


def test_derivatives_by_the_number_of_steps() -> None:
    """Gaussians' Rényi bound depends only on ``num_steps / noise²``."""
    with jax.enable_x64(True):
        by_noise, by_steps = jax.grad(
            lambda noise, steps: epsilon(noise, 1.0, steps, method="rdp"), (0, 1)
        )(jnp.asarray(3.0), jnp.asarray(4.0))
        curve = jax.grad(lambda count: traced.rdp(jde.compose((step(3.0), count)), 4.0))
        assert curve(7.0) == pytest.approx(jde.rdp(step(3.0), 4.0), rel=1e-9)
    assert float(by_steps) == pytest.approx(-float(by_noise) * 3 / 8, rel=1e-8)


def test_jvp_and_broadcasting() -> None:
    _, along = jax.jvp(epsilon, (NOISES,), (jnp.ones_like(NOISES),))
    rate = jnp.float32(0.01)
    by_noise, each = jax.vmap(jax.grad(epsilon, (0, 1)), (0, None))(NOISES, rate)
    np.testing.assert_allclose(along, by_noise, rtol=1e-6)
    one = jax.grad(lambda rate: epsilon(NOISES, rate).sum())(rate)
    assert one.shape == () and one == pytest.approx(float(each.sum()), rel=1e-6)


@pytest.mark.parametrize("orders", [7.5, np.array([3.0, 7.5])])
def test_mixed_second_derivatives_of_a_curve(orders) -> None:
    def curve(noise: Any, rate: Any) -> Any:
        return traced.rdp(step(noise, rate), orders).sum()

    with jax.enable_x64(True):
        slope = jax.jit(jax.grad(curve))
        (_, mixed), _ = jax.hessian(curve, (0, 1))(2.0, 0.1)
        apart = (slope(2.0, 0.1001) - slope(2.0, 0.0999)) / 2e-4
    np.testing.assert_allclose(mixed, apart, rtol=1e-5)


def test_each_setting_has_the_derivative_that_it_has_alone() -> None:
    """Some settings need differences of other widths than the others."""
    noises = np.array([0.6, 0.8, 1.1, 2.0])
    rates = np.array([0.3, 0.01, 1e-3, 1 - 1e-7])
    counts = np.array([1e4, 10.0, 1e3, 1e5])

    def asked(noise: Any, rate: Any, count: Any) -> Any:
        curve = traced.rdp(step(noise, rate), 64.0)
        return (curve + epsilon(noise, rate, count, method="rdp")).sum()

    with jax.enable_x64(True):
        whole = jax.grad(lambda noise: asked(noise, rates, counts))(noises)
        alone = [
            jax.grad(asked)(*one) for one in zip(noises, rates, counts, strict=True)
        ]
        bends = np.array(jax.vmap(jax.hessian(asked))(noises, rates, counts))
    np.testing.assert_allclose(whole, alone, rtol=1e-9)
    assert np.all(np.isfinite(bends)) and np.all(bends > 0)


@pytest.mark.slow
def test_second_derivatives_and_no_third() -> None:
    with jax.enable_x64(True):
        at = jnp.asarray(0.8), jnp.asarray(0.01)
        bends = np.array(jax.hessian(epsilon, (0, 1))(*at))
        gradient = jax.jit(jax.grad(epsilon, (0, 1)))

        def slopes(*at):
            return np.array(gradient(*at))

        true = [
            difference(lambda x: slopes(x, at[1]), at[0]),
            difference(lambda x: slopes(at[0], x), at[1]),
        ]
        np.testing.assert_allclose(bends, true, rtol=1e-5)
        with pytest.raises(NotImplementedError, match="no third ones"):
            jax.grad(jax.grad(jax.grad(epsilon)))(*at)


def test_calibrated_noise_and_its_derivatives() -> None:
    def noise(target, delta, rate):
        asked = {"epsilon": target, "delta": delta, "num_steps": 1}
        return traced.noise_multiplier(step(1.0, rate), **asked)

    targets = float32(0.5, 1.0, 2.0)
    found = jax.vmap(noise, (0, None, None))(targets, DELTA, 0.01)
    assert np.all(on_host(found) <= np.asarray(targets, np.float64))
    with jax.enable_x64(True):
        at = tuple(map(jnp.asarray, (1.0, DELTA, 0.01)))
        value, slopes = jax.value_and_grad(noise, (0, 1, 2))(*at)
        inverse = jax.grad(lambda *a: epsilon(*a[:2], delta=a[2]), (0, 1, 2))(
            value, at[2], at[1]
        )
    by_noise, by_rate, by_delta = map(float, inverse)
    true = 1 / by_noise, -by_delta / by_noise, -by_rate / by_noise
    np.testing.assert_allclose(slopes, true, rtol=1e-6)


def test_curves() -> None:
    orders = np.array([[1.5, 2.0, np.inf], [8.0, 32.0, 64.0]])
    noises = NOISES[:2]
    found = jax.jit(lambda noises: traced.rdp(step(noises), orders))(noises)
    true = jde.rdp(step(np.asarray(noises, np.float64)), orders, engine="numpy")
    assert found.shape == true.shape == (2, 2, 3)
    np.testing.assert_allclose(found, true, rtol=2e-7)
    assert np.all(np.asarray(found) >= true)


def test_descriptions_of_populations() -> None:
    tree = jde.Population.from_sizes([[30, 12], [11, 40]])

    def schools(noise, rate, size):
        sampling = jde.MultistageSampling(
            jde.Poisson("school", sampling_probability=rate),
            jde.WithoutReplacement("class", size=size),
        )
        return jde.GaussianStep(
            sampling, noise_multiplier=noise, clip_unit="class", population=tree
        )

    asked = {"delta": 0.01, "num_steps": 4, "method": "rdp"}
    found = jax.jit(lambda *given: traced.epsilon(schools(*given), **asked))(
        jnp.float32(1.5), jnp.float32(0.5), jnp.int32(2)
    )
    true = jde.epsilon(schools(1.5, 0.5, 2), **asked, engine="numpy")
    assert true > 0 and 0 <= float(found) / true - 1 < 2e-7


# --- Refusals ---


def test_values_are_checked_when_they_are_known() -> None:
    run = jax.jit(epsilon)
    for bad, words in ((-0.5, "noise_multiplier must be >= 0"), (np.nan, "be NaN")):
        with pytest.raises(Exception, match=words):
            jax.block_until_ready(run(jnp.float32(bad)))
    with pytest.raises(Exception, match=r"sampling_probability must lie in") as raised:
        jax.block_until_ready(run(NOISES, float32(0.1, 1.5, 0.1)))
    # The message comes last, after the frames of JAX.
    assert str(raised.value).splitlines()[-1].startswith("ValueError: sampling_prob")
    assert run(NOISES).shape == (3,)  # later calls still work
    for number, words in ((2.0, "lie in"), (None, "be a number")):
        with pytest.raises((ValueError, TypeError), match=f"delta must {words}"):
            epsilon(NOISES, delta=number)


def test_derivatives_that_do_not_exist_are_refused() -> None:
    def of_scheme(scheme, num_steps):
        step = jde.GaussianStep(scheme, noise_multiplier=1.0)
        return traced.epsilon(step, delta=DELTA, num_steps=num_steps)

    sized, bins = jde.WithoutReplacement, jde.ShuffledEpochs("a", steps_per_epoch=3)
    for question, words in (
        (lambda n: epsilon(n, method="pld"), "method='pld' have no derivatives"),
        (
            lambda n: of_scheme(sized("a", size=n, population=9), 1),
            r"sampling.levels\[0\].size is a whole number",
        ),
        (lambda n: of_scheme(bins, n), "num_steps has no derivative with epoch"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            jax.grad(question)(3.0)


@pytest.mark.parametrize(
    "question",
    [
        lambda n: jde.epsilon(step(n), delta=DELTA, num_steps=1),
        lambda n: jde.epsilon(step(1.0), delta=n, num_steps=1),
        lambda n: jde.calibrate_num_steps(step(n), epsilon=1.0, delta=DELTA),
        lambda n: jde.calibrate_num_steps(step(1.0), epsilon=n, delta=DELTA),
        lambda n: jde.epsilon(jde.compose((step(1.0), n)), delta=DELTA),
    ],
    ids=["noise", "delta", "search", "target", "composed"],
)
def test_plain_questions_refuse_tracers_and_name_the_module(question) -> None:
    with pytest.raises(TypeError, match=r"JAX traces: .*jaxdp_episodic\.traced"):
        jax.jit(question)(0.5)


# --- Compiled divergences: the numbers of the host without callbacks ---

FIVE = np.array([0.6, 0.8, 1.1, 2.0, 5.0])
RATES = np.array([0.3, 0.01, 1e-3, 1e-5, 0.05])


def divergence(noise: Any, rate: Any = 0.01, order: Any = 8.0) -> Any:
    return traced.rdp(step(noise, rate), order)


@pytest.fixture
def host(monkeypatch):
    """Compiles batches of five; the shapes of the host's callbacks."""
    calls, known = [], in_jax.rows_of

    def counted(question, words, *given):
        calls.append(np.shape(given[-1]))
        return known(question, words, *given)

    monkeypatch.setattr(in_jax, "rows_of", counted)
    monkeypatch.setattr(in_jax, "FEWEST", len(FIVE))
    with jax.enable_x64(True):
        yield calls


COMPILED = pytest.mark.usefixtures("host")


def test_compiled_curves(host) -> None:
    """The host computes settings at and beyond the ends of ranges, and only these."""
    orders = np.array([1.5, 4.0, 64.0])
    curve = jax.jit(lambda noise: traced.rdp(step(noise, RATES), orders))
    true = jde.rdp(step(FIVE, RATES), orders)
    np.testing.assert_allclose(curve(FIVE), true, rtol=1e-12)
    assert host == []
    noises = np.where(FIVE == 2.0, 0.0, FIVE)
    true = jde.rdp(step(noises, RATES), orders)
    np.testing.assert_allclose(curve(noises), true, rtol=1e-12)
    assert host == [(3,)]
    with pytest.raises(Exception, match="noise_multiplier must be >= 0, got"):
        jax.block_until_ready(curve(-FIVE))
    with pytest.raises(Exception, match="noise_multiplier must not be NaN"):
        jax.block_until_ready(curve(np.nan * FIVE))


def test_small_batches_are_answered_by_the_host(host) -> None:
    few = jax.jit(jax.vmap(divergence))(FIVE[:4])
    np.testing.assert_array_equal(few, jde.rdp(step(FIVE[:4]), 8.0))
    assert host == [(4,)]


SIZES = jde.GaussianStep(
    jde.WithoutReplacement("example", size=2, population=20), noise_multiplier=1.0
)


@COMPILED
@pytest.mark.parametrize(
    ("kind", "one", "option", "engine", "compiled"),
    [
        ("rdp", step(1.0), "both", "auto", True),
        ("rdp", step(1.0), "both", "numpy", False),
        ("epsilon", step(1.0), "both", "auto", False),
        ("rdp", step(1.0), "backward", "auto", False),
        ("rdp", SIZES, "both", "auto", False),
    ],
)
def test_settings_answered_by_the_host(
    kind, one, option, engine, compiled, monkeypatch
) -> None:
    monkeypatch.setenv("JAXDP_EPISODIC_ENGINE", engine)
    one = mapped(one, lambda where, x: ... if "noise" in where else x, checked=False)
    question = Question(kind=kind, step=one, option=option)
    for words in (((),), ((), (0,))):
        assert in_jax.is_compiled(question, words) == compiled
    assert not in_jax.is_compiled(question, ((), (0,), (0, 0)))


def levels(*rates: float, **options: Any) -> jde.GaussianStep:
    names = "school", "class", "child"
    coins = (
        jde.Poisson(name, sampling_probability=rate)
        for name, rate in zip(names, rates, strict=False)
    )
    return jde.GaussianStep(
        jde.MultistageSampling(*coins), noise_multiplier=0.7, **options
    )


@COMPILED
def test_the_compiled_pair_equals_the_theorems() -> None:
    """Of other designs there is none: the host answers."""
    for one in (
        levels(0.2),
        levels(0.2, 0.3, clip_unit="class"),
        levels(0.2, 0.3, 0.4, clip_unit="child", neighboring_relation="zero_out"),
        levels(0.2, 0.3, 0.4, clip_unit="class", privacy_unit="class"),
        levels(0.2, 0.3, clip_unit="school", privacy_unit="school"),
    ):
        true = dominating_pair.dominating_pair(one)
        outer, rate, noise = in_jax.poisson_numbers(one)
        assert isinstance(true, SampledGaussianLoss)
        assert (np.prod(outer), rate, 1 / noise) == tuple(map(np.squeeze, true.fields))
    tree = jde.Population.from_sizes([[30, 12], [11, 40]])
    coins = levels(0.2, 0.3, clip_unit="school", privacy_unit="school")
    sized = jde.MultistageSampling(
        coins.sampling.levels[0], jde.WithoutReplacement("class", size=2, population=9)
    )
    for one in (
        levels(0.2, neighboring_relation="replace_one"),
        levels(0.2, 0.3, clip_unit="school"),
        levels(0.2, 0.3, clip_unit="class", population=tree),
        levels(0.2, 0.3, clip_unit="step"),
        jde.LaplaceRelease(1.0, sampling_probability=0.2),
        dataclasses.replace(coins, sampling=sized),
    ):
        assert in_jax.poisson_numbers(one) is None


@pytest.mark.slow
def test_derivatives_of_compiled_divergences(host, monkeypatch) -> None:
    """By each number, also if the host computes some settings or a small batch."""
    at = np.where(FIVE == 2.0, 0.1, FIVE), RATES, np.array([3.0, 8.0, 2.0, 64.0, 1.5])
    each = jax.jit(jax.vmap(jax.value_and_grad(divergence, (0, 1, 2))))
    value, slopes = each(*at)
    assert host == [(1,)]  # beyond the program's orders
    true = np.diag(jde.rdp(step(*at[:2]), at[2]))
    np.testing.assert_allclose(value, true, rtol=1e-12)
    monkeypatch.setattr(in_jax, "FEWEST", 100)
    _, true = jax.vmap(jax.value_and_grad(divergence, (0, 1, 2)))(*at)
    for slope, one in zip(slopes, true, strict=True):
        np.testing.assert_allclose(slope, one, rtol=2e-8)
    bends = jax.vmap(jax.hessian(divergence))(FIVE)
    assert np.all(np.isfinite(bends)) and np.all(bends > 0)


@COMPILED
@pytest.mark.few(1)
def test_the_program_lowers_for_devices() -> None:
    """Exported for CUDA and TPU with a derivative; needs no device."""
    question = Question(kind="rdp", step=step(1.0), orders=3.0, option="both")
    question = mapped(
        question, lambda where, x: ... if "noise" in where else x, checked=False
    )

    def program(noise: Any) -> Any:
        return in_jax.divergences(question, ((), (0,)), noise.shape, (noise,))

    with jax.numpy_rank_promotion("allow"):
        export = jax.export.export(jax.jit(program), platforms=("cuda", "tpu"))
        assert set(export(FIVE).platforms) == {"cuda", "tpu"}
