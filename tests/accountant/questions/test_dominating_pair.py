"""The dominating pairs of episodes; `test_soundness` enumerates those of levels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses import gaussian_mixtures as mixtures
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.independent_episodes import ZeroedEpisodesLoss
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair

NOISE = 2.0
ADD, SWAP, ZERO = "add_remove", "replace_one", "zero_out"
HAND = jde.WithoutReplacement("group", size=3, population=12)
SOME = jde.WithoutReplacement("user", size=2, population=8)
ANTIPODAL, ZEROED = mixtures.AntipodalGaussianLoss, mixtures.ZeroedGaussianLoss
SAMPLED = SampledGaussianLoss

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
    pair = dominating_pair(step)
    assert type(pair) is kind
    assert [float(np.squeeze(field)) for field in pair.fields] == [*rates, 1 / NOISE]


@pytest.mark.parametrize("relation", [ADD, SWAP, ZERO])
@pytest.mark.parametrize("clip", "abc")
@pytest.mark.parametrize("unit", ["person", "a", "c"])
def test_a_product_of_rates_below_the_smallest_number_is_not_0(unit, clip, relation):
    coins = [jde.Poisson(i, sampling_probability=1e-200, population=2) for i in "abc"]
    bounds = jde.PersonBounds(examples=2, classes=2, tasks=2)
    step = jde.GaussianStep(
        jde.MultistageSampling(*coins),
        noise_multiplier=1e-3,
        clip_unit=clip,
        privacy_unit=unit,
        people=bounds if unit == "person" else None,
        neighboring_relation=relation,
    )
    assert jde.epsilon(step, delta=0.0, num_steps=1) == np.inf
    # At least log(rate^64 e^{64 63 / (2 noise^2)}) / 63.
    assert jde.rdp(step, 64.0) > 32e6 - 64 / 63 * 600 * np.log(10)


@pytest.mark.parametrize("relation", [ADD, SWAP, ZERO])
def test_a_full_batch_of_a_probability_near_0_is_not_left_out(relation):
    how = {"sampling_probability": 0.01, "neighboring_relation": relation}
    step = jde.TruncatedPoissonRelease(1.0, batch_size=289, population=1_000, **how)
    assert jde.epsilon(step, delta=1e-6, num_steps=1_000) > 2.12455  # uncut: 2.124515
    pair = dataclasses.replace(dominating_pair(step), cut_rate=np.zeros(1))
    assert not np.any(pair.loses_nothing)  # there is loss if the batch is not full
    step = jde.TruncatedPoissonRelease(1e-3, batch_size=400, population=1_000, **how)
    assert jde.rdp(step, 64.0) > (127e6 if relation != ZERO else 31e6)  # 2 / noise
    how["sampling_probability"] = 1e-320
    step = jde.TruncatedPoissonRelease(0.1, batch_size=1, population=67, **how)
    assert jde.rdp(step, 1e3) > (199_800 if relation != ZERO else 49_990)


def test_a_rare_contribution_of_a_mixture_is_not_left_out():
    step = jde.GaussianMixtureRelease(
        [0, 1], [1, 1e-200], standard_deviation=1e-3, sampling_probability=1e-200
    )
    assert jde.rdp(step, 64.0) > 31e6


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
