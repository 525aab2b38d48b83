"""Random settings of every design on both engines: one answer, two ways to it."""

import numpy as np
import pytest

import jaxdp_episodic as jde

# Of each design; 2,000 in all.
NUM_SETTINGS = 250


def spread(generator, low, high):
    return np.exp(generator.uniform(np.log(low), np.log(high), NUM_SETTINGS))


def poisson(generator, name, low=1e-3, high=0.9):
    return jde.Poisson(name, sampling_probability=spread(generator, low, high))


def levels(generator):
    return jde.MultistageSampling(
        poisson(generator, "school"), poisson(generator, "class")
    )


def clipped(unit, relation="add_remove", privacy_unit=None):
    def step(generator, noise):
        return jde.GaussianStep(
            levels(generator),
            noise_multiplier=noise,
            clip_unit=unit,
            privacy_unit=privacy_unit,
            neighboring_relation=relation,
        )

    return step


def sampled(generator, noise):
    return jde.GaussianStep(poisson(generator, "unit"), noise_multiplier=noise)


def episodes(generator, noise):
    numbers = generator.integers(1, 13, NUM_SETTINGS)
    design = jde.IndependentEpisodes(poisson(generator, "unit"), num_episodes=numbers)
    return jde.GaussianStep(design, noise_multiplier=noise)


def grouped(generator, noise):
    design = jde.GroupedClasses(
        num_classes=100,
        ways=5,
        episodes=poisson(generator, "episode"),
        examples=jde.WithoutReplacement("example", size=3, population=20),
    )
    return jde.GaussianStep(design, noise_multiplier=noise)


DESIGNS = {
    "sampled": sampled,
    "antipodal": clipped("school"),
    "below an outer level": clipped("class"),
    "under replace_one": clipped("class", "replace_one"),
    "under zero_out": clipped("school", "zero_out", "class"),
    "whole steps": clipped("step"),
    "grouped": grouped,
    "episodes": episodes,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DESIGNS)
def test_engines_agree(name):
    generator = np.random.default_rng(sorted(DESIGNS).index(name))
    noise = spread(generator, 0.5, 20.0)
    step = DESIGNS[name](generator, noise)
    steps = np.rint(spread(generator, 2.0, 5_000.0)).astype(int)
    delta = spread(generator, 1e-10, 1e-3)
    found = {}
    for engine in ("numpy", "jax"):
        ask = {"num_steps": steps, "engine": engine}
        exact, info = jde.epsilon(step, delta=delta, return_info=True, **ask)
        bound = jde.epsilon(step, delta=delta, method="rdp", **ask)
        curve = jde.rdp(step, np.array([1.5, 4.0, 32.0]), engine=engine)
        ends = jde.epsilon_interval(step, delta=delta, **ask)
        found[engine] = exact, bound, curve, info, ends
    (ours, *one, info, our_ends), (theirs, *other, _, ends) = found.values()
    (bound, curve), (other_bound, other_curve) = one, other
    np.testing.assert_allclose(curve, other_curve, rtol=1e-12)
    # Best orders may be 2,000, where the moment is made of exponents of 5e4: their
    # rounding alone moves its logarithm by 1e-11.
    np.testing.assert_allclose(bound, other_bound, rtol=1e-10)
    known = ~info.is_certified_bound
    assert np.mean(known) > 0.9
    for value, (low, high) in ((theirs, our_ends), (ours, ends)):
        slack = info.error + 1e-12 * value
        assert np.all(low <= value + slack)
        # An upper bound is that of either method.
        assert np.all((value <= high + slack)[known])
    # What is only known up to its error differs by rounding, within it: with as many
    # nodes as 1e-9 takes sums of episodes would take three times as long.
    gap = np.abs(ours - theirs)[known]
    allowed = np.maximum(1e-9 * ours, 2 * info.error)[known]
    assert np.all(gap <= allowed), np.max(gap / allowed)
