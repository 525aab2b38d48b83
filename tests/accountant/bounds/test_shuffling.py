"""Shuffling: every bound at random settings, against enumeration.

Enumerated clones, answers of real data sets, and histograms of users with
individual randomizers.
"""

import numpy as np
import pytest
import scipy.special
import scipy.stats
from shuffled_responses import exact_randomized_response_delta

from jaxdp_episodic.accountant.numerics.binomial import log_shifted_hockey_stick
from jaxdp_episodic.bounds import (
    KINDS,
    shuffled_delta,
    shuffled_epsilon,
    shuffled_epsilon_closed_form,
)
from oracles.finite_distributions import assert_between, stick, worst_stick
from rows import fast_and_slow


def clone_sum(eps0, n, eps, chance):
    """The published pair, literally: all clone counts and all numbers of A among them.

    Weights of the pair, of C ~ Binomial(n - 1, chance) and of A ~ Binomial(C, 1/2).
    """
    true = 1 / (1 + np.exp(-eps0))
    c = np.arange(n)
    f = scipy.stats.binom.pmf(np.arange(-1, n + 1), c[:, None], 0.5)
    first = true * f[:, :-1] + (1 - true) * f[:, 1:]
    second = (1 - true) * f[:, :-1] + true * f[:, 1:]
    sticks = np.maximum(first - np.exp(eps) * second, 0).sum(axis=1)
    return scipy.stats.binom.pmf(c, n - 1, chance) @ sticks


def answered(eps0, n, eps, ones):
    """The distribution of the ones of shuffled randomized response on given data."""
    true = 1 / (1 + np.exp(-eps0))
    others = np.convolve(
        scipy.stats.binom.pmf(np.arange(ones + 1), ones, true),
        scipy.stats.binom.pmf(np.arange(n - ones), n - 1 - ones, 1 - true),
    )
    one, zero = (np.convolve(others, [1 - p, p]) for p in (true, 1 - true))
    return max(stick(one, zero, eps), stick(zero, one, eps))


def histogram(dists):
    """Joint distribution of the counts of two of three messages."""
    n = len(dists)
    table = np.zeros((n + 1, n + 1))
    table[0, 0] = 1
    for a, b, c in dists:
        moved = c * table
        moved[1:] += a * table[:-1]
        moved[:, 1:] += b * table[:, :-1]
        table = moved
    return table.ravel()


def random_randomizers(rng, eps0, users):
    """Distributions on three messages, all within e^eps0, extreme ones among them."""
    base = rng.dirichlet(np.ones(3) * rng.choice([0.3, 3.0]))
    tilt = np.where(rng.random((users, 3)) < 0.5, 1.0, np.exp(eps0))
    if rng.random() < 0.3:
        tilt = np.exp(eps0 * rng.random((users, 3)))
    dists = base * tilt
    # Normalizing may exceed e^eps0: shrink towards the base.
    dists /= dists.sum(axis=1, keepdims=True)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        mixed = middle * dists + (1 - middle) * base
        spread = (mixed.max(axis=0) / mixed.min(axis=0)).max()
        low, high = (middle, high) if spread <= np.exp(eps0) else (low, middle)
    return low * dists + (1 - low) * base


def shuffling_settings(rng, most_users, count):
    n = np.floor(10 ** rng.uniform(0, np.log10(most_users + 1), count)).astype(int)
    eps0 = 10 ** rng.uniform(-2, 0.9, count)
    return eps0, n, eps0 * rng.uniform(0, 1, count) ** 2


def test_shuffled_bounds_equal_the_enumerated_clones():
    """All counts of clones and of messages among them; the lower bound is tight."""
    rng = np.random.default_rng(51)
    eps0, n, eps = shuffling_settings(rng, 60, 60)
    upper, response, lower = (
        shuffled_delta(eps0, num_users=n, epsilon=eps, kind=k) for k in KINDS
    )
    for row, (local, users, at) in enumerate(zip(eps0, n, eps, strict=True)):
        any_ = clone_sum(local, users, at, np.exp(-local))
        binary = clone_sum(local, users, at, 2 / (1 + np.exp(local)))
        assert upper[row] == pytest.approx(any_, rel=1e-7, abs=1e-13)
        assert response[row] == pytest.approx(binary, rel=1e-7, abs=1e-13)
        assert upper[row] >= any_ * (1 - 1e-11) - 1e-14
        assert response[row] >= binary * (1 - 1e-11) - 1e-14
        if users > 40:
            continue
        b = 1 / (np.exp(local) + 2)
        dists = np.full((3, 3), b) + np.diag([1 - 3 * b] * 3)
        third = [dists[2]] * (users - 1)
        pair = (histogram([dists[0], *third]), histogram([dists[1], *third]))
        attained = max(stick(*pair, at), answered(local, users, at, 0))
        assert lower[row] == pytest.approx(attained, rel=1e-6, abs=1e-13)
        assert lower[row] <= attained * (1 + 1e-9) + 1e-14


def test_shuffled_randomizers_of_any_kind():
    """Users with individual randomizers and data, enumerated: below "upper"."""
    rng = np.random.default_rng(52)
    eps0, n, eps = shuffling_settings(rng, 20, 200)
    upper = shuffled_delta(eps0, num_users=n, epsilon=eps)
    tightest = 0.0
    for row in range(200):
        dists = random_randomizers(rng, eps0[row], n[row] + 1)
        spread = np.log((dists.max(axis=0) / dists.min(axis=0)).max())
        assert spread <= eps0[row] * (1 + 1e-9)
        pair = [histogram([own, *dists[2:]]) for own in dists[:2]]
        exact = worst_stick([tuple(pair)], eps[row])
        assert exact <= upper[row] * (1 + 1e-9) + 1e-13
        tightest = max(tightest, exact / max(upper[row], 1e-6))
    assert tightest > 0.5


def test_the_closed_form_is_above():
    rng = np.random.default_rng(54)
    n = np.floor(10 ** rng.uniform(0, 9, 40)).astype(int)
    eps0, delta = 10 ** rng.uniform(-2, 0.9, 40), 10 ** rng.uniform(-12, -1, 40)
    upper = shuffled_epsilon(eps0, num_users=n, delta=delta)
    closed = shuffled_epsilon_closed_form(eps0, num_users=n, delta=delta)
    assert_between(0, upper, closed, rtol=1e-6)


def test_exact_answers_by_enumeration():
    rng = np.random.default_rng(2)
    settings = shuffling_settings(rng, 200, 60)
    for eps0, n, eps in zip(*settings, strict=True):
        ones = int(rng.integers(n))
        value = exact_randomized_response_delta(
            eps0, num_users=n, epsilon=eps, num_other_ones=ones
        )
        expected = answered(eps0, n, eps, ones)
        assert value == pytest.approx(expected, rel=1e-6, abs=1e-13)


@pytest.mark.parametrize(
    ("n", "eps0", "delta"), [(100_000, 0.5, 1e-6), (10_000_000, 3.0, 1e-12)]
)
def test_blocks_are_nearly_exact(n, eps0, delta):
    """Blocks of many clone counts against the sum over every count."""
    eps = shuffled_epsilon(eps0, num_users=n, delta=delta)
    chance = np.exp(-eps0)
    spread = np.sqrt(n * chance * (1 - chance))
    low, high = (int(n * chance + side * spread) for side in (-10, 10))
    c = np.arange(max(0, low), min(n, high)).astype(float)
    own = 1 / (1 + np.exp(-eps0))
    sticks = log_shifted_hockey_stick(
        c, np.array(1.0), np.array(own), np.array(1 - own), np.expm1(eps), side="lower"
    )
    exact = np.sum(scipy.stats.binom.pmf(c, n - 1, chance) * np.exp(sticks))
    value = shuffled_delta(eps0, num_users=n, epsilon=eps)
    assert exact * (1 - 1e-7) <= value <= exact * 1.01


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", fast_and_slow(KINDS, lambda kind: kind != "lower"))
def test_epsilon_inverts_delta(kind):
    n = np.array([30, 10**9])[:, None]
    eps0 = np.array([0.1, 1.0, 4.0])
    delta = 1e-6
    eps = shuffled_epsilon(eps0, num_users=n, delta=delta, kind=kind)
    assert eps.shape == (2, 3) and eps.dtype == np.float64
    at, beside = (
        shuffled_delta(eps0, num_users=n, epsilon=eps * f, kind=kind)
        for f in (1, 1 - 1e-6)
    )
    if kind == "lower":
        assert np.all((at >= delta) | (eps == 0))
    else:
        assert np.all(at <= delta)
        assert np.all((beside >= delta) | (eps == eps0))
    one = shuffled_epsilon(1.0, num_users=30, delta=delta, kind=kind)
    assert isinstance(one, np.float64) and one == eps[0, 1]


def test_extreme_settings():
    for kind in KINDS:
        assert shuffled_delta(0.0, num_users=10, epsilon=0.0, kind=kind) == 0
        assert shuffled_delta(1.0, num_users=10, epsilon=1.0, kind=kind) == 0
        alone = shuffled_delta(1.0, num_users=1, epsilon=0.0, kind=kind)
        assert alone == pytest.approx(np.tanh(0.5), rel=1e-8)
        assert shuffled_epsilon(1.0, num_users=10**6, delta=0.0, kind=kind) == 1
        assert 0 <= shuffled_delta(100.0, num_users=50, epsilon=1.0, kind=kind) <= 1
    for eps0 in (1e-8, 1e-12, 1e-18):  # one other message, and that is a clone
        found = [shuffled_delta(eps0, num_users=2, epsilon=0, kind=k) for k in KINDS]
        assert found[2] <= np.tanh(eps0 / 2) / 2 <= min(found[:2])
    # If the condition of the closed form fails: the local epsilon.
    assert shuffled_epsilon_closed_form(3.0, num_users=10, delta=1e-6) == 3


def test_invalid_arguments_are_refused():
    for change in (
        *({"num_users": 0}, {"local_epsilon": -1}, {"local_epsilon": 301}),
        *({"epsilon": np.nan}, {"kind": "exact"}),
        {"local_epsilon": [1, 2], "epsilon": [0, 0, 0]},
    ):
        setting = {"local_epsilon": 1.0, "num_users": 10, "epsilon": 0.5, **change}
        with pytest.raises(ValueError, match="|".join(f"{n}(:| must)" for n in change)):
            shuffled_delta(setting.pop("local_epsilon"), **setting)
