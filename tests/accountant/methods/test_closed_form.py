"""Runs with few losses, against 30-digit sums over all sequences of outcomes."""

import itertools

import mpmath as mp
import numpy as np
import pytest

import jaxdp_episodic as jde


def dists(release):
    """Losses and masses of one release, from its definition."""
    match release:
        case jde.ApproximateDP(epsilon=e):
            truth = 1 / (1 + mp.exp(-mp.mpf(e)))
            return [(mp.mpf(e), truth), (-mp.mpf(e), 1 - truth)]
        case jde.RandomizedResponse(noise_parameter=p, num_buckets=k):
            p, k = mp.mpf(float(p)), int(k)
            told, lied = 1 - p + p / k, p / k
            top = mp.log(told / lied)
            return [(top, told), (mp.mpf(0), p * (k - 2) / k), (-top, lied)]
    a, s = mp.mpf(float(release.noise_parameter)), int(release.sensitivity)
    rate = mp.mpf(float(release.sampling_probability))
    found = []
    for x in range(-40, 41 + s):  # beyond it losses equal those at the ends
        q, p = (mp.tanh(a / 2) * mp.exp(-a * abs(x - m)) for m in (0, s))
        mixed = (1 - rate) * q + rate * p
        found.append((mp.log(mixed / q), mixed))
    return found


def merged(dist):
    total = {}
    for loss, mass in dist:
        key = mp.nstr(loss, 20)
        old = total.get(key, (loss, mp.mpf(0)))
        total[key] = (old[0], old[1] + mass)
    return list(total.values())


RUNS = {
    "claims": [(jde.ApproximateDP(1.0), 2), (jde.ApproximateDP(0.3), 3)],
    "answers": [(jde.RandomizedResponse(0.4, 5), 2), (jde.ApproximateDP(2.0), 1)],
    "counts": [
        (jde.DiscreteLaplaceRelease(1.0, sensitivity=2, sampling_probability=0.2), 2),
        (jde.ApproximateDP(0.5), 2),
    ],
}


def composed(parts):
    dist = [(mp.mpf(0), mp.mpf(1))]
    for release, count in parts:
        one = merged(dists(release))
        for _ in range(count):
            pairs = itertools.product(dist, one)
            dist = merged([(a + b, p * q) for (a, p), (b, q) in pairs])
    return dist


def hockey_stick(dist, epsilon):
    """The larger of both directions."""
    forward = sum(p * (1 - mp.exp(epsilon - a)) for a, p in dist if a > epsilon)
    backward = sum(
        p * mp.exp(-a) * (1 - mp.exp(epsilon + a)) for a, p in dist if -a > epsilon
    )
    return max(forward, backward, mp.mpf(0))


@pytest.mark.parametrize("name", RUNS)
def test_few_losses_are_summed(name):
    run = jde.compose(*RUNS[name])
    with mp.workdps(30):
        dist = composed(RUNS[name])
        for epsilon in (0.0, 0.7, 1.9):
            truth = float(hockey_stick(dist, mp.mpf(epsilon)))
            value, info = jde.delta(run, epsilon=epsilon, return_info=True)
            assert value == pytest.approx(truth, rel=1e-12)
            assert abs(value / truth - 1) <= info.error + 3e-16
            low, high = jde.delta_interval(run, epsilon=epsilon)
            assert low <= truth <= high <= low * (1 + 1e-11)
            back = jde.epsilon(run, delta=truth)
            assert back == pytest.approx(epsilon, abs=1e-10)


def test_pure_epsilons_add_up():
    # Dwork, Rothblum, Vadhan (2010): no loss exceeds the sum.
    run = jde.compose((jde.ApproximateDP(1.0), 1), (jde.ApproximateDP(2.0), 1))
    assert jde.delta(run, epsilon=3.0) == 0
    assert jde.delta(run, epsilon=np.nextafter(3.0, 0)) > 0
    assert 3.0 <= jde.epsilon(run, delta=0.0) <= 3 * (1 + 2e-12)
    failing = jde.compose(
        (jde.ApproximateDP(1.0, 0.1), 1), (jde.ApproximateDP(2, 0.2), 1)
    )
    assert 0.28 <= jde.delta(failing, epsilon=3.0) <= 0.28 * (1 + 1e-14)


def test_many_losses_are_integrated():
    parts = [(jde.ApproximateDP(0.1 * (i + 1)), 3) for i in range(6)]
    value, info = jde.epsilon(jde.compose(*parts), delta=1e-3, return_info=True)
    assert info.error < 1e-2 * value
    few = jde.epsilon(jde.compose(*parts[:5]), delta=1e-3)
    assert few < value


def test_an_epsilon_of_zero_within_rounding_is_not_certain():
    claims = [jde.ApproximateDP(epsilon=e, delta=0.0) for e in (1.0, 0.5)]
    run = jde.compose(*((claim, 1) for claim in claims))
    at_zero = float(jde.delta(run, epsilon=0.0))
    answer, info = jde.epsilon(run, delta=at_zero, return_info=True)
    assert answer + info.error > 0
    assert jde.epsilon_interval(run, delta=at_zero)[1] > 0
    # Well above it there is no doubt.
    assert jde.epsilon_interval(run, delta=at_zero + 1e-9) == (0, 0)
