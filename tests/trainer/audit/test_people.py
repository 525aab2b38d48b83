"""Audits of one person with all of her examples."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.audit import audit_mechanism, mechanism_rows
from jaxdp_episodic.trainer.audit.canaries import gradient_canaries
from jaxdp_episodic.trainer.audit.people import World, audit_person, audit_worlds
from jaxdp_episodic.trainer.audit.person_contributions import person_contributions
from jaxdp_episodic.trainer.audit.training import Training, audit_steps
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.run.checks import sampler_of
from training_runs import WAYS, PlainBudget, adam, protonet

P, W, M = jde.Poisson, jde.WithoutReplacement, jde.MultistageSampling
CLASSES, PEOPLE = 9, 6
BELOW = W("example", size=2, population=PEOPLE)
COINS = P("episode", sampling_probability=0.5)
ALL = jde.PersonBounds(classes=CLASSES, examples=1)


def everybody(width=1):
    """Each person has one example of every class."""
    tree = jde.Population.from_sizes(
        [PEOPLE] * CLASSES, level_names=("class", "example")
    )
    owners = Owners(np.tile(np.arange(PEOPLE), CLASSES), np.arange(PEOPLE))
    features = np.random.default_rng(0).normal(size=(len(owners), width))
    return ExampleTable(features.astype(np.float32), None, tree, owners)


def person(
    design, *, clip="episode", noise=1.0, relation="zero_out", people: Any = ALL
):
    return jde.GaussianStep(
        design,
        noise_multiplier=noise,
        clip_unit=clip,
        privacy_unit="person",
        neighboring_relation=relation,
        people=people,
    )


def coins(rate=0.3, **more):
    design = M(P("class", sampling_probability=rate), BELOW)
    return person(design, clip="class", **more)


def blocks(episodes: Any = COINS, *, people=3, size=1, **more):
    return jde.PeopleBlocks(
        num_people=PEOPLE,
        people_per_block=people,
        episodes=episodes,
        sampling=M(
            W("class", size=2, population=CLASSES),
            W("example", size=size, population=people),
        ),
        **more,
    )


GROUPED = jde.GroupedClasses(
    num_classes=CLASSES, ways=WAYS, episodes=COINS, examples=BELOW
)
STEPS = {
    "coins": coins(),
    "without replacement": person(
        M(W("class", size=3, population=CLASSES), BELOW), clip="class"
    ),
    "visible": person(
        M(
            P("class", sampling_probability=0.5),
            P("example", sampling_probability=0.4, population=PEOPLE),
        ),
        clip="example",
    ),
    "grouped": person(GROUPED),
    "independent": person(
        jde.IndependentEpisodes(
            M(W("class", size=2, population=CLASSES), BELOW), num_episodes=3
        )
    ),
    "blocks": person(blocks(episodes_per_block=2)),
    "some of the blocks": person(blocks(W("episode", size=2), episodes_per_block=2)),
}
STEPS["the step"] = dataclasses.replace(STEPS["coins"], clip_unit="step")


@pytest.mark.parametrize("name", STEPS)
def test_the_sampler_holds_her_as_often_as_the_table_says(name):
    """Each number of clip units, to 4.5 standard errors."""
    step, data, number = STEPS[name], everybody(), 600
    assert data.owners is not None
    codes = data.owners.codes
    sampler = sampler_of(step, data)

    def holds(draw):
        shown = (codes[draw.examples] == 2) & draw.mask
        return shown.reshape(*shown.shape[:1], -1).any(axis=1) if shown.size else ()

    sums = World(sampler, lambda draw: 1.0 * np.asarray(holds(draw))).runs(
        number, 1, np.random.default_rng(1)
    )
    weight, present, absent = person_contributions(step)
    assert np.all(absent == 0) and weight.sum() == pytest.approx(1)
    for chance, value in zip(weight, present, strict=True):
        error = 4.5 * np.sqrt(chance * (1 - chance) / number) + 2 / number
        assert np.mean(sums == value) == pytest.approx(chance, abs=error)


@pytest.mark.parametrize(
    ("step", "num_steps"),
    [
        # At noise 1 the claim is 5.9, of which 200,000 draws can show .79.
        (dataclasses.replace(STEPS["visible"], noise_multiplier=1.5), 1),
        (coins(noise=3.0), 20),
        (person(GROUPED, noise=2.0), 5),
        (person(GROUPED, noise=4.0, relation="replace_one"), 5),
    ],
)
@pytest.mark.slow
def test_a_simulated_person_shows_most_of_the_claim(step, num_steps):
    step = dataclasses.replace(step, noise_multiplier=1.5 * step.noise_multiplier)
    audit = audit_mechanism(step, delta=1e-2, num_steps=num_steps, num_draws=200_000)
    (row,) = mechanism_rows("a person", audit)
    assert row.attacker == "fixed data"
    assert not row.is_violated
    assert row.share > 0.8


@pytest.mark.parametrize(
    ("step", "others", "num_steps"),
    [
        (STEPS["visible"], 0.0, 1),
        pytest.param(coins(noise=0.9), 0.0, 1, marks=pytest.mark.slow),
        pytest.param(
            person(GROUPED, noise=1.5, relation="replace_one"),
            -0.3,
            1,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            person(blocks(people=2, size=2), noise=0.55, people=None),
            0.0,
            1,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            person(
                blocks(
                    jde.RandomAllocation("episode", steps_per_epoch=3), people=2, size=2
                ),
                noise=0.6,
                people=None,
            ),
            0.0,
            3,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_canary_person_shows_most_of_the_claim(request, step, others, num_steps):
    is_slow = request.node.get_closest_marker("slow")
    draws, share = (20_000, 0.8) if is_slow else (2_000, 0.5)
    settings = {"others": others, "num_steps": num_steps, "deltas": (0.1,)}
    audit = audit_person(step, everybody(), num_draws=draws, **settings)
    assert not audit.is_violated
    assert audit.bounds[0].epsilon > share * audit.claimed[0]


@pytest.mark.parametrize("relation", ["zero_out", "add_remove", "replace_one"])
def test_canary_people_leave_with_all_of_their_examples(relation):
    data = everybody()
    step = coins(relation=relation)
    canaries = gradient_canaries(data, step, 2, np.random.default_rng(0))
    both, one = (canaries.data(np.array([True, second])) for second in (True, False))
    marks = [table.features[:, -1] for table in (both, one)]
    assert np.bincount(marks[0].astype(int)).tolist() == [4 * CLASSES, CLASSES, CLASSES]
    if relation == "replace_one":
        np.testing.assert_array_equal(marks[1] == -2, marks[0] == 2)
        return
    assert one.num_examples == (PEOPLE - 1) * CLASSES
    assert not np.any(marks[1] == 2)
    assert one.num_units["class"] == CLASSES  # the public list


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_steps_of_a_trainer_with_a_canary_person_stand(relation):
    noise = 0.9 if relation == "zero_out" else 2.0
    step = person(GROUPED, noise=noise, relation=relation)
    learner, params = protonet()
    training = Training(
        learner,
        params,
        everybody(2),
        PlainBudget(step, 1e9, 1e-5, 6, 6),
        1,
        adam(0.05),
        0.5,
    )
    audit = audit_steps(training, num_draws=2_000, deltas=(0.1,))
    assert not audit.is_violated
    assert audit.bounds[0].epsilon > 0.5 * audit.claimed[0]


def test_what_cannot_be_audited_is_refused():
    data, step = everybody(), STEPS["coins"]
    example = dataclasses.replace(step, privacy_unit="example", people=None)
    with pytest.raises(ValueError, match="must have privacy_unit='person'"):
        audit_person(example, data)
    with pytest.raises(ValueError, match="others must lie in"):
        audit_person(step, data, others=-2.0)
    with pytest.raises(ValueError, match="classes must be at least .* has, 9, got 3"):
        fewer = jde.PersonBounds(classes=3, examples=1)
        audit_person(dataclasses.replace(step, people=fewer), data)
    with pytest.raises(ValueError, match="person must have an example"):
        audit_person(step, data, person=PEOPLE)
    with pytest.raises(ValueError, match="at most 6, the number of people"):
        gradient_canaries(data, step, 7, np.random.default_rng(0))
    world = World(sampler_of(step, data), lambda draw: np.full(len(draw.units), 2.0))
    with pytest.raises(ValueError, match="at most 1 clip norm"):
        audit_worlds(world, world, noise_multiplier=1.0, claimed=[1.0], deltas=[0.1])
    few = dataclasses.replace(
        STEPS["grouped"], people=jde.PersonBounds(classes=3, examples=1)
    )
    with pytest.raises(NotImplementedError, match="audit_person, which draws it"):
        person_contributions(few)
