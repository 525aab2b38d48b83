"""Runs with correlated noise: groups in turn, crashes, and the noise memory."""

import contextlib
import dataclasses
import itertools
import math
import sqlite3
import warnings

import numpy as np
import optax
import pytest

import jaxdp_episodic as jde
from crash_rigs import ending, gone_on, train_until
from jaxdp_episodic.tools.cli import run as command
from jaxdp_episodic.trainer.config.training_config import TrainingConfig, read_config
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.tree_draw import random_places
from jaxdp_episodic.trainer.gradient.noise import BandMemory
from jaxdp_episodic.trainer.learners.optimizers import noise_corrected_adam
from jaxdp_episodic.trainer.run import run_files
from jaxdp_episodic.trainer.run.assemble import plan
from jaxdp_episodic.trainer.run.checks import sampler_of
from jaxdp_episodic.trainer.run.evaluation import PrivateValidation
from jaxdp_episodic.trainer.run.ledger import Ledger, RunMismatchError
from jaxdp_episodic.trainer.run.ledger_file import read_ledger
from jaxdp_episodic.trainer.run.mechanisms import RunDraws
from jaxdp_episodic.trainer.run.store import RunStore
from jaxdp_episodic.training import AdaptiveBudget, ClippingConfig, PrivateGradient
from rows import fast_and_slow
from training_runs import (
    GROUPED,
    TINY,
    PlainBudget,
    assert_same,
    classes,
    plain_trainer,
)

SLOTS = dataclasses.replace(GROUPED, neighboring_relation="zero_out")
BANDED = jde.banded(SLOTS, jde.Bands(2, level="example"))
BATCHES = dataclasses.replace(
    GROUPED,
    privacy_unit="class",
    sampling=dataclasses.replace(
        GROUPED.design, episodes=jde.RandomAllocation("episode", steps_per_epoch=2)
    ),
)
BINS = jde.banded(BATCHES, jde.Bands(2, level="class"))
BY_CLASS = jde.banded(SLOTS, jde.Bands(2, level="class"))
STEPS = 7
CORRECTED = noise_corrected_adam(0.05, floor=0.1)


def a_run(step=BANDED, **changes):
    changes = {"seed": None, "optimizer": CORRECTED, **changes}
    return plain_trainer(step=step, num_steps=STEPS, **changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    a_run(BY_CLASS).train(folder)
    return folder


# --- Groups ---


def groups_of(sampler, number=120):
    """The examples in each group's draws."""
    generator = np.random.default_rng(0)
    found = [set(), set()]
    length = sampler.steps_per_epoch or 1
    for turn in range(number):
        if sampler.steps_per_epoch and turn % length == 0:
            epoch = sampler.begin_epoch(generator)
        members = epoch[turn % length] if sampler.steps_per_epoch else None
        draw = sampler.draw(generator, members, turn)
        assert draw.mask.shape[1:] == sampler.slot_shape
        found[turn % 2] |= set(draw.examples[draw.mask].tolist())
    return found


def tree(level, relation, scheme):
    classes = jde.Poisson("class", sampling_probability=0.5)
    sampling = jde.MultistageSampling(classes, scheme)
    step = jde.GaussianStep(
        sampling, noise_multiplier=1.0, clip_unit="class", neighboring_relation=relation
    )
    return jde.banded(step, jde.Bands(2, level=level))


COINS = jde.Poisson("example", sampling_probability=0.5, population=7)
SIZED = jde.WithoutReplacement("example", size=3, population=6)
EPISODES = jde.GaussianStep(
    jde.IndependentEpisodes(
        jde.MultistageSampling(
            jde.WithoutReplacement("class", size=3, population=30), SIZED
        ),
        num_episodes=2,
    ),
    noise_multiplier=1.0,
    neighboring_relation="replace_one",
)


@pytest.mark.parametrize(
    ("step", "size"),
    [
        (BANDED, 90),
        (dataclasses.replace(BANDED, neighboring_relation="replace_one"), 90),
        (BINS, 90),
        (tree("class", "add_remove", COINS), 90),
        (tree("example", "replace_one", COINS), 90),
        (tree("example", "replace_one", SIZED), 90),
        (tree("example", "zero_out", COINS), None),
        (tree("example", "add_remove", COINS), None),
        (jde.banded(EPISODES, jde.Bands(2, level="class")), 90),
    ],
)
def test_every_example_is_in_one_group(step, size):
    """Groups have equal size if sizes are public and no slot is empty."""
    sampler = sampler_of(step, classes())
    first, second = groups_of(sampler)
    assert not first & second and len(first | second) == 180
    assert size is None or len(first) == len(second) == size
    again = np.random.default_rng(5)
    sampler.deal(again)
    assert groups_of(sampler)[0] != first


@pytest.mark.parametrize(
    ("step", "both"),
    [
        # Of a class's five slots, three are in the first group.
        (tree("example", "zero_out", dataclasses.replace(COINS, population=5)), 0.4),
        (tree("example", "add_remove", COINS), 0.5),
    ],
)
def test_a_units_group_does_not_depend_on_other_units(step, both):
    """The probability that two share a group does not depend on a third unit."""

    def chance(examples, pair):
        data = classes(num_classes=400, examples=examples)
        sampler = sampler_of(step, data)
        found = []
        for seed in range(10):
            sampler.deal(np.random.default_rng(seed))
            group = np.zeros(data.num_examples, int)
            for number, (_, rows) in enumerate(sampler._groups):
                group[rows] = number
            one, other = group.reshape(400, examples)[:, pair].T
            found.append(np.mean(one == other))
        return np.mean(found)

    for examples, pair in [(4, [1, 2]), (4, [0, 3]), (3, [0, 1]), (3, [1, 2])]:
        # Of 4,000 classes: five standard errors.
        assert chance(examples, pair) == pytest.approx(both, abs=0.04)


def test_people_are_in_one_group():
    """Also if fewer people have data than the list has places."""
    data = ExampleTable.from_records(
        np.random.default_rng(0).normal(size=(198, 2)),
        units={"class": np.tile(np.repeat(np.arange(6), 3), 11)},
        owners=np.repeat(np.arange(11), 18),
    )
    design = jde.PeopleBlocks(
        num_people=13,
        people_per_block=2,
        episodes=jde.RandomAllocation("episode", steps_per_epoch=2),
        sampling=jde.MultistageSampling(
            jde.WithoutReplacement("class", size=3, population=6),
            jde.WithoutReplacement("example", size=2, population=8),
        ),
    )
    step = jde.GaussianStep(
        design, noise_multiplier=1.0, neighboring_relation="add_remove"
    )
    sampler = sampler_of(jde.banded(step, jde.Bands(3, level="person")), data)
    found = [set(), set(), set()]
    draws = sampler.draws(np.random.default_rng(1))
    for turn, draw in enumerate(itertools.islice(draws, 150)):
        found[turn % 3] |= set(data.owners.codes[draw.examples[draw.mask]].tolist())
    assert sorted(itertools.chain(*found)) == list(range(11))


def test_turns_count_charged_gradient_steps_only():
    check = dataclasses.replace(SLOTS, noise_multiplier=5.0)
    quotas = {"step": 4, "check": 2}
    options = jde.AdaptiveRun({"step": BANDED, "check": check}, quotas=quotas)
    budget = AdaptiveBudget((options,), 1e-5, checks=("check",))
    ledger = Ledger(budget, ["step", "check", "step", "step", "check"])
    assert [ledger.turn(number) for number in range(1, 7)] == [0, 1, 1, 2, 3, 3]
    planned = Ledger(PlainBudget(BANDED, 8.0, 1e-5, 9, 9, before=(check, check)))
    assert [planned.turn(number) for number in (3, 4, 9)] == [0, 1, 6]


# --- Secrets ---


def test_without_a_seed_no_secret_is_used_twice():
    """Neither groups, nor a draw, an epoch or noise: of two runs, and of two steps."""
    used = []
    for step in (BANDED, BY_CLASS, BINS) * 2:
        run = a_run(step)
        for number in (1, 3):  # of one group; an epoch has four steps
            secret = run._main.draws.secret(number)
            noise = run._main.prepared(run.state, number, secret).noise
            used += [secret.key, *(leaf.tobytes() for leaf in noise._unused[0])]
        used.append(run._main.sampler.dealt)
        if step is BINS:
            groups = map(run._main.draws.secret, (1, 5))
            used += [g.members.tobytes() for g in groups if len(g.members)]
    assert len(set(used)) == len(used)


# --- Crashes ---


class Watch:
    """Records each draw's group, and the number of sums in memory before it."""

    def __init__(self, patch):
        self.drawn, self.held, self.secret = {0: set(), 1: set()}, [], []
        draw, release = RunDraws.draw, BandMemory.release

        def drawn(draws, secret):
            found = draw(draws, secret)
            self.drawn[secret.turn % 2] |= set(found.examples[found.mask].tolist())
            return found

        def released(memory, sums, noise):
            self.held.append(len(memory._sums))
            self.secret += [leaf.tobytes() for leaf in (*sums, *noise) if leaf.any()]
            return release(memory, sums, noise)

        patch.setattr(RunDraws, "draw", drawn)
        patch.setattr(BandMemory, "release", released)

    def complaints(self, *folders):
        """Noise memory found on disk, and units found in two groups."""
        files = [path for folder in folders for path in folder.rglob("*")]
        stored = [path.read_bytes() for path in files if path.is_file()]
        wrong = [one for one in self.secret if any(one in file for file in stored)]
        return wrong, self.drawn[0] & self.drawn[1]


# Moment -> sums in memory before each release, before the crash and after it.
HELD = {
    "after a charge": (PrivateGradient, "__call__", 4, [0, 1, 1], [0, 1, 1]),
    "before the release": (RunStore, "release", 4, [0, 1, 1, 1], [0, 1, 1]),
    "before a charge": (RunStore, "charge", 4, [0, 1, 1], [0, 1, 1, 1]),
    "at a state": (RunStore, "save", 2, [0, 1, 1], [0, 1, 1, 1]),
}
CRASHES = list(itertools.product(("steps", "epochs"), HELD, (True, False)))
FAST = [
    ("steps", "after a charge", True),
    ("steps", "before the release", False),
    ("steps", "before a charge", True),
    ("steps", "before a charge", False),
    ("epochs", "before the release", True),
]


@pytest.mark.parametrize(
    ("kind", "moment", "dies"), fast_and_slow(CRASHES, lambda *row: row in FAST)
)
def test_after_a_crash_the_memory_is_empty_and_groups_take_turns(
    tmp_path, monkeypatch, kind, moment, dies
):
    """Also after a step that was given up while the process continued."""
    owner, name, call, before, after = HELD[moment]
    step = {"steps": BANDED, "epochs": BINS}[kind]
    watch, run = Watch(monkeypatch), a_run(step)
    with ending(owner, name, call):
        run.train(tmp_path, checkpoint_every=3)
    assert watch.held == before
    if dies:
        run = a_run(step)
        gone_on(run, tmp_path)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # for a step given up
            run.train(tmp_path, checkpoint_every=3)
    is_given_up = len(before) + len(after) < STEPS or moment == "before the release"
    if not dies and not is_given_up:
        after = [1] * len(after)  # nothing was lost
    assert watch.held == before + after
    assert watch.complaints(tmp_path) == ([], set())
    assert read_ledger(tmp_path).charged == run.num_steps_taken == STEPS


def test_the_optimizer_is_told_the_noise_of_the_decoded_sum():
    zero, told = np.float32(0), lambda g, *_, noise_deviation: (g, noise_deviation)
    run = a_run(optimizer=optax.GradientTransformationExtraArgs(lambda _: zero, told))
    for _ in range(3):
        expected = run.noise_deviation / run.normalizer
        run.step()
        assert run.state.optimizer_state == pytest.approx(expected)


@pytest.mark.parametrize("noise", ["discrete", "gaussian"])
def test_resuming_uses_the_released_sum(tmp_path, noise):
    """The decoded sum and its noise deviation are stored, so no data are needed."""
    clipping = ClippingConfig(count_noise=5.0) if noise == "gaussian" else None
    settings = {"noise": noise, "clipping": clipping}
    first = train_until(5, a_run(**settings), tmp_path, checkpoint_every=100)
    run = a_run(**settings)
    assert run.resume(tmp_path) == 5
    assert_same(run, first)
    assert run.noise_deviation < first.noise_deviation  # its memory is empty
    run.train(tmp_path)
    run.release(tmp_path / "release")
    said = (tmp_path / "release" / "privacy.md").read_text()
    assert "groups of `example` units in turn" in " ".join(said.split())


def test_a_resumed_seeded_run_reports_that_it_differs(tmp_path):
    train_until(1, a_run(seed=1), tmp_path)
    run = a_run(seed=1)
    with pytest.warns(UserWarning, match="differs from an uninterrupted run"):
        run.resume(tmp_path)
    run.train(tmp_path)


def test_a_run_is_not_resumed_with_other_bands(finished):
    others = (3, "class", "count: 2"), (2, "example", "level: class")
    for count, level, said in others:
        other = dataclasses.replace(BY_CLASS, bands=jde.Bands(count, level=level))
        with pytest.raises(RunMismatchError, match=f"step.bands.{said} in the check"):
            a_run(other).resume(finished)


def test_a_run_without_its_groups_is_not_resumed(tmp_path):
    """With new groups somebody could be in two consecutive steps."""
    train_until(3, a_run(), tmp_path)
    query = "FROM arrays WHERE kind = 'groups'"
    with contextlib.closing(sqlite3.connect(tmp_path / run_files.STORE)) as file:
        assert len(file.execute(f"SELECT 1 {query}").fetchall()) == 2
        file.execute(f"DELETE {query}")
        file.commit()
    run = a_run()
    run.resume(tmp_path)
    for goes_on in (run.step, lambda: run.train(tmp_path), lambda: run.draw_blocks(4)):
        with pytest.raises(FileNotFoundError, match="has no groups any more"):
            goes_on()
    assert read_ledger(tmp_path).charged == 3


def test_a_run_with_changed_groups_is_not_resumed(tmp_path, monkeypatch):
    """Another version of NumPy may draw other groups, and somebody would be in two."""
    given = np.array([4, 3, 5]), np.array([4, 1, 3]), np.random.default_rng(5)
    assert random_places(*given).tolist() == [3, 2, 0, 1, 0, 0, 1, 4]
    train_until(1, a_run(), tmp_path)
    dealt = "jaxdp_episodic.trainer.draw.groups.random_places"
    monkeypatch.setattr(dealt, lambda *given: random_places(*given)[::-1])
    other = a_run()
    with pytest.raises(RunMismatchError, match="to other groups than the run did"):
        other.resume(tmp_path)
    with pytest.raises(ValueError, match="resume did not end"):
        other.step()


def test_a_run_resumed_by_another_trainer_stops(tmp_path):
    """Also if its own charge failed, since its memory is not of that step."""
    first = a_run(folder=tmp_path)
    for _ in range(4):
        first.step()
    with ending(RunStore, "charge", 1):
        first.step()
    first.close()
    other = a_run()
    other.resume(tmp_path)
    train_until(5, other, tmp_path)
    with pytest.raises(FileExistsError, match="5 steps are charged .* at step 4"):
        first.step()


def alternating(released):
    """A rule: two steps, then a score, until nothing is left."""
    left = [name for name, number in released.left.items() if number]
    is_due = released.number % 3 == 2 and "check" in left
    return "check" if is_due else "step" if "step" in left else (left or [None])[0]


def a_run_that_adapts(limits):
    everyone = jde.Poisson("episode", sampling_probability=1.0)
    design = dataclasses.replace(SLOTS.design, num_classes=12, episodes=everyone)
    check = dataclasses.replace(SLOTS, sampling=design, noise_multiplier=5.0)
    options = jde.AdaptiveRun({"step": BANDED, "check": check}, **limits)
    return a_run(
        budget=AdaptiveBudget((options,), 1e-5, checks=("check",)),
        rule=alternating,
        checks={"check": PrivateValidation(classes(num_classes=12), check, shots=1)},
    )


def test_a_validation_with_bands_is_refused_before_it_is_charged():
    with pytest.raises(NotImplementedError, match="in epochs or with bands"):
        PrivateValidation(classes(num_classes=12), BANDED, shots=1)


QUOTAS = {"quotas": {"step": 6, "check": 3}}
PRICES = {"prices": {"step": 2, "check": 1}, "budget": 9, "blocks": {"step": 2}}


@pytest.mark.few(1)
@pytest.mark.parametrize("limits", [QUOTAS, PRICES], ids=["quotas", "prices"])
def test_adaptive_runs_take_turns_by_charged_steps(tmp_path, monkeypatch, limits):
    """A score takes no turn and keeps the memory; a crash clears it."""
    watch, turns, secret = Watch(monkeypatch), [], RunDraws.secret

    def watched(draws, number):
        made = secret(draws, number)
        turns.append((number, made.turn))
        return made

    monkeypatch.setattr(RunDraws, "secret", watched)
    run = a_run_that_adapts(limits)
    # Step 4 is charged and lost; step 8 is not charged before the process dies.
    for name in ("release", "charge"):
        with ending(RunStore, name, 4):
            run.train(tmp_path)
        run = a_run_that_adapts(limits)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the step given up
            run.resume(tmp_path)
    run.train(tmp_path)
    order = ["step", "step", "check"] * 3
    content = read_ledger(tmp_path)
    assert content.choices[:9] == order and content.charged == len(content.choices)
    steps = [i for i, name in enumerate(content.choices, 1) if name == "step"]
    assert turns == list(zip(steps, range(len(steps)), strict=True))
    assert watch.held[:6] == [0, 1, 1, 0, 1, 0]
    assert watch.complaints(tmp_path) == ([], set())
    assert content.adaptive_taken.taken["step"] == len(steps)
    owed = jde.compose((BANDED.in_group, 3), (run.checks["check"].step, 3))
    if limits is QUOTAS:
        promised = jde.epsilon(owed, delta=1e-5)
        assert run.budget.epsilon == pytest.approx(promised, rel=1e-9)


def test_groups_are_erased_when_a_run_chooses_to_end(tmp_path):
    quotas = jde.AdaptiveRun({"step": BANDED}, quotas={"step": 4})

    def two(released):
        return "step" if released.number < 2 else None

    a_run(budget=AdaptiveBudget((quotas,), 1e-5), rule=two).train(tmp_path)
    assert read_ledger(tmp_path).charged == 2
    with contextlib.closing(RunStore(tmp_path / run_files.STORE)) as store:
        assert store.kept("groups") is None


def test_groups_are_erased_after_the_last_step(finished):
    with contextlib.closing(RunStore(finished / run_files.STORE)) as store:
        assert store.kept("groups") is None
    run = a_run(BY_CLASS)
    assert run.resume(finished) == STEPS
    with pytest.raises(FileNotFoundError, match="lost, or erased at the end"):
        run.draw_blocks(STEPS + 1)  # beyond the plan


# --- Configs ---

NOISY = TINY.replace(
    "[step.sampling]", '[step]\nneighboring_relation = "zero_out"\n[step.sampling]'
).replace(
    "[learner]", '[noise]\nkind = "banded"\nbands = 2\ngroups = "example"\n[learner]'
)


def config_of(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "banded"', 'kind = "band"', "config.noise.*kind.*'banded'"),
        *(
            ("bands = 2", f"bands = {bad}", "noise: bands must be .* >= 2 or 'auto'")
            for bad in ("1", "1.5", '"many"')
        ),
        ('groups = "example"', "", "config.noise: missing key 'groups'"),
        ("bands = 2", "bands = 2\nhorizon = 0.5", "horizon must lie in"),
        ("bands = 2", 'bands = 2\nlaw = "laplace"', "law must be one of"),
        (
            "[model]",
            "[adaptive.options.a]\nmost = 1\n[adaptive.options.b]\nmost = 2\n[model]",
            "noise.bands must be a number, for one opt",
        ),
        ('kind = "protonet"', 'kind = "plda"', "noise.kind='banded' must not"),
    ],
)
def test_mistakes_are_named(tmp_path, old, new, message):
    text = NOISY.replace(old, new, 1)
    if "plda" in new:
        text = text.replace("l2_clip_norm = 0.1\n", "").replace("num_steps = 3\n", "")
        text = text[: text.index("[model]")]
    with pytest.raises((TypeError, ValueError), match=message):
        read_config(config_of(tmp_path, text))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bands = 2", "bands = 7", "noise: bands must leave .* step samples"),
        ('groups = "example"', 'groups = "school"', "noise: groups must be of level"),
        ('"zero_out"', '"add_remove"', "noise: .*without replacement, under add_rem"),
    ],
)
def test_groups_without_a_theorem_are_refused(tmp_path, old, new, message):
    config = read_config(config_of(tmp_path, NOISY.replace(old, new)))
    data, _ = config.training_data()
    with pytest.raises((ValueError, NotImplementedError), match=message):
        config.step_on(data.population)
    with pytest.raises(ValueError, match="or a table with kind='banded' and groups"):
        dataclasses.replace(config, noise="banded")


def test_auto_equals_the_choice_of_the_function(tmp_path):
    text = NOISY.replace("bands = 2", 'bands = "auto"\nhorizon = inf')
    config = read_config(config_of(tmp_path, text))
    data, _ = config.training_data()
    bare = config.step_on(data.population)
    assert bare.bands is None
    target = {"epsilon": 8.0, "delta": 1e-5, "num_steps": 3}
    chosen = jde.choose_bands(bare, horizon=math.inf, level="example", **target).step
    planned = plan(config, data).step
    assert planned.bands == chosen.bands and planned.design == chosen.design
    config = read_config(config_of(tmp_path, text.replace("zero_out", "add_remove")))
    with pytest.raises(NotImplementedError, match="noise: .* under add_remove"):
        plan(config, data)
    with pytest.raises(ValueError, match="noise.bands='auto' needs .* epsilon=inf"):
        read_config(config_of(tmp_path, text.replace("epsilon = 8.0", "epsilon = inf")))


@pytest.mark.slow
def test_a_config_trains_with_bands(tmp_path, capsys):
    path, out = config_of(tmp_path, NOISY), tmp_path / "out"
    config = read_config(path)
    assert config.noise_law == "discrete" and config.noise.horizon == 30
    assert TrainingConfig.from_dict(config.to_dict()) == config
    assert command(["train", str(path), "--out", str(out)]) == 0
    content = read_ledger(out)
    assert content.a_step.bands == jde.Bands(2, level="example")
    assert command(["epsilon", "--ledger", str(out)]) == 0
    assert "epsilon" in capsys.readouterr().out
    assert "2, of groups of example" in (out / "report.md").read_text()
