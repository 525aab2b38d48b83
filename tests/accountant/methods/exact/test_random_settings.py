"""The exact epsilon at random settings against certified ends and a finer contour."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import jaxdp_episodic as jde
from designs import Setting, episodic, fixed, levels, poisson
from jaxdp_episodic.accountant._engine import float64_boundary, using_engine
from jaxdp_episodic.accountant.methods.certified.method import pld_bounds
from jaxdp_episodic.accountant.methods.exact import contour as contour_layout
from jaxdp_episodic.accountant.methods.exact import integral
from jaxdp_episodic.accountant.methods.exact.method import exact_answer
from jaxdp_episodic.accountant.methods.exact.mgf import steps_of
from jaxdp_episodic.accountant.methods.rdp.method import rdp_bound
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt, Run
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair

_CONTOUR_NODES, _CHUNK = 1_537, 4
# Relative error of the finer computation itself.
_FINER_ERROR = 1e-9


def of(
    relation: str, clip: str, *schemes: Any, fields: str = "outer rate inner"
) -> Callable[[Setting], jde.GaussianStep]:
    """Levels whose rates are these fields of a draw."""
    make = levels(relation, clip, *schemes)
    return lambda x: make(x.noise, *(getattr(x, name) for name in fields.split()))


ADD, REPLACE = "add_remove", "replace_one"
KINDS: dict[str, Callable[[Setting], jde.GaussianStep]] = {
    "sampled": of(ADD, "pupil", poisson, fields="rate"),
    "sampled, fixed size": of(ADD, "pupil", fixed, fields="rate"),
    "sampled below a level": of(ADD, "pupil", poisson, poisson),
    "sampled below a fixed level": of(ADD, "pupil", fixed, fixed),
    "replaced": of(REPLACE, "pupil", poisson, fields="rate"),
    "replaced, fixed size": of(REPLACE, "pupil", fixed, fields="rate"),
    "swapped": of(ADD, "step", poisson, fields="rate"),
    "swapped, replaced": of(REPLACE, "step", fixed, fields="rate"),
    "antipodal": of(ADD, "class", poisson, poisson, fields="rate inner"),
    "antipodal, replaced": of(REPLACE, "class", poisson, fixed, fields="rate inner"),
    "fixed above Poisson": of(ADD, "class", fixed, poisson, fields="rate inner"),
    "antipodal below a level": of(ADD, "class", poisson, poisson, poisson),
    "episodes": lambda x: episodic(x.noise, x.rate, x.num_episodes),
}
COMPOSED = {
    "sampled and sampled": ("sampled", "sampled below a level"),
    "sampled and swapped": ("sampled", "swapped"),
    "antipodal and replaced": ("antipodal", "replaced"),
}


def draw(rng: np.random.Generator, size: int) -> Setting:
    def spread(low: float, high: float, share_of_one: float = 0.0) -> np.ndarray:
        values = np.exp(rng.uniform(np.log(low), np.log(high), size))
        return np.where(rng.random(size) < share_of_one, 1.0, values)

    return Setting(
        outer=spread(1e-3, 1, 0.2),
        rate=spread(1e-6, 1, 0.1),
        inner=spread(1e-3, 1, 0.2),
        noise=spread(0.3, 100),
        num_episodes=rng.integers(1, 8, size),
    )


class Problem(NamedTuple):
    """A run with fields (n,), and log(delta)."""

    log_delta: np.ndarray
    run: Run

    def row(self, i: int) -> str:
        return f"{self.run.take(np.array([i]))} {self.log_delta[i]!r}"


def problem(name: str, size: int, seed: int, *, rare: bool = False) -> Problem:
    """Settings of all sizes, or ``rare`` units in a few steps."""
    rng = np.random.default_rng([seed, len(name), ord(name[0])])
    draws = [draw(rng, size) for _ in COMPOSED.get(name, (name,))]
    most = 7.0
    if rare:
        draws = [d._replace(rate=d.rate * 1e-3, noise=d.noise**0.5) for d in draws]
        most = 2.0
    steps = [
        KINDS[part](d)
        for part, d in zip(COMPOSED.get(name, (name,)), draws, strict=True)
    ]
    counts = tuple(np.rint(10 ** rng.uniform(0, most, size)) for _ in steps)
    losses = tuple(
        dominating_pair(step).map(lambda f: np.broadcast_to(f, (size, 1))[:, 0])
        for step in steps
    )
    log_delta = rng.uniform(math.log(1e-12), math.log(1e-3), size)
    return Problem(log_delta, Run(losses, counts))


def truncated(given: Problem) -> tuple[Run, np.ndarray]:
    """The run without negligible terms, and the logarithm of what they add."""
    log_added, losses = np.full(given.log_delta.shape, -np.inf), []
    for loss, count in zip(given.run.losses, given.run.counts, strict=True):
        kept, added, _ = loss.truncated(given.log_delta, count)
        losses.append(kept)
        log_added = np.logaddexp(log_added, added)
    return given.run.with_losses(tuple(losses)), log_added


def finer_epsilon(given: Problem, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Epsilon of the larger direction, and its own error estimate, (n,)."""
    log_delta = given.log_delta
    run, log_added = truncated(given)
    log_target = log_delta + np.log1p(-np.exp(np.minimum(log_added - log_delta, -1e-9)))
    log_cut = log_delta - np.log(np.maximum(run.num_steps, 1.0)) - 90.0

    def kernel(target: Any, near: Any, log_cut: Any, groups: Any, backward: Any) -> Any:
        steps = []
        for group in groups:
            num_terms = int(group.loss.num_terms.max())
            nodes = {"num_nodes": 384, "num_terms": num_terms}
            both = steps_of(group, backward, log_cut, **nodes)
            steps.append(both._replace(nodes=both.check, check=both.nodes))
        steps = tuple(steps)
        contour = contour_layout.lay_contour(near - 0.03 * np.minimum(near, 1.0), steps)
        return integral.search(
            target,
            near,
            2 * near,
            contour,
            steps,
            integral.Blocks(1, _CONTOUR_NODES, 1),
        )

    answer = float64_boundary(kernel)
    value, error = np.full(near.shape, np.nan), np.full(near.shape, np.inf)
    for start in range(0, near.size, _CHUNK):
        index = np.arange(start, min(start + _CHUNK, near.size))
        part = [a[index] for a in (log_target, near, log_cut)]
        groups = run.take(index).groups()
        for backward in (0.0, 1.0):
            with using_engine("numpy"):
                found = answer(*part, groups, np.full(index.size, backward))
            off = found.log_error / found.slope
            better = found.value > np.nan_to_num(value[index], nan=-1.0)
            value[index] = np.where(better, found.value, value[index])
            error[index] = np.where(better, off, error[index])
    return value, error


class Outcome(NamedTuple):
    """Result of a batch: violations as texts, and numbers of settings by kind."""

    violations: list[str]
    too_wide: list[str]
    num_certified: int
    num_compared: int


def examine(name: str, size: int, seed: int, *, rare: bool = False) -> Outcome:
    given = problem(name, size, seed, rare=rare)
    question = EpsilonAt(given.log_delta)
    answer = exact_answer(question, given.run)
    lower, upper = pld_bounds(question, given.run)
    bound, _ = rdp_bound(question, given.run)
    violations, too_wide = [], []

    def demand(good: np.ndarray, what: str, *columns: np.ndarray) -> None:
        for i in np.flatnonzero(~good).tolist():
            numbers = [repr(float(column[i])) for column in columns]
            place = too_wide if what == "wide" else violations
            place.append(f"{name}: {what} {numbers} {given.row(i)}")

    settled = ~answer.is_certified
    slack = answer.error + 1e-12 * answer.value
    inside = (answer.value >= lower - slack) & (answer.value <= upper + slack)
    demand(
        inside | ~settled, "outside", answer.value, answer.error, lower, upper, bound
    )
    enough = np.maximum(0.01 * answer.value, 1e-4) * (1 + 1e-9)
    demand(upper - lower <= enough, "wide", lower, upper)
    demand(answer.value <= bound * (1 + 1e-9), "above Rényi", answer.value, bound)
    # Delta at the answer, on a contour for it: an epsilon that is too small by more
    # than its stated error would be detected.
    above = exact_answer(DeltaAt(answer.value + slack), given.run)
    least = above.value + np.log1p(-np.minimum(above.error, 0.999))
    demand(
        (least <= given.log_delta + 1e-9) | ~settled,
        "delta is larger",
        answer.value,
        answer.error,
        above.value,
        given.log_delta,
    )
    many = np.flatnonzero(settled & (given.run.num_steps > 1) & (answer.value > 1e-3))
    rows = Problem(given.log_delta[many], given.run.take(many))
    fine, fine_error = finer_epsilon(rows, answer.value[many])
    known = fine_error <= 1e-6 * fine
    good = np.ones(size, bool)
    # Both errors are estimates.
    allowed = answer.error[many] + 2 * fine_error + _FINER_ERROR * fine
    good[many] = ~known | (np.abs(fine - answer.value[many]) <= allowed)
    whole = np.full(size, np.nan)
    whole[many] = fine
    demand(good, "not the finer", answer.value, answer.error, whole)
    return Outcome(violations, too_wide, int((~settled).sum()), int(known.sum()))


def test_sampled_settings():
    outcome = examine("sampled", 6, 1)
    assert not outcome.violations + outcome.too_wide
    assert outcome.num_certified <= 1
    assert outcome.num_compared >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", (*KINDS, *COMPOSED))
def test_rare_units_in_a_few_steps(name):
    """Epsilons far below 1e-3, where a contour for another epsilon misleads."""
    outcome = examine(name, 32, 4, rare=True)
    assert not outcome.violations, "\n".join(outcome.violations)


@pytest.mark.slow
def test_two_thousand_settings():
    names = (*KINDS, *COMPOSED)
    outcomes = [examine(name, 125, 2) for name in names]
    violations = [text for outcome in outcomes for text in outcome.violations]
    assert not violations, "\n".join(violations)
    too_wide = [text for outcome in outcomes for text in outcome.too_wide]
    assert not too_wide, "\n".join(too_wide)
    assert sum(o.num_certified for o in outcomes) <= 0.1 * 125 * len(names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sampled", "episodes"])
def test_engines_agree(name):
    given = problem(name, 6, 5)
    answers = []
    for engine in ("numpy", "jax"):
        with using_engine(engine):
            answers.append(exact_answer(EpsilonAt(given.log_delta), given.run))
    ours, theirs = answers
    np.testing.assert_array_equal(ours.is_certified, theirs.is_certified)
    apart = np.abs(ours.value - theirs.value)
    assert np.all(apart <= ours.error + theirs.error + 1e-12 * ours.value)
