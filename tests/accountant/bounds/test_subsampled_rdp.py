"""Subsampled RDP: against the published sums and the true mechanisms."""

import dataclasses
import functools
import math

import mpmath as mp
import numpy as np
import pytest

from jaxdp_episodic.accountant.bounds import subsampling
from jaxdp_episodic.bounds import (
    Gaussian,
    Laplace,
    RandomizedResponse,
    RdpCurve,
    RdpTable,
    rdp_poisson_subsampled,
    rdp_without_replacement_subsampled,
)
from oracles.finite_distributions import assert_between, random_distributions
from oracles.precise import mp_gaussian, mp_laplace, mp_response

COUNT = 100
RATES = [1e-12, 1e-4, 0.01, 0.3, 0.9]
WHOLE = [2, 3, 5, 32]


# --- The published formulas, literally, at 60 digits ---

CURVES = {Gaussian: mp_gaussian, Laplace: mp_laplace, RandomizedResponse: mp_response}


def mp_curve(mechanism):
    """r(alpha) of a scalar mechanism, independently; r(inf) at alpha = inf."""
    (value,) = (float(v) for v in dataclasses.astuple(mechanism))
    return functools.cache(lambda a: CURVES[type(mechanism)](a, value))


def mp_poisson(curve, p, a, factor):
    """Zhu and Wang 2019, with the term 1 included: M itself."""
    p = mp.mpf(p)
    moment = (1 - p) ** (a - 1) * (a * p - p + 1)
    for k in range(2, a + 1):
        term = mp.exp((k - 1) * curve(k)) * p**k * (1 - p) ** (a - k)
        moment += math.comb(a, k) * term * (factor if k > 2 else 1)
    return mp.log(moment) / (a - 1)


def mp_without_replacement(curve, p, a):
    """Wang, Balle and Kasiviswanathan 2019, Theorem 9."""
    p, pure = mp.mpf(p), curve(mp.inf)
    last = mp.expm1(pure) if pure < 1e5 else mp.inf
    second = min(4 * mp.expm1(curve(2)), mp.exp(curve(2)) * min(2, last**2))
    moment = 1 + p**2 * math.comb(a, 2) * second
    for j in range(3, a + 1):
        most = 2 if last >= 2 else min(2, last**j)
        moment += p**j * math.comb(a, j) * mp.exp((j - 1) * curve(j)) * most
    return mp.log(moment) / (a - 1)


MECHANISMS = [
    Gaussian(0.5),
    Gaussian(20.0),
    Laplace(0.2),
    Laplace(50.0),
    RandomizedResponse(0.05),
    RandomizedResponse(9.0),
]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_values_are_those_of_the_published_sums(mechanism):
    def smallest(moment, plain=False):
        """At each rate and order; an amplified RDP is at most that of all units."""
        rows = [[moment(p, a) for a in WHOLE] for p in RATES]
        if not plain:
            least = [curve(a) for a in WHOLE]
            rows = [[*map(min, row, least)] for row in rows]
        return np.array(rows, dtype=np.float64)

    same = functools.partial(np.testing.assert_allclose, rtol=5e-13)
    with mp.workdps(60):
        curve = mp_curve(mechanism)
        for bound, factor in (("general", 3), ("tight", 1), ("lower", 1)):
            values = rdp_poisson_subsampled(
                mechanism, sampling_probability=RATES, orders=WHOLE, bound=bound
            )
            moment = functools.partial(mp_poisson, curve, factor=factor)
            same(values, smallest(moment, plain=bound == "lower"))
        values = rdp_without_replacement_subsampled(
            mechanism, sampling_rate=RATES, orders=WHOLE
        )
        same(values, smallest(functools.partial(mp_without_replacement, curve)))


# --- Limits and order ---


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_rate_0_and_rate_1(mechanism):
    """At rate 1 the curve itself: this fails if log M is divided by a, not a - 1."""
    orders = [1.001, 1.5, 2, 2.7, 3, 17.3, 64]
    base = mechanism.rdp(orders)
    for bound in ("general", "tight"):
        values = rdp_poisson_subsampled(
            mechanism, sampling_probability=[0.0, 1.0], orders=orders, bound=bound
        )
        assert np.all(values[0] == 0)
        np.testing.assert_allclose(values[1], base, rtol=1e-14)
    lower = rdp_poisson_subsampled(
        mechanism, sampling_probability=1.0, orders=[2, 3, 64], bound="lower"
    )
    np.testing.assert_allclose(lower, base[[2, 4, 6]], rtol=1e-13)
    values = rdp_without_replacement_subsampled(
        mechanism, sampling_rate=[0.0, 1.0], orders=orders
    )
    assert np.all(values[0] == 0)
    np.testing.assert_allclose(values[1], base, rtol=1e-14)


def test_between_integer_orders_the_chord_is_used():
    at = functools.partial(
        rdp_poisson_subsampled, Laplace(1.0), sampling_probability=0.1, bound="tight"
    )
    chord = (0.25 * 3 * at(orders=4) + 0.75 * 4 * at(orders=5)) / 3.75
    assert at(orders=4.75) == pytest.approx(chord, rel=1e-14)
    assert at(orders=1.25) == pytest.approx(at(orders=2), rel=1e-14)


def test_outer_rate():
    with mp.workdps(50):
        for p in (1e-6, 0.2):
            for outer in (0.0, 1e-9, 0.3, 1.0):
                values = rdp_poisson_subsampled(
                    Laplace(0.5),
                    sampling_probability=p,
                    orders=[2, 9],
                    outer_rate=outer,
                    bound="tight",
                )
                for value, a in zip(values, (2, 9), strict=True):
                    rdp = mp_poisson(mp_curve(Laplace(0.5)), p, a, 1)
                    inner = mp.expm1((a - 1) * rdp)
                    exact = mp.log1p(mp.mpf(outer) * inner) / (a - 1)
                    assert abs(value - exact) <= 1e-12 * exact


# --- Overflow, underflow, size ---


def test_huge_curves_do_not_overflow():
    sigma = np.array([1e-150, 1e-100, 1e-3])
    for values in (
        rdp_poisson_subsampled(
            Gaussian(sigma), sampling_probability=0.1, orders=[2, 100], bound="tight"
        ),
        rdp_without_replacement_subsampled(
            Gaussian(sigma), sampling_rate=0.1, orders=[2, 100]
        ),
    ):
        assert np.all(np.isfinite(values))
        np.testing.assert_allclose(values, Gaussian(sigma).rdp([2, 100]), rtol=1e-4)


def test_without_noise_rdp_is_infinite():
    """Unless the unit is never drawn."""

    def fixed(mechanism, sampling_probability, **others):
        return rdp_without_replacement_subsampled(
            mechanism, sampling_rate=sampling_probability, **others
        )

    for call in (rdp_poisson_subsampled, fixed):
        values = call(
            Gaussian(0.0), sampling_probability=[0.0, 1e-3, 1.0], orders=[1.5, 2, 10]
        )
        assert np.all(values[0] == 0)
        assert np.all(values[1:] == np.inf)
        half = functools.partial(call, sampling_probability=0.5)
        assert half(Gaussian(0.0), orders=2, outer_rate=0.0) == 0
        assert np.all(half(Gaussian(np.inf), orders=[2, 9]) == 0)


def test_blocks_do_not_change_the_answer(monkeypatch):
    mechanism, rates = Laplace(np.array([[0.5], [2.0]])), np.geomspace(1e-6, 1, 7)

    def values():
        return rdp_poisson_subsampled(
            mechanism, sampling_probability=rates, orders=np.arange(2, 40)
        )

    whole = values()
    for terms in (1, 100):
        monkeypatch.setattr(subsampling, "_BLOCK_TERMS", terms)
        np.testing.assert_allclose(values(), whole, rtol=1e-14)


# --- A user's own curve ---


def test_a_users_curve_equals_the_named_mechanism():
    orders = [1.2, 2, 3.5, 30]
    named = Gaussian(np.array([2.0, 3.0]))
    table = RdpTable(named.rdp(np.arange(2, 31)))
    curve = RdpCurve(lambda a: a / (2 * np.array([[2.0], [3.0]]) ** 2))
    for call in (
        functools.partial(rdp_poisson_subsampled, sampling_probability=0.1),
        functools.partial(rdp_without_replacement_subsampled, sampling_rate=0.1),
    ):
        expected = call(named, orders=orders)
        np.testing.assert_allclose(call(table, orders=orders), expected, rtol=1e-13)
        np.testing.assert_allclose(call(curve, orders=orders), expected, rtol=1e-13)
    single = rdp_poisson_subsampled(
        lambda a: a / 8.0, sampling_probability=0.1, orders=orders
    )
    expected = rdp_poisson_subsampled(
        Gaussian(2.0), sampling_probability=0.1, orders=orders
    )
    np.testing.assert_allclose(single, expected, rtol=1e-13)


# --- Invalid arguments ---


def test_bounds_without_a_proof_are_refused():
    with pytest.raises(TypeError, match="mechanism must be"):
        rdp_without_replacement_subsampled(1.0, sampling_rate=0.1, orders=2)
    for mechanism in (RdpTable(np.array([1.0])), lambda a: a):
        with pytest.raises(NotImplementedError, match="tight.*Gaussian, Laplace"):
            rdp_poisson_subsampled(
                mechanism, sampling_probability=0.1, orders=2, bound="tight"
            )
    lower = functools.partial(
        rdp_poisson_subsampled, Gaussian(1.0), sampling_probability=0.1, bound="lower"
    )
    with pytest.raises(ValueError, match=r"orders must be whole.*got 2\.5"):
        lower(orders=[2, 2.5])
    with pytest.raises(NotImplementedError, match="outer_rate"):
        lower(orders=2, outer_rate=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling_probability": 1.1}, r"\[0, 1\], got 1.1"),
        ({"orders": 1e6}, r"orders must lie in \(1, 16384\]"),
        ({"outer_rate": -0.1}, "outer_rate"),
        ({"bound": "thight"}, "did you mean 'tight'"),
        ({"sampling_probability": np.ones(3) / 9}, "do not broadcast"),
    ],
)
def test_bad_arguments(arguments, message):
    good = {"sampling_probability": 0.1, "orders": 2.0}
    with pytest.raises(ValueError, match=message):
        rdp_poisson_subsampled(Gaussian(np.ones(2)), **(good | arguments))


@pytest.mark.parametrize(
    ("mechanism", "p"), [(Laplace(2.0), 0.29289), (Gaussian(1e3), 1e-12)]
)
def test_a_long_series(mechanism, p):
    """At 0.293 XLA's log1p(-p) is inaccurate."""
    order = 512
    with mp.workdps(60):
        curve = mp_curve(mechanism)
        tight = float(min(mp_poisson(curve, p, order, 1), curve(order)))
        fixed = float(min(mp_without_replacement(curve, p, order), curve(order)))
    value = rdp_poisson_subsampled(
        mechanism, sampling_probability=p, orders=order, bound="tight"
    )
    assert abs(value / tight - 1) < 1e-11
    value = rdp_without_replacement_subsampled(mechanism, sampling_rate=p, orders=order)
    assert abs(value / fixed - 1) < 1e-11


# --- Random settings, by quadrature and of finite pairs ---


def moment_excess(mass, change, alpha):
    """``E[(1 + v)^alpha] - 1`` of masses (..., K) with E[v] = 0, in long doubles."""
    alpha = np.longdouble(alpha)
    terms = np.expm1(alpha * np.log1p(change)) - alpha * change
    return (mass * terms).sum(axis=-1)


def both_directions(mass, change, orders):
    """RDP (..., orders) of (1 + v) Q and Q, the larger of the two directions."""
    rdp = [
        np.log1p(
            np.maximum(
                moment_excess(mass, change, a), moment_excess(mass, change, 1 - a)
            )
        )
        / (np.longdouble(a) - 1)
        for a in orders
    ]
    return np.stack(rdp, axis=-1).astype(np.float64)


def base_ratios(kind, parameter):
    """Masses (count, K), and the other's ratio to them minus 1; long doubles."""
    value = parameter[:, None].astype(np.longdouble)
    half, weight = (
        a.astype(np.longdouble) for a in np.polynomial.legendre.leggauss(24)
    )
    if kind is RandomizedResponse:
        true = 1 / (1 + np.exp(-value))
        mass = np.concatenate([true, 1 - true], axis=1)
        return mass, mass[:, ::-1] / mass - 1
    shift = 1 / value
    low, high = (
        (0 * shift, shift) if kind is Laplace else (0 * shift - 11, 11 + 12 * shift)
    )
    edges = low + (high - low) * np.linspace(0, 1, 41)
    width = np.diff(edges, axis=1)[:, :, None]
    x = (edges[:, :-1, None] + width * (half + 1) / 2).reshape(len(value), -1)
    size = (width * weight / 2).reshape(len(value), -1)
    if kind is Gaussian:
        density = np.exp(-x * x / 2) / np.sqrt(2 * np.longdouble(np.pi))
        return density * size, np.expm1(shift * x - shift**2 / 2)
    ends = [np.full_like(shift, 0.5), np.exp(-shift) / 2]
    mass = np.concatenate([np.exp(-x) / 2 * size, *ends], axis=1)
    change = [np.expm1(2 * x - shift), np.expm1(-shift), np.expm1(shift)]
    return mass, np.concatenate(change, axis=1)


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [(Gaussian, 0.5, 20), (Laplace, 0.1, 20), (RandomizedResponse, 0.01, 8)],
)
def test_poisson_rdp_by_quadrature(kind, least, most):
    """lower = exact = tight at whole orders; tight and general above between them."""
    rng = np.random.default_rng(70)
    parameter = least * (most / least) ** rng.uniform(0, 1, COUNT)
    p = 10 ** rng.uniform(-4, -0.01, COUNT)
    mass, change = base_ratios(kind, parameter)
    orders = np.array([2, 3, 6, 12, 1.2, 2.5, 7.7])
    exact = both_directions(mass, p[:, None] * change, orders)
    call = functools.partial(
        rdp_poisson_subsampled, kind(parameter), sampling_probability=p
    )
    tight, general = (call(orders=orders, bound=b) for b in ("tight", "general"))
    lower = call(orders=orders[:4], bound="lower")
    assert_between(0, exact, tight, rtol=1e-9)
    assert_between(0, tight, general, rtol=1e-12)
    np.testing.assert_allclose(tight[:, :4], exact[:, :4], rtol=1e-9)
    np.testing.assert_allclose(lower, exact[:, :4], rtol=1e-9)


def renyi(first, second, orders):
    """(..., orders) of finite pairs, in extended precision."""
    one, two = first.astype(np.longdouble), second.astype(np.longdouble)
    return both_directions(two, (one - two) / two, orders)


def test_rdp_of_random_mechanisms():
    """Three neighbouring distributions given by their RDP alone, at any order."""
    rng = np.random.default_rng(71)
    rest, here, there = np.moveaxis(random_distributions(rng, 4, COUNT, 3), 1, 0)
    rest[::4] = there[::4]
    pairs = ((rest, here), (rest, there), (here, there))
    whole, orders = np.arange(2, 13), np.array([2, 3, 6, 12, 1.2, 2.5, 7.7])
    p = 10 ** rng.uniform(-3, 0, COUNT)
    rate = p[:, None]
    tables = [renyi(*pair, whole) for pair in pairs]
    table = RdpTable(np.maximum.reduce(tables) * (1 + 1e-13))
    limit = np.max([np.abs(np.log(a / b)).max(axis=1) for a, b in pairs], axis=0)
    mixed, other = ((1 - rate) * rest + rate * dist for dist in (here, there))
    exact = renyi(mixed, other, orders)
    call = functools.partial(
        rdp_without_replacement_subsampled, sampling_rate=p, orders=orders
    )
    bound = call(table)
    assert_between(0, exact, bound, rtol=1e-9)
    limited = call(RdpTable(table.values, limit=limit * (1 + 1e-13)))
    assert_between(0, exact, limited, rtol=1e-9)
    assert_between(0, limited, bound, rtol=1e-12)
    # Add or remove: two distributions.
    table = RdpTable(tables[0] * (1 + 1e-13))
    exact = renyi(mixed, rest, orders)
    bound = rdp_poisson_subsampled(table, sampling_probability=p, orders=orders)
    assert_between(0, exact, bound, rtol=1e-9)
    assert np.max(exact / bound) > 0.9
