"""Trade-off curve, advantage and mu against closed forms and finer grids."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
from scipy import optimize, stats

import jaxdp_episodic as jde
from designs import sampled
from jaxdp_episodic.accountant.questions import gdp
from jaxdp_episodic.bounds import Gaussian
from rows import fast_and_slow

ALPHAS = np.concatenate(
    [[0.0], np.geomspace(1e-12, 0.5, 60), 1 - np.geomspace(0.5, 1e-9, 40)[1:], [1.0]]
)


@pytest.mark.parametrize(("noise", "num_steps"), [(30.0, 1), (5.0, 100), (0.3, 9)])
def test_gaussians(noise, num_steps):
    step, mu = sampled(1.0, noise), np.sqrt(num_steps) / noise
    run = {"false_positive_rate": ALPHAS, "num_steps": num_steps}
    missed = gdp.trade_off(step, **run)
    caught = gdp.true_positive_rate(step, **run)
    true_missed = stats.norm.cdf(stats.norm.isf(ALPHAS) - mu)
    true_caught = stats.norm.sf(stats.norm.isf(ALPHAS) - mu)
    assert np.all(missed <= true_missed)
    assert np.all(caught >= true_caught)
    np.testing.assert_allclose(missed, true_missed, rtol=0, atol=1e-6)
    # Above the smallest delta of the curve, also relative.
    told = true_caught > 1e-12
    np.testing.assert_allclose(caught[told], true_caught[told], rtol=1e-3)
    np.testing.assert_allclose(missed + caught, 1, rtol=0, atol=1e-14)
    advantage = gdp.advantage(step, num_steps=num_steps)
    assert advantage == pytest.approx(2 * stats.norm.cdf(mu / 2) - 1, rel=1e-12)
    assert mu <= gdp.gdp_mu(step, num_steps=num_steps) <= mu * (1 + 1e-14)


@pytest.mark.parametrize("mu", [0.14, 0.33])
def test_the_mu_of_a_curve_above_one_point_is_rounded_up(mu):
    epsilons = np.linspace(0.0, 2.0, 2001)
    deltas = Gaussian(noise_multiplier=1 / mu).delta(epsilons)
    found = gdp._mu_of(epsilons, deltas, deltas[1000])  # the delta at epsilon 1
    assert mu <= found <= mu * (1 + 1e-4)


SHARP = pytest.mark.parametrize(
    ("noise", "rate"),
    fast_and_slow(
        itertools.product([0.5, 2.0], [1e-6, 0.01, 0.5]),
        lambda noise, rate: (noise < 1) == (rate < 0.1),
    ),
)


class TestSampled:
    @SHARP
    def test_more_points_change_little(self, rate, noise):
        step = sampled(rate, noise)
        epsilons = np.unique(gdp.upper_curve(step, 1, "exact", 1e-15)[0])
        fine = np.interp(
            np.arange(8 * len(epsilons) - 7) / 8, np.arange(len(epsilons)), epsilons
        )[:, None]
        deltas = jde.privacy_profile(step, fine)
        missed = np.max(1 - deltas - np.exp(fine) * ALPHAS, axis=0)
        mirrored = np.exp(-fine) * (1 - deltas - ALPHAS)
        missed = np.maximum(missed, mirrored.max(axis=0))
        found = gdp.trade_off(step, false_positive_rate=ALPHAS, num_steps=1)
        assert np.all(found <= missed + 1e-15)
        np.testing.assert_allclose(found, missed, rtol=0, atol=1e-6)

    @SHARP
    def test_mu_holds_between_the_points_and_no_smaller_one(self, rate, noise):
        step, floor = sampled(rate, noise), 1e-10
        mu = gdp.gdp_mu(step, num_steps=1, smallest_delta=floor)
        end = optimize.brentq(
            lambda e: jde.privacy_profile(step, e) - floor, 0, 50, xtol=1e-12
        )
        epsilons = np.linspace(0, end, 40_960)
        deltas = jde.privacy_profile(step, epsilons)
        enough = Gaussian(noise_multiplier=1 / mu).delta(epsilons)
        assert np.all(enough >= deltas * (1 - 1e-12))
        less = Gaussian(noise_multiplier=(1 + 2e-3) / mu).delta(epsilons)
        assert np.any(less < deltas)

    def test_mu_grows_where_more_of_the_tail_has_to_fit(self):
        step = sampled([0.01, 1e-50], 0.7)  # the second one's e^epsilon rounds to 1
        floors = (0.5, 1e-3, 1e-6, 1e-12, 1e-20, 1e-100)
        found = [gdp.gdp_mu(step, num_steps=1, smallest_delta=f) for f in floors]
        mu, rare = np.transpose(found)
        assert mu[0] == 0 and np.all(np.diff(mu) > 0) and 0 < rare[-1] < 1e-14


class TestShapes:
    def test_curves_are_convex_decreasing_and_below_guessing(self):
        alpha = np.linspace(0, 1, 401)
        random = np.random.default_rng(5)
        step = sampled(random.random((3, 1)), 10 ** random.uniform(-1, 2, (3,)))
        curves = gdp.trade_off(step, false_positive_rate=alpha, num_steps=1)
        assert curves.shape == (3, 3, 401)
        assert np.all((curves >= 0) & (curves <= 1 - alpha))
        assert np.all(np.diff(curves) <= 1e-15)
        assert np.all(np.diff(curves, 2) >= -1e-14)
        # Symmetric: f is its own inverse.
        for curve in curves.reshape(-1, 401)[::4]:
            back = np.interp(curve, alpha, curve)
            inside = (curve > 0.05) & (alpha > 0.05)
            np.testing.assert_allclose(back[inside], alpha[inside], atol=1e-3)

        empty = gdp.trade_off(step, false_positive_rate=[], num_steps=1)
        assert empty.shape == (3, 3, 0)


@pytest.mark.parametrize(
    ("rate", "noise", "missed", "gain", "mu"),
    [(1.0, 0.0, 0.0, 1.0, np.inf), (0.0, 1.0, 1 - ALPHAS, 0.0, 0.0)],
    ids=["no noise", "nothing drawn"],
)
def test_extremes(rate, noise, missed, gain, mu):
    step = sampled(rate, noise)
    found = gdp.trade_off(step, false_positive_rate=ALPHAS, num_steps=1)
    np.testing.assert_allclose(found, missed, atol=1e-14)
    assert np.all(found <= missed)
    assert gdp.advantage(step, num_steps=1) == gain
    assert gdp.gdp_mu(step, num_steps=1) == mu
    failing = jde.compose((sampled(1.0, 2.0), 1), (jde.ApproximateDP(0.0, 1e-9), 1))
    for other in (jde.compose((sampled(0.999, 0.03), 1)), failing):
        assert gdp.gdp_mu(other) == np.inf


def test_composed_runs():
    step, rate = sampled(1.0, [20.0, 40.0]), {"false_positive_rate": 0.01}
    run = jde.compose((step, 30), (step, 20))
    assert gdp.advantage(run).shape == (2,)
    alone = gdp.true_positive_rate(step, num_steps=50, **rate)
    np.testing.assert_allclose(gdp.true_positive_rate(run, **rate), alone, rtol=1e-12)


STEP = sampled([0.1, 0.2], 1.0)
RATE = {"false_positive_rate": 0.1}
# A question, its invalid arguments, and the message.
REFUSED = [
    (gdp.gdp_mu, {"smallest_delta": 0.0}, r"in \[1e-100, 1\), got 0.0"),
    (gdp.gdp_mu, {"smallest_delta": 1.0}, r"in \[1e-100, 1\), got 1.0"),
    (gdp.gdp_mu, {"smallest_delta": [1e-9]}, "one number, got an array"),
    (gdp.gdp_mu, {"smallest_delta": 1e-101}, r"in \[1e-100, 1\), got 1e-101"),
    *(
        (view, {"false_positive_rate": bad}, f"false_positive_rate {message}")
        for view in (gdp.trade_off, gdp.true_positive_rate)
        for bad, message in (
            ([0.1, 2], r".*got 2.0 at index \(1,\)"),
            (np.nan, "must not be NaN"),
            ("0.1", "must be a number .*got '0.1'"),
        )
    ),
    *(
        (view, {**known, **bad}, message)
        for view, known in (
            (gdp.trade_off, RATE),
            (gdp.true_positive_rate, RATE),
            (gdp.advantage, {}),
            (gdp.gdp_mu, {}),
        )
        for bad, message in (
            ({"step": {}}, "step must be a GaussianStep.*got {}"),
            ({"num_steps": None}, "num_steps must be a whole .*got None"),
            ({"num_steps": [1, 2, 3]}, "do not broadcast .*num_steps"),
            ({"method": "prv"}, "method must be one of .*'prv'"),
        )
    ),
]


@pytest.mark.parametrize(("view", "asked", "message"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_arguments_are_refused(view, asked, message):
    asked = {"step": STEP, "num_steps": 1, "method": "rdp", **asked}
    with pytest.raises((ValueError, TypeError), match=message):
        view(asked.pop("step"), **asked)


def test_the_error_of_an_exact_delta_is_added(monkeypatch):
    """Without the error, bounds would be derived from numbers that may be too small."""
    error, plain = 1e-3, gdp.delta

    def too_small(step, *, epsilon, num_steps=1, method="exact", return_info=True):
        """A delta that is too small by its stated error."""
        truth, info = plain(step, epsilon=epsilon, num_steps=1, return_info=True)
        certified = np.asarray(epsilon) > 3
        value = np.where(certified, truth, truth / (1 + error))
        return value, info._replace(
            error=np.full(np.shape(truth), error), is_certified_bound=certified
        )

    step = sampled(0.2, 1.0)
    alpha = np.geomspace(1e-3, 0.9, 9)
    caught = gdp.true_positive_rate(step, num_steps=1, false_positive_rate=alpha)
    gain, mu = gdp.advantage(step, num_steps=1), gdp.gdp_mu(step, num_steps=1)
    monkeypatch.setattr(gdp, "delta", too_small)
    again = gdp.true_positive_rate(step, num_steps=1, false_positive_rate=alpha)
    # the points may differ
    assert np.all(again >= caught * (1 - 1e-6))
    assert gdp.advantage(step, num_steps=1) == pytest.approx(gain, rel=1e-12)
    assert mu * (1 - 1e-6) <= gdp.gdp_mu(step, num_steps=1) <= mu * (1 + 1e-6)
    certified = gdp.upper_delta(step, epsilon=4.0, num_steps=1)
    assert certified == pytest.approx(jde.privacy_profile(step, 4.0), rel=1e-14)


def test_a_curve_without_exact_answers_is_certified_at_once(monkeypatch):
    ask = mock.Mock(side_effect=lambda *_, epsilon, **run: np.exp(-4 * epsilon))
    monkeypatch.setattr(gdp, "upper_delta", ask)
    gdp.gdp_mu(jde.LaplaceRelease(2.0), num_steps=2)
    assert {call.kwargs["method"] for call in ask.call_args_list} == {"pld"}


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.7, 3.0])
def test_one_rate_equals_its_value_among_many(noise):
    """With one rate the curve is computed only where it is needed."""
    step, run = sampled(0.05, noise), {"num_steps": 300}
    rates = np.array([1e-12, 1e-4, 0.01, 0.4, 0.95])

    def views(rate):  # the second call uses the cached points
        both = (gdp.true_positive_rate, gdp.trade_off)
        return np.array([view(step, false_positive_rate=rate, **run) for view in both])

    alone = np.stack([views(rate) for rate in rates], axis=-1)
    np.testing.assert_allclose(alone, views(rates), rtol=1e-3, atol=1e-12)
