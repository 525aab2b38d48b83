"""Releases as parts of runs: values, dictionaries, composition, refusals."""

import numpy as np
import pytest

import jaxdp_episodic as jde

GAUSSIAN = jde.GaussianStep(
    jde.Poisson("example", sampling_probability=0.01), noise_multiplier=1.0
)
LAPLACE = jde.LaplaceRelease(2.0, sampling_probability=0.5)
RELEASES = [
    LAPLACE,
    jde.LaplaceRelease(np.array([1.0, 2.0]), neighboring_relation="replace_one"),
    jde.ApproximateDP(0.1, 1e-9),
    jde.ApproximateDP(np.array([0.1, np.inf])),
    jde.ZeroConcentratedDP(0.2),
    jde.ZeroConcentratedDP.of_gaussian([1.0, 2.0]),
]


@pytest.mark.parametrize("release", RELEASES, ids=range(len(RELEASES)))
def test_dictionaries_and_equality(release):
    again = type(release).from_dict(release.to_dict())
    assert again == release
    assert hash(again) == hash(release)
    run = jde.compose((release, 3), (release, 1))
    assert jde.ComposedSteps.from_dict(run.to_dict()) == run
    assert run.shape == release.shape


def test_runs_nest_and_repeat():
    inner = jde.compose((GAUSSIAN, 10), (LAPLACE, [1, 2]))
    run = jde.compose((inner, 3), (jde.ApproximateDP(0.1), 1), (inner, 2))
    flat = jde.compose(
        (GAUSSIAN, 30),
        (LAPLACE, [3, 6]),
        (jde.ApproximateDP(0.1), 1),
        (GAUSSIAN, 20),
        (LAPLACE, [2, 4]),
    )
    assert run == flat
    assert run.shape == (2,)
    deep = jde.compose((jde.compose((jde.compose((GAUSSIAN, 2)), 3)), 4))
    assert deep == jde.compose((GAUSSIAN, 24))
    assert jde.epsilon(deep, delta=1e-5) == jde.epsilon(
        GAUSSIAN, num_steps=24, delta=1e-5
    )
    with pytest.raises(ValueError, match="at most 2..53"):
        jde.compose((jde.compose((GAUSSIAN, 2**40)), 2**20))
    with pytest.raises(ValueError, match="count must be a whole number >= 0"):
        jde.compose((inner, -1))
    with pytest.raises(TypeError, match="compose must be .*a release .* got 3"):
        jde.compose((3, 1))  # pyright: ignore[reportArgumentType]: on purpose


def test_relations_must_agree():
    changed = jde.LaplaceRelease(2.0, neighboring_relation="replace_one")
    with pytest.raises(ValueError, match="same neighboring_relation"):
        jde.compose((GAUSSIAN, 1), (changed, 1))
    # A part without a relation takes that of the others.
    jde.compose((changed, 1), (jde.ApproximateDP(0.1), 1))
    jde.compose((GAUSSIAN, 1), (jde.ZeroConcentratedDP(0.1), 1))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: jde.LaplaceRelease(-1.0), ValueError, "noise_multiplier must be >= 0"),
        (
            lambda: jde.LaplaceRelease(1.0, sampling_probability=2.0),
            ValueError,
            r"sampling_probability must lie in \[0, 1\]",
        ),
        (
            lambda: jde.LaplaceRelease(
                np.ones(2), sampling_probability=np.full(3, 0.1)
            ),
            ValueError,
            "shapes do not broadcast",
        ),
        (lambda: jde.ApproximateDP(-0.1), ValueError, "epsilon must be >= 0"),
        (lambda: jde.ApproximateDP(0.1, 2.0), ValueError, "delta must lie in"),
        (lambda: jde.ZeroConcentratedDP(np.nan), ValueError, "rho must not be NaN"),
        (
            lambda: jde.ZeroConcentratedDP(0.1, is_gaussian=1),  # pyright: ignore[reportArgumentType]: on purpose
            TypeError,
            "is_gaussian must be true or false",
        ),
    ],
    ids=range(7),
)
def test_bad_values_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_questions_about_gaussian_steps_refuse_releases():
    run = jde.compose((GAUSSIAN, 10), (LAPLACE, 2))
    message = "covers runs of GaussianStep only, got a LaplaceRelease"
    with pytest.raises(NotImplementedError, match=message):
        jde.privacy_report(run, delta=1e-5)
    with pytest.raises(NotImplementedError, match=message):
        jde.privacy_report(LAPLACE, delta=1e-5, num_steps=3)
    with pytest.raises(NotImplementedError, match=message):
        jde.epsilon_and_gradient(run, delta=1e-5)
    with pytest.raises(TypeError, match="must be a GaussianStep or a LaplaceRelease"):
        jde.calibrate_noise_multiplier(
            jde.ApproximateDP(0.1),  # pyright: ignore[reportArgumentType]: on purpose
            epsilon=1.0,
            delta=1e-5,
            num_steps=3,
        )


def test_gaussian_noise_of_zero_and_infinity():
    of_gaussian = jde.ZeroConcentratedDP.of_gaussian
    np.testing.assert_array_equal(of_gaussian([0.0, np.inf]).rho, [np.inf, 0.0])
    for noise in (-1.0, np.nan):
        with pytest.raises(ValueError, match="noise_multiplier"):
            of_gaussian(noise)
