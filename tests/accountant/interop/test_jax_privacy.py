"""Plans, strategies and parameters of jax_privacy, accounted by their draws."""

import dataclasses
import pickle
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.interop.dp_accounting import EpisodicAccountant
from jaxdp_episodic.accountant.interop.jax_privacy import (
    RandomAllocationDpEvent,
    from_dp_params,
    from_execution_plan,
    training_config,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of theirs, at import
    import dp_accounting
    from jax_privacy import accounting, batch_selection
    from jax_privacy.experimental import execution_plan

Relation = dp_accounting.NeighboringRelation
DELTA = 1e-6
INDEPENDENT = batch_selection.PartitionType.INDEPENDENT
EQUAL = batch_selection.PartitionType.EQUAL_SPLIT


def config(relation, **options):
    """DP-SGD, or BandMF of as many bands as the strategy matrix has."""
    options = {
        "strategy": np.ones(1),
        "iterations": 30,
        "epsilon": None,
        "delta": None,
        "noise_multiplier": 1.3,
        "sampling_prob": 0.2,
        "accountant": EpisodicAccountant(relation),
        **options,
    }
    if relation is Relation.ADD_OR_REMOVE_ONE:
        options.setdefault("partition_type", INDEPENDENT)
    return execution_plan.BandMFExecutionPlanConfig(**options)


def cyclic(**options):
    options = {"sampling_prob": 0.2, "iterations": 30, **options}
    return batch_selection.CyclicPoissonSampling(**options)


def poisson(noise, num_steps, relation):
    step = jde.GaussianStep(
        jde.Poisson("example", sampling_probability=0.2),
        noise_multiplier=noise,
        neighboring_relation=relation,
    )
    return jde.epsilon(step, num_steps=num_steps, delta=DELTA)


@pytest.mark.parametrize(
    ("relation", "ours", "norms"),
    [
        (Relation.ADD_OR_REMOVE_ONE, "add_remove", 1),
        (Relation.REPLACE_SPECIAL, "zero_out", 1),
        # Its noise is relative to the sensitivity, which is two norms.
        (Relation.REPLACE_ONE, "replace_one", 2),
    ],
)
@pytest.mark.parametrize(("bands", "rounds"), [(1, 30), (4, 8)])
def test_a_config_is_accounted_in_one_call(relation, ours, norms, bands, rounds):
    made = config(relation, strategy=np.ones(bands))
    run = from_execution_plan(made)
    assert jde.epsilon(run, delta=DELTA) == poisson(1.3 * norms, rounds, ours)
    # `norms`: the added noise over the clip norm.
    clipped = made.plan.clipped_grad(lambda: None)
    assert clipped.sensitivity(relation) == norms * clipped.l2_norm_bound
    # A plan does not say how its noise was scaled: the smaller value is assumed.
    alone = from_execution_plan(made.plan, neighboring_relation=ours)
    assert jde.epsilon(alone, delta=DELTA) == poisson(1.3, rounds, ours)


def test_truncated_batches():
    bands = 2
    made = config(
        Relation.REPLACE_SPECIAL,
        strategy=np.ones(bands),
        truncated_batch_size=5,
        num_examples=41,
    )
    run = from_execution_plan(made)
    assert made.plan.dp_event.event.dataset_size == 41 // bands
    release = jde.TruncatedPoissonRelease(
        1.3,
        sampling_probability=0.2,
        batch_size=5,
        population=20,
        neighboring_relation="zero_out",
    )
    assert run == jde.compose((release, 15))
    alone = from_execution_plan(
        made.plan.batch_selection_strategy,
        neighboring_relation="zero_out",
        noise_multiplier=1.3,
        num_bands=bands,
        num_examples=41,
    )
    assert alone == run


def test_batches_of_fixed_size():
    """With replacement, each of the draws is an episode of one."""
    given = {"neighboring_relation": "replace_one", "noise_multiplier": 1.3}
    one = jde.WithoutReplacement("example", size=1, population=50)
    episodes = jde.IndependentEpisodes(one, num_episodes=5)
    few = dataclasses.replace(one, size=5)
    for replace, design in ((False, few), (True, episodes)):
        fixed = batch_selection.FixedBatchSampling(5, iterations=10, replace=replace)
        run = from_execution_plan(fixed, num_examples=50, **given)
        assert run == jde.compose((jde.GaussianStep(design, **given), 10))


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [6, 7])
def test_balls_in_bins_by_simulation(rounds):
    """Rounds of three bins with one draw: both directions, from all releases."""
    bins = batch_selection.BallsInBinsSampling(iterations=rounds, cycle_length=3)
    noise, samples = 1.4, 200_000
    generator = np.random.default_rng(1)
    looks = 1.0 * (np.arange(rounds) % 3 == np.arange(3)[:, None])  # (bins, rounds)
    drawn = looks[generator.integers(3, size=samples)]
    with_it, without = (
        mean + noise * generator.standard_normal((samples, rounds))
        for mean in (drawn, 0.0)
    )

    def loss(y):
        fit = (y @ looks.T - 0.5 * looks.sum(axis=1)) / noise**2
        return np.logaddexp.reduce(fit, axis=1) - np.log(3)

    for relation in ("add_remove", "zero_out"):
        run = from_execution_plan(
            bins, neighboring_relation=relation, noise_multiplier=noise
        )
        bound = jde.delta(run, epsilon=1.0)
        found = []
        for lost in (loss(with_it), -loss(without)):
            gained = -np.expm1(np.minimum(1.0 - lost, 0.0))
            found.append((gained.mean(), gained.std() / np.sqrt(samples)))
        value, error = max(found)
        assert value - 5 * error <= bound
        # Seven steps are charged as nine: each bin as often as the first.
        assert bound <= value + 5 * error or rounds == 7


def later(kind, **fields):
    """A strategy of a later version."""
    made = dataclasses.make_dataclass(kind, fields, namespace={"batch_iterator": None})
    return made(**fields)


def cycles(selected, iterations, cycle_length):
    """Of version 2.3."""
    return later(
        "RandomAllocationSampling",
        total_participations=selected,
        iterations=iterations,
        cycle_length=cycle_length,
    )


def test_repeated_bins_equal_less_noise_and_allocations_are_epochs():
    """A record is in the same step of five rounds: one round at noise / sqrt(5)."""

    def charged(strategy, relation="add_remove"):
        given = {"neighboring_relation": relation, "noise_multiplier": 1.0}
        return from_execution_plan(strategy, **given)

    def one_epoch(run, steps, times, noise=1.0):
        ((step, count),) = zip(run.steps, run.counts, strict=True)
        scheme = jde.RandomAllocation("example", steps_per_epoch=steps, times=times)
        assert step.design.levels == (scheme,) and count == steps
        assert step.noise_multiplier == pytest.approx(noise, rel=1e-12)

    for iterations in (17, 20):  # a round that has begun counts
        bins = charged(batch_selection.BallsInBinsSampling(iterations, cycle_length=4))
        one_epoch(bins, 4, 1, 5**-0.5)
    assert charged(cycles(5, 20, 4)) == bins
    one_epoch(charged(cycles(10, 20, 4)), 4, 2, 5**-0.5)
    # Five of twenty steps, as without the cycle, cost far less.
    for free in (cycles(5, 20, None), cycles(5, 20, 20)):
        one_epoch(charged(free), 20, 5)
    once = later("RandomAllocationSampling", total_participations=2, iterations=9)
    one_epoch(charged(once, "replace_one"), 9, 2)
    event = RandomAllocationDpEvent(dp_accounting.NoOpDpEvent(), 2, 9)
    assert {pickle.loads(pickle.dumps(event))} == {event}
    never = batch_selection.BallsInBinsSampling(iterations=0, cycle_length=3)
    for nobody in (never, cycles(0, 20, 4)):
        assert jde.epsilon(charged(nobody), delta=DELTA) == 0


def users_of(base, **options):
    return batch_selection.UserSelectionStrategy(base, 2, **options)


BAND_STRATEGY = {"neighboring_relation": "zero_out", "noise_multiplier": 1.0}


def bins(cycle_length=4):
    return batch_selection.BallsInBinsSampling(8, cycle_length)


UNKNOWN = later("BallsInBinsSampling", iterations=8, by=None)
SORTED = dataclasses.replace(
    cyclic(cycle_length=2), partition_type=SimpleNamespace(name="SORTED")
)
SPLIT = cyclic(cycle_length=2, truncated_batch_size=3, partition_type=INDEPENDENT)
MADE = config(Relation.REPLACE_SPECIAL)


@pytest.mark.parametrize(
    ("plan", "change", "message"),
    [
        (bins(), {"num_bands": 2}, "BallsInBinsSampling with num_bands=2"),
        (bins(), {"neighboring_relation": "replace_one"}, "2 cycles of cycle_length=4"),
        (batch_selection.BMinSepSampling(0.1, 8, 2), {}, "BMinSepSampling is not"),
        (cyclic(cycle_length=2), {"num_bands": 3}, "num_bands=3"),
        (cyclic(cycle_length=2), {"neighboring_relation": "add_remove"}, "EQUAL_SPLIT"),
        (SPLIT, {"num_examples": 50}, "INDEPENDENT"),
        (
            users_of(batch_selection.FixedBatchSampling(3, iterations=2)),
            {"num_examples": 50},
            "and so others, were sampled",
        ),
        (
            users_of(cyclic(truncated_batch_size=3)),
            {"num_examples": 50},
            "truncated_batch_size is not covered",
        ),
        (cycles(4, 18, 4), {}, "whole cycles"),
        (cycles(4, 20, 4), {}, "total_participations"),
        (UNKNOWN, {}, "is not covered with by; known fields: iterations, cyc"),
    ],
)
def test_plans_without_a_theorem_are_refused(plan, change, message):
    with pytest.raises(NotImplementedError, match=message):
        from_execution_plan(plan, **{**BAND_STRATEGY, **change})


@pytest.mark.parametrize(
    ("plan", "change", "message"),
    [
        (cyclic(truncated_batch_size=3), {}, "num_examples"),
        (cycles(4, 20, 0), {}, "cycle_length"),
        (SORTED, {}, "partition_type"),
        (cyclic(), {"noise_multiplier": None}, "noise_multiplier"),
        ("plan", {"noise_multiplier": None}, "execution plan"),
        (MADE, {}, "must be None with a plan"),
    ],
)
def test_wrong_arguments_are_refused(plan, change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        from_execution_plan(plan, **{**BAND_STRATEGY, **change})


def test_the_event_must_describe_the_draws():
    plan = config(Relation.REPLACE_SPECIAL).plan
    given = {"neighboring_relation": "zero_out"}
    for change in ({"sampling_prob": 0.3}, {"iterations": 31}, {"cycle_length": 2}):
        other = dataclasses.replace(plan.batch_selection_strategy, **change)
        wrong = dataclasses.replace(plan, batch_selection_strategy=other)
        with pytest.raises(ValueError, match="dp_event must describe"):
            from_execution_plan(wrong, **given)
    bins = batch_selection.BallsInBinsSampling(iterations=30, cycle_length=1)
    with pytest.raises(ValueError, match="dp_event must describe"):
        from_execution_plan(
            dataclasses.replace(plan, batch_selection_strategy=bins), **given
        )
    with pytest.raises(ValueError, match="neighboring_relation must be given"):
        from_execution_plan(plan)
    for event, error in (
        (dp_accounting.LaplaceDpEvent(1.0), ValueError),
        (dp_accounting.dp_event.ZCDpEvent(0.5), NotImplementedError),
    ):
        with pytest.raises(error, match="DpEvent"):
            from_execution_plan(dataclasses.replace(plan, dp_event=event), **given)


def test_later_plans_state_their_relation():
    """Plans of version 2.2: ``make()``, and a relation in the plan."""
    plan = config(Relation.ADD_OR_REMOVE_ONE).plan
    later = SimpleNamespace(
        batch_selection_strategy=plan.batch_selection_strategy,
        dp_event=plan.dp_event,
        neighboring_relation=Relation.ADD_OR_REMOVE_ONE,
    )
    run = from_execution_plan(SimpleNamespace(make=lambda: later))
    assert jde.epsilon(run, delta=DELTA) == poisson(1.3, 30, "add_remove")
    later.dp_event = dp_accounting.NonPrivateDpEvent()
    assert jde.epsilon(from_execution_plan(later), delta=DELTA) == np.inf
    later.examples_per_user = 3
    with pytest.raises(NotImplementedError, match="examples_per_user"):
        from_execution_plan(later)


def test_jax_privacys_calibration_works_with_our_accountant():
    made = config(
        Relation.REPLACE_SPECIAL, noise_multiplier=None, epsilon=2.0, delta=DELTA
    )
    spent = jde.epsilon(from_execution_plan(made), delta=DELTA)
    assert 2.0 - 1e-4 < spent <= 2.0


def test_jax_privacys_accountants_take_our_config():
    accountant = accounting.DpsgdTrainingAccountant(training_config())
    given = {"num_samples": 1_000, "target_delta": DELTA}
    noise = accounting.calibrate_noise_multiplier(
        target_epsilon=3.0,
        accountant=accountant,
        batch_sizes=200,
        num_updates=30,
        tol=1e-3,
        **given,
    )
    assert 2.97 < poisson(noise, 30, "add_remove") <= 3.0
    with pytest.raises(ValueError, match="method"):
        training_config(method="prv")


# --- Strategies that draw users ---


@pytest.mark.parametrize(
    ("base", "relation"),
    [(cyclic(), "add_remove"), (batch_selection.BallsInBinsSampling(4, 4), "zero_out")],
)
def test_users_cost_what_records_do(base, relation):
    given = {"neighboring_relation": relation, "noise_multiplier": 1.3}
    run = from_execution_plan(users_of(base, shuffle_per_user=True), **given)
    records = from_execution_plan(base, **given)
    assert jde.epsilon(run, delta=DELTA) == jde.epsilon(records, delta=DELTA)
    (step,) = run.steps
    assert (step.clip_unit, step.privacy_unit) == ("user", "user")


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


# --- Parameters of training with users, against its accountant ---

Sampling = accounting.SamplingMethod
PER_USER = accounting.DpsgdTrainingUserLevelAccountant(
    accounting.PldAccountantConfig(value_discretization_interval=1e-2)
)


def params(**options):
    options = {
        "noise_multipliers": 4.0,
        "num_samples": 1_000,
        "delta": DELTA,
        "batch_size": 50,
        "examples_per_user": 6,
        **options,
    }
    return accounting.DpParams(**options)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("relation", "given"),
    [
        ("zero_out", params()),
        (
            "add_remove",
            params(
                noise_multipliers=[(0, 5.0), (15, 3.0)],
                batch_size_scale_schedule={10: 2},
            ),
        ),
    ],
)
def test_poisson_sampled_users_agree_with_jax_privacy(relation, given):
    theirs = PER_USER.compute_epsilon(40, given)
    run = from_dp_params(given, num_updates=40, neighboring_relation=relation)
    assert sum(int(count) for count in run.counts) == 40
    value = jde.epsilon(run, delta=DELTA)
    assert value <= theirs <= value * (1 + 2e-3)


def test_fixed_size_batches_agree_under_add_remove():
    given = params(sampling_method=Sampling.FIXED_BATCH_SIZE)
    theirs = PER_USER.compute_epsilon(20, given)
    value = jde.epsilon(from_dp_params(given, num_updates=20), delta=DELTA)
    assert value <= theirs <= value * (1 + 2e-3)
    replaced = from_dp_params(given, num_updates=20, neighboring_relation="replace_one")
    assert jde.epsilon(replaced, delta=DELTA, method="rdp") > 1.1 * value


def test_without_users_examples_are_protected():
    given = params(examples_per_user=None, noise_multipliers=[(0, 5.0), (2, 3.0)])
    run = from_dp_params(given, num_updates=3)
    assert {step.privacy_unit for step in run.steps} == {"example"}
    assert [step.noise_multiplier for step in run.gaussian_steps] == [5.0, 3.0]
    assert run.counts == (2, 1)
    assert jde.epsilon(from_dp_params(params(), num_updates=0), delta=DELTA) == 0
    bare = from_dp_params(params(is_finite_guarantee=False), num_updates=3)
    assert jde.epsilon(bare, delta=DELTA) == float("inf")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"truncated_batch_size": 60}, NotImplementedError, "training_config"),
        ({"noise_multipliers": [(5, 1.0)]}, ValueError, "begin at step 0"),
        ({"batch_size": 2_000}, ValueError, "sampling_probability"),
    ],
)
def test_unsupported_parameters_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        from_dp_params(params(**change), num_updates=10)
    with pytest.raises(TypeError, match="DpParams"):
        from_dp_params(3.0, num_updates=1)
