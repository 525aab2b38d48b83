import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp_episodic.trainer.audit.canaries import (
    CANARIES,
    MODEL,
    CanaryLearner,
    gradient_canaries,
    input_canaries,
)
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.gradient.private_gradient import clip_by_norm
from jaxdp_episodic.trainer.learners.episode import Block, contribution_loss, to_episode
from training_runs import GROUPED, classes, protonet, tree_step

DATA = classes()
CLASS_LEVEL = dataclasses.replace(GROUPED, privacy_unit="class")
REPLACED = dataclasses.replace(GROUPED, neighboring_relation="replace_one")


def generator():
    return np.random.default_rng(0)


def sizes(table):
    return table.population.children_counts[-1]


def test_a_canary_example_is_added_to_its_world():
    canaries = gradient_canaries(DATA, GROUPED, 4, generator())
    everyone = np.ones(4, bool)
    without, with_all = canaries.data(~everyone), canaries.data(everyone)
    assert without.num_examples == DATA.num_examples
    np.testing.assert_array_equal(sizes(without), sizes(DATA))
    assert sorted(sizes(with_all) - sizes(DATA))[-5:] == [0, 1, 1, 1, 1]
    np.testing.assert_array_equal(without.features[:, :-1], DATA.features)
    one = canaries.data(np.array([True, False, False, False]))
    assert one.num_examples == DATA.num_examples + 1
    assert (one.features[:, -1] == 1).sum() == 1
    # The others of its class carry the opposite mark in both worlds.
    assert (one.features[:, -1] == -1).sum() == 6
    assert (without.features[:, -1] == -1).sum() == 6


def test_a_canary_class_is_emptied_in_the_other_world():
    canaries = gradient_canaries(DATA, CLASS_LEVEL, 3, generator())
    without = canaries.data(np.zeros(3, bool))
    assert sorted(sizes(without))[:4] == [0, 0, 0, 6]
    assert without.population.num_units(1) == 30
    with_all = canaries.data(np.ones(3, bool))
    assert set(with_all.features[:, -1]) == {0.0, 1.0, 2.0, 3.0}


def test_a_replaced_canary_flips_its_mark():
    canaries = gradient_canaries(DATA, REPLACED, 2, generator())
    pair = canaries.data(np.ones(2, bool)), canaries.data(np.zeros(2, bool))
    assert pair[0].num_examples == pair[1].num_examples == DATA.num_examples
    differ = np.flatnonzero((pair[0].features != pair[1].features).any(axis=1))
    np.testing.assert_array_equal(differ, np.sort(canaries.rows))
    np.testing.assert_array_equal(
        pair[0].features[differ, -1], -pair[1].features[differ, -1]
    )


def test_neighbours_differ_in_one_unit():
    for step in (GROUPED, CLASS_LEVEL, REPLACED):
        for make in (gradient_canaries, input_canaries):
            canaries = make(DATA, step, 5, generator())
            coins = np.array([True, False, True, True, False])
            other = coins.copy()
            other[3] = False
            rows = [
                Counter(map(tuple, canaries.data(c).features.tolist()))
                for c in (coins, other)
            ]
            changed = (rows[0] - rows[1]).total() + (rows[1] - rows[0]).total()
            # A shuffled row of two numbers may equal the original.
            least = 0 if step is REPLACED and make is input_canaries else 1
            assert least <= changed <= (6 if step is CLASS_LEVEL else 2)


def test_input_canaries_are_shuffled_and_their_targets_mirrored():
    rng = np.random.default_rng(1)
    table = ExampleTable.from_records(
        rng.normal(size=(60, 8)),
        rng.normal(size=60),
        units={"task": np.repeat(np.arange(6), 10)},
        example_level="point",
    )
    levels = {"task": 0.5, "point": 4}
    step = tree_step("task", levels, privacy_unit="task", population=table.population)
    canaries = input_canaries(table, step, 2, generator())
    changed = canaries.table.features != table.features
    assert set(np.flatnonzero(changed.any(axis=1))) <= set(canaries.rows)
    np.testing.assert_allclose(
        np.sort(canaries.table.features, axis=1), np.sort(table.features, axis=1)
    )
    mean = table.targets.mean()
    np.testing.assert_allclose(
        canaries.table.targets[canaries.rows] - mean,
        -3 * (table.targets[canaries.rows] - mean),
        atol=1e-5,
    )


def test_too_many_canaries_are_refused():
    with pytest.raises(ValueError, match="at most 30"):
        gradient_canaries(DATA, GROUPED, 31, generator())
    with pytest.raises(ValueError, match="num_canaries"):
        gradient_canaries(DATA, GROUPED, 0, generator())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ((0, 0, 0), None),
        ((2, 0, 0), [0.0, 1.0, 0.0]),
        ((-2, 0, 0), [0.0, -1.0, 0.0]),
        ((2, -2, 0), [0.0, 1.0, 0.0]),
        ((1, 3, 0), [0.5**0.5, 0.0, 0.5**0.5]),
    ],
)
def test_a_canarys_clipped_contribution_is_the_worst_case(marks, expected):
    """It is the canary's direction with the clip norm, without the model's gradient."""
    model, params = protonet()
    learner = CanaryLearner(model, (2,), "float32", 3, l2_clip_norm=0.5)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(3, 3, 3)).astype(np.float32)
    inputs[..., -1] = 0
    inputs[:, 0, -1] = marks  # one slot of each class
    unit = Block(
        jnp.asarray(inputs),
        jnp.zeros((3, 3), jnp.float32),
        jnp.ones((3, 3), jnp.float32),
        jnp.ones((), jnp.float32),
    )
    loss = contribution_loss(learner, (3, 3), shots=1)
    gradient = jax.jit(jax.grad(loss))(learner.params(params), unit)
    clipped, _, finite = jax.jit(clip_by_norm)(gradient, jnp.float32(0.5))
    assert finite
    if expected is None:
        bare = unit._replace(inputs=unit.inputs[..., :-1])
        episode = to_episode(bare, shots=1, is_regression=False)
        plain = jax.jit(jax.grad(model.loss))(params, episode)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        jax.tree.map(close, gradient[MODEL], plain)
        assert not np.any(gradient[CANARIES])
        return
    np.testing.assert_allclose(
        clipped[CANARIES], 0.5 * np.asarray(expected), rtol=2e-5, atol=1e-6
    )
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(clipped[MODEL]))


def test_masked_marks_do_not_count():
    model, params = protonet()
    learner = CanaryLearner(model, (2,), "float32", 3, l2_clip_norm=0.5)
    inputs = jnp.ones((3, 3, 3), jnp.float32)
    mask = jnp.zeros((3, 3), jnp.float32)
    unit = Block(inputs, mask, mask, jnp.ones((), jnp.float32))
    loss = contribution_loss(learner, (3, 3), shots=1)
    gradient = jax.jit(jax.grad(loss))(learner.params(params), unit)
    assert not np.any(gradient[CANARIES])
