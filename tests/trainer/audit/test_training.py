"""Audits of whole runs and of their steps, by canaries."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.audit import Training, audit_run, audit_steps, training_of_config
from jaxdp_episodic.trainer.audit import training as audits
from jaxdp_episodic.trainer.audit.canaries import (
    CANARIES,
    MODEL,
    CanaryLearner,
    gradient_canaries,
    input_canaries,
)
from jaxdp_episodic.trainer.data.stored import Records, load_stored, store
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.gradient.private_gradient import clip_by_norm
from jaxdp_episodic.trainer.learners.episode import Block, contribution_loss, to_episode
from jaxdp_episodic.training import (
    ClippingConfig,
    PrivacyBudget,
    Trainer,
    noise_corrected_adam,
    read_config,
)
from training_runs import (
    GROUPED,
    SHOTS,
    TINY,
    adam,
    classes,
    protonet,
    sgd,
    sinusoid_learner,
    tree_step,
)

DELTAS = (1e-3, 1e-2, 1e-1)
RDP = {"method": "rdp"}
NUMBER = 20  # runs of equal size share compiled programs


@pytest.fixture(autouse=True)
def quick_claims(request, monkeypatch):
    """Claims by Rényi DP, also upper bounds: exact ones would compile for a minute."""
    if request.node.get_closest_marker("slow") is None:

        def by_rdp(*arguments, **named):
            return jde.epsilon(*arguments, **{**named, **RDP})

        monkeypatch.setattr(audits, "epsilon", by_rdp)


def seeded(*arguments, **named):
    """A trainer with a fixed seed, so that audits are reproducible."""
    return Trainer(*arguments, **{**named, "seed": 11})


def budget_of(step, num_steps=30):
    spent = float(jde.epsilon(step, num_steps=num_steps, delta=1e-5, method="rdp"))
    return PrivacyBudget(step, spent, 1e-5, num_steps, num_steps)


def few_shot(*, noise=0.7, rate=0.9, make_trainer=seeded, **more):
    design = dataclasses.replace(
        GROUPED.design, episodes=jde.Poisson("episode", sampling_probability=rate)
    )
    step = dataclasses.replace(GROUPED, sampling=design, noise_multiplier=noise, **more)
    parts = *protonet(), classes(), budget_of(step), SHOTS, adam(0.05), 0.5
    return Training(*parts, make_trainer=make_trainer)


def task_table(num_tasks=60):
    rng = np.random.default_rng(0)
    phase = rng.uniform(0, 3, size=(num_tasks, 1))
    x = rng.uniform(-3, 3, size=(num_tasks, 8))
    return ExampleTable.from_records(
        x.reshape(-1, 1),
        np.sin(x + phase).ravel(),
        units={"task": np.repeat(np.arange(num_tasks), 8)},
        example_level="point",
    )


def tasks(*, noise="gaussian", **changes):
    step = tree_step("task", {"task": 0.9, "point": (6,)}, privacy_unit="task")
    parts = *sinusoid_learner(), task_table(), budget_of(step), 3, sgd(0.01), 0.5
    how = {"normalizer": 50.0, "noise": noise, "make_trainer": seeded}
    return Training(*parts, **how, **changes)


SOUND = {
    "few_shot": few_shot,
    "tasks": tasks,
    # The clip norm follows counts that include the canary.
    "followed tasks": lambda: tasks(
        noise="discrete", clipping=ClippingConfig(rate=1.0, count_noise=1.0)
    ),
    "normalized tasks": lambda: tasks(
        noise="discrete", clipping=ClippingConfig(kind="normalize")
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("training", SOUND)
def test_steps_of_a_sound_trainer_pass(training):
    """For an example (or a class) and for a task.

    Faults of the trainer's steps are planted in tests/mutation.
    """
    audit = audit_steps(SOUND[training](), num_draws=2_000, deltas=DELTAS)
    assert not audit.is_violated
    # Canaries contribute as much as the theorem allows.
    found = [b.epsilon / c for b, c in zip(audit.bounds, audit.claimed, strict=True)]
    assert max(found) > 0.3


@pytest.mark.parametrize(
    ("training", "kind"),
    [
        # The run with too little noise shares its compiled programs.
        (few_shot, "gradient"),
        pytest.param(tasks, "input", marks=pytest.mark.slow),
    ],
)
def test_a_sound_run_passes(training, kind):
    audit = audit_run(training(), kind=kind, num_canaries=NUMBER)
    assert not audit.is_violated
    assert audit.num_steps == 30
    assert audit.claimed_exact <= audit.claimed_rdp
    assert audit.guesses.num_canaries == NUMBER
    if kind == "gradient":  # with little noise and many steps the membership is evident
        assert audit.guesses.epsilon > 0.5


def test_a_run_with_too_little_noise_is_detected():
    """The claim is an epsilon of 0.9; the run has a fiftieth of its noise.

    In six steps an example is drawn with probability 0.97, and detected if it is.
    """

    def faulty(*arguments, **named):
        step = named["budget"].step
        less = dataclasses.replace(step, noise_multiplier=step.noise_multiplier / 50)
        return seeded(
            *arguments,
            **{**named, "budget": dataclasses.replace(named["budget"], step=less)},
        )

    training = few_shot(noise=10.0, make_trainer=faulty)
    audit = audit_run(training, num_canaries=NUMBER, num_steps=6)
    assert audit.claimed_exact < 1
    assert audit.is_violated


@pytest.mark.filterwarnings("ignore:the run samples")
def test_the_claim_is_for_the_canaries_and_the_steps_taken():
    adam_bc = noise_corrected_adam(0.05, floor=0.1)  # needs the noise's deviation
    for more in ({"neighboring_relation": "replace_one"}, {"privacy_unit": "class"}):
        training = dataclasses.replace(few_shot(**more), optimizer=adam_bc)
        audit = audit_run(training, num_canaries=NUMBER, num_steps=4)
        assert not audit.is_violated and audit.num_steps == 4
        assert audit.privacy_unit == more.get("privacy_unit", "example")
        expected = jde.epsilon(training.budget.step, num_steps=4, delta=1e-5, **RDP)
        assert audit.claimed_exact == pytest.approx(float(expected), rel=1e-6)


def test_a_config_becomes_a_training(tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(TINY)
    training = training_of_config(read_config(file), tmp_path)
    assert training.budget.num_steps == 3
    assert training.learner.ways == 4
    other = training_of_config(read_config(file), tmp_path, privacy_unit="class")
    assert other.budget.step.privacy_unit == "class"
    noise = training.budget.step.noise_multiplier
    assert other.budget.step.noise_multiplier == noise
    file.write_text(TINY.replace("epsilon = 8.0", "epsilon = inf"))
    with pytest.raises(ValueError, match="finite"):
        training_of_config(read_config(file), tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kind": "loud"}, "kind"),
        ({"num_canaries": 61}, "num_canaries must be .*at most 60"),
        ({"num_steps": 0}, "num_steps"),
        ({"confidence": 0.1}, "confidence"),
    ],
)
def test_bad_input_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        audit_run(tasks(), **{"num_canaries": 3, "num_steps": 1, **changes})


def test_audits_of_steps_refuse_bands():
    plain = tasks()
    step = jde.banded(plain.budget.step, jde.Bands(4, level="task"))
    with pytest.raises(NotImplementedError, match="audit_steps does not cover bands"):
        audit_steps(dataclasses.replace(plain, budget=budget_of(step)), num_draws=100)


# --- Epochs ---


def tasks_in(scheme, *, relation="add_remove"):
    plain = tasks()
    below = jde.WithoutReplacement("point", size=6)
    step = dataclasses.replace(
        plain.budget.step,
        sampling=jde.MultistageSampling(scheme, below),
        neighboring_relation=relation,
    )
    return dataclasses.replace(plain, budget=budget_of(step, num_steps=7))


BINS = jde.RandomAllocation("task", steps_per_epoch=3)
BATCHES = jde.ShuffledEpochs("task", steps_per_epoch=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "relation", "share"),
    [(BINS, "add_remove", 0.15), (BATCHES, "replace_one", 0.1)],
)
def test_epochs_are_audited_as_a_whole(scheme, relation, share):
    training = tasks_in(scheme, relation=relation)
    audit = audit_steps(training, num_draws=500, deltas=DELTAS)
    assert not audit.is_violated
    best = max(
        bound.epsilon / claimed
        for bound, claimed in zip(audit.bounds, audit.claimed, strict=True)
    )
    assert share < best <= 1
    claimed = jde.epsilon(training.budget.step, num_steps=3, delta=list(DELTAS))
    np.testing.assert_allclose(audit.claimed, claimed, rtol=1e-9)


@pytest.mark.slow
def test_a_run_that_ends_within_an_epoch_is_audited():
    audit = audit_run(tasks_in(BINS), num_canaries=20)
    assert audit.num_steps == 7
    assert not audit.is_violated


# --- Canaries ---

DATA = classes()
CLASS_LEVEL = dataclasses.replace(GROUPED, privacy_unit="class")
REPLACED = dataclasses.replace(GROUPED, neighboring_relation="replace_one")


def generator():
    return np.random.default_rng(0)


def sizes(table):
    return table.population.children_counts[-1]


def test_a_canary_example_is_added_to_its_world():
    canaries = gradient_canaries(DATA, GROUPED, 4, generator())
    everyone = np.ones(4, bool)
    without, with_all = canaries.data(~everyone), canaries.data(everyone)
    assert without.num_examples == DATA.num_examples
    np.testing.assert_array_equal(sizes(without), sizes(DATA))
    assert sorted(sizes(with_all) - sizes(DATA))[-5:] == [0, 1, 1, 1, 1]
    np.testing.assert_array_equal(without.features[:, :-1], DATA.features)
    one = canaries.data(np.array([True, False, False, False]))
    assert one.num_examples == DATA.num_examples + 1
    assert (one.features[:, -1] == 1).sum() == 1
    # The others of its class carry the opposite mark in both worlds.
    assert (one.features[:, -1] == -1).sum() == 6
    assert (without.features[:, -1] == -1).sum() == 6


def test_canaries_among_stored_data_are_those_among_data_in_memory(tmp_path):
    numbers = DATA.with_features(np.arange(DATA.num_examples))
    made = Records(numbers, lambda rows: [DATA.features[rows]])
    store(tmp_path / "out", {"train": made}, made_from={})
    one, other = (
        gradient_canaries(data, GROUPED, 4, generator()).table.features
        for data in (load_stored(tmp_path / "out"), DATA)
    )
    np.testing.assert_array_equal(one, other)


def test_canary_classes_are_emptied_and_replaced_canaries_flip_their_mark():
    canaries = gradient_canaries(DATA, CLASS_LEVEL, 3, generator())
    without = canaries.data(np.zeros(3, bool))
    assert sorted(sizes(without))[:4] == [0, 0, 0, 6]
    assert without.population.num_units(1) == 30
    with_all = canaries.data(np.ones(3, bool))
    assert set(with_all.features[:, -1]) == {0.0, 1.0, 2.0, 3.0}
    canaries = gradient_canaries(DATA, REPLACED, 2, generator())
    one, other = (canaries.data(np.full(2, coin)).features for coin in (True, False))
    differ = np.flatnonzero((one != other).any(axis=1))
    np.testing.assert_array_equal(differ, np.sort(canaries.rows))
    np.testing.assert_array_equal(one[differ, -1], -other[differ, -1])


def test_neighbours_differ_in_one_unit():
    for step in (GROUPED, CLASS_LEVEL, REPLACED):
        for make in (gradient_canaries, input_canaries):
            canaries = make(DATA, step, 5, generator())
            coins = np.array([True, False, True, True, False])
            other = coins.copy()
            other[3] = False
            rows = [
                Counter(map(tuple, canaries.data(c).features.tolist()))
                for c in (coins, other)
            ]
            changed = (rows[0] - rows[1]).total() + (rows[1] - rows[0]).total()
            # A shuffled row of two numbers may equal the original.
            least = 0 if step is REPLACED and make is input_canaries else 1
            assert least <= changed <= (6 if step is CLASS_LEVEL else 2)


def test_input_canaries_are_shuffled_and_their_targets_mirrored():
    rng = np.random.default_rng(1)
    table = ExampleTable.from_records(
        rng.normal(size=(60, 8)),
        rng.normal(size=60),
        units={"task": np.repeat(np.arange(6), 10)},
        example_level="point",
    )
    levels = {"task": 0.5, "point": (4,)}
    step = tree_step("task", levels, privacy_unit="task", population=table.population)
    canaries = input_canaries(table, step, 2, generator())
    changed = canaries.table.features != table.features
    assert set(np.flatnonzero(changed.any(axis=1))) <= set(canaries.rows)
    np.testing.assert_allclose(
        np.sort(canaries.table.features, axis=1), np.sort(table.features, axis=1)
    )
    mean = table.targets.mean()
    np.testing.assert_allclose(
        canaries.table.targets[canaries.rows] - mean,
        -3 * (table.targets[canaries.rows] - mean),
        atol=1e-5,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ((0, 0, 0), None),
        ((2, 0, 0), [0.0, 1.0, 0.0]),
        ((-2, 0, 0), [0.0, -1.0, 0.0]),
        ((2, -2, 0), [0.0, 1.0, 0.0]),
        ((1, 3, 0), [0.5**0.5, 0.0, 0.5**0.5]),
    ],
)
def test_a_canarys_clipped_contribution_is_the_worst_case(marks, expected):
    """It is the canary's direction with the clip norm, without the model's gradient."""
    model, params = protonet()
    learner = CanaryLearner(model, (2,), "float32", 3, l2_clip_norm=0.5)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(3, 3, 3)).astype(np.float32)
    inputs[..., -1] = 0
    inputs[:, 0, -1] = marks  # one slot of each class
    unit = Block(
        jnp.asarray(inputs),
        jnp.zeros((3, 3), jnp.float32),
        jnp.ones((3, 3), jnp.float32),
        jnp.ones((), jnp.float32),
    )
    loss = contribution_loss(learner, (3, 3), shots=1)
    gradients = jax.jit(jax.grad(loss))
    gradient = gradients(learner.params(params), unit)
    clipped, _, finite = jax.jit(clip_by_norm)(gradient, jnp.float32(0.5))
    assert finite
    if expected is None:
        bare = unit._replace(inputs=unit.inputs[..., :-1])
        episode = to_episode(bare, shots=1, is_regression=False)
        plain = jax.jit(jax.grad(model.loss))(params, episode)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        jax.tree.map(close, gradient[MODEL], plain)
        assert not np.any(gradient[CANARIES])
        nothing = jnp.zeros((3, 3), jnp.float32)
        masked = Block(jnp.ones_like(unit.inputs), nothing, nothing, unit.unit_mask)
        gradient = gradients(learner.params(params), masked)
        assert not np.any(gradient[CANARIES])
        return
    np.testing.assert_allclose(
        clipped[CANARIES], 0.5 * np.asarray(expected), rtol=2e-5, atol=1e-6
    )
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(clipped[MODEL]))
