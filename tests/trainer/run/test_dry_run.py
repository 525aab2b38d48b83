"""A run is tried out before its first charge, so programming errors cost nothing."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp_episodic.tools.book.book import create_book, read_book
from jaxdp_episodic.tools.train.run import Booking, protected_by
from jaxdp_episodic.trainer.draw import generators
from jaxdp_episodic.trainer.draw.sampler import EpisodeSampler
from jaxdp_episodic.trainer.gradient import private_gradient
from jaxdp_episodic.trainer.gradient.private_gradient import PrivateGradient
from jaxdp_episodic.trainer.learners.learners import ProtoNet, as_they_are
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.ledger import RunMismatchError
from jaxdp_episodic.trainer.run.ledger_file import read_ledger
from jaxdp_episodic.trainer.statistics.statistics import PrivateStatistics
from jaxdp_episodic.training import Evaluation, StartConfig, read_config, run_training
from training_runs import (
    GROUPED,
    TINY,
    WAYS,
    adaptive,
    classes,
    plain_trainer,
    protonet,
    with_statistics,
)

FEATURES = 2  # of `classes`
FOUND = "before anything was charged"


def linear():
    return {"kernel": np.ones((FEATURES, 4), np.float32)}


def times(params, inputs):
    return inputs.reshape(len(inputs), -1) @ params["kernel"]


def one_number(params, inputs):
    return times(params, inputs)[:, 0]


def a_python_if(params, inputs):
    outputs = times(params, inputs)
    return outputs if jnp.mean(outputs) > 0 else -outputs


def too_large(params, inputs):
    """Sorts 16 terabytes."""
    outputs = times(params, inputs)
    many = jnp.broadcast_to(jax.lax.stop_gradient(jnp.sum(outputs)), (2**21, 2**21))
    return outputs + jnp.sort(many + jnp.arange(2.0**21)[:, None])[0, 0]


def fails_when_it_runs(params, inputs):
    outputs = times(params, inputs)
    kind = jax.ShapeDtypeStruct(outputs.shape, outputs.dtype)

    def broken(_):
        raise RuntimeError("no such file")

    shift = jax.pure_callback(broken, kind, jax.lax.stop_gradient(outputs))
    return outputs + shift


class Careless:
    """A user's learner with a mistake: predictions of another shape."""

    is_regression = False

    def __init__(self, apply):
        self.loss = ProtoNet(apply, ways=WAYS).loss

    def predict(self, params, episode):
        return episode.query_mask


def forgets_the_parameters():
    """An optimizer whose update needs an additional argument."""

    def update(updates, state, params, *, learning_rate, **_):
        return jax.tree.map(lambda g: -learning_rate * g, updates), state

    return optax.GradientTransformationExtraArgs(lambda _: (), update)


def prototypes(apply):
    return ProtoNet(apply, ways=WAYS)


# The model, the error's text, and what else is wrong: learner, optimizer.
MISTAKES = {
    "outputs of shape (n,)": (
        one_number,
        r"embeddings of shape \(n, size\) for n=9 inputs, got \(9,\)",
        {},
    ),
    "a Python if": (a_python_if, "boolean conversion of traced array", {}),
    "more memory than there is": (too_large, "memory|allocat|RESOURCE", {}),
    "an error when it runs": (fails_when_it_runs, "no such file", {}),
    "predictions of another shape": (
        times,
        r"predict must return \(queries, ways\) logits for \d+ queries, got shape",
        {"learner": Careless},
    ),
    "an optimizer that wants more": (
        times,
        "learning_rate",
        {"optimizer": forgets_the_parameters()},
    ),
}


def wrong(name, make, **changes):
    """A trainer with a mistake, and the error's text."""
    apply, match, parts = MISTAKES[name]
    learner = parts.get("learner", prototypes)(apply), linear()
    return make(**{**parts, "learner": learner, **changes}), match


def scores():
    data = classes(num_classes=8, seed=3)
    return {"validation": Evaluation(data, ways=3, shots=1, queries=2, num_episodes=4)}


@contextlib.contextmanager
def costs_nothing(folder, match=None):
    with pytest.raises(Exception, match=match) as caught:
        yield
    assert any(FOUND in note for note in caught.value.__notes__)
    assert not run_files.files_of_a_run(folder)  # no charge and no state
    if (folder / run_files.STORE).exists():
        assert read_ledger(folder / run_files.STORE).charged == 0


@pytest.mark.few(4)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_costs_no_step(tmp_path, name):
    run, match = wrong(name, plain_trainer, num_steps=3)
    with costs_nothing(tmp_path, match):
        run.train(tmp_path, evaluations=scores())
    assert run.num_steps_charged == run.num_steps_taken == 0


@pytest.mark.slow
def test_a_mistake_costs_nothing_of_a_book(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    config, where = read_config(path), str(tmp_path / "b.book")
    create_book(where, protected_by(config, tmp_path), epsilon=11.0, delta=1e-5)

    def of_pixels(params, inputs):  # of the first two
        pixels = inputs.reshape(len(inputs), -1)
        return fails_when_it_runs(params, pixels[:, :FEATURES])

    with costs_nothing(tmp_path / "out"):
        how = {"base": tmp_path, "book": Booking(where)}
        run_training(config, tmp_path / "out", model=(of_pixels, linear()), **how)
    assert not read_book(where).entries


def chooses(**changes):
    """A run with a noisy score after its first step."""

    def rule(released):
        return "check" if released.number == 1 else "loud"

    return adaptive(rule, seed=None, **changes)


@pytest.mark.slow
def test_a_mistake_in_a_noisy_score_costs_nothing(tmp_path):
    run, match = wrong("predictions of another shape", chooses)
    with costs_nothing(tmp_path, match):
        run.train(tmp_path)
    assert run.ledger.options == [] and run.num_steps_charged == 0


def starts(learner, num_steps=2):
    """A run of private statistics, then of steps on two projected features."""
    config = StartConfig(kind="plda", mean=0.2, within=(0.3,), total=0.5)
    how = {"num_steps": num_steps, "seed": None}
    return with_statistics(classes(), config, GROUPED, learner, **how)


# --- What the dry run uses ---


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["planned", "chooses", "statistics", "alone"])
def test_it_draws_nothing_and_compiles_once(monkeypatch, kind):
    def used(*_, **__):
        raise AssertionError("a key, a draw or noise of the run was used")

    run = {
        "planned": lambda: plain_trainer(seed=None),
        "chooses": chooses,
        "statistics": lambda: starts(protonet()),
        "alone": lambda: starts((prototypes(as_they_are), {}), 0),
    }[kind]()
    with monkeypatch.context() as patch:
        patch.setattr(generators.Keys, "new", used)
        patch.setattr(EpisodeSampler, "draw", used)
        patch.setattr(private_gradient, "drawn_noise", used)
        patch.setattr(PrivateStatistics, "_rows", used)
        before = jax.tree.map(np.asarray, run.params)
        run.dry_run()
    assert run.num_steps_charged == run.num_steps_taken == 0
    jax.tree.map(np.testing.assert_array_equal, before, run.params)
    compiled = run._gradient._add._cache_size()
    for _ in range(5):
        run.step() if not run.has_ended else None
    assert run._gradient._add._cache_size() == compiled
    assert (compiled > 0) == run.budget.takes_steps


def lost_at(number, folder, monkeypatch, **changes):
    """A run whose device is lost between a step's charge and its release."""
    run, call = plain_trainer(**changes), PrivateGradient.__call__

    def broken(*args, **kwargs):
        if run.num_steps_charged == number:
            raise RuntimeError("device lost")
        return call(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(PrivateGradient, "__call__", broken)
        with pytest.raises(RuntimeError, match="device lost") as caught:
            run.train(folder)
    return " ".join(caught.value.__notes__)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("seed", "said"),
    [
        (None, "Step 2 was charged and not released: it is lost. It raised epsilon "),
        (1, "The run has a seed: it repeats the step when it is resumed."),
    ],
)
def test_an_error_after_the_charge_states_its_cost(tmp_path, monkeypatch, seed, said):
    assert said in lost_at(2, tmp_path, monkeypatch, seed=seed)


def test_a_run_without_releases_may_change_its_model(tmp_path, monkeypatch):
    """Its first step failed; the repaired model has other shapes."""
    lost_at(1, tmp_path, monkeypatch, seed=None)
    lost = "step 1 was charged and interrupted before"
    with pytest.warns(UserWarning, match=lost):
        again = plain_trainer(seed=None)
        again.resume(tmp_path)  # ends here: the saved state is of the old model
    run = plain_trainer(learner=(prototypes(times), linear()), seed=None)
    with pytest.warns(UserWarning, match=lost):
        assert run.resume(tmp_path) == 1
    run.train(tmp_path)
    assert run.num_steps_taken == run.num_steps_charged == 6
    assert [leaf.shape for leaf in jax.tree.leaves(run.params)] == [(FEATURES, 4)]
    # After a release it cannot, also if the release was not of the first step.
    other = plain_trainer(seed=None)
    with pytest.raises(RunMismatchError, match="of another model or optimizer"):
        other.resume(tmp_path)


@pytest.mark.slow
def test_a_release_newer_than_the_state_fixes_the_model(tmp_path, monkeypatch):
    """The release is in the file, and the saved state is older."""
    lost_at(2, tmp_path, monkeypatch, seed=None)
    run = plain_trainer(learner=(prototypes(times), linear()), seed=None)
    with pytest.raises(RunMismatchError, match="of another model or optimizer"):
        run.resume(tmp_path)
