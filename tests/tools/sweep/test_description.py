"""Sweep files: what they mean, and what is refused before any work."""

import itertools

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic import PrivacyInfo
from jaxdp_episodic.tools.requests.request import CalibrationRequest, EpsilonRequest
from jaxdp_episodic.tools.sweep.description import Axis, Grid, description_hash
from jaxdp_episodic.tools.sweep.run import evaluate_chunk
from sweep_runs import axis

HEAD = """
version = 1
method = "rdp"
num_steps = 100
delta = 1e-5
[step]
type = "GaussianStep"
noise_multiplier = 1.5
"""
SCHOOLS = (
    HEAD
    + """
clip_unit = "school"
[step.sampling]
type = "MultistageSampling"
levels = [
  { type = "Poisson", name = "school", sampling_probability = 0.05 },
  { type = "WithoutReplacement", name = "pupil", size = 8, population = 40 },
]
"""
)
SIZE = axis("pupil.size", values=[1, 8, 40])
RATE = axis("school.sampling_probability", values=[0.1, 0.2])
NOISE = axis("noise_multiplier", values=[1.0, 2.0])


def schools(rate, size, noise=1.5, population=None):
    drawn = jde.MultistageSampling(
        jde.Poisson("school", sampling_probability=rate),
        jde.WithoutReplacement(
            "pupil", size=size, population=None if population else 40
        ),
    )
    return jde.GaussianStep(
        drawn, noise_multiplier=noise, clip_unit="school", population=population
    )


def asked(sweep):
    """The request for all settings at once."""
    values = sweep.grid.values(np.arange(sweep.grid.size))
    return sweep.request(sweep.quantities[0], sweep.methods[0], values)


RUN = {"num_steps": 100, "method": "rdp"}


def test_axes_replace_fields_at_any_level(read):
    step = schools([0.1] * 3 + [0.2] * 3, [1, 8, 40] * 2)
    expected = EpsilonRequest(step=step, delta=1e-5, **RUN)
    by_name = read(SCHOOLS + RATE + SIZE)
    assert asked(by_name) == expected
    by_place = SCHOOLS + RATE + SIZE.replace("pupil.", "step.sampling.levels[1].")
    assert read(by_place) == by_name
    left_out = SCHOOLS.replace(", sampling_probability = 0.05", "")
    assert asked(read(left_out + RATE + SIZE)) == expected


def test_populations_are_kept(read):
    text = SCHOOLS.replace(", population = 40", "")
    sizes = '[population]\nlevels = ["school", "pupil"]\nsizes = [25, 60, 220]\n'
    sweep = read(text + sizes + RATE)
    tree = jde.Population.from_sizes([25, 60, 220], level_names=("school", "pupil"))
    step = schools([0.1, 0.2], 8, population=tree)
    assert asked(sweep) == EpsilonRequest(step=step, delta=1e-5, **RUN)
    # Sizes are private like the data: the manifest has only their hash.
    assert "220" not in str(sweep.description())
    assert "sha256" in str(sweep.description())


def test_targets_and_the_other_quantities(read):
    table = '[step.sampling]\ntype = "Poisson"\nname = "example"\n'
    text = HEAD + table + "sampling_probability = 0.01\n"
    drawn = jde.Poisson("example", sampling_probability=0.01)
    step = jde.GaussianStep(drawn, noise_multiplier=1.5)

    delta = text.replace("delta = 1e-5", 'quantity = "delta"')
    sweep = read(delta + axis("epsilon", values=[0.5, 1, 2]))
    assert asked(sweep) == EpsilonRequest(step=step, epsilon=[0.5, 1, 2], **RUN)

    targets = {"step": step, "epsilon": 2.0, "delta": 1e-5, "method": "rdp"}
    noise = text.replace("1e-5", '1e-5\nquantity = "noise_multiplier"\nepsilon = 2.0')
    sweep = read(noise + axis("num_steps", values=[10, 100, 1000]))
    assert asked(sweep) == CalibrationRequest(
        calibrate="noise_multiplier", num_steps=[10, 100, 1000], **targets
    )
    # The calibrated field may be missing.
    assert read(
        noise.replace("noise_multiplier = 1.5", "")
        + axis("example.sampling_probability", values=[0.01])
    )

    steps = text.replace("num_steps = 100", 'quantity = "num_steps"\nepsilon = 2.0')
    sweep = read(steps + NOISE)
    targets["step"] = jde.GaussianStep(drawn, noise_multiplier=[1.0, 2.0])
    assert asked(sweep) == CalibrationRequest(calibrate="num_steps", **targets)


def test_quantity_and_method_as_axes(read, monkeypatch):
    """Every setting is answered by its own quantity and method."""
    monkeypatch.setattr(EpsilonRequest, "answer_with_info", pretended("quantity"))
    monkeypatch.setattr(CalibrationRequest, "answer", pretended("calibrate"))
    text = SCHOOLS.replace("delta = 1e-5", "delta = 1e-5\nepsilon = 2.0")
    text += axis("quantity", values=["epsilon", "noise_multiplier"]) + RATE
    sweep = read(text + axis("method", values=["rdp", "exact"]))
    answers, _ = evaluate_chunk(sweep, 0)
    rates = [0.1, 10.1, 0.2, 10.2]
    assert answers[:, 0].tolist() == rates + [100 + rate for rate in rates]
    # Calibrated values have no error, and are no certified bounds.
    assert np.isnan(answers[:, 1]).tolist() == [False] * 4 + [True] * 4
    assert answers[:, 2].tolist() == [1] * 4 + [0] * 4


def pretended(name):
    def answer(request):
        rate = request.step.sampling.levels[0].sampling_probability
        noise = getattr(request, name) == "noise_multiplier"
        value = rate + 10 * (request.method == "exact") + 100 * noise
        info = PrivacyInfo(np.zeros_like(value), np.ones(value.shape, bool))
        return value if noise else (value, info)

    return answer


def test_composed_runs_and_designs(read):
    part = SCHOOLS.partition("[step]")[2].replace("[step.", "[step.steps.")
    text = 'version = 1\nmethod = "rdp"\ndelta = 1e-5\n[step]\n'
    text += 'type = "ComposedSteps"\ncounts = [10, 20]\n'
    text += ("[[step.steps]]" + part) * 2
    axes = axis("counts[1]", values=[5, 50])
    axes += axis("steps[0].school.sampling_probability", values=[0.1])
    run = jde.compose((schools([0.1, 0.1], 8), 10), (schools(0.05, 8), [5, 50]))
    expected = EpsilonRequest(step=run, delta=1e-5, method="rdp")
    assert asked(read(text + axes)) == expected

    episodes = SCHOOLS.replace('clip_unit = "school"', "").replace(
        "[step.sampling]",
        '[step.sampling]\ntype = "IndependentEpisodes"\nnum_episodes = 3\n'
        "[step.sampling.sampling]",
    )
    sweep = read(episodes + axis("num_episodes", values=[1, 4]))
    assert sweep.paths["num_episodes"] == "sampling.num_episodes"
    assert sweep.paths["pupil.size"] == "sampling.sampling.levels[1].size"


def test_chunks_follow_the_memory_cap(read):
    assert read(SCHOOLS + RATE).chunk_size == 16384
    unnamed = read(SCHOOLS.replace('method = "rdp"', "") + RATE)
    assert unnamed.methods == (EpsilonRequest.method,)
    small = SCHOOLS.replace("version = 1", "version = 1\nmemory_mib = 1")
    assert read(small + RATE).chunk_size == 512
    words = axis("method", values=["rdp", "exact"])
    assert read(SCHOOLS + RATE + words).chunk_size == 1024


def test_every_change_changes_the_hash(read):
    texts = [
        SCHOOLS + RATE,
        SCHOOLS + RATE.replace("0.2", "0.25"),
        SCHOOLS.replace("1.5", "1.6") + RATE,
        SCHOOLS.replace("num_steps = 100", "num_steps = 101") + RATE,
        SCHOOLS + RATE + SIZE,
    ]
    hashes = {description_hash(read(text).description()) for text in texts}
    assert len(hashes) == len(texts)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (SCHOOLS, "missing key 'axes'"),
        (SCHOOLS + RATE.replace("school.", "schol."), "mean 'school.sampling_prob"),
        (SCHOOLS + RATE.replace("values", "valeus"), "did you mean 'values'"),
        (SCHOOLS + RATE.replace("0.2", "1.2"), r"axis 'school.*must lie in \[0, 1\]"),
        (SCHOOLS + SIZE.replace("8", "8.5"), "axis 'pupil.size'.*whole number"),
        (SCHOOLS + NOISE.replace("1.0", "-1.0"), "axis 'noise_multiplier'.*>= 0"),
        (SCHOOLS.replace("1.5", "[1, 2]") + RATE, "must be numbers, as axes"),
        (SCHOOLS.replace("num_steps = 100", "num_steps = [1]") + RATE, "be a number"),
        (SCHOOLS.replace("delta = 1e-5", "") + RATE, "delta must be given"),
        (SCHOOLS.replace("= 1\n", "= 1\nquantity = 'eps'\n") + RATE, "quantity must"),
        (SCHOOLS.replace("= 1\n", "= 1\nmemory_mib = 0\n") + RATE, "memory_mib must"),
        (
            SCHOOLS.replace("num_steps = 100", 'epsilon = 1.0\nquantity = "num_steps"')
            + axis("num_steps", values=[1]),
            "does not depend on it",
        ),
        (SCHOOLS + axis("method", values=["rdp", "excat"]), "did you mean 'exact'"),
    ],
)
def test_errors_before_any_work(read, content, complaint):
    with pytest.raises((TypeError, ValueError), match=complaint):
        read(content)


GROUPED = (
    HEAD
    + """
[step.sampling]
type = "GroupedClasses"
num_classes = 100
ways = 5
episodes = { type = "Poisson", name = "episode", sampling_probability = 0.2 }
examples = { type = "WithoutReplacement", name = "example", size = 4, population = 20 }
"""
    + axis("ways", values=[5, 50])
    + axis("num_classes", values=[20, 1000])
)


def test_a_grid_with_one_contradictory_setting_is_refused(read):
    with pytest.raises(ValueError, match="ways must be at most num_classes"):
        read(GROUPED)
    assert read(GROUPED.replace("[20,", "[60,")).grid.size == 4


# --- Axes, and settings by index ---


def test_the_product_counts_the_last_axis_fastest():
    axes = (
        Axis(field="num_steps", values=[10, 20]),
        Axis(field="noise_multiplier", linspace=[1, 2, 3]),
        Axis(field="method", values=["rdp", "exact"]),
    )
    grid = Grid(axes)
    values = grid.values(np.arange(grid.size))
    expected = list(itertools.product([10, 20], [1.0, 1.5, 2.0], ["rdp", "exact"]))
    assert list(zip(*(c.tolist() for c in values.values()), strict=True)) == expected
    assert values["num_steps"].dtype == np.int64
    some = grid.values(np.array([5, 0]))
    assert some["noise_multiplier"].tolist() == [2.0, 1.0]
    assert grid.index({0: 1, 1: np.array([0, 2]), 2: 0}).tolist() == [6, 10]


def test_zipped_axes_move_together():
    axes = (
        Axis(field="a.size", values=[1, 2, 3], zip="sizes"),
        Axis(field="noise_multiplier", values=[1.0, 2.0]),
        Axis(field="b.size", values=[7, 8, 9], zip="sizes"),
    )
    grid = Grid(axes)
    assert grid.shape == (3, 2)
    values = grid.values(np.arange(grid.size))
    assert values["a.size"].tolist() == [1, 1, 2, 2, 3, 3]
    assert values["b.size"].tolist() == [7, 7, 8, 8, 9, 9]
    assert grid.names == ("a.size", "noise_multiplier", "b.size")


def test_a_grid_is_not_held_in_memory():
    axes = tuple(Axis(field=f"{c}.size", linspace=[1, 9, 10_000]) for c in "abcdefgh")
    with pytest.raises(ValueError, match="2\\*\\*53"):
        Grid(tuple(Axis(field=a.field, values=[*range(1, 10_001)]) for a in axes))
    grid = Grid(tuple(Axis(field=a.field, values=[*range(1, 1_001)]) for a in axes[:5]))
    assert grid.size == 10**15
    values = grid.values(np.array([123_456_789_012_345]))
    assert [int(v[0]) for v in values.values()] == [124, 457, 790, 13, 346]


@pytest.mark.parametrize("field", ["num_steps", "bin.steps_per_epoch", "bin.times"])
def test_whole_numbers_are_rounded_and_kept_once(field):
    axis = Axis(field=field, geomspace=[1, 10, 20])
    assert axis.points().dtype == np.int64
    assert axis.points().tolist() == list(range(1, 11))
    falling = Axis(field="num_steps", linspace=[3, 1, 5])
    assert falling.points().tolist() == [3, 2, 1]
    np.testing.assert_array_equal(
        Axis(field="delta", geomspace=[1e-8, 1e-5, 4]).points(),
        np.geomspace(1e-8, 1e-5, 4),
    )


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "exactly one of"),
        ({"values": []}, "at least one"),
        ({"values": [[1.0]]}, "flat list"),
        ({"values": [1.0, float("nan")]}, "NaN"),
        ({"linspace": [1, 2, 0]}, "how_many must be a whole number >= 1"),
        ({"linspace": [1, float("inf"), 3]}, "finite"),
        ({"geomspace": [0, 1, 3]}, "must be > 0"),
        ({"linspace": [0, 1, 10**9]}, "at most"),
        ({"field": "method", "linspace": [0, 1, 2]}, "given by values"),
    ],
)
def test_faulty_axes(fields, complaint):
    with pytest.raises((TypeError, ValueError), match=complaint):
        Axis(**{"field": "noise_multiplier"} | fields)


ONE = Axis(field="delta", values=[0.1], zip="a")


@pytest.mark.parametrize(
    ("axes", "complaint"),
    [
        ((ONE, ONE), "'delta' twice"),
        ((ONE, Axis(field="epsilon", values=[1, 2], zip="a")), "equally long"),
        ([Axis(field=f"l{i}.size", values=[1]) for i in range(13)], "at most 12 axes"),
    ],
)
def test_faulty_grids(axes, complaint):
    with pytest.raises(ValueError, match=complaint):
        Grid(tuple(axes))
