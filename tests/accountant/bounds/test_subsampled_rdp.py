"""Subsampled RDP: against the published sums, the true mechanisms, other libraries."""

import dataclasses
import functools
import json
import math
from pathlib import Path

import dp_accounting
import hypothesis
import hypothesis.strategies as st
import mpmath as mp
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant

from jaxdp_episodic.accountant.bounds import subsampled_rdp
from jaxdp_episodic.bounds import (
    Gaussian,
    Laplace,
    RandomizedResponse,
    RdpCurve,
    RdpTable,
    rdp_poisson_subsampled,
    rdp_without_replacement_subsampled,
)
from oracles.renyi_curves import mp_gaussian, mp_laplace, mp_response

REFERENCE = json.loads(
    (Path(__file__).resolve().parents[2] / "reference.json").read_text()
)
BOUNDS = ("general", "tight", "lower")
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
    Gaussian(1.0),
    Gaussian(20.0),
    Laplace(0.2),
    Laplace(1.0),
    Laplace(50.0),
    RandomizedResponse(0.05),
    RandomizedResponse(1.0),
    RandomizedResponse(9.0),
]
IDS = [str(m) for m in MECHANISMS]


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=IDS)
def test_poisson_matches_the_published_sum(mechanism, bound):
    values = rdp_poisson_subsampled(
        mechanism, sampling_probability=RATES, orders=WHOLE, bound=bound
    )
    factor = 3 if bound == "general" else 1
    with mp.workdps(60):
        curve = mp_curve(mechanism)
        expected = [[mp_poisson(curve, p, a, factor) for a in WHOLE] for p in RATES]
        if bound != "lower":
            expected = [
                [min(v, curve(a)) for v, a in zip(row, WHOLE, strict=True)]
                for row in expected
            ]
    expected = np.array(expected, dtype=np.float64)
    np.testing.assert_allclose(values, expected, rtol=5e-13)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=IDS)
def test_without_replacement_matches_the_published_sum(mechanism):
    values = rdp_without_replacement_subsampled(
        mechanism, sampling_rate=RATES, orders=WHOLE
    )
    with mp.workdps(60):
        curve = mp_curve(mechanism)
        expected = [
            [min(mp_without_replacement(curve, p, a), curve(a)) for a in WHOLE]
            for p in RATES
        ]
    expected = np.array(expected, dtype=np.float64)
    np.testing.assert_allclose(values, expected, rtol=5e-13)


# --- Gaussian: three independent sources ---


def test_tight_gaussian_is_the_sampled_gaussian():
    """The reference table at integer orders, an upper bound of it at others."""
    for row in REFERENCE["sampled_gaussian_rdp"]:
        value = rdp_poisson_subsampled(
            Gaussian(row["noise_multiplier"]),
            sampling_probability=row["sampling_probability"],
            orders=row["alpha"],
            bound="tight",
        )
        exact = float(row["rdp_forward"])
        assert value >= exact * (1 - 1e-12)
        if row["alpha"] == int(row["alpha"]):
            assert value == pytest.approx(exact, rel=1e-11)


def test_dp_accounting_without_replacement():
    """It has the tighter Theorem 27 up to order 256 and Theorem 9 beyond.

    Its noise multiplier is relative to the sensitivity under replacement, as ours.
    """
    orders, relation = [2, 3, 8, 64, 300, 400], dp_accounting.NeighboringRelation
    accountant = RdpAccountant(orders, relation.REPLACE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(6.0)
    accountant.compose(
        dp_accounting.SampledWithoutReplacementDpEvent(10_000, 10, gaussian)
    )
    theirs = accountant._rdp
    values = rdp_without_replacement_subsampled(
        Gaussian(6.0), sampling_rate=1e-3, orders=orders
    )
    np.testing.assert_allclose(values[-2:], theirs[-2:], rtol=1e-9)
    assert np.all(values >= theirs * (1 - 1e-9))


# --- Limits and order ---


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=IDS)
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


mechanisms = st.one_of(
    st.floats(0.3, 30).map(Gaussian),
    st.floats(0.05, 30).map(Laplace),
    st.floats(0.01, 20).map(RandomizedResponse),
)


@hypothesis.settings(max_examples=10)
@hypothesis.given(mechanisms)
def test_monotone_in_rate_and_order(mechanism):
    check_monotone(mechanism)


def check_monotone(mechanism):
    """In the order "tight" only: log(3)/(a-1) lets the general bound decrease."""
    rates = np.concatenate([[0], np.geomspace(1e-12, 1, 25)])
    orders = np.concatenate([np.linspace(1.01, 6, 30), [7, 8.5, 12, 31.7, 64]])
    general, tight = (
        rdp_poisson_subsampled(
            mechanism, sampling_probability=rates, orders=orders, bound=bound
        )
        for bound in ("general", "tight")
    )
    fixed = rdp_without_replacement_subsampled(
        mechanism, sampling_rate=rates, orders=orders
    )
    for values in (general, tight, fixed):
        assert np.all(np.diff(values, axis=0) >= -1e-12 * values[1:])
    assert np.all(np.diff(tight, axis=1) >= -1e-12 * tight[:, 1:])


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
        monkeypatch.setattr(subsampled_rdp, "_BLOCK_TERMS", terms)
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


def test_a_known_pure_epsilon_tightens_sampling_without_replacement():
    exact = RandomizedResponse(0.05)
    values = exact.rdp(np.arange(2, 12))
    call = functools.partial(
        rdp_without_replacement_subsampled, sampling_rate=0.1, orders=[2, 5, 11]
    )
    assert np.all(call(RdpTable(values, limit=0.05)) < call(RdpTable(values)))
    np.testing.assert_allclose(
        call(RdpTable(values, limit=0.05)), call(exact), rtol=1e-13
    )


# --- Shapes and invalid arguments ---


def test_shapes():
    call = rdp_poisson_subsampled
    assert isinstance(
        call(Gaussian(1.0), sampling_probability=0.1, orders=2), np.float64
    )
    grid = Gaussian(np.ones((3, 1)))
    rates = np.full(5, 0.1)
    assert call(grid, sampling_probability=rates, orders=2).shape == (3, 5)
    outer = np.ones((2, 1, 1))
    values = call(
        grid, sampling_probability=rates, orders=np.ones((4, 2)) * 3, outer_rate=outer
    )
    assert values.shape == (2, 3, 5, 4, 2)
    assert values.dtype == np.float64
    assert call(grid, sampling_probability=rates, orders=[]).shape == (3, 5, 0)
    assert call(grid, sampling_probability=[], orders=[2]).shape == (3, 0, 1)


def test_tight_is_refused_without_a_proof():
    for mechanism in (RdpTable(np.array([1.0])), lambda a: a):
        with pytest.raises(NotImplementedError, match="tight.*Gaussian, Laplace"):
            rdp_poisson_subsampled(
                mechanism, sampling_probability=0.1, orders=2, bound="tight"
            )


def test_lower_is_refused_where_it_is_no_lower_bound():
    call = functools.partial(rdp_poisson_subsampled, Gaussian(1.0), bound="lower")
    with pytest.raises(ValueError, match=r"orders must be whole.*got 2\.5"):
        call(sampling_probability=0.1, orders=[2, 2.5])
    with pytest.raises(NotImplementedError, match="outer_rate"):
        call(sampling_probability=0.1, orders=2, outer_rate=0.5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sampling_probability": 1.1}, ValueError, r"\[0, 1\], got 1.1"),
        ({"sampling_probability": True}, TypeError, "sampling_probability"),
        ({"sampling_probability": np.nan}, ValueError, "sampling_probability"),
        ({"orders": 1.0}, ValueError, "orders"),
        ({"orders": 1e6}, ValueError, r"orders must lie in \(1, 16384\]"),
        ({"orders": "2"}, TypeError, "orders"),
        ({"outer_rate": -0.1}, ValueError, "outer_rate"),
        ({"bound": "thight"}, ValueError, "did you mean 'tight'"),
        ({"sampling_probability": np.ones(3) / 9}, ValueError, "do not broadcast"),
    ],
)
def test_bad_arguments(arguments, error, message):
    good = {"sampling_probability": 0.1, "orders": 2.0}
    with pytest.raises(error, match=message):
        rdp_poisson_subsampled(Gaussian(np.ones(2)), **(good | arguments))


def test_bad_mechanism_and_short_table():
    with pytest.raises(TypeError, match="mechanism must be"):
        rdp_without_replacement_subsampled(
            1.0,
            sampling_rate=0.1,
            orders=2,
        )
    with pytest.raises(ValueError, match="last order of the RDP table, 3, got 4"):
        rdp_poisson_subsampled(
            RdpTable(np.array([1.0, 2.0])), sampling_probability=0.1, orders=3.5
        )


@pytest.mark.parametrize("order", [512, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("mechanism", "p"),
    [
        pytest.param(Gaussian(5.0), 0.3, marks=pytest.mark.slow),
        (Laplace(2.0), 0.29289),
        (Gaussian(1e3), 1e-12),
    ],
)
def test_a_long_series(mechanism, p, order):
    """Up to the longest series; at 0.293 XLA's log1p(-p) is inaccurate."""
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
