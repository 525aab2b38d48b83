"""The private mixed model: its sums, their sensitivity, and its predictions."""

import functools

import jax
import numpy as np
import pytest

from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.learners.episode import Episode
from jaxdp_episodic.trainer.statistics.terms import PRODUCT_STEPS
from jaxdp_episodic.training import MixedModel, PrivateStatistics, StartConfig

CONFIG = StartConfig(kind="mixed")
MODEL = MixedModel.of(CONFIG)
COEFFICIENTS = np.array([0.1, 0.3, -0.2, 0.05, 0.0])  # of 1, x1, x2, x1^2, x2^2
COVARIANCE = np.array([[0.04, 0.01], [0.01, 0.02]])
DEVIATION = 0.2


@functools.cache
def tasks(number=800, size=10):
    """Tasks from a known mixed model with two features."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(number * size, 2)) / 2
    own = rng.multivariate_normal(np.zeros(2), COVARIANCE, size=number).repeat(size, 0)
    values = np.c_[np.ones(len(inputs)), inputs, inputs**2] @ COEFFICIENTS
    values += own[:, 0] + own[:, 1] * inputs[:, 0]
    values += rng.normal(scale=DEVIATION, size=len(values))
    ids = np.repeat(np.arange(number), size)
    return ExampleTable.from_records(inputs, values / 2, units={"task": ids})


def statistics(data=None, config=CONFIG):
    return PrivateStatistics(
        tasks() if data is None else data,
        config,
        privacy_unit="example",
        neighboring_relation="add_remove",
    )


def released(own, noise=0.0):
    state = own.initial()
    for place in range(2):
        generator, key = np.random.default_rng(place), bytes([place] * 32)
        state = own.release(state, place, generator, key, noise)
    return state


def test_the_sums_equal_their_definitions():
    rng = np.random.default_rng(0)
    rows, shares = np.float32(rng.normal(size=(7, 6))), rng.integers(1, 9, 7)
    model = MixedModel(powers=2, slopes=1, target_bound=0.5)
    state = model.initial(2)._replace(
        coefficients=np.float32([0.1, 0.2, -0.1, 0.0, 0.05]), variance=np.float32(0.2)
    )
    expected, cut = np.zeros((6, 6)), 2 * np.sqrt(0.2)
    moment = np.zeros((4, 4))
    for row, weight in zip(rows.astype(float), 1 / shares, strict=True):
        sides = []
        for x1, x2, y in (row[:3], row[3:]):
            line = np.array([1, x1, x2, x1**2, x2**2])
            y = np.clip(y, -0.5, 0.5)
            off = np.clip(y - line @ state.coefficients, -cut, cut) / cut
            z = np.array([1, x1])
            factor = 1 / np.linalg.norm(line)
            sides.append((z / np.linalg.norm(z), off / np.linalg.norm(z)))
            both = np.append(line, y / 0.5) * factor / np.sqrt(2)
            if len(sides) == 1:
                expected += weight * np.outer(both, both)
        (u, r), (v, q) = sides
        cross = (u[0] * v[1] + u[1] * v[0]) / np.sqrt(2)
        both = np.array([u[0] * v[0], cross, u[1] * v[1], r * q]) / np.sqrt(2)
        moment += weight * np.outer(both, both)
    for found, sums in (
        (model.pooled_moment(rows[:, :3], shares), expected),
        (model.pair_moment(rows, shares, state), moment),
    ):
        np.testing.assert_allclose(found / PRODUCT_STEPS, sums, rtol=1e-4, atol=1e-5)


def test_without_noise_the_true_model_is_found():
    state = released(statistics())
    np.testing.assert_allclose(2 * state.coefficients, COEFFICIENTS, atol=0.02)
    np.testing.assert_allclose(4 * state.covariance, COVARIANCE, atol=0.008)
    assert 4 * float(state.variance) == pytest.approx(DEVIATION**2, rel=0.1)
    noisy = released(statistics(), noise=3.0)
    np.testing.assert_allclose(2 * noisy.coefficients, COEFFICIENTS, atol=0.1)
    assert np.any(noisy.covariance != state.covariance)


def test_predictions_are_the_models_conditional_means():
    rng = np.random.default_rng(1)
    inputs, targets = rng.normal(size=(9, 2)) / 2, rng.normal(size=9) / 4
    mask = np.array([1, 1, 0, 1, 1.0])
    lines = np.c_[np.ones(9), inputs, inputs**2]
    own = lines[:, :2]
    there = np.r_[np.flatnonzero(mask), np.arange(5, 9)]
    joint = own @ COVARIANCE @ own.T + DEVIATION**2 * np.eye(9)
    joint, mean = joint[np.ix_(there, there)], (lines @ COEFFICIENTS)[there]
    known = targets[there[:4]] - mean[:4]
    expected = mean[4:] + joint[4:, :4] @ np.linalg.solve(joint[:4, :4], known)
    state = MODEL.initial(2)._replace(
        coefficients=np.float32(COEFFICIENTS),
        covariance=np.float32(COVARIANCE),
        variance=np.float32(DEVIATION**2),
    )
    inputs, targets = np.float32(inputs), np.float32(targets)
    episode = Episode(
        *(inputs[:5], targets[:5], np.float32(mask)),
        *(inputs[5:], targets[5:], np.ones(4, np.float32)),
    )
    params = {"start": state.released(), "model": {}}
    narrow = MixedModel(target_bound=0.1)

    @jax.jit
    def everything(episode):
        cut = narrow.predict(params, episode)
        return MODEL.predict(params, episode), MODEL.loss(params, episode), cut

    found, error, cut = everything(episode)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    loss = np.mean((expected - targets[5:]) ** 2)
    assert float(error) == pytest.approx(loss, rel=1e-4)
    assert np.abs(cut).max() <= np.float32(0.1)
    nobody = episode._replace(support_mask=np.zeros(5, np.float32))
    np.testing.assert_allclose(everything(nobody)[0], mean[4:], atol=1e-6)


def test_pure_noise_gives_a_valid_model():
    state = released(statistics(), noise=1e6)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in state)
    assert np.linalg.eigvalsh(state.covariance).min() > -1e-6 and state.variance > 0


def test_bad_tables():
    with pytest.raises(ValueError, match="slopes must be at most .* features, 2"):
        statistics(config=StartConfig(kind="mixed", slopes=3))
    with pytest.raises(ValueError, match="data must have targets"):
        statistics(ExampleTable(tasks().features, None, tasks().population))
    alone = ExampleTable.from_records(
        np.ones((3, 2)), np.ones(3), units={"task": np.arange(3)}
    )
    with pytest.raises(ValueError, match="pairs of examples of a task"):
        released(statistics(alone))


@pytest.mark.parametrize(
    ("start", "learner", "steps", "complaint"),
    [
        ("mixed", "maml", 3, "start.kind='mixed' is for"),
        ("plda", "mixed", None, "start must be of kind 'mixed'"),
        ("plda", "maml", None, "num_steps must be given with start"),
    ],
)
def test_statistics_must_fit_their_learner(start, learner, steps, complaint):
    with pytest.raises(ValueError, match=complaint):
        StartConfig(kind=start).check_use(learner, steps)
