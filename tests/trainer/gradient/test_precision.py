"""Training has the precision of the parameters, with x64 on and off."""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.gradient.clipping import clip_by_norm
from jaxdp_episodic.trainer.gradient.discrete_noise import steps_in_norm
from jaxdp_episodic.trainer.gradient.precision import training_dtype
from jaxdp_episodic.trainer.learners.optimizers import averaged, noise_corrected_adam
from jaxdp_episodic.trainer.run.state import RunMismatchError
from jaxdp_episodic.training import Evaluation, PrivateGradient, Supervised
from rows import fast_and_slow
from training_runs import (
    classes,
    noised,
    plain_trainer,
    protonet,
    sinusoid_learner,
)

FLOATS = (np.float32, np.float64)


class Rows(NamedTuple):
    data: Any
    unit_mask: Any


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def linear_loss(params, unit):
    """Its gradient is the row itself."""
    return jnp.vdot(params, unit.data)


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


def test_without_x64_there_is_no_float64():
    with jax.enable_x64(False):
        assert training_dtype([np.zeros(2)]) == np.float32
        gradient, _ = released(np.zeros(2), np.ones((3, 2)))
        assert gradient.dtype == np.float32


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("of_params", "of_data", "of_mask", "units_at_once"),
    # Each type of parameters with each other type and each batch size.
    fast_and_slow(
        itertools.product(FLOATS, FLOATS, [*FLOATS, np.int64], [1, 2]),
        lambda params, data, mask, units: (
            params != data and mask in (data, np.int64) and (mask == data) == units % 2
        ),
    ),
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


def test_leaves_of_both_types_are_clipped_as_one(x64):
    leaves = [np.array([3.0], np.float32), np.array([4.0], np.float64)]
    clipped, norm, _ = jax.jit(clip_by_norm)(leaves, jnp.float32(1.0))
    assert norm == 5.0 and {leaf.dtype for leaf in clipped} == {np.dtype(np.float64)}
    np.testing.assert_allclose(
        np.concatenate(clipped), [0.6 * (1 - 1e-5), 0.8 * (1 - 1e-5)], rtol=1e-14
    )


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


def test_float32_noise_does_not_depend_on_x64():
    found = []
    for is_on in (False, True):
        with jax.enable_x64(is_on):
            gradient, _ = released(
                jnp.zeros(1_000, jnp.float32), np.zeros((1, 1_000)), noise=1.0
            )
            found.append(np.asarray(gradient))
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", FLOATS)
def test_discrete_noise_is_released_in_the_type(x64, kind):
    data = np.random.default_rng(0).normal(size=(4, 50))
    gradient, _ = released(jnp.zeros(50, kind), data, noise=1.0, kind="discrete")
    assert gradient.dtype == kind
    whole = np.asarray(gradient, np.float64) * steps_in_norm(50)
    rounded = np.abs(whole - np.rint(whole)).max()
    assert rounded < 1e-9 if kind == np.float64 else rounded > 1e-4


OPTIMIZERS = {
    "adamw": optax.adamw(optax.cosine_decay_schedule(0.01, 10)),
    "corrected": noise_corrected_adam(0.01, floor=0.1),
    "averaged": averaged(optax.sgd(0.01, momentum=0.9), 0.9),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    fast_and_slow(
        itertools.product(FLOATS, OPTIMIZERS),
        lambda kind, optimizer: (
            optimizer == ("corrected" if kind == np.float64 else "averaged")
        ),
    ),
)
def test_types_stay_in_a_run(x64, kind, optimizer):
    learner, params = protonet()
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, kind), params)
    run = plain_trainer(
        learner=(learner, params), optimizer=OPTIMIZERS[optimizer], num_steps=2
    )
    before = jax.tree.map(lambda leaf: leaf.dtype, run.state)
    run.step()
    run.step()
    assert jax.tree.map(lambda leaf: leaf.dtype, run.state) == before
    kinds = {leaf.dtype for leaf in jax.tree.leaves((run.state, run.params))}
    assert {k for k in kinds if k.kind == "f"} == {np.dtype(kind)}
    score = Evaluation(classes(seed=1), ways=3, shots=1, queries=2, num_episodes=20)
    assert 0 <= score(learner, run.params).mean <= 1


TASKS = jde.MultistageSampling(
    jde.Poisson("task", sampling_probability=0.5),
    jde.WithoutReplacement("example", size=4, population=6),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "coupled", "of_features"),
    fast_and_slow(
        itertools.product(FLOATS, [True, False], FLOATS),
        lambda kind, coupled, features: (
            kind != features and coupled == (kind == np.float64)
        ),
    ),
)
def test_regression_learns_from_either_type(x64, kind, coupled, of_features):
    plain = ExampleTable.from_records(
        np.linspace(-1, 1, 60)[:, None],
        np.linspace(-1, 1, 60),
        units={"task": np.arange(60) // 6},
    )
    table = ExampleTable(
        plain.features.astype(of_features), plain.targets, plain.population
    )
    learner, params = sinusoid_learner()
    if not coupled:
        learner = Supervised(learner.apply, task_loss="squared_error")
    run = plain_trainer(
        learner=(learner, jax.tree.map(lambda leaf: jnp.asarray(leaf, kind), params)),
        data=table,
        shots=2 if coupled else 0,
        step=jde.GaussianStep(
            TASKS, noise_multiplier=1.0, clip_unit="task" if coupled else "example"
        ),
        normalizer=10.0,
        num_steps=1,
    )
    diagnostics = run.step()
    assert math.isfinite(diagnostics["mean_loss"])
    assert type(diagnostics.pop("num_complete")) is int  # counted when it was drawn
    kinds = {leaf.dtype for leaf in jax.tree.leaves((run.params, diagnostics))}
    assert kinds == {np.dtype(kind)}
    if coupled:  # an evaluation would be another compilation
        score = Evaluation(table, ways=None, shots=2, queries=2, num_episodes=10)
        assert math.isfinite(score(learner, run.params).mean)


def test_a_float64_run_resumes_from_its_checkpoint(x64, tmp_path):
    learner, params = protonet()
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
    made = {"learner": (learner, params), "num_steps": 2}
    first = plain_trainer(**made)
    first.train(tmp_path)
    second = plain_trainer(**made)
    assert second.resume(tmp_path) == 2
    for one, two in zip(
        jax.tree.leaves(first.state), jax.tree.leaves(second.state), strict=True
    ):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("float32", "float64"),
        pytest.param("float32", "bfloat16", marks=pytest.mark.slow),
        ("float64", "float32"),
        ("float64", "float64"),
        pytest.param("float64", "bfloat16", marks=pytest.mark.slow),
        pytest.param("float32", "float32", marks=pytest.mark.slow),
    ],
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

    with pytest.raises(InterruptedError):
        of(first).train(tmp_path, checkpoint_every=1, on_step=stopped)
    other = of(then)
    if first == then:
        assert other.resume(tmp_path) == 2
        return
    with pytest.raises(RunMismatchError, match="another model or optimizer"):
        other.resume(tmp_path)
    assert other.num_steps_charged == 0
