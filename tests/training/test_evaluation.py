"""Scores on held-out tasks, and what their intervals cover."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp_episodic.data.sinusoids import make_sinusoids
from jaxdp_episodic.training.episode import Episode
from jaxdp_episodic.training.evaluation import Evaluation, Score
from jaxdp_episodic.training.learners import ProtoNet
from jaxdp_episodic.training.statistics import Started
from training_runs import classes, protonet, sinusoid_learner


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
    evaluation = Evaluation(data, ways=3, shots=1, queries=10, num_episodes=10)
    learner, params = protonet()
    assert 0.0 <= evaluation(learner, params).mean <= 1.0


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
