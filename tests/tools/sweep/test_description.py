"""Sweep files: what they mean, and what is refused before any work."""

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic import PrivacyInfo
from jaxdp_episodic.tools.requests.request import CalibrationRequest, EpsilonRequest
from jaxdp_episodic.tools.sweep.description import description_hash
from jaxdp_episodic.tools.sweep.run import evaluate_chunk

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
SIZE = '[[axes]]\nfield = "pupil.size"\nvalues = [1, 8, 40]\n'
RATE = '[[axes]]\nfield = "school.sampling_probability"\nvalues = [0.1, 0.2]\n'
NOISE = '[[axes]]\nfield = "noise_multiplier"\nvalues = [1.0, 2.0]\n'


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
    axis = '[[axes]]\nfield = "{}"\nvalues = {}\n'
    drawn = jde.Poisson("example", sampling_probability=0.01)
    step = jde.GaussianStep(drawn, noise_multiplier=1.5)

    delta = text.replace("delta = 1e-5", 'quantity = "delta"')
    sweep = read(delta + axis.format("epsilon", [0.5, 1, 2]))
    assert asked(sweep) == EpsilonRequest(step=step, epsilon=[0.5, 1, 2], **RUN)

    targets = {"step": step, "epsilon": 2.0, "delta": 1e-5, "method": "rdp"}
    noise = text.replace("1e-5", '1e-5\nquantity = "noise_multiplier"\nepsilon = 2.0')
    sweep = read(noise + axis.format("num_steps", [10, 100, 1000]))
    assert asked(sweep) == CalibrationRequest(
        calibrate="noise_multiplier", num_steps=[10, 100, 1000], **targets
    )
    # The calibrated field may be missing.
    assert read(noise.replace("noise_multiplier = 1.5", "") + RATE_AXIS)

    steps = text.replace("num_steps = 100", 'quantity = "num_steps"\nepsilon = 2.0')
    sweep = read(steps + axis.format("noise_multiplier", [1.0, 2.0]))
    targets["step"] = jde.GaussianStep(drawn, noise_multiplier=[1.0, 2.0])
    assert asked(sweep) == CalibrationRequest(calibrate="num_steps", **targets)


RATE_AXIS = '[[axes]]\nfield = "example.sampling_probability"\nvalues = [0.01]\n'


def test_quantity_and_method_as_axes(read, monkeypatch):
    """Every setting is answered by its own quantity and method."""
    monkeypatch.setattr(EpsilonRequest, "answer_with_info", pretended("quantity"))
    monkeypatch.setattr(CalibrationRequest, "answer", pretended("calibrate"))
    text = SCHOOLS.replace("delta = 1e-5", "delta = 1e-5\nepsilon = 2.0")
    words = '[[axes]]\nfield = "{}"\nvalues = {}\n'
    text += words.format("quantity", '["epsilon", "noise_multiplier"]') + RATE
    sweep = read(text + words.format("method", '["rdp", "exact"]'))
    answers, _ = evaluate_chunk(sweep, 0)
    rates = [0.1, 10.1, 0.2, 10.2]
    assert answers[:, 0].tolist() == rates + [100 + rate for rate in rates]


def pretended(name):
    def answer(request):
        rate = request.step.sampling.levels[0].sampling_probability
        noise = getattr(request, name) == "noise_multiplier"
        value = rate + 10 * (request.method == "exact") + 100 * noise
        info = PrivacyInfo(np.zeros_like(value), np.zeros(value.shape, bool))
        return value if noise else (value, info)

    return answer


def test_composed_runs_and_designs(read):
    part = SCHOOLS.partition("[step]")[2].replace("[step.", "[step.steps.")
    text = 'version = 1\nmethod = "rdp"\ndelta = 1e-5\n[step]\n'
    text += 'type = "ComposedSteps"\ncounts = [10, 20]\n'
    text += ("[[step.steps]]" + part) * 2
    axes = '[[axes]]\nfield = "counts[1]"\nvalues = [5, 50]\n'
    axes += '[[axes]]\nfield = "steps[0].school.sampling_probability"\nvalues=[0.1]\n'
    run = jde.compose((schools([0.1, 0.1], 8), 10), (schools(0.05, 8), [5, 50]))
    expected = EpsilonRequest(step=run, delta=1e-5, method="rdp")
    assert asked(read(text + axes)) == expected

    episodes = SCHOOLS.replace('clip_unit = "school"', "").replace(
        "[step.sampling]",
        '[step.sampling]\ntype = "IndependentEpisodes"\nnum_episodes = 3\n'
        "[step.sampling.sampling]",
    )
    sweep = read(episodes + '[[axes]]\nfield = "num_episodes"\nvalues = [1, 4]\n')
    assert sweep.paths["num_episodes"] == ("sampling", "num_episodes")
    assert sweep.paths["pupil.size"] == ("sampling", "sampling", "levels", 1, "size")


def test_the_default_method_is_the_librarys(read):
    sweep = read(SCHOOLS.replace('method = "rdp"', "") + RATE)
    assert sweep.methods == (EpsilonRequest.method,)
    assert sweep.description()["method"] == EpsilonRequest.method


def test_chunks_follow_the_memory_cap(read):
    assert read(SCHOOLS + RATE).chunk_size == 16384
    small = SCHOOLS.replace("version = 1", "version = 1\nmemory_mib = 1")
    assert read(small + RATE).chunk_size == 512
    words = '[[axes]]\nfield = "method"\nvalues = ["rdp", "exact"]\n'
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
        ("version = 1\n[step\n", r"not valid TOML: .*line 2"),
        (SCHOOLS, "missing key 'axes'"),
        (SCHOOLS + "[axes]\nx = 1", "axes must be a list"),
        (SCHOOLS + RATE.replace("school.", "schol."), "mean 'school.sampling_prob"),
        (SCHOOLS + RATE.replace("school.", "step."), "axes.0.: unknown field"),
        (SCHOOLS + RATE.replace("values", "valeus"), "did you mean 'values'"),
        (SCHOOLS + RATE.replace("0.2", "1.2"), r"axis 'school.*must lie in \[0, 1\]"),
        (SCHOOLS + SIZE.replace("8", "8.5"), "axis 'pupil.size'.*whole number"),
        (SCHOOLS + SIZE.replace("1,", "0,"), "axis 'pupil.size'.*must be > 0"),
        (SCHOOLS + NOISE.replace("1.0", "-1.0"), "axis 'noise_multiplier'.*>= 0"),
        (SCHOOLS + RATE + RATE, "twice"),
        (SCHOOLS.replace("1.5", "[1, 2]") + RATE, "must be numbers, as axes"),
        (SCHOOLS.replace("num_steps = 100", "num_steps = [1]") + RATE, "be a number"),
        (SCHOOLS.replace("delta = 1e-5", "") + RATE, "delta must be given"),
        (SCHOOLS.replace("delta", "epsilon = 1.0\ndelta") + RATE, "be left out"),
        (SCHOOLS.replace('"rdp"', '"rpd"') + RATE, "did you mean 'rdp'"),
        (SCHOOLS.replace("= 1\n", "= 1\nquantity = 'eps'\n") + RATE, "quantity must"),
        (SCHOOLS.replace("= 1\n", "= 1\nmemory_mib = 0\n") + RATE, "memory_mib must"),
        (
            SCHOOLS.replace("num_steps = 100", 'epsilon = 1.0\nquantity = "num_steps"')
            + '[[axes]]\nfield = "num_steps"\nvalues = [1]',
            "does not depend on it",
        ),
        (
            SCHOOLS.replace(
                "delta", 'quantity = "noise_multiplier"\nepsilon = 1\ndelta'
            )
            + NOISE,
            "does not depend on it",
        ),
        (
            SCHOOLS + '[[axes]]\nfield = "method"\nvalues = ["rdp", "excat"]',
            "did you mean 'exact'",
        ),
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
[[axes]]
field = "ways"
values = [5, 50]
[[axes]]
field = "num_classes"
values = [20, 1000]
"""
)


def test_a_grid_with_one_contradictory_setting_is_refused(read):
    with pytest.raises(ValueError, match="ways must be at most num_classes"):
        read(GROUPED)
    assert read(GROUPED.replace("[20,", "[60,")).grid.size == 4
