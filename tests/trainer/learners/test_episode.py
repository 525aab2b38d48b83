"""Slots become support and query; a contribution depends only on its unit."""

import jax
import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.trainer.data.built_in import make_sinusoids
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.learners.learners import MAML, ProtoNet, Supervised
from jaxdp_episodic.training import classification_episode, regression_episode
from training_runs import (
    classes,
    grouped_step,
    noised,
    protonet,
    sinusoid_learner,
    trainer,
)


def test_labels_are_places_of_classes_in_the_episode():
    inputs = np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 4, 2)
    mask = np.float32([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    episode = classification_episode(inputs, mask, shots=1)
    np.testing.assert_array_equal(episode.support_inputs, inputs[:, 0])
    np.testing.assert_array_equal(episode.support_targets, [0, 1, 2])
    np.testing.assert_array_equal(episode.support_mask, [1, 1, 0])
    np.testing.assert_array_equal(episode.query_inputs, inputs[:, 1:].reshape(9, 2))
    np.testing.assert_array_equal(episode.query_targets, np.repeat([0, 1, 2], 3))
    np.testing.assert_array_equal(episode.query_mask, mask[:, 1:].ravel())
    assert episode.support_targets.dtype == np.int32


def test_the_first_examples_of_a_task_are_support():
    inputs = np.arange(10, dtype=np.float32).reshape(5, 2)
    targets, mask = np.arange(5, dtype=np.float32), np.float32([1, 1, 1, 1, 0])
    episode = regression_episode(inputs, targets, mask, shots=3)
    np.testing.assert_array_equal(episode.support_inputs, inputs[:3])
    np.testing.assert_array_equal(episode.query_targets, [3, 4])
    np.testing.assert_array_equal(episode.query_mask, [1, 0])


FLAT = jde.MultistageSampling(
    jde.Poisson("class", sampling_probability=1.0),
    jde.WithoutReplacement("example", size=4, population=4),
)


def users(tasks_of_the_first):
    """20 users with one task each; the first one may have more."""
    table = make_sinusoids(21, points=4, seed=0)
    task = table.unit_column("task")
    kept = task < 19 + tasks_of_the_first
    assert table.targets is not None
    return ExampleTable.from_records(
        table.features[kept],
        table.targets[kept],
        units={"user": np.minimum(task, 19)[kept], "task": task[kept]},
        example_level="point",
    )


def gradient_sum(run, clip=100.0):
    """The sum of all clipped contributions, without noise."""
    gradient, _ = noised(
        run._gradient,
        run.params,
        run.draw_blocks(1),
        l2_clip_norm=clip,
        noise_multiplier=0.0,
        normalizer=1.0,
    )
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient)])


@pytest.mark.slow
def test_one_users_tasks_do_not_change_other_contributions():
    """The number of slots is the largest unit's, so no divisor may depend on it."""
    step = jde.GaussianStep(
        jde.MultistageSampling(
            jde.Poisson("user", sampling_probability=1.0),
            jde.Poisson("task", sampling_probability=1.0),
            jde.WithoutReplacement("point", size=4, population=4),
        ),
        noise_multiplier=1.0,
        clip_unit="user",
        privacy_unit="task",
    )
    sums = []
    for number in (1, 2):
        run = trainer(
            data=users(number),
            step=step,
            learner=sinusoid_learner(),
            shots=2,
            noise="gaussian",  # the grid for a clip norm of 1e6 would be too coarse
        )
        assert run.sampler.slot_shape == (number, 4)
        sums.append(gradient_sum(run, clip=1e6))
    # Support points are drawn anew, which changes every contribution a little; a mean
    # over slots would halve them, and change the sum by half.
    scale = float(sums[1] @ sums[0] / (sums[0] @ sums[0]))
    assert 0.75 < scale < 1.5


def test_regression_refuses_places_of_classes_as_targets():
    step = jde.GaussianStep(FLAT, noise_multiplier=1.0, clip_unit="class")
    with pytest.raises(ValueError, match="data must have targets for a learner of num"):
        trainer(data=classes(), step=step, learner=sinusoid_learner(), shots=1)


def test_labels_must_not_index_a_private_list():
    apply, params = protonet()[0].apply, protonet()[1]
    step = jde.GaussianStep(
        FLAT, noise_multiplier=1.0, clip_unit="class", privacy_unit="class"
    )
    arguments = {"shots": 0, "normalizer": 3.0, "learner": (Supervised(apply), params)}
    with pytest.raises(ValueError, match="data must have targets for Supervised"):
        trainer(data=classes(num_classes=4), step=step, **arguments)
    table = classes(num_classes=4)
    labelled = ExampleTable(table.features, table.class_places * 1.0, table.population)
    trainer(data=labelled, step=step, **arguments)


def test_ways_must_match_the_draw():
    _, params = protonet()
    with pytest.raises(ValueError, match="ways must be the number of classes"):
        trainer(learner=(ProtoNet(protonet()[0].apply, ways=2), params))


def test_a_model_with_too_few_outputs_is_refused():
    """A label beyond the outputs has a NaN loss: its unit would contribute nothing."""
    _, params = sinusoid_learner()
    data = classes()
    narrow = MAML(lambda p, x: x @ p)
    with pytest.raises(ValueError, match="apply must return at least 3 logits"):
        trainer(
            data=data,
            step=grouped_step(data),
            learner=(narrow, np.zeros((2, 2), np.float32)),
        )
    trainer(learner=(narrow, np.zeros((2, 3), np.float32)))
