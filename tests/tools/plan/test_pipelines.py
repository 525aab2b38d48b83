"""Which pipeline is recommended, for which sizes, and what is then written."""

import dataclasses
import math
import re

import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.tools.plan.pipelines import (
    BOTH,
    MEASURED,
    NONE,
    NUMBERS,
    PICTURES,
    STATISTICS,
    measured_gains,
    recommended_pipeline,
)
from jaxdp_episodic.tools.plan.question import (
    Compute,
    EpisodeShape,
    PlanDescription,
    PlanRequest,
)
from pages import ROOT

TRAIN = {
    "features": {"kind": "wavelets"},
    "l2_clip_norm": 0.1,
    "learner": {"kind": "protonet"},
    "model": {"kind": "linear"},
}


def asked(
    classes=1_800, examples=20, epsilon=8.0, shape=(28, 28), train=None, **changes
):
    """A plan of glyphs, or of what is given in their place, each class in an episode.

    As experiments/kinds_of_data.py asks it.
    """
    ways, shots = min(5, classes), 5 if shape == (512,) else 1
    request = PlanRequest(
        epsilon=epsilon,
        delta=1e-5,
        episode=EpisodeShape(
            shots=shots, examples=(2 * shots,), ways=ways, population=examples
        ),
        compute=Compute(
            episodes_per_step=classes // ways, total_episodes=300 * (classes // ways)
        ),
        neighboring_relation="zero_out",
    )
    tree = jde.Population.from_sizes(
        [examples] * classes, level_names=("class", "example")
    )
    request = dataclasses.replace(request, **changes)
    if train is None:
        train = TRAIN if len(shape) > 1 else {"learner": {}}
    return PlanDescription(request, tree, train, {}, shape)


def texts(**changes):
    """Short texts as 512 hashed n-grams."""
    given = {"classes": 18, "examples": 2_000, "epsilon": 1.0, "shape": (512,)}
    return asked(**given | changes)


def schools(number=1_676):
    tree = jde.Population.from_sizes([13] * number, level_names=("school", "pupil"))
    description = asked(
        epsilon=1.0,
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
        (asked(compute=Compute(episodes_per_step=9, total_episodes=99)), "statistics"),
        (asked(train={"learner": {}}), "steps"),  # images without fixed features
        (asked(shape=(64,)), "statistics, then steps"),
        (texts(privacy_unit="class", epsilon=0.5), "do not train"),
        (texts(classes=5, examples=170), "statistics"),
        (texts(classes=4, examples=6), "do not train"),
        (schools(), "mixed model"),
        (schools(number=20), "steps"),
    ],
)
def test_the_recommendation_depends_on_the_sizes(description, name):
    found = recommended_pipeline(description)
    assert found.name == name and found.reason
    if found.name == NONE:  # the reason lists what was considered
        for ratio, least in found.weighed.values():
            assert ratio < least
            assert f"{ratio:.2g} ({least:g} is needed)" in found.reason


@pytest.mark.parametrize(
    ("sizes", "gains"),
    [
        # What statistics, and statistics and steps, had on untrained features: rows of
        # docs/plan.md, test classes; standard errors are 0.001 to 0.005.
        ((33, 6, 0.1), None),  # 0.006 worse
        ((33, 6, 0.3), (0.006, None)),
        ((300, 4, 1.0), (0.041, 0.014)),
        ((300, 4, 8.0), (0.100, 0.114)),
        ((1200, 4, 8.0), (0.147, 0.148)),
        ((5, 170, 8.0), (0.031, 0.024)),
        ((12, 500, 8.0), (0.274, 0.257)),
        ((18, 600, 1.0, (512,)), (0.016, 0.008)),
    ],
)
def test_the_best_that_was_measured_is_recommended(sizes, gains):
    found = recommended_pipeline(asked(*sizes))
    if gains is None:
        assert found.name == NONE
        return
    gained = dict(zip((STATISTICS, BOTH), gains, strict=True))[found.name]
    assert gained >= max(g for g in gains if g is not None) - 0.004


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        (texts(classes=4), "means"),
        (texts(classes=3), None),
        (texts(classes=31), None),
        (texts()._replace(feature_shape=(17,)), None),  # fewer features than classes
        # The number of classes is private, and the sums would reveal it.
        (texts(neighboring_relation="add_remove"), None),
        (
            texts(neighboring_relation="add_remove")._replace(has_public_units=True),
            "means",
        ),
        (asked(), None),  # steps follow
    ],
)
def test_class_means_are_recommended_for_enough_classes(description, expected):
    found = recommended_pipeline(description)
    assert found.start.get("between") == expected
    assert (found.learner == "plda") or expected is None


def test_the_signal_to_noise_ratio_is_its_definition():
    found = recommended_pipeline(asked(epsilon=1.0))
    plain = jde.GaussianStep(
        jde.Poisson("one", sampling_probability=1.0), noise_multiplier=1.0
    )
    noise = jde.calibrate_noise_multiplier(plain, epsilon=1.0, delta=1e-5, num_steps=1)
    noise /= math.sqrt(0.6 * 0.28)
    expected = 1_800 * 20 / (noise * math.sqrt(2 * 425))
    assert found.ratio == pytest.approx(expected, rel=1e-6)
    # A class or an example: each is one contribution.
    found = [recommended_pipeline(asked(c, n)) for c, n in ((10, 60), (60, 10))]
    assert found[0].ratio == pytest.approx(found[1].ratio)
    of_classes = recommended_pipeline(asked(privacy_unit="class", epsilon=1.0))
    assert of_classes.ratio == pytest.approx(expected / 20, rel=1e-6)


def test_people_not_examples_are_counted():
    """41 people gained nothing at epsilon 1, 0.005 at 8; 3,600 gained 0.06 and 0.15."""
    bounds = jde.PersonBounds(examples=1, classes=900)
    of_people = asked(
        privacy_unit="person", people=bounds, neighboring_relation="add_remove"
    )
    names = {}
    for number in (41, 3_600):
        for epsilon in (1.0, 8.0):
            request = dataclasses.replace(of_people.request, epsilon=epsilon)
            asked_of = of_people._replace(request=request, people=number)
            found = recommended_pipeline(asked_of)
            names[number, epsilon] = found.name
            assert f"{number:,} contributions (person)" in found.reason
    assert names[41, 1.0] == NONE and names[41, 8.0] == STATISTICS
    assert {names[3_600, 1.0], names[3_600, 8.0]} == {STATISTICS}
    # Without a count of people, the least number that the bounds allow.
    found = recommended_pipeline(of_people)
    assert "40 contributions (person)" in found.reason
    # Or the length of their public list, if the data name no owners.
    found = recommended_pipeline(
        asked(privacy_unit="person", num_people=77, neighboring_relation="zero_out")
    )
    assert "77 contributions (person)" in found.reason


def test_steps_get_the_epsilon_that_statistics_leave():
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


def test_a_choice_in_the_file_is_kept():
    assert not recommended_pipeline(asked(train={"start": {"kind": "mean"}})).name
    assert not recommended_pipeline(asked()._replace(train=None)).name
    assert not recommended_pipeline(asked(privacy_unit="step")).name


# --- Published gains of data sets of the same kind ---


@pytest.mark.parametrize("one", MEASURED, ids=lambda one: one.name)
def test_the_table_equals_the_docs(one):
    """The page has three digits of each gain."""
    page = (ROOT / "docs" / "accuracy.md").read_text()
    (row,) = re.findall(rf"^\| {one.name} \|.*$", page, re.MULTILINE)
    said = [float(gain) for gain in re.findall(r"\| ([+-][\d.]+) ±", row)]
    assert said == pytest.approx(one.gains, rel=0, abs=5.0001e-4)


def test_data_sets_of_the_same_kind_and_size_are_named():
    said = measured_gains(PICTURES, (6, 700, 425), 1.0)
    assert "data like these (digits, typefaces) gained accuracy" in said
    said = measured_gains(PICTURES, (1_300, 4, 425), 4.0)
    assert "0.01 to 0.08 at epsilon 1, 0.01 to 0.14 at epsilon 8 (docs/" in said
    assert "(docs/accuracy.md; epsilon 4 was not measured)" in said
    said = measured_gains(NUMBERS, (10, 4, 512), 1.0)
    assert "no data of this kind and size were measured" in said
