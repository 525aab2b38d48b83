"""Small trained parts of frozen networks: their parameters and releases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxdp_episodic.tools.train.run import run_training
from jaxdp_episodic.trainer.config.training_parts import ModelConfig
from jaxdp_episodic.trainer.learners.adapted import adapted, film, merged
from jaxdp_episodic.trainer.learners.learners import ProtoNet
from jaxdp_episodic.trainer.learners.models import MLP, ConvNet, Linear, split_model
from jaxdp_episodic.training import load_release, read_config
from training_runs import TINY

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
    ("conv", "head"): set(),
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
    made, wrt = adapted(module, train, 3, 0)
    apply, params = split_model(made, wrt=wrt)
    assert paths(params) == TRAINED[network, train] | HEAD
    # At the start it equals the network; later it merges into one without adapters.
    np.testing.assert_allclose(apply(params, IMAGES), module(IMAGES), atol=1e-6)
    params = jax.tree.map(jnp.float32, moved(params))
    whole = merged(apply.module(params))
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
    made = film(module, head="last")
    apply, params = split_model(made)
    norm = {"norm/scale", "norm/bias"}
    assert paths(params) == norm | {"last/kernel", "last/bias"}
    assert apply.module(params).layer.kernel[...].dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    assert paths(split_model(film(module, head=None))[1]) == norm
    assert not jax.tree.leaves(nnx.state(module, type(made.norm.scale)))  # a copy


@pytest.mark.parametrize(
    ("module", "given", "message"),
    [
        (lambda: Pretrained(nnx.Rngs(0)), {}, "head must name the attribute .*'head'"),
        (
            lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
            {"head": None},
            "besides its head",
        ),
        (dict, {}, "must be a flax.nnx.Module, got a dict"),
    ],
)
def test_networks_without_film_layers_are_refused(module, given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        film(module(), **given)


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
        ValueError, match="wrt must be true of a path, got none of body"
    ):
        split_model((dense, whole), wrt=lambda path: False)
    with pytest.raises(TypeError, match="params must be nested dictionaries"):
        split_model((dense, [ROWS]), wrt=lambda path: True)


def test_a_single_layer_has_no_body_to_freeze():
    with pytest.raises(ValueError, match="train must be 'all' with kind='linear'"):
        ModelConfig(kind="linear", train="head")
    assert split_model(Linear(4, 2, rngs=nnx.Rngs(0)))[1].keys() == {"kernel"}


# --- A run, its release, and runs that start from it ---


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """A release from whose parameters other runs start."""
    folder = tmp_path_factory.mktemp("public")
    steps = TINY.replace("[evaluation]", "[evaluation]\nselect = false")
    (folder / "tiny.toml").write_text(steps)
    run_training(read_config(folder / "tiny.toml"), folder / "body", base=folder)
    return folder


@pytest.mark.few(1)
@pytest.mark.parametrize("train", ["film", "lora", "head"])
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
def test_a_run_from_another_network_is_not_resumed(public, tmp_path):
    config = read_config(public / "tiny.toml")
    model = dataclasses.replace(config.model, channels=(6,), parameters="body/release")
    config = dataclasses.replace(config, model=model)
    with pytest.raises(
        ValueError, match=r"blocks/0/conv/bias of shape \(6,\), got \(4"
    ):
        run_training(config, tmp_path / "run", base=public)
    gone = dataclasses.replace(model, parameters="nowhere.npz")
    with pytest.raises(OSError, match="nowhere"):
        run_training(dataclasses.replace(config, model=gone), tmp_path, base=public)


@pytest.mark.slow
def test_a_release_of_a_users_film_needs_the_same_body(public, tmp_path):
    config = read_config(public / "tiny.toml")
    body = film(ConvNet((14, 14, 1), (4,), 4, rngs=nnx.Rngs(5)))
    result = run_training(config, tmp_path / "run", base=public, model=body)
    assert isinstance(result.trainer.learner, ProtoNet)
    assert paths(result.trainer.params) == HEAD | {
        "blocks/0/norm/scale",
        "blocks/0/norm/bias",
    }
    release = load_release(tmp_path / "run" / "release", model=body)
    assert release.embed(np.zeros((1, *release.example_shape), np.float32)).size
