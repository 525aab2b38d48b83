"""Specs of the levels: validation, broadcasting, value semantics."""

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.describe.population import Population
from jaxdp_episodic.accountant.describe.schemes import (
    MultistageSampling,
    Poisson,
    WithoutReplacement,
)


def test_fields_become_plain_numbers_or_read_only_arrays():
    scheme = WithoutReplacement("pupil", size=np.float32(8), population=[40, 50])
    assert type(scheme.size) is int and scheme.size == 8
    assert isinstance(scheme.population, np.ndarray)
    assert scheme.population.dtype == np.int64
    assert not scheme.population.flags.writeable
    probability = Poisson("school", sampling_probability=1).sampling_probability
    assert type(probability) is float


def test_the_callers_array_is_copied():
    mine = np.array([0.1, 0.2])
    scheme = Poisson("school", sampling_probability=mine)
    mine[0] = 0.9
    assert scheme == Poisson("school", sampling_probability=[0.1, 0.2])
    assert mine.flags.writeable


@pytest.mark.parametrize("bad", [True, "0.5", None, [0.1, True], 1j, {}, [[1], [1, 2]]])
def test_a_probability_of_the_wrong_type_is_a_type_error(bad):
    with pytest.raises(TypeError, match="sampling_probability"):
        Poisson("school", sampling_probability=bad)


@pytest.mark.parametrize("bad", [-0.1, 1.3, np.nan, np.inf, [0.5, np.nan]])
def test_a_probability_out_of_range_is_a_value_error(bad):
    with pytest.raises(ValueError, match="sampling_probability"):
        Poisson("school", sampling_probability=bad)


@pytest.mark.parametrize("field", ["size", "population"])
@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (True, TypeError),
        ("8", TypeError),
        (10**30, ValueError),
        (0, ValueError),
        (-3, ValueError),
        (2.5, ValueError),
        (np.nan, ValueError),
        (np.inf, ValueError),
        (2.0**60, ValueError),
        ([8, 0], ValueError),
    ],
)
def test_whole_numbers_are_checked(field, bad, error):
    fields = {"size": 8, "population": 40, field: bad}
    with pytest.raises(error, match=field):
        WithoutReplacement("pupil", **fields)


@pytest.mark.parametrize("bad", [0, 1.5, "x", True])
def test_poisson_population_is_a_whole_number(bad):
    with pytest.raises((TypeError, ValueError), match="population"):
        Poisson("school", sampling_probability=0.1, population=bad)


def test_an_exact_population_must_be_given():
    with pytest.raises(ValueError, match="population_is_exact=True needs"):
        WithoutReplacement("pupil", size=8, population_is_exact=True)
    with pytest.raises(TypeError, match="population_is_exact"):
        WithoutReplacement("pupil", size=8, population=8, population_is_exact=1)


@pytest.mark.parametrize("name", ["step", "person", "original", "", "x" * 5000])
def test_reserved_and_overlong_names_are_refused(name):
    with pytest.raises(ValueError, match="^name must.{,200}$"):
        Poisson(name, sampling_probability=0.1)
    with pytest.raises(ValueError, match="^name must.{,200}$"):
        WithoutReplacement(name, size=1, population=2)
    with pytest.raises(ValueError, match="^each of level_names must.{,200}$"):
        Population.from_sizes([[1]], level_names=(name,))


def test_a_name_must_be_a_string():
    with pytest.raises(TypeError, match="name must be a string, got 3"):
        Poisson(3, sampling_probability=0.1)


def test_fields_of_one_scheme_broadcast():
    scheme = WithoutReplacement("pupil", size=[[1], [2]], population=[10, 20, 30])
    assert scheme.shape == (2, 3)
    with pytest.raises(ValueError, match=r"size: \(2,\), population: \(3,\)"):
        WithoutReplacement("pupil", size=[1, 2], population=[10, 20, 30])


def test_multistage_shape_and_names():
    sampling = MultistageSampling(
        Poisson("school", sampling_probability=np.full((500, 1), 0.05)),
        WithoutReplacement("pupil", size=[2, 4, 8], population=40),
    )
    assert sampling.level_names == ("school", "pupil")
    assert sampling.shape == (500, 3)
    assert len(sampling.levels) == 2


def test_levels_that_do_not_broadcast_are_named():
    school = Poisson("school", sampling_probability=[0.1, 0.2])
    pupil = WithoutReplacement("pupil", size=[1, 2, 3], population=40)
    with pytest.raises(ValueError, match=r"levels\[0\].*\(2,\), levels\[1\].size"):
        MultistageSampling(school, pupil)


def test_multistage_refuses_wrong_levels():
    school = Poisson("school", sampling_probability=0.1)
    with pytest.raises(ValueError, match="at least one level"):
        MultistageSampling()
    with pytest.raises(ValueError, match="'school' twice"):
        MultistageSampling(school, school)
    with pytest.raises(TypeError, match="level 2 must be a Poisson"):
        MultistageSampling(school, "pupil")


def test_specs_compare_and_hash_by_value():
    def make(probability):
        return MultistageSampling(
            Poisson("school", sampling_probability=probability),
            WithoutReplacement("pupil", size=8, population=40),
        )

    assert make([0.1, 0.0]) == make(np.array([0.1, -0.0]))
    assert hash(make([0.1, 0.0])) == hash(make(np.array([0.1, -0.0])))
    assert make(0.1) == make(np.array(0.1))
    assert make(0.1) != make([0.1])
    assert make([0.1, 0.2]) != make([[0.1, 0.2]])
    assert make(0.1) != make(0.2)
    assert make(0.1) != make(0.1).levels[0]
    assert len({make(0.1), make(0.1), make(0.2)}) == 2


# --- Epochs ---


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
