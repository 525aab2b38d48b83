"""Powers of low coefficients and bounds of their errors, against 40 digits."""

import mpmath as mp
import numpy as np
import pytest

from jaxdp_episodic.accountant.methods.certified import hockey_stick, powers

SIZE, KEPT = 64, 12


def exact(masses, counts):
    """Coefficients of the sum, each distribution from its heaviest cell."""
    with mp.workdps(40):
        result = []
        for k in range(KEPT):
            power = mp.mpc(1)
            for (index, mass), count in zip(masses, counts, strict=True):
                away = index - index[np.argmax(mass)]
                turn = [mp.expjpi(mp.mpf(-2 * k * int(a)) / SIZE) for a in away]
                terms = zip(map(mp.mpf, mass), turn, strict=True)
                power *= mp.fsum(m * w for m, w in terms) ** int(count)
            result.append(power)
        return result


def row(masses, counts):
    empty = hockey_stick.CertifiedDistribution(
        np.empty(0), (0.0, 0.0), (0.0, 0.0), 0.0, 0.01, 1.0, 0.0, 0.0, 0.0, 0.0
    )
    return hockey_stick.Row(
        list(masses), list(counts), SIZE, 0, False, 0.5, 1e-6, 1e-9, empty
    )


def by_terms(masses, counts):
    return powers.power_from_terms(row(masses, counts), KEPT)


def by_transform(masses, counts):
    return powers.power_from_transform(row(masses, counts), KEPT)


def random_masses(rng, kind):
    index = np.arange(-4.0, 5.0)
    mass = rng.uniform(0.1, 1, 9)
    if kind == "atom":
        mass[4] = 1e3
    if kind == "cancelling":  # at frequency 8 two halves are opposite, but for 1e-7
        index, mass = np.array([0.0, 4.0]), np.array([1.0, 1 - 2e-7])
    return index, mass / mass.sum()


@pytest.mark.parametrize("method", [by_terms, by_transform])
@pytest.mark.parametrize("kind", ["wide", "atom", "cancelling"])
@pytest.mark.parametrize("counts", [(1,), (2,), (3, 5), (10**6,), (1,) * 20])
def test_errors_are_within_their_bounds(method, kind, counts):
    rng = np.random.default_rng(len(counts))
    masses = [random_masses(rng, kind) for _ in counts]
    found, errors = method(masses, counts)
    assert np.all(within(found, errors, exact(masses, counts)))
    assert np.all(errors <= 1e-12 * sum(counts))


def within(found, errors, truth):
    with mp.workdps(40):
        return [
            abs(mp.mpc(complex(value)) - right) <= mp.mpf(float(error))
            for value, error, right in zip(found, errors, truth, strict=True)
        ]


def test_a_modulus_from_its_square_less_1_would_be_outside(monkeypatch):
    """It cancels where two halves of the losses are opposite: off by 1e-10 of 1."""
    monkeypatch.setattr(powers, "_MOST_DEVIATION", 3.0)
    masses = [random_masses(np.random.default_rng(0), "cancelling")]
    found, errors = by_terms(masses, (1,))
    assert not np.all(within(found, errors, exact(masses, (1,))))
