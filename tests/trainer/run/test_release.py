"""Releases: nothing private, and predictions equal to those of the evaluation."""

import dataclasses
import json
import math
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from crash_rigs import ROOT
from jaxdp_episodic.trainer.data.built_in import make_sinusoids
from jaxdp_episodic.trainer.data.sources import Glyphs
from jaxdp_episodic.trainer.learners.episode import (
    classification_episode,
    regression_episode,
)
from jaxdp_episodic.trainer.learners.features import FixedFeatures
from jaxdp_episodic.trainer.run.evaluation import for_ways
from jaxdp_episodic.trainer.run.loading import load_parameters, load_release
from jaxdp_episodic.trainer.run.release import DESCRIPTION
from jaxdp_episodic.trainer.run.report import run_statement
from jaxdp_episodic.training import (
    MLP,
    ProtoNet,
    Trainer,
    read_config,
    run_training,
    split_model,
)
from training_runs import (
    CLASSIFIER,
    TINY,
    classes,
    plain_trainer,
    protonet,
    sinusoid_learner,
    tree_step,
)

LINEAR = (
    TINY.replace('kind = "conv_embedding"\nchannels = [4]', 'kind = "linear"')
    + '[features]\nkind = "wavelets"\n[start]\nkind = "plda"\nwithin = [0.7]\n'
)
MAML = TINY.replace("protonet", "maml").replace("conv_embedding", "conv_classifier")


def few(ways=4, shots=1, queries=2):
    """Support, labels, queries and their classes, of held-out glyphs."""
    data = Glyphs(small=True).load("validation")
    rows = np.flatnonzero(data.class_places < ways).reshape(ways, -1)
    rows = rows[:, : shots + queries]
    features = data.features[rows]
    ids = data.unit_column("class")[rows]
    return features, ids, shots


def check_against_learner(release, learner, params, task, *, seen=None):
    """A release's answers for a task equal the learner's for the episode."""
    inputs, ids, shots = task
    support, queries = (
        part.reshape(-1, *inputs.shape[2:])
        for part in (inputs[:, :shots], inputs[:, shots:])
    )
    given = release.classify(support, ids[:, :shots].ravel(), queries)
    seen = inputs if seen is None else seen
    mask = jnp.ones(seen.shape[:2], jnp.float32)
    episode = classification_episode(jnp.asarray(seen), mask, shots=shots)
    logits = np.asarray(for_ways(learner, len(inputs)).predict(params, episode))
    fitted = release.calibration
    temperature = 1.0 if fitted is None else fitted.temperature(shots)
    wanted = np.asarray(jax.nn.softmax(logits / temperature))
    np.testing.assert_allclose(given.scores, wanted, rtol=2e-4, atol=1e-5)
    assert given.classes.tolist() == sorted(set(ids.ravel().tolist()))
    best = given.classes[given.scores.argmax(axis=1)]
    np.testing.assert_array_equal(given.labels, best)
    np.testing.assert_allclose(given.scores.sum(axis=1), 1, rtol=1e-5)
    return given


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run from Python, of points in the plane, with its release."""
    folder = tmp_path_factory.mktemp("plain")
    run = plain_trainer(num_steps=2)
    run.train(folder / "run")
    run.release(folder / "release")
    return run, folder / "release"


@pytest.fixture
def copied(plain, tmp_path):
    """A copy of the release, to damage."""
    shutil.copytree(plain[1], tmp_path / "release")
    return tmp_path / "release"


MAML_OF = {"type": "MAML", "apply": "model"}


def own_mlp():
    """The model of the run, made again."""
    return protonet(seed=5)[0].apply, protonet(seed=5)[1]


def edit(folder, **changes):
    path = folder / DESCRIPTION
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | changes))


# --- Round trips ---


def test_a_release_of_a_run_from_python_is_used(plain):
    run, folder = plain
    release = load_release(folder, model=own_mlp())
    assert release.stage == run.released.name and not release.is_regression
    assert release.facts["steps"] == 2 and release.statement.startswith("# Privacy")
    jax.tree.map(np.testing.assert_array_equal, release.params, run.released.params)
    data = classes(seed=3)
    inputs = data.features.reshape(30, 6, 2)[:3, :4]
    ids = data.unit_column("class").reshape(30, 6)[:3, :4]
    check_against_learner(release, run.learner, run.params, (inputs, ids, 2))
    # More classes than in training, of unequal sizes.
    given = release.classify(
        data.features[:24], data.unit_column("class")[:24], data.features[24:27]
    )
    assert given.scores.shape == (3, 4) and given.labels.dtype == ids.dtype
    embedded = release.embed(data.features[:7])
    wanted = run.learner.apply(run.params, jnp.asarray(data.features[:7]))
    np.testing.assert_allclose(embedded, wanted, rtol=1e-5)
    assert embedded.dtype == np.float32


def test_blocks_and_padding_change_nothing(plain, monkeypatch):
    release = load_release(plain[1], model=own_mlp())
    data, labels = classes(seed=3), classes(seed=3).unit_column("class")
    whole = release.classify(data.features[:9], labels[:9], data.features[9:])
    monkeypatch.setattr("jaxdp_episodic.trainer.run.release._QUERIES", 8)
    parts = release.classify(data.features[:9], labels[:9], data.features[9:])
    np.testing.assert_allclose(whole.scores, parts.scores, rtol=1e-5)
    rows = [release.embed(data.features[i : i + 1]) for i in range(3)]
    np.testing.assert_allclose(
        np.concatenate(rows), release.embed(data.features[:3]), rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "maml", "classifier"])
def test_a_release_of_a_config_needs_nothing_else(tmp_path, kind, monkeypatch):
    classifier = CLASSIFIER.replace("shots = 1", 'shots = 1\nembed = "features"')
    text = {"linear": LINEAR, "maml": MAML, "classifier": classifier}[kind]
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    result = run_training(read_config(tmp_path / "run.toml"), tmp_path / "out")
    release = load_release(tmp_path / "out" / "release")
    stage = result.trainer.released
    assert release.stage == stage.name
    assert result.scores == result.selection.scores[stage.name]
    jax.tree.map(np.testing.assert_array_equal, release.params, stage.params)
    task, seen = few(), None
    if kind == "linear":
        inputs = task[0]
        made = FixedFeatures.wavelets().of_examples(inputs.reshape(-1, 14, 14, 1))
        seen = made.reshape(*inputs.shape[:2], -1)
        assert release.embed(inputs[:, 0]).shape[0] == 4
    check_against_learner(release, stage.learner, stage.params, task, seen=seen)
    # For each stage.
    for stage in result.trainer.stages():
        monkeypatch.setattr(Trainer, "released", stage)
        result.trainer.release(tmp_path / "stage")
        release = load_release(tmp_path / "stage")
        assert release.stage == stage.name
        check_against_learner(release, stage.learner, stage.params, task, seen=seen)
    if kind == "maml":
        with pytest.raises(ValueError, match="labels must name 4 classes.*got 3"):
            few_ways = few(ways=3)
            check_against_learner(release, stage.learner, stage.params, few_ways)
        with pytest.raises(NotImplementedError, match="MAML has no embedding"):
            release.embed(task[0][0])


@pytest.mark.slow
def test_a_users_model_and_learner_are_passed_when_loading(tmp_path):
    last = TINY.replace("[evaluation]", "[evaluation]\nselect = false")
    (tmp_path / "run.toml").write_text(last, encoding="utf-8")

    def given(seed):
        def cosine(apply):
            return Mine(ProtoNet(apply, ways=4, distance="cosine"))

        module = MLP(14 * 14, (4,), 4, rngs=nnx.Rngs(seed))
        return {"model": split_model(module), "learner": cosine}

    config = read_config(tmp_path / "run.toml")
    result = run_training(config, tmp_path / "out", **given(3))
    folder = tmp_path / "out" / "release"
    release, stage = load_release(folder, **given(4)), result.trainer.released
    assert stage.name == "steps"
    check_against_learner(release, stage.learner, stage.params, few())
    with pytest.raises(ValueError, match="must be given, as (it was )?to the run"):
        load_release(folder)
    wrong = {**given(4), "model": (lambda p, x: x, {"other": jnp.ones(3)})}
    with pytest.raises(ValueError, match=r"parameters.npz: parameter '.*' must be"):
        load_release(folder, **wrong)


@dataclasses.dataclass(frozen=True)
class Mine:
    """A learner that the package does not know."""

    inner: ProtoNet
    is_regression = False

    def loss(self, params, episode):
        return self.inner.loss(params, episode)

    def predict(self, params, episode):
        return self.inner.predict(params, episode)


def check_values(release, stage):
    """A release's numbers for a task equal the learner's; returns the task."""
    data, mask = make_sinusoids(2, points=8, seed=3), jnp.ones(8, jnp.float32)
    x, y = data.features[:8], data.targets[:8]
    episode = regression_episode(jnp.asarray(x), jnp.asarray(y), mask, shots=5)
    wanted = stage.learner.predict(stage.params, episode)
    found = release.predict(x[:5], y[:5], x[5:])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    return x, y


@pytest.mark.slow
def test_values_are_predicted_by_a_task_and_its_support(tmp_path):
    data = make_sinusoids(30, points=8, seed=0)
    levels = {"task": 0.2, "point": (8,)}
    bounds = {"privacy_unit": "task", "population": data.population}
    step = tree_step("task", levels, **bounds)
    learner, _ = made = sinusoid_learner()
    how = {"shots": 5, "optimizer": optax.sgd(0.1), "normalizer": 6.0}
    run = plain_trainer(data=data, step=step, learner=made, num_steps=2, **how)
    with pytest.raises(ValueError, match="release must come after train"):
        run.release(tmp_path / "release")
    run.train(tmp_path / "run")
    run.release(tmp_path / "release")
    model = learner.apply, sinusoid_learner(3)[1]
    release = load_release(tmp_path / "release", model=model)
    assert release.is_regression
    x, y = check_values(release, run.released)
    with pytest.raises(NotImplementedError, match="predicts numbers: use predict"):
        release.classify(x[:5], [1] * 5, x[5:])
    with pytest.raises(
        ValueError, match="targets must have one entry for each of the 5"
    ):
        release.predict(x[:5], y[:4], x[5:])


_MIXED = """
version = 1
epsilon = 8.0
delta = 1e-5
[data]
type = "Sinusoids"
num_tasks = 40
[step]
clip_unit = "task"
privacy_unit = "point"
[step.sampling]
type = "MultistageSampling"
levels = [
  { type = "Poisson", name = "task", sampling_probability = 1.0 },
  { type = "Poisson", name = "point", sampling_probability = 1.0 },
]
[learner]
kind = "mixed"
shots = 4
loss = "squared_error"
[start]
kind = "mixed"
target_bound = 5.0
"""


_BAYES = (ROOT / "configs" / "sinusoids_bayes.toml").read_text(encoding="utf-8")
for _old, _new in (("1_000", "2"), ("5_000", "40"), ("600", "20")):
    _BAYES = _BAYES.replace(f"= {_old}", f"= {_new}")


@pytest.mark.slow
@pytest.mark.parametrize("text", [_MIXED, _BAYES], ids=["mixed", "bayes"])
def test_a_model_of_tasks_is_loaded_without_a_network(tmp_path, text):
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    result = run_training(read_config(tmp_path / "run.toml"), tmp_path / "out")
    release = load_release(tmp_path / "out" / "release")
    check_values(release, result.trainer.released)
    assert release.stage == result.trainer.released.name


# --- Refusals ---


def test_examples_of_another_kind_are_refused(plain):
    release = load_release(plain[1], model=own_mlp())
    x = classes().features
    for wrong, error, match in (
        (x[0], ValueError, r"examples must be of shape \(n, 2\)"),
        (x[:0], ValueError, "n at least 1"),
        (x[:2, :1], ValueError, r"got \(2, 1\)"),
        (np.ones((2, 2), np.uint8), TypeError, "images of 8 bits are divided by 255"),
        (np.full((2, 2), np.nan, np.float32), ValueError, "examples must be finite"),
    ):
        with pytest.raises(error, match=match):
            release.embed(wrong)
    with pytest.raises(
        ValueError, match="labels must have one entry for each of the 3"
    ):
        release.classify(x[:3], [1, 2], x[3:5])
    with pytest.raises(TypeError, match="labels must be integers or strings"):
        release.classify(x[:3], [0.5, 1.0, 1.0], x[3:5])
    with pytest.raises(NotImplementedError, match="tells classes apart: use classify"):
        release.predict(x[:3], [1.0, 2, 3], x[3:5])


def test_a_foreign_or_damaged_folder_is_refused(copied):
    load_release(copied, model=own_mlp())
    with pytest.raises(ValueError, match="model must be given, as it was to the run"):
        load_release(copied)
    with pytest.raises(ValueError, match="learner must be left out"):
        load_release(copied, model=own_mlp(), learner=lambda apply: apply)
    with pytest.raises(ValueError, match="features must be left out"):
        load_release(copied, model=own_mlp(), features=FixedFeatures.wavelets())
    with pytest.raises(ValueError, match="must be of shape"):
        load_release(copied, model=(lambda p, x: x, {"a": jnp.ones(2)}))
    with pytest.raises(ValueError, match="npz"):
        load_release(copied, model=own_mlp(), max_bytes=10)
    edit(copied, features={"kind": "wavelets"})
    with pytest.raises(ValueError, match="features must not be a file"):
        load_release(copied, model=own_mlp(), features="network.onnx")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": "x"}, "format must be 'jaxdp-episodic release', got 'x'"),
        ({"version": 2}, "version must be 1, got 2"),
        ({"learner": {"type": "os"}}, "learner.type must be one of"),
        ({"learner": {"type": "ProtoNet", "apply": "eval"}}, "learner.apply must be"),
        ({"learner": {"type": "ProtoNet", "apply": "model", "x": 1}}, "unexpected"),
        ({"learner": {"type": "ANIL", "apply": "model", "head": 2}}, "head must be"),
        ({"learner": MAML_OF | {"first_order": [1]}}, "learner.first_order must be"),
        ({"learner": MAML_OF | {"inner_steps": 0}}, "learner.inner_steps must be"),
        ({"learner": 3}, "must be an object"),
        ({"has_own_learner": 1}, "has_own_learner must be"),
        ({"learner": MAML_OF | {"inner_steps": 10**9}}, "at most 10,000, got 1000000"),
        ({"learner": MAML_OF | {"inner_learning_rate": math.nan}}, "learning_rate"),
        ({"learner": {"type": "ProtoNet", "apply": "model"}}, "key 'learner.ways'"),
        ({"stage": 3}, "stage must be of type str"),
        ({"parameters": [1]}, "parameters must be an object"),
        ({"feature_shape": [3]}, "example_shape must be feature_shape"),
        ({"feature_shape": [3], "example_shape": [3]}, "learner must predict"),
        ({"model": {}}, "missing key 'model.input_shape'"),
        ({"example_shape": [1 << 40]}, "at most"),
        ({"example_shape": [-1]}, "must be a shape"),
        ({"parameters": {}}, "parameter .* must be of shape"),
        ({"dtype": "object"}, "dtype must be one of"),
        ({"features": {"kind": "wavelets"}}, "features must be those of the run"),
        ({"features": {"kind": "scaled"}}, "mean must be"),
        ({"features": {"kind": "own", "name": "n"}}, "features must be given.* 'n'"),
        ({"features": {"kind": "onnx", "name": "n"}}, "the file of its network, 'n'"),
    ],
)
def test_a_description_is_checked(copied, changes, match):
    edit(copied, **changes)
    with pytest.raises((TypeError, ValueError), match=match) as caught:
        load_release(copied, model=own_mlp())
    assert str(copied) in str(caught.value)


def test_a_description_cannot_allocate_much_memory(copied):
    huge = {
        "version": 1,
        "type": "ModelConfig",
        "kind": "mlp",
        "channels": [2**14] * 64,
    }
    huge |= {"outputs": 3, "input_shape": [2], "embeds": False}
    edit(copied, model=huge)
    with pytest.raises(ValueError, match="parameter .* must be of shape"):
        load_release(copied)
    edit(copied, model=huge | {"outputs": 2**60})
    with pytest.raises(ValueError):
        load_release(copied)


def test_other_files_are_checked(copied, tmp_path):
    (copied / DESCRIPTION).write_text("{")
    with pytest.raises(ValueError, match=r"release.json: not valid JSON"):
        load_release(copied)
    (copied / DESCRIPTION).unlink()
    with pytest.raises(ValueError, match="of an older version.*load_parameters"):
        load_release(copied)
    with pytest.raises(FileNotFoundError):
        load_release(tmp_path / "nothing")


@pytest.mark.parametrize("name", ["release.json", "privacy.md", "parameters.npz"])
def test_links_in_a_release_are_refused(copied, tmp_path, name):
    (copied / name).rename(tmp_path / "elsewhere")
    (copied / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"{name} must be a file, got a link"):
        load_release(copied, model=own_mlp())


def test_many_inner_steps_load_fast(copied):
    edit(copied, learner=MAML_OF | {"inner_steps": 10_000, "first_order": True})
    start = time.process_time()
    load_release(copied, model=own_mlp())
    assert time.process_time() - start < 20  # tracing 10,000 steps would take minutes


def test_parameters_must_be_numbers(copied):
    with np.load(copied / "parameters.npz") as archive:
        arrays = dict(archive)
    name = next(iter(arrays))
    np.savez(copied / "parameters.npz", **{**arrays, name: arrays[name] * np.nan})
    with pytest.raises(ValueError, match="must be finite numbers"):
        load_release(copied, model=own_mlp())


# --- What is released ---


def test_a_release_contains_nothing_private(plain):
    """Not even the sizes of the data."""
    _, folder = plain
    files = {path.name: path for path in folder.iterdir()}
    everything = b"".join(path.read_bytes() for path in files.values())
    said = files["privacy.md"].read_bytes()
    everything = everything.replace(said, b"")
    assert b'"private"' not in everything and b"loss" not in everything
    records = [json.loads(line) for line in files["log.jsonl"].read_text().splitlines()]
    assert [r["step"] for r in records] == [0, 1, 2]
    facts = json.loads(files["run.json"].read_text())
    assert facts["steps"] == 2 and facts["epsilon spent"] > 0
    text = " ".join(said.decode().split())
    assert "counted in the data, the guarantee does not cover them" in text
    told = json.loads(files[DESCRIPTION].read_text())
    assert told.keys() == {
        *("format", "version", "stage", "learner", "has_own_learner", "model"),
        *("features", "feature_shape", "example_shape", "dtype", "source"),
        "calibration",
        "parameters",
    }
    assert told["learner"]["ways"] == 3 and told["learner"]["apply"] == "model"


def test_a_run_that_ended_early_guarantees_its_plan(plain):
    early = plain_trainer(num_steps=2)
    early.step()
    target = f"({early.budget.epsilon:g}, 1e-05)-differentially private"
    said, planned = run_statement(early), run_statement(plain[0])
    for facts, text in ((said.facts, said.statement), said.released):
        assert target in text and "It ended after 1 of 2 steps, which alone" in text
        assert facts["ended early"] in text and "costs its whole plan" in text
    for facts, text in ((planned.facts, planned.statement), planned.released):
        assert "ended early" not in facts and "It ended" not in text


def test_parameters_round_trip_and_others_are_refused(plain, tmp_path):
    run, folder = plain
    parameters, (_, like) = folder / "parameters.npz", protonet(seed=5)
    loaded = load_parameters(parameters, like)
    jax.tree.map(np.testing.assert_array_equal, loaded, run.params)
    with pytest.raises(ValueError, match="parameter .* must be of shape"):
        load_parameters(parameters, {"head": like["head"]})
    wrong = jax.tree.map(lambda leaf: np.zeros((*leaf.shape, 1), np.float32), like)
    with pytest.raises(ValueError, match="must be of shape"):
        load_parameters(parameters, wrong)
    hostile = tmp_path / "hostile.npz"
    np.savez(hostile, **{"head/bias": np.array([object()])}, allow_pickle=True)
    with pytest.raises(ValueError):
        load_parameters(hostile, {"head": {"bias": like["head"]["bias"]}})
