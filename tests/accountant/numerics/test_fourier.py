"""Powers of lattice distributions against convolution with many digits."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from jaxdp_episodic.accountant._engine import float64_boundary, using_engine
from jaxdp_episodic.accountant.numerics import fourier

KERNELS = {
    "plain": (fourier.power_sums, fourier.cells_of_power),
    "by differences": (fourier.difference_sums, fourier.cells_of_power),
    "around an atom": (fourier.atom_sums, fourier.cells_around_atom),
}


def exact_power(masses, counts, size):
    """Circular convolution in integers of 200 binary digits beyond the point."""
    scale = 1 << 200
    total = [0] * size
    total[0] = scale
    for dist, count in zip(masses, counts, strict=True):
        whole = [round(Fraction(float(m)) * scale) for m in dist]
        for _ in range(int(count)):
            new = [0] * size
            for i, a in enumerate(total):
                if a:
                    for j, b in enumerate(whole):
                        if b:
                            new[(i + j) % size] += a * b // scale
            total = new
    return np.array([t / scale for t in total])


def run(name, masses, counts):
    sums_of, cells_from = KERNELS[name]
    sums = float64_boundary(sums_of)(
        np.asarray(masses)[None], np.asarray(counts, float)[None]
    )
    finish = float64_boundary(cells_from, static=("size",))
    return finish(sums, size=len(masses[0]))


def random_masses(seed, size, atom):
    rng = np.random.default_rng(seed)
    masses = np.zeros(size)
    masses[:6] = rng.uniform(0, 1, 6) * 10.0 ** -rng.integers(0, 6, 6)
    masses /= masses.sum()
    masses *= 1 - atom
    masses[0] += atom
    return masses


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "counts, engine",
    [((1,), "numpy"), ((7,), "numpy"), ((3, 5), "numpy"), ((3, 5), "jax")],
)
@pytest.mark.parametrize("atom", [0.7, 0.999, 1 - 1e-9])
def test_error_is_within_its_bound(name, counts, engine, atom):
    size = 32
    masses = [random_masses(seed, size, atom) for seed, _ in enumerate(counts)]
    with using_engine(engine):
        cells, bound, norm = run(name, masses, counts)
    error = np.abs(cells[0] - exact_power(masses, counts, size))
    assert np.all(error[1:] <= bound[0])
    # cell 0 has the relative error of the atom's power as well
    assert error[0] <= bound[0] + sum(counts) * 1e-15
    assert np.linalg.norm(error[1:]) <= norm[0]


def test_around_an_atom_rare_losses_keep_their_digits():
    masses = [random_masses(0, 64, 1 - 1e-12)]
    (cells,), (bound,), _ = run("around an atom", masses, [100])
    exact = exact_power(masses, [100], 64)
    assert bound < 1e-22
    assert np.allclose(cells[1:5], exact[1:5], rtol=1e-10, atol=0)
    _, (plain,), _ = run("plain", masses, [100])
    assert plain > 1e-14


@pytest.mark.parametrize("count", [1e3, 1e7])
def test_binomial_distribution(count):
    p, size = 3 / count, 64
    masses = np.zeros(size)
    masses[0], masses[1] = 1 - p, p
    k = np.arange(30)
    log_terms = np.concatenate(
        [[0.0], np.cumsum(np.log((count - k[:-1]) / (k[:-1] + 1)))]
    )
    exact = np.exp(log_terms + k * np.log(p) + (count - k) * np.log1p(-p))
    for name in KERNELS:
        (cells,), (bound,), _ = run(name, [masses], [count])
        # 1 - p itself is rounded: a relative error of count times 1e-16
        assert np.all(np.abs(cells[:30] - exact) <= bound + count * 1e-15 * exact)


def test_idle_steps_change_nothing():
    idle = np.zeros(32)
    idle[0] = 1.0
    one = random_masses(3, 32, 0.7)
    for name in KERNELS:
        alone, *_ = run(name, [one], [5])
        beside, *_ = run(name, [one, idle], [5, 0])
        assert np.allclose(alone, beside, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "counts, engine",
    [((1,), "numpy"), ((40,), "numpy"), ((3, 5), "numpy"), ((3, 5), "jax")],
)
@pytest.mark.parametrize("folded", [False, True])
def test_what_frequencies_hold_from_each_on(counts, engine, folded):
    """Of a circle, or of one folded onto a quarter of its cells."""
    size, decays = 128, np.array([0.01, 0.06])
    masses = np.stack([random_masses(seed, size, 0.3) for seed, _ in enumerate(counts)])
    together, excess = 1, np.zeros((1, len(counts)))
    circles = masses
    if folded:
        # Losses from -8 to 8, of variance V, and what lies between frequencies.
        masses[:, 9:-8] = 0.0
        masses /= masses.sum(-1, keepdims=True)
        together, circles = 4, masses.reshape(len(counts), 4, -1).sum(1)
        cell = np.arange(size) - size * (np.arange(size) >= size // 2)
        variance = masses @ cell**2 - (masses @ cell) ** 2
        excess[0] = (2 * np.pi * together / size) ** 2 * variance / 4
    kernel = float64_boundary(fourier.log_moduli, static=("folded",))
    sums_of = float64_boundary(fourier.weighted_sums, static=("size",))
    powers = np.asarray(counts, float)[None]
    with using_engine(engine):
        log_power = kernel(circles[None], powers, excess, folded=folded)
        sums = sums_of(log_power, decays[None], size=size)
    turns = np.outer(np.arange(size // 2 + 1), np.arange(size)) % size / size
    waves = np.cos(2 * np.pi * turns) - 1j * np.sin(2 * np.pi * turns)
    exact = masses @ waves.T
    power = np.prod(np.abs(exact) ** np.asarray(counts)[:, None], axis=0)
    bounds = np.repeat(np.exp(log_power[0]), together)[: len(power)]
    assert np.all(power <= bounds * (1 + 1e-12))
    angle = 2 * np.pi * np.arange(size // 2 + 1) / size
    for decay in decays:
        power = power / np.abs(1 - np.exp(-decay + 1j * angle))
    rest = np.cumsum(power[::-1])[::-1][::together]
    assert np.all(rest <= sums[0] * (1 + 1e-12))
    # 2 sin(x / 2) is replaced by something smaller, by a factor of pi / 2 at most
    if not folded:
        assert np.all(sums[0] <= (np.pi / 2) ** 2 * rest * (1 + 1e-6) + 1e-9)
