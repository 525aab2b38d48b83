"""Networks: the convolution by slices, and modules as pure functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxdp_episodic as jde
from jaxdp_episodic.trainer.config.training_parts import ModelConfig
from jaxdp_episodic.trainer.learners.models import GroupNorm, built_module
from jaxdp_episodic.training import (
    MLP,
    ConvNet,
    Linear,
    PatchConv,
    ProtoNet,
    split_model,
)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("use_patches", "stride", "size"),
    [
        (True, 1, (8, 8)),
        (True, 2, (7, 10)),
        pytest.param(True, 3, (8, 8), marks=pytest.mark.slow),
        (True, 3, (7, 10)),
        (True, 3, (9, 6)),  # no output uses the last row and column
        (False, 2, (7, 10)),
        pytest.param(False, 3, (8, 8), marks=pytest.mark.slow),
    ],
)
def test_the_convolution_equals_flaxs(use_patches, stride, size):
    conv = PatchConv(2, 3, stride=stride, use_patches=use_patches, rngs=nnx.Rngs(0))
    conv.bias[...] = jnp.arange(3, dtype=jnp.float32)
    flax = nnx.Conv(2, 3, (3, 3), strides=stride, padding=1, rngs=nnx.Rngs(1))
    flax.kernel[...] = conv.kernel[...].reshape(3, 3, 2, 3)
    flax.bias[...] = conv.bias[...]
    images = np.random.default_rng(0).normal(size=(4, *size, 2)).astype(np.float32)
    found, expected = jax.jit(lambda given: (conv(given), flax(given)))(images)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_group_normalization_equals_flaxs():
    settings = {"num_groups": 2, "rngs": nnx.Rngs(0)}
    ours = GroupNorm(6, **settings)
    flax = nnx.GroupNorm(6, use_fast_variance=False, **settings)
    for each in (ours, flax):
        scale = jnp.arange(6, dtype=jnp.float32)
        each.scale[...], each.bias[...] = scale, scale**2
    images = np.random.default_rng(0).normal(3.0, size=(4, 3, 5, 6)).astype(np.float32)
    found, expected = jax.jit(lambda given: (ours(given), flax(given)))(images)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_second_derivatives_of_the_group_normalization_equal_flaxs():
    settings = {"num_groups": 2, "rngs": nnx.Rngs(0)}
    flax = nnx.GroupNorm(4, use_fast_variance=False, **settings)
    rng = np.random.default_rng(0)
    images = rng.normal(3.0, size=(2, 2, 3, 4)).astype(np.float32)
    weights, direction = rng.normal(size=(2, *images.shape)).astype(np.float32)

    def second(norm):
        def loss(images):
            return jnp.sum(weights * jnp.tanh(norm(images)))

        def along(images):
            return jnp.vdot(direction, jax.grad(loss)(images))

        return jax.jit(jax.grad(along))(images)

    expected = second(flax)
    assert np.min(np.abs(expected)) > 1e-4
    np.testing.assert_allclose(
        second(GroupNorm(4, **settings)), expected, rtol=1e-3, atol=1e-4
    )


@pytest.mark.slow
def test_images_of_an_episode_do_not_interact():
    apply, params = split_model(ConvNet((8, 8, 1), (4, 4), 5, rngs=nnx.Rngs(0)))
    images = np.random.default_rng(0).normal(size=(3, 8, 8, 1)).astype(np.float32)
    alone = np.concatenate([apply(params, images[i : i + 1]) for i in range(3)])
    np.testing.assert_allclose(apply(params, images), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_apply_uses_the_given_parameters():
    net = MLP(3, (4,) * 12, 2, rngs=nnx.Rngs(0))  # layers "0" to "11"
    apply, params = split_model(net)
    other = split_model(MLP(3, (4,) * 12, 2, rngs=nnx.Rngs(1)))
    inputs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    np.testing.assert_array_equal(apply(params, inputs), net(inputs))
    np.testing.assert_array_equal(apply(other[1], inputs), other[0](other[1], inputs))
    assert all(isinstance(key, str) for key in params["layers"])


def test_other_variables_are_constants():
    class Scaled(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.scale = nnx.Variable(jnp.float32(3.0))

        def __call__(self, inputs):
            return self.scale[...] * self.linear(inputs)

    apply, params = split_model(Scaled())
    assert set(params) == {"linear"}
    inputs = np.ones((1, 2), np.float32)
    np.testing.assert_array_equal(apply(params, inputs), Scaled()(inputs))


class Holding(nnx.Module):
    def __init__(self, part):
        self.part = part
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def __call__(self, inputs):
        return self.linear(inputs)


def test_batch_statistics_are_refused():
    norm = nnx.BatchNorm(2, use_running_average=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="batch statistics, got part/"):
        split_model(Holding(norm))


def test_random_state_is_refused():
    with pytest.raises(ValueError, match="random numbers, got part/"):
        split_model(Holding(nnx.Dropout(0.5, rngs=nnx.Rngs(0))))
    split_model(Holding(nnx.Dropout(0.5, deterministic=True)))  # draws nothing


def test_a_linear_embedding_starts_orthogonal():
    apply, params = split_model(Linear(12, 4, rngs=nnx.Rngs(0)))
    kernel = np.asarray(params["kernel"])
    np.testing.assert_allclose(kernel.T @ kernel, np.eye(4), atol=1e-6)
    images = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    made = apply(params, images)
    np.testing.assert_allclose(made, images.reshape(2, 12) @ kernel, rtol=1e-5)


def test_a_skip_keeps_the_inputs_beside_learned_features():
    """Without training, prototypes are nearly those of the inputs."""
    apply, params = split_model(Linear(12, 4, skip=True, rngs=nnx.Rngs(0)))
    images = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    made = np.asarray(apply(params, images))
    np.testing.assert_array_equal(made[:, :12], images.reshape(2, 12))
    kernel = np.asarray(params["kernel"])
    beside = 0.3 * images.reshape(2, 12) @ kernel
    np.testing.assert_allclose(made[:, 12:], beside, rtol=1e-5)
    assert apply != split_model(Linear(12, 4, rngs=nnx.Rngs(0)))[0]


def test_inputs_are_kept_by_default_for_few_episodes():
    def grouped(classes):
        one = jde.Poisson("episode", sampling_probability=1.0)
        two = jde.WithoutReplacement("example", size=2, population=9)
        return jde.GroupedClasses(
            num_classes=classes, ways=5, episodes=one, examples=two
        )

    default = ModelConfig(kind="linear")
    assert default.skips(grouped(149)) and not default.skips(grouped(150))
    assert not default.skips(jde.Poisson("task", sampling_probability=0.1))
    assert ModelConfig(kind="linear", skip=True).skips(grouped(150))
    assert not ModelConfig(kind="linear", skip=False).skips(grouped(149))


@pytest.mark.parametrize("embeds", [True, False])
def test_logits_have_no_skip(embeds):
    config = ModelConfig(kind="linear", skip=True)
    apply, params = split_model(built_module(config, (6,), 3, embeds=embeds))
    assert apply(params, np.ones((2, 6), np.float32)).shape == (2, 9 if embeds else 3)


def test_networks_of_equal_architecture_share_a_function():
    """They share compiled programs, but not with a network of other constants."""

    class Scaled(nnx.Module):
        def __init__(self, scale):
            self.layer, self.scale = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), scale

        def __call__(self, inputs):
            return self.layer(inputs) * self.scale

    def made(module):
        return split_model(module)[0]

    def net(seed=0, **changes):
        return ConvNet((8, 8, 1), (4,), 5, rngs=nnx.Rngs(seed), **changes)

    assert made(net()) == made(net(seed=1))
    assert hash(made(net())) == hash(made(net(seed=1)))
    assert made(net()) != made(net(use_patches=False))
    assert made(Scaled(2.0)) == made(Scaled(2.0)) != made(Scaled(3.0))
    for constant in (jnp.ones(3), np.ones(3), {"a": 1}):  # compared by identity
        apply = made(Scaled(constant))
        assert apply == apply != made(Scaled(constant))


def test_linen_modules_get_an_explanation():
    module = linen.Dense(3)
    with pytest.raises(TypeError, match=r"nnx.Module, got a Dense; one of flax.linen"):
        split_model(module)
    # As the message advises:
    inputs = np.ones((2, 4), np.float32)
    params = module.init(jax.random.key(0), inputs)["params"]
    learner = ProtoNet(lambda p, x: module.apply({"params": p}, x), ways=2)
    assert learner.apply(params, inputs).shape == (2, 3)
