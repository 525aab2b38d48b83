"""The Rényi DP curve at random settings against an independent fine quadrature.

Rates 1e-12 to 1, noise 0.05 to 1,000, orders 1 + 1e-6 to 4096, every kind of pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

import jaxdp_episodic as jde
from designs import Setting, episodic, poisson, poisson_step
from jaxdp_episodic.accountant._engine import float64_boundary
from jaxdp_episodic.accountant.losses.gaussian import (
    SampledGaussianLoss,
    mixture_excess,
)
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    GaussianMixtureLoss,
    SwappedGaussianLoss,
    ZeroedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.privacy_loss import MomentRule, Quadrature
from jaxdp_episodic.accountant.methods.rdp import LATTICE
from oracles import moments

RELATIVE = 1e-10


class Kind(NamedTuple):
    """A public step for a setting, and the oracle's log(M - 1) and outer rate."""

    step: Callable[[Setting], jde.GaussianStep]
    log_excess: Callable[[Setting, float, str], np.longdouble]
    scaled: bool = False
    # How much too large a curve may be; it is never too small.
    above: float = RELATIVE


def of_pair(name: str, factor: float = 1.0) -> Callable[..., np.longdouble]:
    """The oracle of a pair whose shift is ``factor`` / noise."""

    def log_excess(x: Setting, alpha: float, direction: str) -> np.longdouble:
        rate, shift, inner = float(x.rate), factor / float(x.noise), float(x.inner)
        fields = {"inner": inner, "direction": direction}
        return moments.fine(name, rate, shift, alpha, **fields)

    return log_excess


def in_episodes(x: Setting, alpha: float, _: str) -> np.longdouble:
    episodes, rate = int(x.num_episodes), float(x.rate)
    return moments.fine_independent_episodes(episodes, rate, float(1 / x.noise), alpha)


KINDS = {
    "sampled": Kind(lambda x: poisson_step(x.noise, x.rate), of_pair("sampled")),
    "sampled below an outer level": Kind(
        lambda x: poisson_step(x.noise, x.outer, x.rate, clip="class"),
        of_pair("sampled"),
        scaled=True,
    ),
    "swapped": Kind(
        lambda x: poisson_step(x.noise, x.rate, clip="step"), of_pair("swapped", 2)
    ),
    "antipodal": Kind(
        lambda x: poisson_step(x.noise, x.rate, x.inner, clip="school"),
        of_pair("antipodal"),
    ),
    "zeroed": Kind(
        lambda x: poisson_step(
            x.noise, x.rate, x.inner, clip="school", relation="zero_out"
        ),
        of_pair("zeroed"),
        above=1e-9,
    ),
    "episodes": Kind(lambda x: episodic(x.noise, x.rate, x.num_episodes), in_episodes),
}


def random_rates(rng: np.random.Generator, count: int) -> np.ndarray:
    """1e-12 to 1, a quarter of them close to 1, and some equal to 1."""
    rates = 10 ** rng.uniform(-12, 0, count)
    near_one = 1 - 10 ** rng.uniform(-12, 0, count)
    rates = np.where(rng.random(count) < 0.25, near_one, rates)
    return np.where(rng.random(count) < 0.05, 1.0, rates)


def random_orders(rng: np.random.Generator, count: int) -> np.ndarray:
    """Both ends, and real and integer orders between them."""
    orders = 1 + 10 ** rng.uniform(-6, np.log10(4095), count)
    whole = np.rint(10 ** rng.uniform(np.log10(2), np.log10(4096), count))
    orders = np.where(rng.random(count) < 0.3, whole, orders)
    orders[0], orders[-1] = 1 + 1e-6, 4096
    return orders


def random_setting(rng: np.random.Generator, count: int) -> Setting:
    return Setting(
        outer=random_rates(rng, count),
        rate=random_rates(rng, count),
        inner=random_rates(rng, count),
        noise=10 ** rng.uniform(np.log10(0.05), 3, count),
        num_episodes=rng.integers(1, 6, count),
    )


def assert_matches(
    kind: Kind, settings: Setting, orders: np.ndarray, direction: str
) -> None:
    """Compares the public curve with the oracle; settings (m,), orders (k,)."""
    actual = jde.rdp(kind.step(settings), orders, direction=direction)
    assert actual.shape == (len(settings.rate), len(orders))
    for i, row in enumerate(zip(*settings, strict=True)):
        setting = Setting(*row)
        outer = float(setting.outer) if kind.scaled else 1.0
        for j, alpha in enumerate(orders):
            log_excess = kind.log_excess(setting, float(alpha), direction)
            exact = moments.rdp_from_log_moment(log_excess, alpha, r_out=outer)
            error = actual[i, j] / exact - 1
            # A comparison that NaN and inf fail: no true value overflows here.
            close = -RELATIVE <= error <= kind.above
            assert close, (setting, alpha, actual[i, j], exact)


DIRECTED = [
    (kind, direction) for kind in KINDS for direction in ("forward", "backward")
]


@pytest.mark.few(2)
@pytest.mark.parametrize("kind, direction", DIRECTED)
@pytest.mark.parametrize(
    "number, num_orders, seed",
    [(3, 3, 1), pytest.param(15, 6, 2, marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_random_settings(kind, direction, number, num_orders, seed):
    rng = np.random.default_rng(seed)
    settings, orders = random_setting(rng, number), random_orders(rng, num_orders)
    assert_matches(KINDS[kind], settings, orders, direction)


def setting(rate: float, noise: float, **fields: float) -> Setting:
    values = {"outer": 1.0, "inner": 1.0, "num_episodes": 1, **fields}
    return Setting(
        rate=np.array([rate]),
        noise=np.array([noise]),
        **{name: np.array([value]) for name, value in values.items()},
    )


# Settings at which a quadrature with fewer panels, narrower windows or a worse search
# for the integrand's bumps is wrong: two bumps that merge into a broad one, a bump in a
# corner, many bumps far apart.
HARD = [
    ("antipodal", "forward", setting(1.0, 4.589234587, inner=0.0751139), 24.43),
    ("antipodal", "forward", setting(0.35975517, 2.692303, inner=0.20702), 22.157),
    ("antipodal", "forward", setting(8.1892684626e-12, 7.00261, inner=1.5e-9), 4096.0),
    ("antipodal", "forward", setting(1 - 1.2e-11, 16.0077, inner=1 - 3e-8), 4096.0),
    ("sampled", "forward", setting(0.12947476, 9.40339), 331.08),
    ("sampled", "forward", setting(5.28684e-12, 8.36933), 4096.0),
    ("sampled", "backward", setting(1 - 1.16362e-9, 1.39602), 390.33154),
    ("sampled", "backward", setting(1 - 6.86e-9, 7.977), 4096.0),
    ("swapped", "forward", setting(2.9216e-10, 20.8468), 4096.0),
    ("episodes", "forward", setting(1.1983e-10, 21.569026), 4096.0),
    # Q's component at 0 takes over at the peak: a spacing was too wide by a third.
    ("zeroed", "forward", setting(1 - 3e-13, 1 / 0.673, inner=1.4e-15), 42.94),
    ("antipodal", "forward", setting(1 - 3e-13, 1 / 0.569, inner=5.2e-15), 74.86),
    # Almost everybody is drawn, so the probability of being left out decides.
    ("episodes", "forward", setting(1 - 1e-11, 4.7, num_episodes=2), 2500.0),
    ("episodes", "backward", setting(1 - 3e-7, 1.3, num_episodes=2), 60.0),
]


@pytest.mark.parametrize("kind, direction, settings, alpha", HARD)
def test_hard_settings(kind, direction, settings, alpha):
    assert_matches(KINDS[kind], settings, np.array([alpha]), direction)


def test_infinite_only_where_the_value_overflows():
    noise = np.array([1e-160, 1e-60, 1e-3, 1e300])
    step = jde.GaussianStep(poisson("example", np.array(0.5)), noise_multiplier=noise)
    values = jde.rdp(step, [1.5, 4096.0])
    assert np.all(np.isinf(values[0]))
    assert np.all(np.isfinite(values[1:]))
    # about alpha s²/2 where every draw is evident
    np.testing.assert_allclose(values[1:3, 1], 0.5 * 4096 / noise[1:3] ** 2, rtol=1e-5)


def test_a_nan_order_does_not_affect_others():
    """Settings of a block share the nodes of a lattice."""
    rule = MomentRule("forward", LATTICE)
    (alone,) = mixture_excess(*np.array([[200.0], [0.01], [0.5]]), rule)
    both = np.array([[200.0, np.nan], [0.01, 0.01], [0.5, 0.5]])
    (beside,) = mixture_excess(*both, rule)
    assert beside[0] == alone[0] and np.isnan(beside[1])


def on_panels(*setting):
    """Of one order less 1, rate and shift."""
    columns = np.array(setting)[:, None]
    return mixture_excess(*columns, MomentRule("forward", Quadrature(160, 16)))[0]


def test_a_lattice_reaches_the_bump_of_rare_draws_at_orders_below_2():
    """The bump is at twice the shift, beyond nodes that end at (1 + t) times it.

    At the last rate there are enough nodes for orders near 1, but not for the bump.
    """
    for rate in (1e-15, 1e-50):
        fields = np.array([[0.001], [rate], [1 / 0.19]])
        (found,) = mixture_excess(*fields, MomentRule("forward", LATTICE))
        panels = on_panels(0.001, rate, 1 / 0.19)
        np.testing.assert_allclose(found, panels, rtol=0, atol=1e-11)
    found = jde.rdp(sampled(1e-60, 0.111), 1.001)
    panels = on_panels(0.001, 1e-60, 1 / 0.111)
    assert found == pytest.approx(np.exp(panels[0]) / 0.001, rel=1e-8)


ONE = np.ones(80)
DRAW = np.random.default_rng(3)
RATE, SHIFT = 10 ** DRAW.uniform(-8, 0, 80), 10 ** DRAW.uniform(-2, 0.6, 80)
RATES = np.where(DRAW.random((2, 80)) < 0.2, 1.0, np.stack([RATE, RATE[::-1]]))
SHIFTS = np.sort(SHIFT * DRAW.uniform(0.1, 1, (3, 80)), axis=0)
ON_LATTICE = {
    "sampled": (SampledGaussianLoss(ONE, RATE, SHIFT), 32.0),
    "swapped": (SwappedGaussianLoss(ONE, RATES[0], SHIFT), 40.0),
    "antipodal": (AntipodalGaussianLoss(ONE, *RATES, SHIFT), 40.0),
    "zeroed": (ZeroedGaussianLoss(ONE, *RATES, SHIFT), 40.0),
    "mixture": (
        GaussianMixtureLoss(ONE, RATE, tuple(SHIFTS), (np.log(ONE / 3),) * 3),
        40.0,
    ),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ON_LATTICE)
@pytest.mark.parametrize("is_search", [False, True])
def test_a_lattice_keeps_its_stated_error(name, is_search):
    """Against about 2,500 nodes on panels, with derivatives and without."""
    loss, nats = ON_LATTICE[name]
    lattice = Quadrature(0, 0, 18.0 if is_search else nats)
    error = 1e-5 if is_search else 1e-11
    rng, panels = np.random.default_rng(4), 24 if name == "mixture" else 128
    least = np.minimum(10 ** rng.uniform(-3, 3, 80), 30 / SHIFT)
    t = np.minimum(least, 0.999 * loss.largest_on_lattice(lattice))
    assert np.all(t > 0)

    def excess(t, loss, *, quadrature, slopes):
        return loss.log_excess(t, MomentRule("forward", quadrature, slopes))

    ask = float64_boundary(excess, ("quadrature", "slopes"))
    for slopes in (False, True):
        sums, fine = (
            ask(t, loss, quadrature=quadrature, slopes=slopes)
            for quadrature in (lattice, Quadrature(panels, 20))
        )
        most = max(error, 1e-8 * slopes)  # slopes need only serve the search
        np.testing.assert_allclose(sums[0], fine[0], rtol=most, atol=most)
        for one, other in zip(sums[1:], fine[1:], strict=True):
            np.testing.assert_allclose(one, other, rtol=most)


def test_orders_without_a_lattice():
    """Near 1 with little noise, and where the largest terms overflow."""
    orders, step = 1 + np.array([2e-16, 5e-10, 2e-9]), sampled(0.01, 0.045)
    found = jde.rdp(step, orders)
    # Near order 1 it is the Kullback-Leibler divergence.
    np.testing.assert_allclose(found, found[-1], rtol=1e-6)
    large = jde.rdp(sampled(0.25, 3_600.0), 750_000.0)
    by_gaussian = 750_000 / (2 * 3_600**2)
    assert large < by_gaussian
    # A rate of 1/4 lowers it by less than log(4) / t, by the largest term alone.
    assert large > by_gaussian - np.log(4) * 750_000 / 749_999
    assert np.isfinite(large)


def sampled(rate, noise):
    return jde.GaussianStep(poisson("unit", rate), noise_multiplier=noise)
