"""The discrete Gaussian against its definition, and against the continuous one."""

import itertools
import math
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from scipy import stats

import jaxdp_episodic as jde
from jaxdp_episodic.trainer.gradient import discrete_gaussian
from jaxdp_episodic.trainer.gradient.discrete_gaussian import (
    LARGEST_VARIANCE,
    SMOOTHING,
    covering_variance,
    log_ratio_bound,
    sample_discrete_gaussian,
)
from rows import fast_and_slow


def stream(seed=0):
    return np.random.default_rng(seed)


def probabilities(variance, reach):
    """Probabilities of -reach to reach; those beyond are below 1e-30."""
    x = np.arange(-reach, reach + 1)
    weights = np.exp(-(x**2) / (2 * variance))
    return x, weights / weights.sum()


# --- Samples ---


@pytest.mark.parametrize(
    "variance", fast_and_slow([1, 3, 17, 100, 3_001], lambda v: v != 100)
)
def test_frequencies_are_those_of_the_definition(variance):
    """One false alarm in 10^6 for each variance."""
    count = 400_000
    samples = sample_discrete_gaussian(variance, count, stream())
    x, chances = probabilities(variance, 12 * math.isqrt(variance) + 12)
    expected = count * chances
    # Bins with few expected counts: the two tails are counted together.
    tail = expected < 20
    seen = np.array([(samples == value).sum() for value in x[~tail]])
    seen = np.append(seen, count - seen.sum())
    expected = np.append(expected[~tail], expected[tail].sum())
    assert stats.chisquare(seen, expected).pvalue > 1e-6


@pytest.mark.parametrize("variance", [60_000**2, 2**70, LARGEST_VARIANCE])
def test_large_variances(variance):
    samples = sample_discrete_gaussian(variance, 200_000, stream())
    assert stats.kstest(samples / math.sqrt(variance), "norm").pvalue > 1e-6
    # Low-order bits are fair, so the grid has no holes.
    for modulus in (2, 3, 7, 256):
        seen = np.bincount(samples % modulus, minlength=modulus)
        assert stats.chisquare(seen).pvalue > 1e-6


@pytest.mark.parametrize(
    "variance", [1, 2, 17, 3_000, 60_000**2, 2**72 + 1, LARGEST_VARIANCE]
)
def test_layers_cover_the_density_and_certain_parts_are_below_it(variance):
    """In rational arithmetic, at every integer if they are few, else at the ends."""
    layers = discrete_gaussian._layers(variance)
    heights, widths = layers.exact_bottoms, [int(w) for w in layers.widths]
    assert all(a >= b for a, b in itertools.pairwise(widths))
    assert layers.last == (widths[0] << layers.shift) - 1 >= 10 * math.sqrt(variance)
    pairs = zip(widths, itertools.pairwise(heights), strict=True)
    areas = {width * (top - bottom) for width, (bottom, top) in pairs}
    assert len(areas) == 1  # a byte selects each with equal probability
    with mp.workdps(60):

        def curve(x):
            return mp.exp(-(mp.mpf(x) ** 2) / (2 * variance))

        def number(height):
            return mp.mpf(height.numerator) / height.denominator

        assert number(heights[-1]) >= 1
        ends = [width << layers.shift for width in widths[1:]]
        for x in range(layers.last) if variance <= 3_000 else ends:
            above = sum(width << layers.shift > x for width in widths)
            assert number(heights[above]) >= curve(x)
        for place, sure in enumerate(layers.sure):
            assert sure <= widths[place] << layers.shift
            if sure:
                assert number(heights[place + 1]) <= curve(int(sure) - 1)
        # The tail against its proposal, in steps of a deviation.
        step = math.isqrt(variance - 1) + 1
        for k in range(9):
            most = number(heights[1]) / (2 ** (k + 1) * step)
            assert curve(layers.last + k * step) <= most


@pytest.mark.parametrize("variance", [1, 7, 60_000**2 + 1])
def test_exact_arithmetic_decides_as_float64_does(variance, monkeypatch):
    """From the same bits: where float64 decides, it decides correctly."""
    layers = discrete_gaussian._layers(variance)
    rng = stream()
    layer = rng.integers(256, size=300)
    value = rng.integers((layers.widths[layer] << layers.shift).astype(np.int64))
    fast = discrete_gaussian._below_curve(layers, layer, value, stream(1))
    monkeypatch.setattr(discrete_gaussian, "_DOUBT", 2.0)
    exact = discrete_gaussian._below_curve(layers, layer, value, stream(1))
    np.testing.assert_array_equal(exact, fast)
    assert 0 < fast.mean() < 1


class Words:
    """A generator of known bits."""

    def __init__(self, words):
        self.words = list(words)

    def integers(self, low, high, size, **_):
        taken, self.words = self.words[:size], self.words[size:]
        return np.array(taken, np.uint64)


@pytest.mark.parametrize("exponent", [Fraction(1, 3), Fraction(7), Fraction(60)])
def test_undecided_samples_read_more_bits(exponent):
    """A 64-bit word that leaves the sample undecided, and its neighbours."""
    bottom, height = Fraction(1, 10**30), Fraction(999, 1000)
    with mp.workdps(200):
        curve = mp.exp(-mp.mpf(exponent.numerator) / exponent.denominator)
        share = (curve - mp.mpf(10) ** -30) / (mp.mpf(999) / 1000)
        open_one = int(mp.floor(share * 2**512))
    words = [(open_one >> (64 * k)) & (2**64 - 1) for k in reversed(range(8))]
    for change, expected in ((-1, True), (1, False)):
        more = Words([*words[1:-1], words[-1] + change * 2**40])
        found = discrete_gaussian._is_below(bottom, height, words[0], exponent, more)
        assert found == expected
        assert not more.words  # all bits were read
    below = discrete_gaussian._is_below
    assert below(bottom, height, max(words[0] - 1, 0), exponent, stream()) == (
        words[0] > 0
    )
    assert not below(bottom, height, words[0] + 1, exponent, stream())


def test_the_tail_has_the_right_frequencies(monkeypatch):
    """Layers that end at 4.3 deviations; one false alarm in 10^6."""
    monkeypatch.setattr(discrete_gaussian, "_END", 4.3)
    layers, rng = discrete_gaussian._layers.__wrapped__(3), stream()
    assert layers.last == 8
    found = [discrete_gaussian._from_tail(layers, rng) for _ in range(4_000)]
    curve = np.exp(-(np.arange(8, 60) ** 2) / 6.0) / float(layers.exact_bottoms[1])
    assert curve[0] < 1 / 4  # the proposal
    monkeypatch.setattr(discrete_gaussian, "_layers", lambda variance: layers)
    samples = np.abs(sample_discrete_gaussian(3, 2_000_000, rng))
    x, chances = probabilities(3, 40)
    for seen, count, chance in (
        (found.count(8), 4_000, curve[0]),
        (sum(x is not None and x > 8 for x in found), 4_000, curve[1:].sum()),
        ((samples >= 8).sum(), 2_000_000, chances[np.abs(x) >= 8].sum()),
        ((samples >= 9).sum(), 2_000_000, chances[np.abs(x) >= 9].sum()),
    ):
        assert stats.binomtest(int(seen), count, chance).pvalue > 1e-7


def test_samples_are_a_function_of_the_bits():
    one = sample_discrete_gaussian(50, 1_000, stream())
    np.testing.assert_array_equal(sample_discrete_gaussian(50, 1_000, stream()), one)
    other = sample_discrete_gaussian(50, 1_000, stream(1))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.2
    assert one.dtype == np.int64
    assert sample_discrete_gaussian(50, 0, stream()).shape == (0,)
    for variance, count, error in (
        (2**113, 3, ValueError),
        (1.5, 3, TypeError),
        (1, -1, ValueError),
    ):
        with pytest.raises(error, match="variance must be|count must be >= 0"):
            sample_discrete_gaussian(variance, count, stream())


# --- Privacy ---


def hockey_stick(upper, lower, epsilon):
    return np.maximum(upper - math.exp(epsilon) * lower, 0).sum()


def mixture(variance, weights, reach):
    """Distribution of discrete noise added to 0, 1, ... with these probabilities."""
    x = np.arange(-reach, reach + 1)
    dist = np.zeros(x.size)
    for mean, weight in weights.items():
        shifted = np.exp(-((x - mean) ** 2) / (2 * variance))
        dist += weight * shifted / shifted.sum()
    return dist


@pytest.mark.parametrize(
    ("grid", "noise", "rate"),
    list(itertools.product([1, 4, 30], [0.5, 3.0], [0.1, 1.0])),
)
def test_a_sampled_release_costs_no_more_than_is_accounted(grid, noise, rate):
    """Enumeration of one step, both directions, contributions of up to ``grid``."""
    variance = covering_variance(noise * grid)
    reach = 40 * math.isqrt(variance) + grid
    without = mixture(variance, {0: 1.0}, reach)
    step = jde.GaussianStep(
        jde.MultistageSampling(jde.Poisson("example", sampling_probability=rate)),
        noise_multiplier=noise,
    )
    for contribution in {grid, -grid, 1}:
        present = mixture(variance, {0: 1 - rate, contribution: rate}, reach)
        for epsilon in (0.01, 0.3, 1.0, 3.0):
            accounted = jde.delta(step, num_steps=1, epsilon=epsilon)
            for pair in ((present, without), (without, present)):
                found = hockey_stick(*pair, epsilon)
                assert found <= accounted * (1 + 1e-9) + 1e-14


def test_variances_cover_deviations():
    assert covering_variance(0.0) == SMOOTHING
    assert covering_variance(3.0) == 9 + SMOOTHING
    assert covering_variance(1.1) == 2 + SMOOTHING
    deviation = 0.1 * 60_000 + 1e-9
    assert covering_variance(deviation) >= deviation**2 + SMOOTHING
    for wrong in (-1.0, math.nan, math.inf, 2.0**56):
        with pytest.raises(ValueError, match="deviation must be in"):
            covering_variance(wrong)
    assert 0 < log_ratio_bound(10**9, 2**31) < 1e-115
    with mp.workdps(200):
        rate = 2 * mp.pi**2 * SMOOTHING
        eta = 2 * mp.nsum(lambda k: mp.exp(-rate * k**2), [1, mp.inf])
        assert mp.log((1 + eta) / (1 - eta)) <= log_ratio_bound(1)
