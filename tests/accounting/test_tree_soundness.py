"""The public API's one-step profile against exhaustive enumeration of small trees."""

import dataclasses

import numpy as np
import pytest

import jaxdp_episodic as jde
from jaxdp_episodic.accounting import profile
from oracles import adversary, trees

G = np.exp(adversary.LOG_GS)
EPSILONS = np.asarray(adversary.LOG_GS)
SOUND = 1 + 1e-9
EXTREMES = adversary.extreme_designs()


def nested_sizes(node, depth):
    """Nested sizes of a tree of ``depth`` levels."""
    children = node[1]
    if depth == 1:
        return len(children)
    return [nested_sizes(child, depth - 1) for child in children]


def flat(nested):
    """The numbers of nested sizes."""
    if isinstance(nested, int):
        return [nested]
    return [number for part in nested for number in flat(part)]


def largest_group(node, level):
    """Most children of any unit ``level`` levels below the root."""
    if level == 0:
        return len(node[1])
    return max((largest_group(child, level - 1) for child in node[1]), default=0)


def level(design, j, population):
    """The spec of level ``j`` (from 0)."""
    scheme, name = design.schemes[j], f"level{j + 1}"
    if scheme.kind == "poisson":
        bound = max(1, largest_group(design.root, j))
        return jde.Poisson(name, sampling_probability=scheme.value, population=bound)
    size = int(scheme.value)
    if population is None:
        return jde.WithoutReplacement(name, size=size)
    return jde.WithoutReplacement(
        name, size=size, population=population, population_is_exact=True
    )


def step_of(design, *, with_tree):
    """The design as a step: by the sizes of its path, or by the whole tree."""
    sizes = design.path_sizes()
    depth = len(design.schemes)
    sizes += [max(1, largest_group(design.root, j)) for j in range(len(sizes), depth)]
    levels = [
        level(design, j, None if with_tree else size) for j, size in enumerate(sizes)
    ]
    clip = "step" if design.clip_level == 0 else f"level{design.clip_level}"
    nested = nested_sizes(design.root, depth)
    tree = jde.Population.from_sizes(nested) if with_tree else None
    return jde.GaussianStep(
        jde.MultistageSampling(*levels),
        noise_multiplier=1 / design.s,
        clip_unit=clip,
        privacy_unit=f"level{len(design.path)}",
        neighboring_relation=design.relation,
        population=tree,
        small_units="keep",
    )


def claim_of(step):
    """(forward, backward) of the public profile."""
    return tuple(
        jde.privacy_profile(step, EPSILONS, direction=d)
        for d in ("forward", "backward")
    )


def naive_product_rate(pair):
    """The tempting mistake: the rates above the clip level amplify too."""
    rate = pair.outer_rate * pair.rate
    return pair._replace(outer_rate=np.ones_like(pair.outer_rate), rate=rate)


@pytest.mark.parametrize("name", EXTREMES)
def test_every_row_is_reached_and_not_exceeded(name):
    design = EXTREMES[name]
    true = trees.enumerated(design)(adversary.worst_table(design), G)
    ratio = adversary.worst_ratio(true, claim_of(step_of(design, with_tree=False)))
    assert 0.999 <= ratio <= SOUND
    # The whole tree can only say more: its worst path may be another one.
    tree_claim = claim_of(step_of(design, with_tree=True))
    assert adversary.worst_ratio(true, tree_claim) <= SOUND


def check_random_designs(seed, number, *, below_unit=False):
    rng = np.random.default_rng(seed)
    worst = 0.0
    for _ in range(number):
        design = adversary.random_design(
            rng, num_levels=int(rng.integers(2, 4)), below_unit=below_unit
        )
        divergences = trees.enumerated(design)
        keys = trees.all_contents(design)
        tables = [adversary.worst_table(design), adversary.random_table(rng, keys)]
        claims = []
        # Only empty lists do not say how deep the tree is.
        if flat(nested_sizes(design.root, len(design.schemes))):
            claims.append(claim_of(step_of(design, with_tree=True)))
        if not below_unit:  # the sizes of one path do not bound its siblings'
            claims.append(claim_of(step_of(design, with_tree=False)))
        for table in tables:
            true = divergences(table, G)
            for claim in claims:
                worst = max(worst, adversary.worst_ratio(true, claim))
    assert worst <= SOUND
    return worst


@pytest.mark.parametrize("below_unit", [False, True])
def test_random_unequal_trees_never_exceed_their_claim(below_unit):
    worst = check_random_designs(11, 60, below_unit=below_unit)
    assert worst > 0.5  # the adversary does something


@pytest.mark.slow
@pytest.mark.parametrize("below_unit", [False, True])
def test_many_random_unequal_trees_never_exceed_their_claim(below_unit):
    check_random_designs(12, 1500, below_unit=below_unit)


@pytest.mark.parametrize("name", ["wor/replace_one/outer", "wor_last/add_remove/outer"])
def test_the_naive_product_rate_is_caught(name, monkeypatch):
    design = EXTREMES[name]
    true = trees.enumerated(design)(adversary.worst_table(design), G)
    right = profile.dominating_pair
    monkeypatch.setattr(
        profile, "dominating_pair", lambda step: naive_product_rate(right(step))
    )
    claim = claim_of(step_of(design, with_tree=False))
    assert adversary.worst_ratio(true, claim) > 1.1


def test_the_counterexample_of_the_product_rate():
    """10 tasks, one drawn; 40 examples, 20 drawn; every example clipped."""
    levels = jde.MultistageSampling(
        jde.WithoutReplacement("task", size=1, population=10),
        jde.WithoutReplacement("example", size=20, population=40),
    )
    step = jde.GaussianStep(
        levels,
        noise_multiplier=2.0,
        clip_unit="example",
        neighboring_relation="replace_one",
    )
    found = jde.privacy_profile(step, [0.5, 1.0])
    assert np.allclose(found, [7.994e-3, 2.887e-3], rtol=1e-3)
    task = dataclasses.replace(step, clip_unit="task")
    claimed = jde.privacy_profile(task, [0.5, 1.0])
    assert np.allclose(claimed, [2.19e-4, 1.19e-5], rtol=5e-3)
