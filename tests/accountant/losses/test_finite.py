"""Losses with finitely many values: sums over the outcomes themselves."""

import itertools

import mpmath as mp
import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair


def laplace_masses(a, reach, moved=0):
    """The integer distribution, 50 digits, on -reach … reach."""
    a = mp.mpf(a)
    return [
        mp.exp(-a * abs(x - moved)) * mp.tanh(a / 2) for x in range(-reach, reach + 1)
    ]


def stick(one, two, epsilon):
    grown = mp.exp(mp.mpf(float(epsilon)))
    return sum(max(p - grown * q, mp.mpf(0)) for p, q in zip(one, two, strict=True))


def moment(one, two, order):
    """``log E_Q[(P/Q)^order]`` over ``order - 1``."""
    order = mp.mpf(order)
    total = sum(p**order * q ** (1 - order) for p, q in zip(one, two, strict=True))
    return mp.log(total) / (order - 1)


def responses(p, k, *, zeroed):
    p = mp.mpf(p)
    one = [1 - p + p / k, *[p / k] * (k - 1)]
    two = [mp.mpf(1) / k] * k if zeroed else [one[1], one[0], *one[2:]]
    return one, two


def dists():
    with mp.workdps(50):
        yield jde.RandomizedResponse(0.3, 10), *responses(0.3, 10, zeroed=False)
        zeroed = jde.RandomizedResponse(0.01, 3, neighboring_relation="zero_out")
        yield zeroed, *responses(0.01, 3, zeroed=True)
        for a, moved, rate in ((1e-3, 1, 1.0), (0.5, 3, 1.0), (0.7, 4, 0.2)):
            release = jde.DiscreteLaplaceRelease(
                a, sensitivity=moved, sampling_probability=rate
            )
            # Beyond the shifts losses are constant, so each tail may be one outcome.
            reach = moved
            without = laplace_masses(a, reach)
            present = laplace_masses(a, reach, moved)
            for dist, at in ((without, 0), (present, moved)):
                low = mp.exp(-mp.mpf(a) * (reach + at)) / (1 + mp.exp(-mp.mpf(a)))
                high = mp.exp(-mp.mpf(a) * (reach - at)) / (1 + mp.exp(-mp.mpf(a)))
                dist[0], dist[-1] = low, high
            mixed = [
                (1 - rate) * q + rate * p for p, q in zip(present, without, strict=True)
            ]
            yield release, mixed, without


@pytest.mark.parametrize(("release", "one", "two"), list(dists()), ids=range(5))
def test_one_release_against_the_sum_over_outcomes(release, one, two):
    with mp.workdps(50):
        largest = float(max(mp.log(p / q) for p, q in zip(one, two, strict=True)))
        for epsilon in [0.0, *(largest * np.array([1e-3, 0.3, 0.9, 0.9999]))]:
            truth = max(stick(one, two, epsilon), stick(two, one, epsilon))
            found = jde.delta(release, num_steps=1, epsilon=epsilon)
            assert found == pytest.approx(float(truth), rel=1e-11, abs=1e-300)
        back = float(max(mp.log(q / p) for p, q in zip(one, two, strict=True)))
        most = max(largest, back)
        assert jde.delta(release, num_steps=1, epsilon=1.0001 * most) == 0
        for order in (1.01, 2.0, 17.5, 300.0):
            for direction, pair in (("forward", (one, two)), ("backward", (two, one))):
                truth = float(moment(*pair, order))
                found = jde.rdp(release, order, direction=direction)
                assert found == pytest.approx(truth, rel=1e-10)
        assert jde.rdp(release, np.inf) == pytest.approx(most, rel=1e-11)


def test_two_and_three_releases_against_the_sum_over_outcomes():
    release = jde.RandomizedResponse(0.4, 4, neighboring_relation="zero_out")
    one, two = (np.array(dist, float) for dist in responses(0.4, 4, zeroed=True))
    for count in (2, 3):
        first, second = (
            np.array([np.prod(c) for c in itertools.product(dist, repeat=count)])
            for dist in (one, two)
        )
        for epsilon in (0.1, 0.5):
            grown = np.exp(epsilon)
            truth = max(
                np.maximum(first - grown * second, 0).sum(),
                np.maximum(second - grown * first, 0).sum(),
            )
            run = {"num_steps": count, "epsilon": epsilon}
            low, high = jde.delta_interval(release, **run)
            assert low <= truth * (1 + 1e-12)
            assert truth <= high * (1 + 1e-12)
            assert high <= 1.03 * truth
            value, info = jde.delta(release, return_info=True, **run)
            assert abs(value - truth) <= (info.error + 1e-12) * value
            assert jde.delta(release, method="rdp", **run) >= truth


def test_several_coordinates_are_dominated_by_one():
    """``H_g`` of two integer coordinates is at most that of one with their l1 shift."""
    for a, first, second in ((0.5, 1, 1), (0.5, 1, 2), (1.0, 2, 3), (0.3, 1, 4)):
        reach = int(40 / a)
        base, *moved = (
            np.array([float(m) for m in laplace_masses(a, reach, at)])
            for at in (0, first, second)
        )
        one = jde.DiscreteLaplaceRelease(a, sensitivity=first + second)
        for epsilon in np.linspace(0, a * (first + second), 7):
            dist = np.outer(*moved) - np.exp(epsilon) * np.outer(base, base)
            truth = np.maximum(dist, 0).sum()
            assert truth <= jde.delta(one, num_steps=1, epsilon=epsilon) + 1e-12


def test_extreme_settings():
    run = {"num_steps": 3, "delta": 1e-6}
    for nothing in (
        jde.RandomizedResponse(1.0, 5),
        jde.RandomizedResponse(0.0, 1),
        jde.DiscreteLaplaceRelease(0.5, sampling_probability=0.0),
    ):
        for method in ("exact", "pld", "rdp"):
            assert jde.epsilon(nothing, method=method, **run) == 0
    for everything in (
        jde.RandomizedResponse(0.0, 2),
        jde.DiscreteLaplaceRelease(0.0),
        jde.DiscreteLaplaceRelease(np.inf),
    ):
        assert np.isinf(jde.epsilon(everything, **run))
    doubled = jde.DiscreteLaplaceRelease(0.5, neighboring_relation="replace_one")
    twice = jde.DiscreteLaplaceRelease(0.5, sensitivity=2)
    assert jde.rdp(doubled, 3.0) == jde.rdp(twice, 3.0)
    # Different lengths in one run: the shorter one is padded.
    response = jde.RandomizedResponse(0.5, 4)
    twice = doubled
    mixed = jde.compose((twice, 1), (response, 1))
    parts = jde.rdp(twice, 4.0) + jde.rdp(response, 4.0)
    assert jde.rdp(mixed, 4.0) == pytest.approx(parts, rel=1e-13)
    assert jde.epsilon(mixed, delta=0) == pytest.approx(
        float(
            sum(dominating_pair(s).largest_loss(backward=False)[0] for s in mixed.steps)
        ),
        rel=1e-11,
    )
    with pytest.raises(NotImplementedError, match="sensitivity must be at most 1,000"):
        jde.DiscreteLaplaceRelease(1.0, sensitivity=1001)
    with pytest.raises(NotImplementedError, match="add_remove.*no theorem"):
        jde.RandomizedResponse(0.5, 3, neighboring_relation="add_remove")


@pytest.mark.parametrize(
    ("release", "epsilon", "truth"),
    [
        (
            jde.DiscreteLaplaceRelease(
                0.017344859873585684,
                sensitivity=1,
                sampling_probability=0.08208089952838254,
                neighboring_relation="zero_out",
            ),
            0.001435069969316183,
            2.2335883e-13,
        ),
        (
            jde.RandomizedResponse(
                0.012534793155478388, 3, neighboring_relation="replace_one"
            ),
            5.469467696603839,
            6.2426630661e-10,
        ),
    ],
)
def test_near_the_largest_loss_rounding_of_losses_is_charged(release, epsilon, truth):
    value, info = jde.delta(release, epsilon=epsilon, num_steps=1, return_info=True)
    # The error of delta is relative; poorly known values are raised by it.
    assert -1e-8 <= value / truth - 1 <= 2 * info.error <= 0.01
