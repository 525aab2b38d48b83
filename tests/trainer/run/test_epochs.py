"""Sampling in epochs: draws and charges; resumed runs are in test_crashes.py."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest

import jaxdp_episodic as jde
from crash_rigs import old_ledger
from jaxdp_episodic.accountant.questions.budget import (
    PrivacyBudget,
    SpentAhead,
    plan_budget,
)
from jaxdp_episodic.tools import cli
from jaxdp_episodic.trainer.run.checks import mean_units_are_public
from jaxdp_episodic.trainer.run.ledger import Ledger
from jaxdp_episodic.trainer.run.ledger_file import LedgerError, read_ledger
from jaxdp_episodic.trainer.run.report import (
    epsilon_without_last_stage,
    privacy_statement,
)
from jaxdp_episodic.trainer.run.store import RunStore, create_store
from training_runs import BINS, charged_run, flat_step, plain_trainer

DELTA = 1e-5
BATCHES = jde.GaussianStep(
    jde.ShuffledEpochs("user", steps_per_epoch=4), noise_multiplier=2.0
)


def budget(step=BATCHES, *, steps=10, permitted=12):
    return PrivacyBudget(step, 8.0, DELTA, steps, permitted)


@pytest.mark.parametrize("seed", [1, None])
def test_every_epoch_is_drawn_anew(seed):
    """In another partition of all classes."""
    run = plain_trainer(step=BINS, num_steps=12, seed=seed)
    members = [run._main.draws.secret(step).members for step in range(1, 13)]
    epochs = [members[first : first + 4] for first in (0, 4, 8)]
    whole = [np.concatenate(epoch) for epoch in epochs]
    assert [np.unique(episodes).size for episodes in whole] == [30] * 3
    assert len({episodes.tobytes() for episodes in whole}) == 3


def test_bins_of_private_units_need_a_public_divisor():
    step = jde.GaussianStep(
        jde.RandomAllocation("user", steps_per_epoch=4), noise_multiplier=1.0
    )
    for relation in ("add_remove", "zero_out", "replace_one"):
        asked = dataclasses.replace(step, neighboring_relation=relation)
        assert mean_units_are_public(asked) == (relation == "replace_one")
    assert mean_units_are_public(BINS)


def test_beyond_the_plan_only_whole_epochs_are_permitted():
    spent = float(jde.epsilon(BATCHES, num_steps=12, delta=DELTA))
    planned = plan_budget(BATCHES, epsilon=spent * 1.001, delta=DELTA)
    assert (planned.num_steps, planned.permitted_steps) == (12, 12)
    assert planned.planned == 12
    given = budget(steps=6)
    owed = given.owed([0, 1, 4, 5, 6, 7, 9])
    np.testing.assert_array_equal(owed, [0, 4, 4, 6, 6, 8, 12])
    ahead = SpentAhead(given)
    found = [ahead.at(steps) for steps in (1, 4, 6)]
    assert found == [float(given.spent(steps)) for steps in (4, 4, 6)]


EVERYBODY = jde.GaussianStep(
    jde.Poisson("user", sampling_probability=1.0), noise_multiplier=4.0
)
AFTER_TWO = PrivacyBudget(BATCHES, 8.0, DELTA, 12, 12, (EVERYBODY, EVERYBODY))


def test_epochs_begin_after_earlier_steps():
    taken, owed = [0, 1, 2, 3, 6, 7, 11, 12], [0, 1, 2, 6, 6, 10, 12, 12]
    np.testing.assert_array_equal(AFTER_TWO.owed(taken), owed)
    expected = [
        jde.epsilon(
            jde.compose((EVERYBODY, min(n, 2)), (BATCHES, max(n - 2, 0))), delta=DELTA
        )
        for n in owed
    ]
    np.testing.assert_allclose(AFTER_TWO.spent(taken), expected, rtol=1e-9)
    ahead = SpentAhead(AFTER_TWO)
    found = np.array([ahead.at(n) for n in range(1, 13)])
    assert np.all(found >= AFTER_TWO.spent(np.arange(1, 13)) * (1 - 1e-12))
    assert found[-1] == pytest.approx(expected[-1], rel=1e-9)


def test_a_ledger_with_earlier_epochs_charges_what_the_budget_says(tmp_path):
    path, ledger = tmp_path / "run.sqlite", Ledger(AFTER_TWO)
    create_store(path, AFTER_TWO, is_seeded=False)
    for charged in range(1, 13):
        with contextlib.closing(RunStore(path)) as store, ledger.writing_to(store, {}):
            ledger.charge()
        content = read_ledger(path)
        assert (content.charged, content.owed) == (charged, AFTER_TWO.owed(charged))


def test_earlier_steps_in_epochs_are_refused():
    with pytest.raises(NotImplementedError, match="before must be steps on all data"):
        plan_budget(
            BATCHES, epsilon=8.0, delta=DELTA, num_steps=4, before=[(BATCHES, 0.5)]
        )
    before = [(EVERYBODY, 0.3), (EVERYBODY, 0.3)]
    planned = plan_budget(BATCHES, epsilon=8.0, delta=DELTA, num_steps=4, before=before)
    assert (planned.num_steps, planned.planned) == (6, 6)
    assert 7.999 < planned.spent(6) == planned.spent(3) <= 8.0


@pytest.mark.slow
def test_the_statement_has_the_charge_of_an_early_end():
    early, planned = (privacy_statement(budget(), steps) for steps in (5, 10))
    assert "ended after 5 steps" in early and "charged for 8" in early
    assert "In each of 5 gradient steps" in early
    assert "ended after" not in planned and "In each of 10 gradient steps" in planned
    everyone = dataclasses.replace(EVERYBODY, noise_multiplier=2.0)
    uncounted = jde.epsilon(everyone, num_steps=8, delta=DELTA)
    assert epsilon_without_last_stage(budget(), 5) == uncounted


@pytest.mark.parametrize(
    ("charged", "owed"), [(0, 0), (3, 4), (4, 4), (9, 10), (11, 12)]
)
def test_a_ledger_charges_the_begun_epoch(tmp_path, capsys, charged, owed):
    path = charged_run(tmp_path / "run.sqlite", budget(), charged)
    content = read_ledger(path)
    assert (content.charged, content.planned, content.owed) == (charged, 10, owed)
    assert content.run_charged() == (BATCHES, owed)
    assert cli.run(["epsilon", "--ledger", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["epsilon"] == jde.epsilon(BATCHES, num_steps=owed, delta=DELTA)
    said = [text for text in answer["warnings"] if "within an epoch" in text]
    assert len(said) == (owed > charged)


def test_a_run_is_not_resumed_with_another_plan(tmp_path):
    path = charged_run(tmp_path / "run.sqlite", budget())
    with contextlib.closing(RunStore(path)) as store:
        with pytest.raises(LedgerError, match="number of epochs"):
            Ledger(budget(steps=12)).check(store)


@pytest.mark.parametrize("planned", [0, 2.0, True])
def test_invalid_plans_are_refused(tmp_path, planned):
    path = old_ledger(tmp_path / "run.jsonl", BATCHES, [("a", 1)], planned=planned)
    with pytest.raises(LedgerError, match="planned must be a number of steps"):
        read_ledger(path)


def test_without_a_plan_every_begun_epoch_is_charged(tmp_path):
    path = tmp_path / "run.sqlite"
    other = dataclasses.replace(BATCHES, noise_multiplier=3.0)
    create_store(path, PrivacyBudget(flat_step(), 8.0, DELTA, 9, 9), is_seeded=False)
    with contextlib.closing(RunStore(path)) as store:
        store.begin_session({})
        for name, step, number in (("one", BATCHES, 5), ("two", other, 6)):
            for _ in range(number):
                store.charge(name, step)
    content = read_ledger(path)
    assert (content.planned, content.charged, content.owed) == (None, 11, 16)
    assert content.run_charged() == (jde.compose((BATCHES, 8), (other, 8)), None)
