"""The trainer: charges first, draws as accounted, resumes bit for bit."""

import dataclasses
import secrets

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.questions.budget import BudgetExhaustedError
from jaxdp_episodic.trainer.config.training_parts import NOISES
from jaxdp_episodic.trainer.data.built_in import make_sinusoids
from jaxdp_episodic.trainer.draw.generators import Keys
from jaxdp_episodic.trainer.run.ledger import RunMismatchError
from jaxdp_episodic.trainer.run.run_files import HELD_OUT, PRIVATE, STAGES, read_log
from jaxdp_episodic.training import MLP, Supervised, split_model
from training_runs import (
    GROUPED,
    classes,
    grouped_step,
    held_out,
    plain_trainer,
    protonet,
    sinusoid_learner,
    trainer,
    tree_step,
)


def leaves(run):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(run.state)]


def test_a_run_takes_exactly_its_steps(tmp_path):
    run = trainer(num_steps=5)
    records = run.train(tmp_path)
    assert run.num_steps_taken == 5
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4, 5]
    assert records[-1]["epsilon"] <= 8.0
    assert np.all(np.diff([r["epsilon"] for r in records]) > 0)
    assert read_log(tmp_path) == records
    for record in records:  # private values are apart
        assert record.keys() <= {"step", "epsilon", PRIVATE, HELD_OUT}
    while run.num_steps_taken < run.budget.permitted_steps:
        run.step()
    before = leaves(run)
    with pytest.raises(BudgetExhaustedError):
        run.step()
    for a, b in zip(before, leaves(run), strict=True):
        np.testing.assert_array_equal(a, b)


def test_training_without_noise_learns(tmp_path):
    run = trainer(epsilon=np.inf, num_steps=60, l2_clip_norm=5.0)
    records = run.train(tmp_path, evaluations={"validation": held_out(200)})
    scores = records[-1][STAGES]["scores"]
    first, last = (scores[name]["validation"]["mean"] for name in ("initial", "steps"))
    assert last > first + 0.02 or last > 0.97
    assert run.budget.spent(1) == np.inf


def test_unseeded_runs_use_every_key_once(tmp_path, monkeypatch):
    """In two runs, one with a repeated draw; no key is on disk."""
    made, fresh = [], secrets.token_bytes

    def noted(number):
        key = fresh(number)
        if number == 32:  # other tokens are file names
            made.append(key)
        return key

    monkeypatch.setattr(secrets, "token_bytes", noted)
    for place in range(2):
        run = trainer(seed=None)
        run.train(tmp_path / str(place))
        drawn = [run.draw_blocks(3)[0].inputs for _ in range(3)]
        assert not all(np.array_equal(drawn[0], other) for other in drawn[1:])
    assert len(made) == len(set(made)) == 2 * (6 * 2 + 3)
    written = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    for key in made:
        number = int.from_bytes(key, "little")
        for form in (key, key.hex().encode(), str(number).encode(), f"{number:x}"):
            assert (form if isinstance(form, bytes) else form.encode()) not in written


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run; tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    trainer().train(folder)
    return folder


PER_CLASS = dataclasses.replace(grouped_step(classes()), privacy_unit="class")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"l2_clip_norm": 0.4}, "l2_clip_norm: 0.5 in the checkpoint, 0.4 now"),
        ({"data": classes(seed=3)}, "data: "),
        ({"data": classes(num_classes=29)}, "units.class: 30 in the checkpoint, 29"),
        ({"epsilon": 4.0}, "target.epsilon"),
        ({"seed": 2}, "seed: 1 in the checkpoint, 2 now"),
        ({"step": grouped_step(classes(), rate=0.4)}, "sampling_probability"),
        ({"step": PER_CLASS}, "step.privacy_unit"),
    ],
)
def test_another_run_is_refused_with_the_difference(finished, changes, named):
    other = trainer(**changes)
    before = leaves(other)
    with pytest.raises(RunMismatchError) as caught:
        other.resume(finished)
    assert named in str(caught.value)
    assert other.num_steps_taken == 0
    for a, b in zip(before, leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_settings_that_are_not_accounted_may_change_with_a_warning(finished, tmp_path):
    other = trainer(normalizer=3.0, settings={"model": "another"}, shots=2)
    with pytest.warns(UserWarning, match="normalizer: .*settings.model.*shots: 1 in"):
        assert other.resume(finished) == 6
    plain_trainer().train(tmp_path)
    longer = protonet()[0], {**protonet()[1], "more": np.zeros(3, np.float32)}
    for changes, named in [
        (
            {"optimizer": optax.sgd(0.1)},
            r"optimizer_state\[0\].* in the checkpoint, \(",
        ),
        ({"learner": longer}, r"params\['more'\]: \(nothing\) in the checkpoint"),
    ]:
        with pytest.raises(RunMismatchError, match=f"another model or opt.*{named}"):
            plain_trainer(**changes).resume(tmp_path)


def test_the_drawn_step_is_the_accounted_one():
    run = trainer()
    assert run.sampler.sampling is run.budget.step.design
    assert run.sampler.population is run.data.population
    with pytest.raises(ValueError, match="population=data.population"):
        trainer(data=classes(examples=7), step=grouped_step(run.data))


@pytest.mark.parametrize("kind", NOISES)
def test_the_noise_is_that_of_the_accounted_step(kind):
    step = dataclasses.replace(GROUPED, noise_multiplier=1.75)
    run = plain_trainer(step=step, noise=kind)
    assert run.budget.step.noise_multiplier == 1.75
    own = run._main.prepared(run.state, 1, run._main.draws.secret(1)).noise
    wanted = run._gradient.noise(run.params, Keys(1).new("noise", 1), 1.75)
    for one, other in zip(own._unused[0], wanted._unused[0], strict=True):
        np.testing.assert_array_equal(one, other)
    assert run.noise_deviation == 1.75 * run.clip_norm


def test_a_clip_unit_below_the_episode_is_refused():
    """A support example would change the contributions of all classes or queries."""
    data = classes()
    levels, tree = {"class": 0.2, "example": (3,)}, {"population": data.population}
    with pytest.raises(ValueError, match="clip_unit must contain a whole episode"):
        trainer(data=data, step=tree_step("class", levels, **tree))


def test_the_step_may_be_the_clip_unit():
    data = classes()
    levels, tree = {"class": (3,), "example": (3,)}, {"population": data.population}
    run = plain_trainer(data=data, step=tree_step("step", levels, **tree))
    assert run.sampler.slot_shape == (3, 3)
    assert run.step()["num_units"] == 1


def test_supervised_learning_refuses_shots():
    data = dataclasses.replace(classes(), has_public_units=True)
    apply, params = split_model(MLP(2, (8,), 30, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="shots must be 0 with Supervised"):
        trainer(data=data, learner=(Supervised(apply), params), shots=1)


@pytest.mark.slow
def test_the_divisor_must_be_public():
    """Under add_remove the number of protected units is private."""
    table = make_sinusoids(40, points=8, seed=0)
    arguments = {"data": table, "learner": sinusoid_learner(), "shots": 3}
    levels, tree = {"task": 0.5, "point": (6,)}, {"population": table.population}
    step = tree_step("task", levels, privacy_unit="task", **tree)
    with pytest.raises(ValueError, match="normalizer must be given"):
        trainer(**arguments, step=step)
    assert trainer(**arguments, step=step, normalizer=20.0).normalizer == 20.0
    public = {"neighboring_relation": "replace_one", "small_units": "keep"}
    for change in (public, {"privacy_unit": "point"}):
        run = trainer(**arguments, step=dataclasses.replace(step, **change))
        assert run.normalizer == 20.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"l2_clip_norm": 0.0}, "l2_clip_norm must be a number in"),
        ({"normalizer": -1.0}, "normalizer must be a number in"),
        ({"shots": 3}, "shots must be less than"),
        ({"block_size": 0}, "block_size must be a whole number >= 1"),
        ({"seed": -1}, "seed must be a whole number >= 0"),
        ({"devices": []}, "the number of devices must be a whole number >= 1"),
        ({"start": []}, "start must be statistics"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        trainer(**changes)


def test_the_block_size_changes_nothing():
    one, other = plain_trainer(), plain_trainer(block_size=1)
    for _ in range(6):
        one.step()
        other.step()
    for a, b in zip(leaves(one), leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_huge_block_size_needs_no_memory():
    """Blocks are limited to the rows that nearly every draw needs."""
    (block,) = trainer(block_size=10**9).draw_blocks(1)
    assert len(block.unit_mask) <= 10


def test_intervals_are_checked_before_anything_is_written(tmp_path):
    for name in ("checkpoint_every", "log_every", "evaluate_every"):
        with pytest.raises(ValueError, match=f"{name} must be a whole number >= 1"):
            trainer().train(tmp_path / "out", **{name: 0})
    assert not (tmp_path / "out").exists()


def sized(stated, unit, **changes):
    """Grouped classes of six examples each, with a stated number of them."""
    examples = dataclasses.replace(GROUPED.design.examples, population=stated)
    sampling = dataclasses.replace(GROUPED.design, examples=examples)
    return dataclasses.replace(GROUPED, sampling=sampling, privacy_unit=unit, **changes)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one", "zero_out"])
def test_sizes_below_the_protected_unit_are_not_checked(relation):
    """They change no epsilon."""
    steps = [sized(n, "class", neighboring_relation=relation) for n in (5, 6, 9)]
    spent = {float(jde.epsilon(step, num_steps=6, delta=1e-5)) for step in steps}
    assert len(spent) == 1
    for step in steps:
        plain_trainer(step=step).step()


def test_sizes_that_change_epsilon_are_checked_against_the_data():
    with pytest.raises(ValueError, match="at most .* 6 to 6 here, got 9"):
        plain_trainer(step=sized(9, "example"))
    # A step with the data's sizes is accepted.
    accounted = sized(9, "example", population=classes().population)
    honest = sized(6, "example")
    run = {"num_steps": 6, "delta": 1e-5}
    assert jde.epsilon(accounted, **run) == jde.epsilon(honest, **run)
    plain_trainer(step=accounted)
