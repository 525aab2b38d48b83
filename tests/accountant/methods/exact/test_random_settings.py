"""The exact epsilon at random settings against certified ends and its own delta."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jaxdp_episodic as jde
from designs import Setting, episodic, fixed, levels, poisson
from jaxdp_episodic.accountant.methods.certified.method import pld_bounds
from jaxdp_episodic.accountant.methods.exact.method import exact_answer
from jaxdp_episodic.accountant.methods.rdp.method import rdp_bound
from jaxdp_episodic.accountant.methods.run import DeltaAt, EpsilonAt, Run
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair


def of(
    relation: str, clip: str, *schemes: Any, fields: str = "outer rate inner"
) -> Callable[[Setting], jde.GaussianStep]:
    """Levels whose rates are these fields of a draw."""
    make = levels(relation, clip, *schemes)
    return lambda x: make(x.noise, *(getattr(x, name) for name in fields.split()))


ADD, REPLACE = "add_remove", "replace_one"
KINDS: dict[str, Callable[[Setting], jde.GaussianStep]] = {
    "sampled": of(ADD, "pupil", poisson, fields="rate"),
    "sampled below a level": of(ADD, "pupil", poisson, poisson),
    "sampled below a fixed level": of(ADD, "pupil", fixed, fixed),
    "replaced": of(REPLACE, "pupil", poisson, fields="rate"),
    "swapped": of(ADD, "step", poisson, fields="rate"),
    "antipodal": of(ADD, "class", poisson, poisson, fields="rate inner"),
    "antipodal, replaced": of(REPLACE, "class", poisson, fixed, fields="rate inner"),
    "antipodal below a level": of(ADD, "class", poisson, poisson, poisson),
    "episodes": lambda x: episodic(x.noise, x.rate, x.num_episodes),
}
COMPOSED = {
    "sampled and sampled": ("sampled", "sampled below a level"),
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


def problem(name: str, size: int, seed: int, *, rare: bool) -> tuple[np.ndarray, Run]:
    """log(delta) and runs of settings of all sizes, or of rare units in a few steps."""
    rng = np.random.default_rng([seed, len(name), ord(name[0])])
    parts = COMPOSED.get(name, (name,))
    draws = [draw(rng, size) for _ in parts]
    if rare:
        draws = [d._replace(rate=d.rate * 1e-3, noise=d.noise**0.5) for d in draws]
    losses = tuple(
        dominating_pair(KINDS[part](d)).map(
            lambda f: np.broadcast_to(f, (size, 1))[:, 0]
        )
        for part, d in zip(parts, draws, strict=True)
    )
    most = 2.0 if rare else 7.0
    counts = tuple(np.rint(10 ** rng.uniform(0, most, size)) for _ in parts)
    return rng.uniform(math.log(1e-12), math.log(1e-3), size), Run(losses, counts)


def examine(name: str, size: int, seed: int, *, rare: bool = False) -> int:
    """Returns how many answers are certified bounds."""
    log_delta, run = problem(name, size, seed, rare=rare)
    question = EpsilonAt(log_delta)
    answer = exact_answer(question, run)
    lower, upper = pld_bounds(question, run)
    bound, _ = rdp_bound(question, run)
    settled = ~answer.is_certified
    slack = answer.error + 1e-12 * answer.value
    inside = (answer.value >= lower - slack) & (answer.value <= upper + slack)
    # Delta at the answer, on a contour for it: an epsilon that is too small by more
    # than its stated error would be detected.
    above = exact_answer(DeltaAt(answer.value + slack), run)
    least = above.value + np.log1p(-np.minimum(above.error, 0.999))
    enough = np.maximum(0.01 * answer.value, 1e-4) * (1 + 1e-9)
    rules = {
        "within certified ends": inside | ~settled,
        "upper ends are near": upper - answer.value <= enough,
        # Rare draws in a million steps or more: up to 5 % below.
        "lower ends are near": answer.value - lower <= 5 * enough,
        "at most Rényi's": answer.value <= bound * (1 + 1e-9),
        "delta is met": (least <= log_delta + 1e-9) | ~settled,
    }
    for rule, kept in rules.items():
        wrong = np.flatnonzero(~kept)
        found = answer.value[wrong], answer.error[wrong], lower[wrong], upper[wrong]
        assert not wrong.size, (name, rule, log_delta[wrong], found)
    return int((~settled).sum())


def test_sampled_settings():
    assert examine("sampled", 6, 1) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", (*KINDS, *COMPOSED))
def test_many_settings(name):
    assert examine(name, 40, 2) <= 8
    # Epsilons far below 1e-3, where a contour for another epsilon misleads.
    examine(name, 12, 4, rare=True)
