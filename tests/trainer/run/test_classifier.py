"""A private classifier of the training classes, used to predict other classes."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxdp_episodic.trainer.config.training_config import read_config
from jaxdp_episodic.trainer.run.assemble import Tables, assembled
from jaxdp_episodic.trainer.run.checks import check_targets
from jaxdp_episodic.training import Classifier, ProtoNet, classification_episode
from training_runs import CLASSIFIER, GROUPED, TINY, classes


@pytest.fixture
def config(tmp_path):
    def read(*changes):
        text = CLASSIFIER
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "config.toml"
        path.write_text(text, encoding="utf-8")
        return read_config(path)

    return read


def _sampling(text):
    return text[text.index("[step.sampling]") : text.index("[learner]")]


CLASS = ('clip_unit = "example"', 'clip_unit = "example"\nprivacy_unit = "class"')
LINEAR = ('kind = "mlp"', 'kind = "linear"')
GROUPS = (_sampling(CLASSIFIER), _sampling(TINY))
EPISODE = ('clip_unit = "example"', 'clip_unit = "episode"')
EMBED = ("shots = 1", 'shots = 1\nembed = "features"')


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([CLASS], "privacy_unit must be 'example' or 'person'.* list is public"),
        ([('"example"\nn', '"class"\nn')], "clip_unit must be 'example'.* alone"),
        ([("ways = 5\n", "")], "evaluation.ways must be given"),
        ([LINEAR, EMBED], "needs a model that makes some"),
        ([('kind = "mlp"', 'kind = "conv_embedding"')], "model.kind must be one of"),
        ([GROUPS, EPISODE], "level by level.* with GroupedClasses"),
    ],
)
def test_invalid_classifiers_are_refused(config, changes, message):
    with pytest.raises(ValueError, match=message):
        config(*changes)


@pytest.mark.slow
@pytest.mark.parametrize("embed", ["both", "logits"])
def test_a_classifier_has_an_output_per_class_and_an_embedding(config, embed):
    read = config(("shots = 1", f'shots = 1\nembed = "{embed}"'))
    trainer, _, _ = assembled(read, Tables(read, None))
    learner, params = trainer.learner, trainer.params
    assert jax.tree.map(np.shape, params["head"]) == {"bias": (40,), "kernel": (6, 40)}
    inputs = trainer.data.features[:30].reshape(5, 6, *trainer.data.features.shape[1:])
    episode = classification_episode(inputs, np.ones((5, 6), np.float32), shots=1)

    def embedded(params, rows):
        flat = rows.reshape(len(rows), -1)
        first, head = params["layers"]["0"], params["head"]
        hidden = np.tanh(flat @ first["kernel"] + first["bias"])
        logits = hidden @ head["kernel"] + head["bias"]
        units = hidden / np.linalg.norm(hidden, axis=1, keepdims=True)
        return {
            "logits": logits,
            "both": np.concatenate([units, 0.1 * logits], axis=1),
        }[embed]

    expected = ProtoNet(embedded, ways=5).predict(params, episode)
    found = learner.predict(params, episode)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    labels = trainer.data.class_places[:30]
    episode = episode._replace(query_targets=labels[:25])
    logits = learner.apply(params, episode.query_inputs)
    pairs = zip(logits, labels[:25], strict=True)
    losses = [-jax.nn.log_softmax(numbers)[label] for numbers, label in pairs]
    found = learner.loss(params, episode)
    np.testing.assert_allclose(found, np.mean(losses), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "others"), [([], ["logits", "features"]), ([LINEAR], ["logits"])]
)
def test_other_embeddings_of_a_classifier_are_stages(config, changes, others):
    read = config(*changes)
    trainer, evaluations, _ = assembled(read, Tables(read, None))
    assert [stage.name for stage in trainer.stages()] == ["features", "initial"]
    *found, last = trainer.stages_after(2, trainer.params)
    assert [stage.name for stage in found] == [f"steps/{e}@2" for e in others]
    assert last.name == "steps@2" and last.learner == trainer.learner
    wanted = config(*changes, ("shots = 1", 'shots = 1\nembed = "logits"'))
    alone = assembled(wanted, Tables(wanted, None))[0].learner
    score = evaluations["validation"]
    assert score(found[0].learner, last.params) == score(alone, last.params)


def test_a_classifier_draws_examples_and_is_validated_by_episodes(config):
    read = config()
    read = dataclasses.replace(read, seed=1)
    trainer, evaluations, _ = assembled(read, Tables(read, None))
    assert trainer.sampler.slot_shape == () and trainer.normalizer == 160.0
    blocks = trainer.draw_blocks(1)
    drawn = sum(int(block.unit_mask.sum()) for block in blocks)
    assert 100 < drawn < 220  # 800 draws with probability 0.2: 5 deviations
    score = evaluations["validation"](trainer.learner, trainer.params)
    assert 0.2 < score.mean < 1.0


def test_classes_read_from_private_data_are_reported():
    """An example that is alone in its class would add an output."""
    data = classes()
    public = dataclasses.replace(data, has_public_units=True)
    assert public.with_features(data.features).take(np.arange(9)).has_public_units
    learner = Classifier(len, ways=2)
    check_targets(learner, public, GROUPED)
    zero_out = dataclasses.replace(GROUPED, neighboring_relation="zero_out")
    check_targets(learner, data, zero_out)
    with pytest.warns(
        UserWarning, match="output for each class in the data.*public_units"
    ):
        check_targets(learner, data, GROUPED)


def test_a_classifier_refuses_unsuitable_settings():
    with pytest.raises(ValueError, match="task_loss must be one of"):
        Classifier(len, ways=2, task_loss="squared_error")
    with pytest.raises(ValueError, match="distance must be one of"):
        Classifier(len, ways=2, distance="x")
