"""Which pipeline is recommended, for which sizes, and what is then written."""

import dataclasses
import math

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.tools.plan.pipelines import (
    BOTH,
    CLASSES,
    MIN_RATIO,
    NONE,
    recommended_pipeline,
)
from jaxdp_episodic.tools.plan.question import (
    Compute,
    EpisodeShape,
    PlanDescription,
    PlanRequest,
    read_plan,
)
from jaxdp_episodic.trainer.config.training_config import TrainingConfig
from pages import ROOT

TRAIN = {
    "features": {"kind": "wavelets"},
    "l2_clip_norm": 0.1,
    "learner": {"kind": "protonet"},
    "model": {"kind": "linear"},
}


def asked(classes=1_800, epsilon=8.0, shape=(28, 28, 1), train=None, **changes):
    """A plan of glyphs, or of what is given in their place."""
    request = PlanRequest(
        epsilon=epsilon,
        delta=1e-5,
        episode=EpisodeShape(shots=1, examples=(2,), ways=5, population=20),
        compute=Compute(episodes_per_step=360, total_episodes=108_000),
        neighboring_relation="zero_out",
    )
    tree = jde.Population.from_sizes([20] * classes, level_names=("class", "example"))
    request = dataclasses.replace(request, **changes)
    return PlanDescription(request, tree, TRAIN if train is None else train, {}, shape)


def texts(classes=18, examples=2_000, epsilon=1.0, **changes):
    """Short texts as 512 hashed n-grams."""
    most = max(classes // 5, 1)
    description = asked(
        epsilon=epsilon,
        shape=(512,),
        train={"learner": {}},
        **{
            "episode": EpisodeShape(
                shots=5, examples=(8,), ways=min(5, classes), population=examples
            ),
            "compute": Compute(episodes_per_step=most, total_episodes=300 * most),
            **changes,
        },
    )
    tree = jde.Population.from_sizes(
        [examples] * classes, level_names=("class", "example")
    )
    return description._replace(population=tree)


def schools(number=1_676, epsilon=1.0):
    tree = jde.Population.from_sizes([13] * number, level_names=("school", "pupil"))
    description = asked(
        epsilon=epsilon,
        shape=(3,),
        episode=EpisodeShape(shots=4, examples=(8,)),
        neighboring_relation="add_remove",
    )
    return description._replace(population=tree)


@pytest.mark.parametrize(
    ("description", "name"),
    [
        (asked(), "statistics, then steps"),
        (asked(epsilon=1.0), "statistics, then steps"),
        (asked(classes=100), "steps"),
        (asked(classes=300, epsilon=1.0), "steps"),
        (asked(compute=Compute(episodes_per_step=9, total_episodes=99)), "statistics"),
        (asked(train={"learner": {}}), "steps"),  # images without fixed features
        (asked(shape=(64,), train={"learner": {}}), "statistics, then steps"),
        (texts(), "classifier"),
        (texts(epsilon=8.0), "classifier"),
        (texts(privacy_unit="class"), "do not train"),  # its list would be private
        (texts(classes=5, examples=170), "statistics"),
        (texts(classes=20, examples=6), "do not train"),
        (schools(), "mixed model"),
        (schools(number=20), "steps"),
    ],
)
def test_what_is_recommended_follows_from_the_sizes(description, name):
    found = recommended_pipeline(description)
    assert found.name == name and found.reason


def test_the_ratio_is_that_of_its_definition():
    found = recommended_pipeline(asked(epsilon=1.0))
    plain = jde.GaussianStep(
        jde.Poisson("one", sampling_probability=1.0), noise_multiplier=1.0
    )
    noise = jde.calibrate_noise_multiplier(plain, epsilon=1.0, delta=1e-5, num_steps=1)
    noise /= math.sqrt(0.6 * 0.35)
    expected = 1_800 * 10 / 425 / (noise * math.sqrt(2 * 425))
    assert found.ratio == pytest.approx(expected, rel=1e-6)
    paired = recommended_pipeline(asked(neighboring_relation="add_remove"))
    zeroed = recommended_pipeline(asked())
    assert paired.ratio == pytest.approx(zeroed.ratio / math.sqrt(2), rel=1e-6)
    found = [recommended_pipeline(asked(classes=c)) for c in (100, 200)]
    many = [one.weighed[BOTH][0] for one in found]
    assert many[1] == pytest.approx(2 * many[0]) and many[0] < MIN_RATIO


def test_steps_are_planned_with_the_epsilon_that_is_left():
    description = asked()
    found = recommended_pipeline(description)
    left = found.left_for_steps(description.request)
    # The squared distances in deviations, 60 % and 40 % of the whole one's.
    noise = [
        jde.calibrate_noise_multiplier(
            jde.GaussianStep(
                jde.Poisson("one", sampling_probability=1.0), noise_multiplier=1.0
            ),
            epsilon=epsilon,
            delta=1e-5,
            num_steps=1,
        )
        for epsilon in (left.epsilon, 8.0)
    ]
    assert (noise[1] / noise[0]) ** 2 == pytest.approx(0.4, rel=1e-5)
    alone = recommended_pipeline(schools())
    assert alone.left_for_steps(description.request) is description.request


def test_a_classifier_clips_each_example_and_says_how_many_are_drawn():
    description = texts()
    found = recommended_pipeline(description)
    table = {
        "version": 1,
        "epsilon": 1.0,
        "delta": 1e-5,
        "data": {"type": "Glyphs"},
        "step": {"privacy_unit": "example", "neighboring_relation": "zero_out"},
        "learner": {"kind": "protonet", "shots": 5, "distance": "cosine"},
        "evaluation": {"splits": ["test"]},
        "optimizer": {"kind": "adam", "learning_rate": 0.001},  # of its episodes
    }
    train = {"learner": {}, "optimizer": {"kind": "adam", "learning_rate": 0.01}}
    description = description._replace(train=train)
    written = found.config(table, description)
    config = TrainingConfig.from_dict(
        {"type": "TrainingConfig", **written}, where="config"
    )
    assert (config.learner.kind, config.learner.shots) == (CLASSES, 5)
    assert config.step.clip_unit == "example" and config.evaluation.ways == 5
    assert config.optimizer.learning_rate == 0.01
    of_class, of_example = config.step.sampling.levels
    assert of_class.sampling_probability == 1.0 and of_example.population == 2_000
    drawn = 36_000 * of_example.sampling_probability
    assert config.normalizer == pytest.approx(drawn, rel=1e-3)


def test_all_that_was_weighed_is_said():
    found = recommended_pipeline(texts(classes=20, examples=6))
    assert found.name == NONE and found.learner == "plda"
    assert all(ratio < least for ratio, least in found.weighed.values())
    lines = found.comparison()
    assert len(lines) == len(found.weighed) == 4
    assert all("of at least" in line for line in lines)


def test_a_level_of_another_name_has_no_episodes():
    description = asked(shape=(64,), train={"learner": {}})
    tree = jde.Population.from_sizes([20] * 1_800, level_names=("sort", "example"))
    found = recommended_pipeline(description._replace(population=tree))
    assert found.name == "statistics" and "called 'class'" in found.reason


@pytest.mark.parametrize("description", [asked(), asked(classes=100), schools()])
def test_the_config_can_be_trained(description):
    found = recommended_pipeline(description)
    sampling = {"type": "MultistageSampling", "levels": []}
    for name in description.population.level_names:
        level = {"type": "Poisson", "name": name, "sampling_probability": 1.0}
        sampling["levels"].append(level)
    table = {
        **TRAIN,
        "version": 1,
        "epsilon": 1.0,
        "delta": 1e-5,
        "num_steps": 30,
        "data": {"type": "Glyphs"},
        "step": {"sampling": sampling, "clip_unit": "step", "privacy_unit": None},
        "learner": {"shots": 1, **TRAIN["learner"]},
    }
    config = TrainingConfig.from_dict(
        {"type": "TrainingConfig", **found.config(table, description)}, where="config"
    )
    assert config.start.kind == found.start["kind"]
    assert config.learner.kind == (found.learner or "protonet")


def test_nothing_is_recommended_where_the_file_has_chosen():
    assert recommended_pipeline(asked(train={"start": {"kind": "mean"}})) is None
    assert recommended_pipeline(asked()._replace(train=None)) is None
    assert recommended_pipeline(asked(privacy_unit="step")) is None


@pytest.mark.slow
def test_the_shipped_plan_of_features():
    description = read_plan(ROOT / "configs" / "plan_features.toml")
    assert description.feature_shape == (28, 28, 1)
    found = recommended_pipeline(description)
    assert found.name == "statistics, then steps"
    assert np.isfinite(found.ratio)
