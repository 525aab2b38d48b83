"""Many requests at once: each row gets what it would get alone."""

import math

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.tools.requests.batch import (
    answer_requests,
    unit_budgets,
    write_unit_budgets,
)
from jaxdp_episodic.tools.requests.request import CalibrationRequest, EpsilonRequest

POOL = {
    "type": "GroupedClasses",
    "num_classes": 100,
    "ways": 5,
    "episodes": {"type": "Poisson", "name": "episode", "sampling_probability": 0.2},
    "examples": {
        "type": "WithoutReplacement",
        "name": "example",
        "size": 4,
        "population": 20,
    },
}


def flat(rate=0.1, noise=2.0, **fields):
    return {
        "step": {
            "type": "GaussianStep",
            "noise_multiplier": noise,
            "sampling": {
                "type": "Poisson",
                "name": "user",
                "sampling_probability": rate,
            },
        },
        "num_steps": 100,
        "delta": 1e-5,
        **fields,
    }


def pool(noise=2.0, **fields):
    step = {"type": "GaussianStep", "noise_multiplier": noise, "sampling": POOL}
    return {"step": step, "num_steps": 50, "delta": 1e-6, **fields}


def alone(row):
    kind = CalibrationRequest if "calibrate" in row else EpsilonRequest
    fields = {k: v for k, v in row.items() if k != "id"}
    mapping = {"version": 1, "type": kind.__name__, "method": "rdp", **fields}
    return float(kind.from_dict(mapping).answer())


def test_mixed_rows_equal_single_requests_in_order():
    rows = [
        flat(rate=rate, noise=noise, id=f"{rate} {noise}")
        for rate in (0.01, 0.1)
        for noise in (1.0, 2, 3.5)
    ]
    rows[1:1] = [pool(), pool(noise=1), pool(num_steps=7)]
    rows += [
        {**flat(), "delta": None, "epsilon": 1.0},
        {**flat(), "calibrate": "noise_multiplier", "epsilon": 2.0},
        {**flat(), "calibrate": "num_steps", "epsilon": 2.0, "num_steps": None},
    ]
    answers = answer_requests(rows)
    assert [a.error for a in answers] == [None] * len(rows)
    assert [a.id for a in answers] == [row.get("id") for row in rows]
    assert answers[-1].quantity == "num_steps" and answers[-3].quantity == "delta"
    for row, answer in zip(rows, answers, strict=True):
        clean = {k: v for k, v in row.items() if v is not None}
        assert answer.value == pytest.approx(alone(clean), rel=1e-9)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (flat(noise=-1), "noise_multiplier must be >= 0, got -1"),
        (flat(noise=math.nan), "NaN"),
        (flat(rate=1.5), r"sampling_probability must lie in [0, 1], got 1.5"),
        (flat(delta=0), "delta must lie in (0, 1)"),
        (flat(num_steps=2.5), "num_steps"),
        (flat(num_steps=2**70), "64 bits"),
        (flat(num_steps=[1, 2]), "one setting"),
        (flat(noise="2"), "noise_multiplier"),
        (flat(noise=True), "noise_multiplier"),
        (flat(delta=None), "delta"),
        (flat(speed=3), "unknown key 'speed'"),
        (flat(method="rpd"), "did you mean 'rdp'"),
        (flat(version=2), "version must be 1"),
        ({}, "step"),
        ([1], "a row must be a table"),
        (ValueError("line 7: broken"), "line 7: broken"),
        (flat(population={"sizes": "x"}), "population"),
    ],
)
def test_a_bad_row_leaves_the_others_unchanged(row, words):
    rows = [flat(), row, pool(), flat(rate=0.2)]
    first, bad, *rest = answer_requests(rows)
    assert words in bad.error and bad.value is None and bad.quantity is None
    assert [a.error for a in (first, *rest)] == [None] * 3
    assert first.value == pytest.approx(alone(flat()), rel=1e-9)


def test_many_bad_rows_among_many():
    noises = np.where(np.arange(60) % 7 == 3, -1.0, 1 + np.arange(60) / 60)
    answers = answer_requests([flat(noise=float(noise)) for noise in noises])
    assert [a.error is not None for a in answers] == (noises < 0).tolist()
    good = noises > 0
    step = jde.GaussianStep(
        jde.Poisson("user", sampling_probability=0.1), noise_multiplier=noises[good]
    )
    np.testing.assert_allclose(
        [a.value for a in answers if a.error is None],
        jde.epsilon(step, num_steps=100, delta=1e-5, method="rdp"),
        rtol=1e-9,
    )


def test_infinite_and_zero_answers():
    bare, idle = answer_requests([flat(noise=0.0), flat(num_steps=0)])
    assert bare.value == math.inf and idle.value == 0


def schools_row(noise):
    return {
        "step": {
            "type": "GaussianStep",
            "noise_multiplier": noise,
            "clip_unit": "school",
            "privacy_unit": "pupil",
            "sampling": {
                "type": "MultistageSampling",
                "levels": [
                    {
                        "type": "Poisson",
                        "name": "school",
                        "sampling_probability": 0.05,
                    },
                    {"type": "WithoutReplacement", "name": "pupil", "size": 8},
                ],
            },
        },
        "num_steps": 100,
        "delta": 1e-5,
        "population": {"levels": ["school", "pupil"], "sizes": [25, 60, 220]},
    }


def schools_step(noise=2.0, privacy_unit="pupil"):
    sizes = jde.Population.from_sizes([25, 60, 220], level_names=("school", "pupil"))
    return jde.GaussianStep(
        jde.MultistageSampling(
            jde.Poisson("school", sampling_probability=0.05),
            jde.WithoutReplacement("pupil", size=8),
        ),
        noise_multiplier=noise,
        clip_unit="school",
        privacy_unit=privacy_unit,
        population=sizes,
    )


def test_rows_with_a_population():
    answers = answer_requests([schools_row(noise) for noise in (1.0, 2.0)])
    expected = jde.epsilon(
        schools_step(np.array([1.0, 2.0])), num_steps=100, delta=1e-5, method="rdp"
    )
    np.testing.assert_allclose([a.value for a in answers], expected, rtol=1e-9)


def test_composed_rows():
    part = flat()["step"]
    row = {
        "step": {"type": "ComposedSteps", "steps": [part, part], "counts": [60, 40]},
        "delta": 1e-5,
    }
    other = {**row, "step": {**row["step"], "counts": [50, 70]}}
    first, second = answer_requests([row, other])
    assert first.error is None
    assert first.value == pytest.approx(alone(flat()), rel=1e-6)
    assert second.value > first.value


def test_unknown_method_of_all_rows():
    with pytest.raises(ValueError, match="method"):
        answer_requests([], method="gdp")


def test_each_units_own_budget(tmp_path):
    run = {"num_steps": 100, "delta": 1e-5, "method": "rdp"}
    pupils = unit_budgets(schools_step(), **run)
    assert list(pupils.units) == ["school", "pupil"]
    assert pupils.epsilon.shape == (305,)
    assert np.bincount(pupils.units["school"]).tolist() == [25, 60, 220]
    assert pupils.epsilon.max() == pytest.approx(jde.epsilon(schools_step(), **run))
    assert pupils.epsilon[0] > pupils.epsilon[30] > pupils.epsilon[-1]
    schools = unit_budgets(schools_step(privacy_unit="school"), **run)
    assert list(schools.units) == ["school"] and schools.epsilon.shape == (3,)
    path = tmp_path / "units.csv"
    write_unit_budgets(path, schools)
    lines = path.read_text().splitlines()
    assert lines[0] == "school,epsilon" and len(lines) == 4
    assert float(lines[1].split(",")[1]) == schools.epsilon[0]


def test_unit_budgets_carry_ids_of_grouped_classes():
    ids = np.repeat(["a", "b", "c"], [3, 4, 9])
    tree = jde.Population.from_ids(**{"class": ids, "example": None})
    step = jde.GaussianStep(
        jde.GroupedClasses(
            num_classes=3,
            ways=2,
            episodes=jde.Poisson("episode", sampling_probability=0.2),
            examples=jde.WithoutReplacement("example", size=2),
        ),
        noise_multiplier=2.0,
        population=tree,
    )
    table = unit_budgets(step, num_steps=10, delta=1e-5, method="rdp")
    assert table.units["class"].tolist() == ids.tolist()
    assert table.epsilon.shape == (16,)


def test_unit_budgets_need_a_population():
    step = jde.GaussianStep(
        jde.Poisson("user", sampling_probability=0.1), noise_multiplier=1.0
    )
    with pytest.raises(ValueError, match="Population"):
        unit_budgets(step, num_steps=1, delta=1e-5)
