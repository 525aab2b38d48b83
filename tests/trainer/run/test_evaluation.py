"""Scores on held-out tasks, and the coverage of their intervals."""

import dataclasses
import functools
import json
import shutil
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest

import jaxdp_episodic as jde
from image_files import image_folders
from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.data.built_in import make_sinusoids
from jaxdp_episodic.trainer.data.sources import ClassFolders
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.generators import Keys
from jaxdp_episodic.trainer.learners.learners import ABSENT, ProtoNet
from jaxdp_episodic.trainer.run.assemble import Tables
from jaxdp_episodic.trainer.run.evaluation import (
    GRID,
    Calibration,
    EpisodeScores,
    Evaluation,
    PrivateValidation,
    Reliability,
    Score,
    calibrated,
    calibration_of,
    reliability,
)
from jaxdp_episodic.trainer.run.release import described_release
from jaxdp_episodic.trainer.statistics.statistics import Started
from jaxdp_episodic.training import Episode, TrainingConfig
from training_runs import (
    CHECK,
    SHOTS,
    TINY,
    classes,
    held_out,
    plain_trainer,
    protonet,
    score_on,
    sinusoid_learner,
    tree_step,
)


class Oracle:
    """A learner whose predictions a test chooses."""

    def __init__(self, predict, is_regression=False):
        self._predict, self.is_regression = predict, is_regression

    def predict(self, params, episode: Episode):
        del params
        return self._predict(episode)


def test_scores_of_a_perfect_and_of_a_blind_learner():
    data, how = classes(num_classes=12, examples=8), {"ways": 4, "shots": 1}
    evaluation = Evaluation(data, **how, queries=3, num_episodes=120)

    def exact(e):
        is_right = e.query_targets[:, None] == np.arange(4, dtype=np.int32)
        return is_right.astype(np.float32)

    def always_first(e):
        return exact(e) * 0 + np.eye(4, dtype=np.float32)[0]

    assert evaluation(Oracle(exact), {}) == Score("accuracy", 1.0, 1.0, 1.0, 120)
    assert evaluation(Oracle(always_first), {}).mean == 0.25
    # One class has a single query: slots without an example are no hits.
    few = Evaluation(data.take(np.arange(6, 96)), **how, queries=3, num_episodes=120)
    assert few(Oracle(exact), {}).mean == 1.0


def test_episodes_are_fixed_by_the_seed():
    data, (learner, params) = classes(num_classes=12, examples=8), protonet()
    arguments = {"ways": 3, "shots": 1, "queries": 3, "num_episodes": 60}
    score = Evaluation(data, **arguments)(learner, params)
    assert score == Evaluation(data, **arguments)(learner, params)
    assert score.mean != Evaluation(data, seed=1, **arguments)(learner, params).mean


def test_prototypes_can_be_scored_with_more_ways():
    data = classes(num_classes=12, examples=8)
    learner = ProtoNet(lambda _, inputs: inputs, ways=3)
    many = ProtoNet(learner.apply, ways=10)
    evaluation = Evaluation(data, ways=10, shots=2, queries=3, num_episodes=20)
    expected = evaluation(Oracle(lambda e: many.predict({}, e)), {})
    assert evaluation(learner, {}) == expected
    assert expected.mean > 0.3  # better than guessing
    # Behind a projection that is the identity on unit rows.
    start = {"mean": np.zeros(2, np.float32), "projection": np.eye(2, dtype=np.float32)}
    length = np.linalg.norm(data.features, axis=1, keepdims=True)
    on_circle = Evaluation(
        data.with_features(data.features / length),
        ways=10,
        shots=2,
        queries=3,
        num_episodes=20,
    )
    found = evaluation(Started(learner), {"start": start, "model": {}})
    assert found.mean == pytest.approx(on_circle(many, {}).mean)


def test_rmse_is_over_all_queries():
    data = make_sinusoids(30, points=10, seed=3)
    evaluation = Evaluation(data, ways=None, shots=4, queries=6, num_episodes=400)
    zero = Oracle(lambda e: 0 * e.query_targets, is_regression=True)
    score = evaluation(zero, {})
    assert score.name == "rmse"
    assert score.low < np.sqrt(np.mean(np.square(data.targets))) < score.high
    learner, params = sinusoid_learner()
    assert np.isfinite(evaluation(learner, params).mean)


@pytest.mark.slow
def test_the_interval_covers_the_mean_nineteen_times_in_twenty():
    """300 seeds; outside [0.9, 0.99] with probability below 1e-4."""
    data = classes(num_classes=12, examples=8)
    learner, params = protonet()
    arguments = {"ways": 3, "shots": 1, "queries": 2}
    truth = Evaluation(data, num_episodes=20_000, seed=99, **arguments)(learner, params)
    covered = 0
    for seed in range(300):
        s = Evaluation(data, num_episodes=100, seed=seed, **arguments)(learner, params)
        covered += s.low <= truth.mean <= s.high
    assert 0.9 * 300 <= covered <= 0.99 * 300


def test_an_empty_class_is_not_taken_for_another():
    """Its slots hold example 0, whose class must not be taken for it."""
    rows, names = np.repeat(np.arange(1, 6), 8), np.arange(10)
    data = ExampleTable.from_records(
        np.float32([rows, rows**2]).T,
        units={"class": rows},
        public_units=names.tolist(),
    )
    evaluation = Evaluation(data, ways=4, shots=1, queries=3, num_episodes=60)
    scores = evaluation.episodes(*protonet())
    assert set(np.unique(scores.groups)) == {-1, 1, 2, 3, 4, 5}
    np.testing.assert_array_equal(scores.groups < 0, scores.weights == 0)
    # Padding by empty classes does not change the score's error.
    sums = scores.weights * np.isin(scores.groups, (1, 2))
    bare = scores._replace(sums=0 * sums)
    padding = [
        np.pad(a, ((0, 0), (0, 2)), constant_values=v)
        for a, v in ((sums, 0), (scores.weights, 0), (scores.groups, -1))
    ]
    padded = EpisodeScores(*padding, False)
    expected = scores._replace(sums=sums).ahead_of(bare)
    assert padded.ahead_of(padded._replace(sums=0 * padding[0])) == pytest.approx(
        expected
    )
    # Two classes, both in every episode: there are no other classes.
    same = np.array([[3, -1, 7]] * 4)
    assert not scores._replace(groups=same).has_other_classes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ways": 13}, "ways must be at most 12, the number"),
        ({"ways": [2, 3]}, "ways must be one number"),
        ({"seed": -1}, "seed=-1: expected non-negative"),
        ({"num_episodes": 1}, "num_episodes must be a whole number >= 2"),
        ({"ways": None}, "data must have targets for regression"),
    ],
)
def test_bad_input(changes, message):
    arguments = {"ways": 3, "shots": 1, "queries": 2, **changes}
    with pytest.raises(ValueError, match=message):
        Evaluation(classes(num_classes=12), **arguments)


# --- Held-out data are not training data ---


@pytest.fixture
def tables():
    """The tables of a run with this source."""
    table = {"type": "TrainingConfig", **tomllib.loads(TINY)}
    config = TrainingConfig.from_dict(table)
    return lambda data: Tables(dataclasses.replace(config, data=data), None)


def drawn(folder, names, seed):
    return str(image_folders(folder, dict.fromkeys(names, 3), (8, 8), seed))


def test_the_training_folder_cannot_be_held_out(tmp_path, tables, capsys):
    trained = drawn(tmp_path / "trained", "abc", 0)
    link = tmp_path / "link"
    link.symlink_to(trained)
    for same in (trained, f"{trained}/.", str(link)):
        with pytest.raises(ValueError, match="test must be other data than path"):
            tables(ClassFolders(path=trained, test=same)).load("test")
        command = ["data", "import", trained, str(tmp_path / "out"), "--test"]
        assert cli.run([*command, same]) == 2
        assert "test must be other data than path" in capsys.readouterr().err
    other = drawn(tmp_path / "other", "de", 1)
    both = tables(ClassFolders(path=trained, validation=other, test=f"{other}/."))
    with pytest.raises(ValueError, match="test must be other data than validation"):
        both.load("validation")
    copy = shutil.copytree(trained, tmp_path / "copy")
    with pytest.raises(ValueError, match="must be other data .* the same units"):
        tables(ClassFolders(path=trained, test=str(copy))).load("test")


def test_units_shared_with_the_training_data_are_reported(tmp_path, tables):
    trained = drawn(tmp_path / "trained", "abc", 0)
    others = tables(ClassFolders(path=trained, test=drawn(tmp_path / "o", "de", 1)))
    assert others.load("test").num_examples == 6  # without a warning
    named = drawn(tmp_path / "named", "cde", 2)
    with pytest.warns(UserWarning, match="1 of its 3 class names .* such as 'c'"):
        tables(ClassFolders(path=trained, test=named)).load("test")
    copied = drawn(tmp_path / "copied", "xy", 3)
    shutil.copy(tmp_path / "trained" / "a" / "0.png", f"{copied}/x/1.png")
    found = tables(ClassFolders(path=trained, test=copied))
    with pytest.warns(UserWarning, match="1 of its 6 examples .* such as 1"):
        found.load("test")
    found.load("test")  # warned once


# --- Noisy validation: sensitivity and charge ---

EVERYBODY = dataclasses.replace(
    CHECK, noise_multiplier=0.0, neighboring_relation="zero_out"
)


def validation(step=EVERYBODY, data=None, **changes):
    data = classes(num_classes=12, seed=5) if data is None else data
    return score_on(data, step, **changes)


def released(one, number=1, seed=3, params=None):
    learner, initial = protonet()
    return one.release(
        learner, initial if params is None else params, Keys(seed), number
    )


def test_without_noise_validation_is_the_mean_score():
    one = validation()
    value = one.score(released(one)).value
    assert 0.5 < value <= 1  # well separated clusters
    # Twelve classes make four episodes of 15 queries: the score is a sixtieth.
    assert value * 60 == pytest.approx(round(value * 60), abs=60 / GRID)
    assert one.deviation == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("noise", ["discrete", "gaussian"])
def test_validation_has_the_noise_of_its_step(noise):
    step = dataclasses.replace(EVERYBODY, noise_multiplier=3.0)
    quiet, one = validation(fixed=True), validation(step, fixed=True, noise=noise)
    score = released(quiet)  # of all units, with fixed episodes
    assert all(released(quiet, n) == score for n in (2, 300))
    found = [float(released(one, n) - score) for n in range(1, 301)]
    assert one.deviation == 3.0 / 8
    # 300 scores: within 16 %; false alarms: 1e-4.
    assert np.std(found) / 2 == pytest.approx(one.deviation, rel=0.16)
    # Fresh without a seed: the same release of another run has other noise.
    fresh = [float(released(one, seed=None) - score) for _ in range(3)]
    assert len(set(found)) == 300 and len({found[0], *fresh}) == 4
    first, second = (validation()._draw(Keys(None), n) for n in (1, 2))  # not fixed
    assert not np.array_equal(first.examples, second.examples)


def test_one_unit_changes_the_score_by_at_most_the_sensitivity():
    """Each class is emptied in turn: at most one episode changes."""
    data = classes(num_classes=12, seed=5)
    most = 0.0
    for row in range(0, 72, 5):
        rows = np.delete(np.arange(72), row)
        fewer = ExampleTable.from_records(
            data.features[rows], units={"class": np.repeat(np.arange(12), 6)[rows]}
        )
        both = [
            released(validation(data=table, fixed=True)) * 4  # the normalizer
            for table in (data, fewer)
        ]
        most = max(most, abs(float(both[0] - both[1])))
    assert 0 < most <= 1


def test_padding_and_nulls_contribute_nothing():
    """An episode with an empty slot contributes 0, not the score of a guess."""
    learner, params = protonet()
    data = classes(num_classes=12, examples=5, seed=5)  # with an empty slot each
    one = validation(data=data)
    assert released(one) == 0
    draw = one._draw(Keys(1), 1)
    assert draw.holds_null is not None and draw.holds_null.all()
    whole = validation(data=classes(num_classes=12, seed=5))
    draw = whole._draw(Keys(1), 1)
    found = whole._contributions(learner, params, draw)
    assert len(found) == 50 and not found[4:].any()  # a block with four episodes


def test_a_nan_score_contributes_the_middle_of_its_range():
    learner, params = protonet()
    data = dataclasses.replace(
        classes(num_classes=12, seed=5), targets=np.zeros(72, np.float32)
    )
    step = tree_step(
        "class",
        {"class": 1.0, "example": (6, 6)},
        noise_multiplier=0.0,
        privacy_unit="example",
        neighboring_relation="zero_out",
    )
    one = PrivateValidation(data, step, shots=2, error_bound=4.0)

    @dataclasses.dataclass(frozen=True)
    class Broken:
        value: float
        is_regression = True

        def predict(self, params, episode):
            return 0 * episode.query_targets + self.value

    def score(value):
        return one.score(one.release(Broken(value), params, Keys(1), 1)).value

    assert score(np.nan) == 0.5  # the middle of the range
    assert score(0.0) == 1 and score(1.0) == pytest.approx(0.75, abs=1e-4)
    assert score(1e9) == 0 and score(np.inf) == 0.5  # cut at the bound, or no number


HALF = dataclasses.replace(
    EVERYBODY.design, examples=jde.WithoutReplacement("example", size=3, population=6)
)
BY_EXAMPLE = dataclasses.replace(EVERYBODY, sampling=HALF)
IN_EPOCHS = dataclasses.replace(
    EVERYBODY.design, episodes=jde.RandomAllocation("episode", steps_per_epoch=4)
)
TOGETHER = tree_step("class", {"class": 1.0, "example": 1.0}, privacy_unit="example")


added = functools.partial(dataclasses.replace, neighboring_relation="add_remove")


@pytest.mark.parametrize(
    ("step", "changes", "message"),
    [
        (BY_EXAMPLE, {"fixed": True}, "fixed must be False"),
        (
            dataclasses.replace(
                BY_EXAMPLE, privacy_unit="class", neighboring_relation="add_remove"
            ),
            {"fixed": True},
            "fixed must be False",
        ),
        (added(EVERYBODY, sampling=IN_EPOCHS), {}, "epoch"),
        (TOGETHER, {}, "clip_unit must be one episode"),
        (EVERYBODY, {"error_bound": 1.0}, "targets with error_bound"),
        (EVERYBODY, {"shots": 6}, "more examples .* than shots=6"),
    ],
)
def test_invalid_validations_are_refused(step, changes, message):
    how = {"shots": SHOTS, **changes}
    with pytest.raises((ValueError, NotImplementedError), match=message):
        PrivateValidation(classes(num_classes=12), step, **how)
    with pytest.raises(ValueError, match="error_bound must be given"):
        validation().check_learner(SimpleNamespace(is_regression=True))


# --- Temperatures of a release: probabilities need a fitted one ---

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


def test_the_true_temperature_is_found():
    truth = {1: 0.25, 2: 2.0, 4: 0.1, 8: 0.1}
    asked = evaluation_of(truth)
    found = calibrated(asked, CLASSES, {})
    assert found.ways == 5 and found.shots == (1, 2)  # 5 of 8 examples are queries
    np.testing.assert_allclose(found.temperatures, (0.25, 2.0), rtol=0.05)
    assert reliability(asked, CLASSES, {}, found.temperature(1)).error < 0.015
    assert reliability(asked, CLASSES, {}, 1.0).error > 0.2
    assert Reliability((0.5, 0.9), (0.7, 0.8), (1, 3)).error == pytest.approx(0.125)
    assert calibrated(asked, SimpleNamespace(is_regression=True), {}) is None
    asked.with_shots = lambda *_: SimpleNamespace(
        logits=lambda *_: (np.full((3, 5), np.nan), np.zeros(3, int))
    )
    assert calibrated(asked, CLASSES, {}) is None


@pytest.mark.parametrize("is_empty", [False, True])
def test_perfect_predictions_keep_the_temperature_above_zero(is_empty):
    targets = np.arange(40) % 2
    logits = np.eye(3)[targets] + np.where(np.arange(3) == 2, ABSENT * is_empty, 0.0)
    asked = evaluation_of({1: 1.0})
    asked.with_shots = lambda *_: SimpleNamespace(logits=lambda *_: (logits, targets))
    found = calibrated(asked, CLASSES, {}).temperatures[0]
    assert 0.1 < found < 0.5  # as if one query in 42 had a random class


def test_shots_are_interpolated_and_hardly_extrapolated():
    found = Calibration(5, (1, 4), (0.4, 0.1))
    assert found.temperature(2) == pytest.approx(0.2)
    assert found.temperature(9) == found.temperature(4) == pytest.approx(0.1)
    covered = {(5, 1), (10, 4), (2, 1.5)}
    others = {(11, 1), (5, 0.5), (5, 5)}
    assert {one for one in covered | others if found.covers(*one)} == covered
    assert str(found) == "episodes of 5 classes with 1 to 4 labelled examples of each"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ways": 0}, "calibration.ways"),
        ({"shots": [2, 1]}, "calibration.shots must increase"),
        ({"shots": "12"}, "one temperature for each of its shots"),
        ({"shots": [1, 2.5]}, "calibration.shots"),
        ({"temperatures": [1.0, 0.0]}, "calibration.temperatures"),
    ],
)
def test_calibrations_in_files_are_checked(changes, match):
    told = {"ways": 5, "shots": [1, 2], "temperatures": [1.0, 0.5]}
    assert calibration_of(told) == Calibration(5, (1, 2), (1.0, 0.5))
    with pytest.raises((TypeError, ValueError), match=match):
        calibration_of(told | changes)


@pytest.mark.parametrize(
    ("select", "split", "is_calibrated"),
    [(True, "validation", True), (False, "validation", False), (True, "test", False)],
)
def test_only_the_choosing_split_sets_temperatures(
    tmp_path, select, split, is_calibrated
):
    """A split that may be private, or the test split, does not."""
    run = plain_trainer(num_steps=1)
    run.train(tmp_path, evaluations={split: held_out()}, select=select)
    told = json.loads(json.dumps(described_release(run)))["calibration"]
    assert (told is not None) == is_calibrated == bool(run.selection.reliability)
    words = run.selection.words
    assert ("temperatures of probabilities fit" in words) == is_calibrated
    if is_calibrated:
        assert calibration_of(told) == run.selection.calibration
        assert list(run.selection.reliability) == ["validation"]
        run.selection = run.selection._replace(step=0)  # steps were taken after it
        assert described_release(run)["calibration"] is None
