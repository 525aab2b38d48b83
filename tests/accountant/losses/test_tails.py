"""Profiles and tails against closed forms in many digits and integrals.

Sums over the number of episodes keep enough terms.
"""

import functools
import itertools
import math

import mpmath as mp
import numpy as np
import pytest

from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.losses.gaussian import gaussian_tails
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
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.methods.rdp.kernels import COARSE, FINE
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


def tails(name):
    """A kernel of (u, o, p, r, s): both directions' log h and log G, (2, 2, ...)."""
    if name == "gaussian":
        return lambda u, o, p, r, s: (gaussian_tails(s, u),) * 2
    return lambda u, *fields: LOSSES[name](*fields).log_tails(u)


def profiles(name):
    """The same for log h alone, (2, ...)."""
    return lambda *args: tuple(profile for profile, _ in tails(name)(*args))


NAMES = ("gaussian", *LOSSES)


def profiles_of(name, u, o=1.0, p=1.0, r=1.0, s=1.0):
    return float64_boundary(profiles(name))(u, o, p, r, s)


def GAUSSIAN(s, u):
    return profiles_of("gaussian", u, s=s)[0]


def SAMPLED(u, o, p, s):
    return profiles_of("sampled", u, o, p, s=s)


def SWAPPED(u, o, p, s):
    return profiles_of("swapped", u, o, p, s=s)


ANTIPODAL = functools.partial(profiles_of, "antipodal")
ZEROED = functools.partial(profiles_of, "zeroed")


def EPISODES(u, p, s, number):
    def kernel(u, *fields):
        tails = IndependentEpisodesLoss(*fields).log_tails(u)
        return tuple(profile for profile, _ in tails)

    return float64_boundary(kernel)(u, 1.0, p, s, number)


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


def exact_inner(u, rate):
    return 1 + mp.expm1(mp.mpf(u)) / mp.mpf(rate)


def exact_antipodal(u, p, r, s):
    """From the root of a quadratic and three normal tails."""
    g, p, r, s = exact_inner(u, r), mp.mpf(p), mp.mpf(r), mp.mpf(s)
    d, a = p * mp.exp(-s * s / 2), (1 - g) * (1 - p)
    t = mp.log((-a + mp.sqrt(a * a + 4 * d * d * g)) / (2 * d)) / s
    tail = [mp.erfc(x / mp.sqrt(2)) / 2 for x in (t, t + s, t - s)]
    return r * ((1 - g) * (1 - p) * tail[0] - g * p * tail[1] + p * tail[2])


def exact_zeroed(u, p, r, s):
    """The forward direction from the root of a quadratic, backward in closed form."""
    g, p, r, s = mp.exp(mp.mpf(u)), mp.mpf(p), mp.mpf(r), mp.mpf(s)
    shrink, d = mp.exp(-s * s / 2), p * r
    a, b = (g - 1) * (1 - p) + g * d, (g - 1) * p * (1 - r)
    t = mp.log((a + mp.sqrt(a * a + 4 * b * d * shrink**2)) / (2 * d * shrink)) / s
    tail = [mp.erfc(x / mp.sqrt(2)) / 2 for x in (t - s, t + s, t)]
    k = d - (g - 1) * (1 - p)
    inner = precise.mp_gaussian_profile(s, 1 + (g - 1) / k) if k > 0 else mp.mpf(0)
    return d * tail[0] - b * tail[1] - a * tail[2], k * inner


def assert_logs_close(found, exact):
    """1e-12 absolute, or 1e-14 relative for large logarithms."""
    for i, (value, reference) in enumerate(zip(found, exact, strict=True)):
        if reference == 0:
            assert value == -np.inf, i
        else:
            reference = mp.log(reference)
            error = abs(mp.mpf(float(value)) - reference)
            assert error <= max(mp.mpf("1e-12"), abs(reference) * mp.mpf("1e-14")), i


@pytest.mark.parametrize("p", [1e-9, 0.999])
def test_the_end_of_the_backward_losses_is_not_understated(p):
    """``k = 1 - g (1 - p)`` cancels there; the result errs on the safe side."""
    end = -np.log1p(-p)
    u = end * (1 - 10 ** -np.linspace(0.3, 14, 100))
    s = 12.0
    _, found = SAMPLED(u, 1.0, p, s)
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


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_against_many_digits(seed):
    u, outer, p, r, s = random_settings(120 if seed == 0 else 3000, seed)
    rows = list(zip(u, p, r, s, strict=True))
    scale = [mp.mpf(float(o)) for o in outer]
    with mp.workdps(120):
        gaussian = [precise.mp_gaussian_profile(s, mp.exp(u)) for u, _, _, s in rows]
        assert_logs_close(GAUSSIAN(s, u), gaussian)

        forward, backward = SAMPLED(u, outer, p, s)
        exact = [precise.mp_sampled_profiles(u, p, s) for u, p, _, s in rows]
        pairs = list(zip(scale, exact, strict=True))
        assert_logs_close(forward, [o * e[0] for o, e in pairs])
        assert_logs_close(backward, [o * e[1] for o, e in pairs])

        both = SWAPPED(u, outer, p, s)
        assert_logs_close(both[0], [o * e[0] for o, e in pairs])
        assert np.array_equal(*both)

        both = ANTIPODAL(u, outer, p, r, s)
        exact = [exact_antipodal(*row) for row in rows]
        pairs = zip(scale, exact, strict=True)
        assert_logs_close(both[0], [o * e for o, e in pairs])
        assert np.array_equal(*both)

        forward, backward = ZEROED(u, outer, p, r, s)
        exact = [exact_zeroed(*row) for row in rows]
        assert_logs_close(
            forward, [o * e[0] for o, e in zip(scale, exact, strict=True)]
        )
        # Near the end of the backward losses k cancels; they err on the safe side.
        end = np.log((1 - p) + p * r) - np.log1p(-np.minimum(p, 1 - 1e-16))
        far = (u < 0.9 * end) & (backward > -600)
        kept = np.flatnonzero(far)
        assert len(kept) > 20
        assert_logs_close(backward[kept], [scale[i] * exact[i][1] for i in kept])
        for i in np.flatnonzero(~far & np.isfinite(backward)):
            if exact[i][1] > 0:
                true = float(mp.log(scale[i] * exact[i][1]))
                assert backward[i] >= true * (1 + 1e-13) - 1e-13


@pytest.mark.slow
@pytest.mark.parametrize(
    "u, p, r, s", [(0.0, 0.7, 1.0, 0.5), (0.02, 0.1, 0.3, 1.0), (1.0, 1.0, 0.2, 2.0)]
)
def test_against_the_integral_of_the_positive_part(u, p, r, s):
    with mp.workdps(30):
        g = mp.exp(mp.mpf(u))
        top, bottom = precise.sampled_pair(p, s)
        forward, backward = SAMPLED(u, 1.0, p, s)
        exact = precise.mp_hockey_stick(top, bottom, g)
        assert float(abs(mp.exp(forward) / exact - 1)) < 1e-12
        exact = precise.mp_hockey_stick(bottom, top, g)
        assert float(abs(mp.exp(backward) - exact)) <= 1e-12 * float(exact)
        exact = precise.mp_hockey_stick(*precise.symmetric_pair(p, r, s), g)
        assert float(abs(mp.exp(ANTIPODAL(u, 1.0, p, r, s)[0]) / exact - 1)) < 1e-12
        forward, backward = ZEROED(u, 1.0, p, r, s)
        null, kept, reached = 1 - p + p * r, p * (1 - r), p * r
        exact = precise.mp_hockey_stick(
            [(1 - p, 0), (kept, -s), (reached, s)], [(null, 0), (kept, -s)], g
        )
        assert float(abs(mp.exp(forward) / exact - 1)) < 1e-11
        exact = precise.mp_hockey_stick([(null, 0), (kept, s)], [(1 - p, 0), (p, s)], g)
        assert float(abs(mp.exp(backward) - exact)) <= 1e-11 * float(exact)


@pytest.mark.parametrize("name", NAMES)
def test_tails_are_the_slopes_of_the_profiles(name):
    """``G = g Q(L > log g) = -dh/du``, in both directions, by differences of log h."""
    rng = np.random.default_rng(5)
    u, shift = 10 ** rng.uniform(-2, 0.5, 300), 10 ** rng.uniform(-0.7, 0.7, 300)
    fields = (*10 ** rng.uniform(-2, 0, (3, 300)), shift)
    found = float64_boundary(tails(name))(u, *fields)
    move = 1e-3 * u
    value = float64_boundary(profiles(name))
    with np.errstate(invalid="ignore"):  # beyond the largest loss
        near, far = (
            np.subtract(value(u + m, *fields), value(u - m, *fields))
            for m in (move, 2 * move)
        )
    for (h, tail), fall in zip(found, (far - 8 * near) / (12 * move), strict=True):
        # Backward losses end, and near their end the profile falls steeply.
        smooth = (h > -600) & (fall * move < 1e-2)
        assert smooth.sum() > 20
        np.testing.assert_allclose(
            tail[smooth], h[smooth] + np.log(fall[smooth]), atol=1e-7
        )


@pytest.mark.parametrize("eta, episodes", [(0.03, 1), (0.03, 40), (1e-9, 7), (1.0, 4)])
def test_independent_episodes_against_the_sum(eta, episodes):
    u = np.array([0.0, 1e-9, 0.1, 2.0, 30.0])
    found, same = EPISODES(u, eta, 0.8, float(episodes))
    assert np.array_equal(found, same)
    with mp.workdps(80):
        rate, shift = mp.mpf(eta), mp.mpf(0.8)
        any_rate = 1 - (1 - rate) ** episodes
        exact = [
            mp.fsum(
                mp.binomial(episodes, k)
                * rate**k
                * (1 - rate) ** (episodes - k)
                * precise.mp_gaussian_profile(k * shift, exact_inner(v, any_rate))
                for k in range(1, episodes + 1)
            )
            for v in u
        ]
        assert_logs_close(found, exact)


def test_settings_of_a_batch_keep_their_number_of_episodes():
    u, episodes = np.full(3, 0.5), np.array([1.0, 3.0, 200.0])
    batch = EPISODES(u, 0.01, 0.5, episodes)[0]
    single = [EPISODES(0.5, 0.01, 0.5, b)[0] for b in episodes]
    np.testing.assert_allclose(batch, single, rtol=1e-14)
    np.testing.assert_allclose(batch[0], SWAPPED(0.5, 1.0, 0.01, 0.5)[0], rtol=1e-14)


def test_zero_rates_and_infinite_noise_leak_nothing():
    for name in NAMES:
        for o, p, r, s in [(1, 1, 1, 0), (0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1)]:
            used = {
                "gaussian": s,
                "episodes": o * p * s,
                "sampled": o * p * s,
                "swapped": o * p * s,
                "antipodal": o * p * r * s,
                "zeroed": o * p * r * s,
            }[name]
            kernel = float64_boundary(profiles(name))
            found = np.asarray(kernel(np.array([0.0, 1.0]), o, p, r, s))
            assert np.all(np.isneginf(found)) == (used == 0), (name, o, p, r, s)


def test_no_noise_gives_the_total_variation_of_the_draw():
    u = np.array([0.0, 0.01, 5.0])
    for s in (1e9, np.inf):
        assert np.array_equal(GAUSSIAN(s, u), np.zeros(3))
        forward, backward = SAMPLED(u, 0.5, 0.1, s)
        np.testing.assert_allclose(np.exp(forward), 0.05)
        k = np.maximum(1 - np.exp(u) * 0.9, 0)
        np.testing.assert_allclose(np.exp(backward), 0.5 * k, rtol=1e-13)
        np.testing.assert_allclose(np.exp(SWAPPED(u, 0.5, 0.1, s)[0]), 0.05)
        np.testing.assert_allclose(np.exp(ANTIPODAL(u, 0.5, 0.2, 0.1, s)[0]), 0.01)
        found = np.exp(EPISODES(u, 0.1, s, 3.0)[0])
        np.testing.assert_allclose(found, 1 - 0.9**3)


def edges():
    """Settings at every end of the range, (5, ...)."""
    inf, below_one, above_one = np.inf, np.nextafter(1, 0), np.nextafter(1, 2)
    u = [0, 5e-324, 1e-20, 1e-12, 0.5, 1, above_one, 36.7, 710, 1e4, 1e300, inf]
    rates = [0, 5e-324, 1e-200, 1e-12, 0.3, below_one, 1]
    shifts = [0, 5e-324, 1e-200, 1e-6, 1, 14, 25, 1e3, 1e8, 1e150, inf]
    return np.array(list(itertools.product(u, [0.5, 1], rates, rates, shifts))).T


@pytest.mark.parametrize("name", NAMES)
def test_never_nan_at_every_edge(name):
    values = np.asarray(float64_boundary(tails(name))(*edges()))
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
    terms = []
    for j, value in zip(range(1, int(number) + 1), excess.tolist(), strict=True):
        if eta == 1 and j < number:
            continue
        rest = (number - j) * math.log1p(-eta) if j < number else 0.0
        log_mass = math.log(math.comb(int(number), j)) + j * math.log(eta) + rest
        terms.append(log_mass - math.log(any_rate) + value)
    peak = max(terms)
    return peak + math.log(math.fsum(math.exp(term - peak) for term in terms))


@pytest.mark.parametrize("kind", [IndependentEpisodesLoss, ZeroedEpisodesLoss])
def test_dropped_terms_do_not_matter(kind):
    eta, shift, number, t = SETTINGS
    loss = kind(np.ones_like(eta), eta, shift, number)
    (found,) = float64_boundary(
        lambda t: loss.log_excess(t, MomentRule("forward", FINE))
    )(t)
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
