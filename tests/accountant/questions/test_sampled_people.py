"""People whose examples are drawn in batches of fixed size, by all draws there are."""

import dataclasses
import itertools

import numpy as np
import pytest

import jaxdp_episodic as jde

NOISE = 1.3
AT = np.linspace(-12, 12, 2_401)


def law(examples, size):
    """Density of the noised sum of a sample of the examples, times the grid's step."""
    sums = [sum(some) for some in itertools.combinations(examples, size)]
    gaussians = np.exp(-0.5 * ((AT[:, None] - np.array(sums)) / NOISE) ** 2)
    return gaussians.mean(axis=1) * (AT[1] - AT[0]) / (NOISE * np.sqrt(2 * np.pi))


def attained(own, others, size, epsilon):
    """The largest divergence over what all examples may contribute, 1 at most."""
    found = 0.0
    for signs in itertools.product((-1.0, 0.0, 1.0), repeat=own + 1):
        hers, other = signs[:own], signs[own]
        with_her = law([*hers, *[other] * others], size)
        without = law([other] * others, min(size, others))
        for p, q in ((with_her, without), (without, with_her)):
            found = max(found, np.maximum(p - np.exp(epsilon) * q, 0).sum())
    return found


@pytest.mark.parametrize(
    ("own", "others", "size"), [(2, 3, 2), (2, 4, 1), (3, 3, 2), (2, 2, 3)]
)
@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_no_draw_is_above_the_mixture(own, others, size, epsilon):
    step = jde.GaussianStep(
        jde.WithoutReplacement("example", size=size, population=own + others),
        noise_multiplier=NOISE,
        privacy_unit="person",
        people=jde.PersonBounds(examples=own),
    )
    bound = jde.delta(step, num_steps=1, epsilon=epsilon)
    true = attained(own, others, size, epsilon)
    assert true <= bound * (1 + 1e-4)
    if size > others:
        return
    assert bound <= true * (1 + 1e-4)  # hers all one way, the others the other
    # As if nobody took her place: exceeded.
    alone = dataclasses.replace(step, noise_multiplier=2 * NOISE)
    assert jde.delta(alone, num_steps=1, epsilon=epsilon) < true


def test_many_examples_of_a_person_are_counted_in_another_way():
    def epsilon(number):
        step = jde.GaussianStep(
            jde.WithoutReplacement("example", size=300, population=2_000),
            noise_multiplier=200.0,
            privacy_unit="person",
            people=jde.PersonBounds(examples=number),
        )
        return jde.epsilon(step, num_steps=1, delta=1e-5)

    assert 0 < epsilon(20) < epsilon(900) < np.inf
