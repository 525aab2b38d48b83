"""Calibrated settings meet their target, and slightly less private ones do not."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

import jaxdp_episodic as jde
from designs import sampled
from jaxdp_episodic.accountant.questions import calibration
from jaxdp_episodic.accountant.questions.calibration import Question

# These tests are about the Rényi bounds.
rdp_epsilon = functools.partial(jde.epsilon, method="rdp")
rdp_noise_multiplier = functools.partial(jde.calibrate_noise_multiplier, method="rdp")
rdp_num_steps = functools.partial(jde.calibrate_num_steps, method="rdp")
rdp_rate = functools.partial(jde.calibrate_rate, method="rdp")

# A setting that is less private by this share must miss the target.
STEP_BEYOND = 1e-5
DELTA = 1e-6
# A warning is expected where delta or epsilon covers everything.
NEXT_TO_NONE = pytest.mark.filterwarnings("ignore:noise_multiplier=.* next to none")


def poisson(rate: Any = 0.01, name: str = "user") -> jde.Poisson:
    return jde.Poisson(name, sampling_probability=rate)


def nested(rate: Any = 0.05) -> jde.MultistageSampling:
    return jde.MultistageSampling(
        poisson(rate, "school"), jde.WithoutReplacement("pupil", size=8, population=40)
    )


GROUPED = jde.GroupedClasses(
    num_classes=1_800,
    ways=5,
    episodes=jde.Poisson("episode", sampling_probability=64 / 360),
    examples=jde.WithoutReplacement("example", size=4, population=20),
)
DESIGNS: dict[str, dict[str, Any]] = {
    "sampled": {"sampling": poisson()},
    "swapped": {"sampling": poisson(), "clip_unit": "step"},
    "replaced": {"sampling": poisson(), "neighboring_relation": "replace_one"},
    "outer": {"sampling": nested(), "clip_unit": "pupil"},
    "antipodal": {"sampling": nested(), "clip_unit": "school"},
    "grouped": {"sampling": GROUPED},
    "episodes": {"sampling": jde.IndependentEpisodes(nested(), num_episodes=4)},
    "epochs": {"sampling": jde.RandomAllocation("user", steps_per_epoch=4)},
}


def noise_at(noise: Any, step: jde.GaussianStep) -> jde.GaussianStep:
    return dataclasses.replace(step, noise_multiplier=noise)


def calibrated_step(design: dict[str, Any], **targets: Any):
    """The calibrated noise of a design, and the step with it."""
    # Its own noise is ignored.
    step = jde.GaussianStep(**design, noise_multiplier=0.7)
    noise = rdp_noise_multiplier(step, **targets)
    return noise, noise_at(noise, step)


class TestNoise:
    @pytest.mark.few(2)
    @pytest.mark.parametrize("name", DESIGNS)
    def test_calibrated_noise_and_steps_are_the_ends(self, name):
        """Less noise, or one step more, misses the target."""
        epsilon, num_steps = np.array([0.3, 2.0, 9.0]), np.array([[1], [400]])
        noise, step = calibrated_step(
            DESIGNS[name], epsilon=epsilon, delta=DELTA, num_steps=num_steps
        )
        assert noise.shape == (2, 3)
        assert np.all(rdp_epsilon(step, delta=DELTA, num_steps=num_steps) <= epsilon)
        less = noise_at(noise * (1 - STEP_BEYOND), step)
        assert np.all(rdp_epsilon(less, delta=DELTA, num_steps=num_steps) > epsilon)
        step = noise_at(np.array([0.8, 2.0, 11.0]), step)
        count = rdp_num_steps(step, epsilon=3.0, delta=DELTA)
        assert count.dtype == np.int64 and count.shape == (3,)
        assert np.all(rdp_epsilon(step, delta=DELTA, num_steps=count) <= 3.0)
        assert np.all(rdp_epsilon(step, delta=DELTA, num_steps=count + 1) > 3.0)
        assert np.all(np.diff(count) >= 0)

    def test_published_figure_of_a_grouped_run(self):
        """5 ways, 64 episodes per step, 4 of 20 examples, 300 steps, (8, 1e-5)."""
        targets = {"epsilon": 8.0, "delta": 1e-5, "num_steps": 300}
        noise, _ = calibrated_step({"sampling": GROUPED}, **targets)
        assert noise == pytest.approx(0.937, abs=1e-3)
        fixed = dataclasses.replace(
            GROUPED, episodes=jde.WithoutReplacement("episode", size=64)
        )
        noise, _ = calibrated_step({"sampling": fixed}, **targets)
        assert noise == pytest.approx(1.636, abs=1e-3)

    def test_gaussian_mechanism_in_closed_form(self):
        """At rate 1 epsilon depends only on num_steps / noise²."""
        targets = {"epsilon": 1.0, "delta": 1e-5}
        one, _ = calibrated_step({"sampling": poisson(1.0)}, num_steps=1, **targets)
        many, _ = calibrated_step({"sampling": poisson(1.0)}, num_steps=900, **targets)
        assert many == pytest.approx(30 * one, rel=3e-7)

    @pytest.mark.parametrize(
        "epsilon, delta, num_steps, rate",
        [(1e-6, 1e-10, 10**7, 1.0), (1e3, 0.5, 1, 1e-9), (1e-3, 1e-300, 1, 0.3)],
    )
    @NEXT_TO_NONE
    def test_far_targets(self, epsilon, delta, num_steps, rate):
        run = {"delta": delta, "num_steps": num_steps}
        noise, step = calibrated_step(
            {"sampling": poisson(rate)}, epsilon=epsilon, **run
        )
        assert 0 < noise < np.inf
        assert rdp_epsilon(step, **run) <= epsilon

    @pytest.mark.few(1)
    @pytest.mark.parametrize("sampling", ["poisson", "episodes"])
    def test_the_smallest_where_epsilon_jumps_to_0(self, sampling):
        """As the Rényi bound does at large deltas."""
        design, epsilon, delta = {"sampling": poisson(0.01)}, 0.05, 0.01
        if sampling == "episodes":
            epsilon, delta = 0.05428, 0.0023573
            task = jde.WithoutReplacement("task", size=1, population=30)
            example = jde.WithoutReplacement("example", size=3, population=20)
            each = jde.MultistageSampling(task, example)
            design = {
                "sampling": jde.IndependentEpisodes(each, num_episodes=4),
                "neighboring_relation": "replace_one",
            }
        run = {"delta": delta, "num_steps": 1}
        noise, step = calibrated_step(design, epsilon=epsilon, **run)
        assert rdp_epsilon(noise_at(noise * (1 - 1e-6), step), **run) > epsilon

    @pytest.mark.few(2)
    @pytest.mark.parametrize(
        ("method", "delta"),
        [("exact", 0.05), ("rdp", 0.05), ("exact", 0.9), ("pld", 0.05)],
    )
    def test_the_smallest_where_epsilon_falls_steeply(self, method, delta):
        """It reaches 0 where delta is the total variation."""
        step = sampled(0.9, 1.0)
        run = {"delta": delta, "num_steps": 3, "method": method}
        noise = jde.calibrate_noise_multiplier(step, epsilon=1e-3, **run)
        assert jde.epsilon(noise_at(noise, step), **run) <= 1e-3
        assert jde.epsilon(noise_at(noise * (1 - 2e-7), step), **run) > 1e-3

    def test_noise_beside_jumps_is_found(self):
        """A noise is enough and less is not, also where the best order jumps."""
        rng = np.random.default_rng(0)
        rate = 10 ** rng.uniform(-5, 0, 40)[:12]
        noise = 10 ** rng.uniform(-0.3, 1, 40)[:12]
        steps = np.rint(10 ** rng.uniform(0, 5, 40))[:12]
        delta = 10 ** rng.uniform(-12, -2)
        step = sampled(rate, noise)
        run: dict[str, Any] = {"num_steps": steps, "delta": delta, "engine": "numpy"}
        target = rdp_epsilon(step, **run)
        for tolerance in (1e-7, 1e-3):
            asked = run | {"epsilon": target, "tolerance": tolerance}
            found = rdp_noise_multiplier(step, **asked)
            assert np.all(found >= noise * (1 - 1e-9))
            assert np.all(found <= noise * (1 + 1.01 * tolerance))
            assert np.all(rdp_epsilon(noise_at(found, step), **run) <= target)


class TestRate:
    @pytest.mark.few(1)
    @pytest.mark.parametrize(
        "clip_unit", ["school", pytest.param("pupil", marks=pytest.mark.slow), "step"]
    )
    def test_poisson_probability_is_the_largest(self, clip_unit):
        step = jde.GaussianStep(nested(), noise_multiplier=1.5, clip_unit=clip_unit)
        targets = {"delta": DELTA, "num_steps": 200}
        # Its own rate at this level is ignored.
        epsilon = np.array([0.05, 0.5, 3.0])
        rate = rdp_rate(step, level="school", epsilon=epsilon, **targets)
        assert rate.dtype == np.float64 and rate.shape == (3,)

        def spent(rate):
            changed = dataclasses.replace(step, sampling=nested(rate))
            return rdp_epsilon(changed, **targets)

        assert np.all(spent(rate) <= epsilon)
        more = spent(np.minimum(rate * (1 + STEP_BEYOND), 1.0))
        assert np.all((more > epsilon) | (rate == 1) | (rate == 0))
        assert np.any((rate > 0) & (rate < 1))

    def test_targets_always_met_and_unreachable(self):
        targets = {"epsilon": 1.0, "delta": DELTA}
        sized = jde.WithoutReplacement("user", size=3, population=10)
        for sampling, most in ((poisson(), 1.0), (sized, 10)):
            for noise, largest in ((1e4, most), (0.0, 0)):
                step = jde.GaussianStep(sampling, noise_multiplier=noise)
                found = rdp_rate(step, level="user", **targets, num_steps=100)
                assert found == largest
        steps = rdp_num_steps(sampled([0.5, 0.0, 0.5], [0.0, 1.0, np.inf]), **targets)
        assert steps.tolist() == [0, 2**53, 2**53]

    @pytest.mark.parametrize("epsilon", [0.01, 3.0, 1e3])
    def test_size_is_the_largest(self, epsilon):
        """Of classes: at least the number of ways, or 0."""

        def step_with(size):
            sampling = jde.GroupedClasses(
                num_classes=100,
                ways=5,
                classes=jde.WithoutReplacement("class", size=size),
                examples=jde.WithoutReplacement("example", size=4, population=20),
            )
            return jde.GaussianStep(sampling, noise_multiplier=3.0)

        run = {"delta": DELTA, "num_steps": 100}
        size = rdp_rate(step_with(9), level="class", epsilon=epsilon, **run)
        assert size.dtype == np.int64 and (size == 0 or 5 <= size <= 100)
        sizes = np.arange(5, 101)
        within = rdp_epsilon(step_with(sizes), **run) <= epsilon
        assert size == max(sizes[within], default=0)

    @pytest.mark.parametrize(("small_units", "most"), [("keep", 10), ("error", 4)])
    def test_no_size_above_what_small_units_permit(self, small_units, most):
        pupils = jde.WithoutReplacement("pupil", size=1)
        step = jde.GaussianStep(
            jde.MultistageSampling(poisson(0.5, "school"), pupils),
            noise_multiplier=1e4,
            clip_unit="step",
            neighboring_relation="zero_out",
            population=jde.Population(children_counts=([2], [4, 10])),
            small_units=small_units,
        )
        run = {"epsilon": 1.0, "delta": DELTA, "num_steps": 2}
        assert rdp_rate(step, level="pupil", **run) == most

    def test_levels_of_grouped_classes(self):
        step = jde.GaussianStep(GROUPED, noise_multiplier=1.0)
        targets = {"epsilon": 4.0, "delta": 1e-5, "num_steps": 300}
        rate = rdp_rate(step, level="episode", **targets)
        design = dataclasses.replace(GROUPED, episodes=poisson(rate, "episode"))
        drawn = dataclasses.replace(step, sampling=design)
        spent = rdp_epsilon(drawn, delta=1e-5, num_steps=300)
        assert 4.0 * (1 - 1e-5) < spent <= 4.0
        with pytest.raises(ValueError, match="level must be one with a scheme"):
            rdp_rate(step, level="class", **targets)


def asking(question: Any, **known: Any) -> Any:
    """The question with these and other targets, some of them changed."""
    step = sampled(0.01, 1.0)
    known = {"step": step, "epsilon": 1.0, "delta": 1e-5, **known}
    return lambda **changed: question(**{**known, **changed})


noise_of = asking(rdp_noise_multiplier, num_steps=10)
steps_of = asking(rdp_num_steps)
rate_of = asking(rdp_rate, num_steps=10, level="user")
EVERY, OF_STEPS = (noise_of, steps_of, rate_of), (noise_of, rate_of)
COMPOSED = jde.compose((sampled(0.01, 1.0), 3))


@pytest.mark.parametrize(
    ("questions", "changed", "message"),
    [
        (EVERY, {"epsilon": 0}, "epsilon must be > 0 and finite, got 0"),
        (EVERY, {"epsilon": np.inf}, "epsilon must be > 0 and finite"),
        (EVERY, {"epsilon": "2"}, "epsilon must be a number"),
        (EVERY, {"delta": 0}, r"delta must lie in \(0, 1\], got 0"),
        (EVERY, {"delta": None}, "delta must be a number"),
        (OF_STEPS, {"num_steps": None}, "num_steps must be a number"),
        (EVERY, {"method": "rpd"}, "did you mean 'rdp'"),
        (EVERY, {"step": COMPOSED}, "step must be a GaussianStep"),
        (OF_STEPS, {"num_steps": -1}, "num_steps must be a whole number >= 0"),
        (OF_STEPS, {"epsilon": [1, 2], "delta": [0.1] * 3}, "do not broadcast"),
        ((noise_of,), {"tolerance": 1e-8}, "tolerance must"),
        ((noise_of,), {"tolerance": 0.2}, "tolerance must"),
        ((rate_of,), {"level": "uzer"}, "did you mean 'user'"),
        ((rate_of,), {"level": 1}, "level must be one of"),
    ],
)
def test_invalid_targets_are_named(questions, changed, message):
    for question in questions:
        with pytest.raises((ValueError, TypeError), match=message):
            question(**changed)
        assert question(epsilon=np.zeros(0)).shape == (0,)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(jde.RandomAllocation, marks=pytest.mark.slow), jde.ShuffledEpochs],
)
def test_the_shortest_epoch(kind: Any):
    def at(steps: Any) -> jde.GaussianStep:
        scheme = kind("user", steps_per_epoch=steps)
        return jde.GaussianStep(scheme, noise_multiplier=np.array([0.9, 4.0, 60.0]))

    epsilon = np.array([[0.9], [6.0]])
    found = rdp_rate(at(1), level="user", epsilon=epsilon, delta=DELTA, num_steps=60)
    assert found.dtype == np.int64 and found.shape == (2, 3)
    if kind is jde.ShuffledEpochs:
        # At least one epoch is charged, which may exceed the target.
        assert np.all(found[:, 0] == 0)
    asked = {"delta": DELTA, "num_steps": 60}
    within = rdp_epsilon(at(np.maximum(found, 1)), **asked) <= epsilon
    shorter = rdp_epsilon(at(np.maximum(found - 1, 1)), **asked) <= epsilon
    assert np.all(within[found > 0]) and not np.any(shorter[found > 1])
    assert found[1, 2] == 1


def test_the_noise_that_is_returned_was_evaluated(monkeypatch):
    plain, within = Question.answer_by, []

    def answer_by(self, method):
        found = plain(self, method)
        within.extend(self.step.noise_multiplier[found.value <= self.epsilon])
        return found

    monkeypatch.setattr(Question, "answer_by", answer_by)
    ask = {"epsilon": 2.0, "delta": DELTA, "num_steps": 100}
    for method in ("rdp", "exact"):
        noise = sampled(np.array([1e-3, 0.1]), 1.0)
        found = jde.calibrate_noise_multiplier(noise, **ask, method=method)
        assert np.isin(found, within).all()


def test_certified_ends_are_asked_where_the_contour_has_no_answer():
    """As at this delta; a Rényi bound is not the smallest noise."""
    step, run = sampled(0.1, 1.0), {"delta": np.array([1e-5, 1e-60]), "num_steps": 3}
    noise = jde.calibrate_noise_multiplier(step, epsilon=2.0, **run)
    assert np.all(jde.epsilon(noise_at(noise, step), **run) <= 2)
    assert np.all(jde.epsilon(noise_at(noise * (1 - 1e-6), step), **run) > 2)


def test_the_error_of_an_exact_epsilon_is_added(monkeypatch):
    plain = calibration.answer

    def wide(*asked):
        found = plain(*asked)
        return found._replace(error=found.value / 8)

    monkeypatch.setattr(calibration, "answer", wide)
    step, run = sampled(0.1, 1.0), {"delta": DELTA, "num_steps": 9}
    noise = jde.calibrate_noise_multiplier(step, epsilon=1.0, **run)
    spent = jde.epsilon(noise_at(noise, step), **run) * (1 + 1 / 8)
    assert 1 - 1e-6 < spent <= 1


def test_a_coarse_tolerance_takes_fewer_evaluations(monkeypatch):
    plain, asked = Question.answer_by, []
    monkeypatch.setattr(Question, "answer_by", lambda *a: asked.append(a) or plain(*a))
    noise_of(tolerance=1e-7)
    fine = len(asked)
    noise_of(tolerance=0.1)
    assert len(asked) < 2 * fine


@pytest.mark.slow
def test_nothing_is_compiled_after_an_epsilon(caplog):
    jax = pytest.importorskip("jax")
    step, ask = sampled(np.geomspace(1e-3, 0.1, 80), 1.0), {"delta": DELTA}
    ask |= {"num_steps": 100, "engine": "jax"}
    jde.epsilon(step, **ask)
    with jax.log_compiles():
        jax.jit(lambda x: x + 1)(1.0)  # shows that compiling is logged
        noise = jde.calibrate_noise_multiplier(step, epsilon=np.e, **ask)
    compiled = [r.message for r in caplog.records if "XLA compilation" in r.message]
    assert len(compiled) == 1 and "<lambda>" in compiled[0]
    spent = jde.epsilon(noise_at(noise, step), **ask)
    np.testing.assert_allclose(spent, np.e, rtol=1e-5)


# --- Very large targets are quick, and still met ---


@pytest.mark.few(1)
@NEXT_TO_NONE
@pytest.mark.parametrize(
    ("rate", "num_steps", "most_draws", "method"),
    # As noise goes to 0 the loss is that of K draws, K a quantile of a binomial.
    [(0.01, 100, 7, "exact"), (0.5, 1000, 567, "exact"), (0.5, 1, 1, "pld")],
)
def test_noise_is_found_quickly(monkeypatch, rate, num_steps, most_draws, method):
    plain, asked = Question.answer_by, []
    monkeypatch.setattr(Question, "answer_by", lambda *a: asked.append(a) or plain(*a))
    step, run = sampled(rate, 1.0), {"num_steps": num_steps, "delta": 1e-5}
    jde.calibrate_noise_multiplier(step, epsilon=2.0, **run)
    usual_calls = len(asked)
    for target in (1e3, 1e6, 1e14):
        asked.clear()
        noise = jde.calibrate_noise_multiplier(
            step, epsilon=target, method=method, **run
        )
        assert len(asked) <= 3 * usual_calls  # bisection took minutes
        # With so little noise epsilon takes up to a minute; the Rényi bound exceeds it.
        by = "rdp" if noise < 0.1 and num_steps > 1 else method
        spent = jde.epsilon(noise_at(noise, step), **run, method=by)
        assert spent <= target * (1 + 1e-12)
        # K draws alone lose K / (2 noise^2).
        least = np.sqrt(most_draws / (2 * target))
        assert target < 1e6 or 0.99 * least <= noise <= 1.2 * least


def test_medium_targets_are_met_to_the_usual_tolerance():
    """Where the contour gives epsilon, also at targets above 50."""
    step = sampled(0.5, 1.0)
    for num_steps, target in ((1000, 60.0), (1000, 1e3), (1, 1e3)):
        run = {"num_steps": num_steps, "delta": 1e-5}
        noise = jde.calibrate_noise_multiplier(step, epsilon=target, **run)
        assert jde.epsilon(noise_at(noise, step), **run) <= target
        assert jde.epsilon(noise_at(noise * (1 - 1e-6), step), **run) > target


@NEXT_TO_NONE
@pytest.mark.parametrize("method", ["exact", "pld", "rdp"])
def test_a_delta_of_one_covers_everything(method):
    step = sampled(0.01, 1.0)
    run: dict = {"epsilon": 1.0, "delta": 1.0, "method": method}
    assert jde.epsilon(step, delta=1.0, num_steps=9, method=method) == 0
    assert jde.calibrate_noise_multiplier(step, **run, num_steps=9) == 1e-9
    assert jde.calibrate_num_steps(step, **run) == 2**53
    assert jde.calibrate_rate(step, level="user", **run, num_steps=9) == 1.0


@NEXT_TO_NONE
def test_settings_without_noise_do_not_affect_others():
    """No steps, or delta covers everything: no order is the best one."""
    step = sampled([0.01, 0.01, 0.0], 1.0)
    asked = {"epsilon": 1.0, "num_steps": np.array([1_000, 0, 1])}
    found = rdp_noise_multiplier(step, delta=np.array([1e-5, 1.0, 1.0]), **asked)
    alone = noise_of(num_steps=1_000)
    np.testing.assert_allclose(found, [alone, 0.0, 0.0], rtol=1e-9)


def test_noise_next_to_none_is_warned_of():
    noise = functools.partial(jde.calibrate_noise_multiplier, delta=1e-5, num_steps=10)
    with pytest.warns(UserWarning, match="protects nobody: epsilon=1 and delta=1e-05"):
        noise(sampled(1e-9, 1.0), epsilon=1.0, num_steps=100)
    with pytest.warns(UserWarning, match="noise_multiplier=0.000"):
        noise(sampled(0.01, 1.0), epsilon=[1.0, 1e8])
    # Only steps without sampling have so little noise.
    noise(sampled([0.01, 0.0], 1.0), epsilon=1e5)
