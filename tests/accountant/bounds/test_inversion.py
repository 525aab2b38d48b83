"""The smallest epsilon of a decreasing delta, rounded to the safe side."""

import numpy as np

from jaxdp_episodic.bounds import smallest_epsilon


def test_known_inverse_from_above():
    """1,000 targets for ``log delta = -scale * epsilon``."""
    rng = np.random.default_rng(0)
    scale = 10 ** rng.uniform(-2, 3, 1_000)
    answer = 10 ** rng.uniform(-3, 2, 1_000)
    found = smallest_epsilon(
        lambda eps, rows: -scale[rows] * eps, -scale * answer, np.full(1_000, 100.0)
    )
    assert np.all(scale * found >= scale * answer)
    np.testing.assert_allclose(found, answer, rtol=3e-7)


def test_ends():
    target = np.log(np.array([0.5, 0.5, 0.5, 0.5]))
    largest = np.array([np.inf, 0.0, 2.0, 3.0])
    start = np.array([0.0, 0.0, np.log(0.4), 0.0])

    def log_delta(eps, rows):
        return start[rows] - np.where(eps >= 3, np.inf, 0.0)

    found = smallest_epsilon(log_delta, target, largest)
    # Unreachable; always met; met at 0; met only at the last jump.
    assert found[0] == np.inf and found[1] == 0 and found[2] == 0
    assert 3 * (1 - 1e-6) <= found[3] <= 3


def test_no_settings():
    empty = np.zeros(0)
    assert smallest_epsilon(lambda e, r: e, empty, empty).shape == (0,)
