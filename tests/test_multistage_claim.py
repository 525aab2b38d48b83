"""The multistage theorem: its rate, its condition, its sound form.

Enumerated trees check `GaussianStep` (tests/accountant/questions/test_soundness.py);
here the sound form equals that step where both exist.
"""

import numpy as np
import pytest
from local_dp import central_sum_error, local_sum_error, simulate_sums
from tombs_multistage import multistage_delta, multistage_rates, tombs_multistage

import jaxdp_episodic as jde
from jaxdp_episodic.bounds import Gaussian, delta_poisson_subsampled

# The tree of the paper's Example 3.1: 2 primary units, 3 and 2 secondary ones.
EXAMPLE = [[4, 2, 3], [4, 5]]


def sampling(**stages):
    return jde.MultistageSampling(
        *(
            jde.WithoutReplacement(name, size=n, population=total)
            for name, (n, total) in stages.items()
        )
    )


COUNTEREXAMPLE = sampling(task=(1, 10), example=(20, 40))


def test_rates_of_the_papers_example():
    draw = jde.MultistageSampling(
        *(jde.WithoutReplacement(n, size=1) for n in ("task", "class", "example"))
    )
    tree = jde.Population.from_sizes(EXAMPLE)
    rates = multistage_rates(draw, clip_unit="task", population=tree)
    expected = {1 / 24, 1 / 12, 1 / 18, 1 / 16, 1 / 20}
    assert set(np.round(rates.inner, 12)) == set(np.round(list(expected), 12))
    assert np.all(rates.outer == 1)
    # The printed denominator lacks the two primary units: 1/6 for the unit of two.
    assert rates.inner.max() == pytest.approx(1 / 12)


def test_what_the_theorem_does_not_cover_is_refused():
    with pytest.raises(NotImplementedError) as error:
        tombs_multistage(
            Gaussian(1.0), sampling=COUNTEREXAMPLE, clip_unit="example", epsilon=0.5
        )
    for word in ("'task'", "other members", "multistage_delta", "GaussianStep"):
        assert word in str(error.value)
    draw = jde.MultistageSampling(
        jde.Poisson("task", sampling_probability=0.1),
        jde.WithoutReplacement("example", size=2, population=20),
    )
    with pytest.raises(NotImplementedError, match="Poisson"):
        tombs_multistage(Gaussian(1.0), sampling=draw, clip_unit="task", epsilon=1.0)


def test_counterexample_figures():
    """The claimed product is a thirtieth of the truth."""
    gaussian, eps = Gaussian(1.0), 0.5
    product = delta_poisson_subsampled(gaussian, sampling_probability=0.05, epsilon=eps)
    assert product == pytest.approx(2.19e-4, rel=5e-3)
    sound = multistage_delta(
        gaussian, sampling=COUNTEREXAMPLE, clip_unit="example", epsilon=eps
    )
    assert sound == pytest.approx(7.994e-3, rel=1e-3)
    step = jde.GaussianStep(
        COUNTEREXAMPLE,
        noise_multiplier=2.0,
        clip_unit="example",
        neighboring_relation="replace_one",
    )
    assert jde.privacy_profile(step, epsilon=eps) == pytest.approx(sound, rel=1e-9)


def test_equal_where_the_theorem_holds():
    stages = {"class": (3, 5), "example": (4, 20)}
    draw = sampling(task=(2, 10), **stages)
    for unit in ("task", "step"):
        arguments = {"sampling": draw, "clip_unit": unit, "epsilon": np.array([0.1, 1])}
        one = tombs_multistage(Gaussian(1.0), **arguments)
        assert np.array_equal(one, multistage_delta(Gaussian(1.0), **arguments))
        expected = delta_poisson_subsampled(
            Gaussian(1.0), sampling_probability=0.024, epsilon=np.array([0.1, 1])
        )
        np.testing.assert_allclose(one, expected, rtol=1e-12)
    # If all tasks are drawn, clipping below them is covered too.
    everything = sampling(task=(10, 10), **stages)
    value = tombs_multistage(
        Gaussian(1.0), sampling=everything, clip_unit="class", epsilon=0.5
    )
    assert value > 0


# --- Counting ones in three models: errors against simulation ---


@pytest.mark.parametrize("model", ["central", "local"])
def test_errors_by_simulation(model):
    """Mean within 5 standard errors, spread within 15 % (false alarms below 1e-6)."""
    n, epsilon, trials = 10_000, 2.0, 4_000
    asked = {"num_users": n, "epsilon": epsilon, "model": model}
    sums = simulate_sums(num_ones=n // 3, num_trials=trials, seed=7, **asked)
    local = local_sum_error(epsilon, num_users=n)
    expected = central_sum_error(epsilon) if model == "central" else local
    assert abs(sums.mean() - n // 3) < 5 * expected / np.sqrt(trials)
    assert sums.std() == pytest.approx(expected, rel=0.15)
    assert local_sum_error(0.0, num_users=5) == central_sum_error(0.0) == np.inf
