"""Logarithms, normal tails, excesses of powers, complex exponentials: many digits."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest

from jaxdp_episodic.accountant._engine import (
    float64_boundary,
    jitted,
    on_jax,
    using_engine,
)
from jaxdp_episodic.accountant.numerics import special

LOG1P = float64_boundary(special.log1p_bounded)
LOG_ADD = float64_boundary(special.log_add)
LOG_MILLS = float64_boundary(special.log_mills)
LOG_TAIL = float64_boundary(special.log_normal_tail)
LOG_DIFFERENCE = float64_boundary(special.log_mills_difference)
LOG_SATURATING = float64_boundary(special.log_saturating_tail)

ENGINES = ("numpy", "jax")


def tail(x):
    return mp.erfc(mp.mpf(x) / mp.sqrt(2)) / 2


def mills(x):
    x = mp.mpf(x)
    return tail(x) * mp.sqrt(2 * mp.pi) * mp.exp(x * x / 2)


def worst(values, references):
    """Largest error of logarithms, absolute or relative, whichever is smaller."""
    errors = [
        abs(mp.mpf(float(v)) - r) for v, r in zip(values, references, strict=True)
    ]
    return float(
        max(e / max(1, abs(r)) for e, r in zip(errors, references, strict=True))
    )


def random_positions(seed):
    rng = np.random.default_rng(seed)
    edges = [-1.0, np.nextafter(-1, 0), np.nextafter(-1, -2), 0.0, -0.0, 5e-324]
    return np.concatenate(
        [rng.uniform(-40, 40, 50), 10 ** rng.uniform(-5, 3, 20), edges]
    )


@mp.workdps(60)
def test_log_mills_and_log_tail_against_many_digits():
    x = random_positions(0)
    ratios = [mp.log(mills(float(v))) for v in x]
    exact = [mp.log(tail(float(v))) for v in x]
    positive = x >= 0
    for engine in ENGINES:
        with using_engine(engine):
            assert worst(LOG_MILLS(x), ratios) < 1e-15
            found = LOG_TAIL(x)
        pairs = zip(found[positive], np.array(exact)[positive], strict=True)
        assert float(max(abs(float(f) / e - 1) for f, e in pairs)) < 1e-14
        absolute = [abs(float(f) - e) for f, e in zip(found, exact, strict=True)]
        assert float(max(np.array(absolute)[~positive])) < 1e-15


@mp.workdps(40)
def test_logarithms_near_one_against_many_digits(engine):
    rng = np.random.default_rng(1)
    x = np.concatenate(
        [
            rng.uniform(-0.5, 1, 1_000),
            rng.choice([-1, 1], 100) * 10.0 ** rng.uniform(-300, -1, 100),
            [-0.5, 1.0, np.nextafter(-0.5, 0)],
        ]
    )
    exact = [mp.log1p(mp.mpf(float(v))) for v in x]
    found = LOG1P(x)
    errors = [abs(mp.mpf(float(f)) / e - 1) for f, e in zip(found, exact, strict=True)]
    assert float(max(errors)) < 1e-15
    assert LOG1P(np.zeros(1)) == 0


@mp.workdps(40)
def test_logarithms_of_sums_against_many_digits(engine):
    rng = np.random.default_rng(2)
    x = rng.uniform(-700, 700, 500)
    y = x + rng.choice([-1, 1], 500) * 10.0 ** rng.uniform(-18, 2, 500)
    exact = [
        mp.log(mp.exp(mp.mpf(float(a))) + mp.exp(mp.mpf(float(b))))
        for a, b in zip(x, y, strict=True)
    ]
    assert worst(LOG_ADD(x, y), exact) < 1e-15
    x, y = np.array([-np.inf, 3.0]), np.array([2.0, -1e30])
    np.testing.assert_array_equal(LOG_ADD(x, y), [2, 3])


def test_far_tails_are_not_nan(engine):
    x = np.array([-np.inf, -1e200, -1e150, 1e150, 1e200, np.inf])
    expected = [0, 0, 0, -0.5e300, -np.inf, -np.inf]
    np.testing.assert_allclose(LOG_TAIL(x), expected, rtol=1e-15)
    ratios = LOG_MILLS(x)
    assert ratios[0] == ratios[1] == np.inf
    np.testing.assert_allclose(ratios[2:5], [0.5e300, -345.3877639491, -460.5170185988])
    assert ratios[5] == -np.inf


@mp.workdps(90)
def test_log_mills_difference_against_many_digits():
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.uniform(-1, 6, 200), 10 ** rng.uniform(0, 3.5, 200)])
    width = 10 ** rng.uniform(-9, 3.5, 400)
    # both sides of the switch
    x[:4], width[:4] = [-1, -1, 4, 4], [1, np.nextafter(1, 2), 2, np.nextafter(2, 3)]
    exact = [
        mp.log(mills(float(a)) - mills(mp.mpf(float(a)) + mp.mpf(float(w))))
        for a, w in zip(x, width, strict=True)
    ]
    for engine in ENGINES:
        with using_engine(engine):
            assert worst(LOG_DIFFERENCE(x, width), exact) < 2e-15
    assert LOG_DIFFERENCE(1.0, 0.0) == -np.inf


@mp.workdps(100)
def test_log_saturating_tail_against_its_definition():
    rng = np.random.default_rng(2)
    x = np.concatenate([-(10 ** rng.uniform(-2, 1.5, 60)), rng.uniform(-1, 9, 40)])
    width = np.maximum(-x, 0) + 10 ** rng.uniform(-6, 2, 100)

    def definition(x, width):
        # E[1 - e^{-w(Z-x)}; Z > x], the exponential integrated in closed form
        x, width = mp.mpf(float(x)), mp.mpf(float(width))
        return tail(x) - mp.exp(width * x + width**2 / 2) * tail(x + width)

    exact = [mp.log(definition(a, w)) for a, w in zip(x, width, strict=True)]
    for engine in ENGINES:
        with using_engine(engine):
            assert worst(LOG_SATURATING(x, width), exact) < 3e-15
    assert np.array_equal(
        LOG_SATURATING(np.array([-5.0, 3.0]), 0.0), [-np.inf, -np.inf]
    )
    # widths too small for x are rounded up
    assert LOG_SATURATING(-5.0, 0.01) == LOG_SATURATING(-5.0, 5.0)


# --- The excess of a power over its tangent ---


DIRECTIONS = ("forward", "backward", "symmetric")
# log(1 + v): tiny, both sides of the end of the series (|alpha y| = 1), and large.
Y = np.array([s * y for y in (1e-12, 0.029, 0.031, 3, 30) for s in (1, -1)])
T = np.array([1e-6, 0.01, 0.7, 1.0, 2.3, 20.0])

derivatives = float64_boundary(special.scaled_power_excess, ("direction",))
log_difference = float64_boundary(special.log_expm1)


def exact(y: float, b: float, t: object, direction: str) -> mp.mpf:
    """The definition: e^b ((1+v)^a - 1 - a v) at a = 1 + t, a = -t, or both."""
    with mp.workdps(max(80, mp.mp.dps)):  # diff evaluates around it
        v, t = mp.expm1(mp.mpf(y)), mp.mpmathify(t)
        powers = {"forward": [1 + t], "backward": [-t], "symmetric": [1 + t, -t]}
        total = sum((1 + v) ** a - 1 - a * v for a in powers[direction])
        return mp.exp(b) * total


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("b", [0.0, -40.0])
def test_power_excess(direction, b, engine):
    y, t = (a.reshape(-1) for a in np.meshgrid(Y, T))
    got, *_ = derivatives(y, np.full_like(y, b), t, direction=direction)
    want = np.array(
        [float(exact(v, b, u, direction)) for v, u in zip(y, t, strict=True)]
    )
    # Powers up to e^600 amplify the rounding of the exponent. Terms cancel near 0.1.
    scale = 3e-14 + 4e-16 * (1 + np.abs(t)) * np.abs(y) + 2e-16 * abs(b)
    assert np.all(np.abs(got / want - 1) <= scale)
    assert np.all(got >= 0)


def test_no_loss_is_no_excess_and_a_weight_keeps_a_power_from_overflowing():
    setting = 100.0, -900.0, 9.0
    got, *_ = derivatives(*np.array(setting)[:, None], direction="forward")
    assert got == pytest.approx(float(exact(*setting, "forward")), rel=1e-12)
    for direction in DIRECTIONS:
        nothing = derivatives(*np.array([[0.0], [0.0], [3.0]]), direction=direction)
        assert nothing[0] == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("direction", ["forward", "symmetric"])
def test_derivatives_of_power_excess(direction, engine):
    y, t = (a.reshape(-1) for a in np.meshgrid(Y[2:], T))
    keep = np.abs(t * y) <= 100
    y, t = y[keep], t[keep]
    got = derivatives(y, np.full_like(y, -2.0), t, direction=direction)
    with mp.workdps(80):
        for order, found in enumerate(got):
            want = [
                float(mp.diff(lambda u, y=y: exact(y, -2.0, u, direction), t, order))
                for y, t in zip(y, t, strict=True)
            ]
            np.testing.assert_allclose(found, want, rtol=2e-6)


def test_log_expm1(engine):
    x = np.array([1e-300, 1e-12, 0.5, 1.0, 29.9, 30.1, 700.0, 1e300])
    with mp.workdps(50):
        want = [float(mp.log(mp.expm1(v)) if v < 1e3 else v) for v in map(float, x)]
    np.testing.assert_allclose(log_difference(x), want, rtol=2e-13)


# --- Complex exponentials as pairs of reals, against mpmath and NumPy ---

versine_sine = float64_boundary(special.versine_sine)
polar = float64_boundary(special.polar)
expm1 = float64_boundary(special.expm1_complex)
log1p = float64_boundary(special.log1p_complex)


def compiled(kernel):
    return lambda *args: on_jax(jitted(kernel), *args)


# Each engine's implementation, and the two that JAX's is chosen from.
SUMS = {
    "numpy": float64_boundary(special.sum_expm1),
    "jax": compiled(special.sum_expm1),
    "pairs": compiled(special._sum_as_pairs),
    "complex": compiled(special._sum_as_complex),
}
MOMENTS = {
    "numpy": float64_boundary(special.sum_exp_moments),
    "jax": compiled(special.sum_exp_moments),
}


def test_cosine_and_sine_at_all_scales(engine):
    sizes = np.concatenate([np.linspace(-10, 10, 2001), np.geomspace(1e-300, 1e6, 999)])
    quarter = np.pi / 4 * np.arange(-9, 10)
    near = np.concatenate([quarter, np.nextafter(quarter, 9), np.nextafter(quarter, 0)])
    angles = np.concatenate([sizes, -sizes, near])
    cosine, sine = polar(np.zeros_like(angles), angles)
    np.testing.assert_allclose(cosine, np.cos(angles), rtol=0, atol=1e-15)
    np.testing.assert_allclose(sine, np.sin(angles), rtol=0, atol=1e-15)


@pytest.mark.parametrize("scale", [1e-12, 0.3, 40.0])
def test_expm1_and_log1p_against_mpmath(scale, engine):
    generator = np.random.default_rng(1)
    z = scale * (generator.normal(size=50) + 1j * generator.normal(size=50))
    for function, oracle in ((expm1, mp.expm1), (log1p, mp.log1p)):
        re, im = function(z.real, z.imag)
        with mp.workdps(40):
            exact = np.array([complex(oracle(mp.mpc(value))) for value in z])
        error = np.abs(re + 1j * im - exact)
        assert np.all(error <= 1e-14 * np.maximum(np.abs(exact), np.abs(z)))


def test_log1p_near_minus_one(engine):
    re, im = log1p(np.array([-1.0, -1.0 + 1e-9]), np.array([0.0, 1e-12]))
    assert re[0] < -300 and im[0] == 0
    np.testing.assert_allclose(re[1], np.log(1e-9), rtol=1e-7)


@pytest.mark.parametrize("form", SUMS)
@pytest.mark.parametrize("size", [1e-8, 0.0299, 0.0301, 30.0])
def test_a_sum_of_exponentials_minus_one(size, form):
    generator = np.random.default_rng(2)
    z = size * np.exp(1j * generator.uniform(-1.5, 1.5, (6, 1)))
    y = generator.uniform(0.1, 1.0, (5, 1)) + 0.2j
    weight = generator.normal(size=(5, 1)) + 0.3j
    re, im = SUMS[form]((z.real, z.imag), (weight.real, weight.imag), (y.real, y.imag))
    with mp.workdps(40):
        terms = [
            [
                mp.mpc(w) * mp.expm1(mp.mpc(a) * mp.mpc(v))
                for w, v in zip(weight[:, 0], y[:, 0], strict=True)
            ]
            for a in z[:, 0]
        ]
        exact = np.array([complex(mp.fsum(row)) for row in terms])
        scale = np.array([float(sum(abs(t) for t in row)) for row in terms])
    phase = 1 + np.abs(z[:, 0])
    error = np.abs(re[:, 0] + 1j * im[:, 0] - exact)
    assert np.all(error <= 1e-15 * phase * scale)


@pytest.mark.parametrize("form", MOMENTS)
@pytest.mark.parametrize("size", [1e-8, 0.3, 30.0])
def test_moments_of_a_sum_of_exponentials(size, form):
    generator = np.random.default_rng(4)
    c = size * np.array([0.1, 1.0, 2.0])[:, None]
    y = generator.uniform(-1.0, 1.0, (5, 1)) + 0.2j
    weight = generator.normal(size=(5, 1)) + 0.3j
    moments = MOMENTS[form](c, (weight.real, weight.imag), (y.real, y.imag))
    for power, got in enumerate(moments):
        for order, value in zip(c[:, 0], got[:, 0], strict=True):
            with mp.workdps(40):
                terms = [
                    mp.mpc(w) * mp.mpc(v) ** power * mp.exp(mp.mpf(order) * mp.mpc(v))
                    for w, v in zip(weight[:, 0], y[:, 0], strict=True)
                ]
                exact = float(mp.re(mp.fsum(terms)))
                scale = float(sum(abs(term) for term in terms))
            assert abs(value - exact) <= 1e-15 * (1 + order) * scale


@pytest.mark.parametrize("form", SUMS)
def test_a_sum_of_exponentials_out_of_range(form):
    # e^800 overflows, e^-800 is negligible beside 1; NaN stays NaN.
    z = (np.array([[800.0], [-800.0], [np.nan]]), np.zeros((3, 1)))
    one, zero = np.ones((1, 1)), np.zeros((1, 1))
    re, im = SUMS[form](z, (one, zero), (one, zero))
    assert re[0] == np.inf or np.isnan(re[0])
    assert re[1] == -1 and im[1] == 0
    assert np.isnan(re[2])


def test_huge_angles_stay_on_the_unit_circle(engine):
    angles = np.geomspace(1e6, 1e60, 400)
    re, im = polar(np.zeros_like(angles), angles)
    np.testing.assert_allclose(np.hypot(re, im), 1.0, atol=1e-2)


def test_one_minus_cosine_near_multiples_of_2_pi(engine):
    angles = np.geomspace(1e-150, 1e-3, 50)
    versine, sine = versine_sine(np.concatenate([angles, 8 * np.pi + angles]))
    np.testing.assert_allclose(versine[:50], 2 * np.sin(angles / 2) ** 2, rtol=1e-15)
    np.testing.assert_allclose(sine[:50], np.sin(angles), rtol=1e-15)
    np.testing.assert_allclose(sine[50:], np.sin(8 * np.pi + angles), atol=1e-15)
