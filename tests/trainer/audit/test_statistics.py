"""Private statistics audited by a canary: many releases with it and without it."""

import dataclasses
import itertools

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.audit import audit_release, claimed_epsilons
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.generators import Keys
from jaxdp_episodic.training import PrivateStatistics, StartConfig

CONFIG = StartConfig(mean=0.2, within=(0.3,), total=0.5, dimensions=2)
COUPLES = dataclasses.replace(CONFIG, pairs="people", num_people=2)
MIXED = StartConfig(kind="mixed", powers=1)
ZERO_OUT, REPLACE_ONE, ADD_REMOVE = "zero_out", "replace_one", "add_remove"
RELEASES = [
    *(
        (unit, CONFIG, place, relation)
        for unit in ("example", "class")
        for place in range(3)
        for relation in (ZERO_OUT, REPLACE_ONE)
    ),
    *(("example", MIXED, place, ZERO_OUT) for place in range(2)),
    ("person", CONFIG, 0, ADD_REMOVE),
    ("person", CONFIG, 1, ZERO_OUT),
    ("person", CONFIG, 2, REPLACE_ONE),
    ("person", COUPLES, 1, REPLACE_ONE),
]
# Replace the canary's rows by rows as far away as contributions can be.
OTHERS = ((-1, 0, 0), (1, 0, 0.01), (0, 1, 0))
NOISE = 1.0


def made(num_in_last, unit, config, relation, other=None):
    """Eight classes of two examples; the last one with ``size`` or other content.

    Two people have one example each; the second may have none, or others.
    """
    rng = np.random.default_rng(0)
    features = rng.normal(size=(16, 3)).astype(np.float32)
    # Close to each other, so that the mean of a class has nearly norm 1.
    features[-2:] = (1, 0, 0), (1, 0.01, 0)
    if other is not None:
        features[-1 if unit != "class" or other == OTHERS[1] else slice(-2, None)] = (
            other
        )
    sizes, owners = np.array([2] * 7 + [num_in_last]), None
    if unit == "person":
        features, number = np.tile(features[-2:], (8, 1)), 2 if num_in_last else 1
        features = features.reshape(8, 2, 3)[:, :number].reshape(-1, 3)
        sizes, owners = np.full(8, number), Owners.from_ids([*range(number)] * 8)
    tree = jde.Population((np.array([8]), sizes), ("class", "example"))
    targets = np.ones(16, np.float32)
    if config is MIXED:
        features[-2:] = 0.0  # so that the canary's sums are as large as possible
    data = ExampleTable(features[: sizes.sum()], targets[: sizes.sum()], tree, owners)
    return PrivateStatistics(
        data,
        config,
        privacy_unit=unit,
        neighboring_relation=relation,
        slots=2,
        people=jde.PersonBounds(classes=8, examples=1),
    )


def audited(place, unit, config, relation, noise=NOISE):
    """Audit of one release with this noise, against the claim for `NOISE`.

    The canary is the last example, the last class, or the second person.
    """
    own = made(2, unit, config, relation)
    if relation != REPLACE_ONE:
        without = made(1 if unit == "example" else 0, unit, config, relation)
    else:
        without = made(2, unit, config, relation, OTHERS[place])
    state = own.initial()
    generator = np.random.default_rng(1)
    if config is MIXED:
        state = state._replace(variance=np.float32(0.1))

    keys, number = Keys(0), itertools.count()

    def released(statistics, noise):
        key = keys.new("noise", next(number))
        return statistics.noised_sum(state, place, generator, key, noise)

    direction = released(own, 0.0) - released(without, 0.0)

    step = dataclasses.replace(own.steps[place], noise_multiplier=NOISE)
    return audit_release(
        lambda _, with_unit: released(own if with_unit else without, noise),
        claimed=claimed_epsilons(step, 1),
        num_draws=4_000,
        score=lambda sums: float(np.sum(sums * direction)),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "config", "place", "relation"), RELEASES)
def test_no_statistic_exceeds_its_claim(unit, config, place, relation):
    audit = audited(place, unit, config, relation)
    assert not audit.is_violated
    # And it comes close, so the audit would detect a fault.
    found = [bound.epsilon for bound in audit.bounds]
    assert np.max(np.array(found) / audit.claimed) > 0.4


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "config", "place", "relation"), RELEASES)
def test_half_of_the_noise_is_detected(unit, config, place, relation):
    assert audited(place, unit, config, relation, noise=NOISE / 2).is_violated
