"""Training has the precision of the parameters, with x64 on and off."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp_episodic.trainer.gradient.clipping import clip_by_norm
from jaxdp_episodic.trainer.gradient.discrete_noise import steps_in_norm
from jaxdp_episodic.trainer.gradient.precision import training_dtype
from jaxdp_episodic.trainer.learners.optimizers import averaged, noise_corrected_adam
from jaxdp_episodic.trainer.run.state import RunMismatchError
from jaxdp_episodic.training import Evaluation, PrivateGradient
from training_runs import (
    Rows,
    assert_same,
    classes,
    linear_loss,
    noised,
    plain_trainer,
    protonet,
)

FLOATS = (np.float32, np.float64)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def released(params, data, *, mask=None, clip=1.0, noise=0.0, kind="gaussian", **more):
    mask = np.ones(len(data)) if mask is None else mask
    return noised(
        PrivateGradient(linear_loss, noise=kind, **more),
        params,
        [Rows(data, mask)],
        l2_clip_norm=clip,
        noise_multiplier=noise,
        normalizer=1.0,
    )


def test_float64_where_a_parameter_is(x64):
    one = np.zeros(2, np.float32)
    assert training_dtype([one, one.astype(np.float16)]) == np.float32
    assert training_dtype([one, one.astype(np.float64)]) == np.float64
    assert training_dtype([]) == np.float32
    with jax.enable_x64(False):
        assert training_dtype([np.zeros(2)]) == np.float32
        gradient, _ = released(np.zeros(2), np.ones((3, 2)))
        assert gradient.dtype == np.float32
    # Leaves of both types are clipped as one.
    leaves = [np.array([3.0], np.float32), np.array([4.0], np.float64)]
    clipped, norm, _ = jax.jit(clip_by_norm)(leaves, jnp.float32(1.0))
    assert norm == 5.0 and {leaf.dtype for leaf in clipped} == {np.dtype(np.float64)}
    np.testing.assert_allclose(
        np.concatenate(clipped), [0.6 * (1 - 1e-5), 0.8 * (1 - 1e-5)], rtol=1e-14
    )


@pytest.mark.parametrize(
    ("of_params", "of_data", "of_mask", "units_at_once"),
    [
        (np.float32, np.float64, np.float64, 1),
        (np.float64, np.float32, np.int64, 2),
    ],
)
def test_data_are_cast_to_the_parameters_type(
    x64, of_params, of_data, of_mask, units_at_once
):
    data = np.random.default_rng(0).normal(size=(5, 3)).astype(of_data)
    mask = np.array([1, 1, 0, 1, 1], of_mask)
    gradient, private = released(
        jnp.zeros(3, of_params), data, mask=mask, units_at_once=units_at_once
    )
    assert gradient.dtype == of_params
    assert {value.dtype for value in private.values()} == {np.dtype(of_params)}
    drawn = np.float64(data[mask > 0])
    norms = np.linalg.norm(drawn, axis=1, keepdims=True)
    expected = np.sum(drawn * np.minimum((1 - 1e-5) / norms, 1), axis=0)
    tight = {np.float32: 1e-6, np.float64: 1e-14}[of_params]
    np.testing.assert_allclose(gradient, expected, rtol=tight, atol=tight)
    assert private["num_units"] == 4
    np.testing.assert_allclose(private["mean_norm"], norms.mean(), rtol=tight)


@pytest.mark.parametrize("clip", [1e-18, 1.0, 1e18])
@pytest.mark.parametrize("kind", FLOATS)
def test_a_contribution_never_exceeds_the_clip_norm(x64, kind, clip):
    """Over the whole range of both types; the clip norm may have the other type."""
    clipped_of = jax.jit(clip_by_norm)
    rng = np.random.default_rng(0)
    most = float(np.finfo(kind).max)
    for scale in (math.sqrt(1 / most), 1e-30, 1e-3, 1.0, 1e30, most / 10, most):
        row = (scale * rng.uniform(-1, 1, size=30)).astype(kind)
        for of_clip in FLOATS:
            clipped, norm, finite = clipped_of([row[:10], row[10:]], of_clip(clip))
            size = math.hypot(*np.concatenate(clipped).tolist())
            exact = math.hypot(*row.tolist())
            assert finite and size <= clip
            assert clipped[0].dtype == norm.dtype == kind
            assert size == pytest.approx(min(exact, clip), rel=3e-5, abs=1e-36)


@pytest.mark.parametrize("kind", FLOATS)
def test_noise_has_the_type_and_its_scale(x64, kind):
    number = 20_000
    data, mask = np.zeros((1, number)), np.zeros(1)
    gradient, _ = released(
        jnp.zeros(number, kind), data, mask=mask, clip=2.0, noise=1.5
    )
    assert gradient.dtype == kind
    sample = np.asarray(gradient, np.float64) / 3.0
    # Five standard errors each: a false alarm in 1 of 1.7 million.
    assert abs(sample.mean()) < 5 / math.sqrt(number)
    assert abs(sample.var() - 1) < 5 * math.sqrt(2 / number)
    # Float64 noise is not float32 noise with trailing zeros.
    as_single = np.mean(sample * 3.0 == np.float32(sample * 3.0))
    assert as_single == 1 if kind == np.float32 else as_single < 1e-3


@pytest.mark.parametrize("kind", FLOATS)
def test_discrete_noise_is_released_in_the_type(x64, kind):
    data = np.random.default_rng(0).normal(size=(4, 50))
    gradient, _ = released(jnp.zeros(50, kind), data, noise=1.0, kind="discrete")
    assert gradient.dtype == kind
    whole = np.asarray(gradient, np.float64) * steps_in_norm(50)
    rounded = np.abs(whole - np.rint(whole)).max()
    assert rounded < 1e-9 if kind == np.float64 else rounded > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        (np.float64, noise_corrected_adam(0.01, floor=0.1)),
        (np.float32, averaged(optax.sgd(0.01, momentum=0.9), 0.9)),
    ],
)
def test_types_stay_in_a_run(x64, kind, optimizer):
    learner, params = protonet()
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, kind), params)
    run = plain_trainer(learner=(learner, params), optimizer=optimizer, num_steps=2)
    before = jax.tree.map(lambda leaf: leaf.dtype, run.state)
    run.step()
    run.step()
    assert jax.tree.map(lambda leaf: leaf.dtype, run.state) == before
    kinds = {leaf.dtype for leaf in jax.tree.leaves((run.state, run.params))}
    assert {k for k in kinds if k.kind == "f"} == {np.dtype(kind)}
    score = Evaluation(classes(seed=1), ways=3, shots=1, queries=2, num_episodes=20)
    assert 0 <= score(learner, run.params).mean <= 1


@pytest.mark.parametrize(
    ("first", "then"),
    [("float32", "float64"), ("float64", "float32"), ("float64", "float64")],
)
def test_parameters_of_another_type_are_another_run(x64, tmp_path, first, then):
    """Otherwise a charged step would be released twice, with other noise or sums."""

    def of(kind):
        learner, params = protonet()
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, kind), params)
        return plain_trainer(learner=(learner, params), num_steps=3)

    def stopped(progress):
        if progress.step == 2:
            raise InterruptedError

    run, other = of(first), of(then)
    with pytest.raises(InterruptedError):
        run.train(tmp_path, checkpoint_every=1, on_step=stopped)
    if first == then:
        assert other.resume(tmp_path) == 2
        assert_same(run, other)
        return
    with pytest.raises(RunMismatchError, match="another model or optimizer"):
        other.resume(tmp_path)
    assert other.num_steps_charged == 0
