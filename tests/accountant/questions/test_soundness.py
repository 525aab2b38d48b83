"""Soundness through the public API, on trees small enough to enumerate every draw.

The oracle lists every sample of a small tree, adds up adversarial contributions and
computes the divergence of the two releases exactly. What `privacy_profile` claims for
the same design, described by the public specs, must not be smaller; and there are data
sets that reach it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accountant.losses.gaussian import SampledGaussianLoss
from jaxdp_episodic.accountant.losses.gaussian_mixtures import SwappedGaussianLoss
from jaxdp_episodic.accountant.questions import api
from jaxdp_episodic.accountant.questions.dominating_pair import dominating_pair
from oracles import adversary, episodes, trees

G = np.exp(adversary.LOG_GS)
SOUND = 1 + 1e-9
NAMES = ("first", "second", "third")


def scheme(drawn: trees.Scheme, name: str, size: int | None = None, **options: Any):
    """The public spec of one level."""
    if drawn.kind == "poisson":
        return jde.Poisson(name, sampling_probability=drawn.value, **options)
    return jde.WithoutReplacement(
        name,
        size=int(drawn.value),
        population=size,
        population_is_exact=size is not None,
    )


def population(root: tuple, num_levels: int) -> jde.Population:
    """The tree's sizes, empty units included."""
    counts, units = [], [root]
    for _ in range(num_levels):
        counts.append(np.array([len(unit[1]) for unit in units], np.int64))
        units = [child for unit in units for child in unit[1]]
    return jde.Population(tuple(counts))


def most_children(root: tuple, level: int) -> int:
    """A public upper bound on the children of any unit of a level."""
    return max([1, *(len(unit[1]) for unit in trees.clip_units(root, level))])


def step_of(design: trees.Design, tree: tuple | None) -> jde.GaussianStep:
    """The public description of a design.

    With a tree, sizes come from its `Population`, and the claim is that of the worst
    path. Otherwise the specs have the exact sizes of the design's path.
    """
    num_levels, unit = len(design.schemes), len(design.path)
    sizes: list[int | None] = [None] * num_levels
    if tree is None:
        sizes = [*design.path_sizes(), *sizes[unit:]]
    levels = []
    for j, drawn in enumerate(design.schemes):
        size, options = sizes[j], {}
        if drawn.kind == "poisson":
            options = {"population": most_children(design.root, j)}
        levels.append(scheme(drawn, NAMES[j], size, **options))
    return jde.GaussianStep(
        jde.MultistageSampling(*levels),
        noise_multiplier=1 / design.s,
        clip_unit=NAMES[design.clip_level - 1] if design.clip_level else "step",
        privacy_unit=NAMES[unit - 1],
        neighboring_relation=design.relation,
        population=None if tree is None else population(tree, num_levels),
        small_units="keep",
    )


def claim_of(step: jde.GaussianStep) -> tuple[Any, Any]:
    """Both directions of the public claim, at the epsilons of the comparison."""
    forward, backward = (
        jde.privacy_profile(step, adversary.LOG_GS, direction=direction)
        for direction in ("forward", "backward")
    )
    return forward, backward


def claims_of(design: trees.Design) -> dict[str, tuple[Any, Any]]:
    """The library's claims for the path, the larger tree and the smaller tree."""
    larger, smaller = design.neighbours()
    told: dict[str, tuple | None] = {"larger tree": larger}
    if smaller is not larger and smaller[1]:
        if trees.clip_units(smaller, len(design.path)):
            told["smaller tree"] = smaller
    if design.clip_level <= len(design.path):
        # If clipped below the unit, other group sizes than the path's may matter.
        told["path"] = None
    return {how: claim_of(step_of(design, tree)) for how, tree in told.items()}


def largest_ratios(rng: np.random.Generator, design: trees.Design, climb: bool):
    """Largest true/claimed ratio over adversarial contributions, for each claim."""
    divergences = trees.enumerated(design)
    keys = trees.all_contents(design)
    tables = [
        adversary.random_table(rng, keys),
        adversary.random_table(rng, keys, extreme=False),
        *adversary.worst_tables(design),
    ]
    truths = [divergences(table, G) for table in tables]
    found = {}
    for how, claim in claims_of(design).items():

        def ratio(table: adversary.Table, claim: tuple = claim) -> float:
            return adversary.worst_ratio(divergences(table, G), claim)

        found[how] = max(adversary.worst_ratio(true, claim) for true in truths)
        if climb:
            found[how] = max(found[how], adversary.climb(rng, ratio, tables[0])[0])
    return found


SIZED, SLOTS = ("add_remove", "replace_one"), ("zero_out",)
FEW = {SIZED: 60, SLOTS: 40}


@pytest.mark.parametrize("relations", FEW)
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_violation_on_random_trees(relations, many):
    """One to three unequal levels, empty units, n > N, each clip and privacy level."""
    seed, count, climb_every = (12, 200, 5) if many else (11, FEW[relations], 50)
    rng = np.random.default_rng(seed)
    worst, fewest = 0.0, 2 if relations == SIZED else 1
    for i in range(count):
        design = adversary.random_design(
            rng,
            num_levels=fewest + i % (4 - fewest),
            below_unit=i % 4 == 0,
            relations=relations,
        )
        ratios = largest_ratios(rng, design, climb=i % climb_every == 0)
        worst = max(worst, *ratios.values())
        assert worst <= SOUND, (ratios, design)
    assert worst > 0.5  # the adversary gains something


EXTREMES = adversary.extreme_designs()


@functools.cache
def truths_of_extreme(name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Both divergences of a proof's worst cases."""
    design = EXTREMES[name]
    divergences = trees.enumerated(design)
    return [divergences(table, G) for table in adversary.worst_tables(design)]


def check_extremes(relations: tuple[str, ...] = SIZED) -> dict[str, float]:
    """The proofs' worst cases; returns the ratio of each for its path.

    Under zero_out each direction has its own worst case, which attains its claim.
    """
    reached = {}
    for name, design in EXTREMES.items():
        if design.relation not in relations:
            continue
        for how, claim in claims_of(design).items():
            ratios = [adversary.worst_ratio(t, claim) for t in truths_of_extreme(name)]
            assert max(ratios) <= SOUND, (name, how, ratios)
            if how == ("path" if design.clip_level <= len(design.path) else None):
                reached[name] = min(ratios) if relations == SLOTS else max(ratios)
    return reached


@pytest.mark.parametrize("relations", FEW)
def test_every_row_of_the_theorem_is_reached(relations):
    reached = check_extremes(relations)
    rows = {"step", "wor", "wor_last", "all_drawn", "poisson", "poisson_last"}
    assert {name.split("/")[0] for name in reached} >= rows
    assert min(reached.values()) > 0.999, reached


def product_rate(right: Any, step: jde.GaussianStep):
    """The wrong theorem: every rate inside the profile, none outside."""
    shift = np.maximum(right.shift, 2 / step.noise_multiplier)
    return SwappedGaussianLoss(np.ones(1), right.chance, shift)


def folded_rate(right: Any, step: jde.GaussianStep):
    """The same for any pair: levels above the clip level amplify."""
    rate = right.outer_rate * right.rate
    return dataclasses.replace(right, outer_rate=np.ones(1), rate=rate)


def contribution_that_comes_or_not(right: Any, step: jde.GaussianStep):
    """Under zero_out, as if a clip unit without a null contributed nothing."""
    return SampledGaussianLoss(
        right.outer_rate, right.chance / right.outer_rate, right.shift
    )


@pytest.mark.parametrize(
    ("wrong", "relations"),
    [
        (product_rate, SIZED),
        (folded_rate, SIZED),
        (folded_rate, SLOTS),
        (contribution_that_comes_or_not, SLOTS),
    ],
)
def test_a_false_theorem_is_caught(wrong, relations, monkeypatch):
    """The tests above can fail: planted false theorems do not pass."""
    monkeypatch.setattr(
        api, "dominating_pairs", lambda step: (wrong(dominating_pair(step), step),)
    )
    with pytest.raises(AssertionError):
        check_extremes(relations)


# --- Grouped classes and independent episodes ---


def grouped_step(design: episodes.GroupedDesign) -> jde.GaussianStep:
    """The public description of a grouped design."""
    kind, value = design.draw, design.value
    drawn: dict[str, Any] = {}
    if kind == "partition":
        drawn["episodes"] = jde.Poisson("episode", sampling_probability=value)
    elif kind == "without_replacement":
        drawn["episodes"] = jde.WithoutReplacement("episode", size=int(value))
    else:
        drawn["classes"] = jde.Poisson("class", sampling_probability=value)
    sampling = jde.GroupedClasses(
        num_classes=len(design.pool[1]),
        ways=design.ways,
        examples=jde.WithoutReplacement("example", size=int(design.examples.value)),
        **drawn,
    )
    return jde.GaussianStep(
        sampling,
        noise_multiplier=1 / design.s,
        privacy_unit="example" if len(design.path) == 2 else "class",
        neighboring_relation=design.relation,
        population=population(design.pool, 2),
        small_units="keep",
    )


POOL = ("pool", (("a", (0, 1, 2)), ("b", (3, 4)), ("c", (5, 6)), ("d", (7, 8))))
FIVE = ("pool", tuple((name, (i,)) for i, name in enumerate("abcde")))
ONE = trees.Scheme("without_replacement", 1)
PARTS, SOME, COINS = (
    ("partition", 0.4),
    ("without_replacement", 1.0),
    ("poisson", 0.4),
)
# Draw, privacy unit, relation, options, and the smallest ratio that the worst tried
# contributions reach: the class "a" is larger than the others, so that its examples are
# not on the worst path.
GROUPED = [
    (PARTS, (1, 0), "add_remove", {}, 0.999),
    (PARTS, (1, 0), "replace_one", {}, 0.999),
    (PARTS, (0,), "replace_one", {}, 0.999),
    (PARTS, (0,), "add_remove", {"emptied": True}, 0.999),
    (PARTS, (0, 0), "add_remove", {}, 0.6),
    (PARTS, (1, 0), "zero_out", {}, 0.999),
    (PARTS, (0,), "zero_out", {}, 0.999),
    (PARTS, (1,), "zero_out", {"pool": FIVE}, 0.75),
    (SOME, (1, 0), "add_remove", {}, 0.999),
    (SOME, (1, 0), "replace_one", {}, 0.999),
    (SOME, (0,), "replace_one", {}, 0.999),
    (SOME, (1, 0), "zero_out", {}, 0.999),
    (SOME, (1,), "zero_out", {"pool": FIVE}, 0.75),
    (COINS, (1, 0), "add_remove", {}, 0.1),
    (COINS, (0,), "replace_one", {}, 0.1),
    (COINS, (0,), "zero_out", {}, 0.1),
]


def check_episodes(claim: tuple, tables: list, keys: list, divergences: Any) -> float:
    """The largest ratio over contributions."""
    rng = np.random.default_rng(8)
    tables = [*tables, *(adversary.random_table(rng, keys) for _ in range(5))]
    return max(adversary.worst_ratio(divergences(t, G), claim) for t in tables)


@pytest.mark.parametrize(("drawn", "path", "relation", "options", "reached"), GROUPED)
def test_grouped_classes(drawn, path, relation, options, reached):
    pool = options.get("pool", POOL)
    emptied = options.get("emptied", False)
    design = episodes.GroupedDesign(
        pool, 2, *drawn, ONE, path, relation, 1.0, emptied=emptied
    )
    keys, divergences = episodes.grouped(design)
    tables = episodes.worst_grouped_tables(design, keys)
    claim = claim_of(grouped_step(design))
    assert reached < check_episodes(claim, tables, keys, divergences) <= SOUND


@pytest.mark.parametrize("relation", ["add_remove", "replace_one", "zero_out"])
@pytest.mark.parametrize("num_episodes, reached", [(1, 0.999), (2, 0.5), (4, 0.3)])
def test_independent_episodes(num_episodes, reached, relation):
    root = EXTREMES["wor/add_remove/task"].root
    schemes = (trees.Scheme("poisson", 0.3), ONE)
    design = trees.Design(root, schemes, 0, (0, 0), relation, 0.6)
    one_episode = step_of(design, root)
    step = jde.GaussianStep(
        jde.IndependentEpisodes(one_episode.design, num_episodes=num_episodes),
        noise_multiplier=1 / design.s,
        neighboring_relation=relation,
        population=one_episode.population,
        small_units="keep",
    )
    keys, divergences = episodes.independent(design, num_episodes)
    tables = adversary.worst_tables(design)
    ratio = check_episodes(claim_of(step), tables, keys, divergences)
    assert reached < ratio <= SOUND
