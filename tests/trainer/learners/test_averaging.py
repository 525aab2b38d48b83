"""The average of the parameters along a run."""

import jax
import numpy as np
import optax
import pytest

from jaxdp_episodic.trainer.learners.optimizers import average_of, averaged
from training_runs import assert_same, plain_trainer


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


def test_zero_averages_nothing_and_low_precision_stays():
    optimizer = averaged(optax.sgd(0.1), 0)
    params = {"w": jax.numpy.ones(2, jax.numpy.bfloat16)}
    gradient = {"w": np.ones(2, np.float32)}
    with jax.numpy_dtype_promotion("standard"):  # as `Trainer` has it
        moves, state = optimizer.update(gradient, optimizer.init(params), params)
        params = optax.apply_updates(params, moves)
    average = average_of(params, state)["w"]
    assert average.dtype == jax.numpy.bfloat16
    np.testing.assert_array_equal(average, params["w"])


@pytest.mark.parametrize("decay", [1.0, -0.1, np.nan])
def test_bad_decays(decay):
    with pytest.raises(ValueError, match="ema"):
        averaged(optax.sgd(0.1), decay)


@pytest.mark.slow
def test_a_run_releases_the_average_and_resumes_it(tmp_path):
    def run(num_steps):
        optimizer = averaged(optax.adam(0.05), 0.5)
        return plain_trainer(num_steps=num_steps, optimizer=optimizer)

    whole, part, rest = run(4), run(4), run(4)
    whole.train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        part.train(tmp_path / "parts", checkpoint_every=2, on_step=_stop_after_two)
    rest.resume(tmp_path / "parts")
    rest.train(tmp_path / "parts")
    assert_same(whole, rest)
    last = jax.tree.leaves(whole.state.params)
    released = jax.tree.leaves(whole.params)
    assert any(np.any(a != b) for a, b in zip(last, released, strict=True))


def _stop_after_two(progress):
    if progress.step == 2:
        raise KeyboardInterrupt
