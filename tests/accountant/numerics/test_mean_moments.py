"""Moments of means of lognormal terms, against powers of a series."""

import numpy as np
import pytest
from mpmath import exp, factorial, mp, mpf

from jaxdp_episodic.accountant.numerics.mean_moments import (
    Laplace,
    most_orders,
    whole_orders,
)


def excess_by_series(bins, count, shift, most):
    """``E X^n - 1`` from the power of one term's series, by repeated products."""

    def product(a, b):
        return [sum(a[i] * b[k - i] for i in range(k + 1)) for k in range(most + 1)]

    one = [
        exp(mpf(shift) ** 2 * k * (k - 1) / 2) / factorial(k) for k in range(most + 1)
    ]
    total = [mpf(bins - count) ** k / factorial(k) for k in range(most + 1)]
    while count:
        total = product(total, one) if count % 2 else total
        one, count = product(one, one), count // 2
    return [total[n] * factorial(n) / mpf(bins) ** n - 1 for n in range(most + 1)]


# Of few terms they are by doubling, of as many as orders less 1 by a recurrence.
@pytest.mark.parametrize("shift", [1e-3, 0.5, 3.0])
@pytest.mark.parametrize("spare", [-2, -1, 0, 300])
@pytest.mark.parametrize("idle", [0, 7])
def test_whole_orders_are_those_of_a_power_of_a_series(shift, spare, idle):
    most = most_orders(shift, 24, tilted=False)
    count = most + spare
    found = whole_orders(count + idle, count, shift, most)
    assert found[0] == found[1] == 0
    with mp.workdps(60):
        truth = excess_by_series(count + idle, count, shift, most)[2:]
        error = [abs(mpf(f) / e - 1) for f, e in zip(found[2:], truth, strict=True)]
    assert max(error) < 1e-13


def test_what_is_out_of_range_is_infinite():
    # Moments of one term overflow; no nan and no finite number comes of them.
    for count in (5, 1000):
        with np.errstate(over="ignore"):
            found = whole_orders(count, count, 8.0, 8)
        assert found[-1] == np.inf and np.all(found[2:] > 0)


def test_far_nodes_do_not_depend_on_near_ones():
    # Each form of the transform is computed where it is used alone.
    few, many = (Laplace(10.0, 10.0, 2.0, largest, 0.01) for largest in (8.0, 64.0))
    z = np.array([0.3, 2.0, 7.5])
    np.testing.assert_allclose(
        few.log_excess_below(z), many.log_excess_below(z), rtol=0, atol=1e-12
    )
