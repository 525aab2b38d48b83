"""Iteration and subsampled RDP: every bound at 1,000 random settings.

The distributions of projected noisy runs followed step by step, Gaussian runs in closed
form, and the moments of sampled mechanisms by quadrature in extended precision.
"""

import functools

import numpy as np
import pytest
import scipy.special
import scipy.stats

from jaxdp_episodic.accountant.bounds import iteration
from jaxdp_episodic.bounds import (
    Gaussian,
    Laplace,
    RandomizedResponse,
    RdpTable,
    bounded_iteration_rdp,
    full_batch_rho,
    rdp_poisson_subsampled,
    rdp_without_replacement_subsampled,
)
from oracles.finite_distributions import (
    assert_between,
    random_distributions,
)

COUNT = 1_000
FEW_AND_MANY = pytest.mark.parametrize(
    "count", [250, pytest.param(COUNT, marks=pytest.mark.slow)]
)


# --- Iteration ---


@FEW_AND_MANY
def test_last_iterate_of_noise_schedules(count):
    """The spread of a run step by step; no schedule can be made cheaper."""
    rng = np.random.default_rng(60)
    for _ in range(count):
        length, beta = int(rng.integers(1, 20)), 10 ** rng.uniform(-1, 1)
        setting = {
            "learning_rates": rng.uniform(0.05, 1.9, length) / beta,
            "smoothness": beta,
            "strong_convexity": beta * rng.choice([0.0, 0.1, 0.5]),
        }
        lipschitz, size = 10 ** rng.uniform(-1, 1), int(rng.integers(1, 9))
        target = 10 ** rng.uniform(-2, 1, length)
        best = iteration.optimal_noise_stds(
            target, lipschitz=lipschitz, batch_size=size, **setting
        )
        eta = setting["learning_rates"]
        slopes = (np.abs(1 - eta * setting["strong_convexity"]), np.abs(1 - eta * beta))
        variance = 0.0
        for factor, noise in zip(np.maximum(*slopes), eta * best, strict=True):
            variance = factor**2 * variance + noise**2
        value = iteration.final_variance(noise_stds=best, **setting)
        assert value == pytest.approx(variance, rel=1e-10)
        price = functools.partial(
            iteration.one_pass_rho, lipschitz=lipschitz, batch_size=size, **setting
        )
        assert np.all(price(noise_stds=best) <= target * (1 + 1e-9))
        used = np.flatnonzero(best > 1e-6 * best.max())
        less = best.copy()
        less[rng.choice(used)] *= 0.999
        assert np.any(price(noise_stds=less) > target)


class ProjectedRuns:
    """Noisy runs on an interval [0, D]: densities by Gauss-Legendre quadrature.

    After a step the iterate has atoms at both ends and a density between. Example i
    has the gradient ``m x + u_i``; the protected one's u is the least or the largest
    for which gradients stay within L = 1.
    """

    def __init__(self, rng, count, points=60):
        self.count = count
        self.steps = rng.integers(1, 40, count)
        self.examples = rng.integers(1, 12, count)
        self.diameter = 10 ** rng.uniform(-1, 0.7, count)
        self.spread = self.diameter * 10 ** rng.uniform(-0.8, 0.5, count)  # eta sigma
        curved = rng.random(count) < 0.5
        self.convexity = np.where(curved, rng.uniform(0, 1, count) / self.diameter, 0.0)
        self.smoothness = np.where(curved, self.convexity, 1.0)
        self.rate = rng.uniform(0.05, 1.9, count) / self.smoothness
        # Steps of at most a few diameters, as in practice.
        self.rate = np.minimum(self.rate, 3 * self.diameter)
        self.extremes = np.array([-np.ones(count), 1 - self.convexity * self.diameter])
        share = rng.choice([0.0, 1.0, 0.5], count)
        self.others = share * self.extremes[0] + (1 - share) * self.extremes[1]
        half, weight = np.polynomial.legendre.leggauss(points)
        self.nodes = (half + 1) / 2 * self.diameter[:, None]
        self.weight = weight / 2 * self.diameter[:, None]
        self.start = rng.integers(0, points + 2, count)

    def transition(self, pull):
        """(count, states, states): a step of gradient ``m x + pull``, projected."""
        column = [a[:, None] for a in (0 * self.diameter, self.diameter)]
        x = np.concatenate([column[0], self.nodes, column[1]], axis=1)
        eta, m, noise = (a[:, None] for a in (self.rate, self.convexity, self.spread))
        mean = (x - eta * (m * x + pull[:, None]))[:, :, None]
        noise = noise[:, :, None]
        z = (self.nodes[:, None, :] - mean) / noise
        inside = np.exp(-z * z / 2) / np.sqrt(2 * np.pi) / noise
        below = scipy.special.ndtr(-mean / noise)
        above = scipy.special.ndtr((mean - self.diameter[:, None, None]) / noise)
        return np.concatenate([below, inside * self.weight[:, None, :], above], axis=2)

    def rdp(self, batch, orders):
        """(count, K) of the last iterate, the larger of both directions."""
        dists = []
        drawn = (batch / self.examples)[:, None, None]
        without = self.transition(self.others)
        for own in self.extremes:
            pull = self.others + (own - self.others) / batch
            matrix = drawn * self.transition(pull) + (1 - drawn) * without
            dist = np.zeros(matrix.shape[:2])
            dist[np.arange(self.count), self.start] = 1
            for step in range(self.steps.max()):
                moved = np.einsum("si,sij->sj", dist, matrix)
                dist = np.where((step < self.steps)[:, None], moved, dist)
            np.testing.assert_allclose(dist.sum(axis=1), 1, atol=1e-9)
            dists.append(np.maximum(dist, 1e-300)[..., None])
        one, two = np.log(dists)
        moments = [
            scipy.special.logsumexp(orders * a + (1 - orders) * b, axis=1)
            for a, b in ((one, two), (two, one))
        ]
        return np.maximum(*moments) / (orders - 1)

    def setting(self, row):
        """Arguments of the bounds."""
        return {
            "num_steps": int(self.steps[row]),
            "num_examples": int(self.examples[row]),
            "learning_rate": float(self.rate[row]),
            "noise_std": float(self.spread[row] / self.rate[row]),
            "lipschitz": 1.0,
            "smoothness": float(self.smoothness[row]),
            "strong_convexity": float(self.convexity[row]),
            "diameter": float(self.diameter[row]),
        }


@FEW_AND_MANY
def test_projected_runs_with_full_batches(count):
    runs = ProjectedRuns(np.random.default_rng(62), count)
    orders = np.array([1.5, 2.0, 8.0])
    exact = runs.rdp(runs.examples, orders)
    rho = np.array([full_batch_rho(**runs.setting(row)) for row in range(count)])
    bound = rho[:, None] * orders
    assert_between(0, exact, bound, rtol=1e-7, atol=1e-9)
    assert np.max(exact / bound) > 0.9


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_projected_runs_with_random_batches(count):
    runs = ProjectedRuns(np.random.default_rng(63), count)
    batch = np.ceil(runs.examples * np.random.default_rng(64).uniform(0, 1, count))
    orders = np.array([1.5, 2.0, 8.0])
    exact = runs.rdp(batch, orders)
    bound = np.array(
        [
            bounded_iteration_rdp(
                orders=orders, batch_size=int(batch[row]), **runs.setting(row)
            )
            for row in range(count)
        ]
    )
    assert_between(0, exact, bound, rtol=1e-7, atol=1e-9)
    assert np.max(exact / bound) > (0.9 if count > 100 else 0.3)


# --- Subsampled RDP ---


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
    [
        pytest.param(Gaussian, 0.5, 20, marks=pytest.mark.slow),
        (Laplace, 0.1, 20),
        (RandomizedResponse, 0.01, 8),
    ],
)
@FEW_AND_MANY
def test_poisson_rdp_by_quadrature(kind, least, most, count):
    """lower = exact = tight at whole orders; tight and general above between them."""
    rng = np.random.default_rng(70)
    parameter = least * (most / least) ** rng.uniform(0, 1, count)
    p = 10 ** rng.uniform(-4, -0.01, count)
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


@FEW_AND_MANY
def test_rdp_of_random_mechanisms(count):
    """Three neighbouring distributions given by their RDP alone, at any order."""
    rng = np.random.default_rng(71)
    rest, here, there = np.moveaxis(random_distributions(rng, 4, count, 3), 1, 0)
    rest[::4] = there[::4]
    pairs = ((rest, here), (rest, there), (here, there))
    whole, orders = np.arange(2, 13), np.array([2, 3, 6, 12, 1.2, 2.5, 7.7])
    p = 10 ** rng.uniform(-3, 0, count)
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
    # Where the first direction is larger everywhere, it attains the curve.
    forward = np.stack(
        [
            np.log1p(moment_excess(rest, (here - rest) / rest, a)) / (a - 1)
            for a in whole
        ],
        axis=-1,
    )
    dear = np.all(forward >= tables[0] * (1 - 1e-14), axis=1)
    assert dear.sum() > count // 10
    lower = rdp_poisson_subsampled(
        RdpTable(tables[0]), sampling_probability=p, orders=orders[:4], bound="lower"
    )
    change = p[:, None] * (here - rest) / rest
    sampled = both_directions(rest, change, orders[:4])
    assert np.all(lower[dear] <= sampled[dear] * (1 + 1e-9) + 1e-14)
    assert np.all(lower <= bound[:, :4] * (1 + 1e-12))
