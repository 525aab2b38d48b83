"""Learners against independent formulas, and in a run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxdp_episodic.trainer.config.training_parts import LearnerConfig
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.learners.episode import Block, contribution_loss
from jaxdp_episodic.trainer.run.assemble import run_parts
from jaxdp_episodic.training import (
    ANIL,
    MAML,
    BayesianRegression,
    ProtoNet,
    Supervised,
    classification_episode,
    read_config,
    regression_episode,
)
from pages import ROOT
from training_runs import (
    classes as plane_classes,
    protonet,
    sinusoid_learner,
    trainer,
    tree_step,
)

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


# --- Slots become support and query ---


def test_the_first_slots_are_support_and_labels_are_places_in_the_episode():
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
    inputs, targets = inputs.reshape(12, 2)[:5], np.arange(5, dtype=np.float32)
    episode = regression_episode(inputs, targets, np.float32([1, 1, 1, 1, 0]), shots=3)
    np.testing.assert_array_equal(episode.support_inputs, inputs[:3])
    np.testing.assert_array_equal(episode.query_targets, [3, 4])
    np.testing.assert_array_equal(episode.query_mask, [1, 0])


# --- ProtoNet ---


def protonet_loss(embed, episode, scores_of):
    """The mean cross-entropy of the scores of prototypes, in float64."""
    support = embed(np.float64(episode.support_inputs))
    there = np.asarray(episode.support_mask) > 0
    labels = np.asarray(episode.support_targets)
    present = [k for k in range(WAYS) if np.any(there & (labels == k))]
    means = np.stack([support[there & (labels == k)].mean(axis=0) for k in present])
    losses = []
    for x, y, m in zip(
        embed(np.float64(episode.query_inputs)),
        np.asarray(episode.query_targets),
        np.asarray(episode.query_mask),
        strict=True,
    ):
        if m > 0 and y in present:
            scores = scores_of(x, means)
            losses.append(np.log(np.exp(scores).sum()) - scores[present.index(y)])
    return np.mean(losses) if losses else 0.0


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def euclidean_loss(embed, episode):
    """The paper's formula."""
    return protonet_loss(embed, episode, lambda x, c: -np.sum((x - c) ** 2, axis=-1))


def cosine_loss(embed, episode, temperature=3.0):
    def scores(x, means):
        return temperature * unit(means) @ x

    return protonet_loss(lambda rows: unit(embed(rows)), episode, scores)


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
    params, mask = weights(2), np.float32(mask)
    embed = lambda x: x @ np.float64(params["weights"])  # noqa: E731
    episode = classes(mask=mask)
    found = float(computed(ProtoNet(linear, ways=WAYS))(params, episode))
    np.testing.assert_allclose(found, euclidean_loss(embed, episode), rtol=1e-5)
    cosine = {"distance": "cosine", "temperature": 3.0}
    learner = ProtoNet(linear, ways=WAYS, **cosine)
    found = float(computed(learner)(params, episode))
    np.testing.assert_allclose(found, cosine_loss(embed, episode), rtol=2e-5)
    # Every rotation of support and query, as separate episodes.
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(WAYS, SLOTS, FEATURES)).astype(np.float32)
    rotations = [
        classification_episode(np.roll(inputs, r, 1), np.roll(mask, r, 1), shots=SHOTS)
        for r in range(SLOTS)
    ]
    expected = np.mean([cosine_loss(embed, e) for e in rotations])
    resplits = ProtoNet(linear, ways=WAYS, resplits=True, **cosine)
    found = float(computed(resplits)(params, episode))
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    if mask.all():  # embeddings of zeros have a gradient
        zero = {"weights": np.zeros((FEATURES, 2), np.float32)}
        assert np.isfinite(graded(learner)(zero, episode)[1]["weights"]).all()


def test_a_class_without_support_is_never_predicted():
    predict = jax.jit(ProtoNet(linear, ways=WAYS).predict)
    logits = predict(weights(2), classes(mask=CLASS_MISSING))
    assert not np.any(np.argmax(logits, axis=-1) == 1)


# --- Masked examples do not count ---

LEARNERS = [
    ProtoNet(linear, ways=WAYS),
    MAML(linear),
    MAML(linear, first_order=True),
    ANIL(linear, head="weights"),
]
OF_TASKS = [
    MAML(linear, task_loss="squared_error"),
    ANIL(linear, head="weights", task_loss="squared_error"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "learner, params, episode",
    [
        *((learner, weights(WAYS), classes(mask=SOME_MISSING)) for learner in LEARNERS),
        *((learner, weights(1), task(mask=(1, 1, 0, 1, 1, 0))) for learner in OF_TASKS),
    ],
)
def test_masked_examples_change_nothing(learner, params, episode):
    """And an episode without support or query contributes nothing."""
    compute = graded(learner)
    for part in ("support_mask", "query_mask"):
        emptied = episode._replace(**{part: np.zeros_like(getattr(episode, part))})
        loss, gradient = compute(params, emptied)
        assert loss == 0.0
        assert not np.any(gradient["weights"])

    def overwritten(inputs, mask):
        return np.where(np.asarray(mask)[:, None] > 0, inputs, np.float32(7.0))

    other = episode._replace(
        support_inputs=overwritten(episode.support_inputs, episode.support_mask),
        query_inputs=overwritten(episode.query_inputs, episode.query_mask),
    )
    np.testing.assert_allclose(
        compute(params, episode)[1]["weights"],
        compute(params, other)[1]["weights"],
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
    ("first_order", "inner_steps", "checkpoint"),  # every pair of values
    [(False, 3, False), (False, 1, True), (True, 1, False), (True, 3, True)],
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


# --- ANIL ---


def test_anil_adapts_the_head_only():
    rng = np.random.default_rng(2)
    params = {
        "layers": {"0": rng.normal(size=(FEATURES, 5)).astype(np.float32)},
        "head": {"kernel": rng.normal(size=(5, WAYS)).astype(np.float32)},
    }

    def apply(params, inputs):
        return jnp.tanh(inputs @ params["layers"]["0"]) @ params["head"]["kernel"]

    learner, episode = ANIL(apply, head="layers/0", inner_steps=1), classes()
    adapted = jax.jit(learner.adapt)(params, episode)
    for path, leaf in jax.tree_util.tree_leaves_with_path(adapted):
        name = "/".join(key.key for key in path)
        original = params
        for key in path:
            original = original[key.key]
        changed = not np.array_equal(leaf, original)
        assert changed == name.startswith("layers/0"), name
    _, gradient = graded(learner)(params, episode)  # the body still learns
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))


# --- Bayesian regression, against SciPy's normal distributions ---

LEAST = 1e-4  # that is added to both variances


def halves(params, inputs):
    """Features: half of the inputs times a parameter."""
    return params["factor"] * inputs / 2


BAYES = BayesianRegression(halves, rank=2)


@pytest.fixture(scope="module")
def prior():
    """Parameters away from their initial values."""
    random = np.random.default_rng(0)
    first = BAYES.initial({"factor": jnp.float32(1.5)}, FEATURES, scale=0.8, noise=0.5)
    moved = {
        name: value + random.normal(scale=0.3, size=value.shape).astype(np.float32)
        for name, value in first["prior"].items()
    }
    return {**first, "prior": moved}


def moments(params, episode):
    """Targets of all six examples, their mean and covariance, in float64."""
    prior = {k: np.asarray(v, np.float64) for k, v in params["prior"].items()}
    covariance = prior["factor"] @ prior["factor"].T
    covariance += (LEAST + np.exp(prior["log_scale"])) * np.eye(FEATURES + 1)
    inputs = np.concatenate([episode.support_inputs, episode.query_inputs])
    rows = float(params["model"]["factor"]) * inputs.astype(np.float64) / 2
    rows = np.insert(rows, 0, 1.0, axis=1)
    noise = (LEAST + np.exp(prior["log_variance"])) * np.eye(6)
    targets = np.concatenate([episode.support_targets, episode.query_targets])
    return targets, rows @ prior["mean"], rows @ covariance @ rows.T, noise


@pytest.mark.parametrize("mask", [(1,) * 6, (1, 0, 1, 1, 0, 1), (0, 0, 0, 1, 1, 1)])
def test_bayesian_regression_is_that_of_a_normal_distribution(prior, mask):
    """The loss is minus the mean log density; predictions are conditional means."""
    episode, there = task(mask=mask), np.flatnonzero(mask)
    found, gradient = graded(BAYES)(prior, episode)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    targets, mean, covariance, noise = moments(prior, episode)
    normal = stats.multivariate_normal(
        mean[there], (covariance + noise)[np.ix_(there, there)]
    )
    np.testing.assert_allclose(found, -normal.logpdf(targets[there]) / len(there), 2e-6)
    support = there[there < 3]
    known = np.ix_(support, support)
    residuals = np.linalg.solve(
        covariance[known] + noise[known], (targets - mean)[support]
    )
    wanted = mean[3:] + covariance[3:, support] @ residuals
    found = jax.jit(BAYES.predict)(prior, episode)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)
    loss, gradient = graded(BAYES)(prior, task(mask=(0,) * 6))
    assert loss == 0 and all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_bayesian_regression_needs_no_network(tmp_path):
    path = tmp_path / "bayes.toml"
    text = (ROOT / "configs" / "sinusoids_bayes.toml").read_text(encoding="utf-8")
    path.write_text(text.replace("num_tasks = 5_000", "num_tasks = 20"), "utf-8")
    config = read_config(path)
    data = config.data.load("train")
    for model, width in ((config.model, 32), (None, 1)):
        parts = run_parts(dataclasses.replace(config, model=model), data)
        assert isinstance(parts["learner"], BayesianRegression)
        assert parts["params"]["prior"]["mean"].shape == (width + 1,)


# --- Bad input ---


def bayes(**change):
    return LearnerConfig(kind="bayes", shots=3, **{"loss": "squared_error"} | change)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ProtoNet(linear, ways=WAYS, distance="manhattan"), "distance"),
        (lambda: ProtoNet(linear, ways=[2, 3]), "ways must be one number"),
        (lambda: ProtoNet(linear, ways=WAYS, temperature=0.0), "temperature"),
        (lambda: ProtoNet(linear, ways=WAYS, resplits=1), "resplits"),
        (lambda: MAML(linear, inner_steps=0), "inner_steps"),
        (lambda: MAML(linear, inner_learning_rate=np.nan), "inner_learning_rate"),
        (lambda: MAML(linear, inner_learning_rate=[1, 2]), "rate must be one number"),
        (lambda: MAML(linear, task_loss="cross_entropi"), "mean 'cross_entropy'"),
        (lambda: MAML(linear, first_order="a"), "first_order must be true or false"),
        (lambda: MAML("linear"), "apply must be a function, got 'linear'"),
        (lambda: bayes(rank=0), "rank"),
        (lambda: bayes(loss="cross_entropy"), "loss must be 'squared_error'"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_parameters_must_fit_the_learner():
    for head in ("tail", "weights/0"):
        with pytest.raises(ValueError, match="head must name a part"):
            ANIL(linear, head=head).loss(weights(WAYS), classes())
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


# --- Learners in a run ---


def test_one_users_tasks_do_not_change_other_contributions():
    """The number of slots is the largest unit's, so no divisor may depend on it."""
    learner = OF_TASKS[0]
    rng, losses = np.random.default_rng(0), []
    inputs = rng.normal(size=(3, 6, FEATURES)).astype(np.float32)
    targets = rng.normal(size=(3, 6)).astype(np.float32)
    for slots in (1, 3):  # of tasks; the others hold none
        mask = np.zeros((slots, 6), np.float32)
        mask[0] = 1
        unit = Block(inputs[:slots], targets[:slots], mask, np.ones((), np.float32))
        loss = contribution_loss(learner, (slots, 6), shots=3)
        losses.append(jax.jit(jax.value_and_grad(loss))(weights(1), unit))
    alone = graded(learner)(
        weights(1), regression_episode(inputs[0], targets[0], mask[0], shots=3)
    )
    for found in losses:
        np.testing.assert_allclose(found[0], alone[0], rtol=1e-5)
        np.testing.assert_allclose(
            found[1]["weights"], alone[1]["weights"], rtol=1e-4, atol=1e-6
        )


def narrow(outputs):
    return MAML(lambda p, x: x @ p), np.zeros((2, outputs), np.float32)


def test_learners_that_do_not_fit_the_data_are_refused():
    data, (learner, params) = plane_classes(num_classes=4), protonet()
    flat = tree_step("class", {"class": 1.0, "example": (4, 4)}, privacy_unit="class")
    supervised = {
        "step": flat,
        "shots": 0,
        "normalizer": 3.0,
        "learner": (Supervised(learner.apply), params),
    }
    for message, given in (
        (
            "data must have targets for a learner of num",
            {"data": data, "step": flat, "learner": sinusoid_learner()},
        ),
        # Labels must not index a private list.
        ("data must have targets for Supervised", {"data": data, **supervised}),
        (
            "ways must be the number of classes",
            {"learner": (ProtoNet(learner.apply, ways=2), params)},
        ),
        # A label beyond the outputs has a NaN loss: its unit would contribute nothing.
        ("apply must return at least 3 logits", {"learner": narrow(2)}),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(**given)
    labelled = ExampleTable(data.features, data.class_places * 1.0, data.population)
    trainer(data=labelled, **supervised)
    trainer(learner=narrow(3))
