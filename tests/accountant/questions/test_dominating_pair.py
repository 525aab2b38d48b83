"""Which dominating pair a step gets: one row of the theorems each."""

from __future__ import annotations

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair, run_of

SITE = jde.Poisson("site", sampling_probability=0.5)
COIN = jde.Poisson("group", sampling_probability=0.25)
HAND = jde.WithoutReplacement("group", size=3, population=12)  # rate 1/4 as well
ALL = jde.WithoutReplacement("group", size=12, population=12)
MORE = jde.WithoutReplacement("group", size=13, population=12, population_is_exact=True)
USER = jde.Poisson("user", sampling_probability=0.125)
ADD, SWAP = "add_remove", "replace_one"
# (middle level, clip unit, privacy unit, relation),
# then (kind, outer rate, rate, inner rate, sensitivity).
KINDS = {
    "sampled": SampledGaussianLoss,
    "swapped": SwappedGaussianLoss,
    "antipodal": AntipodalGaussianLoss,
}
NOISE = 2.0
ROWS = [
    (COIN, "step", "user", ADD, "swapped", 1, 1 / 64, 1, 2),
    (COIN, "step", "group", SWAP, "swapped", 1, 1 / 8, 1, 2),
    (COIN, "site", "user", ADD, "antipodal", 1, 1 / 2, 1 / 32, 1),
    (COIN, "group", "user", ADD, "antipodal", 1 / 2, 1 / 4, 1 / 8, 1),
    (COIN, "group", "user", SWAP, "antipodal", 1 / 2, 1 / 4, 1 / 8, 1),
    (COIN, "group", "group", ADD, "sampled", 1 / 2, 1 / 4, 1, 1),
    (COIN, "group", "group", SWAP, "antipodal", 1 / 2, 1 / 4, 1, 1),
    (COIN, "user", "user", ADD, "sampled", 1 / 8, 1 / 8, 1, 1),
    (HAND, "group", "user", ADD, "swapped", 1 / 2, 1 / 32, 1, 2),
    (HAND, "group", "user", SWAP, "swapped", 1 / 2, 1 / 32, 1, 2),
    (HAND, "group", "group", ADD, "sampled", 1 / 2, 1 / 4, 1, 2),
    (HAND, "group", "group", SWAP, "swapped", 1 / 2, 1 / 4, 1, 2),
    (HAND, "user", "user", SWAP, "antipodal", 1 / 8, 1 / 8, 1, 1),
    (ALL, "group", "group", SWAP, "swapped", 1 / 2, 1, 1, 2),
    (ALL, "group", "group", ADD, "sampled", 1 / 2, 1, 1, 2),  # of 13, one is left out
    (MORE, "group", "group", ADD, "sampled", 1 / 2, 1, 1, 1),
]


def loss_of(kind, outer, rate, inner, sensitivity):
    """The expected pair; two of the kinds have no inner rate."""
    rates = (outer, rate, inner) if kind == "antipodal" else (outer, rate)
    return KINDS[kind](*rates, sensitivity / NOISE)


def resolved(step):
    return dominating_pair(step).map(lambda field: float(np.squeeze(field)))


@pytest.mark.parametrize(
    "middle, clip, unit, relation, kind, outer, rate, inner, sensitivity", ROWS
)
def test_multistage(
    middle, clip, unit, relation, kind, outer, rate, inner, sensitivity
):
    step = jde.GaussianStep(
        jde.MultistageSampling(SITE, middle, USER),
        noise_multiplier=NOISE,
        clip_unit=clip,
        privacy_unit=unit,
        neighboring_relation=relation,
    )
    assert resolved(step) == loss_of(kind, outer, rate, inner, sensitivity)


EXAMPLES = jde.WithoutReplacement("example", size=4, population=16)


@pytest.mark.parametrize("relation", [ADD, SWAP])
@pytest.mark.parametrize("unit, inner", [("example", 1 / 4), ("class", 1)])
def test_grouped_classes_with_a_coin_for_each_episode(relation, unit, inner):
    design = jde.GroupedClasses(
        num_classes=20,
        ways=5,
        episodes=jde.Poisson("episode", sampling_probability=0.5),
        examples=EXAMPLES,
    )
    step = jde.GaussianStep(
        design,
        noise_multiplier=NOISE,
        privacy_unit=unit,
        neighboring_relation=relation,
    )
    assert resolved(step) == loss_of("antipodal", 1, 1 / 2, inner, 1)


def test_what_a_run_keeps_of_itself_cannot_be_changed():
    step = jde.GaussianStep(
        jde.Poisson("unit", sampling_probability=[0.0, 0.5]), noise_multiplier=0.0
    )
    run = run_of(step, np.array(3))
    for kept, expected in ((run.loses_nothing, 0), (run.is_unprotected, 1)):
        assert kept.reshape(-1).argmax() == expected
        with pytest.raises(ValueError, match="read-only"):
            kept[...] = True
