"""Schemes of levels and designs: validation, broadcasting, value semantics."""

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.describe.designs import (
    GroupedClasses,
    IndependentEpisodes,
    MultistageSampling,
    Poisson,
    WithoutReplacement,
)
from jaxdp_episodic.accountant.describe.population import Population


def poisson(value, **fields):
    return Poisson("school", sampling_probability=value, **fields)


def pupils(**fields):
    return WithoutReplacement(**{"name": "pupil", "size": 8, "population": 40} | fields)


def test_fields_become_plain_numbers_or_read_only_copies():
    mine = np.array([40, 50])
    scheme = pupils(size=np.float32(8), population=mine)
    assert type(scheme.size) is int and scheme.size == 8
    assert scheme.population.dtype == np.int64
    assert not scheme.population.flags.writeable and mine.flags.writeable
    mine[0] = 9
    assert scheme == pupils(population=[40, 50])
    assert type(poisson(1).sampling_probability) is float


def test_schemes_broadcast():
    assert pupils(size=[[1], [2]], population=[10, 20, 30]).shape == (2, 3)
    sampling = MultistageSampling(poisson(np.full((500, 1), 0.05)), pupils(size=[2, 4]))
    assert sampling.level_names == ("school", "pupil")
    assert sampling.shape == (500, 2)


def test_specs_compare_and_hash_by_value():
    def make(probability):
        return MultistageSampling(poisson(probability), pupils())

    same = make([0.1, 0.0]), make(np.array([0.1, -0.0]))
    assert same[0] == same[1] and hash(same[0]) == hash(same[1])
    assert make(0.1) == make(np.array(0.1)) != make([0.1])
    assert make([0.1, 0.2]) != make([[0.1, 0.2]])
    assert make(0.1) != make(0.1).levels[0]
    assert len({make(0.1), make(0.1), make(0.2)}) == 2


INVALID = [
    *(
        (lambda bad=bad: poisson(bad), "sampling_probability")
        for bad in ("0.5", [0.5, np.nan])
    ),
    *((lambda bad=bad: pupils(size=bad), "size") for bad in ("8", 10**30, [8, 0])),
    (lambda: pupils(population=0), "population"),
    (lambda: poisson(0.1, population=0), "population"),
    (lambda: pupils(population=None, population_is_exact=True), "True needs"),
    (lambda: pupils(population_is_exact=1), "population_is_exact"),
    (lambda: pupils(size=[1, 2], population=[1, 2, 3]), r"population: \(3,\)"),
    *(
        (lambda bad=bad: Poisson(bad, sampling_probability=0.1), "^name must.{,200}$")
        for bad in ("step", "person", "original", "x" * 5000, 3)
    ),
    (
        lambda: Population.from_sizes([[1]], level_names=("step",)),
        r"^level_names\[0\] must",
    ),
    (
        lambda: MultistageSampling(poisson([0.1, 0.2]), pupils(size=[1, 2, 3])),
        r"levels\[0\].*\(2,\), levels\[1\].size",
    ),
    (lambda: MultistageSampling(), "at least one level"),
    (lambda: MultistageSampling(poisson(0.1), poisson(0.1)), "'school', 'school'"),
    (lambda: MultistageSampling(poisson(0.1), "pupil"), r"levels\[1\] must be"),
    (lambda: bins(steps_per_epoch=0), "steps_per_epoch must be a"),
    (lambda: bins(times=0), "times must be a whole number >= 1"),
    (lambda: bins(times=11), "times must be at most steps_per_epoch, got times=11"),
    (lambda: bins(steps_per_epoch=[3, 4], times=[1, 2, 3]), "broadcast"),
]


@pytest.mark.parametrize(("make", "message"), INVALID, ids=range(len(INVALID)))
def test_invalid_schemes_are_refused_by_name(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


# --- Epochs ---


def bins(**fields):
    return jde.RandomAllocation("task", **({"steps_per_epoch": 10} | fields))


def shuffled():
    return jde.ShuffledEpochs("task", steps_per_epoch=3)


NO_THEOREM = [
    lambda: MultistageSampling(poisson(0.1), bins()),
    lambda: MultistageSampling(poisson(0.1), shuffled()),
    lambda: IndependentEpisodes(bins(), num_episodes=2),
    lambda: jde.GaussianStep(shuffled(), noise_multiplier=1.0, clip_unit="step"),
    lambda: jde.GaussianStep(
        MultistageSampling(bins(), pupils()), noise_multiplier=1.0, clip_unit="pupil"
    ),
    lambda: grouped(
        episodes=None, classes=jde.RandomAllocation("class", steps_per_epoch=3)
    ),
]


@pytest.mark.parametrize("make", NO_THEOREM, ids=range(len(NO_THEOREM)))
def test_epochs_without_a_theorem_are_refused_by_name(make):
    message = "(RandomAllocation|ShuffledEpochs) has no theorem there"
    with pytest.raises(NotImplementedError, match=message):
        make()


def test_a_run_that_ends_within_an_epoch_cannot_be_repeated():
    step = jde.GaussianStep(bins(), noise_multiplier=1.0)
    assert jde.compose((jde.compose((step, 20)), 3)).counts == (60,)
    assert jde.compose((jde.compose((step, 25)), 1)).counts == (25,)
    with pytest.raises(NotImplementedError, match="part of epoch 'task'"):
        jde.compose((jde.compose((step, 25)), 2))


def test_allocated_episodes_reach_an_example_once_an_epoch_and_block():
    drawn = jde.GroupedClasses(
        num_classes=100,
        ways=5,
        episodes=jde.RandomAllocation("episode", steps_per_epoch=[10, 20], times=2),
        examples=jde.WithoutReplacement("example", size=4, population=20),
    )
    # One step of five, then one of ten; four of twenty examples.
    np.testing.assert_allclose(jde.inclusion_rates(drawn), [0.04, 0.02], rtol=1e-15)


@pytest.mark.parametrize(
    ("relation", "moved"),
    [("add_remove", 5**0.5), ("replace_one", 2.0), ("zero_out", 1.0)],
)
def test_shuffled_epochs_cost_the_gaussian_mechanism(relation, moved):
    drawn = jde.ShuffledEpochs("task", steps_per_epoch=10)
    step = jde.GaussianStep(drawn, noise_multiplier=2.0, neighboring_relation=relation)
    always = jde.Poisson("task", sampling_probability=1.0)
    same = jde.GaussianStep(always, noise_multiplier=2.0 / moved)
    found = [jde.epsilon(step, delta=1e-6, num_steps=n) for n in (1, 10, 11, 30)]
    epochs = [jde.epsilon(same, delta=1e-6, num_steps=n) for n in (1, 1, 2, 3)]
    assert found == pytest.approx(epochs, rel=1e-9)


def test_shuffled_episodes_are_swapped_with_the_rate_below():
    below = pupils(size=2, population=10)
    drawn = MultistageSampling(jde.ShuffledEpochs("t", steps_per_epoch=4), below)
    step = jde.GaussianStep(drawn, noise_multiplier=2.0, clip_unit="t")
    fields = {"noise_multiplier": 2.0, "neighboring_relation": "replace_one"}
    same = jde.GaussianStep(few("t", 1, 5), **fields)
    ours = jde.epsilon(step, delta=1e-6, num_steps=12)
    assert ours == pytest.approx(jde.epsilon(same, delta=1e-6, num_steps=3), rel=1e-9)


# --- Grouped classes and independent episodes ---


EPISODES = Poisson("episode", sampling_probability=0.16)
EXAMPLES = WithoutReplacement("example", size=4, population=20)


def coins(name):
    return Poisson(name, sampling_probability=0.1)


def few(name, size=1, population=None):
    return WithoutReplacement(name, size=size, population=population)


def grouped(**changes):
    fields = {
        "num_classes": 1_800,
        "ways": 5,
        "episodes": EPISODES,
        "examples": EXAMPLES,
    }
    return GroupedClasses(**{**fields, **changes})


def test_grouped_levels_and_shape():
    design = grouped(ways=[[1], [5]], num_classes=[100, 200, 300])
    assert design.level_names == ("episode", "class", "example")
    assert design.shape == (2, 3)
    bare = few("class", 5, 100)
    assert independent(bare) == independent(MultistageSampling(bare))
    np.testing.assert_array_equal(
        design.num_possible_episodes, [[100, 200, 300], [20, 40, 60]]
    )
    for drawn in (few("class", 320), few("class", 320, 1_800), coins("class")):
        assert grouped(episodes=None, classes=drawn).shape == ()


def independent(sampling=EXAMPLES, count=2):
    return IndependentEpisodes(sampling, num_episodes=count)


def of_episodes(number):
    step = jde.GaussianStep(independent(few("x", 1, 10), number), noise_multiplier=1.0)
    return jde.epsilon(step, num_steps=1, delta=1e-5)


BAD_DESIGNS = [
    (lambda: grouped(episodes=None), "exactly one .* got neither"),
    (lambda: grouped(classes=coins("class")), "exactly one .* got both"),
    (lambda: grouped(episodes=coins("task")), "named 'episode', got 'task'"),
    (
        lambda: grouped(episodes=None, classes=EPISODES),
        "classes must be named 'class', got 'episode'",
    ),
    (lambda: grouped(examples=few("pupil", 4, 20)), "named 'example', got 'pupil'"),
    (lambda: grouped(episodes=few("episode", 3, 360)), "population=None"),
    (
        lambda: grouped(episodes=None, classes=few("class", 320, 1_000)),
        "population=None or num_classes",
    ),
    (
        lambda: grouped(episodes=None, classes=few("class", 4)),
        "at least `ways` classes",
    ),
    (lambda: grouped(ways=1_801), "ways must be at most num_classes"),
    (lambda: grouped(ways=0), "ways must be a whole number"),
    (lambda: grouped(num_classes=12.5), "num_classes must be a whole number"),
    (lambda: grouped(ways=[1, 2], num_classes=[9, 9, 9]), "do not broadcast"),
    (lambda: grouped(episodes=0.1), "episodes must be"),
    (lambda: grouped(examples=None), "examples must be"),
    (lambda: grouped(examples=coins("example")), "covered: examples=Without"),
    (lambda: independent(count=0), "num_episodes must be a whole number"),
    (lambda: independent(EPISODES), "level named 'episode'"),
    (lambda: independent(grouped()), "GroupedClasses"),
    (lambda: independent(0.5), "sampling must be"),
    (lambda: independent(few("class", [1, 2, 3]), [1, 2]), r"num_episodes: \(2,\)"),
    (lambda: of_episodes(10**9), "num_episodes must be at most"),
]


@pytest.mark.parametrize(("make", "message"), BAD_DESIGNS, ids=range(len(BAD_DESIGNS)))
def test_invalid_designs_are_refused(make, message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        make()


# --- Composed runs protect one kind of unit ---


TREE = jde.Population.from_sizes([3, 3, 3])  # without names


def step(*levels, tree=TREE, **fields):
    sampling = jde.MultistageSampling(*levels)
    arguments = {"noise_multiplier": 1.0, "population": tree, **fields}
    return jde.GaussianStep(sampling, **arguments)


def test_grouped_classes_reach_examples_by_two_levels_of_the_tree():
    grouped = jde.GaussianStep(
        jde.GroupedClasses(
            num_classes=3, ways=1, episodes=coins("episode"), examples=few("example")
        ),
        noise_multiplier=1.0,
        population=TREE,
    )
    tree = step(coins("class"), few("example"), clip_unit="class")
    run = jde.compose((grouped, 5), (tree, 5))
    assert np.isfinite(jde.epsilon(run, delta=1e-3, method="rdp"))


def below(**fields):
    return step(coins("a"), few("x"), clip_unit="a", **fields)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (below(privacy_unit="a"), "privacy_unit"),
        (below(neighboring_relation="replace_one"), "neighboring_relation"),
        (below(tree=jde.Population.from_sizes([3, 3, 4])), "the same population"),
        # Both levels are called "x": one is of examples, one of groups of three.
        (step(coins("x")), "same levels of the population"),
    ],
)
def test_other_units_are_not_composed(other, message):
    with pytest.raises(ValueError, match=message):
        jde.compose((below(), 1), (other, 1))
