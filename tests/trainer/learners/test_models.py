"""Networks: built-in layers, pure functions, and small trained parts of frozen ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxdp_episodic as jde
from jaxdp_episodic.tools.train.run import run_training
from jaxdp_episodic.trainer.config.training_parts import ModelConfig
from jaxdp_episodic.trainer.learners import models
from jaxdp_episodic.training import (
    MLP,
    ConvNet,
    Linear,
    PatchConv,
    ProtoNet,
    load_release,
    read_config,
    split_model,
)
from training_runs import TINY


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("use_patches", "stride", "size"),
    [
        (True, 2, (7, 10)),
        (True, 1, (8, 8)),
        (True, 3, (9, 6)),  # no output uses the last row and column
        (False, 2, (7, 10)),
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


@pytest.mark.few(1)
@pytest.mark.parametrize("order", [0, 2])
def test_the_group_normalization_and_its_derivatives_equal_flaxs(order):
    rng, settings = np.random.default_rng(0), {"num_groups": 2, "rngs": nnx.Rngs(0)}
    images = rng.normal(3.0, size=(2, 2, 3, 4)).astype(np.float32)
    weights, direction = rng.normal(size=(2, *images.shape)).astype(np.float32)

    def of(norm):
        norm.scale[...], norm.bias[...] = jnp.arange(1.0, 5.0), jnp.arange(4.0) ** 2

        def loss(images):
            return jnp.sum(weights * jnp.tanh(norm(images)))

        def along(images):
            return jnp.vdot(direction, jax.grad(loss)(images))

        return jax.jit(jax.grad(along) if order else norm)(images)

    expected = of(nnx.GroupNorm(4, use_fast_variance=False, **settings))
    assert np.min(np.abs(expected)) > 1e-4
    close = {"rtol": 1e-3, "atol": 1e-4} if order else {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(of(models.GroupNorm(4, **settings)), expected, **close)


def test_a_linear_embedding_starts_orthogonal_and_may_keep_its_inputs():
    """With a skip prototypes are nearly those of the inputs, before any training."""
    apply, params = split_model(Linear(12, 4, rngs=nnx.Rngs(0)))
    kernel = np.asarray(params["kernel"])
    np.testing.assert_allclose(kernel.T @ kernel, np.eye(4), atol=1e-6)
    images = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    flat = images.reshape(2, 12)
    np.testing.assert_allclose(apply(params, images), flat @ kernel, rtol=1e-5)
    skipping, params = split_model(Linear(12, 4, skip=True, rngs=nnx.Rngs(0)))
    made = np.asarray(skipping(params, images))
    np.testing.assert_array_equal(made[:, :12], flat)
    beside = 0.3 * flat @ np.asarray(params["kernel"])
    np.testing.assert_allclose(made[:, 12:], beside, rtol=1e-5)
    assert skipping != apply
    config = ModelConfig(kind="linear", skip=True)
    for embeds, width in ((True, 9), (False, 3)):  # logits have no skip
        apply, params = split_model(models.built_module(config, (6,), 3, embeds=embeds))
        assert apply(params, np.ones((2, 6), np.float32)).shape == (2, width)


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


# --- Small trained parts of frozen networks ---

IMAGES = np.random.default_rng(0).normal(size=(5, 14, 14, 1)).astype(np.float32)
HEAD = {"head/bias", "head/kernel"}
NETWORKS = {
    "conv": lambda: ConvNet((14, 14, 1), (8, 8), 6, rngs=nnx.Rngs(0)),
    "mlp": lambda: MLP(196, (10, 7), 6, rngs=nnx.Rngs(0)),
}
# Paths of trained parameters besides the head.
TRAINED = {
    ("conv", "film"): {
        f"blocks/{i}/norm/{n}" for i in (0, 1) for n in ("scale", "bias")
    },
    ("mlp", "film"): {f"layers/{i}/{n}" for i in (0, 1) for n in ("scale", "shift")},
    ("conv", "lora"): {f"blocks/{i}/conv/{n}" for i in (0, 1) for n in ("down", "up")},
    ("mlp", "lora"): {f"layers/{i}/{n}" for i in (0, 1) for n in ("down", "up")},
    ("mlp", "head"): set(),
}


def paths(params):
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in leaves}


def moved(params):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), params)


@pytest.mark.few(1)
@pytest.mark.parametrize(("network", "train"), TRAINED)
def test_trained_parameters_of_a_built_in_network(network, train):
    module = NETWORKS[network]()
    made, wrt = models.adapted(module, train, 3, 0)
    apply, params = split_model(made, wrt=wrt)
    assert paths(params) == TRAINED[network, train] | HEAD
    # At the start it equals the network; later it merges into one without adapters.
    np.testing.assert_allclose(apply(params, IMAGES), module(IMAGES), atol=1e-6)
    params = jax.tree.map(jnp.float32, moved(params))
    whole = models.merged(apply.module(params))
    np.testing.assert_allclose(whole(IMAGES), apply(params, IMAGES), atol=1e-5)
    assert paths(split_model(whole, wrt=nnx.Param)[1]) == paths(split_model(module)[1])
    assert np.abs(whole(IMAGES) - module(IMAGES)).max() > 0.01


HALF = {"param_dtype": jnp.bfloat16, "dtype": jnp.float32}


class Pretrained(nnx.Module):
    """A network with its own statistics, in half precision."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 3, **HALF, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.off = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, inputs):
        return self.last(self.off(self.norm(self.layer(inputs))))


class Coupled(Pretrained):
    """A network that uses batch statistics in every mode."""

    def __call__(self, inputs):
        return self.last(self.norm(self.layer(inputs), use_running_average=False))


ROWS = np.random.default_rng(3).normal(size=(6, 4)).astype(np.float32)


def test_layers_with_state_in_evaluation_mode_are_constants():
    module = Pretrained(nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"batch statistics, .*norm/.* module.eval\(\)"
    ):
        split_model(module)
    module.norm.use_running_average = True
    with pytest.raises(ValueError, match=r"random numbers, .*off/.* module.eval\(\)"):
        split_model(module)
    module.eval()
    apply, params = split_model(module)
    together = apply(params, ROWS)
    alone = [apply(params, row[None])[0] for row in ROWS]
    np.testing.assert_allclose(together, np.stack(alone), atol=1e-6)
    coupled = Coupled(nnx.Rngs(0))
    coupled.eval()
    apply, params = split_model(coupled)
    with pytest.raises(ValueError, match="must not change norm/"):
        apply(params, ROWS)


def test_a_frozen_body_keeps_its_precision():
    module = Pretrained(nnx.Rngs(0))
    module.eval()
    made = models.film(module, head="last")
    apply, params = split_model(made)
    norm = {"norm/scale", "norm/bias"}
    assert paths(params) == norm | {"last/kernel", "last/bias"}
    assert apply.module(params).layer.kernel[...].dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    assert paths(split_model(models.film(module, head=None))[1]) == norm
    assert not jax.tree.leaves(nnx.state(module, type(made.norm.scale)))  # a copy


def test_networks_without_film_layers_are_refused():
    for module, given, message in (
        (Pretrained(nnx.Rngs(0)), {}, "head must name the attribute .*'head'"),
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), {"head": None}, "besides its head"),
        ({}, {}, "must be a flax.nnx.Module, got {}"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            models.film(module, **given)
    with pytest.raises(ValueError, match="train must be 'all' with kind='linear'"):
        ModelConfig(kind="linear", train="head")


class Dense(linen.Module):
    @linen.compact
    def __call__(self, inputs):
        return linen.Dense(2, name="head")(linen.Dense(4, name="body")(inputs))


def test_a_filter_chooses_trained_parameters_of_a_module():
    module = NETWORKS["mlp"]()
    module.layers[0] = nnx.LoRALinear(196, 10, lora_rank=2, rngs=nnx.Rngs(1))
    apply, params = split_model(module, wrt=nnx.LoRAParam)
    assert paths(params) == {"layers/0/lora/lora_a", "layers/0/lora/lora_b"}
    np.testing.assert_array_equal(apply(params, IMAGES), module(IMAGES))
    with pytest.raises(ValueError, match="wrt must name a parameter to train"):
        split_model(NETWORKS["mlp"](), wrt=nnx.LoRAParam)


def test_paths_choose_trained_parameters_of_other_models():
    dense = Dense()
    whole = dense.init(jax.random.key(0), ROWS)["params"]
    apply, params = split_model((dense, whole), wrt=lambda path: path[0] == "head")
    assert paths(params) == HEAD
    expected = dense.apply({"params": whole}, ROWS)
    np.testing.assert_array_equal(apply(params, ROWS), expected)
    gradient = jax.grad(lambda p: jnp.sum(apply(p, ROWS)))(params)
    assert paths(gradient) == HEAD
    apply, params = split_model((dense, whole))
    np.testing.assert_array_equal(apply(params, ROWS), expected)
    with pytest.raises(
        ValueError, match="wrt must be true for a path, got none of body"
    ):
        split_model((dense, whole), wrt=lambda path: False)
    with pytest.raises(TypeError, match="params must be nested dictionaries"):
        split_model((dense, [ROWS]), wrt=lambda path: True)


# --- A run, its release, and runs that start from it ---


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """A release from whose parameters other runs start."""
    folder = tmp_path_factory.mktemp("public")
    steps = TINY.replace("[evaluation]", "[evaluation]\nselect = false")
    (folder / "tiny.toml").write_text(steps)
    run_training(read_config(folder / "tiny.toml"), folder / "body", base=folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("train", ["film", "lora"])
def test_a_release_is_a_plain_network(public, tmp_path, train):
    config = read_config(public / "tiny.toml")
    model = {"parameters": "body/release", "train": train, "rank": 2}
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, **model)
    )
    result = run_training(config, tmp_path / "run", base=public)
    body = dict(np.load(public / "body" / "release" / "parameters.npz"))
    before = result.trainer.stages()[1]
    assert before.name == "initial" and HEAD <= paths(before.params)
    np.testing.assert_array_equal(before.params["head"]["kernel"], body["head/kernel"])
    stage = result.trainer.released
    assert stage.name == "steps"
    release = load_release(tmp_path / "run" / "release")
    found = dict(np.load(tmp_path / "run" / "release" / "parameters.npz"))
    assert found.keys() == body.keys()
    kernel = "blocks/0/conv/kernel"
    assert np.array_equal(found[kernel], body[kernel]) == (train != "lora")
    images = np.random.default_rng(0).random((3, *release.example_shape), np.float32)
    embedded = stage.learner.embedding(stage.params, images)
    np.testing.assert_allclose(release.embed(images), embedded, atol=1e-5)
    # Its predictions equal those by prototypes of the run's embeddings.
    apart = np.square(embedded[2:, None] - embedded[None, :2]).sum(axis=2)
    scores = release.classify(images[:2], [0, 1], images[2:]).scores
    odds = np.log(scores[:, 0]) - np.log(scores[:, 1])
    np.testing.assert_allclose(odds, apart[:, 1] - apart[:, 0], atol=1e-4)
    assert len(result.trainer.run["settings"]["model"]["parameters"]) == 64  # a hash


@pytest.mark.slow
def test_a_release_of_a_users_film_needs_the_same_body(public, tmp_path):
    config = read_config(public / "tiny.toml")
    body = models.film(ConvNet((14, 14, 1), (4,), 4, rngs=nnx.Rngs(5)))
    result = run_training(config, tmp_path / "run", base=public, model=body)
    assert isinstance(result.trainer.learner, ProtoNet)
    assert paths(result.trainer.params) == HEAD | {
        "blocks/0/norm/scale",
        "blocks/0/norm/bias",
    }
    release = load_release(tmp_path / "run" / "release", model=body)
    assert release.embed(np.zeros((1, *release.example_shape), np.float32)).size
