"""Properties of every single draw, and what the sampler refuses."""

import importlib
import itertools
import sys
from types import ModuleType

import numpy as np
import pytest

from jaxdp_episodic import (
    Bands,
    GaussianStep,
    GroupedClasses,
    IndependentEpisodes,
    MultistageSampling,
    Poisson,
    Population,
    RandomAllocation,
    ShuffledEpochs,
    WithoutReplacement,
)
from jaxdp_episodic.trainer.draw import EpisodeSampler, step_generator, tree_draw
from oracles.draws import Tally, false_alarm, outcome_tally

SIZES = [3, 0, 12, 8, 1]
TREE = Population.from_sizes(SIZES, level_names=("school", "pupil"))
PUPILS = WithoutReplacement("pupil", size=8)
CLASSES = Population.from_sizes([20, 3, 0, 4, 7, 20, 20], level_names=("class",))


def schools(rate=0.5, pupils=PUPILS):
    return MultistageSampling(Poisson("school", sampling_probability=rate), pupils)


def grouped(**changes):
    fields = {
        "num_classes": 7,
        "ways": 3,
        "episodes": Poisson("episode", sampling_probability=0.5),
        "examples": WithoutReplacement("example", size=4),
    }
    return GroupedClasses(**{**fields, **changes})


def classes(scheme, **changes):
    return grouped(episodes=None, classes=scheme, **changes)


def draws(sampler, number):
    return [sampler.draw(step_generator(7, step)) for step in range(number)]


def assert_well_formed(sampler, draw):
    number = len(draw.units)
    assert draw.examples.shape == draw.mask.shape == (number, *sampler.slot_shape)
    assert draw.units.shape == (number,)
    assert draw.examples.dtype == draw.units.dtype == np.int64
    assert draw.mask.dtype == bool
    assert number <= sampler.max_units
    assert not draw.examples[~draw.mask].any()
    last = sampler.population.num_levels
    assert draw.examples.max(initial=0) < max(1, sampler.population.num_units(last))
    if draw.mask.ndim > 1:  # valid slots first
        assert np.all(draw.mask[..., :-1] >= draw.mask[..., 1:])
    for row, mask in zip(draw.examples, draw.mask, strict=True):
        assert len(set(row[mask].tolist())) == mask.sum()
    if not sampler.slot_shape:
        np.testing.assert_array_equal(draw.examples, draw.units)
        assert draw.mask.all() and len(set(draw.units.tolist())) == number


# --- Trees ---


ALL_OF_A = MultistageSampling(
    Poisson("a", sampling_probability=1.0),
    WithoutReplacement("b", size=2),
    Poisson("c", sampling_probability=0.5),
)
DEEP = Population.from_sizes([[3, 2, 0], [], [5]])
THREE_SCHOOLS = MultistageSampling(WithoutReplacement("school", size=3), PUPILS)


@pytest.mark.parametrize(
    ("sampling", "tree", "clip_unit", "slot_shape", "expected_units", "max_units"),
    [
        (schools(), TREE, "school", (8,), 2.5, 5),
        (schools(), TREE, "pupil", (), 0.5 * (3 + 0 + 8 + 8 + 1), 20),
        (schools(), TREE, "step", (5, 8), 1.0, 1),
        (schools(0.0), TREE, "school", (8,), 0, 0),
        (schools(0.0), TREE, "pupil", (), 0, 0),
        (schools(0.0), TREE, "step", (5, 8), 1.0, 1),
        (schools(1.0), TREE, "school", (8,), 5, 5),
        (THREE_SCHOOLS, TREE, "school", (8,), 3, 3),
        # On average three fifths of the pupils, at most those of the largest schools.
        (THREE_SCHOOLS, TREE, "pupil", (), 0.6 * 20, 8 + 8 + 3),
        (ALL_OF_A, DEEP, "step", (3, 2, 5), 1.0, 1),
        (ALL_OF_A, DEEP, "a", (2, 5), 3, 3),
        (ALL_OF_A, DEEP, "b", (5,), 3, 3),
        (ALL_OF_A, DEEP, "c", (), 5 * 2 / 3 * 0.5 + 5 * 0.5, 10),
    ],
)
def test_shapes_of_a_tree(
    sampling, tree, clip_unit, slot_shape, expected_units, max_units
):
    sampler = EpisodeSampler(sampling, tree, clip_unit=clip_unit)
    assert sampler.slot_shape == slot_shape
    assert sampler.expected_units == pytest.approx(expected_units, rel=1e-14)
    assert sampler.max_units == max_units
    assert isinstance(sampler.max_units, int)
    for draw in draws(sampler, 20):
        assert_well_formed(sampler, draw)


def test_trees_of_empty_units():
    """Public units without examples are drawn, and have masked rows."""
    tree = Population.from_sizes([0, 0])
    for pupils in (PUPILS, Poisson("pupil", sampling_probability=0.5)):
        sampler = EpisodeSampler(schools(1.0, pupils), tree, clip_unit="school")
        draw = sampler.draw(step_generator(0, 0))
        assert_well_formed(sampler, draw)
        assert len(draw.units) == 2
        assert min(draw.mask.shape) >= 1
        assert not draw.mask.any()
        nobody = EpisodeSampler(schools(1.0, pupils), tree, clip_unit="pupil")
        assert nobody.max_units == nobody.expected_units == 0
        assert_well_formed(nobody, nobody.draw(step_generator(0, 0)))


@pytest.mark.parametrize("rate", [1e-320, 1e-17, 1 - 1e-16])
def test_extreme_rates(rate):
    sampler = EpisodeSampler(
        Poisson("example", sampling_probability=rate),
        Population.from_sizes(10_000),
        clip_unit="example",
    )
    for draw in draws(sampler, 3):
        assert_well_formed(sampler, draw)
        assert abs(len(draw.units) - 10_000 * rate) <= 500


# --- Grouped classes ---

GROUPED = {
    "episodes-poisson": grouped(),
    "episodes-subset": grouped(episodes=WithoutReplacement("episode", size=1)),
    "episodes-all": grouped(episodes=WithoutReplacement("episode", size=9)),
    "episodes-never": grouped(episodes=Poisson("episode", sampling_probability=0.0)),
    "episodes-always": grouped(episodes=Poisson("episode", sampling_probability=1.0)),
    "classes-poisson": classes(Poisson("class", sampling_probability=0.6)),
    "classes-subset": classes(WithoutReplacement("class", size=4)),
    "classes-all": classes(WithoutReplacement("class", size=9)),
    "classes-never": classes(Poisson("class", sampling_probability=0.0)),
    "classes-always": classes(Poisson("class", sampling_probability=1.0)),
}


@pytest.mark.parametrize(
    ("name", "expected", "largest", "numbers"),
    [
        ("episodes-poisson", 1.0, 2, {0, 1, 2}),
        ("episodes-subset", 1.0, 1, {1}),
        ("episodes-all", 2.0, 2, {2}),
        ("classes-subset", 1.0, 1, {1}),
        ("classes-all", 2.0, 2, {2}),
        *((f"{drawn}-never", 0.0, 0, {0}) for drawn in ("episodes", "classes")),
        *((f"{drawn}-always", 2.0, 2, {2}) for drawn in ("episodes", "classes")),
        ("classes-poisson", None, 2, {0, 1, 2}),
    ],
)
def test_number_of_grouped_episodes(name, expected, largest, numbers):
    sampler = EpisodeSampler(GROUPED[name], CLASSES, clip_unit="episode")
    assert sampler.max_units == largest
    drawn = draws(sampler, 100)
    assert {len(draw.units) for draw in drawn} == numbers
    assert_well_formed(sampler, drawn[0])
    if expected is None:  # classes 3 to 5 make one episode, 6 and 7 two
        chance = [0.2903040, 0.2612736, 0.1306368, 0.0279936]  # 4 to 7 of 7 at 0.6
        expected = 0.1935360 + chance[0] + chance[1] + 2 * (chance[2] + chance[3])
    assert sampler.expected_units == pytest.approx(expected, rel=1e-12)


def test_mean_number_of_groups_of_many_classes():
    design = GroupedClasses(
        num_classes=100_000,
        ways=5,
        classes=Poisson("class", sampling_probability=0.01),
        examples=WithoutReplacement("example", size=4),
    )
    tree = Population.from_sizes([20] * 100_000)
    sampler = EpisodeSampler(design, tree, clip_unit="episode")
    # The remainder is uniform on 0 to 4 up to far less than 1e-9.
    assert sampler.expected_units == pytest.approx((1_000 - 2) / 5, rel=1e-9)
    assert sampler.max_units == 20_000


# --- Reproducibility ---


@pytest.mark.parametrize("name", ["episodes-poisson", "classes-subset"])
def test_the_generator_determines_the_draw(name):
    sampler, again = (
        EpisodeSampler(GROUPED[name], CLASSES, clip_unit="episode") for _ in "ab"
    )
    entropy = 2**255 + 19
    for step in (9, 3, 9):  # regardless of earlier draws
        for one, two in zip(
            sampler.draw(step_generator(entropy, step)),
            again.draw(step_generator(entropy, step)),
            strict=True,
        ):
            np.testing.assert_array_equal(one, two)


def test_step_generators_differ():
    words = {
        tuple(step_generator(entropy, step).integers(0, 2**63, 2).tolist())
        for entropy in (0, 1, 2**32, 2**128, 2**200 + 1)
        for step in (0, 1, 2, 2**32, 2**40)
    }
    assert len(words) == 25


def test_seeds_are_checked():
    with pytest.raises(ValueError, match="entropy must be a whole number"):
        step_generator(-1, 0)
    with pytest.raises(TypeError, match="step must be .* got True"):
        step_generator(0, True)


# --- What is refused ---


INDEPENDENT = IndependentEpisodes(schools(), num_episodes=2)
LISTED = IndependentEpisodes(schools(), num_episodes=[1, 2])
EXAMPLES = Population.from_sizes(SIZES, level_names=("class", "example"))


@pytest.mark.parametrize(
    ("sampling", "population", "clip_unit", "error", "message"),
    [
        ("schools", TREE, "school", TypeError, "sampling must be"),
        (schools([0.1, 0.2]), TREE, "school", ValueError, "'school' must be a single"),
        (grouped(ways=[2, 3]), CLASSES, "episode", ValueError, "ways must be a single"),
        (LISTED, TREE, "episode", ValueError, "num_episodes must be a single .* shape"),
        (schools(), TREE, "shcool", ValueError, "did you mean 'school'"),
        (grouped(), CLASSES, "class", NotImplementedError, "covered: .*'episode'"),
        (INDEPENDENT, TREE, "school", NotImplementedError, "IndependentEpisodes has"),
        (schools(), EXAMPLES, "school", ValueError, r"'school', 'pupil'\).*\('class'"),
        (grouped(num_classes=8), CLASSES, "episode", ValueError, "data, 7, got 8"),
    ],
)
def test_steps_that_do_not_fit_the_table_are_refused(
    sampling, population, clip_unit, error, message
):
    with pytest.raises(error, match=message):
        EpisodeSampler(sampling, population, clip_unit=clip_unit)


UNEQUAL = Population.from_sizes([25, 40, 60])
EQUAL = Population.from_sizes([40, 40, 40])


def eight(population, is_exact=False):
    return WithoutReplacement(
        "pupil", size=8, population=population, population_is_exact=is_exact
    )


def tenth(population):
    return Poisson("pupil", sampling_probability=0.1, population=population)


@pytest.mark.parametrize(
    ("pupils", "population", "rule"),
    [
        (eight(26), UNEQUAL, "at most .* 25 to 60 here, got 26"),
        (eight(2), Population.from_sizes([5, 0]), "at most .* 1 to 5 here, got 2"),
        (eight(25, is_exact=True), UNEQUAL, "exactly .* got 25"),
        (eight(41, is_exact=True), EQUAL, "exactly .* got 41"),
        (tenth(59), UNEQUAL, "at least .* 25 to 60 here, got 59"),
    ],
)
def test_public_sizes_that_the_data_contradict_are_refused(pupils, population, rule):
    """With them the accounted epsilon would be too small."""
    with pytest.raises(ValueError, match=f"level 'pupil': population must be {rule}"):
        EpisodeSampler(schools(0.5, pupils), population, clip_unit="school")
    with pytest.raises(ValueError, match="or leave it out: a step with the data's"):
        EpisodeSampler(
            schools(0.5, pupils), population, clip_unit="pupil", privacy_unit="school"
        )
    # Accepted if the step is accounted by the real sizes, or does not use these.
    for accepted in ({"privacy_unit": "school"}, {"population_is_accounted": True}):
        sampler = EpisodeSampler(
            schools(0.5, pupils), population, clip_unit="school", **accepted
        )
        assert_well_formed(sampler, sampler.draw(step_generator(0, 0)))


def test_correct_public_sizes_are_accepted():
    for pupils, population in (
        (eight(25), UNEQUAL),
        (eight(1), Population.from_sizes([0])),
        (eight(40, is_exact=True), EQUAL),
        (tenth(60), UNEQUAL),
    ):
        EpisodeSampler(schools(0.5, pupils), population, clip_unit="school")


def test_public_sizes_of_grouped_classes():
    """The sizes of examples and of the level above are checked too."""
    examples = WithoutReplacement("example", size=4, population=20)
    with pytest.raises(ValueError, match="level 'example': population must be at most"):
        EpisodeSampler(grouped(examples=examples), CLASSES, clip_unit="episode")
    sampling = MultistageSampling(WithoutReplacement("a", size=2, population=6), PUPILS)
    with pytest.raises(ValueError, match="level 'a': population must be at most"):
        EpisodeSampler(sampling, Population.from_sizes([9] * 5), clip_unit="step")


# --- Draws below many units: all algorithms have the same distribution ---


FALSE_ALARMS = 1e-6
# Sizes at which each of the three algorithms is chosen.
WAYS = {
    "one unit of many children": [1_000],
    "few units of many children": [100_000, 3, 0, 200_000],
    "many units, few of many": [30] * 400 + [2, 0, 1],
    "many units, most of few": [4, 0, 1, 3, 5] * 60,
    "nobody": [0, 0, 0],
    "no unit": [],
}


def children_of_units(drawn, counts):
    """The drawn children of each unit, after what holds for every draw."""
    assert drawn.owner.dtype == drawn.child.dtype == np.int64
    assert np.all(np.diff(drawn.owner) >= 0)
    for unit, count in enumerate(counts):
        children = drawn.child[drawn.owner == unit].tolist()
        assert len(children) == len(set(children))
        assert all(0 <= child < count for child in children)
        yield count, len(children)


@pytest.mark.parametrize("counts", WAYS.values(), ids=WAYS)
def test_children_of_units_differ_and_are_as_many_as_asked(counts):
    counts, generator = np.array(counts, np.int64), np.random.default_rng(0)
    for size in (1, 3, 40):
        drawn = tree_draw.without_replacement(counts, size, generator)
        for count, number in children_of_units(drawn, counts):
            assert number == min(size, count)
    for rate in (0.0, 0.01, 0.7, 1.0):
        drawn = tree_draw.poisson(counts, rate, generator)
        for count, number in children_of_units(drawn, counts):
            assert rate not in (0, 1) or number == rate * count


@pytest.mark.parametrize(
    "counts",
    [[4] * 1_000, [4] * 1_000 + [400], [4] + [100_000]],
    ids=["most of few", "few of many", "unit by unit"],
)
def test_sequences_of_children_are_uniform(counts):
    """All 24 ordered triples of four children; false alarms: 1e-6."""
    generator = np.random.default_rng(1)
    counts = np.array(counts, np.int64)
    found: list[tuple] = []
    while len(found) < 4_000:
        drawn = tree_draw.without_replacement(counts, 3, generator)
        small = counts[drawn.owner] == 4
        found += map(tuple, drawn.child[small].reshape(-1, 3).tolist())
    dist = {order: 1 / 24 for order in itertools.permutations(range(4), 3)}
    assert false_alarm(outcome_tally(found, dist)) > FALSE_ALARMS


def test_rare_coins_among_many_children():
    """Deciles of 10^7 children at rate 1e-4, in 200 draws; false alarms: 1e-6."""
    generator = np.random.default_rng(3)
    counts = np.array([4_000_000, 6_000_000])
    places = []
    for _ in range(200):
        drawn = tree_draw.poisson(counts, 1e-4, generator)
        places.append(drawn.owner * 4_000_000 + drawn.child)
    tenths = np.bincount(np.concatenate(places) // 1_000_000, minlength=10)
    assert false_alarm(Tally(tenths, 200 * 1_000_000, 1e-4)) > FALSE_ALARMS


@pytest.mark.parametrize(
    ("scheme", "bands"),
    [
        # Every step would draw from all groups, and pay for one.
        (Poisson("example", sampling_probability=0.3), Bands(4, level="example")),
        (RandomAllocation("example", steps_per_epoch=4), None),
        (ShuffledEpochs("example", steps_per_epoch=4), None),
    ],
)
def test_loaders_refuse_steps_that_they_do_not_draw(scheme, bands, monkeypatch):
    for name in ("torch", "torch.utils", "torch.utils.data"):  # stand-ins
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    name = "jaxdp_episodic.trainer.draw.step_loader"
    monkeypatch.delitem(sys.modules, name, raising=False)
    loaders = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    loaders._data.default_collate = lambda slots: map(
        np.array, zip(*slots, strict=True)
    )
    rows, step_draws = loaders._Rows([7, 8, 9], (3,)), loaders.StepDraws
    values, _ = rows([rows[[1, -1, 2]], rows[[-1, 0, -1]]])
    assert values.tolist() == [[8, 0, 9], [0, 7, 0]]  # empty slots are zero
    plain = Poisson("_", sampling_probability=0.3)  # levels have any names
    assert len(step_draws(GaussianStep(plain, noise_multiplier=1.0), 40, 8)) == 8
    step = GaussianStep(scheme, noise_multiplier=1.0, bands=bands)
    with pytest.raises(NotImplementedError, match="bands or epochs, got add_remove"):
        step_draws(step, 40, 8)
