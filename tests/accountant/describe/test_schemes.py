"""Specs of the levels: validation, broadcasting, value semantics."""

import numpy as np
import pytest

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
        WithoutReplacement("pupil", size=8, population=8, population_is_exact=1)  # pyright: ignore[reportArgumentType] # the wrong type is the test


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
        Poisson(3, sampling_probability=0.1)  # pyright: ignore[reportArgumentType] # the wrong type is the test


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
        MultistageSampling(school, "pupil")  # pyright: ignore[reportArgumentType] # the wrong type is the test


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
