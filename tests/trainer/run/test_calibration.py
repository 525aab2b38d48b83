"""Temperatures of a release: fitted where they may be, and only then probabilities."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from jaxdp_episodic.trainer.learners.learners import ABSENT
from jaxdp_episodic.trainer.run.evaluation import (
    Calibration,
    Evaluation,
    Reliability,
    calibrated,
    calibration_of,
    reliability,
)
from jaxdp_episodic.trainer.run.release import calibration_for, described_release
from training_runs import classes, plain_trainer

CLASSES = SimpleNamespace(is_regression=False)


def evaluation_of(temperatures, num_queries=20_000, shots=1, ways=5):
    """An evaluation whose targets follow softmax(logits / temperature) exactly."""

    def logits(learner, params):
        rng = np.random.default_rng(int(10 * temperatures[shots]))
        found = rng.normal(size=(num_queries, ways)) * 3 * temperatures[shots]
        p = np.exp(found / temperatures[shots])
        p /= p.sum(axis=1, keepdims=True)
        targets = (p.cumsum(axis=1) < rng.random((num_queries, 1))).sum(axis=1)
        return found, targets

    return SimpleNamespace(
        ways=ways,
        shots=shots,
        queries=5,
        data=SimpleNamespace(
            population=SimpleNamespace(children_counts=(np.full(7, 8),))
        ),
        logits=logits,
        with_shots=lambda shots, _: evaluation_of(temperatures, shots=shots),
    )


def test_the_temperature_that_made_the_answers_is_found():
    truth = {1: 0.25, 2: 2.0, 4: 0.1, 8: 0.1}
    asked = evaluation_of(truth)
    found = calibrated(asked, CLASSES, {})
    assert found.ways == 5 and found.shots == (1, 2)  # 5 of the 8 are queries
    np.testing.assert_allclose(found.temperatures, (0.25, 2.0), rtol=0.05)
    assert reliability(asked, CLASSES, {}, found.temperature(1)).error < 0.015
    assert reliability(asked, CLASSES, {}, 1.0).error > 0.2
    assert calibrated(asked, SimpleNamespace(is_regression=True), {}) is None
    asked.with_shots = lambda *_: SimpleNamespace(
        logits=lambda *_: (np.full((3, 5), np.nan), np.zeros(3, int))
    )
    assert calibrated(asked, CLASSES, {}) is None


@pytest.mark.parametrize("is_empty", [False, True])
def test_answers_that_are_all_right_have_no_temperature_of_zero(is_empty):
    targets = np.arange(40) % 2
    logits = np.eye(3)[targets] + np.where(np.arange(3) == 2, ABSENT * is_empty, 0.0)
    asked = evaluation_of({1: 1.0})
    asked.with_shots = lambda *_: SimpleNamespace(logits=lambda *_: (logits, targets))
    found = calibrated(asked, CLASSES, {}).temperatures[0]
    assert 0.1 < found < 0.5  # as if one query in 42 had any class


def test_shots_between_are_interpolated_and_few_others_are_covered():
    found = Calibration(5, (1, 4), (0.4, 0.1))
    assert found.temperature(2) == pytest.approx(0.2)
    assert found.temperature(9) == found.temperature(4) == pytest.approx(0.1)
    covered = {(5, 1), (10, 4), (2, 1.5)}
    others = {(11, 1), (5, 0.5), (5, 5)}
    assert {one for one in covered | others if found.covers(*one)} == covered
    assert str(found) == "episodes of 5 classes with 1 to 4 labelled examples of each"


def test_the_error_is_the_mean_gap():
    assert Reliability((0.5, 0.9), (0.7, 0.8), (1, 3)).error == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ways": 0}, "calibration.ways"),
        ({"shots": [2, 1]}, "calibration.shots must increase"),
        ({"shots": [1]}, "one temperature for each of its shots"),
        ({"shots": "12"}, "one temperature for each of its shots"),
        ({"shots": [1, 2.5]}, "calibration.shots"),
        ({"temperatures": [1.0, 0.0]}, "calibration.temperatures"),
        ({"temperatures": [1.0, "x"]}, "calibration.temperatures"),
    ],
)
def test_what_a_file_states_is_checked(changes, match):
    told = {"ways": 5, "shots": [1, 2], "temperatures": [1.0, 0.5]}
    assert calibration_of(told) == Calibration(5, (1, 2), (1.0, 0.5))
    with pytest.raises((TypeError, ValueError), match=match):
        calibration_of(told | changes)


@pytest.mark.parametrize(
    ("select", "split", "is_calibrated"),
    [(True, "validation", True), (False, "validation", False), (True, "test", False)],
)
def test_only_the_part_that_chose_sets_a_temperature(
    tmp_path, select, split, is_calibrated
):
    """A part that may be private, or is for testing, sets none."""
    run = plain_trainer(num_steps=1)
    held_out = Evaluation(classes(seed=9), ways=3, shots=1, queries=2, num_episodes=20)
    run.train(tmp_path, evaluations={split: held_out}, select=select)
    told = json.loads(json.dumps(described_release(run)))["calibration"]
    assert (told is not None) == is_calibrated == bool(run.selection.reliability)
    words = run.selection.words
    assert ("temperatures of probabilities fit" in words) == is_calibrated
    if is_calibrated:
        assert calibration_of(told) == run.selection.calibration
        assert list(run.selection.reliability) == ["validation"]
        run.selection = run.selection._replace(step=0)  # steps were taken since
        assert calibration_for(run) is None
