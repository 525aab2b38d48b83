"""Runs with a user's model, learner or optimizer; callbacks and trackers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import pages
from jaxdp_episodic.tools.train.run import run_training
from jaxdp_episodic.trainer.config.training_config import read_config
from jaxdp_episodic.trainer.config.training_parts import ClippingConfig, LearnerConfig
from jaxdp_episodic.trainer.learners.learners import MAML, ProtoNet
from jaxdp_episodic.trainer.learners.models import apply_and_params, learner_of
from jaxdp_episodic.trainer.run.ledger import described_part
from jaxdp_episodic.trainer.run.run_files import read_log, releasable_records
from training_runs import TINY, plain_trainer, trainer


class Bare(nnx.Module):
    """One linear map, of nnx."""

    def __init__(self, *, rngs):
        self.map = nnx.Linear(14 * 14, 4, rngs=rngs)

    def __call__(self, inputs):
        return self.map(inputs.reshape(len(inputs), -1))


class Bared(linen.Module):
    """One linear map, of linen."""

    size: int = 4

    @linen.compact
    def __call__(self, inputs):
        return linen.Dense(self.size)(inputs.reshape(len(inputs), -1))


class Batched(linen.Module):
    """Batch statistics, which couple examples."""

    @linen.compact
    def __call__(self, inputs):
        return linen.BatchNorm(use_running_average=False)(inputs)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY, encoding="utf-8")
    return dataclasses.replace(read_config(path), checkpoint_every=1)


# --- Valid parts ---


def test_models_become_functions_and_invalid_ones_are_refused():
    pair = (lambda params, inputs: inputs * params, jnp.ones(()))
    assert apply_and_params(pair, (2,)) == pair
    # Equal modules give the same function, which compiles once.
    apply, other = (apply_and_params(Bared(size), (4,))[0] for size in (4, 5))
    assert apply_and_params(Bared(), (4,))[0] == apply != other
    assert apply_and_params((Bared(), {}), (4,)) == (apply, {})
    with pytest.raises(ValueError, match="the collection 'batch_stats'.*GroupNorm"):
        apply_and_params(Batched(), (4,))
    with pytest.raises(TypeError, match="of flax.nnx or flax.linen, or a pair"):
        apply_and_params(lambda inputs: inputs, (4,))
    with pytest.raises(TypeError, match="got a int without is_regression"):
        learner_of(lambda apply: 1, jnp.add)
    made = learner_of(MAML, jnp.add)
    assert made == MAML(jnp.add)
    assert learner_of(made, jnp.subtract) is made


def test_descriptions_differ_exactly_where_parts_do():
    def described(part):
        return json.loads(json.dumps(described_part(part)))

    adam = described(optax.adam(1e-3))
    assert adam == described(optax.adam(1e-3))
    assert adam != described(optax.adam(2e-3)) != described(optax.sgd(2e-3))
    assert described(Bare(rngs=nnx.Rngs(0))) == described(Bare(rngs=nnx.Rngs(0)))
    assert described(Bared()) != described(Bared(5))

    def of(n):
        return described(lambda apply: ProtoNet(apply, ways=n))

    ways = [of(3), of(4)]
    assert ways[0] != ways[1]
    assert "0x" not in json.dumps([adam, ways, described(Bare(rngs=nnx.Rngs(0)))])


# --- Callbacks ---


class Tracker:
    """Accepts what TensorBoard's writer of PyTorch 2 and ``wandb.init()`` accept."""

    def __init__(self):
        self.noted = []

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.noted.append((global_step, {tag: scalar_value}))

    def log(self, data, step=None, commit=None):
        self.noted.append((step, dict(data)))


def test_trackers_get_public_numbers_only(tmp_path):
    """The docs' examples."""
    blocks = pages.fences(pages.read("docs/use.md"), "python")
    (text,) = (one for one in blocks if "def to_tensorboard" in one)
    trackers = {"writer": Tracker(), "run": Tracker()}
    namespace = dict(trackers)
    exec(text, namespace)

    def on_step(progress):
        namespace["to_tensorboard"](progress)
        namespace["to_wandb"](progress)

    clipping = ClippingConfig(count_noise=1.0)
    run = plain_trainer(num_steps=2, clipping=clipping)
    run.train(tmp_path / "public", on_step=on_step)
    for tracker in trackers.values():
        assert {step for step, _ in tracker.noted} == {1, 2}
        assert set().union(*(d for _, d in tracker.noted)) == {"epsilon", "clip_norm"}
        tracker.noted.clear()
    # Epsilon depends on private sizes here, so no number is public before the release.
    trainer(num_steps=2).train(tmp_path / "private", on_step=on_step)
    assert not any(tracker.noted for tracker in trackers.values())


# --- A run with them ---


def test_closed_form_learners_refuse_parts(config, tmp_path):
    none = dict.fromkeys(("model", "l2_clip_norm", "num_steps"))
    learner = LearnerConfig(kind="plda", shots=1)
    alone = dataclasses.replace(config, learner=learner, **none)
    with pytest.raises(ValueError, match="model must not be given with learner.kind"):
        run_training(alone, tmp_path / "out", model=Bared())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_run_trains_users_parts_and_warns_of_changes(config, tmp_path, kind, capsys):
    told = []

    def parts(rate):
        model = Bare(rngs=nnx.Rngs(0)) if kind == "nnx" else Bared()
        return {
            "model": model,
            "learner": lambda apply: ProtoNet(apply, ways=4, distance="cosine"),
            "optimizer": optax.sgd(rate),
        }

    def stop(progress):
        told.append(progress)
        if progress.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(config, tmp_path / "out", on_step=stop, **parts(0.1))
    # Which files may be shown to others is stated by name.
    assert told[0].public.keys() == {"step", "epsilon"} and told[0].num_steps == 3
    public = releasable_records(read_log(tmp_path / "out" / "run.sqlite"))
    assert [one.public for one in told] == public[1:]  # the first is before any step
    assert "mean_loss" in told[0].private_record["private"]
    capsys.readouterr()
    result = run_training(config, tmp_path / "out", resume=True, **parts(0.2))
    printed = " ".join(capsys.readouterr().err.split())
    assert "goes on with other settings than before: settings.optimizer.own" in printed
    assert "step_size: -0.1 in the checkpoint, -0.2 now" in printed
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(result.trainer.params))
    assert sizes == [4, 784]
    assert result.trainer.learner.distance == "cosine"
    settings = result.trainer.run["settings"]
    assert "Bare" in json.dumps(settings["model"]["own"])
    assert np.isfinite(result.scores["validation"].mean)
