"""Adam with the known noise variance subtracted from its second moments."""

import jax
import numpy as np
import optax
import pytest

from jaxdp_episodic.trainer.config.training_parts import OptimizerConfig
from jaxdp_episodic.trainer.learners.optimizers import (
    average_of,
    averaged,
    built_optimizer,
    noise_corrected_adam,
)
from jaxdp_episodic.trainer.run.mechanisms import compiled_update
from training_runs import plain_trainer

RATE, FLOOR = 0.1, 0.25
START = np.float32([1.0, -2.0, 0.5, 0.0])


def moved(optimizer, gradients, noise):
    """The change of the parameters by each update of the optimizer."""
    update, found = compiled_update(optimizer), [START]
    params, state = START, optimizer.init(START)
    for gradient in gradients:
        params, state = update(params, state, gradient, noise)
        found.append(np.asarray(params))
    return np.diff(np.array(found, np.float64), axis=0)


@pytest.mark.parametrize(("noise", "has_average"), [(0.0, False), (0.8, True)])
def test_each_step_equals_the_formula(noise, has_average):
    gradients = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
    optimizer = noise_corrected_adam(RATE, floor=FLOOR)  # without noise: Adam
    optimizer = averaged(optimizer, 0.5) if has_average else optimizer
    found = moved(optimizer, gradients, noise)
    g, kinds = gradients.astype(np.float64), set()
    for t in range(1, len(g) + 1):
        back = np.arange(t)[::-1, None]
        m = (0.1 * 0.9**back * g[:t]).sum(axis=0) / (1 - 0.9**t)
        v = (0.001 * 0.999**back * g[:t] ** 2).sum(axis=0) / (1 - 0.999**t)
        left = np.maximum(v - noise**2, FLOOR * noise**2)
        kinds |= set(left == v - noise**2)
        # In float32 1 - 0.999^t is rounded by 6e-5, and parameters by 1e-7.
        expected = -RATE * m / (np.sqrt(left) + 1e-8)
        np.testing.assert_allclose(found[t - 1], expected, rtol=2e-4, atol=1e-6)
    assert kinds == ({True, False} if noise else {True})  # the floor was active


def test_the_correction_is_of_adam_and_off_by_default():
    assert OptimizerConfig().noise_floor is None
    with pytest.raises(ValueError, match="noise_floor goes with kind='adam' only"):
        OptimizerConfig(kind="sgd", noise_floor=0.1)
    for floor in (0.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="floor"):
            noise_corrected_adam(RATE, floor=floor)
        with pytest.raises(ValueError, match="noise_floor"):
            OptimizerConfig(noise_floor=floor)
    for decay in (1.0, -0.1, np.nan):
        with pytest.raises(ValueError, match="ema"):
            averaged(optax.sgd(0.1), decay)
    traced = optax.inject_hyperparams(noise_corrected_adam, "floor")(RATE, floor=FLOOR)
    assert moved(traced, [START], 1.0).shape == (1, 4)  # with b1, b2 and eps traced
    optimizer = built_optimizer(OptimizerConfig(noise_floor=0.1), 3)
    with pytest.raises(TypeError, match="noise_deviation"):
        optimizer.update(START, optimizer.init(START), START)


@pytest.mark.parametrize(
    ("kind", "schedule"), [("adam", "constant"), ("adamw", "cosine"), ("sgd", "cosine")]
)
def test_optimizers_take_steps(kind, schedule):
    config = OptimizerConfig(kind=kind, schedule=schedule, warmup_steps=3)
    optimizer = built_optimizer(config, 10)
    params = {"w": np.ones(3, np.float32)}
    state = optimizer.init(params)
    sizes, update = [], jax.jit(optimizer.update)
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(10):
            updates, state = update({"w": np.ones(3, np.float32)}, state, params)
            sizes.append(float(np.abs(updates["w"]).max()))
    assert 0 < sizes[0] < max(sizes)  # after the warm-up
    if kind == "adamw":
        assert sizes[-1] < 0.2 * max(sizes)


# --- The average of the parameters along a run ---


def test_the_average_is_the_weighted_mean_of_all_steps():
    decay, optimizer = 0.7, averaged(optax.sgd(0.1), 0.7)
    params = {"w": np.float32([1.0, -2.0])}
    state, seen = optimizer.init(params), []
    assert average_of(params, state) is params  # no step yet
    for step in range(5):
        gradient = {"w": np.float32([step, 1.0])}
        moves, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, moves)
        seen.append(np.asarray(params["w"], np.float64))
        weights = decay ** np.arange(len(seen))[::-1]
        expected = weights @ np.stack(seen) / weights.sum()
        np.testing.assert_allclose(average_of(params, state)["w"], expected, rtol=1e-5)
    # A decay of zero averages nothing; the average has the type of the parameters.
    optimizer = averaged(optax.sgd(0.1), 0)
    params = {"w": jax.numpy.ones(2, jax.numpy.bfloat16)}
    with jax.numpy_dtype_promotion("standard"):  # as `Trainer` has it
        moves, state = optimizer.update(gradient, optimizer.init(params), params)
        params = optax.apply_updates(params, moves)
    average = average_of(params, state)["w"]
    assert average.dtype == jax.numpy.bfloat16
    np.testing.assert_array_equal(average, params["w"])


@pytest.mark.slow
def test_a_run_releases_the_average():
    run = plain_trainer(num_steps=2, optimizer=averaged(optax.adam(0.05), 0.5))
    for _ in range(2):
        run.step()
    wanted = average_of(run.state.params, run.state.optimizer_state)
    released, last = (jax.tree.leaves(p) for p in (run.params, run.state.params))
    for average, one, other in zip(
        jax.tree.leaves(wanted), released, last, strict=True
    ):
        np.testing.assert_array_equal(one, average)
        assert np.any(one != other)
