"""A batch of runs that adapt, answered in processes of its own."""

import sys

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions import adaptive, adaptive_settings

NOISES = np.array([1.5, 1.6, 1.8, 2.0])


def batch(noise=NOISES, budget=12):
    draw = jde.Poisson("example", sampling_probability=0.1)
    options = {
        "slow": jde.GaussianStep(draw, noise_multiplier=noise),
        "fast": jde.GaussianStep(draw, noise_multiplier=3.0),
    }
    return jde.AdaptiveRun(options, prices={"slow": 5, "fast": 2}, budget=budget)


@pytest.fixture
def solved(monkeypatch):
    """Batches go to two processes, however small; what this one solves is noted."""
    here, ends = [], adaptive.ends

    def noted(question, game, **how):
        here.append(question)
        return ends(question, game, **how)

    monkeypatch.setattr(adaptive, "ends", noted)
    monkeypatch.setattr(adaptive_settings, "_WORTH_PROCESSES", 0.0)
    monkeypatch.setattr(adaptive_settings, "num_cores", lambda: 2)
    return here


@pytest.fixture(scope="module")
def own():
    """Both ends of epsilon of each run by itself."""
    each = [batch(float(noise)).epsilon_interval(delta=1e-5) for noise in NOISES]
    return np.array(each).T


@pytest.mark.slow
def test_processes_answer_as_this_one_would(solved, own, monkeypatch):
    run, made, asked = batch(), [], adaptive_settings._run
    monkeypatch.setattr(
        adaptive_settings, "_run", lambda *one: made.append(one) or asked(*one)
    )
    np.testing.assert_array_equal(run.epsilon_interval(delta=1e-5), own)
    assert len(solved) == 1  # the first setting, which says how long each takes
    assert len(made) == 2
    np.testing.assert_array_equal(run.epsilon_interval(delta=1e-5), own)
    np.testing.assert_array_equal(run.epsilon(delta=1e-5), own[1])
    assert len(solved) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("left", [b"", b"no answer", b"\x80\x04"])
def test_what_ended_processes_leave_is_answered_here(solved, own, monkeypatch, left):
    monkeypatch.setattr(adaptive_settings, "_run", lambda *_: left)
    np.testing.assert_array_equal(batch().epsilon_interval(delta=1e-5), own)
    assert len(solved) == len(NOISES)


def test_without_an_interpreter_all_is_answered_here(solved, own, monkeypatch):
    monkeypatch.setattr(sys, "executable", None)
    np.testing.assert_array_equal(batch().epsilon_interval(delta=1e-5), own)
    assert len(solved) == len(NOISES)


@pytest.mark.slow
def test_warnings_of_processes_are_given_on(solved):
    # The second loses a million nats, of which no window is laid.
    rates, noises = np.array([0.1, 1e-3]), np.array([1.5, 1e-3])
    wide = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=rates), noise_multiplier=noises
    )
    other = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=0.1), noise_multiplier=1.5
    )
    run = jde.AdaptiveRun({"a": wide, "b": other}, prices={"a": 1, "b": 1}, budget=2)
    with pytest.warns(UserWarning, match="worst strategy's .* between its ends"):
        run.epsilon(delta=1e-5)
    assert len(solved) == 1
