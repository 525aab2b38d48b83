"""Runs with rotated classes: data, draws, charges, statements and refusals."""

import dataclasses
import tomllib

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.data import ExampleTable, load_glyphs, with_rotations
from jaxdp_episodic.trainer.audit.canaries import input_canaries
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from jaxdp_episodic.trainer.config.training_start import StartConfig
from jaxdp_episodic.trainer.run.assemble import (
    Tables,
    assembled,
    plan,
)
from jaxdp_episodic.trainer.run.checks import found_in_both
from jaxdp_episodic.trainer.run.report import privacy_statement
from jaxdp_episodic.trainer.statistics.terms import Contributors
from training_runs import TINY, flat_step

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


def test_an_example_is_accounted_with_its_copies():
    config = config_of(privacy_unit="example")
    data, _ = config.training_data()
    budget = plan(config, data)
    step, said = budget.step, privacy_statement(budget)
    assert "one original example with all copies, in at most 4 classes" in said
    assert step.privacy_unit == "original"
    assert step.people == jde.PersonBounds(examples=1, classes=4)
    asked = {"num_steps": 3, "delta": 1e-5}
    alone = dataclasses.replace(step, privacy_unit="example", people=None)
    assert jde.epsilon(alone, **asked) < 4.0 < jde.epsilon(step, **asked) <= 8.0
    for unit in (None, "original"):
        config = config_of() if unit is None else config_of(privacy_unit=unit)
        found = config.step_on(data.population)
        assert (found.privacy_unit, found.people) == ("original", step.people)


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
    config = config_of()
    plain = dataclasses.replace(
        config, data=dataclasses.replace(config.data, rotations=None)
    )
    data, _ = config.training_data()
    tables = Tables(plain, None)
    tables._loaded["train"] = data
    with pytest.raises(ValueError, match="privacy_unit must be 'original'"):
        assembled(plain, tables, evaluates=False)
    with pytest.raises(ValueError, match="privacy_unit must be 'original'"):
        Contributors.of(
            data,
            None,
            privacy_unit="example",
            neighboring_relation="zero_out",
            slots=20,
            people=None,
        )
    bare = dataclasses.replace(data, originals=None)
    tables = Tables(config, None)
    tables._loaded["train"] = bare
    with pytest.raises(ValueError, match="which examples are copies"):
        assembled(config, tables, evaluates=False)
    with pytest.raises(ValueError, match="same of all copies"):
        images(owners=np.arange(6), originals=np.zeros(6, int))


def test_an_original_with_copies_in_both_parts_chooses_no_stage():
    """Copies have other content; originals without ids cannot be recognized."""
    step = dataclasses.replace(
        flat_step(),
        privacy_unit="original",
        people=jde.PersonBounds(examples=4),
    )
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
    who = Contributors.of(
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
