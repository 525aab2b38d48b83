"""RDP of every kind of dominating pair against adaptive quadrature in long double.

Settings are drawn at random over the whole range that users can ask for: rates from
1e-12 to 1, noise from 0.05 to 1000, orders from 1 + 1e-6 to 4096. An answer below the
truth would be an unsound guarantee, so no error of more than 1e-10 is let through in
either direction.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

import jaxdp_episodic as jde
from oracles import moments

KINDS = ("sampled", "fixed size", "swapped", "antipodal", "episodes")
RELATIVE = 1e-10


class Setting(NamedTuple):
    """One random question; unused numbers are 1."""

    kind: str
    outer_rate: float
    rate: float
    inner_rate: float
    num_episodes: int
    noise: float
    alpha: float


def random_rate(rng) -> float:
    """Log-uniform, or close to 1, or one of the ends."""
    choice = rng.random()
    if choice < 0.7:
        return float(10 ** rng.uniform(-12, 0))
    if choice < 0.9:
        return float(1 - 10 ** rng.uniform(-12, -0.3))
    return float(rng.choice([1e-12, 0.5, 1.0]))


def random_order(rng) -> float:
    choice = rng.random()
    if choice < 0.1:
        return float(rng.choice([1 + 1e-6, 1.5, 2.0, 4096.0]))
    return float(1 + 10 ** rng.uniform(-6, np.log10(4095)))


def random_settings(kind, count, seed) -> list[Setting]:
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    return [
        Setting(
            kind,
            outer_rate=random_rate(rng) if rng.random() < 0.5 else 1.0,
            rate=random_rate(rng),
            inner_rate=random_rate(rng),
            num_episodes=int(rng.integers(1, 6)),
            noise=float(10 ** rng.uniform(np.log10(0.05), 3)),
            alpha=random_order(rng),
        )
        for _ in range(count)
    ]


def column(settings, field):
    return np.array([getattr(setting, field) for setting in settings])


def fixed_sizes(settings):
    """Sizes and populations whose quotients are about the asked rates."""
    population = np.full(len(settings), 10**12)
    size = np.round(population * column(settings, "rate")).astype(np.int64)
    return np.maximum(size, 1), population


def step_of(settings) -> jde.GaussianStep:
    """One step, of the kind of all the settings, with a setting an element."""
    kind = settings[0].kind
    noise, rate = column(settings, "noise"), column(settings, "rate")
    inner = jde.Poisson("user", sampling_probability=column(settings, "inner_rate"))
    group = jde.Poisson("group", sampling_probability=rate)
    if kind == "episodes":
        sampling = jde.IndependentEpisodes(
            jde.Poisson("user", sampling_probability=rate),
            num_episodes=column(settings, "num_episodes"),
        )
        return jde.GaussianStep(sampling, noise_multiplier=noise)
    region = jde.Poisson("region", sampling_probability=column(settings, "outer_rate"))
    if kind == "antipodal":
        levels, relation = (region, group, inner), "add_remove"
    elif kind == "sampled":
        levels, relation = (region, group), "add_remove"
    else:
        size, population = fixed_sizes(settings)
        fixed = jde.WithoutReplacement("group", size=size, population=population)
        levels = (region, fixed)
        relation = "add_remove" if kind == "fixed size" else "replace_one"
    return jde.GaussianStep(
        jde.MultistageSampling(*levels),
        noise_multiplier=noise,
        clip_unit="group",
        neighboring_relation=relation,
    )


def truth(setting, direction) -> float:
    """The same RDP by the oracle."""
    kind, outer, rate, inner, episodes, noise, alpha = setting
    if kind in ("fixed size", "swapped"):
        size, population = fixed_sizes([setting])
        rate = float(size[0] / population[0])
    if kind == "episodes":
        outer = 1.0
        log_moment = moments.fine_independent_episodes(episodes, rate, 1 / noise, alpha)
    elif kind == "antipodal":
        log_moment = moments.fine_symmetric(rate, inner, 1 / noise, alpha)
    elif kind == "swapped":
        log_moment = moments.fine_swapped(rate, 2 / noise, alpha)
    else:
        shift = (1 if kind == "sampled" else 2) / noise
        log_moment = moments.fine_sampled_gaussian(
            rate, shift, alpha, direction=direction
        )
    return moments.rdp_from_log_moment(log_moment, alpha, r_out=outer)


def assert_exact(settings, direction):
    """Checks every setting at its own order."""
    # The diagonal of (setting, order), in blocks so that little of it is wasted.
    for start in range(0, len(settings), 8):
        block = settings[start : start + 8]
        table = jde.rdp(step_of(block), column(block, "alpha"), direction=direction)
        for setting, actual in zip(block, np.diagonal(table), strict=True):
            expected = truth(setting, direction)
            assert np.isfinite(actual), (setting, direction)
            assert actual >= expected * (1 - RELATIVE), (setting, direction, expected)
            assert actual <= expected * (1 + RELATIVE), (setting, direction, expected)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_settings(kind, direction):
    assert_exact(random_settings(kind, 16, seed=1), direction)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_rates_just_below_one_at_large_orders(kind, direction):
    # Almost everybody is drawn: the chance of being left out is what decides.
    rng = np.random.default_rng([4, KINDS.index(kind)])
    rates = 1 - 10 ** rng.uniform(-12, -6, 8)
    settings = [
        Setting(kind, 1.0, float(rate), 0.5, 2, float(noise), float(alpha))
        for rate, noise, alpha in zip(
            rates, rng.uniform(1, 8, 8), 10 ** rng.uniform(1, 3.5, 8), strict=True
        )
    ]
    assert_exact(settings, direction)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_random_settings(kind, direction):
    seed = {"forward": 2, "backward": 3}[direction]
    assert_exact(random_settings(kind, 1000, seed), direction)
