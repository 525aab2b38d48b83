"""Releases as parts of runs: values, dictionaries, composition, refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

import jaxdp_episodic as jde
import jaxdp_episodic.traced as traced
from jaxdp_episodic.files.toml_file import to_toml
from jaxdp_episodic.tools import cli
from jaxdp_episodic.tools.book.book import order_of
from jaxdp_episodic.tools.requests.request import (
    CalibrationRequest,
    EpsilonRequest,
    read_request,
)

GAUSSIAN = jde.GaussianStep(
    jde.Poisson("example", sampling_probability=0.01), noise_multiplier=1.0
)
LAPLACE = jde.LaplaceRelease(2.0, sampling_probability=0.5)


def test_runs_nest_and_repeat():
    inner = jde.compose((GAUSSIAN, 10), (LAPLACE, [1, 2]))
    run = jde.compose((inner, 3), (jde.ApproximateDP(0.1), 1), (inner, 2))
    flat = jde.compose(
        (GAUSSIAN, 30),
        (LAPLACE, [3, 6]),
        (jde.ApproximateDP(0.1), 1),
        (GAUSSIAN, 20),
        (LAPLACE, [2, 4]),
    )
    assert run == flat
    assert run.shape == (2,)
    deep = jde.compose((jde.compose((jde.compose((GAUSSIAN, 2)), 3)), 4))
    assert deep == jde.compose((GAUSSIAN, 24))
    alone = jde.epsilon(GAUSSIAN, num_steps=24, delta=1e-5)
    assert jde.epsilon(deep, delta=1e-5) == alone
    with pytest.raises(ValueError, match="at most 2..53"):
        jde.compose((jde.compose((GAUSSIAN, 2**40)), 2**20))
    with pytest.raises(ValueError, match="count must be a whole number >= 0"):
        jde.compose((inner, -1))
    with pytest.raises(TypeError, match="each step of compose .* composed run, got 3"):
        jde.compose((3, 1))


def test_relations_must_agree():
    changed = jde.LaplaceRelease(2.0, neighboring_relation="replace_one")
    with pytest.raises(ValueError, match="same neighboring_relation"):
        jde.compose((GAUSSIAN, 1), (changed, 1))
    # A part without a relation takes that of the others.
    jde.compose((changed, 1), (jde.ApproximateDP(0.1), 1))
    jde.compose((GAUSSIAN, 1), (jde.ZeroConcentratedDP(0.1), 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jde.LaplaceRelease(-1.0), "noise_multiplier must be >= 0"),
        (
            lambda: jde.LaplaceRelease(1, sampling_probability=2),
            "_probability must lie",
        ),
        (
            lambda: jde.LaplaceRelease([1, 1], sampling_probability=[0.1] * 3),
            "shapes do not broadcast",
        ),
        (lambda: jde.ZeroConcentratedDP.of_gaussian(np.nan), "noise_multiplier"),
        (lambda: jde.ApproximateDP(-0.1), "epsilon must be >= 0"),
        (lambda: jde.ApproximateDP(0.1, 2.0), "delta must lie in"),
        (lambda: jde.ZeroConcentratedDP(np.nan), "rho must not be NaN"),
        (lambda: jde.ZeroConcentratedDP(1, is_gaussian=1), "must be true or false"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_questions_about_gaussian_steps_refuse_releases():
    run = jde.compose((GAUSSIAN, 10), (LAPLACE, 2))
    for question in (jde.privacy_report, jde.epsilon_and_gradient):
        with pytest.raises(NotImplementedError, match="only, got a LaplaceRelease"):
            question(run, delta=1e-5)
    with pytest.raises(TypeError, match="must be a GaussianStep or a LaplaceRelease"):
        jde.calibrate_noise_multiplier(jde.ApproximateDP(0.1), **TARGET, num_steps=3)


# --- Disjoint parts ---


def step(
    rate: Any = 0.05, noise: Any = 1.0, relation: str = "add_remove"
) -> jde.GaussianStep:
    return jde.GaussianStep(
        jde.Poisson("example", sampling_probability=rate),
        noise_multiplier=noise,
        neighboring_relation=relation,
    )


# The first costs more at large deltas, the second at small ones because of rare
# large losses.
MANY, FEW = step(1.0, 30.0), step(0.002, 0.4)
USERS = jde.GaussianStep(
    jde.Poisson("user", sampling_probability=0.1), noise_multiplier=1.0
)
BOTH = jde.disjoint({"spring": MANY, "autumn": FEW})
STEPS = {"num_steps": 100}
RATES = np.array([1e-3, 0.1])
QUESTIONS = {
    "epsilon": (jde.epsilon, {**STEPS, "delta": np.array([0.05, 1e-3, 1e-6])}),
    "by rdp": (jde.epsilon, {**STEPS, "delta": [0.05, 1e-6], "method": "rdp"}),
    "delta": (jde.delta, {**STEPS, "epsilon": np.array([0.1, 1.0, 3.0])}),
    "rdp": (jde.rdp, {"orders": [1.5, 4.0, 40.0]}),
    "interval": (jde.epsilon_interval, {**STEPS, "delta": 1e-3}),
    "mu": (jde.gdp_mu, {"num_steps": 1, "smallest_delta": 0.01}),
    "rates": (jde.true_positive_rate, {**STEPS, "false_positive_rate": RATES}),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", QUESTIONS)
def test_the_worst_part_counts_at_each_target(name):
    question, asked = QUESTIONS[name]
    each = [question(part, **asked) for part in (MANY, FEW)]
    np.testing.assert_array_equal(question(BOTH, **asked), np.maximum(*each))


def test_either_part_may_be_the_largest_and_the_sum_is_larger():
    asked = QUESTIONS["epsilon"][1]
    many, few = (jde.epsilon(part, **asked) for part in (MANY, FEW))
    assert many[0] > few[0] and many[-1] < few[-1]
    together = jde.compose((MANY, 100), (FEW, 100))
    assert np.all(jde.epsilon(together, delta=asked["delta"]) > np.maximum(many, few))


def test_parts_may_be_grids_releases_and_composed_runs():
    grid = jde.disjoint({"a": step(noise=np.array([1.0, 2.0])), "b": step(0.1, 1.5)})
    assert grid.shape == (2,)
    found = jde.epsilon(grid, num_steps=10, delta=1e-5)
    each = [jde.epsilon(one, num_steps=10, delta=1e-5) for one in grid.parts]
    np.testing.assert_array_equal(found, np.maximum(*each))
    release = jde.ApproximateDP(epsilon=0.7, delta=0.0)
    runs = jde.compose((step(), 10), (release, 1)), jde.compose((release, 2))
    both = jde.epsilon(jde.disjoint(dict(zip("ab", runs, strict=True))), delta=1e-5)
    assert both == max(jde.epsilon(run, delta=1e-5) for run in runs)
    with pytest.raises(ValueError, match="num_steps must be a whole number"):
        jde.epsilon(BOTH, delta=1e-5)


def test_neighbours_by_enumeration():
    """Two records in two parts, against both data sets without one of them.

    Each part releases a Poisson-sampled sum with Gaussian noise, and the second part
    uses the release of the first: the likelihood ratio is that of the changed part.
    """
    rates, noises, g = (0.3, 0.6), (0.8, 1.7), math.exp(0.4)
    x = np.linspace(-12, 13, 1251)
    y = x[:, None]

    def density(z: Any, rate: float, noise: float, there: bool, mean: Any = 0.0) -> Any:
        rate = rate if there else 0.0
        apart = (norm.pdf(z, mean + moved, noise) for moved in (0, 1))
        return (1 - rate) * next(apart) + rate * next(apart)

    def joint(first: bool, second: bool) -> np.ndarray:
        # The release of the first part shifts that of the second.
        one = density(y, rates[0], noises[0], first)
        return one * density(x, rates[1], noises[1], second, np.tanh(y))

    area = (x[1] - x[0]) ** 2
    whole = joint(True, True)
    worst = 0.0
    for other in (joint(False, True), joint(True, False)):
        for p, q in ((whole, other), (other, whole)):
            worst = max(worst, float(np.maximum(p - g * q, 0).sum() * area))
    parts = {
        f"part {i}": step(r, n)
        for i, (r, n) in enumerate(zip(rates, noises, strict=True))
    }
    charged = jde.delta(jde.disjoint(parts), num_steps=1, epsilon=0.4)
    assert worst == pytest.approx(float(charged), rel=2e-4)


@pytest.mark.parametrize(
    ("relation", "membership", "message"),
    [
        ("replace_one", None, "membership must be given under replace_one"),
        ("replace_one", "content", "may leave one part and join another"),
        ("zero_out", "content", "may leave one part and join another"),
        ("add_remove", "guess", "membership must be one of"),
    ],
)
def test_a_change_in_two_parts_is_refused(relation, membership, message):
    parts = {"a": step(relation=relation), "b": step(0.1, relation=relation)}
    with pytest.raises((ValueError, NotImplementedError), match=message):
        jde.disjoint(parts, membership=membership)
    allowed = "fixed" if relation != "add_remove" else "content"
    assert jde.disjoint(parts, membership=allowed).shape == ()
    claim = jde.ApproximateDP(epsilon=1.0, delta=0.0)  # names no relation
    with pytest.raises(ValueError, match="membership must be given"):
        jde.disjoint({"a": claim, "b": claim})
    both = jde.disjoint({"a": claim, "b": claim}, membership="fixed")
    assert jde.epsilon(both, num_steps=1, delta=0.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({}, ValueError, "all different, got"),
        ([MANY, FEW], TypeError, "parts must be a table"),
        ({"a": 3}, TypeError, "part 'a' must be"),
        ({"step": MANY}, ValueError, "each name of parts must be"),
        ({"a": MANY, "b": step(relation="zero_out")}, ValueError, "same neighboring"),
        ({"a": MANY, "b": USERS}, ValueError, "same privacy_unit"),
        ({"a": BOTH, "b": MANY}, TypeError, "part 'a' must be"),
    ],
)
def test_invalid_parts_are_refused(parts, error, message):
    with pytest.raises(error, match=message):
        jde.disjoint(parts)


TARGET = {"epsilon": 1.0, "delta": 1e-5}
REFUSALS = {
    "compose": lambda: jde.compose((BOTH, 2)),
    "report": lambda: jde.privacy_report(BOTH, num_steps=3, delta=1e-5),
    "noise": lambda: jde.calibrate_noise_multiplier(BOTH, **TARGET, num_steps=3),
    "gradient": lambda: jde.epsilon_and_gradient(BOTH, num_steps=3, delta=1e-5),
    "options": lambda: jde.AdaptiveRun({"a": BOTH}, quotas={"a": 3}),
    "traced": lambda: traced.epsilon(BOTH, num_steps=3, delta=1e-5),
    "book": lambda: order_of(BOTH, what="query", name="both", protected=None),
    "requests": lambda: CalibrationRequest(step=BOTH, calibrate="num_steps", **TARGET),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_unsupported_questions_are_refused_by_name(name):
    with pytest.raises((TypeError, NotImplementedError), match=r"[Dd]isjoint"):
        REFUSALS[name]()


def test_requests_hold_disjoint_parts(tmp_path, capsys):
    request = EpsilonRequest(step=BOTH, num_steps=100, delta=1e-6)
    assert jde.DisjointParts.from_dict(BOTH.to_dict()) == BOTH
    table = {k: v for k, v in request.to_dict().items() if k != "type"}
    (tmp_path / "run.toml").write_text(to_toml(table))
    assert read_request(tmp_path / "run.toml", EpsilonRequest) == request
    assert cli.run(["epsilon", str(tmp_path / "run.toml")]) == 0
    value = float(jde.epsilon(FEW, num_steps=100, delta=1e-6))
    assert f"{value:.3f}" in capsys.readouterr().out
    assert cli.run(["report", str(tmp_path / "run.toml")]) != 0
    assert "does not cover disjoint parts" in capsys.readouterr().err
