import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.audit import audit_release, claimed_epsilons, score_bounds
from jaxdp_episodic.trainer.data.owners import Owners
from jaxdp_episodic.trainer.data.table import ExampleTable
from jaxdp_episodic.trainer.draw.generators import Keys
from jaxdp_episodic.training import PrivateStatistics, StartConfig

RATE, DELTAS = 0.3, (1e-5, 1e-3, 1e-2, 1e-1)
STEP = jde.GaussianStep(
    jde.Poisson("u", sampling_probability=RATE), noise_multiplier=1.0
)
CLAIMED = claimed_epsilons(STEP, 1, DELTAS)


def mechanism(*, noise=1.0, length=1.0, rate=RATE):
    """A sampled Gaussian mechanism in four dimensions, optionally with a fault."""

    def release(key, with_unit):
        coin, other = jax.random.split(key)
        released = noise * jax.random.normal(other, (4,), jnp.float32)
        if not with_unit:
            return {"sum": released}
        drawn = jax.random.uniform(coin, (), jnp.float32) < rate
        return {"sum": released.at[2].add(jnp.where(drawn, length, 0.0))}

    return release


def third(released):
    return released["sum"][2]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fault", "score"),
    [
        ({"noise": 0.5}, None),
        ({"length": 2.0}, third),
        ({"rate": 1.0}, None),
    ],
    ids=["noise", "length", "rate"],
)
def test_planted_faults_are_found(fault, score):
    audit = audit_release(
        mechanism(**fault),
        claimed=CLAIMED,
        deltas=DELTAS,
        num_draws=10_000,
        is_jax=True,
        score=score,
    )
    assert audit.is_violated


def test_unbatched_calls_get_a_key_and_the_membership():
    calls = []

    def release(key, with_unit):
        calls.append((tuple(np.asarray(jax.random.key_data(key)).tolist()), with_unit))
        generator = np.random.default_rng(calls[-1][0])
        return generator.normal(size=3) + (5.0 if with_unit else 0.0)

    told = []
    audit = audit_release(
        release,
        claimed=[0.1],
        deltas=[1e-2],
        num_draws=200,
        on_draws=told.append,
    )
    assert audit.is_violated
    assert sum(told) == len(calls) == 400
    assert len({key for key, _ in calls}) == 400
    assert sum(with_unit for _, with_unit in calls) == 200


def test_differences_in_both_directions_are_found():
    rng = np.random.default_rng(0)
    plain, often = rng.normal(size=(2, 4000)), rng.normal(size=(2, 4000))
    often[:, ::5] += 8.0  # one score in five is far off
    forward = score_bounds((often[0], plain[0]), (often[1], plain[1]), [1e-3])[0]
    backward = score_bounds((plain[0], -often[0]), (plain[1], -often[1]), [1e-3])[0]
    assert forward.direction == "forward"
    assert backward.direction == "backward"
    assert min(forward.epsilon, backward.epsilon) > 4
    assert forward.hits >= 790 and forward.false_hits <= 1
    assert backward.hits >= 790 and backward.false_hits <= 1
    # A score with the wrong sign proves nothing.
    assert score_bounds((-often[0], plain[0]), (-often[1], plain[1]), [1e-3])[0][0] == 0


@pytest.mark.slow
def test_release_audits_keep_their_confidence():
    """A mechanism whose claim is tight, audited 300 times."""
    edge = float(np.log(0.6 / 0.2))
    rng = np.random.default_rng(3)
    accused = 0
    for _ in range(300):
        scores = [(rng.random((2, 400)) < p).astype(float) for p in (0.6, 0.2)]
        pilot, rest = ((scores[0][i], scores[1][i]) for i in (0, 1))
        # At delta = 0 neither direction of this mechanism is above the edge.
        accused += score_bounds(pilot, rest, [1e-9])[0].epsilon > edge
    assert accused <= 0.05 * 300 + 3 * np.sqrt(300 * 0.05 * 0.95)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"claimed": [1.0, 2.0]}, "claimed"),
        ({"num_draws": 5}, "num_draws"),
        ({"deltas": [0.0]}, "deltas"),
        ({"confidence": 0.2}, "confidence"),
        ({"score": lambda released: np.nan}, "NaN"),
    ],
)
def test_bad_input_is_refused(changes, complaint):
    settings = {"claimed": [1.0], "deltas": [1e-2], "num_draws": 100, **changes}
    with pytest.raises(ValueError, match=complaint):
        audit_release(lambda key, with_unit: np.zeros(2), **settings)


# --- Private statistics audited by a canary ---


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
def test_a_statistic_keeps_its_claim_and_half_of_its_noise_is_found(
    unit, config, place, relation
):
    audit = audited(place, unit, config, relation)
    assert not audit.is_violated
    # And it comes close, so the audit would detect a fault.
    found = [bound.epsilon for bound in audit.bounds]
    assert np.max(np.array(found) / audit.claimed) > 0.4

    assert audited(place, unit, config, relation, noise=NOISE / 2).is_violated
