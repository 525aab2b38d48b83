"""Lambert's function against SciPy's, and on both engines."""

import numpy as np
import pytest
from scipy.special import lambertw

from jaxdp_episodic._engine import float64_boundary, using_engine
from jaxdp_episodic.numerics.lambert import lambert, lambert_near

# None is -1/e.
LOG_SIZE = np.linspace(-60.02, 60, 240)[:, None]
ANGLE = np.append(np.linspace(0, 3.1415, 40), np.pi)


@pytest.mark.parametrize("engine", ["numpy", "jax"])
def test_the_upper_half_plane(engine):
    z = np.exp(LOG_SIZE + 1j * ANGLE)
    pair = np.real(z), np.abs(np.imag(z))
    true = lambertw(pair[0] + 1j * pair[1])
    with using_engine(engine):
        re, im = float64_boundary(lambert)(pair)
        # From half as far, an eighth of a turn away.
        known = lambertw(z * np.exp(np.where(ANGLE > 1, -0.8j, 0.8j)) / 2)
        start = np.real(known), np.imag(known)
        near = float64_boundary(lambert_near)(pair, start)
    # Next to -1/e the digits of z do not tell more.
    lost = 1e-15 / np.abs(1 + true) ** 2
    assert np.all(np.abs(re + 1j * im - true) < (5e-14 + lost) * np.abs(true))
    off = np.abs(near[0] + 1j * near[1] - true) / np.abs(true)
    assert np.all(off < 1e-14 + lost)
