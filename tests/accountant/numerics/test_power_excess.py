"""The excess of a power over its tangent, against 50 digits."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.numerics.power_excess import (
    log_expm1,
    scaled_power_excess,
    scaled_power_excess_derivatives,
)

DIRECTIONS = ("forward", "backward", "symmetric")
# log(1 + v): tiny, both sides of the end of the series (|alpha y| = 1), and large.
Y = np.array([s * y for y in (1e-12, 1e-5, 0.029, 0.031, 0.4, 3, 30) for s in (1, -1)])
T = np.array([1e-6, 0.01, 0.7, 1.0, 2.3, 20.0])

value = float64_boundary(scaled_power_excess, static=("direction",))
derivatives = float64_boundary(scaled_power_excess_derivatives, ("direction",))
log_difference = float64_boundary(log_expm1)


def exact(y: float, b: float, t: object, direction: str) -> mpmath.mpf:
    """The definition: e^b ((1+v)^a - 1 - a v) at a = 1 + t, a = -t, or both."""
    with mpmath.workdps(max(80, mpmath.mp.dps)):  # diff evaluates around it
        v, t = mpmath.expm1(mpmath.mpf(y)), mpmath.mpmathify(t)
        powers = {"forward": [1 + t], "backward": [-t], "symmetric": [1 + t, -t]}
        total = sum((1 + v) ** a - 1 - a * v for a in powers[direction])
        return mpmath.exp(b) * total


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("b", [0.0, -40.0])
def test_value(direction, b, engine):
    y, t = (a.reshape(-1) for a in np.meshgrid(Y, T))
    got = value(y, np.full_like(y, b), t, direction=direction)
    want = np.array(
        [float(exact(v, b, u, direction)) for v, u in zip(y, t, strict=True)]
    )
    # Powers up to e^600 amplify the rounding of the exponent.
    scale = 4e-15 + 4e-16 * (1 + np.abs(t)) * np.abs(y) + 2e-16 * abs(b)
    assert np.all(np.abs(got / want - 1) <= scale)
    assert np.all(got >= 0)


def test_weight_keeps_a_power_from_overflowing():
    got = value(*np.array([[100.0], [-900.0], [9.0]]), direction="forward")
    np.testing.assert_allclose(
        got, [float(exact(100.0, -900.0, 9.0, "forward"))], rtol=1e-12
    )


def test_no_loss_is_no_excess():
    for direction in DIRECTIONS:
        assert value(*np.array([[0.0], [0.0], [3.0]]), direction=direction) == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("direction", ["forward", "symmetric"])
def test_derivatives(direction, engine):
    y, t = (a.reshape(-1) for a in np.meshgrid(Y[2:], T))
    keep = np.abs(t * y) <= 100
    y, t = y[keep], t[keep]
    got = derivatives(y, np.full_like(y, -2.0), t, direction=direction)
    with mpmath.workdps(80):
        for order, found in enumerate(got):
            want = [
                float(
                    mpmath.diff(lambda u, y=y: exact(y, -2.0, u, direction), t, order)
                )
                for y, t in zip(y, t, strict=True)
            ]
            np.testing.assert_allclose(found, want, rtol=2e-6)


def test_log_expm1(engine):
    x = np.array([1e-300, 1e-12, 0.5, 1.0, 29.9, 30.1, 700.0, 1e300])
    with mpmath.workdps(50):
        want = [
            float(mpmath.log(mpmath.expm1(v)) if v < 1e3 else v) for v in map(float, x)
        ]
    np.testing.assert_allclose(log_difference(x), want, rtol=2e-13)
