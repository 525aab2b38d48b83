import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.audit import audit_release, claimed_epsilons, score_bounds

RATE, DELTAS = 0.3, (1e-5, 1e-3, 1e-2, 1e-1)
STEP = jde.GaussianStep(
    jde.Poisson("u", sampling_probability=RATE), noise_multiplier=1.0
)
CLAIMED = claimed_epsilons(STEP, 1, DELTAS)


def mechanism(*, noise=1.0, length=1.0):
    """A sampled Gaussian mechanism in four dimensions, optionally with a fault."""

    def release(key, with_unit):
        coin, other = jax.random.split(key)
        released = noise * jax.random.normal(other, (4,), jnp.float32)
        if not with_unit:
            return {"sum": released}
        drawn = jax.random.uniform(coin, (), jnp.float32) < RATE
        return {"sum": released.at[2].add(jnp.where(drawn, length, 0.0))}

    return release


def third(released):
    return released["sum"][2]


@pytest.mark.parametrize(
    ("fault", "score"),
    [
        ({"noise": 0.5}, None),
        pytest.param({"length": 2.0}, third, marks=pytest.mark.slow),
    ],
    ids=["noise", "length"],
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
        release, claimed=[0.1], deltas=[1e-2], num_draws=200, on_draws=told.append
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
