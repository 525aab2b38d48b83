"""Epoch schemes: valid descriptions, and the cost of shuffled epochs."""

import numpy as np
import pytest

import jaxdp_episodic as jde


def bins(**fields):
    return jde.RandomAllocation("task", **({"steps_per_epoch": 10} | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps_per_epoch": 0}, "steps_per_epoch must be a whole number >= 1"),
        ({"steps_per_epoch": 2.5}, "steps_per_epoch must be a whole number"),
        ({"times": 0}, "times must be a whole number >= 1"),
        ({"times": 11}, "times must be at most steps_per_epoch, got times=11"),
        ({"steps_per_epoch": [3, 4], "times": [1, 2, 3]}, "broadcast"),
    ],
)
def test_bad_numbers_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        bins(**fields)


@pytest.mark.parametrize("scheme", [bins(), jde.ShuffledEpochs("t", steps_per_epoch=3)])
def test_designs_without_a_theorem_are_refused_by_name(scheme):
    above = jde.Poisson("school", sampling_probability=0.1)
    below = jde.WithoutReplacement("pupil", size=2, population=5)
    grouped = {"num_classes": 20, "ways": 5}
    name = type(scheme).__name__
    for make in (
        lambda: jde.MultistageSampling(above, scheme),
        lambda: jde.IndependentEpisodes(scheme, num_episodes=2),
        lambda: jde.GaussianStep(scheme, noise_multiplier=1.0, clip_unit="step"),
        lambda: jde.GaussianStep(
            jde.MultistageSampling(scheme, below),
            noise_multiplier=1.0,
            clip_unit="pupil",
        ),
        lambda: jde.GroupedClasses(
            **grouped,
            classes=type(scheme)("class", steps_per_epoch=3),
            examples=jde.WithoutReplacement("example", size=2, population=5),
        ),
    ):
        with pytest.raises(NotImplementedError, match=f"{name} has no theorem there"):
            make()


def test_a_run_that_ends_within_an_epoch_cannot_be_repeated():
    step = jde.GaussianStep(bins(), noise_multiplier=1.0)
    assert jde.compose((jde.compose((step, 20)), 3)).counts == (60,)
    assert jde.compose((jde.compose((step, 25)), 1)).counts == (25,)
    with pytest.raises(NotImplementedError, match="part of epoch 'task'"):
        jde.compose((jde.compose((step, 25)), 2))


def test_specs_round_trip_through_dictionaries():
    drawn = jde.GroupedClasses(
        num_classes=100,
        ways=5,
        episodes=jde.RandomAllocation("episode", steps_per_epoch=[10, 20], times=2),
        examples=jde.WithoutReplacement("example", size=4, population=20),
    )
    step = jde.GaussianStep(drawn, noise_multiplier=1.0)
    assert jde.GaussianStep.from_dict(step.to_dict()) == step
    # One step of five, then one of ten; four of twenty examples.
    np.testing.assert_allclose(jde.inclusion_rates(drawn), [0.04, 0.02], rtol=1e-15)


@pytest.mark.parametrize(
    ("relation", "moved"),
    [("add_remove", 5**0.5), ("replace_one", 2.0), ("zero_out", 1.0)],
)
def test_shuffled_epochs_cost_the_gaussian_mechanism(relation, moved):
    drawn = jde.ShuffledEpochs("task", steps_per_epoch=10)
    step = jde.GaussianStep(drawn, noise_multiplier=2.0, neighboring_relation=relation)
    always = jde.Poisson("task", sampling_probability=1.0)
    same = jde.GaussianStep(always, noise_multiplier=2.0 / moved)
    for num_steps, epochs in ((1, 1), (10, 1), (11, 2), (30, 3)):
        ours = jde.epsilon(step, delta=1e-6, num_steps=num_steps)
        plain = jde.epsilon(same, delta=1e-6, num_steps=epochs)
        assert ours == pytest.approx(plain, rel=1e-9)
    target = {"epsilon": 3.0, "delta": 1e-6, "method": "rdp"}
    noise = jde.calibrate_noise_multiplier(step, num_steps=25, **target)
    plain = jde.calibrate_noise_multiplier(same, num_steps=3, **target)
    assert noise == pytest.approx(moved * plain, rel=1e-6)
    target["epsilon"] = 1e-6 + float(
        jde.epsilon(step, delta=1e-6, num_steps=20, method="rdp")
    )
    assert jde.calibrate_num_steps(step, **target) == 20


def test_shuffled_episodes_are_swapped_with_the_rate_below():
    below = jde.WithoutReplacement("pupil", size=2, population=10)
    drawn = jde.MultistageSampling(jde.ShuffledEpochs("t", steps_per_epoch=4), below)
    step = jde.GaussianStep(drawn, noise_multiplier=2.0, clip_unit="t")
    once = jde.WithoutReplacement("t", size=1, population=5)
    same = jde.GaussianStep(
        once, noise_multiplier=2.0, neighboring_relation="replace_one"
    )
    ours = jde.epsilon(step, delta=1e-6, num_steps=12)
    assert ours == pytest.approx(jde.epsilon(same, delta=1e-6, num_steps=3), rel=1e-9)
