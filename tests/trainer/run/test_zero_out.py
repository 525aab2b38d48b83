"""Training under zero_out: slots are drawn, and a null makes the contribution zero."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxdp_episodic.trainer.config.training_config import StepConfig
from jaxdp_episodic.trainer.draw.complete import CompleteUnits
from jaxdp_episodic.trainer.run import checks
from jaxdp_episodic.trainer.run.report import report_of_budget
from jaxdp_episodic.training import plan_budget
from training_runs import GROUPED, classes, trainer


def zeroed(slots=8, **changes):
    examples = dataclasses.replace(GROUPED.design.examples, population=slots)
    design = dataclasses.replace(GROUPED.design, examples=examples)
    return dataclasses.replace(
        GROUPED, sampling=design, neighboring_relation="zero_out", **changes
    )


def test_a_run_is_charged_under_its_relation(tmp_path):
    with pytest.warns(UserWarning, match="complete, 2.97 in 3 steps"):
        run = trainer(num_steps=3, step=zeroed(slots=7))
    run.train(tmp_path)
    assert run.num_steps_taken == 3
    text = json.dumps(run.budget.step.to_dict())
    assert '"zero_out"' in text
    drawn = run.sampler.draw(np.random.default_rng(0))
    assert drawn.holds_null is not None and drawn.holds_null.any()


@pytest.mark.filterwarnings("ignore:sampling draws")
def test_the_data_do_not_matter_if_every_contribution_holds_a_null(monkeypatch):
    """30 classes of 6 examples in 10,000 slots: hardly any draw is without a null."""
    monkeypatch.setattr(checks, "LEAST_IN_RUN", 0.0)  # otherwise it is refused
    monkeypatch.setattr(CompleteUnits, "is_seen", True)
    step = zeroed(slots=10_000)
    first = trainer(num_steps=2, step=step, data=classes(seed=0))
    second = trainer(num_steps=2, step=step, data=classes(seed=5))
    for run in (first, second):
        run.step()
        run.step()
    for a, b in zip(params(first), params(second), strict=True):
        np.testing.assert_array_equal(a, b)


def params(run):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(run.state.params)]


def test_zero_out_needs_stated_slots():
    data = classes()
    step = zeroed(population=data.population)
    with pytest.raises(ValueError, match="slots"):
        trainer(step=step, data=data)
    with pytest.raises(ValueError, match="at least the number of children"):
        trainer(step=zeroed(slots=5), data=data)


def test_a_config_states_its_slots():
    config = StepConfig(
        sampling=zeroed().design,
        neighboring_relation="zero_out",
    )
    step = config.step(classes().population)
    assert step.population is None and step.neighboring_relation == "zero_out"


def test_finer_levels_without_slots_have_no_epsilon():
    step = zeroed(privacy_unit="class")
    budget = plan_budget(step, epsilon=8.0, delta=1e-5, num_steps=3)
    levels = report_of_budget(budget, 3)[0].epsilon_by_level
    assert isinstance(levels["class"], float) and isinstance(levels["example"], str)
