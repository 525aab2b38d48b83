"""Answers about people: reference values, the least of several theorems, refusals."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.interop.dp_accounting import to_dp_event
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pairs
from jaxdp_episodic.accountant.questions.worst_path import answer

W, P = jde.WithoutReplacement, jde.Poisson
Bounds = jde.PersonBounds
TWO_OF_TWENTY = W("example", size=2, population=20)


def units(rate: Any, chance: Any, **fields: Any) -> dict[str, Any]:
    """Five units by coins, each of which holds the person with a chance of its own."""
    design = jde.MultistageSampling(
        P("class", sampling_probability=rate), P("example", sampling_probability=chance)
    )
    people = Bounds(examples=1, classes=5)
    return {"sampling": design, "people": people, "clip_unit": "class"} | fields


def grouped(episodes: Any) -> dict[str, Any]:
    design = jde.GroupedClasses(
        num_classes=23, ways=5, episodes=episodes, examples=TWO_OF_TWENTY
    )
    return {"sampling": design, "people": Bounds(examples=1, classes=12)}


def independent(classes: int) -> dict[str, Any]:
    each = jde.MultistageSampling(W("class", size=5, population=20), TWO_OF_TWENTY)
    design = jde.IndependentEpisodes(each, num_episodes=4)
    return {"sampling": design, "people": Bounds(examples=1, classes=classes)}


def blocks(sampling: Any = None, **fields: Any) -> dict[str, Any]:
    design = jde.PeopleBlocks(
        num_people=20,
        people_per_block=4,
        episodes=fields.pop("episodes", P("episode", sampling_probability=0.25)),
        sampling=sampling,
        **fields,
    )
    people = None if sampling is None else Bounds(examples=1, classes=5)
    return {"sampling": design, "people": people}


AMONG_SLOTS = jde.MultistageSampling(
    P("class", sampling_probability=1.0), W("example", size=2, population=4)
)
TEN = {
    "sampling": P("example", sampling_probability=0.05),
    "people": Bounds(examples=10),
}
THREE_OF_TEN = {
    "sampling": jde.MultistageSampling(
        W("class", size=3, population=10), W("example", size=1, population=2)
    ),
    "people": Bounds(examples=1, classes=4),
    "clip_unit": "class",
}


def person(fields: dict[str, Any], relation: str, noise: Any) -> jde.GaussianStep:
    return jde.GaussianStep(
        **fields,
        noise_multiplier=noise,
        privacy_unit="person",
        neighboring_relation=relation,
    )


# Design, noise; relation -> single step at epsilon 1 forward and backward, or steps and
# their epsilon at delta 1e-5. Values by another implementation of the same theorems
# (quadrature and contours of its own, checked against dp-accounting), 10 digits.
ZERO, REPLACE = "zero_out", "replace_one"
SINGLE = [
    (TEN, 2.0, ZERO, 0.0018893884273744864, 0.0),  # M
    (TEN, 2.0, "add_remove", 0.0018893884273744864, 0.0),
    (TEN, 2.0, REPLACE, 0.00824252411090727, 0.00824252411090727),
    (units(0.1, 0.3), 1.5, ZERO, 5.3185778439621655e-05, 0.0),  # A
    (units(0.1, 0.3), 1.5, REPLACE, 0.0001155468292963423, 0.0001155468292963423),
    (units(0.8, 0.2), 3.0, ZERO, 0.0037234405290448524, 0.00041801754682926516),
    (independent(12), 4.0, ZERO, 0.0043502005466598825, 0.0024959394067635655),  # 1
    (independent(20), 4.0, REPLACE, 0.10392944802341421, 0.10392944802341421),
    (THREE_OF_TEN, 3.0, ZERO, 0.0025117946145128854, 0.0007761392748451838),
    (THREE_OF_TEN, 3.0, "add_remove", 0.018451903162905663, 0.018451903162905663),
    (blocks(), 2.0, ZERO, 1.3774702715730637e-06, 0.0),  # 6
    (blocks(AMONG_SLOTS), 2.0, ZERO, 1.1081617568468259e-06, 0.0),
    (blocks(AMONG_SLOTS), 2.0, "add_remove", 1.8672069261694592e-05, None),
]
COMPOSED = [
    (TEN, 2.0, ZERO, 100, 16.122774820258027),
    (TEN, 2.0, REPLACE, 100, 31.501215594103197),
    (units(0.1, 0.3), 1.5, ZERO, 100, 6.008220408817204),
    (units(0.1, 0.3), 1.5, "add_remove", 100, 10.167336025998857),
    (units(0.8, 0.2), 3.0, ZERO, 100, 19.542402318919),
    (independent(20), 4.0, ZERO, 50, 20.678105362626166),
    (THREE_OF_TEN, 3.0, REPLACE, 50, 24.739359618702824),
    (blocks(), 2.0, "add_remove", 50, 8.446689932374145),
    (blocks(AMONG_SLOTS), 2.0, ZERO, 50, 4.303415599521158),
]


@pytest.mark.parametrize(("fields", "noise", "relation", "forward", "backward"), SINGLE)
def test_single_steps(fields, noise, relation, forward, backward) -> None:  # noqa: ANN001
    step = person(fields, relation, noise)
    found = jde.privacy_profile(step, 1.0, direction="forward")
    assert found == pytest.approx(forward, rel=1e-9)
    if backward is not None:
        found = jde.privacy_profile(step, 1.0, direction="backward")
        assert found == pytest.approx(backward, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("fields", "noise", "relation", "steps", "value"), COMPOSED)
def test_composed_steps(fields, noise, relation, steps, value) -> None:  # noqa: ANN001
    step = person(fields, relation, noise)
    run = {"num_steps": steps, "delta": 1e-5}
    assert jde.epsilon(step, **run) == pytest.approx(value, rel=1e-8)
    assert jde.epsilon(step, **run, method="rdp") >= value


def test_the_partition_is_averaged_where_it_is_fresh() -> None:
    """Theorem 2 with the law of |R| averaged over partitions; its own two values."""
    coins = grouped(P("episode", sampling_probability=0.25))
    for relation, value in ((ZERO, 5.978556417489636), (REPLACE, 10.49507042846714)):
        step = person(coins, relation, 2.0)
        _, hiding_units = dominating_pairs(step)
        run = jde.compose((step, 50))
        assert jde.epsilon(run, delta=1e-5) <= value * (1 + 1e-9)
        assert of_pair(hiding_units, 50) == pytest.approx(value, rel=1e-8)


def of_pair(pair: Any, count: float, delta: float = 1e-5) -> np.ndarray:
    """Epsilon of one of the pairs alone."""
    from jaxdp_episodic.accountant.methods.question import EpsilonAt
    from jaxdp_episodic.accountant.methods.run import Run

    run = Run((pair,), (np.array([float(count)]),))
    return answer(EpsilonAt(np.log(np.asarray(delta))), (run,), "exact").value
