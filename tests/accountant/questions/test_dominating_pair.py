"""The dominating pair of each design: one row per theorem."""

from __future__ import annotations

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses.gaussian_mixtures import (
    AntipodalGaussianLoss,
    SwappedGaussianLoss,
    ZeroedGaussianLoss,
)
from jaxdp_episodic.accountant.losses.independent_episodes import ZeroedEpisodesLoss
from jaxdp_episodic.accountant.losses.sampled_gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair

NOISE = 2.0
ADD, SWAP, ZERO = "add_remove", "replace_one", "zero_out"
SITE = jde.Poisson("site", sampling_probability=0.5)
COIN = jde.Poisson("group", sampling_probability=0.25, population=12)
HAND = jde.WithoutReplacement("group", size=3, population=12)  # rate 1/4 as well
ALL = jde.WithoutReplacement("group", size=12, population=12)
MORE = jde.WithoutReplacement("group", size=13, population=12, population_is_exact=True)
USER = jde.Poisson("user", sampling_probability=0.125, population=4)
SOME = jde.WithoutReplacement("user", size=2, population=8)
NINE = jde.WithoutReplacement("user", size=9, population=8)
SAMPLED, SWAPPED = SampledGaussianLoss, SwappedGaussianLoss
ANTIPODAL, ZEROED = AntipodalGaussianLoss, ZeroedGaussianLoss
# Levels, clip unit, privacy unit, relation; then kind, rates and sensitivity.
THREE = (SITE, COIN, USER)
ROWS = [
    (THREE, "step", "user", ADD, SWAPPED, (1, 1 / 64), 2),
    (THREE, "step", "group", SWAP, SWAPPED, (1, 1 / 8), 2),
    (THREE, "site", "user", ADD, ANTIPODAL, (1, 1 / 2, 1 / 32), 1),
    (THREE, "group", "user", ADD, ANTIPODAL, (1 / 2, 1 / 4, 1 / 8), 1),
    (THREE, "group", "user", SWAP, ANTIPODAL, (1 / 2, 1 / 4, 1 / 8), 1),
    (THREE, "group", "group", ADD, SAMPLED, (1 / 2, 1 / 4), 1),
    (THREE, "group", "group", SWAP, ANTIPODAL, (1 / 2, 1 / 4, 1), 1),
    (THREE, "user", "user", ADD, SAMPLED, (1 / 8, 1 / 8), 1),
    ((SITE, HAND, USER), "group", "user", ADD, SWAPPED, (1 / 2, 1 / 32), 2),
    ((SITE, HAND, USER), "group", "user", SWAP, SWAPPED, (1 / 2, 1 / 32), 2),
    ((SITE, HAND, USER), "group", "group", ADD, SAMPLED, (1 / 2, 1 / 4), 2),
    ((SITE, HAND, USER), "group", "group", SWAP, SWAPPED, (1 / 2, 1 / 4), 2),
    ((SITE, HAND, USER), "user", "user", SWAP, ANTIPODAL, (1 / 8, 1 / 8, 1), 1),
    ((SITE, ALL, USER), "group", "group", SWAP, SWAPPED, (1 / 2, 1), 2),
    # One of 13 groups is left out.
    ((SITE, ALL, USER), "group", "group", ADD, SAMPLED, (1 / 2, 1), 2),
    ((SITE, MORE, USER), "group", "group", ADD, SAMPLED, (1 / 2, 1), 1),
    ((COIN, SOME), "group", "user", ZERO, ZEROED, (1, 1 / 4, 1 / 4), 1),
    ((COIN, SOME), "user", "user", ZERO, ZEROED, (1 / 4, 1, 1 / 4), 1),
    ((COIN, USER), "user", "user", ZERO, SAMPLED, (1 / 4, 1 / 8), 1),
    ((COIN, SOME), "step", "user", ZERO, ZEROED, (1, 1, 1 / 16), 1),
    ((HAND, SOME), "group", "user", ZERO, ZEROED, (1, 1, 1 / 16), 1),
    ((HAND, SOME), "group", "group", ZERO, ZEROED, (1, 1, 1 / 4), 1),
    ((HAND, NINE), "group", "user", ZERO, ZEROED, (1, 1, 1 / 4), 1),
    ((COIN, SOME), "group", "group", ZERO, SAMPLED, (1, 1 / 4), 1),
    ((COIN, SOME), "user", "group", ZERO, SAMPLED, (1, 1 / 4), 2),
    ((HAND, USER), "user", "group", ZERO, ZEROED, (1, 1, 1 / 4), 4),
]


def assert_pair(step, kind, rates, sensitivity):
    pair = dominating_pair(step)
    assert type(pair) is kind
    fields = [float(np.squeeze(field)) for field in pair.fields]
    assert fields == [*rates, sensitivity / NOISE]


@pytest.mark.parametrize("levels, clip, unit, relation, kind, rates, sensitivity", ROWS)
def test_multistage(levels, clip, unit, relation, kind, rates, sensitivity):
    step = jde.GaussianStep(
        jde.MultistageSampling(*levels),
        noise_multiplier=NOISE,
        clip_unit=clip,
        privacy_unit=unit,
        neighboring_relation=relation,
    )
    assert_pair(step, kind, rates, sensitivity)


HALF = {"episodes": jde.Poisson("episode", sampling_probability=0.5)}
ONE = {"episodes": jde.WithoutReplacement("episode", size=1)}
TEN = {"classes": jde.WithoutReplacement("class", size=10)}


@pytest.mark.parametrize(
    "drawn, unit, relation, kind, rates",
    [
        (HALF, "example", ADD, ANTIPODAL, (1, 1 / 2, 1 / 4)),
        (HALF, "example", SWAP, ANTIPODAL, (1, 1 / 2, 1 / 4)),
        (HALF, "class", ADD, ANTIPODAL, (1, 1 / 2, 1)),
        (HALF, "class", SWAP, ANTIPODAL, (1, 1 / 2, 1)),
        (HALF, "example", ZERO, ZEROED, (1, 1 / 2, 1 / 4)),
        (HALF, "class", ZERO, SAMPLED, (1, 1 / 2)),
        (ONE, "example", ZERO, ZEROED, (1, 1, 1 / 16)),
        (TEN, "example", ZERO, ZEROED, (1, 1, 1 / 8)),
        (TEN, "class", ZERO, ZEROED, (1, 1, 1 / 2)),
    ],
)
def test_grouped_classes(drawn, unit, relation, kind, rates):
    examples = jde.WithoutReplacement("example", size=4, population=16)
    step = jde.GaussianStep(
        jde.GroupedClasses(num_classes=20, ways=5, examples=examples, **drawn),
        noise_multiplier=NOISE,
        privacy_unit=unit,
        neighboring_relation=relation,
    )
    assert_pair(step, kind, rates, 1)


def test_independent_episodes_with_slots():
    step = jde.GaussianStep(
        jde.IndependentEpisodes(jde.MultistageSampling(HAND, SOME), num_episodes=3),
        noise_multiplier=NOISE,
        neighboring_relation=ZERO,
    )
    pair = dominating_pair(step)
    assert type(pair) is ZeroedEpisodesLoss
    fields = [float(np.squeeze(field)) for field in pair.fields[:4]]
    assert fields == [1, 1 / 16, 1 / NOISE, 3]
