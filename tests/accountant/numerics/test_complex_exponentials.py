"""Complex exponentials as pairs of reals, against mpmath and NumPy."""

import mpmath
import numpy as np
import pytest

from jaxdp_episodic.accountant._engine import float64_boundary, jitted, on_jax
from jaxdp_episodic.accountant.numerics import complex_exponentials as ce

cos_sin = float64_boundary(ce.cos_sin)
versine_sine = float64_boundary(ce.versine_sine)
polar = float64_boundary(ce.polar)
expm1 = float64_boundary(ce.expm1_complex)
log1p = float64_boundary(ce.log1p_complex)
log_add = float64_boundary(ce.log_add_complex)


def compiled(kernel):
    return lambda *args: on_jax(jitted(kernel), *args)


# Each engine's implementation, and the two that JAX's is chosen from.
SUMS = {
    "numpy": float64_boundary(ce.sum_expm1),
    "jax": compiled(ce.sum_expm1),
    "pairs": compiled(ce._sum_as_pairs),
    "complex": compiled(ce._sum_as_complex),
}
MOMENTS = {
    "numpy": float64_boundary(ce.sum_exp_moments),
    "jax": compiled(ce.sum_exp_moments),
}


def test_cosine_and_sine_at_all_scales(engine):
    sizes = np.concatenate([np.linspace(-10, 10, 2001), np.geomspace(1e-300, 1e6, 999)])
    quarter = np.pi / 4 * np.arange(-9, 10)
    near = np.concatenate([quarter, np.nextafter(quarter, 9), np.nextafter(quarter, 0)])
    angles = np.concatenate([sizes, -sizes, near])
    for cosine, sine in (cos_sin(angles), polar(np.zeros_like(angles), angles)):
        np.testing.assert_allclose(cosine, np.cos(angles), rtol=0, atol=1e-15)
        np.testing.assert_allclose(sine, np.sin(angles), rtol=0, atol=1e-15)


@pytest.mark.parametrize("scale", [1e-12, 0.3, 40.0])
def test_expm1_and_log1p_against_mpmath(scale, engine):
    generator = np.random.default_rng(1)
    z = scale * (generator.normal(size=50) + 1j * generator.normal(size=50))
    for function, oracle in ((expm1, mpmath.expm1), (log1p, mpmath.log1p)):
        re, im = function(z.real, z.imag)
        with mpmath.workdps(40):
            exact = np.array([complex(oracle(mpmath.mpc(value))) for value in z])
        error = np.abs(re + 1j * im - exact)
        assert np.all(error <= 1e-14 * np.maximum(np.abs(exact), np.abs(z)))


def test_log1p_near_minus_one(engine):
    re, im = log1p(np.array([-1.0, -1.0 + 1e-9]), np.array([0.0, 1e-12]))
    assert re[0] < -300 and im[0] == 0
    np.testing.assert_allclose(re[1], np.log(1e-9), rtol=1e-7)


def test_log_add_is_continuous_across_equal_real_parts(engine):
    im = np.full(3, 3.0)
    re = np.array([-1e-12, 0.0, 1e-12])
    values = log_add(np.zeros(4), (np.append(re, 0.7), np.append(im, 2.0)))
    assert np.ptp(values[0][:3]) < 1e-9 and np.ptp(values[1][:3]) < 1e-9
    exact = np.log(1 + np.exp(0.7 + 2.0j))
    np.testing.assert_allclose(values[0][3] + 1j * values[1][3], exact, rtol=1e-15)


@pytest.mark.parametrize("form", SUMS)
@pytest.mark.parametrize("size", [1e-8, 0.0299, 0.0301, 30.0])
def test_a_sum_of_exponentials_minus_one(size, form):
    generator = np.random.default_rng(2)
    z = size * np.exp(1j * generator.uniform(-1.5, 1.5, (6, 1)))
    y = generator.uniform(0.1, 1.0, (5, 1)) + 0.2j
    weight = generator.normal(size=(5, 1)) + 0.3j
    re, im = SUMS[form]((z.real, z.imag), (weight.real, weight.imag), (y.real, y.imag))
    with mpmath.workdps(40):
        terms = [
            [
                mpmath.mpc(w) * mpmath.expm1(mpmath.mpc(a) * mpmath.mpc(v))
                for w, v in zip(weight[:, 0], y[:, 0], strict=True)
            ]
            for a in z[:, 0]
        ]
        exact = np.array([complex(mpmath.fsum(row)) for row in terms])
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
            with mpmath.workdps(40):
                terms = [
                    mpmath.mpc(w)
                    * mpmath.mpc(v) ** power
                    * mpmath.exp(mpmath.mpf(order) * mpmath.mpc(v))
                    for w, v in zip(weight[:, 0], y[:, 0], strict=True)
                ]
                exact = float(mpmath.re(mpmath.fsum(terms)))
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
