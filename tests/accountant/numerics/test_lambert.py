"""Lambert's function against SciPy's."""

import numpy as np
from scipy.special import lambertw

from jaxdp_episodic.accountant.numerics.lambert import lambert, lambert_near

# None is -1/e.
LOG_SIZE = np.linspace(-60.02, 60, 240)[:, None]
ANGLE = np.append(np.linspace(0, 3.1415, 40), np.pi)


def test_the_upper_half_plane():
    z = np.exp(LOG_SIZE + 1j * ANGLE)
    pair = np.real(z), np.abs(np.imag(z))
    true = lambertw(pair[0] + 1j * pair[1])
    re, im = lambert(pair)
    # From half as far, an eighth of a turn away.
    known = lambertw(z * np.exp(np.where(ANGLE > 1, -0.8j, 0.8j)) / 2)
    near = lambert_near(pair, (np.real(known), np.imag(known)))
    # Next to -1/e the digits of z do not tell more.
    lost = 1e-15 / np.abs(1 + true) ** 2
    assert np.all(np.abs(re + 1j * im - true) < (5e-14 + lost) * np.abs(true))
    off = np.abs(near[0] + 1j * near[1] - true) / np.abs(true)
    assert np.all(off < 1e-14 + lost)
