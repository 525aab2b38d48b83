"""Extreme numbers: a clear error or a sound answer."""

import math
import warnings
from functools import partial

import jax
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.bounds import mechanisms

POISSON = jde.MultistageSampling(jde.Poisson("u", sampling_probability=0.1))
STEP = jde.GaussianStep(POISSON, noise_multiplier=1.0)
HUGE = 10**5000  # more digits than Python prints

NO_NUMBERS = (
    *(True, "1", b"1", 1j, {}, object()),
    *([1.0, "a"], [[1], [2, 3]], [True, 1.0]),
    *(np.array(["1"]), np.array([2, 1.0], object), np.datetime64("2026-01-01")),
    np.array([(1.0, 2)], [("a", float), ("b", int)]),
    np.ma.array([1.0], mask=[True]),
)
# Close to others: slow questions leave them out.
ALIKE = (1e-308, 1e-300, 1e-17, 1 - 2**-53, 1 + 2**-52)
NUMBERS = (
    *(0.0, -0.0, 5e-324, *ALIKE, 0.1, 1.0, 1e154, 1e308),
    *(math.inf, -math.inf, math.nan),
    *(-1, 3, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, HUGE),
    *(np.float16(3.0), np.longdouble("1e3000")),
    *(np.int8(3), np.uint64(2**63), np.array(3, np.int8)),
)


def sampled(probability=0.1, noise_multiplier=1.0):
    scheme = jde.Poisson("u", sampling_probability=probability)
    return jde.GaussianStep(scheme, noise_multiplier=noise_multiplier)


def drawn(size=5, population=50):
    scheme = jde.WithoutReplacement("u", size=size, population=population)
    return jde.GaussianStep(
        scheme, noise_multiplier=1.0, neighboring_relation="replace_one"
    )


def epsilon(step, num_steps=10, delta=1e-5, method="rdp"):
    return jde.epsilon(step, num_steps=num_steps, delta=delta, method=method)


TARGET = {"epsilon": 1.0, "delta": 1e-5, "method": "rdp"}
STEPS = {**TARGET, "num_steps": 9}
CALLS = {
    "epsilon, noise": lambda v: epsilon(sampled(noise_multiplier=v)),
    "epsilon, probability": lambda v: epsilon(sampled(v)),
    "epsilon, steps": lambda v: epsilon(STEP, num_steps=v),
    "epsilon, delta": lambda v: epsilon(STEP, delta=v),
    "epsilon, size": lambda v: epsilon(drawn(size=v)),
    "epsilon, population": lambda v: epsilon(drawn(population=v)),
    "epsilon, count": lambda v: jde.epsilon(
        jde.compose((STEP, v)), delta=1e-5, method="rdp"
    ),
    "delta, epsilon": lambda v: jde.delta(STEP, num_steps=9, epsilon=v, method="rdp"),
    "noise, epsilon": lambda v: jde.calibrate_noise_multiplier(
        POISSON, **STEPS | {"epsilon": v}
    ),
    "noise, delta": lambda v: jde.calibrate_noise_multiplier(
        POISSON, **STEPS | {"delta": v}
    ),
    "noise, steps": lambda v: jde.calibrate_noise_multiplier(
        POISSON, **STEPS | {"num_steps": v}
    ),
    "steps, epsilon": lambda v: jde.calibrate_num_steps(
        STEP, **TARGET | {"epsilon": v}
    ),
    "steps, noise": lambda v: jde.calibrate_num_steps(
        sampled(noise_multiplier=v), **TARGET
    ),
    "rate, epsilon": lambda v: jde.calibrate_rate(
        STEP, level="u", **STEPS | {"epsilon": v}
    ),
    "advantage, steps": lambda v: jde.advantage(STEP, num_steps=v, method="rdp"),
    "Gaussian, noise": lambda v: mechanisms.Gaussian(v).rdp(2.0),
    "Gaussian, order": lambda v: mechanisms.Gaussian(1.0).rdp(v),
    "Gaussian, delta": lambda v: mechanisms.Gaussian(v).delta(1.0),
    "Gaussian, epsilon": lambda v: mechanisms.Gaussian(1.0).delta(v),
    "Laplace, scale": lambda v: mechanisms.Laplace(v).rdp(2.0),
    "Laplace, order": lambda v: mechanisms.Laplace(1.0).rdp(v),
    "Laplace, delta": lambda v: mechanisms.Laplace(v).delta(1.0),
    "response, epsilon": lambda v: mechanisms.RandomizedResponse(v).rdp(2.0),
    "response, order": lambda v: mechanisms.RandomizedResponse(1.0).rdp(v),
    "table": lambda v: mechanisms.RdpTable([1.0, v]).rdp(2.5),
    "rates": lambda v: jde.inclusion_rates(
        jde.MultistageSampling(jde.Poisson("u", sampling_probability=v))
    ),
}


def answered(call, value):
    """The answer, which must not be NaN or negative, or None after a clear error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            answer = np.asarray(call(value), np.float64)
        except (TypeError, ValueError, NotImplementedError) as error:
            text = str(error)
            assert text and len(text) < 500 and "4300" not in text, text
            return None
    assert not np.isnan(answer).any()
    assert (answer >= 0).all()
    return answer


@pytest.mark.few(7)
@pytest.mark.parametrize("name", CALLS)
def test_numbers_at_the_edge(name):
    for value in NUMBERS:
        if name.startswith("rate") and type(value) is float and value in ALIKE:
            continue  # a search for a rate takes longest
        answer = answered(CALLS[name], value)
        if name.startswith("delta") and answer is not None:
            assert answer <= 1


@pytest.mark.parametrize("name", CALLS)
def test_other_types_are_type_errors(name):
    for value in (*NO_NUMBERS, *[None] * (name in ("epsilon, noise", "rates"))):
        with pytest.raises(TypeError):
            CALLS[name](value)


@pytest.mark.parametrize("name", ["epsilon, noise", "epsilon, probability", "rates"])
def test_numbers_beyond_floats_are_named(name):
    for value in (HUGE, -HUGE, [1.0, HUGE], [2**64]):
        with pytest.raises(ValueError, match="must fit into 64 bits"):
            CALLS[name](value)
    endless: list = []
    endless.append(endless)
    deep: list = []
    for _ in range(10**5):
        deep = [deep]
    for value in (endless, deep):
        with pytest.raises(TypeError, match="must be a number or"):
            CALLS[name](value)


def test_traced_values_are_refused():
    with pytest.raises((TypeError, jax.errors.ConcretizationTypeError)):
        jax.jit(lambda noise: epsilon(sampled(noise_multiplier=noise)))(1.0)


def gaussian_delta(epsilon, mu):
    """Of the Gaussian mechanism, 60 digits (Balle and Wang 2018, Theorem 8)."""
    with mpmath.workdps(60):
        eps, mu = mpmath.mpf(float(epsilon)), mpmath.mpf(mu)
        first = mpmath.ncdf(mu / 2 - eps / mu)
        return first - mpmath.exp(eps) * mpmath.ncdf(-mu / 2 - eps / mu)


@settings(max_examples=20)
@given(
    log_noise=st.floats(-30, 30),
    num_steps=st.sampled_from([1, 7, 10**6, 2**53]),
    log_delta=st.floats(-700, -1e-3),
)
def test_no_answer_is_below_the_truth(log_noise, num_steps, log_delta):
    """With full participation the truth is known."""
    noise, delta = math.exp(log_noise), math.exp(log_delta)
    step = sampled(1.0, noise)
    value = float(answered(partial(epsilon, step, num_steps), delta))
    if math.isinf(value):
        return
    mu = mpmath.sqrt(num_steps) / mpmath.mpf(noise)
    assert gaussian_delta(value * (1 + 1e-12), mu) <= mpmath.mpf(delta) * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    log_probability=st.floats(-745, 0),
    noise=st.sampled_from([1e-300, 0.3, 1.0, 5.0, 1e300]),
    num_steps=st.sampled_from([0, 1, 1000, 2**53]),
    delta=st.sampled_from([5e-324, 1e-12, 1e-5, 0.5]),
)
def test_more_noise_and_fewer_draws_never_cost_more(
    log_probability, noise, num_steps, delta
):
    probability = math.exp(log_probability)
    cost = partial(epsilon, num_steps=num_steps, delta=delta)
    value = cost(sampled(probability, noise))
    least = value * (1 - 1e-9)
    assert cost(sampled(1.0, noise)) >= least
    assert cost(sampled(probability, noise * 0.9)) >= least


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exact", "pld"])
@pytest.mark.parametrize("name", ["noise", "probability", "steps", "delta", "size"])
def test_other_methods_at_the_edge(name, method, monkeypatch):
    monkeypatch.setattr(epsilon, "__defaults__", (10, 1e-5, method))
    for value in NUMBERS:
        answered(CALLS[f"epsilon, {name}"], value)
