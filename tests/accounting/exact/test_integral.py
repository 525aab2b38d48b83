"""The error of the trapezoidal rule against integrals known in closed form."""

import numpy as np
import pytest

from jaxdp_episodic.accounting.exact import integral


@pytest.mark.parametrize("rare", [0.0, 1e-4])
def test_no_coincidence_makes_the_error_look_small(rare):
    """Bumps ``1 / cosh`` on both sides of 0, and rare ones a tenth as wide.

    Their transform at w is ``2 pi cos(w place) / cosh(pi w / 2)``: where the cosine is
    0 at the highest frequency, it is -1 at that of the error.
    """
    step = 0.45
    place = step * np.arange(4.0, 9.0, 1 / 8)
    u = step * np.arange(97)[:, None]
    weight = step * np.where(u > 0, 1.0, 0.5)

    def bumps(width: float) -> np.ndarray:
        below, above = ((u + sign * place) / width for sign in (1, -1))
        return (1 / np.cosh(below) + 1 / np.cosh(above)) / width

    values = weight * (bumps(1.0) + rare * bumps(0.1))
    error = np.abs(values.sum(axis=0) - np.pi * (1 + rare))
    halved = np.abs(values.sum(axis=0) - 2 * values[::2].sum(axis=0))
    stated = integral._of_spacing(values)
    assert np.any(halved < 0.5 * error)  # what one difference says
    assert np.all(stated > error)
    # No more than nine times what halving the nodes changes where that is largest.
    assert np.all(stated < 9 * halved.max())
