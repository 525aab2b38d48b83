import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxdp_episodic as jde
from jaxdp_episodic.audit import simulation
from jaxdp_episodic.trainer.audit.simulation import (
    NUM_BINS,
    exceedances,
    histogram,
    make_part,
    tallied,
)
from jaxdp_episodic.trainer.audit.worst_case import dominating_branches, worst_case

P, W = jde.Poisson, jde.WithoutReplacement
DRAWS = 1 << 18


def two_levels(**more):
    sampling = jde.MultistageSampling(
        P("task", sampling_probability=0.3), W("example", size=10, population=20)
    )
    settings = {"clip_unit": "task", "privacy_unit": "example", **more}
    return jde.GaussianStep(sampling, noise_multiplier=0.9, **settings)


TASKS = two_levels()
EPISODES = jde.GaussianStep(
    jde.IndependentEpisodes(W("example", size=6, population=30), num_episodes=5),
    noise_multiplier=2.0,
)
SWAPPED = jde.GaussianStep(
    W("example", size=3, population=10),
    noise_multiplier=1.5,
    neighboring_relation="replace_one",
)
OUTER = two_levels(clip_unit="example")


def exceeding(parts, thresholds, *, with_unit, key=0, draws=DRAWS):
    counts, number = tallied(
        parts,
        jax.random.key(key),
        draws,
        exceedances,
        thresholds,
        with_unit=with_unit,
    )
    assert number >= draws
    return counts / number, number


def agrees(found, expected, number):
    """Within four and a half standard deviations: a false alarm in 10^5."""
    spread = np.sqrt(np.maximum(expected * (1 - expected), 1e-12) / number)
    assert np.all(np.abs(found - expected) <= 4.5 * spread + 2e-6)


@pytest.mark.parametrize("step", [TASKS, OUTER], ids=["tasks", "outer"])
@pytest.mark.parametrize("with_unit", [True, False])
def test_losses_of_fixed_data_have_their_distribution(step, with_unit):
    """Against the distributions of the loss, which are monotone in the release here."""
    table = worst_case(step)
    grid = np.linspace(-12, 12, 100_001)
    means = table.with_unit if with_unit else table.without_unit
    densities = [
        (table.weight[:, None] * stats.norm.pdf(grid - m[:, None])).sum(axis=0)
        for m in (table.with_unit, table.without_unit)
    ]
    loss = np.log(densities[0] / densities[1])
    thresholds = np.array([-0.3, 0.1, 0.6, 1.2])
    releases = grid[np.searchsorted(loss, thresholds)]
    above = (table.weight[:, None] * stats.norm.sf(releases - means[:, None])).sum(0)
    expected = table.outer_rate * above + (1 - table.outer_rate) * (thresholds < 0)
    found, number = exceeding([make_part(table, 1)], thresholds, with_unit=with_unit)
    agrees(found, expected, number)


@pytest.mark.parametrize(
    "step",
    [pytest.param(TASKS, marks=pytest.mark.slow), EPISODES, SWAPPED],
    ids=["antipodal", "episodes", "swapped"],
)
def test_the_dominating_pair_has_the_claimed_profile(step):
    """P(loss > eps) - e^eps Q(loss > eps) is delta(eps), in both directions."""
    part = make_part(dominating_branches(step), 1)
    assert part.is_mirrored
    epsilons = (0.05, 0.5, 1.5)
    edges = [edge for epsilon in epsilons for edge in (epsilon, -epsilon)]
    above, number = exceeding([part], edges, with_unit=True)
    above_without, _ = exceeding([part], edges, with_unit=False, key=1)
    for i, epsilon in enumerate(epsilons):
        claimed = float(jde.privacy_profile(step, epsilon))
        with_unit, without = (a[2 * i : 2 * i + 2] for a in (above, above_without))
        weight = np.exp(epsilon)
        sums = with_unit[0], without[0], 1 - without[1], 1 - with_unit[1]
        spread = np.sqrt((sums[0] + weight**2 * sums[1]) / number) + 1e-6
        assert abs(sums[0] - weight * sums[1] - claimed) <= 4.5 * spread
        spread = np.sqrt((sums[2] + weight**2 * sums[3]) / number) + 1e-6
        assert abs(sums[2] - weight * sums[3] - claimed) <= 4.5 * spread


def test_steps_add_up():
    """Without subsampling the loss of T steps is that of one of sqrt(T) the shift."""
    step = jde.GaussianStep(P("u", sampling_probability=1.0), noise_multiplier=3.0)
    other = jde.GaussianStep(P("u", sampling_probability=1.0), noise_multiplier=2.0)
    parts = [make_part(worst_case(step), 5), make_part(worst_case(other), 2)]
    variance = 5 / 9 + 2 / 4
    thresholds = np.array([-1.0, 0.5, 2.0])
    for with_unit, mean in ((True, 0.5 * variance), (False, -0.5 * variance)):
        expected = stats.norm.sf((thresholds - mean) / np.sqrt(variance))
        found, number = exceeding(parts, thresholds, with_unit=with_unit)
        agrees(found, expected, number)


def test_the_histogram_counts_what_exceeds():
    part = make_part(worst_case(TASKS), 1)
    run = [part], jax.random.key(4), DRAWS
    bins, _ = tallied(*run, histogram, [2.0], with_unit=True)
    edges = np.linspace(-2, 2, NUM_BINS + 1)[[300, 1024, 1500]]
    counts, number = tallied(*run, exceedances, edges, with_unit=True)
    assert bins.sum() == number
    above = np.array([bins[place:].sum() for place in (300, 1024, 1500)])
    # The same draws, but for losses that lie on an edge up to float32.
    assert np.all(np.abs(above - counts) <= 5)


@pytest.mark.parametrize(
    "draws",
    [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 1000)), 300_000],
)
def test_all_draws_are_made_and_told(draws):
    told = []
    _, number = tallied(
        [make_part(worst_case(TASKS), 1)],
        jax.random.key(0),
        draws,
        exceedances,
        [0.0],
        with_unit=True,
        on_draws=told.append,
    )
    assert sum(told) == number >= draws


MASK = 0xFFFFFFFF


def reference(state, number):
    """xoshiro128++ in whole numbers, as its authors' C code has it."""

    def rotated(x, k):
        return ((x << k) | (x >> (32 - k))) & MASK

    s, found = list(state), []
    for _ in range(number):
        found.append((rotated((s[0] + s[3]) & MASK, 7) + s[0]) & MASK)
        moved = (s[1] << 9) & MASK
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= moved
        s[3] = rotated(s[3], 11)
    return found


def test_the_words_are_xoshiros():
    state = simulation.seeded(jax.random.key(3), 5)
    start = np.stack(state).T.tolist()
    words = []
    for _ in range(20):
        bits, state = simulation.next_bits(state)
        words.append(np.asarray(bits))
    found = np.stack(words).T.tolist()
    assert found == [reference(lane, 20) for lane in start]
    # The first word of the state (1, 2, 3, 4): (1 + 4) rotated by 7, plus 1.
    assert reference([1, 2, 3, 4], 1) == [641]


def test_the_numbers_are_normal():
    @jax.jit
    def draw(state):
        def body(state, _):
            pair, state = simulation.normal_pairs(state)
            return state, jnp.stack(pair)

        return jax.lax.scan(body, state, None, length=64)[1]

    numbers = np.asarray(
        draw(simulation.seeded(jax.random.key(0), 1 << 14)), np.float64
    )
    assert numbers.dtype == np.float64
    assert np.isfinite(numbers).all()
    flat = numbers.ravel()
    # Fixed key: each has a false-alarm rate of 1e-4 over keys.
    assert stats.kstest(flat[:200_000], "norm").pvalue > 1e-4
    for edge in (2.0, 3.0, 4.0):
        expected = flat.size * stats.norm.sf(edge)
        for count in (np.sum(flat > edge), np.sum(flat < -edge)):
            assert abs(count - expected) <= 4 * np.sqrt(expected)
    pairs = numbers.transpose(1, 0, 2).reshape(2, -1)
    assert abs(np.corrcoef(pairs)[0, 1]) <= 4 / np.sqrt(pairs.shape[1])
    later = numbers[:-1].ravel(), numbers[1:].ravel()
    assert abs(np.corrcoef(later)[0, 1]) <= 4 / np.sqrt(later[0].size)
