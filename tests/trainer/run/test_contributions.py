"""The number of complete contributions: shown, warned of, or refused."""

import dataclasses
import json

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.complete import CompleteUnits, Needs
from jaxdp_episodic.trainer.run import checks
from jaxdp_episodic.trainer.run.checks import contributions_in_log, ways_out
from jaxdp_episodic.trainer.run.report import report_of_budget
from jaxdp_episodic.trainer.run.run_files import read_log
from jaxdp_episodic.training import plan_budget
from training_runs import GROUPED, assert_same, classes, plain_trainer, protonet

SIZES = np.random.default_rng(0).integers(3, 31, 48)  # 3 to 30 images each
# Ten times as many classes need a tenth of the simulated draws.
MANY = np.tile(SIZES, 10)


def unequal(sizes=SIZES):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    points = np.random.default_rng(1).normal(size=(len(labels), 2))
    return ExampleTable.from_records(points, units={"class": labels})


def step(relation="zero_out", size=4, slots=30, ways=3, classes=48):
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
    wasted = step(size=4, ways=5, classes=480)
    with pytest.raises(ValueError, match="nothing was charged") as caught:
        plain_trainer(data=unequal(MANY), learner=learner, step=wasted, num_steps=60)
    said = str(caught.value)
    assert "48 contributions (episode) a step on average" in said
    assert 'it would be 1 under neighboring_relation = "add_remove"' in said
    assert "with size = 2 of 'example' instead of 4" in said


@pytest.mark.slow
def test_few_complete_contributions_are_counted_and_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="of which about 0.3 are complete, 15.2 in 50"):
        run = plain_trainer(data=unequal(), step=step(size=2), num_steps=50)
    assert run.complete_units is not None
    assert run.complete_units.share == pytest.approx(0.037, abs=2e-3)
    run.train(tmp_path, checkpoint_every=50)
    took_part, complete = contributions_in_log(read_log(tmp_path))
    # Contributions without a null are complete; 4 deviations of a mean of 14.8.
    assert took_part == complete and abs(complete - 14.8) < 16


def test_the_advice_has_the_share_of_each_change():
    tree, wasted = unequal(MANY).population, step(size=4, ways=5, classes=480)
    found = ways_out(wasted, tree, Needs.of(1, is_regression=False))
    relation, size, ways, *_ = found.values()
    assert relation == 1.0 and 0 < size < 0.1 and 0 < ways < 0.1
    # Bands refuse add_remove if what is grouped is drawn without replacement.
    grouped = jde.banded(wasted, jde.Bands(2, level="example"))
    found = ways_out(grouped, tree, Needs.of(1, is_regression=False))
    assert list(found.values())[:2] == [size, ways]
    sizes = np.repeat([3, 30], [300, 180]).tolist()
    tree = jde.Population.from_sizes(sizes, level_names=("class",))
    found = ways_out(wasted, tree, Needs.of(1, is_regression=False))
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


def test_a_run_is_charged_under_its_relation():
    with pytest.warns(UserWarning, match="complete, 2.97 in 3 steps"):
        run = plain_trainer(num_steps=3, step=zeroed(slots=7))
    assert '"zero_out"' in json.dumps(run.budget.step.to_dict())
    drawn = run.sampler.draw(np.random.default_rng(0))
    assert drawn.holds_null is not None and drawn.holds_null.any()
    full = plain_trainer(data=unequal(), step=step("add_remove", size=3, slots=3))
    assert full.complete_units.share == 1.0


@pytest.mark.filterwarnings("ignore:sampling draws")
def test_the_data_do_not_matter_if_every_contribution_holds_a_null(monkeypatch):
    """30 classes of 6 examples in 10,000 slots: hardly any draw is without a null."""
    monkeypatch.setattr(checks, "LEAST_IN_RUN", 0.0)  # otherwise it is refused
    monkeypatch.setattr(CompleteUnits, "is_seen", True)
    step = zeroed(slots=10_000)
    runs = [plain_trainer(step=step, data=classes(seed=seed)) for seed in (0, 5)]
    for run in runs:
        run.step()
        run.step()
    assert_same(*runs)


def test_zero_out_needs_stated_slots():
    data = classes()
    with pytest.raises(ValueError, match="slots"):
        plain_trainer(step=zeroed(population=data.population), data=data)
    with pytest.raises(ValueError, match="at least the number of children"):
        plain_trainer(step=zeroed(slots=5), data=data)


def test_finer_levels_without_slots_have_no_epsilon():
    step = zeroed(privacy_unit="class")
    budget = plan_budget(step, epsilon=8.0, delta=1e-5, num_steps=3)
    levels = report_of_budget(budget, 3)[0].epsilon_by_level
    assert isinstance(levels["class"], float) and isinstance(levels["example"], str)
