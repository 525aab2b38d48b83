"""The stages of a run, and which one it releases."""

import contextlib
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp_episodic as jde
from crash_rigs import train_until
from jaxdp_episodic.trainer.data.built_in import make_sinusoids
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.learners.episode import regression_episode
from jaxdp_episodic.trainer.learners.learners import (
    ProtoNet,
    Ridge,
    Supervised,
    as_they_are,
    untrained,
)
from jaxdp_episodic.trainer.run.evaluation import EpisodeScores, Evaluation
from jaxdp_episodic.trainer.run.loop import best_of, choosing_split
from jaxdp_episodic.trainer.run.run_files import (
    STAGES,
    STORE,
    read_log,
    releasable_records,
)
from jaxdp_episodic.trainer.run.store import BEST, RunStore
from jaxdp_episodic.training import MixedModel, PrivateStatistics, StartConfig
from training_runs import (
    GROUPED,
    adam,
    adaptive,
    classes,
    owned,
    plain_trainer,
    with_statistics,
)

VALIDATION = "validation"


def scored(data=None, split=VALIDATION, num_episodes=60, **arguments):
    data = classes(seed=9) if data is None else data
    given = {"ways": 3, "shots": 1, "queries": 2, **arguments}
    return {split: Evaluation(data, num_episodes=num_episodes, **given)}


def names(run):
    return [stage.name for stage in run.stages()]


# --- Learners without training ---


def test_untrained_learners_are_nearest_class_means_and_least_squares():
    learner = ProtoNet(len, ways=3, distance="cosine", resplits=True)
    found = untrained(learner, 7)
    assert found == ProtoNet(as_they_are, ways=3, distance="cosine")
    assert untrained(Supervised(len), 7) == ProtoNet(as_they_are, ways=7)
    assert untrained(MixedModel(), 1) == Ridge()


@pytest.mark.slow
def test_ridge_is_ridge_regression_with_one_example_at_the_mean():
    rng = np.random.default_rng(0)
    rows, targets = rng.normal(size=(9, 3)), rng.normal(size=9)
    mask = np.r_[np.ones(4), 0.0, np.ones(4)]  # the fifth support example is masked
    rows[4], targets[4] = np.nan, np.nan
    episode = regression_episode(
        np.float32(rows), np.float32(targets), np.float32(mask), shots=5
    )
    support, values = rows[:4], targets[:4]
    apart = support - support.mean(axis=0)
    penalty = np.square(apart).sum() / 4
    normal = apart.T @ apart + penalty * np.eye(3)
    slopes = np.linalg.solve(normal, apart.T @ (values - values.mean()))
    expected = values.mean() + (rows[5:] - support.mean(axis=0)) @ slopes
    np.testing.assert_allclose(Ridge().predict({}, episode), expected, rtol=1e-5)


@pytest.mark.parametrize("number", [0, 3])
def test_ridge_of_inputs_that_are_all_the_same_is_the_mean(number):
    mask = np.r_[np.arange(3) < number, 1.0].astype(np.float32)
    targets = np.float32([2.0, 4.0, 9.0, 0.0])
    ones = np.ones((4, 2), np.float32)
    found = Ridge().predict({}, regression_episode(ones, targets, mask, shots=3))
    np.testing.assert_allclose(found, [np.mean(targets[:number]) if number else 0.0])


# --- The stages of a run ---


def test_stages_of_a_run_of_steps_alone():
    run = plain_trainer(num_steps=2)
    initial = run.params
    assert names(run) == ["features", "initial"] and run.released.name == "initial"
    run.step()
    assert names(run) == ["features", "initial", "steps"]
    features, before, steps = run.stages()
    assert features.params == {} and run.released.name == "steps"
    for ours, theirs in ((before.params, initial), (steps.params, run.params)):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def started(*, num_steps=2, data=None, kind="plda", **changes):
    """A run on data whose classes differ in the first two of five coordinates."""
    data = directions() if data is None else data
    config = StartConfig(kind=kind, mean=0.2, within=(0.3,), total=0.5, dimensions=2)
    width = 2 if kind == "plda" else 5
    params = {"w": np.eye(width, dtype=np.float32)} if num_steps else {}
    learner = ProtoNet(_linear, ways=3, distance="cosine"), params
    step = dataclasses.replace(GROUPED, noise_multiplier=0.5)
    how = {"num_steps": num_steps, "optimizer": adam(0.01), **changes}
    return with_statistics(data, config, step, learner, **how)


def _linear(params, inputs):
    return inputs @ params["w"] if params else inputs


def directions(seed=0, num_classes=30):
    """Classes that differ in two coordinates and vary most in the last one."""
    rng = np.random.default_rng(seed)
    spread = np.array([0.05] * 4 + [1.0])
    centers = np.zeros((num_classes, 1, 5))
    centers[..., :2] = rng.normal(size=(num_classes, 1, 2))
    rows = np.concatenate(centers + spread * rng.normal(size=(num_classes, 6, 5)))
    ids = np.repeat(np.arange(num_classes), 6)
    return ExampleTable.from_records(rows, units={"class": ids})


def test_the_mean_stage_only_centres_unit_rows():
    run = started(kind="mean", num_steps=1)
    run.step()
    (_, mean), data = run.stages(), directions(seed=3)
    rows = data.features / np.linalg.norm(data.features, axis=1, keepdims=True)
    rows = np.float32(rows - np.asarray(run.state.start.mean))
    (by_hand,) = scored(data.with_features(rows)).values()
    (evaluation,) = scored(data).values()
    cosine = ProtoNet(as_they_are, ways=3, distance="cosine")
    expected = by_hand(cosine, {}).mean
    assert evaluation(mean.learner, mean.params).mean == pytest.approx(expected)


def test_a_dropped_statistic_is_no_stage():
    run = started()
    own = run.parts.start
    assert names(run) == ["features"]  # a zero projection cannot be scored
    nothing = own.initial()
    assert own.stages(nothing) == {}
    noised = np.eye(5)
    late = own.with_sum(nothing, len(own.steps) - 1, noised, 0.0)
    assert list(own.stages(late)) == ["statistics"]


@pytest.mark.slow
def test_stages_of_a_mixed_model():
    model = MixedModel(powers=1, slopes=1)
    table = make_sinusoids(5, points=4, seed=0)
    config = StartConfig(kind="mixed", powers=1, slopes=1)
    levels = {"privacy_unit": "point", "neighboring_relation": "add_remove"}
    own = PrivateStatistics(table, config, **levels)
    state = model.initial(1)._replace(coefficients=jnp.float32([0.5, 1.0]))
    assert list(own.stages(state)) == ["mean"]
    state = state._replace(
        covariance=jnp.eye(2, dtype=jnp.float32), variance=jnp.float32(0.1)
    )
    mean, whole = own.stages(state).values()
    points, none = np.float32([[0.0], [0.2], [0.3]]), np.ones(3, np.float32)
    episode = regression_episode(points, np.float32([1.0, 0, 0]), none, shots=1)
    line = np.float32([0.7, 0.8])  # regardless of the support
    found = model.predict({"start": mean, "model": {}}, episode)
    np.testing.assert_allclose(found, line, rtol=1e-6)
    assert np.all(model.predict({"start": whole, "model": {}}, episode) > line)


# --- Comparing stages ---


def test_scores_are_compared_in_pairs():
    rng = np.random.default_rng(0)
    hard, gain = rng.random((400, 1)), 0.1 * rng.random((400, 1))
    weights, one_class = np.full((400, 1), 10.0), np.zeros((400, 1), int)
    worse = EpisodeScores(10 * hard, weights, one_class, False)
    better = EpisodeScores(10 * (hard + gain), weights, one_class, False)
    ahead, error = better.ahead_of(worse)
    assert ahead == pytest.approx(gain.mean())
    assert error == pytest.approx(gain.std(ddof=1) / 20)
    # Separate intervals would hide the difference.
    assert better.score().low < worse.score().high and ahead > 20 * error
    errors = [one._replace(is_regression=True) for one in (worse, better)]
    assert errors[0].ahead_of(errors[1]) == pytest.approx((ahead, error))
    assert errors[0].value == pytest.approx(-hard.mean())


@pytest.mark.parametrize(("classes", "ways"), [(200, 5), (8, 5), (30, 1)])
def test_the_error_includes_the_draw_of_the_classes(classes, ways):
    """A class's effect on the others in its episodes is in no single score."""
    rng, found = np.random.default_rng(0), []
    for _ in range(200):
        gain, taken = 0.05 * rng.normal(size=classes), 0.2 * rng.normal(size=classes)
        groups = rng.random((300, classes)).argsort(axis=1)[:, :ways]
        taken = taken[groups] - taken[groups].mean(axis=1, keepdims=True)
        sums = gain[groups].mean(axis=1, keepdims=True) + taken
        sums += 0.2 * rng.normal(size=groups.shape)
        nothing = EpisodeScores(0 * sums, np.ones(sums.shape), groups, False)
        one = nothing._replace(sums=sums)
        over_episodes = sums.mean(axis=1).std() / np.sqrt(300)
        found.append((*one.ahead_of(nothing), over_episodes))
    values, errors, over_episodes = np.array(found).T
    true = np.sqrt(np.mean(np.square(values)))  # the overall mean is 0
    assert 0.85 < np.sqrt(np.mean(np.square(errors))) / true < 1.3
    assert (errors >= over_episodes).all()
    # A third is beyond the error; with the episodes' error, more than half.
    assert np.mean(np.abs(values) > errors) < 0.46
    if classes < 200:
        assert np.mean(np.abs(values) > over_episodes) > 0.5 - 0.15 * (ways == 1)


def hits(*numbers):
    sums = np.array(numbers, float)[:, None]
    return EpisodeScores(sums, np.ones(sums.shape), np.zeros(sums.shape), False)


@pytest.mark.parametrize(
    ("scores", "place", "behind"),
    [
        # Equally good on other episodes: the first is chosen.
        ([(1, 0, 1, 0), (0, 1, 0, 1)], 0, (0.0, 0.0)),
        # One more right of four: a standard error of .25 and a difference of .25.
        ([(1, 0, 0, 0), (1, 1, 0, 0)], 1, (0.25, 0.25)),
        ([(0, 0, 0, 0), (1, 1, 1, 0), (1, 1, 0, 1), (1, 0, 0, 0)], 1, (0.75, 0.25)),
        ([(1, 1, np.nan, 1), (0, 0, 0, 1)], 1, (math.inf, 0.0)),
    ],
)
def test_the_first_of_the_best_stages_is_chosen(scores, place, behind):
    found, pairs = best_of({str(n): hits(*one) for n, one in enumerate(scores)})
    assert found == str(place) and pairs["0"] == pytest.approx(behind)


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        (["test", "validation"], "validation"),
        (["test", "dev", "other"], "dev"),
        (["test"], None),
        ([], None),
    ],
)
def test_nothing_is_chosen_on_the_test_split(splits, expected):
    (evaluation,) = scored().values()
    given = dict.fromkeys(splits, evaluation)
    assert choosing_split(plain_trainer(), given, None)[0] == expected
    found, words = choosing_split(adaptive(), given, None)
    assert found is None
    assert expected is None or "held-out data are protected" in words


# --- Runs ---


@pytest.mark.slow
def test_without_signal_plain_features_are_released(tmp_path):
    """Classes of noise: training on them harms."""
    rng = np.random.default_rng(0)
    noise = classes().with_features(np.float32(rng.normal(size=(180, 2))))
    run = plain_trainer(data=noise, num_steps=4, optimizer=adam(5.0))
    records = run.train(tmp_path, evaluations=scored())
    chosen = run.selection
    assert run.released.name == chosen.stage.name == "features"
    assert list(chosen.scores) == ["features", "initial", "steps"]
    ahead, error = chosen.behind["steps"]
    assert ahead > 2 * error > 0
    run.selection = chosen._replace(step=3)  # steps were taken after it
    assert run.released.name == "steps"
    assert records[0]["stage"] == "features" and records[-1]["stage"] == "steps"
    assert records[-1]["released"] == "features"
    found = records[-1][STAGES]["scores"]
    assert found["features"] == records[0]["held_out"]
    # The stage's name is released, its scores are not.
    public = releasable_records(records)
    assert public[-1]["released"] == "features"
    assert STAGES not in str(public) and "mean" not in str(public)
    assert "**Whoever is in those data is not protected**" in chosen.words


def test_a_helpful_stage_is_released(tmp_path):
    run = started()
    run.train(tmp_path, evaluations=scored(directions(seed=3), num_episodes=200))
    scores = [one[VALIDATION].mean for one in run.selection.scores.values()]
    assert list(run.selection.scores) == ["features", "mean", "statistics", "steps"]
    assert max(scores[:2]) + 0.1 < min(scores[2:])
    assert run.released.name in ("statistics", "steps")
    (_, mean, statistics, steps), start = run.stages(), run.state.start
    assert run.parts.start._made[0] is start  # one table for all steps
    np.testing.assert_array_equal(mean.params["start"]["projection"], np.eye(5))
    np.testing.assert_array_equal(mean.params["start"]["mean"], start.mean)
    for stage in (statistics, steps):
        projection = stage.params["start"]["projection"]
        np.testing.assert_array_equal(projection, start.projection)
    assert mean.params["model"] == statistics.params["model"] == {}
    assert steps.params["model"].keys() == {"w"}


@pytest.mark.parametrize(
    ("evaluations", "select", "reason"),
    [
        ({}, True, "nothing was scored on held-out data"),
        ({"test": None}, True, "'test' alone was scored, and nothing is chosen by"),
        ({"validation": None}, False, "the choice was turned off"),
    ],
)
def test_without_a_choice_the_last_one_is_released(
    tmp_path, evaluations, select, reason
):
    (evaluation,) = scored().values()
    run = plain_trainer(num_steps=1)
    given = dict.fromkeys(evaluations, evaluation)
    records = run.train(tmp_path, evaluations=given, select=select)
    chosen = run.selection
    assert run.released.name == "steps" and chosen.split is None
    assert reason in chosen.words and "made no choice" in chosen.words
    assert list(chosen.scores) == ["features", "initial", "steps"] * bool(given)
    assert (STAGES in records[-1]) == bool(given)


# --- Data that may choose a stage ---


PERSON = dataclasses.replace(
    GROUPED, privacy_unit="person", people=jde.PersonBounds(classes=30, examples=1)
)


def test_data_with_people_in_both_parts_choose_nothing(tmp_path):
    """Not even if no name is shared, since that would be disclosed."""
    run = plain_trainer(step=PERSON, data=owned(), num_steps=1)
    both, apart = (scored(owned(classes(seed=9), first)) for first in (5, 6))
    found = [choosing_split(run, one, None) for one in (both, apart)]
    assert found[0] == found[1] and found[0][0] is None
    with pytest.raises(ValueError, match="got 1 'person' units in both, such as 5"):
        run.train(tmp_path, evaluations=both, select=True)
    assert run.num_steps_charged == 0
    run.train(tmp_path, evaluations=apart)
    assert run.released.name == "steps"
    assert "people are protected" in run.selection.words
    assert choosing_split(run, apart, True) == (VALIDATION, "")


def test_training_data_choose_nothing(tmp_path):
    run, given = plain_trainer(num_steps=1), scored(classes())
    with pytest.raises(ValueError, match="nobody in common .* set select = false"):
        run.train(tmp_path, evaluations=given)
    run.train(tmp_path, evaluations=given, select=False)
    assert run.released.name == "steps"


# --- Killed and resumed ---


def spoiled(after):
    """An optimizer that learns for some steps and then diverges."""
    rates = optax.join_schedules(
        [optax.constant_schedule(0.02), optax.constant_schedule(-50.0)], [after]
    )
    return optax.sgd(rates)


def early():
    step = dataclasses.replace(GROUPED, noise_multiplier=0.01)
    learner = ProtoNet(_linear, ways=3), {"w": np.eye(5, dtype=np.float32)}
    how = {"l2_clip_norm": 5.0, "optimizer": spoiled(4)}
    return plain_trainer(data=directions(), learner=learner, step=step, **how)


@pytest.mark.slow
@pytest.mark.parametrize("killed_after", [2, 5])
def test_the_best_steps_survive_a_kill(tmp_path, killed_after):
    scores = scored(directions(seed=3), num_episodes=200)
    given = {"evaluations": scores, "evaluate_every": 2}
    whole = early()
    whole.train(tmp_path / "whole", **given)

    part, rest = early(), early()
    train_until(killed_after, part, tmp_path / "part", **given)
    rest.resume(tmp_path / "part")
    rest.train(tmp_path / "part", **given)
    assert whole.released.name == "steps@4"
    assert rest.selection.scores == whole.selection.scores
    assert rest.selection.behind == whole.selection.behind
    for run, folder in ((whole, "whole"), (rest, "part")):
        with contextlib.closing(RunStore(tmp_path / folder / STORE)) as store:
            step, (kept,) = store.kept(BEST)
        assert step == 4
        np.testing.assert_array_equal(run.released.params["w"], kept)
    logs = [read_log(tmp_path / name / STORE) for name in ("whole", "part")]
    assert [r["step"] for r in logs[0]] == [r["step"] for r in logs[1]]
    assert logs[0][-1] | {"private": 0} == logs[1][-1] | {"private": 0}
    again = early()  # a finished run takes no step, and chooses the same
    again.resume(tmp_path / "part")
    assert again.train(tmp_path / "part", **given) == []
    assert again.selection.behind == whole.selection.behind
    assert read_log(tmp_path / "part") == logs[1]
