"""Parts known as zCDP: RDP answers them, other methods refuse them by name."""

import numpy as np
import pytest

import jaxdp_episodic as jde

GAUSSIAN = jde.GaussianStep(
    jde.Poisson("example", sampling_probability=0.01), noise_multiplier=1.0
)


def test_rdp_is_linear():
    rho, orders = np.array([1e-6, 0.1, 30.0]), np.array([1 + 1e-6, 1.5, 2, 64, 4096])
    found = jde.rdp(jde.ZeroConcentratedDP(rho), orders)
    np.testing.assert_allclose(found, rho[:, None] * orders, rtol=1e-12)
    assert np.isinf(jde.rdp(jde.ZeroConcentratedDP(0.1), np.inf))
    assert jde.rdp(jde.ZeroConcentratedDP(0.0), np.inf) == 0


def test_epsilon_is_that_of_the_gaussian_by_rdp():
    noise = np.array([0.5, 2.0, 20.0])
    gaussian = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=1.0), noise_multiplier=noise
    )
    run = {"num_steps": 7, "delta": 1e-6}
    known = jde.ZeroConcentratedDP(0.5 / noise**2)
    same = jde.ZeroConcentratedDP.of_gaussian(noise)
    by_rdp = jde.epsilon(gaussian, method="rdp", **run)
    np.testing.assert_allclose(
        jde.epsilon(known, method="rdp", **run), by_rdp, rtol=1e-12
    )
    exact = jde.epsilon(gaussian, **run)
    np.testing.assert_allclose(jde.epsilon(same, **run), exact, rtol=1e-12)
    assert np.all(exact < by_rdp)
    # Bun and Steinke (2016), Proposition 1.3
    simple = 7 * known.rho + 2 * np.sqrt(7 * known.rho * np.log(1e6))
    assert np.all(by_rdp <= simple)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_other_methods_refuse_it_by_name(steps):
    release = jde.ZeroConcentratedDP(0.1)
    message = "ZeroConcentrated.* Rényi divergence alone.* method='rdp' covers it"
    run = {"num_steps": steps}
    for ask in (
        lambda: jde.epsilon(release, delta=1e-5, **run),
        lambda: jde.epsilon(release, delta=1e-5, method="pld", **run),
        lambda: jde.delta(release, epsilon=1.0, **run),
        lambda: jde.epsilon_interval(release, delta=1e-5, **run),
        lambda: jde.delta_interval(release, epsilon=1.0, **run),
        lambda: jde.privacy_profile(release, 1.0),
        lambda: jde.epsilon(jde.compose((GAUSSIAN, 3), (release, 1)), delta=1e-5),
        lambda: jde.calibrate_num_steps(release, epsilon=1.0, delta=1e-5),
    ):
        with pytest.raises(NotImplementedError, match=message):
            ask()
