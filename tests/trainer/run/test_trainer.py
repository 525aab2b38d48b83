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
from jaxdp_episodic.trainer.data.built_in import make_sinusoids
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.generators import generator
from jaxdp_episodic.trainer.run.run_files import HELD_OUT, PRIVATE, STAGES, read_log
from jaxdp_episodic.trainer.run.state import RunMismatchError
from jaxdp_episodic.training import MLP, PrivateGradient, Supervised, split_model
from training_runs import (
    GROUPED,
    classes,
    grouped_step,
    held_out,
    noised,
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
    while run.num_steps_taken < run.budget.permitted_steps:
        run.step()
    before = leaves(run)
    with pytest.raises(BudgetExhaustedError):
        run.step()
    for a, b in zip(before, leaves(run), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_is_charged_before_it_is_computed(monkeypatch):
    """A step that fails at any point has been charged."""
    run = trainer()

    def broken(*args, **kwargs):
        raise RuntimeError("device lost")

    monkeypatch.setattr(PrivateGradient, "__call__", broken)
    with pytest.raises(RuntimeError, match="device lost"):
        run.step()
    assert run.num_steps_charged == 1 and run.num_steps_taken == 0


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


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"l2_clip_norm": 0.4}, "l2_clip_norm: 0.5 in the checkpoint, 0.4 now"),
        ({"data": classes(seed=3)}, "data: "),
        ({"epsilon": 4.0}, "target.epsilon"),
        ({"seed": 2}, "seed: 1 in the checkpoint, 2 now"),
        ({"step": grouped_step(classes(), rate=0.4)}, "sampling_probability"),
        (
            {
                "step": dataclasses.replace(
                    grouped_step(classes()), privacy_unit="class"
                )
            },
            "step.privacy_unit",
        ),
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


def test_public_bounds_may_take_the_place_of_the_population():
    """The step's bounds are then accounted, and the data must satisfy them."""
    run = trainer(data=classes(), step=GROUPED)  # six examples of each class
    assert run.budget.step.population is None
    trainer(data=classes(examples=7), step=GROUPED)
    with pytest.raises(ValueError, match="population"):
        trainer(data=classes(examples=5), step=GROUPED)


def test_recorded_draws_match_the_accounted_rate():
    """Replayed from the run's entropy: binomial, within 5.5 standard deviations."""
    run = trainer(seed=7)
    steps = 1_500
    sizes = np.array(
        [
            sum(int(b.unit_mask.sum()) for b in run.draw_blocks(step))
            for step in range(1, steps + 1)
        ]
    )
    episodes, rate = 10, 0.5
    deviation = np.sqrt(steps * episodes * rate * (1 - rate))
    assert abs(sizes.sum() - steps * episodes * rate) < 5.5 * deviation
    assert sizes.min() <= 1 and sizes.max() >= 9


def test_a_clip_unit_below_the_episode_is_refused():
    """A support example would change the contributions of all classes or queries."""
    data = classes()
    levels, tree = {"class": 0.2, "example": (3,)}, {"population": data.population}
    with pytest.raises(ValueError, match="clip_unit must contain a whole episode"):
        trainer(data=data, step=tree_step("class", levels, **tree))


@pytest.mark.slow
def test_the_step_may_be_the_clip_unit(tmp_path):
    data = classes()
    levels, tree = {"class": (3,), "example": (3,)}, {"population": data.population}
    run = trainer(data=data, step=tree_step("step", levels, **tree))
    assert run.sampler.slot_shape == (3, 3)
    records = run.train(tmp_path)
    assert all(r[PRIVATE]["num_units"] == 1 for r in records[1:])


@pytest.mark.slow
def test_single_examples_are_clipped_one_by_one():
    """The sum equals that of gradients computed and clipped in a plain loop."""
    data = classes(num_classes=4, examples=50)
    data = dataclasses.replace(data, has_public_units=True)
    levels, tree = {"class": 1.0, "example": 0.9}, {"population": data.population}
    apply, params = split_model(MLP(2, (8,), 4, rngs=nnx.Rngs(0)))
    run = plain_trainer(
        data=data,
        step=tree_step("example", levels, **tree),
        num_steps=1,
        learner=(Supervised(apply), params),
        shots=0,
        normalizer=1.0,
    )
    secret = run._main.draws.secret(1)
    blocks = run._main.blocks(run.state, run._main.draws.draw(secret))
    how = {"l2_clip_norm": 0.8, "noise_multiplier": 0.0, "normalizer": 1.0}
    gradient, _ = noised(run._gradient, params, blocks, **how)
    total = np.zeros(4)
    drawn = run.sampler.draw(generator(secret.key))
    for example in drawn.examples:
        label = data.class_places[example]

        def loss(p, x=data.features[example], label=label):
            return -jax.nn.log_softmax(apply(p, x[None])[0])[label]

        one = jax.grad(loss)(params)
        norm = np.sqrt(sum(np.sum(np.square(a)) for a in jax.tree.leaves(one)))
        total += np.asarray(one["head"]["bias"]) * min(1.0, 0.8 / norm)
    np.testing.assert_allclose(gradient["head"]["bias"], total, rtol=2e-4, atol=2e-4)


def test_supervised_learning_refuses_shots():
    data = dataclasses.replace(classes(), has_public_units=True)
    apply, params = split_model(MLP(2, (8,), 30, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="shots must be 0 with Supervised"):
        trainer(data=data, learner=(Supervised(apply), params), shots=1)


@pytest.mark.slow
@pytest.mark.parametrize(("clip_unit", "shape"), [("group", (5, 6)), ("task", (6,))])
def test_regression_on_a_tree_of_three_levels(tmp_path, clip_unit, shape):
    table = make_sinusoids(40, points=12, seed=0)
    task = table.unit_column("task")
    units = {"group": task // 5, "task": task}
    data = ExampleTable.from_records(
        table.features, table.targets, units=units, example_level="point"
    )
    levels = {"group": 0.5, "task": 0.5, "point": (6,)}
    step = tree_step(clip_unit, levels, population=data.population)
    run = trainer(data=data, step=step, learner=sinusoid_learner(), shots=3)
    records = run.train(tmp_path)
    assert np.isfinite(records[-1][PRIVATE]["mean_loss"])
    assert run.sampler.slot_shape == shape


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
        ({"shots": 0}, "shots must be a whole number >= 1"),
        ({"shots": 3}, "shots must be less than"),
        ({"block_size": 0}, "block_size must be a whole number >= 1"),
        ({"l2_clip_norm": 1e30}, "l2_clip_norm must be a number in"),
        ({"seed": -1}, "seed must be a whole number >= 0"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(ValueError, match=message):
        trainer(**changes)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 64])
def test_the_block_size_changes_nothing(tmp_path, block_size):
    one, other = trainer(), trainer(block_size=block_size)
    one.train(tmp_path / "one")
    other.train(tmp_path / "other")
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


def test_the_log_separates_private_values(tmp_path):
    run = trainer()
    run.train(tmp_path)
    for record in read_log(tmp_path):
        assert record.keys() <= {"step", "epsilon", PRIVATE, HELD_OUT}
    assert (tmp_path / "run.sqlite").stat().st_mode & 0o077 == 0


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
    with pytest.raises(ValueError, match="at most .* 6 to 6 here, got 9") as error:
        plain_trainer(step=sized(9, "example"))
    assert "population_is_accounted" not in str(error.value)
    # A step with the data's sizes is accepted.
    accounted = sized(9, "example", population=classes().population)
    honest = sized(6, "example")
    run = {"num_steps": 6, "delta": 1e-5}
    assert jde.epsilon(accounted, **run) == jde.epsilon(honest, **run)
    plain_trainer(step=accounted)
