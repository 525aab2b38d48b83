"""What a person, an original and a contribution are: bounds, copies, nulls."""

import contextlib
import dataclasses
import io
import tomllib

import numpy as np
import pytest

import jaxdp_episodic as jde
from crash_rigs import train_until
from jaxdp_episodic.data import ExampleTable, load_glyphs, truncated, with_rotations
from jaxdp_episodic.trainer.audit.canaries import input_canaries
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.draw import step_generator
from jaxdp_episodic.trainer.draw.complete import Needs
from jaxdp_episodic.trainer.run import checks
from jaxdp_episodic.trainer.run.assemble import Tables, assembled
from jaxdp_episodic.trainer.run.checks import check_held_out, found_in_both, ways_out
from jaxdp_episodic.trainer.run.ledger_file import read_ledger, run_file
from jaxdp_episodic.trainer.run.report import privacy_statement, report_of_budget
from jaxdp_episodic.trainer.run.run_files import contributions_in_log, read_log
from jaxdp_episodic.trainer.run.store import EPOCH, RunStore
from jaxdp_episodic.trainer.statistics.terms import Contributors
from jaxdp_episodic.training import StartConfig, TrainingConfig, plan_budget
from training_runs import (
    GROUPED,
    QUERIES,
    SHOTS,
    TINY,
    WAYS,
    classes,
    flat_step,
    owned,
    plain_trainer,
    protonet,
    trainer,
)

PEOPLE, CLASSES, SIZE = 6, 30, SHOTS + QUERIES
BOUNDS = jde.PersonBounds(classes=CLASSES, examples=1)


def grouped(people=BOUNDS, **changes):
    return dataclasses.replace(GROUPED, privacy_unit="person", people=people, **changes)


def blocks(scheme, people=None, **changes):
    inside = jde.MultistageSampling(
        jde.WithoutReplacement("class", size=WAYS, population=CLASSES),
        jde.WithoutReplacement("example", size=SIZE, population=SIZE),
    )
    design = jde.PeopleBlocks(
        num_people=PEOPLE, people_per_block=SIZE, episodes=scheme, sampling=inside
    )
    return jde.GaussianStep(design, noise_multiplier=1.0, people=people, **changes)


COINS = jde.Poisson("episode", sampling_probability=0.5)


@pytest.mark.parametrize(
    "step",
    [
        blocks(COINS, BOUNDS, neighboring_relation="zero_out"),
        pytest.param(grouped(), marks=pytest.mark.slow),
    ],
    ids=["blocks", "grouped"],
)
def test_people_are_protected_end_to_end(step, tmp_path):
    run = trainer(step=step, data=owned(), num_steps=3)
    run.train(tmp_path)
    spent = float(run.budget.spent(3))
    assert spent == pytest.approx(8.0, rel=1e-6)
    own = dataclasses.replace(step, noise_multiplier=run.budget.step.noise_multiplier)
    assert spent == jde.epsilon(own, num_steps=3, delta=1e-5)
    assert read_ledger(tmp_path).a_step.privacy_unit == "person"
    statement = privacy_statement(run.budget, 3)
    assert "person" in statement.splitlines()[2]


def test_the_blocks_of_an_epoch_survive_an_interruption(tmp_path):
    scheme = jde.RandomAllocation("episode", steps_per_epoch=4)
    step = blocks(scheme, neighboring_relation="replace_one")

    def made():
        return plain_trainer(step=step, data=owned(), num_steps=4, seed=None)

    train_until(2, made(), tmp_path)
    with contextlib.closing(RunStore(tmp_path / "run.sqlite")) as store:
        kept = store.kept(EPOCH)[1][0].tobytes()
    with np.load(io.BytesIO(kept)) as found:
        people = found["units"]
    assert sorted(people.ravel().tolist()) == list(range(PEOPLE))
    again = made()
    again.resume(tmp_path)
    drawn = again.sampler.draw(step_generator(0, 0), people[:1])
    owners = owned().owners.codes[drawn.examples]
    assert set(owners.ravel().tolist()) == set(people[0].tolist())
    again.train(tmp_path)
    assert again.num_steps_taken == 4
    with contextlib.closing(RunStore(tmp_path / "run.sqlite")) as store:
        assert store.kept(EPOCH) is None


@pytest.mark.parametrize(
    ("bounds", "relation", "among_slots"),
    [
        (BOUNDS, "add_remove", True),
        (BOUNDS, "zero_out", True),
        (None, "add_remove", False),
    ],
)
def test_blocks_with_bounds_draw_among_public_slots(bounds, relation, among_slots):
    """Without bounds every episode of the block is accounted as holding the person."""
    step = blocks(COINS, bounds, neighboring_relation=relation)
    made = checks.sampler_of(step, owned())
    assert (made._blocks.slots is not None) == among_slots


def test_missing_owners_and_people_beyond_their_bounds_are_refused():
    with pytest.raises(ValueError, match=r"say whose each example is .* owner="):
        plain_trainer(step=grouped(), data=classes(), num_steps=3)
    few = grouped(jde.PersonBounds(classes=12, examples=1))
    with pytest.raises(ValueError, match=r"people\.classes .* 30, got 12"):
        plain_trainer(step=few, data=owned(), num_steps=1)


@pytest.mark.filterwarnings("ignore:the run samples")
def test_dropped_examples_are_in_the_ledger_not_in_the_release(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "LEAST_IN_RUN", 0.0)  # otherwise it is refused
    bounds = jde.PersonBounds(classes=12, examples=1)
    bounded = truncated(owned(), bounds)
    run = plain_trainer(
        step=grouped(bounds, neighboring_relation="zero_out"),
        data=bounded.table,
        truncation=bounded.truncation,
        num_steps=2,
    )
    run.train(tmp_path)
    with run_file(tmp_path) as file:
        (opened,) = file.openings()
    words = "108 of 180 examples left out, of 6 of 6 people"
    assert opened["people"].startswith(words)
    given = {"truncation": bounded.truncation}
    assert words in privacy_statement(run.budget, 2, **given)
    released = privacy_statement(run.budget, 2, for_release=True, **given)
    assert "at most 12 classes" in released
    assert "108" not in released


def test_a_run_that_protects_examples_states_a_persons_epsilon():
    step = dataclasses.replace(GROUPED, neighboring_relation="zero_out")
    budget = plan_budget(step, epsilon=8.0, delta=1e-5, num_steps=3)
    private = privacy_statement(budget, 3, people=BOUNDS)
    own = dataclasses.replace(budget.step, privacy_unit="person", people=BOUNDS)
    cost = jde.epsilon(own, num_steps=3, delta=1e-5)
    assert cost > 16
    assert f"at most 1 in each: epsilon {cost:.4g}"[:-1] in private
    released = privacy_statement(budget, 3, people=BOUNDS, for_release=True)
    assert "not a person" in released
    assert "30 classes" not in released


def test_people_in_both_parts_of_the_data_are_reported():
    trained, held_out = owned(), owned(classes(num_classes=4, seed=3))
    with pytest.warns(UserWarning, match=r"6 of its 6 people in common .* such as 0"):
        check_held_out("test", held_out, trained)
    found = found_in_both(held_out, trained, grouped())
    assert found == ("6 'person' units in both, such as 0", "")
    nameless = classes(seed=9)
    assert "names no owners" in found_in_both(nameless, trained, grouped())[0]
    assert found_in_both(trained, trained, GROUPED) == ("all of the training data", "")
    assert found_in_both(nameless, trained, GROUPED) == ("", "")
    strings = dataclasses.replace(
        held_out,
        owners=Owners.from_ids([f"p{i % 6}" for i in range(24)], name="owners"),
    )
    assert "of two kinds" in found_in_both(strings, trained, grouped())[0]


def test_bounds_with_too_many_terms_are_refused():
    bounds = {"people": jde.PersonBounds(classes=15_000, examples=1)}
    design = dataclasses.replace(GROUPED.design, num_classes=10**6)
    with pytest.raises(NotImplementedError, match="terms in all"):
        jde.epsilon(grouped(**bounds, sampling=design), num_steps=1, delta=1e-5)


# --- Copies: rotated classes ---

ROTATED = TINY.replace("small = true", "small = true\nrotations = true").replace(
    "num_classes = 40", "num_classes = 160"
)
ONE_LEVEL_UP = ("x", "y", "y")


def config_of(text=ROTATED, **step):
    table = tomllib.loads(text)
    table["step"].update(step)
    return TrainingConfig.from_dict({"type": "TrainingConfig", **table})


def images(classes=3, each=2, **fields):
    labels = np.repeat(list("abcdef"[:classes]), each)
    pixels = np.arange(len(labels) * 9, dtype=np.float32).reshape(-1, 3, 3)
    fields.setdefault("units", {"class": labels})
    return ExampleTable.from_records(pixels, **fields)


def test_each_class_becomes_four_whose_examples_are_copies():
    base = images()
    table = with_rotations(base)
    names = table.population.unit_ids[0].tolist()
    assert names[:5] == ["a", "a@90", "a@180", "a@270", "b"]
    assert table.population.children_counts[1].tolist() == [2] * 12
    for row, original in enumerate(table.originals.codes):
        turned = np.rot90(base.features[original], table.class_places[row] % 4)
        np.testing.assert_array_equal(table.features[row], turned)
    assert np.bincount(table.originals.codes).tolist() == [4] * 6
    # The tree above, owners and public lists stay; selections keep their originals.
    units = {"task": np.repeat(ONE_LEVEL_UP, 2), "class": np.repeat(list("abc"), 2)}
    tall = with_rotations(images(units=units, owners=np.tile([1, 2], 3)))
    assert tall.num_units == {"task": 2, "class": 12, "example": 24}
    np.testing.assert_array_equal(tall.owners.codes, tall.originals.codes % 2)
    assert tall.select("task", ["x"]).originals.codes.tolist() == [0, 1] * 4
    assert table.fingerprint != dataclasses.replace(table, originals=None).fingerprint


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (images().with_features(np.zeros((6, 3, 2))), "square images"),
        (images(targets=np.zeros(6)), "without targets"),
        (with_rotations(images()), "without copies"),
        (images(units={"class": ["a", "a", "a@90"] * 2}), "named like rotations"),
    ],
)
def test_data_without_rotations_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        with_rotations(table)


def test_all_copies_of_a_class_are_in_one_part():
    """Classes are split by name before they are copied."""
    config = config_of()
    parts = {s: config.data.load(s) for s in ("train", "validation", "test")}
    for split, table in parts.items():
        plain = load_glyphs(split, small=True, size=14)
        np.testing.assert_array_equal(table.features[:20], plain.features[:20])
        assert table.num_examples == 4 * plain.num_examples
        names = [str(one).partition("@")[0] for one in table.population.unit_ids[0]]
        assert set(names) == set(plain.population.unit_ids[0])


@pytest.mark.parametrize("unit", [{}, {"privacy_unit": "example"}])
def test_an_example_is_protected_with_its_copies(unit):
    config = config_of(**unit)
    step = config.step_on(config.training_data()[0].population)
    assert step.privacy_unit == "original"
    assert step.people == jde.PersonBounds(examples=1, classes=4)


def test_people_are_accounted_with_copies_and_classes_are_refused():
    people = "[people]\nexamples = 1\nclasses = 7\n[learner]"
    text = ROTATED.replace("[learner]", people)
    text = text.replace("small = true", 'small = true\nowner = "typeface"')
    config = config_of(text, privacy_unit="person")
    data, truncation = config.training_data()
    step = config.step_on(data.population)
    assert step.people == jde.PersonBounds(examples=1, classes=28)
    assert data.people.most_classes == 28 and truncation.bounds.classes == 7
    # A kept drawing keeps all four copies.
    assert set(np.bincount(data.originals.codes)) <= {0, 4}
    with pytest.raises(
        NotImplementedError, match="privacy_unit='class' with rotations"
    ):
        config_of(privacy_unit="class").step_on(data.population)


def test_protecting_a_single_copy_is_refused():
    """Trainer and statistics refuse a step that ignores the copies."""
    config = config_of(ROTATED.replace("epsilon = 8.0", "epsilon = inf"))
    plain = dataclasses.replace(
        config, data=dataclasses.replace(config.data, rotations=None)
    )
    data, _ = config.training_data()
    bare = dataclasses.replace(data, originals=None)
    for of, table, message in (
        (plain, data, "privacy_unit must be 'original'"),
        (config, bare, "which examples are copies"),
    ):
        tables = Tables(of, None)
        tables._loaded["train"] = table
        with pytest.raises(ValueError, match=message):
            assembled(of, tables, evaluates=False)
    who = {"privacy_unit": "example", "neighboring_relation": "zero_out"}
    with pytest.raises(ValueError, match="privacy_unit must be 'original'"):
        Contributors(data, None, **who, slots=20, people=None)
    with pytest.raises(ValueError, match="same of all copies"):
        images(owners=np.arange(6), originals=np.zeros(6, int))


def test_an_original_with_copies_in_both_parts_chooses_no_stage():
    """Copies have other content; originals without ids cannot be recognized."""
    bounds = jde.PersonBounds(examples=4)
    step = dataclasses.replace(flat_step(), privacy_unit="original", people=bounds)
    named = [images(originals=[f"x{i}" for i in range(n, n + 6)]) for n in (0, 5, 6)]
    other = named[0].with_features(-1 - named[0].features)
    found, _ = found_in_both(other, named[1], step)
    assert found == "1 'original' units in both, such as 'x5'"
    assert found_in_both(other, named[2], step) == ("", "")
    counted = with_rotations(images()), with_rotations(images(each=3))
    assert found_in_both(*counted, step) == ("", "")


def test_canaries_are_examples_with_all_copies():
    config = config_of(neighboring_relation="zero_out")
    data, _ = config.training_data()
    step = config.step_on(data.population)
    canaries = input_canaries(data, step, 3, np.random.default_rng(0))
    assert np.bincount(canaries.owner).tolist() == [4, 4, 4]
    left = canaries.data(np.zeros(3, bool))
    assert left.num_examples == data.num_examples - 12
    assert set(np.unique(left.originals.codes, return_counts=True)[1]) == {4}


def test_statistics_give_an_example_one_contribution():
    """All four copies are one term of each sum, with weight 1/4 in pairs."""
    data, _ = config_of().training_data()
    start = StartConfig(kind="plda")
    who = Contributors(
        data,
        start,
        privacy_unit="original",
        neighboring_relation="zero_out",
        slots=20,
        people=jde.PersonBounds(examples=1, classes=4),
    )
    terms = who.examples()
    assert set(terms.shares) == {4} and who.number == data.num_examples // 4
    pairs = who.pairs(np.random.default_rng(1))
    weight = np.zeros(who.number)
    for rows in pairs.rows:
        np.add.at(weight, data.originals.codes[rows], 1 / pairs.shares)
    assert weight.max() <= 1 + 1e-12


# --- Complete contributions: shown, warned of, or refused ---

SIZES = np.random.default_rng(0).integers(3, 31, 48)  # 3 to 30 images each
# Ten times as many classes need a tenth of the simulated draws.
MANY = np.tile(SIZES, 10)


def unequal(sizes=SIZES):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    points = np.random.default_rng(1).normal(size=(len(labels), 2))
    return ExampleTable.from_records(points, units={"class": labels})


def wasted(relation="zero_out", size=4, slots=30, ways=3, classes=48):
    return jde.GaussianStep(
        jde.GroupedClasses(
            num_classes=classes,
            ways=ways,
            episodes=jde.Poisson("episode", sampling_probability=0.5),
            examples=jde.WithoutReplacement("example", size=size, population=slots),
        ),
        noise_multiplier=1.0,
        neighboring_relation=relation,
        small_units="keep",
    )


def test_a_run_without_complete_contributions_is_refused():
    model, params = protonet()
    learner = dataclasses.replace(model, ways=5), params
    wide = wasted(size=4, ways=5, classes=480)
    with pytest.raises(ValueError, match="nothing was charged") as caught:
        plain_trainer(data=unequal(MANY), learner=learner, step=wide, num_steps=60)
    said = str(caught.value)
    assert "48 contributions (episode) a step on average" in said
    assert 'it would be 1 under neighboring_relation = "add_remove"' in said
    assert "with size = 2 of 'example' instead of 4" in said


@pytest.mark.slow
def test_few_complete_contributions_are_counted_and_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="of which about 0.3 are complete, 15.2 in 50"):
        run = plain_trainer(data=unequal(), step=wasted(size=2), num_steps=50)
    assert run.complete_units is not None
    assert run.complete_units.share == pytest.approx(0.037, abs=2e-3)
    run.train(tmp_path, checkpoint_every=50)
    took_part, complete = contributions_in_log(read_log(tmp_path))
    # Contributions without a null are complete; 4 deviations of a mean of 14.8.
    assert took_part == complete and abs(complete - 14.8) < 16


def test_the_advice_has_the_share_of_each_change():
    tree, wide = unequal(MANY).population, wasted(size=4, ways=5, classes=480)
    found = ways_out(wide, tree, Needs.of(1, is_regression=False))
    relation, size, ways, *_ = found.values()
    assert relation == 1.0 and 0 < size < 0.1 and 0 < ways < 0.1
    # Bands refuse add_remove if what is grouped is drawn without replacement.
    grouped = jde.banded(wide, jde.Bands(2, level="example"))
    found = ways_out(grouped, tree, Needs.of(1, is_regression=False))
    assert list(found.values())[:2] == [size, ways]
    sizes = np.repeat([3, 30], [300, 180]).tolist()
    tree = jde.Population.from_sizes(sizes, level_names=("class",))
    found = ways_out(wide, tree, Needs.of(1, is_regression=False))
    *_, (without, share) = found.items()
    assert without.startswith("without the 300 classes of fewer than 30")
    assert share == 1.0


# --- Training under zero_out: a null makes the contribution zero ---


def zeroed(slots=8, **changes):
    examples = dataclasses.replace(GROUPED.design.examples, population=slots)
    design = dataclasses.replace(GROUPED.design, examples=examples)
    return dataclasses.replace(
        GROUPED, sampling=design, neighboring_relation="zero_out", **changes
    )


def test_zero_out_needs_stated_slots():
    data = classes()
    with pytest.raises(ValueError, match="slots"):
        plain_trainer(step=zeroed(population=data.population), data=data)


def test_finer_levels_without_slots_have_no_epsilon():
    step = zeroed(privacy_unit="class")
    budget = plan_budget(step, epsilon=8.0, delta=1e-5, num_steps=3)
    levels = report_of_budget(budget, 3).epsilon_by_level
    assert isinstance(levels["class"], float) and isinstance(levels["example"], str)
