"""Learners against independent formulas."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdp_episodic.training import (
    ANIL,
    MAML,
    MLP,
    ProtoNet,
    classification_episode,
    regression_episode,
    split_model,
)
from rows import fast_and_slow

WAYS, SHOTS, SLOTS, FEATURES = 3, 2, 5, 4


@functools.cache
def graded(learner):
    """Loss and gradient, compiled, which is faster than op by op."""
    return jax.jit(jax.value_and_grad(learner.loss))


@functools.cache
def computed(learner):
    """The loss alone, compiled."""
    return jax.jit(learner.loss)


def linear(params, inputs):
    return inputs @ params["weights"]


def classes(seed=0, mask=None):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(WAYS, SLOTS, FEATURES)).astype(np.float32)
    mask = np.ones((WAYS, SLOTS), np.float32) if mask is None else np.float32(mask)
    return classification_episode(inputs, mask, shots=SHOTS)


def task(seed=0, mask=(1,) * 6, shots=3):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(6, FEATURES)).astype(np.float32)
    targets = rng.normal(size=6).astype(np.float32)
    return regression_episode(inputs, targets, np.float32(mask), shots=shots)


def weights(outputs, seed=1):
    rng = np.random.default_rng(seed)
    return {"weights": rng.normal(size=(FEATURES, outputs)).astype(np.float32)}


# --- ProtoNet ---


def protonet_loss(embed, episode, ways):
    """The paper's formula, class by class, in float64."""
    support = embed(np.float64(episode.support_inputs))
    there = np.asarray(episode.support_mask) > 0
    labels = np.asarray(episode.support_targets)
    present = [k for k in range(ways) if np.any(there & (labels == k))]
    prototypes = {k: support[there & (labels == k)].mean(axis=0) for k in present}
    losses = []
    for x, y, m in zip(
        embed(np.float64(episode.query_inputs)),
        np.asarray(episode.query_targets),
        np.asarray(episode.query_mask),
        strict=True,
    ):
        if m > 0 and y in present:
            scores = {k: -np.sum((x - c) ** 2) for k, c in prototypes.items()}
            losses.append(np.log(sum(np.exp(list(scores.values())))) - scores[y])
    return np.mean(losses)


FULL = np.ones((WAYS, SLOTS))
SOME_MISSING = [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
CLASS_MISSING = [[1, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
NO_SUPPORT_THERE = [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    "mask",
    [FULL, SOME_MISSING, CLASS_MISSING, NO_SUPPORT_THERE],
    ids=["full", "some-missing", "class-missing", "class-without-support"],
)
def test_protonet_equals_the_papers_formula(mask):
    params, episode = weights(2), classes(mask=mask)
    loss, _ = graded(ProtoNet(linear, ways=WAYS))(params, episode)
    expected = protonet_loss(lambda x: x @ params["weights"], episode, WAYS)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def cosine_loss(embed, episode, ways, temperature):
    """Cross-entropy of cosines, class by class, in float64."""

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    support = unit(embed(np.float64(episode.support_inputs)))
    there = np.asarray(episode.support_mask) > 0
    labels = np.asarray(episode.support_targets)
    present = [k for k in range(ways) if np.any(there & (labels == k))]
    means = unit(np.stack([support[there & (labels == k)].mean(0) for k in present]))
    losses = []
    for x, y, m in zip(
        unit(embed(np.float64(episode.query_inputs))),
        np.asarray(episode.query_targets),
        np.asarray(episode.query_mask),
        strict=True,
    ):
        if m > 0 and y in present:
            scores = temperature * means @ x
            losses.append(np.log(np.exp(scores).sum()) - scores[present.index(y)])
    return np.mean(losses) if losses else 0.0


@pytest.mark.parametrize("mask", [FULL, SOME_MISSING, CLASS_MISSING])
def test_cosine_protonet_and_its_resplits(mask):
    params, mask = weights(2), np.float32(mask)
    embed = lambda x: x @ np.float64(params["weights"])  # noqa: E731
    learner = ProtoNet(linear, ways=WAYS, distance="cosine", temperature=3.0)
    expected = cosine_loss(embed, classes(mask=mask), WAYS, 3.0)
    found = float(computed(learner)(params, classes(mask=mask)))
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    # Every rotation of support and query, as separate episodes.
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(WAYS, SLOTS, FEATURES)).astype(np.float32)
    rotations = [
        classification_episode(np.roll(inputs, r, 1), np.roll(mask, r, 1), shots=SHOTS)
        for r in range(SLOTS)
    ]
    expected = np.mean([cosine_loss(embed, e, WAYS, 3.0) for e in rotations])
    resplits = ProtoNet(
        linear, ways=WAYS, distance="cosine", temperature=3.0, resplits=True
    )
    found = float(computed(resplits)(params, classes(mask=mask)))
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_an_embedding_of_zeros_has_a_gradient():
    learner = ProtoNet(linear, ways=WAYS, distance="cosine")
    zero = {"weights": np.zeros((FEATURES, 2), np.float32)}
    gradient = jax.jit(jax.grad(learner.loss))(zero, classes())
    assert np.isfinite(gradient["weights"]).all()


def test_a_class_without_support_is_never_predicted():
    predict = jax.jit(ProtoNet(linear, ways=WAYS).predict)
    logits = predict(weights(2), classes(mask=CLASS_MISSING))
    assert not np.any(np.argmax(logits, axis=-1) == 1)


# --- Masked examples do not count ---

LEARNERS = {
    "protonet": ProtoNet(linear, ways=WAYS),
    "maml": MAML(linear),
    "first-order": MAML(linear, first_order=True),
    "anil": ANIL(linear, head="weights"),
}
REGRESSION = {
    "maml": MAML(linear, task_loss="squared_error"),
    "anil": ANIL(linear, head="weights", task_loss="squared_error"),
}


def no_support(episode):
    return episode._replace(support_mask=np.zeros_like(episode.support_mask))


def no_query(episode):
    return episode._replace(query_mask=np.zeros_like(episode.query_mask))


@pytest.mark.few(1)
@pytest.mark.parametrize("emptied", [no_support, no_query])
@pytest.mark.parametrize(
    "learner, params, episode",
    [
        *((learner, weights(WAYS), classes()) for learner in LEARNERS.values()),
        *((learner, weights(1), task()) for learner in REGRESSION.values()),
    ],
    ids=[*LEARNERS, *(f"regression-{name}" for name in REGRESSION)],
)
def test_an_episode_without_support_or_query_contributes_nothing(
    learner, params, episode, emptied
):
    loss, gradient = graded(learner)(params, emptied(episode))
    assert loss == 0.0
    assert not np.any(gradient["weights"])


@pytest.mark.parametrize("name", LEARNERS)
def test_masked_examples_change_nothing(name):
    episode = classes(mask=SOME_MISSING)

    def overwritten(inputs, mask):
        return np.where(np.asarray(mask)[:, None] > 0, inputs, np.float32(7.0))

    other = episode._replace(
        support_inputs=overwritten(episode.support_inputs, episode.support_mask),
        query_inputs=overwritten(episode.query_inputs, episode.query_mask),
    )
    params, gradient = weights(WAYS), graded(LEARNERS[name])
    np.testing.assert_allclose(
        gradient(params, episode)[1]["weights"],
        gradient(params, other)[1]["weights"],
        rtol=1e-5,
        atol=1e-6,
    )


# --- MAML ---


def quadratic_parts(episode):
    """Matrices of the mean squared errors of support and query, in float64."""
    parts = []
    for inputs, targets in (
        (episode.support_inputs, episode.support_targets),
        (episode.query_inputs, episode.query_targets),
    ):
        x, y = np.float64(inputs), np.float64(targets)
        parts.append((2 * x.T @ x / len(x), 2 * x.T @ y / len(x), np.mean(y**2)))
    return parts


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("first_order", "inner_steps", "checkpoint"),
    fast_and_slow(
        itertools.product([False, True], [1, 3], [False, True]),
        # every pair of values
        lambda first_order, steps, checkpoint: (
            (first_order == (steps == 3)) != checkpoint
        ),
    ),
)
def test_maml_of_a_linear_model_is_in_closed_form(first_order, inner_steps, checkpoint):
    # Support loss w'Aw/2 - b'w: each step is w -> (I - rA)w + rb, so the gradient is
    # (I - rA)^n (Hw_n - c); first order leaves the power out.
    params, episode, rate = weights(1), task(), 0.1
    (a, b, _), (h, c, offset) = quadratic_parts(episode)
    w = np.float64(params["weights"][:, 0])
    step = np.eye(FEATURES) - rate * a
    for _ in range(inner_steps):
        w = step @ w + rate * b
    outer = h @ w - c
    if not first_order:
        outer = np.linalg.matrix_power(step, inner_steps) @ outer
    learner = MAML(
        linear,
        inner_steps=inner_steps,
        inner_learning_rate=rate,
        first_order=first_order,
        checkpoint=checkpoint,
        task_loss="squared_error",
    )
    loss, gradient = graded(learner)(params, episode)
    np.testing.assert_allclose(loss, w @ h @ w / 2 - c @ w + offset, rtol=1e-5)
    np.testing.assert_allclose(gradient["weights"][:, 0], outer, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_maml_of_a_network_against_differences_of_its_loss():
    apply, params = split_model(MLP(FEATURES, (5,), WAYS, rngs=nnx.Rngs(0)))
    learner, episode = MAML(apply, inner_steps=2, inner_learning_rate=0.5), classes()
    gradient = jax.grad(learner.loss)(params, episode)
    rng = np.random.default_rng(3)
    direction = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params
    )
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
    expected = sum(float(jnp.vdot(g, d)) for g, d in pairs)

    def at(t):
        moved = jax.tree.map(lambda p, d: p + np.float32(t) * d, params, direction)
        return float(learner.loss(moved, episode))

    # Five-point rule: its error and float32's are each about 1e-4 here.
    h = 0.02
    slope = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    np.testing.assert_allclose(slope, expected, rtol=2e-3)
    first_order = MAML(apply, inner_steps=2, inner_learning_rate=0.5, first_order=True)
    other = jax.grad(first_order.loss)(params, episode)
    assert not np.allclose(other["head"]["kernel"], gradient["head"]["kernel"], 0.05)


# --- ANIL ---


@pytest.mark.parametrize(
    "head", [pytest.param("head", marks=pytest.mark.slow), "layers/0"]
)
def test_anil_adapts_the_head_only(head):
    rng = np.random.default_rng(2)
    params = {
        "layers": {"0": rng.normal(size=(FEATURES, 5)).astype(np.float32)},
        "head": {"kernel": rng.normal(size=(5, WAYS)).astype(np.float32)},
    }

    def apply(params, inputs):
        return jnp.tanh(inputs @ params["layers"]["0"]) @ params["head"]["kernel"]

    learner, episode = ANIL(apply, head=head, inner_steps=1), classes()
    adapted = jax.jit(learner.adapt)(params, episode)
    for path, leaf in jax.tree_util.tree_leaves_with_path(adapted):
        name = "/".join(key.key for key in path)
        original = params
        for key in path:
            original = original[key.key]
        changed = not np.array_equal(leaf, original)
        assert changed == name.startswith(head), name
    _, gradient = graded(learner)(params, episode)  # the body still learns
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_anil_of_all_parameters_equals_maml():
    params, episode = weights(WAYS), classes()
    nested = {"all": params}
    anil = ANIL(lambda p, x: linear(p["all"], x), head="all")
    np.testing.assert_array_equal(
        graded(anil)(nested, episode)[1]["all"]["weights"],
        graded(MAML(linear))(params, episode)[1]["weights"],
    )


@pytest.mark.parametrize("head", ["tail", "weights/0", ""])
def test_an_unknown_head_is_named(head):
    with pytest.raises(ValueError, match="head must name a part"):
        ANIL(linear, head=head).loss(weights(WAYS), classes())


# --- Bad input ---


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"distance": "manhattan"}, ValueError, "distance"),
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"resplits": 1}, TypeError, "resplits"),
        ({"inner_steps": 0}, ValueError, "inner_steps"),
        ({"inner_steps": True}, TypeError, "inner_steps"),
        ({"inner_learning_rate": 0.0}, ValueError, "inner_learning_rate"),
        ({"inner_learning_rate": np.nan}, ValueError, "inner_learning_rate"),
        ({"task_loss": "cross_entropi"}, ValueError, "did you mean 'cross_entropy'"),
    ],
)
def test_bad_settings(changes, error, message):
    cls = MAML if next(iter(changes)) in MAML.__dataclass_fields__ else ProtoNet
    with pytest.raises(error, match=message):
        cls(linear, **({"ways": WAYS} if cls is ProtoNet else {}), **changes)


def test_values_must_have_one_column():
    learner = MAML(lambda p, x: x @ p["weights"][:, 0], task_loss="squared_error")
    with pytest.raises(ValueError, match=r"shape \(n, 1\).* got \(3,\)"):
        learner.loss(weights(1), task())


def test_low_precision_parameters_are_trained_in_float32():
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), weights(WAYS))
    episode = classes()
    low = episode._replace(
        support_inputs=jnp.asarray(episode.support_inputs, jnp.bfloat16),
        query_inputs=jnp.asarray(episode.query_inputs, jnp.bfloat16),
    )
    for learner in (ProtoNet(linear, ways=WAYS), MAML(linear)):
        loss = computed(learner)(params, low)
        assert loss.dtype == jnp.float32
        full, _ = graded(learner)(weights(WAYS), episode)
        np.testing.assert_allclose(loss, full, rtol=0.05)
