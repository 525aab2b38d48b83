"""Strategies of jax_privacy that draw users."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.interop.dp_accounting import EpisodicAccountant
from jaxdp_episodic.accountant.interop.jax_privacy import from_execution_plan

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of theirs, at import
    import dp_accounting
    from jax_privacy import batch_selection

Relation = dp_accounting.NeighboringRelation
DELTA = 1e-6
INDEPENDENT = batch_selection.PartitionType.INDEPENDENT


def cyclic(**options):
    options = {"sampling_prob": 0.2, "iterations": 30, **options}
    return batch_selection.CyclicPoissonSampling(**options)


def users_of(base, **options):
    return batch_selection.UserSelectionStrategy(base, 2, **options)


@pytest.mark.few(8)
@pytest.mark.parametrize("relation", ["add_remove", "zero_out", "replace_one"])
@pytest.mark.parametrize(
    "base",
    [
        cyclic(),
        cyclic(cycle_length=3, partition_type=INDEPENDENT),
        batch_selection.BallsInBinsSampling(iterations=4, cycle_length=4),
    ],
)
def test_users_cost_what_records_do(base, relation):
    given = {"neighboring_relation": relation, "noise_multiplier": 1.3}
    run = from_execution_plan(users_of(base, shuffle_per_user=True), **given)
    records = from_execution_plan(base, **given)
    assert jde.epsilon(run, delta=DELTA) == jde.epsilon(records, delta=DELTA)
    (step,) = run.steps
    assert (step.clip_unit, step.privacy_unit) == ("user", "user")


def test_users_are_drawn_independently():
    """Each user independently, with only the user's own examples."""
    owners = np.arange(60) % 20
    drawn = np.zeros((3_000, 20))
    strategy = users_of(cyclic(iterations=len(drawn)))
    for step, rows in enumerate(strategy.batch_iterator(owners, 5)):
        rows = np.reshape(rows, (-1, 2)).astype(int)  # of none they are floats
        assert np.array_equal(owners[rows[:, 0]], owners[rows[:, 1]])
        drawn[step, owners[rows[:, 0]]] += 1
    assert set(np.unique(drawn)) == {0, 1}
    spread = np.sqrt(0.2 * 0.8 / len(drawn))
    assert np.all(np.abs(drawn.mean(axis=0) - 0.2) < 5 * spread)
    # Uncorrelated; one of 190 pairs fails by chance with probability 1e-4.
    apart = np.corrcoef(drawn.T)[np.triu_indices(20, 1)]
    assert np.all(np.abs(apart) < 5 / np.sqrt(len(drawn)))


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_adaptive_contributions_in_a_cycle_keep_the_bound(relation):
    """Two draws of a user; its second contribution depends on the first release."""
    rate, noise, at = 0.4, 0.8, np.linspace(-7, 7, 281)
    x, y = at[:, None], at[None, :]

    def density(first, again, fresh):
        total = 0.0
        for a, b in np.ndindex(2, 2):
            chance = rate ** (a + b) * (1 - rate) ** (2 - a - b)
            moved = x - a * first / noise, y - b * (again if a else fresh) / noise
            total = total + chance * np.exp(-0.5 * (moved[0] ** 2 + moved[1] ** 2))
        return total * (at[1] - at[0]) ** 2 / (2 * np.pi)

    signs = [(first, again, fresh) for first, again, fresh in np.ndindex(2, 2, 2)]
    gives = [density(*(2 * np.array(sign) - 1)) for sign in signs]
    others = gives if relation == "replace_one" else [density(0, 0, 0)]
    run = from_execution_plan(
        users_of(cyclic(sampling_prob=rate, iterations=2)),
        neighboring_relation=relation,
        noise_multiplier=noise,
    )
    pairs = [pair for p in gives for q in others for pair in ((p, q), (q, p))]
    for epsilon in (0.1, 1.0):
        lost = [np.maximum(p - np.exp(epsilon) * q, 0).sum() for p, q in pairs]
        found = max(lost)
        bound = jde.delta(run, epsilon=epsilon)
        assert found <= bound * (1 + 1e-4) and bound <= found * 1.01


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (batch_selection.FixedBatchSampling(3, iterations=2), "so who took"),
        (cyclic(truncated_batch_size=3), "truncated_batch_size is not covered"),
        (batch_selection.BMinSepSampling(0.1, 8, 2), "BMinSepSampling is not covered"),
    ],
)
def test_users_with_dependent_draws_are_refused(base, message):
    given = {"neighboring_relation": "zero_out", "noise_multiplier": 1.0}
    with pytest.raises(NotImplementedError, match=message):
        from_execution_plan(users_of(base), num_examples=50, **given)


@pytest.mark.slow
def test_plans_that_draw_users_agree_with_jax_privacys_accountant():
    execution_plan = pytest.importorskip("jax_privacy.experimental.execution_plan")
    plan = execution_plan.BandMFExecutionPlanConfig(
        strategy=np.ones(1),
        iterations=200,
        epsilon=None,
        delta=None,
        noise_multiplier=1.3,
        sampling_prob=0.2,
        accountant=EpisodicAccountant(Relation.ADD_OR_REMOVE_ONE),
        partition_type=INDEPENDENT,
    ).plan
    users = SimpleNamespace(**vars(plan))
    users.batch_selection_strategy = users_of(plan.batch_selection_strategy)
    run = from_execution_plan(users, neighboring_relation="add_remove")
    theirs = dp_accounting.pld.PLDAccountant(Relation.ADD_OR_REMOVE_ONE)
    bound = theirs.compose(plan.dp_event).get_epsilon(DELTA)
    assert 0.999 * bound < jde.epsilon(run, delta=DELTA) <= bound
    assert run.steps[0].privacy_unit == "user"
