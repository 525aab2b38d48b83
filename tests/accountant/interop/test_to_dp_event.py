"""People as events of dp_accounting: mixtures of Gaussians, if no draw reacts."""

import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from scipy import stats

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.interop.dp_accounting import to_dp_event
from jaxdp_episodic.accountant.interop.dp_event import from_dp_event

THEIRS = {
    "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
}
BINOMIAL = stats.binom.pmf(np.arange(13), 12, 0.1)
OF_USERS = 0.25 * stats.binom.pmf(np.arange(9), 8, 0.2) + 0.75 * np.eye(9)[0]


def poisson(name, rate, **options):
    return jde.Poisson(name, sampling_probability=rate, **options)


def person(*levels, clip_unit=None, relation="add_remove", **bounds):
    return jde.GaussianStep(
        jde.MultistageSampling(*levels),
        noise_multiplier=4.0,
        clip_unit=clip_unit,
        privacy_unit="person",
        people=jde.PersonBounds(**bounds),
        neighboring_relation=relation,
    )


EXAMPLE = poisson("example", 0.1)
USERS = jde.GaussianStep(
    jde.MultistageSampling(
        poisson("user", 0.25), poisson("example", 0.2, population=8)
    ),
    noise_multiplier=4.0,
    clip_unit="example",
    privacy_unit="user",
)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("step", "law"),
    [
        pytest.param(person(EXAMPLE, examples=12), BINOMIAL, marks=pytest.mark.slow),
        (person(EXAMPLE, examples=12, relation="zero_out"), BINOMIAL),
        # Every drawn class contains the person.
        (
            person(
                poisson("class", 0.1),
                poisson("example", 1.0),
                clip_unit="class",
                relation="zero_out",
                classes=12,
                examples=2,
            ),
            BINOMIAL,
        ),
        (USERS, OF_USERS),
    ],
)
def test_people_without_reactions_are_a_mixture_of_gaussians(step, law):
    event = to_dp_event(step)
    assert event.standard_deviation == 4.0
    np.testing.assert_array_equal(event.sensitivities, np.arange(len(law)))
    np.testing.assert_allclose(event.sampling_probs, law, rtol=1e-11)
    theirs = PLDAccountant(
        THEIRS[step.neighboring_relation], value_discretization_interval=1e-2
    )
    bound = theirs.compose(to_dp_event(jde.compose((step, 50)))).get_epsilon(1e-6)
    value = jde.epsilon(step, num_steps=50, delta=1e-6)
    assert value <= bound <= value * (1 + 2e-3)
    back = from_dp_event(event, neighboring_relation=step.neighboring_relation)
    again = jde.epsilon(jde.compose((back, 50)), delta=1e-6)
    assert again == pytest.approx(value, rel=1e-9)


def draws(size, population):
    return jde.WithoutReplacement("example", size=size, population=population)


@pytest.mark.parametrize(
    "step",
    [
        person(EXAMPLE, examples=12, relation="replace_one"),
        # The example drawn in the place of the person's reveals the draw.
        person(
            poisson("class", 0.1),
            draws(2, 20),
            clip_unit="class",
            classes=12,
            examples=1,
        ),
        person(draws(4, 100), examples=12, relation="zero_out"),
        # Which classes are drawn is visible.
        person(
            poisson("class", 0.1), EXAMPLE, clip_unit="example", classes=3, examples=2
        ),
        jde.GaussianStep(
            jde.PeopleBlocks(
                num_people=20, people_per_block=2, episodes=poisson("episode", 0.5)
            ),
            noise_multiplier=4.0,
        ),
    ],
)
def test_other_people_have_no_event(step):
    with pytest.raises(NotImplementedError, match="has no event in dp_accounting"):
        to_dp_event(step)
