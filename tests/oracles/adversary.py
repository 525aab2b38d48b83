"""Random small designs and contributions that make their releases differ most.

`worst_tables` are the structured worst case of the proofs; `climb` improves any table
over {-1, 0, 1} by changing one content's contribution at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from oracles import trees

Table = dict[trees.Content, float]
Ratio = Callable[[Table], float]

LOG_GS = np.array([0.0, 0.1, 0.3, 0.7, 1.2, 2.0, 3.0])
"""Epsilons at which truth and claim are compared."""
CLAIM_FLOOR = 1e-9
"""Smaller claims are skipped: double precision cannot judge them."""


def random_trees(
    rng: np.random.Generator, *, num_levels: int, max_units: int = 3
) -> tuple:
    """A root with `num_levels` levels of unequal, possibly empty units."""
    names = iter(range(10**6))

    def grow(level: int) -> Any:
        if level == num_levels:
            return next(names)
        low = 1 if level == 0 else 0
        count = int(rng.integers(low, max_units + 1))
        return f"u{next(names)}", tuple(grow(level + 1) for _ in range(count))

    return grow(0)


def paths(root: tuple, level: int) -> list[tuple[int, ...]]:
    """Positions of every unit of a level."""
    found: list[tuple[int, ...]] = [()]
    for _ in range(level):
        found = [(*p, i) for p in found for i in range(len(trees.unit_at(root, p)[1]))]
    return found


def random_design(
    rng: np.random.Generator,
    *,
    num_levels: int,
    max_units: int = 3,
    max_contents: int = 60,
    below_unit: bool = False,
    relations: tuple[str, ...] = ("add_remove", "replace_one"),
) -> trees.Design:
    """A random tree, schemes, clip level, privacy unit and relation."""
    while True:
        root = random_trees(rng, num_levels=num_levels, max_units=max_units)
        schemes = tuple(_random_scheme(rng, max_units) for _ in range(num_levels))
        unit = num_levels
        if rng.random() < 0.3:
            unit = int(rng.integers(1, num_levels + 1))
        clip = int(rng.integers(0, (num_levels if below_unit else unit) + 1))
        places = paths(root, unit)
        if not places:
            continue
        design = trees.Design(
            root=root,
            schemes=schemes,
            clip_level=clip,
            path=places[int(rng.integers(len(places)))],
            relation=str(rng.choice(relations)),
            s=float(rng.choice([0.3, 0.7, 1.2, 2.5])),
        )
        if _leaf_count(root) <= 9 and len(trees.all_contents(design)) <= max_contents:
            return design


def _leaf_count(node: Any) -> int:
    return sum(map(_leaf_count, node[1])) if isinstance(node, tuple) else 1


def _random_scheme(rng: np.random.Generator, max_units: int) -> trees.Scheme:
    if rng.random() < 0.5:
        return trees.Scheme("poisson", float(rng.choice([0.1, 0.4, 0.8, 1.0])))
    return trees.Scheme("without_replacement", int(rng.integers(1, max_units + 2)))


def random_table(
    rng: np.random.Generator, keys: list[trees.Content], *, extreme: bool = True
) -> Table:
    """Contributions in {-1, 0, 1}, or uniform in [-1, 1]."""
    draw = rng.integers(-1, 2, len(keys)) if extreme else rng.uniform(-1, 1, len(keys))
    return {key: float(value) for key, value in zip(keys, draw, strict=True)}


def worst_tables(design: trees.Design) -> list[Table]:
    """The proof's worst case: +1 where the privacy unit is reached, -1 where not."""
    if design.relation == "zero_out":
        return _worst_zeroed(design)
    clip, path = design.clip_level, design.path
    private = design.private_leaves()
    first, second = design.neighbours()
    own = trees.unit_at(first, path[:clip])
    own_name = own[0] if isinstance(own, tuple) else None
    parent = trees.unit_at(first, path[: max(clip - 1, 0)])
    near = {u[0] if isinstance(u, tuple) else u for u in parent[1]} if clip else set()
    poisson = clip > 0 and design.schemes[clip - 1].kind == "poisson"
    table: Table = {}
    for content in trees.all_contents(design):
        drawn = set(trees.content_names(content))
        name = content[0] if isinstance(content, tuple) else content
        if drawn & private:
            # The changed value of a replaced unit pulls the other way.
            replaced = all(str(leaf).endswith("'") for leaf in drawn & private)
            table[content] = -1.0 if replaced else 1.0
        elif clip == 0 or name == own_name:
            table[content] = -1.0
        elif name in near:
            table[content] = 0.0 if poisson else -1.0
        else:
            table[content] = 1.0
    return [table]


def _worst_zeroed(design: trees.Design) -> list[Table]:
    """Forward, all else of the outer unit contributes -1, backward +1."""
    root, path, clip = design.root, design.path, design.clip_level
    level = min(clip, len(path))
    private, own, near = (
        frozenset(trees.names(trees.unit_at(root, path[:depth])))
        for depth in (len(path), level, max(level - 1, 0))
    )
    poisson = level > 0 and design.schemes[level - 1].kind == "poisson"
    tables: list[Table] = [{}, {}]
    for content in trees.all_contents(design):
        drawn = set(trees.content_names(content))
        for table, sign in zip(tables, (-1.0, 1.0), strict=True):
            if drawn & private:
                table[content] = 1.0
            elif clip == 0 or drawn & own:
                table[content] = sign
            elif drawn & near:
                table[content] = 0.0 if poisson else sign
            else:
                table[content] = -sign
    return tables


def extreme_designs() -> dict[str, trees.Design]:
    """For every row of the theorem, designs whose `worst_tables` reach the claim."""
    designs = {}
    half, one = trees.Scheme("poisson", 0.4), trees.Scheme("without_replacement", 1)
    often, eight = trees.Scheme("poisson", 0.9), trees.Scheme("without_replacement", 8)
    two = trees.Scheme("without_replacement", 2)
    flat = _uniform_tree((1, 3))
    small, deep = _uniform_tree((2, 2)), _uniform_tree((2, 2, 2))
    outer = ("root", (_uniform_tree((9,), "x"), _uniform_tree((8,), "y")))
    far = ("root", (_uniform_tree((1, 2), "x"), _uniform_tree((10, 1), "y")))
    swap = ("root", (_uniform_tree((9, 2), "x"), _uniform_tree((8, 1), "y")))
    near = ("root", (_uniform_tree((8,), "x"), _uniform_tree((9,), "y")))
    lone = ("root", (_uniform_tree((1,), "x"), _uniform_tree((12,), "y")))

    def add(name: str, root: tuple, schemes: tuple, clip: int, s: float = 1.0) -> None:
        relation = name.split("/")[1]
        first = (0,) * len(schemes)
        designs[name] = trees.Design(root, schemes, clip, first, relation, s)

    for relation in ("add_remove", "replace_one"):
        add(f"step/{relation}/poisson", small, (half, one), 0)
        add(f"step/{relation}/deep", deep, (one, half, one), 0)
        add(f"wor/{relation}/task", small, (one, one), 1)
        add(f"wor/{relation}/deep", deep, (one, half, one), 1)
        add(f"wor/{relation}/outer", swap, (one, eight, one), 2)
        add(f"poisson/{relation}/task", small, (half, one), 1)
        add(f"poisson/{relation}/deep", deep, (half, half, one), 1)
        add(f"poisson/{relation}/outer", far, (one, often, one), 2, s=2.0)
    add("wor/replace_one/last", flat, (one, two), 2)
    add("poisson/replace_one/last", lone, (one, often), 2, s=2.0)
    add("wor_last/add_remove/flat", flat, (one, two), 2)
    add("wor_last/add_remove/outer", outer, (one, eight), 2)
    add("all_drawn/add_remove/flat", flat, (one, eight), 2)
    add("all_drawn/add_remove/outer", near, (one, trees.Scheme(one.kind, 9)), 2)
    add("poisson_last/add_remove/flat", flat, (one, half), 2)
    add("poisson_last/add_remove/outer", lone, (one, often), 2, s=2.0)
    for name, design in list(designs.items()):
        row, relation, variant = name.split("/")
        if relation == "add_remove":
            zeroed = design._replace(relation="zero_out")
            designs[f"{row}/zero_out/{variant}"] = zeroed
    return designs | _zeroed_designs(half, two)


def _zeroed_designs(coin: trees.Scheme, two: trees.Scheme) -> dict[str, trees.Design]:
    """Classes that are protected: clipped above, at and below their level."""
    tree, lone = _uniform_tree((3, 2)), _uniform_tree((3,))
    every = trees.Scheme("poisson", 1.0)
    rows = {
        "below/zero_out/poisson": (tree, (coin, every), 2),
        "below/zero_out/wor": (tree, (two, two), 2),
        "one level/zero_out/poisson": (lone, (coin,), 1),
        "one level/zero_out/wor": (lone, (two,), 1),
        "one level/zero_out/step": (lone, (coin,), 0),
        "class/zero_out/wor": (tree, (two, two), 1),
        "class/zero_out/poisson": (tree, (coin, two), 1),
    }
    return {
        name: trees.Design(root, schemes, clip, (0,), "zero_out", 0.7)
        for name, (root, schemes, clip) in rows.items()
    }


def _uniform_tree(sizes: tuple[int, ...], name: str = "r") -> Any:
    """A unit with equally many children everywhere at each level below."""
    if not sizes:
        return name
    return name, tuple(_uniform_tree(sizes[1:], f"{name}{i}") for i in range(sizes[0]))


def worst_ratio(true: tuple, claim: tuple) -> float:
    """Largest true/claimed over both directions where the claim can be judged."""
    ratios = [0.0]
    for actual, bound in zip(true, claim, strict=True):
        judged = bound > CLAIM_FLOOR
        ratios += list(actual[judged] / bound[judged])
        if np.any(actual[~judged] > 2 * CLAIM_FLOOR):
            ratios.append(np.inf)
    return float(max(ratios))


def climb(
    rng: np.random.Generator, ratio: Ratio, start: Table, *, sweeps: int = 2
) -> tuple[float, Table]:
    """Change one contribution at a time to another of {-1, 0, 1} while it helps."""
    best, table = ratio(start), dict(start)
    keys = list(table)
    for _ in range(sweeps):
        before = best
        for i in rng.permutation(len(keys)):
            for value in (-1.0, 0.0, 1.0):
                if value == table[keys[i]]:
                    continue
                trial = {**table, keys[i]: value}
                score = ratio(trial)
                if score > best:
                    best, table = score, trial
        if best == before:
            break
    return best, table
