"""Clip, sum, noise: oracles, the sensitivity, the noise, and the precision."""

import copy
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax_privacy import clipping

from jaxdp_episodic.trainer.config.training_parts import NOISES
from jaxdp_episodic.trainer.draw.generators import generator
from jaxdp_episodic.trainer.gradient import private_gradient
from jaxdp_episodic.trainer.gradient.clipping import clip_by_norm
from jaxdp_episodic.trainer.gradient.discrete_noise import steps_in_norm
from jaxdp_episodic.trainer.gradient.precision import training_dtype
from jaxdp_episodic.trainer.run.ledger import RunMismatchError
from jaxdp_episodic.training import (
    MAML,
    MLP,
    PrivateGradient,
    ProtoNet,
    classification_episode,
    split_model,
)
from training_runs import (
    KEY,
    Rows,
    assert_same,
    linear_loss,
    noised,
    plain_trainer,
    protonet,
)

WAYS, SLOTS, FEATURES = 3, 3, 4
PLAIN = {"noise_multiplier": 0.0, "normalizer": 1.0}
# Float32 sums; integer sums are tested in test_discrete_noise.py.
Gradient = functools.partial(PrivateGradient, noise="gaussian")


def rows(data, mask=None):
    data = np.asarray(data, np.float32)
    mask = np.ones(len(data)) if mask is None else mask
    return Rows(data, np.asarray(mask, np.float32))


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


# --- Against jax_privacy's clipped gradient ---


@functools.cache  # one function is compiled once
def episodic_loss(kind):
    apply, params = split_model(MLP(FEATURES, (), WAYS, rngs=nnx.Rngs(0)))
    learner = ProtoNet(apply, ways=WAYS) if kind == "protonet" else MAML(apply)

    def loss(params, unit):
        episode = classification_episode(
            unit.data, jnp.ones((WAYS, SLOTS), jnp.float32), shots=1
        )
        return learner.loss(params, episode)

    return loss, params


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "clip", "units_at_once"), [("protonet", 6.0, 1), ("maml", 0.75, 4)]
)
def test_the_sum_is_that_of_jax_privacy(kind, clip, units_at_once):
    loss, params = episodic_loss(kind)
    data = np.random.default_rng(0).normal(size=(6, WAYS, SLOTS, FEATURES))
    block = rows(data)
    oracle = clipping.clipped_grad(
        loss, l2_clip_norm=clip, keep_batch_dim=False, return_grad_norms=True
    )
    expected, aux = jax.jit(oracle)(params, block)  # op by op it takes seconds
    gradient = Gradient(loss, units_at_once=units_at_once)
    ours, private = noised(gradient, params, [block], l2_clip_norm=clip, **PLAIN)
    jax.tree.map(
        # Ours clips to C (1 - 1e-5).
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5),
        ours,
        expected,
    )
    norms = np.asarray(aux.grad_norms)
    assert 0 < np.mean(norms > clip) < 1  # clipped and not
    np.testing.assert_allclose(private["mean_norm"], norms.mean(), rtol=1e-5)
    np.testing.assert_allclose(private["share_clipped"], np.mean(norms > clip))


# --- Sensitivity ---


CLIP = jax.jit(clip_by_norm)


def test_rows_that_devices_cannot_share_are_refused():
    with pytest.raises(ValueError, match=r"multiple of the 4 device\(s\), got 3"):
        private_gradient._check_blocks([rows(np.ones((3, 2)))], 4)


@pytest.mark.slow
def test_many_numbers_are_summed_without_loss():
    # A running float32 sum of squares would stop at 2^24 and clip too little.
    row = jnp.ones(20_000_000, jnp.float32)
    clipped, norm, _ = jax.jit(clip_by_norm)([row], jnp.float32(1.0))
    assert norm == pytest.approx(math.sqrt(2e7), rel=1e-6)
    assert np.linalg.norm(np.asarray(clipped[0], np.float64)) <= 1.0


@pytest.mark.parametrize(("kind", "units_at_once"), [("protonet", 1), ("maml", 4)])
def test_one_episode_moves_the_sum_by_at_most_the_clip_norm(kind, units_at_once):
    loss, params = episodic_loss(kind)
    gradient = Gradient(loss, units_at_once=units_at_once)
    rng = np.random.default_rng(1)
    clip, largest = 0.05, 0.0

    def total(data, mask):
        blocks = [rows(data, mask)]
        sums, _ = noised(gradient, params, blocks, l2_clip_norm=clip, **PLAIN)
        return np.concatenate(
            [np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(sums)]
        )

    for _ in range(10):
        data = rng.normal(size=(6, WAYS, SLOTS, FEATURES)) * rng.choice([0.1, 1, 50])
        other = data.copy()
        other[2] = rng.normal(size=other[2].shape) * 10
        mask, without = np.ones(6), np.float64([1, 1, 0, 1, 1, 1])
        removed = np.linalg.norm(total(data, mask) - total(data, without))
        replaced = np.linalg.norm(total(data, mask) - total(other, mask))
        assert removed <= clip * (1 + 1e-5)  # float32 sums of six
        assert replaced <= 2 * clip * (1 + 1e-5)
        largest = max(largest, removed)
    assert largest > 0.99 * clip  # the bound is reached


@pytest.mark.parametrize("units_at_once", [1, 2])
def test_a_contribution_that_is_not_finite_is_zero(units_at_once):
    for bad in (np.nan, np.inf, -np.inf):
        data = np.float32([[0.1, 0.2], [bad, 0.3], [0.3, 0.1]])
        total, private = released(jnp.zeros(2), data, units_at_once=units_at_once)
        np.testing.assert_allclose(total, [0.4, 0.3], rtol=1e-6)
        assert private["num_not_finite"] == 1
        assert all(math.isfinite(value) for value in private.values())
    # In any leaf.
    tree = {"a": np.float32([1.0]), "b": np.float32([[np.nan]])}
    clipped, norm, finite = CLIP(tree, np.float32(1.0))
    assert not finite and norm == 0
    assert not np.any(clipped["a"]) and not np.any(clipped["b"])


def test_low_precision_gradients_are_summed_in_float32():
    data = np.full((600, 2), [1.0, 0.0])  # bfloat16 cannot count beyond 256
    block = Rows(jnp.asarray(data, jnp.bfloat16), np.ones(600, np.float32))
    start = jnp.zeros(2, jnp.bfloat16)
    total, _ = noised(Gradient(linear_loss), start, [block], l2_clip_norm=2.0, **PLAIN)
    assert total.dtype == jnp.float32 and total[0] == 600


# --- Masks, blocks, memory ---


@pytest.mark.parametrize("units_at_once", [1, 3])
def test_masked_rows_contribute_nothing(units_at_once):
    rng = np.random.default_rng(0)
    for mask in ([1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0], [0] * 5):
        data, present = rng.normal(size=(5, 3)), np.array(mask) > 0
        data[~present] = np.nan
        total, private = released(
            *(jnp.zeros(3), np.float32(data)),
            mask=np.float32(mask),
            clip=1e3,
            units_at_once=units_at_once,
        )
        np.testing.assert_allclose(total, data[present].sum(axis=0), rtol=1e-5)
        assert private["num_units"] == sum(mask)
        assert private["num_not_finite"] == 0


@pytest.mark.slow
def test_memory_does_not_grow_with_the_episodes():
    loss, params = episodic_loss("maml")
    sizes = []
    for number in (8, 256):
        gradient = Gradient(loss)
        block = rows(np.zeros((number, WAYS, SLOTS, FEATURES)))
        sizes.append(gradient.temporary_bytes(params, block))
    assert sizes[1] <= sizes[0] * 1.01, sizes


# --- Noise ---


def test_noise_is_one_stream_of_the_key_for_every_draw():
    """The leaves share NumPy's stream, which nobody else reads; also in empty draws."""
    shapes, gradient = [(400, 5), (300,), ()], Gradient(linear_loss)
    normal = 2.0 * generator(KEY).standard_normal(2_301)
    for start in (np.zeros, functools.partial(np.full, fill_value=np.nan)):
        noise = gradient.noise([start(s) for s in shapes], KEY, 2.0)
        found = [np.ravel(leaf) for leaf in noise.use("gaussian", 2.0, shapes)]
        np.testing.assert_array_equal(np.concatenate(found), normal)
    other = generator(KEY[::-1]).standard_normal(2_301)
    assert abs(np.corrcoef(normal, other)[0, 1]) < 5 / math.sqrt(2_301)
    released, _ = noised(
        gradient,
        jnp.zeros(2_301),
        [rows(np.zeros((2, 2_301)), [0, 0])],
        l2_clip_norm=3.0,
        noise_multiplier=2.0,
        normalizer=4.0,
    )
    np.testing.assert_allclose(released, normal * 3 / 4, rtol=1e-6)


# --- Bad input ---

MADE = {"devices", "units_at_once", "clipping"}


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"l2_clip_norm": 1e-30}, ValueError, "l2_clip_norm"),
        ({"l2_clip_norm": [1.0, 2.0]}, ValueError, "l2_clip_norm"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ({"noise_multiplier": 1e-30}, ValueError, "noise_multiplier"),
        ({"normalizer": 0.0}, ValueError, "normalizer"),
        ({"key": jax.random.key(0)}, TypeError, "key must be bytes"),
        ({"key": bytes(16)}, ValueError, "key must have 32 bytes, got 16"),
        ({"blocks": []}, ValueError, "blocks must not be empty"),
        ({"blocks": [rows(np.zeros((0, 2)))]}, ValueError, "rows of a block"),
        ({"devices": []}, ValueError, "number of devices must be a whole .* got 0"),
        ({"devices": "cpu"}, TypeError, "devices must be JAX devices, got 'c'"),
        ({"units_at_once": "a"}, TypeError, "units_at_once must be a number"),
        ({"clipping": 1.0}, TypeError, "clipping must be a ClippingConfig, got 1.0"),
    ],
)
def test_bad_input(changes, error, message):
    given = {"blocks": [rows(np.ones((2, 2)))], "l2_clip_norm": 1.0, **PLAIN, **changes}
    made = {name: given.pop(name) for name in MADE & changes.keys()}
    with pytest.raises(error, match=message):
        noised(Gradient(linear_loss, **made), jnp.zeros(2), **given)


# --- Noise is used once ---

SETTINGS = {"l2_clip_norm": 1.0, "noise_multiplier": 2.0, "normalizer": 1.0}


@pytest.mark.parametrize("kind", NOISES)
def test_noise_is_not_added_to_two_sums(kind):
    gradient, start = PrivateGradient(linear_loss, noise=kind), jnp.zeros(2)
    noise = gradient.noise(start, KEY, 2.0)
    with pytest.raises(TypeError, match="must not be copied"):
        copy.deepcopy(noise)
    gradient(start, [rows([[1.0, 2.0]])], noise, **SETTINGS)
    for other in ([[1.0, 2.0]], [[3.0, 0.0]]):
        with pytest.raises(ValueError, match="noise must be used only once"):
            gradient(start, [rows(other)], noise, **SETTINGS)


def test_noise_is_used_up_where_a_step_fails():
    """It is not known what the devices did with it."""

    def failing(params, unit):
        raise RuntimeError("device")

    gradient, start = Gradient(failing), jnp.zeros(2)
    noise = gradient.noise(start, KEY, 2.0)
    with pytest.raises(RuntimeError, match="device"):
        gradient(start, [rows([[1.0, 2.0]])], noise, **SETTINGS)
    with pytest.raises(ValueError, match="noise must be used only once"):
        Gradient(linear_loss)(start, [rows([[1.0, 2.0]])], noise, **SETTINGS)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"noise_multiplier": 1.0}, ValueError, "for noise_multiplier 1.0, got .* 2.0"),
        ({"kind": "discrete"}, ValueError, "for kind 'discrete', got .* 'gaussian'"),
        ({"start": jnp.zeros((2, 1))}, ValueError, r"shapes \[\(2, 1\)\], got"),
        ({"noise": np.zeros(2)}, TypeError, "must be made by PrivateGradient.noise"),
    ],
)
def test_noise_drawn_for_another_step_is_refused(changes, error, message):
    start = changes.get("start", jnp.zeros(2))
    noise = changes.get("noise", Gradient(linear_loss).noise(jnp.zeros(2), KEY, 2.0))
    gradient = PrivateGradient(linear_loss, noise=changes.get("kind", "gaussian"))
    settings = {**SETTINGS, "noise_multiplier": changes.get("noise_multiplier", 2.0)}
    data = np.ones((1, *start.shape))
    with pytest.raises(error, match=message):
        gradient(start, [rows(data)], noise, **settings)


def test_sum_and_noise_are_rounded_once():
    """They are added in float64 and rounded to float32 once."""
    start = jnp.zeros(4_000, jnp.float32)
    data = np.random.default_rng(0).normal(size=(3, 4_000))
    settings = {"l2_clip_norm": 1e3, "noise_multiplier": 1e-3, "normalizer": 3.0}
    gradient = Gradient(linear_loss)
    total, _ = noised(gradient, start, [rows(data)], l2_clip_norm=1e3, **PLAIN)
    found, _ = noised(gradient, start, [rows(data)], **settings)
    normal = generator(KEY).standard_normal(4_000)
    exact = (np.float64(total) + np.float32(1e3) * (1e-3 * normal)) / 3.0
    np.testing.assert_array_equal(found, exact.astype(np.float32))


# --- The precision is that of the parameters, with x64 on and off ---

FLOATS = (np.float32, np.float64)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


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
    [(np.float32, np.float64, np.float64, 1), (np.float64, np.float32, np.int64, 2)],
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
def test_noise_is_released_in_the_type(x64, kind):
    data = np.random.default_rng(0).normal(size=(4, 50))
    gradient, _ = released(jnp.zeros(50, kind), data, noise=1.0, kind="discrete")
    assert gradient.dtype == kind
    whole = np.asarray(gradient, np.float64) * steps_in_norm(50)
    rounded = np.abs(whole - np.rint(whole)).max()
    assert rounded < 1e-9 if kind == np.float64 else rounded > 1e-4
    gradient, _ = released(jnp.zeros(50, kind), data, noise=1.0)
    assert gradient.dtype == kind
    # Float64 noise is not float32 noise with trailing zeros.
    as_single = np.asarray(gradient) == np.float32(gradient)
    assert as_single.all() if kind == np.float32 else not as_single.any()


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
