"""Slots of a draw become support and query."""

import numpy as np

from jaxdp_episodic.training import classification_episode, regression_episode


def test_classes_are_labelled_by_their_place():
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
