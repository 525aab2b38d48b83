"""Profiles and tails against closed forms in many digits.

Sums over the number of episodes keep enough terms.
"""

import itertools
import math
from unittest import mock

import mpmath as mp
import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import binom

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.losses import mixture_halves
from jaxdp_episodic.accountant.losses.gaussian import (
    SampledGaussianLoss,
    gaussian_tails,
    log_gaussian_profile,
    near_gaussian_profile,
)
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
    ZeroedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.independent_episodes import (
    IndependentEpisodesLoss,
    ZeroedEpisodesLoss,
)
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule
from jaxdp_episodic.accountant.methods.rdp import COARSE, FINE
from jaxdp_episodic.accountant.numerics.loops import namespace
from oracles import precise


def three_episodes(o, p, r, s):
    return IndependentEpisodesLoss(o, p, s, namespace(s).full_like(s, 3.0))


# Every mechanism as a function of (outer rate, rate, inner rate, shift).
LOSSES = {
    "sampled": lambda o, p, r, s: SampledGaussianLoss(o, p, s),
    "swapped": lambda o, p, r, s: SwappedGaussianLoss(o, p, s),
    "antipodal": AntipodalGaussianLoss,
    "zeroed": ZeroedGaussianLoss,
    "episodes": three_episodes,
}
NAMES = ("gaussian", *LOSSES)


def tails(name, u, o=1.0, p=1.0, r=1.0, s=1.0):
    """Both directions' log h and log G, (2, 2, ...)."""

    def kernel(u, *fields):
        if name == "gaussian":
            return (gaussian_tails(fields[-1], u),) * 2
        return LOSSES[name](*fields).log_tails(u)

    return np.asarray(float64_boundary(kernel)(u, o, p, r, s))


def profiles(name, u, **fields):
    return tails(name, u, **fields)[:, 0]


def episodes(kind, u, p, s, number):
    """The same of independent episodes."""

    def kernel(u, *fields):
        return kind(*fields).log_tails(u)

    return np.asarray(float64_boundary(kernel)(u, np.ones_like(u), p, s, number))


def pairs(name, p, r, s):
    """Mixtures by definition, of the forward and of the backward loss."""
    if name == "zeroed":
        upper, lower = precise.zeroed_pairs(p, r, s)
        return upper, precise.mirrored(*lower)
    if name == "antipodal":
        return (precise.symmetric_pair(p, r, s),) * 2
    if name == "gaussian":
        return (([(1, s)], [(1, 0)]),) * 2
    forward = precise.sampled_pair(p, s)
    return forward, forward if name == "swapped" else precise.mirrored(*forward)


def random_settings(count, seed):
    """u, outer rate, p, r, s over the whole range, edges included."""
    rng = np.random.default_rng(seed)

    def rate():
        near_one = 1 - 10 ** rng.uniform(-12, 0, count)
        value = 10 ** rng.uniform(-12, 0, count)
        value = np.where(rng.random(count) < 0.25, near_one, value)
        return np.where(rng.random(count) < 0.1, 1.0, value)

    small = 10 ** rng.uniform(-13, 1, count)
    u = np.where(rng.random(count) < 0.4, small, rng.uniform(0, 50, count))
    u = np.where(rng.random(count) < 0.05, 0.0, u)
    s = 10 ** rng.uniform(-6, 3, count)
    return u, 10 ** rng.uniform(-3, 0, count), rate(), rate(), s


def assert_logs_close(found, exact):
    """1e-12 absolute, or 1e-14 relative for large logarithms."""
    for i, (value, reference) in enumerate(zip(found, exact, strict=True)):
        if reference == 0:
            assert value == -np.inf, i
        else:
            log = mp.log(reference)
            error = abs(mp.mpf(float(value)) - log)
            assert error <= max(mp.mpf("1e-12"), abs(log) * mp.mpf("1e-14")), i


@pytest.mark.parametrize("p", [1e-9, 0.999])
def test_the_end_of_the_backward_losses_is_not_understated(p):
    """``k = 1 - g (1 - p)`` cancels there; the result errs on the safe side."""
    end = -np.log1p(-p)
    u = end * (1 - 10 ** -np.linspace(0.3, 14, 100))
    s = 12.0
    _, found = profiles("sampled", u, p=p, s=s)
    with mp.workdps(60):
        for value, point in zip(found, u, strict=True):
            exact, near = (
                precise.mp_sampled_profiles(v, p, s)[1]
                for v in (point, point * (1 - 2e-15))
            )
            slack = 1e-14 * (1 + abs(mp.log(near)))
            assert mp.mpf(float(value)) <= mp.log(near) + slack
            if exact > 0:
                assert mp.mpf(float(value)) >= mp.log(exact) - slack


def test_near_gaussian_profile():
    rng = np.random.default_rng(0)
    shift, t = 10 ** rng.uniform(-8, 3, 4000), rng.uniform(-10, 40, 4000)
    u = np.maximum(shift * (t + shift / 2), 0.0)
    exact = float64_boundary(log_gaussian_profile)(shift, u)
    error = np.abs(near_gaussian_profile(np, shift, u) - exact)
    assert error.max() < 0.6 and error[exact < np.log(0.3)].max() < 0.12


@pytest.mark.parametrize("name", ["gaussian", *list(LOSSES)[:-1]])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_against_many_digits(name, seed):
    u, outer, p, r, s = random_settings(60 if seed == 0 else 600, seed)
    outer = outer if name != "gaussian" else np.ones_like(u)
    both = tails(name, u, outer, p, r, s)
    # Near the end of the backward losses k cancels; they err on the safe side.
    end = np.log((1 - p) + p * r) - np.log1p(-np.minimum(p, 1 - 1e-16))
    is_far = (name != "zeroed") | (u < 0.9 * end) & (both[1, 0] > -600)
    assert np.sum(is_far & np.isfinite(both[1, 0])) > len(u) / 10
    with mp.workdps(120):
        exact = [
            [precise.mp_tails(*pair, v) for pair in pairs(name, *row)]
            for v, *row in zip(u, p, r, s, strict=True)
        ]
        exact = np.array(exact) * np.array([[[mp.mpf(float(o))]] for o in outer])
        for i, (found, slope) in enumerate(both):
            kept = is_far | (i == 0)
            assert_logs_close(found[kept], exact[kept, i, 0])
            kept &= u > 0  # at 0 a loss may be too flat for 120 digits
            assert_logs_close(slope[kept], exact[kept, i, 1])
        for i in np.flatnonzero(~is_far & np.isfinite(both[1, 0])):
            if exact[i, 1, 0] > 0:
                true = float(mp.log(exact[i, 1, 0]))
                assert both[1, 0, i] >= true * (1 + 1e-13) - 1e-13


@pytest.mark.parametrize("kind", [IndependentEpisodesLoss, ZeroedEpisodesLoss])
def test_independent_episodes_against_the_sum(kind):
    u = np.array([[0.0], [1e-9], [2.0], [30.0]])
    rates, numbers = np.array([0.03, 0.03, 1e-9, 1.0]), np.array([1, 9, 3, 2])
    u, rate, number = (a.ravel() for a in np.broadcast_arrays(u, rates, numbers))
    found = episodes(kind, u, rate, 0.8, number.astype(float))[:, 0]
    name = "swapped" if kind is IndependentEpisodesLoss else "zeroed"
    with mp.workdps(80):
        for v, eta, most, *both in zip(u, rate, number.tolist(), *found, strict=True):
            eta, total = mp.mpf(eta), [mp.mpf(0), mp.mpf(0)]
            any_rate = 1 - (1 - eta) ** most
            for k in range(1, most + 1):
                rates = (any_rate, 0) if name == "swapped" else (1, any_rate)
                mass = mp.binomial(most, k) * eta**k * (1 - eta) ** (most - k)
                for i, pair in enumerate(pairs(name, *rates, k * mp.mpf(0.8))):
                    total[i] += mass / any_rate * precise.mp_tails(*pair, v)[0]
            assert_logs_close(both, total)


@pytest.mark.parametrize("kind", [IndependentEpisodesLoss, ZeroedEpisodesLoss])
@pytest.mark.parametrize(("b", "eta", "s"), [(700, 0.05, 0.02), (1500, 0.01, 20.0)])
def test_many_independent_episodes_are_the_sum_over_their_number(kind, b, eta, s):
    """Of profiles that are compared above; hardly ever more than 700 hold the unit."""
    u, k = np.array([0.0, 0.5, 10.0]) * (s / 0.02) ** 2, np.arange(1, 701)
    found = episodes(kind, u, eta, s, b)[:, 0]
    field, name = ("r", "zeroed") if kind is ZeroedEpisodesLoss else ("p", "swapped")
    each = profiles(name, u[:, None], s=s * k, **{field: 1 - (1 - eta) ** b})
    expected = logsumexp(binom.logpmf(k, b, eta) + each, axis=-1)
    expected -= np.log1p(-((1 - eta) ** b))  # given J >= 1
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-11)


def test_searches_for_a_loss_end_where_floats_are_too_coarse(monkeypatch):
    mean = mock.Mock(wraps=mixture_halves._log_mean)
    monkeypatch.setattr(mixture_halves, "_log_mean", mean)
    profiles("swapped", np.geomspace(1.0, 1e13, 99), s=2e6)
    assert mean.call_count < 40  # of 120, as x jumps between neighbors


def test_zero_rates_and_infinite_noise_leak_nothing():
    used = {"gaussian": "s", "antipodal": "oprs", "zeroed": "oprs"}
    for name, zero in itertools.product(NAMES, "oprs"):
        found = profiles(name, np.array([0.0, 1.0]), **{zero: 0.0})
        assert np.all(np.isneginf(found)) == (zero in used.get(name, "ops"))


def test_no_noise_gives_the_total_variation_of_the_draw():
    u = np.array([0.0, 0.01, 5.0])
    for s in (1e9, np.inf):
        fields = {"o": 0.5, "p": 0.2, "r": 0.1, "s": s}
        seen = {"gaussian": 1, "antipodal": 0.01, "episodes": 0.5 * (1 - 0.8**3)}
        for name in set(NAMES) - {"zeroed"}:
            forward, backward = np.exp(profiles(name, u, **fields))
            expected = np.full(3, seen.get(name, 0.1))
            np.testing.assert_allclose(forward, expected)
            if name == "sampled":
                expected = 0.5 * np.maximum(1 - np.exp(u) * 0.8, 0)
            np.testing.assert_allclose(backward, expected, rtol=1e-13)


def edges():
    """Settings at every end of the range, (5, ...)."""
    inf, below_one, above_one = np.inf, np.nextafter(1, 0), np.nextafter(1, 2)
    u = [0, 5e-324, 1e-20, 1e-12, 0.5, 1, above_one, 36.7, 710, 1e4, 1e300, inf]
    rates = [0, 5e-324, 1e-200, 1e-12, 0.3, below_one, 1]
    shifts = [0, 5e-324, 1e-200, 1e-6, 1, 14, 25, 1e3, 1e8, 1e150, inf]
    return np.array(list(itertools.product(u, [0.5, 1], rates, rates, shifts))).T


@pytest.mark.parametrize("name", NAMES)
def test_never_nan_at_every_edge(name):
    values = tails(name, *edges())
    assert not np.isnan(values).any()
    assert np.all(values[:, 0] <= 0)


# --- Sums over the number of episodes: kept terms against all ---


# eta, shift, B and order - 1: the mean, the largest k, or k = 1 dominates.
SETTINGS = np.array(
    [
        (0.2, 0.01, 360, 3.0),
        (0.2, 0.01, 360, 20.0),
        (0.01, 0.02, 200, 8.0),
        (1e-4, 0.02, 50, 20.0),
        (1e-3, 0.1, 40, 2.0),
        (0.9, 0.02, 150, 0.5),
        (1.0, 0.1, 30, 4.0),
        (0.3, 1.0, 1, 5.0),
    ]
).T


def every_term(kind, eta, shift, number, t):
    """log of the sum of all terms, in plain Python."""
    any_rate = -math.expm1(number * math.log1p(-eta)) if eta < 1 else 1.0
    k = np.arange(1.0, number + 1)
    one, rate = np.ones_like(k), np.full_like(k, any_rate)
    if kind is ZeroedEpisodesLoss:
        loss = ZeroedGaussianLoss(one, one, rate, k * shift)
    else:
        loss = SwappedGaussianLoss(one, rate, k * shift)
    ask = float64_boundary(
        lambda order: loss.log_excess(order, MomentRule("forward", FINE))
    )
    (excess,) = ask(np.full_like(k, t))
    rates, most = (mp.mpf(eta), 1 - mp.mpf(eta)), int(number)
    terms = [
        value + float(mp.log(math.comb(most, j) * rates[0] ** j * rest / any_rate))
        for j, value in enumerate(excess.tolist(), 1)
        if (rest := rates[1] ** (most - j)) > 0
    ]
    return float(np.logaddexp.reduce(terms))


@pytest.mark.parametrize("kind", [IndependentEpisodesLoss, ZeroedEpisodesLoss])
def test_dropped_terms_do_not_matter(kind):
    eta, shift, number, t = SETTINGS
    loss = kind(np.ones_like(eta), eta, shift, number)
    rule = MomentRule("forward", FINE)
    (found,) = float64_boundary(lambda t: loss.log_excess(t, rule))(t)
    truth = np.array([every_term(kind, *row) for row in SETTINGS.T])
    np.testing.assert_allclose(np.expm1(found - truth), 0.0, atol=1e-12)
    # For searches: few terms, and slopes that agree with differences.
    search = float64_boundary(
        lambda t: loss.log_excess(t, MomentRule("forward", COARSE, True))
    )
    rough, slope, _ = search(t)
    step = 1e-6 * t
    up, down = search(t + step)[0], search(t - step)[0]
    np.testing.assert_allclose(rough, truth, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=1e-3)
