"""Mixtures of Gaussians, against 50-digit divergences of the pair itself."""

import mpmath as mp
import numpy as np
import pytest
from scipy.special import logsumexp

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses.gaussian_mixtures import GaussianMixtureLoss
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair
from oracles import precise

# Sensitivities, probabilities and rate; noise of deviation 1.
MIXTURES = [
    ([1.0], [1.0], 0.3),
    ([0.0, 1.0, 2.0], [0.2, 0.6, 0.2], 1.0),
    ([0.01, 3.0], [0.5, 0.5], 1.0),
    ([1e-6, 2e-6], [0.5, 0.5], 0.9),
    ([1.0, 10.0], [0.5, 0.5], 1.0),  # backward, some shifts are left of the place
    ([0.001, 10.0], [0.5, 0.5], 1.0),
    ([0.5, 1.0, 1.5, 8.0], [0.9, 0.05, 0.04, 0.01], 0.01),
]


def release(moved, chance, rate, **options):
    return jde.GaussianMixtureRelease(
        moved, chance, standard_deviation=1.0, sampling_probability=rate, **options
    )


def profiles(moved, chance, rate, u):
    """``H_g`` in both directions, in many digits."""
    parts = [(mp.mpf(rate) * mp.mpf(w), c) for c, w in zip(moved, chance, strict=True)]
    with_it = [(1 - sum(w for w, _ in parts), 0), *parts]
    pair = with_it, [(1, 0)]
    return [precise.mp_tails(*one, u)[0] for one in (pair, precise.mirrored(*pair))]


@pytest.mark.few(2)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_profiles_of_both_directions(mixture):
    points = np.array([0.0, 1e-9, 0.05, 2.0, 10.0])
    (forward, _), (backward, _) = dominating_pair(release(*mixture)).log_tails(points)
    with mp.workdps(50):
        for u, *found in zip(points, forward, backward, strict=True):
            for value, truth in zip(found, profiles(*mixture, u), strict=True):
                log_truth = float(mp.log(truth)) if truth > 0 else -np.inf
                if log_truth < -600:
                    assert value < -600
                else:
                    assert abs(value - log_truth) <= 4e-15 * (1 + abs(log_truth))


@pytest.mark.parametrize(
    "moved, chance, u",
    [
        # At the loss its density is negligible, but not its weight.
        ([1.0, 2.0, 3.0, 4.0, 5.0, 30.0], [0.2] * 5 + [2e-22], 66.0),
        # The other shifts are small.
        ([1e-10, 2e-10, 3e-10, 4e-10, 5e-10, 8.0], [0.2] * 5 + [1e-21], 0.0),
    ],
)
def test_a_rare_large_shift_counts(moved, chance, u):
    mixture = moved, chance, 0.5
    tails = dominating_pair(release(*mixture)).log_tails(np.array([u]))
    with mp.workdps(60):
        truths = profiles(*mixture, u)
        for (found, _), truth in zip(tails, truths, strict=True):
            log_truth = float(mp.log(truth)) if truth > 0 else -np.inf
            assert found[0] == pytest.approx(log_truth, rel=1e-13)


@pytest.mark.parametrize("order", [1.2, 7.3])
@pytest.mark.parametrize("mixture", [MIXTURES[i] for i in (1, 4, 6)])
def test_moments_of_both_directions(mixture, order):
    moved, chance, rate = (np.array(a) for a in mixture)
    low = -30.0 - (order - 1) * moved.max()
    x = np.arange(low, 30.0 + order * moved.max(), 0.004)
    tilt = moved[:, None] * (x - 0.5 * moved[:, None])
    y = np.logaddexp.reduce(tilt + np.log(chance * rate)[:, None])
    y = np.logaddexp(y, np.log1p(-rate)) if rate < 1 else y
    density = -0.5 * x * x - 0.5 * np.log(2 * np.pi)
    for direction in ("forward", "backward"):
        power = order if direction == "forward" else 1 - order
        # The trapezoidal rule on the whole line: the error falls off like e^(-1/step).
        if direction == "forward":
            moment = logsumexp(density + power * y) + np.log(0.004)
        else:  # minus 1, in positive terms, as the moment is close to 1
            excess = np.expm1(power * y) - power * np.expm1(np.minimum(y, 300))
            moment = np.log1p((np.exp(density) * excess).sum() * 0.004)
        found = jde.rdp(release(*mixture), order, direction=direction)
        assert found == pytest.approx(moment / (order - 1), rel=2e-9)


def test_one_component_is_the_sampled_gaussian():
    step = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=0.1), noise_multiplier=0.7
    )
    same = jde.GaussianMixtureRelease(
        [1.0], [1.0], standard_deviation=0.7, sampling_probability=0.1
    )
    also = jde.GaussianMixtureRelease([0.0, 1.0], [0.9, 0.1], standard_deviation=0.7)
    for mixture in (same, also):
        orders = [1.5, 4.0, 64.0]
        np.testing.assert_allclose(
            jde.rdp(mixture, orders), jde.rdp(step, orders), rtol=1e-9
        )
        one = jde.epsilon(mixture, num_steps=1, delta=1e-6)
        assert one == pytest.approx(
            jde.epsilon(step, num_steps=1, delta=1e-6), rel=1e-11
        )
        exact = jde.epsilon(step, num_steps=20, delta=1e-6)
        value = jde.epsilon(mixture, num_steps=20, delta=1e-6)
        assert value == pytest.approx(exact, rel=1e-10)


def test_extreme_settings():
    run = {"num_steps": 2, "delta": 1e-6}
    for method in ("exact", "pld", "rdp"):
        for nothing in (release([0.0], [1.0], 1.0), release([1.0], [1.0], 0.0)):
            assert jde.epsilon(nothing, method=method, **run) == 0
        for norms in ([0.0, 1.0], [1.0, 2.0]):
            bare = jde.GaussianMixtureRelease(norms, [0.5, 0.5], standard_deviation=0)
            assert np.isinf(jde.epsilon(bare, method=method, **run))
    never = jde.GaussianMixtureRelease([0.0, 0.0], [0.5, 0.5], standard_deviation=0)
    assert jde.epsilon(never, **run) == 0
    zeroed = release([1.0], [1.0], 0.5, neighboring_relation="zero_out")
    assert jde.rdp(zeroed, 3.0) == jde.rdp(release([1.0], [1.0], 0.5), 3.0)
    with pytest.raises(NotImplementedError, match="replace_one.*no theorem"):
        release([1.0], [1.0], 1.0, neighboring_relation="replace_one")
    with pytest.raises(ValueError, match="add up to 1"):
        release([1.0, 2.0], [0.5, 0.4], 1.0)
    with pytest.raises(ValueError, match="as many numbers as sensitivities"):
        release([1.0, 2.0], [1.0], 1.0)


def test_a_component_of_weight_zero_changes_nothing():
    one = np.ones(1)
    short = GaussianMixtureLoss(one, one, (one, 2 * one), (np.log(one / 2),) * 2)
    other = GaussianMixtureLoss(one, one, (one,), (0 * one,))
    both = GaussianMixtureLoss.stack([short, other])
    u = np.array([[0.1], [0.1]])
    for i, alone in enumerate((short, other)):
        (forward, _), (backward, _) = alone.log_tails(u[i])
        (first, _), (second, _) = both.log_tails(u)
        assert first[i] == pytest.approx(forward, rel=1e-14)
        assert second[i] == pytest.approx(backward, rel=1e-14)
