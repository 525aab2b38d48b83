"""Bayesian regression against SciPy's normal distributions, which share no code."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxdp_episodic.trainer.config.training_parts import LearnerConfig
from jaxdp_episodic.trainer.run.assemble import run_parts
from jaxdp_episodic.training import (
    BayesianRegression,
    read_config,
    regression_episode,
)

ROOT = Path(__file__).resolve().parents[3]
CONFIGS, EXPERIMENTS = ROOT / "configs", ROOT / "experiments"

FEATURES, EXAMPLES, SHOTS, RANK = 4, 7, 4, 2
LEAST = 1e-4  # that is added to both variances


def halves(params, inputs):
    """Features: half of the inputs times a parameter."""
    return params["factor"] * inputs / 2


LEARNER = BayesianRegression(halves, rank=RANK)
# Compiled, which is faster than op by op.
graded = jax.jit(jax.value_and_grad(LEARNER.loss))
predicted = jax.jit(LEARNER.predict)


@pytest.fixture
def params():
    """Parameters away from their initial values."""
    random = np.random.default_rng(0)
    first = LEARNER.initial(
        {"factor": jnp.float32(1.5)}, FEATURES, scale=0.8, noise=0.5
    )
    moved = {
        name: value + random.normal(scale=0.3, size=value.shape).astype(np.float32)
        for name, value in first["prior"].items()
    }
    return {**first, "prior": moved}


def data(mask):
    random = np.random.default_rng(1)
    inputs = random.normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    targets = random.normal(size=EXAMPLES).astype(np.float32)
    episode = regression_episode(inputs, targets, np.float32(mask), shots=SHOTS)
    return inputs, targets, episode


def moments(params, inputs):
    """Mean and covariance of targets, in float64, element by element."""
    prior = {k: np.asarray(v, np.float64) for k, v in params["prior"].items()}
    covariance = prior["factor"] @ prior["factor"].T
    covariance += (LEAST + np.exp(prior["log_scale"])) * np.eye(FEATURES + 1)
    rows = float(params["model"]["factor"]) * np.asarray(inputs, np.float64) / 2
    rows = np.insert(rows, 0, 1.0, axis=1)
    noise = LEAST + np.exp(prior["log_variance"])
    return rows @ prior["mean"], rows @ covariance @ rows.T, noise


@pytest.mark.parametrize("mask", [(1,) * 7, (1, 0, 1, 1, 0, 0, 1), (0,) * 7])
def test_the_loss_is_minus_the_mean_log_density_of_unmasked_targets(params, mask):
    inputs, targets, episode = data(mask)
    there = np.flatnonzero(mask)
    mean, covariance, noise = moments(params, inputs[there])
    found, gradient = graded(params, episode)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    if not there.size:
        assert found == 0
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))
        return
    density = stats.multivariate_normal(
        mean, covariance + noise * np.eye(len(there))
    ).logpdf(targets[there])
    np.testing.assert_allclose(found, -density / len(there), rtol=2e-6)


@pytest.mark.parametrize(
    "mask", [(1,) * 7, (1, 0, 1, 1, 1, 1, 1), (0, 0, 0, 0, 1, 1, 1)]
)
def test_predictions_are_conditional_means(params, mask):
    inputs, targets, episode = data(mask)
    support = np.flatnonzero(mask[:SHOTS])
    rows = np.concatenate([inputs[support], inputs[SHOTS:]])
    mean, covariance, noise = moments(params, rows)
    number = len(support)
    among = covariance[:number, :number] + noise * np.eye(number)
    residuals = targets[support] - mean[:number]
    wanted = mean[number:] + covariance[number:, :number] @ np.linalg.solve(
        among, residuals
    )
    found = predicted(params, episode)
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank"),
        ({"prior_scale": 0.0}, "prior_scale"),
        ({"noise_scale": -1.0}, "noise_scale"),
        ({"loss": "cross_entropy"}, "loss must be 'squared_error'"),
    ],
)
def test_invalid_configs_are_refused(change, message):
    good = {"kind": "bayes", "shots": 3, "loss": "squared_error"}
    with pytest.raises(ValueError, match=message):
        LearnerConfig(**good | change)


@pytest.mark.slow
def test_a_config_needs_no_network(tmp_path):
    path = tmp_path / "bayes.toml"
    text = (CONFIGS / "sinusoids_bayes.toml").read_text(encoding="utf-8")
    path.write_text(text.replace("num_tasks = 5_000", "num_tasks = 20"), "utf-8")
    config = read_config(path)
    data = config.data.load("train")
    for model, width in ((config.model, 32), (None, 1)):
        parts = run_parts(dataclasses.replace(config, model=model), data)
        assert isinstance(parts["learner"], BayesianRegression)
        assert parts["params"]["prior"]["mean"].shape == (width + 1,)
