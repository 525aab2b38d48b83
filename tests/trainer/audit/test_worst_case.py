import dataclasses

import numpy as np
import pytest
from scipy import stats

import jaxdp_episodic as jde
from jaxdp_episodic.trainer.audit.simulation import log_likelihood_ratio
from jaxdp_episodic.trainer.audit.worst_case import (
    blocks_of_run,
    dominating_branches,
    tables_of_run,
    worst_case,
)

P, W = jde.Poisson, jde.WithoutReplacement


def task_step(task, **more):
    sampling = jde.MultistageSampling(task, W("example", size=10, population=20))
    settings = {"clip_unit": "task", "privacy_unit": "example", **more}
    return jde.GaussianStep(sampling, noise_multiplier=0.8, **settings)


COINS = P("task", sampling_probability=0.2)
FIXED = W("task", size=2, population=10)
GROUPED = jde.GroupedClasses(
    num_classes=40,
    ways=4,
    episodes=P("episode", sampling_probability=0.3),
    examples=W("example", size=5, population=20),
)
# Steps whose actual mechanism reaches the theorem's bound.
REACHED = {
    "coins, example": task_step(COINS),
    "coins, example replaced": task_step(COINS, neighboring_relation="replace_one"),
    "fixed, example": task_step(FIXED),
    "coins, task": task_step(COINS, privacy_unit="task"),
    "coins, task replaced": task_step(
        COINS, privacy_unit="task", neighboring_relation="replace_one"
    ),
    "fixed, task": task_step(FIXED, privacy_unit="task"),
    "examples clipped": task_step(COINS, clip_unit="example"),
    "examples clipped, replaced": task_step(
        COINS, clip_unit="example", neighboring_relation="replace_one"
    ),
    "task, its examples clipped": task_step(
        COINS, clip_unit="example", privacy_unit="task"
    ),
    "task, its examples clipped by coins": jde.GaussianStep(
        jde.MultistageSampling(
            COINS, P("example", sampling_probability=0.5, population=4)
        ),
        noise_multiplier=2.0,
        clip_unit="example",
        privacy_unit="task",
    ),
    "step": task_step(COINS, clip_unit="step"),
    "grouped": jde.GaussianStep(GROUPED, noise_multiplier=0.8),
    "grouped, class": jde.GaussianStep(
        GROUPED, noise_multiplier=0.8, privacy_unit="class"
    ),
    "grouped, classes fixed": jde.GaussianStep(
        dataclasses.replace(GROUPED, episodes=None, classes=W("class", size=8)),
        noise_multiplier=0.8,
    ),
}
NULL = {"neighboring_relation": "zero_out"}
REACHED |= {
    "zeroed, coins": task_step(COINS, **NULL),
    "zeroed, fixed": task_step(FIXED, **NULL),
    "zeroed, coins, task": task_step(COINS, privacy_unit="task", **NULL),
    "zeroed, fixed, task": task_step(FIXED, privacy_unit="task", **NULL),
    "zeroed, step": task_step(COINS, clip_unit="step", **NULL),
    "zeroed, examples clipped": task_step(COINS, clip_unit="example", **NULL),
    "zeroed, grouped": jde.GaussianStep(GROUPED, noise_multiplier=0.8, **NULL),
    "zeroed, grouped, class": jde.GaussianStep(
        GROUPED, noise_multiplier=0.8, privacy_unit="class", **NULL
    ),
}
BELOW = {
    "zeroed episodes": jde.GaussianStep(
        jde.IndependentEpisodes(W("example", size=3, population=30), num_episodes=4),
        noise_multiplier=2.0,
        **NULL,
    ),
    "grouped, classes left over": jde.GaussianStep(
        dataclasses.replace(GROUPED, episodes=None, classes=W("class", size=7)),
        noise_multiplier=0.8,
    ),
    "grouped, classes by coins": jde.GaussianStep(
        dataclasses.replace(
            GROUPED, episodes=None, classes=P("class", sampling_probability=0.2)
        ),
        noise_multiplier=0.8,
    ),
    "episodes": jde.GaussianStep(
        jde.IndependentEpisodes(W("example", size=3, population=30), num_episodes=4),
        noise_multiplier=2.0,
    ),
}
GRID = np.linspace(-25, 25, 200_001)


def hockey_stick(table, epsilon):
    """The larger direction's delta of a table's fixed mechanism, by summation."""
    dists = [
        (table.weight[:, None] * stats.norm.pdf(GRID - means[:, None])).sum(axis=0)
        for means in (table.with_unit, table.without_unit)
    ]
    step = GRID[1] - GRID[0]
    return table.outer_rate * max(
        np.maximum(a - np.exp(epsilon) * b, 0).sum() * step
        for a, b in (dists, dists[::-1])
    )


@pytest.mark.parametrize("name", REACHED)
@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_one_step_reaches_the_claim(name, epsilon):
    """The table comes from the step's rates, the claim from its dominating pair."""
    step = REACHED[name]
    claimed = float(jde.privacy_profile(step, epsilon))
    assert hockey_stick(worst_case(step), epsilon) == pytest.approx(claimed, rel=1e-6)


@pytest.mark.parametrize("name", BELOW)
@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_no_mechanism_exceeds_the_claim(name, epsilon):
    step = BELOW[name]
    found = hockey_stick(worst_case(step), epsilon)
    assert 0.005 * float(jde.privacy_profile(step, epsilon)) < found
    assert found <= float(jde.privacy_profile(step, epsilon)) * (1 + 1e-9)


@pytest.mark.parametrize("name", [*REACHED, *BELOW])
def test_tables_are_distributions(name):
    step = {**REACHED, **BELOW}[name]
    for table in (worst_case(step), dominating_branches(step)):
        assert table.weight.sum() == pytest.approx(1)
        assert table.multiplier_weight.sum() == pytest.approx(1)
        assert (table.weight >= 0).all()
        assert 0 <= table.outer_rate <= 1


def test_the_worst_path_of_a_tree_can_be_asked_for():
    tree = jde.Population.from_sizes([5, 50], level_names=["task", "example"])
    sampling = jde.MultistageSampling(COINS, W("example", size=5))
    step = jde.GaussianStep(
        sampling,
        noise_multiplier=1.0,
        clip_unit="task",
        privacy_unit="example",
        population=tree,
    )
    reached = {round(float(worst_case(step, path).weight[-1]), 6) for path in (0, 1)}
    assert reached == {0.2, 0.02}


def test_the_likelihood_ratio_is_that_of_the_distributions():
    table = worst_case(REACHED["coins, example"])
    x = np.linspace(-6, 6, 41)
    dists = [
        (table.weight[:, None] * stats.norm.pdf(x - means[:, None])).sum(axis=0)
        for means in (table.with_unit, table.without_unit)
    ]
    expected = np.log(dists[0] / dists[1])
    np.testing.assert_allclose(log_likelihood_ratio(table, x), expected, atol=1e-12)


def test_too_many_contributions_are_refused():
    sampling = jde.MultistageSampling(
        COINS, P("example", sampling_probability=0.5, population=5_000)
    )
    step = jde.GaussianStep(
        sampling, noise_multiplier=1e4, clip_unit="example", privacy_unit="task"
    )
    with pytest.raises(NotImplementedError, match="contributions"):
        worst_case(step)


# --- Epochs ---


def on_grid(table, reach, points=801):
    """The densities of a block of which two steps are taken, and the cell's area."""
    x = np.linspace(-7, 7 + reach, points)
    base = np.multiply.outer(stats.norm.pdf(x), stats.norm.pdf(x))
    dists = []
    for means in (table.with_unit, table.without_unit):
        ratio = np.exp(np.multiply.outer(x, means) - means**2 / 2) @ table.weight
        total = ratio[:, None] + ratio[None, :] + table.block - table.taken
        dists.append(total / table.block * base)
    return x, dists, (x[1] - x[0]) ** 2


def in_epochs(scheme, *below, relation="add_remove"):
    sampling = jde.MultistageSampling(scheme, *below)
    return jde.GaussianStep(
        sampling,
        noise_multiplier=0.8,
        clip_unit="task",
        privacy_unit=sampling.level_names[-1],
        neighboring_relation=relation,
    )


BINS = jde.RandomAllocation("task", steps_per_epoch=5, times=2)
TWO_BINS = jde.RandomAllocation("task", steps_per_epoch=2)
BATCHES = jde.ShuffledEpochs("task", steps_per_epoch=2)
EXAMPLES = W("example", size=10, population=20)


@pytest.mark.parametrize(
    "step",
    [
        in_epochs(TWO_BINS),
        in_epochs(TWO_BINS, relation="replace_one"),
        in_epochs(TWO_BINS, EXAMPLES),
        in_epochs(TWO_BINS, EXAMPLES, relation="replace_one"),
    ],
)
def test_an_epoch_of_two_bins_reaches_the_claim(step):
    """Both directions on a grid, from the step's rates and not from its pair."""
    table = worst_case(step)._replace(block=2, taken=2)
    _, (ahead, behind), cell = on_grid(table, 4)
    claimed = float(jde.delta(step, epsilon=1.0, num_steps=2))
    found = cell * max(
        np.maximum(a - np.exp(1.0) * b, 0).sum()
        for a, b in ((ahead, behind), (behind, ahead))
    )
    assert found == pytest.approx(claimed, rel=1e-4)
    assert found <= claimed * (1 + 1e-4)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one", "zero_out"])
@pytest.mark.parametrize("below", [(), (EXAMPLES,)])
def test_shuffled_epochs_stay_below_the_claim(relation, below):
    step = in_epochs(BATCHES, *below, relation=relation)
    table = worst_case(step)._replace(block=2, taken=2)
    _, (ahead, behind), cell = on_grid(table, 4)
    claimed = float(jde.delta(step, epsilon=1.0, num_steps=2))
    found = cell * max(
        np.maximum(a - np.exp(1.0) * b, 0).sum()
        for a, b in ((ahead, behind), (behind, ahead))
    )
    assert 0.01 * claimed < found <= claimed * (1 + 1e-6)


def test_a_run_in_epochs_is_one_of_blocks():
    step = in_epochs(BINS)
    assert blocks_of_run(step, 14) == [(3, 3), (2, 2), (3, 3), (2, 2), (3, 3), (2, 1)]
    assert blocks_of_run(step, 12) == [(3, 3), (2, 2), (3, 3), (2, 2), (3, 2)]
    tables = tables_of_run(worst_case, step, 14)
    assert [(t.block, t.taken, n) for t, n in tables] == [
        (3, 3, 3),
        (2, 2, 2),
        (2, 1, 1),
    ]
    assert blocks_of_run(task_step(COINS), 2) == [(1, 1), (1, 1)]
    (pair, number), *more = tables_of_run(dominating_branches, in_epochs(BATCHES), 5)
    assert (number, more) == (3, [])
    assert pair.with_unit[-1] == pytest.approx(5**0.5 / 0.8)


@pytest.mark.parametrize("taken", [1, 2])
def test_the_likelihood_ratio_of_a_block(taken):
    table = worst_case(in_epochs(BINS, EXAMPLES))._replace(block=3, taken=taken)
    if taken == 2:
        x, (ahead, behind), _ = on_grid(table, 3, points=41)
        releases = np.stack(np.meshgrid(x, x, indexing="ij"), axis=-1)
        expected = np.log(ahead / behind)
    else:
        x = np.linspace(-4, 4, 41)
        sums = [
            2 + np.exp(np.multiply.outer(x, m) - m**2 / 2) @ table.weight
            for m in (table.with_unit, table.without_unit)
        ]
        releases, expected = x[:, None], np.log(sums[0] / sums[1])
    found = log_likelihood_ratio(table, releases)
    np.testing.assert_allclose(found, expected, atol=1e-12)
