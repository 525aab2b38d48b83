"""The transform of one term off the axis against integrals of its definition."""

import mpmath as mp
import numpy as np
import pytest
from scipy.special import lambertw

from jaxdp_episodic.accountant.numerics.lognormal_rays import (
    lambert,
    log_transform_on_rays,
    paths,
)
from jaxdp_episodic.accountant.numerics.lognormal_terms import Sums

# Of p against the last of the axis, and its angle against where A falls.
SIZES, ANGLES = (1e-3, 0.2, 3.0, 60.0), (0.1, 1.4, 2.1, 3.0)


def integral(p, angle, shift):
    """``E e^{-pA}``: x is moved until ``pA`` has a small angle."""
    turn = max(angle - 1, 0) / mp.mpf(shift)
    spacing = mp.mpf("0.04") / max(1, shift)

    def value(k):
        x = k * spacing - 1j * turn
        return mp.exp(-p * mp.exp(shift * x - shift * shift / 2) - x * x / 2)

    ends = int(20 / spacing)
    return mp.fsum(value(k) for k in range(-ends, ends)) * spacing / mp.sqrt(2 * mp.pi)


@pytest.mark.parametrize("upper", [True, False])
@pytest.mark.parametrize(
    "shift", [0.6, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.15, 3.0))]
)
def test_against_integrals(shift, upper):
    size, angle = (a.reshape(-1) for a in np.meshgrid(SIZES, ANGLES))
    last = np.exp(0.5 * shift**2 - 1) / shift**2
    p = size * last * np.exp(1j * angle)
    given = -p.conj() if upper else p
    # A neighbour shares the path, on a ray.
    both = np.stack([0.7 * given, given])
    terms = Sums(*(np.full(len(p), value) for value in (1.0, shift, float(upper))))
    path = paths(terms, given, np.full(len(p), 0.7), np.ones(len(p)))
    found = np.exp(log_transform_on_rays(terms, path, both))
    with mp.workdps(70):
        for i in range(0, len(p), 11):
            for j, share in enumerate((0.7, 1.0)):
                z = mp.mpc(complex(share * p[i]))
                true = integral(z, angle[i], mp.mpf(shift))
                true = complex(true.conjugate() if upper else true)
                assert found[j, i] == pytest.approx(true, rel=2e-12)


def test_lambert_in_the_upper_half_plane():
    size = np.exp(np.linspace(-60.02, 60, 240))[:, None]  # none is -1/e
    z = size * np.exp(1j * np.append(np.linspace(0, 3.1415, 40), np.pi))
    z = np.real(z) + 1j * np.abs(np.imag(z))
    true = lambertw(z)
    # Next to -1/e the digits of z do not tell more.
    lost = 1e-15 / np.abs(1 + true) ** 2
    assert np.all(np.abs(lambert(z) - true) < (1e-14 + lost) * np.abs(true))
