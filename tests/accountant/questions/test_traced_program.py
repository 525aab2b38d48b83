"""Functions in a compiled program: the host's numbers without callbacks."""

from typing import Any

import jax
import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic import traced
from jaxdp_episodic.accountant.questions import dominating_pair, traced_program
from jaxdp_episodic.accountant.questions.traced_program import Question

DELTA = 1e-5
NOISES = np.array([0.6, 0.8, 1.1, 2.0, 5.0])
RATES = np.array([0.3, 0.01, 1e-3, 1e-5, 0.05])


def step(noise: Any, rate: Any = 0.01, **more: Any) -> jde.GaussianStep:
    return jde.GaussianStep(
        jde.Poisson("example", sampling_probability=rate),
        noise_multiplier=noise,
        **more,
    )


def epsilon(noise: Any, rate: Any = 0.01, num_steps: Any = 1000, delta: Any = DELTA):
    asked = {"delta": delta, "num_steps": num_steps, "method": "rdp"}
    return traced.epsilon(step(noise, rate), **asked)


def plain(noise: Any, rate: Any = 0.01, num_steps: Any = 1000, delta: Any = DELTA):
    asked = {"delta": delta, "num_steps": num_steps, "method": "rdp"}
    return jde.epsilon(step(noise, rate), **asked, engine="numpy")


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    monkeypatch.setattr(traced_program, "FEWEST", len(NOISES))


@pytest.fixture
def host(monkeypatch):
    """The shapes of the host's callbacks."""
    calls = []
    known = Question.answer

    def counted(self, *given):
        calls.append(np.shape(given[-1]))
        return known(self, *given)

    monkeypatch.setattr(Question, "answer", counted)
    return calls


# --- What is compiled ---


def test_curves(host) -> None:
    """The host computes settings at and beyond the ends of ranges, and only these."""
    orders = np.array([1.5, 4.0, 64.0])
    curve = jax.jit(lambda noise: traced.rdp(step(noise, RATES), orders))
    true = jde.rdp(step(NOISES, RATES), orders)
    np.testing.assert_allclose(curve(NOISES), true, rtol=1e-12)
    assert host == []
    noises = np.where(NOISES == 2.0, 0.0, NOISES)
    np.testing.assert_allclose(
        curve(noises), jde.rdp(step(noises, RATES), orders), rtol=1e-12
    )
    assert host == [(3,)]
    with pytest.raises(Exception, match="noise_multiplier must be >= 0, got"):
        jax.block_until_ready(curve(-NOISES))
    with pytest.raises(Exception, match="noise_multiplier must not be NaN"):
        jax.block_until_ready(curve(np.nan * NOISES))


def test_small_batches_are_answered_by_the_host(host) -> None:
    few = jax.jit(jax.vmap(epsilon))(NOISES[:4])
    np.testing.assert_array_equal(few, plain(NOISES[:4]))
    assert host == [(4,)]


RDP = {"method": "rdp"}
SIZES = jde.GaussianStep(
    jde.WithoutReplacement("example", size=2, population=20), noise_multiplier=1.0
)


@pytest.mark.parametrize(
    ("kind", "one", "option", "engine"),
    [
        ("epsilon", step(1.0), RDP, "auto"),
        ("epsilon", step(1.0), RDP, "numpy"),
        ("epsilon", step(1.0), {"method": "exact"}, "auto"),
        ("rdp", step(1.0), {"direction": "backward"}, "auto"),
        ("epsilon", SIZES, RDP, "auto"),
    ],
    ids=["compiled", "numpy", "exact", "backward", "sizes"],
)
def test_settings_answered_by_the_host(
    kind, one, option, engine, monkeypatch, request
) -> None:
    monkeypatch.setenv("JAXDP_EPISODIC_ENGINE", engine)
    question = Question(kind, one, {}, ("noise_multiplier",), option)
    is_compiled = request.node.callspec.id == "compiled"
    for words in (((),), ((), (0,))):
        assert traced_program.is_in_program(question, words) == is_compiled
    assert not traced_program.is_in_program(question, ((), (0,), (0, 0)))


# --- The pair of what is drawn by coins ---


def levels(*rates: float, **options: Any) -> jde.GaussianStep:
    names = "school", "class", "child"
    coins = (
        jde.Poisson(name, sampling_probability=rate)
        for name, rate in zip(names, rates, strict=False)
    )
    return jde.GaussianStep(
        jde.MultistageSampling(*coins), noise_multiplier=0.7, **options
    )


def test_the_compiled_pair_equals_the_theorems() -> None:
    for one in (
        levels(0.2),
        levels(0.2, 0.3, clip_unit="class"),
        levels(0.2, 0.3, 0.4, clip_unit="child", neighboring_relation="zero_out"),
        levels(0.2, 0.3, 0.4, clip_unit="class", privacy_unit="class"),
        levels(0.2, 0.3, clip_unit="school", privacy_unit="school"),
    ):
        assert dominating_pair.poisson_levels(one)
        true = dominating_pair.dominating_pair(one)
        pair = dominating_pair.poisson_pair(one)
        assert type(true) is type(pair)
        fields = zip(pair.fields, true.fields, strict=True)
        assert all(np.all(a == np.squeeze(b)) for a, b in fields)


def test_other_designs_are_left_to_the_host() -> None:
    tree = jde.Population.from_sizes([[30, 12], [11, 40]])
    for one in (
        levels(0.2, neighboring_relation="replace_one"),
        levels(0.2, 0.3, clip_unit="school"),
        levels(0.2, 0.3, clip_unit="class", population=tree),
        levels(0.2, 0.3, clip_unit="step"),
        jde.LaplaceRelease(1.0, sampling_probability=0.2),
        jde.GaussianStep(
            jde.MultistageSampling(
                jde.Poisson("school", sampling_probability=0.2),
                jde.WithoutReplacement("class", size=2, population=9),
            ),
            noise_multiplier=1.0,
            clip_unit="school",
            privacy_unit="school",
        ),
    ):
        assert dominating_pair.poisson_levels(one) == ()


# --- Searches ---


@pytest.mark.slow
def test_epsilons_and_derivatives(host, monkeypatch) -> None:
    """By each number, also if the host computes some settings or a small batch."""
    counts, deltas = np.array([1e4, 10.0, 1e3, 1e5, 0.0]), np.full(5, 1e-6)
    at = NOISES, RATES, counts, deltas
    by = tuple(range(4))
    each = jax.jit(jax.vmap(jax.value_and_grad(epsilon, by)))
    value, slopes = each(*at)
    assert host and set(host) == {(1,)}  # no steps
    np.testing.assert_allclose(value, plain(*at), rtol=1e-12)
    monkeypatch.setattr(traced_program, "FEWEST", 100)
    _, true = jax.vmap(jax.value_and_grad(epsilon, by))(*at)
    for slope, one in zip(slopes, true, strict=True):
        np.testing.assert_allclose(slope, one, rtol=2e-8)
    assert np.all(np.isfinite(slopes[0][:4]))
    bends = jax.vmap(jax.hessian(epsilon))(NOISES)
    assert np.all(np.isfinite(bends)) and np.all(bends > 0)


# --- Other devices ---


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("rdp", {"orders": 3.0}),
        ("epsilon", {"delta": 1e-5, "num_steps": 1000}),
        ("delta", {"epsilon": 1.0, "num_steps": 1000}),
    ],
)
def test_the_program_lowers_for_devices(kind, known) -> None:
    """Exported for CUDA and TPU with a derivative; needs no device."""
    question = Question(kind, step(1.0), known, ("noise_multiplier",), {})

    def program(noise: Any) -> Any:
        words = ((), (0,))
        return traced_program.answer_and_slopes(question, words, noise.shape, (noise,))

    with jax.numpy_rank_promotion("allow"):
        export = jax.export.export(jax.jit(program), platforms=("cuda", "tpu"))
        assert set(export(NOISES).platforms) == {"cuda", "tpu"}
