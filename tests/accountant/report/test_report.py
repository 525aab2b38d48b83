"""The report: every level, all units, the worst path, warnings."""

import dataclasses
import functools
import json
import re

import numpy as np
import pytest

import jaxdp_episodic as jde
from designs import grouped
from jaxdp_episodic.accountant.report import report as report_module, sentences
from jaxdp_episodic.accountant.report.report import privacy_report

# These tests are about the Rényi bounds.
rdp_epsilon = functools.partial(jde.epsilon, method="rdp")
rdp_report = functools.partial(privacy_report, method="rdp")

DELTA = 1e-7
TREE = jde.Population.from_sizes(
    [[40, 12, 7], [100, 3], [55, 60, 12, 61]], level_names=["school", "class", "pupil"]
)
SAMPLING = jde.MultistageSampling(
    jde.Poisson("school", sampling_probability=0.05),
    jde.WithoutReplacement("class", size=2),
    jde.WithoutReplacement("pupil", size=3),
)


def school_step(clip_unit="school", population=TREE, **fields):
    fields = {"noise_multiplier": 1.0, **fields}
    return jde.GaussianStep(
        SAMPLING, clip_unit=clip_unit, population=population, **fields
    )


def epsilon_alone(step, sizes, num_steps):
    """Epsilon of a unit whose path has these sizes, without a tree."""
    levels = [
        dataclasses.replace(level, population=size)
        if isinstance(level, jde.WithoutReplacement)
        else level
        for level, size in zip(step.sampling.levels, sizes, strict=True)
    ]
    sampling = jde.MultistageSampling(*levels)
    alone = dataclasses.replace(step, sampling=sampling, population=None)
    return rdp_epsilon(alone, num_steps=num_steps, delta=DELTA)


def one_level(scheme, **fields):
    return jde.GaussianStep(
        jde.MultistageSampling(scheme), **{"noise_multiplier": 1.0, **fields}
    )


@pytest.mark.parametrize(
    ("clip_unit", "relation"),
    [("school", "replace_one"), ("class", "add_remove"), ("step", "add_remove")],
)
def test_epsilon_is_that_of_epsilon_at_every_level(clip_unit, relation):
    step = school_step(clip_unit, neighboring_relation=relation, small_units="keep")
    report = rdp_report(step, num_steps=100, delta=DELTA)
    assert list(report.epsilon_by_level) == ["school", "class", "pupil"]
    for level, value in report.epsilon_by_level.items():
        changed = dataclasses.replace(step, privacy_unit=level)
        expected = rdp_epsilon(changed, num_steps=100, delta=DELTA)
        assert value == pytest.approx(expected, rel=1e-6)
    assert report.epsilon == report.epsilon_by_level["pupil"]
    assert report.worst_path.epsilon == report.epsilon
    assert (report.privacy_unit, report.clip_units) == ("pupil", (clip_unit,))
    assert (report.num_steps, report.noise_multipliers) == ((100,), (1.0,))


def test_a_level_without_a_theorem_has_a_reason():
    sampling = jde.MultistageSampling(
        jde.Poisson("user", sampling_probability=0.1),
        jde.Poisson("photo", sampling_probability=0.5),
    )
    step = jde.GaussianStep(sampling, noise_multiplier=2.0, clip_unit="photo")
    few = jde.PersonBounds(examples=3)
    for report, level, said in (
        (rdp_report(step, num_steps=10, delta=DELTA), "user", "public upper bound"),
        (
            rdp_report(people_step(), num_steps=1, delta=1e-5, people=few),
            *("person", "bound on classes"),
        ),
    ):
        reason = report.epsilon_by_level[level]
        assert isinstance(reason, str) and said in reason
        assert report.to_dict()["epsilon_by_level"][level] == {"not_covered": reason}
        assert "not covered" in str(report)
    assert any("there is none for a person" in text for text in report.warnings)


def test_reports_of_episodes():
    examples = jde.WithoutReplacement("example", size=4, population=20)
    step = grouped(1.0, 0.1, examples)
    report = rdp_report(step, num_steps=10, delta=DELTA)
    # Episodes are no privacy unit.
    assert list(report.epsilon_by_level) == ["class", "example"]
    assert float(report.epsilon_by_level["class"]) > report.epsilon
    assert report.distribution is None
    assert report.worst_path.units is None and report.worst_path.num_units is None
    assert report.worst_path.rates == ({"episode": 0.1, "class": 1.0, "example": 0.2},)
    assert any("partition" in text for text in report.preconditions)
    # Independent episodes include a unit once or more.
    design = jde.IndependentEpisodes(
        jde.WithoutReplacement("class", size=1, population=4), num_episodes=3
    )
    step = jde.GaussianStep(design, noise_multiplier=1.0)
    report = rdp_report(step, num_steps=1, delta=DELTA)
    assert report.worst_path.inclusion_rate == pytest.approx(1 - 0.75**3, rel=1e-12)
    assert list(report.epsilon_by_level) == ["class"]


@pytest.mark.parametrize("clip_unit", ["school", "class"])
def test_each_unit_has_the_epsilon_of_its_own_path(clip_unit):
    step = school_step(clip_unit)
    report = rdp_report(step, num_steps=100, delta=DELTA, per_unit=True)
    schools = [[40, 12, 7], [100, 3], [55, 60, 12, 61]]
    expected = np.concatenate(
        [
            np.full(pupils, epsilon_alone(step, (3, len(school), pupils), 100))
            for school in schools
            for pupils in school
        ]
    )
    over_units = report.distribution
    np.testing.assert_allclose(over_units.unit_epsilons, expected, rtol=1e-6, atol=0)
    assert (over_units.num_units, over_units.num_paths) == (expected.size, 9)
    assert over_units.rate_rounding == 0
    quantiles = over_units.epsilon_quantiles
    assert list(quantiles) == ["min", "5%", "25%", "50%", "75%", "95%", "max"]
    for name, value in quantiles.items():
        percent = float(name.strip("%").replace("min", "0").replace("max", "100"))
        inverse = np.percentile(expected, percent, method="inverted_cdf")
        assert value == pytest.approx(inverse, rel=1e-6)


def test_the_worst_path_is_named_by_ids_and_rates_are_weighted_by_units():
    sampling = jde.MultistageSampling(
        jde.WithoutReplacement("class", size=1), jde.WithoutReplacement("pupil", size=1)
    )
    tree = jde.Population.from_ids(**{"class": ["b"] * 99 + ["a"], "pupil": None})
    step = jde.GaussianStep(
        sampling, noise_multiplier=1.0, clip_unit="class", population=tree
    )
    report = rdp_report(step, num_steps=1, delta=DELTA)
    rates = report.distribution.inclusion_rate_quantiles
    assert (rates["95%"], rates["max"]) == (1 / 198, 0.5)
    assert report.worst_path.units["class"] == "a"
    json.dumps(dict(report.worst_path.units))


def of_tree(sizes, **names):
    tree = jde.Population.from_sizes(sizes, **names)
    step = school_step(population=tree)
    return rdp_report(step, num_steps=10, delta=DELTA, per_unit=True)


def test_of_equal_worst_paths_a_nonempty_one_is_named():
    # A pupil alone in a class, and an empty class that a pupil may join.
    worst = of_tree([[0, 1, 3]], level_names=["school", "class"]).worst_path
    # Three pupils are drawn with certainty, like a single one.
    assert worst.units == {"school": 0, "class": 2, "pupil": 1}
    assert worst.num_units == 3


def test_units_that_may_join_count_for_the_worst_path_only():
    report = of_tree([[40, 12], [], [50]], level_names=["school"])
    assert report.worst_path.units == {"school": 1}
    assert report.worst_path.num_units == 0
    found = report.distribution
    assert (found.num_units, found.num_paths) == (102, 4)
    assert found.epsilon_quantiles["max"] == found.unit_epsilons.max() < report.epsilon
    assert "school 1 (empty now)" in str(report)
    # Nobody is there yet.
    report = of_tree([[0], []])
    assert report.distribution.num_units == 0
    assert report.distribution.epsilon_quantiles == {}
    assert 0 < report.epsilon < np.inf
    json.dumps(report.to_dict(), allow_nan=False)
    assert "distinct paths" not in str(report)


@pytest.mark.parametrize("clip_unit", ["school", "pupil"])
def test_rounded_rates_err_slightly_upwards(clip_unit, monkeypatch):
    rng = np.random.default_rng(3)
    sizes = [
        rng.integers(20, 900, size=rng.integers(5, 40)).tolist() for _ in range(12)
    ]
    step = school_step(clip_unit, population=jde.Population.from_sizes(sizes))
    ask = {"num_steps": 100, "delta": 1e-9, "per_unit": True}
    exact = rdp_report(step, **ask)
    monkeypatch.setattr(report_module, "_MAX_PATHS", 60)
    monkeypatch.setattr(report_module, "_NOT_COMPILED", 7)  # several blocks
    rounded = rdp_report(step, **ask)
    assert rounded.epsilon == exact.epsilon
    share = rounded.distribution.rate_rounding
    assert exact.distribution.rate_rounding == 0 < share < 1
    ratio = rounded.distribution.unit_epsilons / exact.distribution.unit_epsilons
    assert ratio.min() >= 1 - 1e-7
    # Two rates are rounded, and epsilon grows at most like their product here.
    assert 1 < ratio.max() <= (1 + share) ** 2
    assert rounded.distribution.unit_epsilons.max() <= rounded.epsilon
    assert "rounded up" in str(rounded) and "rounded up" not in str(exact)


def test_a_composed_run_has_one_worst_path():
    # The first step alone is worst for one class, the second for the other.
    tree = jde.Population.from_sizes([10, 50], level_names=["class"])
    steps = [
        jde.GaussianStep(
            jde.MultistageSampling(
                jde.Poisson("class", sampling_probability=0.1), scheme
            ),
            noise_multiplier=noise,
            clip_unit="class",
            population=tree,
        )
        for scheme, noise in (
            (jde.WithoutReplacement("pupil", size=2), 1.0),
            (jde.Poisson("pupil", sampling_probability=0.3), 2.0),
        )
    ]
    run = jde.compose((steps[0], 100), (steps[1], 300))
    report = rdp_report(run, delta=DELTA, per_unit=True)
    assert report.epsilon == pytest.approx(rdp_epsilon(run, delta=DELTA), rel=1e-6)
    assert report.num_steps == (100, 300)
    assert report.noise_multipliers == (1.0, 2.0)
    worst = report.worst_path
    assert report.worst_path.units["class"] == 0
    assert worst.rates == ({"class": 0.1, "pupil": 0.2}, {"class": 0.1, "pupil": 0.3})
    assert worst.inclusion_rate == pytest.approx(0.1 * (0.2 + 3 * 0.3) / 4, rel=1e-12)
    assert report.distribution.unit_epsilons.shape == (60,)
    assert len(set(report.distribution.unit_epsilons)) == 2


# --- Warnings, text, dictionary ---


def people_step(relation="zero_out", **options):
    """A person with an example in each of 12 classes; a class is clipped."""
    design = jde.MultistageSampling(
        jde.Poisson("class", sampling_probability=0.1),
        jde.WithoutReplacement("example", size=2, population=20),
    )
    options = {"noise_multiplier": 4.0, "clip_unit": "class", **options}
    return jde.GaussianStep(design, neighboring_relation=relation, **options)


PEOPLE = jde.PersonBounds(classes=12, examples=1)


def warnings_about(report, word):
    return [text for text in report.warnings if word in text]


def of_five(size):
    return one_level(jde.WithoutReplacement("pupil", size=size, population=5))


of_sizes = jde.Population.from_sizes
CLASSES = of_sizes([4] * 12, level_names=("class", "example"))
IN_CLASSES = people_step(
    "add_remove", privacy_unit="person", people=PEOPLE, population=CLASSES
)
SECRET = "must not be published"
# A word of one warning, the step or its fields, and what the warning says; None:
# nobody is warned.
WARNINGS = [
    ("rate 1", of_five(8), "'pupil'"),
    (
        "rate 1",
        {"population": of_sizes([[40, 5], [5]])},
        "'class'.*on the paths of 1 of 3 'class' units",
    ),
    ("rate 1", {"population": of_sizes([[40, 5], [0, 9]])}, "'pupil'.*units that join"),
    ("rate 1", jde.compose((of_five(2), 1), (of_five(8), 1)), "^step 2: "),
    ("a single 'pupil'", {}, "'school' or 'class'"),
    ("a single", {"privacy_unit": "school"}, None),
    (SECRET, {}, ""),
    (SECRET, {"neighboring_relation": "replace_one"}, None),
    (SECRET, {"privacy_unit": "school"}, None),  # their number affects no rate
    ("number of 'example' units", IN_CLASSES, ""),
]


@pytest.mark.parametrize(("word", "step", "said"), WARNINGS, ids=range(len(WARNINGS)))
def test_warnings(word, step, said):
    step = school_step(**step) if isinstance(step, dict) else step
    steps = {} if isinstance(step, jde.ComposedSteps) else {"num_steps": 1}
    found = warnings_about(rdp_report(step, **steps, delta=DELTA), word)
    assert len(found) == (said is not None)
    assert all(re.search(said, text) for text in found)


def test_a_delta_without_protection_is_warned_of():
    report = rdp_report(school_step(), num_steps=1, delta=0.01)
    (text,) = warnings_about(report, "publishing")
    assert "350 units" in text and "'pupil'" in text
    report = rdp_report(school_step(), num_steps=1, delta=0.2)
    assert len(warnings_about(report, "publishing")) == 2  # 9 classes, too


def test_missing_noise():
    step, run = school_step(noise_multiplier=0.0), {"num_steps": 1, "delta": DELTA}
    report = rdp_report(step, **run, per_unit=True)
    assert report.epsilon == np.inf and "inf at delta" in str(report)
    assert warnings_about(report, "noise_multiplier is 0")
    assert len(warnings_about(report, "infinite")) == 3
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert document["epsilon_by_level"]["pupil"] == {"epsilon": "inf"}
    assert document["distribution"]["epsilon_quantiles"]["max"] == "inf"
    assert np.isposinf(report.distribution.unit_epsilons).all()


def test_text_and_dictionary():
    report = rdp_report(school_step(), num_steps=100, delta=DELTA, per_unit=True)
    line = next(row for row in str(report).splitlines() if "at delta" in row)
    printed = float(line.split()[1])
    assert report.epsilon <= printed <= report.epsilon * (1 + 1e-4)  # rounded up
    assert max(map(len, str(report).splitlines())) <= 88
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (document["version"], document["type"]) == (1, "PrivacyReport")
    assert (document["epsilon"], document["num_steps"]) == (report.epsilon, [100])
    assert document["worst_path"]["rates"] == [dict(report.worst_path.rates[0])]
    assert len(document["distribution"]["unit_epsilons"]) == 350
    assert document["preconditions"] == list(report.preconditions)


def test_nothing_drawn_or_no_step_costs_nothing():
    assert rdp_report(school_step(), num_steps=0, delta=DELTA).epsilon == 0
    nobody = jde.Poisson("pupil", sampling_probability=0.0)
    report = rdp_report(
        one_level(nobody, noise_multiplier=0.0), num_steps=10, delta=DELTA
    )
    assert report.to_dict()["epsilon_by_level"] == {"pupil": {"epsilon": 0.0}}


@pytest.mark.parametrize(
    "step, change, words",
    [
        ("step", {}, "step must be a GaussianStep"),
        (school_step(), {"num_steps": None}, "num_steps"),
        (school_step(), {"num_steps": [1, 2]}, "must be scalars"),
        (school_step(), {"delta": 1.0}, "delta"),
        (school_step(), {"delta": [1e-5]}, "delta must be one number"),
        (school_step(), {"per_unit": 1}, "per_unit"),
        (school_step(noise_multiplier=np.array([1.0, 2.0])), {}, "must be scalars"),
        (
            one_level(jde.Poisson("pupil", sampling_probability=0.1)),
            {"per_unit": True},
            "needs a step with a Population",
        ),
        (
            jde.compose((school_step(), 1)),
            {},
            "num_steps must be None.* is the run twice",
        ),
        (
            people_step(privacy_unit="person", people=PEOPLE),
            {"people": PEOPLE},
            "its own",
        ),
        (people_step(), {"people": {"classes": 3}}, "PersonBounds"),
        (people_step(), {"people": jde.PersonBounds(classes=[1, 2])}, "one setting"),
    ],
)
def test_wrong_arguments_are_refused(step, change, words):
    with pytest.raises((TypeError, ValueError), match=words):
        rdp_report(step, **{"num_steps": 1, "delta": DELTA, **change})


def test_shuffled_epochs_are_compared_with_bins_and_poisson(monkeypatch):
    asked = {}

    def noted(step, **run):
        asked[type(step.design.levels[0])] = step, run
        return 0.25 * len(asked)

    monkeypatch.setattr(sentences, "epsilon", noted)
    shuffled = one_level(jde.ShuffledEpochs("user", steps_per_epoch=20))
    bins = one_level(jde.RandomAllocation("user", steps_per_epoch=20))
    coins = one_level(jde.Poisson("user", sampling_probability=1 / 20))
    run = {"num_steps": 40, "delta": 1e-5}
    said = rdp_report(shuffled, **run)
    (text,) = [text for text in said.warnings if "no amplification is known" in text]
    assert "0.25 by random allocation" in text and "0.5 by Poisson sampling" in text
    assert asked == {jde.RandomAllocation: (bins, run), jde.Poisson: (coins, run)}
    assert "Fresh epochs" in "".join(said.preconditions)
    conditions = sentences.preconditions_of(jde.compose((bins, 40)))
    found = {text.partition(":")[0] for text in conditions}
    assert {"Fresh epochs", "Sums"} <= found and "Fresh samples" not in found


def test_a_report_of_examples_has_a_persons_epsilon():
    asked = {"num_steps": 30, "delta": 1e-5, "method": "rdp"}
    report = jde.privacy_report(people_step(), people=PEOPLE, **asked)
    whole = jde.privacy_report(
        people_step(privacy_unit="person", people=PEOPLE), **asked
    )
    assert list(report.epsilon_by_level) == ["person", "class", "example"]
    assert report.epsilon == report.epsilon_by_level["example"]
    person = report.epsilon_by_level["person"]
    assert report.epsilon < report.epsilon_by_level["class"] < person
    assert person == whole.epsilon == whole.epsilon_by_level["person"]
    assert whole.epsilon_by_level == report.epsilon_by_level
    (told,) = [text for text in report.warnings if "person" in text]
    assert "all examples, in at most 12 classes, at most 1 in each" in told
    assert not any("a single" in text for text in whole.warnings)
    assert whole.worst_path is None and whole.distribution is None
    assert "one person, all examples, in at most 12 classes" in str(whole)
    assert whole.to_dict()["worst_path"] is None
    for text, expected in (("Bounds of people", (1, 0)), ("One path", (0, 1))):
        both = (whole.preconditions, report.preconditions)
        assert tuple(sum(text in one for one in of) for of in both) == expected


def test_a_report_of_blocks_says_that_a_smaller_chance_rests_on_bounds():
    def told(people, sampling):
        blocks = jde.PeopleBlocks(
            num_people=20,
            people_per_block=2,
            episodes=jde.Poisson("episode", sampling_probability=0.8),
            sampling=sampling,
        )
        step = jde.GaussianStep(blocks, noise_multiplier=9.0, people=people)
        report = rdp_report(step, num_steps=30, delta=1e-5)
        assert report.epsilon_by_level["person"] == report.epsilon
        return " ".join(report.preconditions)

    bare = told(None, None)
    assert "Blocks:" in bare and "Bounds" not in bare
    few = jde.PersonBounds(examples=3)
    slots = told(few, jde.WithoutReplacement("example", size=2, population=20))
    assert "at most 3" in slots and "among public slots" in slots


def test_a_person_with_one_example_is_told():
    one = jde.PersonBounds(examples=1)
    coins = jde.Poisson("contribution", sampling_probability=1.0)
    step = one_level(coins, privacy_unit="person", people=one)
    joined = rdp_report(step, num_steps=1, delta=1e-5)
    assert joined.protected == "one person with all of their examples"
    assert "nobody owns more than one." in " ".join(joined.preconditions)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_conditions_of_draws_are_those_of_runs_that_draw(rate):
    design = jde.MultistageSampling(
        jde.Poisson("class", sampling_probability=1.0),
        jde.Poisson("example", sampling_probability=rate),
    )
    step = jde.GaussianStep(
        design,
        noise_multiplier=4.0,
        clip_unit="example",
        neighboring_relation="zero_out",
    )
    report = rdp_report(step, num_steps=1, delta=1e-5)
    told = " ".join(report.preconditions)
    for word in ("drawn", "draws", "rates", "episode", "support"):
        assert (word in told) <= (rate < 1)
    assert "Slots:" in told and "Locality:" in told and "Public lists:" in told
    assert ("Path with the largest epsilon" in str(report)) == (rate < 1)
