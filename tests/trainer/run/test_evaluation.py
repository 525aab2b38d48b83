"""Scores on held-out tasks, and what their intervals cover."""

import dataclasses
import shutil
import tomllib

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.data.built_in import make_sinusoids
from jaxdp_episodic.trainer.data.sources import ClassFolders, Glyphs, Npz, Table
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.learners.episode import Episode
from jaxdp_episodic.trainer.learners.learners import ProtoNet
from jaxdp_episodic.trainer.run.assemble import Tables
from jaxdp_episodic.trainer.run.evaluation import EpisodeScores, Evaluation, Score
from jaxdp_episodic.trainer.statistics.statistics import Started
from training_runs import TINY, classes, protonet, sinusoid_learner


class Oracle:
    """Predicts from the inputs what the test decides."""

    def __init__(self, predict, is_regression=False):
        self._predict, self.is_regression = predict, is_regression

    def predict(self, params, episode: Episode):
        del params
        return self._predict(episode)


def test_a_perfect_and_a_blind_learner():
    data = classes(num_classes=12, examples=8)
    evaluation = Evaluation(data, ways=4, shots=1, queries=3, num_episodes=120)

    def exact(e):
        return (e.query_targets[:, None] == np.arange(4, dtype=np.int32)).astype(
            np.float32
        )

    def always_first(e):
        return exact(e) * 0 + np.eye(4, dtype=np.float32)[0]

    score = evaluation(Oracle(exact), {})
    assert score == Score("accuracy", 1.0, 1.0, 1.0, 120)
    assert evaluation(Oracle(always_first), {}).mean == 0.25


def test_the_same_episodes_every_time_and_others_by_seed():
    data = classes(num_classes=12, examples=8)
    learner, params = protonet()
    arguments = {"ways": 3, "shots": 1, "queries": 3, "num_episodes": 60}
    first = Evaluation(data, **arguments)
    assert first(learner, params) == first(learner, params)
    assert first(learner, params) == Evaluation(data, **arguments)(learner, params)
    other = Evaluation(data, seed=1, **arguments)(learner, params)
    assert other.mean != first(learner, params).mean


@pytest.mark.parametrize("wrapped", [False, True])
def test_prototypes_tell_as_many_classes_apart_as_there_are(wrapped):
    data = classes(num_classes=12, examples=8)
    learner = ProtoNet(lambda _, inputs: inputs, ways=3)
    params, many = {}, ProtoNet(learner.apply, ways=10)
    evaluation = Evaluation(data, ways=10, shots=2, queries=3, num_episodes=20)
    expected = evaluation(Oracle(lambda e: many.predict(params, e)), params)
    if wrapped:  # projected, by what does not change how near points are
        turned = np.float32([[0.0, 1.0], [1.0, 0.0]])
        start = {"mean": np.zeros(2, np.float32), "projection": turned}
        learner, params = Started(learner), {"start": start, "model": params}
        on_circle = Oracle(lambda e: many.predict({}, _unit_inputs(e)))
        expected = evaluation(on_circle, params)
    assert evaluation(learner, params) == expected
    assert expected.mean > 0.3  # not by guessing


def _unit_inputs(episode):
    parts = {"support_inputs", "query_inputs"}
    return episode._replace(
        **{
            k: v / jnp.linalg.norm(v, axis=1, keepdims=True)
            for k, v in episode._asdict().items()
            if k in parts
        }
    )


def test_rmse_is_that_of_all_queries():
    data = make_sinusoids(30, points=10, seed=3)
    evaluation = Evaluation(data, ways=None, shots=4, queries=6, num_episodes=400)
    zero = Oracle(lambda e: 0 * e.query_targets, is_regression=True)
    score = evaluation(zero, {})
    assert data.targets is not None
    assert score.name == "rmse"
    assert score.low < np.sqrt(np.mean(np.square(data.targets))) < score.high
    learner, params = sinusoid_learner()
    assert np.isfinite(evaluation(learner, params).mean)


@pytest.mark.slow
def test_the_interval_covers_the_mean_nineteen_times_in_twenty():
    """300 seeds; fewer than 0.9 or more than 0.99 would be a chance below 1e-4."""
    data = classes(num_classes=12, examples=8)
    learner, params = protonet()
    arguments = {"ways": 3, "shots": 1, "queries": 2}
    truth = Evaluation(data, num_episodes=20_000, seed=99, **arguments)(learner, params)
    covered = 0
    for seed in range(300):
        s = Evaluation(data, num_episodes=100, seed=seed, **arguments)(learner, params)
        covered += s.low <= truth.mean <= s.high
    assert 0.9 * 300 <= covered <= 0.99 * 300


def test_units_with_too_few_examples_count_what_they_have():
    data = classes(num_classes=6, examples=3)
    learner, params = protonet()
    scores = [
        Evaluation(data, ways=3, shots=1, queries=queries, num_episodes=10)
        for queries in (2, 10, 10**9)  # slots that no class fills are not computed
    ]
    first, *others = (evaluation(learner, params) for evaluation in scores)
    assert all(other == first for other in others)


def test_a_class_without_examples_is_no_other_one():
    """Its slots are filled by example 0, whose class it is not taken for."""
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
    # They change nothing that is said of the others: whatever their number, no error.
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
    # Two classes, of which each episode has both: there are no others.
    same = np.array([[3, -1, 7]] * 4)
    assert not scores._replace(groups=same).has_other_classes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ways": 13}, "ways must be at most the 12 classes"),
        ({"shots": 0}, "shots must be a whole number >= 1"),
        ({"queries": 0}, "queries must be a whole number >= 1"),
        ({"num_episodes": 1}, "num_episodes must be a whole number >= 2"),
    ],
)
def test_bad_input(changes, message):
    arguments = {"ways": 3, "shots": 1, "queries": 2, **changes}
    with pytest.raises(ValueError, match=message):
        Evaluation(classes(num_classes=12), **arguments)


def test_regression_needs_targets():
    with pytest.raises(ValueError, match="data must have targets for regression"):
        Evaluation(classes(), ways=None, shots=1, queries=2)


# --- What is held out is not trained on ---


@pytest.fixture
def tables():
    """The data of a run that has this source."""
    table = {"type": "TrainingConfig", **tomllib.loads(TINY)}
    config = TrainingConfig.from_dict(table)
    return lambda data: Tables(dataclasses.replace(config, data=data), None)


def drawn(folder, names, seed):
    rng = np.random.default_rng(seed)
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(3):
            pixels = rng.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return str(folder)


def test_the_training_folder_is_not_held_out(tmp_path, tables, capsys):
    trained = drawn(tmp_path / "trained", "abc", 0)
    link = tmp_path / "link"
    link.symlink_to(trained)
    for held_out in (trained, f"{trained}/.", str(link)):
        with pytest.raises(ValueError, match="test must be other data than path"):
            tables(ClassFolders(path=trained, test=held_out)).load("test")
        command = ["data", "import", trained, str(tmp_path / "out"), "--test"]
        assert cli.run([*command, held_out]) == 2
        assert "test must be other data than path" in capsys.readouterr().err
    other = drawn(tmp_path / "other", "de", 1)
    both = tables(ClassFolders(path=trained, validation=other, test=f"{other}/."))
    with pytest.raises(ValueError, match="test must be other data than validation"):
        both.load("validation")
    copy = shutil.copytree(trained, tmp_path / "copy")
    with pytest.raises(ValueError, match="must be other data .* the same units"):
        tables(ClassFolders(path=trained, test=str(copy))).load("test")


def test_what_is_shared_with_the_training_data_is_said(tmp_path, tables):
    trained = drawn(tmp_path / "trained", "abc", 0)
    others = tables(ClassFolders(path=trained, test=drawn(tmp_path / "o", "de", 1)))
    assert others.load("test").num_examples == 6  # without a word
    named = drawn(tmp_path / "named", "cde", 2)
    with pytest.warns(UserWarning, match="1 of its 3 class names .* such as 'c'"):
        tables(ClassFolders(path=trained, test=named)).load("test")
    copied = drawn(tmp_path / "copied", "xy", 3)
    shutil.copy(tmp_path / "trained" / "a" / "0.png", f"{copied}/x/1.png")
    found = tables(ClassFolders(path=trained, test=copied))
    with pytest.warns(UserWarning, match="1 of its 6 examples .* such as 1"):
        found.load("test")
    found.load("test")  # said once


def test_people_in_both_files_are_named(tmp_path, tables):
    for name, rows in (("train", "ann,1,1\nbob,2,1\n"), ("test", "bob,3,0\ncid,4,0\n")):
        (tmp_path / f"{name}.csv").write_text(f"user,age,score\n{rows}")
    source = Table(
        path=str(tmp_path / "train.csv"),
        test=str(tmp_path / "test.csv"),
        groups=("user",),
        features=("age",),
        target="score",
    )
    with pytest.warns(UserWarning, match="1 of its 2 user names .* such as 'bob'"):
        tables(source).load("test")


def test_classes_without_names_share_none(tmp_path, tables):
    rng = np.random.default_rng(0)
    for name in ("train", "test"):
        images = rng.integers(0, 256, (4, 3, 8, 8), dtype=np.uint8)
        np.savez(tmp_path / f"{name}.npz", images=images)
    places = [str(tmp_path / f"{name}.npz") for name in ("train", "test")]
    tables(Npz(path=places[0], test=places[1])).load("test")


def test_our_own_parts_have_nothing_in_common(tables):
    for split in ("validation", "test"):
        tables(Glyphs()).load(split)
