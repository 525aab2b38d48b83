"""Episodes within blocks of people: everybody is in one block."""

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.draw import EpisodeSampler, step_generator

PEOPLE, CLASSES, A_BLOCK, WAYS, SIZE = 8, 6, 4, 3, 2
HALF = jde.Poisson("episode", sampling_probability=0.5)


def blocks(episodes=HALF, *, slots=A_BLOCK, **changes):
    inside = jde.MultistageSampling(
        jde.WithoutReplacement("class", size=WAYS, population=CLASSES),
        jde.WithoutReplacement("example", size=SIZE, population=slots),
    )
    given = {"num_people": PEOPLE, "people_per_block": A_BLOCK, "sampling": inside}
    return jde.PeopleBlocks(episodes=episodes, **given | changes)


def sampler(design, has=None, **options):
    """A sampler for people with ``has``, (P, C) numbers of drawings by class."""
    has = np.ones((PEOPLE, CLASSES), int) if has is None else np.asarray(has)
    tree = jde.Population.from_sizes(
        has.sum(axis=0).tolist(), level_names=("class", "example")
    )
    people = np.arange(len(has))
    owners = Owners(np.concatenate([np.repeat(people, n) for n in has.T]), people)
    given = {"clip_unit": "episode", "privacy_unit": "person", "owners": owners}
    return EpisodeSampler(design, tree, **given | options), owners, tree


def rows(drawn_from, owners, tree, number=400):
    """Owners and classes of each draw, (J, ways, size), -1 for masked slots."""
    class_of = np.repeat(np.arange(tree.num_units(1)), tree.children_counts[1])
    for i in range(number):
        draw = drawn_from.draw(step_generator(0, i))
        yield (
            np.where(draw.mask, owners.codes[draw.examples], -1),
            np.where(draw.mask, class_of[draw.examples], -1),
            draw,
        )


def of_one_block(owner):
    """Asserts that blocks are disjoint and have at most their size."""
    people = [set(row.ravel().tolist()) - {-1} for row in owner]
    assert all(len(some) <= A_BLOCK for some in people)
    assert sum(map(len, people)) == len(set().union(*people))


@pytest.mark.few(1)
@pytest.mark.parametrize("among_slots", [True, False])
def test_a_person_is_in_an_episode_with_the_accounted_probability(among_slots):
    """``r = 1 - (1 - q / slots)^ways``, to four standard errors."""
    drawn_from, owners, tree = sampler(blocks(), among_slots=among_slots)
    held, episodes, first = 0, [], []
    for owner, of_class, draw in rows(drawn_from, owners, tree, 800):
        of_one_block(owner)
        assert draw.mask.all() and not draw.holds_null.any()
        assert all(len(set(c[:, 0].tolist())) == WAYS for c in of_class)
        assert np.all(of_class == of_class[:, :, :1])
        episodes.append(len(owner))
        held += len(set(owner.ravel().tolist()))
        first += of_class[:, 0, 0].tolist()
    assert np.mean(episodes) == pytest.approx(1.0, abs=0.1)
    assert np.ptp(np.bincount(first, minlength=CLASSES)) < 80  # of 133 on average
    chance = held / PEOPLE / 800
    assert chance == pytest.approx(0.5 * (1 - 0.5**WAYS), abs=0.045)


def test_empty_slots_are_null_under_zero_out_and_masked_otherwise():
    has = np.ones((PEOPLE - 1, CLASSES), int)  # one listed person has no data
    for slots_of, is_null in (("example", True), (None, False)):
        given = sampler(blocks(), has, slots_of=slots_of)
        some = [np.zeros(0, bool)]
        for owner, _, draw in rows(*given):
            of_one_block(owner)
            missing = ~draw.mask.all(axis=(1, 2))
            np.testing.assert_array_equal(draw.holds_null, missing & is_null)
            some.append(missing)
        # The missing person's block is in half of all episodes, 1 - .5^3 with a null.
        share = 0.5 * (1 - 0.5**WAYS)
        assert np.concatenate(some).mean() == pytest.approx(share, abs=0.08)


def test_episodes_of_listed_people_without_data_are_empty():
    """One person is a block: at most as many episodes have examples as people have."""
    has = np.ones((PEOPLE - 3, CLASSES), int) * SIZE  # three listed people have no data
    alone = blocks(people_per_block=1, slots=SIZE)
    for among_slots in (True, False):
        given = sampler(alone, has, among_slots=among_slots)
        for owner, _, draw in rows(*given, 50):
            of_one_block(owner)
            assert draw.mask.any(axis=(1, 2)).sum() <= PEOPLE - 3


def test_data_dependent_episodes_take_classes_with_enough_drawings():
    has = np.zeros((PEOPLE, CLASSES), int)
    has[:, :2] = 1  # every block has these classes
    has[0, 2] = SIZE  # only one person has this class
    given = sampler(blocks(), has, among_slots=False)
    classes = set()
    for owner, of_class, draw in rows(*given, 150):
        of_one_block(owner)
        assert np.all((of_class >= 0) == draw.mask)
        with_owner = np.any(owner == 0, axis=(1, 2))
        assert not np.any(of_class[~with_owner] == 2)
        assert not draw.holds_null.any()
        assert np.all(draw.mask[:, :2])  # valid slots come first
        classes |= set(of_class.ravel().tolist())
    assert classes == {-1, 0, 1, 2}


@pytest.mark.parametrize(
    "scheme",
    [
        jde.RandomAllocation("episode", steps_per_epoch=3),
        jde.ShuffledEpochs("episode", steps_per_epoch=2),
        jde.WithoutReplacement("episode", size=2),
    ],
)
def test_blocks_are_fixed_within_an_epoch_and_fresh_otherwise(scheme):
    drawn_from, owners, _ = sampler(blocks(scheme, people_per_block=2, slots=2))
    if drawn_from.steps_per_epoch is None:
        assert len(drawn_from.draw(step_generator(0, 0)).examples) == 2
        return
    epochs = [drawn_from.begin_epoch(step_generator(0, i)) for i in range(2)]
    for epoch in epochs:
        people = np.concatenate(epoch)
        assert sorted(people.ravel().tolist()) == list(range(PEOPLE))
        draw = drawn_from.draw(step_generator(1, 0), epoch[0])
        for row, block in zip(draw.examples, epoch[0], strict=True):
            assert set(owners.codes[row].ravel().tolist()) <= set(block.tolist())
    first, second = (np.sort(np.concatenate(e), axis=1).tolist() for e in epochs)
    assert sorted(first) != sorted(second)


def test_several_episodes_a_block_and_a_remainder_of_people():
    every = jde.Poisson("episode", sampling_probability=1.0)
    design = blocks(every, people_per_block=3, slots=3, episodes_per_block=2)
    for owner, _, _ in rows(*sampler(design), 50):
        assert len(owner) == 4  # two blocks of three, two people are left out
        people = [set(row.ravel().tolist()) for row in owner]
        assert all(len(some) <= 3 for some in people)
        met = [[p for p in people if p & some] for some in people]
        assert all(len(two) <= 2 and len(set().union(*two)) <= 3 for two in met)


SEVEN = jde.MultistageSampling(
    jde.WithoutReplacement("class", size=WAYS, population=7),
    jde.WithoutReplacement("example", size=SIZE, population=A_BLOCK),
)
DATA_DEPENDENT = {"among_slots": False, "slots_of": "example"}


@pytest.mark.parametrize(
    ("design", "options", "error", "match"),
    [
        ({}, {"owners": None}, ValueError, "owners of the examples must be given for"),
        ({}, DATA_DEPENDENT, ValueError, "among_slots must be True"),
        ({"slots": 3}, {}, ValueError, r"one class that 4 .*together, 4, got 3"),
        ({"num_people": 7}, {}, ValueError, r"num_people must be at least .* 8, got 7"),
        ({"sampling": None}, {}, NotImplementedError, "of classes and then of example"),
        ({"sampling": SEVEN}, {}, ValueError, r"must be the number of classes .*, 6"),
    ],
)
def test_blocks_that_do_not_fit_the_data_are_refused(design, options, error, match):
    with pytest.raises(error, match=match):
        sampler(blocks(**design), **options)
