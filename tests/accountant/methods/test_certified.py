"""Certified ends of delta and epsilon contain the truth and are close together."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest

from jaxdp_episodic.accountant.losses.finite import FiniteLoss
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
)
from jaxdp_episodic.accountant.methods.certified import composition, lattice, method
from jaxdp_episodic.accountant.methods.certified.method import pld_bounds
from jaxdp_episodic.accountant.methods.certified.plan import with_splits
from jaxdp_episodic.accountant.methods.exact.method import exact_answer
from jaxdp_episodic.accountant.methods.rdp import rdp_bound
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt, Run
from oracles import little_noise, precise

# The mechanism of one contribution, and its shift; a swapped one is twice its norm.
KINDS = {
    "sampled": (SampledGaussianLoss, 1.0),
    "swapped": (SwappedGaussianLoss, 2.0),
    "antipodal": (AntipodalGaussianLoss, 1.0),
}


def loss(kind, outer=1.0, rate=1.0, inner=1.0, noise=1.0):
    make, moved = KINDS[kind]
    with np.errstate(divide="ignore"):
        shift = moved / np.asarray(noise, float)
    rates = (outer, rate, inner) if kind == "antipodal" else (outer, rate)
    return make(*(np.atleast_1d(np.asarray(f, float)) for f in (*rates, shift)))


def one_run(kind, steps, **fields):
    return Run((loss(kind, **fields),), (np.atleast_1d(np.asarray(steps, float)),))


def epsilon_at(log_delta):
    return EpsilonAt(np.atleast_1d(np.asarray(log_delta, float)))


def delta_at(epsilon):
    return DeltaAt(np.atleast_1d(np.asarray(epsilon, float)))


def tail(x):
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2


def gaussian_log_delta(epsilon, steps, noise):
    """Closed form (Balle and Wang 2018), 40 digits."""
    with mpmath.workdps(40):
        mu = mpmath.sqrt(steps) / mpmath.mpf(noise)
        t = mpmath.mpf(epsilon) / mu - mu / 2
        return float(mpmath.log(tail(t) - mpmath.exp(epsilon) * tail(t + mu)))


def by_lattice(monkeypatch):
    """Makes Gaussians be composed on a lattice, not by their closed form."""
    monkeypatch.setattr(Run, "gaussian_shift", lambda run: np.zeros(run.shape))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "steps, noise, epsilon", [(1, 1, 2), (10, 3, 4), (100, 10, 12), (1e5, 3, 6000)]
)
def test_ends_contain_the_gaussian_mechanism(steps, noise, epsilon, monkeypatch):
    by_lattice(monkeypatch)
    truth = gaussian_log_delta(epsilon, steps, noise)
    run = one_run("sampled", steps, noise=noise)
    lower, upper = pld_bounds(delta_at(epsilon), run)
    assert lower <= truth <= upper <= lower + 0.02
    lower, upper = pld_bounds(epsilon_at(truth), run)
    assert lower <= epsilon <= upper <= 1.01 * lower


def test_a_step_that_is_hardly_ever_drawn_widens_nothing():
    losses = tuple(loss("sampled", rate=r) for r in (1e-200, 0.01))
    run = Run(losses, (np.array([5383.0]), np.array([185.0])))
    assert np.ptp(pld_bounds(epsilon_at(-11.5), run)) < 1e-3


def test_a_setting_that_a_peer_underestimates():
    """A peer's pessimistic PLD gives 1.943931e-10, a contour integral 1.961409e-10."""
    run = one_run("sampled", 1e5, rate=1e-4, noise=0.8)
    lower, upper = pld_bounds(delta_at(0.5), run)
    assert 1.943931e-10 < math.exp(lower[0]) <= 1.961409e-10 <= math.exp(upper[0])
    run = one_run("sampled", 1e3, rate=0.01, noise=1.0)
    lower, upper = pld_bounds(delta_at(2.0), run)
    assert math.exp(lower[0]) <= 2.665574e-6 <= math.exp(upper[0])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "kind, rate, inner, noise, steps, delta",
    [
        ("sampled", 0.01, 1.0, 0.8, 1_000, 1e-5),
        # Classes of five of 1,623, whose examples are drawn with rate .2.
        ("antipodal", 0.2 * 5 / 1_620, 0.2, 0.5, 100, 1e-5),
        ("antipodal", 0.02, 1.0, 1.0, 100, 1e-9),
        # Rare large losses that the pilot distribution resolves poorly.
        ("sampled", 1.4099818751641478e-4, 1.0, 1.01765991, 11_221, 9.5763478e-12),
        ("antipodal", 6.26e-8, 0.0535, 0.206, 44_185, 9.75e-10),  # one is above epsilon
    ],
)
def test_ends_are_near_and_contain_the_exact_answer(
    kind, rate, inner, noise, steps, delta
):
    run = one_run(kind, steps, rate=rate, inner=inner, noise=noise)
    question = epsilon_at(math.log(delta))
    lower, upper = pld_bounds(question, run)
    assert 0 <= upper - lower <= 1e-4 * lower
    answer = exact_answer(question, run)
    assert lower / (1 + 1e-6) <= answer.value <= upper * (1 + 1e-6)


def test_an_overflowing_setting_leaves_the_others(monkeypatch):
    """Regression: 1e15 steps exceeded float64's range, and their whole batch failed."""
    log_delta = math.log(1e-6)
    ordinary = one_run("sampled", 100, rate=0.1, noise=1.2)
    expected = pld_bounds(epsilon_at(log_delta), ordinary)
    both = Run(
        (loss("sampled", rate=[0.1, 0.9], noise=[1.2, 3.5]),), (np.array([1e2, 1e13]),)
    )
    right = method.certified_ends

    def certified_ends(steps, *rest):
        if steps[0].count == 1e13:
            raise OverflowError("(34, 'Numerical result out of range')")
        return right(steps, *rest)

    monkeypatch.setattr(method, "certified_ends", certified_ends)
    lower, upper = pld_bounds(epsilon_at([log_delta] * 2), both)
    assert (lower[0], upper[0]) == expected
    assert lower[1] == 0 < 1e11 < upper[1] < np.inf


@pytest.mark.parametrize(
    "kind, rate, inner, noise, steps, log_delta",
    [
        ("swapped", 1e-6, 1.0, 1e-30, 1e3, -13.8),  # cells as wide as the losses
        ("antipodal", 0.999, 0.1, 1e-8, 1e12, -13.8),  # rounding hides delta
    ],
)
def test_extreme_settings_keep_renyis_bound(kind, rate, inner, noise, steps, log_delta):
    run = one_run(kind, steps, rate=rate, inner=inner, noise=noise)
    lower, upper = pld_bounds(epsilon_at(log_delta), run)
    bound, _ = rdp_bound(epsilon_at(log_delta), run)
    assert 0 <= lower <= upper <= bound * (1 + 1e-12)


@pytest.mark.parametrize(
    "rate, noise, steps, delta",
    [
        (0.1, 1e-3, 10, 1e-5),
        (1e-15, 0.01, 5, 2.5e-15),  # the lower end was 609, by underflow
        (1e-15, 0.01, 1000, 3e-16),
    ],
)
def test_with_little_noise_the_number_of_draws_decides(rate, noise, steps, delta):
    hits = 1 / noise, math.log(rate), math.log1p(-rate)
    truth = little_noise.epsilon_of_hits(delta, steps, rate, *hits)
    run = one_run("sampled", steps, rate=rate, noise=noise)
    lower, upper = pld_bounds(epsilon_at(math.log(delta)), run)
    assert truth * (1 - 1e-4) <= lower <= truth * (1 + 1e-6)
    assert truth * (1 - 1e-6) <= upper <= truth * (1 + 1e-4)


@pytest.mark.parametrize("steps, noise", [(1, 1.0), (100, 10.0), (10**12, 1e6)])
@pytest.mark.parametrize("kind", ["sampled", "antipodal"])
def test_gaussians_compose_by_their_closed_form(kind, steps, noise):
    run = one_run(kind, steps, noise=noise)
    truth = gaussian_log_delta(1.5, steps, noise / (1 if kind == "sampled" else 2))
    for question, answer in ((delta_at(1.5), truth), (epsilon_at(truth), 1.5)):
        lower, upper = pld_bounds(question, run)
        assert lower <= answer <= upper
        assert upper - lower <= 2e-12 * max(abs(answer), 1)


@pytest.mark.slow
def test_narrower_ends_can_be_requested_or_refused():
    run = one_run("sampled", 1e3, rate=0.01)
    goal = epsilon_at(math.log(1e-6))
    lower, upper = pld_bounds(goal, run)
    fine_lower, fine_upper = pld_bounds(goal, run, width=1e-3)
    assert fine_upper - fine_lower <= 1e-3
    assert fine_lower <= upper and lower <= fine_upper
    with pytest.raises(ValueError, match="max_width 1e-12 cannot be reached"):
        pld_bounds(goal, run, width=1e-12)


def sampled_tails(u, p, s):
    """P(L > u) and Q(L > u), forward and backward, to 50 digits."""
    with mpmath.workdps(50):
        u, p, s = mpmath.mpf(u), mpmath.mpf(p), mpmath.mpf(s)

        def at(loss):  # z where log(1 - p + p e^(sz - s²/2)) is the loss
            return (mpmath.log((mpmath.expm1(loss) + p) / p) + s * s / 2) / s

        z = at(u)
        forward = (1 - p) * tail(z) + p * tail(z - s), tail(z)
        if mpmath.expm1(-u) + p <= 0:
            return forward, (mpmath.mpf(0), mpmath.mpf(0))
        z = at(-u)
        return forward, (tail(-z), (1 - p) * tail(-z) + p * tail(s - z))


@pytest.mark.parametrize("p, s", [(1e-3, 1.25), (0.02, 9.0)])
def test_profile_errors_are_within_their_bounds(p, s):
    """Also near -log(1 - p), the end of the backward losses, where terms cancel."""
    last = -math.log1p(-p)
    points = np.concatenate(
        [p * np.geomspace(1e-6, 30, 12), last * (1 - np.geomspace(1e-8, 0.3, 12))]
    )
    one = SampledGaussianLoss(*map(np.float64, (1.0, p, s)))
    forward, backward = lattice.evaluate_tails(one, points)
    move = lattice.displacement(one)
    for (i, u), place in itertools.product(enumerate(points), (0, 1)):
        tails = (forward, backward)[place]
        # the distribution is the true one with losses shifted by at most ``move``
        near, far = (sampled_tails(v, p, s)[place] for v in (u - move, u + move))
        with mpmath.workdps(50):
            g, error = mpmath.exp(u), float(tails.scaled_error[i])
            assert g * far[1] - error <= float(tails.scaled[i]) <= g * near[1] + error
            error = float(tails.profile_error[i]) + 2 * move * g * near[1]
            low, high = far[0] - g * far[1] - error, near[0] - g * near[1] + error
            assert low <= float(tails.profile[i]) <= high


def test_settings_that_lose_nothing_or_everything():
    rate, noise = np.array([0.0, 0.1, 0.1, 0.1]), np.array([1.0, np.inf, 1.0, 0.0])
    run = one_run("sampled", [10, 10, 0, 10], rate=rate, noise=noise)
    lower, upper = pld_bounds(epsilon_at(np.full(4, math.log(1e-6))), run)
    np.testing.assert_array_equal([lower, upper], [[0] * 4, [0, 0, 0, np.inf]])
    lower, upper = pld_bounds(delta_at(np.ones(4)), run)
    least = -np.inf
    np.testing.assert_array_equal([lower, upper], [[least] * 4, [*[least] * 3, 0]])
    with pytest.raises(ValueError, match="whole"):
        pld_bounds(epsilon_at(-10.0), one_run("sampled", 1.5))


def test_ends_that_cross_fall_back_on_renyis_bound(monkeypatch):
    """With too much mass in the lower distribution."""

    def lower_with(points, bins):
        return 1.1 * lattice.upper_masses(points, bins)[0]

    monkeypatch.setattr(lattice, "lower_masses", lower_with)
    by_lattice(monkeypatch)
    monkeypatch.setattr(composition, "_LACKING", math.inf)
    run = one_run("sampled", 10, noise=3.0)
    with pytest.warns(RuntimeWarning, match="a fault of the certified method"):
        lower, upper = pld_bounds(delta_at(4.0), run)
    assert lower == -np.inf
    assert upper == pytest.approx(rdp_bound(delta_at(4.0), run)[0], rel=1e-12)


# --- The lower distribution is below the true one, and not far below ---


def bins_of(p, s, spacing, center, count):
    grid = center + spacing * np.arange(-4.0, count)
    points = np.empty(2 * len(grid) - 1)
    points[::2], points[1::2] = grid, 0.5 * (grid[1:] + grid[:-1])
    loss = SampledGaussianLoss(*map(np.float64, (1.0, p, s)))
    own, other = lattice.evaluate_tails(loss, points)
    return points, lattice.bin_masses(points, own, other)


# Most of the second distribution is a spike near -p, narrower than the spacing.
LATTICES = [(0.3, 1.0, 0.1, 0.05, 60), (3e-4, 1.9, 1.5e-3, -2.1e-4, 400)]


@pytest.mark.parametrize("p, s, spacing, center, count", LATTICES)
def test_the_lower_distribution_is_below(p, s, spacing, center, count):
    points, bins = bins_of(p, s, spacing, center, count)
    masses, losses = lattice.lower_masses(points, bins), points[::2]
    # between its losses, where the lower profile is straight and the true one is
    # convex, and right beside the losses
    for u in np.sort(np.concatenate([losses[:20], losses[:20] + 0.4 * spacing])):
        with mpmath.workdps(40):
            exact = float(precise.mp_sampled_profiles(u, p, s)[0])
        mine = math.fsum(
            m * max(-math.expm1(u - x), 0.0)
            for m, x in zip(masses, losses, strict=True)
        )
        assert mine <= exact * (1 + 1e-12) + 1e-18


@pytest.mark.parametrize("seed", range(40))
def test_the_lower_distribution_of_atoms_is_below(seed):
    """Single losses, a bulk, steep ends, a spike; grids fine and coarse."""
    rng = np.random.default_rng(seed)
    number, scale = int(rng.integers(1, 60)), math.exp(rng.uniform(-10, 4))
    losses = (
        rng.normal(0, 1, number),
        np.linspace(-1, 1, number),
        rng.exponential(1, number) - 0.01,
        np.append(0.0, rng.standard_cauchy(number).clip(-9, 9)),
    )[seed % 4] * scale
    mass = np.exp(rng.uniform(-60, 0, len(losses)))
    if seed % 3:
        mass = np.exp(-5 * (losses / scale) ** 2)
    spacing = scale * math.exp(rng.uniform(-5, 1))
    places = np.floor(losses / spacing)
    grid = np.unique(np.add.outer([-1.0, 0.0, 1.0, 2.0], places)) * spacing
    points = with_splits(grid)
    error = (1e-15, 1e-7)[seed % 2] * mass
    bins = lattice.bins_of_masses(points, losses, mass, error)
    masses, sure = lattice.lower_masses(points, bins), mass - error
    assert np.all(masses >= 0)
    for u in np.concatenate([[-1e3], grid, losses, grid + 0.3 * spacing]):
        true = math.fsum(sure * np.maximum(-np.expm1(np.minimum(u - losses, 0)), 0))
        mine = math.fsum(masses * np.maximum(-np.expm1(np.minimum(u - grid, 0)), 0))
        assert mine <= true * (1 + 1e-13)
    # A single atom may be lowered by a whole cell; evenly spaced ones hardly change.
    if seed % 4 == 1 and seed % 3 and spacing < 0.05 * scale and number > 30:
        true = mass @ np.maximum(-np.expm1(-losses), 0)
        mine = masses @ np.maximum(-np.expm1(-grid), 0)
        assert mine > 0.99 * true


@pytest.mark.parametrize("sign", [-1, 1])
def test_errors_of_shares_go_to_the_safe_side(sign):
    """The part at the upper end of each bin is too large, or too small."""
    rng = np.random.default_rng(7)
    losses, grid = np.sort(rng.normal(0, 1, 300)), np.arange(-40.0, 40) / 10
    mass, points = np.exp(-((losses - 0.5) ** 2) / 2), with_splits(grid)
    bins = lattice.bins_of_masses(points, losses, mass, 0 * mass)
    off = 0.2 * np.minimum(bins.top, bins.bottom)
    top, bottom = bins.top + sign * off, bins.bottom - sign * off
    wrong = bins._replace(top=top, bottom=bottom, top_error=off)
    masses = lattice.lower_masses(points, wrong)
    for u in np.concatenate([grid, losses]):
        true = math.fsum(mass * np.maximum(-np.expm1(np.minimum(u - losses, 0)), 0))
        mine = math.fsum(masses * np.maximum(-np.expm1(np.minimum(u - grid, 0)), 0))
        assert mine <= true * (1 + 1e-13)


def test_errors_of_the_masses_go_to_the_safe_side():
    points, bins = bins_of(*LATTICES[0])
    masses = lattice.lower_masses(points, bins)
    doubtful = bins._replace(
        mass_error=bins.mass_error + 1e-6 * (bins.bottom + bins.top),
        top_error=bins.top_error + 1e-6 * bins.top,
    )
    less = lattice.lower_masses(points, doubtful)
    gain = points[::2]
    assert less @ np.expm1(gain) + less.sum() < masses @ np.expm1(gain) + masses.sum()

    def tails(of):
        found, infinite = lattice.upper_masses(points, of)
        return np.cumsum(found[::-1]) + infinite

    for name, size in (
        ("top_error", bins.top),
        ("mass_error", bins.bottom + bins.top),
        ("above_error", 1.0),
    ):
        more = bins._replace(**{name: getattr(bins, name) + 1e-6 * size})
        added = tails(more) - tails(bins)
        assert added.min() > -1e-15 and added.max() > 1e-8


SETTINGS = [
    ("sampled", 1.0, 0.3, 0.7, 0.25),
    ("sampled", 0.1, 1e-4, 0.3, 2.0),
    ("sampled", 1.0, 0.5, 1.0, math.log(2) * (1 - 1e-9)),
    ("swapped", 1.0, 1e-3, 1.0, 0.01),
]


@pytest.mark.parametrize("kind, outer, rate, noise, epsilon", SETTINGS)
def test_ends_of_one_step_contain_the_truth(kind, outer, rate, noise, epsilon):
    run = one_run(kind, 1, outer=outer, rate=rate, noise=noise)

    def exact(epsilon):
        """The larger direction; swapped pairs have the forward one."""
        both = precise.mp_sampled_profiles(epsilon, rate, KINDS[kind][1] / noise)
        return mpmath.mpf(outer) * (both[0] if kind == "swapped" else max(both))

    with mpmath.workdps(40):
        truth = exact(epsilon)
        log_truth = mpmath.log(truth)
        lower, upper = pld_bounds(DeltaAt(np.array([epsilon])), run)
        assert mpmath.mpf(float(lower[0])) <= log_truth <= mpmath.mpf(float(upper[0]))
        assert upper[0] - lower[0] <= 1e-10
        goal = float(log_truth)
        lower, upper = pld_bounds(EpsilonAt(np.array([goal])), run)
        assert exact(float(upper[0])) <= mpmath.exp(goal) <= exact(float(lower[0]))
        assert upper[0] - lower[0] <= 1e-10 * epsilon


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(
    "where, name, more",
    [
        (lattice, "evaluate_tails", lambda t: t._replace(profile_error=1e-4 * t[0])),
        (SwappedGaussianLoss, "mass_error", lambda error: error + 1e-4),
        (lattice, "displacement", lambda nats: nats + 1e-4),
    ],
)
def test_stated_errors_widen_the_ends(where, name, more, steps, monkeypatch):
    run = one_run("swapped", steps, rate=0.1)
    goal = EpsilonAt(np.array([math.log(1e-5)]))
    right = getattr(where, name)

    def doubtful(*arguments, **options):
        found = right(*arguments, **options)
        return tuple(map(more, found)) if isinstance(found, tuple) else more(found)

    lower, upper = pld_bounds(goal, run)
    monkeypatch.setattr(where, name, doubtful)
    wide_lower, wide_upper = pld_bounds(goal, run)
    least = 0.5e-4 * steps if name == "displacement" else 1e-5
    assert lower <= upper and min(lower - wide_lower, wide_upper - upper) > least
    assert wide_upper - wide_lower < (1e-2 if steps == 1 else 0.15)


def test_what_the_upper_distribution_leaves_out_is_infinite(monkeypatch):
    run, right = one_run("swapped", 5, rate=0.1), lattice.upper_masses

    def leaving_out(*arguments):
        masses, infinite = right(*arguments)
        return masses, infinite + 1e-6

    _, upper = pld_bounds(delta_at(2.0), run)
    monkeypatch.setattr(lattice, "upper_masses", leaving_out)
    _, more = pld_bounds(delta_at(2.0), run)
    assert np.exp(more) - np.exp(upper) > 4.9e-6


def test_the_direction_that_seems_smaller_is_composed_too(monkeypatch):
    """Whichever comes first: P = (.9, .1), Q = (.5, .5), and both exchanged."""
    first = composition.first_guess

    def equal(*given):
        return first(*given)._replace(log_delta=-1.0)

    monkeypatch.setattr(composition, "first_guess", equal)
    pair = np.array([[0.9, 0.1], [0.5, 0.5]])
    cubes = [np.einsum("i,j,k", *3 * [side]).ravel() for side in pair]
    for epsilon in (0.5, 1.5, 3.0):
        truth = max(
            float(np.maximum(one - math.exp(epsilon) * other, 0).sum())
            for one, other in (cubes, cubes[::-1])
        )
        for p, q in (pair, pair[::-1]):
            columns = (tuple(np.atleast_1d(x) for x in np.log(c)) for c in (p / q, p))
            game = FiniteLoss(np.ones(1), *columns, np.zeros(1))
            run = Run((game,), (np.full(1, 3.0),))
            lower, upper = pld_bounds(delta_at(epsilon), run)
            assert lower <= math.log(truth) * (1 - 1e-12) and math.log(truth) <= upper
