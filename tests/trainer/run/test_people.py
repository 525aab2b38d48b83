"""Runs that protect people: owners, bounds, and the draws of blocks."""

import contextlib
import dataclasses
import io

import numpy as np
import pytest

import jaxdp_episodic as jde
from crash_rigs import train_until
from jaxdp_episodic.accountant.questions.budget import plan_budget
from jaxdp_episodic.accountant.report.ledger_file import read_ledger
from jaxdp_episodic.data import truncated
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw import step_generator
from jaxdp_episodic.trainer.run import checks as contributions
from jaxdp_episodic.trainer.run.checks import check_held_out
from jaxdp_episodic.trainer.run.report import privacy_statement
from jaxdp_episodic.trainer.run.store import EPOCH, RunStore
from rows import fast_and_slow
from training_runs import (
    GROUPED,
    QUERIES,
    SHOTS,
    WAYS,
    classes,
    plain_trainer,
    trainer,
)

PEOPLE, CLASSES, SIZE = 6, 30, SHOTS + QUERIES
BOUNDS = jde.PersonBounds(classes=CLASSES, examples=1)


def owned(data=None, num_people=PEOPLE, **changes):
    """Every person has one example of every class."""
    data = classes(examples=num_people, **changes) if data is None else data
    return ExampleTable.from_records(
        data.features,
        units={"class": data.class_places},
        owners=np.tile(np.arange(num_people), data.population.num_units(1)),
    )


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


STEPS = {
    "grouped": grouped(),
    "grouped null": grouped(neighboring_relation="zero_out"),
    "blocks": blocks(COINS),
    "blocks null": blocks(COINS, BOUNDS, neighboring_relation="zero_out"),
}


@pytest.mark.parametrize(
    "name", fast_and_slow(STEPS, lambda name: name in ("grouped", "blocks null"))
)
def test_people_are_protected_end_to_end(name, tmp_path):
    step = STEPS[name]
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


def test_missing_owners_and_people_beyond_their_bounds_are_refused():
    with pytest.raises(ValueError, match=r"say whose each example is .* owner="):
        plain_trainer(step=grouped(), data=classes(), num_steps=3)
    few = grouped(jde.PersonBounds(classes=12, examples=1))
    with pytest.raises(ValueError, match=r"people\.classes .* 30, got 12"):
        plain_trainer(step=few, data=owned(), num_steps=1)


@pytest.mark.filterwarnings("ignore:sampling draws")
def test_dropped_examples_are_in_the_ledger_not_in_the_release(tmp_path, monkeypatch):
    monkeypatch.setattr(contributions, "LEAST_IN_RUN", 0.0)  # otherwise it is refused
    bounds = jde.PersonBounds(classes=12, examples=1)
    bounded = truncated(owned(), bounds)
    run = plain_trainer(
        step=grouped(bounds, neighboring_relation="zero_out"),
        data=bounded.table,
        truncation=bounded.truncation,
        num_steps=2,
    )
    run.train(tmp_path)
    (opened,) = read_ledger(tmp_path).openings
    words = "108 of 180 examples left out, of 6 of 6 people"
    assert opened.environment["people"].startswith(words)
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
    trained, held_out = owned(), owned(classes(num_classes=4, examples=PEOPLE, seed=3))
    with pytest.warns(UserWarning, match=r"6 of its 6 people in common .* such as 0"):
        check_held_out("test", held_out, trained)


def test_bounds_with_too_many_terms_are_refused():
    bounds = {"people": jde.PersonBounds(classes=15_000, examples=1)}
    design = dataclasses.replace(GROUPED.design, num_classes=10**6)
    with pytest.raises(NotImplementedError, match="terms in all"):
        jde.epsilon(grouped(**bounds, sampling=design), num_steps=1, delta=1e-5)
